/* dispatch: drives groups of ranks over the pending jobs of a run.
 *
 * Jobs are numbers 0 .. n-1 in the order they should start. What a job is belongs to the source: it builds the request,
 * commits the attempt, and settles the outcome durably. Dispatch decides when: it keeps every group fed, takes back what a
 * dying group had in flight, counts failures, and isolates jobs that keep killing ranks. One thread. */
#ifndef TANDEM_DISPATCH_H
#define TANDEM_DISPATCH_H

#include "base.h"
#include "options.h"
#include "state.h"
#include "supervise.h"

/* How a job that reached the ranks ended. */
struct dispatch_outcome {
    const struct wire_done *done;   /* an answer; or NULL */
    const struct wire_text *failed; /* the ranks refused it or failed on it alone; or NULL */
    const char *killed_ranks;       /* it kept killing its ranks: the last reason; or NULL */
    int64_t timed_out_us;           /* it was computed for longer than this, and cancelled; or 0 */
    struct state_attempts attempts;
    int group;
};

/* How things stand, for people's eyes. */
enum { DISPATCH_VIEW_JOBS = 32 };
struct dispatch_group_view {
    enum group_state state;
    int64_t restarts;
    int in_flight;
};
struct dispatch_job_view {
    size_t job;
    int group;
    int64_t running_us; /* since its first row; -1: its group has not come to it */
};
struct dispatch_view {
    bool asked;      /* SIGUSR1 asks for it to be shown */
    uint64_t tokens; /* sampled so far in this run by all groups */
    int64_t restarts;
    int in_flight;
    const struct dispatch_group_view *groups;
    int n_groups;
    struct dispatch_job_view jobs[DISPATCH_VIEW_JOBS]; /* of those in flight, by group, the longest there first */
    int n_jobs;
};

struct dispatch_source {
    void *ctx;
    size_t n;
    int64_t end_us; /* UNIX time in microseconds at which work ends; INT64_MAX: when all is done */
    /* Builds job i's request; its pointers live until release. timeout_us: how long it may be computed, 0: as long as it takes.
     * RC_OK, or RC_RETRY: the job failed on its own and the source has settled it; anything else ends the run. */
    enum rc (*build)(void *ctx, size_t i, struct engine_request *out, int64_t *timeout_us, struct err *e);
    void (*release)(void *ctx, size_t i);
    /* The counts of job i as the state has them, and commits them. */
    enum rc (*attempts)(void *ctx, size_t i, struct state_attempts *out, struct err *e);
    enum rc (*commit)(void *ctx, size_t i, const struct state_attempts *a, struct err *e);
    /* Settles job i durably. */
    enum rc (*settle)(void *ctx, size_t i, const struct dispatch_outcome *o, struct err *e);
    /* Called at every turn. May be NULL. */
    void (*turn)(void *ctx, const struct dispatch_view *v);
    /* Called before a log line is written (a progress bar makes room). May be NULL. */
    void (*before_log)(void *ctx);
};

enum dispatch_end {
    DISPATCH_DONE,    /* every job is settled */
    DISPATCH_STOPPED, /* a signal: what ran is saved, or could finish within the grace; the rest is pending */
    DISPATCH_OUT_OF_TIME, /* end_us: what could finish until then is settled, what ran is saved, the rest is pending */
    DISPATCH_GAVE_UP  /* no group is left; exit_status says what the command should end with */
};
struct dispatch_result {
    enum dispatch_end end;
    int exit_status; /* GAVE_UP */
    int64_t restarts;
    uint64_t tokens;
};

/* Starts o->groups groups, runs all jobs, closes the groups; after end_us it starts nothing. Where ranks make checkpoints, stopping is
 * saving what runs, within o->grace_s; where not, running jobs may finish: within the grace after a signal, until end_us. signal_fd: a
 * signalfd; SIGUSR1 asks for a view, the first other signal means stop within o->grace_s (one that comes later than half a second
 * after it ends the process); -1: none. On an error of the source the groups are killed and the error is returned. */
enum rc dispatch_run(const struct options *o, const char *identity, const struct dispatch_source *source, int signal_fd,
                     struct dispatch_result *out, struct err *e);

#endif
