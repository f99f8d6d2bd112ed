// A short causal convolution over each channel, where rows are tokens. The last inputs of a
// sequence are saved into its state.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "pool.h"
#include "simd.h"

namespace hr {

constexpr int64_t MAX_WIDTH = 64;

template <class T>
struct Conv {
    const T *x;
    int64_t x_stride;
    const T *weight, *bias;
    T *state;
    const int64_t *reads, *taps, *slots;
    T *out;
    int64_t tokens, channels, width;
    bool silu;

    // Returns the row that a tap names: a new input, or an input that a sequence's state has kept.
    const T *input(int64_t tap) const {
        if (tap < tokens) return x + tap * x_stride;
        const int64_t kept = width - 1, at = tap - tokens;
        return state + (reads[at / kept] * kept + at % kept) * channels;
    }

    void token(int64_t row) const {
        const T *newest = x + row * x_stride;
        const int64_t *mine = taps + row * (width - 1);
        T *to = out + row * channels;
        const T *before[MAX_WIDTH];
        for (int64_t tap = 0; tap < width - 1; tap++) before[tap] = input(mine[tap]);
        for (int64_t c = 0; c < channels; c++) {
            const T *factors = weight + c * width;
            float total = to_float(newest[c]) * to_float(factors[width - 1]);
            for (int64_t tap = 0; tap < width - 1; tap++)
                total += to_float(before[tap][c]) * to_float(factors[tap]);
            if (bias) total += to_float(bias[c]);
            if (silu) total /= 1.0f + std::exp(-total);
            from_float(total, to + c);
        }
    }

    void save(int64_t index) const {
        const int64_t kept = width - 1;
        const int64_t *mine = taps + (tokens + index) * kept;
        for (int64_t tap = 0; tap < kept; tap++) {
            const T *from = input(mine[tap]);
            std::copy(from, from + channels, state + (slots[index] * kept + tap) * channels);
        }
    }
};

}  // namespace hr

using namespace hr;

extern "C" void hr_causal_conv(int64_t is_bf16, const void *x, int64_t x_stride, const void *weight,
                               const void *bias, void *state, const int64_t *reads,
                               const int64_t *taps, const int64_t *slots, void *out, int64_t tokens,
                               int64_t rows, int64_t channels, int64_t width, int64_t silu,
                               int64_t threads) {
    auto run = [&](auto *to) {
        using T = std::remove_pointer_t<decltype(to)>;
        const Conv<T> conv{(const T *)x, x_stride, (const T *)weight, (const T *)bias, (T *)state,
                           reads,        taps,     slots,             to,              tokens,
                           channels,     width,    silu != 0};
        parallel(rows, threads, rows * channels * width * 2, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; row++)
                row < tokens ? conv.token(row) : conv.save(row - tokens);
        });
    };
    is_bf16 ? run((bf16 *)out) : run((float *)out);
}
