// Products with stored weights, computed with AMX tiles of bfloat16.
//
// Rows are rounded to bfloat16. Quants are small integers, which bfloat16 represents exactly, and a
// block's sums are scaled in float32, so that weights lose nothing. Quants are widened to bfloat16
// just before their product, so memory is read at the stored size. A row has the same bits in any
// batch, because all numbers of rows give the same bits.
#pragma once

#include "amx.h"
#include "stored_rows.h"

namespace hr {

constexpr int64_t TILE = 16;  // rows of a tile
constexpr int64_t FEW = 4;    // rows that are added without tiles, see few_rows()

// Rows are arranged by tiles: [tile, block of 32, 16, 32] bfloat16. Of 4 neighbours along k, the
// order is 0, 2, 1, 3.
constexpr int64_t TILE_BLOCK = TILE * BLOCK;
// The sums over k of these rows: [tile, block, 3, 16] float32, for a block and for its two halves.
constexpr int64_t TILE_SUMS = 3 * TILE;
// A widened block of a panel: [16 pairs along k, 16 columns, 2] bfloat16, as words.
constexpr int64_t WIDE_BLOCK = BLOCK * COLUMNS / 2;

#if defined(HR_AMX) && defined(__AVX512F__)
#define HR_STORED_TILES 1

// Only forms in blocks use tiles. Weights of 16 and 32 bits are multiplied with float32 rows,
// without rounding.
inline bool uses_tiles(int64_t form, int64_t k) {
    return form > BF16 && k % BLOCK == 0 && amx_allowed();
}

inline vu pair_of(vf first, vf second) {
    return ((vu)first >> 16) | ((vu)second & 0xffff0000u);
}

// A bfloat16 from 128 to 255 has an integer in its low 7 bits: 0x4300 | q is 128 + q. Quants of up
// to 7 bits therefore need no conversion, and 128 times the row's sum is subtracted from the
// block's sum later. CONVERTED: whether quants need 8 bits, which do not fit, and so are converted.
template <class F>
constexpr bool CONVERTED = F::BITS == 8 || F::TABLE == 1;
template <class F>
constexpr float BASE = 128.0f + (float)F::OFFSET;

// Converts the byte in bits 15 to 22 to the number that it stands for.
template <class F>
inline vf converted(vu shifted) {
    return (vf)((shifted & 0x007f8000u) | 0x43800000u) - (256.0f + (float)F::OFFSET);
}

// Widens `blocks` blocks of 32 of a panel, and writes them to `out`.
template <class F>
inline void widen_blocks(const uint8_t *planes, int64_t blocks, uint32_t *out) {
    for (int64_t block = 0; block < blocks; block++, planes += F::QUANT_BYTES, out += WIDE_BLOCK) {
#pragma GCC unroll 8
        for (int i = 0; i < F::BITS; i++) __builtin_prefetch(planes + 4096 + i * 64);
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
            const vu bytes = shifted_quants<F>(planes, g, 0);
            vu even, odd;
            if constexpr (CONVERTED<F>) {
                even = pair_of(converted<F>(bytes << 15), converted<F>(bytes >> 1));
                odd = pair_of(converted<F>(bytes << 7), converted<F>(bytes >> 9));
            } else {
                even = (bytes & 0x007f007fu) | 0x43004300u;
                odd = ((bytes >> 8) & 0x007f007fu) | 0x43004300u;
            }
            std::memcpy(out + g * 2 * COLUMNS, &even, sizeof even);
            std::memcpy(out + (g * 2 + 1) * COLUMNS, &odd, sizeof odd);
        }
    }
}

// Returns the factor of the row's sum, which is added to the scaled products of the quants.
template <class F>
inline vf least_of(const Scales<F> &scales, vf scale, int block, int group) {
    vf least = {};
    if constexpr (!CONVERTED<F>) least = scale * -BASE<F>;
    if constexpr (F::MIN) least += scales.min_of(block, group);
    return least;
}

// Configures the tiles: 0 and 1 hold sums, 4 and 5 rows, 6 and 7 weights. A product covers the k of
// one scale.
template <class F>
void configure_blocks(int64_t rows) {
    TileConfig config;
    for (int i = 0; i < 8; i++) {
        const bool is_rows = i == 4 || i == 5, is_weights = i >= 6;
        config.row_bytes[i] = is_rows ? 64 / F::GROUPS : 64;
        config.rows[i] = is_weights ? 16 / F::GROUPS : (uint8_t)rows;
    }
    amx_fence(&config);
    _tile_loadconfig(&config);
}

// Multiplies up to M rows with a panel. `wide` holds the widened panel, or with FUSED has room for
// two stored blocks of it.
template <class F, int M, bool FUSED>
void tile_rows(const uint16_t *a, const float *row_sums, const uint8_t *panel, uint32_t *wide, int64_t k,
               float *out) {
    constexpr int64_t STEP = TILE_BLOCK, UNIT = F::BLOCKS * WIDE_BLOCK;
    const uint8_t *head = panel + k / BLOCK * F::QUANT_BYTES;
    const int64_t units = k / F::VALUES, steps = k / BLOCK * F::GROUPS;
    alignas(64) float sums[2][TILE * COLUMNS];
    vf acc[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) acc[m] = vf{};
    auto multiply = [&](int64_t step) {
        const int64_t block = step / F::GROUPS, group = step % F::GROUPS;
        const uint16_t *rows = a + block * STEP + group * (BLOCK / F::GROUPS);
        const int64_t at = FUSED ? block % (2 * F::BLOCKS) : block;
        const uint32_t *words = wide + at * WIDE_BLOCK + group * (WIDE_BLOCK / F::GROUPS);
        // Tile numbers must be constants. Two sets of tiles take turns, so that one is computed
        // while the other is read.
        if (step % 2 == 0) {
            _tile_zero(0);
            _tile_loadd(4, rows, 64);
            _tile_loadd(6, words, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_stored(0, sums[0], 64);
        } else {
            _tile_zero(1);
            _tile_loadd(5, rows, 64);
            _tile_loadd(7, words, 64);
            _tile_dpbf16ps(1, 5, 7);
            _tile_stored(1, sums[1], 64);
        }
    };
    if constexpr (FUSED) widen_blocks<F>(panel, F::BLOCKS, wide);
    amx_fence(a);
    multiply(0);
    int64_t step = 0;
    for (int64_t unit = 0; unit < units; unit++, head += F::SCALE_BYTES) {
        if (FUSED && unit + 1 < units) {
            widen_blocks<F>(panel + (unit + 1) * F::BLOCKS * F::QUANT_BYTES, F::BLOCKS,
                            wide + (unit + 1) % 2 * UNIT);
            amx_fence(wide);
        }
        Scales<F> scales;
        scales.begin(head, 0);
        for (int block = 0; block < F::BLOCKS; block++, row_sums += TILE_SUMS)
#pragma GCC unroll 4
            for (int group = 0; group < F::GROUPS; group++, step++) {
                if (step + 1 < steps) multiply(step + 1);
                const float *from = sums[step % 2];
                const float *of_rows = row_sums + (F::GROUPS == 1 ? 0 : 1 + group) * TILE;
                const vf scale = scales.of(block, group);
                const vf least = least_of(scales, scale, block, group);
#pragma GCC unroll 16
                for (int m = 0; m < M; m++) {
                    acc[m] = fma(load(from + m * COLUMNS), scale, acc[m]);
                    if (!CONVERTED<F>) acc[m] = fma(least, in_all(of_rows + m), acc[m]);
                }
            }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) store(out + m * COLUMNS, acc[m]);
}

// Multiplies M rows with P panels, `panel_bytes` apart, without tiles; `out` is [P, M, COLUMNS].
// With few rows, tiles would take longer than reading the memory. The order of additions is that of
// `tdpbf16ps`: one chain for the first and one for the second of each pair along k, both from zero.
// The bits are therefore the same as with tiles.
template <class F, int M, int P>
void few_rows(const float *x, const float *row_sums, const uint8_t *panel, int64_t panel_bytes, int64_t k,
              float *out) {
    constexpr int WORDS = 8 / F::GROUPS;
    const uint8_t *planes = panel, *head = panel + k / BLOCK * F::QUANT_BYTES;
    vf acc[P][M];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) acc[p][m] = vf{};
    for (int64_t unit = 0; unit < k / F::VALUES; unit++, head += F::SCALE_BYTES) {
        Scales<F> scales[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; p++) scales[p].begin(head + p * panel_bytes, 0);
        for (int block = 0; block < F::BLOCKS; block++, planes += F::QUANT_BYTES, x += BLOCK) {
#pragma GCC unroll 4
            for (int group = 0; group < F::GROUPS; group++) {
                vf even[P][M], odd[P][M];
#pragma GCC unroll 4
                for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) even[p][m] = odd[p][m] = vf{};
#pragma GCC unroll 8
                for (int i = 0; i < WORDS; i++)
#pragma GCC unroll 4
                    for (int p = 0; p < P; p++) {
                        const int g = group * WORDS + i;
                        if (i < F::BITS) __builtin_prefetch(planes + p * panel_bytes + 4096 + i * 64);
                        const vu bytes = shifted_quants<F>(planes + p * panel_bytes, g, 0);
                        auto add = [&](int at, vf *sum) {
                            vf w;
                            if constexpr (CONVERTED<F>)
                                w = converted<F>(at < 2 ? bytes << (15 - 8 * at) : bytes >> (8 * at - 15));
                            else
                                w = (vf)(((at < 2 ? bytes << (16 - 8 * at) : bytes >> (8 * at - 16)) &
                                          0x007f0000u) | 0x43000000u);
#pragma GCC unroll 4
                            for (int m = 0; m < M; m++)
                                sum[m] = fma(w, in_all(x + m * k + g * 4 + at), sum[m]);
                        };
                        add(0, even[p]);
                        add(1, even[p]);
                        add(2, odd[p]);
                        add(3, odd[p]);
                    }
                const float *of_rows = row_sums + (F::GROUPS == 1 ? 0 : 1 + group) * TILE;
#pragma GCC unroll 4
                for (int p = 0; p < P; p++) {
                    const vf scale = scales[p].of(block, group);
                    const vf least = least_of(scales[p], scale, block, group);
#pragma GCC unroll 4
                    for (int m = 0; m < M; m++) {
                        acc[p][m] = fma(even[p][m] + odd[p][m], scale, acc[p][m]);
                        if (!CONVERTED<F>) acc[p][m] = fma(least, in_all(of_rows + m), acc[p][m]);
                    }
                }
            }
            row_sums += TILE_SUMS;
        }
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) store(out + (p * M + m) * COLUMNS, acc[p][m]);
}

#else
inline bool uses_tiles(int64_t, int64_t) { return false; }
#endif

}  // namespace hr
