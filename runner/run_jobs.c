#define _GNU_SOURCE
#include "run_jobs.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "checkpoint_store.h"
#include "run_status.h"
#include "text_check.h"

/* ---- figures ---- */

struct run_report run_jobs_report(const struct run *r)
{
    return (struct run_report){.jobs = r->set.n_entries, .done = r->done, .failed = r->failed, .in_flight = r->in_flight,
                               .tokens = r->tokens, .cached_tokens = r->cached_tokens, .rank_restarts = r->rank_restarts,
                               .wall_us = clock_now_us() - r->start_us, .started_s = r->started_s,
                               .deadline_s = r->deadline.source ? r->deadline.at_s : 0, .archive = r->options->out,
                               .state = r->folder.data, .audit_asked = r->options->audit_percent > 0,
                               .audited = r->audit.computed, .audit_different = r->audit.different,
                               .audit_skipped = r->audit.n - r->audit.computed};
}

void run_jobs_warn_metrics(struct run *r, const struct err *e)
{
    char line[sizeof e->text + 400];
    if (r->metrics_failed) return;
    r->metrics_failed = true;
    progress_hide(&r->progress);
    log_line(LOG_WARN, "going on without metrics: %s", err_format(e, line, sizeof line));
}

void run_jobs_tell_metrics(struct run *r)
{
    struct run_report report = run_jobs_report(r);
    struct err e = {0};
    if (r->options->metrics && metrics_turn(&r->metrics, &report, &e) != RC_OK) run_jobs_warn_metrics(r, &e);
}

/* ---- records ---- */

/* The outcome of one job: an output's record for status 200, an error's for any other; and what was measured. */
static enum rc store(struct run *r, const struct job_entry *entry, int status, const struct buf *record, const struct job_timing *t,
                     struct err *e)
{
    const enum state_result_kind kind = status == 200 ? STATE_OUTPUT : STATE_ERROR;
    struct buf timing = {0};
    enum rc rc = job_result_timing(entry->custom_id, status, t, &timing, e);
    if (rc == RC_OK && (record->failed || timing.failed)) rc = err_no_memory(e);
    const struct state_result result = {.kind = kind, .record = record->data, .record_len = record->len, .timing = timing.data,
                                        .timing_len = timing.len, .prompt_tokens = t->prompt_tokens,
                                        .cached_tokens = t->cached_tokens, .completion_tokens = t->completion_tokens};
    if (rc == RC_OK) rc = state_put_result(r->state, entry->key, &result, e);
    buf_free(&timing);
    if (rc != RC_OK) return rc;
    checkpoint_remove(r->checkpoints.data, entry->key);
    if (kind == STATE_OUTPUT) {
        r->done++;
        r->prompt_tokens += t->prompt_tokens;
        r->cached_tokens += t->cached_tokens;
    } else {
        r->failed++;
    }
    return RC_OK;
}

enum rc run_jobs_store_fault(struct run *r, size_t index, const struct job_fault *fault, const struct job_timing *t, struct err *e)
{
    const struct job_entry *entry = &r->set.entries[index];
    struct buf record = {0};
    enum rc rc = job_result_failure(entry->key, entry->custom_id, fault, &record, e);
    if (rc == RC_OK) rc = store(r, entry, fault->status, &record, t, e);
    buf_free(&record);
    return rc;
}

static struct job_timing timing_of(const struct dispatch_outcome *o, const struct held_job *h)
{
    struct job_timing t = {.attempts = o->attempts.attempts, .rank_restarts = o->attempts.rank_restarts, .group = o->group};
    if (h) {
        t.tokenize_us = h->prompt.tokenize_us;
        t.prompt_tokens = (int64_t)h->prompt.tokens.len;
    }
    if (!o->done) return t;
    const struct engine_timing *e = &o->done->timing;
    t.queue_us = e->queue_us;
    t.prefill_us = e->prefill_us;
    t.ttft_us = e->ttft_us;
    t.decode_us = e->decode_us;
    t.steps = e->steps;
    t.rounds = e->rounds;
    t.drafted = e->drafted;
    t.accepted = e->accepted;
    t.sequences_in_step = e->max_in_step;
    t.preemptions = e->preemptions;
    t.cached_tokens = e->cached_tokens;
    t.resumed_tokens = e->resumed_tokens;
    t.completion_tokens = (int64_t)o->done->n_tokens;
    t.tpot_us = o->done->n_tokens > 1 ? e->decode_us / ((int64_t)o->done->n_tokens - 1) : 0;
    return t;
}

static enum rc store_answer(struct run *r, size_t index, const struct held_job *h, const struct dispatch_outcome *o,
                            struct err *e)
{
    const struct job_entry *entry = &r->set.entries[index];
    const struct wire_done *d = o->done;
    struct job_timing t = timing_of(o, h);
    struct job_answer a = {.text = d->text, .text_len = d->text_len,
                           .finish_reason = d->finish == FINISH_STOP ? "stop" : "length",
                           .prompt_tokens = t.prompt_tokens, .cached_tokens = t.cached_tokens, .completion_tokens = t.completion_tokens,
                           .model = h->spec.model ? h->spec.model : prompter_model_name(r->prompter),
                           .created = (int64_t)time(NULL), .trace = d->trace, .n_trace = d->trace ? d->n_tokens : 0};
    struct buf record = {0};
    enum rc rc = job_result_success(entry->key, &h->spec, &a, &record, e);
    if (rc == RC_OK) rc = store(r, entry, 200, &record, &t, e);
    if (rc == RC_OK && audit_samples(entry->key, r->options->audit_percent)) rc = audit_add(&r->audit, index, d, e);
    buf_free(&record);
    return rc;
}

/* ---- the source that dispatch asks ---- */

void run_jobs_free_held(struct held_job *h)
{
    if (!h) return;
    prompt_free(&h->prompt);
    job_spec_free(&h->spec);
    free(h);
}

static bool build_held(struct run *r, size_t index, struct held_job *h, struct job_fault *fault)
{
    const struct job_entry *entry = &r->set.entries[index];
    if (!job_set_spec(&r->set, index, &h->spec, fault)) return false;
    struct prompt_documents documents = {r->set.sources[entry->source].root, entry->document_digests,
                                         entry->document_digests_bytes};
    return prompt_build(r->prompter, &h->spec, &documents, &h->prompt, fault);
}

bool run_jobs_has_result(const struct run *r, const unsigned char key[STATE_KEY_BYTES])
{
    enum state_result_kind kind;
    return state_result_kind(r->state, key, &kind, NULL) == RC_OK;
}

/* Builds the next job's prompt before its time, to see what it shares with the one before. A job that fails here fails in its time. */
static bool look_ahead(struct run *r, size_t i)
{
    struct job_fault fault = {0};
    if (i >= r->n_pending || run_jobs_has_result(r, r->set.entries[r->pending[i]].key)) return false;
    if (r->held[i]) return true;
    r->held[i] = calloc(1, sizeof *r->held[i]);
    if (r->held[i] && build_held(r, r->pending[i], r->held[i], &fault)) return true;
    run_jobs_free_held(r->held[i]);
    r->held[i] = NULL;
    return false;
}

static size_t common_tokens(const struct prompt *a, const struct prompt *b)
{
    size_t n = 0, most = a->tokens.len < b->tokens.len ? a->tokens.len : b->tokens.len;
    while (n < most && a->tokens.ids[n] == b->tokens.ids[n]) n++;
    return n;
}

/* The request of an entry, held as i until it is released. RC_RETRY: the job has a fault. */
static enum rc hold(struct run *r, size_t i, size_t index, struct engine_request *out, int64_t *timeout_us,
                    struct job_fault *fault, struct job_timing *t, struct err *e)
{
    struct held_job *h = r->held[i] ? r->held[i] : calloc(1, sizeof *h);
    if (!h) return err_no_memory(e);
    if (!r->held[i] && !build_held(r, index, h, fault)) {
        t->tokenize_us = h->prompt.tokenize_us;
        run_jobs_free_held(h);
        return RC_RETRY;
    }
    r->held[i] = h;
    *out = (struct engine_request){.prompt = h->prompt.tokens.ids, .prompt_tokens = h->prompt.tokens.len,
                                   .max_tokens = h->prompt.max_tokens, .sampling = h->spec.sampling,
                                   .stop = (const char *const *)h->spec.stop, .n_stop = h->spec.n_stop};
    if (!h->spec.has_seed) out->sampling.seed = job_spec_seed(h->spec.custom_id);
    *timeout_us = h->spec.timeout_us ? h->spec.timeout_us : r->options->job_timeout_us;
    return RC_OK;
}

static enum rc source_build(void *ctx, size_t i, struct engine_request *out, int64_t *timeout_us, struct err *e)
{
    struct run *r = ctx;
    struct job_fault fault = {0};
    struct job_timing t = {0};
    enum rc rc = hold(r, i, r->pending[i], out, timeout_us, &fault, &t, e);
    if (rc == RC_RETRY) {
        rc = run_jobs_store_fault(r, r->pending[i], &fault, &t, e);
        return rc == RC_OK ? RC_RETRY : rc;
    }
    if (rc != RC_OK) return rc;
    memcpy(out->key, r->set.entries[r->pending[i]].key, sizeof out->key);
    if (r->options->cache && look_ahead(r, i + 1)) out->branch_tokens = common_tokens(&r->held[i]->prompt, &r->held[i + 1]->prompt);
    return RC_OK;
}

static void source_release(void *ctx, size_t i)
{
    struct run *r = ctx;
    run_jobs_free_held(r->held[i]);
    r->held[i] = NULL;
}

static enum rc source_attempts(void *ctx, size_t i, struct state_attempts *out, struct err *e)
{
    struct run *r = ctx;
    return state_get_attempts(r->state, r->set.entries[r->pending[i]].key, out, e);
}

static enum rc source_commit(void *ctx, size_t i, const struct state_attempts *a, struct err *e)
{
    struct run *r = ctx;
    return state_put_attempts(r->state, r->set.entries[r->pending[i]].key, a, e);
}

static enum rc source_settle(void *ctx, size_t i, const struct dispatch_outcome *o, struct err *e)
{
    struct run *r = ctx;
    struct job_fault fault = {0};
    struct job_timing t = timing_of(o, r->held[i]);
    if (o->done) return store_answer(r, r->pending[i], r->held[i], o, e);
    if (o->failed) {
        int status = strcmp(o->failed->code, "request_too_large") ? 500 : 413;
        job_fault_set(&fault, status, status == 500 ? "server_error" : "invalid_request_error", o->failed->code, "", "%s",
                      o->failed->text);
    } else if (o->timed_out_us) {
        job_fault_set(&fault, 408, "timeout_error", "request_timeout", "", "the job was cancelled after %.15g s, its time limit",
                      (double)o->timed_out_us / 1e6);
    } else {
        job_fault_set(&fault, 500, "server_error", "engine_error", "",
                      "the engine failed %lld times while this job ran, lastly alone: %s",
                      (long long)o->attempts.failures, o->killed_ranks);
    }
    return run_jobs_store_fault(r, r->pending[i], &fault, &t, e);
}

static const char *job_name(const void *ctx, size_t i)
{
    const struct run *r = ctx;
    return r->set.entries[r->auditing ? r->audit.items[i].entry : r->pending[i]].custom_id;
}

/* Who asks is told, also by a quiet run. */
static void answer_status(struct run *r, const struct dispatch_view *v)
{
    struct buf text = {0};
    progress_hide(&r->progress);
    run_status_text(&r->progress, v, job_name, r, &text);
    if (!text.failed) fd_write_all(STDERR_FILENO, text.data, text.len);
    buf_free(&text);
}

static void source_turn(void *ctx, const struct dispatch_view *v)
{
    struct run *r = ctx;
    r->tokens = r->tokens_before + v->tokens;
    r->rank_restarts = r->restarts_before + v->restarts;
    r->in_flight = (size_t)v->in_flight;
    run_jobs_tell_metrics(r);
    progress_update(&r->progress, r->done, r->failed, r->tokens);
    if (v->asked) answer_status(r, v);
}

static void source_before_log(void *ctx) { progress_hide(&((struct run *)ctx)->progress); }

static struct dispatch_source source_of(struct run *r, size_t n)
{
    return (struct dispatch_source){.ctx = r, .n = n, .release = source_release, .turn = source_turn, .before_log = source_before_log};
}

struct dispatch_source run_jobs_source(struct run *r)
{
    struct dispatch_source s = source_of(r, r->n_pending);
    s.build = source_build;
    s.attempts = source_attempts;
    s.commit = source_commit;
    s.settle = source_settle;
    return s;
}

/* ---- the source of an audit ---- */

/* Nothing of it reaches the state: what is wrong with a second computation is no fault of the job. */
static enum rc audit_build(void *ctx, size_t i, struct engine_request *out, int64_t *timeout_us, struct err *e)
{
    struct run *r = ctx;
    struct job_fault fault = {0};
    struct job_timing t = {0};
    return hold(r, i, r->audit.items[i].entry, out, timeout_us, &fault, &t, e);
}

static enum rc audit_attempts(void *ctx, size_t i, struct state_attempts *out, struct err *e)
{
    (void)ctx, (void)i, (void)e;
    *out = (struct state_attempts){0};
    return RC_OK;
}

static enum rc audit_commit(void *ctx, size_t i, const struct state_attempts *a, struct err *e)
{
    (void)ctx, (void)i, (void)a, (void)e;
    return RC_OK;
}

static enum rc audit_settle(void *ctx, size_t i, const struct dispatch_outcome *o, struct err *e)
{
    struct run *r = ctx;
    struct buf name = {0};
    bool computed = o->done || o->failed;
    const char *what = computed ? audit_compare(&r->audit, &r->audit.items[i], o->done) : NULL;
    if (computed && !what) return RC_OK;
    text_append_printable(&name, job_name(r, i), SIZE_MAX);
    progress_hide(&r->progress);
    if (what)
        log_line(LOG_ERROR, "AUDIT FAILURE %s: computed again, %s differs", name.data, what);
    else
        log_line(LOG_WARN, "audit: %s could not be computed again", name.data);
    enum rc rc = name.failed ? err_no_memory(e) : RC_OK;
    buf_free(&name);
    return rc;
}

struct dispatch_source run_jobs_audit_source(struct run *r)
{
    struct dispatch_source s = source_of(r, r->audit.n);
    s.build = audit_build;
    s.attempts = audit_attempts;
    s.commit = audit_commit;
    s.settle = audit_settle;
    return s;
}
