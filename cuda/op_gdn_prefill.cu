/* op_gdn_prefill: chunks of 64 rows for heads of 128 x 128, by matrix instructions (sm_90). Four kernels for up to
 * GDN_WINDOW chunks; a longer prompt takes several rounds, which give the same bits as one.
 *
 *   prepare_keys    a block for a chunk and a key head: convolution, norms, the scores K K^T and Q K^T
 *   prepare_values  a block for a chunk and a value head: convolution, gates, T = (I + A)^-1 where A is the strictly
 *                   lower part of beta D K K^T, then W = T diag(beta p) K, U = T diag(beta) V, P = D Q K^T;
 *                   D are the decays between rows, p those from the start
 *   advance         V = U - W S, O = p Q S + P V, S = p_last S + K^T (V decayed to the end), chunk after chunk
 *   finish          gated norm
 *
 * A factor x of a product is a pair of bfloat16, hi + lo = x (1 + 2^-16); products are hi hi + hi lo + lo hi, added in
 * float32. The triangular inverse and the state itself are float32. D's exponents are sums of their own
 * (kern_cpu_gdn.c says why). Rows behind a segment's end are zeros with g = 0 and beta = 0: they add zeros, and the
 * last row's decays are the chunk's. Rows of one chunk of one sequence do meet later ones times zero, so a NaN spreads
 * over its own chunk; no one else reads it. */
#include "op_gdn_chunk.cuh"

enum { THREADS = 256, WARPS = 8, TAPS = 4 };

/* ---- prepare ---- */

struct keys_shared {
    uint4 q[2048], k[2048]; /* blocks [kdim / 16][row / 8] */
    uint4 turned[2048];     /* k, blocks [row / 16][kdim / 8] */
};

struct values_shared {
    uint4 k[2048], v[2048];     /* blocks [row / 16][kdim or vdim / 8]; k as in scratch */
    float decay[CHUNK * CHUNK]; /* D, later the strictly lower matrix */
    float T[CHUNK * CHUNK];
    float temporary[CHUNK * CHUNK]; /* of the inversion, then T's blocks */
    float g[CHUNK], beta[CHUNK], from_start[CHUNK];
    uint64_t bar; /* k has arrived */
};

/* Matrices of 64 x 64 float32 are stored so that rows 0..3 of a column do not share banks; quads stay together. */
static __device__ __forceinline__ int cell(int i, int j) { return i * CHUNK + (j ^ ((i & 3) << 3)); }

/* Blocks are stored with lanes turned by the block's number where the convolution writes them. */
static __device__ __forceinline__ int turned_lane(int block, int lane) { return block * 32 + (lane ^ (block & 7)); }
static __device__ __forceinline__ int key_place(int kb, int tile, int lane)
{
    return (kb * 8 + tile) * 32 + (lane ^ kb);
}

/* Rows 8 warp .. + 8 of the chunk after convolution, channels first + 4 lane .. + 4; zeros from row n on. */
static __device__ __forceinline__ void convolve(const struct gdn_call &a, const struct device_segment &g,
                                                const float *ring, int t0, int n, int first, float4 *y)
{
    const int warp = threadIdx.x / 32, channel = first + 4 * (threadIdx.x % 32), channels = gdn_channels(&a.s);
    float4 x[8 + TAPS - 1], w[TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++) w[j] = *(const float4 *)(a.w.conv_dev + (size_t)j * channels + channel);
#pragma unroll
    for (int i = 0; i < 8 + TAPS - 1; i++) {
        const int r = 8 * warp + i - (TAPS - 1), t = t0 + r, position = g.position_first + t;
        const float *from = a.in + (size_t)(g.row_first + t) * gdn_width(&a.s);
        if (i < TAPS - 1 && t < 0) from = ring + (position & (TAPS - 1)) * channels;
        x[i] = r < n && position >= 0 ? *(const float4 *)(from + channel) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < TAPS; j++) sum = gdn_fma4(w[j], x[i + j], sum);
        y[i] = 8 * warp + i < n ? gdn_silu4(sum) : make_float4(0, 0, 0, 0);
    }
}

static __device__ __forceinline__ void normalize(float4 *y, float scale)
{
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = gdn_scale4(y[i], gdn_inverse_length(gdn_warp_sum(gdn_square4(y[i]))) * scale);
}

/* Rows to blocks [channel / 16][row / 8]: pairs along channels. */
static __device__ __forceinline__ void store_rows(const float4 *y, uint4 *to)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kb = lane / 4, half = lane / 2 % 2, q = 2 * (lane % 2);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint2 pair;
        split_pair(y[i].x, y[i].y, &pair.x, &pair.y);
        ((uint2 *)&to[key_place(kb, warp, i * 4 + q)])[half] = pair;
        split_pair(y[i].z, y[i].w, &pair.x, &pair.y);
        ((uint2 *)&to[key_place(kb, warp, i * 4 + q + 1)])[half] = pair;
    }
}

/* Rows to blocks [row / 16][channel / 8]: pairs along rows. */
static __device__ __forceinline__ void store_turned(const float4 *y, uint4 *to)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = warp / 2 * 16 + lane / 2, half = warp % 2;
    const int column = lane % 2 * 4;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const float *y0 = (const float *)&y[2 * q], *y1 = (const float *)&y[2 * q + 1];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint2 pair;
            split_pair(y0[i], y1[i], &pair.x, &pair.y);
            ((uint2 *)&to[turned_lane(block, (column + i) * 4 + q)])[half] = pair;
        }
    }
}

static __device__ __forceinline__ void prepare_gates(const struct gdn_call &a, const struct device_segment &g, int t0,
                                                     int n, int head, struct values_shared *x)
{
    const int i = threadIdx.x, width = gdn_width(&a.s);
    if (i >= CHUNK) return;
    float log_decay = 0, beta = 0;
    if (i < n) {
        const float *gates = a.in + (size_t)(g.row_first + t0 + i) * width + width - 2 * a.s.v_heads + head;
        log_decay = gdn_log_decay(a.w.a_dev[head], gates[a.s.v_heads] + a.w.dt_dev[head]);
        beta = gdn_sigmoid(gates[0]);
    }
    x->g[i] = log_decay;
    x->beta[i] = beta;
}

/* g of rows first .. end in order; selected, so that all are read at once. */
static __device__ __forceinline__ float decay_sum(const float *g, int first, int end, int bound)
{
    float sum = 0;
#pragma unroll 4
    for (int m = 0; m < bound; m += 4) {
        const float4 x = *(const float4 *)(g + m);
        sum += m >= first && m < end ? x.x : 0.0f;
        sum += m + 1 >= first && m + 1 < end ? x.y : 0.0f;
        sum += m + 2 >= first && m + 2 < end ? x.z : 0.0f;
        sum += m + 3 >= first && m + 3 < end ? x.w : 0.0f;
    }
    return sum;
}

/* D, a thread for 16 rows of a column, and the decays from the start. */
static __device__ __forceinline__ void prepare_decays(struct values_shared *x)
{
    const int j = threadIdx.x % CHUNK, first = threadIdx.x / CHUNK * 16;
    float sum = decay_sum(x->g, j + 1, first, first);
    if (first + 16 > (j & 32)) {
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const float4 four = *(const float4 *)(x->g + first + i);
            const float g[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = first + i + e;
                sum += r > j ? g[e] : 0.0f;
                x->decay[cell(r, j)] = gdn_exp(sum); /* above the diagonal never used */
            }
        }
    }
    if (threadIdx.x < CHUNK) x->from_start[j] = gdn_exp(decay_sum(x->g, 0, j + 1, CHUNK));
}

/* Products of rows 16 m .. + 16 of `rows` with the keys up to them. */
static __device__ __forceinline__ void score(const uint4 *rows, const uint4 *keys, int m, float (*acc)[4])
{
    const int lane = threadIdx.x % 32;
#pragma unroll 2
    for (int kb = 0; kb < 8; kb++) {
        const struct fragment f =
            fragment_of_blocks(rows[key_place(kb, 2 * m, lane)], rows[key_place(kb, 2 * m + 1, lane)]);
#pragma unroll
        for (int pair = 0; pair < 4; pair++) {
            if (pair > m) break;
            const uint4 b[2] = {keys[key_place(kb, 2 * pair, lane)], keys[key_place(kb, 2 * pair + 1, lane)]};
            multiply<2>(acc + 2 * pair, f, b);
        }
    }
}

/* sum over k from first to end of left[row][k] right[k][column .. + 4] */
static __device__ __forceinline__ float4 invert_product(const float *left, const float *right, int row, int column,
                                                        int first, int end)
{
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 2
    for (int k = first; k < end; k += 4) {
        const float4 l = *(const float4 *)&left[cell(row, k)];
        const float by[4] = {l.x, l.y, l.z, l.w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum = gdn_fma4(make_float4(by[e], by[e], by[e], by[e]), *(const float4 *)&right[cell(k + e, column)], sum);
    }
    return sum;
}

/* T = (I + A)^-1. Diagonal blocks of 16 by substitution, a lane a column. Then, of two inverted blocks on the
 * diagonal with A's block B below the first, the inverse's block is -T_2 B T_1: for blocks of 16, then of 32. A warp
 * has 8 rows and 16 columns. */
static __device__ __forceinline__ void invert(const float *A, float *T, float *temporary)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 4 && lane < 16) {
        float column[16];
#pragma unroll
        for (int i = 0; i < 16; i++) column[i] = i == lane ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            T[cell(16 * warp + j, 16 * warp + lane)] = column[j];
#pragma unroll
            for (int i = j + 1; i < 16; i++)
                column[i] = fmaf(-A[cell(16 * warp + i, 16 * warp + j)], column[j], column[i]);
        }
    }
    __syncthreads();
    const int quad = lane % 4 * 4;
    {
        const int at = warp / 2 % 2 * 32, row = at + 16 + warp % 2 * 8 + lane / 4;
        if (warp < 4) *(float4 *)&temporary[cell(row, at + quad)] = invert_product(A, T, row, at + quad, at, at + 16);
        __syncthreads();
        if (warp < 4)
            *(float4 *)&T[cell(row, at + quad)] =
                gdn_scale4(invert_product(T, temporary, row, at + quad, at + 16, at + 32), -1.0f);
        __syncthreads();
    }
    const int half = warp % 2 * 16, row = 32 + warp / 2 * 8 + lane / 4;
    *(float4 *)&temporary[cell(row, half + quad)] = invert_product(A, T, row, half + quad, half, 32);
    __syncthreads();
    *(float4 *)&T[cell(row, half + quad)] =
        gdn_scale4(invert_product(T, temporary, row, half + quad, 32, warp < 4 ? 48 : 64), -1.0f);
    __syncthreads();
}

/* W, a warp for 16 rows and half of the columns. */
static __device__ __forceinline__ void prepare_w(const float *T, const struct values_shared *x, uint4 *to)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / 4, m = half ? 3 - warp % 4 : warp % 4;
    const int row = 16 * m + lane / 4;
    float acc[8][4] = {};
    for (int jb = 0; jb <= m; jb++) {
        float c[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = 16 * jb + 8 * i + 2 * (lane % 4);
            const float b0 = x->beta[j] * x->from_start[j], b1 = x->beta[j + 1] * x->from_start[j + 1];
            const float2 t0 = *(const float2 *)&T[cell(row, j)], t1 = *(const float2 *)&T[cell(row + 8, j)];
            c[i][0] = t0.x * b0;
            c[i][1] = t0.y * b1;
            c[i][2] = t1.x * b0;
            c[i][3] = t1.y * b1;
        }
        const struct fragment f = fragment_of(c[0], c[1]);
        uint4 b[8];
#pragma unroll
        for (int i = 0; i < 8; i++) b[i] = x->k[(jb * 16 + 8 * half + i) * 32 + lane];
        multiply<8>(acc, f, b);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const struct fragment f = fragment_of(acc[2 * i], acc[2 * i + 1]);
        uint4 *block = to + ((4 * half + i) * 8 + 2 * m) * 32 + lane;
        block[0] = make_uint4(f.hi[0], f.lo[0], f.hi[2], f.lo[2]);
        block[32] = make_uint4(f.hi[1], f.lo[1], f.hi[3], f.lo[3]);
    }
}

/* T diag(beta) on and below the diagonal as blocks [row / 16 of T's columns][row / 8]. */
static __device__ __forceinline__ void split_t(const float *T, const float *beta, uint4 *to)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 8 * warp + lane / 4;
    for (int jb = 0; jb <= warp / 2; jb++) {
        const int j = 16 * jb + 2 * (lane % 4);
        const float2 b0 = *(const float2 *)&beta[j], b1 = *(const float2 *)&beta[j + 8];
        const float2 t0 = *(const float2 *)&T[cell(row, j)], t1 = *(const float2 *)&T[cell(row, j + 8)];
        uint4 b;
        split_pair(t0.x * b0.x, t0.y * b0.y, &b.x, &b.y);
        split_pair(t1.x * b1.x, t1.y * b1.y, &b.z, &b.w);
        to[(jb * 8 + warp) * 32 + lane] = b;
    }
}

/* U^T, a warp for 16 columns of v, whose blocks are in x->v; t: of split_t. */
static __device__ __forceinline__ void prepare_u(const uint4 *t, const struct values_shared *x, float4 *to)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float acc[8][4] = {};
#pragma unroll
    for (int jb = 0; jb < 4; jb++) {
        const struct fragment f = fragment_of_blocks(x->v[turned_lane(jb * 16 + 2 * warp, lane)],
                                                     x->v[turned_lane(jb * 16 + 2 * warp + 1, lane)]);
#pragma unroll
        for (int tile = 2 * jb; tile < 8; tile += 2) {
            const uint4 b[2] = {t[(jb * 8 + tile) * 32 + lane], t[(jb * 8 + tile + 1) * 32 + lane]};
            multiply<2>(acc + tile, f, b);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        to[(warp * 8 + i) * 32 + lane] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
}

/* P from the scores of queries, and A from those of keys (in place of D, once all have read it). */
static __device__ __forceinline__ void apply_decays(struct values_shared *x, int m, bool queries, float (*acc)[4],
                                                    uint4 *p_to)
{
    const int lane = threadIdx.x % 32;
    const float by[2] = {queries ? 1.0f : x->beta[16 * m + lane / 4], queries ? 1.0f : x->beta[16 * m + lane / 4 + 8]};
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        if (tile >= 2 * m + 2) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = 16 * m + lane / 4 + half * 8, j = 8 * tile + 2 * (lane % 4);
            const float2 d = *(const float2 *)&x->decay[cell(i, j)];
            float *c = acc[tile] + 2 * half;
            c[0] = (queries ? j <= i : j < i) ? c[0] * d.x * by[half] : 0.0f;
            c[1] = (queries ? j + 1 <= i : j + 1 < i) ? c[1] * d.y * by[half] : 0.0f;
        }
    }
    if (queries) {
#pragma unroll
        for (int jb = 0; jb < 4; jb++) {
            if (jb > m) break;
            const struct fragment f = fragment_of(acc[2 * jb], acc[2 * jb + 1]);
            p_to[(jb * 8 + 2 * m) * 32 + lane] = make_uint4(f.hi[0], f.lo[0], f.hi[2], f.lo[2]);
            p_to[(jb * 8 + 2 * m + 1) * 32 + lane] = make_uint4(f.hi[1], f.lo[1], f.hi[3], f.lo[3]);
        }
    }
    __syncthreads();
    if (!queries) {
#pragma unroll
        for (int tile = 0; tile < 8; tile++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int i = 16 * m + lane / 4 + e / 2 * 8, j = 8 * tile + 2 * (lane % 4);
                if (tile < 2 * m + 2) *(float2 *)&x->decay[cell(i, j)] = make_float2(acc[tile][e], acc[tile][e + 1]);
            }
    }
}

/* Rows of 16 that a warp works on, and whether on queries or keys: an even load on the four schedulers. */
static __device__ __forceinline__ int score_rows(bool *queries)
{
    const int warp = threadIdx.x / 32;
    *queries = warp >= 4;
    return *queries ? 7 - warp : warp;
}

/* A block: a chunk of a key head. */
static __global__ void __launch_bounds__(THREADS, 2) prepare_keys(const struct gdn_call a, int window_first)
{
    extern __shared__ uint4 keys_memory[];
    struct keys_shared *x = (struct keys_shared *)keys_memory;
    const int k_head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_wait();
    int at = 0;
    const int segment = find_chunk(a, window_first + blockIdx.y, &at);
    if (segment < 0) return;
    const struct device_segment g = a.segments[segment];
    const float *ring = gdn_state(a, g.slot) + gdn_matrix_floats(&a.s);
    const int t0 = at * CHUNK, n = min(CHUNK, g.rows - t0);
    char *chunk = chunk_memory(a, blockIdx.y);

    float4 y[8];
    convolve(a, g, ring, t0, n, k_head * DIM, y);
    normalize(y, GDN_QUERY_SCALE);
    store_rows(y, x->q);
    convolve(a, g, ring, t0, n, (a.s.k_heads + k_head) * DIM, y);
    normalize(y, 1.0f);
    store_rows(y, x->k);
    store_turned(y, x->turned);
    __syncthreads();
    pdl_go(); /* not earlier: blocks that only wait would take shared memory from those that work */

    bool queries;
    const int m = score_rows(&queries);
    float acc[8][4] = {};
    score(queries ? x->q : x->k, x->k, m, acc);
    float4 *score_to = score_memory(chunk, k_head) + (queries * 4 + m) * 256 + lane;
#pragma unroll
    for (int tile = 0; tile < 8; tile++)
        if (tile < 2 * m + 2) score_to[tile * 32] = make_float4(acc[tile][0], acc[tile][1], acc[tile][2], acc[tile][3]);
    uint4 *q_to = (uint4 *)q_memory(chunk, k_head), *k_to = (uint4 *)k_memory(chunk, k_head);
    for (int i = warp; i < 64; i += WARPS) {
        q_to[i * 32 + lane] = x->q[key_place(i / 8, i % 8, lane)];
        k_to[i * 32 + lane] = x->turned[turned_lane(i, lane)];
    }
}

static __device__ __forceinline__ void load_keys(const char *from, struct values_shared *x)
{
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x) return;
    const uint32_t bar = shared_address(&x->bar);
    mbar_init(bar, 1);
    mbar_init_fence();
    mbar_expect(bar, sizeof x->k);
    bulk_load(shared_address(x->k), from, sizeof x->k, bar);
#else
    (void)from;
    (void)x;
    __trap(); /* gdn_fast_card */
#endif
}

static __device__ __forceinline__ void wait_for_keys(struct values_shared *x)
{
#if __CUDA_ARCH__ >= 900
    mbar_wait(shared_address(&x->bar), 0);
#else
    (void)x;
#endif
}

/* A block: a chunk of a value head. */
static __global__ void __launch_bounds__(THREADS, 2) prepare_values(const struct gdn_call a, int window_first)
{
    extern __shared__ uint4 values_memory[];
    struct values_shared *x = (struct values_shared *)values_memory;
    const int head = blockIdx.x, k_head = head / (a.s.v_heads / a.s.k_heads), lane = threadIdx.x % 32;
    pdl_wait();
    int at = 0;
    const int segment = find_chunk(a, window_first + blockIdx.y, &at);
    if (segment < 0) return;
    const struct device_segment g = a.segments[segment];
    const float *ring = gdn_state(a, g.slot) + gdn_matrix_floats(&a.s);
    const int t0 = at * CHUNK, n = min(CHUNK, g.rows - t0);
    char *chunk = chunk_memory(a, blockIdx.y);
    load_keys(k_memory(chunk, k_head), x);

    float4 y[8];
    prepare_gates(a, g, t0, n, head, x);
    convolve(a, g, ring, t0, n, 2 * a.s.k_heads * DIM + head * DIM, y);
    store_turned(y, x->v);
    __syncthreads();

    bool queries;
    const int m = score_rows(&queries);
    float acc[8][4];
    const float4 *scores = score_memory(chunk, k_head) + (queries * 4 + m) * 256 + lane;
#pragma unroll
    for (int tile = 0; tile < 8; tile++)
        *(float4 *)acc[tile] = tile < 2 * m + 2 ? scores[tile * 32] : make_float4(0, 0, 0, 0);
    prepare_decays(x);
    __syncthreads();
    float *decays = decay_memory(a, chunk, head);
    if (threadIdx.x < CHUNK) {
        decays[threadIdx.x] = x->from_start[threadIdx.x];
        decays[CHUNK + threadIdx.x] = x->decay[cell(CHUNK - 1, threadIdx.x)];
    }
    apply_decays(x, m, queries, acc, (uint4 *)p_memory(a, chunk, head));
    __syncthreads();

    invert(x->decay, x->T, x->temporary);
    pdl_go();
    uint4 *split = (uint4 *)x->temporary;
    split_t(x->T, x->beta, split);
    wait_for_keys(x);
    prepare_w(x->T, x, (uint4 *)w_memory(a, chunk, head));
    __syncthreads();
    prepare_u(split, x, (float4 *)u_memory(a, chunk, head));
}

/* ---- finish ---- */

/* A block: a chunk of a head. */
static __global__ void __launch_bounds__(THREADS) finish(const struct gdn_call a, int window_first)
{
    enum { PITCH = DIM + 4 };
    __shared__ float x[CHUNK * PITCH];
    const int head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = a.s.v_heads * DIM;
    const float4 w = *(const float4 *)(a.w.norm_dev + 4 * lane);
    pdl_wait();
    int at = 0;
    const int segment = find_chunk(a, window_first + blockIdx.y, &at);
    if (segment < 0) return;
    const struct device_segment g = a.segments[segment];
    const int t0 = at * CHUNK, n = min(CHUNK, g.rows - t0);
    const float4 *o = (const float4 *)u_memory(a, chunk_memory(a, blockIdx.y), head);
    float4 z[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int r = 8 * warp + i;
        const float *from = a.in + (size_t)(g.row_first + t0 + r) * gdn_width(&a.s) + gdn_channels(&a.s) + head * DIM;
        if (r < n) z[i] = *(const float4 *)(from + 4 * lane);
    }
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        const float4 f = o[(warp * 8 + tile) * 32 + lane];
        float *to = x + (8 * tile + 2 * (lane % 4)) * PITCH + 16 * warp + lane / 4;
        to[0] = f.x;
        to[PITCH] = f.y;
        to[8] = f.z;
        to[PITCH + 8] = f.w;
    }
    __syncthreads();
    pdl_go();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int r = 8 * warp + i, row = g.row_first + t0 + r, k = head * DIM + 4 * lane;
        if (r >= n) break;
        const float4 y = *(const float4 *)(x + r * PITCH + 4 * lane);
        const float inverse = gdn_inverse_root(gdn_warp_sum(gdn_square4(y)) / (float)DIM + a.s.norm_eps);
        const float4 gate = gdn_silu4(z[i]);
        act_store2(a.o_act, a.split, width, row, k, y.x * inverse * w.x * gate.x, y.y * inverse * w.y * gate.y);
        act_store2(a.o_act, a.split, width, row, k + 2, y.z * inverse * w.z * gate.z, y.w * inverse * w.w * gate.w);
    }
}

void gdn_prefill_fast(const struct op_context *c, const struct gdn_call *call, int rows)
{
    const struct kern_gdn_shape *s = &call->s;
    const int chunks = gdn_chunks_bound(rows, call->n_segments);
    const int per_segments = gdn_chunks_bound(rows, rows < GDN_MAX_SEGMENTS ? rows : GDN_MAX_SEGMENTS);
    const int window = per_segments < GDN_WINDOW ? per_segments : GDN_WINDOW; /* as op_gdn_scratch_bytes has it */
    cudaFuncSetAttribute(prepare_keys, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct keys_shared));
    cudaFuncSetAttribute(prepare_values, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)sizeof(struct values_shared));
    for (int first = 0; first < chunks; first += window) {
        const int n = chunks - first < window ? chunks - first : window;
        op_launch(c, prepare_keys, dim3(s->k_heads, n), dim3(THREADS), sizeof(struct keys_shared), *call, first);
        op_launch(c, prepare_values, dim3(s->v_heads, n), dim3(THREADS), sizeof(struct values_shared), *call, first);
        gdn_advance(c, call, first, n);
        op_launch(c, finish, dim3(s->v_heads, n), dim3(THREADS), 0, *call, first);
    }
}
