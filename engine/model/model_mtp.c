/* model_mtp: the multi-token-prediction layer, the model's own source of drafts.
 *
 *   c = fc [norm(E[x_p+1]) | norm(h_p)];  m = norm(attention layer(c));  logits of x_p+2 = head(m)
 *
 * h_p is the target's hidden row after the final norm, or, for a chained draft, the m of the draft before. The layer is one
 * more attention layer: its keys and values lie in the same pages as everybody's, at position p. Embedding and head are the
 * target's. Each rank computes some of c's columns, and all gather them: the same bits whoever computed them.
 *
 * What comes out are drafts. They are checked by the target, so nothing here can change an answer; still every rank must
 * draft the same, and does, by the same rules as in a step. */
#include <stdlib.h>
#include <xxhash.h>

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
    f->fresh_row = malloc((size_t)f->o.slots * sizeof *f->fresh_row);
    if (rc == RC_OK && !f->fresh_row) rc = err_no_memory(e);
    for (int i = 0; i < f->o.slots && f->fresh_row; i++) f->fresh_row[i] = -1;
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
    free(f->fresh_row);
}

/* ---- hidden rows ---- */

static void copy_rows(struct model_forward *f, float *to, const float *from, int n)
{
    if (n > 0) f->o.kern->copy(f->o.kern, to, from, (size_t)n * (size_t)f->o.config->hidden * sizeof(float));
}

void model_forward_keep_hidden(struct model_forward *f, int slot, int row, int n)
{
    const size_t hidden = (size_t)f->o.config->hidden;
    const int kept = f->slots.n_kept[slot];
    if (n > RECURRENT_MAX_KEPT - kept) n = RECURRENT_MAX_KEPT - kept; /* whoever asks for more rows later is refused */
    model_mtp_settle(f, slot);
    if (kept) copy_rows(f, recurrent_hidden_of(&f->slots, slot) + (size_t)kept * hidden, f->normed_dev + (size_t)row * hidden, n);
    else f->fresh_row[slot] = row;
    f->slots.n_kept[slot] = kept + n;
}

void model_mtp_settle(struct model_forward *f, int slot)
{
    if (!f->o.mtp || f->fresh_row[slot] < 0) return;
    const float *fresh = f->normed_dev + (size_t)f->fresh_row[slot] * (size_t)f->o.config->hidden;
    copy_rows(f, recurrent_hidden_of(&f->slots, slot), fresh, f->slots.n_kept[slot]);
    f->fresh_row[slot] = -1;
}

void model_mtp_forget(struct model_forward *f, int slot)
{
    if (f->o.mtp) f->fresh_row[slot] = -1;
}

/* Where the slot's kept rows lie. */
static const float *kept_rows(const struct model_forward *f, int slot)
{
    const int fresh = f->fresh_row[slot];
    return fresh < 0 ? recurrent_hidden_of(&f->slots, slot) : f->normed_dev + (size_t)fresh * (size_t)f->o.config->hidden;
}

int model_forward_kept_hidden(const struct model_forward *f, int slot) { return f->o.mtp ? f->slots.n_kept[slot] : 0; }

/* mtp_from_dev: the rows that the batch starts from, gathered unless they lie together. */
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
    const bool alone = b->rows.batch.n_segments == 1;
    for (int i = 0; i < b->rows.batch.n_segments; i++) {
        const struct kern_segment *s = &b->rows.batch.segments[i];
        const int slot = s->slot;
        if (f->slots.n_kept[slot] < s->rows)
            return err_set(e, RC_FATAL, EXIT_INTERNAL, "mtp_hidden", "slot %d keeps %d hidden rows, %d are asked for", slot,
                           f->slots.n_kept[slot], s->rows);
        if (alone) f->mtp_from_dev = kept_rows(f, slot);
        else copy_rows(f, f->mtp_hidden_dev + (size_t)s->row_first * hidden, kept_rows(f, slot), s->rows);
        f->slots.n_kept[slot] = 0;
        f->fresh_row[slot] = -1;
    }
    return RC_OK;
}

/* ---- the layer ---- */

/* This rank's columns of c, [rows][mtp_rows], to everybody's rows of x_dev, in pieces that a gather takes. */
static enum rc gather_joined(struct model_forward *f, const float *mine_dev, int rows, struct err *e)
{
    const struct partition *p = f->o.partition;
    const int hidden = f->o.config->hidden, mine = f->part.mtp_rows.count;
    struct range of_rank[MAX_RANKS];
    size_t widest = 1;
    for (int r = 0; r < p->ranks; r++) {
        of_rank[r] = p->part[r].mtp_rows;
        if ((size_t)of_rank[r].count > widest) widest = (size_t)of_rank[r].count;
    }
    const size_t most = model_forward_gather_floats(p, f->o.max_picks) / widest;
    const int piece = most < (size_t)rows ? (int)most : rows;
    enum rc rc = RC_OK;
    for (int at = 0, n; at < rows && rc == RC_OK; at += n) {
        n = rows - at < piece ? rows - at : piece;
        rc = f->o.comm->all_gather_columns(f->o.comm, mine_dev + (size_t)at * (size_t)mine, n, of_rank, hidden,
                                           f->x_dev + (size_t)at * (size_t)hidden, e);
    }
    return rc;
}

/* c of all rows, to x_dev. The pair of a row lies together, embedding first. */
static enum rc join(struct model_forward *f, const struct forward_batch *b, struct err *e)
{
    struct kern *k = f->o.kern;
    const struct model_weights *w = f->o.weights;
    const struct kern_split rows = b->batch.rows;
    int n = f->o.config->hidden;
    float eps = f->o.config->rms_eps;
    k->embed(k, w->embedding, f->mtp_embedding_dev);
    k->rms_norm_pair(k, f->mtp_embedding_dev, w->mtp_embedding_norm_dev, f->mtp_from_dev, w->mtp_hidden_norm_dev, rows, n, eps,
                     f->mtp_pair_act);
    const bool alone = f->o.comm->ranks == 1;
    float *mine_dev = alone ? f->x_dev : f->mtp_embedding_dev; /* which has been read */
    if (w->mtp_fc) k->linear(k, w->mtp_fc, rows, f->mtp_pair_act, mine_dev);
    return alone ? RC_OK : gather_joined(f, mine_dev, kern_rows(rows), e);
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
    enum rc rc = join(f, b, e);
    if (rc == RC_OK) forward_norm(f, b, f->o.weights->layers[f->o.config->n_layers].mix_norm_dev);
    if (rc == RC_OK) rc = forward_layer(f, b, f->o.config->n_layers, f->n_kv - 1, NULL, e);
    if (rc != RC_OK || !b->n_picks) return rc;
    forward_head(f, forward_picked(f, b->picks, b->n_picks), f->o.weights->mtp_norm_dev, b->n_picks, f->mtp_out_dev);
    return take_drafts(f, b->n_picks, e);
}

enum rc model_forward_mtp(struct model_forward *f, const struct mtp_batch *b, struct err *e)
{
    const struct forward_batch *rows = &b->rows;
    struct kern *k = f->o.kern;
    if (!f->o.mtp) return err_set(e, RC_FATAL, EXIT_INTERNAL, "no_mtp", "this engine was opened without its MTP layer");
    enum rc rc = forward_check(f, rows, e);
    if (rc == RC_OK && (b->draft_first < 0 || b->draft_first > f->o.max_picks * KERN_MAX_DRAFTS - rows->n_picks))
        rc = err_set(e, RC_FATAL, EXIT_INTERNAL, "too_many_drafts", "draft %d and %d more", b->draft_first, rows->n_picks);
    if (rc == RC_OK) rc = fetch_hidden(f, b, e);
    if (rc != RC_OK) return rc;
    f->draft_first = b->draft_first;
    const uint64_t pass[] = {PASS_MTP, (uint64_t)b->draft_first, (uint64_t)(uintptr_t)f->mtp_from_dev};
    rc = forward_run(f, rows, XXH3_64bits(pass, sizeof pass), mtp_operations, e);
    if (rc == RC_OK && rows->n_picks && rows->logits) rc = forward_gather_logits(f, rows->n_picks, f->mtp_logits, e);
    return rc == RC_OK && rows->logits ? k->finish(k, e) : rc;
}

float *model_forward_mtp_logits(struct model_forward *f, int pick)
{
    return f->mtp_logits + (size_t)pick * (size_t)f->o.config->vocab;
}

int32_t model_forward_draft(const struct model_forward *f, int i) { return f->drafts[i]; }
