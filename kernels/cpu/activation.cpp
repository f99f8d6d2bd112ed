// A gate's activation times up, over rows of [gate | up].
#include <cmath>

#include "pool.h"
#include "simd.h"

namespace hr {

// The result is gate times the sigmoid of `slope(gate)` times up.
struct Silu {
    template <class V>
    static V slope(V gate) {
        return gate;
    }
};

struct GeluTanh {
    // (1 + tanh(z)) / 2 is the sigmoid of 2 z, here with 2 sqrt(2 / pi) for the constant of z.
    template <class V>
    static V slope(V gate) {
        return 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    }
};

template <class A, class T>
void activated_rows(const T *x, T *out, int64_t rows, int64_t n, int64_t threads) {
    // An element costs several times what a copy does, hence the factor on the work.
    parallel(rows, threads, rows * n * 4, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T *gate = x + row * 2 * n, *up = gate + n;
            T *to = out + row * n;
            int64_t i = 0;
            for (; i + W <= n; i += W) {
                vf g = load(gate + i);
                store(to + i, g / (1.0f + exp2(A::slope(g) * -LOG2E)) * load(up + i));
            }
            for (; i < n; i++) {
                float g = to_float(gate[i]);
                from_float(g / (1.0f + std::exp(-A::slope(g))) * to_float(up[i]), to + i);
            }
        }
    });
}

// A row has one gate for all elements, or one for each.
template <class T>
void gated_by_sigmoid(const T *gates, int64_t gate_stride, bool is_shared, const T *x, T *out,
                      int64_t rows, int64_t n, int64_t threads) {
    parallel(rows, threads, rows * n * 4, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T *gate = gates + row * gate_stride, *in = x + row * n;
            T *to = out + row * n;
            for (int64_t i = 0; i < n; i++) {
                const float g = to_float(gate[is_shared ? 0 : i]);
                from_float(to_float(in[i]) / (1.0f + std::exp(-g)), to + i);
            }
        }
    });
}

}  // namespace hr

using namespace hr;

extern "C" void hr_act_and_mul(int64_t is_bf16, int64_t is_gelu_tanh, const void *x, void *out,
                               int64_t rows, int64_t n, int64_t threads) {
    auto run = [&](auto activation) {
        using A = decltype(activation);
        if (is_bf16)
            activated_rows<A>((const bf16 *)x, (bf16 *)out, rows, n, threads);
        else
            activated_rows<A>((const float *)x, (float *)out, rows, n, threads);
    };
    is_gelu_tanh ? run(GeluTanh{}) : run(Silu{});
}

extern "C" void hr_sigmoid_mul(int64_t is_bf16, const void *gates, int64_t gate_stride,
                               int64_t is_shared, const void *x, void *out, int64_t rows, int64_t n,
                               int64_t threads) {
    if (is_bf16)
        gated_by_sigmoid((const bf16 *)gates, gate_stride, is_shared, (const bf16 *)x, (bf16 *)out,
                         rows, n, threads);
    else
        gated_by_sigmoid((const float *)gates, gate_stride, is_shared, (const float *)x,
                         (float *)out, rows, n, threads);
}
