// Finds the largest logit of each row, among those that a grammar's mask allows.
#include <cstdint>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace hr {

constexpr int BLOCK = 32;  // logits under one word of a mask
constexpr uint32_t ALL = 0xffffffffu;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
static_assert(BLOCK % W == 0);

// The best value of each lane so far. Only a larger value replaces it, so the first of equal values
// stays.
struct Best {
    vf value = splat(NEVER);
    vi place = {};
    vi is_nan = {};

    void add(vf v, vi places) {
        is_nan |= v != v;
        vi better = v > value;
        value = better ? v : value;
        place = better ? places : place;
    }

    // Returns the best token over all lanes, or -1 if any value was NaN.
    int64_t token() const {
        int64_t best = 0;
        float most = NEVER;
        for (int lane = 0; lane < W; lane++) {
            if (is_nan[lane]) return -1;
            float v = value[lane];
            if (v > most || (v == most && v > NEVER && place[lane] < best)) {
                most = v;
                best = place[lane];
            }
        }
        return best;
    }
};

static int64_t best_of_row(const float *logits, const uint32_t *words, int64_t vocab) {
    Best best;
    vi lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    float last[BLOCK];
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        uint32_t word = words ? words[first / BLOCK] : ALL;
        if (word == 0) continue;
        const float *block = logits + first;
        if (vocab - first < BLOCK) {
            for (int i = 0; i < BLOCK; i++) last[i] = i < vocab - first ? block[i] : NEVER;
            block = last;
        }
        vi places = lanes + (int32_t)first;
        if (word == ALL) {
            for (int i = 0; i < BLOCK; i += W) best.add(load(block + i), places + i);
            continue;
        }
        for (int i = 0; i < BLOCK; i += W) {
            // Shifts each lane's bit of the mask to the lane's sign.
            vi bits = (vi)((vu{} + (word >> i)) << (vu)(31 - lanes));
            best.add(bits < 0 ? load(block + i) : splat(NEVER), places + i);
        }
    }
    return best.token();
}

}  // namespace hr

// `stride` is the distance of rows of `logits`. `bitmask` may be null. Otherwise `row_index` gives
// the row of each of the `masks` masks; if it is null, the rows are consecutive.
extern "C" void hr_best_tokens(int64_t *tokens, const float *logits, const uint32_t *bitmask,
                               const int64_t *row_index, int64_t masks, int64_t rows, int64_t vocab,
                               int64_t stride, int64_t words, int64_t threads) {
    std::vector<const uint32_t *> of_row(rows, nullptr);
    for (int64_t i = 0; bitmask && i < masks; i++)
        of_row[row_index ? row_index[i] : i] = bitmask + i * words;
    hr::parallel(rows, threads, rows * vocab, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++)
            tokens[row] = hr::best_of_row(logits + row * stride, of_row[row], vocab);
    });
}
