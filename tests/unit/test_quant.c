/* quant: decoding of stored blocks against vectors of independent decoders (tests/golden/make_quant_vectors.py), bit for bit;
 * the view of codes against the decoded values; every number of 16 and 8 bits against its definition. Matrices with scales
 * beside their codes are tested in test_quant_matrix. Runs in the source folder. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant.h"

#define VECTORS "tests/golden/quant_vectors.txt"
enum { MOST_VALUES = 2048, MOST_GROUPS = MOST_VALUES / 16 };

struct vectors {
    enum quant_format format;
    size_t n;
    uint8_t *stored;
    uint32_t *bits; /* expected, [n] */
};

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static enum quant_format format_named(const char *name)
{
    for (int f = 0; f < QUANT_FORMATS; f++)
        if (!strcmp(quant_name((enum quant_format)f), name)) return (enum quant_format)f;
    fail_msg("no format %s", name);
    return QUANT_F32;
}

/* The next format of the file; false at its end. */
static bool read_vectors(FILE *file, struct vectors *v)
{
    char name[16];
    size_t n_bytes;
    if (fscanf(file, "%15s %zu", name, &v->n) != 2) return false;
    v->format = format_named(name);
    assert_true(quant_row_bytes(v->format, v->n, &n_bytes));
    v->stored = malloc(n_bytes);
    v->bits = malloc(v->n * sizeof *v->bits);
    assert_non_null(v->stored);
    assert_non_null(v->bits);
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned byte;
        assert_int_equal(fscanf(file, "%2x", &byte), 1);
        v->stored[i] = (uint8_t)byte;
    }
    for (size_t i = 0; i < v->n; i++) {
        unsigned bits;
        assert_int_equal(fscanf(file, "%8x", &bits), 1);
        v->bits[i] = bits;
    }
    return true;
}

static void free_vectors(struct vectors *v)
{
    free(v->bits);
    free(v->stored);
}

static void decodes_every_format_bit_for_bit(void **state)
{
    (void)state;
    FILE *file = fopen(VECTORS, "r");
    assert_non_null(file);
    struct vectors v;
    unsigned seen = 0;
    while (read_vectors(file, &v)) {
        float *out = malloc(v.n * sizeof *out);
        assert_non_null(out);
        quant_decode(v.format, v.stored, v.n, out);
        for (size_t i = 0; i < v.n; i++) {
            bool both_nan = isnan(out[i]) && (v.bits[i] & 0x7fffffff) > 0x7f800000;
            if (!both_nan && bits_of(out[i]) != v.bits[i])
                fail_msg("%s value %zu is %08x, not %08x", quant_name(v.format), i, bits_of(out[i]), v.bits[i]);
        }
        seen |= 1u << v.format;
        free(out);
        free_vectors(&v);
    }
    fclose(file);
    const unsigned of_safetensors = 1u << QUANT_FP8 | 1u << QUANT_FP4_PAIRS | 1u << QUANT_E8M0; /* no blocks */
    assert_int_equal(seen, ((1u << QUANT_FORMATS) - 1) & ~of_safetensors);
}

/* Blocks decode alike alone and in a row, from any address. */
static void decodes_blocks_independently(void **state)
{
    (void)state;
    FILE *file = fopen(VECTORS, "r");
    assert_non_null(file);
    struct vectors v;
    while (read_vectors(file, &v)) {
        size_t block = quant_block_values(v.format), block_bytes = quant_block_bytes(v.format), n_bytes;
        assert_true(quant_row_bytes(v.format, v.n, &n_bytes));
        uint8_t *shifted = malloc(n_bytes + 1);
        float whole[MOST_VALUES], one[256];
        assert_non_null(shifted);
        assert_true(v.n <= MOST_VALUES);
        memcpy(shifted + 1, v.stored, n_bytes);
        quant_decode(v.format, shifted + 1, v.n, whole);
        for (size_t b = 0; b < v.n / block; b++) {
            quant_decode(v.format, v.stored + b * block_bytes, block, one);
            assert_memory_equal(one, whole + b * block, block * sizeof *one);
        }
        free(shifted);
        free_vectors(&v);
    }
    fclose(file);
}

static void check_codes(const struct vectors *v)
{
    int8_t codes[MOST_VALUES];
    float values[MOST_VALUES], scales[MOST_GROUPS], mins[MOST_GROUPS];
    size_t group = quant_group_values(v->format);
    int bits = quant_code_bits(v->format);
    assert_true(v->n <= MOST_VALUES);
    quant_decode(v->format, v->stored, v->n, values);
    quant_decode_codes(v->format, v->stored, v->n, codes, scales, mins);
    size_t compared = 0;
    for (size_t i = 0; i < v->n; i++) {
        double real = (double)scales[i / group] * codes[i] + (double)mins[i / group];
        if (bits < 8) assert_in_range(codes[i], 0, (1 << bits) - 1);
        if (!isfinite(values[i])) continue;
        /* Half a unit in the last place of the one rounding; nothing at all where the minimum is a folded offset. */
        double allowed =
            v->format == QUANT_Q4_1 || v->format == QUANT_Q5_1 || v->format == QUANT_Q4_K || v->format == QUANT_Q5_K
                ? ldexp(fabs(real), -24)
                : 0;
        if (!(fabs(real - (double)values[i]) <= allowed))
            fail_msg("%s value %zu: %a from its code, %a decoded", quant_name(v->format), i, real, (double)values[i]);
        compared++;
    }
    assert_true(compared >= v->n * 3 / 4);
}

static void codes_stand_for_the_same_values(void **state)
{
    (void)state;
    FILE *file = fopen(VECTORS, "r");
    assert_non_null(file);
    struct vectors v;
    int with_codes = 0;
    while (read_vectors(file, &v)) {
        bool plain = v.format == QUANT_F32 || v.format == QUANT_F16 || v.format == QUANT_BF16;
        assert_int_equal(quant_has_codes(v.format), !plain);
        if (!plain) check_codes(&v);
        with_codes += !plain;
        free_vectors(&v);
    }
    fclose(file);
    assert_int_equal(with_codes, 10);
}

static void knows_sizes(void **state)
{
    (void)state;
    static const struct {
        enum quant_format f;
        size_t values, bytes, group;
        int bits;
    } sizes[] = {
        {QUANT_F32, 1, 4, 0, 0},       {QUANT_F16, 1, 2, 0, 0},       {QUANT_BF16, 1, 2, 0, 0},
        {QUANT_Q4_0, 32, 18, 32, 4},   {QUANT_Q4_1, 32, 20, 32, 4},   {QUANT_Q5_0, 32, 22, 32, 5},
        {QUANT_Q5_1, 32, 24, 32, 5},   {QUANT_Q8_0, 32, 34, 32, 8},   {QUANT_Q4_K, 256, 144, 32, 4},
        {QUANT_Q5_K, 256, 176, 32, 5}, {QUANT_Q6_K, 256, 210, 16, 6}, {QUANT_MXFP4, 32, 17, 32, 8},
        {QUANT_NVFP4, 64, 36, 16, 8},  {QUANT_FP8, 1, 1, 0, 0},       {QUANT_FP4_PAIRS, 2, 1, 16, 8},
        {QUANT_E8M0, 1, 1, 0, 0},
    };
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        enum quant_format f = sizes[i].f;
        size_t n = 0;
        assert_int_equal(quant_block_values(f), sizes[i].values);
        assert_int_equal(quant_block_bytes(f), sizes[i].bytes);
        if (sizes[i].bits) assert_int_equal(quant_group_values(f), sizes[i].group);
        if (sizes[i].bits) assert_int_equal(quant_code_bits(f), sizes[i].bits);
        assert_true(quant_row_bytes(f, 3 * sizes[i].values, &n));
        assert_int_equal(n, 3 * sizes[i].bytes);
        if (sizes[i].values > 1) assert_false(quant_row_bytes(f, sizes[i].values + 1, &n));
        uint64_t most = UINT64_MAX / 256 * 256; /* whole blocks of each format */
        bool fits = most / sizes[i].values <= SIZE_MAX / sizes[i].bytes;
        assert_int_equal(quant_row_bytes(f, most, &n), fits);
    }
}

/* By the definition: sign, exponent, fraction. */
static double half_value(uint16_t h)
{
    int exponent = h >> 10 & 31, fraction = h & 1023;
    double magnitude = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return h & 0x8000 ? -magnitude : magnitude;
}

static void reads_every_half(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 65536; h++) {
        float f = quant_f16_to_f32((uint16_t)h);
        assert_int_equal(signbit(f) != 0, h >> 15);
        if ((h & 0x7fff) > 0x7c00) {
            assert_true(isnan(f));
        } else if ((h & 0x7fff) == 0x7c00) {
            assert_true(isinf(f));
        } else {
            assert_true((double)f == half_value((uint16_t)h));
        }
    }
}

static void rounds_to_the_nearest_half(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 0x7c00; h++) {
        /* The value itself, the point halfway to the next one, and its neighbours in float32. Above the largest half
         * the next one is what would follow it, 65536, whose place infinity takes. */
        double here = half_value((uint16_t)h), next = h == 0x7bff ? 65536 : half_value((uint16_t)(h + 1));
        float middle = (float)((here + next) / 2);
        unsigned even = h & 1 ? h + 1 : h;
        assert_int_equal(quant_f32_to_f16((float)here), h);
        assert_int_equal(quant_f32_to_f16(-(float)here), h | 0x8000);
        assert_int_equal(quant_f32_to_f16(middle), even);
        assert_int_equal(quant_f32_to_f16(-middle), even | 0x8000);
        assert_int_equal(quant_f32_to_f16(nextafterf(middle, 0)), h);
        assert_int_equal(quant_f32_to_f16(nextafterf(middle, INFINITY)), h + 1);
    }
    assert_int_equal(quant_f32_to_f16(INFINITY), 0x7c00);
    assert_int_equal(quant_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(quant_f32_to_f16(3e38f), 0x7c00);
    assert_int_equal(quant_f32_to_f16(1e-45f), 0);
    assert_int_equal(quant_f32_to_f16(-1e-30f), 0x8000);
    assert_true((quant_f32_to_f16(NAN) & 0x7fff) > 0x7c00);
}

/* Sign, four bits of exponent (bias 7), three of fraction; the largest magnitude is NaN's. */
static void reads_every_e4m3(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        const int exponent = code >> 3 & 15, fraction = code & 7;
        const double magnitude = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
        const uint8_t byte = (uint8_t)code;
        const float f = quant_e4m3_to_f32(byte);
        float decoded;
        quant_decode(QUANT_FP8, &byte, 1, &decoded);
        assert_int_equal(bits_of(decoded), bits_of(f));
        assert_int_equal(isnan(f) != 0, (code & 0x7f) == 0x7f);
        if (!isnan(f)) assert_true((double)f == (code & 0x80 ? -magnitude : magnitude));
        assert_int_equal(signbit(f) != 0, code >> 7);
    }
    assert_true(quant_e4m3_to_f32(0x7e) == 448.0f);
    assert_true(quant_e4m3_to_f32(0x01) == 0x1p-9f);
}

/* Sign, two bits of exponent (bias 1), one of fraction. */
static void reads_every_e2m1(void **state)
{
    (void)state;
    static const float numbers[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int code = 0; code < 256; code++) {
        const int exponent = code >> 1 & 3, fraction = code & 1;
        const double magnitude = exponent ? ldexp(2 + fraction, exponent - 2) : ldexp(fraction, -1);
        const float f = quant_e2m1_to_f32((uint8_t)code);
        assert_true((double)f == (code & 8 ? -magnitude : magnitude));
        assert_true(fabsf(f) == numbers[code & 7]);
        if (f == 0) assert_false(signbit(f));
        const uint8_t pair = (uint8_t)(code & 15);
        float two[2];
        quant_decode(QUANT_FP4_PAIRS, &pair, 2, two); /* the first is the low nibble */
        assert_true(two[0] == f);
        assert_true(two[1] == 0);
    }
}

static void reads_every_e8m0(void **state)
{
    (void)state;
    for (int code = 0; code < 255; code++) assert_true((double)quant_e8m0_to_f32((uint8_t)code) == ldexp(1, code - 127));
    assert_true(isnan(quant_e8m0_to_f32(255)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decodes_every_format_bit_for_bit),
        cmocka_unit_test(decodes_blocks_independently),
        cmocka_unit_test(codes_stand_for_the_same_values),
        cmocka_unit_test(knows_sizes),
        cmocka_unit_test(reads_every_half),
        cmocka_unit_test(rounds_to_the_nearest_half),
        cmocka_unit_test(reads_every_e4m3),
        cmocka_unit_test(reads_every_e2m1),
        cmocka_unit_test(reads_every_e8m0),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
