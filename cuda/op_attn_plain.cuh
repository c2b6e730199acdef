/* op_attn_plain: decode attention for every shape and format, in FP32.
 *
 * A block takes one row, up to 8 query heads of one KV head and one split at a time; keys, then values of a page lie in shared
 * memory as float32. Slots past the row's position are not read from there. */
#ifndef TANDEM_OP_ATTN_PLAIN_CUH
#define TANDEM_OP_ATTN_PLAIN_CUH

#include "op_attn_decode.cuh"

enum { PLAIN_HEADS = 8, PLAIN_MAX_DIM = 256, PLAIN_BLOCKS = 2112 /* of a grid, about */ };

/* Of up to HEADS query heads: 4 or PLAIN_HEADS. */
template <int HEADS> struct plain_shared {
    float query[HEADS][PLAIN_MAX_DIM]; /* zero past the last head */
    float prob[KV_PAGE_TOKENS][HEADS];
    float shrink[HEADS];
};

/* Eight cells that lie together, without their scales. */
struct eight {
    float x[8];
};

template <enum kv_format f> static __device__ __forceinline__ struct eight load_eight(const char *from)
{
    struct eight e;
    if (f == KV_F32) {
#pragma unroll
        for (int i = 0; i < 8; i++) e.x[i] = ((const float *)from)[i];
    } else if (f == KV_INT8) {
        const uint2 w = *(const uint2 *)from;
#pragma unroll
        for (int i = 0; i < 8; i++) e.x[i] = (float)((int)((i < 4 ? w.x : w.y) >> i % 4 * 8 & 255) - KV_CODE_BIAS);
    } else {
        const uint4 v = *(const uint4 *)from;
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            e.x[i] = f == KV_F16 ? __half2float(__ushort_as_half((unsigned short)(w[i / 2] >> i % 2 * 16)))
                                 : __uint_as_float(w[i / 2] >> i % 2 * 16 << 16);
    }
    return e;
}

/* Keys of a page as float32 rows of `pitch`: an item is eight dimensions of a slot. */
template <enum kv_format f>
static __device__ __forceinline__ void plain_keys(int dim, const char *from, int pitch, float *to)
{
    const int items = dim / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < KV_PAGE_TOKENS * items; i += DECODE_THREADS) {
        const int slot = i / items, d = i % items * 8;
        const struct eight e = load_eight<f>(from + kv_page_key_at(f, dim, slot, d));
        float scale = 1.0f;
        if (f == KV_INT8)
            scale = __half2float(*(const __half *)(from + kv_page_key_scale_at(dim, slot, d / KV_INT8_RUN)));
        float4 *at = (float4 *)(to + slot * pitch + d);
        at[0] = make_float4(e.x[0] * scale, e.x[1] * scale, e.x[2] * scale, e.x[3] * scale);
        at[1] = make_float4(e.x[4] * scale, e.x[5] * scale, e.x[6] * scale, e.x[7] * scale);
    }
}

/* Values, of F32 aside: an item is dimensions d, d + 8 of slots s, s + 1, s + 8, s + 9. */
template <enum kv_format f>
static __device__ __forceinline__ void plain_values(int dim, const char *from, int pitch, float *to)
{
    const int items = dim / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < KV_PAGE_TOKENS * items; i += DECODE_THREADS) {
        const int lane = i % 32, tile = i / 32 % 4, d = i / 128 * 16 + lane / 4, slot = tile * 16 + lane % 4 * 2;
        const struct eight e = load_eight<f>(from + kv_page_value_at(f, dim, slot, d));
        const char *scales = from + kv_page_value_scale_at(dim, slot, d / KV_INT8_RUN); /* one run: d and d + 8 */
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const int up = k / 4 * 8 + k % 2;
            float scale = 1.0f;
            if (f == KV_INT8) scale = __half2float(((const __half *)scales)[up]);
            to[(slot + up) * pitch + d + k / 2 % 2 * 8] = e.x[k] * scale;
        }
    }
}

/* prob[key][h] = score, minus infinity past n_keys. A thread takes one key and every other head. */
template <int HEADS>
static __device__ __forceinline__ void plain_scores(struct plain_shared<HEADS> *shared, const float *keys, int pitch,
                                                    int dim, int n_keys)
{
    const int key = threadIdx.x % KV_PAGE_TOKENS, odd = threadIdx.x / KV_PAGE_TOKENS;
    float sum[HEADS / 2] = {};
    if (key < n_keys)
#pragma unroll 4
        for (int d = 0; d < dim; d += 4) {
            const float4 k = *(const float4 *)(keys + key * pitch + d);
#pragma unroll
            for (int i = 0; i < HEADS / 2; i++) {
                const float4 q = *(const float4 *)(shared->query[2 * i + odd] + d);
                sum[i] = fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.y, k.y, fmaf(q.x, k.x, sum[i]))));
            }
        }
#pragma unroll
    for (int i = 0; i < HEADS / 2; i++) shared->prob[key][2 * i + odd] = key < n_keys ? sum[i] : -INFINITY;
}

/* Scores of one or two heads a warp to probabilities; max, sum: of heads warp and warp + 4. */
template <int HEADS>
static __device__ __forceinline__ void plain_probs(struct plain_shared<HEADS> *shared, float *max, float *sum)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < HEADS / 4; i++) {
        const int h = warp + 4 * i;
        const float x = shared->prob[lane][h], y = shared->prob[lane + 32][h];
        float most = fmaxf(x, y);
        for (int k = 16; k; k /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, k));
        most = fmaxf(most, max[i]);
        const float a = exp2_approximate(x - most), b = exp2_approximate(y - most);
        float added = a + b;
        for (int k = 16; k; k /= 2) added += __shfl_xor_sync(~0u, added, k);
        const float shrink = exp2_approximate(max[i] - most);
        shared->prob[lane][h] = a;
        shared->prob[lane + 32][h] = b;
        if (lane == 0) shared->shrink[h] = shrink;
        max[i] = most;
        sum[i] = fmaf(sum[i], shrink, added);
    }
}

/* out[h][i]: dimension threadIdx.x + 128 i. */
template <int HEADS>
static __device__ __forceinline__ void plain_outputs(const struct plain_shared<HEADS> *shared, const float *values,
                                                     int pitch, int dim, int n_keys, float (*out)[2])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int d = threadIdx.x + DECODE_THREADS * i;
        if (d >= dim) break;
#pragma unroll
        for (int h = 0; h < HEADS; h++) out[h][i] *= shared->shrink[h];
#pragma unroll 8
        for (int key = 0; key < n_keys; key++) {
            const float v = values[key * pitch + d];
#pragma unroll
            for (int h = 0; h < HEADS; h += 4) {
                const float4 p = *(const float4 *)(shared->prob[key] + h);
                out[h][i] = fmaf(p.x, v, out[h][i]);
                out[h + 1][i] = fmaf(p.y, v, out[h + 1][i]);
                out[h + 2][i] = fmaf(p.z, v, out[h + 2][i]);
                out[h + 3][i] = fmaf(p.w, v, out[h + 3][i]);
            }
        }
    }
}

template <enum kv_format f, int HEADS>
static __device__ __forceinline__ void plain_split(const struct decode_call *c, const int32_t *table, int row,
                                                   int position, int kv_head, int head, int heads, int split,
                                                   struct plain_shared<HEADS> *shared, float *page)
{
    const struct kern_attn_shape *s = &c->shape;
    const int step = split_pages(position), dim = s->head_dim, pitch = dim + 4;
    const int first = split * step, end = min(first + step, position / KV_PAGE_TOKENS + 1);
    float max[2] = {LOWEST, LOWEST}, sum[2] = {0.0f, 0.0f}, out[HEADS][2] = {};
    for (int i = first; i < end; i++) {
        const int n_keys = min((int)KV_PAGE_TOKENS, position + 1 - i * KV_PAGE_TOKENS);
        const char *keys = kv_page_keys(c->kv, table[i], kv_head, f, dim);
        __syncthreads();
        plain_keys<f>(dim, keys, pitch, page);
        __syncthreads();
        plain_scores<HEADS>(shared, page, pitch, dim, n_keys);
        __syncthreads();
        if (f == KV_F32)
            plain_keys<f>(dim, keys + kv_page_half_bytes(f, dim), pitch, page); /* values lie like keys */
        else
            plain_values<f>(dim, keys + kv_page_half_bytes(f, dim), pitch, page);
        plain_probs<HEADS>(shared, max, sum);
        __syncthreads();
        plain_outputs<HEADS>(shared, page, pitch, dim, n_keys, out);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        if (h >= heads) break;
        const size_t at = partial_at(row * s->n_heads + head + h, split);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if ((int)threadIdx.x + DECODE_THREADS * i < dim)
                c->outputs[at * dim + threadIdx.x + DECODE_THREADS * i] = out[h][i];
        if ((int)threadIdx.x == h % 4 * 32)
            c->stats[at] = h < 4 ? make_float2(max[0], sum[0]) : make_float2(max[1], sum[1]);
    }
}

template <enum kv_format f, int HEADS>
static __global__ void __launch_bounds__(DECODE_THREADS, 4)
    attn_decode_plain(const __grid_constant__ struct decode_call c)
{
    extern __shared__ __align__(128) char dynamic_shared[];
    struct plain_shared<HEADS> *shared = (struct plain_shared<HEADS> *)dynamic_shared;
    pdl_go();
    const struct kern_attn_shape *s = &c.shape;
    const int ratio = s->n_heads / s->n_kv_heads, blocks = (ratio + HEADS - 1) / HEADS, row = blockIdx.z;
    const int kv_head = blockIdx.y / blocks, first = blockIdx.y % blocks * HEADS, dim = s->head_dim;
    const int head = kv_head * ratio + first, heads = min(HEADS, ratio - first);
    const struct device_row where = c.batch.row[row];
    const int pages = where.position / KV_PAGE_TOKENS + 1, step = split_pages(where.position);
    const int32_t *table = c.batch.tables + c.batch.segments[where.segment].table_first;
    pdl_wait();
    if ((int)blockIdx.x * step >= pages) return;
    const float scale = LOG2_E / sqrtf((float)dim);
    for (int d = threadIdx.x; d < dim; d += DECODE_THREADS)
#pragma unroll
        for (int h = 0; h < HEADS; h++) shared->query[h][d] = h < heads ? query_at(&c, row, head + h)[d] * scale : 0.0f;
    for (int split = blockIdx.x; split * step < pages; split += gridDim.x)
        plain_split<f, HEADS>(&c, table, row, where.position, kv_head, head, heads, split, shared,
                              (float *)(shared + 1));
}

template <enum kv_format f, int HEADS>
static void launch_plain(const struct op_context *c, const struct decode_call *call)
{
    const struct kern_attn_shape *s = &call->shape;
    const int ratio = s->n_heads / s->n_kv_heads, heads = s->n_kv_heads * ((ratio + HEADS - 1) / HEADS),
              rows = call->batch.decode_rows;
    /* A block takes further splits where there are fewer blocks than splits. */
    const int most = op_attn_profile(call->batch.longest), wanted = (PLAIN_BLOCKS + heads * rows - 1) / (heads * rows);
    const size_t n_bytes =
        sizeof(struct plain_shared<HEADS>) + (size_t)KV_PAGE_TOKENS * (size_t)(s->head_dim + 4) * sizeof(float);
    cudaFuncSetAttribute(attn_decode_plain<f, HEADS>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes);
    op_launch(c, attn_decode_plain<f, HEADS>,
              dim3((unsigned)(wanted < most ? wanted : most), (unsigned)heads, (unsigned)rows), dim3(DECODE_THREADS),
              n_bytes, *call);
}

template <enum kv_format f> static void launch_plain_format(const struct op_context *c, const struct decode_call *call)
{
    if (call->shape.n_heads / call->shape.n_kv_heads <= 4)
        launch_plain<f, 4>(c, call);
    else
        launch_plain<f, PLAIN_HEADS>(c, call);
}

static inline void attn_decode_plain_launch(const struct op_context *c, const struct decode_call *call)
{
    switch (call->shape.kv) {
    case KV_F32: launch_plain_format<KV_F32>(c, call); break;
    case KV_F16: launch_plain_format<KV_F16>(c, call); break;
    case KV_BF16: launch_plain_format<KV_BF16>(c, call); break;
    default: launch_plain_format<KV_INT8>(c, call); break;
    }
}

#endif
