// Group `beside`: one kind of vector instruction while wgmma runs all the time. What of the register ports and issue slots
// does the tensor core take, and from which instruction?
#pragma once

#include "wgmma.cuh"

constexpr int kBesideMma = kStreamCount; // a role that no stream has

#define BESIDE_STREAMS(X) \
    X(kFfma)              \
    X(kFmul)              \
    X(kFadd)              \
    X(kFmnmx)             \
    X(kEx2)               \
    X(kF2fp)              \
    X(kIadd3)             \
    X(kMov)               \
    X(kShfl)              \
    X(kMixInterleaved)    \
    X(kEx2Ffma)           \
    X(kFfmaFmnmx)         \
    X(kRescaleMix)

template <int kN, bool kRs>
__global__ void __launch_bounds__(kN > 192 ? 384 : 512, 1)
    beside_kernel(WgmmaPlan plan, Inputs inputs, WarpTime* times, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ int finished;
    __shared__ int leave[kMaxRoles];
    if (threadIdx.x == 0) finished = 0;
    auto* words = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < wgmma_smem::bytes(kN) / 4; i += blockDim.x) words[i] = inputs.bf16x2[(i * 7) & 4095];
    __syncthreads();
    wgmma_proxy_fence();
    __syncthreads();
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, role = warp / 4;
    Context context = make_context(inputs, smem);
    WarpTime time{};
    int timed = plan.roles.timed_chunks[role];
    switch (plan.roles.stream[role]) {
    case kBesideMma: drive_wgmma<WgmmaStream<kN, kRs, 8>>(context, plan, timed, &finished, leave, time, sink); break;
#define BESIDE_CASE(id)                                                                                               \
    case id:                                                                                                          \
        drive<StreamOf<id>::Type>(context, inner_steps<StreamOf<id>::Type>(StreamOf<id>::kCycles), timed, &finished, \
                                  warps, time, sink);                                                                 \
        break;
        BESIDE_STREAMS(BESIDE_CASE)
#undef BESIDE_CASE
    }
    if (context.lane == 0) times[blockIdx.x * warps + warp] = time;
}

inline double beside_inst(int id) {
    switch (id) {
#define BESIDE_INST(id) \
    case id: return double(StreamOf<id>::Type::kInst) * inner_steps<StreamOf<id>::Type>(StreamOf<id>::kCycles);
        BESIDE_STREAMS(BESIDE_INST)
#undef BESIDE_INST
    }
    return 0;
}

template <int kN, bool kRs>
void measure_beside_case(int id, int mma_groups, int vector_groups, const StreamInputs& inputs, DeviceArray<WarpTime>& times,
                         DeviceArray<float>& sink) {
    WgmmaPlan plan;
    plan.roles.add(kBesideMma, mma_groups).add(id, vector_groups);
    std::vector<double> inst;
    for (int r = 0; r < plan.roles.count; ++r)
        inst.push_back(plan.roles.stream[r] == kBesideMma ? double(plan.batch) * plan.batches_per_chunk : beside_inst(id));
    int smem = std::max(wgmma_smem::bytes(kN), kStreamSmem);
    CHECK_CUDA(cudaFuncSetAttribute(beside_kernel<kN, kRs>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    std::vector<double> mma, vector;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        beside_kernel<kN, kRs><<<1, plan.roles.count * 128, smem>>>(plan, inputs.view(), times.get(), sink.get());
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        auto t = times.to_host(plan.roles.count * 4);
        if (repeat < 0) continue;
        double mma_rate = 0, vector_rate = 0;
        for (int r = 0; r < plan.roles.count; ++r)
            (plan.roles.stream[r] == kBesideMma ? mma_rate : vector_rate) += smsp_rate(t, plan.roles.count * 4, plan.roles, r, inst);
        if (mma_groups) mma.push_back(1 / mma_rate);
        vector.push_back(1 / vector_rate);
    }
    std::string shape = mma_groups ? "m64n" + std::to_string(kN) + "k16_" + (kRs ? "rs" : "ss") : "alone";
    std::string mode = "mma_groups=" + std::to_string(mma_groups);
    print_row("beside", std::string(stream_info(id).name) + "|" + shape, vector_groups, mode, vector, "cycles_per_inst_per_smsp");
    if (mma_groups) print_row("beside", shape + "|" + stream_info(id).name, vector_groups, mode, mma, "cycles_per_inst_per_sm");
}

template <int kN, bool kRs>
void measure_beside_shape(const StreamInputs& inputs, DeviceArray<WarpTime>& times, DeviceArray<float>& sink) {
    for (int vector_groups = 1; vector_groups <= 2; ++vector_groups) {
#define BESIDE_MEASURE(id) measure_beside_case<kN, kRs>(id, 1, vector_groups, inputs, times, sink);
        BESIDE_STREAMS(BESIDE_MEASURE)
#undef BESIDE_MEASURE
    }
}

inline void measure_beside(const Device& device) {
    if (device.major != 9) return progress("beside: skipped, needs compute capability 9.0");
    StreamInputs inputs;
    DeviceArray<WarpTime> times(kMaxRoles * 4);
    DeviceArray<float> sink(1);
    for (int vector_groups = 1; vector_groups <= 2; ++vector_groups) {
#define BESIDE_ALONE(id) measure_beside_case<128, false>(id, 0, vector_groups, inputs, times, sink);
        BESIDE_STREAMS(BESIDE_ALONE)
#undef BESIDE_ALONE
    }
    measure_beside_shape<64, false>(inputs, times, sink);
    measure_beside_shape<128, false>(inputs, times, sink);
    measure_beside_shape<256, false>(inputs, times, sink);
    measure_beside_shape<128, true>(inputs, times, sink);
}
