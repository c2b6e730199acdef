/* The trained hybrid model jobs/models/hybrid-small (argv[1]) against hybrid_small.bin, which transformers made: logits and MTP
 * logits at the ends of six prompts, and 48 greedy tokens after each, on 1 and 2 ranks.
 *
 * MAX_APART: the golden logits are float32 themselves, 2e-5 from float64 of logits of deviation 3.4. Keys and values are F32
 * here, so nothing is rounded to less; ten times that distance is room for other orders of summation. */
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

#include "forward_group.h"

#define GOLDEN TANDEM_SOURCE_DIR "/tests/golden/hybrid_small.bin"
#define MAX_APART 2e-4

enum { PROMPTS = 6, ROWS = 4, MAX_PROMPT = 512, CONTINUATION = 48, MAX_VOCAB = 8192 };

static const char *model_path;

struct prompt {
    int n;
    const int32_t *tokens, *continuation;
    const float *margins, *logits, *mtp; /* [ROWS][vocab / stride] */
};

struct golden {
    struct buf file;
    int vocab, stride;
    struct prompt prompt[PROMPTS];
    /* largest differences, by rank 0 */
    double logits, mtp;
    int different; /* greedy tokens */
};

static const void *take(const char **at, size_t n_bytes)
{
    const void *out = *at;
    *at += n_bytes;
    return out;
}

static void golden_open(struct golden *g)
{
    struct err e = {0};
    uint32_t head[5], n;
    *g = (struct golden){0};
    if (file_read(GOLDEN, 1 << 20, &g->file, &e) != RC_OK) fail_msg("%s", e.text);
    const char *at = g->file.data;
    assert_memory_equal(take(&at, 8), "TDMSMALL", 8);
    memcpy(head, take(&at, sizeof head), sizeof head);
    assert_int_equal(head[0], PROMPTS);
    assert_int_equal(head[2], ROWS);
    assert_int_equal(head[4], CONTINUATION);
    assert_true(head[1] <= MAX_VOCAB);
    g->vocab = (int)head[1], g->stride = (int)head[3];
    for (int i = 0; i < PROMPTS; i++) {
        struct prompt *p = &g->prompt[i];
        size_t sampled = (size_t)(g->vocab / g->stride) * ROWS;
        memcpy(&n, take(&at, 4), 4);
        assert_in_range(n, ROWS, MAX_PROMPT);
        p->n = (int)n;
        p->tokens = take(&at, 4 * (size_t)n);
        p->continuation = take(&at, 4 * CONTINUATION);
        p->margins = take(&at, 4 * CONTINUATION);
        p->logits = take(&at, 4 * sampled);
        p->mtp = take(&at, 4 * sampled);
    }
    assert_int_equal(at - g->file.data, g->file.len);
}

static double apart(const struct golden *g, int prompt, int row, const float *want, const float *logits)
{
    double worst = 0;
    size_t n = (size_t)(g->vocab / g->stride);
    for (size_t i = 0; i < n; i++) {
        double have = (double)logits[(size_t)prompt + i * (size_t)g->stride];
        worst = fmax(worst, isfinite(have) ? fabs(have - (double)want[(size_t)row * n + i]) : HUGE_VAL);
    }
    return worst;
}

static int best_of(const float *row, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (row[i] > row[best]) best = i;
    return best;
}

struct place {
    int32_t pages[MAX_PROMPT / KV_PAGE_TOKENS + 1];
    int slot;
    int32_t tokens[MAX_PROMPT];
    int rows[MAX_PROMPT];
};

/* The whole prompt, and the MTP layer over all of it, its last row with the token that comes next. */
static enum rc run_prompt(struct forward_rank *r, struct golden *g, int i, struct place *at, struct err *e)
{
    const struct prompt *p = &g->prompt[i];
    struct kern_segment segment = {0, p->n, 0, at->pages, at->slot};
    struct forward_batch b = {.batch = {p->tokens, {0, p->n}, &segment, 1, 0},
                              .picks = at->rows + p->n - ROWS, .n_picks = ROWS, .logits = true};
    model_forward_clear_slot(r->forward, at->slot);
    enum rc rc = model_forward_step(r->forward, &b, e);
    if (rc != RC_OK) return rc;
    memcpy(at->tokens, p->tokens + 1, (size_t)(p->n - 1) * sizeof *at->tokens);
    at->tokens[p->n - 1] = p->continuation[0];
    struct mtp_batch m = {.rows = b, .hidden = MTP_HIDDEN_STEP, .source = at->rows};
    m.rows.batch.tokens = at->tokens;
    rc = model_forward_mtp(r->forward, &m, e);
    for (int row = 0; row < ROWS && rc == RC_OK && !r->rank; row++) {
        g->logits = fmax(g->logits, apart(g, i, row, p->logits, model_forward_logits(r->forward, row)));
        g->mtp = fmax(g->mtp, apart(g, i, row, p->mtp, model_forward_mtp_logits(r->forward, row)));
    }
    return rc;
}

/* Goes on with its own tokens. A margin smaller than two logits may err is no promise. */
static enum rc run_greedy(struct forward_rank *r, struct golden *g, int i, struct place *at, struct err *e)
{
    const struct prompt *p = &g->prompt[i];
    enum rc rc = RC_OK;
    int32_t token = best_of(model_forward_logits(r->forward, ROWS - 1), g->vocab);
    for (int k = 0; k < CONTINUATION && rc == RC_OK; k++) {
        if (p->margins[k] > 2 * MAX_APART && token != p->continuation[k] && !r->rank) g->different++;
        struct kern_segment segment = {0, 1, p->n + k, at->pages, at->slot};
        struct forward_batch b = {.batch = {&token, {1, 0}, &segment, 1, 1}, .picks = at->rows, .n_picks = 1, .logits = true};
        rc = model_forward_step(r->forward, &b, e);
        if (rc == RC_OK) token = best_of(model_forward_logits(r->forward, 0), g->vocab);
    }
    return rc;
}

static enum rc body(struct forward_rank *r, struct err *e)
{
    struct place at = {.slot = 0};
    for (int i = 0; i < MAX_PROMPT; i++) at.rows[i] = i;
    for (int i = 0; i < MAX_PROMPT / KV_PAGE_TOKENS + 1; i++) at.pages[i] = i;
    enum rc rc = RC_OK;
    for (int i = 0; i < PROMPTS && rc == RC_OK; i++) {
        rc = run_prompt(r, r->ctx, i, &at, e);
        if (rc == RC_OK) rc = run_greedy(r, r->ctx, i, &at, e);
    }
    return rc;
}

static void agrees_with_transformers(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 2; ranks++) {
        struct golden g;
        golden_open(&g);
        struct forward_group group = {.model_path = model_path, .ranks = ranks, .kv = KV_F32, .context = 1024,
                                      .max_rows = MAX_PROMPT, .kv_pages = 16, .slots = 1, .mtp = true, .body = body, .ctx = &g};
        if (!forward_group_run(&group))
            for (int r = 0; r < ranks; r++)
                if (group.err[r].rc != RC_OK) fail_msg("rank %d: %s: %s", r, group.err[r].code, group.err[r].text);
        print_message("%d ranks: logits %.1e, MTP %.1e, %d of %d greedy tokens differ\n", ranks, g.logits, g.mtp, g.different,
                      PROMPTS * CONTINUATION);
        assert_true(g.logits > 0 && g.logits <= MAX_APART);
        assert_true(g.mtp > 0 && g.mtp <= MAX_APART);
        assert_int_equal(g.different, 0);
        buf_free(&g.file);
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fputs("usage: test_hybrid_small FOLDER of the model\n", stderr);
        return 64;
    }
    model_path = argv[1];
    const struct CMUnitTest tests[] = {cmocka_unit_test(agrees_with_transformers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
