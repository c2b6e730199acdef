/* bench_kern: times of the CPU kernels at the shapes one rank of a small Llama has.
 *
 *     bench_kern [isa [threads [rank [rows...]]]]      rank 0 or 1 of two, or 2: all of the model
 *
 * The weights are random bytes of SmolLM2-135M's formats and sizes, all 30 layers of them, so that the caches see what
 * they see in a real step. Per op: the best of some repetitions, over the whole model. Run one process per rank at the
 * same time for figures that predict a step of two ranks; the ranks' sums and the sampling come on top. */
#define _GNU_SOURCE
#include "kern_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 30, HIDDEN = 576, HEAD_DIM = 64, VOCAB = 49152, MAX_TOKENS = 512, CONTEXT = 4096, REPEATS = 7 };

struct shape {
    int q_heads, kv_heads, ffn, vocab;
};

static const struct shape shapes[] = {{6, 2, 672, VOCAB / 2}, {3, 1, 864, VOCAB / 2}, {9, 3, 1536, VOCAB}};

enum op { OP_QKV, OP_ATTN_OUT, OP_GATE_UP, OP_DOWN, OP_HEAD, OP_NORM, OP_ROPE, OP_ATTENTION, OPS };
static const char *const op_names[OPS] = {"qkv",      "attn_out",    "gate_up, swiglu",   "down",  "head",
                                          "rms_norm", "rope+append", "attention"};

struct bench {
    struct kern *k;
    struct shape shape;
    struct kern_attn_shape attn;
    struct kern_weight *weights[LAYERS][4], *head;
    struct kern_kv_layer kv[LAYERS];
    float *x, *y, *wide, *norm, *cos_sin;
    int32_t pages[CONTEXT / KV_PAGE_TOKENS];
    double us[OPS]; /* of the last step */
};

static uint64_t random_next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void fail(const char *what, const struct err *e)
{
    char text[1024];
    fprintf(stderr, "bench_kern: %s: %s\n", what, e ? err_format(e, text, sizeof text) : "out of memory");
    exit(1);
}

static void *allocate(struct bench *b, size_t bytes)
{
    void *p;
    struct err e = {0};
    if (b->k->buffer_alloc(b->k, bytes, &p, &e) != RC_OK) fail("buffer", &e);
    return p;
}

/* Random codes; the leading F16 factors are made small and positive. */
static struct kern_weight *random_weight(struct bench *b, enum quant_format f, int rows, int cols, enum kern_use use)
{
    static uint64_t seed = 1;
    size_t row_bytes = 0;
    quant_row_bytes(f, (uint64_t)cols, &row_bytes);
    const size_t bytes = row_bytes * (size_t)rows, block = quant_block_bytes(f);
    uint8_t *stored = malloc(bytes);
    if (!stored) fail("weights", NULL);
    for (size_t i = 0; i < bytes; i++) stored[i] = (uint8_t)random_next(&seed);
    for (size_t i = 0; i < bytes; i += block) {
        stored[i + 1] = 0x20;
        if (f == QUANT_Q4_1) stored[i + 3] = 0x20;
    }
    const struct kern_span all_rows = {0, (uint64_t)rows}, all_cols = {0, (uint64_t)cols};
    const struct kern_weight_part part = {
        .matrix = {.format = f, .rows = (uint64_t)rows, .cols = (uint64_t)cols, .bytes = stored, .global = 1},
        .rows = &all_rows,
        .n_rows = 1,
        .cols = &all_cols,
        .n_cols = 1};
    struct kern_weight *w;
    struct err e = {0};
    if (b->k->weight_load(b->k, &part, 1, KERN_WEIGHTS_NATIVE, use, &w, &e) != RC_OK) fail("weight", &e);
    free(stored);
    return w;
}

static void set_up(struct bench *b)
{
    const struct shape *s = &b->shape;
    const int heads = s->q_heads + 2 * s->kv_heads;
    b->attn = (struct kern_attn_shape){.n_heads = s->q_heads, .n_kv_heads = s->kv_heads, .head_dim = HEAD_DIM, .rope_dim = HEAD_DIM, .rope_adjacent = true, .kv = KV_F16};
    for (int l = 0; l < LAYERS; l++) {
        b->weights[l][0] = random_weight(b, QUANT_Q4_1, heads * HEAD_DIM, HIDDEN, KERN_ROWS);
        b->weights[l][1] = random_weight(b, QUANT_Q4_1, HIDDEN, s->q_heads * HEAD_DIM, KERN_ROWS);
        b->weights[l][2] = random_weight(b, QUANT_Q4_1, 2 * s->ffn, HIDDEN, KERN_SWIGLU);
        b->weights[l][3] = random_weight(b, QUANT_Q4_1, HIDDEN, s->ffn, KERN_ROWS);
        b->kv[l].page_bytes = b->k->kv_page_bytes(&b->attn);
        b->kv[l].base_dev = allocate(b, b->kv[l].page_bytes * (CONTEXT / KV_PAGE_TOKENS));
    }
    b->head = random_weight(b, QUANT_Q8_0, s->vocab, HIDDEN, KERN_ROWS);
    b->x = allocate(b, sizeof(float) * MAX_TOKENS * 4096);
    b->y = allocate(b, sizeof(float) * MAX_TOKENS * 4096);
    b->wide = allocate(b, sizeof(float) * 16 * (size_t)s->vocab);
    b->norm = allocate(b, sizeof(float) * HIDDEN);
    b->cos_sin = allocate(b, sizeof(float) * CONTEXT * HEAD_DIM);
    for (int i = 0; i < HIDDEN; i++) b->norm[i] = 1;
    for (int i = 0; i < CONTEXT * HEAD_DIM / 2; i++) b->cos_sin[2 * i] = 1;
    for (int i = 0; i < CONTEXT / KV_PAGE_TOKENS; i++) b->pages[i] = i;
    uint64_t seed = 7;
    for (int i = 0; i < MAX_TOKENS * 4096; i++) b->x[i] = (float)random_next(&seed) * 0x1p-31f - 0.5f;
}

static void clock_op(struct bench *b, enum op op, double *last)
{
    const double now = (double)clock_now_us();
    b->us[op] += now - *last;
    *last = now;
}

/* One step: rows of one sequence from `position` on (prefill), or one row of each of `rows` sequences (decode). */
static void step(struct bench *b, enum kern_provenance p, int rows, int position)
{
    struct kern *k = b->k;
    struct kern_segment segments[16];
    const int n = p == KERN_PREFILL ? 1 : rows;
    const struct kern_split split = p == KERN_PREFILL ? (struct kern_split){0, rows} : (struct kern_split){rows, 0};
    for (int i = 0; i < n; i++)
        segments[i] = (struct kern_segment){i, p == KERN_PREFILL ? rows : 1, position, b->pages, 0};
    const struct kern_batch batch = {.rows = split, .segments = segments, .n_segments = n, .n_decode_segments = p == KERN_PREFILL ? 0 : n};
    k->begin(k, &batch);
    memset(b->us, 0, sizeof b->us);
    double last = (double)clock_now_us();
    for (int l = 0; l < LAYERS; l++) {
        k->linear(k, b->weights[l][0], split, b->x, b->y);
        clock_op(b, OP_QKV, &last);
        k->rope_kv_append(k, &b->attn, &(struct kern_attn_weights){0}, b->cos_sin, b->y, b->kv[l]);
        clock_op(b, OP_ROPE, &last);
        k->attention(k, &b->attn, b->y, b->kv[l], b->y + MAX_TOKENS * 2048);
        clock_op(b, OP_ATTENTION, &last);
        k->linear(k, b->weights[l][1], split, b->x, b->y);
        clock_op(b, OP_ATTN_OUT, &last);
        k->rms_norm(k, b->x, b->norm, split, HIDDEN, 1e-5f, b->y, NULL);
        k->rms_norm(k, b->x, b->norm, split, HIDDEN, 1e-5f, b->y, NULL);
        clock_op(b, OP_NORM, &last);
        k->linear_swiglu(k, b->weights[l][2], split, b->x, b->y, b->y + MAX_TOKENS * 2048);
        clock_op(b, OP_GATE_UP, &last);
        k->linear(k, b->weights[l][3], split, b->x, b->y);
        clock_op(b, OP_DOWN, &last);
    }
    if (p == KERN_DECODE) k->linear(k, b->head, split, b->x, b->wide);
    clock_op(b, OP_HEAD, &last);
}

static void report(struct bench *b, enum kern_provenance p, int rows, int position)
{
    double best[OPS], total_best = 1e18;
    for (int o = 0; o < OPS; o++) best[o] = 1e18;
    for (int i = 0; i < (p == KERN_DECODE ? 4 * REPEATS : REPEATS); i++) {
        double total = 0;
        step(b, p, rows, position);
        for (int o = 0; o < OPS; o++) {
            if (b->us[o] < best[o]) best[o] = b->us[o];
            total += b->us[o];
        }
        if (total < total_best) total_best = total;
    }
    printf("%s rows %d position %d: %.3f ms, %.0f tok/s\n", p == KERN_DECODE ? "decode" : "prefill", rows, position,
           total_best / 1e3, rows / total_best * 1e6);
    const struct shape *s = &b->shape;
    const double weights[OPS] = {[OP_QKV] = (s->q_heads + 2 * s->kv_heads) * HEAD_DIM * HIDDEN * LAYERS,
                                 [OP_ATTN_OUT] = s->q_heads * HEAD_DIM * HIDDEN * LAYERS,
                                 [OP_GATE_UP] = 2.0 * s->ffn * HIDDEN * LAYERS,
                                 [OP_DOWN] = (double)s->ffn * HIDDEN * LAYERS,
                                 [OP_HEAD] = p == KERN_DECODE ? (double)s->vocab * HIDDEN : 0};
    for (int o = 0; o < OPS; o++) {
        printf("    %-12s %8.3f ms", op_names[o], best[o] / 1e3);
        if (weights[o] > 0)
            printf("  %6.1f GFLOP/s  %5.1f GB/s", 2 * weights[o] * rows / best[o] / 1e3,
                   weights[o] * (o == OP_HEAD ? 34.0 / 32 : 20.0 / 32) / best[o] / 1e3);
        printf("\n");
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static struct bench b;
    struct err e = {0};
    const int rank = argc > 3 ? atoi(argv[3]) : 0;
    if (rank < 0 || rank > 2) return 64;
    if (kern_cpu_open(argc > 1 ? argv[1] : "auto", argc > 2 ? atoi(argv[2]) : 1, &b.k, &e) != RC_OK) fail("open", &e);
    b.shape = shapes[rank];
    set_up(&b);
    printf("%s, rank %d: %d query and %d KV heads, FFN %d, vocabulary %d\n", b.k->numerics, rank, b.shape.q_heads,
           b.shape.kv_heads, b.shape.ffn, b.shape.vocab);
    for (int rows = 1; rows <= 16; rows *= 2) report(&b, KERN_DECODE, rows, rows == 1 ? 8 : 512);
    report(&b, KERN_DECODE, 1, 2048);
    report(&b, KERN_PREFILL, 128, 0);
    report(&b, KERN_PREFILL, 512, 0);
    report(&b, KERN_PREFILL, 512, 2048);
    return 0;
}
