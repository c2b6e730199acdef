/* bench_text: fixed prompts of any length for benchmarks: numbered blocks of code or of Chinese text. */
#ifndef TANDEM_BENCH_TEXT_H
#define TANDEM_BENCH_TEXT_H

#include "tokenizer.h"

/* Fills out[n] with the tokens of as many blocks as that takes, the last one cut. The first block's number follows from n, so that
 * prompts of different lengths share no beginning. */
enum rc bench_text(struct tokenizer *t, bool chinese, int32_t *out, size_t n, struct err *e);

#endif
