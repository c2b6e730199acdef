/* model_forward: the order of a step's operations, the same for every backend and rank count: attention layers, Gated DeltaNet
 * layers and the multi-token-prediction layer.
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
    int slots;        /* sequences that run at once: each has a slot for what is not paged */
    bool mtp;         /* keep final hidden rows and run the MTP layer; the model must have one */
    int max_drafts;   /* most drafted rows of a decode segment, 0..KERN_MAX_DRAFTS */
    bool trace;       /* hash hidden rows and logits of picks */
    const uint32_t *allowed; /* [ceil(vocab / 32)] ids that may be chosen, by bit; NULL: all. Read by open */
    /* Called after the attention sum of every layer; x_dev[rows][hidden] is the residual stream. */
    void (*on_layer)(void *ctx, int layer, float *x_dev, int rows);
    void *on_layer_ctx;
};
enum rc model_forward_open(const struct model_forward_options *o, struct model_forward **out, struct err *e);
void model_forward_close(struct model_forward *f);
/* The largest part of a rank in a gather. */
size_t model_forward_gather_floats(const struct partition *p, int max_picks);

struct forward_batch {
    struct kern_batch batch; /* row_first of segments: relative to the batch. A token may be model_forward_draft_token(i): draft i */
    const int *picks;        /* rows that want logits; of a batch of decode rows alone all of them, in order */
    int n_picks;
    bool logits;             /* picks' logits are wanted on the host, not only the best of them */
    bool unrecorded;         /* makes every operation anew, where the backend would replay a recording */
};

/* RC_FATAL when a peer is lost. Results below are valid until the next call. */
enum rc model_forward_step(struct model_forward *f, const struct forward_batch *b, struct err *e);
/* Hashes of the final residual rows (before the last norm), [rows]. */
const uint64_t *model_forward_row_hashes(const struct model_forward *f);
/* Host memory [vocab], where logits were wanted. May be overwritten by the caller. */
float *model_forward_logits(struct model_forward *f, int pick);
/* The largest allowed logit's id, the lowest of equals; -1: an allowed logit is not finite. The same as of the logits. */
int32_t model_forward_best(const struct model_forward *f, int pick);
/* Hashes of a pick's normed hidden row and of its logits as computed, with the trace option. */
uint64_t model_forward_hidden_hash(const struct model_forward *f, int pick);
uint64_t model_forward_logits_hash(const struct model_forward *f, int pick);

/* ---- slots: recurrent state, convolution history, replay rows, kept hidden rows of one running sequence ---- */

/* For a sequence at position 0. */
void model_forward_clear_slot(struct model_forward *f, int slot);
/* After a decode segment of 1 + drafts rows, of which `accepted` drafts turned out right: brings the recurrent state of every
 * layer to the position after the last right row. Nothing to do for accepted == 0 or attention-only models. */
void model_forward_accept(struct model_forward *f, int slot, int accepted);
/* Everything of a slot, for preemption and snapshots; bit for bit. Between steps, once drafts are decided: replay rows are not
 * saved. */
size_t model_forward_slot_bytes(const struct model_forward *f);
void model_forward_save_slot(struct model_forward *f, int slot, void *host);
void model_forward_load_slot(struct model_forward *f, int slot, const void *host);

/* ---- multi-token prediction (with the mtp option only) ---- */

/* MTP row p pairs the target's final-normed hidden row of position p with the token at p + 1 and predicts the token at p + 2.
 * Its keys and values lie in the sequence's own pages (one more layer), at position p. */

/* Keeps hidden rows [row, row + n) of the last model_forward_step in the slot, after those it already keeps; at most
 * KERN_MAX_DRAFTS + 1 in all. */
void model_forward_keep_hidden(struct model_forward *f, int slot, int row, int n);
int model_forward_kept_hidden(const struct model_forward *f, int slot);

struct mtp_batch {
    struct forward_batch rows; /* tokens[i]: the token at p + 1 of row i. Provenances as in a forward batch; any picks */
    enum mtp_hidden {
        MTP_HIDDEN_STEP,   /* row i uses hidden row source[i] of the last model_forward_step */
        MTP_HIDDEN_KEPT,   /* each segment uses its slot's kept rows, from the first on, which are then dropped */
        MTP_HIDDEN_CHAINED /* row i uses the MTP's own output of pick source[i] of the last model_forward_mtp */
    } hidden;
    const int *source;     /* [rows]; not of MTP_HIDDEN_KEPT */
    int draft_first;       /* the best token of pick i becomes draft draft_first + i, below max_picks * KERN_MAX_DRAFTS */
};
/* Where rows.logits asks for logits, waits until they and the drafts are there; otherwise only enqueues, and errors are found by the
 * next call that waits. */
enum rc model_forward_mtp(struct model_forward *f, const struct mtp_batch *b, struct err *e);
float *model_forward_mtp_logits(struct model_forward *f, int pick); /* as model_forward_logits */
/* Draft i, once a later call has waited: 0 where logits that count were not finite. */
int32_t model_forward_draft(const struct model_forward *f, int i);
/* What stands for draft i in a batch while nobody has waited for it. */
static inline int32_t model_forward_draft_token(int i) { return -1 - i; }

/* ---- pages ---- */

/* KV of one page over all layers (the MTP layer included), for preemption and snapshots. */
size_t model_forward_page_bytes(const struct model_forward *f);
void model_forward_save_page(struct model_forward *f, int32_t page, void *host);
void model_forward_load_page(struct model_forward *f, int32_t page, const void *host);
size_t model_forward_kv_bytes(const struct model_forward *f);    /* all pages */
int model_forward_kv_layers(const struct model_forward *f);      /* that keep keys and values on this rank, the MTP layer included */
size_t model_forward_state_bytes(const struct model_forward *f); /* all slots */

#endif
