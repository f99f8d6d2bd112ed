// The activation of a gate, times `up`, for rows of [gate | up].
#include <cmath>

#include "pool.h"
#include "recording.h"
#include "simd.h"

namespace hr {

// The result is gate * sigmoid(slope(gate)) * up.
struct Silu {
    template <class V>
    static V slope(V gate) {
        return gate;
    }
};

struct GeluTanh {
    // (1 + tanh(z)) / 2 is sigmoid(2 z), so the constant of z is doubled here: 2 sqrt(2 / pi).
    template <class V>
    static V slope(V gate) {
        return 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    }
};

template <class A, class T>
void activated_rows(const T *x, T *out, int64_t rows, int64_t n, int64_t threads) {
    // One element takes several times as long as a copy, so the work is multiplied by 4.
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

// Multiplies rows with the sigmoid of gates: one gate per row (`is_shared`), or one per element.
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
HR_RECORDABLE(hr_act_and_mul)

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
HR_RECORDABLE(hr_sigmoid_mul)
