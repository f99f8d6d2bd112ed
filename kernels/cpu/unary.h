// Activations that may be applied to the sums of a product before they are written.
#pragma once

#include "simd.h"

namespace hr {

struct Identity {
    static vf of(vf x) { return x; }
};

struct Gelu {
    static vf of(vf x) { return 0.5f * x * (1.0f + erf(x * 0.70710678118654752f)); }
};

// Calls f with the activation of this number, as in `_FUSED` of kernels/linear/cpu.py.
template <class F>
inline void with_unary(int64_t number, const F &f) {
    number == 1 ? f(Gelu{}) : f(Identity{});
}

}  // namespace hr
