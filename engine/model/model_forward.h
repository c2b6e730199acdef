/* model_forward: the order of a step's operations, the same for every backend and rank count.
 *
 * Takes a ragged batch (segments of consecutive positions), leaves the final residual rows and, for the rows that ask for
 * it, the normed hidden row and the full vocabulary's logits on every rank. Calls kern and comm only. */
#ifndef TANDEM_MODEL_FORWARD_H
#define TANDEM_MODEL_FORWARD_H

#include "base.h"
#include "comm.h"
#include "kern.h"
#include "model_bind.h"

struct model_forward; /* work buffers and tables of one rank */

struct model_forward_options {
    const struct model_config *config;
    const struct partition *partition;
    const struct model_weights *weights;
    struct kern *kern;
    struct comm *comm;
    int context;      /* positions of the rotary table */
    int max_rows;     /* rows of a step */
    int max_picks;    /* rows of a step that want logits */
    int kv_pages;
    enum kv_format kv;
    bool trace;       /* hash hidden rows and logits of picks */
    /* Called after the attention sum of every layer; x_dev[rows][hidden] is the residual stream. */
    void (*on_layer)(void *ctx, int layer, float *x_dev, int rows);
    void *on_layer_ctx;
};
enum rc model_forward_open(const struct model_forward_options *o, struct model_forward **out, struct err *e);
void model_forward_close(struct model_forward *f);

struct forward_batch {
    const int32_t *tokens;              /* [rows] */
    int rows, decode_rows;              /* decode rows come first */
    const struct kern_segment *segments; /* decode segments first; row_first relative to the batch */
    int n_segments, n_decode_segments;
    const int *picks;                   /* rows that want logits */
    int n_picks;
};

/* RC_FATAL when a peer is lost. Results below are valid until the next call. */
enum rc model_forward_step(struct model_forward *f, const struct forward_batch *b, struct err *e);
/* Hashes of the final residual rows (before the last norm), [rows]. */
const uint64_t *model_forward_row_hashes(const struct model_forward *f);
/* Host memory. Logits may be overwritten by the caller. [vocab] */
float *model_forward_logits(struct model_forward *f, int pick);
/* Hashes of a pick's normed hidden row and of its logits as computed, with the trace option. */
uint64_t model_forward_hidden_hash(const struct model_forward *f, int pick);
uint64_t model_forward_logits_hash(const struct model_forward *f, int pick);

/* KV of one page over all layers, for preemption. */
size_t model_forward_page_bytes(const struct model_forward *f);
void model_forward_save_page(struct model_forward *f, int32_t page, void *host);
void model_forward_load_page(struct model_forward *f, int32_t page, const void *host);
size_t model_forward_kv_bytes(const struct model_forward *f);

#endif
