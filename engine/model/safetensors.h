/* safetensors: the checked header of .safetensors files, and what the tensors stored there mean together.
 *
 * Private to model_file. Stored tensors point into the files' bytes, which must outlive them. Two steps: safetensors_parse,
 * once a file, takes the header apart; safetensors_resolve makes logical tensors of all that was stored, joining codes with
 * their scales. */
#ifndef TANDEM_SAFETENSORS_H
#define TANDEM_SAFETENSORS_H

#include "base.h"
#include "tensor_index.h"

enum { SAFETENSORS_DIMS = 8 }; /* more than any model's; a vision tower's patches take five */

enum safetensors_dtype {
    SAFETENSORS_BF16,
    SAFETENSORS_F16,
    SAFETENSORS_F32,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E8M0,
    SAFETENSORS_U8,
    /* those below have a size but no use */
    SAFETENSORS_I8,
    SAFETENSORS_I16,
    SAFETENSORS_U16,
    SAFETENSORS_I32,
    SAFETENSORS_U32,
    SAFETENSORS_I64,
    SAFETENSORS_U64,
    SAFETENSORS_BOOL,
    SAFETENSORS_F64,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_DTYPES
};
const char *safetensors_dtype_name(enum safetensors_dtype d); /* "BF16" */

struct stored_tensor {
    char *name;
    const char *source; /* its file, for messages: the string given to safetensors_parse */
    enum safetensors_dtype dtype;
    int rank;                         /* 0..SAFETENSORS_DIMS */
    uint64_t shape[SAFETENSORS_DIMS]; /* [rank], outermost first; may hold zeros */
    const uint8_t *bytes;
    size_t n_bytes;
};

struct safetensors {
    struct stored_tensor *tensors; /* [n], by file, then by place in the file */
    size_t n;
    size_t cap;
};

/* Appends the tensors of one file. source must outlive io. RC_BAD_INPUT, EXIT_UNAVAILABLE with source and byte when
 * anything is wrong; io then may hold part of them and is to be freed. */
enum rc safetensors_parse(const void *bytes, size_t n_bytes, const char *source, struct safetensors *io, struct err *e);
/* The logical tensors, sorted. out (empty before) is freed by the caller, after an error too. */
enum rc safetensors_resolve(const struct safetensors *s, struct tensor_index *out, struct err *e);
void safetensors_free(struct safetensors *s); /* back to zero */

#endif
