/* Tests of loaded weights and of the linear layers' decode kernels: every stored format against sums in double, cut and stacked
 * parts, damaged codes, and that a row's bits depend on nothing but its x. With "bench": times of the big model's shapes. */
#include <algorithm>
#include <string>

#include "blocks.cuh"
#include "cuda_fixture.cuh"
#include "weights.h"

static struct op_context card;
static struct weight_loader *loader;
static uint64_t seed = 1;

/* ---- stored matrices ---- */

struct source {
    struct quant_matrix m;
    std::vector<uint8_t> codes, scales;
};

enum recipe {
    R_BF16,
    R_F16,
    R_F32,
    R_FP8_ROW,
    R_FP8_TENSOR,
    R_FP8_128,
    R_FP8_32,
    R_NVFP4,
    R_NVFP4_DIVIDE,
    R_GGUF_NVFP4,
    R_MXFP4_PAIRS,
    R_MXFP4,
    R_Q8_0,
    R_Q4_0,
    R_Q4_1,
    R_Q4_K,
    R_Q6_K,
    RECIPES
};
static const char *recipe_names[] = {"BF16",   "F16",   "F32",       "FP8 row",    "FP8 tensor",  "FP8 128",
                                     "FP8 32", "NVFP4", "NVFP4 div", "GGUF NVFP4", "MXFP4 pairs", "MXFP4",
                                     "Q8_0",   "Q4_0",  "Q4_1",      "Q4_K",       "Q6_K"};

static void fill_random(std::vector<uint8_t> &v)
{
    for (size_t i = 0; i + 8 <= v.size(); i += 8) {
        const uint64_t r = random_next(&seed);
        memcpy(&v[i], &r, 8);
    }
    for (size_t i = v.size() & ~(size_t)7; i < v.size(); i++) v[i] = (uint8_t)random_next(&seed);
}

static uint16_t bf16_bits(float f) /* cut off */
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return (uint16_t)(u >> 16);
}

static void put_f16(uint8_t *p, float f)
{
    const uint16_t h = quant_f32_to_f16(f);
    memcpy(p, &h, 2);
}

/* Random bytes, but factors of blocks are numbers of common size. */
static void tame_blocks(enum quant_format f, std::vector<uint8_t> &codes)
{
    const size_t bytes = quant_block_bytes(f);
    for (uint8_t *p = codes.data(), *end = p + codes.size(); p < end; p += bytes) {
        const float d = 0.01f + 0.01f * random_float(&seed), least = random_float(&seed) * 0.1f;
        if (f == QUANT_Q6_K)
            put_f16(p + 208, d * 0.05f);
        else if (f == QUANT_MXFP4)
            p[0] = (uint8_t)(118 + p[0] % 8);
        else if (f == QUANT_NVFP4)
            for (int i = 0; i < 4; i++) p[i] = (uint8_t)(p[i] % 0x7f);
        else
            put_f16(p, f == QUANT_Q4_K ? d * 0.1f : d);
        if (f == QUANT_Q4_1 || f == QUANT_Q4_K) put_f16(p + 2, f == QUANT_Q4_K ? least * 0.1f : least);
    }
}

static void make_plain(struct source *s, enum quant_format f, uint64_t n)
{
    s->codes.resize(n * quant_block_bytes(f));
    for (uint64_t i = 0; i < n; i++) {
        const float v = random_float(&seed) * 0.1f;
        const uint16_t bf16 = bf16_bits(v), f16 = quant_f32_to_f16(v);
        memcpy(&s->codes[i * quant_block_bytes(f)],
               f == QUANT_F32   ? (const void *)&v
               : f == QUANT_F16 ? &f16
                                : &bf16,
               quant_block_bytes(f));
    }
}

static void make_grid(struct source *s, enum quant_format f, uint64_t row_block, uint64_t col_block)
{
    struct quant_scales *g = &s->m.scales;
    g->format = f, g->row_block = row_block, g->col_block = col_block;
    g->per_row = (s->m.cols + col_block - 1) / col_block;
    const size_t n = (size_t)((s->m.rows + row_block - 1) / row_block * g->per_row);
    s->scales.resize(n * quant_block_bytes(f));
    fill_random(s->scales);
    for (size_t i = 0; i < n; i++) {
        const float v = 0.001f * (1.5f + random_float(&seed));
        if (f == QUANT_F32)
            memcpy(&s->scales[i * 4], &v, 4);
        else if (f == QUANT_FP8)
            s->scales[i] = (uint8_t)(s->scales[i] % 16 == 15 ? s->scales[i] | 0x80 : s->scales[i] & 0x7f);
        else
            s->scales[i] = (uint8_t)(118 + s->scales[i] % 8);
        if (f == QUANT_FP8 && (s->scales[i] & 0x7f) == 0x7f) s->scales[i] = 0;
    }
    g->bytes = s->scales.data();
}

static struct source *source_new(enum recipe r, uint64_t rows, uint64_t cols)
{
    static const enum quant_format formats[] = {
        QUANT_BF16, QUANT_F16,       QUANT_F32,       QUANT_FP8,   QUANT_FP8,       QUANT_FP8,
        QUANT_FP8,  QUANT_FP4_PAIRS, QUANT_FP4_PAIRS, QUANT_NVFP4, QUANT_FP4_PAIRS, QUANT_MXFP4,
        QUANT_Q8_0, QUANT_Q4_0,      QUANT_Q4_1,      QUANT_Q4_K,  QUANT_Q6_K};
    struct source *s = new struct source();
    struct quant_matrix m = {};
    m.format = formats[r], m.rows = rows, m.cols = cols, m.global = 1;
    s->m = m;
    size_t row_bytes = 0;
    assert_true(quant_row_bytes(m.format, cols, &row_bytes));
    if (r <= R_F32)
        make_plain(s, m.format, rows * cols);
    else {
        s->codes.resize(rows * row_bytes);
        fill_random(s->codes);
    }
    if (m.format == QUANT_FP8)
        for (uint8_t &c : s->codes)
            if ((c & 0x7f) == 0x7f) c ^= 1;
    if (r >= R_MXFP4 || r == R_GGUF_NVFP4) tame_blocks(m.format, s->codes);
    if (r == R_FP8_ROW) make_grid(s, QUANT_F32, 1, cols);
    if (r == R_FP8_TENSOR) make_grid(s, QUANT_F32, rows, cols);
    if (r == R_FP8_128) make_grid(s, QUANT_F32, 128, 128);
    if (r == R_FP8_32) make_grid(s, QUANT_E8M0, 1, 32);
    if (r == R_NVFP4 || r == R_NVFP4_DIVIDE) make_grid(s, QUANT_FP8, 1, 16);
    if (r == R_MXFP4_PAIRS) make_grid(s, QUANT_E8M0, 1, 32);
    if (r == R_NVFP4 || r == R_GGUF_NVFP4) s->m.global = 0.00037f;
    if (r == R_NVFP4_DIVIDE) s->m.global = 2700.0f, s->m.divide = true;
    s->m.bytes = s->codes.data();
    return s;
}

/* ---- parts of a weight, and what they mean ---- */

struct weight_case {
    std::vector<struct source *> sources;
    std::vector<struct kern_weight_part> parts;
    std::vector<std::vector<struct kern_span>> spans;
    enum kern_weights how;
    enum kern_use use;
    std::string name;
    ~weight_case()
    {
        for (struct source *s : sources) delete s;
    }
};

static void add_part(struct weight_case *w, struct source *s, std::vector<struct kern_span> rows,
                     std::vector<struct kern_span> cols)
{
    struct kern_weight_part p = {};
    w->spans.reserve(16); /* parts point into it */
    p.matrix = s->m, p.n_rows = (int)rows.size(), p.n_cols = (int)cols.size();
    w->spans.push_back(rows), p.rows = w->spans.back().data();
    w->spans.push_back(cols), p.cols = w->spans.back().data();
    w->parts.push_back(p);
    if (std::find(w->sources.begin(), w->sources.end(), s) == w->sources.end()) w->sources.push_back(s);
}

static struct weight_case *whole_case(enum recipe r, int rows, int cols, enum kern_use use,
                                      enum kern_weights how = KERN_WEIGHTS_NATIVE)
{
    struct weight_case *w = new struct weight_case();
    w->how = how, w->use = use;
    w->name = std::string(recipe_names[r]) + (how ? " W8" : "") +
              (use == KERN_PARTIAL  ? " partial "
               : use == KERN_SWIGLU ? " swiglu "
                                    : " rows ") +
              std::to_string(rows) + "x" + std::to_string(cols);
    const uint64_t n = use == KERN_SWIGLU ? rows / 2 : rows;
    for (int i = 0; i < (use == KERN_SWIGLU ? 2 : 1); i++)
        add_part(w, source_new(r, n, cols), {{0, n}}, {{0, (uint64_t)cols}});
    return w;
}

/* Row r of the weight (parts stacked) as numbers. */
static std::vector<float> row_values(const struct weight_case *w, int row)
{
    std::vector<float> out;
    uint64_t left = (uint64_t)row;
    for (const struct kern_weight_part &p : w->parts)
        for (int s = 0; s < p.n_rows; s++) {
            if (left >= p.rows[s].count) {
                left -= p.rows[s].count;
                continue;
            }
            for (int c = 0; c < p.n_cols; c++) {
                const uint64_t first = p.cols[c].first, n = p.cols[c].count, r = p.rows[s].first + left;
                std::vector<float> v(n);
                if (w->how == KERN_WEIGHTS_W8) {
                    std::vector<int8_t> codes(n);
                    std::vector<float> scales(n / 128 + 2);
                    quant_matrix_w8(&p.matrix, r, first, n, codes.data(), scales.data());
                    for (uint64_t i = 0; i < n; i++) v[i] = scales[(first + i) / 128 - first / 128] * codes[i];
                } else
                    quant_matrix_decode(&p.matrix, r, first, n, v.data());
                out.insert(out.end(), v.begin(), v.end());
            }
            return out;
        }
    return out;
}

/* ---- running ---- */

/* Decode rows of an act: float values rounded to bfloat16, times 2^60. */
static std::vector<uint16_t> act_rows(const std::vector<float> &x, int rows, int cols)
{
    const size_t pitch = (size_t)act_blocks(cols) * ACT_BLOCK;
    std::vector<uint16_t> a(rows * pitch, 0);
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < cols; k++) a[r * pitch + k] = bf16_bits(bf16_round(x[(size_t)r * cols + k] * ACT_SCALE));
    return a;
}

static std::vector<float> random_x(int rows, int cols)
{
    std::vector<float> x((size_t)rows * cols);
    for (float &v : x) v = bf16_round(random_float(&seed) * (random_next(&seed) % 16 ? 1.0f : 8.0f));
    return x;
}

/* y of all planes added as a partial's reader does; swiglu: the act as floats with padding columns. */
static std::vector<float> run_weight(const struct op_context *c, const struct kern_weight *w,
                                     const std::vector<float> &x, int rows, std::vector<float> *second = NULL)
{
    const std::vector<uint16_t> a = act_rows(x, rows, w->cols);
    struct guarded act = to_device(a);
    std::vector<float> y;
    if (w->use == KERN_SWIGLU) {
        const size_t pitch = (size_t)act_blocks(w->rows / 2) * ACT_BLOCK;
        struct guarded out = guarded_new_dev(rows * pitch * 2);
        op_linear_decode_swiglu(c, &w->matrix[0], act.dev, (struct kern_split){rows, 0}, out.dev);
        finish(c);
        for (uint16_t h : from_device<uint16_t>(out.dev, rows * pitch)) y.push_back(quant_bf16_to_f32(h) * 0x1p-60f);
        guarded_free_dev(out, "swiglu act");
    } else {
        const size_t n = (size_t)rows * w->rows;
        struct guarded out = guarded_new_dev(n * 4), out2 = guarded_new_dev(n * 4);
        for (int i = 0; i < w->n_matrices; i++)
            op_linear_decode(c, &w->matrix[i], act.dev, rows, (float *)out.dev + w->row_first[i],
                             w->use == KERN_PARTIAL ? (float *)out2.dev + w->row_first[i] : NULL, w->rows);
        finish(c);
        y = from_device<float>(out.dev, n);
        if (w->use == KERN_PARTIAL) {
            const std::vector<float> y2 = from_device<float>(out2.dev, n);
            if (second)
                *second = y2;
            else
                for (size_t i = 0; i < n; i++) y[i] += y2[i];
        }
        guarded_free_dev(out, "y"), guarded_free_dev(out2, "y2");
    }
    guarded_free_dev(act, "act");
    return y;
}

static struct kern_weight *load(const struct weight_case *w)
{
    struct kern_weight *out = NULL;
    struct err e = {};
    if (weights_load(loader, w->parts.data(), (int)w->parts.size(), w->how, w->use, &out, &e) != RC_OK)
        fail_msg("%s: %s", w->name.c_str(), e.text);
    return out;
}

static int failures;

/* Checks y against sums in double for a sample of weight rows. Each of the chain's steps (16 columns each, then 16 segments)
 * rounds or truncates at 2^-23 of what is summed up so far, which is at most the sum of magnitudes. */
static void check_values(const struct weight_case *w, const struct kern_weight *k, const std::vector<float> &x,
                         int rows, const std::vector<float> &y)
{
    const bool swiglu = k->use == KERN_SWIGLU;
    const int n = swiglu ? k->rows / 2 : k->rows, pitch = swiglu ? act_blocks(n) * ACT_BLOCK : n;
    const int sample = n < 400 ? n : 300;
    const double unit = (k->cols / 256.0 + 48) * 0x1p-23;
    int bad = 0;
    for (int i = 0; i < sample && bad < 3; i++) {
        const int r = sample == n ? i : i < 40 ? i : i < 80 ? n - 1 - (i - 40) : (int)(random_next(&seed) % n);
        const std::vector<float> v0 = row_values(w, r), v1 = swiglu ? row_values(w, n + r) : v0;
        for (int t = 0; t < rows && bad < 3; t++) {
            double sum[2] = {0, 0}, size[2] = {0, 0};
            for (int c = 0; c < k->cols; c++) {
                const double xv = x[(size_t)t * k->cols + c];
                sum[0] += v0[c] * xv, size[0] += fabs(v0[c] * xv), sum[1] += v1[c] * xv, size[1] += fabs(v1[c] * xv);
            }
            double want = sum[0], allowed = size[0] * unit;
            if (swiglu) {
                const double silu = sum[0] / (1 + exp(-sum[0]));
                want = silu * sum[1];
                allowed = fabs(want) * 0x1p-8 + unit * (size[1] * fabs(silu) + 1.1 * size[0] * fabs(sum[1])) + 1e-30;
            }
            const double got = y[(size_t)t * pitch + r];
            if (fabs(got - want) <= allowed) continue;
            print_error("%s: row %d of x, output %d: %.9g, expected %.9g +- %.2g\n", w->name.c_str(), t, r, got, want,
                        allowed);
            bad++, failures++;
        }
    }
    for (int t = 0; swiglu && t < rows; t++)
        for (int c = n; c < pitch; c++)
            if (y[(size_t)t * pitch + c] != 0) {
                print_error("%s: padding column %d of row %d is %g\n", w->name.c_str(), c, t, y[(size_t)t * pitch + c]);
                failures++;
                return;
            }
}

static void check_same(const char *name, const char *what, const std::vector<float> &a, size_t at_a,
                       const std::vector<float> &b, size_t at_b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[at_a + i], &b[at_b + i], 4)) {
            print_error("%s: %s: output %zu: %.9g and %.9g\n", name, what, i, a[at_a + i], b[at_b + i]);
            failures++;
            return;
        }
}

/* Bits of x's row 0 .. 7 in y, against other surroundings. */
static void check_bits(const char *name, const struct kern_weight *k, const std::vector<float> &x,
                       const std::vector<float> &y)
{
    const size_t cols = k->cols, n = y.size() / 8;
    const std::vector<float> alone =
        run_weight(&card, k, std::vector<float>(x.begin() + 3 * cols, x.begin() + 4 * cols), 1);
    check_same(name, "alone", alone, 0, y, 3 * n, n);
    std::vector<float> other(x.begin(), x.begin() + 5 * cols);
    for (size_t i = 0; i < cols; i++) other[i] = other[4 * cols + i] = NAN; /* rows 0 and 4; row 3 at place 2 */
    std::copy(x.begin() + 3 * cols, x.begin() + 4 * cols, other.begin() + 2 * cols);
    check_same(name, "among NaN", run_weight(&card, k, other, 5), 2 * n, y, 3 * n, n);
    std::vector<float> many;
    for (int i = 0; i < 75; i++) many.insert(many.end(), x.begin() + i % 8 * cols, x.begin() + (i % 8 + 1) * cols);
    for (int rows : {2, 9, 16, 29, 75}) {
        const std::vector<float> z =
            run_weight(&card, k, std::vector<float>(many.begin(), many.begin() + rows * cols), rows);
        for (int i = 0; i < rows; i++) check_same(name, "more or fewer rows", z, i * n, y, i % 8 * n, n);
    }
    struct op_context small = card;
    small.processors = 6;
    check_same(name, "six processors", run_weight(&small, k, x, 8), 0, y, 0, 8 * n);
    small.processors = card.processors, small.sm = 80, small.pdl = false;
    check_same(name, "plain kernel", run_weight(&small, k, x, 8), 0, y, 0, 8 * n);
}

static void run_case(struct weight_case *w, bool bits)
{
    struct kern_weight *k = load(w);
    const std::vector<float> x = random_x(8, k->cols);
    const std::vector<float> y = run_weight(&card, k, x, 8);
    const int before = failures;
    check_values(w, k, x, 8, y);
    if (bits) check_bits(w->name.c_str(), k, x, y);
    print_message("%s: %s, %d matrices\n", w->name.c_str(), failures == before ? "ok" : "WRONG", k->n_matrices);
    weights_free(k);
    delete w;
}

static void test_formats(void **)
{
    failures = 0;
    for (int r = 0; r < RECIPES; r++) {
        run_case(whole_case((enum recipe)r, 100, 768, KERN_ROWS), true);
        run_case(whole_case((enum recipe)r, 96, 1280, KERN_PARTIAL), true);
        run_case(whole_case((enum recipe)r, 208, 256, KERN_SWIGLU), r < 2 || r == R_Q4_1);
    }
    for (enum recipe r : {R_BF16, R_NVFP4, R_Q4_K}) run_case(whole_case(r, 72, 1024, KERN_ROWS, KERN_WEIGHTS_W8), true);
    run_case(whole_case(R_F32, 72, 70, KERN_ROWS, KERN_WEIGHTS_W8), true);
    assert_int_equal(failures, 0);
}

static void test_small_models(void **)
{
    failures = 0;
    for (enum recipe r : {R_BF16, R_Q8_0, R_F32}) {
        run_case(whole_case(r, 960, 576, KERN_ROWS), false);
        run_case(whole_case(r, 576, 576, KERN_PARTIAL), true);
        run_case(whole_case(r, 576, 192, KERN_PARTIAL), true);
        run_case(whole_case(r, 3072, 576, KERN_SWIGLU), true);
        run_case(whole_case(r, 576, 768, KERN_PARTIAL), false);
        run_case(whole_case(r, 192, 64, KERN_SWIGLU), true);
        run_case(whole_case(r, 96, 64, KERN_SWIGLU), false);
        run_case(whole_case(r, 64, 96, KERN_PARTIAL), true);
        run_case(whole_case(r, 64, 32, KERN_PARTIAL), false);
        run_case(whole_case(r, 1000, 64, KERN_ROWS), false);
    }
    run_case(whole_case(R_BF16, 33, 67, KERN_ROWS), true);
    run_case(whole_case(R_FP8_ROW, 1, 1, KERN_ROWS), true);
    run_case(whole_case(R_FP8_ROW, 17, 1000, KERN_PARTIAL), true);
    assert_int_equal(failures, 0);
}

static void test_big_model(void **)
{
    failures = 0;
    const struct {
        enum recipe r;
        int rows, cols;
        enum kern_use use;
    } shapes[] = {{R_NVFP4, 4000, 5120, KERN_SWIGLU},     {R_NVFP4, 5120, 8704, KERN_PARTIAL},
                  {R_NVFP4, 3000, 17408, KERN_PARTIAL},   {R_NVFP4, 6000, 5120, KERN_ROWS},
                  {R_FP8_ROW, 8208, 5120, KERN_ROWS},     {R_FP8_ROW, 5120, 3072, KERN_PARTIAL},
                  {R_FP8_ROW, 5120, 6144, KERN_PARTIAL},  {R_FP8_ROW, 2560, 8704, KERN_PARTIAL},
                  {R_FP8_ROW, 2560, 17408, KERN_PARTIAL}, {R_FP8_ROW, 4352, 5120, KERN_SWIGLU},
                  {R_FP8_ROW, 2570, 10240, KERN_ROWS},    {R_FP8_128, 2560, 5120, KERN_ROWS},
                  {R_BF16, 3072, 5120, KERN_ROWS},        {R_BF16, 2560, 6144, KERN_PARTIAL},
                  {R_BF16, 2560, 3072, KERN_PARTIAL},     {R_BF16, 1280, 8704, KERN_PARTIAL},
                  {R_BF16, 640, 17408, KERN_PARTIAL},     {R_BF16, 1280, 10240, KERN_ROWS},
                  {R_BF16, 2176, 5120, KERN_SWIGLU}};
    for (const auto &s : shapes) run_case(whole_case(s.r, s.rows, s.cols, s.use), true);
    assert_int_equal(failures, 0);
}

/* A matrix and a small one of the same x, as parts of one weight. */
static struct weight_case *beside_case(enum recipe r, int rows, enum recipe r_beside, int rows_beside, int cols)
{
    struct weight_case *w = whole_case(r, rows, cols, KERN_ROWS);
    add_part(w, source_new(r_beside, rows_beside, cols), {{0, (uint64_t)rows_beside}}, {{0, (uint64_t)cols}});
    w->name += std::string(" beside ") + recipe_names[r_beside] + " " + std::to_string(rows_beside);
    return w;
}

/* Two launches write y as run_weight has it; false must leave it alone. */
static bool run_beside(const struct op_context *c, const struct kern_weight *k, const std::vector<float> &x, int rows,
                       std::vector<float> *y)
{
    struct guarded act = to_device(act_rows(x, rows, k->cols)), out = guarded_new_dev((size_t)rows * k->rows * 4);
    float *y_dev = (float *)out.dev;
    const bool done = op_linear_decode_beside(c, &k->matrix[0], &k->matrix[1], act.dev, rows, y_dev, y_dev + k->row_first[1],
                                              k->rows);
    finish(c);
    *y = from_device<float>(out.dev, (size_t)rows * k->rows);
    guarded_free_dev(out, "y"), guarded_free_dev(act, "act");
    return done;
}

static void check_not_beside(const struct op_context *c, const struct kern_weight *k, int rows)
{
    std::vector<float> y;
    assert_false(run_beside(c, k, random_x(rows, k->cols), rows, &y));
    for (float v : y) {
        uint32_t u;
        memcpy(&u, &v, 4);
        assert_int_equal(u, 0xffffffffu);
    }
}

static void test_beside(void **)
{
    failures = 0;
    const int pairs[][2] = {{8192, 48}, {16384, 96}, {8200, 20}, {40, 3}};
    for (const int *p : pairs) {
        struct weight_case *w = beside_case(R_FP8_ROW, p[0], R_BF16, p[1], 5120);
        struct kern_weight *k = load(w);
        assert_int_equal(k->n_matrices, 2);
        for (int rows = 1; rows <= 8; rows++) {
            const std::vector<float> x = random_x(rows, k->cols);
            std::vector<float> y;
            const bool done = run_beside(&card, k, x, rows, &y);
            if (card.sm / 10 == 9) assert_true(done); /* elsewhere shared memory may be too small */
            if (done) check_same(w->name.c_str(), "two launches", y, 0, run_weight(&card, k, x, rows), 0, y.size());
        }
        check_not_beside(&card, k, 9);
        struct op_context other = card;
        other.processors = 2; /* with no blocks to spare for the small matrix */
        if (p[0] > 1000) check_not_beside(&other, k, 8);
        other.processors = card.processors, other.sm = 80, other.pdl = false;
        check_not_beside(&other, k, 8);
        weights_free(k);
        delete w;
    }
    struct weight_case *const unknown[] = {
        beside_case(R_FP8_ROW, 64, R_BF16, 48, 3072), beside_case(R_FP8_128, 64, R_BF16, 48, 5120),
        beside_case(R_FP8_ROW, 64, R_F32, 48, 5120), beside_case(R_BF16, 64, R_FP8_ROW, 48, 5120)};
    for (struct weight_case *w : unknown) {
        struct kern_weight *k = load(w);
        assert_int_equal(k->n_matrices, 2);
        check_not_beside(&card, k, 8);
        weights_free(k);
        delete w;
    }
    assert_int_equal(failures, 0);
}

static void test_cut_and_stacked(void **)
{
    failures = 0;
    struct weight_case *w = new struct weight_case();
    struct source *a = source_new(R_FP8_128, 64, 640), *b = source_new(R_BF16, 40, 640),
                  *c = source_new(R_FP8_128, 32, 640);
    w->name = "three parts of two formats, cut", w->use = KERN_ROWS, w->how = KERN_WEIGHTS_NATIVE;
    std::vector<struct kern_span> cols = {{256, 112}, {16, 48}, {512, 100}};
    add_part(w, a, {{40, 24}, {3, 10}}, cols), add_part(w, c, {{0, 32}}, cols), add_part(w, b, {{5, 7}, {0, 3}}, cols);
    run_case(w, true);
    w = new struct weight_case();
    w->name = "NVFP4 of two factors, cut", w->use = KERN_PARTIAL, w->how = KERN_WEIGHTS_NATIVE;
    a = source_new(R_NVFP4, 64, 512), b = source_new(R_GGUF_NVFP4, 48, 512);
    b->m.global = 0.02f;
    add_part(w, a, {{50, 14}, {0, 20}}, {{256, 128}, {64, 192}}), add_part(w, b, {{8, 40}}, {{256, 128}, {64, 192}});
    run_case(w, true);
    w = new struct weight_case();
    w->name = "gate and up of two formats", w->use = KERN_SWIGLU, w->how = KERN_WEIGHTS_NATIVE;
    add_part(w, source_new(R_FP8_128, 72, 320), {{0, 72}}, {{0, 320}}),
        add_part(w, source_new(R_Q4_0, 72, 320), {{0, 72}}, {{0, 320}});
    run_case(w, true);
    for (enum recipe r : {R_Q6_K, R_FP8_32, R_MXFP4}) {
        w = new struct weight_case();
        w->name = std::string("cut ") + recipe_names[r], w->use = KERN_ROWS, w->how = KERN_WEIGHTS_NATIVE;
        add_part(w, source_new(r, 64, 768), {{32, 32}, {0, 16}}, {{512, 96}, {32, 64}, {128, 128}});
        run_case(w, true);
    }
    w = new struct weight_case();
    w->name = "W8 cut", w->use = KERN_PARTIAL, w->how = KERN_WEIGHTS_W8;
    add_part(w, source_new(R_BF16, 64, 768), {{32, 32}, {0, 16}}, {{512, 96}, {32, 64}, {128, 130}});
    run_case(w, true);
    assert_int_equal(failures, 0);
}

/* Rows with a damaged code or scale are NaN, their neighbours as before. */
static void test_damaged(void **)
{
    const enum recipe recipes[] = {R_FP8_ROW, R_FP8_128, R_NVFP4, R_BF16, R_F32};
    for (enum recipe r : recipes) {
        struct weight_case *w = whole_case(r, 48, 320, KERN_ROWS);
        struct source *s = w->sources[0];
        const float nan = NAN;
        if (s->m.format == QUANT_FP8) s->codes[5 * 320 + 300] = 0xff, s->codes[20 * 320 + 1] = 0x7f;
        if (r == R_NVFP4) s->scales[5 * 20 + 7] = 0x7f, s->scales[20 * 20] = 0xff;
        if (r == R_BF16) memset(&s->codes[(5 * 320 + 7) * 2], 0xff, 2), memset(&s->codes[20 * 320 * 2], 0xff, 2);
        if (r == R_F32) memcpy(&s->codes[(5 * 320 + 7) * 4], &nan, 4), memset(&s->codes[20 * 320 * 4], 0xff, 4);
        struct kern_weight *k = load(w);
        const std::vector<float> x = random_x(8, 320), y = run_weight(&card, k, x, 8);
        for (int t = 0; t < 8; t++)
            for (int i = 0; i < 48; i++)
                if (isnan(y[t * 48 + i]) != (i == 5 || i == 20))
                    fail_msg("%s: row %d, output %d is %g", w->name.c_str(), t, i, y[t * 48 + i]);
        weights_free(k);
        delete w;
    }
}

static void test_planes_and_refusals(void **)
{
    struct weight_case *w = whole_case(R_BF16, 64, 512, KERN_PARTIAL);
    struct kern_weight *k = load(w);
    std::vector<float> x = random_x(2, 512), second;
    std::fill(x.begin() + 512, x.end(), 0.0f);
    for (int c = 256; c < 512; c++) x[c] = 0; /* row 0: the first half only */
    run_weight(&card, k, x, 2, &second);
    for (float v : second) assert_true(v == 0);
    weights_free(k);
    delete w;
    w = whole_case(R_BF16, 64, 128, KERN_ROWS);
    struct kern_weight *out = NULL;
    struct err e = {};
    w->spans[1][0].count = 129;
    assert_int_equal(weights_load(loader, w->parts.data(), 1, w->how, w->use, &out, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
    delete w;
    w = whole_case(R_NVFP4, 64, 128, KERN_ROWS);
    w->spans[1][0].first = 8, w->spans[1][0].count = 32;
    e = (struct err){};
    assert_int_equal(weights_load(loader, w->parts.data(), 1, w->how, w->use, &out, &e), RC_BAD_INPUT);
    delete w;
}

static void test_table(void **)
{
    for (enum recipe r : {R_BF16, R_F16, R_Q6_K, R_FP8_ROW}) {
        struct source *s = source_new(r, 300, 768);
        struct kern_table *t = NULL;
        struct err e = {};
        assert_int_equal(weights_load_table(loader, &s->m, &t, &e), RC_OK);
        assert_int_equal(t->bf16, r == R_BF16);
        std::vector<float> want(300 * 768), got;
        for (int i = 0; i < 300; i++) quant_matrix_decode(&s->m, i, 0, 768, &want[i * 768]);
        if (t->bf16)
            for (uint16_t h : from_device<uint16_t>(t->rows_dev, want.size())) got.push_back(quant_bf16_to_f32(h));
        else
            got = from_device<float>(t->rows_dev, want.size());
        assert_memory_equal(got.data(), want.data(), want.size() * 4);
        weights_free_table(t);
        delete s;
    }
}

/* ---- benchmark ---- */

__global__ void fill_blocks(uint8_t *p, size_t n_bytes, int format)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n_bytes; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)(i * 2654435761u);
        h ^= h >> 15, h *= 0x7feb352du, h ^= h >> 13;
        const bool scale = format == BLOCK_NVFP4 && i % BLOCK_NVFP4_BYTES >= BLOCK_SLAB_BYTES;
        p[i] = scale                           ? (uint8_t)(0x60 + h % 100)
               : format == BLOCK_BF16 && i % 2 ? (uint8_t)(0x3c | (h & 0x80))
                                               : (uint8_t)h;
    }
}

struct bench_shape {
    const char *name;
    enum block_format format;
    int rows, cols, halves;
    bool swiglu;
    int group;
};

/* Microseconds of one of n launches in a recorded graph. */
template <class Launch> static double time_launches(int n, Launch launch)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    std::vector<float> us;
    CHECK_CUDA(cudaStreamBeginCapture(card.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < n; i++) launch(i);
    CHECK_CUDA(cudaStreamEndCapture(card.stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaEventCreate(&from), cudaEventCreate(&to);
    for (int r = 0; r < 11; r++) {
        float ms = 0;
        cudaEventRecord(from, card.stream);
        CHECK_CUDA(cudaGraphLaunch(exec, card.stream));
        cudaEventRecord(to, card.stream);
        CHECK_CUDA(cudaStreamSynchronize(card.stream));
        cudaEventElapsedTime(&ms, from, to);
        if (r > 1) us.push_back(ms * 1000 / n);
    }
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaEventDestroy(from), cudaEventDestroy(to);
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

static double time_shape(const struct bench_shape *s, int t, std::vector<struct device_matrix> &copies, void *act,
                         float *y, int n)
{
    return time_launches(n, [&](int i) {
        const struct device_matrix *m = &copies[i % copies.size()];
        if (s->swiglu)
            op_linear_decode_swiglu(&card, m, act, (struct kern_split){t, 0}, y);
        else
            op_linear_decode(&card, m, act, t, y, y + (size_t)t * s->rows, s->rows);
    });
}

static size_t bench_bytes(const struct bench_shape *s)
{
    return (size_t)((s->rows + 127) / 128 * 8) * act_blocks(s->cols) * block_bytes(s->format, 1);
}

static std::vector<struct device_matrix> bench_matrices(const struct bench_shape *s, int n_copies)
{
    struct device_matrix m = {};
    m.format = s->format, m.rows = s->rows, m.cols = s->cols, m.planes = 1, m.halves = s->halves, m.swiglu = s->swiglu;
    m.group = s->group, m.tiles = (s->rows + 127) / 128 * 8, m.blocks = act_blocks(s->cols);
    const size_t bytes = bench_bytes(s), rows = (size_t)m.tiles * 16;
    const size_t n_scales = rows * block_groups(m.blocks, m.group);
    std::vector<struct device_matrix> copies;
    std::vector<float> scales(rows > n_scales ? rows : n_scales, m.format == BLOCK_FP8 ? 0x1p60f : 0x1p-60f);
    for (int i = 0; i < n_copies; i++) {
        uint8_t *p;
        float *f;
        CHECK_CUDA(cudaMalloc((void **)&p, bytes));
        CHECK_CUDA(cudaMalloc((void **)&f, (rows + n_scales) * 4));
        fill_blocks<<<1056, 256, 0, card.stream>>>(p, bytes, m.format);
        CHECK_CUDA(cudaMemcpy(f, scales.data(), rows * 4, cudaMemcpyHostToDevice));
        std::vector<float> ones(n_scales, 1.0f);
        CHECK_CUDA(cudaMemcpy(f + rows, ones.data(), n_scales * 4, cudaMemcpyHostToDevice));
        m.blocks_dev = p, m.row_scale_dev = f, m.group_scale_dev = f + rows;
        copies.push_back(m);
    }
    return copies;
}

static void free_matrices(const std::vector<struct device_matrix> &copies)
{
    for (const struct device_matrix &c : copies) cudaFree((void *)c.blocks_dev), cudaFree((void *)c.row_scale_dev);
}

/* For 64 rows; y of two planes. */
static void bench_buffers(int cols, int rows, void **act, float **y)
{
    const size_t act_bytes = (size_t)64 * act_blocks(cols) * 128;
    CHECK_CUDA(cudaMalloc(act, act_bytes));
    CHECK_CUDA(cudaMemset(*act, 0x5d, act_bytes));
    CHECK_CUDA(cudaMalloc((void **)y, (size_t)2 * 64 * rows * 4));
}

static void bench_one(const struct bench_shape *s)
{
    const size_t bytes = bench_bytes(s);
    const int n_copies = bytes > 300000000 ? 1 : (int)(500000000 / bytes + 2);
    std::vector<struct device_matrix> copies = bench_matrices(s, n_copies);
    void *act;
    float *y;
    bench_buffers(s->cols, copies[0].tiles * 16, &act, &y);
    printf("%-28s %7.1f MB", s->name, bytes / 1e6);
    for (int t : {1, 4, 8, 16, 32, 64}) {
        const double us = time_shape(s, t, copies, act, y,
                                     bytes > 300000000   ? 4
                                     : 2 * n_copies > 24 ? 2 * n_copies
                                                         : 24);
        printf("  T=%d %.2f us %.0f GB/s", t, us, bytes / us * 1e-3);
    }
    printf("\n");
    free_matrices(copies), cudaFree(act), cudaFree(y);
}

/* Two matrices of one x: one launch for both, and one for each. */
static void bench_beside(const struct bench_shape *s, const struct bench_shape *beside)
{
    const int n = (int)(500000000 / bench_bytes(s) + 2), rows = s->rows + beside->rows;
    const std::vector<struct device_matrix> a = bench_matrices(s, n), b = bench_matrices(beside, n);
    void *act;
    float *y;
    bench_buffers(s->cols, rows, &act, &y);
    printf("%-28s", s->name);
    for (int t : {1, 4, 8}) {
        const double two = time_launches(2 * n, [&](int i) {
            op_linear_decode(&card, &a[i % n], act, t, y, NULL, rows);
            op_linear_decode(&card, &b[i % n], act, t, y + s->rows, NULL, rows);
        });
        bool done = true;
        const double one = time_launches(2 * n, [&](int i) {
            done = op_linear_decode_beside(&card, &a[i % n], &b[i % n], act, t, y, y + s->rows, rows) && done;
        });
        printf("  T=%d two launches %.2f us", t, two);
        if (done) printf(" one %.2f us", one);
    }
    printf("\n");
    free_matrices(a), free_matrices(b), cudaFree(act), cudaFree(y);
}

static void bench_loading(enum recipe r, int rows, int cols)
{
    struct weight_case *w = whole_case(r, rows, cols, KERN_ROWS);
    for (int i = 0; i < 3; i++) {
        cudaEvent_t unused;
        cudaEventCreate(&unused), cudaEventDestroy(unused);
        const int64_t from = clock_now_us();
        struct kern_weight *k = load(w);
        const int64_t us = clock_now_us() - from;
        if (i == 2)
            printf("loading %-32s %7.1f MB %8.2f ms %6.2f GB/s\n", w->name.c_str(), k->bytes / 1e6, us / 1e3,
                   k->bytes / 1e3 / us);
        weights_free(k);
    }
    delete w;
}

static void bench(void)
{
    const struct bench_shape shapes[] = {{"gate_up NVFP4 17408x5120", BLOCK_NVFP4, 17408, 5120, 1, true, 0},
                                         {"gate_up NVFP4 34816x5120", BLOCK_NVFP4, 34816, 5120, 1, true, 0},
                                         {"down NVFP4 5120x8704", BLOCK_NVFP4, 5120, 8704, 2, false, 0},
                                         {"down NVFP4 5120x17408", BLOCK_NVFP4, 5120, 17408, 2, false, 0},
                                         {"qkgv FP8 7168x5120", BLOCK_FP8, 7168, 5120, 1, false, 0},
                                         {"qkvz FP8 8192x5120", BLOCK_FP8, 8192, 5120, 1, false, 0},
                                         {"qkvz FP8 16384x5120", BLOCK_FP8, 16384, 5120, 1, false, 0},
                                         {"o FP8 5120x3072", BLOCK_FP8, 5120, 3072, 2, false, 0},
                                         {"o FP8 5120x6144", BLOCK_FP8, 5120, 6144, 2, false, 0},
                                         {"gate_up FP8 17408x5120", BLOCK_FP8, 17408, 5120, 1, true, 0},
                                         {"down FP8 5120x8704", BLOCK_FP8, 5120, 8704, 2, false, 0},
                                         {"down FP8 5120x17408", BLOCK_FP8, 5120, 17408, 2, false, 0},
                                         {"lm_head FP8 124160x5120", BLOCK_FP8, 124160, 5120, 1, false, 0},
                                         {"lm_head FP8 248320x5120", BLOCK_FP8, 248320, 5120, 1, false, 0},
                                         {"BF16 14336x5120", BLOCK_BF16, 14336, 5120, 1, false, 0},
                                         {"BF16 5120x10240", BLOCK_BF16, 5120, 10240, 1, false, 0},
                                         {"BF16 5120x17408", BLOCK_BF16, 5120, 17408, 2, false, 0},
                                         {"FP8 by 128 8192x5120", BLOCK_FP8, 8192, 5120, 1, false, 128},
                                         {"INT8 by 128 8192x5120", BLOCK_INT8, 8192, 5120, 1, false, 128},
                                         {"INT8 by 32 8192x5120", BLOCK_INT8, 8192, 5120, 1, false, 32},
                                         {"BF16 plain 4096x4096", BLOCK_BF16, 4096, 4096, 1, false, 0}};
    for (const struct bench_shape &s : shapes) bench_one(&s);
    const struct bench_shape pairs[][2] = {{{"qkvz FP8 8192 and BF16 48", BLOCK_FP8, 8192, 5120, 1, false, 0},
                                            {"", BLOCK_BF16, 48, 5120, 1, false, 0}},
                                           {{"qkvz FP8 16384 and BF16 96", BLOCK_FP8, 16384, 5120, 1, false, 0},
                                            {"", BLOCK_BF16, 96, 5120, 1, false, 0}}};
    for (const auto &p : pairs) bench_beside(&p[0], &p[1]);
    bench_loading(R_NVFP4, 17408, 5120), bench_loading(R_GGUF_NVFP4, 17408, 5120),
        bench_loading(R_FP8_ROW, 16384, 5120);
    bench_loading(R_FP8_128, 16384, 5120), bench_loading(R_BF16, 14336, 5120), bench_loading(R_Q4_K, 8192, 5120);
}

int main(int argc, char **argv)
{
    struct err e = {};
    card = open_card();
    if (weight_loader_open(&card, &loader, &e) != RC_OK) {
        fprintf(stderr, "%s\n", e.text);
        return 1;
    }
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench();
        weight_loader_close(loader);
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_formats),   cmocka_unit_test(test_small_models),
                                       cmocka_unit_test(test_big_model), cmocka_unit_test(test_beside),
                                       cmocka_unit_test(test_cut_and_stacked), cmocka_unit_test(test_damaged),
                                       cmocka_unit_test(test_planes_and_refusals), cmocka_unit_test(test_table)};
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    weight_loader_close(loader);
    return failed;
}
