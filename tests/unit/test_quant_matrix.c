/* quant: matrices whose scales lie beside their codes, and requantization to 8 bits, against decoders written a second time
 * here, from the formats' definitions, in double precision with ldexp.
 *
 * Why double suffices as an oracle of float32 results: a product of two float32 numbers is exact in double, and a quotient
 * of two rounded to double and then to float32 is the correctly rounded quotient (53 >= 2 * 24 + 2 bits). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "quant.h"

/* ---- the oracle ---- */

static double e4m3(uint8_t code)
{
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double magnitude = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    if ((code & 0x7f) == 0x7f) return NAN;
    return code & 0x80 ? -magnitude : magnitude;
}

static double e2m1(uint8_t code)
{
    const int exponent = code >> 1 & 3, fraction = code & 1;
    const double magnitude = exponent ? ldexp(2 + fraction, exponent - 2) : ldexp(fraction, -1);
    return code & 8 ? -magnitude : magnitude;
}

static double e8m0(uint8_t code) { return code == 255 ? (double)NAN : ldexp(1, code - 127); }

static double number_at(enum quant_format f, const void *bytes, size_t i)
{
    const uint8_t *p = bytes;
    uint16_t half;
    float full;
    switch (f) {
    case QUANT_FP8: return e4m3(p[i]);
    case QUANT_E8M0: return e8m0(p[i]);
    case QUANT_F32: memcpy(&full, p + 4 * i, 4); return (double)full;
    default: break;
    }
    memcpy(&half, p + 2 * i, 2);
    if (f == QUANT_F16) {
        const int exponent = half >> 10 & 31, fraction = half & 1023;
        const double magnitude = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
        return half & 0x8000 ? -magnitude : magnitude;
    }
    const uint32_t bits = (uint32_t)half << 16; /* BF16 */
    memcpy(&full, &bits, 4);
    return (double)full;
}

/* The scale of a value, with the factor of the matrix, rounded once. */
static float whole_scale(const struct quant_matrix *m, double stored)
{
    return (float)(m->divide ? stored / (double)m->global : stored * (double)m->global);
}

static float grid_scale(const struct quant_matrix *m, uint64_t row, uint64_t col)
{
    const struct quant_scales *s = &m->scales;
    if (!s->bytes) return whole_scale(m, 1);
    return whole_scale(m, number_at(s->format, s->bytes, row / s->row_block * s->per_row + col / s->col_block));
}

static float value_of(const struct quant_matrix *m, uint64_t row, uint64_t col)
{
    const uint8_t *p = m->bytes;
    double code;
    float scale;
    if (m->format == QUANT_FP8) {
        code = e4m3(p[row * m->cols + col]);
        scale = grid_scale(m, row, col);
    } else if (m->format == QUANT_FP4_PAIRS) {
        const uint8_t pair = p[(row * m->cols + col) / 2];
        code = e2m1(col % 2 ? pair >> 4 : pair & 15);
        scale = grid_scale(m, row, col);
    } else if (m->format == QUANT_MXFP4) {
        const uint8_t *block = p + (row * m->cols + col) / 32 * 17;
        const uint64_t j = col % 32;
        code = e2m1(j < 16 ? block[1 + j] & 15 : block[1 + j - 16] >> 4);
        scale = whole_scale(m, e8m0(block[0]));
    } else { /* NVFP4: the scales' sign does not count */
        const uint8_t *block = p + (row * m->cols + col) / 64 * 36, *qs = block + 4 + col % 64 / 16 * 8;
        const uint64_t j = col % 16;
        code = e2m1(j < 8 ? qs[j] & 15 : qs[j - 8] >> 4);
        scale = whole_scale(m, e4m3(block[col % 64 / 16] & 0x7f));
    }
    return (float)(code * (double)scale);
}

static bool same(float a, float b) { return a == b || (isnan(a) && isnan(b)); }

/* Columns [first, first + n) of a row, however they are read. */
static void check_range(const struct quant_matrix *m, uint64_t row, uint64_t first, size_t n)
{
    float *out = malloc((n + 2) * sizeof *out);
    assert_non_null(out);
    out[0] = out[n + 1] = 77;
    quant_matrix_decode(m, row, first, n, out + 1);
    for (size_t i = 0; i < n; i++)
        if (!same(out[i + 1], value_of(m, row, first + i)))
            fail_msg("%s row %zu column %zu: %a, oracle %a", quant_name(m->format), (size_t)row, (size_t)first + i,
                     (double)out[i + 1], (double)value_of(m, row, first + i));
    assert_true(out[0] == 77 && out[n + 1] == 77);
    free(out);
}

static uint64_t random_next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

/* ---- every code with every scale ---- */

static const float globals[] = {1, 0.37f, -3, 2e-38f, 3e37f, 0x1.fffffep-3f};
enum { GLOBALS = sizeof globals / sizeof *globals };

static void reads_fp8_with_every_scale(void **state)
{
    (void)state;
    uint8_t codes[256];
    for (int i = 0; i < 256; i++) codes[i] = (uint8_t)i;
    static const enum quant_format formats[] = {QUANT_F32, QUANT_F16, QUANT_BF16, QUANT_FP8, QUANT_E8M0};
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (unsigned i = 0; i < 512; i++) {
            const float full = ldexpf(1 + (float)(i % 256) / 256, (int)(i / 2) - 128);
            const uint16_t half = (uint16_t)(i * 127);
            const uint8_t byte = (uint8_t)i;
            const size_t bytes = quant_block_bytes(formats[f]);
            const void *scale = bytes == 4 ? (const void *)&full : bytes == 2 ? (const void *)&half : (const void *)&byte;
            if (bytes == 2 && (half & 0x7c00) == 0x7c00) continue; /* the oracle's halves are finite */
            struct quant_matrix m = {.format = QUANT_FP8, .rows = 1, .cols = 256, .bytes = codes, .global = globals[i % GLOBALS]};
            m.divide = i / GLOBALS % 2;
            m.scales = (struct quant_scales){scale, formats[f], 1, 256, 1};
            check_range(&m, 0, 0, 256);
        }
}

/* A row for each byte of scale, 16 or 32 columns with all codes: in safetensors' order and in GGUF's. */
static void check_e2m1(enum quant_format scale_format, float global, bool divide)
{
    static uint8_t pairs[256 * 16], scales[256], blocks[256 * 36];
    const uint64_t group = scale_format == QUANT_FP8 ? 16 : 32;
    for (size_t row = 0; row < 256; row++) {
        scales[row] = (uint8_t)row;
        for (size_t i = 0; i < group / 2; i++)
            pairs[row * group / 2 + i] = (uint8_t)((2 * i & 15) | ((2 * i + 1) & 15) << 4);
        uint8_t *block = blocks + row * (scale_format == QUANT_FP8 ? 36 : 17);
        if (scale_format == QUANT_FP8)
            for (size_t i = 0; i < 4; i++) block[i] = (uint8_t)(row + i);
        else
            block[0] = (uint8_t)row;
        for (size_t i = 0; i < (scale_format == QUANT_FP8 ? 32 : 16); i++)
            block[(scale_format == QUANT_FP8 ? 4 : 1) + i] = (uint8_t)(i * 17 + row * 16);
    }
    struct quant_matrix m = {.format = QUANT_FP4_PAIRS, .rows = 256, .cols = group, .bytes = pairs};
    m.global = global;
    m.divide = divide;
    m.scales = (struct quant_scales){scales, scale_format, 1, group, 1};
    for (uint64_t row = 0; row < 256; row++) check_range(&m, row, 0, (size_t)group);
    m.format = scale_format == QUANT_FP8 ? QUANT_NVFP4 : QUANT_MXFP4;
    m.cols = quant_block_values(m.format);
    m.bytes = blocks;
    m.scales = (struct quant_scales){0};
    for (uint64_t row = 0; row < 256; row++) check_range(&m, row, 0, (size_t)m.cols);
}

static void reads_e2m1_with_every_scale(void **state)
{
    (void)state;
    for (int g = 0; g < GLOBALS; g++)
        for (int divide = 0; divide < 2; divide++) {
            check_e2m1(QUANT_FP8, globals[g], divide);
            check_e2m1(QUANT_E8M0, globals[g], divide);
        }
}

/* 448 * 6 / amax and its reciprocal: what the two producers of NVFP4 write for the same tensor. */
static void divides_or_multiplies(void **state)
{
    (void)state;
    const uint8_t code = 0x07, scale = 0x7e; /* 6 and 448 */
    struct quant_matrix m = {.format = QUANT_FP4_PAIRS, .rows = 1, .cols = 2, .bytes = &code, .global = 2688, .divide = true};
    m.scales = (struct quant_scales){&scale, QUANT_FP8, 1, 16, 1};
    float out[2];
    quant_matrix_decode(&m, 0, 0, 2, out);
    assert_true(out[0] == 1 && out[1] == 0);
    m.divide = false;
    m.global = 1 / 2688.0f;
    quant_matrix_decode(&m, 0, 0, 2, out);
    assert_true(out[0] == 6 * (448 * (1 / 2688.0f)));
}

/* ---- grids of scales ---- */

struct grid {
    uint64_t rows, cols, row_block, col_block;
    size_t group; /* that kernels see in FP8 */
};

/* Per tensor, per channel, per column block, 128 x 128 with edges on both sides, smaller than one block, odd blocks. */
static const struct grid grids[] = {
    {5, 96, 5, 96, 128},        {7, 96, 1, 96, 128},       {6, 256, 6, 128, 128}, {130, 200, 128, 128, 128},
    {256, 256, 128, 128, 128},  {300, 130, 128, 128, 128}, {3, 40, 128, 128, 128}, {4, 192, 2, 64, 64},
    {4, 192, 1, 32, 32},        {9, 80, 1, 16, 16},        {5, 100, 2, 40, 0},     {1, 2, 1, 2, 128},
    {33, 260, 32, 96, 32},
};

static struct quant_matrix grid_matrix(const struct grid *g, enum quant_format f, enum quant_format scales, uint8_t **codes,
                                       uint8_t **bytes)
{
    uint64_t seed = g->rows + g->cols;
    struct quant_matrix m = {.format = f, .rows = g->rows, .cols = g->cols, .global = 0.77f};
    const uint64_t per_row = (g->cols + g->col_block - 1) / g->col_block;
    const size_t n_scales = (size_t)((g->rows + g->row_block - 1) / g->row_block * per_row), n = (size_t)(g->rows * g->cols);
    *codes = malloc(n);
    *bytes = malloc(n_scales * 4);
    assert_true(*codes && *bytes);
    for (size_t i = 0; i < n; i++) (*codes)[i] = (uint8_t)random_next(&seed);
    for (size_t i = 0; i < n_scales; i++) {
        const float full = (float)(1 + random_next(&seed) % 1000) / 64;
        uint32_t bits;
        memcpy(&bits, &full, 4);
        const uint16_t half = scales == QUANT_F16 ? quant_f32_to_f16(full) : (uint16_t)(bits >> 16);
        const size_t size = quant_block_bytes(scales);
        if (size == 1) (*bytes)[i] = (uint8_t)(60 + random_next(&seed) % 60);
        else memcpy(*bytes + i * size, size == 4 ? (const void *)&full : (const void *)&half, size);
    }
    m.bytes = *codes;
    m.scales = (struct quant_scales){*bytes, scales, g->row_block, g->col_block, per_row};
    return m;
}

/* The stored bytes, and a scale for each group that the range touches. */
static void check_fp8(const struct quant_matrix *m, uint64_t row, uint64_t first, size_t n)
{
    uint8_t codes[512];
    float scales[64];
    const uint64_t group = quant_matrix_group(m);
    quant_matrix_fp8(m, row, first, n, codes, scales);
    assert_memory_equal(codes, (const uint8_t *)m->bytes + row * m->cols + first, n);
    for (uint64_t col = first; col < first + n; col++)
        assert_true(scales[col / group - first / group] == grid_scale(m, row, col));
}

static void reads_fp8_grids(void **state)
{
    (void)state;
    static const enum quant_format formats[] = {QUANT_F32, QUANT_F16, QUANT_BF16};
    for (size_t i = 0; i < sizeof grids / sizeof *grids; i++) {
        const struct grid *g = &grids[i];
        uint8_t *codes, *bytes;
        struct quant_matrix m = grid_matrix(g, QUANT_FP8, formats[i % 3], &codes, &bytes);
        assert_int_equal(quant_matrix_group(&m), g->group);
        for (uint64_t row = 0; row < g->rows; row++) {
            const uint64_t first = row * 37 % g->cols, n = 1 + row * 11 % (g->cols - first);
            check_range(&m, row, 0, (size_t)g->cols);
            check_range(&m, row, first, (size_t)n);
            if (g->group) check_fp8(&m, row, 0, (size_t)g->cols);
            if (g->group) check_fp8(&m, row, first, (size_t)n);
        }
        m.scales.bytes = NULL; /* no scales at all: the factor alone */
        check_range(&m, 0, 0, (size_t)g->cols);
        assert_int_equal(quant_matrix_group(&m), 128);
        check_fp8(&m, 0, 0, (size_t)g->cols);
        free(codes);
        free(bytes);
    }
}

/* The integer view and the stored view of E2M1 matrices give the decoded values. */
static void check_e2m1_views(const struct quant_matrix *m, uint64_t row, uint64_t first, size_t n)
{
    int8_t codes[512];
    uint8_t stored[512], bytes[64];
    float scales[64], mins[64];
    const size_t group = quant_matrix_group(m);
    const enum quant_format f = quant_matrix_e2m1_scales(m);
    quant_matrix_codes(m, row, first, n, codes, scales, mins);
    if (f != QUANT_FORMATS) quant_matrix_e2m1(m, row, first, n, stored, bytes);
    for (size_t i = 0; i < n; i++) {
        const float value = value_of(m, row, first + i);
        assert_in_range(codes[i] + 12, 0, 24);
        assert_true(mins[i / group] == 0);
        assert_true(scales[i / group] * (float)codes[i] == value);
        if (f == QUANT_FORMATS) continue;
        assert_in_range(stored[i], 0, 15);
        assert_true((float)(e2m1(stored[i]) * (double)whole_scale(m, number_at(f, bytes, i / group))) == value);
    }
}

static void reads_fp4_grids(void **state)
{
    (void)state;
    static const struct {
        struct grid grid;
        enum quant_format scales, bytes;
    } cases[] = {
        {{5, 96, 1, 16, 16}, QUANT_FP8, QUANT_FP8},         {{5, 96, 1, 32, 32}, QUANT_E8M0, QUANT_E8M0},
        {{4, 64, 2, 16, 16}, QUANT_F32, QUANT_FORMATS},     {{4, 64, 1, 16, 16}, QUANT_BF16, QUANT_FORMATS},
        {{3, 96, 3, 96, 32}, QUANT_F32, QUANT_FORMATS},     {{3, 96, 1, 48, 16}, QUANT_F16, QUANT_FORMATS},
        {{3, 128, 1, 128, 32}, QUANT_FP8, QUANT_FORMATS},   {{3, 64, 1, 16, 16}, QUANT_E8M0, QUANT_FORMATS},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct grid *g = &cases[i].grid;
        uint8_t *codes, *bytes;
        struct quant_matrix m = grid_matrix(g, QUANT_FP4_PAIRS, cases[i].scales, &codes, &bytes);
        m.divide = i % 2;
        assert_int_equal(quant_matrix_group(&m), g->group);
        assert_int_equal(quant_matrix_e2m1_scales(&m), cases[i].bytes);
        for (uint64_t row = 0; row < g->rows; row++) {
            check_range(&m, row, 0, (size_t)g->cols);
            check_range(&m, row, 34, 28);
            check_e2m1_views(&m, row, 0, (size_t)g->cols);
            check_e2m1_views(&m, row, g->group, 32);
        }
        free(codes);
        free(bytes);
    }
}

/* GGUF's blocks, cut inside a block at multiples of the group. */
static void reads_blocks_in_pieces(void **state)
{
    (void)state;
    uint8_t bytes[3 * 4 * 36];
    uint64_t seed = 5;
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(random_next(&seed) % 100);
    struct quant_matrix m = {.format = QUANT_NVFP4, .rows = 3, .cols = 256, .bytes = bytes, .global = 0.3f};
    for (uint64_t row = 0; row < 3; row++)
        for (uint64_t first = 0; first < 256; first += 16) {
            check_range(&m, row, first, 16);
            check_range(&m, row, first, (size_t)(256 - first));
            check_e2m1_views(&m, row, first, (size_t)(256 - first));
            check_e2m1_views(&m, row, 0, (size_t)first + 16);
            check_range(&m, row, first + 3, 9); /* decoding may start anywhere */
        }
    m.format = QUANT_MXFP4;
    m.rows = 2, m.cols = 160;
    for (uint64_t first = 0; first < 160; first += 32) check_e2m1_views(&m, 1, first, (size_t)(160 - first));
    m.format = QUANT_Q8_0;
    assert_int_equal(quant_matrix_e2m1_scales(&m), QUANT_FORMATS);
    assert_int_equal(quant_matrix_group(&m), 32);
    m.format = QUANT_BF16;
    assert_int_equal(quant_matrix_group(&m), 1);
}

/* ---- eight bits ---- */

enum { GROUP = QUANT_W8_GROUP };

/* By the definition, one group: scale and codes. Nearest, ties to even, from the exact comparison of products. */
static float w8_oracle(const float *value, size_t n, int *codes)
{
    double largest = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)value[i]));
    const float scale = (float)(largest / 127);
    for (size_t i = 0; i < n; i++) {
        const double magnitude = fabs((double)value[i]);
        int code = 0; /* the first whose upper border, code + 1/2, is not passed; all products here are exact in double */
        while (code < 127 && magnitude > (code + 0.5) * (double)scale) code++;
        if (code < 127 && magnitude == (code + 0.5) * (double)scale && code % 2) code++;
        codes[i] = scale == 0 ? 0 : signbit(value[i]) ? -code : code;
    }
    return scale;
}

static void check_w8(const float *values, uint64_t cols, uint64_t first, size_t n)
{
    const struct quant_matrix m = {.format = QUANT_F32, .rows = 1, .cols = cols, .bytes = values, .global = 1};
    int8_t codes[1024];
    float scales[16];
    memset(codes, 99, sizeof codes);
    for (int i = 0; i < 16; i++) scales[i] = 99;
    quant_matrix_w8(&m, 0, first, n, codes, scales);
    size_t touched = 0;
    for (uint64_t at = first / GROUP * GROUP; at < first + n; at += GROUP, touched++) {
        const size_t size = cols - at < GROUP ? (size_t)(cols - at) : GROUP;
        int want[GROUP];
        const float scale = w8_oracle(values + at, size, want);
        assert_true(scales[touched] == scale);
        for (uint64_t col = at > first ? at : first; col < at + size && col < first + n; col++)
            if (codes[col - first] != want[col - at])
                fail_msg("column %zu: %a / %a gives %d, oracle %d", (size_t)col, (double)values[col], (double)scale,
                         codes[col - first], want[col - at]);
    }
    assert_true(scales[touched] == 99);
    assert_int_equal(codes[n], 99);
}

static void requantizes_to_the_nearest_code(void **state)
{
    (void)state;
    float values[700];
    uint64_t seed = 9;
    for (int round = 0; round < 50; round++) {
        for (size_t i = 0; i < 700; i++)
            values[i] = ldexpf((float)random_next(&seed) * 0x1p-30f - 1, round % 2 ? (int)(random_next(&seed) % 12) : -round);
        check_w8(values, 700, 0, 700);
        const uint64_t first = random_next(&seed) % 699;
        check_w8(values, 700, first, (size_t)(1 + random_next(&seed) % (700 - first)));
        check_w8(values, 100, 0, 100);
    }
}

/* Largest magnitude 127: the scale is 1, so halves are ties, and their neighbours are not. */
static void rounds_ties_to_even(void **state)
{
    (void)state;
    float values[3 * GROUP];
    for (int shift = -20; shift <= 20; shift += 20) {
        for (int i = 0; i < GROUP; i++) {
            const float tie = (float)i - 0.5f;
            values[i] = ldexpf(i % 3 ? tie : -tie, shift);
            values[GROUP + i] = nextafterf(values[i], 1e9f);
            values[2 * GROUP + i] = nextafterf(values[i], -1e9f);
        }
        for (int g = 0; g < 3; g++) values[g * GROUP] = ldexpf(127, shift);
        check_w8(values, 3 * GROUP, 0, 3 * GROUP);
    }
    const struct quant_matrix m = {.format = QUANT_F32, .rows = 1, .cols = GROUP, .bytes = values, .global = 1};
    int8_t codes[GROUP];
    float scale;
    for (int i = 0; i < GROUP; i++) values[i] = (float)i - 0.5f;
    values[0] = -127;
    quant_matrix_w8(&m, 0, 0, GROUP, codes, &scale);
    assert_true(scale == 1);
    assert_int_equal(codes[0], -127);
    for (int i = 1; i < GROUP; i++) assert_int_equal(codes[i], i % 2 ? i - 1 : i);
}

static void requantizes_nothing_and_no_numbers(void **state)
{
    (void)state;
    static const float odd[] = {INFINITY, -INFINITY, NAN};
    float values[3 * GROUP] = {0}, scales[3];
    int8_t codes[3 * GROUP];
    struct quant_matrix m = {.format = QUANT_F32, .rows = 1, .cols = 3 * GROUP, .bytes = values, .global = 1};
    for (int i = 0; i < 3; i++) {
        for (int j = 0; j < 3 * GROUP; j++) values[j] = j < GROUP ? 0 : 1;
        values[2] = -0.0f;
        values[GROUP + 7] = odd[i];
        values[3 * GROUP - 1] = FLT_MAX;
        quant_matrix_w8(&m, 0, 0, 3 * GROUP, codes, scales);
        assert_true(scales[0] == 0);
        assert_true(isnan(scales[1]));
        assert_true(scales[2] == FLT_MAX / 127);
        for (int j = 0; j < 3 * GROUP; j++) assert_int_equal(codes[j], j < 3 * GROUP - 1 ? 0 : 127);
        quant_matrix_w8(&m, 0, GROUP + 9, 5, codes, scales); /* another column of that group */
        assert_true(isnan(scales[0]));
        assert_int_equal(codes[0], 0);
    }
    /* Scales that float32 can hold only coarsely, or not at all. */
    for (int largest = 1; largest < 1000; largest += 7) {
        for (int j = 0; j < GROUP; j++) values[j] = ldexpf((float)(j % 2 ? largest : -(largest * j / GROUP)), -149);
        check_w8(values, GROUP, 0, GROUP);
    }
}

/* From a format with codes and scales of its own, the values that are requantized are the decoded ones. */
static void requantizes_what_is_decoded(void **state)
{
    (void)state;
    uint8_t *bytes, *scales;
    const struct grid g = {3, 208, 1, 16, 16};
    const struct quant_matrix m = grid_matrix(&g, QUANT_FP4_PAIRS, QUANT_FP8, &bytes, &scales);
    for (uint64_t row = 0; row < 3; row++) {
        float values[208], w8_scales[2];
        int8_t codes[208];
        int want[GROUP];
        for (uint64_t col = 0; col < 208; col++) values[col] = value_of(&m, row, col);
        quant_matrix_w8(&m, row, 0, 208, codes, w8_scales);
        for (size_t at = 0; at < 208; at += GROUP) {
            const size_t size = at ? 208 - GROUP : GROUP;
            assert_true(w8_scales[at / GROUP] == w8_oracle(values + at, size, want));
            for (size_t i = 0; i < size; i++) assert_int_equal(codes[at + i], want[i]);
        }
    }
    free(bytes);
    free(scales);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_fp8_with_every_scale),
        cmocka_unit_test(reads_e2m1_with_every_scale),
        cmocka_unit_test(divides_or_multiplies),
        cmocka_unit_test(reads_fp8_grids),
        cmocka_unit_test(reads_fp4_grids),
        cmocka_unit_test(reads_blocks_in_pieces),
        cmocka_unit_test(requantizes_to_the_nearest_code),
        cmocka_unit_test(rounds_ties_to_even),
        cmocka_unit_test(requantizes_nothing_and_no_numbers),
        cmocka_unit_test(requantizes_what_is_decoded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
