// How fast does a sub-partition get its instructions? Straight lines of independent FFMAs, passed again and again.
//   one: all warps pass the same line; two: warps 0-3 one line, warps 4-7 another of the same size; four: warps 0, 1, 2 and 3 each
//   its own, and so on;
//   tile: a prologue, a first block, `trips` passes of a main block and an epilogue, round after round, as a CTA's tiles are.
// `issue`: a warp's instructions depend on the ones before it such that it issues every so-manieth cycle. `gap`: cycles from the
// start of one warp to that of the next; besides others what spreads them evenly over a pass. A row gives the cycles of a
// pass (a round) of a warp: least, mean, median and most over SMs, warps and passes, but for the first and last three.
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -o fetch fetch.cu
//   ./fetch > fetch.csv
#include <algorithm>
#include <cstdio>
#include <string>

#include "harness.cuh"

constexpr int kPasses = 24, kMostWarps = 12, kEdge = 3;
constexpr int kInstructionBytes = 16;
constexpr int kPrologue = 11, kFirst = 22, kMain = 26, kEpilogue = 11; // KiB, as FA2's at head_dim 64

// Every line has instructions of its own (an immediate factor names it), so that no two are folded into one.
template <int kKib, int kChains, int kName>
__device__ __forceinline__ void line(float (&f)[kChains], float x) {
#pragma unroll
    for (int i = 0; i < kKib * 1024 / kInstructionBytes; ++i)
        asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(f[i % kChains]) : "f"(x), "f"(1.0f + kName / 64.0f));
}

__device__ __forceinline__ unsigned stamp() {
    unsigned now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

template <int kChains>
__device__ void finish(const float (&f)[kChains], float* sink) {
    float sum = 0;
    for (float each : f) sum += each;
    if (sum == 1.2345f) *sink = sum;
}

__device__ __forceinline__ void wait_for_start(int delay) {
    __syncthreads();
    unsigned begin = stamp();
    while (stamp() - begin < unsigned(delay) * (threadIdx.x / 32)) {
    }
}

template <int kKib, int kChains>
__global__ void __launch_bounds__(32 * kMostWarps) bodies(unsigned* stamps, float* sink, float x, int delay, int lines) {
    float f[kChains];
    for (int i = 0; i < kChains; ++i) f[i] = x + i;
    int warp = threadIdx.x / 32, own = lines == 1 ? 0 : lines == 2 ? warp / 4 : warp % 4;
    unsigned* mine = stamps + (blockIdx.x * kMostWarps + warp) * kPasses;
    wait_for_start(delay);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
        unsigned begin = stamp();
        switch (own) {
            case 0: line<kKib, kChains, 1>(f, x); break;
            case 1: line<kKib, kChains, 2>(f, x); break;
            case 2: line<kKib, kChains, 7>(f, x); break;
            default: line<kKib, kChains, 8>(f, x);
        }
        unsigned end = stamp();
        if (threadIdx.x % 32 == 0) mine[pass] = end - begin;
    }
    finish(f, sink);
}

template <int kChains>
__global__ void __launch_bounds__(32 * kMostWarps) tiles(unsigned* stamps, float* sink, float x, int delay, int trips) {
    float f[kChains];
    for (int i = 0; i < kChains; ++i) f[i] = x + i;
    unsigned* mine = stamps + (blockIdx.x * kMostWarps + threadIdx.x / 32) * kPasses;
    wait_for_start(delay);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
        unsigned begin = stamp();
        line<kPrologue, kChains, 3>(f, x);
        line<kFirst, kChains, 4>(f, x);
#pragma unroll 1
        for (int trip = 0; trip < trips; ++trip) line<kMain, kChains, 5>(f, x);
        line<kEpilogue, kChains, 6>(f, x);
        unsigned end = stamp();
        if (threadIdx.x % 32 == 0) mine[pass] = end - begin;
    }
    finish(f, sink);
}

struct Case {
    const char* test;
    int kib, issue, ctas, warps, trips;
    int gap; // kSpread: a pass over the number of warps
};
constexpr int kSpread = -1;

template <class Launch>
void measure(const Case& c, DeviceArray<unsigned>& stamps, Launch launch) {
    int code = c.kib * 1024 / kInstructionBytes, per_partition = (c.warps + 3) / 4;
    int delay = c.gap == kSpread ? code * std::max(c.issue, per_partition) / c.warps : c.gap;
    launch(delay);
    CHECK_CUDA(cudaDeviceSynchronize());
    launch(delay);
    CHECK_CUDA(cudaDeviceSynchronize());
    auto found = stamps.to_host(size_t(c.ctas) * kMostWarps * kPasses);
    std::vector<unsigned> passes;
    double sum = 0;
    for (int cta = 0; cta < c.ctas; ++cta)
        for (int warp = 0; warp < c.warps; ++warp)
            for (int pass = kEdge; pass < kPasses - kEdge; ++pass) {
                passes.push_back(found[(size_t(cta) * kMostWarps + warp) * kPasses + pass]);
                sum += passes.back();
            }
    std::sort(passes.begin(), passes.end());
    std::printf("%s,%d,%d,%d,%d,%d,%d,%u,%.0f,%u,%u\n", c.test, c.kib, c.issue, c.ctas, c.warps, c.trips, delay, passes.front(),
                sum / passes.size(), passes[passes.size() / 2], passes.back());
    std::fflush(stdout);
}

struct Bench {
    int sms = 0;
    DeviceArray<unsigned>& stamps;
    float* sink;

    template <int kKib, int kChains>
    void bodies_of() {
        constexpr int issue = 4 / std::min(kChains, 4);
        constexpr const char* names[] = {"", "one", "two", "", "four"};
        for (int lines : {1, 2, 4})
            for (int ctas : {1, sms})
                for (int warps : {1, 2, 4, 8, 12})
                    for (int gap : {0, kSpread, 4, 16, 64, 256, 1024}) {
                        if (lines == 1 && gap > 0) continue;
                        if (lines == 2 && warps != 8) continue;
                        if (lines == 4 && (warps < 4 || warps > 8 || kKib > 48)) continue;
                        if (warps == 1 && gap != 0) continue;
                        measure({names[lines], kKib, issue, ctas, warps, 0, gap}, stamps, [&](int delay) {
                            bodies<kKib, kChains><<<ctas, 32 * warps>>>(stamps.get(), sink, 1.0f, delay, lines);
                        });
                    }
    }

    template <int kChains, int... kKib>
    void all_bodies() {
        (bodies_of<kKib, kChains>(), ...);
    }

    template <int kChains>
    void all_tiles() {
        constexpr int issue = 4 / std::min(kChains, 4);
        for (int trips : {0, 1, 2, 3, 8})
            for (int ctas : {1, sms})
                for (int warps : {4, 8})
                    for (int gap : {0, kSpread})
                        measure({"tile", kPrologue + kFirst + kEpilogue + trips * kMain, issue, ctas, warps, trips, gap}, stamps,
                                [&](int delay) { tiles<kChains><<<ctas, 32 * warps>>>(stamps.get(), sink, 1.0f, delay, trips); });
    }

    template <int kChains>
    void all() {
        all_bodies<kChains, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 160>();
        if constexpr (kChains == 8) all_bodies<kChains, 8, 14, 18, 30, 31, 33, 34, 36>();
        all_tiles<kChains>();
    }
};

int main() {
    int sms = 0;
    CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    DeviceArray<unsigned> stamps(size_t(sms) * kMostWarps * kPasses);
    DeviceArray<float> sink(1);
    std::printf("test,kib,issue,ctas,warps,trips,gap,cycles_least,cycles_mean,cycles_median,cycles_most\n");
    Bench bench{sms, stamps, sink.get()};
#ifndef ISSUE
    bench.all<8>();
    bench.all<2>();
    bench.all<1>();
#else
    bench.all<ISSUE>();
#endif
}
