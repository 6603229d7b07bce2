// How long a tile takes through the copy engine when its rows lie far apart, as in attention's layout (row, head, column): each CTA
// loads and stores a tile of 128 rows x `columns` in boxes of 64 columns (128 B a row), heads side by side. Cycles from the first
// issue to the wait's end, of the slowest, median and fastest CTA.
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o tma_rows tma_rows.cu; ./tma_rows > tma_rows.csv
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

#define CHECK_CUDA(call)                                                                       \
    if (cudaError_t error = (call); error != cudaSuccess) {                                    \
        std::fprintf(stderr, "[tma_rows] %s: %s\n", #call, cudaGetErrorString(error));         \
        std::exit(1);                                                                          \
    }

constexpr int kRows = 128, kBoxColumns = 64, kBoxBytes = kRows * kBoxColumns * 2, kSteps = 4;

__device__ __forceinline__ uint32_t in_shared(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

struct Plan {
    int heads, columns, blocks; // tile t: head t / blocks, row block t % blocks
};

// Step i handles tile (blockIdx.x + i * gridDim.x); `apart`: cycles between steps' starts.
template <bool kStore>
__global__ void tiles(const __grid_constant__ CUtensorMap map, Plan plan, unsigned* stamps) {
    extern __shared__ __align__(1024) char raw[];
    __shared__ __align__(8) uint64_t barrier;
    if (threadIdx.x) return;
    uint32_t shared = (in_shared(raw) + 1023) & ~1023u, bar = in_shared(&barrier);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
    for (unsigned start = clock(); clock() - start < 4000;) {
    }
    int boxes = plan.columns / kBoxColumns;
#pragma unroll 1
    for (int i = 0; i < kSteps; ++i) {
        int tile = blockIdx.x + i * gridDim.x, head = tile / plan.blocks, y = tile % plan.blocks * kRows;
        unsigned begin = clock();
        if (!kStore) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(boxes * kBoxBytes) : "memory");
        for (int box = 0; box < boxes; ++box) {
            int x = head * plan.columns + box * kBoxColumns;
            uint32_t place = shared + box * kBoxBytes;
            if (kStore)
                asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x), "r"(y),
                             "r"(place)
                             : "memory");
            else
                asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                             ::"r"(place), "l"(&map), "r"(x), "r"(y), "r"(bar)
                             : "memory");
        }
        if (kStore) {
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        } else {
            uint32_t done = 0;
            for (int tries = 0; !done; ++tries) {
                asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                             : "=r"(done)
                             : "r"(bar), "r"(i & 1)
                             : "memory");
                if (tries > (1 << 20)) asm volatile("trap;");
            }
        }
        stamps[blockIdx.x * kSteps + i] = clock() - begin;
        for (unsigned start = begin; clock() - start < 40000;) { // all CTAs begin the next step together, more or less
        }
    }
}

CUtensorMap map_of(char* data, int heads, int columns, int rows) {
    static auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    CUtensorMap map{};
    cuuint64_t pitch = cuuint64_t(heads) * columns * 2, dims[2] = {pitch / 2, cuuint64_t(rows)}, strides[1] = {pitch};
    cuuint32_t box[2] = {kBoxColumns, kRows}, steps[2] = {1, 1};
    if (encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        std::exit(2);
    return map;
}

int main() {
    int sms = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    char *data = nullptr, *flush = nullptr;
    unsigned* stamps = nullptr;
    constexpr size_t kBytes = size_t(256) << 20;
    CHECK_CUDA(cudaMalloc(&data, kBytes));
    CHECK_CUDA(cudaMalloc(&flush, kBytes));
    CHECK_CUDA(cudaMalloc(&stamps, sms * kSteps * sizeof(unsigned)));
    CHECK_CUDA(cudaMemset(data, 0, kBytes));
    for (auto kernel : {tiles<false>, tiles<true>}) CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 130 * 1024));
    std::printf("what,state,ctas,heads,columns,step,cycles_least,cycles_median,cycles_most\n");
    for (int ctas : {1, 33, sms})
        for (int columns : {64, 128, 256})
            for (int heads : {1, 4, 16, 32, 33, 64, 66, 132})
                for (bool store : {false, true})
                    for (const char* state : {"again", "flushed"}) {
                        // tiles of all steps: whole heads' rows
                        int blocks = (ctas * kSteps + heads - 1) / heads;
                        if (size_t(heads) * columns * 2 * blocks * kRows > kBytes) continue;
                        CUtensorMap map = map_of(data, heads, columns, blocks * kRows);
                        auto run = [&] { (store ? tiles<true> : tiles<false>)<<<ctas, 32, 130 * 1024>>>(map, Plan{heads, columns, blocks}, stamps); };
                        std::vector<unsigned> values[kSteps][3];
                        for (int repeat = 0; repeat < 3; ++repeat) {
                            run();
                            if (state[0] == 'f') CHECK_CUDA(cudaMemset(flush, repeat, kBytes));
                            run();
                            std::vector<unsigned> found(ctas * kSteps);
                            CHECK_CUDA(cudaMemcpy(found.data(), stamps, found.size() * 4, cudaMemcpyDeviceToHost));
                            for (int step = 0; step < kSteps; ++step) {
                                std::vector<unsigned> of;
                                for (int cta = 0; cta < ctas; ++cta) of.push_back(found[cta * kSteps + step]);
                                std::sort(of.begin(), of.end());
                                values[step][0].push_back(of.front());
                                values[step][1].push_back(of[of.size() / 2]);
                                values[step][2].push_back(of.back());
                            }
                        }
                        for (int step = 0; step < kSteps; ++step) {
                            for (auto& v : values[step]) std::sort(v.begin(), v.end());
                            std::printf("%s,%s,%d,%d,%d,%d,%u,%u,%u\n", store ? "store" : "load", state, ctas, heads, columns, step,
                                        values[step][0][1], values[step][1][1], values[step][2][1]);
                        }
                        std::fflush(stdout);
                    }
}
