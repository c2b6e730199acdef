/* prompt: a job's text to the token ids that ranks receive.
 *
 * The model's text side (tokenizer, chat format, context limit, names) is opened once, without weights. Building a
 * prompt reads the job's documents, renders and tokenizes, and checks prompt + max_tokens against the context:
 * nothing is ever cut. One thread uses a prompter. */
#ifndef TANDEM_PROMPT_H
#define TANDEM_PROMPT_H

#include "base.h"
#include "chat_template.h"
#include "document.h"
#include "job_spec.h"
#include "options.h"
#include "tokenizer.h"

struct prompter;

/* Opens o->model; uses o->chat_format and what decides an engine's context. Errors as of model_file_open,
 * engine_limits_plan, tokenizer_open and chat_format_choose; EXIT_CONFIG when the context has no room for an answer. */
enum rc prompter_open(const struct options *o, struct prompter **out, struct err *e);
void prompter_close(struct prompter *p);

struct tokenizer *prompter_tokenizer(struct prompter *p);
/* File name without suffix, or the folder's name: what answers name as their model. */
const char *prompter_model_name(const struct prompter *p);
int prompter_context(const struct prompter *p); /* most tokens of one job, prompt and answer */
bool prompter_synthetic(const struct prompter *p); /* the model's weights are made up */

/* Where a job's documents are, and what they were when the job was registered. */
struct prompt_documents {
    struct document_root *root;
    const void *pinned; /* n * DIGEST_BYTES, or NULL with 0 */
    size_t pinned_bytes;
};

struct prompt {
    struct token_list tokens; /* prompt_free */
    int max_tokens;           /* as asked for, or what the context leaves */
    int64_t tokenize_us;      /* reading documents included */
};

/* False: *fault is set (404 model_not_found, 422 of documents, 400 context_length_exceeded, invalid_messages,
 * unsupported_parameter where the model's format lacks what is asked for, 500) and out is empty. May set s->fault. */
bool prompt_build(struct prompter *p, struct job_spec *s, const struct prompt_documents *documents, struct prompt *out,
                  struct job_fault *fault);
void prompt_free(struct prompt *p);

#endif
