/* draft: proposals against a search through the whole text, and the count of drafts against its formula. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "draft.h"

/* By the header's words: of the newest 8 places after the last pair, the longest common past of at most 32 tokens. */
static int oracle(const int32_t *tokens, int n, int most, int32_t *out, int *matched)
{
    int best = 0, seen = 0;
    *matched = 1;
    for (int p = n - 1; p >= 2 && seen < 8; p--) {
        int len = 0;
        while (len < 32 && len < p && tokens[p - 1 - len] == tokens[n - 1 - len]) len++;
        seen += len >= 2;
        if (len > *matched) best = p, *matched = len;
    }
    if (!best) return *matched = 0, 0;
    for (int j = 0; j < most; j++) out[j] = best + j < n ? tokens[best + j] : out[best + j - n];
    return most;
}

static uint32_t next(uint32_t *state) { return *state = *state * 1664525 + 1013904223, *state >> 8; }

/* Random texts of few and of many tokens, periodic ones, and one of a single token. */
static void test_proposals(void **state)
{
    (void)state;
    enum { N = 700 };
    static const uint32_t letters[] = {1, 2, 3, 6, 30};
    static int32_t tokens[N];
    uint32_t random = 1;
    int proposed = 0, none = 0;
    for (size_t k = 0; k < 2 * sizeof letters / sizeof letters[0]; k++) {
        struct draft_index x;
        assert_true(draft_index_open(N, &x));
        for (int i = 0; i < N; i++) {
            bool repeat = k >= sizeof letters / sizeof letters[0] && i > 40 && next(&random) % 8;
            tokens[i] = repeat ? tokens[i - 37] : (int32_t)(next(&random) % letters[k / 2]) * 1000;
        }
        for (int n = 0; n <= N; n += 1 + (int)(k + (size_t)n) % 4) { /* not every length: several tokens come at once */
            int32_t want[KERN_MAX_DRAFTS], got[KERN_MAX_DRAFTS + 1] = {0};
            int want_matched, matched, most = 1 + n % KERN_MAX_DRAFTS;
            got[most] = -77;
            int count = draft_index_propose(&x, tokens, n, most, got, &matched);
            assert_int_equal(count, oracle(tokens, n, most, want, &want_matched));
            assert_int_equal(matched, want_matched);
            assert_memory_equal(got, want, (size_t)count * sizeof *got);
            assert_int_equal(got[most], -77);
            assert_int_equal(draft_index_propose(&x, tokens, n, most, got, &matched), count); /* asking changes nothing */
            assert_memory_equal(got, want, (size_t)count * sizeof *got);
            proposed += count > 0;
            none += !count;
        }
        draft_index_free(&x);
    }
    assert_true(proposed > 100 && none > 5);
}

static void test_bounds(void **state)
{
    (void)state;
    struct draft_index x;
    int32_t tokens[] = {5, 6, 5, 6}, out[2];
    int matched;
    assert_true(draft_index_open(3, &x));
    assert_int_equal(draft_index_propose(&x, tokens, 0, 2, out, &matched), 0);
    assert_int_equal(draft_index_propose(&x, tokens, 1, 2, out, &matched), 0);
    assert_int_equal(draft_index_propose(&x, tokens, 3, 2, out, &matched), 0);
    assert_int_equal(draft_index_propose(&x, tokens, 4, 2, out, &matched), 0); /* beyond what it was opened for */
    draft_index_free(&x);
    assert_true(draft_index_open(4, &x));
    assert_int_equal(draft_index_propose(&x, tokens, 4, 0, out, &matched), 0);
    assert_int_equal(draft_index_propose(&x, tokens, 4, 2, out, &matched), 2);
    assert_int_equal(matched, 2);
    assert_int_equal(out[0], 5);
    assert_int_equal(out[1], 6);
    draft_index_free(&x);
    draft_index_free(&x);
}

/* A long text of one token: every place has the longest past; the walk must not grow with the text. */
static void test_many_places(void **state)
{
    (void)state;
    enum { N = 200000 };
    static int32_t tokens[N];
    struct draft_index x;
    int32_t out[5];
    int matched;
    assert_true(draft_index_open(N, &x));
    for (int n = 2; n <= N; n++) assert_int_equal(draft_index_propose(&x, tokens, n, 5, out, &matched), n > 2 ? 5 : 0);
    assert_int_equal(matched, 32);
    draft_index_free(&x);
}

static void test_kinds(void **state)
{
    (void)state;
    assert_int_equal(draft_kind_of(DRAFT_MTP, 0), DRAFT_KIND_MTP);
    assert_int_equal(draft_kind_of(DRAFT_NGRAM, 2), DRAFT_KIND_SHORT);
    assert_int_equal(draft_kind_of(DRAFT_NGRAM, 32), DRAFT_KIND_LONG);
}

static struct draft_rates rates_of(enum draft_kind k, int rounds, int drafts, int accepted)
{
    struct draft_rates r = {0};
    for (int i = 0; i < rounds; i++) draft_rates_note(&r, k, drafts, accepted);
    return r;
}

static void test_rates(void **state)
{
    (void)state;
    struct draft_rates r = rates_of(DRAFT_KIND_LONG, 1, 3, 1);
    assert_float_equal(r.tried[DRAFT_KIND_LONG][0], 1, 0);
    assert_float_equal(r.right[DRAFT_KIND_LONG][0], 1, 0);
    assert_float_equal(r.tried[DRAFT_KIND_LONG][1], 1, 0);
    assert_float_equal(r.right[DRAFT_KIND_LONG][1], 0, 0);
    assert_float_equal(r.tried[DRAFT_KIND_LONG][2], 0, 0); /* never looked at */
    assert_float_equal(r.tried[DRAFT_KIND_SHORT][0], 0, 0);
    r = rates_of(DRAFT_KIND_MTP, 1000, KERN_MAX_DRAFTS, KERN_MAX_DRAFTS);
    for (int j = 0; j < KERN_MAX_DRAFTS; j++) {
        assert_true(r.tried[DRAFT_KIND_MTP][j] < 21); /* 1 / (1 - 0.95) */
        assert_float_equal(r.right[DRAFT_KIND_MTP][j], r.tried[DRAFT_KIND_MTP][j], 0);
    }
}

/* Always right: all that may be had. Always wrong: none. More company in a step: fewer. Dearer drafts: fewer. */
static void test_count(void **state)
{
    (void)state;
    const struct draft_cost cheap = {.row = 0.3, .mtp_pass = 0}, dear = {.row = 0.3, .mtp_pass = 0.35};
    struct draft_rates none = {0};
    double speed;
    for (enum draft_kind k = 0; k < DRAFT_KINDS; k++) {
        struct draft_rates right = rates_of(k, 300, KERN_MAX_DRAFTS, KERN_MAX_DRAFTS);
        struct draft_rates wrong = rates_of(k, 300, KERN_MAX_DRAFTS, 0);
        for (int most = 0; most <= KERN_MAX_DRAFTS; most++)
            assert_int_equal(draft_count(&right, &right, k, most, 1, &cheap, &speed), most);
        assert_true(speed > 2);
        assert_int_equal(draft_count(&wrong, &wrong, k, 5, 1, &cheap, &speed), 0);
        assert_float_equal(speed, 1, 0);
        assert_true(draft_count(&none, &right, k, 5, 1, &cheap, &speed) >= draft_count(&none, &wrong, k, 5, 1, &cheap, &speed));
        assert_true(draft_count(&none, &none, k, 1, 1, &cheap, &speed) == 1); /* worth a try */
    }
    struct draft_rates half = rates_of(DRAFT_KIND_MTP, 1, 5, 5);
    for (int i = 0; i < 300; i++) draft_rates_note(&half, DRAFT_KIND_MTP, 5, i % 2 ? 5 : 1);
    int last = KERN_MAX_DRAFTS;
    for (int decoding = 1; decoding <= 64; decoding *= 2) {
        int n = draft_count(&half, &half, DRAFT_KIND_MTP, 5, decoding, &cheap, &speed);
        assert_true(n <= last);
        assert_true(draft_count(&half, &half, DRAFT_KIND_MTP, 5, decoding, &dear, &speed) <= n);
        last = n;
    }
    struct draft_rates right = rates_of(DRAFT_KIND_LONG, 300, 1, 1); /* the formula, for one draft that is nearly always right */
    draft_count(&right, &right, DRAFT_KIND_LONG, 1, 4, &cheap, &speed);
    assert_true(fabs(speed - 2 * (1 + 0.3 * 4) / (1 + 0.3 * 4 * 2)) < 0.05);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_proposals), cmocka_unit_test(test_bounds), cmocka_unit_test(test_many_places),
        cmocka_unit_test(test_kinds),     cmocka_unit_test(test_rates),  cmocka_unit_test(test_count),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
