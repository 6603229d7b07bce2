// One-instruction wrappers of Hopper's asynchronous machinery, and waits that cannot hang: a wait past its limit leaves its
// number in host memory and traps, and the host stops a launch that outlasts its own limit (a named barrier, say). No calls
// here: ptxas serialises wgmma in a kernel that calls anything. Empty bodies where the target lacks the instruction.
#pragma once

#include <chrono>
#include <cstring>

#include "ptx.cuh"
#include "report.cuh"
#include "wgmma_ptx.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FLASHSIM_HAS_ASYNC 1
#endif

enum WaitPlace { kNoWait, kHandoverWait, kFullSlotWait, kEmptySlotWait, kLatencyWait, kMulticastWait, kSmemBase, kStoreWait };
constexpr int kWaitTries = 1 << 22; // of at least some 20 cycles each, where no wait here takes a millisecond

struct Alarm {
    int place, block, thread;
};
static __device__ volatile Alarm* alarm_box; // host memory; null until watch_waits()

__device__ __forceinline__ void raise_alarm(int place) {
    if (alarm_box) {
        alarm_box->place = place;
        alarm_box->block = blockIdx.x;
        alarm_box->thread = threadIdx.x;
    }
    __threadfence_system();
    asm volatile("trap;");
}

// Clocks here are 64-bit to the end: of a value cut to 32 bits ptxas reads the clock by S2UR, which takes longer.
using Cycles = unsigned long long;

// A value that stays in its register (the clock's top bit is 0): ptxas would load an argument (LDC) or form a shared address
// (S2R) again at each use, some 20 cycles each.
__device__ __forceinline__ uint32_t held(uint32_t value) { return value + static_cast<uint32_t>(read_clock() >> 63); }
__device__ __forceinline__ uint32_t fixed_address(const void* p) { return held(shared_address(p)); }

// True in one lane of a converged warp, always the same one. ptxas then issues a bulk copy once; under any other condition it
// writes a loop over the lanes that might be there.
__device__ __forceinline__ bool elect_lane() {
    uint32_t elected = 1;
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected)::"memory");
#endif
    return elected != 0;
}

__device__ __forceinline__ void spin_cycles(Cycles cycles) {
    Cycles begin = read_clock();
    while (read_clock() - begin < cycles) {
    }
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Before other CTAs of the cluster or the copy engine may use new barriers.
__device__ __forceinline__ void barrier_init_fence() {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void proxy_fence() {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ bool barrier_try(uint32_t barrier, uint32_t parity) {
    uint32_t done = 1;
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
#endif
    return done != 0;
}

// Waits for the end of the phase of this parity (the first phase has parity 0).
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity, WaitPlace place) {
#pragma unroll 1
    for (int tries = 0; !barrier_try(barrier, parity); ++tries)
        if (tries == kWaitTries) raise_alarm(place);
}

// The same barrier in CTA `rank` of the cluster; as CUTLASS has it, without .release.cluster, which would put a MEMBAR.GPU before.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t barrier, uint32_t rank) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile(
        "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
        "r"(rank)
        : "memory");
#endif
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// All threads of all CTAs of the cluster, each warp converged.
__device__ __forceinline__ void cluster_sync() {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
#endif
}

// Copies by one thread; addresses and sizes in multiples of 16 bytes. The barrier counts the bytes.
__device__ __forceinline__ void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
#endif
}

// To the same offset in each CTA of the mask, counted by the barrier at the same offset there.
__device__ __forceinline__ void bulk_load_multicast(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                                    uint16_t mask) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
        : "memory");
#endif
}

// The box of the tensor map at column x, row y.
__device__ __forceinline__ void tensor_load(uint32_t to, const void* map, int x, int y, uint32_t barrier) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(x), "r"(y), "r"(barrier)
                 : "memory");
#endif
}

__device__ __forceinline__ void bulk_store(void* to, uint32_t from, uint32_t bytes) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
#endif
}

__device__ __forceinline__ void bulk_commit() {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// At most kPending groups are still being read (kRead) or not yet complete. On sm_90 both become the same DEPBAR; without kRead
// L1 is invalidated as well.
template <int kPending, bool kRead>
__device__ __forceinline__ void bulk_wait() {
#ifdef FLASHSIM_HAS_ASYNC
    if constexpr (kRead)
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
    else
        asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
#ifdef FLASHSIM_HAS_WGMMA
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
#endif
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
#ifdef FLASHSIM_HAS_WGMMA
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters) : "memory");
#endif
}

__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&r)[4]) {
#ifdef FLASHSIM_HAS_ASYNC
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
#endif
}

inline volatile Alarm* watch_waits() {
    static volatile Alarm* box = [] {
        void *host = nullptr, *device = nullptr;
        CHECK_CUDA(cudaHostAlloc(&host, sizeof(Alarm), cudaHostAllocMapped));
        std::memset(host, 0, sizeof(Alarm));
        CHECK_CUDA(cudaHostGetDevicePointer(&device, host, 0));
        CHECK_CUDA(cudaMemcpyToSymbol(alarm_box, &device, sizeof(device)));
        return static_cast<volatile Alarm*>(host);
    }();
    return box;
}

// Waits for the launch before it; a failed or hanging one ends the program with a sentence.
inline void finish_launch(const std::string& what, double limit_s = 20) {
    using Clock = std::chrono::steady_clock;
    auto begin = Clock::now();
    cudaError_t status = cudaGetLastError();
    bool late = false;
    while (status == cudaSuccess && !late) {
        status = cudaStreamQuery(nullptr);
        if (status == cudaSuccess) return;
        if (status != cudaErrorNotReady) break;
        cudaGetLastError(); // "not ready" is no error
        status = cudaSuccess;
        late = std::chrono::duration<double>(Clock::now() - begin).count() > limit_s;
    }
    static const char* places[] = {"no bounded wait",       "hand-over",         "full slot", "empty slot", "copy latency",
                                   "multicast latency", "shared memory base", "store seen"};
    volatile Alarm* alarm = watch_waits();
    std::fprintf(stderr, "[microbench] %s: %s; past its limit: %s (block %d, thread %d)\n", what.c_str(),
                 late ? "still running after its time limit" : cudaGetErrorString(status), places[alarm->place], alarm->block,
                 alarm->thread);
    std::fflush(stdout);
    std::_Exit(1); // no exit handlers: they would wait for the kernel
}
