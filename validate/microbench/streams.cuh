// The list of streams: id, CSV name, expected cycles per instruction (sizes the chunks only), type.
#pragma once

#include "streams_attention.cuh"

// Steps per chunk: at least 8,000 cycles for a warp that runs alone and at least 2,000 instructions, so that the poll of
// some 40 cycles that follows a chunk once a warp's own timed part is over takes under half a percent of a partner's time.
template <class Body>
__host__ __device__ constexpr int inner_steps(double cycles, double min_cycles = 8000, int min_inst = 2000) {
    int by_cycles = static_cast<int>(min_cycles / (cycles * Body::kInst)) + 1;
    int by_inst = (min_inst + Body::kInst - 1) / Body::kInst;
    return by_cycles > by_inst ? by_cycles : by_inst;
}

// Throughput streams, measured by `issue`. A loop's end costs a lone warp some 25 cycles, so a step takes about a thousand.
#define THROUGHPUT_STREAMS(X)                                               \
    X(kFfma, "ffma", 1.2, Chains<FfmaOp, 16, 32>)                           \
    X(kFmul, "fmul", 1.2, Chains<FmulOp, 16, 32>)                           \
    X(kFadd, "fadd", 1.2, Chains<FaddOp, 16, 32>)                           \
    X(kFmnmx, "fmnmx", 2.3, Chains<FmnmxOp, 16, 32>)                        \
    X(kEx2, "ex2", 8.0, Chains<Ex2Op, 16, 8>)                               \
    X(kF2fp, "f2fp", 2.1, Chains<F2fpOp, 16, 32>)                           \
    X(kShfl, "shfl", 4.0, Chains<ShflOp, 16, 16>)                           \
    X(kImad, "imad", 2.0, Chains<ImadOp, 16, 32>)                           \
    X(kIadd3, "iadd3", 2.0, Chains<Iadd3Op, 16, 32>)                        \
    X(kLop3, "lop3", 2.0, Chains<Lop3Op, 16, 32>)                           \
    X(kMov, "mov", 2.0, MovRotate)                                          \
    X(kFsel, "fsel", 2.0, Chains<FselOp, 16, 32>)                           \
    X(kSel, "sel", 2.0, Chains<SelOp, 16, 32>)                              \
    X(kIsetpSel, "isetp_sel", 2.0, Chains<IsetpSelOp, 16, 16, 2>)           \
    X(kIsetp, "isetp", 2.0, Isetp)                                          \
    X(kLds128, "lds128", 16.0, Chase<Lds128Op, 8, 8>)                       \
    X(kSts128, "sts128", 16.0, Sts128)                                      \
    X(kLdsm, "ldsm_x4", 16.0, Chase<LdsmOp, 8, 8>)                          \
    X(kLdsmTrans, "ldsm_x4_trans", 16.0, Chase<LdsmTransOp, 8, 8>)          \
    X(kLdgsts, "ldgsts", 40.0, Ldgsts)                                      \
    X(kHmma8, "hmma", 6.5, Hmma<8, 32>)                                     \
    X(kHmmaLdsm, "hmma_ldsm", 7.0, HmmaLdsm)                                \
    X(kSoftmaxMix, "softmax_mix", 12.0, SoftmaxMix)                         \
    X(kMixInterleaved, "mix_interleaved", 12.0, MixInterleaved)             \
    X(kEx2Ffma, "ex2_ffma", 4.0, Alternate<Ex2Op, FfmaOp, 64, 1>)           \
    X(kFfmaFmnmx, "ffma_fmnmx", 1.5, Alternate<FfmaOp, FmnmxOp, 8, 32>)     \
    X(kHmmaFfma1, "hmma_ffma1", 7.0, HmmaWith<FfmaOnOperand, 1>)            \
    X(kHmmaFfma2, "hmma_ffma2", 8.0, HmmaWith<FfmaOnOperand, 2>)            \
    X(kHmmaFfma4, "hmma_ffma4", 9.0, HmmaWith<FfmaOnOperand, 4>)            \
    X(kHmmaIadd1, "hmma_iadd1", 8.0, HmmaWith<IaddOnOperand, 1>)            \
    X(kHmmaIadd2, "hmma_iadd2", 10.0, HmmaWith<IaddOnOperand, 2>)           \
    X(kHmmaIadd4, "hmma_iadd4", 14.0, HmmaWith<IaddOnOperand, 4>)           \
    X(kRescaleMix, "rescale_mix", 1.5, RescaleMix)                          \
    X(kSpin, "spin", 4.0, Spin)

// HMMA by number of independent accumulator chains (8 is in the list above).
#define HMMA_CHAIN_STREAMS(X)                                               \
    X(kHmma1, "hmma", 24.8, Hmma<1, 64>)                                    \
    X(kHmma2, "hmma", 12.4, Hmma<2, 64>)                                    \
    X(kHmma4, "hmma", 6.5, Hmma<4, 64>)                                     \
    X(kHmma16, "hmma", 6.5, Hmma<16, 16>)

// One dependent chain each, measured by `latency`.
#define LATENCY_STREAMS(X)                                                  \
    X(kFfmaLat, "ffma", 4.0, Chains<FfmaOp, 1, 256>)                        \
    X(kFmulLat, "fmul", 4.0, Chains<FmulOp, 1, 256>)                        \
    X(kFaddLat, "fadd", 4.0, Chains<FaddOp, 1, 256>)                        \
    X(kFmnmxLat, "fmnmx", 5.0, Chains<FmnmxChainOp, 1, 128, 2>)             \
    X(kEx2Lat, "ex2", 20.0, Chains<Ex2Op, 1, 64>)                           \
    X(kF2fpLat, "f2fp", 5.0, Chains<F2fpOp, 1, 256>)                        \
    X(kShflLat, "shfl", 23.0, Chains<ShflOp, 1, 64>)                        \
    X(kImadLat, "imad", 4.0, Chains<ImadOp, 1, 256>)                        \
    X(kIadd3Lat, "iadd3", 4.0, Chains<Iadd3Op, 2, 128>)                     \
    X(kLop3Lat, "lop3", 4.0, Chains<Lop3Op, 2, 128>)                        \
    X(kLds32Lat, "lds32", 23.0, Chase<Lds32Op, 1, 64>)                      \
    X(kLds128Lat, "lds128", 30.0, Chase<Lds128Op, 1, 64>)                   \
    X(kLdsmLat, "ldsm_x4", 33.0, Chase<LdsmOp, 1, 64>)                      \
    X(kLdsmTransLat, "ldsm_x4_trans", 33.0, Chase<LdsmTransOp, 1, 64>)

#define ALL_STREAMS(X) THROUGHPUT_STREAMS(X) HMMA_CHAIN_STREAMS(X) LATENCY_STREAMS(X)

enum StreamId {
#define STREAM_ID(id, ...) id,
    ALL_STREAMS(STREAM_ID)
#undef STREAM_ID
        kStreamCount
};

// The stream's type by its id, for kernels made for particular streams.
template <int kId>
struct StreamOf;
#define STREAM_OF(id, name, cycles, ...)                                    \
    template <>                                      \
    struct StreamOf<id> {                            \
        using Type = __VA_ARGS__;                    \
        static constexpr double kCycles = cycles;    \
    };
ALL_STREAMS(STREAM_OF)
#undef STREAM_OF
