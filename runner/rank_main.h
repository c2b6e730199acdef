/* rank_main: a rank process. */
#ifndef TANDEM_RANK_MAIN_H
#define TANDEM_RANK_MAIN_H

#include "base.h"
#include "options.h"

/* `tandem rank …` (hidden): argv as written by supervise. Returns the exit status. */
int rank_main(int argc, char **argv);

/* Everything that decides the bits of an answer, as lines "name=value\n": version, model (SHA-256), tokenizer, template,
 * backend numerics, kernel build, ranks, partition, weights, kv. Computed without starting a rank; the ranks' hello repeats
 * it. EXIT_CONFIG or EXIT_UNAVAILABLE. */
enum rc rank_identity(const struct options *o, int rank, struct buf *out, struct err *e);

#endif
