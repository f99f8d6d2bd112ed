// The formats in which KV caches keep keys and values: the type of the products, or fewer bits. One
// row is one head of one token.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace hr {

// The numbers of the formats, as in `FORMS` of kernels/kv_forms.py.
enum Kept { SAME_BITS = 0, KEPT_BF16 = 1, KEPT_E4M3 = 2, KEPT_E5M2 = 3, KEPT_INT8 = 4 };

// 8-bit floats with `MANTISSA` mantissa bits. Numbers larger than `MOST` become `MOST`.
struct e4m3 {
    uint8_t bits;
    static constexpr int MANTISSA = 3, BIAS = 7;
    static constexpr float MOST = 448.0f;
    static constexpr uint32_t FIRST_NAN = 0x7f;
};
struct e5m2 {
    uint8_t bits;
    static constexpr int MANTISSA = 2, BIAS = 15;
    static constexpr float MOST = 57344.0f;
    static constexpr uint32_t FIRST_NAN = 0x7d;
};

// One number of a row of 8-bit integers; the row's scale, a float, follows the row.
struct scaled_int8 {
    int8_t number;
};

typedef uint8_t v8 __attribute__((vector_size(W)));
typedef int8_t vs8 __attribute__((vector_size(W)));

template <class C>
inline int64_t row_elements(int64_t dim) {
    return dim + (std::is_same_v<C, scaled_int8> ? (int64_t)sizeof(float) : 0);
}

inline vf blend(vi mask, vf yes, vf no) { return mask ? yes : no; }

template <class F>
inline vf load_small(const F *p) {
    constexpr int SHIFT = 23 - F::MANTISSA;
    constexpr uint32_t NORMAL = (uint32_t)(127 - F::BIAS) << 23;
    const vu codes = (vu)widen(&p->bits);
    const vu size = codes & 0x7fu, spread = size << SHIFT;
    // Subnormal numbers have no leading one. They are read with the exponent of the smallest normal
    // numbers, whose leading one is subtracted.
    const float one = std::ldexp(1.0f, 1 - F::BIAS);
    const vf small = (vf)(spread + (NORMAL + (1u << 23))) - one;
    const vf normal = (vf)(spread + NORMAL);
    vf v = blend(size < (1u << F::MANTISSA), small, normal);
    v = blend(size >= F::FIRST_NAN, splat(NAN), v);
    return (vf)((vu)v | (codes & 0x80u) << 24);
}

// Converts to 8-bit floats. Rounds to nearest even; a NaN stays a NaN.
template <class F>
inline void store_small(F *p, vf v) {
    constexpr int SHIFT = 23 - F::MANTISSA;
    const vu sign = (vu)v >> 24 & 0x80u;
    vf size = (vf)((vu)v & 0x7fffffffu);
    const vi is_nan = v != v;
    size = blend(size > F::MOST, splat(F::MOST), size);
    const vu u = (vu)size;
    const vu normal = ((u + ((1u << (SHIFT - 1)) - 1) + (u >> SHIFT & 1u)) >> SHIFT) -
                      ((uint32_t)(127 - F::BIAS) << F::MANTISSA);
    // Subnormal numbers are multiples of the smallest number; adding 1.5 * 2^23 rounds to an
    // integer.
    const vf magic = splat(12582912.0f);
    const vf counted = size * std::ldexp(1.0f, F::BIAS - 1 + F::MANTISSA) + magic;
    const vu small = (vu)((vi)counted - (vi)magic);
    const vi is_small = size < std::ldexp(1.0f, 1 - F::BIAS);
    vu code = is_small ? small : normal;
    code = (is_nan ? vu{} + 0x7fu : code) | sign;
    const v8 bytes = __builtin_convertvector(code, v8);
    std::memcpy(p, &bytes, sizeof bytes);
}

inline vf load(const e4m3 *p) { return load_small(p); }
inline vf load(const e5m2 *p) { return load_small(p); }
inline void store(e4m3 *p, vf v) { store_small(p, v); }
inline void store(e5m2 *p, vf v) { store_small(p, v); }

// Converts a row of `n` numbers. `n` is a multiple of W, unless both types are the same.
template <class From, class To>
inline void convert(const From *from, To *to, int64_t n) {
    if constexpr (std::is_same_v<From, To>) {
        std::memcpy(to, from, n * sizeof(To));
    } else if constexpr (std::is_same_v<From, scaled_int8>) {
        float scale;
        std::memcpy(&scale, from + n, sizeof scale);
        for (int64_t i = 0; i < n; i += W) {
            const vf numbers = __builtin_convertvector(widen(&from[i].number), vf);
            store(to + i, numbers * scale);
        }
    } else if constexpr (std::is_same_v<To, scaled_int8>) {
        // A NaN or an infinity makes the scale a NaN, and thereby the whole row.
        vf most = {};
        vf whole = {};
        for (int64_t i = 0; i < n; i += W) {
            const vf v = load(from + i);
            most = max(most, (vf)((vu)v & 0x7fffffffu));
            whole += v * 0.0f;
        }
        const float top = max_of(most), scale = top / 127.0f + sum(whole);
        const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
        const vf magic = splat(12582912.0f);
        for (int64_t i = 0; i < n; i += W) {
            const vi numbers = (vi)(load(from + i) * inverse + magic) - (vi)magic;
            const vs8 bytes = __builtin_convertvector(numbers, vs8);
            std::memcpy(to + i, &bytes, sizeof bytes);
        }
        std::memcpy(to + n, &scale, sizeof scale);
    } else {
        for (int64_t i = 0; i < n; i += W) store(to + i, load(from + i));
    }
}

// Calls `f` with a null pointer whose type is that of the cache's numbers; `T` is the type of the
// products.
template <class T, class F>
inline void with_kept(int64_t kept, F f) {
    switch (kept) {
        case KEPT_BF16: return f((bf16 *)nullptr);
        case KEPT_E4M3: return f((e4m3 *)nullptr);
        case KEPT_E5M2: return f((e5m2 *)nullptr);
        case KEPT_INT8: return f((scaled_int8 *)nullptr);
        default: return f((T *)nullptr);
    }
}

}  // namespace hr
