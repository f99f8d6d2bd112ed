// Products of bytes through AMX tiles, 16 rows at a time.
#pragma once

#include "amx.h"
#include "stored_rows.h"

#if defined(HR_AMX) && defined(__AMX_INT8__) && defined(__AVX512F__)
#define HR_AMX_BYTES 1
#endif

namespace hr {

constexpr int64_t TILE = 16;  // rows of a tile

#if defined(HR_AMX_BYTES)

// Rows by tiles of 16. Bytes: [tile, block, 16, 32]. Numbers: [tile, block, 4, 16]: the scale and
// the sums of `RowBlock`.
struct Tiled {
    static constexpr int64_t NUMBERS = 4 * TILE;
};

// Fewer rows are as quick without: a tile's time does not depend on how many of its rows count.
constexpr int64_t TILED_FROM = 12;

inline bool uses_tiles(int64_t tokens) { return tokens >= TILED_FROM && amx_allowed(); }

template <class F>
void configure_bytes() {
    TileConfig config;
    for (int i = 0; i < 8; i++) {
        const bool is_rows = i == 4 || i == 5, is_weights = i >= 6;
        config.row_bytes[i] = is_rows ? BLOCK / F::GROUPS : 64;
        config.rows[i] = is_weights ? 8 / F::GROUPS : 16;
    }
    amx_fence(&config);
    _tile_loadconfig(&config);
}

// 16 rows times a panel whose quants were spread out as signed bytes: [block, 8, 16, 4].
template <class F>
void tile_rows(const int8_t *a, const float *numbers, const int8_t *spread, const uint8_t *head,
               int64_t k, float *out) {
    constexpr int64_t A_STEP = BLOCK / F::GROUPS, B_STEP = BLOCK * COLUMNS / F::GROUPS;
    constexpr int64_t A_BLOCK = TILE * BLOCK, B_BLOCK = BLOCK * COLUMNS;
    alignas(64) int32_t sums[2][TILE * COLUMNS];
    vf acc[TILE];
#pragma GCC unroll 16
    for (int m = 0; m < TILE; m++) acc[m] = vf{};
    const int64_t steps = k / BLOCK * F::GROUPS;
    amx_fence(a);
    amx_fence(spread);
    auto multiply = [&](int64_t step) {
        const int64_t block = step / F::GROUPS, group = step % F::GROUPS;
        const int8_t *from_a = a + block * A_BLOCK + group * A_STEP;
        const int8_t *from_b = spread + block * B_BLOCK + group * B_STEP;
        // Tile numbers are constants; two in turns, so that one is computed as one is read.
        if (step % 2 == 0) {
            _tile_zero(0);
            _tile_loadd(4, from_a, BLOCK);
            _tile_loadd(6, from_b, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_stored(0, sums[0], 64);
        } else {
            _tile_zero(1);
            _tile_loadd(5, from_a, BLOCK);
            _tile_loadd(7, from_b, 64);
            _tile_dpbssd(1, 5, 7);
            _tile_stored(1, sums[1], 64);
        }
    };
    multiply(0);
    int64_t step = 0;
    for (int64_t unit = 0; unit < k / F::VALUES; unit++, head += F::SCALE_BYTES) {
        Scales<F> scales;
        scales.begin(head, 0);
        for (int block = 0; block < F::BLOCKS; block++, numbers += Tiled::NUMBERS)
#pragma GCC unroll 2
            for (int group = 0; group < F::GROUPS; group++, step++) {
                if (step + 1 < steps) multiply(step + 1);
                const int32_t *from = sums[step % 2];
                vf scale = scales.of(block, group);
#pragma GCC unroll 16
                for (int m = 0; m < TILE; m++)
                    acc[m] = fma(__builtin_convertvector(load_as<vi>(from + m * COLUMNS), vf),
                                 scale * in_all(numbers + m), acc[m]);
                if constexpr (F::MIN) {
                    const float *of_rows = numbers + (F::GROUPS == 1 ? 1 : 2 + group) * TILE;
                    vf min = scales.min_of(block, group);
#pragma GCC unroll 16
                    for (int m = 0; m < TILE; m++) acc[m] = fma(min, in_all(of_rows + m), acc[m]);
                }
            }
    }
#pragma GCC unroll 16
    for (int m = 0; m < TILE; m++) store(out + m * COLUMNS, acc[m]);
}

#else
struct Tiled {
    static constexpr int64_t NUMBERS = 0;
};
inline bool uses_tiles(int64_t) { return false; }
#endif

}  // namespace hr
