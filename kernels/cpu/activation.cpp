// silu(gate) * up over rows of [gate | up].
#include <cmath>

#include "pool.h"
#include "simd.h"

namespace hr {

template <class T>
void silu_rows(const T *x, T *out, int64_t rows, int64_t n, int64_t threads) {
    // An element costs several times what a copy does, hence the factor on the work.
    parallel(rows, threads, rows * n * 4, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const T *gate = x + row * 2 * n, *up = gate + n;
            T *to = out + row * n;
            int64_t i = 0;
            for (; i + W <= n; i += W) {
                vf g = load(gate + i);
                store(to + i, g / (1.0f + exp2(g * -LOG2E)) * load(up + i));
            }
            for (; i < n; i++) {
                float g = to_float(gate[i]);
                from_float(g / (1.0f + std::exp(-g)) * to_float(up[i]), to + i);
            }
        }
    });
}

}  // namespace hr

using namespace hr;

extern "C" void hr_silu_and_mul(int64_t is_bf16, const void *x, void *out, int64_t rows,
                                int64_t n, int64_t threads) {
    if (is_bf16)
        silu_rows((const bf16 *)x, (bf16 *)out, rows, n, threads);
    else
        silu_rows((const float *)x, (float *)out, rows, n, threads);
}
