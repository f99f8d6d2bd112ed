// Register-blocked matrix products C[m, n] (+)= A[m, k] * B[k, n] on 32-bit words.
//
// A word is one float, or a pair of bfloat16 neighbours along k. B is stored word row by word row,
// so that one vector load reads W columns of one k (or of one pair of k). A is plain row-major
// memory, and its words are broadcast. The same packed bytes serve machines with and without
// bfloat16 dot products.
#pragma once

#include "simd.h"

namespace hr {

// Size of the register block, in rows and vectors: the accumulators, one row of B and one broadcast
// word must fit into the registers.
#if defined(__AVX512F__) || !defined(__AVX__)
constexpr int NV = 4;  // 32 vector registers
#else
constexpr int NV = 2;  // 16 vector registers
#endif
constexpr int MR = 6;
constexpr int NR = NV * W;

template <class T>
struct Words;

template <>
struct Words<float> {
    static constexpr int PER_WORD = 1;
    static inline vf madd(vf acc, uint32_t a, vu b) {
        float f;
        std::memcpy(&f, &a, sizeof f);
        return acc + f * (vf)b;
    }
};

template <>
struct Words<bf16> {
    static constexpr int PER_WORD = 2;
    static inline vf madd(vf acc, uint32_t a, vu b) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a),
                                    (__m512bh)b);
#else
        vu low = (vu{} + a) << 16, high = (vu{} + a) & 0xffff0000u;
        acc += (vf)low * (vf)(b << 16);
        return acc + (vf)high * (vf)(b & 0xffff0000u);
#endif
    }
};

// Computes one block: M rows times P panels of N vectors each. Row strides are `lda` words in `a`,
// `ldb` words in `b` and `ldc` floats in `c`; panels are `panel` words apart. PREFETCH is the
// distance in words by which `b` is prefetched, or 0 for no prefetching.
//
// Each element of C is one chain of additions along k, starting from C (or from 0), whatever the
// block's shape. A row therefore gets the same bits alone and in any batch.
template <class T, int M, int N, int P, bool ACCUMULATE, int PREFETCH>
inline void block(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t panel,
                  int64_t k, float *c, int64_t ldc) {
    vf acc[P][M][N];
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++)
                acc[p][m][n] = ACCUMULATE ? load(c + m * ldc + (p * N + n) * W) : vf{};
    for (int64_t i = 0; i < k; i++) {
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) {
            const uint32_t *row = b + p * panel + i * ldb;
            vu col[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                col[n] = load_as<vu>(row + n * W);
                if (PREFETCH) __builtin_prefetch(row + PREFETCH + n * W);
            }
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                uint32_t word = a[m * lda + i];
#pragma GCC unroll 4
                for (int n = 0; n < N; n++)
                    acc[p][m][n] = Words<T>::madd(acc[p][m][n], word, col[n]);
            }
        }
    }
    for (int p = 0; p < P; p++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) store(c + m * ldc + (p * N + n) * W, acc[p][m][n]);
}

template <class T, int N, bool ACCUMULATE, int PREFETCH>
inline void rows_of_block(int64_t m, const uint32_t *a, int64_t lda, const uint32_t *b,
                          int64_t ldb, int64_t k, float *c, int64_t ldc) {
    switch (m) {
        case 1: return block<T, 1, N, 1, ACCUMULATE, PREFETCH>(a, lda, b, ldb, 0, k, c, ldc);
        case 2: return block<T, 2, N, 1, ACCUMULATE, PREFETCH>(a, lda, b, ldb, 0, k, c, ldc);
        case 3: return block<T, 3, N, 1, ACCUMULATE, PREFETCH>(a, lda, b, ldb, 0, k, c, ldc);
        case 4: return block<T, 4, N, 1, ACCUMULATE, PREFETCH>(a, lda, b, ldb, 0, k, c, ldc);
        case 5: return block<T, 5, N, 1, ACCUMULATE, PREFETCH>(a, lda, b, ldb, 0, k, c, ldc);
        default: return block<T, 6, N, 1, ACCUMULATE, PREFETCH>(a, lda, b, ldb, 0, k, c, ldc);
    }
}

// Returns how many of `left` rows to take next. The parts are nearly equal and at most MR (7 rows
// are 4 + 3, not 6 + 1).
inline int64_t next_rows(int64_t left) {
    int64_t parts = (left + MR - 1) / MR;
    return (left + parts - 1) / parts;
}

// C[m, n] (+)= A * B for small operands that stay in cache; n is a multiple of W.
template <class T, bool ACCUMULATE>
inline void product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t k,
                    float *c, int64_t ldc, int64_t m, int64_t n) {
    for (int64_t col = 0; col < n; col += NR) {
        int64_t vectors = (n - col < NR ? n - col : NR) / W;
        for (int64_t row = 0, rows; row < m; row += rows) {
            rows = next_rows(m - row);
            const uint32_t *from = a + row * lda;
            float *to = c + row * ldc + col;
            switch (vectors) {
                case 1:
                    rows_of_block<T, 1, ACCUMULATE, 0>(rows, from, lda, b + col, ldb, k, to, ldc);
                    break;
                case 2:
                    rows_of_block<T, 2, ACCUMULATE, 0>(rows, from, lda, b + col, ldb, k, to, ldc);
                    break;
#if defined(__AVX512F__) || !defined(__AVX__)
                case 3:
                    rows_of_block<T, 3, ACCUMULATE, 0>(rows, from, lda, b + col, ldb, k, to, ldc);
                    break;
                default:
                    rows_of_block<T, 4, ACCUMULATE, 0>(rows, from, lda, b + col, ldb, k, to, ldc);
                    break;
#endif
            }
        }
    }
}

// Transposes `count` (1 to 16) rows of `words` words, from rows[i] into out[word * ldo + i]. The
// columns from `count` to 15 become 0.
inline void transpose16(const uint32_t *const *rows, int count, int64_t words, uint32_t *out,
                        int64_t ldo) {
#if defined(__AVX512F__)
    for (int64_t at = 0; at < words; at += 16) {
        int64_t left = words - at < 16 ? words - at : 16;
        __mmask16 mask = (__mmask16)((1u << left) - 1);
        __m512i r[16], t[16];
        for (int i = 0; i < 16; i++)
            r[i] = i < count ? _mm512_maskz_loadu_epi32(mask, rows[i] + at)
                             : _mm512_setzero_si512();
        for (int i = 0; i < 16; i += 2) {
            t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
            r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
            r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
            r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
        }
        // Each 128-bit lane l of r[4g + j] now holds word 4l + j of the rows 4g to 4g + 3.
        for (int j = 0; j < 4; j++) {
            __m512i a = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
            __m512i b = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
            __m512i c = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
            __m512i d = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
            t[j] = _mm512_shuffle_i32x4(a, b, 0x88);
            t[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
            t[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
            t[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
        }
        for (int64_t i = 0; i < left; i++) _mm512_storeu_si512(out + (at + i) * ldo, t[i]);
    }
#else
    int64_t word = 0;
#if defined(__AVX2__)
    for (; word + 8 <= words; word += 8)
        for (int first = 0; first < 16; first += 8) {
            __m256i r[8], t[8];
            for (int i = 0; i < 8; i++)
                r[i] = first + i < count ? _mm256_loadu_si256((const __m256i *)(rows[first + i] + word))
                                         : _mm256_setzero_si256();
            for (int i = 0; i < 8; i += 2) {
                t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
            }
            for (int i = 0; i < 8; i += 4) {
                r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
                r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
                r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
                r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
            }
            // Each 128-bit lane l of r[4g + j] now holds word 4l + j of the rows 4g to 4g + 3.
            for (int j = 0; j < 4; j++) {
                uint32_t *to = out + (word + j) * ldo + first;
                _mm256_storeu_si256((__m256i *)to, _mm256_permute2x128_si256(r[j], r[4 + j], 0x20));
                _mm256_storeu_si256((__m256i *)(to + 4 * ldo), _mm256_permute2x128_si256(r[j], r[4 + j], 0x31));
            }
        }
#endif
    for (; word < words; word++)
        for (int i = 0; i < 16; i++) out[word * ldo + i] = i < count ? rows[i][word] : 0;
#endif
}

}  // namespace hr
