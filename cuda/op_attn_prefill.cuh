/* op_attn_prefill: what the kernels of prefill attention share: the call, and the search for a block's rows. */
#ifndef TANDEM_OP_ATTN_PREFILL_CUH
#define TANDEM_OP_ATTN_PREFILL_CUH

#include "act.cuh"
#include "kv_page.cuh"
#include "op_attn.h"

struct prefill_call {
    struct device_batch batch;
    struct kern_attn_shape shape;
    struct kern_kv_layer kv;
    const float *qkv;
    void *o_act;
    float scale_log2; /* log2(e) / sqrt(head_dim): scores become exponents of two */
};

/* The Hopper kernel (op_attn_wgmma.cu). It serves or does not by card and shape alone. */
bool op_attn_wgmma_serves(const struct op_context *c, const struct kern_attn_shape *s);
void op_attn_wgmma(const struct op_context *c, const struct prefill_call *call);

/* Tiles of `size` rows, a divisor of 64, that the batch's prefill segments can have at most: only the numbers of rows and
 * segments are known to the host. */
static inline int prefill_tiles_bound(const struct device_batch *b, int size)
{
    return (b->rows - b->decode_rows) / size + b->n_segments - b->n_decode_segments;
}

#ifdef __CUDACC__

/* Consecutive rows of a segment whose first position is a multiple of the tile's size. */
struct prefill_tile {
    int row_first, rows; /* of the batch; rows 0: there is no such tile */
    int position_first;
    const int32_t *pages; /* of the segment */
};

/* The tile `index` tiles before the last one: in a long prompt later tiles have more keys, and start first. All 32 lanes. */
__device__ __forceinline__ struct prefill_tile prefill_find_tile(const struct device_batch *b, int index, int size)
{
    struct prefill_tile found = {0, 0, 0, nullptr};
    const int lane = threadIdx.x & 31;
    for (int last = b->n_segments - 1; last >= b->n_decode_segments; last -= 32) {
        const int mine = last - lane;
        const int tiles = mine >= b->n_decode_segments ? (b->segments[mine].rows + size - 1) / size : 0;
        int until = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(~0u, until, step);
            if (lane >= step) until += before;
        }
        const unsigned past = __ballot_sync(~0u, until > index);
        if (past) {
            const int owner = __ffs(past) - 1;
            const int in_segment = __shfl_sync(~0u, until, owner) - 1 - index; /* tiles before it */
            const struct device_segment s = b->segments[last - owner];
            const int first = in_segment * size;
            found.row_first = s.row_first + first;
            found.rows = min(size, s.rows - first);
            found.position_first = s.position_first + first;
            found.pages = b->tables + s.table_first;
            return found;
        }
        index -= __shfl_sync(~0u, until, 31);
    }
    return found;
}

__device__ __forceinline__ int prefill_query_width(const struct kern_attn_shape &s)
{
    return s.gated ? 2 * s.head_dim : s.head_dim;
}

__device__ __forceinline__ size_t prefill_qkv_width(const struct kern_attn_shape &s)
{
    return (size_t)(s.n_heads * prefill_query_width(s) + 2 * s.n_kv_heads * s.head_dim);
}

/* Query of a row and head; its gate, where there is one, follows head_dim later. */
__device__ __forceinline__ const float *prefill_query(const struct prefill_call &p, int row, int head)
{
    return p.qkv + (size_t)row * prefill_qkv_width(p.shape) + (size_t)(head * prefill_query_width(p.shape));
}

__device__ __forceinline__ float prefill_ex2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float prefill_sigmoid(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(1.0f + prefill_ex2(x * -1.4426950408889634f)));
    return y;
}

__device__ __forceinline__ struct kern_split prefill_split(const struct device_batch &b)
{
    return {b.decode_rows, b.rows - b.decode_rows};
}

#endif

#endif
