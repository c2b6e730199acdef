/* gguf: the checked index over one GGUF file in memory.
 *
 * Layout: "GGUF", u32 version, u64 tensor count, u64 key count; the keys with their values; the tensors' names, shapes,
 * types and offsets; padding to general.alignment; the data that the offsets count from. One cursor walks the header
 * once. It never reads past the end, every length is compared with what is left before anything is multiplied,
 * allocated or added, and the first failure is kept with its byte.
 *
 * What is allocated is bounded by the file's own size: a table of entries needs bytes for every entry, an index over an
 * array of strings needs eight bytes a string. Work is bounded likewise; arrays nest at most four deep.
 *
 * Stricter than the format asks: names and keys are unique, not empty and free of control characters, dimensions are at
 * least 1, tensors lie in the order of their entries and do not overlap, and every tensor's format is one that quant
 * decodes. A model with a tensor of an unknown format is refused here, with the tensor's name, since it could not be
 * used and its bytes could not be bounded. Gaps between tensors are tolerated. */
#define _GNU_SOURCE
#include "gguf.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GGUF_VERSION = 3,
    MAX_ENTRIES = 65536,   /* keys, and tensors */
    MAX_KEY_BYTES = 65535, /* the format's own limit */
    MAX_NAME_BYTES = 255,
    MAX_TEXT_BYTES = 64 << 20, /* one string value */
    MAX_ARRAY_DEPTH = 4,
    MIN_ALIGNMENT = 8, /* the format's own limit */
    MAX_ALIGNMENT = 1 << 20,
    DEFAULT_ALIGNMENT = 32,
    MIN_STRING_BYTES = 8,       /* its length */
    MIN_ARRAY_BYTES = 12,       /* element type and count */
    MIN_VALUE_ENTRY_BYTES = 14, /* key of one character, type, one byte */
    MIN_TENSOR_ENTRY_BYTES = 33 /* name of one character, dimensions, type, offset */
};

struct cursor {
    const uint8_t *file;
    size_t at;
    size_t end;
    const char *source;
    enum rc rc; /* RC_OK until the first failure */
    struct err *e;
};

static const uint8_t type_bytes[GGUF_TYPES] = {
    [GGUF_U8] = 1,  [GGUF_I8] = 1,   [GGUF_U16] = 2, [GGUF_I16] = 2, [GGUF_U32] = 4, [GGUF_I32] = 4,
    [GGUF_F32] = 4, [GGUF_BOOL] = 1, [GGUF_U64] = 8, [GGUF_I64] = 8, [GGUF_F64] = 8,
};

/* Numbers of tensor types in the file. Those without a format have a name for the message only. */
static const struct tensor_type {
    uint32_t number;
    const char *name;
    int format; /* enum quant_format, -1: not read */
} tensor_types[] = {
    {0, "F32", QUANT_F32},    {1, "F16", QUANT_F16},   {2, "Q4_0", QUANT_Q4_0},  {3, "Q4_1", QUANT_Q4_1},
    {6, "Q5_0", QUANT_Q5_0},  {7, "Q5_1", QUANT_Q5_1}, {8, "Q8_0", QUANT_Q8_0},  {9, "Q8_1", -1},
    {10, "Q2_K", -1},         {11, "Q3_K", -1},        {12, "Q4_K", QUANT_Q4_K}, {13, "Q5_K", QUANT_Q5_K},
    {14, "Q6_K", QUANT_Q6_K}, {15, "Q8_K", -1},        {16, "IQ2_XXS", -1},      {17, "IQ2_XS", -1},
    {18, "IQ3_XXS", -1},      {19, "IQ1_S", -1},       {20, "IQ4_NL", -1},       {21, "IQ3_S", -1},
    {22, "IQ2_S", -1},        {23, "IQ4_XS", -1},      {24, "I8", -1},           {25, "I16", -1},
    {26, "I32", -1},          {27, "I64", -1},         {28, "F64", -1},          {29, "IQ1_M", -1},
    {30, "BF16", QUANT_BF16}, {34, "TQ1_0", -1},       {35, "TQ2_0", -1},        {39, "MXFP4", QUANT_MXFP4},
    {40, "NVFP4", QUANT_NVFP4},
};

static uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static uint64_t load_u64(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* Keeps the first failure, with its place. Always false. */
static bool fail(struct cursor *c, size_t byte, const char *code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static bool fail(struct cursor *c, size_t byte, const char *code, const char *format, ...)
{
    if (c->rc != RC_OK) return false;
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    c->rc = err_set(c->e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s (at byte %zu)", text, byte);
    err_place(c->e, c->source, 0, 0, (int64_t)byte);
    return false;
}

static bool fail_memory(struct cursor *c)
{
    if (c->rc == RC_OK) c->rc = err_no_memory(c->e);
    return false;
}

static size_t left(const struct cursor *c) { return c->end - c->at; }

/* The next n bytes. */
static bool take(struct cursor *c, uint64_t n, const char *what, const uint8_t **out)
{
    if (n > left(c)) {
        fail(c, c->at, "gguf_truncated", "%s needs %" PRIu64 " bytes, the file has %zu more", what, n, left(c));
        return false;
    }
    *out = c->file + c->at;
    c->at += (size_t)n;
    return true;
}

static bool take_u32(struct cursor *c, const char *what, uint32_t *out)
{
    const uint8_t *p;
    if (!take(c, 4, what, &p)) return false;
    *out = load_u32(p);
    return true;
}

static bool take_u64(struct cursor *c, const char *what, uint64_t *out)
{
    const uint8_t *p;
    if (!take(c, 8, what, &p)) return false;
    *out = load_u64(p);
    return true;
}

static bool take_text(struct cursor *c, uint64_t max_bytes, const char *what, struct model_text *out)
{
    size_t start = c->at;
    uint64_t len;
    const uint8_t *p;
    if (!take_u64(c, what, &len)) return false;
    if (len > max_bytes)
        return fail(c, start, "gguf_too_long", "%s has %" PRIu64 " bytes, more than %" PRIu64, what, len, max_bytes);
    if (!take(c, len, what, &p)) return false;
    *out = (struct model_text){(const char *)p, (size_t)len};
    return true;
}

/* A key or a tensor's name, copied so that it ends in NUL. */
static bool take_name(struct cursor *c, uint64_t max_bytes, const char *what, char **out)
{
    size_t start = c->at;
    struct model_text text = {0};
    if (!take_text(c, max_bytes, what, &text)) return false;
    if (!text.len) return fail(c, start, "gguf_bad_name", "%s is empty", what);
    for (size_t i = 0; i < text.len; i++) {
        unsigned char byte = (unsigned char)text.bytes[i];
        if (byte < 32 || byte == 127)
            return fail(c, start + 8 + i, "gguf_bad_name", "%s holds the control character %d", what, byte);
    }
    *out = strndup(text.bytes, text.len);
    return *out || fail_memory(c);
}

static bool take_type(struct cursor *c, const char *what, enum gguf_type *out)
{
    size_t start = c->at;
    uint32_t type;
    if (!take_u32(c, what, &type)) return false;
    if (type >= GGUF_TYPES) return fail(c, start, "gguf_bad_type", "%s is %" PRIu32 ", which is no type", what, type);
    *out = (enum gguf_type)type;
    return true;
}

/* Numbers and truth values, the latter 0 or 1. */
static bool take_numbers(struct cursor *c, enum gguf_type type, uint64_t count, const uint8_t **out)
{
    size_t start = c->at, size = type_bytes[type];
    if (count > left(c) / size)
        return fail(c, start, "gguf_truncated", "%" PRIu64 " numbers of %zu bytes do not fit into the %zu bytes left",
                    count, size, left(c));
    if (!take(c, count * size, "a value", out)) return false;
    for (size_t i = 0; type == GGUF_BOOL && i < count; i++)
        if ((*out)[i] > 1)
            return fail(c, start + i, "gguf_bad_bool", "a truth value is %d, neither 0 nor 1", (*out)[i]);
    return true;
}

/* Walks the elements of an array; strings leave their places in starts[count] unless it is NULL. */
static bool take_elements(struct cursor *c, enum gguf_type type, uint64_t count, int depth, uint64_t *starts)
{
    const uint8_t *ignored;
    struct model_text text = {0};
    if (type_bytes[type]) return take_numbers(c, type, count, &ignored);
    if (type == GGUF_STRING) {
        for (uint64_t i = 0; i < count; i++) {
            if (starts) starts[i] = c->at;
            if (!take_text(c, MAX_TEXT_BYTES, "a string of an array", &text)) return false;
        }
        return true;
    }
    if (depth == MAX_ARRAY_DEPTH) return fail(c, c->at, "gguf_too_deep", "arrays nest deeper than %d", MAX_ARRAY_DEPTH);
    for (uint64_t i = 0; i < count; i++) {
        enum gguf_type element = GGUF_U8;
        uint64_t n;
        if (!take_type(c, "the element type of an array", &element)) return false;
        if (!take_u64(c, "the count of an array", &n)) return false;
        if (!take_elements(c, element, n, depth + 1, NULL)) return false;
    }
    return true;
}

static bool take_array(struct cursor *c, struct gguf_value *v)
{
    if (!take_type(c, "the element type of an array", &v->element)) return false;
    size_t start = c->at;
    if (!take_u64(c, "the count of an array", &v->count)) return false;
    size_t least = type_bytes[v->element];
    if (!least) least = v->element == GGUF_STRING ? MIN_STRING_BYTES : MIN_ARRAY_BYTES;
    if (v->count > left(c) / least)
        return fail(c, start, "gguf_truncated", "an array of %" PRIu64 " elements does not fit into the %zu bytes left",
                    v->count, left(c));
    if (v->element == GGUF_STRING && v->count) {
        v->starts = malloc((size_t)v->count * sizeof *v->starts);
        if (!v->starts) return fail_memory(c);
    }
    v->bytes = c->file + c->at;
    return take_elements(c, v->element, v->count, 1, v->starts);
}

static bool take_value(struct cursor *c, struct gguf_value *v)
{
    if (!take_name(c, MAX_KEY_BYTES, "a metadata key", &v->key)) return false;
    if (!take_type(c, "the type of a metadata value", &v->type)) return false;
    if (v->type == GGUF_ARRAY) return take_array(c, v);
    if (v->type == GGUF_STRING) {
        struct model_text text = {0};
        if (!take_text(c, MAX_TEXT_BYTES, "a metadata string", &text)) return false;
        v->bytes = (const uint8_t *)text.bytes;
        v->count = text.len;
        return true;
    }
    v->count = 1;
    return take_numbers(c, v->type, 1, &v->bytes);
}

static bool take_format(struct cursor *c, struct tensor_view *t)
{
    size_t start = c->at;
    uint32_t number;
    if (!take_u32(c, "the type of a tensor", &number)) return false;
    const char *name = "unknown";
    for (size_t i = 0; i < sizeof tensor_types / sizeof *tensor_types; i++) {
        if (tensor_types[i].number != number) continue;
        if (tensor_types[i].format >= 0) {
            t->format = (enum quant_format)tensor_types[i].format;
            return true;
        }
        name = tensor_types[i].name;
    }
    return fail(c, start, "gguf_unsupported_format",
                "tensor %.100s is stored as type %" PRIu32 " (%s), a format that cannot be read", t->name, number,
                name);
}

static bool take_shape(struct cursor *c, struct tensor_view *t)
{
    size_t start = c->at;
    uint32_t n_dims;
    uint64_t elements = 1;
    if (!take_u32(c, "the number of dimensions", &n_dims)) return false;
    if (n_dims < 1 || n_dims > MODEL_DIMS)
        return fail(c, start, "gguf_bad_shape", "tensor %.100s has %" PRIu32 " dimensions, not 1 to %d", t->name,
                    n_dims, MODEL_DIMS);
    t->n_dims = (int)n_dims;
    for (uint32_t i = 0; i < MODEL_DIMS; i++) {
        t->dims[i] = 1;
        if (i < n_dims && !take_u64(c, "a dimension", &t->dims[i])) return false;
        if (!t->dims[i]) return fail(c, start, "gguf_bad_shape", "tensor %.100s has an empty dimension", t->name);
        if (__builtin_mul_overflow(elements, t->dims[i], &elements) || elements > INT64_MAX)
            return fail(c, start, "gguf_bad_shape", "the dimensions of tensor %.100s multiply beyond 63 bits", t->name);
    }
    return true;
}

/* One entry; its offset, relative to the data, is left in *out_offset. */
static bool take_tensor(struct cursor *c, struct gguf *g, uint64_t *out_offset)
{
    char *name = NULL;
    if (!take_name(c, MAX_NAME_BYTES, "a tensor name", &name)) return false;
    struct tensor_view *t = tensor_index_add(&g->tensors, name);
    if (!t) return fail_memory(c);
    size_t start = c->at, row_bytes;
    if (!take_shape(c, t) || !take_format(c, t)) return false;
    if (!quant_row_bytes(t->format, t->dims[0], &row_bytes))
        return fail(c, start, "gguf_bad_shape",
                    "tensor %.100s has rows of %" PRIu64 " values, no multiple of a %s block (%zu)", t->name,
                    t->dims[0], quant_name(t->format), quant_block_values(t->format));
    t->n_bytes = row_bytes;
    for (int i = 1; i < MODEL_DIMS; i++)
        if (t->dims[i] > SIZE_MAX || !size_mul(t->n_bytes, (size_t)t->dims[i], &t->n_bytes))
            return fail(c, start, "gguf_bad_shape", "tensor %.100s is larger than memory can be", t->name);
    return take_u64(c, "the offset of a tensor", out_offset);
}

/* Where the tensors lie, now that the end of the entries is known. */
static bool place_tensors(struct cursor *c, struct gguf *g, const uint64_t *offsets, uint64_t alignment)
{
    if (!g->tensors.n) return true;
    size_t padding = (size_t)((alignment - c->at % alignment) % alignment);
    const uint8_t *ignored;
    if (!take(c, padding, "the padding before the tensor data", &ignored)) return false;
    const size_t data = c->at, data_bytes = left(c);
    uint64_t used = 0;
    for (size_t i = 0; i < g->tensors.n; i++) {
        struct tensor_view *t = &g->tensors.views[i];
        uint64_t offset = offsets[i];
        if (offset % alignment)
            return fail(c, data, "gguf_bad_offset",
                        "tensor %.100s lies at %" PRIu64 ", no multiple of the alignment %" PRIu64, t->name, offset,
                        alignment);
        if (offset < used)
            return fail(c, data, "gguf_bad_offset",
                        "tensor %.100s at %" PRIu64 " overlaps the one before it or precedes it", t->name, offset);
        if (offset > data_bytes || t->n_bytes > data_bytes - offset)
            return fail(c, data, "gguf_truncated",
                        "tensor %.100s needs %zu bytes at %" PRIu64 ", but the tensor data has only %zu", t->name,
                        t->n_bytes, offset, data_bytes);
        t->bytes = c->file + data + offset;
        t->matrix = (struct quant_matrix){.format = t->format,
                                          .rows = t->dims[1] * t->dims[2] * t->dims[3],
                                          .cols = t->dims[0],
                                          .bytes = t->bytes,
                                          .global = 1};
        used = offset + t->n_bytes;
    }
    return true;
}

static int compare_values(const void *a, const void *b)
{
    const struct gguf_value *const *left_value = a, *const *right_value = b;
    return strcmp((*left_value)->key, (*right_value)->key);
}

static bool index_values(struct cursor *c, struct gguf *g)
{
    g->by_key = malloc((g->n_values + 1) * sizeof *g->by_key);
    if (!g->by_key) return fail_memory(c);
    for (size_t i = 0; i < g->n_values; i++) g->by_key[i] = &g->values[i];
    qsort(g->by_key, g->n_values, sizeof *g->by_key, compare_values);
    for (size_t i = 1; i < g->n_values; i++)
        if (!strcmp(g->by_key[i - 1]->key, g->by_key[i]->key))
            return fail(c, c->at, "gguf_duplicate", "the metadata key %.100s is there twice", g->by_key[i]->key);
    return true;
}

static bool index_tensors(struct cursor *c, struct gguf *g)
{
    const char *twin;
    if (!tensor_index_sort(&g->tensors, &twin)) return fail_memory(c);
    return !twin || fail(c, c->at, "gguf_duplicate", "the tensor %.100s is there twice", twin);
}

/* The tensor beside t whose name ends in `suffix` instead of "weight". */
static const struct tensor_view *companion(const struct gguf *g, const struct tensor_view *t, const char *suffix)
{
    static const char own[] = "weight";
    char name[MAX_NAME_BYTES + 16];
    size_t len = strlen(t->name);
    if (len < sizeof own || strcmp(t->name + len - (sizeof own - 1), own)) return NULL;
    snprintf(name, sizeof name, "%.*s%s", (int)(len - (sizeof own - 1)), t->name, suffix);
    return tensor_index_find(&g->tensors, name);
}

/* An NVFP4 matrix X.weight has its factor in X.scale; X.input_scale is of activations, which stay as they are here.
 * Both then are no tensors of their own. Beside other formats they are left, and refused as unknown. */
static bool take_companions(struct cursor *c, struct gguf *g)
{
    bool *drop = calloc(g->tensors.n + 1, sizeof *drop);
    bool ok = drop != NULL, any = false;
    for (size_t i = 0; i < g->tensors.n && ok; i++) {
        struct tensor_view *t = &g->tensors.views[i];
        const struct tensor_view *scale = companion(g, t, "scale"), *input = companion(g, t, "input_scale");
        if (t->format != QUANT_NVFP4) continue;
        if (input) any = drop[input - g->tensors.views] = true;
        if (!scale) continue;
        any = drop[scale - g->tensors.views] = true;
        if (scale->format != QUANT_F32 || scale->n_bytes != sizeof t->matrix.global) {
            ok = fail(c, c->at, "gguf_bad_shape", "tensor %.100s is not one number of F32", scale->name);
            break;
        }
        memcpy(&t->matrix.global, scale->bytes, sizeof t->matrix.global);
        if (!isfinite(t->matrix.global) || t->matrix.global <= 0)
            ok = fail(c, (size_t)((const uint8_t *)scale->bytes - c->file), "gguf_bad_scale",
                      "tensor %.100s is %g, not a number above 0", scale->name, (double)t->matrix.global);
    }
    if (!drop || (ok && any && !tensor_index_drop(&g->tensors, drop))) ok = fail_memory(c);
    free(drop);
    return ok;
}

static bool take_header(struct cursor *c, uint64_t *out_tensors, uint64_t *out_values)
{
    const uint8_t *magic;
    uint32_t version;
    if (!take(c, 4, "the file's magic", &magic)) return false;
    if (memcmp(magic, "GGUF", 4)) return fail(c, 0, "gguf_bad_magic", "this is no GGUF file");
    if (!take_u32(c, "the version", &version)) return false;
    if (version == (uint32_t)GGUF_VERSION << 24) return fail(c, 4, "gguf_bad_version", "this GGUF file is big-endian");
    if (version != GGUF_VERSION)
        return fail(c, 4, "gguf_bad_version", "GGUF version %" PRIu32 "; only version %d can be read", version,
                    GGUF_VERSION);
    if (!take_u64(c, "the number of tensors", out_tensors)) return false;
    if (!take_u64(c, "the number of metadata keys", out_values)) return false;
    if (*out_tensors > MAX_ENTRIES)
        return fail(c, 8, "gguf_too_many", "%" PRIu64 " tensors, more than %d", *out_tensors, MAX_ENTRIES);
    if (*out_values > MAX_ENTRIES)
        return fail(c, 16, "gguf_too_many", "%" PRIu64 " metadata keys, more than %d", *out_values, MAX_ENTRIES);
    if (*out_tensors * MIN_TENSOR_ENTRY_BYTES + *out_values * MIN_VALUE_ENTRY_BYTES > left(c))
        return fail(c, 8, "gguf_truncated",
                    "%" PRIu64 " tensors and %" PRIu64 " metadata keys do not fit into %zu bytes", *out_tensors,
                    *out_values, left(c));
    return true;
}

/* The counts grow with the entries, so that gguf_free finds what there is after a failure. */
static bool take_values(struct cursor *c, struct gguf *g, size_t n)
{
    g->values = calloc(n + 1, sizeof *g->values);
    if (!g->values) return fail_memory(c);
    while (g->n_values < n)
        if (!take_value(c, &g->values[g->n_values++])) return false;
    return index_values(c, g);
}

static bool take_alignment(struct cursor *c, const struct gguf *g, uint64_t *out)
{
    const struct gguf_value *v = gguf_value_find(g, "general.alignment");
    *out = DEFAULT_ALIGNMENT;
    if (!v) return true;
    size_t byte = (size_t)(v->bytes - g->file);
    if (v->type == GGUF_BOOL || !gguf_load_uint(v->type, v->bytes, out))
        return fail(c, byte, "gguf_bad_alignment", "general.alignment is no positive integer");
    if (*out < MIN_ALIGNMENT || *out > MAX_ALIGNMENT || (*out & (*out - 1)))
        return fail(c, byte, "gguf_bad_alignment", "general.alignment is %" PRIu64 ", not a power of two from %d to %d",
                    *out, MIN_ALIGNMENT, MAX_ALIGNMENT);
    return true;
}

static bool take_tensors(struct cursor *c, struct gguf *g, size_t n, uint64_t alignment)
{
    bool ok = false;
    uint64_t *offsets = calloc(n + 1, sizeof *offsets);
    if (!offsets) {
        fail_memory(c);
        goto done;
    }
    for (size_t i = 0; i < n; i++)
        if (!take_tensor(c, g, &offsets[i])) goto done;
    ok = index_tensors(c, g) && place_tensors(c, g, offsets, alignment) && take_companions(c, g);
done:
    free(offsets);
    return ok;
}

enum rc gguf_parse(const void *bytes, size_t n_bytes, const char *source, struct gguf *out, struct err *e)
{
    struct cursor c = {.file = bytes, .end = n_bytes, .source = source, .e = e};
    uint64_t n_tensors = 0, n_values = 0, alignment;
    *out = (struct gguf){.file = bytes};
    if (!take_header(&c, &n_tensors, &n_values) || !take_values(&c, out, (size_t)n_values) ||
        !take_alignment(&c, out, &alignment) || !take_tensors(&c, out, (size_t)n_tensors, alignment))
        gguf_free(out);
    return c.rc;
}

void gguf_free(struct gguf *g)
{
    for (size_t i = 0; i < g->n_values; i++) {
        free(g->values[i].starts);
        free(g->values[i].key);
    }
    tensor_index_free(&g->tensors);
    free(g->by_key);
    free(g->values);
    *g = (struct gguf){0};
}

const struct gguf_value *gguf_value_find(const struct gguf *g, const char *key)
{
    for (size_t low = 0, high = g->n_values; low < high;) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(key, g->by_key[middle]->key);
        if (!order) return g->by_key[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

size_t gguf_type_bytes(enum gguf_type t) { return type_bytes[t]; }

bool gguf_load_int(enum gguf_type t, const uint8_t *p, int64_t *out)
{
    uint64_t bits = 0;
    if (!type_bytes[t] || t == GGUF_F32 || t == GGUF_F64) return false;
    memcpy(&bits, p, type_bytes[t]);
    switch (t) {
    case GGUF_I8: *out = (int8_t)bits; return true;
    case GGUF_I16: *out = (int16_t)bits; return true;
    case GGUF_I32: *out = (int32_t)bits; return true;
    case GGUF_I64: *out = (int64_t)bits; return true;
    default:
        if (bits > INT64_MAX) return false;
        *out = (int64_t)bits;
        return true;
    }
}

bool gguf_load_uint(enum gguf_type t, const uint8_t *p, uint64_t *out)
{
    int64_t value;
    if (t == GGUF_U64) {
        *out = load_u64(p);
        return true;
    }
    if (!gguf_load_int(t, p, &value) || value < 0) return false;
    *out = (uint64_t)value;
    return true;
}

bool gguf_load_float(enum gguf_type t, const uint8_t *p, double *out)
{
    if (t == GGUF_F32) {
        float value;
        memcpy(&value, p, sizeof value);
        *out = value;
        return true;
    }
    if (t != GGUF_F64) return false;
    memcpy(out, p, sizeof *out);
    return true;
}

struct model_text gguf_text_at(const struct gguf *g, uint64_t start)
{
    const uint8_t *p = g->file + start;
    return (struct model_text){(const char *)p + 8, (size_t)load_u64(p)};
}
