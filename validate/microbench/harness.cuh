// Runs instruction streams on the warps of a CTA and times them. Warpgroup r of a CTA (warps 4r..4r+3, one per SMSP) is
// role r. A warp runs warm-up chunks, its timed chunks, and then goes on in the same loop until every warp of the CTA
// has finished its timed chunks: so each stream is timed while all the others run all the time.
#pragma once

#include <cstring>
#include <random>

#include "regions.cuh"
#include "report.cuh"
#include "streams.cuh"

constexpr int kMaxRoles = 4;
constexpr int kDataCount = 4096;
constexpr int kWarmChunks = 3;
constexpr int kTimedChunks = 24;
constexpr int kStreamSmem = 120 * 1024; // over half of any SM's: one CTA per SM

struct Roles {
    int count = 0;
    int stream[kMaxRoles] = {};
    int timed_chunks[kMaxRoles] = {};

    Roles& add(int id, int copies = 1, int chunks = kTimedChunks) {
        for (int i = 0; i < copies; ++i) {
            stream[count] = id;
            timed_chunks[count++] = chunks;
        }
        return *this;
    }
};

struct WarpTime {
    unsigned long long clock_begin, clock_end, ns_begin, ns_end;
};

struct Inputs {
    const float* normal;
    const uint32_t* bf16x2;
    const char* l2_resident;
    int zero = 0; // a 0 that the compiler does not know
};

__device__ inline Context make_context(const Inputs& inputs, const void* smem) {
    return {inputs.normal, inputs.bf16x2, inputs.l2_resident, shared_address(smem), static_cast<int>(threadIdx.x / 32),
            static_cast<int>(threadIdx.x % 32), inputs.zero};
}

// The loop every stream runs in. The polls start only after the timed part, so the timed part holds none.
template <class Body>
__device__ __forceinline__ void drive(const Context& context, int inner, int timed, volatile int* finished, int warps,
                                      WarpTime& time, float* sink) {
    Body body;
    body.init(context);
    __syncthreads();
    for (int chunk = 0;; ++chunk) {
        if (chunk == kWarmChunks) {
            time.ns_begin = read_globaltimer();
            time.clock_begin = read_clock();
        }
        if (chunk >= kWarmChunks + timed) {
            if (chunk == kWarmChunks + timed) {
                time.clock_end = read_clock();
                time.ns_end = read_globaltimer();
                if (context.lane == 0) atomicAdd(const_cast<int*>(finished), 1);
            }
            if (*finished == warps) break;
        }
        run_steps(body, inner, context.zero);
    }
    float s = body.sink();
    if (s == 1.2345e33f) *sink = s; // never true, but the compiler cannot know
}

__global__ void __launch_bounds__(512, 1) streams_kernel(Roles roles, Inputs inputs, WarpTime* times, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ int finished;
    if (threadIdx.x == 0) finished = 0;
    fill_stream_tables(smem, inputs.bf16x2);
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, role = warp / 4;
    Context context = make_context(inputs, smem);
    int timed = roles.timed_chunks[role];
    WarpTime time{};
    switch (roles.stream[role]) {
#define RUN_STREAM(id, name, cycles, ...)                                                                    \
    case id:                                                                                                 \
        drive<__VA_ARGS__>(context, inner_steps<__VA_ARGS__>(cycles), timed, &finished, warps, time, sink);  \
        break;
        ALL_STREAMS(RUN_STREAM)
#undef RUN_STREAM
    }
    if (context.lane == 0) times[blockIdx.x * warps + warp] = time;
}

struct StreamInfo {
    std::string name;
    double inst_per_chunk; // warp instructions (or mix elements) of one warp in one chunk
};

inline const StreamInfo& stream_info(int id) {
    static const std::vector<StreamInfo> table = [] {
        std::vector<StreamInfo> t(kStreamCount);
#define DESCRIBE(id, name, cycles, ...) \
    t[id] = {name, static_cast<double>(__VA_ARGS__::kInst) * inner_steps<__VA_ARGS__>(cycles)};
        ALL_STREAMS(DESCRIBE)
#undef DESCRIBE
        return t;
    }();
    return table[id];
}

// Random normal inputs, or zeros of the same size for the power runs that ask what data toggling costs.
class StreamInputs {
  public:
    explicit StreamInputs(bool zeros = false) : normal_(kDataCount), bf16x2_(kDataCount), l2_(1 << 16) {
        std::mt19937 engine(20261130);
        std::normal_distribution<float> draw;
        std::vector<float> f(kDataCount);
        std::vector<uint32_t> packed(kDataCount);
        auto bf16 = [&] {
            float v = draw(engine);
            uint32_t u;
            memcpy(&u, &v, 4);
            return (u + 0x8000u) >> 16;
        };
        for (auto& v : f) v = zeros ? 0.f : draw(engine);
        for (auto& v : packed) {
            uint32_t lo = bf16(), hi = bf16();
            v = zeros ? 0u : hi << 16 | lo;
        }
        normal_.from_host(f);
        bf16x2_.from_host(packed);
        CHECK_CUDA(cudaMemset(l2_.get(), 0x3e, l2_.count()));
    }
    Inputs view() const { return {normal_.get(), bf16x2_.get(), l2_.get(), 0}; }

  private:
    DeviceArray<float> normal_;
    DeviceArray<uint32_t> bf16x2_;
    DeviceArray<char> l2_;
};

// Rate of one role (or all, role < 0) on a sub-partition: mean over SMSPs and CTAs of the sum over its warps, per cycle.
inline double smsp_rate(const std::vector<WarpTime>& times, int warps, const Roles& roles, int role,
                        const std::vector<double>& inst_per_chunk) {
    double total = 0;
    for (size_t i = 0; i < times.size(); ++i) {
        int r = static_cast<int>(i % warps) / 4;
        if (role >= 0 && r != role) continue;
        total += inst_per_chunk[r] * roles.timed_chunks[r] / double(times[i].clock_end - times[i].clock_begin);
    }
    return total / (times.size() / warps * 4);
}

inline std::vector<double> role_inst_per_chunk(const Roles& roles) {
    std::vector<double> v;
    for (int r = 0; r < roles.count; ++r) v.push_back(stream_info(roles.stream[r]).inst_per_chunk);
    return v;
}

inline void launch_streams(const Roles& roles, const Inputs& inputs, int ctas, WarpTime* times, float* sink) {
    CHECK_CUDA(cudaFuncSetAttribute(streams_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStreamSmem));
    streams_kernel<<<ctas, roles.count * 128, kStreamSmem>>>(roles, inputs, times, sink);
    CHECK_CUDA(cudaGetLastError());
}

// One CTA on one SM; returns the warps' times.
inline std::vector<WarpTime> run_streams_once(const Roles& roles, const StreamInputs& inputs) {
    static DeviceArray<WarpTime> times(kMaxRoles * 4);
    static DeviceArray<float> sink(1);
    launch_streams(roles, inputs.view(), 1, times.get(), sink.get());
    CHECK_CUDA(cudaDeviceSynchronize());
    return times.to_host(roles.count * 4);
}

// Cycles per instruction of each role, one vector of repeats per role; the last entry is over all roles together.
inline std::vector<std::vector<double>> cycles_per_inst(const Roles& roles, const StreamInputs& inputs) {
    std::vector<std::vector<double>> result(roles.count + 1);
    run_streams_once(roles, inputs);
    for (int repeat = 0; repeat < kRepeats; ++repeat) {
        auto times = run_streams_once(roles, inputs);
        auto inst = role_inst_per_chunk(roles);
        for (int r = 0; r < roles.count; ++r)
            result[r].push_back(1.0 / smsp_rate(times, roles.count * 4, roles, r, inst));
        result[roles.count].push_back(1.0 / smsp_rate(times, roles.count * 4, roles, -1, inst));
    }
    return result;
}
