/* model_bind: tensor names to one rank's loaded weights. Fails early: every tensor's presence and shape is checked before
 * anything is loaded. */
#ifndef TANDEM_MODEL_BIND_H
#define TANDEM_MODEL_BIND_H

#include "base.h"
#include "kern.h"
#include "model_config.h"
#include "partition.h"

/* One layer on one rank. Weights that the rank has no share of are NULL (no heads: qkv and o). */
struct model_layer {
    float *attn_norm_dev;            /* [hidden] */
    struct kern_weight *qkv;         /* [(q_heads + 2 kv_heads) head_dim, hidden] */
    struct kern_weight *o;           /* [hidden, q_heads head_dim] */
    float *ffn_norm_dev;             /* [hidden] */
    struct kern_weight *gate_up;     /* [2 ffn, hidden] */
    struct kern_weight *down;        /* [hidden, ffn] */
};

struct model_weights {
    struct kern *kern;
    struct kern_weight_part embedding; /* [vocab, hidden], rows stay in the model file's map */
    struct model_layer *layers;        /* [n_layers] */
    int n_layers;
    float *out_norm_dev;               /* [hidden] */
    struct kern_weight *head;          /* [vocab part, hidden] */
    size_t bytes;                      /* held by the backend */
};

/* part: this rank's ranges. beat(beat_ctx) is called at least once per layer. The model file must outlive the weights. Errors:
 * RC_BAD_INPUT, EXIT_UNAVAILABLE with the tensor's name and shape. */
enum rc model_bind(const struct model_file *m, const struct model_config *c, const struct rank_part *part,
                   struct kern *kern, void (*beat)(void *), void *beat_ctx, struct model_weights *out, struct err *e);
void model_bind_free(struct model_weights *w);

#endif
