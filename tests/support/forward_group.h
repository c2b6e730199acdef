/* forward_group: model_forward on a whole group of ranks as threads of the test process, without an engine above it: the test
 * decides what is computed, row by row. */
#ifndef TANDEM_FORWARD_GROUP_H
#define TANDEM_FORWARD_GROUP_H

#include "group_backend.h"
#include "kern.h"
#include "model_forward.h"

/* What the body of one rank sees. */
struct forward_rank {
    int rank;
    const struct model_config *config;
    const struct model_weights *weights;
    struct model_forward *forward;
    struct kern *kern;
    void *ctx; /* the group's */
};

struct forward_group {
    const char *model_path;
    int ranks;
    enum group_backend backend; /* CUDA: ranks is 1 */
    const char *isa; /* NULL: the best there is */
    int threads;     /* of each rank; 0: one */
    enum kern_weights weights;
    enum kv_format kv;
    int context, max_rows, kv_pages, slots; /* every row may be picked */
    bool mtp;
    int max_drafts;
    /* Called on every rank's thread; all must make the same calls of model_forward. */
    enum rc (*body)(struct forward_rank *r, struct err *e);
    void *ctx;
    /* out */
    struct err err[MAX_RANKS];
    uint64_t replays; /* rounds that rank 0's backend replayed from a recording */
};

/* True when every rank ended well. */
bool forward_group_run(struct forward_group *g);

#endif
