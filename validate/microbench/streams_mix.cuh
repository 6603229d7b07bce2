// Streams of several kinds of instruction in one warp: the softmax mix in two orders, pairs of pipes, HMMA with ALU work.
// Regions (regions.cuh) and data dependences hold the order, which is what these streams ask about; it was read in the SASS.
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

// Kind by kind over 32 elements: the order of softmax code (maxima, then scale, then exponentials, ...). Four passes a step.
struct SoftmaxMix : MixState {
    static constexpr int kKinds = 5, kPasses = 4, kRegions = kKinds * kPasses;
    static constexpr int kInst = kPasses * kElements;
    template <int kRegion>
    __device__ __forceinline__ void region() {
        constexpr int kKind = kRegion % kKinds;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            if constexpr (kKind == 0) fmnmx(i);
            if constexpr (kKind == 1) ffma(i);
            if constexpr (kKind == 2) exponential(i);
            if constexpr (kKind == 3) fadd(i);
            if constexpr (kKind == 4)
                if (i % 2 == 0) pack(i);
        }
    }
};

// The same instructions in turn, each kind some elements behind the one before it, so that no result is waited for. The
// elements are a ring: what an element lacks at the end of a pass it gets at the start of the next.
struct MixInterleaved : MixState {
    static constexpr int kLag = 6, kPerRegion = 2, kRegions = 64;
    static constexpr int kInst = kRegions * kPerRegion;
    template <int kRegion>
    __device__ __forceinline__ void region() {
#pragma unroll
        for (int k = 0; k < kPerRegion; ++k) {
            int i = kRegion * kPerRegion + k + 8 * kElements; // the offset keeps the differences positive
            fmnmx(i % kElements);
            ffma((i - kLag) % kElements);
            exponential((i - 2 * kLag) % kElements);
            fadd((i - 4 * kLag) % kElements);
            if (i % 2 == 1) pack((i - 4 * kLag - 1) % kElements);
        }
    }
};

// Two pipes taking turns, one instruction each, in kCount regions of kPerRegion pairs. kInst counts both.
template <class First, class Second, int kCount, int kPerRegion>
struct Alternate {
    static constexpr int kChains = 16, kRegions = kCount;
    static constexpr int kInst = 2 * kRegions * kPerRegion;
    Chains<First, kChains, 1> first;
    Chains<Second, kChains, 1> second;

    __device__ void init(const Context& c) {
        first.init(c);
        second.init(c);
    }
    template <int kRegion>
    __device__ __forceinline__ void region() {
#pragma unroll
        for (int i = kRegion * kPerRegion; i < (kRegion + 1) * kPerRegion; ++i) {
            first.apply(i % kChains, i / kChains);
            second.apply(i % kChains, i / kChains);
        }
    }
    __device__ float sink() { return first.sink() + second.sink(); }
};

// ALU operations of HmmaWith on an operand register x; both leave its random bf16 pair as it is. The product is too small to
// change x; the integers added and subtracted are equal, which the compiler cannot know.
struct FfmaOnOperand {
    __device__ void init(const Context&) {}
    __device__ __forceinline__ void apply(uint32_t& x, float accumulator) {
        asm volatile("{.reg .f32 t; mov.b32 t, %0; fma.rn.f32 t, %1, %2, t; mov.b32 %0, t;}"
                     : "+r"(x)
                     : "f"(accumulator), "f"(0x1p-100f));
    }
};
struct IaddOnOperand {
    uint32_t up, down;
    __device__ void init(const Context& c) {
        up = c.bits(31);
        down = __shfl_sync(0xffffffffu, up, c.lane + c.zero);
    }
    __device__ __forceinline__ void apply(uint32_t& x, float) {
        asm volatile("{.reg .u32 t; add.u32 t, %0, %1; sub.u32 %0, t, %2;}" : "+r"(x) : "r"(up), "r"(down));
    }
};

// kPerHmma ALU instructions to each HMMA in one warp: does an HMMA leave issue slots to its own warp? kInst counts HMMA.
// What ALU group n writes is the B (with four, the A) operand of HMMA n + 3, so ptxas cannot put it off; and FFMA reads what
// HMMA n - 5 (long done) has accumulated, so it cannot come early either. That spreads the ALU instructions evenly.
template <class Alu, int kPerHmma>
struct HmmaWith {
    static constexpr int kChains = 8, kInst = 128;
    static constexpr int kWidth = kPerHmma == 4 ? 4 : 2, kOperands = kPerHmma == 4 ? 4 : 8; // an operand's registers, operands
    float c[kChains][4];
    uint32_t x[kOperands][kWidth], fixed[2][4];
    Alu alu;

    __device__ void init(const Context& ctx) {
        alu.init(ctx);
        for (int i = 0; i < kChains; ++i)
            for (int j = 0; j < 4; ++j) c[i][j] = 0;
        for (int i = 0; i < kOperands * kWidth; ++i) x[i / kWidth][i % kWidth] = ctx.bits(i);
        for (int i = 0; i < 8; ++i) fixed[i / 4][i % 4] = ctx.bits(16 + i);
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int n = 0; n < kInst; ++n) {
            uint32_t(&ready)[kWidth] = x[(n + kOperands - 3) % kOperands];
            uint32_t(&other)[4] = fixed[(n / 4) % 2];
            if constexpr (kWidth == 4)
                hmma(c[n % kChains], ready, other[0], other[1]);
            else
                hmma(c[n % kChains], other, ready[0], ready[1]);
#pragma unroll
            for (int k = 0; k < kPerHmma; ++k) alu.apply(x[n % kOperands][k], c[(n + 3) % kChains][k]);
        }
    }
    __device__ float sink() {
        float s = 0;
        for (int i = 0; i < kOperands * kWidth; ++i) s += __uint_as_float(x[i / kWidth][i % kWidth]);
        for (int i = 0; i < kChains; ++i) s += c[i][0] + c[i][1] + c[i][2] + c[i][3];
        return s;
    }
};
