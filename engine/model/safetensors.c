/* safetensors: the container. 8 bytes of length, a JSON header, then nothing but data.
 *
 * {"name": {"dtype": "BF16", "shape": [out, in], "data_offsets": [begin, end]}, ..., "__metadata__": {"key": "text"}};
 * offsets count from the end of the header, shapes are row-major. The header may be padded with spaces at its end.
 *
 * Checked here, for every tensor whether it will be used or not: names are unique, not empty and free of control
 * characters; the element type is one with a size; the shape times that size is the span of the offsets; the tensors
 * cover the data without overlap, hole or rest, as the format demands. A hole could hide bytes that no digest of tensors
 * would see, and a truncated download shows as data that ends too early.
 *
 * Bounded: the header by the format's own 100 MB, its values, the tensors of all files together, the rank. */
#define _GNU_SOURCE
#include "safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json_text.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are read in place, little-endian");

enum {
    LENGTH_BYTES = 8,
    MAX_HEADER_BYTES = 100000000, /* the format's own limit */
    MAX_HEADER_VALUES = 1 << 21,  /* some twenty for each tensor */
    HEADER_DEPTH = 3,             /* header, entry, shape */
    MAX_TENSORS = 65536,
    MAX_NAME_BYTES = 255
};

static const struct {
    const char *name;
    size_t bytes;
} dtypes[SAFETENSORS_DTYPES] = {
    [SAFETENSORS_BF16] = {"BF16", 2},       [SAFETENSORS_F16] = {"F16", 2},
    [SAFETENSORS_F32] = {"F32", 4},         [SAFETENSORS_U8] = {"U8", 1},
    [SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1}, [SAFETENSORS_F8_E8M0] = {"F8_E8M0", 1},
    [SAFETENSORS_I8] = {"I8", 1},           [SAFETENSORS_I16] = {"I16", 2},
    [SAFETENSORS_U16] = {"U16", 2},         [SAFETENSORS_I32] = {"I32", 4},
    [SAFETENSORS_U32] = {"U32", 4},         [SAFETENSORS_I64] = {"I64", 8},
    [SAFETENSORS_U64] = {"U64", 8},         [SAFETENSORS_BOOL] = {"BOOL", 1},
    [SAFETENSORS_F64] = {"F64", 8},         [SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1},
};

const char *safetensors_dtype_name(enum safetensors_dtype d) { return dtypes[d].name; }

/* One file while it is read. */
struct reader {
    const uint8_t *bytes;
    size_t header_bytes;
    size_t data_bytes;
    const char *source;
    struct err *e;
};

static enum rc fail(const struct reader *r, size_t byte, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static enum rc fail(const struct reader *r, size_t byte, const char *code, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (char *c = text; *c; c++) /* names and words of the file may be anything */
        if ((unsigned char)*c < 32 || *c == 127) *c = '?';
    enum rc rc = err_set(r->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s", text);
    err_place(r->e, r->source, 0, 0, (int64_t)byte);
    return rc;
}

/* Entries have no place of their own once the header is parsed. */
static enum rc fail_entry(const struct reader *r, const char *name, const char *code, const char *what)
{
    return fail(r, LENGTH_BYTES, code, "tensor %.100s: %s", name, what);
}

static enum rc take_length(struct reader *r, size_t n_bytes)
{
    uint64_t header;
    if (n_bytes < LENGTH_BYTES)
        return fail(r, 0, "safetensors_truncated", "the length of the header needs 8 bytes, the file has %zu", n_bytes);
    memcpy(&header, r->bytes, sizeof header);
    if (header > MAX_HEADER_BYTES)
        return fail(r, 0, "safetensors_too_long", "a header of %" PRIu64 " bytes, more than %d", header,
                    MAX_HEADER_BYTES);
    if (header > n_bytes - LENGTH_BYTES)
        return fail(r, 0, "safetensors_truncated", "the header needs %" PRIu64 " bytes, the file has %zu more", header,
                    n_bytes - LENGTH_BYTES);
    if (!header || r->bytes[LENGTH_BYTES] != '{')
        return fail(r, LENGTH_BYTES, "safetensors_bad_header", "the header does not begin with {");
    r->header_bytes = (size_t)header;
    r->data_bytes = n_bytes - LENGTH_BYTES - (size_t)header;
    return RC_OK;
}

static enum rc check_name(const struct reader *r, const char *name)
{
    size_t len = strlen(name);
    if (!len) return fail(r, LENGTH_BYTES, "safetensors_bad_name", "a tensor has no name");
    if (len > MAX_NAME_BYTES)
        return fail(r, LENGTH_BYTES, "safetensors_bad_name", "the name %.100s... has %zu bytes, more than %d", name,
                    len, MAX_NAME_BYTES);
    for (const char *p = name; *p; p++)
        if ((unsigned char)*p < 32 || *p == 127)
            return fail(r, LENGTH_BYTES, "safetensors_bad_name", "the name of a tensor holds the control character %d",
                        *p);
    return RC_OK;
}

/* A JSON integer from 0 up. */
static bool natural(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) return false;
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static enum rc take_dtype(const struct reader *r, const json_t *entry, struct stored_tensor *t)
{
    const char *text = json_string_value(json_object_get(entry, "dtype"));
    if (!text) return fail_entry(r, t->name, "safetensors_bad_entry", "dtype is missing or no string");
    for (int d = 0; d < SAFETENSORS_DTYPES; d++)
        if (!strcmp(text, dtypes[d].name)) {
            t->dtype = (enum safetensors_dtype)d;
            return RC_OK;
        }
    return fail(r, LENGTH_BYTES, "safetensors_bad_dtype", "tensor %.100s is stored as %.20s, a type that is not known",
                t->name, text);
}

static enum rc take_shape(const struct reader *r, const json_t *entry, struct stored_tensor *t)
{
    const json_t *shape = json_object_get(entry, "shape");
    uint64_t bytes = dtypes[t->dtype].bytes;
    if (!json_is_array(shape)) return fail_entry(r, t->name, "safetensors_bad_entry", "shape is missing or no array");
    size_t rank = json_array_size(shape);
    if (rank > SAFETENSORS_DIMS)
        return fail(r, LENGTH_BYTES, "safetensors_bad_shape", "tensor %.100s has %zu dimensions, more than %d", t->name,
                    rank, SAFETENSORS_DIMS);
    t->rank = (int)rank;
    for (size_t i = 0; i < rank; i++) {
        if (!natural(json_array_get(shape, i), &t->shape[i]))
            return fail_entry(r, t->name, "safetensors_bad_shape", "a dimension is no whole number from 0 up");
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes) || bytes > INT64_MAX)
            return fail_entry(r, t->name, "safetensors_bad_shape", "the dimensions multiply beyond 63 bits");
    }
    t->n_bytes = (size_t)bytes;
    return RC_OK;
}

/* The offsets, checked against the shape and the data; whether they overlap is seen when all are known. */
static enum rc take_offsets(const struct reader *r, const json_t *entry, struct stored_tensor *t)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t begin, end;
    if (json_array_size(offsets) != 2 || !natural(json_array_get(offsets, 0), &begin) ||
        !natural(json_array_get(offsets, 1), &end) || begin > end)
        return fail_entry(r, t->name, "safetensors_bad_entry", "data_offsets are not two ascending whole numbers");
    if (end > r->data_bytes)
        return fail(r, LENGTH_BYTES, "safetensors_truncated",
                    "tensor %.100s needs the bytes %" PRIu64 " to %" PRIu64 ", but the data has only %zu", t->name,
                    begin, end, r->data_bytes);
    if (end - begin != t->n_bytes)
        return fail(r, LENGTH_BYTES, "safetensors_bad_shape",
                    "tensor %.100s takes %zu bytes by its shape and %s, %" PRIu64 " by its offsets", t->name,
                    t->n_bytes, dtypes[t->dtype].name, end - begin);
    t->bytes = r->bytes + LENGTH_BYTES + r->header_bytes + begin;
    return RC_OK;
}

static enum rc take_tensor(const struct reader *r, const char *name, const json_t *entry, struct stored_tensor *t)
{
    enum rc rc;
    if (!json_is_object(entry)) return fail_entry(r, name, "safetensors_bad_entry", "the entry is no object");
    t->name = strdup(name);
    t->source = r->source;
    if (!t->name) return err_no_memory(r->e);
    if ((rc = take_dtype(r, entry, t)) || (rc = take_shape(r, entry, t)) || (rc = take_offsets(r, entry, t))) return rc;
    if (json_object_size(entry) != 3)
        return fail_entry(r, name, "safetensors_bad_entry", "more than dtype, shape and data_offsets");
    return RC_OK;
}

static enum rc check_metadata(const struct reader *r, json_t *metadata)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata)) return fail(r, LENGTH_BYTES, "safetensors_bad_entry", "__metadata__ is no object");
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return fail(r, LENGTH_BYTES, "safetensors_bad_entry", "__metadata__ holds what is no string");
    }
    return RC_OK;
}

static enum rc grow(const struct reader *r, struct safetensors *io, size_t more)
{
    if (more > MAX_TENSORS || io->n + more > MAX_TENSORS)
        return fail(r, LENGTH_BYTES, "safetensors_too_many", "%zu tensors, more than %d", io->n + more, MAX_TENSORS);
    if (io->n + more <= io->cap) return RC_OK;
    size_t cap = 2 * (io->n + more);
    struct stored_tensor *tensors = realloc(io->tensors, cap * sizeof *tensors);
    if (!tensors) return err_no_memory(r->e);
    io->tensors = tensors;
    io->cap = cap;
    return RC_OK;
}

static enum rc take_entries(const struct reader *r, json_t *header, struct safetensors *io)
{
    const char *name;
    json_t *entry;
    enum rc rc = grow(r, io, json_object_size(header));
    if (rc != RC_OK) return rc;
    json_object_foreach(header, name, entry)
    {
        if (!strcmp(name, "__metadata__"))
            rc = check_metadata(r, entry);
        else if ((rc = check_name(r, name)) == RC_OK) {
            io->tensors[io->n] = (struct stored_tensor){0};
            rc = take_tensor(r, name, entry, &io->tensors[io->n++]);
        }
        if (rc != RC_OK) return rc;
    }
    return RC_OK;
}

/* By place; empty tensors before the one that begins where they are. */
static int compare_places(const void *a, const void *b)
{
    const struct stored_tensor *left = a, *right = b;
    if (left->bytes != right->bytes) return left->bytes < right->bytes ? -1 : 1;
    return (left->n_bytes > right->n_bytes) - (left->n_bytes < right->n_bytes);
}

static enum rc check_cover(const struct reader *r, struct stored_tensor *tensors, size_t n)
{
    const size_t data = LENGTH_BYTES + r->header_bytes;
    size_t at = 0;
    if (n) qsort(tensors, n, sizeof *tensors, compare_places);
    for (size_t i = 0; i < n; i++) {
        size_t begin = (size_t)(tensors[i].bytes - (r->bytes + data));
        if (begin < at)
            return fail(r, data + begin, "safetensors_bad_offset", "tensor %.100s at %zu overlaps tensor %.100s",
                        tensors[i].name, begin, tensors[i - 1].name);
        if (begin > at)
            return fail(r, data + at, "safetensors_bad_offset", "%zu bytes before tensor %.100s belong to no tensor",
                        begin - at, tensors[i].name);
        at = begin + tensors[i].n_bytes;
    }
    if (at != r->data_bytes)
        return fail(r, data + at, "safetensors_bad_offset", "the last %zu bytes belong to no tensor",
                    r->data_bytes - at);
    return RC_OK;
}

enum rc safetensors_parse(const void *bytes, size_t n_bytes, const char *source, struct safetensors *io, struct err *e)
{
    static const struct json_limits limits = {MAX_HEADER_BYTES, MAX_HEADER_VALUES, HEADER_DEPTH};
    struct reader r = {.bytes = bytes, .source = source, .e = e};
    const size_t first = io->n;
    json_t *header = NULL;
    enum rc rc = take_length(&r, n_bytes);
    if (rc == RC_OK)
        rc = json_text_parse((const char *)bytes + LENGTH_BYTES, r.header_bytes, limits, source, LENGTH_BYTES, &header,
                             e);
    if (rc == RC_OK) rc = take_entries(&r, header, io);
    if (rc == RC_OK) rc = check_cover(&r, io->n > first ? &io->tensors[first] : NULL, io->n - first);
    json_decref(header);
    return rc;
}

void safetensors_free(struct safetensors *s)
{
    for (size_t i = 0; i < s->n; i++) free(s->tensors[i].name);
    free(s->tensors);
    *s = (struct safetensors){0};
}
