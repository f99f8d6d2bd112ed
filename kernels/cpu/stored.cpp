// Converts stored blocks to panels and back, and single rows of a panel to numbers.
#include "stored.h"

#include <algorithm>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "pool.h"
#include "recording.h"
#include "stored_tiles.h"

namespace hr {

// The parts of a stored block: unpacked quants, the bytes of its scales, and its float16 numbers.
struct Parts {
    uint8_t quants[256];
    uint8_t scales[16], mins[16];
    uint16_t scale, min;
};

// Moves bit fields between stored bytes and `Parts`, in one direction or the other, so that one
// description of a form serves both. The memory that is written must be zero before.
template <bool STORE>
struct Mover {
    uint8_t *stored;
    // The bits `mask` at position `shift` of a stored byte are the bits `mask` at position `up` of
    // a value.
    void bits(int64_t byte, int shift, int mask, uint8_t &value, int up) const {
        if (STORE)
            stored[byte] |= (uint8_t)((value >> up & mask) << shift);
        else
            value |= (uint8_t)((stored[byte] >> shift & mask) << up);
    }
    void half(int64_t byte, uint16_t &value) const {
        if (STORE)
            std::memcpy(stored + byte, &value, 2);
        else
            std::memcpy(&value, stored + byte, 2);
    }
    // Moves `count` quants, which are fields of `width` bits. Each `group` bytes hold first the
    // quants of all lowest fields, then those of the next fields, and so on.
    void fields(int64_t byte, int count, int group, int width, uint8_t *values, int up) const {
        const int per_byte = 8 / width, mask = (1 << width) - 1;
        for (int chunk = 0; chunk * group * per_byte < count; chunk++)
            for (int field = 0; field < per_byte; field++)
                for (int i = 0; i < group; i++)
                    bits(byte + chunk * group + i, field * width, mask,
                         values[(chunk * per_byte + field) * group + i], up);
    }
    // Moves the bits of 4 bytes, each to or from bit `up` of one of 32 values.
    void single_bits(int64_t byte, uint8_t *values, int up) const {
        for (int i = 0; i < 32; i += 8) {
            if (STORE) {
                for (int j = 0; j < 8; j++) bits(byte + i / 8, j, 1, values[i + j], up);
                continue;
            }
            // Eight values at a time: every byte of the word gets all bits, keeps its own bit, and
            // moves that bit to its top.
            uint64_t word = stored[byte + i / 8] * 0x0101010101010101u & 0x8040201008040201u;
            word = (word + 0x7f7f7f7f7f7f7f7fu & 0x8080808080808080u) >> (7 - up);
            uint64_t old;
            std::memcpy(&old, values + i, 8);
            old |= word;
            std::memcpy(values + i, &old, 8);
        }
    }
    // Moves 8 scales and 8 minima of 6 bits each, in 12 bytes.
    void sixes(int64_t byte, uint8_t *scales, uint8_t *mins) const {
        for (int i = 0; i < 4; i++) {
            bits(byte + i, 0, 63, scales[i], 0);
            bits(byte + 4 + i, 0, 63, mins[i], 0);
            bits(byte + 8 + i, 0, 15, scales[4 + i], 0);
            bits(byte + i, 6, 3, scales[4 + i], 4);
            bits(byte + 8 + i, 4, 15, mins[4 + i], 0);
            bits(byte + 4 + i, 6, 3, mins[4 + i], 4);
        }
    }
};

// Adds `by` to all scales of a block; some forms store scales with an offset of 32.
template <class F>
inline void shift_scales(Parts &parts, int by) {
    for (int i = 0; i < F::BLOCKS * F::GROUPS; i++) parts.scales[i] = (uint8_t)(parts.scales[i] + by);
}

template <class F, bool STORE>
inline void move_block(uint8_t *stored, Parts &p) {
    constexpr int64_t form = F::NUMBER;
    const Mover<STORE> move{stored};
    if constexpr (form == Q4_0 || form == IQ4_NL) {
        move.half(0, p.scale);
        move.fields(2, 32, 16, 4, p.quants, 0);
    } else if constexpr (form == Q4_1) {
        move.half(0, p.scale);
        move.half(2, p.min);
        move.fields(4, 32, 16, 4, p.quants, 0);
    } else if constexpr (form == Q5_0 || form == Q5_1) {
        constexpr int64_t high = form == Q5_0 ? 2 : 4;
        move.half(0, p.scale);
        if (form == Q5_1) move.half(2, p.min);
        move.single_bits(high, p.quants, 4);
        move.fields(high + 4, 32, 16, 4, p.quants, 0);
    } else if constexpr (form == Q8_0) {
        move.half(0, p.scale);
        for (int i = 0; i < 32; i++) {
            if (STORE)
                stored[2 + i] = p.quants[i] ^ 0x80;
            else
                p.quants[i] = stored[2 + i] ^ 0x80;
        }
    } else if constexpr (form == Q2_K) {
        for (int i = 0; i < 16; i++) {
            move.bits(i, 0, 15, p.scales[i], 0);
            move.bits(i, 4, 15, p.mins[i], 0);
        }
        move.fields(16, 256, 32, 2, p.quants, 0);
        move.half(80, p.scale);
        move.half(82, p.min);
    } else if constexpr (form == Q3_K) {
        if (STORE) shift_scales<F>(p, 32);
        move.fields(0, 256, 32, 1, p.quants, 2);
        move.fields(32, 256, 32, 2, p.quants, 0);
        move.fields(96, 16, 8, 4, p.scales, 0);
        move.fields(104, 16, 4, 2, p.scales, 4);
        move.half(108, p.scale);
        if (!STORE) shift_scales<F>(p, -32);
    } else if constexpr (form == Q4_K || form == Q5_K) {
        move.half(0, p.scale);
        move.half(2, p.min);
        move.sixes(4, p.scales, p.mins);
        if (form == Q5_K) move.fields(16, 256, 32, 1, p.quants, 4);
        move.fields(form == Q5_K ? 48 : 16, 256, 32, 4, p.quants, 0);
    } else if constexpr (form == Q6_K) {
        move.fields(0, 256, 64, 4, p.quants, 0);
        move.fields(128, 256, 32, 2, p.quants, 4);
        for (int i = 0; i < 16; i++) move.bits(192 + i, 0, 255, p.scales[i], 0);
        move.half(208, p.scale);
    } else if constexpr (form == IQ4_XS) {
        if (STORE) shift_scales<F>(p, 32);
        move.half(0, p.scale);
        for (int i = 0; i < 8; i++) {
            move.bits(2 + i / 4, i % 4 * 2, 3, p.scales[i], 4);
            move.bits(4 + i / 2, i % 2 * 4, 15, p.scales[i], 0);
        }
        for (int block = 0; block < 8; block++)
            move.fields(8 + 16 * block, 32, 16, 4, p.quants + 32 * block, 0);
        if (!STORE) shift_scales<F>(p, -32);
    } else if constexpr (form == MXFP4) {
        move.bits(0, 0, 255, p.scales[0], 0);
        move.fields(1, 32, 16, 4, p.quants, 0);
    }
}

// Writes the words of a column into planes, 64 bytes from plane to plane. Bits above BITS are
// dropped.
template <int BITS>
inline void to_planes(const uint32_t (&words)[8], uint8_t *planes) {
    auto put = [&](int plane, uint32_t word) { std::memcpy(planes + plane * 64, &word, 4); };
    if constexpr (BITS == 8) {
        for (int g = 0; g < 8; g++) put(g, words[g]);
        return;
    }
    constexpr int low = BITS < 4 ? 2 : 4, low_planes = low;
    constexpr uint32_t low_mask = BITS < 4 ? 0x03030303u : 0x0f0f0f0fu;
    for (int plane = 0; plane < low_planes; plane++) {
        uint32_t word = 0;
        // A plane of 2 bits holds neighbouring words, and a plane of 4 bits holds words that are 4
        // apart; see quants().
        for (int part = 0; part < 8 / low; part++)
            word |= (words[BITS < 4 ? plane * 4 + part : plane + part * 4] & low_mask) << (part * low);
        put(plane, word);
    }
    if constexpr (BITS == 6) {
        for (int plane = 0; plane < 2; plane++) {
            uint32_t word = 0;
            for (int part = 0; part < 4; part++)
                word |= (words[plane * 4 + part] >> 4 & 0x03030303u) << (part * 2);
            put(4 + plane, word);
        }
    }
    if constexpr (BITS == 3 || BITS == 5) {
        uint32_t word = 0;
        for (int g = 0; g < 8; g++) word |= (words[g] >> low & 0x01010101u) << g;
        put(low_planes, word);
    }
}

// The place of column `c` of the stored block `unit` in a panel.
template <class F>
struct Place {
    uint8_t *planes, *head, *subs;
    Place(uint8_t *panel, int64_t k, int64_t unit, int64_t c) {
        planes = panel + unit * F::BLOCKS * F::QUANT_BYTES + c * 4;
        uint8_t *scales = panel + k / BLOCK * F::QUANT_BYTES + unit * F::SCALE_BYTES;
        head = scales + c * (F::SCALE == Scale::EXPONENT ? 1 : 2);
        subs = scales + F::HEAD_BYTES + c;
    }
    uint8_t &sub(int block, int group, bool min) const {
        constexpr int64_t stride = F::SUB_BYTES * (F::MIN ? 2 : 1);
        return subs[block * stride + (min ? F::SUB_BYTES : 0) + group * COLUMNS];
    }
};

template <class F>
inline void put_block(const Parts &p, const Place<F> &place) {
    for (int block = 0; block < F::BLOCKS; block++) {
        uint32_t words[8];
        std::memcpy(words, p.quants + block * BLOCK, sizeof words);
        to_planes<F::BITS>(words, place.planes + block * F::QUANT_BYTES);
        if constexpr (F::SUPER)
            for (int group = 0; group < F::GROUPS; group++) {
                place.sub(block, group, false) = p.scales[block * F::GROUPS + group];
                if (F::MIN) place.sub(block, group, true) = p.mins[block * F::GROUPS + group];
            }
    }
    if constexpr (F::SCALE == Scale::EXPONENT) {
        *place.head = p.scales[0];
    } else {
        std::memcpy(place.head, &p.scale, 2);
        if (F::MIN) std::memcpy(place.head + COLUMNS * 2, &p.min, 2);
    }
}

template <class F>
inline void get_block(Parts &p, const Place<F> &place) {
    for (int block = 0; block < F::BLOCKS; block++) {
        uint32_t words[8];
        for (int g = 0; g < 8; g++)
            words[g] = quants<F::BITS, uint32_t>(place.planes + block * F::QUANT_BYTES, g, 0);
        std::memcpy(p.quants + block * BLOCK, words, sizeof words);
        if constexpr (F::SUPER)
            for (int group = 0; group < F::GROUPS; group++) {
                p.scales[block * F::GROUPS + group] = place.sub(block, group, false);
                if (F::MIN) p.mins[block * F::GROUPS + group] = place.sub(block, group, true);
            }
    }
    if constexpr (F::SCALE == Scale::EXPONENT) {
        p.scales[0] = *place.head;
    } else {
        std::memcpy(&p.scale, place.head, 2);
        if (F::MIN) std::memcpy(&p.min, place.head + COLUMNS * 2, 2);
    }
}

template <class F>
void pack_panel(const uint8_t *stored, uint8_t *panel, int64_t k, int64_t columns) {
    const int64_t units = k / F::VALUES;
    std::memset(panel, 0, F::panel_bytes(k));
    for (int64_t unit = 0; unit < units; unit++)
        for (int64_t c = 0; c < columns; c++) {
            Parts parts = {};
            move_block<F, false>((uint8_t *)stored + (c * units + unit) * F::BYTES, parts);
            put_block(parts, Place<F>(panel, k, unit, c));
        }
}

template <class F>
void unpack_panel(uint8_t *panel, uint8_t *stored, int64_t k, int64_t columns) {
    const int64_t units = k / F::VALUES;
    std::memset(stored, 0, columns * units * F::BYTES);
    for (int64_t c = 0; c < columns; c++)
        for (int64_t unit = 0; unit < units; unit++) {
            Parts parts = {};
            get_block(parts, Place<F>(panel, k, unit, c));
            move_block<F, true>(stored + (c * units + unit) * F::BYTES, parts);
        }
}

inline float exponent_to_float(uint8_t e) {
    uint32_t bits = e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Writes the numbers of column `c` of a panel to `out`.
template <class F>
void read_column(uint8_t *panel, int64_t k, int64_t c, float *out) {
    for (int64_t unit = 0; unit < k / F::VALUES; unit++) {
        Parts p = {};
        const Place<F> place(panel, k, unit, c);
        get_block(p, place);
        float scale = F::SCALE == Scale::EXPONENT ? exponent_to_float(p.scales[0]) : half_to_float(p.scale);
        float min = F::MIN ? half_to_float(p.min) : 0.0f;
        for (int block = 0; block < F::BLOCKS; block++) {
            int8_t values[BLOCK];
            for (int g = 0; g < 8; g++) {
                uint32_t word = signed_quants<F, uint32_t>(place.planes + block * F::QUANT_BYTES, g, 0);
                std::memcpy(values + 4 * g, &word, 4);
            }
            for (int i = 0; i < BLOCK; i++) {
                const int sub = (block * BLOCK + i) / (BLOCK / F::GROUPS);
                float d = scale, m = min;
                if (F::SUPER) {
                    d *= F::SCALE == Scale::SIGNED ? (float)(int8_t)p.scales[sub] : (float)p.scales[sub];
                    m *= (float)p.mins[sub];
                }
                // The product is exact, so a fused multiply-add would give the same result.
                float value = d * (float)values[i];
                if (F::MIN) value = F::SUBTRACTED ? value - m : value + m;
                *out++ = value;
            }
        }
    }
}

// For forms of 16 and 32 bits: transposes a panel, so that the numbers of each k lie side by side.
template <class N>
void transpose_panel(const N *from, N *to, int64_t k, int64_t columns, bool store) {
    if (store) {
        for (int64_t c = 0; c < columns; c++)
            for (int64_t i = 0; i < k; i++) to[c * k + i] = from[i * COLUMNS + c];
        return;
    }
    for (int64_t i = 0; i < k; i++)
        for (int64_t c = 0; c < COLUMNS; c++) to[i * COLUMNS + c] = c < columns ? from[c * k + i] : N(0);
}

inline int64_t bytes_of_panel(int64_t form, int64_t k) {
    if (form <= BF16) return (k * COLUMNS * (form == F32 ? 4 : 2) + 63) / 64 * 64;
    int64_t bytes = 0;
    with_form(form, [&](auto f) { bytes = decltype(f)::panel_bytes(k); });
    return bytes;
}

inline int64_t bytes_of_row(int64_t form, int64_t k) {
    if (form <= BF16) return k * (form == F32 ? 4 : 2);
    int64_t bytes = 0;
    with_form(form, [&](auto f) { bytes = k / decltype(f)::VALUES * decltype(f)::BYTES; });
    return bytes;
}

// Asks the system for large pages, because a product reads a whole weight.
inline void ask_for_large_pages(void *memory, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t PAGE = 4096;
    uintptr_t begin = ((uintptr_t)memory + PAGE - 1) / PAGE * PAGE;
    uintptr_t end = ((uintptr_t)memory + bytes) / PAGE * PAGE;
    if (end > begin) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}

}  // namespace hr

using namespace hr;

extern "C" int64_t hr_stored_panel_bytes(int64_t form, int64_t in) { return bytes_of_panel(form, in); }

extern "C" const char *hr_dots_name(void) {
    return uses_tiles(Q8_0, BLOCK) ? "AMX bfloat16" : dots_name();
}

// `stored` holds [out] rows in a form; `packed` receives panels of COLUMNS rows.
extern "C" void hr_stored_pack(int64_t form, const void *stored, void *packed, int64_t in,
                               int64_t out, int64_t threads) {
    const int64_t panels = (out + COLUMNS - 1) / COLUMNS, panel_bytes = bytes_of_panel(form, in);
    const int64_t row_bytes = bytes_of_row(form, in);
    ask_for_large_pages(packed, panels * panel_bytes);
    parallel(panels, threads, panels * panel_bytes, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const uint8_t *from = (const uint8_t *)stored + i * COLUMNS * row_bytes;
            uint8_t *to = (uint8_t *)packed + i * panel_bytes;
            const int64_t columns = std::min<int64_t>(COLUMNS, out - i * COLUMNS);
            if (form == F32)
                transpose_panel((const uint32_t *)from, (uint32_t *)to, in, columns, false);
            else if (form <= BF16)
                transpose_panel((const uint16_t *)from, (uint16_t *)to, in, columns, false);
            else
                with_form(form, [=](auto f) { pack_panel<decltype(f)>(from, to, in, columns); });
        }
    });
}

extern "C" void hr_stored_unpack(int64_t form, const void *packed, void *stored, int64_t in,
                                 int64_t out, int64_t threads) {
    const int64_t panels = (out + COLUMNS - 1) / COLUMNS, panel_bytes = bytes_of_panel(form, in);
    const int64_t row_bytes = bytes_of_row(form, in);
    parallel(panels, threads, panels * panel_bytes, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            uint8_t *from = (uint8_t *)packed + i * panel_bytes;
            uint8_t *to = (uint8_t *)stored + i * COLUMNS * row_bytes;
            const int64_t columns = std::min<int64_t>(COLUMNS, out - i * COLUMNS);
            if (form == F32)
                transpose_panel((const uint32_t *)from, (uint32_t *)to, in, columns, true);
            else if (form <= BF16)
                transpose_panel((const uint16_t *)from, (uint16_t *)to, in, columns, true);
            else
                with_form(form, [=](auto f) { unpack_panel<decltype(f)>(from, to, in, columns); });
        }
    });
}

// Writes rows of one of several stacked matrices as float32, for each i below `count`: row ids[i] of
// the stack to row i of `out`. The matrix has the stack's rows from `first` to `first + rows`; other
// ids are skipped.
extern "C" void hr_stored_rows(int64_t form, const void *packed, int64_t first, int64_t rows,
                               const int64_t *ids, float *out, int64_t count, int64_t in,
                               int64_t threads) {
    const int64_t panel_bytes = bytes_of_panel(form, in);
    parallel(count, threads, count * in * 4, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = ids[i] - first;
            if (row < 0 || row >= rows) continue;
            uint8_t *panel = (uint8_t *)packed + row / COLUMNS * panel_bytes;
            const int64_t c = row % COLUMNS;
            float *to = out + i * in;
            for (int64_t j = 0; form <= BF16 && j < in; j++) {
                if (form == F32)
                    to[j] = ((const float *)panel)[j * COLUMNS + c];
                else if (form == F16)
                    to[j] = half_to_float(((const uint16_t *)panel)[j * COLUMNS + c]);
                else
                    to[j] = to_float(((const bf16 *)panel)[j * COLUMNS + c]);
            }
            if (form > BF16)
                with_form(form, [=](auto f) { read_column<decltype(f)>(panel, in, c, to); });
        }
    });
}
HR_RECORDABLE(hr_stored_rows)

// Writes rows of a matrix that is not packed as float32: stored row ids[i] to row i of `out`, for each
// i below `count`. Ids outside [0, rows) are skipped.
extern "C" void hr_stored_look_up(int64_t form, const void *stored, int64_t rows, const int64_t *ids,
                                  float *out, int64_t count, int64_t in, int64_t threads) {
    const int64_t row_bytes = bytes_of_row(form, in);
    parallel(count, threads, count * in * 4, [=](int64_t begin, int64_t end) {
        std::vector<uint8_t> panel(form > BF16 ? bytes_of_panel(form, in) : 0);
        for (int64_t i = begin; i < end; i++) {
            if (ids[i] < 0 || ids[i] >= rows) continue;
            const uint8_t *from = (const uint8_t *)stored + ids[i] * row_bytes;
            float *to = out + i * in;
            if (form == F32) std::memcpy(to, from, in * sizeof(float));
            for (int64_t j = 0; (form == F16 || form == BF16) && j < in; j++) {
                // A row may begin at any address of a mapped file.
                uint16_t half;
                std::memcpy(&half, from + j * 2, 2);
                uint32_t wide = (uint32_t)half << 16;
                if (form == F16)
                    to[j] = half_to_float(half);
                else
                    std::memcpy(to + j, &wide, 4);
            }
            if (form > BF16)
                with_form(form, [&](auto f) {
                    pack_panel<decltype(f)>(from, panel.data(), in, 1);
                    read_column<decltype(f)>(panel.data(), in, 0, to);
                });
        }
    });
}
HR_RECORDABLE(hr_stored_look_up)
