// The clock and power that a kernel settles at when it is launched for seconds without a gap: cycles over nanoseconds between stamps
// of the SMs (../microbench/stamp.cu), and the driver's power samples, read afterwards. One line a group of launches, then a line of the last SETTLED seconds.
#pragma once

#include <ctime>

#include "../microbench/nvml.cuh"
#include "../microbench/stamp.cu"

template <class Launch>
void print_sustained(const char* name, Launch launch, double ms_each, double seconds) {
    constexpr double kStampMs = 10, kSettledS = 1.5;
    constexpr int kSms = 132;
    int group = std::max(1, int(kStampMs / ms_each)), groups = int(seconds * 1e3 / (group * ms_each)) + 1;
    DeviceArray<Stamp> stamps(size_t(groups + 1) * kSms);
    Nvml nvml;
    timespec nap{1, 0};
    nanosleep(&nap, nullptr);
    constexpr int kQueued = 8;
    cudaEvent_t done[kQueued];
    for (auto& e : done) { CHECK_CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming)); }
    stamp(stamps.get(), kSms, nullptr);
    for (int i = 0; i < groups; ++i) {
        if (i >= kQueued) { CHECK_CUDA(cudaEventSynchronize(done[i % kQueued])); }
        for (int k = 0; k < group; ++k) { launch(); }
        stamp(stamps.get() + size_t(i + 1) * kSms, kSms, nullptr);
        CHECK_CUDA(cudaEventRecord(done[i % kQueued]));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    unsigned long long end = now.tv_sec * 1000000ull + now.tv_nsec / 1000;
    double watts = nvml.sampled_power_w(end - static_cast<unsigned long long>(kSettledS * 1e6), end), heat = nvml.temperature_c();
    auto rows = stamps.to_host(size_t(groups + 1) * kSms);
    std::vector<double> at, mhz;
    for (int i = 0; i < groups; ++i) {
        std::vector<double> each;
        for (int s = 0; s < kSms; ++s) {
            auto &from = rows[size_t(i) * kSms + s], &to = rows[size_t(i + 1) * kSms + s];
            if (from.ns && to.ns) { each.push_back(double(to.cycles - from.cycles) * 1e3 / double(to.ns - from.ns)); }
        }
        if (each.empty()) { continue; }
        at.push_back(double(rows[size_t(i + 1) * kSms].ns - rows[0].ns) * 1e-9);
        mhz.push_back(median(each));
        printf("trace,%s,%.4f,%.1f\n", name, at.back(), mhz.back());
    }
    std::vector<double> late;
    for (size_t i = 0; i < at.size(); ++i) {
        if (at[i] > at.back() - kSettledS) { late.push_back(mhz[i]); }
    }
    printf("settled,%s,%.1f MHz,%.1f W,%.0f C,%.5f ms\n", name, mean(late), watts, heat, kSettledS * 1e3 / late.size() / group);
}
