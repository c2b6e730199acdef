/* Prefill attention on CUDA: against float64, row independence, poison. With an argument, only
 * tests whose name matches it; `bench`: TFLOP/s.
 *
 * Queries, keys and values are functions of (sequence, position), so the same prompt can be cut into chunks and batched in any
 * way. Pages are written here, place by place as kv_page.cuh says. Where a kernel rounds queries, keys and values to float16,
 * the reference does so too. Then what is left is the rounding of probabilities to float16 (2^-12 of each, of random sign),
 * the sums, and the rounding of the output to bfloat16: an output may be wrong by half a unit of its last place + 5e-4 (plain
 * kernel: 3e-5) of the largest output of its row and head. */
#include "cuda_fixture.cuh"

#include "op_attn_prefill.cuh"

#include <algorithm>

static struct op_context card;

struct piece { /* a segment of a test's batch */
    int sequence, rows, position_first;
    bool decode;
};

struct world {
    struct kern_attn_shape shape;
    std::vector<piece> pieces;
    int decode_rows, rows, width;
    std::vector<int32_t> tables;
    std::vector<device_segment> segments;
    struct guarded qkv, pool, tables_dev, segments_dev, act;
    size_t act_bytes;
    struct kern_kv_layer kv;
    struct device_batch batch;
};

/* ---- inputs ---- */

__host__ __device__ static inline uint32_t hash_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    uint32_t x = a * 0x9e3779b1u + b * 0x85ebca77u + c * 0xc2b2ae3du + d * 0x27d4eb2fu + 0x165667b1u;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}
__host__ __device__ static inline float signed_unit(uint32_t h) { return (float)(int32_t)h * 0x1p-31f; }

__global__ static void fill_queries(struct device_batch b, float *qkv, int width, int query_columns,
                                    const int32_t *sequences)
{
    const struct device_segment s = b.segments[blockIdx.y];
    for (int r = blockIdx.x; r < s.rows; r += gridDim.x)
        for (int k = threadIdx.x; k < query_columns; k += blockDim.x)
            qkv[(size_t)(s.row_first + r) * width + k] =
                5 * signed_unit(hash_of(1, sequences[blockIdx.y], s.position_first + r, k));
}

__device__ static void fill_cell(enum kv_format f, char *cell, char *scale, bool first_of_run, uint32_t h,
                                 uint32_t of_run)
{
    switch (f) {
    case KV_F32: *(float *)cell = signed_unit(h); break;
    case KV_F16: *(__half *)cell = __float2half(signed_unit(h)); break;
    case KV_BF16: *(__nv_bfloat16 *)cell = __float2bfloat16(signed_unit(h)); break;
    default:
        *(uint8_t *)cell = (uint8_t)(1 + h % 255);
        if (first_of_run) *(__half *)scale = __float2half(0.004f + 0.008f * (of_run & 1023) / 1023);
    }
}

__global__ static void fill_pages(struct device_batch b, struct kern_attn_shape shape, struct kern_kv_layer kv,
                                  const int32_t *sequences)
{
    const struct device_segment s = b.segments[blockIdx.y];
    const int dim = shape.head_dim, n = shape.n_kv_heads * dim, half = kv_page_half_bytes(shape.kv, dim);
    for (int t = blockIdx.x; t < s.position_first + s.rows; t += gridDim.x)
        for (int i = threadIdx.x; i < n; i += blockDim.x) {
            const int head = i / dim, d = i % dim, run = d / KV_INT8_RUN, slot = t % 64;
            const uint32_t where = hash_of(2, sequences[blockIdx.y], t, head);
            char *keys = kv_page_keys(kv, b.tables[s.table_first + t / 64], head, shape.kv, dim), *values = keys + half;
            fill_cell(shape.kv, keys + kv_page_key_at(shape.kv, dim, slot, d),
                      keys + kv_page_key_scale_at(dim, slot, run), d % KV_INT8_RUN == 0, hash_of(3, where, d, 0),
                      hash_of(4, where, run, 0));
            fill_cell(shape.kv, values + kv_page_value_at(shape.kv, dim, slot, d),
                      values + kv_page_value_scale_at(dim, slot, run), d % KV_INT8_RUN == 0, hash_of(5, where, d, 0),
                      hash_of(6, where, run, 0));
        }
}

static struct world world_new(struct kern_attn_shape shape, std::vector<piece> pieces, uint64_t page_seed)
{
    struct world w = {};
    w.shape = shape;
    w.pieces = pieces;
    int n_pages = 3;
    for (const piece &p : pieces) n_pages += (p.position_first + p.rows + 63) / 64;
    std::vector<int32_t> order(n_pages), sequences;
    for (int i = 0; i < n_pages; i++) order[i] = i;
    for (int i = n_pages - 1; i > 0; i--) std::swap(order[i], order[random_next(&page_seed) % (uint64_t)(i + 1)]);
    int n_decode = 0;
    for (const piece &p : pieces) {
        w.segments.push_back({w.rows, p.rows, p.position_first, 0, (int32_t)w.tables.size(), 0});
        for (int i = 0; i < (p.position_first + p.rows + 63) / 64; i++) {
            w.tables.push_back(order.back());
            order.pop_back();
        }
        sequences.push_back(p.sequence);
        w.rows += p.rows;
        if (p.decode) w.decode_rows += p.rows;
        n_decode += p.decode;
    }
    const int query_columns = shape.n_heads * shape.head_dim * (shape.gated ? 2 : 1);
    w.width = query_columns + 2 * shape.n_kv_heads * shape.head_dim;
    w.kv.page_bytes = (size_t)shape.n_kv_heads * kv_page_head_bytes(shape.kv, shape.head_dim);
    w.qkv = guarded_new_dev((size_t)w.rows * w.width * sizeof(float));
    w.pool = guarded_new_dev((size_t)n_pages * w.kv.page_bytes);
    w.kv.base_dev = w.pool.dev;
    w.tables_dev = to_device(w.tables);
    w.segments_dev = to_device(w.segments);
    w.act_bytes = act_buffer_bytes(w.decode_rows, w.rows - w.decode_rows, shape.n_heads * shape.head_dim);
    w.act = guarded_new_dev(w.act_bytes);
    w.batch.rows = w.rows;
    w.batch.decode_rows = w.decode_rows;
    w.batch.n_segments = (int)pieces.size();
    w.batch.n_decode_segments = n_decode;
    w.batch.segments = (const struct device_segment *)w.segments_dev.dev;
    w.batch.tables = (const int32_t *)w.tables_dev.dev;
    struct guarded sequences_dev = to_device(sequences);
    fill_queries<<<dim3(512, (unsigned)pieces.size()), 256, 0, card.stream>>>(
        w.batch, (float *)w.qkv.dev, w.width, query_columns, (const int32_t *)sequences_dev.dev);
    fill_pages<<<dim3(2048, (unsigned)pieces.size()), 256, 0, card.stream>>>(w.batch, shape, w.kv,
                                                                             (const int32_t *)sequences_dev.dev);
    finish(&card);
    guarded_free_dev(sequences_dev, "sequences");
    return w;
}

static void world_free(struct world *w)
{
    guarded_free_dev(w->qkv, "qkv");
    guarded_free_dev(w->pool, "pages");
    guarded_free_dev(w->tables_dev, "tables");
    guarded_free_dev(w->segments_dev, "segments");
    guarded_free_dev(w->act, "output");
}

static void attend(const struct world *w)
{
    op_attn_prefill(&card, &w->batch, &w->shape, (const float *)w->qkv.dev, w->kv, w->act.dev);
}

/* ---- outputs ---- */

/* Bits of the output, [rows][64 * blocks]; decode rows must still be poison, and so must the unused rows of the last tile. */
static std::vector<uint16_t> output_bits(const struct world *w)
{
    finish(&card);
    const int width = w->shape.n_heads * w->shape.head_dim, columns = act_blocks(width) * ACT_BLOCK;
    const std::vector<uint16_t> all = from_device<uint16_t>(w->act.dev, w->act_bytes / 2);
    const int prefill = w->rows - w->decode_rows, tiles = (prefill + ACT_TILE_ROWS - 1) / ACT_TILE_ROWS;
    std::vector<uint16_t> bits((size_t)w->rows * columns);
    for (int i = 0; i < w->decode_rows * columns; i++)
        if (all[i] != 0xffff) fail_msg("decode row %d was written", i / columns);
    for (int r = 0; r < tiles * ACT_TILE_ROWS; r++)
        for (int k = 0; k < columns; k++) {
            const int p = act_place(k % 64), in_tile = r % ACT_TILE_ROWS;
            const uint16_t x = all[act_prefill_offset(w->decode_rows, width) / 2 +
                                   ((size_t)(r / ACT_TILE_ROWS) * (columns / 64) + k / 64) * (ACT_TILE_BYTES / 2) +
                                   in_tile * 64 + ((p / 8 ^ in_tile % 8) * 8) + p % 8];
            if (r < prefill)
                bits[(size_t)(w->decode_rows + r) * columns + k] = x;
            else if (x != 0xffff)
                fail_msg("row %d past the last was written", r);
        }
    for (int r = w->decode_rows; r < w->rows; r++)
        for (int k = width; k < columns; k++)
            if (bits[(size_t)r * columns + k]) fail_msg("row %d: column %d that fills a block is not zero", r, k);
    return bits;
}

static double bf16_value(uint16_t bits)
{
    const uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return (double)f / ACT_SCALE;
}

/* ---- the reference ---- */

struct probe {
    int segment, row; /* of the segment */
};

__device__ static double rounded(float x, bool to_f16)
{
    return to_f16 ? (double)__half2float(__float2half(x)) : (double)x;
}

__global__ static void reference(struct device_batch b, struct kern_attn_shape shape, struct kern_kv_layer kv,
                                 const float *qkv, int width, const struct probe *probes, bool to_f16, double *out)
{
    __shared__ double probs[256], total;
    const struct probe probe = probes[blockIdx.x];
    const struct device_segment s = b.segments[probe.segment];
    const int head = blockIdx.y, dim = shape.head_dim, kv_head = head / (shape.n_heads / shape.n_kv_heads);
    const int n_keys = s.position_first + probe.row + 1, half = kv_page_half_bytes(shape.kv, dim), d = threadIdx.x;
    const float *q = qkv + (size_t)(s.row_first + probe.row) * width + head * dim * (shape.gated ? 2 : 1);
    double o = 0, sum = 0;
    for (int first = 0; first < n_keys; first += 256) {
        const int t = first + threadIdx.x;
        __syncthreads();
        probs[threadIdx.x] = 0;
        if (t < n_keys) {
            const char *keys = kv_page_keys(kv, b.tables[s.table_first + t / 64], kv_head, shape.kv, dim);
            double score = 0;
            for (int i = 0; i < dim; i++)
                score += rounded(q[i], to_f16) * rounded(kv_page_key(shape.kv, keys, dim, t % 64, i), to_f16);
            probs[threadIdx.x] = exp(score / sqrt((double)dim));
        }
        __syncthreads();
        for (int i = 0; i < 256 && first + i < n_keys; i++) {
            const char *keys = kv_page_keys(kv, b.tables[s.table_first + (first + i) / 64], kv_head, shape.kv, dim);
            sum += probs[i];
            if (d < dim)
                o += probs[i] * rounded(kv_page_value(shape.kv, keys + half, dim, (first + i) % 64, d), to_f16);
        }
    }
    if (d == 0) total = sum;
    __syncthreads();
    if (d >= dim) return;
    o /= total;
    if (shape.gated) o /= 1 + exp(-(double)q[dim + d]);
    out[((size_t)blockIdx.x * shape.n_heads + head) * dim + d] = o;
}

static const char *shape_text(const struct kern_attn_shape *s)
{
    static char text[100];
    snprintf(text, sizeof text, "%d/%d heads x %d %s%s", s->n_heads, s->n_kv_heads, s->head_dim, kv_format_name(s->kv),
             s->gated ? " gated" : "");
    return text;
}

/* Every step-th row of each prefill segment, and its last 3. Returns the number of wrong outputs. */
static int check(const struct world *w, const std::vector<uint16_t> &bits, int step)
{
    std::vector<probe> probes;
    for (int i = w->batch.n_decode_segments; i < w->batch.n_segments; i++)
        for (int r = 0; r < w->segments[i].rows; r++)
            if (r % step == 0 || r >= w->segments[i].rows - 3) probes.push_back({i, r});
    const int dim = w->shape.head_dim, width = w->shape.n_heads * dim, columns = act_blocks(width) * ACT_BLOCK;
    const bool to_f16 = op_attn_wgmma_serves(&card, &w->shape);
    struct guarded probes_dev = to_device(probes), out_dev = guarded_new_dev(probes.size() * width * sizeof(double));
    reference<<<dim3((unsigned)probes.size(), (unsigned)w->shape.n_heads), 256, 0, card.stream>>>(
        w->batch, w->shape, w->kv, (const float *)w->qkv.dev, w->width, (const probe *)probes_dev.dev, to_f16,
        (double *)out_dev.dev);
    finish(&card);
    const std::vector<double> expected = from_device<double>(out_dev.dev, probes.size() * width);
    const double floor = to_f16 ? 5e-4 : 3e-5;
    int wrong = 0;
    double worst = 0;
    for (size_t i = 0; i < probes.size() * w->shape.n_heads; i++) {
        double most = 0;
        for (int d = 0; d < dim; d++) most = fmax(most, fabs(expected[i * dim + d]));
        const struct probe p = probes[i / w->shape.n_heads];
        const int head = (int)(i % w->shape.n_heads), row = w->segments[p.segment].row_first + p.row;
        for (int d = 0; d < dim; d++) {
            const double want = expected[i * dim + d], got = bf16_value(bits[(size_t)row * columns + head * dim + d]);
            const double half_ulp = want ? ldexp(1, ilogb(want) - 8) : 0, excess = (fabs(got - want) - half_ulp) / most;
            if (excess > worst) worst = excess;
            if (excess <= floor) continue;
            if (wrong++ < 5)
                print_message("%s: segment %d (position %d) row %d head %d d %d: %.6g instead of %.6g (largest %.3g)\n",
                              shape_text(&w->shape), p.segment, w->segments[p.segment].position_first, p.row, head, d,
                              got, want, most);
        }
    }
    print_message("%s, %d rows: worst error beyond bf16 %.2e of a row's largest, %d of %zu wrong\n",
                  shape_text(&w->shape), w->rows, worst, wrong, expected.size());
    guarded_free_dev(probes_dev, "probes");
    guarded_free_dev(out_dev, "reference");
    return wrong;
}

/* ---- tests ---- */

static struct kern_attn_shape shape_of(int heads, int kv_heads, int dim, enum kv_format f, bool gated)
{
    return {heads, kv_heads, dim, dim, false, f, gated};
}

static const std::vector<piece> mixed = {{1, 1, 70, true},   {2, 3, 9, true},    {3, 100, 0, false},
                                         {4, 64, 64, false}, {5, 1, 192, false}, {6, 71, 448, false},
                                         {7, 130, 0, false}};

static int oracle(struct kern_attn_shape shape, const std::vector<piece> &pieces, int step)
{
    struct world w = world_new(shape, pieces, 7);
    attend(&w);
    const int wrong = check(&w, output_bits(&w), step);
    world_free(&w);
    return wrong;
}

static void test_plain_shapes(void **state)
{
    (void)state;
    int wrong = 0;
    for (int f = 0; f < KV_FORMATS; f++) {
        wrong += oracle(shape_of(9, 3, 64, (enum kv_format)f, false), mixed, 7);
        wrong += oracle(shape_of(6, 2, 64, (enum kv_format)f, true), mixed, 7);
        wrong += oracle(shape_of(4, 1, 80, (enum kv_format)f, true), mixed, 9);
        wrong += oracle(shape_of(3, 3, 16, (enum kv_format)f, false), mixed, 9);
        wrong += oracle(shape_of(2, 1, 240, (enum kv_format)f, true), mixed, 9);
    }
    wrong += oracle(shape_of(12, 2, 256, KV_F32, true), mixed, 9);
    assert_int_equal(wrong, 0);
}

static void test_large_heads(void **state)
{
    (void)state;
    int wrong = 0;
    for (int f = 0; f < KV_FORMATS; f++)
        for (int dim = 64; dim <= 256; dim *= 2) {
            wrong += oracle(shape_of(12, 2, dim, (enum kv_format)f, true), mixed, 7);
            wrong += oracle(shape_of(6, 2, dim, (enum kv_format)f, false), mixed, 7);
        }
    wrong += oracle(shape_of(24, 4, 256, KV_INT8, true), mixed, 3);
    wrong += oracle(shape_of(2, 2, 256, KV_INT8, true), mixed, 3);
    assert_int_equal(wrong, 0);
}

static void test_long(void **state)
{
    (void)state;
    int wrong = 0;
    wrong += oracle(shape_of(24, 4, 256, KV_INT8, true), {{1, 2048, 0, false}}, 101);
    wrong += oracle(shape_of(12, 2, 256, KV_F16, true), {{1, 2048, 4096, false}}, 201);
    wrong += oracle(shape_of(24, 4, 256, KV_INT8, true), {{9, 1, 5, true}, {1, 2011, 30720, false}}, 301);
    wrong += oracle(shape_of(9, 3, 64, KV_F16, false), {{1, 2048, 4096, false}}, 201);
    assert_int_equal(wrong, 0);
}

/* The output of one prompt, [positions][columns], computed in chunks, among other pieces or alone. */
struct cut {
    const char *name;
    int chunk;
    bool among_others, poison_others;
    uint64_t page_seed;
};

static std::vector<uint16_t> prompt_bits(struct kern_attn_shape shape, int n_positions, struct cut cut)
{
    const int columns = act_blocks(shape.n_heads * shape.head_dim) * ACT_BLOCK;
    std::vector<uint16_t> all;
    for (int first = 0; first < n_positions; first += cut.chunk) {
        const piece own = {1, std::min(cut.chunk, n_positions - first), first, false};
        std::vector<piece> pieces = {own};
        if (cut.among_others) pieces = {{4, 2, 33, true}, {5, 77, 128, false}, own, {6, 9, 0, false}};
        struct world w = world_new(shape, pieces, cut.page_seed);
        if (cut.poison_others)
            for (size_t i = 0; i < pieces.size(); i++)
                if (pieces[i].sequence != own.sequence)
                    CHECK_CUDA(cudaMemset((float *)w.qkv.dev + (size_t)w.segments[i].row_first * w.width, 0xff,
                                          (size_t)pieces[i].rows * w.width * sizeof(float)));
        CHECK_CUDA(cudaDeviceSynchronize());
        attend(&w);
        const std::vector<uint16_t> bits = output_bits(&w);
        const size_t from = (size_t)w.segments[cut.among_others ? 2 : 0].row_first * columns;
        all.insert(all.end(), bits.begin() + from, bits.begin() + from + (size_t)own.rows * columns);
        world_free(&w);
    }
    return all;
}

static int count_differences(const char *name, const std::vector<uint16_t> &want, const std::vector<uint16_t> &got,
                             int columns)
{
    int different = 0;
    for (size_t i = 0; i < got.size(); i++)
        if (want[i] != got[i] && different++ < 3)
            print_message("%s: position %zu column %zu: %04x instead of %04x\n", name, i / columns, i % columns, got[i],
                          want[i]);
    return different;
}

static int compare_cuts(struct kern_attn_shape shape, int n_positions)
{
    const int columns = act_blocks(shape.n_heads * shape.head_dim) * ACT_BLOCK;
    const std::vector<uint16_t> whole = prompt_bits(shape, n_positions, {"whole", 1 << 20, false, false, 1});
    const struct cut cuts[] = {{"whole, again", 1 << 20, false, false, 1}, {"other pages", 1 << 20, false, false, 99},
                               {"chunks of 512", 512, false, false, 3},    {"chunks of 64", 64, false, false, 4},
                               {"among others", 512, true, false, 5},      {"among NaN", 512, true, true, 6}};
    int different = 0;
    for (size_t i = 0; i < whole.size(); i++)
        if ((whole[i] & 0x7f80) == 0x7f80 && different++ < 3)
            print_message("position %zu column %zu is not finite\n", i / columns, i % columns);
    for (const struct cut &c : cuts)
        different += count_differences(c.name, whole, prompt_bits(shape, n_positions, c), columns);
    /* a shorter prompt: the same rows as the longer one's first */
    const std::vector<uint16_t> shorter = prompt_bits(shape, n_positions - 75, {"shorter", 1 << 20, false, false, 8});
    different += count_differences("shorter", whole, shorter, columns);
    print_message("%s: %d positions, %d differences\n", shape_text(&shape), n_positions, different);
    return different;
}

static void test_bits(void **state)
{
    (void)state;
    int different = compare_cuts(shape_of(12, 2, 256, KV_INT8, true), 2048);
    different += compare_cuts(shape_of(6, 2, 256, KV_F16, false), 1100);
    different += compare_cuts(shape_of(9, 3, 64, KV_F16, false), 700);
    different += compare_cuts(shape_of(6, 2, 64, KV_INT8, true), 700);
    different += compare_cuts(shape_of(4, 2, 256, KV_F32, true), 700);
    assert_int_equal(different, 0);
}

/* A query, key or value that is NaN makes rows NaN that see it, and no others. */
static int poison(struct kern_attn_shape shape, const char *what, int at)
{
    const int columns = act_blocks(shape.n_heads * shape.head_dim) * ACT_BLOCK, width = shape.n_heads * shape.head_dim;
    struct world w = world_new(shape, {{1, 150, 64, false}}, 3);
    attend(&w);
    const std::vector<uint16_t> clean = output_bits(&w);
    const int row = at - 64, dim = shape.head_dim, slot = at % 64;
    char *keys = (char *)w.pool.dev + (size_t)w.tables[at / 64] * w.kv.page_bytes,
         *values = keys + kv_page_half_bytes(shape.kv, dim);
    const int scale_bytes = shape.kv == KV_INT8 ? 2 : kv_page_cell_bytes(shape.kv);
    if (*what == 'q') CHECK_CUDA(cudaMemset((float *)w.qkv.dev + (size_t)row * w.width, 0xff, 4));
    if (*what == 'k')
        CHECK_CUDA(cudaMemset(
            keys + (shape.kv == KV_INT8 ? kv_page_key_scale_at(dim, slot, 0) : kv_page_key_at(shape.kv, dim, slot, 5)),
            0xff, (size_t)scale_bytes));
    if (*what == 'v')
        CHECK_CUDA(cudaMemset(values + (shape.kv == KV_INT8 ? kv_page_value_scale_at(dim, slot, 0)
                                                            : kv_page_value_at(shape.kv, dim, slot, 5)),
                              0xff, (size_t)scale_bytes));
    CHECK_CUDA(cudaMemset(w.act.dev, 0xff, w.act_bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
    attend(&w);
    const std::vector<uint16_t> bits = output_bits(&w);
    int wrong = 0;
    for (int r = 0; r < 150; r++) {
        bool same = true;
        for (int k = 0; k < width; k++) same = same && bits[(size_t)r * columns + k] == clean[(size_t)r * columns + k];
        const bool sees = *what == 'q' ? r == row : r >= row;
        const bool is_nan = (bits[(size_t)r * columns + 5] & 0x7fff) > 0x7f80;
        if ((sees ? is_nan : same) || wrong++ > 3) continue;
        print_message("%s: %s of position %d is NaN: row %d (position %d) is %s\n", shape_text(&shape), what, at, r,
                      r + 64,
                      is_nan ? "NaN"
                      : same ? "as without"
                             : "finite, but different");
    }
    world_free(&w);
    return wrong;
}

static void test_poison(void **state)
{
    (void)state;
    int wrong = 0;
    for (int f = 0; f < KV_FORMATS; f++)
        for (int dim = 64; dim <= 256; dim *= 2)
            for (const char *what : {"query", "key", "value"}) {
                wrong += poison(shape_of(2, 1, dim, (enum kv_format)f, false), what, 64 + 40);
                wrong += poison(shape_of(2, 1, dim, (enum kv_format)f, false), what, 128 + 81);
            }
    assert_int_equal(wrong, 0);
}

/* ---- speed ---- */

static void bench(struct kern_attn_shape shape, int context, int rows)
{
    struct world w = world_new(shape, {{1, rows, context - rows, false}}, 5);
    cudaEvent_t begin, end;
    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    std::vector<double> times;
    for (int i = 0; i < 6; i++) {
        const int launches = context > 40000 ? 1 : 10;
        CHECK_CUDA(cudaEventRecord(begin, card.stream));
        for (int j = 0; j < launches; j++) attend(&w);
        CHECK_CUDA(cudaEventRecord(end, card.stream));
        finish(&card);
        float ms;
        CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
        if (i) times.push_back(ms * 1000 / launches);
    }
    std::sort(times.begin(), times.end());
    double keys = 0;
    for (int r = 0; r < rows; r++) keys += context - rows + r + 1;
    const double flop = 4.0 * keys * shape.head_dim * shape.n_heads, us = times[times.size() / 2];
    printf("%-32s %5d rows to %7d keys: %9.1f us, %6.1f TFLOP/s\n", shape_text(&shape), rows, context, us,
           flop / us * 1e-6);
    fflush(stdout);
    world_free(&w);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
}

static int bench_all(void)
{
    for (enum kv_format f : {KV_INT8, KV_F16})
        for (int ranks = 1; ranks <= 2; ranks++)
            for (int context : {2048, 32768, 131072, 190464})
                bench(shape_of(24 / ranks, 4 / ranks, 256, f, true), context, 2048);
    bench(shape_of(12, 2, 256, KV_INT8, true), 32768, 512);
    bench(shape_of(12, 2, 256, KV_INT8, true), 32768, 64);
    bench(shape_of(9, 3, 64, KV_F16, false), 2048, 2048);
    return 0;
}

int main(int argc, char **argv)
{
    card = open_card();
    if (argc > 1 && !strcmp(argv[1], "bench")) return bench_all();
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain_shapes), cmocka_unit_test(test_large_heads), cmocka_unit_test(test_long),
        cmocka_unit_test(test_bits),         cmocka_unit_test(test_poison),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
