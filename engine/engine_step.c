/* engine_step: one step. Rank 0 plans, everybody carries out the same bytes, everybody compares, then it counts.
 *
 * Order: actions (retire, preempt, restore, admit), pages for the new rows, the forward pass, sampling on every rank, the
 * lockstep record, and only after all records agree the commit: tokens are appended, positions advance, rank 0 looks for
 * ends. Nothing before the compare outlives a failed one, because a failed compare ends the process. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine.h"
#include "engine_private.h"

/* How long a rank looks for the plan before its caller looks at the socket. */
enum { PLAN_PATIENCE_US = 20000 };

static enum rc stuck(struct err *err, const char *what)
{
    return err_set(err, RC_FATAL, EXIT_INTERNAL, "engine_inconsistent", "%s", what);
}

static enum rc build_plan(struct engine *e, struct err *err)
{
    int n = 0;
    for (struct sequence *s = e->sequences; s; s = s->next)
        e->plan_input[n++] = (struct plan_sequence){
            .request = s->id,
            .state = s->state,
            .retire = s->retire,
            .admitted = s->admitted,
            .prompt_tokens = s->prompt_tokens,
            .computed = s->computed,
            .pages = s->n_pages,
        };
    struct plan_input in = {
        .step = e->step + 1,
        .sequences = e->plan_input,
        .n_sequences = n,
        .active = e->o.active,
        .prefill_rows = e->prefill_rows,
        .pages_free = e->pages.n_free,
    };
    if (!step_plan_build(&in, &e->plan)) return stuck(err, "the planner found nothing to do for live requests");
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
        enum rc rc = lockstep_read_plan(e->segment, e->o.rank, e->step + 1, PLAN_PATIENCE_US, e->plan_bytes, &e->plan_len, err);
        if (rc == RC_OK) rc = step_plan_unpack(e->plan_bytes, e->plan_len, &e->plan, err);
        if (rc != RC_OK) return rc;
        if (e->plan.step != e->step + 1) return stuck(err, "the step plan is of another step");
        e->plan_ready = true;
        e->plan_since_us = clock_now_us();
    }
    if (plan_is_known(e)) return RC_OK;
    segment_beat(e->segment, e->o.rank);
    if (clock_now_us() - e->plan_since_us > e->lockstep_us)
        return stuck(err, "the step plan names a request that never arrived");
    return RC_RETRY;
}

static bool fault_is_due(const struct engine *e, enum fault_kind kind)
{
    return e->o.fault.kind == kind && e->o.fault.step == e->step + 1;
}

/* ---- actions ---- */

static enum rc preempt(struct engine *e, struct sequence *s, struct err *err)
{
    size_t page_bytes = model_forward_page_bytes(e->forward);
    s->saved = malloc((size_t)s->n_pages * page_bytes + 1);
    if (!s->saved) return err_no_memory(err);
    for (int i = 0; i < s->n_pages; i++) {
        model_forward_save_page(e->forward, s->pages[i], s->saved + (size_t)i * page_bytes);
        kv_pages_give(&e->pages, s->pages[i]);
    }
    s->state = PLAN_PREEMPTED;
    s->timing.preemptions++;
    e->stats.preemptions++;
    return RC_OK;
}

static enum rc restore(struct engine *e, struct sequence *s, struct err *err)
{
    size_t page_bytes = model_forward_page_bytes(e->forward);
    if (e->pages.n_free < s->n_pages) return stuck(err, "a restore does not fit the KV pages");
    for (int i = 0; i < s->n_pages; i++) {
        s->pages[i] = kv_pages_take(&e->pages);
        model_forward_load_page(e->forward, s->pages[i], s->saved + (size_t)i * page_bytes);
    }
    free(s->saved);
    s->saved = NULL;
    s->state = PLAN_RUNNING;
    return RC_OK;
}

static void retire(struct engine *e, struct sequence *s)
{
    for (int i = 0; i < s->n_pages && s->state == PLAN_RUNNING; i++) kv_pages_give(&e->pages, s->pages[i]);
    engine_remove(e, s);
}

static enum rc run_actions(struct engine *e, struct err *err)
{
    for (uint32_t i = 0; i < e->plan.n_actions; i++) {
        struct sequence *s = engine_find(e, e->plan.actions[i].request);
        if (!s) return stuck(err, "a plan names one request twice");
        enum plan_action_kind kind = (enum plan_action_kind)e->plan.actions[i].kind;
        enum rc rc = RC_OK;
        if (kind == PLAN_RETIRE) retire(e, s);
        else if (kind == PLAN_PREEMPT && s->state == PLAN_RUNNING) rc = preempt(e, s, err);
        else if (kind == PLAN_RESTORE && s->state == PLAN_PREEMPTED) rc = restore(e, s, err);
        else if (kind == PLAN_ADMIT && s->state == PLAN_QUEUED) s->state = PLAN_RUNNING, s->admitted = ++e->admissions;
        else return stuck(err, "a plan's action does not fit the request's state");
        if (rc != RC_OK) return rc;
    }
    return RC_OK;
}

/* ---- the batch ---- */

static enum rc take_pages(struct engine *e, struct sequence *s, int tokens, struct err *err)
{
    while (s->n_pages < kv_pages_for(tokens)) {
        int32_t page = kv_pages_take(&e->pages);
        if (page < 0) return stuck(err, "the plan needs more KV pages than are free");
        s->pages[s->n_pages++] = page;
    }
    return RC_OK;
}

static enum rc make_batch(struct engine *e, struct forward_batch *b, struct err *err)
{
    *b = (struct forward_batch){.tokens = e->batch_tokens, .segments = e->segments, .picks = e->picks};
    int max_rows = e->prefill_rows + e->o.active;
    for (uint32_t i = 0; i < e->plan.n_segments; i++) {
        const struct plan_segment *p = &e->plan.segments[i];
        struct sequence *s = engine_find(e, p->request);
        int known = s ? s->prompt_tokens + s->sampled : 0;
        if (!s || s->state != PLAN_RUNNING || p->position_first != s->computed || p->rows > known - s->computed ||
            p->rows > max_rows - b->rows || (p->picks && b->n_picks == e->o.active))
            return stuck(err, "a plan's segment does not fit the request's position");
        enum rc rc = take_pages(e, s, p->position_first + p->rows, err);
        if (rc != RC_OK) return rc;
        memcpy(e->batch_tokens + b->rows, s->tokens + p->position_first, (size_t)p->rows * sizeof *e->batch_tokens);
        e->segments[i] = (struct kern_segment){b->rows, p->rows, p->position_first, s->pages};
        e->segment_sequences[i] = s;
        b->rows += p->rows;
        if (p->kind == PLAN_DECODE) b->decode_rows = b->rows, b->n_decode_segments++;
        if (p->picks) e->picks[b->n_picks++] = b->rows - 1;
        if (!s->first_row_us) s->first_row_us = clock_now_us();
    }
    b->n_segments = (int)e->plan.n_segments;
    return RC_OK;
}

/* Every rank samples from the same gathered logits. */
static enum rc sample(struct engine *e, struct err *err)
{
    int pick = 0;
    for (uint32_t i = 0; i < e->plan.n_segments; i++) {
        const struct plan_segment *p = &e->plan.segments[i];
        if (!p->picks) continue;
        struct sequence *s = e->segment_sequences[i];
        struct err why = {0};
        enum rc rc = sampler_pick(&s->sampling, &s->counts, tokenizer_vocab(e->tokenizer), p->position_first + p->rows,
                                  model_forward_logits(e->forward, pick), e->sampler_scratch, &e->picked_tokens[pick], &why);
        if (rc == RC_FAILED) e->picked_tokens[pick] = -1;
        else if (rc != RC_OK) return err_set(err, rc, EXIT_INTERNAL, why.code, "%s", why.text);
        if (fault_is_due(e, FAULT_TOKEN)) e->picked_tokens[pick] = (e->picked_tokens[pick] + 1) % e->config.vocab;
        pick++;
    }
    return RC_OK;
}

/* ---- the record ---- */

static uint64_t mix(uint64_t h, const void *bytes, size_t n) { return XXH3_64bits_withSeed(bytes, n, h); }

static struct lockstep_record make_record(struct engine *e, const struct forward_batch *b)
{
    struct lockstep_record r = {.step = e->step + 1, .rows = (uint64_t)b->rows, .tokens = (uint64_t)b->n_picks};
    if (fault_is_due(e, FAULT_PLAN)) e->plan_bytes[e->plan_len - 1] ^= 1;
    r.plan_digest = XXH3_64bits(e->plan_bytes, e->plan_len);
    r.token_hash = XXH3_64bits(e->picked_tokens, (size_t)b->n_picks * sizeof *e->picked_tokens);
    if (b->rows) r.state_digest = mix(0, model_forward_row_hashes(e->forward), (size_t)b->rows * sizeof(uint64_t));
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

static enum rc commit_pick(struct engine *e, struct sequence *s, int pick, int64_t now_us, struct err *err)
{
    int32_t token = e->picked_tokens[pick];
    if (token < 0) {
        s->failed = true;
        if (e->o.rank == 0) end_sequence(e, s, now_us);
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
    enum rc rc = sequence_append(s, token, err);
    if (rc != RC_OK || e->o.rank != 0) return rc;
    struct err why = {0};
    if (sequence_finish_check(s, e->tokenizer, &why)) end_sequence(e, s, now_us);
    return why.rc == RC_OK ? RC_OK : err_no_memory(err);
}

static enum rc commit(struct engine *e, const struct forward_batch *b, struct err *err)
{
    int64_t now_us = clock_now_us();
    int pick = 0;
    for (uint32_t i = 0; i < e->plan.n_segments; i++) {
        struct sequence *s = e->segment_sequences[i];
        s->computed += e->plan.segments[i].rows;
        s->timing.steps++;
        if (b->n_segments > s->timing.max_in_step) s->timing.max_in_step = b->n_segments;
        if (!e->plan.segments[i].picks) continue;
        enum rc rc = commit_pick(e, s, pick++, now_us, err);
        if (rc != RC_OK) return rc;
    }
    e->step++;
    e->stats.steps++;
    e->stats.decode_rows += (uint64_t)b->decode_rows;
    e->stats.prefill_rows += (uint64_t)(b->rows - b->decode_rows);
    if (b->n_segments > e->stats.max_sequences_in_step) e->stats.max_sequences_in_step = b->n_segments;
    return RC_OK;
}

enum rc engine_step(struct engine *e, struct err *err)
{
    e->n_events = e->next_event = 0;
    enum rc rc = e->o.rank == 0 ? build_plan(e, err) : await_plan(e, err);
    if (rc != RC_OK) return rc;
    e->plan_ready = false;
    struct forward_batch b;
    rc = run_actions(e, err);
    if (rc == RC_OK) rc = make_batch(e, &b, err);
    if (rc == RC_OK && b.rows) rc = model_forward_step(e->forward, &b, err);
    if (rc == RC_OK) rc = sample(e, err);
    if (rc == RC_OK) {
        struct lockstep_record r = make_record(e, &b);
        rc = lockstep_compare(e->segment, e->o.rank, &r, err);
    }
    if (rc == RC_OK) rc = commit(e, &b, err);
    return rc;
}
