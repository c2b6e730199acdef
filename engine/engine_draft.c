/* engine_draft: drafts of a step, and the rows of the MTP layer.
 *
 * Rank 0 decides how many drafts a round has and where they come from; the plan says so, and every rank makes the drafts itself:
 * n-grams from the same tokens, MTP drafts from the same gathered logits.
 *
 * MTP row p takes the target's hidden row of position p and the token at p + 1. The rows of a prompt are computed right after
 * the step that computed the hidden rows, all but the last of each segment: that one's hidden row is kept in the slot until the
 * next step, so that a snapshot taken in between can be continued by another token. In decoding, the hidden rows of a round's
 * right tokens are kept likewise. So between steps
 *
 *     MTP rows computed + hidden rows kept = positions computed,
 *
 * and a step begins with one call over the kept rows of all sequences that draft by MTP (whose last row gives the first draft),
 * that continue a prompt, or whose slot could not keep another round. Further drafts chain on the layer's own output, at
 * positions that the next kept rows overwrite. MTP rows decide about drafts alone, never about an answer, so it does not matter
 * that the same position is computed by prefill or decode depending on how a prompt was cut. */
#include <stdlib.h>
#include <xxhash.h>

#include "engine.h"
#include "engine_private.h"

/* After so many rounds without a kind of drafts, or with fewer than it may have, one more is tried. */
enum { PROBE_ROUNDS = 32 };

double engine_mtp_share(const struct model_config *c)
{
    double hidden = c->hidden, query = (double)c->n_heads * c->head_dim, kv = 2.0 * c->n_kv_heads * c->head_dim;
    double attention = hidden * (query * (c->attn_gate ? 3 : 2) + kv), mlp = 3 * hidden * c->ffn, head = hidden * c->vocab;
    double value = (double)c->gdn_v_heads * c->gdn_v_dim;
    double gdn = hidden * (2.0 * c->gdn_k_heads * c->gdn_k_dim + 3 * value + 2.0 * c->gdn_v_heads), all = head;
    for (int l = 0; l < c->n_layers; l++) all += mlp + (c->gdn[l] ? gdn : attention);
    return (attention + mlp + 2 * hidden * hidden + head) / all;
}

/* ---- how many ---- */

struct choice {
    enum draft_source source;
    enum draft_kind kind;
    int drafts;
    double speed;
};

static void consider(struct engine *e, struct sequence *s, enum draft_source source, int matched, int most, int decoding,
                     struct choice *best)
{
    struct choice c = {.source = source, .kind = draft_kind_of(source, matched)};
    c.drafts = draft_count(&s->rates, &e->rates, c.kind, most, decoding, &e->draft_cost, &c.speed);
    if (++s->idle[c.kind] > PROBE_ROUNDS && c.drafts < most) {
        c.drafts++;
        c.speed = 1 + KERN_MAX_DRAFTS; /* before all others */
    }
    if (c.drafts && c.speed > best->speed) *best = c;
}

void engine_draft_want(struct engine *e, struct sequence *s, int decoding, struct plan_sequence *out)
{
    int most = s->max_tokens - s->sampled - 1;
    if (most > e->drafts) most = e->drafts;
    if (most < 1) return;
    struct choice best = {.source = DRAFT_NONE};
    int32_t guess[KERN_MAX_DRAFTS];
    if (e->o.spec == SPEC_MTP) { /* asked for: whether it pays or not */
        out->source = DRAFT_MTP;
        out->drafts = most;
        return;
    }
    if (e->ngram && draft_index_propose(&s->index, s->tokens, s->prompt_tokens + s->sampled, most, guess, &s->matched))
        consider(e, s, DRAFT_NGRAM, s->matched, most, decoding, &best);
    if (e->mtp) consider(e, s, DRAFT_MTP, 0, most, decoding, &best);
    if (!best.drafts) return;
    if (best.drafts == most || s->idle[best.kind] > PROBE_ROUNDS) s->idle[best.kind] = 0;
    out->source = best.source;
    out->drafts = best.drafts;
}

void engine_draft_note(struct engine *e, struct sequence *s, const struct plan_segment *p, int accepted)
{
    if (!p->drafts) return;
    enum draft_kind kind = draft_kind_of((enum draft_source)p->source, s->matched);
    draft_rates_note(&s->rates, kind, p->drafts, accepted);
    draft_rates_note(&e->rates, kind, p->drafts, accepted);
}

/* ---- MTP batches ---- */

static void add_segment(struct engine *e, struct mtp_batch *b, int planned, int position, int rows)
{
    struct mtp_work *w = &e->mtp_work;
    const struct sequence *s = e->work[planned].sequence;
    struct kern_batch *k = &b->rows.batch;
    int i = k->n_segments++;
    bool decode = b->hidden != MTP_HIDDEN_STEP;
    w->segments[i] = (struct kern_segment){kern_rows(k->rows), rows, position, s->pages, s->slot};
    w->planned[i] = planned;
    *(decode ? &k->rows.decode : &k->rows.prefill) += rows;
    k->n_decode_segments += decode;
}

/* Rows of MTP_HIDDEN_STEP are prompt rows, all others decode rows. */
static struct mtp_batch new_batch(struct engine *e, enum mtp_hidden hidden)
{
    struct mtp_work *w = &e->mtp_work;
    struct forward_batch rows = {.batch = {.tokens = w->tokens, .segments = w->segments}, .picks = w->picks};
    return (struct mtp_batch){.rows = rows, .hidden = hidden, .source = w->source};
}

static enum rc run_batch(struct engine *e, const struct mtp_batch *b, struct err *err)
{
    segment_beat(e->segment, e->seat);
    return model_forward_mtp(e->forward, b, err);
}

/* Adds the kept rows of one sequence: positions computed - kept .. computed - 1, each with the token after it. */
static enum rc add_kept(struct engine *e, struct mtp_batch *b, int planned, bool pick, struct err *err)
{
    struct mtp_work *w = &e->mtp_work;
    const struct sequence *s = e->work[planned].sequence;
    int kept = model_forward_kept_hidden(e->forward, s->slot), first = s->computed - kept;
    if (kept < 1 || kept > KERN_MAX_DRAFTS + 1 || first < 0)
        return engine_stuck(err, "hidden rows that the MTP layer needs are gone");
    for (int i = 0; i < kept; i++) w->tokens[kern_rows(b->rows.batch.rows) + i] = s->tokens[first + i + 1];
    add_segment(e, b, planned, first, kept);
    if (pick) w->picks[b->rows.n_picks++] = kern_rows(b->rows.batch.rows) - 1;
    b->rows.logits |= pick && !engine_takes_best(s);
    return RC_OK;
}

/* True when the slot's kept rows must be used up although nothing is drafted from them. */
static bool must_catch_up(const struct engine *e, const struct plan_segment *p, const struct sequence *s)
{
    int kept = model_forward_kept_hidden(e->forward, s->slot);
    return p->kind == PLAN_PREFILL ? kept > 0 : kept + p->rows > KERN_MAX_DRAFTS + 1;
}

/* The draft that stands at `number` (from 1) of each of the batch's first n segments. Where no sequence needs logits nobody waits:
 * tokens stand for what the pass will leave behind. Penalties are those of the tokens accepted so far. Logits that are not finite
 * give token 0, which the target will refuse. */
static enum rc pick_drafts(struct engine *e, const struct mtp_batch *b, int n, int number, struct err *err)
{
    for (int i = 0; i < n; i++) {
        int planned = e->mtp_work.planned[i];
        const struct sequence *s = e->work[planned].sequence;
        int32_t *draft = &e->batch_tokens[e->segments[planned].row_first + number];
        *draft = model_forward_draft_token(b->draft_first + i);
        if (!b->rows.logits) continue;
        enum rc rc = engine_pick(e, s, s->computed + number, model_forward_draft(e->forward, b->draft_first + i),
                                 model_forward_mtp_logits(e->forward, i), draft, err);
        if (rc != RC_OK) return rc;
        if (*draft < 0) *draft = 0;
    }
    return RC_OK;
}

void engine_draft_settle(struct engine *e, int rows)
{
    for (int i = 0; i < rows; i++)
        if (e->batch_tokens[i] < 0) e->batch_tokens[i] = model_forward_draft(e->forward, -1 - e->batch_tokens[i]);
}

/* Draft number + 1 of the sequences that want one, which are the first of the batch before. */
static enum rc chain(struct engine *e, int n, int number, struct err *err)
{
    struct mtp_work *w = &e->mtp_work;
    struct mtp_batch b = new_batch(e, MTP_HIDDEN_CHAINED);
    b.draft_first = number * e->o.active;
    for (int i = 0; i < n; i++) {
        int planned = w->planned[i];
        w->tokens[i] = e->batch_tokens[e->segments[planned].row_first + number];
        w->picks[i] = w->source[i] = i;
        add_segment(e, &b, planned, e->work[planned].sequence->computed + number - 1, 1);
        b.rows.logits |= !engine_takes_best(e->work[planned].sequence);
    }
    b.rows.n_picks = n;
    enum rc rc = run_batch(e, &b, err);
    return rc == RC_OK ? pick_drafts(e, &b, n, number + 1, err) : rc;
}

/* Sequences with more drafts come first, so that those which chain on are always the first picks. */
static enum rc draft_by_mtp(struct engine *e, struct err *err)
{
    struct mtp_batch b = new_batch(e, MTP_HIDDEN_KEPT);
    int n_with[KERN_MAX_DRAFTS + 2] = {0}; /* sequences with at least so many drafts */
    enum rc rc = RC_OK;
    for (int drafts = KERN_MAX_DRAFTS; drafts >= 1; drafts--) {
        for (uint32_t i = 0; i < e->plan.n_segments && rc == RC_OK; i++) {
            const struct plan_segment *p = &e->plan.segments[i];
            if (p->source == DRAFT_MTP && p->drafts == drafts) rc = add_kept(e, &b, (int)i, true, err);
        }
        n_with[drafts] = b.rows.batch.n_segments;
    }
    for (uint32_t i = 0; i < e->plan.n_segments && rc == RC_OK; i++)
        if (e->plan.segments[i].source != DRAFT_MTP && must_catch_up(e, &e->plan.segments[i], e->work[i].sequence))
            rc = add_kept(e, &b, (int)i, false, err);
    if (rc == RC_OK && b.rows.batch.n_segments) rc = run_batch(e, &b, err);
    if (rc == RC_OK) rc = pick_drafts(e, &b, n_with[1], 1, err);
    for (int number = 1; rc == RC_OK && n_with[number + 1]; number++) rc = chain(e, n_with[number + 1], number, err);
    return rc;
}

enum rc engine_draft(struct engine *e, struct err *err)
{
    for (uint32_t i = 0; i < e->plan.n_segments; i++) {
        const struct plan_segment *p = &e->plan.segments[i];
        struct sequence *s = e->work[i].sequence;
        int32_t *out = e->batch_tokens + e->segments[i].row_first + 1;
        int matched;
        if (p->source != DRAFT_NGRAM) continue;
        if (draft_index_propose(&s->index, s->tokens, s->prompt_tokens + s->sampled, p->drafts, out, &matched) != p->drafts)
            return engine_stuck(err, "a plan has n-gram drafts where this rank finds none");
    }
    return e->mtp ? draft_by_mtp(e, err) : RC_OK;
}

enum rc engine_mtp_prompt(struct engine *e, struct err *err)
{
    struct mtp_work *w = &e->mtp_work;
    struct mtp_batch b = new_batch(e, MTP_HIDDEN_STEP);
    for (uint32_t i = 0; i < e->plan.n_segments; i++) {
        const struct plan_segment *p = &e->plan.segments[i];
        const struct sequence *s = e->work[i].sequence;
        if (p->kind != PLAN_PREFILL || p->rows < 2) continue;
        int first = kern_rows(b.rows.batch.rows);
        for (int row = 0; row < p->rows - 1; row++) {
            w->tokens[first + row] = s->tokens[p->position_first + row + 1];
            w->source[first + row] = e->segments[i].row_first + row;
        }
        add_segment(e, &b, (int)i, p->position_first, p->rows - 1);
    }
    return b.rows.batch.n_segments ? run_batch(e, &b, err) : RC_OK;
}
