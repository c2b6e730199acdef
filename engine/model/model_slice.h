/* model_slice: which rows and columns of each tensor one rank needs, in the engine's order.
 *
 * What a rank loads (model_bind) and what is stored for it (model_shard_write) follow from the same spans. */
#ifndef TANDEM_MODEL_SLICE_H
#define TANDEM_MODEL_SLICE_H

#include "kern.h"
#include "model_config.h"
#include "model_names.h"
#include "partition.h"

/* A share of a stored tensor: these rows of it, and of each these columns. Spans that touch are one. */
struct model_slice {
    const struct kern_span *rows;
    int n_rows; /* may be 0 */
    const struct kern_span *cols;
    int n_cols;
};

struct model_slices {
    struct model_slice of[MODEL_ROLES]; /* the same in every layer; the embedding, and whatever no rank shares, is whole */
    struct kern_span *memory;
};

/* A tied head is the embedding's tensor with the slice of ROLE_HEAD. Errors: no memory. */
enum rc model_slices_make(const struct model_config *c, const struct rank_part *part, struct model_slices *out, struct err *e);
void model_slices_free(struct model_slices *s); /* a zero one is fine */

/* True for the roles that are matrices of which a rank needs its slice and nothing else. */
bool model_role_is_sliced(enum model_role role);
/* Rows or columns of spans together. */
uint64_t model_spans_total(const struct kern_span *spans, int n);

#endif
