/* The real model against smollm2_logits.bin (float64 arithmetic, made by make_smollm2_golden.py): logits of 256 positions,
 * as one prompt and as prompt plus decoded rest, on 1, 2 and 3 ranks. argv[1]: the model; without it the test is skipped.
 *
 * Two yardsticks: the pure float reference, and the same with keys and values rounded to half precision where they are
 * stored. Rounding to half turns differences of the last float32 bit into differences of a half's last bit, layer after
 * layer, so even numpy in float32 parts from float64 by 4.5e-4 on the second one. With KV in F32 nothing amplifies, and
 * everything must be close: to float64, and between rank counts. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm_shm.h"
#include "kern_cpu.h"
#include "model_forward.h"

#define GOLDEN TANDEM_SOURCE_DIR "/tests/golden/smollm2_logits.bin"
/* Differences are divided by the row's largest logit. */
#define MAX_RELATIVE 1e-3     /* half-precision KV: the product's promise */
#define MAX_RELATIVE_F32 2e-5 /* F32 KV: sums of a few hundred float32 terms, thirty layers deep */
#define MAX_RANKS_APART 1e-4  /* F32 KV, any logit of one rank count against another's */

struct golden {
    struct buf file;
    uint32_t n_tokens, n_vocab, n_full, n_sample;
    const int32_t *token, *best, *second, *full_position, *sample_id;
    const float *margin, *norm, *max_abs, *full, *sample, *sample_f16;
};

static const char *model_path;

static const void *take(const char **at, size_t n_bytes)
{
    const void *out = *at;
    *at += n_bytes;
    return out;
}

static int setup(void **state)
{
    struct golden *g = calloc(1, sizeof *g);
    struct err e = {0};
    assert_int_equal(file_read(GOLDEN, 64 << 20, &g->file, &e), RC_OK);
    const char *at = g->file.data;
    assert_memory_equal(take(&at, 8), "TDMGOLD2", 8);
    const uint32_t *head = take(&at, 16);
    g->n_tokens = head[0], g->n_vocab = head[1], g->n_full = head[2], g->n_sample = head[3];
    size_t n = g->n_tokens;
    g->token = take(&at, 4 * n), g->best = take(&at, 4 * n), g->second = take(&at, 4 * n);
    g->margin = take(&at, 4 * n), g->norm = take(&at, 4 * n), g->max_abs = take(&at, 4 * n);
    g->full_position = take(&at, 4 * (size_t)g->n_full);
    g->full = take(&at, 4 * (size_t)g->n_full * g->n_vocab);
    g->sample_id = take(&at, 4 * (size_t)g->n_sample);
    g->sample = take(&at, 4 * n * g->n_sample), g->sample_f16 = take(&at, 4 * n * g->n_sample);
    assert_int_equal(at - g->file.data, g->file.len);
    *state = g;
    return 0;
}

static int teardown(void **state)
{
    struct golden *g = *state;
    buf_free(&g->file);
    free(g);
    return 0;
}

/* One rank of a group that computes all rows: a prompt of `prompt` tokens, then one decode step per token. */
struct rank_run {
    const struct golden *g;
    struct segment *segment;
    int rank, ranks, prompt;
    enum kv_format kv;
    float *logits; /* rank 0: [n_tokens][n_vocab] */
    struct err err;
};

static void no_beat(void *ctx) { (void)ctx; }
static void no_layer(void *ctx, int layer, float *x, int rows) { (void)ctx, (void)layer, (void)x, (void)rows; }

static enum rc compute(struct rank_run *r, struct model_forward *f)
{
    int32_t pages[64];
    int picks[1024], n = (int)r->g->n_tokens;
    for (int i = 0; i < 64; i++) pages[i] = (i * 5 + 3) % 16;
    enum rc rc = RC_OK;
    for (int p = 0; p < n && rc == RC_OK;) {
        int rows = p < r->prompt ? r->prompt - p : 1;
        struct kern_segment segment = {0, rows, p, pages, 0};
        for (int i = 0; i < rows; i++) picks[i] = i;
        const bool decode = p >= r->prompt;
        struct forward_batch b = {.batch = {r->g->token + p, {decode ? rows : 0, decode ? 0 : rows}, &segment, 1, decode},
                                  .picks = picks, .n_picks = rows, .logits = true};
        rc = model_forward_step(f, &b, &r->err);
        for (int i = 0; i < rows && r->logits && rc == RC_OK; i++)
            memcpy(r->logits + (size_t)(p + i) * r->g->n_vocab, model_forward_logits(f, i), r->g->n_vocab * sizeof(float));
        p += rows;
    }
    return rc;
}

static void *rank_body(void *argument)
{
    struct rank_run *r = argument;
    struct model_file *file = NULL;
    struct model_config config;
    struct partition partition;
    struct model_weights weights = {0};
    struct kern *kern = NULL;
    struct comm *comm = NULL;
    struct model_forward *forward = NULL;
    enum rc rc = model_file_open(model_path, &file, &r->err);
    if (rc == RC_OK) rc = model_config_read(file, &config, &r->err);
    if (rc == RC_OK) rc = partition_make(&config, r->ranks, PARTITION_FFN_STEP, &partition, &r->err);
    if (rc == RC_OK) rc = kern_cpu_open(NULL, 1, &kern, &r->err);
    if (rc == RC_OK) rc = comm_shm_open(r->segment, r->rank, &comm, &r->err);
    if (rc == RC_OK) {
        const struct model_bind_options bind = {.file = file, .config = &config, .part = &partition.part[r->rank], .kern = kern,
                                                .beat = no_beat};
        rc = model_bind(&bind, &weights, &r->err);
    }
    if (rc == RC_OK) {
        struct model_forward_options o = {.config = &config, .partition = &partition, .weights = &weights, .kern = kern,
                                          .comm = comm, .context = 1024, .max_rows = (int)r->g->n_tokens,
                                          .max_picks = (int)r->g->n_tokens, .kv_pages = 16, .kv = r->kv, .on_layer = no_layer};
        rc = model_forward_open(&o, &forward, &r->err);
    }
    if (rc == RC_OK) rc = compute(r, forward);
    if (rc != RC_OK && comm) comm->abort(comm, r->err.text);
    model_forward_close(forward);
    model_bind_free(&weights);
    if (comm) comm->close(comm);
    if (kern) kern->close(kern);
    model_file_close(file);
    return NULL;
}

static float *logits_of(const struct golden *g, int ranks, int prompt, enum kv_format kv)
{
    size_t comm_bytes = (size_t)g->n_tokens * g->n_vocab * sizeof(float);
    size_t n_bytes = (segment_bytes(ranks, comm_bytes) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, n_bytes);
    memset(memory, 0, n_bytes);
    struct lockstep_bounds bounds = lockstep_bounds_default();
    segment_init(memory, ranks, comm_bytes, &bounds);
    struct rank_run run[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    float *logits = malloc(comm_bytes);
    for (int r = 0; r < ranks; r++) {
        run[r] = (struct rank_run){.g = g, .rank = r, .ranks = ranks, .prompt = prompt, .kv = kv, .logits = r ? NULL : logits};
        run[r].segment = segment_attach(memory, n_bytes, ranks, &run[r].err);
        assert_non_null(run[r].segment);
        pthread_create(&threads[r], NULL, rank_body, &run[r]);
    }
    for (int r = 0; r < ranks; r++) pthread_join(threads[r], NULL);
    for (int r = 0; r < ranks; r++)
        if (run[r].err.rc != RC_OK) fail_msg("rank %d: %s: %s", r, run[r].err.code, run[r].err.text);
    free(memory);
    return logits;
}

static int best_of(const float *row, size_t n)
{
    size_t best = 0;
    for (size_t i = 1; i < n; i++)
        if (row[i] > row[best]) best = i;
    return (int)best;
}

/* Largest difference, relative to the largest logit of its row. */
static double apart(const float *a, const float *b, size_t n, double scale)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) worst = fmax(worst, fabs((double)a[i] - (double)b[i]) / scale);
    return worst;
}

static void check_golden(const struct golden *g, const float *logits, enum kv_format kv, const char *what)
{
    double worst = 0, worst_f16 = 0;
    int equal = 0;
    for (size_t p = 0; p < g->n_tokens; p++) {
        const float *row = logits + p * g->n_vocab;
        float picked[4096];
        for (size_t i = 0; i < g->n_sample; i++) picked[i] = row[g->sample_id[i]];
        worst = fmax(worst, apart(picked, g->sample + p * g->n_sample, g->n_sample, g->max_abs[p]));
        worst_f16 = fmax(worst_f16, apart(picked, g->sample_f16 + p * g->n_sample, g->n_sample, g->max_abs[p]));
        equal += best_of(row, g->n_vocab) == g->best[p];
    }
    for (size_t i = 0; i < g->n_full; i++) {
        size_t p = (size_t)g->full_position[i];
        worst = fmax(worst, apart(logits + p * g->n_vocab, g->full + i * g->n_vocab, g->n_vocab, g->max_abs[p]));
    }
    print_message("%s: %.2e from pure float64, %.2e from half KV, top-1 equal at %d of %u\n", what, worst, worst_f16, equal,
                  g->n_tokens);
    assert_true(worst <= (kv == KV_F32 ? MAX_RELATIVE_F32 : MAX_RELATIVE));
    assert_true(kv == KV_F32 || worst_f16 <= MAX_RELATIVE);
    assert_true(equal >= 254); /* 99% of 256 */
}

static void check_ranks(const struct golden *g, const float *one, const float *more, int ranks)
{
    double worst = 0;
    for (size_t p = 0; p < g->n_tokens; p++)
        worst = fmax(worst, apart(more + p * g->n_vocab, one + p * g->n_vocab, g->n_vocab, g->max_abs[p]));
    print_message("%d ranks, f32 KV: %.2e from one rank\n", ranks, worst);
    assert_true(worst <= MAX_RANKS_APART);
}

static void test_logits(void **state)
{
    const struct golden *g = *state;
    assert_int_equal(g->n_tokens, 256);
    enum { YARDSTICKS = KV_F32 + 1 }; /* F16 and F32 */
    float *one[YARDSTICKS];
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int kv = 0; kv < YARDSTICKS; kv++) {
            char what[64];
            float *prompt = logits_of(g, ranks, 256, (enum kv_format)kv);
            float *decoded = logits_of(g, ranks, 100, (enum kv_format)kv);
            snprintf(what, sizeof what, "%d ranks, %s KV, prompt", ranks, kv_format_name((enum kv_format)kv));
            check_golden(g, prompt, (enum kv_format)kv, what);
            snprintf(what, sizeof what, "%d ranks, %s KV, 156 decoded", ranks, kv_format_name((enum kv_format)kv));
            check_golden(g, decoded, (enum kv_format)kv, what);
            free(decoded);
            if (ranks == 1) one[kv] = prompt;
            if (ranks > 1 && kv == KV_F32) check_ranks(g, one[kv], prompt, ranks);
            if (ranks > 1) free(prompt);
        }
    for (int kv = 0; kv < YARDSTICKS; kv++) free(one[kv]);
}

int main(int argc, char **argv)
{
    if (argc < 2 || !argv[1][0]) {
        puts("SKIPPED: no model was given; jobs/get-model.sh fetches it");
        return 77;
    }
    model_path = argv[1];
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_logits)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
