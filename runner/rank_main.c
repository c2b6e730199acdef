/* rank_main: the life of a rank process.
 *
 * A rank is one thread around one engine: it takes what the runner sent, runs one step, sends what came of it, and starts
 * again. It never blocks on the socket: input is read when it is there, output waits in a buffer until the socket takes it,
 * so a runner that is busy for a while cannot stop the group. While idle it wakes five times a second to move its
 * heartbeat; while a step runs, the engine moves it. A rank that waits for a request which a plan names already does not
 * move it, so that a peer's bounded wait can expire.
 *
 * Who stops whom: the runner alone decides. A rank has its own process group and ignores INT, TERM and HUP; it leaves when
 * told to, when its socket ends, when its parent dies (PDEATHSIG, checked afterwards because the parent may be gone before
 * it is set), or on an error. On an error it poisons the group first, so that no peer waits for it in vain, then sends its
 * last words and leaves with the error's status.
 *
 * Which backend that is, rank_backend knows. */
#define _GNU_SOURCE
#include "rank_main.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "checkpoint_store.h"
#include "comm.h"
#include "kern.h"
#include "prefix_store.h"
#include "rank_args.h"
#include "rank_backend.h"
#include "rank_wire.h"

enum { IDLE_TURN_MS = 200, STARVED_TURN_MS = 1, READ_BYTES = 1 << 16, LAST_WORDS_MS = 1000 };
static const int64_t progress_every_us = 50000;

struct rank {
    struct rank_args args;
    struct segment *segment;
    void *map;
    size_t map_bytes;
    struct kern *kern;
    struct comm *comm;
    struct engine *engine;
    struct prefix_store *prefixes;
    struct checkpoint_store *checkpoints;
    struct buf in, out;
    size_t out_sent;
    struct buf queued; /* rank 0: uint64_t ids of requests whose first row has not been reported */
    bool leaving;      /* told to, or the socket ended */
    bool stopping;     /* rank 0: told to save what runs */
    bool socket_ended;
    struct wire_token reported;
    int64_t reported_us;
};

/* ---- the socket ---- */

static bool send_frame(struct rank *r, const struct wire_frame *f) { return wire_encode(f, &r->out); }

/* Writes what the socket takes now. A runner that is gone is noticed as the end of input. */
static void flush_output(struct rank *r)
{
    while (r->out_sent < r->out.len) {
        ssize_t n = send(r->args.socket_fd, r->out.data + r->out_sent, r->out.len - r->out_sent,
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            if (errno != EAGAIN) r->socket_ended = true;
            return;
        }
        r->out_sent += (size_t)n;
    }
    buf_clear(&r->out);
    r->out_sent = 0;
}

/* For the last frames only: waits a bounded time for the socket to take them. */
static void flush_before_leaving(struct rank *r)
{
    int64_t until = clock_now_us() + LAST_WORDS_MS * 1000;
    flush_output(r);
    while (r->out_sent < r->out.len && !r->socket_ended && clock_now_us() < until) {
        struct pollfd p = {.fd = r->args.socket_fd, .events = POLLOUT};
        poll(&p, 1, 50);
        flush_output(r);
    }
}

static enum rc read_input(struct rank *r, struct err *e)
{
    for (;;) {
        if (!buf_reserve(&r->in, READ_BYTES)) return err_no_memory(e);
        ssize_t n = recv(r->args.socket_fd, r->in.data + r->in.len, READ_BYTES, MSG_DONTWAIT);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return RC_OK;
        if (n <= 0) {
            r->socket_ended = true;
            return RC_OK;
        }
        r->in.len += (size_t)n;
    }
}

static size_t queued_count(const struct rank *r) { return r->queued.len / sizeof(uint64_t); }

static uint64_t queued_id(const struct rank *r, size_t i)
{
    uint64_t id;
    memcpy(&id, r->queued.data + i * sizeof id, sizeof id);
    return id;
}

static void queued_drop(struct rank *r, size_t i)
{
    char *at = r->queued.data + i * sizeof(uint64_t);
    r->queued.len -= sizeof(uint64_t);
    memmove(at, at + sizeof(uint64_t), r->queued.len - i * sizeof(uint64_t));
}

/* A request that was cancelled, or ended in its first step. */
static void queued_forget(struct rank *r, uint64_t id)
{
    for (size_t i = queued_count(r); i-- > 0;)
        if (queued_id(r, i) == id) queued_drop(r, i);
}

/* A request that breaks the engine's rules breaks them on every rank alike; rank 0 says so and all go on. */
static enum rc take_submit(struct rank *r, const struct engine_request *request, struct err *e)
{
    struct err refused = {0};
    enum rc rc = engine_submit(r->engine, request, &refused);
    if (rc == RC_OK)
        return r->args.rank || buf_append(&r->queued, &request->id, sizeof request->id) ? RC_OK : err_no_memory(e);
    if (rc != RC_BAD_INPUT) {
        if (e) *e = refused;
        return rc;
    }
    if (r->args.rank) return RC_OK;
    struct wire_frame f = {.type = WIRE_FAILED, .u.text.id = request->id};
    snprintf(f.u.text.code, sizeof f.u.text.code, "%s", refused.code);
    snprintf(f.u.text.text, sizeof f.u.text.text, "%s", refused.text);
    return send_frame(r, &f) ? RC_OK : err_no_memory(e);
}

static enum rc take_frame(struct rank *r, const struct wire_frame *f, struct err *e)
{
    switch (f->type) {
    case WIRE_SUBMIT: return take_submit(r, &f->u.submit, e);
    case WIRE_CANCEL:
        if (r->args.rank) return RC_OK;
        engine_cancel(r->engine, f->u.cancel);
        queued_forget(r, f->u.cancel);
        return RC_OK;
    case WIRE_SHUTDOWN: r->leaving = true; return RC_OK;
    case WIRE_STOP:
        if (r->args.rank) return RC_OK;
        engine_stop(r->engine);
        r->stopping = true;
        return RC_OK;
    case WIRE_HELLO:
    case WIRE_TOKEN:
    case WIRE_DONE:
    case WIRE_FAILED:
    case WIRE_STATS:
    case WIRE_ERROR:
    case WIRE_STARTED:
    case WIRE_SAVED:
    case WIRE_STOPPED: break;
    }
    return err_set(e, RC_FATAL, EXIT_INTERNAL, "bad_frame", "the runner sent a frame of type %d", (int)f->type);
}

static enum rc take_input(struct rank *r, struct err *e)
{
    size_t at = 0;
    enum rc rc = RC_OK;
    while (rc == RC_OK && !r->leaving) {
        struct wire_frame f;
        size_t used;
        rc = wire_decode(r->in.data + at, r->in.len - at, &f, &used, e);
        if (rc != RC_OK) break;
        rc = take_frame(r, &f, e);
        wire_frame_free(&f);
        at += used;
    }
    if (at) {
        memmove(r->in.data, r->in.data + at, r->in.len - at);
        r->in.len -= at;
    }
    return rc == RC_RETRY ? RC_OK : rc;
}

static enum rc exchange(struct rank *r, int timeout_ms, struct err *e)
{
    struct pollfd p = {.fd = r->args.socket_fd, .events = POLLIN};
    if (r->out_sent < r->out.len) p.events |= POLLOUT;
    if (poll(&p, 1, timeout_ms) < 0 && errno != EINTR)
        return err_errno(e, RC_FATAL, EXIT_INTERNAL, "poll_failed", "cannot wait for the runner");
    flush_output(r);
    if (p.revents & (POLLIN | POLLHUP | POLLERR)) {
        enum rc rc = read_input(r, e);
        if (rc != RC_OK) return rc;
    }
    enum rc rc = take_input(r, e);
    if (r->socket_ended) r->leaving = true;
    return rc;
}

/* ---- what a step produced ---- */

static bool send_done(struct rank *r, const struct engine_event *v)
{
    struct wire_frame f = {.type = WIRE_DONE,
                           .u.done = {.id = v->id, .finish = (uint32_t)v->finish, .prompt_tokens = v->prompt_tokens,
                                      .timing = v->timing, .text = v->text, .text_len = v->text_len,
                                      .tokens = v->tokens, .n_tokens = v->n_tokens, .trace = v->trace}};
    return send_frame(r, &f);
}

static bool send_failed(struct rank *r, const struct engine_event *v)
{
    struct wire_frame f = {.type = WIRE_FAILED, .u.text.id = v->id};
    snprintf(f.u.text.code, sizeof f.u.text.code, "%s", v->code ? v->code : "engine_error");
    snprintf(f.u.text.text, sizeof f.u.text.text, "%s", v->message ? v->message : "");
    return send_frame(r, &f);
}

/* The runner counts a job's time from here: waiting in the engine's queue is not the job's. */
static bool send_started(struct rank *r)
{
    bool ok = true;
    for (size_t i = queued_count(r); ok && i-- > 0;) {
        struct wire_frame f = {.type = WIRE_STARTED, .u.started = queued_id(r, i)};
        if (engine_position(r->engine, f.u.started) == 0) continue;
        ok = send_frame(r, &f);
        queued_drop(r, i);
    }
    return ok;
}

/* Progress is for a person's eyes: one frame in 50 ms at most, and none when nothing moved; but always before an answer, so
 * that totals are right when the last one arrives. */
static bool send_progress(struct rank *r, bool at_once)
{
    struct engine_stats s = engine_stats_of(r->engine);
    struct wire_token now = {s.steps, s.tokens, s.prefill_rows};
    int64_t now_us = clock_now_us();
    if (now.step == r->reported.step) return true;
    if (!at_once && now_us - r->reported_us < progress_every_us) return true;
    struct wire_frame f = {.type = WIRE_TOKEN, .u.token = now};
    r->reported = now;
    r->reported_us = now_us;
    return send_frame(r, &f);
}

static bool send_saved(struct rank *r)
{
    struct wire_frame f = {.type = WIRE_SAVED};
    int position;
    bool ok = true;
    while (ok && engine_next_saved(r->engine, &f.u.saved.id, &position)) {
        f.u.saved.position = (uint32_t)position;
        ok = send_frame(r, &f);
    }
    return ok;
}

static enum rc report_step(struct rank *r, struct err *e)
{
    struct engine_event v;
    bool ok = true;
    if (r->args.rank) return RC_OK;
    while (ok && engine_next_event(r->engine, &v)) {
        ok = send_progress(r, true);
        if (ok && v.kind == ENGINE_EVENT_DONE) ok = send_done(r, &v);
        if (ok && v.kind == ENGINE_EVENT_FAILED) ok = send_failed(r, &v);
        queued_forget(r, v.id);
    }
    if (!ok || !send_started(r) || !send_saved(r) || !send_progress(r, false))
        return err_set(e, RC_FATAL, EXIT_INTERNAL, "frame_too_large", "an answer does not fit into a frame");
    flush_output(r);
    return RC_OK;
}

/* Rank 0, told to stop: it moves its heartbeat while the disk is written, and says so when all of it is. */
static enum rc look_whether_stopped(struct rank *r, bool *stopped, struct err *e)
{
    const struct wire_frame f = {.type = WIRE_STOPPED};
    if (!r->stopping || *stopped) return RC_OK;
    segment_beat(r->segment, r->args.rank);
    if (!engine_stopped(r->engine)) return RC_OK;
    *stopped = true;
    if (!send_saved(r) || !send_frame(r, &f)) return err_no_memory(e);
    flush_output(r);
    return RC_OK;
}

static enum rc serve(struct rank *r, struct err *e)
{
    bool starved = false; /* a plan was not there, or names a request that is still on its way */
    bool stopped = false;
    while (!r->leaving) {
        bool busy = engine_busy(r->engine) && !stopped;
        if (!busy) segment_beat(r->segment, r->args.rank);
        enum rc rc = exchange(r, !busy ? IDLE_TURN_MS : starved ? STARVED_TURN_MS : 0, e);
        if (rc == RC_OK) rc = look_whether_stopped(r, &stopped, e);
        if (rc != RC_OK) return rc;
        starved = false;
        if (r->leaving || stopped || !engine_busy(r->engine)) continue;
        struct err stepped = {0};
        rc = engine_step(r->engine, &stepped);
        if (rc == RC_RETRY) {
            starved = true;
            continue;
        }
        if (rc != RC_OK) {
            *e = stepped;
            return rc;
        }
        rc = report_step(r, e);
        if (rc != RC_OK) return rc;
    }
    return RC_OK;
}

/* ---- start and end ---- */

static enum rc settle_in(struct rank *r, struct err *e)
{
    char prefix[32];
    struct stat st;
    snprintf(prefix, sizeof prefix, "[g%d r%d] ", r->args.group, r->args.rank);
    log_set(r->args.options.quiet ? LOG_WARN : LOG_INFO, prefix);
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    if (prctl(PR_SET_PDEATHSIG, SIGKILL))
        return err_errno(e, RC_FATAL, EXIT_INTERNAL, "no_pdeathsig", "cannot follow the runner's death");
    if (getppid() != (pid_t)r->args.runner_pid)
        return err_set(e, RC_FATAL, EXIT_INTERNAL, "no_runner", "the runner is gone");
    if (fstat(r->args.segment_fd, &st) || st.st_size <= 0)
        return err_set(e, RC_FATAL, EXIT_INTERNAL, "no_segment", "descriptor %d is no segment", r->args.segment_fd);
    r->map_bytes = (size_t)st.st_size;
    void *map = mmap(NULL, r->map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, r->args.segment_fd, 0);
    if (map == MAP_FAILED) return err_errno(e, RC_FATAL, EXIT_INTERNAL, "no_segment", "cannot map the shared segment");
    r->map = map;
    close(r->args.segment_fd);
    r->segment = segment_attach(map, r->map_bytes, r->args.options.ranks, e);
    return r->segment ? RC_OK : RC_FATAL;
}

static enum rc say_hello(struct rank *r, const struct buf *identity, int64_t load_us, struct err *e)
{
    struct engine_sizes l = engine_sizes_of(r->engine);
    struct wire_frame f = {.type = WIRE_HELLO,
                           .u.hello = {.version = WIRE_VERSION, .rank = (uint32_t)r->args.rank,
                                       .ranks = (uint32_t)r->args.options.ranks, .context = (uint32_t)l.limits.context,
                                       .partition_digest = l.partition_digest, .kv_tokens = (uint64_t)l.limits.kv_tokens,
                                       .weight_bytes = l.weight_bytes, .kv_bytes = l.kv_bytes,
                                       .load_us = (uint64_t)load_us}};
    if (identity->len >= sizeof f.u.hello.identity)
        return err_set(e, RC_FATAL, EXIT_INTERNAL, "identity_too_long", "the identity has %zu bytes", identity->len);
    memcpy(f.u.hello.identity, identity->data, identity->len);
    return send_frame(r, &f) ? RC_OK : err_no_memory(e);
}

static struct prefix_key fingerprint_of(const struct engine_prefix_shape *shape, const struct buf *identity)
{
    struct prefix_key out;
    XXH128_canonical_t fingerprint;
    XXH128_canonicalFromHash(&fingerprint, XXH3_128bits_withSeed(identity->data, identity->len, shape->seed));
    memcpy(out.bytes, fingerprint.digest, sizeof out.bytes);
    return out;
}

/* Without a place for checkpoints a rank does not start: the run was promised them. */
static enum rc open_checkpoints(struct rank *r, const struct buf *identity, struct err *e)
{
    const struct options *o = &r->args.options;
    const struct engine_prefix_shape shape = engine_prefix_shape_of(r->engine);
    const struct checkpoint_store_options c = {.folder = o->checkpoints, .rank = r->args.rank, .fingerprint = fingerprint_of(&shape, identity),
                                               .page_bytes = shape.block_bytes};
    if (!o->checkpoints || !o->checkpoint_us) return RC_OK;
    enum rc rc = checkpoint_store_open(&c, &r->checkpoints, e);
    if (rc == RC_OK) engine_use_checkpoints(r->engine, r->checkpoints);
    return rc;
}

/* A cache that cannot be had costs time, nothing else: this rank offers nothing then. But a full disk ends the run. */
static enum rc open_prefixes(struct rank *r, const struct buf *identity, struct err *e)
{
    const struct options *o = &r->args.options;
    const struct engine_prefix_shape shape = engine_prefix_shape_of(r->engine);
    struct prefix_store_options p = {.folder = o->cache, .rank = r->args.rank, .block_bytes = shape.block_bytes, .state_bytes = shape.state_bytes,
                                     .quota_bytes = (uint64_t)o->cache_gib << 30, .free_floor_bytes = (uint64_t)o->cache_free_gib << 30};
    struct err why = {0};
    char line[sizeof why.text + 320];
    if (!o->cache) return RC_OK;
    p.fingerprint = fingerprint_of(&shape, identity);
    const enum rc rc = prefix_store_open(&p, &r->prefixes, &why);
    segment_beat(r->segment, r->args.rank);
    if (rc == RC_OK) {
        engine_use_prefixes(r->engine, r->prefixes);
    } else if (!strcmp(why.code, "store_disk_full")) {
        *e = why;
        return RC_FATAL;
    } else {
        log_line(LOG_WARN, "going on without the cache: %s", err_format(&why, line, sizeof line));
    }
    return RC_OK;
}

static enum rc load(struct rank *r, struct err *e)
{
    struct buf identity = {0};
    int64_t start_us = clock_now_us();
    struct engine_options options = rank_args_engine(&r->args);
    enum rc rc = rank_backend_open(&r->args.options, r->args.group, r->args.rank, r->segment, &r->kern, &r->comm, e);
    if (rc != RC_OK) goto out;
    segment_beat(r->segment, r->args.rank);
    rc = rank_identity(&r->args.options, r->args.rank, &identity, e);
    if (rc != RC_OK) goto out;
    segment_beat(r->segment, r->args.rank);
    rc = engine_open(&options, r->kern, r->comm, r->segment, &r->engine, e);
    if (rc != RC_OK) goto out;
    rc = open_prefixes(r, &identity, e);
    if (rc == RC_OK) rc = open_checkpoints(r, &identity, e);
    if (rc == RC_OK) rc = say_hello(r, &identity, clock_now_us() - start_us, e);
out:
    buf_free(&identity);
    return rc;
}

static void say_why(struct rank *r, const struct err *e)
{
    struct wire_frame f = {.type = WIRE_ERROR, .u.text.exit_status = (uint32_t)e->exit_status};
    char line[sizeof e->text + 320];
    if (r->segment) segment_poison(r->segment, r->args.rank, e->text);
    snprintf(f.u.text.code, sizeof f.u.text.code, "%s", e->code);
    const int place = e->source[0] ? snprintf(f.u.text.text, sizeof f.u.text.text, "%s: ", e->source) : 0;
    snprintf(f.u.text.text + place, sizeof f.u.text.text - (size_t)place, "%.*s", (int)sizeof e->text, e->text);
    if (!send_frame(r, &f)) r->socket_ended = true;
    flush_before_leaving(r);
    if (r->socket_ended) log_line(LOG_ERROR, "%s", err_format(e, line, sizeof line));
}

static void say_goodbye(struct rank *r)
{
    if (!r->engine || r->socket_ended) return;
    struct wire_frame f = {.type = WIRE_STATS, .u.stats = engine_stats_of(r->engine)};
    if (send_frame(r, &f)) flush_before_leaving(r);
}

int rank_main(int argc, char **argv)
{
    struct rank r = {0};
    struct err e = {0};
    char line[sizeof e.text + 320];
    if (rank_args_read(argc, argv, &r.args, &e) != RC_OK) {
        log_line(LOG_ERROR, "%s", err_format(&e, line, sizeof line));
        return e.exit_status;
    }
    enum rc rc = settle_in(&r, &e);
    if (rc == RC_OK) rc = load(&r, &e);
    if (rc == RC_OK) rc = serve(&r, &e);
    if (rc == RC_OK)
        say_goodbye(&r);
    else
        say_why(&r, &e);
    if (r.engine) engine_close(r.engine);
    prefix_store_close(r.prefixes);
    checkpoint_store_close(r.checkpoints);
    if (r.comm) r.comm->close(r.comm);
    if (r.kern) r.kern->close(r.kern);
    if (r.map) munmap(r.map, r.map_bytes);
    buf_free(&r.in);
    buf_free(&r.out);
    buf_free(&r.queued);
    if (rc == RC_OK) return EXIT_DONE;
    return e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
