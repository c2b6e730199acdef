/* The exactness contract on a tiny model, ranks as threads: a request's tokens and traces are the same bits alone, batched,
 * reversed, under preemption, however its prompt is cut and whatever the thread count; every rank count repeats itself. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_group.h"
#include "tiny_gguf.h"

enum { N_REQUESTS = 5, MAX_PROMPT = 400 };

struct fixture {
    char path[64];
    int32_t prompts[N_REQUESTS][MAX_PROMPT];
    struct engine_request requests[N_REQUESTS];
};

/* Prompts that end on, before and after block borders; two greedy requests, three sampled ones, one with penalties. */
static int setup(void **state)
{
    static const int prompt_tokens[N_REQUESTS] = {64, 1, 200, 383, 127};
    static const int max_tokens[N_REQUESTS] = {260, 300, 256, 270, 257};
    struct fixture *f = calloc(1, sizeof *f);
    snprintf(f->path, sizeof f->path, "/tmp/tandem-exactness-%d.gguf", getpid());
    struct tiny_gguf t = tiny_gguf_default();
    if (!tiny_gguf_write(&t, f->path)) return -1;
    for (int i = 0; i < N_REQUESTS; i++) {
        for (int j = 0; j < prompt_tokens[i]; j++) f->prompts[i][j] = 3 + (i * 7919 + j * 31 + j * j) % 256;
        struct sampling sampling = sampling_default();
        sampling.seed = 1000 + (uint64_t)i;
        if (i < 2) sampling.temperature = 0;
        if (i == 3) sampling.top_p = 0.9f, sampling.top_k = 40;
        if (i == 4) sampling.repetition_penalty = 1.2f, sampling.presence_penalty = 0.5f, sampling.frequency_penalty = 0.2f;
        f->requests[i] = (struct engine_request){.id = 10 + (uint64_t)i, .prompt = f->prompts[i],
                                                 .prompt_tokens = (size_t)prompt_tokens[i], .max_tokens = max_tokens[i],
                                                 .sampling = sampling, .ignore_end = true};
    }
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    unlink(f->path);
    free(f);
    return 0;
}

static struct engine_group group_of(const struct fixture *f, int ranks, enum kv_format kv)
{
    return (struct engine_group){.options = {.model_path = f->path, .ranks = ranks, .active = 4, .kv = kv, .trace = true},
                                 .threads = 1, .bounds = lockstep_bounds_default()};
}

static void run(struct engine_group *g, const struct engine_request *requests, size_t n, struct engine_group_result *out)
{
    if (!engine_group_run(g, requests, n, out)) {
        for (int r = 0; r < g->options.ranks; r++) print_error("rank %d: %s: %s\n", r, g->err[r].code, g->err[r].text);
        fail();
    }
}

static void assert_same(const struct engine_group_result *a, const struct engine_group_result *b)
{
    assert_int_equal(a->kind, ENGINE_EVENT_DONE);
    assert_int_equal(b->kind, ENGINE_EVENT_DONE);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_true(a->n_tokens >= 256);
    for (size_t i = 0; i < a->n_tokens; i++) {
        if (a->tokens[i] != b->tokens[i] || a->trace[2 * i] != b->trace[2 * i] || a->trace[2 * i + 1] != b->trace[2 * i + 1])
            fail_msg("token %zu of %zu differs", i, a->n_tokens);
    }
    assert_string_equal(a->text, b->text);
}

/* The yardstick: each request alone. */
static void run_alone(const struct fixture *f, int ranks, enum kv_format kv, struct engine_group_result out[N_REQUESTS])
{
    for (int i = 0; i < N_REQUESTS; i++) {
        struct engine_group g = group_of(f, ranks, kv);
        run(&g, &f->requests[i], 1, &out[i]);
        assert_int_equal(g.stats.max_sequences_in_step, 1);
    }
}

static void test_alone_batched_reversed(void **state)
{
    struct fixture *f = *state;
    for (int ranks = 1; ranks <= 4; ranks++) {
        struct engine_group_result alone[N_REQUESTS], batched[N_REQUESTS];
        run_alone(f, ranks, KV_F16, alone);
        struct engine_group g = group_of(f, ranks, KV_F16);
        run(&g, f->requests, N_REQUESTS, batched);
        assert_true(g.stats.max_sequences_in_step >= 3);
        for (int i = 0; i < N_REQUESTS; i++) assert_same(&alone[i], &batched[i]);
        engine_group_free(batched, N_REQUESTS);

        struct engine_request reversed[N_REQUESTS];
        for (int i = 0; i < N_REQUESTS; i++) reversed[i] = f->requests[N_REQUESTS - 1 - i];
        run(&g, reversed, N_REQUESTS, batched);
        for (int i = 0; i < N_REQUESTS; i++) assert_same(&alone[i], &batched[N_REQUESTS - 1 - i]);
        engine_group_free(batched, N_REQUESTS);
        engine_group_free(alone, N_REQUESTS);
    }
}

static void test_preemption_and_prompt_cuts(void **state)
{
    struct fixture *f = *state;
    static const int prefill_rows[] = {64, 128, 1024};
    struct engine_group_result alone[N_REQUESTS], batched[N_REQUESTS];
    for (int kv = 0; kv < KV_FORMATS; kv++) {
        run_alone(f, 2, (enum kv_format)kv, alone);
        for (size_t c = 0; c < sizeof prefill_rows / sizeof prefill_rows[0]; c++) {
            struct engine_group g = group_of(f, 2, (enum kv_format)kv);
            g.options.prefill_rows = prefill_rows[c];
            g.options.context = 704;
            g.options.kv_tokens = 832; /* together they need 1,984 */
            run(&g, f->requests, N_REQUESTS, batched);
            assert_true(g.stats.preemptions > 0);
            for (int i = 0; i < N_REQUESTS; i++) assert_same(&alone[i], &batched[i]);
            engine_group_free(batched, N_REQUESTS);
        }
        engine_group_free(alone, N_REQUESTS);
    }
}

static void test_threads(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result one[N_REQUESTS], three[N_REQUESTS];
    struct engine_group g = group_of(f, 1, KV_F16);
    run(&g, f->requests, N_REQUESTS, one);
    g.threads = 3;
    run(&g, f->requests, N_REQUESTS, three);
    for (int i = 0; i < N_REQUESTS; i++) assert_same(&one[i], &three[i]);
    engine_group_free(one, N_REQUESTS);
    engine_group_free(three, N_REQUESTS);
}

/* Ranks add in different orders, so texts may part at a near-tie; the first greedy tokens must not. */
static void test_rank_counts_agree(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result one, more;
    struct engine_group g = group_of(f, 1, KV_F16);
    run(&g, &f->requests[0], 1, &one);
    for (int ranks = 2; ranks <= 4; ranks++) {
        g = group_of(f, ranks, KV_F16);
        run(&g, &f->requests[0], 1, &more);
        assert_memory_equal(one.tokens, more.tokens, 32 * sizeof *one.tokens);
        engine_group_free(&more, 1);
    }
    engine_group_free(&one, 1);
}

/* Stop strings end a request exactly before their first occurrence, wherever token borders lie. */
static void test_stop_strings(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result whole, cut;
    struct engine_group g = group_of(f, 2, KV_F16);
    run(&g, &f->requests[2], 1, &whole);
    size_t at = strlen(whole.text) / 4; /* three ASCII bytes in a row: two or three tokens, no replacement character */
    while (whole.text[at] && !(whole.text[at] > 0 && whole.text[at + 1] > 0 && whole.text[at + 2] > 0)) at++;
    assert_int_not_equal(whole.text[at], 0);
    char stop[4] = {whole.text[at], whole.text[at + 1], whole.text[at + 2], '\0'};
    const char *stops[] = {"never to be seen", stop};
    struct engine_request r = f->requests[2];
    r.stop = stops;
    r.n_stop = 2;
    run(&g, &r, 1, &cut);
    assert_int_equal(cut.finish, FINISH_STOP);
    const char *first = strstr(whole.text, stop);
    assert_int_equal(strlen(cut.text), (size_t)(first - whole.text));
    assert_memory_equal(cut.text, whole.text, strlen(cut.text));
    engine_group_free(&whole, 1);
    engine_group_free(&cut, 1);
}

/* Faults that leave the process alive are found by the compare of the very step, on either rank. */
static void test_disagreement_is_found(void **state)
{
    struct fixture *f = *state;
    static const enum fault_kind kinds[] = {FAULT_TOKEN, FAULT_STATE, FAULT_PLAN};
    for (int i = 0; i < 12; i++) {
        struct engine_group g = group_of(f, 2, KV_F16);
        struct engine_group_result result;
        g.options.fault = (struct fault){.kind = kinds[i / 4], .rank = i % 2, .step = i / 2 % 2 ? 1 : 20};
        assert_false(engine_group_run(&g, &f->requests[0], 1, &result));
        assert_true(g.err[0].exit_status == EXIT_LOCKSTEP || g.err[1].exit_status == EXIT_LOCKSTEP);
        assert_int_equal(g.stats.steps, g.options.fault.step - 1);
        engine_group_free(&result, 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone_batched_reversed), cmocka_unit_test(test_preemption_and_prompt_cuts),
        cmocka_unit_test(test_threads),                cmocka_unit_test(test_rank_counts_agree),
        cmocka_unit_test(test_stop_strings),           cmocka_unit_test(test_disagreement_is_found),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
