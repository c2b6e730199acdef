/* model_file: containers, and the one way to look at them.
 *
 * A container fills a tensor_index and, as far as it has them, metadata (GGUF) or texts (a folder); everything below
 * reads those and nothing else, so that another container needs no more than an opening of its own. Which one it is
 * follows from the path: a folder, a file with one of the names that such folders hold, anything else is GGUF. */
#define _GNU_SOURCE
#include "model_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf.h"
#include "mapped_file.h"
#include "model_file_private.h"
#include "model_shard.h"
#include "model_synth.h"

#define SYNTH_PREFIX "synth:"

struct model_file {
    char *path;
    enum model_layout layout;
    const struct tensor_index *tensors;
    struct gguf gguf; /* empty in other containers: nothing is found */
    struct mapped_file map;
    struct model_folder folder; /* empty: there are no texts */
    struct model_synth synth;   /* empty: weights are real */
    struct model_shard shard;   /* empty: not cut */
};

static enum rc refuse_split(const struct model_file *m, struct err *e)
{
    uint64_t parts;
    if (!model_file_u64(m, "split.count", &parts) || parts <= 1) return RC_OK;
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "model_unsupported",
                         "this is one of %" PRIu64 " files of a model; join them into one file first", parts);
    err_place(e, m->path, 0, 0, 0);
    return rc;
}

static enum rc open_gguf(struct model_file *m, struct err *e)
{
    m->layout = MODEL_LAYOUT_GGUF;
    m->tensors = &m->gguf.tensors;
    enum rc rc = gguf_parse(m->map.bytes, m->map.n_bytes, m->path, &m->gguf, e);
    return rc == RC_OK ? refuse_split(m, e) : rc;
}

static bool ends_with(const char *text, const char *suffix)
{
    size_t n = strlen(text), k = strlen(suffix);
    return n >= k && !strcmp(text + n - k, suffix);
}

static bool is_folder(const char *path)
{
    struct stat st;
    return !stat(path, &st) && S_ISDIR(st.st_mode);
}

/* The folder of a file that belongs to one. */
static enum rc open_folder_of(struct model_file *m, const char *only, struct err *e)
{
    const char *slash = strrchr(m->path, '/');
    size_t len = slash == m->path ? 1 : slash ? (size_t)(slash - m->path) : 0;
    char *folder = len ? strndup(m->path, len) : strdup(".");
    if (!folder) return err_no_memory(e);
    enum rc rc = model_folder_open(folder, only, &m->folder, e);
    free(folder);
    return rc;
}

/* The small files of a folder that was cut, as they were written with it. */
static enum rc open_shard_texts(struct model_file *m, struct err *e)
{
    enum rc rc;
    if (m->layout == MODEL_LAYOUT_GGUF) {
        char *path = NULL;
        if (asprintf(&path, "%s/" SHARD_HEAD_NAME, m->path) < 0) return err_no_memory(e);
        rc = mapped_file_open(path, &m->map, e);
        free(path);
        if (rc == RC_OK) rc = model_shard_check_text(&m->shard, SHARD_HEAD_NAME, m->map.bytes, m->map.n_bytes, e);
        if (rc == RC_OK) rc = gguf_parse(m->map.bytes, m->map.n_bytes, m->map.path, &m->gguf, e);
    } else {
        rc = model_folder_open_texts(m->path, &m->folder, e);
        for (int i = 0; i < MODEL_FOLDER_TEXTS && rc == RC_OK; i++) {
            const struct model_folder_file *f = &m->folder.texts[i];
            const char *name = model_folder_text_name((enum model_folder_text)i);
            if (f->path) rc = model_shard_check_text(&m->shard, name, f->bytes.data ? f->bytes.data : "", f->bytes.len, e);
        }
    }
    return rc == RC_OK ? model_shard_check_all_seen(&m->shard, e) : rc;
}

static enum rc open_shard(struct model_file *m, int rank, int ranks, struct err *e)
{
    enum rc rc = model_shard_open(m->path, rank, ranks, &m->shard, e);
    m->layout = m->shard.layout;
    m->tensors = &m->shard.tensors;
    return rc == RC_OK ? open_shard_texts(m, e) : rc;
}

static enum rc open_path(struct model_file *m, int rank, int ranks, struct err *e)
{
    const char *slash = strrchr(m->path, '/'), *name = slash ? slash + 1 : m->path;
    m->layout = MODEL_LAYOUT_HF;
    if (!strncmp(m->path, SYNTH_PREFIX, strlen(SYNTH_PREFIX))) {
        m->tensors = &m->synth.tensors;
        return model_synth_open(m->path + strlen(SYNTH_PREFIX), &m->synth, e);
    }
    if (is_folder(m->path) && model_shard_is_at(m->path)) return open_shard(m, rank, ranks, e);
    m->tensors = &m->folder.tensors;
    if (is_folder(m->path)) return model_folder_open(m->path, NULL, &m->folder, e);
    if (!strcmp(name, "config.json") || ends_with(name, ".safetensors.index.json")) return open_folder_of(m, NULL, e);
    if (ends_with(name, ".safetensors")) return open_folder_of(m, name, e);
    enum rc rc = mapped_file_open(m->path, &m->map, e);
    return rc == RC_OK ? open_gguf(m, e) : rc;
}

static struct model_file *new_file(const char *name)
{
    struct model_file *m = calloc(1, sizeof *m);
    if (m) m->path = strdup(name);
    if (m && !m->path) {
        free(m);
        m = NULL;
    }
    return m;
}

/* Hands m out, or frees it. */
static enum rc opened(struct model_file *m, enum rc rc, struct model_file **out)
{
    if (rc == RC_OK)
        *out = m;
    else
        model_file_close(m);
    return rc;
}

enum rc model_file_open(const char *path, struct model_file **out, struct err *e)
{
    return model_file_open_rank(path, 0, 0, out, e);
}

enum rc model_file_open_rank(const char *path, int rank, int ranks, struct model_file **out, struct err *e)
{
    struct model_file *m = new_file(path);
    return m ? opened(m, open_path(m, rank, ranks, e), out) : err_no_memory(e);
}

/* The header of safetensors begins at byte 8 with the brace of its JSON. */
static bool looks_like_safetensors(const void *bytes, size_t n_bytes)
{
    return n_bytes > 8 && memcmp(bytes, "GGUF", 4) != 0 && ((const char *)bytes)[8] == '{';
}

enum rc model_file_open_bytes(const void *bytes, size_t n_bytes, const char *name, struct model_file **out,
                              struct err *e)
{
    enum rc rc;
    struct model_file *m = new_file(name);
    if (!m) return err_no_memory(e);
    if (looks_like_safetensors(bytes, n_bytes)) {
        m->layout = MODEL_LAYOUT_HF;
        m->tensors = &m->folder.tensors;
        rc = model_folder_of_bytes(bytes, n_bytes, name, &m->folder, e);
    } else {
        rc = mapped_file_of_bytes(bytes, n_bytes, name, &m->map, e);
        if (rc == RC_OK) rc = open_gguf(m, e);
    }
    return opened(m, rc, out);
}

enum rc model_file_open_blobs(const struct model_blob *blobs, size_t n_blobs, const char *name, struct model_file **out,
                              struct err *e)
{
    struct model_file *m = new_file(name);
    if (!m) return err_no_memory(e);
    m->layout = MODEL_LAYOUT_HF;
    m->tensors = &m->folder.tensors;
    return opened(m, model_folder_open_blobs(blobs, n_blobs, name, NULL, &m->folder, e), out);
}

void model_file_close(struct model_file *m)
{
    if (!m) return;
    gguf_free(&m->gguf);
    mapped_file_close(&m->map);
    model_folder_free(&m->folder);
    model_synth_free(&m->synth);
    model_shard_free(&m->shard);
    free(m->path);
    free(m);
}

const char *model_file_path(const struct model_file *m) { return m->path; }
size_t model_file_tensor_count(const struct model_file *m) { return m->tensors->n; }

const struct tensor_view *model_file_tensor_at(const struct model_file *m, size_t i)
{
    return i < m->tensors->n ? &m->tensors->views[i] : NULL;
}

const struct tensor_view *model_file_tensor(const struct model_file *m, const char *name)
{
    return tensor_index_find(m->tensors, name);
}

size_t model_file_key_count(const struct model_file *m) { return m->gguf.n_values; }

const char *model_file_key_at(const struct model_file *m, size_t i)
{
    return i < m->gguf.n_values ? m->gguf.values[i].key : NULL;
}

bool model_file_has(const struct model_file *m, const char *key) { return gguf_value_find(&m->gguf, key) != NULL; }

bool model_file_u64(const struct model_file *m, const char *key, uint64_t *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    return v && gguf_load_uint(v->type, v->bytes, out);
}

bool model_file_f64(const struct model_file *m, const char *key, double *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    return v && gguf_load_float(v->type, v->bytes, out);
}

bool model_file_bool(const struct model_file *m, const char *key, bool *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    if (!v || v->type != GGUF_BOOL) return false;
    *out = v->bytes[0] != 0;
    return true;
}

bool model_file_text(const struct model_file *m, const char *key, struct model_text *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    if (!v || v->type != GGUF_STRING) return false;
    *out = (struct model_text){(const char *)v->bytes, (size_t)v->count};
    return true;
}

enum model_layout model_file_layout(const struct model_file *m) { return m->layout; }
static bool is_synth(const struct model_file *m) { return m->synth.memory != NULL; }

bool model_file_json(const struct model_file *m, enum model_json kind, struct model_text *out)
{
    if (is_synth(m)) {
        const struct buf *text = &m->synth.texts[kind];
        *out = (struct model_text){text->data, text->len};
        return text->len > 0;
    }
    return model_folder_text(&m->folder, (enum model_folder_text)kind, out);
}

const char *model_file_json_path(const struct model_file *m, enum model_json kind)
{
    return m->folder.texts[kind].path ? m->folder.texts[kind].path : m->path;
}

bool model_file_chat_template(const struct model_file *m, struct model_text *out)
{
    return model_file_text(m, "tokenizer.chat_template", out) ||
           model_folder_text(&m->folder, MODEL_FOLDER_TEMPLATE, out);
}

bool model_file_synthetic(const struct model_file *m) { return is_synth(m) || m->shard.synthetic; }

bool model_file_cut(const struct model_file *m, uint64_t *out_partition)
{
    *out_partition = m->shard.identity.partition;
    return m->shard.identity.ranks > 0;
}

const struct gguf *model_file_gguf(const struct model_file *m) { return &m->gguf; }
const struct model_shard *model_file_shard(const struct model_file *m) { return &m->shard; }

bool model_file_stored_text(const struct model_file *m, int i, const char **name, struct model_text *out)
{
    const enum model_folder_text kind = (enum model_folder_text)i;
    *name = model_folder_text_name(kind);
    if (is_synth(m)) return i < MODEL_JSON_KINDS && model_file_json(m, (enum model_json)i, out);
    return kind != MODEL_FOLDER_INDEX && m->folder.texts[i].path && model_folder_text(&m->folder, kind, out);
}

void model_file_need(const struct model_file *m, const struct tensor_view *t)
{
    if (is_synth(m)) model_synth_fill(&m->synth, t);
}

void model_file_done(const struct model_file *m, const struct tensor_view *t)
{
    if (is_synth(m)) model_synth_drop(&m->synth, t);
}

static const struct gguf_value *text_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    return v && v->type == GGUF_ARRAY && v->element == GGUF_STRING ? v : NULL;
}

size_t model_file_text_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = text_array(m, key);
    return v ? (size_t)v->count : 0;
}

bool model_file_text_at(const struct model_file *m, const char *key, size_t i, struct model_text *out)
{
    const struct gguf_value *v = text_array(m, key);
    if (!v || i >= v->count) return false;
    *out = gguf_text_at(&m->gguf, v->starts[i]);
    return true;
}

static const struct gguf_value *int_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    if (!v || v->type != GGUF_ARRAY || !gguf_type_bytes(v->element)) return NULL;
    return v->element == GGUF_F32 || v->element == GGUF_F64 ? NULL : v;
}

size_t model_file_int_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = int_array(m, key);
    return v ? (size_t)v->count : 0;
}

bool model_file_int_at(const struct model_file *m, const char *key, size_t i, int64_t *out)
{
    const struct gguf_value *v = int_array(m, key);
    return v && i < v->count && gguf_load_int(v->element, v->bytes + i * gguf_type_bytes(v->element), out);
}

enum rc model_file_digest(struct model_file *m, char out_hex[65], struct err *e)
{
    uint64_t partition;
    if (model_file_cut(m, &partition)) return model_shard_digest(&m->shard, out_hex, e);
    if (is_synth(m)) {
        model_synth_digest(&m->synth, out_hex);
        return RC_OK;
    }
    return m->layout == MODEL_LAYOUT_GGUF ? mapped_file_digest(&m->map, out_hex, e)
                                          : model_folder_digest(&m->folder, out_hex, e);
}
