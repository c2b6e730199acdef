/* rank_backend: where the model is computed, and why. The only place that knows which backends there are. */
#ifndef TANDEM_RANK_BACKEND_H
#define TANDEM_RANK_BACKEND_H

#include "lockstep.h"
#include "options.h"

struct kern;
struct comm;

struct rank_backend {
    bool cuda;              /* else the CPU */
    char why[192];          /* one sentence's end: "2 GPUs for 2 ranks" */
    const char *numerics;   /* part of the identity */
    int gpu_of_rank[MAX_RANKS]; /* of this group */
};
/* What --backend, --gpus and --isa mean on this machine. "auto" takes GPUs where there is one for every rank of every group, or
 * where --gpus names them. Errors: RC_BAD_INPUT, EXIT_CONFIG or EXIT_UNAVAILABLE. */
enum rc rank_backend_choose(const struct options *o, int group, struct rank_backend *out, struct err *e);

/* Opens it for one rank. Collective among the ranks of a group. comm is closed before kern. */
enum rc rank_backend_open(const struct options *o, int group, int rank, struct segment *segment, struct kern **kern,
                          struct comm **comm, struct err *e);

/* Rank `rank` of `ranks` in this process, for benchmarks: sums pretend that the others sent what it did. The segment is of one rank.
 * EXIT_CONFIG where the backend cannot pretend. */
enum rc rank_backend_open_alone(const struct options *o, int rank, int ranks, struct segment *segment, struct kern **kern,
                                struct comm **comm, struct err *e);

/* Prompt rows of a step: what --prefill-rows says, else what fills the backend. */
int rank_backend_prefill_rows(const struct options *o);

/* Ranks where --ranks says nothing: one for each of --gpus; else one for each GPU of a group, at most two; without GPUs two. */
int rank_backend_ranks(const struct options *o);

#endif
