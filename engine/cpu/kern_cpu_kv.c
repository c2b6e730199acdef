/* kern_cpu_kv: from a row of projections to queries in place and keys and values in their page, compiled once per
 * instruction set.
 *
 * Per query and key head: bias, RMS norm, rotation by position, for INT8 the Hadamard rotation; every row by itself, so rows
 * are dealt to threads freely. The Hadamard matrix is orthonormal and applied to queries and keys alike: it leaves their
 * products as they are and spreads a single large dimension, which would set the scale of a whole run, over its block.
 *
 * A run of INT8 with a value that is not finite gets NaN for its scale: what is broken stays visible, as in the other
 * formats. Below the smallest normal scale codes are cut at 127 instead of wrapping. */
#include "kern_cpu_kv.h"

#include <math.h>

static uint32_t float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static uint16_t bf16_nearest_even(float x)
{
    const uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u); /* NaN, a quiet one */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/* Rotates one head in place: pairs (2i, 2i + 1), or (i, i + rope_dim / 2). */
static void rotate(float *restrict x, const float *restrict cos_sin, const struct kern_attn_shape *s)
{
    const int half = s->rope_dim / 2;
    if (s->rope_adjacent) {
        for (int i = 0; i < half; i++) {
            const float c = cos_sin[2 * i], sn = cos_sin[2 * i + 1], x0 = x[2 * i], x1 = x[2 * i + 1];
            x[2 * i] = x0 * c - x1 * sn;
            x[2 * i + 1] = x1 * c + x0 * sn;
        }
        return;
    }
    for (int i = 0; i < half; i++) {
        const float c = cos_sin[2 * i], sn = cos_sin[2 * i + 1], x0 = x[i], x1 = x[half + i];
        x[i] = x0 * c - x1 * sn;
        x[half + i] = x1 * c + x0 * sn;
    }
}

/* Rows of the Hadamard matrix of 16: 0x6996 holds the parities of the numbers 0 .. 15. */
#define SIGN(I, J) (0x6996 >> ((I) & (J)) & 1 ? -1.0f : 1.0f)
#define SIGNS(I)                                                                                                       \
    {                                                                                                                  \
        SIGN(I, 0), SIGN(I, 1), SIGN(I, 2), SIGN(I, 3), SIGN(I, 4), SIGN(I, 5), SIGN(I, 6), SIGN(I, 7), SIGN(I, 8),    \
            SIGN(I, 9), SIGN(I, 10), SIGN(I, 11), SIGN(I, 12), SIGN(I, 13), SIGN(I, 14), SIGN(I, 15)                   \
    }
static const float signs[16][16] = {SIGNS(0),  SIGNS(1),  SIGNS(2),  SIGNS(3), SIGNS(4),  SIGNS(5),
                                    SIGNS(6),  SIGNS(7),  SIGNS(8),  SIGNS(9), SIGNS(10), SIGNS(11),
                                    SIGNS(12), SIGNS(13), SIGNS(14), SIGNS(15)};

/* x = H x for each block, H the orthonormal Hadamard matrix in natural order: within 16 lanes as a product with signs, then
 * rounds of butterflies of whole vectors. */
static void hadamard(float *x, int dim)
{
    const int block = dim & -dim;
    const vf scale = vf_set1(1.0f / sqrtf((float)block));
    for (int d = 0; d < dim; d += 16) {
        vf sums[NV];
        KERN_EACH (v, NV) sums[v] = vf_zero();
        KERN_EACH (i, 16)
            KERN_EACH (v, NV) sums[v] = vf_fma(vf_set1(x[d + i]), vf_load(signs[i] + v * VF), sums[v]);
        KERN_EACH (v, NV) vf_store(x + d + v * VF, sums[v] * scale);
    }
    for (int width = 16; width < block; width *= 2)
        for (int first = 0; first < dim; first += 2 * width)
            for (int i = first; i < first + width; i += VF) {
                const vf a = vf_load(x + i), b = vf_load(x + i + width);
                vf_store(x + i, a + b);
                vf_store(x + i + width, a - b);
            }
}

/* One query or key head. norm may be NULL. */
static void turn_head(const struct kern_attn_shape *s, const float *norm, float eps, const float *angles, float *x)
{
    if (norm) KERN_NAME(kern_cpu_norm).rms_norm(x, norm, 1, s->head_dim, eps, x);
    rotate(x, angles, s);
    if (s->kv == KV_INT8) hadamard(x, s->head_dim);
}

/* Codes of a run and its scale: largest magnitude / 127. */
static float int8_run(const float *restrict x, int n, int8_t *restrict codes)
{
    uint32_t most_bits = 0; /* magnitudes order like their bits, infinities and NaN last */
    for (int i = 0; i < n; i++) {
        const uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        if (bits > most_bits) most_bits = bits;
    }
    float most;
    memcpy(&most, &most_bits, sizeof most);
    const float scale = most_bits < 0x7f800000u ? most / 127.0f : NAN;
    if (!(scale > 0)) {
        memset(codes, 0, (size_t)n);
        return scale;
    }
    for (int i = 0; i < n; i++) {
        float code = x[i] / scale;
        code = code > 127.0f ? 127.0f : code;
        code = code < -127.0f ? -127.0f : code;
        codes[i] = (int8_t)(float_bits(code + 0x1.8p23f) & 0xffu); /* adding 1.5 * 2^23 rounds to nearest even */
    }
    return scale;
}

static void store_int8(const struct kv_head_page *to, int slot, const float *k, const float *v, int dim)
{
    int8_t *keys = to->keys, *values = to->values;
    for (int d = 0, run = 0; d < dim; d += KV_INT8_RUN, run++) {
        const int n = dim - d < KV_INT8_RUN ? dim - d : KV_INT8_RUN, at = run * KV_PAGE_TOKENS + slot;
        int8_t codes[KV_INT8_RUN];
        to->key_scales[at] = int8_run(k + d, n, codes);
        for (int i = 0; i < n; i++) keys[(d + i) * KV_PAGE_TOKENS + slot] = codes[i];
        to->value_scales[at] = int8_run(v + d, n, values + slot * dim + d);
    }
}

static void store_f32(const struct kv_head_page *to, int slot, const float *k, const float *v, int dim)
{
    float *keys = to->keys, *values = to->values;
    for (int d = 0; d < dim; d++) keys[d * KV_PAGE_TOKENS + slot] = k[d];
    memcpy(values + slot * dim, v, (size_t)dim * sizeof *v);
}

KERN_INLINE void round16(bool bf16, const float *x, uint16_t *y)
{
    if (!bf16) {
        KERN_EACH (i, NV) vf_to_f16(y + i * VF, vf_load(x + i * VF));
        return;
    }
    for (int i = 0; i < 16; i++) y[i] = bf16_nearest_even(x[i]);
}

KERN_INLINE void store_half(bool bf16, const struct kv_head_page *to, int slot, const float *k, const float *v, int dim)
{
    uint16_t *keys = to->keys, *values = to->values, rounded[16];
    for (int d = 0; d < dim; d += 16) {
        round16(bf16, k + d, rounded);
        for (int i = 0; i < 16; i++) keys[(d + i) * KV_PAGE_TOKENS + slot] = rounded[i];
    }
    for (int d = 0; d < dim; d += 16) round16(bf16, v + d, values + slot * dim + d);
}

static void append_row(const struct cpu_attn_call *c, const struct kern_attn_weights *w, const struct kern_segment *g,
                       int r, const float *cos_sin, float *qkv)
{
    const struct kern_attn_shape *s = c->shape;
    const int dim = s->head_dim, position = g->position_first + r, slot = position % KV_PAGE_TOKENS;
    const int query_width = kv_query_width(s);
    const size_t stride = kv_qkv_stride(s);
    float *row = qkv + (size_t)(g->row_first + r) * stride, *keys = row + s->n_heads * query_width;
    const float *angles = cos_sin + (size_t)position * (size_t)(s->rope_dim / 2 * 2);
    if (w->bias_dev)
        for (size_t i = 0; i < stride; i++) row[i] += w->bias_dev[i];
    for (int h = 0; h < s->n_heads; h++) turn_head(s, w->q_norm_dev, w->norm_eps, angles, row + h * query_width);
    for (int h = 0; h < s->n_kv_heads; h++) {
        float *k = keys + h * dim, *v = k + s->n_kv_heads * dim;
        turn_head(s, w->k_norm_dev, w->norm_eps, angles, k);
        const struct kv_head_page to = kv_head_page(c, g->pages[position / KV_PAGE_TOKENS], h);
        switch (s->kv) {
        case KV_F32: store_f32(&to, slot, k, v, dim); break;
        case KV_INT8: store_int8(&to, slot, k, v, dim); break;
        case KV_BF16: store_half(true, &to, slot, k, v, dim); break;
        default: store_half(false, &to, slot, k, v, dim); break;
        }
    }
}

void KERN_NAME(kern_cpu_kv_append)(const struct cpu_attn_call *c, const struct kern_attn_weights *w,
                                   const float *cos_sin, float *qkv, int threads)
{
    for (int i = 0; i < c->n_segments; i++) {
        const struct kern_segment *g = &c->segments[i];
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && g->rows > 1)
#endif
        for (int r = 0; r < g->rows; r++) append_row(c, w, g, r, cos_sin, qkv);
    }
    (void)threads;
}
