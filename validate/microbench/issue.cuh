// Group `issue`: what one warp instruction costs a sub-partition, with one to four warps of the same stream on each.
#pragma once

#include "harness.cuh"

// What kInst of a stream counts, where that is not simply its instructions.
inline const char* stream_unit(int id) {
    switch (id) {
    case kSoftmaxMix:
    case kMixInterleaved:
        return "cycles_per_element";
    case kHmmaLdsm:
    case kHmmaFfma1:
    case kHmmaFfma2:
    case kHmmaFfma4:
    case kHmmaIadd1:
    case kHmmaIadd2:
    case kHmmaIadd4:
        return "cycles_per_hmma";
    case kRescaleMix:
        return "cycles_per_fmul";
    default:
        return "cycles_per_inst";
    }
}

// Machine instructions behind one of what kInst counts.
inline double inst_per_count(int id) {
    switch (id) {
    case kSoftmaxMix:
    case kMixInterleaved:
        return MixState::kInstPerElement;
    case kHmmaLdsm:
        return 4.0 / 3;
    default:
        return 1;
    }
}

// The number of independent accumulators of the plain HMMA streams, empty for the others.
inline std::string hmma_chains(int id) {
    switch (id) {
    case kHmma1: return "1";
    case kHmma2: return "2";
    case kHmma4: return "4";
    case kHmma8: return "8";
    case kHmma16: return "16";
    default: return "";
    }
}

inline void measure_issue(const Device&) {
    StreamInputs inputs;
    for (int id = 0; id < kFfmaLat; ++id) {
        for (int warps = 1; warps <= 4; ++warps) {
            Roles roles;
            roles.add(id, warps);
            print_row("issue", stream_info(id).name, warps, hmma_chains(id), cycles_per_inst(roles, inputs)[warps],
                      stream_unit(id));
        }
    }
}
