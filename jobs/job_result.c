/* job_result: records as JSON trees, dumped compactly into the caller's buffer.
 *
 * jansson keeps the order in which keys were set, so the order of the calls below is the order in the file. Every set
 * may fail (memory, or a text that is not UTF-8); `tree` remembers the first failure and one check at the end is
 * enough. Values come in as new references that are consumed in every case. No reals: their text would depend on the
 * library. The ids derive from the job's key alone, so that exporting one state twice gives the same bytes. */
#include "job_result.h"

#include "text_check.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

enum { ID_KEY_BYTES = 12 };

static void put(json_t *object, const char *key, json_t *value, bool *ok)
{
    if (!value || json_object_set_new_nocheck(object, key, value)) *ok = false;
}

static void put_integer(json_t *object, const char *key, int64_t value, bool *ok)
{
    put(object, key, json_integer(value), ok);
}

/* A text of ours or of the system: repaired, because a record must not fail over a bad byte in a message. */
static json_t *repaired(const char *text, bool *ok)
{
    struct buf b = {0};
    json_t *value = NULL;
    if (text_append_repaired(&b, text, strlen(text))) value = json_stringn(b.len ? b.data : "", b.len);
    if (!value) *ok = false;
    buf_free(&b);
    return value;
}

static json_t *repaired_or_null(const char *text, bool *ok) { return *text ? repaired(text, ok) : json_null(); }

/* prefix + 24 hex digits of the key. */
static json_t *id_of(const char *prefix, const unsigned char key[32])
{
    char id[40];
    int n = snprintf(id, sizeof id, "%s", prefix);
    for (int i = 0; i < ID_KEY_BYTES; i++) n += snprintf(id + n, sizeof id - (size_t)n, "%02x", key[i]);
    return json_string(id);
}

static int append_piece(const char *bytes, size_t len, void *out) { return buf_append(out, bytes, len) ? 0 : -1; }

/* Dumps root behind what out holds. root is consumed. */
static enum rc finish(json_t *root, bool ok, struct buf *out, struct err *e)
{
    size_t before = out->len;
    if (ok && !json_dump_callback(root, append_piece, out, JSON_COMPACT)) {
        json_decref(root);
        return RC_OK;
    }
    json_decref(root);
    out->len = before;
    if (out->data) out->data[before] = '\0';
    if (out->failed) return err_no_memory(e);
    return err_set(e, RC_FAILED, EXIT_INTERNAL, "record_not_written",
                   "a record could not be built: out of memory, or a text that is not UTF-8");
}

/* --- success ------------------------------------------------------------------------------------------------------ */

static json_t *usage_of(const struct job_answer *a, bool *ok)
{
    json_t *usage = json_object(), *details = json_object();
    put_integer(usage, "prompt_tokens", a->prompt_tokens, ok);
    put_integer(usage, "completion_tokens", a->completion_tokens, ok);
    put_integer(usage, "total_tokens", a->prompt_tokens + a->completion_tokens, ok);
    put_integer(details, "cached_tokens", a->cached_tokens, ok);
    put(usage, "prompt_tokens_details", details, ok);
    return usage;
}

static json_t *choices_of(const struct job_spec *s, const struct job_answer *a, bool *ok)
{
    json_t *choices = json_array(), *choice = json_object();
    json_t *text = json_stringn(a->text ? a->text : "", a->text_len);
    put_integer(choice, "index", 0, ok);
    if (s->endpoint == JOB_CHAT) {
        json_t *message = json_object();
        put(message, "role", json_string("assistant"), ok);
        put(message, "content", text, ok);
        put(choice, "message", message, ok);
    } else {
        put(choice, "text", text, ok);
    }
    put(choice, "finish_reason", json_string(a->finish_reason), ok);
    put(choice, "logprobs", json_null(), ok);
    if (json_array_append_new(choices, choice)) *ok = false;
    return choices;
}

static json_t *trace_of(const struct job_answer *a, bool *ok)
{
    json_t *trace = json_array();
    for (size_t i = 0; i < a->n_trace && *ok; i++) {
        char text[40];
        snprintf(text, sizeof text, "%016llx:%016llx", (unsigned long long)a->trace[2 * i],
                 (unsigned long long)a->trace[2 * i + 1]);
        if (json_array_append_new(trace, json_string(text))) *ok = false;
    }
    return trace;
}

static json_t *body_of(const unsigned char key[32], const struct job_spec *s, const struct job_answer *a, bool *ok)
{
    bool chat = s->endpoint == JOB_CHAT;
    json_t *body = json_object();
    put(body, "id", id_of(chat ? "chatcmpl-" : "cmpl-", key), ok);
    put(body, "object", json_string(chat ? "chat.completion" : "text_completion"), ok);
    put_integer(body, "created", a->created, ok);
    put(body, "model", repaired(a->model, ok), ok);
    put(body, "choices", choices_of(s, a, ok), ok);
    put(body, "usage", usage_of(a, ok), ok);
    if (a->trace) put(body, "tandem_trace", trace_of(a, ok), ok);
    return body;
}

static json_t *response_of(const unsigned char key[32], int status, json_t *body, bool *ok)
{
    json_t *response = json_object();
    put_integer(response, "status_code", status, ok);
    put(response, "request_id", id_of("req_", key), ok);
    put(response, "body", body, ok);
    return response;
}

enum rc job_result_success(const unsigned char key[32], const struct job_spec *s, const struct job_answer *a,
                           struct buf *out, struct err *e)
{
    bool ok = true;
    json_t *root = json_object();
    put(root, "id", id_of("batch_req_", key), &ok);
    put(root, "custom_id", json_string(s->custom_id), &ok);
    put(root, "response", response_of(key, 200, body_of(key, s, a, &ok), &ok), &ok);
    put(root, "error", json_null(), &ok);
    return finish(root, ok, out, e);
}

/* --- failure ------------------------------------------------------------------------------------------------------ */

static json_t *error_body_of(const struct job_fault *f, bool *ok)
{
    const char *type = f->type[0] ? f->type : f->status >= 500 ? "server_error" : "invalid_request_error";
    json_t *body = json_object(), *error = json_object();
    put(error, "message", repaired(f->message, ok), ok);
    put(error, "type", repaired(type, ok), ok);
    put(error, "param", repaired_or_null(f->param, ok), ok);
    put(error, "code", repaired_or_null(f->code, ok), ok);
    put(body, "error", error, ok);
    return body;
}

/* The error of a job that never ran. */
static json_t *never_ran_of(const struct job_fault *f, bool *ok)
{
    json_t *error = json_object();
    put(error, "code", repaired(f->code[0] ? f->code : "batch_failed", ok), ok);
    put(error, "message", repaired(f->message, ok), ok);
    return error;
}

enum rc job_result_failure(const unsigned char key[32], const char *custom_id, const struct job_fault *f,
                           struct buf *out, struct err *e)
{
    bool ok = true, ran = f->status != 0;
    json_t *root = json_object();
    put(root, "id", id_of("batch_req_", key), &ok);
    put(root, "custom_id", repaired(custom_id, &ok), &ok);
    put(root, "response", ran ? response_of(key, f->status, error_body_of(f, &ok), &ok) : json_null(), &ok);
    put(root, "error", ran ? json_null() : never_ran_of(f, &ok), &ok);
    return finish(root, ok, out, e);
}

/* --- timing ------------------------------------------------------------------------------------------------------- */

enum rc job_result_timing(const char *custom_id, int status, const struct job_timing *t, struct buf *out, struct err *e)
{
    const struct {
        const char *name;
        int64_t value;
    } fields[] = {
        {"status", status},
        {"queue_us", t->queue_us},
        {"tokenize_us", t->tokenize_us},
        {"prefill_us", t->prefill_us},
        {"ttft_us", t->ttft_us},
        {"decode_us", t->decode_us},
        {"tpot_us", t->tpot_us},
        {"prompt_tokens", t->prompt_tokens},
        {"cached_tokens", t->cached_tokens},
        {"resumed_tokens", t->resumed_tokens},
        {"completion_tokens", t->completion_tokens},
        {"steps", t->steps},
        {"rounds", t->rounds},
        {"drafted", t->drafted},
        {"accepted", t->accepted},
        {"sequences_in_step", t->sequences_in_step},
        {"preemptions", t->preemptions},
        {"attempts", t->attempts},
        {"rank_restarts", t->rank_restarts},
        {"group", t->group},
    };
    bool ok = true;
    json_t *root = json_object();
    put(root, "custom_id", repaired(custom_id, &ok), &ok);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) put_integer(root, fields[i].name, fields[i].value, &ok);
    return finish(root, ok, out, e);
}
