/* quant: the eleven stored number formats and their exact decoding.
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
 * Integers are stored little-endian; so is the host, checked below. */
#include "quant.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are read in place, little-endian");

enum { MAX_BLOCK_VALUES = 256, MAX_BLOCK_GROUPS = 16 };

/* One block, unpacked. min is set by formats with a minimum only. */
struct block {
    int8_t code[MAX_BLOCK_VALUES];
    float scale[MAX_BLOCK_GROUPS];
    float min[MAX_BLOCK_GROUPS];
};

struct format {
    const char *name;
    size_t block_values;
    size_t block_bytes;
    size_t group_values; /* 0: plain numbers, no codes */
    int code_bits;
    int offset; /* subtracted from a code; formats without a minimum */
    bool has_min;
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

static const struct format formats[QUANT_FORMATS] = {
    [QUANT_F32] = {"F32", 1, 4, 0, 0, 0, false, NULL},
    [QUANT_F16] = {"F16", 1, 2, 0, 0, 0, false, NULL},
    [QUANT_BF16] = {"BF16", 1, 2, 0, 0, 0, false, NULL},
    [QUANT_Q4_0] = {"Q4_0", 32, 18, 32, 4, 8, false, unpack_q4_0},
    [QUANT_Q4_1] = {"Q4_1", 32, 20, 32, 4, 0, true, unpack_q4_1},
    [QUANT_Q5_0] = {"Q5_0", 32, 22, 32, 5, 16, false, unpack_q5_0},
    [QUANT_Q5_1] = {"Q5_1", 32, 24, 32, 5, 0, true, unpack_q5_1},
    [QUANT_Q8_0] = {"Q8_0", 32, 34, 32, 8, 0, false, unpack_q8_0},
    [QUANT_Q4_K] = {"Q4_K", 256, 144, 32, 4, 0, true, unpack_q4_k},
    [QUANT_Q5_K] = {"Q5_K", 256, 176, 32, 5, 0, true, unpack_q5_k},
    [QUANT_Q6_K] = {"Q6_K", 256, 210, 16, 6, 32, false, unpack_q6_k},
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

static void decode_plain(enum quant_format f, const uint8_t *p, size_t n, float *out)
{
    if (f == QUANT_F32) {
        memcpy(out, p, n * sizeof *out);
    } else if (f == QUANT_F16) {
        for (size_t i = 0; i < n; i++) out[i] = load_f16(p + 2 * i);
    } else {
        for (size_t i = 0; i < n; i++) out[i] = quant_bf16_to_f32(load_u16(p + 2 * i));
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
    size_t groups = format->block_values / format->group_values;
    for (size_t done = 0; done < n; done += format->block_values, p += format->block_bytes) {
        format->unpack(p, &b);
        const int8_t *code = b.code;
        for (size_t g = 0; g < groups; g++)
            for (size_t i = 0; i < format->group_values; i++) {
                float product = b.scale[g] * (float)(*code++ - format->offset);
                *out++ = format->has_min ? product + b.min[g] : product;
            }
    }
}

void quant_decode_codes(enum quant_format f, const void *row, size_t n, int8_t *codes, float *scales, float *mins)
{
    const struct format *format = &formats[f];
    const uint8_t *p = row;
    if (!format->unpack) return;
    struct block b;
    size_t groups = format->block_values / format->group_values;
    for (size_t done = 0; done < n; done += format->block_values, p += format->block_bytes) {
        format->unpack(p, &b);
        memcpy(codes + done, b.code, format->block_values);
        for (size_t g = 0; g < groups; g++) {
            *scales++ = b.scale[g];
            *mins++ = format->has_min ? b.min[g] : -(float)format->offset * b.scale[g];
        }
    }
}
