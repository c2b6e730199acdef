/* op_linear_decode: products of the few rows of a decode step, bound by reading the weights.
 *
 * The columns of a matrix (of a half of them, where halves is 2) are cut into fixed segments of whole blocks: 16, or 8 where 16
 * would have less than two blocks each. A segment is two chains of matrix instructions, even and odd ones, which are added; the
 * segments' sums are added in order, then the row's scale multiplies. Blocks of threads walk over the tiles of 16 rows; one warp
 * adds a tile's segments, a tile later, while the others go on. A row's bits depend on nothing but its own x and this tree. Rows
 * go in passes of 8 or 16; more of them by op_linear_wide.cu.
 *
 * Three kernels with this tree:
 *   ring    sm_90, counts known to the compiler: every warp copies its part of the next tiles into its own ring in shared
 *           memory (started before the predecessor has ended: weights do not depend on it), and keeps its part of x in
 *           registers. 16 warps with one segment each, or 8 warps with two, so that two blocks share a processor and the
 *           next kernel begins in whichever half is free first. A small matrix of the same x can go along in one launch.
 *   stream  sm_90, any shape, group scales, several planes: pieces of a few blocks travel through the rings, with their
 *           groups' scales; x is read again for every tile.
 *   plain   any card: loads straight from global memory. */
#include "op_linear_decode.cuh"

enum { PLAIN_WARPS = 16, BLOCK_COLS_LOG2 = 6 };

/* Sums of the segments, `step` apart, in order. Those of empty ones, zeros, may be left out: the sum is never -0. */
template <int N = SEGMENTS> __device__ __forceinline__ float4 reduce_tile(const float4 *part, int step)
{
    float4 s = make_float4(0, 0, 0, 0);
    EACH(i, N)
    {
        const float4 v = part[i * step];
        s.x += v.x, s.y += v.y, s.z += v.z, s.w += v.w;
    }
    return s;
}

/* A lane's x of a block: its 16 columns of x row x_first + lane / 4. Rows that are not there read row 0, for sums nobody
 * stores. */
__device__ __forceinline__ void read_x(const struct linear_args *a, int x_first, int block, int lane, uint4 x[2])
{
    const int row = x_first + (lane >> 2) < a->rows ? x_first + (lane >> 2) : 0;
    const uint4 *p = (const uint4 *)(a->x + row * a->x_pitch + (size_t)block * 128 + (lane & 3) * 32);
    x[0] = p[0], x[1] = p[1];
}

/* ---- ring ---- */

/* BLOCKS: of every one of the COUNT segments; EXTRA: 1 where some have one more. X_TILES: of 8 rows of x. PER_WARP segments a warp,
 * read in pieces of PIECE blocks (0: a piece is a segment); DEPTH pieces of a warp are on their way or in use. */
template <int FORMAT_, int BLOCKS_, int EXTRA_, int X_TILES_, int PER_WARP_, int PIECE_, int DEPTH_, int COUNT_ = SEGMENTS> struct ring_shape {
    static constexpr int FORMAT = FORMAT_, BLOCKS = BLOCKS_, EXTRA = EXTRA_, X_TILES = X_TILES_, PER_WARP = PER_WARP_, COUNT = COUNT_;
    static constexpr int DEPTH = DEPTH_, BUFFERS = 3; /* tiles whose sums wait for their reduction */
    static constexpr int SEGMENT = BLOCKS + EXTRA, PIECE = PIECE_ ? PIECE_ : SEGMENT;
    static constexpr int WARPS = COUNT / PER_WARP, PER_PROCESSOR = 16 / WARPS; /* blocks of threads */
    static constexpr int BYTES = FORMAT == BLOCK_NVFP4  ? BLOCK_NVFP4_BYTES
                                 : FORMAT == BLOCK_BF16 ? BLOCK_PLANE_BYTES
                                                        : BLOCK_FP8_BYTES;
    static constexpr int SUMS = COUNT * X_TILES * 32, SUM_BYTES = SUMS * (int)sizeof(float4);
    static constexpr int SHARED_BYTES = BUFFERS * SUM_BYTES + WARPS * DEPTH * PIECE * BYTES;
};

#if __CUDA_ARCH__ >= 900
/* A warp's pieces in the order in which it needs them: tile after tile, segment after segment. Lane 0 issues. */
template <class S> struct ring_feed {
    const uint8_t *tile; /* the warp's first block of the next piece's tile */
    size_t tile_step;
    int tile_at, tile_end, walkers, segment, done; /* done: blocks of the segment that were issued */
    const uint8_t *next;
    int count[S::PER_WARP]; /* blocks of the warp's segments */
};

template <class S> __device__ __forceinline__ void ring_issue(struct ring_feed<S> *f, uint32_t slot, uint32_t bar)
{
    if (f->tile_at >= f->tile_end) return;
    const int count = S::PER_WARP == 1 || f->segment == 0 ? f->count[0] : f->count[S::PER_WARP - 1];
    const int left = count - f->done, n = S::PIECE >= S::SEGMENT || left < S::PIECE ? left : S::PIECE;
    mbar_expect(bar, n * S::BYTES);
    bulk_load(slot, f->next, n * S::BYTES, bar);
    f->next += n * S::BYTES, f->done += n;
    if (f->done < count) return;
    f->done = 0;
    if (++f->segment < S::PER_WARP) return;
    f->segment = 0, f->tile_at += f->walkers;
    f->tile += f->tile_step, f->next = f->tile;
}

/* A whole kernel, PDL included, as block `block` of `blocks`. */
template <class S> __device__ __forceinline__ void ring_walk(const struct linear_args &a, unsigned block, unsigned blocks)
{
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t bars[S::WARPS * S::DEPTH + 2 * S::BUFFERS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int half = block & (a.halves - 1); /* no divisions here: the first copies wait for what is before them */
    const int walker = block >> (a.halves - 1), walkers = blocks >> (a.halves - 1);
    float4 *sums = (float4 *)shared;
    const uint8_t *ring = shared + S::BUFFERS * S::SUM_BYTES + warp * (S::DEPTH * S::PIECE * S::BYTES);
    const uint32_t ring_address = shared_address(ring), full = shared_address(bars + warp * S::DEPTH);
    const uint32_t sums_full = shared_address(bars + S::WARPS * S::DEPTH), sums_free = sums_full + 8 * S::BUFFERS;

    int first[S::PER_WARP];
    struct ring_feed<S> feed;
    EACH(s, S::PER_WARP) segment_range(&a.plan[half], warp * S::PER_WARP + s, &first[s], &feed.count[s]);
    if (S::EXTRA == 0) EACH(s, S::PER_WARP) feed.count[s] = S::BLOCKS;
    feed.tile_step = (size_t)walkers * a.blocks * S::BYTES;
    feed.tile = a.blocks_dev + ((size_t)walker * a.blocks + first[0]) * S::BYTES;
    feed.next = feed.tile, feed.tile_at = walker, feed.tile_end = a.tiles, feed.walkers = walkers, feed.segment = 0,
    feed.done = 0;

    /* All warps' first pieces before anybody's second: the copy engine serves what is outstanding side by side. */
    if (lane == 0) {
        EACH(i, S::DEPTH) mbar_init(full + 8 * i, 1);
        if (warp == 0) EACH(i, S::BUFFERS) mbar_init(sums_full + 8 * i, S::WARPS), mbar_init(sums_free + 8 * i, 1);
        mbar_init_fence();
        ring_issue<S>(&feed, ring_address, full);
    }
    __syncthreads();
    pdl_go();
    if (lane == 0)
        EACH(i, S::DEPTH - 1) ring_issue<S>(&feed, ring_address + (i + 1) * S::PIECE * S::BYTES, full + 8 * (i + 1));
    pdl_wait();

    uint4 x[S::PER_WARP][S::SEGMENT][S::X_TILES][2];
    EACH(s, S::PER_WARP)
    EACH(b, S::SEGMENT)
    EACH(i, S::X_TILES) read_x(&a, i * PASS_ROWS, first[s] + (b < feed.count[s] ? b : 0), lane, x[s][b][i]);

    const int n_tiles = walker < a.tiles ? (a.tiles - 1 - walker) / walkers + 1 : 0;
    int slot = 0;
    uint32_t parity = 0;
    float2 scale = make_float2(0, 0);
    for (int t = 0; t <= n_tiles; t++) {
        const int buffer = t % S::BUFFERS;
        if (t < n_tiles) {
            if (warp == t % S::WARPS) scale = read_scales(&a, walker + t * walkers, lane);
            EACH(s, S::PER_WARP)
            {
                float even[S::X_TILES][4] = {}, odd[S::X_TILES][4] = {};
                EACH(piece, (S::SEGMENT + S::PIECE - 1) / S::PIECE)
                {
                    if (piece * S::PIECE >= S::BLOCKS && piece * S::PIECE >= feed.count[s]) break;
                    mbar_wait(full + 8 * slot, parity);
                    const uint8_t *p = ring + slot * (S::PIECE * S::BYTES);
                    EACH(i, S::PIECE)
                    {
                        const int b = piece * S::PIECE + i;
                        if (b >= S::SEGMENT || (b >= S::BLOCKS && b >= feed.count[s])) continue;
                        uint32_t w[4][4];
                        block_decode<S::FORMAT>(p + i * S::BYTES, lane, w);
                        EACH(n, S::X_TILES) multiply_block(w, x[s][b][n], even[n], odd[n]);
                    }
                    __syncwarp();
                    if (lane == 0) ring_issue<S>(&feed, ring_address + slot * (S::PIECE * S::BYTES), full + 8 * slot);
                    if (++slot == S::DEPTH) slot = 0, parity ^= 1;
                }
                if (s == 0 && t >= S::BUFFERS) mbar_wait(sums_free + 8 * buffer, (t / S::BUFFERS & 1) ^ 1);
                EACH(n, S::X_TILES)
                sums[buffer * S::SUMS + ((warp * S::PER_WARP + s) * S::X_TILES + n) * 32 + lane] = make_float4(
                    even[n][0] + odd[n][0], even[n][1] + odd[n][1], even[n][2] + odd[n][2], even[n][3] + odd[n][3]);
            }
            __syncwarp();
            if (lane == 0) mbar_arrive(sums_full + 8 * buffer);
        }
        /* A tile later, when the other warps' sums are there: a warp that waited for them would be late with its next tile,
         * and so would be the next one that waits for this warp. */
        const int done = t - 1, done_buffer = done % S::BUFFERS;
        if (t == 0 || warp != done % S::WARPS) continue;
        mbar_wait(sums_full + 8 * done_buffer, done / S::BUFFERS & 1);
        EACH(n, S::X_TILES)
        {
            const float4 sum = reduce_tile<S::COUNT>(sums + done_buffer * S::SUMS + n * 32 + lane, S::X_TILES * 32);
            store_tile(&a, half, walker + done * walkers, n * PASS_ROWS, lane, sum, scale);
        }
        __syncwarp();
        if (lane == 0) mbar_arrive(sums_free + 8 * done_buffer);
    }
}
#endif

template <class S>
__global__ void __launch_bounds__(S::WARPS * 32, S::PER_PROCESSOR) linear_ring(const __grid_constant__ struct linear_args a)
{
#if __CUDA_ARCH__ >= 900
    ring_walk<S>(a, blockIdx.x, gridDim.x);
#endif
}

/* Two matrices of one half each: a block for every tile of `beside`, the first ones, which start at once; the others are a's. */
template <class S, class T>
__global__ void __launch_bounds__(S::WARPS * 32, S::PER_PROCESSOR)
    linear_ring_beside(const __grid_constant__ struct linear_args a, const __grid_constant__ struct linear_args beside)
{
    static_assert(S::WARPS == T::WARPS && T::SHARED_BYTES <= S::SHARED_BYTES, "the launch is that of S");
#if __CUDA_ARCH__ >= 900
    const unsigned first = beside.tiles;
    if (blockIdx.x < first)
        ring_walk<T>(beside, blockIdx.x, first);
    else
        ring_walk<S>(a, blockIdx.x - first, gridDim.x - first);
#endif
}

/* ---- blocks of any format, with scales of groups ---- */

struct chains {
    float even[4], odd[4];
    float acc[4]; /* of groups that are done */
};

/* acc += (even + odd) * scale, by rows; the chains begin again. at: the group's 16 scales. */
__device__ __forceinline__ void end_group(struct chains *c, const float *at, int lane)
{
    const float scale[2] = {at[lane >> 2], at[(lane >> 2) + 8]};
    EACH(i, 4)
    {
        c->acc[i] = fmaf(c->even[i] + c->odd[i], scale[i >> 1], c->acc[i]);
        c->even[i] = c->odd[i] = 0;
    }
}

/* One block whose groups, of `lanes` lanes of each quad, are narrower than it. min NULL: there are none. */
__device__ __forceinline__ void add_narrow_groups(const uint32_t (&w)[4][4], const uint4 x[2], int lanes,
                                                  const float *scale, const float *min, int lane, struct chains *c)
{
    for (int q = 0, i = 0; q < 4; q += lanes, i++) {
        uint32_t part[4][4];
        block_mask_lanes(w, lane, q, lanes, part);
        multiply_block(part, x, c->even, c->odd);
        end_group(c, scale + i * BLOCK_ROWS, lane);
        if (!min) continue;
        block_ones(lane, q, lanes, part);
        multiply_block(part, x, c->even, c->odd);
        end_group(c, min + i * BLOCK_ROWS, lane);
    }
}

/* A block into the chains. last: of its segment. scale, min: of the block's first group. */
template <int FORMAT, bool GLOBAL>
__device__ __forceinline__ void add_block(const struct linear_args *a, const uint8_t *block, const uint4 x[2], int b,
                                          bool last, const float *scale, const float *min, int lane, struct chains *c)
{
    uint32_t w[4][4];
    block_decode<FORMAT, GLOBAL>(block, lane, w);
    if (FORMAT == BLOCK_NVFP4 || FORMAT == BLOCK_BF16 || !a->group_log2) {
        multiply_block(w, x, c->even, c->odd);
        for (int p = 1; FORMAT == BLOCK_BF16 && p < a->planes; p++) {
            block_decode<FORMAT, GLOBAL>(block + p * BLOCK_PLANE_BYTES, lane, w);
            multiply_block(w, x, c->even, c->odd);
        }
    } else if (a->group_log2 < BLOCK_COLS_LOG2) {
        add_narrow_groups(w, x, 1 << (a->group_log2 - 4), scale, min, lane, c);
    } else {
        multiply_block(w, x, c->even, c->odd);
        if (last || ((b + 1) & ((1 << (a->group_log2 - BLOCK_COLS_LOG2)) - 1)) == 0) end_group(c, scale, lane);
    }
}

__device__ __forceinline__ float4 segment_sum(const struct linear_args *a, const struct chains *c)
{
    if (a->group_log2) return make_float4(c->acc[0], c->acc[1], c->acc[2], c->acc[3]);
    return make_float4(c->even[0] + c->odd[0], c->even[1] + c->odd[1], c->even[2] + c->odd[2], c->even[3] + c->odd[3]);
}

/* The first group that a block has part in. */
__device__ __forceinline__ int group_of_block(const struct linear_args *a, int block)
{
    const int up = BLOCK_COLS_LOG2 - a->group_log2;
    return up > 0 ? block << up : block >> -up;
}

/* ---- stream ---- */

enum { STREAM_BUFFERS = 3, STREAM_SCALE_BYTES = 512 };

template <int FORMAT> struct stream_shape {
    static constexpr int BLOCK_BYTES = FORMAT == BLOCK_NVFP4  ? 4 * BLOCK_NVFP4_BYTES
                                       : FORMAT == BLOCK_BF16 ? 3 * BLOCK_PLANE_BYTES
                                                              : 2 * BLOCK_FP8_BYTES;
    static constexpr bool SCALES = FORMAT == BLOCK_FP8 || FORMAT == BLOCK_INT8;
    static constexpr int SLOT_BYTES = BLOCK_BYTES + (SCALES ? 2 * STREAM_SCALE_BYTES : 0),
                         DEPTH = FORMAT == BLOCK_BF16 ? 2 : 3;
    static constexpr int SUM_BYTES = SEGMENTS * 32 * (int)sizeof(float4);
    static constexpr int SHARED_BYTES = STREAM_BUFFERS * SUM_BYTES + SEGMENTS * DEPTH * SLOT_BYTES;
};

#if __CUDA_ARCH__ >= 900
/* Copies `n` blocks from block b of a tile, and the scales of their groups behind them. */
template <int FORMAT>
__device__ __forceinline__ void stream_issue(const struct linear_args *a, int tile, int b, int n, uint32_t slot,
                                             uint32_t bar)
{
    using S = stream_shape<FORMAT>;
    const int bytes = block_bytes(FORMAT, a->planes);
    uint32_t scale_bytes = 0;
    size_t at = 0;
    if (S::SCALES && a->group_log2) {
        const int first = group_of_block(a, b), of_last = group_of_block(a, b + n - 1);
        const int end = of_last + (a->group_log2 < BLOCK_COLS_LOG2 ? BLOCK_COLS >> a->group_log2 : 1);
        scale_bytes = (uint32_t)(end - first) * BLOCK_ROWS * 4;
        at = ((size_t)tile * a->groups + first) * BLOCK_ROWS;
    }
    mbar_expect(bar, n * bytes + scale_bytes * (a->group_min_dev ? 2 : 1));
    bulk_load(slot, a->blocks_dev + ((size_t)tile * a->blocks + b) * bytes, n * bytes, bar);
    if (!scale_bytes) return;
    bulk_load(slot + S::BLOCK_BYTES, a->group_scale_dev + at, scale_bytes, bar);
    if (a->group_min_dev)
        bulk_load(slot + S::BLOCK_BYTES + STREAM_SCALE_BYTES, a->group_min_dev + at, scale_bytes, bar);
}

/* Lane 0: what it issues next. */
struct stream_feed {
    int tile, walkers, first, end; /* the warp's blocks of every tile */
    int block, slot;
};

template <int FORMAT>
__device__ __forceinline__ void stream_next(const struct linear_args *a, struct stream_feed *f, uint32_t ring,
                                            uint32_t full)
{
    using S = stream_shape<FORMAT>;
    if (f->tile >= a->tiles) return;
    const int per_piece = S::BLOCK_BYTES / block_bytes(FORMAT, a->planes), left = f->end - f->block;
    const int n = left < per_piece ? left : per_piece;
    stream_issue<FORMAT>(a, f->tile, f->block, n, ring + f->slot * S::SLOT_BYTES, full + 8 * f->slot);
    f->slot = f->slot + 1 == S::DEPTH ? 0 : f->slot + 1, f->block += n;
    if (f->block == f->end) f->block = f->first, f->tile += f->walkers;
}

/* The blocks of a piece that has arrived. */
template <int FORMAT>
__device__ __forceinline__ void stream_piece(const struct linear_args *a, const uint8_t *slot, int b, int n, int end,
                                             int lane, struct chains *c)
{
    using S = stream_shape<FORMAT>;
    const int bytes = block_bytes(FORMAT, a->planes);
    const float *scales = (const float *)(slot + S::BLOCK_BYTES),
                *mins = (const float *)(slot + S::BLOCK_BYTES + STREAM_SCALE_BYTES);
    for (int i = 0; i < n; i++) {
        uint4 x[2];
        read_x(a, 0, b + i, lane, x);
        const int skip =
            S::SCALES && a->group_log2 ? (group_of_block(a, b + i) - group_of_block(a, b)) * BLOCK_ROWS : 0;
        add_block<FORMAT, false>(a, slot + i * bytes, x, b + i, b + i + 1 == end, scales + skip,
                                 a->group_min_dev ? mins + skip : NULL, lane, c);
    }
}
#endif

template <int FORMAT>
__global__ void __launch_bounds__(SEGMENTS * 32) linear_stream(const __grid_constant__ struct linear_args a)
{
#if __CUDA_ARCH__ >= 900
    using S = stream_shape<FORMAT>;
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t bars[SEGMENTS * S::DEPTH + 2 * STREAM_BUFFERS];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = blockIdx.x & (a.halves - 1);
    const int walkers = gridDim.x >> (a.halves - 1), walker = blockIdx.x >> (a.halves - 1);
    const int n_tiles = walker < a.tiles ? (a.tiles - 1 - walker) / walkers + 1 : 0;
    const int per_piece = S::BLOCK_BYTES / block_bytes(FORMAT, a.planes);
    float4 *sums = (float4 *)shared;
    const uint8_t *ring = shared + STREAM_BUFFERS * S::SUM_BYTES + warp * (S::DEPTH * S::SLOT_BYTES);
    const uint32_t ring_address = shared_address(ring), full = shared_address(bars + warp * S::DEPTH);
    const uint32_t sums_full = shared_address(bars + SEGMENTS * S::DEPTH), sums_free = sums_full + 8 * STREAM_BUFFERS;
    int first, count;
    segment_range(&a.plan[half], warp, &first, &count);
    const int end = first + count;
    struct stream_feed feed = {count ? walker : a.tiles, walkers, first, end, first, 0};
    if (lane == 0) {
        EACH(i, S::DEPTH) mbar_init(full + 8 * i, 1);
        if (warp == 0) EACH(i, STREAM_BUFFERS) mbar_init(sums_full + 8 * i, SEGMENTS), mbar_init(sums_free + 8 * i, 1);
        mbar_init_fence();
        EACH(i, S::DEPTH) stream_next<FORMAT>(&a, &feed, ring_address, full);
    }
    __syncthreads();
    pdl_go();
    pdl_wait();
    int slot = 0;
    uint32_t parity = 0;
    float2 scale = make_float2(0, 0);
    for (int t = 0; t <= n_tiles; t++) {
        const int buffer = t % STREAM_BUFFERS, done = t - 1, done_buffer = done % STREAM_BUFFERS;
        if (t < n_tiles) {
            if (warp == t % SEGMENTS) scale = read_scales(&a, walker + t * walkers, lane);
            struct chains c = {};
            for (int b = first; b < end; b += per_piece) {
                mbar_wait(full + 8 * slot, parity);
                stream_piece<FORMAT>(&a, ring + slot * S::SLOT_BYTES, b, end - b < per_piece ? end - b : per_piece, end,
                                     lane, &c);
                __syncwarp();
                if (lane == 0) stream_next<FORMAT>(&a, &feed, ring_address, full);
                if (++slot == S::DEPTH) slot = 0, parity ^= 1;
            }
            if (t >= STREAM_BUFFERS) mbar_wait(sums_free + 8 * buffer, (t / STREAM_BUFFERS & 1) ^ 1);
            sums[(buffer * SEGMENTS + warp) * 32 + lane] = segment_sum(&a, &c);
            __syncwarp();
            if (lane == 0) mbar_arrive(sums_full + 8 * buffer);
        }
        if (t == 0 || warp != done % SEGMENTS) continue; /* a tile later, as linear_ring */
        mbar_wait(sums_full + 8 * done_buffer, done / STREAM_BUFFERS & 1);
        const float4 sum = reduce_tile(sums + done_buffer * SEGMENTS * 32 + lane, 32);
        store_tile(&a, half, walker + done * walkers, 0, lane, sum, scale);
        __syncwarp();
        if (lane == 0) mbar_arrive(sums_free + 8 * done_buffer);
    }
#endif
}

/* ---- plain ---- */

/* A segment of a tile. */
template <int FORMAT>
__device__ __forceinline__ float4 plain_segment(const struct linear_args *a, int tile, int first, int count, int lane)
{
    const int bytes = block_bytes(FORMAT, a->planes);
    const uint8_t *block = a->blocks_dev + ((size_t)tile * a->blocks + first) * bytes;
    struct chains c = {};
    for (int b = first; b < first + count; b++, block += bytes) {
        const size_t at = a->group_log2 ? ((size_t)tile * a->groups + group_of_block(a, b)) * BLOCK_ROWS : 0;
        uint4 x[2];
        read_x(a, 0, b, lane, x);
        add_block<FORMAT, true>(a, block, x, b, b + 1 == first + count, a->group_scale_dev + at,
                                a->group_min_dev ? a->group_min_dev + at : NULL, lane, &c);
    }
    return segment_sum(a, &c);
}

template <int FORMAT>
__global__ void __launch_bounds__(PLAIN_WARPS * 32) linear_plain(const __grid_constant__ struct linear_args a)
{
    __shared__ float4 sums[2][SEGMENTS * 32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int half = blockIdx.x & (a.halves - 1), walkers = gridDim.x >> (a.halves - 1),
              walker = blockIdx.x >> (a.halves - 1);
    int first, count;
    segment_range(&a.plan[half], warp, &first, &count);
    pdl_go();
    pdl_wait();
    for (int tile = walker, buffer = 0, t = 0; tile < a.tiles; tile += walkers, buffer ^= 1, t++) {
        sums[buffer][warp * 32 + lane] = plain_segment<FORMAT>(&a, tile, first, count, lane);
        __syncthreads(); /* the buffer is written again after the next one, which its reducer reaches last */
        if (warp != t % PLAIN_WARPS) continue;
        store_tile(&a, half, tile, 0, lane, reduce_tile(sums[buffer] + lane, 32), read_scales(&a, tile, lane));
    }
}

/* ---- launching ---- */

/* Segments with one more, in this order: each step of four spreads over the processor's quarters (warp % 4) and over pairs.
 * */
static struct segment_plan plan_half(int first, int blocks)
{
    static const int order[SEGMENTS] = {0, 5, 10, 15, 2, 7, 8, 13, 1, 4, 11, 14, 3, 6, 9, 12};
    const int segments = blocks < 2 * SEGMENTS ? FEW_SEGMENTS : SEGMENTS;
    struct segment_plan p = {first, blocks / segments, 0, segments};
    for (int i = 0, n = blocks % segments; n; i++)
        if (order[i] < segments) p.extra |= 1u << order[i], n--;
    return p;
}

static dim3 walkers_grid(const struct linear_args *a, int blocks)
{
    const int walkers = blocks / a->halves;
    return dim3((unsigned)((a->tiles < walkers ? a->tiles : walkers) * a->halves));
}

template <class S> static bool ring_takes(const struct linear_args *a)
{
    for (int h = 0; h < a->halves; h++)
        if (a->plan[h].segments != S::COUNT || a->plan[h].base != S::BLOCKS || (a->plan[h].extra != 0) != S::EXTRA) return false;
    return true;
}

/* False: the matrix is of another shape. */
template <class S> static bool launch_ring(const struct op_context *c, const struct linear_args *a)
{
    static int fits[64];
    if (!ring_takes<S>(a) || !shared_fits((const void *)linear_ring<S>, S::SHARED_BYTES, fits)) return false;
    op_launch(c, linear_ring<S>, walkers_grid(a, c->processors * S::PER_PROCESSOR), dim3(S::WARPS * 32),
              (size_t)S::SHARED_BYTES, *a);
    return true;
}

/* Both have one half. False also where the blocks that go to `beside` would cost the others one more tile each: then a launch of
 * its own takes no longer. */
template <class S, class T>
static bool launch_beside(const struct op_context *c, const struct linear_args *a, const struct linear_args *beside)
{
    static int fits[64];
    const int most = c->processors * S::PER_PROCESSOR, left = most - beside->tiles;
    if (!ring_takes<S>(a) || !ring_takes<T>(beside)) return false;
    if (left <= 0 || (a->tiles - 1) / left != (a->tiles - 1) / most) return false;
    if (!shared_fits((const void *)linear_ring_beside<S, T>, S::SHARED_BYTES, fits)) return false;
    const dim3 grid(walkers_grid(a, left).x + (unsigned)beside->tiles);
    op_launch(c, linear_ring_beside<S, T>, grid, dim3(S::WARPS * 32), (size_t)S::SHARED_BYTES, *a, *beside);
    return true;
}

template <int FORMAT> static bool launch_stream(const struct op_context *c, const struct linear_args *a)
{
    using S = stream_shape<FORMAT>;
    static int fits[64];
    if (c->sm < 90 || block_bytes(FORMAT, a->planes) > S::BLOCK_BYTES) return false;
    if (!shared_fits((const void *)linear_stream<FORMAT>, S::SHARED_BYTES, fits)) return false;
    op_launch(c, linear_stream<FORMAT>, walkers_grid(a, c->processors), dim3(SEGMENTS * 32), (size_t)S::SHARED_BYTES,
              *a);
    return true;
}

template <int FORMAT> static void launch_any_shape(const struct op_context *c, const struct linear_args *a)
{
    if (launch_stream<FORMAT>(c, a)) return;
    op_launch(c, linear_plain<FORMAT>, walkers_grid(a, 2 * c->processors), dim3(PLAIN_WARPS * 32), 0, *a);
}

/* Shapes known to the compiler, in two passes' widths. ring_shape: format, blocks of a segment, extra, tiles of x, segments
 * of a warp, piece, depth, segments. */
template <int FORMAT, int X_TILES>
static bool launch_known_ring(const struct op_context *c, const struct linear_args *a);

template <> bool launch_known_ring<BLOCK_NVFP4, 1>(const struct op_context *c, const struct linear_args *a)
{
    return launch_ring<ring_shape<BLOCK_NVFP4, 5, 0, 1, 1, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_NVFP4, 4, 1, 1, 1, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_NVFP4, 8, 1, 1, 1, 0, 2>>(c, a);
}

template <> bool launch_known_ring<BLOCK_NVFP4, 2>(const struct op_context *c, const struct linear_args *a)
{
    return launch_ring<ring_shape<BLOCK_NVFP4, 5, 0, 2, 1, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_NVFP4, 4, 1, 2, 1, 0, 2>>(c, a);
}

template <> bool launch_known_ring<BLOCK_FP8, 1>(const struct op_context *c, const struct linear_args *a)
{
    return launch_ring<ring_shape<BLOCK_FP8, 5, 0, 1, 2, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 3, 0, 1, 2, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 3, 0, 1, 1, 0, 2, FEW_SEGMENTS>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 4, 1, 1, 1, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 8, 1, 1, 1, 5, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 10, 0, 1, 1, 5, 2>>(c, a);
}

template <> bool launch_known_ring<BLOCK_FP8, 2>(const struct op_context *c, const struct linear_args *a)
{
    return launch_ring<ring_shape<BLOCK_FP8, 5, 0, 2, 1, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 3, 0, 2, 1, 0, 2>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 3, 0, 2, 1, 0, 2, FEW_SEGMENTS>>(c, a) ||
           launch_ring<ring_shape<BLOCK_FP8, 4, 1, 2, 1, 3, 3>>(c, a);
}

template <> bool launch_known_ring<BLOCK_BF16, 1>(const struct op_context *c, const struct linear_args *a)
{
    return launch_ring<ring_shape<BLOCK_BF16, 5, 0, 1, 1, 1, 5>>(c, a) ||
           launch_ring<ring_shape<BLOCK_BF16, 3, 0, 1, 1, 1, 5>>(c, a) ||
           launch_ring<ring_shape<BLOCK_BF16, 3, 0, 1, 1, 1, 5, FEW_SEGMENTS>>(c, a) ||
           launch_ring<ring_shape<BLOCK_BF16, 4, 1, 1, 1, 1, 5>>(c, a) ||
           launch_ring<ring_shape<BLOCK_BF16, 8, 1, 1, 1, 1, 5>>(c, a) ||
           launch_ring<ring_shape<BLOCK_BF16, 10, 0, 1, 1, 1, 5>>(c, a);
}

template <> bool launch_known_ring<BLOCK_BF16, 2>(const struct op_context *c, const struct linear_args *a)
{
    return launch_ring<ring_shape<BLOCK_BF16, 5, 0, 2, 1, 1, 4>>(c, a) ||
           launch_ring<ring_shape<BLOCK_BF16, 3, 0, 2, 1, 1, 4>>(c, a) ||
           launch_ring<ring_shape<BLOCK_BF16, 3, 0, 2, 1, 1, 4, FEW_SEGMENTS>>(c, a);
}

template <> bool launch_known_ring<BLOCK_INT8, 1>(const struct op_context *, const struct linear_args *)
{
    return false;
}
template <> bool launch_known_ring<BLOCK_INT8, 2>(const struct op_context *, const struct linear_args *)
{
    return false;
}

/* One pass: up to 8 rows, 16 where registers hold two tiles of x, 64 where the wide kernel takes the matrix. Returns how
 * many. */
template <int FORMAT> static int run_pass(const struct op_context *c, struct linear_args *a, int rows)
{
    const bool known = c->sm >= 90 && !a->group_log2 && (FORMAT != BLOCK_BF16 || a->planes == 1);
    a->rows = rows < 8 * PASS_ROWS ? rows : 8 * PASS_ROWS;
    if (known && rows > PASS_ROWS && rows <= 2 * PASS_ROWS && launch_known_ring<FORMAT, 2>(c, a)) return a->rows;
    if (known && rows > PASS_ROWS && launch_linear_wide(c, (enum block_format)FORMAT, a)) return a->rows;
    a->rows = rows < PASS_ROWS ? rows : PASS_ROWS;
    if (!known || !launch_known_ring<FORMAT, 1>(c, a)) launch_any_shape<FORMAT>(c, a);
    return a->rows;
}

/* Of the matrix and of x; rows and where the sums go are the caller's. */
static struct linear_args matrix_args(const struct device_matrix *m, const void *act, int halves)
{
    struct linear_args a = {};
    const int first_half = halves == 2 ? (m->blocks + 1) / 2 : m->blocks;
    a.halves = halves;
    a.blocks_dev = m->blocks_dev, a.blocks = m->blocks, a.planes = m->planes;
    a.row_scale_dev = m->row_scale_dev;
    for (int g = m->group; g > 1; g /= 2) a.group_log2++;
    a.groups = block_groups(m->blocks, m->group), a.group_scale_dev = m->group_scale_dev,
    a.group_min_dev = m->mins ? m->group_min_dev : NULL;
    a.x = (const uint8_t *)act, a.x_pitch = (size_t)m->blocks * 128;
    a.plan[0] = plan_half(0, first_half);
    a.plan[1] = plan_half(first_half, m->blocks - first_half);
    return a;
}

/* The sums themselves are the output. */
static struct linear_args sums_args(const struct device_matrix *m, const void *act, float *y, float *y2, size_t pitch)
{
    struct linear_args a = matrix_args(m, act, m->halves);
    a.outputs = m->rows;
    a.tiles = (m->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    a.y[0] = y, a.y[1] = y2, a.y_pitch = pitch;
    return a;
}

static void run_passes(const struct op_context *c, enum block_format format, int rows, struct linear_args *a)
{
    static int (*const run[BLOCK_FORMATS])(const struct op_context *, struct linear_args *, int) = {
        run_pass<BLOCK_NVFP4>, run_pass<BLOCK_FP8>, run_pass<BLOCK_BF16>, run_pass<BLOCK_INT8>};
    while (rows > 0) {
        const int pass = run[format](c, a, rows);
        a->x += pass * a->x_pitch;
        for (int h = 0; h < 2; h++) a->y[h] += a->y[h] ? pass * a->y_pitch : 0;
        a->act += a->act ? pass * a->act_pitch : 0;
        rows -= pass;
    }
}

void op_linear_decode(const struct op_context *c, const struct device_matrix *m, const void *act, int rows, float *y,
                      float *y2, size_t pitch)
{
    struct linear_args a = sums_args(m, act, y, y2, pitch);
    run_passes(c, m->format, rows, &a);
}

bool op_linear_decode_beside(const struct op_context *c, const struct device_matrix *m, const struct device_matrix *beside,
                             const void *act, int rows, float *y, float *y_beside, size_t pitch)
{
    if (c->sm < 90 || rows > PASS_ROWS || m->halves != 1 || beside->halves != 1) return false;
    if (m->format != BLOCK_FP8 || m->group || beside->format != BLOCK_BF16 || beside->planes != 1) return false;
    struct linear_args a = sums_args(m, act, y, NULL, pitch), b = sums_args(beside, act, y_beside, NULL, pitch);
    a.rows = b.rows = rows;
    return launch_beside<ring_shape<BLOCK_FP8, 5, 0, 1, 2, 0, 2>, ring_shape<BLOCK_BF16, 5, 0, 1, 2, 1, 5>>(c, &a, &b);
}

void op_linear_decode_swiglu(const struct op_context *c, const struct device_matrix *m, const void *act,
                             struct kern_split split, void *y_act)
{
    struct linear_args a = matrix_args(m, act, 1);
    a.outputs = m->rows / 2;
    a.tiles = act_blocks(a.outputs) * ACT_BLOCK / 8; /* those of padding write the zeros behind the last column */
    a.act = (uint16_t *)y_act, a.act_pitch = (size_t)act_blocks(a.outputs) * ACT_BLOCK;
    run_passes(c, m->format, split.decode, &a);
}
