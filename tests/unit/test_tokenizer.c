/* The tokenizer over a small vocabulary: merging against the textbook's loop, special tokens, damaged input, decoding,
 * digest, and every refusal of a model file. What real vocabularies give is in tests/golden/test_tokenizer_golden.c. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>

#include "tokenizer_fixture.h"
#include "tokenizer_private.h"

#define SPACE "\xc4\xa0" /* U+0120 stands for it in the byte alphabet */

static enum rc open_with(const struct vocab *v, const struct tokenizer_options *o, struct tokenizer **t, struct err *e)
{
    struct buf bytes = {0};
    struct model_file *m = NULL;
    vocab_gguf(v, &bytes);
    assert_int_equal(model_file_open_bytes(bytes.data, bytes.len, "fixture", &m, e), RC_OK);
    enum rc rc = o ? tokenizer_open_with(m, o, t, e) : tokenizer_open(m, t, e);
    model_file_close(m); /* the tokenizer must not need it any more */
    buf_free(&bytes);
    return rc;
}

static struct tokenizer *open_good(const struct vocab *v)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (open_with(v, NULL, &t, &e) != RC_OK) fail_msg("%s: %s", e.code, e.text);
    assert_non_null(t);
    return t;
}

static struct token_list encode(struct tokenizer *t, const char *text, size_t len, bool parse_special)
{
    struct token_list ids = {0};
    struct err e = {0};
    assert_int_equal(tokenizer_encode(t, text, len, parse_special, &ids, &e), RC_OK);
    return ids;
}

/* wanted: the tokens' stored texts, joined by spaces. */
static void expect(struct tokenizer *t, const char *text, bool parse_special, const char *wanted)
{
    struct token_list ids = encode(t, text, strlen(text), parse_special);
    char copy[400];
    size_t n = 0;
    snprintf(copy, sizeof copy, "%s", wanted);
    for (char *save = NULL, *at = strtok_r(copy, " ", &save); at; at = strtok_r(NULL, " ", &save), n++) {
        if (n >= ids.len || ids.ids[n] != tokenizer_find(t, at)) fail_msg("\"%s\": token %zu is not %s", text, n, at);
    }
    assert_int_equal(ids.len, n);
    token_list_free(&ids);
}

static void test_merges(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    struct tokenizer *t = open_good(&v);
    expect(t, "", false, "");
    expect(t, "hello", false, "hello");
    expect(t, "hellhe", false, "hell he");
    expect(t, "aaaaa", false, "aa aa a"); /* leftmost first */
    expect(t, "aab", false, "aa b");      /* the lower rank wins over the longer token */
    expect(t, "caab", false, "c aa b");
    expect(t, "abab", false, "ab ab");
    expect(t, "hello hello", false, "hello " SPACE " hello");
    expect(t, "he\nll", false, "he \xc4\x8a ll");
    tokenizer_close(t);
}

/* Whether the merge "LEFT RIGHT" is of these two. */
static bool is_merge_of(const char *merge, const char *left, size_t left_len, const char *right, size_t right_len)
{
    return strlen(merge) == left_len + 1 + right_len && memcmp(merge, left, left_len) == 0 && merge[left_len] == ' ' &&
           memcmp(merge + left_len + 1, right, right_len) == 0;
}

/* The definition, as slow as it is: find the pair of lowest rank, the leftmost, merge it, again. Part i of text is
 * [starts[i], starts[i + 1]). Returns the number of parts. */
static size_t merge_slowly(const struct vocab *v, const char *text, size_t *starts, size_t n)
{
    for (;;) {
        size_t best = v->n_merges, at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            size_t left = starts[i + 1] - starts[i], right = starts[i + 2] - starts[i + 1];
            for (size_t r = 0; r < best; r++) {
                if (!is_merge_of(v->merges[r], text + starts[i], left, text + starts[i + 1], right)) continue;
                best = r;
                at = i;
            }
        }
        if (best == v->n_merges) return n;
        memmove(starts + at + 1, starts + at + 2, (n - at - 1) * sizeof *starts);
        n--;
    }
}

static void test_merges_against_definition(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    static const char *const words[] = {"bb", "bab", "aaa", "abba", "babab", "cab", "cabc", "bc", "abab", "aaaa"};
    static const char *const merges[] = {"b b",  "b ab",  "aa a", "ab ba", "bab ab",
                                         "c ab", "cab c", "b c",  "ab ab", "aa aa"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        vocab_add(&v, words[i], F_NORMAL);
        vocab_merge(&v, merges[i]);
    }
    struct tokenizer *t = open_good(&v);
    uint64_t draw = 12345;
    for (int round = 0; round < 3000; round++) {
        char text[33] = "";
        size_t starts[34], n = 1 + (size_t)round % 32;
        for (size_t i = 0; i <= n; i++) {
            starts[i] = i;
            if (i == n) break;
            draw = draw * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            text[i] = "aabbc"[(draw >> 33) % 5];
        }
        struct token_list got = encode(t, text, n, false);
        size_t n_parts = merge_slowly(&v, text, starts, n);
        assert_int_equal(got.len, n_parts);
        for (size_t i = 0; i < n_parts; i++) {
            char part[33] = "";
            memcpy(part, text + starts[i], starts[i + 1] - starts[i]);
            assert_int_equal(got.ids[i], tokenizer_find(t, part));
        }
        token_list_free(&got);
    }
    tokenizer_close(t);
}

static void test_special(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    vocab_add(&v, "<|im_start|>x", F_CONTROL);
    vocab_add(&v, "\xc4\xa0<t", F_USER); /* user-defined texts are not written in the byte alphabet */
    struct tokenizer *t = open_good(&v);
    expect(t, "a<|im_end|>b", true, "a <|im_end|> b");
    expect(t, "<|im_start|>x<|im_start|>y", true, "<|im_start|>x <|im_start|> y"); /* the longest */
    expect(t, "<|im_end|<|im_end|>", true, "< | i m _ e n d | <|im_end|>");
    expect(t, "<|im_end|><|im_end|>", true, "<|im_end|> <|im_end|>");
    expect(t, "<|im_end", true, "< | i m _ e n d");
    expect(t, "<|im_end|>", false, "< | i m _ e n d | >");
    expect(t, "a<think>b", false, "a <think> b");
    expect(t, "<think>\xc3\xa9<think>\xc3", false, "<think>\xc3\xa9 <think> \xc3\xaf \xc2\xbf \xc2\xbd");
    expect(t, "<think><|im_end|>", false, "<think> < | i m _ e n d | >");
    expect(t, " <t", false, "\xc4\xa0 < t");
    expect(t, "\xc4\xa0<t", false, "\xc4\xa0<t");
    tokenizer_close(t);
}

/* llama-bpe takes a piece that is a token whole, merges or not; never a control token. */
static void test_whole_pieces(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    vocab_add(&v, "xyz", F_NORMAL);
    vocab_add(&v, "\xc4\xa0xyz", F_NORMAL);
    vocab_add(&v, "secret", F_CONTROL);
    struct tokenizer *t = open_good(&v);
    expect(t, "xyz", false, "x y z");
    tokenizer_close(t);
    v.pre = "llama-bpe";
    t = open_good(&v);
    expect(t, "xyz xyz", false, "xyz \xc4\xa0xyz");
    expect(t, "xyzx", false, "x y z x");
    expect(t, "secret", false, "s e c r e t");
    expect(t, "secret", true, "secret");
    expect(t, "aab", false, "aab");
    tokenizer_close(t);
}

/* Where they differ: digits, contractions in capitals, and what a look-ahead at white space can see. */
static void test_pre_tokenizers(void **state)
{
    (void)state;
    static const struct {
        const char *pre, *wanted;
    } cases[] = {
        {"gpt-2", "_ 1111 _ _ 1 A ' SA _ _ A"},
        {"smollm", "_ 1 1 1 1 __ 1 A ' SA _ _ A"}, /* the spaces' stretch ends at the digit */
        {"qwen2", "_ 1 1 1 1 _ _ 1 A 'S A _ _ A"},
        {"qwen35", "_ 1 1 1 1 _ _ 1 A 'S A _ _ A"},
        {"llama-bpe", "_ 11 1 1 _ _ 1 A 'S A _ _ A"},
    };
    struct vocab v;
    vocab_default(&v);
    vocab_add(&v, "11", F_NORMAL);
    vocab_add(&v, "1111", F_NORMAL);
    vocab_add(&v, "SA", F_NORMAL);
    vocab_add(&v, "'S", F_NORMAL);
    vocab_add(&v, SPACE SPACE, F_NORMAL);
    vocab_merge(&v, "1 1");
    vocab_merge(&v, "11 11");
    vocab_merge(&v, "S A");
    vocab_merge(&v, "' S");
    vocab_merge(&v, SPACE " " SPACE);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct buf wanted = {0};
        for (const char *at = cases[i].wanted; *at; at++) {
            if (*at == '_')
                buf_append_str(&wanted, SPACE);
            else
                buf_append(&wanted, at, 1);
        }
        v.pre = cases[i].pre;
        struct tokenizer *t = open_good(&v);
        expect(t, " 1111  1A'SA  A", false, wanted.data);
        tokenizer_close(t);
        buf_free(&wanted);
    }
}

static void test_damaged_text(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    struct tokenizer *t = open_good(&v);
    static const struct {
        const char *bytes;
        int replaced; /* U+FFFD expected between "a" and "b" */
    } cases[] = {{"a\xff"
                  "b",
                  1},
                 {"a\xe4\xb8"
                  "b",
                  2},
                 {"a\xed\xa0\x80"
                  "b",
                  3},
                 {"a\xf0\x9f\x98"
                  "b",
                  3}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct buf clean = {0};
        buf_append_str(&clean, "a");
        for (int k = 0; k < cases[i].replaced; k++) buf_append_str(&clean, "\xef\xbf\xbd");
        buf_append_str(&clean, "b");
        struct token_list want = encode(t, clean.data, clean.len, false);
        struct token_list got = encode(t, cases[i].bytes, strlen(cases[i].bytes), false);
        assert_int_equal(got.len, want.len);
        assert_memory_equal(got.ids, want.ids, want.len * sizeof *want.ids);
        token_list_free(&want);
        token_list_free(&got);
        buf_free(&clean);
    }
    struct token_list zero = encode(t, "a\0b", 3, false);
    assert_int_equal(zero.len, 3);
    assert_int_equal(zero.ids[1], 0);
    token_list_free(&zero);
    tokenizer_close(t);
}

/* A byte without a token is left out, and what is around it meets. */
static void test_missing_byte(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.tokens['q'] = "not a byte";
    struct tokenizer *t = open_good(&v);
    expect(t, "hqe", false, "he");
    expect(t, "qq", false, "");
    tokenizer_close(t);
}

static void test_normalization(void **state)
{
    (void)state;
    struct vocab v;
    struct err e = {0};
    vocab_default(&v);
    v.pre = "qwen2";
    struct tokenizer *t = open_good(&v), *raw = NULL;
    static const struct {
        const char *text, *nfc;
    } cases[] = {
        {"e\xcc\x81", "\xc3\xa9"},
        {"ae\xcc\x81"
         "bo\xcc\x88",
         "a\xc3\xa9"
         "b\xc3\xb6"},
        {"\xcc\x81"
         "e",
         "\xcc\x81"
         "e"},
        {"q\xcc\x87\xcc\xa3z", "q\xcc\xa3\xcc\x87z"},                  /* marks in the order of their classes */
        {"a\xcc\x81\xcc\x87\xcc\xa3", "\xe1\xba\xa1\xcc\x81\xcc\x87"}, /* a dot below joins past the others */
        {"\xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab", "\xed\x95\x9c"},
        {"\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc"}, /* composition exclusion */
        {"\xe2\x84\xab", "\xc3\x85"},
        {"<think>\xcc\x81", "<think>\xcc\x81"}, /* not across a special token */
        {"plain", "plain"},
    };
    assert_int_equal(open_with(&v, &(struct tokenizer_options){.no_normalize = true}, &raw, &e), RC_OK);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct token_list got = encode(t, cases[i].text, strlen(cases[i].text), false);
        struct token_list want = encode(raw, cases[i].nfc, strlen(cases[i].nfc), false);
        assert_int_equal(got.len, want.len);
        assert_memory_equal(got.ids, want.ids, want.len * sizeof *want.ids);
        token_list_free(&got);
        token_list_free(&want);
    }
    tokenizer_close(t);
    tokenizer_close(raw);
}

/* Long runs through every pre-tokenizer: no limit is hit, nothing is lost, compiled and interpreted agree. */
static void test_long_runs(void **state)
{
    (void)state;
    enum { LEN = 60000 };
    static const char *const units[] = {"a",  " ",  "\n",           "\r\n",  " \n", "7",
                                        "\t", "'s", "\xe4\xb8\xad", "a \n ", "!",   "ab"};
    static const char *const pres[] = {"gpt-2", "smollm", "qwen2", "qwen35", "llama-bpe"};
    struct vocab v;
    struct err e = {0};
    vocab_default(&v);
    static char text[LEN];
    for (size_t p = 0; p < sizeof pres / sizeof pres[0]; p++) {
        struct tokenizer *compiled = NULL, *interpreted = NULL;
        assert_int_equal(open_with(&v, &(struct tokenizer_options){.pre = pres[p]}, &compiled, &e), RC_OK);
        assert_int_equal(open_with(&v, &(struct tokenizer_options){.pre = pres[p], .no_jit = true}, &interpreted, &e),
                         RC_OK);
        for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
            size_t unit = strlen(units[u]), len = LEN / unit * unit;
            for (size_t i = 0; i < len; i++) text[i] = units[u][i % unit];
            struct token_list a = encode(compiled, text, len, false), b = encode(interpreted, text, len, false);
            struct buf back = {0};
            for (size_t i = 0; i < a.len; i++) assert_true(tokenizer_decode(compiled, a.ids[i], false, &back));
            assert_int_equal(back.len, len);
            assert_memory_equal(back.data, text, len);
            assert_int_equal(a.len, b.len);
            assert_memory_equal(a.ids, b.ids, a.len * sizeof *a.ids);
            buf_free(&back);
            token_list_free(&a);
            token_list_free(&b);
        }
        tokenizer_close(compiled);
        tokenizer_close(interpreted);
    }
}

static void expect_decoded(const struct tokenizer *t, int32_t id, bool show_special, const char *want)
{
    struct buf out = {0};
    assert_true(buf_append_str(&out, "^"));
    assert_true(tokenizer_decode(t, id, show_special, &out));
    assert_string_equal(out.data + 1, want);
    buf_free(&out);
}

static void test_decode(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    int32_t foreign = vocab_add(&v, "\xe4\xb8\xad", F_NORMAL), unused = vocab_add(&v, "[PAD0]", F_UNUSED);
    int32_t user = vocab_add(&v, "\xc4\xa0u", F_USER), mixed = vocab_add(&v, "\xc4\xa0\xe4\xb8\xad", F_NORMAL);
    struct tokenizer *t = open_good(&v);
    expect_decoded(t, tokenizer_find(t, "hello"), false, "hello");
    expect_decoded(t, ' ', false, " ");
    expect_decoded(t, 0xe4, false, "\xe4"); /* part of a character */
    expect_decoded(t, 0xad, false, "\xad");
    expect_decoded(t, tokenizer_find(t, "<|im_end|>"), false, "");
    expect_decoded(t, tokenizer_find(t, "<|im_end|>"), true, "<|im_end|>");
    expect_decoded(t, user, false, "\xc4\xa0u");
    expect_decoded(t, foreign, false, "\xe4\xb8\xad"); /* outside the alphabet: as it is */
    expect_decoded(t, mixed, false, "\xc4\xa0\xe4\xb8\xad");
    expect_decoded(t, unused, false, "");
    expect_decoded(t, unused, true, "[PAD0]");
    expect_decoded(t, -1, true, "");
    expect_decoded(t, tokenizer_vocab(t), true, "");
    assert_int_equal(tokenizer_vocab(t), v.n_tokens);
    assert_int_equal(tokenizer_find(t, "nothing"), -1);
    assert_int_equal(tokenizer_find(t, ""), -1);
    tokenizer_close(t);
}

static void test_ends_and_bos(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    v.bos = 3;
    struct tokenizer *t = open_good(&v);
    assert_int_equal(tokenizer_bos(t), -1);
    assert_true(tokenizer_is_end(t, tokenizer_find(t, "<|im_end|>")));
    assert_true(tokenizer_is_end(t, tokenizer_find(t, "<|endoftext|>")));
    assert_false(tokenizer_is_end(t, tokenizer_find(t, "<|im_start|>")));
    assert_false(tokenizer_is_end(t, -1));
    assert_false(tokenizer_is_end(t, 5));
    tokenizer_close(t);

    v.eos = 5;
    v.add_bos = 1;
    vocab_add(&v, "<|eot_id|>", F_NORMAL); /* by name alone it ends nothing */
    t = open_good(&v);
    assert_true(tokenizer_is_end(t, 5));
    assert_false(tokenizer_is_end(t, tokenizer_find(t, "<|eot_id|>")));
    assert_int_equal(tokenizer_bos(t), 3);
    tokenizer_close(t);

    v.pre = "llama-bpe";
    v.add_bos = -1;
    t = open_good(&v);
    assert_int_equal(tokenizer_bos(t), 3);
    tokenizer_close(t);
    v.add_bos = 0;
    t = open_good(&v);
    assert_int_equal(tokenizer_bos(t), -1);
    tokenizer_close(t);
}

static uint64_t digest_of(const struct vocab *v)
{
    struct tokenizer *t = open_good(v);
    uint64_t digest = tokenizer_digest(t);
    tokenizer_close(t);
    return digest;
}

static void test_digest(void **state)
{
    (void)state;
    struct vocab v, w;
    vocab_default(&v);
    uint64_t first = digest_of(&v);
    vocab_default(&w);
    assert_true(digest_of(&w) == first);
    w.chat_template = "another";
    assert_true(digest_of(&w) == first);
    w.tokens[w.n_tokens - 1] = "<think>x";
    assert_true(digest_of(&w) != first);
    vocab_default(&w);
    w.types[w.n_tokens - 1] = F_CONTROL;
    assert_true(digest_of(&w) != first);
    vocab_default(&w);
    w.merges[4] = "a b";
    w.merges[5] = "a a";
    assert_true(digest_of(&w) != first);
    vocab_default(&w);
    w.n_merges--;
    assert_true(digest_of(&w) != first);
    vocab_default(&w);
    w.pre = "smollm";
    assert_true(digest_of(&w) != first);
    vocab_default(&w);
    w.eos = 4;
    assert_true(digest_of(&w) != first);
}

static char long_text[1026]; /* 1025 letters; filled where it is used */

static void break_it(struct vocab *v, int how)
{
    switch (how) {
    case 0: v->model = NULL; break;
    case 1: v->model = "llama"; break;
    case 2: v->pre = NULL; break;
    case 3: v->pre = "qwen35\n\x1b"; break;
    case 4: v->n_tokens = v->n_types = 0; break;
    case 5: v->n_types--; break;
    case 6: v->n_types = 0; break;
    case 7: vocab_add(v, "hello", F_NORMAL); break;
    case 8: vocab_add(v, "", F_NORMAL); break;
    case 9: vocab_add(v, long_text, F_NORMAL); break;
    case 10: vocab_add(v, "a\xff", F_NORMAL); break;
    case 11: v->types[7] = 0; break;
    case 12: v->types[7] = 7; break;
    case 13: v->n_merges = 0; break;
    case 14: vocab_merge(v, "hello"); break;
    case 15: vocab_merge(v, "h e l"); break;
    case 16: vocab_merge(v, " he"); break;
    case 17: vocab_merge(v, "he "); break;
    case 18: vocab_merge(v, "he xyz"); break;
    case 19: vocab_merge(v, "xyz he"); break;
    case 20: vocab_merge(v, "he a"); break;
    case 21: vocab_merge(v, "h e"); break;
    case 22: v->types[FIXTURE_LAST_WORD] = F_CONTROL; break;
    case 23: vocab_merge(v, ""); break;
    case 24: v->eos = (int64_t)v->n_tokens; break;
    case 25: v->bos = UINT32_MAX; break;
    default: vocab_add(v, long_text + 1025 - 257, F_CONTROL); break;
    }
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *code, *names;
    } wanted[] = {
        {"tokenizer_missing", "no tokenizer"},
        {"tokenizer_unsupported", "gpt2"},
        {"tokenizer_unsupported", "names no pre-tokenizer"},
        {"tokenizer_unsupported", "\"qwen35??\""},
        {"tokenizer_vocabulary", "tokens has 0"},
        {"tokenizer_vocabulary", "token_type has"},
        {"tokenizer_vocabulary", "token_type has 0"},
        {"tokenizer_vocabulary", "twice (entry 269)"},
        {"tokenizer_vocabulary", "empty (entry 269)"},
        {"tokenizer_vocabulary", "too long (entry 269)"},
        {"tokenizer_vocabulary", "not UTF-8 (entry 269)"},
        {"tokenizer_vocabulary", "type is unknown (entry 7)"},
        {"tokenizer_vocabulary", "type is unknown (entry 7)"},
        {"tokenizer_merges", "merges has 0"},
        {"tokenizer_merges", "two tokens"},
        {"tokenizer_merges", "two tokens"},
        {"tokenizer_merges", "two tokens"},
        {"tokenizer_merges", "two tokens"},
        {"tokenizer_merges", "not in the vocabulary (entry 8)"},
        {"tokenizer_merges", "not in the vocabulary (entry 8)"},
        {"tokenizer_merges", "not in the vocabulary (entry 8)"},
        {"tokenizer_merges", "twice (entry 8)"},
        {"tokenizer_merges", "control token (entry 7)"},
        {"tokenizer_merges", "length is impossible (entry 8)"},
        {"tokenizer_vocabulary", "eos_token_id is 269"},
        {"tokenizer_vocabulary", "bos_token_id is 4294967295"},
        {"tokenizer_vocabulary", "special token's text is too long"},
    };
    memset(long_text, 'x', sizeof long_text - 1);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        struct vocab v;
        struct err e = {0};
        struct tokenizer *t = NULL;
        vocab_default(&v);
        break_it(&v, (int)i);
        assert_int_equal(open_with(&v, NULL, &t, &e), RC_BAD_INPUT);
        assert_null(t);
        assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
        assert_string_equal(e.source, "fixture");
        if (strcmp(e.code, wanted[i].code) != 0 || !strstr(e.text, wanted[i].names))
            fail_msg("case %zu: %s: %s", i, e.code, e.text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merges),         cmocka_unit_test(test_merges_against_definition),
        cmocka_unit_test(test_special),        cmocka_unit_test(test_whole_pieces),
        cmocka_unit_test(test_pre_tokenizers), cmocka_unit_test(test_damaged_text),
        cmocka_unit_test(test_missing_byte),   cmocka_unit_test(test_normalization),
        cmocka_unit_test(test_long_runs),      cmocka_unit_test(test_decode),
        cmocka_unit_test(test_ends_and_bos),   cmocka_unit_test(test_digest),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
