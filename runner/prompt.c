/* prompt: documents, template, tokens, limit, in that order.
 *
 * The model file is mapped only while a prompter opens: tokenizer, format and names are copied out. A chat prompt
 * goes through the built-in template, where contents never become control tokens. A completion's prompt is the raw
 * prompt its author wrote, control tokens included, unless a document is part of it: a document's text is never
 * trusted with them.
 *
 * The limit is what an engine of these options would have: a job beyond it could never run, however long it waited. */
#define _GNU_SOURCE
#include "prompt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "model_file.h"
#include "rank_args.h"

enum { MAX_NAMES = 4 };

struct prompter {
    struct tokenizer *tokenizer;
    enum chat_format format;
    int limit;              /* most tokens of one job */
    char *names[MAX_NAMES]; /* what a body may call the model; [0] is shown */
    size_t n_names;
    bool synthetic;
};

static enum rc name_add(struct prompter *p, const char *bytes, size_t len, struct err *e)
{
    if (!len) return RC_OK;
    char *copy = strndup(bytes, len);
    if (!copy) return err_no_memory(e);
    p->names[p->n_names++] = copy;
    return RC_OK;
}

/* File name without suffix, file name, general.name; of a folder of files, the folder's name. */
static enum rc names_read(struct prompter *p, const char *path, const struct model_file *m, struct err *e)
{
    size_t end = strlen(path);
    bool folder = model_file_layout(m) == MODEL_LAYOUT_HF;
    const char *dot = strrchr(path, '.');
    if (folder && dot && (!strcmp(dot, ".safetensors") || !strcmp(dot, ".json")))
        while (end > 0 && path[end - 1] != '/') end--;
    while (end > 1 && path[end - 1] == '/') end--;
    const char *slash = memrchr(path, '/', end), *base = slash ? slash + 1 : path;
    size_t base_len = end - (size_t)(base - path), stem_len = base_len;
    if (!folder && dot && dot > base) stem_len = (size_t)(dot - base);
    struct model_text general;
    enum rc rc = name_add(p, base, stem_len, e);
    if (rc == RC_OK) rc = name_add(p, base, base_len, e);
    if (rc == RC_OK && model_file_text(m, "general.name", &general) && general.len < 256)
        rc = name_add(p, general.bytes, general.len, e);
    if (rc == RC_OK && p->n_names == 0) rc = name_add(p, "model", strlen("model"), e);
    return rc;
}

static enum rc limit_read(struct prompter *p, const struct options *o, const struct model_file *m, struct err *e)
{
    struct rank_args args = rank_args_make(o, 0, 0);
    struct engine_options engine = rank_args_engine(&args);
    struct engine_limits limits;
    enum rc rc = engine_limits_plan(&engine, m, &limits, e);
    if (rc != RC_OK) return rc;
    p->limit = limits.context;
    if (p->limit < 2)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "no_room", "a context of %d tokens has no room for an answer",
                       p->limit);
    return RC_OK;
}

enum rc prompter_open(const struct options *o, struct prompter **out, struct err *e)
{
    struct model_file *m = NULL;
    *out = NULL;
    struct prompter *p = calloc(1, sizeof *p);
    if (!p) return err_no_memory(e);
    enum rc rc = model_file_open(o->model, &m, e);
    if (rc == RC_OK) rc = limit_read(p, o, m, e);
    if (rc == RC_OK) rc = tokenizer_open(m, &p->tokenizer, e);
    if (rc == RC_OK) rc = chat_format_choose(o->chat_format, m, p->tokenizer, &p->format, e);
    if (rc == RC_OK) rc = names_read(p, o->model, m, e);
    if (rc == RC_OK) p->synthetic = model_file_synthetic(m);
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
const char *prompter_model_name(const struct prompter *p) { return p->names[0]; }
int prompter_context(const struct prompter *p) { return p->limit; }
bool prompter_synthetic(const struct prompter *p) { return p->synthetic; }

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

static enum chat_switch switch_of(enum job_switch s)
{
    return s == JOB_SWITCH_DEFAULT ? CHAT_DEFAULT : s == JOB_SWITCH_ON ? CHAT_ON : CHAT_OFF;
}

static enum chat_effort effort_of(const char *name)
{
    if (!strcmp(name, "low")) return CHAT_EFFORT_LOW;
    if (!strcmp(name, "medium")) return CHAT_EFFORT_MEDIUM;
    return !strcmp(name, "xhigh") ? CHAT_EFFORT_XHIGH : CHAT_EFFORT_DEFAULT;
}

/* A job that asks for what the model's format does not have gets a 400 and no prompt without it. Asking for no thoughts is
 * asking for nothing. */
static bool format_serves(enum chat_format f, const struct job_spec *s, struct job_fault *fault)
{
    const struct job_thinking *t = &s->thinking;
    char param[64] = "";
    if (t->effort[0] && !chat_format_has_effort(f)) snprintf(param, sizeof param, "%s", t->effort_param);
    for (size_t i = 0; i < s->n_messages && !chat_format_thinks(f); i++)
        if (s->messages[i].reasoning_len) snprintf(param, sizeof param, "messages[%zu].reasoning_content", i);
    if (t->preserve == JOB_SWITCH_ON && !chat_format_thinks(f))
        snprintf(param, sizeof param, "chat_template_kwargs.preserve_thinking");
    if (t->enable == JOB_SWITCH_ON && !chat_format_thinks(f))
        snprintf(param, sizeof param, "chat_template_kwargs.enable_thinking");
    if (!param[0]) return true;
    job_fault_set(fault, 400, "invalid_request_error", "unsupported_parameter", param,
                  "the model's chat format %s has nothing that '%s' could mean", chat_format_name(f), param);
    return false;
}

static bool chat_tokens(struct prompter *p, const struct job_spec *s, const struct job_texts *texts,
                        struct token_list *out, struct job_fault *fault)
{
    struct err e = {0};
    if (!format_serves(p->format, s, fault)) return false;
    struct chat_message *messages = calloc(texts->n + 1, sizeof *messages);
    if (!messages) return fault_from(fault, err_no_memory(&e), &e, "");
    for (size_t i = 0; i < texts->n; i++)
        messages[i] = (struct chat_message){texts->messages[i].role, texts->messages[i].text.data,
                                            texts->messages[i].text.len, s->messages[i].reasoning,
                                            s->messages[i].reasoning_len};
    const struct chat chat = {
        .format = p->format,
        .options = {.thinking = switch_of(s->thinking.enable),
                    .preserve_thinking = switch_of(s->thinking.preserve),
                    .effort = effort_of(s->thinking.effort)},
        .messages = messages,
        .n_messages = texts->n,
    };
    enum rc rc = chat_template_encode(&chat, p->tokenizer, out, &e);
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
        good = chat_tokens(p, s, &texts, &out->tokens, fault);
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
