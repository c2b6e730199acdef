/* The CPU backend's context, and its rows of numbers against an FP64 oracle: norms, activations, hashes (linear layers,
 * attention and Gated DeltaNet have files of their own). */
#include "kern_fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- rows of numbers ---- */

static void test_rms_norm(struct kern *k)
{
    static const int widths[] = {16, 48, 64, 576, 896, 1040};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        enum { ROWS = 5 };
        const size_t n = (size_t)widths[i];
        float *x = random_new(ROWS * n, 21), *w = random_new(n, 22), *y = guarded_new(ROWS * n), *one = guarded_new(n);
        for (size_t j = 0; j < n; j++) x[3 * n + j] *= 1e6f, x[4 * n + j] *= 1e-6f; /* eps decides the last row */
        k->rms_norm(k, x, w, rows_of(KERN_DECODE, ROWS), (int)n, 1e-5f, y, NULL);
        for (size_t r = 0; r < ROWS; r++) {
            double sum = 0;
            for (size_t j = 0; j < n; j++) sum += (double)x[r * n + j] * (double)x[r * n + j];
            const double inverse = 1 / sqrt(sum / (double)n + (double)1e-5f);
            for (size_t j = 0; j < n; j++) {
                const double want = (double)x[r * n + j] * inverse * (double)w[j];
                const double bound = (chain_tolerance((double)n / 16) + 4 * ROUNDING) * fabs(want);
                assert_true(fabs((double)y[r * n + j] - want) <= bound);
            }
            k->rms_norm(k, x + r * n, w, rows_of(KERN_DECODE, 1), (int)n, 1e-5f, one, NULL);
            assert_bits(one, y + r * n, n, "norm row alone");
        }
        float *pair = guarded_new(2 * ROWS * n);
        k->rms_norm_pair(k, w, x, x, w, rows_of(KERN_DECODE, 1), (int)n, 1e-5f, pair);
        k->rms_norm(k, w, x, rows_of(KERN_DECODE, 1), (int)n, 1e-5f, one, NULL);
        assert_bits(pair, one, n, "first of a pair");
        k->rms_norm_pair(k, x, w, x, w, rows_of(KERN_DECODE, ROWS), (int)n, 1e-5f, pair);
        for (size_t r = 0; r < 2 * ROWS; r++) assert_bits(pair + r * n, y + r / 2 * n, n, "row of a pair");
        guarded_free(pair, 2 * ROWS * n);
        k->rms_norm(k, x, w, rows_of(KERN_DECODE, ROWS), (int)n, 1e-5f, x, NULL); /* in place */
        assert_bits(x, y, ROWS * n, "norm in place");
        guarded_free(y, ROWS * n);
        guarded_free(one, n);
        free(x);
        free(w);
    }
}

/* [2 f, cols] with ones on the diagonal: its product hands x on, bit for bit. */
static struct kern_weight *identity(struct kern *k, size_t f, size_t cols)
{
    float *values = calloc(2 * f * cols, sizeof *values);
    assert_non_null(values);
    for (size_t i = 0; i < 2 * f; i++) values[i * cols + i] = 1;
    const struct kern_span rows[2] = {{0, f}, {f, f}}, all = {0, cols};
    struct kern_weight_part parts[2];
    for (int i = 0; i < 2; i++)
        parts[i] = (struct kern_weight_part){.matrix = {.format = QUANT_F32, .rows = 2 * f, .cols = cols, .bytes = values, .global = 1},
                                             .rows = &rows[i], .n_rows = 1, .cols = &all, .n_cols = 1};
    struct kern_weight *w = NULL;
    struct err e = {0};
    if (k->weight_load(k, parts, 2, KERN_WEIGHTS_NATIVE, KERN_SWIGLU, &w, &e) != RC_OK) fail_msg("%s", e.text);
    free(values);
    return w;
}

static void test_swiglu(struct kern *k)
{
    static const int widths[] = {1, 5, 32, 47, 672};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        enum { ROWS = 3, SICK = 2 };
        const size_t f = (size_t)widths[i], cols = (2 * f + 15) / 16 * 16;
        struct kern_weight *w = identity(k, f, cols);
        float *x = random_new(ROWS * cols, 31), *y = guarded_new(ROWS * f), *one = guarded_new(f);
        float *scratch = guarded_new(k->swiglu_scratch_bytes(ROWS, (int)f) / sizeof *scratch);
        for (size_t j = 0; j < ROWS * cols; j++) x[j] *= 20;
        x[0] = -1000, x[f] = 2; /* far out on both sides, and what must not be hidden */
        x[cols] = 1000, x[cols + f] = 2;
        x[SICK * cols] = NAN; /* times zero it is in all sums of its row */
        k->linear_swiglu(k, w, rows_of(KERN_DECODE, ROWS), x, scratch, y);
        for (size_t r = 0; r < ROWS; r++) {
            for (size_t j = 0; j < f; j++) {
                const double g = (double)x[r * cols + j], u = (double)x[r * cols + f + j], got = (double)y[r * f + j];
                const double want = g / (1 + exp(-g)) * u;
                if (r == SICK)
                    assert_true(isnan(got));
                else
                    assert_true(fabs(got - want) <= ELEMENT_TOLERANCE * fabs(want) + 1e-33);
            }
            k->linear_swiglu(k, w, rows_of(KERN_DECODE, 1), x + r * cols, scratch, one);
            if (r != SICK) assert_memory_equal(one, y + r * f, f * sizeof *one);
        }
        guarded_free(scratch, k->swiglu_scratch_bytes(ROWS, (int)f) / sizeof *scratch);
        guarded_free(y, ROWS * f);
        guarded_free(one, f);
        free(x);
        k->weight_free(k, w);
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

ON_EVERY_ISA(test_rms_norm)
ON_EVERY_ISA(test_swiglu)
ON_EVERY_ISA(test_hash_rows)

/* Ties go to the lowest id, ids that are not allowed count for nothing, not even when they are no numbers. */
static void test_best(struct kern *k)
{
    enum { ROWS = 6, N = 333, FIRST = 21 };
    static const int32_t want[ROWS] = {FIRST + 300, FIRST + 7, -1, -1, FIRST + 40, KERN_NO_ID};
    float *x = random_new(ROWS * N, 91);
    uint32_t allowed[(FIRST + N + 31) / 32], none[(FIRST + N + 31) / 32] = {0};
    struct kern_best b[ROWS];
    memset(allowed, 0xff, sizeof allowed);
    allowed[(FIRST + 100) / 32] &= ~(UINT32_C(1) << (FIRST + 100) % 32);
    x[300] = 2;
    x[N + 7] = x[N + 8] = x[N + 200] = 3;
    x[2 * N + 150] = NAN;
    x[3 * N + N - 1] = INFINITY;
    x[4 * N + 100] = NAN, x[4 * N + 40] = 5;
    k->best(k, x, ROWS - 1, N, FIRST, allowed, b);
    k->best(k, x + (ROWS - 1) * N, 1, N, FIRST, none, b + ROWS - 1);
    for (int r = 0; r < ROWS; r++) assert_int_equal(b[r].id, want[r]);
    assert_true(b[0].logit == 2 && b[1].logit == 3 && b[4].logit == 5);
    free(x);
}
ON_EVERY_ISA(test_best)

/* One row is each rank's, one a tie, one not finite on the last rank, one has nothing that counts. */
static void test_best_tokens(void **state)
{
    (void)state;
    enum { ROWS = 5, RANKS = 3 };
    static const struct kern_best of_rank[ROWS][RANKS] = {
        {{2, 7}, {1, 40}, {-3, 90}},
        {{2, 7}, {1, 40}, {3, 90}},
        {{2, 7}, {5, 40}, {5, 90}},
        {{2, 7}, {1, 40}, {0, -1}},
        {{-INFINITY, KERN_NO_ID}, {-INFINITY, KERN_NO_ID}, {-INFINITY, KERN_NO_ID}},
    };
    static const int32_t want[ROWS] = {7, 90, 40, 0, 0};
    int32_t dev[ROWS], host[ROWS];
    struct kern *k = open_isa("generic", 1);
    k->best_tokens(k, of_rank[0], ROWS, RANKS, dev, host);
    assert_memory_equal(dev, want, sizeof want);
    assert_memory_equal(host, want, sizeof want);
    assert_int_equal(kern_best_of(of_rank[3], RANKS).id, -1);
    assert_int_equal(kern_best_of(of_rank[4], RANKS).id, KERN_NO_ID);
    k->close(k);
}

static void test_supports(void **state)
{
    (void)state;
    struct kern *k = open_isa("generic", 1);
    struct kern_attn_shape a = {.n_heads = 2, .n_kv_heads = 1, .head_dim = 64};
    struct kern_gdn_shape g = {.k_heads = 1, .v_heads = 2, .k_dim = 32, .v_dim = 32, .conv_width = 4};
    struct err e = {0};
    assert_int_equal(k->supports(k, 64, &a, &g, NULL), RC_OK);
    assert_int_equal(k->supports(k, 64, NULL, NULL, NULL), RC_OK);
    assert_int_equal(k->supports(k, 72, &a, &g, NULL), RC_BAD_INPUT);
    a.head_dim = 72;
    assert_int_equal(k->supports(k, 64, &a, &g, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
    assert_non_null(strstr(e.text, "72"));
    g.v_dim = 272;
    assert_int_equal(k->supports(k, 64, NULL, &g, NULL), RC_BAD_INPUT);
    k->close(k);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_supports),
        cmocka_unit_test(test_rms_norm_isas),
        cmocka_unit_test(test_swiglu_isas),
        cmocka_unit_test(test_best_isas),
        cmocka_unit_test(test_best_tokens),
        cmocka_unit_test(test_hash_rows_isas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
