// Streams that attention is made of: HMMA, HMMA fed by LDSM, the rescale of the output accumulator.
#pragma once

#include "streams_alu.cuh"
#include "streams_memory.cuh"
#include "streams_mix.cuh"

// Two A fragments and four B fragments take turns, so that operands toggle from one instruction to the next.
template <int kChains, int kRounds>
struct Hmma {
    static constexpr int kInst = kChains * kRounds;
    float c[kChains][4];
    uint32_t a[2][4], b[4][2];

    __device__ void init(const Context& ctx) {
        for (int i = 0; i < kChains; ++i)
            for (int j = 0; j < 4; ++j) c[i][j] = 0;
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = ctx.bits(i);
        for (int i = 0; i < 8; ++i) b[i / 2][i % 2] = ctx.bits(8 + i);
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int n = 0; n < kInst; ++n) hmma(c[n % kChains], a[(n / 4) % 2], b[n % 4][0], b[n % 4][1]);
    }
    __device__ float sink() {
        float s = 0;
        for (int i = 0; i < kChains; ++i) s += c[i][0] + c[i][1] + c[i][2] + c[i][3];
        return s;
    }
};

// One LDSM.x4 (two B fragments) per three HMMA, loaded three groups ahead; sixteen accumulators. kInst counts HMMA.
struct HmmaLdsm {
    static constexpr int kChains = 16, kGroups = 32, kDepth = 4;
    static constexpr int kInst = 3 * kGroups;
    float c[kChains][4];
    uint32_t a[2][4], b[kDepth][4], address;

    __device__ void init(const Context& ctx) {
        address = ctx.smem + smem_map::kData + 16 * ctx.lane;
        for (int i = 0; i < kChains; ++i)
            for (int j = 0; j < 4; ++j) c[i][j] = 0;
        for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = ctx.bits(i);
        for (int i = 0; i < kDepth; ++i) ldsm_x4(b[i], address + i * 512);
    }
    __device__ __forceinline__ void step(int iteration) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            // A moving address: the loads may not leave the loop, nor the second half of it repeat the first.
            ldsm_x4(b[(g + 3) % kDepth], address + ((iteration + g / 16) & 1) * 8192 + (g % 16) * 512);
            uint32_t(&f)[4] = b[g % kDepth];
            hmma(c[(3 * g) % kChains], a[g % 2], f[0], f[1]);
            hmma(c[(3 * g + 1) % kChains], a[g % 2], f[2], f[3]);
            hmma(c[(3 * g + 2) % kChains], a[(g + 1) % 2], f[0], f[1]);
        }
    }
    __device__ float sink() {
        float s = 0;
        for (int i = 0; i < kChains; ++i) s += c[i][0] + c[i][1] + c[i][2] + c[i][3];
        return s;
    }
};

// Rescale of an output accumulator: per row of 32 registers a new maximum, its exponential, 32 FMUL. kInst counts FMUL.
struct RescaleMix {
    static constexpr int kRows = 2, kColumns = 32;
    static constexpr int kInst = kRows * kColumns;
    float o[kRows][kColumns], row_max[kRows], scale;

    __device__ void init(const Context& c) {
        for (int i = 0; i < kInst; ++i) o[i / kColumns][i % kColumns] = c.bounded(i);
        for (int r = 0; r < kRows; ++r) row_max[r] = c.bounded(kInst + r);
        scale = c.bounded(kInst + kRows);
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float before = row_max[r];
            row_max[r] = fmaxf(before, o[r][0]);
            float alpha = ex2((before - row_max[r]) * scale);
#pragma unroll
            for (int i = 0; i < kColumns; ++i) o[r][i] *= alpha;
        }
    }
    __device__ float sink() {
        float s = row_max[0] + row_max[1];
        for (int i = 0; i < kInst; ++i) s += o[i / kColumns][i % kColumns];
        return s;
    }
};
