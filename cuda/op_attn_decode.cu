/* op_attn_decode: attention of decode rows over paged keys and values, cut into splits that are merged by a second kernel.
 *
 * The split rule is in op_attn_decode.cuh. Rows of a segment with the same split share a pass over the pages (a piece); at a
 * step of the rule a segment has two pieces. Which block computes a split changes no bit.
 *
 * Fast kernel (INT8, head_dim 256, up to 8 query heads a KV head): two blocks a multiprocessor divide all splits of the batch
 * by their pages. 4 warps, one KV head and split at a time, a page an iteration; the stages in shared memory are kept full
 * across splits. Columns of the matrix instructions are (row, query head) pairs, 8 NQ of them. Scores: warp w takes keys
 * 16 w .. 16 w + 15, all dimensions, one FP32 factor a run. Maxima meet in shared memory (barrier A), probabilities become
 * fragments there (barrier B); outputs: warp w takes dimensions 64 w .. 64 w + 63, all keys. Probabilities carry 2^8 against
 * float16 subnormals and are multiplied by the values' scales. A column meets the same instructions whatever NQ is. The next
 * page's scores are computed among the outputs of a page. Partial results are float16, divided by their sums.
 *
 * The rest is for the plain kernel (op_attn_plain.cuh).
 *
 * Before pdl_wait: the batch's arrays are written by copies, and a copy between kernels orders them fully, so they may be read.
 * The same holds for pages of positions before the batch: they were written before its copy. */
#include "op_attn_decode.cuh"

#include "act.cuh"
#include "op_attn_plain.cuh"

enum {
    MERGE_THREADS = 256,
    MERGE_LANES = MERGE_THREADS / 16,
    FAST_DIM = 256,
    FAST_RATIO = 8,
    FAST_CODES_BYTES = KV_PAGE_TOKENS * FAST_DIM,
    FAST_HALF_BYTES = FAST_CODES_BYTES + KV_PAGE_TOKENS * FAST_DIM / KV_INT8_RUN * 2,
    FAST_STAGE_BYTES = 2 * FAST_HALF_BYTES
};
static const float PROB_EXPONENT = 8.0f;

/* ---- fast kernel: who computes what ---- */

/* Rows of a segment that share a split. */
struct piece {
    int row, position, rows; /* of the first row; row counts in the batch */
    int ratio, kv_head;
    int step, splits; /* pages of a split, splits */
    int fresh;        /* pages from here on are written in this batch */
    const int32_t *table;
};

/* A block's units, a unit being one split of one KV head of a piece. All units of a batch have places on a line, each as
 * long as its pages and one; a block owns the units that begin in its share of the line. */
struct fast_work {
    int segment, first; /* the piece begins with row `first` of the segment */
    struct piece p;
    int split;
    int at, end; /* place of the unit; of the block's share */
};

static __device__ __forceinline__ int unit_length(const struct piece *p) { return p->step + 1; }

/* The piece that begins with row `first` of a segment, at most 8 max_n columns. */
static __device__ __forceinline__ void set_piece(const struct decode_call *c, const struct device_segment *g, int first,
                                                 int max_n, struct piece *p)
{
    p->row = g->row_first + first;
    p->position = g->position_first + first;
    p->step = split_pages(p->position);
    for (p->rows = 1; first + p->rows < g->rows && split_pages(p->position + p->rows) == p->step &&
                      (p->rows + 1) * p->ratio <= 8 * max_n;)
        p->rows++;
    p->splits = ((p->position + p->rows - 1) / KV_PAGE_TOKENS + p->step) / p->step;
    p->fresh = g->position_first / KV_PAGE_TOKENS;
    p->table = c->batch.tables + g->table_first;
}

/* The first unit of the piece behind this one; its place is set by the caller. */
static __device__ __forceinline__ void next_piece(const struct decode_call *c, int max_n, struct fast_work *w)
{
    w->first += w->p.rows;
    w->split = 0;
    w->p.kv_head = 0;
    if (w->first >= c->batch.segments[w->segment].rows) {
        w->first = 0;
        if (++w->segment >= c->batch.n_decode_segments) return;
    }
    const struct device_segment g = c->batch.segments[w->segment];
    set_piece(c, &g, w->first, max_n, &w->p);
}

/* True when the next unit has other queries. */
static __device__ __forceinline__ bool next_unit(const struct decode_call *c, int max_n, struct fast_work *w)
{
    w->at += unit_length(&w->p);
    if (++w->split < w->p.splits) return false;
    w->split = 0;
    if (++w->p.kv_head == c->shape.n_kv_heads) next_piece(c, max_n, w);
    return true;
}

/* The block's first unit; by whole warps, a lane measures some neighbouring segments. */
static __device__ __forceinline__ void find_work(const struct decode_call *c, int max_n, struct fast_work *w)
{
    const int n = c->batch.n_decode_segments, lane = threadIdx.x % 32, each = (n + 31) / 32,
              heads = c->shape.n_kv_heads;
    int length = 0;
    w->p.ratio = c->shape.n_heads / heads;
    for (int i = lane * each; i < min((lane + 1) * each, n); i++) {
        const struct device_segment g = c->batch.segments[i];
        for (int first = 0; first < g.rows; first += w->p.rows) {
            set_piece(c, &g, first, max_n, &w->p);
            length += heads * w->p.splits * unit_length(&w->p);
        }
    }
    int end = length;
    for (int i = 1; i < 32; i *= 2) {
        const int before = __shfl_up_sync(~0u, end, i);
        if (lane >= i) end += before;
    }
    const long long total = __shfl_sync(~0u, end, 31);
    /* Of few units every other share is empty: neighbouring shares are for blocks that meet on one multiprocessor. */
    const int half = gridDim.x / 2, share = gridDim.x % 2 ? blockIdx.x : blockIdx.x % half * 2 + blockIdx.x / half;
    const int begin = (int)(total * share / gridDim.x);
    const int owner = 31 - __clz((int)__ballot_sync(~0u, length > 0 && end - length <= begin));
    w->end = (int)(total * (share + 1) / gridDim.x);
    w->at = __shfl_sync(~0u, end - length, owner);
    w->segment = owner * each;
    w->first = w->split = w->p.kv_head = 0;
    const struct device_segment g = c->batch.segments[w->segment];
    set_piece(c, &g, 0, max_n, &w->p);
    while (w->segment < n && w->at < begin) {
        const int skip = (begin - w->at + unit_length(&w->p) - 1) / unit_length(&w->p), units = heads * w->p.splits;
        w->at += min(skip, units) * unit_length(&w->p);
        w->p.kv_head = skip / w->p.splits;
        w->split = skip % w->p.splits;
        if (skip >= units) next_piece(c, max_n, w);
    }
}

/* ---- fast kernel: pages into shared memory ---- */

/* Shared memory of a kernel for up to 8 MAX columns. */
template <int MAX, int STAGES> struct fast_shared {
    char stages[STAGES][FAST_STAGE_BYTES];
    uint4 queries[4 * MAX * 2 * 32]; /* [run][n][2][lane] 8 dimensions of a column as float16 */
    uint2 probs[2][4][MAX][32];      /* [parity of the page][16 keys][n][lane] fragments */
    float maxima[2][4][8 * MAX];     /* [parity of the page][warp][column] */
    float sums[4][8 * MAX];
    int column[8 * MAX], last_key[8 * MAX]; /* row * query heads + head, or -1; the row's position */
    uint64_t filled[STAGES][2];             /* barriers of keys, of values */
    /* Thread 0's: the unit and page to be loaded behind the next ones. */
    struct fast_work ahead;
    const char *ahead_base;     /* the KV head's keys on page 0 */
    const int32_t *ahead_table; /* the next page's entry */
    int ahead_left;             /* pages of the unit, 0 behind the block's last */
    /* What is loaded behind the next barrier A; NULL: nothing. */
    const char *next_keys, *next_values;
};

/* Which stage the next page lies in; goes on from unit to unit. */
struct fast_ring {
    int stage;
    uint32_t parity; /* of the stage's barriers */
    int turn;        /* alternates from page to page */
};

static __device__ __forceinline__ int end_page(const struct fast_work *w)
{
    const struct piece *p = &w->p;
    return min((w->split + 1) * p->step, (p->position + p->rows - 1) / KV_PAGE_TOKENS + 1);
}

template <int MAX, int STAGES>
static __device__ __forceinline__ void open_unit(const struct decode_call *c, struct fast_shared<MAX, STAGES> *s)
{
    const struct fast_work *w = &s->ahead;
    const int first = w->split * w->p.step;
    s->ahead_base = kv_page_keys(c->kv, 0, w->p.kv_head, KV_INT8, FAST_DIM);
    s->ahead_table = w->p.table + first;
    s->ahead_left = w->at < w->end ? end_page(w) - first : 0;
}

/* Keys of the next page to load, NULL behind the block's last. fresh: it is written in this batch. */
template <int MAX, int STAGES>
static __device__ __forceinline__ const char *next_page(const struct decode_call *c, struct fast_shared<MAX, STAGES> *s,
                                                        bool *fresh)
{
    const int left = s->ahead_left;
    const int32_t *entry = s->ahead_table;
    if (!left) return NULL;
    const char *keys = s->ahead_base + (size_t)*entry * c->kv.page_bytes;
    *fresh = entry - s->ahead.p.table >= s->ahead.p.fresh;
    s->ahead_table = entry + 1;
    s->ahead_left = left - 1;
    if (left == 1) {
        next_unit(c, MAX, &s->ahead);
        open_unit(c, s);
    }
    return keys;
}

/* Starts the copy of a page's keys or values: by one thread on sm_90, by all before. */
template <int MAX, int STAGES>
static __device__ __forceinline__ void fast_load(struct fast_shared<MAX, STAGES> *s, const char *from, int stage,
                                                 bool values)
{
    const uint32_t to = shared_address(s->stages[stage] + (values ? FAST_HALF_BYTES : 0));
#if __CUDA_ARCH__ >= 900
    const uint32_t bar = shared_address(&s->filled[stage][values]);
    mbar_expect(bar, FAST_HALF_BYTES);
    bulk_load(to, from, FAST_HALF_BYTES, bar);
#elif __CUDA_ARCH__ >= 800
    for (int i = threadIdx.x * 16; i < FAST_HALF_BYTES; i += DECODE_THREADS * 16)
        asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to + i), "l"(from + i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    (void)to, (void)from;
#endif
}

/* sm_80: all but the last two groups have arrived, after the next barrier of the block for every thread. */
static __device__ __forceinline__ void fast_wait_groups()
{
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
    asm volatile("cp.async.wait_group 2;" ::: "memory");
#endif
}

static __device__ __forceinline__ void fast_no_load()
{
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 900
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int MAX, int STAGES>
static __device__ __forceinline__ void fast_wait(struct fast_shared<MAX, STAGES> *s, const struct fast_ring *ring,
                                                 bool values)
{
#if __CUDA_ARCH__ >= 900
    mbar_wait(shared_address(&s->filled[ring->stage][values]), ring->parity);
#else
    (void)s, (void)ring, (void)values;
#endif
}

/* First copies, and pdl_wait: pages that this batch does not write are there already, they are not waited for.
 * Groups on sm_80: keys 0, values 0, keys 1; then one of values and one of keys a page. */
template <int MAX, int STAGES>
static __device__ __forceinline__ void fast_begin(const struct decode_call *c, struct fast_shared<MAX, STAGES> *s,
                                                  const struct fast_work *work)
{
    bool fresh = false;
    if (threadIdx.x == 0) {
        s->ahead = *work;
        open_unit(c, s);
    }
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) mbar_init(shared_address(&s->filled[0][0] + i), 1);
        mbar_init_fence();
        for (int i = 0; i < STAGES; i++) {
            const char *keys = next_page(c, s, &fresh);
            if (!keys) break;
            if (fresh) pdl_wait();
            fast_load(s, keys, i, false);
            fast_load(s, keys + FAST_HALF_BYTES, i, true);
        }
        s->next_values = NULL;
        s->next_keys = next_page(c, s, &fresh);
    }
    pdl_wait();
#else
    pdl_wait();
    if (threadIdx.x == 0) {
        s->next_values = next_page(c, s, &fresh);
        s->next_keys = next_page(c, s, &fresh);
    }
    __syncthreads();
    const char *first = s->next_values, *second = s->next_keys;
    __syncthreads();
    if (first) {
        fast_load(s, first, 0, false);
        fast_load(s, first + FAST_HALF_BYTES, 0, true);
    }
    if (second)
        fast_load(s, second, 1, false);
    else
        fast_no_load();
    if (threadIdx.x == 0) {
        s->next_values = second ? second + FAST_HALF_BYTES : NULL;
        s->next_keys = next_page(c, s, &fresh);
    }
    fast_wait_groups();
#endif
}

/* Behind barrier A of a page: its keys' place and the place of the values before it are free. */
template <int MAX, int STAGES>
static __device__ __forceinline__ void fast_refill(struct fast_shared<MAX, STAGES> *s, const struct fast_ring *ring)
{
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x) return;
#endif
    const char *keys = s->next_keys, *values = s->next_values;
    if (values)
        fast_load(s, values, ring->stage ? ring->stage - 1 : STAGES - 1, true);
    else
        fast_no_load();
    if (keys)
        fast_load(s, keys, ring->stage, false);
    else
        fast_no_load();
}

/* Behind barrier B. */
template <int MAX, int STAGES>
static __device__ __forceinline__ void fast_look_ahead(const struct decode_call *c, struct fast_shared<MAX, STAGES> *s)
{
    bool fresh;
    if (threadIdx.x) return;
    s->next_values = s->next_keys ? s->next_keys + FAST_HALF_BYTES : NULL;
    s->next_keys = next_page(c, s, &fresh);
}

/* ---- fast kernel: arithmetic ---- */

template <int NQ> struct fast_state {
    float max[NQ][2], sum[NQ][2]; /* of columns 8 n + 2 q + {0, 1} */
    float out[4][NQ][4];
};

/* Queries of all columns as float16 fragments, times log2(e) / sqrt(head_dim), zero past the last column; and what the columns
 * are. */
template <int NQ, int MAX, int STAGES>
static __device__ __forceinline__ void fast_queries(const struct decode_call *c, const struct piece *p,
                                                    struct fast_shared<MAX, STAGES> *s)
{
    const float scale = LOG2_E / 16.0f; /* sqrt(256) */
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4 x[NQ][2][2];
    bool used[NQ];
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        const int column = n * 8 + lane / 4;
        const float *q =
            query_at(c, p->row + column / p->ratio, p->kv_head * p->ratio + column % p->ratio) + lane % 4 * 16;
        used[n] = column < p->rows * p->ratio;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 *from = (const float4 *)(q + (warp / 2 + 2 * i) * 64 + warp % 2 * 8);
            x[n][i][0] = used[n] ? from[0] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            x[n][i][1] = used[n] ? from[1] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    if (threadIdx.x < 8 * NQ) {
        const int row = threadIdx.x / p->ratio, head = p->kv_head * p->ratio + threadIdx.x % p->ratio;
        s->column[threadIdx.x] = row < p->rows ? (p->row + row) * c->shape.n_heads + head : -1;
        s->last_key[threadIdx.x] = p->position + row;
    }
#pragma unroll
    for (int n = 0; n < NQ; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 y = x[n][i][0], z = x[n][i][1];
            const __half2 h[4] = {
                __floats2half2_rn(y.x * scale, y.y * scale), __floats2half2_rn(y.z * scale, y.w * scale),
                __floats2half2_rn(z.x * scale, z.y * scale), __floats2half2_rn(z.z * scale, z.w * scale)};
            s->queries[((warp / 2 + 2 * i) * NQ + n) * 64 + warp % 2 * 32 + lane] = *(const uint4 *)h;
        }
}

/* score[n][j] += run's share: key 16 warp + g + 8 (j / 2), column 8 n + 2 q + j % 2. */
template <int NQ>
static __device__ __forceinline__ void fast_score_run(const char *keys, const uint4 *queries, int run, int warp,
                                                      int lane, float (&score)[NQ][4])
{
    const uint4 *codes = (const uint4 *)(keys + warp * 16 * FAST_DIM) + run * 64 + lane;
    const __half *scales = (const __half *)(keys + FAST_CODES_BYTES) + (warp * 16 + lane / 4) * 4 + run;
    const float f0 = __half2float(scales[0]), f1 = __half2float(scales[32]);
    const uint4 a = codes[0], b = codes[32];
    const uint32_t wa[4] = {a.x, a.y, a.z, a.w}, wb[4] = {b.x, b.y, b.z, b.w};
    uint4 q[NQ][2];
    float sum[NQ][4];
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        q[n][0] = queries[(run * NQ + n) * 64 + lane];
        q[n][1] = queries[(run * NQ + n) * 64 + 32 + lane];
#pragma unroll
        for (int j = 0; j < 4; j++) sum[n][j] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint32_t a0 = kv_codes_lower(wa[j]), a2 = kv_codes_upper(wa[j]);
        const uint32_t a1 = kv_codes_lower(wb[j]), a3 = kv_codes_upper(wb[j]);
#pragma unroll
        for (int n = 0; n < NQ; n++) {
            const uint4 v = q[n][j / 2];
            mma_f16(sum[n], a0, a1, a2, a3, j % 2 ? v.z : v.x, j % 2 ? v.w : v.y);
        }
    }
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        score[n][0] = fmaf(sum[n][0], f0, score[n][0]);
        score[n][1] = fmaf(sum[n][1], f0, score[n][1]);
        score[n][2] = fmaf(sum[n][2], f1, score[n][2]);
        score[n][3] = fmaf(sum[n][3], f1, score[n][3]);
    }
}

template <int NQ> static __device__ __forceinline__ void fast_clear(float (&x)[NQ][4])
{
#pragma unroll
    for (int n = 0; n < NQ; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) x[n][j] = 0.0f;
}

/* Scores of keys past a column's own position become minus infinity. */
template <int NQ>
static __device__ __forceinline__ void fast_cut(const int *last_key, int page, int warp, int lane,
                                                float (&score)[NQ][4])
{
    const int key = page * KV_PAGE_TOKENS + warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < NQ; n++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (key + j / 2 * 8 > last_key[n * 8 + lane % 4 * 2 + j % 2]) score[n][j] = -INFINITY;
}

/* The warp's maxima of all columns. */
template <int NQ>
static __device__ __forceinline__ void fast_put_maxima(const float (&score)[NQ][4], int lane, float *maxima)
{
#pragma unroll
    for (int n = 0; n < NQ; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float x = fmaxf(score[n][j], score[n][j + 2]);
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
            x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
            if (lane < 4) maxima[n * 8 + lane * 2 + j] = x;
        }
}

static __device__ __forceinline__ uint32_t transpose_8x8(uint32_t x)
{
#if __CUDA_ARCH__ >= 750
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%0;" : "+r"(x));
#endif
    return x;
}

/* New maxima, the state shrunk to them, probabilities as fragments in probs. maxima: of four warps, `pitch` apart. */
template <int NQ>
static __device__ __forceinline__ void fast_probs(struct fast_state<NQ> &t, const float (&score)[NQ][4],
                                                  const float *maxima, int pitch, int lane, uint2 (*probs)[32])
{
    float shrink[NQ][2];
    bool grown = false;
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        const float *at = maxima + n * 8 + lane % 4 * 2;
        const float2 a = *(const float2 *)at, b = *(const float2 *)(at + pitch);
        const float2 c = *(const float2 *)(at + 2 * pitch), d = *(const float2 *)(at + 3 * pitch);
        const float m0 = fmaxf(fmaxf(fmaxf(a.x, b.x), fmaxf(c.x, d.x)), t.max[n][0]);
        const float m1 = fmaxf(fmaxf(fmaxf(a.y, b.y), fmaxf(c.y, d.y)), t.max[n][1]);
        grown |= m0 > t.max[n][0] || m1 > t.max[n][1];
        shrink[n][0] = t.max[n][0] - m0;
        shrink[n][1] = t.max[n][1] - m1;
        t.max[n][0] = m0;
        t.max[n][1] = m1;
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
        for (int n = 0; n < NQ; n++) {
            const float a0 = exp2_approximate(shrink[n][0]), a1 = exp2_approximate(shrink[n][1]);
            t.sum[n][0] = __fmul_rn(t.sum[n][0], a0); /* never fused with the sum below: the branch must not show */
            t.sum[n][1] = __fmul_rn(t.sum[n][1], a1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                t.out[i][n][0] *= a0;
                t.out[i][n][1] *= a1;
                t.out[i][n][2] *= a0;
                t.out[i][n][3] *= a1;
            }
        }
    }
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        const float m0 = t.max[n][0] - PROB_EXPONENT, m1 = t.max[n][1] - PROB_EXPONENT;
        const float e0 = exp2_approximate(score[n][0] - m0), e1 = exp2_approximate(score[n][1] - m1);
        const float e2 = exp2_approximate(score[n][2] - m0), e3 = exp2_approximate(score[n][3] - m1);
        t.sum[n][0] += e0 + e2;
        t.sum[n][1] += e1 + e3;
        const __half2 lower = __floats2half2_rn(e0, e1), upper = __floats2half2_rn(e2, e3);
        probs[n][lane] = make_uint2(transpose_8x8(*(const uint32_t *)&lower), transpose_8x8(*(const uint32_t *)&upper));
    }
}

/* A pair of probabilities times the scales of their keys; of keys past `last` zero, whatever their scales are. */
static __device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, uint32_t scales, bool cut, int key, int last)
{
    __half2 product = __hmul2(*(const __half2 *)&pair, *(const __half2 *)&scales);
    uint32_t x = *(const uint32_t *)&product;
    if (cut) {
        if (key > last) x &= 0xffff0000u;
        if (key + 1 > last) x &= 0xffffu;
    }
    return x;
}

/* out[i][n][j] += the share of keys 16 t .. 16 t + 15: dimension 64 warp + 16 i + g + 8 (j / 2), column 8 n + 2 q + j % 2.
 * cut: the page may have keys past a column's own. */
template <int NQ>
static __device__ __forceinline__ void fast_output_tile(const int *last_key, const char *values, const uint2 *probs,
                                                        int pitch, bool cut, int page, int t, int warp, int lane,
                                                        float (&out)[4][NQ][4])
{
    const uint4 *codes = (const uint4 *)(values + t * 16 * FAST_DIM) + warp * 64 + lane;
    const char *scales = values + FAST_CODES_BYTES + (warp * 64 + t * 16 + lane % 4 * 2) * 2;
    const uint32_t s0 = *(const uint32_t *)scales, s1 = *(const uint32_t *)(scales + 16);
    const int key = page * KV_PAGE_TOKENS + t * 16 + lane % 4 * 2;
    uint2 b[NQ];
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        const uint2 prob = probs[t * pitch + n * 32 + lane];
        const int last = cut ? last_key[n * 8 + lane / 4] : 0;
        b[n].x = scaled_pair(prob.x, s0, cut, key, last);
        b[n].y = scaled_pair(prob.y, s1, cut, key + 8, last);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 v = codes[i * 32];
        const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const uint32_t a0 = kv_codes_lower(w[2 * k]), a1 = kv_codes_upper(w[2 * k]);
            const uint32_t a2 = kv_codes_lower(w[2 * k + 1]), a3 = kv_codes_upper(w[2 * k + 1]);
#pragma unroll
            for (int n = 0; n < NQ; n++) mma_f16(out[2 * i + k][n], a0, a1, a2, a3, b[n].x, b[n].y);
        }
    }
}

/* Writes a split's partial results: sums, and outputs divided by them as float16 in the order of fast_partial_dim.
 * sums: scratch of four warps, `pitch` apart. */
template <int NQ>
static __device__ __forceinline__ void fast_finish(const struct decode_call *c, const int *columns,
                                                   const struct fast_state<NQ> &t, int split, int warp, int lane,
                                                   float *sums, int pitch)
{
#pragma unroll
    for (int n = 0; n < NQ; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float x = t.sum[n][j];
            x += __shfl_xor_sync(~0u, x, 4);
            x += __shfl_xor_sync(~0u, x, 8);
            x += __shfl_xor_sync(~0u, x, 16);
            if (lane < 4) sums[warp * pitch + n * 8 + lane * 2 + j] = x;
        }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        uint32_t packed[8];
        float inverse[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int column = n * 8 + lane % 4 * 2 + j;
            const float sum =
                ((sums[column] + sums[pitch + column]) + sums[2 * pitch + column]) + sums[3 * pitch + column];
            inverse[j] = 1.0f / sum;
            if (warp == 0 && lane < 4 && columns[column] >= 0)
                c->stats[partial_at(columns[column], split)] = make_float2(t.max[n][j], sum);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float *o = t.out[i / 2][n] + i % 2 * 2;
            const __half2 pair = __floats2half2_rn(o[0] * inverse[0], o[1] * inverse[1]);
            packed[i] = transpose_8x8(*(const uint32_t *)&pair);
        }
        const int column = columns[n * 8 + lane / 4];
        if (column < 0) continue;
        uint4 *to = (uint4 *)((__half *)c->outputs + partial_at(column, split) * FAST_DIM + warp * 64 + lane % 4 * 16);
        to[0] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        to[1] = make_uint4(packed[4], packed[5], packed[6], packed[7]);
    }
}

/* Dimension (of 64) of values 4 place, 4 place + 1 of a partial result; the next two are 8 dimensions on. */
static __device__ __forceinline__ int fast_partial_dim(int place) { return place % 4 * 16 + place / 4 * 2; }

template <int NQ, int MAX, int STAGES>
static __device__ __forceinline__ void fast_unit(const struct decode_call *c, const struct fast_work *w,
                                                 bool new_queries, struct fast_shared<MAX, STAGES> *s,
                                                 struct fast_ring *ring)
{
    const struct piece *p = &w->p;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int first = w->split * p->step, end = end_page(w);
    struct fast_state<NQ> t;
    if (new_queries) {
        __syncthreads(); /* the columns of the unit before have been read */
        fast_queries<NQ>(c, p, s);
        __syncthreads();
    }
    float score[NQ][4];
    fast_clear<NQ>(score);
#pragma unroll
    for (int i = 0; i < 4; i++) fast_clear<NQ>(t.out[i]);
#pragma unroll
    for (int n = 0; n < NQ; n++) {
        t.max[n][0] = t.max[n][1] = LOWEST;
        t.sum[n][0] = t.sum[n][1] = 0.0f;
    }
    fast_wait(s, ring, false);
#pragma unroll
    for (int i = 0; i < 4; i++) fast_score_run<NQ>(s->stages[ring->stage], s->queries, i, warp, lane, score);
    for (int page = first; page < end; page++) {
        const int turn = ring->turn;
        const char *values = s->stages[ring->stage] + FAST_HALF_BYTES;
        const uint2 *probs = &s->probs[turn][0][0][0];
        const bool cut = (page + 1) * KV_PAGE_TOKENS > p->position + 1, more = page + 1 < end;
        if (cut) fast_cut<NQ>(s->last_key, page, warp, lane, score);
        fast_put_maxima<NQ>(score, lane, s->maxima[turn][warp]);
        __syncthreads(); /* A */
        fast_refill(s, ring);
        fast_probs<NQ>(t, score, s->maxima[turn][0], 8 * MAX, lane, s->probs[turn][warp]);
        fast_clear<NQ>(score);
        fast_wait_groups();
        __syncthreads(); /* B */
        fast_look_ahead(c, s);
        fast_wait(s, ring, true);
        ring->turn ^= 1;
        if (++ring->stage == STAGES) ring->stage = 0, ring->parity ^= 1;
        const char *keys = s->stages[ring->stage]; /* of the next page */
        if (more) fast_wait(s, ring, false);
        if (more && !cut) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                fast_score_run<NQ>(keys, s->queries, i, warp, lane, score);
                fast_output_tile<NQ>(s->last_key, values, probs, MAX * 32, false, page, i, warp, lane, t.out);
            }
            continue;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            fast_output_tile<NQ>(s->last_key, values, probs, MAX * 32, true, page, i, warp, lane, t.out);
        if (more)
#pragma unroll
            for (int i = 0; i < 4; i++) fast_score_run<NQ>(keys, s->queries, i, warp, lane, score);
    }
    fast_finish<NQ>(c, s->column, t, w->split, warp, lane, s->sums[0], 8 * MAX);
}

template <int MAX, int STAGES>
static __global__ void __launch_bounds__(DECODE_THREADS, 2)
    attn_decode_fast(const __grid_constant__ struct decode_call c)
{
    extern __shared__ __align__(128) char dynamic_shared[];
    struct fast_shared<MAX, STAGES> *s = (struct fast_shared<MAX, STAGES> *)dynamic_shared;
    struct fast_ring ring = {0, 0, 0};
    struct fast_work w;
    bool new_queries = true;
    pdl_go();
    find_work(&c, MAX, &w);
    fast_begin(&c, s, &w);
    __syncthreads();
    while (w.at < w.end) {
        const int columns = w.p.rows * w.p.ratio;
        if (MAX == 1 || columns <= 8)
            fast_unit<1, MAX, STAGES>(&c, &w, new_queries, s, &ring);
        else if (MAX == 3 || columns <= 24)
            fast_unit<(MAX < 3 ? MAX : 3), MAX, STAGES>(&c, &w, new_queries, s, &ring);
        else
            fast_unit<MAX, MAX, STAGES>(&c, &w, new_queries, s, &ring);
        new_queries = next_unit(&c, MAX, &w);
    }
}

/* ---- merge ---- */

/* Four values of a partial result. */
template <bool FAST> static __device__ __forceinline__ float4 merge_part(const struct decode_call *c, size_t at)
{
    if (!FAST) return __ldcg((const float4 *)(c->outputs + at));
    const uint2 v = __ldcg((const uint2 *)((const __half *)c->outputs + at));
    const float2 a = __half22float2(*(const __half2 *)&v.x), b = __half22float2(*(const __half2 *)&v.y);
    return make_float4(a.x, a.y, b.x, b.y);
}

struct merge_shared {
    float weight[DECODE_SPLITS]; /* of partial results */
    float most[MERGE_THREADS / 32], sum[MERGE_THREADS / 32];
    float4 lanes[MERGE_LANES][16];
};

/* Thread i has split i's maximum and sum, LOWEST and 0 where there is none. Returns the sum over all splits. */
template <bool FAST>
static __device__ __forceinline__ float merge_weights(struct merge_shared *m, float2 stat, int splits)
{
    const int i = threadIdx.x;
    float most = stat.x;
    for (int k = 16; k; k /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, k));
    if (i % 32 == 0) m->most[i / 32] = most;
    __syncthreads();
    most = m->most[0];
    for (int k = 1; k < MERGE_THREADS / 32; k++) most = fmaxf(most, m->most[k]);
    const float factor = i < splits ? exp2_approximate(stat.x - most) : 0.0f;
    float sum = i < splits ? factor * stat.y : 0.0f;
    if (i < DECODE_SPLITS) m->weight[i] = FAST ? sum : factor;
    for (int k = 16; k; k /= 2) sum += __shfl_xor_sync(~0u, sum, k);
    if (i % 32 == 0) m->sum[i / 32] = sum;
    __syncthreads();
    sum = m->sum[0];
    for (int k = 1; k < MERGE_THREADS / 32; k++) sum += m->sum[k];
    return sum;
}

static __device__ __forceinline__ float sigmoid_times(float x, float gate)
{
    return x / (1.0f + exp2_approximate(-gate * LOG2_E));
}

/* A block takes 64 dimensions of one (row, head): a lane of 16 takes every 16th split, then the lanes in order. */
template <bool FAST>
static __global__ void __launch_bounds__(MERGE_THREADS) attn_decode_merge(const __grid_constant__ struct decode_call c)
{
    enum { MOST = (DECODE_SPLITS + MERGE_LANES - 1) / MERGE_LANES };
    __shared__ struct merge_shared m;
    pdl_go();
    const struct kern_attn_shape *s = &c.shape;
    const int row = blockIdx.x / s->n_heads, head = blockIdx.x % s->n_heads, i = threadIdx.x;
    const int column = i % 16, lane = i / 16, place = blockIdx.y * 64 + column * 4, dim = s->head_dim;
    /* The dimensions of four values: two at d, two at e. */
    const int d = FAST ? blockIdx.y * 64 + fast_partial_dim(column) : place, e = FAST ? d + 8 : d + 2;
    const size_t at = partial_at(blockIdx.x, 0);
    const int position = c.batch.row[row].position, step = split_pages(position);
    const int splits = (position / KV_PAGE_TOKENS + step) / step;
    pdl_wait();
    const float2 stat = i < splits ? __ldcg(c.stats + at + i) : make_float2(LOWEST, 0.0f);
    float2 gate[2] = {};
    float4 part[MOST];
    if (s->gated && lane == 0 && place < dim) {
        gate[0] = *(const float2 *)(query_at(&c, row, head) + dim + d);
        gate[1] = *(const float2 *)(query_at(&c, row, head) + dim + e);
    }
#pragma unroll
    for (int k = 0; k < MOST; k++)
        if (lane + MERGE_LANES * k < splits && place < dim)
            part[k] = merge_part<FAST>(&c, (at + lane + MERGE_LANES * k) * dim + place);
    const float sum = merge_weights<FAST>(&m, stat, splits);
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int k = 0; k < MOST; k++)
        if (lane + MERGE_LANES * k < splits && place < dim) {
            const float w = m.weight[lane + MERGE_LANES * k];
            o.x = fmaf(part[k].x, w, o.x);
            o.y = fmaf(part[k].y, w, o.y);
            o.z = fmaf(part[k].z, w, o.z);
            o.w = fmaf(part[k].w, w, o.w);
        }
    m.lanes[lane][column] = o;
    __syncthreads();
    const int width = s->n_heads * dim;
    const struct kern_split split = {c.batch.decode_rows, c.batch.rows - c.batch.decode_rows};
    if (blockIdx.y == 0 && head == s->n_heads - 1 && width + 2 * i < act_blocks(width) * ACT_BLOCK)
        act_store2(c.act, split, width, row, width + 2 * i, 0.0f, 0.0f);
    if (lane || place >= dim) return;
    for (int k = 1; k < MERGE_LANES; k++) {
        const float4 x = m.lanes[k][column];
        o.x += x.x, o.y += x.y, o.z += x.z, o.w += x.w;
    }
    o.x /= sum, o.y /= sum, o.z /= sum, o.w /= sum;
    if (s->gated) {
        o.x = sigmoid_times(o.x, gate[0].x);
        o.y = sigmoid_times(o.y, gate[0].y);
        o.z = sigmoid_times(o.z, gate[1].x);
        o.w = sigmoid_times(o.w, gate[1].y);
    }
    act_store2(c.act, split, width, row, head * dim + d, o.x, o.y);
    act_store2(c.act, split, width, row, head * dim + e, o.z, o.w);
}

/* ---- launchers ---- */

static bool is_fast(const struct kern_attn_shape *s)
{
    return s->kv == KV_INT8 && s->head_dim == FAST_DIM && s->n_heads / s->n_kv_heads <= FAST_RATIO;
}

static size_t outputs_bytes(const struct kern_attn_shape *s, int decode_rows)
{
    const size_t splits = (size_t)decode_rows * (size_t)s->n_heads * DECODE_SPLITS;
    return splits * (size_t)s->head_dim * (is_fast(s) ? sizeof(__half) : sizeof(float));
}

size_t op_attn_decode_scratch_bytes(const struct kern_attn_shape *s, int decode_rows)
{
    return outputs_bytes(s, decode_rows) + (size_t)decode_rows * (size_t)s->n_heads * DECODE_SPLITS * sizeof(float2);
}

/* Two blocks fit on a multiprocessor. */
template <int MAX, int STAGES> static void launch_fast(const struct op_context *c, const struct decode_call *call)
{
    const size_t n_bytes = sizeof(struct fast_shared<MAX, STAGES>);
    const int most = call->shape.n_kv_heads * call->batch.decode_rows * op_attn_profile(call->batch.longest);
    const int blocks = most < 2 * c->processors ? most : 2 * c->processors;
    cudaFuncSetAttribute(attn_decode_fast<MAX, STAGES>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)n_bytes);
    op_launch(c, attn_decode_fast<MAX, STAGES>, dim3((unsigned)blocks), dim3(DECODE_THREADS), n_bytes, *call);
}

void op_attn_decode(const struct op_context *c, const struct device_batch *b, const struct kern_attn_shape *s,
                    const float *qkv, struct kern_kv_layer kv, void *scratch, void *o_act)
{
    if (!b->decode_rows) return;
    float2 *stats = (float2 *)((char *)scratch + outputs_bytes(s, b->decode_rows));
    const struct decode_call call = {*b, *s, kv, qkv, (float *)scratch, stats, o_act};
    const dim3 merge_grid((unsigned)(b->decode_rows * s->n_heads), (unsigned)(s->head_dim + 63) / 64);
    if (!is_fast(s)) {
        attn_decode_plain_launch(c, &call);
        op_launch(c, attn_decode_merge<false>, merge_grid, dim3(MERGE_THREADS), 0, call);
        return;
    }
    const int most = b->decode_rows - b->n_decode_segments + 1; /* rows of a segment */
    const int columns = s->n_heads / s->n_kv_heads * (most < 1 + KERN_MAX_DRAFTS ? most : 1 + KERN_MAX_DRAFTS);
    if (columns > 24)
        launch_fast<5, 2>(c, &call);
    else if (columns > 8)
        launch_fast<3, 2>(c, &call);
    else if (c->sm >= 90)
        launch_fast<1, 3>(c, &call);
    else
        launch_fast<1, 2>(c, &call);
    op_launch(c, attn_decode_merge<true>, merge_grid, dim3(MERGE_THREADS), 0, call);
}
