/* op_rows: what works on rows alone: embedding, RMS norm, hashes. Meaning as in kern.h. */
#ifndef TANDEM_OP_ROWS_H
#define TANDEM_OP_ROWS_H

#include "batch.h"
#include "weights.h"

void op_embed(const struct op_context *c, const struct device_batch *b, const struct kern_table *t, float *y);
/* n <= OP_ROWS_MAX_WIDTH. */
enum { OP_ROWS_MAX_WIDTH = 16384 };
void op_rms_norm(const struct op_context *c, const float *x, const float *w, struct kern_split rows, int n, float eps, float *y,
                 void *y_act);
void op_rms_norm_pair(const struct op_context *c, const float *first, const float *first_w, const float *second, const float *second_w,
                      struct kern_split rows, int n, float eps, void *y_act);
/* Of a row in work; all zeros between calls, but for part. scratch: one for each row. */
enum { OP_BEST_PARTS = 128 };
struct op_best_row {
    struct kern_best part[OP_BEST_PARTS];
    uint32_t parts_done;
};
void op_best(const struct op_context *c, const float *logits, int rows, int n, int first, const uint32_t *allowed,
             struct op_best_row *scratch, struct kern_best *out);
/* tokens: device memory; tokens_host: pinned. */
void op_best_tokens(const struct op_context *c, const struct kern_best *best, int rows, int ranks, int32_t *tokens, int32_t *tokens_host);
void op_hash_rows(const struct op_context *c, const float *x, int rows, int n, uint64_t *out);

#endif
