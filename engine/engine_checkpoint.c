/* engine_checkpoint: what running requests have so far is saved while they run, and later requests of the same key go on from it.
 *
 * Saving. Rank 0 decides when, in the plan: every rank then copies the named requests' new pages and, once these are all there, a
 * point (tokens so far, the page that is not whole, the slot) into a batch, which its store writes while the engine goes on.
 * Each rank says in the segment how many batches it has on disk; the next one is planned when all have all. A batch begins when
 * the last one was cheap enough for it: copies take 3% of the time at most, writing a quarter of it, and what is written again and
 * again (points) 16 MB/s, for a night of that wears a disk; at least every checkpoint_us whatever it costs. Pages are written once,
 * so as fast as the disk takes them. Answers grow slowly, and their points are written all night: they take part in batches ten times
 * as rarely as prompts.
 *
 * Going on. Before such a request is admitted the plan probes it: ranks exchange the positions of their points, all load and verify
 * the greatest that is common to all, and vote. What was read waits in host memory, as after a preemption; sampled tokens are put back
 * as if they had been sampled just now, so that decoding goes on and nothing of the answer is fed through a prompt's kernels.
 *
 * Stopping. Rank 0 plans nothing but batches until everything running is on every rank's disk. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine.h"
#include "engine_private.h"

enum { LEAST_WAIT_US = 100000, COPY_SHARE = 33, WRITE_SHARE = 4, POINT_BYTES_PER_US = 16, ANSWER_PATIENCE = 10 };
static const size_t most_batch_bytes = (size_t)512 << 20;

/* What a point begins with; then tokens, traces, the last page if it is not whole, the slot. Fixed sizes, no padding. */
struct note {
    uint32_t prompt_tokens, sampled;
    uint64_t traced, token_chain;
    int64_t submitted_us, first_row_us, first_token_us; /* how long ago; -1: not yet */
    struct engine_timing timing;
};
static_assert(sizeof(struct note) % sizeof(int64_t) == 0 && sizeof(struct note) == 48 + sizeof(struct engine_timing), "no padding");

void engine_use_checkpoints(struct engine *e, struct checkpoint_store *s) { e->checkpoints = s; }

static bool partial_page(int position) { return position % KV_PAGE_TOKENS != 0; }

static size_t rest_bytes_of(const struct engine *e, int position, size_t sampled, bool traced)
{
    return sizeof(struct note) + sampled * (sizeof(int32_t) + (traced ? 2 * sizeof(uint64_t) : 0)) +
           (partial_page(position) ? model_forward_page_bytes(e->forward) : 0) + model_forward_slot_bytes(e->forward);
}

/* ---- rank 0: when, and of whom ---- */

static bool may_save(const struct sequence *s)
{
    return s->keyed && s->state != PLAN_QUEUED && !s->retire && !s->failed && s->computed > 0;
}

static bool all_saved(const struct engine *e)
{
    for (const struct sequence *s = e->sequences; s; s = s->next)
        if (may_save(s) && s->saved_position != s->computed) return false;
    return true;
}

static bool is_due(const struct engine *e, int64_t due_us)
{
    return e->checkpoints && e->saves_durable == e->saves && (e->stopping || clock_now_us() >= due_us);
}

/* The request whose last point is oldest, of those that have something to save and are not in the batch yet. */
static int next_to_save(const struct engine *e, int n, const bool *taken, bool answers, struct sequence **out)
{
    int best = -1, i = 0;
    for (struct sequence *s = e->sequences; s && i < n; s = s->next, i++) {
        if (taken[i] || !may_save(s) || s->saved_position == s->computed || (s->sampled && !answers)) continue;
        if (best >= 0 && s->saved_step >= (*out)->saved_step) continue;
        best = i;
        *out = s;
    }
    return best;
}

enum rc engine_checkpoint_want(struct engine *e, int n, struct err *err)
{
    const size_t page_bytes = model_forward_page_bytes(e->forward) + 1;
    size_t left = most_batch_bytes;
    struct sequence *s = NULL;
    if (!is_due(e, e->save_due_us)) return RC_OK;
    const bool answers = is_due(e, e->save_answers_due_us);
    bool *taken = calloc((size_t)n + 1, sizeof *taken);
    if (!taken) return err_no_memory(err);
    e->save_start_us = clock_now_us();
    e->save_cut = e->save_answers = false;
    for (int i; (i = next_to_save(e, n, taken, answers, &s)) >= 0;) {
        const int missing = s->computed / KV_PAGE_TOKENS - s->saved_pages;
        const int pages = (size_t)missing < left / page_bytes ? missing : (int)(left / page_bytes);
        size_t bytes = (size_t)pages * page_bytes;
        taken[i] = true;
        if (pages == missing) bytes += rest_bytes_of(e, s->computed, (size_t)s->sampled, s->trace != NULL);
        const bool fits = bytes > 0 && (bytes <= left || left == most_batch_bytes); /* the first always does */
        e->save_cut |= !fits || pages < missing;
        if (!fits) continue;
        e->save_answers |= s->sampled > 0;
        e->plan_input[i].save = true;
        e->plan_input[i].save_pages = pages;
        left -= bytes < left ? bytes : left;
    }
    free(taken);
    return RC_OK;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Everybody has everything on disk: when the next batch may begin. */
static void settle(struct engine *e)
{
    int64_t wait_us = COPY_SHARE * e->save_copy_us;
    e->saves_durable = e->saves;
    for (struct sequence *s = e->sequences; s; s = s->next) s->durable_position = s->saved_position;
    if (!e->save_cut) {
        const int64_t write_us = (WRITE_SHARE - 1) * checkpoint_store_write_us(e->checkpoints);
        const int64_t points_us = (int64_t)e->save_point_bytes / POINT_BYTES_PER_US;
        if (wait_us < LEAST_WAIT_US) wait_us = LEAST_WAIT_US;
        if (wait_us < write_us) wait_us = write_us;
        if (wait_us < points_us) wait_us = points_us;
    }
    const int64_t answers_wait_us = e->save_cut ? wait_us : ANSWER_PATIENCE * wait_us;
    e->save_due_us = e->save_start_us + least(wait_us, e->o.checkpoint_us);
    if (e->save_answers) e->save_answers_due_us = e->save_start_us + least(answers_wait_us, e->o.checkpoint_us);
}

enum rc engine_checkpoint_poll(struct engine *e, struct err *err)
{
    if (!e->checkpoints) return RC_OK;
    if (e->saves_written < e->saves) {
        enum rc rc = checkpoint_store_status(e->checkpoints, err);
        if (rc == RC_FAILED) return rc;
        if (rc == RC_OK) {
            e->saves_written = e->saves;
            segment_set_saved(e->segment, e->seat, e->saves_written);
        }
    }
    if (e->seat || e->saves_durable == e->saves) return RC_OK;
    for (int r = 0; r < e->ranks; r++)
        if (segment_saved(e->segment, r) < e->saves) return RC_OK;
    settle(e);
    return RC_OK;
}

void engine_stop(struct engine *e) { e->stopping = true; }

bool engine_stopped(const struct engine *e)
{
    return e->stopping && (!e->checkpoints || (e->saves_durable == e->saves && all_saved(e)));
}

bool engine_next_saved(struct engine *e, uint64_t *id, int *position)
{
    for (struct sequence *s = e->sequences; s; s = s->next) {
        if (s->durable_position == s->told_position) continue;
        *id = s->id;
        *position = s->told_position = s->durable_position;
        return true;
    }
    return false;
}

/* ---- saving ---- */

static void copy_page(struct engine *e, const struct sequence *s, int page, void *out)
{
    const size_t page_bytes = model_forward_page_bytes(e->forward);
    segment_beat(e->segment, e->seat);
    if (s->state == PLAN_RUNNING) model_forward_save_page(e->forward, s->pages[page], out);
    else memcpy(out, s->saved + (size_t)page * page_bytes, page_bytes);
}

static char *put(char *at, const void *bytes, size_t n)
{
    memcpy(at, bytes, n);
    return at + n;
}

static void write_rest(struct engine *e, const struct sequence *s, char *at)
{
    const int64_t now_us = clock_now_us();
    const size_t page_bytes = model_forward_page_bytes(e->forward);
    const struct note note = {
        .prompt_tokens = (uint32_t)s->prompt_tokens,
        .sampled = (uint32_t)s->sampled,
        .traced = s->trace != NULL,
        .token_chain = s->token_chain,
        .submitted_us = now_us - s->submitted_us,
        .first_row_us = s->first_row_us ? now_us - s->first_row_us : -1,
        .first_token_us = s->first_token_us ? now_us - s->first_token_us : -1,
        .timing = s->timing,
    };
    at = put(at, &note, sizeof note);
    at = put(at, s->tokens + s->prompt_tokens, (size_t)s->sampled * sizeof *s->tokens);
    if (s->trace) at = put(at, s->trace, 2 * (size_t)s->sampled * sizeof *s->trace);
    if (partial_page(s->computed)) {
        copy_page(e, s, s->computed / KV_PAGE_TOKENS, at);
        at += page_bytes;
    }
    if (s->state == PLAN_RUNNING) model_forward_save_slot(e->forward, s->slot, at);
    else memcpy(at, s->saved + (size_t)s->n_pages * page_bytes, model_forward_slot_bytes(e->forward));
}

static enum rc open_fresh(struct engine *e, struct sequence *s, struct err *err)
{
    enum rc rc = checkpoint_open(e->checkpoints, s->key, &s->checkpoint, err);
    return rc == RC_OK ? checkpoint_resume(s->checkpoint, 0, err) : rc;
}

static enum rc save(struct engine *e, struct sequence *s, int pages, struct err *err)
{
    const int whole = s->computed / KV_PAGE_TOKENS;
    void *out = NULL;
    enum rc rc = RC_OK;
    if (pages > whole - s->saved_pages) return engine_stuck(err, "a plan saves pages that a request does not have");
    if (!s->checkpoint) rc = open_fresh(e, s, err);
    for (int i = 0; i < pages && rc == RC_OK; i++, s->saved_pages++) {
        if (!model_forward_page_bytes(e->forward)) continue;
        rc = checkpoint_add_page(s->checkpoint, &out, err);
        if (rc == RC_OK) copy_page(e, s, s->saved_pages, out);
    }
    if (rc != RC_OK || s->saved_pages < whole) return rc;
    const size_t bytes = rest_bytes_of(e, s->computed, (size_t)s->sampled, s->trace != NULL);
    rc = checkpoint_add_point(s->checkpoint, s->computed, bytes, &out, err);
    if (rc != RC_OK) return rc;
    write_rest(e, s, out);
    s->saved_position = s->computed;
    s->saved_step = e->step + 1;
    e->save_point_bytes += bytes;
    return RC_OK;
}

enum rc engine_checkpoint_save(struct engine *e, struct err *err)
{
    const int64_t start_us = clock_now_us();
    enum rc rc = RC_OK;
    int n = 0;
    for (uint32_t i = 0; i < e->plan.n_actions && rc == RC_OK; i++) {
        const struct plan_action *a = &e->plan.actions[i];
        if (a->kind != PLAN_SAVE) continue;
        struct sequence *s = engine_find(e, a->request);
        if (!e->checkpoints || !s || !s->keyed || s->state == PLAN_QUEUED)
            return engine_stuck(err, "a plan saves a request that cannot be saved");
        if (!n++) e->save_point_bytes = 0;
        rc = save(e, s, (int)a->pages, err);
    }
    if (!n || rc != RC_OK) return rc;
    checkpoint_store_write(e->checkpoints);
    e->saves++;
    e->save_copy_us = clock_now_us() - start_us;
    return RC_OK;
}

/* ---- going on ---- */

struct loading {
    struct engine *e;
    struct sequence *s;
};

static void take_page(void *ctx, int page, const void *bytes)
{
    const struct loading *l = ctx;
    const size_t page_bytes = model_forward_page_bytes(l->e->forward);
    segment_beat(l->e->segment, l->e->seat);
    memcpy(l->s->saved + (size_t)page * page_bytes, bytes, page_bytes);
}

/* A position that this request can have been at. */
static bool possible(const struct sequence *s, int position)
{
    if (position <= 0 || position >= s->prompt_tokens + s->max_tokens) return false;
    return position >= s->prompt_tokens || position % KV_PAGE_TOKENS == 0;
}

/* What is wrong with a point's bytes, as far as this request and engine can tell. */
static bool rest_is_ours(const struct engine *e, const struct sequence *s, int position, const struct buf *rest, struct note *note)
{
    if (rest->len < sizeof *note) return false;
    memcpy(note, rest->data, sizeof *note);
    const int sampled = position < s->prompt_tokens ? 0 : position - s->prompt_tokens + 1;
    if (note->prompt_tokens != (uint32_t)s->prompt_tokens || note->sampled != (uint32_t)sampled || sampled >= s->max_tokens + (sampled == 0))
        return false;
    if (note->traced != (s->trace != NULL) || rest->len != rest_bytes_of(e, position, (size_t)sampled, s->trace != NULL)) return false;
    uint64_t chain = s->token_chain;
    for (int i = 0; i < sampled; i++) {
        int32_t token;
        memcpy(&token, rest->data + sizeof *note + (size_t)i * sizeof token, sizeof token);
        if (token < 0 || token >= e->config.vocab) return false;
        chain = XXH3_64bits_withSeed(&token, sizeof token, chain);
    }
    return chain == note->token_chain;
}

/* This rank's share of a point into s->saved, the rest of it into rest. */
static bool load(struct engine *e, struct sequence *s, int position, struct buf *rest, struct note *note)
{
    const size_t page_bytes = model_forward_page_bytes(e->forward), slot_bytes = model_forward_slot_bytes(e->forward);
    const int n_pages = kv_pages_for(position), whole = position / KV_PAGE_TOKENS;
    struct loading l = {e, s};
    const struct checkpoint_sink sink = {&l, take_page};
    s->saved = malloc(engine_state_bytes(e, n_pages) + 1);
    if (s->saved && checkpoint_load(s->checkpoint, position, &sink, rest_bytes_of(e, 1, (size_t)s->max_tokens, true), rest) &&
        rest_is_ours(e, s, position, rest, note)) {
        const size_t tail = (size_t)(n_pages - whole) * page_bytes + slot_bytes;
        memcpy(s->saved + (size_t)whole * page_bytes, rest->data + rest->len - tail, tail);
        return true;
    }
    free(s->saved);
    s->saved = NULL;
    return false;
}

/* Every rank's words, one after the other. */
static enum rc exchange(struct engine *e, const int32_t *mine, size_t n, int32_t *all, struct err *err)
{
    if (e->ranks == 1) {
        memcpy(all, mine, n * sizeof *mine);
        return RC_OK;
    }
    return lockstep_exchange(e->segment, e->seat, mine, n * sizeof *mine, all, err);
}

/* The greatest of mine that all ranks have; 0: none. */
static int greatest_common(const struct engine *e, const int32_t mine[CHECKPOINT_POINTS], const int32_t *all)
{
    int best = 0;
    for (int i = 0; i < CHECKPOINT_POINTS; i++) {
        bool common = mine[i] > best;
        for (int r = 0; r < e->ranks && common; r++)
            common = all[CHECKPOINT_POINTS * r] == mine[i] || all[CHECKPOINT_POINTS * r + 1] == mine[i];
        if (common) best = mine[i];
    }
    return best;
}

/* Puts back what the point says of the request: as if its tokens had been sampled by this engine. */
static enum rc apply(struct engine *e, struct sequence *s, int position, const struct buf *rest, const struct note *note, struct err *err)
{
    const int64_t now_us = clock_now_us();
    const char *tokens = rest->data + sizeof *note, *trace = tokens + note->sampled * sizeof(int32_t);
    for (uint32_t i = 0; i < note->sampled; i++) {
        int32_t token;
        struct err why = {0};
        memcpy(&token, tokens + i * sizeof token, sizeof token);
        if (sequence_count(s, token, err) != RC_OK) return RC_FATAL;
        sequence_append(s, token);
        if (e->seat == 0 && sequence_finish_check(s, e->tokenizer, &why))
            return engine_stuck(err, "a checkpoint goes on after the end of its answer");
        if (why.rc != RC_OK) return err_no_memory(err);
    }
    if (s->trace) memcpy(s->trace, trace, note->sampled * 2 * sizeof *s->trace);
    s->computed = s->saved_position = s->durable_position = s->told_position = position;
    s->saved_pages = position / KV_PAGE_TOKENS;
    s->n_pages = kv_pages_for(position);
    s->timing = note->timing;
    s->timing.resumed_tokens = position;
    s->submitted_us = now_us - note->submitted_us;
    s->first_row_us = note->first_row_us < 0 ? 0 : now_us - note->first_row_us;
    s->first_token_us = note->first_token_us < 0 ? 0 : now_us - note->first_token_us;
    return RC_OK;
}

enum rc engine_checkpoint_resume(struct engine *e, struct sequence *s, struct err *err)
{
    int mine[CHECKPOINT_POINTS];
    int32_t offer[CHECKPOINT_POINTS], all[MAX_RANKS * CHECKPOINT_POINTS];
    struct buf rest = {0};
    struct note note;
    enum rc rc = checkpoint_open(e->checkpoints, s->key, &s->checkpoint, err);
    if (rc != RC_OK) return rc;
    checkpoint_positions(s->checkpoint, mine);
    for (int i = 0; i < CHECKPOINT_POINTS; i++) offer[i] = possible(s, mine[i]) ? mine[i] : 0;
    rc = exchange(e, offer, CHECKPOINT_POINTS, all, err);
    for (int position; rc == RC_OK && !s->computed && (position = greatest_common(e, offer, all)) > 0;) {
        int32_t votes[MAX_RANKS], loaded = load(e, s, position, &rest, &note);
        bool whole = true;
        rc = exchange(e, &loaded, 1, votes, err);
        for (int r = 0; r < e->ranks && rc == RC_OK; r++) whole = whole && votes[r];
        if (rc == RC_OK && whole) {
            rc = apply(e, s, position, &rest, &note, err);
            continue;
        }
        free(s->saved);
        s->saved = NULL;
        for (int i = 0; i < CHECKPOINT_POINTS; i++)
            if (offer[i] == position) offer[i] = 0;
    }
    if (rc == RC_OK) rc = checkpoint_resume(s->checkpoint, s->computed, err);
    buf_free(&rest);
    return rc;
}
