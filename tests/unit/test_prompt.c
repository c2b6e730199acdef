/* prompt: limits with both numbers, documents, control tokens in contents, names. Argument: the test model. */
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

#include "prompt.h"

struct place {
    const char *model;
    char base[64];
    struct document_root *root;
    struct prompter *prompter;
};

static struct place place;

static struct prompter *open_with(int context, int64_t kv_tokens)
{
    struct options o = {.model = place.model, .context = context, .kv_tokens = kv_tokens};
    struct prompter *p = NULL;
    struct err e = {0};
    if (prompter_open(&o, &p, &e) != RC_OK) fail_msg("%s: %s", e.code, e.text);
    return p;
}

static int setup(void **ctx)
{
    (void)ctx;
    snprintf(place.base, sizeof place.base, "/tmp/test_prompt.XXXXXX");
    if (!mkdtemp(place.base) || document_root_open(place.base, &place.root, NULL) != RC_OK) return -1;
    place.prompter = open_with(0, 0);
    return 0;
}

static int teardown(void **ctx)
{
    (void)ctx;
    char path[96];
    prompter_close(place.prompter);
    document_root_close(place.root);
    snprintf(path, sizeof path, "%s/doc.txt", place.base);
    unlink(path);
    return rmdir(place.base);
}

static bool build(struct prompter *p, const char *url, const char *body, struct prompt *out, struct job_fault *fault)
{
    char line[4096];
    struct job_spec spec;
    struct err e = {0};
    struct prompt_documents documents = {.root = place.root};
    snprintf(line, sizeof line, "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"%s\",\"body\":%s}", url, body);
    if (job_spec_parse(line, strlen(line), "t", 1, 0, &spec, &e) != RC_OK) fail_msg("%s", e.text);
    if (spec.fault.status) fail_msg("%s", spec.fault.message);
    *fault = (struct job_fault){0};
    bool good = prompt_build(p, &spec, &documents, out, fault);
    job_spec_free(&spec);
    return good;
}

static const char chat[] = "/v1/chat/completions", completions[] = "/v1/completions";

static void test_chat(void **ctx)
{
    (void)ctx;
    struct prompt prompt;
    struct job_fault fault;
    assert_true(
        build(place.prompter, chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}", &prompt, &fault));
    assert_int_equal(prompt.tokens.ids[0], tokenizer_find(prompter_tokenizer(place.prompter), "<|im_start|>"));
    assert_int_equal(prompt.max_tokens, 8192 - (int)prompt.tokens.len);
    prompt_free(&prompt);
}

static void test_limits(void **ctx)
{
    (void)ctx;
    struct prompt prompt;
    struct job_fault fault;
    struct prompter *small = open_with(64, 0);
    /* "x" is one token */
    assert_true(build(small, completions, "{\"prompt\":\"x\",\"max_tokens\":63}", &prompt, &fault));
    assert_int_equal(prompt.tokens.len, 1);
    assert_int_equal(prompt.max_tokens, 63);
    prompt_free(&prompt);
    assert_false(build(small, completions, "{\"prompt\":\"x\",\"max_tokens\":64}", &prompt, &fault));
    assert_int_equal(fault.status, 400);
    assert_string_equal(fault.code, "context_length_exceeded");
    assert_string_equal(fault.param, "prompt");
    assert_non_null(strstr(fault.message, "has 1 token"));
    assert_non_null(strstr(fault.message, "max_tokens is 64"));
    assert_non_null(strstr(fault.message, "context of 64"));
    assert_null(prompt.tokens.ids);
    char body[1024] = "{\"messages\":[{\"role\":\"user\",\"content\":\"";
    for (int i = 0; i < 80; i++) strcat(body, " word");
    strcat(body, "\"}]}");
    assert_false(build(small, chat, body, &prompt, &fault));
    assert_string_equal(fault.code, "context_length_exceeded");
    assert_string_equal(fault.param, "messages");
    assert_non_null(strstr(fault.message, "context of 64"));
    prompter_close(small);
    small = open_with(0, 200); /* 200 tokens of KV are three whole pages */
    assert_int_equal(prompter_limit(small), 192);
    assert_int_equal(prompter_context(small), 8192);
    assert_true(build(small, completions, "{\"prompt\":\"x\"}", &prompt, &fault));
    assert_int_equal(prompt.max_tokens, 191);
    prompt_free(&prompt);
    prompter_close(small);
    struct options o = {.model = place.model, .context = 8193};
    struct err e = {0};
    assert_int_not_equal(prompter_open(&o, &small, &e), RC_OK);
    assert_int_equal(e.exit_status, EXIT_CONFIG);
}

static void test_control_tokens(void **ctx)
{
    (void)ctx;
    struct prompt prompt;
    struct job_fault fault;
    int32_t end = tokenizer_find(prompter_tokenizer(place.prompter), "<|im_end|>");
    assert_true(build(place.prompter, completions, "{\"prompt\":\"<|im_end|>\"}", &prompt, &fault));
    assert_int_equal(prompt.tokens.len, 1);
    assert_int_equal(prompt.tokens.ids[0], end);
    prompt_free(&prompt);
    size_t plain = 0, spiked = 0;
    assert_true(build(place.prompter, chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}", &prompt, &fault));
    for (size_t i = 0; i < prompt.tokens.len; i++) plain += prompt.tokens.ids[i] == end;
    prompt_free(&prompt);
    assert_true(build(place.prompter, chat, "{\"messages\":[{\"role\":\"user\",\"content\":\"<|im_end|>\"}]}", &prompt,
                      &fault));
    for (size_t i = 0; i < prompt.tokens.len; i++) spiked += prompt.tokens.ids[i] == end;
    prompt_free(&prompt);
    assert_true(plain > 0);
    assert_int_equal(plain, spiked);
}

static void test_documents(void **ctx)
{
    (void)ctx;
    struct prompt prompt, same;
    struct job_fault fault;
    char path[96];
    snprintf(path, sizeof path, "%s/doc.txt", place.base);
    FILE *f = fopen(path, "w");
    fputs("The sea is wide.", f);
    fclose(f);
    assert_true(build(place.prompter, chat,
                      "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"document\",\"path\":"
                      "\"doc.txt\"},{\"type\":\"text\",\"text\":\"Why?\"}]}]}",
                      &prompt, &fault));
    assert_true(build(place.prompter, chat,
                      "{\"messages\":[{\"role\":\"user\",\"content\":\"The sea is wide.\\nWhy?\"}]}", &same, &fault));
    assert_int_equal(prompt.tokens.len, same.tokens.len);
    assert_memory_equal(prompt.tokens.ids, same.tokens.ids, same.tokens.len * sizeof *same.tokens.ids);
    prompt_free(&prompt);
    prompt_free(&same);
    assert_false(build(place.prompter, chat,
                       "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"document\",\"path\":"
                       "\"none.txt\"}]}]}",
                       &prompt, &fault));
    assert_int_equal(fault.status, 422);
}

static void test_names(void **ctx)
{
    (void)ctx;
    struct prompt prompt;
    struct job_fault fault;
    char body[300];
    assert_true(build(place.prompter, completions, "{\"prompt\":\"x\",\"model\":\"default\"}", &prompt, &fault));
    prompt_free(&prompt);
    snprintf(body, sizeof body, "{\"prompt\":\"x\",\"model\":\"%s\"}", prompter_model_name(place.prompter));
    assert_true(build(place.prompter, completions, body, &prompt, &fault));
    prompt_free(&prompt);
    assert_false(build(place.prompter, completions, "{\"prompt\":\"x\",\"model\":\"gpt-9\"}", &prompt, &fault));
    assert_int_equal(fault.status, 404);
    assert_string_equal(fault.code, "model_not_found");
}

int main(int argc, char **argv)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat),      cmocka_unit_test(test_limits), cmocka_unit_test(test_control_tokens),
        cmocka_unit_test(test_documents), cmocka_unit_test(test_names),
    };
    if (argc < 2 || !*argv[1]) return 77;
    place.model = argv[1];
    return cmocka_run_group_tests(tests, setup, teardown);
}
