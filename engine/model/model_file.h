/* model_file: one checked index over a model's files, whatever their container.
 *
 * Opening maps the file read-only and validates everything the index will ever hand out: after RC_OK every tensor's
 * bytes lie inside the map, its shape multiplies without overflow and agrees with its format, and names are unique.
 * Views (tensor_view, model_text) point into the map and live until model_file_close. */
#ifndef TANDEM_MODEL_FILE_H
#define TANDEM_MODEL_FILE_H

#include "base.h"
#include "quant.h"

enum { MODEL_DIMS = 4 };

struct tensor_view {
    const char *name;         /* NUL-terminated */
    enum quant_format format;
    int n_dims;               /* 1..4 */
    uint64_t dims[MODEL_DIMS]; /* dims[0] is contiguous: in_features of a matrix; unused ones are 1 */
    const void *bytes;        /* not aligned beyond what the file gives (GGUF: 32) */
    size_t n_bytes;
};

struct model_text {
    const char *bytes; /* not NUL-terminated */
    size_t len;
};

struct model_file;

/* Opens path (GGUF v3). Errors: EXIT_NO_INPUT when it cannot be opened, EXIT_UNAVAILABLE (RC_BAD_INPUT) with source and
 * byte when it is damaged or of an unknown kind or version. The caller frees with model_file_close (NULL is fine). */
enum rc model_file_open(const char *path, struct model_file **out, struct err *e);
/* The same over bytes in memory (fuzzing, tests); the caller keeps them alive. */
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

/* Metadata by key; false when absent or of another type (any integer type that fits, any float type, bool for u64). */
bool model_file_u64(const struct model_file *m, const char *key, uint64_t *out);
bool model_file_f64(const struct model_file *m, const char *key, double *out);
bool model_file_bool(const struct model_file *m, const char *key, bool *out);
bool model_file_text(const struct model_file *m, const char *key, struct model_text *out);
/* Arrays: the number of elements, 0 when absent or of another element type. */
size_t model_file_text_array(const struct model_file *m, const char *key);
bool model_file_text_at(const struct model_file *m, const char *key, size_t i, struct model_text *out); /* O(1) */
size_t model_file_int_array(const struct model_file *m, const char *key);
bool model_file_int_at(const struct model_file *m, const char *key, size_t i, int64_t *out);

/* SHA-256 over all bytes of the model, as 64 hex digits + NUL. Kept in a small file beside the model
 * (".NAME.tandem-digest": size, mtime, inode, digest) and reused while those agree; an unwritable folder is no error. */
enum rc model_file_digest(struct model_file *m, char out_hex[65], struct err *e);

#endif
