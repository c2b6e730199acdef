/* op_attn: rotary embedding with storing of keys and values, and attention over paged keys and values. Shapes and meaning as in
 * kern.h; the batch is in device memory. */
#ifndef TANDEM_OP_ATTN_H
#define TANDEM_OP_ATTN_H

#include "batch.h"
#include "device.cuh"

size_t op_kv_page_bytes(const struct kern_attn_shape *s);
/* Why this shape cannot be computed, or NULL. */
const char *op_attn_unsupported(const struct kern_attn_shape *s);

void op_rope_kv_append(const struct op_context *c, const struct device_batch *b, const struct kern_attn_shape *s,
                       const struct kern_attn_weights *w, const float *cos_sin, float *qkv, struct kern_kv_layer kv);

/* How many splits of keys a decode grid has room for when the longest sequence has so many positions. A recorded round is replayed
 * for batches of the same profile. */
static inline int op_attn_profile(int longest)
{
    enum { LEAST_SPLIT = 128, MOST_SPLITS = 132 };
    const int splits = (longest + LEAST_SPLIT - 1) / LEAST_SPLIT;
    for (int profile = 8; profile < MOST_SPLITS; profile *= 2)
        if (splits <= profile) return profile;
    return MOST_SPLITS;
}

/* Partial results of splits, for at most so many decode rows. */
size_t op_attn_decode_scratch_bytes(const struct kern_attn_shape *s, int decode_rows);
/* The decode segments of the batch. */
void op_attn_decode(const struct op_context *c, const struct device_batch *b, const struct kern_attn_shape *s, const float *qkv,
                    struct kern_kv_layer kv, void *scratch, void *o_act);
/* The prefill segments of the batch. */
void op_attn_prefill(const struct op_context *c, const struct device_batch *b, const struct kern_attn_shape *s, const float *qkv,
                     struct kern_kv_layer kv, void *o_act);

#endif
