/* engine_group: a whole group of ranks as threads of the test process, over one segment in plain memory. */
#ifndef TANDEM_ENGINE_GROUP_H
#define TANDEM_ENGINE_GROUP_H

#include "engine.h"
#include "group_backend.h"

struct engine_group_result {
    enum engine_event_kind kind;
    enum finish_reason finish;
    int32_t *tokens;
    size_t n_tokens;
    uint64_t *trace; /* [n_tokens][2] */
    char *text;
    struct engine_timing timing;
};

struct engine_group {
    struct engine_options options; /* rank is filled per thread; ranks counts */
    enum group_backend backend;    /* CUDA: ranks is 1 */
    const char *isa;
    int threads;                   /* OpenMP threads of each rank */
    struct lockstep_bounds bounds;
    const char *checkpoints;       /* folder of the ranks' checkpoint stores; NULL: none, and options.checkpoint_us is 0 */
    uint64_t stop_step;            /* rank 0 is told to stop after this step; 0: never */
    uint64_t leave_step;           /* all ranks leave after this step, with whatever is saved by then; 0: never */
    /* out */
    _Atomic bool stopped;          /* rank 0 did, and everything that ran is saved */
    uint64_t saved;                /* points that rank 0 said all ranks have */
    struct engine_stats stats;
    uint64_t replays;              /* rounds that rank 0's backend replayed from a recording */
    struct err err[MAX_RANKS];     /* of each rank, rc RC_OK when it ended well */
};

/* Submits all requests at once, in order, and runs until none is left or it has stopped; results of unfinished ones are zeros. results[n] (freed by engine_group_free) are matched to
 * requests by index. Returns true when every rank ended well. */
bool engine_group_run(struct engine_group *g, const struct engine_request *requests, size_t n,
                      struct engine_group_result *results);
void engine_group_free(struct engine_group_result *results, size_t n);

#endif
