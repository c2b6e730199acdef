/* Tokenizers from Hugging Face's JSON files: equal to the same vocabulary out of GGUF, added tokens of two files, holes,
 * beginnings and ends, every pipeline that is recognized, and every one that is refused. What real files give is in
 * tests/golden/tokenizer_json.py. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>

#include "tokenizer_fixture.h"
#include "tokenizer_private.h"

#define QWEN2_REGEX                                                                                                    \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|"    \
    "\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define QWEN35_REGEX                                                                                                   \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{L}\\\\p{M}]+|\\\\p{N}| ?" \
    "[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define LLAMA_REGEX                                                                                                    \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| ?" \
    "[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define BYTE_LEVEL(regex)                                                                                              \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":" regex "}"
#define SEQUENCE(first, second) "{\"type\":\"Sequence\",\"pretokenizers\":[" first "," second "]}"
#define SPLIT(regex)                                                                                                   \
    SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" regex "\"},\"behavior\":\"Isolated\",\"invert\":false}",   \
             BYTE_LEVEL("false"))
#define DIGITS SEQUENCE("{\"type\":\"Digits\",\"individual_digits\":true}", BYTE_LEVEL("true"))

static json_t *added_token(int64_t id, const char *content, bool special)
{
    return json_pack("{s:I,s:s,s:b,s:b,s:b,s:b,s:b}", "id", (json_int_t)id, "content", content, "single_word", 0, "lstrip",
                     0, "rstrip", 0, "normalized", 0, "special", (int)special);
}

/* The fixture's vocabulary as a tokenizer.json; merges as pairs or as "LEFT RIGHT". */
static json_t *tokenizer_json(const struct vocab *v, bool pairs)
{
    json_t *words = json_object(), *merges = json_array(), *added = json_array();
    for (size_t i = 0; i < v->n_tokens; i++) {
        if (v->types[i] == F_NORMAL)
            json_object_set_new(words, v->tokens[i], json_integer((json_int_t)i));
        else
            json_array_append_new(added, added_token((int64_t)i, v->tokens[i], v->types[i] == F_CONTROL));
    }
    for (size_t i = 0; i < v->n_merges; i++) {
        const char *space = strchr(v->merges[i], ' ');
        json_array_append_new(merges, pairs ? json_pack("[s%,s]", v->merges[i], (size_t)(space - v->merges[i]), space + 1)
                                            : json_string(v->merges[i]));
    }
    json_error_t je;
    json_t *level = json_pack("{s:s,s:b,s:b,s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
                              "use_regex", 1);
    json_t *root =
        json_pack_ex(&je, 0, "{s:s,s:n,s:n,s:o,s:n,s:o,s:o,s:o,s:{s:s,s:n,s:n,s:s,s:s,s:b,s:b,s:b,s:o,s:o}}", "version", "1.0",
                     "truncation", "padding", "added_tokens", added, "normalizer", "pre_tokenizer", json_deep_copy(level),
                     "post_processor", json_deep_copy(level), "decoder", level, "model", "type", "BPE", "dropout", "unk_token",
                     "continuing_subword_prefix", "", "end_of_word_suffix", "", "fuse_unk", 0, "byte_fallback", 0,
                     "ignore_merges", 0, "vocab", words, "merges", merges);
    if (!root) fail_msg("%s", je.text);
    return root;
}

/* Puts the value, JSON text, at a path of keys and indices with dots between; NULL takes it away. */
static void change(json_t *root, const char *path, const char *value)
{
    json_t *at = root, *parent = NULL;
    char copy[128], *key = NULL;
    snprintf(copy, sizeof copy, "%s", path);
    for (char *save = NULL, *part = strtok_r(copy, ".", &save); part; part = strtok_r(NULL, ".", &save)) {
        parent = at;
        key = part;
        at = json_is_array(at) ? json_array_get(at, (size_t)strtoul(part, NULL, 10)) : json_object_get(at, part);
    }
    json_error_t je;
    json_t *new = value ? json_loads(value, JSON_DECODE_ANY | JSON_ALLOW_NUL, &je) : NULL;
    if (value && !new) fail_msg("%s: %s", value, je.text);
    if (json_is_array(parent) && value)
        assert_int_equal(json_array_insert_new(parent, (size_t)strtoul(key, NULL, 10), new), 0);
    else if (json_is_array(parent))
        assert_int_equal(json_array_remove(parent, (size_t)strtoul(key, NULL, 10)), 0);
    else if (value)
        assert_int_equal(json_object_set_new(parent, key, new), 0);
    else
        assert_int_equal(json_object_del(parent, key), 0);
}

static struct model_text text_at(const char *text)
{
    return (struct model_text){text, text ? strlen(text) : 0};
}

/* Takes root. */
static enum rc open_json(json_t *root, const char *config, const char *generation, struct tokenizer **t, struct err *e)
{
    char *text = json_dumps(root, JSON_COMPACT);
    struct tokenizer_texts texts = {text_at(text), text_at(config), text_at(generation)};
    enum rc rc = tokenizer_open_json(&texts, &(struct tokenizer_options){0}, t, e);
    free(text); /* the tokenizer must not need it any more */
    json_decref(root);
    return rc;
}

static struct tokenizer *open_good(json_t *root, const char *config, const char *generation)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    if (open_json(root, config, generation, &t, &e) != RC_OK) fail_msg("%s: %s: %s", e.code, e.source, e.text);
    assert_non_null(t);
    return t;
}

static struct tokenizer *open_gguf(const struct vocab *v)
{
    struct buf bytes = {0};
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    vocab_gguf(v, &bytes);
    assert_int_equal(model_file_open_bytes(bytes.data, bytes.len, "fixture", &m, &e), RC_OK);
    assert_int_equal(tokenizer_open(m, &t, &e), RC_OK);
    model_file_close(m);
    buf_free(&bytes);
    return t;
}

static void expect_ids(struct tokenizer *t, const char *text, bool parse_special, size_t n, const int32_t *want)
{
    struct token_list ids = {0};
    struct err e = {0};
    assert_int_equal(tokenizer_encode(t, text, strlen(text), parse_special, &ids, &e), RC_OK);
    assert_int_equal(ids.len, n);
    assert_memory_equal(ids.ids, want, n * sizeof *want);
    token_list_free(&ids);
}

/* The digest covers texts, types, merges, pipeline and ends: equal digests, equal tokenizers. */
static void test_equal_to_gguf(void **state)
{
    (void)state;
    static const struct {
        const char *pre, *pre_json, *normalizer, *ignore_merges;
    } kinds[] = {
        {"gpt-2", BYTE_LEVEL("true"), "null", "false"},     {"smollm", DIGITS, "null", "false"},
        {"qwen2", SPLIT(QWEN2_REGEX), "{\"type\":\"NFC\"}", "false"},
        {"qwen35", SPLIT(QWEN35_REGEX), "{\"type\":\"NFC\"}", "false"},
        {"llama-bpe", SPLIT(LLAMA_REGEX), "null", "true"},
    };
    uint64_t seen[5];
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        struct vocab v;
        vocab_default(&v);
        v.pre = kinds[i].pre;
        v.eos = 257;
        struct tokenizer *want = open_gguf(&v);
        for (int pairs = 0; pairs < 2; pairs++) {
            json_t *root = tokenizer_json(&v, pairs);
            change(root, "pre_tokenizer", kinds[i].pre_json);
            change(root, "normalizer", kinds[i].normalizer);
            change(root, "model.ignore_merges", kinds[i].ignore_merges);
            struct tokenizer *got = open_good(root, NULL, "{\"eos_token_id\":257}");
            assert_true(tokenizer_digest(got) == tokenizer_digest(want));
            assert_int_equal(tokenizer_vocab(got), tokenizer_vocab(want));
            tokenizer_close(got);
        }
        seen[i] = tokenizer_digest(want);
        for (size_t j = 0; j < i; j++) assert_true(seen[j] != seen[i]);
        tokenizer_close(want);
    }
}

/* What GGUF leaves to the pre-tokenizer's name is part of the digest where a file can say otherwise. */
static void test_digest(void **state)
{
    (void)state;
    static const char *const changes[][2] = {
        {"truncation", "null"}, {"model.ignore_merges", "true"}, {"normalizer", "{\"type\":\"NFC\"}"}, {"pre_tokenizer", DIGITS}};
    static const char *const ends[] = {"{\"eos_token_id\":5}", "{\"eos_token_id\":6}"};
    enum { N_CHANGES = sizeof changes / sizeof changes[0], N = N_CHANGES + sizeof ends / sizeof ends[0] };
    uint64_t seen[N];
    struct vocab v;
    vocab_default(&v);
    for (size_t i = 0; i < N; i++) {
        json_t *root = tokenizer_json(&v, true);
        if (i < N_CHANGES) change(root, changes[i][0], changes[i][1]);
        struct tokenizer *t = open_good(root, NULL, i < N_CHANGES ? NULL : ends[i - N_CHANGES]);
        seen[i] = tokenizer_digest(t);
        tokenizer_close(t);
        for (size_t j = 0; j < i; j++) assert_true(seen[j] != seen[i]);
    }
}

/* Marks are part of a word for qwen35 alone. */
static void test_marks(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    int32_t mark = vocab_add(&v, "\xc3\x8c\xc2\xa3", F_NORMAL), joined = vocab_add(&v, "q\xc3\x8c\xc2\xa3", F_NORMAL);
    vocab_merge(&v, "\xc3\x8c \xc2\xa3"); /* U+0323's two bytes in the byte alphabet */
    vocab_merge(&v, "q \xc3\x8c\xc2\xa3");
    json_t *root = tokenizer_json(&v, true);
    change(root, "pre_tokenizer", SPLIT(QWEN2_REGEX));
    struct tokenizer *t = open_good(root, NULL, NULL);
    expect_ids(t, "q\xcc\xa3", false, 2, (int32_t[]){'q', mark});
    tokenizer_close(t);
    root = tokenizer_json(&v, true);
    change(root, "pre_tokenizer", SPLIT(QWEN35_REGEX));
    t = open_good(root, NULL, NULL);
    expect_ids(t, "q\xcc\xa3", false, 1, &joined);
    tokenizer_close(t);
}

/* tokenizer_config.json may know tokens that tokenizer.json does not; ids in between are holes. */
static void test_added_tokens(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    struct tokenizer *t = open_good(tokenizer_json(&v, true),
                                    "{\"added_tokens_decoder\":{\"265\":{\"content\":\"<|im_end|>\",\"special\":true},"
                                    "\"300\":{\"content\":\"<|audio|>\",\"special\":true},"
                                    "\"302\":{\"content\":\"<tool>\",\"special\":false}}}",
                                    NULL);
    assert_int_equal(tokenizer_vocab(t), 303);
    const int32_t *holes;
    struct err e = {0};
    assert_int_equal(tokenizer_holes(t, &holes), 303 - v.n_tokens - 2);
    assert_int_equal(holes[0], v.n_tokens);
    for (size_t i = 1; i < tokenizer_holes(t, &holes); i++) assert_true(holes[i] > holes[i - 1] && holes[i] != 300);
    assert_int_equal(holes[tokenizer_holes(t, &holes) - 1], 301);
    expect_ids(t, "a<|audio|><tool>", true, 3, (int32_t[]){'a', 300, 302});
    struct token_list ids = {0};
    assert_int_equal(tokenizer_encode(t, "<|audio|><tool>", 15, false, &ids, &e), RC_OK);
    assert_int_equal(ids.len, 10); /* nine characters, and the token that is no control token */
    assert_int_equal(ids.ids[9], 302);
    token_list_free(&ids);
    struct buf shown = {0};
    assert_true(tokenizer_decode(t, 301, true, &shown)); /* a hole is nothing */
    assert_int_equal(shown.len, 0);
    assert_true(tokenizer_decode(t, 300, true, &shown));
    assert_string_equal(shown.data, "<|audio|>");
    buf_free(&shown);
    tokenizer_close(t);
}

static void test_no_holes(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    struct tokenizer *t = open_good(tokenizer_json(&v, false), NULL, NULL);
    const int32_t *holes;
    assert_int_equal(tokenizer_holes(t, &holes), 0);
    assert_int_equal(tokenizer_vocab(t), v.n_tokens);
    tokenizer_close(t);
    /* GGUF pads a vocabulary with unused tokens: behind the last real one they do not count, before it they are holes. */
    vocab_add(&v, "[PAD269]", F_UNUSED);
    vocab_add(&v, "zz", F_NORMAL);
    vocab_add(&v, "[PAD271]", F_UNUSED);
    t = open_gguf(&v);
    assert_int_equal(tokenizer_vocab(t), 271);
    assert_int_equal(tokenizer_holes(t, &holes), 1);
    assert_int_equal(holes[0], 269);
    tokenizer_close(t);
}

static void expect_ends(const char *config, const char *generation, size_t n, const int32_t *want)
{
    struct vocab v;
    vocab_default(&v);
    struct tokenizer *t = open_good(tokenizer_json(&v, true), config, generation);
    for (int32_t id = 0; id < tokenizer_vocab(t); id++) {
        bool end = id == 265 || id == 266; /* <|im_end|>, <|endoftext|>: always */
        for (size_t i = 0; i < n; i++) end = end || want[i] == id;
        if (tokenizer_is_end(t, id) != end) fail_msg("%s %s: %d", config ? config : "", generation ? generation : "", id);
    }
    tokenizer_close(t);
}

static void test_ends(void **state)
{
    (void)state;
    expect_ends(NULL, NULL, 0, NULL);
    expect_ends("{}", "{}", 0, NULL);
    expect_ends(NULL, "{\"eos_token_id\":5}", 1, (int32_t[]){5});
    expect_ends(NULL, "{\"eos_token_id\":[5,7,5]}", 2, (int32_t[]){5, 7});
    expect_ends(NULL, "{\"eos_token_id\":null}", 0, NULL);
    expect_ends("{\"eos_token\":\"hello\"}", "{\"eos_token_id\":[9]}", 2, (int32_t[]){9, 259});
    expect_ends("{\"eos_token\":{\"content\":\"hello\",\"special\":true}}", NULL, 1, (int32_t[]){259});
    expect_ends("{\"eos_token\":null}", NULL, 0, NULL);

    struct vocab v;
    vocab_default(&v);
    static const char *const configs[] = {NULL, "{\"bos_token\":\"hello\"}", "{\"bos_token\":\"hello\",\"add_bos_token\":false}",
                                          "{\"bos_token\":null,\"add_bos_token\":true}"};
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        struct tokenizer *t = open_good(tokenizer_json(&v, true), configs[i], NULL);
        assert_int_equal(tokenizer_bos(t), -1);
        tokenizer_close(t);
    }
    struct tokenizer *t = open_good(tokenizer_json(&v, true), "{\"bos_token\":\"hello\",\"add_bos_token\":true}", NULL);
    assert_int_equal(tokenizer_bos(t), 259);
    tokenizer_close(t);
}

/* Changes that mean the same pipeline. */
static void test_accepted(void **state)
{
    (void)state;
    static const struct {
        const char *path, *value;
    } cases[] = {
        {"truncation", "{\"max_length\":8}"}, {"padding", "{\"strategy\":\"BatchLongest\"}"}, {"post_processor", "null"},
        {"post_processor", NULL},             {"pre_tokenizer", "{\"type\":\"ByteLevel\"}"},   {"model.dropout", "0.0"},
        {"model.fuse_unk", "true"},           {"model.ignore_merges", NULL},             {"model.end_of_word_suffix", "null"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct vocab v;
        vocab_default(&v);
        json_t *root = tokenizer_json(&v, true);
        change(root, cases[i].path, cases[i].value);
        tokenizer_close(open_good(root, NULL, NULL));
    }
    /* "normalized" means nothing without a normalizer, as long as all tokens have it */
    struct vocab v;
    vocab_default(&v);
    json_t *root = tokenizer_json(&v, true);
    for (size_t i = 0; i < json_array_size(json_object_get(root, "added_tokens")); i++)
        json_object_set_new(json_array_get(json_object_get(root, "added_tokens"), i), "normalized", json_true());
    tokenizer_close(open_good(root, NULL, NULL));
}

struct refusal {
    const char *path, *value, *code, *names;
};

static const struct refusal TOKENIZER_REFUSALS[] = {
    {"normalizer", "{\"type\":\"NFKC\"}", "tokenizer_unsupported", "normalizer"},
    {"normalizer", "{\"type\":\"NFC\",\"x\":1}", "tokenizer_unsupported", "normalizer"},
    {"normalizer", "[]", "tokenizer_unsupported", "normalizer"},
    {"pre_tokenizer", "null", "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", NULL, "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer.add_prefix_space", "true", "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer.use_regex", "false", "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer.other", "false", "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", SPLIT("\\\\p{L}+"), "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", SPLIT(QWEN2_REGEX " "), "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" QWEN2_REGEX
                               "\"},\"behavior\":\"Isolated\",\"invert\":true}", BYTE_LEVEL("false")),
     "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" QWEN2_REGEX
                               "\"},\"behavior\":\"Removed\",\"invert\":false}", BYTE_LEVEL("false")),
     "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", SEQUENCE("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" QWEN2_REGEX
                               "\"},\"behavior\":\"Isolated\",\"invert\":false}", BYTE_LEVEL("true")),
     "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", SEQUENCE("{\"type\":\"Digits\",\"individual_digits\":false}", BYTE_LEVEL("true")),
     "tokenizer_unsupported", "pre_tokenizer"},
    {"pre_tokenizer", SEQUENCE(BYTE_LEVEL("true"), DIGITS), "tokenizer_unsupported", "pre_tokenizer"},
    {"decoder", "null", "tokenizer_unsupported", "decoder"},
    {"decoder.type", "\"Metaspace\"", "tokenizer_unsupported", "decoder"},
    {"post_processor.type", "\"TemplateProcessing\"", "tokenizer_unsupported", "post_processor"},
    {"other", "1", "tokenizer_unsupported", "\"other\""},
    {"model.type", "\"Unigram\"", "tokenizer_unsupported", "BPE"},
    {"model", "null", "tokenizer_unsupported", "BPE"},
    {"model.dropout", "0.1", "tokenizer_unsupported", "dropout"},
    {"model.unk_token", "\"<unk>\"", "tokenizer_unsupported", "unk_token"},
    {"model.continuing_subword_prefix", "\"##\"", "tokenizer_unsupported", "beginnings"},
    {"model.end_of_word_suffix", "\"</w>\"", "tokenizer_unsupported", "ends of words"},
    {"model.byte_fallback", "true", "tokenizer_unsupported", "byte_fallback"},
    {"model.ignore_merges", "1", "tokenizer_unsupported", "ignore_merges"},
    {"model.caf\xc3\xa9", "1", "tokenizer_unsupported", "\"caf\?\?\""},
    {"model.vocab", "[]", "tokenizer_vocabulary", "no object"},
    {"model.vocab", "{}", "tokenizer_merges", "not in the vocabulary"},
    {"model.vocab.hello", "-1", "tokenizer_vocabulary", "\"hello\" is not 0 to"},
    {"model.vocab.hello", "1048576", "tokenizer_vocabulary", "\"hello\" is not 0 to"},
    {"model.vocab.hello", "2.0", "tokenizer_vocabulary", "\"hello\" is not 0 to"},
    {"model.vocab.hello", "104", "tokenizer_vocabulary", "two tokens have the id 104"},
    {"model.vocab.hello", "264", "tokenizer_vocabulary", "added token 264"},
    {"model.vocab.<|im_end|>", "300", "tokenizer_vocabulary", "twice (entry 300)"},
    {"model.merges", "[]", "tokenizer_merges", "0 merges"},
    {"model.merges", "5", "tokenizer_merges", "0 merges"},
    {"model.merges.0", "\"h  e\"", "tokenizer_merges", "merge 0 "},
    {"model.merges.2", "[\"h\"]", "tokenizer_merges", "merge 2 "},
    {"model.merges.2", "[\"h\",\"e\",\"l\"]", "tokenizer_merges", "merge 2 "},
    {"model.merges.2", "[\"h\",1]", "tokenizer_merges", "merge 2 "},
    {"model.merges.2", "[\"h\",\"\"]", "tokenizer_merges", "not in the vocabulary (entry 2)"},
    {"model.merges.2", "[\"h\",\"o\"]", "tokenizer_merges", "not in the vocabulary (entry 2)"},
    {"model.merges.2", "[\"h\",\"e\"]", "tokenizer_merges", "twice (entry 2)"},
    {"added_tokens", "{}", "tokenizer_vocabulary", "no array"},
    {"added_tokens.0", "5", "tokenizer_vocabulary", "added token 0 has no id"},
    {"added_tokens.0.id", "-5", "tokenizer_vocabulary", "added token 0 has no id"},
    {"added_tokens.0.id", "265", "tokenizer_vocabulary", "added token 265"},
    {"added_tokens.0.content", "\"\"", "tokenizer_vocabulary", "no content"},
    {"added_tokens.0.content", "7", "tokenizer_vocabulary", "no content"},
    {"added_tokens.0.lstrip", "true", "tokenizer_unsupported", "\"<|im_start|>\" has \"lstrip\""},
    {"added_tokens.1.rstrip", "true", "tokenizer_unsupported", "\"<|im_end|>\" has \"rstrip\""},
    {"added_tokens.2.single_word", "true", "tokenizer_unsupported", "\"single_word\""},
    {"added_tokens.2.normalized", "true", "tokenizer_unsupported", "\"normalized\""},
};

static void expect_refused(json_t *root, const char *config, const char *generation, const struct refusal *r)
{
    struct tokenizer *t = NULL;
    struct err e = {0};
    assert_int_equal(open_json(root, config, generation, &t, &e), RC_BAD_INPUT);
    assert_null(t);
    assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
    if (strcmp(e.code, r->code) != 0 || !strstr(e.text, r->names))
        fail_msg("%s %s: %s: %s", r->path, r->value ? r->value : "", e.code, e.text);
}

static void test_refused(void **state)
{
    (void)state;
    struct vocab v;
    vocab_default(&v);
    for (size_t i = 0; i < sizeof TOKENIZER_REFUSALS / sizeof TOKENIZER_REFUSALS[0]; i++) {
        const struct refusal *r = &TOKENIZER_REFUSALS[i];
        json_t *root = tokenizer_json(&v, true);
        if (!strcmp(r->path, "model.vocab") && r->value[0] == '{') change(root, "added_tokens.0.id", "0");
        change(root, r->path, r->value);
        expect_refused(root, NULL, NULL, r);
    }
    /* a merge too long for any token must not be put together */
    for (size_t i = 0; i < 2; i++) {
        const struct refusal too_long = {"a long merge", NULL, "tokenizer_merges", "length is impossible (entry 0)"};
        struct buf merge = {0};
        json_t *root = tokenizer_json(&v, true);
        buf_append_str(&merge, i ? "[\"" : "[\"h\",\"");
        for (size_t n = 0; n < 5000; n++) buf_append_str(&merge, "x");
        buf_append_str(&merge, i ? "\",\"h\"]" : "\"]");
        change(root, "model.merges.0", merge.data);
        expect_refused(root, NULL, NULL, &too_long);
        buf_free(&merge);
    }
    json_t *root = tokenizer_json(&v, true);
    const struct refusal normalized = {"normalized and NFC", NULL, "tokenizer_unsupported", "beside a normalizer"};
    change(root, "normalizer", "{\"type\":\"NFC\"}");
    change(root, "added_tokens.0.normalized", "true");
    expect_refused(root, NULL, NULL, &normalized);
}

static void test_refused_configs(void **state)
{
    (void)state;
    static const struct refusal configs[] = {
        {"{\"added_tokens_decoder\":[1]}", NULL, "tokenizer_vocabulary", "no object"},
        {"{\"added_tokens_decoder\":{\"x\":{}}}", NULL, "tokenizer_vocabulary", "\"x\""},
        {"{\"added_tokens_decoder\":{\"-1\":{}}}", NULL, "tokenizer_vocabulary", "\"-1\""},
        {"{\"added_tokens_decoder\":{\"01\":{}}}", NULL, "tokenizer_vocabulary", "\"01\""},
        {"{\"added_tokens_decoder\":{\"1048576\":{}}}", NULL, "tokenizer_vocabulary", "\"1048576\""},
        {"{\"added_tokens_decoder\":{\"300\":{}}}", NULL, "tokenizer_vocabulary", "300 has no content"},
        {"{\"added_tokens_decoder\":{\"300\":{\"content\":\"hello\"}}}", NULL, "tokenizer_vocabulary", "twice (entry 300)"},
        {"{\"added_tokens_decoder\":{\"265\":{\"content\":\"<|x|>\",\"special\":true}}}", NULL, "tokenizer_vocabulary",
         "tokenizer_config.json: the added token 265, \"<|x|>\""},
        {"{\"added_tokens_decoder\":{\"265\":{\"content\":\"<|im_end|>\",\"special\":false}}}", NULL, "tokenizer_vocabulary",
         "265"},
        {"{\"added_tokens_decoder\":{\"300\":{\"content\":\"<|x|>\",\"lstrip\":true}}}", NULL, "tokenizer_unsupported",
         "lstrip"},
        {"{\"add_prefix_space\":true}", NULL, "tokenizer_unsupported", "add_prefix_space"},
        {"{\"split_special_tokens\":true}", NULL, "tokenizer_unsupported", "split_special_tokens"},
        {"{\"eos_token\":\"nothing\"}", NULL, "tokenizer_vocabulary", "its eos_token"},
        {"{\"eos_token\":5}", NULL, "tokenizer_vocabulary", "its eos_token"},
        {"{\"bos_token\":\"x y\",\"add_bos_token\":true}", NULL, "tokenizer_vocabulary", "its bos_token"},
        {"{", NULL, "json_invalid", ""},
        {"[]", NULL, "json_invalid", ""},
        {NULL, "{\"eos_token_id\":269}", "tokenizer_vocabulary", "269"},
        {NULL, "{\"eos_token_id\":-1}", "tokenizer_vocabulary", "-1"},
        {"{\"added_tokens_decoder\":{\"300\":{\"content\":\"<|x|>\"}}}", "{\"eos_token_id\":299}", "tokenizer_vocabulary",
         "eos_token_id 299"},
        {NULL, "{\"eos_token_id\":\"5\"}", "tokenizer_vocabulary", "-1"},
        {NULL, "{\"eos_token_id\":[1,[2]]}", "tokenizer_vocabulary", "-1"},
        {NULL, "{\"eos_token_id\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32]}",
         "tokenizer_unsupported", "more than 32"},
        {NULL, "{\"eos_token_id\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30]}",
         "tokenizer_unsupported", "more than 32"},
        {NULL, "nul", "json_invalid", ""},
    };
    struct vocab v;
    vocab_default(&v);
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++)
        expect_refused(tokenizer_json(&v, true), configs[i].path, configs[i].value, &configs[i]);

    struct tokenizer_texts none = {.tokenizer = {0}};
    struct tokenizer *t = NULL;
    struct err e = {0};
    assert_int_equal(tokenizer_open_json(&none, &(struct tokenizer_options){0}, &t, &e), RC_BAD_INPUT);
    assert_string_equal(e.code, "tokenizer_missing");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_to_gguf), cmocka_unit_test(test_digest),  cmocka_unit_test(test_marks),
        cmocka_unit_test(test_added_tokens),
        cmocka_unit_test(test_no_holes),      cmocka_unit_test(test_ends),    cmocka_unit_test(test_accepted),
        cmocka_unit_test(test_refused),       cmocka_unit_test(test_refused_configs),
    };
    return cmocka_run_group_tests_name("tokenizer_json", tests, NULL, NULL);
}
