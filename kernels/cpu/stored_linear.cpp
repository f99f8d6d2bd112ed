// Matrix products with weights in stored blocks (see stored.h).
//
// With AMX, quants are widened and rows are rounded to bfloat16 (see stored_tiles.h). Without AMX,
// rows are rounded to 8 bits, block by block. Sums within a block are then integers. Blocks are
// added in float32, in order, by explicit fused additions, so that all instruction sets without AMX
// give the same bits. The bits of a row are the same with any number of rows. Weights of 16 and 32
// bits are always multiplied with float32 rows.
#include <algorithm>

#include "pool.h"
#include "recording.h"
#include "stored_tiles.h"

namespace hr {

constexpr int64_t MAX_TOKENS = 512;  // tokens quantized at once, whose rows stay in the cache
constexpr int64_t GROUP_BYTES = 256 << 10;  // bytes of panels that are used for all rows in turn
constexpr int64_t WIDE_BYTES = 1 << 20;     // the same for widened panels
#if defined(__AVX512F__)
constexpr int ROWS = 8;  // rows of a register block
#elif !defined(HR_DOT) && !defined(HR_PAIRS)
constexpr int ROWS = 1;
#else
constexpr int ROWS = 4;
#endif
constexpr int VECTORS = COLUMNS / W;
constexpr int PREFETCH = 4096;  // prefetch distance in a panel in bytes, if rows wait for memory

template <class F>
constexpr bool AS_SIGNED = F::WIDE &&WIDE_IS_SIGNED;

// Returns word `g` of a block in the form that a product needs.
template <class F>
inline vu operand(const uint8_t *planes, int g, int64_t at) {
    if constexpr (AS_SIGNED<F>)
        return signed_quants<F, vu>(planes, g, at);
    else
        return shifted_quants<F>(planes, g, at);
}

constexpr int log2_of(int n) { return n > 1 ? 1 + log2_of(n / 2) : 0; }

#if defined(HR_PAIRS)
// The number of words whose products are added in 16 bits: each word adds two products of -127 to
// 127 with at most MOST.
template <class F>
constexpr int words_in_pairs() {
    constexpr int MOST = F::TABLE == 2 ? 12 : F::WIDE ? 128 : (1 << F::BITS) - 1;
    const int fit = std::min(32767 / (MOST * 127 * 2), 8 / F::GROUPS);
    return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}
#endif

// Adds the integer products of `M` rows and `V` vectors of columns over one group of a block.
template <class F, int M, int V>
inline void group_sums(const uint8_t *planes, int64_t at, int group, const int8_t *bytes, int64_t ldb,
                       const RowBlock *blocks, int64_t ldr, vi (&sum)[V][M]) {
    constexpr int WORDS = 8 / F::GROUPS;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
        vi start = {};
        if constexpr (F::OFFSET != 0 && !AS_SIGNED<F>)
            start = splat_word(&blocks[m * ldr].negated[F::GROUPS == 1 ? 0 : 1 + group])
                    << log2_of(F::OFFSET);
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sum[v][m] = start;
    }
#if defined(HR_PAIRS)
    constexpr int STEP = words_in_pairs<F>();
#pragma GCC unroll 8
    for (int first = 0; first < WORDS; first += STEP) {
        vi part[V][M];
#pragma GCC unroll 8
        for (int i = 0; i < STEP; i++) {
            const int g = group * WORDS + first + i;
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                vu w = operand<F>(planes, g, at + v * W * 4);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    vi two = pairs<AS_SIGNED<F>>(w, splat_word(bytes + m * ldb + g * 4));
                    part[v][m] = i == 0 ? two : add_pairs(part[v][m], two);
                    // GCC would otherwise compute all products before the first sum, and spill
                    // them.
                    if constexpr (STEP == 8) asm("" : "+x"(part[v][m]));
                }
            }
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) sum[v][m] += join_pairs(part[v][m]);
    }
#else
#pragma GCC unroll 8
    for (int i = 0; i < WORDS; i++) {
        const int g = group * WORDS + i;
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) {
            vu w = operand<F>(planes, g, at + v * W * 4);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
                sum[v][m] = dot<AS_SIGNED<F>>(sum[v][m], w, splat_word(bytes + m * ldb + g * 4));
        }
    }
#endif
}

// Multiplies `M` rows with `V` vectors of a panel's columns, beginning with the vector `first`;
// `tile` is [M, COLUMNS].
template <class F, int M, int V>
inline void block_columns(const uint8_t *panel, int64_t k, int first, const int8_t *bytes,
                          const RowBlock *blocks, float *tile) {
    const int64_t num_blocks = k / BLOCK, column = first * W;
    const uint8_t *planes = panel, *head = panel + num_blocks * F::QUANT_BYTES;
    vf acc[V][M];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) acc[v][m] = vf{};
    for (int64_t unit = 0; unit < k / F::VALUES; unit++, head += F::SCALE_BYTES) {
        Scales<F> scales[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) scales[v].begin(head, column + v * W);
        for (int block = 0; block < F::BLOCKS; block++) {
            if constexpr (M <= 2) {
#pragma GCC unroll 8
                for (int i = 0; i < F::BITS; i++) __builtin_prefetch(planes + PREFETCH + i * 64);
            }
#pragma GCC unroll 2
            for (int group = 0; group < F::GROUPS; group++) {
                vi sum[V][M];
                group_sums<F, M, V>(planes, column * 4, group, bytes, k, blocks, num_blocks, sum);
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) {
                    vf scale = scales[v].of(block, group);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        const RowBlock &row = blocks[m * num_blocks];
                        acc[v][m] = fma(__builtin_convertvector(sum[v][m], vf),
                                        scale * in_all(&row.scale), acc[v][m]);
                    }
                    if constexpr (F::MIN) {
                        vf min = scales[v].min_of(block, group);
#pragma GCC unroll 8
                        for (int m = 0; m < M; m++) {
                            const RowBlock &row = blocks[m * num_blocks];
                            const float &of_row = row.sums[F::GROUPS == 1 ? 0 : 1 + group];
                            acc[v][m] = fma(min, in_all(&of_row), acc[v][m]);
                        }
                    }
                }
            }
            planes += F::QUANT_BYTES;
            bytes += BLOCK;
            blocks++;
        }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) store(tile + m * COLUMNS + column + v * W, acc[v][m]);
}

template <class F, int M>
inline void block_rows(const uint8_t *panel, int64_t k, const int8_t *bytes, const RowBlock *blocks,
                       float *tile) {
    // With one or two rows, all columns are computed at once, so that the panel is read from memory
    // only once. More rows need the registers, and find the panel in the cache.
    // Sums in 16 bits need few registers if they hold a whole block.
#if defined(HR_PAIRS)
    constexpr int V = M <= 2 || words_in_pairs<F>() == 8 ? VECTORS : 1;
#else
    constexpr int V = M <= 2 ? VECTORS : 1;
#endif
    for (int first = 0; first < VECTORS; first += V)
        block_columns<F, M, V>(panel, k, first, bytes, blocks, tile);
}

// For forms of 16 and 32 bits: the columns of one k lie side by side, and P panels are computed at
// once.
inline vf load(const uint16_t *half) { return load_half(half); }

template <class N, int M, int P>
inline void block_numbers(const uint8_t *panel, int64_t panel_bytes, int64_t k, const float *x,
                          float *tile) {
    vf acc[P][VECTORS][M];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) acc[p][v][m] = vf{};
    for (int64_t i = 0; i < k; i++)
#pragma GCC unroll 4
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                vf w = load((const N *)(panel + p * panel_bytes) + i * COLUMNS + v * W);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
                    acc[p][v][m] = fma(w, in_all(x + m * k + i), acc[p][v][m]);
            }
#pragma GCC unroll 4
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) store(tile + (p * M + m) * COLUMNS + v * W, acc[p][v][m]);
}

// Calls f(std::integral_constant<int, n>) for n, which is a power of 2 up to ROWS. There are few
// such n, because each n is separate code for every form, and all of it is compiled on the user's
// machine.
template <class F>
inline void with_rows(int64_t n, const F &f) {
    if constexpr (ROWS > 1)
        if (n == 1) return f(std::integral_constant<int, 1>{});
    if constexpr (ROWS > 2)
        if (n == 2) return f(std::integral_constant<int, 2>{});
    if constexpr (ROWS > 4)
        if (n == 4) return f(std::integral_constant<int, 4>{});
    f(std::integral_constant<int, ROWS>{});
}

// Returns how many of `left` rows to take next.
inline int64_t next_of_rows(int64_t left) {
    int64_t rows = ROWS;
    while (rows > left) rows /= 2;
    return rows;
}

// One stored matrix of a weight. Python passes the same fields as 64-bit numbers.
struct Part {
    int64_t form;
    const uint8_t *panels;
    int64_t rows;    // rows of the stored matrix, which are columns of the result
    int64_t column;  // first column in the result
    int64_t count() const { return (rows + COLUMNS - 1) / COLUMNS; }
};

// The destination of a product: bfloat16 or float32 rows, and an optional bias in float32.
struct Result {
    void *out;
    int64_t is_bf16, stride;
    const float *bias;

    // Writes `rows` rows of a tile to the columns of panel `index`.
    void write(const Part &part, int64_t index, int64_t row, int64_t rows, const float *tile) const {
        const int64_t column = part.column + index * COLUMNS;
        const int64_t columns = std::min<int64_t>(COLUMNS, part.rows - index * COLUMNS);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = (row + r) * stride + column;
            if (is_bf16)
                put((bf16 *)out + at, tile + r * COLUMNS, column, columns);
            else
                put((float *)out + at, tile + r * COLUMNS, column, columns);
        }
    }
    template <class T>
    void put(T *to, const float *from, int64_t column, int64_t columns) const {
        int64_t i = 0;
        for (; i + W <= columns; i += W)
            store(to + i, bias ? hr::load(from + i) + hr::load(bias + column + i) : hr::load(from + i));
        for (; i < columns; i++) from_float(bias ? from[i] + bias[column + i] : from[i], to + i);
    }
};

// The rows of a product: bytes with their blocks, and float32 for the forms that need it.
struct Rows {
    int64_t tokens, k;
    const int8_t *bytes;     // [tokens, k]
    const RowBlock *blocks;  // [tokens, k / 32]
    const float *numbers;    // [tokens, k]
    const uint16_t *tiled;   // by tiles, see stored_tiles.h; rows past `tokens` are undefined
    const float *sums;       // sums of the rows in `tiled`
    const float *rounded;    // [FEW, k], if there are at most FEW tokens
};

template <class F>
void sweep_blocks(const Part &part, int64_t begin, int64_t end, const Rows &x, const Result &result) {
    const int64_t bytes = F::panel_bytes(x.k), num_blocks = x.k / BLOCK;
    const int64_t group = x.tokens <= ROWS ? 1 : std::max<int64_t>(1, GROUP_BYTES / bytes);
    alignas(64) float tile[ROWS * COLUMNS];
    for (int64_t first = begin; first < end; first += group)
        for (int64_t row = 0, n; row < x.tokens; row += n) {
            n = next_of_rows(x.tokens - row);
            for (int64_t i = first; i < std::min(end, first + group); i++) {
                with_rows(n, [&](auto rows) {
                    block_rows<F, rows()>(part.panels + i * bytes, x.k, x.bytes + row * x.k,
                                          x.blocks + row * num_blocks, tile);
                });
                result.write(part, i, row, n, tile);
            }
        }
}

template <class N>
void sweep_numbers(const Part &part, int64_t begin, int64_t end, const Rows &x, const Result &result) {
    const int64_t bytes = (x.k * COLUMNS * (int64_t)sizeof(N) + 63) / 64 * 64;
    const int64_t group = x.tokens <= ROWS ? 1 : std::max<int64_t>(1, GROUP_BYTES / bytes);
    // One row has few sums, each a chain of dependent additions; several panels at a time give more
    // chains.
    constexpr int TOGETHER = W == 16 ? 4 : 2;
    alignas(64) float tile[ROWS * COLUMNS * TOGETHER];
    for (; x.tokens == 1 && begin + TOGETHER <= end; begin += TOGETHER) {
        block_numbers<N, 1, TOGETHER>(part.panels + begin * bytes, bytes, x.k, x.numbers, tile);
        for (int p = 0; p < TOGETHER; p++) result.write(part, begin + p, 0, 1, tile + p * COLUMNS);
    }
    for (int64_t first = begin; first < end; first += group)
        for (int64_t row = 0, n; row < x.tokens; row += n) {
            n = next_of_rows(x.tokens - row);
            for (int64_t i = first; i < std::min(end, first + group); i++) {
                with_rows(n, [&](auto rows) {
                    block_numbers<N, rows(), 1>(part.panels + i * bytes, bytes, x.k,
                                                x.numbers + row * x.k, tile);
                });
                result.write(part, i, row, n, tile);
            }
        }
}

#if defined(HR_STORED_TILES)
template <class F>
void sweep_tiles(const Part &part, int64_t begin, int64_t end, const Rows &x, const Result &result) {
    const int64_t bytes = F::panel_bytes(x.k), num_blocks = x.k / BLOCK;
    const int64_t words = num_blocks * WIDE_BLOCK;
    alignas(64) float tile[TILE * COLUMNS];
    if (x.tokens <= FEW) {
        // One row has two chains of dependent additions; several panels at a time give more chains.
        constexpr int P = 4;
        for (; x.tokens == 1 && begin + P <= end; begin += P) {
            few_rows<F, 1, P>(x.rounded, x.sums, part.panels + begin * bytes, bytes, x.k, tile);
            for (int p = 0; p < P; p++) result.write(part, begin + p, 0, 1, tile + p * COLUMNS);
        }
        for (; begin < end; begin++) {
            few_rows<F, FEW, 1>(x.rounded, x.sums, part.panels + begin * bytes, bytes, x.k, tile);
            result.write(part, begin, 0, x.tokens, tile);
        }
        return;
    }
    configure_blocks<F>(std::min<int64_t>(TILE, x.tokens));
    if (x.tokens <= TILE) {
        alignas(64) uint32_t wide[2 * F::BLOCKS * WIDE_BLOCK];
        for (int64_t i = begin; i < end; i++) {
            const uint8_t *panel = part.panels + i * bytes;
            if (x.tokens <= 8)
                tile_rows<F, 8, true>(x.tiled, x.sums, panel, wide, x.k, tile);
            else
                tile_rows<F, 16, true>(x.tiled, x.sums, panel, wide, x.k, tile);
            result.write(part, i, 0, x.tokens, tile);
        }
    } else {
        const int64_t group = std::max<int64_t>(1, WIDE_BYTES / (words * 4));
        static thread_local Scratch memory;
        uint32_t *wide = (uint32_t *)memory.get(std::min(group, end - begin) * words * 4);
        for (int64_t first = begin; first < end; first += group) {
            const int64_t last = std::min(end, first + group);
            for (int64_t i = first; i < last; i++)
                widen_blocks<F>(part.panels + i * bytes, num_blocks, wide + (i - first) * words);
            amx_fence(wide);
            for (int64_t row = 0; row < x.tokens; row += TILE)
                for (int64_t i = first; i < last; i++) {
                    tile_rows<F, 16, false>(x.tiled + row * x.k, x.sums + row / TILE * num_blocks * TILE_SUMS,
                                            part.panels + i * bytes, wide + (i - first) * words, x.k, tile);
                    result.write(part, i, row, std::min<int64_t>(TILE, x.tokens - row), tile);
                }
        }
    }
    _tile_release();
}
#endif

void sweep(const Part &part, int64_t begin, int64_t end, const Rows &x, const Result &result) {
#if defined(HR_STORED_TILES)
    if (uses_tiles(part.form, x.k))
        return with_form(part.form, [&](auto f) { sweep_tiles<decltype(f)>(part, begin, end, x, result); });
#endif
    switch (part.form) {
        case F32: return sweep_numbers<float>(part, begin, end, x, result);
        case F16: return sweep_numbers<uint16_t>(part, begin, end, x, result);
        case BF16: return sweep_numbers<bf16>(part, begin, end, x, result);
    }
    with_form(part.form, [&](auto f) { sweep_blocks<decltype(f)>(part, begin, end, x, result); });
}

// Rounds a block of a row, and writes it in the order of a tile.
template <class T>
void put_in_tile(const T *x, bf16 *to, float *sums) {
    float rounded[BLOCK], halves[2] = {0.0f, 0.0f};
    for (int64_t i = 0; i < BLOCK; i += W) store(rounded + i, rounded_as(load(x + i), (const bf16 *)nullptr));
    for (int64_t i = 0; i < BLOCK; i += 4) {
        const float values[4] = {rounded[i], rounded[i + 2], rounded[i + 1], rounded[i + 3]};
        for (int j = 0; j < 4; j++) from_float(values[j], to + i + j);
    }
    // Each half is summed in four chains, because one chain would be as long as a block.
    for (int half = 0; half < 2; half++) {
        float part[4] = {};
        for (int i = 0; i < 16; i++) part[i % 4] += rounded[half * 16 + i];
        halves[half] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    sums[0] = halves[0] + halves[1];
    sums[TILE] = halves[0];
    sums[2 * TILE] = halves[1];
}

template <class T>
void linear_stored(const T *x, const Part *parts, int64_t num_parts, const Result &result,
                   int64_t tokens, int64_t k, int64_t threads) {
    bool any_blocks = false, any_numbers = false, any_tiles = false;
    int64_t panels = 0;
    for (int64_t i = 0; i < num_parts; i++) {
        const int64_t form = parts[i].form;
        (uses_tiles(form, k) ? any_tiles : form <= BF16 ? any_numbers : any_blocks) = true;
        panels += parts[i].count();
    }
    const int64_t num_blocks = (k + BLOCK - 1) / BLOCK, row_tiles = (tokens + TILE - 1) / TILE;
    auto rounded = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t size_bytes = any_blocks ? rounded(tokens * k) : 0;
    const int64_t size_blocks = any_blocks ? rounded(tokens * num_blocks * sizeof(RowBlock)) : 0;
    const int64_t size_tiles = any_tiles ? row_tiles * num_blocks * TILE_BLOCK * 2 : 0;
    const int64_t size_sums = any_tiles ? row_tiles * num_blocks * TILE_SUMS * 4 : 0;
    const bool few = any_tiles && tokens <= FEW;
    const int64_t size_rounded = few ? FEW * k * 4 : 0;
    const bool convert = any_numbers && sizeof(T) != 4;
    const int64_t size_numbers = convert ? tokens * k * 4 : 0;
    static thread_local Scratch memory;
    char *at = memory.get(size_bytes + size_blocks + size_tiles + size_sums + size_rounded + size_numbers + 64);
    int8_t *bytes = (int8_t *)at;
    RowBlock *blocks = (RowBlock *)(at + size_bytes);
    bf16 *tiled = (bf16 *)(at + size_bytes + size_blocks);
    float *sums = (float *)(at + size_bytes + size_blocks + size_tiles);
    float *values = (float *)((char *)sums + size_sums);
    float *numbers = (float *)((char *)values + size_rounded);
    parallel(tokens, threads, tokens * k, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T *from = x + row * k;
            for (int64_t i = 0; any_blocks && i < num_blocks; i++)
                quantize_block(from + i * BLOCK, bytes + row * k + i * BLOCK, blocks + row * num_blocks + i);
            const int64_t tile = row / TILE * num_blocks, r = row % TILE;
            for (int64_t i = 0; any_tiles && i < num_blocks; i++)
                put_in_tile(from + i * BLOCK, tiled + (tile + i) * TILE_BLOCK + r * BLOCK,
                            sums + (tile + i) * TILE_SUMS + r);
            for (int64_t i = 0; few && i < k; i += W)
                store(values + row * k + i, rounded_as(load(from + i), (const bf16 *)nullptr));
            for (int64_t i = 0; convert && i < k; i++) numbers[row * k + i] = to_float(from[i]);
        }
    });
    const Rows rows{tokens, k, bytes, blocks, convert ? numbers : (const float *)x, (const uint16_t *)tiled, sums, values};
    parallel(panels, threads, panels * COLUMNS * k, [&](int64_t begin, int64_t end) {
        int64_t first = 0;  // first panel of the part, among the panels of all parts
        for (int64_t i = 0; i < num_parts; first += parts[i].count(), i++) {
            const int64_t from = std::max(begin, first), to = std::min(end, first + parts[i].count());
            if (from < to) sweep(parts[i], from - first, to - first, rows, result);
        }
    });
}

}  // namespace hr

using namespace hr;

// `x` and `out` are float32 or bfloat16, `parts` are `Part`s, and `bias` is float32 or null.
extern "C" void hr_stored_linear(int64_t is_bf16, const void *x, const void *parts, int64_t num_parts,
                                 const void *bias, void *out, int64_t tokens, int64_t in,
                                 int64_t out_features, int64_t threads) {
    const int64_t size = is_bf16 ? 2 : 4;
    for (int64_t row = 0; row < tokens; row += MAX_TOKENS) {
        const int64_t count = std::min(MAX_TOKENS, tokens - row);
        const char *from = (const char *)x + row * in * size;
        const Result result{(char *)out + row * out_features * size, is_bf16, out_features,
                            (const float *)bias};
        if (is_bf16)
            linear_stored((const bf16 *)from, (const Part *)parts, num_parts, result, count, in, threads);
        else
            linear_stored((const float *)from, (const Part *)parts, num_parts, result, count, in, threads);
    }
}
HR_RECORDABLE(hr_stored_linear)
