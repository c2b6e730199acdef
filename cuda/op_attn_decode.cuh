/* op_attn_decode: what the kernels of decode attention share.
 *
 * Split rule: a row at position p cuts its keys into splits of max(2, p / 8448 + 1) pages, never more than 132 of them. So a
 * row's tree is a function of its own position. */
#ifndef TANDEM_OP_ATTN_DECODE_CUH
#define TANDEM_OP_ATTN_DECODE_CUH

#include "kv_page.cuh"
#include "op_attn.h"

enum {
    DECODE_SPLITS = 132,
    DECODE_STEP = DECODE_SPLITS * KV_PAGE_TOKENS, /* positions between changes of the split */
    DECODE_THREADS = 128
};
static const float LOG2_E = 1.44269504f, LOWEST = -1e30f;

struct decode_call {
    struct device_batch batch;
    struct kern_attn_shape shape;
    struct kern_kv_layer kv;
    const float *qkv;
    float *outputs; /* [decode rows][query heads][splits][head_dim], of the fast kernel float16 */
    float2 *stats;  /* [decode rows][query heads][splits] maximum and sum */
    void *act;
};

static __device__ __forceinline__ int split_pages(int position) { return max(2, position / DECODE_STEP + 1); }

static __device__ __forceinline__ float exp2_approximate(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ size_t qkv_width(const struct kern_attn_shape *s)
{
    return (size_t)s->head_dim * (size_t)(s->n_heads * (s->gated ? 2 : 1) + 2 * s->n_kv_heads);
}

static __device__ __forceinline__ const float *query_at(const struct decode_call *c, int row, int head)
{
    const int width = c->shape.gated ? 2 * c->shape.head_dim : c->shape.head_dim;
    return c->qkv + (size_t)row * qkv_width(&c->shape) + (size_t)head * width;
}

/* column: row * query heads + head */
static __device__ __forceinline__ size_t partial_at(int column, int split)
{
    return (size_t)column * DECODE_SPLITS + split;
}

#endif
