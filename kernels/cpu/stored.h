// Quantized weights that are stored in blocks: the forms, and the layout of their bytes in panels.
//
// A panel has COLUMNS output columns (rows of the stored matrix). The quants (the small integers)
// come first, one block of 32 along k after another. A word holds 4 neighbours along k, and the
// COLUMNS words of the same k lie side by side. The bits of a word are spread over planes of 4, 2
// and 1 bit, or of 8 bits for forms of 8 bits. A byte of a plane holds several k, so that a shift
// and a mask restore the bytes of each k. The scales follow, as they were stored. Nothing is
// rounded or lost.
#pragma once

#include "dots.h"

namespace hr {

constexpr int64_t COLUMNS = 16;
constexpr int64_t BLOCK = 32;

// The numbers of the forms, in the order of `FORMS` in kernels/quantized_linear/forms.py.
enum FormNumber : int64_t {
    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4
};

// How a form stores its scales. HALF: one float16 per block. EXPONENT: one byte per block, the
// exponent of a power of 2. UNSIGNED, SIGNED: one byte per part of a block of 256, times one
// float16.
enum class Scale { HALF, EXPONENT, UNSIGNED, SIGNED };

// One form of stored blocks.
// - VALUES, BYTES: the number of values and of bytes of a stored block.
// - BITS: the number of bits of a quant.
// - SCALE: how scales are stored.
// - MIN: whether each scale has a minimum; SUBTRACTED: whether the minimum is subtracted, not
//   added.
// - GROUPS: the number of scales per 32 values.
// - OFFSET: the power of 2 that is subtracted from each quant, or 0.
// - TABLE: the table that maps 4-bit quants to values (1 or 2 in TABLES), or 0.
// - WIDE: whether values need 8 bits.
template <int64_t NUMBER_, int VALUES_, int BYTES_, int BITS_, Scale SCALE_, bool MIN_, int GROUPS_,
          int OFFSET_, int TABLE_ = 0>
struct Form {
    static constexpr int64_t NUMBER = NUMBER_;
    static constexpr int VALUES = VALUES_, BYTES = BYTES_, BITS = BITS_, GROUPS = GROUPS_;
    static constexpr int OFFSET = OFFSET_, TABLE = TABLE_;
    static constexpr Scale SCALE = SCALE_;
    static constexpr bool MIN = MIN_, SUPER = SCALE == Scale::UNSIGNED || SCALE == Scale::SIGNED;
    static constexpr bool SUBTRACTED = MIN && SUPER;
    static constexpr bool WIDE = BITS == 8 || TABLE;
    static constexpr int BLOCKS = VALUES / BLOCK;  // blocks of 32 in a stored block
    // Bytes in a panel: quants and the scales of parts per 32 values, all others per stored block.
    static constexpr int64_t QUANT_BYTES = 64 * BITS;
    static constexpr int64_t SUB_BYTES = GROUPS * COLUMNS;  // scales of parts, or their minima
    static constexpr int64_t HEAD_BYTES =
        SCALE == Scale::EXPONENT ? COLUMNS : COLUMNS * 2 * (MIN ? 2 : 1);
    static constexpr int64_t SCALE_BYTES =
        HEAD_BYTES + (SUPER ? BLOCKS * SUB_BYTES * (MIN ? 2 : 1) : 0);
    static constexpr int64_t panel_bytes(int64_t k) {
        return k / BLOCK * QUANT_BYTES + (k / VALUES * SCALE_BYTES + 63) / 64 * 64;
    }
};

template <int64_t NUMBER>
struct FormOf;
#define HR_FORM(NAME, ...) \
    template <>            \
    struct FormOf<NAME> {  \
        using type = Form<NAME, __VA_ARGS__>; \
    };
HR_FORM(Q4_0, 32, 18, 4, Scale::HALF, false, 1, 8)
HR_FORM(Q4_1, 32, 20, 4, Scale::HALF, true, 1, 0)
HR_FORM(Q5_0, 32, 22, 5, Scale::HALF, false, 1, 16)
HR_FORM(Q5_1, 32, 24, 5, Scale::HALF, true, 1, 0)
HR_FORM(Q8_0, 32, 34, 8, Scale::HALF, false, 1, 128)
HR_FORM(Q2_K, 256, 84, 2, Scale::UNSIGNED, true, 2, 0)
HR_FORM(Q3_K, 256, 110, 3, Scale::SIGNED, false, 2, 4)
HR_FORM(Q4_K, 256, 144, 4, Scale::UNSIGNED, true, 1, 0)
HR_FORM(Q5_K, 256, 176, 5, Scale::UNSIGNED, true, 1, 0)
HR_FORM(Q6_K, 256, 210, 6, Scale::SIGNED, false, 2, 32)
HR_FORM(IQ4_NL, 32, 18, 4, Scale::HALF, false, 1, 128, 1)
HR_FORM(IQ4_XS, 256, 136, 4, Scale::SIGNED, false, 1, 128, 1)
HR_FORM(MXFP4, 32, 17, 4, Scale::EXPONENT, false, 1, 16, 2)
#undef HR_FORM

inline constexpr int8_t TABLES[2][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};
// The values of TABLES plus their OFFSET, as unsigned bytes.
inline constexpr int8_t SHIFTED_TABLES[2][16] = {
    {1, 24, 45, 63, 79, 93, 106, 118, -127, -115, -103, -90, -75, -59, -39, -15},
    {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4},
};

// Calls f(FormOf<number>::type{}) if the form is stored in blocks.
template <class F>
inline void with_form(int64_t number, const F &f) {
    switch (number) {
        case Q4_0: return f(FormOf<Q4_0>::type{});
        case Q4_1: return f(FormOf<Q4_1>::type{});
        case Q5_0: return f(FormOf<Q5_0>::type{});
        case Q5_1: return f(FormOf<Q5_1>::type{});
        case Q8_0: return f(FormOf<Q8_0>::type{});
        case Q2_K: return f(FormOf<Q2_K>::type{});
        case Q3_K: return f(FormOf<Q3_K>::type{});
        case Q4_K: return f(FormOf<Q4_K>::type{});
        case Q5_K: return f(FormOf<Q5_K>::type{});
        case Q6_K: return f(FormOf<Q6_K>::type{});
        case IQ4_NL: return f(FormOf<IQ4_NL>::type{});
        case IQ4_XS: return f(FormOf<IQ4_XS>::type{});
        case MXFP4: return f(FormOf<MXFP4>::type{});
    }
}

// Returns word `g` (0 to 7) of a block from its planes, as bytes of 0 to 2^BITS - 1. V is a vector
// of columns, or uint32_t for one column; `at` is the byte offset of the first of these columns.
template <int BITS, class V>
inline V quants(const uint8_t *planes, int g, int64_t at) {
    auto plane = [&](int64_t i) { return load_as<V>(planes + i * 64 + at); };
    auto shifted = [](V v, int left) { return left >= 0 ? v << left : v >> -left; };
    if constexpr (BITS == 8) {
        return plane(g);
    } else if constexpr (BITS == 2 || BITS == 3) {
        V two = (plane(g / 4) >> (g % 4 * 2)) & 0x03030303u;
        if constexpr (BITS == 3) two |= shifted(plane(2), 2 - g) & 0x04040404u;
        return two;
    } else {
        V four = (plane(g % 4) >> (g / 4 * 4)) & 0x0f0f0f0fu;
        if constexpr (BITS == 5) four |= shifted(plane(4), 4 - g) & 0x10101010u;
        if constexpr (BITS == 6) four |= shifted(plane(4 + g / 4), 4 - g % 4 * 2) & 0x30303030u;
        return four;
    }
}

// Returns word `g` as signed bytes without an offset: the values before scale and minimum.
template <class F, class V>
inline V signed_quants(const uint8_t *planes, int g, int64_t at) {
    V q = quants<F::BITS, V>(planes, g, at);
    if constexpr (F::TABLE != 0) {
        return look_up(TABLES[F::TABLE - 1], q);
    } else if constexpr (F::OFFSET == 128) {
        return q ^ 0x80808080u;
    } else if constexpr (F::OFFSET != 0) {
        // Quants are below 64. Bit 7 is set in each byte before the subtraction, so that no byte
        // borrows from its neighbour.
        return ((q | 0x80808080u) - (uint32_t)F::OFFSET * 0x01010101u) ^ 0x80808080u;
    } else {
        return q;
    }
}

// Returns word `g` as unsigned bytes: the values with OFFSET added.
template <class F>
inline vu shifted_quants(const uint8_t *planes, int g, int64_t at) {
    vu q = quants<F::BITS, vu>(planes, g, at);
    if constexpr (F::TABLE != 0)
        return look_up(SHIFTED_TABLES[F::TABLE - 1], q);
    else
        return q;
}

}  // namespace hr
