// Group `wgmma`: cost of m64nNk16 alone and beside the softmax mix. Same method as harness.cuh, in its own kernel because
// the accumulators of N = 256 need more registers than 512 threads may have.
#pragma once

#include "harness.cuh"
#include "wgmma_ptx.cuh"

enum WgmmaRole { kMma = 0, kMix = 1 };

// Shorter chunks of the mix than in harness.cuh: both kinds of warpgroup then end their timed parts at about the same time.
constexpr int kMixSteps = inner_steps<SoftmaxMix>(12.0, 2500, 0);

namespace wgmma_smem { // byte offsets: two A tiles of 64 x 64 that all warpgroups read
// (a descriptor the compiler knows to be uniform needs no R2UR per instruction), then two B tiles of N x 64
constexpr int kATile = 64 * 128;
constexpr int kB = 2 * kATile;
__host__ __device__ constexpr int bytes(int n) { return kB + 2 * n * 128; }
} // namespace wgmma_smem

// kBatch instructions per commit; with pipelined, one batch stays in flight (the tensor pipe never drains),
// otherwise each batch is waited for before the next. kInst counts wgmma.
template <int kN, bool kRs, int kBatch>
struct WgmmaStream {
    float d[kN / 2];
    uint32_t a_regs[4];
    uint64_t a, b;
    bool pipelined;

    __device__ void init(const Context& c, bool pipelined_) {
        pipelined = pipelined_;
        for (int i = 0; i < kN / 2; ++i) d[i] = 0;
        for (int i = 0; i < 4; ++i) a_regs[i] = c.bits(i);
        a = wgmma_descriptor(c.smem);
        b = wgmma_descriptor(c.smem + wgmma_smem::kB);
    }
    __device__ __forceinline__ void step() {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int tile = (i / 4) & 1, k = i % 4; // the two tiles take turns; k-steps of 16 elements are 32 B apart
            uint64_t b_k = b + tile * (kN * 128 / 16) + k * 2;
            if constexpr (kRs)
                Wgmma<kN>::rs(d, a_regs, b_k);
            else
                Wgmma<kN>::ss(d, a + tile * (wgmma_smem::kATile / 16) + k * 2, b_k);
        }
        wgmma_commit();
        if (pipelined)
            wgmma_wait<1>();
        else
            wgmma_wait<0>();
    }
    __device__ float sink() {
        wgmma_wait<0>();
        float s = 0;
        for (int i = 0; i < kN / 2; ++i) s += d[i];
        return s;
    }
};

struct WgmmaPlan {
    Roles roles;
    int batch = 8;
    bool pipelined = true;
    int batches_per_chunk = 8;
};

// The drive loop for a warpgroup: its four warps must leave together, so one of them reads the flag for all.
template <class Body>
__device__ __forceinline__ void drive_wgmma(const Context& context, const WgmmaPlan& plan, int timed, volatile int* finished,
                                            volatile int* leave, WarpTime& time, float* sink) {
    int warps = blockDim.x / 32, group = context.warp / 4;
    Body body;
    body.init(context, plan.pipelined);
    __syncthreads();
    for (int chunk = 0;; ++chunk) {
        if (chunk == kWarmChunks) {
            time.ns_begin = read_globaltimer();
            time.clock_begin = read_clock();
        }
        if (chunk >= kWarmChunks + timed) {
            if (chunk == kWarmChunks + timed) {
                time.clock_end = read_clock();
                time.ns_end = read_globaltimer();
                if (context.lane == 0) atomicAdd(const_cast<int*>(finished), 1);
            }
            if (threadIdx.x % 128 == 0) leave[group] = *finished == warps;
            bar_sync(1 + group, 128);
            int go = leave[group];
            bar_sync(1 + group, 128);
            if (go) break;
        }
#pragma unroll 1
        for (int i = 0; i < plan.batches_per_chunk; ++i) body.step();
    }
    float s = body.sink();
    if (s == 1.2345e33f) *sink = s;
}

template <int kN, bool kRs>
__global__ void __launch_bounds__(kN > 192 ? 384 : 512, 1)
    wgmma_kernel(WgmmaPlan plan, Inputs inputs, WarpTime* times, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ int finished;
    __shared__ int leave[kMaxRoles];
    if (threadIdx.x == 0) finished = 0;
    auto* words = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < wgmma_smem::bytes(kN) / 4; i += blockDim.x) words[i] = inputs.bf16x2[(i * 7) & 4095];
    wgmma_proxy_fence();
    __syncthreads();
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, role = warp / 4;
    Context context = make_context(inputs, smem);
    WarpTime time{};
    int timed = plan.roles.timed_chunks[role];
    if (plan.roles.stream[role] == kMma) {
        if (plan.batch == 4) drive_wgmma<WgmmaStream<kN, kRs, 4>>(context, plan, timed, &finished, leave, time, sink);
        if (plan.batch == 8) drive_wgmma<WgmmaStream<kN, kRs, 8>>(context, plan, timed, &finished, leave, time, sink);
        if (plan.batch == 12) drive_wgmma<WgmmaStream<kN, kRs, 12>>(context, plan, timed, &finished, leave, time, sink);
    } else
        drive<SoftmaxMix>(context, kMixSteps, timed, &finished, warps, time, sink);
    if (context.lane == 0) times[blockIdx.x * warps + warp] = time;
}

inline std::vector<double> wgmma_inst_per_chunk(const WgmmaPlan& plan) {
    std::vector<double> v;
    for (int r = 0; r < plan.roles.count; ++r)
        v.push_back(plan.roles.stream[r] == kMma ? double(plan.batch) * plan.batches_per_chunk
                                                 : double(SoftmaxMix::kInst) * kMixSteps);
    return v;
}

template <int kN, bool kRs>
void launch_wgmma(const WgmmaPlan& plan, const Inputs& inputs, int ctas, WarpTime* times, float* sink) {
    int smem = std::max(wgmma_smem::bytes(kN), kStreamSmem);
    CHECK_CUDA(cudaFuncSetAttribute(wgmma_kernel<kN, kRs>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    wgmma_kernel<kN, kRs><<<ctas, plan.roles.count * 128, smem>>>(plan, inputs, times, sink);
    CHECK_CUDA(cudaGetLastError());
}

// Sum over the warpgroups that hold `stream`, in instructions (elements) per cycle of the SM; a warp carries its share once.
inline double warpgroup_rate(const std::vector<WarpTime>& times, const WgmmaPlan& plan, int stream) {
    auto inst = wgmma_inst_per_chunk(plan);
    double total = 0;
    for (int r = 0; r < plan.roles.count; ++r)
        if (plan.roles.stream[r] == stream) total += smsp_rate(times, plan.roles.count * 4, plan.roles, r, inst);
    return total;
}

template <int kN, bool kRs>
void measure_wgmma_case(int mma_groups, int mix_groups, int batch, bool pipelined, const StreamInputs& inputs,
                        DeviceArray<WarpTime>& times, DeviceArray<float>& sink) {
    WgmmaPlan plan;
    plan.batch = batch;
    plan.pipelined = pipelined;
    plan.batches_per_chunk = std::max(1, 64 / batch);
    plan.roles.add(kMma, mma_groups).add(kMix, mix_groups);
    std::vector<double> mma, mix;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        launch_wgmma<kN, kRs>(plan, inputs.view(), 1, times.get(), sink.get());
        CHECK_CUDA(cudaDeviceSynchronize());
        auto t = times.to_host(plan.roles.count * 4);
        if (repeat < 0) continue;
        mma.push_back(1 / warpgroup_rate(t, plan, kMma));
        if (mix_groups) mix.push_back(mix_groups / warpgroup_rate(t, plan, kMix));
    }
    std::string name = "m64n" + std::to_string(kN) + "k16_" + (kRs ? "rs" : "ss");
    std::string beside = mix_groups ? "|softmax_mix_x" + std::to_string(mix_groups) : "";
    std::string mode = pipelined ? "pipelined" : "batch" + std::to_string(batch);
    print_row("wgmma", name + beside, mma_groups, mode, mma, "cycles_per_inst_per_sm");
    if (mix_groups)
        print_row("wgmma", "softmax_mix_x" + std::to_string(mix_groups) + "|" + name, mma_groups, mode, mix,
                  "cycles_per_element_per_warpgroup");
}

template <int kN, bool kRs>
void measure_wgmma_shape(const StreamInputs& inputs) {
    DeviceArray<WarpTime> times(kMaxRoles * 4);
    DeviceArray<float> sink(1);
    int max_groups = kN > 192 ? 3 : 4;
    for (int mma = 1; mma <= 2; ++mma) {
        for (int mix = 0; mix <= 2 && mma + mix <= max_groups; ++mix) {
            measure_wgmma_case<kN, kRs>(mma, mix, 8, true, inputs, times, sink);
            for (int batch : {4, 8, 12})
                if (mix == 0 || batch == 8) measure_wgmma_case<kN, kRs>(mma, mix, batch, false, inputs, times, sink);
        }
    }
}

inline void measure_wgmma(const Device& device) {
    if (device.major != 9) return progress("wgmma: skipped, needs compute capability 9.0");
    StreamInputs inputs;
    measure_wgmma_shape<64, false>(inputs);
    measure_wgmma_shape<80, false>(inputs);
    measure_wgmma_shape<128, false>(inputs);
    measure_wgmma_shape<176, false>(inputs);
    measure_wgmma_shape<192, false>(inputs);
    measure_wgmma_shape<256, false>(inputs);
    measure_wgmma_shape<64, true>(inputs);
    measure_wgmma_shape<80, true>(inputs);
    measure_wgmma_shape<128, true>(inputs);
    measure_wgmma_shape<176, true>(inputs);
    measure_wgmma_shape<256, true>(inputs);
}
