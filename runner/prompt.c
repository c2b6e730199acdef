/* prompt: documents, template, tokens, limit, in that order.
 *
 * The model file is mapped only while a prompter opens: tokenizer, format and names are copied out. A chat prompt
 * goes through the built-in template, where contents never become control tokens. A completion's prompt is the raw
 * prompt its author wrote, control tokens included, unless a document is part of it: a document's text is never
 * trusted with them.
 *
 * The limit is the context, or the KV capacity rounded down to whole pages when that is smaller: a job beyond it
 * could never run, however long it waited. */
#define _GNU_SOURCE
#include "prompt.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_file.h"

enum { PAGE_TOKENS = 64, MAX_NAMES = 4 };

struct prompter {
    struct tokenizer *tokenizer;
    enum chat_format format;
    int context, limit;
    char *names[MAX_NAMES]; /* what a body may call the model; [0] is shown */
    size_t n_names;
};

static enum rc name_add(struct prompter *p, const char *bytes, size_t len, struct err *e)
{
    if (!len) return RC_OK;
    char *copy = strndup(bytes, len);
    if (!copy) return err_no_memory(e);
    p->names[p->n_names++] = copy;
    return RC_OK;
}

/* File name without suffix, file name, general.name. */
static enum rc names_read(struct prompter *p, const char *path, const struct model_file *m, struct err *e)
{
    const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path, *dot = strrchr(base, '.');
    struct model_text general;
    size_t base_len = strlen(base), stem_len = dot && dot != base ? (size_t)(dot - base) : base_len;
    enum rc rc = name_add(p, base, stem_len, e);
    if (rc == RC_OK) rc = name_add(p, base, base_len, e);
    if (rc == RC_OK && model_file_text(m, "general.name", &general) && general.len < 256)
        rc = name_add(p, general.bytes, general.len, e);
    return rc;
}

static enum rc context_read(struct prompter *p, const struct options *o, const struct model_file *m, struct err *e)
{
    struct model_text arch;
    char key[80];
    uint64_t trained = 0;
    if (model_file_text(m, "general.architecture", &arch) && arch.len < 48) {
        snprintf(key, sizeof key, "%.*s.context_length", (int)arch.len, arch.bytes);
        if (!model_file_u64(m, key, &trained)) trained = 0;
    }
    if (!trained || trained > INT_MAX)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_context_length", "%s does not say its context length",
                       o->model);
    if (o->context > 0 && (uint64_t)o->context > trained)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "context_too_long", "--context %d is more than the model's %d",
                       o->context, (int)trained);
    p->context = o->context > 0 ? o->context : (int)trained;
    p->limit = p->context;
    int64_t kv = o->kv_tokens / PAGE_TOKENS * PAGE_TOKENS;
    if (o->kv_tokens > 0 && kv < p->limit) p->limit = (int)kv;
    if (p->limit < 2)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "no_room", "a context of %d tokens has no room for an answer",
                       p->limit);
    return RC_OK;
}

static enum rc format_choose(struct prompter *p, const struct options *o, const struct model_file *m, struct err *e)
{
    if (!o->chat_format) return chat_format_detect(m, &p->format, e);
    if (chat_format_parse(o->chat_format, &p->format)) return RC_OK;
    return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "unknown_chat_format",
                   "unknown chat format %s; there are smollm2, chatml, "
                   "qwen2.5",
                   o->chat_format);
}

enum rc prompter_open(const struct options *o, struct prompter **out, struct err *e)
{
    struct model_file *m = NULL;
    *out = NULL;
    struct prompter *p = calloc(1, sizeof *p);
    if (!p) return err_no_memory(e);
    enum rc rc = model_file_open(o->model, &m, e);
    if (rc == RC_OK) rc = context_read(p, o, m, e);
    if (rc == RC_OK) rc = tokenizer_open(m, &p->tokenizer, e);
    if (rc == RC_OK) rc = format_choose(p, o, m, e);
    if (rc == RC_OK) rc = names_read(p, o->model, m, e);
    model_file_close(m);
    if (rc == RC_OK)
        *out = p;
    else
        prompter_close(p);
    return rc;
}

void prompter_close(struct prompter *p)
{
    if (!p) return;
    tokenizer_close(p->tokenizer);
    for (size_t i = 0; i < p->n_names; i++) free(p->names[i]);
    free(p);
}

struct tokenizer *prompter_tokenizer(struct prompter *p) { return p->tokenizer; }
enum chat_format prompter_format(const struct prompter *p) { return p->format; }
int prompter_context(const struct prompter *p) { return p->context; }
int prompter_limit(const struct prompter *p) { return p->limit; }
const char *prompter_model_name(const struct prompter *p) { return p->names[0]; }

/* ---- building ---- */

static bool fault_from(struct job_fault *fault, enum rc rc, const struct err *e, const char *param)
{
    if (rc == RC_BAD_INPUT)
        job_fault_set(fault, 400, "invalid_request_error", e->code, param, "%s", e->text);
    else
        job_fault_set(fault, 500, "server_error", e->code, "", "%s", e->text);
    return false;
}

static bool has_documents(const struct job_spec *s)
{
    for (size_t i = 0; i < s->n_messages; i++)
        for (size_t j = 0; j < s->messages[i].n_parts; j++)
            if (s->messages[i].parts[j].document_path) return true;
    return false;
}

static bool chat_tokens(struct prompter *p, const struct job_texts *texts, struct token_list *out,
                        struct job_fault *fault)
{
    struct err e = {0};
    struct chat_message *messages = calloc(texts->n + 1, sizeof *messages);
    if (!messages) return fault_from(fault, err_no_memory(&e), &e, "");
    for (size_t i = 0; i < texts->n; i++)
        messages[i] =
            (struct chat_message){texts->messages[i].role, texts->messages[i].text.data, texts->messages[i].text.len};
    enum rc rc = chat_template_encode(p->format, p->tokenizer, messages, texts->n, out, &e);
    free(messages);
    return rc == RC_OK || fault_from(fault, rc, &e, "messages");
}

static bool completion_tokens(struct prompter *p, const struct job_texts *texts, bool raw, struct token_list *out,
                              struct job_fault *fault)
{
    struct err e = {0};
    int32_t bos = tokenizer_bos(p->tokenizer);
    if (bos >= 0 && !token_list_push(out, bos)) return fault_from(fault, err_no_memory(&e), &e, "");
    for (size_t i = 0; i < texts->n; i++) {
        const struct buf *text = &texts->messages[i].text;
        enum rc rc = tokenizer_encode(p->tokenizer, text->data ? text->data : "", text->len, raw, out, &e);
        if (rc != RC_OK) return fault_from(fault, rc, &e, "prompt");
    }
    return true;
}

/* Never cuts: what does not fit is the job's own fault, with both numbers. */
static bool fit(const struct prompter *p, const struct job_spec *s, struct prompt *out, struct job_fault *fault)
{
    const char *param = s->endpoint == JOB_CHAT ? "messages" : "prompt";
    size_t prompt = out->tokens.len, limit = (size_t)p->limit;
    if (prompt == 0) {
        job_fault_set(fault, 400, "invalid_request_error", "empty_prompt", param, "the prompt has no tokens");
        return false;
    }
    if (prompt >= limit && s->max_tokens == 0) {
        job_fault_set(fault, 400, "invalid_request_error", "context_length_exceeded", param,
                      "the prompt has %zu token%s, which leaves no room for an answer in a context of %zu", prompt,
                      prompt == 1 ? "" : "s", limit);
        return false;
    }
    if (s->max_tokens && (prompt >= limit || (uint64_t)s->max_tokens > limit - prompt)) {
        job_fault_set(fault, 400, "invalid_request_error", "context_length_exceeded", param,
                      "the prompt has %zu token%s and "
                      "max_tokens is %lld: together more than the context of %zu",
                      prompt, prompt == 1 ? "" : "s", (long long)s->max_tokens, limit);
        return false;
    }
    out->max_tokens = s->max_tokens ? (int)s->max_tokens : (int)(limit - prompt);
    return true;
}

bool prompt_build(struct prompter *p, struct job_spec *s, const struct prompt_documents *documents, struct prompt *out,
                  struct job_fault *fault)
{
    int64_t start_us = clock_now_us();
    struct job_texts texts = {0};
    *out = (struct prompt){0};
    job_spec_check_model(s, (const char *const *)p->names, p->n_names);
    bool good = s->fault.status == 0;
    if (!good) *fault = s->fault;
    good = good && job_texts_read(documents->root, s, documents->pinned, documents->pinned_bytes, &texts, fault);
    if (good && s->endpoint == JOB_CHAT)
        good = chat_tokens(p, &texts, &out->tokens, fault);
    else if (good)
        good = completion_tokens(p, &texts, !has_documents(s), &out->tokens, fault);
    good = good && fit(p, s, out, fault);
    job_texts_free(&texts);
    out->tokenize_us = clock_now_us() - start_us;
    if (!good) prompt_free(out);
    return good;
}

void prompt_free(struct prompt *p)
{
    token_list_free(&p->tokens);
    *p = (struct prompt){0};
}
