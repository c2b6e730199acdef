/* safetensors_build: composes safetensors files in memory, good ones and, by writing the header by hand, bad ones. For
 * tests. */
#ifndef TANDEM_TEST_SAFETENSORS_BUILD_H
#define TANDEM_TEST_SAFETENSORS_BUILD_H

#include <stdint.h>
#include <string.h>

#include "base.h"

struct safetensors_build {
    struct buf entries; /* members of the header, each after a comma but the first */
    struct buf data;
};

static inline size_t dtype_bytes(const char *dtype)
{
    if (!strcmp(dtype, "F32") || !strcmp(dtype, "I32")) return 4;
    if (!strcmp(dtype, "BF16") || !strcmp(dtype, "F16")) return 2;
    return !strcmp(dtype, "I64") || !strcmp(dtype, "F64") ? 8 : 1;
}

/* One member of the header as it stands. */
static inline void add_member(struct safetensors_build *s, const char *text)
{
    if (s->entries.len) buf_append_str(&s->entries, ",");
    buf_append_str(&s->entries, text);
}

/* A tensor of `rank` dimensions, outermost first; bytes NULL: a fixed pattern of small numbers, finite in every type. */
static inline void add_stored(struct safetensors_build *s, const char *name, const char *dtype, int rank,
                              const uint64_t *shape, const void *bytes)
{
    struct buf member = {0};
    size_t n = dtype_bytes(dtype), begin = s->data.len;
    buf_printf(&member, "\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, dtype);
    for (int i = 0; i < rank; i++) {
        n *= (size_t)shape[i];
        buf_printf(&member, "%s%ju", i ? "," : "", (uintmax_t)shape[i]);
    }
    for (size_t i = 0; i < n; i++) {
        uint8_t byte = (uint8_t)(0x30 + (begin + i) % 13);
        buf_append(&s->data, bytes ? (const uint8_t *)bytes + i : &byte, 1);
    }
    buf_printf(&member, "],\"data_offsets\":[%zu,%zu]}", begin, s->data.len);
    add_member(s, member.data);
    buf_free(&member);
}

static inline void add_2d(struct safetensors_build *s, const char *name, const char *dtype, uint64_t rows,
                          uint64_t cols)
{
    add_stored(s, name, dtype, 2, (uint64_t[]){rows, cols}, NULL);
}

static inline void add_1d(struct safetensors_build *s, const char *name, const char *dtype, uint64_t n)
{
    add_stored(s, name, dtype, 1, &n, NULL);
}

/* One F32 number; rank 0 or 1. */
static inline void add_number(struct safetensors_build *s, const char *name, int rank, float value)
{
    add_stored(s, name, "F32", rank, (uint64_t[]){1}, &value);
}

/* A file of this header and this data. */
static inline void build_with_header(const char *header, size_t header_len, const void *data, size_t data_len,
                                     struct buf *out)
{
    uint64_t length = header_len;
    buf_clear(out);
    buf_append(out, &length, sizeof length);
    buf_append(out, header, header_len);
    buf_append(out, data, data_len);
}

/* Puts the file together in *out (replaced) and frees the pieces. */
static inline void build_safetensors(struct safetensors_build *s, struct buf *out)
{
    struct buf header = {0};
    buf_append_str(&header, "{");
    if (s->entries.len) buf_append(&header, s->entries.data, s->entries.len);
    buf_append_str(&header, "}");
    build_with_header(header.data, header.len, s->data.data, s->data.len, out);
    buf_free(&header);
    buf_free(&s->entries);
    buf_free(&s->data);
}

#endif
