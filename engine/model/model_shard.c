/* model_shard: shard.json, then two safetensors files whose blobs their own metadata explains.
 *
 * A blob is bytes in the source's format; what they are is told by JSON in the file's header, one text under one key, and
 * everything in it is checked against the blobs before a view is made: formats, shapes, spans in order and inside the matrix
 * and on the edges that quant_window_step wants, grids of the right size, every byte of every blob accounted for. So a view is
 * as safe to read as one of a file that was never cut, at the places that its window holds; whether these are the rows and
 * columns that the rank needs is asked where tensors are bound.
 *
 * Files of one cut know each other by the source's digest and the partition's. Contents are checked by SHA-256 when the digest
 * is asked for, like any model's. */
#define _GNU_SOURCE
#include "model_shard.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "json_text.h"

enum { MAX_INDEX_BYTES = 1 << 16, MAX_METADATA_BYTES = 100000000, MAX_VALUES = 1 << 22, MAX_DEPTH = 8, MAX_SPANS = 4096 };

static enum rc fail(const char *source, struct err *e, const char *code, const char *format, ...) __attribute__((format(printf, 4, 5)));
static enum rc fail(const char *source, struct err *e, const char *code, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++) /* names and words of the file may be anything */
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s", text);
    err_place(e, source, 0, 0, 0);
    return rc;
}

void model_shard_file_name(int rank, int ranks, char out[SHARD_NAME_BYTES])
{
    if (rank == SHARD_NO_RANK) snprintf(out, SHARD_NAME_BYTES, "%s", SHARD_COMMON_NAME);
    else snprintf(out, SHARD_NAME_BYTES, "rank-%d-of-%d.safetensors", rank, ranks);
}

const struct shard_file *model_shard_file(const struct model_shard *s, const char *name)
{
    for (int i = 0; i < s->n_files; i++)
        if (!strcmp(s->files[i].name, name)) return &s->files[i];
    return NULL;
}

static char *path_in(const char *folder, const char *name)
{
    char *path = NULL;
    const size_t len = strlen(folder);
    return asprintf(&path, "%s%s%s", folder, len && folder[len - 1] == '/' ? "" : "/", name) < 0 ? NULL : path;
}

bool model_shard_is_at(const char *folder)
{
    char *path = path_in(folder, SHARD_INDEX_NAME);
    const bool found = path && access(path, F_OK) == 0;
    free(path);
    return found;
}

/* Memory that lives as long as the shard. */
static void *keep(struct model_shard *s, size_t n_bytes)
{
    if (s->n_memory == s->cap_memory) {
        const size_t cap = s->cap_memory ? 2 * s->cap_memory : 64;
        void **grown = realloc(s->memory, cap * sizeof *grown);
        if (!grown) return NULL;
        s->memory = grown;
        s->cap_memory = cap;
    }
    void *p = calloc(1, n_bytes);
    if (p) s->memory[s->n_memory++] = p;
    return p;
}

/* ---- fields ---- */

static bool natural(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static bool is_hex(const char *text, size_t len) { return text && strlen(text) == len && strspn(text, "0123456789abcdef") == len; }

static bool read_hex(const json_t *value, char out[65])
{
    const char *text = json_string_value(value);
    if (!is_hex(text, 64)) return false;
    memcpy(out, text, 65);
    return true;
}

static bool read_hash(const json_t *value, uint64_t *out)
{
    const char *text = json_string_value(value);
    if (!is_hex(text, 16)) return false;
    *out = strtoull(text, NULL, 16);
    return true;
}

/* "version", "source_digest", "partition" and "ranks", which every part of a cut has. */
static enum rc read_identity(const json_t *o, const char *source, struct shard_identity *out, struct err *e)
{
    uint64_t version, ranks;
    if (!natural(json_object_get(o, "version"), &version)) return fail(source, e, "shard_bad", "version is missing or no number");
    if (version != SHARD_VERSION)
        return fail(source, e, "shard_version", "it has version %" PRIu64 ", this program reads %d", version, SHARD_VERSION);
    if (!natural(json_object_get(o, "ranks"), &ranks) || ranks < 1 || ranks > MAX_RANKS)
        return fail(source, e, "shard_bad", "ranks is no number from 1 to %d", MAX_RANKS);
    if (!read_hex(json_object_get(o, "source_digest"), out->source_digest))
        return fail(source, e, "shard_bad", "source_digest is no SHA-256");
    if (!read_hash(json_object_get(o, "partition"), &out->partition))
        return fail(source, e, "shard_bad", "partition is no 64-bit hash");
    out->ranks = (int)ranks;
    return RC_OK;
}

/* ---- shard.json ---- */

static bool plain_name(const char *name)
{
    const size_t len = name ? strlen(name) : 0;
    if (!len || len >= SHARD_NAME_BYTES || name[0] == '.') return false;
    return strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_-.") == len;
}

static enum rc read_files(const json_t *list, const char *source, struct model_shard *s, struct err *e)
{
    const size_t n = json_array_size(list);
    if (!n || n > SHARD_MAX_FILES) return fail(source, e, "shard_bad", "files is no list of 1 to %d files", SHARD_MAX_FILES);
    for (size_t i = 0; i < n; i++) {
        const json_t *entry = json_array_get(list, i);
        struct shard_file *f = &s->files[s->n_files];
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (!plain_name(name)) return fail(source, e, "shard_bad", "file %zu has no plain name", i);
        if (model_shard_file(s, name)) return fail(source, e, "shard_bad", "file %s is listed twice", name);
        if (!natural(json_object_get(entry, "bytes"), &f->n_bytes) || !read_hex(json_object_get(entry, "sha256"), f->sha256))
            return fail(source, e, "shard_bad", "file %s has no size or no SHA-256", name);
        snprintf(f->name, sizeof f->name, "%s", name);
        s->n_files++;
    }
    return RC_OK;
}

static enum rc read_index(const json_t *o, const char *source, struct model_shard *io, struct err *e)
{
    const char *format = json_string_value(json_object_get(o, "format")), *layout = json_string_value(json_object_get(o, "layout"));
    const char *name = json_string_value(json_object_get(o, "source"));
    if (!format || strcmp(format, "tandem shard")) return fail(source, e, "shard_bad", "format is not \"tandem shard\"");
    enum rc rc = read_identity(o, source, &io->identity, e);
    if (rc != RC_OK) return rc;
    if (!layout || (strcmp(layout, "hf") && strcmp(layout, "gguf")))
        return fail(source, e, "shard_bad", "layout is neither \"hf\" nor \"gguf\"");
    if (!name || !json_is_boolean(json_object_get(o, "synthetic")))
        return fail(source, e, "shard_bad", "source or synthetic is missing");
    io->layout = strcmp(layout, "hf") ? MODEL_LAYOUT_GGUF : MODEL_LAYOUT_HF;
    io->synthetic = json_is_true(json_object_get(o, "synthetic"));
    snprintf(io->source_name, sizeof io->source_name, "%s", name);
    return read_files(json_object_get(o, "files"), source, io, e);
}

enum rc model_shard_read_index(const char *text, size_t len, const char *source, struct model_shard *io, struct err *e)
{
    static const struct json_limits limits = {MAX_INDEX_BYTES, 1024, 4};
    json_t *o = NULL;
    enum rc rc = json_text_parse(text, len, limits, source, 0, &o, e);
    if (rc == RC_OK) rc = read_index(o, source, io, e);
    json_decref(o);
    return rc;
}

/* ---- tensors ---- */

/* One tensor's entry while it is read. */
struct entry {
    const json_t *o;
    const char *name, *source;
    const struct stored_tensor *codes, *scales; /* blobs; scales NULL: there is none */
    struct model_shard *shard;
    struct err *e;
};

static enum rc bad(const struct entry *t, const char *what)
{
    return fail(t->source, t->e, "shard_bad_tensor", "tensor %.100s: %s", t->name, what);
}

static bool read_format(const json_t *value, enum quant_format *out)
{
    const char *text = json_string_value(value);
    for (int f = 0; text && f < QUANT_FORMATS; f++)
        if (!strcmp(text, quant_name((enum quant_format)f))) {
            *out = (enum quant_format)f;
            return true;
        }
    return false;
}

/* Ascending spans that do not touch, inside 0..whole, on multiples of step or at the end. */
static bool read_spans(struct model_shard *s, const json_t *list, uint64_t whole, uint64_t step, const struct quant_span **out, int *out_n,
                       uint64_t *total)
{
    const size_t n = json_array_size(list);
    uint64_t end = 0;
    *out_n = 0;
    *total = 0;
    if (!json_is_array(list) || n > MAX_SPANS) return false;
    struct quant_span *spans = keep(s, (n + 1) * sizeof *spans);
    if (!spans) return false;
    for (size_t i = 0; i < n; i++) {
        const json_t *pair = json_array_get(list, i);
        struct quant_span *p = &spans[i];
        if (json_array_size(pair) != 2 || !natural(json_array_get(pair, 0), &p->first) || !natural(json_array_get(pair, 1), &p->count))
            return false;
        if (!p->count || p->first >= whole || p->count > whole - p->first || (i && p->first <= end)) return false;
        end = p->first + p->count;
        if (p->first % step || (end % step && end != whole)) return false;
        *total += p->count;
    }
    *out = spans;
    *out_n = (int)n;
    return true;
}

static enum rc read_shape(const struct entry *t, struct tensor_view *v)
{
    const json_t *dims = json_object_get(t->o, "dims");
    const size_t n = json_array_size(dims);
    size_t row_bytes;
    uint64_t rows = 1;
    if (!read_format(json_object_get(t->o, "format"), &v->format)) return bad(t, "its format is not known");
    if (n < 1 || n > MODEL_DIMS) return bad(t, "dims are no list of 1 to 4 numbers");
    for (size_t i = 0; i < MODEL_DIMS; i++) v->dims[i] = 1;
    for (size_t i = 0; i < n; i++)
        if (!natural(json_array_get(dims, i), &v->dims[i]) || !v->dims[i]) return bad(t, "a dimension is no number above 0");
    for (size_t i = 1; i < n; i++)
        if (__builtin_mul_overflow(rows, v->dims[i], &rows)) return bad(t, "its dimensions multiply beyond 64 bits");
    if (!quant_row_bytes(v->format, v->dims[0], &row_bytes)) return bad(t, "its rows are no whole blocks");
    if (!size_mul((size_t)rows, row_bytes, &v->n_bytes) || v->n_bytes > INT64_MAX) return bad(t, "it is larger than memory can be");
    v->n_dims = (int)n;
    v->matrix = (struct quant_matrix){.format = v->format, .rows = rows, .cols = v->dims[0], .global = 1};
    return RC_OK;
}

static enum rc read_window(const struct entry *t, struct tensor_view *v)
{
    const json_t *rows = json_object_get(t->o, "rows"), *cols = json_object_get(t->o, "cols");
    if (!rows && !cols) return RC_OK;
    struct quant_window *w = keep(t->shard, sizeof *w);
    if (!w) return err_no_memory(t->e);
    if (!read_spans(t->shard, rows, v->matrix.rows, 1, &w->rows, &w->n_rows, &w->stored_rows)) return bad(t, "bad spans of rows");
    if (!read_spans(t->shard, cols, v->matrix.cols, quant_window_step(v->format), &w->cols, &w->n_cols, &w->stored_cols))
        return bad(t, "bad spans of columns");
    v->matrix.window = w;
    return RC_OK;
}

/* Columns may be cut in a grid where no scale is: every span of columns ends with a scale. */
static bool grid_may_be_cut(const struct quant_window *w, const struct quant_scales *g, uint64_t cols)
{
    for (int i = 0; i < w->n_cols; i++) {
        const uint64_t end = w->cols[i].first + w->cols[i].count;
        if (w->cols[i].first % g->col_block || (end % g->col_block && end != cols)) return false;
    }
    return true;
}

/* The grid beside the codes, with the checks that a file of the source's kind would have had. */
static enum rc read_scales(const struct entry *t, struct tensor_view *v)
{
    const json_t *o = json_object_get(t->o, "scales");
    struct quant_matrix *m = &v->matrix;
    struct quant_window *w = (struct quant_window *)(uintptr_t)m->window;
    struct quant_scales g = {.bytes = t->scales ? t->scales->bytes : NULL};
    if (!o) return t->scales ? bad(t, "a blob of scales that it does not explain") : RC_OK;
    if (!t->scales) return bad(t, "its scales are missing");
    if (m->format != QUANT_FP8 && m->format != QUANT_FP4_PAIRS) return bad(t, "scales beside a format that has its own");
    if (!read_format(json_object_get(o, "format"), &g.format) || quant_block_values(g.format) != 1)
        return bad(t, "the format of its scales is not known");
    if (!natural(json_object_get(o, "row_block"), &g.row_block) || !natural(json_object_get(o, "col_block"), &g.col_block) ||
        !g.row_block || !g.col_block)
        return bad(t, "bad blocks of scales");
    g.per_row = (m->cols - 1) / g.col_block + 1;
    const json_t *cut_rows = json_object_get(o, "cut_rows"), *cut_cols = json_object_get(o, "cut_cols");
    uint64_t rows = (m->rows - 1) / g.row_block + 1, per_row = g.per_row;
    if (json_is_true(cut_rows)) {
        if (!w || g.row_block != 1) return bad(t, "scales cannot be cut by rows");
        w->scale_rows = true;
        rows = w->stored_rows;
    }
    if (json_is_true(cut_cols)) {
        if (!w || !grid_may_be_cut(w, &g, m->cols)) return bad(t, "scales cannot be cut by columns");
        w->scale_cols = true;
        per_row = w->stored_cols ? (w->stored_cols - 1) / g.col_block + 1 : 0;
    }
    size_t n_bytes;
    if (!size_mul((size_t)rows, (size_t)per_row, &n_bytes) || !size_mul(n_bytes, quant_block_bytes(g.format), &n_bytes) ||
        n_bytes != t->scales->n_bytes)
        return bad(t, "its scales have another size");
    m->scales = g;
    return RC_OK;
}

static enum rc read_global(const struct entry *t, struct quant_matrix *m)
{
    const char *text = json_string_value(json_object_get(t->o, "global"));
    char *end = NULL;
    if (!text && !json_object_get(t->o, "global")) return RC_OK;
    m->global = text ? strtof(text, &end) : 0;
    if (!text || strncmp(text, "0x", 2) || *end || !isfinite(m->global) || m->global <= 0)
        return bad(t, "global is no hexadecimal number above 0");
    m->divide = json_is_true(json_object_get(t->o, "divide"));
    return RC_OK;
}

static enum rc read_codes(const struct entry *t, struct tensor_view *v)
{
    const struct quant_window *w = v->matrix.window;
    size_t row_bytes = 0, n_bytes = v->n_bytes;
    if (w && (!quant_row_bytes(v->format, w->stored_cols, &row_bytes) || !size_mul((size_t)w->stored_rows, row_bytes, &n_bytes)))
        return bad(t, "its spans are no whole blocks");
    if (n_bytes != t->codes->n_bytes) return bad(t, "its spans and its blob differ in size");
    v->bytes = v->matrix.bytes = t->codes->bytes;
    return RC_OK;
}

/* The blobs of one file by name. */
struct blobs {
    const struct stored_tensor **by_name;
    size_t n, used;
};

static int compare_names(const void *a, const void *b)
{
    const struct stored_tensor *const *left = a, *const *right = b;
    return strcmp((*left)->name, (*right)->name);
}

static const struct stored_tensor *take_blob(struct blobs *b, const char *name, const char *suffix)
{
    char full[256 + sizeof SHARD_SCALES_SUFFIX];
    struct stored_tensor key = {.name = full};
    const struct stored_tensor *wanted = &key;
    if ((size_t)snprintf(full, sizeof full, "%s%s", name, suffix) >= sizeof full) return NULL;
    const struct stored_tensor **found = b->n ? bsearch(&wanted, b->by_name, b->n, sizeof *b->by_name, compare_names) : NULL;
    if (!found || (*found)->dtype != SAFETENSORS_U8) return NULL;
    b->used++;
    return *found;
}

static bool note_hash(struct model_shard *s, uint64_t hash)
{
    uint64_t *grown = s->tensors.n > s->cap_hashes ? realloc(s->hashes, 2 * s->tensors.n * sizeof *grown) : s->hashes;
    if (!grown) return false;
    if (s->tensors.n > s->cap_hashes) s->cap_hashes = 2 * s->tensors.n;
    s->hashes = grown;
    s->hashes[s->tensors.n - 1] = hash;
    return true;
}

static enum rc read_tensor(struct model_shard *s, const json_t *o, const char *source, struct blobs *blobs, struct err *e)
{
    struct entry t = {.o = o, .name = json_string_value(json_object_get(o, "name")), .source = source, .shard = s, .e = e};
    uint64_t hash;
    if (!t.name || !*t.name) return fail(source, e, "shard_bad_tensor", "a tensor has no name");
    if (!read_hash(json_object_get(o, "xxh3"), &hash)) return bad(&t, "xxh3 is no 64-bit hash");
    t.codes = take_blob(blobs, t.name, "");
    if (!t.codes) return bad(&t, "its blob is missing or no U8");
    t.scales = json_object_get(o, "scales") ? take_blob(blobs, t.name, SHARD_SCALES_SUFFIX) : NULL;
    char *name = strdup(t.name);
    struct tensor_view *v = name ? tensor_index_add(&s->tensors, name) : NULL;
    if (!v || !note_hash(s, hash)) return err_no_memory(e);
    enum rc rc = read_shape(&t, v);
    if (rc == RC_OK) rc = read_window(&t, v);
    if (rc == RC_OK) rc = read_scales(&t, v);
    if (rc == RC_OK) rc = read_global(&t, &v->matrix);
    return rc == RC_OK ? read_codes(&t, v) : rc;
}

static enum rc read_tensors(const json_t *list, size_t first, const char *source, struct model_shard *s, struct err *e)
{
    struct blobs blobs = {.n = s->stored.n - first};
    if (!json_is_array(list)) return fail(source, e, "shard_bad", "tensors is no list");
    blobs.by_name = malloc((blobs.n + 1) * sizeof *blobs.by_name);
    if (!blobs.by_name) return err_no_memory(e);
    for (size_t i = 0; i < blobs.n; i++) blobs.by_name[i] = &s->stored.tensors[first + i];
    qsort(blobs.by_name, blobs.n, sizeof *blobs.by_name, compare_names);
    enum rc rc = RC_OK;
    for (size_t i = 0; rc == RC_OK && i < json_array_size(list); i++) rc = read_tensor(s, json_array_get(list, i), source, &blobs, e);
    free(blobs.by_name);
    if (rc == RC_OK && blobs.used != blobs.n) rc = fail(source, e, "shard_bad", "its blobs are not those that its tensors explain");
    return rc;
}

/* The text under our key of a header that safetensors_parse has accepted. */
static enum rc read_metadata(const void *bytes, const char *source, json_t **out, struct err *e)
{
    static const struct json_limits limits = {MAX_METADATA_BYTES, MAX_VALUES, MAX_DEPTH};
    uint64_t len;
    json_t *header = NULL;
    memcpy(&len, bytes, sizeof len);
    enum rc rc = json_text_parse((const char *)bytes + sizeof len, (size_t)len, limits, source, sizeof len, &header, e);
    const json_t *text = json_object_get(json_object_get(header, "__metadata__"), SHARD_METADATA_KEY);
    if (rc == RC_OK && !text) rc = fail(source, e, "shard_bad", "its header has no " SHARD_METADATA_KEY);
    if (rc == RC_OK) rc = json_text_parse(json_string_value(text), json_string_length(text), limits, source, 0, out, e);
    json_decref(header);
    return rc;
}

static enum rc check_cut(const struct model_shard *s, const json_t *o, int rank, const char *source, struct err *e)
{
    struct shard_identity own;
    enum rc rc = read_identity(o, source, &own, e);
    if (rc != RC_OK) return rc;
    if (strcmp(own.source_digest, s->identity.source_digest))
        return fail(source, e, "shard_foreign", "it was cut from another model than %s says", SHARD_INDEX_NAME);
    if (own.partition != s->identity.partition || own.ranks != s->identity.ranks)
        return fail(source, e, "shard_foreign", "it was cut in another way than %s says", SHARD_INDEX_NAME);
    const json_t *number = json_object_get(o, "rank");
    if (!json_is_integer(number) || json_integer_value(number) != rank)
        return fail(source, e, "shard_foreign", "it is not the file of %s %d", rank < 0 ? "all ranks," : "rank", rank);
    return RC_OK;
}

enum rc model_shard_read_tensors(const void *bytes, size_t n_bytes, const char *source, int rank, struct model_shard *io, struct err *e)
{
    const size_t first = io->stored.n;
    json_t *o = NULL;
    enum rc rc = safetensors_parse(bytes, n_bytes, source, &io->stored, e);
    if (rc == RC_OK) rc = read_metadata(bytes, source, &o, e);
    if (rc == RC_OK) rc = check_cut(io, o, rank, source, e);
    if (rc == RC_OK) rc = read_tensors(json_object_get(o, "tensors"), first, source, io, e);
    json_decref(o);
    return rc;
}

/* ---- opening ---- */

static enum rc open_tensors(const char *folder, int rank, struct model_shard *s, struct err *e)
{
    struct mapped_file *map = &s->maps[rank != SHARD_NO_RANK];
    char name[SHARD_NAME_BYTES];
    model_shard_file_name(rank, s->identity.ranks, name);
    const struct shard_file *file = model_shard_file(s, name);
    if (!file) return fail(s->path, e, "shard_bad", "it does not list %s", name);
    char *path = path_in(folder, name);
    enum rc rc = path ? mapped_file_open(path, map, e) : err_no_memory(e);
    free(path);
    if (rc != RC_OK) return rc;
    if (map->n_bytes != file->n_bytes)
        return fail(map->path, e, "shard_truncated", "it has %zu bytes, %s says %" PRIu64, map->n_bytes, SHARD_INDEX_NAME, file->n_bytes);
    return model_shard_read_tensors(map->bytes, map->n_bytes, map->path, rank, s, e);
}

enum rc model_shard_open(const char *folder, int rank, int ranks, struct model_shard *out, struct err *e)
{
    struct buf text = {0};
    const char *twin = NULL;
    *out = (struct model_shard){.path = path_in(folder, SHARD_INDEX_NAME)};
    enum rc rc = out->path ? file_read(out->path, MAX_INDEX_BYTES, &text, e) : err_no_memory(e);
    if (rc == RC_OK) rc = model_shard_read_index(text.data ? text.data : "", text.len, out->path, out, e);
    buf_free(&text);
    if (rc != RC_OK) return rc;
    if (ranks && ranks != out->identity.ranks)
        return fail(out->path, e, "shard_ranks", "this model was cut for %d ranks, not %d; cut it again, or run with --ranks %d",
                    out->identity.ranks, ranks, out->identity.ranks);
    rc = open_tensors(folder, SHARD_NO_RANK, out, e);
    out->n_common = out->tensors.n;
    if (rc == RC_OK) rc = open_tensors(folder, rank, out, e);
    if (rc == RC_OK && !tensor_index_sort(&out->tensors, &twin)) rc = err_no_memory(e);
    if (rc == RC_OK && twin) rc = fail(out->maps[1].path, e, "shard_bad_tensor", "tensor %.100s is there twice", twin);
    return rc;
}

void model_shard_free(struct model_shard *s)
{
    tensor_index_free(&s->tensors);
    safetensors_free(&s->stored);
    for (size_t i = 0; i < s->n_memory; i++) free(s->memory[i]);
    free(s->memory);
    free(s->hashes);
    for (int i = 0; i < 2; i++) mapped_file_close(&s->maps[i]);
    free(s->path);
    *s = (struct model_shard){0};
}

/* ---- contents ---- */

enum rc model_shard_check_text(struct model_shard *s, const char *name, const void *bytes, size_t n_bytes, struct err *e)
{
    char hex[65];
    for (int i = 0; i < s->n_files; i++) {
        struct shard_file *f = &s->files[i];
        if (strcmp(f->name, name)) continue;
        mapped_file_digest_bytes(bytes, n_bytes, hex);
        f->seen = true;
        if (n_bytes == f->n_bytes && !strcmp(hex, f->sha256)) return RC_OK;
        return fail(s->path, e, "shard_foreign", "%s is not the file that was written with it", name);
    }
    return fail(s->path, e, "shard_foreign", "%s is not one of its files", name);
}

enum rc model_shard_check_all_seen(const struct model_shard *s, struct err *e)
{
    for (int i = 0; i < s->n_files; i++) {
        const char *name = s->files[i].name, *suffix = strrchr(name, '.');
        if (!s->files[i].seen && !(suffix && !strcmp(suffix, ".safetensors")))
            return fail(s->path, e, "shard_foreign", "%s is missing", name);
    }
    return RC_OK;
}

enum rc model_shard_digest(const struct model_shard *s, char out_hex[65], struct err *e)
{
    for (int i = 0; i < 2; i++) {
        const char *slash = strrchr(s->maps[i].path, '/');
        const struct shard_file *f = model_shard_file(s, slash ? slash + 1 : s->maps[i].path);
        enum rc rc = mapped_file_digest(&s->maps[i], out_hex, e);
        if (rc != RC_OK) return rc;
        if (!f || strcmp(f->sha256, out_hex))
            return fail(s->maps[i].path, e, "shard_damaged", "its bytes are not those that were written");
    }
    memcpy(out_hex, s->identity.source_digest, 65);
    return RC_OK;
}
