/* kern_cpu_attn: causal attention over the paged KV cache, compiled once per instruction set.
 *
 * Pages hold K as [head_dim][64 tokens] and V as [64 tokens][head_dim] (kern_cpu_kv.h). So both products of attention are
 * small matrix products with lanes over the page's stored order: scores q K^T have a lane per key, outputs p V a lane per
 * dimension. One online softmax step per page, pages in order; every row runs the same chains
 *   score_j = scale * (chain over d of q_d k_dj);   p_j = e^(score_j - max)
 *   o_d = chain over j of p_j v_jd, continued from o_d * e^(old max - max)
 * in PREFILL and DECODE, in tiles of any number of rows. Chunks, batches and threads therefore change no bit.
 *
 * INT8 codes enter the products as they are; their scales stay outside, one factor a run of dimensions and a token:
 *   score_j = scale * (sum over runs of keyscale_j * (chain over the run's d of q_d code_dj))
 *   o_d = chain over j of (p_j valuescale_j) code_jd
 *
 * Only the row's own page is cut by its position: scores of later slots are computed in lanes of their own, which are
 * selected away; their V rows are not read at all, nor do their value scales meet a probability that is used. Free slots
 * may hold anything.
 *
 * PREFILL takes pieces of up to 64 query positions (cut at absolute multiples of 64) and ATTN_Q_HEADS query heads of
 * one KV head: pages are widened to float32 once per piece and met by tiles of positions; the last page, where
 * each row has its own number of keys, by tiles of the heads of one row. DECODE reads the page as it is, once for a KV
 * head's query heads; the rows of a segment (drafts) take each page one after the other, while it is in the cache. */
#include "kern_cpu_kv.h"

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

/* Rows that meet the same keys of a page: query and output at a stride each, the softmax state at another. */
struct rows {
    const float *q;
    float *o;
    size_t q_stride, o_stride;
    int head_stride; /* from one query head to the next: head_dim, or twice that with a gate between */
    float *max;  /* running maximum of the scores */
    float *sums; /* 16 partial sums of e^(score - max) a row */
    size_t state_stride;
    float *probs;        /* scratch, 64 a row */
    float *scaled_probs; /* the same, times the value scales of one run */
    float scale;
    int dim;
};

/* What a page's values are when a product meets them: stored ones, or widened to float32. Codes have scales. */
enum cells { CELLS_F32, CELLS_F16, CELLS_BF16, CELLS_CODES, CELLS_WIDE_CODES, CELL_KINDS };

/* One page of one KV head. */
struct page {
    enum cells cells;
    const void *keys, *values;
    const float *key_scales, *value_scales; /* [runs][64], of codes */
    int n_keys;                             /* 1 .. 64 */
};

/* What the compiler must know to make a lean kernel; always a constant. */
struct tile_kind {
    int rows, blocks;
    enum cells cells;
};

KERN_INLINE bool has_scales(enum cells c) { return c == CELLS_CODES || c == CELLS_WIDE_CODES; }

KERN_INLINE vf load_cells(enum cells c, const void *from, size_t at)
{
    switch (c) {
    case CELLS_F16: return vf_from_f16((const uint16_t *)from + at);
    case CELLS_BF16: return vf_from_bf16((const uint16_t *)from + at);
    case CELLS_CODES: return vf_from_i8((const int8_t *)from + at);
    default: return vf_load((const float *)from + at);
    }
}

/* Stored cells are a stream through memory, a page's keys and then its values, of which the processor's own prefetcher takes in too
 * little: with several sequences that costs a sixth of a decode step. */
enum { AHEAD_BYTES = 2048, LINE_BYTES = 64 };

/* Asks for the cells AHEAD_BYTES behind those at `at`. */
KERN_INLINE void fetch_ahead(struct tile_kind kind, const void *cells, size_t at)
{
    const size_t cell_bytes = kind.cells == CELLS_F32 ? 4 : kind.cells == CELLS_CODES ? 1 : 2;
    if (kind.cells == CELLS_F32 || kind.cells == CELLS_WIDE_CODES) return; /* widened cells are in the cache */
    const char *line = (const char *)cells + at * cell_bytes + AHEAD_BYTES;
    for (size_t i = 0; i < (size_t)kind.blocks * 16 * cell_bytes; i += LINE_BYTES)
        __builtin_prefetch(line + i, 0, 3);
}

struct matrix {
    const float *values;
    size_t stride;
};
struct stored_matrix {
    const void *cells;
    size_t first, stride; /* in cells */
};

/* acc[rows][blocks of 16 lanes] += a[rows][n] * b[n][lanes] */
KERN_INLINE void product(struct tile_kind kind, int n, struct matrix a, struct stored_matrix b, vf acc[][BLOCKS * NV])
{
    for (int k = 0; k < n; k++) {
        vf lanes[BLOCKS * NV];
        const size_t at = b.first + (size_t)k * b.stride;
        KERN_EACH (v, kind.blocks * NV) lanes[v] = load_cells(kind.cells, b.cells, at + (size_t)(v * VF));
        fetch_ahead(kind, b.cells, at);
        KERN_EACH (r, kind.rows) {
            vf x = vf_set1(a.values[(size_t)r * a.stride + (size_t)k]);
            KERN_EACH (v, kind.blocks * NV) acc[r][v] = vf_fma(x, lanes[v], acc[r][v]);
        }
    }
}

/* Scaled scores of all 64 slots, those past n_keys too: every slot has lanes of its own. */
KERN_INLINE void page_scores(struct tile_kind kind, const struct rows *t, const struct page *p)
{
    const int run = has_scales(kind.cells) ? KV_INT8_RUN : t->dim;
    for (int key = 0; key < KV_PAGE_TOKENS; key += BLOCKS * 16)
        for (int d = 0; d < t->dim; d += run) {
            const int n = t->dim - d < run ? t->dim - d : run;
            vf acc[TILE][BLOCKS * NV];
            KERN_EACH (r, kind.rows)
                KERN_EACH (v, BLOCKS * NV) acc[r][v] = vf_zero();
            product(kind, n, (struct matrix){t->q + d, t->q_stride},
                    (struct stored_matrix){p->keys, (size_t)(d * KV_PAGE_TOKENS + key), KV_PAGE_TOKENS}, acc);
            KERN_EACH (r, kind.rows)
                KERN_EACH (v, BLOCKS * NV) {
                    float *score = t->probs + r * KV_PAGE_TOKENS + key + v * VF;
                    vf s = acc[r][v];
                    if (has_scales(kind.cells)) {
                        const vf factor = vf_load(p->key_scales + d + key + v * VF); /* 64 scales a run of 64 */
                        if (d)
                            s = vf_fma(s, factor, vf_load(score));
                        else
                            s *= factor;
                    }
                    if (d + n == t->dim) s *= vf_set1(t->scale);
                    vf_store(score, s);
                }
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
    product(kind, p->n_keys,
            (struct matrix){has_scales(kind.cells) ? t->scaled_probs : t->probs, KV_PAGE_TOKENS},
            (struct stored_matrix){p->values, (size_t)d, (size_t)t->dim}, acc);
    KERN_EACH (r, kind.rows)
        KERN_EACH (v, kind.blocks * NV) vf_store(t->o + (size_t)r * t->o_stride + d + v * VF, acc[r][v]);
}

/* Probabilities times the value scales of one run; of slots past n_keys nothing is read. */
KERN_INLINE void scale_probs(int rows, const struct rows *t, const float *value_scales)
{
    KERN_EACH (r, rows)
        for (int i = r * KV_PAGE_TOKENS, slot = 0; slot < KV_PAGE_TOKENS; slot += VF)
            vf_store(t->scaled_probs + i + slot, vf_load(t->probs + i + slot) * vf_load(value_scales + slot));
}

/* One page of keys and values for up to TILE rows. */
KERN_INLINE void page_step(int rows, enum cells cells, const struct rows *t, const struct page *p)
{
    const struct tile_kind wide = {rows, BLOCKS, cells}, narrow = {rows, 1, cells};
    const int run = has_scales(cells) ? KV_INT8_RUN : t->dim;
    float shrink[16] = {0};
    page_scores(wide, t, p);
    page_maxima(rows, t, p->n_keys, shrink);
    page_probs(rows, t, shrink);
    for (int d = 0, end; d < t->dim; d = end) {
        end = t->dim - d < run ? t->dim : d + run;
        if (has_scales(cells)) scale_probs(rows, t, p->value_scales + d);
        for (; d + BLOCKS * 16 <= end; d += BLOCKS * 16) page_outputs(wide, t, p, d, shrink);
        for (; d < end; d += 16) page_outputs(narrow, t, p, d, shrink);
    }
}

typedef void step_fn(const struct rows *t, const struct page *p);
#define STEP_FN_OF(N, CELLS)                                                                                           \
    static void step_##CELLS##_##N(const struct rows *t, const struct page *p) { page_step(N, CELLS, t, p); }
#define STEP_FN(N)                                                                                                     \
    STEP_FN_OF(N, CELLS_F32)                                                                                           \
    STEP_FN_OF(N, CELLS_F16)                                                                                           \
    STEP_FN_OF(N, CELLS_BF16)                                                                                          \
    STEP_FN_OF(N, CELLS_CODES)                                                                                         \
    STEP_FN_OF(N, CELLS_WIDE_CODES)
#define STEP_ENTRY(N)                                                                                                  \
    {                                                                                                                  \
        step_CELLS_F32_##N, step_CELLS_F16_##N, step_CELLS_BF16_##N, step_CELLS_CODES_##N, step_CELLS_WIDE_CODES_##N   \
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
    static step_fn *const steps[TILE][CELL_KINDS] = {
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
        steps[rows - 1][p->cells](&t, p);
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
    struct rows t = {.q_stride = kv_qkv_stride(s), .o_stride = (size_t)s->n_heads * dim, .dim = s->head_dim};
    t.head_stride = kv_query_width(s);
    t.q = c->qkv + row * t.q_stride + p->head * t.head_stride;
    t.o = c->o + row * t.o_stride + (size_t)p->head * dim;
    t.max = scratch->maxima;
    t.sums = scratch->sums;
    t.probs = scratch->probs;
    t.scaled_probs = scratch->scaled_probs;
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
    t.q_stride = (size_t)t.head_stride;
    t.o_stride = (size_t)t.dim;
    t.state_stride = 1;
    return t;
}

/* o = o * sigmoid(gate) */
static void apply_gate(const float *gate, int dim, float *o)
{
    const vf one = vf_set1(1.0f);
    for (int d = 0; d < dim; d += VF)
        vf_store(o + d, vf_load(o + d) / (one + vf_exp(vf_zero() - vf_load(gate + d))));
}

/* Divides by the sums; multiplies by the gates where there are any. */
static void finish_piece(const struct kern_attn_shape *s, const struct piece *p, const struct rows *t)
{
    for (int r = 0; r < p->rows; r++)
        for (int h = 0; h < p->heads; h++) {
            vf sums[NV];
            const float *from = t->sums + ((size_t)r * t->state_stride + (size_t)h) * 16;
            KERN_EACH (v, NV) sums[v] = vf_load(from + v * VF);
            const vf inverse = vf_set1(1.0f / vf_sum16(sums));
            float *o = t->o + (size_t)r * t->o_stride + (size_t)(h * t->dim);
            for (int d = 0; d < t->dim; d += VF) vf_store(o + d, vf_load(o + d) * inverse);
            if (s->gated) apply_gate(t->q + (size_t)r * t->q_stride + h * t->head_stride + t->dim, t->dim, o);
        }
}

/* A page as it is stored; all of its keys. */
static struct page whole_page(const struct cpu_attn_call *c, const struct piece *p, int i)
{
    static const enum cells cells[KV_FORMATS] = {
        [KV_F16] = CELLS_F16, [KV_F32] = CELLS_F32, [KV_BF16] = CELLS_BF16, [KV_INT8] = CELLS_CODES};
    const struct kv_head_page from = kv_head_page(c, p->segment->pages[i], p->kv_head);
    return (struct page){cells[c->shape->kv], from.keys,         from.values,
                         from.key_scales,     from.value_scales, KV_PAGE_TOKENS};
}

KERN_INLINE void widen_cells(enum cells c, const void *from, int n, float *to)
{
    for (int i = 0; i < n; i += VF) vf_store(to + i, load_cells(c, from, (size_t)i));
}

static void widen(enum cells c, const void *from, int n, float *to)
{
    switch (c) {
    case CELLS_F16: widen_cells(CELLS_F16, from, n, to); break;
    case CELLS_BF16: widen_cells(CELLS_BF16, from, n, to); break;
    default: widen_cells(CELLS_CODES, from, n, to); break;
    }
}

static void widen_page(struct page *p, int dim, struct cpu_scratch *scratch)
{
    if (p->cells == CELLS_F32) return;
    widen(p->cells, p->keys, KV_PAGE_TOKENS * dim, scratch->keys);
    widen(p->cells, p->values, KV_PAGE_TOKENS * dim, scratch->values);
    p->keys = scratch->keys;
    p->values = scratch->values;
    p->cells = p->cells == CELLS_CODES ? CELLS_WIDE_CODES : CELLS_F32;
}

/* The heads of each row through the page they all end in. */
static void own_page(const struct piece *p, const struct rows *t, struct page page)
{
    for (int r = 0; r < p->rows; r++) {
        page.n_keys = (p->segment->position_first + p->row + r) % KV_PAGE_TOKENS + 1;
        step_rows(heads_of_row(*t, r), p->heads, &page);
    }
}

static int own_page_index(const struct piece *p) { return (p->segment->position_first + p->row) / KV_PAGE_TOKENS; }

static void prefill_piece(const struct cpu_attn_call *c, const struct piece *p, struct cpu_scratch *scratch)
{
    const struct rows t = begin_piece(c, p, scratch);
    const int own = own_page_index(p);
    for (int i = 0; i <= own; i++) {
        struct page page = whole_page(c, p, i);
        widen_page(&page, t.dim, scratch);
        if (i == own) {
            own_page(p, &t, page);
            break;
        }
        struct rows head = t;
        for (int h = 0; h < p->heads; h++) {
            step_rows(head, p->rows, &page);
            head.q += t.head_stride;
            head.o += t.dim;
            head.max += 1;
            head.sums += 16;
        }
    }
    finish_piece(c->shape, p, &t);
}

/* The first lines of a page's keys; the rest is asked for on the way. */
static void fetch_start(const void *keys)
{
    for (int i = 0; i < AHEAD_BYTES; i += LINE_BYTES) __builtin_prefetch((const char *)keys + i, 0, 3);
}

static void decode_piece(const struct cpu_attn_call *c, const struct piece *p, struct cpu_scratch *scratch)
{
    const struct rows t = begin_piece(c, p, scratch);
    const int own = own_page_index(p);
    for (int i = 0; i < own; i++) {
        const struct page page = whole_page(c, p, i);
        fetch_start(whole_page(c, p, i + 1).keys);
        for (int r = 0; r < p->rows; r++) step_rows(heads_of_row(t, r), p->heads, &page);
    }
    own_page(p, &t, whole_page(c, p, own));
    finish_piece(c->shape, p, &t);
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

/* Rows of a segment share their pages in one piece, unless threads would have nothing to do. */
static void attention_decode(const struct cpu_attn_call *c, struct cpu_scratch *scratch, int threads)
{
    const int grid = count_pieces(c, ATTN_Q_ROWS) < threads ? 1 : ATTN_Q_ROWS, n = count_pieces(c, grid);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && n > 1)
#endif
    for (int i = 0; i < n; i++) {
        const struct piece p = find_piece(c, grid, i);
        decode_piece(c, &p, &scratch[scratch_index()]);
    }
    (void)threads;
}

const struct cpu_attn_ops KERN_NAME(kern_cpu_attn) = {KERN_NAME(kern_cpu_kv_append), attention_prefill,
                                                      attention_decode};
