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

#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define HR_ROUND_ROWS 1  // whether the next three functions have instructions of their own

// Returns the largest of all lanes; no lane is negative.
inline int32_t largest_lane(vi v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1));
    return _mm_cvtsi128_si32(four);
#endif
}

// Stores the lowest byte of each lane of a block. Lanes hold -127 to 127.
inline __m256i narrow_block(const vi *whole) {
#if defined(__AVX512F__)
    return _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)whole[1]), _mm512_cvtepi32_epi8((__m512i)whole[0]));
#else
    const __m256i first = _mm256_packs_epi32((__m256i)whole[0], (__m256i)whole[1]);
    const __m256i second = _mm256_packs_epi32((__m256i)whole[2], (__m256i)whole[3]);
    // Packing works on each half of the registers.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order);
#endif
}

// Sums the signed bytes of each half of a block.
inline void half_sums(__m256i bytes, int32_t *sums) {
    const __m256i raised = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));  // 128 more each
    const __m256i eights = _mm256_sad_epu8(raised, _mm256_setzero_si256());
    const __m256i sixteens = _mm256_add_epi64(eights, _mm256_shuffle_epi32(eights, 0x4e));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(sixteens)) - 16 * 128;
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(sixteens, 1)) - 16 * 128;
}
#endif

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
#if defined(HR_ROUND_ROWS)
    const int32_t top = largest_lane(most);
#else
    int32_t top = 0, lanes[W];
    std::memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < W; i++) top = std::max(top, lanes[i]);
#endif
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
        vi whole[PARTS];
        for (int i = 0; i < PARTS; i++) whole[i] = (vi)fma(v[i], splat(inverse), magic) - (vi)magic;
#if defined(HR_ROUND_ROWS)
        const __m256i narrow = narrow_block(whole);
        std::memcpy(bytes, &narrow, sizeof narrow);
        half_sums(narrow, sums);
#else
        typedef int8_t vb __attribute__((vector_size(W)));
        for (int i = 0; i < PARTS; i++) {
            vb narrow = __builtin_convertvector(whole[i], vb);
            std::memcpy(bytes + i * W, &narrow, sizeof narrow);
        }
        for (int i = 0; i < BLOCK; i++) sums[i / 16] += bytes[i];
#endif
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
