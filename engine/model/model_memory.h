/* model_memory: how much one rank of a model needs, from headers alone.
 *
 * What `tandem model` prints and what a backend plans its memory from: weights as loaded, keys and values a token, recurrent
 * state a running sequence, work buffers of a step. */
#ifndef TANDEM_MODEL_MEMORY_H
#define TANDEM_MODEL_MEMORY_H

#include "kern.h"
#include "model_config.h"
#include "model_file.h"
#include "model_names.h"
#include "partition.h"

struct rank_memory {
    uint64_t weight_bytes;   /* matrices and vectors of this rank; the embedding table stays in the file's map */
    uint64_t kv_token_bytes; /* keys and values of one token, all layers */
    uint64_t state_bytes;    /* of one running sequence: GDN matrices and convolution history */
    uint64_t work_bytes;     /* buffers of a step */
};

struct model_memory_options {
    enum kern_weights weights;
    enum kv_format kv;
    bool mtp;          /* the MTP layer is used */
    int rows;          /* of a step: prompt rows + decode rows */
    int picks;         /* rows that get logits */
};

struct rank_memory model_memory_of_rank(const struct model_file *m, const struct model_config *c, const struct rank_part *part,
                                        const struct model_memory_options *o);

/* Tokens of each of `active` sequences that fit into n_bytes beside everything else, whole pages; 0: not one page. */
int64_t model_memory_context(const struct rank_memory *r, int active, uint64_t n_bytes);

#endif
