/* engine_step: one step. Rank 0 plans, everybody carries out the same bytes, everybody compares, then it counts.
 *
 * Order: actions (retire, preempt, restore, admit), pages for the new rows, drafts, the forward pass, sampling on every rank,
 * the lockstep record, and only after all records agree the commit: tokens are appended, positions advance, rank 0 looks for
 * ends; last the MTP rows of what was prompt. Nothing before the compare outlives a failed one, because a failed compare ends the
 * process.
 *
 * A decode segment is the last sampled token and its drafts. Its rows are sampled one after the other, each as if the drafts
 * before it had been sampled, until one differs from the draft that was to follow, or ends the answer: so a round gives what
 * as many steps of one row would have given. Only rank 0 knows of stop strings; what a round sampled after one belongs to the
 * sequence on every rank, and to no answer. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine.h"
#include "engine_private.h"

/* How long a rank looks for the plan before its caller looks at the socket. */
enum { PLAN_PATIENCE_US = 20000 };

enum rc engine_stuck(struct err *err, const char *what)
{
    return err_set(err, RC_FATAL, EXIT_INTERNAL, "engine_inconsistent", "%s", what);
}

static enum rc build_plan(struct engine *e, struct err *err)
{
    int n = 0, decoding = 0;
    for (const struct sequence *s = e->sequences; s; s = s->next)
        decoding += s->state == PLAN_RUNNING && !s->retire && s->computed >= s->prompt_tokens;
    for (struct sequence *s = e->sequences; s; s = s->next) {
        struct plan_sequence *p = &e->plan_input[n++];
        *p = (struct plan_sequence){
            .request = s->id,
            .state = s->state,
            .retire = s->retire,
            .admitted = s->admitted,
            .prompt_tokens = s->prompt_tokens,
            .computed = s->computed,
            .pages = s->n_pages,
        };
        if (s->state != PLAN_QUEUED && !s->retire && s->computed >= s->prompt_tokens) engine_draft_want(e, s, decoding, p);
        engine_prefix_want(e, s, p);
        if (s->state == PLAN_QUEUED && s->resume && !s->probed) p->probe = true, p->held = false; /* it has a state of its own */
    }
    enum rc rc = engine_checkpoint_want(e, n, err);
    if (rc != RC_OK) return rc;
    struct plan_input in = {
        .step = e->step + 1,
        .sequences = e->plan_input,
        .n_sequences = n,
        .active = e->o.active,
        .prefill_rows = e->prefill_rows,
        .pages_free = e->pages.n_free,
        .hold = e->stopping,
    };
    if (!step_plan_build(&in, &e->plan)) return engine_stuck(err, "the planner found nothing to do for live requests");
    e->plan_len = step_plan_pack(&e->plan, e->plan_bytes);
    lockstep_publish_plan(e->segment, e->step + 1, e->plan_bytes, e->plan_len);
    return RC_OK;
}

static bool plan_is_known(struct engine *e)
{
    for (uint32_t i = 0; i < e->plan.n_actions; i++)
        if (!engine_find(e, e->plan.actions[i].request)) return false;
    for (uint32_t i = 0; i < e->plan.n_segments; i++)
        if (!engine_find(e, e->plan.segments[i].request)) return false;
    return true;
}

/* Other ranks: the plan of the next step, once every request it names has been submitted here. */
static enum rc await_plan(struct engine *e, struct err *err)
{
    if (!e->plan_ready) {
        enum rc rc = lockstep_read_plan(e->segment, e->seat, e->step + 1, PLAN_PATIENCE_US, e->plan_bytes, &e->plan_len, err);
        if (rc == RC_OK) rc = step_plan_unpack(e->plan_bytes, e->plan_len, &e->plan, err);
        if (rc != RC_OK) return rc;
        if (e->plan.step != e->step + 1) return engine_stuck(err, "the step plan is of another step");
        e->plan_ready = true;
        e->plan_since_us = clock_now_us();
    }
    if (plan_is_known(e)) return RC_OK;
    segment_beat(e->segment, e->seat);
    if (clock_now_us() - e->plan_since_us > e->lockstep_us)
        return engine_stuck(err, "the step plan names a request that never arrived");
    return RC_RETRY;
}

static bool fault_is_due(const struct engine *e, enum fault_kind kind)
{
    return e->o.fault.kind == kind && e->o.fault.step == e->step + 1;
}

/* ---- actions ---- */

static enum rc take_pages(struct engine *e, struct sequence *s, int n_pages, struct err *err)
{
    while (s->n_pages < n_pages) {
        int32_t page = kv_pages_take(&e->pages);
        if (page < 0) return engine_stuck(err, "the plan needs more KV pages than are free");
        s->pages[s->n_pages++] = page;
    }
    return RC_OK;
}

static void give_pages(struct engine *e, struct sequence *s, int keep)
{
    while (s->n_pages > keep) kv_pages_give(&e->pages, s->pages[--s->n_pages]);
}

static enum rc preempt(struct engine *e, struct sequence *s, struct err *err)
{
    int held = s->n_pages;
    s->saved = malloc(engine_state_bytes(e, held) + 1);
    if (!s->saved) return err_no_memory(err);
    engine_state_save(e, s, s->saved);
    give_pages(e, s, 0);
    s->n_pages = held; /* what it needs to come back */
    e->slot_used[s->slot] = false;
    s->state = PLAN_PREEMPTED;
    s->timing.preemptions++;
    e->stats.preemptions++;
    return RC_OK;
}

/* Gives it the lowest free slot and, where something was saved, pages for that and what was saved. */
static enum rc start(struct engine *e, struct sequence *s, struct err *err)
{
    int need = s->n_pages;
    s->n_pages = 0;
    s->slot = 0;
    while (s->slot < e->o.active && e->slot_used[s->slot]) s->slot++;
    if (s->slot == e->o.active) return engine_stuck(err, "a plan runs more sequences than there are slots");
    e->slot_used[s->slot] = true;
    s->state = PLAN_RUNNING;
    enum rc rc = take_pages(e, s, need, err);
    if (rc != RC_OK) return rc;
    if (s->saved) engine_state_load(e, s, s->saved);
    else model_forward_clear_slot(e->forward, s->slot);
    free(s->saved);
    s->saved = NULL;
    return RC_OK;
}

static enum rc admit(struct engine *e, struct sequence *s, struct err *err)
{
    s->admitted = ++e->admissions;
    e->stats.restored_rows += (uint64_t)(s->computed < s->prompt_tokens ? s->computed : s->prompt_tokens);
    if (e->ngram && !draft_index_open(s->prompt_tokens + s->max_tokens, &s->index)) return err_no_memory(err);
    return start(e, s, err);
}

static enum rc retire(struct engine *e, struct sequence *s, struct err *err)
{
    enum rc rc = engine_prefix_left(e, s, err);
    if (s->state == PLAN_RUNNING) {
        give_pages(e, s, 0);
        e->slot_used[s->slot] = false;
    }
    engine_remove(e, s);
    return rc;
}

/* What is known of a queued request: its own past, or the head of its prompt. */
static enum rc probe(struct engine *e, struct sequence *s, struct err *err)
{
    enum rc rc = s->resume && e->checkpoints ? engine_checkpoint_resume(e, s, err) : RC_OK;
    if (rc == RC_OK && e->o.prefixes) rc = engine_prefix_probe(e, s, err);
    s->probed = true;
    return rc;
}

static enum rc run_actions(struct engine *e, struct err *err)
{
    enum rc rc = engine_checkpoint_save(e, err);
    for (uint32_t i = 0; i < e->plan.n_actions && rc == RC_OK; i++) {
        struct sequence *s = engine_find(e, e->plan.actions[i].request);
        if (!s) return engine_stuck(err, "a plan names one request twice");
        enum plan_action_kind kind = (enum plan_action_kind)e->plan.actions[i].kind;
        if (kind == PLAN_SAVE) continue;
        if (kind == PLAN_RETIRE) rc = retire(e, s, err);
        else if (kind == PLAN_PREEMPT && s->state == PLAN_RUNNING) rc = preempt(e, s, err);
        else if (kind == PLAN_RESTORE && s->state == PLAN_PREEMPTED) rc = start(e, s, err);
        else if (kind == PLAN_ADMIT && s->state == PLAN_QUEUED) rc = admit(e, s, err);
        else if (kind == PLAN_PROBE && s->state == PLAN_QUEUED && !s->probed) rc = probe(e, s, err);
        else return engine_stuck(err, "a plan's action does not fit the request's state");
    }
    return rc;
}

/* ---- the batch ---- */

static bool segment_fits(const struct engine *e, const struct plan_segment *p, const struct sequence *s)
{
    if (!s || s->state != PLAN_RUNNING || p->position_first != s->computed) return false;
    if (s->n_pages != kv_pages_for(s->computed)) return false; /* what the planner counted on */
    int left = s->prompt_tokens - s->computed;
    if (p->keep && !e->o.prefixes) return false;
    if (p->kind == PLAN_PREFILL) return p->rows <= left && p->picks == (p->rows == left);
    return s->sampled && s->computed == s->prompt_tokens + s->sampled - 1 && p->drafts <= e->drafts &&
           p->drafts < s->max_tokens - s->sampled && (p->source != DRAFT_NGRAM || e->ngram) && (p->source != DRAFT_MTP || e->mtp);
}

/* Rows, pages and tokens of the plan's segments; drafts are still missing. */
static enum rc make_batch(struct engine *e, struct forward_batch *b, struct err *err)
{
    struct kern_batch *k = &b->batch;
    *b = (struct forward_batch){
        .batch = {.tokens = e->batch_tokens, .segments = e->segments},
        .picks = e->picks,
        .unrecorded = e->o.fault.kind != FAULT_NONE && e->o.fault.step == e->step + 1, /* faults strike between operations */
    };
    for (uint32_t i = 0; i < e->plan.n_segments; i++) {
        const struct plan_segment *p = &e->plan.segments[i];
        struct sequence *s = engine_find(e, p->request);
        int n_picks = p->kind == PLAN_DECODE ? p->rows : p->picks, rows = kern_rows(k->rows);
        if (!segment_fits(e, p, s) || p->rows > e->max_rows - rows || n_picks > e->max_picks - b->n_picks)
            return engine_stuck(err, "a plan's segment does not fit the request's position");
        enum rc rc = take_pages(e, s, kv_pages_for(p->position_first + p->rows), err);
        if (rc != RC_OK) return rc;
        memcpy(e->batch_tokens + rows, s->tokens + p->position_first, (size_t)(p->rows - p->drafts) * sizeof *e->batch_tokens);
        e->segments[i] = (struct kern_segment){rows, p->rows, p->position_first, s->pages, s->slot};
        e->work[i] = (struct segment_work){.sequence = s, .first_pick = b->n_picks};
        b->logits |= n_picks && !engine_takes_best(s);
        if (p->kind == PLAN_DECODE) k->rows.decode += p->rows, k->n_decode_segments++;
        else k->rows.prefill += p->rows;
        rows += p->rows;
        for (int row = rows - n_picks; row < rows; row++) e->picks[b->n_picks++] = row;
        if (!s->first_row_us) s->first_row_us = clock_now_us();
    }
    k->n_segments = (int)e->plan.n_segments;
    return RC_OK;
}

/* ---- sampling ---- */

bool engine_takes_best(const struct sequence *s)
{
    return s->sampling.temperature <= 0 && !sampling_needs_counts(&s->sampling);
}

/* The logits of ids that stand for no token (holes of the vocabulary) to far below all others, so that none is ever chosen. */
static void mask_holes(const struct engine *e, float *logits)
{
    static const float never = -1e30f; /* finite: a logit that is not fails its job */
    const int32_t *ids;
    const size_t n = tokenizer_holes(e->tokenizer, &ids);
    for (size_t i = 0; i < n; i++) logits[ids[i]] = never;
}

enum rc engine_pick(struct engine *e, const struct sequence *s, int position, int32_t best, float *logits, int32_t *out,
                    struct err *err)
{
    struct err why = {0};
    *out = best;
    if (engine_takes_best(s)) return RC_OK;
    mask_holes(e, logits);
    enum rc rc = sampler_pick(&s->sampling, &s->counts, tokenizer_vocab(e->tokenizer), position, logits, e->sampler_scratch, out, &why);
    if (rc == RC_FAILED) *out = -1;
    else if (rc != RC_OK) return err_set(err, rc, EXIT_INTERNAL, why.code, "%s", why.text);
    return RC_OK;
}

/* Every rank samples from the same gathered logits. Token counts move here, before the compare, as the next row needs them. */
static enum rc sample_segment(struct engine *e, const struct plan_segment *p, struct segment_work *w, int row_first,
                              struct err *err)
{
    struct sequence *s = w->sequence;
    int rows = p->kind == PLAN_DECODE ? p->rows : p->picks, position = p->position_first + p->rows - rows;
    for (int j = 0; j < rows; j++) {
        int32_t *token = &e->picked_tokens[w->first_pick + j];
        const int pick = w->first_pick + j;
        enum rc rc = engine_pick(e, s, position + j + 1, model_forward_best(e->forward, pick), model_forward_logits(e->forward, pick),
                                 token, err);
        if (rc != RC_OK) return rc;
        w->tokens = j + 1;
        if (*token < 0) break;
        rc = sequence_count(s, *token, err);
        if (rc != RC_OK) return rc;
        bool end = !s->ignore_end && tokenizer_is_end(e->tokenizer, *token);
        if (end || j + 1 == rows || *token != e->batch_tokens[row_first + j + 1]) break;
    }
    if (w->tokens && fault_is_due(e, FAULT_TOKEN)) {
        int32_t *last = &e->picked_tokens[w->first_pick + w->tokens - 1];
        *last = (*last + 1) % e->config.vocab;
    }
    return RC_OK;
}

static enum rc sample(struct engine *e, struct err *err)
{
    enum rc rc = RC_OK;
    for (uint32_t i = 0; i < e->plan.n_segments && rc == RC_OK; i++)
        rc = sample_segment(e, &e->plan.segments[i], &e->work[i], e->segments[i].row_first, err);
    return rc;
}

/* ---- the record ---- */

static uint64_t mix(uint64_t h, const void *bytes, size_t n) { return XXH3_64bits_withSeed(bytes, n, h); }

static struct lockstep_record make_record(struct engine *e, const struct kern_batch *b)
{
    struct lockstep_record r = {.step = e->step + 1, .rows = (uint64_t)kern_rows(b->rows)};
    if (fault_is_due(e, FAULT_PLAN)) e->plan_bytes[e->plan_len - 1] ^= 1;
    r.plan_digest = XXH3_64bits(e->plan_bytes, e->plan_len);
    r.token_hash = mix(0, e->batch_tokens, (size_t)b->rows.decode * sizeof *e->batch_tokens); /* drafts among them */
    for (int i = 0; i < b->n_segments; i++) {
        const struct segment_work *w = &e->work[i];
        r.tokens += (uint64_t)w->tokens;
        r.token_hash = mix(r.token_hash, e->picked_tokens + w->first_pick, (size_t)w->tokens * sizeof *e->picked_tokens);
    }
    if (r.rows) r.state_digest = mix(0, model_forward_row_hashes(e->forward), (size_t)r.rows * sizeof(uint64_t));
    for (const struct sequence *s = e->sequences; s; s = s->next) {
        uint64_t own[] = {s->id, (uint64_t)s->state, (uint64_t)s->computed, (uint64_t)s->n_pages, s->token_chain};
        if (s->state == PLAN_QUEUED) continue; /* queues may differ between ranks, plans may not */
        r.position_sum += (uint64_t)s->computed;
        r.state_digest = mix(r.state_digest, own, sizeof own);
        if (s->state == PLAN_RUNNING && s->n_pages)
            r.state_digest = mix(r.state_digest, s->pages, (size_t)s->n_pages * sizeof *s->pages);
    }
    return r;
}

/* ---- the commit ---- */

static void end_sequence(struct engine *e, struct sequence *s, int64_t now_us)
{
    struct engine_timing *t = &s->timing;
    t->queue_us = s->first_row_us - s->submitted_us;
    t->ttft_us = s->first_token_us ? s->first_token_us - s->submitted_us : 0;
    t->decode_us = s->first_token_us ? now_us - s->first_token_us : 0;
    s->retire = true;
    e->events[e->n_events++] = s;
}

static enum rc commit_token(struct engine *e, struct sequence *s, int pick, int64_t now_us, struct err *err)
{
    int32_t token = e->picked_tokens[pick];
    if (token < 0) {
        s->failed = true;
        if (e->seat == 0 && !s->retire) end_sequence(e, s, now_us);
        return RC_OK;
    }
    if (s->trace) {
        s->trace[2 * s->sampled] = model_forward_hidden_hash(e->forward, pick);
        s->trace[2 * s->sampled + 1] = model_forward_logits_hash(e->forward, pick);
    }
    e->stats.tokens++;
    if (!s->first_token_us) {
        s->first_token_us = now_us;
        s->timing.prefill_us = now_us - s->first_row_us;
    }
    sequence_append(s, token);
    if (e->seat != 0 || s->retire) return RC_OK;
    struct err why = {0};
    if (sequence_finish_check(s, e->tokenizer, &why)) end_sequence(e, s, now_us);
    return why.rc == RC_OK ? RC_OK : err_no_memory(err);
}

/* What a round's drafts were worth. A right draft that the answer's end left unused was right all the same. */
static void commit_drafts(struct engine *e, const struct plan_segment *p, const struct segment_work *w, int row_first)
{
    struct sequence *s = w->sequence;
    int accepted = w->tokens - 1;
    if (e->seat == 0) {
        bool unused = accepted < p->drafts &&
                      e->picked_tokens[w->first_pick + accepted] == e->batch_tokens[row_first + accepted + 1];
        engine_draft_note(e, s, p, accepted + unused);
    }
    s->timing.rounds++;
    s->timing.drafted += p->drafts;
    e->stats.drafted += (uint64_t)p->drafts;
    e->stats.accepted += (uint64_t)accepted;
}

/* Positions, pages, state and kept hidden rows after the segment's right rows; its tokens. */
static enum rc commit_segment(struct engine *e, int i, int64_t now_us, struct err *err)
{
    const struct plan_segment *p = &e->plan.segments[i];
    const struct segment_work *w = &e->work[i];
    struct sequence *s = w->sequence;
    int row_first = e->segments[i].row_first, answered = s->answered;
    bool decode = p->kind == PLAN_DECODE;
    s->computed += decode ? w->tokens : p->rows;
    give_pages(e, s, kv_pages_for(s->computed));
    if (decode) {
        model_forward_accept(e->forward, s->slot, w->tokens - 1);
        commit_drafts(e, p, w, row_first);
    }
    if (e->mtp && decode) model_forward_keep_hidden(e->forward, s->slot, row_first, w->tokens);
    else if (e->mtp) model_forward_keep_hidden(e->forward, s->slot, row_first + p->rows - 1, 1);
    enum rc rc = RC_OK;
    for (int j = 0; j < w->tokens && rc == RC_OK; j++) rc = commit_token(e, s, w->first_pick + j, now_us, err);
    if (decode && s->answered > answered) s->timing.accepted += s->answered - answered - 1;
    return rc;
}

static enum rc commit(struct engine *e, const struct kern_batch *b, struct err *err)
{
    int64_t now_us = clock_now_us();
    for (int i = 0; i < b->n_segments; i++) {
        struct sequence *s = e->work[i].sequence;
        s->timing.steps++;
        if (b->n_segments > s->timing.max_in_step) s->timing.max_in_step = b->n_segments;
        enum rc rc = commit_segment(e, i, now_us, err);
        if (rc != RC_OK) return rc;
    }
    e->step++;
    e->stats.steps++;
    e->stats.decode_rows += (uint64_t)b->rows.decode;
    e->stats.prefill_rows += (uint64_t)b->rows.prefill;
    if (b->n_segments > e->stats.max_sequences_in_step) e->stats.max_sequences_in_step = b->n_segments;
    return RC_OK;
}

enum rc engine_step(struct engine *e, struct err *err)
{
    e->n_events = e->next_event = 0;
    enum rc rc = engine_checkpoint_poll(e, err);
    if (rc != RC_OK) return rc;
    if (e->seat == 0 && e->stopping && (e->saves_durable < e->saves || engine_stopped(e))) return RC_RETRY;
    rc = e->seat == 0 ? build_plan(e, err) : await_plan(e, err);
    if (rc != RC_OK) return rc;
    e->plan_ready = false;
    struct forward_batch b;
    rc = run_actions(e, err);
    if (rc == RC_OK) rc = make_batch(e, &b, err);
    if (rc == RC_OK) rc = engine_draft(e, err);
    if (rc == RC_OK && kern_rows(b.batch.rows)) rc = model_forward_step(e->forward, &b, err);
    if (rc == RC_OK) engine_draft_settle(e, b.batch.rows.decode);
    if (rc == RC_OK) rc = sample(e, err);
    if (rc == RC_OK) {
        struct lockstep_record r = make_record(e, &b.batch);
        rc = lockstep_compare(e->segment, e->seat, &r, err);
    }
    if (rc == RC_OK) rc = commit(e, &b.batch, err);
    if (rc == RC_OK && e->mtp) rc = engine_mtp_prompt(e, err);
    for (uint32_t i = 0; i < e->plan.n_segments && rc == RC_OK; i++)
        if (e->plan.segments[i].keep) rc = engine_prefix_keep(e, e->work[i].sequence, err);
    return rc;
}
