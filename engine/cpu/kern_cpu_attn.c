/* kern_cpu_attn: RoPE, the paged KV cache (F16 or F32) and causal attention, compiled once per instruction set.
 *
 * A page holds, per KV head, K as [head_dim][64 tokens] and then V as [64 tokens][head_dim]. So both products of
 * attention are small matrix products with lanes over the page's stored order: scores q K^T have a lane per key,
 * outputs p V a lane per dimension. One online softmax step per page, pages in order; every row runs the same chains
 *   score_j = scale * (chain over d of q_d k_dj);   p_j = e^(score_j - max)
 *   o_d = chain over j of p_j v_jd, continued from o_d * e^(old max - max)
 * in PREFILL and DECODE, in tiles of any number of rows. Chunks, batches and threads therefore change no bit.
 *
 * Only the row's own page is cut by its position: scores of later slots are computed in lanes of their own, which are
 * selected away; their V rows are not read at all. Free slots may hold anything.
 *
 * PREFILL takes pieces of up to 64 query positions (cut at absolute multiples of 64) and ATTN_Q_HEADS query heads of
 * one KV head: F16 pages are converted to float32 once per piece and met by tiles of positions; the last page, where
 * each row has its own number of keys, by tiles of the heads of one row. DECODE reads the page as it is, once for a KV
 * head's query heads. */
#include "kern_cpu_impl.h"
#include "kern_cpu_vec.h"

#include <math.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

enum {
#if KERN_ISA_ID == 2
    TILE = 6,
    BLOCKS = 4 /* blocks of 16 lanes a tile row spans */
#elif KERN_ISA_ID == 1
    TILE = 6,
    BLOCKS = 1
#else
    TILE = 2,
    BLOCKS = 1
#endif
};
_Static_assert((int)TILE <= (int)ATTN_TILE, "score scratch");

static int scratch_index(void)
{
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* K and V of one KV head within a page, in the stored format; the other pair is NULL. */
struct stored {
    uint16_t *keys16, *values16;
    float *keys, *values;
};

static struct stored stored_page(const struct cpu_attn_call *c, int32_t page, int kv_head)
{
    const size_t half = (size_t)KV_PAGE_TOKENS * (size_t)c->shape->head_dim, first = 2 * half * (size_t)kv_head;
    void *base = (char *)c->kv.base_dev + (size_t)page * c->kv.page_bytes;
    struct stored s = {0};
    if (c->shape->kv == KV_F32) {
        s.keys = (float *)base + first;
        s.values = s.keys + half;
    } else {
        s.keys16 = (uint16_t *)base + first;
        s.values16 = s.keys16 + half;
    }
    return s;
}

static size_t qkv_stride(const struct kern_attn_shape *s)
{
    return (size_t)(s->n_heads + 2 * s->n_kv_heads) * (size_t)s->head_dim;
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

static void append_row(const struct cpu_attn_call *c, const struct kern_segment *g, int r, const float *cos_sin,
                       float *qkv)
{
    const struct kern_attn_shape *s = c->shape;
    const int dim = s->head_dim, position = g->position_first + r, slot = position % KV_PAGE_TOKENS;
    float *row = qkv + (size_t)(g->row_first + r) * qkv_stride(s);
    const float *angles = cos_sin + (size_t)position * (size_t)(s->rope_dim / 2 * 2);
    for (int h = 0; h < s->n_heads + s->n_kv_heads; h++) rotate(row + h * dim, angles, s);
    for (int h = 0; h < s->n_kv_heads; h++) {
        const float *k = row + (s->n_heads + h) * dim, *v = k + s->n_kv_heads * dim;
        const struct stored to = stored_page(c, g->pages[position / KV_PAGE_TOKENS], h);
        if (to.keys) {
            for (int d = 0; d < dim; d++) to.keys[d * KV_PAGE_TOKENS + slot] = k[d];
            memcpy(to.values + slot * dim, v, (size_t)dim * sizeof *v);
            continue;
        }
        uint16_t half[16];
        for (int d = 0; d < dim; d += 16) {
            KERN_EACH (i, NV) vf_to_f16(half + i * VF, vf_load(k + d + i * VF));
            for (int i = 0; i < 16; i++) to.keys16[(d + i) * KV_PAGE_TOKENS + slot] = half[i];
        }
        for (int d = 0; d < dim; d += VF) vf_to_f16(to.values16 + slot * dim + d, vf_load(v + d));
    }
}

static void rope_kv_append(const struct cpu_attn_call *c, const float *cos_sin, float *qkv, int threads)
{
    for (int i = 0; i < c->n_segments; i++) {
        const struct kern_segment *g = &c->segments[i];
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && g->rows > 1)
#endif
        for (int r = 0; r < g->rows; r++) append_row(c, g, r, cos_sin, qkv);
    }
    (void)threads;
}

/* Rows that meet the same keys of a page: query and output at a stride each, the softmax state at another. */
struct rows {
    const float *q;
    float *o;
    size_t q_stride, o_stride;
    float *max;  /* running maximum of the scores */
    float *sums; /* 16 partial sums of e^(score - max) a row */
    size_t state_stride;
    float *probs; /* scratch, 64 a row */
    float scale;
    int dim;
};

/* One page of one KV head: F16 as stored, or float32, stored or copied. */
struct page {
    const uint16_t *keys16, *values16;
    const float *keys, *values;
    int n_keys; /* 1 .. 64 */
};

/* What the compiler must know to make a lean kernel; always a constant. */
struct tile_kind {
    int rows, blocks;
    bool f16;
};

struct matrix {
    const uint16_t *half;
    const float *full;
    size_t stride;
};

/* acc[rows][blocks of 16 lanes] += a[rows][n] * b[n][lanes] */
KERN_INLINE void product(struct tile_kind kind, int n, struct matrix a, struct matrix b, vf acc[][BLOCKS * NV])
{
    for (int k = 0; k < n; k++) {
        vf lanes[BLOCKS * NV];
        const size_t at = (size_t)k * b.stride;
        KERN_EACH (v, kind.blocks * NV)
            lanes[v] = kind.f16 ? vf_from_f16(b.half + at + v * VF) : vf_load(b.full + at + v * VF);
        KERN_EACH (r, kind.rows) {
            vf x = vf_set1(a.full[(size_t)r * a.stride + (size_t)k]);
            KERN_EACH (v, kind.blocks * NV) acc[r][v] = vf_fma(x, lanes[v], acc[r][v]);
        }
    }
}

/* Scaled scores of all 64 slots, those past n_keys too: every slot has lanes of its own. */
KERN_INLINE void page_scores(struct tile_kind kind, const struct rows *t, const struct page *p)
{
    for (int key = 0; key < KV_PAGE_TOKENS; key += BLOCKS * 16) {
        vf acc[TILE][BLOCKS * NV];
        KERN_EACH (r, kind.rows)
            KERN_EACH (v, BLOCKS * NV) acc[r][v] = vf_zero();
        const struct matrix b = kind.f16 ? (struct matrix){p->keys16 + key, NULL, KV_PAGE_TOKENS}
                                         : (struct matrix){NULL, p->keys + key, KV_PAGE_TOKENS};
        product(kind, t->dim, (struct matrix){NULL, t->q, t->q_stride}, b, acc);
        KERN_EACH (r, kind.rows)
            KERN_EACH (v, BLOCKS * NV)
                vf_store(t->probs + r * KV_PAGE_TOKENS + key + v * VF, acc[r][v] * vf_set1(t->scale));
    }
}

static const float slot_numbers[KV_PAGE_TOKENS] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                   16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                   32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                   48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* The rows' new maxima; shrink[r] = e^(old - new). Slots past n_keys become minus infinity, a probability of zero. */
KERN_INLINE void page_maxima(int rows, const struct rows *t, int n_keys, float shrink[16])
{
    const vf lowest = vf_set1(-INFINITY);
    KERN_EACH (r, rows) {
        float *score = t->probs + r * KV_PAGE_TOKENS, *max = t->max + (size_t)r * t->state_stride;
        vf most[NV];
        KERN_EACH (v, NV) most[v] = lowest;
        KERN_EACH (b, KV_PAGE_TOKENS / 16)
            KERN_EACH (v, NV) {
                const int at = b * 16 + v * VF;
                vf s = vf_load(score + at);
                if (n_keys < KV_PAGE_TOKENS) {
                    s = vf_below(vf_load(slot_numbers + at), vf_set1((float)n_keys), s, lowest);
                    vf_store(score + at, s);
                }
                most[v] = vf_max(s, most[v]);
            }
        const float found = vf_max16(most), grown = found > *max ? found : *max;
        shrink[r] = *max - grown;
        *max = grown;
    }
    for (int i = 0; i < rows; i += VF) vf_store(shrink + i, vf_exp(vf_load(shrink + i)));
}

/* Scores to probabilities; their sums join the state. */
KERN_INLINE void page_probs(int rows, const struct rows *t, const float *shrink)
{
    KERN_EACH (r, rows) {
        float *prob = t->probs + r * KV_PAGE_TOKENS, *sums = t->sums + (size_t)r * t->state_stride * 16;
        const vf max = vf_set1(t->max[(size_t)r * t->state_stride]), old = vf_set1(shrink[r]);
        KERN_EACH (v, NV) {
            vf e[KV_PAGE_TOKENS / 16];
            KERN_EACH (b, KV_PAGE_TOKENS / 16) {
                e[b] = vf_exp(vf_load(prob + b * 16 + v * VF) - max);
                vf_store(prob + b * 16 + v * VF, e[b]);
            }
            vf_store(sums + v * VF, vf_fma(vf_load(sums + v * VF), old, (e[0] + e[1]) + (e[2] + e[3])));
        }
    }
}

/* o = o * shrink + p V for `blocks` blocks of dimensions from d on. */
KERN_INLINE void page_outputs(struct tile_kind kind, const struct rows *t, const struct page *p, int d,
                              const float *shrink)
{
    vf acc[TILE][BLOCKS * NV];
    KERN_EACH (r, kind.rows)
        KERN_EACH (v, kind.blocks * NV)
            acc[r][v] = vf_load(t->o + (size_t)r * t->o_stride + d + v * VF) * vf_set1(shrink[r]);
    const struct matrix b = kind.f16 ? (struct matrix){p->values16 + d, NULL, (size_t)t->dim}
                                     : (struct matrix){NULL, p->values + d, (size_t)t->dim};
    product(kind, p->n_keys, (struct matrix){NULL, t->probs, KV_PAGE_TOKENS}, b, acc);
    KERN_EACH (r, kind.rows)
        KERN_EACH (v, kind.blocks * NV) vf_store(t->o + (size_t)r * t->o_stride + d + v * VF, acc[r][v]);
}

/* One page of keys and values for up to TILE rows. */
KERN_INLINE void page_step(int rows, bool f16, const struct rows *t, const struct page *p)
{
    float shrink[16] = {0};
    page_scores((struct tile_kind){rows, BLOCKS, f16}, t, p);
    page_maxima(rows, t, p->n_keys, shrink);
    page_probs(rows, t, shrink);
    int d = 0;
    for (; d + BLOCKS * 16 <= t->dim; d += BLOCKS * 16)
        page_outputs((struct tile_kind){rows, BLOCKS, f16}, t, p, d, shrink);
    for (; d < t->dim; d += 16) page_outputs((struct tile_kind){rows, 1, f16}, t, p, d, shrink);
}

#define STEP_FN(N)                                                                                                     \
    static void step_f16_##N(const struct rows *t, const struct page *p) { page_step(N, true, t, p); }                 \
    static void step_f32_##N(const struct rows *t, const struct page *p) { page_step(N, false, t, p); }
#define STEP_ENTRY(N)                                                                                                  \
    {                                                                                                                  \
        step_f32_##N, step_f16_##N                                                                                     \
    }
STEP_FN(1)
STEP_FN(2)
#if KERN_ISA_ID > 0
STEP_FN(3)
STEP_FN(4)
STEP_FN(5)
STEP_FN(6)
#endif

/* All n rows through a page, tile by tile. */
static void step_rows(struct rows t, int n, const struct page *p)
{
    static void (*const steps[TILE][2])(const struct rows *, const struct page *) = {
        STEP_ENTRY(1),
        STEP_ENTRY(2),
#if KERN_ISA_ID > 0
        STEP_ENTRY(3),
        STEP_ENTRY(4),
        STEP_ENTRY(5),
        STEP_ENTRY(6)
#endif
    };
    for (int done = 0; done < n; done += TILE) {
        const int rows = n - done < TILE ? n - done : TILE;
        steps[rows - 1][p->keys16 != NULL](&t, p);
        t.q += TILE * t.q_stride;
        t.o += TILE * t.o_stride;
        t.max += TILE * t.state_stride;
        t.sums += TILE * t.state_stride * 16;
    }
}

/* Rows row .. row + rows of one segment, all with the same own page, and some query heads of one KV head. */
struct piece {
    const struct kern_segment *segment;
    int row, rows;
    int kv_head, head, heads; /* head: absolute first query head */
};

static int heads_per_kv(const struct kern_attn_shape *s) { return s->n_heads / s->n_kv_heads; }

/* Blocks of at most ATTN_Q_HEADS query heads that one row's work is divided into, over all KV heads. */
static int head_blocks(const struct kern_attn_shape *s)
{
    return (heads_per_kv(s) + ATTN_Q_HEADS - 1) / ATTN_Q_HEADS * s->n_kv_heads;
}

static void set_heads(const struct kern_attn_shape *s, int block, struct piece *p)
{
    const int per_kv = heads_per_kv(s), blocks = (per_kv + ATTN_Q_HEADS - 1) / ATTN_Q_HEADS;
    const int first = block % blocks * ATTN_Q_HEADS;
    p->kv_head = block / blocks;
    p->head = p->kv_head * per_kv + first;
    p->heads = per_kv - first < ATTN_Q_HEADS ? per_kv - first : ATTN_Q_HEADS;
}

/* The rows' view of row r of a piece, state and output cleared for all of them. */
static struct rows begin_piece(const struct cpu_attn_call *c, const struct piece *p, struct cpu_scratch *scratch)
{
    const struct kern_attn_shape *s = c->shape;
    const size_t dim = (size_t)s->head_dim, row = (size_t)(p->segment->row_first + p->row);
    struct rows t = {.q_stride = qkv_stride(s), .o_stride = (size_t)s->n_heads * dim, .dim = s->head_dim};
    t.q = c->qkv + row * t.q_stride + (size_t)p->head * dim;
    t.o = c->o + row * t.o_stride + (size_t)p->head * dim;
    t.max = scratch->maxima;
    t.sums = scratch->sums;
    t.probs = scratch->probs;
    t.state_stride = (size_t)p->heads;
    t.scale = 1.0f / sqrtf((float)s->head_dim);
    const size_t states = (size_t)(p->rows * p->heads);
    for (size_t i = 0; i < states; i++) t.max[i] = -INFINITY;
    memset(t.sums, 0, states * 16 * sizeof *t.sums);
    for (int r = 0; r < p->rows; r++) memset(t.o + (size_t)r * t.o_stride, 0, (size_t)p->heads * dim * sizeof *t.o);
    return t;
}

/* The same rows from the other side: the heads of row r. */
static struct rows heads_of_row(struct rows t, int r)
{
    t.q += (size_t)r * t.q_stride;
    t.o += (size_t)r * t.o_stride;
    t.max += (size_t)r * t.state_stride;
    t.sums += (size_t)r * t.state_stride * 16;
    t.q_stride = t.o_stride = (size_t)t.dim;
    t.state_stride = 1;
    return t;
}

/* Divides by the sums. */
static void finish_piece(const struct piece *p, const struct rows *t)
{
    for (int r = 0; r < p->rows; r++)
        for (int h = 0; h < p->heads; h++) {
            vf sums[NV];
            const float *from = t->sums + ((size_t)r * t->state_stride + (size_t)h) * 16;
            KERN_EACH (v, NV) sums[v] = vf_load(from + v * VF);
            const vf inverse = vf_set1(1.0f / vf_sum16(sums));
            float *o = t->o + (size_t)r * t->o_stride + (size_t)(h * t->dim);
            for (int d = 0; d < t->dim; d += VF) vf_store(o + d, vf_load(o + d) * inverse);
        }
}

static void widen(const uint16_t *from, int n, float *to)
{
    for (int i = 0; i < n; i += VF) vf_store(to + i, vf_from_f16(from + i));
}

static void prefill_piece(const struct cpu_attn_call *c, const struct piece *p, struct cpu_scratch *scratch)
{
    const struct rows t = begin_piece(c, p, scratch);
    const int first = p->segment->position_first + p->row, own = first / KV_PAGE_TOKENS;
    const int page_values = KV_PAGE_TOKENS * t.dim;
    for (int i = 0; i <= own; i++) {
        const struct stored from = stored_page(c, p->segment->pages[i], p->kv_head);
        struct page page = {NULL, NULL, from.keys, from.values, KV_PAGE_TOKENS};
        if (from.keys16) {
            widen(from.keys16, page_values, scratch->keys);
            widen(from.values16, page_values, scratch->values);
            page.keys = scratch->keys;
            page.values = scratch->values;
        }
        struct rows head = t;
        for (int h = 0; i < own && h < p->heads; h++) {
            step_rows(head, p->rows, &page);
            head.q += t.dim;
            head.o += t.dim;
            head.max += 1;
            head.sums += 16;
        }
        for (int r = 0; i == own && r < p->rows; r++) {
            page.n_keys = (first + r) % KV_PAGE_TOKENS + 1;
            step_rows(heads_of_row(t, r), p->heads, &page);
        }
    }
    finish_piece(p, &t);
}

static void decode_piece(const struct cpu_attn_call *c, const struct piece *p, struct cpu_scratch *scratch)
{
    const struct rows t = begin_piece(c, p, scratch), heads = heads_of_row(t, 0);
    const int position = p->segment->position_first + p->row, own = position / KV_PAGE_TOKENS;
    for (int i = 0; i <= own; i++) {
        const struct stored from = stored_page(c, p->segment->pages[i], p->kv_head);
        struct page page = {from.keys16, from.values16, from.keys, from.values, KV_PAGE_TOKENS};
        if (i == own) page.n_keys = position % KV_PAGE_TOKENS + 1;
        step_rows(heads, p->heads, &page);
    }
    finish_piece(p, &t);
}

/* Pieces of a segment's rows: cuts at absolute multiples of `grid` positions. */
static int row_pieces(const struct kern_segment *g, int grid)
{
    return (g->position_first + g->rows - 1) / grid - g->position_first / grid + 1;
}

/* Piece i of the flattened list of all segments' row pieces times head blocks. */
static struct piece find_piece(const struct cpu_attn_call *c, int grid, int i)
{
    const int blocks = head_blocks(c->shape);
    const struct kern_segment *g = c->segments;
    for (int n; i >= (n = row_pieces(g, grid) * blocks); g++) i -= n;
    const int block_first = (g->position_first / grid + i / blocks) * grid - g->position_first;
    const int block_end = block_first + grid;
    struct piece p = {.segment = g, .row = block_first > 0 ? block_first : 0};
    p.rows = (block_end < g->rows ? block_end : g->rows) - p.row;
    set_heads(c->shape, i % blocks, &p);
    return p;
}

static int count_pieces(const struct cpu_attn_call *c, int grid)
{
    int n = 0;
    for (int i = 0; i < c->n_segments; i++) n += row_pieces(&c->segments[i], grid);
    return n * head_blocks(c->shape);
}

static void attention_prefill(const struct cpu_attn_call *c, struct cpu_scratch *scratch, int threads)
{
    const int n = count_pieces(c, ATTN_Q_ROWS);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && n > 1)
#endif
    for (int i = 0; i < n; i++) {
        const struct piece p = find_piece(c, ATTN_Q_ROWS, n - 1 - i); /* the longest first */
        prefill_piece(c, &p, &scratch[scratch_index()]);
    }
    (void)threads;
}

static void attention_decode(const struct cpu_attn_call *c, struct cpu_scratch *scratch, int threads)
{
    const int n = count_pieces(c, 1);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && n > 1)
#endif
    for (int i = 0; i < n; i++) {
        const struct piece p = find_piece(c, 1, i);
        decode_piece(c, &p, &scratch[scratch_index()]);
    }
    (void)threads;
}

const struct cpu_attn_ops KERN_NAME(kern_cpu_attn) = {rope_kv_append, attention_prefill, attention_decode};
