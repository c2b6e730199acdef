/* prompt: limits with both numbers, documents, control tokens in contents, names, what a job may ask of a chat format.
 * Over a tiny model of plain ChatML, and over hybrid-small, whose vocabulary has the tokens of thinking. */
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
#include "tiny_gguf.h"

static const char hybrid[] = TANDEM_SOURCE_DIR "/jobs/models/hybrid-small";

struct place {
    char base[64], model[96];
    struct document_root *root;
    struct prompter *prompter;
};

static struct place place;

static struct options options_of(const char *model, const char *format)
{
    return (struct options){.model = model, .chat_format = format, .ranks = 2, .active = 4};
}

static struct prompter *open_options(const struct options *o)
{
    struct prompter *p = NULL;
    struct err e = {0};
    if (prompter_open(o, &p, &e) != RC_OK) fail_msg("%s: %s", e.code, e.text);
    return p;
}

static struct prompter *open_with(int context, int64_t kv_tokens)
{
    struct options o = options_of(place.model, NULL);
    o.context = context;
    o.kv_tokens = kv_tokens;
    return open_options(&o);
}

static int setup(void **ctx)
{
    (void)ctx;
    snprintf(place.base, sizeof place.base, "/tmp/test_prompt.XXXXXX");
    if (!mkdtemp(place.base) || document_root_open(place.base, &place.root, NULL) != RC_OK) return -1;
    struct tiny_gguf tiny = tiny_gguf_default();
    snprintf(place.model, sizeof place.model, "%s/tiny.Q4.gguf", place.base);
    if (!tiny_gguf_write(&tiny, place.model)) return -1;
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
    unlink(place.model);
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
    assert_int_equal(prompt.max_tokens, 1024 - (int)prompt.tokens.len);
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
    assert_true(build(small, completions, "{\"prompt\":\"x\"}", &prompt, &fault));
    assert_int_equal(prompt.max_tokens, 191);
    prompt_free(&prompt);
    prompter_close(small);
    static const struct {
        int context;
        int64_t kv_tokens;
        int prefill_rows;
        const char *code, *text;
    } wrong[] = {
        {1025, 0, 0, "context_too_long", "1025 tokens is more than the model's 1024"},
        {1, 0, 0, "no_room", "a context of 1 tokens"},
        {0, 63, 0, "kv_too_small", "63 KV tokens"},
        {0, 0, 100, "bad_option", "prefill rows"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        struct options o = options_of(place.model, NULL);
        struct err e = {0};
        o.context = wrong[i].context;
        o.kv_tokens = wrong[i].kv_tokens;
        o.prefill_rows = wrong[i].prefill_rows;
        assert_int_not_equal(prompter_open(&o, &small, &e), RC_OK);
        assert_null(small);
        assert_int_equal(e.exit_status, EXIT_CONFIG);
        assert_string_equal(e.code, wrong[i].code);
        assert_non_null(strstr(e.text, wrong[i].text));
    }
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

static void test_folder_names(void **ctx)
{
    (void)ctx;
    static const char *const paths[] = {"", "/", "/config.json", "/model.safetensors"};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
        char path[600];
        snprintf(path, sizeof path, "%s%s", hybrid, paths[i]);
        struct options o = options_of(path, NULL);
        struct prompter *p = open_options(&o);
        assert_string_equal(prompter_model_name(p), "hybrid-small");
        prompter_close(p);
    }
    assert_string_equal(prompter_model_name(place.prompter), "tiny.Q4"); /* only the last suffix is one */
}

/* The prompt of a body as text, control tokens shown. Freed with buf_free. */
static struct buf prompt_text(const char *format, const char *body)
{
    struct options o = options_of(hybrid, format);
    struct prompter *p = open_options(&o);
    struct prompt prompt;
    struct job_fault fault;
    struct buf text = {0};
    if (!build(p, chat, body, &prompt, &fault)) fail_msg("%s: %s", body, fault.message);
    for (size_t i = 0; i < prompt.tokens.len; i++)
        assert_true(tokenizer_decode(prompter_tokenizer(p), prompt.tokens.ids[i], true, &text));
    prompt_free(&prompt);
    prompter_close(p);
    return text;
}

#define ASK "\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]"
#define HISTORY(fields)                                                                                                \
    "\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"" fields         \
    "},{\"role\":\"user\",\"content\":\"Hi\"}]"
#define KWARGS(fields) "\"chat_template_kwargs\":{" fields "}"

/* What a body says reaches the template. */
static void test_thinking(void **ctx)
{
    (void)ctx;
    static const struct {
        const char *format, *body, *end, *part, *missing; /* NULL: whatever */
    } cases[] = {
        {"chatml", "{" ASK "}", "assistant\n", NULL, "<think>"},
        {"chatml", "{" ASK "," KWARGS("\"enable_thinking\":false,\"preserve_thinking\":false") "}", "assistant\n", NULL,
         "<think>"},
        {"chatml", "{" ASK ",\"reasoning_effort\":\"none\"}", "assistant\n", NULL, "<think>"},
        {"chatml", "{" HISTORY(",\"reasoning_content\":\"\"") "}", "assistant\n", NULL, "<think>"},
        {"qwen3.5", "{" ASK "}", "<think>\n", NULL, "</think>"},
        {"qwen3.5", "{" ASK ",\"reasoning_effort\":\"none\"}", "<think>\n\n</think>\n\n", NULL, NULL},
        {"qwen3.5", "{" ASK "," KWARGS("\"enable_thinking\":false") "}", "<think>\n\n</think>\n\n", NULL, NULL},
        {"qwen3.5", "{" HISTORY(",\"reasoning\":\"since\"") "}", "<think>\n", NULL, "since"},
        {"qwen3.5", "{" HISTORY(",\"reasoning\":\"since\"") "," KWARGS("\"preserve_thinking\":true") "}", "<think>\n",
         "<think>\nsince\n</think>\n\nb", NULL},
        {"qwen3.8", "{" HISTORY(",\"reasoning_content\":\"since\"") "}", "<think>\n", "<think>\nsince\n</think>\n\nb", NULL},
        {"qwen3.8", "{" HISTORY(",\"reasoning_content\":\"since\"") "," KWARGS("\"preserve_thinking\":false") "}", NULL,
         "assistant\nb", "since"},
        {"qwen3.8", "{" ASK "}", "<think>\n", "effort is set to xhigh", NULL},
        {"qwen3.8", "{" ASK ",\"reasoning_effort\":\"low\"}", "<think>\n", "effort is set to low", NULL},
        {"qwen3.8", "{" ASK "," KWARGS("\"reasoning_effort\":\"medium\"") "}", "<think>\n", NULL, "effort"},
        {"qwen3.8", "{" ASK ",\"reasoning_effort\":\"low\"," KWARGS("\"enable_thinking\":false") "}",
         "<think>\n\n</think>\n\n", NULL, "effort"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct buf text = prompt_text(cases[i].format, cases[i].body);
        size_t end = cases[i].end ? strlen(cases[i].end) : 0;
        bool good = text.len >= end && (!end || !strcmp(text.data + text.len - end, cases[i].end));
        good = good && (!cases[i].part || strstr(text.data, cases[i].part));
        good = good && (!cases[i].missing || !strstr(text.data, cases[i].missing));
        if (!good) fail_msg("%s %s gives %s", cases[i].format, cases[i].body, text.data);
        buf_free(&text);
    }
}

/* What the model's format does not have is refused by name, never left out. */
static void test_thinking_refused(void **ctx)
{
    (void)ctx;
    static const struct {
        const char *format, *body, *param;
    } cases[] = {
        {"chatml", "{" ASK "," KWARGS("\"enable_thinking\":true") "}", "chat_template_kwargs.enable_thinking"},
        {"chatml", "{" ASK "," KWARGS("\"preserve_thinking\":true") "}", "chat_template_kwargs.preserve_thinking"},
        {"chatml", "{" ASK "," KWARGS("\"reasoning_effort\":\"low\"") "}", "chat_template_kwargs.reasoning_effort"},
        {"chatml", "{" ASK ",\"reasoning_effort\":\"medium\"}", "reasoning_effort"},
        {"chatml", "{" HISTORY(",\"reasoning_content\":\"x\"") "}", "messages[1].reasoning_content"},
        {"qwen3.5", "{" ASK ",\"reasoning_effort\":\"xhigh\"}", "reasoning_effort"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct options o = options_of(hybrid, cases[i].format);
        struct prompter *p = open_options(&o);
        struct prompt prompt;
        struct job_fault fault;
        assert_false(build(p, chat, cases[i].body, &prompt, &fault));
        assert_int_equal(fault.status, 400);
        assert_string_equal(fault.code, "unsupported_parameter");
        assert_string_equal(fault.param, cases[i].param);
        assert_non_null(strstr(fault.message, cases[i].format));
        prompter_close(p);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chat),          cmocka_unit_test(test_limits),   cmocka_unit_test(test_control_tokens),
        cmocka_unit_test(test_documents),     cmocka_unit_test(test_names),    cmocka_unit_test(test_folder_names),
        cmocka_unit_test(test_thinking),      cmocka_unit_test(test_thinking_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
