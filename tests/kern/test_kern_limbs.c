/* VNNI's products of whole numbers (kern_cpu_vnni.c): PREFILL and DECODE give the same bits, and what rounding activations to 24
 * bits of their group's largest may cost is bounded, measured against FP64 where it hurts most: one large value among small
 * ones. What holds for every instruction set is in test_kern_linear. */
#include "kern_fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 32 };
/* The least power of two, from 2^-126 on, of which three signed bytes count the largest of a group. */
static double quantum_of(double largest)
{
    double quantum = 0x1p-126;
    while (rint(largest / quantum) > 0x7f7f7f) quantum *= 2;
    return quantum;
}

struct matrix {
    enum quant_format format;
    int rows, cols;
    uint8_t *bytes;
};

/* Random codes; the F16 factors of a block, at most two, are small and positive. */
static struct matrix matrix_new(enum quant_format f, int rows, int cols, uint64_t seed)
{
    size_t row_bytes = 0;
    assert_true(quant_row_bytes(f, (uint64_t)cols, &row_bytes));
    const size_t n = row_bytes * (size_t)rows;
    const struct matrix m = {f, rows, cols, malloc(n)};
    assert_non_null(m.bytes);
    for (size_t i = 0; i < n; i++) m.bytes[i] = (uint8_t)random_next(&seed);
    for (size_t i = 0; i < n; i += quant_block_bytes(f)) m.bytes[i + 1] = m.bytes[i + 3] = 0x20;
    return m;
}

static struct kern_weight *load(struct kern *k, const struct matrix *m, enum kern_weights how)
{
    const struct kern_span rows = {0, (uint64_t)m->rows}, cols = {0, (uint64_t)m->cols};
    const struct kern_weight_part part = {
        .matrix = {.format = m->format, .rows = rows.count, .cols = cols.count, .bytes = m->bytes, .global = 1},
        .rows = &rows,
        .n_rows = 1,
        .cols = &cols,
        .n_cols = 1};
    struct kern_weight *w = NULL;
    struct err e = {0};
    if (k->weight_load(k, &part, 1, how, KERN_ROWS, &w, &e) != RC_OK) fail_msg("%s", e.text);
    return w;
}

static void skip_without_vnni(void)
{
    if (kern_cpu_numerics("vnni")) return;
    print_message("this machine has no VNNI\n");
    skip();
}

/* Rows of any number have the bits that each has alone. */
static void test_same_bits(void **state)
{
    (void)state;
    skip_without_vnni();
    static const struct {
        enum quant_format format;
        enum kern_weights how;
        int rows, cols;
    } cases[] = {{QUANT_Q4_1, KERN_WEIGHTS_NATIVE, 49, 96},  {QUANT_Q4_1, KERN_WEIGHTS_NATIVE, 16, 32},
                 {QUANT_Q4_K, KERN_WEIGHTS_NATIVE, 64, 256}, {QUANT_Q8_0, KERN_WEIGHTS_NATIVE, 80, 576},
                 {QUANT_Q5_1, KERN_WEIGHTS_NATIVE, 33, 64},  {QUANT_Q5_K, KERN_WEIGHTS_NATIVE, 17, 512},
                 {QUANT_Q8_0, KERN_WEIGHTS_W8, 40, 320}};
    static const int counts[] = {1, 2, 3, 4, 5, 6, 11, 16, 21, 35, 128, 131, 262};
    enum { N_COUNTS = sizeof counts / sizeof *counts };
    const int most = counts[N_COUNTS - 1];
    struct kern *one = open_isa("vnni", 1), *two = open_isa("vnni", 2);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct matrix m = matrix_new(cases[i].format, cases[i].rows, cases[i].cols, 3 + i);
        struct kern_weight *a = load(one, &m, cases[i].how), *b = load(two, &m, cases[i].how);
        const size_t outs = (size_t)m.rows, n_want = (size_t)most * outs;
        float *x = random_new((size_t)(most * m.cols), 9), *want = guarded_new(n_want);
        for (int r = 0; r < most; r++) call_linear(one, a, KERN_DECODE, x + r * m.cols, 1, want + (size_t)r * outs);
        for (size_t c = 0; c < N_COUNTS; c++) {
            const size_t n = (size_t)counts[c] * outs;
            for (int way = 0; way < 4; way++) {
                const enum kern_provenance provenance = way % 2 ? KERN_PREFILL : KERN_DECODE;
                float *got = guarded_new(n);
                call_linear(way < 2 ? one : two, way < 2 ? a : b, provenance, x, counts[c], got);
                assert_bits(got, want, n, quant_name(m.format));
                guarded_free(got, n);
            }
        }
        guarded_free(want, n_want);
        one->weight_free(one, a);
        two->weight_free(two, b);
        free(x);
        free(m.bytes);
    }
    one->close(one);
    two->close(two);
}

/* y of one row within what float32 sums of groups may cost, and rounding to quanta: errors of random sign, evenly spread over
 * a quantum, so of deviation quantum / sqrt(12) each. Four times that of their sum is not reached by chance. */
static void check_row(const struct kern *k, const struct matrix *m, const float *x, const float *y)
{
    const size_t cols = (size_t)m->cols;
    size_t row_bytes = 0;
    assert_true(quant_row_bytes(m->format, cols, &row_bytes));
    float *w = malloc(cols * sizeof *w);
    assert_non_null(w);
    for (int out = 0; out < m->rows; out++) {
        double sum = 0, scale = 0, variance = 0;
        quant_decode(m->format, m->bytes + (size_t)out * row_bytes, cols, w);
        for (size_t g = 0; g < cols; g += GROUP) {
            double largest = 0, squares = 0;
            for (size_t i = g; i < g + GROUP; i++) {
                sum += (double)w[i] * (double)x[i];
                scale += fabs((double)w[i] * (double)x[i]);
                squares += (double)w[i] * (double)w[i];
                largest = fmax(largest, fabs((double)x[i]));
            }
            variance += squares * quantum_of(largest) * quantum_of(largest) / 12;
        }
        const double got = (double)y[out];
        const double bound = 4 * sqrt(variance) + chain_tolerance(2.0 * (double)cols / GROUP + 2) * scale;
        if (!(fabs(got - sum) <= bound))
            fail_msg("%s output %d: %g, oracle %g, bound %g", k->numerics, out, got, sum, bound);
    }
    free(w);
}

/* Small magnitudes beside one that is a thousand times as large: quanta decide the error. */
static void test_spread(void **state)
{
    (void)state;
    skip_without_vnni();
    enum { ROWS = 6, OUTS = 48, COLS = 320 };
    struct kern *k = open_isa("vnni", 1);
    const struct matrix m = matrix_new(QUANT_Q8_0, OUTS, COLS, 21);
    enum { BLOCK_BYTES = 34, COLUMN = 7 };
    for (int i = 2 + COLUMN; i < OUTS * (COLS / GROUP) * BLOCK_BYTES; i += BLOCK_BYTES) m.bytes[i] = 0;
    struct kern_weight *w = load(k, &m, KERN_WEIGHTS_NATIVE);
    float *x = random_new(ROWS * COLS, 22), *y = guarded_new(ROWS * OUTS);
    uint64_t seed = 23;
    for (int i = 0; i < ROWS * COLS; i++) x[i] = ldexpf(x[i], -(int)(random_next(&seed) % 10) - 3);
    for (int i = COLUMN; i < ROWS * COLS; i += GROUP) x[i] = 900; /* meets codes of zero: nothing but its quantum shows */
    x[8] = 0x1.fdfdfcp9f, x[8 + GROUP] = 0x1.fdfdfep9f; /* the last that 0x7f7f7f quanta hold, and the next */
    for (int rows = 1; rows <= ROWS; rows += ROWS - 1) {
        call_linear(k, w, KERN_DECODE, x, rows, y);
        for (int r = 0; r < rows; r++) check_row(k, &m, x + r * COLS, y + r * OUTS);
    }
    guarded_free(y, ROWS * OUTS);
    free(x);
    k->weight_free(k, w);
    k->close(k);
    free(m.bytes);
}

/* Activations that are no numbers make no number of any output; the smallest ones, which have no quantum, come out as zero. */
static void test_extremes(void **state)
{
    (void)state;
    skip_without_vnni();
    enum { ROWS = 6, OUTS = 20, COLS = 64 };
    struct kern *k = open_isa("vnni", 1);
    const struct matrix m = matrix_new(QUANT_Q4_1, OUTS, COLS, 31);
    struct kern_weight *w = load(k, &m, KERN_WEIGHTS_NATIVE);
    float *x = random_new(ROWS * COLS, 32), *y = guarded_new(ROWS * OUTS);
    x[40] = INFINITY, x[COLS + 3] = -NAN;
    for (int i = 0; i < COLS; i++) x[2 * COLS + i] = 1e-42f, x[3 * COLS + i] *= 1e35f, x[5 * COLS + i] *= 1e-37f;
    call_linear(k, w, KERN_DECODE, x, ROWS, y);
    for (int i = 0; i < OUTS; i++) {
        assert_true(isnan(y[i]) && isnan(y[OUTS + i]));
        assert_true(y[2 * OUTS + i] == 0);
    }
    for (int r = 3; r < ROWS; r++) check_row(k, &m, x + r * COLS, y + r * OUTS);
    guarded_free(y, ROWS * OUTS);
    free(x);
    k->weight_free(k, w);
    k->close(k);
    free(m.bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_spread),
        cmocka_unit_test(test_extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
