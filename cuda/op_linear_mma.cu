/* op_linear_mma: prefill products by mma.sync, for every format and every card from sm_80 on.
 *
 * A block of 8 warps makes 128 matrix rows x 128 tokens; a warp 32 rows x 64 tokens, so that decoded weights meet 8
 * token tiles and token fragments 2 row tiles. Steps of 64 columns (of one plane) go through a ring of stages filled
 * by cp.async; weights are decoded from shared memory in fragment order, tokens are read by ldmatrix from the act's
 * swizzled tile.
 *
 * Group scales (blocks.cuh): a group's chain goes to sums of its own. A group narrower than a block takes the
 * instructions of a whole block with the other lanes' weights zeroed, which is plain rather than fast. */
#include "op_linear_prefill.cuh"

enum { TOKENS = 128, THREADS = 256, STAGES = 3, WARP_TOKEN_TILES = 8, WARP_ROW_TILES = 2, X_BYTES = TOKENS * 128 };

#if __CUDA_ARCH__ >= 800

__device__ __forceinline__ void copy_16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Where a block works. */
struct place {
    int row_tile, token_first;
    int warp_row_tile, warp_token; /* the warp's first tile of 16 rows, first token, within the block's */
    int lane;
};

/* Step: a plane of a block of columns. */
template <int FORMAT>
__device__ __forceinline__ void load_step(const struct prefill_job *job, const struct place *p, uint32_t stage,
                                          int step)
{
    constexpr int n_bytes = FORMAT == BLOCK_NVFP4  ? BLOCK_NVFP4_BYTES
                            : FORMAT == BLOCK_BF16 ? BLOCK_PLANE_BYTES
                                                   : BLOCK_FP8_BYTES;
    constexpr int chunks = n_bytes / 16;
    const int k = step / job->planes;
    const uint8_t *x = job->x + ((size_t)(p->token_first / ACT_TILE_ROWS) * job->blocks + k) * ACT_TILE_BYTES +
                       p->token_first % ACT_TILE_ROWS * 128;
#pragma unroll
    for (int i = threadIdx.x; i < X_BYTES / 16; i += THREADS) copy_16(stage + i * 16, x + i * 16);
    const size_t tile_bytes = (size_t)job->blocks * job->planes * n_bytes;
    const uint8_t *w = job->weights + (size_t)p->row_tile * PREFILL_ROW_TILES * tile_bytes + (size_t)step * n_bytes;
#pragma unroll
    for (int i = threadIdx.x; i < PREFILL_ROW_TILES * chunks; i += THREADS)
        copy_16(stage + X_BYTES + i * 16, w + i / chunks * tile_bytes + i % chunks * 16);
}

/* Fragments of two tiles of 8 tokens for instruction j: b[0], b[1] of the first, b[2], b[3] of the second. */
__device__ __forceinline__ void read_tokens(uint32_t tile, int token_first, int j, int lane, uint32_t b[4])
{
    const int token = token_first + (lane >> 4) * 8 + (lane & 7), chunk = 2 * j + (lane >> 3 & 1);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(tile + token * 128 + ((chunk ^ (token & 7)) << 4))
                 : "memory");
}

typedef float warp_sums[WARP_ROW_TILES][WARP_TOKEN_TILES][4];
typedef float token_sums[WARP_TOKEN_TILES][4];

/* d += one block. keep: this lane's mask of the weights. MINS: x_sums gets the sum of x over the kept columns, the
 * same in every row. */
template <bool MINS>
__device__ __forceinline__ void multiply(warp_sums &d, token_sums &x_sums, const uint32_t (&a)[WARP_ROW_TILES][4][4],
                                         uint32_t keep, uint32_t tile, const struct place *p)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int n = 0; n < WARP_TOKEN_TILES; n += 2) {
            uint32_t b[4];
            read_tokens(tile, p->warp_token + n * 8, j, p->lane, b);
#pragma unroll
            for (int t = 0; t < WARP_ROW_TILES; t++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    mma_bf16(d[t][n + i], a[t][j][0] & keep, a[t][j][1] & keep, a[t][j][2] & keep, a[t][j][3] & keep,
                             b[2 * i], b[2 * i + 1]);
            if (MINS) {
                const uint32_t one = 0x3f803f80u & keep;
#pragma unroll
                for (int i = 0; i < 2; i++) mma_bf16(x_sums[n + i], one, one, one, one, b[2 * i], b[2 * i + 1]);
            }
        }
}

/* acc += t scale + x_sums min, group `index` of the warp's rows. */
template <bool MINS>
__device__ __forceinline__ void add_group(warp_sums &acc, const warp_sums &sums, const token_sums &x_sums,
                                          const struct prefill_job *job, const struct place *p, int index)
{
#pragma unroll
    for (int t = 0; t < WARP_ROW_TILES; t++) {
        const size_t tile = (size_t)p->row_tile * PREFILL_ROW_TILES + p->warp_row_tile + t;
        const size_t at = (tile * job->groups + index) * BLOCK_ROWS + (p->lane >> 2);
        const float scale[2] = {__ldg(job->group_scale + at), __ldg(job->group_scale + at + 8)};
        const float min[2] = {MINS ? __ldg(job->group_min + at) : 0, MINS ? __ldg(job->group_min + at + 8) : 0};
#pragma unroll
        for (int n = 0; n < WARP_TOKEN_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[t][n][i] = fmaf(sums[t][n][i], scale[i >> 1], acc[t][n][i]);
                if (MINS) acc[t][n][i] = fmaf(x_sums[n][i], min[i >> 1], acc[t][n][i]);
            }
    }
}

__device__ __forceinline__ void clear_sums(warp_sums &sums, token_sums &x_sums)
{
#pragma unroll
    for (int n = 0; n < WARP_TOKEN_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x_sums[n][i] = 0;
#pragma unroll
            for (int t = 0; t < WARP_ROW_TILES; t++) sums[t][n][i] = 0;
        }
}

template <bool MINS>
__device__ __forceinline__ void
multiply_grouped(warp_sums &acc, warp_sums &sums, token_sums &x_sums, const struct prefill_job *job,
                 const uint32_t (&a)[WARP_ROW_TILES][4][4], uint32_t tile, const struct place *p, int k)
{
    const int narrow = job->group < BLOCK_COLS, pieces = narrow ? BLOCK_COLS / job->group : 1,
              quarters = job->group / 16;
    const int first = k * BLOCK_COLS % job->group, end = first + BLOCK_COLS;
#pragma unroll 1
    for (int i = 0; i < pieces; i++) {
        const uint32_t keep = !narrow || (p->lane & 3) / quarters == i ? 0xffffffffu : 0;
        if (narrow || first == 0) clear_sums(sums, x_sums);
        multiply<MINS>(sums, x_sums, a, keep, tile, p);
        if (narrow || end == job->group || k + 1 == job->blocks)
            add_group<MINS>(acc, sums, x_sums, job, p, narrow ? k * pieces + i : k * BLOCK_COLS / job->group);
    }
}

__device__ __forceinline__ void write_rows(const warp_sums &acc, const float (&scale)[WARP_ROW_TILES][2],
                                           const struct prefill_job *job, const struct place *p)
{
#pragma unroll
    for (int t = 0; t < WARP_ROW_TILES; t++)
#pragma unroll
        for (int n = 0; n < WARP_TOKEN_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = p->row_tile * PREFILL_TILE_ROWS + (p->warp_row_tile + t) * BLOCK_ROWS + (p->lane >> 2) +
                                (i >> 1) * 8;
                const int token = p->token_first + p->warp_token + n * 8 + 2 * (p->lane & 3) + (i & 1);
                if (row < job->out_rows && token < job->rows)
                    job->y[(size_t)token * job->pitch + row] = acc[t][n][i] * scale[t][i >> 1];
            }
}

/* The block's output is one block of columns of an act; tile: shared memory that nobody reads any more. */
__device__ __forceinline__ void write_swiglu(const warp_sums &acc, const float (&scale)[WARP_ROW_TILES][2],
                                             const struct prefill_job *job, const struct place *p, char *tile)
{
    const int valid = job->out_rows / 2 - p->row_tile * BLOCK_COLS;
#pragma unroll
    for (int t = 0; t < WARP_ROW_TILES; t++)
#pragma unroll
        for (int n = 0; n < WARP_TOKEN_TILES; n++)
            prefill_stage_swiglu(tile, p->warp_token + n * 8, 8 * (p->warp_row_tile + t), valid, p->lane, acc[t][n],
                                 scale[t][0], scale[t][1]);
    __syncthreads();
    uint8_t *to = job->y_act +
                  ((size_t)(p->token_first / ACT_TILE_ROWS) * job->row_tiles + p->row_tile) * ACT_TILE_BYTES +
                  p->token_first % ACT_TILE_ROWS * 128;
    const int tokens = min(TOKENS, job->rows - p->token_first);
    for (int i = threadIdx.x; i < tokens * 8; i += THREADS) ((uint4 *)to)[i] = ((const uint4 *)tile)[i];
}

#endif /* __CUDA_ARCH__ >= 800 */

enum group_kind { UNGROUPED, GROUPED, GROUPED_MINS };

template <int FORMAT, int KIND>
static __global__ void __launch_bounds__(THREADS, KIND == UNGROUPED ? 2 : 1)
    prefill_mma(const __grid_constant__ struct prefill_job job)
{
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) char shared[];
    constexpr int n_bytes = FORMAT == BLOCK_NVFP4  ? BLOCK_NVFP4_BYTES
                            : FORMAT == BLOCK_BF16 ? BLOCK_PLANE_BYTES
                                                   : BLOCK_FP8_BYTES;
    constexpr int stage_bytes = X_BYTES + PREFILL_ROW_TILES * n_bytes;
    const int warp = threadIdx.x >> 5;
    struct place p;
    p.row_tile = blockIdx.y;
    p.token_first = blockIdx.x * TOKENS;
    p.warp_row_tile = (warp >> 1) * WARP_ROW_TILES;
    p.warp_token = (warp & 1) * WARP_TOKEN_TILES * 8;
    p.lane = threadIdx.x & 31;
    pdl_go();
    pdl_wait();

    const uint32_t ring = shared_address(shared);
    const int steps = job.blocks * job.planes;
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < steps) load_step<FORMAT>(&job, &p, ring + i * stage_bytes, i);
        copies_commit();
    }
    warp_sums acc, sums;
    token_sums x_sums;
    clear_sums(acc, x_sums);
    clear_sums(sums, x_sums);
    for (int step = 0; step < steps; step++) {
        copies_wait<STAGES - 2>();
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps) load_step<FORMAT>(&job, &p, ring + next % STAGES * stage_bytes, next);
        copies_commit();
        const int stage = step % STAGES * stage_bytes;
        const uint8_t *weights = (const uint8_t *)shared + stage + X_BYTES + p.warp_row_tile * n_bytes;
        uint32_t a[WARP_ROW_TILES][4][4];
#pragma unroll
        for (int t = 0; t < WARP_ROW_TILES; t++) block_decode<FORMAT>(weights + t * n_bytes, p.lane, a[t]);
        if constexpr (KIND == UNGROUPED)
            multiply<false>(acc, x_sums, a, 0xffffffffu, ring + stage, &p);
        else
            multiply_grouped<KIND == GROUPED_MINS>(acc, sums, x_sums, &job, a, ring + stage, &p, step);
    }
    __syncthreads();
    float scale[WARP_ROW_TILES][2];
    for (int t = 0; t < WARP_ROW_TILES; t++)
        for (int h = 0; h < 2; h++)
            scale[t][h] = job.row_scale[p.row_tile * PREFILL_TILE_ROWS + (p.warp_row_tile + t) * BLOCK_ROWS +
                                        (p.lane >> 2) + 8 * h];
    if (job.y_act)
        write_swiglu(acc, scale, &job, &p, shared);
    else
        write_rows(acc, scale, &job, &p);
#else
    (void)job;
    __trap(); /* kern_cuda_open refuses cards below sm_80 */
#endif
}

void op_linear_mma_launch(const struct op_context *c, const struct device_matrix *m, const struct prefill_job *job)
{
    void (*kernel)(const struct prefill_job) = NULL;
    if (m->format == BLOCK_NVFP4)
        kernel = prefill_mma<BLOCK_NVFP4, UNGROUPED>;
    else if (m->format == BLOCK_BF16)
        kernel = prefill_mma<BLOCK_BF16, UNGROUPED>;
    else if (m->format == BLOCK_FP8)
        kernel = m->group ? prefill_mma<BLOCK_FP8, GROUPED> : prefill_mma<BLOCK_FP8, UNGROUPED>;
    else
        kernel = m->mins ? prefill_mma<BLOCK_INT8, GROUPED_MINS> : prefill_mma<BLOCK_INT8, GROUPED>;
    const size_t shared_bytes = (size_t)STAGES * (X_BYTES + PREFILL_ROW_TILES * block_bytes(m->format, 1));
    cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    op_launch(c, kernel, dim3((job->rows + TOKENS - 1) / TOKENS, job->row_tiles), dim3(THREADS), shared_bytes, *job);
}
