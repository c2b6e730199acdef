/* kern_cpu: the CPU backend's context, memory and table.
 *
 * The instruction set is chosen once, at open; after that every call goes through the constant tables of the family
 * files (kern_cpu_linear, kern_cpu_attn, kern_cpu_gdn, kern_cpu_norm), each compiled per instruction set. The name of
 * that set is the numerics name: two sets differ in fused operations and in the order of a few sums.
 *
 * Weights are repacked while loading (kern_cpu_pack.c) and the stored bytes are not needed afterwards; only
 * the embedding table stays where the model file is mapped. The context owns one scratch per thread, all of it
 * allocated at open, and the buffer of group sums, which grows with the widest weight; operations allocate nothing.
 *
 * Threads are OpenMP threads over panels or pieces of attention. Without OpenMP the loops run on the caller. */
#define _GNU_SOURCE
#include "kern_cpu.h"
#include "kern_cpu_impl.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <xxhash.h>

struct isa {
    const char *name;
    const char *numerics;
    const struct cpu_linear_ops *linear;
    const struct cpu_attn_ops *attn;
    const struct cpu_gdn_ops *gdn;
    const struct cpu_norm_ops *norm;
};

/* A piece of memory that weights are laid into one after another, on huge pages where the system gives them: a decode step
 * walks through all weights once, and with pages of 4 KiB it waits for address translation as much as for data. */
struct weight_chunk {
    struct weight_chunk *next;
    char *memory;
    size_t used, n_bytes;
};

struct kern_table {
    struct quant_matrix matrix;
};

struct kern_cpu {
    struct kern table;
    struct weight_chunk *chunks; /* the newest first; given back when the backend is closed */
    const struct isa *isa;
    struct kern_batch batch;
    int threads;
    struct cpu_scratch *scratch; /* one a thread */
    int widest_cols; /* widest weight that what rows become suffices for */
};

/* ---- instruction sets ---- */

/* The narrowest first. */
static const struct isa isas[] = {
    {"generic", "cpu-generic", &kern_cpu_linear_generic, &kern_cpu_attn_generic, &kern_cpu_gdn_generic, &kern_cpu_norm_generic},
#if defined(__x86_64__)
    {"avx2", "cpu-avx2", &kern_cpu_linear_avx2, &kern_cpu_attn_avx2, &kern_cpu_gdn_avx2, &kern_cpu_norm_avx2},
    {"avx512", "cpu-avx512", &kern_cpu_linear_avx512, &kern_cpu_attn_avx512, &kern_cpu_gdn_avx512, &kern_cpu_norm_avx512},
    {"vnni", "cpu-vnni", &kern_cpu_linear_vnni, &kern_cpu_attn_avx512, &kern_cpu_gdn_avx512, &kern_cpu_norm_avx512},
    {"amx", "cpu-amx", &kern_cpu_linear_amx, &kern_cpu_attn_avx512, &kern_cpu_gdn_avx512, &kern_cpu_norm_avx512},
#endif
};
enum { N_ISAS = sizeof isas / sizeof *isas };

static bool machine_has(int i)
{
#if defined(__x86_64__)
    unsigned a, b, c, d; /* F16C, leaf 1 ECX bit 29: not every compiler's builtin knows its name */
    const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    if (i == 1) return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (i == 2)
        return machine_has(1) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (i == 3)
        return machine_has(2) && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
    if (i == 4) {
        enum { AMX = 1 << 22 | 1 << 24 /* bf16, tile */, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
        if (!machine_has(3) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & AMX) != AMX) return false;
        return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; /* tiles must be asked for, once a process */
    }
#endif
    return i == 0;
}

static const struct isa *find_isa(const char *name)
{
    const bool any = !name || !strcmp(name, "auto");
    for (int i = N_ISAS - 1; i >= 0; i--)
        if (machine_has(i) && (any || !strcmp(name, isas[i].name))) return &isas[i];
    return NULL;
}

const char *kern_cpu_numerics(const char *isa)
{
    const struct isa *found = find_isa(isa);
    return found ? found->numerics : NULL;
}

/* ---- shapes ---- */

/* A head's dimension, as scratch has room for it. */
static bool dimension_fits(int n) { return n >= 16 && n <= MAX_HEAD_DIM && n % 16 == 0; }

static enum rc supports(struct kern *k, int width, const struct kern_attn_shape *a, const struct kern_gdn_shape *g, struct err *e)
{
    (void)k;
    if (width < 16 || width % 16)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "rows of %d are no multiple of 16", width);
    if (a && !dimension_fits(a->head_dim))
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "attention heads of %d are no multiple of 16 up to %d", a->head_dim,
                       MAX_HEAD_DIM);
    if (g && (!dimension_fits(g->k_dim) || !dimension_fits(g->v_dim)))
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "Gated DeltaNet heads of %d and %d are no multiples of 16 up to %d",
                       g->k_dim, g->v_dim, MAX_HEAD_DIM);
    return RC_OK;
}

/* ---- memory ---- */

enum { ALIGNMENT = 64, HUGE_PAGE = 2 << 20 };

/* calloc, so that large buffers come from the system untouched and cost nothing until used; these lie on huge pages where the
 * system has them, since keys and values are read in one stream over all layers. The pointer to free lies before the aligned
 * memory. */
static enum rc buffer_alloc(struct kern *k, size_t n_bytes, void **out_dev, struct err *e)
{
    (void)k;
    *out_dev = NULL;
    const size_t alignment = n_bytes >= 2 * HUGE_PAGE ? HUGE_PAGE : ALIGNMENT;
    size_t total;
    char *memory = size_add(n_bytes, 2 * alignment, &total) ? calloc(1, total) : NULL;
    if (!memory) return err_no_memory(e);
    char *aligned = memory + 2 * alignment - ((uintptr_t)memory & (alignment - 1));
    if (alignment == HUGE_PAGE) madvise(aligned, n_bytes, MADV_HUGEPAGE); /* a wish: without it things are only slower */
    memcpy(aligned - sizeof memory, &memory, sizeof memory);
    *out_dev = aligned;
    return RC_OK;
}

static void buffer_free(struct kern *k, void *dev)
{
    (void)k;
    if (!dev) return;
    char *memory;
    memcpy(&memory, (char *)dev - sizeof memory, sizeof memory);
    free(memory);
}

/* Memory for one weight, aligned to 64; lives as long as the backend. */
static enum rc weight_memory(struct kern_cpu *c, size_t n_bytes, void **out, struct err *e)
{
    enum { CHUNK = 16 << 20 };
    struct weight_chunk *chunk = c->chunks;
    n_bytes = (n_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (!chunk || n_bytes > chunk->n_bytes - chunk->used) {
        size_t size = n_bytes > CHUNK ? (n_bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE : CHUNK;
        chunk = calloc(1, sizeof *chunk);
        if (!chunk) return err_no_memory(e);
        *chunk = (struct weight_chunk){.next = c->chunks, .n_bytes = size, .memory = aligned_alloc(HUGE_PAGE, size)};
        if (!chunk->memory) {
            free(chunk);
            return err_no_memory(e);
        }
        madvise(chunk->memory, size, MADV_HUGEPAGE); /* a wish: without it things are only slower */
        c->chunks = chunk;
    }
    *out = memset(chunk->memory + chunk->used, 0, n_bytes);
    chunk->used += n_bytes;
    return RC_OK;
}

static void copy(struct kern *k, void *to, const void *from, size_t n_bytes)
{
    (void)k;
    if (n_bytes) memcpy(to, from, n_bytes);
}

/* ---- weights ---- */

static void weight_free(struct kern *k, struct kern_weight *w)
{
    (void)k; /* its memory stays in the chunk */
    if (!w) return;
    free(w->parts);
    free(w);
}

static size_t weight_bytes(const struct kern_weight *w) { return w->memory_bytes; }

/* What linear makes of rows, for weights of up to so many columns. */
static bool grow_row_work(struct kern_cpu *c, int cols)
{
    if (cols <= c->widest_cols) return true;
    struct cpu_scratch *s = c->scratch;
    const size_t groups = (size_t)cols / CODED_GROUP + 1;
    free(s->group_sums);
    free(s->limbs);
    s->group_sums = malloc(DECODE_BLOCK * groups * sizeof *s->group_sums);
    const size_t limb_rows = c->isa->linear == &kern_cpu_linear_vnni ? SPLIT_ROWS : DECODE_BLOCK;
    s->limbs = aligned_alloc(_Alignof(struct limb_group), limb_rows * groups * sizeof *s->limbs);
    if (!s->group_sums || !s->limbs) return false;
    memset(s->limbs, 0, limb_rows * groups * sizeof *s->limbs);
    if (c->isa->linear == &kern_cpu_linear_amx) {
        const size_t values = SPLIT_ROWS * groups * CODED_GROUP;
        free(s->split);
        free(s->split_sums);
        s->split = aligned_alloc(ALIGNMENT, 3 * values * sizeof *s->split);
        s->split_sums = malloc(SPLIT_ROWS * groups * sizeof *s->split_sums);
        if (!s->split || !s->split_sums) return false;
        memset(s->split, 0, 3 * values * sizeof *s->split);
    }
    c->widest_cols = cols;
    return true;
}

static enum rc weight_load(struct kern *k, const struct kern_weight_part *parts, int n_parts, enum kern_weights how,
                           enum kern_use use, struct kern_weight **out, struct err *e)
{
    struct kern_cpu *c = k->ctx;
    (void)use; /* rows, partials and activations are all float32 rows here */
    *out = NULL;
    struct kern_weight *w = calloc(1, sizeof *w);
    if (!w) return err_no_memory(e);
    enum rc rc = kern_cpu_pack_plan(parts, n_parts, how, w, e);
    if (rc == RC_OK && !grow_row_work(c, w->cols)) rc = err_no_memory(e);
    if (rc == RC_OK) rc = weight_memory(c, w->memory_bytes, &w->memory, e);
    if (rc == RC_OK) rc = kern_cpu_pack_fill(parts, how, w, c->threads, e);
    if (rc == RC_OK)
        *out = w;
    else
        weight_free(k, w);
    return rc;
}

static enum rc table_load(struct kern *k, const struct quant_matrix *m, struct kern_table **out, struct err *e)
{
    (void)k;
    *out = calloc(1, sizeof **out);
    if (!*out) return err_no_memory(e);
    (*out)->matrix = *m;
    return RC_OK;
}

static void table_free(struct kern *k, struct kern_table *t)
{
    (void)k;
    free(t);
}

static size_t table_bytes(const struct kern_table *t)
{
    (void)t;
    return 0; /* read where the file is mapped */
}

/* ---- operations ---- */

static struct kern_cpu *context(const struct kern *k) { return k->ctx; }

static enum rc finish(struct kern *k, struct err *e)
{
    (void)k, (void)e;
    return RC_OK;
}

static void begin(struct kern *k, const struct kern_batch *b) { context(k)->batch = *b; }

static int32_t token_of(const struct kern_batch *b, int row)
{
    const int32_t t = b->tokens[row];
    return t < 0 ? b->tokens_dev[-1 - t] : t;
}

static void embed(struct kern *k, const struct kern_table *t, float *y)
{
    const struct kern_batch *b = &context(k)->batch;
    const size_t cols = (size_t)t->matrix.cols;
    for (int r = 0; r < kern_rows(b->rows); r++)
        quant_matrix_decode(&t->matrix, (uint64_t)token_of(b, r), 0, cols, y + (size_t)r * cols);
}

/* An act is rows of float32. */
static size_t rows_bytes(int rows, int width) { return (size_t)rows * (size_t)width * sizeof(float); }

/* Norms to columns col .. col + n of an act of `width`. */
static void norm_rows(struct kern *k, const float *x, const float *w, int rows, int n, float eps, float *act, int width, int col)
{
    const struct cpu_norm_ops *ops = context(k)->isa->norm;
    for (int r = 0; r < rows; r++) ops->rms_norm(x + (size_t)r * (size_t)n, w, 1, n, eps, act + (size_t)r * (size_t)width + col);
}

static void rms_norm(struct kern *k, const float *x, const float *w, struct kern_split split, int n, float eps, float *y, void *y_act)
{
    const int rows = kern_rows(split);
    if (y) context(k)->isa->norm->rms_norm(x, w, rows, n, eps, y);
    if (y && y_act) memcpy(y_act, y, (size_t)rows * (size_t)n * sizeof *y);
    else if (y_act) norm_rows(k, x, w, rows, n, eps, y_act, n, 0);
}

static void rms_norm_pair(struct kern *k, const float *first, const float *first_w, const float *second, const float *second_w,
                          struct kern_split split, int n, float eps, void *y_act)
{
    norm_rows(k, first, first_w, kern_rows(split), n, eps, y_act, 2 * n, 0);
    norm_rows(k, second, second_w, kern_rows(split), n, eps, y_act, 2 * n, n);
}

static void linear(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act, float *y)
{
    const struct kern_cpu *c = context(k);
    const float *x = x_act;
    const size_t d = (size_t)rows.decode;
    if (rows.decode) c->isa->linear->decode(w, x, rows.decode, y, c->scratch, c->threads);
    if (rows.prefill)
        c->isa->linear->prefill(w, x + d * (size_t)w->cols, rows.prefill, y + d * (size_t)w->rows, c->scratch, c->threads);
}

static void linear_partial(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act, void *y)
{
    linear(k, w, rows, x_act, y);
}

static void linear_swiglu(struct kern *k, const struct kern_weight *w, struct kern_split rows, const void *x_act, void *scratch,
                          void *y_act)
{
    linear(k, w, rows, x_act, scratch);
    context(k)->isa->norm->swiglu(scratch, kern_rows(rows), w->rows / 2, y_act);
}

static size_t swiglu_scratch_bytes(int rows, int f) { return rows_bytes(rows, 2 * f); }

static void rope_kv_append(struct kern *k, const struct kern_attn_shape *s, const struct kern_attn_weights *w,
                           const float *cos_sin, float *qkv, struct kern_kv_layer kv)
{
    const struct kern_cpu *c = context(k);
    const struct cpu_attn_call call = {s, c->batch.segments, c->batch.n_segments, qkv, kv, NULL};
    c->isa->attn->rope_kv_append(&call, w, cos_sin, qkv, c->threads);
}

static void attention(struct kern *k, const struct kern_attn_shape *s, const float *qkv, struct kern_kv_layer kv, void *o_act)
{
    const struct kern_cpu *c = context(k);
    const struct kern_batch *b = &c->batch;
    const int d = b->n_decode_segments, n_prefill = b->n_segments - d;
    const struct cpu_attn_call decode = {s, b->segments, d, qkv, kv, o_act};
    const struct cpu_attn_call prefill = {s, b->segments + d, n_prefill, qkv, kv, o_act};
    if (d) c->isa->attn->decode(&decode, c->scratch, c->threads);
    if (n_prefill) c->isa->attn->prefill(&prefill, c->scratch, c->threads);
}

/* K and V. */
static size_t kv_page_bytes(const struct kern_attn_shape *s)
{
    return 2 * kv_format_bytes(s->kv, s->head_dim) * KV_PAGE_TOKENS * (size_t)s->n_kv_heads;
}

enum { GDN_SEGMENTS = 64 }; /* of one call to the family's functions */

/* Segments first .. first + n of the batch. */
static void gdn_segments(const struct kern_batch *b, struct kern_gdn_memory m, int first, int n, struct cpu_gdn_segment *out)
{
    for (int i = 0; i < n; i++) {
        const struct kern_segment *g = &b->segments[first + i];
        const bool drafts = first + i < b->n_decode_segments && g->rows > 1;
        out[i] = (struct cpu_gdn_segment){
            .row_first = g->row_first,
            .rows = g->rows,
            .position_first = g->position_first,
            .state_dev = m.state_dev + (size_t)g->slot * m.state_stride,
            .replay_dev = drafts ? m.replay_dev + (size_t)g->slot * m.replay_stride : NULL,
        };
    }
}

static void gdn(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, struct kern_gdn_memory m,
                const float *in, void *o_act)
{
    const struct kern_cpu *c = context(k);
    const struct kern_batch *b = &c->batch;
    for (int at = 0, n; at < b->n_segments; at += n) {
        struct cpu_gdn_segment segments[GDN_SEGMENTS];
        const bool decode = at < b->n_decode_segments;
        n = (decode ? b->n_decode_segments : b->n_segments) - at;
        if (n > GDN_SEGMENTS) n = GDN_SEGMENTS;
        gdn_segments(b, m, at, n, segments);
        const struct cpu_gdn_call call = {s, w, segments, n, in, o_act};
        (decode ? c->isa->gdn->decode : c->isa->gdn->prefill)(&call, c->scratch, c->threads);
    }
}

static size_t gdn_state_bytes(const struct kern_gdn_shape *s);
static size_t gdn_replay_bytes(const struct kern_gdn_shape *s);

static void gdn_replay(struct kern *k, const struct kern_gdn_shape *s, const struct kern_gdn_weights *w, int n_layers,
                       struct kern_gdn_memory m, int slot, int rows)
{
    const struct kern_cpu *c = context(k);
    char *state = m.state_dev + (size_t)slot * m.state_stride, *replay = m.replay_dev + (size_t)slot * m.replay_stride;
    for (int l = 0; l < n_layers && rows; l++) {
        const struct cpu_gdn_segment segment = {.rows = rows, .state_dev = state + (size_t)l * gdn_state_bytes(s)};
        const struct cpu_gdn_call call = {s, &w[l], &segment, 1, NULL, NULL};
        c->isa->gdn->replay(&call, replay + (size_t)l * gdn_replay_bytes(s), c->scratch, c->threads);
    }
}

static size_t floats_bytes(size_t n) { return (n * sizeof(float) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* The matrices and the raw rows that the next row's convolution reaches back to. */
static size_t gdn_state_bytes(const struct kern_gdn_shape *s)
{
    const size_t rows = (size_t)(s->conv_width - 1) * (size_t)kern_gdn_channels(s);
    return floats_bytes((size_t)s->v_heads * (size_t)(s->k_dim * s->v_dim) + rows);
}

/* Channels, b and a of each draft. */
static size_t gdn_replay_bytes(const struct kern_gdn_shape *s)
{
    return floats_bytes(KERN_MAX_DRAFTS * (size_t)(kern_gdn_channels(s) + 2 * s->v_heads));
}

/* 32 logits of one word of the mask. */
static void best_of_word(const float *x, uint32_t allowed, int32_t first, struct kern_best *best)
{
    for (int i = 0; i < 32; i++) {
        if (!(allowed >> i & 1)) continue;
        if (!(x[i] - x[i] == 0)) best->id = -1; /* not finite */
        else if (best->id >= 0 && x[i] > best->logit) *best = (struct kern_best){x[i], first + i};
    }
}

static void best(struct kern *k, const float *logits, int rows, int n, int first, const uint32_t *allowed, struct kern_best *out)
{
    (void)k;
    for (int r = 0; r < rows; r++) {
        const float *x = logits + (size_t)r * (size_t)n;
        struct kern_best b = {-INFINITY, KERN_NO_ID};
        for (int at = 0, here; at < n; at += here) {
            const int id = first + at, bit = id % 32;
            float word[32] = {0};
            here = n - at < 32 - bit ? n - at : 32 - bit;
            const uint32_t inside = (here == 32 ? UINT32_MAX : ((UINT32_C(1) << here) - 1)) << bit;
            memcpy(word + bit, x + at, (size_t)here * sizeof *x);
            best_of_word(word, allowed[id / 32] & inside, id - bit, &b);
        }
        out[r] = b;
    }
}

static void best_tokens(struct kern *k, const struct kern_best *best_dev, int rows, int ranks, int32_t *tokens_dev, int32_t *tokens)
{
    (void)k;
    for (int i = 0; i < rows; i++) {
        const int32_t id = kern_best_of(best_dev + (size_t)i * (size_t)ranks, ranks).id;
        tokens_dev[i] = tokens[i] = id < 0 || id == KERN_NO_ID ? 0 : id;
    }
}

static void hash_rows(struct kern *k, const float *x, int rows, int n, uint64_t *out)
{
    (void)k;
    for (int r = 0; r < rows; r++) out[r] = XXH3_64bits(x + (size_t)r * (size_t)n, (size_t)n * sizeof *x);
}

/* ---- open and close ---- */

/* Measured with AVX-512 on one core: steps of 1, 2, 4, 8 rows take 8.3, 9.5, 13.7, 24.3 ms with 135 M parameters in Q4_1 and
 * 0.73, 0.86, 1.26, 2.23 ms with 10 M in BF16, hence 0.28 and 0.35. */
static const double row_cost = 0.3;

static void close_cpu(struct kern *k)
{
    if (!k) return;
    struct kern_cpu *c = k->ctx;
    while (c->chunks) {
        struct weight_chunk *chunk = c->chunks;
        c->chunks = chunk->next;
        free(chunk->memory);
        free(chunk);
    }
    free(c->scratch->group_sums);
    free(c->scratch->limbs);
    free(c->scratch->split);
    free(c->scratch->split_sums);
    free(c->scratch);
    free(c);
}

enum rc kern_cpu_open(const char *isa, int threads, struct kern **out, struct err *e)
{
    *out = NULL;
    enum { MAX_THREADS = 1024 };
    const struct isa *found = find_isa(isa);
    if (!found)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "isa_unavailable", "this machine has no instruction set \"%s\"",
                       isa);
    if (threads < 1 || threads > MAX_THREADS)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_threads", "%d threads, not 1 to %d", threads, MAX_THREADS);
    struct kern_cpu *c = calloc(1, sizeof *c);
    if (!c) return err_no_memory(e);
    c->isa = found;
    c->threads = threads;
    c->scratch = aligned_alloc(ALIGNMENT, (size_t)threads * sizeof *c->scratch);
    if (!c->scratch) {
        free(c);
        return err_no_memory(e);
    }
    c->scratch->group_sums = NULL;
    c->scratch->limbs = NULL;
    c->scratch->split = NULL;
    c->scratch->split_sums = NULL;
    c->table = (struct kern){.name = "cpu",
                             .numerics = found->numerics,
                             .row_cost = row_cost,
                             .ctx = c,
                             .close = close_cpu,
                             .supports = supports,
                             .finish = finish,
                             .buffer_alloc = buffer_alloc,
                             .buffer_free = buffer_free,
                             .host_alloc = buffer_alloc,
                             .host_free = buffer_free,
                             .to_host = copy,
                             .to_dev = copy,
                             .copy = copy,
                             .act_bytes = rows_bytes,
                             .partial_bytes = rows_bytes,
                             .weight_load = weight_load,
                             .weight_free = weight_free,
                             .weight_bytes = weight_bytes,
                             .table_load = table_load,
                             .table_free = table_free,
                             .table_bytes = table_bytes,
                             .begin = begin,
                             .embed = embed,
                             .rope_kv_append = rope_kv_append,
                             .attention = attention,
                             .kv_page_bytes = kv_page_bytes,
                             .gdn = gdn,
                             .gdn_replay = gdn_replay,
                             .gdn_state_bytes = gdn_state_bytes,
                             .gdn_replay_bytes = gdn_replay_bytes,
                             .rms_norm = rms_norm,
                             .rms_norm_pair = rms_norm_pair,
                             .linear = linear,
                             .linear_partial = linear_partial,
                             .linear_swiglu = linear_swiglu,
                             .swiglu_scratch_bytes = swiglu_scratch_bytes,
                             .best = best,
                             .best_tokens = best_tokens,
                             .hash_rows = hash_rows};
    *out = &c->table;
    return RC_OK;
}
