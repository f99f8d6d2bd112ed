// RMS norm of rows, with and without a residual added first.
#include <cmath>
#include <type_traits>

#include "pool.h"
#include "simd.h"

namespace hr {

template <class T, bool ADD>
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
            const T *from = ADD ? stream : in;
            // Rounded to T before the weight, as transformers does.
            for (i = 0; i + W <= n; i += W)
                store(to + i, rounded_as(load(from + i) * factor, in) * load(weight + i));
            for (; i < n; i++)
                from_float(rounded_as(to_float(from[i]) * factor, in) * to_float(weight[i]),
                           to + i);
        }
    });
}

}  // namespace hr

using namespace hr;

extern "C" void hr_rms_norm(int64_t is_bf16, const void *x, void *residual, const void *weight,
                            void *out, int64_t rows, int64_t n, double eps, int64_t threads) {
    auto run = [&](auto *type, auto add) {
        using T = std::remove_pointer_t<decltype(type)>;
        norm_rows<T, decltype(add)::value>((const T *)x, (T *)residual, (const T *)weight,
                                           (T *)out, rows, n, (float)eps, threads);
    };
    if (is_bf16)
        residual ? run((bf16 *)0, std::true_type{}) : run((bf16 *)0, std::false_type{});
    else
        residual ? run((float *)0, std::true_type{}) : run((float *)0, std::false_type{});
}
