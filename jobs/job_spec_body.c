/* job_spec_body: the fields of a request body, by table; and the few of "tandem".
 *
 * Every field the API is known to have stands in one of three tables: numbers with their bounds, fields with a reader
 * of their own, and fields that are accepted only while they ask for nothing (null, an empty list, or false where
 * false is the API's default). What stands in none is unknown. Nothing that could change an answer is ever ignored;
 * "user", "metadata" and "store" are bookkeeping of the service and cannot.
 *
 * The first fault wins, and the order of the checks is that of the tables, never that of the keys in the line: two
 * lines that differ in key order have one canonical body, hence one key, and must get one record. */
#define _GNU_SOURCE
#include "job_spec_body.h"

#include "text_check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    STOP_MAX = 16,
    STOP_MAX_BYTES = 1024,
    PATH_MAX_BYTES = 4096,
    MODEL_MAX_BYTES = 256,
    KEY_SHOWN_BYTES = 80 /* of an unknown key, in a fault */
};
static const double EXACT_INTEGER_MAX = 9007199254740992.0; /* 2^53: beyond it a real may be a rounded integer */
static const char REQUEST[] = "invalid_request_error";

enum { CHAT = 1 << JOB_CHAT, COMPLETION = 1 << JOB_COMPLETION, BOTH = CHAT | COMPLETION };

struct number_field {
    const char *name;
    double low, high;
    bool above_low; /* low itself is outside */
    size_t offset;  /* of a float in struct sampling */
};
static const struct number_field number_fields[] = {
    {"temperature", 0, 2, false, offsetof(struct sampling, temperature)},
    {"top_p", 0, 1, true, offsetof(struct sampling, top_p)},
    {"min_p", 0, 1, false, offsetof(struct sampling, min_p)},
    {"presence_penalty", -2, 2, false, offsetof(struct sampling, presence_penalty)},
    {"frequency_penalty", -2, 2, false, offsetof(struct sampling, frequency_penalty)},
    {"repetition_penalty", 0, 2, true, offsetof(struct sampling, repetition_penalty)},
};

/* Known, not implemented: accepted only when they ask for nothing. */
struct off_field {
    const char *name;
    unsigned endpoints;
    bool false_is_off;
};
static const struct off_field off_fields[] = {
    {"stream", BOTH, true},
    {"stream_options", BOTH, false},
    {"logprobs", BOTH, true},
    {"top_logprobs", CHAT, false},
    {"logit_bias", BOTH, false},
    {"tools", CHAT, false},
    {"tool_choice", CHAT, false},
    {"parallel_tool_calls", CHAT, false},
    {"functions", CHAT, false},
    {"function_call", CHAT, false},
    {"modalities", CHAT, false},
    {"audio", CHAT, false},
    {"prediction", CHAT, false},
    {"verbosity", CHAT, false},
    {"web_search_options", CHAT, false},
    {"service_tier", BOTH, false},
    {"safety_identifier", BOTH, false},
    {"prompt_cache_key", BOTH, false},
    {"prompt_cache_retention", BOTH, false},
    {"best_of", COMPLETION, false},
    {"echo", COMPLETION, true},
    {"suffix", COMPLETION, false},
    /* extensions of other servers */
    {"min_tokens", BOTH, false},
    {"ignore_eos", BOTH, true},
    {"stop_token_ids", BOTH, false},
    {"bad_words", BOTH, false},
    {"include_stop_str_in_output", BOTH, true},
    {"skip_special_tokens", BOTH, false},
    {"spaces_between_special_tokens", BOTH, false},
    {"truncate_prompt_tokens", BOTH, false},
    {"prompt_logprobs", BOTH, false},
    {"use_beam_search", BOTH, true},
    {"length_penalty", BOTH, false},
    {"chat_template", CHAT, false},
    {"add_generation_prompt", CHAT, false},
    {"continue_final_message", CHAT, true},
    {"structured_outputs", BOTH, false},
    {"guided_json", BOTH, false},
    {"guided_regex", BOTH, false},
    {"guided_choice", BOTH, false},
    {"guided_grammar", BOTH, false},
};

static bool is_empty(const json_t *v)
{
    return !v || json_is_null(v) || (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0);
}

static const char *type_name(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER: return "an integer";
    case JSON_REAL: return "a number";
    case JSON_NULL: return "null";
    default: return "a boolean";
    }
}

static void wrong_type(struct job_spec *s, const char *param, const char *want, const json_t *v)
{
    job_fault_set(&s->fault, 400, REQUEST, "invalid_type", param, "'%s' must be %s, not %s", param, want, type_name(v));
}

static bool is_among(const char *key, const char *const *names, size_t n_names)
{
    for (size_t i = 0; i < n_names; i++)
        if (!strcmp(key, names[i])) return true;
    return false;
}

/* The smallest key of an object that is not in names; NULL when all are. */
static const char *unknown_key(const json_t *object, const char *const *names, size_t n_names)
{
    const char *found = NULL, *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, key,
                        value) if (!is_among(key, names, n_names) && (!found || strcmp(key, found) < 0)) found = key;
    return found;
}

static void fault_unknown(struct job_spec *s, const char *where, const char *key)
{
    char param[192];
    size_t key_len = text_cut(key, strnlen(key, KEY_SHOWN_BYTES));
    snprintf(param, sizeof param, "%s%s%.*s", where, *where ? "." : "", (int)key_len, key);
    job_fault_set(&s->fault, 400, REQUEST, "unknown_parameter", param, "unknown parameter '%s'", param);
}

static void fault_unsupported(struct job_spec *s, const char *param)
{
    job_fault_set(&s->fault, 400, REQUEST, "unsupported_parameter", param, "'%s' is not supported", param);
}

/* --- plain values ------------------------------------------------------------------------------------------------- */

/* An integer, or a real that is one without doubt. Null and absent leave *out and return false, as faults do. */
static bool read_integer(struct job_spec *s, const json_t *body, const char *name, int64_t low, int64_t high,
                         int64_t *out)
{
    const json_t *v = json_object_get(body, name);
    if (!v || json_is_null(v)) return false;
    int64_t value = 0;
    bool inside = true;
    if (json_is_integer(v)) {
        value = json_integer_value(v);
    } else if (json_is_real(v) && json_real_value(v) == floor(json_real_value(v))) {
        inside = fabs(json_real_value(v)) <= EXACT_INTEGER_MAX;
        if (inside) value = (int64_t)json_real_value(v);
    } else {
        wrong_type(s, name, "an integer", v);
        return false;
    }
    if (!inside || value < low || value > high) {
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", name, "'%s' must be between %lld and %lld", name,
                      (long long)low, (long long)high);
        return false;
    }
    *out = value;
    return true;
}

static void read_number(struct job_spec *s, const json_t *body, const struct number_field *f)
{
    const json_t *v = json_object_get(body, f->name);
    if (!v || json_is_null(v)) return;
    if (!json_is_number(v)) {
        wrong_type(s, f->name, "a number", v);
        return;
    }
    double value = json_number_value(v);
    float narrow = (float)value; /* a tiny value may become 0, so the bounds hold for what is used */
    bool inside = value <= f->high && (f->above_low ? (double)narrow > f->low : value >= f->low);
    if (!inside)
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", f->name, "'%s' must be %s %g and at most %g", f->name,
                      f->above_low ? "above" : "at least", f->low, f->high);
    else
        memcpy((char *)&s->sampling + f->offset, &narrow, sizeof narrow);
}

static void read_numbers(struct job_spec *s, const json_t *body)
{
    int64_t value;
    for (size_t i = 0; i < sizeof number_fields / sizeof *number_fields; i++) read_number(s, body, &number_fields[i]);
    if (read_integer(s, body, "top_k", -1, INT32_MAX, &value)) s->sampling.top_k = value < 0 ? 0 : (int32_t)value;
    if (read_integer(s, body, "seed", 0, INT64_MAX, &value)) {
        s->sampling.seed = (uint64_t)value;
        s->has_seed = true;
    }
    read_integer(s, body, "n", 1, 1, &value);
    if (read_integer(s, body, "max_tokens", 1, INT32_MAX, &value)) s->max_tokens = value;
    if (read_integer(s, body, "max_completion_tokens", 1, INT32_MAX, &value)) s->max_tokens = value;
}

/* A string of at most max_bytes without NUL. False: fault set. */
static bool check_string(struct job_spec *s, const json_t *v, const char *param, size_t max_bytes)
{
    if (!json_is_string(v))
        wrong_type(s, param, "a string", v);
    else if (job_spec_has_nul(v))
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", param, "'%s' holds a NUL character", param);
    else if (json_string_length(v) > max_bytes)
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", param, "'%s' has more than %zu bytes", param,
                      max_bytes);
    else
        return true;
    return false;
}

static bool read_model(struct job_spec *s, const json_t *body)
{
    const json_t *v = json_object_get(body, "model");
    if (!v || json_is_null(v) || !check_string(s, v, "model", MODEL_MAX_BYTES)) return true;
    s->model = job_spec_copy(v);
    return s->model != NULL;
}

static bool read_stop(struct job_spec *s, const json_t *body)
{
    const json_t *v = json_object_get(body, "stop");
    if (is_empty(v) && !json_is_object(v)) return true;
    if (!json_is_string(v) && !json_is_array(v)) {
        wrong_type(s, "stop", "a string or an array of strings", v);
        return true;
    }
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (n > STOP_MAX) {
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", "stop", "'stop' has %zu strings, more than %d", n,
                      STOP_MAX);
        return true;
    }
    s->stop = calloc(n, sizeof *s->stop);
    if (!s->stop) return false;
    for (size_t i = 0; i < n; i++) {
        char param[32] = "stop";
        const json_t *one = json_is_array(v) ? json_array_get(v, i) : v;
        if (json_is_array(v)) snprintf(param, sizeof param, "stop[%zu]", i);
        if (!check_string(s, one, param, STOP_MAX_BYTES)) return true;
        if (json_string_length(one) == 0) {
            job_fault_set(&s->fault, 400, REQUEST, "invalid_value", param, "'%s' is empty", param);
            return true;
        }
        s->stop[i] = job_spec_copy(one);
        if (!s->stop[i]) return false;
        s->n_stop++;
    }
    return true;
}

static void read_response_format(struct job_spec *s, const json_t *body)
{
    static const char *const names[] = {"type"};
    const json_t *v = json_object_get(body, "response_format");
    if (!v || json_is_null(v)) return;
    if (!json_is_object(v)) {
        wrong_type(s, "response_format", "an object", v);
        return;
    }
    const json_t *type = json_object_get(v, "type");
    if (!json_is_string(type) || strcmp(json_string_value(type), "text") || job_spec_has_nul(type)) {
        job_fault_set(&s->fault, 400, REQUEST, "unsupported_value", "response_format.type",
                      "'response_format.type' must be \"text\"; no other format is supported");
        return;
    }
    const char *key = unknown_key(v, names, 1);
    if (key) fault_unknown(s, "response_format", key);
}

/* --- thinking ----------------------------------------------------------------------------------------------------- */

/* What templates with an effort know. OpenAI's others are refused and not moved to a neighbour: they name another prompt. */
static const char *const effort_names[] = {"low", "medium", "xhigh"};
static const char kwargs_name[] = "chat_template_kwargs", effort_name[] = "reasoning_effort";
static const char kwargs_effort_name[] = "chat_template_kwargs.reasoning_effort";

static void read_switch(struct job_spec *s, const json_t *kwargs, const char *name, enum job_switch *out)
{
    const json_t *v = json_object_get(kwargs, name);
    char param[64];
    if (!v || json_is_null(v)) return;
    snprintf(param, sizeof param, "%s.%s", kwargs_name, name);
    if (!json_is_boolean(v))
        wrong_type(s, param, "a boolean", v);
    else
        *out = json_is_true(v) ? JOB_SWITCH_ON : JOB_SWITCH_OFF;
}

/* with_none: "none" is a value as well, which out is then. */
static void read_effort(struct job_spec *s, const json_t *v, const char *param, bool with_none, char out[8])
{
    if (!v || json_is_null(v) || !check_string(s, v, param, SIZE_MAX)) return;
    const char *value = json_string_value(v);
    if (is_among(value, effort_names, sizeof effort_names / sizeof *effort_names) || (with_none && !strcmp(value, "none")))
        snprintf(out, 8, "%s", value);
    else
        job_fault_set(&s->fault, 400, REQUEST, "unsupported_value", param, "'%s' must be %s\"low\", \"medium\" or \"xhigh\"",
                      param, with_none ? "\"none\", " : "");
}

/* reasoning_effort is OpenAI's name of what chat_template_kwargs says in the template's words; "none" is its way to turn
 * thinking off. Given twice, they must agree. */
static void read_thinking(struct job_spec *s, const json_t *body)
{
    static const char *const names[] = {"enable_thinking", "preserve_thinking", "reasoning_effort"};
    struct job_thinking *t = &s->thinking;
    const json_t *kwargs = json_object_get(body, kwargs_name);
    char effort[8] = "";
    if (kwargs && !json_is_null(kwargs)) {
        if (!json_is_object(kwargs)) {
            wrong_type(s, kwargs_name, "an object", kwargs);
            return;
        }
        read_switch(s, kwargs, "enable_thinking", &t->enable);
        read_switch(s, kwargs, "preserve_thinking", &t->preserve);
        read_effort(s, json_object_get(kwargs, "reasoning_effort"), kwargs_effort_name, false, t->effort);
        if (t->effort[0]) t->effort_param = kwargs_effort_name;
        const char *key = unknown_key(kwargs, names, sizeof names / sizeof *names);
        if (key) fault_unknown(s, kwargs_name, key);
    }
    read_effort(s, json_object_get(body, effort_name), effort_name, true, effort);
    if (!effort[0]) return;
    bool off = !strcmp(effort, "none");
    if ((off && t->enable == JOB_SWITCH_ON) || (t->effort[0] && strcmp(t->effort, effort)))
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", effort_name, "'%s' contradicts '%s'", effort_name, kwargs_name);
    if (off) {
        t->enable = JOB_SWITCH_OFF;
        return;
    }
    memcpy(t->effort, effort, sizeof effort);
    t->effort_param = effort_name;
}

/* --- messages and prompt ------------------------------------------------------------------------------------------ */

static bool read_text(struct job_spec *s, const json_t *v, const char *param, struct job_part *out)
{
    if (!check_string(s, v, param, SIZE_MAX)) return true;
    out->text = job_spec_copy(v);
    out->text_len = json_string_length(v);
    return out->text != NULL;
}

/* One element of a content array: text, or a document. */
static bool read_part(struct job_spec *s, const json_t *v, const char *where, struct job_part *out)
{
    static const char *const text_names[] = {"type", "text"}, *const document_names[] = {"type", "path"};
    char param[128];
    if (!json_is_object(v)) {
        wrong_type(s, where, "an object", v);
        return true;
    }
    const json_t *type = json_object_get(v, "type");
    bool is_text = json_is_string(type) && !strcmp(json_string_value(type), "text");
    bool is_document = json_is_string(type) && !strcmp(json_string_value(type), "document");
    if (!is_text && !is_document) {
        snprintf(param, sizeof param, "%s.type", where);
        job_fault_set(&s->fault, 400, REQUEST, type ? "unsupported_value" : "missing_required_parameter", param,
                      "'%s' must be \"text\" or \"document\"", param);
        return true;
    }
    const char *name = is_text ? "text" : "path";
    const json_t *value = json_object_get(v, name);
    snprintf(param, sizeof param, "%s.%s", where, name);
    if (!value) {
        job_fault_set(&s->fault, 400, REQUEST, "missing_required_parameter", param, "'%s' is missing", param);
        return true;
    }
    const char *key = unknown_key(v, is_text ? text_names : document_names, 2);
    if (key) fault_unknown(s, where, key);
    if (is_text) return read_text(s, value, param, out);
    if (!check_string(s, value, param, PATH_MAX_BYTES)) return true;
    if (json_string_length(value) == 0)
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", param, "'%s' is empty", param);
    out->document_path = job_spec_copy(value);
    return out->document_path != NULL;
}

static bool read_content(struct job_spec *s, const json_t *v, const char *where, struct job_message *m)
{
    bool list = json_is_array(v);
    if (!list && !json_is_string(v)) {
        if (v)
            wrong_type(s, where, "a string or an array of parts", v);
        else
            job_fault_set(&s->fault, 400, REQUEST, "missing_required_parameter", where, "'%s' is missing", where);
        return true;
    }
    size_t n = list ? json_array_size(v) : 1;
    if (n == 0) {
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", where, "'%s' is an empty array", where);
        return true;
    }
    m->parts = calloc(n, sizeof *m->parts);
    if (!m->parts) return false;
    m->n_parts = n;
    if (!list) return read_text(s, v, where, &m->parts[0]);
    for (size_t i = 0; i < n && !s->fault.status; i++) {
        char param[96];
        snprintf(param, sizeof param, "%s[%zu]", where, i);
        if (!read_part(s, json_array_get(v, i), param, &m->parts[i])) return false;
    }
    return true;
}

static void read_role(struct job_spec *s, const json_t *v, const char *where, struct job_message *m)
{
    static const char *const roles[][2] = {
        {"system", "system"}, {"developer", "system"}, {"user", "user"}, {"assistant", "assistant"}};
    if (!v) {
        job_fault_set(&s->fault, 400, REQUEST, "missing_required_parameter", where, "'%s' is missing", where);
        return;
    }
    if (!check_string(s, v, where, SIZE_MAX)) return;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (!strcmp(json_string_value(v), roles[i][0])) {
            snprintf(m->role, sizeof m->role, "%s", roles[i][1]);
            return;
        }
    job_fault_set(&s->fault, 400, REQUEST, "unsupported_value", where,
                  "'%s' must be \"system\", \"developer\", \"user\" or \"assistant\"", where);
}

/* Thoughts of an assistant, under either of the names that servers give them in answers. */
static bool read_reasoning(struct job_spec *s, const json_t *message, const char *where, struct job_message *m)
{
    static const char *const names[] = {"reasoning_content", "reasoning"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const json_t *v = json_object_get(message, names[i]);
        char param[64];
        if (!v || json_is_null(v)) continue;
        snprintf(param, sizeof param, "%s.%s", where, names[i]);
        if (!check_string(s, v, param, SIZE_MAX)) return true;
        if (strcmp(m->role, "assistant"))
            job_fault_set(&s->fault, 400, REQUEST, "invalid_value", param, "'%s' belongs to an assistant's message", param);
        if (m->reasoning && strcmp(m->reasoning, json_string_value(v)))
            job_fault_set(&s->fault, 400, REQUEST, "invalid_value", param, "'%s' contradicts '%s.%s'", param, where, names[0]);
        if (m->reasoning) continue;
        m->reasoning = job_spec_copy(v);
        if (!m->reasoning) return false;
        m->reasoning_len = json_string_length(v);
    }
    return true;
}

static bool read_message(struct job_spec *s, const json_t *v, size_t index, struct job_message *m)
{
    static const char *const off[] = {"name",          "tool_calls", "tool_call_id", "function_call",
                                      "refusal",       "audio",      "annotations"};
    static const char *const known[] = {"role",    "content", "name",        "tool_calls",        "tool_call_id", "function_call",
                                        "refusal", "audio",   "annotations", "reasoning_content", "reasoning"};
    char where[40], param[64];
    snprintf(where, sizeof where, "messages[%zu]", index);
    if (!json_is_object(v)) {
        wrong_type(s, where, "an object", v);
        return true;
    }
    snprintf(param, sizeof param, "%s.role", where);
    read_role(s, json_object_get(v, "role"), param, m);
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        snprintf(param, sizeof param, "%s.%s", where, off[i]);
        if (!is_empty(json_object_get(v, off[i]))) fault_unsupported(s, param);
    }
    const char *key = unknown_key(v, known, sizeof known / sizeof *known);
    if (key) fault_unknown(s, where, key);
    if (!read_reasoning(s, v, where, m)) return false;
    if (s->fault.status) return true;
    snprintf(param, sizeof param, "%s.content", where);
    return read_content(s, json_object_get(v, "content"), param, m);
}

static bool read_messages(struct job_spec *s, const json_t *body)
{
    const json_t *v = json_object_get(body, "messages");
    if (!v)
        job_fault_set(&s->fault, 400, REQUEST, "missing_required_parameter", "messages", "'messages' is missing");
    else if (!json_is_array(v))
        wrong_type(s, "messages", "an array", v);
    else if (json_array_size(v) == 0)
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", "messages", "'messages' is empty");
    if (s->fault.status) return true;
    size_t n = json_array_size(v);
    s->messages = calloc(n, sizeof *s->messages);
    if (!s->messages) return false;
    s->n_messages = n;
    for (size_t i = 0; i < n && !s->fault.status; i++)
        if (!read_message(s, json_array_get(v, i), i, &s->messages[i])) return false;
    return true;
}

static bool read_prompt(struct job_spec *s, const json_t *body)
{
    const json_t *v = json_object_get(body, "prompt");
    const char *param = "prompt";
    if (!v) {
        job_fault_set(&s->fault, 400, REQUEST, "missing_required_parameter", param, "'prompt' is missing");
        return true;
    }
    if (json_is_array(v) && json_array_size(v) == 1 && json_is_string(json_array_get(v, 0))) {
        v = json_array_get(v, 0);
        param = "prompt[0]";
    } else if (!json_is_string(v)) {
        job_fault_set(&s->fault, 400, REQUEST, "unsupported_value", param,
                      "'prompt' must be a string, or an array of one string; token ids and lists are not supported");
        return true;
    }
    s->messages = calloc(1, sizeof *s->messages);
    if (!s->messages) return false;
    s->n_messages = 1;
    struct job_message *m = &s->messages[0];
    snprintf(m->role, sizeof m->role, "user");
    m->parts = calloc(1, sizeof *m->parts);
    if (!m->parts) return false;
    m->n_parts = 1;
    return read_text(s, v, param, &m->parts[0]);
}

/* --- the body as a whole ------------------------------------------------------------------------------------------ */

static void check_off_fields(struct job_spec *s, const json_t *body)
{
    for (size_t i = 0; i < sizeof off_fields / sizeof *off_fields; i++) {
        const struct off_field *f = &off_fields[i];
        const json_t *v = json_object_get(body, f->name);
        if (is_empty(v) || (f->false_is_off && json_is_false(v))) continue;
        if (f->endpoints >> s->endpoint & 1) fault_unsupported(s, f->name);
    }
}

static bool is_known(const struct job_spec *s, const char *key)
{
    static const char *const read_fields[] = {
        "model",           "stop", "top_k",    "seed", "n", "max_tokens", "max_completion_tokens",
        "response_format", "user", "metadata", "store"};
    if (!strcmp(key, s->endpoint == JOB_CHAT ? "messages" : "prompt")) return true;
    if (!strcmp(key, kwargs_name) || !strcmp(key, effort_name)) return s->endpoint == JOB_CHAT;
    if (is_among(key, read_fields, sizeof read_fields / sizeof *read_fields)) return true;
    for (size_t i = 0; i < sizeof number_fields / sizeof *number_fields; i++)
        if (!strcmp(key, number_fields[i].name)) return true;
    for (size_t i = 0; i < sizeof off_fields / sizeof *off_fields; i++)
        if (!strcmp(key, off_fields[i].name)) return off_fields[i].endpoints >> s->endpoint & 1;
    return false;
}

static void check_unknown_fields(struct job_spec *s, const json_t *body)
{
    const char *found = NULL, *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)body, key,
                        value) if (!is_known(s, key) && (!found || strcmp(key, found) < 0)) found = key;
    if (found) fault_unknown(s, "", found);
}

bool job_spec_body(struct job_spec *s, const json_t *body)
{
    s->sampling = (struct sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    if (!read_model(s, body)) return false;
    if (!(s->endpoint == JOB_CHAT ? read_messages(s, body) : read_prompt(s, body))) return false;
    read_numbers(s, body);
    if (!read_stop(s, body)) return false;
    read_response_format(s, body);
    if (s->endpoint == JOB_CHAT) read_thinking(s, body);
    check_off_fields(s, body);
    check_unknown_fields(s, body);
    return true;
}

/* --- "tandem" ----------------------------------------------------------------------------------------------------- */

static void read_priority(struct job_spec *s, const json_t *priority)
{
    static const char param[] = JOB_PRIORITY_PARAM;
    if (!priority || json_is_null(priority)) return;
    double n = json_number_value(priority);
    if (!json_is_number(priority) || n != floor(n))
        wrong_type(s, param, "an integer", priority);
    else if (n < JOB_PRIORITY_MIN || n > JOB_PRIORITY_MAX)
        job_fault_set(&s->fault, 400, REQUEST, "invalid_value", param, "'%s' must be between %d and %d", param, JOB_PRIORITY_MIN,
                      JOB_PRIORITY_MAX);
    else
        s->priority = (int)n;
}

void job_spec_tandem(struct job_spec *s, const json_t *tandem)
{
    static const char *const names[] = {"timeout_s", "priority"};
    static const char timeout_param[] = "tandem.timeout_s";
    if (!json_is_object(tandem)) {
        wrong_type(s, "tandem", "an object", tandem);
        return;
    }
    const json_t *timeout = json_object_get(tandem, names[0]);
    if (timeout && !json_is_null(timeout)) {
        double seconds = json_number_value(timeout);
        if (!json_is_number(timeout))
            wrong_type(s, timeout_param, "a number", timeout);
        else if (!(seconds >= JOB_TIMEOUT_MIN_S && seconds <= JOB_TIMEOUT_MAX_S))
            job_fault_set(&s->fault, 400, REQUEST, "invalid_value", timeout_param, "'%s' must be between %.15g and %.15g",
                          timeout_param, JOB_TIMEOUT_MIN_S, JOB_TIMEOUT_MAX_S);
        else
            s->timeout_us = (int64_t)(seconds * 1e6 + 0.5);
    }
    read_priority(s, json_object_get(tandem, names[1]));
    const char *unknown = unknown_key(tandem, names, sizeof names / sizeof *names);
    if (unknown) fault_unknown(s, "tandem", unknown);
}
