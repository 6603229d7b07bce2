// Group `power`: sustained SM clock, power and instruction rate when all SMs do one thing for a second. Launches of about 5 ms
// follow each other without a gap; the clock is clock64 over globaltimer inside the kernels, the power the mean of the
// driver's samples over the last part. NVML is asked only afterwards: a call takes milliseconds, in which launches run dry,
// the chip rests a tenth to a quarter of the time, and watts come out too low and clocks too high.
#pragma once

#include <chrono>
#include <ctime>
#include <functional>
#include <map>

#include "issue.cuh"
#include "memory.cuh"
#include "nvml.cuh"
#include "wgmma.cuh"

constexpr double kActivitySeconds = 1.3, kWindowSeconds = 0.6, kLaunchSeconds = 5e-3;
constexpr int kMaxLaunches = 1024, kQueued = 8;

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Microseconds of the system clock, which NVML's samples carry.
inline unsigned long long system_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// What one activity is: a launch that writes `times_per_launch` entries, and how those entries become rates.
struct Activity {
    std::string name;
    int warps = 0; // per SMSP
    size_t times_per_launch = 0;
    std::function<void(WarpTime*)> launch;
    // (times of one launch) -> rows (param, value)
    std::function<std::vector<std::pair<std::string, double>>(const std::vector<WarpTime>&)> rates;
};

inline double clock_mhz(const std::vector<WarpTime>& times) {
    double total = 0;
    size_t count = 0;
    for (const auto& t : times)
        if (t.ns_end > t.ns_begin) total += double(t.clock_end - t.clock_begin) * 1e3 / double(t.ns_end - t.ns_begin), ++count;
    return count ? total / count : 0;
}

class PowerBench {
  public:
    explicit PowerBench(const Device& device)
        : sms_(device.sms), random_(false), zeros_(true), memory_(device), sink_(1),
          times_(size_t(kMaxLaunches) * device.sms * kMaxRoles * 4) {}

    void run(const Activity& activity);
    void idle();
    void streams(const std::string& name, Roles roles, bool zeros = false);
    template <int kN>
    void wgmma(const std::string& name, int mma_groups, int mix_groups, bool zeros = false);
    void memory_read(const char* name, size_t ring, bool shared_stream);

    // Where to write the clock of each launch (name, seconds since the first, MHz); nowhere by default.
    std::FILE* trace = nullptr;
    int sms() const { return sms_; }
    size_t hbm_ring() const { return memory_.ring() / 2; }

  private:
    // Keeps kQueued launches queued; returns the number of launches.
    int keep_busy(const Activity& activity);
    // Chunks so that each role takes about one launch time, from the cycles its chunks took in a probe.
    Roles stretched(const Roles& roles, const std::vector<WarpTime>& probe);

    int sms_;
    StreamInputs random_, zeros_;
    MemoryBench memory_;
    DeviceArray<float> sink_;
    DeviceArray<WarpTime> times_;
    double reported_mhz_ = -1; // by the driver, near the end of the last activity
    Nvml nvml_;
};

inline int PowerBench::keep_busy(const Activity& activity) {
    cudaEvent_t done[kQueued];
    for (auto& e : done) CHECK_CUDA(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    int launches = 0;
    double begin = seconds_now();
    while (seconds_now() - begin < kActivitySeconds && launches < kMaxLaunches) {
        if (launches >= kQueued) CHECK_CUDA(cudaEventSynchronize(done[launches % kQueued]));
        activity.launch(times_.get() + launches * activity.times_per_launch);
        CHECK_CUDA(cudaEventRecord(done[launches % kQueued]));
        ++launches;
    }
    reported_mhz_ = nvml_.reported_mhz();
    for (auto& e : done) {
        CHECK_CUDA(cudaEventSynchronize(e));
        CHECK_CUDA(cudaEventDestroy(e));
    }
    return launches;
}

inline void PowerBench::run(const Activity& activity) {
    progress("power: " + activity.name);
    int launches = keep_busy(activity);
    unsigned long long end = system_us(), window_us = static_cast<unsigned long long>(kWindowSeconds * 1e6);
    double watts = nvml_.sampled_power_w(end - window_us, end), average = nvml_.average_power_w(), heat = nvml_.temperature_c();
    auto all = times_.to_host(launches * activity.times_per_launch);
    unsigned long long last_ns = 0;
    for (const auto& t : all) last_ns = std::max(last_ns, t.ns_end);
    std::vector<double> mhz, first_mhz;
    std::map<std::string, std::vector<double>> rates;
    for (int i = 0; i < launches; ++i) {
        std::vector<WarpTime> one(all.begin() + i * activity.times_per_launch, all.begin() + (i + 1) * activity.times_per_launch);
        if (trace) std::fprintf(trace, "%s,%.5f,%.1f\n", activity.name.c_str(), double(one[0].ns_begin - all[0].ns_begin) * 1e-9, clock_mhz(one));
        if (i > 0 && i <= 5) first_mhz.push_back(clock_mhz(one));
        if (double(last_ns - one[0].ns_begin) * 1e-9 > kWindowSeconds) continue;
        mhz.push_back(clock_mhz(one));
        for (const auto& row : activity.rates(one)) rates[row.first].push_back(row.second);
    }
    print_row("power", activity.name, activity.warps, "clock_mhz", mhz, "MHz");
    print_row("power", activity.name, activity.warps, "clock_mhz_first_25ms", first_mhz, "MHz");
    if (watts >= 0) print_row("power", activity.name, activity.warps, "power_w", {watts}, "W");
    if (reported_mhz_ >= 0) print_row("power", activity.name, activity.warps, "nvml_clock_mhz", {reported_mhz_}, "MHz");
    if (heat >= 0) print_row("power", activity.name, activity.warps, "temperature_c", {heat}, "C");
    if (average >= 0) print_row("power", activity.name, activity.warps, "nvml_average_power_w", {average}, "W");
    for (const auto& row : rates)
        print_row("power", activity.name, activity.warps, row.first, row.second, row.first.c_str());
}

inline void PowerBench::idle() {
    progress("power: idle");
    timespec nap{1, 300000000};
    nanosleep(&nap, nullptr);
    unsigned long long end = system_us(), window_us = static_cast<unsigned long long>(kWindowSeconds * 1e6);
    double watts = nvml_.sampled_power_w(end - window_us, end);
    if (watts >= 0) print_row("power", "idle", 0, "power_w", {watts}, "W");
}

inline Roles PowerBench::stretched(const Roles& roles, const std::vector<WarpTime>& probe) {
    Roles longer = roles;
    for (int r = 0; r < roles.count; ++r) {
        double ns = 0;
        int count = 0;
        for (size_t i = 0; i < probe.size(); ++i)
            if (int(i % (roles.count * 4)) / 4 == r) ns += double(probe[i].ns_end - probe[i].ns_begin), ++count;
        double per_chunk = ns / count / roles.timed_chunks[r];
        longer.timed_chunks[r] = std::max(1, static_cast<int>(kLaunchSeconds * 1e9 / per_chunk));
    }
    return longer;
}

inline void PowerBench::streams(const std::string& name, Roles roles, bool zeros) {
    const StreamInputs& inputs = zeros ? zeros_ : random_;
    size_t entries = size_t(sms_) * roles.count * 4;
    for (int& chunks : roles.timed_chunks) chunks = 100;
    launch_streams(roles, inputs.view(), sms_, times_.get(), sink_.get());
    CHECK_CUDA(cudaDeviceSynchronize());
    roles = stretched(roles, times_.to_host(entries));
    Activity activity{name, roles.count, entries, nullptr, nullptr};
    activity.launch = [&, roles](WarpTime* times) { launch_streams(roles, inputs.view(), sms_, times, sink_.get()); };
    activity.rates = [roles](const std::vector<WarpTime>& times) {
        std::map<std::string, double> rows;
        auto inst = role_inst_per_chunk(roles);
        for (int r = 0; r < roles.count; ++r) {
            int stream = roles.stream[r];
            double rate = 4 * smsp_rate(times, roles.count * 4, roles, r, inst);
            rows["inst_per_clk_per_sm"] += rate * inst_per_count(stream); // everything the activity is made of
            if (stream == kSoftmaxMix) rows["elements_per_clk_per_sm"] += rate;
            if (stream == kHmma8 || stream == kHmmaLdsm) rows["hmma_per_clk_per_sm"] += rate;
        }
        return std::vector<std::pair<std::string, double>>(rows.begin(), rows.end());
    };
    run(activity);
}

template <int kN>
void PowerBench::wgmma(const std::string& name, int mma_groups, int mix_groups, bool zeros) {
    const StreamInputs& inputs = zeros ? zeros_ : random_;
    WgmmaPlan plan;
    plan.roles.add(kMma, mma_groups, 100).add(kMix, mix_groups, 100);
    size_t entries = size_t(sms_) * plan.roles.count * 4;
    launch_wgmma<kN, false>(plan, inputs.view(), sms_, times_.get(), sink_.get());
    CHECK_CUDA(cudaDeviceSynchronize());
    plan.roles = stretched(plan.roles, times_.to_host(entries));
    Activity activity{name, plan.roles.count, entries, nullptr, nullptr};
    activity.launch = [&, plan](WarpTime* times) {
        launch_wgmma<kN, false>(plan, inputs.view(), sms_, times, sink_.get());
    };
    activity.rates = [plan, mix_groups](const std::vector<WarpTime>& times) {
        std::vector<std::pair<std::string, double>> rows;
        // A wgmma counts once for its warpgroup, an element once for each warp, so beside a mix the two are not added up.
        double mma = warpgroup_rate(times, plan, kMma);
        if (!mix_groups) rows.push_back({"inst_per_clk_per_sm", mma});
        if (mix_groups) rows.push_back({"wgmma_per_clk_per_sm", mma});
        if (mix_groups) rows.push_back({"elements_per_clk_per_sm", 4 * warpgroup_rate(times, plan, kMix)});
        return rows;
    };
    run(activity);
}

inline void PowerBench::memory_read(const char* name, size_t ring, bool shared_stream) {
    // Bytes per SM for about 4 ms a launch on an H200: at 4.3 TB/s from HBM, at some 50 B/clk/SM from L2.
    size_t bytes = size_t(shared_stream ? 128 : 384) << 20;
    Activity activity{name, 4, size_t(sms_), nullptr, nullptr};
    activity.launch = [&, ring, bytes, shared_stream](WarpTime* times) {
        memory_.launch_plain<kReadLdg>(sms_, true, ring, bytes, shared_stream, times);
    };
    activity.rates = [bytes](const std::vector<WarpTime>& times) {
        auto speed = stream_speed(times, double(bytes));
        return std::vector<std::pair<std::string, double>>{{"bytes_per_clk_per_sm", speed.bytes_per_cycle_per_sm},
                                                           {"bytes_per_s", speed.bytes_per_second}};
    };
    run(activity);
}

inline void measure_power(const Device& device) {
    PowerBench bench(device);
    bench.idle();
    bench.streams("spin", Roles().add(kSpin, 1));
    bench.streams("ffma", Roles().add(kFfma, 4));
    bench.streams("fmnmx", Roles().add(kFmnmx, 4));
    bench.streams("ex2", Roles().add(kEx2, 4));
    bench.streams("ldsm_x4", Roles().add(kLdsm, 4));
    bench.streams("softmax_mix", Roles().add(kSoftmaxMix, 4));
    bench.streams("hmma_zeros", Roles().add(kHmma8, 4), true);
    bench.streams("hmma", Roles().add(kHmma8, 4));
    bench.streams("hmma_ldsm", Roles().add(kHmmaLdsm, 4));
    bench.streams("hmma+softmax_mix", Roles().add(kHmma8, 2).add(kSoftmaxMix, 2));
    bench.memory_read("l2_read", MemoryBench::kL2Ring, false);
    bench.memory_read("hbm_read", bench.hbm_ring(), true);
    if (device.major != 9) return progress("power: wgmma skipped, needs compute capability 9.0");
    bench.wgmma<128>("wgmma_n128_1wg", 1, 0);
    bench.wgmma<128>("wgmma_n128_2wg", 2, 0);
    bench.wgmma<256>("wgmma_n256_1wg", 1, 0);
    bench.wgmma<256>("wgmma_n256_2wg_zeros", 2, 0, true);
    bench.wgmma<256>("wgmma_n256_2wg", 2, 0);
    bench.wgmma<128>("wgmma_n128_2wg+softmax_mix_1wg", 2, 1);
    bench.wgmma<128>("wgmma_n128_2wg+softmax_mix_2wg", 2, 2);
    bench.idle();
}
