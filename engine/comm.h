/* comm: what ranks exchange while computing. One object per rank; every rank calls the same operations in the same order
 * with the same shapes. Waits are bounded by the peers' heartbeats; an expired wait or a poisoned group is RC_FATAL and the
 * rank must exit. */
#ifndef TANDEM_COMM_H
#define TANDEM_COMM_H

#include "base.h"
#include "kern.h"
#include "partition.h"

struct comm {
    int rank, ranks;
    void *ctx;
    /* residual[rows][width] += (partial_0 + partial_1 + ...): each rank's partial rounded once to the backend's activation
     * format, then FP32, ranks added in rank order: the same bits on every rank. The partial of this rank is in `partial`
     * (NULL: zeros). At most the rows x width that comm was opened for. Enqueued like a kernel operation. */
    enum rc (*all_reduce_add)(struct comm *c, const void *partial, struct kern_split rows, int width, float *residual_dev,
                              struct err *e);
    /* The same sum and then the RMS norm of the new rows (kern's rms_norm to an act of `width` columns), in one: the same bits as
     * one after the other. False: not for this shape, nothing was enqueued; all ranks get the same answer. NULL: never. */
    bool (*all_reduce_add_norm)(struct comm *c, const void *partial, struct kern_split rows, int width, float *residual_dev,
                                const float *norm_dev, float eps, void *y_act);
    /* out[row][range[r].first ..] = rank r's mine[row][range[r].count], for all ranks r. row_width: floats of a row of out.
     * out: from the backend's host_alloc, filled when the backend's finish has returned, or from its buffer_alloc. */
    enum rc (*all_gather_columns)(struct comm *c, const float *mine_dev, int rows, const struct range *range_of_rank,
                                  int row_width, float *out, struct err *e);
    /* Waits on the host until every rank has come here. */
    enum rc (*barrier)(struct comm *c, struct err *e);
    /* Poisons the group: every peer's next or present wait fails with this reason. */
    void (*abort)(struct comm *c, const char *reason);
    void (*close)(struct comm *c);
};

#endif
