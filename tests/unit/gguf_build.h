/* gguf_build: composes GGUF files in memory, good ones and, by writing the pieces by hand, bad ones. For tests. */
#ifndef TANDEM_TEST_GGUF_BUILD_H
#define TANDEM_TEST_GGUF_BUILD_H

#include <string.h>

#include "base.h"
#include "gguf.h"

struct gguf_build {
    struct buf keys;    /* entries of the metadata */
    struct buf tensors; /* entries of the tensors */
    struct buf data;    /* their bytes */
    uint64_t n_keys;
    uint64_t n_tensors;
    uint32_t version;   /* 0: the right one */
    uint64_t alignment; /* of the data; 0: 32. Its key is the caller's to add */
};

static inline void put_u32(struct buf *b, uint32_t v) { buf_append(b, &v, sizeof v); }
static inline void put_u64(struct buf *b, uint64_t v) { buf_append(b, &v, sizeof v); }

static inline void put_bytes(struct buf *b, const void *text, size_t len)
{
    put_u64(b, len);
    buf_append(b, text, len);
}

static inline void put_text(struct buf *b, const char *text) { put_bytes(b, text, strlen(text)); }

/* The key and type of a value; the caller appends the value to g->keys. */
static inline struct buf *add_key(struct gguf_build *g, const char *key, enum gguf_type type)
{
    put_text(&g->keys, key);
    put_u32(&g->keys, type);
    g->n_keys++;
    return &g->keys;
}

static inline void add_u32(struct gguf_build *g, const char *key, uint32_t v) { put_u32(add_key(g, key, GGUF_U32), v); }

static inline void add_f32(struct gguf_build *g, const char *key, float v)
{
    buf_append(add_key(g, key, GGUF_F32), &v, sizeof v);
}

static inline void add_bool(struct gguf_build *g, const char *key, uint8_t v)
{
    buf_append(add_key(g, key, GGUF_BOOL), &v, 1);
}

static inline void add_text(struct gguf_build *g, const char *key, const char *v)
{
    put_text(add_key(g, key, GGUF_STRING), v);
}

static inline struct buf *add_array(struct gguf_build *g, const char *key, enum gguf_type element, uint64_t count)
{
    struct buf *b = add_key(g, key, GGUF_ARRAY);
    put_u32(b, element);
    put_u64(b, count);
    return b;
}

/* An entry of a tensor, with whatever shape, type and offset. */
static inline void add_entry(struct gguf_build *g, const char *name, uint32_t n_dims, const uint64_t *dims,
                             uint32_t type, uint64_t offset)
{
    put_text(&g->tensors, name);
    put_u32(&g->tensors, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) put_u64(&g->tensors, dims[i]);
    put_u32(&g->tensors, type);
    put_u64(&g->tensors, offset);
    g->n_tensors++;
}

static inline void pad(struct buf *b, size_t alignment)
{
    while (b->len % alignment) buf_append(b, "", 1);
}

/* An F32 matrix [rows, cols] of zeros but for its first value, `first`. */
static inline void add_matrix(struct gguf_build *g, const char *name, uint64_t cols, uint64_t rows, float first)
{
    pad(&g->data, g->alignment ? g->alignment : 32);
    add_entry(g, name, 2, (uint64_t[]){cols, rows}, 0, g->data.len);
    for (uint64_t i = 0; i < cols * rows; i++) {
        float value = i ? 0 : first;
        buf_append(&g->data, &value, sizeof value);
    }
}

/* Puts the file together in *out (replaced) and frees the pieces. */
static inline void build_file(struct gguf_build *g, struct buf *out)
{
    buf_clear(out);
    buf_append(out, "GGUF", 4);
    put_u32(out, g->version ? g->version : 3);
    put_u64(out, g->n_tensors);
    put_u64(out, g->n_keys);
    buf_append(out, g->keys.data, g->keys.len);
    buf_append(out, g->tensors.data, g->tensors.len);
    if (g->n_tensors) pad(out, g->alignment ? g->alignment : 32);
    buf_append(out, g->data.data, g->data.len);
    buf_free(&g->data);
    buf_free(&g->tensors);
    buf_free(&g->keys);
    *g = (struct gguf_build){0};
}

#endif
