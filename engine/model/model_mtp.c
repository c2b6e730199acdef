/* model_mtp: the multi-token-prediction layer, the model's own source of drafts.
 *
 *   c = fc [norm(E[x_p+1]) | norm(h_p)];  m = norm(attention layer(c));  logits of x_p+2 = head(m)
 *
 * h_p is the target's hidden row after the final norm, or, for a chained draft, the m of the draft before. The layer is one
 * more attention layer: its keys and values lie in the same pages as everybody's, at position p. Embedding and head are the
 * target's. fc is whole on every rank (it feeds the residual stream, which every rank holds whole).
 *
 * What comes out are drafts. They are checked by the target, so nothing here can change an answer; still every rank must
 * draft the same, and does, by the same rules as in a step. */
#include <stdlib.h>

#include "model_forward_impl.h"

enum rc model_mtp_open(struct model_forward *f, struct err *e)
{
    size_t rows = (size_t)f->o.max_rows, picks = (size_t)f->o.max_picks, hidden = (size_t)f->o.config->hidden;
    enum rc rc = forward_alloc(f, rows, hidden, &f->normed_dev, e);
    if (rc == RC_OK) rc = forward_alloc(f, rows, hidden, &f->mtp_hidden_dev, e);
    if (rc == RC_OK) rc = forward_alloc(f, rows, 2 * hidden, &f->mtp_pair_dev, e);
    if (rc == RC_OK) rc = forward_alloc(f, picks, hidden, &f->mtp_out_dev, e);
    if (rc != RC_OK) return rc;
    f->mtp_logits = malloc(picks * (size_t)f->o.config->vocab * sizeof *f->mtp_logits);
    return f->mtp_logits ? RC_OK : err_no_memory(e);
}

void model_mtp_close(struct model_forward *f)
{
    struct kern *k = f->o.kern;
    k->buffer_free(k, f->normed_dev);
    k->buffer_free(k, f->mtp_hidden_dev);
    k->buffer_free(k, f->mtp_pair_dev);
    k->buffer_free(k, f->mtp_out_dev);
    free(f->mtp_logits);
}

/* ---- hidden rows ---- */

static void copy_rows(struct model_forward *f, float *to, const float *from, int n)
{
    if (n > 0) f->o.kern->copy(f->o.kern, to, from, (size_t)n * (size_t)f->o.config->hidden * sizeof(float));
}

/* to[i] = from[source[i]]; runs of neighbours go in one copy. */
static void gather_rows(struct model_forward *f, float *to, const float *from, const int *source, int n)
{
    size_t hidden = (size_t)f->o.config->hidden;
    for (int i = 0, run; i < n; i += run) {
        for (run = 1; i + run < n && source[i + run] == source[i] + run;) run++;
        copy_rows(f, to + (size_t)i * hidden, from + (size_t)source[i] * hidden, run);
    }
}

void model_forward_keep_hidden(struct model_forward *f, int slot, int row, int n)
{
    size_t hidden = (size_t)f->o.config->hidden;
    int kept = f->slots.n_kept[slot];
    if (n > RECURRENT_MAX_KEPT - kept) n = RECURRENT_MAX_KEPT - kept; /* whoever asks for more rows later is refused */
    copy_rows(f, recurrent_hidden_of(&f->slots, slot) + (size_t)kept * hidden, f->normed_dev + (size_t)row * hidden, n);
    f->slots.n_kept[slot] = kept + n;
}

int model_forward_kept_hidden(const struct model_forward *f, int slot) { return f->o.mtp ? f->slots.n_kept[slot] : 0; }

/* The rows that the batch starts from, to mtp_hidden_dev. */
static enum rc fetch_hidden(struct model_forward *f, const struct mtp_batch *b, struct err *e)
{
    size_t hidden = (size_t)f->o.config->hidden;
    if (b->hidden != MTP_HIDDEN_KEPT) {
        const float *from = b->hidden == MTP_HIDDEN_STEP ? f->normed_dev : f->mtp_out_dev;
        gather_rows(f, f->mtp_hidden_dev, from, b->source, b->rows.rows);
        return RC_OK;
    }
    for (int i = 0; i < b->rows.n_segments; i++) {
        const struct kern_segment *s = &b->rows.segments[i];
        int slot = b->rows.slots[i];
        if (f->slots.n_kept[slot] < s->rows)
            return err_set(e, RC_FATAL, EXIT_INTERNAL, "mtp_hidden", "slot %d keeps %d hidden rows, %d are asked for", slot,
                           f->slots.n_kept[slot], s->rows);
        copy_rows(f, f->mtp_hidden_dev + (size_t)s->row_first * hidden, recurrent_hidden_of(&f->slots, slot), s->rows);
        f->slots.n_kept[slot] = 0;
    }
    return RC_OK;
}

/* ---- the layer ---- */

/* c of all rows, to x_dev. The pair of a row lies together, embedding first. */
static void join(struct model_forward *f, const struct forward_batch *b)
{
    struct kern *k = f->o.kern;
    const struct model_weights *w = f->o.weights;
    int hidden = f->o.config->hidden;
    size_t n = (size_t)hidden;
    k->embed(k, &w->embedding, b->tokens, b->rows, f->h_dev);
    k->rms_norm(k, f->h_dev, w->mtp_embedding_norm_dev, b->rows, hidden, f->o.config->rms_eps, f->h_dev);
    k->rms_norm(k, f->mtp_hidden_dev, w->mtp_hidden_norm_dev, b->rows, hidden, f->o.config->rms_eps, f->mtp_hidden_dev);
    for (size_t i = 0; i < (size_t)b->rows; i++) {
        copy_rows(f, f->mtp_pair_dev + 2 * i * n, f->h_dev + i * n, 1);
        copy_rows(f, f->mtp_pair_dev + (2 * i + 1) * n, f->mtp_hidden_dev + i * n, 1);
    }
    forward_linear(f, b, w->mtp_fc, f->mtp_pair_dev, 2 * hidden, f->x_dev, hidden);
}

enum rc model_forward_mtp(struct model_forward *f, const struct mtp_batch *b, struct err *e)
{
    const struct forward_batch *rows = &b->rows;
    const struct model_config *c = f->o.config;
    if (!f->o.mtp) return err_set(e, RC_FATAL, EXIT_INTERNAL, "no_mtp", "this engine was opened without its MTP layer");
    enum rc rc = forward_check(f, rows, e);
    if (rc == RC_OK) rc = fetch_hidden(f, b, e);
    if (rc != RC_OK) return rc;
    join(f, rows);
    rc = forward_layer(f, rows, c->n_layers, f->n_kv - 1, e);
    if (rc != RC_OK || !rows->n_picks) return rc;
    gather_rows(f, f->pick_x_dev, f->x_dev, rows->picks, rows->n_picks);
    f->o.kern->rms_norm(f->o.kern, f->pick_x_dev, f->o.weights->mtp_norm_dev, rows->n_picks, c->hidden, c->rms_eps, f->mtp_out_dev);
    return forward_head(f, f->mtp_out_dev, rows->n_picks, f->mtp_logits, e);
}

float *model_forward_mtp_logits(struct model_forward *f, int pick)
{
    return f->mtp_logits + (size_t)pick * (size_t)f->o.config->vocab;
}
