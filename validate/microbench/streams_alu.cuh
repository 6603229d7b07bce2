// Streams of register-to-register instructions: kChains independent chains, kRounds instructions on each per step.
// A stream has init / step / sink; kInst is the number of instructions (or mix elements) of one step.
#pragma once

#include "ptx.cuh"

// What every stream may read at init.
struct Context {
    const float* normal;    // kDataCount standard normal floats (zeros in the zero-data runs)
    const uint32_t* bf16x2; // kDataCount packed pairs of the same distribution
    const char* l2_resident;
    uint32_t smem; // shared address of the stream tables
    int warp;
    int lane;
    int zero; // 0, unknown to the compiler (regions.cuh)

    // A value in [0.25, 0.95]: products and sums of it stay finite and non-zero over any loop length.
    __device__ float bounded(int i) const { return 0.25f + 0.7f / (1.0f + fabsf(normal[(i * 32 + lane) & 4095])); }
    __device__ uint32_t bits(int i) const { return bf16x2[(i * 32 + lane + 1024 * (warp & 3)) & 4095]; }
};

struct FloatOp {
    using T = float;
    static __device__ float seed(const Context& c, int i) { return c.bounded(i); }
    static __device__ float partner(float a) { return a * 0.5f; }
    static __device__ float bits_of(float x) { return x; }
};

struct IntOp {
    using T = uint32_t;
    static __device__ uint32_t seed(const Context& c, int i) { return c.bits(i); }
    static __device__ uint32_t partner(uint32_t a) { return a ^ 0x5bd1e995u; }
    static __device__ float bits_of(uint32_t x) { return __uint_as_float(x); }
};

// apply(x, next, a, b): x is this chain's register, next the neighbour chain's, a and b swap roles every round.
struct FfmaOp : FloatOp {
    static __device__ void apply(float& x, float, float a, float b) {
        asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x) : "f"(a), "f"(b));
    }
};
struct FmulOp : FloatOp {
    static __device__ float partner(float a) { return 1.0f / a; }
    static __device__ void apply(float& x, float, float a, float) {
        asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(a));
    }
};
struct FaddOp : FloatOp {
    static __device__ float partner(float a) { return -a; }
    static __device__ void apply(float& x, float, float a, float) {
        asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(a));
    }
};
struct FmnmxOp : FloatOp {
    static __device__ void apply(float& x, float next, float, float) {
        asm volatile("max.f32 %0, %0, %1;" : "+f"(x) : "f"(next));
    }
};
struct FmnmxChainOp : FloatOp { // for one chain: alternating max and min against two registers
    static __device__ void apply(float& x, float, float a, float b) {
        asm volatile("max.f32 %0, %0, %1;" : "+f"(x) : "f"(a));
        asm volatile("min.f32 %0, %0, %1;" : "+f"(x) : "f"(b));
    }
};
struct Ex2Op : FloatOp { // 2^-x has the fixed point 0.64; the sign is a source modifier and costs nothing
    static __device__ void apply(float& x, float, float, float) { x = ex2(-x); }
};
struct F2fpOp : FloatOp {
    static __device__ void apply(float& x, float, float a, float) { x = pack_bf16x2(x, a); }
};
struct FselOp : FloatOp {
    static __device__ void apply(float& x, float next, float a, float b) {
        asm volatile("{.reg .pred p; setp.lt.f32 p, %2, %3; selp.f32 %0, %1, %0, p;}" : "+f"(x) : "f"(next), "f"(a), "f"(b));
    }
};
struct SelOp : IntOp {
    static __device__ void apply(uint32_t& x, uint32_t next, uint32_t a, uint32_t b) {
        asm volatile("{.reg .pred p; setp.lt.u32 p, %2, %3; selp.b32 %0, %1, %0, p;}" : "+r"(x) : "r"(next), "r"(a), "r"(b));
    }
};
struct IsetpSelOp : IntOp { // the comparison reads the chain, so every SEL has an ISETP of its own; two instructions
    static __device__ void apply(uint32_t& x, uint32_t next, uint32_t a, uint32_t b) {
        asm volatile("{.reg .pred p; setp.lt.u32 p, %0, %2; selp.b32 %0, %1, %3, p;}" : "+r"(x) : "r"(next), "r"(a), "r"(b));
    }
};
struct ShflOp : IntOp {
    static __device__ void apply(uint32_t& x, uint32_t, uint32_t, uint32_t) {
        asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, 0xffffffff;" : "+r"(x));
    }
};
struct ImadOp : IntOp {
    static __device__ void apply(uint32_t& x, uint32_t, uint32_t a, uint32_t b) {
        asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(x) : "r"(a), "r"(b));
    }
};
struct Iadd3Op : IntOp {
    static __device__ void apply(uint32_t& x, uint32_t next, uint32_t a, uint32_t) {
        asm volatile("{.reg .u32 t; add.u32 t, %0, %1; add.u32 %0, t, %2;}" : "+r"(x) : "r"(next), "r"(a));
    }
};
struct Lop3Op : IntOp {
    static __device__ void apply(uint32_t& x, uint32_t next, uint32_t a, uint32_t) {
        asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(x) : "r"(next), "r"(a));
    }
};

template <class Op, int kChains, int kRounds, int kPerApply = 1>
struct Chains {
    static constexpr int kInst = kChains * kRounds * kPerApply;
    typename Op::T x[kChains], a, b;

    __device__ void init(const Context& c) {
        for (int i = 0; i < kChains; ++i) x[i] = Op::seed(c, i);
        a = Op::seed(c, kChains);
        b = Op::partner(a);
    }
    __device__ __forceinline__ void apply(int i, int r) {
        Op::apply(x[i], x[(i + 1) % kChains], r & 1 ? b : a, r & 1 ? a : b);
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
#pragma unroll
            for (int i = 0; i < kChains; ++i) apply(i, r);
        }
    }
    __device__ float sink() {
        float s = 0;
        for (int i = 0; i < kChains; ++i) s += Op::bits_of(x[i]);
        return s;
    }
};

// Register moves: a rotation by one register across the loop's back edge cannot be renamed away.
struct MovRotate {
    static constexpr int kRegisters = 64;
    static constexpr int kInst = kRegisters + 1; // the temporary that closes the ring is one move more
    uint32_t x[kRegisters];

    __device__ void init(const Context& c) {
        for (int i = 0; i < kRegisters; ++i) x[i] = c.bits(i);
    }
    __device__ __forceinline__ void step(int) {
        uint32_t first = x[0];
#pragma unroll
        for (int i = 0; i + 1 < kRegisters; ++i) x[i] = x[i + 1];
        x[kRegisters - 1] = first;
    }
    __device__ float sink() {
        float s = 0;
        for (int i = 0; i < kRegisters; ++i) s += __uint_as_float(x[i]) * (i + 1);
        return s;
    }
};

// Six predicate chains (seven predicate registers exist), each p = (x < y) xor p.
struct Isetp {
    static constexpr int kInst = 6 + 3 * 42;
    int x[9];

    __device__ void init(const Context& c) {
        for (int i = 0; i < 9; ++i) x[i] = static_cast<int>(c.bits(i));
    }
    __device__ __forceinline__ void step(int) {
#define SETP6(y)                                                                                          \
    "setp.ne.xor.s32 p0, %1, " y ", p0; setp.ne.xor.s32 p1, %2, " y ", p1; setp.ne.xor.s32 p2, %3, " y ", p2;" \
    "setp.lt.xor.s32 p3, %4, " y ", p3; setp.lt.xor.s32 p4, %5, " y ", p4; setp.lt.xor.s32 p5, %6, " y ", p5;"
#define SETP42 SETP6("%7") SETP6("%8") SETP6("%9") SETP6("%2") SETP6("%1") SETP6("%4") SETP6("%3")
        asm volatile(
            "{.reg .pred p0,p1,p2,p3,p4,p5;"
            "setp.ne.s32 p0, %0, 1; setp.ne.s32 p1, %0, 2; setp.ne.s32 p2, %0, 3;"
            "setp.ne.s32 p3, %0, 4; setp.ne.s32 p4, %0, 5; setp.ne.s32 p5, %0, 6;"
            SETP42 SETP42 SETP42
            "xor.pred p0, p0, p1; xor.pred p2, p2, p3; xor.pred p4, p4, p5; xor.pred p0, p0, p2; xor.pred p0, p0, p4;"
            "@p0 add.s32 %0, %0, 1;}"
            : "+r"(x[0])
            : "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[4]), "r"(x[5]), "r"(x[6]), "r"(x[7]), "r"(x[8]), "r"(x[1] + 7));
#undef SETP42
#undef SETP6
    }
    __device__ float sink() { return __int_as_float(x[0]); }
};

// Only a light integer loop: what an SM draws while it does next to nothing but issue.
struct Spin {
    static constexpr int kInst = 16;
    uint32_t x;
    __device__ void init(const Context& c) { x = c.bits(0); }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int i = 0; i < 16; ++i) ImadOp::apply(x, 0, 2654435761u, 12345u);
    }
    __device__ float sink() { return __uint_as_float(x); }
};
