// Streams through shared memory and the L2-to-SMEM path. Loads are pointer chases (the loaded word is the next
// address), so they need no consumer instruction and cannot be removed; 8 chains hide the latency.
#pragma once

#include "ptx.cuh"
#include "streams_alu.cuh"

namespace smem_map { // byte offsets in the dynamic shared memory of stream kernels
constexpr int kRows = 8; // table rows of 512 B, each pointing to the next
constexpr int kLds = 0;
constexpr int kLdsm = 4096;
constexpr int kLdsmTrans = 8192;
constexpr int kData = 12288; // 16 KiB of random bf16
constexpr int kScratch = kData + 16384;
constexpr int kScratchPerWarp = 4096;
constexpr int kBytes = kScratch + 16 * kScratchPerWarp;
} // namespace smem_map

// Fills the chase tables. An LDSM lane gets word (lane % 4) of row (lane / 4) of each matrix, so the first 128 B of a
// table row hold the 32 next addresses in lane order; transposed it gets the halves (2 (lane % 4), lane / 4) and one row below.
__device__ inline void fill_stream_tables(char* smem, const uint32_t* bf16x2) {
    using namespace smem_map;
    uint32_t base = shared_address(smem);
    auto word = [&](int byte) -> uint32_t& { return *reinterpret_cast<uint32_t*>(smem + byte); };
    for (int i = threadIdx.x; i < kBytes / 4; i += blockDim.x) word(4 * i) = bf16x2[i & 4095];
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * 32; i += blockDim.x) {
        int row = i / 32, lane = i % 32;
        int next = ((row + 1) % kRows) * 512 + 16 * lane;
        word(kLds + row * 512 + 16 * lane) = base + kLds + next;
        word(kLdsm + row * 512 + 4 * lane) = base + kLdsm + next;
        auto* half = reinterpret_cast<uint16_t*>(smem + kLdsmTrans + row * 512);
        half[(2 * (lane % 4)) * 8 + lane / 4] = static_cast<uint16_t>(base + kLdsmTrans + next);
        half[(2 * (lane % 4) + 1) * 8 + lane / 4] = 0;
    }
    __syncthreads();
}

struct Lds32Op {
    static constexpr int kTable = smem_map::kLds;
    static __device__ void load(uint32_t& address, uint32_t&) {
        asm volatile("ld.shared.b32 %0, [%0];" : "+r"(address));
    }
};
struct Lds128Op {
    static constexpr int kTable = smem_map::kLds;
    static __device__ void load(uint32_t& address, uint32_t& rest) {
        uint32_t r[3];
        asm volatile("ld.volatile.shared.v4.b32 {%0,%1,%2,%3}, [%0];" : "+r"(address), "=r"(r[0]), "=r"(r[1]), "=r"(r[2]));
        rest = r[2];
    }
};
struct LdsmOp {
    static constexpr int kTable = smem_map::kLdsm;
    static __device__ void load(uint32_t& address, uint32_t& rest) {
        uint32_t r[4];
        ldsm_x4(r, address);
        address = r[0];
        rest = r[3];
    }
};
struct LdsmTransOp {
    static constexpr int kTable = smem_map::kLdsmTrans;
    static __device__ void load(uint32_t& address, uint32_t& rest) {
        uint32_t r[4];
        ldsm_x4_trans(r, address);
        address = r[0];
        rest = r[3];
    }
};

template <class Op, int kChains, int kRounds>
struct Chase {
    static constexpr int kInst = kChains * kRounds;
    uint32_t address[kChains], rest[kChains];

    __device__ void init(const Context& c) {
        for (int i = 0; i < kChains; ++i) {
            address[i] = c.smem + Op::kTable + (i % smem_map::kRows) * 512 + 16 * c.lane;
            rest[i] = 0;
        }
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
#pragma unroll
            for (int i = 0; i < kChains; ++i) Op::load(address[i], rest[i]);
        }
    }
    __device__ float sink() {
        uint32_t s = 0;
        for (int i = 0; i < kChains; ++i) s += address[i] ^ rest[i];
        return __uint_as_float(s);
    }
};

struct Sts128 {
    static constexpr int kInst = 32;
    uint32_t address, v[4];

    __device__ void init(const Context& c) {
        address = c.smem + smem_map::kScratch + c.warp * smem_map::kScratchPerWarp + 16 * c.lane;
        for (int i = 0; i < 4; ++i) v[i] = c.bits(i);
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int i = 0; i < kInst; ++i)
            asm volatile("st.volatile.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address + (i % 8) * 512), "r"(v[0]),
                         "r"(v[1]), "r"(v[2]), "r"(v[3])
                         : "memory");
    }
    __device__ float sink() { return __uint_as_float(v[0]); }
};

// cp.async of 16 B per lane from 64 KiB that stay in L2; at most four groups of eight instructions in flight per warp.
struct Ldgsts {
    static constexpr int kInst = 8;
    uint32_t address;
    const char* source;

    __device__ void init(const Context& c) {
        address = c.smem + smem_map::kScratch + c.warp * smem_map::kScratchPerWarp + 16 * c.lane;
        source = c.l2_resident + c.warp * 4096 + 16 * c.lane;
    }
    __device__ __forceinline__ void step(int) {
#pragma unroll
        for (int i = 0; i < kInst; ++i) cp_async_16(address + i * 512, source + i * 512);
        cp_async_commit();
        cp_async_wait<3>();
    }
    __device__ float sink() {
        cp_async_wait<0>();
        return __uint_as_float(address);
    }
};
