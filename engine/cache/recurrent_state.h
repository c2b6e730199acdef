/* recurrent_state: what sequences remember outside KV pages, slot by slot.
 *
 * Of every Gated DeltaNet layer: the state matrices with the convolution's history, and the raw inputs of drafted rows that
 * wait for a decision (replay rows). Of the whole model, where multi-token prediction runs: a few final hidden rows. A slot
 * belongs to one running sequence; which one, the engine knows. The bytes are the backend's memory. */
#ifndef TANDEM_RECURRENT_STATE_H
#define TANDEM_RECURRENT_STATE_H

#include "base.h"
#include "kern.h"

enum { RECURRENT_MAX_KEPT = KERN_MAX_DRAFTS + 1 };

struct recurrent_options {
    struct kern *kern;
    struct kern_gdn_shape shape; /* of this rank; k_heads 0: this rank has no share of any layer */
    int n_layers;                /* Gated DeltaNet layers */
    int slots;
    int hidden;                  /* width of kept hidden rows, 0: none are kept */
    bool replay;                 /* decode segments may hold drafts */
};

struct recurrent_state {
    struct recurrent_options o;
    size_t state_bytes, replay_bytes; /* of one layer of one slot */
    char *states_dev;  /* [slots][n_layers][state_bytes] */
    char *replays_dev; /* [slots][n_layers][replay_bytes] */
    char *zeros_dev;   /* [state_bytes], what a cleared state is copied from */
    float *hidden_dev; /* [slots][RECURRENT_MAX_KEPT][hidden] */
    int *n_kept;       /* [slots] */
};

/* All slots are clear. On failure *out is closed. */
enum rc recurrent_state_open(const struct recurrent_options *o, struct recurrent_state *out, struct err *e);
void recurrent_state_close(struct recurrent_state *r); /* of zeroed memory too */

/* As at position 0. */
void recurrent_state_clear(struct recurrent_state *r, int slot);
/* layer counts Gated DeltaNet layers only. */
void *recurrent_state_of(const struct recurrent_state *r, int slot, int layer);
/* A layer of all slots, as kernels want it. */
struct kern_gdn_memory recurrent_memory(const struct recurrent_state *r, int layer);

/* The slot's kept hidden rows, [RECURRENT_MAX_KEPT][hidden]; n_kept of them count. */
float *recurrent_hidden_of(const struct recurrent_state *r, int slot);

/* Between steps, once drafts are decided: replay rows are not part of it. Equal slots give equal bytes. */
size_t recurrent_slot_bytes(const struct recurrent_state *r);
void recurrent_state_save(const struct recurrent_state *r, int slot, void *host);
void recurrent_state_load(struct recurrent_state *r, int slot, const void *host);

size_t recurrent_state_bytes(const struct recurrent_state *r); /* held by the backend for all slots */

#endif
