// Kernels whose counters (read by ../profile_l2.py under the profiler) tell what L2 keeps: how much written data stays dirty
// at a kernel's end, how much read data is still there when it is read again, and what a rewritten ("hot") set costs while
// other data stream by. And, with no memory at all, what a kernel takes beside its CTAs' own cycles.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

// Writes `count` vectors once.
__global__ void write_span(float4* p, size_t count) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x)
        p[i] = make_float4(1, 2, 3, 4);
}

// Reads `count` vectors `passes` times in the same order; each vector by one thread of the chip.
__global__ void read_again(const float4* p, size_t count, int passes, float* sink) {
    float s = 0;
    size_t threads = size_t(gridDim.x) * blockDim.x, me = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    for (int pass = 0; pass < passes; ++pass)
        for (size_t i = me; i < count; i += threads) s += __ldcg(p + i).x;
    if (s == 1.2345f) *sink = s;
}

// The same, but a CTA reads other vectors in every pass (shifted by `shift` CTAs): readers on both sides of the chip.
__global__ void read_shifted(const float4* p, size_t count, int passes, int shift, float* sink) {
    float s = 0;
    size_t threads = size_t(gridDim.x) * blockDim.x;
    for (int pass = 0; pass < passes; ++pass) {
        size_t me = ((blockIdx.x + pass * shift) % gridDim.x) * size_t(blockDim.x) + threadIdx.x;
        for (size_t i = me; i < count; i += threads) s += __ldcg(p + i).x;
    }
    if (s == 1.2345f) *sink = s;
}

// Reads `first` vectors, streams `cold` vectors once, reads the first ones again: what of them was kept.
__global__ void read_stream_read(const float4* p, size_t first, const float4* cold, size_t cold_count, float* sink) {
    float s = 0;
    size_t threads = size_t(gridDim.x) * blockDim.x, me = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    for (size_t i = me; i < first; i += threads) s += __ldcg(p + i).x;
    for (size_t i = me; i < cold_count; i += threads) s += __ldcg(cold + i).x;
    for (size_t i = me; i < first; i += threads) s += __ldcg(p + i).x;
    if (s == 1.2345f) *sink = s;
}

// Writes `first` vectors, then streams `cold` vectors by reads: how many of the written ones had to leave.
__global__ void write_then_read(float4* p, size_t first, const float4* cold, size_t cold_count, float* sink) {
    float s = 0;
    size_t threads = size_t(gridDim.x) * blockDim.x, me = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    for (size_t i = me; i < first; i += threads) p[i] = make_float4(1, 2, 3, 4);
    for (size_t i = me; i < cold_count; i += threads) s += __ldcg(cold + i).x;
    if (s == 1.2345f) *sink = s;
}

// Streams `cold` once by writes and rewrites all of `hot` after each `rewrite` steps.
__global__ void write_hot_and_cold(float4* hot, size_t hot_count, float4* cold, size_t cold_count, int rewrite) {
    size_t threads = size_t(gridDim.x) * blockDim.x, me = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    int step = 0;
    for (size_t i = me; i < cold_count; i += threads, ++step) {
        if (step % rewrite == 0)
            for (size_t j = me; j < hot_count; j += threads) hot[j] = make_float4(step, 2, 3, 4);
        cold[i] = make_float4(1, 2, 3, 4);
    }
}

__global__ void spin(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

constexpr size_t kMiB = 1 << 20;
constexpr size_t kVectors = kMiB / sizeof(float4);

int main() {
    float4 *a, *b;
    float* sink;
    cudaMalloc(&a, 512 * kMiB);
    cudaMalloc(&b, 512 * kMiB);
    cudaMalloc(&sink, 4);
    cudaMemset(a, 0, 512 * kMiB);
    cudaMemset(b, 0, 512 * kMiB);
    int sms = 0;
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
    const int ctas = sms * 2;
    auto label = [](const char* name, const char* param) { std::printf("%s,%s\n", name, param); };
    char text[64];
    for (int size : {4, 16, 24, 32, 48, 64, 128, 256}) {
        std::snprintf(text, sizeof text, "mib=%d", size);
        label("write_span", text);
        write_span<<<ctas, 512>>>(a, size * kVectors);
    }
    for (int size : {8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 96}) {
        std::snprintf(text, sizeof text, "mib=%d passes=4", size);
        label("read_again", text);
        read_again<<<ctas, 512>>>(a, size * kVectors, 4, sink);
        label("read_shifted", text);
        read_shifted<<<ctas, 512>>>(a, size * kVectors, 4, 7, sink);
    }
    for (int cold : {8, 16, 24, 32, 40, 48, 64}) {
        std::snprintf(text, sizeof text, "first_mib=8 cold_mib=%d", cold);
        label("read_stream_read", text);
        read_stream_read<<<ctas, 512>>>(a, 8 * kVectors, b, cold * kVectors, sink);
        label("write_then_read", text);
        write_then_read<<<ctas, 512>>>(a, 8 * kVectors, b, cold * kVectors, sink);
    }
    for (int hot : {1, 2, 4, 8, 16})
        for (int rewrite : {1, 4}) {
            std::snprintf(text, sizeof text, "hot_mib=%d cold_vectors=%zu rewrite=%d", hot, size_t(ctas) * 256 * 60, rewrite);
            label("write_hot_and_cold", text);
            write_hot_and_cold<<<ctas, 256>>>(b, hot * kVectors, a, size_t(ctas) * 256 * 60, rewrite);
        }
    for (int per_sm : {1, 2})
        for (long long cycles : {2000LL, 10000LL, 50000LL, 250000LL}) {
            std::snprintf(text, sizeof text, "ctas_per_sm=%d cycles=%lld", per_sm, cycles);
            label("spin", text);
            spin<<<sms * per_sm, per_sm == 1 ? 128 : 384>>>(cycles);
        }
    cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) std::fprintf(stderr, "l2_probe: %s\n", cudaGetErrorString(error));
    return error != cudaSuccess;
}
