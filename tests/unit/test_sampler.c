/* The sampler against a plain one that sorts everything, by exact sets, by chi-square of many draws, and by numbers
 * worked out by hand. Seeds are fixed, so a statistical test either always passes or never. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sampler.h"

static uint64_t noise(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static float noise_between(uint64_t *state, float low, float high)
{
    return low + (high - low) * (float)(noise(state) >> 40) / 16777216.0f;
}

/* Copies the logits (a pick may change them), with nothing readable behind copy and scratch for a sanitizer to miss. */
static enum rc pick(const struct sampling *p, const struct token_counts *counts, const float *logits, int n,
                    int64_t position, int32_t *out)
{
    float *copy = malloc((size_t)n * sizeof *copy);
    void *scratch = malloc(sampler_scratch_bytes(n));
    memcpy(copy, logits, (size_t)n * sizeof *copy);
    struct err e = {0};
    enum rc rc = sampler_pick(p, counts, n, position, copy, scratch, out, &e);
    if (rc != RC_OK) assert_string_equal(e.code, "non_finite_logits");
    free(scratch);
    free(copy);
    return rc;
}

static int32_t pick_ok(const struct sampling *p, const float *logits, int n, int64_t position)
{
    int32_t id = -1;
    assert_int_equal(pick(p, NULL, logits, n, position, &id), RC_OK);
    assert_in_range(id, 0, n - 1);
    return id;
}

static struct sampling greedy(void)
{
    struct sampling p = sampling_default();
    p.temperature = 0.0f;
    return p;
}

/* ---- greedy ---- */

static void greedy_takes_the_lowest_of_the_largest(void **state)
{
    (void)state;
    struct sampling p = greedy();
    int sizes[] = {1, 2, 15, 16, 17, 100, 1023, 1024, 1025, 1040, 2500};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        int n = sizes[s];
        float *logits = malloc((size_t)n * sizeof *logits);
        uint64_t seed = 5;
        for (int i = 0; i < n; i++) logits[i] = noise_between(&seed, -9.0f, -1.0f);
        for (int first = 0; first < n; first += 1 + n / 40) {
            float saved = logits[first], saved_last = logits[n - 1];
            logits[first] = logits[n - 1] = -0.5f;
            assert_int_equal(pick_ok(&p, logits, n, 1), first);
            logits[first] = saved, logits[n - 1] = saved_last;
        }
        for (int i = 0; i < n; i++) logits[i] = -FLT_MAX;
        assert_int_equal(pick_ok(&p, logits, n, 1), 0);
        for (int i = 0; i < n; i++) logits[i] = i == n / 2 ? -0.0f : i > n / 2 ? 0.0f : -1.0f;
        assert_int_equal(pick_ok(&p, logits, n, 1), n / 2);
        free(logits);
    }
}

static void odd_logits_fail_the_row(void **state)
{
    (void)state;
    enum { N = 1050 };
    float bad[] = {NAN, -NAN, INFINITY, -INFINITY}, logits[N + 1];
    struct sampling kinds[2] = {greedy(), sampling_default()};
    for (int k = 0; k < 2; k++)
        for (size_t b = 0; b < sizeof bad / sizeof bad[0]; b++)
            for (int at = 0; at <= N; at += at < 40 || at > N - 40 ? 1 : 97) {
                int32_t id = -1;
                for (int i = 0; i <= N; i++) logits[i] = (float)(i % 7);
                logits[at] = bad[b];
                /* Beyond vocab_used nothing is looked at. */
                assert_int_equal(pick(&kinds[k], NULL, logits, N, 3, &id), at < N ? RC_FAILED : RC_OK);
            }
    for (int i = 0; i <= N; i++) logits[i] = i % 2 ? FLT_MAX : -FLT_MAX;
    assert_int_equal(pick_ok(&kinds[0], logits, N, 3), 1);
    assert_int_equal(pick_ok(&kinds[1], logits, N, 3) % 2, 1);
}

/* ---- the plain sampler ---- */

struct plain {
    float logit;
    int32_t id;
    double weight;
};

static int plain_order(const void *a, const void *b)
{
    const struct plain *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

/* Probabilities of all ids by the rules of sampler.h, in long double, by sorting. Returns how many are not 0. */
static size_t plain_probabilities(const struct sampling *p, const float *logits, int n, double *probability)
{
    struct plain *c = malloc((size_t)n * sizeof *c);
    size_t kept = (size_t)n;
    long double total = 0, sum = 0;
    for (int i = 0; i < n; i++) c[i] = (struct plain){logits[i], i, 0};
    qsort(c, (size_t)n, sizeof *c, plain_order);
    for (int i = 0; i < n; i++) {
        long double distance = (long double)c[i].logit - (long double)c[0].logit;
        c[i].weight = (double)expl(distance / (long double)p->temperature);
        probability[i] = 0.0;
    }
    while (kept > 1 && c[kept - 1].weight < (double)p->min_p) kept--;
    if (p->top_k > 0 && (size_t)p->top_k < kept) kept = (size_t)p->top_k;
    for (size_t i = 0; i < kept; i++) total += (long double)c[i].weight;
    if (p->top_p < 1.0f) {
        size_t cut = 0;
        while (cut < kept && (cut == 0 || sum < (long double)p->top_p * total)) sum += (long double)c[cut++].weight;
        kept = cut;
        total = sum;
    }
    for (size_t i = 0; i < kept; i++) probability[c[i].id] = (double)((long double)c[i].weight / total);
    free(c);
    return kept;
}

/* Far out in the tail: about 6 standard deviations. */
static double chi_square_limit(int freedom) { return freedom + 6.0 * sqrt(2.0 * freedom) + 12.0; }

/* Draws often and compares with the probabilities; ids of probability 0 must never come. */
static void draws_agree(const struct sampling *p, const float *logits, int n, int draws)
{
    double *probability = malloc((size_t)n * sizeof *probability);
    int *drawn = calloc((size_t)n, sizeof *drawn);
    plain_probabilities(p, logits, n, probability);
    for (int i = 0; i < draws; i++) drawn[pick_ok(p, logits, n, i)]++;
    double chi = 0.0, rest_expected = 0.0;
    int cells = 0, rest = 0;
    for (int i = 0; i < n; i++) {
        double expected = probability[i] * draws;
        if (probability[i] == 0.0 && drawn[i]) fail_msg("id %d was cut but came %d times", i, drawn[i]);
        if (expected < 8.0) {
            rest_expected += expected;
            rest += drawn[i];
            continue;
        }
        chi += (drawn[i] - expected) * (drawn[i] - expected) / expected;
        cells++;
    }
    if (rest_expected >= 4.0) {
        chi += (rest - rest_expected) * (rest - rest_expected) / rest_expected;
        cells++;
    }
    if (chi > chi_square_limit(cells - 1)) fail_msg("chi-square %.1f with %d cells", chi, cells);
    free(drawn);
    free(probability);
}

static void draws_follow_the_probabilities(void **state)
{
    (void)state;
    const struct sampling kinds[] = {
        {1.0f, 1.0f, 0.0f, 0, 0, 0, 1, 11},    {0.5f, 1.0f, 0.0f, 0, 0, 0, 1, 12},
        {2.0f, 1.0f, 0.0f, 0, 0, 0, 1, 13},    {1.0f, 0.9f, 0.0f, 0, 0, 0, 1, 14},
        {1.0f, 0.3f, 0.0f, 0, 0, 0, 1, 15},    {1.0f, 1.0f, 0.1f, 0, 0, 0, 1, 16},
        {1.0f, 1.0f, 0.0f, 5, 0, 0, 1, 17},    {1.0f, 0.8f, 0.0f, 7, 0, 0, 1, 18},
        {1.3f, 0.95f, 0.02f, 20, 0, 0, 1, 19}, {1.0f, 0.9f, 0.05f, 0, 0, 0, 1, 20},
        {1.0f, 1.0f, 0.0f, 1000, 0, 0, 1, 21}, {0.7f, 0.999f, 0.0f, 0, 0, 0, 1, 22},
    };
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        uint64_t seed = 100 + k;
        float small[30], large[700];
        for (int i = 0; i < 30; i++) small[i] = noise_between(&seed, -3.0f, 3.0f);
        for (int i = 0; i < 700; i++) large[i] = noise_between(&seed, -2.0f, 2.0f);
        draws_agree(&kinds[k], small, 30, 20000);
        draws_agree(&kinds[k], large, 700, 20000);
    }
}

/* Every id of the plain sampler's set comes, and no other. */
static void set_is(const struct sampling *p, const float *logits, int n, int draws)
{
    double *probability = malloc((size_t)n * sizeof *probability);
    int *drawn = calloc((size_t)n, sizeof *drawn);
    plain_probabilities(p, logits, n, probability);
    for (int i = 0; i < draws; i++) drawn[pick_ok(p, logits, n, i)]++;
    for (int i = 0; i < n; i++)
        if ((probability[i] > 0.0) != (drawn[i] > 0))
            fail_msg("id %d: probability %g, drawn %d", i, probability[i], drawn[i]);
    free(drawn);
    free(probability);
}

static void sets_are_exact(void **state)
{
    (void)state;
    uint64_t seed = 31;
    for (int round = 0; round < 60; round++) {
        float logits[40];
        int n = 2 + (int)(noise(&seed) % 39);
        struct sampling p = sampling_default();
        /* Few values, so that ties stand on every border. */
        for (int i = 0; i < n; i++) logits[i] = (float)(noise(&seed) % 4) * 0.5f;
        p.seed = noise(&seed);
        if (round % 2) p.top_k = 1 + (int32_t)(noise(&seed) % 12);
        if (round % 3) p.top_p = noise_between(&seed, 0.01f, 0.99f);
        if (round % 5 == 0) p.min_p = noise_between(&seed, 0.0f, 1.0f);
        set_is(&p, logits, n, 4000);
    }
}

static void borders_by_hand(void **state)
{
    (void)state;
    /* Ten equal logits weigh 1 each: 0.35 of 10 is passed by four, the lowest ids. */
    float equal[10] = {0};
    struct sampling p = sampling_default();
    bool seen[10] = {false};
    p.top_p = 0.35f;
    for (int i = 0; i < 500; i++) seen[pick_ok(&p, equal, 10, i)] = true;
    for (int i = 0; i < 10; i++) assert_int_equal(seen[i], i < 4);
    /* top_k and then top_p of what it left: of three equal ones, 0.5 needs two. */
    memset(seen, 0, sizeof seen);
    p.top_k = 3, p.top_p = 0.5f;
    for (int i = 0; i < 500; i++) seen[pick_ok(&p, equal, 10, i)] = true;
    for (int i = 0; i < 10; i++) assert_int_equal(seen[i], i < 2);
    /* min_p 1: only what equals the largest. */
    float some[6] = {1.0f, 2.0f, 1.999f, 2.0f, -5.0f, 2.0f};
    bool of_some[6] = {false};
    p = sampling_default(), p.min_p = 1.0f;
    for (int i = 0; i < 500; i++) of_some[pick_ok(&p, some, 6, i)] = true;
    for (int i = 0; i < 6; i++) assert_int_equal(of_some[i], some[i] == 2.0f);
    /* What leaves one candidate is greedy. */
    struct sampling single[] = {{1e-6f, 1, 0, 0, 0, 0, 1, 1},
                                {1e-44f, 1, 0, 0, 0, 0, 1, 1},
                                {1, 1e-9f, 0, 0, 0, 0, 1, 1},
                                {1, 1, 0, 1, 0, 0, 1, 1},
                                {5, 1e-9f, 0, 4, 0, 0, 1, 1}};
    float rising[6] = {1.0f, 2.0f, 1.9f, 2.5f, -5.0f, 2.0f};
    for (size_t k = 0; k < sizeof single / sizeof single[0]; k++)
        for (int i = 0; i < 200; i++) assert_int_equal(pick_ok(&single[k], rising, 6, i), 3);
}

/* Tails of weight 0 and ends of the running sums. */
static void nothing_of_weight_zero_comes(void **state)
{
    (void)state;
    enum { N = 600 };
    float logits[N];
    for (int i = 0; i < N; i++) logits[i] = i == 255 || i == 256 || i == 511 ? 0.0f : -1e4f;
    struct sampling kinds[] = {sampling_default(), sampling_default(), sampling_default()};
    kinds[1].top_p = 0.9999999f, kinds[2].top_k = 500;
    for (size_t k = 0; k < 3; k++) {
        int drawn[N] = {0};
        for (int i = 0; i < 3000; i++) drawn[pick_ok(&kinds[k], logits, N, i)]++;
        for (int i = 0; i < N; i++) assert_int_equal(drawn[i] > 0, logits[i] == 0.0f);
    }
}

/* Random numbers must not depend on how seeds and positions are numbered. */
static void random_numbers_are_even(void **state)
{
    (void)state;
    enum { CELLS = 64, DRAWS = 64000 };
    float logits[CELLS] = {0};
    for (int kind = 0; kind < 5; kind++) {
        int cell[CELLS] = {0}, pair[CELLS] = {0}, before = 0;
        for (int i = 0; i < DRAWS; i++) {
            struct sampling p = sampling_default();
            int64_t position = 77;
            if (kind == 0)
                position = i;
            else if (kind == 1)
                p.seed = (uint64_t)i;
            else if (kind == 2)
                p.seed = (uint64_t)i << 40;
            else if (kind == 3)
                p.seed = (uint64_t)i, position = -i + DRAWS;
            else
                p.seed = UINT64_C(0x9e3779b97f4a7c15) * (uint64_t)i, position = i;
            int32_t id = pick_ok(&p, logits, CELLS, position);
            cell[id]++;
            if (i) pair[(id - before + CELLS) % CELLS]++;
            before = id;
        }
        double chi = 0.0, chi_pair = 0.0, expected = (double)DRAWS / CELLS;
        for (int i = 0; i < CELLS; i++) {
            chi += (cell[i] - expected) * (cell[i] - expected) / expected;
            chi_pair += (pair[i] - expected) * (pair[i] - expected) / expected;
        }
        assert_true(chi < chi_square_limit(CELLS - 1));
        assert_true(chi_pair < chi_square_limit(CELLS - 1));
        assert_true(chi > 15.0); /* too even is not random either */
    }
}

static void a_row_depends_on_nothing_else(void **state)
{
    (void)state;
    uint64_t seed = 3;
    float logits[300];
    for (int i = 0; i < 300; i++) logits[i] = noise_between(&seed, -1.0f, 1.0f);
    struct sampling p = sampling_default(), other = sampling_default();
    p.seed = 9, other.seed = 10;
    int same_seed = 0, other_seed = 0;
    for (int i = 0; i < 200; i++) {
        int32_t a = pick_ok(&p, logits, 300, i), b = pick_ok(&other, logits, 300, i);
        same_seed += pick_ok(&p, logits, 300, i) == a;
        other_seed += a == b;
    }
    assert_int_equal(same_seed, 200);
    assert_true(other_seed < 20);
}

/* ---- penalties and counts ---- */

static void penalties_by_hand(void **state)
{
    (void)state;
    struct token_counts counts = {0};
    assert_true(token_counts_add(&counts, 0, false)); /* in the prompt only */
    assert_true(token_counts_add(&counts, 1, true));
    assert_true(token_counts_add(&counts, 2, true));
    assert_true(token_counts_add(&counts, 2, true));
    assert_true(token_counts_add(&counts, 2, false));
    assert_true(token_counts_add(&counts, 900, true)); /* outside of the row: nothing */
    assert_false(token_counts_add(&counts, -1, true));
    const float before[5] = {4.0f, 4.0f, -4.0f, 4.0f, -1.0f};
    struct sampling p = greedy();
    float row[5];
    int32_t id;
    char scratch[sizeof(double)];
    p.presence_penalty = 0.5f, p.frequency_penalty = 0.25f, p.repetition_penalty = 2.0f;
    memcpy(row, before, sizeof row);
    assert_int_equal(sampler_pick(&p, &counts, 5, 1, row, scratch, &id, NULL), RC_OK);
    const float after[5] = {2.0f, 4.0f / 2 - 0.5f - 0.25f, -4.0f * 2 - 0.5f - 2 * 0.25f, 4.0f, -1.0f};
    for (int i = 0; i < 5; i++) assert_true(row[i] == after[i]);
    assert_int_equal(id, 3);
    /* Negative ones reward; a prompt token is no generated token. */
    p.presence_penalty = -1.0f, p.frequency_penalty = -0.5f, p.repetition_penalty = 1.0f;
    memcpy(row, before, sizeof row);
    assert_int_equal(sampler_pick(&p, &counts, 5, 1, row, scratch, &id, NULL), RC_OK);
    const float rewarded[5] = {4.0f, 5.5f, -4.0f + 1.0f + 2 * 0.5f, 4.0f, -1.0f};
    for (int i = 0; i < 5; i++) assert_true(row[i] == rewarded[i]);
    assert_int_equal(id, 1);
    /* A penalty makes no infinity. */
    p = greedy(), p.repetition_penalty = 1e-30f;
    float huge[3] = {1e30f, -1.0f, -1e30f};
    assert_int_equal(sampler_pick(&p, &counts, 3, 1, huge, scratch, &id, NULL), RC_OK);
    assert_int_equal(id, 0);
    assert_true(huge[0] == FLT_MAX);
    /* All off: the row stays as it is. */
    p = greedy();
    assert_false(sampling_needs_counts(&p));
    memcpy(row, before, sizeof row);
    assert_int_equal(sampler_pick(&p, &counts, 5, 1, row, scratch, &id, NULL), RC_OK);
    assert_memory_equal(row, before, sizeof row);
    struct sampling each[3] = {greedy(), greedy(), greedy()};
    each[0].presence_penalty = 0.1f, each[1].frequency_penalty = -0.1f, each[2].repetition_penalty = 1.1f;
    for (int i = 0; i < 3; i++) assert_true(sampling_needs_counts(&each[i]));
    token_counts_free(&counts);
    assert_null(counts.slots);
}

static void counts_agree_with_an_array(void **state)
{
    (void)state;
    enum { IDS = 5000, ADDS = 40000 };
    static uint32_t prompt[IDS], generated[IDS];
    struct token_counts counts = {0};
    uint64_t seed = 77;
    for (int i = 0; i < ADDS; i++) {
        int32_t id = (int32_t)(noise(&seed) % IDS) * (i % 2 ? 1 : 64) % IDS;
        bool is_generated = noise(&seed) & 1;
        assert_true(token_counts_add(&counts, id, is_generated));
        ++*(is_generated ? &generated[id] : &prompt[id]);
    }
    size_t found = 0, expected = 0;
    for (size_t i = 0; i < counts.cap; i++) {
        const struct token_count *t = &counts.slots[i];
        if (t->id < 0) continue;
        assert_in_range(t->id, 0, IDS - 1);
        assert_int_equal(t->prompt, prompt[t->id]);
        assert_int_equal(t->generated, generated[t->id]);
        found++;
    }
    for (int i = 0; i < IDS; i++) expected += prompt[i] + generated[i] > 0;
    assert_int_equal(found, expected);
    assert_int_equal(counts.len, expected);
    token_counts_free(&counts);
}

static void the_largest_vocabulary(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    float *logits = malloc(N * sizeof *logits);
    double *probability = malloc(N * sizeof *probability);
    uint64_t seed = 1;
    for (int i = 0; i < N; i++) logits[i] = noise_between(&seed, -8.0f, 0.0f);
    for (int i = 0; i < 50; i++) logits[noise(&seed) % N] = noise_between(&seed, 6.0f, 9.0f);
    struct sampling kinds[] = {{1, 0.3f, 0, 0, 0, 0, 1, 4},
                               {1, 0.9f, 0, 40, 0, 0, 1, 5},
                               {1, 1, 0.05f, 0, 0, 0, 1, 6},
                               {1, 1, 0, 0, 0, 0, 1, 7}};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        plain_probabilities(&kinds[k], logits, N, probability);
        for (int i = 0; i < 3; i++) assert_true(probability[pick_ok(&kinds[k], logits, N, i)] > 0.0);
    }
    free(probability);
    free(logits);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_lowest_of_the_largest),
        cmocka_unit_test(odd_logits_fail_the_row),
        cmocka_unit_test(draws_follow_the_probabilities),
        cmocka_unit_test(sets_are_exact),
        cmocka_unit_test(borders_by_hand),
        cmocka_unit_test(nothing_of_weight_zero_comes),
        cmocka_unit_test(random_numbers_are_even),
        cmocka_unit_test(a_row_depends_on_nothing_else),
        cmocka_unit_test(penalties_by_hand),
        cmocka_unit_test(counts_agree_with_an_array),
        cmocka_unit_test(the_largest_vocabulary),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
