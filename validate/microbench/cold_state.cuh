// What a launch finds in caches, and one row of CSV for each clock stamp that a kernel leaves.
//   again: the same kernel ran just before; other_code: 512 KiB of other code ran in between, L2 kept; flushed: 256 MiB were
//   written in between, as do_bench does; code_flushed: both, other code first; profiler: as Nsight Compute leaves them.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

#define CHECK_CUDA(call)                                                                             \
    if (cudaError_t error = (call); error != cudaSuccess) {                                          \
        std::fprintf(stderr, "[cold_start] %s: %s\n", #call, cudaGetErrorString(error));             \
        std::exit(1);                                                                                \
    }

constexpr int kMostSteps = 64, kStateRepeats = 5;
constexpr size_t kFlushBytes = size_t(256) << 20;

template <int kInstructions, int kChains, int kSalt>
__device__ __forceinline__ void straight_code(float (&f)[kChains], float x) {
#pragma unroll
    for (int i = 0; i < kInstructions; ++i)
        asm volatile("fma.rn.f32 %0, %0, %1, %1;" : "+f"(f[(i + kSalt) % kChains]) : "f"(x));
}

template <int kSalt>
__global__ void other_code(float* sink, float x) {
    float f[8];
    for (int i = 0; i < 8; ++i) f[i] = x + i + kSalt;
    straight_code<16384, 8, kSalt>(f, x);
    float sum = 0;
    for (float each : f) sum += each;
    if (sum == 1.2345f) *sink = sum;
}

class Bench {
  public:
    explicit Bench(bool profiled) : profiled_(profiled) {
        CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
        CHECK_CUDA(cudaMalloc(&stamps, size_t(sms) * kMostSteps * sizeof(unsigned)));
        CHECK_CUDA(cudaMalloc(&sink, 256));
        CHECK_CUDA(cudaMalloc(&flush_, kFlushBytes));
        std::printf("test,state,ctas,warps,param,step,cycles_least,cycles_median,cycles_most\n");
    }

    // Runs `launch` in each state; the kernel leaves `steps` values a CTA. Prints medians over repeats.
    template <class Launch>
    void measure(const char* test, int ctas, int warps, const std::string& param, int steps, Launch launch) {
        std::vector<const char*> states = {"again", "other_code", "flushed", "code_flushed"};
        if (profiled_) states = {"profiler"};
        launch();
        CHECK_CUDA(cudaDeviceSynchronize());
        for (const char* state : states) {
            std::vector<std::vector<unsigned>> least(steps), median(steps), most(steps);
            for (int repeat = 0; repeat < (profiled_ ? 2 : kStateRepeats); ++repeat) {
                prepare(state, repeat, launch);
                launch();
                CHECK_CUDA(cudaGetLastError());
                std::vector<unsigned> found(size_t(ctas) * steps);
                CHECK_CUDA(cudaMemcpy(found.data(), stamps, found.size() * sizeof(unsigned), cudaMemcpyDeviceToHost));
                for (int step = 0; step < steps; ++step) {
                    std::vector<unsigned> of;
                    for (int cta = 0; cta < ctas; ++cta) of.push_back(found[size_t(cta) * steps + step]);
                    std::sort(of.begin(), of.end());
                    least[step].push_back(of.front());
                    median[step].push_back(of[of.size() / 2]);
                    most[step].push_back(of.back());
                }
            }
            for (int step = 0; step < steps; ++step)
                std::printf("%s,%s,%d,%d,%s,%d,%u,%u,%u\n", test, state, ctas, warps, param.c_str(), step, middle(least[step]),
                            middle(median[step]), middle(most[step]));
        }
        std::fflush(stdout);
    }

    int sms = 0;
    unsigned* stamps = nullptr;
    float* sink = nullptr;

  private:
    static unsigned middle(std::vector<unsigned>& of) {
        std::sort(of.begin(), of.end());
        return of[of.size() / 2];
    }
    template <class Launch>
    void prepare(const char* state, int repeat, Launch launch) {
        if (!std::strcmp(state, "again")) launch();
        if (std::strstr(state, "code")) {
            other_code<7><<<sms, 128>>>(sink, 1.0f);
            other_code<9><<<sms, 128>>>(sink, 1.0f);
        }
        if (std::strstr(state, "flushed")) CHECK_CUDA(cudaMemset(flush_, repeat, kFlushBytes));
        CHECK_CUDA(cudaDeviceSynchronize());
    }

    bool profiled_;
    char* flush_ = nullptr;
};
