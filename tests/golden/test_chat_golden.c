/* Chat formats against the published templates: every conversation of chat_golden.json, encoded over a vocabulary that can
 * spell every byte and decoded again, must be the prompt that jinja2 rendered, and be refused where the template refuses. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>

#include "../unit/tokenizer_fixture.h"
#include "chat_template.h"

enum { MAX_MESSAGES = 16, MIN_CASES = 250, MIN_REFUSED = 20 };

static enum chat_switch switch_of(const json_t *request, const char *key)
{
    const json_t *v = json_object_get(request, key);
    return !v ? CHAT_DEFAULT : json_is_true(v) ? CHAT_ON : CHAT_OFF;
}

static enum chat_effort effort_of(const json_t *request)
{
    const char *v = json_string_value(json_object_get(request, "reasoning_effort"));
    if (!v) return CHAT_EFFORT_DEFAULT;
    return !strcmp(v, "low") ? CHAT_EFFORT_LOW : !strcmp(v, "medium") ? CHAT_EFFORT_MEDIUM : CHAT_EFFORT_XHIGH;
}

static size_t read_messages(const json_t *list, struct chat_message *out)
{
    size_t n = json_array_size(list);
    assert_in_range(n, 1, MAX_MESSAGES);
    for (size_t i = 0; i < n; i++) {
        const json_t *m = json_array_get(list, i), *text = json_object_get(m, "content");
        const json_t *reasoning = json_object_get(m, "reasoning_content");
        out[i] = (struct chat_message){json_string_value(json_object_get(m, "role")), json_string_value(text),
                                       json_string_length(text), json_string_value(reasoning), json_string_length(reasoning)};
    }
    return n;
}

/* True if the case is one that is refused. */
static bool check_case(const json_t *record, const struct model_file *m, struct tokenizer *t, size_t index)
{
    struct chat_message messages[MAX_MESSAGES];
    const json_t *request = json_object_get(record, "request"), *prompt = json_object_get(record, "prompt");
    struct chat c = {.options = {.thinking = switch_of(request, "enable_thinking"),
                                 .preserve_thinking = switch_of(request, "preserve_thinking"),
                                 .effort = effort_of(request)},
                     .messages = messages,
                     .n_messages = read_messages(json_object_get(record, "messages"), messages)};
    struct token_list ids = {0};
    struct buf text = {0};
    struct err e = {0};
    assert_int_equal(chat_format_choose(json_string_value(json_object_get(record, "format")), m, t, &c.format, &e), RC_OK);
    enum rc rc = chat_template_encode(&c, t, &ids, &e);
    for (size_t i = 0; i < ids.len; i++) assert_true(tokenizer_decode(t, ids.ids[i], true, &text));
    bool refused = json_is_null(prompt);
    if (refused && (rc != RC_BAD_INPUT || strcmp(e.code, "invalid_messages") != 0))
        fail_msg("case %zu is not refused: %s", index, text.data ? text.data : e.text);
    if (!refused && (rc != RC_OK || text.len != json_string_length(prompt) ||
                     memcmp(text.data, json_string_value(prompt), text.len) != 0))
        fail_msg("case %zu:\n%s\ninstead of\n%s", index, rc == RC_OK ? text.data : e.text, json_string_value(prompt));
    buf_free(&text);
    token_list_free(&ids);
    return refused;
}

static void test_rendered(void **state)
{
    (void)state;
    struct vocab v;
    struct buf bytes = {0};
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    json_error_t je;
    vocab_default(&v);
    vocab_add(&v, "</think>", F_USER);
    vocab_gguf(&v, &bytes);
    assert_int_equal(model_file_open_bytes(bytes.data, bytes.len, "fixture", &m, &e), RC_OK);
    assert_int_equal(tokenizer_open(m, &t, &e), RC_OK);
    json_t *cases = json_load_file(TANDEM_SOURCE_DIR "/tests/golden/chat_golden.json", 0, &je);
    if (!cases) fail_msg("chat_golden.json:%d: %s", je.line, je.text);
    size_t n_refused = 0;
    assert_true(json_array_size(cases) >= MIN_CASES);
    for (size_t i = 0; i < json_array_size(cases); i++) n_refused += check_case(json_array_get(cases, i), m, t, i);
    assert_true(n_refused >= MIN_REFUSED);
    json_decref(cases);
    tokenizer_close(t);
    model_file_close(m);
    buf_free(&bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rendered)};
    return cmocka_run_group_tests_name("chat_golden", tests, NULL, NULL);
}
