// Streams for `energy`: one instruction each, on operands that keep toggling. A stream of `power` settles (2^-x has a fixed point, a
// running maximum stays), and what does not toggle costs little; here each instruction reads other random words than the one before,
// sums go up and down again, and every result is read.
#pragma once

#include "harness.cuh"

// What the matrix operands hold: normal numbers; weights of a softmax over thousands of keys, exp(x - 4) of normal x; zeros.
enum Format { kBf16, kFp16, kE4m3, kFormats };
enum Fill { kNormal, kWeights, kZeros, kFills };
inline const char* fill_name(int fill) {
    const char* names[] = {"normal", "weights", "zeros"};
    return names[fill];
}

struct EnergyInputs {
    const float* normal;             // kDataCount
    const uint32_t* words[kFills];   // kDataCount packed bf16 pairs
};

constexpr int kEnergyThreads = 512, kOperands = 32, kResults = 8;

struct EnergyState {
    float x[kOperands], y[kResults];
    uint32_t smem;
};

// Each: step(state) with its count of the instruction it is named after, and of others in `kOther`.
struct FfmaEnergy {
    static constexpr const char* kName = "ffma";
    static constexpr int kInst = 128, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 64; ++i)
            asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(s.y[i % 8]) : "f"(s.x[i % 32]), "f"(s.x[(i * 5 + 3) % 32]));
#pragma unroll
        for (int i = 0; i < 64; ++i)
            asm volatile("{.reg .f32 n; neg.f32 n, %1; fma.rn.f32 %0, n, %2, %0;}" : "+f"(s.y[i % 8]) : "f"(s.x[i % 32]), "f"(s.x[(i * 5 + 3) % 32]));
    }
};
struct FaddEnergy {
    static constexpr const char* kName = "fadd";
    static constexpr int kInst = 128, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 64; ++i) asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(s.y[i % 8]) : "f"(s.x[(i * 5) % 32]));
#pragma unroll
        for (int i = 0; i < 64; ++i) asm volatile("sub.rn.f32 %0, %0, %1;" : "+f"(s.y[i % 8]) : "f"(s.x[(i * 5) % 32]));
    }
};
struct FmulEnergy { // x[i] and x[i + 16] are reciprocal
    static constexpr const char* kName = "fmul";
    static constexpr int kInst = 128, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 128; ++i)
            asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(s.y[i % 8]) : "f"(s.x[((i / 16) % 2 * 16) + i % 16]));
    }
};
struct FmnmxEnergy {
    static constexpr const char* kName = "fmnmx";
    static constexpr int kInst = 128, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            asm volatile("max.f32 %0, %0, %1;" : "+f"(s.y[i % 8]) : "f"(s.x[(i * 5) % 32]));
            asm volatile("min.f32 %0, %0, %1;" : "+f"(s.y[(i + 4) % 8]) : "f"(s.x[(i * 7 + 1) % 32]));
        }
    }
};
struct F2fpEnergy {
    static constexpr const char* kName = "f2fp";
    static constexpr int kInst = 128, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 128; ++i) s.y[i % 8] = pack_bf16x2(s.x[(i * 5) % 32], s.y[i % 8]);
    }
};
struct Ex2Energy { // one FFMA before each, so that it never sees the same number again
    static constexpr const char* kName = "ex2_ffma";
    static constexpr int kInst = 64, kOther = 64;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(s.y[i % 8]) : "f"(s.x[(i + 16) % 32]), "f"(s.x[(i * 5) % 32]));
            s.y[i % 8] = ex2(-fabsf(s.y[i % 8]));
        }
    }
};
struct Lop3Energy {
    static constexpr const char* kName = "lop3";
    static constexpr int kInst = 128, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 128; ++i) {
            uint32_t y = __float_as_uint(s.y[i % 8]);
            asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(y) : "r"(__float_as_uint(s.x[i % 32])), "r"(__float_as_uint(s.x[(i * 5 + 3) % 32])));
            s.y[i % 8] = __uint_as_float(y);
        }
    }
};
struct ImadEnergy {
    static constexpr const char* kName = "imad";
    static constexpr int kInst = 128, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 128; ++i) {
            uint32_t y = __float_as_uint(s.y[i % 8]);
            asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(y) : "r"(__float_as_uint(s.x[i % 32])), "r"(__float_as_uint(s.x[(i * 5 + 3) % 32])));
            s.y[i % 8] = __uint_as_float(y);
        }
    }
};
struct ShflEnergy {
    static constexpr const char* kName = "shfl";
    static constexpr int kInst = 32, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 32; ++i) s.y[i % 8] = __shfl_xor_sync(~0u, s.y[i % 8], 1 + i % 31);
    }
};
struct LdsmEnergy { // 512 random bytes each; three LOP3 keep them alive
    static constexpr const char* kName = "ldsm_x4";
    static constexpr int kInst = 32, kOther = 64;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            uint32_t r[4], y = __float_as_uint(s.y[i % 8]);
            ldsm_x4(r, s.smem + i * 512);
            asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(y) : "r"(r[0]), "r"(r[1]));
            asm volatile("lop3.b32 %0, %0, %1, %2, 0x96;" : "+r"(y) : "r"(r[2]), "r"(r[3]));
            s.y[i % 8] = __uint_as_float(y);
        }
    }
};
struct StsEnergy {
    static constexpr const char* kName = "sts128";
    static constexpr int kInst = 32, kOther = 0;
    static __device__ void step(EnergyState& s) {
#pragma unroll
        for (int i = 0; i < 32; ++i)
            asm volatile("st.volatile.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(s.smem + i * 512), "f"(s.x[i]), "f"(s.x[(i + 9) % 32]),
                         "f"(s.x[(i + 17) % 32]), "f"(s.x[(i + 23) % 32]) : "memory");
    }
};
struct SleepEnergy { // an SM that holds 16 warps which do nothing
    static constexpr const char* kName = "sleep";
    static constexpr int kInst = 1, kOther = 0;
    static __device__ void step(EnergyState&) { asm volatile("nanosleep.u32 2000;"); }
};

template <class Op>
__global__ void __launch_bounds__(kEnergyThreads, 1) energy_kernel(EnergyInputs in, int steps, WarpTime* times, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    auto* words = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < 32 * 1024 / 4; i += blockDim.x) words[i] = in.words[kNormal][(i * 7) & (kDataCount - 1)];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    EnergyState s;
    for (int i = 0; i < 16; ++i) {
        float v = 0.5f + fabsf(in.normal[(i * 97 + threadIdx.x) & (kDataCount - 1)]);
        float sign = (i * 5 + lane) % 3 == 0 ? -1.f : 1.f;
        s.x[i] = sign * v;
        s.x[i + 16] = sign / v;
    }
    for (int i = 0; i < kResults; ++i) s.y[i] = in.normal[(i * 61 + threadIdx.x * 3) & (kDataCount - 1)];
    s.smem = shared_address(smem) + (warp % 4) * 4096 + lane * 16;
    __syncthreads();
    WarpTime time{read_clock(), 0, read_globaltimer(), 0};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
        Op::step(s);
        if (i % 16 == 0) __syncthreads(); // the scheduler is not fair; warps must end together
    }
    time.clock_end = read_clock();
    time.ns_end = read_globaltimer();
    float sum = 0;
    for (float y : s.y) sum += y;
    if (sum == 1.2345e33f) *sink = sum;
    if (lane == 0) times[blockIdx.x * (kEnergyThreads / 32) + warp] = time;
}

// m16n8k16 of bf16 or fp16 on four pairs of operand fragments, then on the same with B negated: the sums come back to where they were.
template <int kFormat>
__global__ void __launch_bounds__(kEnergyThreads, 1)
    energy_hmma(const uint32_t* a_words, const uint32_t* b_words, int gap_ns, int steps, WarpTime* times, float* sink) {
    constexpr auto* kMultiply = kFormat == kFp16 ? hmma_fp16 : hmma;
    uint32_t a[4][4], b[8][2];
    float c[8][4] = {};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = a_words[(i * 97 + threadIdx.x * 3) & (kDataCount - 1)];
    for (int i = 0; i < 8; ++i) {
        uint32_t word = b_words[(i * 61 + threadIdx.x * 5) & (kDataCount - 1)];
        b[i / 2][i % 2] = word;
        b[4 + i / 2][i % 2] = word ^ (word ? 0x80008000u : 0);
    }
    __syncthreads();
    WarpTime time{read_clock(), 0, read_globaltimer(), 0};
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int k = 0; k < 64; ++k) kMultiply(c[k % 8], a[(k / 8) % 4], b[(k / 32) * 4 + (k + k / 8) % 4][0], b[(k / 32) * 4 + (k + k / 8) % 4][1]);
        if (gap_ns) __nanosleep(gap_ns);
        if (i % 16 == 0) __syncthreads();
    }
    time.clock_end = read_clock();
    time.ns_end = read_globaltimer();
    float sum = 0;
    for (auto& row : c)
        for (float y : row) sum += y;
    if (sum == 1.2345e33f) *sink = sum;
    if (lane == 0) times[blockIdx.x * (kEnergyThreads / 32) + warp] = time;
}
constexpr int kHmmaPerStep = 64;
