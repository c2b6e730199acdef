/* op_gdn_decode: rows of decode segments and replay of drafts, one kernel a layer.
 *
 * A block has a value head (or, in a cluster of four, 32 of its 128 columns) of one segment, and all rows of that. It
 * convolves the head's channels of each row itself, those of a shared key head too, holds columns of the state in
 * registers, runs the rows through them in order, and applies the gated norm; a cluster exchanges sums of squares.
 *
 * A column of the state belongs to 8 (fast) or 16 lanes, which hold quads of its k dimension in turn. Both of a row's
 * products with the state are reduced at once: o = e^g S^T q + u (k . q) needs the state before the row only.
 *
 * Replay is the same kernel on rows of replay memory, without outputs, so its bits are those of decoding. */
#include "op_gdn.cuh"

enum { THREADS = 256, WARPS = THREADS / 32, QUADS = 4, SPLIT = 4 };

enum { MAX_LAYERS = 64 }; /* of one launch of replay */

struct decode_call {
    struct gdn_call a;
    int replay_slot, replay_rows; /* replay_rows 0: decode */
};

/* Replay goes through all layers at once, a layer a plane of the grid: what they have is too little to wait for 48 launches. */
struct replay_layers {
    struct kern_gdn_weights w[MAX_LAYERS];
    size_t state_bytes, replay_bytes; /* from a layer's memory to the next one's */
};

static __device__ __forceinline__ struct decode_call of_layer(const struct decode_call &c, const struct replay_layers &l)
{
    struct decode_call own = c;
    if (!c.replay_rows) return own;
    own.a.w = l.w[blockIdx.z];
    own.a.m.state_dev += blockIdx.z * l.state_bytes;
    own.a.m.replay_dev += blockIdx.z * l.replay_bytes;
    return own;
}

/* Rows of a segment and what they do to its slot. */
struct decode_rows {
    const float *first; /* row 0; in replay rows before it lie before it */
    size_t pitch;
    int gates_at; /* b, then a */
    int n, kept;  /* the state is that after row kept - 1 */
    int position, row_first;
    float *state, *ring;
    char *replay; /* NULL: nothing to keep */
    bool replaying;
};

template <int K, int V> struct decode_shared {
    float q[GDN_MAX_ROWS][K], k[GDN_MAX_ROWS][K], v[GDN_MAX_ROWS][V], o[GDN_MAX_ROWS][V];
    float decay[GDN_MAX_ROWS], beta[GDN_MAX_ROWS], kq[GDN_MAX_ROWS]; /* kq: k . q */
    float squares[SPLIT][GDN_MAX_ROWS];
    uint64_t bar;
};

static __device__ __forceinline__ struct decode_rows find_rows(const struct decode_call &c)
{
    const struct gdn_call &a = c.a;
    struct decode_rows r = {};
    int slot = c.replay_slot;
    if (c.replay_rows) {
        char *memory = a.m.replay_dev + (size_t)slot * a.m.replay_stride;
        r.pitch = gdn_replay_pitch(&a.s);
        r.first = (const float *)(memory + GDN_HEADER_BYTES) + (a.s.conv_width - 1) * r.pitch;
        r.gates_at = gdn_channels(&a.s);
        r.n = r.kept = c.replay_rows;
        r.position = *(const int *)memory;
        r.replaying = true;
    } else {
        const struct device_segment g = a.segments[blockIdx.y];
        slot = g.slot;
        r.pitch = gdn_width(&a.s);
        r.first = a.in + g.row_first * r.pitch;
        r.gates_at = (int)r.pitch - 2 * a.s.v_heads;
        r.n = g.rows;
        r.kept = 1;
        r.position = g.position_first;
        r.row_first = g.row_first;
        if (r.n > 1) r.replay = a.m.replay_dev + (size_t)slot * a.m.replay_stride;
    }
    r.state = gdn_state(a, slot);
    r.ring = r.state + gdn_matrix_floats(&a.s);
    return r;
}

/* Raw row t > -width, the convolution's; NULL before the sequence. */
static __device__ __forceinline__ const float *raw_row(const struct gdn_call &a, const struct decode_rows &r, int width,
                                                       int t)
{
    if (t >= 0 || r.replaying) return r.first + (ptrdiff_t)t * (ptrdiff_t)r.pitch;
    const int position = r.position + t;
    return position < 0 ? NULL : r.ring + (size_t)(position % width) * gdn_channels(&a.s);
}

/* A channel of row t after convolution. */
static __device__ __forceinline__ float convolve_value(const struct gdn_call &a, const struct decode_rows &r, int t,
                                                       int channel)
{
    const int width = a.s.conv_width, channels = gdn_channels(&a.s);
    float y = 0;
#pragma unroll 4
    for (int j = 0; j < width; j++) {
        const float *from = raw_row(a, r, width, t - width + 1 + j);
        if (from) y = fmaf(a.w.conv_dev[(size_t)j * channels + channel], from[channel], y);
    }
    return gdn_silu(y);
}

/* Queries or keys of row t, by a warp. */
static __device__ __forceinline__ void convolve_key(const struct gdn_call &a, const struct decode_rows &r, int t,
                                                    int first, float scale, float *to)
{
    const int lane = threadIdx.x % 32;
    float y[8], squares = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int d = lane + 32 * i;
        if (d >= a.s.k_dim) break;
        y[i] = convolve_value(a, r, t, first + d);
        squares = fmaf(y[i], y[i], squares);
    }
    const float by = gdn_inverse_length(gdn_warp_sum(squares)) * scale;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (lane + 32 * i < a.s.k_dim) to[lane + 32 * i] = y[i] * by;
}

/* Channels first .. first + n: the rows that the state takes in go to the ring, drafts to replay memory with the
 * rows before them. */
static __device__ __forceinline__ void keep_channels(const struct gdn_call &a, const struct decode_rows &r, int first,
                                                     int n)
{
    const int channels = gdn_channels(&a.s), width = a.s.conv_width;
    for (int t = max(0, r.kept - width); t < r.kept; t++)
        for (int i = first + threadIdx.x; i < first + n; i += THREADS)
            r.ring[(size_t)((r.position + t) % width) * channels + i] = raw_row(a, r, a.s.conv_width, t)[i];
    if (!r.replay) return;
    float *to = (float *)(r.replay + GDN_HEADER_BYTES);
    const int pitch = gdn_replay_pitch(&a.s);
    for (int t = 2 - width; t < r.n; t++) {
        const float *from = raw_row(a, r, a.s.conv_width, t);
        for (int i = first + threadIdx.x; i < first + n; i += THREADS)
            to[(size_t)(t + width - 2) * pitch + i] = from ? from[i] : 0.0f;
    }
}

static __device__ __forceinline__ void keep_gates(const struct gdn_call &a, const struct decode_rows &r, int head)
{
    if (!r.replay) return;
    const int t = (int)threadIdx.x / 2 + 1, which = threadIdx.x % 2 * a.s.v_heads + head;
    if (t < r.n)
        ((float *)(r.replay + GDN_HEADER_BYTES))[(size_t)(t + a.s.conv_width - 2) * gdn_replay_pitch(&a.s) +
                                                 gdn_channels(&a.s) + which] =
            raw_row(a, r, a.s.conv_width, t)[r.gates_at + which];
    if (head == 0 && threadIdx.x == 0) *(int *)r.replay = r.position + 1;
}

/* Queries, keys, values and gates of all rows of a head of any shape, and what is kept of them. */
static __device__ __forceinline__ void prepare_plain(const struct gdn_call &a, const struct decode_rows &r, int q_at,
                                                     int k_at, int v_at, int head, struct decode_shared<256, 256> *x)
{
    const int warp = threadIdx.x / 32, k_dim = a.s.k_dim, v_dim = a.s.v_dim;
    for (int task = warp; task < 2 * r.n; task += WARPS) {
        const int t = task / 2;
        if (task & 1)
            convolve_key(a, r, t, k_at, 1.0f, x->k[t]);
        else
            convolve_key(a, r, t, q_at, gdn_inverse_root((float)k_dim), x->q[t]);
    }
    for (int e = threadIdx.x; e < r.n * v_dim; e += THREADS)
        x->v[e / v_dim][e % v_dim] = convolve_value(a, r, e / v_dim, v_at + e % v_dim);
    if (warp < r.n && threadIdx.x % 32 == 0) {
        const float *gates = raw_row(a, r, a.s.conv_width, warp) + r.gates_at + head;
        x->decay[warp] = expf(gdn_log_decay(a.w.a_dev[head], gates[a.s.v_heads] + a.w.dt_dev[head]));
        x->beta[warp] = gdn_sigmoid(gates[0]);
    }
    keep_gates(a, r, head);
    if (head % (a.s.v_heads / a.s.k_heads) == 0) {
        keep_channels(a, r, q_at, k_dim);
        keep_channels(a, r, k_at, k_dim);
    }
    keep_channels(a, r, v_at, v_dim);
}

/* What a thread of a fast block loads before pdl_wait: a warp convolves queries (even warps) or keys of row warp / 2
 * (and that + 4), and values of row warp, a lane for VALUES columns, 32 apart. */
template <int VALUES> struct fast_weights {
    float4 key[4];
    float value[VALUES][4];
    float a, dt;
};

template <int VALUES>
static __device__ __forceinline__ void load_weights(const struct gdn_call &a, int key_channel, int value_channel,
                                                    int head, struct fast_weights<VALUES> *w)
{
    const int channels = gdn_channels(&a.s);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        w->key[j] = *(const float4 *)(a.w.conv_dev + (size_t)j * channels + key_channel);
#pragma unroll
        for (int i = 0; i < VALUES; i++) w->value[i][j] = a.w.conv_dev[(size_t)j * channels + value_channel + 32 * i];
    }
    w->a = a.w.a_dev[head];
    w->dt = a.w.dt_dev[head];
}

/* Raw row t of a segment with a convolution of 4, by selection: branches would part the loads of several rows. */
struct fast_row {
    const float *at;
    bool there; /* not before the sequence */
};

static __device__ __forceinline__ struct fast_row find_row(const struct decode_rows &r, int channels, int t)
{
    const bool inside = t >= 0 || r.replaying;
    const int position = r.position + t;
    struct fast_row row;
    row.at = (inside ? r.first : r.ring) + (inside ? t * (int)r.pitch : (position & 3) * channels);
    row.there = inside || position >= 0;
    return row;
}

/* Stores raw values x of rows t - 3 .. t where they are kept: those the state takes in in the ring, drafts and the
 * three rows before the first in replay memory. */
template <class T>
static __device__ __forceinline__ void keep_fast(const struct gdn_call &a, const struct decode_rows &r, int t,
                                                 int channel, const T *x)
{
    if (t < r.kept && t + 4 >= r.kept) *(T *)(r.ring + ((r.position + t) & 3) * gdn_channels(&a.s) + channel) = x[3];
    if (!r.replay) return;
    T *to = (T *)((float *)(r.replay + GDN_HEADER_BYTES) + channel);
    const int pitch = gdn_replay_pitch(&a.s) * 4 / (int)sizeof(T);
    to[(t + 2) * pitch] = x[3];
    if (t == 0) {
        to[0] = x[1];
        to[pitch] = x[2];
    }
}

/* Queries, keys, values and gates of all rows. All loads of the first four rows are on their way before anything waits
 * for one; further rows cost a second wait. */
template <int VALUES>
static __device__ __forceinline__ void prepare_fast(const struct gdn_call &a, const struct decode_rows &r,
                                                    const struct fast_weights<VALUES> &w, int key_channel,
                                                    int value_channel, int head, bool keep_key, bool keep_gates,
                                                    struct decode_shared<128, 32 * VALUES> *x)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int channels = gdn_channels(&a.s);
    const bool has_value = warp < r.n;
    float value[VALUES][4] = {}, b = 0, g = 0;
    for (int t = warp / 2; t < r.n || t == warp / 2; t += 4) {
        float4 key[4] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const struct fast_row from = find_row(r, channels, t - 3 + j);
            if (from.there && t < r.n) key[j] = *(const float4 *)(from.at + key_channel);
        }
        if (t == warp / 2) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const struct fast_row from = find_row(r, channels, warp - 3 + j);
#pragma unroll
                for (int i = 0; i < VALUES; i++)
                    if (from.there && has_value) value[i][j] = from.at[value_channel + 32 * i];
            }
            const float *gates = r.first + warp * (int)r.pitch + r.gates_at + head;
            if (has_value) {
                b = gates[0];
                g = gates[a.s.v_heads];
            }
        }
        if (t >= r.n) break;
        float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < 4; j++) y = gdn_fma4(w.key[j], key[j], y);
        y = gdn_silu4(y);
        const float length = gdn_inverse_length(gdn_warp_sum(gdn_square4(y)));
        *(float4 *)&(warp % 2 ? x->k : x->q)[t][4 * lane] = gdn_scale4(y, warp % 2 ? length : length * GDN_QUERY_SCALE);
        if (keep_key) keep_fast(a, r, t, key_channel, key);
    }
    if (!has_value) return;
#pragma unroll
    for (int i = 0; i < VALUES; i++) {
        float y = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) y = fmaf(w.value[i][j], value[i][j], y);
        x->v[warp][lane + 32 * i] = gdn_silu(y);
        keep_fast(a, r, warp, value_channel + 32 * i, value[i]);
    }
    const float decay = expf(gdn_log_decay(w.a, g + w.dt)), beta = gdn_sigmoid(b);
    if (lane) return;
    x->decay[warp] = decay;
    x->beta[warp] = beta;
    if (keep_gates && r.replay) {
        float *to =
            (float *)(r.replay + GDN_HEADER_BYTES) + (warp + 2) * gdn_replay_pitch(&a.s) + gdn_channels(&a.s) + head;
        to[0] = b;
        to[a.s.v_heads] = g;
        if (head == 0 && warp == 0) *(int *)r.replay = r.position + 1;
    }
}

/* k . q of a warp's row. */
static __device__ __forceinline__ float key_product(const float *k, const float *q, int k_dim)
{
    float sum = 0;
    for (int d = threadIdx.x % 32; d < k_dim; d += 32) sum = fmaf(k[d], q[d], sum);
    return gdn_warp_sum(sum);
}

/* One row through a column of the state, by its lanes. */
template <int LANES>
static __device__ __forceinline__ float step_column(float4 *s, const float4 *q, const float4 *k, float kq, float decay,
                                                    float beta, float v)
{
    float4 d4 = {}, e4 = {};
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        d4 = gdn_fma4(s[i], k[i], d4);
        e4 = gdn_fma4(s[i], q[i], e4);
    }
    float d = (d4.x + d4.y) + (d4.z + d4.w), e = (e4.x + e4.y) + (e4.z + e4.w);
#pragma unroll
    for (int m = LANES / 2; m; m >>= 1) {
        d += __shfl_xor_sync(~0u, d, m);
        e += __shfl_xor_sync(~0u, e, m);
    }
    const float u = __fmul_rn(beta, fmaf(-decay, d, v));
#pragma unroll
    for (int i = 0; i < QUADS; i++) s[i] = gdn_fma4(k[i], make_float4(u, u, u, u), gdn_scale4(s[i], decay));
    return fmaf(u, kq, __fmul_rn(decay, e));
}

/* Exchange of sums of squares in a cluster. A value is stored together with its bytes' arrival on the receiver's
 * barrier, which needs no fence: one would wait for the stores of the state. */
static __device__ __forceinline__ void exchange_begin(const uint64_t *bar)
{
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
        mbar_init(shared_address(bar), 1);
        mbar_init_fence();
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

/* From here on all blocks have their barriers. */
static __device__ __forceinline__ void exchange_expect(const uint64_t *bar, int rows)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x == 0) mbar_expect(shared_address(bar), rows * SPLIT * sizeof(float));
#endif
}

static __device__ __forceinline__ void exchange_send(const uint64_t *bar, const float *here, int rank, float x)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .u32 to,bar;\nmapa.shared::cluster.u32 to,%0,%2;\nmapa.shared::cluster.u32 bar,%1,%2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to],%3,[bar];\n}" ::"r"(shared_address(here)),
        "r"(shared_address(bar)), "r"(rank), "r"(__float_as_uint(x))
        : "memory");
#else
    __trap(); /* gdn_fast_card */
#endif
}

static __device__ __forceinline__ void exchange_wait(const uint64_t *bar)
{
#if __CUDA_ARCH__ >= 900
    mbar_wait(shared_address(bar), 0);
#endif
}

/* ---- a block ---- */

/* Columns whose squares are added up before others'. */
enum { GROUP = 32 };

/* A kernel's numbers. FAST: 128 x 128, convolution of 4. BLOCKS: of a cluster, which share a head's columns. */
template <bool FAST, int BLOCKS> struct decode_kind {
    static constexpr bool fast = FAST;
    static constexpr int blocks = BLOCKS;
    static constexpr int k_dim = FAST ? 128 : 256, columns = FAST ? 128 / BLOCKS : 256; /* at most */
    static constexpr int lanes = FAST ? 8 : 16, pass = THREADS / lanes;
    static constexpr int groups = columns / GROUP;
};

/* Where a block is. */
struct decode_place {
    int head, rank;       /* of a cluster */
    int k_dim, columns;   /* its columns of the state */
    int v_first;          /* the first of them among all heads' */
    int q_at, k_at, v_at; /* channels */
    bool keeps_keys;      /* of the value heads and blocks that share a key head, the one that keeps its raw rows */
};

template <class D> static __device__ __forceinline__ struct decode_place find_place(const struct kern_gdn_shape &s)
{
    struct decode_place p;
    const int ratio = s.v_heads / s.k_heads, v_dim = D::fast ? 128 : s.v_dim;
    p.head = blockIdx.x / D::blocks;
    p.rank = blockIdx.x % D::blocks;
    p.k_dim = D::fast ? 128 : s.k_dim;
    p.columns = v_dim / D::blocks;
    p.v_first = p.head * v_dim + p.rank * p.columns;
    p.q_at = p.head / ratio * p.k_dim;
    p.k_at = s.k_heads * p.k_dim + p.q_at;
    p.v_at = 2 * s.k_heads * p.k_dim + p.v_first;
    p.keeps_keys = p.rank == 0 && p.head % ratio == 0;
    return p;
}

/* A lane's quads of a vector of k_dim; zeros behind its end. */
template <class D> static __device__ __forceinline__ void load_quads(const float *from, int k_dim, float4 *to)
{
    const int lane = threadIdx.x % D::lanes;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int d = 4 * (i * D::lanes + lane);
        to[i] = D::fast || d < k_dim ? *(const float4 *)(from + d) : make_float4(0, 0, 0, 0);
    }
}

template <class D> static __device__ __forceinline__ void store_quads(float *to, int k_dim, const float4 *from)
{
    const int lane = threadIdx.x % D::lanes;
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int d = 4 * (i * D::lanes + lane);
        if (D::fast || d < k_dim) *(float4 *)(to + d) = from[i];
    }
}

/* Runs all rows through the block's columns. state: the thread's first column, already loaded into next. */
template <class D>
static __device__ __forceinline__ void step_rows(const struct decode_place &p, const struct decode_rows &r,
                                                 float *state, float4 *next,
                                                 struct decode_shared<D::k_dim, D::columns> *x)
{
    float4 s[QUADS];
    for (int column = threadIdx.x / D::lanes; column < p.columns; column += D::pass, state += D::pass * p.k_dim) {
#pragma unroll
        for (int i = 0; i < QUADS; i++) s[i] = next[i];
        if (column + D::pass < p.columns) load_quads<D>(state + D::pass * p.k_dim, p.k_dim, next);
        for (int t = 0; t < r.n; t++) {
            float4 q[QUADS], k[QUADS];
            load_quads<D>(x->q[t], p.k_dim, q);
            load_quads<D>(x->k[t], p.k_dim, k);
            const float o = step_column<D::lanes>(s, q, k, x->kq[t], x->decay[t], x->beta[t], x->v[t][column]);
            if (threadIdx.x % D::lanes == 0) x->o[t][column] = o;
            if (t == r.kept - 1) store_quads<D>(state, p.k_dim, s);
        }
    }
}

/* A warp's row: the sum of its squares over the head. That of each group of columns, then of groups, however the
 * head is split. */
template <class D>
static __device__ __forceinline__ float sum_squares(const struct decode_place &p, int row,
                                                    struct decode_shared<D::k_dim, D::columns> *x)
{
    const int lane = threadIdx.x % 32;
    float squares[D::groups];
#pragma unroll
    for (int i = 0; i < D::groups; i++) {
        const int column = GROUP * i + 2 * lane;
        float sum = 0;
        if (lane < GROUP / 2 && (D::fast || column < p.columns)) {
            const float2 o = *(const float2 *)&x->o[row][column];
            sum = fmaf(o.y, o.y, __fmul_rn(o.x, o.x));
        }
        squares[i] = gdn_warp_sum(sum);
    }
    if constexpr (D::blocks == SPLIT) {
        if (lane < SPLIT) exchange_send(&x->bar, &x->squares[p.rank][row], lane, squares[0]);
        exchange_wait(&x->bar);
        return (x->squares[0][row] + x->squares[1][row]) + (x->squares[2][row] + x->squares[3][row]);
    } else {
#pragma unroll
        for (int i = 0; i < D::groups; i += 4)
            squares[0] = (i ? squares[0] : 0) + ((squares[i] + squares[i + 1]) + (squares[i + 2] + squares[i + 3]));
        return squares[0];
    }
}

/* A warp's row: gated norm. z: of a lane's pair of columns in each group. */
template <class D>
static __device__ __forceinline__ void write_row(const struct gdn_call &a, const struct decode_place &p, int row_first,
                                                 int row, float sum, const float2 *z,
                                                 const struct decode_shared<D::k_dim, D::columns> *x)
{
    const int lane = threadIdx.x % 32, v_dim = p.columns * D::blocks, width = a.s.v_heads * v_dim;
    const float inverse = gdn_inverse_root(sum / (float)v_dim + a.s.norm_eps);
#pragma unroll
    for (int i = 0; i < D::groups; i++) {
        const int column = GROUP * i + 2 * lane;
        if (lane >= GROUP / 2 || (!D::fast && column >= p.columns)) continue;
        const float2 o = *(const float2 *)&x->o[row][column];
        const float2 w = *(const float2 *)(a.w.norm_dev + p.rank * p.columns + column);
        act_store2(a.o_act, a.split, width, row_first + row, p.v_first + column, o.x * inverse * w.x * gdn_silu(z[i].x),
                   o.y * inverse * w.y * gdn_silu(z[i].y));
    }
    if (p.head == a.s.v_heads - 1)
        for (int k = width + 2 * lane; k < act_blocks(width) * ACT_BLOCK; k += 64)
            act_store2(a.o_act, a.split, width, row_first + row, k, 0, 0);
}

template <class D> static __device__ __forceinline__ void decode_block(const struct decode_call &c)
{
    constexpr int values = D::fast ? D::columns / 32 : 1;
    __shared__ struct decode_shared<D::k_dim, D::columns> x;
    const struct gdn_call &a = c.a;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct decode_place p = find_place<D>(a.s);
    const int key_channel = (warp % 2 ? p.k_at : p.q_at) + 4 * lane;
    struct fast_weights<values> weights;
    pdl_go();
    if (D::blocks > 1) exchange_begin(&x.bar);
    if (D::fast) load_weights(a, key_channel, p.v_at + lane, p.head, &weights);
    pdl_wait();
    const struct decode_rows r = find_rows(c);
    const bool output = !r.replaying && warp < r.n;

    float4 next[QUADS];
    float *state = r.state + (size_t)(p.v_first + (int)threadIdx.x / D::lanes) * p.k_dim;
    load_quads<D>(state, p.k_dim, next);
    float2 z[D::groups];
#pragma unroll
    for (int i = 0; i < D::groups; i++) {
        const int column = GROUP * i + 2 * lane;
        if (output && lane < GROUP / 2 && (D::fast || column < p.columns))
            z[i] = *(const float2 *)(r.first + warp * r.pitch + gdn_channels(&a.s) + p.v_first + column);
    }
    if constexpr (D::fast)
        prepare_fast<values>(a, r, weights, key_channel, p.v_at + lane, p.head, p.keeps_keys, p.rank == 0, &x);
    else
        prepare_plain(a, r, p.q_at, p.k_at, p.v_at, p.head, &x);
    __syncthreads();
    if (warp < r.n) {
        const float kq = key_product(x.k[warp], x.q[warp], p.k_dim);
        if (lane == 0) x.kq[warp] = kq;
    }
    if (D::blocks > 1) exchange_expect(&x.bar, r.replaying ? 0 : r.n);
    __syncthreads();
    step_rows<D>(p, r, state, next, &x);
    __syncthreads();
    if (output) write_row<D>(a, p, r.row_first, warp, sum_squares<D>(p, warp, &x), z, &x);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(SPLIT, 1, 1)
#else
#define CLUSTER
#endif

/* For few segments: short chains on many processors. */
static __global__ void CLUSTER __launch_bounds__(THREADS, 2) decode_split(const struct decode_call c, const __grid_constant__ struct replay_layers l)
{
    decode_block<decode_kind<true, SPLIT>>(of_layer(c, l));
}

/* For many: a block loads columns while it works on others, and prepares a head's rows once. */
static __global__ void __launch_bounds__(THREADS, 2) decode_whole(const struct decode_call c, const __grid_constant__ struct replay_layers l)
{
    decode_block<decode_kind<true, 1>>(of_layer(c, l));
}

static __global__ void __launch_bounds__(THREADS, 1) decode_plain(const struct decode_call c, const __grid_constant__ struct replay_layers l)
{
    decode_block<decode_kind<false, 1>>(of_layer(c, l));
}

static void launch(const struct op_context *c, const struct decode_call *call, const struct replay_layers *l, int n_segments,
                   int n_layers)
{
    const struct kern_gdn_shape *s = &call->a.s;
    const bool few = s->v_heads * n_segments * n_layers <= c->processors;
    const dim3 grid((unsigned)s->v_heads, (unsigned)n_segments, (unsigned)n_layers);
    if (!gdn_fast_shape(s))
        op_launch(c, decode_plain, grid, dim3(THREADS), 0, *call, *l);
    else if (few && gdn_fast_card(c))
        op_launch(c, decode_split, dim3(SPLIT * grid.x, grid.y, grid.z), dim3(THREADS), 0, *call, *l);
    else
        op_launch(c, decode_whole, grid, dim3(THREADS), 0, *call, *l);
}

void op_gdn_decode(const struct op_context *c, const struct device_batch *b, const struct kern_gdn_shape *s,
                   const struct kern_gdn_weights *w, struct kern_gdn_memory m, const float *in, void *scratch,
                   void *o_act)
{
    (void)scratch;
    struct decode_call call = {};
    call.a.s = *s;
    call.a.w = *w;
    call.a.m = m;
    call.a.split.decode = b->decode_rows;
    call.a.split.prefill = b->rows - b->decode_rows;
    call.a.segments = b->segments;
    call.a.in = in;
    call.a.o_act = o_act;
    const struct replay_layers none = {};
    if (b->n_decode_segments) launch(c, &call, &none, b->n_decode_segments, 1);
}

void op_gdn_replay(const struct op_context *c, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, int n_layers,
                   struct kern_gdn_memory m, int slot, int rows)
{
    struct decode_call call = {};
    struct replay_layers l = {};
    call.a.s = *s;
    call.a.m = m;
    call.replay_slot = slot;
    call.replay_rows = rows;
    l.state_bytes = op_gdn_state_bytes(s);
    l.replay_bytes = op_gdn_replay_bytes(s);
    for (int at = 0, n; at < n_layers && rows; at += n) {
        n = n_layers - at < MAX_LAYERS ? n_layers - at : MAX_LAYERS;
        for (int i = 0; i < n; i++) l.w[i] = w[at + i];
        launch(c, &call, &l, 1, n);
        call.a.m.state_dev += (size_t)n * l.state_bytes;
        call.a.m.replay_dev += (size_t)n * l.replay_bytes;
    }
}
