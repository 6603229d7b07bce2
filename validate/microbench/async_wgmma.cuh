// Group `async`, matrix part: what one wgmma costs its warpgroup, what a batch costs beyond its instructions, FA3's two
// batches by turns, and the rates of shapes that `wgmma` leaves out. Kernels here have no static shared memory and get the
// offset of the dynamic one as an argument: a descriptor from the address itself costs an S2UR (some 50 cycles) per batch.
#pragma once

#include "async_ptx.cuh"
#include "wgmma.cuh"
#include "wgmma_ptx.cuh"

__global__ void find_smem_base(uint32_t* base) {
    extern __shared__ __align__(1024) char smem[];
    *base = shared_address(smem) & 0x3ffff;
}

inline uint32_t smem_base() {
    static uint32_t base = [] {
        DeviceArray<uint32_t> out(1);
        find_smem_base<<<1, 1, 1024>>>(out.get());
        finish_launch("async shared memory base");
        return out.to_host(1)[0];
    }();
    return base;
}

// Fills the first `bytes` bytes for the async proxy; all threads. `mask` keeps NaN out of bytes read as e4m3.
__device__ inline void fill_tiles(char* smem, uint32_t base, int bytes, const uint32_t* bits, uint32_t mask = ~0u) {
    if ((shared_address(smem) & 0x3ffff) != base || base % 1024 != 0) raise_alarm(kSmemBase);
    auto* words = reinterpret_cast<uint32_t*>(smem);
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = bits[i * 7 & 4095] & mask;
    wgmma_proxy_fence();
    __syncthreads();
}

constexpr int kBatchRounds = 40, kColdBatches = 8;
constexpr int kBusyBatches = kBatchRounds * 8; // of the other warpgroup: more than it gets through meanwhile

// On the clock of warp 0: before the fence, after each instruction (of stamped batches), after the wait.
struct BatchStamps {
    Cycles empty, begin, after[8], end;
};

template <int kN, bool kRs, int kBatch, bool kEach>
__device__ __forceinline__ void time_batches(const Context& context, BatchStamps* stamps, float* sink) {
    WgmmaStream<kN, kRs, 8> s;
    __syncthreads(); // here, in the branch: then ptxas knows that warps are whole and keeps descriptors in uniform registers
    s.init(context, false);
#pragma unroll 1
    for (int round = 0; round < kBatchRounds; ++round) {
        Cycles empty = read_clock(), after[kBatch];
        empty = read_clock() - empty;
        Cycles begin = read_clock();
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            int tile = i / 4 & 1, k = i % 4;
            uint64_t b = s.b + tile * (kN * 128 / 16) + k * 2;
            if constexpr (kRs)
                Wgmma<kN>::rs(s.d, s.a_regs, b);
            else
                Wgmma<kN>::ss(s.d, s.a + tile * (wgmma_smem::kATile / 16) + k * 2, b);
            if (kEach) after[i] = read_clock();
        }
        wgmma_commit();
        wgmma_wait<0>();
        Cycles end = read_clock();
        if (threadIdx.x == 0) {
            stamps[round].empty = empty;
            stamps[round].begin = begin;
            stamps[round].end = end;
            if (kEach)
                for (int i = 0; i < kBatch; ++i) stamps[round].after[i] = after[i];
        }
        __syncwarp();
    }
    float sum = s.sink();
    if (sum == 1.2345e33f) *sink = sum;
}

// Warpgroup 0 is timed; warpgroup 1, if there, keeps the tensor cores busy.
template <int kN, bool kRs, int kBatch, bool kEach>
__global__ void __launch_bounds__(256, 1)
    batch_kernel(uint32_t base, Inputs inputs, BatchStamps* stamps, Cycles* ends, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    fill_tiles(smem, base, wgmma_smem::bytes(kN), inputs.bf16x2);
    Context context = make_context(inputs, smem);
    context.smem = base;
    if (!kEach || threadIdx.x < 128) {
        time_batches<kN, kRs, kBatch, kEach>(context, stamps, sink);
    } else {
        WgmmaStream<kN, kRs, 8> stream;
        __syncthreads();
        stream.init(context, true);
#pragma unroll 1
        for (int i = 0; i < kBusyBatches; ++i) stream.step();
        float sum = stream.sink();
        if (sum == 1.2345e33f) *sink = sum;
    }
    if (threadIdx.x % 128 == 0) ends[threadIdx.x / 128] = read_clock();
}

template <int kN>
std::string wgmma_name(bool rs, const char* k = "k16") {
    return "m64n" + std::to_string(kN) + k + (rs ? "_rs" : "_ss");
}

class BatchBench {
  public:
    explicit BatchBench(const StreamInputs& inputs) : inputs_(inputs), stamps_(kBatchRounds), ends_(2), sink_(1) {}

    // From before the fence to after the wait.
    template <int kN, bool kRs, int kBatch>
    void batch() {
        std::vector<double> total;
        for (int repeat = -1; repeat < kRepeats; ++repeat) {
            auto stamps = run<kN, kRs, kBatch, false>(1);
            double cycles = median_of(stamps, [](const BatchStamps& s) { return double(s.end - s.begin) - double(s.empty); });
            if (repeat >= 0) total.push_back(cycles);
        }
        print_row("async", "wgmma_batch_" + wgmma_name<kN>(kRs), 4, "k=" + std::to_string(kBatch), total, "cycles");
    }

    // Stamps after each instruction of a batch of eight. ptxas makes the commit a flag of the last instruction.
    template <int kN, bool kRs>
    void issue() {
        for (int groups : {1, 2}) {
            std::vector<double> parts[5];
            for (int repeat = -1; repeat < kRepeats; ++repeat) {
                auto stamps = run<kN, kRs, 8, true>(groups);
                if (repeat < 0) continue;
                auto part = [&](int i, auto from, auto to, int reads) {
                    parts[i].push_back(median_of(stamps, [&](const BatchStamps& s) {
                        return (double(to(s) - from(s)) - reads * double(s.empty)) / reads;
                    }));
                };
                auto begin = [](const BatchStamps& s) { return s.begin; };
                auto end = [](const BatchStamps& s) { return s.end; };
                auto after = [](int i) { return [i](const BatchStamps& s) { return s.after[i - 1]; }; };
                part(0, begin, after(1), 1);
                part(1, after(1), after(2), 1);
                part(2, after(2), after(3), 1);
                part(3, after(3), after(8), 5);
                part(4, after(8), end, 1);
            }
            const char* names[5] = {"fence_and_issue1", "issue2", "issue3", "issue4to8_each", "wait"};
            for (int i = 0; i < 5; ++i)
                print_row("async", "wgmma_issue_" + wgmma_name<kN>(kRs), 4 * groups,
                          std::string(names[i]) + (groups == 1 ? "_alone" : "_busy"), parts[i], "cycles");
        }
    }

  private:
    template <class Value>
    static double median_of(const std::vector<BatchStamps>& stamps, Value value) {
        std::vector<double> v;
        for (size_t i = kColdBatches; i < stamps.size(); ++i) v.push_back(value(stamps[i]));
        return median(v);
    }

    template <int kN, bool kRs, int kBatch, bool kEach>
    std::vector<BatchStamps> run(int groups) {
        auto* kernel = batch_kernel<kN, kRs, kBatch, kEach>;
        CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wgmma_smem::bytes(kN)));
        uint32_t base = smem_base();
        kernel<<<1, 128 * groups, wgmma_smem::bytes(kN)>>>(base, inputs_.view(), stamps_.get(), ends_.get(), sink_.get());
        finish_launch("async wgmma batch " + wgmma_name<kN>(kRs));
        auto ends = ends_.to_host(2);
        if (groups == 2 && ends[1] < ends[0]) progress("async: the busy warpgroup ended first beside " + wgmma_name<kN>(kRs));
        return stamps_.to_host(kBatchRounds);
    }

    const StreamInputs& inputs_;
    DeviceArray<BatchStamps> stamps_;
    DeviceArray<Cycles> ends_;
    DeviceArray<float> sink_;
};

// FA3's tiles at head dimension 128 and 176 keys: Q 64 x 128 (both warpgroups read the same), K 176 x 128, V 128 x 176.
namespace fa3_smem {
constexpr int kKTile = 176 * 128, kVTile = 128 * 128;
constexpr int kK = 2 * 64 * 128, kV = kK + 2 * kKTile, kBytes = kV + 3 * kVTile;
} // namespace fa3_smem
constexpr int kFa3Rounds = 64, kFa3Wgmma = 8 + 11;

// Per round QK (8 x m64n176k16 from shared memory) and PV (11 x m64n128k16, P in registers), without softmax. kSerial waits for
// QK before it issues PV. kPingPong: a warpgroup issues its two batches between its barrier and the other's, as FA3 does.
template <bool kPingPong, bool kSerial, bool kNMajorV>
__global__ void __launch_bounds__(256, 1) fa3_kernel(uint32_t base, Inputs inputs, Cycles* cycles, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    fill_tiles(smem, base, fa3_smem::kBytes, inputs.bf16x2);
    int group = threadIdx.x / 128;
    Context context = make_context(inputs, smem);
    float s[88], o[64];
    uint32_t p[11][4];
    for (float& x : s) x = 0;
    for (float& x : o) x = 0;
    for (int j = 0; j < 11; ++j)
        for (int i = 0; i < 4; ++i) p[j][i] = context.bits(4 * j + i);
    uint64_t q = wgmma_descriptor(base), k = wgmma_descriptor(base + fa3_smem::kK);
    uint64_t v = kNMajorV ? wgmma_descriptor_n_major(base + fa3_smem::kV, 176 * 128) : wgmma_descriptor(base + fa3_smem::kV);
    if (kPingPong && group == 1) bar_arrive(1, 256);
    Cycles begin = 0;
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) { // the first warms up
        begin = read_clock();
#pragma unroll 1
        for (int round = 0; round < (pass == 0 ? 8 : kFa3Rounds); ++round) {
            if (kPingPong) bar_sync(1 + group, 256);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; ++i)
                Wgmma<176>::ss(s, q + i / 4 * (64 * 128 / 16) + i % 4 * 2, k + i / 4 * (fa3_smem::kKTile / 16) + i % 4 * 2);
            wgmma_commit();
            if (kSerial) {
                wgmma_wait<0>();
                wgmma_fence();
            }
#pragma unroll
            for (int j = 0; j < 11; ++j) {
                if constexpr (kNMajorV)
                    WgmmaNMajor<128>::rs(o, p[j], v + j * (16 * 128 / 16));
                else
                    Wgmma<128>::rs(o, p[j], v + j / 4 * (fa3_smem::kVTile / 16) + j % 4 * 2);
            }
            wgmma_commit();
            if (kPingPong) bar_arrive(2 - group, 256);
            if (!kSerial) wgmma_wait<1>();
            wgmma_wait<0>();
        }
    }
    if (threadIdx.x % 128 == 0) cycles[group] = read_clock() - begin;
    if (kPingPong && group == 0) bar_sync(1, 256);
    float sum = 0;
    for (float x : s) sum += x;
    for (float x : o) sum += x;
    if (sum == 1.2345e33f) *sink = sum;
}

// Two clocks, one per warpgroup; cycles of the SM per instruction when each warpgroup issued `each`.
template <class Launch>
std::vector<double> cycles_per_wgmma(int groups, double each, const std::string& what, DeviceArray<Cycles>& cycles,
                                     Launch launch) {
    std::vector<double> values;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        launch();
        finish_launch("async " + what);
        auto c = cycles.to_host(2);
        double taken = groups == 2 ? 0.5 * (double(c[0]) + double(c[1])) : double(c[0]);
        if (repeat >= 0) values.push_back(taken / (each * groups));
    }
    return values;
}

template <bool kPingPong, bool kSerial, bool kNMajorV>
void measure_fa3_turns(int groups, const StreamInputs& inputs) {
    DeviceArray<Cycles> cycles(2);
    DeviceArray<float> sink(1);
    auto* kernel = fa3_kernel<kPingPong, kSerial, kNMajorV>;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, fa3_smem::kBytes));
    std::string param = std::string(groups == 1 ? "alone" : kPingPong ? "ping_pong" : "free") +
                        (kSerial ? "_qk_then_pv" : "_both_in_flight") + (kNMajorV ? "_v_n_major" : "_v_k_major");
    uint32_t base = smem_base();
    auto values = cycles_per_wgmma(groups, kFa3Rounds * kFa3Wgmma, "fa3 " + param, cycles, [&] {
        kernel<<<1, 128 * groups, fa3_smem::kBytes>>>(base, inputs.view(), cycles.get(), sink.get());
    });
    print_row("async", "fa3_qk8_n176_pv11_n128", 4 * groups, param, values, "cycles_per_inst_per_sm");
}

template <bool kSerial, bool kNMajorV>
void measure_fa3_modes(const StreamInputs& inputs) {
    measure_fa3_turns<false, kSerial, kNMajorV>(1, inputs);
    measure_fa3_turns<false, kSerial, kNMajorV>(2, inputs);
    measure_fa3_turns<true, kSerial, kNMajorV>(2, inputs);
}

constexpr int kRateBatches = 64;

// Batches of eight, one batch always in flight.
template <class Op, int kN, bool kRs, uint32_t kMask>
__global__ void __launch_bounds__(256, 1) rate_kernel(uint32_t base, Inputs inputs, Cycles* cycles, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    fill_tiles(smem, base, wgmma_smem::bytes(kN), inputs.bf16x2, kMask);
    Context context = make_context(inputs, smem);
    float d[kN / 2];
    uint32_t a_regs[4];
    for (float& x : d) x = 0;
    for (int i = 0; i < 4; ++i) a_regs[i] = context.bits(i) & kMask;
    uint64_t a = wgmma_descriptor(base), b = wgmma_descriptor(base + wgmma_smem::kB);
    Cycles begin = 0;
#pragma unroll 1
    for (int batch = -8; batch < kRateBatches; ++batch) {
        if (batch == 0) begin = read_clock();
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint64_t b_k = b + i / 4 * (kN * 128 / 16) + i % 4 * 2;
            if constexpr (kRs)
                Op::rs(d, a_regs, b_k);
            else
                Op::ss(d, a + i / 4 * (wgmma_smem::kATile / 16) + i % 4 * 2, b_k);
        }
        wgmma_commit();
        wgmma_wait<1>();
    }
    if (threadIdx.x % 128 == 0) cycles[threadIdx.x / 128] = read_clock() - begin;
    wgmma_wait<0>();
    float sum = 0;
    for (float x : d) sum += x;
    if (sum == 1.2345e33f) *sink = sum;
}

template <class Op, int kN, bool kRs, uint32_t kMask>
void measure_rate(const std::string& name, const StreamInputs& inputs) {
    DeviceArray<Cycles> cycles(2);
    DeviceArray<float> sink(1);
    auto* kernel = rate_kernel<Op, kN, kRs, kMask>;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, wgmma_smem::bytes(kN)));
    uint32_t base = smem_base();
    for (int groups : {1, 2}) {
        auto values = cycles_per_wgmma(groups, 8 * kRateBatches, name, cycles, [&] {
            kernel<<<1, 128 * groups, wgmma_smem::bytes(kN)>>>(base, inputs.view(), cycles.get(), sink.get());
        });
        print_row("async", name, 4 * groups, "pipelined", values, "cycles_per_inst_per_sm");
    }
}

template <int... kNs>
void measure_bf16_rates(const StreamInputs& inputs) {
    (measure_rate<Wgmma<kNs>, kNs, false, ~0u>("wgmma_bf16_" + wgmma_name<kNs>(false), inputs), ...);
    (measure_rate<Wgmma<kNs>, kNs, true, ~0u>("wgmma_bf16_" + wgmma_name<kNs>(true), inputs), ...);
}

template <int... kNs>
void measure_fp8_rates(const StreamInputs& inputs) {
    (measure_rate<WgmmaFp8<kNs>, kNs, false, 0xbfbfbfbfu>("wgmma_e4m3_" + wgmma_name<kNs>(false, "k32"), inputs), ...);
    (measure_rate<WgmmaFp8<kNs>, kNs, true, 0xbfbfbfbfu>("wgmma_e4m3_" + wgmma_name<kNs>(true, "k32"), inputs), ...);
}

template <int... kNs>
void measure_single_wgmma(BatchBench& bench) {
    (bench.batch<kNs, false, 1>(), ...);
    (bench.batch<kNs, true, 1>(), ...);
}

template <int kN, bool kRs>
void measure_batches(BatchBench& bench) {
    bench.batch<kN, kRs, 2>();
    bench.batch<kN, kRs, 4>();
    bench.batch<kN, kRs, 8>();
}

template <int... kNs>
void measure_batch_costs(BatchBench& bench) {
    (measure_batches<kNs, false>(bench), ...);
    (measure_batches<kNs, true>(bench), ...);
}

template <int... kNs>
void measure_issue_costs(BatchBench& bench) {
    (bench.issue<kNs, false>(), ...);
    (bench.issue<kNs, true>(), ...);
}

inline void measure_wgmma_batches(const StreamInputs& inputs) {
    BatchBench bench(inputs);
    measure_issue_costs<64, 128, 256>(bench);
    measure_single_wgmma<8, 16, 32, 64, 128, 176, 256>(bench);
    measure_batch_costs<64, 128, 176, 256>(bench);
    measure_fa3_modes<false, false>(inputs);
    measure_fa3_modes<true, false>(inputs);
    measure_fa3_modes<false, true>(inputs);
    measure_bf16_rates<8, 16, 32>(inputs);
    measure_fp8_rates<64, 128, 192, 256>(inputs);
}
