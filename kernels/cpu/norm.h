// The last step of an RMS norm: a row is multiplied with its factor and with the norm's weight.
#pragma once

#include "simd.h"

namespace hr {

// An ordinary weight multiplies the row after rounding to T, as in transformers. With a
// zero-centered weight the row is multiplied with 1 + weight, and the result is rounded once. `to`
// may be `from`.
template <bool ZERO_CENTERED, class T>
inline void scale_row(const T *from, T *to, const T *weight, float factor, int64_t n) {
    auto scaled = [&](auto v, auto w) {
        return ZERO_CENTERED ? v * factor * (1.0f + w) : rounded_as(v * factor, from) * w;
    };
    int64_t i = 0;
    for (; i + W <= n; i += W) store(to + i, scaled(load(from + i), load(weight + i)));
    for (; i < n; i++) from_float(scaled(to_float(from[i]), to_float(weight[i])), to + i);
}

}  // namespace hr
