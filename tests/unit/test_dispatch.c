/* Dispatch over groups that this file plays: order, retry, blame, isolation, several groups, stopping, time, errors. A played
 * group answers its oldest request at each pump; a job of `deadly` kills the group instead, so many times. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "dispatch.h"

enum { MAX_JOBS = 64, MAX_GROUPS = 3, MAX_IN_FLIGHT = 16 };

/* ---- the played world ---- */

struct group {
    int index;
    uint64_t ids[MAX_IN_FLIGHT];
    int n;
    struct group_event events[MAX_IN_FLIGHT];
    struct wire_frame frames[MAX_IN_FLIGHT];
    int n_events, read_events;
    uint64_t started; /* the last request that was said to have started */
    enum group_state state;
    int64_t restarts, without_progress;
    bool stopping; /* says so at the next pump, and answers nothing any more */
};

struct world {
    struct options options;
    size_t n;
    int deadly[MAX_JOBS];       /* how often this job kills its group */
    bool broken[MAX_JOBS];      /* building it fails */
    bool fails[MAX_JOBS];       /* the ranks answer FAILED */
    bool resume[MAX_JOBS], cold[MAX_JOBS]; /* of the last request */
    uint32_t saved_at[MAX_JOBS], saved_step[MAX_JOBS]; /* before it kills it says SAVED at such a position, risen by the step first */
    struct state_attempts stored[MAX_JOBS];
    int settled[MAX_JOBS], builds[MAX_JOBS], held[MAX_JOBS];
    char outcome[MAX_JOBS];     /* d(one), f(ailed), k(illed ranks) */
    struct state_attempts at_end[MAX_JOBS];
    int group_of[MAX_JOBS];
    size_t order[4096];         /* submissions */
    int beside[4096];           /* what was in flight in that group before */
    size_t n_order;
    int most_in_flight, opened, closed, stops;
    int gives_up[MAX_GROUPS];   /* after so many losses; 0: by options.restarts */
    bool frozen;                /* groups answer nothing */
    size_t fail_settle;         /* 1 + the job whose settling fails */
    int raise_at;               /* raise SIGTERM at this submission, 1-based */
    size_t ask_settle;          /* 1 + the job whose settling raises SIGUSR1 */
    int asked;
    struct dispatch_view seen;  /* when asked last */
    struct dispatch_group_view seen_groups[MAX_GROUPS];
    size_t lonely;              /* 1 + a job that must never have company */
    int slow[MAX_JOBS];         /* pumps that this job takes beyond one */
    int lost_status;            /* exit status that a loss comes with */
    bool stranger;              /* answer to a request that was never sent, once */
    int64_t end_us;             /* 0: none */
    int64_t timeout_us[MAX_JOBS];
    int64_t decode_us;          /* that every answer, of one token, says it took */
    int64_t prefill_us;         /* the same, of a prompt of one token */
    size_t prompt_tokens[MAX_JOBS]; /* 0: one */
    int cancelled[MAX_JOBS];
    bool late;                  /* what is cancelled answers all the same */
};
static struct world *world;

enum rc group_open(const struct options *o, int group_index, const char *identity, struct group **out, struct err *e)
{
    (void)e;
    (void)o;
    assert_string_equal(identity, "identity");
    *out = calloc(1, sizeof **out);
    assert_non_null(*out);
    (*out)->index = group_index;
    (*out)->state = GROUP_READY;
    world->opened++;
    return RC_OK;
}

enum group_state group_state_of(const struct group *g) { return g->state; }
int64_t group_restarts(const struct group *g) { return g->restarts; }
void group_progress(struct group *g) { g->without_progress = 0; }
const struct wire_hello *group_hello(const struct group *g) { return (void)g, NULL; }
pid_t group_rank_pid(const struct group *g, int rank) { return (void)g, (void)rank, 0; }

int group_poll_fds(struct group *g, struct pollfd *out, int *timeout_ms)
{
    (void)g;
    (void)out;
    *timeout_ms = world->frozen ? 5 : 0;
    return 0;
}

enum rc group_submit(struct group *g, const struct engine_request *r, struct err *e)
{
    size_t i = (size_t)r->id - 1;
    if (g->state != GROUP_READY) return RC_RETRY;
    assert_true(i < world->n);
    assert_int_equal(r->prompt[0], (int32_t)i);
    assert_true(world->stored[i].running); /* the attempt was committed before */
    world->resume[i] = r->resume;
    world->cold[i] = r->cold;
    if (r->prompt_tokens == 2) return err_set(e, RC_BAD_INPUT, 0, "request_too_large", "too large");
    for (int k = 0; k < g->n; k++) assert_true(g->ids[k] != world->lonely);
    world->order[world->n_order] = i;
    world->beside[world->n_order++] = g->n;
    world->group_of[i] = g->index;
    g->ids[g->n++] = r->id;
    if (g->n > world->most_in_flight) world->most_in_flight = g->n;
    if (world->raise_at && (int)world->n_order == world->raise_at) raise(SIGTERM);
    return RC_OK;
}

static void play_frame(struct group *g, struct wire_frame f)
{
    g->frames[g->n_events] = f;
    g->events[g->n_events] = (struct group_event){.kind = GROUP_EVENT_FRAME, .frame = &g->frames[g->n_events]};
    g->n_events++;
}

void group_cancel(struct group *g, uint64_t id)
{
    int k = 0;
    while (k < g->n && g->ids[k] != id) k++;
    assert_true(k < g->n);
    world->cancelled[id - 1]++;
    g->n--;
    memmove(g->ids + k, g->ids + k + 1, (size_t)(g->n - k) * sizeof *g->ids);
    if (g->read_events == g->n_events) g->read_events = g->n_events = 0;
    if (world->late) play_frame(g, (struct wire_frame){.type = WIRE_DONE, .u.done.id = id});
}

void group_stop(struct group *g)
{
    world->stops++;
    g->stopping = true;
}

static void play_loss(struct group *g)
{
    g->n = 0;
    g->state = GROUP_BACKOFF;
    g->events[g->n_events++] = (struct group_event){.kind = GROUP_EVENT_LOST, .text = "rank 1 was killed", .exit_status = world->lost_status};
}

static void play_answer(struct group *g)
{
    size_t i = (size_t)g->ids[0] - 1;
    if (world->deadly[i]) {
        world->deadly[i]--;
        world->saved_at[i] += world->saved_step[i];
        if (world->saved_at[i]) play_frame(g, (struct wire_frame){.type = WIRE_SAVED, .u.saved = {g->ids[0], world->saved_at[i]}});
        play_loss(g);
        return;
    }
    if (world->slow[i]) {
        world->slow[i]--;
        if (g->started != g->ids[0]) play_frame(g, (struct wire_frame){.type = WIRE_STARTED, .u.started = g->ids[0]});
        g->started = g->ids[0];
        return;
    }
    if (world->fails[i])
        play_frame(g, (struct wire_frame){.type = WIRE_FAILED, .u.text.id = g->ids[0]});
    else
        play_frame(g, (struct wire_frame){.type = WIRE_DONE,
                                          .u.done = {.id = g->ids[0], .prompt_tokens = 1, .n_tokens = 1,
                                                     .timing = {.prefill_us = world->prefill_us, .decode_us = world->decode_us}}});
    g->n--;
    memmove(g->ids, g->ids + 1, (size_t)g->n * sizeof *g->ids);
}

void group_pump(struct group *g)
{
    if (!world->late) assert_int_equal(g->read_events, g->n_events);
    if (g->read_events == g->n_events) g->n_events = g->read_events = 0;
    if (world->frozen) return;
    if (g->stopping) {
        play_frame(g, (struct wire_frame){.type = WIRE_STOPPED});
    } else if (world->stranger && g->state == GROUP_READY) {
        world->stranger = false;
        play_frame(g, (struct wire_frame){.type = WIRE_DONE, .u.done.id = 4000});
    } else if (g->state == GROUP_READY && g->n) {
        play_answer(g);
    } else if (g->state == GROUP_BACKOFF) {
        int cap = world->gives_up[g->index] ? world->gives_up[g->index] : world->options.restarts;
        bool up = g->without_progress >= cap;
        g->state = up ? GROUP_GAVE_UP : GROUP_READY;
        g->without_progress++;
        g->restarts += !up;
        g->events[g->n_events++] = (struct group_event){.kind = up ? GROUP_EVENT_GAVE_UP : GROUP_EVENT_READY,
                                                        .text = "no more", .exit_status = EXIT_UNAVAILABLE};
    }
}

bool group_next_event(struct group *g, struct group_event *out)
{
    if (g->read_events == g->n_events) return false;
    *out = g->events[g->read_events++];
    return true;
}

void group_close(struct group *g, int64_t grace_us)
{
    (void)grace_us;
    world->closed++;
    free(g);
}

/* ---- the played source ---- */

static int32_t prompts[MAX_JOBS];

static enum rc build(void *ctx, size_t i, struct engine_request *out, int64_t *timeout_us, struct err *e)
{
    struct world *w = ctx;
    (void)e;
    w->builds[i]++;
    if (w->broken[i]) {
        w->settled[i]++;
        w->outcome[i] = 'b';
        return RC_RETRY;
    }
    prompts[i] = (int32_t)i;
    w->held[i]++;
    *out = (struct engine_request){.prompt = &prompts[i], .max_tokens = 1,
                                   .prompt_tokens = w->prompt_tokens[i] ? w->prompt_tokens[i] : 1};
    *timeout_us = w->timeout_us[i];
    return RC_OK;
}

static void release(void *ctx, size_t i) { ((struct world *)ctx)->held[i]--; }

static enum rc attempts(void *ctx, size_t i, struct state_attempts *out, struct err *e)
{
    (void)e;
    *out = ((struct world *)ctx)->stored[i];
    return RC_OK;
}

static enum rc commit(void *ctx, size_t i, const struct state_attempts *a, struct err *e)
{
    (void)e;
    ((struct world *)ctx)->stored[i] = *a;
    return RC_OK;
}

static enum rc settle(void *ctx, size_t i, const struct dispatch_outcome *o, struct err *e)
{
    struct world *w = ctx;
    if (w->fail_settle == i + 1) return err_set(e, RC_FAILED, EXIT_IO, "disk_full", "disk full");
    if (w->ask_settle == i + 1) raise(SIGUSR1);
    w->settled[i]++;
    w->outcome[i] = o->done ? 'd' : o->failed ? 'f' : o->timed_out_us ? 't' : 'k';
    w->at_end[i] = o->attempts;
    w->stored[i].running = false;
    if (o->killed_ranks) assert_true(strlen(o->killed_ranks) > 0);
    return RC_OK;
}

static void turn(void *ctx, const struct dispatch_view *v)
{
    struct world *w = ctx;
    if (!v->asked) return;
    w->asked++;
    w->seen = *v;
    memcpy(w->seen_groups, v->groups, (size_t)v->n_groups * sizeof *v->groups);
}

static struct world new_world(size_t n)
{
    struct world w = {.n = n, .options = {.ranks = 2, .groups = 1, .active = 4, .restarts = 5, .job_failures = 3,
                                          .grace_s = 10}};
    return w;
}

static enum rc run(struct world *w, int signal_fd, struct dispatch_result *r, struct err *e)
{
    struct dispatch_source s = {.ctx = w, .n = w->n, .end_us = w->end_us ? w->end_us : INT64_MAX, .build = build,
                                .release = release, .attempts = attempts, .commit = commit, .settle = settle, .turn = turn};
    world = w;
    enum rc rc = dispatch_run(&w->options, "identity", &s, signal_fd, r, e);
    assert_int_equal(w->opened, w->closed);
    for (size_t i = 0; i < w->n; i++) {
        assert_int_equal(w->held[i], 0);
        assert_false(w->stored[i].running);
        assert_true(w->settled[i] <= 1);
    }
    return rc;
}

static void run_to_the_end(struct world *w)
{
    struct dispatch_result r;
    assert_int_equal(run(w, -1, &r, NULL), RC_OK);
    assert_int_equal(r.end, DISPATCH_DONE);
    for (size_t i = 0; i < w->n; i++) assert_int_equal(w->settled[i], 1);
}

/* ---- tests ---- */

static void in_order_and_bounded(void **state)
{
    (void)state;
    struct world w = new_world(30);
    run_to_the_end(&w);
    assert_int_equal(w.n_order, 30);
    for (size_t i = 0; i < 30; i++) {
        assert_int_equal(w.order[i], i);
        assert_int_equal(w.outcome[i], 'd');
        assert_int_equal(w.at_end[i].attempts, 1);
        assert_int_equal(w.builds[i], 1);
    }
    assert_int_equal(w.most_in_flight, w.options.active + 2);
}

static void nothing_to_do(void **state)
{
    (void)state;
    struct world w = new_world(0);
    run_to_the_end(&w);
    assert_int_equal(w.n_order, 0);
}

static void own_faults_never_reach_the_ranks(void **state)
{
    (void)state;
    struct world w = new_world(12);
    w.broken[0] = w.broken[5] = w.broken[11] = true;
    w.fails[3] = true;
    run_to_the_end(&w);
    assert_int_equal(w.n_order, 9);
    assert_int_equal(w.outcome[0], 'b');
    assert_int_equal(w.outcome[3], 'f');
    assert_int_equal(w.outcome[4], 'd');
    assert_int_equal(w.at_end[3].attempts, 1);
}

/* Job 2 kills once: it and all that were beside it go back, and start again in order before anything later. */
static void a_loss_goes_back_in_order(void **state)
{
    (void)state;
    struct world w = new_world(20);
    w.deadly[2] = 1;
    run_to_the_end(&w);
    /* 0..5 at once, then 6 and 7 as 0 and 1 end; 2..7 are lost. */
    static const size_t expected[] = {0, 1, 2, 3, 4, 5, 6, 7, 2, 3, 4, 5, 6, 7, 8, 9};
    assert_memory_equal(w.order, expected, sizeof expected);
    assert_int_equal(w.at_end[1].rank_restarts, 0);
    for (size_t i = 2; i <= 7; i++) {
        assert_int_equal(w.at_end[i].attempts, 2);
        assert_int_equal(w.at_end[i].rank_restarts, 1);
        assert_int_equal(w.at_end[i].failures, 1);
    }
    assert_int_equal(w.at_end[8].failures, 0);
}

/* A job that always kills: three times in company, then only alone, then an error; everything else is answered. */
static void a_killer_is_isolated(void **state)
{
    (void)state;
    struct world w = new_world(25);
    w.deadly[4] = 1000;
    run_to_the_end(&w);
    int company = 0, alone = 0;
    for (size_t k = 0; k < w.n_order; k++) {
        if (w.order[k] != 4) continue;
        if (company < 3) {
            company++;
            continue;
        }
        alone++;
        assert_int_equal(w.beside[k], 0);
        assert_true(k + 1 == w.n_order || w.beside[k + 1] == 0);
    }
    assert_int_equal(company, 3);
    assert_int_equal(alone, 3);
    assert_int_equal(w.outcome[4], 'k');
    assert_int_equal(w.at_end[4].failures, 6);
    for (size_t i = 0; i < w.n; i++)
        if (i != 4) assert_int_equal(w.outcome[i], 'd');
}

/* Killers need more losses than the group has restarts: settling one counts as progress in time. */
static void many_killers_do_not_end_the_run(void **state)
{
    (void)state;
    struct world w = new_world(3);
    w.options.restarts = 6;
    for (size_t i = 0; i < w.n; i++) w.deadly[i] = 1000;
    run_to_the_end(&w);
    for (size_t i = 0; i < w.n; i++) assert_int_equal(w.outcome[i], 'k');
}

static void groups_share_the_jobs(void **state)
{
    (void)state;
    struct world w = new_world(40);
    w.options.groups = 3;
    w.deadly[7] = 2;
    run_to_the_end(&w);
    bool seen[MAX_GROUPS] = {false};
    for (size_t i = 0; i < w.n; i++) seen[w.group_of[i]] = true;
    assert_true(seen[0] && seen[1] && seen[2]);
}

/* Group 1 runs a suspect when group 0 loses its jobs: they wait for group 0, they do not join the suspect. */
static void a_suspect_gets_no_company(void **state)
{
    (void)state;
    struct world w = new_world(8);
    w.options.groups = 2;
    w.stored[0].failures = 3;
    w.lonely = 1;
    w.slow[0] = 20;
    w.slow[1] = 6;   /* group 0 keeps its share until group 1 is empty and takes the suspect */
    w.deadly[2] = 1; /* then it loses the rest */
    run_to_the_end(&w);
    assert_int_equal(w.group_of[0], 1);
    assert_int_equal(w.group_of[3], 0);
    assert_int_equal(w.at_end[3].rank_restarts, 1);
}

static void one_group_gives_up(void **state)
{
    (void)state;
    struct world w = new_world(40);
    w.options.groups = 2;
    w.gives_up[0] = -1; /* at its first loss */
    w.deadly[0] = 1;
    run_to_the_end(&w);
    assert_int_equal(w.group_of[39], 1);
    assert_int_equal(w.group_of[0], 1);
}

static void all_groups_give_up(void **state)
{
    (void)state;
    struct world w = new_world(20);
    struct dispatch_result r;
    w.options.restarts = 2;
    w.options.job_failures = 100;
    w.deadly[5] = 1000;
    assert_int_equal(run(&w, -1, &r, NULL), RC_OK);
    assert_int_equal(r.end, DISPATCH_GAVE_UP);
    assert_int_equal(r.exit_status, EXIT_UNAVAILABLE);
    assert_int_equal(r.restarts, 2);
    for (size_t i = 0; i < 5; i++) assert_int_equal(w.settled[i], 1);
    assert_int_equal(w.settled[5], 0);
    assert_int_equal(w.stored[5].failures, 3);
}

/* A runner that died left marks: one failure each; a suspect waits for the others and runs alone. */
static void the_runner_died_before(void **state)
{
    (void)state;
    struct world w = new_world(10);
    w.stored[1] = (struct state_attempts){.attempts = 1, .running = true};
    w.stored[2] = (struct state_attempts){.attempts = 3, .failures = 2, .running = true};
    w.stored[3] = (struct state_attempts){.attempts = 6, .failures = 5, .running = true};
    run_to_the_end(&w);
    assert_int_equal(w.at_end[1].failures, 1);
    assert_int_equal(w.at_end[1].attempts, 2);
    assert_int_equal(w.outcome[2], 'd');
    assert_int_equal(w.order[w.n_order - 1], 2);
    assert_int_equal(w.beside[w.n_order - 1], 0);
    assert_int_equal(w.outcome[3], 'k');
    assert_int_equal(w.builds[3], 0);
}

static int open_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    int fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    assert_true(fd >= 0);
    return fd;
}

/* What is in flight finishes within the grace; nothing new starts. */
static void a_signal_stops(void **state)
{
    (void)state;
    struct world w = new_world(40);
    struct dispatch_result r;
    int fd = open_signals();
    w.raise_at = 10;
    assert_int_equal(run(&w, fd, &r, NULL), RC_OK);
    close(fd);
    assert_int_equal(r.end, DISPATCH_STOPPED);
    assert_int_equal(w.n_order, 10);
    for (size_t i = 0; i < 40; i++) assert_int_equal(w.settled[i], i < 10);
}

/* With checkpoints nothing finishes: groups are told to save, and it is over when they have. What was in flight is not blamed. */
static void a_signal_saves(void **state)
{
    (void)state;
    for (int slow = 0; slow < 2; slow++) {
        struct world w = new_world(40);
        struct dispatch_result r;
        int fd = open_signals();
        w.options.checkpoints = "a folder";
        w.options.checkpoint_us = 1000000;
        w.options.grace_s = 0.2;
        w.raise_at = 3;
        w.frozen = slow; /* then nobody says that it has stopped, and the grace ends it */
        for (size_t i = 0; i < 40; i++) w.slow[i] = 1 << 20;
        assert_int_equal(run(&w, fd, &r, NULL), RC_OK);
        close(fd);
        assert_int_equal(r.end, DISPATCH_STOPPED);
        assert_int_equal(w.stops, 1);
        for (size_t i = 0; i < 40; i++) {
            assert_int_equal(w.settled[i], 0);
            assert_false(w.stored[i].running);
            assert_int_equal(w.stored[i].failures, 0);
        }
    }
}

/* The same at the end of the time. */
static void the_end_saves(void **state)
{
    (void)state;
    struct world w = new_world(4);
    struct dispatch_result r;
    struct timespec now;
    w.options.checkpoints = "a folder";
    w.options.checkpoint_us = 1000000;
    for (size_t i = 0; i < 4; i++) w.slow[i] = 1 << 30;
    clock_gettime(CLOCK_REALTIME, &now);
    w.end_us = (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 + 100000;
    assert_int_equal(run(&w, -1, &r, NULL), RC_OK);
    assert_int_equal(r.end, DISPATCH_OUT_OF_TIME);
    assert_int_equal(w.stops, 1);
    for (size_t i = 0; i < 4; i++) assert_int_equal(w.settled[i], 0);
}

/* First attempts begin anew, later ones where they were, those after two failures from nothing. */
static void attempts_go_on_or_begin_anew(void **state)
{
    (void)state;
    struct world w = new_world(4);
    w.stored[1] = (struct state_attempts){.attempts = 1};
    w.stored[2] = (struct state_attempts){.attempts = 2, .failures = 1};
    w.stored[3] = (struct state_attempts){.attempts = 2, .failures = 2};
    run_to_the_end(&w);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(w.resume[i], i > 0);
        assert_int_equal(w.cold[i], i == 3);
    }
}

/* A job that kills its group each time, but gets further each time, is not to blame; one that stays where it is, is. */
static void getting_further_clears_failures(void **state)
{
    (void)state;
    struct world w = new_world(2);
    w.options.job_failures = 2;
    w.deadly[0] = w.deadly[1] = 6;
    w.saved_step[0] = 100;
    w.saved_at[1] = 50;
    run_to_the_end(&w);
    assert_int_equal(w.outcome[0], 'd');
    assert_int_equal(w.outcome[1], 'k');
}

/* Group 1 dies of job 1 first; jobs that take long are with the groups when somebody asks. */
static void a_question_is_answered_once(void **state)
{
    (void)state;
    struct world w = new_world(40);
    struct dispatch_result r;
    int fd = open_signals();
    w.options.groups = 2;
    for (size_t i = 0; i < 40; i++) w.slow[i] = 3;
    w.deadly[7] = 1;
    w.ask_settle = 20;
    assert_int_equal(run(&w, fd, &r, NULL), RC_OK);
    close(fd);
    assert_int_equal(r.end, DISPATCH_DONE);
    assert_int_equal(w.asked, 1);
    assert_int_equal(w.seen.n_groups, 2);
    assert_int_equal(w.seen.restarts, 1);
    assert_int_equal(w.seen_groups[0].restarts + w.seen_groups[1].restarts, 1);
    assert_int_equal(w.seen.in_flight, w.seen_groups[0].in_flight + w.seen_groups[1].in_flight);
    assert_int_equal(w.seen.n_jobs, w.seen.in_flight);
    assert_true(w.seen.n_jobs > 6);
    int running = 0;
    for (int i = 0; i < w.seen.n_jobs; i++) {
        const struct dispatch_job_view *j = &w.seen.jobs[i];
        assert_true(j->job < 40 && j->group < 2);
        assert_int_equal(j->group, w.group_of[j->job]);
        running += j->running_us >= 0;
    }
    assert_true(running >= 1 && running <= 2); /* a played group computes one job at a time */
}

static void a_question_while_stopping(void **state)
{
    (void)state;
    struct world w = new_world(40);
    struct dispatch_result r;
    int fd = open_signals();
    for (size_t i = 0; i < 40; i++) w.slow[i] = 3;
    w.raise_at = 10;
    w.ask_settle = 8; /* in flight when the signal came */
    assert_int_equal(run(&w, fd, &r, NULL), RC_OK);
    close(fd);
    assert_int_equal(r.end, DISPATCH_STOPPED);
    assert_int_equal(w.asked, 1);
}

static void a_view_of_many_is_bounded(void **state)
{
    (void)state;
    struct world w = new_world(64);
    struct dispatch_result r;
    int fd = open_signals();
    w.options.groups = 3;
    w.options.active = 12;
    for (size_t i = 0; i < 64; i++) w.slow[i] = 3;
    w.ask_settle = 1;
    assert_int_equal(run(&w, fd, &r, NULL), RC_OK);
    close(fd);
    assert_int_equal(w.asked, 1);
    assert_int_equal(w.seen.in_flight, 42);
    assert_int_equal(w.seen.n_jobs, DISPATCH_VIEW_JOBS);
}

static void the_grace_ends(void **state)
{
    (void)state;
    struct world w = new_world(40);
    struct dispatch_result r;
    int fd = open_signals();
    w.raise_at = 6;
    w.frozen = true;
    w.options.grace_s = 0.2;
    int64_t start = clock_now_us();
    assert_int_equal(run(&w, fd, &r, NULL), RC_OK);
    assert_in_range(clock_now_us() - start, 190000, 2000000);
    close(fd);
    assert_int_equal(r.end, DISPATCH_STOPPED);
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(w.settled[i], 0);
        assert_int_equal(w.stored[i].attempts, 1);
        assert_int_equal(w.stored[i].failures, 0); /* being stopped is no failure */
    }
}

/* ---- time ---- */

static int64_t unix_in_us(int64_t us)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000 + us;
}

static void run_out_of_time(struct world *w)
{
    struct dispatch_result r;
    assert_int_equal(run(w, -1, &r, NULL), RC_OK);
    assert_int_equal(r.end, DISPATCH_OUT_OF_TIME);
}

static void the_end_was_before(void **state)
{
    (void)state;
    struct world w = new_world(10);
    w.end_us = unix_in_us(-1);
    run_out_of_time(&w);
    assert_int_equal(w.opened, 0);
    struct world nothing = new_world(0);
    nothing.end_us = w.end_us;
    run_to_the_end(&nothing);
}

static void the_end_is_far(void **state)
{
    (void)state;
    struct world w = new_world(30);
    w.end_us = unix_in_us(3600000000);
    w.decode_us = 1000000;
    run_to_the_end(&w);
    assert_int_equal(w.n_order, 30);
}

/* Nothing answers: everything is taken back at the end, and being taken back is no failure. */
static void the_end_takes_back(void **state)
{
    (void)state;
    struct world w = new_world(40);
    w.frozen = true;
    w.end_us = unix_in_us(200000);
    int64_t start = clock_now_us();
    run_out_of_time(&w);
    assert_in_range(clock_now_us() - start, 190000, 2000000);
    for (size_t i = 0; i < 6; i++) {
        assert_int_equal(w.settled[i], 0);
        assert_int_equal(w.stored[i].attempts, 1);
        assert_int_equal(w.stored[i].failures, 0);
    }
}

/* The first answer says that jobs take an hour: those in flight go on, no other starts, and the run is over before its end. */
static void what_cannot_finish_does_not_start(void **state)
{
    (void)state;
    struct world w = new_world(40);
    w.decode_us = 3600000000;
    w.end_us = unix_in_us(60000000);
    int64_t start = clock_now_us();
    run_out_of_time(&w);
    assert_in_range(clock_now_us() - start, 0, 20000000);
    assert_int_equal(w.n_order, 6);
    for (size_t i = 0; i < 40; i++) {
        assert_int_equal(w.settled[i], i < 6);
        assert_int_equal(w.stored[i].attempts, i < 6);
        assert_true(w.builds[i] <= 1);
    }
}

/* A second a prompt token: the jobs with long prompts are left, the others are done, over two groups. */
static void long_ones_are_left(void **state)
{
    (void)state;
    struct world w = new_world(40);
    w.options.groups = 2;
    w.prefill_us = 1000000;
    w.end_us = unix_in_us(60000000);
    for (size_t i = 20; i < 40; i += 3) w.prompt_tokens[i] = 1000;
    run_out_of_time(&w);
    for (size_t i = 0; i < 40; i++) assert_int_equal(w.settled[i], i < 20 || (i - 20) % 3 != 0);
}

/* Several jobs take for ever; only those with a limit are ended, one with a longer limit than it needs is not, and an answer
 * that was on its way counts no more. */
static void slow_ones_are_cancelled(void **state)
{
    (void)state;
    for (int late = 0; late <= 1; late++) {
        struct world w = new_world(20);
        w.late = late;
        w.slow[2] = w.slow[9] = 1 << 30;
        w.timeout_us[2] = w.timeout_us[9] = 50000;
        w.slow[4] = 3;
        w.timeout_us[4] = 3600000000;
        int64_t start = clock_now_us();
        run_to_the_end(&w);
        assert_in_range(clock_now_us() - start, 100000, 20000000);
        for (size_t i = 0; i < 20; i++) {
            bool ended = i == 2 || i == 9;
            assert_int_equal(w.outcome[i], ended ? 't' : 'd');
            assert_int_equal(w.cancelled[i], ended);
            assert_int_equal(w.at_end[i].attempts, 1);
            assert_int_equal(w.at_end[i].failures, 0);
        }
    }
}

static void a_full_disk_ends_the_run(void **state)
{
    (void)state;
    struct world w = new_world(20);
    struct dispatch_result r;
    struct err e = {0};
    w.fail_settle = 8;
    assert_int_equal(run(&w, -1, &r, &e), RC_FAILED);
    assert_int_equal(e.exit_status, EXIT_IO);
    for (size_t i = 0; i < 20; i++) assert_int_equal(w.settled[i], i < 7);
}

/* What a rank's disk does to its group is no job's failure. */
static void a_ranks_disk_is_no_jobs_failure(void **state)
{
    (void)state;
    struct world w = new_world(20);
    struct dispatch_result r;
    w.gives_up[0] = -1;
    w.deadly[5] = 1;
    w.lost_status = EXIT_IO;
    assert_int_equal(run(&w, -1, &r, NULL), RC_OK);
    assert_int_equal(r.end, DISPATCH_GAVE_UP);
    assert_int_equal(w.stored[5].attempts, 1);
    assert_int_equal(w.stored[5].failures, 0);
    assert_false(w.stored[5].running);
}

static void a_strange_answer_is_ignored(void **state)
{
    (void)state;
    struct world w = new_world(5);
    w.stranger = true;
    run_to_the_end(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(in_order_and_bounded),
        cmocka_unit_test(nothing_to_do),
        cmocka_unit_test(own_faults_never_reach_the_ranks),
        cmocka_unit_test(a_loss_goes_back_in_order),
        cmocka_unit_test(a_killer_is_isolated),
        cmocka_unit_test(many_killers_do_not_end_the_run),
        cmocka_unit_test(groups_share_the_jobs),
        cmocka_unit_test(a_suspect_gets_no_company),
        cmocka_unit_test(one_group_gives_up),
        cmocka_unit_test(a_signal_saves),
        cmocka_unit_test(the_end_saves),
        cmocka_unit_test(attempts_go_on_or_begin_anew),
        cmocka_unit_test(getting_further_clears_failures),
        cmocka_unit_test(all_groups_give_up),
        cmocka_unit_test(the_runner_died_before),
        cmocka_unit_test(a_signal_stops),
        cmocka_unit_test(a_question_is_answered_once),
        cmocka_unit_test(a_question_while_stopping),
        cmocka_unit_test(a_view_of_many_is_bounded),
        cmocka_unit_test(the_grace_ends),
        cmocka_unit_test(the_end_was_before),
        cmocka_unit_test(the_end_is_far),
        cmocka_unit_test(the_end_takes_back),
        cmocka_unit_test(what_cannot_finish_does_not_start),
        cmocka_unit_test(long_ones_are_left),
        cmocka_unit_test(slow_ones_are_cancelled),
        cmocka_unit_test(a_full_disk_ends_the_run),
        cmocka_unit_test(a_ranks_disk_is_no_jobs_failure),
        cmocka_unit_test(a_strange_answer_is_ignored),
    };
    log_set(LOG_ERROR, "");
    return cmocka_run_group_tests_name("dispatch", tests, NULL, NULL);
}
