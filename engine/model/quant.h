/* quant: the number formats that model files store, and their exact decoding.
 *
 * A row of n values is stored as n / block_values blocks of block_bytes each (GGUF's row rule: no padding, n must be a
 * multiple). Decoding gives the float32 value that the format defines, computed as in ggml: one float32 product d*q,
 * then one float32 addition of the minimum. */
#ifndef TANDEM_QUANT_H
#define TANDEM_QUANT_H

#include "base.h"

enum quant_format {
    QUANT_F32,
    QUANT_F16,
    QUANT_BF16,
    QUANT_Q4_0,
    QUANT_Q4_1,
    QUANT_Q5_0,
    QUANT_Q5_1,
    QUANT_Q8_0,
    QUANT_Q4_K,
    QUANT_Q5_K,
    QUANT_Q6_K,
    QUANT_FORMATS
};

const char *quant_name(enum quant_format f);          /* "Q4_1" */
size_t quant_block_values(enum quant_format f);       /* 1, 32 or 256 */
size_t quant_block_bytes(enum quant_format f);
/* Bytes of a row of n values; false when n is no multiple of the block or the product overflows. */
bool quant_row_bytes(enum quant_format f, uint64_t n, size_t *out);

float quant_f16_to_f32(uint16_t h);                   /* exact, subnormals, infinities and NaN included */
uint16_t quant_f32_to_f16(float f);                   /* round to nearest, ties to even */
static inline float quant_bf16_to_f32(uint16_t h)
{
    union { uint32_t u; float f; } v = {(uint32_t)h << 16};
    return v.f;
}

/* Decodes n values from row (n a multiple of the block) into out[n]. row needs no alignment. */
void quant_decode(enum quant_format f, const void *row, size_t n, float *out);

/* One affine view of every format: a block of values is scale[g] * code + min[g] over groups of `group` codes.
 * Kernels repack from this; it is exact for all of the quantized formats (float32 scale, see quant.c).
 * Formats F32, F16, BF16 have no codes: quant_has_codes is false. */
bool quant_has_codes(enum quant_format f);
int quant_code_bits(enum quant_format f);             /* 4, 5, 6 or 8 (8 = signed codes, as Q8_0; others unsigned) */
size_t quant_group_values(enum quant_format f);       /* 32, for Q6_K 16 */
/* Decodes n values (a multiple of the block) into codes[n] (signed bytes; unsigned formats give 0..63) and, per group,
 * scales[n / group] and mins[n / group], so that value = scale * code + min in real arithmetic. For Q4_0, Q5_0 and Q6_K
 * the offset is folded into min (exact: a small power of two or 32 times the scale, both representable). */
void quant_decode_codes(enum quant_format f, const void *row, size_t n, int8_t *codes, float *scales, float *mins);

#endif
