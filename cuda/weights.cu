/* weights: a model file's matrices, cut, stacked and packed into blocks.
 *
 * Every row of a device matrix has a source: a part, and a row of its stored matrix. Host threads only gather: for a chunk of
 * whole tiles they copy the row's column spans and scales into pinned memory, row after row; a kernel packs what arrived
 * while they gather the next chunk. Codes travel as they are stored (E2M1 pairs, E4M3, plain numbers); other formats are
 * unpacked to integer codes by the host's threads.
 *
 * What is exact. FP8, INT8 and plain weights have the stored values: the code's product with x is exact, scales multiply FP32
 * sums. F32 is three bfloat16 planes cut off the number; of numbers below 2^-110 bits below 2^-133 are lost. NVFP4's factor
 * of the matrix is the row's scale, so a weight is code * scale * factor without the rounding of scale * factor to float32;
 * where the factor divides, its reciprocal is rounded once, unless it is a power of two. NaN codes and scales make their rows
 * NaN.
 *
 * Parts of different kinds become different matrices, except that gate and up, and what would be more than
 * WEIGHT_MAX_MATRICES, meet in the general form: decoded numbers in three planes. */
#include "weights.h"

#include "blocks.cuh"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STAGE_BYTES = 64 << 20, STAGES = 2, MAX_THREADS = 8, SERIAL_BYTES = 256 << 10 };

/* How rows lie in staging memory, before they are packed. */
enum raw_kind { RAW_NVFP4, RAW_FP8, RAW_INT8, RAW_BF16, RAW_F16, RAW_F32 };

struct kind {
    enum raw_kind raw;
    int planes, group;
    bool mins;
};

struct stage {
    uint8_t *host, *dev;
    cudaEvent_t packed;
};

struct weight_loader {
    cudaStream_t stream;
    struct stage stage[STAGES];
    int turn, n_threads;
};

static enum rc cuda_failed(cudaError_t status, const char *what, struct err *e)
{
    return err_set(e, RC_FATAL, EXIT_INTERNAL, "cuda", "%s: %s", what, cudaGetErrorString(status));
}

enum rc weight_loader_open(const struct op_context *c, struct weight_loader **out, struct err *e)
{
    struct weight_loader *l = (struct weight_loader *)calloc(1, sizeof *l);
    (void)c; /* whose device is the current one */
    if (!l) return err_no_memory(e);
    const long processors = sysconf(_SC_NPROCESSORS_ONLN);
    l->n_threads = processors < 1 ? 1 : processors > MAX_THREADS ? MAX_THREADS : (int)processors;
    cudaError_t status = cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking);
    for (int i = 0; i < STAGES && status == cudaSuccess; i++) {
        status = cudaMallocHost((void **)&l->stage[i].host, STAGE_BYTES);
        if (status == cudaSuccess) status = cudaMalloc((void **)&l->stage[i].dev, STAGE_BYTES);
        if (status == cudaSuccess) status = cudaEventCreateWithFlags(&l->stage[i].packed, cudaEventDisableTiming);
    }
    if (status != cudaSuccess) {
        weight_loader_close(l);
        return cuda_failed(status, "memory for loading weights", e);
    }
    *out = l;
    return RC_OK;
}

void weight_loader_close(struct weight_loader *l)
{
    if (!l) return;
    if (l->stream) cudaStreamSynchronize(l->stream);
    for (int i = 0; i < STAGES; i++) {
        cudaFreeHost(l->stage[i].host);
        cudaFree(l->stage[i].dev);
        if (l->stage[i].packed) cudaEventDestroy(l->stage[i].packed);
    }
    if (l->stream) cudaStreamDestroy(l->stream);
    free(l);
}

static enum rc device_alloc(size_t n_bytes, void **out, struct err *e)
{
    if (cudaMalloc(out, n_bytes) == cudaSuccess) return RC_OK;
    size_t unused = 0, total = 0;
    cudaGetLastError();
    cudaMemGetInfo(&unused, &total);
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "device_memory",
                   "no device memory for a weight of %zu MiB: %zu of %zu MiB are free", n_bytes >> 20, unused >> 20,
                   total >> 20);
}

/* ---- packing kernels: a chunk of tiles in staging memory, rows of fixed pitches ---- */

struct chunk {
    const uint8_t *codes;       /* [rows][codes_pitch] */
    const uint8_t *scale_bytes; /* NVFP4: [rows][blocks * 4], E4M3 */
    const float *scales, *mins; /* [rows][groups] */
    size_t codes_pitch;
    int tiles, blocks, groups, planes;
    uint8_t *out; /* of the chunk's first tile, as all below */
    float *row_scale, *group_scale, *group_min;
};

/* E4M3 scale to the byte of a block. */
__device__ __forceinline__ uint32_t nvfp4_scale_byte(uint32_t e4m3)
{
    const uint32_t magnitude = e4m3 & 0x7f;
    if (magnitude == 0x7f) return 0xff;
    if (magnitude >= 8) return magnitude + 0x70;
    if (!magnitude) return 0;
    const uint32_t top = 31 - __clz(magnitude);
    return (top << 3 | (magnitude << (3 - top) & 7)) + 0x60;
}

/* Eight codes of four bits as a block's word; a negative scale turns their signs. */
__device__ __forceinline__ uint32_t nvfp4_word(uint32_t nibbles, uint32_t e4m3)
{
    uint32_t w = 0;
    if (!(e4m3 & 0x7f)) return 0;
    if (e4m3 & 0x80) nibbles ^= 0x88888888u;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int bit = 0; bit < 4; bit++) w |= (nibbles >> (4 * i + bit) & 1) << nvfp4_place(i >> 1, i & 1, bit);
    return w;
}

__device__ __forceinline__ void pack_nvfp4(const struct chunk *c, int row, int block, int lane, int h, uint8_t *out)
{
    const int q = lane & 3;
    const uint2 v = *(const uint2 *)(c->codes + row * c->codes_pitch + (size_t)block * 32 + q * 8);
    const uint32_t scale = c->scale_bytes[(size_t)row * c->blocks * 4 + block * 4 + q];
    *(uint2 *)(out + lane * 16 + h * 8) = make_uint2(nvfp4_word(v.x, scale), nvfp4_word(v.y, scale));
    out[BLOCK_SLAB_BYTES + lane * 2 + h] = (uint8_t)nvfp4_scale_byte(scale);
}

/* Bytes 0 1 2 3 to 0 2 1 3. */
__device__ __forceinline__ uint32_t swap_middle(uint32_t w) { return __byte_perm(w, 0, 0x3120); }

__device__ __forceinline__ bool holds_nan_e4m3(uint32_t w) { return __vcmpeq4(w & 0x7f7f7f7fu, 0x7f7f7f7fu) != 0; }

template <bool FP8>
__device__ __forceinline__ void pack_bytes(const struct chunk *c, int row, int block, int lane, int h, uint8_t *out)
{
    const uint4 v = *(const uint4 *)(c->codes + row * c->codes_pitch + (size_t)block * BLOCK_COLS + (lane & 3) * 16);
    ((uint4 *)(out + h * BLOCK_SLAB_BYTES))[lane] =
        make_uint4(swap_middle(v.x), swap_middle(v.y), swap_middle(v.z), swap_middle(v.w));
    if (FP8 && (holds_nan_e4m3(v.x) || holds_nan_e4m3(v.y) || holds_nan_e4m3(v.z) || holds_nan_e4m3(v.w)))
        c->row_scale[row] = __int_as_float(0x7fc00000);
}

/* Cuts the next plane off a number; infinities and NaN are wholly in the first. */
__device__ __forceinline__ uint32_t cut_plane(float *rest)
{
    const uint32_t bits = __float_as_uint(*rest), plane = bits >> 16;
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        *rest = 0;
        return (bits & 0x7fffffu) ? 0x7fc0 : plane;
    }
    *rest = __fsub_rn(*rest, __uint_as_float(bits & 0xffff0000u));
    return plane;
}

template <int RAW>
__device__ __forceinline__ void pack_numbers(const struct chunk *c, int row, int block, int lane, int h, uint8_t *out)
{
    const uint8_t *p =
        c->codes + row * c->codes_pitch + ((size_t)block * BLOCK_COLS + (lane & 3) * 16) * (RAW == RAW_F32 ? 4 : 2);
    float rest[16];
    for (int i = 0; i < 16; i++)
        rest[i] = RAW == RAW_F32   ? ((const float *)p)[i]
                  : RAW == RAW_F16 ? __half2float(((const __half *)p)[i])
                                   : __uint_as_float((uint32_t)((const uint16_t *)p)[i] << 16);
    for (int plane = 0; plane < c->planes; plane++, out += BLOCK_PLANE_BYTES)
        for (int slab = 0; slab < 2; slab++) {
            uint32_t w[4];
            for (int i = 0; i < 4; i++) {
                w[i] = cut_plane(&rest[slab * 8 + 2 * i]);
                w[i] |= cut_plane(&rest[slab * 8 + 2 * i + 1]) << 16;
            }
            ((uint4 *)(out + (h * 2 + slab) * BLOCK_SLAB_BYTES))[lane] = make_uint4(w[0], w[1], w[2], w[3]);
        }
}

/* A warp packs a block. */
template <int RAW> __global__ void __launch_bounds__(256) pack_blocks(const __grid_constant__ struct chunk c)
{
    const int lane = threadIdx.x & 31;
    const size_t i = (size_t)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (i >= (size_t)c.tiles * c.blocks) return;
    const int tile = (int)(i / c.blocks), block = (int)(i % c.blocks);
    const int format = RAW == RAW_NVFP4  ? BLOCK_NVFP4
                       : RAW == RAW_FP8  ? BLOCK_FP8
                       : RAW == RAW_INT8 ? BLOCK_INT8
                                         : BLOCK_BF16;
    uint8_t *out = c.out + i * block_bytes(format, c.planes);
    for (int h = 0; h < 2; h++) {
        const int row = tile * BLOCK_ROWS + (lane >> 2) + 8 * h;
        if (RAW == RAW_NVFP4)
            pack_nvfp4(&c, row, block, lane, h, out);
        else if (RAW == RAW_FP8 || RAW == RAW_INT8)
            pack_bytes<RAW == RAW_FP8>(&c, row, block, lane, h, out);
        else
            pack_numbers<RAW>(&c, row, block, lane, h, out);
    }
}

/* [rows][groups] to [tiles][groups][16]. */
__global__ void pack_scales(const __grid_constant__ struct chunk c)
{
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (size_t)c.tiles * c.groups * BLOCK_ROWS) return;
    const size_t tile = i / BLOCK_ROWS / c.groups, group = i / BLOCK_ROWS % c.groups,
                 row = tile * BLOCK_ROWS + i % BLOCK_ROWS;
    c.group_scale[i] = c.scales[row * c.groups + group];
    if (c.group_min) c.group_min[i] = c.mins[row * c.groups + group];
}

/* ---- gathering rows on the host ---- */

/* Where a row of the device matrix comes from. */
struct row_source {
    const struct kern_weight_part *part; /* NULL: padding */
    uint64_t row;
};

/* Offsets in staging memory of a chunk's arrays. */
struct stage_layout {
    size_t codes_pitch, codes, scale_bytes, scales, mins, row_scale, n_bytes;
};

struct gather {
    struct kind kind;
    enum kern_weights how;
    const struct row_source *rows; /* of the chunk */
    int n_rows, blocks, groups;
    uint8_t *host;
    struct stage_layout at;
    int n_threads, thread;
    bool failed; /* out of memory */
};

static size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

static size_t raw_block_bytes(enum raw_kind raw)
{
    static const size_t bytes[] = {32, 64, 64, 128, 128, 256};
    return bytes[raw];
}

static struct stage_layout lay_out(const struct kind *k, int blocks, int groups, int rows)
{
    struct stage_layout s = {};
    const size_t n = (size_t)rows;
    s.codes_pitch = blocks * raw_block_bytes(k->raw);
    s.row_scale = round_up(n * s.codes_pitch, 256);
    s.scale_bytes = s.row_scale + round_up(n * sizeof(float), 256);
    s.scales = s.scale_bytes + (k->raw == RAW_NVFP4 ? round_up(n * blocks * 4, 256) : 0);
    s.mins = s.scales + round_up(n * groups * sizeof(float), 256);
    s.n_bytes = s.mins + (k->mins ? round_up(n * groups * sizeof(float), 256) : 0);
    return s;
}

/* Where the scale byte of a column lies in the grid beside E2M1 pairs; NULL where a window cuts the grid as well. */
static const uint8_t *pair_scales(const struct quant_matrix *m, uint64_t row, uint64_t col)
{
    const struct quant_scales *s = &m->scales;
    if (m->window && (m->window->scale_rows || m->window->scale_cols)) return NULL;
    return (const uint8_t *)s->bytes + row / s->row_block * s->per_row + col / s->col_block;
}

static void gather_nvfp4(const struct quant_matrix *m, uint64_t row, struct kern_span s, uint8_t *codes,
                         uint8_t *scales, uint8_t *scratch)
{
    const uint8_t *grid = m->format == QUANT_FP4_PAIRS ? pair_scales(m, row, s.first) : NULL;
    if (grid) {
        memcpy(codes, quant_matrix_at(m, row, s.first), s.count / 2);
        memcpy(scales, grid, s.count / 16);
        return;
    }
    quant_matrix_e2m1(m, row, s.first, s.count, scratch, scales);
    for (uint64_t i = 0; i < s.count / 2; i++) codes[i] = (uint8_t)(scratch[2 * i] | scratch[2 * i + 1] << 4);
}

/* One scale a stored group to one for every `group` columns of the device matrix; at: the span's first column there. */
static void spread_scales(const float *stored, size_t stored_group, struct kern_span s, size_t at, size_t group,
                          float *scales)
{
    for (uint64_t done = 0; done < s.count;) {
        const uint64_t col = s.first + done, left = group - (at + done) % group;
        scales[(at + done) / group] = stored[col / stored_group - s.first / stored_group];
        done += left;
    }
}

static void gather_scaled(const struct gather *g, const struct kern_weight_part *p, uint64_t row, struct kern_span s,
                          size_t at, int i, float *scratch)
{
    const struct quant_matrix *m = &p->matrix;
    uint8_t *codes = g->host + g->at.codes + i * g->at.codes_pitch + at;
    float *scales = (float *)(g->host + g->at.scales) + (size_t)i * g->groups;
    float *mins = (float *)(g->host + g->at.mins) + (size_t)i * g->groups;
    if (g->how == KERN_WEIGHTS_W8 && !p->native) {
        quant_matrix_w8(m, row, s.first, s.count, (int8_t *)codes, scratch);
        spread_scales(scratch, QUANT_W8_GROUP, s, at, g->kind.group, scales);
    } else if (m->format == QUANT_FP8) {
        quant_matrix_fp8(m, row, s.first, s.count, codes, scratch);
        if (g->kind.group)
            spread_scales(scratch, quant_matrix_group(m), s, at, g->kind.group, scales);
        else if (at == 0)
            *(float *)(g->host + g->at.row_scale + i * sizeof(float)) = scratch[0] * BLOCK_FACTOR_FP8;
    } else {
        float *unused = scratch; /* minimums of a kind that has none */
        quant_matrix_codes(m, row, s.first, s.count, (int8_t *)codes, scales + at / g->kind.group,
                           g->kind.mins ? mins + at / g->kind.group : unused);
    }
}

/* Numbers as they are stored, or any format in the general form. */
static void gather_plain(const struct gather *g, const struct kern_weight_part *p, uint64_t row, struct kern_span s,
                         size_t at, int i, float *scratch)
{
    const struct quant_matrix *m = &p->matrix;
    const size_t bytes = raw_block_bytes(g->kind.raw) / BLOCK_COLS;
    uint8_t *to = g->host + g->at.codes + i * g->at.codes_pitch + at * bytes;
    float *numbers = (float *)to;
    if (g->how == KERN_WEIGHTS_W8 && !p->native) {
        int8_t *codes = (int8_t *)(scratch + s.count / 2 + 4);
        quant_matrix_w8(m, row, s.first, s.count, codes, scratch);
        for (uint64_t c = 0; c < s.count; c++)
            numbers[c] = scratch[(s.first + c) / QUANT_W8_GROUP - s.first / QUANT_W8_GROUP] * (float)codes[c];
    } else if (g->kind.raw == RAW_F32 && m->format != QUANT_F32) {
        quant_matrix_decode(m, row, s.first, s.count, numbers);
    } else {
        memcpy(to, quant_matrix_at(m, row, s.first), s.count * bytes);
    }
}

/* FP8 scaled by groups, and INT8, keep their scale in the groups. */
static float row_factor(const struct kind *k, const struct quant_matrix *m)
{
    if (k->raw == RAW_NVFP4) return (m->divide ? 1.0f / m->global : m->global) * BLOCK_FACTOR_NVFP4;
    return k->raw == RAW_FP8 ? BLOCK_FACTOR_FP8 : BLOCK_FACTOR_PLAIN;
}

/* Row i of the chunk. */
static void gather_row(const struct gather *g, int i, void *scratch)
{
    const struct row_source *source = &g->rows[i];
    uint8_t *codes = g->host + g->at.codes + i * g->at.codes_pitch;
    uint8_t *scale_bytes = g->host + g->at.scale_bytes + (size_t)i * g->blocks * 4;
    size_t at = 0;
    *(float *)(g->host + g->at.row_scale + i * sizeof(float)) = 0;
    memset(g->host + g->at.scales + (size_t)i * g->groups * sizeof(float), 0, g->groups * sizeof(float));
    if (g->kind.mins)
        memset(g->host + g->at.mins + (size_t)i * g->groups * sizeof(float), 0, g->groups * sizeof(float));
    if (source->part) {
        *(float *)(g->host + g->at.row_scale + i * sizeof(float)) = row_factor(&g->kind, &source->part->matrix);
        for (int n = 0; n < source->part->n_cols; n++) {
            const struct kern_span s = source->part->cols[n];
            if (!s.count) continue;
            if (g->kind.raw == RAW_NVFP4)
                gather_nvfp4(&source->part->matrix, source->row, s, codes + at / 2, scale_bytes + at / 16,
                             (uint8_t *)scratch);
            else if (g->kind.raw == RAW_FP8 || g->kind.raw == RAW_INT8)
                gather_scaled(g, source->part, source->row, s, at, i, (float *)scratch);
            else
                gather_plain(g, source->part, source->row, s, at, i, (float *)scratch);
            at += s.count;
        }
    }
    const size_t used = at * raw_block_bytes(g->kind.raw) / BLOCK_COLS;
    memset(codes + used, 0, g->at.codes_pitch - used);
    if (g->kind.raw == RAW_NVFP4) memset(scale_bytes + at / 16, 0, (size_t)g->blocks * 4 - at / 16);
}

static void *gather_rows(void *argument)
{
    struct gather *g = (struct gather *)argument;
    void *scratch = malloc((size_t)g->blocks * BLOCK_COLS * sizeof(float) + 64); /* codes and scales of a row */
    g->failed = !scratch;
    const int first = (int)((int64_t)g->n_rows * g->thread / g->n_threads);
    const int last = (int)((int64_t)g->n_rows * (g->thread + 1) / g->n_threads);
    for (int i = first; scratch && i < last; i++) gather_row(g, i, scratch);
    free(scratch);
    return NULL;
}

/* Runs work(part) for n_threads parts [n_threads] of `bytes` each; a thread that cannot start is run here. */
static void run_threads(void *(*work)(void *), void *parts, size_t bytes, int n_threads)
{
    pthread_t thread[MAX_THREADS];
    bool started[MAX_THREADS] = {};
    for (int i = 1; i < n_threads; i++) started[i] = !pthread_create(&thread[i], NULL, work, (char *)parts + i * bytes);
    for (int i = 0; i < n_threads; i++)
        if (!started[i]) work((char *)parts + i * bytes);
    for (int i = 1; i < n_threads; i++)
        if (started[i]) pthread_join(thread[i], NULL);
}

/* ---- a device matrix ---- */

static void launch_pack(cudaStream_t stream, enum raw_kind raw, const struct chunk *c)
{
    const unsigned grid = (unsigned)(((size_t)c->tiles * c->blocks + 7) / 8);
    switch (raw) {
    case RAW_NVFP4: pack_blocks<RAW_NVFP4><<<grid, 256, 0, stream>>>(*c); break;
    case RAW_FP8: pack_blocks<RAW_FP8><<<grid, 256, 0, stream>>>(*c); break;
    case RAW_INT8: pack_blocks<RAW_INT8><<<grid, 256, 0, stream>>>(*c); break;
    case RAW_BF16: pack_blocks<RAW_BF16><<<grid, 256, 0, stream>>>(*c); break;
    case RAW_F16: pack_blocks<RAW_F16><<<grid, 256, 0, stream>>>(*c); break;
    case RAW_F32: pack_blocks<RAW_F32><<<grid, 256, 0, stream>>>(*c); break;
    }
    if (c->groups)
        pack_scales<<<(unsigned)(((size_t)c->tiles * c->groups * BLOCK_ROWS + 255) / 256), 256, 0, stream>>>(*c);
}

/* Gathers and sends tiles first .. first + tiles of the matrix. */
static enum rc send_chunk(struct weight_loader *l, const struct kind *k, enum kern_weights how,
                          const struct row_source *rows, const struct device_matrix *m, int first, int tiles,
                          struct err *e)
{
    struct stage *stage = &l->stage[l->turn];
    const int n_rows = tiles * BLOCK_ROWS, groups = block_groups(m->blocks, m->group);
    const struct stage_layout at = lay_out(k, m->blocks, groups, n_rows);
    cudaError_t status = cudaEventSynchronize(stage->packed);
    if (status != cudaSuccess) return cuda_failed(status, "loading weights", e);
    struct gather part[MAX_THREADS] = {};
    const int n_threads = at.n_bytes < SERIAL_BYTES ? 1 : l->n_threads;
    for (int i = 0; i < n_threads; i++) {
        struct gather g = {
            *k, how,  rows + (size_t)first * BLOCK_ROWS, n_rows, m->blocks, groups, stage->host, at, n_threads,
            i,  false};
        part[i] = g;
    }
    run_threads(gather_rows, part, sizeof part[0], n_threads);
    for (int i = 0; i < n_threads; i++)
        if (part[i].failed) return err_no_memory(e);
    const size_t row = (size_t)first * BLOCK_ROWS;
    struct chunk c = {};
    c.codes = stage->dev + at.codes, c.codes_pitch = at.codes_pitch, c.scale_bytes = stage->dev + at.scale_bytes;
    c.scales = (const float *)(stage->dev + at.scales), c.mins = (const float *)(stage->dev + at.mins);
    c.tiles = tiles, c.blocks = m->blocks, c.groups = groups, c.planes = m->planes;
    c.out = (uint8_t *)m->blocks_dev + (size_t)first * m->blocks * block_bytes(m->format, m->planes);
    c.row_scale = (float *)m->row_scale_dev + row;
    c.group_scale = m->group ? (float *)m->group_scale_dev + row * groups : NULL;
    c.group_min = m->mins ? (float *)m->group_min_dev + row * groups : NULL;
    cudaMemcpyAsync(stage->dev, stage->host, at.n_bytes, cudaMemcpyHostToDevice, l->stream);
    cudaMemcpyAsync(c.row_scale, stage->dev + at.row_scale, n_rows * sizeof(float), cudaMemcpyDeviceToDevice,
                    l->stream);
    launch_pack(l->stream, k->raw, &c);
    cudaEventRecord(stage->packed, l->stream);
    status = cudaGetLastError();
    l->turn = (l->turn + 1) % STAGES;
    return status == cudaSuccess ? RC_OK : cuda_failed(status, "packing weights", e);
}

static enum block_format format_of(enum raw_kind raw)
{
    return raw == RAW_NVFP4 ? BLOCK_NVFP4 : raw == RAW_FP8 ? BLOCK_FP8 : raw == RAW_INT8 ? BLOCK_INT8 : BLOCK_BF16;
}

/* m: rows, cols, halves and swiglu are set. rows_of: m->tiles * 16 sources. */
static enum rc load_matrix(struct weight_loader *l, const struct kind *k, enum kern_weights how,
                           const struct row_source *rows_of, struct device_matrix *m, struct err *e)
{
    m->format = format_of(k->raw), m->planes = k->planes, m->group = k->group, m->mins = k->mins;
    const size_t n_rows = (size_t)m->tiles * BLOCK_ROWS, groups = block_groups(m->blocks, m->group);
    const size_t block_part = (size_t)m->tiles * m->blocks * block_bytes(m->format, m->planes);
    const size_t row_part = round_up(n_rows * sizeof(float), 256),
                 group_part = round_up(n_rows * groups * sizeof(float), 256);
    const size_t tile_bytes = lay_out(k, m->blocks, (int)groups, BLOCK_ROWS).n_bytes;
    const int tiles = (int)(STAGE_BYTES / tile_bytes);
    void *memory = NULL;
    if (!tiles)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "weight_shape",
                       "a weight of %d columns is too wide for the CUDA backend", m->cols);
    m->bytes = block_part + row_part + group_part * (m->mins ? 2 : 1);
    enum rc rc = device_alloc(m->bytes, &memory, e);
    if (rc != RC_OK) return rc;
    m->blocks_dev = (const uint8_t *)memory;
    m->row_scale_dev = (const float *)(m->blocks_dev + block_part);
    if (m->group) m->group_scale_dev = (const float *)(m->blocks_dev + block_part + row_part);
    if (m->mins) m->group_min_dev = (const float *)(m->blocks_dev + block_part + row_part + group_part);
    for (int first = 0; first < m->tiles && rc == RC_OK; first += tiles)
        rc = send_chunk(l, k, how, rows_of, m, first, m->tiles - first < tiles ? m->tiles - first : tiles, e);
    return rc;
}

/* ---- what kind a part is ---- */

static enum rc unsupported(const struct kern_weight_part *p, const char *why, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "weight_shape", "a %s weight of %llu x %llu: %s",
                   quant_name(p->matrix.format), (unsigned long long)p->matrix.rows, (unsigned long long)p->matrix.cols,
                   why);
}

/* The widest group of the cut part, at most the stored one, inside of which no scale ends; 0: there is none. */
static int group_of_cut(const struct kern_weight_part *p, size_t stored)
{
    for (uint64_t group = stored; group >= 16; group /= 2) {
        uint64_t at = 0;
        bool good = true;
        for (int i = 0; i < p->n_cols; at += p->cols[i++].count)
            good = good && at % group == 0 && p->cols[i].first % group == 0;
        if (good) return (int)group;
    }
    return 0;
}

static enum rc kind_of_part(const struct kern_weight_part *p, enum kern_weights how, struct kind *out, struct err *e)
{
    const struct quant_matrix *m = &p->matrix;
    struct kind k = {RAW_INT8, 1, 0, false};
    if (how == KERN_WEIGHTS_W8 && !p->native) {
        k.group = group_of_cut(p, QUANT_W8_GROUP);
    } else if (m->format == QUANT_F32 || m->format == QUANT_F16 || m->format == QUANT_BF16) {
        k.raw = m->format == QUANT_F32 ? RAW_F32 : m->format == QUANT_F16 ? RAW_F16 : RAW_BF16;
        k.planes = m->format == QUANT_F32 ? 3 : m->format == QUANT_F16 ? 2 : 1;
    } else if (quant_matrix_e2m1_scales(m) == QUANT_FP8) {
        k.raw = RAW_NVFP4;
    } else if (m->format == QUANT_FP8) {
        k.raw = RAW_FP8;
        if (m->scales.bytes && m->scales.col_block < m->cols)
            k.group = group_of_cut(p, quant_matrix_group(m));
        else {
            *out = k;
            return RC_OK;
        }
    } else {
        k.group = group_of_cut(p, quant_matrix_group(m)) == (int)quant_matrix_group(m) ? (int)quant_matrix_group(m) : 0;
        k.mins = m->format != QUANT_Q8_0 && m->format != QUANT_MXFP4 && m->format != QUANT_FP4_PAIRS &&
                 m->format != QUANT_NVFP4;
    }
    if ((k.raw == RAW_INT8 || k.raw == RAW_FP8) && !k.group)
        return unsupported(p, "its scales, as it is cut, do not cover whole groups of 16 columns", e);
    if (k.raw == RAW_NVFP4 && !group_of_cut(p, 16)) return unsupported(p, "cut inside a group of 16 columns", e);
    *out = k;
    return RC_OK;
}

static bool same_kind(const struct kind *a, const struct kind *b)
{
    return a->raw == b->raw && a->planes == b->planes && a->group == b->group && a->mins == b->mins;
}

static uint64_t span_total(const struct kern_span *s, int n)
{
    uint64_t total = 0;
    for (int i = 0; i < n; i++) total += s[i].count;
    return total;
}

static enum rc check_parts(const struct kern_weight_part *parts, int n_parts, enum kern_use use, struct err *e)
{
    uint64_t rows = 0;
    const uint64_t cols = n_parts ? span_total(parts[0].cols, parts[0].n_cols) : 0;
    for (int i = 0; i < n_parts; i++) {
        const struct kern_weight_part *p = &parts[i];
        if (span_total(p->cols, p->n_cols) != cols)
            return unsupported(p, "its columns are not those of its neighbours", e);
        rows += span_total(p->rows, p->n_rows);
        for (int r = 0; r < p->n_rows; r++)
            for (int c = 0; c < p->n_cols; c++)
                if (!quant_matrix_holds(&p->matrix, (struct quant_span){p->rows[r].first, p->rows[r].count},
                                        (struct quant_span){p->cols[c].first, p->cols[c].count}))
                    return unsupported(p, "a slice that is not stored here", e);
    }
    if (!rows || !cols || rows > 1 << 28 || cols > 1 << 24)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "weight_shape", "a weight of %llu x %llu",
                       (unsigned long long)rows, (unsigned long long)cols);
    if (use == KERN_SWIGLU && (n_parts != 2 || rows % 16 || span_total(parts[0].rows, parts[0].n_rows) * 2 != rows))
        return unsupported(&parts[0], "gate and up are two parts of as many rows, a multiple of 8", e);
    return RC_OK;
}

/* ---- weights ---- */

/* The matrices of a weight before they are loaded: parts [part_first, part_end). */
struct plan {
    struct kind kind;
    int part_first, part_end;
};

static enum rc plan_weight(const struct kern_weight_part *parts, int n_parts, enum kern_weights how, enum kern_use use,
                           struct plan plans[WEIGHT_MAX_MATRICES], int *n_plans, struct err *e)
{
    const struct kind general = {RAW_F32, 3, 0, false};
    int n = 0;
    bool too_many = false;
    for (int i = 0; i < n_parts; i++) {
        struct kind k = {RAW_INT8, 1, 0, false};
        const enum rc rc = kind_of_part(&parts[i], how, &k, e);
        if (rc != RC_OK) return rc;
        if (n && same_kind(&plans[n - 1].kind, &k))
            plans[n - 1].part_end = i + 1;
        else if (n == WEIGHT_MAX_MATRICES || (n && use == KERN_SWIGLU))
            too_many = true;
        else
            plans[n++] = (struct plan){k, i, i + 1};
    }
    if (too_many) plans[0] = (struct plan){general, 0, n_parts}, n = 1;
    *n_plans = n;
    return RC_OK;
}

static void list_rows(const struct kern_weight_part *p, struct row_source *out)
{
    for (int s = 0; s < p->n_rows; s++)
        for (uint64_t r = 0; r < p->rows[s].count; r++) *out++ = (struct row_source){p, p->rows[s].first + r};
}

static enum rc load_plan(struct weight_loader *l, const struct kern_weight_part *parts, const struct plan *plan,
                         enum kern_weights how, enum kern_use use, struct device_matrix *m, struct err *e)
{
    uint64_t rows = 0;
    for (int i = plan->part_first; i < plan->part_end; i++) rows += span_total(parts[i].rows, parts[i].n_rows);
    m->rows = (int)rows, m->cols = (int)span_total(parts[0].cols, parts[0].n_cols);
    m->tiles = (m->rows + 127) / 128 * 8, m->blocks = (m->cols + BLOCK_COLS - 1) / BLOCK_COLS;
    m->halves = use == KERN_PARTIAL ? 2 : 1, m->swiglu = use == KERN_SWIGLU;
    const size_t n = (size_t)m->tiles * BLOCK_ROWS;
    struct row_source *of = (struct row_source *)calloc(n, sizeof *of),
                      *stacked = (struct row_source *)calloc(n, sizeof *of);
    if (!of || !stacked) {
        free(of), free(stacked);
        return err_no_memory(e);
    }
    for (int i = plan->part_first, at = 0; i < plan->part_end; i++) {
        list_rows(&parts[i], stacked + at);
        at += (int)span_total(parts[i].rows, parts[i].n_rows);
    }
    for (int i = 0; i < m->rows; i++) {
        const int pair = i / 16 * 8 + i % 8;
        of[i] = stacked[!m->swiglu ? i : i % 16 < 8 ? pair : m->rows / 2 + pair];
    }
    const enum rc rc = load_matrix(l, &plan->kind, how, of, m, e);
    free(of), free(stacked);
    return rc;
}

enum rc weights_load(struct weight_loader *l, const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                     enum kern_use use, struct kern_weight **out, struct err *e)
{
    struct plan plans[WEIGHT_MAX_MATRICES];
    int n_plans = 0;
    enum rc rc = check_parts(parts, n_parts, use, e);
    if (rc == RC_OK) rc = plan_weight(parts, n_parts, how, use, plans, &n_plans, e);
    if (rc != RC_OK) return rc;
    struct kern_weight *w = (struct kern_weight *)calloc(1, sizeof *w);
    if (!w) return err_no_memory(e);
    w->use = use;
    for (int i = 0; i < n_plans && rc == RC_OK; i++) {
        struct device_matrix *m = &w->matrix[w->n_matrices];
        w->row_first[w->n_matrices++] = w->rows;
        rc = load_plan(l, parts, &plans[i], how, use, m, e);
        w->rows += m->rows, w->cols = m->cols, w->bytes += m->bytes;
    }
    const cudaError_t status = cudaStreamSynchronize(l->stream);
    if (rc == RC_OK && status != cudaSuccess) rc = cuda_failed(status, "loading weights", e);
    if (rc != RC_OK) {
        weights_free(w);
        return rc;
    }
    *out = w;
    return RC_OK;
}

void weights_free(struct kern_weight *w)
{
    if (!w) return;
    for (int i = 0; i < w->n_matrices; i++) cudaFree((void *)w->matrix[i].blocks_dev);
    free(w);
}

/* ---- tables ---- */

struct table_gather {
    const struct quant_matrix *m;
    uint64_t first;
    int n_rows, n_threads, thread;
    bool bf16;
    uint8_t *host;
};

static void *gather_table(void *argument)
{
    const struct table_gather *g = (const struct table_gather *)argument;
    const size_t cols = (size_t)g->m->cols, row_bytes = cols * (g->bf16 ? 2 : 4);
    const int first = (int)((int64_t)g->n_rows * g->thread / g->n_threads);
    const int last = (int)((int64_t)g->n_rows * (g->thread + 1) / g->n_threads);
    for (int i = first; i < last; i++) {
        if (g->bf16)
            memcpy(g->host + i * row_bytes, quant_matrix_at(g->m, g->first + i, 0), row_bytes);
        else
            quant_matrix_decode(g->m, g->first + i, 0, cols, (float *)(g->host + i * row_bytes));
    }
    return NULL;
}

static enum rc send_table(struct weight_loader *l, const struct quant_matrix *m, const struct kern_table *t,
                          struct err *e)
{
    const size_t row_bytes = (size_t)t->cols * (t->bf16 ? 2 : 4), rows = STAGE_BYTES / row_bytes;
    for (size_t first = 0; first < (size_t)t->rows; first += rows) {
        struct stage *stage = &l->stage[l->turn];
        const size_t n = (size_t)t->rows - first < rows ? (size_t)t->rows - first : rows;
        const int n_threads = n * row_bytes < SERIAL_BYTES ? 1 : l->n_threads;
        struct table_gather part[MAX_THREADS];
        cudaError_t status = cudaEventSynchronize(stage->packed);
        for (int i = 0; i < n_threads; i++)
            part[i] = (struct table_gather){m, first, (int)n, n_threads, i, t->bf16, stage->host};
        run_threads(gather_table, part, sizeof part[0], n_threads);
        cudaMemcpyAsync((char *)t->rows_dev + first * row_bytes, stage->host, n * row_bytes, cudaMemcpyHostToDevice,
                        l->stream);
        cudaEventRecord(stage->packed, l->stream);
        if (status == cudaSuccess) status = cudaGetLastError();
        if (status != cudaSuccess) return cuda_failed(status, "loading an embedding", e);
        l->turn = (l->turn + 1) % STAGES;
    }
    const cudaError_t status = cudaStreamSynchronize(l->stream);
    return status == cudaSuccess ? RC_OK : cuda_failed(status, "loading an embedding", e);
}

enum rc weights_load_table(struct weight_loader *l, const struct quant_matrix *m, struct kern_table **out,
                           struct err *e)
{
    if (!m->rows || !m->cols || m->rows > 1 << 28 || m->cols > 1 << 20)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "weight_shape", "an embedding of %llu x %llu",
                       (unsigned long long)m->rows, (unsigned long long)m->cols);
    struct kern_table *t = (struct kern_table *)calloc(1, sizeof *t);
    if (!t) return err_no_memory(e);
    t->bf16 = m->format == QUANT_BF16, t->rows = (int)m->rows, t->cols = (int)m->cols;
    t->bytes = (size_t)m->rows * (size_t)m->cols * (t->bf16 ? 2 : 4);
    enum rc rc = device_alloc(t->bytes, (void **)&t->rows_dev, e);
    if (rc == RC_OK) rc = send_table(l, m, t, e);
    if (rc != RC_OK) {
        weights_free_table(t);
        return rc;
    }
    *out = t;
    return RC_OK;
}

void weights_free_table(struct kern_table *t)
{
    if (!t) return;
    cudaFree((void *)t->rows_dev);
    free(t);
}
