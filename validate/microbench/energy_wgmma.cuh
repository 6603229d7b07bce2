// Warpgroup products for `energy`: m64nNk16 bf16 or fp16 and m64nNk32 e4m3, A from shared memory or registers, chosen fills. Tile 1 of B is
// tile 0 negated, so that accumulators come back to where they were after each batch of eight, as a Q K^T begins anew each block.
#pragma once

#include "energy_streams.cuh"
#include "wgmma.cuh"
#include "wgmma_ptx.cuh"

template <int kFormat, int kN>
struct ProductOf { using Type = Wgmma<kN>; };
template <int kN>
struct ProductOf<kFp16, kN> { using Type = WgmmaFp16<kN>; };
template <int kN>
struct ProductOf<kE4m3, kN> { using Type = WgmmaFp8<kN>; };

struct EnergyPlan {
    int fill_a = kNormal, fill_b = kNormal;
    int mma_groups = 2, other_groups = 0;
    bool other_reads = false; // the other warpgroups read L2 instead of issuing FFMA
    int gap_ns = 0;           // sleep after each batch, whose products are then waited for
    int batches = 100;
};
constexpr int kEnergyBatch = 8;
constexpr uint32_t kEnergyL2 = (16u << 20) / 16; // 16-byte words read from L2

template <int kN, bool kRs, bool kSleep, class Product>
__device__ __forceinline__ void energy_products(const EnergyPlan& plan, uint32_t smem, const uint32_t* words, float* sink) {
    float d[kN / 2] = {};
    uint32_t a_regs[4][4];
    for (int i = 0; i < 16; ++i) a_regs[i / 4][i % 4] = words[(i * 97 + threadIdx.x * 3) & (kDataCount - 1)];
    uint64_t a = wgmma_descriptor(smem), b = wgmma_descriptor(smem + wgmma_smem::kB);
#pragma unroll 1
    for (int batch = 0; batch < plan.batches; ++batch) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kEnergyBatch; ++i) {
            int tile = i / 4, k = i % 4;
            uint64_t b_k = b + tile * (kN * 128 / 16) + k * 2;
            if constexpr (kRs)
                Product::rs(d, a_regs[k], b_k);
            else
                Product::ss(d, a + tile * (wgmma_smem::kATile / 16) + k * 2, b_k);
        }
        wgmma_commit();
        wgmma_wait<kSleep ? 0 : 1>();
        if constexpr (kSleep) __nanosleep(plan.gap_ns);
    }
    wgmma_wait<0>();
    float sum = 0;
    for (float& v : d) {
        asm volatile("" : "+f"(v)); // nothing else keeps this read behind the wait, and a read before it serializes the products
        sum += v;
    }
    if (sum == 1.2345e33f) *sink = sum;
}

// `counts`: for each warp, the products or FFMA that it issued.
template <int kN, bool kRs, int kFormat, bool kSleep>
__global__ void __launch_bounds__(384, 1)
    energy_wgmma(EnergyPlan plan, EnergyInputs in, const uint4* l2, const uint32_t* a_words, const uint32_t* b_words, WarpTime* times, int* counts, float* sink) {
    extern __shared__ __align__(1024) char smem[];
    __shared__ int running;
    if (threadIdx.x == 0) running = plan.mma_groups * 4;
    auto* words = reinterpret_cast<uint32_t*>(smem);
    uint32_t sign = kFormat == kE4m3 ? 0x80808080u : 0x80008000u;
    constexpr int kBWords = kN * 128 / 4, kAWords = wgmma_smem::kB / 4;
    for (int i = threadIdx.x; i < kAWords + 2 * kBWords; i += blockDim.x) {
        if (i < kAWords) words[i] = a_words[(i % (kAWords / 2) * 7) & (kDataCount - 1)];
        if (i >= kAWords) {
            uint32_t word = b_words[((i - kAWords) % kBWords * 5) & (kDataCount - 1)];
            words[i] = i < kAWords + kBWords || !word ? word : word ^ sign;
        }
    }
    wgmma_proxy_fence();
    __syncthreads();
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, count = 0;
    WarpTime time{read_clock(), 0, read_globaltimer(), 0};
    if (warp / 4 < plan.mma_groups) {
        energy_products<kN, kRs, kSleep, typename ProductOf<kFormat, kN>::Type>(plan, shared_address(smem), a_words, sink);
        count = plan.batches * kEnergyBatch;
        if (threadIdx.x % 32 == 0) atomicSub(&running, 1);
    } else if (plan.other_reads) {
        uint32_t sum = 0, at = (blockIdx.x * 37 + warp) * 4096 + threadIdx.x % 32;
        while (*const_cast<volatile int*>(&running) > 0) {
            uint4 v[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = load_cg(l2 + (at + i * 32) % kEnergyL2);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
            at = (at + 256) % kEnergyL2;
            count += 8;
        }
        if (sum == 0x12345678u) *sink = 1;
    } else {
        EnergyState s;
        for (int i = 0; i < kOperands; ++i) s.x[i] = in.normal[(i * 97 + threadIdx.x) & (kDataCount - 1)];
        for (int i = 0; i < kResults; ++i) s.y[i] = in.normal[(i * 61 + threadIdx.x * 3) & (kDataCount - 1)];
        while (*const_cast<volatile int*>(&running) > 0) {
            FfmaEnergy::step(s);
            FfmaEnergy::step(s);
            count += 2 * FfmaEnergy::kInst;
        }
        float sum = 0;
        for (float y : s.y) sum += y;
        if (sum == 1.2345e33f) *sink = sum;
    }
    time.clock_end = read_clock();
    time.ns_end = read_globaltimer();
    if (threadIdx.x % 32 == 0) {
        times[blockIdx.x * warps + warp] = time;
        counts[blockIdx.x * warps + warp] = count;
    }
}
