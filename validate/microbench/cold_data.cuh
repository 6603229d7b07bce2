// First use of kernel arguments, tensor maps and pages, and how long a bulk store reads shared memory.
#pragma once

#include <cstdint>

#include "cold_state.cuh"

#define COLD_WAIT(value) asm volatile("{.reg .pred p; setp.eq.u32 p, %0, 0x7fffffff; @p trap;}" ::"r"(value))

struct Arguments {
    unsigned next[1000];
};

// Operands in constant memory, 56 of them in `kLines` lines of 64 bytes and 64 more in their four first lines. What registers hold is
// loaded (ULDC) once, before the loop: from the first stamp to the second. The rest is loaded in each pass.
template <int kLines>
__global__ void argument_operands(const __grid_constant__ Arguments arguments, unsigned* stamps, int passes) {
    unsigned start = clock(), sum = start, before = start;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
        unsigned begin = clock();
        if (threadIdx.x == 0) stamps[blockIdx.x * 2 * passes + 2 * pass] = begin - before;
#pragma unroll
        for (int i = 0; i < 120; ++i)
            asm volatile("mad.lo.u32 %0, %0, %1, %2;"
                         : "+r"(sum)
                         : "r"(sum), "r"(arguments.next[i < 64 ? i : 64 + (i - 64) % kLines * 16 + (i - 64) / kLines % 16]));
        COLD_WAIT(sum);
        before = clock();
        if (threadIdx.x == 0) stamps[blockIdx.x * 2 * passes + 2 * pass + 1] = before - begin;
    }
}

// The same by LDC, each read's place found in the one before; the last 16 hops come back to places that were read.
__global__ void argument_chain(const __grid_constant__ Arguments arguments, unsigned* stamps) {
    unsigned at = 0;
#pragma unroll 1
    for (int i = 0; i < 48; ++i) {
        unsigned begin = clock();
        at = arguments.next[at];
        COLD_WAIT(at);
        unsigned end = clock();
        if (threadIdx.x == 0) stamps[blockIdx.x * 48 + i] = end - begin;
    }
}

// Thread 0: a word, another of the same 2 MiB page, a word of the next page, and so on, each address after the word before.
__global__ void touch_pages(const char* base, size_t cta_step, size_t page_step, int pages, unsigned* stamps) {
    size_t at = blockIdx.x * cta_step;
#pragma unroll 1
    for (int i = 0; i < 16; ++i) {
        unsigned value, begin = clock();
        const char* address = base + (at + size_t(i / 2) * page_step) % (size_t(pages) << 21) + (i % 2) * (1 << 20) + blockIdx.x * 256;
        asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
        COLD_WAIT(value);
        unsigned end = clock();
        at += value; // zero
        stamps[blockIdx.x * 16 + i] = end - begin;
    }
}

constexpr int kPasses = 3;

enum CopyKind { kBulk, kTensor, kTensorPrefetched };
constexpr int kCopyBytes = 8192;

__device__ __forceinline__ uint32_t in_shared(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void wait_phase(uint32_t barrier, uint32_t parity) {
    uint32_t done = 0;
    for (int tries = 0; !done; ++tries) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
        if (tries > (1 << 20)) asm volatile("trap;");
    }
}

// Four copies of 8 KiB one after the other, from issue to the wait's end.
template <CopyKind kKind>
__global__ void load_copies(const __grid_constant__ CUtensorMap map, const char* data, unsigned* stamps) {
    __shared__ __align__(1024) char to[kCopyBytes];
    __shared__ __align__(8) uint64_t barrier;
    if (threadIdx.x) return;
    uint32_t bar = in_shared(&barrier), shared = in_shared(to);
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (kKind == kTensorPrefetched) asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
    for (unsigned begin = clock(); clock() - begin < 4000;) {
    }
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        int number = blockIdx.x * 4 + i; // the box's row of 64 rows
        unsigned begin = clock();
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(kCopyBytes) : "memory");
        if (kKind == kBulk)
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
                         "l"(data + size_t(number) * kCopyBytes), "r"(kCopyBytes), "r"(bar)
                         : "memory");
        else
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                         ::"r"(shared), "l"(&map), "r"(0), "r"(number * 64), "r"(bar)
                         : "memory");
        wait_phase(bar, i & 1);
        stamps[blockIdx.x * 4 + i] = clock() - begin;
    }
}

// Stores of `bytes` from shared memory: plain or in tensor boxes of 8 KiB, until shared memory may be written (kRead) or all is done.
template <bool kTensorStore, bool kRead>
__global__ void store_copies(const __grid_constant__ CUtensorMap map, char* data, int bytes, unsigned* stamps) {
    extern __shared__ __align__(1024) char from[];
    if (threadIdx.x) return;
    uint32_t shared = (in_shared(from) + 1023) & ~1023u;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        int number = blockIdx.x * 4 + i;
        unsigned begin = clock();
        if (kTensorStore) {
            for (int box = 0; box < bytes / kCopyBytes; ++box)
                asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(0),
                             "r"((number * (bytes / kCopyBytes) + box) * 64), "r"(shared + box * kCopyBytes)
                             : "memory");
        } else {
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(data + size_t(number) * bytes), "r"(shared),
                         "r"(bytes)
                         : "memory");
        }
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        if (kRead)
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        else
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        stamps[blockIdx.x * 4 + i] = clock() - begin;
    }
}

inline CUtensorMap boxes_of_8k(char* data, size_t bytes) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    CUtensorMap map{};
    cuuint64_t dims[2] = {64, bytes / 128}, strides[1] = {128};
    cuuint32_t box[2] = {64, 64}, steps[2] = {1, 1};
    CUresult result = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        std::fprintf(stderr, "[cold_start] cuTensorMapEncodeTiled returned %d\n", int(result));
        std::exit(1);
    }
    return map;
}

inline void measure_stores(Bench& bench, const CUtensorMap& map, char* data) {
    for (int ctas : {1, bench.sms})
        for (int bytes : {8192, 16384, 32768, 65536}) {
            std::string of = std::to_string(bytes);
            auto run = [&](const char* name, auto kernel) {
                CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 120 * 1024));
                bench.measure(name, ctas, 1, of, 4, [&] { kernel<<<ctas, 32, 120 * 1024>>>(map, data, bytes, bench.stamps); });
            };
            run("bulk_store_read", store_copies<false, true>);
            run("bulk_store_complete", store_copies<false, false>);
            run("tensor_store_read", store_copies<true, true>);
            run("tensor_store_complete", store_copies<true, false>);
        }
}

inline void measure_data(Bench& bench) {
    constexpr size_t kBytes = size_t(2) << 30;
    char* data = nullptr;
    CHECK_CUDA(cudaMalloc(&data, kBytes));
    CHECK_CUDA(cudaMemset(data, 0, kBytes));
    CUtensorMap map = boxes_of_8k(data, kBytes);
    Arguments arguments{};
    for (int i = 0; i < 1000; ++i) arguments.next[i] = (i + 16) % 512;
    for (int ctas : {1, bench.sms}) {
        bench.measure("argument_chain", ctas, 1, "each_64_bytes", 48, [&] { argument_chain<<<ctas, 32>>>(arguments, bench.stamps); });
        auto operands = [&](int lines, auto kernel) {
            for (int warps : {1, 8})
                bench.measure("argument_operands", ctas, warps, "lines=" + std::to_string(lines), 2 * kPasses, [&] { kernel<<<ctas, 32 * warps>>>(arguments, bench.stamps, kPasses); });
        };
        operands(1, argument_operands<1>);
        operands(8, argument_operands<8>);
        operands(16, argument_operands<16>);
        operands(56, argument_operands<56>);
        bench.measure("pages", ctas, 1, "own", 16, [&] { touch_pages<<<ctas, 32>>>(data, size_t(14) << 21, size_t(1) << 21, 1000, bench.stamps); });
        bench.measure("pages", ctas, 1, "shared", 16, [&] { touch_pages<<<ctas, 32>>>(data, 0, size_t(37) << 21, 1000, bench.stamps); });
        bench.measure("bulk_load", ctas, 1, "8192", 4, [&] { load_copies<kBulk><<<ctas, 32>>>(map, data, bench.stamps); });
        bench.measure("tensor_load", ctas, 1, "8192", 4, [&] { load_copies<kTensor><<<ctas, 32>>>(map, data, bench.stamps); });
        bench.measure("tensor_load_prefetched", ctas, 1, "8192", 4, [&] { load_copies<kTensorPrefetched><<<ctas, 32>>>(map, data, bench.stamps); });
    }
    measure_stores(bench, map, data);
    CHECK_CUDA(cudaFree(data));
}
