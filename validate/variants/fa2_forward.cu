// FlashAttention-2 forward (csrc/flash_attn), one tile a binary, without torch: HD head dimension, BM x BN tile, NW warps; fp16, no
// dropout, lengths that the tile divides. Usage: fa2 BATCH HEADS SEQLEN REPEATS; prints the mean time of a launch and the occupancy.
#include "namespace_config.h"
#include "flash.h"
#include "flash_fwd_kernel.h"
#include <cstdio>
#include <cstdlib>
#include <cmath>
namespace FLASH_NAMESPACE {
template <typename T, bool kEven>
__global__ void fwd(const __grid_constant__ Flash_fwd_params params) {
    compute_attn<T, false, false, false, false, kEven, true, false, false>(params);
}
}
using namespace FLASH_NAMESPACE;
using T = Flash_fwd_kernel_traits<HD, BM, BN, NW, false, false, cutlass::half_t>;
#define CHECK_CUDA(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("error %s line %d\n", cudaGetErrorString(e), __LINE__); exit(1); } } while (0)
__global__ void fill(cutlass::half_t* x, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
        float sum = 0;
        unsigned long long h = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
        for (int k = 0; k < 12; ++k) { h ^= h >> 31; h *= 0xBF58476D1CE4E5B9ull; h ^= h >> 27; sum += float(h >> 40) / 16777216.f; }
        x[i] = cutlass::half_t(sum - 6.f);
    }
}
int main(int argc, char** argv) {
    int b = atoi(argv[1]), h = atoi(argv[2]), n = atoi(argv[3]), repeats = atoi(argv[4]);
    size_t count = size_t(b) * h * n * HD;
    cutlass::half_t *q, *k, *v, *o; float* lse;
    for (auto p : {&q, &k, &v, &o}) CHECK_CUDA(cudaMalloc(p, count * 2));
    CHECK_CUDA(cudaMalloc(&lse, size_t(b) * h * n * 4));
    fill<<<1024, 256>>>(q, count, 1); fill<<<1024, 256>>>(k, count, 2); fill<<<1024, 256>>>(v, count, 3);
    Flash_fwd_params p = {};
    p.q_ptr = q; p.k_ptr = k; p.v_ptr = v; p.o_ptr = o; p.softmax_lse_ptr = lse;
    p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.o_batch_stride = int64_t(n) * h * HD;
    p.q_row_stride = p.k_row_stride = p.v_row_stride = p.o_row_stride = h * HD;
    p.q_head_stride = p.k_head_stride = p.v_head_stride = p.o_head_stride = HD;
    p.h = p.h_k = h; p.h_h_k_ratio = 1; p.b = b; p.seqlen_q = p.seqlen_k = n; p.d = p.d_rounded = HD;
    p.seqlen_q_rounded = p.seqlen_k_rounded = (n + 127) / 128 * 128;
    p.scale_softmax = 1.f / sqrtf(float(HD)); p.scale_softmax_log2 = p.scale_softmax * 1.4426950408889634f;
    p.p_dropout = 1.f; p.p_dropout_in_uint8_t = 255; p.rp_dropout = 1.f; p.window_size_left = p.window_size_right = -1;
    p.num_splits = 1;
    bool even = n % BM == 0 && n % BN == 0;
    if (!even) { printf("uneven\n"); return 1; }
    auto kernel = fwd<T, true>;
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSmemSize));
    int ctas; CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, T::kNThreads, T::kSmemSize));
    cudaFuncAttributes a; CHECK_CUDA(cudaFuncGetAttributes(&a, kernel));
    auto launch = [&] { kernel<<<dim3((n + BM - 1) / BM, b, h), T::kNThreads, T::kSmemSize>>>(p); };
    launch(); CHECK_CUDA(cudaDeviceSynchronize());
    cudaEvent_t s, e; cudaEventCreate(&s); cudaEventCreate(&e);
    cudaEventRecord(s); for (int i = 0; i < repeats; ++i) launch(); cudaEventRecord(e); CHECK_CUDA(cudaDeviceSynchronize());
    float ms; cudaEventElapsedTime(&ms, s, e); ms /= repeats;
    printf("FA2 D%d %dx%d %dw B%d H%d N%d: %.4f ms %.1f TFLOP/s ctas/SM %d regs %d local %zu smem %d\n", HD, BM, BN, NW, b, h, n, ms,
           4.0 * b * h * double(n) * n * HD / ms * 1e-9, ctas, a.numRegs, a.localSizeBytes, (int)T::kSmemSize);
}
