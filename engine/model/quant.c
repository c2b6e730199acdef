/* quant: the stored number formats and their exact decoding.
 *
 * Every block format is unpacked by one function into the same picture: integer codes, one float32 scale per group of
 * 16 or 32 codes and, for formats that have one, one float32 minimum per group. Both public views are made from it:
 *
 *   values   scale * (code - offset)        formats with a fixed offset (Q4_0, Q5_0, Q8_0, Q6_K)
 *            scale * code + min             formats with a minimum (Q4_1, Q5_1, Q4_K, Q5_K)
 *   codes    scale * code + min, where min is -offset * scale for the formats of the first row
 *
 * Why this is exact. A stored factor has 11 significant bits. Scales are that (Q4_*, Q5_0, Q5_1, Q8_0), or that times a
 * 6-bit integer (Q4_K, Q5_K: 17 bits) or an 8-bit signed one (Q6_K: 18 bits; -128 is a power of two). A code has 4, 5
 * or 8 bits, so scale * code takes at most 23 bits and float32 holds it without rounding; the only rounding of a value
 * is the addition of the minimum. It follows that a compiler which contracts the product and the sum into one fused
 * operation changes nothing, and that -offset * scale (offset 8, 16 or 32) is exact as well. Factors of 0, of either
 * sign, keep the sign of zero that ggml gives; factors that are not finite give NaN or infinities, as there.
 *
 * E2M1 codes are small integers once doubled, so these formats fit the same picture. Their scales are E4M3 (4 significant
 * bits) or E8M0 (1); with the factor of the matrix a group's scale has 24, and a value is one rounded product. Formats of
 * safetensors keep their scales beside the codes, in a grid; the matrix functions at the end put both together.
 *
 * Integers are stored little-endian; so is the host, checked below. */
#include "quant.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are read in place, little-endian");

enum { MAX_BLOCK_VALUES = 256, MAX_BLOCK_GROUPS = 16 };

/* One block, unpacked. min is set by formats with a minimum only, scale_byte by E2M1 formats only; their codes are the
 * stored four bits. */
struct block {
    int8_t code[MAX_BLOCK_VALUES];
    float scale[MAX_BLOCK_GROUPS];
    float min[MAX_BLOCK_GROUPS];
    uint8_t scale_byte[MAX_BLOCK_GROUPS];
};

struct format {
    const char *name;
    size_t block_values;
    size_t block_bytes;
    size_t group_values; /* 0: plain numbers, no codes */
    int code_bits;
    int offset; /* subtracted from a code; formats without a minimum */
    bool has_min;
    bool e2m1; /* codes are looked up */
    void (*unpack)(const uint8_t *bytes, struct block *out);
};

static uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }

static uint32_t load_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static float load_f16(const uint8_t *p) { return quant_f16_to_f32(load_u16(p)); }

/* 16 bytes of nibbles: values 0..15 are the low halves, 16..31 the high halves. */
static void unpack_nibbles(const uint8_t qs[16], int8_t code[32])
{
    for (int j = 0; j < 16; j++) {
        code[j] = (int8_t)(qs[j] & 15);
        code[j + 16] = (int8_t)(qs[j] >> 4);
    }
}

/* The fifth bits of 32 codes: bit j of high belongs to code j. */
static void add_fifth_bits(uint32_t high, int8_t code[32])
{
    for (int j = 0; j < 32; j++) code[j] = (int8_t)(code[j] | (int)(high >> j & 1) << 4);
}

static void unpack_q4_0(const uint8_t *p, struct block *b)
{
    b->scale[0] = load_f16(p);
    unpack_nibbles(p + 2, b->code);
}

static void unpack_q4_1(const uint8_t *p, struct block *b)
{
    b->scale[0] = load_f16(p);
    b->min[0] = load_f16(p + 2);
    unpack_nibbles(p + 4, b->code);
}

static void unpack_q5_0(const uint8_t *p, struct block *b)
{
    b->scale[0] = load_f16(p);
    unpack_nibbles(p + 6, b->code);
    add_fifth_bits(load_u32(p + 2), b->code);
}

static void unpack_q5_1(const uint8_t *p, struct block *b)
{
    b->scale[0] = load_f16(p);
    b->min[0] = load_f16(p + 2);
    unpack_nibbles(p + 8, b->code);
    add_fifth_bits(load_u32(p + 4), b->code);
}

static void unpack_q8_0(const uint8_t *p, struct block *b)
{
    b->scale[0] = load_f16(p);
    memcpy(b->code, p + 2, 32);
}

/* Scales and minimums of Q4_K and Q5_K: two factors, then 8 pairs of 6-bit integers in 12 bytes. The first four pairs
 * lie in the low 6 bits of bytes 0..3 and 4..7; the last four have their low 4 bits in the nibbles of bytes 8..11 and
 * their high 2 bits on top of bytes 0..3 and 4..7. */
static void unpack_k_scales(const uint8_t *p, struct block *b)
{
    float scale_factor = load_f16(p), min_factor = load_f16(p + 2);
    const uint8_t *s = p + 4;
    for (int j = 0; j < 8; j++) {
        int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        int min = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
        b->scale[j] = scale_factor * (float)scale;
        b->min[j] = -(min_factor * (float)min);
    }
}

/* 128 bytes of nibbles in four runs of 32: a run holds one group in its low halves and the next in its high halves. */
static void unpack_k_nibbles(const uint8_t qs[128], int8_t code[256])
{
    for (int run = 0; run < 4; run++)
        for (int l = 0; l < 32; l++) {
            code[64 * run + l] = (int8_t)(qs[32 * run + l] & 15);
            code[64 * run + 32 + l] = (int8_t)(qs[32 * run + l] >> 4);
        }
}

static void unpack_q4_k(const uint8_t *p, struct block *b)
{
    unpack_k_scales(p, b);
    unpack_k_nibbles(p + 16, b->code);
}

static void unpack_q5_k(const uint8_t *p, struct block *b)
{
    const uint8_t *high = p + 16; /* bit j of byte l: the fifth bit of value l of group j */
    unpack_k_scales(p, b);
    unpack_k_nibbles(p + 48, b->code);
    for (int j = 0; j < 8; j++)
        for (int l = 0; l < 32; l++) b->code[32 * j + l] = (int8_t)(b->code[32 * j + l] | (high[l] >> j & 1) << 4);
}

/* Two halves of 128 values, each of four runs of 32. Runs 0 and 1 have their low 4 bits in the low nibbles of the
 * half's 64 bytes, runs 2 and 3 in the high ones; the high 2 bits of run k are bits 2k, 2k+1 of the half's 32 bytes. */
static void unpack_q6_k(const uint8_t *p, struct block *b)
{
    const uint8_t *low = p, *high = p + 128, *scales = p + 192;
    float factor = load_f16(p + 208);
    for (int g = 0; g < 16; g++) b->scale[g] = factor * (float)(int8_t)scales[g];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 32; l++) {
                int byte = low[64 * half + 32 * (k & 1) + l];
                int nibble = k < 2 ? byte & 15 : byte >> 4;
                int top = high[32 * half + l] >> 2 * k & 3;
                b->code[128 * half + 32 * k + l] = (int8_t)(nibble | top << 4);
            }
}

static void unpack_mxfp4(const uint8_t *p, struct block *b)
{
    b->scale_byte[0] = p[0];
    b->scale[0] = quant_e8m0_to_f32(p[0]);
    unpack_nibbles(p + 1, b->code);
}

/* Four groups: their scales, then 8 bytes for each, which hold values 0..7 in the low halves, 8..15 in the high ones. The
 * scales are unsigned: ggml does not look at their highest bit. */
static void unpack_nvfp4(const uint8_t *p, struct block *b)
{
    for (int g = 0; g < 4; g++) {
        const uint8_t *qs = p + 4 + 8 * g;
        b->scale_byte[g] = p[g] & 0x7f;
        b->scale[g] = quant_e4m3_to_f32(b->scale_byte[g]);
        for (int j = 0; j < 8; j++) {
            b->code[16 * g + j] = (int8_t)(qs[j] & 15);
            b->code[16 * g + 8 + j] = (int8_t)(qs[j] >> 4);
        }
    }
}

static const struct format formats[QUANT_FORMATS] = {
    [QUANT_F32] = {"F32", 1, 4, 0, 0, 0, false, false, NULL},
    [QUANT_F16] = {"F16", 1, 2, 0, 0, 0, false, false, NULL},
    [QUANT_BF16] = {"BF16", 1, 2, 0, 0, 0, false, false, NULL},
    [QUANT_Q4_0] = {"Q4_0", 32, 18, 32, 4, 8, false, false, unpack_q4_0},
    [QUANT_Q4_1] = {"Q4_1", 32, 20, 32, 4, 0, true, false, unpack_q4_1},
    [QUANT_Q5_0] = {"Q5_0", 32, 22, 32, 5, 16, false, false, unpack_q5_0},
    [QUANT_Q5_1] = {"Q5_1", 32, 24, 32, 5, 0, true, false, unpack_q5_1},
    [QUANT_Q8_0] = {"Q8_0", 32, 34, 32, 8, 0, false, false, unpack_q8_0},
    [QUANT_Q4_K] = {"Q4_K", 256, 144, 32, 4, 0, true, false, unpack_q4_k},
    [QUANT_Q5_K] = {"Q5_K", 256, 176, 32, 5, 0, true, false, unpack_q5_k},
    [QUANT_Q6_K] = {"Q6_K", 256, 210, 16, 6, 32, false, false, unpack_q6_k},
    [QUANT_MXFP4] = {"MXFP4", 32, 17, 32, 8, 0, false, true, unpack_mxfp4},
    [QUANT_NVFP4] = {"NVFP4", 64, 36, 16, 8, 0, false, true, unpack_nvfp4},
    [QUANT_FP8] = {"FP8", 1, 1, 0, 0, 0, false, false, NULL},
    [QUANT_FP4_PAIRS] = {"FP4", 2, 1, 16, 8, 0, false, true, NULL},
    [QUANT_E8M0] = {"E8M0", 1, 1, 0, 0, 0, false, false, NULL},
};

const char *quant_name(enum quant_format f) { return formats[f].name; }
size_t quant_block_values(enum quant_format f) { return formats[f].block_values; }
size_t quant_block_bytes(enum quant_format f) { return formats[f].block_bytes; }
bool quant_has_codes(enum quant_format f) { return formats[f].group_values != 0; }
int quant_code_bits(enum quant_format f) { return formats[f].code_bits; }
size_t quant_group_values(enum quant_format f) { return formats[f].group_values; }

bool quant_row_bytes(enum quant_format f, uint64_t n, size_t *out)
{
    const struct format *format = &formats[f];
    if (n % format->block_values || n / format->block_values > SIZE_MAX) return false;
    return size_mul((size_t)(n / format->block_values), format->block_bytes, out);
}

float quant_f16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v;
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 31) { /* infinity, NaN with its payload */
        v.u = sign | 0x7f800000 | mantissa << 13;
    } else if (exponent) {
        v.u = sign | (exponent + 112) << 23 | mantissa << 13;
    } else { /* zero and subnormals: mantissa * 2^-24, normal in float32, so no flush-to-zero mode can touch it */
        v.f = (float)mantissa * 0x1p-24f;
        v.u |= sign;
    }
    return v.f;
}

uint16_t quant_f32_to_f16(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    uint32_t sign = v.u >> 16 & 0x8000, magnitude = v.u & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 1023)); /* a quiet NaN */
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and above round to infinity */
    uint32_t mantissa, shift, exponent = magnitude >> 23;
    if (exponent >=
        113) { /* a normal half: exponent and mantissa move together, so a carry into the exponent is right */
        mantissa = magnitude - (112u << 23);
        shift = 13;
    } else { /* a subnormal half: units of 2^-24; below half a unit nothing is left */
        if (exponent < 102) return (uint16_t)sign;
        mantissa = (magnitude & 0x7fffff) | 0x800000;
        shift = 126 - exponent;
    }
    uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (rest > half || (rest == half && (kept & 1))) kept++;
    return (uint16_t)(sign | kept);
}

float quant_e4m3_to_f32(uint8_t code)
{
    union {
        uint32_t u;
        float f;
    } v;
    uint32_t sign = (uint32_t)(code & 0x80) << 24, exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 0x7f) == 0x7f) {
        v.u = sign | 0x7fc00000;
    } else if (exponent) {
        v.u = sign | (exponent + 120) << 23 | mantissa << 20;
    } else {
        v.f = (float)mantissa * 0x1p-9f;
        v.u |= sign;
    }
    return v.f;
}

/* Twice the values. */
static const int8_t e2m1_doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float quant_e2m1_to_f32(uint8_t code) { return 0.5f * (float)e2m1_doubled[code & 15]; }

float quant_e8m0_to_f32(uint8_t code)
{
    union {
        uint32_t u;
        float f;
    } v = {code == 255 ? 0x7fc00000 : code ? (uint32_t)code << 23 : 0x400000};
    return v.f;
}

/* Formats of one number after another. */
static void decode_plain(enum quant_format f, const uint8_t *p, size_t n, float *out)
{
    switch (f) {
    case QUANT_F32: memcpy(out, p, n * sizeof *out); break;
    case QUANT_F16:
        for (size_t i = 0; i < n; i++) out[i] = load_f16(p + 2 * i);
        break;
    case QUANT_BF16:
        for (size_t i = 0; i < n; i++) out[i] = quant_bf16_to_f32(load_u16(p + 2 * i));
        break;
    case QUANT_FP8:
        for (size_t i = 0; i < n; i++) out[i] = quant_e4m3_to_f32(p[i]);
        break;
    case QUANT_FP4_PAIRS:
        for (size_t i = 0; i < n; i++) out[i] = quant_e2m1_to_f32(i % 2 ? p[i / 2] >> 4 : p[i / 2]);
        break;
    default: /* QUANT_E8M0 */
        for (size_t i = 0; i < n; i++) out[i] = quant_e8m0_to_f32(p[i]);
        break;
    }
}

static void block_values(const struct format *format, const struct block *b, float *out)
{
    const int8_t *code = b->code;
    for (size_t done = 0, g = 0; done < format->block_values; done += format->group_values, g++)
        for (size_t i = 0; i < format->group_values; i++, code++) {
            float number = format->e2m1 ? quant_e2m1_to_f32((uint8_t)*code) : (float)(*code - format->offset);
            float product = b->scale[g] * number;
            *out++ = format->has_min ? product + b->min[g] : product;
        }
}

static void block_codes(const struct format *format, const struct block *b, int8_t *codes, float *scales, float *mins)
{
    memcpy(codes, b->code, format->block_values);
    for (size_t i = 0; format->e2m1 && i < format->block_values; i++) codes[i] = e2m1_doubled[codes[i]];
    for (size_t g = 0; g < format->block_values / format->group_values; g++) {
        scales[g] = format->e2m1 ? 0.5f * b->scale[g] : b->scale[g];
        mins[g] = format->has_min ? b->min[g] : -(float)format->offset * b->scale[g];
    }
}

void quant_decode(enum quant_format f, const void *row, size_t n, float *out)
{
    const struct format *format = &formats[f];
    const uint8_t *p = row;
    if (!format->unpack) {
        decode_plain(f, p, n, out);
        return;
    }
    struct block b;
    for (size_t done = 0; done < n; done += format->block_values, p += format->block_bytes) {
        format->unpack(p, &b);
        block_values(format, &b, out + done);
    }
}

void quant_decode_codes(enum quant_format f, const void *row, size_t n, int8_t *codes, float *scales, float *mins)
{
    const struct format *format = &formats[f];
    const uint8_t *p = row;
    if (!format->unpack) return;
    struct block b;
    for (size_t done = 0; done < n; done += format->block_values, p += format->block_bytes) {
        format->unpack(p, &b);
        block_codes(format, &b, codes + done, scales + done / format->group_values, mins + done / format->group_values);
    }
}

/* ---- matrices ---- */

uint64_t quant_window_step(enum quant_format f)
{
    const size_t block = formats[f].block_values;
    return block > QUANT_W8_GROUP ? block : QUANT_W8_GROUP; /* both are powers of two */
}

/* The place among the stored ones of row or column `at`, which must be one of them. */
static uint64_t stored_place(const struct quant_span *spans, int n, uint64_t at)
{
    uint64_t before = 0;
    for (int i = 0; i < n; before += spans[i++].count)
        if (at - spans[i].first < spans[i].count) return before + (at - spans[i].first);
    assert(false && "a row or column that is not stored");
    return 0;
}

static bool spans_hold(const struct quant_span *spans, int n, struct quant_span s)
{
    for (int i = 0; i < n; i++)
        if (s.first >= spans[i].first && s.first - spans[i].first <= spans[i].count &&
            s.count <= spans[i].count - (s.first - spans[i].first))
            return true;
    return s.count == 0;
}

bool quant_matrix_holds(const struct quant_matrix *m, struct quant_span rows, struct quant_span cols)
{
    const struct quant_span all_rows = {0, m->rows}, all_cols = {0, m->cols};
    if (!spans_hold(&all_rows, 1, rows) || !spans_hold(&all_cols, 1, cols)) return false;
    const struct quant_window *w = m->window;
    return !w || (spans_hold(w->rows, w->n_rows, rows) && spans_hold(w->cols, w->n_cols, cols));
}

const void *quant_matrix_at(const struct quant_matrix *m, uint64_t row, uint64_t col)
{
    const struct quant_window *w = m->window;
    const struct format *format = &formats[m->format];
    size_t row_bytes = 0;
    quant_row_bytes(m->format, w ? w->stored_cols : m->cols, &row_bytes);
    if (w) row = stored_place(w->rows, w->n_rows, row), col = stored_place(w->cols, w->n_cols, col);
    return (const uint8_t *)m->bytes + (size_t)row * row_bytes + (size_t)col / format->block_values * format->block_bytes;
}

static float group_scale(const struct quant_matrix *m, float stored)
{
    return m->divide ? stored / m->global : stored * m->global;
}

/* Where the scale of a value lies in the grid beside the codes. */
static size_t grid_index(const struct quant_matrix *m, uint64_t row, uint64_t col)
{
    const struct quant_window *w = m->window;
    uint64_t per_row = m->scales.per_row;
    if (w && w->scale_rows) row = stored_place(w->rows, w->n_rows, row);
    if (w && w->scale_cols) {
        col = stored_place(w->cols, w->n_cols, col);
        per_row = (w->stored_cols + m->scales.col_block - 1) / m->scales.col_block;
    }
    return (size_t)(row / m->scales.row_block * per_row + col / m->scales.col_block);
}

/* The whole scale of a value whose scale lies beside the codes. */
static float grid_scale(const struct quant_matrix *m, uint64_t row, uint64_t col)
{
    float stored = 1;
    if (m->scales.bytes) {
        const uint8_t *bytes = m->scales.bytes;
        decode_plain(m->scales.format, bytes + grid_index(m, row, col) * formats[m->scales.format].block_bytes, 1, &stored);
    }
    return group_scale(m, stored);
}

size_t quant_matrix_group(const struct quant_matrix *m)
{
    if (m->format != QUANT_FP8 && m->format != QUANT_FP4_PAIRS) {
        const size_t group = formats[m->format].group_values;
        return group ? group : 1;
    }
    const uint64_t most = m->format == QUANT_FP8 ? 128 : 32;
    uint64_t run = most; /* a scale ends at its multiples only */
    if (m->scales.bytes && (m->format == QUANT_FP4_PAIRS || m->scales.col_block < m->cols)) run = m->scales.col_block;
    for (uint64_t group = most; group >= 16; group /= 2)
        if (run % group == 0) return (size_t)group;
    return 0;
}

/* The block at p, its scales with the factor of the matrix. */
static void unpack_of(const struct quant_matrix *m, const uint8_t *p, struct block *b)
{
    const struct format *format = &formats[m->format];
    format->unpack(p, b);
    if (!format->e2m1) return;
    for (size_t g = 0; g < format->block_values / format->group_values; g++) b->scale[g] = group_scale(m, b->scale[g]);
}

/* Formats without blocks: numbers, then the scales that lie beside them. */
static void decode_numbers(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, float *out)
{
    if (!n) return;
    decode_plain(m->format, quant_matrix_at(m, row, col_first), n, out);
    if (m->format != QUANT_FP8 && m->format != QUANT_FP4_PAIRS) return;
    for (uint64_t col = col_first, end = col_first + n; col < end;) {
        const uint64_t block = m->scales.bytes ? m->scales.col_block : end, next = col / block * block + block;
        const float scale = grid_scale(m, row, col);
        for (; col < end && col < next; col++) *out++ *= scale;
    }
}

void quant_matrix_decode(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, float *out)
{
    const struct format *format = &formats[m->format];
    if (!format->unpack) {
        decode_numbers(m, row, col_first, n, out);
        return;
    }
    if (!n) return;
    const size_t block = format->block_values;
    const uint8_t *stored = quant_matrix_at(m, row, col_first);
    for (size_t at = (size_t)col_first, end = at + n; at < end; stored += format->block_bytes) {
        float values[MAX_BLOCK_VALUES];
        struct block b;
        const size_t inside = at % block, take = end - at < block - inside ? end - at : block - inside;
        unpack_of(m, stored, &b);
        block_values(format, &b, take == block ? out : values);
        if (take < block) memcpy(out, values + inside, take * sizeof *out);
        at += take, out += take;
    }
}

static void codes_of_pairs(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, int8_t *codes,
                           float *scales, float *mins)
{
    if (!n) return;
    const uint8_t *p = quant_matrix_at(m, row, col_first);
    const size_t group = quant_matrix_group(m);
    for (size_t i = 0; i < n; i++) codes[i] = e2m1_doubled[p[i / 2] >> i % 2 * 4 & 15];
    for (size_t i = 0; i < n; i += group) {
        *scales++ = 0.5f * grid_scale(m, row, col_first + i);
        *mins++ = 0;
    }
}

void quant_matrix_codes(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, int8_t *codes,
                        float *scales, float *mins)
{
    if (m->format == QUANT_FP4_PAIRS) {
        codes_of_pairs(m, row, col_first, n, codes, scales, mins);
        return;
    }
    if (!n) return;
    const struct format *format = &formats[m->format];
    const size_t block = format->block_values, group = format->group_values;
    const uint8_t *stored = quant_matrix_at(m, row, col_first);
    for (size_t at = (size_t)col_first, end = at + n; at < end; stored += format->block_bytes) {
        struct block b;
        int8_t block_code[MAX_BLOCK_VALUES];
        float block_scale[MAX_BLOCK_GROUPS], block_min[MAX_BLOCK_GROUPS];
        const size_t inside = at % block, take = end - at < block - inside ? end - at : block - inside;
        unpack_of(m, stored, &b);
        block_codes(format, &b, block_code, block_scale, block_min);
        memcpy(codes, block_code + inside, take);
        memcpy(scales, block_scale + inside / group, take / group * sizeof *scales);
        memcpy(mins, block_min + inside / group, take / group * sizeof *mins);
        at += take, codes += take, scales += take / group, mins += take / group;
    }
}

enum quant_format quant_matrix_e2m1_scales(const struct quant_matrix *m)
{
    if (m->format == QUANT_MXFP4) return QUANT_E8M0;
    if (m->format == QUANT_NVFP4) return QUANT_FP8;
    if (m->format != QUANT_FP4_PAIRS || !m->scales.bytes) return QUANT_FORMATS;
    const size_t group = m->scales.format == QUANT_FP8 ? 16 : m->scales.format == QUANT_E8M0 ? 32 : 0;
    return group == m->scales.col_block ? m->scales.format : QUANT_FORMATS;
}

void quant_matrix_e2m1(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, uint8_t *codes,
                       uint8_t *scales)
{
    if (!n) return;
    const uint8_t *stored = quant_matrix_at(m, row, col_first);
    if (m->format == QUANT_FP4_PAIRS) {
        const uint8_t *p = stored, *grid = m->scales.bytes;
        for (size_t i = 0; i < n; i++) codes[i] = p[i / 2] >> i % 2 * 4 & 15;
        memcpy(scales, grid + grid_index(m, row, col_first), n / (size_t)m->scales.col_block);
        return;
    }
    const struct format *format = &formats[m->format];
    const size_t block = format->block_values, group = format->group_values;
    for (size_t at = (size_t)col_first, end = at + n; at < end; stored += format->block_bytes) {
        struct block b;
        const size_t inside = at % block, take = end - at < block - inside ? end - at : block - inside;
        format->unpack(stored, &b);
        memcpy(codes, b.code + inside, take);
        memcpy(scales, b.scale_byte + inside / group, take / group);
        at += take, codes += take, scales += take / group;
    }
}

void quant_matrix_fp8(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, uint8_t *codes,
                      float *scales)
{
    if (!n) return;
    const size_t group = quant_matrix_group(m);
    memcpy(codes, quant_matrix_at(m, row, col_first), n);
    for (uint64_t col = col_first / group * group; col < col_first + n; col += group) *scales++ = grid_scale(m, row, col);
}

/* The largest magnitude of n values; infinity or NaN where one of them is such. As integers, magnitudes have their order,
 * with infinity and NaN on top. */
static float largest_magnitude(const float *values, size_t n)
{
    union {
        uint32_t u;
        float f;
    } largest = {0};
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        bits &= 0x7fffffff;
        largest.u = bits > largest.u ? bits : largest.u;
    }
    return largest.f;
}

/* Codes of one group of at most QUANT_W8_GROUP values; returns its scale. The quotient is taken in double: it cannot come
 * to lie on a tie that the exact one does not lie on (that one is at least 2^-28 away), so codes follow the definition. A
 * subnormal scale can be so coarse that a quotient passes 127. */
static float w8_group(const float *values, size_t n, int8_t *codes)
{
    const double to_integer = 0x1.8p52; /* added and taken away again: rounds to nearest, ties to even */
    const float largest = largest_magnitude(values, n), scale = largest <= FLT_MAX ? largest / 127 : NAN;
    if (!(scale > 0)) {
        memset(codes, 0, n);
        return scale;
    }
    for (size_t i = 0; i < n; i++) {
        const double code = (double)values[i] / (double)scale + to_integer - to_integer;
        const int integer = (int)code;
        codes[i] = (int8_t)(integer > 127 ? 127 : integer < -127 ? -127 : integer);
    }
    return scale;
}

void quant_matrix_w8(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, int8_t *codes,
                     float *scales)
{
    for (uint64_t at = col_first, end = col_first + n; at < end;) {
        float values[QUANT_W8_GROUP];
        int8_t group_codes[QUANT_W8_GROUP];
        const uint64_t first = at / QUANT_W8_GROUP * QUANT_W8_GROUP, left = m->cols - first;
        const size_t size = left < QUANT_W8_GROUP ? (size_t)left : QUANT_W8_GROUP;
        quant_matrix_decode(m, row, first, size, values);
        *scales++ = w8_group(values, size, group_codes);
        const size_t inside = (size_t)(at - first), take = end - at < size - inside ? (size_t)(end - at) : size - inside;
        memcpy(codes, group_codes + inside, take);
        at += take, codes += take;
    }
}
