/* supervise: one group of ranks, from launch to loss to launch again.
 *
 * A launch makes a fresh segment and one process per rank, so nothing of a failed life reaches the next. The group is a
 * state machine that its owner turns with group_pump; only killing waits, and only for the kernel to take a process away.
 *
 * What can go wrong is seen from four sides: a socket ends or a process does, a rank sends its last words, the segment is
 * poisoned, a heartbeat stands still for the watchdog's time. One failure shows on several sides at once and in any order
 * (a peer that noticed poison may speak before the one who poisoned), so the first sign only opens a short inquest: the
 * others get a moment to say what they know, and the reason given is the root: a rank killed by a signal, else the words
 * of the rank that poisoned, else any last words, else an exit status, else the first sign itself. Then every rank is
 * killed, all are reaped, and the owner hears LOST.
 *
 * Heartbeats are judged against this process's own clock. When the runner itself was stopped (job control, a frozen
 * machine), the time between two pumps is not counted against the ranks.
 *
 * Whether a restart still makes sense is decided when the backoff ends, not when the ranks were lost: in between, the owner
 * may have settled the job that kills every group, which is progress. Failures that the next launch would repeat (another
 * identity, an impossible setting, a missing model, a full disk) are not tried again. */
#define _GNU_SOURCE
#include "supervise.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "supervise_spawn.h"

enum { READ_BYTES = 1 << 16, READ_TURNS = 64, TURN_MS = 1000, INQUEST_TURN_MS = 10, CLOSE_TURN_MS = 20 };
static const int64_t backoff_first_us = 200000, backoff_most_us = 10000000;
static const int64_t inquest_us = 200000;  /* how long others may speak after the first sign of a failure */
static const int64_t gap_us = 5000000;     /* two pumps further apart than this: the runner itself stood still */

struct rank_process {
    pid_t pid; /* 0: reaped or never started */
    int fd;    /* -1: its socket ended */
    struct buf in, out;
    size_t out_sent;
    bool said_hello, ended, has_words;
    int status; /* of waitpid, once ended */
    struct wire_hello hello;
    struct wire_text words;
    uint64_t beat;
    int64_t beat_us;
};

struct queued_event {
    enum group_event_kind kind;
    int exit_status;
    struct buf bytes; /* FRAME: the encoded frame; LOST, GAVE_UP: the text */
};

struct group {
    const struct options *options;
    int index;
    char *identity;
    size_t comm_bytes;
    enum group_state state;
    struct spawn_segment segment;
    struct rank_process rank[MAX_RANKS];
    int64_t launches, without_progress, backoff_us, due_us, pumped_us;
    /* The inquest into a failure. */
    bool failing, pointless; /* pointless: the next launch would fail alike */
    int64_t failing_us;
    int exit_status;
    char reason[700];
    struct queued_event *events;
    size_t n_events, cap_events;
    struct queued_event current;
    struct wire_frame frame;
};

/* ---- events ---- */

static void queue_event(struct group *g, enum group_event_kind kind, const void *bytes, size_t n_bytes)
{
    if (g->n_events == g->cap_events) {
        size_t cap = g->cap_events ? 2 * g->cap_events : 16;
        struct queued_event *more = realloc(g->events, cap * sizeof *more);
        if (!more) {
            log_line(LOG_ERROR, "group %d: out of memory, an event is lost", g->index);
            return;
        }
        g->events = more;
        g->cap_events = cap;
    }
    struct queued_event *v = &g->events[g->n_events];
    *v = (struct queued_event){.kind = kind, .exit_status = g->exit_status};
    buf_append(&v->bytes, bytes, n_bytes);
    g->n_events++;
}

/* Progress is a running total: a newer one replaces an older one that nobody has read. */
static void queue_frame(struct group *g, enum wire_type type, const void *bytes, size_t n_bytes)
{
    struct queued_event *last = g->n_events ? &g->events[g->n_events - 1] : NULL;
    if (type == WIRE_TOKEN && last && last->kind == GROUP_EVENT_FRAME && last->bytes.len == n_bytes &&
        last->bytes.data[4] == WIRE_TOKEN) {
        memcpy(last->bytes.data, bytes, n_bytes);
        return;
    }
    queue_event(g, GROUP_EVENT_FRAME, bytes, n_bytes);
}

bool group_next_event(struct group *g, struct group_event *out)
{
    wire_frame_free(&g->frame);
    buf_free(&g->current.bytes);
    while (g->n_events) {
        g->current = g->events[0];
        g->n_events--;
        memmove(g->events, g->events + 1, g->n_events * sizeof *g->events);
        *out = (struct group_event){.kind = g->current.kind, .exit_status = g->current.exit_status};
        if (g->current.kind != GROUP_EVENT_FRAME) {
            out->text = g->current.bytes.data ? g->current.bytes.data : "";
            return true;
        }
        size_t used;
        if (wire_decode(g->current.bytes.data, g->current.bytes.len, &g->frame, &used, NULL) == RC_OK) {
            out->frame = &g->frame;
            return true;
        }
        log_line(LOG_ERROR, "group %d: out of memory, a frame is lost", g->index);
        buf_free(&g->current.bytes);
    }
    return false;
}

/* ---- failure ---- */

/* The first sign of a failure; later ones only add to what the inquest reads. */
static void suspect(struct group *g, bool pointless, int exit_status, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void suspect(struct group *g, bool pointless, int exit_status, const char *format, ...)
{
    if (g->failing && (g->pointless || !pointless)) return;
    if (!g->failing) g->failing_us = clock_now_us();
    g->failing = true;
    g->pointless = pointless;
    g->exit_status = exit_status;
    va_list args;
    va_start(args, format);
    vsnprintf(g->reason, sizeof g->reason, format, args);
    va_end(args);
}

/* A disk may fail at any time, the others are sure only of a rank that never came up. */
static bool status_is_pointless(int exit_status, bool came_up)
{
    if (exit_status == EXIT_IO) return true;
    return !came_up && (exit_status == EXIT_CONFIG || exit_status == EXIT_NO_INPUT || exit_status == EXIT_USAGE);
}

static int killed_rank(const struct group *g)
{
    for (int r = 0; r < g->options->ranks; r++)
        if (g->rank[r].ended && WIFSIGNALED(g->rank[r].status)) return r;
    return -1;
}

static int speaking_rank(const struct group *g, int preferred)
{
    if (preferred >= 0 && preferred < g->options->ranks && g->rank[preferred].has_words) return preferred;
    for (int r = 0; r < g->options->ranks; r++)
        if (g->rank[r].has_words) return r;
    return -1;
}

static int poisoner(const struct group *g, char *reason, size_t reason_bytes)
{
    int rank = -1;
    if (!g->segment.segment || !segment_poisoned(g->segment.segment, &rank, reason, reason_bytes)) return -1;
    return rank >= 0 && rank < g->options->ranks ? rank : -1;
}

/* True when waiting longer would not tell more about the root. */
static bool inquest_is_over(const struct group *g)
{
    char reason[8];
    int p = poisoner(g, reason, sizeof reason), living = 0;
    for (int r = 0; r < g->options->ranks; r++) living += g->rank[r].pid != 0;
    if (!living || g->pointless || killed_rank(g) >= 0 || clock_now_us() - g->failing_us >= inquest_us) return true;
    return p >= 0 ? g->rank[p].has_words || g->rank[p].ended : speaking_rank(g, -1) >= 0;
}

static void find_root(struct group *g)
{
    char poison[600];
    int killed = killed_rank(g), p = poisoner(g, poison, sizeof poison), speaker = speaking_rank(g, p);
    if (g->pointless) return;
    if (killed >= 0) {
        int sig = WTERMSIG(g->rank[killed].status);
        snprintf(g->reason, sizeof g->reason, "rank %d was killed by signal %d (%s)", killed, sig, strsignal(sig));
        g->exit_status = EXIT_UNAVAILABLE;
        return;
    }
    if (speaker >= 0 && (p < 0 || speaker == p)) {
        const struct wire_text *w = &g->rank[speaker].words;
        snprintf(g->reason, sizeof g->reason, "rank %d: %s: %s", speaker, w->code, w->text);
        g->exit_status = (int)w->exit_status;
        g->pointless = status_is_pointless((int)w->exit_status, g->rank[speaker].said_hello);
        return;
    }
    if (p >= 0) {
        snprintf(g->reason, sizeof g->reason, "rank %d: %s", p, poison);
        return;
    }
    for (int r = 0; r < g->options->ranks; r++) {
        if (!g->rank[r].ended) continue;
        snprintf(g->reason, sizeof g->reason, "rank %d left with status %d", r, WEXITSTATUS(g->rank[r].status));
        return;
    }
}

static void end_ranks(struct group *g)
{
    for (int r = 0; r < g->options->ranks; r++) {
        struct rank_process *p = &g->rank[r];
        if (p->pid) spawn_kill(p->pid, &p->status);
        if (p->fd >= 0) close(p->fd);
        buf_free(&p->in);
        buf_free(&p->out);
        *p = (struct rank_process){.fd = -1};
    }
    spawn_segment_close(&g->segment);
}

static void give_up(struct group *g)
{
    g->state = GROUP_GAVE_UP;
    if (!status_is_pointless(g->exit_status, false)) g->exit_status = EXIT_UNAVAILABLE;
    queue_event(g, GROUP_EVENT_GAVE_UP, g->reason, strlen(g->reason));
}

static void lose(struct group *g)
{
    find_root(g);
    end_ranks(g);
    g->failing = false;
    queue_event(g, GROUP_EVENT_LOST, g->reason, strlen(g->reason));
    if (g->pointless) {
        give_up(g);
        return;
    }
    g->state = GROUP_BACKOFF;
    g->due_us = clock_now_us() + g->backoff_us;
    g->backoff_us = 2 * g->backoff_us < backoff_most_us ? 2 * g->backoff_us : backoff_most_us;
}

/* ---- launch ---- */

static enum rc start_ranks(struct group *g, struct err *e)
{
    const struct options *o = g->options;
    int64_t now = clock_now_us();
    enum rc rc = spawn_segment_open(o->ranks, g->comm_bytes, &o->bounds, &g->segment, e);
    for (int r = 0; r < o->ranks && rc == RC_OK; r++) {
        struct rank_args a = rank_args_make(o, g->index, r);
        /* A fault strikes once a run: the first life of the first group. */
        if (g->index || g->launches) a.options.fault = (struct fault){0};
        rc = spawn_rank(&a, &g->segment, &g->rank[r].pid, &g->rank[r].fd, e);
        g->rank[r].beat_us = now;
    }
    return rc;
}

static void launch(struct group *g)
{
    struct err e = {0};
    enum rc rc = start_ranks(g, &e);
    g->launches++;
    g->pumped_us = clock_now_us();
    g->failing = g->pointless = false;
    g->exit_status = EXIT_UNAVAILABLE;
    g->state = GROUP_STARTING;
    if (rc != RC_OK) {
        suspect(g, false, e.exit_status, "%s", e.text);
        lose(g);
    }
}

static void restart_or_give_up(struct group *g)
{
    if (g->without_progress >= g->options->restarts) {
        give_up(g);
        return;
    }
    g->without_progress++;
    launch(g);
}

/* ---- hello ---- */

/* Names the first line in which two identities differ: "partition=… instead of …". */
static void name_difference(const char *found, const char *expected, char *out, size_t out_bytes)
{
    while (*found && *expected) {
        size_t f = strcspn(found, "\n"), x = strcspn(expected, "\n");
        if (f != x || memcmp(found, expected, f) != 0) {
            snprintf(out, out_bytes, "%.*s instead of %.*s", (int)f, found, (int)x, expected);
            return;
        }
        found += f + (found[f] != 0);
        expected += x + (expected[x] != 0);
    }
    snprintf(out, out_bytes, "%s", *found || *expected ? "one has fewer lines" : "nothing");
}

static void check_hello(struct group *g, int r)
{
    const struct wire_hello *h = &g->rank[r].hello, *first = NULL;
    char difference[400];
    for (int i = 0; i < g->options->ranks && !first; i++)
        if (i != r && g->rank[i].said_hello) first = &g->rank[i].hello;
    if (h->version != WIRE_VERSION || h->rank != (uint32_t)r || h->ranks != (uint32_t)g->options->ranks) {
        suspect(g, true, EXIT_UNAVAILABLE, "rank %d says it is rank %" PRIu32 " of %" PRIu32 ", frames version %" PRIu32, r,
                h->rank, h->ranks, h->version);
    } else if (strcmp(h->identity, g->identity) != 0) {
        name_difference(h->identity, g->identity, difference, sizeof difference);
        suspect(g, true, EXIT_UNAVAILABLE, "rank %d has another identity: %s", r, difference);
    } else if (first && (first->partition_digest != h->partition_digest || first->context != h->context)) {
        suspect(g, true, EXIT_UNAVAILABLE, "ranks disagree on %s",
                first->context != h->context ? "the context" : "the partition");
    }
}

static void take_hello(struct group *g, int r, const struct wire_hello *h)
{
    struct rank_process *p = &g->rank[r];
    if (p->said_hello) {
        suspect(g, false, EXIT_INTERNAL, "rank %d said hello twice", r);
        return;
    }
    p->said_hello = true;
    p->hello = *h;
    check_hello(g, r);
    for (int i = 0; i < g->options->ranks; i++)
        if (!g->rank[i].said_hello) return;
    if (g->failing) return;
    g->state = GROUP_READY;
    queue_event(g, GROUP_EVENT_READY, "", 0);
}

/* ---- sockets ---- */

static void take_frame(struct group *g, int r, const struct wire_frame *f, const void *bytes, size_t n_bytes)
{
    switch (f->type) {
    case WIRE_HELLO: take_hello(g, r, &f->u.hello); return;
    case WIRE_ERROR:
        g->rank[r].has_words = true;
        g->rank[r].words = f->u.text;
        suspect(g, false, (int)f->u.text.exit_status, "rank %d: %s: %s", r, f->u.text.code, f->u.text.text);
        return;
    case WIRE_STATS: return;
    case WIRE_TOKEN:
    case WIRE_STARTED:
    case WIRE_SAVED:
    case WIRE_STOPPED:
    case WIRE_DONE:
    case WIRE_FAILED:
        if (r || g->state != GROUP_READY) break;
        queue_frame(g, f->type, bytes, n_bytes);
        return;
    case WIRE_SUBMIT:
    case WIRE_CANCEL:
    case WIRE_STOP:
    case WIRE_SHUTDOWN: break;
    }
    suspect(g, false, EXIT_INTERNAL, "rank %d sent a frame of type %d that is not its to send", r, (int)f->type);
}

static void decode_input(struct group *g, int r)
{
    struct rank_process *p = &g->rank[r];
    size_t at = 0;
    for (;;) {
        struct wire_frame f;
        struct err e = {0};
        size_t used;
        enum rc rc = wire_decode(p->in.data + at, p->in.len - at, &f, &used, &e);
        if (rc == RC_RETRY) break;
        if (rc != RC_OK) {
            suspect(g, false, EXIT_INTERNAL, "rank %d: %s", r, e.text);
            at = p->in.len;
            break;
        }
        take_frame(g, r, &f, p->in.data + at, used);
        wire_frame_free(&f);
        at += used;
    }
    if (!at) return;
    memmove(p->in.data, p->in.data + at, p->in.len - at);
    p->in.len -= at;
}

/* Bounded per turn, so that a rank that floods its socket cannot keep the runner from its other work. */
static void read_input(struct group *g, int r)
{
    struct rank_process *p = &g->rank[r];
    for (int turn = 0; turn < READ_TURNS && p->fd >= 0; turn++) {
        if (!buf_reserve(&p->in, READ_BYTES)) {
            suspect(g, false, EXIT_INTERNAL, "out of memory for the frames of rank %d", r);
            return;
        }
        ssize_t n = recv(p->fd, p->in.data + p->in.len, READ_BYTES, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) break;
        if (n <= 0) {
            close(p->fd);
            p->fd = -1;
            suspect(g, false, EXIT_UNAVAILABLE, "rank %d closed its socket", r);
            break;
        }
        p->in.len += (size_t)n;
    }
    if (p->in.len) decode_input(g, r);
}

static void flush_output(struct rank_process *p)
{
    while (p->fd >= 0 && p->out_sent < p->out.len) {
        ssize_t n = send(p->fd, p->out.data + p->out_sent, p->out.len - p->out_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return; /* full, or its end is about to be read */
        p->out_sent += (size_t)n;
    }
    buf_clear(&p->out);
    p->out_sent = 0;
}

/* Sent by the next pump: requests that are submitted together arrive together, and the first knows of the others. */
static bool queue_output(struct rank_process *p, const struct buf *frame) { return buf_append(&p->out, frame->data, frame->len); }

/* ---- turning the wheel ---- */

static void reap_ended(struct group *g, int r)
{
    struct rank_process *p = &g->rank[r];
    if (!p->pid || spawn_reap(p->pid, &p->status) != RC_OK) return;
    p->pid = 0;
    p->ended = true;
    suspect(g, false, EXIT_UNAVAILABLE, "rank %d left", r);
}

static void check_heartbeat(struct group *g, int r, int64_t now)
{
    struct rank_process *p = &g->rank[r];
    uint64_t beat = segment_heartbeat(g->segment.segment, r);
    int64_t watchdog_us = g->options->bounds.watchdog_us;
    if (beat != p->beat) {
        p->beat = beat;
        p->beat_us = now;
    } else if (now - p->beat_us > watchdog_us) {
        suspect(g, false, EXIT_UNAVAILABLE, "rank %d has not moved for %.1f s", r, (double)watchdog_us / 1e6);
    }
}

static void watch_ranks(struct group *g)
{
    char reason[600];
    int64_t now = clock_now_us(), since = now - g->pumped_us;
    g->pumped_us = now;
    for (int r = 0; r < g->options->ranks; r++) {
        if (since > gap_us) g->rank[r].beat_us += since;
        flush_output(&g->rank[r]);
        read_input(g, r);
        reap_ended(g, r);
        check_heartbeat(g, r, now);
    }
    int p = poisoner(g, reason, sizeof reason);
    if (p >= 0) suspect(g, false, EXIT_UNAVAILABLE, "rank %d: %s", p, reason);
    if (g->failing && inquest_is_over(g)) lose(g);
}

void group_pump(struct group *g)
{
    if (g->state == GROUP_STARTING || g->state == GROUP_READY)
        watch_ranks(g);
    else if (g->state == GROUP_BACKOFF && clock_now_us() >= g->due_us)
        restart_or_give_up(g);
}

int group_poll_fds(struct group *g, struct pollfd *out, int *timeout_ms)
{
    int n = 0;
    int64_t due_ms = g->failing ? INQUEST_TURN_MS : TURN_MS;
    if (g->state == GROUP_GAVE_UP || g->state == GROUP_CLOSED) return 0;
    if (g->state == GROUP_BACKOFF) {
        int64_t left_us = g->due_us - clock_now_us();
        due_ms = left_us > 0 ? left_us / 1000 + 1 : 0;
    } else if (g->options->bounds.watchdog_us / 4000 < due_ms) {
        due_ms = g->options->bounds.watchdog_us / 4000 + 1;
    }
    for (int r = 0; r < g->options->ranks; r++) {
        const struct rank_process *p = &g->rank[r];
        if (p->fd < 0) continue;
        bool pending = p->out_sent < p->out.len;
        out[n++] = (struct pollfd){.fd = p->fd, .events = (short)(pending ? POLLIN | POLLOUT : POLLIN)};
    }
    if (*timeout_ms < 0 || due_ms < *timeout_ms) *timeout_ms = (int)due_ms;
    return n;
}

/* ---- the owner's side ---- */

enum rc group_open(const struct options *o, int group_index, const char *identity, struct group **out, struct err *e)
{
    enum rc rc = RC_OK;
    struct group *g = calloc(1, sizeof *g);
    *out = NULL;
    if (!g) return err_no_memory(e);
    g->options = o;
    g->index = group_index;
    g->segment.fd = -1;
    g->backoff_us = backoff_first_us;
    for (int r = 0; r < MAX_RANKS; r++) g->rank[r].fd = -1;
    g->identity = strdup(identity);
    if (!g->identity) {
        rc = err_no_memory(e);
        goto free_group;
    }
    rc = lockstep_bounds_check(&o->bounds, e);
    if (rc != RC_OK) goto free_group;
    struct rank_args a = rank_args_make(o, group_index, 0);
    struct engine_options engine = rank_args_engine(&a);
    struct engine_comm_shape shape;
    rc = engine_comm_shape(&engine, &shape, e);
    if (rc != RC_OK) goto free_group;
    g->comm_bytes = engine_comm_bytes(shape);
    launch(g);
    *out = g;
    return RC_OK;
free_group:
    free(g->identity);
    free(g);
    return rc;
}

enum group_state group_state_of(const struct group *g) { return g->failing ? GROUP_BACKOFF : g->state; }

const struct wire_hello *group_hello(const struct group *g)
{
    return g->state == GROUP_READY ? &g->rank[0].hello : NULL;
}

int64_t group_restarts(const struct group *g) { return g->launches - 1; }

pid_t group_rank_pid(const struct group *g, int rank)
{
    return rank >= 0 && rank < g->options->ranks ? g->rank[rank].pid : 0;
}

enum rc group_submit(struct group *g, const struct engine_request *r, struct err *e)
{
    struct wire_frame f = {.type = WIRE_SUBMIT, .u.submit = *r};
    struct buf frame = {0};
    enum rc rc = RC_OK;
    if (group_state_of(g) != GROUP_READY) return RC_RETRY;
    if (!wire_encode(&f, &frame)) {
        rc = frame.failed ? err_no_memory(e)
                          : err_set(e, RC_BAD_INPUT, 0, "request_too_large", "a prompt of %zu tokens does not fit into a frame",
                                    r->prompt_tokens);
        goto out;
    }
    for (int i = 0; i < g->options->ranks && rc == RC_OK; i++)
        if (!queue_output(&g->rank[i], &frame)) rc = err_no_memory(e);
    /* Half a group with the request is a group that will disagree. */
    if (rc != RC_OK) suspect(g, false, EXIT_INTERNAL, "out of memory while submitting");
out:
    buf_free(&frame);
    return rc;
}

static void tell_first(struct group *g, const struct wire_frame *f)
{
    struct buf frame = {0};
    if (group_state_of(g) == GROUP_READY && wire_encode(f, &frame)) queue_output(&g->rank[0], &frame);
    buf_free(&frame);
}

void group_cancel(struct group *g, uint64_t id) { tell_first(g, &(struct wire_frame){.type = WIRE_CANCEL, .u.cancel = id}); }
void group_stop(struct group *g) { tell_first(g, &(struct wire_frame){.type = WIRE_STOP}); }

void group_progress(struct group *g)
{
    g->without_progress = 0;
    if (g->state != GROUP_BACKOFF) g->backoff_us = backoff_first_us;
}

/* Waits until every rank has ended by itself, at most until the given time. */
static void await_leaving(struct group *g, int64_t until_us)
{
    for (;;) {
        struct pollfd fds[MAX_RANKS];
        int n = 0, living = 0;
        for (int r = 0; r < g->options->ranks; r++) {
            flush_output(&g->rank[r]);
            read_input(g, r);
            reap_ended(g, r);
            living += g->rank[r].pid != 0;
            if (g->rank[r].fd >= 0) fds[n++] = (struct pollfd){.fd = g->rank[r].fd, .events = POLLIN};
        }
        int64_t left_us = until_us - clock_now_us();
        if (!living || left_us <= 0) return;
        poll(fds, (nfds_t)n, n && left_us > CLOSE_TURN_MS * 1000 ? CLOSE_TURN_MS : 1);
    }
}

void group_close(struct group *g, int64_t grace_us)
{
    if (!g) return;
    if (g->state == GROUP_READY && grace_us > 0) {
        struct wire_frame f = {.type = WIRE_SHUTDOWN};
        struct buf frame = {0};
        bool ok = wire_encode(&f, &frame);
        for (int r = 0; r < g->options->ranks && ok; r++) ok = queue_output(&g->rank[r], &frame);
        if (ok) await_leaving(g, clock_now_us() + grace_us);
        buf_free(&frame);
    }
    end_ranks(g);
    for (size_t i = 0; i < g->n_events; i++) buf_free(&g->events[i].bytes);
    buf_free(&g->current.bytes);
    wire_frame_free(&g->frame);
    free(g->events);
    free(g->identity);
    free(g);
}
