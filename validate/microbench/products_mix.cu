// What vector work takes beside warpgroup products, by its mix: bursts of A FMNMX, F FFMA and X MUFU.EX2 in turn, conversions,
// chains with shuffles, blocks of softmax; of one warp or two a sub-partition, two of one kind or of different kinds. And what a
// burst does to a batch of products that begins with it (`turn`). A program of its own, a shape a binary:
// nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -DSHAPE_N=128 -DSHAPE_RS=0 -DSHAPE_FP8=0 -o mix products_mix.cu -ldl
#include "wgmma.cuh"

struct Max { static __device__ void apply(float& x, float one) { asm volatile("max.f32 %0, %0, %1;" : "+f"(x) : "f"(one)); } };
struct Fma { static __device__ void apply(float& x, float one) { asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(x) : "f"(one)); } };
struct Mul { static __device__ void apply(float& x, float one) { asm volatile("mul.rn.f32 %0, %0, %1;" : "+f"(x) : "f"(one)); } };
struct Exp { static __device__ void apply(float& x, float) { x = ex2(-x); } };
struct Pack { static __device__ void apply(float& x, float one) { x = pack_bf16x2(x, one); } };
struct PackE4m3 { // two F2FP and a PRMT
    static __device__ void apply(float& x, float one) {
        asm volatile("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %0, %1; cvt.rn.satfinite.e4m3x2.f32 h, %1, %0; mov.b32 %0, {l, h};}"
                     : "+f"(x) : "f"(one));
    }
};
struct Permute {
    static __device__ void apply(float& x, float one) {
        asm volatile("{.reg .b32 a, b; mov.b32 a, %0; mov.b32 b, %1; prmt.b32 a, a, b, 0x5140; mov.b32 %0, a;}" : "+f"(x) : "f"(one));
    }
};

// kCount instructions in units of kA Alu, kF Fma and kX Exp, independent of one another; then a wait for one exponential and two
// additions. kCut: each unit is a basic block of its own, at whose end the compiler lets its results come (stall counts up to 7).
template <int kA, int kF, int kX, int kCount, bool kCut = false, class Alu = Max, class Vector = Fma>
struct Burst {
    static constexpr int kInst = 1, kRegs = 12, kUnits = kCount / (kA + kF + kX), kBlocks = kCut ? kUnits : 1, kRegions = kBlocks + 1;
    float a[kA ? kRegs : 1], f[kF ? kRegs : 1], x[kX ? kRegs : 1], one;
    __device__ void init(const Context& c) {
        for (int i = 0; i < (kA ? kRegs : 1); ++i) a[i] = c.bounded(i);
        for (int i = 0; i < (kF ? kRegs : 1); ++i) f[i] = c.bounded(i + 20);
        for (int i = 0; i < (kX ? kRegs : 1); ++i) x[i] = c.bounded(i + 40);
        one = c.bounded(70);
    }
    template <int kRegion>
    __device__ __forceinline__ void region() {
        if constexpr (kRegion < kBlocks) {
#pragma unroll
            for (int unit = kRegion; unit < (kCut ? kRegion + 1 : kUnits); ++unit) {
#pragma unroll
                for (int i = 0; i < kF; ++i) Vector::apply(f[(unit * kF + i) % kRegs], one);
#pragma unroll
                for (int i = 0; i < kA; ++i) Alu::apply(a[(unit * kA + i) % kRegs], one);
#pragma unroll
                for (int i = 0; i < kX; ++i) Exp::apply(x[(unit * kX + i) % kRegs], one);
            }
        } else {
            float last = kF ? f[(kUnits * kF - 1) % kRegs] : kA ? a[(kUnits * kA - 1) % kRegs] : x[(kUnits * kX - 1) % kRegs];
            one += last * 1e-30f;
            one = ex2(one);
            asm volatile("fma.rn.f32 %0, %0, 0f00800000, 0f3F000000;" : "+f"(one));
        }
    }
    __device__ float sink() {
        float s = one;
        for (float v : a) s += v;
        for (float v : f) s += v;
        for (float v : x) s += v;
        return s;
    }
};

// Maxima of two rows, a chain each, then two exchanges between the four threads that share a row.
template <int kCount, bool kShuffle>
struct RowMax {
    static constexpr int kInst = 1, kRegions = 2;
    float x[16], row[2];
    __device__ void init(const Context& c) {
        for (int i = 0; i < 16; ++i) x[i] = c.bounded(i);
        row[0] = row[1] = 0.1f;
    }
    template <int kRegion>
    __device__ __forceinline__ void region() {
        if constexpr (kRegion == 0) {
#pragma unroll
            for (int i = 0; i < kCount / 2; ++i) {
                asm volatile("max.f32 %0, %0, %1;" : "+f"(row[0]) : "f"(x[i % 16]));
                asm volatile("max.f32 %0, %0, %1;" : "+f"(row[1]) : "f"(x[(i + 5) % 16]));
            }
        } else if constexpr (kShuffle) {
#pragma unroll
            for (int step = 2; step; --step) {
                float other[2];
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(other[r]) : "f"(row[r]), "n"(1));
#pragma unroll
                for (int r = 0; r < 2; ++r) asm volatile("max.f32 %0, %0, %1;" : "+f"(row[r]) : "f"(other[r]));
            }
        }
    }
    __device__ float sink() {
        float s = row[0] + row[1];
        for (float v : x) s += v;
        return s;
    }
};

// A block of softmax as the compiler orders it: two rows of kS / 2 each, kO numbers of O rescaled, P packed (in e4m3: four a word).
template <int kS, int kO, bool kFp8>
struct Softmax {
    static constexpr int kInst = 1;
    float s[kS], o[kO ? kO : 1], row[2], sum[2], scale;
    __device__ void init(const Context& c) {
        for (int i = 0; i < kS; ++i) s[i] = c.bounded(i);
        for (int i = 0; i < (kO ? kO : 1); ++i) o[i] = c.bounded(i + 7);
        row[0] = row[1] = 0, sum[0] = sum[1] = 0, scale = 1.44f * c.bounded(99);
    }
    __device__ __forceinline__ void step(int) {
        float factor[2], least[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float before = row[r], most = before;
#pragma unroll
            for (int i = 0; i < kS; ++i)
                if ((i / 2) % 2 == r) most = fmaxf(most, s[i]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
            row[r] = most;
            least[r] = most * scale;
            factor[r] = ex2((before - most) * scale);
            sum[r] *= factor[r];
        }
#pragma unroll
        for (int i = 0; i < kS; ++i) s[i] = ex2(__fmaf_rn(s[i], scale, -least[(i / 2) % 2]));
#pragma unroll
        for (int i = 0; i < kS; ++i) sum[(i / 2) % 2] += s[i];
        if constexpr (kFp8) {
#pragma unroll
            for (int i = 0; i < kS; i += 4) {
                uint32_t w;
                asm volatile("{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %1, %2; cvt.rn.satfinite.e4m3x2.f32 h, %3, %4; mov.b32 %0, {l, h};}"
                             : "=r"(w) : "f"(s[i]), "f"(s[i + 1]), "f"(s[i + 2]), "f"(s[i + 3]));
                s[i] = __uint_as_float(w & 0x3fffffffu);
            }
        } else {
#pragma unroll
            for (int i = 0; i < kS; i += 2) s[i] = pack_bf16x2(s[i], s[i + 1]);
        }
#pragma unroll
        for (int i = 0; i < kO; ++i) o[i] *= factor[(i / 2) % 2];
    }
    __device__ float sink() {
        float t = sum[0] + sum[1];
        for (float v : s) t += v;
        for (float v : o) t += v;
        return t;
    }
};

#define MIXES(X)                                                                                                              \
    X(0, "wait", Burst<1, 0, 0, 1>) X(1, "a24", Burst<1, 0, 0, 24>) X(2, "a48", Burst<1, 0, 0, 48>)                           \
    X(3, "f24", Burst<0, 1, 0, 24>) X(4, "f48", Burst<0, 1, 0, 48>) X(5, "x12", Burst<0, 0, 1, 12>) X(6, "x24", Burst<0, 0, 1, 24>) \
    X(7, "pack24", Burst<1, 0, 0, 24, false, Pack>) X(8, "pack48", Burst<1, 0, 0, 48, false, Pack>)                           \
    X(9, "e4m3_12", Burst<1, 0, 0, 12, false, PackE4m3>) X(10, "e4m3_24", Burst<1, 0, 0, 24, false, PackE4m3>)                \
    X(11, "prmt24", Burst<1, 0, 0, 24, false, Permute>) X(12, "prmt48", Burst<1, 0, 0, 48, false, Permute>)                   \
    X(13, "a1f1_24", Burst<1, 1, 0, 24>) X(14, "a1f1_48", Burst<1, 1, 0, 48>)                                                 \
    X(15, "a1f3_24", Burst<1, 3, 0, 24>) X(16, "a1f3_48", Burst<1, 3, 0, 48>)                                                 \
    X(17, "x1f2_24", Burst<0, 2, 1, 24>) X(18, "x1f2_48", Burst<0, 2, 1, 48>)                                                 \
    X(19, "x1f3_24", Burst<0, 3, 1, 24>) X(20, "x1f3_48", Burst<0, 3, 1, 48>)                                                 \
    X(21, "x1a2_24", Burst<2, 0, 1, 24>) X(22, "x1a2_48", Burst<2, 0, 1, 48>)                                                 \
    X(23, "x1a1f2_24", Burst<1, 2, 1, 24>) X(24, "x1a1f2_48", Burst<1, 2, 1, 48>)                                             \
    X(25, "f96", Burst<0, 1, 0, 96>) X(26, "mul24", Burst<0, 1, 0, 24, false, Max, Mul>) X(27, "mul48", Burst<0, 1, 0, 48, false, Max, Mul>) \
    X(28, "max24", RowMax<24, false>) X(29, "max48", RowMax<48, false>) X(30, "max48_shfl", RowMax<48, true>)                 \
    X(31, "softmax64", Softmax<64, 0, false>) X(32, "softmax48_o32", Softmax<48, 32, false>) X(33, "softmax64_e4m3", Softmax<64, 0, true>) \
    X(34, "cut_a24", Burst<1, 0, 0, 24, true>) X(35, "cut_a48", Burst<1, 0, 0, 48, true>)                                     \
    X(36, "cut_f24", Burst<0, 1, 0, 24, true>) X(37, "cut_f48", Burst<0, 1, 0, 48, true>)                                     \
    X(38, "cut_a1f1_24", Burst<1, 1, 0, 24, true>) X(39, "cut_a1f1_48", Burst<1, 1, 0, 48, true>)

template <bool kFp8>
struct Product;
template <>
struct Product<false> { template <int N> using Of = Wgmma<N>; };
template <>
struct Product<true> { template <int N> using Of = WgmmaFp8<N>; };

template <int kN, bool kRs, bool kFp8>
struct Products {
    float d[kN / 2];
    uint32_t a_regs[4];
    uint64_t a, b;
    bool pipelined;
    __device__ void init(const Context& c, bool pipelined_) {
        pipelined = pipelined_;
        for (int i = 0; i < kN / 2; ++i) d[i] = 0;
        for (int i = 0; i < 4; ++i) a_regs[i] = c.bits(i) & (kFp8 ? 0x37373737u : ~0u);
        a = wgmma_descriptor(c.smem);
        b = wgmma_descriptor(c.smem + wgmma_smem::kB);
    }
    __device__ __forceinline__ void step() {
        using Op = typename Product<kFp8>::template Of<kN>;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int tile = (i / 4) & 1, k = i % 4;
            uint64_t b_k = b + tile * (kN * 128 / 16) + k * 2;
            if constexpr (kRs) Op::rs(d, a_regs, b_k);
            else Op::ss(d, a + tile * (wgmma_smem::kATile / 16) + k * 2, b_k);
        }
        wgmma_commit();
        if (pipelined) wgmma_wait<1>();
        else wgmma_wait<0>();
    }
    __device__ float sink() {
        wgmma_wait<0>();
        float s = 0;
        for (int i = 0; i < kN / 2; ++i) s += d[i];
        return s;
    }
};

constexpr int kThreads = SHAPE_N > 192 ? 384 : 512;
constexpr int kVectorSteps = 100;

__device__ __forceinline__ void load_operands(char* smem, const Inputs& inputs) {
    auto* words = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < wgmma_smem::bytes(SHAPE_N) / 4; i += blockDim.x)
        words[i] = inputs.bf16x2[(i * 7) & 4095] & (SHAPE_FP8 ? 0x37373737u : ~0u);
    __syncthreads();
    wgmma_proxy_fence();
    __syncthreads();
}

__global__ void __launch_bounds__(kThreads, 1)
    mix_kernel(int groups, int first, int second, int timed, Inputs inputs, WarpTime* times, float* sink, WgmmaPlan plan) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ int finished;
    __shared__ int leave[kMaxRoles];
    if (threadIdx.x == 0) finished = 0;
    load_operands(smem, inputs);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, role = warp / 4;
    Context context = make_context(inputs, smem);
    WarpTime time{};
    if (role < groups) {
        drive_wgmma<Products<SHAPE_N, bool(SHAPE_RS), bool(SHAPE_FP8)>>(context, plan, timed, &finished, leave, time, sink);
    } else {
        switch (role == groups ? first : second) {
#define MIX_CASE(id, name, ...) \
    case id: drive<__VA_ARGS__>(context, kVectorSteps, timed, &finished, warps, time, sink); break;
            MIXES(MIX_CASE)
#undef MIX_CASE
        }
    }
    if (context.lane == 0) times[blockIdx.x * warps + warp] = time;
}

// Rounds: the vector warpgroup lets the other one begin a batch of products and goes into a burst at once. Rows: cycles from before
// the first product to after the wait, and of the burst.
template <class Op, int kCount>
__global__ void __launch_bounds__(256, 1) turn_kernel(int rounds, Inputs inputs, float2* out, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    load_operands(smem, inputs);
    Context context = make_context(inputs, smem);
    float total = 0;
    if (threadIdx.x < 128) {
        Products<SHAPE_N, bool(SHAPE_RS), bool(SHAPE_FP8)> body;
        body.init(context, false);
        for (int i = 0; i < rounds; ++i) {
            bar_sync(1, 256);
            uint32_t t = static_cast<uint32_t>(read_clock());
            body.step();
            total += static_cast<uint32_t>(read_clock()) - t;
            bar_sync(2, 256);
        }
        if (body.sink() == 1.2345e33f) *sink = 1;
    } else {
        float x[32], one = context.bounded(70);
        for (int i = 0; i < 32; ++i) x[i] = context.bounded(i);
        for (int i = 0; i < rounds; ++i) {
            bar_sync(1, 256);
            uint32_t t = static_cast<uint32_t>(read_clock());
#pragma unroll
            for (int k = 0; k < kCount; ++k) Op::apply(x[k % 32], one);
            total += static_cast<uint32_t>(read_clock()) - t;
            bar_sync(2, 256);
        }
        float s = 0;
        for (float v : x) s += v;
        if (s == 1.2345e33f) *sink = s;
    }
    if (threadIdx.x == 0) out->x = total / rounds;
    if (threadIdx.x == 128) out->y = total / rounds;
}

struct Unit { // one each in turn, as softmax has them
    static __device__ void apply(float& x, float one) {
        Fma::apply(x, one);
        x = ex2(x);
    }
};

#define TURNS(X) \
    X("fma0", Fma, 0) X("fma16", Fma, 16) X("fma32", Fma, 32) X("fma64", Fma, 64) X("fma128", Fma, 128) X("fma256", Fma, 256) \
    X("mul64", Mul, 64) X("mul128", Mul, 128) X("max32", Max, 32) X("max64", Max, 64) X("max128", Max, 128)                   \
    X("exp32", Exp, 32) X("fma_exp32", Unit, 32) X("pack64", Pack, 64)

std::string shape() {
    return std::string(SHAPE_FP8 ? "e4m3_" : "") + "m64n" + std::to_string(SHAPE_N) + (SHAPE_RS ? "_rs" : "_ss");
}

const char* name_of(int id) {
#define MIX_NAME(number, name, ...) if (id == number) return name;
    MIXES(MIX_NAME)
#undef MIX_NAME
    return "";
}

// The mix `first` beside `groups` warpgroups of products and, with second >= 0, one of the mix `second`.
void measure(int groups, bool pipelined, int first, int second, const StreamInputs& inputs, DeviceArray<WarpTime>& times, DeviceArray<float>& sink) {
    WgmmaPlan plan;
    plan.pipelined = pipelined;
    int vectors = second < 0 ? 1 : 2, warps = (groups + vectors) * 4, timed = 12, smem = std::max(wgmma_smem::bytes(SHAPE_N), kStreamSmem);
    CHECK_CUDA(cudaFuncSetAttribute(mix_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    std::vector<double> product, mine, others;
    for (int repeat = -1; repeat < 3; ++repeat) {
        mix_kernel<<<1, warps * 32, smem>>>(groups, first, second, timed, inputs.view(), times.get(), sink.get(), plan);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        auto t = times.to_host(warps);
        if (repeat < 0) continue;
        double rate[3] = {};
        for (int i = 0; i < warps; ++i) {
            double cycles = double(t[i].clock_end - t[i].clock_begin);
            if (i / 4 < groups) rate[0] += double(plan.batch) * plan.batches_per_chunk * timed / cycles / 4;
            else rate[1 + i / 4 - groups] += double(kVectorSteps) * timed / cycles / 4;
        }
        product.push_back(1 / rate[0]);
        mine.push_back(1 / rate[1]);
        others.push_back(1 / rate[2]);
    }
    std::string what = name_of(first), with = second < 0 ? "" : std::string("+") + name_of(second), beside = groups ? shape() : "alone";
    std::string mode = "mma_groups=" + std::to_string(groups) + (groups && !pipelined ? ";waited" : "");
    print_row("products_mix", what + with + "|" + beside, vectors, mode, mine, "cycles_per_burst");
    if (second >= 0 && second != first) print_row("products_mix", name_of(second) + std::string("+") + what + "|" + beside, vectors, mode, others, "cycles_per_burst");
    if (groups) print_row("products_mix", shape() + "|" + what + with, vectors, mode, product, "cycles_per_inst_per_sm");
}

template <class Op, int kCount>
void measure_turn(const char* name, const StreamInputs& inputs, DeviceArray<float2>& out, DeviceArray<float>& sink) {
    int smem = std::max(wgmma_smem::bytes(SHAPE_N), kStreamSmem);
    CHECK_CUDA(cudaFuncSetAttribute(turn_kernel<Op, kCount>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    std::vector<double> product, burst;
    for (int repeat = -1; repeat < 3; ++repeat) {
        turn_kernel<Op, kCount><<<1, 256, smem>>>(200, inputs.view(), out.get(), sink.get());
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        if (repeat < 0) continue;
        auto t = out.to_host(1);
        product.push_back(t[0].x);
        burst.push_back(t[0].y);
    }
    print_row("products_turn", shape() + "x8|" + name, 1, "mma_groups=1", product, "cycles_per_batch");
    print_row("products_turn", std::string(name) + "|" + shape() + "x8", 1, "mma_groups=1", burst, "cycles_per_burst");
}

int main() {
    StreamInputs inputs;
    DeviceArray<WarpTime> times(kMaxRoles * 4);
    DeviceArray<float> sink(1);
    DeviceArray<float2> out(1);
    constexpr bool kRoom = SHAPE_N <= 192, kBase = SHAPE_N == 128 && !SHAPE_RS && !SHAPE_FP8;
    for (int id = 0; *name_of(id); ++id) {
        if (kBase) measure(0, true, id, -1, inputs, times, sink);
        if (kBase) measure(0, true, id, id, inputs, times, sink);
        measure(1, true, id, -1, inputs, times, sink);
        measure(1, false, id, -1, inputs, times, sink);
        measure(2, true, id, -1, inputs, times, sink);
        if (kRoom) measure(2, true, id, id, inputs, times, sink);
    }
    const int pairs[] = {2, 4, 6, 8, 10, 12, 18, 24, 29, 31, 33};
    for (int first : pairs)
        for (int second : pairs)
            if (kRoom && first < second) measure(2, true, first, second, inputs, times, sink);
#define TURN(name, ...) measure_turn<__VA_ARGS__>(name, inputs, out, sink);
    TURNS(TURN)
}
