/* model_bind: tensors by role to one rank's loaded weights. Fails early: every tensor's presence and shape is checked before
 * anything is loaded, and so is that no tensor of the file is left over. */
#ifndef TANDEM_MODEL_BIND_H
#define TANDEM_MODEL_BIND_H

#include "base.h"
#include "kern.h"
#include "model_config.h"
#include "partition.h"

/* One layer on one rank. What the layer has not, or the rank has no share of, is NULL. Vectors are float32 in the backend's
 * memory; norms hold the factor itself (1 + w where the file has w). */
struct model_layer {
    bool gdn;                    /* Gated DeltaNet, not attention */
    float *mix_norm_dev;         /* [hidden], before attention or GDN */
    struct kern_weight *in_proj; /* attention: [(q_heads, twice where gated, + 2 kv_heads) head_dim, hidden];
                                    GDN: [kern_gdn_width, hidden] */
    struct kern_weight *out_proj; /* [hidden, q_heads head_dim], GDN: [hidden, gdn_v_heads gdn_v_dim] */
    float *bias_dev;             /* attention: [rows of in_proj] */
    float *q_norm_dev, *k_norm_dev; /* attention: [head_dim] */
    float *conv_dev, *a_dev, *dt_dev, *gdn_norm_dev; /* GDN: as in struct kern_gdn_weights */
    float *ffn_norm_dev;         /* [hidden] */
    struct kern_weight *gate_up; /* [2 ffn, hidden] */
    struct kern_weight *down;    /* [hidden, ffn] */
};

struct model_weights {
    struct kern *kern;
    struct kern_table *embedding;      /* [vocab, hidden] */
    struct model_layer *layers;        /* [n_layers]; with MTP one more, an attention layer */
    int n_layers;
    float *out_norm_dev;               /* [hidden] */
    struct kern_weight *head;          /* [vocab part, hidden] */
    bool mtp;
    struct kern_weight *mtp_fc;        /* [this rank's mtp_rows, 2 hidden], the embedding's half first; NULL: it has none */
    float *mtp_embedding_norm_dev, *mtp_hidden_norm_dev, *mtp_norm_dev; /* [hidden] */
    size_t bytes;                      /* held by the backend */
};

struct model_bind_options {
    const struct model_file *file;     /* must outlive the weights */
    const struct model_config *config;
    const struct rank_part *part;      /* this rank's ranges */
    enum kern_weights how;             /* of matrices; the embedding, vectors and GDN's b and a stay native */
    bool mtp;                          /* load the MTP layer; the config must have one */
    struct kern *kern;
    void (*beat)(void *ctx);           /* called at least once per layer */
    void *beat_ctx;
};

/* Errors: RC_BAD_INPUT, EXIT_UNAVAILABLE with the tensor's name and shape. */
enum rc model_bind(const struct model_bind_options *o, struct model_weights *out, struct err *e);
void model_bind_free(struct model_weights *w);

#endif
