/* comm: what ranks exchange while computing. One object per rank; every rank calls the same operations in the same order
 * with the same shapes. Waits are bounded by the peers' heartbeats; an expired wait or a poisoned group is RC_FATAL and the
 * rank must exit. */
#ifndef TANDEM_COMM_H
#define TANDEM_COMM_H

#include "base.h"
#include "partition.h"

struct comm {
    int rank, ranks;
    void *ctx;
    /* residual[i] = residual[i] + (partial_0[i] + partial_1[i] + ...), FP32, ranks added in rank order: the same bits on
     * every rank. The partial of this rank is in `partial` (NULL: zeros). n floats, at most what comm was opened for. */
    enum rc (*all_reduce_add)(struct comm *c, const float *partial, float *residual, size_t n, struct err *e);
    /* out[row][range[r].first ..] = rank r's mine[row][range[r].count], for all ranks r. row_width: floats of a row of out. */
    enum rc (*all_gather_columns)(struct comm *c, const float *mine, int rows, const struct range *range_of_rank,
                                  int row_width, float *out, struct err *e);
    enum rc (*barrier)(struct comm *c, struct err *e);
    /* Poisons the group: every peer's next or present wait fails with this reason. */
    void (*abort)(struct comm *c, const char *reason);
    void (*close)(struct comm *c);
};

#endif
