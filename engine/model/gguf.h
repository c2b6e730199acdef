/* gguf: reads the header of a GGUF version 3 file into an index, checking everything the index will hand out.
 *
 * Private to model_file. The index points into the caller's bytes, which must outlive it; names are copies. */
#ifndef TANDEM_GGUF_H
#define TANDEM_GGUF_H

#include "base.h"
#include "model_file.h"
#include "tensor_index.h"

enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_TYPES
};

struct gguf_value {
    char *key;
    enum gguf_type type;
    enum gguf_type element; /* of an array */
    uint64_t count;         /* bytes of a string, elements of an array, else 1 */
    const uint8_t *bytes;   /* the characters, the first element, the number; unaligned */
    uint64_t *starts;       /* arrays of strings: where each string's length stands, from the start of the file */
};

struct gguf {
    const uint8_t *file;
    struct gguf_value *values;        /* [n_values], file order */
    const struct gguf_value **by_key; /* [n_values], sorted */
    size_t n_values;
    struct tensor_index tensors;
};

/* RC_BAD_INPUT with source and byte when anything is wrong. *out is then empty; otherwise free it with gguf_free. */
enum rc gguf_parse(const void *bytes, size_t n_bytes, const char *source, struct gguf *out, struct err *e);
void gguf_free(struct gguf *g); /* an empty one is fine */

/* NULL: absent. */
const struct gguf_value *gguf_value_find(const struct gguf *g, const char *key);

size_t gguf_type_bytes(enum gguf_type t); /* 0 for strings and arrays */
/* The integer or truth value at p; false when t is neither or the value does not fit. */
bool gguf_load_int(enum gguf_type t, const uint8_t *p, int64_t *out);
bool gguf_load_uint(enum gguf_type t, const uint8_t *p, uint64_t *out);
bool gguf_load_float(enum gguf_type t, const uint8_t *p, double *out);
/* The string whose length stands at `start`, which must be one of a value's starts. */
struct model_text gguf_text_at(const struct gguf *g, uint64_t start);

#endif
