/* The CPU backend against an FP64 oracle, and its rows against themselves.
 *
 * Every instruction set the machine has is tested. Two kinds of claims: values (within named tolerances of a double
 * precision computation from inputs as stored) and bits (a row gives the same bits alone, among others, on any threads,
 * in any chunk and page, beside rows and free slots full of NaN). Outputs lie between guard words; inputs are compared
 * with a copy. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "kern_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* Half a unit in the last place of float32: the error of one rounding. */
#define ROUNDING 0x1p-24
/* Chains of n roundings of random sign err like sqrt(n) of them; four times that is not reached by chance. */
static double chain_tolerance(double n) { return 4 * sqrt(n) * ROUNDING; }
/* Attention: scores of magnitude below 8 err by about 8 * 8 roundings (64 products), the exponential carries that into
 * the weights; relative to the largest value. */
#define ATTENTION_TOLERANCE (128 * ROUNDING)
/* Element-wise functions: an exponential of one unit, two products, a quotient. */
#define ELEMENT_TOLERANCE (8 * ROUNDING)

static const char *const isa_names[] = {"generic", "avx2", "avx512", "amx"};

/* ---- help ---- */

static uint64_t random_next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    uint64_t z = *state;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static float random_float(uint64_t *state) { return (float)(random_next(state) >> 40) * 0x1p-23f - 1.0f; }

static void random_fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) x[i] = random_float(&seed);
}

enum { GUARD_WORDS = 64 };
static const uint32_t guard_word = 0x7fbadbad; /* a NaN */

/* n floats between guards; free with guarded_free, which checks them. */
static float *guarded_new(size_t n)
{
    uint32_t *words = malloc((n + 2 * GUARD_WORDS) * sizeof *words);
    assert_non_null(words);
    for (size_t i = 0; i < n + 2 * GUARD_WORDS; i++) words[i] = guard_word;
    return (float *)(void *)(words + GUARD_WORDS);
}

static void guarded_free(float *p, size_t n)
{
    uint32_t *words = (uint32_t *)(void *)p - GUARD_WORDS;
    for (size_t i = 0; i < GUARD_WORDS; i++) {
        assert_int_equal(words[i], guard_word);
        assert_int_equal(words[GUARD_WORDS + n + i], guard_word);
    }
    free(words);
}

static float *random_new(size_t n, uint64_t seed)
{
    float *x = malloc((n ? n : 1) * sizeof *x);
    assert_non_null(x);
    random_fill(x, n, seed);
    return x;
}

static void assert_bits(const float *a, const float *b, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a))
            fail_msg("%s: value %zu is %a, not %a", what, i, (double)a[i], (double)b[i]);
}

static struct kern *open_isa(const char *isa, int threads)
{
    struct kern *k = NULL;
    struct err e = {0};
    if (kern_cpu_open(isa, threads, &k, &e) != RC_OK) fail_msg("%s: %s", isa, e.text);
    return k;
}

/* ---- stored tensors ---- */

static void put_factor(uint8_t *p, uint64_t *seed)
{
    const uint16_t half = quant_f32_to_f16(0.01f + 0.01f * random_float(seed) * 0.9f);
    memcpy(p, &half, sizeof half);
}

/* Random bytes with sane factors. */
static uint8_t *stored_new(enum quant_format f, size_t rows, size_t cols, uint64_t seed)
{
    size_t row_bytes = 0;
    assert_true(quant_row_bytes(f, cols, &row_bytes));
    uint8_t *bytes = malloc(rows * row_bytes + 1);
    assert_non_null(bytes);
    for (size_t i = 0; i < rows * row_bytes; i++) bytes[i] = (uint8_t)random_next(&seed);
    const size_t block = quant_block_bytes(f);
    for (uint8_t *p = bytes; p < bytes + rows * row_bytes; p += block) {
        const float plain = random_float(&seed) * 0.3f;
        const uint16_t half = quant_f32_to_f16(plain);
        switch (f) {
        case QUANT_F32: memcpy(p, &plain, 4); break;
        case QUANT_F16: memcpy(p, &half, 2); break;
        case QUANT_BF16: p[1] = (uint8_t)(0x3d | (p[1] & 0x80)); break;
        case QUANT_Q6_K: put_factor(p + 208, &seed); break;
        case QUANT_Q4_1:
        case QUANT_Q5_1:
        case QUANT_Q4_K:
        case QUANT_Q5_K: put_factor(p + 2, &seed); /* fall through */
        default: put_factor(p, &seed); break;
        }
    }
    return bytes;
}

/* Value and error scale of one stored row: |scale * code| + |min| is what rounding errors are relative to. */
static void oracle_row(const struct kern_weight_part *p, uint64_t row, float *value, float *magnitude)
{
    size_t row_bytes = 0, n = (size_t)p->tensor_cols;
    assert_true(quant_row_bytes(p->format, n, &row_bytes));
    const uint8_t *bytes = (const uint8_t *)p->bytes + (p->row_first + row) * row_bytes;
    quant_decode(p->format, bytes, n, value);
    for (size_t k = 0; k < n; k++) magnitude[k] = fabsf(value[k]);
    if (!quant_has_codes(p->format)) return;
    const size_t group = quant_group_values(p->format);
    int8_t *codes = malloc(n);
    float *scales = malloc(n / group * sizeof *scales), *mins = malloc(n / group * sizeof *mins);
    assert_true(codes && scales && mins);
    quant_decode_codes(p->format, bytes, n, codes, scales, mins);
    for (size_t k = 0; k < n; k++) magnitude[k] = fabsf(scales[k / group] * (float)codes[k]) + fabsf(mins[k / group]);
    free(codes);
    free(scales);
    free(mins);
}

enum { MAX_PARTS = 3 };
struct linear_case {
    int n_parts;
    struct {
        enum quant_format format;
        int row_first, rows, tensor_rows;
    } parts[MAX_PARTS];
    int col_first, cols, tensor_cols;
};

struct linear_fixture {
    struct kern_weight_part parts[MAX_PARTS];
    uint8_t *bytes[MAX_PARTS];
    int n_parts, rows, cols;
};

static void fixture_make(struct linear_fixture *f, const struct linear_case *c)
{
    *f = (struct linear_fixture){.n_parts = c->n_parts, .cols = c->cols};
    for (int i = 0; i < c->n_parts; i++) {
        f->bytes[i] =
            stored_new(c->parts[i].format, (size_t)c->parts[i].tensor_rows, (size_t)c->tensor_cols, (uint64_t)i + 11);
        f->parts[i] = (struct kern_weight_part){c->parts[i].format,         f->bytes[i],
                                                (uint64_t)c->tensor_cols,   (uint64_t)c->parts[i].row_first,
                                                (uint64_t)c->parts[i].rows, (uint64_t)c->col_first,
                                                (uint64_t)c->cols};
        f->rows += c->parts[i].rows;
    }
}

static void fixture_free(struct linear_fixture *f)
{
    for (int i = 0; i < f->n_parts; i++) free(f->bytes[i]);
}

static struct kern_weight *load(struct kern *k, const struct linear_fixture *f)
{
    struct kern_weight *w = NULL;
    struct err e = {0};
    if (k->weight_load(k, f->parts, f->n_parts, &w, &e) != RC_OK) fail_msg("%s", e.text);
    return w;
}

/* Rank shapes of SmolLM2-135M for 1, 2 and 3 ranks, mixed formats, cuts inside a block, tails of every kind. */
static const struct linear_case linear_cases[] = {
    {3, {{QUANT_Q4_1, 0, 576, 576}, {QUANT_Q4_1, 0, 192, 192}, {QUANT_Q4_1, 0, 192, 192}}, 0, 576, 576},
    {3, {{QUANT_Q4_1, 0, 384, 576}, {QUANT_Q4_1, 0, 128, 192}, {QUANT_Q4_1, 0, 128, 192}}, 0, 576, 576},
    {3, {{QUANT_Q4_1, 384, 192, 576}, {QUANT_Q4_1, 128, 64, 192}, {QUANT_Q4_1, 128, 64, 192}}, 0, 576, 576},
    {1, {{QUANT_Q4_1, 0, 576, 576}}, 0, 384, 576},
    {1, {{QUANT_Q4_1, 0, 576, 576}}, 384, 192, 576},
    {2, {{QUANT_Q4_1, 672, 864, 1536}, {QUANT_Q4_1, 672, 864, 1536}}, 0, 576, 576},
    {1, {{QUANT_Q4_1, 0, 576, 576}}, 672, 864, 1536},
    {2, {{QUANT_Q4_1, 1024, 512, 1536}, {QUANT_Q4_1, 1024, 512, 1536}}, 0, 576, 576},
    {1, {{QUANT_Q8_0, 1024, 1024, 2048}}, 0, 576, 576},
    {3, {{QUANT_Q4_K, 3, 50, 60}, {QUANT_Q6_K, 5, 33, 40}, {QUANT_F16, 0, 7, 7}}, 32, 96, 256},
    {3, {{QUANT_Q5_K, 1, 16, 20}, {QUANT_Q5_0, 0, 17, 17}, {QUANT_Q5_1, 0, 15, 15}}, 288, 448, 768},
    {2, {{QUANT_Q6_K, 0, 40, 40}, {QUANT_F32, 0, 24, 24}}, 48, 80, 256},
    {3, {{QUANT_Q4_0, 0, 31, 31}, {QUANT_Q8_0, 2, 1, 3}, {QUANT_BF16, 0, 65, 65}}, 0, 32, 64},
    {2, {{QUANT_F32, 0, 33, 33}, {QUANT_BF16, 0, 5, 5}}, 3, 37, 41},
    {1, {{QUANT_F16, 0, 19, 19}}, 0, 1, 1},
    {1, {{QUANT_F32, 0, 3, 3}}, 0, 600, 600},
};
enum { N_LINEAR_CASES = sizeof linear_cases / sizeof *linear_cases };

/* ---- linear ---- */

static void check_linear(struct kern *k, const struct linear_fixture *f, enum kern_provenance p, int rows)
{
    const size_t cols = (size_t)f->cols, outs = (size_t)f->rows, n = (size_t)rows;
    struct kern_weight *w = load(k, f);
    float *x = random_new(n * cols, 3), *kept = random_new(n * cols, 3), *y = guarded_new(n * outs);
    k->linear(k, w, p, x, rows, y);
    assert_memory_equal(x, kept, n * cols * sizeof *x);
    const size_t stored = (size_t)f->parts[0].tensor_cols, skip = (size_t)f->parts[0].col_first;
    float *value = malloc(stored * sizeof *value), *magnitude = malloc(stored * sizeof *magnitude);
    size_t out = 0;
    for (int i = 0; i < f->n_parts; i++)
        for (uint64_t r = 0; r < f->parts[i].rows; r++, out++) {
            oracle_row(&f->parts[i], r, value, magnitude);
            for (size_t row = 0; row < n; row++) {
                double sum = 0, scale = 0;
                for (size_t c = 0; c < cols; c++) {
                    sum += (double)value[skip + c] * (double)x[row * cols + c];
                    scale += (double)magnitude[skip + c] * fabs((double)x[row * cols + c]);
                }
                const double got = (double)y[row * outs + out], bound = chain_tolerance((double)cols + 2) * scale;
                if (!(fabs(got - sum) <= bound))
                    fail_msg("%s %s row %zu output %zu: %g, oracle %g, bound %g", k->numerics,
                             quant_name(f->parts[i].format), row, out, got, sum, bound);
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

/* Unit vectors return the weights: every format exactly as quant decodes it, in both provenances. */
static void test_linear_exact(struct kern *k)
{
    for (int format = 0; format < QUANT_FORMATS; format++) {
        enum { COLS = 512, FIRST = 160, USED = 224, OUTS = 37 };
        const enum quant_format qf = (enum quant_format)format;
        const struct linear_case c = {1, {{qf, 2, OUTS, OUTS + 3}}, FIRST, USED, COLS};
        struct linear_fixture f;
        fixture_make(&f, &c);
        if (qf == QUANT_Q4_0) { /* a factor whose 8-fold is no F16 any more */
            const uint16_t huge = quant_f32_to_f16(60000);
            memcpy(f.bytes[0] + 5 * (COLS / 32) * 18 + 7 * 18, &huge, sizeof huge);
        }
        struct kern_weight *w = load(k, &f);
        float *x = calloc(USED * USED, sizeof *x), *y = guarded_new(USED * OUTS), row[COLS], scale[COLS];
        assert_non_null(x);
        for (int i = 0; i < USED; i++) x[i * USED + i] = 1;
        for (int p = 0; p < 2; p++) {
            k->linear(k, w, (enum kern_provenance)p, x, USED, y);
            for (uint64_t r = 0; r < OUTS; r++) {
                oracle_row(&f.parts[0], r, row, scale);
                for (int i = 0; i < USED; i++)
                    if (!(y[i * OUTS + (int)r] == row[FIRST + i]))
                        fail_msg("%s %s row %d column %d: %a, stored %a", k->numerics, quant_name(qf), (int)r, i,
                                 (double)y[i * OUTS + (int)r], (double)row[FIRST + i]);
            }
        }
        guarded_free(y, USED * OUTS);
        free(x);
        k->weight_free(k, w);
        fixture_free(&f);
    }
}

/* A row's bits beside any number of other rows, some of them NaN, on 1, 2 and 3 threads. */
static void check_linear_rows(const char *isa, const struct linear_case *c, enum kern_provenance p)
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
        struct kern_weight *w = load(k, &f);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            const int n = counts[i], last = n - 1;
            if (p == KERN_DECODE && n > 64) continue;
            float *y = guarded_new((size_t)n * outs), *mixed = malloc((size_t)n * cols * sizeof *mixed);
            assert_non_null(mixed);
            memcpy(mixed, x, (size_t)n * cols * sizeof *mixed);
            for (size_t j = 0; n > 2 && j < cols; j++) mixed[(size_t)(n / 2) * cols + j] = NAN;
            memcpy(mixed + (size_t)last * cols, x, cols * sizeof *x); /* the first row once more, at the end */
            k->linear(k, w, p, mixed, n, y);
            if (threads == 1 && n == 1) memcpy(first, y, outs * sizeof *first);
            if (n > 2) assert_bits(y, first, outs, "first row");
            assert_bits(y + (size_t)last * outs, first, outs, "last row");
            for (int r = 1; n == 7 && r < last; r++) {
                if (r == n / 2) continue;
                k->linear(k, w, p, mixed + (size_t)r * cols, 1, one);
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
    static const int cases[] = {4, 9, 10, 12, 13};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int p = 0; p < 2; p++)
            check_linear_rows(k->numerics + strlen("cpu-"), &linear_cases[cases[i]], (enum kern_provenance)p);
}

static void test_weight_errors(struct kern *k)
{
    static float bytes[64 * 64];
    const struct kern_weight_part good = {QUANT_Q4_1, bytes, 64, 0, 4, 0, 64};
    struct kern_weight_part bad[8];
    for (int i = 0; i < 8; i++) bad[i] = good;
    bad[0].col_first = 16; /* inside a group */
    bad[0].cols = 32;
    bad[1].cols = 48;
    bad[2].cols = 96; /* beyond the row */
    bad[3].rows = 0;
    bad[4].cols = 0;
    bad[5].tensor_cols = 80; /* no whole blocks */
    bad[6].row_first = UINT64_MAX;
    bad[7].rows = (uint64_t)1 << 40;
    for (int i = 0; i < 8; i++) {
        struct err e = {0};
        struct kern_weight *w = (struct kern_weight *)(void *)bytes;
        assert_int_equal(k->weight_load(k, &bad[i], 1, &w, &e), RC_BAD_INPUT);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_null(w);
    }
    struct err e = {0};
    struct kern_weight *w;
    struct kern_weight_part two[2] = {good, good};
    two[1].cols = 32;
    assert_int_equal(k->weight_load(k, two, 2, &w, &e), RC_BAD_INPUT);
    assert_non_null(strstr(e.text, "Q4_1"));
    assert_int_equal(k->weight_load(k, two, 0, &w, NULL), RC_BAD_INPUT);
    assert_int_equal(k->weight_load(k, &good, 1, &w, NULL), RC_OK);
    assert_int_equal(k->weight_bytes(w), 16 * 64 * 20 / 32); /* one panel of 16 rows, as dense as the file */
    k->weight_free(k, w);
    k->weight_free(k, NULL);
}

/* ---- rows of numbers ---- */

static void test_embed(struct kern *k)
{
    for (int format = 0; format < QUANT_FORMATS; format++) {
        const enum quant_format qf = (enum quant_format)format;
        enum { ROWS = 9, COLS = 512 };
        uint8_t *bytes = stored_new(qf, ROWS, COLS, 77);
        const uint64_t ranges[][2] = {{0, COLS}, {160, 192}};
        for (int i = 0; i < 2; i++) {
            const struct kern_weight_part t = {qf, bytes, COLS, 2, ROWS - 2, ranges[i][0], ranges[i][1]};
            const int32_t ids[] = {6, 0, 3, 3};
            const size_t n = 4 * (size_t)t.cols;
            float *y = guarded_new(n), row[COLS], scale[COLS];
            k->embed(k, &t, ids, 4, y);
            for (int r = 0; r < 4; r++) {
                oracle_row(&t, (uint64_t)ids[r], row, scale);
                assert_bits(y + (size_t)r * t.cols, row + t.col_first, (size_t)t.cols, "embed");
            }
            guarded_free(y, n);
        }
        free(bytes);
    }
}

static void test_rms_norm(struct kern *k)
{
    static const int widths[] = {16, 48, 64, 576, 896, 1040};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        enum { ROWS = 5 };
        const size_t n = (size_t)widths[i];
        float *x = random_new(ROWS * n, 21), *w = random_new(n, 22), *y = guarded_new(ROWS * n), *one = guarded_new(n);
        for (size_t j = 0; j < n; j++) x[3 * n + j] *= 1e6f, x[4 * n + j] *= 1e-6f; /* eps decides the last row */
        k->rms_norm(k, x, w, ROWS, (int)n, 1e-5f, y);
        for (size_t r = 0; r < ROWS; r++) {
            double sum = 0;
            for (size_t j = 0; j < n; j++) sum += (double)x[r * n + j] * (double)x[r * n + j];
            const double inverse = 1 / sqrt(sum / (double)n + (double)1e-5f);
            for (size_t j = 0; j < n; j++) {
                const double want = (double)x[r * n + j] * inverse * (double)w[j];
                const double bound = (chain_tolerance((double)n / 16) + 4 * ROUNDING) * fabs(want);
                assert_true(fabs((double)y[r * n + j] - want) <= bound);
            }
            k->rms_norm(k, x + r * n, w, 1, (int)n, 1e-5f, one);
            assert_bits(one, y + r * n, n, "norm row alone");
        }
        k->rms_norm(k, x, w, ROWS, (int)n, 1e-5f, x); /* in place */
        assert_bits(x, y, ROWS * n, "norm in place");
        guarded_free(y, ROWS * n);
        guarded_free(one, n);
        free(x);
        free(w);
    }
}

static void test_swiglu(struct kern *k)
{
    static const int widths[] = {1, 5, 32, 47, 672};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        enum { ROWS = 3 };
        const size_t f = (size_t)widths[i];
        float *x = random_new(ROWS * 2 * f, 31), *y = guarded_new(ROWS * f), *one = guarded_new(f);
        for (size_t j = 0; j < ROWS * 2 * f; j++) x[j] *= 20;
        x[0] = -1000, x[f] = 2; /* far out on both sides, and what must not be hidden */
        x[2 * f] = 1000, x[3 * f] = 2;
        x[4 * f] = NAN;
        k->swiglu(k, x, ROWS, (int)f, y);
        for (size_t r = 0; r < ROWS; r++) {
            for (size_t j = 0; j < f; j++) {
                const double g = (double)x[r * 2 * f + j], u = (double)x[r * 2 * f + f + j], got = (double)y[r * f + j];
                const double want = g / (1 + exp(-g)) * u;
                if (isnan(want))
                    assert_true(isnan(got));
                else
                    assert_true(fabs(got - want) <= ELEMENT_TOLERANCE * fabs(want) + 1e-33);
            }
            k->swiglu(k, x + r * 2 * f, 1, (int)f, one);
            assert_memory_equal(one, y + r * f, f * sizeof *one);
        }
        guarded_free(y, ROWS * f);
        guarded_free(one, f);
        free(x);
    }
}

static void test_hash_rows(struct kern *k)
{
    enum { ROWS = 4, N = 576 };
    float *x = random_new(ROWS * N, 41);
    uint64_t hash[ROWS], again[ROWS];
    memcpy(x + 2 * N, x, N * sizeof *x);
    k->hash_rows(k, x, ROWS, N, hash);
    assert_int_equal(hash[0], XXH3_64bits(x, N * sizeof *x));
    assert_int_equal(hash[0], hash[2]);
    assert_int_not_equal(hash[0], hash[1]);
    uint32_t bits;
    memcpy(&bits, &x[N + 13], sizeof bits);
    bits ^= 1;
    memcpy(&x[N + 13], &bits, sizeof bits);
    k->hash_rows(k, x, ROWS, N, again);
    assert_int_not_equal(hash[1], again[1]);
    assert_int_equal(hash[3], again[3]);
    free(x);
}

/* ---- attention ---- */

struct attn_case {
    struct kern_attn_shape shape;
    int positions;
};

/* Ranks of SmolLM2 (1, 2 and 3 of them), a wide group, tails of 16 dimensions, partial rotation, one head. */
static const struct attn_case attn_cases[] = {
    {{9, 3, 64, 64, true, KV_F16}, 200},   {{6, 2, 64, 64, true, KV_F16}, 330},  {{3, 1, 64, 64, true, KV_F16}, 65},
    {{14, 2, 64, 64, false, KV_F16}, 130}, {{9, 1, 80, 32, false, KV_F16}, 140}, {{2, 2, 16, 16, true, KV_F16}, 129},
    {{4, 2, 128, 128, false, KV_F16}, 70}, {{1, 1, 256, 64, false, KV_F16}, 66}, {{6, 2, 64, 64, true, KV_F32}, 135},
    {{9, 1, 80, 32, false, KV_F32}, 70},
};
enum { N_ATTN_CASES = sizeof attn_cases / sizeof *attn_cases };
enum { MOST_POSITIONS = 704, MOST_PAGES = MOST_POSITIONS / KV_PAGE_TOKENS };

/* One sequence's rows of one layer. raw: before rotation. */
struct sequence {
    struct kern_attn_shape shape;
    int positions;
    size_t width, o_width;
    float *raw, *cos_sin;
    struct kern_kv_layer kv;
    size_t kv_bytes;
    int32_t pages[MOST_PAGES];
    float *qkv, *o;
};

static void sequence_begin(struct sequence *s, struct kern *k, const struct attn_case *c, uint64_t seed)
{
    *s = (struct sequence){.shape = c->shape, .positions = c->positions};
    s->width = (size_t)((c->shape.n_heads + 2 * c->shape.n_kv_heads) * c->shape.head_dim);
    s->o_width = (size_t)(c->shape.n_heads * c->shape.head_dim);
    s->raw = random_new((size_t)c->positions * s->width, seed);
    for (size_t i = 0; i < (size_t)c->positions * s->width; i++) s->raw[i] *= 2;
    const size_t half = (size_t)c->shape.rope_dim / 2;
    s->cos_sin = malloc((size_t)c->positions * half * 2 * sizeof *s->cos_sin);
    assert_non_null(s->cos_sin);
    for (size_t p = 0; p < (size_t)c->positions; p++)
        for (size_t i = 0; i < half; i++) {
            const double angle = (double)p * pow(10000, -(double)i / (double)half);
            s->cos_sin[(p * half + i) * 2] = (float)cos(angle);
            s->cos_sin[(p * half + i) * 2 + 1] = (float)sin(angle);
        }
    s->kv.page_bytes = k->kv_page_bytes(&s->shape);
    s->kv_bytes = s->kv.page_bytes * (MOST_PAGES + 3);
    s->kv.base_dev = malloc(s->kv_bytes);
    assert_non_null(s->kv.base_dev);
    s->qkv = guarded_new((size_t)c->positions * s->width);
    s->o = guarded_new((size_t)c->positions * s->o_width);
}

static void sequence_end(struct sequence *s)
{
    guarded_free(s->qkv, (size_t)s->positions * s->width);
    guarded_free(s->o, (size_t)s->positions * s->o_width);
    free(s->raw);
    free(s->cos_sin);
    free(s->kv.base_dev);
}

/* Empty pages (all NaN), another page order per turn. */
static void sequence_restart(struct sequence *s, int turn)
{
    memset(s->kv.base_dev, 0xff, s->kv_bytes);
    memcpy(s->qkv, s->raw, (size_t)s->positions * s->width * sizeof *s->qkv);
    for (int i = 0; i < MOST_PAGES; i++) s->pages[i] = turn % 2 ? MOST_PAGES + 2 - i : (i + turn) % MOST_PAGES;
}

/* Positions first .. end through append and attention in one call. */
static void sequence_run(struct sequence *s, struct kern *k, enum kern_provenance p, int first, int end)
{
    const struct kern_segment g = {0, end - first, first, s->pages};
    float *qkv = s->qkv + (size_t)first * s->width;
    k->rope_kv_append(k, &s->shape, &g, 1, s->cos_sin, qkv, s->kv);
    k->attention(k, &s->shape, p, &g, 1, qkv, s->kv, s->o + (size_t)first * s->o_width);
}

static void check_rotation(const struct sequence *s)
{
    const struct kern_attn_shape *a = &s->shape;
    const size_t half = (size_t)a->rope_dim / 2, dim = (size_t)a->head_dim;
    for (size_t p = 0; p < (size_t)s->positions; p++)
        for (size_t h = 0; h < (size_t)(a->n_heads + 2 * a->n_kv_heads); h++) {
            const float *raw = s->raw + p * s->width + h * dim, *got = s->qkv + p * s->width + h * dim;
            const bool turned = h < (size_t)(a->n_heads + a->n_kv_heads);
            for (size_t i = 0; turned && i < half; i++) {
                const size_t x = a->rope_adjacent ? 2 * i : i, y = a->rope_adjacent ? 2 * i + 1 : i + half;
                const double c = (double)s->cos_sin[(p * half + i) * 2], n = (double)s->cos_sin[(p * half + i) * 2 + 1];
                const double bound = 2 * ROUNDING * (fabs((double)raw[x]) + fabs((double)raw[y]));
                assert_true(fabs((double)got[x] - ((double)raw[x] * c - (double)raw[y] * n)) <= bound);
                assert_true(fabs((double)got[y] - ((double)raw[y] * c + (double)raw[x] * n)) <= bound);
            }
            const size_t same = turned ? 2 * half : 0;
            assert_memory_equal(got + same, raw + same, (dim - same) * sizeof *raw);
        }
}

static double stored(enum kv_format f, float x)
{
    return (double)(f == KV_F16 ? quant_f16_to_f32(quant_f32_to_f16(x)) : x);
}

/* Attention of every row from the rotated rows, keys and values rounded as they are stored. */
static void check_attention(const struct sequence *s, const char *numerics)
{
    const struct kern_attn_shape *a = &s->shape;
    const size_t dim = (size_t)a->head_dim;
    double *weight = malloc((size_t)s->positions * sizeof *weight);
    assert_non_null(weight);
    for (size_t p = 0; p < (size_t)s->positions; p++)
        for (int h = 0; h < a->n_heads; h++) {
            const float *q = s->qkv + p * s->width + (size_t)h * dim;
            const size_t k_at = (size_t)(a->n_heads + h / (a->n_heads / a->n_kv_heads)) * dim;
            const size_t v_at = k_at + (size_t)a->n_kv_heads * dim;
            double most = -INFINITY, sum = 0;
            for (size_t j = 0; j <= p; j++) {
                weight[j] = 0;
                for (size_t d = 0; d < dim; d++)
                    weight[j] += (double)q[d] * stored(a->kv, s->qkv[j * s->width + k_at + d]);
                weight[j] /= sqrt((double)dim);
                if (weight[j] > most) most = weight[j];
            }
            for (size_t j = 0; j <= p; j++) sum += weight[j] = exp(weight[j] - most);
            for (size_t d = 0; d < dim; d++) {
                double want = 0, largest = 0;
                for (size_t j = 0; j <= p; j++) {
                    const double v = stored(a->kv, s->qkv[j * s->width + v_at + d]);
                    want += weight[j] / sum * v;
                    if (fabs(v) > largest) largest = fabs(v);
                }
                const double got = (double)s->o[p * s->o_width + (size_t)h * dim + d];
                if (!(fabs(got - want) <= ATTENTION_TOLERANCE * largest))
                    fail_msg("%s head_dim %d position %zu head %d: %g, oracle %g", numerics, a->head_dim, p, h, got,
                             want);
            }
        }
    free(weight);
}

static void test_attention_oracle(struct kern *k)
{
    for (int c = 0; c < N_ATTN_CASES; c++) {
        struct sequence s;
        sequence_begin(&s, k, &attn_cases[c], 51);
        sequence_restart(&s, c);
        sequence_run(&s, k, KERN_PREFILL, 0, s.positions);
        check_rotation(&s);
        check_attention(&s, k->numerics);
        sequence_restart(&s, c);
        for (int p = 0; p < s.positions; p++) sequence_run(&s, k, KERN_DECODE, p, p + 1);
        check_attention(&s, k->numerics);
        sequence_end(&s);
    }
}

/* The same prompt in chunks of 64, 128, 448, 512, one piece and odd starts; other pages, other threads. */
static void check_chunks(const char *isa, const struct attn_case *c)
{
    static const int chunks[][2] = {{64, 0},  {128, 0},  {448, 0}, {512, 0}, {MOST_POSITIONS, 0},
                                    {64, 37}, {128, 63}, {512, 1}};
    float *reference = NULL;
    size_t n = 0;
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        struct kern *k = open_isa(isa, 1 + (int)i % 3);
        struct sequence s;
        sequence_begin(&s, k, c, 61);
        sequence_restart(&s, (int)i);
        n = (size_t)s.positions * s.o_width;
        for (int first = 0, end; first < s.positions; first = end) {
            end = (first + chunks[i][0]) / 64 * 64; /* cuts on the absolute grid, save the first where one is given */
            if (first == 0 && chunks[i][1]) end = chunks[i][1];
            if (end <= first) end = first + 64;
            if (end > s.positions) end = s.positions;
            sequence_run(&s, k, KERN_PREFILL, first, end);
        }
        if (!reference) {
            reference = malloc(n * sizeof *reference);
            assert_non_null(reference);
            memcpy(reference, s.o, n * sizeof *reference);
        }
        assert_bits(s.o, reference, n, "chunked prefill");
        sequence_end(&s);
        k->close(k);
    }
    free(reference);
}

static void test_attention_chunks(struct kern *k)
{
    static const struct attn_case cases[] = {{{3, 1, 64, 64, true, KV_F16}, 600},
                                             {{10, 1, 48, 16, false, KV_F16}, 520},
                                             {{2, 1, 32, 32, true, KV_F32}, 520}};
    for (int i = 0; i < 3; i++) check_chunks(k->numerics + strlen("cpu-"), &cases[i]);
}

/* Rows behind a row in its chunk may have infinite or NaN queries and keys: nothing of them reaches it. */
static void test_attention_causal(struct kern *k)
{
    const struct attn_case c = {{6, 2, 64, 64, true, KV_F16}, 150};
    enum { POISONED = 100 };
    struct sequence s, t;
    sequence_begin(&s, k, &c, 71);
    sequence_begin(&t, k, &c, 71);
    for (size_t r = POISONED; r < (size_t)t.positions; r++)
        for (size_t i = 0; i < 8 * 64; i++) t.raw[r * t.width + i] = i % 3 ? (i % 2 ? INFINITY : -INFINITY) : NAN;
    sequence_restart(&s, 0);
    sequence_restart(&t, 1);
    sequence_run(&s, k, KERN_PREFILL, 0, s.positions);
    sequence_run(&t, k, KERN_PREFILL, 0, t.positions);
    assert_bits(t.o, s.o, POISONED * s.o_width, "row before poisoned rows");
    /* And where it belongs it stays visible, though the values are finite. */
    for (size_t i = 0; i < t.o_width; i++) assert_true(isnan(t.o[POISONED * t.o_width + i]));
    /* One key of the first KV head: later rows of its query heads are lost, the other heads unharmed. */
    enum { KEY = 70, AFTER = 90, HEAD_GROUP = 3 * 64 };
    memcpy(t.raw, s.raw, (size_t)t.positions * t.width * sizeof *t.raw);
    t.raw[KEY * t.width + 6 * 64] = NAN;
    sequence_restart(&t, 1);
    sequence_run(&t, k, KERN_PREFILL, 0, t.positions);
    assert_bits(t.o, s.o, KEY * s.o_width, "row before a NaN key");
    for (size_t i = 0; i < HEAD_GROUP; i++) assert_true(isnan(t.o[AFTER * t.o_width + i]));
    assert_bits(t.o + AFTER * t.o_width + HEAD_GROUP, s.o + AFTER * s.o_width + HEAD_GROUP, HEAD_GROUP,
                "other KV head");
    sequence_end(&s);
    sequence_end(&t);
}

/* Several sequences in one call, of prefill or of decode, against each alone. */
static void check_batch(const char *isa, enum kern_provenance p, enum kv_format format)
{
    enum { N = 8 };
    const struct kern_attn_shape shape = {6, 2, 64, 64, true, format};
    const size_t width = 10 * 64, o_width = 6 * 64;
    struct kern *k = open_isa(isa, 1);
    struct sequence s[N];
    struct kern_segment g[N];
    struct kern_kv_layer kv = {NULL, k->kv_page_bytes(&shape)};
    int32_t tables[N][MOST_PAGES];
    const size_t kv_bytes = kv.page_bytes * N * 4;
    char *pool = malloc(kv_bytes), *start = malloc(kv_bytes);
    assert_true(pool && start);
    memset(start, 0xff, kv_bytes);
    int rows = 0;
    for (int i = 0; i < N; i++) {
        const struct attn_case c = {shape, 40 + 23 * i};
        sequence_begin(&s[i], k, &c, 81 + (uint64_t)i);
        sequence_restart(&s[i], 0);
        const int before = p == KERN_DECODE ? s[i].positions - 1 : s[i].positions / 2;
        for (int j = 0; j < 4; j++) {
            tables[i][j] = j * N + (i * 3 + j) % N; /* pages of all sequences lie mixed */
            s[i].pages[j] = j;
        }
        sequence_run(&s[i], k, KERN_PREFILL, 0, before);
        for (int j = 0; j < 4; j++)
            memcpy(start + (size_t)tables[i][j] * kv.page_bytes, (char *)s[i].kv.base_dev + (size_t)j * kv.page_bytes,
                   kv.page_bytes);
        sequence_run(&s[i], k, p, before, s[i].positions);
        g[i] = (struct kern_segment){rows, s[i].positions - before, before, tables[i]};
        rows += g[i].rows;
    }
    k->close(k);
    for (int threads = 1; threads <= 3; threads++) {
        k = open_isa(isa, threads);
        float *qkv = guarded_new((size_t)rows * width), *o = guarded_new((size_t)rows * o_width);
        memcpy(pool, start, kv_bytes);
        kv.base_dev = pool;
        for (int i = 0; i < N; i++)
            memcpy(qkv + (size_t)g[i].row_first * width, s[i].raw + (size_t)g[i].position_first * width,
                   (size_t)g[i].rows * width * sizeof *qkv);
        k->rope_kv_append(k, &shape, g, N, s[N - 1].cos_sin, qkv, kv);
        k->attention(k, &shape, p, g, N, qkv, kv, o);
        for (int i = 0; i < N; i++)
            assert_bits(o + (size_t)g[i].row_first * o_width, s[i].o + (size_t)g[i].position_first * o_width,
                        (size_t)g[i].rows * o_width, "sequence in a batch");
        guarded_free(qkv, (size_t)rows * width);
        guarded_free(o, (size_t)rows * o_width);
        k->close(k);
    }
    for (int i = 0; i < N; i++) sequence_end(&s[i]);
    free(pool);
    free(start);
}

static void test_attention_batch(struct kern *k)
{
    const char *isa = k->numerics + strlen("cpu-");
    check_batch(isa, KERN_PREFILL, KV_F16);
    check_batch(isa, KERN_DECODE, KV_F16);
    check_batch(isa, KERN_PREFILL, KV_F32);
    check_batch(isa, KERN_DECODE, KV_F32);
}

/* ---- the context ---- */

static void test_open(void **state)
{
    (void)state;
    struct kern *k = (struct kern *)(void *)&k;
    struct err e = {0};
    assert_int_equal(kern_cpu_open("sse9", 1, &k, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_CONFIG);
    assert_null(k);
    assert_int_equal(kern_cpu_open(NULL, 0, &k, NULL), RC_BAD_INPUT);
    assert_null(kern_cpu_numerics("sse9"));
    assert_string_equal(kern_cpu_numerics("generic"), "cpu-generic");
    assert_string_equal(kern_cpu_numerics("auto"), kern_cpu_numerics(NULL));
    k = open_isa("auto", 2);
    assert_string_equal(k->name, "cpu");
    assert_string_equal(k->numerics, kern_cpu_numerics(NULL));
    const size_t sizes[] = {0, 1, 100, 1 << 20};
    for (int i = 0; i < 4; i++) {
        void *p = NULL;
        assert_int_equal(k->buffer_alloc(k, sizes[i], &p, NULL), RC_OK);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t j = 0; j < sizes[i]; j++) assert_int_equal(((char *)p)[j], 0);
        memset(p, 1, sizes[i]);
        k->buffer_free(k, p);
    }
    k->buffer_free(k, NULL);
    void *none = &e;
    assert_int_equal(k->buffer_alloc(k, SIZE_MAX - 8, &none, NULL), RC_FATAL);
    assert_null(none);
    k->close(k);
}

static void on_every_isa(void (*test)(struct kern *))
{
    for (size_t i = 0; i < sizeof isa_names / sizeof *isa_names; i++) {
        if (!kern_cpu_numerics(isa_names[i])) {
            print_message("this machine has no %s\n", isa_names[i]);
            continue;
        }
        struct kern *k = open_isa(isa_names[i], 1);
        test(k);
        k->close(k);
    }
}

#define ON_EVERY_ISA(name)                                                                                             \
    static void name##_isas(void **state)                                                                              \
    {                                                                                                                  \
        (void)state;                                                                                                   \
        on_every_isa(name);                                                                                            \
    }
ON_EVERY_ISA(test_linear_oracle)
ON_EVERY_ISA(test_linear_exact)
ON_EVERY_ISA(test_linear_rows)
ON_EVERY_ISA(test_weight_errors)
ON_EVERY_ISA(test_embed)
ON_EVERY_ISA(test_rms_norm)
ON_EVERY_ISA(test_swiglu)
ON_EVERY_ISA(test_hash_rows)
ON_EVERY_ISA(test_attention_oracle)
ON_EVERY_ISA(test_attention_chunks)
ON_EVERY_ISA(test_attention_causal)
ON_EVERY_ISA(test_attention_batch)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_weight_errors_isas),
        cmocka_unit_test(test_linear_exact_isas),
        cmocka_unit_test(test_linear_oracle_isas),
        cmocka_unit_test(test_linear_rows_isas),
        cmocka_unit_test(test_embed_isas),
        cmocka_unit_test(test_rms_norm_isas),
        cmocka_unit_test(test_swiglu_isas),
        cmocka_unit_test(test_hash_rows_isas),
        cmocka_unit_test(test_attention_oracle_isas),
        cmocka_unit_test(test_attention_chunks_isas),
        cmocka_unit_test(test_attention_causal_isas),
        cmocka_unit_test(test_attention_batch_isas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
