// FlashAttention-3 forward as of July 2024 (flash-attention 5018ac6a, hopper/), one variant a binary, without torch: ELEMENT, FP8 0/1,
// HD head dimension, BM x BN tile, STAGES, CLUSTER 1/2, CAUSAL 0/1; SINGLE 1: a CTA a tile (patched launch template, README).
// Usage: fa3_2024 REPEATS BATCH HEADS SEQLEN [BATCH HEADS SEQLEN ...]; prints each mean time and the error of one row of O.
#include "flash_fwd_launch_template.h"
#include <cuda.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
// The driver's function by its entry point, so that nothing of the driver has to be linked.
extern "C" CUresult CUDAAPI cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dim, const cuuint64_t* strides,
    const cuuint32_t* box, const cuuint32_t* element, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    void* f = nullptr; cudaDriverEntryPointQueryResult found;
    CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
    auto* encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
    return encode(map, type, rank, address, dim, strides, box, element, interleave, swizzle, promotion, fill);
}
using Element = ELEMENT;
using Out = std::conditional_t<sizeof(Element) == 1, cutlass::half_t, Element>;
__global__ void fill(Element* x, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        float sum = 0;
        unsigned long long h = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
        for (int k = 0; k < 12; ++k) { h ^= h >> 31; h *= 0xBF58476D1CE4E5B9ull; h ^= h >> 27; sum += float(h >> 40) / 16777216.f; }
        x[i] = Element(sum - 6.f);
    }
}
void measure(int repeats, int b, int h, int n) {
    size_t const count = size_t(b) * h * n * HD;
    Element *q, *k, *v; Out* o; float* lse; int* semaphore;
    for (Element** p : {&q, &k, &v}) { CHECK_CUDA(cudaMalloc(p, count * sizeof(Element))); }
    CHECK_CUDA(cudaMalloc(&o, count * sizeof(Out)));
    CHECK_CUDA(cudaMalloc(&lse, size_t(b) * h * (n + 256) * 4)); CHECK_CUDA(cudaMalloc(&semaphore, 4096));
    fill<<<1024, 256>>>(q, count, 1); fill<<<1024, 256>>>(k, count, 2); fill<<<1024, 256>>>(v, count, 3);
    Flash_fwd_params p = {};
    p.q_ptr = q; p.k_ptr = k; p.v_ptr = v; p.o_ptr = o; p.softmax_lse_ptr = lse;
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.o_batch_stride = int64_t(n) * h * HD;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = h * HD;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = HD;
    p.h = p.h_k = h; p.h_h_k_ratio = 1; p.b = b; p.seqlen_q = p.seqlen_k = n; p.d = p.d_rounded = HD;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (n + 127) / 128 * 128; p.total_q = p.total_k = b * n;
    p.scale_softmax = 1.f / sqrtf(float(HD)); p.scale_softmax_log2 = p.scale_softmax * 1.4426950408889634f;
    p.is_causal = CAUSAL; p.tile_count_semaphore = semaphore;
    constexpr int NW = 4 + BM / 16;
#if FP8
    using Traits = Flash_fwd_kernel_traits_fp8<HD, BM, BN, NW, STAGES, false, CLUSTER, Element>;
#else
    using Traits = Flash_fwd_kernel_traits<HD, BM, BN, NW, STAGES, false, CLUSTER, Element>;
#endif
    auto launch = [&] {
        CHECK_CUDA(cudaMemsetAsync(semaphore, 0, 4096));
        run_flash_fwd<Traits, bool(CAUSAL), flash::FixedSeqLenTraits>(p, 0);
    };
    cudaEvent_t from, to; cudaEventCreate(&from); cudaEventCreate(&to);
    launch(); CHECK_CUDA(cudaDeviceSynchronize());
    cudaEventRecord(from);
    for (int i = 0; i < repeats; ++i) { launch(); }
    cudaEventRecord(to); CHECK_CUDA(cudaDeviceSynchronize());
    float ms = 0; cudaEventElapsedTime(&ms, from, to); ms /= repeats;
    // One row of the last head against a plain sum in double.
    std::vector<Element> hq(HD), hk(size_t(n) * h * HD), hv(hk.size()); std::vector<Out> ho(HD);
    size_t const base = size_t(b - 1) * n * h * HD, row = CAUSAL ? n - 1 : 0, at = base + row * h * HD + size_t(h - 1) * HD;
    CHECK_CUDA(cudaMemcpy(hq.data(), q + at, HD * sizeof(Element), cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(ho.data(), o + at, HD * sizeof(Out), cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(hk.data(), k + base, hk.size() * sizeof(Element), cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(hv.data(), v + base, hv.size() * sizeof(Element), cudaMemcpyDeviceToHost));
    std::vector<double> s(n), r(HD); double top = -1e30, sum = 0, wrong = 0, size = 0;
    for (int j = 0; j < n; ++j) {
        for (int d = 0; d < HD; ++d) { s[j] += double(float(hq[d])) * float(hk[(size_t(j) * h + h - 1) * HD + d]); }
        s[j] *= p.scale_softmax; top = std::max(top, s[j]);
    }
    for (int j = 0; j < n; ++j) {
        double const w = exp(s[j] - top);
        sum += w;
        for (int d = 0; d < HD; ++d) { r[d] += w * float(hv[(size_t(j) * h + h - 1) * HD + d]); }
    }
    for (int d = 0; d < HD; ++d) { double x = r[d] / sum; wrong += pow(x - float(ho[d]), 2); size += x * x; }
    double const flop = 4.0 * b * h * double(n) * n * HD / (CAUSAL ? 2 : 1);
    printf("D%d %dx%d stages=%d cluster=%d causal=%d fp8=%d single=%d B%d H%d N%d: %.4f ms %.1f TFLOP/s, relative error %.2g\n", HD, BM,
           BN, STAGES, CLUSTER, CAUSAL, FP8, SINGLE, b, h, n, ms, flop / ms * 1e-9, sqrt(wrong / size));
    for (void* x : {(void*)q, (void*)k, (void*)v, (void*)o, (void*)lse, (void*)semaphore}) { CHECK_CUDA(cudaFree(x)); }
}
int main(int argc, char** argv) {
    for (int i = 2; i + 2 < argc; i += 3) { measure(atoi(argv[1]), atoi(argv[i]), atoi(argv[i + 1]), atoi(argv[i + 2])); }
}
