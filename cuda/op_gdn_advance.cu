/* op_gdn_advance: chunks of a segment in order (op_gdn_prefill.cu has the formulas). A block has 64 columns of a
 * head's state; a warp has 16 of them, S^T as accumulators (float32) in registers:
 *     V^T = U^T - S^T W^T,   O^T = p S^T Q^T + V^T P^T,   S^T = p_last S^T + (V decayed to the end)^T K
 * Accumulators have the layout of the next product's first operand. A second warp computes O from what the first
 * hands over, so that the chain from state to state has two of the products only. The second operands are the same
 * for all columns; they lie in scratch in the order of fragments, and a ninth warp copies them through a ring in
 * shared memory. */
#include "op_gdn_chunk.cuh"

enum {
    PIECES = 8,
    STAGES = 10,
    STAGE_BYTES = 16384 + 512,
    COLUMN_WARPS = 4, /* of the state, and as many of the outputs; another copies */
    ADVANCE_THREADS = 32 * (2 * COLUMN_WARPS + 1),
    SLICES = 2
};

struct advance_shared {
    char stages[STAGES][STAGE_BYTES];
    uint4 state[COLUMN_WARPS][8 * 64], v[COLUMN_WARPS][4 * 64]; /* first operands, from warp to warp */
    uint64_t full[STAGES], empty[STAGES];
    uint64_t state_there[COLUMN_WARPS], v_there[COLUMN_WARPS], taken[COLUMN_WARPS];
};

static __device__ __forceinline__ void init_barriers(struct advance_shared *x)
{
#if __CUDA_ARCH__ >= 900
    for (int i = 0; i < STAGES; i++) {
        mbar_init(shared_address(&x->full[i]), 1);
        mbar_init(shared_address(&x->empty[i]), 2 * COLUMN_WARPS);
    }
    for (int i = 0; i < COLUMN_WARPS; i++) {
        mbar_init(shared_address(&x->state_there[i]), 1);
        mbar_init(shared_address(&x->v_there[i]), 1);
        mbar_init(shared_address(&x->taken[i]), 1);
    }
    mbar_init_fence();
#else
    (void)x;
    __trap(); /* gdn_fast_card */
#endif
}

/* Copies piece `piece` of a chunk, the block's copy number n: 0..3 W and Q of 32 of k's dimensions, 4 U and decays,
 * 5 P on and below the diagonal, 6 and 7 K of 32 rows. */
static __device__ __forceinline__ void copy_piece(const struct gdn_call &a, char *chunk, int head, int k_head,
                                                  int slice, int piece, struct advance_shared *x, int n)
{
#if __CUDA_ARCH__ >= 900
    const int stage = n % STAGES, round = n / STAGES;
    const uint32_t to = shared_address(x->stages[stage]), bar = shared_address(&x->full[stage]);
    if (round) mbar_wait(shared_address(&x->empty[stage]), (round - 1) & 1);
    if (piece < 4) {
        mbar_expect(bar, 16384);
        bulk_load(to, w_memory(a, chunk, head) + piece * 8192, 8192, bar);
        bulk_load(to + 8192, q_memory(chunk, k_head) + piece * 8192, 8192, bar);
    } else if (piece == 4) {
        mbar_expect(bar, 16384 + 512);
        bulk_load(to, u_memory(a, chunk, head) + slice * 16384, 16384, bar);
        bulk_load(to + 16384, decay_memory(a, chunk, head), 512, bar);
    } else if (piece == 5) {
        mbar_expect(bar, 20 * BLOCK_BYTES);
        for (int jb = 0; jb < 4; jb++) {
            const int first = (jb * 8 + 2 * jb) * BLOCK_BYTES;
            bulk_load(to + first, p_memory(a, chunk, head) + first, (8 - 2 * jb) * BLOCK_BYTES, bar);
        }
    } else {
        mbar_expect(bar, 16384);
        bulk_load(to, k_memory(chunk, k_head) + (piece - 6) * 16384, 16384, bar);
    }
#endif
}

/* The ring as a warp sees it. */
struct stages {
    struct advance_shared *x;
    int stage;
    uint32_t parity;
};

static __device__ __forceinline__ const char *stage_open(struct stages *s)
{
#if __CUDA_ARCH__ >= 900
    mbar_wait(shared_address(&s->x->full[s->stage]), s->parity);
#endif
    return s->x->stages[s->stage];
}

static __device__ __forceinline__ void stage_close(struct stages *s)
{
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbar_arrive(shared_address(&s->x->empty[s->stage]));
#endif
    if (++s->stage == STAGES) {
        s->stage = 0;
        s->parity ^= 1;
    }
}

/* From one warp to another; the wait is for chunk n's notice. */
static __device__ __forceinline__ void notify(const uint64_t *bar)
{
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbar_arrive(shared_address(bar));
#endif
}

static __device__ __forceinline__ void await(const uint64_t *bar, int n)
{
#if __CUDA_ARCH__ >= 900
    mbar_wait(shared_address(bar), n & 1);
#endif
}

static __device__ __forceinline__ void store_fragment(const struct fragment &f, uint4 *to)
{
    to[0] = make_uint4(f.hi[0], f.hi[1], f.hi[2], f.hi[3]);
    to[32] = make_uint4(f.lo[0], f.lo[1], f.lo[2], f.lo[3]);
}

static __device__ __forceinline__ struct fragment load_fragment(const uint4 *from)
{
    const uint4 h = from[0], l = from[32];
    return (struct fragment){{h.x, h.y, h.z, h.w}, {l.x, l.y, l.z, l.w}};
}

/* c += a b for N tiles whose blocks follow each other in shared memory. */
template <int N>
static __device__ __forceinline__ void multiply_blocks(float (*c)[4], const struct fragment &a, const uint4 *blocks)
{
    uint4 b[N];
#pragma unroll
    for (int i = 0; i < N; i++) b[i] = blocks[i * 32];
    multiply<N>(c, a, b);
}

/* Chunk n of a warp's 16 columns: V, and the state after it. Hands the state before it and V to the warp of the
 * outputs. */
static __device__ __forceinline__ void advance_state(struct stages *ring, int columns, int n, float (*s)[4])
{
    const int lane = threadIdx.x % 32, pair = 2 * (lane % 4);
    struct advance_shared *x = ring->x;
    struct fragment f[8];
    float v[8][4] = {};
#pragma unroll
    for (int kb = 0; kb < 8; kb++) f[kb] = fragment_of(s[2 * kb], s[2 * kb + 1]);
    if (n) await(&x->taken[columns], n - 1);
#pragma unroll
    for (int kb = 0; kb < 8; kb++) store_fragment(f[kb], &x->state[columns][kb * 64 + lane]);
    notify(&x->state_there[columns]);
#pragma unroll
    for (int piece = 0; piece < 4; piece++) {
        const uint4 *w = (const uint4 *)stage_open(ring) + lane;
        multiply_blocks<8>(v, f[2 * piece], w);
        multiply_blocks<8>(v, f[2 * piece + 1], w + 256);
        stage_close(ring);
    }
    const char *at = stage_open(ring);
    const float4 *u = (const float4 *)at + columns * 256 + lane;
    const float *decays = (const float *)(at + 16384);
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        const float4 all = u[tile * 32];
        v[tile][0] = all.x - v[tile][0];
        v[tile][1] = all.y - v[tile][1];
        v[tile][2] = all.z - v[tile][2];
        v[tile][3] = all.w - v[tile][3];
    }
#pragma unroll
    for (int jb = 0; jb < 4; jb++)
        store_fragment(fragment_of(v[2 * jb], v[2 * jb + 1]), &x->v[columns][jb * 64 + lane]);
    notify(&x->v_there[columns]);
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        const float2 to_end = *(const float2 *)(decays + CHUNK + 8 * tile + pair);
#pragma unroll
        for (int e = 0; e < 4; e++) v[tile][e] *= e % 2 ? to_end.y : to_end.x;
    }
    const float decay = decays[CHUNK - 1];
    stage_close(ring);
    stage_open(ring); /* P */
    stage_close(ring);
#pragma unroll
    for (int tile = 0; tile < 16; tile++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[tile][e] *= decay;
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
        const uint4 *k = (const uint4 *)stage_open(ring) + lane;
#pragma unroll
        for (int jb = 2 * piece; jb < 2 * piece + 2; jb++) {
            const struct fragment by = fragment_of(v[2 * jb], v[2 * jb + 1]);
            multiply_blocks<8>(s, by, k + jb % 2 * 512);
            multiply_blocks<8>(s + 8, by, k + jb % 2 * 512 + 256);
        }
        stage_close(ring);
    }
}

/* Chunk n of another warp's 16 columns: O, 8 tiles. */
static __device__ __forceinline__ void advance_outputs(struct stages *ring, int columns, int n, float4 *o)
{
    const int lane = threadIdx.x % 32, pair = 2 * (lane % 4);
    struct advance_shared *x = ring->x;
    float out[8][4] = {};
    await(&x->state_there[columns], n);
#pragma unroll
    for (int piece = 0; piece < 4; piece++) {
        const uint4 *q = (const uint4 *)stage_open(ring) + 512 + lane;
#pragma unroll
        for (int i = 0; i < 2; i++)
            multiply_blocks<8>(out, load_fragment(&x->state[columns][(2 * piece + i) * 64 + lane]), q + i * 256);
        stage_close(ring);
    }
    const float *decays = (const float *)(stage_open(ring) + 16384);
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        const float2 from_start = *(const float2 *)(decays + 8 * tile + pair);
#pragma unroll
        for (int e = 0; e < 4; e++) out[tile][e] *= e % 2 ? from_start.y : from_start.x;
    }
    stage_close(ring);
    struct fragment v[4];
    await(&x->v_there[columns], n);
#pragma unroll
    for (int jb = 0; jb < 4; jb++) v[jb] = load_fragment(&x->v[columns][jb * 64 + lane]);
    notify(&x->taken[columns]);
    const uint4 *p = (const uint4 *)stage_open(ring) + lane;
    multiply_blocks<8>(out, v[0], p);
    multiply_blocks<6>(out + 2, v[1], p + 10 * 32);
    multiply_blocks<4>(out + 4, v[2], p + 20 * 32);
    multiply_blocks<2>(out + 6, v[3], p + 30 * 32);
    stage_close(ring);
#pragma unroll
    for (int tile = 0; tile < 8; tile++)
        o[tile * 32] = make_float4(out[tile][0], out[tile][1], out[tile][2], out[tile][3]);
    for (int piece = 0; piece < 2; piece++) { /* K */
        stage_open(ring);
        stage_close(ring);
    }
}

/* A warp of the state: its columns from the slot, through chunks first .. end, and back. */
static __device__ __forceinline__ void run_state(struct stages *ring, int columns, int n, float *state)
{
    float s[16][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 low = *(const float2 *)(state + 8 * i), high = *(const float2 *)(state + 8 * DIM + 8 * i);
        s[i][0] = low.x;
        s[i][1] = low.y;
        s[i][2] = high.x;
        s[i][3] = high.y;
    }
    for (int i = 0; i < n; i++) advance_state(ring, columns, i, s);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        *(float2 *)(state + 8 * i) = make_float2(s[i][0], s[i][1]);
        *(float2 *)(state + 8 * DIM + 8 * i) = make_float2(s[i][2], s[i][3]);
    }
}

/* A block: a segment and 64 columns of a head. Chunks window_first .. + window_chunks of the batch. */
static __global__ void __launch_bounds__(ADVANCE_THREADS, 1)
    advance(const struct gdn_call a, int window_first, int window_chunks)
{
    extern __shared__ uint4 advance_memory[];
    struct advance_shared *x = (struct advance_shared *)advance_memory;
    const int head = blockIdx.x / SLICES, slice = blockIdx.x % SLICES, k_head = head / (a.s.v_heads / a.s.k_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = warp % COLUMN_WARPS;
    if (threadIdx.x == 0) init_barriers(x);
    pdl_wait();
    const struct device_segment g = a.segments[blockIdx.y];
    const int before = chunks_before(a, blockIdx.y) - window_first; /* of the window, or negative */
    const int first = max(before, 0), segment_end = before + (g.rows + CHUNK - 1) / CHUNK;
    const int end = min(segment_end, window_chunks);
    if (first >= end) return;
    __syncthreads();
    float *slot = gdn_state(a, g.slot);
    struct stages ring = {x, 0, 0};
    if (warp == 2 * COLUMN_WARPS) {
        if (lane == 0)
            for (int i = first, n = 0; i < end; i++)
                for (int piece = 0; piece < PIECES; piece++, n++)
                    copy_piece(a, chunk_memory(a, i), head, k_head, slice, piece, x, n);
    } else if (warp < COLUMN_WARPS) {
        const size_t column = (size_t)head * DIM + slice * 64 + columns * 16 + lane / 4;
        run_state(&ring, columns, end - first, slot + column * DIM + 2 * (lane % 4));
    } else {
        for (int i = first; i < end; i++)
            advance_outputs(&ring, columns, i - first,
                            (float4 *)u_memory(a, chunk_memory(a, i), head) + (slice * COLUMN_WARPS + columns) * 256 +
                                lane);
    }
    pdl_go();
    if (segment_end <= window_chunks)
        gdn_advance_ring(a, g, slot + gdn_matrix_floats(&a.s), blockIdx.x * ADVANCE_THREADS + threadIdx.x,
                         gridDim.x * ADVANCE_THREADS);
}

void gdn_advance(const struct op_context *c, const struct gdn_call *call, int first, int n)
{
    cudaFuncSetAttribute(advance, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(struct advance_shared));
    op_launch(c, advance, dim3(SLICES * call->s.v_heads, call->n_segments), dim3(ADVANCE_THREADS),
              sizeof(struct advance_shared), *call, first, n);
}
