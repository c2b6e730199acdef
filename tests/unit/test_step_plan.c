/* step_plan: the planner's rules on made-up sequences, and a simulation that must always end, with and without drafts. */
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

static struct plan_sequence drafting(struct plan_sequence s, int drafts, enum draft_source source)
{
    s.drafts = drafts;
    s.source = source;
    return s;
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

/* A held request is passed over, one to be probed gets that and a place, later ones are admitted beside it. */
static void test_held_and_probed(void **state)
{
    (void)state;
    struct plan_sequence s[] = {queued(1, 100), queued(2, 100), queued(3, 100), queued(4, 100)};
    s[0].held = s[1].probe = true;
    struct step_plan p = build(s, 4, 2, 512, 100);
    assert_int_equal(p.n_actions, 2);
    assert_true(p.actions[0].kind == PLAN_PROBE && p.actions[0].request == 2);
    assert_true(p.actions[1].kind == PLAN_ADMIT && p.actions[1].request == 3);
    assert_int_equal(p.n_segments, 1);
    assert_segment(&p, 0, 3, PLAN_PREFILL, 0, 100, 1);
}

/* Prompt rows end where they are to be kept, and say so; not when the budget ends them before, nor past it. */
static void test_rows_are_cut_where_they_are_kept(void **state)
{
    (void)state;
    struct plan_sequence s[] = {running(1, 1, 1000, 128, 2)};
    s[0].cut = 320;
    struct step_plan p = build(s, 1, 1, 512, 100);
    assert_segment(&p, 0, 1, PLAN_PREFILL, 128, 192, 0);
    assert_int_equal(p.segments[0].keep, 1);
    p = build(s, 1, 1, 128, 100);
    assert_segment(&p, 0, 1, PLAN_PREFILL, 128, 128, 0);
    assert_int_equal(p.segments[0].keep, 0);
    s[0].computed = 320, s[0].pages = 5;
    p = build(s, 1, 1, 512, 100);
    assert_segment(&p, 0, 1, PLAN_PREFILL, 320, 512, 0);
    assert_int_equal(p.segments[0].keep, 0);
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

static void assert_drafts(const struct step_plan *p, uint32_t i, uint64_t request, int drafts, int source)
{
    assert_segment(p, i, request, PLAN_DECODE, p->segments[i].position_first, 1 + drafts, 1);
    assert_int_equal(p->segments[i].drafts, drafts);
    assert_int_equal(p->segments[i].source, source);
}

static void test_drafts_take_what_pages_are_left(void **state)
{
    (void)state;
    struct plan_sequence s[] = {drafting(running(1, 1, 10, 62, 1), 3, DRAFT_NGRAM),
                                drafting(running(2, 2, 10, 63, 1), 5, DRAFT_MTP),
                                drafting(running(3, 3, 10, 20, 1), 2, DRAFT_MTP)};
    struct step_plan p = build(s, 3, 4, 512, 10);
    assert_int_equal(p.n_actions, 0);
    assert_drafts(&p, 0, 1, 3, DRAFT_NGRAM);
    assert_drafts(&p, 1, 2, 5, DRAFT_MTP);
    assert_drafts(&p, 2, 3, 2, DRAFT_MTP);
    p = build(s, 3, 4, 512, 1); /* the older one gets the page, the other keeps its row and no drafts */
    assert_drafts(&p, 0, 1, 3, DRAFT_NGRAM);
    assert_drafts(&p, 1, 2, 0, DRAFT_NONE);
    assert_drafts(&p, 2, 3, 2, DRAFT_MTP);
    p = build(s, 3, 4, 512, 0); /* as many as end on the page held */
    assert_int_equal(p.n_actions, 0);
    assert_drafts(&p, 0, 1, 1, DRAFT_NGRAM);
    assert_drafts(&p, 1, 2, 0, DRAFT_NONE);
    assert_drafts(&p, 2, 3, 2, DRAFT_MTP);
}

/* A younger sequence's plain row goes before an older one's drafts, and drafts preempt nobody. */
static void test_drafts_displace_nobody(void **state)
{
    (void)state;
    struct plan_sequence s[] = {drafting(running(1, 1, 10, 63, 1), 5, DRAFT_NGRAM), running(2, 2, 10, 64, 1),
                                running(3, 3, 10, 20, 1)};
    struct step_plan p = build(s, 3, 4, 512, 1);
    assert_int_equal(p.n_actions, 0);
    assert_int_equal(p.n_segments, 3);
    assert_drafts(&p, 0, 1, 0, DRAFT_NONE);
    assert_drafts(&p, 1, 2, 0, DRAFT_NONE);
    s[0].computed = 64; /* the oldest preempts for its row, and drafts on the page that brought */
    p = build(s, 3, 4, 512, 0);
    assert_int_equal(p.n_actions, 1);
    assert_int_equal(p.actions[0].request, 3);
    assert_drafts(&p, 0, 1, 5, DRAFT_NGRAM);
    s[1].state = PLAN_QUEUED, s[1].computed = 0, s[1].pages = 0, s[1].prompt_tokens = 64; /* a newcomer's page, too */
    s[0].computed = 60, s[0].pages = 1;
    p = build(s, 3, 4, 512, 3);
    assert_int_equal(p.n_segments, 3);
    assert_drafts(&p, 0, 1, 5, DRAFT_NGRAM);
    assert_drafts(&p, 1, 3, 0, DRAFT_NONE);
    assert_segment(&p, 2, 2, PLAN_PREFILL, 0, 64, 1);
}

static void test_prompts_never_draft(void **state)
{
    (void)state;
    struct plan_sequence s[] = {drafting(running(1, 1, 300, 128, 2), 3, DRAFT_MTP), drafting(queued(2, 64), 3, DRAFT_NGRAM)};
    struct step_plan p = build(s, 2, 4, 512, 100);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(p.segments[i].kind, PLAN_PREFILL);
        assert_int_equal(p.segments[i].drafts, 0);
        assert_int_equal(p.segments[i].source, DRAFT_NONE);
    }
}

/* Drafts are no prompt rows: the budget is what it was, with every segment full. */
static void test_full_step_with_drafts(void **state)
{
    (void)state;
    struct plan_sequence s[PLAN_MAX_SEGMENTS + 1];
    for (int i = 0; i < PLAN_MAX_SEGMENTS; i++)
        s[i] = drafting(running((uint64_t)i + 1, i + 1, 10, 60 + i % 4, 1), KERN_MAX_DRAFTS, DRAFT_NGRAM);
    s[PLAN_MAX_SEGMENTS - 1] = running(PLAN_MAX_SEGMENTS, PLAN_MAX_SEGMENTS, 1000, 0, 0);
    s[PLAN_MAX_SEGMENTS] = queued(999, 5);
    struct step_plan p = build(s, PLAN_MAX_SEGMENTS + 1, PLAN_MAX_SEGMENTS, 512, 1000), q;
    assert_int_equal(p.n_segments, PLAN_MAX_SEGMENTS);
    assert_int_equal(p.n_actions, 0);
    for (uint32_t i = 0; i + 1 < PLAN_MAX_SEGMENTS; i++) assert_drafts(&p, i, i + 1, KERN_MAX_DRAFTS, DRAFT_NGRAM);
    assert_segment(&p, PLAN_MAX_SEGMENTS - 1, PLAN_MAX_SEGMENTS, PLAN_PREFILL, 0, 512, 0);
    char bytes[sizeof p];
    assert_int_equal(step_plan_unpack(bytes, step_plan_pack(&p, bytes), &q, NULL), RC_OK);
    assert_memory_equal(&p, &q, sizeof p);
}

/* A snapshot's rows are not computed, its pages are needed at once. */
static void test_admits_from_a_snapshot(void **state)
{
    (void)state;
    struct plan_sequence s[] = {queued(1, 300)};
    s[0].computed = 128, s[0].pages = 2;
    struct step_plan p = build(s, 1, 4, 512, 5);
    assert_int_equal(p.actions[0].kind, PLAN_ADMIT);
    assert_segment(&p, 0, 1, PLAN_PREFILL, 128, 172, 1);
    struct plan_input in = {.step = 7, .sequences = s, .n_sequences = 1, .active = 4, .prefill_rows = 512, .pages_free = 4};
    assert_false(step_plan_build(&in, &p)); /* five pages hold 300 tokens */
    in.prefill_rows = 64;
    assert_true(step_plan_build(&in, &p));
    assert_segment(&p, 0, 1, PLAN_PREFILL, 128, 64, 0);
    struct plan_sequence two[] = {queued(1, 130), queued(2, 128)};
    two[0].computed = 128, two[0].pages = 2;
    p = build(two, 2, 4, 512, 5); /* three of five pages are gone: two pages and one to spare for the first are not left */
    assert_int_equal(p.n_actions, 1);
    p = build(two, 2, 4, 512, 6);
    assert_int_equal(p.n_actions, 2);
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

/* Every field of a segment that comes over the segment is checked. */
static void test_unpack_refuses_odd_segments(void **state)
{
    (void)state;
    const struct plan_segment decode = {.request = 1, .position_first = 70, .rows = 4, .kind = PLAN_DECODE, .picks = 1,
                                        .drafts = 3, .source = DRAFT_NGRAM};
    const struct plan_segment prefill = {.request = 1, .position_first = 64, .rows = 4, .kind = PLAN_PREFILL};
    struct plan_segment odd[18];
    for (int i = 0; i < 18; i++) odd[i] = i < 9 ? decode : prefill;
    odd[0].rows = 3;
    odd[1].drafts = (int16_t)(odd[1].rows = -1);
    odd[2].drafts = KERN_MAX_DRAFTS + 1, odd[2].rows = KERN_MAX_DRAFTS + 2;
    odd[3].source = DRAFT_NONE;
    odd[4].source = DRAFT_SOURCES;
    odd[5].drafts = 0, odd[5].rows = 1;
    odd[6].picks = 0;
    odd[7].position_first = INT32_MAX - 1;
    odd[8].kind = 3;
    odd[9].drafts = 3, odd[9].source = DRAFT_MTP;
    odd[10].picks = 2;
    odd[11].rows = 0;
    odd[12].position_first = -64;
    odd[13].source = DRAFT_MTP;
    odd[14].keep = 2, odd[14].rows = 64;
    odd[15].keep = 1; /* rows end within a page */
    odd[16].keep = odd[16].picks = 1, odd[16].rows = 64;
    odd[17] = decode, odd[17].keep = 1, odd[17].position_first = 60;
    struct step_plan p = {.step = 1, .n_segments = 2, .segments = {decode, prefill}}, q;
    char bytes[sizeof p];
    assert_int_equal(step_plan_unpack(bytes, step_plan_pack(&p, bytes), &q, NULL), RC_OK);
    for (int i = 0; i < 18; i++) {
        p.segments[1] = odd[i];
        if (step_plan_unpack(bytes, step_plan_pack(&p, bytes), &q, NULL) != RC_FATAL) fail_msg("odd segment %d passed", i);
    }
}

/* Carries plans out on counts alone: many requests through few pages; every page is accounted for and all finish. */
static void simulate(int most_drafts)
{
    enum { N = 40, CAPACITY = 24, ACTIVE = 6 };
    struct plan_sequence s[N];
    int want[N], n = N, pages_free = CAPACITY, steps = 0, preemptions = 0;
    int64_t admitted = 0, drafted = 0;
    for (int i = 0; i < N; i++) {
        s[i] = queued((uint64_t)i + 1, 1 + i * 37 % 700);
        want[i] = s[i].prompt_tokens + 1 + i * 53 % 600;
    }
    while (n) {
        for (int i = 0; i < n && most_drafts; i++) {
            int left = want[i] - s[i].computed - 1;
            s[i] = drafting(s[i], left < most_drafts ? left : most_drafts, left > 0 ? DRAFT_NGRAM : DRAFT_NONE);
        }
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
        int pages_in_step = 0;
        for (uint32_t g = 0; g < p.n_segments; g++) {
            int i = 0;
            while (s[i].request != p.segments[g].request) i++;
            assert_int_equal(s[i].state, PLAN_RUNNING);
            assert_int_equal(p.segments[g].position_first, s[i].computed);
            int used = kv_pages_for(s[i].computed + p.segments[g].rows) - s[i].pages;
            assert_in_range(used, 0, pages_free); /* drafts and all, while the step runs */
            pages_in_step += used;
            assert_in_range(pages_in_step, 0, pages_free);
            s[i].computed += p.segments[g].rows - (p.segments[g].drafts + steps % 2) / 2; /* some are wrong */
            drafted += p.segments[g].drafts;
            bool prefill_cut = p.segments[g].kind == PLAN_PREFILL && !p.segments[g].picks;
            assert_true(!prefill_cut || s[i].computed % 64 == 0);
            if (s[i].computed >= want[i]) s[i].retire = true;
        }
        for (int i = 0; i < n; i++) { /* the commit: pages of right rows stay */
            if (s[i].state != PLAN_RUNNING) continue;
            pages_free -= kv_pages_for(s[i].computed) - s[i].pages;
            s[i].pages = kv_pages_for(s[i].computed);
        }
        assert_in_range(pages_free, 0, CAPACITY);
    }
    assert_int_equal(pages_free, CAPACITY);
    assert_true(preemptions > 0);
    assert_true((drafted > 0) == (most_drafts > 0));
}

static void test_simulation_ends(void **state)
{
    (void)state;
    for (int drafts = 0; drafts <= KERN_MAX_DRAFTS; drafts++) simulate(drafts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_admits_in_order_within_budget), cmocka_unit_test(test_decode_rows_come_first),
        cmocka_unit_test(test_oldest_preempts_youngest),      cmocka_unit_test(test_restore_goes_before_admission),
        cmocka_unit_test(test_held_and_probed), cmocka_unit_test(test_rows_are_cut_where_they_are_kept),
        cmocka_unit_test(test_retire_frees_pages_for_this_step), cmocka_unit_test(test_pack_and_unpack),
        cmocka_unit_test(test_drafts_take_what_pages_are_left), cmocka_unit_test(test_drafts_displace_nobody),
        cmocka_unit_test(test_prompts_never_draft),           cmocka_unit_test(test_full_step_with_drafts),
        cmocka_unit_test(test_admits_from_a_snapshot),        cmocka_unit_test(test_unpack_refuses_odd_segments),
        cmocka_unit_test(test_simulation_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
