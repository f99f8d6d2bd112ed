// RMS norm and layer norm of rows, with and without a residual added first.
#include <cmath>
#include <type_traits>

#include "norm.h"
#include "pool.h"
#include "recording.h"

namespace hr {

template <class T, bool ADD, bool ZERO_CENTERED>
void norm_rows(const T *x, T *residual, const T *weight, T *out, int64_t rows, int64_t n,
               float eps, int64_t threads) {
    parallel(rows, threads, rows * n, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T *in = x + row * n;
            T *stream = ADD ? residual + row * n : nullptr;
            T *to = out + row * n;
            vf squares0 = {}, squares1 = {};
            float tail = 0;
            int64_t i = 0;
            auto element = [&](int64_t at) {
                vf v = load(in + at);
                if (ADD) {
                    v = rounded_as(v + load(stream + at), in);
                    store(stream + at, v);
                }
                return v;
            };
            for (; i + 2 * W <= n; i += 2 * W) {
                vf a = element(i), b = element(i + W);
                squares0 += a * a;
                squares1 += b * b;
            }
            for (; i + W <= n; i += W) {
                vf a = element(i);
                squares0 += a * a;
            }
            for (; i < n; i++) {
                float v = to_float(in[i]);
                if (ADD) {
                    from_float(v + to_float(stream[i]), stream + i);
                    v = to_float(stream[i]);
                }
                tail += v * v;
            }
            float mean = (sum(squares0 + squares1) + tail) / (float)n;
            float factor = 1.0f / std::sqrt(mean + eps);
            scale_row<ZERO_CENTERED>(ADD ? stream : in, to, weight, factor, n);
        }
    });
}

// If `ADD`, `residual` becomes the sum of `residual` and `x`. The variance is taken around the
// mean, as in torch.
template <class T, bool ADD>
void layer_norm_rows(const T *x, T *residual, const T *weight, const T *bias, T *out, int64_t rows,
                     int64_t n, float eps, int64_t threads) {
    parallel(rows, threads, rows * n, [=](int64_t begin, int64_t end) {
        const int64_t whole = n / W * W;
        for (int64_t row = begin; row < end; row++) {
            const T *in = x + row * n;
            T *stream = ADD ? residual + row * n : nullptr;
            T *to = out + row * n;
            if (ADD) {
                for (int64_t i = 0; i < whole; i += W) store(stream + i, load(in + i) + load(stream + i));
                for (int64_t i = whole; i < n; i++)
                    from_float(to_float(in[i]) + to_float(stream[i]), stream + i);
                in = stream;
            }
            vf sums = {}, squares = {};
            float tail = 0;
            for (int64_t i = 0; i < whole; i += W) sums += load(in + i);
            for (int64_t i = whole; i < n; i++) tail += to_float(in[i]);
            const float mean = (sum(sums) + tail) / (float)n;
            tail = 0;
            for (int64_t i = 0; i < whole; i += W) {
                vf away = load(in + i) - mean;
                squares += away * away;
            }
            for (int64_t i = whole; i < n; i++) {
                float away = to_float(in[i]) - mean;
                tail += away * away;
            }
            const float factor = 1.0f / std::sqrt((sum(squares) + tail) / (float)n + eps);
            for (int64_t i = 0; i < whole; i += W) {
                vf unit = (load(in + i) - mean) * factor * load(weight + i);
                store(to + i, bias ? unit + load(bias + i) : unit);
            }
            for (int64_t i = whole; i < n; i++) {
                float unit = (to_float(in[i]) - mean) * factor * to_float(weight[i]);
                from_float(bias ? unit + to_float(bias[i]) : unit, to + i);
            }
        }
    });
}

}  // namespace hr

using namespace hr;

extern "C" void hr_layer_norm(int64_t is_bf16, const void *x, void *residual, const void *weight,
                              const void *bias, void *out, int64_t rows, int64_t n, double eps,
                              int64_t threads) {
    auto run = [&](auto *to, auto add) {
        using T = std::remove_pointer_t<decltype(to)>;
        layer_norm_rows<T, decltype(add)::value>((const T *)x, (T *)residual, (const T *)weight,
                                                 (const T *)bias, to, rows, n, (float)eps, threads);
    };
    auto run_add = [&](auto *to) {
        residual ? run(to, std::true_type{}) : run(to, std::false_type{});
    };
    is_bf16 ? run_add((bf16 *)out) : run_add((float *)out);
}
HR_RECORDABLE(hr_layer_norm)

extern "C" void hr_rms_norm(int64_t is_bf16, const void *x, void *residual, const void *weight,
                            void *out, int64_t rows, int64_t n, double eps,
                            int64_t zero_centered, int64_t threads) {
    auto run = [&](auto *type, auto add, auto centered) {
        using T = std::remove_pointer_t<decltype(type)>;
        norm_rows<T, decltype(add)::value, decltype(centered)::value>(
            (const T *)x, (T *)residual, (const T *)weight, (T *)out, rows, n, (float)eps, threads);
    };
    auto run_add = [&](auto *type, auto centered) {
        residual ? run(type, std::true_type{}, centered) : run(type, std::false_type{}, centered);
    };
    auto run_type = [&](auto centered) {
        is_bf16 ? run_add((bf16 *)0, centered) : run_add((float *)0, centered);
    };
    zero_centered ? run_type(std::true_type{}) : run_type(std::false_type{});
}
HR_RECORDABLE(hr_rms_norm)
