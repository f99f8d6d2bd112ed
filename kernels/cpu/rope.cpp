// Head norms, rotary embedding and the write into the paged KV caches, in one pass over the qkv
// rows of a step.
#include <cmath>
#include <type_traits>

#include "kept.h"
#include "norm.h"
#include "pool.h"
#include "recording.h"

namespace hr {

template <bool ZERO_CENTERED, class T>
void norm_head(T *head, const T *weight, int64_t dim, float eps) {
    float squares = 0;
    vf wide = {};
    int64_t i = 0;
    for (; i + W <= dim; i += W) {
        vf v = load(head + i);
        wide += v * v;
    }
    for (; i < dim; i++) squares += to_float(head[i]) * to_float(head[i]);
    float factor = 1.0f / std::sqrt((sum(wide) + squares) / (float)dim + eps);
    scale_row<ZERO_CENTERED>(head, head, weight, factor, dim);
}

template <class T>
void rotate_head(T *head, const float *cos, const float *sin, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vf first = load(head + i), second = load(head + half + i);
        vf c = load(cos + i), s = load(sin + i);
        store(head + i, first * c - second * s);
        store(head + half + i, second * c + first * s);
    }
    for (; i < half; i++) {
        float first = to_float(head[i]), second = to_float(head[half + i]);
        from_float(first * cos[i] - second * sin[i], head + i);
        from_float(second * cos[i] + first * sin[i], head + half + i);
    }
}

template <bool ZERO_CENTERED, class T, class C>
void rope_rows(T *qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
               const float *cos_sin, const int64_t *positions, const int64_t *slots, C *k_cache,
               C *v_cache, int64_t page_size, const T *q_norm, const T *k_norm, float eps,
               int64_t threads) {
    int64_t width = (heads + 2 * kv_heads) * dim;
    parallel(tokens, threads, tokens * width * 2, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            T *row = qkv + token * width;
            const float *cos = cos_sin + positions[token] * dim, *sin = cos + dim / 2;
            for (int64_t h = 0; h < heads + kv_heads; h++) {
                T *head = row + h * dim;
                const T *weight = h < heads ? q_norm : k_norm;
                if (weight) norm_head<ZERO_CENTERED>(head, weight, dim, eps);
                rotate_head(head, cos, sin, dim / 2);
            }
            int64_t slot = slots[token];
            if (slot < 0) continue;
            int64_t page = slot / page_size, offset = slot % page_size;
            const T *key = row + heads * dim, *value = key + kv_heads * dim;
            for (int64_t h = 0; h < kv_heads; h++) {
                int64_t to = ((page * kv_heads + h) * page_size + offset) * row_elements<C>(dim);
                convert(key + h * dim, k_cache + to, dim);
                convert(value + h * dim, v_cache + to, dim);
            }
        }
    });
}

}  // namespace hr

using namespace hr;

// `kept` is the format of the caches, a number of `Kept`.
extern "C" void hr_rope_kv_write(int64_t is_bf16, int64_t kept, void *qkv, int64_t tokens, int64_t heads,
                                 int64_t kv_heads, int64_t dim, const float *cos_sin,
                                 const int64_t *positions, const int64_t *slots, void *k_cache,
                                 void *v_cache, int64_t page_size, const void *q_norm,
                                 const void *k_norm, double eps, int64_t zero_centered,
                                 int64_t threads) {
    auto run = [&](auto *typed, auto centered) {
        using T = std::remove_pointer_t<decltype(typed)>;
        with_kept<T>(kept, [&](auto *cached) {
            using C = std::remove_pointer_t<decltype(cached)>;
            rope_rows<decltype(centered)::value>(typed, tokens, heads, kv_heads, dim, cos_sin,
                                                 positions, slots, (C *)k_cache, (C *)v_cache,
                                                 page_size, (const T *)q_norm, (const T *)k_norm,
                                                 (float)eps, threads);
        });
    };
    auto run_type = [&](auto centered) {
        is_bf16 ? run((bf16 *)qkv, centered) : run((float *)qkv, centered);
    };
    zero_centered ? run_type(std::true_type{}) : run_type(std::false_type{});
}
HR_RECORDABLE(hr_rope_kv_write)

// Copies heads with any strides to pages. All sizes are in bytes. If the page's heads are wider,
// their rest becomes 0.
extern "C" void hr_kv_write(const char *rows, int64_t token_stride, int64_t head_stride,
                            int64_t head_bytes, const int64_t *slots, int64_t tokens, char *cache,
                            int64_t heads, int64_t page_size, int64_t cache_bytes,
                            int64_t threads) {
    parallel(tokens, threads, tokens * heads * cache_bytes / 4, [=](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; token++) {
            int64_t slot = slots[token];
            if (slot < 0) continue;
            int64_t page = slot / page_size, offset = slot % page_size;
            for (int64_t h = 0; h < heads; h++) {
                char *to = cache + ((page * heads + h) * page_size + offset) * cache_bytes;
                std::memcpy(to, rows + token * token_stride + h * head_stride, head_bytes);
                std::memset(to + head_bytes, 0, cache_bytes - head_bytes);
            }
        }
    });
}
HR_RECORDABLE(hr_kv_write)
