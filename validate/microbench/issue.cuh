// Groups `issue` and `pair`: what one warp instruction costs a sub-partition, alone and beside another stream.
#pragma once

#include "harness.cuh"

inline void measure_issue(const Device&) {
    StreamInputs inputs;
    for (int id = 0; id < kFfmaLat; ++id) {
        std::string chains = id == kHmma1 ? "1" : id == kHmma2 ? "2" : id == kHmma4 ? "4" : id == kHmma16 ? "16" : "";
        if (id == kHmma8) chains = "8";
        bool is_mix = id == kSoftmaxMix;
        for (int warps = 1; warps <= 4; ++warps) {
            Roles roles;
            roles.add(id, warps);
            print_row("issue", stream_info(id).name, warps, chains, cycles_per_inst(roles, inputs)[warps],
                      is_mix ? "cycles_per_element" : "cycles_per_inst");
        }
    }
}

inline const std::vector<int>& pair_streams() {
    static const std::vector<int> ids = {kHmma8, kHmmaLdsm, kFfma, kFmul,  kFadd,   kFmnmx, kEx2,
                                         kF2fp,  kShfl,     kIadd3, kLds128, kLdsm, kSoftmaxMix};
    return ids;
}

inline const char* pair_unit(int id) { return id == kSoftmaxMix ? "cycles_per_element" : "cycles_per_inst"; }

inline void measure_pair(const Device&) {
    StreamInputs inputs;
    const auto& ids = pair_streams();
    for (size_t i = 0; i < ids.size(); ++i) {
        for (size_t j = i; j < ids.size(); ++j) {
            Roles roles;
            roles.add(ids[i]).add(ids[j]);
            auto cycles = cycles_per_inst(roles, inputs);
            std::string a = stream_info(ids[i]).name, b = stream_info(ids[j]).name;
            print_row("pair", a + "|" + b, 1, "", cycles[0], pair_unit(ids[i]));
            if (i != j) print_row("pair", b + "|" + a, 1, "", cycles[1], pair_unit(ids[j]));
        }
    }
    for (int a : {int(kHmma8), int(kSoftmaxMix)}) { // two warps of B per SMSP; B's row is for its two warps together
        for (int b : ids) {
            Roles roles;
            roles.add(a).add(b, 2);
            auto cycles = cycles_per_inst(roles, inputs);
            std::vector<double> both;
            for (size_t k = 0; k < cycles[1].size(); ++k) both.push_back(1 / (1 / cycles[1][k] + 1 / cycles[2][k]));
            std::string name_a = stream_info(a).name, name_b = stream_info(b).name;
            print_row("pair", name_a + "|" + name_b, 2, "a_beside_2b", cycles[0], pair_unit(a));
            print_row("pair", name_b + "|" + name_a, 2, "2b_beside_a", both, pair_unit(b));
        }
    }
}
