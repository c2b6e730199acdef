/* lockstep_wait: publish a counter, wait for a counter; no other waiting exists between ranks.
 *
 * Publishing is a store of the counter followed by a look at `sleepers`; a waiter raises `sleepers` and then looks at
 * the counter again. These four operations are sequentially consistent, so at least one side sees the other: either the
 * waiter finds the value, or the publisher rings the bell. The bell is read before that second look, hence a ring in
 * between makes the futex call return at once. Should all this be wrong on some machine, each sleep ends after NAP_US
 * anyway: a lost wake costs a millisecond, never a hang. The futex is not private: ranks are processes.
 *
 * Whose fault is it? A waiting rank makes no progress and bumps no heartbeat, so with three ranks a hang of A stops B,
 * which waits for A, and C, which waits for B. Each sleeper therefore announces what it sleeps for, and a waiter
 * follows these announcements from its peer to the first rank that does not itself wait for something still missing.
 * Only that rank's heartbeat counts, for everybody, and that rank is blamed. An announcement whose counter has arrived
 * no longer explains anything: that rank ought to be running. Announcements come only after the spin, off the fast
 * path.
 *
 * Time counts only while it is watched: one look adds at most an eighth of the bound. After a freeze of the whole group
 * (a stopped container, a debugger) nobody is blamed at the first look, and no late wake-up expires a wait. */
#define _GNU_SOURCE
#include "lockstep_wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { NAP_US = 1000 };

static void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static void bell_sleep(_Atomic uint32_t *bell, uint32_t heard, int64_t us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    syscall(SYS_futex, bell, FUTEX_WAIT, heard, &t, NULL, 0);
}

static void bell_ring(_Atomic uint32_t *bell)
{
    atomic_fetch_add(bell, 1);
    syscall(SYS_futex, bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void lockstep_wake_all(struct segment *s)
{
    for (uint32_t r = 0; r < s->ranks; r++) bell_ring(&s->rank[r].bell);
}

void lockstep_publish(struct segment *s, int self, enum segment_channel channel, uint64_t value)
{
    struct segment_rank *me = &s->rank[self];
    atomic_store(&me->word[channel].value, value);
    if (atomic_load(&me->sleepers)) bell_ring(&me->bell);
}

uint64_t lockstep_published(const struct segment *s, int rank, enum segment_channel channel)
{
    return atomic_load_explicit(&s->rank[rank].word[channel].value, memory_order_acquire);
}

/* The rank that keeps `w->peer` from going on: the end of the chain of announced waits. *circle: there is none, the
 * ranks wait for each other; the peer itself is returned then. */
static int chain_end(const struct segment *s, const struct lockstep_wait *w, bool *circle)
{
    int at = w->peer;
    *circle = false;
    for (uint32_t hops = 0; hops < s->ranks; hops++) {
        uint32_t code = atomic_load_explicit(&s->rank[at].waits_for, memory_order_acquire);
        if (!code || code > s->ranks * SEGMENT_CHANNELS) return at;
        uint64_t value = atomic_load_explicit(&s->rank[at].waits_value, memory_order_relaxed);
        int next = (int)((code - 1) / SEGMENT_CHANNELS);
        if (lockstep_published(s, next, (enum segment_channel)((code - 1) % SEGMENT_CHANNELS)) >= value) return at;
        if (next == w->self) break;
        at = next;
    }
    *circle = true;
    return w->peer;
}

/* One look at whom the wait depends on; true when its heartbeat has stood still for the bound. */
static bool stall_look(const struct segment *s, const struct lockstep_wait *w, struct segment_stall *stall,
                       bool *circle)
{
    int64_t now = clock_now_us();
    int rank = chain_end(s, w, circle);
    uint64_t beat = segment_heartbeat(s, rank);
    if (!stall->watching || stall->rank != rank || stall->beat != beat) {
        *stall = (struct segment_stall){true, rank, beat, now, 0};
        return false;
    }
    int64_t since = now - stall->looked_us, most = w->bound_us / 8 + 1;
    stall->still_us += since < most ? since : most;
    stall->looked_us = now;
    return stall->still_us >= w->bound_us;
}

enum rc lockstep_check(const struct segment *s, struct err *e)
{
    int author;
    char reason[SEGMENT_REASON_BYTES];
    if (!segment_poisoned(s, &author, reason, sizeof reason)) return RC_OK;
    if (author < 0) {
        return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "group_poisoned", "the runner stopped the group: %s", reason);
    }
    return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "group_poisoned", "rank %d stopped the group: %s", author, reason);
}

static enum rc fail_stalled(struct segment *s, const struct lockstep_wait *w, const struct segment_stall *stall,
                            bool circle, struct err *e)
{
    struct err mine = {0};
    double seconds = (double)stall->still_us / 1e6;
    if (circle) {
        err_set(&mine, RC_FATAL, EXIT_UNAVAILABLE, "peer_stalled",
                "rank %d and rank %d wait for each other: no heartbeat for %.1f s (%s)", w->self, w->peer, seconds,
                w->what);
    } else {
        err_set(&mine, RC_FATAL, EXIT_UNAVAILABLE, "peer_stalled", "rank %d stalled: no heartbeat for %.1f s (%s)",
                stall->rank, seconds, w->what);
    }
    segment_poison(s, w->self, mine.text);
    if (e && e->rc == RC_OK) *e = mine;
    return RC_FATAL;
}

enum rc lockstep_watch(struct segment *s, int rank, struct err *e)
{
    segment_beat(s, rank);
    enum rc rc = lockstep_check(s, e);
    for (int peer = 0; peer < (int)s->ranks && rc == RC_OK; peer++) {
        if (peer == rank) continue;
        /* Nothing is awaited by a counter: only whose heartbeat counts is asked for. */
        struct lockstep_wait w = {.self = rank, .peer = peer, .bound_us = s->bounds.collective_us, .what = "device"};
        struct segment_stall *stall = &s->rank[rank].watch_stall[peer];
        bool circle, stalled = stall_look(s, &w, stall, &circle);
        if (circle)
            *stall = (struct segment_stall){0};
        else if (stalled)
            rc = fail_stalled(s, &w, stall, false, e);
    }
    return rc;
}

/* Sleeps until the peer's bell, at most us; not at all when the counter has arrived meanwhile. */
static void nap(struct segment *s, const struct lockstep_wait *w, int64_t us)
{
    struct segment_rank *peer = &s->rank[w->peer];
    atomic_fetch_add(&peer->sleepers, 1);
    uint32_t heard = atomic_load(&peer->bell);
    bool arrived = atomic_load(&peer->word[w->channel].value) >= w->value;
    if (!arrived && !atomic_load(&s->poison)) bell_sleep(&peer->bell, heard, us);
    atomic_fetch_sub(&peer->sleepers, 1);
}

static enum rc wait_asleep(struct segment *s, const struct lockstep_wait *w, uint64_t *seen, struct err *e)
{
    struct segment_rank *me = &s->rank[w->self];
    struct segment_stall fresh = {0}, *stall = w->stall ? w->stall : &fresh;
    int64_t start = clock_now_us();
    enum rc rc;
    atomic_store_explicit(&me->waits_value, w->value, memory_order_relaxed);
    atomic_store_explicit(&me->waits_for, 1 + (uint32_t)w->peer * SEGMENT_CHANNELS + w->channel, memory_order_release);
    for (;;) {
        bool circle;
        /* Poison is read first: what its author published before it is then visible, and counts. */
        struct err why = {0};
        rc = lockstep_check(s, &why);
        *seen = lockstep_published(s, w->peer, w->channel);
        if (*seen >= w->value) {
            rc = RC_OK;
            break;
        }
        if (rc != RC_OK) {
            if (e && e->rc == RC_OK) *e = why;
            break;
        }
        if (stall_look(s, w, stall, &circle)) {
            rc = fail_stalled(s, w, stall, circle, e);
            break;
        }
        int64_t left = w->patience_us < 0 ? NAP_US : w->patience_us - (clock_now_us() - start);
        if (left <= 0) {
            rc = RC_RETRY;
            break;
        }
        nap(s, w, left < NAP_US ? left : NAP_US);
    }
    atomic_store_explicit(&me->waits_for, 0, memory_order_release);
    return rc;
}

enum rc lockstep_wait(struct segment *s, const struct lockstep_wait *w, uint64_t *seen, struct err *e)
{
    for (uint32_t i = 0; i <= s->spin_pauses; i++) {
        *seen = lockstep_published(s, w->peer, w->channel);
        if (*seen >= w->value) return RC_OK;
        spin_pause();
    }
    return wait_asleep(s, w, seen, e);
}
