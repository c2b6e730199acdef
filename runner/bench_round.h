/* bench_round: benchmarks of one rank in this process: whole rounds, single kernels, sums. cmd_bench measures real groups. */
#ifndef TANDEM_BENCH_ROUND_H
#define TANDEM_BENCH_ROUND_H

#include "lockstep.h"
#include "options.h"

struct kern;
struct comm;

/* One rank of --as-rank R/N, or the whole model. */
struct bench_rank {
    struct options options; /* ranks and what follows from --as-rank are set */
    int rank;
    bool solo;              /* its peers are pretended */
    void *memory;           /* of the segment */
    struct segment *segment;
    struct kern *kern;
    struct comm *comm;
    double read_bytes_per_s; /* of the backend's memory; 0: it cannot tell */
};
enum rc bench_rank_open(const struct options *o, struct bench_rank *out, struct err *e);
void bench_rank_close(struct bench_rank *b); /* of zeroed memory too */

/* Each prints its result to stdout, as text, --csv or --json. */
enum rc bench_round(const struct options *o, const int32_t *prompt, struct err *e); /* prompt: bench_prompt + bench_sequences ids */
enum rc bench_kernel(const struct options *o, struct err *e);
enum rc bench_sum(const struct options *o, struct err *e);

#endif
