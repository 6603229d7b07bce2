// Group `tma`: the bulk copy engine: latency, issue, bandwidth by bytes in flight, multicast, latency under load, stores.
// Parameters say bytes of a copy, copies in flight of an SM, SMs, and where the data lie: l2 (resident) or hbm (not read before).
#pragma once

#include "latency.cuh"
#include "tma_kernels.cuh"

class TmaBench {
  public:
    explicit TmaBench(const Device& device)
        : sms_(device.sms), l2_bytes_(device.l2_bytes), base_(smem_base()), ring_(ring_bytes()), data_(ring_), times_(sms_),
          latencies_(sms_), stamps_(2 * kCopies), issues_(kCopies), stores_(kCopies), sink_(1) {
        fill_random<<<sms_ * 8, 512>>>(reinterpret_cast<uint32_t*>(data_.get()), ring_ / 4);
        finish_launch("tma fill");
        encode_ = find_encode();
    }

    void latency();
    void issue();
    void bandwidth();
    void multicast();
    void under_load();
    void store();

  private:
    using Encode = decltype(&cuTensorMapEncodeTiled);
    enum Place { kL2, kHbm };
    static constexpr int kCopies = 64;
    static constexpr size_t kL2Ring = size_t(16) << 20;
    static constexpr int kSoloBytes = 120 * 1024; // one CTA per SM
    static constexpr int kMostBytes = 200 * 1024;

    static size_t ring_bytes() {
        size_t free = 0, total = 0;
        CHECK_CUDA(cudaMemGetInfo(&free, &total));
        return std::min<size_t>(size_t(4) << 30, free / 3) >> 26 << 26;
    }
    // From the driver by name: no link with libcuda. Null, and no tensor rows, where there is none.
    static Encode find_encode() {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
        cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
        cudaError_t status = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
        if (status == cudaSuccess && found == cudaDriverEntryPointSuccess) return reinterpret_cast<Encode>(function);
        cudaGetLastError();
        progress("tma: no cuTensorMapEncodeTiled in this driver, tensor rows skipped");
        return nullptr;
    }

    static const char* place_name(Place place) { return place == kL2 ? "l2" : "hbm"; }
    static int log2_of(uint32_t bytes) {
        int n = 0;
        while ((1u << n) < bytes) ++n;
        return n;
    }

    // The data as rows of 64 << columns_log2 bf16, in boxes of 64 columns: 128 bytes, swizzled.
    CUtensorMap tensor_map(uint32_t bytes, int columns_log2) {
        CUtensorMap map{};
        cuuint64_t pitch = 128u << columns_log2, dims[2] = {pitch / 2, ring_ / pitch}, strides[1] = {pitch};
        cuuint32_t box[2] = {64, bytes / 128}, steps[2] = {1, 1};
        CUresult result = encode_(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data_.get(), dims, strides, box, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        if (result != CUDA_SUCCESS) {
            std::fprintf(stderr, "[microbench] cuTensorMapEncodeTiled returned %d for boxes of %u bytes\n", int(result), bytes);
            std::exit(1);
        }
        return map;
    }

    // One CTA, 64 copies of different data, apart so that no two share a DRAM access.
    CopyPlan spaced_plan(uint32_t bytes, int columns_log2 = 0) {
        size_t step = size_t(bytes) * (8192 / bytes + 1);
        return {data_.get(), ring_, 0, 0, step, bytes, 1, kCopies, log2_of(bytes), columns_log2};
    }
    // All CTAs (or clusters) `units`; about 0.4 ms. HBM: side by side through the ring, on from where the last run ended.
    CopyPlan stream_plan(Place place, uint32_t bytes, int slots, int units, int columns_log2 = 0) {
        double most = place == kL2 ? 120e9 : std::min(60e9, 4.2e12 / units);
        double rate = std::min(double(bytes) * slots / 700e-9, most);
        int copies = std::max(4 * slots, int(rate * 0.4e-3 / bytes));
        CopyPlan plan{data_.get(), place == kL2 ? kL2Ring : ring_, 0, bytes, size_t(bytes) * units, bytes, slots, copies,
                      log2_of(bytes), columns_log2};
        if (place == kL2) {
            plan.spread = kL2Ring / units / bytes * bytes;
            plan.step = bytes;
        }
        return plan;
    }
    void advance(CopyPlan& plan, int units) { // the next HBM run reads what none has read lately
        if (plan.ring == kL2Ring) return;
        plan.start = start_;
        start_ = (start_ + size_t(units) * plan.bytes * plan.copies) / (64 << 10) * (64 << 10) % ring_;
    }
    void flush() { // far from the data of the latency kernels
        size_t bytes = std::min(8 * l2_bytes_, ring_ / 2);
        sweep<<<sms_ * 4, 512>>>(reinterpret_cast<const uint4*>(data_.get() + ring_ / 2), bytes / 16, sink_.get());
        finish_launch("tma flush");
    }
    template <class Kernel>
    static void allow_smem(Kernel kernel) {
        CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostBytes + tma_smem::kData));
    }
    static int smem_bytes(size_t data) { return std::max<int>(kSoloBytes, int(data)) + tma_smem::kData; }

    template <class... Parameters, class... Arguments>
    static void launch_clusters(void (*kernel)(Parameters...), int ctas, int threads, int smem, Arguments... arguments) {
        allow_smem(kernel);
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(ctas);
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = smem;
        cudaLaunchAttribute pairs{};
        pairs.id = cudaLaunchAttributeClusterDimension;
        pairs.val.clusterDim.x = 2;
        pairs.val.clusterDim.y = 1;
        pairs.val.clusterDim.z = 1;
        config.attrs = &pairs;
        config.numAttrs = 1;
        CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
    }

    template <class Launch>
    std::vector<StreamSpeed> speeds(int ctas, const std::string& what, CopyPlan plan, int units, Launch launch) {
        std::vector<StreamSpeed> result;
        for (int repeat = -1; repeat < kRepeats; ++repeat) {
            advance(plan, units);
            launch(plan);
            finish_launch("tma " + what);
            if (repeat >= 0) result.push_back(stream_speed(times_.to_host(ctas), double(plan.bytes) * plan.copies));
        }
        return result;
    }
    static void print_speeds(const std::string& name, const std::string& param, const std::vector<StreamSpeed>& speeds, int warps = 1) {
        print_row("tma", name, warps, param, column(speeds, &StreamSpeed::bytes_per_cycle_per_sm), "bytes_per_clk_per_sm");
        print_row("tma", name, warps, param, column(speeds, &StreamSpeed::bytes_per_second, 1e-12), "TB_per_s");
    }

    template <bool kTensor>
    void latency_of(uint32_t bytes, Place place, int columns_log2, const std::string& name);
    template <bool kTensor>
    void issue_of(uint32_t bytes, const std::string& name);
    template <bool kTensor>
    void bandwidth_of(uint32_t bytes, int slots, Place place, int ctas, const std::string& name);
    template <int kInFlight>
    void store_bandwidth(uint32_t bytes, Place place, int ctas);

    int sms_;
    size_t l2_bytes_;
    uint32_t base_;
    size_t ring_, start_ = 0;
    DeviceArray<char> data_;
    DeviceArray<CtaTime> times_;
    DeviceArray<Cycles> latencies_;
    DeviceArray<CopyStamps> stamps_;
    DeviceArray<IssueStamps> issues_;
    DeviceArray<StoreStamps> stores_;
    DeviceArray<uint32_t> sink_;
    Encode encode_ = nullptr;
};

// Minimum, median and 95th percentile over the copies of a launch, each over the repeats.
struct LatencyRows {
    std::vector<double> low, mid, high;

    void add(const std::vector<double>& cycles) {
        low.push_back(quantile(cycles, 0));
        mid.push_back(median(cycles));
        high.push_back(quantile(cycles, 0.95));
    }
    void print(const std::string& name, const std::string& param) const {
        print_row("tma", name, 1, param + "_min", low, "cycles");
        print_row("tma", name, 1, param + "_median", mid, "cycles");
        print_row("tma", name, 1, param + "_p95", high, "cycles");
    }
};

template <bool kTensor>
void TmaBench::latency_of(uint32_t bytes, Place place, int columns_log2, const std::string& name) {
    CopyPlan plan = spaced_plan(bytes, columns_log2);
    CUtensorMap map = kTensor ? tensor_map(bytes, columns_log2) : CUtensorMap{};
    allow_smem(copy_latency<kTensor>);
    LatencyRows rows;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        if (place == kHbm) flush();
        copy_latency<kTensor><<<1, 32, smem_bytes(bytes)>>>(plan, base_, map, stamps_.get());
        finish_launch("tma " + name + " latency");
        std::vector<double> cycles;
        for (const auto& s : stamps_.to_host(kCopies)) cycles.push_back(double(s.done) - double(s.empty));
        if (repeat >= 0) rows.add(cycles);
    }
    rows.print(name + "_latency", "bytes=" + std::to_string(bytes) + "_" + place_name(place));
}

inline void TmaBench::latency() {
    for (Place place : {kL2, kHbm}) {
        for (uint32_t bytes = 1024; bytes <= 32768; bytes *= 2) {
            latency_of<false>(bytes, place, 0, "bulk");
            if (!encode_) continue;
            latency_of<true>(bytes, place, 0, "tensor_pitch128");
            latency_of<true>(bytes, place, 1, "tensor_pitch256");
        }
    }
}

template <bool kTensor>
void TmaBench::issue_of(uint32_t bytes, const std::string& name) {
    CopyPlan plan = spaced_plan(bytes);
    CUtensorMap map = kTensor ? tensor_map(bytes, 0) : CUtensorMap{};
    allow_smem(copy_issue<kTensor>);
    std::vector<double> expect, first, each;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        copy_issue<kTensor><<<1, 32, smem_bytes(kIssueBurst * bytes)>>>(plan, base_, map, issues_.get());
        finish_launch("tma " + name + " issue");
        std::vector<double> e, f, n;
        for (const auto& s : issues_.to_host(kCopies)) {
            e.push_back(double(s.expected - s.begin) - double(s.empty));
            f.push_back(double(s.issued[0] - s.expected) - double(s.empty));
            n.push_back(double(s.issued[kIssueBurst - 1] - s.issued[0]) / (kIssueBurst - 1) - double(s.empty));
        }
        if (repeat < 0) continue;
        expect.push_back(median(e));
        first.push_back(median(f));
        each.push_back(median(n));
    }
    std::string param = "bytes=" + std::to_string(bytes);
    print_row("tma", name + "_issue", 1, param + "_expect_tx", expect, "cycles");
    print_row("tma", name + "_issue", 1, param + "_first", first, "cycles");
    print_row("tma", name + "_issue", 1, param + "_each_of_next7", each, "cycles");
}

inline void TmaBench::issue() {
    for (uint32_t bytes : {1024u, 4096u, 16384u}) {
        issue_of<false>(bytes, "bulk");
        if (encode_) issue_of<true>(bytes, "tensor");
    }
}

template <bool kTensor>
void TmaBench::bandwidth_of(uint32_t bytes, int slots, Place place, int ctas, const std::string& name) {
    CUtensorMap map = kTensor ? tensor_map(bytes, 1) : CUtensorMap{};
    auto* kernel = copy_stream<kTensor, false>;
    allow_smem(kernel);
    std::string param = "bytes=" + std::to_string(bytes) + "_copies=" + std::to_string(slots) + "_sms=" + std::to_string(ctas) +
                        "_" + place_name(place);
    print_speeds(name, param, speeds(ctas, name, stream_plan(place, bytes, slots, ctas, kTensor ? 1 : 0), ctas, [&](const CopyPlan& plan) {
                     kernel<<<ctas, 32, smem_bytes(size_t(bytes) * slots)>>>(plan, base_, map, times_.get(), latencies_.get());
                 }));
}

inline void TmaBench::bandwidth() {
    for (Place place : {kL2, kHbm})
        for (int ctas : {1, sms_})
            for (uint32_t bytes = 4096; bytes <= 32768; bytes *= 2)
                for (int slots : {1, 2, 4, 8}) {
                    if (size_t(bytes) * slots > kMostBytes) continue;
                    bandwidth_of<false>(bytes, slots, place, ctas, "bulk_read");
                    if (encode_ && slots > 1 && bytes > 4096)
                        bandwidth_of<true>(bytes, slots, place, ctas, "tensor_pitch256_read");
                }
}

inline void TmaBench::multicast() {
    int ctas = sms_ / 2 * 2;
    for (Place place : {kL2, kHbm}) {
        for (uint32_t bytes = 2048; bytes <= 32768; bytes *= 2) {
            CopyPlan plan = spaced_plan(bytes);
            LatencyRows rows;
            for (int repeat = -1; repeat < kRepeats; ++repeat) {
                if (place == kHbm) flush();
                launch_clusters(multicast_latency, 2, 32, smem_bytes(bytes), plan, stamps_.get());
                finish_launch("tma multicast latency");
                std::vector<double> cycles;
                for (const auto& s : stamps_.to_host(2 * kCopies)) cycles.push_back(double(s.done) - double(s.empty));
                if (repeat >= 0) rows.add(cycles);
            }
            rows.print("multicast2_latency", "bytes=" + std::to_string(bytes) + "_" + place_name(place));
        }
        for (uint32_t bytes : {8192u, 16384u, 32768u})
            for (int slots : {1, 2, 4}) {
                auto result = speeds(ctas, "multicast", stream_plan(place, bytes, slots, ctas / 2), ctas / 2, [&](const CopyPlan& plan) {
                    launch_clusters(multicast_stream, ctas, 64, smem_bytes(size_t(bytes) * slots), plan, times_.get());
                });
                print_speeds("multicast2_delivered",
                             "bytes=" + std::to_string(bytes) + "_copies=" + std::to_string(slots) + "_sms=" + std::to_string(ctas) +
                                 "_" + place_name(place),
                             result, 2);
            }
    }
}

// Bandwidth against latency, all SMs: by Little's law, and as the mean of the copies' own times.
inline void TmaBench::under_load() {
    auto* kernel = copy_stream<false, true>;
    allow_smem(kernel);
    for (Place place : {kL2, kHbm})
        for (int in_flight = 512; in_flight <= 131072; in_flight *= 2) {
            uint32_t bytes = std::min(in_flight, place == kL2 ? 4096 : 2048);
            int slots = in_flight / int(bytes);
            std::vector<double> own;
            CopyPlan shape = stream_plan(place, bytes, slots, sms_);
            auto result = speeds(sms_, "under load", shape, sms_, [&](const CopyPlan& plan) {
                kernel<<<sms_, 32, smem_bytes(in_flight)>>>(plan, base_, CUtensorMap{}, times_.get(), latencies_.get());
                finish_launch("tma under load");
                auto times = times_.to_host(sms_);
                auto sums = latencies_.to_host(sms_);
                std::vector<double> ns;
                for (int i = 0; i < sms_; ++i)
                    ns.push_back(double(sums[i]) / plan.copies * double(times[i].ns_end - times[i].ns_begin) /
                                 double(times[i].clock_end - times[i].clock_begin));
                own.push_back(mean(ns));
            });
            own.erase(own.begin()); // the warm-up
            std::vector<double> little;
            for (const auto& s : result) little.push_back(double(in_flight) * sms_ / s.bytes_per_second * 1e9);
            std::string name = std::string(place_name(place)) + "_loaded", param = "bytes_in_flight=" + std::to_string(in_flight);
            print_row("tma", name + "_bandwidth", 1, param, column(result, &StreamSpeed::bytes_per_second, 1e-12), "TB_per_s");
            print_row("tma", name + "_latency_by_little", 1, param, little, "ns");
            print_row("tma", name + "_latency_of_copies", 1, param, own, "ns");
        }
}

template <int kInFlight>
void TmaBench::store_bandwidth(uint32_t bytes, Place place, int ctas) {
    if (size_t(bytes) * kInFlight > kMostBytes) return;
    auto* kernel = store_stream<kInFlight>;
    allow_smem(kernel);
    std::string param = "bytes=" + std::to_string(bytes) + "_copies=" + std::to_string(kInFlight) + "_sms=" + std::to_string(ctas) +
                        "_" + place_name(place);
    print_speeds("bulk_write", param, speeds(ctas, "store", stream_plan(place, bytes, kInFlight, ctas), ctas, [&](const CopyPlan& plan) {
                     kernel<<<ctas, 128, smem_bytes(size_t(bytes) * kInFlight)>>>(plan, base_, times_.get());
                 }));
}

inline void TmaBench::store() {
    allow_smem(store_latency);
    for (uint32_t bytes : {16384u, 32768u, 65536u}) {
        CopyPlan plan = spaced_plan(bytes);
        plan.copies = 32; // within what L2 takes
        std::vector<double> issue, read, done, seen;
        for (int repeat = -1; repeat < kRepeats; ++repeat) {
            store_latency<<<1, 128, smem_bytes(bytes)>>>(plan, base_, stores_.get());
            finish_launch("tma store latency");
            std::vector<double> i, r, d, v;
            for (const auto& s : stores_.to_host(plan.copies)) {
                i.push_back(double(s.issue) - double(s.empty));
                r.push_back(double(s.read) - double(s.empty));
                d.push_back(double(s.done) - double(s.empty));
                v.push_back(double(s.seen) - double(s.empty));
            }
            if (repeat < 0) continue;
            issue.push_back(median(i));
            read.push_back(median(r));
            done.push_back(median(d));
            seen.push_back(median(v));
        }
        std::string param = "bytes=" + std::to_string(bytes);
        print_row("tma", "bulk_store", 1, param + "_issue_and_commit", issue, "cycles");
        print_row("tma", "bulk_store", 1, param + "_to_wait_read", read, "cycles");
        print_row("tma", "bulk_store", 1, param + "_to_wait_complete", done, "cycles");
        print_row("tma", "bulk_store", 1, param + "_to_last_word_seen", seen, "cycles");
    }
    for (Place place : {kL2, kHbm})
        for (int ctas : {1, sms_})
            for (uint32_t bytes : {16384u, 32768u, 65536u}) {
                store_bandwidth<1>(bytes, place, ctas);
                store_bandwidth<2>(bytes, place, ctas);
                store_bandwidth<4>(bytes, place, ctas);
            }
}

inline void measure_tma(const Device& device) {
    if (device.major < 9) return progress("tma: skipped, needs compute capability 9.0");
    watch_waits();
    TmaBench bench(device);
    bench.latency();
    bench.issue();
    bench.bandwidth();
    bench.multicast();
    bench.under_load();
    bench.store();
}
