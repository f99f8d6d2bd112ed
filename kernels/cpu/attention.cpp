// Attention over the pages of a KV cache or over packed texts, with online softmax: blocks of
// queries meet blocks of keys.
//
// The query heads that share a key head are rows of one small product, so decode and prefill use
// the same code with few or many rows. The keys and values of a block are repacked into scratch
// memory that fits into the cache (see gemm.h). The KV caches themselves are read once per query
// block and never copied.
//
// Queries and results (S) may be wider than products (T): float32 with bfloat16 products. Keys and
// values (C) may be kept in fewer bits (see kept.h).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "gemm.h"
#include "kept.h"
#include "pool.h"
#include "recording.h"

namespace hr {

constexpr int64_t KEYS = 64;          // keys of a block
constexpr int64_t TARGET_ROWS = 192;  // query rows of a block: its scratch fits into 1 MiB of L2
constexpr int64_t PART = 256;         // keys for which a separate task is worthwhile
constexpr int64_t MAX_DIM = 576;  // a latent of 512 elements and 64 rotated elements
const float MINUS_INF = -std::numeric_limits<float>::infinity();

struct Sizes {
    // How many keys a query sees before and after its own position; -1 for no limit.
    int64_t window_left, window_right;
    int64_t heads, kv_heads, dim, q_stride;
    float scale_log2;
    // The number of keys that each query sees, if `window_right` does not define it. It never
    // decreases within a sequence.
    const int32_t *key_ends = nullptr;
    // A raw score becomes `cap_out * tanh(score * cap_in)`; if `cap_in` is 0, scores are not
    // changed.
    float cap_in = 0, cap_out = 0;
    // `[heads]`: one extra score per head, which has no value and only enlarges a row's sum.
    const float *sinks = nullptr;
};

// The location of keys and values: in pages, or, without a page table, in columns of packed rows.
template <class C>
struct Keys {
    const C *k, *v;
    const int32_t *page_table;
    int64_t page_size, max_pages, row_stride;
};

// The queries [query, query + queries) of a sequence, for one key head and the keys [key, key_end).
struct Task {
    int64_t seq, kv_head, query, queries, first_position, key, key_end;
    int64_t first_token;  // the sequence's first token, among all queries
};

// The unfinished softmax of one query row over part of its keys.
struct Partial {
    float max, sum;
};

inline size_t round64(size_t n) { return (n + 63) / 64 * 64; }

// Zeros that replace missing keys, because the cache may hold a NaN there.
alignas(64) const uint32_t ZEROS[MAX_DIM] = {};

// Packs two rows of bfloat16 into words (row 0 in the low half), or copies a row of floats.
inline void pack_values(const float *const *rows, int64_t count, int64_t dim, uint32_t *out) {
    for (int64_t i = 0; i < count; i++) std::memcpy(out + i * dim, rows[i], dim * 4);
}
inline void pack_values(const bf16 *const *rows, int64_t count, int64_t dim, uint32_t *out) {
    for (int64_t i = 0; i < count; i += 2) {
        uint32_t *to = out + i / 2 * dim;
        for (int64_t d = 0; d < dim; d += W) {
            vu words = __builtin_convertvector(load_as<vh>(rows[i] + d), vu);
            words |= __builtin_convertvector(load_as<vh>(rows[i + 1] + d), vu) << 16;
            std::memcpy(to + d, &words, sizeof words);
        }
    }
}

// The number of words along k that a product takes at once. Words up to the next multiple of it
// must be 0.
template <class T>
inline int64_t k_step() {
#if defined(HR_AMX)
    if (std::is_same_v<T, bf16> && amx_allowed()) return 16;
#endif
    return 1;
}

template <class T, bool ACCUMULATE>
inline void multiply(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t ldb, int64_t k,
                     float *c, int64_t ldc, int64_t m, int64_t n) {
#if defined(HR_AMX)
    if (std::is_same_v<T, bf16> && amx_allowed() && k % 16 == 0) {
        amx_product<ACCUMULATE>(a, lda, b, ldb, k, c, ldc, m, n);
        return;
    }
#endif
    product<T, ACCUMULATE>(a, lda, b, ldb, k, c, ldc, m, n);
}

template <class T, class S, class C = S>
struct Attention {
    static constexpr bool IS_CONVERTED = !std::is_same_v<T, C>;

    Sizes s;
    const S *q;
    Keys<C> cache;
    S *out;

    int64_t group() const { return s.heads / s.kv_heads; }

    size_t scratch_bytes(int64_t rows) const {
        return round64(rows * s.dim * sizeof(T)) + round64(rows * KEYS * 4) +
               round64(rows * KEYS * sizeof(T)) + 2 * round64(KEYS * s.dim * sizeof(T)) +
               (IS_CONVERTED ? round64(KEYS * s.dim * sizeof(T)) : 0) + result_bytes(rows);
    }
    // The size of one set of unfinished results: sums `[rows, dim]`, then the state of each row.
    size_t result_bytes(int64_t rows) const {
        return round64(rows * s.dim * 4) + round64(rows * sizeof(Partial));
    }
    Partial *states(char *results, int64_t rows) const {
        return (Partial *)(results + round64(rows * s.dim * 4));
    }

    // Finds the rows of the keys [base + begin, base + end) of a sequence, and of their values. All
    // other rows of the block point to zeros.
    void locate(const Task &t, int64_t base, int64_t begin, int64_t end, const C **keys,
                const C **values) const {
        for (int64_t i = 0; i < begin; i++) keys[i] = values[i] = (const C *)ZEROS;
        for (int64_t i = end; i < KEYS; i++) keys[i] = values[i] = (const C *)ZEROS;
        if (cache.page_table == nullptr) {
            for (int64_t i = begin; i < end; i++) {
                int64_t at = (t.first_token + base + i) * cache.row_stride + t.kv_head * s.dim;
                keys[i] = cache.k + at;
                values[i] = cache.v + at;
            }
            return;
        }
        const int32_t *pages = cache.page_table + t.seq * cache.max_pages;
        for (int64_t i = begin; i < end;) {
            int64_t page = pages[(base + i) / cache.page_size];
            int64_t offset = (base + i) % cache.page_size;
            int64_t run = std::min(end - i, cache.page_size - offset);
            const int64_t width = row_elements<C>(s.dim);
            int64_t at = ((page * s.kv_heads + t.kv_head) * cache.page_size + offset) * width;
            for (int64_t j = 0; j < run; j++, i++, at += width) {
                keys[i] = cache.k + at;
                values[i] = cache.v + at;
            }
        }
    }

    // Fetches rows into the second cache. Pages are small and lie anywhere, so that the hardware
    // fetches too little ahead.
    void fetch(const C *const *rows, int64_t count) const {
        const int64_t bytes = row_elements<C>(s.dim) * (int64_t)sizeof(C);
        for (int64_t i = 0; i < count; i++)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)rows[i] + at, 0, 2);
    }

    // Returns the rows as T. Rows that need conversion are written to `space`.
    const T **converted(const C **rows, int64_t count, T *space, const T **found) const {
        if constexpr (!IS_CONVERTED) return rows;
        for (int64_t i = 0; i < count; i++) {
            convert(rows[i], space + i * s.dim, s.dim);
            found[i] = space + i * s.dim;
        }
        return found;
    }

    // Turns one row of scores into probabilities relative to the row's running maximum. Returns the
    // factor by which the earlier sums must be multiplied.
    float softmax_row(const float *scores, T *probs, Partial &state, int64_t low, int64_t high,
                      int64_t width) const {
        float capped[KEYS], masked[KEYS];
        if (s.cap_in != 0) {
            for (int64_t i = 0; i < width; i += W) {
                // tanh(x) = 1 - 2 / (e^2x + 1)
                vf power = exp2(load(scores + i) * (s.cap_in * 2 * LOG2E));
                store(capped + i, s.cap_out - 2 * s.cap_out / (power + 1.0f));
            }
            scores = capped;
        }
        if (low > 0 || high < width) {
            for (int64_t i = 0; i < width; i++)
                masked[i] = i >= low && i < high ? scores[i] : MINUS_INF;
            scores = masked;
        }
        vf top = load(scores);
        for (int64_t i = W; i < width; i += W) top = max(top, load(scores + i));
        float row_max = std::max(state.max, max_of(top) * s.scale_log2);
        // If all keys so far are masked, any finite number avoids inf - inf.
        float origin = row_max == MINUS_INF ? 0.0f : row_max;
        vf total = {};
        for (int64_t i = 0; i < width; i += W) {
            vf p = exp2(load(scores + i) * s.scale_log2 - origin);
            total += p;
            store(probs + i, p);
        }
        float factor = state.max == row_max    ? 1.0f
                       : state.max == MINUS_INF ? 0.0f
                                                : std::exp2(state.max - origin);
        state.sum = state.sum * factor + sum(total);
        state.max = row_max;
        return factor;
    }

    // Attends to the keys [from, to) of a task's range, and writes unnormalized sums to `results`.
    // `query` is memory for the query rows, `scratch` for everything else.
    void part(const Task &t, int64_t from, int64_t to, const T *query, char *scratch,
              char *results) const {
        const int64_t g = group(), rows = t.queries * g, dim = s.dim;
        constexpr int64_t PER = Words<T>::PER_WORD;
        float *scores = (float *)scratch;
        scratch += round64(rows * KEYS * 4);
        T *probs = (T *)scratch;
        scratch += round64(rows * KEYS * sizeof(T));
        uint32_t *packed_k = (uint32_t *)scratch;
        uint32_t *packed_v = (uint32_t *)(scratch + round64(KEYS * dim * sizeof(T)));
        T *space = (T *)(scratch + 2 * round64(KEYS * dim * sizeof(T)));
        float *acc = (float *)results;
        Partial *state = states(results, rows);
        std::memset(acc, 0, rows * dim * sizeof(float));
        for (int64_t r = 0; r < rows; r++) state[r] = {MINUS_INF, 0.0f};

        const C *all_keys[2][KEYS], *all_values[2][KEYS];
        const T *found[KEYS];
        auto find = [&](int64_t base, int64_t turn) {
            const int64_t begin = std::max<int64_t>(0, from - base), end = std::min(KEYS, to - base);
            locate(t, base, begin, end, all_keys[turn], all_values[turn]);
            fetch(all_keys[turn] + begin, end - begin);
            fetch(all_values[turn] + begin, end - begin);
        };
        const int64_t first_base = from / KEYS * KEYS;
        find(first_base, 0);
        for (int64_t base = first_base, turn = 0; base < to; base += KEYS, turn ^= 1) {
            if (base + KEYS < to) find(base + KEYS, turn ^ 1);
            int64_t begin = std::max<int64_t>(0, from - base), end = std::min(KEYS, to - base);
            const C **keys = all_keys[turn], **values = all_values[turn];
            // Queries too far before the block's first key do not see the block. With a window,
            // queries too far after the block's last key do not see it either.
            int64_t first = 0, last = t.queries;
            if (s.key_ends != nullptr)
                while (first < last && s.key_ends[t.query + first] <= base + begin) first++;
            else if (s.window_right >= 0)
                first = std::max<int64_t>(0, base + begin - s.window_right - t.first_position);
            if (s.window_left >= 0)
                last = std::min(last, base + end + s.window_left - t.first_position);
            if (first >= last) continue;
            // Scores of columns past `end` are never used, whatever the packed keys hold there.
            int64_t columns = (end + 15) / 16 * 16;
            const T **rows_k = converted(keys, columns, space, found);
            for (int64_t i = 0; i < columns; i += 16)
                transpose16((const uint32_t *const *)(rows_k + i), 16, dim / PER, packed_k + i, KEYS);
            const int64_t step = k_step<T>() * PER, filled = (end + step - 1) / step * step;
            pack_values(converted(values, filled, space, found), filled, dim, packed_v);
            // The number of probabilities that the products read: all columns that are multiplied.
            const int64_t width = std::max(columns, filled);

            int64_t row = first * g, n = (last - first) * g;
            multiply<T, false>((const uint32_t *)(query + row * dim), dim / PER, packed_k, KEYS,
                              dim / PER, scores + row * KEYS, KEYS, n, columns);
            for (int64_t r = row; r < row + n; r++) {
                int64_t position = t.first_position + r / g;
                int64_t high = end;
                if (s.key_ends != nullptr)
                    high = std::min<int64_t>(end, s.key_ends[t.query + r / g] - base);
                else if (s.window_right >= 0)
                    high = std::min(end, position + s.window_right + 1 - base);
                int64_t low = s.window_left >= 0 ? position - s.window_left - base : 0;
                float factor = softmax_row(scores + r * KEYS, probs + r * KEYS, state[r], low, high,
                                           width);
                if (factor != 1.0f) scale_row(acc + r * dim, factor);
            }
            // Keys past the last have values of 0 and probability 0.
            multiply<T, true>((const uint32_t *)(probs + row * KEYS), KEYS / PER, packed_v, dim,
                              filled / PER, acc + row * dim, dim, n, dim);
        }
    }

    void scale_row(float *row, float factor) const {
        for (int64_t d = 0; d < s.dim; d += W) store(row + d, load(row + d) * factor);
    }

    // Adds the results of a later part to the results of the parts before it.
    void absorb(const Task &t, char *results, const char *later) const {
        const int64_t rows = t.queries * group();
        Partial *state = states(results, rows);
        const Partial *more = states((char *)later, rows);
        for (int64_t r = 0; r < rows; r++) {
            if (more[r].max == MINUS_INF && more[r].sum == 0) continue;
            float top = std::max(state[r].max, more[r].max);
            float keep = state[r].max == MINUS_INF ? 0.0f : std::exp2(state[r].max - top);
            float take = more[r].max == MINUS_INF ? 1.0f : std::exp2(more[r].max - top);
            state[r] = {top, state[r].sum * keep + more[r].sum * take};
            float *sums = (float *)results + r * s.dim;
            const float *extra = (const float *)later + r * s.dim;
            for (int64_t d = 0; d < s.dim; d += W)
                store(sums + d, load(sums + d) * keep + load(extra + d) * take);
        }
    }

    void gather_queries(const Task &t, T *query) const {
        const int64_t width = group() * s.dim;
        for (int64_t i = 0; i < t.queries; i++)
            convert(q + (t.query + i) * s.q_stride + t.kv_head * width, query + i * width, width);
    }

    // Attends to the keys [from, to), part by part; `scratch` has scratch_bytes bytes.
    void run(const Task &t, int64_t from, int64_t to, char *scratch, char *results) const {
        const int64_t rows = t.queries * group();
        T *query = (T *)scratch;
        char *later = scratch + round64(rows * s.dim * sizeof(T));
        scratch = later + result_bytes(rows);
        gather_queries(t, query);
        for (int64_t begin = from; begin < to;) {
            int64_t end = std::min(to, (begin / PART + 1) * PART);
            part(t, begin, end, query, scratch, begin == from ? results : later);
            if (begin != from) absorb(t, results, later);
            begin = end;
        }
    }

    S *out_row(const Task &t, int64_t row) const {
        int64_t token = t.query + row / group(), head = t.kv_head * group() + row % group();
        return out + (token * s.heads + head) * s.dim;
    }

    void write(const Task &t, char *results) const {
        const int64_t rows = t.queries * group();
        const Partial *state = states(results, rows);
        for (int64_t r = 0; r < rows; r++) {
            const float *sums = (const float *)results + r * s.dim;
            float total = state[r].sum;
            if (s.sinks != nullptr)
                total += std::exp2(s.sinks[t.kv_head * group() + r % group()] * LOG2E -
                                   state[r].max);
            float inverse = 1.0f / total;
            S *to = out_row(t, r);
            for (int64_t d = 0; d < s.dim; d += W) store(to + d, load(sums + d) * inverse);
        }
    }
};

// Splits the step into tasks, and sorts them with the most expensive first.
void plan(const Sizes &s, const int32_t *seq_lens, const int32_t *qo_indptr, int64_t seqs,
          std::vector<Task> &tasks) {
    const int64_t block = std::max<int64_t>(1, TARGET_ROWS / (s.heads / s.kv_heads));
    for (int64_t i = 0; i < seqs; i++) {
        int64_t begin = qo_indptr[i], queries = qo_indptr[i + 1] - begin, keys = seq_lens[i];
        for (int64_t at = 0; at < queries; at += block) {
            int64_t n = std::min(block, queries - at), position = keys - queries + at;
            int64_t key = s.window_left < 0 ? 0 : std::max<int64_t>(0, position - s.window_left);
            int64_t key_end = s.key_ends != nullptr ? s.key_ends[begin + at + n - 1]
                              : s.window_right < 0  ? keys
                                                    : std::min(keys, position + n + s.window_right);
            for (int64_t head = 0; head < s.kv_heads; head++)
                tasks.push_back({i, head, begin + at, n, position, key, key_end, begin});
        }
    }
    auto cost = [](const Task &t) { return t.queries * (t.key_end - t.key); };
    std::stable_sort(tasks.begin(), tasks.end(),
                     [&](const Task &a, const Task &b) { return cost(a) > cost(b); });
}

// Makes every part of every task a separate work item, for few tasks that do not divide evenly
// among the threads.
template <class T, class S, class C>
void attend_in_parts(const Attention<T, S, C> &a, const std::vector<Task> &tasks, size_t scratch_bytes,
                     size_t result_bytes, int64_t threads) {
    std::vector<int64_t> owner, first(1, 0);
    for (size_t i = 0; i < tasks.size(); i++) {
        int64_t parts = (tasks[i].key_end + PART - 1) / PART - tasks[i].key / PART;
        owner.insert(owner.end(), parts, (int64_t)i);
        first.push_back(first.back() + parts);
    }
    static thread_local Scratch shared;
    char *results = shared.get(result_bytes * owner.size());
    for_each((int64_t)owner.size(), threads, [&](int64_t i) {
        static thread_local Scratch memory;
        const Task &t = tasks[owner[i]];
        int64_t part = t.key / PART + i - first[owner[i]];
        a.run(t, std::max(t.key, part * PART), std::min(t.key_end, (part + 1) * PART),
              memory.get(scratch_bytes), results + i * result_bytes);
    });
    for (size_t i = 0; i < tasks.size(); i++) {
        char *sums = results + first[i] * result_bytes;
        for (int64_t j = first[i] + 1; j < first[i + 1]; j++)
            a.absorb(tasks[i], sums, results + j * result_bytes);
        a.write(tasks[i], sums);
    }
}

template <class T, class S, class C>
void attend(const Attention<T, S, C> &a, const std::vector<Task> &tasks, int64_t threads) {
    int64_t count = (int64_t)tasks.size(), rows = 0, elements = 0;
    bool decode = true;
    for (const Task &t : tasks) {
        decode = decode && t.queries == 1;
        rows = std::max(rows, t.queries * a.group());
        elements += (t.queries * a.group() + 8) * (t.key_end - t.key) * a.s.dim / 4;
    }
    const size_t scratch_bytes = a.scratch_bytes(rows), result_bytes = a.result_bytes(rows);
    auto whole = [&](int64_t i) {
        static thread_local Scratch memory;
        char *scratch = memory.get(scratch_bytes + result_bytes);
        char *results = scratch + scratch_bytes;
        a.run(tasks[i], tasks[i].key, tasks[i].key_end, scratch, results);
        a.write(tasks[i], results);
    };
    if (threads <= 1 || elements < (1 << 15)) {
        for (int64_t i = 0; i < count; i++) whole(i);
    } else if (decode && count < 4 * threads && count % threads) {
        attend_in_parts(a, tasks, scratch_bytes, result_bytes, threads);
    } else {
        for_each(count, threads, whole);
    }
}

}  // namespace hr

using namespace hr;

// `kept` is the format of the caches, a number of `Kept`.
extern "C" void hr_paged_attention(int64_t is_bf16, int64_t kept, const void *q, int64_t q_stride,
                                   const void *k_cache, const void *v_cache,
                                   const int32_t *page_table, int64_t max_pages,
                                   const int32_t *seq_lens, const int32_t *qo_indptr,
                                   int64_t seqs, int64_t heads, int64_t kv_heads, int64_t dim,
                                   int64_t page_size, double scale, int64_t window_left,
                                   const int32_t *key_ends, double softcap, const float *sinks,
                                   void *out, int64_t threads) {
    Sizes s{window_left, 0, heads, kv_heads, dim, q_stride, (float)(scale * LOG2E), key_ends};
    if (softcap != 0) s.cap_in = (float)(scale / softcap), s.cap_out = (float)(softcap / scale);
    s.sinks = sinks;
    std::vector<Task> tasks;
    plan(s, seq_lens, qo_indptr, seqs, tasks);
    auto run = [&](auto *typed) {
        using T = std::remove_pointer_t<decltype(typed)>;
        with_kept<T>(kept, [&](auto *cached) {
            using C = std::remove_pointer_t<decltype(cached)>;
            Keys<C> keys{(const C *)k_cache, (const C *)v_cache, page_table, page_size, max_pages, 0};
            attend(Attention<T, T, C>{s, (const T *)q, keys, typed}, tasks, threads);
        });
    };
    is_bf16 ? run((bf16 *)out) : run((float *)out);
}
HR_RECORDABLE(hr_paged_attention)

// `indptr` holds the bounds of the texts. `kind`: 0 is float32, 1 is bfloat16, 2 is float32 with
// products in bfloat16.
extern "C" void hr_encoder_attention(int64_t kind, const void *qkv, const int32_t *indptr,
                                     int64_t texts, int64_t heads, int64_t kv_heads, int64_t dim,
                                     double scale, int64_t window, void *out, int64_t threads) {
    const int64_t stride = (heads + 2 * kv_heads) * dim;
    Sizes s{window, window, heads, kv_heads, dim, stride, (float)(scale * LOG2E)};
    std::vector<int32_t> lengths(texts);
    for (int64_t i = 0; i < texts; i++) lengths[i] = indptr[i + 1] - indptr[i];
    std::vector<Task> tasks;
    plan(s, lengths.data(), indptr, texts, tasks);
    auto run = [&](auto *as, auto *typed) {
        using T = std::remove_pointer_t<decltype(as)>;
        using S = std::remove_pointer_t<decltype(typed)>;
        const S *q = (const S *)qkv, *k = q + heads * dim;
        Keys<S> keys{k, k + kv_heads * dim, nullptr, 0, 0, stride};
        attend(Attention<T, S>{s, q, keys, typed}, tasks, threads);
    };
    if (kind == 1) return run((bf16 *)nullptr, (bf16 *)out);
    kind == 2 ? run((bf16 *)nullptr, (float *)out) : run((float *)nullptr, (float *)out);
}
