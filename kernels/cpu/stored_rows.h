// Both sides of a product with stored blocks: rows that are rounded to bytes, and the scales of
// columns.
#pragma once

#include <algorithm>
#include <limits>

#include "stored.h"

namespace hr {

// A block of 32 values of a row, rounded to bytes. There is one sum for the whole block, one for
// its first half and one for its second half. `sums` are sums of bytes times the scale; `negated`
// are the negated sums of bytes alone.
struct RowBlock {
    float scale, sums[3];
    int32_t negated[3], unused;
};

template <class T>
inline void quantize_block(const T *x, int8_t *bytes, RowBlock *block) {
    constexpr int PARTS = BLOCK / W;
    vf v[PARTS];
    vi most = {};
    for (int i = 0; i < PARTS; i++) {
        v[i] = load(x + i * W);
        vi magnitude = (vi)v[i] & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
    }
    int32_t top = 0, lanes[W];
    std::memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < W; i++) top = std::max(top, lanes[i]);
    float largest;
    std::memcpy(&largest, &top, sizeof largest);
    int32_t sums[2] = {0, 0};
    float scale = 0.0f;
    if (top >= 0x7f800000) {  // an infinity or a NaN makes every result with this block a NaN
        scale = std::numeric_limits<float>::quiet_NaN();
        std::memset(bytes, 0, BLOCK);
    } else if (largest < 0x1p-100f) {  // for much smaller values, 127 / largest would be infinite
        std::memset(bytes, 0, BLOCK);
    } else {
        const float inverse = 127.0f / largest;
        const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
        scale = largest / 127.0f;
        for (int i = 0; i < PARTS; i++) {
            vi whole = (vi)fma(v[i], splat(inverse), magic) - (vi)magic;
            typedef int8_t vb __attribute__((vector_size(W)));
            vb narrow = __builtin_convertvector(whole, vb);
            std::memcpy(bytes + i * W, &narrow, sizeof narrow);
        }
        for (int i = 0; i < BLOCK; i++) sums[i / 16] += bytes[i];
    }
    block->scale = scale;
    const int32_t all[3] = {sums[0] + sums[1], sums[0], sums[1]};
    for (int i = 0; i < 3; i++) {
        block->sums[i] = scale * (float)all[i];
        block->negated[i] = -all[i];
    }
}

// The scales of W columns, for all blocks of 32 in one stored block.
template <class F>
struct Scales {
    vf scale, min;
    const uint8_t *subs;

    inline void begin(const uint8_t *head, int64_t column) {
        if constexpr (F::SCALE == Scale::EXPONENT)
            scale = load_exponents(head + column);
        else
            scale = load_half(head + column * 2);
        if constexpr (F::MIN) min = load_half(head + COLUMNS * 2 + column * 2);
        subs = head + F::HEAD_BYTES + column;
    }
    inline vf of(int block, int group) const {
        if constexpr (!F::SUPER) return scale;
        const uint8_t *at = subs + block * F::SUB_BYTES * (F::MIN ? 2 : 1) + group * COLUMNS;
        return scale * (F::SCALE == Scale::SIGNED ? load_bytes((const int8_t *)at) : load_bytes(at));
    }
    // Returns what is added per unit of a row's sum; it is negative if the form subtracts the
    // minimum.
    inline vf min_of(int block, int group) const {
        if constexpr (!F::SUPER) return min;
        const uint8_t *at = subs + block * F::SUB_BYTES * 2 + F::SUB_BYTES + group * COLUMNS;
        return -min * load_bytes(at);
    }
};

}  // namespace hr
