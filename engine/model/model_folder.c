/* model_folder: which files of a folder are the model, and that they agree.
 *
 * Weights are in model.safetensors, or in the shards that model.safetensors.index.json lists tensor by tensor. A shard is
 * a plain name of the same folder (nothing in an index can lead elsewhere), every tensor of the index must be in the shard
 * it names, and every tensor of a shard must be in the index: half of a release beside half of another is noticed here.
 *
 * Small files are read into memory, since editors rewrite them in place; shards are mapped. The digest is of the copies
 * and the maps, not of what has their names by then. Digests of shards are cached beside them, those of the copies are
 * cheap. */
#define _GNU_SOURCE
#include "model_folder.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "json_text.h"

enum { MAX_SHARDS = 512, MAX_FILE_NAME = 255, MAX_VALUES = 1 << 21, MAX_DEPTH = 64, MAX_NAMED_TEMPLATES = 64 };

#define INDEX_NAME "model.safetensors.index.json"
#define WEIGHTS_NAME "model.safetensors"

static const struct {
    const char *name;
    size_t max_bytes;
} texts[MODEL_FOLDER_TEXTS] = {
    [MODEL_JSON_CONFIG] = {"config.json", 4 << 20},
    [MODEL_JSON_GENERATION] = {"generation_config.json", 1 << 20},
    [MODEL_JSON_TOKENIZER] = {"tokenizer.json", 128 << 20},
    [MODEL_JSON_TOKENIZER_CONFIG] = {"tokenizer_config.json", 16 << 20},
    [MODEL_FOLDER_TEMPLATE] = {"chat_template.jinja", 1 << 20},
    [MODEL_FOLDER_INDEX] = {INDEX_NAME, 64 << 20},
};

const char *model_json_name(enum model_json kind) { return texts[kind].name; }
const char *model_folder_text_name(enum model_folder_text kind) { return texts[kind].name; }

static enum rc fail(const char *source, int exit_status, struct err *e, const char *code, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static enum rc fail(const char *source, int exit_status, struct err *e, const char *code, const char *format, ...)
{
    char text[560];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++) /* names and words of the file may be anything */
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    enum rc rc = err_set(e, RC_BAD_INPUT, exit_status, code, "%s", text);
    err_place(e, source, 0, 0, 0);
    return rc;
}

static struct model_text text_of(const struct buf *b) { return (struct model_text){b->data ? b->data : "", b->len}; }

static char *path_of(const struct model_folder *f, const char *name)
{
    char *path = NULL;
    bool root = !strcmp(f->path, "/");
    return asprintf(&path, "%s/%s", root ? "" : f->path, name) < 0 ? NULL : path;
}

static const struct model_blob *blob_of(const struct model_folder *f, const char *name)
{
    for (size_t i = 0; i < f->n_blobs; i++)
        if (!strcmp(f->blobs[i].name, name)) return &f->blobs[i];
    return NULL;
}

/* Leaves texts[kind].path NULL where there is no such file. */
static enum rc read_text(struct model_folder *f, int kind, struct err *e)
{
    struct model_folder_file *file = &f->texts[kind];
    const struct model_blob *blob = blob_of(f, texts[kind].name);
    char *path = path_of(f, texts[kind].name);
    enum rc rc = RC_OK;
    if (!path) return err_no_memory(e);
    if (f->blobs ? !blob : access(path, F_OK) && errno == ENOENT) {
        free(path);
        return RC_OK;
    }
    file->path = path;
    if (!blob)
        rc = file_read(path, texts[kind].max_bytes, &file->bytes, e);
    else if (!buf_append(&file->bytes, blob->bytes, blob->n_bytes))
        rc = err_no_memory(e);
    return rc;
}

/* A list of names, as older models have, holds the one for chats as "default". */
static const json_t *template_of(const json_t *config)
{
    const json_t *template = json_object_get(config, "chat_template");
    if (!json_is_array(template)) return template;
    for (size_t i = 0; i < json_array_size(template) && i < MAX_NAMED_TEMPLATES; i++) {
        const json_t *entry = json_array_get(template, i);
        const char *name = json_string_value(json_object_get(entry, "name"));
        if (name && !strcmp(name, "default")) return json_object_get(entry, "template");
    }
    return NULL;
}

static enum rc read_template(struct model_folder *f, struct err *e)
{
    const struct model_folder_file *file = &f->texts[MODEL_JSON_TOKENIZER_CONFIG];
    const struct json_limits limits = {texts[MODEL_JSON_TOKENIZER_CONFIG].max_bytes, MAX_VALUES, MAX_DEPTH};
    json_t *config;
    if (!file->path || f->texts[MODEL_FOLDER_TEMPLATE].path) return RC_OK;
    enum rc rc = json_text_parse(text_of(&file->bytes).bytes, file->bytes.len, limits, file->path, 0, &config, e);
    if (rc != RC_OK) return rc;
    const json_t *template = template_of(config);
    if (json_is_string(template)) {
        f->has_template = true;
        buf_append(&f->template, json_string_value(template), json_string_length(template));
        if (f->template.failed) rc = err_no_memory(e);
    } else if (template && !json_is_null(template)) {
        rc = fail(file->path, EXIT_UNAVAILABLE, e, "model_bad_template", "chat_template is no text");
    }
    json_decref(config);
    return rc;
}

static enum rc read_texts(struct model_folder *f, bool with_index, struct err *e)
{
    enum rc rc = RC_OK;
    for (int kind = 0; kind < MODEL_FOLDER_TEXTS && rc == RC_OK; kind++)
        if (kind != MODEL_FOLDER_INDEX || with_index) rc = read_text(f, kind, e);
    if (rc == RC_OK && !f->texts[MODEL_JSON_CONFIG].path)
        return fail(NULL, EXIT_NO_INPUT, e, "not_a_model", "the folder %.300s has no config.json", f->path);
    return rc == RC_OK ? read_template(f, e) : rc;
}

/* The next of f->shards; room for it is the caller's. */
static enum rc open_shard(struct model_folder *f, const char *name, struct err *e)
{
    const struct model_blob *blob = blob_of(f, name);
    const struct model_folder_file *index = &f->texts[MODEL_FOLDER_INDEX];
    struct mapped_file *shard = &f->shards[f->n_shards];
    enum rc rc;
    char *path = path_of(f, name);
    if (!path) return err_no_memory(e);
    if (index->path && (f->blobs ? !blob : access(path, F_OK) && errno == ENOENT))
        rc = fail(index->path, EXIT_NO_INPUT, e, "missing_shard", "it names %.255s, which is not in the folder", name);
    else if (f->blobs && !blob)
        rc = fail(NULL, EXIT_NO_INPUT, e, "cannot_open", "cannot open the model %.300s", path);
    else if (blob)
        rc = mapped_file_of_bytes(blob->bytes, blob->n_bytes, path, shard, e);
    else
        rc = mapped_file_open(path, shard, e);
    free(path);
    if (rc != RC_OK) return rc;
    f->n_shards++;
    return safetensors_parse(shard->bytes, shard->n_bytes, shard->path, &f->stored, e);
}

static bool plain_file_name(const char *name)
{
    static const char suffix[] = ".safetensors";
    size_t len = strlen(name);
    if (len < sizeof suffix || len > MAX_FILE_NAME || name[0] == '.' || strchr(name, '/')) return false;
    for (const char *p = name; *p; p++)
        if ((unsigned char)*p < 32 || *p == 127) return false;
    return !strcmp(name + len - (sizeof suffix - 1), suffix);
}

static int compare_texts(const void *a, const void *b)
{
    const char *const *left = a, *const *right = b;
    return strcmp(*left, *right);
}

/* The distinct files of the index, sorted: names[*n], borrowed from the JSON. */
static enum rc list_shards(const struct model_folder *f, json_t *map, const char **names, size_t *n, struct err *e)
{
    const char *source = f->texts[MODEL_FOLDER_INDEX].path, *tensor;
    json_t *value;
    size_t all = 0;
    json_object_foreach(map, tensor, value)
    {
        const char *name = json_string_value(value);
        if (!name || !plain_file_name(name))
            return fail(source, EXIT_UNAVAILABLE, e, "index_bad_name",
                        "the file of tensor %.100s is no plain name of a .safetensors file: %.100s", tensor,
                        name ? name : "no text");
        names[all++] = name;
    }
    qsort(names, all, sizeof *names, compare_texts);
    *n = 0;
    for (size_t i = 0; i < all; i++)
        if (!*n || strcmp(names[*n - 1], names[i])) names[(*n)++] = names[i];
    if (*n > MAX_SHARDS)
        return fail(source, EXIT_UNAVAILABLE, e, "index_too_many", "%zu files, more than %d", *n, MAX_SHARDS);
    return RC_OK;
}

static const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* What the index lists and no shard has. The map is used up. */
static enum rc fail_absent(const struct model_folder *f, json_t *map, struct err *e)
{
    const char *tensor;
    json_t *value;
    for (size_t i = 0; i < f->stored.n; i++) json_object_del(map, f->stored.tensors[i].name);
    json_object_foreach(map, tensor, value)
    {
        return fail(f->texts[MODEL_FOLDER_INDEX].path, EXIT_UNAVAILABLE, e, "index_mismatch",
                    "tensor %.100s is not in %.255s", tensor, json_string_value(value));
    }
    return RC_OK;
}

/* Every stored tensor must be in the index with its file. Names are unique in a file, so that all of the index was found
 * when the counts agree. */
static enum rc check_index(const struct model_folder *f, json_t *map, struct err *e)
{
    for (size_t i = 0; i < f->stored.n; i++) {
        const struct stored_tensor *t = &f->stored.tensors[i];
        const char *file = json_string_value(json_object_get(map, t->name));
        if (!file)
            return fail(t->source, EXIT_UNAVAILABLE, e, "index_mismatch", "tensor %.100s is not in %s", t->name,
                        INDEX_NAME);
        if (strcmp(file, file_name(t->source)))
            return fail(t->source, EXIT_UNAVAILABLE, e, "index_mismatch",
                        "tensor %.100s is here, but %s says that it is in %.255s", t->name, INDEX_NAME, file);
    }
    return f->stored.n == json_object_size(map) ? RC_OK : fail_absent(f, map, e);
}

static enum rc open_indexed(struct model_folder *f, struct err *e)
{
    const struct model_folder_file *file = &f->texts[MODEL_FOLDER_INDEX];
    const struct json_limits limits = {texts[MODEL_FOLDER_INDEX].max_bytes, MAX_VALUES, MAX_DEPTH};
    const char **names = NULL;
    json_t *index;
    size_t n = 0;
    enum rc rc = json_text_parse(text_of(&file->bytes).bytes, file->bytes.len, limits, file->path, 0, &index, e);
    if (rc != RC_OK) return rc;
    json_t *map = json_object_get(index, "weight_map");
    if (!json_is_object(map) || !json_object_size(map)) {
        rc = fail(file->path, EXIT_UNAVAILABLE, e, "index_bad", "weight_map is missing, empty or no object");
        goto done;
    }
    names = malloc(json_object_size(map) * sizeof *names);
    rc = names ? list_shards(f, map, names, &n, e) : err_no_memory(e);
    if (rc != RC_OK) goto done;
    f->shards = calloc(n, sizeof *f->shards);
    if (!f->shards) rc = err_no_memory(e);
    for (size_t i = 0; i < n && rc == RC_OK; i++) rc = open_shard(f, names[i], e);
    if (rc == RC_OK) rc = check_index(f, map, e);
done:
    free(names);
    json_decref(index);
    return rc;
}

static bool there(const struct model_folder *f, const char *name)
{
    if (f->blobs) return blob_of(f, name) != NULL;
    char *path = path_of(f, name);
    bool found = path && access(path, F_OK) == 0;
    free(path);
    return found;
}

static enum rc open_weights(struct model_folder *f, const char *only, struct err *e)
{
    if (!only && !f->texts[MODEL_FOLDER_INDEX].path && !there(f, WEIGHTS_NAME))
        return fail(NULL, EXIT_NO_INPUT, e, "not_a_model", "the folder %.300s has neither %s nor %s", f->path,
                    WEIGHTS_NAME, INDEX_NAME);
    if (f->texts[MODEL_FOLDER_INDEX].path) return open_indexed(f, e);
    f->shards = calloc(1, sizeof *f->shards);
    return f->shards ? open_shard(f, only ? only : WEIGHTS_NAME, e) : err_no_memory(e);
}

/* A file that the index names stands for the whole model. */
static bool index_names(const struct model_folder *f, const char *name)
{
    const struct buf *index = &f->texts[MODEL_FOLDER_INDEX].bytes;
    char quoted[MAX_FILE_NAME + 3];
    int len = snprintf(quoted, sizeof quoted, "\"%s\"", name);
    return index->len && len > 0 && (size_t)len < sizeof quoted && memmem(index->data, index->len, quoted, (size_t)len);
}

/* A folder whose weights are one file has no use for an index. */
static enum rc open_all(struct model_folder *f, const char *only, struct err *e)
{
    bool single = only ? !strcmp(only, WEIGHTS_NAME) : there(f, WEIGHTS_NAME);
    enum rc rc = read_texts(f, !single, e);
    if (rc == RC_OK && only && !index_names(f, only)) {
        free(f->texts[MODEL_FOLDER_INDEX].path);
        buf_free(&f->texts[MODEL_FOLDER_INDEX].bytes);
        f->texts[MODEL_FOLDER_INDEX].path = NULL;
    }
    if (rc == RC_OK) rc = open_weights(f, only, e);
    return rc == RC_OK ? safetensors_resolve(&f->stored, &f->tensors, e) : rc;
}

static enum rc start(const char *path, struct model_folder *out, struct err *e)
{
    *out = (struct model_folder){.path = strdup(path)};
    if (!out->path) return err_no_memory(e);
    for (size_t n = strlen(path); n > 1 && out->path[n - 1] == '/'; n--) out->path[n - 1] = '\0';
    return RC_OK;
}

enum rc model_folder_open(const char *path, const char *only, struct model_folder *out, struct err *e)
{
    enum rc rc = start(path, out, e);
    return rc == RC_OK ? open_all(out, only, e) : rc;
}

enum rc model_folder_open_texts(const char *path, struct model_folder *out, struct err *e)
{
    enum rc rc = start(path, out, e);
    return rc == RC_OK ? read_texts(out, false, e) : rc;
}

enum rc model_folder_open_blobs(const struct model_blob *blobs, size_t n_blobs, const char *path, const char *only,
                                struct model_folder *out, struct err *e)
{
    *out = (struct model_folder){.path = strdup(path), .blobs = blobs, .n_blobs = n_blobs};
    return out->path ? open_all(out, only, e) : err_no_memory(e);
}

enum rc model_folder_of_bytes(const void *bytes, size_t n_bytes, const char *name, struct model_folder *out,
                              struct err *e)
{
    *out = (struct model_folder){.shards = calloc(1, sizeof *out->shards)};
    enum rc rc = out->shards ? mapped_file_of_bytes(bytes, n_bytes, name, out->shards, e) : err_no_memory(e);
    if (rc != RC_OK) return rc;
    out->n_shards = 1;
    rc = safetensors_parse(bytes, n_bytes, out->shards->path, &out->stored, e);
    return rc == RC_OK ? safetensors_resolve(&out->stored, &out->tensors, e) : rc;
}

void model_folder_free(struct model_folder *f)
{
    tensor_index_free(&f->tensors);
    safetensors_free(&f->stored);
    for (size_t i = 0; i < f->n_shards; i++) mapped_file_close(&f->shards[i]);
    free(f->shards);
    buf_free(&f->template);
    for (int i = 0; i < MODEL_FOLDER_TEXTS; i++) {
        buf_free(&f->texts[i].bytes);
        free(f->texts[i].path);
    }
    free(f->path);
    *f = (struct model_folder){0};
}

enum rc model_folder_digest(const struct model_folder *f, char out_hex[65], struct err *e)
{
    struct buf list = {0};
    char hex[65];
    enum rc rc = RC_OK;
    buf_append_str(&list, "tandem model folder 1\n");
    for (int i = 0; i < MODEL_FOLDER_TEXTS; i++) {
        if (!f->texts[i].path) continue;
        mapped_file_digest_bytes(text_of(&f->texts[i].bytes).bytes, f->texts[i].bytes.len, hex);
        buf_printf(&list, "%s %zu %s\n", hex, f->texts[i].bytes.len, texts[i].name);
    }
    for (size_t i = 0; i < f->n_shards && rc == RC_OK; i++) {
        rc = mapped_file_digest(&f->shards[i], hex, e);
        buf_printf(&list, "%s %zu %s\n", hex, f->shards[i].n_bytes, file_name(f->shards[i].path));
    }
    if (rc == RC_OK && list.failed) rc = err_no_memory(e);
    if (rc == RC_OK) mapped_file_digest_bytes(list.data, list.len, out_hex);
    buf_free(&list);
    return rc;
}

bool model_folder_text(const struct model_folder *f, enum model_folder_text kind, struct model_text *out)
{
    const struct model_folder_file *file = &f->texts[kind];
    if (!file->path && !(kind == MODEL_FOLDER_TEMPLATE && f->has_template)) return false;
    *out = text_of(file->path ? &file->bytes : &f->template);
    return true;
}
