// What an instruction's energy depends on: operands' data, where they come from, and the clock (voltage) it runs at. Same method and columns
// as group `power` (every SM does one thing for a second; clock, watts, rates), its own program because it takes minutes to build
// otherwise. `sleep` rows do nothing for a share of the time, so that power stays under the limit; `--trace PATH` keeps each launch's clock.
//
//     nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -o energy energy.cu -ldl
//     ./energy [--trace PATH] > energy.csv
// With -DFORMATS_ONLY just the products of bf16 and fp16 side by side.
#include <cstring>
#include <ctime>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "energy_wgmma.cuh"
#include "power.cuh"

using Words = std::vector<uint32_t>;

inline uint32_t bf16_bits(float v) {
    uint32_t u;
    memcpy(&u, &v, 4);
    return (u + 0x8000u) >> 16;
}

// kDataCount words of two bf16 or fp16 or of four e4m3 numbers.
Words filled(int fill, int format) {
    std::mt19937 engine(20261130 + fill);
    std::normal_distribution<float> draw;
    auto number = [&] {
        float x = draw(engine);
        return fill == kZeros ? 0.f : fill == kWeights ? std::exp(x - 4.f) : x;
    };
    Words words(kDataCount, 0u);
    for (auto& word : words) {
        if (format == kE4m3) // weights of FP8 attention are scaled up to fill e4m3's range
            for (int i = 0; i < 4; ++i)
                word |= uint32_t(__nv_cvt_float_to_fp8(number() * (fill == kWeights ? 256.f : 1.f), __NV_SATFINITE, __NV_E4M3)) << (8 * i);
        else
            for (int shift : {16, 0}) {
                float x = number();
                word |= uint32_t(format == kFp16 ? __half_as_ushort(__float2half(x)) : bf16_bits(x)) << shift;
            }
    }
    return words;
}

class EnergyBench {
  public:
    EnergyBench(const Device& device, std::FILE* trace)
        : power_(device), normal_(kDataCount), words_(kDataCount * kFormats * kFills), counts_(size_t(device.sms) * 16), times_(size_t(device.sms) * 16), sink_(1), l2_(kEnergyL2) {
        fill_random<<<1024, 256>>>(reinterpret_cast<uint32_t*>(l2_.get()), size_t(kEnergyL2) * 4);
        power_.trace = trace;
        std::mt19937 engine(7);
        std::normal_distribution<float> draw;
        std::vector<float> normal(kDataCount);
        for (auto& v : normal) v = draw(engine);
        normal_.from_host(normal);
        Words all;
        for (int format = 0; format < kFormats; ++format)
            for (int fill = 0; fill < kFills; ++fill)
                for (uint32_t word : filled(fill, format)) all.push_back(word);
        words_.from_host(all);
    }

    template <class Op>
    void stream() {
        launch(Op::kName, kEnergyThreads / 32, Op::kInst, [&](int steps, WarpTime* times) {
            allow_smem(energy_kernel<Op>);
            energy_kernel<Op><<<power_.sms(), kEnergyThreads, kStreamSmem>>>(inputs(), steps, times, sink_.get());
        });
    }
    template <int kFormat = kBf16>
    void hmma(int fill_a, int fill_b, int gap_ns = 0) {
        std::string name = std::string(kFormat == kFp16 ? "hmma_fp16_" : "hmma_") + fill_name(fill_a) + "_" + fill_name(fill_b) + sleeping(gap_ns);
        launch(name, kEnergyThreads / 32, kHmmaPerStep, [=, this](int steps, WarpTime* times) {
            allow_smem(energy_hmma<kFormat>);
            energy_hmma<kFormat><<<power_.sms(), kEnergyThreads, kStreamSmem>>>(words(fill_a, kFormat), words(fill_b, kFormat), gap_ns, steps, times, sink_.get());
        });
    }
    template <int kN, bool kRs, int kFormat = kBf16, bool kSleep = false>
    void wgmma(EnergyPlan plan) {
        constexpr const char* kNames[] = {"wgmma_n", "wgmma_fp16_n", "wgmma_fp8_n"};
        std::string name = kNames[kFormat] + std::to_string(kN) + (kRs ? "_rs_" : "_ss_") + fill_name(plan.fill_a) +
                           "_" + fill_name(plan.fill_b) + "_" + std::to_string(plan.mma_groups) + "wg" + sleeping(plan.gap_ns);
        if (plan.other_groups) name += (plan.other_reads ? "+l2_read_" : "+ffma_") + std::to_string(plan.other_groups) + "wg";
        int warps = 4 * (plan.mma_groups + plan.other_groups);
        auto* a = words(plan.fill_a, kFormat);
        auto* b = words(plan.fill_b, kFormat);
        auto run = [=, this](int batches, WarpTime* times) {
            EnergyPlan longer = plan;
            longer.batches = batches;
            int smem = std::max(wgmma_smem::bytes(kN), kStreamSmem);
            CHECK_CUDA(cudaFuncSetAttribute(energy_wgmma<kN, kRs, kFormat, kSleep>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
            energy_wgmma<kN, kRs, kFormat, kSleep><<<power_.sms(), warps * 32, smem>>>(longer, inputs(), l2_.get(), a, b, times, counts_.get(), sink_.get());
        };
        Activity activity = prepared(name, warps, run);
        activity.rates = [=, this](const std::vector<WarpTime>& times) {
            auto counts = counts_.to_host(times.size());
            double mma = 0, other = 0, cycles = sm_cycles(times, warps);
            for (size_t i = 0; i < times.size(); ++i) (int(i % warps) / 4 < plan.mma_groups ? mma : other) += counts[i] / cycles;
            std::vector<std::pair<std::string, double>> rows{{"wgmma_per_clk_per_sm", mma / 4}}; // once for its warpgroup
            if (plan.other_groups && !plan.other_reads) rows.push_back({"ffma_per_clk_per_sm", other});
            if (plan.other_groups && plan.other_reads) rows.push_back({"l2_bytes_per_clk_per_sm", 512 * other});
            return rows;
        };
        power_.run(activity);
    }
    PowerBench& power() { return power_; }

  private:
    static std::string sleeping(int gap_ns) { return gap_ns ? "_sleep" + std::to_string(gap_ns) : ""; }
    EnergyInputs inputs() const {
        return {normal_.get(), {words(kNormal, kBf16), words(kWeights, kBf16), words(kZeros, kBf16)}};
    }
    const uint32_t* words(int fill, int format) const { return words_.get() + size_t(format * kFills + fill) * kDataCount; }
    template <class Kernel>
    static void allow_smem(Kernel kernel) {
        CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamSmem));
    }
    // Cycles from the first warp's begin to the last one's end, summed over SMs.
    static double sm_cycles(const std::vector<WarpTime>& times, int warps) {
        double total = 0;
        for (size_t sm = 0; sm < times.size(); sm += warps) {
            unsigned long long first = ~0ull, last = 0;
            for (size_t i = sm; i < sm + warps; ++i) first = std::min(first, times[i].clock_begin), last = std::max(last, times[i].clock_end);
            total += double(last - first);
        }
        return total;
    }
    // An activity whose launches take about kLaunchSeconds, from a probe; after a pause, so that each begins from rest.
    template <class Run>
    Activity prepared(const std::string& name, int warps, Run run) {
        constexpr int kProbe = 200;
        for (int i = 0; i < 2; ++i) run(kProbe, times_.get());
        CHECK_CUDA(cudaDeviceSynchronize());
        auto probe = times_.to_host(1);
        int steps = std::max(1, int(kLaunchSeconds * 1e9 * kProbe / double(probe[0].ns_end - probe[0].ns_begin)));
        timespec nap{0, 250000000};
        nanosleep(&nap, nullptr);
        Activity activity{name, warps / 4, size_t(power_.sms()) * warps, nullptr, nullptr};
        activity.launch = [=](WarpTime* times) { run(steps, times); };
        steps_ = steps;
        return activity;
    }
    template <class Run>
    void launch(const std::string& name, int warps, int inst, Run run) {
        Activity activity = prepared(name, warps, run);
        activity.rates = [=, this, steps = steps_](const std::vector<WarpTime>& times) {
            double rate = double(inst) * steps * times.size() / sm_cycles(times, warps);
            return std::vector<std::pair<std::string, double>>{{"inst_per_clk_per_sm", rate}};
        };
        power_.run(activity);
    }

    PowerBench power_;
    DeviceArray<float> normal_;
    DeviceArray<uint32_t> words_;
    DeviceArray<int> counts_;
    DeviceArray<WarpTime> times_;
    DeviceArray<float> sink_;
    DeviceArray<uint4> l2_;
    int steps_ = 1;
};

void measure_vector(EnergyBench& bench) {
    bench.stream<SleepEnergy>();
    bench.stream<FfmaEnergy>();
    bench.stream<FmulEnergy>();
    bench.stream<FaddEnergy>();
    bench.stream<FmnmxEnergy>();
    bench.stream<F2fpEnergy>();
    bench.stream<Ex2Energy>();
    bench.stream<Lop3Energy>();
    bench.stream<ImadEnergy>();
    bench.stream<ShflEnergy>();
    bench.stream<LdsmEnergy>();
    bench.stream<StsEnergy>();
    bench.hmma(kNormal, kNormal);
    bench.hmma(kWeights, kNormal);
    bench.hmma(kZeros, kZeros);
    bench.hmma(kNormal, kNormal, 1000);
    bench.power().memory_read("l2_read", MemoryBench::kL2Ring, false);
    bench.power().memory_read("hbm_read", bench.power().hbm_ring(), true);
}

template <int kN>
void measure_operands(EnergyBench& bench) {
    bench.wgmma<kN, false>({});
    bench.wgmma<kN, true>({.fill_a = kWeights});
}

void measure_products(EnergyBench& bench) {
    measure_operands<64>(bench);
    measure_operands<80>(bench);
    measure_operands<128>(bench);
    measure_operands<176>(bench);
    measure_operands<256>(bench);
    bench.wgmma<128, true>({});
    bench.wgmma<256, true>({});
    bench.wgmma<128, false>({.fill_a = kWeights});
    bench.wgmma<256, false>({.fill_a = kZeros, .fill_b = kZeros});
    bench.wgmma<128, false>({.fill_a = kZeros, .fill_b = kZeros});
    bench.wgmma<128, false>({.fill_a = kZeros});
    bench.wgmma<128, false>({.fill_b = kZeros});
    bench.wgmma<128, false>({.mma_groups = 1});
    for (int gap : {500, 1500, 4000, 10000}) bench.wgmma<256, false, kBf16, true>({.gap_ns = gap});
    bench.wgmma<128, false>({.other_groups = 1});
    bench.wgmma<128, false>({.other_groups = 1, .other_reads = true});
    bench.wgmma<128, false>({.fill_a = kZeros, .fill_b = kZeros, .other_groups = 1, .other_reads = true});
    bench.wgmma<128, false, kE4m3>({});
    bench.wgmma<128, true, kE4m3>({.fill_a = kWeights});
    bench.wgmma<256, false, kE4m3>({});
    bench.wgmma<256, true, kE4m3>({.fill_a = kWeights});
}

template <int kN, int kFormat>
void measure_format(EnergyBench& bench) {
    bench.wgmma<kN, false, kFormat>({});
    if constexpr (kN < 256) bench.wgmma<kN, true, kFormat>({.fill_a = kWeights}); // else ptxas serializes them
}

// The same products of bf16 and of fp16, one after the other.
void measure_formats(EnergyBench& bench) {
    for (int fill : {kNormal, kWeights}) {
        bench.hmma<kBf16>(fill, kNormal);
        bench.hmma<kFp16>(fill, kNormal);
    }
    measure_format<80, kBf16>(bench);
    measure_format<80, kFp16>(bench);
    measure_format<128, kBf16>(bench);
    measure_format<128, kFp16>(bench);
    measure_format<176, kBf16>(bench);
    measure_format<176, kFp16>(bench);
    measure_format<256, kBf16>(bench);
    measure_format<256, kFp16>(bench);
}

int main(int argc, char** argv) {
    std::FILE* trace = nullptr;
    if (argc == 3 && std::string(argv[1]) == "--trace") trace = std::fopen(argv[2], "w");
    if (argc != 1 && !trace) {
        std::fprintf(stderr, "usage: energy [--trace PATH]\n");
        return 2;
    }
    Device device = query_device();
    if (device.major != 9) {
        std::fprintf(stderr, "energy needs compute capability 9.0 (wgmma), this device has %d.x\n", device.major);
        return 2;
    }
    print_header();
    EnergyBench bench(device, trace);
    bench.power().idle();
#ifndef FORMATS_ONLY
    measure_vector(bench);
    measure_products(bench);
#endif
    measure_formats(bench);
    bench.power().idle();
    if (trace) std::fclose(trace);
    return 0;
}
