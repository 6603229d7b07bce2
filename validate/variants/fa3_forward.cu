// FlashAttention-3 forward (hopper/), one variant a binary, without torch: HD head dimension, BM x BN tile, CLUSTER 1/2, CAUSAL 0/1;
// OVERLAP and PINGPONG 0/1 are read by the two patched headers (README). Usage: fa3 BATCH HEADS SEQLEN REPEATS
// [SECONDS]; prints the mean time, and with SECONDS the clock and power of a loop of that length (sustained.cuh).
#include "flash_fwd_launch_template.h"
#include <cstdio>
#include <cstdlib>
#include <vector>

#undef CHECK_CUDA
#include "sustained.cuh"

using Element = cutlass::bfloat16_t;

__global__ void fill(Element* x, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        float sum = 0;  // about normal, variance 1: the sum of twelve uniform numbers
        unsigned long long h = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
        for (int k = 0; k < 12; ++k) { h ^= h >> 31; h *= 0xBF58476D1CE4E5B9ull; h ^= h >> 27; sum += float(h >> 40) / 16777216.f; }
        x[i] = Element(sum - 6.f);
    }
}

int main(int argc, char** argv) {
    int const b = argc > 1 ? atoi(argv[1]) : 4, h = argc > 2 ? atoi(argv[2]) : 16, n = argc > 3 ? atoi(argv[3]) : 4096;
    int const repeats = argc > 4 ? atoi(argv[4]) : 20;
    size_t const count = size_t(b) * h * n * HD;
    Element *q, *k, *v, *o; float* lse; int* semaphore;
    for (Element** p : {&q, &k, &v, &o}) { CHECK_CUDA(cudaMalloc(p, count * sizeof(Element))); }
    CHECK_CUDA(cudaMalloc(&lse, size_t(b) * h * n * 4)); CHECK_CUDA(cudaMalloc(&semaphore, 4096));
    CHECK_CUDA(cudaMemset(semaphore, 0, 4096));
    fill<<<1024, 256>>>(q, count, 1); fill<<<1024, 256>>>(k, count, 2); fill<<<1024, 256>>>(v, count, 3);
    Flash_fwd_params p = {};
    p.q_ptr = q; p.k_ptr = k; p.v_ptr = v; p.o_ptr = o; p.softmax_lse_ptr = lse;
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.o_batch_stride = int64_t(n) * h * HD;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = h * HD;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = HD;
    p.v_dim_stride = 1;
    p.h = p.h_k = h; p.b = p.b_k = b; p.seqlen_q = p.seqlen_k = n; p.d = p.dv = HD; p.d_rounded = p.dv_rounded = HD;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (n + 127) / 128 * 128;
    p.total_q = p.total_k = b * n;
    p.scale_softmax = 1.f / sqrtf(float(HD));
    p.window_size_left = -1; p.window_size_right = CAUSAL ? 0 : -1; p.is_causal = CAUSAL; p.is_bf16 = true;
    p.num_splits = 1; p.tile_count_semaphore = semaphore; p.arch = 90;
    cudaDeviceProp prop; CHECK_CUDA(cudaGetDeviceProperties(&prop, 0)); p.num_sm = prop.multiProcessorCount;
    auto launch = [&] {
        CHECK_CUDA(cudaMemsetAsync(semaphore, 0, 4096));
        run_flash_fwd<90, HD, HD, CLUSTER, Element, Element, bool(CAUSAL), false, false, false, false, false, false, false, false, false>(p, 0);
    };
    cudaEvent_t from, to; cudaEventCreate(&from); cudaEventCreate(&to);
    launch(); CHECK_CUDA(cudaDeviceSynchronize());
    cudaEventRecord(from);
    for (int i = 0; i < repeats; ++i) { launch(); }
    cudaEventRecord(to); CHECK_CUDA(cudaDeviceSynchronize());
    float ms = 0; cudaEventElapsedTime(&ms, from, to); ms /= repeats;
    std::vector<Element> first(8); CHECK_CUDA(cudaMemcpy(first.data(), o, 16, cudaMemcpyDeviceToHost));
    double const flop = 4.0 * b * h * double(n) * n * HD / (CAUSAL ? 2 : 1);
    printf("D%d %dx%d overlap=%d pingpong=%d cluster=%d causal=%d B%d H%d N%d: %.4f ms %.1f TFLOP/s (O %g %g)\n", HD, BM, BN, OVERLAP,
           PINGPONG, CLUSTER, CAUSAL, b, h, n, ms, flop / ms * 1e-9, float(first[0]), float(first[1]));
    char name[64]; snprintf(name, sizeof name, "D%d n%d overlap=%d pingpong=%d causal=%d B%d H%d N%d", HD, BN, OVERLAP, PINGPONG, CAUSAL, b, h, n);
    if (argc > 5) { print_sustained(name, launch, ms, atof(argv[5])); }
}
