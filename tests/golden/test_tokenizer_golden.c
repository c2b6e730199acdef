/* The tokenizer against Hugging Face `tokenizers`: every text of tokenizer_smollm2.txt, over the real model's vocabulary,
 * by all five pre-tokenizers, compiled and interpreted patterns alike; and SmolLM2's chat prompts as tokens.
 *
 *     test_tokenizer_golden SmolLM2-135M-Instruct.Q4_1.gguf
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "chat_template.h"
#include "model_file.h"
#include "tokenizer.h"
#include "tokenizer_private.h"

enum { SMOLLM, GPT2, QWEN2, QWEN2_NFC, QWEN35, LLAMA_BPE, SPECIAL, N_WAYS, MAX_RECORDS = 2000, MIN_RECORDS = 500 };

struct way {
    const char *name; /* in the file */
    struct tokenizer_options options;
    bool parse_special;
};

static const struct way WAYS[N_WAYS] = {
    [SMOLLM] = {"smollm", {.pre = NULL}, false}, /* what the file itself says */
    [GPT2] = {"gpt-2", {.pre = "gpt-2"}, false},
    [QWEN2] = {"qwen2", {.pre = "qwen2", .no_normalize = true}, false},
    [QWEN2_NFC] = {"qwen2-nfc", {.pre = "qwen2"}, false},
    [QWEN35] = {"qwen35", {.pre = "qwen35", .no_normalize = true}, false},
    [LLAMA_BPE] = {"llama-bpe", {.pre = "llama-bpe"}, false},
    [SPECIAL] = {"special", {.pre = "smollm"}, true},
};

struct record {
    struct buf text;
    struct token_list ids[N_WAYS];
    bool given[N_WAYS]; /* else as smollm */
    struct buf decoded[N_WAYS];
    bool decoded_given[N_WAYS]; /* else the text */
};

struct fixture {
    struct model_file *model;
    struct record *records;
    size_t n;
};

static int way_of(const char *name, size_t len)
{
    for (int i = 0; i < N_WAYS; i++)
        if (strlen(WAYS[i].name) == len && memcmp(WAYS[i].name, name, len) == 0) return i;
    fail_msg("unknown word in the golden file: %.*s", (int)len, name);
    return -1;
}

static void read_quoted(const char *at, struct buf *out)
{
    assert_int_equal(*at, '"');
    for (at++; *at != '"'; at++) {
        char c = *at;
        assert_int_not_equal(c, '\0');
        if (c == '\\' && at[1] == 'x') {
            char digits[3] = {at[2], at[3], '\0'};
            c = (char)strtoul(digits, NULL, 16);
            at += 3;
        } else if (c == '\\') {
            c = *++at;
        }
        assert_true(buf_append(out, &c, 1));
    }
}

static void read_ids(const char *at, struct token_list *out)
{
    while (*at == ' ') {
        char *end;
        long id = strtol(at + 1, &end, 10);
        assert_true(end > at + 1);
        assert_true(token_list_push(out, (int32_t)id));
        at = end;
    }
    assert_int_equal(*at, '\0');
}

static void read_line(struct fixture *f, char *line)
{
    size_t word = strcspn(line, " ");
    if (line[0] == '#') return;
    if (strncmp(line, "text ", 5) == 0) {
        assert_in_range(f->n, 0, MAX_RECORDS - 1);
        read_quoted(line + 5, &f->records[f->n++].text);
        return;
    }
    assert_in_range(f->n, 1, MAX_RECORDS);
    struct record *r = &f->records[f->n - 1];
    if (strncmp(line, "decoded ", 8) == 0) {
        size_t name = strcspn(line + 8, " ");
        int w = way_of(line + 8, name);
        r->decoded_given[w] = true;
        read_quoted(line + 8 + name + 1, &r->decoded[w]);
        return;
    }
    int w = way_of(line, word);
    r->given[w] = true;
    read_ids(line + word, &r->ids[w]);
}

static int open_all(void **state)
{
    struct fixture *f = *state;
    f->records = calloc(MAX_RECORDS, sizeof *f->records);
    FILE *in = fopen(TANDEM_SOURCE_DIR "/tests/golden/tokenizer_smollm2.txt", "r");
    if (!f->records || !in) return -1;
    char *line = NULL;
    size_t cap = 0;
    for (ssize_t n; (n = getline(&line, &cap, in)) > 0;) {
        if (line[n - 1] == '\n') line[n - 1] = '\0';
        read_line(f, line);
    }
    free(line);
    fclose(in);
    return 0;
}

static int close_all(void **state)
{
    struct fixture *f = *state;
    for (size_t i = 0; i < f->n; i++) {
        buf_free(&f->records[i].text);
        for (int w = 0; w < N_WAYS; w++) {
            token_list_free(&f->records[i].ids[w]);
            buf_free(&f->records[i].decoded[w]);
        }
    }
    free(f->records);
    return 0;
}

static const char *text_at(const struct buf *b) { return b->data ? b->data : ""; }

static void expect_ids(const struct record *r, const struct token_list *want, const struct token_list *got,
                       const char *way)
{
    bool equal = want->len == got->len;
    for (size_t i = 0; equal && i < want->len; i++) equal = want->ids[i] == got->ids[i];
    if (equal) return;
    print_error("%s of \"%s\":\n  want", way, text_at(&r->text));
    for (size_t i = 0; i < want->len; i++) print_error(" %d", (int)want->ids[i]);
    print_error("\n  got ");
    for (size_t i = 0; i < got->len; i++) print_error(" %d", (int)got->ids[i]);
    print_error("\n");
    fail();
}

/* Without `decoded`, the tokens must give back the text's very bytes. With it, the library has shown them as UTF-8. */
static void expect_decoded(const struct record *r, int w, const struct tokenizer *t, const struct token_list *ids)
{
    struct buf bytes = {0}, shown = {0};
    for (size_t i = 0; i < ids->len; i++) assert_true(tokenizer_decode(t, ids->ids[i], true, &bytes));
    assert_true(utf8_append_complete(&shown, text_at(&bytes), bytes.len));
    const struct buf *want = r->decoded_given[w] ? &r->decoded[w] : &r->text;
    const struct buf *got = r->decoded_given[w] ? &shown : &bytes;
    assert_int_equal(got->len, want->len);
    assert_memory_equal(text_at(got), text_at(want), want->len);
    buf_free(&bytes);
    buf_free(&shown);
}

static void check_way(const struct fixture *f, int w, bool no_jit)
{
    struct err e = {0};
    struct tokenizer *t = NULL;
    struct tokenizer_options options = WAYS[w].options;
    options.no_jit = no_jit;
    assert_int_equal(tokenizer_open_with(f->model, &options, &t, &e), RC_OK);
    assert_in_range(f->n, MIN_RECORDS, MAX_RECORDS);
    for (size_t i = 0; i < f->n; i++) {
        const struct record *r = &f->records[i];
        struct token_list got = {0};
        assert_int_equal(tokenizer_encode(t, text_at(&r->text), r->text.len, WAYS[w].parse_special, &got, &e), RC_OK);
        expect_ids(r, &r->ids[r->given[w] ? w : SMOLLM], &got, WAYS[w].name);
        if (w != SPECIAL) expect_decoded(r, w, t, &got);
        token_list_free(&got);
    }
    tokenizer_close(t);
}

static void test_smollm(void **state) { check_way(*state, SMOLLM, false); }
static void test_gpt2(void **state) { check_way(*state, GPT2, false); }
static void test_qwen2(void **state) { check_way(*state, QWEN2, false); }
static void test_qwen2_nfc(void **state) { check_way(*state, QWEN2_NFC, false); }
static void test_qwen35(void **state) { check_way(*state, QWEN35, false); }
static void test_llama_bpe(void **state) { check_way(*state, LLAMA_BPE, false); }
static void test_special(void **state) { check_way(*state, SPECIAL, false); }

static void test_interpreted(void **state)
{
    for (int w = 0; w < N_WAYS; w++) check_way(*state, w, true);
}

/* Ids that others have published for this vocabulary. */
static void test_published(void **state)
{
    const struct fixture *f = *state;
    static const struct {
        const char *text;
        int n, ids[8];
    } cases[] = {
        {"Hello, we can use", 5, {19556, 28, 392, 416, 722}},
        {"Hello world! 123", 7, {19556, 905, 17, 216, 33, 34, 35}},
        {"  multiple   spaces", 4, {216, 2701, 256, 5600}},
        {"\n", 1, {198}},
    };
    struct tokenizer *t = NULL;
    struct err e = {0};
    assert_int_equal(tokenizer_open(f->model, &t, &e), RC_OK);
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        struct token_list got = {0};
        assert_int_equal(tokenizer_encode(t, cases[c].text, strlen(cases[c].text), false, &got, &e), RC_OK);
        assert_int_equal(got.len, cases[c].n);
        for (size_t i = 0; i < got.len; i++) assert_int_equal(got.ids[i], cases[c].ids[i]);
        token_list_free(&got);
    }
    assert_int_equal(tokenizer_vocab(t), 49152);
    assert_int_equal(tokenizer_find(t, "<|im_end|>"), 2);
    assert_int_equal(tokenizer_bos(t), -1);
    assert_true(tokenizer_is_end(t, 2) && tokenizer_is_end(t, 0));
    assert_false(tokenizer_is_end(t, 1) || tokenizer_is_end(t, 3) || tokenizer_is_end(t, -1));
    tokenizer_close(t);
}

/* The record of a text. */
static const struct record *find_record(const struct fixture *f, const struct buf *text)
{
    for (size_t i = 0; i < f->n; i++)
        if (f->records[i].text.len == text->len && memcmp(text_at(&f->records[i].text), text->data, text->len) == 0)
            return &f->records[i];
    return NULL;
}

/* A chat's tokens are those the library gives its rendered text, line ends at a message's border included. */
static void test_chats(void **state)
{
    const struct fixture *f = *state;
    static const char *const users[] = {
        "hi", "", " lead", "\n\nnewlines first", "ends in lines\n\n", "42", "\xe4\xbd\xa0\xe5\xa5\xbd", "'s it"};
    struct tokenizer *t = NULL;
    struct err e = {0};
    enum chat_format format;
    assert_int_equal(tokenizer_open(f->model, &t, &e), RC_OK);
    assert_int_equal(chat_format_choose(NULL, f->model, t, &format, &e), RC_OK);
    assert_int_equal(format, CHAT_SMOLLM2);
    for (size_t u = 0; u < sizeof users / sizeof users[0]; u++) {
        size_t len = strlen(users[u]);
        struct chat_message one[] = {{.role = "user", .text = users[u], .len = len}};
        struct chat_message four[] = {{.role = "system", .text = users[u], .len = len},
                                      {.role = "user", .text = "What?", .len = 5},
                                      {.role = "assistant", .text = users[u], .len = len},
                                      {.role = "user", .text = users[u], .len = len}};
        for (int many = 0; many < 2; many++) {
            struct buf text = {0};
            struct token_list got = {0};
            const struct chat c = {.format = format, .messages = many ? four : one, .n_messages = many ? 4 : 1};
            assert_int_equal(chat_template_encode(&c, t, &got, &e), RC_OK);
            for (size_t i = 0; i < got.len; i++) assert_true(tokenizer_decode(t, got.ids[i], true, &text));
            const struct record *r = find_record(f, &text);
            assert_non_null(r);
            assert_true(r->given[SPECIAL]);
            expect_ids(r, &r->ids[SPECIAL], &got, "chat");
            token_list_free(&got);
            buf_free(&text);
        }
    }
    tokenizer_close(t);
}

int main(int argc, char **argv)
{
    if (argc < 2 || !argv[1][0] || access(argv[1], R_OK) != 0) {
        fprintf(stderr, "SKIPPED: the tokenizer was NOT compared with its golden: no model file given or readable\n");
        return 77;
    }
    struct fixture f = {0};
    struct err e = {0};
    if (model_file_open(argv[1], &f.model, &e) != RC_OK) {
        char line[1200];
        fprintf(stderr, "%s\n", err_format(&e, line, sizeof line));
        return 1;
    }
    struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_smollm, &f),      cmocka_unit_test_prestate(test_gpt2, &f),
        cmocka_unit_test_prestate(test_qwen2, &f),       cmocka_unit_test_prestate(test_qwen2_nfc, &f),
        cmocka_unit_test_prestate(test_qwen35, &f),      cmocka_unit_test_prestate(test_llama_bpe, &f),
        cmocka_unit_test_prestate(test_special, &f),
        cmocka_unit_test_prestate(test_interpreted, &f), cmocka_unit_test_prestate(test_published, &f),
        cmocka_unit_test_prestate(test_chats, &f),
    };
    void *state = &f;
    int failed = -1;
    if (open_all(&state) == 0) failed = cmocka_run_group_tests_name("tokenizer_golden", tests, NULL, NULL);
    close_all(&state);
    model_file_close(f.model);
    return failed == 0 ? 0 : 1;
}
