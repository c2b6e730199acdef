/* The forward pass on a GPU against the CPU's: logits of a prompt of 300 tokens and of 40 decoded rows, of the MTP layer too.
 * The CPU decodes greedily; the GPU is given its tokens, so that every row is compared on the same past.
 *
 * How far apart they may be: the GPU rounds what goes into a matrix, and a rank's share of a sum, to bfloat16 (2^-9), the CPU
 * neither. A CPU whose activations and partials are rounded like that is apart from a plain one by the same figures as the
 * GPU: the mean over a model's rows within a tenth, the worst row within a third. Bounds are twice the worst row and one and
 * a half times the mean that were measured on an H200. Sixteen values of one head's output left out, or of an MLP's, are a
 * mean of 1.7% to 50%.
 *
 * And the GPU's own bits: however the prompt was cut, replayed or launched kernel by kernel, decoded one by one or as drafts,
 * whether logits are brought to the host or only the best of them. */
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

#include "forward_group.h"
#include "tokenizer.h"

enum {
    PROMPT = 300,
    DECODED = 40,
    ROWS = PROMPT + DECODED,
    PAGES = 8, /* twice what the sequence takes, so that NaN lies between */
    EVERY = 12 /* every so many rows of the prompt are compared, the last among them */
};
#define TEXT "jobs/examples/documents/protocol.txt"

static const char *real_model;

/* One way through the tokens. */
struct way {
    const char *name;
    enum group_backend backend;
    int chunk;  /* prompt rows at once */
    int drafts; /* right ones in every round */
    bool best;  /* only the best token of each row is asked for */
};
static const struct way cpu = {"CPU", GROUP_CPU, 256, 0, false};
static const struct way cuda_ways[] = {
    {"rounds recorded, prompt cut at 64", GROUP_CUDA, 64, 0, false},
    {"launched one by one, prompt cut at 256", GROUP_CUDA_PLAIN, 256, 0, false},
    {"rounds of 5 rows, prompt in one piece", GROUP_CUDA, 320, 4, false},
    {"without logits, rounds of 2 rows", GROUP_CUDA, 320, 1, true},
};
enum { WAYS = sizeof cuda_ways / sizeof *cuda_ways };

struct run {
    struct way way;
    int vocab;
    bool mtp, greedy;          /* greedy: tokens after the prompt are decided here */
    int32_t tokens[ROWS + 1];
    float *logits, *mtp_logits; /* [ROWS][vocab]; of the prompt only the rows that are compared */
    int32_t best[ROWS], mtp_best[ROWS];
};

static bool compared(int position) { return position >= PROMPT || position % EVERY == EVERY - 1; }

static int best_of(const float *logits, int vocab)
{
    int best = 0;
    for (int i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* ---- the rank ---- */

struct place {
    int32_t pages[PAGES];
    int picks[PROMPT], source[PROMPT];
    int n_picks;
};

static void pick(struct place *at, int position, int rows)
{
    at->n_picks = 0;
    for (int i = 0; i < rows; i++) {
        at->source[i] = i;
        if (compared(position + i)) at->picks[at->n_picks++] = i;
    }
}

static struct forward_batch batch_of(const struct place *at, const struct kern_segment *s, const int32_t *tokens, bool decode,
                                     bool logits)
{
    const struct kern_split rows = decode ? (struct kern_split){s->rows, 0} : (struct kern_split){0, s->rows};
    return (struct forward_batch){.batch = {tokens, rows, s, 1, decode}, .picks = at->picks, .n_picks = at->n_picks,
                                  .logits = logits};
}

/* What the last step, or pass of the MTP layer, says of the picked rows from `position` on. */
static void keep(struct forward_rank *r, struct run *run, const struct place *at, int position, bool mtp)
{
    for (int i = 0; i < at->n_picks; i++) {
        const int p = position + at->picks[i];
        float *logits = (mtp ? run->mtp_logits : run->logits) + (size_t)p * (size_t)run->vocab;
        const int32_t best = mtp ? model_forward_draft(r->forward, i) : model_forward_best(r->forward, i);
        (mtp ? run->mtp_best : run->best)[p] = best;
        if (run->greedy && !mtp && p >= PROMPT - 1) run->tokens[p + 1] = best;
        if (run->way.best) continue;
        memcpy(logits, mtp ? model_forward_mtp_logits(r->forward, i) : model_forward_logits(r->forward, i),
               (size_t)run->vocab * sizeof(float));
    }
}

/* The rows from `position` on, then the same rows of the MTP layer. */
static enum rc feed(struct forward_rank *r, struct run *run, struct place *at, int position, int rows, bool decode,
                    struct err *e)
{
    const struct kern_segment segment = {0, rows, position, at->pages, 0};
    pick(at, position, rows);
    const struct forward_batch b = batch_of(at, &segment, run->tokens + position, decode, !run->way.best);
    enum rc rc = model_forward_step(r->forward, &b, e);
    if (rc != RC_OK) return rc;
    keep(r, run, at, position, false);
    if (decode) model_forward_accept(r->forward, 0, rows - 1);
    if (!run->mtp) return RC_OK;
    if (decode) model_forward_keep_hidden(r->forward, 0, 0, rows);
    struct mtp_batch m = {.hidden = decode ? MTP_HIDDEN_KEPT : MTP_HIDDEN_STEP, .source = decode ? NULL : at->source};
    m.rows = batch_of(at, &segment, run->tokens + position + 1, decode, !run->way.best);
    rc = model_forward_mtp(r->forward, &m, e);
    if (rc == RC_OK) rc = r->kern->finish(r->kern, e);
    if (rc == RC_OK) keep(r, run, at, position, true);
    return rc;
}

/* NaN in every page and in the slot. */
static enum rc spoil(struct forward_rank *r, struct err *e)
{
    const size_t page_bytes = model_forward_page_bytes(r->forward), slot_bytes = model_forward_slot_bytes(r->forward);
    const size_t n_bytes = page_bytes > slot_bytes ? page_bytes : slot_bytes;
    char *noise = malloc(n_bytes + 1);
    if (!noise) return err_no_memory(e);
    memset(noise, 0xff, n_bytes);
    for (int i = 0; i < 2 * PAGES; i++) model_forward_load_page(r->forward, i, noise);
    model_forward_load_slot(r->forward, 0, noise);
    free(noise);
    return RC_OK;
}

static enum rc run_body(struct forward_rank *r, struct err *e)
{
    struct run *run = r->ctx;
    struct place at;
    for (int i = 0; i < PAGES; i++) at.pages[i] = 2 * PAGES - 1 - 2 * i;
    enum rc rc = spoil(r, e);
    model_forward_clear_slot(r->forward, 0);
    for (int p = 0, rows; p < PROMPT && rc == RC_OK; p += rows) {
        rows = PROMPT - p < run->way.chunk ? PROMPT - p : run->way.chunk;
        rc = feed(r, run, &at, p, rows, false, e);
    }
    const int rows = 1 + run->way.drafts;
    for (int p = PROMPT; p < ROWS && rc == RC_OK; p += rows) rc = feed(r, run, &at, p, rows, true, e);
    return rc;
}

/* ---- what is compared ---- */

struct model {
    const char *path;
    enum kv_format kv;
    bool mtp;
    int vocab;
    int32_t prompt[PROMPT];
};

static void run_free(struct run *run)
{
    free(run->logits);
    free(run->mtp_logits);
}

static struct run computed(const struct model *m, struct way way, const int32_t *tokens)
{
    struct run run = {.way = way, .vocab = m->vocab, .mtp = m->mtp, .greedy = !tokens};
    const size_t floats = (size_t)ROWS * (size_t)m->vocab;
    run.logits = calloc(floats, sizeof *run.logits);
    run.mtp_logits = calloc(floats, sizeof *run.mtp_logits);
    memcpy(run.tokens, tokens ? tokens : m->prompt, (tokens ? ROWS + 1 : PROMPT) * sizeof *run.tokens);
    struct forward_group g = {.model_path = m->path, .ranks = 1, .backend = way.backend, .threads = 4, .kv = m->kv,
                              .context = 512, .max_rows = 320, .kv_pages = 2 * PAGES, .slots = 1, .mtp = m->mtp,
                              .max_drafts = KERN_MAX_DRAFTS, .body = run_body, .ctx = &run};
    if (!forward_group_run(&g)) fail_msg("%s, %s: %s: %s", m->path, way.name, g.err[0].code, g.err[0].text);
    assert_int_equal(g.replays > 0, way.backend == GROUP_CUDA);
    return run;
}

struct apart {
    double worst;      /* largest difference of a row over the row's largest magnitude */
    double mean;       /* the same, its mean over rows */
    int rows, same_best;
};

static struct apart apart_of(const float *got, const float *want, int vocab, int first, int end)
{
    struct apart a = {0};
    for (int p = first; p < end; p++) {
        const float *g = got + (size_t)p * (size_t)vocab, *w = want + (size_t)p * (size_t)vocab;
        double worst = 0, largest = 0;
        if (!compared(p)) continue;
        for (int i = 0; i < vocab; i++) {
            worst = fmax(worst, isfinite(g[i]) ? fabs((double)g[i] - (double)w[i]) : HUGE_VAL);
            largest = fmax(largest, fabs((double)w[i]));
        }
        a.worst = fmax(a.worst, worst / largest);
        a.mean += worst / largest;
        a.rows++;
        a.same_best += best_of(g, vocab) == best_of(w, vocab);
    }
    a.mean /= a.rows;
    return a;
}

/* What a model's logits may be apart. */
struct bound {
    double worst, mean;
};
enum { SAME_BEST = 85 }; /* rows of 100 that must have the same best token; what was measured: 92 to 100 */

static int check_apart(const struct model *m, const char *what, const float *got, const float *want, struct bound b)
{
    static const char *const names[] = {"prompt", "decode"};
    int failures = 0;
    for (int i = 0; i < 2; i++) {
        const struct apart a = apart_of(got, want, m->vocab, i ? PROMPT : 0, i ? ROWS : PROMPT);
        const bool good = a.worst <= b.worst && a.mean <= b.mean && 100 * a.same_best >= SAME_BEST * a.rows;
        print_message("%s%s, KV %s, %s, %s: worst %.2f%%, mean %.2f%%, same best token in %d of %d rows\n",
                      good ? "" : "FAILED ", m->path, kv_format_name(m->kv), what, names[i], 100 * a.worst, 100 * a.mean,
                      a.same_best, a.rows);
        failures += !good;
    }
    return failures;
}

/* The best tokens of a run's rows against its own logits. */
static int check_best(const struct model *m, const struct run *a)
{
    int failures = 0;
    for (int p = 0; p < ROWS; p++) {
        const size_t at = (size_t)p * (size_t)m->vocab;
        if (!compared(p)) continue;
        const int want = best_of(a->logits + at, m->vocab), mtp = m->mtp ? best_of(a->mtp_logits + at, m->vocab) : 0;
        if ((a->best[p] == want && a->mtp_best[p] == mtp) || failures++) continue;
        print_message("FAILED %s, KV %s: the best of row %d are %d and %d, MTP %d and %d: %s\n", m->path,
                      kv_format_name(m->kv), p, want, a->best[p], mtp, a->mtp_best[p], a->way.name);
    }
    return failures;
}

static int check_same(const struct model *m, const struct run *a, const struct run *b)
{
    int failures = 0;
    for (int p = 0; p < ROWS; p++) {
        const size_t at = (size_t)p * (size_t)m->vocab, n = b->way.best ? 0 : (size_t)m->vocab * sizeof(float);
        const bool logits = a->best[p] == b->best[p] && !memcmp(a->logits + at, b->logits + at, n);
        const bool mtp = a->mtp_best[p] == b->mtp_best[p] && !memcmp(a->mtp_logits + at, b->mtp_logits + at, n);
        if ((logits && mtp) || failures++) continue;
        print_message("FAILED %s, KV %s: row %d has other %s: %s, against: %s\n", m->path, kv_format_name(m->kv), p,
                      logits ? "MTP logits" : "logits", b->way.name, a->way.name);
    }
    return failures;
}

/* The first tokens of a text, and what else a run has to know of the model. */
static void open_model(struct model *m)
{
    struct model_file *file = NULL;
    struct tokenizer *t = NULL;
    struct model_config config;
    struct token_list ids = {0};
    struct buf text = {0};
    struct err e = {0};
    enum rc rc = model_file_open(m->path, &file, &e);
    if (rc == RC_OK) rc = model_config_read(file, &config, &e);
    if (rc == RC_OK) rc = tokenizer_open(file, &t, &e);
    if (rc == RC_OK) rc = file_read(TEXT, 1 << 20, &text, &e);
    if (rc == RC_OK) rc = tokenizer_encode(t, text.data, text.len, false, &ids, &e);
    if (rc != RC_OK) fail_msg("%s: %s: %s", m->path, e.code, e.text);
    assert_true(ids.len >= PROMPT);
    memcpy(m->prompt, ids.ids, sizeof m->prompt);
    m->mtp = config.mtp;
    m->vocab = config.vocab;
    buf_free(&text);
    token_list_free(&ids);
    tokenizer_close(t);
    model_file_close(file);
}

static void check_model(const char *path, struct bound b)
{
    static const enum kv_format formats[] = {KV_F16, KV_INT8};
    int failures = 0;
    for (int k = 0; k < 2; k++) {
        struct model m = {.path = path, .kv = formats[k]};
        struct run first = {0};
        open_model(&m);
        struct run want = computed(&m, cpu, NULL);
        for (int i = 0; i < WAYS; i++) {
            struct run got = computed(&m, cuda_ways[i], want.tokens);
            if (!got.way.best) failures += check_best(&m, &got);
            if (i) {
                failures += check_same(&m, &first, &got);
                run_free(&got);
                continue;
            }
            first = got;
            failures += check_apart(&m, "logits", got.logits, want.logits, b);
            if (m.mtp) failures += check_apart(&m, "MTP logits", got.mtp_logits, want.mtp_logits, b);
        }
        run_free(&first);
        run_free(&want);
    }
    assert_int_equal(failures, 0);
}

static void hybrid_agrees(void **state)
{
    (void)state;
    check_model("synth:tiny-hybrid", (struct bound){0.026, 0.0085}); /* 1.3%, 0.55% */
}

/* NVFP4, FP8 and BF16 matrices. */
static void mixed_agrees(void **state)
{
    (void)state;
    check_model("synth:tiny-hybrid-mixed", (struct bound){0.07, 0.0135}); /* 3.5%, 0.90% */
}

static void trained_hybrid_agrees(void **state)
{
    (void)state;
    check_model("jobs/models/hybrid-small", (struct bound){0.016, 0.0065}); /* 0.77%, 0.42% */
}

/* Q4_1 blocks. 8-bit keys double what the made-up model is apart, and treble the real one's worst row. */
static void llama_agrees(void **state)
{
    (void)state;
    check_model(real_model, (struct bound){0.06, 0.022}); /* 2.0%, 1.5%; the real one, by such a CPU, 2.9%, 1.1% */
}

int main(int argc, char **argv)
{
    real_model = argc > 1 && argv[1][0] && access(argv[1], R_OK) == 0 ? argv[1] : "synth:smollm2-135m";
    if (!group_backend_there(GROUP_CUDA)) return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hybrid_agrees),
        cmocka_unit_test(mixed_agrees),
        cmocka_unit_test(trained_hybrid_agrees),
        cmocka_unit_test(llama_agrees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
