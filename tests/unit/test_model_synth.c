/* Synthetic models: the same bytes each time, other bytes with another seed, the formats and deviations of the real thing, and
 * text that comes out of the whole engine: finite, the same with and without speculation, with drafts that are sometimes right.
 *
 * Deviations: 1e5 values of a uniform distribution have a deviation within 0.3% (three standard errors); formats with scales
 * vary these by up to a quarter, which adds 1 to 2%. 5% leaves room for nothing else. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_group.h"
#include "model_config.h"
#include "model_names.h"
#include "tokenizer.h"

enum { N_REQUESTS = 3, PROMPT_TOKENS = 70, ANSWER_TOKENS = 160 };

static struct model_file *open_model(const char *name)
{
    struct model_file *m = NULL;
    struct err e = {0};
    if (model_file_open(name, &m, &e) != RC_OK) fail_msg("%s: %s", name, e.text);
    return m;
}

static const struct tensor_view *tensor(const struct model_file *m, const char *name)
{
    const struct tensor_view *t = model_file_tensor(m, name);
    if (!t) fail_msg("no tensor %s", name);
    model_file_need(m, t);
    return t;
}

static void same_bytes_each_time(void **state)
{
    (void)state;
    static const char *const names[] = {"synth:tiny-hybrid", "synth:tiny-hybrid:1", "synth:tiny-hybrid-mixed:77"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        struct model_file *a = open_model(names[n]), *b = open_model(names[n]);
        char digest_a[65], digest_b[65];
        assert_true(model_file_synthetic(a));
        assert_int_equal(model_file_tensor_count(a), model_file_tensor_count(b));
        for (size_t i = model_file_tensor_count(a); i-- > 0;) {
            const struct tensor_view *left = tensor(a, model_file_tensor_at(a, i)->name), *right = tensor(b, left->name);
            char *copy = malloc(left->n_bytes);
            memcpy(copy, left->bytes, left->n_bytes);
            assert_int_equal(left->n_bytes, right->n_bytes);
            assert_memory_equal(copy, right->bytes, left->n_bytes);
            model_file_done(a, left);
            model_file_need(a, left);
            assert_memory_equal(copy, left->bytes, left->n_bytes);
            assert_float_equal(left->matrix.global, right->matrix.global, 0);
            free(copy);
        }
        assert_int_equal(model_file_digest(a, digest_a, NULL), RC_OK);
        assert_int_equal(model_file_digest(b, digest_b, NULL), RC_OK);
        assert_string_equal(digest_a, digest_b);
        model_file_close(a);
        model_file_close(b);
    }
}

static void seeds_differ(void **state)
{
    (void)state;
    struct model_file *a = open_model("synth:tiny-hybrid"), *b = open_model("synth:tiny-hybrid:2");
    char digest_a[65], digest_b[65];
    for (size_t i = 0; i < model_file_tensor_count(a); i++) {
        const struct tensor_view *left = tensor(a, model_file_tensor_at(a, i)->name), *right = tensor(b, left->name);
        assert_memory_not_equal(left->bytes, right->bytes, left->n_bytes);
    }
    model_file_digest(a, digest_a, NULL);
    model_file_digest(b, digest_b, NULL);
    assert_string_not_equal(digest_a, digest_b);
    model_file_close(a);
    model_file_close(b);
}

static void unknown_names_are_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"synth:",         "synth:gpt",          "synth:tiny",         "synth:tiny-hybrid:",
                                        "synth:tiny-hybrid:x", "synth:tiny-hybrid:-1", "synth:tiny-hybrid:1:2",
                                        "synth:tiny-hybrid:1234567890123456789"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct model_file *m = NULL;
        struct err e = {0};
        assert_int_equal(model_file_open(names[i], &m, &e), RC_BAD_INPUT);
        assert_int_equal(e.exit_status, EXIT_NO_INPUT);
        assert_string_equal(e.code, "unknown_synth");
        assert_non_null(strstr(e.text, "tiny-hybrid"));
        assert_null(m);
    }
}

/* ---- formats and values ---- */

static const struct promise {
    const char *model, *tensor;
    enum quant_format format;
    uint64_t rows, cols;
    double mean, deviation;
} promises[] = {
    {"qwen3.8-27b", "model.layers.0.mlp.down_proj.weight", QUANT_FP4_PAIRS, 5120, 17408, 0, 0.03 / 131.939},
    {"qwen3.8-27b", "model.layers.55.mlp.gate_proj.weight", QUANT_FP4_PAIRS, 17408, 5120, 0, 1 / 71.5542},
    {"qwen3.8-27b", "model.layers.56.mlp.gate_proj.weight", QUANT_FP8, 17408, 5120, 0, 1 / 71.5542},
    {"qwen3.8-27b", "model.layers.3.self_attn.k_proj.weight", QUANT_FP8, 1024, 5120, 0, 1 / 71.5542},
    {"qwen3.8-27b", "model.layers.4.linear_attn.in_proj_b.weight", QUANT_BF16, 48, 5120, 0, 1 / 71.5542},
    {"qwen3.8-27b", "mtp.layers.0.self_attn.v_proj.weight", QUANT_BF16, 1024, 5120, 0, 1 / 71.5542},
    {"qwen2.5-0.5b", "model.layers.7.mlp.up_proj.weight", QUANT_BF16, 4864, 896, 0, 1 / 29.9333},
    {"smollm2-135m", "model.layers.7.mlp.up_proj.weight", QUANT_Q4_1, 1536, 576, 0, 1 / 24.},
    {"smollm2-135m", "model.embed_tokens.weight", QUANT_Q8_0, 49152, 576, 0, 3 / 24.},
    {"tiny-hybrid", "model.embed_tokens.weight", QUANT_F32, 320, 64, 0, 1},
    {"tiny-hybrid", "lm_head.weight", QUANT_F32, 320, 64, 0, 3 / 8.},
    {"qwen3.8-27b", "model.norm.weight", QUANT_BF16, 1, 5120, 0, 0.02},
    {"qwen3.8-27b", "model.layers.9.input_layernorm.weight", QUANT_BF16, 1, 5120, 0, 0.2 / 1.7320508},
    {"smollm2-135m", "model.norm.weight", QUANT_F32, 1, 576, 1, 0.2 / 1.7320508},
};

/* Rows from all over the matrix, 1e5 values or all there are. */
static void measure(const struct quant_matrix *m, double *mean, double *deviation)
{
    float *row = malloc((size_t)m->cols * sizeof *row);
    double sum = 0, squares = 0;
    uint64_t n = 0, rows = 100000 / m->cols + 1;
    if (rows > m->rows) rows = m->rows;
    for (uint64_t r = 0; r < rows; r++) {
        quant_matrix_decode(m, r * m->rows / rows, 0, (size_t)m->cols, row);
        for (uint64_t c = 0; c < m->cols; c++, n++) {
            sum += (double)row[c];
            squares += (double)row[c] * (double)row[c];
        }
    }
    free(row);
    *mean = sum / (double)n;
    *deviation = sqrt(squares / (double)n - *mean * *mean);
}

static void values_are_as_promised(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof promises / sizeof *promises; i++) {
        const struct promise *p = &promises[i];
        char name[64];
        double mean, deviation;
        snprintf(name, sizeof name, "synth:%s", p->model);
        struct model_file *m = open_model(name);
        const struct tensor_view *t = tensor(m, p->tensor);
        assert_int_equal(t->format, p->format);
        assert_int_equal(t->matrix.rows, p->rows);
        assert_int_equal(t->matrix.cols, p->cols);
        measure(&t->matrix, &mean, &deviation);
        const double bound = p->rows == 1 ? 0.15 : 0.05; /* a norm has few values */
        if (fabs(deviation / p->deviation - 1) > bound || fabs(mean - p->mean) > 0.1 * p->deviation)
            fail_msg("%s %s: %g +- %g, expected %g +- %g", p->model, p->tensor, mean, deviation, p->mean, p->deviation);
        model_file_close(m);
    }
}

static size_t resident_bytes(void)
{
    unsigned long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%lu %lu", &size, &resident) != 2) fail_msg("no statm");
    fclose(f);
    return (size_t)resident * (size_t)sysconf(_SC_PAGESIZE);
}

/* The 27B models have tens of GB of weights; opening them reserves addresses and no memory. */
static void opening_fills_nothing(void **state)
{
    (void)state;
    static const char *const names[] = {"synth:qwen3.8-27b", "synth:qwen3.5-27b-bf16"};
    for (size_t i = 0; i < 2; i++) {
        const size_t before = resident_bytes();
        struct model_file *m = open_model(names[i]);
        struct model_config c;
        uint64_t bytes = 0;
        assert_int_equal(model_config_read(m, &c, NULL), RC_OK);
        for (size_t t = 0; t < model_file_tensor_count(m); t++) bytes += model_file_tensor_at(m, t)->n_bytes;
        assert_true(c.n_layers == 64 && c.mtp && bytes > (uint64_t)15 << 30);
        assert_true(resident_bytes() < before + (64 << 20)); /* most of that is tokenizer.json */
        model_file_close(m);
    }
}

/* ---- end to end ---- */

struct texts {
    struct engine_group_result results[N_REQUESTS];
    struct engine_stats stats;
};

static void run(const char *model, enum spec_mode spec, struct texts *out)
{
    static int32_t prompts[N_REQUESTS][PROMPT_TOKENS];
    struct engine_request requests[N_REQUESTS];
    for (int i = 0; i < N_REQUESTS; i++) {
        struct sampling sampling = sampling_default();
        sampling.seed = 5 + (uint64_t)i;
        sampling.temperature = i == 0 ? 0 : (float)i * 0.3f;
        for (int j = 0; j < PROMPT_TOKENS; j++) prompts[i][j] = (i * 101 + j * j * 7 + j * 13) % 297;
        requests[i] = (struct engine_request){.id = 1 + (uint64_t)i, .prompt = prompts[i], .prompt_tokens = PROMPT_TOKENS - (size_t)i,
                                              .max_tokens = ANSWER_TOKENS, .sampling = sampling, .ignore_end = true};
    }
    struct engine_group g = {.options = {.model_path = model, .ranks = 2, .active = 4, .context = 512, .trace = true, .spec = spec},
                             .isa = "auto", .threads = 1, .bounds = lockstep_bounds_default()};
    if (!engine_group_run(&g, requests, N_REQUESTS, out->results)) fail_msg("%s: %s %s", model, g.err[0].text, g.err[1].text);
    out->stats = g.stats;
    for (int i = 0; i < N_REQUESTS; i++) {
        assert_int_equal(out->results[i].kind, ENGINE_EVENT_DONE); /* a row of logits that is not finite fails its request */
        assert_int_equal(out->results[i].n_tokens, ANSWER_TOKENS);
    }
}

static int distinct_tokens(const struct engine_group_result *r)
{
    bool seen[320] = {false};
    int n = 0;
    for (size_t i = 0; i < r->n_tokens; i++) {
        n += !seen[r->tokens[i]];
        seen[r->tokens[i]] = true;
    }
    return n;
}

static void runs_end_to_end(void **state)
{
    (void)state;
    static const char *const names[] = {"synth:tiny-hybrid", "synth:tiny-hybrid-agree", "synth:tiny-hybrid-mixed"};
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        struct texts with, without;
        run(names[n], SPEC_MTP, &with);
        run(names[n], SPEC_OFF, &without);
        for (int i = 0; i < N_REQUESTS; i++) {
            const struct engine_group_result *a = &with.results[i], *b = &without.results[i];
            assert_memory_equal(a->tokens, b->tokens, a->n_tokens * sizeof *a->tokens);
            assert_memory_equal(a->trace, b->trace, a->n_tokens * 2 * sizeof *a->trace);
            assert_string_equal(a->text, b->text);
        }
        assert_true(distinct_tokens(&with.results[0]) > 5 && distinct_tokens(&with.results[2]) > 30); /* not one repeated token */
        int64_t drafted = 0, accepted = 0;
        for (int i = 0; i < N_REQUESTS; i++) {
            drafted += with.results[i].timing.drafted;
            accepted += with.results[i].timing.accepted;
        }
        assert_true(drafted > 0);
        if (!strcmp(names[n], "synth:tiny-hybrid-agree")) assert_true(accepted > drafted * 3 / 10 && accepted < drafted * 9 / 10);
        engine_group_free(with.results, N_REQUESTS);
        engine_group_free(without.results, N_REQUESTS);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bytes_each_time),   cmocka_unit_test(seeds_differ),          cmocka_unit_test(unknown_names_are_refused),
        cmocka_unit_test(values_are_as_promised), cmocka_unit_test(opening_fills_nothing), cmocka_unit_test(runs_end_to_end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
