// Adds the output of each token's adapter to a product: shrink to the adapter's rank, then expand.
//
// Tokens are grouped by adapter. Each element of a shrunk token is one chain of additions over the
// columns of A, and each result is one chain over the ranks. A token's bits therefore do not depend
// on the other tokens.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "recording.h"
#include "simd.h"

namespace hr {

struct Part {
    int64_t first, rows;
};

struct Group {
    int64_t slot, rank, begin, end;  // begin, end: a range of the sorted tokens
};

struct Block {
    int64_t group, part, token, first;  // first: the first rank or the first column
};

constexpr int TOKENS = 4, RANKS = 4, COLUMNS = 4 * W, WIDE = 16;

template <class T>
struct Adapters {
    const T *memory;
    int64_t slot_stride, rank_stride, in;
    const Part *parts;
    int64_t num_parts;

    const T *row(int64_t slot, int64_t rank) const {
        return memory + slot * slot_stride + rank * rank_stride;
    }
    const T *shrink(int64_t slot, int64_t rank, int64_t part) const {
        return row(slot, rank) + part * in;
    }
    const T *expand(int64_t slot, int64_t rank, int64_t part) const {
        int64_t start = num_parts * in;
        for (int64_t i = 0; i < part; i++) start += parts[i].rows;
        return row(slot, rank) + start;
    }
};

// Computes shrunk[t][r] for M tokens and N ranks.
template <int M, int N, class T>
void dots(const T *const *x, const T *const *a, int64_t in, float *const *to) {
    vf acc[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) acc[m][n] = splat(0.0f);
    int64_t i = 0;
    for (; i + W <= in; i += W) {
        vf row[N];
        for (int n = 0; n < N; n++) row[n] = load(a[n] + i);
        for (int m = 0; m < M; m++) {
            vf value = load(x[m] + i);
            for (int n = 0; n < N; n++) acc[m][n] += value * row[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float total = sum(acc[m][n]);
            for (int64_t j = i; j < in; j++) total += to_float(x[m][j]) * to_float(a[n][j]);
            to[m][n] = total;
        }
}

template <int M, class T>
void dots_of_ranks(int64_t ranks, const T *const *x, const T *const *a, int64_t in,
                   float *const *to) {
    switch (ranks) {
        case 1: return dots<M, 1>(x, a, in, to);
        case 2: return dots<M, 2>(x, a, in, to);
        case 3: return dots<M, 3>(x, a, in, to);
        default: return dots<M, 4>(x, a, in, to);
    }
}

template <class T>
void shrink_block(int64_t tokens, int64_t ranks, const T *const *x, const T *const *a, int64_t in,
                  float *const *to) {
    switch (tokens) {
        case 1: return dots_of_ranks<1>(ranks, x, a, in, to);
        case 2: return dots_of_ranks<2>(ranks, x, a, in, to);
        case 3: return dots_of_ranks<3>(ranks, x, a, in, to);
        default: return dots_of_ranks<4>(ranks, x, a, in, to);
    }
}

// out[t][0:COLUMNS] += sum over r of shrunk[t][r] * b[r][0:COLUMNS], for M tokens.
template <int M, class T>
void columns(const float *const *shrunk, const T *b, int64_t stride, int64_t rank, T *const *out) {
    constexpr int V = COLUMNS / W;
    vf acc[M][V];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) acc[m][v] = splat(0.0f);
    for (int64_t r = 0; r < rank; r++) {
        vf row[V];
        for (int v = 0; v < V; v++) row[v] = load(b + r * stride + v * W);
        for (int m = 0; m < M; m++) {
            vf value = splat(shrunk[m][r]);
            for (int v = 0; v < V; v++) acc[m][v] += value * row[v];
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) store(out[m] + v * W, load(out[m] + v * W) + acc[m][v]);
}

template <class T>
void expand_block(int64_t tokens, int64_t cols, const float *const *shrunk, const T *b,
                  int64_t stride, int64_t rank, T *const *out) {
    if (cols == COLUMNS) {
        switch (tokens) {
            case 1: return columns<1>(shrunk, b, stride, rank, out);
            case 2: return columns<2>(shrunk, b, stride, rank, out);
            case 3: return columns<3>(shrunk, b, stride, rank, out);
            default: return columns<4>(shrunk, b, stride, rank, out);
        }
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t c = 0; c < cols; c++) {
            float total = 0.0f;
            for (int64_t r = 0; r < rank; r++) total += shrunk[t][r] * to_float(b[r * stride + c]);
            from_float(to_float(out[t][c]) + total, out[t] + c);
        }
}

template <class T>
void add_adapters(const Adapters<T> &adapters, const T *x, T *out, const int32_t *slots,
                  const int32_t *ranks, int64_t num_slots, int64_t tokens, int64_t out_features,
                  int64_t threads) {
    static thread_local std::vector<int64_t> order;
    static thread_local std::vector<Group> groups;
    static thread_local std::vector<Block> shrinks, expands;
    static thread_local Scratch memory;
    order.clear(), groups.clear(), shrinks.clear(), expands.clear();
    int64_t most = 0, work = 0;
    for (int64_t slot = 0; slot < num_slots; slot++) {
        int64_t begin = order.size();
        for (int64_t t = 0; t < tokens; t++)
            if (slots[t] == slot) order.push_back(t);
        int64_t end = order.size();
        if (begin == end || !ranks[slot]) {
            order.resize(begin);
            continue;
        }
        groups.push_back({slot, ranks[slot], begin, end});
        most = std::max<int64_t>(most, ranks[slot]);
        work += (end - begin) * ranks[slot];
    }
    if (groups.empty()) return;
    const int64_t width = adapters.num_parts * most;
    int64_t all_rows = 0;
    for (int64_t p = 0; p < adapters.num_parts; p++) all_rows += adapters.parts[p].rows;
    float *shrunk = (float *)memory.get(order.size() * width * sizeof(float));
    for (int64_t g = 0; g < (int64_t)groups.size(); g++)
        for (int64_t p = 0; p < adapters.num_parts; p++) {
            for (int64_t r = 0; r < groups[g].rank; r += RANKS)
                shrinks.push_back({g, p, 0, r});
            for (int64_t c = 0; c < adapters.parts[p].rows; c += COLUMNS * WIDE)
                expands.push_back({g, p, 0, c});
        }
    // If many tokens share few adapters, a block is also divided along the tokens.
    auto cut = [&](std::vector<Block> &blocks) {
        constexpr int64_t SHARE = 64;
        static thread_local std::vector<Block> made;
        made.clear();
        for (const Block &block : blocks) {
            const Group &group = groups[block.group];
            for (int64_t t = group.begin; t < group.end; t += SHARE)
                made.push_back({block.group, block.part, t, block.first});
        }
        std::swap(made, blocks);
        return SHARE;
    };
    const int64_t share = cut(shrinks);
    cut(expands);
    const int64_t *places = order.data();
    const Group *known = groups.data();
    const Block *parts_of_shrink = shrinks.data(), *parts_of_expand = expands.data();
    const Adapters<T> mine = adapters;
    parallel(shrinks.size(), threads, work * mine.in * mine.num_parts, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const Block &block = parts_of_shrink[i];
            const Group &group = known[block.group];
            const T *a[RANKS];
            const int64_t n = std::min<int64_t>(RANKS, group.rank - block.first);
            for (int64_t r = 0; r < n; r++) a[r] = mine.shrink(group.slot, block.first + r, block.part);
            const int64_t last = std::min(block.token + share, group.end);
            for (int64_t t = block.token; t < last; t += TOKENS) {
                const int64_t m = std::min<int64_t>(TOKENS, last - t);
                const T *from[TOKENS];
                float *to[TOKENS];
                for (int64_t j = 0; j < m; j++) {
                    from[j] = x + places[t + j] * mine.in;
                    to[j] = shrunk + (t + j) * width + block.part * most + block.first;
                }
                shrink_block(m, n, from, a, mine.in, to);
            }
        }
    });
    parallel(expands.size(), threads, work * all_rows, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const Block &block = parts_of_expand[i];
            const Group &group = known[block.group];
            const Part part = mine.parts[block.part];
            const T *b = mine.expand(group.slot, 0, block.part);
            const int64_t last = std::min(block.token + share, group.end);
            const int64_t end_column = std::min(block.first + COLUMNS * WIDE, part.rows);
            for (int64_t c = block.first; c < end_column; c += COLUMNS) {
                const int64_t cols = std::min<int64_t>(COLUMNS, part.rows - c);
                for (int64_t t = block.token; t < last; t += TOKENS) {
                    const int64_t m = std::min<int64_t>(TOKENS, last - t);
                    const float *from[TOKENS];
                    T *to[TOKENS];
                    for (int64_t j = 0; j < m; j++) {
                        from[j] = shrunk + (t + j) * width + block.part * most;
                        to[j] = out + places[t + j] * out_features + part.first + c;
                    }
                    expand_block(m, cols, from, b + c, mine.rank_stride, group.rank, to);
                }
            }
        }
    });
}

}  // namespace hr

using namespace hr;

// `slots` holds the slot of each token's adapter, or -1 for none; `ranks` holds the rank of each
// slot. See kernels/lora/__init__.py for `memory`, whose strides count elements, and for `parts`,
// which are pairs of first row and number of rows.
extern "C" void hr_lora_add(int64_t is_bf16, const void *x, void *out, const void *memory,
                            int64_t slot_stride, int64_t rank_stride, const void *slots,
                            const void *ranks, const void *parts, int64_t num_parts,
                            int64_t num_slots, int64_t tokens, int64_t in, int64_t out_features,
                            int64_t threads) {
    auto run = [&](auto *of) {
        using T = std::remove_pointer_t<decltype(of)>;
        Adapters<T> adapters{(const T *)memory, slot_stride, rank_stride, in, (const Part *)parts,
                             num_parts};
        add_adapters(adapters, (const T *)x, (T *)out, (const int32_t *)slots,
                     (const int32_t *)ranks, num_slots, tokens, out_features, threads);
    };
    is_bf16 ? run((bf16 *)nullptr) : run((float *)nullptr);
}
HR_RECORDABLE(hr_lora_add)
