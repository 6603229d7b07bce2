// The loop that every stream runs in, and how a stream keeps ptxas from reordering it. ptxas moves instructions freely within
// a basic block, `volatile` or not. So a stream whose order matters is cut into regions, and its loop can be entered before
// any of them: each entry ends a basic block. No entry but the first is ever taken, and the cuts cost no instruction.
// HMMA streams stay whole, since ptxas drains the tensor pipe (a NOP with a long stall) at each block's end.
#pragma once

#include <type_traits>

template <class Body, class = void>
struct HasRegions : std::false_type {};
template <class Body>
struct HasRegions<Body, std::void_t<decltype(Body::kRegions)>> : std::true_type {};

// `zero` is 0, which the compiler must not know.
template <class Body>
__device__ __forceinline__ void run_regions(Body& body, int steps, int zero) {
    static_assert(Body::kRegions <= 64, "more regions than the loop below has entries");
    int i = 0;
    switch (zero) {
    default:
        for (;;) {
#define REGION(n)                                                       \
    if constexpr (n < Body::kRegions) body.template region<n>();        \
    [[fallthrough]];                                                    \
    case n + 1:
            REGION(0) REGION(1) REGION(2) REGION(3) REGION(4) REGION(5) REGION(6) REGION(7)
            REGION(8) REGION(9) REGION(10) REGION(11) REGION(12) REGION(13) REGION(14) REGION(15)
            REGION(16) REGION(17) REGION(18) REGION(19) REGION(20) REGION(21) REGION(22) REGION(23)
            REGION(24) REGION(25) REGION(26) REGION(27) REGION(28) REGION(29) REGION(30) REGION(31)
            REGION(32) REGION(33) REGION(34) REGION(35) REGION(36) REGION(37) REGION(38) REGION(39)
            REGION(40) REGION(41) REGION(42) REGION(43) REGION(44) REGION(45) REGION(46) REGION(47)
            REGION(48) REGION(49) REGION(50) REGION(51) REGION(52) REGION(53) REGION(54) REGION(55)
            REGION(56) REGION(57) REGION(58) REGION(59) REGION(60) REGION(61) REGION(62) REGION(63)
#undef REGION
            if (++i >= steps) break;
        }
    }
}

template <class Body>
__device__ __forceinline__ void run_steps(Body& body, int steps, int zero) {
    if constexpr (HasRegions<Body>::value) {
        run_regions(body, steps, zero);
    } else {
#pragma unroll 1
        for (int i = 0; i < steps; ++i) body.step(i);
    }
}
