/* kern_cpu_gdn: Gated DeltaNet, compiled once per instruction set.
 *
 * A raw row u holds channels (queries, keys, values), z, b and a. With the weights w (convolution), A < 0 and dt:
 *   y_t = silu(sum over j of w_j u_(t - width + 1 + j))         raw rows before the sequence are zeros
 *   k = y / sqrt(sum y^2 + 1e-6) of each key head; q likewise, times 1 / sqrt(k_dim)
 *   beta = sigmoid(b), g = A softplus(a + dt)
 * and every value head has a state S [k_dim][v_dim], advanced by each row and read after it:
 *   S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q
 *   output = o / sqrt(mean(o^2) + eps) * w_norm * silu(z)
 *
 * DECODE runs just that, in two passes over 64 or so columns of S, which stay in the nearest cache between them. A draft
 * row reads the state of the row before and writes the thread's draft_state, so the sequence's own S is never copied.
 *
 * PREFILL takes 64 rows at a time. With D_ij = e^(g_(j+1) + ... + g_i) for j <= i, p_i = e^(g_0 + ... + g_i) and S the
 * state before the chunk, the same recurrence unrolled reads
 *   u_i = beta_i (v_i - p_i S^T k_i - sum over j < i of D_ij (k_i . k_j) u_j)       forward substitution
 *   o_i = p_i S^T q_i + sum over j <= i of D_ij (q_i . k_j) u_j
 *   S <- p_last S + sum over i of D_last,i k_i u_i^T
 * The exponents are sums of their own, not differences of sums from the chunk's start: those lose the small decays
 * behind a large one. Only exponents of j <= i are formed, so none is positive.
 *
 * Every value is one chain of fused multiply-adds in ascending order with lanes over columns of S (or over j), so its
 * bits depend on the row's index in the chunk only: not on tiles, threads, later rows or the number of chunks in a call.
 * Short chunks are padded with rows of zeros to whole tiles, behind the rows that matter.
 *
 * Threads share out key heads of segments with all of their value heads, or single value heads where there are too few
 * of those; then each of them convolves its queries and keys itself, to the same bits. The history of raw rows is read by
 * all heads and moves on only after the last of them. */
#include "kern_cpu_impl.h"
#include "kern_cpu_vec.h"

#include <math.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

enum {
#if KERN_ISA_ID == 2
    ROWS = 4,        /* rows of a tile of chunk products */
    BLOCKS = 4,      /* blocks of 16 lanes of a tile */
    STEP_BLOCKS = 4, /* blocks of 16 columns that decode walks through S with */
#elif KERN_ISA_ID == 1
    ROWS = 4,
    BLOCKS = 1,
    STEP_BLOCKS = 4,
#else
    ROWS = 2,
    BLOCKS = 1,
    STEP_BLOCKS = 2,
#endif
    CHUNK = KERN_GDN_CHUNK,
    MAX_CONV_WIDTH = 8,
    FETCH_AHEAD = 4
};

static int scratch_index(void)
{
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* ---- what a sequence remembers, and raw rows ---- */

static float *head_state(const struct kern_gdn_shape *s, void *state_dev, int v_head)
{
    return (float *)state_dev + (size_t)v_head * (size_t)(s->k_dim * s->v_dim);
}

/* The last conv_width - 1 raw rows, channels only, the newest last. */
static float *history(const struct kern_gdn_shape *s, void *state_dev) { return head_state(s, state_dev, s->v_heads); }

/* A kept draft: its channels, b and a. */
static size_t replay_width(const struct kern_gdn_shape *s)
{
    return (size_t)kern_gdn_channels(s) + 2 * (size_t)s->v_heads;
}

/* Rows of one segment: of the projections or of kept drafts, and what lies before them. */
struct raw_rows {
    const float *first;
    size_t stride;
    size_t b_at; /* where b starts in a row; a follows it */
    const float *history;
};

static struct raw_rows rows_of_call(const struct cpu_gdn_call *c, const struct cpu_gdn_segment *g)
{
    const size_t width = (size_t)kern_gdn_width(c->shape);
    return (struct raw_rows){.first = c->in + (size_t)g->row_first * width,
                             .stride = width,
                             .b_at = width - 2 * (size_t)c->shape->v_heads,
                             .history = history(c->shape, g->state_dev)};
}

static struct raw_rows rows_of_replay(const struct cpu_gdn_call *c, const struct cpu_gdn_segment *g, const void *replay_dev)
{
    return (struct raw_rows){.first = replay_dev,
                             .stride = replay_width(c->shape),
                             .b_at = (size_t)kern_gdn_channels(c->shape),
                             .history = history(c->shape, g->state_dev)};
}

/* Channels of row t; before row 0 from the history. */
static const float *raw_row(const struct kern_gdn_shape *s, const struct raw_rows *from, int t)
{
    if (t >= 0) return from->first + (size_t)t * from->stride;
    return from->history + (size_t)(s->conv_width - 1 + t) * (size_t)kern_gdn_channels(s);
}

/* Drops the n oldest raw rows and appends rows 0 .. n. */
static void advance_history(const struct kern_gdn_shape *s, const struct raw_rows *from, int n, void *state_dev)
{
    const int kept = s->conv_width - 1;
    const size_t channels = (size_t)kern_gdn_channels(s);
    float *to = history(s, state_dev);
    for (int i = 0; i < kept; i++) memmove(to + (size_t)i * channels, raw_row(s, from, n - kept + i), channels * sizeof *to);
}

/* ---- rows of a head: convolution, norms, gates ---- */

/* y[n] = silu of the convolution at row t, channels first .. first + n */
static void convolve(const struct cpu_gdn_call *c, const struct raw_rows *from, int t, int first, int n, float *y)
{
    const int width = c->shape->conv_width;
    const size_t channels = (size_t)kern_gdn_channels(c->shape);
    const float *w = c->weights->conv_dev + first, *rows[MAX_CONV_WIDTH];
    for (int j = 0; j < width; j++) rows[j] = raw_row(c->shape, from, t - width + 1 + j) + first;
    for (int i = 0; i < n; i += VF) {
        vf sum = vf_load(w + i) * vf_load(rows[0] + i);
        for (int j = 1; j < width; j++) sum = vf_fma(vf_load(w + (size_t)j * channels + i), vf_load(rows[j] + i), sum);
        vf_store(y + i, sum * vf_sigmoid(sum));
    }
}

/* Rows of the call lie a whole projection apart, where no prefetcher of the machine follows: asks for n values of a row
 * that is needed FETCH_AHEAD rows later. */
static void fetch(const float *x, int n)
{
    for (int i = 0; i < n; i += 16) __builtin_prefetch(x + i);
}

static float sum_of_squares(const float *x, int n)
{
    vf sum[NV];
    KERN_EACH (v, NV) sum[v] = vf_zero();
    for (int i = 0; i < n; i += 16)
        KERN_EACH (v, NV) {
            vf at = vf_load(x + i + v * VF);
            sum[v] = vf_fma(at, at, sum[v]);
        }
    return vf_sum16(sum);
}

static void scale_row(float *x, int n, float by)
{
    for (int i = 0; i < n; i += VF) vf_store(x + i, vf_load(x + i) * vf_set1(by));
}

/* q and k of rows t .. t + n of a key head. */
static void prepare_keys(const struct cpu_gdn_call *c, const struct raw_rows *from, int k_head, int t, int n,
                         struct cpu_gdn_scratch *x)
{
    const float epsilon = 1e-6f;
    const int dim = c->shape->k_dim, q_first = k_head * dim, k_first = (c->shape->k_heads + k_head) * dim;
    const float q_scale = 1.0f / sqrtf((float)dim);
    for (int r = 0; r < n; r++) {
        float *q = x->q + r * dim, *k = x->k + r * dim;
        if (r + FETCH_AHEAD < n) {
            const float *later = raw_row(c->shape, from, t + r + FETCH_AHEAD);
            fetch(later + q_first, dim);
            fetch(later + k_first, dim);
        }
        convolve(c, from, t + r, q_first, dim, q);
        convolve(c, from, t + r, k_first, dim, k);
        scale_row(q, dim, q_scale / sqrtf(sum_of_squares(q, dim) + epsilon));
        scale_row(k, dim, 1.0f / sqrtf(sum_of_squares(k, dim) + epsilon));
    }
}

/* v, g and beta of rows t .. t + n of a value head; g and beta are zero from there to the next multiple of 16. */
static void prepare_values(const struct cpu_gdn_call *c, const struct raw_rows *from, int v_head, int t, int n,
                           struct cpu_gdn_scratch *x)
{
    const struct kern_gdn_shape *s = c->shape;
    const int dim = s->v_dim, v_first = 2 * s->k_heads * s->k_dim + v_head * dim;
    const int padded = (n + 15) / 16 * 16;
    const vf a = vf_set1(c->weights->a_dev[v_head]), dt = vf_set1(c->weights->dt_dev[v_head]);
    for (int r = 0; r < n; r++) {
        if (r + FETCH_AHEAD < n) fetch(raw_row(s, from, t + r + FETCH_AHEAD) + v_first, dim);
        const float *gates = from->first + (size_t)(t + r) * from->stride + from->b_at + v_head;
        x->beta[r] = gates[0];
        x->g[r] = gates[s->v_heads];
        convolve(c, from, t + r, v_first, dim, x->v + r * dim);
    }
    for (int r = n; r < padded; r++) x->beta[r] = x->g[r] = 0; /* any numbers */
    for (int r = 0; r < padded; r += VF) {
        vf_store(x->beta + r, vf_sigmoid(vf_load(x->beta + r)));
        vf_store(x->g + r, a * vf_softplus(vf_load(x->g + r) + dt));
    }
    for (int r = n; r < padded; r++) x->beta[r] = x->g[r] = 0;
}

/* The gated norm of row t of a segment. */
static void write_output(const struct cpu_gdn_call *c, const struct cpu_gdn_segment *g, int v_head, int t, const float *o)
{
    const struct kern_gdn_shape *s = c->shape;
    const int dim = s->v_dim;
    const size_t row = (size_t)(g->row_first + t);
    const float *w = c->weights->norm_dev;
    const size_t width = (size_t)kern_gdn_width(s);
    const float *z = c->in + row * width + kern_gdn_channels(s) + v_head * dim;
    if (t + FETCH_AHEAD < g->rows) fetch(z + FETCH_AHEAD * width, dim);
    float *y = c->o + row * (size_t)(s->v_heads * dim) + v_head * dim;
    const vf inverse = vf_set1(1.0f / sqrtf(sum_of_squares(o, dim) / (float)dim + s->norm_eps));
    for (int i = 0; i < dim; i += VF) {
        const vf gate = vf_load(z + i);
        vf_store(y + i, vf_load(o + i) * inverse * vf_load(w + i) * (gate * vf_sigmoid(gate)));
    }
}

/* ---- decode: the recurrence ---- */

/* One row of one value head; from and to are [k_dim][v_dim] and may be the same. */
struct step {
    const float *from;
    float *to;
    const float *q, *k, *v;
    float *o;
    float decay, beta;
    int k_dim, v_dim;
};

KERN_INLINE void step_columns(int blocks, const struct step *s, int column)
{
    const vf decay = vf_set1(s->decay);
    const float *from = s->from + column;
    float *to = s->to + column;
    vf u[STEP_BLOCKS * NV], out[STEP_BLOCKS * NV];
    KERN_EACH (v, blocks * NV) u[v] = out[v] = vf_zero();
    for (int d = 0; d < s->k_dim; d++) {
        const vf k = vf_set1(s->k[d]);
        KERN_EACH (v, blocks * NV) u[v] = vf_fma(k, vf_load(from + d * s->v_dim + v * VF) * decay, u[v]);
    }
    KERN_EACH (v, blocks * NV) u[v] = (vf_load(s->v + column + v * VF) - u[v]) * vf_set1(s->beta);
    for (int d = 0; d < s->k_dim; d++) {
        const vf k = vf_set1(s->k[d]), q = vf_set1(s->q[d]);
        KERN_EACH (v, blocks * NV) {
            const vf state = vf_fma(k, u[v], vf_load(from + d * s->v_dim + v * VF) * decay);
            vf_store(to + d * s->v_dim + v * VF, state);
            out[v] = vf_fma(q, state, out[v]);
        }
    }
    KERN_EACH (v, blocks * NV) vf_store(s->o + column + v * VF, out[v]);
}

static void step_row(const struct step *s)
{
    int column = 0;
    for (; column + STEP_BLOCKS * 16 <= s->v_dim; column += STEP_BLOCKS * 16) step_columns(STEP_BLOCKS, s, column);
    for (; column < s->v_dim; column += 16) step_columns(1, s, column);
}

/* All rows of a value head, whose keys are prepared. The state moves on over the first `kept` of them, the others go on in
 * draft_state. */
static void step_head(const struct cpu_gdn_call *c, const struct cpu_gdn_segment *g, const struct raw_rows *from, int v_head,
                      int kept, struct cpu_gdn_scratch *x)
{
    enum { PADDED = 16 };
    _Static_assert(KERN_MAX_DRAFTS + 1 <= PADDED, "rows of a step");
    const struct kern_gdn_shape *s = c->shape;
    float *state = head_state(s, g->state_dev, v_head), decays[PADDED];
    prepare_values(c, from, v_head, 0, g->rows, x);
    for (int r = 0; r < PADDED; r += VF) vf_store(decays + r, vf_exp(vf_load(x->g + r)));
    for (int r = 0; r < g->rows; r++) {
        const struct step step = {.from = r > kept ? x->draft_state : state,
                                  .to = r < kept ? state : x->draft_state,
                                  .q = x->q + r * s->k_dim,
                                  .k = x->k + r * s->k_dim,
                                  .v = x->v + r * s->v_dim,
                                  .o = x->o,
                                  .decay = decays[r],
                                  .beta = x->beta[r],
                                  .k_dim = s->k_dim,
                                  .v_dim = s->v_dim};
        step_row(&step);
        if (c->o) write_output(c, g, v_head, r, x->o);
    }
}

/* ---- prefill: chunks ---- */

/* acc[ROWS][blocks of 16 lanes] += a[ROWS][n] b[n][lanes]; a and b by their distances of rows and of steps */
KERN_INLINE void product(int blocks, int n, const float *a, int a_row, int a_step, const float *b, int b_step,
                         vf acc[][BLOCKS * NV])
{
    for (int i = 0; i < n; i++, a += a_step, b += b_step) {
        vf lanes[BLOCKS * NV];
        KERN_EACH (v, blocks * NV) lanes[v] = vf_load(b + v * VF);
        KERN_EACH (r, ROWS) {
            const vf x = vf_set1(a[r * a_row]);
            KERN_EACH (v, blocks * NV) acc[r][v] = vf_fma(x, lanes[v], acc[r][v]);
        }
    }
}

KERN_INLINE void load_tile(int blocks, const float *from, int stride, vf acc[][BLOCKS * NV])
{
    KERN_EACH (r, ROWS)
        KERN_EACH (v, blocks * NV) acc[r][v] = vf_load(from + r * stride + v * VF);
}

KERN_INLINE void store_tile(int blocks, float *to, int stride, vf acc[][BLOCKS * NV])
{
    KERN_EACH (r, ROWS)
        KERN_EACH (v, blocks * NV) vf_store(to + r * stride + v * VF, acc[r][v]);
}

KERN_INLINE void clear_tile(int blocks, vf acc[][BLOCKS * NV])
{
    KERN_EACH (r, ROWS)
        KERN_EACH (v, blocks * NV) acc[r][v] = vf_zero();
}

static void clear_rows(float *x, int dim, int first, int end)
{
    memset(x + first * dim, 0, (size_t)((end - first) * dim) * sizeof *x);
}

/* Products of every row's q and k with the keys up to its own; lanes behind it hold whatever comes. */
static void chunk_scores(int dim, int rows, struct cpu_gdn_scratch *x)
{
    for (int d = 0; d < dim; d++)
        for (int i = 0; i < CHUNK; i++) x->k_turned[d * CHUNK + i] = i < rows ? x->k[i * dim + d] : 0;
    for (int i = 0; i < rows; i += ROWS)
        for (int j = 0; j < i + ROWS; j += BLOCKS * 16) {
            vf acc[ROWS][BLOCKS * NV];
            clear_tile(BLOCKS, acc);
            product(BLOCKS, dim, x->k + i * dim, dim, 1, x->k_turned + j, CHUNK, acc);
            store_tile(BLOCKS, x->kk + i * CHUNK + j, CHUNK, acc);
            clear_tile(BLOCKS, acc);
            product(BLOCKS, dim, x->q + i * dim, dim, 1, x->k_turned + j, CHUNK, acc);
            store_tile(BLOCKS, x->qk + i * CHUNK + j, CHUNK, acc);
        }
}

/* The decays of one value head, and the scores times them: to_u = - D (k . k), to_o = D (q . k). */
static void chunk_decays(int rows, struct cpu_gdn_scratch *x)
{
    _Alignas(64) float sums[CHUNK] = {0}; /* of g over rows j + 1 .. i */
    float sum = 0;
    for (int i = 0; i < rows; i++) {
        const vf g = vf_set1(x->g[i]);
        x->from_start[i] = sum += x->g[i];
        for (int j = 0; j <= i; j += VF) vf_store(sums + j, vf_load(sums + j) + g);
        sums[i] = 0;
        for (int j = 0; j <= i; j += VF) {
            const vf decay = vf_exp(vf_load(sums + j));
            vf_store(x->to_end + j, decay); /* the last row's stay */
            vf_store(x->to_u + i * CHUNK + j, vf_zero() - decay * vf_load(x->kk + i * CHUNK + j));
            vf_store(x->to_o + i * CHUNK + j, decay * vf_load(x->qk + i * CHUNK + j));
        }
    }
    for (int i = 0; i < rows; i += VF) vf_store(x->from_start + i, vf_exp(vf_load(x->from_start + i)));
}

/* What one value head's columns are computed from. state: [k_dim][v_dim]. rows: padded; n: those that there are. */
struct chunk {
    struct cpu_gdn_scratch *x;
    float *state;
    int k_dim, v_dim, rows, n;
};

/* k_state and o = rows of k and q times the state, decayed from the chunk's start. */
KERN_INLINE void chunk_from_state(int blocks, const struct chunk *c, int column)
{
    struct cpu_gdn_scratch *x = c->x;
    for (int i = 0; i < c->rows; i += ROWS) {
        vf acc[ROWS][BLOCKS * NV];
        clear_tile(blocks, acc);
        product(blocks, c->k_dim, x->k + i * c->k_dim, c->k_dim, 1, c->state + column, c->v_dim, acc);
        KERN_EACH (r, ROWS)
            KERN_EACH (v, blocks * NV) acc[r][v] = acc[r][v] * vf_set1(x->from_start[i + r]);
        store_tile(blocks, x->k_state + i * c->v_dim + column, c->v_dim, acc);
        clear_tile(blocks, acc);
        product(blocks, c->k_dim, x->q + i * c->k_dim, c->k_dim, 1, c->state + column, c->v_dim, acc);
        KERN_EACH (r, ROWS)
            KERN_EACH (v, blocks * NV) acc[r][v] = acc[r][v] * vf_set1(x->from_start[i + r]);
        store_tile(blocks, x->o + i * c->v_dim + column, c->v_dim, acc);
    }
}

/* v becomes u: rows of a tile meet all earlier tiles' u at once, then each other's one by one. */
KERN_INLINE void chunk_solve(int blocks, const struct chunk *c, int column)
{
    struct cpu_gdn_scratch *x = c->x;
    float *u = x->v + column;
    for (int i = 0; i < c->rows; i += ROWS) {
        const float *to_u = x->to_u + i * CHUNK;
        vf acc[ROWS][BLOCKS * NV];
        KERN_EACH (r, ROWS)
            KERN_EACH (v, blocks * NV)
                acc[r][v] = vf_load(u + (i + r) * c->v_dim + v * VF) -
                            vf_load(x->k_state + (i + r) * c->v_dim + column + v * VF);
        product(blocks, i, to_u, CHUNK, 1, u, c->v_dim, acc);
        KERN_EACH (r, ROWS) {
            KERN_EACH (j, ROWS)
                if (j < r)
                    KERN_EACH (v, blocks * NV) acc[r][v] = vf_fma(vf_set1(to_u[r * CHUNK + i + j]), acc[j][v], acc[r][v]);
            KERN_EACH (v, blocks * NV) acc[r][v] = acc[r][v] * vf_set1(x->beta[i + r]);
        }
        store_tile(blocks, u + i * c->v_dim, c->v_dim, acc);
    }
}

/* o += the decayed scores times u, each row up to its own. */
KERN_INLINE void chunk_outputs(int blocks, const struct chunk *c, int column)
{
    struct cpu_gdn_scratch *x = c->x;
    const float *u = x->v + column;
    for (int i = 0; i < c->rows; i += ROWS) {
        const float *to_o = x->to_o + i * CHUNK;
        vf acc[ROWS][BLOCKS * NV];
        load_tile(blocks, x->o + i * c->v_dim + column, c->v_dim, acc);
        product(blocks, i, to_o, CHUNK, 1, u, c->v_dim, acc);
        KERN_EACH (r, ROWS)
            KERN_EACH (j, ROWS)
                if (j <= r)
                    KERN_EACH (v, blocks * NV)
                        acc[r][v] = vf_fma(vf_set1(to_o[r * CHUNK + i + j]), vf_load(u + (i + j) * c->v_dim + v * VF), acc[r][v]);
        store_tile(blocks, x->o + i * c->v_dim + column, c->v_dim, acc);
    }
}

/* The state after the chunk; u is decayed to the chunk's end on the way. */
KERN_INLINE void chunk_state(int blocks, const struct chunk *c, int column)
{
    struct cpu_gdn_scratch *x = c->x;
    float *u = x->v + column;
    for (int i = 0; i < c->n; i++)
        KERN_EACH (v, blocks * NV)
            vf_store(u + i * c->v_dim + v * VF, vf_load(u + i * c->v_dim + v * VF) * vf_set1(x->to_end[i]));
    const vf decay = vf_set1(x->from_start[c->n - 1]);
    for (int d = 0; d < c->k_dim; d += ROWS) {
        float *state = c->state + d * c->v_dim + column;
        vf acc[ROWS][BLOCKS * NV];
        KERN_EACH (r, ROWS)
            KERN_EACH (v, blocks * NV) acc[r][v] = vf_load(state + r * c->v_dim + v * VF) * decay;
        product(blocks, c->n, x->k + d, 1, c->k_dim, u, c->v_dim, acc);
        store_tile(blocks, state, c->v_dim, acc);
    }
}

KERN_INLINE void chunk_columns(int blocks, const struct chunk *c, int column)
{
    chunk_from_state(blocks, c, column);
    chunk_solve(blocks, c, column);
    chunk_outputs(blocks, c, column);
    chunk_state(blocks, c, column);
}

/* Rows t .. t + n of a value head, whose scores are ready. */
static void chunk_head(const struct cpu_gdn_call *c, const struct cpu_gdn_segment *g, const struct raw_rows *from, int v_head,
                       int t, int n, int padded, struct cpu_gdn_scratch *x)
{
    const struct kern_gdn_shape *s = c->shape;
    const struct chunk chunk = {x, head_state(s, g->state_dev, v_head), s->k_dim, s->v_dim, padded, n};
    prepare_values(c, from, v_head, t, n, x);
    clear_rows(x->v, s->v_dim, n, padded);
    chunk_decays(padded, x);
    int column = 0;
    for (; column + BLOCKS * 16 <= s->v_dim; column += BLOCKS * 16) chunk_columns(BLOCKS, &chunk, column);
    for (; column < s->v_dim; column += 16) chunk_columns(1, &chunk, column);
    for (int r = 0; r < n; r++) write_output(c, g, v_head, t + r, x->o + r * s->v_dim);
}

/* ---- pieces of work ---- */

/* Value heads v_head .. v_head + v_heads, all of one key head. */
struct piece {
    const struct cpu_gdn_segment *segment;
    int k_head, v_head, v_heads;
};

static int heads_per_key(const struct kern_gdn_shape *s) { return s->v_heads / s->k_heads; }

/* Value heads of a piece: all of a key head's when that leaves every thread several pieces. */
static int piece_heads(const struct cpu_gdn_call *c, int threads)
{
    enum { SEVERAL = 4 };
    return threads == 1 || c->n_segments * c->shape->k_heads >= SEVERAL * threads ? heads_per_key(c->shape) : 1;
}

static struct piece find_piece(const struct cpu_gdn_call *c, int heads, int i)
{
    const int pieces = c->shape->v_heads / heads, v_head = i % pieces * heads;
    return (struct piece){&c->segments[i / pieces], v_head / heads_per_key(c->shape), v_head, heads};
}

static int count_pieces(const struct cpu_gdn_call *c, int heads) { return c->n_segments * (c->shape->v_heads / heads); }

static void prefill_piece(const struct cpu_gdn_call *c, const struct piece *p, struct cpu_gdn_scratch *x)
{
    const struct raw_rows from = rows_of_call(c, p->segment);
    for (int t = 0; t < p->segment->rows; t += CHUNK) {
        const int left = p->segment->rows - t, n = left < CHUNK ? left : CHUNK, padded = (n + 15) / 16 * 16;
        prepare_keys(c, &from, p->k_head, t, n, x);
        clear_rows(x->q, c->shape->k_dim, n, padded);
        clear_rows(x->k, c->shape->k_dim, n, padded);
        chunk_scores(c->shape->k_dim, padded, x);
        for (int h = p->v_head; h < p->v_head + p->v_heads; h++) chunk_head(c, p->segment, &from, h, t, n, padded, x);
    }
}

static void step_piece(const struct cpu_gdn_call *c, const struct piece *p, const struct raw_rows *from, int kept,
                       struct cpu_gdn_scratch *x)
{
    prepare_keys(c, from, p->k_head, 0, p->segment->rows, x);
    for (int h = p->v_head; h < p->v_head + p->v_heads; h++) step_head(c, p->segment, from, h, kept, x);
}

/* Keeps the raw rows behind the first. */
static void keep_drafts(const struct cpu_gdn_call *c, const struct cpu_gdn_segment *g, const struct raw_rows *from)
{
    const size_t width = replay_width(c->shape), b_at = (size_t)kern_gdn_channels(c->shape);
    float *to = g->replay_dev;
    for (int r = 1; r < g->rows; r++, to += width) {
        const float *row = from->first + (size_t)r * from->stride;
        memcpy(to, row, b_at * sizeof *to);
        memcpy(to + b_at, row + from->b_at, (width - b_at) * sizeof *to);
    }
}

static void prefill(const struct cpu_gdn_call *c, struct cpu_scratch *scratch, int threads)
{
    const int heads = piece_heads(c, threads), n = count_pieces(c, heads);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && n > 1)
#endif
    for (int i = 0; i < n; i++) {
        const struct piece p = find_piece(c, heads, i);
        prefill_piece(c, &p, &scratch[scratch_index()].gdn);
    }
    for (int i = 0; i < c->n_segments; i++) {
        const struct cpu_gdn_segment *g = &c->segments[i];
        const struct raw_rows from = rows_of_call(c, g);
        advance_history(c->shape, &from, g->rows, g->state_dev);
    }
    (void)threads;
}

static void decode(const struct cpu_gdn_call *c, struct cpu_scratch *scratch, int threads)
{
    const int heads = piece_heads(c, threads), n = count_pieces(c, heads);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && n > 1)
#endif
    for (int i = 0; i < n; i++) {
        const struct piece p = find_piece(c, heads, i);
        const struct raw_rows from = rows_of_call(c, p.segment);
        step_piece(c, &p, &from, 1, &scratch[scratch_index()].gdn);
    }
#if defined(_OPENMP)
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && c->n_segments > 1)
#endif
    for (int i = 0; i < c->n_segments; i++) {
        const struct cpu_gdn_segment *g = &c->segments[i];
        const struct raw_rows from = rows_of_call(c, g);
        keep_drafts(c, g, &from);
        advance_history(c->shape, &from, 1, g->state_dev);
    }
    (void)threads;
}

static void replay(const struct cpu_gdn_call *c, const void *replay_dev, struct cpu_scratch *scratch, int threads)
{
    const int heads = piece_heads(c, threads), n = count_pieces(c, heads);
    const struct raw_rows from = rows_of_replay(c, c->segments, replay_dev);
#if defined(_OPENMP)
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1 && n > 1)
#endif
    for (int i = 0; i < n; i++) {
        const struct piece p = find_piece(c, heads, i);
        step_piece(c, &p, &from, c->segments->rows, &scratch[scratch_index()].gdn);
    }
    advance_history(c->shape, &from, c->segments->rows, c->segments->state_dev);
    (void)threads;
}

const struct cpu_gdn_ops KERN_NAME(kern_cpu_gdn) = {prefill, decode, replay};
