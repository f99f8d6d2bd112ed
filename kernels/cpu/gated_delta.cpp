// The gated delta rule. One thread computes one head of one sequence, token by token.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace hr {

struct DeltaSizes {
    int64_t seqs, tokens, key_heads, ratio, key_dim, value_dim, gate_span;
};

// Scales `from` to unit length, multiplies it with `scale`, and writes it to `to`.
template <class T>
void unit(const T *from, float *to, int64_t n, float scale) {
    float squares = 0;
    for (int64_t i = 0; i < n; i++) {
        to[i] = to_float(from[i]);
        squares += to[i] * to[i];
    }
    const float factor = scale / std::sqrt(squares + 1e-6f);
    for (int64_t i = 0; i < n; i++) to[i] *= factor;
}

// Multiplies `matrix` with `decay`, and writes its product with `key` to `seen`.
inline void decay_and_read(float *matrix, const float *key, float decay, float *seen, int64_t rows,
                           int64_t n) {
    for (int64_t d = 0; d < n; d++) seen[d] = 0;
    for (int64_t i = 0; i < rows; i++) {
        float *row = matrix + i * n;
        for (int64_t d = 0; d < n; d++) {
            row[d] *= decay;
            seen[d] += row[d] * key[i];
        }
    }
}

// Adds the outer product of `key` and `change` to `matrix`, and writes the product of `matrix` with
// `query` to `out`.
inline void change_and_read(float *matrix, const float *key, const float *change,
                            const float *query, float *out, int64_t rows, int64_t n) {
    for (int64_t d = 0; d < n; d++) out[d] = 0;
    for (int64_t i = 0; i < rows; i++) {
        float *row = matrix + i * n;
        for (int64_t d = 0; d < n; d++) {
            row[d] += key[i] * change[d];
            out[d] += row[d] * query[i];
        }
    }
}

template <class T>
void gated_delta(const T *qkv, const T *gates, int64_t gate_stride, const float *decay,
                 const float *dt_bias, float *state, const int32_t *bounds, const int64_t *reads,
                 const int32_t *save_bounds, const int64_t *save_ends, const int64_t *save_slots,
                 T *out, DeltaSizes size, int64_t threads) {
    const int64_t heads = size.key_heads * size.ratio, n = size.value_dim, rows = size.key_dim;
    const int64_t keys = size.key_heads * rows, width = 2 * keys + heads * n, cells = rows * n;
    const float scale = 1.0f / std::sqrt((float)rows);
    const int64_t work = size.tokens * heads * cells;
    parallel(size.seqs * heads, threads, work, [=](int64_t begin, int64_t end) {
        std::vector<float> matrix(cells), query(rows), key(rows), change(n), read(n);
        for (int64_t item = begin; item < end; item++) {
            const int64_t seq = item / heads, head = item % heads;
            const int64_t group = head / size.ratio, span = size.gate_span;
            const int64_t place = head / span * 2 * span + head % span;
            const float *from = state + (reads[seq] * heads + head) * cells;
            std::copy(from, from + cells, matrix.begin());
            int64_t save = save_bounds[seq];
            for (int64_t t = bounds[seq]; t < bounds[seq + 1]; t++) {
                const T *row = qkv + t * width;
                const T *gate = gates + t * gate_stride + place;
                const T *value = row + 2 * keys + head * n;
                unit(row + group * rows, query.data(), rows, scale);
                unit(row + keys + group * rows, key.data(), rows, 1.0f);
                const float strength = 1.0f / (1.0f + std::exp(-to_float(gate[0])));
                const float time = to_float(gate[span]) + dt_bias[head];
                const float soft = time > 20.0f ? time : std::log1p(std::exp(time));
                decay_and_read(matrix.data(), key.data(), std::exp(decay[head] * soft), read.data(),
                               rows, n);
                for (int64_t d = 0; d < n; d++)
                    change[d] = (to_float(value[d]) - read[d]) * strength;
                change_and_read(matrix.data(), key.data(), change.data(), query.data(), read.data(),
                                rows, n);
                for (int64_t d = 0; d < n; d++) from_float(read[d], out + (t * heads + head) * n + d);
                for (; save < save_bounds[seq + 1] && save_ends[save] == t + 1; save++) {
                    float *to = state + (save_slots[save] * heads + head) * cells;
                    std::copy(matrix.begin(), matrix.end(), to);
                }
            }
        }
    });
}

}  // namespace hr

using namespace hr;

extern "C" void hr_gated_delta(int64_t is_bf16, const void *qkv, const void *gates,
                               int64_t gate_stride, const float *decay, const float *dt_bias,
                               float *state, const int32_t *bounds, const int64_t *reads,
                               const int32_t *save_bounds, const int64_t *save_ends,
                               const int64_t *save_slots, void *out, int64_t seqs, int64_t tokens,
                               int64_t key_heads, int64_t ratio, int64_t key_dim,
                               int64_t value_dim, int64_t gate_span, int64_t threads) {
    const DeltaSizes size{seqs, tokens, key_heads, ratio, key_dim, value_dim, gate_span};
    auto run = [&](auto *to) {
        using T = std::remove_pointer_t<decltype(to)>;
        gated_delta<T>((const T *)qkv, (const T *)gates, gate_stride, decay, dt_bias, state, bounds,
                       reads, save_bounds, save_ends, save_slots, to, size, threads);
    };
    is_bf16 ? run((bf16 *)out) : run((float *)out);
}
