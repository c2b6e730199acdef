/* comm_mailbox: see comm_mailbox.cuh.
 *
 * Waiting: a thread polls its own words (or a block's thread its flag). After some turns it looks at the clock, at
 * `dead` and now and then at the host's abort word; a wait over the bound sets `dead`, tells the host and ends the
 * kernel. Kernels that find `dead` return at once.
 *
 * One thread of a block reads the step and shares it behind a barrier: a warp that read it by itself could see it
 * raised already. */
#include "comm_mailbox.cuh"

#include <cooperative_groups.h>

#include "act.cuh"
#include "row_norm.cuh"

/* Turns between looks at the clock; how long a wait is expected to last; naps after that. */
enum { TURNS_OF_LOOK = 64, BRISK_NS = 20000, NAP_NS = 200 };

/* Blocks of a cluster: what any card that has clusters can do. */
enum { MOST_CHUNKS = 8 };

struct patience {
    uint32_t turns;
    uint64_t begun_ns; /* 0: not looked at yet */
};

static __device__ __forceinline__ uint64_t clock_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0,%%globaltimer;" : "=l"(t));
    return t;
}

/* When the wait began, or 0: give up. */
static __device__ __noinline__ uint64_t look_around(const struct mail &m, uint32_t turns, uint64_t begun_ns, int peer)
{
    const uint64_t now = clock_ns();
    if (!begun_ns) begun_ns = now;
    const uint64_t waited = now - begun_ns;
    if (*(volatile uint32_t *)&m.state->dead) return 0;
    const bool late = waited > m.bound_ns;
    /* The abort word lies beyond the bus: the lanes of a warp take turns. */
    const bool aborted = waited > BRISK_NS && (turns / TURNS_OF_LOOK & 31) == (threadIdx.x & 31) && m.notice->abort;
    if (late || aborted) {
        *(volatile uint32_t *)&m.state->dead = 1;
        m.notice->lost = late ? 1u + (uint32_t)peer : (uint32_t)MAIL_ABORTED;
        __threadfence_system();
        return 0;
    }
#if __CUDA_ARCH__ >= 700
    if (waited > BRISK_NS) __nanosleep(NAP_NS);
#endif
    return begun_ns;
}

/* One more turn of a wait for peer; false: give up. */
static __device__ __forceinline__ bool wait_on(const struct mail &m, struct patience *p, int peer)
{
    if (++p->turns % TURNS_OF_LOOK) return true;
    p->begun_ns = look_around(m, p->turns, p->begun_ns, peer);
    return p->begun_ns != 0;
}

/* The block's number for this use of its slot, and whether the path still works, by one thread, to all. */
static __device__ __forceinline__ bool take_step(const struct mail &m, const uint32_t *steps, uint32_t *step)
{
    __shared__ uint32_t shared_step, shared_dead;
    if (threadIdx.x == 0) {
        shared_step = *(const volatile uint32_t *)&steps[blockIdx.x] + 1;
        shared_dead = *(const volatile uint32_t *)&m.state->dead;
    }
    __syncthreads();
    *step = shared_step;
    return !shared_dead;
}

/* ---- values ---- */

static __device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
static __device__ __forceinline__ float high_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

static __device__ __forceinline__ uint32_t pair_of(float low, float high)
{
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}

static __device__ __forceinline__ void load_8(const float *from, float v[MAIL_EACH])
{
    const float4 a = __ldcg((const float4 *)from), b = __ldcg((const float4 *)from + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

static __device__ __forceinline__ void store_8(float *to, const float v[MAIL_EACH])
{
    ((float4 *)to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

/* Eight values of the partial from `at` on, rounded; decode: values of decode rows. */
static __device__ __forceinline__ uint4 rounded_8(const float *partial, size_t decode, size_t at)
{
    float v[MAIL_EACH], second[MAIL_EACH];
    if (!partial) return make_uint4(0, 0, 0, 0);
    load_8(partial + (at < decode ? at : at + decode), v);
    if (at < decode) {
        load_8(partial + decode + at, second);
#pragma unroll
        for (int i = 0; i < MAIL_EACH; i++) v[i] = __fadd_rn(v[i], second[i]);
    }
    return make_uint4(pair_of(v[0], v[1]), pair_of(v[2], v[3]), pair_of(v[4], v[5]), pair_of(v[6], v[7]));
}

/* sum (+)= part; the first rank's part is the sum. */
static __device__ __forceinline__ void add_part(float sum[MAIL_EACH], uint4 part, bool first)
{
    const uint32_t pair[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = first ? low_float(pair[i]) : __fadd_rn(sum[2 * i], low_float(pair[i]));
        sum[2 * i + 1] = first ? high_float(pair[i]) : __fadd_rn(sum[2 * i + 1], high_float(pair[i]));
    }
}

static __device__ __forceinline__ void add_to_residual(float *residual, const float sum[MAIL_EACH],
                                                       float out[MAIL_EACH])
{
    load_8(residual, out);
#pragma unroll
    for (int i = 0; i < MAIL_EACH; i++) out[i] = __fadd_rn(out[i], sum[i]);
    store_8(residual, out);
}

/* ---- words ---- */

static __device__ __forceinline__ void store_words(char *to, uint32_t a, uint32_t b, uint32_t step)
{
    asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(to), "r"(a), "r"(step), "r"(b), "r"(step)
                 : "memory");
}

static __device__ __forceinline__ bool load_words(const char *from, uint32_t *a, uint32_t *b, uint32_t step)
{
    uint32_t step_a, step_b;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(*a), "=r"(step_a), "=r"(*b), "=r"(step_b)
                 : "l"(from)
                 : "memory");
    return step_a == step && step_b == step;
}

/* Sends this thread's eight values to all peers and adds up everybody's. False: given up. */
template <int RANKS>
static __device__ __forceinline__ bool exchange_words(const struct mail &m, int block, uint32_t step, uint4 mine,
                                                      float sum[MAIL_EACH])
{
    const size_t at = ((size_t)block * 2 + (step & 1)) * MAIL_SLOT_BYTES + threadIdx.x * 16;
    struct patience p = {0, 0};
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        if (r == m.rank) continue;
        store_words(m.out[r] + at, mine.x, mine.y, step);
        store_words(m.out[r] + at + MAIL_SLOT_BYTES / 2, mine.z, mine.w, step);
    }
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
        uint4 part = mine;
        if (r != m.rank) {
            const char *from = m.in[r] + at;
            for (;;) {
                const bool first = load_words(from, &part.x, &part.y, step);
                const bool second = load_words(from + MAIL_SLOT_BYTES / 2, &part.z, &part.w, step);
                if (first && second) break;
                if (!wait_on(m, &p, r)) return false;
            }
        }
        add_part(sum, part, r == 0);
    }
    return true;
}

/* Block b: values 1024 b .. of the flattened rows. */
template <int RANKS>
static __global__ void __launch_bounds__(MAIL_THREADS)
    sum_words_kernel(const __grid_constant__ struct mail m, struct sum_job j, size_t decode, size_t values)
{
    const size_t at = (size_t)blockIdx.x * MAIL_VALUES + threadIdx.x * MAIL_EACH;
    uint32_t step;
    pdl_go();
    pdl_wait();
    uint4 mine = at < values ? rounded_8(j.partial, decode, at) : make_uint4(0, 0, 0, 0);
    if (!take_step(m, m.state->step, &step)) return;
    if (threadIdx.x == 0) m.state->step[blockIdx.x] = step;
    float sum[MAIL_EACH], out[MAIL_EACH];
    if (at < values && exchange_words<RANKS>(m, blockIdx.x, step, mine, sum))
        add_to_residual(j.residual + at, sum, out);
}

static __global__ void __launch_bounds__(MAIL_THREADS) sum_alone_kernel(struct sum_job j, size_t decode, size_t values)
{
    const size_t at = (size_t)blockIdx.x * MAIL_VALUES + threadIdx.x * MAIL_EACH;
    float sum[MAIL_EACH], out[MAIL_EACH];
    pdl_go();
    pdl_wait();
    if (at >= values) return;
    add_part(sum, rounded_8(j.partial, decode, at), true);
    add_to_residual(j.residual + at, sum, out);
}

/* Writes a thread's eight columns of a normed row, zeros for columns from the width to the end of act's last block. */
[[maybe_unused]] static __device__ __forceinline__ void store_normed(const struct sum_job &j, const struct sum_norm &n,
                                                                     int row, int column, const float y[MAIL_EACH])
{
    if (n.y && column < j.width) store_8(n.y + (size_t)row * j.width + column, y);
    if (column >= act_blocks(j.width) * ACT_BLOCK) return;
    if (row < j.rows.decode) { /* eight columns lie together */
        const float s = ACT_SCALE;
        char *to = (char *)n.act + ((size_t)row * act_blocks(j.width) * ACT_BLOCK + column) * 2;
        *(uint4 *)to = make_uint4(pair_of(y[0] * s, y[1] * s), pair_of(y[2] * s, y[3] * s), pair_of(y[4] * s, y[5] * s),
                                  pair_of(y[6] * s, y[7] * s));
        return;
    }
#pragma unroll
    for (int i = 0; i < MAIL_EACH; i += 2) act_store2(n.act, j.rows, j.width, row, column + i, y[i], y[i + 1]);
}

/* A cluster of row_norm_chunks blocks a row; block = chunk of 1024 columns. No early return: all blocks of a cluster
 * meet twice. */
template <int RANKS>
static __global__ void __launch_bounds__(MAIL_THREADS)
    sum_norm_kernel(const __grid_constant__ struct mail m, struct sum_job j, struct sum_norm n, size_t decode,
                    int chunks)
{
#if __CUDA_ARCH__ >= 900
    namespace cg = cooperative_groups;
    static_assert((int)MAIL_VALUES == (int)ROW_NORM_CHUNK && (int)MAIL_THREADS == (int)ROW_NORM_THREADS,
                  "a block is a chunk");
    __shared__ float warp_sum[ROW_NORM_WARPS], chunk_sum[MOST_CHUNKS];
    cg::cluster_group cluster = cg::this_cluster();
    const int row = blockIdx.x / chunks, chunk = blockIdx.x % chunks, t = threadIdx.x;
    const int column = chunk * MAIL_VALUES + t * MAIL_EACH;
    const bool mine_too = column < j.width;
    const size_t at = (size_t)row * j.width + column;
    float w[MAIL_EACH] = {0}, sum[MAIL_EACH], z[MAIL_EACH] = {0};
    uint32_t step;
    pdl_go();
    cluster.barrier_arrive(); /* a neighbour's shared memory may be written once it has begun */
    if (mine_too) load_8(n.w + column, w);
    pdl_wait();
    uint4 mine = mine_too ? rounded_8(j.partial, decode, at) : make_uint4(0, 0, 0, 0);
    const bool alive = take_step(m, m.state->step, &step);
    if (alive && t == 0) m.state->step[blockIdx.x] = step;
    if (alive && mine_too && exchange_words<RANKS>(m, blockIdx.x, step, mine, sum))
        add_to_residual(j.residual + at, sum, z);
    const float squares = row_norm_warp(row_norm_squares(z));
    if (t % 32 == 0) warp_sum[t / 32] = squares;
    __syncthreads();
    cluster.barrier_wait();
    if (t < chunks) *cluster.map_shared_rank(&chunk_sum[chunk], t) = row_norm_chunk(warp_sum);
    cluster.sync();
    const float scale = row_norm_scale(row_norm_total(chunk_sum, chunks), j.width, n.eps);
#pragma unroll
    for (int i = 0; i < MAIL_EACH; i++) z[i] = row_norm_apply(z[i], scale, w[i]);
    store_normed(j, n, row, column, z);
#else
    __trap(); /* mail_sum_norm_takes refuses such cards */
#endif
}

/* ---- flags ---- */

static __device__ __forceinline__ uint32_t *flag_of(char *area, size_t flags, int block)
{
    return (uint32_t *)(area + flags + (size_t)block * FLAG_BYTES);
}

/* After all threads of the block have written to the peers: tells each of them. */
static __device__ __forceinline__ void raise_flags(const struct mail &m, size_t flags, uint32_t step)
{
    __threadfence_system();
    __syncthreads();
    const int r = threadIdx.x;
    if (r >= m.ranks || r == m.rank) return;
    __threadfence_system();
    *(volatile uint32_t *)flag_of(m.out[r], flags, blockIdx.x) = step;
}

/* Waits for this block's flag of every peer; the peer may be one step ahead. False in all threads: given up. */
static __device__ __forceinline__ bool await_flags(const struct mail &m, size_t flags, uint32_t step)
{
    const int r = threadIdx.x;
    int given_up = 0;
    if (r < m.ranks && r != m.rank) {
        struct patience p = {0, 0};
        const volatile uint32_t *flag = flag_of(m.in[r], flags, blockIdx.x);
        while ((int32_t)(*flag - step) < 0)
            if (!wait_on(m, &p, r)) {
                given_up = 1;
                break;
            }
        __threadfence_system();
    }
    return !__syncthreads_or(given_up);
}

static __device__ __forceinline__ uint4
load_fresh(const void *from) /* what a peer has just written, maybe in host memory */
{
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

/* ---- large sums: all of a piece is sent by one kernel and added by the next ---- */

static __global__ void __launch_bounds__(BULK_THREADS)
    bulk_send_kernel(const __grid_constant__ struct mail m, struct sum_job j, size_t decode, size_t first,
                     size_t values)
{
    uint32_t step;
    pdl_go();
    pdl_wait();
    if (!take_step(m, m.state->bulk_step, &step)) return;
    const size_t piece = m.at.bulk + (step & 1) * m.at.piece_bytes;
    for (size_t i = (size_t)blockIdx.x * BULK_VALUES + threadIdx.x * MAIL_EACH; i < values;
         i += (size_t)gridDim.x * BULK_VALUES) {
        const uint4 mine = rounded_8(j.partial, decode, first + i);
        for (int r = 0; r < m.ranks; r++)
            if (r != m.rank) *(uint4 *)(m.out[r] + piece + i * 2) = mine;
    }
    raise_flags(m, m.at.bulk_flags, step);
}

static __global__ void __launch_bounds__(BULK_THREADS)
    bulk_add_kernel(const __grid_constant__ struct mail m, struct sum_job j, size_t decode, size_t first, size_t values)
{
    uint32_t step;
    pdl_go();
    pdl_wait();
    if (!take_step(m, m.state->bulk_step, &step)) return;
    if (threadIdx.x == 0) m.state->bulk_step[blockIdx.x] = step;
    if (!await_flags(m, m.at.bulk_flags, step)) return;
    const size_t piece = m.at.bulk + (step & 1) * m.at.piece_bytes;
    for (size_t i = (size_t)blockIdx.x * BULK_VALUES + threadIdx.x * MAIL_EACH; i < values;
         i += (size_t)gridDim.x * BULK_VALUES) {
        const uint4 mine = rounded_8(j.partial, decode, first + i);
        float sum[MAIL_EACH], out[MAIL_EACH];
        for (int r = 0; r < m.ranks; r++)
            add_part(sum, r == m.rank ? mine : load_fresh(m.in[r] + piece + i * 2), r == 0);
        add_to_residual(j.residual + first + i, sum, out);
    }
}

static __global__ void __launch_bounds__(BULK_THREADS)
    round_kernel(struct sum_job j, size_t decode, size_t values, uint4 *to)
{
    pdl_go();
    pdl_wait();
    const size_t i = ((size_t)blockIdx.x * BULK_THREADS + threadIdx.x) * MAIL_EACH;
    if (i < values) to[i / MAIL_EACH] = rounded_8(j.partial, decode, i);
}

static __global__ void __launch_bounds__(BULK_THREADS)
    add_rounded_kernel(struct sum_job j, size_t values, const char *all, size_t stride, int ranks)
{
    float sum[MAIL_EACH], out[MAIL_EACH];
    pdl_go();
    pdl_wait();
    const size_t i = ((size_t)blockIdx.x * BULK_THREADS + threadIdx.x) * MAIL_EACH;
    if (i >= values) return;
    for (int r = 0; r < ranks; r++) add_part(sum, __ldcg((const uint4 *)(all + (r * stride + i) * 2)), r == 0);
    add_to_residual(j.residual + i, sum, out);
}

/* ---- gathers: one kernel sends this rank's columns, the next takes everybody's; where a block is enough, one does both ---- */

struct columns {
    const float *mine;
    int rows, row_width;
    struct range of_rank[MAX_RANKS];
    float *out;
};

/* The number of this gather, and whether the path still works, by one thread, to all. */
static __device__ __forceinline__ bool take_number(const struct mail &m, uint32_t *number)
{
    __shared__ uint32_t shared_number, shared_dead;
    if (threadIdx.x == 0) {
        shared_number = *(const volatile uint32_t *)&m.state->gathers + 1;
        shared_dead = *(const volatile uint32_t *)&m.state->dead; /* flags are of no use then */
    }
    __syncthreads();
    *number = shared_number;
    return !shared_dead;
}

static __device__ __forceinline__ void send_columns(const struct mail &m, const struct columns &g, uint32_t number)
{
    const size_t floats = (size_t)g.rows * g.of_rank[m.rank].count,
                 part = m.at.gather + (number & 1) * m.at.gather_bytes;
    for (size_t i = (size_t)blockIdx.x * BULK_THREADS + threadIdx.x; i < floats;
         i += (size_t)gridDim.x * BULK_THREADS) {
        const float mine = __ldcg(g.mine + i);
        for (int r = 0; r < m.ranks; r++)
            if (r != m.rank) ((float *)(m.out[r] + part))[i] = mine;
    }
    raise_flags(m, m.at.gather_flags, number);
}

/* Each block takes of every rank just what that rank's block of the same number has sent. The last one to be done counts. */
static __device__ __forceinline__ void take_columns(const struct mail &m, const struct columns &g, uint32_t number)
{
    const size_t part = m.at.gather + (number & 1) * m.at.gather_bytes;
    for (int turn = 0; turn < m.ranks; turn++) {
        const int r = (m.rank + turn) % m.ranks; /* the own columns first: the others' are on their way */
        if (turn == 1 && !await_flags(m, m.at.gather_flags, number)) return;
        const struct range range = g.of_rank[r];
        const size_t floats = (size_t)g.rows * range.count;
        const float *from = turn ? (const float *)(m.in[r] + part) : g.mine;
        for (size_t i = (size_t)blockIdx.x * BULK_THREADS + threadIdx.x; i < floats;
             i += (size_t)gridDim.x * BULK_THREADS) {
            const size_t row = i / range.count, column = i % range.count;
            g.out[row * g.row_width + range.first + column] = *(const volatile float *)&from[i];
        }
    }
    if (threadIdx.x || atomicAdd(&m.state->gather_blocks, 1u) + 1 < gridDim.x) return;
    m.state->gather_blocks = 0;
    m.state->gathers = number;
}

static __global__ void __launch_bounds__(BULK_THREADS)
    gather_send_kernel(const __grid_constant__ struct mail m, struct columns g)
{
    uint32_t number;
    pdl_go();
    pdl_wait();
    if (take_number(m, &number)) send_columns(m, g, number);
}

static __global__ void __launch_bounds__(BULK_THREADS)
    gather_take_kernel(const __grid_constant__ struct mail m, struct columns g)
{
    uint32_t number;
    pdl_go();
    pdl_wait();
    if (take_number(m, &number)) take_columns(m, g, number);
}

static __global__ void __launch_bounds__(BULK_THREADS)
    gather_kernel(const __grid_constant__ struct mail m, struct columns g)
{
    uint32_t number;
    pdl_go();
    pdl_wait();
    if (!take_number(m, &number)) return;
    send_columns(m, g, number);
    take_columns(m, g, number);
}

struct mail_layout mail_layout_make(size_t max_values, size_t most_piece_values, size_t gather_floats)
{
    struct mail_layout l = {};
    const size_t line = 4096;
    l.piece_values = max_values < most_piece_values ? max_values : most_piece_values;
    l.piece_bytes = (l.piece_values * 2 + line - 1) / line * line;
    l.gather_bytes = (gather_floats * sizeof(float) + line - 1) / line * line;
    l.bulk_flags = (size_t)MAIL_BLOCKS * 2 * MAIL_SLOT_BYTES;
    l.bulk = l.bulk_flags + (size_t)BULK_BLOCKS * FLAG_BYTES;
    l.gather_flags = l.bulk + 2 * l.piece_bytes;
    l.gather = l.gather_flags + (size_t)BULK_BLOCKS * FLAG_BYTES;
    l.area_bytes = l.gather + 2 * l.gather_bytes;
    return l;
}

enum rc mail_preload(struct err *e)
{
    const void *const kernels[] = {
        (const void *)sum_words_kernel<2>, (const void *)sum_words_kernel<3>, (const void *)sum_words_kernel<4>,
        (const void *)sum_norm_kernel<1>,  (const void *)sum_norm_kernel<2>,  (const void *)sum_norm_kernel<3>,
        (const void *)sum_norm_kernel<4>,  (const void *)sum_alone_kernel,    (const void *)bulk_send_kernel,
        (const void *)bulk_add_kernel,     (const void *)round_kernel,        (const void *)add_rounded_kernel,
        (const void *)gather_send_kernel,  (const void *)gather_take_kernel, (const void *)gather_kernel};
    for (size_t i = 0; i < sizeof kernels / sizeof kernels[0]; i++) {
        struct cudaFuncAttributes a;
        cudaError_t status = cudaFuncGetAttributes(&a, kernels[i]);
        if (status != cudaSuccess)
            return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "cuda", "kernels of sums: %s", cudaGetErrorString(status));
    }
    return RC_OK;
}

int mail_word_blocks(const struct op_context *c)
{
    int least = 0;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&least, sum_words_kernel<4>, MAIL_THREADS, 0);
    if (c->sm >= 90) {
        int of_norm = 0;
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_norm, sum_norm_kernel<4>, MAIL_THREADS, 0);
        /* Clusters do not fill a card to the last block. */
        if (of_norm / 2 < least) least = of_norm / 2;
    }
    return least * c->processors < MAIL_BLOCKS ? least * c->processors : MAIL_BLOCKS;
}

static size_t decode_values(const struct sum_job *j) { return (size_t)j->rows.decode * (size_t)j->width; }
static unsigned blocks_for(size_t values, size_t of_block) { return (unsigned)((values + of_block - 1) / of_block); }

static dim3 bulk_grid(const struct mail *m, size_t values, size_t of_block)
{
    const unsigned n = blocks_for(values, of_block), most = (unsigned)m->bulk_blocks;
    return dim3(n < most ? n : most);
}

void sum_alone(const struct op_context *c, const struct sum_job *j)
{
    op_launch(c, sum_alone_kernel, dim3(blocks_for(sum_values(j), MAIL_VALUES)), dim3(MAIL_THREADS), 0, *j,
              decode_values(j), sum_values(j));
}

void mail_sum(const struct op_context *c, const struct mail *m, const struct sum_job *j)
{
    auto kernel = m->ranks == 2 ? sum_words_kernel<2> : m->ranks == 3 ? sum_words_kernel<3> : sum_words_kernel<4>;
    op_launch(c, kernel, dim3(blocks_for(sum_values(j), MAIL_VALUES)), dim3(MAIL_THREADS), 0, *m, *j, decode_values(j),
              sum_values(j));
}

void mail_sum_bulk(const struct op_context *c, const struct mail *m, const struct sum_job *j)
{
    const size_t all = sum_values(j);
    for (size_t first = 0; first < all; first += m->at.piece_values) {
        const size_t values = all - first < m->at.piece_values ? all - first : m->at.piece_values;
        const dim3 grid = bulk_grid(m, values, BULK_VALUES);
        op_launch(c, bulk_send_kernel, grid, dim3(BULK_THREADS), 0, *m, *j, decode_values(j), first, values);
        op_launch(c, bulk_add_kernel, grid, dim3(BULK_THREADS), 0, *m, *j, decode_values(j), first, values);
    }
}

bool mail_sum_norm_takes(const struct mail *m, const struct sum_job *j)
{
    const int chunks = row_norm_chunks(j->width);
    return chunks <= MOST_CHUNKS && kern_rows(j->rows) * chunks <= m->word_blocks;
}

void mail_sum_norm(const struct op_context *c, const struct mail *m, const struct sum_job *j, const struct sum_norm *n)
{
    auto kernel = m->ranks == 1   ? sum_norm_kernel<1>
                  : m->ranks == 2 ? sum_norm_kernel<2>
                  : m->ranks == 3 ? sum_norm_kernel<3>
                                  : sum_norm_kernel<4>;
    const int chunks = row_norm_chunks(j->width);
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute[2] = {};
    config.gridDim = dim3((unsigned)(kern_rows(j->rows) * chunks));
    config.blockDim = dim3(MAIL_THREADS);
    config.stream = c->stream;
    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim.x = (unsigned)chunks;
    attribute[0].val.clusterDim.y = attribute[0].val.clusterDim.z = 1;
    attribute[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute;
    config.numAttrs = c->pdl ? 2 : 1;
    cudaLaunchKernelEx(&config, kernel, *m, *j, *n, decode_values(j), chunks);
}

void mail_gather(const struct op_context *c, const struct mail *m, const float *mine, int rows,
                 const struct range *range_of_rank, int row_width, float *out)
{
    struct columns g = {};
    g.mine = mine, g.rows = rows, g.row_width = row_width, g.out = out;
    int most = 1;
    for (int r = 0; r < m->ranks; r++) {
        g.of_rank[r] = range_of_rank[r];
        if (range_of_rank[r].count > most) most = range_of_rank[r].count;
    }
    const dim3 grid = bulk_grid(m, (size_t)rows * (size_t)most, 4 * BULK_THREADS); /* the same on all ranks */
    if (grid.x == 1) {
        op_launch(c, gather_kernel, grid, dim3(BULK_THREADS), 0, *m, g);
        return;
    }
    op_launch(c, gather_send_kernel, grid, dim3(BULK_THREADS), 0, *m, g);
    op_launch(c, gather_take_kernel, grid, dim3(BULK_THREADS), 0, *m, g);
}

void sum_round(const struct op_context *c, const struct sum_job *j, void *to_bf16)
{
    op_launch(c, round_kernel, dim3(blocks_for(sum_values(j), BULK_VALUES)), dim3(BULK_THREADS), 0, *j,
              decode_values(j), sum_values(j), (uint4 *)to_bf16);
}

void sum_add_rounded(const struct op_context *c, const struct sum_job *j, const void *all_bf16, size_t stride,
                     int ranks)
{
    op_launch(c, add_rounded_kernel, dim3(blocks_for(sum_values(j), BULK_VALUES)), dim3(BULK_THREADS), 0, *j,
              sum_values(j), (const char *)all_bf16, stride, ranks);
}
