// Instruction fetch: a straight line of code passed three times, and blocks of code in an order that no prefetch can guess.
#pragma once

#include "cold_state.cuh"

constexpr int kPasses = 3;

// `kChains` 8: an instruction a cycle where the code is at hand; 1: every fourth cycle, as dependent code issues.
template <int kInstructions, int kChains>
__global__ void straight_line(unsigned* stamps, float* sink, float x, int passes) {
    float f[kChains];
    for (int i = 0; i < kChains; ++i) f[i] = x + i;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
        __syncthreads();
        unsigned begin = clock();
        straight_code<kInstructions, kChains, 0>(f, x);
        unsigned end = clock();
        if (threadIdx.x == 0) stamps[blockIdx.x * passes + pass] = end - begin;
    }
    float sum = 0;
    for (float each : f) sum += each;
    if (sum == 1.2345f) *sink = sum;
}

template <int kBlock, int kNumber>
__device__ __forceinline__ void numbered_block(float (&f)[8], float x) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) // the block's number in each instruction keeps blocks apart
        asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(f[i % 8]) : "f"(x), "f"(1.0f + kNumber / 64.0f));
}

#define COLD_CASE(n) \
    case n: numbered_block<kBlock, (n)>(f, x); break;
#define COLD_CASES4(n) COLD_CASE(n) COLD_CASE(n + 1) COLD_CASE(n + 2) COLD_CASE(n + 3)
#define COLD_CASES16(n) COLD_CASES4(n) COLD_CASES4(n + 4) COLD_CASES4(n + 8) COLD_CASES4(n + 12)

// 64 blocks of `kBlock` instructions, each reached by an indirect branch; block i * stride % 64 comes i-th.
template <int kBlock>
__global__ void jumps(unsigned* stamps, float* sink, float x, int passes, int stride) {
    float f[8];
    for (int i = 0; i < 8; ++i) f[i] = x + i;
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
        __syncthreads();
        unsigned begin = clock();
#pragma unroll 1
        for (int i = 0; i < 64; ++i) switch (i * stride % 64) {
                COLD_CASES16(0)
                COLD_CASES16(16)
                COLD_CASES16(32)
                COLD_CASES16(48)
            }
        unsigned end = clock();
        if (threadIdx.x == 0) stamps[blockIdx.x * passes + pass] = end - begin;
    }
    float sum = 0;
    for (float each : f) sum += each;
    if (sum == 1.2345f) *sink = sum;
}

template <int kInstructions, int kChains>
void measure_line(Bench& bench) {
    std::string param = std::to_string(kInstructions * 16) + (kChains == 1 ? "_bytes_dependent" : "_bytes");
    for (int ctas : {1, bench.sms})
        for (int warps : {4, 12})
            bench.measure("straight_line", ctas, warps, param, kPasses, [&] {
                straight_line<kInstructions, kChains><<<ctas, 32 * warps>>>(bench.stamps, bench.sink, 1.0f, kPasses);
            });
}

template <int kBlock>
void measure_jumps(Bench& bench) {
    for (int ctas : {1, bench.sms})
        for (int stride : {1, 27})
            bench.measure("jumps", ctas, 4, "64_blocks_of_" + std::to_string(kBlock * 16) + "_bytes_stride_" + std::to_string(stride),
                          kPasses, [&] { jumps<kBlock><<<ctas, 128>>>(bench.stamps, bench.sink, 1.0f, kPasses, stride); });
}

inline void measure_code(Bench& bench) {
    measure_line<64, 8>(bench);
    measure_line<256, 8>(bench);
    measure_line<1024, 8>(bench);
    measure_line<2048, 8>(bench);
    measure_line<4096, 8>(bench);
    measure_line<8192, 8>(bench);
    measure_line<16384, 8>(bench);
    measure_line<64, 1>(bench);
    measure_line<256, 1>(bench);
    measure_line<1024, 1>(bench);
    measure_line<2048, 1>(bench);
    measure_jumps<8>(bench);
    measure_jumps<16>(bench);
    measure_jumps<32>(bench);
}
