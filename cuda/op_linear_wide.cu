/* op_linear_wide: decode products of 9 to 64 rows, as many jobs side by side give, in the tree of op_linear_decode.cu: the
 * same bits.
 *
 * With few rows, a warp keeps x of its segment of the columns in registers and tiles pass by. With more x no longer fits, so
 * here columns pass by: a warp owns a tile of 16 rows, and a block of threads takes its tiles (those of all warps) once
 * through all columns, in steps of two blocks. A step's x, of all rows, and every warp's blocks travel together through a
 * ring in shared memory that one more warp fills. A segment's chains are added to the sum when the segment ends, so segments
 * are added in order without meeting other warps. A decoded block serves all rows. */
#include "op_linear_decode.cuh"

/* 12 warps with the filling one: 168 registers a thread. The last 16 bytes of a row of x let eight lanes read banks of their
 * own. */
enum { WIDE_STEP = 2, WIDE_MAX_WARPS = 11, X_ROW_BYTES = WIDE_STEP * 128 + 16 };

template <int FORMAT_, int X_TILES_> struct wide_shape {
    static constexpr int FORMAT = FORMAT_, X_TILES = X_TILES_;
    static constexpr int BYTES = FORMAT == BLOCK_NVFP4  ? BLOCK_NVFP4_BYTES
                                 : FORMAT == BLOCK_BF16 ? BLOCK_PLANE_BYTES
                                                        : BLOCK_FP8_BYTES;
    static constexpr int X_BYTES = (X_TILES * PASS_ROWS * X_ROW_BYTES + 127) / 128 * 128;
    static constexpr int DEPTH = FORMAT == BLOCK_BF16 ? 3 : X_TILES > 4 ? 4 : 5;
    static constexpr int STAGE_BYTES = X_BYTES + WIDE_MAX_WARPS * WIDE_STEP * BYTES;
    static constexpr int SHARED_BYTES = DEPTH * STAGE_BYTES;
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void async_copy16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}

/* Arrives at the barrier when this thread's copies so far have. */
__device__ __forceinline__ void async_copy_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}

/* Where a block of threads is: pass after pass over its tiles, step after step over the columns of its half. */
struct wide_place {
    int pass, block; /* block: the step's first */
};

/* What one block of threads does: columns [first, end), tiles walker + i * walkers, warps of them a pass. */
struct wide_work {
    int first, end, walker, walkers, n_tiles, warps, passes;
};

__device__ __forceinline__ int wide_tiles_of_pass(const struct wide_work *w, int pass)
{
    const int left = w->n_tiles - pass * w->warps;
    return left < w->warps ? left : w->warps;
}

/* Lanes of the filling warp: a tile's blocks each. */
template <class S>
__device__ __forceinline__ void wide_fill_blocks(const struct linear_args *a, const struct wide_work *w,
                                                 struct wide_place p, uint32_t stage, uint32_t bar, int lane)
{
    const int n = w->end - p.block < WIDE_STEP ? w->end - p.block : WIDE_STEP, tiles = wide_tiles_of_pass(w, p.pass);
    if (lane == 0) mbar_expect(bar, tiles * n * S::BYTES);
    __syncwarp();
    if (lane >= tiles) return;
    const size_t tile = w->walker + (size_t)(p.pass * w->warps + lane) * w->walkers;
    bulk_load(stage + S::X_BYTES + lane * (WIDE_STEP * S::BYTES),
              a->blocks_dev + (tile * a->blocks + p.block) * S::BYTES, n * S::BYTES, bar);
}

/* And rows of x, two an instruction. (A bulk copy for each would cost more time than its bytes.) */
template <class S>
__device__ __forceinline__ void wide_fill_x(const struct linear_args *a, const struct wide_work *w, struct wide_place p,
                                            uint32_t stage, uint32_t bar, int lane)
{
    const int first = lane >> 4, at = (lane & 15) * 16;
    const uint8_t *from = a->x + first * a->x_pitch + (size_t)p.block * 128 + at;
    const bool inside = at < (w->end - p.block) * 128; /* of the last step, which may be one block */
    EACH(i, S::X_TILES * PASS_ROWS / 2)
    {
        if (inside && first + 2 * i < a->rows) async_copy16(stage + (first + 2 * i) * X_ROW_BYTES + at, from);
        from += 2 * a->x_pitch;
    }
    async_copy_arrive(bar);
}

__device__ __forceinline__ struct wide_place wide_next(const struct wide_work *w, struct wide_place p)
{
    p.block += WIDE_STEP;
    if (p.block >= w->end) p.block = w->first, p.pass++;
    return p;
}

template <class S>
__device__ __forceinline__ void wide_fill(const struct linear_args *a, const struct wide_work *w, uint32_t stages,
                                          uint32_t full, uint32_t empty, int lane)
{
    struct wide_place p = {0, w->first}, q = p;
    for (int i = 0; i < S::DEPTH && p.pass < w->passes; i++, p = wide_next(w, p))
        wide_fill_blocks<S>(a, w, p, stages + i * S::STAGE_BYTES, full + 8 * i, lane);
    pdl_wait();
    for (int i = 0; i < S::DEPTH && q.pass < w->passes; i++, q = wide_next(w, q))
        wide_fill_x<S>(a, w, q, stages + i * S::STAGE_BYTES, full + 8 * i, lane);
    for (int slot = 0, parity = 0; p.pass < w->passes; p = wide_next(w, p)) {
        mbar_wait(empty + 8 * slot, parity);
        wide_fill_blocks<S>(a, w, p, stages + slot * S::STAGE_BYTES, full + 8 * slot, lane);
        wide_fill_x<S>(a, w, p, stages + slot * S::STAGE_BYTES, full + 8 * slot, lane);
        if (++slot == S::DEPTH) slot = 0, parity ^= 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory"); /* before the thread ends */
}

template <class S> struct wide_sums {
    float even[S::X_TILES][4], odd[S::X_TILES][4], sum[S::X_TILES][4];
};

/* The end of a segment: its chains join the sum. */
template <class S> __device__ __forceinline__ void wide_end_segment(struct wide_sums<S> *s)
{
    EACH(n, S::X_TILES)
    EACH(i, 4)
    {
        s->sum[n][i] += s->even[n][i] + s->odd[n][i];
        s->even[n][i] = s->odd[n][i] = 0;
    }
}

template <class S>
__device__ __forceinline__ void wide_block(const uint8_t *block, const uint8_t *x_rows, int lane,
                                           struct wide_sums<S> *s)
{
    uint32_t w[4][4];
    block_decode<S::FORMAT>(block, lane, w);
    EACH(n, S::X_TILES)
    {
        const uint4 *p = (const uint4 *)(x_rows + (n * PASS_ROWS + (lane >> 2)) * X_ROW_BYTES + (lane & 3) * 32);
        const uint4 x[2] = {p[0], p[1]};
        multiply_block(w, x, s->even[n], s->odd[n]);
    }
}
#endif

template <class S>
__global__ void __launch_bounds__((WIDE_MAX_WARPS + 1) * 32, 1)
    linear_wide(const __grid_constant__ struct linear_args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t bars[2 * S::DEPTH];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = blockIdx.x & (a.halves - 1);
    const struct segment_plan plan = a.plan[half];
    struct wide_work w;
    w.first = plan.first, w.end = plan.first + plan.segments * plan.base + __popc(plan.extra);
    w.walker = blockIdx.x >> (a.halves - 1), w.walkers = gridDim.x >> (a.halves - 1);
    w.n_tiles = w.walker < a.tiles ? (a.tiles - 1 - w.walker) / w.walkers + 1 : 0;
    w.warps = (blockDim.x >> 5) - 1;
    w.passes = w.end > w.first ? (w.n_tiles + w.warps - 1) / w.warps : 0;
    const uint32_t full = shared_address(bars), empty = full + 8 * S::DEPTH;
    if (threadIdx.x == 0) {
        EACH(i, S::DEPTH) mbar_init(full + 8 * i, 1 + 32), mbar_init(empty + 8 * i, w.warps);
        mbar_init_fence();
    }
    __syncthreads();
    pdl_go();
    if (warp == w.warps) {
        wide_fill<S>(&a, &w, shared_address(shared), full, empty, lane);
        return;
    }
    pdl_wait();
    int slot = 0;
    uint32_t parity = 0;
    for (int pass = 0; pass < w.passes; pass++) {
        const bool idle = warp >= wide_tiles_of_pass(&w, pass);
        const int tile = w.walker + (pass * w.warps + warp) * w.walkers;
        const float2 scale = idle ? make_float2(0, 0) : read_scales(&a, tile, lane);
        struct wide_sums<S> s = {
        };
        int segment = 0, left = plan.base + (int)(plan.extra & 1); /* blocks of the segment that are still to come */
        for (int block = w.first; block < w.end; block += WIDE_STEP) {
            mbar_wait(full + 8 * slot, parity);
            const uint8_t *stage = shared + slot * S::STAGE_BYTES;
            EACH(i, WIDE_STEP)
            {
                if (idle || block + i >= w.end) continue;
                wide_block<S>(stage + S::X_BYTES + (warp * WIDE_STEP + i) * S::BYTES, stage + i * 128, lane, &s);
                if (--left > 0) continue;
                wide_end_segment<S>(&s);
                while (left <= 0 && ++segment < plan.segments) left = plan.base + (int)(plan.extra >> segment & 1);
            }
            __syncwarp();
            if (lane == 0) mbar_arrive(empty + 8 * slot);
            if (++slot == S::DEPTH) slot = 0, parity ^= 1;
        }
        if (idle) continue;
        EACH(n, S::X_TILES)
        store_tile(&a, half, tile, n * PASS_ROWS, lane, make_float4(s.sum[n][0], s.sum[n][1], s.sum[n][2], s.sum[n][3]),
                   scale);
    }
#endif
}

template <class S> static bool launch_wide(const struct op_context *c, const struct linear_args *a)
{
    static int fits[64];
    if (!shared_fits((const void *)linear_wide<S>, S::SHARED_BYTES, fits)) return false;
    const int walkers = c->processors / a->halves, n = a->tiles < walkers ? a->tiles : walkers,
              tiles = (a->tiles + n - 1) / n;
    const int passes = (tiles + WIDE_MAX_WARPS - 1) / WIDE_MAX_WARPS, warps = (tiles + passes - 1) / passes;
    op_launch(c, linear_wide<S>, dim3((unsigned)(n * a->halves)), dim3((warps + 1) * 32), (size_t)S::SHARED_BYTES, *a);
    return true;
}

template <int FORMAT> static bool launch_wide_format(const struct op_context *c, const struct linear_args *a)
{
    if (a->rows <= 2 * PASS_ROWS) return launch_wide<wide_shape<FORMAT, 2>>(c, a);
    return a->rows <= 4 * PASS_ROWS ? launch_wide<wide_shape<FORMAT, 4>>(c, a)
                                    : launch_wide<wide_shape<FORMAT, 8>>(c, a);
}

bool launch_linear_wide(const struct op_context *c, enum block_format format, const struct linear_args *a)
{
    if (c->sm < 90 || a->group_log2) return false;
    switch (format) {
    case BLOCK_NVFP4: return launch_wide_format<BLOCK_NVFP4>(c, a);
    case BLOCK_FP8: return launch_wide_format<BLOCK_FP8>(c, a);
    case BLOCK_BF16: return a->planes == 1 && launch_wide_format<BLOCK_BF16>(c, a);
    default: return false;
    }
}
