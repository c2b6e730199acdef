/* cmd_run: job files to one archive, through durable state.
 *
 * Everything that can be wrong is found before a rank starts: the job files, the model, the state's identity and lock. Jobs
 * are registered under keys that name exactly what decides their answers; those that have a result already are left out,
 * so the first run, its continuation and a run with nothing to do are one path; a state that is there already is opened first,
 * so that lines it has the answers of need not even be parsed. While jobs run, dispatch asks run_jobs
 * for them. The archive is made from the state at the end, also of a run that stopped early; where nothing changed it is left
 * untouched.
 *
 * With --audit a sample of this run's answers is computed again when all is done and the archive is there: by new ranks, which
 * have read the weights anew, without the cache. A difference is an error of the run, and of no job: nobody knows which answer
 * was right.
 *
 * Deadlines become one time at which work ends, --grace before the earliest. Outside --window nothing is even opened. */
#define _GNU_SOURCE
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "checkpoint_store.h"
#include "export.h"
#include "job_order.h"
#include "rank_main.h"
#include "run_jobs.h"
#include "run_signals.h"

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
            rc = run_jobs_store_fault(r, i, entry->fault, &none, e);
        else
            r->pending[r->n_pending++] = i;
    }
    if (rc == RC_OK) order_pending(r);
    return rc;
}

static bool keep_checkpoint(void *ctx, const unsigned char key[STATE_KEY_BYTES])
{
    return !run_jobs_has_result(ctx, key);
}

static bool keep_none(void *ctx, const unsigned char key[STATE_KEY_BYTES]) { return (void)ctx, (void)key, false; }

/* One dispatch over the jobs of a source. */
static enum rc run_source(struct run *r, const struct options *o, struct dispatch_source source, struct dispatch_result *out, struct err *e)
{
    source.end_us = end_of_work_us(r);
    *out = (struct dispatch_result){.end = DISPATCH_DONE};
    if (!source.n) return RC_OK;
    int signals = run_signals_open();
    if (signals < 0) return err_errno(e, RC_FAILED, EXIT_INTERNAL, "no_signalfd", "cannot watch for signals");
    enum rc rc = dispatch_run(o, r->identity.data, &source, signals, out, e);
    r->tokens = r->tokens_before += out->tokens;
    r->rank_restarts = r->restarts_before += out->restarts;
    r->in_flight = 0;
    if (out->end == DISPATCH_STOPPED) run_signals_lift(signals);
    close(signals);
    return rc;
}

static enum rc run_pending(struct run *r, struct dispatch_result *out, struct err *e)
{
    r->rank_options = *r->options;
    r->rank_options.checkpoints = r->checkpoints.data;
    /* Of a job that was answered just before an earlier runner died. */
    if (r->n_pending) checkpoint_sweep(r->checkpoints.data, keep_checkpoint, r);
    enum rc rc = run_source(r, &r->rank_options, run_jobs_source(r), out, e);
    if (r->n_pending) checkpoint_sweep(r->checkpoints.data, rc == RC_OK && out->end == DISPATCH_DONE ? keep_none : keep_checkpoint, r);
    return rc;
}

/* What cannot be computed again in time, or because a signal came, is skipped: the jobs are done. */
static enum rc run_audit(struct run *r, struct err *e)
{
    struct dispatch_result ignored;
    struct options cold = *r->options;
    cold.cache = NULL;
    cold.fault = (struct fault){0}; /* strikes once a run */
    audit_sort(&r->audit);
    r->auditing = true;
    return run_source(r, &cold, run_jobs_audit_source(r), &ignored, e);
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
    struct run_report report = run_jobs_report(r);
    struct err e = {0};
    report.end = end;
    report.exit_status = status;
    report.error = error;
    bool ran = !outside && strcmp(error->code, "state_locked");
    if (r->options->metrics && ran && metrics_write(&r->metrics, &report, &e) != RC_OK) run_jobs_warn_metrics(r, &e);
    return r->options->json ? print_summary(&report) : status;
}

static void close_all(struct run *r)
{
    for (size_t i = 0; i < r->n_pending; i++) run_jobs_free_held(r->held[i]);
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
    if (rc == RC_OK) run_jobs_tell_metrics(r);
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
    run_signals_hold_status();
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
