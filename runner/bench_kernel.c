/* bench_kernel: single operations of a model on one rank, and the sums of ranks.
 *
 * Every linear layer is run at several numbers of rows, walking through the same matrix of all layers so that nothing lies in a
 * cache; attention at several contexts, Gated DeltaNet at several numbers of rows. Calls are enqueued one behind the other and waited
 * for once; a figure is the fastest of REPEATS such runs, for one call. Reading and the bf16 matrix rate of the card are measured
 * first, and each figure is given as a share of the one that bounds it. */
#define _GNU_SOURCE
#include "bench_round.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine_private.h"
#include "model_forward_impl.h"
#include "rank_args.h"
#include "rank_backend.h"

enum { REPEATS = 5, MOST_ROWS = 2048, WIDEST_NORM = 16384 };
static const double run_us = 3000; /* of one run, about */

struct kernels {
    struct bench_rank rank;
    struct engine *engine;
    double matrix_flops;        /* a second, bf16 */
    void *act, *out, *scratch;  /* of the largest call */
    bool first;                 /* nothing printed yet */
};

typedef void call_fn(struct kernels *b, const void *what, int i);

/* Microseconds of one call. */
static enum rc time_calls(struct kernels *b, call_fn *call, const void *what, double *us, struct err *e)
{
    struct kern *k = b->rank.kern;
    int n = 1;
    enum rc rc = RC_OK;
    *us = 1e18;
    for (int repeat = -2; repeat < REPEATS && rc == RC_OK; repeat++) { /* the first two find out how many calls fill a run */
        const int64_t start_us = clock_now_us();
        for (int i = 0; i < n; i++) call(b, what, i);
        rc = k->finish(k, e);
        const double one = (double)(clock_now_us() - start_us) / n;
        if (repeat >= 0 && one < *us) *us = one;
        if (repeat < 0) n = one > run_us ? 1 : one < 2 ? 1000 : (int)(run_us / one) + 1;
    }
    return rc;
}

static void print_row(struct kernels *b, const char *name, const char *shape, int rows, double us, double bytes, double flops)
{
    const struct options *o = &b->rank.options;
    const double of_read = b->rank.read_bytes_per_s > 0 ? bytes / us * 1e6 / b->rank.read_bytes_per_s : 0;
    const double of_matrix = b->matrix_flops > 0 ? flops / us * 1e6 / b->matrix_flops : 0;
    if (o->json)
        printf("%s{\"name\":\"%s\",\"shape\":\"%s\",\"rows\":%d,\"us\":%.3f,\"bytes\":%.0f,\"flops\":%.0f,\"of_read\":%.3f,\"of_matrix\":%.3f}",
               b->first ? "" : ",", name, shape, rows, us, bytes, flops, of_read, of_matrix);
    else if (o->csv)
        printf("%s,%s,%d,%.3f,%.0f,%.0f,%.3f,%.3f\n", name, shape, rows, us, bytes, flops, of_read, of_matrix);
    else
        printf("  %-22s %-16s %5d rows %10.2f us %8.0f GB/s %4.0f%% %8.1f TFLOP/s %4.0f%%\n", name, shape, rows, us, bytes / us / 1e3,
               of_read * 100, flops / us / 1e6, of_matrix * 100);
    b->first = false;
}

/* Fills an act with values as they occur: a card that multiplies zeros draws less power, and runs faster. */
static enum rc fill_act(struct kern *k, int rows, int width, void *act, struct err *e)
{
    const size_t n = (size_t)rows * (size_t)width;
    float *host = malloc(n * sizeof *host);
    void *x = NULL;
    enum rc rc = host ? k->buffer_alloc(k, n * sizeof *host, &x, e) : err_no_memory(e);
    if (rc == RC_OK) {
        uint32_t random = 1;
        for (size_t i = 0; i < n; i++) host[i] = (float)((random = random * 1664525u + 1013904223u) >> 8) / (1 << 23) - 1;
        k->to_dev(k, x, host, n * sizeof *host);
        k->rms_norm(k, x, x, (struct kern_split){0, rows}, width, 1e-6f, NULL, act); /* its first row for factors */
        rc = k->finish(k, e);
    }
    k->buffer_free(k, x);
    free(host);
    return rc;
}

/* ---- linear layers ---- */

struct linear_call {
    struct kern_weight *const *weights; /* [n] the same matrix of several layers */
    int n;
    enum kern_use use;
    struct kern_split rows;
};

static void call_linear(struct kernels *b, const void *what, int i)
{
    const struct linear_call *c = what;
    struct kern *k = b->rank.kern;
    const struct kern_weight *w = c->weights[i % c->n];
    if (c->use == KERN_ROWS) k->linear(k, w, c->rows, b->act, b->out);
    else if (c->use == KERN_PARTIAL) k->linear_partial(k, w, c->rows, b->act, b->out);
    else k->linear_swiglu(k, w, c->rows, b->act, b->scratch, b->out);
}

static enum rc bench_linear(struct kernels *b, const char *name, struct kern_weight *const *weights, int n, enum kern_use use,
                            int outputs, int inputs, int most_rows, struct err *e)
{
    static const int rows[] = {1, 4, 8, 32, 64, 512, MOST_ROWS};
    enum { DECODES = 4 }; /* the first are decode rows */
    char shape[32];
    snprintf(shape, sizeof shape, "%dx%d", outputs, inputs);
    enum rc rc = RC_OK;
    for (size_t i = 0; i < sizeof rows / sizeof *rows && rows[i] <= most_rows && rc == RC_OK; i++) {
        const struct linear_call c = {weights, n, use, i < DECODES ? (struct kern_split){rows[i], 0} : (struct kern_split){0, rows[i]}};
        double us;
        rc = time_calls(b, call_linear, &c, &us, e);
        if (rc == RC_OK)
            print_row(b, name, shape, rows[i], us, (double)b->rank.kern->weight_bytes(weights[0]), 2.0 * outputs * inputs * rows[i]);
    }
    return rc;
}

/* The weights of one role over the layers that have it. */
struct role {
    struct kern_weight **weights;
    int n;
};

static enum rc bench_layers(struct kernels *b, struct err *e)
{
    const struct model_weights *w = &b->engine->weights;
    const struct model_config *c = &b->engine->config;
    const struct model_forward *f = b->engine->forward;
    const int hidden = c->hidden, ffn = f->part.ffn.count;
    struct kern_weight **all = calloc((size_t)c->n_layers * 6 + 1, sizeof(struct kern_weight *));
    if (!all) return err_no_memory(e);
    struct role in_attn = {all, 0}, in_gdn = {all + c->n_layers, 0}, out_attn = {all + 2 * c->n_layers, 0};
    struct role out_gdn = {all + 3 * c->n_layers, 0}, gate_up = {all + 4 * c->n_layers, 0}, down = {all + 5 * c->n_layers, 0};
    for (int l = 0; l < c->n_layers; l++) {
        const struct model_layer *m = &w->layers[l];
        struct role *in = m->gdn ? &in_gdn : &in_attn, *out = m->gdn ? &out_gdn : &out_attn;
        if (m->in_proj) in->weights[in->n++] = m->in_proj, out->weights[out->n++] = m->out_proj;
        gate_up.weights[gate_up.n++] = m->gate_up;
        down.weights[down.n++] = m->down;
    }
    const int heads = f->attn.n_heads * f->attn.head_dim, values = f->gdn.v_heads * f->gdn.v_dim;
    enum rc rc = RC_OK;
    if (in_attn.n) rc = bench_linear(b, "attention in", in_attn.weights, in_attn.n, KERN_ROWS, f->qkv_width, hidden, MOST_ROWS, e);
    if (rc == RC_OK && in_attn.n) rc = bench_linear(b, "attention out", out_attn.weights, out_attn.n, KERN_PARTIAL, hidden, heads, MOST_ROWS, e);
    if (rc == RC_OK && in_gdn.n) rc = bench_linear(b, "GDN in", in_gdn.weights, in_gdn.n, KERN_ROWS, f->gdn_width, hidden, MOST_ROWS, e);
    if (rc == RC_OK && in_gdn.n) rc = bench_linear(b, "GDN out", out_gdn.weights, out_gdn.n, KERN_PARTIAL, hidden, values, MOST_ROWS, e);
    if (rc == RC_OK) rc = bench_linear(b, "gate and up, SwiGLU", gate_up.weights, gate_up.n, KERN_SWIGLU, 2 * ffn, hidden, MOST_ROWS, e);
    if (rc == RC_OK) rc = bench_linear(b, "down", down.weights, down.n, KERN_PARTIAL, hidden, ffn, MOST_ROWS, e);
    if (rc == RC_OK) rc = bench_linear(b, "head", &w->head, 1, KERN_ROWS, f->part.vocab.count, hidden, 8, e);
    free(all);
    return rc;
}

/* ---- attention and Gated DeltaNet ---- */

static void call_attention(struct kernels *b, const void *what, int i)
{
    const struct kern_kv_layer *kv = what;
    struct kern *k = b->rank.kern;
    (void)i;
    k->attention(k, &b->engine->forward->attn, b->out, *kv, b->act);
}

/* One sequence of so many positions whose last rows are decoded (or, prefill, computed as prompt). */
static enum rc bench_attention(struct kernels *b, int context, int rows, bool prefill, struct err *e)
{
    const struct kern_attn_shape *a = &b->engine->forward->attn;
    struct kern *k = b->rank.kern;
    const int n_pages = (context + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS;
    struct kern_kv_layer kv = {NULL, k->kv_page_bytes(a)};
    int32_t *pages = calloc((size_t)n_pages, sizeof *pages);
    if (!pages) return err_no_memory(e);
    for (int i = 0; i < n_pages; i++) pages[i] = (int32_t)(((int64_t)i * 7919) % n_pages);
    enum rc rc = k->buffer_alloc(k, kv.page_bytes * (size_t)n_pages, &kv.base_dev, e);
    const struct kern_segment s = {0, rows, context - rows, pages, 0};
    const struct kern_batch batch = {.rows = prefill ? (struct kern_split){0, rows} : (struct kern_split){rows, 0},
                                     .segments = &s, .n_segments = 1, .n_decode_segments = !prefill};
    double us = 0;
    if (rc == RC_OK) {
        k->begin(k, &batch);
        rc = time_calls(b, call_attention, &kv, &us, e);
    }
    if (rc == RC_OK) {
        char shape[32];
        snprintf(shape, sizeof shape, "%d/%dx%d @%d", a->n_heads, a->n_kv_heads, a->head_dim, context);
        const double keys = prefill ? (double)context - rows / 2.0 : (double)context;
        print_row(b, prefill ? "attention, prompt" : "attention", shape, rows, us, prefill ? 0 : keys * (double)kv.page_bytes / KV_PAGE_TOKENS,
                  4.0 * rows * keys * a->head_dim * a->n_heads);
    }
    k->buffer_free(k, kv.base_dev);
    free(pages);
    return rc;
}

struct gdn_call {
    struct kern_gdn_weights weights;
    struct kern_gdn_memory memory;
    size_t layer_bytes;
    int n;
};

static void call_gdn(struct kernels *b, const void *what, int i)
{
    const struct gdn_call *c = what;
    struct kern *k = b->rank.kern;
    struct kern_gdn_memory m = c->memory;
    m.state_dev += (size_t)(i % c->n) * c->layer_bytes;
    k->gdn(k, &b->engine->forward->gdn, &c->weights, m, b->out, b->act);
}

static enum rc bench_gdn(struct kernels *b, int rows, bool prefill, struct err *e)
{
    enum { LAYERS = 32 };
    const struct kern_gdn_shape *g = &b->engine->forward->gdn;
    const struct model_layer *l = b->engine->weights.layers;
    while (!l->gdn) l++;
    struct kern *k = b->rank.kern;
    void *states = NULL, *replay = NULL;
    struct gdn_call c = {{l->conv_dev, l->a_dev, l->dt_dev, l->gdn_norm_dev}, {0}, k->gdn_state_bytes(g), LAYERS};
    enum rc rc = k->buffer_alloc(k, LAYERS * c.layer_bytes, &states, e);
    if (rc == RC_OK) rc = k->buffer_alloc(k, k->gdn_replay_bytes(g), &replay, e);
    c.memory.state_dev = states;
    c.memory.replay_dev = replay;
    const struct kern_segment s = {0, rows, 0, NULL, 0};
    const struct kern_batch batch = {.rows = prefill ? (struct kern_split){0, rows} : (struct kern_split){rows, 0},
                                     .segments = &s, .n_segments = 1, .n_decode_segments = !prefill};
    double us = 0;
    if (rc == RC_OK) {
        k->begin(k, &batch);
        rc = time_calls(b, call_gdn, &c, &us, e);
    }
    if (rc == RC_OK) {
        char shape[32];
        snprintf(shape, sizeof shape, "%d/%dx%d", g->k_heads, g->v_heads, g->v_dim);
        print_row(b, prefill ? "GDN, prompt" : "GDN", shape, rows, us, 2.0 * (double)c.layer_bytes, 0);
    }
    k->buffer_free(k, states);
    k->buffer_free(k, replay);
    return rc;
}

static enum rc bench_mixers(struct kernels *b, struct err *e)
{
    static const int contexts[] = {8192, 32768, 131072, 186368, 262144};
    const struct model_forward *f = b->engine->forward;
    enum rc rc = RC_OK;
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts && rc == RC_OK && f->attn.n_heads; i++) {
        if (contexts[i] > b->engine->config.context) break;
        rc = bench_attention(b, contexts[i], 1, false, e);
        if (rc == RC_OK) rc = bench_attention(b, contexts[i], 4, false, e);
        if (rc == RC_OK) rc = bench_attention(b, contexts[i], MOST_ROWS, true, e);
    }
    if (!f->gdn.k_heads) return rc;
    if (rc == RC_OK) rc = bench_gdn(b, 1, false, e);
    if (rc == RC_OK) rc = bench_gdn(b, 4, false, e);
    return rc == RC_OK ? bench_gdn(b, MOST_ROWS, true, e) : rc;
}

/* ---- the card's matrix rate: bf16 weights of 8192 x 8192, 8192 rows ---- */

static enum rc measure_matrices(struct kernels *b, struct err *e)
{
    enum { N = 8192 };
    struct kern *k = b->rank.kern;
    struct kern_weight *w = NULL;
    void *x = NULL, *y = NULL;
    uint16_t *values = calloc((size_t)N * N, sizeof *values);
    if (!values) return err_no_memory(e);
    for (size_t i = 0; i < (size_t)N * N; i++) values[i] = (uint16_t)(0x3c00 + i * 2654435761u % 512);
    const struct kern_span all = {0, N};
    const struct kern_weight_part part = {.matrix = {.format = QUANT_BF16, .rows = N, .cols = N, .bytes = values, .global = 1},
                                          .rows = &all, .n_rows = 1, .cols = &all, .n_cols = 1};
    enum rc rc = k->weight_load(k, &part, 1, KERN_WEIGHTS_NATIVE, KERN_ROWS, &w, e);
    if (rc == RC_OK) rc = k->buffer_alloc(k, k->act_bytes(N, N), &x, e);
    if (rc == RC_OK) rc = k->buffer_alloc(k, (size_t)N * N * sizeof(float), &y, e);
    if (rc == RC_OK) rc = fill_act(k, N, N, x, e);
    double us = 1e18;
    for (int i = 0; i < 6 && rc == RC_OK; i++) {
        const int64_t start_us = clock_now_us();
        k->linear(k, w, (struct kern_split){0, N}, x, y);
        rc = k->finish(k, e);
        const double one = (double)(clock_now_us() - start_us);
        if (i && one < us) us = one;
    }
    if (rc == RC_OK) b->matrix_flops = 2.0 * N * N * N / us * 1e6;
    k->buffer_free(k, x);
    k->buffer_free(k, y);
    k->weight_free(k, w);
    free(values);
    return rc;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static enum rc open_kernels(const struct options *o, struct kernels *b, struct err *e)
{
    enum rc rc = bench_rank_open(o, &b->rank, e);
    if (rc != RC_OK) return rc;
    struct kern *k = b->rank.kern;
    const struct rank_args args = {.options = b->rank.options, .rank = b->rank.rank};
    struct engine_options options = rank_args_engine(&args);
    options.ranks = b->rank.comm->ranks;
    options.solo = b->rank.solo;
    options.context = 64;
    options.spec = SPEC_OFF;
    rc = engine_open(&options, k, b->rank.comm, b->rank.segment, &b->engine, e);
    if (rc != RC_OK) return rc;
    const struct model_forward *f = b->engine->forward;
    const int hidden = f->o.config->hidden, ffn = f->part.ffn.count, most = MOST_ROWS;
    const int mix = (int)larger((size_t)(f->attn.n_heads * f->attn.head_dim), (size_t)(f->gdn.v_heads * f->gdn.v_dim));
    const size_t in = (size_t)most * larger((size_t)f->qkv_width, (size_t)f->gdn_width) * sizeof(float);
    const size_t head = 8 * (size_t)f->part.vocab.count * sizeof(float);
    const size_t act = larger(k->act_bytes(most, hidden), larger(k->act_bytes(most, ffn), k->act_bytes(most, mix)));
    const size_t out = larger(larger(in, head), larger(k->partial_bytes(most, hidden), k->act_bytes(most, ffn)));
    const int widest = (int)larger((size_t)hidden, larger((size_t)ffn, (size_t)mix)) / 16 * 16;
    if (rc == RC_OK) rc = k->buffer_alloc(k, act, &b->act, e);
    if (rc == RC_OK) rc = fill_act(k, most, widest < WIDEST_NORM ? widest : WIDEST_NORM, b->act, e);
    if (rc == RC_OK) rc = k->buffer_alloc(k, out, &b->out, e);
    if (rc == RC_OK) rc = k->buffer_alloc(k, k->swiglu_scratch_bytes(most, ffn) + 64, &b->scratch, e);
    return rc == RC_OK && k->measure ? measure_matrices(b, e) : rc;
}

enum rc bench_kernel(const struct options *o, struct err *e)
{
    struct kernels b = {.first = true};
    enum rc rc = open_kernels(o, &b, e);
    if (rc == RC_OK) {
        if (o->json)
            printf("{\"bench\":\"kernel\",\"backend\":\"%s\",\"read_bytes_per_s\":%.0f,\"bf16_flops\":%.0f,\"kernels\":[", b.rank.kern->numerics,
                   b.rank.read_bytes_per_s, b.matrix_flops);
        else if (o->csv) printf("name,shape,rows,us,bytes,flops,of_read,of_matrix\n");
        else
            printf("kernels, %s: reads %.0f GB/s, bf16 matrices %.0f TFLOP/s\n", b.rank.kern->numerics, b.rank.read_bytes_per_s / 1e9,
                   b.matrix_flops / 1e12);
        rc = bench_layers(&b, e);
        if (rc == RC_OK) rc = bench_mixers(&b, e);
        if (o->json) printf("]}\n");
    }
    if (b.rank.kern) {
        struct kern *k = b.rank.kern;
        k->buffer_free(k, b.act);
        k->buffer_free(k, b.out);
        k->buffer_free(k, b.scratch);
    }
    engine_close(b.engine);
    bench_rank_close(&b.rank);
    return rc;
}

/* ---- sums ---- */

/* Sums of so many rows on one rank; all ranks call it together. us: of one sum, alone and with the norm behind it (0: not fused). */
static enum rc time_sums(struct kern *k, struct comm *c, int rows, int width, double us[2], struct err *e)
{
    enum { CALLS = 64, ROUNDS = 8 };
    void *partial = NULL, *residual = NULL, *act = NULL;
    const struct kern_split split = {rows <= 64 ? rows : 0, rows <= 64 ? 0 : rows};
    enum rc rc = k->buffer_alloc(k, k->partial_bytes(rows, width), &partial, e);
    if (rc == RC_OK) rc = k->buffer_alloc(k, (size_t)rows * (size_t)width * sizeof(float), &residual, e);
    if (rc == RC_OK) rc = k->buffer_alloc(k, k->act_bytes(rows, width), &act, e);
    for (int fused = 0; fused < 2 && rc == RC_OK; fused++) {
        us[fused] = 1e18;
        for (int i = 0; i < ROUNDS && rc == RC_OK; i++) {
            bool together = true;
            rc = c->barrier(c, e);
            const int64_t start_us = clock_now_us();
            for (int j = 0; j < CALLS && rc == RC_OK && together; j++) {
                if (!fused) rc = c->all_reduce_add(c, partial, split, width, residual, e);
                else together = c->all_reduce_add_norm && c->all_reduce_add_norm(c, partial, split, width, residual, residual, 1e-6f, act);
            }
            if (rc == RC_OK) rc = k->finish(k, e);
            const double one = (double)(clock_now_us() - start_us) / CALLS;
            if (!together) us[fused] = 0;
            else if (i && one < us[fused]) us[fused] = one;
        }
    }
    k->buffer_free(k, partial);
    k->buffer_free(k, residual);
    k->buffer_free(k, act);
    return rc;
}

static enum rc sums(const struct options *o, struct kern *k, struct comm *c, int width, int most_rows, bool print, struct err *e)
{
    static const int rows[] = {1, 4, 8, 64, 512, MOST_ROWS};
    enum rc rc = RC_OK;
    if (print && o->csv) printf("rows,width,sum_us,sum_and_norm_us\n");
    if (print && !o->csv && !o->json) printf("sums, %s, %d ranks, path %s\n", k->numerics, c->ranks, o->sum_path ? o->sum_path : "auto");
    if (print && o->json) printf("{\"bench\":\"sum\",\"backend\":\"%s\",\"ranks\":%d,\"sums\":[", k->numerics, c->ranks);
    for (size_t i = 0; i < sizeof rows / sizeof *rows && rows[i] <= most_rows && rc == RC_OK; i++) {
        double us[2] = {0};
        rc = time_sums(k, c, rows[i], width, us, e);
        if (rc != RC_OK || !print) continue;
        if (o->json) printf("%s{\"rows\":%d,\"width\":%d,\"sum_us\":%.2f,\"sum_and_norm_us\":%.2f}", i ? "," : "", rows[i], width, us[0], us[1]);
        else if (o->csv) printf("%d,%d,%.2f,%.2f\n", rows[i], width, us[0], us[1]);
        else printf("  %5d rows x %d  %10.2f us, with the norm %10.2f us\n", rows[i], width, us[0], us[1]);
    }
    if (print && o->json) printf("]}\n");
    return rc;
}

static enum rc sums_of_rank(const struct options *o, int rank, struct segment *segment, struct err *e)
{
    struct kern *kern = NULL;
    struct comm *comm = NULL;
    struct engine_comm_shape shape;
    const struct rank_args args = {.options = *o, .rank = rank};
    const struct engine_options engine = rank_args_engine(&args);
    enum rc rc = engine_comm_shape(&engine, &shape, e);
    if (rc == RC_OK) rc = rank_backend_open(o, 0, rank, segment, &kern, &comm, e);
    if (rc == RC_OK) rc = sums(o, kern, comm, shape.width, shape.max_rows, rank == 0, e);
    if (comm) comm->close(comm);
    if (kern) kern->close(kern);
    return rc;
}

/* Real ranks: a process each. Nothing of a GPU was touched before. */
static enum rc sums_of_ranks(const struct options *o, struct err *e)
{
    struct engine_comm_shape shape;
    const struct rank_args args = {.options = *o};
    const struct engine_options engine = rank_args_engine(&args);
    enum rc rc = engine_comm_shape(&engine, &shape, e);
    if (rc != RC_OK) return rc;
    const size_t comm_bytes = engine_comm_bytes(shape), n = segment_bytes(o->ranks, comm_bytes);
    void *memory = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return err_no_memory(e);
    segment_init(memory, o->ranks, comm_bytes, &o->bounds);
    pid_t pids[MAX_RANKS] = {0};
    fflush(stdout);
    for (int r = 0; r < o->ranks && rc == RC_OK; r++) {
        pids[r] = fork();
        if (pids[r] < 0) rc = err_errno(e, RC_FATAL, EXIT_UNAVAILABLE, "no_process", "cannot start rank %d", r);
        if (pids[r]) continue;
        struct err own = {0};
        char line[sizeof own.text + 400];
        struct segment *segment = segment_attach(memory, n, o->ranks, &own);
        const bool ok = segment && sums_of_rank(o, r, segment, &own) == RC_OK;
        if (!ok) log_line(LOG_ERROR, "%s", err_format(&own, line, sizeof line));
        if (!ok && segment) segment_poison(segment, r, own.text);
        fflush(stdout);
        _exit(ok ? EXIT_DONE : own.exit_status ? own.exit_status : EXIT_INTERNAL);
    }
    for (int r = 0; r < o->ranks; r++) {
        int status = 0;
        if (pids[r] > 0) waitpid(pids[r], &status, 0);
        if (status && rc == RC_OK)
            rc = err_set(e, RC_FAILED, WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_INTERNAL, "rank_failed", "rank %d failed", r);
    }
    munmap(memory, n);
    return rc;
}

enum rc bench_sum(const struct options *o, struct err *e)
{
    if (!o->bench_as && o->ranks > 1) return sums_of_ranks(o, e);
    struct bench_rank b;
    struct engine_comm_shape shape;
    enum rc rc = bench_rank_open(o, &b, e);
    const struct rank_args args = {.options = b.options, .rank = 0};
    const struct engine_options engine = rank_args_engine(&args);
    if (rc == RC_OK) rc = engine_comm_shape(&engine, &shape, e);
    if (rc == RC_OK) rc = sums(o, b.kern, b.comm, shape.width, shape.max_rows, true, e);
    bench_rank_close(&b);
    return rc;
}
