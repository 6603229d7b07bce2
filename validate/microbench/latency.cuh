// Group `latency`: cycles from issue to use. Register and shared-memory operations: one dependent chain of a single warp per
// SMSP. Memory: pointer chases by one thread, and per-line or per-access times where the answer has two humps.
#pragma once

#include "harness.cuh"

struct ChaseNode {
    const ChaseNode* next;
};

// Node i lies at base + i * stride and points to node i + 1 (cyclic); stride 0 means "every 128-byte line to itself".
__global__ void build_chase(char* base, size_t nodes, size_t stride) {
    size_t thread = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    for (size_t i = thread; i < nodes; i += size_t(gridDim.x) * blockDim.x) {
        size_t here = stride ? i * stride : i * 128, next = stride ? (i + 1) % nodes * stride : i * 128;
        reinterpret_cast<ChaseNode*>(base + here)->next = reinterpret_cast<const ChaseNode*>(base + next);
    }
}

// Reads a buffer larger than L2, so that nothing built before is still there.
__global__ void sweep(const uint4* data, size_t count, uint32_t* sink) {
    uint32_t s = 0;
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        s ^= load_cg(data + i).x;
    if (s == 0x12345678u) *sink = s;
}

template <bool kL1>
__device__ __forceinline__ const ChaseNode* hop(const ChaseNode* p) {
    const ChaseNode* q;
    if constexpr (kL1)
        asm volatile("ld.global.u64 %0, [%1];" : "=l"(q) : "l"(p) : "memory");
    else
        asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(q) : "l"(p) : "memory");
    return q;
}

// The branch on the loaded pointer makes the next clock read wait for the load.
__device__ __forceinline__ void require_loaded(const ChaseNode* p) {
    if (p == nullptr) asm volatile("trap;");
}

// Mean cycles per hop over `hops` hops (a multiple of 8), after `warm` untimed ones.
template <bool kL1>
__global__ void chase_kernel(const ChaseNode* p, int warm, int hops, unsigned long long* cycles) {
    for (int i = 0; i < warm; ++i) p = hop<kL1>(p);
    require_loaded(p);
    uint64_t begin = read_clock();
#pragma unroll 1
    for (int i = 0; i < hops; i += 8) {
#pragma unroll
        for (int k = 0; k < 8; ++k) p = hop<kL1>(p);
    }
    require_loaded(p);
    *cycles = read_clock() - begin;
}

// Lines that point to themselves: eight hops on each through L2; the latency of each line's slice, one entry a line.
__global__ void line_latency_kernel(const char* base, int lines, uint32_t* cycles) {
    for (int line = 0; line < lines; ++line) {
        const ChaseNode* p = reinterpret_cast<const ChaseNode*>(base + size_t(line) * 128);
        p = hop<false>(p);
        require_loaded(p);
        uint64_t begin = read_clock();
#pragma unroll
        for (int k = 0; k < 8; ++k) p = hop<false>(p);
        require_loaded(p);
        cycles[line] = static_cast<uint32_t>(read_clock() - begin);
    }
}

// One warp: a 16 B x 32 lanes copy, commit, wait for all; one entry per copy.
__global__ void cp_async_latency_kernel(const char* base, size_t stride, int copies, uint32_t* cycles) {
    __shared__ __align__(16) char target[512];
    uint32_t to = shared_address(target) + 16 * threadIdx.x;
    for (int i = 0; i < copies; ++i) {
        const char* from = base + i * stride + 16 * threadIdx.x;
        __syncwarp();
        uint64_t begin = read_clock();
        cp_async_16(to, from);
        cp_async_commit();
        cp_async_wait<0>();
        uint64_t end = read_clock();
        if (threadIdx.x == 0) cycles[i] = static_cast<uint32_t>(end - begin);
    }
}

inline void measure_register_latency() {
    StreamInputs inputs;
    std::vector<int> ids = {kHmma1};
    for (int id = kFfmaLat; id < kStreamCount; ++id) ids.push_back(id);
    for (int id : ids) {
        Roles roles;
        roles.add(id);
        print_row("latency", stream_info(id).name, 1, "dependent", cycles_per_inst(roles, inputs)[0], "cycles");
    }
}

class MemoryLatency {
  public:
    explicit MemoryLatency(const Device& device)
        : buffer_(size_t(4) << 30), flush_(std::max<size_t>(8 * device.l2_bytes, size_t(256) << 20)), cycles_(1), lines_(kLines),
          sink_(1), ctas_(device.sms * 4) {}

    // Chase with a given footprint; cold: L2 is flushed before every repeat and no node is met twice.
    void chase(const char* name, size_t nodes, size_t stride, bool l1, bool cold, const char* param) {
        build(nodes, stride);
        int hops = static_cast<int>(std::min<size_t>(nodes, 2048)) / 8 * 8;
        if (!cold) hops = 2048;
        std::vector<double> values;
        for (int repeat = 0; repeat < kRepeats; ++repeat) {
            if (cold) flush();
            int warm = cold ? 0 : static_cast<int>(nodes);
            auto* start = reinterpret_cast<const ChaseNode*>(buffer_.get());
            if (l1)
                chase_kernel<true><<<1, 1>>>(start, warm, hops, cycles_.get());
            else
                chase_kernel<false><<<1, 1>>>(start, warm, hops, cycles_.get());
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaDeviceSynchronize());
            values.push_back(double(cycles_.to_host(1)[0]) / hops);
        }
        print_row("latency", name, 1, param, values, "cycles");
    }

    void lines() {
        build(kLines, 0);
        std::vector<std::vector<double>> stats(7);
        line_latency_kernel<<<1, 1>>>(buffer_.get(), kLines, lines_.get());
        for (int repeat = 0; repeat < kRepeats; ++repeat) {
            line_latency_kernel<<<1, 1>>>(buffer_.get(), kLines, lines_.get());
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaDeviceSynchronize());
            std::vector<double> v, near, far;
            for (uint32_t c : lines_.to_host(kLines)) v.push_back(c / 8.0);
            double split = 0.5 * (quantile(v, 0.02) + quantile(v, 0.98));
            for (double c : v) (c < split ? near : far).push_back(c);
            double row[7] = {quantile(v, 0.0), median(v),  quantile(v, 0.99),          quantile(v, 1.0),
                             median(near),     far.empty() ? median(near) : median(far), double(near.size()) / v.size()};
            for (int i = 0; i < 7; ++i) stats[i].push_back(row[i]);
        }
        const char* names[7] = {"min", "median", "p99", "max", "near_median", "far_median", "near_share"};
        for (int i = 0; i < 7; ++i)
            print_row("latency", "ldg_l2_line", 1, names[i], stats[i], i == 6 ? "fraction" : "cycles");
    }

    void cp_async(const char* name, size_t stride, bool cold) {
        constexpr int kCopies = 512;
        std::vector<double> low, mid, high;
        for (int repeat = -1; repeat < kRepeats; ++repeat) {
            if (cold) flush();
            cp_async_latency_kernel<<<1, 32>>>(buffer_.get(), stride, kCopies, lines_.get());
            CHECK_CUDA(cudaGetLastError());
            CHECK_CUDA(cudaDeviceSynchronize());
            std::vector<double> v;
            for (uint32_t c : lines_.to_host(kCopies)) v.push_back(c);
            if (repeat < 0) continue;
            low.push_back(quantile(v, 0.0));
            mid.push_back(median(v));
            high.push_back(quantile(v, 0.95));
        }
        print_row("latency", name, 1, "min", low, "cycles");
        print_row("latency", name, 1, "median", mid, "cycles");
        print_row("latency", name, 1, "p95", high, "cycles");
    }

  private:
    static constexpr int kLines = 16384; // 2 MiB

    void build(size_t nodes, size_t stride) {
        build_chase<<<ctas_, 256>>>(buffer_.get(), nodes, stride);
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
    }
    void flush() {
        sweep<<<ctas_, 512>>>(reinterpret_cast<const uint4*>(flush_.get()), flush_.count() / 16, sink_.get());
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
    }

    DeviceArray<char> buffer_, flush_;
    DeviceArray<unsigned long long> cycles_;
    DeviceArray<uint32_t> lines_, sink_;
    int ctas_;
};

inline void measure_latency(const Device& device) {
    measure_register_latency();
    MemoryLatency memory(device);
    memory.chase("ldg_l1", 64, 128, true, false, "8KiB");
    memory.chase("ldg_l2", 16384, 128, false, false, "2MiB");
    memory.lines();
    memory.chase("ldg_hbm", 2040, (size_t(2) << 20) + 256, false, true, "stride2MiB_4GiB"); // every hop a new page
    memory.chase("ldg_hbm", 4096, 4352, false, true, "stride4KiB_17MiB");                   // few pages: no TLB misses
    memory.cp_async("cp_async_l2", 512, false);
    memory.cp_async("cp_async_hbm", 4352, true);
}
