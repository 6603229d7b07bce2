// What share of L2 and HBM does an SM get for a burst? One CTA an SM loads `bytes` (bulk copies of 8 KiB that one mbarrier
// counts), computes for `gap` cycles (a spin) and loads again, round after round, as tiles of a kernel do. All begin together
// behind a grid barrier. A row a burst: which SM, round, global timer at its start, cycles from the first issue to the last byte.
//   hbm: bytes that nobody has read; l2: bytes that were read before, each SM its own; shared: unread bytes, eight SMs the same.
#include "async_ptx.cuh"

constexpr int kPiece = 8192, kMostBytes = 192 * 1024, kMostRounds = 64;

struct Burst {
    unsigned long long begin_ns, cycles;
};

__device__ unsigned arrived_ctas;

__global__ void __launch_bounds__(32, 1)
    burst_kernel(const char* data, int bytes, int gap, int rounds, size_t round_stride, int sharers, Burst* bursts) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ __align__(8) unsigned long long word;
    uint32_t barrier = shared_address(&word), to = shared_address(smem);
    if (threadIdx.x != 0) return;
    barrier_init(barrier, 1);
    barrier_init_fence();
    proxy_fence();
    atomicAdd(&arrived_ctas, 1);
    while (*reinterpret_cast<volatile unsigned*>(&arrived_ctas) < gridDim.x) {
    }
    const char* mine = data + size_t(blockIdx.x / sharers) * bytes;
    for (int round = 0; round < rounds; ++round) {
        unsigned long long ns = read_globaltimer();
        Cycles begin = read_clock();
        barrier_arrive_expect(barrier, bytes);
        for (int piece = 0; piece < bytes; piece += kPiece)
            bulk_load(to + piece, mine + round * round_stride + piece, kPiece, barrier);
        while (!barrier_try(barrier, round & 1)) {
        }
        Cycles end = read_clock();
        bursts[blockIdx.x * rounds + round] = {ns, end - begin};
        spin_cycles(gap);
    }
}

__global__ void read_all(const float4* p, size_t count, float* sink) {
    float s = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) s += __ldcg(p + i).x;
    if (s == 1.2345f) *sink = s;
}

int main() {
    int sms = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    size_t most = size_t(sms) * kMostBytes * kMostRounds, other = size_t(256) << 20;
    DeviceArray<char> data(most), cold(other);
    DeviceArray<Burst> bursts(size_t(sms) * kMostRounds);
    DeviceArray<float> sink(1);
    CHECK_CUDA(cudaMemset(data.get(), 1, most));
    CHECK_CUDA(cudaMemset(cold.get(), 1, other));
    CHECK_CUDA(cudaFuncSetAttribute(burst_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes));
    std::printf("where,ctas,bytes,gap,repeat,cta,round,begin_ns,cycles\n");
    const int rounds = 32;
    for (const char* where : {"hbm", "l2", "shared"})
        for (int ctas : {1, sms})
            for (int bytes : {16384, 32768, 98304, 196608})
                for (int gap : {1000, 4000, 16000})
                    for (int repeat = 0; repeat < 2; ++repeat) {
                        bool in_l2 = where[0] == 'l';
                        if (in_l2 && size_t(ctas) * bytes > (size_t(20) << 20)) continue;
                        int sharers = where[0] == 's' ? 8 : 1;
                        size_t stride = in_l2 ? 0 : size_t(sms) * bytes;
                        unsigned zero = 0;
                        CHECK_CUDA(cudaMemcpyToSymbol(arrived_ctas, &zero, sizeof zero));
                        read_all<<<sms * 8, 256>>>(reinterpret_cast<float4*>(cold.get()), other / 16, sink.get());
                        for (int pass = 0; in_l2 && pass < 2; ++pass)
                            read_all<<<sms * 8, 256>>>(reinterpret_cast<float4*>(data.get()), size_t(ctas) * bytes / 16, sink.get());
                        burst_kernel<<<ctas, 32, kMostBytes>>>(data.get(), bytes, gap, rounds, stride, sharers, bursts.get());
                        CHECK_CUDA(cudaDeviceSynchronize());
                        auto rows = bursts.to_host(size_t(ctas) * rounds);
                        unsigned long long first = ~0ull;
                        for (auto& row : rows) first = std::min(first, row.begin_ns);
                        for (int i = 0; i < ctas * rounds; ++i)
                            std::printf("%s,%d,%d,%d,%d,%d,%d,%llu,%llu\n", where, ctas, bytes, gap, repeat, i / rounds, i % rounds,
                                        rows[i].begin_ns - first, rows[i].cycles);
                    }
}
