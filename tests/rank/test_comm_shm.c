/* Sums, gathers and barriers through the segment, with ranks as threads and once as processes. Data differ by rank and
 * place and their sums are inexact, so a wrong index, slot or order of ranks changes bits. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm_shm.h"
#include "segment_ranks.h"

enum { LONG_US = 30000000, SHORT_US = 60000 };

/* Between 2^-6 and 2^6, either sign. */
static float value_of(uint64_t round, int rank, size_t i)
{
    uint64_t h = rank_noise((round << 40) + ((uint64_t)rank << 36) + i + 1);
    float v = (float)(1 + (h & 0xffffff)) / 16777216.0f * (float)(1 << (h >> 24 & 7)) / 2.0f;
    return h >> 63 ? -v : v;
}

static bool same_bits(float a, float b) { return memcmp(&a, &b, sizeof a) == 0; }

struct sum_case {
    size_t floats;
    int rounds;
    unsigned
        zero_ranks; /* bit r: rank r passes NULL, except in every third round, so that its slots hold old numbers */
};

static bool is_zero(const struct sum_case *c, uint64_t round, int rank)
{
    return round % 3 && c->zero_ranks >> rank & 1;
}

static float sum_expected(const struct sum_case *c, uint64_t round, int ranks, float residual, size_t i)
{
    float sum = is_zero(c, round, 0) ? 0.0f : value_of(round, 0, i);
    for (int r = 1; r < ranks; r++) sum = sum + (is_zero(c, round, r) ? 0.0f : value_of(round, r, i));
    return residual + sum;
}

static void run_sums(struct rank_thread *t)
{
    const struct sum_case *c = t->shared;
    struct comm *comm = NULL;
    float *partial = malloc(c->floats * sizeof *partial + 1), *residual = malloc(c->floats * sizeof *residual + 1);
    t->rc = comm_shm_open(t->segment, t->rank, &comm, &t->err);
    for (uint64_t round = 1; round <= (uint64_t)c->rounds && t->rc == RC_OK; round++) {
        for (size_t i = 0; i < c->floats; i++) {
            partial[i] = value_of(round, t->rank, i);
            residual[i] = i % 5 == 0 ? -0.0f : value_of(round, 9, i);
        }
        if (rank_noise(round * 4 + (uint64_t)t->rank) % 20 == 0) sleep_us(100);
        t->rc = comm->all_reduce_add(comm, is_zero(c, round, t->rank) ? NULL : partial, (struct kern_split){1, 0}, (int)c->floats, residual, &t->err);
        for (size_t i = 0; i < c->floats && t->rc == RC_OK; i++) {
            float before = i % 5 == 0 ? -0.0f : value_of(round, 9, i);
            if (!same_bits(residual[i], sum_expected(c, round, t->ranks, before, i))) t->wrong++;
        }
    }
    if (comm) comm->close(comm);
    free(partial);
    free(residual);
}

static void sums_pass(int ranks, struct sum_case c)
{
    struct rank_group g = rank_group_make(ranks, c.floats * sizeof(float), LONG_US);
    rank_threads_run(&g, run_sums, &c);
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(g.thread[r].rc, RC_OK);
        assert_int_equal(g.thread[r].wrong, 0);
    }
    rank_group_free(&g);
}

static void data_can_tell_orders_apart(void **state)
{
    (void)state;
    struct sum_case c = {1000, 1, 0};
    int order = 0, grouping = 0;
    for (size_t i = 0; i < c.floats; i++) {
        float p0 = value_of(1, 0, i), p1 = value_of(1, 1, i), p2 = value_of(1, 2, i), before = value_of(1, 9, i);
        float good = sum_expected(&c, 1, 3, before, i), reversed = (p2 + p1) + p0, chained = (before + p0) + p1;
        order += !same_bits(good, before + reversed);
        grouping += !same_bits(chained + p2, good);
    }
    assert_true(order > 10 && grouping > 10);
}

static void sums_of_all_sizes(void **state)
{
    (void)state;
    size_t sizes[] = {0, 1, 3, 16, 576, 1023, 1024, 1025, 2304, 5000};
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            sums_pass(ranks, (struct sum_case){sizes[i], 20, 0});
}

static void sums_with_zeros(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (unsigned zeros = 1; zeros < 1u << ranks; zeros++) sums_pass(ranks, (struct sum_case){1100, 8, zeros});
}

static void large_sums(void **state)
{
    (void)state;
    sums_pass(2, (struct sum_case){512 * 576, 6, 0});
    sums_pass(3, (struct sum_case){512 * 576, 3, 2});
}

static void many_sums_in_a_row(void **state)
{
    (void)state;
    sums_pass(2, (struct sum_case){24, 3000, 0});
    sums_pass(4, (struct sum_case){24, 500, 0});
}

static void zeros_make_no_negative_zero(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(1, 0, LONG_US);
    struct comm *comm;
    float residual = -0.0f;
    assert_int_equal(comm_shm_open(g.segment, 0, &comm, NULL), RC_OK);
    assert_int_equal(comm->all_reduce_add(comm, NULL, (struct kern_split){1, 0}, 1, &residual, NULL), RC_OK);
    assert_true(same_bits(residual, 0.0f));
    comm->close(comm);
    rank_group_free(&g);
}

struct gather_case {
    int rows, row_width;
    struct range range[MAX_RANKS];
};

static void run_gathers(struct rank_thread *t)
{
    const struct gather_case *c = t->shared;
    struct comm *comm = NULL;
    size_t count = (size_t)c->range[t->rank].count, width = (size_t)c->row_width, rows = (size_t)c->rows;
    float *mine = malloc(rows * count * sizeof *mine + 1), *out = malloc(rows * width * sizeof *out + 1);
    t->rc = comm_shm_open(t->segment, t->rank, &comm, &t->err);
    for (uint64_t round = 1; round <= 30 && t->rc == RC_OK; round++) {
        for (size_t i = 0; i < rows * count; i++) mine[i] = value_of(round, t->rank, i);
        for (size_t i = 0; i < rows * width; i++) out[i] = -7.0f;
        t->rc = comm->all_gather_columns(comm, count ? mine : NULL, c->rows, c->range, c->row_width, out, &t->err);
        for (size_t i = 0; i < rows * width && t->rc == RC_OK; i++) {
            size_t row = i / width;
            int column = (int)(i % width);
            float expected = -7.0f; /* columns of nobody stay */
            for (int r = 0; r < t->ranks; r++) {
                struct range range = c->range[r];
                if (column >= range.first && column < range.first + range.count)
                    expected = value_of(round, r, row * (size_t)range.count + (size_t)(column - range.first));
            }
            if (!same_bits(out[i], expected)) t->wrong++;
        }
    }
    if (comm) comm->close(comm);
    free(mine);
    free(out);
}

static void gathers_put_columns_in_place(void **state)
{
    (void)state;
    struct gather_case cases[] = {
        {1, 96, {{0, 32}, {32, 48}, {80, 0}, {80, 16}}}, {5, 100, {{0, 33}, {33, 1}, {34, 60}, {94, 6}}},
        {3, 64, {{48, 16}, {0, 16}, {16, 16}, {40, 8}}}, {4, 8, {{0, 0}, {0, 8}, {8, 0}, {8, 0}}},
        {0, 8, {{0, 2}, {2, 2}, {4, 2}, {6, 2}}},
    };
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            struct rank_group g = rank_group_make(ranks, 5 * 60 * sizeof(float), LONG_US);
            rank_threads_run(&g, run_gathers, &cases[i]);
            for (int r = 0; r < ranks; r++) {
                assert_int_equal(g.thread[r].rc, RC_OK);
                assert_int_equal(g.thread[r].wrong, 0);
            }
            rank_group_free(&g);
        }
}

static void bad_shapes_are_refused(void **state)
{
    (void)state;
    struct range bad[][2] = {
        {{0, 4}, {4, 5}}, {{-1, 4}, {4, 4}}, {{0, 4}, {9, 0}}, {{0, 4}, {4, -1}}, {{0, INT32_MAX}, {4, 4}}};
    float data[16] = {0}, out[16];
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct rank_group g = rank_group_make(2, 64, LONG_US);
        struct comm *comm;
        struct err e = {0};
        assert_int_equal(comm_shm_open(g.segment, 0, &comm, NULL), RC_OK);
        assert_int_equal(comm->all_gather_columns(comm, data, 1, bad[i], 8, out, &e), RC_FATAL);
        assert_string_equal(e.code, "bad_gather");
        assert_true(segment_poisoned(g.segment, NULL, NULL, 0));
        comm->close(comm);
        rank_group_free(&g);
    }
    struct rank_group g = rank_group_make(2, 64, LONG_US);
    struct comm *comm;
    struct err e = {0};
    assert_int_equal(comm_shm_open(g.segment, 2, &comm, NULL), RC_FATAL);
    assert_null(comm);
    assert_int_equal(comm_shm_open(g.segment, 1, &comm, NULL), RC_OK);
    assert_int_equal(comm->all_reduce_add(comm, data, (struct kern_split){1, 0}, 17, out, &e), RC_FATAL);
    assert_string_equal(e.code, "collective_too_large");
    comm->close(comm);
    rank_group_free(&g);
}

static void run_mismatch(struct rank_thread *t)
{
    struct comm *comm = NULL;
    float data[64] = {0}, out[64] = {0}, wide[128];
    const int *kind = t->shared;
    comm_shm_open(t->segment, t->rank, &comm, NULL);
    if (t->rank == 0)
        t->rc = comm->all_reduce_add(comm, data, (struct kern_split){1, 0}, 64, out, &t->err);
    else if (*kind == 0)
        t->rc = comm->all_reduce_add(comm, data, (struct kern_split){1, 0}, 63, out, &t->err);
    else if (*kind == 1)
        t->rc = comm->all_gather_columns(comm, data, 8, (struct range[]){{0, 8}, {8, 8}}, 16, wide, &t->err);
    else
        t->rc = comm->barrier(comm, &t->err);
    comm->close(comm);
}

static void mismatches_stop_both(void **state)
{
    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        struct rank_group g = rank_group_make(2, 256, LONG_US);
        rank_threads_run(&g, run_mismatch, &kind);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(g.thread[r].rc, RC_FATAL);
            assert_true(g.thread[r].took_us < LONG_US / 4);
        }
        assert_true(strcmp(g.thread[0].err.code, "collective_mismatch") == 0 ||
                    strcmp(g.thread[1].err.code, "collective_mismatch") == 0);
        rank_group_free(&g);
    }
}

static void run_barriers(struct rank_thread *t)
{
    _Atomic uint32_t *arrived = t->shared;
    struct comm *comm = NULL;
    t->rc = comm_shm_open(t->segment, t->rank, &comm, &t->err);
    for (uint32_t round = 1; round <= 300 && t->rc == RC_OK; round++) {
        atomic_fetch_add(arrived, 1);
        if (rank_noise(round * 4 + (uint64_t)t->rank) % 30 == 0) sleep_us(200);
        t->rc = comm->barrier(comm, &t->err);
        if (atomic_load(arrived) < round * (uint32_t)t->ranks) t->wrong++;
    }
    comm->close(comm);
}

static void barriers_hold(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++) {
        struct rank_group g = rank_group_make(ranks, 0, LONG_US);
        _Atomic uint32_t arrived = 0;
        rank_threads_run(&g, run_barriers, &arrived);
        for (int r = 0; r < ranks; r++) {
            assert_int_equal(g.thread[r].rc, RC_OK);
            assert_int_equal(g.thread[r].wrong, 0);
        }
        rank_group_free(&g);
    }
}

static void run_abort(struct rank_thread *t)
{
    struct comm *comm = NULL;
    float data[8] = {0}, out[8] = {0};
    comm_shm_open(t->segment, t->rank, &comm, NULL);
    if (t->rank == 1) {
        sleep_us(20000);
        comm->abort(comm, "disk on fire");
    }
    t->rc = comm->all_reduce_add(comm, data, (struct kern_split){1, 0}, 8, out, &t->err);
    comm->close(comm);
}

static void abort_fails_present_and_next_waits(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(3, 64, LONG_US);
    rank_threads_run(&g, run_abort, NULL);
    for (int r = 0; r < 3; r++) {
        assert_int_equal(g.thread[r].rc, RC_FATAL);
        assert_string_equal(g.thread[r].err.text, "rank 1 stopped the group: disk on fire");
    }
    rank_group_free(&g);
}

static void run_with_absent_rank(struct rank_thread *t)
{
    struct comm *comm = NULL;
    float data[8] = {0}, out[8] = {0};
    if (t->rank == 2) return;
    comm_shm_open(t->segment, t->rank, &comm, NULL);
    t->rc = comm->all_reduce_add(comm, data, (struct kern_split){1, 0}, 8, out, &t->err);
    comm->close(comm);
}

static void an_absent_rank_is_named(void **state)
{
    (void)state;
    struct rank_group g = rank_group_make(3, 64, SHORT_US);
    char reason[128];
    rank_threads_run(&g, run_with_absent_rank, NULL);
    for (int r = 0; r < 2; r++) assert_int_equal(g.thread[r].rc, RC_FATAL);
    assert_true(segment_poisoned(g.segment, NULL, reason, sizeof reason));
    assert_string_equal(reason, "rank 2 stalled: no heartbeat for 0.1 s (collective)");
    rank_group_free(&g);
}

static void opened_again_goes_on(void **state)
{
    (void)state;
    struct sum_case c = {100, 7, 0}; /* odd: the second time starts at the other parity */
    struct rank_group g = rank_group_make(2, 400, LONG_US);
    for (int time = 0; time < 3; time++) {
        rank_threads_run(&g, run_sums, &c);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(g.thread[r].rc, RC_OK);
            assert_int_equal(g.thread[r].wrong, 0);
        }
    }
    rank_group_free(&g);
}

/* Two processes that sleep for each other at once: what a private futex or a private mapping would break. */
static void ranks_as_processes(void **state)
{
    (void)state;
    struct sum_case c = {2304, 300, 0};
    struct lockstep_bounds b = lockstep_bounds_default();
    size_t n_bytes = segment_bytes(2, c.floats * sizeof(float));
    int file = memfd_create("segment", MFD_CLOEXEC);
    assert_true(file >= 0 && ftruncate(file, (off_t)n_bytes) == 0);
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    assert_true(memory != MAP_FAILED);
    segment_init(memory, 2, c.floats * sizeof(float), &b);
    pid_t child = fork();
    assert_true(child >= 0);
    void *mine =
        mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0); /* at another address than the peer's */
    struct rank_thread t = {.segment = segment_attach(child ? memory : mine, n_bytes, 2, NULL),
                            .rank = child ? 0 : 1,
                            .ranks = 2,
                            .shared = &c};
    run_sums(&t);
    if (child == 0) _exit(t.rc == RC_OK && t.wrong == 0 ? 0 : 1);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(t.rc, RC_OK);
    assert_int_equal(t.wrong, 0);
    munmap(mine, n_bytes);
    munmap(memory, n_bytes);
    close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_as_processes),
        cmocka_unit_test(data_can_tell_orders_apart),
        cmocka_unit_test(sums_of_all_sizes),
        cmocka_unit_test(sums_with_zeros),
        cmocka_unit_test(large_sums),
        cmocka_unit_test(many_sums_in_a_row),
        cmocka_unit_test(zeros_make_no_negative_zero),
        cmocka_unit_test(gathers_put_columns_in_place),
        cmocka_unit_test(bad_shapes_are_refused),
        cmocka_unit_test(mismatches_stop_both),
        cmocka_unit_test(barriers_hold),
        cmocka_unit_test(abort_fails_present_and_next_waits),
        cmocka_unit_test(an_absent_rank_is_named),
        cmocka_unit_test(opened_again_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
