// Group `async`: two warpgroups of wgmma, one batch of eight each always in flight, beside other traffic of the shared memory:
// TMA writes into it, LDS.128, STS.128. Timed as in wgmma.cuh: both sides run all the time.
#pragma once

#include "async_wgmma.cuh"

namespace contention_smem { // byte offsets: matrix tiles, then the other stream's tables or landing ring, then flags
constexpr int kOther = wgmma_smem::bytes(256);
constexpr int kFinished = kOther + smem_map::kBytes, kLeave = kFinished + 16, kBarriers = kFinished + 64;
constexpr int kBytes = kFinished + 256;
} // namespace contention_smem

// Eight copies of 8 KiB in flight from 64 KiB that stay in L2, waited for and issued by one lane. kInst counts copies.
struct BulkWrites {
    static constexpr int kInst = 8, kBytes = 8192;
    uint32_t target, barriers;
    const char* source;
    int round;

    __device__ void init(const Context& c) {
        target = c.smem;
        barriers = c.smem + contention_smem::kBarriers - contention_smem::kOther;
        source = c.l2_resident;
        round = 0;
    }
    __device__ void await_slot(int slot) {
        if (round > 0) barrier_wait(barriers + 8 * slot, (round - 1) & 1, kFullSlotWait);
    }
    __device__ __forceinline__ void step(int) {
        __syncwarp();
        if (elect_lane()) {
#pragma unroll
            for (int slot = 0; slot < kInst; ++slot) {
                await_slot(slot);
                barrier_arrive_expect(barriers + 8 * slot, kBytes);
                bulk_load(target + slot * kBytes, source + slot * kBytes, kBytes, barriers + 8 * slot);
            }
        }
        ++round;
        __syncwarp();
    }
    __device__ float sink() { // nothing may land after the CTA has gone
        __syncwarp();
        if (elect_lane())
            for (int slot = 0; slot < kInst; ++slot) await_slot(slot);
        __syncwarp();
        return __int_as_float(round);
    }
};

using LoadStream = StreamOf<kLds128>::Type;
using StoreStream = StreamOf<kSts128>::Type;

enum RivalKind { kNothing, kBulkWrites, kLoads, kStores };
constexpr int kBulkSteps = inner_steps<BulkWrites>(130.0, 8000, 0);
constexpr int kLoadSteps = inner_steps<LoadStream>(16.0), kStoreSteps = inner_steps<StoreStream>(16.0);

// Warps 0-7 multiply (or, without `matrix`, only report that they are through), the others run `kind`.
template <int kN, bool kRs>
__global__ void __launch_bounds__(384, 1)
    contention_kernel(int kind, bool matrix, WgmmaPlan plan, uint32_t base, Inputs inputs, WarpTime* times, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    using namespace contention_smem;
    auto* finished = reinterpret_cast<volatile int*>(smem + kFinished);
    auto* leave = reinterpret_cast<volatile int*>(smem + kLeave);
    fill_stream_tables(smem + kOther, inputs.bf16x2);
    if (threadIdx.x == 0) {
        *finished = 0;
        for (int slot = 0; slot < BulkWrites::kInst; ++slot) barrier_init(shared_address(smem + kBarriers) + 8 * slot, 1);
        barrier_init_fence();
    }
    fill_tiles(smem, base, wgmma_smem::bytes(kN), inputs.bf16x2);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, timed = kTimedChunks;
    Context context = make_context(inputs, smem);
    WarpTime time{};
    if (warp < 8) {
        context.smem = base;
        if (matrix) {
            drive_wgmma<WgmmaStream<kN, kRs, 8>>(context, plan, timed, finished, leave, time, sink);
        } else {
            __syncthreads();
            if (context.lane == 0) atomicAdd(const_cast<int*>(finished), 1);
        }
    } else {
        context.smem = shared_address(smem + kOther);
        if (kind == kBulkWrites) drive<BulkWrites>(context, kBulkSteps, timed, finished, warps, time, sink);
        if (kind == kLoads) drive<LoadStream>(context, kLoadSteps, timed, finished, warps, time, sink);
        if (kind == kStores) drive<StoreStream>(context, kStoreSteps, timed, finished, warps, time, sink);
    }
    if (context.lane == 0) times[warp] = time;
}

struct OtherStream {
    RivalKind kind;
    int warps;
    const char* name;
    double bytes_per_chunk; // of a warp
};

template <int kN, bool kRs>
void measure_contention_case(const OtherStream& other, bool matrix, const StreamInputs& inputs) {
    DeviceArray<WarpTime> times(12);
    DeviceArray<float> sink(1);
    WgmmaPlan plan;
    plan.roles.add(kMma, 2);
    int warps = 8 + other.warps;
    auto* kernel = contention_kernel<kN, kRs>;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, contention_smem::kBytes));
    std::string mine = matrix ? wgmma_name<kN>(kRs) : "nothing";
    uint32_t base = smem_base();
    std::vector<double> cycles, bytes;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        kernel<<<1, 32 * warps, contention_smem::kBytes>>>(other.kind, matrix, plan, base, inputs.view(), times.get(), sink.get());
        finish_launch("async " + mine + " beside " + other.name);
        if (repeat < 0) continue;
        auto t = times.to_host(warps);
        auto inst = wgmma_inst_per_chunk(plan);
        if (matrix) cycles.push_back(1 / (smsp_rate(t, warps, plan.roles, 0, inst) + smsp_rate(t, warps, plan.roles, 1, inst)));
        double rate = 0;
        for (int w = 8; w < warps; ++w)
            rate += other.bytes_per_chunk * kTimedChunks / double(t[w].clock_end - t[w].clock_begin);
        if (other.warps) bytes.push_back(rate);
    }
    print_row("async", mine + "|" + other.name, other.warps, "2_warpgroups", cycles, "cycles_per_inst_per_sm");
    print_row("async", std::string(other.name) + "|" + mine, other.warps, "2_warpgroups", bytes, "bytes_per_clk");
}

template <int kN, bool kRs>
void measure_contention_shape(const StreamInputs& inputs, const std::vector<OtherStream>& others) {
    measure_contention_case<kN, kRs>({kNothing, 0, "nothing", 0}, true, inputs);
    for (const auto& other : others) measure_contention_case<kN, kRs>(other, true, inputs);
}

inline void measure_contention(const StreamInputs& inputs) {
    const double load = 512.0 * LoadStream::kInst * kLoadSteps, store = 512.0 * StoreStream::kInst * kStoreSteps;
    const double bulk = double(BulkWrites::kBytes) * BulkWrites::kInst * kBulkSteps;
    const std::vector<OtherStream> others = {{kBulkWrites, 1, "tma_write", bulk},
                                             {kLoads, 1, "lds128", load},
                                             {kLoads, 4, "lds128", load},
                                             {kStores, 1, "sts128", store},
                                             {kStores, 4, "sts128", store}};
    for (const auto& other : others) measure_contention_case<64, false>(other, false, inputs);
    measure_contention_shape<64, false>(inputs, others);
    measure_contention_shape<128, false>(inputs, others);
    measure_contention_shape<256, false>(inputs, others);
    measure_contention_shape<64, true>(inputs, others);
    measure_contention_shape<128, true>(inputs, others);
    measure_contention_shape<256, true>(inputs, others);
}
