/* op_gdn: sizes, and prefill for any shape and card. Decode is in op_gdn_decode.cu, the fast prefill in
 * op_gdn_prefill.cu.
 *
 * Prefill here is plain: a kernel for convolution, norms and gates of every row; one that walks the chunks of a
 * segment for 16 columns of a head's state, as the head of kern_cpu_gdn.c has it (exponents are sums of their own,
 * forward substitution); one for the gated norm. All sums are chains in ascending order, and a row meets earlier
 * rows only.
 *
 * Scratch: per prefill row its channels after convolution (v becomes o), g and beta. */
#include "op_gdn.cuh"

enum { COLUMNS = 16, CHUNK = KERN_GDN_CHUNK, PITCH = CHUNK + 1, PLAIN_THREADS = 256 };

const char *op_gdn_unsupported(const struct kern_gdn_shape *s)
{
    if (s->k_heads < 1 || s->v_heads < 1 || s->v_heads % s->k_heads) return "value heads must share key heads evenly";
    if (s->k_dim % 16 || s->v_dim % 16 || s->k_dim < 16 || s->v_dim < 16)
        return "head dimensions must be multiples of 16";
    if (s->k_dim > 256 || s->v_dim > 256) return "head dimensions are limited to 256";
    if (s->conv_width < 2 || s->conv_width > 8) return "the convolution must be 2 to 8 wide";
    return NULL;
}

size_t op_gdn_state_bytes(const struct kern_gdn_shape *s)
{
    const size_t floats = gdn_matrix_floats(s) + (size_t)s->conv_width * gdn_channels(s);
    return (floats * sizeof(float) + 63) / 64 * 64;
}

size_t op_gdn_replay_bytes(const struct kern_gdn_shape *s)
{
    const size_t rows = (size_t)(s->conv_width - 1 + KERN_MAX_DRAFTS);
    return (GDN_HEADER_BYTES + rows * gdn_replay_pitch(s) * sizeof(float) + 63) / 64 * 64;
}

static inline __host__ __device__ size_t plain_pitch(const struct kern_gdn_shape *s)
{
    return (size_t)gdn_channels(s) + 2 * s->v_heads;
}

size_t op_gdn_scratch_bytes(const struct kern_gdn_shape *s, int rows)
{
    const size_t plain = (size_t)rows * plain_pitch(s) * sizeof(float);
    const int segments = rows < GDN_MAX_SEGMENTS ? rows : GDN_MAX_SEGMENTS, bound = gdn_chunks_bound(rows, segments);
    const size_t fast = gdn_fast_shape(s) ? (size_t)(bound < GDN_WINDOW ? bound : GDN_WINDOW) * gdn_chunk_bytes(s) : 0;
    return plain > fast ? plain : fast;
}

/* ---- rows ---- */

/* A block a row, a warp a head. */
static __global__ void __launch_bounds__(PLAIN_THREADS) plain_rows(const struct gdn_call a)
{
    pdl_go();
    pdl_wait();
    const struct kern_gdn_shape &s = a.s;
    const int row = a.split.decode + blockIdx.x, channels = gdn_channels(&s), warp = threadIdx.x / 32,
              lane = threadIdx.x % 32;
    const struct device_segment g = a.segments[a.row[row].segment];
    const int t = row - g.row_first;
    const float *ring = gdn_state(a, g.slot) + gdn_matrix_floats(&s);
    float *to = (float *)a.scratch + blockIdx.x * plain_pitch(&s);
    for (int h = warp; h < 2 * s.k_heads + s.v_heads; h += PLAIN_THREADS / 32) {
        const bool key = h < 2 * s.k_heads;
        const int n = key ? s.k_dim : s.v_dim;
        const int first = key ? h * s.k_dim : 2 * s.k_heads * s.k_dim + (h - 2 * s.k_heads) * s.v_dim;
        float squares = 0;
        for (int i = first + lane; i < first + n; i += 32) {
            float y = 0;
            for (int j = 0; j < s.conv_width; j++) {
                const float *from = gdn_raw_row(a, g, ring, t - s.conv_width + 1 + j);
                if (from) y = fmaf(a.w.conv_dev[(size_t)j * channels + i], from[i], y);
            }
            to[i] = y = gdn_silu(y);
            squares = fmaf(y, y, squares);
        }
        if (!key) continue;
        const float scale =
            gdn_inverse_length(gdn_warp_sum(squares)) * (h < s.k_heads ? gdn_inverse_root((float)s.k_dim) : 1.0f);
        for (int i = first + lane; i < first + n; i += 32) to[i] *= scale;
    }
    const float *gates = a.in + (size_t)row * gdn_width(&s) + channels + s.v_heads * s.v_dim;
    for (int h = threadIdx.x; h < s.v_heads; h += PLAIN_THREADS) {
        to[channels + h] = gdn_log_decay(a.w.a_dev[h], gates[s.v_heads + h] + a.w.dt_dev[h]);
        to[channels + s.v_heads + h] = gdn_sigmoid(gates[h]);
    }
}

/* ---- chunks ---- */

struct plain_shared {
    float to_u[CHUNK * PITCH], to_o[CHUNK * PITCH]; /* decayed scores of k and q */
    float u[CHUNK][COLUMNS + 1], o[CHUNK][COLUMNS + 1];
    float g[CHUNK], beta[CHUNK], from_start[CHUNK], to_end[CHUNK];
    float state[256][COLUMNS + 1];
};

/* Rows of a chunk in scratch. */
struct plain_chunk {
    const float *q, *k;
    float *v;
    size_t pitch;
    int n;
};

/* g of rows first .. end, added in order. */
static __device__ float decay_sum(const struct plain_shared *x, int first, int end)
{
    float sum = 0;
    for (int i = first; i < end; i++) sum += x->g[i];
    return sum;
}

static __device__ void plain_scores(const struct plain_chunk &c, int k_dim, struct plain_shared *x)
{
    for (int e = threadIdx.x; e < c.n * c.n; e += PLAIN_THREADS) {
        const int i = e / c.n, j = e % c.n;
        if (j > i) continue;
        float kk = 0, qk = 0;
        for (int d = 0; d < k_dim; d++) {
            const float key = c.k[j * c.pitch + d];
            kk = fmaf(c.k[i * c.pitch + d], key, kk);
            qk = fmaf(c.q[i * c.pitch + d], key, qk);
        }
        const float decay = expf(decay_sum(x, j + 1, i + 1));
        x->to_u[i * PITCH + j] = decay * kk;
        x->to_o[i * PITCH + j] = decay * qk;
    }
    for (int i = threadIdx.x; i < c.n; i += PLAIN_THREADS) {
        x->from_start[i] = expf(decay_sum(x, 0, i + 1));
        x->to_end[i] = expf(decay_sum(x, i + 1, c.n));
    }
}

/* What the state before the chunk gives: u = v - p S^T k, o = p S^T q. */
static __device__ void plain_from_state(const struct plain_chunk &c, int k_dim, struct plain_shared *x)
{
    for (int e = threadIdx.x; e < c.n * COLUMNS; e += PLAIN_THREADS) {
        const int i = e / COLUMNS, column = e % COLUMNS;
        float ks = 0, qs = 0;
        for (int d = 0; d < k_dim; d++) {
            ks = fmaf(c.k[i * c.pitch + d], x->state[d][column], ks);
            qs = fmaf(c.q[i * c.pitch + d], x->state[d][column], qs);
        }
        x->u[i][column] = fmaf(-x->from_start[i], ks, c.v[i * c.pitch + column]);
        x->o[i][column] = x->from_start[i] * qs;
    }
}

static __device__ void plain_solve(int n, struct plain_shared *x)
{
    const int column = threadIdx.x;
    if (column >= COLUMNS) return;
    for (int i = 0; i < n; i++) {
        float u = x->u[i][column];
        for (int j = 0; j < i; j++) u = fmaf(-x->to_u[i * PITCH + j], x->u[j][column], u);
        x->u[i][column] = u * x->beta[i];
    }
}

static __device__ void plain_results(const struct plain_chunk &c, int k_dim, struct plain_shared *x)
{
    for (int e = threadIdx.x; e < c.n * COLUMNS; e += PLAIN_THREADS) {
        const int i = e / COLUMNS, column = e % COLUMNS;
        float o = x->o[i][column];
        for (int j = 0; j <= i; j++) o = fmaf(x->to_o[i * PITCH + j], x->u[j][column], o);
        c.v[i * c.pitch + column] = o;
    }
    for (int e = threadIdx.x; e < k_dim * COLUMNS; e += PLAIN_THREADS) {
        const int d = e / COLUMNS, column = e % COLUMNS;
        float sum = x->from_start[c.n - 1] * x->state[d][column];
        for (int i = 0; i < c.n; i++) sum = fmaf(c.k[i * c.pitch + d], x->to_end[i] * x->u[i][column], sum);
        x->state[d][column] = sum;
    }
}

/* A block: 16 columns of a value head, a segment. */
static __global__ void __launch_bounds__(PLAIN_THREADS) plain_chunks(const struct gdn_call a)
{
    extern __shared__ float plain_memory[];
    struct plain_shared *x = (struct plain_shared *)plain_memory;
    pdl_go();
    pdl_wait();
    const struct kern_gdn_shape &s = a.s;
    const struct device_segment g = a.segments[blockIdx.y];
    const int slices = s.v_dim / COLUMNS, head = blockIdx.x / slices, k_head = head / (s.v_heads / s.k_heads);
    const int v_first = head * s.v_dim + blockIdx.x % slices * COLUMNS, channels = gdn_channels(&s);
    const size_t pitch = plain_pitch(&s);
    float *slot = gdn_state(a, g.slot), *state = slot + (size_t)v_first * s.k_dim;
    for (int e = threadIdx.x; e < s.k_dim * COLUMNS; e += PLAIN_THREADS) x->state[e % s.k_dim][e / s.k_dim] = state[e];
    for (int t = 0; t < g.rows; t += CHUNK) {
        float *rows = (float *)a.scratch + (size_t)(g.row_first - a.split.decode + t) * pitch;
        const struct plain_chunk c = {rows + k_head * s.k_dim, rows + (s.k_heads + k_head) * s.k_dim,
                                      rows + 2 * s.k_heads * s.k_dim + v_first, pitch, min(CHUNK, g.rows - t)};
        for (int i = threadIdx.x; i < c.n; i += PLAIN_THREADS) {
            x->g[i] = rows[i * pitch + channels + head];
            x->beta[i] = rows[i * pitch + channels + s.v_heads + head];
        }
        __syncthreads();
        plain_scores(c, s.k_dim, x);
        __syncthreads();
        plain_from_state(c, s.k_dim, x);
        __syncthreads();
        plain_solve(c.n, x);
        __syncthreads();
        plain_results(c, s.k_dim, x);
        __syncthreads();
    }
    for (int e = threadIdx.x; e < s.k_dim * COLUMNS; e += PLAIN_THREADS) state[e] = x->state[e % s.k_dim][e / s.k_dim];
    gdn_advance_ring(a, g, slot + gdn_matrix_floats(&s), blockIdx.x * PLAIN_THREADS + threadIdx.x,
                     gridDim.x * PLAIN_THREADS);
}

/* ---- gated norm ---- */

/* A block a row, a warp a value head. */
static __global__ void __launch_bounds__(PLAIN_THREADS) plain_norm(const struct gdn_call a)
{
    pdl_go();
    pdl_wait();
    const struct kern_gdn_shape &s = a.s;
    const int row = a.split.decode + blockIdx.x, channels = gdn_channels(&s), width = s.v_heads * s.v_dim;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float *o = (const float *)a.scratch + blockIdx.x * plain_pitch(&s) + 2 * s.k_heads * s.k_dim;
    const float *z = a.in + (size_t)row * gdn_width(&s) + channels;
    for (int h = warp; h < s.v_heads; h += PLAIN_THREADS / 32) {
        float squares = 0;
        for (int i = lane; i < s.v_dim; i += 32) squares = fmaf(o[h * s.v_dim + i], o[h * s.v_dim + i], squares);
        const float inverse = gdn_inverse_root(gdn_warp_sum(squares) / (float)s.v_dim + s.norm_eps);
        for (int i = 2 * lane; i < s.v_dim; i += 64) {
            const int at = h * s.v_dim + i;
            act_store2(a.o_act, a.split, width, row, at, o[at] * inverse * a.w.norm_dev[i] * gdn_silu(z[at]),
                       o[at + 1] * inverse * a.w.norm_dev[i + 1] * gdn_silu(z[at + 1]));
        }
    }
    for (int k = width + 2 * threadIdx.x; k < act_blocks(width) * ACT_BLOCK; k += 2 * PLAIN_THREADS)
        act_store2(a.o_act, a.split, width, row, k, 0, 0);
}

static void prefill_plain(const struct op_context *c, const struct gdn_call *call, int n_decode_segments)
{
    const struct kern_gdn_shape *s = &call->s;
    struct gdn_call by_row = *call;
    by_row.segments -= n_decode_segments; /* device_row counts all segments */
    cudaFuncSetAttribute(plain_chunks, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct plain_shared));
    op_launch(c, plain_rows, dim3(call->split.prefill), dim3(PLAIN_THREADS), 0, by_row);
    op_launch(c, plain_chunks, dim3(s->v_heads * (s->v_dim / COLUMNS), call->n_segments), dim3(PLAIN_THREADS),
              sizeof(struct plain_shared), *call);
    op_launch(c, plain_norm, dim3(call->split.prefill), dim3(PLAIN_THREADS), 0, *call);
}

void op_gdn_prefill(const struct op_context *c, const struct device_batch *b, const struct kern_gdn_shape *s,
                    const struct kern_gdn_weights *w, struct kern_gdn_memory m, const float *in, void *scratch,
                    void *o_act)
{
    struct gdn_call call = {};
    call.s = *s;
    call.w = *w;
    call.m = m;
    call.split.decode = b->decode_rows;
    call.split.prefill = b->rows - b->decode_rows;
    call.segments = b->segments + b->n_decode_segments;
    call.row = b->row;
    call.n_segments = b->n_segments - b->n_decode_segments;
    call.in = in;
    call.scratch = (char *)scratch;
    call.o_act = o_act;
    if (!call.n_segments || !call.split.prefill) return;
    if (gdn_fast_shape(s) && gdn_fast_card(c))
        gdn_prefill_fast(c, &call, call.split.prefill);
    else
        prefill_plain(c, &call, b->n_decode_segments);
}
