/* chat_template: messages to prompt tokens, by built-in formats (no template language is run).
 *
 * Formats: smollm2 (ChatML with SmolLM2's default system text), chatml (no default), qwen2.5 (ChatML with Qwen's default),
 * qwen3.5 (3.5 and 3.6: thinking on unless asked otherwise, thoughts of earlier questions are left out) and qwen3.8 (thinking
 * with an effort, thoughts are kept). Roles system, user, assistant; exact rules in chat_template.c. */
#ifndef TANDEM_CHAT_TEMPLATE_H
#define TANDEM_CHAT_TEMPLATE_H

#include "base.h"
#include "model_file.h"
#include "tokenizer.h"

enum chat_format { CHAT_SMOLLM2, CHAT_CHATML, CHAT_QWEN25, CHAT_QWEN35, CHAT_QWEN38, CHAT_FORMATS };

/* What a request may tell a template; zeros are the format's own defaults. */
enum chat_switch { CHAT_DEFAULT, CHAT_OFF, CHAT_ON };
enum chat_effort { CHAT_EFFORT_DEFAULT, CHAT_EFFORT_LOW, CHAT_EFFORT_MEDIUM, CHAT_EFFORT_XHIGH };
struct chat_options {
    enum chat_switch thinking;          /* qwen3.5, qwen3.8: on by default */
    enum chat_switch preserve_thinking; /* qwen3.5: off by default; qwen3.8: on */
    enum chat_effort effort;            /* qwen3.8: xhigh by default; means nothing while thinking is off */
};

struct chat_message {
    const char *role; /* NUL-terminated */
    const char *text;
    size_t len;
    const char *reasoning; /* of an assistant: its thoughts, apart from text; NULL: not given */
    size_t reasoning_len;
};

struct chat {
    enum chat_format format;
    struct chat_options options;
    const struct chat_message *messages;
    size_t n_messages;
};

const char *chat_format_name(enum chat_format f); /* "smollm2" */
/* What a format has. One without thinking leaves options and reasoning alone. */
bool chat_format_thinks(enum chat_format f);
bool chat_format_has_effort(enum chat_format f);
/* name: what the user chose, or NULL: from the text of the model's template (characteristic parts), or its vocabulary where
 * there is no template. RC_BAD_INPUT, EXIT_CONFIG: unknown name ("unknown_chat_format") or template ("chat_format_unknown");
 * the text lists the names. */
enum rc chat_format_choose(const char *name, const struct model_file *m, const struct tokenizer *t, enum chat_format *out,
                           struct err *e);

/* Appends the prompt's tokens: all turns, then the assistant's opening. Markup goes through parse_special, contents never
 * do. RC_BAD_INPUT (code "invalid_messages", text names the index): no message, unknown role, late system message, and for
 * formats that think, no question of a user. */
enum rc chat_template_encode(const struct chat *c, struct tokenizer *t, struct token_list *out, struct err *e);

#endif
