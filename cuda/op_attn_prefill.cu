/* op_attn_prefill: attention of prefill segments, for every shape and format; the choice of the kernel.
 *
 * The plain kernel: a block of 256 threads has 16 rows of one query head, 16 threads a row. It walks the pages in order, brings
 * the keys of one into shared memory as float32, computes a chain over the dimensions for each score, takes one step of the
 * online softmax, brings the values to where the keys were, and continues each dimension's chain over the row's keys:
 *   score_j = chain over d of q_d k_dj;   p_j = 2^(scale score_j - max)
 *   o_d = chain over j of p_j v_jd, continued from o_d 2^(old max - max)
 * A row's chains see its own keys only, in the order of positions, so neither the other rows of the block nor the cut of a
 * prompt into segments changes a bit, and what lies past a row's position is never used. */
#include "op_attn_prefill.cuh"

#include <math.h>

enum {
    PLAIN_ROWS = 16,
    PLAIN_THREADS = 256,
    PLAIN_LANES = PLAIN_THREADS / PLAIN_ROWS,
    PLAIN_KEYS = 64 / PLAIN_LANES,
    PLAIN_MAX_DIM = 256
};

/* Shared memory: a page's keys or values in rows of head_dim + 1, so that 16 lanes with a key each meet 16 banks; the queries;
 * the probabilities. */
static size_t plain_shared_bytes(int dim) { return (size_t)(64 * (dim + 1) + PLAIN_ROWS * (dim + 64)) * sizeof(float); }

struct plain_shared {
    float *page, *queries, *probs;
};

/* The first n_slots keys or values of a page, as float32. */
__device__ static void plain_load(const struct prefill_call &p, const char *half, bool keys, int n_slots, float *to)
{
    const int dim = p.shape.head_dim;
    for (int i = threadIdx.x; i < n_slots * dim; i += PLAIN_THREADS) {
        const int slot = i / dim, d = i - slot * dim;
        to[slot * (dim + 1) + d] =
            keys ? kv_page_key(p.shape.kv, half, dim, slot, d) : kv_page_value(p.shape.kv, half, dim, slot, d);
    }
}

__device__ __forceinline__ float plain_row_max(float x)
{
    for (int step = PLAIN_LANES / 2; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

__device__ __forceinline__ float plain_row_sum(float x)
{
    for (int step = PLAIN_LANES / 2; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* Probabilities of the row's first n_keys of the page go to shared memory. Returns 2^(old max - max). */
__device__ static float plain_scores(const struct prefill_call &p, struct plain_shared sh, int r, int lane, int n_keys,
                                     float *highest, float *sum)
{
    const int dim = p.shape.head_dim;
    const float *q = sh.queries + r * dim;
    float score[PLAIN_KEYS] = {};
    for (int d = 0; d < dim; d++)
#pragma unroll
        for (int j = 0; j < PLAIN_KEYS; j++)
            score[j] = fmaf(q[d], sh.page[(lane + j * PLAIN_LANES) * (dim + 1) + d], score[j]);
    float most = -INFINITY;
#pragma unroll
    for (int j = 0; j < PLAIN_KEYS; j++) {
        score[j] = lane + j * PLAIN_LANES < n_keys ? score[j] * p.scale_log2 : -INFINITY;
        most = fmaxf(most, score[j]);
    }
    const float grown = fmaxf(*highest, plain_row_max(most)), shrink = exp2f(*highest - grown);
    float own = 0;
#pragma unroll
    for (int j = 0; j < PLAIN_KEYS; j++) {
        const float e = exp2f(score[j] - grown);
        sh.probs[r * 64 + lane + j * PLAIN_LANES] = e;
        own += e;
    }
    *sum = fmaf(*sum, shrink, plain_row_sum(own));
    *highest = grown;
    return shrink;
}

__device__ static void plain_values(int dim, struct plain_shared sh, int r, int lane, int n_keys, float shrink,
                                    float o[PLAIN_MAX_DIM / PLAIN_LANES])
{
#pragma unroll
    for (int j = 0; j < PLAIN_MAX_DIM / PLAIN_LANES; j++) o[j] *= shrink;
    for (int key = 0; key < n_keys; key++) {
        const float prob = sh.probs[r * 64 + key];
        const float *v = sh.page + key * (dim + 1) + lane;
#pragma unroll
        for (int j = 0; j < PLAIN_MAX_DIM / PLAIN_LANES; j++)
            if (j * PLAIN_LANES < dim) o[j] = fmaf(prob, v[j * PLAIN_LANES], o[j]);
    }
}

/* o / sum, times the gate where there is one; a lane with an even dimension stores its neighbour's too. Behind the last head
 * lie columns that only fill a block. */
__device__ static void plain_store(const struct prefill_call &p, int row, int head, bool used, int lane, float sum,
                                   const float o[PLAIN_MAX_DIM / PLAIN_LANES])
{
    const int dim = p.shape.head_dim, width = p.shape.n_heads * dim;
    const struct kern_split split = prefill_split(p.batch);
    const float inverse = 1.0f / sum;
#pragma unroll
    for (int j = 0; j < PLAIN_MAX_DIM / PLAIN_LANES; j++) {
        const int d = lane + j * PLAIN_LANES;
        if (j * PLAIN_LANES >= dim) break;
        float x = o[j] * inverse;
        if (p.shape.gated && used) x *= prefill_sigmoid(prefill_query(p, row, head)[dim + d]);
        const float next = __shfl_down_sync(~0u, x, 1);
        if (used && lane % 2 == 0) act_store2(p.o_act, split, width, row, head * dim + d, x, next);
    }
    if (used && head == p.shape.n_heads - 1)
        for (int k = width + 2 * lane; k < act_blocks(width) * ACT_BLOCK; k += 2 * PLAIN_LANES)
            act_store2(p.o_act, split, width, row, k, 0, 0);
}

__global__ static void __launch_bounds__(PLAIN_THREADS) plain_kernel(struct prefill_call p)
{
    extern __shared__ float plain_memory[];
    pdl_go();
    pdl_wait();
    const struct prefill_tile tile = prefill_find_tile(&p.batch, blockIdx.y, PLAIN_ROWS);
    if (!tile.rows) return;
    const int dim = p.shape.head_dim, head = blockIdx.x, kv_head = head / (p.shape.n_heads / p.shape.n_kv_heads);
    const int r = threadIdx.x / PLAIN_LANES, lane = threadIdx.x % PLAIN_LANES, row = tile.row_first + r;
    const struct plain_shared sh = {plain_memory, plain_memory + 64 * (dim + 1),
                                    plain_memory + 64 * (dim + 1) + PLAIN_ROWS * dim};
    const bool used = r < tile.rows;
    for (int d = lane; d < dim; d += PLAIN_LANES) sh.queries[r * dim + d] = used ? prefill_query(p, row, head)[d] : 0;

    float highest = -INFINITY, sum = 0, o[PLAIN_MAX_DIM / PLAIN_LANES] = {};
    const int n_keys = tile.position_first + tile.rows, own_keys = tile.position_first + r + 1;
    for (int first = 0; first < n_keys; first += 64) {
        const char *keys = kv_page_keys(p.kv, tile.pages[first / 64], kv_head, p.shape.kv, dim);
        const int n_slots = min(64, n_keys - first), n_own = max(0, min(n_slots, own_keys - first));
        __syncthreads();
        plain_load(p, keys, true, n_slots, sh.page);
        __syncthreads();
        const float shrink = plain_scores(p, sh, r, lane, n_own, &highest, &sum);
        __syncthreads();
        plain_load(p, keys + kv_page_half_bytes(p.shape.kv, dim), false, n_slots, sh.page);
        __syncthreads();
        plain_values(dim, sh, r, lane, n_own, shrink, o);
    }
    plain_store(p, row, head, used, lane, sum, o);
}

void op_attn_prefill(const struct op_context *c, const struct device_batch *b, const struct kern_attn_shape *s,
                     const float *qkv, struct kern_kv_layer kv, void *o_act)
{
    if (b->n_segments == b->n_decode_segments) return;
    const float scale_log2 = (float)(1.4426950408889634 / sqrt((double)s->head_dim));
    const struct prefill_call call = {*b, *s, kv, qkv, o_act, scale_log2};
    if (op_attn_wgmma_serves(c, s)) {
        op_attn_wgmma(c, &call);
        return;
    }
    const size_t shared_bytes = plain_shared_bytes(s->head_dim);
    cudaFuncSetAttribute(plain_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    op_launch(c, plain_kernel, dim3((unsigned)s->n_heads, (unsigned)prefill_tiles_bound(b, PLAIN_ROWS)),
              dim3(PLAIN_THREADS), shared_bytes, call);
}
