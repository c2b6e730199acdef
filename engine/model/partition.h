/* partition: who owns what, as explicit ranges, never n / ranks.
 *
 * KV heads go with their query heads, GDN's key heads with their value heads; FFN columns are cut at multiples of ffn_step;
 * vocabulary rows, and rows of the MTP layer's joining matrix, at multiples of 16. Each is dealt as evenly as it goes: the first
 * ranks take the larger share, of the FFN the last. */
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
    struct range gdn_k_heads; /* with their value heads; both empty in models without GDN */
    struct range gdn_v_heads;
    struct range ffn;
    struct range vocab;
    struct range mtp_rows; /* of the matrix that joins embedding and hidden row; empty in models without MTP */
};

/* The smallest cut of FFN columns: whole groups of every format, the wide groups of FP8 and 8-bit weights apart, whose scales
 * are those of the whole matrix wherever it is cut. */
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
/* A model that was cut for ranks must have been cut like this: RC_BAD_INPUT, EXIT_UNAVAILABLE. */
enum rc partition_check(const struct partition *p, const struct model_file *m, struct err *e);

#endif
