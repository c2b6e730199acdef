/* chat_template: messages to prompt tokens, by built-in formats (no template language is run).
 *
 * Formats: smollm2 (ChatML with SmolLM2's default system text), chatml (no default), qwen2.5 (ChatML with Qwen's default).
 * Roles system, user, assistant; exact rules in chat_template.c and model.md G. */
#ifndef TANDEM_CHAT_TEMPLATE_H
#define TANDEM_CHAT_TEMPLATE_H

#include "base.h"
#include "model_file.h"
#include "tokenizer.h"

enum chat_format { CHAT_SMOLLM2, CHAT_CHATML, CHAT_QWEN25 };

struct chat_message {
    const char *role; /* NUL-terminated */
    const char *text;
    size_t len;
};

const char *chat_format_name(enum chat_format f);          /* "smollm2", "chatml", "qwen2.5" */
bool chat_format_parse(const char *name, enum chat_format *out);
/* From the file's tokenizer.chat_template text (characteristic parts) and vocabulary. RC_BAD_INPUT, EXIT_CONFIG: unknown
 * template; the text says that --chat-format chooses one. */
enum rc chat_format_detect(const struct model_file *m, enum chat_format *out, struct err *e);

/* Appends the prompt's tokens: all turns, then the assistant's opening. Markup goes through parse_special, contents never
 * do. RC_BAD_INPUT (code "invalid_messages", text names the index): no message, unknown role, late system message. */
enum rc chat_template_encode(enum chat_format f, struct tokenizer *t, const struct chat_message *messages, size_t n,
                             struct token_list *out, struct err *e);
/* The same as text, for `tandem tokenize --show` and tests. */
enum rc chat_template_render(enum chat_format f, const struct chat_message *messages, size_t n, struct buf *out,
                             struct err *e);

#endif
