/* step_plan: the planner's rules on made-up sequences, and a simulation that must always end. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "kv_pages.h"
#include "step_plan.h"

static struct plan_sequence queued(uint64_t id, int prompt)
{
    return (struct plan_sequence){.request = id, .state = PLAN_QUEUED, .prompt_tokens = prompt};
}

static struct plan_sequence running(uint64_t id, int64_t admitted, int prompt, int computed, int pages)
{
    return (struct plan_sequence){.request = id, .state = PLAN_RUNNING, .admitted = admitted, .prompt_tokens = prompt,
                                  .computed = computed, .pages = pages};
}

static struct step_plan build(const struct plan_sequence *s, int n, int active, int rows, int pages_free)
{
    struct step_plan p;
    struct plan_input in = {.step = 7, .sequences = s, .n_sequences = n, .active = active, .prefill_rows = rows,
                            .pages_free = pages_free};
    assert_true(step_plan_build(&in, &p));
    assert_int_equal(p.step, 7);
    return p;
}

static void assert_segment(const struct step_plan *p, uint32_t i, uint64_t request, int kind, int first, int rows, int picks)
{
    assert_true(i < p->n_segments);
    assert_int_equal(p->segments[i].request, request);
    assert_int_equal(p->segments[i].kind, kind);
    assert_int_equal(p->segments[i].position_first, first);
    assert_int_equal(p->segments[i].rows, rows);
    assert_int_equal(p->segments[i].picks, picks);
}

static void test_admits_in_order_within_budget(void **state)
{
    (void)state;
    struct plan_sequence s[] = {queued(1, 100), queued(2, 1000), queued(3, 10)};
    struct step_plan p = build(s, 3, 2, 512, 100);
    assert_int_equal(p.n_actions, 2);
    assert_int_equal(p.actions[0].request, 1);
    assert_int_equal(p.actions[1].request, 2);
    assert_int_equal(p.n_segments, 2);
    assert_segment(&p, 0, 1, PLAN_PREFILL, 0, 100, 1);
    assert_segment(&p, 1, 2, PLAN_PREFILL, 0, 384, 0); /* 412 rows are left; cut at the 64 grid */
}

static void test_decode_rows_come_first(void **state)
{
    (void)state;
    struct plan_sequence s[] = {running(1, 1, 300, 128, 2), running(2, 2, 10, 64, 1), running(3, 3, 20, 21, 1)};
    struct step_plan p = build(s, 3, 4, 512, 100);
    assert_int_equal(p.n_segments, 3);
    assert_segment(&p, 0, 2, PLAN_DECODE, 64, 1, 1);
    assert_segment(&p, 1, 3, PLAN_DECODE, 21, 1, 1);
    assert_segment(&p, 2, 1, PLAN_PREFILL, 128, 172, 1);
}

static void test_oldest_preempts_youngest(void **state)
{
    (void)state;
    struct plan_sequence s[] = {running(5, 1, 10, 64, 1), running(6, 2, 10, 30, 1), running(7, 3, 10, 30, 1), queued(8, 5)};
    struct step_plan p = build(s, 4, 4, 512, 0);
    assert_int_equal(p.n_actions, 1);
    assert_int_equal(p.actions[0].kind, PLAN_PREEMPT);
    assert_int_equal(p.actions[0].request, 7);
    assert_int_equal(p.n_segments, 2);
    assert_segment(&p, 0, 5, PLAN_DECODE, 64, 1, 1);
    assert_segment(&p, 1, 6, PLAN_DECODE, 30, 1, 1);
}

static void test_restore_goes_before_admission(void **state)
{
    (void)state;
    struct plan_sequence s[] = {running(1, 1, 10, 70, 2), queued(2, 5), running(3, 2, 10, 100, 2)};
    s[2].state = PLAN_PREEMPTED;
    struct step_plan p = build(s, 3, 2, 512, 2);
    assert_int_equal(p.n_actions, 0); /* its two pages and one for the running sequence do not fit; nothing overtakes it */
    p = build(s, 3, 2, 512, 3);
    assert_int_equal(p.n_actions, 1);
    assert_int_equal(p.actions[0].kind, PLAN_RESTORE);
    assert_segment(&p, 1, 3, PLAN_DECODE, 100, 1, 1);
}

static void test_retire_frees_pages_for_this_step(void **state)
{
    (void)state;
    struct plan_sequence s[] = {running(1, 1, 10, 70, 2), queued(2, 64)};
    s[0].retire = true;
    struct step_plan p = build(s, 2, 1, 512, 0);
    assert_int_equal(p.n_actions, 2);
    assert_int_equal(p.actions[0].kind, PLAN_RETIRE);
    assert_int_equal(p.actions[1].kind, PLAN_ADMIT);
    assert_segment(&p, 0, 2, PLAN_PREFILL, 0, 64, 1);
}

static void test_pack_and_unpack(void **state)
{
    (void)state;
    struct plan_sequence s[] = {running(1, 1, 300, 128, 2), queued(2, 64)};
    struct step_plan p = build(s, 2, 4, 512, 100), q;
    char bytes[sizeof p];
    size_t n = step_plan_pack(&p, bytes);
    struct err e = {0};
    assert_int_equal(step_plan_unpack(bytes, n, &q, &e), RC_OK);
    assert_memory_equal(&p, &q, sizeof p);
    for (size_t cut = 0; cut < n; cut++) assert_int_equal(step_plan_unpack(bytes, cut, &q, NULL), RC_FATAL);
    bytes[offsetof(struct step_plan, n_segments)] = 99;
    assert_int_equal(step_plan_unpack(bytes, n, &q, &e), RC_FATAL);
}

/* Carries plans out on counts alone: many requests through few pages; every page is accounted for and all finish. */
static void test_simulation_ends(void **state)
{
    (void)state;
    enum { N = 40, CAPACITY = 24, ACTIVE = 6 };
    struct plan_sequence s[N];
    int want[N], n = N, pages_free = CAPACITY, steps = 0, preemptions = 0;
    int64_t admitted = 0;
    for (int i = 0; i < N; i++) {
        s[i] = queued((uint64_t)i + 1, 1 + i * 37 % 700);
        want[i] = s[i].prompt_tokens + 1 + i * 53 % 600;
    }
    while (n) {
        struct step_plan p = build(s, n, ACTIVE, 128, pages_free);
        assert_true(++steps < 100000);
        for (uint32_t a = 0; a < p.n_actions; a++) {
            int i = 0;
            while (s[i].request != p.actions[a].request) i++;
            switch (p.actions[a].kind) {
            case PLAN_RETIRE:
                pages_free += s[i].state == PLAN_RUNNING ? s[i].pages : 0;
                memmove(&s[i], &s[i + 1], (size_t)(n - i - 1) * sizeof s[0]);
                memmove(&want[i], &want[i + 1], (size_t)(n - i - 1) * sizeof want[0]);
                n--;
                break;
            case PLAN_PREEMPT: pages_free += s[i].pages, s[i].state = PLAN_PREEMPTED, preemptions++; break;
            case PLAN_RESTORE: pages_free -= s[i].pages, s[i].state = PLAN_RUNNING; break;
            case PLAN_ADMIT: s[i].state = PLAN_RUNNING, s[i].admitted = ++admitted; break;
            }
            assert_in_range(pages_free, 0, CAPACITY);
        }
        for (uint32_t g = 0; g < p.n_segments; g++) {
            int i = 0;
            while (s[i].request != p.segments[g].request) i++;
            assert_int_equal(s[i].state, PLAN_RUNNING);
            assert_int_equal(p.segments[g].position_first, s[i].computed);
            s[i].computed += p.segments[g].rows;
            int need = kv_pages_for(s[i].computed);
            pages_free -= need > s[i].pages ? need - s[i].pages : 0;
            s[i].pages = need > s[i].pages ? need : s[i].pages;
            assert_in_range(pages_free, 0, CAPACITY);
            bool prefill_cut = p.segments[g].kind == PLAN_PREFILL && !p.segments[g].picks;
            assert_true(!prefill_cut || s[i].computed % 64 == 0);
            if (s[i].computed >= want[i]) s[i].retire = true;
        }
    }
    assert_int_equal(pages_free, CAPACITY);
    assert_true(preemptions > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_admits_in_order_within_budget), cmocka_unit_test(test_decode_rows_come_first),
        cmocka_unit_test(test_oldest_preempts_youngest),      cmocka_unit_test(test_restore_goes_before_admission),
        cmocka_unit_test(test_retire_frees_pages_for_this_step), cmocka_unit_test(test_pack_and_unpack),
        cmocka_unit_test(test_simulation_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
