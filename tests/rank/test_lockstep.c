/* Segment, plan, record, poison and the bounded wait, with ranks as threads. Bounds are short here; what a test waits
 * for in vain is bounded by them. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <stdio.h>
#include <unistd.h>

#include "lockstep_wait.h"
#include "segment_ranks.h"

enum { LONG_US = 30000000, SHORT_US = 60000 };

static void bounds_must_rise(void **state)
{
    (void)state;
    struct lockstep_bounds good = lockstep_bounds_default();
    assert_int_equal(lockstep_bounds_check(&good, NULL), RC_OK);
    struct lockstep_bounds bad[] = {{0, 1, 2}, {2, 2, 3}, {1, 3, 3}, {-1, 2, 3}, {3, 2, 4}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct err e = {0};
        assert_int_equal(lockstep_bounds_check(&bad[i], &e), RC_BAD_INPUT);
        assert_int_equal(e.exit_status, EXIT_USAGE);
    }
}

static void attach_refuses(struct rank_group *g, void *memory, size_t n_bytes, int ranks)
{
    struct err e = {0};
    (void)g;
    assert_null(segment_attach(memory, n_bytes, ranks, &e));
    assert_int_equal(e.rc, RC_FATAL);
    assert_string_equal(e.code, "bad_segment");
}

static void attach_checks_the_header(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 4096, LONG_US);
    struct segment *s = g.segment, good = *s;
    assert_int_equal(segment_bytes(0, 64), 0);
    assert_int_equal(segment_bytes(MAX_RANKS + 1, 64), 0);
    assert_int_equal(segment_bytes(2, SIZE_MAX), 0);
    assert_int_equal(segment_bytes(2, SIZE_MAX / 4), 0);
    attach_refuses(&g, NULL, g.n_bytes, 2);
    attach_refuses(&g, (char *)g.memory + 8, g.n_bytes - 8, 2);
    attach_refuses(&g, g.memory, 0, 2);
    attach_refuses(&g, g.memory, sizeof(struct segment) - 1, 2);
    attach_refuses(&g, g.memory, g.n_bytes - 1, 2);
    attach_refuses(&g, g.memory, g.n_bytes + 64, 2);
    attach_refuses(&g, g.memory, g.n_bytes, 1);
    attach_refuses(&g, g.memory, g.n_bytes, 3);
    attach_refuses(&g, g.memory, g.n_bytes, 0);
    s->magic ^= 1, attach_refuses(&g, g.memory, g.n_bytes, 2), s->magic = good.magic;
    s->version++, attach_refuses(&g, g.memory, g.n_bytes, 2), s->version = good.version;
    s->ranks = 3, attach_refuses(&g, g.memory, g.n_bytes, 2), s->ranks = 2;
    s->ranks = UINT32_MAX, attach_refuses(&g, g.memory, g.n_bytes, -1), s->ranks = 2;
    s->total_bytes++, attach_refuses(&g, g.memory, g.n_bytes, 2), s->total_bytes = good.total_bytes;
    uint64_t bad_comm[] = {4096 + 128, 0, UINT64_MAX, UINT64_MAX - 4096, UINT64_MAX / 4, UINT64_MAX / 2 + 4096};
    for (size_t i = 0; i < sizeof bad_comm / sizeof bad_comm[0]; i++)
        s->comm_bytes = bad_comm[i], attach_refuses(&g, g.memory, g.n_bytes, 2), s->comm_bytes = good.comm_bytes;
    s->spin_pauses = UINT32_MAX, attach_refuses(&g, g.memory, g.n_bytes, 2), s->spin_pauses = good.spin_pauses;
    s->bounds.collective_us = s->bounds.lockstep_us, attach_refuses(&g, g.memory, g.n_bytes, 2),
    s->bounds = good.bounds;
    assert_ptr_equal(segment_attach(g.memory, g.n_bytes, 2, NULL), s);
    rank_group_free(&g);
}

static void slots_lie_inside(void **state)
{
    (void)state;
    size_t sizes[] = {0, 1, 63, 64, 65, 4000, 100001};
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            struct rank_group g = rank_group_make(ranks, sizes[i], LONG_US);
            char *last = (char *)g.memory + sizeof(struct segment);
            for (int r = 0; r < ranks; r++)
                for (unsigned parity = 0; parity < 2; parity++) {
                    struct segment_slot *slot = segment_slot_of(g.segment, r, parity);
                    assert_true((char *)slot >= last);
                    assert_int_equal((uintptr_t)slot->payload % 64, 0);
                    last = (char *)slot->payload + sizes[i];
                }
            assert_true(last <= (char *)g.memory + g.n_bytes);
            rank_group_free(&g);
        }
}

enum { STEPS = 1500 };

/* A plan of step n: n mod 97 + 8 bytes that depend on n. */
static size_t plan_make(uint64_t step, unsigned char *out)
{
    size_t n = (size_t)(step % 97 + 8);
    for (size_t i = 0; i < n; i++) out[i] = (unsigned char)rank_noise(step * 131 + i);
    return n;
}

static struct lockstep_record record_make(uint64_t step)
{
    return (struct lockstep_record){step,     rank_noise(step),     step % 7, step % 3, rank_noise(step + 1),
                                    step * 5, rank_noise(step + 2), 0};
}

static void run_steps(struct rank_thread *t)
{
    unsigned char *plan = malloc(LOCKSTEP_PLAN_BYTES), expected[128];
    for (uint64_t step = 1; step <= STEPS && t->rc == RC_OK; step++) {
        size_t n_expected = plan_make(step, expected), n = 0;
        if (t->rank == 0) {
            lockstep_publish_plan(t->segment, step, expected, n_expected);
        } else {
            do {
                t->rc = lockstep_read_plan(t->segment, t->rank, step, 2000, plan, &n, &t->err);
            } while (t->rc == RC_RETRY);
            if (t->rc != RC_OK) break;
            if (n != n_expected || memcmp(plan, expected, n) != 0) t->wrong++;
        }
        segment_beat(t->segment, t->rank);
        if (rank_noise(step * 4 + (uint64_t)t->rank) % 50 == 0) sleep_us(200);
        struct lockstep_record mine = record_make(step);
        t->rc = lockstep_compare(t->segment, t->rank, &mine, &t->err);
    }
    free(plan);
}

static void steps_pass(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        struct rank_group g = rank_group_make(ranks, 0, LONG_US);
        rank_threads_run(&g, run_steps, NULL);
        for (int r = 0; r < ranks; r++) {
            assert_int_equal(g.thread[r].rc, RC_OK);
            assert_int_equal(g.thread[r].wrong, 0);
            assert_int_equal(segment_heartbeat(g.segment, r), STEPS);
        }
        assert_false(segment_poisoned(g.segment, NULL, NULL, 0));
        rank_group_free(&g);
    }
}

static void largest_plan(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 0, LONG_US);
    unsigned char *plan = malloc(LOCKSTEP_PLAN_BYTES + 1), *got = malloc(LOCKSTEP_PLAN_BYTES);
    size_t n = 0;
    for (size_t i = 0; i <= LOCKSTEP_PLAN_BYTES; i++) plan[i] = (unsigned char)rank_noise(i);
    lockstep_publish_plan(g.segment, 1, plan, LOCKSTEP_PLAN_BYTES);
    assert_int_equal(lockstep_read_plan(g.segment, 1, 1, 0, got, &n, NULL), RC_OK);
    assert_int_equal(n, LOCKSTEP_PLAN_BYTES);
    assert_memory_equal(plan, got, n);
    lockstep_publish_plan(g.segment, 2, plan, 0);
    assert_int_equal(lockstep_read_plan(g.segment, 1, 2, 0, got, &n, NULL), RC_OK);
    assert_int_equal(n, 0);
    /* A length that the slot cannot hold, and a plan that ran ahead. */
    struct err e = {0};
    g.segment->plan[0].n_bytes = LOCKSTEP_PLAN_BYTES + 1;
    assert_int_equal(lockstep_read_plan(g.segment, 1, 2, 0, got, &n, &e), RC_FATAL);
    assert_string_equal(e.code, "out_of_step");
    assert_int_equal(e.exit_status, EXIT_LOCKSTEP);
    rank_group_free(&g);

    g = rank_group_make(2, 0, LONG_US);
    lockstep_publish_plan(g.segment, 3, plan, 4);
    assert_int_equal(lockstep_read_plan(g.segment, 1, 2, 0, got, &n, NULL), RC_FATAL);
    rank_group_free(&g);

    g = rank_group_make(2, 0, LONG_US);
    lockstep_publish_plan(g.segment, 1, plan, LOCKSTEP_PLAN_BYTES + 1);
    assert_true(segment_poisoned(g.segment, NULL, NULL, 0));
    free(plan);
    free(got);
    rank_group_free(&g);
}

struct difference {
    size_t field;
    int rank;
    uint64_t step;
};

static void run_to_difference(struct rank_thread *t)
{
    const struct difference *d = t->shared;
    for (uint64_t step = 1; step <= d->step + 3 && t->rc == RC_OK; step++) {
        struct lockstep_record mine = record_make(step);
        uint64_t field[8];
        memcpy(field, &mine, sizeof field);
        if (t->rank == d->rank && step == d->step) field[d->field] ^= UINT64_C(1) << 40;
        memcpy(&mine, field, sizeof mine);
        if (d->field == 0 && step == d->step) sleep_us(1000);
        t->rc = lockstep_compare(t->segment, t->rank, &mine, &t->err);
    }
}

/* Runs with stderr going into a pipe; returns what came. A pipe keeps writes of several threads apart. */
static char *run_captured(struct rank_group *g, void (*body)(struct rank_thread *), void *shared)
{
    enum { MOST_BYTES = 16384 };
    int saved = dup(STDERR_FILENO), ends[2];
    assert_true(saved >= 0 && pipe(ends) == 0);
    dup2(ends[1], STDERR_FILENO);
    close(ends[1]);
    rank_threads_run(g, body, shared);
    dup2(saved, STDERR_FILENO);
    close(saved);
    char *text = calloc(1, MOST_BYTES + 1);
    size_t n = 0;
    for (ssize_t got; (got = read(ends[0], text + n, MOST_BYTES - n)) > 0;) n += (size_t)got;
    close(ends[0]);
    return text;
}

static void differences_stop_the_group(void **state)
{
    (void)state;
    static const char *const name[] = {"step",       "plan_digest",  "rows",         "tokens",
                                       "token_hash", "position_sum", "state_digest", "flags"};
    for (int ranks = 2; ranks <= 3; ranks++)
        for (size_t field = 1; field < 8; field++)
            for (uint64_t step = 4; step <= 5; step++) {
                struct difference d = {field, ranks - 1, step};
                struct rank_group g = rank_group_make(ranks, 0, LONG_US);
                char *text = run_captured(&g, run_to_difference, &d), line[200], reason[200];
                int author;
                snprintf(line, sizeof line, "LOCKSTEP FAILURE step=%" PRIu64 " field=%s rank", step, name[field]);
                int lines = 0;
                for (const char *at = text; (at = strstr(at, line)); at++) lines++;
                assert_in_range(lines, 2, ranks);
                for (int r = 0; r < ranks; r++) {
                    assert_int_equal(g.thread[r].rc, RC_FATAL);
                    if (strcmp(g.thread[r].err.code, "lockstep_failure") == 0) {
                        assert_int_equal(g.thread[r].err.exit_status, EXIT_LOCKSTEP);
                        lines--;
                    } else {
                        assert_string_equal(g.thread[r].err.code, "group_poisoned");
                    }
                }
                assert_int_equal(lines, 0); /* one line for each rank that found it, and it says so */
                assert_true(segment_poisoned(g.segment, &author, reason, sizeof reason));
                assert_memory_equal(reason, line, strlen(line));
                free(text);
                rank_group_free(&g);
            }
}

static void failure_line_is_exact(void **state)
{
    (void)state;
    struct difference d = {2, 1, 5};
    struct rank_group g = rank_group_make(2, 0, LONG_US);
    char *text = run_captured(&g, run_to_difference, &d);
    const char *line = "tandem: LOCKSTEP FAILURE step=5 field=rows rank0=5 rank1=1099511627781\n";
    char both[200];
    snprintf(both, sizeof both, "%s%s", line, line);
    assert_string_equal(text, both);
    free(text);
    rank_group_free(&g);
}

static void first_reason_wins(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(3, 0, LONG_US);
    int author = 7;
    char reason[64];
    assert_false(segment_poisoned(g.segment, &author, reason, sizeof reason));
    assert_int_equal(author, 7);
    segment_poison(g.segment, 2, "first");
    segment_poison(g.segment, 2, "again");
    segment_poison(g.segment, 1, "second");
    segment_poison(g.segment, -1, "runner");
    assert_true(segment_poisoned(g.segment, &author, reason, sizeof reason));
    assert_int_equal(author, 2);
    assert_string_equal(reason, "first");
    rank_group_free(&g);
    g = rank_group_make(1, 0, LONG_US);
    segment_poison(g.segment, -1, "stop");
    assert_true(segment_poisoned(g.segment, &author, reason, 3));
    assert_int_equal(author, -1);
    assert_string_equal(reason, "st");
    rank_group_free(&g);
}

static void poison_while_others_wait(struct rank_thread *t)
{
    if (t->rank == 0) {
        sleep_us(30000);
        segment_poison(t->segment, 0, "out of luck");
        return;
    }
    struct lockstep_record mine = record_make(1);
    t->rc = lockstep_compare(t->segment, t->rank, &mine, &t->err);
}

static void poison_ends_waits(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(3, 0, LONG_US);
    rank_threads_run(&g, poison_while_others_wait, NULL);
    for (int r = 1; r < 3; r++) {
        assert_int_equal(g.thread[r].rc, RC_FATAL);
        assert_string_equal(g.thread[r].err.code, "group_poisoned");
        assert_string_equal(g.thread[r].err.text, "rank 0 stopped the group: out of luck");
        assert_true(g.thread[r].took_us < LONG_US / 4);
    }
    rank_group_free(&g);
}

static void poison_all_at_once(struct rank_thread *t)
{
    char reason[64];
    int author;
    snprintf(reason, sizeof reason, "reason of %d", t->rank);
    segment_poison(t->segment, t->rank, reason);
    if (!segment_poisoned(t->segment, &author, reason, sizeof reason))
        t->wrong++;
    else if (reason[strlen("reason of ")] != '0' + author)
        t->wrong++;
}

static void poison_races(void **state)
{
    (void)state;
    for (int round = 0; round < 100; round++) {
        struct rank_group g = rank_group_make(4, 0, LONG_US);
        rank_threads_run(&g, poison_all_at_once, NULL);
        for (int r = 0; r < 4; r++) assert_int_equal(g.thread[r].wrong, 0);
        rank_group_free(&g);
    }
}

static void patience_ends_without_blame(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 0, SHORT_US);
    unsigned char out[16];
    size_t n;
    int64_t start = clock_now_us();
    for (int i = 0; i < 20; i++) { /* far beyond the bound of 2 * SHORT_US, but rank 0 lives */
        assert_int_equal(lockstep_read_plan(g.segment, 1, 1, 10000, out, &n, NULL), RC_RETRY);
        segment_beat(g.segment, 0);
    }
    assert_true(clock_now_us() - start >= 20 * 10000);
    assert_int_equal(lockstep_read_plan(g.segment, 1, 1, 0, out, &n, NULL), RC_RETRY);
    assert_false(segment_poisoned(g.segment, NULL, NULL, 0));
    rank_group_free(&g);
}

static void stall_is_seen_over_several_calls(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 0, SHORT_US);
    unsigned char out[16];
    size_t n;
    struct err e = {0};
    enum rc rc;
    int64_t start = clock_now_us();
    do {
        rc = lockstep_read_plan(g.segment, 1, 1, 5000, out, &n, &e);
    } while (rc == RC_RETRY && clock_now_us() - start < LONG_US);
    assert_int_equal(rc, RC_FATAL);
    assert_true(clock_now_us() - start >= 2 * SHORT_US);
    assert_string_equal(e.code, "peer_stalled");
    assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
    assert_string_equal(e.text, "rank 0 stalled: no heartbeat for 0.1 s (plan)");
    assert_true(segment_poisoned(g.segment, NULL, NULL, 0));
    rank_group_free(&g);
}

/* Rank 0 is stuck, 1 waits for 0, 2 waits for 1 with the shortest bound of all. */
static void run_chain(struct rank_thread *t)
{
    const bool *beats = t->shared;
    if (t->rank == 0) {
        for (int i = 0; *beats && i < 100; i++) {
            sleep_us(SHORT_US / 20);
            segment_beat(t->segment, 0);
        }
        if (*beats) lockstep_publish(t->segment, 0, SEGMENT_COMM, 1);
        return;
    }
    struct lockstep_wait wait = {.self = t->rank,
                                 .peer = t->rank - 1,
                                 .channel = SEGMENT_COMM,
                                 .value = 1,
                                 .bound_us = t->rank == 2 ? SHORT_US : 3 * SHORT_US,
                                 .patience_us = -1,
                                 .what = "collective"};
    uint64_t seen;
    t->rc = lockstep_wait(t->segment, &wait, &seen, &t->err);
    if (t->rc == RC_OK) lockstep_publish(t->segment, t->rank, SEGMENT_COMM, 1);
}

static void the_end_of_the_chain_is_blamed(void **state)
{
    (void)state;
    bool beats = false;
    struct rank_group g = rank_group_make(3, 0, LONG_US);
    rank_threads_run(&g, run_chain, &beats);
    assert_int_equal(g.thread[1].rc, RC_FATAL);
    assert_int_equal(g.thread[2].rc, RC_FATAL);
    char reason[128];
    assert_true(segment_poisoned(g.segment, NULL, reason, sizeof reason));
    assert_string_equal(reason, "rank 0 stalled: no heartbeat for 0.1 s (collective)");
    rank_group_free(&g);
}

static void a_slow_end_of_the_chain_is_waited_for(void **state)
{
    (void)state;
    bool beats = true; /* for 5 bounds, while the rank in the middle shows no sign of life */
    struct rank_group g = rank_group_make(3, 0, LONG_US);
    rank_threads_run(&g, run_chain, &beats);
    assert_int_equal(g.thread[1].rc, RC_OK);
    assert_int_equal(g.thread[2].rc, RC_OK);
    rank_group_free(&g);
}

static void a_rank_that_died_waiting_is_blamed(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(3, 0, LONG_US);
    /* Rank 1 announced a wait for rank 0 and was killed; rank 0 has long published. */
    atomic_store(&g.segment->rank[1].waits_value, 1);
    atomic_store(&g.segment->rank[1].waits_for, 1 + 0 * SEGMENT_CHANNELS + SEGMENT_COMM);
    lockstep_publish(g.segment, 0, SEGMENT_COMM, 1);
    struct lockstep_wait wait = {.self = 2,
                                 .peer = 1,
                                 .channel = SEGMENT_COMM,
                                 .value = 1,
                                 .bound_us = SHORT_US,
                                 .patience_us = -1,
                                 .what = "collective"};
    uint64_t seen;
    struct err e = {0};
    assert_int_equal(lockstep_wait(g.segment, &wait, &seen, &e), RC_FATAL);
    assert_string_equal(e.text, "rank 1 stalled: no heartbeat for 0.1 s (collective)");
    rank_group_free(&g);
}

static void run_circle(struct rank_thread *t)
{
    struct lockstep_wait wait = {.self = t->rank,
                                 .peer = 1 - t->rank,
                                 .channel = t->rank ? SEGMENT_RECORD : SEGMENT_COMM,
                                 .value = 1,
                                 .bound_us = SHORT_US,
                                 .patience_us = -1,
                                 .what = "test"};
    uint64_t seen;
    t->rc = lockstep_wait(t->segment, &wait, &seen, &t->err);
}

static void a_circle_is_named(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 0, LONG_US);
    char reason[128];
    rank_threads_run(&g, run_circle, NULL);
    assert_int_equal(g.thread[0].rc, RC_FATAL);
    assert_int_equal(g.thread[1].rc, RC_FATAL);
    assert_true(segment_poisoned(g.segment, NULL, reason, sizeof reason));
    assert_non_null(strstr(reason, "wait for each other"));
    rank_group_free(&g);
}

static void a_thaw_blames_nobody(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 0, LONG_US);
    struct segment_stall stall = {true, 0, 0, clock_now_us() - 100 * (int64_t)SHORT_US, 0};
    struct lockstep_wait wait = {.self = 1,
                                 .peer = 0,
                                 .channel = SEGMENT_COMM,
                                 .value = 1,
                                 .bound_us = SHORT_US,
                                 .patience_us = 0,
                                 .what = "collective",
                                 .stall = &stall};
    uint64_t seen;
    assert_int_equal(lockstep_wait(g.segment, &wait, &seen, NULL), RC_RETRY);
    assert_true(stall.still_us > 0 && stall.still_us <= SHORT_US / 8 + 1);
    rank_group_free(&g);
}

enum { ROUNDS = 3000 };

static void ping_pong(struct rank_thread *t)
{
    for (uint64_t n = 1; n <= ROUNDS && t->rc == RC_OK; n++) {
        struct lockstep_wait wait = {.self = t->rank,
                                     .peer = 1 - t->rank,
                                     .channel = SEGMENT_COMM,
                                     .value = t->rank ? n : n - 1,
                                     .bound_us = LONG_US,
                                     .patience_us = -1,
                                     .what = "test"};
        uint64_t seen;
        t->rc = lockstep_wait(t->segment, &wait, &seen, &t->err);
        lockstep_publish(t->segment, t->rank, SEGMENT_COMM, n);
    }
}

static void sleepers_are_woken(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 0, LONG_US);
    g.segment->spin_pauses = 0; /* every wait sleeps */
    rank_threads_run(&g, ping_pong, NULL);
    assert_int_equal(g.thread[0].rc, RC_OK);
    assert_int_equal(g.thread[1].rc, RC_OK);
    assert_int_equal(atomic_load(&g.segment->rank[0].sleepers), 0);
    assert_int_equal(atomic_load(&g.segment->rank[1].sleepers), 0);
    assert_int_equal(atomic_load(&g.segment->rank[1].waits_for), 0);
    assert_true(atomic_load(&g.segment->rank[0].bell) > 0);
    rank_group_free(&g);
}

/* Each rank gives numbers that tell rank and round, and expects everybody's. */
static void exchange_rounds(struct rank_thread *t)
{
    uint64_t mine[LOCKSTEP_BOARD_BYTES / sizeof(uint64_t)], all[MAX_RANKS * LOCKSTEP_BOARD_BYTES / sizeof(uint64_t)];
    for (uint64_t round = 0; round < 200 && t->rc == RC_OK; round++) {
        size_t n = (size_t)(round * 7 % (LOCKSTEP_BOARD_BYTES / sizeof(uint64_t) + 1)); /* 0 too: a barrier */
        for (size_t i = 0; i < n; i++) mine[i] = rank_noise(round * 1000 + (uint64_t)t->rank * 100 + i);
        t->rc = lockstep_exchange(t->segment, t->rank, mine, n * sizeof *mine, all, &t->err);
        for (int r = 0; r < t->ranks; r++)
            for (size_t i = 0; i < n; i++)
                t->wrong += all[(size_t)r * n + i] != rank_noise(round * 1000 + (uint64_t)r * 100 + i);
    }
}

static void exchanges_give_all_to_all(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        struct rank_group g = rank_group_make(ranks, 0, LONG_US);
        rank_threads_run(&g, exchange_rounds, NULL);
        for (int r = 0; r < ranks; r++) {
            assert_int_equal(g.thread[r].rc, RC_OK);
            assert_int_equal(g.thread[r].wrong, 0);
        }
        rank_group_free(&g);
    }
}

static void exchange_two_sizes(struct rank_thread *t)
{
    unsigned char mine[16] = {0}, all[2 * sizeof mine];
    t->rc = lockstep_exchange(t->segment, t->rank, mine, t->rank ? 8 : 16, all, &t->err);
}

static void exchanges_of_two_sizes_stop_the_group(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(2, 0, LONG_US);
    rank_threads_run(&g, exchange_two_sizes, NULL);
    assert_int_equal(g.thread[0].rc, RC_FATAL);
    assert_int_equal(g.thread[1].rc, RC_FATAL);
    assert_true(segment_poisoned(g.segment, NULL, NULL, 0));
    unsigned char big[LOCKSTEP_BOARD_BYTES + 1] = {0};
    struct rank_group one = rank_group_make(1, 0, LONG_US);
    assert_int_equal(lockstep_exchange(one.segment, 0, big, sizeof big, big, NULL), RC_FATAL);
    rank_group_free(&one);
    rank_group_free(&g);
}

/* Looks at rank 1 as rank 0 until it ends or `us` are over; beats: rank 1's heart goes on. */
static enum rc watch_for(struct segment *s, int64_t us, bool beats, struct err *e)
{
    int64_t until = clock_now_us() + us;
    enum rc rc = RC_OK;
    while (rc == RC_OK && clock_now_us() < until) {
        if (beats) segment_beat(s, 1);
        rc = lockstep_watch(s, 0, e);
        sleep_us(1000);
    }
    return rc;
}

static void a_watch_sees_a_stopped_heart(void **state)
{
    (void)state;
    struct err e = {0};
    struct rank_group g = rank_group_make(2, 0, SHORT_US);
    uint64_t beat = segment_heartbeat(g.segment, 0);
    assert_int_equal(watch_for(g.segment, 3 * SHORT_US, true, &e), RC_OK);
    assert_true(segment_heartbeat(g.segment, 0) > beat);
    /* A rank that waits for the watcher is not to blame. */
    atomic_store(&g.segment->rank[1].waits_value, 1);
    atomic_store(&g.segment->rank[1].waits_for, 1 + 0 * SEGMENT_CHANNELS + SEGMENT_RECORD);
    assert_int_equal(watch_for(g.segment, 3 * SHORT_US, false, &e), RC_OK);
    atomic_store(&g.segment->rank[1].waits_for, 0);
    int64_t begun = clock_now_us();
    assert_int_equal(watch_for(g.segment, LONG_US, false, &e), RC_FATAL);
    assert_string_equal(e.code, "peer_stalled");
    assert_true(clock_now_us() - begun >= SHORT_US);
    assert_true(segment_poisoned(g.segment, NULL, NULL, 0));
    struct err again = {0};
    assert_int_equal(lockstep_watch(g.segment, 0, &again), RC_FATAL);
    assert_string_equal(again.code, "group_poisoned");
    rank_group_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bounds_must_rise),
        cmocka_unit_test(attach_checks_the_header),
        cmocka_unit_test(slots_lie_inside),
        cmocka_unit_test(steps_pass),
        cmocka_unit_test(largest_plan),
        cmocka_unit_test(differences_stop_the_group),
        cmocka_unit_test(failure_line_is_exact),
        cmocka_unit_test(first_reason_wins),
        cmocka_unit_test(poison_ends_waits),
        cmocka_unit_test(poison_races),
        cmocka_unit_test(patience_ends_without_blame),
        cmocka_unit_test(stall_is_seen_over_several_calls),
        cmocka_unit_test(the_end_of_the_chain_is_blamed),
        cmocka_unit_test(a_slow_end_of_the_chain_is_waited_for),
        cmocka_unit_test(a_rank_that_died_waiting_is_blamed),
        cmocka_unit_test(a_circle_is_named),
        cmocka_unit_test(a_thaw_blames_nobody),
        cmocka_unit_test(sleepers_are_woken),
        cmocka_unit_test(exchanges_give_all_to_all),
        cmocka_unit_test(exchanges_of_two_sizes_stop_the_group),
        cmocka_unit_test(a_watch_sees_a_stopped_heart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
