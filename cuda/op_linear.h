/* op_linear: weights in device memory, and their products with activations.
 *
 * A matrix is cut into blocks of 16 rows x 64 columns, in the order in which a warp's matrix instructions want them; the blocks
 * of 16 rows (a tile) follow each other along the columns. Decode and prefill read the same blocks (blocks.cuh).
 * Rows are padded to whole tiles of 128 with zero codes, columns to whole blocks.
 *
 * Trees. Decode: 16 fixed contiguous segments of the blocks (of a half of them, where halves is 2; 8 of fewer than 32 blocks), each
 * two chains (even and odd matrix instructions), added; then the segments in order; a half is a plane of its own. Prefill: one chain over all columns. */
#ifndef TANDEM_OP_LINEAR_H
#define TANDEM_OP_LINEAR_H

#include "device.cuh"

enum block_format {
    BLOCK_NVFP4, /* 576 bytes: E2M1 codes, a scale for 16 columns */
    BLOCK_FP8,   /* 1024 bytes: E4M3 codes; scales of a row, or of groups of 16, 32, 64 or 128 columns of a row */
    BLOCK_BF16,  /* 2048 bytes a plane; the value is the sum of the planes (1: BF16, 2: F16, 3: F32, exactly) */
    BLOCK_INT8,  /* 1024 bytes: codes; value = scale * code + min by groups of 16, 32, 64 or 128 columns, mins with 16 and 32 only */
    BLOCK_FORMATS
};

/* All pointers: device memory. */
struct device_matrix {
    enum block_format format;
    int rows, cols;        /* as the model has them */
    int tiles, blocks;     /* ceil(rows / 128) * 8, ceil(cols / 64) */
    int planes;            /* BF16 */
    int group;             /* columns of a group scale; 0: none */
    bool mins;             /* INT8: group_min_dev is there */
    int halves;            /* of the columns in decode: 1, or 2 for partials */
    bool swiglu;           /* row 16 t + i is row 8 t + i of gate for i < 8, row 8 t + i - 8 of up else; rows: 2 f */
    const uint8_t *blocks_dev;
    const float *row_scale_dev; /* [tiles * 16] factor of the accumulated sum, 2^-60 of act and the format's own powers included */
    const float *group_scale_dev, *group_min_dev; /* [tiles][groups][16] */
    size_t bytes;
};

/* act: the decode rows. y[row * pitch + r] for r < rows; of a matrix with two halves, the second at y2. pitch in floats. */
void op_linear_decode(const struct op_context *c, const struct device_matrix *m, const void *act, int rows, float *y, float *y2,
                      size_t pitch);
/* Two matrices of one act, the second a small one, as op_linear_decode writes them, bit for bit, but in one launch. False, and
 * nothing was enqueued: not on this card, not of these, or not of so many rows. */
bool op_linear_decode_beside(const struct op_context *c, const struct device_matrix *m, const struct device_matrix *beside,
                             const void *act, int rows, float *y, float *y_beside, size_t pitch);
/* The whole step's acts of m->rows / 2 columns: writes decode rows 0 .. split.decode of y_act. */
void op_linear_decode_swiglu(const struct op_context *c, const struct device_matrix *m, const void *act, struct kern_split split,
                             void *y_act);

/* act: a step's act; reads its prefill rows and writes them: row i of y is prefill row i. */
void op_linear_prefill(const struct op_context *c, const struct device_matrix *m, const void *act, struct kern_split split,
                       float *y, size_t pitch);
void op_linear_prefill_swiglu(const struct op_context *c, const struct device_matrix *m, const void *act, struct kern_split split,
                              void *y_act);
/* Prefill by wgmma (sm_90) and by mma.sync give the same bits; false when on this card they do not, for a matrix of random codes of
 * each format that both take. */
bool op_linear_prefill_agrees(const struct op_context *c, struct err *e);
/* By mma.sync whatever the card; op_linear_prefill chooses. */
void op_linear_prefill_mma(const struct op_context *c, const struct device_matrix *m, const void *act, struct kern_split split,
                           float *y, size_t pitch);

#endif
