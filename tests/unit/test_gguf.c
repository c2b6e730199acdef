/* gguf: what a good file gives, and that every kind of damage is refused with its place. Damaged files lie in memory of
 * exactly their size, so that a sanitizer sees the first byte read outside. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "gguf_build.h"
#include "model_file.h"

static void put_number(struct gguf_build *g, const char *key, enum gguf_type type, uint64_t bits)
{
    buf_append(add_key(g, key, type), &bits, gguf_type_bytes(type));
}

/* Every type of value, arrays of each kind, three tensors of different formats. */
static void good_file(struct buf *out)
{
    struct gguf_build g = {0};
    put_number(&g, "t.u8", GGUF_U8, 200);
    put_number(&g, "t.i8", GGUF_I8, (uint64_t)-3);
    put_number(&g, "t.u16", GGUF_U16, 60000);
    put_number(&g, "t.i16", GGUF_I16, (uint64_t)-30000);
    put_number(&g, "t.u32", GGUF_U32, 4000000000);
    put_number(&g, "t.i32", GGUF_I32, (uint64_t)-7);
    put_number(&g, "t.u64", GGUF_U64, UINT64_MAX);
    put_number(&g, "t.i64", GGUF_I64, 1u << 30);
    put_number(&g, "t.f64", GGUF_F64, 0x3ff8000000000000); /* 1.5 */
    add_f32(&g, "t.f32", 0.25f);
    add_bool(&g, "t.yes", 1);
    add_bool(&g, "t.no", 0);
    add_text(&g, "t.text", "caf\xc3\xa9");
    add_text(&g, "t.empty", "");
    struct buf *b = add_array(&g, "a.text", GGUF_STRING, 3);
    put_text(b, "a");
    put_text(b, "");
    put_text(b, "three words here");
    b = add_array(&g, "a.i32", GGUF_I32, 3);
    for (int i = 0; i < 3; i++) put_u32(b, (uint32_t)(i - 1));
    put_u64(add_array(&g, "a.u64", GGUF_U64, 1), UINT64_MAX);
    buf_append(add_array(&g, "a.bool", GGUF_BOOL, 2), "\1\0", 2);
    put_u32(add_array(&g, "a.f32", GGUF_F32, 1), 0);
    add_array(&g, "a.none", GGUF_STRING, 0);
    b = add_array(&g, "a.nested", GGUF_ARRAY, 2);
    put_u32(b, GGUF_U8);
    put_u64(b, 3);
    buf_append(b, "abc", 3);
    put_u32(b, GGUF_STRING);
    put_u64(b, 1);
    put_text(b, "inner");
    add_matrix(&g, "b.weight", 4, 2, 1.5f);
    pad(&g.data, 32);
    add_entry(&g, "a.weight", 3, (uint64_t[]){64, 2, 3}, 3, g.data.len); /* Q4_1: 2 blocks a row, 6 rows */
    for (int i = 0; i < 240; i++) buf_append(&g.data, &(uint8_t){(uint8_t)i}, 1);
    pad(&g.data, 32);
    add_entry(&g, "c.bias", 1, (uint64_t[]){5}, 1, g.data.len); /* F16 */
    buf_append(&g.data, "0123456789", 10);
    build_file(&g, out);
    assert_false(out->failed);
}

/* Opens a copy of exactly n bytes. The copy is freed by the caller after the model. */
static enum rc open_copy(const void *bytes, size_t n, void **copy, struct model_file **m, struct err *e)
{
    *copy = malloc(n ? n : 1);
    assert_non_null(*copy);
    if (n) memcpy(*copy, bytes, n);
    return model_file_open_bytes(*copy, n, "test.gguf", m, e);
}

static void gives_tensors(void **state)
{
    (void)state;
    struct buf file = {0};
    struct model_file *m = NULL;
    void *copy;
    good_file(&file);
    assert_int_equal(open_copy(file.data, file.len, &copy, &m, NULL), RC_OK);
    assert_string_equal(model_file_path(m), "test.gguf");
    assert_int_equal(model_file_tensor_count(m), 3);
    static const char *const names[] = {"b.weight", "a.weight", "c.bias"};
    for (size_t i = 0; i < 3; i++) {
        const struct tensor_view *t = model_file_tensor_at(m, i);
        assert_string_equal(t->name, names[i]);
        assert_ptr_equal(model_file_tensor(m, names[i]), t);
    }
    assert_null(model_file_tensor_at(m, 3));
    assert_null(model_file_tensor(m, "a.weigh"));
    assert_null(model_file_tensor(m, ""));
    const struct tensor_view *t = model_file_tensor_at(m, 1);
    assert_int_equal(t->format, QUANT_Q4_1);
    assert_int_equal(t->n_dims, 3);
    assert_int_equal(t->dims[0], 64);
    assert_int_equal(t->dims[1], 2);
    assert_int_equal(t->dims[2], 3);
    assert_int_equal(t->dims[3], 1);
    assert_int_equal(t->n_bytes, 240);
    for (int i = 0; i < 240; i++) assert_int_equal(((const uint8_t *)t->bytes)[i], i);
    t = model_file_tensor(m, "c.bias");
    assert_int_equal(t->format, QUANT_F16);
    assert_int_equal(t->n_bytes, 10);
    assert_memory_equal(t->bytes, "0123456789", 10);
    float first;
    memcpy(&first, model_file_tensor(m, "b.weight")->bytes, sizeof first);
    assert_true(first == 1.5f);
    model_file_close(m);
    free(copy);
    buf_free(&file);
}

static void gives_numbers(void **state)
{
    (void)state;
    struct buf file = {0};
    struct model_file *m = NULL;
    void *copy;
    good_file(&file);
    assert_int_equal(open_copy(file.data, file.len, &copy, &m, NULL), RC_OK);
    static const struct {
        const char *key;
        uint64_t value;
        bool fits;
    } cases[] = {
        {"t.u8", 200, true},         {"t.i8", 0, false},  {"t.u16", 60000, true},      {"t.i16", 0, false},
        {"t.u32", 4000000000, true}, {"t.i32", 0, false}, {"t.u64", UINT64_MAX, true}, {"t.i64", 1 << 30, true},
        {"t.yes", 1, true},          {"t.no", 0, true},   {"t.f32", 0, false},         {"t.f64", 0, false},
        {"t.text", 0, false},        {"a.i32", 0, false}, {"t.absent", 0, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint64_t value = 0;
        assert_int_equal(model_file_u64(m, cases[i].key, &value), cases[i].fits);
        assert_true(value == cases[i].value);
    }
    double number = 0;
    bool truth = false;
    assert_true(model_file_f64(m, "t.f32", &number) && number == 0.25);
    assert_true(model_file_f64(m, "t.f64", &number) && number == 1.5);
    assert_false(model_file_f64(m, "t.u8", &number));
    assert_true(model_file_bool(m, "t.yes", &truth) && truth);
    assert_true(model_file_bool(m, "t.no", &truth) && !truth);
    assert_false(model_file_bool(m, "t.u8", &truth));
    assert_int_equal(model_file_key_count(m), 21);
    assert_string_equal(model_file_key_at(m, 0), "t.u8");
    assert_string_equal(model_file_key_at(m, 20), "a.nested");
    assert_null(model_file_key_at(m, 21));
    assert_true(model_file_has(m, "a.nested"));
    assert_false(model_file_has(m, "a.nest"));
    model_file_close(m);
    free(copy);
    buf_free(&file);
}

static void assert_text(struct model_text text, const char *expected)
{
    assert_int_equal(text.len, strlen(expected));
    assert_memory_equal(text.bytes, expected, text.len);
}

static void gives_texts_and_arrays(void **state)
{
    (void)state;
    struct buf file = {0};
    struct model_file *m = NULL;
    struct model_text text;
    int64_t number;
    void *copy;
    good_file(&file);
    assert_int_equal(open_copy(file.data, file.len, &copy, &m, NULL), RC_OK);
    assert_true(model_file_text(m, "t.text", &text));
    assert_text(text, "caf\xc3\xa9");
    assert_true(model_file_text(m, "t.empty", &text));
    assert_text(text, "");
    assert_false(model_file_text(m, "t.u8", &text));
    assert_false(model_file_text(m, "a.text", &text));
    static const char *const texts[] = {"a", "", "three words here"};
    assert_int_equal(model_file_text_array(m, "a.text"), 3);
    for (size_t i = 0; i < 3; i++) {
        assert_true(model_file_text_at(m, "a.text", i, &text));
        assert_text(text, texts[i]);
    }
    assert_false(model_file_text_at(m, "a.text", 3, &text));
    assert_false(model_file_text_at(m, "a.i32", 0, &text));
    assert_false(model_file_text_at(m, "a.nested", 0, &text));
    assert_int_equal(model_file_text_array(m, "a.none"), 0);
    assert_int_equal(model_file_text_array(m, "t.text"), 0);
    assert_int_equal(model_file_int_array(m, "a.i32"), 3);
    for (size_t i = 0; i < 3; i++) assert_true(model_file_int_at(m, "a.i32", i, &number) && number == (int64_t)i - 1);
    assert_false(model_file_int_at(m, "a.i32", 3, &number));
    assert_int_equal(model_file_int_array(m, "a.bool"), 2);
    assert_true(model_file_int_at(m, "a.bool", 0, &number) && number == 1);
    assert_int_equal(model_file_int_array(m, "a.u64"), 1);
    assert_false(model_file_int_at(m, "a.u64", 0, &number));
    assert_int_equal(model_file_int_array(m, "a.f32"), 0);
    assert_int_equal(model_file_int_array(m, "a.text"), 0);
    assert_int_equal(model_file_int_array(m, "a.nested"), 0);
    assert_int_equal(model_file_int_array(m, "t.u8"), 0);
    model_file_close(m);
    free(copy);
    buf_free(&file);
}

static void refuses_every_truncation(void **state)
{
    (void)state;
    struct buf file = {0};
    good_file(&file);
    for (size_t n = 0; n < file.len; n++) {
        struct model_file *m = NULL;
        struct err e = {0};
        void *copy;
        assert_int_equal(open_copy(file.data, n, &copy, &m, &e), RC_BAD_INPUT);
        assert_null(m);
        assert_int_equal(e.rc, RC_BAD_INPUT);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "test.gguf");
        assert_string_equal(e.code, "gguf_truncated");
        assert_true(e.byte >= 0 && e.byte <= (int64_t)n);
        free(copy);
    }
    buf_free(&file);
}

/* Whatever one byte becomes: refused, or an index whose every view can be read. */
static void survives_every_changed_byte(void **state)
{
    (void)state;
    struct buf file = {0};
    good_file(&file);
    size_t header = file.len - 10 - 256 - 32, refused = 0;
    for (size_t i = 0; i < header; i++) {
        static const uint8_t flips[] = {0x01, 0x02, 0x04, 0x08, 0x80, 0xff};
        for (size_t k = 0; k < sizeof flips; k++) {
            struct model_file *m = NULL;
            struct err e = {0};
            void *copy;
            file.data[i] = (char)(file.data[i] ^ flips[k]);
            enum rc rc = open_copy(file.data, file.len, &copy, &m, &e);
            file.data[i] = (char)(file.data[i] ^ flips[k]);
            assert_true(rc == RC_OK || (rc == RC_BAD_INPUT && e.code[0] && e.source[0]));
            refused += rc != RC_OK;
            for (size_t t = 0; rc == RC_OK && t < model_file_tensor_count(m); t++) {
                const struct tensor_view *view = model_file_tensor_at(m, t);
                const uint8_t *bytes = view->bytes, *begin = copy, *end = begin + file.len;
                assert_true(bytes >= begin && view->n_bytes <= (size_t)(end - bytes));
            }
            model_file_close(m);
            free(copy);
        }
    }
    assert_true(refused > header);
    buf_free(&file);
}

/* Builds a small file, lets the case change it, and expects this refusal. */
struct damage {
    const char *name;
    void (*build)(struct gguf_build *g);
    const char *code;
    const char *text; /* a part of the message */
};

static const uint64_t one_row[] = {32, 1, 1, 1};

static void two_tensors(struct gguf_build *g, const char *first, const char *second, uint64_t offset)
{
    add_entry(g, first, 1, one_row, 0, 0);
    add_entry(g, second, 1, one_row, 0, offset);
    for (int i = 0; i < 512; i++) buf_append(&g->data, "", 1);
}

static void one_tensor(struct gguf_build *g, uint32_t n_dims, const uint64_t *dims, uint32_t type)
{
    add_entry(g, "blk.0.odd", n_dims, dims, type, 0);
    for (int i = 0; i < 512; i++) buf_append(&g->data, "", 1);
}

static void version_2(struct gguf_build *g) { g->version = 2; }
static void version_big_endian(struct gguf_build *g) { g->version = 3u << 24; }
static void many_tensors(struct gguf_build *g) { g->n_tensors = 65537; }
static void most_tensors(struct gguf_build *g) { g->n_tensors = UINT64_MAX; }
static void many_keys(struct gguf_build *g) { g->n_keys = 65537; }
static void lying_keys(struct gguf_build *g) { g->n_keys = 65536; }
static void value_type(struct gguf_build *g) { add_key(g, "k", (enum gguf_type)13), put_u64(&g->keys, 0); }
static void element_type(struct gguf_build *g) { add_array(g, "k", (enum gguf_type)99, 0), put_u64(&g->keys, 0); }
static void odd_bool(struct gguf_build *g) { add_bool(g, "k", 2); }
static void odd_bools(struct gguf_build *g) { buf_append(add_array(g, "k", GGUF_BOOL, 3), "\0\1\7", 3); }
static void long_text(struct gguf_build *g) { put_u64(add_key(g, "k", GGUF_STRING), (64u << 20) + 1); }
static void longest_text(struct gguf_build *g) { put_u64(add_key(g, "k", GGUF_STRING), UINT64_MAX); }
static void long_array(struct gguf_build *g) { put_u64(add_array(g, "k", GGUF_U64, UINT64_MAX / 8 + 2), 0); }
static void long_text_array(struct gguf_build *g) { put_u64(add_array(g, "k", GGUF_STRING, 1u << 30), 0); }
static void long_nested_array(struct gguf_build *g) { put_u64(add_array(g, "k", GGUF_ARRAY, 1u << 30), 0); }
static void empty_key(struct gguf_build *g) { add_u32(g, "", 1); }
static void control_key(struct gguf_build *g) { add_u32(g, "a\nb", 1); }
static void same_keys(struct gguf_build *g) { add_u32(g, "k", 1), add_u32(g, "l", 1), add_text(g, "k", "v"); }

static void nul_key(struct gguf_build *g)
{
    put_bytes(&g->keys, "a\0b", 3);
    put_u32(&g->keys, GGUF_U32);
    put_u32(&g->keys, 1);
    g->n_keys++;
}

static void long_key(struct gguf_build *g)
{
    char key[65537];
    memset(key, 'k', sizeof key - 1);
    key[65536] = '\0';
    add_u32(g, key, 1);
}

static void deep_array(struct gguf_build *g)
{
    add_array(g, "k", GGUF_ARRAY, 1);
    for (int i = 0; i < 50; i++) {
        put_u32(&g->keys, GGUF_ARRAY);
        put_u64(&g->keys, 1);
    }
}

static void alignment_0(struct gguf_build *g) { add_u32(g, "general.alignment", 0), two_tensors(g, "a", "b", 128); }
static void alignment_48(struct gguf_build *g) { add_u32(g, "general.alignment", 48), two_tensors(g, "a", "b", 128); }
static void alignment_4(struct gguf_build *g) { add_u32(g, "general.alignment", 4), two_tensors(g, "a", "b", 128); }
static void alignment_big(struct gguf_build *g) { add_u32(g, "general.alignment", 1u << 21); }
static void alignment_text(struct gguf_build *g) { add_text(g, "general.alignment", "32"); }
static void alignment_bool(struct gguf_build *g) { add_bool(g, "general.alignment", 1); }
static void same_names(struct gguf_build *g) { two_tensors(g, "twin", "twin", 128); }
static void empty_name(struct gguf_build *g) { two_tensors(g, "a", "", 128); }
static void control_name(struct gguf_build *g) { two_tensors(g, "a", "b\x1b", 128); }
static void overlap(struct gguf_build *g) { two_tensors(g, "a", "b", 96); }
static void odd_offset(struct gguf_build *g) { two_tensors(g, "a", "b", 136); }
static void far_offset(struct gguf_build *g) { two_tensors(g, "a", "b", 512); }
static void end_offset(struct gguf_build *g) { two_tensors(g, "a", "b", 416); }
static void huge_offset(struct gguf_build *g) { two_tensors(g, "a", "b", UINT64_MAX - 31); }
static void no_dims(struct gguf_build *g) { one_tensor(g, 0, one_row, 0); }
static void five_dims(struct gguf_build *g) { one_tensor(g, 5, (uint64_t[]){1, 1, 1, 1, 1}, 0); }
static void empty_dim(struct gguf_build *g) { one_tensor(g, 2, (uint64_t[]){32, 0}, 0); }
static void big_product(struct gguf_build *g) { one_tensor(g, 2, (uint64_t[]){1ull << 32, 1ull << 32}, 0); }
static void big_dim(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){UINT64_MAX}, 0); }
static void big_bytes(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){1ull << 62}, 0); }
static void odd_row(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){48}, 3); }
static void odd_super_row(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){128}, 12); }
static void odd_mxfp4_row(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){16}, 39); }
static void odd_nvfp4_row(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){32}, 40); }

/* An NVFP4 matrix of one row and a companion of n numbers of this type. */
static void nvfp4_with(struct gguf_build *g, const char *companion, uint32_t type, uint64_t n, float value)
{
    add_entry(g, "x.weight", 2, (uint64_t[]){64, 1}, 40, g->data.len);
    for (int i = 0; i < 64; i++) buf_append(&g->data, "", 1);
    add_entry(g, companion, 1, &n, type, g->data.len);
    for (int i = 0; i < 8; i++) buf_append(&g->data, &value, sizeof value);
}
static void two_scales(struct gguf_build *g) { nvfp4_with(g, "x.scale", 0, 2, 1); }
static void f16_scale(struct gguf_build *g) { nvfp4_with(g, "x.scale", 1, 1, 1); }
static void zero_scale(struct gguf_build *g) { nvfp4_with(g, "x.scale", 0, 1, 0); }

static void type_q2_k(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){256}, 10); }
static void type_removed(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){256}, 4); }
static void type_none(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){256}, 0xffffffff); }
static void big_tensor(struct gguf_build *g) { one_tensor(g, 1, (uint64_t[]){129}, 0); }
static void split(struct gguf_build *g) { add_u32(g, "split.count", 2); }

static void long_name(struct gguf_build *g)
{
    char name[257];
    memset(name, 'n', sizeof name - 1);
    name[256] = '\0';
    two_tensors(g, "a", name, 128);
}

static const struct damage damages[] = {
    {"version 2", version_2, "gguf_bad_version", "version 2"},
    {"big endian", version_big_endian, "gguf_bad_version", "big-endian"},
    {"many tensors", many_tensors, "gguf_too_many", "65537 tensors"},
    {"most tensors", most_tensors, "gguf_too_many", "18446744073709551615 tensors"},
    {"many keys", many_keys, "gguf_too_many", "65537 metadata keys"},
    {"lying keys", lying_keys, "gguf_truncated", "65536 metadata keys"},
    {"value type", value_type, "gguf_bad_type", "13"},
    {"element type", element_type, "gguf_bad_type", "99"},
    {"odd bool", odd_bool, "gguf_bad_bool", "2"},
    {"odd bools", odd_bools, "gguf_bad_bool", "7"},
    {"long text", long_text, "gguf_too_long", "67108865"},
    {"longest text", longest_text, "gguf_too_long", "18446744073709551615"},
    {"long array", long_array, "gguf_truncated", "2305843009213693953 elements"},
    {"long text array", long_text_array, "gguf_truncated", "1073741824 elements"},
    {"long nested array", long_nested_array, "gguf_truncated", "1073741824 elements"},
    {"empty key", empty_key, "gguf_bad_name", "empty"},
    {"control key", control_key, "gguf_bad_name", "control character 10"},
    {"NUL key", nul_key, "gguf_bad_name", "control character 0"},
    {"long key", long_key, "gguf_too_long", "65536"},
    {"same keys", same_keys, "gguf_duplicate", "key k "},
    {"deep array", deep_array, "gguf_too_deep", "4"},
    {"alignment 0", alignment_0, "gguf_bad_alignment", "is 0"},
    {"alignment 48", alignment_48, "gguf_bad_alignment", "is 48"},
    {"alignment 4", alignment_4, "gguf_bad_alignment", "is 4"},
    {"alignment 2 MiB", alignment_big, "gguf_bad_alignment", "is 2097152"},
    {"alignment text", alignment_text, "gguf_bad_alignment", "integer"},
    {"alignment bool", alignment_bool, "gguf_bad_alignment", "integer"},
    {"same names", same_names, "gguf_duplicate", "twin"},
    {"empty name", empty_name, "gguf_bad_name", "empty"},
    {"control name", control_name, "gguf_bad_name", "control character 27"},
    {"long name", long_name, "gguf_too_long", "256"},
    {"overlap", overlap, "gguf_bad_offset", "tensor b at 96 overlaps"},
    {"odd offset", odd_offset, "gguf_bad_offset", "136"},
    {"far offset", far_offset, "gguf_truncated", "tensor b needs 128 bytes at 512"},
    {"end offset", end_offset, "gguf_truncated", "tensor b needs 128 bytes at 416"},
    {"huge offset", huge_offset, "gguf_truncated", "tensor b"},
    {"no dims", no_dims, "gguf_bad_shape", "0 dimensions"},
    {"five dims", five_dims, "gguf_bad_shape", "5 dimensions"},
    {"empty dim", empty_dim, "gguf_bad_shape", "empty"},
    {"big product", big_product, "gguf_bad_shape", "63 bits"},
    {"big dim", big_dim, "gguf_bad_shape", "63 bits"},
    {"big bytes", big_bytes, "gguf_bad_shape", "blk.0.odd"},
    {"odd row", odd_row, "gguf_bad_shape", "rows of 48"},
    {"odd super row", odd_super_row, "gguf_bad_shape", "rows of 128"},
    {"odd MXFP4 row", odd_mxfp4_row, "gguf_bad_shape", "rows of 16 values, no multiple of a MXFP4 block (32)"},
    {"odd NVFP4 row", odd_nvfp4_row, "gguf_bad_shape", "rows of 32 values, no multiple of a NVFP4 block (64)"},
    {"two scales", two_scales, "gguf_bad_shape", "tensor x.scale is not one number of F32"},
    {"F16 scale", f16_scale, "gguf_bad_shape", "tensor x.scale is not one number of F32"},
    {"zero scale", zero_scale, "gguf_bad_scale", "tensor x.scale is 0, not a number above 0"},
    {"type Q2_K", type_q2_k, "gguf_unsupported_format", "tensor blk.0.odd is stored as type 10 (Q2_K)"},
    {"type removed", type_removed, "gguf_unsupported_format", "type 4 (unknown)"},
    {"type none", type_none, "gguf_unsupported_format", "type 4294967295"},
    {"big tensor", big_tensor, "gguf_truncated", "tensor blk.0.odd needs 516 bytes"},
    {"split", split, "model_unsupported", "one of 2 files"},
};

static void refuses_every_damage(void **state)
{
    (void)state;
    struct buf file = {0};
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        struct gguf_build g = {0};
        struct model_file *m = NULL;
        struct err e = {0};
        void *copy;
        damages[i].build(&g);
        build_file(&g, &file);
        enum rc rc = open_copy(file.data, file.len, &copy, &m, &e);
        if (rc != RC_BAD_INPUT || strcmp(e.code, damages[i].code) || !strstr(e.text, damages[i].text))
            fail_msg("%s: rc %d, %s: %s", damages[i].name, rc, e.code, e.text);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "test.gguf");
        assert_null(m);
        assert_int_equal(model_file_open_bytes(copy, file.len, "test.gguf", &m, NULL), RC_BAD_INPUT);
        free(copy);
    }
    buf_free(&file);
}

/* The byte of an error is where the wrong thing stands. */
static void names_the_byte(void **state)
{
    (void)state;
    struct buf file = {0};
    struct model_file *m = NULL;
    struct err e = {0};
    struct gguf_build g = {0};
    void *copy;
    add_u32(&g, "first", 1);
    odd_bool(&g);
    build_file(&g, &file);
    assert_int_equal(open_copy(file.data, file.len, &copy, &m, &e), RC_BAD_INPUT);
    assert_int_equal(e.byte, file.len - 1);
    assert_non_null(strstr(e.text, "(at byte "));
    free(copy);
    e = (struct err){0};
    type_q2_k(&g);
    build_file(&g, &file);
    assert_int_equal(open_copy(file.data, file.len, &copy, &m, &e), RC_BAD_INPUT);
    assert_int_equal(e.byte, 24 + 8 + strlen("blk.0.odd") + 4 + 8);
    free(copy);
    buf_free(&file);
}

static void accepts_what_is_unusual_but_right(void **state)
{
    (void)state;
    struct buf file = {0};
    struct model_file *m = NULL;
    struct gguf_build g = {0};
    void *copy;
    build_file(&g, &file); /* nothing at all in it */
    assert_int_equal(open_copy(file.data, file.len, &copy, &m, NULL), RC_OK);
    assert_int_equal(model_file_tensor_count(m), 0);
    assert_int_equal(model_file_key_count(m), 0);
    assert_null(model_file_tensor(m, "a"));
    model_file_close(m);
    free(copy);
    two_tensors(&g, "a", "b", 256); /* a gap, another alignment, and the largest name */
    g.alignment = 64;
    add_u32(&g, "general.alignment", 64);
    char name[256];
    memset(name, 'n', 255);
    name[255] = '\0';
    add_entry(&g, name, 4, one_row, 0, 384);
    build_file(&g, &file);
    assert_int_equal(open_copy(file.data, file.len, &copy, &m, NULL), RC_OK);
    const struct tensor_view *a = model_file_tensor(m, "a"), *b = model_file_tensor(m, "b");
    assert_int_equal((const char *)b->bytes - (const char *)a->bytes, 256);
    assert_int_equal(((const char *)a->bytes - (const char *)copy) % 64, 0);
    assert_non_null(model_file_tensor(m, name));
    model_file_close(m);
    free(copy);
    buf_free(&file);
}

/* The factor of an NVFP4 matrix becomes part of it; beside others it stays a tensor, and so does what is alike in name. */
static void joins_nvfp4_with_its_scale(void **state)
{
    (void)state;
    struct buf file = {0};
    struct model_file *m = NULL;
    void *copy;
    static const struct {
        const char *companion;
        uint32_t type; /* of the matrix */
        float global;
        size_t tensors;
    } cases[] = {
        {"x.scale", 40, 0.25f, 1}, {"x.input_scale", 40, 1, 1}, {"y.scale", 40, 1, 2},
        {"x.scale", 39, 1, 2},     {"x.scales", 40, 1, 2},      {"x.input_scale", 0, 1, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct gguf_build g = {0};
        const float quarter = 0.25f;
        add_entry(&g, cases[i].companion, 1, (uint64_t[]){1}, 0, 0);
        buf_append(&g.data, &quarter, sizeof quarter);
        pad(&g.data, 32);
        add_entry(&g, "x.weight", 2, (uint64_t[]){64, 2}, cases[i].type, g.data.len);
        for (int k = 0; k < 512; k++) buf_append(&g.data, &(uint8_t){(uint8_t)k}, 1);
        build_file(&g, &file);
        assert_int_equal(open_copy(file.data, file.len, &copy, &m, NULL), RC_OK);
        const struct tensor_view *t = model_file_tensor(m, "x.weight");
        assert_int_equal(model_file_tensor_count(m), cases[i].tensors);
        assert_int_equal(model_file_tensor(m, cases[i].companion) != NULL, cases[i].tensors == 2);
        assert_non_null(t);
        assert_true(t->matrix.global == cases[i].global && !t->matrix.divide);
        assert_int_equal(t->matrix.rows, 2);
        assert_int_equal(t->matrix.cols, 64);
        if (cases[i].type == 40) {
            assert_int_equal(t->format, QUANT_NVFP4);
            assert_int_equal(t->n_bytes, 2 * 36);
        } else if (cases[i].type == 39) {
            assert_int_equal(t->format, QUANT_MXFP4);
            assert_int_equal(t->n_bytes, 2 * 2 * 17);
        }
        model_file_close(m);
        free(copy);
    }
    buf_free(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gives_tensors),
        cmocka_unit_test(gives_numbers),
        cmocka_unit_test(gives_texts_and_arrays),
        cmocka_unit_test(refuses_every_truncation),
        cmocka_unit_test(survives_every_changed_byte),
        cmocka_unit_test(refuses_every_damage),
        cmocka_unit_test(names_the_byte),
        cmocka_unit_test(accepts_what_is_unusual_but_right),
        cmocka_unit_test(joins_nvfp4_with_its_scale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
