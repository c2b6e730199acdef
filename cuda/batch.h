/* batch: a kern_batch in device memory. Numbers that differ from step to step lie in memory, so that a captured graph can be
 * replayed with others; what shapes a grid (counts) is in the struct itself and part of a graph's key. */
#ifndef TANDEM_BATCH_H
#define TANDEM_BATCH_H

#include <stdint.h>

struct device_segment {
    int32_t row_first, rows, position_first;
    int32_t slot;
    int32_t table_first; /* its block table begins at tables[table_first] */
    int32_t reserved;
};

struct device_row {
    int32_t segment, position;
};

struct device_batch {
    int rows, decode_rows;                 /* decode rows and segments come first */
    int n_segments, n_decode_segments;
    int longest;                           /* positions of the longest sequence. Only op_attn_profile of it may shape a grid */
    const int32_t *tokens;                 /* [rows], device memory as all below; t < 0: the token at left[-1 - t] */
    const struct device_row *row;          /* [rows] */
    const struct device_segment *segments; /* [n_segments] */
    const int32_t *tables;                 /* pages of 64 positions */
    const int32_t *left;                   /* tokens, by earlier kernels: not to be read before pdl_wait */
};

#endif
