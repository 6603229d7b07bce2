// Group `memory`: L2 and HBM bandwidth, and HBM bandwidth by bytes in flight (whose ratio is the loaded latency).
#pragma once

#include "harness.cuh"

enum MemoryMode { kReadLdg, kWrite, kCopy };

// One entry per CTA: when it ran, on both clocks.
using CtaTime = WarpTime;

constexpr int kSoloSmem = 120 * 1024; // one CTA per SM

// Each CTA streams `bytes` bytes of a ring of `ring` bytes. CTAs interleave tile by tile (`shared_stream`, HBM), or each
// walks the whole ring from its own start (L2). Eight 16-byte accesses per thread in flight.
template <int kMode>
__global__ void __launch_bounds__(512) stream_bytes(char* from, char* to, size_t ring, size_t start, size_t bytes,
                                                    bool shared_stream, CtaTime* times, uint32_t* sink) {
    constexpr int kUnroll = 8;
    size_t tile = size_t(blockDim.x) * 16 * kUnroll;
    size_t step = shared_stream ? tile * gridDim.x : tile;
    size_t position = (start + (shared_stream ? tile : ring / gridDim.x / tile * tile) * blockIdx.x) % ring;
    uint4 sum = make_uint4(threadIdx.x * 2654435761u, 3, 5, 7);
    __syncthreads();
    CtaTime time{read_clock(), 0, read_globaltimer(), 0};
    for (size_t done = 0; done < bytes; done += tile) {
        size_t offset = position + threadIdx.x * 16;
        uint4 v[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            size_t at = offset + size_t(i) * blockDim.x * 16;
            if (kMode != kWrite) v[i] = load_cg(from + at);
            if (kMode == kWrite) __stcg(reinterpret_cast<uint4*>(to + at), sum);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            size_t at = offset + size_t(i) * blockDim.x * 16;
            if (kMode == kCopy) __stcg(reinterpret_cast<uint4*>(to + at), v[i]);
            if (kMode == kReadLdg) sum.x ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
        position += step;
        if (position >= ring) position -= ring; // tiles divide the ring
    }
    __syncthreads();
    time.clock_end = read_clock();
    time.ns_end = read_globaltimer();
    if (sum.x == 0x12345678u) *sink = sum.x;
    if (threadIdx.x == 0) times[blockIdx.x] = time;
}

// The same through cp.async: kStages groups of 16 bytes per thread in flight, the oldest waited for before the next.
template <int kStages>
__global__ void __launch_bounds__(1024) stream_cp_async(const char* from, size_t ring, size_t start, size_t bytes,
                                                        bool shared_stream, CtaTime* times) {
    extern __shared__ __align__(1024) char smem[];
    uint32_t target = shared_address(smem) + 16 * threadIdx.x, stage_bytes = blockDim.x * 16;
    size_t tile = stage_bytes, step = shared_stream ? tile * gridDim.x : tile;
    size_t position = (start + (shared_stream ? tile : ring / gridDim.x / tile * tile) * blockIdx.x) % ring;
    int stage = 0;
    auto issue = [&] {
        cp_async_16(target + stage * stage_bytes, from + position + threadIdx.x * 16);
        cp_async_commit();
        stage = stage + 1 == kStages ? 0 : stage + 1;
        position += step;
        if (position >= ring) position -= ring;
    };
    __syncthreads();
    CtaTime time{read_clock(), 0, read_globaltimer(), 0};
    for (int i = 0; i < kStages; ++i) issue();
    for (size_t done = tile * kStages; done < bytes; done += tile) {
        cp_async_wait<kStages - 1>();
        issue();
    }
    cp_async_wait<0>();
    __syncthreads();
    time.clock_end = read_clock();
    time.ns_end = read_globaltimer();
    if (threadIdx.x == 0) times[blockIdx.x] = time;
}

__global__ void fill_random(uint32_t* data, size_t count) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
        uint32_t x = static_cast<uint32_t>(i) * 2654435761u + 1013904223u;
        x ^= x >> 16;
        x *= 0x85ebca6bu;
        data[i] = x ^ (x >> 13);
    }
}

struct StreamSpeed {
    double bytes_per_cycle_per_sm, bytes_per_second, clock_mhz;
};

inline StreamSpeed stream_speed(const std::vector<CtaTime>& times, double bytes_per_cta) {
    double per_cycle = 0, mhz = 0;
    unsigned long long first = ~0ull, last = 0;
    for (const auto& t : times) {
        double cycles = double(t.clock_end - t.clock_begin);
        per_cycle += bytes_per_cta / cycles / times.size();
        mhz += cycles * 1e3 / double(t.ns_end - t.ns_begin) / times.size();
        first = std::min(first, t.ns_begin);
        last = std::max(last, t.ns_end);
    }
    return {per_cycle, bytes_per_cta * times.size() / (double(last - first) * 1e-9), mhz};
}

class MemoryBench {
  public:
    explicit MemoryBench(const Device& device)
        : sms_(device.sms), ring_(ring_bytes()), from_(ring_), to_(ring_ / 2), times_(sms_ * 8), sink_(1) {
        fill_random<<<sms_ * 8, 512>>>(reinterpret_cast<uint32_t*>(from_.get()), ring_ / 4);
        CHECK_CUDA(cudaGetLastError());
        allow_smem(stream_bytes<kReadLdg>);
        allow_smem(stream_bytes<kWrite>);
        allow_smem(stream_bytes<kCopy>);
        allow_smem(stream_cp_async<1>);
        allow_smem(stream_cp_async<2>);
        allow_smem(stream_cp_async<4>);
        allow_smem(stream_cp_async<8>);
        allow_smem(stream_cp_async<16>);
    }

    // Launches without waiting; times go to `times` (one per CTA). CTAs are solo on their SM when `solo`.
    template <int kMode>
    void launch_plain(int ctas, bool solo, size_t ring, size_t bytes, bool shared_stream, CtaTime* times) {
        stream_bytes<kMode><<<ctas, 512, solo ? kSoloSmem : 0>>>(from_.get(), to_.get(), ring, start_, bytes, shared_stream,
                                                                times, sink_.get());
        CHECK_CUDA(cudaGetLastError());
        advance(ctas, ring, bytes);
    }
    void launch_cp_async(int ctas, int threads, int stages, size_t ring, size_t bytes, bool shared_stream) {
        auto* kernel = stages == 1   ? stream_cp_async<1>
                       : stages == 2 ? stream_cp_async<2>
                       : stages == 4 ? stream_cp_async<4>
                       : stages == 8 ? stream_cp_async<8>
                                     : stream_cp_async<16>;
        size_t smem = std::max<size_t>(kSoloSmem, size_t(threads) * 16 * stages);
        kernel<<<ctas, threads, smem>>>(from_.get(), ring, start_, bytes, shared_stream, times_.get());
        CHECK_CUDA(cudaGetLastError());
        advance(ctas, ring, bytes);
    }

    void l2_reads();
    void l2_writes();
    void hbm_by_bytes_in_flight();
    void hbm_plain();

    int sms() const { return sms_; }
    size_t ring() const { return ring_; }
    static constexpr size_t kL2Ring = size_t(16) << 20;

  private:
    static size_t ring_bytes() {
        size_t free = 0, total = 0;
        CHECK_CUDA(cudaMemGetInfo(&free, &total));
        return std::min<size_t>(size_t(8) << 30, free / 3) >> 26 << 26;
    }
    template <class Kernel>
    void allow_smem(Kernel kernel) {
        CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 140 * 1024));
    }
    void advance(int ctas, size_t ring, size_t bytes) { // the next HBM run goes on where this one ended
        if (ring > kL2Ring) start_ = (start_ + size_t(ctas) * bytes) / (size_t(1) << 17) * (size_t(1) << 17) % ring;
    }
    template <class Launch>
    std::vector<StreamSpeed> repeat(int ctas, size_t bytes, Launch launch) {
        std::vector<StreamSpeed> speeds;
        for (int i = -1; i < kRepeats; ++i) {
            launch();
            CHECK_CUDA(cudaDeviceSynchronize());
            if (i >= 0) speeds.push_back(stream_speed(times_.to_host(ctas), double(bytes)));
        }
        return speeds;
    }

    int sms_;
    size_t ring_, start_ = 0;
    DeviceArray<char> from_, to_;
    DeviceArray<CtaTime> times_;
    DeviceArray<uint32_t> sink_;
};

inline std::vector<double> column(const std::vector<StreamSpeed>& speeds, double StreamSpeed::*field, double scale = 1) {
    std::vector<double> v;
    for (const auto& s : speeds) v.push_back(s.*field * scale);
    return v;
}

inline void print_speed(const std::string& name, int warps, const std::string& param, const std::vector<StreamSpeed>& speeds) {
    print_row("memory", name, warps, param, column(speeds, &StreamSpeed::bytes_per_cycle_per_sm), "bytes_per_clk_per_sm");
    print_row("memory", name, warps, param, column(speeds, &StreamSpeed::bytes_per_second, 1e-12), "TB_per_s");
    print_row("memory", name, warps, param, column(speeds, &StreamSpeed::clock_mhz), "sm_clock_mhz");
}

inline void MemoryBench::l2_reads() {
    size_t bytes = size_t(8) << 20; // per CTA
    for (int ctas : {1, 8, 33, 66, 132}) {
        if (ctas > sms_ || ctas == 132) ctas = sms_;
        std::string param = "sms=" + std::to_string(ctas);
        launch_plain<kReadLdg>(sms_, true, kL2Ring, kL2Ring, false, times_.get()); // brings the set into L2
        print_speed("l2_read_ldg", 16, param, repeat(ctas, bytes, [&] {
                        launch_plain<kReadLdg>(ctas, true, kL2Ring, bytes, false, times_.get());
                    }));
        print_speed("l2_read_cp_async", 32, param, repeat(ctas, bytes, [&] {
                        launch_cp_async(ctas, 1024, 8, kL2Ring, bytes, false);
                    }));
    }
}

inline void MemoryBench::l2_writes() {
    size_t bytes = size_t(8) << 20;
    for (int ctas : {1, sms_}) {
        auto speeds = repeat(ctas, bytes, [&] { launch_plain<kWrite>(ctas, true, kL2Ring, bytes, false, times_.get()); });
        print_speed("l2_write", 16, "sms=" + std::to_string(ctas), speeds);
    }
}

inline void MemoryBench::hbm_by_bytes_in_flight() {
    struct Point {
        int threads, stages;
    };
    for (Point p : {Point{32, 1}, {32, 2}, {32, 4}, {64, 4}, {64, 8}, {128, 8}, {256, 8}, {512, 8}, {1024, 8}}) {
        size_t in_flight = size_t(p.threads) * 16 * p.stages;
        // About half a millisecond: bandwidth is near in_flight / 800 ns per SM until it saturates.
        double per_sm = std::min(in_flight / 800e-9, 4.2e12 / sms_);
        size_t bytes = size_t(per_sm * 0.5e-3) >> 17 << 17;
        bytes = std::max<size_t>(bytes, size_t(1) << 17);
        auto speeds = repeat(sms_, bytes, [&] { launch_cp_async(sms_, p.threads, p.stages, ring_, bytes, true); });
        std::string param = "bytes_in_flight=" + std::to_string(in_flight);
        print_speed("hbm_read_cp_async", p.threads / 32, param, speeds);
        std::vector<double> latency;
        for (const auto& s : speeds) latency.push_back(double(in_flight) * sms_ / s.bytes_per_second * 1e9);
        print_row("memory", "hbm_loaded_latency", p.threads / 32, param, latency, "ns");
    }
}

inline void MemoryBench::hbm_plain() {
    int ctas = sms_ * 2;
    size_t total = ring_ / 2, bytes = total / ctas >> 16 << 16;
    auto run = [&](auto launch, const char* name, double factor) {
        auto speeds = repeat(ctas, bytes, launch);
        print_row("memory", name, 32, "2_ctas_per_sm", column(speeds, &StreamSpeed::bytes_per_second, factor * 1e-12), "TB_per_s");
        print_row("memory", name, 32, "2_ctas_per_sm", column(speeds, &StreamSpeed::clock_mhz), "sm_clock_mhz");
    };
    run([&] { launch_plain<kReadLdg>(ctas, false, ring_ / 2, bytes, true, times_.get()); }, "hbm_read", 1);
    run([&] { launch_plain<kWrite>(ctas, false, ring_ / 2, bytes, true, times_.get()); }, "hbm_write", 1);
    run([&] { launch_plain<kCopy>(ctas, false, ring_ / 2, bytes, true, times_.get()); }, "hbm_copy_read_plus_write", 2);
}

inline void measure_memory(const Device& device) {
    MemoryBench bench(device);
    bench.l2_reads();
    bench.l2_writes();
    bench.hbm_by_bytes_in_flight();
    bench.hbm_plain();
}
