/* safetensors: the container alone, and every way in which codes and scales make a matrix. Files lie in memory of exactly
 * their size, so that a sanitizer sees the first byte read outside. Values are compared with products written out here. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_file.h"
#include "safetensors_build.h"

/* An open file and the copy of its bytes. */
struct opened {
    void *copy;
    struct model_file *m;
};

static enum rc open_copy(const void *bytes, size_t n, struct opened *o, struct err *e)
{
    *o = (struct opened){.copy = malloc(n ? n : 1)};
    assert_non_null(o->copy);
    if (n) memcpy(o->copy, bytes, n);
    return model_file_open_bytes(o->copy, n, "test.safetensors", &o->m, e);
}

static enum rc open_built(struct safetensors_build *s, struct opened *o, struct err *e)
{
    struct buf file = {0};
    build_safetensors(s, &file);
    assert_false(file.failed);
    enum rc rc = open_copy(file.data, file.len, o, e);
    buf_free(&file);
    return rc;
}

static void close_copy(struct opened *o)
{
    model_file_close(o->m);
    free(o->copy);
}

static const struct tensor_view *tensor(const struct opened *o, const char *name)
{
    const struct tensor_view *t = model_file_tensor(o->m, name);
    if (!t) fail_msg("no tensor %s", name);
    return t;
}

/* Several types and ranks; what is unusual but right. */
static void good_file(struct safetensors_build *s)
{
    add_member(s, "\"__metadata__\":{\"format\":\"pt\"}");
    add_2d(s, "b.weight", "BF16", 3, 5);
    add_stored(s, "conv.weight", "F32", 3, (uint64_t[]){6, 1, 4}, NULL);
    add_1d(s, "a.bias", "F16", 7);
    add_stored(s, "scalar", "F32", 0, NULL, NULL);
    add_stored(s, "model.visual.patch", "BF16", 5, (uint64_t[]){2, 3, 1, 2, 2}, NULL);
    add_stored(s, "model.visual.none", "BF16", 2, (uint64_t[]){0, 3}, NULL);
    add_1d(s, "ids", "I64", 2);
    add_1d(s, "self_attn.rotary_emb.inv_freq", "F32", 2);
}

static void gives_tensors(void **state)
{
    (void)state;
    struct safetensors_build s = {0};
    struct opened o;
    good_file(&s);
    assert_int_equal(open_built(&s, &o, NULL), RC_OK);
    static const char *const names[] = {"b.weight", "conv.weight",        "a.bias",
                                        "scalar",   "model.visual.patch", "self_attn.rotary_emb.inv_freq"};
    static const struct {
        enum quant_format format;
        int n_dims;
        uint64_t dims[4];
        size_t n_bytes;
    } expected[] = {
        {QUANT_BF16, 2, {5, 3, 1, 1}, 30}, {QUANT_F32, 3, {4, 1, 6, 1}, 96},  {QUANT_F16, 1, {7, 1, 1, 1}, 14},
        {QUANT_F32, 1, {1, 1, 1, 1}, 4},   {QUANT_BF16, 4, {2, 2, 1, 6}, 48}, {QUANT_F32, 1, {2, 1, 1, 1}, 8},
    };
    assert_int_equal(model_file_layout(o.m), MODEL_LAYOUT_HF);
    assert_false(model_file_synthetic(o.m));
    assert_int_equal(model_file_tensor_count(o.m), 6); /* neither the integers nor what is empty */
    for (size_t i = 0; i < 6; i++) {
        const struct tensor_view *t = model_file_tensor_at(o.m, i);
        assert_string_equal(t->name, names[i]);
        assert_ptr_equal(model_file_tensor(o.m, names[i]), t);
        assert_int_equal(t->format, expected[i].format);
        assert_int_equal(t->n_dims, expected[i].n_dims);
        assert_memory_equal(t->dims, expected[i].dims, sizeof t->dims);
        assert_int_equal(t->n_bytes, expected[i].n_bytes);
        assert_ptr_equal(t->matrix.bytes, t->bytes);
        assert_int_equal(t->matrix.cols, t->dims[0]);
        assert_int_equal(t->matrix.rows * t->matrix.cols, t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]);
        assert_null(t->matrix.scales.bytes);
        assert_true(t->matrix.global == 1 && !t->matrix.divide);
    }
    assert_int_equal(((const uint8_t *)tensor(&o, "conv.weight")->bytes)[0], 0x30 + 30 % 13);
    struct model_text text;
    uint64_t number;
    assert_null(model_file_tensor_at(o.m, 6));
    assert_int_equal(model_file_key_count(o.m), 0);
    assert_false(model_file_has(o.m, "general.architecture") || model_file_u64(o.m, "a", &number));
    assert_false(model_file_json(o.m, MODEL_JSON_CONFIG, &text) || model_file_chat_template(o.m, &text));
    close_copy(&o);
}

/* Tensors may stand in the header in any order, and spaces pad it; the file's order is that of the data. */
static void takes_the_order_of_the_data(void **state)
{
    (void)state;
    static const char header[] = "{\"second\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]},"
                                 "\"first\":{\"data_offsets\":[0,4],\"shape\":[1],\"dtype\":\"F32\"}}   ";
    static const float data[3] = {1.5f, 2.5f, 3.5f};
    struct buf file = {0};
    struct opened o;
    build_with_header(header, sizeof header - 1, data, sizeof data, &file);
    assert_int_equal(open_copy(file.data, file.len, &o, NULL), RC_OK);
    assert_string_equal(model_file_tensor_at(o.m, 0)->name, "first");
    assert_string_equal(model_file_tensor_at(o.m, 1)->name, "second");
    float value;
    memcpy(&value, tensor(&o, "second")->bytes, sizeof value);
    assert_true(value == 2.5f);
    close_copy(&o);
    static const char quoted[] =
        "{\"__metadata__\":{\"a\":\"\\\\\",\"b\":\"\\\"[[[[[[[[\"}}"; /* brackets inside a text */
    build_with_header(quoted, sizeof quoted - 1, NULL, 0, &file);
    assert_int_equal(open_copy(file.data, file.len, &o, NULL), RC_OK);
    close_copy(&o);
    build_with_header("{}", 2, NULL, 0, &file); /* nothing in it */
    assert_int_equal(open_copy(file.data, file.len, &o, NULL), RC_OK);
    assert_int_equal(model_file_tensor_count(o.m), 0);
    close_copy(&o);
    buf_free(&file);
}

static void refuses_every_truncation(void **state)
{
    (void)state;
    struct safetensors_build s = {0};
    struct buf file = {0};
    good_file(&s);
    build_safetensors(&s, &file);
    for (size_t n = 9; n < file.len; n++) { /* shorter than that it could be anything */
        struct err e = {0};
        struct opened o;
        assert_int_equal(open_copy(file.data, n, &o, &e), RC_BAD_INPUT);
        assert_null(o.m);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "test.safetensors");
        assert_string_equal(e.code, "safetensors_truncated");
        close_copy(&o);
    }
    buf_free(&file);
}

/* Whatever one byte becomes: refused, or an index whose every view can be read. */
static void survives_every_changed_byte(void **state)
{
    (void)state;
    struct safetensors_build s = {0};
    struct buf file = {0};
    uint64_t header;
    size_t refused = 0;
    good_file(&s);
    build_safetensors(&s, &file);
    memcpy(&header, file.data, sizeof header);
    for (size_t i = 0; i < 8 + header; i++) {
        static const uint8_t flips[] = {0x01, 0x02, 0x08, 0x10, 0x80};
        for (size_t k = 0; k < sizeof flips; k++) {
            struct err e = {0};
            struct opened o;
            file.data[i] = (char)(file.data[i] ^ flips[k]);
            enum rc rc = open_copy(file.data, file.len, &o, &e);
            file.data[i] = (char)(file.data[i] ^ flips[k]);
            assert_true(rc == RC_OK || (rc == RC_BAD_INPUT && e.code[0] && e.source[0]));
            refused += rc != RC_OK;
            for (size_t t = 0; rc == RC_OK && t < model_file_tensor_count(o.m); t++) {
                const struct tensor_view *view = model_file_tensor_at(o.m, t);
                const uint8_t *bytes = view->bytes, *begin = o.copy, *end = begin + file.len;
                assert_true(bytes >= begin && view->n_bytes <= (size_t)(end - bytes));
            }
            close_copy(&o);
        }
    }
    assert_true(refused > header);
    buf_free(&file);
}

/* A header as it stands, 64 bytes of data, and the whole error. */
struct damage {
    const char *header;
    const char *code;
    const char *text;
    int64_t byte; /* 0: not compared */
};

#define T(name, dtype, shape, begin, end)                                                                              \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"
#define WHOLE T("a", "U8", "[64]", 0, 64)

static const struct damage damages[] = {
    {"[1]", "gguf_bad_magic", "this is no GGUF file (at byte 0)", 0}, /* looks like none of the two */
    {"{\"a\":1", "json_invalid", "invalid JSON: the text ends inside a value", 0},
    {"{\"a\":1}x", "json_invalid", "invalid JSON: something follows the object", 0},
    {"{\"a\\u0000\":1}", "json_invalid", "invalid JSON: a NUL character", 0},
    {"{\"\xff\":1}", "json_invalid", "invalid JSON: not valid UTF-8", 0},
    {"{\"a\":123456789012345678901}", "json_invalid", "invalid JSON: a number is too large", 0},
    {"{" WHOLE "," WHOLE "}", "json_duplicate", "invalid JSON: a key is given twice", 0},
    {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}}", "json_duplicate", "invalid JSON: a key is given twice", 0},
    {"{\"a\":{\"shape\":[[1]]}}", "json_too_deep", "the JSON nests deeper than 3", 8 + 15},
    {"{\"a\":1}", "safetensors_bad_entry", "tensor a: the entry is no object", 8},
    {"{\"a\":{}}", "safetensors_bad_entry", "tensor a: dtype is missing or no string", 8},
    {"{\"a\":{\"dtype\":8}}", "safetensors_bad_entry", "tensor a: dtype is missing or no string", 8},
    {"{\"a\":{\"dtype\":\"U8\"}}", "safetensors_bad_entry", "tensor a: shape is missing or no array", 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[]}}", "safetensors_bad_entry",
     "tensor a: data_offsets are not two ascending whole numbers", 8},
    {"{" T("a", "U8", "[64]", 64, 0) "}", "safetensors_bad_entry",
     "tensor a: data_offsets are not two ascending whole numbers", 8},
    {"{" T("a", "U8", "[64]", 0.0, 64) "}", "safetensors_bad_entry",
     "tensor a: data_offsets are not two ascending whole numbers", 8},
    {"{"
     "\"a\":{\"dtype\":\"U8\",\"shape\":[64],\"data_offsets\":[0,64,64]}"
     "}",
     "safetensors_bad_entry", "tensor a: data_offsets are not two ascending whole numbers", 8},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[64],\"data_offsets\":[0,64],\"x\":1}}", "safetensors_bad_entry",
     "tensor a: more than dtype, shape and data_offsets", 8},
    {"{\"__metadata__\":[]}", "safetensors_bad_entry", "__metadata__ is no object", 8},
    {"{\"__metadata__\":{\"a\":1}}", "safetensors_bad_entry", "__metadata__ holds what is no string", 8},
    {"{" T("", "U8", "[64]", 0, 64) "}", "safetensors_bad_name", "a tensor has no name", 8},
    {"{" T("a\\n", "U8", "[64]", 0, 64) "}", "safetensors_bad_name",
     "the name of a tensor holds the control character 10", 8},
    {"{" T("a", "Q4", "[64]", 0, 64) "}", "safetensors_bad_dtype", "tensor a is stored as Q4, a type that is not known",
     8},
    {"{" T("a", "\\n\\u001b", "[64]", 0, 64) "}", "safetensors_bad_dtype",
     "tensor a is stored as ??, a type that is not known", 8},
    {"{" T("a", "U8", "[-1]", 0, 64) "}", "safetensors_bad_shape", "tensor a: a dimension is no whole number from 0 up",
     8},
    {"{" T("a", "U8", "[64.0]", 0, 64) "}", "safetensors_bad_shape",
     "tensor a: a dimension is no whole number from 0 up", 8},
    {"{" T("a", "U8", "[1,1,1,1,1,1,1,1,64]", 0, 64) "}", "safetensors_bad_shape",
     "tensor a has 9 dimensions, more than 8", 8},
    {"{" T("a", "F32", "[4294967296,2147483648]", 0, 64) "}", "safetensors_bad_shape",
     "tensor a: the dimensions multiply beyond 63 bits", 8},
    {"{" T("a", "F32", "[15]", 0, 64) "}", "safetensors_bad_shape",
     "tensor a takes 60 bytes by its shape and F32, 64 by its offsets", 8},
    {"{" T("a", "U8", "[65]", 0, 65) "}", "safetensors_truncated",
     "tensor a needs the bytes 0 to 65, but the data has only 64", 8},
    {"{" T("a", "U8", "[1]", 9223372036854775806, 9223372036854775807) "}", "safetensors_truncated",
     "tensor a needs the bytes 9223372036854775806 to 9223372036854775807, but the data has only 64", 8},
    {"{" T("a", "U8", "[40]", 0, 40) "," T("b", "U8", "[32]", 32, 64) "}", "safetensors_bad_offset",
     "tensor b at 32 overlaps tensor a", 0},
    {"{" T("b", "U8", "[30]", 34, 64) "," T("a", "U8", "[32]", 0, 32) "}", "safetensors_bad_offset",
     "2 bytes before tensor b belong to no tensor", 0},
    {"{" T("a", "U8", "[60]", 4, 64) "}", "safetensors_bad_offset", "4 bytes before tensor a belong to no tensor", 0},
    {"{" T("a", "U8", "[60]", 0, 60) "}", "safetensors_bad_offset", "the last 4 bytes belong to no tensor", 0},
    {"{}", "safetensors_bad_offset", "the last 64 bytes belong to no tensor", 8 + 2},
};

static void refuses_every_damage(void **state)
{
    (void)state;
    static const char data[64] = {0};
    struct buf file = {0};
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        struct opened o;
        struct err e = {0};
        build_with_header(damages[i].header, strlen(damages[i].header), data, sizeof data, &file);
        enum rc rc = open_copy(file.data, file.len, &o, &e);
        if (rc != RC_BAD_INPUT || strcmp(e.code, damages[i].code) || strcmp(e.text, damages[i].text))
            fail_msg("%s: rc %d, %s: %s", damages[i].header, rc, e.code, e.text);
        if (damages[i].byte) assert_int_equal(e.byte, damages[i].byte);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "test.safetensors");
        close_copy(&o);
    }
    buf_free(&file);
}

static void bounds_its_header(void **state)
{
    (void)state;
    static const struct {
        uint64_t length;
        const char *text;
    } cases[] = {
        {100000001, "a header of 100000001 bytes, more than 100000000"},
        {UINT64_MAX, "a header of 18446744073709551615 bytes, more than 100000000"},
        {100000000, "the header needs 100000000 bytes, the file has 2 more"},
        {3, "the header needs 3 bytes, the file has 2 more"},
        {0, "the header does not begin with {"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char file[10] = "........{}";
        struct opened o;
        struct err e = {0};
        memcpy(file, &cases[i].length, sizeof cases[i].length);
        assert_int_equal(open_copy(file, sizeof file, &o, &e), RC_BAD_INPUT);
        assert_string_equal(e.text, cases[i].text);
        close_copy(&o);
    }
    struct safetensors_build s = {0};
    struct opened o;
    struct err e = {0};
    char name[300], text[400];
    memset(name, 'n', 256);
    name[256] = '\0';
    add_1d(&s, name, "F32", 1);
    assert_int_equal(open_built(&s, &o, &e), RC_BAD_INPUT);
    snprintf(text, sizeof text, "the name %.100s... has 256 bytes, more than 255", name);
    assert_string_equal(e.text, text);
    close_copy(&o);
    struct buf header = {0}, file = {0};
    buf_append_str(&header, "{\"__metadata__\":{\"a\":\"\"");
    for (int i = 0; i < 1100000; i++) buf_append(&header, ",\"\":\"\"", 6); /* two values each */
    buf_append_str(&header, "}}");
    build_with_header(header.data, header.len, NULL, 0, &file);
    e = (struct err){0};
    assert_int_equal(open_copy(file.data, file.len, &o, &e), RC_BAD_INPUT);
    assert_string_equal(e.text, "the JSON has more than 2097152 values");
    close_copy(&o);
    buf_free(&header);
    buf_free(&file);
}

static void has_grid(const struct tensor_view *t, enum quant_format format, enum quant_format scales, uint64_t rows,
                     uint64_t cols, uint64_t row_block, uint64_t col_block, uint64_t per_row)
{
    const struct quant_matrix *m = &t->matrix;
    assert_int_equal(t->format, format);
    assert_int_equal(t->n_dims, 2);
    assert_int_equal(t->dims[0], cols);
    assert_int_equal(t->dims[1], rows);
    assert_int_equal(m->format, format);
    assert_int_equal(m->rows, rows);
    assert_int_equal(m->cols, cols);
    assert_ptr_equal(m->bytes, t->bytes);
    assert_non_null(m->scales.bytes);
    assert_int_equal(m->scales.format, scales);
    assert_int_equal(m->scales.row_block, row_block);
    assert_int_equal(m->scales.col_block, col_block);
    assert_int_equal(m->scales.per_row, per_row);
}

static void joins_fp8(void **state)
{
    (void)state;
    static const struct {
        int rank;
        uint64_t shape[2];
        const char *dtype;
        enum quant_format format;
        uint64_t row_block, col_block, per_row;
    } cases[] = {
        {0, {0}, "F32", QUANT_F32, 150, 260, 1},         {1, {1}, "F32", QUANT_F32, 150, 260, 1},
        {2, {1, 1}, "BF16", QUANT_BF16, 150, 260, 1},    {1, {150}, "F32", QUANT_F32, 1, 260, 1},
        {2, {150, 1}, "BF16", QUANT_BF16, 1, 260, 1},    {2, {2, 3}, "BF16", QUANT_BF16, 128, 128, 3},
        {2, {2, 3}, "F8_E8M0", QUANT_E8M0, 128, 128, 3}, {2, {2, 3}, "F16", QUANT_F16, 128, 128, 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int inverse = 0; inverse < 2; inverse++) {
            struct safetensors_build s = {0};
            struct opened o;
            add_stored(&s, inverse ? "x.weight_scale_inv" : "x.weight_scale", cases[i].dtype, cases[i].rank,
                       cases[i].shape, NULL);
            add_2d(&s, "x.weight", "F8_E4M3", 150, 260);
            add_number(&s, "x.input_scale", 0, 2);
            assert_int_equal(open_built(&s, &o, NULL), RC_OK);
            assert_int_equal(model_file_tensor_count(o.m), 1);
            const struct tensor_view *t = tensor(&o, "x.weight");
            has_grid(t, QUANT_FP8, cases[i].format, 150, 260, cases[i].row_block, cases[i].col_block, cases[i].per_row);
            assert_int_equal(t->n_bytes, 150 * 260);
            size_t n_scales = dtype_bytes(cases[i].dtype);
            for (int k = 0; k < cases[i].rank; k++) n_scales *= (size_t)cases[i].shape[k];
            assert_ptr_equal(t->bytes, (const char *)t->matrix.scales.bytes + n_scales); /* stored just before */
            assert_true(t->matrix.global == 1 && !t->matrix.divide);
            close_copy(&o);
        }
}

/* Codes count up, so that both nibbles and every code are seen. */
static void put_codes(uint8_t *codes, size_t n)
{
    for (size_t i = 0; i < n; i++) codes[i] = (uint8_t)(i * 29 + 7);
}

static const float e2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

/* The value of a matrix of 3 rows of 64 packed codes whose group scales are scale[row][group]. */
static void check_fp4(const struct tensor_view *t, const uint8_t codes[3 * 32], const float *scales, size_t group)
{
    for (size_t row = 0; row < 3; row++) {
        float values[64];
        quant_matrix_decode(&t->matrix, row, 0, 64, values);
        for (size_t i = 0; i < 64; i++) {
            int code = codes[row * 32 + i / 2] >> (i % 2 ? 4 : 0) & 15;
            float expected = e2m1[code] * scales[row * (64 / group) + i / group];
            if (values[i] != expected)
                fail_msg("row %zu, column %zu: %g, not %g", row, i, (double)values[i], (double)expected);
        }
    }
}

/* E4M3 codes of scales: 0x30 = 0.5, 0x38 = 1, 0x3c = 1.5, 0x40 = 2, 0x44 = 3, 0x48 = 4, and so on in halves of an octave. */
static void joins_nvfp4(void **state)
{
    (void)state;
    static const uint8_t scale_codes[12] = {0x30, 0x38, 0x3c, 0x40, 0x44, 0x48, 0x4c, 0x28, 0x50, 0x34, 0x58, 0x01};
    static const float scale_values[12] = {0.5f, 1, 1.5f, 2, 3, 4, 6, 0.25f, 8, 0.75f, 16, 0.001953125f};
    uint8_t codes[3 * 32];
    float scaled[12];
    put_codes(codes, sizeof codes);
    for (int divides = 0; divides < 2; divides++)
        for (int rank = 0; rank < 2; rank++) {
            struct safetensors_build s = {0};
            struct opened o;
            add_stored(&s, divides ? "x.weight_packed" : "x.weight", "U8", 2, (uint64_t[]){3, 32}, codes);
            add_stored(&s, "x.weight_scale", "F8_E4M3", 2, (uint64_t[]){3, 4}, scale_codes);
            add_number(&s, divides ? "x.weight_global_scale" : "x.weight_scale_2", rank, 4);
            add_number(&s, divides ? "x.input_global_scale" : "x.input_scale", rank, 2);
            assert_int_equal(open_built(&s, &o, NULL), RC_OK);
            assert_int_equal(model_file_tensor_count(o.m), 1);
            const struct tensor_view *t = tensor(&o, "x.weight");
            has_grid(t, QUANT_FP4_PAIRS, QUANT_FP8, 3, 64, 1, 16, 4);
            assert_int_equal(t->n_bytes, sizeof codes);
            assert_true(t->matrix.global == 4);
            assert_int_equal(t->matrix.divide, divides);
            for (int i = 0; i < 12; i++) scaled[i] = divides ? scale_values[i] / 4 : scale_values[i] * 4;
            check_fp4(t, codes, scaled, 16);
            close_copy(&o);
        }
}

static void joins_mxfp4(void **state)
{
    (void)state;
    static const uint8_t scale_codes[6] = {127, 128, 126, 130, 120, 127};
    static const float scale_values[6] = {1, 2, 0.5f, 8, 0.0078125f, 1};
    uint8_t codes[3 * 32];
    put_codes(codes, sizeof codes);
    for (int packed = 0; packed < 2; packed++)
        for (int typed = 0; typed < 2; typed++) {
            struct safetensors_build s = {0};
            struct opened o;
            add_stored(&s, "x.weight_scale", typed ? "F8_E8M0" : "U8", 2, (uint64_t[]){3, 2}, scale_codes);
            add_stored(&s, packed ? "x.weight_packed" : "x.weight", "U8", 2, (uint64_t[]){3, 32}, codes);
            assert_int_equal(open_built(&s, &o, NULL), RC_OK);
            assert_int_equal(model_file_tensor_count(o.m), 1);
            const struct tensor_view *t = tensor(&o, "x.weight");
            has_grid(t, QUANT_FP4_PAIRS, QUANT_E8M0, 3, 64, 1, 32, 2);
            check_fp4(t, codes, scale_values, 32);
            close_copy(&o);
        }
}

/* Block scales reach the right values: 0x38 is 1 as a code, so that values are the scales themselves. */
static void decodes_fp8_blocks(void **state)
{
    (void)state;
    static const float scales[2][3] = {{1, 2, 3}, {4, 5, 6}};
    uint8_t *codes = malloc(150 * 260);
    float *row = malloc(260 * sizeof *row);
    struct safetensors_build s = {0};
    struct opened o;
    assert_non_null(codes);
    assert_non_null(row);
    memset(codes, 0x38, 150 * 260);
    add_stored(&s, "x.weight", "F8_E4M3", 2, (uint64_t[]){150, 260}, codes);
    add_stored(&s, "x.weight_scale_inv", "F32", 2, (uint64_t[]){2, 3}, scales);
    assert_int_equal(open_built(&s, &o, NULL), RC_OK);
    static const size_t rows[] = {0, 127, 128, 149}, cols[] = {0, 127, 128, 255, 256, 259};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        quant_matrix_decode(&tensor(&o, "x.weight")->matrix, rows[i], 0, 260, row);
        for (size_t k = 0; k < sizeof cols / sizeof *cols; k++)
            assert_true(row[cols[k]] == scales[rows[i] / 128][cols[k] / 128]);
    }
    close_copy(&o);
    free(row);
    free(codes);
}

/* What lies beside the codes in place of what should, and the whole error. */
struct stored {
    const char *name;
    const char *dtype;
    int rank; /* -1: one F32 number, value */
    uint64_t shape[3];
    float value;
};
struct misfit {
    struct stored tensors[4];
    const char *code;
    const char *text;
};

#define CODES4                                                                                                         \
    {                                                                                                                  \
        "x.weight_packed", "U8", 2, {3, 32}, 0                                                                         \
    }
#define CODES8                                                                                                         \
    {                                                                                                                  \
        "x.weight", "F8_E4M3", 2, {150, 260}, 0                                                                        \
    }
#define SCALE4                                                                                                         \
    {                                                                                                                  \
        "x.weight_scale", "F8_E4M3", 2, {3, 4}, 0                                                                      \
    }

static const struct misfit misfits[] = {
    {{CODES8},
     "model_missing_scale",
     "tensor x.weight is F8_E4M3 [150, 260], but there is no weight_scale or weight_scale_inv beside it"},
    {{CODES8, {"x.weight_scale", "F32", 2, {3, 2}, 0}},
     "model_bad_scale",
     "tensor x.weight is F8_E4M3 [150, 260], but its scale x.weight_scale is F32 [3, 2], not one value, [150, 1] or "
     "[2, 3]"},
    {{CODES8, {"x.weight_scale_inv", "F32", 1, {149}, 0}},
     "model_bad_scale",
     "tensor x.weight is F8_E4M3 [150, 260], but its scale x.weight_scale_inv is F32 [149], not one value, [150, 1] or "
     "[2, 3]"},
    {{CODES8, {"x.weight_scale", "I32", 0, {0}, 0}},
     "model_bad_scale",
     "tensor x.weight is F8_E4M3 [150, 260], but its scale x.weight_scale is I32 [], not F32, BF16, F16 or F8_E8M0"},
    {{CODES8, {"x.weight_scale", "F32", 0, {0}, 0}, {"x.weight_scale_inv", "F32", 0, {0}, 0}},
     "model_bad_scale",
     "tensor x.weight has both a weight_scale and a weight_scale_inv beside it"},
    {{{"x.weight", "F8_E4M3", 1, {16}, 0}, {"x.weight_scale", "F32", 0, {0}, 0}},
     "model_bad_shape",
     "tensor x.weight is quantized, but F8_E4M3 [16] is no matrix"},
    {{{"x.weight", "F8_E4M3", 2, {0, 16}, 0}, {"x.weight_scale", "F32", 0, {0}, 0}},
     "model_bad_shape",
     "tensor x.weight is quantized, but F8_E4M3 [0, 16] is no matrix"},
    {{CODES4}, "model_missing_scale", "tensor x.weight_packed is U8 [3, 32], but there is no weight_scale beside it"},
    {{CODES4, SCALE4},
     "model_missing_scale",
     "tensor x.weight_packed is U8 [3, 32], but there is no weight_global_scale beside it"},
    {{{"x.weight", "U8", 2, {3, 32}, 0}, SCALE4},
     "model_missing_scale",
     "tensor x.weight is U8 [3, 32], but there is no weight_scale_2 beside it"},
    {{CODES4, SCALE4, {"x.weight_global_scale", "F32", 1, {2}, 0}},
     "model_bad_scale",
     "tensor x.weight_packed is U8 [3, 32], but its scale x.weight_global_scale is F32 [2], not one value of F32"},
    {{CODES4, SCALE4, {"x.weight_global_scale", "BF16", 1, {1}, 0}},
     "model_bad_scale",
     "tensor x.weight_packed is U8 [3, 32], but its scale x.weight_global_scale is BF16 [1], not one value of F32"},
    {{CODES4, SCALE4, {"x.weight_global_scale", NULL, -1, {0}, 0}},
     "model_bad_scale",
     "tensor x.weight_global_scale is 0, not a number above 0"},
    {{CODES4, SCALE4, {"x.weight_global_scale", NULL, -1, {0}, -2}},
     "model_bad_scale",
     "tensor x.weight_global_scale is -2, not a number above 0"},
    {{CODES4, {"x.weight_scale", "F8_E4M3", 2, {3, 2}, 0}, {"x.weight_global_scale", NULL, -1, {0}, 1}},
     "model_bad_scale",
     "tensor x.weight_packed is U8 [3, 32], but its scale x.weight_scale is F8_E4M3 [3, 2], not one for 16 of [3, 64] "
     "values"},
    {{CODES4, {"x.weight_scale", "U8", 2, {3, 4}, 0}},
     "model_bad_scale",
     "tensor x.weight_packed is U8 [3, 32], but its scale x.weight_scale is U8 [3, 4], not one for 32 of [3, 64] "
     "values"},
    {{CODES4, {"x.weight_scale", "F32", 2, {3, 4}, 0}},
     "model_bad_scale",
     "tensor x.weight_packed is U8 [3, 32], but its scale x.weight_scale is F32 [3, 4], not F8_E4M3 (NVFP4), U8 or "
     "F8_E8M0 (MXFP4)"},
    {{{"x.weight_packed", "U8", 2, {3, 20}, 0}, {"x.weight_scale", "U8", 2, {3, 1}, 0}},
     "model_bad_scale",
     "tensor x.weight_packed is U8 [3, 20], but its scale x.weight_scale is U8 [3, 1], not one for 32 of [3, 40] "
     "values"},
    {{{"x.weight_packed", "I32", 2, {3, 8}, 0}, {"x.weight_scale", "BF16", 2, {3, 2}, 0}},
     "model_unsupported",
     "tensor x.weight_packed is I32 [3, 8]; packed weights that can be read are U8"},
    {{CODES4, SCALE4, {"x.weight_global_scale", NULL, -1, {0}, 1}, {"x.weight", "BF16", 2, {3, 64}, 0}},
     "model_duplicate",
     "tensor x.weight is there twice, plain and packed"},
    {{{"x.weight", "BF16", 2, {3, 64}, 0}, {"x.weight_scale", "F32", 0, {0}, 0}},
     "model_bad_scale",
     "tensor x.weight_scale is the scale of no quantized matrix"},
    {{{"x.qweight", "I32", 2, {8, 64}, 0}},
     "model_unsupported",
     "tensor x.qweight belongs to a quantization that cannot be read (GPTQ, AWQ, zero points)"},
    {{{"x.weight_zero_point", "U8", 2, {3, 4}, 0}},
     "model_unsupported",
     "tensor x.weight_zero_point belongs to a quantization that cannot be read (GPTQ, AWQ, zero points)"},
    {{{"x.bias", "F8_E4M3", 1, {4}, 0}},
     "model_unsupported",
     "tensor x.bias is stored as F8_E4M3, which cannot be read"},
    {{{"x.weight", "F64", 1, {4}, 0}}, "model_unsupported", "tensor x.weight is stored as F64, which cannot be read"},
    {{{"x.weight", "BF16", 2, {0, 4}, 0}}, "model_bad_shape", "tensor x.weight has an empty dimension"},
};

static void refuses_what_does_not_fit(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof misfits / sizeof *misfits; i++) {
        struct safetensors_build s = {0};
        struct opened o;
        struct err e = {0};
        for (const struct stored *t = misfits[i].tensors; t < misfits[i].tensors + 4 && t->name; t++) {
            if (t->rank < 0)
                add_number(&s, t->name, 1, t->value);
            else
                add_stored(&s, t->name, t->dtype, t->rank, t->shape, NULL);
        }
        enum rc rc = open_built(&s, &o, &e);
        if (rc != RC_BAD_INPUT || strcmp(e.code, misfits[i].code) || strcmp(e.text, misfits[i].text))
            fail_msg("misfit %zu: rc %d, %s: %s", i, rc, e.code, e.text);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "test.safetensors");
        close_copy(&o);
    }
}

/* A vision tower is in no one's way, however it is stored. */
static void leaves_vision_alone(void **state)
{
    (void)state;
    struct safetensors_build s = {0};
    struct opened o;
    add_2d(&s, "model.visual.a.weight", "F8_E4M3", 3, 4);
    add_2d(&s, "model.visual.b.weight_packed", "U8", 3, 4);
    add_2d(&s, "model.visual.b.weight_scale", "F8_E4M3", 3, 4);
    add_1d(&s, "model.visual.c", "F64", 3);
    add_2d(&s, "model.visual.d.qweight", "I32", 3, 4);
    add_2d(&s, "x.weight", "BF16", 3, 4);
    assert_int_equal(open_built(&s, &o, NULL), RC_OK);
    assert_int_equal(model_file_tensor_count(o.m), 1);
    close_copy(&o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gives_tensors),
        cmocka_unit_test(takes_the_order_of_the_data),
        cmocka_unit_test(refuses_every_truncation),
        cmocka_unit_test(survives_every_changed_byte),
        cmocka_unit_test(refuses_every_damage),
        cmocka_unit_test(bounds_its_header),
        cmocka_unit_test(joins_fp8),
        cmocka_unit_test(joins_nvfp4),
        cmocka_unit_test(joins_mxfp4),
        cmocka_unit_test(decodes_fp8_blocks),
        cmocka_unit_test(refuses_what_does_not_fit),
        cmocka_unit_test(leaves_vision_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
