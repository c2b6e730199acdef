/* run_jobs: the jobs of a run, as dispatch asks for them: builds prompts just before they leave, stores each outcome before it counts,
 * and keeps the run's figures. For cmd_run.
 *
 * A second source is the audit's: answers of this run are computed again and compared; nothing of that reaches the state. */
#ifndef TANDEM_RUN_JOBS_H
#define TANDEM_RUN_JOBS_H

#include "audit.h"
#include "deadline.h"
#include "dispatch.h"
#include "job_result.h"
#include "job_set.h"
#include "metrics.h"
#include "progress.h"
#include "prompt.h"
#include "run_report.h"
#include "state.h"

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

/* How things stand, to be reported. */
struct run_report run_jobs_report(const struct run *r);
/* Metrics that cannot be written are worth one warning, and no more. */
void run_jobs_warn_metrics(struct run *r, const struct err *e);
void run_jobs_tell_metrics(struct run *r);

bool run_jobs_has_result(const struct run *r, const unsigned char key[STATE_KEY_BYTES]);
/* The record of an entry that cannot run, or did not end well. */
enum rc run_jobs_store_fault(struct run *r, size_t index, const struct job_fault *fault, const struct job_timing *t, struct err *e);
void run_jobs_free_held(struct held_job *h); /* NULL is fine */

/* Of the pending jobs, and of the audit's; end_us is the caller's. */
struct dispatch_source run_jobs_source(struct run *r);
struct dispatch_source run_jobs_audit_source(struct run *r);

#endif
