/* op_rope_kv: from a row of projections to queries in place and keys and values in their page.
 *
 * A warp takes one head of one row: bias, and for queries and keys RMS norm, rotation by position and for INT8 the Hadamard
 * matrix. A lane holds eight neighbouring dimensions: butterflies of the Hadamard matrix up to 4 apart stay in the lane, wider
 * ones are shuffles, and eight lanes hold a run of INT8. The partner of a rotation may be anywhere in the head and comes
 * through shared memory. Every head is computed by itself, so a row's bits depend on nothing else in the batch.
 *
 * Before pdl_wait: weights, angles, and the batch's arrays, which copies write, never kernels; a copy orders kernels fully. */
#include "kv_page.cuh"
#include "op_attn.h"

enum { ROPE_WARPS = 4, ROPE_VALUES = 8, ROPE_MAX_DIM = 32 * ROPE_VALUES };

struct rope_call {
    struct device_batch batch;
    struct kern_attn_shape shape;
    struct kern_attn_weights weights;
    struct kern_kv_layer kv;
    const float *cos_sin;
    float *qkv;
};

/* Dimensions 8 lane .. 8 lane + 7 of a head; past head_dim zeros. */
struct head_values {
    float x[ROPE_VALUES];
};

static __device__ __forceinline__ struct head_values rope_load(const float *at, int dim, int lane)
{
    struct head_values h = {};
    if (lane * ROPE_VALUES < dim) {
        const float4 a = ((const float4 *)at)[2 * lane], b = ((const float4 *)at)[2 * lane + 1];
        h = (struct head_values){{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
    }
    return h;
}

static __device__ __forceinline__ void rope_store(const struct head_values *h, float *at, int dim, int lane)
{
    if (lane * ROPE_VALUES >= dim) return;
    ((float4 *)at)[2 * lane] = make_float4(h->x[0], h->x[1], h->x[2], h->x[3]);
    ((float4 *)at)[2 * lane + 1] = make_float4(h->x[4], h->x[5], h->x[6], h->x[7]);
}

static __device__ __forceinline__ void rope_add(struct head_values *h, const struct head_values *bias)
{
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) h->x[i] += bias->x[i];
}

static __device__ __forceinline__ void rope_norm(struct head_values *h, const struct head_values *norm, float eps,
                                                 int dim)
{
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) squares = fmaf(h->x[i], h->x[i], squares);
    for (int i = 16; i; i /= 2) squares += __shfl_xor_sync(~0u, squares, i);
    const float factor = 1.0f / sqrtf(squares / (float)dim + eps);
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) h->x[i] = h->x[i] * factor * norm->x[i];
}

/* Cosine and sine for each value of the lane; 1 and 0 past rope_dim. */
struct head_angles {
    float2 turn[ROPE_VALUES];
};

/* angles: of the row's position. */
static __device__ __forceinline__ struct head_angles rope_angles(const struct kern_attn_shape *s, const float *angles,
                                                                 int lane)
{
    const int half = s->rope_dim / 2;
    struct head_angles a;
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) {
        const int d = lane * ROPE_VALUES + i, pair = s->rope_adjacent ? d / 2 : d >= half ? d - half : d;
        a.turn[i] = d < 2 * half ? *(const float2 *)(angles + 2 * pair) : make_float2(1.0f, 0.0f);
    }
    return a;
}

/* Pairs (2 i, 2 i + 1), or (i, i + rope_dim / 2). exchange: the warp's. */
static __device__ __forceinline__ void rope_rotate(struct head_values *h, const struct kern_attn_shape *s,
                                                   const struct head_angles *a, float *exchange, int lane)
{
    const int half = s->rope_dim / 2;
    rope_store(h, exchange, s->head_dim, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) {
        const int d = lane * ROPE_VALUES + i;
        if (d >= 2 * half) continue;
        const bool second = s->rope_adjacent ? d & 1 : d >= half;
        const int partner = s->rope_adjacent ? d ^ 1 : second ? d - half : d + half;
        const float2 turn = a->turn[i];
        h->x[i] =
            second ? h->x[i] * turn.x + exchange[partner] * turn.y : h->x[i] * turn.x - exchange[partner] * turn.y;
    }
}

/* The orthonormal Hadamard matrix of the largest power of two in dim, block by block. */
static __device__ __forceinline__ void rope_hadamard(struct head_values *h, int dim, int lane)
{
    const int block = dim & -dim; /* at least 16 */
#pragma unroll
    for (int width = 1; width < ROPE_VALUES; width *= 2)
#pragma unroll
        for (int i = 0; i < ROPE_VALUES; i++)
            if (!(i & width)) {
                const float a = h->x[i], b = h->x[i + width];
                h->x[i] = a + b;
                h->x[i + width] = a - b;
            }
#pragma unroll
    for (int width = 1; width < 32; width *= 2) {
        if (width * ROPE_VALUES >= block) break;
#pragma unroll
        for (int i = 0; i < ROPE_VALUES; i++) {
            const float other = __shfl_xor_sync(~0u, h->x[i], width);
            h->x[i] = lane & width ? other - h->x[i] : h->x[i] + other;
        }
    }
    const float scale = 1.0f / sqrtf((float)block);
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) h->x[i] *= scale;
}

/* Scale of the run that the lane's values are in. See kv_page.cuh. */
static __device__ __forceinline__ __half rope_run_scale(const struct head_values *h)
{
    uint32_t most = 0; /* magnitudes order like their bits */
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) most = max(most, __float_as_uint(fabsf(h->x[i])));
    for (int i = KV_INT8_RUN / ROPE_VALUES / 2; i; i /= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
    const __half scale = __float2half_ru(__uint_as_float(most) / 127.0f);
    return most < 0x7f800000u && !__hisinf(scale) ? scale : __ushort_as_half(0x7fff);
}

static __device__ __forceinline__ uint32_t rope_code(float x, float scale)
{
    return scale > 0.0f ? (uint32_t)(__float2int_rn(x / scale) + KV_CODE_BIAS) : (uint32_t)KV_CODE_BIAS;
}

/* Into slot of a head's keys or values. */
static __device__ __forceinline__ void rope_append_int8(const struct head_values *h, int dim, bool is_value, char *to,
                                                        int slot, int lane)
{
    const __half scale = rope_run_scale(h);
    const float factor = __half2float(scale);
    const int first = lane * ROPE_VALUES, run = first / KV_INT8_RUN;
    uint32_t codes[ROPE_VALUES];
    if (first >= dim) return;
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) codes[i] = rope_code(h->x[i], factor);
    if (first % KV_INT8_RUN == 0)
        *(__half *)(to + (is_value ? kv_page_value_scale_at(dim, slot, run) : kv_page_key_scale_at(dim, slot, run))) =
            scale;
    if (is_value) {
        char *cell =
            to + kv_page_value_at(KV_INT8, dim, slot, first); /* eight dimensions are eight lanes' of a fragment */
        const int pitch = kv_page_value_at(KV_INT8, dim, slot, first + 1) - kv_page_value_at(KV_INT8, dim, slot, first);
#pragma unroll
        for (int i = 0; i < ROPE_VALUES; i++) *(uint8_t *)(cell + i * pitch) = (uint8_t)codes[i];
    } else {
        const uint32_t lower = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24;
        const uint32_t upper = codes[4] | codes[5] << 8 | codes[6] << 16 | codes[7] << 24;
        *(uint2 *)(to + kv_page_key_at(KV_INT8, dim, slot, first)) = make_uint2(lower, upper);
    }
}

static __device__ __forceinline__ void rope_append(const struct head_values *h, const struct kern_attn_shape *s,
                                                   bool is_value, char *to, int slot, int lane)
{
    const int dim = s->head_dim;
    if (s->kv == KV_INT8) {
        rope_append_int8(h, dim, is_value, to, slot, lane);
        return;
    }
    if (lane * ROPE_VALUES >= dim) return;
#pragma unroll
    for (int i = 0; i < ROPE_VALUES; i++) {
        const int d = lane * ROPE_VALUES + i;
        char *cell = to + (is_value ? kv_page_value_at(s->kv, dim, slot, d) : kv_page_key_at(s->kv, dim, slot, d));
        if (s->kv == KV_F32)
            *(float *)cell = h->x[i];
        else if (s->kv == KV_F16)
            *(__half *)cell = __float2half_rn(h->x[i]);
        else
            *(__nv_bfloat16 *)cell = __float2bfloat16_rn(h->x[i]);
    }
}

static __global__ void __launch_bounds__(32 * ROPE_WARPS) rope_kv_append(const __grid_constant__ struct rope_call c)
{
    __shared__ __align__(16) float exchange[ROPE_WARPS][ROPE_MAX_DIM];
    pdl_go();
    const struct kern_attn_shape *s = &c.shape;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = s->head_dim;
    const int head = blockIdx.y * ROPE_WARPS + warp, query_width = s->gated ? 2 * dim : dim;
    const int keys_at = s->n_heads * query_width;
    const bool is_query = head < s->n_heads, is_value = head >= s->n_heads + s->n_kv_heads;
    const int at = is_query ? head * query_width : keys_at + (head - s->n_heads) * dim;
    const float *norm_at = is_query ? c.weights.q_norm_dev : c.weights.k_norm_dev;
    const float *bias = c.weights.bias_dev ? c.weights.bias_dev + at : NULL;
    const bool idle = head >= s->n_heads + 2 * s->n_kv_heads;
    const struct device_row row = c.batch.row[blockIdx.x];
    struct head_values h, norm, add;
    struct head_angles angles;
    int32_t page = 0;
    if (!idle && bias) add = rope_load(bias, dim, lane);
    if (!idle && !is_value) {
        if (norm_at) norm = rope_load(norm_at, dim, lane);
        angles = rope_angles(s, c.cos_sin + (size_t)row.position * (size_t)(s->rope_dim / 2 * 2), lane);
    }
    if (!is_query) page = c.batch.tables[c.batch.segments[row.segment].table_first + row.position / KV_PAGE_TOKENS];
    pdl_wait();
    if (idle) return;
    float *x = c.qkv + (size_t)blockIdx.x * (size_t)(keys_at + 2 * s->n_kv_heads * dim) + at;
    if (is_query && s->gated && bias) {
        const struct head_values gate_bias = rope_load(bias + dim, dim, lane);
        h = rope_load(x + dim, dim, lane);
        rope_add(&h, &gate_bias);
        rope_store(&h, x + dim, dim, lane);
    }
    h = rope_load(x, dim, lane);
    if (bias) rope_add(&h, &add);
    if (!is_value) {
        if (norm_at) rope_norm(&h, &norm, c.weights.norm_eps, dim);
        rope_rotate(&h, s, &angles, exchange[warp], lane);
        if (s->kv == KV_INT8) rope_hadamard(&h, dim, lane);
    }
    if (!is_value || bias) rope_store(&h, x, dim, lane);
    if (is_query) return;
    char *to = kv_page_keys(c.kv, page, (head - s->n_heads) % s->n_kv_heads, s->kv, dim);
    if (is_value) to += kv_page_half_bytes(s->kv, dim);
    rope_append(&h, s, is_value, to, row.position % KV_PAGE_TOKENS, lane);
}

size_t op_kv_page_bytes(const struct kern_attn_shape *s)
{
    return (size_t)s->n_kv_heads * (size_t)kv_page_head_bytes(s->kv, s->head_dim);
}

const char *op_attn_unsupported(const struct kern_attn_shape *s)
{
    if (s->head_dim <= 0 || s->head_dim % 16 || s->head_dim > ROPE_MAX_DIM)
        return "attention: head_dim must be a multiple of 16, at most 256";
    if (s->n_kv_heads <= 0 || s->n_heads <= 0 || s->n_heads % s->n_kv_heads)
        return "attention: query heads must be a multiple of KV heads";
    if (s->rope_dim < 0 || s->rope_dim % 2 || s->rope_dim > s->head_dim)
        return "attention: rope_dim must be even and at most head_dim";
    if ((unsigned)s->kv >= KV_FORMATS) return "attention: unknown KV format";
    return NULL;
}

void op_rope_kv_append(const struct op_context *c, const struct device_batch *b, const struct kern_attn_shape *s,
                       const struct kern_attn_weights *w, const float *cos_sin, float *qkv, struct kern_kv_layer kv)
{
    if (!b->rows) return;
    const int heads = s->n_heads + 2 * s->n_kv_heads;
    const struct rope_call call = {*b, *s, *w, kv, cos_sin, qkv};
    op_launch(c, rope_kv_append, dim3(b->rows, (heads + ROPE_WARPS - 1) / ROPE_WARPS), dim3(32 * ROPE_WARPS), 0, call);
}
