// Group `sync`: barriers and hand-overs between warps of one CTA, in cycles. `warps` is the number of warps taking part.
#pragma once

#include "harness.cuh"

enum SyncKind { kSyncThreads, kNamedBarrier, kPingPong, kMbarrierPingPong, kMbarrierSelf, kMbarrierOver };

constexpr int kSyncRounds = 512;

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred done;\n"
        "WAIT_%=: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra WAIT_%=;}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// FA3's hand-over: warpgroup g waits for its own barrier, then arrives at the other's.
__device__ __forceinline__ void ping_pong_round(int group) {
    bar_sync(1 + group, 256);
    bar_arrive(2 - group, 256);
}

// Lane 0 of each of two warps: wait for mine, arrive at the other's.
__device__ __forceinline__ void mbarrier_round(uint32_t barriers, int side, int round) {
    mbarrier_wait(barriers + 8 * side, round & 1);
    mbarrier_arrive(barriers + 8 * (1 - side));
}

// One round of each kind; `lane_pair` kinds run on lane 0 of two warps only.
template <int kKind>
__device__ __forceinline__ void sync_round(int group, int side, int round, uint32_t mbarriers) {
    if constexpr (kKind == kSyncThreads) __syncthreads();
    if constexpr (kKind == kNamedBarrier) bar_sync(1, blockDim.x);
    if constexpr (kKind == kPingPong) ping_pong_round(group);
    if constexpr (kKind == kMbarrierPingPong) mbarrier_round(mbarriers, side, round);
    if constexpr (kKind == kMbarrierSelf) {
        mbarrier_arrive(mbarriers);
        mbarrier_wait(mbarriers, round & 1);
    }
    if constexpr (kKind == kMbarrierOver) mbarrier_wait(mbarriers, 1); // the phase before the first: over from the start
}

template <int kKind>
__global__ void sync_kernel(int partner_warp, unsigned long long* cycles) {
    constexpr bool kLanePair = kKind == kMbarrierPingPong || kKind == kMbarrierSelf;
    __shared__ __align__(8) unsigned long long barriers[2];
    uint32_t mbarriers = shared_address(barriers);
    int warp = threadIdx.x / 32, group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        mbarrier_init(mbarriers, 1);
        mbarrier_init(mbarriers + 8, 1);
    }
    __syncthreads();
    if (kKind == kPingPong && group == 1) bar_arrive(1, 256);
    bool mine = threadIdx.x % 32 == 0 && (warp == 0 || warp == partner_warp);
    if (kLanePair && !mine) return;
    if (kKind == kMbarrierPingPong && warp != 0) mbarrier_arrive(mbarriers);
    uint64_t taken = 0;
    for (int pass = 0; pass < 2; ++pass) { // the first pass warms the instruction cache
        uint64_t begin = read_clock();
#pragma unroll 8
        for (int i = 0; i < kSyncRounds; ++i) sync_round<kKind>(group, warp != 0, i, mbarriers);
        taken = read_clock() - begin;
    }
    if (kKind == kPingPong && group == 0) bar_sync(1, 256);
    if (threadIdx.x == 0) *cycles = taken;
}

template <int kKind>
void sync_case(const std::string& name, int warps, int partner, const std::string& param,
               DeviceArray<unsigned long long>& cycles, int launched_warps = 0) {
    std::vector<double> values;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        sync_kernel<kKind><<<1, std::max(warps, launched_warps) * 32>>>(partner, cycles.get());
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        if (repeat >= 0) values.push_back(double(cycles.to_host(1)[0]) / kSyncRounds);
    }
    print_row("sync", name, warps, param, values, "cycles");
}

inline void measure_sync(const Device& device) {
    DeviceArray<unsigned long long> cycles(1);
    for (int warps : {4, 8, 12, 16}) sync_case<kSyncThreads>("syncthreads", warps, 0, "", cycles);
    for (int warps : {2, 4, 8, 12}) sync_case<kNamedBarrier>("bar_sync_named", warps, 0, "", cycles);
    sync_case<kPingPong>("bar_ping_pong_round", 8, 0, "two_handovers", cycles);
    if (device.major < 9) return progress("sync: mbarrier.try_wait skipped, needs compute capability 9.0");
    sync_case<kMbarrierPingPong>("mbarrier_round_trip", 2, 1, "other_smsp", cycles);
    sync_case<kMbarrierPingPong>("mbarrier_round_trip", 2, 4, "same_smsp", cycles, 8);
    sync_case<kMbarrierSelf>("mbarrier_arrive_wait_self", 1, 0, "", cycles);
    for (int warps : {1, 4, 8}) sync_case<kMbarrierOver>("mbarrier_wait_over", warps, 0, "", cycles);
}
