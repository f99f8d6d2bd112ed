// Portable vectors of 32-bit lanes, bfloat16 conversion and exp2, built on GCC/Clang vector types.
//
// The compiler turns these into AVX-512, AVX2 or NEON instructions. Intrinsics are used only where
// a plain expression does not give the instruction (bfloat16 dot products and rounding).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hr {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;
};

template <class V>
inline V load_as(const void *p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// Widens W unsigned or signed bytes. GCC 12 converts such vectors byte by byte.
inline vi widen(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    typedef uint8_t vb __attribute__((vector_size(W)));
    return __builtin_convertvector(load_as<vb>(p), vi);
#endif
}
inline vi widen(const int8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    typedef int8_t vb __attribute__((vector_size(W)));
    return __builtin_convertvector(load_as<vb>(p), vi);
#endif
}

inline vf splat(float x) { return vf{} + x; }

inline vf load(const float *p) { return load_as<vf>(p); }

inline vf load(const bf16 *p) {
    return (vf)(__builtin_convertvector(load_as<vh>(p), vu) << 16);
}

inline void store(float *p, vf v) { std::memcpy(p, &v, sizeof v); }

// Converts to bfloat16. Rounds to nearest even; a NaN stays a NaN.
inline vh round_bf16(vf v) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    __m256bh r = _mm512_cvtneps_pbh((__m512)v);
    vh h;
    std::memcpy(&h, &r, sizeof h);
    return h;
#else
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu quiet = (u >> 16) | 0x40u;
    return __builtin_convertvector((v == v) ? rounded : quiet, vh);
#endif
}

inline void store(bf16 *p, vf v) {
    vh h = round_bf16(v);
    std::memcpy(p, &h, sizeof h);
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &u, sizeof f);
    return f;
}

inline void from_float(float x, float *out) { *out = x; }

inline void from_float(float x, bf16 *out) {
    uint32_t u;
    std::memcpy(&u, &x, sizeof u);
    out->bits = x == x ? (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)
                       : (uint16_t)((u >> 16) | 0x40u);
}

// Returns the value that is read back after `v` has been stored as T.
inline vf rounded_as(vf v, const float *) { return v; }
inline vf rounded_as(vf v, const bf16 *) {
    return (vf)(__builtin_convertvector(round_bf16(v), vu) << 16);
}
template <class T>
inline float rounded_as(float x, const T *) {
    T t;
    from_float(x, &t);
    return to_float(t);
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

// Combines all lanes with `f` by halving; a chain of W dependent steps would take longer than all
// other work on a row.
template <class F>
inline float fold(vf v, F f) {
    float lanes[W];
    store(lanes, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = f(lanes[i], lanes[i + half]);
    return lanes[0];
}

inline float sum(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    return fold(v, [](float a, float b) { return a + b; });
#endif
}

inline float max_of(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    return fold(v, [](float a, float b) { return a > b ? a : b; });
#endif
}

// Returns 2^x with a relative error of about 2e-7. At or below -127 the result is 0; a NaN stays a
// NaN.
inline vf exp2(vf x) {
    // Comparisons are false for a NaN, so a NaN passes both clamps.
    x = x < -127.0f ? splat(-127.0f) : x;
    x = x > 127.0f ? splat(127.0f) : x;
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf shifted = x + magic;
    vf r = x - (shifted - magic);
    // The coefficients are those of exp2f in the Cephes library.
    vf p = splat(1.535336188319500e-4f);
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    vi n = (vi)shifted - (vi)magic;
    return p * (vf)((n + 127) << 23);
}

constexpr float LOG2E = 1.44269504088896341f;

// Returns the error function with an error of 2e-7; a NaN stays a NaN. Source: Abramowitz and
// Stegun, 7.1.26.
inline vf erf(vf x) {
    const vu sign = (vu)x & 0x80000000u;
    const vf size = (vf)((vu)x ^ sign);
    const vf t = 1.0f / (1.0f + 0.3275911f * size);
    vf p = splat(1.061405429f);
    p = p * t - 1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t - 0.284496736f;
    p = p * t + 0.254829592f;
    const vf y = 1.0f - p * t * exp2(size * size * -LOG2E);
    return (vf)((vu)y ^ sign);
}

// A thread's scratch memory. It is kept from call to call, and its contents are undefined.
struct Scratch {
    char *bytes = nullptr;
    size_t size = 0;
    char *get(size_t wanted) {
        if (wanted > size) {
            std::free(bytes);
            size = (wanted + 4095) / 4096 * 4096;
            bytes = (char *)std::aligned_alloc(4096, size);
        }
        return bytes;
    }
    ~Scratch() { std::free(bytes); }
};

}  // namespace hr
