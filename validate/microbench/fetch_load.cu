// What a warp waits for code that its SM does not hold, while others fetch: by the pace at which lines of code are used, by how
// that pace varies, by how many streams an SM has, with all SMs at places of their own.
//   pace: streams pass one line of code of `kib` KiB again and again. Its 128-byte lines (8 instructions) come in runs: `fast`
//     lines that take `fast_z` cycles while held, then `slow` ones of `slow_z` (32: a chain of FFMAs, 46: with a MUFU among them).
//     Streams of one SM share what they fetch: where they run up to each other, only the first one waits.
//   loop: stream 0 passes a loop of `kib` KiB of lines of 16 cycles, stream 1 meanwhile 64 KiB of other code, `slow_z` cycles a line.
// A stream is one warp, or four that a named barrier keeps in step every 64 lines; it begins at a random time. A row: cycles of a
// pass of `lines` lines (of stream 0 alone in `loop`): least, mean, median and most over SMs, streams, passes and launches.
//   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -DPART=0 -o fetch_load0 fetch_load.cu    (parts 0 to 6)
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                              \
    do {                                                                         \
        cudaError_t e = (call);                                                  \
        if (e != cudaSuccess) {                                                  \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e));      \
            std::exit(1);                                                        \
        }                                                                        \
    } while (0)

constexpr int kPasses = 14, kEdge = 2, kStreams = 4, kLineInstructions = 8, kLinesOfKib = 8, kBarrierLines = 64;

__device__ __forceinline__ unsigned stamp() {
    unsigned now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

// An immediate factor names the code that an instruction is of, so that no two are folded into one.
template <int kName>
__device__ __forceinline__ void ffma(float& a, float x) {
    asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(a) : "f"(x), "f"(1.0f + kName / 64.0f));
}

__device__ __forceinline__ void join(float& a, float x, float b) {
    asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(a) : "f"(x), "f"(b));
}

// Chains of a run begin after the run before it, so that the compiler cannot mix them.
template <int kName, int kChains>
__device__ __forceinline__ void fast_line(float (&f)[8], float s, float x, bool first) {
#pragma unroll
    for (int i = 0; i < kLineInstructions; ++i) {
        if (first && i < kChains) join(f[i], x, s);
        else ffma<kName>(f[i % kChains], x);
    }
}

template <int kName, bool kMufu>
__device__ __forceinline__ void slow_line(const float (&f)[8], float& s, float x, bool first) {
#pragma unroll
    for (int i = 0; i < kLineInstructions; ++i) {
        if (first && i == 0) join(s, x, f[0]);
        else if (kMufu && i == 4) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(s));
        else ffma<kName>(s, x);
    }
}

template <int kName, int kKib, int kFast, int kSlow, int kChains, bool kMufu>
__device__ __forceinline__ void body(float (&f)[8], float& s, float x, int barrier, int threads) {
#pragma unroll
    for (int l = 0; l < kKib * kLinesOfKib; ++l) {
        int at = l % (kFast + kSlow);
        if (at < kFast) fast_line<kName, kChains>(f, s, x, kSlow > 0 && at == 0);
        else slow_line<kName, kMufu>(f, s, x, kFast > 0 && at == kFast);
        if (l % kBarrierLines == kBarrierLines - 1) asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
    }
}

__device__ unsigned spread(unsigned a) {
    a = (a ^ a >> 16) * 0x7feb352dU;
    a = (a ^ a >> 15) * 0x846ca68bU;
    return a ^ a >> 16;
}

__device__ __forceinline__ void begin(int span, int stream, int seed) {
    __syncthreads();
    unsigned delay = spread(blockIdx.x * 8 + stream + 977 * seed) % unsigned(span), since = stamp();
    while (stamp() - since < delay) {
    }
}

__device__ void finish(const float (&f)[8], float s, float* sink) {
    for (float each : f) s += each;
    if (s == 1.2345f) *sink = s;
}

template <int kKib, int kFast, int kSlow, int kChains, bool kMufu>
__global__ void __launch_bounds__(512) pace(unsigned* out, float* sink, float x, int streams, int warps, int span, int seed) {
    float f[8], s = x;
    for (int i = 0; i < 8; ++i) f[i] = x + i;
    int warp = threadIdx.x / 32, stream = warp / warps;
    begin(span, stream, seed);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
        unsigned since = stamp();
        body<1, kKib, kFast, kSlow, kChains, kMufu>(f, s, x, 1 + stream, 32 * warps);
        unsigned took = stamp() - since;
        if (threadIdx.x % (32 * warps) == 0) out[(blockIdx.x * kStreams + stream) * kPasses + pass] = took;
    }
    finish(f, s, sink);
}

// Whether any thread of the stream says so.
__device__ __forceinline__ bool any_of(int says, int barrier, int threads) {
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %0, 0; barrier.cta.red.or.pred q, %1, %2, p; selp.s32 %0, 1, 0, q; }"
                 : "+r"(says) : "r"(barrier), "r"(threads) : "memory");
    return says;
}

template <int kLoop, bool kSlowOther>
__global__ void __launch_bounds__(512) loops(unsigned* out, float* sink, float x, int, int warps, int span, int seed) {
    __shared__ volatile int done;
    if (threadIdx.x == 0) done = 0;
    float f[8], s = x;
    for (int i = 0; i < 8; ++i) f[i] = x + i;
    int warp = threadIdx.x / 32, stream = warp / warps;
    begin(span, stream, seed);
    if (stream == 0) {
#pragma unroll 1
        for (int pass = 0; pass < kPasses; ++pass) {
            unsigned since = stamp();
            body<2, kLoop, 8, 0, 2, false>(f, s, x, 1, 32 * warps);
            unsigned took = stamp() - since;
            if (threadIdx.x == 0) out[blockIdx.x * kStreams * kPasses + pass] = took;
        }
        done = 1;
    } else {
#pragma unroll 1
        for (int pass = 0; pass < 64; ++pass) {
            if constexpr (kSlowOther) body<3, 64, 0, 8, 8, false>(f, s, x, 2, 32 * warps);
            else body<3, 64, 8, 0, 2, false>(f, s, x, 2, 32 * warps);
            if (any_of(threadIdx.x % (32 * warps) == 0 ? done : 0, 2, 32 * warps)) break;
        }
    }
    finish(f, s, sink);
}

struct Bench {
    int sms;
    unsigned* out;
    float* sink;

    template <class Kernel>
    void run(const char* what, Kernel kernel, int kib, int span, int most_streams, int told) {
        for (int warps : {1, 4})
            for (int ctas : {1, sms})
                for (int streams = 1; streams <= (warps == 1 ? most_streams : 2); streams *= 2)
                    row(what, kernel, kib, span, warps, ctas, streams, std::min(told, streams));
    }

    template <class Kernel>
    void row(const char* what, Kernel kernel, int kib, int span, int warps, int ctas, int streams, int told) {
        std::vector<unsigned> all, got(size_t(ctas) * kStreams * kPasses);
        double sum = 0;
        for (int seed = 0; seed < (ctas == 1 ? 8 : 3); ++seed) {
            kernel<<<ctas, 32 * warps * streams>>>(out, sink, 1.0f, streams, warps, span, seed);
            CHECK(cudaMemcpy(got.data(), out, got.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
            for (int at = 0; at < ctas * kStreams; ++at)
                for (int pass = kEdge; pass < kPasses - kEdge && at % kStreams < told; ++pass) {
                    all.push_back(got[size_t(at) * kPasses + pass]);
                    sum += all.back();
                }
        }
        std::sort(all.begin(), all.end());
        std::printf("%s,%d,%d,%d,%d,%d,%u,%.0f,%u,%u\n", what, kib, ctas, streams, warps, kib * kLinesOfKib, all.front(),
                    sum / all.size(), all[all.size() / 2], all.back());
        std::fflush(stdout);
    }

    template <int kFast, int kSlow, int kChains, bool kMufu>
    void paces() {
        char what[64];
        std::snprintf(what, sizeof what, "pace,%d,%d,%d,%d", kFast, kChains == 8 ? 8 : 16, kSlow, kMufu ? 46 : 32);
        run(what, pace<16, kFast, kSlow, kChains, kMufu>, 16, 3840, kStreams, kStreams);
        run(what, pace<64, kFast, kSlow, kChains, kMufu>, 64, 15360, kStreams, kStreams);
    }

    template <int kLoop>
    void loop() {
        run("loop,8,16,0,16", loops<kLoop, false>, kLoop, kLoop * 128, 2, 1);
        run("loop,8,16,0,32", loops<kLoop, true>, kLoop, kLoop * 128, 2, 1);
    }
};

int main() {
    int sms = 0;
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    Bench bench{sms, nullptr, nullptr};
    CHECK(cudaMalloc(&bench.out, sizeof(unsigned) * sms * kStreams * kPasses));
    CHECK(cudaMalloc(&bench.sink, sizeof(float)));
#if PART == 0
    std::printf("test,fast,fast_z,slow,slow_z,kib,ctas,streams,warps,lines,cycles_least,cycles_mean,cycles_median,cycles_most\n");
    bench.paces<8, 0, 8, false>();
    bench.paces<8, 0, 2, false>();
#elif PART == 1
    bench.paces<0, 8, 8, false>();
    bench.paces<0, 8, 8, true>();
#elif PART == 2
    bench.paces<1, 1, 2, true>();
    bench.paces<4, 4, 2, true>();
#elif PART == 3
    bench.paces<16, 16, 2, true>();
    bench.paces<32, 32, 2, true>();
#elif PART == 4
    bench.paces<4, 4, 8, true>();
    bench.paces<16, 16, 8, true>();
#elif PART == 5
    bench.loop<8>();
    bench.loop<16>();
#else
    bench.loop<20>();
    bench.loop<26>();
#endif
}
