/* cmd_run: job files to one archive, through durable state.
 *
 * Everything that can be wrong is found before a rank starts: the job files, the model, the state's identity and lock. Jobs
 * are registered under keys that name exactly what decides their answers; those that have a result already are left out,
 * so the first run, its continuation and a run with nothing to do are one path; a state that is there already is opened first,
 * so that lines it has the answers of need not even be parsed. While jobs run, this file is the source that dispatch asks: it
 * builds prompts just before they leave and stores each outcome before it counts. The archive is made from the state at the
 * end, also of a run that stopped early; where nothing changed it is left untouched.
 *
 * With --audit a sample of this run's answers is computed again when all is done and the archive is there: by new ranks, which
 * have read the weights anew, without the cache. A difference is an error of the run, and of no job: nobody knows which answer
 * was right.
 *
 * Deadlines become one time at which work ends, --grace before the earliest. Outside --window nothing is even opened.
 *
 * Signals are read from a descriptor while ranks run. A signal that the caller had set to be ignored (nohup, a shell's
 * background job) stays ignored. */
#define _GNU_SOURCE
#include <errno.h>
#include <libgen.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "audit.h"
#include "checkpoint_store.h"
#include "deadline.h"
#include "dispatch.h"
#include "export.h"
#include "job_result.h"
#include "job_set.h"
#include "metrics.h"
#include "progress.h"
#include "prompt.h"
#include "rank_main.h"
#include "run_report.h"
#include "run_status.h"
#include "state.h"
#include "text_check.h"

/* A job whose request is with a group. */
struct held_job {
    struct job_spec spec;
    struct prompt prompt;
};

struct run {
    const struct options *options;
    struct options rank_options; /* as the ranks get them */
    struct buf checkpoints;      /* the folder */
    struct deadline deadline;
    struct job_set set;
    struct prompter *prompter;
    struct state *state;
    struct buf identity, folder; /* folder: of the state */
    size_t *pending;        /* entries without a result, in the order they start */
    size_t n_pending;
    struct held_job **held; /* by pending index; NULL: not with a group, nor the one after one */
    struct progress progress;
    size_t done, failed;    /* records of this registration, earlier runs included */
    uint64_t tokens;
    int64_t prompt_tokens, cached_tokens; /* of this run: of answered prompts; of those, found in the cache */
    int64_t rank_restarts;
    size_t in_flight;
    struct audit audit;
    bool auditing;          /* what runs are the audit's items, not pending jobs */
    uint64_t tokens_before; /* of dispatches before this one */
    int64_t restarts_before;
    int64_t start_us, started_s;
    struct metrics metrics;
    bool metrics_failed;
};

/* ---- figures ---- */

static struct run_report report_of(const struct run *r)
{
    return (struct run_report){.jobs = r->set.n_entries, .done = r->done, .failed = r->failed, .in_flight = r->in_flight,
                               .tokens = r->tokens, .cached_tokens = r->cached_tokens, .rank_restarts = r->rank_restarts,
                               .wall_us = clock_now_us() - r->start_us, .started_s = r->started_s,
                               .deadline_s = r->deadline.source ? r->deadline.at_s : 0, .archive = r->options->out,
                               .state = r->folder.data, .audit_asked = r->options->audit_percent > 0,
                               .audited = r->audit.computed, .audit_different = r->audit.different,
                               .audit_skipped = r->audit.n - r->audit.computed};
}

/* Metrics that cannot be written are worth one warning, and no more. */
static void metrics_warn(struct run *r, const struct err *e)
{
    char line[sizeof e->text + 400];
    if (r->metrics_failed) return;
    r->metrics_failed = true;
    progress_hide(&r->progress);
    log_line(LOG_WARN, "going on without metrics: %s", err_format(e, line, sizeof line));
}

static void tell_metrics(struct run *r)
{
    struct run_report report = report_of(r);
    struct err e = {0};
    if (r->options->metrics && metrics_turn(&r->metrics, &report, &e) != RC_OK) metrics_warn(r, &e);
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

static enum rc store_fault(struct run *r, size_t index, const struct job_fault *fault, const struct job_timing *t,
                           struct err *e)
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

static void free_held(struct held_job *h)
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

static bool has_result(const struct run *r, const unsigned char key[STATE_KEY_BYTES])
{
    enum state_result_kind kind;
    return state_result_kind(r->state, key, &kind, NULL) == RC_OK;
}

/* Builds the next job's prompt before its time, to see what it shares with the one before. A job that fails here fails in its time. */
static bool look_ahead(struct run *r, size_t i)
{
    struct job_fault fault = {0};
    if (i >= r->n_pending || has_result(r, r->set.entries[r->pending[i]].key)) return false;
    if (r->held[i]) return true;
    r->held[i] = calloc(1, sizeof *r->held[i]);
    if (r->held[i] && build_held(r, r->pending[i], r->held[i], &fault)) return true;
    free_held(r->held[i]);
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
        free_held(h);
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
        rc = store_fault(r, r->pending[i], &fault, &t, e);
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
    free_held(r->held[i]);
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
    return store_fault(r, r->pending[i], &fault, &t, e);
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
    tell_metrics(r);
    progress_update(&r->progress, r->done, r->failed, r->tokens);
    if (v->asked) answer_status(r, v);
}

static void source_before_log(void *ctx) { progress_hide(&((struct run *)ctx)->progress); }

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

/* ---- before and after ---- */

/* RC_RETRY: not now. */
static enum rc find_deadline(struct run *r, struct err *e)
{
    const struct options *o = r->options;
    enum rc rc = deadline_find(&o->deadline, getenv("SLURM_JOB_END_TIME"), (int64_t)time(NULL), &r->deadline, e);
    if (rc != RC_OK || !o->final || r->deadline.source) return rc;
    return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "no_deadline", "--final needs a deadline: --deadline, --until or --window");
}

static int64_t end_of_work_us(const struct run *r)
{
    if (!r->deadline.source) return INT64_MAX;
    return r->deadline.at_s * 1000000 - (int64_t)(r->options->grace_s * 1e6);
}

/* The state and what it is bound to. */
static enum rc open_state(struct run *r, struct err *e)
{
    const struct options *o = r->options;
    enum rc rc = prompter_open(o, &r->prompter, e);
    if (rc == RC_OK && prompter_synthetic(r->prompter))
        log_line(LOG_WARN, "the weights of %s are made up: answers are noise", o->model);
    if (rc == RC_OK) rc = rank_identity(o, 0, &r->identity, e);
    if (rc == RC_OK) rc = state_open(r->folder.data, options_state_mode(o, STATE_WRITE), &r->state, e);
    return rc == RC_OK ? state_bind_identity(r->state, r->identity.data, e) : rc;
}

static enum rc open_all(struct run *r, struct err *e)
{
    const struct options *o = r->options;
    /* Files that are wrong make no state. */
    bool there = state_is_there(r->folder.data);
    enum rc rc = there ? open_state(r, e) : RC_OK;
    if (rc == RC_OK) rc = job_set_load(o, r->state, job_problem_print, NULL, &r->set, e);
    if (rc == RC_OK && !there) rc = open_state(r, e);
    if (rc == RC_OK && !buf_printf(&r->checkpoints, "%s/checkpoints", r->folder.data)) rc = err_no_memory(e);
    if (rc == RC_OK) rc = job_set_register(&r->set, r->state, r->identity.data, e);
    /* A night's work must not end at an output that may not be written. */
    if (rc == RC_OK) rc = export_check(r->state, o->out, o->force, e);
    return rc;
}

/* Whether the file system of a folder can take anything at all. */
static enum rc room_check(const char *folder, struct err *e)
{
    enum { LEAST_KIB = 1024 }; /* some records and their index; whoever has less has no night before him */
    struct statvfs fs;
    if (statvfs(folder, &fs) || !fs.f_blocks) return RC_OK; /* some file systems do not say; the first write will */
    const unsigned long long free_kib = (unsigned long long)fs.f_bavail * fs.f_frsize / 1024;
    if (free_kib >= LEAST_KIB) return RC_OK;
    return err_set(e, RC_FAILED, EXIT_IO, "disk_full", "the disk of %s is full: %llu KiB are free, a run needs %d to begin", folder,
                   free_kib, LEAST_KIB);
}

/* Before a run that has something to write. */
static enum rc preflight(const struct options *o, struct err *e)
{
    struct buf folder = {0};
    char *out = strdup(o->out);
    enum rc rc = out ? options_state_folder(o, &folder, e) : err_no_memory(e);
    if (rc == RC_OK) rc = room_check(folder.data, e);
    if (rc == RC_OK) rc = room_check(dirname(out), e);
    buf_free(&folder);
    free(out);
    return rc;
}

static const struct job_head *head_of_entry(const void *ctx, size_t index) { return &((const struct job_set *)ctx)->entries[index].head; }

static int priority_of_entry(const void *ctx, size_t index) { return ((const struct job_set *)ctx)->entries[index].priority; }

static void order_pending(struct run *r)
{
    const struct options *o = r->options;
    bool by_head = o->order ? !strcmp(o->order, "tree") : o->cache != NULL;
    const struct job_order order = {priority_of_entry, by_head ? head_of_entry : NULL, &r->set};
    job_order_sort(&order, r->pending, r->n_pending);
}

/* Counts what is there, records what is known to fail, lists what must run. */
static enum rc plan(struct run *r, struct err *e)
{
    struct state_counts c;
    enum rc rc = state_count(r->state, &c, e);
    if (rc != RC_OK) return rc;
    r->done = c.done;
    r->failed = c.failed;
    if (c.pending && (rc = preflight(r->options, e)) != RC_OK) return rc;
    r->pending = calloc(r->set.n_entries + 1, sizeof *r->pending);
    r->held = calloc(r->set.n_entries + 1, sizeof *r->held);
    if (!r->pending || !r->held) return err_no_memory(e);
    progress_start(&r->progress, r->set.n_entries, c.done + c.failed, r->options->quiet);
    for (size_t i = 0; i < r->set.n_entries && rc == RC_OK; i++) {
        const struct job_entry *entry = &r->set.entries[i];
        const struct job_timing none = {0};
        enum state_result_kind kind;
        if (entry->settled) continue;
        rc = state_result_kind(r->state, entry->key, &kind, e);
        if (rc != RC_RETRY) continue;
        rc = RC_OK;
        if (entry->fault)
            rc = store_fault(r, i, entry->fault, &none, e);
        else
            r->pending[r->n_pending++] = i;
    }
    if (rc == RC_OK) order_pending(r);
    return rc;
}

static const int stops[] = {SIGINT, SIGTERM, SIGHUP};

/* From here on SIGUSR1 waits until there is something to tell. */
static void hold_status_signal(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

/* Signals that end a run and the one that asks, blocked and readable; those set to be ignored before main are left alone. -1
 * with errno on failure. */
static int open_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        struct sigaction now;
        if (!sigaction(stops[i], NULL, &now) && now.sa_handler != SIG_IGN) sigaddset(&set, stops[i]);
    }
    if (sigprocmask(SIG_BLOCK, &set, NULL)) return -1;
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* After a first signal, whatever is left to do: the next one ends the process. Those that came with the first count with it. */
static void lift_signals(int signals)
{
    struct signalfd_siginfo info;
    sigset_t set;
    while (read(signals, &info, sizeof info) > 0) {}
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) sigaddset(&set, stops[i]);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}

static bool keep_checkpoint(void *ctx, const unsigned char key[STATE_KEY_BYTES])
{
    return !has_result(ctx, key);
}

static bool keep_none(void *ctx, const unsigned char key[STATE_KEY_BYTES]) { return (void)ctx, (void)key, false; }

/* One dispatch over n jobs of a source without n, end and what is for people's eyes. */
static enum rc run_source(struct run *r, const struct options *o, struct dispatch_source *source, size_t n,
                          struct dispatch_result *out, struct err *e)
{
    source->ctx = r;
    source->n = n;
    source->end_us = end_of_work_us(r);
    source->release = source_release;
    source->turn = source_turn;
    source->before_log = source_before_log;
    *out = (struct dispatch_result){.end = DISPATCH_DONE};
    if (!n) return RC_OK;
    int signals = open_signals();
    if (signals < 0) return err_errno(e, RC_FAILED, EXIT_INTERNAL, "no_signalfd", "cannot watch for signals");
    enum rc rc = dispatch_run(o, r->identity.data, source, signals, out, e);
    r->tokens = r->tokens_before += out->tokens;
    r->rank_restarts = r->restarts_before += out->restarts;
    r->in_flight = 0;
    if (out->end == DISPATCH_STOPPED) lift_signals(signals);
    close(signals);
    return rc;
}

static enum rc run_pending(struct run *r, struct dispatch_result *out, struct err *e)
{
    struct dispatch_source source = {.build = source_build, .attempts = source_attempts, .commit = source_commit,
                                     .settle = source_settle};
    r->rank_options = *r->options;
    r->rank_options.checkpoints = r->checkpoints.data;
    /* Of a job that was answered just before an earlier runner died. */
    if (r->n_pending) checkpoint_sweep(r->checkpoints.data, keep_checkpoint, r);
    enum rc rc = run_source(r, &r->rank_options, &source, r->n_pending, out, e);
    if (r->n_pending) checkpoint_sweep(r->checkpoints.data, rc == RC_OK && out->end == DISPATCH_DONE ? keep_none : keep_checkpoint, r);
    return rc;
}

/* What cannot be computed again in time, or because a signal came, is skipped: the jobs are done. */
static enum rc run_audit(struct run *r, struct err *e)
{
    struct dispatch_source source = {.build = audit_build, .attempts = audit_attempts, .commit = audit_commit,
                                     .settle = audit_settle};
    struct dispatch_result ignored;
    struct options cold = *r->options;
    cold.cache = NULL;
    cold.fault = (struct fault){0}; /* strikes once a run */
    audit_sort(&r->audit);
    r->auditing = true;
    return run_source(r, &cold, &source, r->audit.n, &ignored, e);
}

/* A run that failed in the middle has finished jobs as well: the archive holds them, and the first error stays the one. */
static enum rc finish(struct run *r, enum rc ran, const struct dispatch_result *d, struct err *e)
{
    if (!r->state || !r->pending) return ran;
    const struct export_options how = {.force = r->options->force,
                                       .final = r->options->final && d->end == DISPATCH_OUT_OF_TIME,
                                       .by_completion = r->options->output_by_completion};
    enum rc rc = export_archive(r->state, r->options->out, &how, e);
    return ran == RC_OK ? rc : ran;
}

static int exit_status_of(const struct run *r, const struct dispatch_result *d)
{
    if (d->end == DISPATCH_STOPPED) return EXIT_RESUMABLE;
    if (d->end == DISPATCH_OUT_OF_TIME) return r->options->final ? EXIT_SOME_FAILED : EXIT_RESUMABLE;
    if (d->end == DISPATCH_GAVE_UP) return d->exit_status;
    if (r->audit.different) return EXIT_INTERNAL;
    return r->failed ? EXIT_SOME_FAILED : EXIT_DONE;
}

static const char *note_of(const struct run *r, const struct dispatch_result *d, char *scratch, size_t scratch_bytes)
{
    if (d->end == DISPATCH_OUT_OF_TIME) {
        snprintf(scratch, scratch_bytes, "ended by %s; %s", r->deadline.source,
                 r->options->final ? "what is pending is batch_expired in the archive" : "a later run continues");
        return scratch;
    }
    if (d->end == DISPATCH_STOPPED) return "stopped; the same command continues";
    if (d->end == DISPATCH_GAVE_UP && d->exit_status == EXIT_IO) return "a disk failed; the same command continues";
    if (d->end == DISPATCH_GAVE_UP) return "the ranks are unavailable; the same command continues";
    if (r->audit.n) {
        snprintf(scratch, scratch_bytes, "audit of %zu answers: %zu differ, %zu skipped", r->audit.n, r->audit.different,
                 r->audit.n - r->audit.computed);
        return scratch;
    }
    return "";
}

/* How the run ended, in the words of schemas/run.schema.json. */
static const char *end_of(enum rc rc, bool outside, const struct dispatch_result *d)
{
    static const char *const ends[] = {[DISPATCH_DONE] = "done", [DISPATCH_STOPPED] = "stopped",
                                       [DISPATCH_OUT_OF_TIME] = "out_of_time", [DISPATCH_GAVE_UP] = "gave_up"};
    return outside ? "out_of_time" : rc == RC_OK ? ends[d->end] : "error";
}

/* The object of --json. Returns the exit status: a summary that cannot be made is an error of its own. */
static int print_summary(const struct run_report *report)
{
    struct buf line = {0};
    int status = report->exit_status;
    if (run_report_json(report, &line)) {
        fwrite(line.data, 1, line.len, stdout);
    } else {
        log_line(LOG_ERROR, "no memory for the summary");
        status = EXIT_INTERNAL;
    }
    buf_free(&line);
    return status;
}

/* Metrics of another run are not replaced by one that was none: outside its window, or beside the other. */
static int tell_the_end(struct run *r, const char *end, bool outside, int status, const struct err *error)
{
    struct run_report report = report_of(r);
    struct err e = {0};
    report.end = end;
    report.exit_status = status;
    report.error = error;
    bool ran = !outside && strcmp(error->code, "state_locked");
    if (r->options->metrics && ran && metrics_write(&r->metrics, &report, &e) != RC_OK) metrics_warn(r, &e);
    return r->options->json ? print_summary(&report) : status;
}

static void close_all(struct run *r)
{
    for (size_t i = 0; i < r->n_pending; i++) free_held(r->held[i]);
    free(r->held);
    free(r->pending);
    state_close(r->state);
    buf_free(&r->identity);
    buf_free(&r->checkpoints);
    buf_free(&r->folder);
    prompter_close(r->prompter);
    job_set_free(&r->set);
    audit_free(&r->audit);
}

static enum rc run_all(struct run *r, struct dispatch_result *d, struct err *e)
{
    enum rc rc = open_all(r, e);
    if (rc == RC_OK) rc = plan(r, e);
    if (rc == RC_OK) tell_metrics(r);
    if (rc == RC_OK) rc = run_pending(r, d, e);
    rc = finish(r, rc, d, e);
    return rc == RC_OK && d->end == DISPATCH_DONE ? run_audit(r, e) : rc;
}

int cmd_run(const struct options *o)
{
    struct run r = {.options = o, .start_us = clock_now_us(), .started_s = (int64_t)time(NULL), .metrics = {.path = o->metrics}};
    struct err e = {0};
    struct dispatch_result d = {.end = DISPATCH_DONE};
    char line[sizeof e.text + 400];
    hold_status_signal();
    if (o->quiet) log_set(LOG_WARN, "");
    enum rc rc = options_state_folder(o, &r.folder, &e);
    if (rc == RC_OK) rc = find_deadline(&r, &e);
    bool outside = rc == RC_RETRY;
    if (rc == RC_OK) rc = run_all(&r, &d, &e);
    int status = rc == RC_OK ? exit_status_of(&r, &d) : e.exit_status ? e.exit_status : EXIT_INTERNAL;
    progress_hide(&r.progress);
    if (outside) {
        log_line(LOG_INFO, "%s", e.text);
    } else if (rc != RC_OK) {
        log_line(LOG_ERROR, "%s", err_format(&e, line, sizeof line));
    } else {
        progress_update(&r.progress, r.done, r.failed, r.tokens);
        r.progress.prompt_tokens = (uint64_t)r.prompt_tokens;
        r.progress.cached_tokens = (uint64_t)r.cached_tokens;
        progress_finish(&r.progress, note_of(&r, &d, line, sizeof line), o->out);
    }
    status = tell_the_end(&r, end_of(rc, outside, &d), outside, status, &e);
    close_all(&r);
    return status;
}
