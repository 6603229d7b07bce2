// Kernels of group `tma`: one thread issues bulk copies into a ring of slots, each with an mbarrier that counts its bytes.
// No static shared memory: barriers, then issue times, then the slots, from an offset the host passes (as in async_wgmma.cuh).
#pragma once

#include <cuda.h>

#include "async_wgmma.cuh"
#include "memory.cuh"

constexpr int kMaxSlots = 64;
namespace tma_smem { // byte offsets
constexpr int kFull = 0, kEmpty = 8 * kMaxSlots, kIssued = 16 * kMaxSlots, kData = 2048;
} // namespace tma_smem
static_assert(tma_smem::kIssued + 8 * kMaxSlots <= tma_smem::kData, "issue times reach into the slots");

// CTA (or cluster) b starts at start + b * spread and goes on by `step`, in a ring of `ring` bytes.
struct CopyPlan {
    char* data;
    size_t ring, start, spread, step;
    uint32_t bytes; // of a copy, a power of two
    int slots, copies;
    int bytes_log2, columns_log2; // tensor maps: boxes of 128 B by bytes / 128 rows, 2^columns_log2 of them side by side
};

// Several kernels share this: one lane, before anyone uses the barriers.
__device__ __forceinline__ void init_slots(uint32_t base, int slots, int empty_arrivals) {
    for (int i = 0; i < slots; ++i) {
        barrier_init(base + tma_smem::kFull + 8 * i, 1);
        if (empty_arrivals) barrier_init(base + tma_smem::kEmpty + 8 * i, empty_arrivals);
    }
    barrier_init_fence();
}

__device__ __forceinline__ void check_base(const char* smem, uint32_t base) {
    if (shared_address(smem) != base || base % 1024 != 0) raise_alarm(kSmemBase);
}

template <bool kTensor>
__device__ __forceinline__ void load_copy(const CopyPlan& plan, const CUtensorMap& map, uint32_t to, size_t position,
                                          uint32_t barrier) {
    if constexpr (kTensor) {
        uint32_t box = static_cast<uint32_t>(position >> plan.bytes_log2);
        uint32_t column = box & ((1u << plan.columns_log2) - 1), row = box >> plan.columns_log2;
        tensor_load(to, &map, column * 64, row * (plan.bytes / 128), barrier);
    } else {
        bulk_load(to, plan.data + position, plan.bytes, barrier);
    }
}

__device__ __forceinline__ size_t first_position(const CopyPlan& plan, unsigned unit) {
    size_t position = plan.start + plan.spread * unit; // below two rings
    return position >= plan.ring ? position - plan.ring : position;
}

__device__ __forceinline__ size_t next_position(const CopyPlan& plan, size_t position) {
    position += plan.step;
    return position >= plan.ring ? position - plan.ring : position;
}

// All slots in flight, the oldest waited for before it is filled again. kTimed sums each copy's cycles from its issue until the
// wait for it is over (copies are waited for in order).
template <bool kTensor, bool kTimed>
__global__ void __launch_bounds__(32)
    copy_stream(CopyPlan plan, uint32_t base, const __grid_constant__ CUtensorMap map, CtaTime* times, Cycles* latencies) {
    extern __shared__ __align__(1024) char smem[];
    check_base(smem, base);
    const int slots = int(held(plan.slots)), copies = int(held(plan.copies));
    if (elect_lane()) {
        init_slots(base, slots, 0);
        auto* issued = reinterpret_cast<Cycles*>(smem + tma_smem::kIssued);
        size_t position = first_position(plan, blockIdx.x);
        Cycles latency = 0;
        int slot = 0;
        uint32_t parity = 0;
        CtaTime time{read_clock(), 0, read_globaltimer(), 0};
#pragma unroll 1
        for (int i = 0; i < copies + slots; ++i) {
            uint32_t full = base + tma_smem::kFull + 8 * slot;
            if (i >= slots) {
                barrier_wait(full, parity, kFullSlotWait);
                if (kTimed) latency += read_clock() - issued[slot];
            }
            if (i < copies) {
                if (kTimed) issued[slot] = read_clock();
                barrier_arrive_expect(full, plan.bytes);
                load_copy<kTensor>(plan, map, base + tma_smem::kData + slot * plan.bytes, position, full);
                position = next_position(plan, position);
            }
            if (++slot == slots) {
                slot = 0;
                if (i >= slots) parity ^= 1;
            }
        }
        time.clock_end = read_clock();
        time.ns_end = read_globaltimer();
        times[blockIdx.x] = time;
        if (kTimed) latencies[blockIdx.x] = latency;
    }
}

struct CopyStamps {
    Cycles issue, done, empty;
};

// One copy at a time: before the expect-tx, after the issue, after the wait.
template <bool kTensor>
__global__ void __launch_bounds__(32)
    copy_latency(CopyPlan plan, uint32_t base, const __grid_constant__ CUtensorMap map, CopyStamps* stamps) {
    extern __shared__ __align__(1024) char smem[];
    check_base(smem, base);
    if (elect_lane()) {
        init_slots(base, 1, 0);
        size_t position = plan.start;
#pragma unroll 1
        for (int i = 0; i < plan.copies; ++i) {
            Cycles empty = read_clock();
            empty = read_clock() - empty;
            Cycles begin = read_clock();
            barrier_arrive_expect(base + tma_smem::kFull, plan.bytes);
            load_copy<kTensor>(plan, map, base + tma_smem::kData, position, base + tma_smem::kFull);
            Cycles issued = read_clock();
            barrier_wait(base + tma_smem::kFull, i & 1, kLatencyWait);
            Cycles done = read_clock();
            stamps[i] = {issued - begin, done - begin, empty};
            position = next_position(plan, position);
        }
    }
}

constexpr int kIssueBurst = 8;

struct IssueStamps {
    Cycles empty, begin, expected, issued[kIssueBurst];
};

// Eight copies back to back on one barrier.
template <bool kTensor>
__global__ void __launch_bounds__(32)
    copy_issue(CopyPlan plan, uint32_t base, const __grid_constant__ CUtensorMap map, IssueStamps* stamps) {
    extern __shared__ __align__(1024) char smem[];
    check_base(smem, base);
    if (elect_lane()) {
        init_slots(base, 1, 0);
#pragma unroll 1
        for (int i = 0; i < plan.copies; ++i) {
            IssueStamps s;
            s.empty = read_clock();
            s.empty = read_clock() - s.empty;
            s.begin = read_clock();
            barrier_arrive_expect(base + tma_smem::kFull, kIssueBurst * plan.bytes);
            s.expected = read_clock();
#pragma unroll
            for (int k = 0; k < kIssueBurst; ++k) {
                load_copy<kTensor>(plan, map, base + tma_smem::kData + k * plan.bytes, plan.start + k * plan.bytes,
                                   base + tma_smem::kFull);
                s.issued[k] = read_clock();
            }
            barrier_wait(base + tma_smem::kFull, i & 1, kLatencyWait);
            stamps[i] = s;
        }
    }
}

// Clusters of two. Each CTA loads its half of every tile into both: its `full` barrier expects the whole tile, and a slot is
// filled again once both CTAs' consumers have arrived at the `empty` barriers of both. Bytes may come before the expect-tx
// (the count goes below zero for a while), but not before the slot's last phase is over. Warp 0 loads, warp 1 consumes.
__global__ void __launch_bounds__(64) multicast_stream(CopyPlan plan, CtaTime* times) {
    extern __shared__ __align__(1024) char smem[];
    uint32_t base = fixed_address(smem), rank = cluster_rank(), half = plan.bytes / 2;
    const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0), slots = int(held(plan.slots)), copies = int(held(plan.copies));
    if (threadIdx.x == 0) init_slots(base, slots, 2);
    __syncthreads();
    cluster_sync();
    int slot = 0;
    uint32_t round = 0;
    if (warp == 0 && elect_lane()) {
        size_t position = first_position(plan, blockIdx.x / 2);
#pragma unroll 1
        for (int i = 0; i < copies; ++i) {
            uint32_t full = base + tma_smem::kFull + 8 * slot;
            if (round > 0) barrier_wait(base + tma_smem::kEmpty + 8 * slot, (round - 1) & 1, kEmptySlotWait);
            barrier_arrive_expect(full, plan.bytes);
            bulk_load_multicast(base + tma_smem::kData + slot * plan.bytes + rank * half, plan.data + position + rank * half, half,
                                full, 3);
            position = next_position(plan, position);
            if (++slot == slots) slot = 0, ++round;
        }
    }
    if (warp == 1 && elect_lane()) {
        CtaTime time{read_clock(), 0, read_globaltimer(), 0};
#pragma unroll 1
        for (int i = 0; i < copies; ++i) {
            barrier_wait(base + tma_smem::kFull + 8 * slot, round & 1, kFullSlotWait);
            if (i + slots < copies) { // the last arrivals would find nobody
                barrier_arrive_remote(base + tma_smem::kEmpty + 8 * slot, 0);
                barrier_arrive_remote(base + tma_smem::kEmpty + 8 * slot, 1);
            }
            if (++slot == slots) slot = 0, ++round;
        }
        time.clock_end = read_clock();
        time.ns_end = read_globaltimer();
        times[blockIdx.x] = time;
    }
    __syncwarp();
    cluster_sync(); // neither CTA leaves while the other may still write to it
}

// One cluster; the CTAs start each round together.
__global__ void __launch_bounds__(32) multicast_latency(CopyPlan plan, CopyStamps* stamps) {
    extern __shared__ __align__(1024) char smem[];
    uint32_t base = fixed_address(smem), rank = cluster_rank(), half = plan.bytes / 2;
    if (threadIdx.x == 0) init_slots(base, 1, 0);
    __syncwarp();
    cluster_sync();
    size_t position = plan.start;
#pragma unroll 1
    for (int i = 0; i < plan.copies; ++i) {
        cluster_sync();
        if (elect_lane()) {
            Cycles empty = read_clock();
            empty = read_clock() - empty;
            Cycles begin = read_clock();
            barrier_arrive_expect(base + tma_smem::kFull, plan.bytes);
            bulk_load_multicast(base + tma_smem::kData + rank * half, plan.data + position + rank * half, half,
                                base + tma_smem::kFull, 3);
            Cycles issued = read_clock();
            barrier_wait(base + tma_smem::kFull, i & 1, kMulticastWait);
            Cycles done = read_clock();
            stamps[rank * plan.copies + i] = {issued - begin, done - begin, empty};
        }
        __syncwarp();
        position = next_position(plan, position);
    }
    cluster_sync();
}

__device__ inline void fill_store_source(char* smem, int bytes) {
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x)
        reinterpret_cast<uint32_t*>(smem + tma_smem::kData)[i] = i * 2654435761u + blockIdx.x;
    proxy_fence();
    __syncthreads();
}

struct StoreStamps {
    Cycles issue, read, done, seen, empty;
};

__device__ __forceinline__ uint32_t load_at_l2(const void* p) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__global__ void __launch_bounds__(128) store_latency(CopyPlan plan, uint32_t base, StoreStamps* stamps) {
    extern __shared__ __align__(1024) char smem[];
    check_base(smem, base);
    fill_store_source(smem, plan.bytes);
    if (threadIdx.x < 32 && elect_lane()) {
        size_t position = plan.start;
#pragma unroll 1
        for (int i = 0; i < plan.copies; ++i) {
            Cycles empty = read_clock();
            empty = read_clock() - empty;
            Cycles begin = read_clock();
            bulk_store(plan.data + position, base + tma_smem::kData, plan.bytes);
            bulk_commit();
            Cycles issued = read_clock();
            bulk_wait<0, true>();
            Cycles was_read = read_clock();
            bulk_wait<0, false>();
            Cycles done = read_clock();
            stamps[i] = {issued - begin, was_read - begin, done - begin, 0, empty};
            position = next_position(plan, position);
        }
        // Again, with a new last word each time, until a load from L2 sees it.
        int last = int(plan.bytes) - 4;
        position = plan.start;
#pragma unroll 1
        for (int i = 0; i < plan.copies; ++i) {
            uint32_t word = static_cast<uint32_t>(read_clock()) | 1u;
            *reinterpret_cast<volatile uint32_t*>(smem + tma_smem::kData + last) = word;
            proxy_fence();
            Cycles begin = read_clock();
            bulk_store(plan.data + position, base + tma_smem::kData, plan.bytes);
            bulk_commit();
            int tries = 0;
            while (load_at_l2(plan.data + position + last) != word)
                if (++tries == kWaitTries) raise_alarm(kStoreWait);
            stamps[i].seen = read_clock() - begin;
            bulk_wait<0, false>();
            position = next_position(plan, position);
        }
    }
}

// A slot is written again as soon as its last copy has been read.
template <int kInFlight>
__global__ void __launch_bounds__(128) store_stream(CopyPlan plan, uint32_t base, CtaTime* times) {
    extern __shared__ __align__(1024) char smem[];
    check_base(smem, base);
    fill_store_source(smem, kInFlight * plan.bytes);
    if (threadIdx.x < 32 && elect_lane()) {
        size_t position = first_position(plan, blockIdx.x);
        int slot = 0;
        CtaTime time{read_clock(), 0, read_globaltimer(), 0};
#pragma unroll 1
        for (int i = 0; i < plan.copies; ++i) {
            bulk_wait<kInFlight - 1, true>();
            bulk_store(plan.data + position, base + tma_smem::kData + slot * plan.bytes, plan.bytes);
            bulk_commit();
            position = next_position(plan, position);
            slot = slot + 1 == kInFlight ? 0 : slot + 1;
        }
        bulk_wait<0, false>();
        time.clock_end = read_clock();
        time.ns_end = read_globaltimer();
        times[blockIdx.x] = time;
    }
}
