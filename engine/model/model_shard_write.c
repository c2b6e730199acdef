/* model_shard_write: a file a rank, one for what all share, and the small files; then shard.json, which makes it a model.
 *
 * Bytes are copied, never decoded. Two passes over the source: a file's header holds hashes of what follows it, so they are
 * taken first; the second pass writes and takes the file's own SHA-256 along. Memory is one buffer, whatever the model's size.
 *
 * What is cut and how follows from model_slice, as in binding. Everything else, used by this program or not, is whole in the
 * common file: all of the source can be found again. */
#define _GNU_SOURCE
#include "model_shard_write.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "model_file_private.h"
#include "model_names.h"
#include "shard_slice.h"

enum { BUFFER_BYTES = 1 << 20, HEADER_ALIGNMENT = 8 };

/* ---- one file ---- */

struct output {
    const char *name;
    char *path, *temporary;
    int fd;
    struct sha256_ctx sha;
    struct buf pending; /* small pieces, written together */
    uint64_t n_bytes;
    bool failed; /* errno says why */
};

static bool flush_output(struct output *o)
{
    if (!o->failed && !fd_write_all(o->fd, o->pending.data, o->pending.len)) o->failed = true;
    buf_clear(&o->pending);
    return !o->failed;
}

static bool output_put(void *ctx, const void *bytes, size_t n_bytes)
{
    struct output *o = ctx;
    sha256_update(&o->sha, n_bytes, bytes);
    o->n_bytes += n_bytes;
    if (o->pending.len + n_bytes > BUFFER_BYTES && !flush_output(o)) return false;
    if (n_bytes < BUFFER_BYTES) return buf_append(&o->pending, bytes, n_bytes) || (errno = ENOMEM, o->failed = true, false);
    if (!fd_write_all(o->fd, bytes, n_bytes)) o->failed = true;
    return !o->failed;
}

static enum rc output_failed(const struct output *o, struct err *e)
{
    return err_errno(e, RC_FAILED, EXIT_IO, "cannot_write", "cannot write %s", o->path ? o->path : o->name);
}

static enum rc output_open(const char *folder, const char *name, struct output *o, struct err *e)
{
    *o = (struct output){.name = name, .fd = -1};
    if (asprintf(&o->path, "%s/%s", folder, name) < 0) o->path = NULL;
    if (asprintf(&o->temporary, "%s/.%s.part", folder, name) < 0) o->temporary = NULL;
    if (!o->path || !o->temporary) return err_no_memory(e);
    sha256_init(&o->sha);
    o->fd = open(o->temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
    return o->fd < 0 ? output_failed(o, e) : RC_OK;
}

/* Gives the file its name, or removes what there is of it. */
static enum rc output_close(struct output *o, enum rc rc, struct shard_file *out, struct err *e)
{
    if (rc == RC_OK && (!flush_output(o) || fsync(o->fd))) rc = output_failed(o, e);
    if (o->fd >= 0 && close(o->fd) && rc == RC_OK) rc = output_failed(o, e);
    if (rc == RC_OK && rename(o->temporary, o->path)) rc = output_failed(o, e);
    if (rc != RC_OK && o->fd >= 0) unlink(o->temporary);
    if (rc == RC_OK && out) {
        uint8_t digest[SHA256_DIGEST_SIZE];
        sha256_digest(&o->sha, sizeof digest, digest);
        snprintf(out->name, sizeof out->name, "%s", o->name);
        out->n_bytes = o->n_bytes;
        for (size_t i = 0; i < sizeof digest; i++) snprintf(out->sha256 + 2 * i, 3, "%02x", digest[i]);
    }
    buf_free(&o->pending);
    free(o->temporary);
    free(o->path);
    return rc;
}

static enum rc write_small(const char *folder, const char *name, const void *bytes, size_t n_bytes, struct shard_file *out, struct err *e)
{
    struct output o;
    enum rc rc = output_open(folder, name, &o, e);
    if (rc == RC_OK && !output_put(&o, bytes, n_bytes)) rc = output_failed(&o, e);
    return output_close(&o, rc, out, e);
}

/* ---- what goes where ---- */

struct cut {
    struct model_file *m;
    const struct model_config *c;
    const struct partition *p;
    const char *folder;
    int *roles; /* [tensors] the role of a tensor that is cut, MODEL_ROLES for others */
    char source_digest[65];
    struct shard_file files[SHARD_MAX_FILES];
    int n_files;
    const struct shard_report *report;
    struct err *e;
};

static enum rc find_roles(struct cut *k)
{
    const size_t n = model_file_tensor_count(k->m);
    k->roles = malloc((n + 1) * sizeof *k->roles);
    if (!k->roles) return err_no_memory(k->e);
    for (size_t i = 0; i < n; i++) k->roles[i] = MODEL_ROLES;
    const struct tensor_view *first = model_file_tensor_at(k->m, 0);
    for (int role = 0; role < MODEL_ROLES; role++)
        for (int l = 0; l <= k->c->n_layers && model_role_is_sliced((enum model_role)role); l++) {
            if (!model_role_used(k->c, (enum model_role)role, l)) continue;
            const struct tensor_view *t = model_role_find(k->m, k->c, (enum model_role)role, l);
            uint64_t rows, cols;
            model_role_shape(k->c, (enum model_role)role, &rows, &cols);
            if (t && t->matrix.rows == rows && t->matrix.cols == cols) k->roles[t - first] = role;
        }
    return RC_OK;
}

static int span_count(const struct model_slice *s) { return s->n_rows + s->n_cols; }

/* A tensor's share of one file. */
struct part {
    const struct tensor_view *t;
    struct quant_window window;
    struct quant_span *spans; /* NULL: all of it */
    uint64_t hash;
};

static const struct quant_window *window_of(const struct part *p) { return p->spans ? &p->window : NULL; }

struct part_list {
    struct part *parts;
    size_t n;
};

static void free_parts(struct part_list *l)
{
    for (size_t i = 0; i < l->n; i++) free(l->parts[i].spans);
    free(l->parts);
}

/* The tensors of one file. slices NULL: of the common one. */
static enum rc list_parts(const struct cut *k, const struct model_slices *slices, struct part_list *out)
{
    const size_t n = model_file_tensor_count(k->m);
    *out = (struct part_list){.parts = calloc(n + 1, sizeof *out->parts)};
    if (!out->parts) return err_no_memory(k->e);
    for (size_t i = 0; i < n; i++) {
        if ((k->roles[i] != MODEL_ROLES) != (slices != NULL)) continue;
        struct part *p = &out->parts[out->n++];
        p->t = model_file_tensor_at(k->m, i);
        if (!slices) continue;
        const struct model_slice *s = &slices->of[k->roles[i]];
        p->spans = malloc((size_t)(span_count(s) + 1) * sizeof *p->spans);
        if (!p->spans) return err_no_memory(k->e);
        p->window = shard_window_of(&p->t->matrix, s, p->spans);
    }
    return RC_OK;
}

static bool put_part(const struct cut *k, const struct part *p, const struct shard_sink *to)
{
    model_file_need(k->m, p->t);
    const bool good = shard_put_codes(&p->t->matrix, window_of(p), to) && shard_put_scales(&p->t->matrix, window_of(p), to);
    model_file_done(k->m, p->t);
    return good;
}

static bool hash_put(void *ctx, const void *bytes, size_t n_bytes) { return XXH3_64bits_update(ctx, bytes, n_bytes) == XXH_OK; }

static enum rc hash_parts(const struct cut *k, struct part_list *l)
{
    XXH3_state_t *state = XXH3_createState();
    if (!state) return err_no_memory(k->e);
    for (size_t i = 0; i < l->n; i++) {
        XXH3_64bits_reset(state);
        put_part(k, &l->parts[i], &(struct shard_sink){state, hash_put});
        l->parts[i].hash = XXH3_64bits_digest(state);
    }
    XXH3_freeState(state);
    return RC_OK;
}

/* ---- headers ---- */

static json_t *hash_text(uint64_t hash)
{
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, hash);
    return json_string(text);
}

static json_t *identity_object(const struct cut *k)
{
    json_t *o = json_object();
    json_object_set_new(o, "version", json_integer(SHARD_VERSION));
    json_object_set_new(o, "source_digest", json_string(k->source_digest));
    json_object_set_new(o, "ranks", json_integer(k->p->ranks));
    json_object_set_new(o, "partition", hash_text(partition_digest(k->p)));
    return o;
}

static json_t *span_list(const struct quant_span *spans, int n)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("[I,I]", (json_int_t)spans[i].first, (json_int_t)spans[i].count));
    return list;
}

static json_t *scales_object(const struct part *p)
{
    const struct quant_scales *g = &p->t->matrix.scales;
    const bool rows = p->spans && p->window.scale_rows, cols = p->spans && p->window.scale_cols;
    return json_pack("{s:s,s:I,s:I,s:b,s:b}", "format", quant_name(g->format), "row_block", (json_int_t)g->row_block, "col_block",
                     (json_int_t)g->col_block, "cut_rows", rows, "cut_cols", cols);
}

/* NULL: no memory, or a name that is no UTF-8. */
static json_t *tensor_object(const struct part *p)
{
    const struct quant_matrix *m = &p->t->matrix;
    json_t *o = json_object(), *dims = json_array();
    char global[40];
    for (int i = 0; i < p->t->n_dims; i++) json_array_append_new(dims, json_integer((json_int_t)p->t->dims[i]));
    bool good = json_object_set_new(o, "name", json_string(p->t->name)) == 0;
    good = json_object_set_new(o, "format", json_string(quant_name(p->t->format))) == 0 && good;
    good = json_object_set_new(o, "dims", dims) == 0 && good;
    if (p->spans) {
        good = json_object_set_new(o, "rows", span_list(p->window.rows, p->window.n_rows)) == 0 && good;
        good = json_object_set_new(o, "cols", span_list(p->window.cols, p->window.n_cols)) == 0 && good;
    }
    if (m->scales.bytes) good = json_object_set_new(o, "scales", scales_object(p)) == 0 && good;
    if (m->scales.bytes || m->global != 1) {
        snprintf(global, sizeof global, "%a", (double)m->global);
        good = json_object_set_new(o, "global", json_string(global)) == 0 && good;
        good = json_object_set_new(o, "divide", json_boolean(m->divide)) == 0 && good;
    }
    good = json_object_set_new(o, "xxh3", hash_text(p->hash)) == 0 && good;
    if (good) return o;
    json_decref(o);
    return NULL;
}

/* One blob's entry; *at moves on. */
static bool add_blob(json_t *header, const char *name, const char *suffix, size_t n_bytes, uint64_t *at)
{
    char full[256];
    if ((size_t)snprintf(full, sizeof full, "%s%s", name, suffix) >= sizeof full || json_object_get(header, full)) return false;
    const uint64_t end = *at + n_bytes;
    json_t *entry = json_pack("{s:s,s:[I],s:[I,I]}", "dtype", "U8", "shape", (json_int_t)n_bytes, "data_offsets", (json_int_t)*at,
                              (json_int_t)end);
    *at = end;
    return json_object_set_new(header, full, entry) == 0;
}

/* The header's text, padded. NULL: no memory, or a name that cannot be written. */
static char *header_text(const struct cut *k, const struct part_list *l, int rank, size_t *out_len)
{
    json_t *header = json_object(), *own = identity_object(k), *tensors = json_array();
    uint64_t at = 0;
    bool good = json_object_set_new(own, "rank", json_integer(rank)) == 0;
    for (size_t i = 0; i < l->n && good; i++) {
        const struct part *p = &l->parts[i];
        const size_t scales = shard_scales_bytes(&p->t->matrix, window_of(p));
        good = json_array_append_new(tensors, tensor_object(p)) == 0;
        good = good && add_blob(header, p->t->name, "", shard_codes_bytes(&p->t->matrix, window_of(p)), &at);
        if (p->t->matrix.scales.bytes) good = good && add_blob(header, p->t->name, SHARD_SCALES_SUFFIX, scales, &at);
    }
    good = json_object_set_new(own, "tensors", tensors) == 0 && good;
    char *inner = good ? json_dumps(own, JSON_COMPACT) : NULL, *text = NULL;
    if (inner && json_object_set_new(header, "__metadata__", json_pack("{s:s}", SHARD_METADATA_KEY, inner)) == 0)
        text = json_dumps(header, JSON_COMPACT);
    free(inner);
    json_decref(own);
    json_decref(header);
    if (!text) return NULL;
    const size_t len = strlen(text), padded = (len + HEADER_ALIGNMENT - 1) / HEADER_ALIGNMENT * HEADER_ALIGNMENT;
    char *grown = realloc(text, padded + 1);
    if (!grown) {
        free(text);
        return NULL;
    }
    memset(grown + len, ' ', padded - len);
    *out_len = padded;
    return grown;
}

/* ---- writing ---- */

static struct shard_file *next_file(struct cut *k) { return &k->files[k->n_files++]; }

static enum rc write_tensors(struct cut *k, int rank)
{
    struct model_slices slices = {0};
    struct part_list l = {0};
    struct output o;
    char name[SHARD_NAME_BYTES];
    size_t len = 0;
    char *header = NULL;
    model_shard_file_name(rank, k->p->ranks, name);
    enum rc rc = rank == SHARD_NO_RANK ? RC_OK : model_slices_make(k->c, &k->p->part[rank], &slices, k->e);
    if (rc == RC_OK) rc = list_parts(k, rank == SHARD_NO_RANK ? NULL : &slices, &l);
    if (rc == RC_OK) rc = hash_parts(k, &l);
    if (rc == RC_OK && !(header = header_text(k, &l, rank, &len)))
        rc = err_set(k->e, RC_FAILED, EXIT_UNAVAILABLE, "cannot_describe", "the names of its tensors do not fit into %s", name);
    if (rc == RC_OK) {
        const uint64_t length = len;
        struct shard_file *file = next_file(k);
        rc = output_open(k->folder, name, &o, k->e);
        bool good = rc == RC_OK && output_put(&o, &length, sizeof length) && output_put(&o, header, len);
        for (size_t i = 0; i < l.n && good; i++) good = put_part(k, &l.parts[i], &(struct shard_sink){&o, output_put});
        if (rc == RC_OK && !good) rc = output_failed(&o, k->e);
        rc = output_close(&o, rc, file, k->e);
        if (rc == RC_OK) k->report->file(k->report->ctx, name, l.n, file->n_bytes);
    }
    free(header);
    free_parts(&l);
    model_slices_free(&slices);
    return rc;
}

static enum rc write_one_small(struct cut *k, const char *name, const void *bytes, size_t n_bytes)
{
    struct shard_file *file = next_file(k);
    enum rc rc = write_small(k->folder, name, bytes, n_bytes, file, k->e);
    if (rc == RC_OK) k->report->file(k->report->ctx, name, 0, file->n_bytes);
    return rc;
}

static enum rc write_texts(struct cut *k)
{
    enum rc rc = RC_OK;
    const char *name;
    struct model_text text;
    if (model_file_layout(k->m) == MODEL_LAYOUT_GGUF) {
        struct buf head = {0};
        rc = model_shard_gguf_head(k->m, &head) ? write_one_small(k, SHARD_HEAD_NAME, head.data, head.len) : err_no_memory(k->e);
        buf_free(&head);
        return rc;
    }
    for (int i = 0; i < MODEL_FOLDER_TEXTS && rc == RC_OK; i++)
        if (model_file_stored_text(k->m, i, &name, &text)) rc = write_one_small(k, name, text.bytes, text.len);
    return rc;
}

static enum rc write_index(struct cut *k)
{
    const char *path = model_file_path(k->m);
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/') end--;
    const char *slash = memrchr(path, '/', end > 1 ? end - 1 : 0), *base = slash ? slash + 1 : path;
    json_t *o = identity_object(k), *files = json_array(), *name = json_stringn(base, end - (size_t)(base - path));
    for (int i = 0; i < k->n_files; i++)
        json_array_append_new(files, json_pack("{s:s,s:I,s:s}", "name", k->files[i].name, "bytes", (json_int_t)k->files[i].n_bytes,
                                               "sha256", k->files[i].sha256));
    json_object_set_new(o, "format", json_string("tandem shard"));
    json_object_set_new(o, "layout", json_string(model_file_layout(k->m) == MODEL_LAYOUT_GGUF ? "gguf" : "hf"));
    json_object_set_new(o, "synthetic", json_boolean(model_file_synthetic(k->m)));
    json_object_set_new(o, "source", name ? name : json_string("model"));
    json_object_set_new(o, "files", files);
    char *text = json_dumps(o, JSON_INDENT(1));
    enum rc rc = text ? write_small(k->folder, SHARD_INDEX_NAME, text, strlen(text), NULL, k->e) : err_no_memory(k->e);
    free(text);
    json_decref(o);
    return rc;
}

/* ---- the folder ---- */

static bool is_ours(const char *name)
{
    const size_t len = strlen(name);
    return name[0] == '.' || !strncmp(name, "rank-", 5) || !strcmp(name, SHARD_COMMON_NAME) || !strcmp(name, SHARD_HEAD_NAME) ||
           !strcmp(name, SHARD_INDEX_NAME) || (len > 5 && !strcmp(name + len - 5, ".json")) || !strcmp(name, "chat_template.jinja");
}

static enum rc refuse_folder(const char *folder, const char *why, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "output_exists", "%s %s", folder, why);
}

/* Takes an older cut away, shard.json first: from then on the folder is no model until the new one is there. */
static enum rc empty_folder(const char *folder, bool force, struct err *e)
{
    const bool was_cut = model_shard_is_at(folder);
    DIR *dir = opendir(folder);
    if (!dir) return err_errno(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_open", "cannot open the folder %s", folder);
    enum rc rc = RC_OK;
    size_t n = 0;
    if (was_cut && force && unlinkat(dirfd(dir), SHARD_INDEX_NAME, 0))
        rc = err_errno(e, RC_FAILED, EXIT_NO_OUTPUT, "cannot_remove", "cannot remove %s/%s", folder, SHARD_INDEX_NAME);
    for (struct dirent *entry; rc == RC_OK && (entry = readdir(dir));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        n++;
        if (was_cut && force && is_ours(entry->d_name) && unlinkat(dirfd(dir), entry->d_name, 0))
            rc = err_errno(e, RC_FAILED, EXIT_NO_OUTPUT, "cannot_remove", "cannot remove %s/%s", folder, entry->d_name);
    }
    closedir(dir);
    if (rc != RC_OK || !n || (was_cut && force)) return rc;
    return refuse_folder(folder, was_cut ? "is there already; --force replaces it" : "is there already and is no cut model", e);
}

static enum rc make_folder(const char *folder, bool force, struct err *e)
{
    if (!mkdir(folder, 0777)) return RC_OK;
    if (errno != EEXIST) return err_errno(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_create", "cannot create the folder %s", folder);
    struct stat st;
    if (stat(folder, &st) || !S_ISDIR(st.st_mode)) return refuse_folder(folder, "is there already and is no folder", e);
    return empty_folder(folder, force, e);
}

static enum rc sync_folder(const char *folder, struct err *e)
{
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    enum rc rc = RC_OK;
    if (fd < 0 || fsync(fd)) rc = err_errno(e, RC_FAILED, EXIT_IO, "cannot_sync", "cannot sync the folder %s", folder);
    if (fd >= 0) close(fd);
    return rc;
}

enum rc model_shard_write(struct model_file *m, const struct model_config *c, const struct partition *p, const char *folder, bool force,
                          const struct shard_report *report, struct err *e)
{
    struct cut k = {.m = m, .c = c, .p = p, .folder = folder, .report = report, .e = e};
    uint64_t partition;
    if (model_file_cut(m, &partition))
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_of_shard", "%s is cut already; give its source", model_file_path(m));
    enum rc rc = model_file_digest(m, k.source_digest, e);
    if (rc == RC_OK) rc = find_roles(&k);
    if (rc == RC_OK) rc = make_folder(folder, force, e);
    if (rc == RC_OK) rc = write_texts(&k);
    for (int r = SHARD_NO_RANK; r < p->ranks && rc == RC_OK; r++) rc = write_tensors(&k, r);
    if (rc == RC_OK) rc = sync_folder(folder, e);
    if (rc == RC_OK) rc = write_index(&k);
    if (rc == RC_OK) rc = sync_folder(folder, e);
    free(k.roles);
    return rc;
}

/* ---- GGUF ---- */

static void put_u64(struct buf *b, uint64_t v) { buf_append(b, &v, sizeof v); }
static void put_u32(struct buf *b, uint32_t v) { buf_append(b, &v, sizeof v); }

static void put_value(const struct gguf *g, const struct gguf_value *v, struct buf *out)
{
    put_u64(out, strlen(v->key));
    buf_append_str(out, v->key);
    put_u32(out, v->type);
    if (v->type == GGUF_STRING) {
        put_u64(out, v->count);
        buf_append(out, v->bytes, (size_t)v->count);
    } else if (v->type != GGUF_ARRAY) {
        buf_append(out, v->bytes, gguf_type_bytes(v->type));
    } else {
        put_u32(out, v->element);
        put_u64(out, v->count);
        if (v->element != GGUF_STRING) buf_append(out, v->bytes, (size_t)v->count * gguf_type_bytes(v->element));
        for (uint64_t i = 0; v->element == GGUF_STRING && i < v->count; i++) {
            const struct model_text text = gguf_text_at(g, v->starts[i]);
            put_u64(out, text.len);
            buf_append(out, text.bytes, text.len);
        }
    }
}

bool model_shard_gguf_head(const struct model_file *m, struct buf *out)
{
    enum { GGUF_VERSION = 3 };
    const struct gguf *g = model_file_gguf(m);
    buf_append(out, "GGUF", 4);
    put_u32(out, GGUF_VERSION);
    put_u64(out, 0);
    put_u64(out, g->n_values);
    for (size_t i = 0; i < g->n_values; i++) put_value(g, &g->values[i], out);
    return !out->failed;
}
