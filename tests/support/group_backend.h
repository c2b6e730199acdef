/* group_backend: what the ranks of a test's group compute on. CUDA: one rank only, since its sums need ranks in processes of
 * their own, and only in builds that have it. */
#ifndef TANDEM_GROUP_BACKEND_H
#define TANDEM_GROUP_BACKEND_H

#include "engine.h"

enum group_backend {
    GROUP_CPU,
    GROUP_CUDA,      /* rounds are recorded and replayed */
    GROUP_CUDA_PLAIN /* every kernel is launched anew */
};
/* "cpu", "cuda", "cuda-plain". */
bool group_backend_parse(const char *name, enum group_backend *out);
/* False: this build or this machine cannot, for which there is a line "SKIPPED: …". */
bool group_backend_there(enum group_backend b);

struct group_backend_options {
    enum group_backend backend;
    const char *isa; /* CPU only; NULL: the best there is */
    int threads;     /* CPU only */
    int rank, ranks;
    struct segment *segment;
    struct engine_comm_shape shape;
};
/* Both are for this thread; comm is closed first. After an error what is not NULL has to be closed, too. */
enum rc group_backend_open(const struct group_backend_options *o, struct kern **kern, struct comm **comm, struct err *e);
/* Rounds that backends opened by this thread have replayed, ever. */
uint64_t group_backend_replays(void);

#endif
