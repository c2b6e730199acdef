/* op_rows: one block a row.
 *
 * A norm's block has 128 threads for each chunk of row_norm.cuh, of up to eight chunks at once; each thread keeps its eight
 * values between the sum and the product, so that y may be x. The hash mixes every word with its place and adds, so its order
 * does not matter. */
#include "op_rows.h"

#include "act.cuh"
#include "row_norm.cuh"

enum { NORM_GROUPS = 8, EMBED_THREADS = 256, HASH_THREADS = 256 };

__global__ void embed_kernel(struct device_batch b, const void *table, bool bf16, int cols, float *y)
{
    pdl_go();
    pdl_wait();
    const int32_t t = b.tokens[blockIdx.x];
    const size_t from = (size_t)(t < 0 ? b.left[-1 - t] : t) * (size_t)cols, to = (size_t)blockIdx.x * (size_t)cols;
    for (int i = (int)threadIdx.x; i < cols; i += EMBED_THREADS)
        y[to + i] = bf16 ? __bfloat162float(((const __nv_bfloat16 *)table)[from + i]) : ((const float *)table)[from + i];
}

/* A batch's first operation. Those behind it may read before pdl_wait what older batches have written: it begins after all of them. */
void op_embed(const struct op_context *c, const struct device_batch *b, const struct kern_table *t, float *y)
{
    struct op_context after_all = *c;
    after_all.pdl = false;
    op_launch(&after_all, embed_kernel, dim3((unsigned)b->rows), dim3(EMBED_THREADS), 0, *b, t->rows_dev, t->bf16, t->cols, y);
}

struct norm_call {
    const float *x, *w;
    float *y;
    void *act;
    struct kern_split rows;
    int n, chunks, width, col;
    float eps;
};

/* Eight values of a chunk; past the row zeros. */
__device__ __forceinline__ void load_each(const float *row, int at, int n, float v[ROW_NORM_EACH])
{
#pragma unroll
    for (int i = 0; i < ROW_NORM_EACH; i++) v[i] = 0;
    if (at >= n) return;
    const float4 a = __ldcg((const float4 *)(row + at)), b = __ldcg((const float4 *)(row + at + 4));
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

__device__ __forceinline__ void store_each(const struct norm_call &k, int row, int at, const float v[ROW_NORM_EACH], float scale)
{
    float z[ROW_NORM_EACH];
#pragma unroll
    for (int i = 0; i < ROW_NORM_EACH; i++) z[i] = row_norm_apply(v[i], scale, k.w[at + i]);
    if (k.y) {
        float4 *to = (float4 *)(k.y + (size_t)row * (size_t)k.n + at);
        to[0] = make_float4(z[0], z[1], z[2], z[3]);
        to[1] = make_float4(z[4], z[5], z[6], z[7]);
    }
    if (!k.act) return;
#pragma unroll
    for (int i = 0; i < ROW_NORM_EACH; i += 2) act_store2(k.act, k.rows, k.width, row, k.col + at + i, z[i], z[i + 1]);
}

__global__ void __launch_bounds__(ROW_NORM_THREADS *NORM_GROUPS) norm_kernel(struct norm_call one, struct norm_call other)
{
    __shared__ float warp_sum[NORM_GROUPS * 2][ROW_NORM_WARPS], chunk_sum[NORM_GROUPS * 2];
    const int group = (int)threadIdx.x / ROW_NORM_THREADS, groups = (int)blockDim.x / ROW_NORM_THREADS;
    const int t = (int)threadIdx.x % ROW_NORM_THREADS, row = (int)blockIdx.x;
    const struct norm_call k = blockIdx.y ? other : one;
    const float *x = k.x + (size_t)row * (size_t)k.n;
    float v[2][ROW_NORM_EACH];
    pdl_go();
    pdl_wait();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int chunk = group + i * groups;
        if (chunk >= k.chunks) continue;
        load_each(x, chunk * ROW_NORM_CHUNK + t * ROW_NORM_EACH, k.n, v[i]);
        const float sum = row_norm_warp(row_norm_squares(v[i]));
        if (t % 32 == 0) warp_sum[chunk][t / 32] = sum;
    }
    __syncthreads();
    if ((int)threadIdx.x < k.chunks) chunk_sum[threadIdx.x] = row_norm_chunk(warp_sum[threadIdx.x]);
    __syncthreads();
    const float scale = row_norm_scale(row_norm_total(chunk_sum, k.chunks), k.n, k.eps);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int chunk = group + i * groups, at = chunk * ROW_NORM_CHUNK + t * ROW_NORM_EACH;
        if (chunk < k.chunks && at < k.n) store_each(k, row, at, v[i], scale);
    }
    /* An act's columns past its width are zeros; whoever writes its last columns writes these as well. */
    if (k.act && k.col + k.n == k.width)
        for (int i = k.width + 2 * (int)threadIdx.x; i < act_blocks(k.width) * ACT_BLOCK; i += 2 * (int)blockDim.x)
            act_store2(k.act, k.rows, k.width, row, i, 0, 0);
}

static void launch_norms(const struct op_context *c, const struct norm_call &one, const struct norm_call &other, unsigned n_norms)
{
    const int groups = one.chunks < NORM_GROUPS ? one.chunks : NORM_GROUPS;
    op_launch(c, norm_kernel, dim3((unsigned)kern_rows(one.rows), n_norms), dim3((unsigned)(groups * ROW_NORM_THREADS)), 0, one, other);
}

void op_rms_norm(const struct op_context *c, const float *x, const float *w, struct kern_split rows, int n, float eps, float *y, void *y_act)
{
    const struct norm_call k = {x, w, y, y_act, rows, n, row_norm_chunks(n), n, 0, eps};
    launch_norms(c, k, k, 1);
}

void op_rms_norm_pair(const struct op_context *c, const float *first, const float *first_w, const float *second, const float *second_w,
                      struct kern_split rows, int n, float eps, void *y_act)
{
    const struct norm_call one = {first, first_w, NULL, y_act, rows, n, row_norm_chunks(n), 2 * n, 0, eps};
    const struct norm_call other = {second, second_w, NULL, y_act, rows, n, row_norm_chunks(n), 2 * n, n, eps};
    launch_norms(c, one, other, 2);
}

/* ---- the best logit: a row is cut into parts, each the work of a block; the block that is done last takes the parts'
 * best. Order does not matter: ties go to the lowest id. ---- */

enum { BEST_THREADS = 256, BEST_AT_ONCE = 4, BEST_BLOCKS = 512, BEST_LEAST_PARTS = 16 };

__device__ __forceinline__ struct kern_best better(struct kern_best a, struct kern_best b)
{
    if (a.id < 0) return a;
    if (b.id < 0) return b;
    return b.logit > a.logit || (b.logit == a.logit && b.id < a.id) ? b : a;
}

__device__ struct kern_best best_of_block(struct kern_best b)
{
    __shared__ struct kern_best of_warp[BEST_THREADS / 32];
    for (int lane = 16; lane; lane >>= 1) {
        struct kern_best other;
        other.logit = __shfl_xor_sync(0xffffffffu, b.logit, lane);
        other.id = __shfl_xor_sync(0xffffffffu, b.id, lane);
        b = better(b, other);
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = b;
    __syncthreads();
    for (int i = 0; i < (int)blockDim.x / 32; i++) b = better(b, of_warp[i]);
    return b;
}

__global__ void best_kernel(const float *logits, int n, int first, const uint32_t *allowed, struct op_best_row *scratch, struct kern_best *out)
{
    __shared__ bool last;
    const struct kern_best none = {-INFINITY, KERN_NO_ID};
    struct op_best_row *row = &scratch[blockIdx.y];
    struct kern_best b = none;
    const float *x = logits + (size_t)blockIdx.y * (size_t)n;
    pdl_go();
    pdl_wait();
    const int stride = (int)(gridDim.x * BEST_THREADS);
    for (int i = (int)(blockIdx.x * BEST_THREADS + threadIdx.x); i < n; i += BEST_AT_ONCE * stride) {
        float v[BEST_AT_ONCE];
        uint32_t word[BEST_AT_ONCE];
#pragma unroll
        for (int j = 0; j < BEST_AT_ONCE; j++) {
            const int at = i + j * stride;
            v[j] = at < n ? x[at] : 0;
            word[j] = at < n ? allowed[(first + at) >> 5] : 0;
        }
#pragma unroll
        for (int j = 0; j < BEST_AT_ONCE; j++) {
            const int id = first + i + j * stride;
            const struct kern_best here = {v[j], isfinite(v[j]) ? id : -1};
            if (word[j] >> (id & 31) & 1) b = better(b, here);
        }
    }
    b = best_of_block(b);
    if (!threadIdx.x) {
        row->part[blockIdx.x] = b;
        __threadfence();
        last = atomicAdd(&row->parts_done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    b = none;
    if (threadIdx.x < gridDim.x) {
        b.logit = __ldcg(&row->part[threadIdx.x].logit);
        b.id = __ldcg(&row->part[threadIdx.x].id);
    }
    b = best_of_block(b);
    if (threadIdx.x) return;
    out[blockIdx.y] = b;
    row->parts_done = 0;
}

void op_best(const struct op_context *c, const float *logits, int rows, int n, int first, const uint32_t *allowed,
             struct op_best_row *scratch, struct kern_best *out)
{
    static_assert((int)OP_BEST_PARTS <= (int)BEST_THREADS, "one block merges the parts");
    int parts = BEST_BLOCKS / (rows ? rows : 1);
    parts = parts > OP_BEST_PARTS ? (int)OP_BEST_PARTS : parts < BEST_LEAST_PARTS ? (int)BEST_LEAST_PARTS : parts;
    op_launch(c, best_kernel, dim3((unsigned)parts, (unsigned)rows), dim3(BEST_THREADS), 0, logits, n, first, allowed, scratch, out);
}

__global__ void best_tokens_kernel(const struct kern_best *best, int rows, int ranks, int32_t *tokens, int32_t *tokens_host)
{
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    pdl_go();
    pdl_wait();
    if (i >= rows) return;
    struct kern_best b = best[i * ranks];
    for (int r = 1; r < ranks; r++) b = better(b, best[i * ranks + r]);
    tokens[i] = tokens_host[i] = b.id < 0 || b.id == KERN_NO_ID ? 0 : b.id;
}

void op_best_tokens(const struct op_context *c, const struct kern_best *best, int rows, int ranks, int32_t *tokens, int32_t *tokens_host)
{
    enum { THREADS = 32 };
    op_launch(c, best_tokens_kernel, dim3((unsigned)(rows + THREADS - 1) / THREADS), dim3(THREADS), 0, best, rows, ranks, tokens, tokens_host);
}

__device__ __forceinline__ uint64_t mix64(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

__global__ void hash_kernel(const float *x, int n, uint64_t *out)
{
    __shared__ uint64_t sums[HASH_THREADS / 32];
    pdl_go();
    pdl_wait();
    const uint32_t *row = (const uint32_t *)(x + (size_t)blockIdx.x * (size_t)n);
    uint64_t sum = 0;
    for (int i = (int)threadIdx.x; i < n; i += HASH_THREADS) sum += mix64(((uint64_t)(uint32_t)i << 32 | row[i]) + 0x9e3779b97f4a7c15ull);
    for (int lane = 16; lane; lane >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < HASH_THREADS / 32; i++) sum += sums[i];
    out[blockIdx.x] = mix64(sum);
}

void op_hash_rows(const struct op_context *c, const float *x, int rows, int n, uint64_t *out)
{
    op_launch(c, hash_kernel, dim3((unsigned)rows), dim3(HASH_THREADS), 0, x, n, out);
}
