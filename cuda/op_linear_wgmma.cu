/* op_linear_wgmma: prefill products on sm_90a.
 *
 * Persistent clusters of two thread blocks, one on each multiprocessor, of two consumer warpgroups and a producer. A
 * cluster works off units of 256 matrix rows, 128 a block, x 256, 128 or 64 tokens: a consumer warpgroup holds 64 rows
 * x all tokens of the unit in registers. Weights are wgmma's A operand and come from registers: each warp decodes its
 * own 16-row block of the next 64 columns while the tensor cores work on these. Tokens are the B operand; a tile of
 * the act is copied as it lies (act.cuh), half of it by each of the two blocks for both, which halves what comes out
 * of the L2 cache. One ring of stages serves all units of a block, so the next unit is under way while this one is
 * written.
 *
 * An output is one chain over its columns (with group scales: one a group), whatever the unit's width, so widths are
 * chosen for speed: the units that would fill the last round of multiprocessors only in part are cut into narrower
 * ones. */
#include "op_linear_prefill.cuh"

enum {
    CLUSTER = 2,
    CONSUMER_WARPS = 8,
    PRODUCER_WARPS = 4,
    THREADS = (CONSUMER_WARPS + PRODUCER_WARPS) * 32,
    MAX_WIDTH = 256,
    GROUPED_WIDTH = 128, /* two sets of sums must fit into registers */
    MIN_WIDTH = 64,
    MAX_STAGES = 12,
    SHARED_BYTES = 227 * 1024,
    STATIC_SHARED_BYTES = 2048, /* barriers, and what aligns the ring */
    TOKENS_TOGETHER = 2048      /* all their units come before the next tokens': their act stays in the L2 cache */
};

/* How the product is cut. The first wide_units units have the full width, the others are `parts` pieces of what would
 * be one. */
struct unit_plan {
    int width, tiles; /* tokens of a full unit, and how many of them cover all rows */
    int wide_units, parts, units;
};

struct unit {
    int row_tile;           /* of this block; may lie behind the last one, where the number of tiles is odd */
    int token_first, width; /* width 0: no tokens here */
};

static __host__ __device__ int min_int(int a, int b) { return a < b ? a : b; }

static struct unit_plan plan_units(int rows, int row_tiles, int max_width, int clusters)
{
    struct unit_plan p = {};
    p.width = max_width;
    while (p.width > MIN_WIDTH && p.width / 2 >= rows) p.width /= 2;
    p.tiles = (rows + p.width - 1) / p.width;
    const int units = (row_tiles + CLUSTER - 1) / CLUSTER * p.tiles, rest = units % clusters;
    p.parts = 1;
    while (rest && p.width / p.parts > MIN_WIDTH && rest * p.parts * 2 <= clusters) p.parts *= 2;
    p.wide_units = p.parts > 1 ? units - rest : units;
    p.units = p.wide_units + (units - p.wide_units) * p.parts;
    return p;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static __device__ struct unit unit_at(const struct unit_plan *p, const struct prefill_job *job, int rank, int u)
{
    struct unit out;
    int part = 0;
    out.width = p->width;
    if (u >= p->wide_units) {
        part = (u - p->wide_units) % p->parts;
        u = p->wide_units + (u - p->wide_units) / p->parts;
        out.width /= p->parts;
    }
    const int together = TOKENS_TOGETHER / p->width, per_group = together * ((job->row_tiles + CLUSTER - 1) / CLUSTER);
    const int group = u / per_group, tiles = min_int(together, p->tiles - group * together);
    u -= group * per_group;
    out.row_tile = u / tiles * CLUSTER + rank;
    out.token_first = (group * together + u % tiles) * p->width + part * out.width;
    const int tokens = job->rows - out.token_first;
    while (out.width > MIN_WIDTH && out.width / 2 >= tokens) out.width /= 2;
    if (tokens <= 0) out.width = 0;
    return out;
}

/* ---- wgmma ---- */

#define SUMS_0                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"                                                            \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_32                                                                                                        \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"                                                 \
    ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SUMS_64                                                                                                        \
    ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"                                                 \
    ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SUMS_96                                                                                                        \
    ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"                                     \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define IO4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define IO32(i) IO4(i), IO4(i + 4), IO4(i + 8), IO4(i + 12), IO4(i + 16), IO4(i + 20), IO4(i + 24), IO4(i + 28)
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 "

/* d += a b: 64 x 16 by 16 x WIDTH, a in registers. */
template <int WIDTH> __device__ __forceinline__ void wgmma_step(float (&d)[WIDTH / 2], const uint32_t *a, uint64_t b)
{
    if constexpr (WIDTH == 256)
        asm volatile(WGMMA("256") "{" SUMS_0 SUMS_32 SUMS_64 SUMS_96 "},{%128,%129,%130,%131},%132,1,1,1,0;"
                     : IO32(0), IO32(32), IO32(64), IO32(96)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else if constexpr (WIDTH == 128)
        asm volatile(WGMMA("128") "{" SUMS_0 SUMS_32 "},{%64,%65,%66,%67},%68,1,1,1,0;"
                     : IO32(0), IO32(32)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile(WGMMA("64") "{" SUMS_0 "},{%32,%33,%34,%35},%36,1,1,1,0;"
                     : IO32(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

/* A K-major tile of 128-byte rows with the 128-byte swizzle, 1024 bytes from one group of 8 rows to the next. */
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

/* ---- the cluster ---- */

__device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The barrier at this place of the cluster's block `rank`. */
__device__ __forceinline__ void mbar_arrive_at(uint32_t bar, uint32_t rank)
{
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there,%0,%1;\nmbarrier.arrive.shared::cluster.b64 "
                 "_,[there];\n}" ::"r"(bar),
                 "r"(rank)
                 : "memory");
}

/* To the same place of both blocks, each of whose barriers hears of it. */
__device__ __forceinline__ void bulk_load_both(uint32_t to, const void *from, uint32_t n_bytes, uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0],[%1],%2,[%3],%4;" ::
            "r"(to),
        "l"(from), "r"(n_bytes), "r"(bar), "h"((uint16_t)((1 << CLUSTER) - 1))
        : "memory");
}

/* ---- the ring ---- */

struct ring {
    uint32_t full, empty; /* barriers */
    uint32_t x;           /* tiles */
    const uint8_t *weights;
    uint32_t x_bytes; /* of a stage */
    int stages;
    int stage;
    uint32_t parity;
};

__device__ __forceinline__ void ring_next(struct ring *r)
{
    if (++r->stage == r->stages) {
        r->stage = 0;
        r->parity ^= 1;
    }
}

/* One lane of each producer warp fills the ring: a quarter of the weights, the first one also this block's half of the
 * tokens. */
enum { TILES_PER_PRODUCER = PREFILL_ROW_TILES / PRODUCER_WARPS };

/* Step: a plane of a block of columns. */
__device__ static void load_weights(const struct prefill_job *job, const struct ring *r, int producer, struct unit u,
                                    int step, uint32_t n_bytes)
{
    const int row_tile = min_int(u.row_tile, job->row_tiles - 1), first = producer * TILES_PER_PRODUCER;
    const size_t tile_bytes = (size_t)job->blocks * job->planes * n_bytes;
    const uint8_t *from =
        job->weights + (size_t)(row_tile * PREFILL_ROW_TILES + first) * tile_bytes + (size_t)step * n_bytes;
    const uint32_t to = shared_address(r->weights) + (r->stage * PREFILL_ROW_TILES + first) * n_bytes;
    if (producer == 0) mbar_expect(r->full + 8 * r->stage, PREFILL_ROW_TILES * n_bytes + u.width * 128);
    for (int i = 0; i < TILES_PER_PRODUCER; i++)
        bulk_load(to + i * n_bytes, from + i * tile_bytes, n_bytes, r->full + 8 * r->stage);
}

__device__ static void load_x(const struct prefill_job *job, const struct ring *r, int producer, int rank,
                              struct unit u, int step)
{
    if (producer) return;
    const uint32_t half = u.width * 128 / CLUSTER;
    const int k = job->planes == 1 ? step : step / job->planes;
    const uint8_t *tile = job->x + ((size_t)(u.token_first / ACT_TILE_ROWS) * job->blocks + k) * ACT_TILE_BYTES;
    bulk_load_both(r->x + r->stage * r->x_bytes + rank * half, tile + u.token_first % ACT_TILE_ROWS * 128 + rank * half,
                   half, r->full + 8 * r->stage);
}

/* Of the first unit the weights come before pdl_wait, as many as there are stages. */
__device__ static void produce(const struct prefill_job *job, const struct unit_plan *plan, struct ring *r,
                               int producer, int rank, uint32_t n_bytes)
{
    const int steps = job->blocks * job->planes;
    bool waited = false;
    for (int i = blockIdx.x / CLUSTER; i < plan->units; i += gridDim.x / CLUSTER) {
        const struct unit u = unit_at(plan, job, rank, i);
        if (!u.width) continue;
        int k = 0;
        if (!waited) {
            const int ahead = min_int(r->stages, steps);
            for (r->stage = 0; r->stage < ahead; r->stage++) load_weights(job, r, producer, u, r->stage, n_bytes);
            pdl_wait();
            r->stage = 0;
            for (; k < ahead; k++, ring_next(r)) load_x(job, r, producer, rank, u, k);
            waited = true;
        }
#pragma unroll 1
        for (; k < steps; k++, ring_next(r)) {
            mbar_wait(r->empty + 8 * r->stage, r->parity);
            load_weights(job, r, producer, u, k, n_bytes);
            load_x(job, r, producer, rank, u, k);
        }
    }
    if (!waited) pdl_wait();
}

/* ---- sums ---- */

struct consumer {
    int warp; /* of all consumers' */
    int lane;
};

/* Both blocks write into this one's tile. */
__device__ __forceinline__ void release_stage(const struct ring *r, int stage, int lane)
{
    if (lane < CLUSTER) mbar_arrive_at(r->empty + 8 * stage, lane);
}

template <int FORMAT>
__device__ __forceinline__ void read_stage(const struct ring *r, struct consumer w, struct block_words<FORMAT> *words)
{
    const int n_bytes = block_bytes(FORMAT, 1);
    mbar_wait(r->full + 8 * r->stage, r->parity);
    block_read<FORMAT, false>(r->weights + (r->stage * PREFILL_ROW_TILES + w.warp) * n_bytes, w.lane, words);
}

template <int FORMAT>
__device__ __forceinline__ void decode_stage(const struct ring *r, struct consumer w, uint32_t (&a)[4][4])
{
    struct block_words<FORMAT> words;
    read_stage<FORMAT>(r, w, &words);
    block_expand<FORMAT>(&words, a);
}

/* Starts the product of the stage at hand, decoded in a. */
template <int WIDTH>
__device__ __forceinline__ void multiply_stage(float (&d)[WIDTH / 2], const uint32_t (&a)[4][4], const struct ring *r)
{
    const uint64_t b = tile_descriptor(r->x + r->stage * r->x_bytes);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++) wgmma_step<WIDTH>(d, a[j], b + 2 * j);
    wgmma_commit();
}

/* The product of one step runs while the next one is decoded, and is waited for when that one's is under way. */
template <int FORMAT, int WIDTH>
__device__ __forceinline__ void chain(float (&d)[WIDTH / 2], struct ring *r, struct consumer w, int steps)
{
    uint32_t a[2][4][4];
    decode_stage<FORMAT>(r, w, a[0]);
    for (int k = 0; k < steps; k += 2) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (k + h >= steps) break;
            multiply_stage<WIDTH>(d, a[h], r);
            wgmma_wait<1>();
            if (k + h > 0) release_stage(r, (r->stage ? r->stage : r->stages) - 1, w.lane);
            ring_next(r);
            if (k + h + 1 < steps) decode_stage<FORMAT>(r, w, a[h ^ 1]);
        }
    }
    wgmma_wait<0>();
    release_stage(r, (r->stage ? r->stage : r->stages) - 1, w.lane);
}

/* The warpgroups take turns at the tensor cores: one has them while the other decodes and adds up. */
__device__ __forceinline__ void turn_wait(int warpgroup)
{
    asm volatile("bar.sync %0,%1;" ::"r"(2 + warpgroup), "n"(CONSUMER_WARPS * 32) : "memory");
}
__device__ __forceinline__ void turn_pass(int warpgroup)
{
    asm volatile("bar.arrive %0,%1;" ::"r"(2 + (warpgroup ^ 1)), "n"(CONSUMER_WARPS * 32) : "memory");
}

/* A group's chain goes to t. Each step's product is waited for before the next one starts. */
template <int FORMAT, int WIDTH>
__device__ __forceinline__ void chain_of_groups(float (&d)[WIDTH / 2], const struct prefill_job *job, struct ring *r,
                                                struct consumer w, int row_tile)
{
    const int group_steps = job->group / BLOCK_COLS, warpgroup = w.warp / 4;
    const float *scale =
        job->group_scale + ((size_t)row_tile * PREFILL_ROW_TILES + w.warp) * job->groups * BLOCK_ROWS + (w.lane >> 2);
    block_words<FORMAT> words = {};
    uint32_t a[4][4];
    decode_stage<FORMAT>(r, w, a);
    for (int k = 0; k < job->blocks; scale += BLOCK_ROWS) {
        const int end = min_int(k + group_steps, job->blocks);
        const float s0 = __ldg(scale), s1 = __ldg(scale + 8);
        float t[WIDTH / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) t[i] = 0;
        for (; k < end; k++) {
            const int stage = r->stage;
            turn_wait(warpgroup);
            multiply_stage<WIDTH>(t, a, r);
            turn_pass(warpgroup);
            ring_next(r);
            if (k + 1 < job->blocks) read_stage<FORMAT>(r, w, &words);
            wgmma_wait<0>();
            release_stage(r, stage, w.lane);
            block_expand<FORMAT>(&words, a);
        }
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) d[i] = fmaf(t[i], i & 2 ? s1 : s0, d[i]);
    }
}

/* ---- output ---- */

template <int WIDTH>
__device__ __forceinline__ void write_rows(const float (&d)[WIDTH / 2], const struct prefill_job *job, struct unit u,
                                           struct consumer w, float s0, float s1)
{
    const int row = u.row_tile * PREFILL_TILE_ROWS + w.warp * BLOCK_ROWS + (w.lane >> 2);
    const bool low = row < job->out_rows, high = row + 8 < job->out_rows;
    int token = u.token_first + 2 * (w.lane & 3);
    float *y = job->y + (size_t)token * job->pitch + row;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++, token += 8, y += 8 * job->pitch)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            if (token + odd >= job->rows) continue;
            if (low) y[odd * job->pitch] = d[4 * i + odd] * s0;
            if (high) y[odd * job->pitch + 8] = d[4 * i + 2 + odd] * s1;
        }
}

__device__ __forceinline__ void consumers_sync()
{
    asm volatile("bar.sync 1,%0;" ::"n"(CONSUMER_WARPS * 32) : "memory");
}

/* The unit is one block of columns of the output act: it is put together in shared memory and copied as a whole. */
template <int WIDTH>
__device__ __forceinline__ void write_swiglu(const float (&d)[WIDTH / 2], const struct prefill_job *job, struct unit u,
                                             struct consumer w, float s0, float s1, char *tile)
{
    const int valid = job->out_rows / 2 - u.row_tile * BLOCK_COLS;
    const bool copier = w.warp == 0 && w.lane == 0;
    if (copier) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    consumers_sync();
#pragma unroll
    for (int i = 0; i < WIDTH / 8; i++) prefill_stage_swiglu(tile, 8 * i, 8 * w.warp, valid, w.lane, d + 4 * i, s0, s1);
    asm volatile("fence.proxy.async;" ::: "memory");
    consumers_sync();
    if (!copier) return;
    uint8_t *to = job->y_act + ((size_t)(u.token_first / ACT_TILE_ROWS) * job->row_tiles + u.row_tile) * ACT_TILE_BYTES;
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(to + u.token_first % ACT_TILE_ROWS * 128),
        "r"(shared_address(tile)), "r"(min_int(WIDTH, job->rows - u.token_first) * 128)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int FORMAT, int WIDTH, bool GROUPED>
__device__ __forceinline__ void consume(const struct prefill_job *job, struct ring *r, struct unit u, struct consumer w,
                                        char *tile)
{
    const int row_tile = min_int(u.row_tile, job->row_tiles - 1);
    const float *scale = job->row_scale + row_tile * PREFILL_TILE_ROWS + w.warp * BLOCK_ROWS + (w.lane >> 2);
    const float s0 = __ldg(scale), s1 = __ldg(scale + 8);
    float d[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) d[i] = 0;
    if constexpr (GROUPED)
        chain_of_groups<FORMAT, WIDTH>(d, job, r, w, row_tile);
    else
        chain<FORMAT, WIDTH>(d, r, w, job->blocks * job->planes);
    if (u.row_tile != row_tile) return;
    if (job->y_act)
        write_swiglu<WIDTH>(d, job, u, w, s0, s1, tile);
    else
        write_rows<WIDTH>(d, job, u, w, s0, s1);
}

#endif /* __CUDA_ARCH_FEAT_SM90_ALL */

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define IN_CLUSTERS
#else
#define IN_CLUSTERS __cluster_dims__(CLUSTER)
#endif

template <int FORMAT, bool GROUPED>
static __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1)
    prefill_wgmma(const __grid_constant__ struct prefill_job job, const __grid_constant__ struct unit_plan plan,
                  int stages)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char dynamic[];
    __shared__ uint64_t barriers[2 * MAX_STAGES];
    char *const base = dynamic + (-shared_address(dynamic) & 1023);
    const int n_bytes = block_bytes(FORMAT, 1);
    struct ring r;
    r.full = shared_address(barriers);
    r.empty = r.full + 8 * MAX_STAGES;
    r.x = shared_address(base);
    r.x_bytes = plan.width * 128;
    r.weights = (const uint8_t *)base + stages * r.x_bytes;
    r.stages = stages;
    r.stage = 0;
    r.parity = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) {
            mbar_init(r.full + 8 * i, 1);
            mbar_init(r.empty + 8 * i, CONSUMER_WARPS * CLUSTER);
        }
        mbar_init_fence();
    }
    cluster_sync();
    pdl_go();
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x % CLUSTER;
    if (warp >= CONSUMER_WARPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        r.parity = 1;
        if (lane == 0)
            produce(&job, &plan, &r, warp - CONSUMER_WARPS, rank, n_bytes);
        else
            pdl_wait();
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        pdl_wait();
        /* The staging tile lies behind the ring, on 16 bytes as all of its parts. */
        char *const tile = base + stages * (r.x_bytes + PREFILL_ROW_TILES * n_bytes);
        const struct consumer w = {warp, lane};
        if (GROUPED && warp >= CONSUMER_WARPS / 2) turn_pass(1);
        for (int i = blockIdx.x / CLUSTER; i < plan.units; i += gridDim.x / CLUSTER) {
            const struct unit u = unit_at(&plan, &job, rank, i);
            if constexpr (!GROUPED)
                if (u.width == 256) consume<FORMAT, 256, GROUPED>(&job, &r, u, w, tile);
            if (u.width == 128)
                consume<FORMAT, 128, GROUPED>(&job, &r, u, w, tile);
            else if (u.width == 64)
                consume<FORMAT, 64, GROUPED>(&job, &r, u, w, tile);
        }
        if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        __syncwarp();
    }
    cluster_sync(); /* the other block may still write here */
#else
    (void)job, (void)plan, (void)stages;
    __trap(); /* op_linear_wgmma_takes says no */
#endif
}

typedef void (*prefill_kernel)(const struct prefill_job, const struct unit_plan, int);

/* NULL: mma.sync's. */
static prefill_kernel kernel_of(const struct device_matrix *m)
{
    const bool grouped = m->group && m->group % BLOCK_COLS == 0 && !m->mins;
    if (m->format == BLOCK_NVFP4 && !m->group) return prefill_wgmma<BLOCK_NVFP4, false>;
    if (m->format == BLOCK_BF16 && !m->group) return prefill_wgmma<BLOCK_BF16, false>;
    if (m->format == BLOCK_FP8 && !m->group) return prefill_wgmma<BLOCK_FP8, false>;
    if (m->format == BLOCK_FP8 && grouped) return prefill_wgmma<BLOCK_FP8, true>;
    if (m->format == BLOCK_INT8 && grouped) return prefill_wgmma<BLOCK_INT8, true>;
    return NULL;
}

bool op_linear_wgmma_takes(const struct op_context *c, const struct device_matrix *m)
{
    const prefill_kernel kernel = c->sm == 90 ? kernel_of(m) : NULL;
    struct cudaFuncAttributes a;
    if (!kernel || cudaFuncGetAttributes(&a, (const void *)kernel) != cudaSuccess) return false;
    return a.sharedSizeBytes > 0; /* the barriers: a kernel built for another card has no body */
}

void op_linear_wgmma_launch(const struct op_context *c, const struct device_matrix *m, const struct prefill_job *job)
{
    const prefill_kernel kernel = kernel_of(m);
    const int clusters = c->processors / CLUSTER;
    const struct unit_plan plan = plan_units(job->rows, job->row_tiles, m->group ? GROUPED_WIDTH : MAX_WIDTH, clusters);
    const int stage_bytes = plan.width * 128 + PREFILL_ROW_TILES * block_bytes(m->format, 1);
    const int tile_bytes = job->y_act ? ACT_TILE_BYTES : 0;
    const int stages = min_int(MAX_STAGES, (SHARED_BYTES - STATIC_SHARED_BYTES - tile_bytes) / stage_bytes);
    const size_t shared_bytes = (size_t)stages * stage_bytes + tile_bytes + 1024;
    cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    op_launch(c, kernel, dim3(min_int(plan.units, clusters) * CLUSTER), dim3(THREADS), shared_bytes, *job, plan,
              stages);
}
