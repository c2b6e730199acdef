/* The forward pass of every family against float64 (tests/golden/hybrid_models.py wrote models and results to the folder
 * argv[1]): both containers, 1, 2 and 3 ranks (the third has no heads of most models), prompts cut in any way, decoding, MTP.
 *
 * And the exactness contract where a hybrid model can break it: however its prompt was cut at 64, in whatever company, with
 * drafts accepted and rejected, moved through host memory and back, a row has the same bits.
 *
 * MAX_APART: with keys and values in F32 nothing is rounded but float32 sums. Logits have a deviation of 2.5 and reach 11;
 * changing every weight of these models by a float32's last bit moves them by up to 4e-5, and each sum errs as much. */
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
#include "kern_cpu.h"

#define MAX_APART 1e-4

enum { MAX_ROWS = 320, PAGES = 16, PAGES_OF_ONE = 4, SLOTS = 3, GRID = 64 };

static const char *folder;

enum { THEIR_STEP = 10 };

struct golden {
    struct buf file;
    struct buf theirs; /* transformers' logits of every THEIR_STEP-th position and the last; empty: there are none */
    int n, vocab, chain_first, chain_rows;
    const int32_t *tokens; /* [n + 1] */
    const float *logits, *mtp, *chain;
};

static struct golden golden_open(const char *name)
{
    struct golden g = {0};
    struct err e = {0};
    char path[512];
    uint32_t head[4];
    snprintf(path, sizeof path, "%s/%s.bin", folder, name);
    if (file_read(path, 1 << 20, &g.file, &e) != RC_OK) fail_msg("%s", e.text);
    assert_memory_equal(g.file.data, "TDMHYB01", 8);
    memcpy(head, g.file.data + 8, sizeof head);
    g.n = (int)head[0], g.vocab = (int)head[1], g.chain_first = (int)head[2], g.chain_rows = (int)head[3];
    size_t rows = (size_t)g.n * (size_t)g.vocab;
    g.tokens = (const int32_t *)(const void *)(g.file.data + 24);
    g.logits = (const float *)(const void *)(g.tokens + g.n + 1);
    g.mtp = g.logits + rows;
    g.chain = g.mtp + rows;
    size_t floats = g.chain_rows ? 2 * rows + (size_t)(g.chain_rows * g.vocab) : rows;
    assert_int_equal(g.file.len, 24 + 4 * ((size_t)g.n + 1 + floats));
    snprintf(path, sizeof path, "%s/%s.theirs", folder, name);
    if (!strchr(name, '.') && file_read(path, 1 << 20, &g.theirs, &e) != RC_OK) fail_msg("%s", e.text);
    return g;
}

static void golden_close(struct golden *g)
{
    buf_free(&g->file);
    buf_free(&g->theirs);
}

/* ---- one way through the tokens of a golden file ---- */

struct way {
    int prompt;    /* tokens computed as prompt, the others are decoded */
    int chunk;     /* prompt rows at once */
    int drafts;    /* decode: rows verified besides the first; of each round another number is right */
    bool crowded;  /* another sequence has rows in every step */
    bool moved;    /* slot and pages go through host memory to another place, now and then */
    bool chain;    /* MTP: end with chained rows; logits of those go to `mtp` */
};

struct run {
    const struct golden *g;
    struct way way;
    bool mtp;
    float *logits; /* [n][vocab], written by rank 0 */
    float *mtp_logits;
};

/* Where the sequence is, and its batch. */
struct place {
    int slot;
    int32_t pages[PAGES_OF_ONE];
    int32_t other_pages[PAGES_OF_ONE];
    int32_t tokens[MAX_ROWS];
    struct kern_segment segments[2];
    int picks[MAX_ROWS];
    int mtp_rows; /* of the last MTP batch, all picked */
};

/* A companion starts anew in every step, with other tokens: decoding beside a prompt, a prompt beside decoding. */
static void add_companion(struct place *at, struct forward_batch *b, struct model_forward *f, int vocab)
{
    enum { COMPANION_SLOT = 2 };
    struct kern_batch *k = &b->batch;
    bool decodes = k->n_decode_segments == 0;
    int rows = decodes ? 1 : GRID, before = decodes ? 0 : k->rows.decode;
    model_forward_clear_slot(f, COMPANION_SLOT);
    if (decodes) memmove(at->tokens + 1, at->tokens, (size_t)k->rows.prefill * sizeof *at->tokens);
    for (int i = 0; i < rows; i++) at->tokens[before + i] = (5 * i + 2) % vocab;
    if (decodes) {
        at->segments[1] = at->segments[0];
        at->segments[1].row_first = 1;
        for (int i = 0; i < b->n_picks; i++) at->picks[i]++;
        k->rows.decode = k->n_decode_segments = 1;
    } else {
        k->rows.prefill = rows;
    }
    at->segments[!decodes] = (struct kern_segment){before, rows, 0, at->other_pages, COMPANION_SLOT};
    k->n_segments = 2;
}

static struct kern_split split_of(bool decode, int rows)
{
    return decode ? (struct kern_split){rows, 0} : (struct kern_split){0, rows};
}

/* One segment of the sequence, all rows picked. Returns the row of the batch where it starts. */
static enum rc feed(struct forward_rank *r, struct place *at, const int32_t *tokens, int position, int rows, bool decode,
                    bool crowded, int *row_first, struct err *e)
{
    memcpy(at->tokens, tokens, (size_t)rows * sizeof *tokens);
    at->segments[0] = (struct kern_segment){0, rows, position, at->pages, at->slot};
    for (int i = 0; i < rows; i++) at->picks[i] = i;
    struct forward_batch b = {.batch = {at->tokens, split_of(decode, rows), at->segments, 1, decode}, .picks = at->picks,
                              .n_picks = rows, .logits = true};
    if (crowded) add_companion(at, &b, r->forward, r->config->vocab);
    *row_first = at->picks[0];
    return model_forward_step(r->forward, &b, e);
}

/* MTP rows of positions [position, position + rows), in one segment, all picked. */
static enum rc feed_mtp(struct forward_rank *r, struct place *at, const struct golden *g, int position, int rows, bool decode,
                        enum mtp_hidden hidden, int row_first, float *out, struct err *e)
{
    int source[MAX_ROWS];
    struct kern_segment segment = {0, rows, position, at->pages, at->slot};
    for (int i = 0; i < rows; i++) at->picks[i] = i, source[i] = row_first + i;
    if (hidden == MTP_HIDDEN_CHAINED) source[0] = at->mtp_rows - 1;
    at->mtp_rows = rows;
    struct mtp_batch b = {.hidden = hidden, .source = hidden == MTP_HIDDEN_KEPT ? NULL : source};
    b.rows = (struct forward_batch){.batch = {g->tokens + position + 1, split_of(decode, rows), &segment, 1, decode},
                                    .picks = at->picks, .n_picks = rows, .logits = true};
    enum rc rc = model_forward_mtp(r->forward, &b, e);
    for (int i = 0; i < rows && out && rc == RC_OK; i++)
        memcpy(out + (size_t)(position + i) * (size_t)g->vocab, model_forward_mtp_logits(r->forward, i),
               (size_t)g->vocab * sizeof(float));
    return rc;
}

/* Saves everything, spoils where it was, and loads it elsewhere. */
static enum rc move(struct forward_rank *r, struct place *at, struct err *e)
{
    size_t page_bytes = model_forward_page_bytes(r->forward), slot_bytes = model_forward_slot_bytes(r->forward);
    size_t n_bytes = PAGES_OF_ONE * page_bytes + slot_bytes;
    char *saved = malloc(2 * n_bytes + 1), *noise = saved + n_bytes;
    if (!saved) return err_no_memory(e);
    memset(noise, 0xff, n_bytes); /* NaN where floats are */
    for (int i = 0; i < PAGES_OF_ONE; i++) {
        model_forward_save_page(r->forward, at->pages[i], saved + (size_t)i * page_bytes);
        model_forward_load_page(r->forward, at->pages[i], noise);
        at->pages[i] = (at->pages[i] + PAGES_OF_ONE) % (2 * PAGES_OF_ONE);
        model_forward_load_page(r->forward, at->pages[i], saved + (size_t)i * page_bytes);
    }
    model_forward_save_slot(r->forward, at->slot, saved + PAGES_OF_ONE * page_bytes);
    model_forward_load_slot(r->forward, at->slot, noise);
    at->slot = !at->slot;
    model_forward_load_slot(r->forward, at->slot, saved + PAGES_OF_ONE * page_bytes);
    free(saved);
    return RC_OK;
}

/* NaN in every page and slot: what is not written before it is read, or not cleared, shows. */
static enum rc spoil(struct forward_rank *r, struct err *e)
{
    size_t page_bytes = model_forward_page_bytes(r->forward), slot_bytes = model_forward_slot_bytes(r->forward);
    size_t n_bytes = page_bytes > slot_bytes ? page_bytes : slot_bytes;
    char *noise = malloc(n_bytes + 1);
    if (!noise) return err_no_memory(e);
    memset(noise, 0xff, n_bytes);
    for (int i = 0; i < PAGES; i++) model_forward_load_page(r->forward, i, noise);
    for (int i = 0; i < SLOTS; i++) model_forward_load_slot(r->forward, i, noise);
    free(noise);
    return RC_OK;
}

static void keep_logits(const struct forward_rank *r, const struct run *run, int position, int rows)
{
    size_t row = (size_t)run->g->vocab;
    for (int i = 0; i < rows && !r->rank; i++)
        memcpy(run->logits + (size_t)(position + i) * row, model_forward_logits(r->forward, i), row * sizeof(float));
}

static enum rc run_prompt(struct forward_rank *r, struct run *run, struct place *at, struct err *e)
{
    const struct way *w = &run->way;
    enum rc rc = RC_OK;
    int first;
    for (int p = 0, rows; p < w->prompt && rc == RC_OK; p += rows) {
        rows = w->prompt - p < w->chunk ? w->prompt - p : w->chunk;
        rc = feed(r, at, run->g->tokens + p, p, rows, false, w->crowded, &first, e);
        if (rc == RC_OK) keep_logits(r, run, p, rows);
        if (rc == RC_OK && run->mtp)
            rc = feed_mtp(r, at, run->g, p, rows, false, MTP_HIDDEN_STEP, first, r->rank ? NULL : run->mtp_logits, e);
        if (rc == RC_OK && w->moved) rc = move(r, at, e);
    }
    return rc;
}

/* Rounds of 1 + drafts rows, of which the first `right` drafts are what comes next. */
static enum rc run_decode(struct forward_rank *r, struct run *run, struct place *at, int end, struct err *e)
{
    const struct way *w = &run->way;
    enum rc rc = RC_OK;
    int first, round = 0;
    for (int p = w->prompt, right; p < end && rc == RC_OK; p += 1 + right, round++) {
        int32_t tokens[1 + KERN_MAX_DRAFTS];
        int drafts = end - p - 1 < w->drafts ? end - p - 1 : w->drafts;
        right = round % (w->drafts + 1) < drafts ? round % (w->drafts + 1) : drafts;
        for (int i = 0; i <= drafts; i++)
            tokens[i] = i <= right ? run->g->tokens[p + i] : (run->g->tokens[p + i] + 1 + i) % run->g->vocab;
        rc = feed(r, at, tokens, p, 1 + drafts, true, w->crowded, &first, e);
        if (rc != RC_OK) return rc;
        keep_logits(r, run, p, 1 + right);
        model_forward_accept(r->forward, at->slot, right);
        if (run->mtp) model_forward_keep_hidden(r->forward, at->slot, first, 1 + right);
        if (w->moved && round % 3 == 1) rc = move(r, at, e);
        if (rc == RC_OK && run->mtp)
            rc = feed_mtp(r, at, run->g, p, 1 + right, true, MTP_HIDDEN_KEPT, 0, r->rank ? NULL : run->mtp_logits, e);
        if (rc == RC_OK && run->mtp && model_forward_kept_hidden(r->forward, at->slot))
            rc = err_set(e, RC_FATAL, EXIT_INTERNAL, "kept", "used hidden rows were not dropped");
    }
    return rc;
}

static enum rc run_body(struct forward_rank *r, struct err *e)
{
    struct run *run = r->ctx;
    const struct golden *g = run->g;
    struct place at = {.pages = {3, 1, 0, 2}, .other_pages = {9, 8, 11, 10}};
    int end = run->way.chain ? g->chain_first : g->n;
    enum rc rc = spoil(r, e);
    model_forward_clear_slot(r->forward, at.slot);
    if (rc == RC_OK) rc = run_prompt(r, run, &at, e);
    if (rc == RC_OK) rc = run_decode(r, run, &at, end, e);
    for (int i = 0; i < g->chain_rows && run->way.chain && rc == RC_OK; i++)
        rc = feed_mtp(r, &at, g, end + i, 1, true, MTP_HIDDEN_CHAINED, 0, r->rank ? NULL : run->mtp_logits, e);
    return rc;
}

/* ---- what is compared ---- */

struct model {
    struct golden g;
    char path[512];
    int ranks;
    bool mtp;
    enum kv_format kv;
    enum kern_weights weights;
    const char *isa;
};

static size_t row_floats(const struct golden *g) { return (size_t)g->n * (size_t)g->vocab; }

/* Logits in run->logits and run->mtp_logits, both from malloc. */
static struct run computed(const struct model *m, struct way way)
{
    struct run run = {&m->g, way, m->mtp, NULL, NULL};
    run.logits = calloc(row_floats(&m->g), sizeof *run.logits);
    run.mtp_logits = calloc(row_floats(&m->g), sizeof *run.mtp_logits);
    struct forward_group group = {.model_path = m->path, .ranks = m->ranks, .isa = m->isa, .weights = m->weights, .kv = m->kv,
                                  .context = 512, .max_rows = MAX_ROWS, .kv_pages = PAGES, .slots = SLOTS, .mtp = m->mtp,
                                  .max_drafts = KERN_MAX_DRAFTS, .body = run_body, .ctx = &run};
    if (!forward_group_run(&group))
        for (int r = 0; r < m->ranks; r++)
            if (group.err[r].rc != RC_OK) fail_msg("%s, rank %d: %s: %s", m->path, r, group.err[r].code, group.err[r].text);
    return run;
}

static void run_free(struct run *run)
{
    free(run->logits);
    free(run->mtp_logits);
}

static double apart(const float *a, const float *b, size_t n)
{
    double worst = 0;
    for (size_t i = 0; i < n; i++) worst = fmax(worst, isfinite(a[i]) ? fabs((double)a[i] - (double)b[i]) : HUGE_VAL);
    return worst;
}

static void check_oracle(const struct model *m, const struct run *run, const char *what)
{
    size_t n = row_floats(&m->g);
    double logits = apart(run->logits, m->g.logits, n), mtp = m->mtp ? apart(run->mtp_logits, m->g.mtp, n) : 0;
    print_message("%s, %d ranks, %s: %.1e, MTP %.1e\n", m->path + strlen(folder) + 1, m->ranks, what, logits, mtp);
    assert_true(logits <= MAX_APART);
    assert_true(mtp <= MAX_APART);
    const size_t vocab = (size_t)m->g.vocab, their_rows = m->g.theirs.len / sizeof(float) / vocab;
    double theirs = 0;
    for (size_t i = 0; i < their_rows; i++) {
        const size_t position = i * THEIR_STEP < (size_t)m->g.n ? i * THEIR_STEP : (size_t)m->g.n - 1;
        const float *row = (const float *)(const void *)m->g.theirs.data + i * vocab;
        theirs = fmax(theirs, apart(run->logits + position * vocab, row, vocab));
    }
    if (their_rows) print_message("%s: transformers %.1e\n", m->path + strlen(folder) + 1, theirs);
    assert_true(theirs <= MAX_APART);
}

static void check_same_bits(const struct model *m, const struct run *want, struct way way, const char *what)
{
    struct run run = computed(m, way);
    size_t n = row_floats(&m->g) * sizeof(float);
    if (memcmp(run.logits, want->logits, n)) fail_msg("%s, %d ranks: logits of \"%s\" differ", m->path, m->ranks, what);
    if (m->mtp && memcmp(run.mtp_logits, want->mtp_logits, n)) fail_msg("%s: MTP logits of \"%s\" differ", m->path, what);
    run_free(&run);
}

static void check_chain(const struct model *m)
{
    const struct golden *g = &m->g;
    struct run run = computed(m, (struct way){.prompt = GRID, .chunk = GRID, .drafts = 2, .chain = true});
    double worst = apart(run.mtp_logits + g->chain_first * g->vocab, g->chain, (size_t)(g->chain_rows * g->vocab));
    print_message("%s, %d ranks, chained MTP: %.1e\n", m->path + strlen(folder) + 1, m->ranks, worst);
    assert_true(worst <= MAX_APART);
    run_free(&run);
}

/* with_bits: the contract too; it does not depend on the container. */
static void check_model(struct model *m, bool with_bits)
{
    int n = m->g.n;
    struct run whole = computed(m, (struct way){.prompt = n, .chunk = n});
    check_oracle(m, &whole, "one prompt");
    struct run decoded = computed(m, (struct way){.prompt = 70, .chunk = 64});
    check_oracle(m, &decoded, "70 tokens of prompt, the rest decoded");
    if (with_bits) {
        check_same_bits(m, &whole, (struct way){.prompt = n, .chunk = 64}, "prompt in chunks of 64");
        check_same_bits(m, &whole, (struct way){.prompt = n, .chunk = 128, .crowded = true}, "chunks of 128 in company");
        check_same_bits(m, &decoded, (struct way){.prompt = 70, .chunk = 64, .drafts = 3}, "drafts");
        check_same_bits(m, &decoded, (struct way){.prompt = 70, .chunk = 64, .drafts = 5, .crowded = true}, "drafts in company");
        check_same_bits(m, &decoded, (struct way){.prompt = 70, .chunk = 64, .drafts = 2, .moved = true}, "moved");
    }
    run_free(&decoded);
    run_free(&whole);
    struct run single = computed(m, (struct way){.chunk = 64});
    check_oracle(m, &single, "token by token");
    run_free(&single);
    if (m->mtp) check_chain(m);
}

static void check_family(const char *name)
{
    for (int ranks = 1; ranks <= 3; ranks++)
        for (int container = 0; container < 2; container++) {
            struct model m = {.g = golden_open(name), .ranks = ranks, .kv = KV_F32};
            m.mtp = m.g.chain_rows > 0;
            snprintf(m.path, sizeof m.path, container ? "%s/%s.gguf" : "%s/%s", folder, name);
            check_model(&m, container == 0);
            golden_close(&m.g);
        }
}

static void hybrid_agrees(void **state)
{
    (void)state;
    check_family("hybrid");
}

static void wide_agrees(void **state)
{
    (void)state;
    check_family("wide");
}

static void llama_agrees(void **state)
{
    (void)state;
    check_family("llama");
}

static void qwen2_agrees(void **state)
{
    (void)state;
    check_family("qwen2");
}

static void qwen3_agrees(void **state)
{
    (void)state;
    check_family("qwen3");
}

static void oracle_agrees_with(struct model *m, const char *what)
{
    m->mtp = true;
    struct run run = computed(m, (struct way){.prompt = 70, .chunk = 64, .drafts = 2});
    check_oracle(m, &run, what);
    run_free(&run);
    golden_close(&m->g);
}

/* The oracle was given the very integers that 8-bit weights are rounded to. */
static void eight_bit_weights_agree(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 3; ranks++) {
        struct model m = {.g = golden_open("wide.w8"), .ranks = ranks, .kv = KV_F32, .weights = KERN_WEIGHTS_W8};
        snprintf(m.path, sizeof m.path, "%s/wide", folder);
        oracle_agrees_with(&m, "8-bit weights");
    }
}

static void every_instruction_set_agrees(void **state)
{
    (void)state;
    static const char *const isas[] = {"generic", "avx2", "avx512", "vnni", "amx"};
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        struct model m = {.ranks = 2, .kv = KV_F32, .isa = isas[i]};
        if (!kern_cpu_numerics(m.isa)) continue;
        m.g = golden_open("hybrid");
        snprintf(m.path, sizeof m.path, "%s/hybrid", folder);
        oracle_agrees_with(&m, m.isa);
    }
}

/* What the default keys and values, and 8-bit ones, make of a hybrid: no yardstick but itself, the bits must agree. */
static void bits_agree_in_every_kv_format(void **state)
{
    (void)state;
    for (int kv = 0; kv < KV_FORMATS; kv++) {
        struct model m = {.g = golden_open("hybrid"), .ranks = 2, .kv = (enum kv_format)kv, .mtp = true};
        snprintf(m.path, sizeof m.path, "%s/hybrid.gguf", folder);
        struct run decoded = computed(&m, (struct way){.prompt = 70, .chunk = 64});
        check_same_bits(&m, &decoded, (struct way){.prompt = 70, .chunk = 64, .drafts = 4, .crowded = true, .moved = true},
                        kv_format_name(m.kv));
        run_free(&decoded);
        golden_close(&m.g);
    }
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fputs("usage: test_hybrid_forward FOLDER, as tests/golden/hybrid_models.py wrote it\n", stderr);
        return 64;
    }
    folder = argv[1];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hybrid_agrees), cmocka_unit_test(wide_agrees),  cmocka_unit_test(llama_agrees),
        cmocka_unit_test(qwen2_agrees),  cmocka_unit_test(qwen3_agrees), cmocka_unit_test(bits_agree_in_every_kv_format),
        cmocka_unit_test(eight_bit_weights_agree), cmocka_unit_test(every_instruction_set_agrees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
