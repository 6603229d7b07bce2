// wgmma m64nN with fp32 accumulators: Wgmma<N> of bf16 and WgmmaFp16<N> of fp16 (k16), WgmmaFp8<N> of e4m3 (k32), WgmmaNMajor<N> of bf16 with B the other
// way; each with A from shared memory (ss) or from registers (rs). Operand lists are written out, because inline assembly has no
// loops. Empty bodies where the target has no wgmma.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FLASHSIM_HAS_WGMMA 1
#define WGMMA_ASM(...) asm volatile(__VA_ARGS__)
#else
#define WGMMA_ASM(...)
#endif

// Names of the first C accumulators, and their constraints: those of the list before, and more.
#define C4 "%0,%1,%2,%3"
#define C8 C4 "," "%4,%5,%6,%7"
#define C16 C8 "," "%8,%9,%10,%11,%12,%13,%14,%15"
#define C32 C16 "," "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define C40 C32 "," "%32,%33,%34,%35,%36,%37,%38,%39"
#define C64 C40 "," "%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define C88 C64 "," "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
#define C96 C88 "," "%88,%89,%90,%91,%92,%93,%94,%95"
#define C128 C96 ","                                                                                                  \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"\
    "%120,%121,%122,%123,%124,%125,%126,%127"
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R8(i) R4(i), R4(i + 4)
#define ALL4 R4(0)
#define ALL8 ALL4, R4(4)
#define ALL16 ALL8, R8(8)
#define ALL32 ALL16, R8(16), R8(24)
#define ALL40 ALL32, R8(32)
#define ALL64 ALL40, R8(40), R8(48), R8(56)
#define ALL88 ALL64, R8(64), R8(72), R8(80)
#define ALL96 ALL88, R8(88)
#define ALL128 ALL96, R8(96), R8(104), R8(112), R8(120)

// HALF (N / 2) accumulators; A is operand HALF and B the next, or A is HALF to A3 and B is B4. p: add to them; 1, 1: signs.
#define WGMMA(NAME, N, HALF, A1, A2, A3, B4, FORMAT, MAJOR_SS, MAJOR_RS)                                              \
    template <>                                                                                                       \
    struct NAME<N> {                                                                                                  \
        static __device__ __forceinline__ void ss(float (&d)[HALF], uint64_t a, uint64_t b) {                         \
            WGMMA_ASM("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n" #N FORMAT " {" C##HALF  \
                      "}, %" #HALF ", %" #A1 ", p, 1, 1" MAJOR_SS ";}"                                                \
                      : ALL##HALF                                                                                     \
                      : "l"(a), "l"(b));                                                                              \
        }                                                                                                             \
        static __device__ __forceinline__ void rs(float (&d)[HALF], const uint32_t (&a)[4], uint64_t b) {             \
            WGMMA_ASM("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n" #N FORMAT " {" C##HALF  \
                      "}, {%" #HALF ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B4 ", p, 1, 1" MAJOR_RS ";}"                   \
                      : ALL##HALF                                                                                     \
                      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                          \
        }                                                                                                             \
    };
#define WGMMA_BF16(N, HALF, A1, A2, A3, B4) WGMMA(Wgmma, N, HALF, A1, A2, A3, B4, "k16.f32.bf16.bf16", ", 0, 0", ", 0")
#define WGMMA_FP16(N, HALF, A1, A2, A3, B4) WGMMA(WgmmaFp16, N, HALF, A1, A2, A3, B4, "k16.f32.f16.f16", ", 0, 0", ", 0")
#define WGMMA_FP8(N, HALF, A1, A2, A3, B4) WGMMA(WgmmaFp8, N, HALF, A1, A2, A3, B4, "k32.f32.e4m3.e4m3", "", "")

template <int kN>
struct Wgmma;
template <int kN>
struct WgmmaFp16;
template <int kN>
struct WgmmaFp8;
// B stored with N contiguous, as a V tile lies in memory (descriptor: wgmma_descriptor_n_major).
template <int kN>
struct WgmmaNMajor;

WGMMA_BF16(8, 4, 5, 6, 7, 8)
WGMMA_BF16(16, 8, 9, 10, 11, 12)
WGMMA_BF16(32, 16, 17, 18, 19, 20)
WGMMA_BF16(64, 32, 33, 34, 35, 36)
WGMMA_BF16(80, 40, 41, 42, 43, 44)
WGMMA_BF16(128, 64, 65, 66, 67, 68)
WGMMA_BF16(176, 88, 89, 90, 91, 92)
WGMMA_BF16(192, 96, 97, 98, 99, 100)
WGMMA_BF16(256, 128, 129, 130, 131, 132)
WGMMA_FP16(64, 32, 33, 34, 35, 36)
WGMMA_FP16(80, 40, 41, 42, 43, 44)
WGMMA_FP16(128, 64, 65, 66, 67, 68)
WGMMA_FP16(176, 88, 89, 90, 91, 92)
WGMMA_FP16(256, 128, 129, 130, 131, 132)
WGMMA_FP8(64, 32, 33, 34, 35, 36)
WGMMA_FP8(128, 64, 65, 66, 67, 68)
WGMMA_FP8(192, 96, 97, 98, 99, 100)
WGMMA_FP8(256, 128, 129, 130, 131, 132)
WGMMA(WgmmaNMajor, 128, 64, 65, 66, 67, 68, "k16.f32.bf16.bf16", ", 0, 1", ", 1")

#undef WGMMA
#undef WGMMA_BF16
#undef WGMMA_FP8
#undef WGMMA_ASM
#undef R4
#undef R8
#undef C4
#undef C8
#undef C16
#undef C32
#undef C40
#undef C64
#undef C88
#undef C96
#undef C128
#undef ALL4
#undef ALL8
#undef ALL16
#undef ALL32
#undef ALL40
#undef ALL64
#undef ALL88
#undef ALL96
#undef ALL128

// wgmma reads shared memory through the async proxy; ordinary stores must be made visible to it first.
__device__ __forceinline__ void wgmma_proxy_fence() {
#ifdef FLASHSIM_HAS_WGMMA
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_fence() {
#ifdef FLASHSIM_HAS_WGMMA
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wgmma_commit() {
#ifdef FLASHSIM_HAS_WGMMA
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
#ifdef FLASHSIM_HAS_WGMMA
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// Shared-memory matrix descriptor of a K-major tile with 128-byte swizzle: rows of 128 B, groups of 8 rows 1,024 B apart.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared) {
    return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// The same of tiles of 64 columns (128 bytes, swizzled) by k rows, `tile_bytes` apart along N; groups of 8 rows 1,024 B apart.
__device__ __forceinline__ uint64_t wgmma_descriptor_n_major(uint32_t shared, uint32_t tile_bytes) {
    return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(tile_bytes >> 4) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}
