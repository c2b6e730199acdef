/* model_folder: a folder with config.json and safetensors, opened whole.
 *
 * Private to model_file. Small files (JSON, the template) are copies, shards are maps. */
#ifndef TANDEM_MODEL_FOLDER_H
#define TANDEM_MODEL_FOLDER_H

#include "base.h"
#include "mapped_file.h"
#include "model_file.h"
#include "safetensors.h"
#include "tensor_index.h"

/* A file of a folder in memory, for fuzzing and tests; bytes must outlive the folder. */
struct model_blob {
    const char *name;
    const void *bytes;
    size_t n_bytes;
};

/* The model_json kinds first. */
enum model_folder_text { MODEL_FOLDER_TEMPLATE = MODEL_JSON_KINDS, MODEL_FOLDER_INDEX, MODEL_FOLDER_TEXTS };

struct model_folder {
    char *path;                     /* without a slash at the end; only "/" is one */
    const struct model_blob *blobs; /* NULL: on disk */
    size_t n_blobs;
    struct model_folder_file {
        char *path; /* for messages; NULL: there is none */
        struct buf bytes;
    } texts[MODEL_FOLDER_TEXTS];
    struct buf template; /* of tokenizer_config.json, when no file of its own holds it */
    bool has_template;
    struct mapped_file *shards; /* [n_shards], by name */
    size_t n_shards;
    struct safetensors stored;
    struct tensor_index tensors;
};

/* only: name of the one file of weights, NULL: model.safetensors, or what model.safetensors.index.json names. Errors:
 * EXIT_NO_INPUT when a file is missing, EXIT_UNAVAILABLE (RC_BAD_INPUT) with source and place when one is damaged. *out must
 * be freed after an error too. */
enum rc model_folder_open(const char *path, const char *only, struct model_folder *out, struct err *e);
/* The same over files in memory. */
enum rc model_folder_open_blobs(const struct model_blob *blobs, size_t n_blobs, const char *path, const char *only,
                                struct model_folder *out, struct err *e);
/* The small files of a folder alone, without its weights (shard folders). */
enum rc model_folder_open_texts(const char *path, struct model_folder *out, struct err *e);
/* One .safetensors file in memory, with nothing beside it. */
enum rc model_folder_of_bytes(const void *bytes, size_t n_bytes, const char *name, struct model_folder *out,
                              struct err *e);
void model_folder_free(struct model_folder *f); /* a zero one is fine */

/* SHA-256 over names, lengths and digests of all files in a fixed order. */
enum rc model_folder_digest(const struct model_folder *f, char out_hex[65], struct err *e);

/* What a small file is called. */
const char *model_folder_text_name(enum model_folder_text kind);
/* A file's text; the template is chat_template.jinja or, without that, the field of tokenizer_config.json. */
bool model_folder_text(const struct model_folder *f, enum model_folder_text kind, struct model_text *out);

#endif
