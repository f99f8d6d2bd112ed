// Matrix products with a weight that was packed once into panels of NR columns (see gemm.h).
//
// A panel is read in one forward sweep, so that memory bandwidth is the only limit for one token.
// With more tokens, one block of rows after another reuses the panel from the L2 cache.
#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "gemm.h"
#include "pool.h"
#include "recording.h"
#include "unary.h"

namespace hr {

constexpr int64_t K_WORDS = 2560;             // words of a panel per sweep: 640 KiB of L2
constexpr int PREFETCH = 16 * NR;             // prefetch distance in words: 4 KiB with AVX-512

template <class T>
void pack_panels(const T *weight, uint32_t *packed, int64_t in, int64_t out, int64_t threads) {
    const int64_t words = in / Words<T>::PER_WORD, panels = (out + NR - 1) / NR;
    parallel(panels, threads, panels * words * NR, [=](int64_t begin, int64_t end) {
        for (int64_t panel = begin; panel < end; panel++)
            for (int64_t col = 0; col < NR; col += 16) {
                const uint32_t *rows[16];
                int64_t first = panel * NR + col;
                int count = (int)std::max<int64_t>(0, std::min<int64_t>(16, out - first));
                for (int i = 0; i < count; i++)
                    rows[i] = (const uint32_t *)weight + (first + i) * words;
                transpose16(rows, count, words, packed + panel * words * NR + col, NR);
            }
    });
}

template <class T>
void unpack_panels(const uint32_t *packed, T *weight, int64_t in, int64_t out, int64_t threads) {
    const int64_t words = in / Words<T>::PER_WORD;
    parallel(out, threads, out * words, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const uint32_t *from = packed + row / NR * words * NR + row % NR;
            uint32_t *to = (uint32_t *)weight + row * words;
            for (int64_t i = 0; i < words; i++) to[i] = from[i * NR];
        }
    });
}

template <class A, class T>
void finish_as(const float *tile, int64_t ld, int64_t rows, int64_t cols, const T *bias, T *out,
               int64_t out_stride) {
    for (int64_t r = 0; r < rows; r++) {
        const float *from = tile + r * ld;
        T *to = out + r * out_stride;
        int64_t i = 0;
        for (; i + W <= cols; i += W)
            store(to + i, A::of(bias ? load(from + i) + load(bias + i) : load(from + i)));
        if (i == cols) continue;
        // A tile has whole vectors of sums, but the bias and the result end at the last column.
        float last[W];
        std::memcpy(last, from + i, sizeof last);
        for (int64_t j = i; bias && j < cols; j++) last[j - i] += to_float(bias[j]);
        store(last, A::of(load(last)));
        for (int64_t j = i; j < cols; j++) from_float(last[j - i], to + j);
    }
}

// Adds the bias to the sums, applies the activation, and writes the results.
template <class T>
void finish(int64_t activation, const float *tile, int64_t ld, int64_t rows, int64_t cols,
            const T *bias, T *out, int64_t out_stride) {
    with_unary(activation, [&](auto unary) {
        finish_as<decltype(unary)>(tile, ld, rows, cols, bias, out, out_stride);
    });
}

#if defined(HR_AMX)
template <class O>
bool linear_tiles(const bf16 *x, const uint32_t *packed, const O *bias, O *out, int64_t tokens,
                  int64_t in, int64_t out_features, int64_t activation, int64_t threads) {
    const int64_t words = in / 2, panels = (out_features + NR - 1) / NR;
    if (words % 16 || !amx_allowed()) return false;
    const uint32_t *rows = (const uint32_t *)x;
    static thread_local Scratch memory;
    uint32_t *tail = nullptr;
    if (tokens > 16 && tokens % 16) {
        tail = (uint32_t *)memory.get(16 * words * 4);
        std::memset(tail, 0, 16 * words * 4);
        std::memcpy(tail, rows + tokens / 16 * 16 * words, tokens % 16 * words * 4);
    }
    parallel(panels, threads, panels * NR * words * 2, [=](int64_t begin, int64_t end) {
        amx_configure(std::min<int64_t>(16, tokens));
        for (int64_t panel = begin; panel < end; panel++) {
            int64_t cols = std::min<int64_t>(NR, out_features - panel * NR);
            amx_panel(rows, tail, tokens, packed + panel * words * NR, words,
                      [=](int64_t row, int64_t n, const float *tile) {
                          finish(activation, tile, NR, n, cols, bias ? bias + panel * NR : nullptr,
                                 out + row * out_features + panel * NR, out_features);
                      });
        }
        _tile_release();
    });
    return true;
}
#else
template <class O>
bool linear_tiles(const bf16 *, const uint32_t *, const O *, O *, int64_t, int64_t, int64_t,
                  int64_t, int64_t) {
    return false;
}
#endif
bool linear_tiles(const float *, const uint32_t *, const float *, float *, int64_t, int64_t,
                  int64_t, int64_t, int64_t) {
    return false;
}

template <class T, class O>
void linear_rows(const T *x, const uint32_t *packed, const O *bias, O *out, int64_t tokens,
                 int64_t in, int64_t out_features, int64_t activation, int64_t threads) {
    const int64_t words = in / Words<T>::PER_WORD, panels = (out_features + NR - 1) / NR;
    const uint32_t *rows = (const uint32_t *)x;
    if (tokens == 0) return;
    if (linear_tiles(x, packed, bias, out, tokens, in, out_features, activation, threads)) return;
    const int64_t unit = tokens <= 2 ? 2 : 1;  // panels that are read together
    auto sweep = [=](int64_t begin, int64_t end) {
        begin *= unit;
        end = std::min(end * unit, panels);
        static thread_local Scratch memory;
        const bool cut = words > K_WORDS && tokens > MR;
        alignas(64) float block_tile[MR * NR];
        float *tile = cut ? (float *)memory.get(tokens * NR * sizeof(float)) : block_tile;
        int64_t panel = begin;
        // With one or two rows a panel has few sums, and each sum is a chain of dependent
        // additions. Two panels at a time give the CPU more independent chains.
        for (; tokens <= 2 && panel + 2 <= end; panel += 2) {
            const uint32_t *weight = packed + panel * words * NR;
            if (tokens == 1)
                block<T, 1, NV, 2, false, PREFETCH>(rows, words, weight, NR, words * NR, words,
                                                    tile, 2 * NR);
            else
                block<T, 2, NV, 2, false, PREFETCH>(rows, words, weight, NR, words * NR, words,
                                                    tile, 2 * NR);
            finish(activation, tile, 2 * NR, tokens, std::min<int64_t>(2 * NR, out_features - panel * NR),
                   bias ? bias + panel * NR : nullptr, out + panel * NR, out_features);
        }
        for (; panel < end; panel++) {
            const uint32_t *weight = packed + panel * words * NR;
            int64_t cols = std::min<int64_t>(NR, out_features - panel * NR);
            const O *panel_bias = bias ? bias + panel * NR : nullptr;
            O *to = out + panel * NR;
            if (!cut) {
                for (int64_t row = 0, n; row < tokens; row += n) {
                    n = next_rows(tokens - row);
                    const uint32_t *from = rows + row * words;
                    if (row == 0)
                        rows_of_block<T, NV, false, PREFETCH>(n, from, words, weight, NR, words,
                                                              tile, NR);
                    else
                        rows_of_block<T, NV, false, 0>(n, from, words, weight, NR, words, tile, NR);
                    finish(activation, tile, NR, n, cols, panel_bias, to + row * out_features,
                           out_features);
                }
                continue;
            }
            int64_t parts = (words + K_WORDS - 1) / K_WORDS;
            for (int64_t part = 0; part < parts; part++) {
                int64_t first = words * part / parts, count = words * (part + 1) / parts - first;
                const uint32_t *b = weight + first * NR;
                for (int64_t row = 0, n; row < tokens; row += n) {
                    n = next_rows(tokens - row);
                    const uint32_t *from = rows + row * words + first;
                    if (part == 0)
                        rows_of_block<T, NV, false, 0>(n, from, words, b, NR, count, tile + row * NR, NR);
                    else
                        rows_of_block<T, NV, true, 0>(n, from, words, b, NR, count, tile + row * NR, NR);
                }
            }
            finish(activation, tile, NR, tokens, cols, panel_bias, to, out_features);
        }
    };
    parallel((panels + unit - 1) / unit, threads, panels * NR * words * 2, sweep);
}

}  // namespace hr

using namespace hr;

extern "C" int64_t hr_panel_columns(void) { return NR; }

extern "C" void hr_linear_pack(int64_t is_bf16, const void *weight, void *packed, int64_t in,
                               int64_t out, int64_t threads) {
    if (is_bf16)
        pack_panels((const bf16 *)weight, (uint32_t *)packed, in, out, threads);
    else
        pack_panels((const float *)weight, (uint32_t *)packed, in, out, threads);
}

extern "C" void hr_linear_unpack(int64_t is_bf16, const void *packed, void *weight, int64_t in,
                                 int64_t out, int64_t threads) {
    if (is_bf16)
        unpack_panels((const uint32_t *)packed, (bf16 *)weight, in, out, threads);
    else
        unpack_panels((const uint32_t *)packed, (float *)weight, in, out, threads);
}

// `kind`: 0 is float32, 1 is bfloat16, 2 is float32 with a bfloat16 weight. For 2, rows are rounded
// to bfloat16, and products, sums, bias and result are float32. `activation` is a number of
// unary.h.
extern "C" void hr_linear(int64_t kind, const void *x, const void *packed, const void *bias,
                          void *out, int64_t tokens, int64_t in, int64_t out_features,
                          int64_t activation, int64_t threads) {
    auto run = [&](auto *rows, auto *to) {
        using O = std::remove_pointer_t<decltype(to)>;
        linear_rows(rows, (const uint32_t *)packed, (const O *)bias, to, tokens, in, out_features,
                    activation, threads);
    };
    if (kind == 0) return run((const float *)x, (float *)out);
    if (kind == 1) return run((const bf16 *)x, (bf16 *)out);
    static thread_local Scratch memory;
    bf16 *rounded = (bf16 *)memory.get(tokens * in * sizeof(bf16));
    const float *wide = (const float *)x;
    parallel(tokens, threads, tokens * in, [=](int64_t begin, int64_t end) {
        int64_t i = begin * in, last = end * in;
        for (; i + W <= last; i += W) store(rounded + i, load(wide + i));
        for (; i < last; i++) from_float(wide[i], rounded + i);
    });
    run((const bf16 *)rounded, (float *)out);
}
HR_RECORDABLE(hr_linear)
