/* dispatch: one loop over groups, jobs and one signal descriptor.
 *
 * Order: a group always takes the lowest waiting job, so jobs start in order and a job that was taken back starts again
 * before later ones. A few more requests than the engine computes at once are kept in flight, so that the next sequence
 * begins in the step after one ends.
 *
 * Blame: when ranks die, everything in flight in that group was there, so all of it is counted; success wipes the count. A
 * job that was there job_failures times is a suspect. Suspects wait until no other job waits, then each runs alone in its
 * group: a job that kills cannot take others with it any more, and after as many failures again it is settled as an error.
 * Settling it is progress, which the supervisor hears before its backoff ends; the batch goes on. A runner that died left
 * its jobs marked as running: one failure each, found when the job is looked at for the first time.
 *
 * Time: where the run has an end, a job starts only if it should be done by then, judged by the jobs answered so far; the
 * first ones start unjudged. What would not is left for another run and others are tried, one a turn, because judging needs
 * the job's prompt. At the end, what is in flight is taken back. The end is of the clock on the wall, which people set; a
 * job's own time limit is of the monotonic clock and runs from its first row.
 *
 * The attempt is committed before the request leaves, the outcome before it is counted. An orderly stop unmarks what was
 * still in flight: being stopped is not a failure. With checkpoints a stop means: compute no more, save what runs. A job goes on from
 * its checkpoint; its second failure in a row ignores it and whatever else was kept, and once it gets further than where it failed
 * its failures count from nothing again. */
#define _GNU_SOURCE
#include "dispatch.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

enum { TURN_MS = 200, SPARE_REQUESTS = 2, CLOSE_GRACE_US = 5000000, COLD_FAILURES = 2, TOGETHER_US = 500000 };

enum job_state { JOB_WAITING, JOB_IN_FLIGHT, JOB_SETTLED, JOB_LEFT }; /* left: it would not be done in time */

struct job {
    enum job_state state;
    bool looked_at; /* attempts were read from the state */
    bool suspect;
    bool timed_out; /* settled, while its answer may be on the way */
    int64_t timeout_us, started_us; /* 0: none; not yet */
    int64_t saved_position;         /* of its newest checkpoint that this run knows of */
    struct state_attempts attempts;
};

/* One group and what it has. */
struct lane {
    struct group *group;
    int index;
    size_t *in_flight; /* in the order of submission */
    int n_in_flight, capacity;
    bool alone; /* a suspect runs: nothing beside it */
    bool gone;  /* gave up */
    bool stopped; /* what runs is saved, nothing is computed any more */
    uint64_t tokens_before, tokens_now; /* of earlier lives, of this one */
};

/* What the jobs answered in this run took, added up. */
struct pace {
    int64_t jobs, queue_us, prefill_us, decode_us, prompt_tokens, answer_tokens;
};

struct dispatch {
    const struct options *options;
    const struct dispatch_source *source;
    struct job *jobs;
    struct lane *lanes;
    struct pollfd *fds;
    struct dispatch_group_view *groups; /* of a view */
    int n_lanes, signal_fd;
    size_t first_waiting; /* no job before it waits, suspects left out */
    size_t settled, left, suspects_waiting;
    bool left_one; /* in this turn: do not wait, the next one may be in time */
    struct pace pace;
    bool asked, stopping, out_of_time; /* the latter: because the end has come */
    int64_t stop_by_us, signalled_us;
    enum dispatch_end end;
    int exit_status;
};

/* ---- time ---- */

static int64_t unix_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static bool end_has_come(const struct dispatch *d) { return unix_now_us() >= d->source->end_us; }

static void pace_add(struct pace *p, const struct wire_done *done)
{
    p->jobs++;
    p->queue_us += done->timing.queue_us;
    p->prefill_us += done->timing.prefill_us;
    p->decode_us += done->timing.decode_us;
    p->prompt_tokens += (int64_t)done->prompt_tokens;
    p->answer_tokens += (int64_t)done->n_tokens;
}

/* How long a request would take at the pace so far: its own prompt, and an answer of the mean length. Before the first answer
 * nothing is known, and nothing is held back. */
static double estimate_us(const struct pace *p, const struct engine_request *r)
{
    if (!p->jobs) return 0;
    double jobs = (double)p->jobs, answer = (double)p->answer_tokens / jobs;
    double us = (double)p->queue_us / jobs;
    if (answer > r->max_tokens) answer = r->max_tokens;
    if (p->prompt_tokens) us += (double)r->prompt_tokens * (double)p->prefill_us / (double)p->prompt_tokens;
    if (p->answer_tokens) us += answer * (double)p->decode_us / (double)p->answer_tokens;
    return us;
}

static bool would_be_in_time(const struct dispatch *d, const struct engine_request *r)
{
    return (double)unix_now_us() + estimate_us(&d->pace, r) <= (double)d->source->end_us;
}

/* ---- jobs ---- */

static bool has_checkpoints(const struct dispatch *d) { return d->options->checkpoints && d->options->checkpoint_us; }

static bool over_the_limit(const struct dispatch *d, const struct job *j)
{
    return j->attempts.failures >= 2 * (int64_t)d->options->job_failures;
}

static void set_waiting(struct dispatch *d, size_t i)
{
    struct job *j = &d->jobs[i];
    j->state = JOB_WAITING;
    j->suspect = j->attempts.failures >= d->options->job_failures;
    if (j->suspect)
        d->suspects_waiting++;
    else if (i < d->first_waiting)
        d->first_waiting = i;
}

static enum rc settle(struct dispatch *d, size_t i, const struct dispatch_outcome *o, struct err *e)
{
    enum rc rc = d->source->settle(d->source->ctx, i, o, e);
    if (rc != RC_OK) return rc;
    d->jobs[i].state = JOB_SETTLED;
    d->settled++;
    return RC_OK;
}

/* What an earlier run left about a job. May settle it: its runners died too often. */
static enum rc look_at(struct dispatch *d, size_t i, struct err *e)
{
    struct job *j = &d->jobs[i];
    enum rc rc = d->source->attempts(d->source->ctx, i, &j->attempts, e);
    if (rc != RC_OK) return rc;
    j->looked_at = true;
    if (!j->attempts.running) {
        set_waiting(d, i);
        return RC_OK;
    }
    j->attempts.running = false;
    j->attempts.failures++;
    rc = d->source->commit(d->source->ctx, i, &j->attempts, e);
    if (rc != RC_OK) return rc;
    if (!over_the_limit(d, j)) {
        set_waiting(d, i);
        return RC_OK;
    }
    struct dispatch_outcome o = {.killed_ranks = "the runner died while it ran", .attempts = j->attempts};
    return settle(d, i, &o, e);
}

/* The next job to start: the lowest that waits; when there is none and the lane is empty, the lowest suspect. RC_RETRY:
 * none for this lane now. */
static enum rc next_job(struct dispatch *d, const struct lane *l, size_t *out, struct err *e)
{
    size_t n = d->source->n;
    while (d->first_waiting < n) {
        size_t i = d->first_waiting;
        struct job *j = &d->jobs[i];
        if (j->state == JOB_WAITING && !j->looked_at) {
            enum rc rc = look_at(d, i, e);
            if (rc != RC_OK) return rc;
            continue;
        }
        if (j->state == JOB_WAITING && !j->suspect) {
            *out = i;
            return RC_OK;
        }
        d->first_waiting++;
    }
    if (!d->suspects_waiting || l->n_in_flight) return RC_RETRY;
    for (size_t i = 0; i < n; i++) {
        if (d->jobs[i].state != JOB_WAITING) continue;
        *out = i;
        return RC_OK;
    }
    return RC_RETRY;
}

/* ---- to the ranks ---- */

static enum rc refuse(struct dispatch *d, struct lane *l, size_t i, const struct err *why, struct err *e)
{
    struct wire_text text = {.id = i + 1};
    memcpy(text.code, why->code, sizeof text.code);
    memcpy(text.text, why->text, sizeof text.text);
    struct dispatch_outcome o = {.failed = &text, .attempts = d->jobs[i].attempts, .group = l->index};
    return settle(d, i, &o, e);
}

/* RC_RETRY: it would not be done in time, and is left. */
static enum rc start_job(struct dispatch *d, struct lane *l, size_t i, struct err *e)
{
    const struct dispatch_source *s = d->source;
    struct job *j = &d->jobs[i];
    struct engine_request r = {0};
    struct err refused = {0};
    if (j->suspect) d->suspects_waiting--;
    enum rc rc = s->build(s->ctx, i, &r, &j->timeout_us, e);
    if (rc == RC_RETRY) {
        j->state = JOB_SETTLED;
        d->settled++;
        return RC_OK;
    }
    if (rc != RC_OK) return rc;
    if (!would_be_in_time(d, &r)) {
        j->state = JOB_LEFT;
        d->left++;
        d->left_one = true;
        rc = RC_RETRY;
        goto release;
    }
    r.id = i + 1;
    r.resume = j->attempts.attempts > 0;
    r.cold = j->attempts.failures >= COLD_FAILURES;
    j->started_us = 0;
    j->attempts.attempts++;
    j->attempts.running = true;
    rc = s->commit(s->ctx, i, &j->attempts, e);
    if (rc != RC_OK) goto release;
    rc = group_submit(l->group, &r, &refused);
    if (rc == RC_OK) {
        j->state = JOB_IN_FLIGHT;
        l->in_flight[l->n_in_flight++] = i;
        l->alone = j->suspect;
        return RC_OK;
    }
    if (rc == RC_BAD_INPUT) {
        rc = refuse(d, l, i, &refused, e);
    } else if (rc == RC_RETRY) {
        set_waiting(d, i);
        rc = RC_OK;
    } else if (e) {
        *e = refused;
    }
release:
    s->release(s->ctx, i);
    return rc;
}

/* A lane takes no more than its share of what is left, so that the group which is ready first does not take everything. */
static bool has_room(const struct dispatch *d, const struct lane *l)
{
    size_t lanes = 0;
    for (int k = 0; k < d->n_lanes; k++) lanes += !d->lanes[k].gone;
    size_t share = (d->source->n - d->settled - d->left + lanes - 1) / lanes;
    return l->n_in_flight < l->capacity && (size_t)l->n_in_flight < share;
}

static enum rc feed(struct dispatch *d, struct lane *l, struct err *e)
{
    while (!d->stopping && !l->gone && has_room(d, l) && !(l->alone && l->n_in_flight)) {
        size_t i = 0;
        if (group_state_of(l->group) != GROUP_READY) return RC_OK;
        enum rc rc = next_job(d, l, &i, e);
        if (rc == RC_RETRY) return RC_OK;
        if (rc == RC_OK) rc = start_job(d, l, i, e);
        if (rc == RC_RETRY) return RC_OK; /* left: the next one at the next turn */
        if (rc != RC_OK) return rc;
    }
    return RC_OK;
}

/* ---- from the ranks ---- */

static bool take_from_lane(struct lane *l, uint64_t id)
{
    for (int k = 0; k < l->n_in_flight; k++) {
        if (l->in_flight[k] + 1 != id) continue;
        l->n_in_flight--;
        memmove(l->in_flight + k, l->in_flight + k + 1, (size_t)(l->n_in_flight - k) * sizeof *l->in_flight);
        return true;
    }
    return false;
}

static enum rc end_job(struct dispatch *d, struct lane *l, uint64_t id, struct dispatch_outcome *o, struct err *e)
{
    if (!take_from_lane(l, id)) {
        if (id && id <= d->source->n && d->jobs[id - 1].timed_out) return RC_OK; /* on the way when it was cancelled */
        log_line(LOG_WARN, "group %d: an answer to request %llu, which it does not have", l->index,
                 (unsigned long long)id);
        return RC_OK;
    }
    size_t i = (size_t)id - 1;
    if (o->done) pace_add(&d->pace, o->done);
    d->jobs[i].attempts.running = false;
    o->attempts = d->jobs[i].attempts;
    o->group = l->index;
    enum rc rc = settle(d, i, o, e);
    /* An answer that could not be stored is no failure of the job. */
    if (rc != RC_OK) d->source->commit(d->source->ctx, i, &o->attempts, NULL);
    d->source->release(d->source->ctx, i);
    group_progress(l->group);
    return rc;
}

/* A job that got further than where it failed last did not fail for its own sake. */
static enum rc take_saved(struct dispatch *d, const struct lane *l, const struct wire_saved *s, struct err *e)
{
    for (int k = 0; k < l->n_in_flight; k++) {
        const size_t i = l->in_flight[k];
        struct job *j = &d->jobs[i];
        if (i + 1 != s->id) continue;
        j->saved_position = s->position;
        if (j->saved_position <= j->attempts.failed_position) return RC_OK;
        group_progress(l->group);
        if (!j->attempts.failures || j->suspect) return RC_OK;
        j->attempts.failures = 0;
        j->attempts.failed_position = j->saved_position;
        return d->source->commit(d->source->ctx, i, &j->attempts, e);
    }
    return RC_OK;
}

static enum rc take_frame(struct dispatch *d, struct lane *l, const struct wire_frame *f, struct err *e)
{
    struct dispatch_outcome o = {0};
    if (f->type == WIRE_TOKEN) {
        l->tokens_now = f->u.token.tokens_total;
        return RC_OK;
    }
    if (f->type == WIRE_STARTED) {
        for (int k = 0; k < l->n_in_flight; k++)
            if (l->in_flight[k] + 1 == f->u.started) d->jobs[l->in_flight[k]].started_us = clock_now_us();
        return RC_OK;
    }
    if (f->type == WIRE_STOPPED) {
        l->stopped = true;
        return RC_OK;
    }
    if (f->type == WIRE_SAVED) return take_saved(d, l, &f->u.saved, e);
    if (f->type == WIRE_DONE) {
        o.done = &f->u.done;
        return end_job(d, l, f->u.done.id, &o, e);
    }
    o.failed = &f->u.text;
    return end_job(d, l, f->u.text.id, &o, e);
}

/* Cancels what has been computed for too long; others in the group go on as they were. */
static enum rc cancel_late(struct dispatch *d, struct lane *l, struct err *e)
{
    enum rc rc = RC_OK;
    int64_t now = clock_now_us();
    for (int k = l->n_in_flight; rc == RC_OK && k-- > 0;) {
        size_t i = l->in_flight[k];
        struct job *j = &d->jobs[i];
        if (!j->timeout_us || !j->started_us || now - j->started_us <= j->timeout_us) continue;
        struct dispatch_outcome o = {.timed_out_us = j->timeout_us};
        j->timed_out = true;
        group_cancel(l->group, i + 1);
        rc = end_job(d, l, i + 1, &o, e);
    }
    return rc;
}

static enum rc blame(struct dispatch *d, struct lane *l, size_t i, const struct group_event *lost, struct err *e)
{
    struct job *j = &d->jobs[i];
    j->state = JOB_WAITING;
    j->attempts.running = false;
    if (lost->exit_status != EXIT_IO) j->attempts.failures++; /* a disk is no job's fault */
    j->attempts.rank_restarts++;
    if (j->saved_position > j->attempts.failed_position) j->attempts.failed_position = j->saved_position;
    enum rc rc = d->source->commit(d->source->ctx, i, &j->attempts, e);
    d->source->release(d->source->ctx, i);
    if (rc != RC_OK) return rc;
    if (!over_the_limit(d, j)) {
        set_waiting(d, i);
        return RC_OK;
    }
    struct dispatch_outcome o = {.killed_ranks = lost->text, .attempts = j->attempts, .group = l->index};
    rc = settle(d, i, &o, e);
    group_progress(l->group);
    return rc;
}

static void make_room_for_log(const struct dispatch *d)
{
    if (d->source->before_log) d->source->before_log(d->source->ctx);
}

static enum rc take_loss(struct dispatch *d, struct lane *l, const struct group_event *lost, struct err *e)
{
    enum rc rc = RC_OK;
    make_room_for_log(d);
    log_line(LOG_WARN, "group %d lost its ranks: %s; %d jobs go back%s", l->index, lost->text, l->n_in_flight,
             lost->exit_status == EXIT_IO ? "" : ", restarting");
    for (int k = 0; k < l->n_in_flight && rc == RC_OK; k++) rc = blame(d, l, l->in_flight[k], lost, e);
    if (rc == RC_OK) l->n_in_flight = 0;
    l->alone = l->stopped = false;
    l->tokens_before += l->tokens_now;
    l->tokens_now = 0;
    return rc;
}

static enum rc take_events(struct dispatch *d, struct lane *l, struct err *e)
{
    struct group_event v;
    enum rc rc = RC_OK;
    while (rc == RC_OK && group_next_event(l->group, &v)) {
        switch (v.kind) {
        case GROUP_EVENT_READY:
            if (group_restarts(l->group)) {
                make_room_for_log(d);
                log_line(LOG_INFO, "group %d is back", l->index);
            }
            break;
        case GROUP_EVENT_FRAME: rc = take_frame(d, l, v.frame, e); break;
        case GROUP_EVENT_LOST: rc = take_loss(d, l, &v, e); break;
        case GROUP_EVENT_GAVE_UP:
            l->gone = true;
            d->exit_status = v.exit_status;
            make_room_for_log(d);
            log_line(LOG_ERROR, "group %d gave up: %s", l->index, v.text);
            break;
        }
    }
    return rc;
}

/* ---- the loop ---- */

static void begin_stop(struct dispatch *d)
{
    d->stopping = true;
    d->stop_by_us = clock_now_us() + (int64_t)(d->options->grace_s * 1e6);
    for (int k = 0; k < d->n_lanes && has_checkpoints(d); k++) group_stop(d->lanes[k].group);
}

/* A second signal ends the process at once; the state is durable and the ranks die with it. Two that come together are one: timeout(1)
 * and schedulers signal the process and then its group. */
static void take_signal(struct dispatch *d)
{
    struct signalfd_siginfo info;
    if (read(d->signal_fd, &info, sizeof info) != (ssize_t)sizeof info) return;
    if (info.ssi_signo == SIGUSR1) {
        d->asked = true;
        return;
    }
    if (d->signalled_us) {
        sigset_t this;
        if (clock_now_us() - d->signalled_us < TOGETHER_US) return;
        sigemptyset(&this);
        sigaddset(&this, (int)info.ssi_signo);
        raise((int)info.ssi_signo);
        sigprocmask(SIG_UNBLOCK, &this, NULL);
    }
    d->signalled_us = clock_now_us();
    begin_stop(d);
    make_room_for_log(d);
    log_line(LOG_WARN, has_checkpoints(d) ? "%s: saving what runs, for %.0f s at most" : "%s: finishing what can finish within %.0f s",
             strsignal((int)info.ssi_signo), d->options->grace_s);
}

static void wait_for_something(struct dispatch *d)
{
    int n = 0, timeout_ms = d->left_one ? 0 : TURN_MS;
    d->left_one = false;
    bool signal_watched = d->signal_fd >= 0;
    if (signal_watched) d->fds[n++] = (struct pollfd){.fd = d->signal_fd, .events = POLLIN};
    for (int k = 0; k < d->n_lanes; k++) n += group_poll_fds(d->lanes[k].group, d->fds + n, &timeout_ms);
    if (d->stopping) {
        int64_t left_ms = (d->stop_by_us - clock_now_us()) / 1000 + 1;
        if (left_ms < timeout_ms) timeout_ms = left_ms > 0 ? (int)left_ms : 0;
    }
    int64_t end_ms = d->source->end_us < INT64_MAX && !d->out_of_time ? (d->source->end_us - unix_now_us()) / 1000 + 1 : timeout_ms;
    if (end_ms < timeout_ms) timeout_ms = end_ms > 0 ? (int)end_ms : 0;
    poll(d->fds, (nfds_t)n, timeout_ms);
    if (signal_watched && d->fds[0].revents) take_signal(d);
}

/* True when the run is over; d->end says as what. */
static bool has_ended(struct dispatch *d)
{
    int in_flight = 0, gone = 0;
    for (int k = 0; k < d->n_lanes; k++) {
        if (!d->lanes[k].stopped) in_flight += d->lanes[k].n_in_flight;
        gone += d->lanes[k].gone;
    }
    if (d->settled == d->source->n) {
        d->end = DISPATCH_DONE;
        return true;
    }
    if (d->stopping) {
        d->end = d->out_of_time ? DISPATCH_OUT_OF_TIME : DISPATCH_STOPPED;
        return !in_flight || gone == d->n_lanes || clock_now_us() >= d->stop_by_us || (!has_checkpoints(d) && end_has_come(d));
    }
    if (gone == d->n_lanes) {
        d->end = DISPATCH_GAVE_UP;
        return true;
    }
    d->end = DISPATCH_OUT_OF_TIME;
    if (d->settled + d->left == d->source->n) return true;
    if (!end_has_come(d)) return false;
    if (!in_flight || !has_checkpoints(d)) return true;
    d->out_of_time = true;
    begin_stop(d);
    return false;
}

static uint64_t tokens_so_far(const struct dispatch *d)
{
    uint64_t tokens = 0;
    for (int k = 0; k < d->n_lanes; k++) tokens += d->lanes[k].tokens_before + d->lanes[k].tokens_now;
    return tokens;
}

static void show(struct dispatch *d)
{
    struct dispatch_view v = {.asked = d->asked, .tokens = tokens_so_far(d), .groups = d->groups, .n_groups = d->n_lanes};
    int64_t now = clock_now_us();
    if (!d->source->turn) return;
    for (int k = 0; k < d->n_lanes; k++) {
        const struct lane *l = &d->lanes[k];
        d->groups[k] = (struct dispatch_group_view){group_state_of(l->group), group_restarts(l->group), l->n_in_flight};
        v.restarts += d->groups[k].restarts;
        v.in_flight += l->n_in_flight;
        for (int q = 0; q < l->n_in_flight && v.n_jobs < DISPATCH_VIEW_JOBS; q++) {
            int64_t started_us = d->jobs[l->in_flight[q]].started_us;
            v.jobs[v.n_jobs++] = (struct dispatch_job_view){l->in_flight[q], k, started_us ? now - started_us : -1};
        }
    }
    d->asked = false;
    d->source->turn(d->source->ctx, &v);
}

static enum rc drive(struct dispatch *d, struct err *e)
{
    for (;;) {
        for (int k = 0; k < d->n_lanes; k++) {
            enum rc rc = feed(d, &d->lanes[k], e);
            if (rc != RC_OK) return rc;
        }
        show(d);
        if (has_ended(d)) return RC_OK;
        wait_for_something(d);
        for (int k = 0; k < d->n_lanes; k++) {
            group_pump(d->lanes[k].group);
            enum rc rc = take_events(d, &d->lanes[k], e);
            if (rc == RC_OK) rc = cancel_late(d, &d->lanes[k], e);
            if (rc != RC_OK) return rc;
        }
    }
}

/* ---- start and end ---- */

static enum rc open_lanes(struct dispatch *d, const char *identity, struct err *e)
{
    size_t capacity = (size_t)d->options->active + SPARE_REQUESTS;
    for (int k = 0; k < d->options->groups; k++) {
        struct lane *l = &d->lanes[k];
        *l = (struct lane){.index = k, .capacity = (int)capacity, .in_flight = calloc(capacity, sizeof *l->in_flight)};
        d->n_lanes = k + 1;
        if (!l->in_flight) return err_no_memory(e);
        enum rc rc = group_open(d->options, k, identity, &l->group, e);
        if (rc != RC_OK) return rc;
    }
    return RC_OK;
}

/* Takes back what is still in flight. Unmarking may fail where the state failed already; then the next run counts one
 * failure that was none. */
static void close_lanes(struct dispatch *d, int64_t grace_us, struct dispatch_result *out)
{
    const struct dispatch_source *s = d->source;
    for (int k = 0; k < d->n_lanes; k++) {
        struct lane *l = &d->lanes[k];
        if (l->group) out->restarts += group_restarts(l->group);
        group_close(l->group, l->n_in_flight ? 0 : grace_us);
        for (int q = 0; q < l->n_in_flight; q++) {
            struct job *j = &d->jobs[l->in_flight[q]];
            if (j->state != JOB_IN_FLIGHT) continue;
            j->attempts.running = false;
            s->commit(s->ctx, l->in_flight[q], &j->attempts, NULL);
            s->release(s->ctx, l->in_flight[q]);
        }
        free(l->in_flight);
    }
}

enum rc dispatch_run(const struct options *o, const char *identity, const struct dispatch_source *source, int signal_fd,
                     struct dispatch_result *out, struct err *e)
{
    enum rc rc = RC_FATAL;
    struct dispatch d = {.options = o, .source = source, .signal_fd = signal_fd, .exit_status = EXIT_UNAVAILABLE};
    size_t groups = (size_t)o->groups;
    *out = (struct dispatch_result){.end = DISPATCH_DONE};
    d.jobs = calloc(source->n ? source->n : 1, sizeof *d.jobs);
    d.lanes = calloc(groups, sizeof *d.lanes);
    d.groups = calloc(groups, sizeof *d.groups);
    d.fds = calloc(groups * MAX_RANKS + 1, sizeof *d.fds);
    if (!d.jobs || !d.lanes || !d.groups || !d.fds) {
        err_no_memory(e);
        goto out;
    }
    if (source->n && end_has_come(&d)) {
        out->end = DISPATCH_OUT_OF_TIME;
        rc = RC_OK;
        goto out;
    }
    rc = open_lanes(&d, identity, e);
    if (rc == RC_OK) rc = drive(&d, e);
    out->end = d.end;
    out->tokens = tokens_so_far(&d);
    out->exit_status = d.exit_status;
    close_lanes(&d, rc == RC_OK && !d.stopping ? CLOSE_GRACE_US : 0, out);
out:
    free(d.jobs);
    free(d.lanes);
    free(d.groups);
    free(d.fds);
    return rc;
}
