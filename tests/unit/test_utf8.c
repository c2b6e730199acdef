/* utf8_valid, utf8_append_complete: the standard's examples, and every short byte sequence against utf8proc. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>
#include <utf8proc.h>

#include "tokenizer.h"
#include "utf8.h"

#define BAD "\xef\xbf\xbd"

static void expect_complete(const char *bytes, size_t len, const char *want)
{
    struct buf out = {0};
    assert_true(utf8_append_complete(&out, bytes, len));
    assert_string_equal(out.data ? out.data : "", want);
    buf_free(&out);
}

/* Unicode 15, section 3.9, tables 3-8 to 3-11, and a few ends. */
static void test_replacement(void **state)
{
    (void)state;
    static const struct {
        const char *bytes, *want;
    } cases[] = {
        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", BAD BAD BAD BAD BAD BAD BAD BAD "A"},
        {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", BAD BAD BAD BAD BAD BAD BAD BAD "A"},
        {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", BAD BAD BAD BAD BAD "A" BAD BAD "B"},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", BAD BAD BAD BAD "A"},
        {"\x61\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64", "a" BAD BAD BAD "b" BAD "c" BAD BAD "d"},
        {"", ""},
        {"plain", "plain"},
        {"\xe4\xb8\xad\xf0\x9f\x98\x80", "\xe4\xb8\xad\xf0\x9f\x98\x80"},
        {"x\xe4\xb8", "x"}, /* incomplete ends are left out */
        {"x\xf0\x9f\x98", "x"},
        {"x\xc3", "x"},
        {"x\xe4\xb8\xe4\xb8", "x" BAD},
        {"x\xe0\x80", "x" BAD BAD}, /* not incomplete: no character begins so */
        {"x\xc1", "x" BAD},
        {"x\x80", "x" BAD},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_complete(cases[i].bytes, strlen(cases[i].bytes), cases[i].want);
}

static void test_appends(void **state)
{
    (void)state;
    struct buf out = {0};
    assert_true(utf8_append_complete(&out, "a\0b", 3));
    assert_true(utf8_append_complete(&out,
                                     "\xff"
                                     "c",
                                     2));
    assert_int_equal(out.len, 7);
    assert_memory_equal(out.data, "a\0b" BAD "c", 7);
    buf_free(&out);
}

/* Whatever is cut off the end, what was shown before stays: a stream never takes a character back. */
static void test_prefixes(void **state)
{
    (void)state;
    static const char bytes[] = "a\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\xe1\x80\x41\xff\xf0\x90\x80z";
    struct buf whole = {0};
    assert_true(utf8_append_complete(&whole, bytes, sizeof bytes - 1));
    for (size_t n = 0; n < sizeof bytes; n++) {
        struct buf part = {0};
        assert_true(utf8_append_complete(&part, bytes, n));
        assert_true(part.len <= whole.len);
        if (part.len) assert_memory_equal(part.data, whole.data, part.len);
        assert_true(utf8_valid(part.data ? part.data : "", part.len));
        buf_free(&part);
    }
    buf_free(&whole);
}

/* All beginnings of three bytes, and those of four at the ranges' borders. */
static void test_against_utf8proc(void **state)
{
    (void)state;
    static const unsigned char fourth[] = {0x00, 0x41, 0x7f, 0x80, 0xbf, 0xc0, 0xff};
    for (unsigned a = 0x80; a < 256; a++)
        for (unsigned b = 0; b < 256; b++)
            for (unsigned c = 0x70; c < 256; c++)
                for (size_t d = 0; d < (a < 0xf0 ? 1 : sizeof fourth); d++) {
                    unsigned char bytes[4] = {(unsigned char)a, (unsigned char)b, (unsigned char)c, fourth[d]};
                    utf8proc_int32_t code;
                    utf8proc_ssize_t n = utf8proc_iterate(bytes, 4, &code);
                    struct utf8_step s = utf8_next((const char *)bytes, 4);
                    if ((s.kind == UTF8_CHAR) != (n > 0)) fail_msg("%02x %02x %02x %02x", a, b, c, fourth[d]);
                    if (n > 0 && (s.n_bytes != (size_t)n || s.code != (uint32_t)code))
                        fail_msg("%02x %02x %02x %02x: U+%04X", a, b, c, fourth[d], s.code);
                }
}

static void test_every_character(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 0x110000; code++) {
        unsigned char want[4];
        char got[4];
        size_t n = utf8_put(got, code);
        bool surrogate = code >= 0xd800 && code < 0xe000;
        if (!surrogate &&
            (n != (size_t)utf8proc_encode_char((utf8proc_int32_t)code, want) || memcmp(got, want, n) != 0))
            fail_msg("U+%04X is written wrongly", code);
        if (utf8_valid(got, n) == surrogate) fail_msg("U+%04X is judged wrongly", code);
    }
}

static void test_valid(void **state)
{
    (void)state;
    assert_true(utf8_valid("", 0));
    assert_true(utf8_valid("a\0b", 3));
    assert_true(utf8_valid("\xf4\x8f\xbf\xbf", 4));
    assert_false(utf8_valid("\xf4\x90\x80\x80", 4));
    assert_false(utf8_valid("ab\xc3", 3));
    assert_false(utf8_valid("\xc3(", 2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_replacement),     cmocka_unit_test(test_appends),
        cmocka_unit_test(test_prefixes),        cmocka_unit_test(test_against_utf8proc),
        cmocka_unit_test(test_every_character), cmocka_unit_test(test_valid),
    };
    return cmocka_run_group_tests_name("utf8", tests, NULL, NULL);
}
