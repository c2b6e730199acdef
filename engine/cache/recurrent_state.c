/* recurrent_state: three tables in backend memory, indexed by slot and layer.
 *
 * A slot's states lie together, so that saving one is one transfer. Clearing copies from a buffer of zeros: the kernel
 * interface has no fill, and a state is cleared once a sequence. The saved form starts with one word, the number of kept
 * hidden rows; rows that do not count are saved as zeros, so that a checksum over it depends on what was computed alone. */
#include "recurrent_state.h"

#include <stdlib.h>
#include <string.h>

enum { SAVED_HEAD_BYTES = 64 }; /* the count, padded so that what follows stays aligned */

static size_t slot_states_bytes(const struct recurrent_state *r) { return (size_t)r->o.n_layers * r->state_bytes; }

static size_t kept_rows_bytes(const struct recurrent_state *r)
{
    return (size_t)RECURRENT_MAX_KEPT * (size_t)r->o.hidden * sizeof(float);
}

/* [slots][each] bytes, none where that is nothing. */
static enum rc alloc_slots(const struct recurrent_state *r, size_t each, void **out_dev, struct err *e)
{
    size_t n;
    *out_dev = NULL;
    if (!size_mul((size_t)r->o.slots, each, &n))
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "state_too_large", "recurrent state of %d sequences is too large", r->o.slots);
    return n ? r->o.kern->buffer_alloc(r->o.kern, n, out_dev, e) : RC_OK;
}

enum rc recurrent_state_open(const struct recurrent_options *o, struct recurrent_state *out, struct err *e)
{
    *out = (struct recurrent_state){.o = *o};
    bool any = o->n_layers && o->shape.k_heads;
    if (!any) out->o.n_layers = 0;
    if (any) out->state_bytes = o->kern->gdn_state_bytes(&o->shape);
    if (any && o->replay) out->replay_bytes = o->kern->gdn_replay_bytes(&o->shape);
    void *states = NULL, *replays = NULL, *zeros = NULL, *hidden = NULL;
    enum rc rc = alloc_slots(out, slot_states_bytes(out), &states, e);
    if (rc == RC_OK) rc = alloc_slots(out, (size_t)out->o.n_layers * out->replay_bytes, &replays, e);
    if (rc == RC_OK) rc = alloc_slots(out, kept_rows_bytes(out), &hidden, e);
    if (rc == RC_OK && any) rc = o->kern->buffer_alloc(o->kern, out->state_bytes, &zeros, e);
    out->states_dev = states;
    out->replays_dev = replays;
    out->zeros_dev = zeros;
    out->hidden_dev = hidden;
    out->n_kept = calloc((size_t)o->slots + 1, sizeof *out->n_kept);
    if (rc == RC_OK && !out->n_kept) rc = err_no_memory(e);
    if (rc != RC_OK) recurrent_state_close(out);
    return rc;
}

void recurrent_state_close(struct recurrent_state *r)
{
    struct kern *k = r->o.kern;
    if (!k) return;
    k->buffer_free(k, r->states_dev);
    k->buffer_free(k, r->replays_dev);
    k->buffer_free(k, r->zeros_dev);
    k->buffer_free(k, r->hidden_dev);
    free(r->n_kept);
    *r = (struct recurrent_state){0};
}

void *recurrent_state_of(const struct recurrent_state *r, int slot, int layer)
{
    return r->states_dev + (size_t)slot * slot_states_bytes(r) + (size_t)layer * r->state_bytes;
}

struct kern_gdn_memory recurrent_memory(const struct recurrent_state *r, int layer)
{
    return (struct kern_gdn_memory){
        .state_dev = recurrent_state_of(r, 0, layer),
        .replay_dev = r->replays_dev ? r->replays_dev + (size_t)layer * r->replay_bytes : NULL,
        .state_stride = slot_states_bytes(r),
        .replay_stride = (size_t)r->o.n_layers * r->replay_bytes,
    };
}

float *recurrent_hidden_of(const struct recurrent_state *r, int slot)
{
    return r->hidden_dev + (size_t)slot * RECURRENT_MAX_KEPT * (size_t)r->o.hidden;
}

void recurrent_state_clear(struct recurrent_state *r, int slot)
{
    for (int l = 0; l < r->o.n_layers; l++)
        r->o.kern->copy(r->o.kern, recurrent_state_of(r, slot, l), r->zeros_dev, r->state_bytes);
    r->n_kept[slot] = 0;
}

size_t recurrent_slot_bytes(const struct recurrent_state *r)
{
    return slot_states_bytes(r) + (r->o.hidden ? SAVED_HEAD_BYTES + kept_rows_bytes(r) : 0);
}

void recurrent_state_save(const struct recurrent_state *r, int slot, void *host)
{
    struct kern *k = r->o.kern;
    char *to = host;
    if (r->o.hidden) {
        uint64_t count = (uint64_t)r->n_kept[slot];
        size_t kept = (size_t)count * (size_t)r->o.hidden * sizeof(float);
        memset(to, 0, SAVED_HEAD_BYTES + kept_rows_bytes(r));
        memcpy(to, &count, sizeof count);
        k->to_host(k, to + SAVED_HEAD_BYTES, recurrent_hidden_of(r, slot), kept);
        to += SAVED_HEAD_BYTES + kept_rows_bytes(r);
    }
    if (r->o.n_layers) k->to_host(k, to, recurrent_state_of(r, slot, 0), slot_states_bytes(r));
}

void recurrent_state_load(struct recurrent_state *r, int slot, const void *host)
{
    struct kern *k = r->o.kern;
    const char *from = host;
    if (r->o.hidden) {
        uint64_t count;
        memcpy(&count, from, sizeof count);
        /* Rows beyond what a slot holds were never saved; a count of them is not believed. */
        r->n_kept[slot] = count <= RECURRENT_MAX_KEPT ? (int)count : 0;
        k->to_dev(k, recurrent_hidden_of(r, slot), from + SAVED_HEAD_BYTES, kept_rows_bytes(r));
        from += SAVED_HEAD_BYTES + kept_rows_bytes(r);
    }
    if (r->o.n_layers) k->to_dev(k, recurrent_state_of(r, slot, 0), from, slot_states_bytes(r));
}

size_t recurrent_state_bytes(const struct recurrent_state *r)
{
    return (size_t)r->o.slots * (slot_states_bytes(r) + (size_t)r->o.n_layers * r->replay_bytes + kept_rows_bytes(r));
}
