// Streams of several kinds of instruction in one warp: the softmax mix in two orders, pairs of pipes, HMMA with ALU work.
// All instructions are volatile, and the order was checked in the SASS, since the order is what these streams ask about.
#pragma once

#include "streams_alu.cuh"

// Per element FMNMX, FFMA, EX2, FADD and half an F2FP. kInst counts elements; an element is kInstPerElement instructions.
// An exponential is the element's next input and the sums are summed, so nothing but the mix is executed.
struct MixState {
    static constexpr int kElements = 32, kSums = 8;
    static constexpr double kInstPerElement = 4.5;
    float x[kElements], sum[kSums], floor_, scale, bias;

    __device__ void init(const Context& c) {
        for (int i = 0; i < kElements; ++i) x[i] = c.bounded(i);
        for (int i = 0; i < kSums; ++i) sum[i] = 0;
        floor_ = 0.1f * c.bounded(33);
        scale = -c.bounded(34);
        bias = c.bounded(35) - 0.5f;
    }
    __device__ __forceinline__ void fmnmx(int i) { asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(floor_)); }
    __device__ __forceinline__ void ffma(int i) {
        asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(scale), "f"(bias));
    }
    __device__ __forceinline__ void exponential(int i) { x[i] = ex2(x[i]); }
    __device__ __forceinline__ void fadd(int i) {
        asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sum[i % kSums]) : "f"(x[i]));
    }
    // The packed pair replaces an element: a result nobody reads would be removed by ptxas, volatile or not.
    __device__ __forceinline__ void pack(int i) { x[i] = pack_bf16x2(x[i], x[i + 1]); }
    __device__ float sink() {
        float s = 0;
        for (int i = 0; i < kElements; ++i) s += x[i];
        for (int i = 0; i < kSums; ++i) s += sum[i];
        return s;
    }
};

// Kind by kind over 32 elements: the order of compiled softmax code (maxima, then scale, then exponentials, ...).
struct SoftmaxMix : MixState {
    static constexpr int kInst = kElements;
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) fmnmx(i);
#pragma unroll
        for (int i = 0; i < kElements; ++i) ffma(i);
#pragma unroll
        for (int i = 0; i < kElements; ++i) exponential(i);
#pragma unroll
        for (int i = 0; i < kElements; ++i) fadd(i);
#pragma unroll
        for (int i = 0; i < kElements; i += 2) pack(i);
    }
};

// One instruction of each kind in turn, each kind kLag elements behind the one before it, so that no result is waited for.
struct MixInterleaved : MixState {
    static constexpr int kInst = kElements, kLag = 6;
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            // Modulo the ring of elements: an element's FFMA comes kLag slots after its FMNMX, also across the loop's edge.
            fmnmx(i);
            ffma((i + kElements - kLag) % kElements);
            exponential((i + kElements - 2 * kLag) % kElements);
            fadd((i + kElements - 4 * kLag) % kElements);
            if (i % 2 == 1) pack((i + kElements - 4 * kLag - 1) % kElements);
        }
    }
};

// Two pipes taking turns, one instruction each. kInst counts both.
template <class First, class Second>
struct Alternate {
    static constexpr int kChains = 16, kRounds = 4;
    static constexpr int kInst = 2 * kChains * kRounds;
    Chains<First, kChains, 1> first;
    Chains<Second, kChains, 1> second;

    __device__ void init(const Context& c) {
        first.init(c);
        second.init(c);
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
#pragma unroll
            for (int i = 0; i < kChains; ++i) {
                first.apply(i, r);
                second.apply(i, r);
            }
        }
    }
    __device__ float sink() { return first.sink() + second.sink(); }
};

// kPerHmma ALU instructions after each HMMA in one warp: does an HMMA leave issue slots to its own warp? kInst counts HMMA.
template <class Op, int kPerHmma>
struct HmmaWith {
    static constexpr int kChains = 8, kInst = 32;
    float c[kChains][4];
    uint32_t a[2][4], b[4][2];
    Chains<Op, 16, 1> alu;

    __device__ void init(const Context& ctx) {
        for (int i = 0; i < kChains; ++i)
            for (int j = 0; j < 4; ++j) c[i][j] = 0;
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = ctx.bits(i);
        for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = ctx.bits(8 + i);
        alu.init(ctx);
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int n = 0; n < kInst; ++n) {
            hmma(c[n % kChains], a[(n / 4) % 2], b[n % 4][0], b[n % 4][1]);
#pragma unroll
            for (int k = 0; k < kPerHmma; ++k) {
                int t = n * kPerHmma + k;
                alu.apply(t % 16, t / 16);
            }
        }
    }
    __device__ float sink() {
        float s = alu.sink();
        for (int i = 0; i < kChains; ++i) s += c[i][0] + c[i][1] + c[i][2] + c[i][3];
        return s;
    }
};
