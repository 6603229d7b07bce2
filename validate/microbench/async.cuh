// Group `async`: hand-overs between warps and warpgroups seen from both sides, setmaxnreg, stmatrix, and (async_wgmma.cuh) what
// surrounds a wgmma batch. One CTA. `warps` is the number of warps taking part.
#pragma once

#include "async_contention.cuh"
#include "async_ptx.cuh"
#include "async_wgmma.cuh"

// How the senders wake the waiters. In the last kind all meet at one bar.sync and the senders come late. The way back is an
// mbarrier in the first kind and bar.arrive / bar.sync in the others.
enum HandoverKind { kByMbarrier, kByBarArrive, kByBarSync };

constexpr int kMaxParty = 12;
constexpr int kStampedRounds = 72, kColdRounds = 8, kPlainRounds = 512;
constexpr Cycles kLeadCycles = 600; // by then the waiters wait

struct Parties {
    int senders, waiters, first_waiter; // warps; senders are the first
    int arrive_lanes = 1;               // of each sender: 1 or 32
};

struct HandoverStamps {
    Cycles begin[kMaxParty], sent[kMaxParty], woke[kMaxParty]; // per sender, sender, waiter
    Cycles empty;                                              // two clock reads with nothing between them
};

struct HandoverSide {
    uint32_t barriers;
    int threads;
    bool arrives, leader;
};

// Direction 0 wakes the waiters, 1 is the way back.
template <int kKind>
__device__ __forceinline__ void send(const HandoverSide& side, int direction) {
    if constexpr (kKind == kByMbarrier) {
        if (side.arrives) barrier_arrive(side.barriers + 8 * direction);
    } else if (kKind == kByBarSync && direction == 0) {
        bar_sync(1, side.threads);
    } else {
        bar_arrive(1 + direction, side.threads);
    }
}

// Of an mbarrier all lanes wait, or (kOneLane) the first, and the others for it.
template <int kKind, bool kOneLane>
__device__ __forceinline__ void await(const HandoverSide& side, int direction, int round) {
    if constexpr (kKind == kByMbarrier) {
        if (!kOneLane || side.leader) barrier_wait(side.barriers + 8 * direction, round & 1, kHandoverWait);
        if (kOneLane) __syncwarp();
    } else {
        bar_sync(1 + direction, side.threads);
    }
}

template <int kKind, bool kOneLane, bool kStamped>
__device__ void send_rounds(const HandoverSide& side, int warp, int first, int count, HandoverStamps* stamps) {
#pragma unroll 1
    for (int i = first; i < first + count; ++i) {
        await<kKind, kOneLane>(side, 1, i);
        if constexpr (kStamped) {
            Cycles empty = read_clock();
            empty = read_clock() - empty;
            spin_cycles(kLeadCycles);
            Cycles begin = read_clock();
            send<kKind>(side, 0);
            Cycles sent = read_clock();
            if (side.leader) {
                stamps[i].begin[warp] = begin;
                stamps[i].sent[warp] = sent;
                if (warp == 0) stamps[i].empty = empty;
            }
        } else {
            send<kKind>(side, 0);
        }
    }
}

template <int kKind, bool kOneLane, bool kStamped>
__device__ void wait_rounds(const HandoverSide& side, int warp, int first, int count, HandoverStamps* stamps) {
#pragma unroll 1
    for (int i = first; i < first + count; ++i) {
        await<kKind, kOneLane>(side, 0, i);
        Cycles woke = kStamped ? read_clock() : 0;
        send<kKind>(side, 1); // the loop's end comes after it: hidden in the wait
        if (kStamped && side.leader) stamps[i].woke[warp] = woke;
    }
}

// Stamped rounds, each after a pause of the senders, then plain ones back to back: a ping-pong.
template <int kKind, bool kOneLane>
__global__ void handover_kernel(Parties parties, HandoverStamps* stamps, Cycles* cycles) {
    __shared__ __align__(8) unsigned long long barriers[2];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool sender = warp < parties.senders;
    bool waiter = warp >= parties.first_waiter && warp < parties.first_waiter + parties.waiters;
    HandoverSide side{fixed_address(barriers), 32 * (parties.senders + parties.waiters),
                      lane < (sender ? parties.arrive_lanes : 1), lane == 0};
    if (threadIdx.x == 0) {
        barrier_init(side.barriers, parties.senders * parties.arrive_lanes);
        barrier_init(side.barriers + 8, parties.waiters);
    }
    __syncthreads();
    if (sender) {
        send_rounds<kKind, kOneLane, true>(side, warp, 0, kStampedRounds, stamps);
        Cycles begin = read_clock();
        send_rounds<kKind, kOneLane, false>(side, warp, kStampedRounds, kPlainRounds, stamps);
        if (threadIdx.x == 0) *cycles = read_clock() - begin;
        await<kKind, kOneLane>(side, 1, kStampedRounds + kPlainRounds); // the waiters' last way back
    } else if (waiter) {
        send<kKind>(side, 1);
        wait_rounds<kKind, kOneLane, true>(side, warp - parties.first_waiter, 0, kStampedRounds, stamps);
        wait_rounds<kKind, kOneLane, false>(side, warp - parties.first_waiter, kStampedRounds, kPlainRounds, stamps);
    }
}

struct HandoverReading {
    double first, last, issue, half_round;
};

inline HandoverReading read_handover(const std::vector<HandoverStamps>& stamps, const Parties& p, Cycles cycles) {
    std::vector<double> first, last, issue;
    for (size_t i = kColdRounds; i < stamps.size(); ++i) {
        const auto& s = stamps[i];
        auto since = [&](Cycles t) { return double(static_cast<long long>(t - s.begin[0])); };
        double begin = 0, earliest = 1e9, latest = -1e9;
        for (int w = 0; w < p.senders; ++w) {
            begin = std::max(begin, since(s.begin[w]));
            issue.push_back(since(s.sent[w]) - since(s.begin[w]) - double(s.empty));
        }
        for (int w = 0; w < p.waiters; ++w) {
            earliest = std::min(earliest, since(s.woke[w]));
            latest = std::max(latest, since(s.woke[w]));
        }
        first.push_back(earliest - begin);
        last.push_back(latest - begin);
    }
    return {median(first), median(last), median(issue), double(cycles) / kPlainRounds / 2};
}

// Rows NAME_wake (last send to the first and to the last waiter's next instruction), NAME_issue and NAME_half_round.
template <int kKind, bool kOneLane = false>
void measure_handover(const std::string& name, const Parties& p, const std::string& param, bool half_round = true) {
    DeviceArray<HandoverStamps> stamps(kStampedRounds);
    DeviceArray<Cycles> cycles(1);
    std::vector<double> first, last, issue, half;
    int warps = std::max(p.senders, p.first_waiter + p.waiters);
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        handover_kernel<kKind, kOneLane><<<1, 32 * warps>>>(p, stamps.get(), cycles.get());
        finish_launch("async " + name + " " + param);
        if (repeat < 0) continue;
        auto r = read_handover(stamps.to_host(kStampedRounds), p, cycles.to_host(1)[0]);
        first.push_back(r.first);
        last.push_back(r.last);
        issue.push_back(r.issue);
        half.push_back(r.half_round);
    }
    int parties = p.senders + p.waiters;
    std::string joint = param.empty() ? "" : param + "_";
    print_row("async", name + "_wake", parties, joint + "first", first, "cycles");
    if (p.waiters > 1) print_row("async", name + "_wake", parties, joint + "last", last, "cycles");
    print_row("async", name + "_issue", parties, param, issue, "cycles");
    if (half_round) print_row("async", name + "_half_round", parties, param, half, "cycles");
}

// Arrivals of one warp back to back on an mbarrier that is never complete.
__global__ void arrive_stream(int lanes, Cycles* cycles) {
    __shared__ __align__(8) unsigned long long barrier;
    uint32_t address = fixed_address(&barrier);
    bool arrives = int(threadIdx.x) < lanes;
    if (threadIdx.x == 0) barrier_init(address, (1 << 20) - 1);
    __syncthreads();
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) { // the first warms the instruction cache
        Cycles begin = read_clock();
#pragma unroll 1
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int k = 0; k < 128; ++k)
                if (arrives) barrier_arrive(address);
        }
        __syncwarp();
        if (threadIdx.x == 0) *cycles = read_clock() - begin;
    }
}

inline void measure_arrive_stream() {
    DeviceArray<Cycles> cycles(1);
    for (int lanes : {1, 32}) {
        std::vector<double> values;
        for (int repeat = 0; repeat < kRepeats; ++repeat) {
            arrive_stream<<<1, 32>>>(lanes, cycles.get());
            finish_launch("async mbarrier_arrive_interval");
            values.push_back(double(cycles.to_host(1)[0]) / 512);
        }
        print_row("async", "mbarrier_arrive_interval", 1, "arrive_lanes=" + std::to_string(lanes), values, "cycles_per_inst");
    }
}

template <bool kOneLane>
void measure_mbarrier_waits() {
    std::string param = kOneLane ? "wait_lanes=1" : "wait_lanes=32";
    measure_handover<kByMbarrier, kOneLane>("mbarrier", {1, 1, 5}, param + "_other_smsp");
    measure_handover<kByMbarrier, kOneLane>("mbarrier", {1, 1, 4}, param + "_same_smsp");
    measure_handover<kByMbarrier, kOneLane>("mbarrier", {1, 4, 4}, param);
    measure_handover<kByMbarrier, kOneLane>("mbarrier", {1, 8, 4}, param);
}

inline void measure_handovers() {
    measure_mbarrier_waits<true>();
    measure_mbarrier_waits<false>();
    for (int senders : {4, 8})
        for (int lanes : {1, 32})
            measure_handover<kByMbarrier, true>("mbarrier", {senders, 1, 8, lanes}, "arrivals=" + std::to_string(senders * lanes));
    measure_arrive_stream();
    measure_handover<kByBarArrive>("bar_arrive", {4, 4, 4}, "");
    for (int waiters : {3, 7, 11}) measure_handover<kByBarSync>("bar_sync_late", {1, waiters, 1}, "", false);
}

struct RegisterStamps {
    Cycles dec, inc, handover, empty;
};

// Warpgroup 0 gives registers up when warpgroup 1 has long asked for them; `inc` takes free ones, `handover` is from the
// start of the dec to the end of the inc it allows. Between two setmaxnreg of a warpgroup there is always a barrier.
__global__ void __launch_bounds__(384, 1) setmaxnreg_kernel(RegisterStamps* stamps) {
    __shared__ Cycles given[4];
    int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
    if (group == 0) {
#pragma unroll 1
        for (int i = 0; i < kStampedRounds; ++i) {
            bar_sync(1, 256);
            Cycles empty = read_clock();
            empty = read_clock() - empty;
            spin_cycles(kLeadCycles);
            Cycles t0 = read_clock();
            lower_registers<40>();
            Cycles t1 = read_clock();
            if (threadIdx.x % 32 == 0) given[warp] = t0;
            bar_sync(2, 256); // the taker has its registers
            bar_sync(3, 256); // and has given them back
            Cycles t2 = read_clock();
            raise_registers<168>();
            Cycles t3 = read_clock();
            if (threadIdx.x % 32 == 0) {
                stamps[i * 4 + warp].dec = t1 - t0;
                stamps[i * 4 + warp].inc = t3 - t2;
                stamps[i * 4 + warp].empty = empty;
            }
        }
        bar_sync(4, 384);
    } else if (group == 1) {
#pragma unroll 1
        for (int i = 0; i < kStampedRounds; ++i) {
            bar_sync(1, 256);
            raise_registers<232>();
            Cycles taken = read_clock();
            bar_sync(2, 256);
            if (threadIdx.x % 32 == 0) stamps[i * 4 + warp].handover = taken - given[warp];
            lower_registers<168>();
            bar_sync(3, 256);
        }
        bar_sync(4, 384);
    } else {
        bar_sync(4, 384); // stays, so that its registers do
    }
}

inline void measure_setmaxnreg() {
    DeviceArray<RegisterStamps> stamps(kStampedRounds * 4);
    std::vector<double> dec, inc, handover;
    for (int repeat = -1; repeat < kRepeats; ++repeat) {
        setmaxnreg_kernel<<<1, 384>>>(stamps.get());
        finish_launch("async setmaxnreg");
        if (repeat < 0) continue;
        std::vector<double> d, i, h;
        auto host = stamps.to_host(kStampedRounds * 4);
        for (size_t k = kColdRounds * 4; k < host.size(); ++k) {
            d.push_back(double(host[k].dec) - double(host[k].empty));
            i.push_back(double(host[k].inc) - double(host[k].empty));
            h.push_back(double(static_cast<long long>(host[k].handover)));
        }
        dec.push_back(median(d));
        inc.push_back(median(i));
        handover.push_back(median(h));
    }
    print_row("async", "setmaxnreg_dec", 4, "168to40", dec, "cycles");
    print_row("async", "setmaxnreg_inc", 4, "40to168_free", inc, "cycles");
    print_row("async", "setmaxnreg_dec_to_inc", 8, "168to232_waits_for_dec", handover, "cycles");
}

__global__ void __launch_bounds__(256) stmatrix_stream(const uint32_t* bits, Cycles* cycles) {
    __shared__ __align__(1024) char scratch[8 * 4096];
    uint32_t address = shared_address(scratch) + threadIdx.x / 32 * 4096 + threadIdx.x % 32 * 16;
    uint32_t r[4];
    for (int i = 0; i < 4; ++i) r[i] = bits[threadIdx.x + 256 * i];
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
        __syncthreads();
        Cycles begin = read_clock();
#pragma unroll 1
        for (int i = 0; i < 32; ++i) {
#pragma unroll
            for (int k = 0; k < 128; ++k) stmatrix_x4(address + k % 8 * 512, r);
        }
        __syncthreads();
        if (threadIdx.x == 0) *cycles = read_clock() - begin;
    }
}

inline void measure_stmatrix(const StreamInputs& inputs) {
    DeviceArray<Cycles> cycles(1);
    for (int warps : {1, 2, 3, 4, 8}) {
        std::vector<double> values;
        for (int repeat = 0; repeat < kRepeats; ++repeat) {
            stmatrix_stream<<<1, 32 * warps>>>(inputs.view().bf16x2, cycles.get());
            finish_launch("async stmatrix_x4");
            values.push_back(double(cycles.to_host(1)[0]) / (32 * 128 * warps));
        }
        print_row("async", "stmatrix_x4", warps, "no_conflict", values, "cycles_per_inst_per_sm");
    }
}

inline void measure_async(const Device& device) {
    if (device.major != 9) return progress("async: skipped, needs compute capability 9.0");
    watch_waits();
    StreamInputs inputs;
    measure_handovers();
    measure_setmaxnreg();
    measure_stmatrix(inputs);
    measure_wgmma_batches(inputs);
    measure_contention(inputs);
}
