/* chat_template: the three built-in prompt formats, all of the ChatML family.
 *
 * A turn is `<|im_start|>ROLE\nTEXT<|im_end|>\n`, the prompt ends with `<|im_start|>assistant\n`, texts are taken as
 * they are. smollm2 and qwen2.5 put a default system turn first when the messages give none; chatml does not. A system
 * message, empty or not, replaces the default and may only come first; user and assistant turns may follow in any
 * order.
 *
 * Tokens are those of the rendered text with its markup read as control tokens: between two control tokens, role, line
 * end and message form one stretch and are split and merged as one, which matters when a message begins with a line
 * end. The stretch is encoded as user text, so that markup inside a message stays what it is: characters.
 *
 * Files are recognized by parts of their template's text, which is never run. */
#define _GNU_SOURCE
#include "chat_template.h"

#include <string.h>

struct format {
    const char *name;
    const char *default_system; /* NULL: none */
    const char *mark;           /* what the file's template holds */
};

/* In the order of detection: the last mark is part of all of them. */
static const struct format FORMATS[] = {
    [CHAT_SMOLLM2] = {"smollm2", "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
                      "You are a helpful AI assistant named SmolLM"},
    [CHAT_CHATML] = {"chatml", NULL, "<|im_start|>"},
    [CHAT_QWEN25] = {"qwen2.5", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
                     "You are Qwen, created by Alibaba Cloud"},
};
enum { N_FORMATS = sizeof FORMATS / sizeof FORMATS[0] };

static const char START[] = "<|im_start|>", END[] = "<|im_end|>";

const char *chat_format_name(enum chat_format f) { return FORMATS[f].name; }

bool chat_format_parse(const char *name, enum chat_format *out)
{
    for (int i = 0; i < N_FORMATS; i++) {
        if (strcmp(FORMATS[i].name, name) != 0) continue;
        *out = (enum chat_format)i;
        return true;
    }
    return false;
}

static bool vocabulary_has(const struct model_file *m, const char *token)
{
    size_t len = strlen(token), n = model_file_text_array(m, "tokenizer.ggml.tokens");
    struct model_text text;
    for (size_t i = 0; i < n && model_file_text_at(m, "tokenizer.ggml.tokens", i, &text); i++)
        if (text.len == len && memcmp(text.bytes, token, len) == 0) return true;
    return false;
}

enum rc chat_format_detect(const struct model_file *m, enum chat_format *out, struct err *e)
{
    struct model_text template;
    if (model_file_text(m, "tokenizer.chat_template", &template)) {
        static const enum chat_format order[] = {CHAT_SMOLLM2, CHAT_QWEN25, CHAT_CHATML};
        for (size_t i = 0; i < sizeof order / sizeof order[0]; i++) {
            const char *mark = FORMATS[order[i]].mark;
            if (!memmem(template.bytes, template.len, mark, strlen(mark))) continue;
            *out = order[i];
            return RC_OK;
        }
        enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "chat_format_unknown",
                             "the model's chat template is none of the built-in ones; --chat-format chooses one "
                             "(smollm2, chatml, qwen2.5)");
        err_place(e, model_file_path(m), 0, 0, 0);
        return rc;
    }
    if (vocabulary_has(m, START)) {
        *out = CHAT_CHATML;
        return RC_OK;
    }
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "chat_format_unknown",
                         "the model has no chat template; --chat-format chooses one (smollm2, chatml, qwen2.5)");
    err_place(e, model_file_path(m), 0, 0, 0);
    return rc;
}

static enum rc check_messages(const struct chat_message *messages, size_t n, struct err *e)
{
    if (n == 0) return err_set(e, RC_BAD_INPUT, 0, "invalid_messages", "there is no message");
    for (size_t i = 0; i < n; i++) {
        const char *role = messages[i].role;
        bool system = strcmp(role, "system") == 0;
        if (system && i > 0)
            return err_set(e, RC_BAD_INPUT, 0, "invalid_messages",
                           "message %zu: a system message can only be the first", i);
        if (!system && strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0)
            return err_set(e, RC_BAD_INPUT, 0, "invalid_messages",
                           "message %zu: its role is none of system, user, assistant", i);
    }
    return RC_OK;
}

/* Where the turns go: to text, or to tokens through a stretch. */
struct sink {
    struct buf *text; /* rendering; NULL: encoding */
    struct tokenizer *t;
    struct token_list *tokens;
    struct buf stretch; /* characters since the last control token */
    struct err *e;
};

static enum rc put(struct sink *s, const char *text, size_t len)
{
    return buf_append(s->text ? s->text : &s->stretch, text, len) ? RC_OK : err_no_memory(s->e);
}

static enum rc flush(struct sink *s)
{
    if (s->text) return RC_OK;
    enum rc rc = tokenizer_encode(s->t, s->stretch.data ? s->stretch.data : "", s->stretch.len, false, s->tokens, s->e);
    buf_clear(&s->stretch);
    return rc;
}

static enum rc put_control(struct sink *s, const char *markup)
{
    if (s->text) return put(s, markup, strlen(markup));
    enum rc rc = flush(s);
    return rc != RC_OK ? rc : tokenizer_encode(s->t, markup, strlen(markup), true, s->tokens, s->e);
}

static enum rc put_opening(struct sink *s, const char *role)
{
    enum rc rc = put_control(s, START);
    if (rc == RC_OK) rc = put(s, role, strlen(role));
    return rc == RC_OK ? put(s, "\n", 1) : rc;
}

static enum rc put_turn(struct sink *s, const char *role, const char *text, size_t len)
{
    enum rc rc = put_opening(s, role);
    if (rc == RC_OK) rc = put(s, text, len);
    if (rc == RC_OK) rc = put_control(s, END);
    return rc == RC_OK ? put(s, "\n", 1) : rc;
}

static enum rc put_all(enum chat_format f, struct sink *s, const struct chat_message *messages, size_t n)
{
    enum rc rc = RC_OK;
    const char *system = FORMATS[f].default_system;
    if (system && strcmp(messages[0].role, "system") != 0) rc = put_turn(s, "system", system, strlen(system));
    for (size_t i = 0; i < n && rc == RC_OK; i++) rc = put_turn(s, messages[i].role, messages[i].text, messages[i].len);
    if (rc == RC_OK) rc = put_opening(s, "assistant");
    return rc == RC_OK ? flush(s) : rc;
}

/* The format's markup must be control tokens, or a prompt would be nonsense to the model. */
static enum rc check_markup(enum chat_format f, struct tokenizer *t, struct err *e)
{
    const char *markup[] = {START, END};
    for (size_t i = 0; i < sizeof markup / sizeof markup[0]; i++) {
        struct token_list ids = {0};
        enum rc rc = tokenizer_encode(t, markup[i], strlen(markup[i]), true, &ids, e);
        bool one = ids.len == 1 && ids.ids[0] == tokenizer_find(t, markup[i]);
        token_list_free(&ids);
        if (rc != RC_OK) return rc;
        if (!one)
            return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "chat_format_unusable",
                           "chat format %s needs the token %s, which the model does not have", FORMATS[f].name,
                           markup[i]);
    }
    return RC_OK;
}

enum rc chat_template_encode(enum chat_format f, struct tokenizer *t, const struct chat_message *messages, size_t n,
                             struct token_list *out, struct err *e)
{
    enum rc rc = check_messages(messages, n, e);
    if (rc == RC_OK) rc = check_markup(f, t, e);
    if (rc != RC_OK) return rc;
    size_t before = out->len;
    struct sink s = {.t = t, .tokens = out, .e = e};
    rc = put_all(f, &s, messages, n);
    buf_free(&s.stretch);
    if (rc != RC_OK) out->len = before;
    return rc;
}

enum rc chat_template_render(enum chat_format f, const struct chat_message *messages, size_t n, struct buf *out,
                             struct err *e)
{
    enum rc rc = check_messages(messages, n, e);
    if (rc != RC_OK) return rc;
    struct sink s = {.text = out, .e = e};
    return put_all(f, &s, messages, n);
}
