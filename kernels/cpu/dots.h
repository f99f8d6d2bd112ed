// Dot products of bytes: each 32-bit lane holds 4 neighbours along k, unsigned weights times signed
// rows.
//
// A lane is one output column, as in gemm.h, and the 4 bytes of a row are broadcast to all lanes.
// All instruction sets compute the same integers. AVX-512 VNNI, AVX-VNNI and NEON's dot products
// add in 32 bits. AVX2, SSSE3 and AVX-512 BW first add in 16 bits, as long as the size of the
// weights allows it.
#pragma once

#include "simd.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HR_DOT "AVX-512 VNNI"
#elif !defined(__AVX512F__) && defined(__AVX2__) && \
    (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__)))
#define HR_DOT "AVX-VNNI"
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define HR_DOT "NEON i8mm"
#elif defined(__ARM_FEATURE_DOTPROD)
#define HR_DOT "NEON dot"
#define HR_SIGNED_DOT 1
#elif (defined(__AVX512F__) && defined(__AVX512BW__)) || \
    (!defined(__AVX512F__) && defined(__AVX2__)) || (!defined(__AVX__) && defined(__SSSE3__))
#define HR_PAIRS 1
#endif

namespace hr {

inline const char *dots_name() {
#if defined(HR_DOT)
    return HR_DOT;
#elif defined(HR_PAIRS) && defined(__AVX512BW__)
    return "AVX-512 BW";
#elif defined(HR_PAIRS) && defined(__AVX2__)
    return "AVX2";
#elif defined(HR_PAIRS)
    return "SSSE3";
#else
    return "plain C++";
#endif
}

// Whether weights that need 8 bits are passed as signed bytes without an offset. As unsigned bytes,
// a pair of their products would overflow 16 bits; and NEON's first dot product takes only signed
// bytes.
#if defined(HR_DOT) && !defined(HR_SIGNED_DOT)
constexpr bool WIDE_IS_SIGNED = false;
#else
constexpr bool WIDE_IS_SIGNED = true;
#endif

inline vi splat_word(const void *p) {
    int32_t word;
    std::memcpy(&word, p, sizeof word);
    return vi{} + word;
}

// Returns the same number in all lanes. This compiles to one broadcasting load; simd.h's splat()
// adds the number to zeros instead.
inline vf in_all(const float *p) { return (vf)splat_word(p); }

inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA) && defined(__ARM_NEON)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Converts a float16 to a float32, without rounding.
inline float half_to_float(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = (uint32_t)(bits & 0x7fffu) << 13;
    float value;
    if (rest >= 0x0f800000u) {  // infinities and NaNs
        rest |= 0x7f800000u;
        std::memcpy(&value, &rest, sizeof value);
    } else {
        std::memcpy(&value, &rest, sizeof value);
        value *= 5192296858534827628530496329220096.0f;  // 2^112
    }
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    word |= sign;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

inline vf load_half(const void *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && defined(__AVX__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p)));
#else
    vh bits = load_as<vh>(p);
    vf values;
    for (int i = 0; i < W; i++) values[i] = half_to_float(bits[i]);
    return values;
#endif
}

// Converts W unsigned or signed bytes to float32.
template <class B>
inline vf load_bytes(const B *p) {
    return __builtin_convertvector(widen(p), vf);
}

// Returns half of 2^(e - 127) for W bytes e. These are the scales of MXFP4, whose table holds
// doubled values.
inline vf load_exponents(const uint8_t *p) {
    vu e = (vu)widen(p);
    return (vf)(e < 2u ? (vu{} + 0x00200000u) << (e & 1u) : (e - 1u) << 23);
}

// Replaces each byte (0 to 15) by its entry in a table of 16 bytes.
inline vu look_up(const int8_t *table, vu nibbles) {
#if defined(__AVX512BW__)
    __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (vu)_mm512_shuffle_epi8(all, (__m512i)nibbles);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (vu)_mm256_shuffle_epi8(all, (__m256i)nibbles);
#elif defined(__SSSE3__) && !defined(__AVX__)
    return (vu)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)table), (__m128i)nibbles);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (vu)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)nibbles);
#else
    int8_t bytes[W * 4];
    std::memcpy(bytes, &nibbles, sizeof bytes);
    for (int i = 0; i < W * 4; i++) bytes[i] = table[(uint8_t)bytes[i] & 15];
    return load_as<vu>(bytes);
#endif
}
inline uint32_t look_up(const int8_t *table, uint32_t nibbles) {
    uint8_t bytes[4];
    std::memcpy(bytes, &nibbles, sizeof bytes);
    for (int i = 0; i < 4; i++) bytes[i] = (uint8_t)table[bytes[i] & 15];
    std::memcpy(&nibbles, bytes, sizeof bytes);
    return nibbles;
}

// Adds the 4 products of each lane to its sum.
template <bool SIGNED>
#if !defined(HR_DOT)
[[gnu::noinline]]  // inlined into every product, these loops would take minutes to compile
#endif
inline vi dot(vi sum, vu w, vi a) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)a);
#elif defined(HR_DOT) && defined(__AVXVNNI__)
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)a);
#elif defined(HR_DOT) && defined(__AVX2__)
    return (vi)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)w, (__m256i)a);
#elif defined(HR_DOT) && defined(HR_SIGNED_DOT)
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)a);
#elif defined(HR_DOT)
    return (vi)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)a);
#else
    int8_t left[W * 4], right[W * 4];
    std::memcpy(left, &w, sizeof left);
    std::memcpy(right, &a, sizeof right);
    for (int i = 0; i < W * 4; i++)
        sum[i / 4] += (SIGNED ? (int32_t)left[i] : (int32_t)(uint8_t)left[i]) * right[i];
    return sum;
#endif
}

#if defined(HR_PAIRS)
#if defined(__AVX512BW__)
template <bool SIGNED>
inline vi pairs(vu w, vi a) {
    __m512i left = (__m512i)w, right = (__m512i)a;
    if (SIGNED) {
        right = _mm512_mask_sub_epi8(right, _mm512_movepi8_mask(left), _mm512_setzero_si512(), right);
        left = _mm512_abs_epi8(left);
    }
    return (vi)_mm512_maddubs_epi16(left, right);
}
inline vi add_pairs(vi a, vi b) { return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b); }
inline vi join_pairs(vi a) { return (vi)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi16(1)); }
#elif defined(__AVX2__)
template <bool SIGNED>
inline vi pairs(vu w, vi a) {
    __m256i left = (__m256i)w, right = (__m256i)a;
    if (SIGNED) {
        right = _mm256_sign_epi8(right, left);
        left = _mm256_abs_epi8(left);
    }
    return (vi)_mm256_maddubs_epi16(left, right);
}
inline vi add_pairs(vi a, vi b) { return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b); }
inline vi join_pairs(vi a) { return (vi)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1)); }
#else
template <bool SIGNED>
inline vi pairs(vu w, vi a) {
    __m128i left = (__m128i)w, right = (__m128i)a;
    if (SIGNED) {
        right = _mm_sign_epi8(right, left);
        left = _mm_abs_epi8(left);
    }
    return (vi)_mm_maddubs_epi16(left, right);
}
inline vi add_pairs(vi a, vi b) { return (vi)_mm_add_epi16((__m128i)a, (__m128i)b); }
inline vi join_pairs(vi a) { return (vi)_mm_madd_epi16((__m128i)a, _mm_set1_epi16(1)); }
#endif
#endif

}  // namespace hr
