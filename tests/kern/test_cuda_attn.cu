/* test_cuda_attn: appending keys and values to pages, and decode attention, against float64 on the host.
 *
 * Pages are filled here, cell by cell as kv_page.cuh has it, and placed at random among pages of NaN. A query head's score is
 * about 1 for ordinary keys; one key of its own, its needle, outweighs them all, at places where a tree could lose it: split
 * and page borders, the first and the last key. The rest of the program is a benchmark: test_cuda_attn bench. */
#include <algorithm>

#include "act.cuh"
#include "cuda_fixture.cuh"
#include "kv_page.cuh"
#include "op_attn.h"

static struct op_context card;

/* ---- pages on the host ---- */

static float half_value(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }

static float cell_value(enum kv_format f, const char *cell, const char *scale)
{
    uint16_t h;
    float x;
    switch (f) {
    case KV_F32: memcpy(&x, cell, 4); return x;
    case KV_F16: memcpy(&h, cell, 2); return half_value(h);
    case KV_BF16: {
        uint32_t u = 0;
        memcpy((char *)&u + 2, cell, 2);
        memcpy(&x, &u, 4);
        return x;
    }
    default: memcpy(&h, scale, 2); return (float)((int)*(const uint8_t *)cell - KV_CODE_BIAS) * half_value(h);
    }
}

static void put_cell(enum kv_format f, char *cell, float x)
{
    const uint16_t h = __half_as_ushort(__float2half_rn(x));
    const float b = bf16_round(x);
    if (f == KV_F32) memcpy(cell, &x, 4);
    if (f == KV_F16) memcpy(cell, &h, 2);
    if (f == KV_BF16) memcpy(cell, (const char *)&b + 2, 2);
}

/* A sequence's pages in logical order, and its rows of the batch. */
struct sequence {
    int position, rows; /* position of the first row */
    std::vector<char> pages;
};

struct place {
    const struct kern_attn_shape *s;
    bool values;
    int kv_head;
};

static char *head_half(std::vector<char> &pages, struct place p, int position)
{
    const size_t half = (size_t)kv_page_half_bytes(p.s->kv, p.s->head_dim);
    return pages.data() + (size_t)(position / KV_PAGE_TOKENS) * op_kv_page_bytes(p.s) +
           (size_t)(2 * p.kv_head + p.values) * half;
}

static void cell_places(std::vector<char> &pages, struct place p, int position, int d, char **cell, char **scale)
{
    char *at = head_half(pages, p, position);
    const int slot = position % KV_PAGE_TOKENS, dim = p.s->head_dim, run = d / KV_INT8_RUN;
    *cell = at + (p.values ? kv_page_value_at(p.s->kv, dim, slot, d) : kv_page_key_at(p.s->kv, dim, slot, d));
    *scale = at + (p.values ? kv_page_value_scale_at(dim, slot, run) : kv_page_key_scale_at(dim, slot, run));
}

/* As stored. */
static double stored(std::vector<char> &pages, struct place p, int position, int d)
{
    char *cell, *scale;
    cell_places(pages, p, position, d, &cell, &scale);
    return cell_value(p.s->kv, cell, scale);
}

/* code * scale, exactly where the format can. */
static void put(std::vector<char> &pages, struct place p, int position, int d, int code, float scale)
{
    char *cell, *scale_at;
    cell_places(pages, p, position, d, &cell, &scale_at);
    const uint16_t h = __half_as_ushort(__float2half_rn(scale));
    if (p.s->kv != KV_INT8) {
        put_cell(p.s->kv, cell, (float)code * scale);
        return;
    }
    memcpy(scale_at, &h, 2);
    *(uint8_t *)cell = (uint8_t)(code + KV_CODE_BIAS);
}

static void fill_position(std::vector<char> &pages, const struct kern_attn_shape *s, int position, uint64_t *random)
{
    for (int i = 0; i < 2 * s->n_kv_heads; i++) {
        const struct place p = {s, i % 2 == 1, i / 2};
        float scale = 0;
        uint64_t bits = 0;
        for (int d = 0; d < s->head_dim; d++) {
            if (d % KV_INT8_RUN == 0) scale = 0.024f * (1.0f + 0.3f * random_float(random));
            if (d % 8 == 0) bits = random_next(random);
            const int code = (int)(bits >> d % 8 * 8 & 255) - 128;
            put(pages, p, position, d, code < -127 ? -127 : code, scale);
        }
    }
}

static void poison_position(std::vector<char> &pages, const struct kern_attn_shape *s, int position)
{
    for (int i = 0; i < 2 * s->n_kv_heads; i++)
        for (int d = 0; d < s->head_dim; d++) {
            char *cell, *scale;
            cell_places(pages, (struct place){s, i % 2 == 1, i / 2}, position, d, &cell, &scale);
            memset(cell, 0xff, (size_t)kv_page_cell_bytes(s->kv));
            if (s->kv == KV_INT8) memset(scale, 0xff, 2);
        }
}

static size_t row_width(const struct kern_attn_shape *s)
{
    return (size_t)s->head_dim * (size_t)(s->n_heads * (s->gated ? 2 : 1) + 2 * s->n_kv_heads);
}

static const float *query(const struct kern_attn_shape *s, const std::vector<float> &qkv, int row, int head)
{
    return qkv.data() + (size_t)row * row_width(s) + (size_t)(head * s->head_dim * (s->gated ? 2 : 1));
}

static bool is_fast(const struct kern_attn_shape *s)
{
    return s->kv == KV_INT8 && s->head_dim == 256 && s->n_heads / s->n_kv_heads <= 8;
}

/* ---- a batch in device memory ---- */

struct batch_memory {
    struct device_batch batch;
    struct guarded rows, segments, tables, pool;
    struct kern_kv_layer kv;
};

/* Physical pages in an order drawn from seed, as many free ones between, all of NaN. */
static struct batch_memory make_batch(const struct kern_attn_shape *s, std::vector<struct sequence> &sequences,
                                      uint64_t seed)
{
    struct batch_memory m = {};
    std::vector<struct device_row> rows;
    std::vector<struct device_segment> segments;
    const size_t page_bytes = op_kv_page_bytes(s);
    int n_pages = 0, longest = 0;
    for (size_t i = 0; i < sequences.size(); i++) {
        const struct sequence *q = &sequences[i];
        segments.push_back((struct device_segment){(int32_t)rows.size(), q->rows, q->position, 0, n_pages, 0});
        for (int r = 0; r < q->rows; r++) rows.push_back((struct device_row){(int32_t)i, q->position + r});
        n_pages += (int)(q->pages.size() / page_bytes);
        longest = std::max(longest, q->position + q->rows);
    }
    std::vector<int32_t> order((size_t)(2 * n_pages + 3));
    for (size_t i = 0; i < order.size(); i++) order[i] = (int32_t)i;
    for (size_t i = order.size() - 1; i; i--) std::swap(order[i], order[random_next(&seed) % (i + 1)]);
    m.pool = guarded_new_dev(order.size() * page_bytes);
    int done = 0;
    for (auto &q : sequences)
        for (size_t i = 0; i < q.pages.size() / page_bytes; i++)
            CHECK_CUDA(cudaMemcpy((char *)m.pool.dev + (size_t)order[(size_t)done++] * page_bytes,
                                  q.pages.data() + i * page_bytes, page_bytes, cudaMemcpyHostToDevice));
    order.resize((size_t)n_pages);
    m.rows = to_device(rows);
    m.segments = to_device(segments);
    m.tables = to_device(order);
    m.kv = (struct kern_kv_layer){m.pool.dev, page_bytes};
    m.batch = (struct device_batch){(int)rows.size(),
                                    (int)rows.size(),
                                    (int)segments.size(),
                                    (int)segments.size(),
                                    longest,
                                    NULL,
                                    (const struct device_row *)m.rows.dev,
                                    (const struct device_segment *)m.segments.dev,
                                    (const int32_t *)m.tables.dev,
                                    NULL};
    return m;
}

static void free_batch(struct batch_memory m)
{
    guarded_free_dev(m.rows, "rows");
    guarded_free_dev(m.segments, "segments");
    guarded_free_dev(m.tables, "tables");
    guarded_free_dev(m.pool, "pages");
}

/* Attention of the batch: act rows as stored, 64 * blocks bf16 values each. */
static std::vector<uint16_t> attend(const struct kern_attn_shape *s, const struct batch_memory *m,
                                    const std::vector<float> &qkv)
{
    const int width = s->n_heads * s->head_dim, rows = m->batch.decode_rows;
    struct guarded q = to_device(qkv), act = guarded_new_dev(act_buffer_bytes(rows, 0, width));
    struct guarded scratch = guarded_new_dev(op_attn_decode_scratch_bytes(s, rows));
    CHECK_CUDA(cudaDeviceSynchronize()); /* poisoning runs on another stream */
    op_attn_decode(&card, &m->batch, s, (const float *)q.dev, m->kv, scratch.dev, act.dev);
    finish(&card);
    std::vector<uint16_t> out = from_device<uint16_t>(act.dev, (size_t)rows * (size_t)act_blocks(width) * ACT_BLOCK);
    guarded_free_dev(q, "qkv");
    guarded_free_dev(act, "act");
    guarded_free_dev(scratch, "scratch");
    return out;
}

static double act_value(uint16_t bits)
{
    uint32_t u = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &u, 4);
    return (double)x / (double)ACT_SCALE;
}

/* ---- oracle ---- */

/* One head of one row. magnitude: the sums with magnitudes of values. */
static void oracle_head(const struct kern_attn_shape *s, std::vector<char> &pages, const float *q, int position,
                        int head, std::vector<double> &out, std::vector<double> &magnitude)
{
    const int dim = s->head_dim, kv_head = head / (s->n_heads / s->n_kv_heads);
    const float scale = 1.44269504f / sqrtf((float)dim);
    std::vector<double> scores((size_t)position + 1), rounded((size_t)dim);
    double most = -INFINITY, sum = 0;
    for (int d = 0; d < dim; d++) /* the fast kernel's queries are float16 */
        rounded[(size_t)d] =
            is_fast(s) ? half_value(__half_as_ushort(__float2half_rn(q[d] * scale))) : (double)q[d] * scale;
    for (int j = 0; j <= position; j++) {
        double x = 0;
        for (int d = 0; d < dim; d++) x += rounded[(size_t)d] * stored(pages, (struct place){s, false, kv_head}, j, d);
        scores[(size_t)j] = x;
        most = x > most ? x : most;
    }
    out.assign((size_t)dim, 0.0);
    magnitude.assign((size_t)dim, 0.0);
    for (int j = 0; j <= position; j++) {
        const double p = exp2(scores[(size_t)j] - most);
        sum += p;
        if (p < 1e-18) continue;
        for (int d = 0; d < dim; d++) {
            const double v = stored(pages, (struct place){s, true, kv_head}, j, d);
            out[(size_t)d] += p * v;
            magnitude[(size_t)d] += p * fabs(v);
        }
    }
    for (int d = 0; d < dim; d++) {
        const double gate = s->gated ? 1.0 / (1.0 + exp(-(double)q[dim + d])) : 1.0;
        out[(size_t)d] *= gate / sum;
        magnitude[(size_t)d] *= gate / sum;
    }
}

struct tally {
    int bad;
    double worst; /* of tolerance */
};

static void check_head(const struct kern_attn_shape *s, std::vector<char> &pages, const std::vector<float> &qkv,
                       int row, int position, int head, const std::vector<uint16_t> &act, struct tally *t)
{
    std::vector<double> want, magnitude;
    oracle_head(s, pages, query(s, qkv, row, head), position, head, want, magnitude);
    const size_t width = (size_t)act_blocks(s->n_heads * s->head_dim) * ACT_BLOCK;
    /* fast: two roundings of a probability to float16, which may be subnormal, and one of a split; bfloat16 at the end */
    const double relative = is_fast(s) ? 0x1.9p-10 : 1e-4, least = is_fast(s) ? 6e-8 * sqrt(position + 1.0) : 1e-30;
    for (int d = 0; d < s->head_dim; d++) {
        const double got = act_value(act[(size_t)row * width + (size_t)(head * s->head_dim + d)]),
                     ref = want[(size_t)d];
        if (isnan(got)) continue;
        const double share = fabs(got - ref) / (0x1.02p-8 * fabs(ref) + relative * magnitude[(size_t)d] + least);
        if (share <= t->worst) continue;
        t->worst = share;
        if (share <= 1) continue;
        if (t->bad++ < 4)
            printf("  %d/%d x %d %s row %d position %d head %d dim %d: expected %.8g got %.8g (%.2f of tolerance)\n",
                   s->n_heads, s->n_kv_heads, s->head_dim, kv_format_name(s->kv), row, position, head, d, ref, got,
                   share);
    }
    for (int d = 0; d < s->head_dim; d++)
        if (isnan(act_value(act[(size_t)row * width + (size_t)(head * s->head_dim + d)]))) {
            if (t->bad++ < 4)
                printf("  %s row %d position %d head %d dim %d: NaN\n", kv_format_name(s->kv), row, position, head, d);
            break;
        }
}

/* ---- decode attention ---- */

/* Each query head's needle; later rows' needles may lie past the rows before them. */
static void plant_needles(const struct kern_attn_shape *s, std::vector<struct sequence> &sequences,
                          const std::vector<float> &qkv)
{
    int row = 0, turn = 0;
    for (auto &q : sequences)
        for (int r = 0; r < q.rows; r++, row++)
            for (int h = 0; h < s->n_heads; h++, turn++) {
                const int p = q.position + r, step = KV_PAGE_TOKENS * (p / 8448 + 1 < 2 ? 2 : p / 8448 + 1);
                const int last = p / step * step, from_last[6] = {p, last, last - 1, 0, last - step, last / 2};
                const int at = from_last[turn % 6] < 0 ? p / 3 : from_last[turn % 6];
                const float *x = query(s, qkv, row, h);
                for (int d = 0; d < s->head_dim; d++)
                    put(q.pages, (struct place){s, false, h / (s->n_heads / s->n_kv_heads)}, at, d,
                        (int)lrintf(127.0f * x[d]), 0.024f);
            }
}

static std::vector<float> random_rows(size_t n, uint64_t *random)
{
    std::vector<float> v(n);
    for (auto &x : v) x = random_float(random);
    return v;
}

static void fill_sequences(const struct kern_attn_shape *s, std::vector<struct sequence> &sequences, uint64_t *random)
{
    for (auto &q : sequences) {
        const int n = q.position + q.rows;
        q.pages.assign((size_t)((n + 63) / 64) * op_kv_page_bytes(s), (char)0xff);
        for (int i = 0; i < n; i++) fill_position(q.pages, s, i, random);
    }
}

static int count_rows(const std::vector<struct sequence> &sequences)
{
    int n = 0;
    for (auto &q : sequences) n += q.rows;
    return n;
}

/* Row `row` of the batch alone, on other pages; with_poison: as the first of several rows, the others and their keys NaN. */
static std::vector<uint16_t> attend_alone(const struct kern_attn_shape *s, const struct sequence *q,
                                          const std::vector<float> &qkv, int row, int r, bool with_poison)
{
    const size_t width = row_width(s);
    std::vector<struct sequence> one(1);
    one[0] = (struct sequence){q->position + r, with_poison ? q->rows - r : 1, q->pages};
    std::vector<float> rows(qkv.begin() + (ptrdiff_t)((size_t)row * width),
                            qkv.begin() + (ptrdiff_t)((size_t)(row + 1) * width));
    if (with_poison)
        for (int i = r + 1; i < q->rows; i++) {
            poison_position(one[0].pages, s, q->position + i);
            rows.resize(rows.size() + width, NAN);
        }
    struct batch_memory m = make_batch(s, one, 77 + (uint64_t)row);
    std::vector<uint16_t> act = attend(s, &m, rows);
    free_batch(m);
    act.resize((size_t)act_blocks(s->n_heads * s->head_dim) * ACT_BLOCK);
    return act;
}

static int compare_bits(const char *what, const struct kern_attn_shape *s, const uint16_t *want, const uint16_t *got,
                        int row)
{
    const int n = act_blocks(s->n_heads * s->head_dim) * ACT_BLOCK;
    for (int i = 0; i < n; i++)
        if (want[i] != got[i]) {
            printf("  %s: %d/%d x %d %s row %d column %d: bits %04x and %04x\n", what, s->n_heads, s->n_kv_heads,
                   s->head_dim, kv_format_name(s->kv), row, i, want[i], got[i]);
            return 1;
        }
    return 0;
}

/* places: first position and rows of each segment. */
static int run_decode(const struct kern_attn_shape *s, const std::vector<struct sequence> &places, uint64_t seed)
{
    std::vector<struct sequence> sequences = places;
    struct tally t = {};
    int bits = 0, row = 0;
    const int rows = count_rows(sequences), width = s->n_heads * s->head_dim;
    const size_t act_width = (size_t)act_blocks(width) * ACT_BLOCK;
    fill_sequences(s, sequences, &seed);
    const std::vector<float> qkv = random_rows((size_t)rows * row_width(s), &seed);
    plant_needles(s, sequences, qkv);
    struct batch_memory m = make_batch(s, sequences, seed);
    const std::vector<uint16_t> act = attend(s, &m, qkv);
    free_batch(m);
    for (auto &q : sequences)
        for (int r = 0; r < q.rows; r++, row++) {
            const int position = q.position + r, skip = position > 4000 ? (s->n_heads + 1) / 2 + 1 : 1;
            if (position > 4000 && r && r < q.rows - 1) continue;
            for (int h = row % skip; h < s->n_heads; h += skip) check_head(s, q.pages, qkv, row, position, h, act, &t);
        }
    for (int i = 0; i < rows; i++)
        for (size_t k = (size_t)width; k < act_width; k++)
            if (act[(size_t)i * act_width + k] && t.bad++ < 4)
                printf("  row %d: column %zu past the width is not 0\n", i, k);
    row = 0;
    for (auto &q : sequences)
        for (int r = 0; r < q.rows; r++, row++) {
            const uint16_t *want = act.data() + (size_t)row * act_width;
            bits += compare_bits("alone", s, want, attend_alone(s, &q, qkv, row, r, false).data(), row);
            if (q.rows - r > 1)
                bits += compare_bits("NaN behind", s, want, attend_alone(s, &q, qkv, row, r, true).data(), row);
        }
    printf("decode %2d/%d x %3d %-4s %s: %2d rows, worst %.2f of tolerance, %d wrong, %d bits\n", s->n_heads,
           s->n_kv_heads, s->head_dim, kv_format_name(s->kv), s->gated ? "gated" : "plain", rows, t.worst, t.bad, bits);
    return t.bad + bits;
}

static struct kern_attn_shape shape(int heads, int kv_heads, int dim, enum kv_format kv, bool gated)
{
    return (struct kern_attn_shape){heads, kv_heads, dim, dim / 4 / 2 * 2, false, kv, gated};
}

static void test_decode(void **state)
{
    (void)state;
    const struct kern_attn_shape shapes[] = {
        shape(12, 2, 256, KV_INT8, true), shape(24, 4, 256, KV_INT8, true),  shape(9, 3, 64, KV_F16, false),
        shape(6, 2, 64, KV_F32, false),   shape(3, 1, 64, KV_BF16, false),   shape(6, 2, 64, KV_INT8, true),
        shape(3, 1, 64, KV_INT8, true),   shape(12, 2, 256, KV_F16, true),   shape(7, 1, 48, KV_INT8, true),
        shape(11, 1, 80, KV_BF16, false), shape(16, 2, 256, KV_INT8, false), shape(2, 2, 256, KV_INT8, true),
        shape(12, 2, 256, KV_F32, true),  shape(1, 1, 240, KV_F16, true),
    };
    const std::vector<struct sequence> near = {{0, 1, {}},   {0, 2, {}},   {1, 1, {}},   {62, 3, {}},
                                               {63, 1, {}},  {64, 1, {}},  {125, 6, {}}, {127, 1, {}},
                                               {128, 1, {}}, {129, 4, {}}, {200, 5, {}}, {1000, 2, {}}};
    const std::vector<struct sequence> far = {{8446, 5, {}}, {16893, 6, {}}, {16896, 1, {}}, {20000, 4, {}}};
    std::vector<struct sequence> many;
    for (int i = 0; i < 45; i++) many.push_back((struct sequence){i * 37 % 700, 1 + i % 3, {}});
    int bad = run_decode(&shapes[0], many, 300) + run_decode(&shapes[2], many, 301);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        assert_null(op_attn_unsupported(&shapes[i]));
        bad += run_decode(&shapes[i], near, 100 + i);
        if (i == 0 || i == 2 || i == 5) bad += run_decode(&shapes[i], far, 200 + i);
    }
    assert_int_equal(bad, 0);
}

/* 186,000 keys: random codes by the byte; some heads against the oracle, all bits against rows alone. */
static void test_decode_long(void **state)
{
    (void)state;
    int bad = 0;
    for (int model = 0; model < 2; model++) {
        const struct kern_attn_shape s = shape(12 << model, 2 << model, 256, KV_INT8, true);
        uint64_t random = 5 + (uint64_t)model;
        std::vector<struct sequence> q(1);
        q[0].position = 186001, q[0].rows = 4;
        const int n = q[0].position + q[0].rows;
        q[0].pages.assign((size_t)((n + 63) / 64) * op_kv_page_bytes(&s), 0);
        for (size_t i = 0; i < q[0].pages.size(); i += 8) {
            const uint64_t x = random_next(&random);
            memcpy(q[0].pages.data() + i, &x, 8);
        }
        for (int i = 0; i < n; i++)
            for (int k = 0; k < 2 * s.n_kv_heads; k++)
                for (int d = 0; d < 256; d += KV_INT8_RUN)
                    put(q[0].pages, (struct place){&s, k % 2 == 1, k / 2}, i, d, i % 255 - 127,
                        0.02f + 0.00002f * (float)(i % 512));
        for (int i = n; i < (n + 63) / 64 * 64; i++) poison_position(q[0].pages, &s, i);
        const std::vector<float> qkv = random_rows(4 * row_width(&s), &random);
        plant_needles(&s, q, qkv);
        struct batch_memory m = make_batch(&s, q, 3);
        const std::vector<uint16_t> act = attend(&s, &m, qkv);
        free_batch(m);
        struct tally t = {};
        check_head(&s, q[0].pages, qkv, 0, q[0].position, 1, act, &t);
        check_head(&s, q[0].pages, qkv, 3, q[0].position + 3, s.n_heads - 2, act, &t);
        int bits = 0;
        for (int r = 0; r < 4; r += 3)
            bits += compare_bits("alone", &s, act.data() + (size_t)(r * s.n_heads * 256),
                                 attend_alone(&s, &q[0], qkv, r, r, false).data(), r);
        printf("decode %d/%d x 256 int8 at 186001: worst %.2f of tolerance, %d wrong, %d bits\n", s.n_heads,
               s.n_kv_heads, t.worst, t.bad, bits);
        bad += t.bad + bits;
    }
    assert_int_equal(bad, 0);
}

/* ---- append ---- */

struct append_case {
    struct kern_attn_shape s;
    bool bias, norms;
};

/* A head in float64: bias, norm, rotation, Hadamard matrix. */
static std::vector<double> oracle_turn(const struct kern_attn_shape *s, const float *x, const float *bias,
                                       const float *norm, const float *angles, bool turn)
{
    const size_t dim = (size_t)s->head_dim, half = (size_t)s->rope_dim / 2;
    std::vector<double> y(x, x + dim);
    double squares = 0;
    for (size_t d = 0; d < dim; d++) {
        if (bias) y[d] += bias[d];
        squares += y[d] * y[d];
    }
    if (!turn) return y;
    for (size_t d = 0; norm && d < dim; d++) y[d] *= norm[d] / sqrt(squares / (double)dim + 1e-6);
    for (size_t i = 0; i < half; i++) {
        const size_t a = s->rope_adjacent ? 2 * i : i, b = s->rope_adjacent ? a + 1 : i + half;
        const double x0 = y[a], x1 = y[b], cosine = angles[2 * i], sine = angles[2 * i + 1];
        y[a] = x0 * cosine - x1 * sine;
        y[b] = x1 * cosine + x0 * sine;
    }
    if (s->kv != KV_INT8) return y;
    const size_t block = dim & ~(dim - 1);
    std::vector<double> z(dim, 0.0);
    for (size_t d = 0; d < dim; d++)
        for (size_t i = 0; i < block; i++)
            z[d] += (__builtin_parityll((unsigned long long)(d % block & i)) ? -1 : 1) * y[d / block * block + i] /
                    sqrt((double)block);
    return z;
}

static double cell_tolerance(enum kv_format f, double x, double most)
{
    switch (f) {
    case KV_F16: return 0x1p-11 * fabs(x) + 0x1p-25 + 3e-6;
    case KV_BF16: return 0x1p-8 * fabs(x) + 3e-6;
    case KV_INT8: return most / 127 * 0.501 * (1 + 0x1p-10) + 0x1p-25 + 3e-6;
    default: return 1e-5;
    }
}

struct append_data {
    std::vector<float> qkv, bias, q_norm, k_norm, cos_sin;
};

static struct append_data append_random(const struct append_case *a, int rows, int positions)
{
    uint64_t random = 9;
    struct append_data x;
    x.qkv = random_rows((size_t)rows * row_width(&a->s), &random);
    x.bias = random_rows(row_width(&a->s), &random);
    x.q_norm = random_rows((size_t)a->s.head_dim, &random);
    x.k_norm = random_rows((size_t)a->s.head_dim, &random);
    for (int p = 0; p < positions; p++)
        for (int i = 0; i < a->s.rope_dim / 2; i++) {
            const double angle = p * pow(10000, -2.0 * i / a->s.rope_dim);
            x.cos_sin.push_back((float)cos(angle));
            x.cos_sin.push_back((float)sin(angle));
        }
    return x;
}

/* Appends all rows; qkv comes back, and the pages of every sequence. */
static void append(const struct append_case *a, std::vector<struct sequence> &sequences, const struct append_data *x,
                   std::vector<float> &qkv, uint64_t seed)
{
    struct batch_memory m = make_batch(&a->s, sequences, seed);
    struct guarded dev = to_device(qkv), bias = to_device(x->bias), q_norm = to_device(x->q_norm),
                   k_norm = to_device(x->k_norm);
    struct guarded cos_sin = to_device(x->cos_sin);
    const struct kern_attn_weights w = {a->bias ? (const float *)bias.dev : NULL,
                                        a->norms ? (const float *)q_norm.dev : NULL,
                                        a->norms ? (const float *)k_norm.dev : NULL, 1e-6f};
    CHECK_CUDA(cudaDeviceSynchronize());
    op_rope_kv_append(&card, &m.batch, &a->s, &w, (const float *)cos_sin.dev, (float *)dev.dev, m.kv);
    finish(&card);
    qkv = from_device<float>(dev.dev, qkv.size());
    const size_t page_bytes = op_kv_page_bytes(&a->s);
    const std::vector<char> pool = from_device<char>(m.pool.dev, m.pool.n_bytes);
    const std::vector<int32_t> tables = from_device<int32_t>(m.tables.dev, m.tables.n_bytes / 4);
    std::vector<bool> used(pool.size() / page_bytes, false);
    size_t done = 0;
    for (auto &q : sequences)
        for (size_t i = 0; i < q.pages.size() / page_bytes; i++, done++) {
            used[(size_t)tables[done]] = true;
            memcpy(q.pages.data() + i * page_bytes, pool.data() + (size_t)tables[done] * page_bytes, page_bytes);
        }
    for (size_t i = 0; i < pool.size(); i++)
        if (!used[i / page_bytes] && (unsigned char)pool[i] != 0xff) fail_msg("a free page was written");
    for (struct guarded g : {dev, bias, q_norm, k_norm, cos_sin}) guarded_free_dev(g, "append");
    free_batch(m);
}

/* One head of a row; returns how many are wrong. */
static int check_turned(const struct append_case *a, const struct append_data *x, const std::vector<float> &qkv,
                        struct sequence *q, int row, int position, int head)
{
    const struct kern_attn_shape *s = &a->s;
    const int dim = s->head_dim, query_width = s->gated ? 2 * dim : dim,
              kind = head < s->n_heads                   ? 0
                     : head < s->n_heads + s->n_kv_heads ? 1
                                                         : 2;
    const size_t at = (size_t)(kind ? s->n_heads * query_width + (head - s->n_heads) * dim : head * query_width);
    const size_t in_row = (size_t)row * row_width(s) + at;
    const float *norm = kind ? x->k_norm.data() : x->q_norm.data();
    const std::vector<double> want =
        oracle_turn(s, x->qkv.data() + in_row, a->bias ? x->bias.data() + at : NULL, a->norms ? norm : NULL,
                    x->cos_sin.data() + (size_t)position * (size_t)(s->rope_dim / 2 * 2), kind < 2);
    int bad = 0;
    for (int d = 0; d < dim; d++) {
        const double got = qkv[in_row + (size_t)d];
        if (!(fabs(got - want[(size_t)d]) <= 1e-5) && !bad++)
            printf("  row %d head %d dim %d: expected %.8g got %.8g\n", row, head, d, want[(size_t)d], got);
        if (s->gated && !kind) {
            const double gate = x->qkv[in_row + (size_t)(dim + d)] + (a->bias ? x->bias[at + (size_t)(dim + d)] : 0.0f);
            if (!(fabs(qkv[in_row + (size_t)(dim + d)] - gate) <= 1e-6) && !bad++)
                printf("  row %d head %d: gate %d\n", row, head, d);
        }
        if (!kind) continue;
        double most = 0;
        for (int i = d / 64 * 64; i < dim && i < d / 64 * 64 + 64; i++)
            most = fabs(want[(size_t)i]) > most ? fabs(want[(size_t)i]) : most;
        const double cell =
            stored(q->pages, (struct place){s, kind == 2, (head - s->n_heads) % s->n_kv_heads}, position, d);
        if (!(fabs(cell - want[(size_t)d]) <= cell_tolerance(s->kv, want[(size_t)d], most)) && !bad++)
            printf("  row %d position %d head %d dim %d: expected %.8g stored %.8g\n", row, position, head, d,
                   want[(size_t)d], cell);
    }
    return bad > 0;
}

/* Cells past and before the appended positions keep their bytes. */
static int check_untouched(const struct kern_attn_shape *s, struct sequence *q)
{
    int bad = 0;
    for (int position = 0; position < (int)(q->pages.size() / op_kv_page_bytes(s)) * 64; position++) {
        if (position >= q->position && position < q->position + q->rows) continue;
        for (int i = 0; i < 2 * s->n_kv_heads; i++)
            for (int d = 0; d < s->head_dim; d++) {
                char *cell, *scale;
                cell_places(q->pages, (struct place){s, i % 2 == 1, i / 2}, position, d, &cell, &scale);
                if ((unsigned char)*cell != 0xff && !bad++)
                    printf("  position %d, not appended, was written\n", position);
            }
    }
    return bad;
}

static int run_append(const struct append_case *a)
{
    const struct kern_attn_shape *s = &a->s;
    std::vector<struct sequence> sequences = {{0, 1, {}}, {61, 6, {}}, {127, 2, {}}, {300, 4, {}}};
    for (auto &q : sequences)
        q.pages.assign((size_t)((q.position + q.rows + 63) / 64) * op_kv_page_bytes(s), (char)0xff);
    const int rows = count_rows(sequences);
    const struct append_data x = append_random(a, rows, 310);
    std::vector<float> qkv = x.qkv;
    std::vector<struct sequence> empty = sequences;
    append(a, sequences, &x, qkv, 4);
    int bad = 0, row = 0;
    for (auto &q : sequences) {
        for (int r = 0; r < q.rows; r++, row++)
            for (int h = 0; h < s->n_heads + 2 * s->n_kv_heads; h++)
                bad += check_turned(a, &x, qkv, &q, row, q.position + r, h);
        bad += check_untouched(s, &q);
    }
    /* the row at 302 alone */
    const size_t width = row_width(s);
    std::vector<struct sequence> one = {{302, 1, empty[3].pages}};
    std::vector<float> alone(x.qkv.begin() + (ptrdiff_t)((size_t)(rows - 2) * width),
                             x.qkv.begin() + (ptrdiff_t)((size_t)(rows - 1) * width));
    append(a, one, &x, alone, 8);
    if (memcmp(alone.data(), qkv.data() + (size_t)(rows - 2) * width, width * sizeof(float)) && ++bad)
        printf("  alone: bits of the row\n");
    for (int i = 0; i < 2 * s->n_kv_heads; i++)
        for (int d = 0; d < s->head_dim; d++) {
            const struct place p = {s, i % 2 == 1, i / 2};
            if (stored(one[0].pages, p, 302, d) != stored(sequences[3].pages, p, 302, d) && ++bad)
                printf("  alone: cell %d\n", d);
        }
    printf("append %2d/%d x %3d %-4s rope %d %s%s%s: %d wrong\n", s->n_heads, s->n_kv_heads, s->head_dim,
           kv_format_name(s->kv), s->rope_dim, s->rope_adjacent ? "adjacent" : "halves", a->bias ? " bias" : "",
           a->norms ? " norms" : "", bad);
    return bad;
}

static void test_append(void **state)
{
    (void)state;
    const struct append_case cases[] = {
        {{12, 2, 256, 64, false, KV_INT8, true}, false, true}, {{24, 4, 256, 64, false, KV_INT8, true}, true, true},
        {{9, 3, 64, 64, true, KV_F16, false}, false, false},   {{3, 1, 64, 64, false, KV_BF16, false}, true, false},
        {{6, 2, 64, 16, false, KV_F32, true}, false, true},    {{6, 2, 64, 16, true, KV_INT8, true}, false, true},
        {{7, 1, 48, 22, false, KV_INT8, false}, true, true},   {{2, 2, 240, 100, true, KV_INT8, true}, true, true},
        {{2, 1, 16, 0, false, KV_INT8, false}, false, false},  {{5, 5, 192, 192, false, KV_INT8, false}, false, true},
        {{4, 2, 144, 36, true, KV_F16, true}, false, true},    {{12, 2, 256, 64, false, KV_F32, true}, false, true},
    };
    int bad = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) bad += run_append(&cases[i]);
    assert_int_equal(bad, 0);
}

/* Scales at the edges of float16: zeros, tiny, huge, not finite. Values only: nothing turns them. */
static void test_scales(void **state)
{
    (void)state;
    const struct append_case a = {{1, 1, 64, 0, false, KV_INT8, false}, false, false};
    const float sizes[] = {0.0f, 1e-9f, 3e-6f, 0.7f, 8e6f, 9e6f, INFINITY, NAN};
    const int rows = (int)(sizeof sizes / sizeof *sizes);
    std::vector<struct sequence> q = {{0, rows, std::vector<char>(op_kv_page_bytes(&a.s), (char)0xff)}};
    struct append_data x = append_random(&a, rows, rows);
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < 64; d++) {
            float *v = &x.qkv[(size_t)(r * 192 + 128 + d)];
            *v = d == 5 ? sizes[r] : *v * (isfinite(sizes[r]) ? sizes[r] : 1.0f);
        }
    std::vector<float> qkv = x.qkv;
    append(&a, q, &x, qkv, 1);
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < 64; d++) {
            const double got = stored(q[0].pages, (struct place){&a.s, true, 0}, r, d),
                         want = x.qkv[(size_t)(r * 192 + 128 + d)];
            const double step = fmax(sizes[r] / 127 * (1 + 0x1p-10), 0x1p-24);
            if (r < 5 && !(fabs(got - want) <= step * 0.501 + 0x1p-24 * 0.5 * (r == 2)))
                fail_msg("size %g dim %d: %.9g stored as %.9g", (double)sizes[r], d, want, got);
            if (r >= 5 && !isnan(got)) fail_msg("size %g: stored as %.9g, not NaN", (double)sizes[r], got);
        }
}

/* Append and attention as a step enqueues them, without a wait between, or with one. */
static std::vector<uint16_t> append_and_attend(const struct kern_attn_shape *s, std::vector<struct sequence> &sequences,
                                               const struct append_data *x, bool wait)
{
    struct batch_memory m = make_batch(s, sequences, 6);
    const int rows = m.batch.rows, width = s->n_heads * s->head_dim;
    struct guarded qkv = to_device(x->qkv), norm = to_device(x->q_norm), cos_sin = to_device(x->cos_sin);
    struct guarded act = guarded_new_dev(act_buffer_bytes(rows, 0, width));
    struct guarded scratch = guarded_new_dev(op_attn_decode_scratch_bytes(s, rows));
    const struct kern_attn_weights w = {NULL, (const float *)norm.dev, (const float *)norm.dev, 1e-6f};
    CHECK_CUDA(cudaDeviceSynchronize());
    op_rope_kv_append(&card, &m.batch, s, &w, (const float *)cos_sin.dev, (float *)qkv.dev, m.kv);
    if (wait) finish(&card);
    op_attn_decode(&card, &m.batch, s, (const float *)qkv.dev, m.kv, scratch.dev, act.dev);
    finish(&card);
    std::vector<uint16_t> out = from_device<uint16_t>(act.dev, (size_t)rows * (size_t)act_blocks(width) * ACT_BLOCK);
    for (struct guarded g : {qkv, norm, cos_sin, act, scratch}) guarded_free_dev(g, "step");
    free_batch(m);
    return out;
}

static void test_step(void **state)
{
    (void)state;
    int bad = 0;
    for (struct kern_attn_shape s : {shape(12, 2, 256, KV_INT8, true), shape(3, 1, 64, KV_F16, false)}) {
        uint64_t random = 3;
        std::vector<struct sequence> sequences = {{0, 1, {}}, {63, 4, {}}, {127, 2, {}}, {900, 1, {}}, {1150, 3, {}}};
        const struct append_case a = {s, false, true};
        const struct append_data x = append_random(&a, count_rows(sequences), 1200);
        fill_sequences(&s, sequences, &random);
        for (auto &q : sequences)
            for (int r = 0; r < q.rows; r++) poison_position(q.pages, &s, q.position + r);
        const std::vector<uint16_t> want = append_and_attend(&s, sequences, &x, true);
        for (uint16_t v : want) bad += isnan(act_value(v));
        for (int i = 0; i < 20; i++) bad += append_and_attend(&s, sequences, &x, false) != want;
        printf("step %d/%d x %d %s: %d wrong\n", s.n_heads, s.n_kv_heads, s.head_dim, kv_format_name(s.kv), bad);
    }
    assert_int_equal(bad, 0);
}

/* ---- benchmark ---- */

struct bench {
    struct kern_attn_shape s;
    int segments, rows, context; /* rows of each segment */
};

template <class F> static double median_us(int calls, F enqueue)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t start, stop;
    std::vector<float> ms;
    CHECK_CUDA(cudaStreamBeginCapture(card.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; i++) enqueue(i);
    CHECK_CUDA(cudaStreamEndCapture(card.stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaEventCreate(&start));
    CHECK_CUDA(cudaEventCreate(&stop));
    for (int i = 0; i < 12; i++) {
        float t;
        CHECK_CUDA(cudaEventRecord(start, card.stream));
        CHECK_CUDA(cudaGraphLaunch(exec, card.stream));
        CHECK_CUDA(cudaEventRecord(stop, card.stream));
        CHECK_CUDA(cudaEventSynchronize(stop));
        CHECK_CUDA(cudaEventElapsedTime(&t, start, stop));
        if (i >= 3) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return (double)ms[ms.size() / 2] * 1000 / calls;
}

static void run_bench(const struct bench *b, char *pool, size_t pool_bytes, char *scratch)
{
    const struct kern_attn_shape *s = &b->s;
    const size_t page_bytes = op_kv_page_bytes(s);
    const int pages = (b->context + 63) / 64, all = pages * b->segments, rows = b->segments * b->rows;
    const size_t layer_bytes = (size_t)all * page_bytes;
    size_t layers = pool_bytes / layer_bytes;
    layers = layers > 24 ? 24 : layers;
    std::vector<struct device_row> row;
    std::vector<struct device_segment> segments;
    std::vector<int32_t> tables((size_t)all);
    uint64_t seed = 1;
    for (int i = 0; i < all; i++) tables[(size_t)i] = i;
    for (size_t i = tables.size() - 1; i; i--) std::swap(tables[i], tables[random_next(&seed) % (i + 1)]);
    for (int i = 0; i < b->segments; i++) {
        segments.push_back(
            (struct device_segment){(int32_t)row.size(), b->rows, b->context - b->rows, 0, i * pages, 0});
        for (int r = 0; r < b->rows; r++) row.push_back((struct device_row){i, b->context - b->rows + r});
    }
    struct guarded row_dev = to_device(row), segments_dev = to_device(segments), tables_dev = to_device(tables);
    const struct append_case a = {*s, false, true};
    struct append_data x = append_random(&a, rows, 64);
    struct guarded qkv = to_device(x.qkv), norm = to_device(x.q_norm),
                   act = guarded_new_dev(act_buffer_bytes(rows, 0, s->n_heads * s->head_dim));
    struct guarded cos_sin = guarded_new_dev((size_t)b->context * (size_t)s->rope_dim * 4);
    const struct device_batch batch = {rows,
                                       rows,
                                       b->segments,
                                       b->segments,
                                       b->context,
                                       NULL,
                                       (const struct device_row *)row_dev.dev,
                                       (const struct device_segment *)segments_dev.dev,
                                       (const int32_t *)tables_dev.dev,
                                       NULL};
    const struct kern_attn_weights w = {NULL, (const float *)norm.dev, (const float *)norm.dev, 1e-6f};
    const int calls = (int)(layers < 6 ? 12 : 2 * layers);
    CHECK_CUDA(cudaDeviceSynchronize());
    auto layer = [&](int i) { return (struct kern_kv_layer){pool + (size_t)i % layers * layer_bytes, page_bytes}; };
    const double us = median_us(
        calls, [&](int i) { op_attn_decode(&card, &batch, s, (const float *)qkv.dev, layer(i), scratch, act.dev); });
    const double bytes = (double)b->context * b->segments * (double)page_bytes / 64;
    printf("%2d/%d x %d %-4s %d x %6d, T=%d: %8.2f us %6.0f GB/s %4.1f%%", s->n_heads, s->n_kv_heads, s->head_dim,
           kv_format_name(s->kv), b->segments, b->context, b->rows, us, bytes / us * 1e-3, bytes / us * 1e-3 / 46.6);
    if (b->context == 8192) /* appending shifts nothing: the same positions again */
        printf("  append %.2f us", median_us(48, [&](int i) {
                   op_rope_kv_append(&card, &batch, s, &w, (const float *)cos_sin.dev, (float *)qkv.dev, layer(i));
               }));
    printf("\n");
    for (struct guarded g : {row_dev, segments_dev, tables_dev, qkv, norm, act, cos_sin}) guarded_free_dev(g, "bench");
}

/* Pages of random codes, every scale 0.0156. */
static void fill_pool(char *pool, size_t pool_bytes)
{
    std::vector<char> some((size_t)64 << 20);
    uint64_t random = 1;
    for (size_t i = 0; i < some.size(); i += 8) {
        const uint64_t x = random_next(&random) & UINT64_C(0x3fff3fff3fff3fff);
        memcpy(some.data() + i, &x, 8);
    }
    const size_t half = (size_t)kv_page_half_bytes(KV_INT8, 256);
    for (size_t i = 0; i + half <= some.size(); i += half)
        for (size_t k = i + 64 * 256; k < i + half; k += 2) memcpy(some.data() + k, "\x00\x24", 2);
    const size_t n = some.size() / half * half;
    for (size_t i = 0; i < pool_bytes; i += n)
        CHECK_CUDA(cudaMemcpy(pool + i, some.data(), pool_bytes - i < n ? pool_bytes - i : n, cudaMemcpyHostToDevice));
}

static void run_benches(void)
{
    const size_t pool_bytes = (size_t)1200 << 20;
    char *pool, *scratch;
    const struct kern_attn_shape big = {12, 2, 256, 64, false, KV_INT8, true},
                                 whole = {24, 4, 256, 64, false, KV_INT8, true};
    const struct kern_attn_shape wide = {12, 2, 256, 64, false, KV_F16, true},
                                 small = {9, 3, 64, 64, true, KV_F16, false};
    CHECK_CUDA(cudaMalloc((void **)&pool, pool_bytes));
    CHECK_CUDA(cudaMalloc((void **)&scratch, op_attn_decode_scratch_bytes(&wide, 64)));
    fill_pool(pool, pool_bytes);
    for (int context : {1024, 8192, 32768, 186000, 262144})
        for (int rows : {1, 4, 6}) {
            const struct bench b = {big, 1, rows, context}, c = {whole, 1, rows, context};
            run_bench(&b, pool, pool_bytes, scratch);
            if (context > 1024 && rows < 6) run_bench(&c, pool, pool_bytes, scratch);
        }
    for (struct bench b : {(struct bench){big, 8, 1, 32768},
                           {big, 8, 4, 32768},
                           {big, 64, 1, 1024},
                           {big, 16, 4, 8192},
                           {wide, 1, 1, 8192},
                           {wide, 1, 4, 32768},
                           {small, 1, 1, 1024},
                           {small, 1, 4, 8192},
                           {small, 64, 1, 1024}})
        run_bench(&b, pool, pool_bytes, scratch);
    CHECK_CUDA(cudaFree(pool));
    CHECK_CUDA(cudaFree(scratch));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_append), cmocka_unit_test(test_scales),
                                       cmocka_unit_test(test_decode), cmocka_unit_test(test_decode_long),
                                       cmocka_unit_test(test_step)};
    card = open_card();
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1 && !strcmp(argv[1], "sm80")) card.sm = 80, card.pdl = false; /* for a build of sm_80 code */
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        run_benches();
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
