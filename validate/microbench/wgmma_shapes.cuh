// More wgmma shapes, in the form of wgmma_ptx.cuh: small N in bf16, e4m3 (m64nNk32), and B with N contiguous (a V tile as it
// lies in memory). Macros write the operand lists; FIRST.. are the operand numbers after the N / 2 accumulators.
#pragma once

#include "wgmma_ptx.cuh"

#define ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC8(i) ACC4(i), ACC4(i + 4)
#define ACC16(i) ACC8(i), ACC8(i + 8)
#define ACC32(i) ACC16(i), ACC16(i + 16)
#define ACC64(i) ACC32(i), ACC32(i + 32)

#define LIST4 "%0,%1,%2,%3"
#define LIST8 LIST4 ",%4,%5,%6,%7"
#define LIST16 LIST8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define LIST32 LIST16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LIST48 LIST32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define LIST64 LIST48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LIST96                                                                                                        \
    LIST64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89" \
           ",%90,%91,%92,%93,%94,%95"
#define LIST128                                                                                                   \
    LIST96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116" \
           ",%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#ifdef FLASHSIM_HAS_WGMMA
#define WGMMA_SS(SHAPE, LIST, FIRST, SECOND, SCALES, ...)                                                        \
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." SHAPE " {" LIST "}, " FIRST \
                 ", " SECOND ", p, " SCALES ";}"                                                                 \
                 : __VA_ARGS__                                                                                   \
                 : "l"(a), "l"(b))
#define WGMMA_RS(SHAPE, LIST, FIRST, SECOND, THIRD, FOURTH, FIFTH, SCALES, ...)                                    \
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned." SHAPE " {" LIST "}, {" FIRST  \
                 ", " SECOND ", " THIRD ", " FOURTH "}, " FIFTH ", p, " SCALES ";}"                                \
                 : __VA_ARGS__                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
#else
#define WGMMA_SS(...)
#define WGMMA_RS(...)
#endif

#define WGMMA_OP(OP, N, SHAPE, LIST, FIRST, SECOND, THIRD, FOURTH, FIFTH, SS_SCALES, RS_SCALES, ...)                    \
    template <>                                                                                                         \
    struct OP<N> {                                                                                                      \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64_t a, uint64_t b) {                          \
            WGMMA_SS(SHAPE, LIST, FIRST, SECOND, SS_SCALES, __VA_ARGS__);                                               \
        }                                                                                                               \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {              \
            WGMMA_RS(SHAPE, LIST, FIRST, SECOND, THIRD, FOURTH, FIFTH, RS_SCALES, __VA_ARGS__);                         \
        }                                                                                                               \
    };

#define BF16_OP(N, LIST, FIRST, SECOND, THIRD, FOURTH, FIFTH, ...)                                                    \
    WGMMA_OP(Wgmma, N, "m64n" #N "k16.f32.bf16.bf16", LIST, FIRST, SECOND, THIRD, FOURTH, FIFTH, "1, 1, 0, 0",        \
             "1, 1, 0", __VA_ARGS__)
BF16_OP(8, LIST4, "%4", "%5", "%6", "%7", "%8", ACC4(0))
BF16_OP(16, LIST8, "%8", "%9", "%10", "%11", "%12", ACC8(0))
BF16_OP(32, LIST16, "%16", "%17", "%18", "%19", "%20", ACC16(0))

template <int kN>
struct WgmmaFp8;
#define FP8_OP(N, LIST, FIRST, SECOND, THIRD, FOURTH, FIFTH, ...)                                                       \
    WGMMA_OP(WgmmaFp8, N, "m64n" #N "k32.f32.e4m3.e4m3", LIST, FIRST, SECOND, THIRD, FOURTH, FIFTH, "1, 1", "1, 1",     \
             __VA_ARGS__)
FP8_OP(64, LIST32, "%32", "%33", "%34", "%35", "%36", ACC32(0))
FP8_OP(128, LIST64, "%64", "%65", "%66", "%67", "%68", ACC64(0))
FP8_OP(192, LIST96, "%96", "%97", "%98", "%99", "%100", ACC64(0), ACC32(64))
FP8_OP(256, LIST128, "%128", "%129", "%130", "%131", "%132", ACC64(0), ACC64(64))

// B stored with N contiguous (descriptor: wgmma_descriptor_n_major).
template <int kN>
struct WgmmaNMajor;
WGMMA_OP(WgmmaNMajor, 128, "m64n128k16.f32.bf16.bf16", LIST64, "%64", "%65", "%66", "%67", "%68", "1, 1, 0, 1", "1, 1, 1",
         ACC64(0))

// Tiles of 64 columns (128 bytes, swizzled) by k rows, `tile_bytes` apart along N; groups of 8 rows 1,024 B apart.
__device__ __forceinline__ uint64_t wgmma_descriptor_n_major(uint32_t shared, uint32_t tile_bytes) {
    return uint64_t((shared & 0x3ffff) >> 4) | uint64_t(tile_bytes >> 4) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

#undef ACC4
#undef ACC8
#undef ACC16
#undef ACC32
#undef ACC64
#undef LIST4
#undef LIST8
#undef LIST16
#undef LIST32
#undef LIST48
#undef LIST64
#undef LIST96
#undef LIST128
#undef WGMMA_SS
#undef WGMMA_RS
#undef WGMMA_OP
#undef BF16_OP
#undef FP8_OP
