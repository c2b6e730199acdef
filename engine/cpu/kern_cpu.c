/* kern_cpu: the CPU backend's context, memory and table.
 *
 * The instruction set is chosen once, at open; after that every call goes through the constant tables of the family
 * files (kern_cpu_linear, kern_cpu_attn, kern_cpu_norm), each compiled per instruction set. The name of that set is the
 * numerics name: two sets differ in fused operations and in the order of a few sums.
 *
 * Weights are repacked while loading (layout in kern_cpu_impl.h) and the stored bytes are not needed afterwards; only
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
#include <inttypes.h>
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
    const struct cpu_norm_ops *norm;
};

/* A piece of memory that weights are laid into one after another, on huge pages where the system gives them: a decode step
 * walks through all weights once, and with pages of 4 KiB it waits for address translation as much as for data. */
struct weight_chunk {
    struct weight_chunk *next;
    char *memory;
    size_t used, n_bytes;
};

struct kern_cpu {
    struct kern table;
    struct weight_chunk *chunks; /* the newest first; given back when the backend is closed */
    const struct isa *isa;
    int threads;
    struct cpu_scratch *scratch; /* one a thread */
    float *group_sums;
    int group_sums_cols; /* widest weight they suffice for */
};

/* ---- instruction sets ---- */

/* The narrowest first. */
static const struct isa isas[] = {
    {"generic", "cpu-generic", &kern_cpu_linear_generic, &kern_cpu_attn_generic, &kern_cpu_norm_generic},
#if defined(__x86_64__)
    {"avx2", "cpu-avx2", &kern_cpu_linear_avx2, &kern_cpu_attn_avx2, &kern_cpu_norm_avx2},
    {"avx512", "cpu-avx512", &kern_cpu_linear_avx512, &kern_cpu_attn_avx512, &kern_cpu_norm_avx512},
    {"amx", "cpu-amx", &kern_cpu_linear_amx, &kern_cpu_attn_avx512, &kern_cpu_norm_avx512},
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
    if (i == 3) {
        enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AVX512_BF16 = 1 << 5, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
        if (!machine_has(2) || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
        if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & AVX512_BF16)) return false;
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

/* ---- memory ---- */

enum { ALIGNMENT = 64 };

/* calloc, so that large buffers come from the system untouched and cost nothing until used. The pointer to free lies
 * before the aligned memory. */
static enum rc buffer_alloc(struct kern *k, size_t n_bytes, void **out_dev, struct err *e)
{
    (void)k;
    *out_dev = NULL;
    size_t total;
    char *memory = size_add(n_bytes, 2 * ALIGNMENT, &total) ? calloc(1, total) : NULL;
    if (!memory) return err_no_memory(e);
    char *aligned = memory + 2 * ALIGNMENT - ((uintptr_t)memory & (ALIGNMENT - 1));
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
    enum { HUGE_PAGE = 2 << 20, CHUNK = 16 << 20 };
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

/* ---- packing weights ---- */

/* Whether all mins of a format with block-wise F16 scales are F16 values too. -8 d of Q4_0 is one unless d is huge. */
static bool mins_fit_f16(const struct kern_weight_part *p)
{
    if (p->format != QUANT_Q4_0) return true;
    enum { BLOCK = 32 };
    const size_t block_bytes = quant_block_bytes(p->format), row_bytes = (size_t)p->tensor_cols / BLOCK * block_bytes;
    for (uint64_t r = p->row_first; r < p->row_first + p->rows; r++)
        for (uint64_t k = p->col_first / BLOCK; k < (p->col_first + p->cols) / BLOCK; k++) {
            int8_t codes[BLOCK];
            float scale, min;
            quant_decode_codes(p->format, (const uint8_t *)p->bytes + r * row_bytes + k * block_bytes, BLOCK, codes,
                               &scale, &min);
            if (quant_f16_to_f32(quant_f32_to_f16(min)) != min) return false;
        }
    return true;
}

/* How one format is kept. Formats with a fixed offset and bytes as codes are stored with the offset subtracted, so they
 * need no mins; four-bit codes stay unsigned and always have mins. */
static void choose_layout(const struct kern_weight_part *from, struct cpu_part *p)
{
    p->group = 32;
    switch (from->format) {
    case QUANT_F32: p->codes = CODES_F32; return;
    case QUANT_F16: p->codes = CODES_F16; return;
    case QUANT_BF16: p->codes = CODES_BF16; return;
    case QUANT_Q4_0:
    case QUANT_Q4_1:
    case QUANT_Q4_K:
        p->codes = CODES_4;
        p->mins = true;
        break;
    case QUANT_Q5_1:
    case QUANT_Q5_K:
        p->codes = CODES_8;
        p->mins = true;
        break;
    default: p->codes = CODES_8; break;
    }
    p->group = (int)quant_group_values(from->format);
    /* Scales of K-quants are products of two factors and need float32. */
    p->scales = quant_block_values(from->format) == 32 && mins_fit_f16(from) ? SCALES_F16 : SCALES_F32;
}

static int code_offset(enum quant_format f) { return f == QUANT_Q5_0 ? 16 : f == QUANT_Q6_K ? 32 : 0; }

static size_t column_bytes(enum cpu_codes codes)
{
    const size_t bytes[] = {[CODES_4] = 8, [CODES_8] = 16, [CODES_F16] = 32, [CODES_BF16] = 32, [CODES_F32] = 64};
    return bytes[codes];
}

static enum rc bad_shape(const struct kern_weight_part *p, const char *what, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape",
                   "cpu backend: %s: %s rows %" PRIu64 "+%" PRIu64 ", columns %" PRIu64 "+%" PRIu64 " of %" PRIu64,
                   what, quant_name(p->format), p->row_first, p->rows, p->col_first, p->cols, p->tensor_cols);
}

static enum rc check_part(const struct kern_weight_part *p, uint64_t cols, struct err *e)
{
    size_t row_bytes;
    const uint64_t group = quant_has_codes(p->format) ? quant_group_values(p->format) : 1;
    if (p->cols != cols) return bad_shape(p, "stacked parts differ in columns", e);
    if (!p->cols || p->cols > MAX_COLS) return bad_shape(p, "column count", e);
    if (!p->rows || p->rows > MAX_ROWS || p->row_first > UINT64_MAX - p->rows) return bad_shape(p, "row count", e);
    if (p->col_first > p->tensor_cols || p->cols > p->tensor_cols - p->col_first)
        return bad_shape(p, "column range", e);
    if (p->col_first % group || p->cols % group) return bad_shape(p, "columns cut a group", e);
    if (!quant_row_bytes(p->format, p->tensor_cols, &row_bytes)) return bad_shape(p, "row length", e);
    return RC_OK;
}

/* One stored row's range of columns, decoded to codes. */
struct row_codes {
    int8_t *codes;
    float *scales, *mins;
};

static void write_f16(uint8_t *at, int lane, float value)
{
    const uint16_t half = quant_f32_to_f16(value);
    memcpy(at + 2 * lane, &half, sizeof half);
}

static void pack_row_codes(const struct cpu_part *p, int offset, struct row_codes from, int cols, int lane,
                           uint8_t *panel)
{
    const size_t scale_bytes = p->scales == SCALES_F16 ? 2 * PANEL_ROWS : 4 * PANEL_ROWS;
    for (int k = 0; k < cols; k += p->group, panel += p->group_bytes) {
        uint8_t *at = panel;
        if (p->scales == SCALES_F16)
            write_f16(at, lane, *from.scales++);
        else
            memcpy(at + 4 * lane, from.scales++, sizeof(float));
        at += scale_bytes;
        if (p->mins) {
            if (p->scales == SCALES_F16)
                write_f16(at, lane, *from.mins++);
            else
                memcpy(at + 4 * lane, from.mins++, sizeof(float));
            at += scale_bytes;
        }
        for (int j = 0; j < p->group; j++) {
            const int code = *from.codes++ - offset;
            if (p->codes == CODES_4)
                at[j / 8 * 64 + lane * 4 + j % 8 / 2] |= (uint8_t)((unsigned)code << (j % 2 * 4));
            else
                at[j * PANEL_ROWS + lane] = (uint8_t)code;
        }
    }
}

static void pack_row_plain(const struct cpu_part *p, const uint8_t *row, int cols, int lane, uint8_t *panel)
{
    const size_t value_bytes = p->codes == CODES_F32 ? 4 : 2;
    for (int k = 0; k < cols; k++)
        memcpy(panel + ((size_t)k * PANEL_ROWS + (size_t)lane) * value_bytes, row + (size_t)k * value_bytes,
               value_bytes);
}

/* Fills the part's (zeroed) panels. work holds the codes of a widened row range. */
static void pack_part(const struct kern_weight_part *from, const struct cpu_part *p, struct row_codes work, uint8_t *to)
{
    const size_t block = quant_block_values(from->format), block_bytes = quant_block_bytes(from->format);
    size_t row_bytes = 0;
    quant_row_bytes(from->format, from->tensor_cols, &row_bytes);
    const size_t first_block = (size_t)from->col_first / block, inside = (size_t)from->col_first % block;
    const size_t blocks = (inside + (size_t)from->cols + block - 1) / block;
    const int cols = (int)from->cols;
    for (int r = 0; r < p->rows; r++) {
        const uint8_t *row = (const uint8_t *)from->bytes + ((size_t)from->row_first + (size_t)r) * row_bytes;
        uint8_t *panel = to + (size_t)(r / PANEL_ROWS) * p->panel_bytes;
        row += first_block * block_bytes;
        if (p->scales == SCALES_NONE) {
            pack_row_plain(p, row, cols, r % PANEL_ROWS, panel);
            continue;
        }
        quant_decode_codes(from->format, row, blocks * block, work.codes, work.scales, work.mins);
        const size_t skipped = inside / (size_t)p->group;
        struct row_codes range = {work.codes + inside, work.scales + skipped, work.mins + skipped};
        pack_row_codes(p, code_offset(from->format), range, cols, r % PANEL_ROWS, panel);
    }
}

static void lay_out(const struct kern_weight_part *from, int y_first, struct cpu_part *p)
{
    choose_layout(from, p);
    const size_t cols = (size_t)from->cols, group = (size_t)p->group;
    const size_t scale_bytes = p->scales == SCALES_NONE ? 0 : PANEL_ROWS * (p->scales == SCALES_F16 ? 2 : 4);
    p->rows = (int)from->rows;
    p->panels = (p->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    p->y_first = y_first;
    p->group_bytes = scale_bytes * (p->mins ? 2 : 1) + group * column_bytes(p->codes);
    p->panel_bytes = p->scales == SCALES_NONE ? cols * column_bytes(p->codes) : cols / group * p->group_bytes;
    p->panel_bytes = (p->panel_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void weight_free(struct kern *k, struct kern_weight *w)
{
    (void)k; /* its memory stays in the chunk */
    if (!w) return;
    free(w->parts);
    free(w);
}

static size_t weight_bytes(const struct kern_weight *w) { return w->memory_bytes; }

static enum rc plan_weight(const struct kern_weight_part *parts, int n_parts, struct kern_weight *w, struct err *e)
{
    if (n_parts < 1)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "unsupported_shape", "cpu backend: a weight of no parts");
    for (int i = 0; i < n_parts; i++) {
        enum rc rc = check_part(&parts[i], parts[0].cols, e);
        if (rc != RC_OK) return rc;
        if (parts[i].rows > (uint64_t)(MAX_ROWS - w->rows)) return bad_shape(&parts[i], "row count", e);
        struct cpu_part *p = &w->parts[i];
        lay_out(&parts[i], w->rows, p);
        w->rows += p->rows;
        w->any_mins = w->any_mins || p->mins;
        size_t bytes;
        if (!size_mul((size_t)p->panels, p->panel_bytes, &bytes) || !size_add(w->memory_bytes, bytes, &w->memory_bytes))
            return bad_shape(&parts[i], "size", e);
    }
    w->cols = (int)parts[0].cols;
    w->n_parts = n_parts;
    return RC_OK;
}

static bool grow_group_sums(struct kern_cpu *c, int cols)
{
    if (cols <= c->group_sums_cols) return true;
    float *sums = realloc(c->group_sums, ((size_t)cols / 32 + 1) * DECODE_BLOCK * sizeof *sums);
    if (!sums) return false;
    c->group_sums = sums;
    if (c->isa->linear == &kern_cpu_linear_amx) {
        const size_t rows = AMX_ROWS, padded = ((size_t)cols + 63) / 64 * 64;
        free(c->scratch->split);
        free(c->scratch->split_sums);
        c->scratch->split = aligned_alloc(ALIGNMENT, 3 * rows * padded * sizeof *c->scratch->split);
        c->scratch->split_sums = malloc(rows * (padded / 32) * sizeof *c->scratch->split_sums);
        if (!c->scratch->split || !c->scratch->split_sums) return false;
    }
    c->group_sums_cols = cols;
    return true;
}

static enum rc weight_load(struct kern *k, const struct kern_weight_part *parts, int n_parts, struct kern_weight **out,
                           struct err *e)
{
    *out = NULL;
    enum { WIDEST_BLOCK = 256, NARROWEST_GROUP = 16 };
    enum rc rc = RC_OK;
    struct row_codes work = {0};
    struct kern_weight *w = calloc(1, sizeof *w);
    if (w && n_parts > 0) w->parts = calloc((size_t)n_parts, sizeof *w->parts);
    if (!w || (n_parts > 0 && !w->parts)) {
        rc = err_no_memory(e);
        goto done;
    }
    rc = plan_weight(parts, n_parts, w, e);
    if (rc != RC_OK) goto done;
    const size_t widened = (size_t)w->cols + 2 * WIDEST_BLOCK;
    work.codes = malloc(widened);
    work.scales = malloc(widened / NARROWEST_GROUP * sizeof(float));
    work.mins = malloc(widened / NARROWEST_GROUP * sizeof(float));
    if (!work.codes || !work.scales || !work.mins || !grow_group_sums(k->ctx, w->cols)) {
        rc = err_no_memory(e);
        goto done;
    }
    rc = weight_memory(k->ctx, w->memory_bytes, &w->memory, e);
    if (rc != RC_OK) goto done;
    uint8_t *to = w->memory;
    for (int i = 0; i < n_parts; i++) {
        w->parts[i].bytes = to;
        pack_part(&parts[i], &w->parts[i], work, to);
        to += (size_t)w->parts[i].panels * w->parts[i].panel_bytes;
    }
    *out = w;
    w = NULL;
done:
    free(work.mins);
    free(work.scales);
    free(work.codes);
    weight_free(k, w);
    return rc;
}

/* ---- operations ---- */

static void embed(struct kern *k, const struct kern_weight_part *table, const int32_t *ids, int rows, float *y)
{
    (void)k;
    enum { WIDEST_BLOCK = 256 };
    const size_t block = quant_block_values(table->format), block_bytes = quant_block_bytes(table->format);
    const size_t first = (size_t)table->col_first, end = first + (size_t)table->cols;
    size_t row_bytes = 0;
    quant_row_bytes(table->format, table->tensor_cols, &row_bytes);
    for (int r = 0; r < rows; r++, y += table->cols) {
        const uint8_t *row = (const uint8_t *)table->bytes + ((size_t)table->row_first + (size_t)ids[r]) * row_bytes;
        if (first % block == 0 && end % block == 0) {
            quant_decode(table->format, row + first / block * block_bytes, end - first, y);
            continue;
        }
        for (size_t b = first / block; b * block < end; b++) { /* a range that cuts blocks, one block at a time */
            float values[WIDEST_BLOCK];
            quant_decode(table->format, row + b * block_bytes, block, values);
            const size_t from = b * block < first ? first : b * block,
                         to = (b + 1) * block > end ? end : (b + 1) * block;
            memcpy(y + (from - first), values + (from - b * block), (to - from) * sizeof *y);
        }
    }
}

static const struct kern_cpu *context(const struct kern *k) { return k->ctx; }

static void rms_norm(struct kern *k, const float *x, const float *w, int rows, int n, float eps, float *y)
{
    context(k)->isa->norm->rms_norm(x, w, rows, n, eps, y);
}

static void linear(struct kern *k, const struct kern_weight *w, enum kern_provenance p, const float *x, int rows,
                   float *y)
{
    const struct kern_cpu *c = context(k);
    if (p == KERN_DECODE)
        c->isa->linear->decode(w, x, rows, y, c->group_sums, c->threads);
    else
        c->isa->linear->prefill(w, x, rows, y, c->scratch, c->threads);
}

static void rope_kv_append(struct kern *k, const struct kern_attn_shape *s, const struct kern_segment *segments,
                           int n_segments, const float *cos_sin, float *qkv, struct kern_kv_layer kv)
{
    const struct cpu_attn_call call = {s, segments, n_segments, qkv, kv, NULL};
    context(k)->isa->attn->rope_kv_append(&call, cos_sin, qkv, context(k)->threads);
}

static void attention(struct kern *k, const struct kern_attn_shape *s, enum kern_provenance p,
                      const struct kern_segment *segments, int n_segments, const float *qkv, struct kern_kv_layer kv,
                      float *o)
{
    const struct kern_cpu *c = context(k);
    const struct cpu_attn_call call = {s, segments, n_segments, qkv, kv, o};
    if (p == KERN_DECODE)
        c->isa->attn->decode(&call, c->scratch, c->threads);
    else
        c->isa->attn->prefill(&call, c->scratch, c->threads);
}

/* K and V. */
static size_t kv_page_bytes(const struct kern_attn_shape *s)
{
    return 2 * kv_format_bytes(s->kv) * KV_PAGE_TOKENS * (size_t)s->n_kv_heads * (size_t)s->head_dim;
}

static void swiglu(struct kern *k, const float *gate_up, int rows, int f, float *y)
{
    context(k)->isa->norm->swiglu(gate_up, rows, f, y);
}

static void hash_rows(struct kern *k, const float *x, int rows, int n, uint64_t *out_host)
{
    (void)k;
    for (int r = 0; r < rows; r++) out_host[r] = XXH3_64bits(x + (size_t)r * (size_t)n, (size_t)n * sizeof *x);
}

/* ---- open and close ---- */

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
    free(c->group_sums);
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
    c->scratch->split = NULL;
    c->scratch->split_sums = NULL;
    c->table = (struct kern){.name = "cpu",
                             .numerics = found->numerics,
                             .ctx = c,
                             .close = close_cpu,
                             .buffer_alloc = buffer_alloc,
                             .buffer_free = buffer_free,
                             .to_host = copy,
                             .to_dev = copy,
                             .copy = copy,
                             .weight_load = weight_load,
                             .weight_free = weight_free,
                             .weight_bytes = weight_bytes,
                             .embed = embed,
                             .rms_norm = rms_norm,
                             .linear = linear,
                             .rope_kv_append = rope_kv_append,
                             .attention = attention,
                             .kv_page_bytes = kv_page_bytes,
                             .swiglu = swiglu,
                             .hash_rows = hash_rows};
    *out = &c->table;
    return RC_OK;
}
