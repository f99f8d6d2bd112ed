// Sets the logits of the tokens that a grammar forbids to minus infinity.
#include <cstdint>
#include <limits>

#include "pool.h"

namespace hr {

static void mask_row(float *logits, const uint32_t *words, int64_t vocab) {
    constexpr float NEVER = -std::numeric_limits<float>::infinity();
    for (int64_t first = 0; first < vocab; first += 32) {
        uint32_t word = words[first / 32];
        if (word == 0xffffffffu) continue;
        int64_t width = vocab - first < 32 ? vocab - first : 32;
        float *at = logits + first;
        // There is no branch per token, so that the loop becomes vector instructions.
        for (int64_t i = 0; i < width; i++) at[i] = (word >> i) & 1 ? at[i] : NEVER;
    }
}

}  // namespace hr

// `stride` is the distance of rows of `logits`. `row_index` gives the row of each row of `bitmask`;
// if it is null, the rows are consecutive.
extern "C" void hr_token_bitmask(float *logits, const uint32_t *bitmask, const int64_t *row_index,
                                 int64_t rows, int64_t vocab, int64_t stride, int64_t words,
                                 int64_t threads) {
    hr::parallel(rows, threads, rows * vocab, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            int64_t line = row_index ? row_index[row] : row;
            hr::mask_row(logits + line * stride, bitmask + row * words, vocab);
        }
    });
}
