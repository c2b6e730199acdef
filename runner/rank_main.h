/* rank_main: a rank process, and the only place that picks a backend. */
#ifndef TANDEM_RANK_MAIN_H
#define TANDEM_RANK_MAIN_H

#include "base.h"
#include "options.h"

/* `tandem rank …` (hidden): argv as written by supervise. Returns the exit status. */
int rank_main(int argc, char **argv);

/* What the chosen backend calls its numerics ("cpu-avx512"); NULL: this machine or build lacks it. */
const char *rank_backend_numerics(const struct options *o);

/* Everything that decides the bits of an answer, as lines "name=value\n": version, model (SHA-256), tokenizer, template,
 * backend numerics, kernel build, ranks, partition, weights, kv. Computed without starting a rank; the ranks' hello repeats
 * it. EXIT_CONFIG or EXIT_UNAVAILABLE. */
enum rc rank_identity(const struct options *o, int rank, struct buf *out, struct err *e);

#endif
