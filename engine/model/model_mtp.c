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
    const size_t draft_bytes = picks * KERN_MAX_DRAFTS * sizeof *f->drafts, ranks = (size_t)f->o.partition->ranks;
    void *logits = NULL, *best = NULL, *drafts_dev = NULL, *drafts = NULL;
    enum rc rc = forward_alloc(f, rows, hidden, &f->normed_dev, e);
    if (rc == RC_OK) rc = forward_alloc(f, rows, hidden, &f->mtp_hidden_dev, e);
    if (rc == RC_OK) rc = forward_alloc(f, rows, hidden, &f->mtp_embedding_dev, e);
    if (rc == RC_OK) rc = forward_alloc(f, picks, hidden, &f->mtp_out_dev, e);
    if (rc == RC_OK)
        rc = forward_alloc_bytes(f, f->o.kern->act_bytes(f->o.max_rows, 2 * f->o.config->hidden), &f->mtp_pair_act, e);
    if (rc == RC_OK) rc = forward_alloc_host(f, picks * (size_t)f->o.config->vocab * sizeof *f->mtp_logits, &logits, e);
    if (rc == RC_OK && ranks > 1) rc = forward_alloc_bytes(f, picks * ranks * sizeof *f->mtp_best_dev, &best, e);
    if (rc == RC_OK) rc = forward_alloc_bytes(f, draft_bytes, &drafts_dev, e);
    if (rc == RC_OK) rc = forward_alloc_host(f, draft_bytes, &drafts, e);
    f->mtp_logits = logits;
    f->mtp_best_dev = best;
    f->drafts_dev = drafts_dev;
    f->drafts = drafts;
    return rc;
}

void model_mtp_close(struct model_forward *f)
{
    struct kern *k = f->o.kern;
    k->buffer_free(k, f->normed_dev);
    k->buffer_free(k, f->mtp_hidden_dev);
    k->buffer_free(k, f->mtp_embedding_dev);
    k->buffer_free(k, f->mtp_pair_act);
    k->buffer_free(k, f->mtp_out_dev);
    k->host_free(k, f->mtp_logits);
    k->buffer_free(k, f->mtp_best_dev);
    k->buffer_free(k, f->drafts_dev);
    k->host_free(k, f->drafts);
}

/* ---- hidden rows ---- */

static void copy_rows(struct model_forward *f, float *to, const float *from, int n)
{
    if (n > 0) f->o.kern->copy(f->o.kern, to, from, (size_t)n * (size_t)f->o.config->hidden * sizeof(float));
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

/* The rows that the batch starts from, to mtp_from_dev. */
static enum rc fetch_hidden(struct model_forward *f, const struct mtp_batch *b, struct err *e)
{
    const int rows = kern_rows(b->rows.batch.rows);
    size_t hidden = (size_t)f->o.config->hidden;
    f->mtp_from_dev = f->mtp_hidden_dev;
    if (b->hidden != MTP_HIDDEN_KEPT) {
        const float *from = b->hidden == MTP_HIDDEN_STEP ? f->normed_dev : f->mtp_out_dev;
        int in_order = 0;
        while (in_order < rows && b->source[in_order] == in_order) in_order++;
        if (in_order == rows) f->mtp_from_dev = from;
        else forward_gather(f, f->mtp_hidden_dev, from, b->source, rows);
        return RC_OK;
    }
    for (int i = 0; i < b->rows.batch.n_segments; i++) {
        const struct kern_segment *s = &b->rows.batch.segments[i];
        int slot = s->slot;
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
    const struct kern_split rows = b->batch.rows;
    int n = f->o.config->hidden;
    float eps = f->o.config->rms_eps;
    k->embed(k, w->embedding, f->mtp_embedding_dev);
    k->rms_norm_pair(k, f->mtp_embedding_dev, w->mtp_embedding_norm_dev, f->mtp_from_dev, w->mtp_hidden_norm_dev, rows, n, eps,
                     f->mtp_pair_act);
    k->linear(k, w->mtp_fc, rows, f->mtp_pair_act, f->x_dev);
}

/* The picks' best tokens to the drafts. */
static enum rc take_drafts(struct model_forward *f, int n, struct err *e)
{
    struct kern *k = f->o.kern;
    const int ranks = f->o.comm->ranks;
    const struct kern_best *best = ranks > 1 ? f->mtp_best_dev : f->best_dev;
    enum rc rc = ranks > 1 ? forward_gather_best(f, n, f->mtp_best_dev, e) : RC_OK;
    if (rc == RC_OK) k->best_tokens(k, best, n, ranks, f->drafts_dev + f->draft_first, f->drafts + f->draft_first);
    return rc;
}

static enum rc mtp_operations(struct model_forward *f, const struct forward_batch *b, struct err *e)
{
    join(f, b);
    forward_norm(f, b, f->o.weights->layers[f->o.config->n_layers].mix_norm_dev);
    enum rc rc = forward_layer(f, b, f->o.config->n_layers, f->n_kv - 1, NULL, e);
    if (rc != RC_OK || !b->n_picks) return rc;
    forward_head(f, forward_picked(f, b->picks, b->n_picks), f->o.weights->mtp_norm_dev, b->n_picks, f->mtp_out_dev);
    return take_drafts(f, b->n_picks, e);
}

enum rc model_forward_mtp(struct model_forward *f, const struct mtp_batch *b, struct err *e)
{
    enum { PASS_MTP = 2, PASS_MTP_IN_PLACE, PASSES };
    const struct forward_batch *rows = &b->rows;
    struct kern *k = f->o.kern;
    if (!f->o.mtp) return err_set(e, RC_FATAL, EXIT_INTERNAL, "no_mtp", "this engine was opened without its MTP layer");
    enum rc rc = forward_check(f, rows, e);
    if (rc == RC_OK && (b->draft_first < 0 || b->draft_first > f->o.max_picks * KERN_MAX_DRAFTS - rows->n_picks))
        rc = err_set(e, RC_FATAL, EXIT_INTERNAL, "too_many_drafts", "draft %d and %d more", b->draft_first, rows->n_picks);
    if (rc == RC_OK) rc = fetch_hidden(f, b, e);
    if (rc != RC_OK) return rc;
    f->draft_first = b->draft_first;
    const uint64_t pass = f->mtp_from_dev == f->mtp_hidden_dev ? PASS_MTP : PASS_MTP_IN_PLACE;
    rc = forward_run(f, rows, pass + PASSES * (uint64_t)b->draft_first, mtp_operations, e);
    if (rc == RC_OK && rows->n_picks && rows->logits) rc = forward_gather_logits(f, rows->n_picks, f->mtp_logits, e);
    return rc == RC_OK && rows->logits ? k->finish(k, e) : rc;
}

float *model_forward_mtp_logits(struct model_forward *f, int pick)
{
    return f->mtp_logits + (size_t)pick * (size_t)f->o.config->vocab;
}

int32_t model_forward_draft(const struct model_forward *f, int i) { return f->drafts[i]; }
