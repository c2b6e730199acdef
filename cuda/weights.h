/* weights: from a model file's matrices to blocks in device memory. */
#ifndef TANDEM_WEIGHTS_H
#define TANDEM_WEIGHTS_H

#include "op_linear.h"

enum { WEIGHT_MAX_MATRICES = 4 };

/* A loaded weight: parts of one format, scale kind and neighbouring rows are one matrix. */
struct kern_weight {
    struct device_matrix matrix[WEIGHT_MAX_MATRICES];
    int row_first[WEIGHT_MAX_MATRICES]; /* of the weight's rows */
    int n_matrices;
    int rows, cols;
    enum kern_use use;
    size_t bytes;
};

struct kern_table {
    bool bf16;            /* else float32 */
    int rows, cols;
    const void *rows_dev;
    size_t bytes;
};

/* Pinned staging memory and the stream that weights travel on. */
struct weight_loader;
enum rc weight_loader_open(const struct op_context *c, struct weight_loader **out, struct err *e);
void weight_loader_close(struct weight_loader *l);

/* As kern.h's weight_load and table_load. Out of device memory: RC_BAD_INPUT, EXIT_UNAVAILABLE, with what was asked for and free. */
enum rc weights_load(struct weight_loader *l, const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                     enum kern_use use, struct kern_weight **out, struct err *e);
void weights_free(struct kern_weight *w);
enum rc weights_load_table(struct weight_loader *l, const struct quant_matrix *m, struct kern_table **out, struct err *e);
void weights_free_table(struct kern_table *t);

#endif
