// Group `pair`: what an instruction of stream A costs while a warp of stream B runs all the time on the same sub-partition.
#pragma once

#include <utility>

#include "issue.cuh"

constexpr int kPairStreams[] = {kHmma8, kHmmaLdsm, kFfma,  kFmul, kFadd,   kFmnmx,     kEx2,
                                kF2fp,  kIadd3,    kShfl,  kLdsm, kLds128, kSoftmaxMix};
constexpr int kPairCount = sizeof kPairStreams / sizeof kPairStreams[0];

// Warps 0-3 run A and warps 4-7 run B, or the other way round when `swapped`: so the ordered pairs A|B and B|A share a
// kernel, and the stream whose row is printed is always the one on warps 0-3.
template <int kA, int kB>
__global__ void __launch_bounds__(256, 1) pair_kernel(bool swapped, Inputs inputs, WarpTime* times, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ int finished;
    if (threadIdx.x == 0) finished = 0;
    fill_stream_tables(smem, inputs.bf16x2);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32;
    Context context = make_context(inputs, smem);
    using A = typename StreamOf<kA>::Type;
    using B = typename StreamOf<kB>::Type;
    WarpTime time{};
    if ((warp < 4) != swapped)
        drive<A>(context, inner_steps<A>(StreamOf<kA>::kCycles), kTimedChunks, &finished, warps, time, sink);
    else
        drive<B>(context, inner_steps<B>(StreamOf<kB>::kCycles), kTimedChunks, &finished, warps, time, sink);
    if (context.lane == 0) times[warp] = time;
}

using PairKernel = void (*)(bool, Inputs, WarpTime*, float*);

// Every unordered pair once; the entries below the diagonal stay null.
template <size_t... kCells>
std::vector<PairKernel> make_pair_kernels(std::index_sequence<kCells...>) {
    std::vector<PairKernel> table(kPairCount * kPairCount, nullptr);
    auto add = [&](auto cell) {
        constexpr size_t i = decltype(cell)::value / kPairCount, j = decltype(cell)::value % kPairCount;
        if constexpr (i <= j) table[i * kPairCount + j] = pair_kernel<kPairStreams[i], kPairStreams[j]>;
    };
    (add(std::integral_constant<size_t, kCells>{}), ...);
    return table;
}

// Two streams have other names here than in `issue`, whose rows tell the number of chains in `param`.
inline std::string pair_name(int id) {
    return id == kHmma8 ? "hmma8" : id == kLdsm ? "ldsm" : stream_info(id).name;
}

// Cycles per instruction of warps 0-3.
inline std::vector<double> pair_cycles(PairKernel kernel, bool swapped, int stream, const StreamInputs& inputs,
                                       DeviceArray<WarpTime>& times, DeviceArray<float>& sink) {
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamSmem));
    std::vector<double> values;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        kernel<<<1, 256, kStreamSmem>>>(swapped, inputs.view(), times.get(), sink.get());
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        double cycles = 0;
        for (const auto& t : times.to_host(4)) cycles += double(t.clock_end - t.clock_begin) / 4;
        if (repeat >= 0) values.push_back(cycles / (stream_info(stream).inst_per_chunk * kTimedChunks));
    }
    return values;
}

// Two warps of B on each sub-partition; B's row is for its two warps together.
inline void measure_pair_of_two(int a, int b, const StreamInputs& inputs) {
    Roles roles;
    roles.add(a).add(b, 2);
    auto cycles = cycles_per_inst(roles, inputs);
    std::vector<double> both;
    for (size_t k = 0; k < cycles[1].size(); ++k) both.push_back(1 / (1 / cycles[1][k] + 1 / cycles[2][k]));
    print_row("pair", pair_name(a) + "|" + pair_name(b), 2, "a_beside_2b", cycles[0], stream_unit(a));
    print_row("pair", pair_name(b) + "|" + pair_name(a), 2, "2b_beside_a", both, stream_unit(b));
}

// One dependent chain of A beside a warp of B: what an instruction that must wait for the one before it loses to B's turns.
inline void measure_chain_beside(int a, int b, const StreamInputs& inputs) {
    Roles roles;
    roles.add(a).add(b);
    print_row("pair", pair_name(a) + "_chain|" + pair_name(b), 1, "chain", cycles_per_inst(roles, inputs)[0], stream_unit(a));
}

inline void measure_pair(const Device&) {
    StreamInputs inputs;
    DeviceArray<WarpTime> times(8);
    DeviceArray<float> sink(1);
    auto kernels = make_pair_kernels(std::make_index_sequence<kPairCount * kPairCount>{});
    for (int i = 0; i < kPairCount; ++i) {
        for (int j = 0; j < kPairCount; ++j) {
            bool swapped = i > j;
            PairKernel kernel = swapped ? kernels[j * kPairCount + i] : kernels[i * kPairCount + j];
            print_row("pair", pair_name(kPairStreams[i]) + "|" + pair_name(kPairStreams[j]), 1, "",
                      pair_cycles(kernel, swapped, kPairStreams[i], inputs, times, sink), stream_unit(kPairStreams[i]));
        }
    }
    for (int a : {int(kHmma8), int(kSoftmaxMix)})
        for (int b : kPairStreams) measure_pair_of_two(a, b, inputs);
    for (int a : {int(kFaddLat), int(kFmnmxLat)})
        for (int b : {int(kFfma), int(kFmnmx), int(kEx2), int(kEx2Ffma), int(kMixInterleaved), int(kSoftmaxMix), int(kRescaleMix)})
            measure_chain_beside(a, b, inputs);
}
