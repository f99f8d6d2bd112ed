// Mamba 2's recurrence. One thread computes one head of one sequence, token by token.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace hr {

struct Mamba2Sizes {
    int64_t seqs, tokens, groups, heads, head_dim, state_dim;
};

template <class T>
void widen(const T *from, float *to, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = to_float(from[i]);
}

// Multiplies `matrix` with `decay`, adds the outer product of `b` and `added`, and writes the
// product of `matrix` with `c` to `out`.
inline void change_and_read(float *matrix, float decay, const float *b, const float *added,
                            const float *c, float *out, int64_t rows, int64_t n) {
    for (int64_t d = 0; d < n; d++) out[d] = 0;
    for (int64_t i = 0; i < rows; i++) {
        float *row = matrix + i * n;
        for (int64_t d = 0; d < n; d++) {
            row[d] = row[d] * decay + b[i] * added[d];
            out[d] += row[d] * c[i];
        }
    }
}

template <class T>
void mamba2(const T *xbc, const T *dt, int64_t dt_stride, const float *of_heads, float *state,
            const int32_t *bounds, const int64_t *reads, const int32_t *save_bounds,
            const int64_t *save_ends, const int64_t *save_slots, T *out, Mamba2Sizes size,
            int64_t threads) {
    const int64_t heads = size.heads, n = size.head_dim, rows = size.state_dim, cells = rows * n;
    const int64_t inputs = heads * n, width = inputs + 2 * size.groups * rows;
    const float *log_decays = of_heads, *biases = of_heads + heads, *skips = of_heads + 2 * heads;
    const int64_t work = size.tokens * heads * cells;
    parallel(size.seqs * heads, threads, work, [=](int64_t begin, int64_t end) {
        std::vector<float> matrix(cells), b(rows), c(rows), x(n), added(n), read(n);
        for (int64_t item = begin; item < end; item++) {
            const int64_t seq = item / heads, head = item % heads;
            const int64_t group = head / (heads / size.groups);
            const float decay = -std::exp(log_decays[head]);
            const float *from = state + (reads[seq] * heads + head) * cells;
            std::copy(from, from + cells, matrix.begin());
            int64_t save = save_bounds[seq];
            for (int64_t t = bounds[seq]; t < bounds[seq + 1]; t++) {
                const T *row = xbc + t * width;
                widen(row + head * n, x.data(), n);
                widen(row + inputs + group * rows, b.data(), rows);
                widen(row + inputs + (size.groups + group) * rows, c.data(), rows);
                const float sum = to_float(dt[t * dt_stride + head]) + biases[head];
                const float time = sum > 20.0f ? sum : std::log1p(std::exp(sum));
                for (int64_t d = 0; d < n; d++) added[d] = x[d] * time;
                change_and_read(matrix.data(), std::exp(decay * time), b.data(),
                                added.data(), c.data(), read.data(), rows, n);
                for (int64_t d = 0; d < n; d++)
                    from_float(read[d] + skips[head] * x[d], out + t * inputs + head * n + d);
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

extern "C" void hr_mamba2(int64_t is_bf16, const void *xbc, const void *dt, int64_t dt_stride,
                          const float *of_heads, float *state, const int32_t *bounds,
                          const int64_t *reads, const int32_t *save_bounds,
                          const int64_t *save_ends, const int64_t *save_slots, void *out,
                          int64_t seqs, int64_t tokens, int64_t groups, int64_t heads,
                          int64_t head_dim, int64_t state_dim, int64_t threads) {
    const Mamba2Sizes size{seqs, tokens, groups, heads, head_dim, state_dim};
    auto run = [&](auto *to) {
        using T = std::remove_pointer_t<decltype(to)>;
        mamba2<T>((const T *)xbc, (const T *)dt, dt_stride, of_heads, state, bounds, reads,
                  save_bounds, save_ends, save_slots, to, size, threads);
    };
    is_bf16 ? run((bf16 *)out) : run((float *)out);
}
