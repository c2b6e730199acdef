/* model_file: one checked index over a model's files, whatever their container.
 *
 * GGUF (one file), safetensors (a folder with config.json and one or several .safetensors files) and synthetic models
 * ("synth:NAME[:seed]") look alike from here on: named tensors, and metadata. Opening maps the files read-only and validates
 * everything the index will ever hand out: after RC_OK every tensor's bytes lie inside a map, its shape multiplies without
 * overflow and agrees with its format, and names are unique. Views (tensor_view, model_text) live until model_file_close. */
#ifndef TANDEM_MODEL_FILE_H
#define TANDEM_MODEL_FILE_H

#include "base.h"
#include "quant.h"

enum { MODEL_DIMS = 4 };

/* One logical tensor. Quantized safetensors matrices take several stored tensors (codes, scales, global factors); they are
 * one view here, named after the matrix ("model.layers.0.mlp.up_proj.weight"), recognized by dtype and sibling names, and the
 * siblings are not listed (nor are activation scales and integers, which nothing uses). */
struct tensor_view {
    const char *name;          /* NUL-terminated */
    enum quant_format format;  /* = matrix.format */
    int n_dims;                /* 1..4; more than four, in vision towers, are multiplied into the outermost */
    uint64_t dims[MODEL_DIMS]; /* dims[0] is contiguous: in_features of a matrix; unused ones are 1 */
    const void *bytes;         /* not aligned beyond what the file gives (GGUF: 32, safetensors: 1) */
    size_t n_bytes;            /* of the whole tensor, also where matrix.window says that less is there */
    struct quant_matrix matrix; /* rows = product of dims[1..], cols = dims[0] */
};

struct model_text {
    const char *bytes; /* not NUL-terminated */
    size_t len;
};

struct model_file;

/* What names and values follow: GGUF's (converted: norms + 1, heads tiled, ...) or Hugging Face's. */
enum model_layout { MODEL_LAYOUT_GGUF, MODEL_LAYOUT_HF };
enum model_layout model_file_layout(const struct model_file *m);

/* The JSON files beside safetensors, as their text; false where there is none (and for GGUF). */
enum model_json {
    MODEL_JSON_CONFIG,
    MODEL_JSON_GENERATION,
    MODEL_JSON_TOKENIZER,
    MODEL_JSON_TOKENIZER_CONFIG,
    MODEL_JSON_KINDS
};
bool model_file_json(const struct model_file *m, enum model_json kind, struct model_text *out);
const char *model_json_name(enum model_json kind); /* "config.json" */

/* The text of the model's chat template: GGUF's tokenizer.chat_template, else chat_template.jinja, else the field of
 * tokenizer_config.json. */
bool model_file_chat_template(const struct model_file *m, struct model_text *out);

/* True when weights were made up (synth:): answers are noise. */
bool model_file_synthetic(const struct model_file *m);
/* Made-up weights fill their memory when they are needed: before the bytes of a tensor are read it is needed, and once done with
 * its memory is given back. Files need neither; nothing happens. */
void model_file_need(const struct model_file *m, const struct tensor_view *t);
void model_file_done(const struct model_file *m, const struct tensor_view *t);

/* Opens path: a GGUF v3 file, a folder with config.json and safetensors, a file in such a folder, a folder that was cut
 * (`tandem shard`), or "synth:NAME". Errors: EXIT_NO_INPUT when it cannot be opened, EXIT_UNAVAILABLE (RC_BAD_INPUT) with source
 * and byte when it is damaged or of an unknown kind or version. The caller frees with model_file_close (NULL is fine). */
enum rc model_file_open(const char *path, struct model_file **out, struct err *e);
/* The same for one rank of a group. Of a folder that was cut for the ranks of a group (`tandem shard`) it opens the rank's own
 * part; model_file_open opens that of rank 0, which is enough for all but weights. ranks 0: whatever number it was cut for. */
enum rc model_file_open_rank(const char *path, int rank, int ranks, struct model_file **out, struct err *e);
/* False: the model is whole. Else the digest of the partition that it was cut for. */
bool model_file_cut(const struct model_file *m, uint64_t *out_partition);
/* The same over one file in memory, GGUF or safetensors (fuzzing, tests); the caller keeps the bytes alive. */
enum rc model_file_open_bytes(const void *bytes, size_t n_bytes, const char *name, struct model_file **out, struct err *e);
void model_file_close(struct model_file *m);

const char *model_file_path(const struct model_file *m);
size_t model_file_tensor_count(const struct model_file *m);
const struct tensor_view *model_file_tensor_at(const struct model_file *m, size_t i); /* file order */
const struct tensor_view *model_file_tensor(const struct model_file *m, const char *name); /* NULL: absent */

/* Keys in file order, for listings and for refusing families of keys. */
size_t model_file_key_count(const struct model_file *m);
const char *model_file_key_at(const struct model_file *m, size_t i);
bool model_file_has(const struct model_file *m, const char *key); /* of whatever type */

/* Metadata by key (GGUF; nothing is found in other containers); false when absent or of another type (any integer type
 * that fits, any float type, bool for u64). */
bool model_file_u64(const struct model_file *m, const char *key, uint64_t *out);
bool model_file_f64(const struct model_file *m, const char *key, double *out);
bool model_file_bool(const struct model_file *m, const char *key, bool *out);
bool model_file_text(const struct model_file *m, const char *key, struct model_text *out);
/* Arrays: the number of elements, 0 when absent or of another element type. */
size_t model_file_text_array(const struct model_file *m, const char *key);
bool model_file_text_at(const struct model_file *m, const char *key, size_t i, struct model_text *out); /* O(1) */
size_t model_file_int_array(const struct model_file *m, const char *key);
bool model_file_int_at(const struct model_file *m, const char *key, size_t i, int64_t *out);

/* SHA-256 over all bytes of the model, as 64 hex digits + NUL; of a folder, over the names, lengths and digests of its
 * files in a fixed order. Kept in a small file beside each file of weights (".NAME.tandem-digest": size, mtime, inode,
 * digest) and reused while those agree; an unwritable folder is no error. */
enum rc model_file_digest(struct model_file *m, char out_hex[65], struct err *e);

#endif
