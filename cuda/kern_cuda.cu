/* kern_cuda: the table, memory, the batch in device memory, recorded rounds, errors.
 *
 * One stream. Every operation is enqueued on it, so that results are read after finish alone. The first error is kept with the
 * name and shape of the operation that met it; a later launch would only report the same sticky error under another name.
 *
 * The batches of a round are copied into blocks of device memory of their own, by a stream of their own, so that a copy does not wait
 * for the batch before. For batches of decode rows alone, which may be recorded, the arrays lie at fixed places of a block; graphs
 * hold their addresses. Rounds are recorded per (caller's key, block, bound of the longest sequence): what is seen for the first time
 * runs as it is, which also loads the code; the second time it is captured; from then on replayed.
 *
 * Scratch of attention and Gated DeltaNet grows with the largest batch seen. It moves when it grows, and with it all recordings
 * are forgotten. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include "kern_cuda.h"
}

#include "act.cuh"
#include "batch.h"
#include "comm_cuda.h"
#include "op_attn.h"
#include "op_gdn.h"
#include "op_linear.h"
#include "op_rows.h"
#include "read_rate.h"
#include "weights.h"

enum {
    MAX_RECORDINGS = 256,
    DECODE_SEGMENTS = 64,
    DECODE_ROWS = DECODE_SEGMENTS * (KERN_MAX_DRAFTS + 1),
    STAGES = KERN_MAX_DRAFTS + 2, /* batches of a round: passes of the MTP layer, and the step; with one to spare none waits for another */
    MIN_SM = 80,
};

/* Families of operations that are timed apart. OTHER: what lies between: sums, gathers, copies, gaps. */
enum family { EMBED, NORM, LINEAR, LINEAR_SWIGLU, LINEAR_PARTIAL, ROPE_KV, ATTENTION, GDN, GDN_REPLAY, BEST, HASH, OTHER, FAMILIES };
static const char *const family_names[FAMILIES] = {"embedding",      "norm", "linear", "linear + SwiGLU", "linear, partial",
                                                   "rope, KV append", "attention", "GDN",   "GDN replay",  "best logit", "hash",
                                                   "sums, copies, gaps"};

/* Events before and after every operation since the last reading. */
struct stopwatch {
    bool on;
    cudaEvent_t *events; /* two an operation */
    enum family *family;
    int n, cap;          /* operations */
};

struct recording {
    uint64_t key;
    cudaGraphExec_t graph; /* NULL: seen once */
};

struct scratch {
    void *dev;
    size_t n_bytes;
};

struct kern_cuda {
    struct kern table;
    struct op_context context;
    struct weight_loader *loader;
    struct comm *comm; /* NULL until kern_cuda_open_comm */
    int device;
    char numerics[32];

    char *stage[STAGES], *batch_dev[STAGES]; /* pinned staging of batches in turn, and the copies that kernels see */
    cudaEvent_t copied[STAGES];
    cudaStream_t copies;
    size_t batch_bytes; /* of each */
    int stages_used; /* since the stream was last known to be idle */
    struct device_batch batch;
    int longest; /* positions of the batch's longest sequence */

    struct scratch attn, gdn, best;
    struct stopwatch watch;

    bool graphs, capturing;
    struct recording recordings[MAX_RECORDINGS];
    int n_recordings;
    uint64_t capture_key;

    cudaError_t failure; /* the first */
    char failed[160];    /* where */
};

static struct kern_cuda *context(const struct kern *k) { return (struct kern_cuda *)k->ctx; }

/* ---- errors ---- */

static void keep_failure(struct kern_cuda *c, cudaError_t status, const char *what)
{
    if (status == cudaSuccess || c->failure != cudaSuccess) return;
    c->failure = status;
    snprintf(c->failed, sizeof c->failed, "%s", what);
}

/* After an operation: its name and shape, where it could not be launched. */
#define NOTE(c, ...)                                                                                                   \
    do {                                                                                                               \
        const cudaError_t status_ = cudaGetLastError();                                                                \
        if (status_ != cudaSuccess) {                                                                                  \
            char what_[128];                                                                                           \
            snprintf(what_, sizeof what_, __VA_ARGS__);                                                                \
            keep_failure(c, status_, what_);                                                                           \
        }                                                                                                              \
    } while (0)

static enum rc failed(const struct kern_cuda *c, struct err *e)
{
    return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "cuda_failed", "GPU %d: %s: %s", c->device, c->failed,
                   cudaGetErrorString(c->failure));
}

static enum rc finish(struct kern *k, struct err *e)
{
    struct kern_cuda *c = context(k);
    cudaError_t status = c->failure;
    enum { QUERIES_OF_A_POLL = 4096 };
    for (int i = 0; status == cudaSuccess; i++) {
        status = cudaStreamQuery(c->context.stream);
        if (status == cudaSuccess) break;
        if (status != cudaErrorNotReady) break;
        status = cudaSuccess;
        cudaGetLastError(); /* "not ready" would look like the next launch's error */
        if (i % QUERIES_OF_A_POLL == QUERIES_OF_A_POLL - 1 && c->comm) comm_cuda_poll(c->comm);
    }
    keep_failure(c, status, "computing");
    c->stages_used = 0;
    if (c->comm) {
        const enum rc rc = comm_cuda_check(c->comm, e);
        if (rc != RC_OK) return rc;
    }
    return c->failure == cudaSuccess ? RC_OK : failed(c, e);
}

/* ---- times ---- */

static bool watch_grow(struct stopwatch *w)
{
    const int cap = w->cap ? 2 * w->cap : 1024;
    cudaEvent_t *events = (cudaEvent_t *)realloc(w->events, 2 * (size_t)cap * sizeof *events);
    if (events) w->events = events;
    enum family *family = (enum family *)realloc(w->family, (size_t)cap * sizeof *family);
    if (family) w->family = family;
    if (!events || !family) return false;
    for (int i = 2 * w->cap; i < 2 * cap; i++)
        if (cudaEventCreate(&events[i]) != cudaSuccess) return false;
    w->cap = cap;
    return true;
}

static void watch_start(struct kern_cuda *c, enum family f)
{
    struct stopwatch *w = &c->watch;
    if (!w->on || (w->n == w->cap && !watch_grow(w))) return;
    w->family[w->n] = f;
    cudaEventRecord(w->events[2 * w->n], c->context.stream);
}

static void watch_stop(struct kern_cuda *c)
{
    struct stopwatch *w = &c->watch;
    if (!w->on || w->n == w->cap) return;
    cudaEventRecord(w->events[2 * w->n + 1], c->context.stream);
    w->n++;
}

static void measure(struct kern *k, bool on)
{
    struct kern_cuda *c = context(k);
    c->watch.on = on;
    c->watch.n = 0;
}

static void add_time(struct kern_time *t, cudaEvent_t from, cudaEvent_t to)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, from, to) != cudaSuccess) return;
    t->calls++;
    t->us += (double)ms * 1e3;
}

static int times(struct kern *k, struct kern_time *out, int most)
{
    struct stopwatch *w = &context(k)->watch;
    struct kern_time all[FAMILIES] = {};
    int n = 0;
    for (int i = 0; i < w->n; i++) {
        add_time(&all[w->family[i]], w->events[2 * i], w->events[2 * i + 1]);
        if (i) add_time(&all[OTHER], w->events[2 * i - 1], w->events[2 * i]);
    }
    w->n = 0;
    for (int f = 0; f < FAMILIES && n < most; f++) {
        all[f].family = family_names[f];
        if (all[f].calls) out[n++] = all[f];
    }
    return n;
}

static double measured_read_rate(struct kern *k)
{
    struct kern_cuda *c = context(k);
    const double rate = read_rate(&c->context);
    NOTE(c, "reading a gigabyte");
    return rate;
}

static void watch_close(struct stopwatch *w)
{
    for (int i = 0; i < 2 * w->cap; i++) cudaEventDestroy(w->events[i]);
    free(w->events);
    free(w->family);
}

/* ---- recordings ---- */

static void forget_recordings(struct kern_cuda *c)
{
    for (int i = 0; i < c->n_recordings; i++)
        if (c->recordings[i].graph) cudaGraphExecDestroy(c->recordings[i].graph);
    c->n_recordings = 0;
}

static struct recording *find_recording(struct kern_cuda *c, uint64_t key)
{
    for (int i = 0; i < c->n_recordings; i++)
        if (c->recordings[i].key == key) return &c->recordings[i];
    return NULL;
}

/* What the grids of decode attention are shaped by, as op_attn_decode sees it, and where the batch lies. */
static uint64_t profile_key(const struct kern_cuda *c, uint64_t key)
{
    const uint64_t own = (uint64_t)op_attn_profile(c->longest) * STAGES + (uint64_t)c->stages_used;
    return (key ^ own * 0x9e3779b97f4a7c15ull) * 0xd1342543de82ef95ull;
}

static bool record(struct kern *k, uint64_t key)
{
    struct kern_cuda *c = context(k);
    if (!c->graphs || c->watch.on || c->failure != cudaSuccess) return false;
    key = profile_key(c, key);
    struct recording *r = find_recording(c, key);
    if (r && r->graph) {
        keep_failure(c, cudaGraphLaunch(r->graph, c->context.stream), "launching a recorded round");
        return true;
    }
    if (!r) {
        if (c->n_recordings == MAX_RECORDINGS) forget_recordings(c);
        c->recordings[c->n_recordings++] = {key, NULL};
        return false;
    }
    c->capturing = cudaStreamBeginCapture(c->context.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess;
    c->capture_key = key;
    return false;
}

static bool record_end(struct kern *k)
{
    struct kern_cuda *c = context(k);
    if (!c->capturing) return true;
    cudaGraph_t graph = NULL;
    struct recording *r = find_recording(c, c->capture_key);
    c->capturing = false;
    cudaError_t status = cudaStreamEndCapture(c->context.stream, &graph);
    if (status == cudaSuccess && c->failure == cudaSuccess && r) status = cudaGraphInstantiate(&r->graph, graph, 0);
    if (graph) cudaGraphDestroy(graph);
    if (status == cudaSuccess && r && r->graph) {
        keep_failure(c, cudaGraphLaunch(r->graph, c->context.stream), "launching a recorded round");
        return true;
    }
    if (c->failure != cudaSuccess) return true; /* finish will say so */
    cudaGetLastError();
    log_line(LOG_WARN, "a round could not be recorded (%s): going on without recordings", cudaGetErrorString(status));
    c->graphs = false;
    forget_recordings(c);
    return false;
}

/* ---- shapes ---- */

static enum rc supports(struct kern *k, int width, const struct kern_attn_shape *a, const struct kern_gdn_shape *g, struct err *e)
{
    const struct kern_cuda *c = context(k);
    const char *problem = a ? op_attn_unsupported(a) : NULL;
    if (width < 16 || width % 16 || width > OP_ROWS_MAX_WIDTH)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "GPU %d: rows of %d are no multiple of 16 up to %d", c->device, width,
                       OP_ROWS_MAX_WIDTH);
    if (problem)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "GPU %d: %d and %d heads x %d: %s", c->device, a->n_heads,
                       a->n_kv_heads, a->head_dim, problem);
    problem = g ? op_gdn_unsupported(g) : NULL;
    if (problem)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "GPU %d: Gated DeltaNet of %d x %d and %d x %d: %s", c->device,
                       g->k_heads, g->k_dim, g->v_heads, g->v_dim, problem);
    return RC_OK;
}

/* ---- memory ---- */

static enum rc buffer_alloc(struct kern *k, size_t n_bytes, void **out_dev, struct err *e)
{
    struct kern_cuda *c = context(k);
    *out_dev = NULL;
    cudaError_t status = cudaMalloc(out_dev, n_bytes ? n_bytes : 1);
    if (status != cudaSuccess) {
        size_t free_bytes = 0, all = 0;
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &all);
        return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "gpu_memory", "GPU %d has %zu MiB of %zu MiB left, %zu MiB more are needed",
                       c->device, free_bytes >> 20, all >> 20, n_bytes >> 20);
    }
    keep_failure(c, cudaMemsetAsync(*out_dev, 0, n_bytes, c->context.stream), "clearing memory");
    return RC_OK;
}

static void buffer_free(struct kern *k, void *dev)
{
    (void)k;
    if (dev) cudaFree(dev); /* waits for what still uses it */
}

static enum rc host_alloc(struct kern *k, size_t n_bytes, void **out, struct err *e)
{
    (void)k;
    *out = NULL;
    if (cudaHostAlloc(out, n_bytes ? n_bytes : 1, cudaHostAllocPortable) != cudaSuccess) {
        cudaGetLastError();
        return err_no_memory(e);
    }
    memset(*out, 0, n_bytes);
    return RC_OK;
}

static void host_free(struct kern *k, void *host)
{
    (void)k;
    if (host) cudaFreeHost(host);
}

static void to_host(struct kern *k, void *host, const void *dev, size_t n_bytes)
{
    struct kern_cuda *c = context(k);
    if (!n_bytes) return;
    keep_failure(c, cudaMemcpyAsync(host, dev, n_bytes, cudaMemcpyDeviceToHost, c->context.stream), "copying to the host");
    keep_failure(c, cudaStreamSynchronize(c->context.stream), "copying to the host");
}

/* Pageable memory is staged by the driver before the call returns. */
static void to_dev(struct kern *k, void *dev, const void *host, size_t n_bytes)
{
    struct kern_cuda *c = context(k);
    if (!n_bytes) return;
    keep_failure(c, cudaMemcpyAsync(dev, host, n_bytes, cudaMemcpyHostToDevice, c->context.stream), "copying to the GPU");
    keep_failure(c, cudaStreamSynchronize(c->context.stream), "copying to the GPU"); /* host may be pinned: read before return */
}

static void copy(struct kern *k, void *to, const void *from, size_t n_bytes)
{
    struct kern_cuda *c = context(k);
    if (n_bytes) keep_failure(c, cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToDevice, c->context.stream), "copying on the GPU");
}

/* True when there is room for n_bytes. Never during a capture: what is captured ran before in the same shape. */
static bool grow(struct kern_cuda *c, struct scratch *s, size_t n_bytes)
{
    if (n_bytes <= s->n_bytes) return true;
    keep_failure(c, cudaStreamSynchronize(c->context.stream), "growing scratch memory");
    forget_recordings(c);
    if (s->dev) cudaFree(s->dev);
    *s = {NULL, 0};
    const cudaError_t status = cudaMalloc(&s->dev, n_bytes);
    keep_failure(c, status, "growing scratch memory");
    if (status == cudaSuccess) s->n_bytes = n_bytes;
    return status == cudaSuccess;
}

static size_t act_bytes(int rows, int width) { return act_buffer_bytes(rows, 0, width) + act_buffer_bytes(0, rows, width); }

/* ---- weights ---- */

static enum rc weight_load(struct kern *k, const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                           enum kern_use use, struct kern_weight **out, struct err *e)
{
    return weights_load(context(k)->loader, parts, n_parts, how, use, out, e);
}

static void weight_free(struct kern *k, struct kern_weight *w)
{
    (void)k;
    if (w) weights_free(w);
}

static size_t weight_bytes(const struct kern_weight *w) { return w->bytes; }

static enum rc table_load(struct kern *k, const struct quant_matrix *m, struct kern_table **out, struct err *e)
{
    return weights_load_table(context(k)->loader, m, out, e);
}

static void table_free(struct kern *k, struct kern_table *t)
{
    (void)k;
    if (t) weights_free_table(t);
}

static size_t table_bytes(const struct kern_table *t) { return t->bytes; }

/* ---- the batch ---- */

struct batch_layout {
    size_t row, tokens, tables, n_bytes; /* segments first */
};

static size_t aligned(size_t n) { return (n + 63) / 64 * 64; }

/* Decode rows alone: fixed places, whatever their number. */
static struct batch_layout layout_of(const struct kern_batch *b, size_t n_tables)
{
    const bool fixed = !b->rows.prefill && b->rows.decode <= DECODE_ROWS && b->n_segments <= DECODE_SEGMENTS;
    const size_t segments = fixed ? (size_t)DECODE_SEGMENTS : (size_t)b->n_segments, rows = fixed ? (size_t)DECODE_ROWS : (size_t)kern_rows(b->rows);
    struct batch_layout l;
    l.row = aligned(segments * sizeof(struct device_segment));
    l.tokens = l.row + aligned(rows * sizeof(struct device_row));
    l.tables = l.tokens + aligned(rows * sizeof(int32_t));
    l.n_bytes = l.tables + n_tables * sizeof(int32_t);
    return l;
}

static int pages_of(const struct kern_segment *s) { return (s->position_first + s->rows - 1) / KV_PAGE_TOKENS + 1; }

static void free_batch(struct kern_cuda *c)
{
    for (int i = 0; i < STAGES; i++) {
        if (c->stage[i]) cudaFreeHost(c->stage[i]);
        if (c->batch_dev[i]) cudaFree(c->batch_dev[i]);
        c->stage[i] = c->batch_dev[i] = NULL;
    }
    c->batch_bytes = 0;
}

/* Staging and device blocks of at least so many bytes. */
static bool grow_batch(struct kern_cuda *c, size_t n_bytes)
{
    if (n_bytes <= c->batch_bytes) return true;
    keep_failure(c, cudaStreamSynchronize(c->context.stream), "growing the batch");
    forget_recordings(c);
    free_batch(c);
    n_bytes *= 2;
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < STAGES && status == cudaSuccess; i++) {
        status = cudaMalloc((void **)&c->batch_dev[i], n_bytes);
        if (status == cudaSuccess) status = cudaHostAlloc((void **)&c->stage[i], n_bytes, cudaHostAllocDefault);
    }
    keep_failure(c, status, "growing the batch");
    if (status == cudaSuccess) c->batch_bytes = n_bytes;
    return status == cudaSuccess;
}

static void fill_batch(struct kern_cuda *c, const struct kern_batch *b, const struct batch_layout *l, char *to)
{
    struct device_segment *segments = (struct device_segment *)to;
    struct device_row *row = (struct device_row *)(to + l->row);
    int32_t *tables = (int32_t *)(to + l->tables);
    int n_tables = 0;
    for (int i = 0; i < b->n_segments; i++) {
        const struct kern_segment *s = &b->segments[i];
        const int pages = s->pages ? pages_of(s) : 0;
        segments[i] = {s->row_first, s->rows, s->position_first, s->slot, n_tables, 0};
        for (int r = 0; r < s->rows; r++) row[s->row_first + r] = {i, s->position_first + r};
        if (pages) memcpy(tables + n_tables, s->pages, (size_t)pages * sizeof *tables);
        n_tables += pages;
        if (s->position_first + s->rows > c->longest) c->longest = s->position_first + s->rows;
    }
    if (b->tokens) memcpy(to + l->tokens, b->tokens, (size_t)kern_rows(b->rows) * sizeof *b->tokens);
}

static void begin(struct kern *k, const struct kern_batch *b)
{
    struct kern_cuda *c = context(k);
    size_t n_tables = 0;
    for (int s = 0; s < b->n_segments; s++) n_tables += b->segments[s].pages ? (size_t)pages_of(&b->segments[s]) : 0;
    const struct batch_layout l = layout_of(b, n_tables);
    if (!grow_batch(c, l.n_bytes)) return;
    if (c->stages_used == STAGES) {
        keep_failure(c, cudaStreamSynchronize(c->context.stream), "beginning a batch");
        c->stages_used = 0;
    }
    const int i = c->stages_used++;
    char *const dev = c->batch_dev[i];
    c->longest = 0;
    fill_batch(c, b, &l, c->stage[i]);
    cudaError_t status = cudaMemcpyAsync(dev, c->stage[i], l.n_bytes, cudaMemcpyHostToDevice, c->copies);
    if (status == cudaSuccess) status = cudaEventRecord(c->copied[i], c->copies);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(c->context.stream, c->copied[i], 0);
    keep_failure(c, status, "beginning a batch");
    c->batch.rows = kern_rows(b->rows);
    c->batch.decode_rows = b->rows.decode;
    c->batch.n_segments = b->n_segments;
    c->batch.n_decode_segments = b->n_decode_segments;
    c->batch.segments = (const struct device_segment *)dev;
    c->batch.row = (const struct device_row *)(dev + l.row);
    c->batch.tokens = (const int32_t *)(dev + l.tokens);
    c->batch.left = b->tokens_dev;
    c->batch.tables = (const int32_t *)(dev + l.tables);
    c->batch.longest = c->longest;
}

/* ---- operations ---- */

static void embed(struct kern *k, const struct kern_table *t, float *y)
{
    struct kern_cuda *c = context(k);
    watch_start(c, EMBED);
    op_embed(&c->context, &c->batch, t, y);
    watch_stop(c);
    NOTE(c, "embedding of %d rows x %d", c->batch.rows, t->cols);
}

static void rope_kv_append(struct kern *k, const struct kern_attn_shape *s, const struct kern_attn_weights *w,
                           const float *cos_sin, float *qkv, struct kern_kv_layer kv)
{
    struct kern_cuda *c = context(k);
    watch_start(c, ROPE_KV);
    op_rope_kv_append(&c->context, &c->batch, s, w, cos_sin, qkv, kv);
    watch_stop(c);
    NOTE(c, "rotation of %d rows, %d and %d heads x %d", c->batch.rows, s->n_heads, s->n_kv_heads, s->head_dim);
}

static void attention(struct kern *k, const struct kern_attn_shape *s, const float *qkv, struct kern_kv_layer kv, void *o_act)
{
    struct kern_cuda *c = context(k);
    watch_start(c, ATTENTION);
    const struct device_batch *b = &c->batch;
    if (b->n_decode_segments && grow(c, &c->attn, op_attn_decode_scratch_bytes(s, b->decode_rows)))
        op_attn_decode(&c->context, b, s, qkv, kv, c->attn.dev, o_act);
    if (b->n_segments > b->n_decode_segments) op_attn_prefill(&c->context, b, s, qkv, kv, o_act);
    watch_stop(c);
    NOTE(c, "attention of %d rows, %d and %d heads x %d, %s", b->rows, s->n_heads, s->n_kv_heads, s->head_dim, kv_format_name(s->kv));
}

static void gdn(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, struct kern_gdn_memory m,
                const float *in, void *o_act)
{
    struct kern_cuda *c = context(k);
    const struct device_batch *b = &c->batch;
    if (!grow(c, &c->gdn, op_gdn_scratch_bytes(s, b->rows))) return;
    watch_start(c, GDN);
    if (b->n_decode_segments) op_gdn_decode(&c->context, b, s, w, m, in, c->gdn.dev, o_act);
    if (b->n_segments > b->n_decode_segments) op_gdn_prefill(&c->context, b, s, w, m, in, c->gdn.dev, o_act);
    watch_stop(c);
    NOTE(c, "Gated DeltaNet of %d rows, %d and %d heads", b->rows, s->k_heads, s->v_heads);
}

static void gdn_replay(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, int n_layers,
                       struct kern_gdn_memory m, int slot, int rows)
{
    struct kern_cuda *c = context(k);
    if (!rows) return;
    watch_start(c, GDN_REPLAY);
    op_gdn_replay(&c->context, s, w, n_layers, m, slot, rows);
    watch_stop(c);
    NOTE(c, "replay of %d rows in %d layers, %d and %d heads", rows, n_layers, s->k_heads, s->v_heads);
}

static void rms_norm(struct kern *k, const float *x, const float *w, struct kern_split rows, int n, float eps, float *y, void *y_act)
{
    struct kern_cuda *c = context(k);
    watch_start(c, NORM);
    op_rms_norm(&c->context, x, w, rows, n, eps, y, y_act);
    watch_stop(c);
    NOTE(c, "norm of %d rows x %d", kern_rows(rows), n);
}

static void rms_norm_pair(struct kern *k, const float *first, const float *first_w, const float *second, const float *second_w,
                          struct kern_split rows, int n, float eps, void *y_act)
{
    struct kern_cuda *c = context(k);
    watch_start(c, NORM);
    op_rms_norm_pair(&c->context, first, first_w, second, second_w, rows, n, eps, y_act);
    watch_stop(c);
    NOTE(c, "norms of %d pairs of rows x %d", kern_rows(rows), n);
}

static void linear(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act, float *y)
{
    struct kern_cuda *c = context(k);
    watch_start(c, LINEAR);
    const size_t pitch = (size_t)w->rows;
    const bool beside = rows.decode && w->n_matrices == 2 &&
                        op_linear_decode_beside(&c->context, &w->matrix[0], &w->matrix[1], x_act, rows.decode, y,
                                                y + w->row_first[1], pitch);
    for (int i = 0; i < w->n_matrices; i++) {
        const struct device_matrix *m = &w->matrix[i];
        float *to = y + w->row_first[i];
        if (rows.decode && !beside) op_linear_decode(&c->context, m, x_act, rows.decode, to, NULL, pitch);
        if (rows.prefill) op_linear_prefill(&c->context, m, x_act, rows, to + (size_t)rows.decode * pitch, pitch);
    }
    watch_stop(c);
    NOTE(c, "linear layer of %d and %d rows, %d x %d", rows.decode, rows.prefill, w->rows, w->cols);
}

/* As comm_cuda.h has it: two planes of decode rows, then prefill rows. */
static void linear_partial(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act, void *y_partial)
{
    struct kern_cuda *c = context(k);
    watch_start(c, LINEAR_PARTIAL);
    const size_t pitch = (size_t)w->rows, plane = (size_t)rows.decode * pitch;
    for (int i = 0; i < w->n_matrices; i++) {
        const struct device_matrix *m = &w->matrix[i];
        float *to = (float *)y_partial + w->row_first[i];
        if (rows.decode) op_linear_decode(&c->context, m, x_act, rows.decode, to, to + plane, pitch);
        if (rows.prefill) op_linear_prefill(&c->context, m, x_act, rows, to + 2 * plane, pitch);
    }
    watch_stop(c);
    NOTE(c, "linear layer of %d and %d rows, %d x %d", rows.decode, rows.prefill, w->rows, w->cols);
}

static void linear_swiglu(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act, void *scratch,
                          void *y_act)
{
    struct kern_cuda *c = context(k);
    watch_start(c, LINEAR_SWIGLU);
    (void)scratch;
    if (rows.decode) op_linear_decode_swiglu(&c->context, &w->matrix[0], x_act, rows, y_act);
    if (rows.prefill) op_linear_prefill_swiglu(&c->context, &w->matrix[0], x_act, rows, y_act);
    watch_stop(c);
    NOTE(c, "SwiGLU layer of %d and %d rows, %d x %d", rows.decode, rows.prefill, w->rows, w->cols);
}

static size_t swiglu_scratch_bytes(int rows, int f)
{
    (void)rows, (void)f;
    return 0; /* it is the products' epilogue */
}

static void best(struct kern *k, const float *logits, int rows, int n, int first, const uint32_t *allowed, struct kern_best *out)
{
    struct kern_cuda *c = context(k);
    const size_t n_bytes = (size_t)rows * sizeof(struct op_best_row), had_bytes = c->best.n_bytes;
    if (!grow(c, &c->best, n_bytes)) return;
    if (c->best.n_bytes > had_bytes) keep_failure(c, cudaMemsetAsync(c->best.dev, 0, n_bytes, c->context.stream), "clearing memory");
    watch_start(c, BEST);
    op_best(&c->context, logits, rows, n, first, allowed, (struct op_best_row *)c->best.dev, out);
    watch_stop(c);
    NOTE(c, "best of %d rows x %d", rows, n);
}

static void best_tokens(struct kern *k, const struct kern_best *best_dev, int rows, int ranks, int32_t *tokens_dev, int32_t *tokens)
{
    struct kern_cuda *c = context(k);
    watch_start(c, BEST);
    op_best_tokens(&c->context, best_dev, rows, ranks, tokens_dev, tokens);
    watch_stop(c);
    NOTE(c, "tokens of %d rows", rows);
}

static void hash_rows(struct kern *k, const float *x, int rows, int n, uint64_t *out)
{
    struct kern_cuda *c = context(k);
    watch_start(c, HASH);
    op_hash_rows(&c->context, x, rows, n, out);
    watch_stop(c);
    NOTE(c, "hashes of %d rows x %d", rows, n);
}

/* ---- open and close ---- */

static void close_cuda(struct kern *k)
{
    if (!k) return;
    struct kern_cuda *c = context(k);
    cudaStreamSynchronize(c->context.stream);
    forget_recordings(c);
    if (c->loader) weight_loader_close(c->loader);
    if (c->attn.dev) cudaFree(c->attn.dev);
    if (c->gdn.dev) cudaFree(c->gdn.dev);
    if (c->best.dev) cudaFree(c->best.dev);
    free_batch(c);
    for (int i = 0; i < STAGES; i++)
        if (c->copied[i]) cudaEventDestroy(c->copied[i]);
    if (c->copies) cudaStreamDestroy(c->copies);
    watch_close(&c->watch);
    if (c->context.stream) cudaStreamDestroy(c->context.stream);
    free(c);
}

/* The driver starts threads of its own when it is touched first. They take no signals: one that the program waits for in a
 * descriptor would end the process in them. */
static cudaError_t count_devices(int *n)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const cudaError_t status = cudaGetDeviceCount(n);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

int kern_cuda_devices(char *why)
{
    int n = 0;
    const cudaError_t status = count_devices(&n);
    if (status == cudaSuccess && n > 0) return n;
    snprintf(why, 128, "%s", status == cudaSuccess ? "the driver lists none" : cudaGetErrorString(status));
    cudaGetLastError();
    return 0;
}

static int sm_of(int device)
{
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return major * 10 + minor;
}

const char *kern_cuda_numerics(int device)
{
    static const struct { int sm; const char *name; } names[] = {{80, "cuda-sm80"}, {86, "cuda-sm86"}, {87, "cuda-sm87"}, {88, "cuda-sm88"},
                                                                 {89, "cuda-sm89"}, {90, "cuda-sm90"}, {100, "cuda-sm100"}, {103, "cuda-sm103"},
                                                                 {110, "cuda-sm110"}, {120, "cuda-sm120"}, {121, "cuda-sm121"}};
    const int sm = sm_of(device);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].sm == sm) return names[i].name;
    return NULL;
}

/* Up to eight rows share one reading of the weights, and reading takes the time. */
static const double row_cost = 0.03;

static struct kern table_of(struct kern_cuda *c)
{
    struct kern t = {};
    t.name = "cuda";
    t.numerics = c->numerics;
    t.row_cost = row_cost;
    t.ctx = c;
    t.close = close_cuda;
    t.supports = supports;
    t.finish = finish;
    t.measure = measure;
    t.times = times;
    t.read_rate = measured_read_rate;
    t.buffer_alloc = buffer_alloc;
    t.buffer_free = buffer_free;
    t.host_alloc = host_alloc;
    t.host_free = host_free;
    t.to_host = to_host;
    t.to_dev = to_dev;
    t.copy = copy;
    t.act_bytes = act_bytes;
    t.partial_bytes = comm_partial_bytes;
    t.weight_load = weight_load;
    t.weight_free = weight_free;
    t.weight_bytes = weight_bytes;
    t.table_load = table_load;
    t.table_free = table_free;
    t.table_bytes = table_bytes;
    t.begin = begin;
    t.record = record;
    t.record_end = record_end;
    t.embed = embed;
    t.rope_kv_append = rope_kv_append;
    t.attention = attention;
    t.kv_page_bytes = op_kv_page_bytes;
    t.gdn = gdn;
    t.gdn_replay = gdn_replay;
    t.gdn_state_bytes = op_gdn_state_bytes;
    t.gdn_replay_bytes = op_gdn_replay_bytes;
    t.rms_norm = rms_norm;
    t.rms_norm_pair = rms_norm_pair;
    t.linear = linear;
    t.linear_partial = linear_partial;
    t.linear_swiglu = linear_swiglu;
    t.swiglu_scratch_bytes = swiglu_scratch_bytes;
    t.best = best;
    t.best_tokens = best_tokens;
    t.hash_rows = hash_rows;
    return t;
}

static enum rc open_device(struct kern_cuda *c, struct err *e)
{
    struct cudaDeviceProp p;
    char why[128];
    const int n = kern_cuda_devices(why);
    if (!n) return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_gpu", "there is no GPU: %s", why);
    if (c->device < 0 || c->device >= n)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "no_gpu", "there is no GPU %d, of %d", c->device, n);
    cudaError_t status = cudaSetDevice(c->device);
    if (status == cudaSuccess) status = cudaGetDeviceProperties(&p, c->device);
    if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&c->context.stream, cudaStreamNonBlocking);
    if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&c->copies, cudaStreamNonBlocking);
    for (int i = 0; i < STAGES && status == cudaSuccess; i++) status = cudaEventCreateWithFlags(&c->copied[i], cudaEventDisableTiming);
    if (status != cudaSuccess)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "gpu_failed", "GPU %d cannot be used: %s", c->device, cudaGetErrorString(status));
    c->context.sm = p.major * 10 + p.minor;
    c->context.processors = p.multiProcessorCount;
    c->context.pdl = p.major >= 9;
    const char *numerics = kern_cuda_numerics(c->device);
    if (c->context.sm < MIN_SM || !numerics)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "gpu_too_old",
                       "GPU %d (%s) has compute capability %d.%d; bfloat16 matrix instructions need 8.0, and the card must be known", c->device, p.name,
                       p.major, p.minor);
    snprintf(c->numerics, sizeof c->numerics, "%s", numerics);
    return RC_OK;
}

enum rc kern_cuda_open(const struct kern_cuda_options *o, struct kern **out, struct err *e)
{
    *out = NULL;
    struct kern_cuda *c = (struct kern_cuda *)calloc(1, sizeof *c);
    if (!c) return err_no_memory(e);
    c->device = o->device;
    c->graphs = o->graphs;
    enum rc rc = open_device(c, e);
    if (rc == RC_OK && c->context.sm >= 90 && !op_linear_prefill_agrees(&c->context, e)) rc = RC_BAD_INPUT;
    if (rc == RC_OK) rc = weight_loader_open(&c->context, &c->loader, e);
    c->table = table_of(c);
    if (rc == RC_OK) *out = &c->table;
    else close_cuda(&c->table);
    return rc;
}

enum rc kern_cuda_open_comm(struct kern *k, const struct kern_cuda_comm_options *o, struct comm **out, struct err *e)
{
    struct kern_cuda *c = context(k);
    struct comm_cuda_options options = {};
    options.segment = o->segment;
    options.rank = o->rank;
    options.ranks = o->ranks;
    options.device_of_rank = o->device_of_rank;
    options.max_rows = o->max_rows;
    options.width = o->width;
    options.max_gather_floats = o->max_gather_floats;
    if (!sum_path_parse(o->sum_path, &options.path))
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_option", "there is no sum path \"%s\"", o->sum_path);
    const enum rc rc = comm_cuda_open(&c->context, &options, out, e);
    if (rc == RC_OK) c->comm = *out;
    return rc;
}
