/* kern_cpu_kv: KV pages of the CPU backend: their layout, and what turns a row of projections into stored keys and values.
 * Private to engine/cpu.
 *
 * A page holds, KV head after KV head: K as [head_dim][64 tokens], V as [64 tokens][head_dim], and for INT8 the scales of K
 * and then of V, each [runs of KV_INT8_RUN dimensions][64 tokens]. So both products of attention have lanes over the stored
 * order, the scales too: of keys a lane per token, of values beside the tokens' probabilities. head_dim is a multiple of
 * 16, and so every part starts at a multiple of 64 bytes. */
#ifndef TANDEM_KERN_CPU_KV_H
#define TANDEM_KERN_CPU_KV_H

#include "kern_cpu_impl.h"
#include "kern_cpu_vec.h"

/* One KV head's part of a page: values of the stored format. */
struct kv_head_page {
    void *keys, *values;
    float *key_scales, *value_scales; /* INT8 only, else NULL */
};

static inline int kv_query_width(const struct kern_attn_shape *s) { return s->gated ? 2 * s->head_dim : s->head_dim; }

static inline size_t kv_qkv_stride(const struct kern_attn_shape *s)
{
    return (size_t)(s->n_heads * kv_query_width(s)) + 2 * (size_t)s->n_kv_heads * (size_t)s->head_dim;
}

static inline struct kv_head_page kv_head_page(const struct cpu_attn_call *c, int32_t page, int kv_head)
{
    const enum kv_format f = c->shape->kv;
    const size_t dim = (size_t)c->shape->head_dim, runs = (dim + KV_INT8_RUN - 1) / KV_INT8_RUN;
    const size_t part_bytes = KV_PAGE_TOKENS * dim * (f == KV_F32 ? 4 : f == KV_INT8 ? 1 : 2);
    const size_t scales_bytes = f == KV_INT8 ? KV_PAGE_TOKENS * runs * sizeof(float) : 0;
    char *keys = (char *)c->kv.base_dev + (size_t)page * c->kv.page_bytes +
                 (size_t)kv_head * 2 * (part_bytes + scales_bytes);
    struct kv_head_page p = {.keys = keys, .values = keys + part_bytes};
    if (f == KV_INT8) {
        p.key_scales = (float *)(void *)(keys + 2 * part_bytes);
        p.value_scales = (float *)(void *)(keys + 2 * part_bytes + scales_bytes);
    }
    return p;
}

/* Bias, norms, rotations and storing of kern.rope_kv_append. */
void KERN_NAME(kern_cpu_kv_append)(const struct cpu_attn_call *c, const struct kern_attn_weights *w,
                                   const float *cos_sin, float *qkv, int threads);

#endif
