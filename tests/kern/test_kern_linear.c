/* The CPU backend's weights: linear layers and the embedding, in every format a model file may hold, native and as W8.
 *
 * Every instruction set the machine has is tested. Three kinds of claims: values (within a named tolerance of a double
 * precision computation from the weights as decoded), exactness (a unit vector returns a column of weights exactly, whatever
 * spans it was cut out of), and bits (a row gives the same bits alone, among others, on any threads, beside rows full of
 * NaN). Outputs lie between guard words; inputs are compared with a copy. */
#include "kern_fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- stored tensors ---- */

/* A number format, and how scales lie beside its codes. Those below QUANT_FORMATS are the formats themselves: FP8 with one
 * float32 scale, FP4 with E4M3 scales and a factor. */
enum kind {
    FP8_TENSOR = QUANT_FP8,
    FP4_MULTIPLY = QUANT_FP4_PAIRS,
    FP8_CHANNELS = QUANT_FORMATS, /* BF16, one a row */
    FP8_BLOCKS,                   /* BF16, 128 x 128 */
    FP8_BLOCKS_F16,               /* F16, 3 x 64, divided by a factor */
    FP4_DIVIDE,                   /* E4M3, divided by a factor */
    FP4_E8M0,                     /* groups of 32 */
    FP4_F32,                      /* float32 scales, groups of 48: no kernel of its own */
    KINDS
};

struct stored {
    struct quant_matrix m;
    uint8_t *bytes, *scales;
};

static void put_factor(uint8_t *p, uint64_t *seed)
{
    const uint16_t half = quant_f32_to_f16(0.01f + 0.01f * random_float(seed) * 0.9f);
    memcpy(p, &half, sizeof half);
}

/* Makes one block of random bytes a sane one: factors of moderate size, no NaN. */
static void make_sane(enum quant_format f, uint8_t *p, uint64_t *seed)
{
    const float plain = random_float(seed) * 0.3f;
    const uint16_t half = quant_f32_to_f16(plain);
    switch (f) {
    case QUANT_F32: memcpy(p, &plain, 4); break;
    case QUANT_F16: memcpy(p, &half, 2); break;
    case QUANT_BF16: p[1] = (uint8_t)(0x3d | (p[1] & 0x80)); break;
    case QUANT_Q6_K: put_factor(p + 208, seed); break;
    case QUANT_MXFP4: p[0] = (uint8_t)(115 + p[0] % 10); break;
    case QUANT_NVFP4:
        for (int i = 0; i < 4; i++) p[i] = (uint8_t)(p[i] % 0x7f);
        break;
    case QUANT_FP8:
        if ((p[0] & 0x7f) == 0x7f) p[0] ^= 1;
        break;
    case QUANT_FP4_PAIRS:
    case QUANT_E8M0: break;
    case QUANT_Q4_1:
    case QUANT_Q5_1:
    case QUANT_Q4_K:
    case QUANT_Q5_K: put_factor(p + 2, seed); /* fall through */
    default: put_factor(p, seed); break;
    }
}

static void put_scale(enum quant_format f, uint8_t *p, uint64_t *seed)
{
    const float plain = 0.02f + 0.01f * random_float(seed);
    const uint16_t half = quant_f32_to_f16(plain);
    uint32_t bits;
    memcpy(&bits, &plain, sizeof bits);
    switch (f) {
    case QUANT_F32: memcpy(p, &plain, 4); break;
    case QUANT_F16: memcpy(p, &half, 2); break;
    case QUANT_BF16: p[0] = (uint8_t)(bits >> 16), p[1] = (uint8_t)(bits >> 24); break;
    case QUANT_E8M0: p[0] = (uint8_t)(115 + random_next(seed) % 10); break;
    default: p[0] = (uint8_t)(random_next(seed) % 0x7f); break;
    }
}

/* The scales beside the codes: a grid of blocks. */
static void add_grid(struct stored *s, enum quant_format f, uint64_t row_block, uint64_t col_block, uint64_t seed)
{
    struct quant_matrix *m = &s->m;
    m->scales = (struct quant_scales){.format = f, .row_block = row_block, .col_block = col_block};
    m->scales.per_row = (m->cols + col_block - 1) / col_block;
    const size_t n = (size_t)((m->rows + row_block - 1) / row_block * m->scales.per_row), bytes = quant_block_bytes(f);
    s->scales = malloc(n * bytes);
    assert_non_null(s->scales);
    for (size_t i = 0; i < n; i++) put_scale(f, s->scales + i * bytes, &seed);
    m->scales.bytes = s->scales;
}

static enum quant_format format_of(int kind)
{
    if (kind < QUANT_FORMATS) return (enum quant_format)kind;
    return kind < FP4_DIVIDE ? QUANT_FP8 : QUANT_FP4_PAIRS;
}

static struct stored stored_new(int kind, int rows, int cols, uint64_t seed)
{
    const enum quant_format f = format_of(kind);
    struct stored s = {{.format = f, .rows = (uint64_t)rows, .cols = (uint64_t)cols, .global = 1}, NULL, NULL};
    const uint64_t all = s.m.rows, wide = s.m.cols;
    size_t row_bytes = 0;
    assert_true(quant_row_bytes(f, wide, &row_bytes));
    const size_t n = (size_t)rows * row_bytes;
    s.m.bytes = s.bytes = malloc(n + 1);
    assert_non_null(s.bytes);
    for (size_t i = 0; i < n; i++) s.bytes[i] = (uint8_t)random_next(&seed);
    for (size_t at = 0; at < n; at += quant_block_bytes(f)) make_sane(f, s.bytes + at, &seed);
    switch (kind) {
    case QUANT_NVFP4: s.m.global = 0.0123f; break;
    case FP8_TENSOR: add_grid(&s, QUANT_F32, all, wide, seed); break;
    case FP8_CHANNELS: add_grid(&s, QUANT_BF16, 1, wide, seed); break;
    case FP8_BLOCKS: add_grid(&s, QUANT_BF16, 128, 128, seed); break;
    case FP8_BLOCKS_F16:
        add_grid(&s, QUANT_F16, 3, 64, seed);
        s.m.global = 1.7f;
        s.m.divide = true;
        break;
    case FP4_MULTIPLY:
    case FP4_DIVIDE:
        add_grid(&s, QUANT_FP8, 1, 16, seed);
        s.m.divide = kind == FP4_DIVIDE;
        s.m.global = s.m.divide ? 1234.5f : 0.00081f;
        break;
    case FP4_E8M0: add_grid(&s, QUANT_E8M0, 1, 32, seed); break;
    case FP4_F32: add_grid(&s, QUANT_F32, 1, 48, seed); break;
    default: break;
    }
    return s;
}

static void stored_free(struct stored *s)
{
    free(s->bytes);
    free(s->scales);
}

/* A row's values as a backend should see them, and what rounding errors are relative to: |scale * code| + |min|. */
static void oracle_row(const struct quant_matrix *m, enum kern_weights how, uint64_t row, float *value, float *magnitude)
{
    const size_t n = (size_t)m->cols, group = how == KERN_WEIGHTS_W8 ? QUANT_W8_GROUP : quant_matrix_group(m);
    int8_t *codes = malloc(n);
    float *scales = malloc((n / group + 1) * sizeof *scales), *mins = malloc((n / group + 1) * sizeof *mins);
    assert_true(codes && scales && mins);
    if (how == KERN_WEIGHTS_W8) {
        quant_matrix_w8(m, row, 0, n, codes, scales);
        for (size_t k = 0; k < n; k++) value[k] = scales[k / group] * (float)codes[k];
    } else {
        quant_matrix_decode(m, row, 0, n, value);
    }
    for (size_t k = 0; k < n; k++) magnitude[k] = fabsf(value[k]);
    if (how == KERN_WEIGHTS_NATIVE && quant_has_codes(m->format)) {
        quant_matrix_codes(m, row, 0, n, codes, scales, mins);
        for (size_t k = 0; k < n; k++)
            magnitude[k] = fabsf(scales[k / group] * (float)codes[k]) + fabsf(mins[k / group]);
    }
    free(codes);
    free(scales);
    free(mins);
}

enum { MAX_PARTS = 3 };
struct linear_case {
    int n_parts;
    struct {
        int kind, row_first, rows, tensor_rows;
    } parts[MAX_PARTS];
    int col_first, cols, tensor_cols;
    enum kern_weights how;
};

struct linear_fixture {
    struct kern_weight_part parts[MAX_PARTS];
    struct kern_span row_spans[MAX_PARTS], col_span;
    struct stored stored[MAX_PARTS];
    enum kern_weights how;
    int n_parts, rows, cols;
};

static void fixture_make(struct linear_fixture *f, const struct linear_case *c)
{
    *f = (struct linear_fixture){.n_parts = c->n_parts, .cols = c->cols, .how = c->how};
    f->col_span = (struct kern_span){(uint64_t)c->col_first, (uint64_t)c->cols};
    for (int i = 0; i < c->n_parts; i++) {
        f->stored[i] = stored_new(c->parts[i].kind, c->parts[i].tensor_rows, c->tensor_cols, (uint64_t)i + 11);
        f->row_spans[i] = (struct kern_span){(uint64_t)c->parts[i].row_first, (uint64_t)c->parts[i].rows};
        f->parts[i] = (struct kern_weight_part){
            .matrix = f->stored[i].m, .rows = &f->row_spans[i], .n_rows = 1, .cols = &f->col_span, .n_cols = 1};
        f->rows += c->parts[i].rows;
    }
}

static void fixture_free(struct linear_fixture *f)
{
    for (int i = 0; i < f->n_parts; i++) stored_free(&f->stored[i]);
}

static struct kern_weight *load(struct kern *k, const struct kern_weight_part *parts, int n_parts, enum kern_weights how)
{
    struct kern_weight *w = NULL;
    struct err e = {0};
    if (k->weight_load(k, parts, n_parts, how, KERN_ROWS, &w, &e) != RC_OK) fail_msg("%s", e.text);
    return w;
}

/* Rank shapes of SmolLM2-135M for 1, 2 and 3 ranks, mixed formats, cuts inside a block, tails of every kind. */
static const struct linear_case linear_cases[] = {
    {3, {{QUANT_Q4_1, 0, 576, 576}, {QUANT_Q4_1, 0, 192, 192}, {QUANT_Q4_1, 0, 192, 192}}, 0, 576, 576, 0},
    {3, {{QUANT_Q4_1, 0, 384, 576}, {QUANT_Q4_1, 0, 128, 192}, {QUANT_Q4_1, 0, 128, 192}}, 0, 576, 576, 0},
    {3, {{QUANT_Q4_1, 384, 192, 576}, {QUANT_Q4_1, 128, 64, 192}, {QUANT_Q4_1, 128, 64, 192}}, 0, 576, 576, 0},
    {1, {{QUANT_Q4_1, 0, 576, 576}}, 0, 384, 576, 0},
    {1, {{QUANT_Q4_1, 0, 576, 576}}, 384, 192, 576, 0},
    {2, {{QUANT_Q4_1, 672, 864, 1536}, {QUANT_Q4_1, 672, 864, 1536}}, 0, 576, 576, 0},
    {1, {{QUANT_Q4_1, 0, 576, 576}}, 672, 864, 1536, 0},
    {2, {{QUANT_Q4_1, 1024, 512, 1536}, {QUANT_Q4_1, 1024, 512, 1536}}, 0, 576, 576, 0},
    {1, {{QUANT_Q8_0, 1024, 1024, 2048}}, 0, 576, 576, 0},
    {3, {{QUANT_Q4_K, 3, 50, 60}, {QUANT_Q6_K, 5, 33, 40}, {QUANT_F16, 0, 7, 7}}, 32, 96, 256, 0},
    {3, {{QUANT_Q5_K, 1, 16, 20}, {QUANT_Q5_0, 0, 17, 17}, {QUANT_Q5_1, 0, 15, 15}}, 288, 448, 768, 0},
    {2, {{QUANT_Q6_K, 0, 40, 40}, {QUANT_F32, 0, 24, 24}}, 48, 80, 256, 0},
    {3, {{QUANT_Q4_0, 0, 31, 31}, {QUANT_Q8_0, 2, 1, 3}, {QUANT_BF16, 0, 65, 65}}, 0, 32, 64, 0},
    {2, {{QUANT_F32, 0, 33, 33}, {QUANT_BF16, 0, 5, 5}}, 3, 37, 41, 0},
    {1, {{QUANT_F16, 0, 19, 19}}, 0, 1, 1, 0},
    {1, {{QUANT_F32, 0, 3, 3}}, 0, 600, 600, 0},
    {3, {{QUANT_NVFP4, 3, 40, 50}, {QUANT_MXFP4, 0, 17, 17}, {FP8_BLOCKS, 100, 60, 160}}, 96, 416, 640, 0},
    {3, {{FP4_MULTIPLY, 0, 33, 33}, {FP4_DIVIDE, 7, 20, 27}, {FP4_E8M0, 0, 5, 5}}, 64, 288, 512, 0},
    {3, {{FP8_TENSOR, 0, 31, 31}, {FP8_CHANNELS, 1, 18, 20}, {FP8_BLOCKS_F16, 0, 64, 64}}, 192, 333, 600, 0},
    {3, {{QUANT_Q4_K, 3, 50, 60}, {FP8_BLOCKS, 0, 33, 140}, {QUANT_BF16, 0, 17, 17}}, 128, 600, 768, KERN_WEIGHTS_W8},
    {2, {{FP4_DIVIDE, 3, 50, 60}, {QUANT_NVFP4, 0, 33, 140}}, 160, 300, 768, KERN_WEIGHTS_W8},
    {2, {{FP4_F32, 0, 40, 40}, {QUANT_F32, 0, 20, 20}}, 48, 240, 336, 0},
};
enum { N_LINEAR_CASES = sizeof linear_cases / sizeof *linear_cases };

/* ---- values ---- */

static void check_linear(struct kern *k, const struct linear_fixture *f, enum kern_provenance p, int rows)
{
    const size_t cols = (size_t)f->cols, outs = (size_t)f->rows, n = (size_t)rows;
    struct kern_weight *w = load(k, f->parts, f->n_parts, f->how);
    float *x = random_new(n * cols, 3), *kept = random_new(n * cols, 3), *y = guarded_new(n * outs);
    call_linear(k, w, p, x, rows, y);
    assert_memory_equal(x, kept, n * cols * sizeof *x);
    const size_t stored = (size_t)f->parts[0].matrix.cols, skip = (size_t)f->col_span.first;
    float *value = malloc(stored * sizeof *value), *magnitude = malloc(stored * sizeof *magnitude);
    assert_true(value && magnitude);
    size_t out = 0;
    for (int i = 0; i < f->n_parts; i++)
        for (uint64_t r = 0; r < f->row_spans[i].count; r++, out++) {
            oracle_row(&f->parts[i].matrix, f->how, f->row_spans[i].first + r, value, magnitude);
            for (size_t row = 0; row < n; row++) {
                double sum = 0, scale = 0;
                for (size_t c = 0; c < cols; c++) {
                    sum += (double)value[skip + c] * (double)x[row * cols + c];
                    scale += (double)magnitude[skip + c] * fabs((double)x[row * cols + c]);
                }
                const double got = (double)y[row * outs + out], bound = chain_tolerance((double)cols + 2) * scale;
                if (!(fabs(got - sum) <= bound))
                    fail_msg("%s %s row %zu output %zu: %g, oracle %g, bound %g", k->numerics,
                             quant_name(f->parts[i].matrix.format), row, out, got, sum, bound);
            }
        }
    free(value);
    free(magnitude);
    guarded_free(y, n * outs);
    free(x);
    free(kept);
    k->weight_free(k, w);
}

static void test_linear_oracle(struct kern *k)
{
    for (int c = 0; c < N_LINEAR_CASES; c++) {
        struct linear_fixture f;
        fixture_make(&f, &linear_cases[c]);
        check_linear(k, &f, KERN_DECODE, c % 2 ? 3 : 5);
        check_linear(k, &f, KERN_PREFILL, c % 2 ? 13 : 2);
        fixture_free(&f);
    }
}

/* ---- exactness ---- */

/* Stored places of the part's rows or columns, in its order. */
static int places_of(const struct kern_span *spans, int n, uint64_t *places)
{
    int total = 0;
    for (int i = 0; i < n; i++)
        for (uint64_t j = 0; j < spans[i].count; j++) places[total++] = spans[i].first + j;
    return total;
}

/* Whether a kernel's number is the stored one. A row that holds a NaN answers NaN to every vector, since 0 * NaN is NaN; one
 * that holds an infinity (a scale or a product that overflowed) may, depending on where the scale enters. */
static bool same_number(float got, float stored, bool nan_row, bool infinite_row)
{
    if (nan_row) return infinite_row ? !isfinite(got) : isnan(got);
    return got == stored || (infinite_row && isnan(got));
}

static void check_columns(struct kern *k, const struct kern_weight_part *part, enum kern_weights how, enum kern_provenance p)
{
    enum { MOST = 1024 };
    uint64_t row_of[MOST], col_of[MOST];
    const int outs = places_of(part->rows, part->n_rows, row_of), used = places_of(part->cols, part->n_cols, col_of);
    struct kern_weight *w = load(k, part, 1, how);
    const size_t n = (size_t)used, stored = (size_t)part->matrix.cols;
    float *x = calloc(n * n, sizeof *x), *y = guarded_new(n * (size_t)outs);
    float *value = malloc(stored * sizeof *value), *magnitude = malloc(stored * sizeof *magnitude);
    assert_true(x && value && magnitude);
    for (size_t i = 0; i < n; i++) x[i * n + i] = 1;
    call_linear(k, w, p, x, used, y);
    for (int r = 0; r < outs; r++) {
        oracle_row(&part->matrix, how, row_of[r], value, magnitude);
        bool nan_row = false, infinite_row = false;
        for (size_t i = 0; i < n; i++) {
            nan_row = nan_row || isnan(value[col_of[i]]);
            infinite_row = infinite_row || isinf(value[col_of[i]]);
        }
        for (size_t i = 0; i < n; i++) {
            const float got = y[i * (size_t)outs + (size_t)r];
            if (!same_number(got, value[col_of[i]], nan_row, infinite_row))
                fail_msg("%s %s%s row %d column %zu: %a, stored %a", k->numerics, quant_name(part->matrix.format),
                         how ? " as W8" : "", r, i, (double)got, (double)value[col_of[i]]);
        }
    }
    free(value);
    free(magnitude);
    guarded_free(y, n * (size_t)outs);
    free(x);
    k->weight_free(k, w);
}

/* Unit vectors return the weights: every kind exactly as quant decodes it, in both provenances. */
static void check_exact(struct kern *k, const struct quant_matrix *m, const struct kern_span *rows, int n_rows,
                        const struct kern_span *cols, int n_cols, enum kern_weights how)
{
    const struct kern_weight_part part = {.matrix = *m, .rows = rows, .n_rows = n_rows, .cols = cols, .n_cols = n_cols};
    check_columns(k, &part, how, KERN_DECODE);
    check_columns(k, &part, how, KERN_PREFILL);
}

static void test_linear_exact(struct kern *k)
{
    static const struct kern_span rows = {2, 37}, middle = {192, 224}, start = {0, 288}, ragged = {128, 221}, narrow = {48, 80};
    for (int kind = 0; kind < KINDS; kind++) {
        if (kind == QUANT_E8M0) continue;
        struct stored s = stored_new(kind, 40, 768, 11);
        if (kind == QUANT_Q4_0) { /* a factor whose 8-fold is no F16 any more */
            const uint16_t huge = quant_f32_to_f16(60000);
            memcpy(s.bytes + 5 * (768 / 32) * 18 + 7 * 18, &huge, sizeof huge);
        }
        check_exact(k, &s.m, &rows, 1, &middle, 1, KERN_WEIGHTS_NATIVE);
        check_exact(k, &s.m, &rows, 1, &start, 1, KERN_WEIGHTS_NATIVE);
        if (!quant_has_codes(s.m.format)) check_exact(k, &s.m, &rows, 1, &ragged, 1, KERN_WEIGHTS_NATIVE);
        if (quant_matrix_group(&s.m) == 16) check_exact(k, &s.m, &rows, 1, &narrow, 1, KERN_WEIGHTS_NATIVE);
        check_exact(k, &s.m, &rows, 1, &start, 1, KERN_WEIGHTS_W8);
        check_exact(k, &s.m, &rows, 1, &middle, 1, KERN_WEIGHTS_W8);
        check_exact(k, &s.m, &rows, 1, &ragged, 1, KERN_WEIGHTS_W8);
        check_exact(k, &s.m, &rows, 1, &narrow, 1, KERN_WEIGHTS_W8);
        stored_free(&s);
    }
}

/* Rows and columns in the order of a tiled file: single rows (gates), heads of 64 rows, column blocks of 64 and 128. */
static void test_linear_spans(struct kern *k)
{
    static const struct kern_span single[] = {{5, 1}, {0, 1}, {9, 1}, {3, 1}, {39, 1}, {4, 1}, {5, 1}};
    static const struct kern_span heads[] = {{128, 64}, {0, 64}};
    static const struct kern_span narrow[] = {{192, 64}, {0, 64}, {640, 64}, {64, 64}};
    static const struct kern_span wide[] = {{384, 128}, {0, 128}};
    static const struct kern_span mixed[] = {{512, 128}, {192, 64}, {320, 64}};
    for (int kind = 0; kind < KINDS; kind++) {
        if (kind == QUANT_E8M0) continue;
        const bool any_block = kind != FP4_F32 && kind != FP8_BLOCKS_F16;
        struct stored s = stored_new(kind, 260, 768, 12);
        for (int how = KERN_WEIGHTS_NATIVE; how <= KERN_WEIGHTS_W8; how++) {
            const enum kern_weights h = (enum kern_weights)how;
            check_exact(k, &s.m, single, 7, narrow, 4, h);
            check_exact(k, &s.m, single, 7, mixed, 3, h);
            if (any_block) check_exact(k, &s.m, heads, 2, wide, 2, h);
        }
        stored_free(&s);
    }
    /* One scale a row: columns may be cut anywhere. */
    static const struct kern_span odd[] = {{500, 3}, {17, 130}, {200, 1}};
    struct stored s = stored_new(FP8_CHANNELS, 260, 768, 12);
    check_exact(k, &s.m, heads, 1, odd, 3, KERN_WEIGHTS_NATIVE);
    stored_free(&s);
}

/* All codes and all scales there are, one scale a row: subnormals, both zeros, overflow and NaN among them. */
static void test_every_code(struct kern *k)
{
    static const struct kern_span all_rows = {0, 256}, two_rows = {0, 2}, whole = {0, 256}, group = {0, 16}, pair = {0, 32};
    static const float globals[] = {1, 0.37f, 3e-38f, 1e30f, -2};
    uint8_t codes[256 * 17], scales[256];
    for (int i = 0; i < 256; i++) scales[i] = (uint8_t)i;
    struct quant_matrix m = {.format = QUANT_FP8, .rows = 2, .cols = 256, .bytes = codes, .global = 0.7f};
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)(i & 0x7f) == 0x7f ? 0 : (uint8_t)i, codes[256 + i] = (uint8_t)i;
    check_exact(k, &m, &two_rows, 1, &whole, 1, KERN_WEIGHTS_NATIVE);
    check_exact(k, &m, &two_rows, 1, &whole, 1, KERN_WEIGHTS_W8);
    for (int i = 0; i < 256 * 16; i++) codes[i] = (uint8_t)(i % 8 * 2 | (i % 8 * 2 + 1) << 4); /* 0 .. 15, again and again */
    for (size_t g = 0; g < sizeof globals / sizeof *globals; g++)
        for (int divide = 0; divide < 2; divide++) {
            m = (struct quant_matrix){.format = QUANT_FP4_PAIRS, .rows = 256, .cols = 16, .bytes = codes, .global = globals[g]};
            m.divide = divide;
            m.scales = (struct quant_scales){scales, QUANT_FP8, 1, 16, 1};
            check_exact(k, &m, &all_rows, 1, &group, 1, KERN_WEIGHTS_NATIVE);
            m.cols = 32;
            m.scales = (struct quant_scales){scales, QUANT_E8M0, 1, 32, 1};
            check_exact(k, &m, &all_rows, 1, &pair, 1, KERN_WEIGHTS_NATIVE);
        }
}

/* What is no number stays none: in its own row, and in no other. */
static void test_no_numbers(struct kern *k)
{
    enum { ROWS = 20, COLS = 256, AT = 77, ROW = 6 };
    static const struct kern_span rows = {0, ROWS}, cols = {0, COLS};
    static const uint16_t f16_nan = 0x7e00, bf16_infinity = 0x7f80;
    static const float infinity = INFINITY;
    for (int i = 0; i < 5; i++) {
        static const int kinds[] = {FP8_BLOCKS, FP4_MULTIPLY, QUANT_F16, QUANT_BF16, QUANT_F32};
        struct stored s = stored_new(kinds[i], ROWS, COLS, 13);
        const size_t at = ROW * COLS + AT;
        switch (kinds[i]) {
        case FP8_BLOCKS: s.bytes[at] = 0xff; break;
        case FP4_MULTIPLY: s.scales[at / 16] = 0xff; break;
        case QUANT_F16: memcpy(s.bytes + 2 * at, &f16_nan, 2); break;
        case QUANT_BF16: memcpy(s.bytes + 2 * at, &bf16_infinity, 2); break;
        default: memcpy(s.bytes + 4 * at, &infinity, 4); break;
        }
        const struct kern_weight_part part = {.matrix = s.m, .rows = &rows, .n_rows = 1, .cols = &cols, .n_cols = 1};
        float *x = random_new(COLS, 3), *y = guarded_new(ROWS);
        for (int how = 0; how < 2; how++)
            for (int p = 0; p < 2; p++) {
                struct kern_weight *w = load(k, &part, 1, (enum kern_weights)how);
                call_linear(k, w, (enum kern_provenance)p, x, 1, y);
                for (int r = 0; r < ROWS; r++) assert_int_equal(isfinite(y[r]) != 0, r != ROW);
                if (how == KERN_WEIGHTS_W8) assert_true(isnan(y[ROW]));
                k->weight_free(k, w);
            }
        guarded_free(y, ROWS);
        free(x);
        stored_free(&s);
    }
}

/* ---- bits ---- */

/* A row's bits beside any number of other rows, some of them NaN, on 1, 2 and 3 threads. */
static void check_linear_rows(const char *isa, const struct linear_case *c, enum kern_provenance p, int most_rows)
{
    enum { MOST = 512 };
    static const int counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 31, 64, 512};
    struct linear_fixture f;
    fixture_make(&f, c);
    const size_t cols = (size_t)f.cols, outs = (size_t)f.rows;
    float *x = random_new(MOST * cols, 5), *one = malloc(outs * sizeof *one), *first = malloc(outs * sizeof *first);
    assert_true(one && first);
    for (int threads = 1; threads <= 3; threads++) {
        struct kern *k = open_isa(isa, threads);
        struct kern_weight *w = load(k, f.parts, f.n_parts, f.how);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            const int n = counts[i], last = n - 1;
            if (n > most_rows) continue;
            float *y = guarded_new((size_t)n * outs), *mixed = malloc((size_t)n * cols * sizeof *mixed);
            assert_non_null(mixed);
            memcpy(mixed, x, (size_t)n * cols * sizeof *mixed);
            for (size_t j = 0; n > 2 && j < cols; j++) mixed[(size_t)(n / 2) * cols + j] = NAN;
            memcpy(mixed + (size_t)last * cols, x, cols * sizeof *x); /* the first row once more, at the end */
            call_linear(k, w, p, mixed, n, y);
            if (threads == 1 && n == 1) memcpy(first, y, outs * sizeof *first);
            if (n > 2) assert_bits(y, first, outs, "first row");
            assert_bits(y + (size_t)last * outs, first, outs, "last row");
            for (int r = 1; n == 7 && r < last; r++) {
                if (r == n / 2) continue;
                call_linear(k, w, p, mixed + (size_t)r * cols, 1, one);
                assert_bits(y + (size_t)r * outs, one, outs, "middle row");
            }
            free(mixed);
            guarded_free(y, (size_t)n * outs);
        }
        k->weight_free(k, w);
        k->close(k);
    }
    free(x);
    free(one);
    free(first);
    fixture_free(&f);
}

static void test_linear_rows(struct kern *k)
{
    static const int cases[] = {4, 9, 10, 12, 13, 16, 17, 18, 19};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int p = 0; p < 2; p++) { /* how PREFILL cuts many rows into blocks is no matter of the format */
            const int most_rows = i >= 5 ? 13 : p == KERN_PREFILL ? 512 : 64;
            check_linear_rows(k->numerics + strlen("cpu-"), &linear_cases[cases[i]], (enum kern_provenance)p, most_rows);
        }
}

/* ---- what is refused, and sizes ---- */

static void refuse(struct kern *k, const struct kern_weight_part *part, enum kern_weights how)
{
    struct err e = {0};
    struct kern_weight *w = (struct kern_weight *)(void *)&e;
    assert_int_equal(k->weight_load(k, part, 1, how, KERN_ROWS, &w, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
    assert_non_null(strstr(e.text, quant_name(part->matrix.format)));
    assert_null(w);
}

static void test_weight_errors(struct kern *k)
{
    static float bytes[64 * 64];
    const struct kern_span rows = {0, 4}, cols = {0, 64};
    const struct kern_weight_part good = {.matrix = {.format = QUANT_Q4_1, .rows = 4, .cols = 64, .bytes = bytes, .global = 1},
                                          .rows = &rows, .n_rows = 1, .cols = &cols, .n_cols = 1};
    const struct kern_span bad_cols[] = {{16, 32}, {0, 48}, {0, 96}, {0, 0}}; /* inside a group, cut, beyond the row, none */
    const struct kern_span bad_rows[] = {{0, 0}, {UINT64_MAX, 1}, {0, (uint64_t)1 << 40}};
    struct kern_weight_part bad[8];
    for (int i = 0; i < 8; i++) bad[i] = good;
    for (int i = 0; i < 4; i++) bad[i].cols = &bad_cols[i];
    for (int i = 0; i < 3; i++) bad[4 + i].rows = &bad_rows[i];
    bad[7].matrix.cols = 80; /* no whole blocks */
    for (int i = 0; i < 8; i++) refuse(k, &bad[i], KERN_WEIGHTS_NATIVE);
    struct err e = {0};
    struct kern_weight *w;
    struct kern_weight_part two[2] = {good, good};
    const struct kern_span half = {0, 32};
    two[1].cols = &half;
    assert_int_equal(k->weight_load(k, two, 2, KERN_WEIGHTS_NATIVE, KERN_ROWS, &w, &e), RC_BAD_INPUT);
    assert_non_null(strstr(e.text, "Q4_1"));
    assert_int_equal(k->weight_load(k, two, 0, KERN_WEIGHTS_NATIVE, KERN_ROWS, &w, NULL), RC_BAD_INPUT);
    k->weight_free(k, NULL);
}

/* Cuts that fall inside the groups of the wide formats. */
static void test_wide_errors(struct kern *k)
{
    const struct kern_span rows = {0, 4}, inside = {8, 64}, cut[] = {{0, 40}, {64, 32}}, sixteen = {16, 32};
    struct stored fp8 = stored_new(FP8_BLOCKS, 4, 256, 1), plain = stored_new(QUANT_BF16, 4, 256, 1);
    struct stored fp4 = stored_new(FP4_MULTIPLY, 4, 256, 1), mx = stored_new(FP4_E8M0, 4, 256, 1);
    struct kern_weight_part part = {.matrix = fp8.m, .rows = &rows, .n_rows = 1, .cols = &inside, .n_cols = 1};
    refuse(k, &part, KERN_WEIGHTS_NATIVE);
    refuse(k, &part, KERN_WEIGHTS_W8);
    part.matrix = fp4.m;
    refuse(k, &part, KERN_WEIGHTS_NATIVE);
    part.matrix = plain.m;
    refuse(k, &part, KERN_WEIGHTS_W8);
    part.cols = cut, part.n_cols = 2;
    refuse(k, &part, KERN_WEIGHTS_W8);
    part.matrix = fp8.m;
    refuse(k, &part, KERN_WEIGHTS_NATIVE);
    part.matrix.scales.col_block = 40; /* scales that end anywhere */
    refuse(k, &part, KERN_WEIGHTS_NATIVE);
    part.cols = &sixteen, part.n_cols = 1;
    part.matrix = mx.m;
    refuse(k, &part, KERN_WEIGHTS_NATIVE);
    part.matrix = fp4.m;
    part.matrix.scales.col_block = 24;
    refuse(k, &part, KERN_WEIGHTS_NATIVE);
    stored_free(&fp8), stored_free(&plain), stored_free(&fp4), stored_free(&mx);
}

/* Bytes that a panel of 16 rows of 512 columns takes: what the file takes, and little more. */
static void test_weight_bytes(struct kern *k)
{
    enum { ROWS = 16, COLS = 512, VALUES = ROWS * COLS };
    static const struct {
        int kind;
        enum kern_weights how;
        size_t bytes;
    } sizes[] = {
        {QUANT_Q4_1, KERN_WEIGHTS_NATIVE, VALUES * 20 / 32},     {QUANT_Q8_0, KERN_WEIGHTS_NATIVE, VALUES * 34 / 32},
        {QUANT_NVFP4, KERN_WEIGHTS_NATIVE, VALUES * 36 / 64},    {QUANT_MXFP4, KERN_WEIGHTS_NATIVE, VALUES * 17 / 32},
        {FP4_DIVIDE, KERN_WEIGHTS_NATIVE, VALUES * 9 / 16},      {FP4_E8M0, KERN_WEIGHTS_NATIVE, VALUES * 17 / 32},
        {FP8_TENSOR, KERN_WEIGHTS_NATIVE, VALUES * 132 / 128},   {FP8_BLOCKS, KERN_WEIGHTS_NATIVE, VALUES * 132 / 128},
        {QUANT_BF16, KERN_WEIGHTS_W8, VALUES * 132 / 128},       {QUANT_BF16, KERN_WEIGHTS_NATIVE, VALUES * 2},
    };
    static const struct kern_span rows = {0, ROWS}, cols = {0, COLS};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct stored s = stored_new(sizes[i].kind, ROWS, COLS, 1);
        const struct kern_weight_part part = {.matrix = s.m, .rows = &rows, .n_rows = 1, .cols = &cols, .n_cols = 1};
        struct kern_weight *w = load(k, &part, 1, sizes[i].how);
        assert_int_equal(k->weight_bytes(w), sizes[i].bytes);
        k->weight_free(k, w);
        stored_free(&s);
    }
}

/* A part that is marked stays native beside parts that are not. */
static void test_native_part(struct kern *k)
{
    enum { ROWS = 9, COLS = 128 };
    static const struct kern_span rows = {0, ROWS}, cols = {0, COLS};
    struct stored s = stored_new(QUANT_BF16, ROWS, COLS, 1);
    struct kern_weight_part parts[2];
    for (int i = 0; i < 2; i++)
        parts[i] = (struct kern_weight_part){.matrix = s.m, .rows = &rows, .n_rows = 1, .cols = &cols, .n_cols = 1};
    parts[1].native = true;
    struct kern_weight *both = load(k, parts, 2, KERN_WEIGHTS_W8);
    float *x = calloc(COLS, sizeof *x), *y = guarded_new(2 * ROWS), value[COLS], magnitude[COLS];
    assert_non_null(x);
    x[5] = 1;
    call_linear(k, both, KERN_DECODE, x, 1, y);
    for (uint64_t r = 0; r < ROWS; r++)
        for (int i = 0; i < 2; i++) {
            oracle_row(&s.m, i ? KERN_WEIGHTS_NATIVE : KERN_WEIGHTS_W8, r, value, magnitude);
            assert_true(y[(uint64_t)i * ROWS + r] == value[5]);
        }
    guarded_free(y, 2 * ROWS);
    free(x);
    k->weight_free(k, both);
    stored_free(&s);
}

static void test_embed(struct kern *k)
{
    for (int kind = 0; kind < KINDS; kind++) {
        enum { ROWS = 9, COLS = 768 };
        if (kind == QUANT_E8M0) continue;
        struct stored s = stored_new(kind, ROWS, COLS, 77);
        const int32_t ids[] = {6, 0, 3, 3}, stored_ids[] = {6, -2, -1, 3}, left[] = {3, 0};
        float *y = guarded_new(4 * COLS), row[COLS], magnitude[COLS];
        struct kern_table *table = NULL;
        assert_int_equal(k->table_load(k, &s.m, &table, NULL), RC_OK);
        const struct kern_batch b = {.tokens = stored_ids, .rows = {1, 3}, .tokens_dev = left};
        k->begin(k, &b);
        k->embed(k, table, y);
        k->table_free(k, table);
        for (int r = 0; r < 4; r++) {
            oracle_row(&s.m, KERN_WEIGHTS_NATIVE, (uint64_t)ids[r], row, magnitude);
            assert_bits(y + (size_t)r * COLS, row, COLS, "embed");
        }
        guarded_free(y, 4 * COLS);
        stored_free(&s);
    }
}

ON_EVERY_ISA(test_linear_oracle)
ON_EVERY_ISA(test_linear_exact)
ON_EVERY_ISA(test_linear_spans)
ON_EVERY_ISA(test_every_code)
ON_EVERY_ISA(test_no_numbers)
ON_EVERY_ISA(test_linear_rows)
ON_EVERY_ISA(test_weight_errors)
ON_EVERY_ISA(test_wide_errors)
ON_EVERY_ISA(test_weight_bytes)
ON_EVERY_ISA(test_native_part)
ON_EVERY_ISA(test_embed)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_weight_errors_isas), cmocka_unit_test(test_wide_errors_isas),
        cmocka_unit_test(test_weight_bytes_isas),  cmocka_unit_test(test_native_part_isas),
        cmocka_unit_test(test_linear_exact_isas),  cmocka_unit_test(test_linear_spans_isas),
        cmocka_unit_test(test_every_code_isas),    cmocka_unit_test(test_no_numbers_isas),
        cmocka_unit_test(test_linear_oracle_isas), cmocka_unit_test(test_linear_rows_isas),
        cmocka_unit_test(test_embed_isas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
