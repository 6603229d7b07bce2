// Vector work beside two warpgroups of products: a batch of products always waits behind the one that runs, so that what products
// lose they lose in the tensor cores, not at their issue. Bursts of K FMA-class instructions, M dependent exponentials apart
// (fmulK_ex2xM), exponentials whose operands are overwritten at once, chains, and mixes. A program of its own, a shape a binary:
// nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -DSHAPE_N=256 -DSHAPE_RS=0 -DSHAPE_FP8=0 -o beside products_beside.cu -ldl
#include "wgmma.cuh"

template <class Op, int K, int M>
struct Bursts {
    static constexpr int kInst = K, kRegs = K < 64 ? K : 64;
    float o[kRegs], x, one;
    __device__ void init(const Context& c) {
        for (int i = 0; i < kRegs; ++i) o[i] = c.bounded(i);
        x = c.bounded(70);
        one = 1.0f;
    }
    static constexpr int kRegions = 2;
    template <int kRegion>
    __device__ __forceinline__ void region() {
        if constexpr (kRegion == 0) {
#pragma unroll
            for (int i = 0; i < K; ++i) Op::apply(o[i % kRegs], 0.f, one, 1.0f / 1024);
        } else {
            x = o[kRegs - 1] + o[0];
#pragma unroll
            for (int i = 0; i < M; ++i) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
            asm volatile("fma.rn.f32 %0, %1, 0f00800000, 0f3F800000;" : "=f"(one) : "f"(x));
        }
    }
    __device__ float sink() {
        float s = x + one;
        for (float v : o) s += v;
        return s;
    }
};

// Exponentials whose operands are overwritten at once (FFMA on the same register), kChains of them in turn; what each gives is added
// up eight exponentials later.
template <int kChains>
struct Overwritten {
    static constexpr int kInst = 64;
    float a[kChains], d[8], sum[8], k;
    __device__ void init(const Context& c) {
        for (int i = 0; i < kChains; ++i) a[i] = c.bounded(i);
        for (int i = 0; i < 8; ++i) d[i] = sum[i] = 0;
        k = 0.5f;
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int i = 0; i < kInst; ++i) {
            asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sum[i % 8]) : "f"(d[i % 8]));
            asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(d[i % 8]) : "f"(a[i % kChains]));
            asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(a[i % kChains]) : "f"(k));
        }
    }
    __device__ float sink() {
        float s = 0;
        for (float v : a) s += v;
        for (int i = 0; i < 8; ++i) s += d[i] + sum[i];
        return s;
    }
};

#define LOCAL_STREAMS(X)                                                                                              \
    X("fmul8_ex2x1", Bursts<FmulOp, 8, 1>) X("fmul8_ex2x2", Bursts<FmulOp, 8, 2>) X("fmul16_ex2x2", Bursts<FmulOp, 16, 2>)     \
    X("fmul32_ex2x2", Bursts<FmulOp, 32, 2>) X("fmul32_ex2x8", Bursts<FmulOp, 32, 8>) X("fmul64_ex2x8", Bursts<FmulOp, 64, 8>) \
    X("fmul128_ex2x8", Bursts<FmulOp, 128, 8>) X("fmul128_ex2x24", Bursts<FmulOp, 128, 24>)                                    \
    X("ffma16_ex2x2", Bursts<FfmaOp, 16, 2>) X("ffma64_ex2x8", Bursts<FfmaOp, 64, 8>) X("ffma128_ex2x24", Bursts<FfmaOp, 128, 24>) \
    X("overwritten1", Overwritten<1>) X("overwritten8", Overwritten<8>)                                                          \
    X("ffma", StreamOf<kFfma>::Type) X("fmnmx", StreamOf<kFmnmx>::Type) X("ex2", StreamOf<kEx2>::Type) X("f2fp", StreamOf<kF2fp>::Type) \
    X("mix_interleaved", MixInterleaved) X("softmax_mix", SoftmaxMix) X("ex2_ffma", StreamOf<kEx2Ffma>::Type) X("ffma_fmnmx", StreamOf<kFfmaFmnmx>::Type)  \
    X("rescale_mix", RescaleMix)                                                                                      \
    X("fmnmx_chain", StreamOf<kFmnmxLat>::Type) X("fadd_chain", StreamOf<kFaddLat>::Type) X("ex2_chain", StreamOf<kEx2Lat>::Type) X("shfl_chain", StreamOf<kShflLat>::Type)

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
    __device__ void init(const Context& c, bool) {
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
        wgmma_wait<1>();
    }
    __device__ float sink() {
        wgmma_wait<0>();
        float s = 0;
        for (int i = 0; i < kN / 2; ++i) s += d[i];
        return s;
    }
};

template <int kN, bool kRs, bool kFp8, class Stream>
__global__ void __launch_bounds__(kN > 192 ? 384 : 512, 1)
    kernel(int groups, int steps, int timed_mma, int timed_vector, Inputs inputs, WarpTime* times, float* sink, WgmmaPlan plan) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ int finished;
    __shared__ int leave[kMaxRoles];
    if (threadIdx.x == 0) finished = 0;
    auto* words = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < wgmma_smem::bytes(kN) / 4; i += blockDim.x) words[i] = inputs.bf16x2[(i * 7) & 4095] & (kFp8 ? 0x37373737u : ~0u);
    __syncthreads();
    wgmma_proxy_fence();
    __syncthreads();
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, role = warp / 4;
    Context context = make_context(inputs, smem);
    WarpTime time{};
    if (role < groups) drive_wgmma<Products<kN, kRs, kFp8>>(context, plan, timed_mma, &finished, leave, time, sink);
    else drive<Stream>(context, steps, timed_vector, &finished, warps, time, sink);
    if (context.lane == 0) times[blockIdx.x * warps + warp] = time;
}

template <class Stream>
void measure(const char* name, int groups, int vectors, const StreamInputs& inputs, DeviceArray<WarpTime>& times, DeviceArray<float>& sink) {
    constexpr int kN = SHAPE_N;
    auto* k = kernel<kN, bool(SHAPE_RS), bool(SHAPE_FP8), Stream>;
    WgmmaPlan plan;
    int steps = 4000 / (2 * Stream::kInst) + 1;
    int smem = std::max(wgmma_smem::bytes(kN), kStreamSmem);
    CHECK_CUDA(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    std::vector<double> mma, vector;
    int warps = (groups + vectors) * 4, timed_mma = 24, timed_vector = 24;
    for (int repeat = -1; repeat < 5; ++repeat) {
        k<<<1, warps * 32, smem>>>(groups, steps, timed_mma, timed_vector, inputs.view(), times.get(), sink.get(), plan);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        auto t = times.to_host(warps);
        if (repeat < 0) continue;
        double m = 0, v = 0;
        for (int i = 0; i < warps; ++i) {
            double cycles = double(t[i].clock_end - t[i].clock_begin);
            if (i / 4 < groups) m += double(plan.batch) * plan.batches_per_chunk * timed_mma / cycles / 4;
            else v += double(Stream::kInst) * steps * timed_vector / cycles / 4;
        }
        if (groups) mma.push_back(1 / m);
        vector.push_back(1 / v);
    }
    std::string shape = groups ? std::string(SHAPE_FP8 ? "e4m3_" : "") + "m64n" + std::to_string(kN) + (SHAPE_RS ? "_rs" : "_ss") : "alone";
    std::string mode = "mma_groups=" + std::to_string(groups);
    print_row("products_beside", std::string(name) + "|" + shape, vectors, mode, vector, "cycles_per_inst_per_smsp");
    if (groups) print_row("products_beside", shape + "|" + name, vectors, mode, mma, "cycles_per_inst_per_sm");
}

int main() {
    StreamInputs inputs;
    DeviceArray<WarpTime> times(kMaxRoles * 4);
    DeviceArray<float> sink(1);
#define ONE(name, ...)                                                                     \
    if (SHAPE_N == 128 && !SHAPE_RS && !SHAPE_FP8) measure<__VA_ARGS__>(name, 0, 1, inputs, times, sink); \
    measure<__VA_ARGS__>(name, 2, 1, inputs, times, sink);                                 \
    if (SHAPE_N == 128) measure<__VA_ARGS__>(name, 2, 2, inputs, times, sink);
    LOCAL_STREAMS(ONE)
}
