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
    QUANT_MXFP4,      /* GGUF: 32 E2M1 codes, an E8M0 scale */
    QUANT_NVFP4,      /* GGUF: 64 E2M1 codes, four E4M3 scales; times the matrix's global factor */
    QUANT_FP8,        /* safetensors: E4M3 codes, scales beside them (struct quant_scales) */
    QUANT_FP4_PAIRS,  /* safetensors: E2M1 codes, element 2i in the low nibble; scales beside them (NVFP4, MXFP4) */
    QUANT_E8M0,       /* of scales only */
    QUANT_FORMATS
};

const char *quant_name(enum quant_format f);          /* "Q4_1" */
size_t quant_block_values(enum quant_format f);       /* 1, 2, 32, 64 or 256 */
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

/* Scales that lie beside the codes of a matrix (QUANT_FP8, QUANT_FP4_PAIRS): one for every row_block x col_block values,
 * per_row = ceil(cols / col_block) of them in a row of the grid, row-major. Per tensor: one scale, both blocks the whole
 * matrix. */
struct quant_scales {
    const void *bytes;         /* NULL: the format carries its own scales, or has none (all 1) */
    enum quant_format format;  /* F32, F16, BF16, FP8 (E4M3) or E8M0 */
    uint64_t row_block, col_block;
    uint64_t per_row;
};

/* Which rows and columns of a matrix are there, where only a slice of it is stored (shard folders): the stored rows follow each
 * other, and of each the stored columns. Spans ascend and do not touch; column spans begin and end at multiples of
 * quant_window_step or at the end of the row, so that no block, group or scale is cut. */
struct quant_span {
    uint64_t first, count; /* count > 0 */
};
struct quant_window {
    const struct quant_span *rows, *cols;
    int n_rows, n_cols;             /* 0: nothing is stored */
    uint64_t stored_rows, stored_cols; /* the spans together */
    bool scale_rows, scale_cols;    /* the grid beside the codes is cut as well: row_block is 1, columns in whole col_blocks */
};
uint64_t quant_window_step(enum quant_format f);

/* A stored matrix [rows, cols], row-major, rows of quant_row_bytes(format, cols). What a model file hands out as one tensor,
 * whatever number of stored tensors it took. */
struct quant_matrix {
    enum quant_format format;
    uint64_t rows, cols;
    const void *bytes;
    struct quant_scales scales;
    float global;     /* factor of the whole matrix, 1 where there is none: a group's scale is scale * global in float32, */
    bool divide;      /* or scale / global where the producer divides. MXFP4, NVFP4, FP8 and FP4 only; others ignore it */
    const struct quant_window *window; /* NULL: all of it is stored. rows, cols and the grid's blocks are the whole matrix's */
};

/* True when these rows and columns are stored, the columns with all of the groups of QUANT_W8_GROUP that they have part in. The
 * functions below must not be asked for others. */
bool quant_matrix_holds(const struct quant_matrix *m, struct quant_span rows, struct quant_span cols);
/* Where the block of a row is stored that holds this column. The blocks of the same span of columns follow it. */
const void *quant_matrix_at(const struct quant_matrix *m, uint64_t row, uint64_t col);

/* Columns that share one scale as kernels see it, counted from the matrix's first column. What a format defines, 16 or 32;
 * of FP8 the largest of 128, 64, 32, 16 that no scale ends inside of. 1 for plain formats; 0 where the grid's scales end
 * anywhere, which no kernel takes. */
size_t quant_matrix_group(const struct quant_matrix *m);

/* Decodes n values of a row from column col_first on; both even where two codes share a byte (FP4), else any. The value is
 * code * group scale (+ min) in float32. */
void quant_matrix_decode(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, float *out);
/* The same as integer codes: value = scales[g] * codes[i] + mins[g], one scale for quant_matrix_group(m) columns, of which
 * col_first and n are multiples. E2M1 codes are given doubled, -12 .. 12, their scales halved (exact but for a scale below
 * 2^-125). Not for plain formats and not for FP8. */
void quant_matrix_codes(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, int8_t *codes,
                        float *scales, float *mins);
/* E2M1 formats as stored: the 4-bit codes, one a byte, and a byte for each group's scale, before the factor of the matrix.
 * col_first and n are multiples of the group. */
void quant_matrix_e2m1(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, uint8_t *codes,
                       uint8_t *scales);
/* What those bytes are: QUANT_FP8 (E4M3, groups of 16) or QUANT_E8M0 (groups of 32). QUANT_FORMATS: the matrix is of no E2M1
 * format, or has other scales. */
enum quant_format quant_matrix_e2m1_scales(const struct quant_matrix *m);
/* FP8: the stored bytes, and the float32 scale of each group that has columns in the range: ceil((col_first % group + n) /
 * group) of them. col_first is any column. */
void quant_matrix_fp8(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, uint8_t *codes,
                      float *scales);

/* NaN where the format has one, so that a damaged scale never becomes a silent number. */
float quant_e4m3_to_f32(uint8_t code); /* bias 7, no infinities, 0x7f and 0xff NaN */
float quant_e2m1_to_f32(uint8_t code); /* low 4 bits; code 8, minus zero, is zero */
float quant_e8m0_to_f32(uint8_t code); /* 2^(code - 127), 255 NaN */

/* Weights as 8-bit integers with one float32 scale for QUANT_W8_GROUP columns, made at load from any matrix: scale = largest
 * magnitude of the group / 127, code = value / scale rounded to nearest, ties to even. Groups start at multiples of
 * QUANT_W8_GROUP of the whole matrix; the last one may be shorter. Needs cols of it: scales ceil((col_first % GROUP + n) /
 * GROUP). col_first is any column (even for FP4): the group's scale is always that of the whole group.
 * A group with a value that is no finite number has the scale NaN and codes 0; one whose scale comes out as 0 (all values
 * zero, or below 2^-143) has codes 0. */
enum { QUANT_W8_GROUP = 128 };
void quant_matrix_w8(const struct quant_matrix *m, uint64_t row, uint64_t col_first, size_t n, int8_t *codes,
                     float *scales);

/* Decodes n values from row (n a multiple of the block) into out[n]. row needs no alignment. Scales that lie beside the
 * codes are not known here: FP8 and FP4 give the values of their codes. */
void quant_decode(enum quant_format f, const void *row, size_t n, float *out);

/* One affine view of every format: a block of values is scale[g] * code + min[g] over groups of `group` codes.
 * Kernels repack from this; it is exact for all of the quantized formats (float32 scale, see quant.c).
 * Formats F32, F16, BF16, FP8 have no integer codes: quant_has_codes is false. */
bool quant_has_codes(enum quant_format f);
int quant_code_bits(enum quant_format f);             /* 4, 5, 6 or 8 (8 = signed codes, as Q8_0 and E2M1; others unsigned) */
size_t quant_group_values(enum quant_format f);       /* 32; for Q6_K, NVFP4 and FP4 16 */
/* Decodes n values (a multiple of the block) into codes[n] (signed bytes; unsigned formats give 0..63) and, per group,
 * scales[n / group] and mins[n / group], so that value = scale * code + min in real arithmetic. For Q4_0, Q5_0 and Q6_K
 * the offset is folded into min (exact: a small power of two or 32 times the scale, both representable). Not for FP4. */
void quant_decode_codes(enum quant_format f, const void *row, size_t n, int8_t *codes, float *scales, float *mins);

#endif
