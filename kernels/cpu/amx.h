// The products of gemm.h, computed with AMX tiles on CPUs that have them (Sapphire Rapids and
// later).
//
// The packed panels (see gemm.h) already have the layout of tiles: 16 word rows of 64 bytes, NR
// words apart. All row counts use this code, so that a row gets the same bits in any batch.
#pragma once

#include "gemm.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define HR_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace hr {

// Asks Linux for the tile registers, which a process may use only on request.
inline bool amx_allowed() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Makes earlier writes visible to the tile loads. GCC 12 assumes that `_tile_loadconfig` reads 8
// bytes, and that `_tile_loadd` reads none. Without this fence it may drop or delay the writes
// before them.
inline void amx_fence(const void *read) { asm volatile("" : : "r"(read) : "memory"); }

// Configures the tiles: 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights. `rows` is the
// number of rows of activations, 1 to 16.
inline void amx_configure(int64_t rows) {
    TileConfig config;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < 6 ? rows : 16);
    }
    amx_fence(&config);
    _tile_loadconfig(&config);
}

// Multiplies one row of tiles (`a`, as many rows as configured) with the NR = 64 columns of a
// panel.
inline void amx_rows(const uint32_t *a, int64_t lda, const uint32_t *panel, int64_t words,
                     float *c) {
    amx_fence(a);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < words; k += 16) {
        const uint32_t *b = panel + k * NR;
        for (int64_t i = 0; i < 16; i++)
            for (int64_t j = 0; j < NR; j += 16) __builtin_prefetch(b + (16 + i) * NR + j);
        _tile_loadd(4, a + k, lda * 4);
        _tile_loadd(6, b, NR * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 16, NR * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, b + 32, NR * 4);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, b + 48, NR * 4);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, NR * 4);
    _tile_stored(1, c + 16, NR * 4);
    _tile_stored(2, c + 32, NR * 4);
    _tile_stored(3, c + 48, NR * 4);
}

// Multiplies two full rows of tiles with 32 columns, so that each loaded tile serves two products.
inline void amx_square(const uint32_t *a, int64_t lda, const uint32_t *panel, int64_t words,
                       float *c) {
    amx_fence(a);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < words; k += 16) {
        const uint32_t *b = panel + k * NR;
        _tile_loadd(6, b, NR * 4);
        _tile_loadd(4, a + k, lda * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 16, NR * 4);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + 16 * lda + k, lda * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, NR * 4);
    _tile_stored(1, c + 16, NR * 4);
    _tile_stored(2, c + 16 * NR, NR * 4);
    _tile_stored(3, c + 16 * NR + 16, NR * 4);
}

// Multiplies all rows of `x` with one panel, and calls finish(row, rows, tile) for each block of
// products. If there are more than 16 rows, `tail` holds the last `tokens % 16` rows, padded to 16.
template <class F>
inline void amx_panel(const uint32_t *x, const uint32_t *tail, int64_t tokens,
                      const uint32_t *panel, int64_t words, const F &finish) {
    static_assert(NR == 64, "a panel is four tiles wide");
    alignas(64) float tile[32 * NR];
    int64_t row = 0;
    for (; row + 32 <= tokens; row += 32) {
        amx_square(x + row * words, words, panel, words, tile);
        amx_square(x + row * words, words, panel + 32, words, tile + 32);
        finish(row, (int64_t)32, tile);
    }
    for (int64_t n; row < tokens; row += n) {
        n = std::min<int64_t>(16, tokens - row);
        bool padded = n < 16 && tokens > 16;
        amx_rows(padded ? tail : x + row * words, words, panel, words, tile);
        finish(row, n, tile);
    }
}

// Multiplies one row of tiles with N tiles of columns.
template <int N, bool ACCUMULATE>
inline void amx_strip(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t k,
                      float *c, int64_t ldc) {
    const int64_t stride = ldc * 4;
    amx_fence(a);
    amx_fence(c);
    if (ACCUMULATE) {
        _tile_loadd(0, c, stride);
        if (N > 1) _tile_loadd(1, c + 16, stride);
        if (N > 2) _tile_loadd(2, c + 32, stride);
        if (N > 3) _tile_loadd(3, c + 48, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < k; i += 16) {
        const uint32_t *row = b + i * ldb;
        _tile_loadd(4, a + i, lda * 4);
        _tile_loadd(6, row, ldb * 4);
        _tile_dpbf16ps(0, 4, 6);
        if (N > 1) {
            _tile_loadd(7, row + 16, ldb * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (N > 2) {
            _tile_loadd(6, row + 32, ldb * 4);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (N > 3) {
            _tile_loadd(7, row + 48, ldb * 4);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, c, stride);
    if (N > 1) _tile_stored(1, c + 16, stride);
    if (N > 2) _tile_stored(2, c + 32, stride);
    if (N > 3) _tile_stored(3, c + 48, stride);
}

// The function product() of gemm.h for bfloat16, if k is a multiple of 16 words and n a multiple of
// 16 columns.
template <bool ACCUMULATE>
inline void amx_product(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t k,
                        float *c, int64_t ldc, int64_t m, int64_t n) {
    for (int64_t row = 0; row < m; row += 16) {
        // At most two tile shapes occur: full tiles, then one shape for the rest.
        if (row == 0 || m - row < 16) amx_configure(std::min<int64_t>(16, m - row));
        const uint32_t *from = a + row * lda;
        for (int64_t col = 0; col < n; col += 64) {
            float *to = c + row * ldc + col;
            switch (std::min<int64_t>(4, (n - col) / 16)) {
                case 1: amx_strip<1, ACCUMULATE>(from, lda, b + col, ldb, k, to, ldc); break;
                case 2: amx_strip<2, ACCUMULATE>(from, lda, b + col, ldb, k, to, ldc); break;
                case 3: amx_strip<3, ACCUMULATE>(from, lda, b + col, ldb, k, to, ldc); break;
                default: amx_strip<4, ACCUMULATE>(from, lda, b + col, ldb, k, to, ldc);
            }
        }
    }
    _tile_release();
}

}  // namespace hr

#endif
