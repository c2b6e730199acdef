/* model_forward_impl: what model_forward.c (layers, head, slots) and model_mtp.c share. */
#ifndef TANDEM_MODEL_FORWARD_IMPL_H
#define TANDEM_MODEL_FORWARD_IMPL_H

#include "model_forward.h"
#include "recurrent_state.h"

struct model_forward {
    struct model_forward_options o;
    struct rank_part part;
    struct kern_attn_shape attn; /* of this rank; n_heads 0: none */
    struct kern_gdn_shape gdn;   /* of this rank; k_heads 0: none */
    struct range vocab_of_rank[MAX_RANKS];
    int qkv_width, gdn_width; /* of a row of in_dev, by kind of layer */
    size_t page_bytes;        /* one layer */
    int n_kv;                 /* layers that keep keys and values: attention, and the MTP layer */
    char *kv_dev;             /* [n_kv][kv_layer_bytes]; the MTP layer's is the last; NULL without heads */
    size_t kv_layer_bytes;
    struct recurrent_state slots;
    struct kern_gdn_weights *gdn_layers; /* of the Gated DeltaNet layers in order */

    float *cos_sin_dev;
    float *x_dev, *in_dev;             /* residual, projections; rows */
    void *h_act, *mix_act, *ffn_act;   /* what linear layers read: normed residual, mixed heads, SwiGLU */
    void *swiglu_dev, *partial_dev;
    float *pick_x_dev, *pick_h_dev, *pick_logits_dev;
    void *pick_act;
    uint32_t *allowed_dev; /* [ceil(vocab / 32)] */
    struct kern_best *best_dev; /* [max_picks] of this rank's part of the vocabulary */
    struct range best_of_rank[MAX_RANKS]; /* floats of a row of `best` */
    struct kern_best *best; /* host [max_picks][ranks] */
    float *logits;        /* host [max_picks][vocab] */
    uint64_t *row_hashes; /* host [max_rows] */
    uint64_t *hidden_hashes; /* host [max_picks] */
    uint64_t *logits_hashes; /* [max_picks] */

    /* with mtp */
    float *normed_dev;      /* [max_rows][hidden] final-normed rows of the last step */
    int *fresh_row;         /* [slots] the slot's kept rows are still normed_dev's, from this row on; -1: they are in the slot */
    float *mtp_hidden_dev;  /* [max_rows][hidden] the rows that MTP rows start from, unless they lie in order where they are */
    const float *mtp_from_dev; /* of the batch being computed: those rows */
    int draft_first;        /* of it: where its drafts go */
    float *mtp_embedding_dev; /* [max_rows][hidden] */
    void *mtp_pair_act;     /* [max_rows] of 2 hidden: embedding, hidden */
    float *mtp_out_dev;     /* [max_picks][hidden] the MTP's own output of its last picks */
    float *mtp_logits;      /* host [max_picks][vocab] */
    struct kern_best *mtp_best_dev; /* [max_picks][ranks] gathered, NULL for one rank */
    int32_t *drafts_dev, *drafts; /* [max_picks * KERN_MAX_DRAFTS]; drafts: host */
};

/* One zeroed work buffer of rows, NULL for an empty one. */
enum rc forward_alloc(struct model_forward *f, size_t rows, size_t width, float **out_dev, struct err *e);
/* The same of so many bytes; one of host memory. */
enum rc forward_alloc_bytes(struct model_forward *f, size_t n_bytes, void **out_dev, struct err *e);
enum rc forward_alloc_host(struct model_forward *f, size_t n_bytes, void **out, struct err *e);
/* RC_FATAL when the batch is larger than what was opened for. */
enum rc forward_check(const struct model_forward *f, const struct forward_batch *b, struct err *e);
/* Begins the batch and makes the operations, or has the backend replay them where it recorded them for such a batch. pass:
 * distinguishes batches of one shape on which other operations are made. */
enum rc forward_run(struct model_forward *f, const struct forward_batch *b, uint64_t pass,
                    enum rc (*operations)(struct model_forward *, const struct forward_batch *, struct err *), struct err *e);
/* to[i] = from[source[i]]; runs of neighbours go in one copy. */
void forward_gather(struct model_forward *f, float *to, const float *from, const int *source, int n);
/* Rows picks[n] of x_dev, n > 0: where they lie when they follow one another, else gathered. */
const float *forward_picked(struct model_forward *f, const int *picks, int n);
/* One layer on x_dev, whose norm by the layer's first factors is in h_act already; forward_norm makes that. index: among layers of its
 * kind, for keys and values or recurrent state. next_norm_dev: the first factors of the layer behind, NULL for none. */
enum rc forward_layer(struct model_forward *f, const struct forward_batch *b, int layer, int index, const float *next_norm_dev,
                      struct err *e);
void forward_norm(struct model_forward *f, const struct forward_batch *b, const float *norm_dev);
/* Norms rows [n] to normed_dev and turns them into this rank's part of the logits and the best of it. */
void forward_head(struct model_forward *f, const float *x_dev, const float *norm_dev, int n, float *normed_dev);
/* After it, outside of a recording: everybody's best [n][ranks], to the host or not; everybody's logits [n][vocab] to the host, there
 * once finish has returned. */
enum rc forward_gather_best(struct model_forward *f, int n, struct kern_best *best, struct err *e);
enum rc forward_gather_logits(struct model_forward *f, int n, float *logits, struct err *e);

enum { PASS_STEP = 1, PASS_MTP };

/* Before normed_dev is written again, or the slot is read: puts kept rows into their slot. Before the slot is written: forgets them. */
void model_mtp_settle(struct model_forward *f, int slot);
void model_mtp_forget(struct model_forward *f, int slot);
/* The MTP's buffers; the others are model_forward_open's. */
enum rc model_mtp_open(struct model_forward *f, struct err *e);
void model_mtp_close(struct model_forward *f);

#endif
