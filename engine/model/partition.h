/* partition: who owns what, as explicit ranges, never n / ranks.
 *
 * KV heads go with their query heads; FFN columns are cut at multiples of ffn_step; vocabulary rows at multiples of 16.
 * Each is dealt as evenly as it goes: of heads and vocabulary the first ranks take the larger share, of the FFN the last. */
#ifndef TANDEM_PARTITION_H
#define TANDEM_PARTITION_H

#include "base.h"
#include "model_config.h"

struct range {
    int first;
    int count; /* may be 0 */
};

struct rank_part {
    struct range q_heads;
    struct range kv_heads;
    struct range ffn;
    struct range vocab;
};

/* The smallest cut of FFN columns: one group of every quantized format. */
enum { PARTITION_FFN_STEP = 32 };

struct partition {
    int ranks;
    struct rank_part part[MAX_RANKS];
};

/* ffn_step: the smallest cut of the FFN (32 or a K-quant block's width). Errors (EXIT_CONFIG): ranks out of 1..MAX_RANKS,
 * fewer ffn steps or vocabulary blocks than ranks. */
enum rc partition_make(const struct model_config *c, int ranks, int ffn_step, struct partition *out, struct err *e);
/* Hash over ranks and all ranges, for the hello and the identity. */
uint64_t partition_digest(const struct partition *p);

#endif
