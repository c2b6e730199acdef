/* job_spec: the envelope of a line, and what all its parts share.
 *
 * jansson parses the line once; the tree lives only inside job_spec_parse. Its own error texts quote the input, which
 * logs must not, so each of its error codes has a text here. It reports where it stopped; for members that are wrong
 * in themselves a small scan over the line (known to be valid JSON by then) finds the column of the key.
 *
 * An integer beyond 64 bits makes jansson refuse the whole line although it is the job's own mistake (a seed,
 * mostly). Such a line is parsed again with integers as reals, and the body's readers accept no real above 2^53 as an
 * integer: the job gets its 400 and no number is silently rounded. */
#define _GNU_SOURCE
#include "job_spec.h"

#include "job_spec_body.h"
#include "text_check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { CUSTOM_ID_MAX_BYTES = 512 };

/* Where a job line comes from; for errors. */
struct origin {
    const char *line;
    size_t len;
    const char *source;
    int64_t number, byte;
};

static void copy_cut(char *out, size_t out_bytes, const char *text)
{
    snprintf(out, out_bytes, "%s", text);
    size_t len = strlen(out);
    if (len + 1 == out_bytes) out[text_cut(out, len)] = '\0';
}

void job_fault_set(struct job_fault *f, int status, const char *type, const char *code, const char *param,
                   const char *format, ...)
{
    if (f->status || f->code[0]) return;
    f->status = status;
    copy_cut(f->type, sizeof f->type, type);
    copy_cut(f->code, sizeof f->code, code ? code : "");
    copy_cut(f->param, sizeof f->param, param ? param : "");
    va_list args;
    va_start(args, format);
    vsnprintf(f->message, sizeof f->message, format, args);
    va_end(args);
    size_t len = strlen(f->message);
    if (len + 1 == sizeof f->message) f->message[text_cut(f->message, len)] = '\0';
}

char *job_spec_copy(const json_t *string)
{
    size_t len = json_string_length(string);
    char *copy = malloc(len + 1);
    if (!copy) return NULL;
    memcpy(copy, json_string_value(string), len);
    copy[len] = '\0';
    return copy;
}

bool job_spec_has_nul(const json_t *string) { return strlen(json_string_value(string)) != json_string_length(string); }

static const char *syntax_text(enum json_error_code code)
{
    switch (code) {
    case json_error_stack_overflow: return "nested too deeply";
    case json_error_invalid_utf8: return "not valid UTF-8";
    case json_error_premature_end_of_input: return "the line ends inside a value";
    case json_error_end_of_input_expected: return "something follows the object; one object a line";
    case json_error_null_character: return "a NUL character";
    case json_error_null_byte_in_key: return "a NUL character in a key";
    case json_error_duplicate_key: return "a key is given twice";
    case json_error_numeric_overflow: return "a number is too large";
    default: return "not valid JSON";
    }
}

static enum rc syntax_error(const struct origin *o, const json_error_t *je, struct err *e)
{
    enum json_error_code code = json_error_code(je);
    if (code == json_error_out_of_memory) return err_no_memory(e);
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_JOB_FILE, "invalid_json", "%s", syntax_text(code));
    err_place(e, o->source, o->number, je->column > 0 ? je->column : 1, o->byte + je->position);
    return rc;
}

/* Index and column (1-based, in characters) of the opening quote of a key of the outermost object; column 0: not found,
 * which happens when the key is written with escapes. line is valid JSON. */
static int64_t key_column(const struct origin *o, const char *key, size_t *index)
{
    size_t key_len = strlen(key), depth = 0;
    int64_t column = 0;
    for (size_t i = 0; i < o->len; i++) {
        unsigned char c = (unsigned char)o->line[i];
        if ((c & 0xC0) != 0x80) column++;
        if (c == '{' || c == '[') depth++;
        if (c == '}' || c == ']') depth--;
        if (c != '"') continue;
        size_t first = i + 1;
        int64_t first_column = column;
        while (++i < o->len && o->line[i] != '"') {
            if (o->line[i] == '\\') i++, column++;
            if (i < o->len && ((unsigned char)o->line[i] & 0xC0) != 0x80) column++;
        }
        column++;
        if (i >= o->len) break;
        size_t next = i + 1;
        while (next < o->len && (o->line[next] == ' ' || o->line[next] == '\t')) next++;
        bool is_key = next < o->len && o->line[next] == ':';
        if (is_key && depth == 1 && i - first == key_len && !memcmp(o->line + first, key, key_len)) {
            *index = first - 1;
            return first_column;
        }
    }
    *index = 0;
    return 0;
}

static enum rc member_error(const struct origin *o, const char *key, const char *code, const char *text, struct err *e)
{
    size_t index;
    int64_t column = key_column(o, key, &index);
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_JOB_FILE, code, "%s", text);
    err_place(e, o->source, o->number, column, o->byte + (int64_t)index);
    return rc;
}

/* A member that must be there and have one type. */
static enum rc member(const struct origin *o, const json_t *root, const char *key, json_type type, json_t **out,
                      struct err *e)
{
    *out = json_object_get(root, key);
    const char *want = type == JSON_OBJECT ? "an object" : "a string";
    if (!*out) {
        enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_JOB_FILE, "missing_field", "no \"%s\", which must be %s", key, want);
        err_place(e, o->source, o->number, 1, o->byte);
        return rc;
    }
    if (json_typeof(*out) == type) return RC_OK;
    char text[80];
    snprintf(text, sizeof text, "\"%s\" must be %s", key, want);
    return member_error(o, key, "wrong_type", text, e);
}

static enum rc read_custom_id(const struct origin *o, const json_t *root, struct job_spec *out, struct err *e)
{
    json_t *id;
    enum rc rc = member(o, root, "custom_id", JSON_STRING, &id, e);
    if (rc != RC_OK) return rc;
    if (json_string_length(id) == 0)
        return member_error(o, "custom_id", "empty_custom_id", "\"custom_id\" is empty", e);
    if (json_string_length(id) > CUSTOM_ID_MAX_BYTES)
        return member_error(o, "custom_id", "custom_id_too_long", "\"custom_id\" has more than 512 bytes", e);
    if (job_spec_has_nul(id))
        return member_error(o, "custom_id", "invalid_custom_id", "\"custom_id\" holds a NUL character", e);
    out->custom_id = job_spec_copy(id);
    return out->custom_id ? RC_OK : err_no_memory(e);
}

static enum rc read_target(const struct origin *o, const json_t *root, struct job_spec *out, struct err *e)
{
    json_t *method, *url;
    enum rc rc = member(o, root, "method", JSON_STRING, &method, e);
    if (rc == RC_OK && strcmp(json_string_value(method), "POST"))
        rc = member_error(o, "method", "unknown_method", "\"method\" must be \"POST\"", e);
    if (rc == RC_OK) rc = member(o, root, "url", JSON_STRING, &url, e);
    if (rc != RC_OK) return rc;
    const char *text = json_string_value(url);
    if (!strcmp(text, "/v1/chat/completions"))
        out->endpoint = JOB_CHAT;
    else if (!strcmp(text, "/v1/completions"))
        out->endpoint = JOB_COMPLETION;
    else
        return member_error(o, "url", "unknown_url", "\"url\" must be \"/v1/chat/completions\" or \"/v1/completions\"",
                            e);
    return job_spec_has_nul(method) || job_spec_has_nul(url)
               ? member_error(o, "url", "unknown_url", "\"method\" or \"url\" holds a NUL character", e)
               : RC_OK;
}

/* When a job starts decides no answer, so its priority is left out; a wrong one stays: the job's error is about it. */
static bool read_tandem(struct job_spec *out, json_t *tandem)
{
    if (!tandem || json_is_null(tandem)) return true;
    job_spec_tandem(out, tandem);
    if (json_is_object(tandem) && strcmp(out->fault.param, JOB_PRIORITY_PARAM)) json_object_del(tandem, "priority");
    if (json_is_object(tandem) && !json_object_size(tandem)) return true;
    out->canonical_tandem = json_dumps(tandem, JSON_SORT_KEYS | JSON_COMPACT | JSON_ENCODE_ANY);
    return out->canonical_tandem != NULL;
}

static enum rc read_envelope(const struct origin *o, const json_t *root, struct job_spec *out, struct err *e)
{
    if (!json_is_object(root)) {
        enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_JOB_FILE, "wrong_type", "a job must be an object");
        err_place(e, o->source, o->number, 1, o->byte);
        return rc;
    }
    json_t *body;
    enum rc rc = read_custom_id(o, root, out, e);
    if (rc == RC_OK) rc = read_target(o, root, out, e);
    if (rc == RC_OK) rc = member(o, root, "body", JSON_OBJECT, &body, e);
    if (rc != RC_OK) return rc;
    out->canonical_body = json_dumps(body, JSON_SORT_KEYS | JSON_COMPACT);
    if (!out->canonical_body || !job_spec_body(out, body)) return err_no_memory(e);
    return read_tandem(out, json_object_get(root, "tandem")) ? RC_OK : err_no_memory(e);
}

enum rc job_spec_parse(const char *line, size_t len, const char *source, int64_t line_number, int64_t line_byte,
                       struct job_spec *out, struct err *e)
{
    *out = (struct job_spec){0};
    const struct origin o = {.line = line, .len = len, .source = source, .number = line_number, .byte = line_byte};
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL;
    json_error_t je;
    json_t *root = json_loadb(line, len, flags, &je);
    if (!root && json_error_code(&je) == json_error_numeric_overflow)
        root = json_loadb(line, len, flags | JSON_DECODE_INT_AS_REAL, &je);
    if (!root) return syntax_error(&o, &je, e);
    enum rc rc = read_envelope(&o, root, out, e);
    json_decref(root);
    if (rc != RC_OK) job_spec_free(out);
    return rc;
}

void job_spec_free(struct job_spec *s)
{
    for (size_t i = 0; i < s->n_messages; i++) {
        for (size_t j = 0; j < s->messages[i].n_parts; j++) {
            free(s->messages[i].parts[j].text);
            free(s->messages[i].parts[j].document_path);
        }
        free(s->messages[i].parts);
        free(s->messages[i].reasoning);
    }
    free(s->messages);
    for (int i = 0; i < s->n_stop; i++) free(s->stop[i]);
    free(s->stop);
    free(s->canonical_body);
    free(s->canonical_tandem);
    free(s->model);
    free(s->custom_id);
    *s = (struct job_spec){0};
}

uint64_t job_spec_seed(const char *custom_id)
{
    return XXH3_64bits(custom_id, strlen(custom_id)) & (uint64_t)INT64_MAX;
}

void job_spec_check_model(struct job_spec *s, const char *const *names, size_t n_names)
{
    if (!s->model || !strcmp(s->model, "default")) return;
    for (size_t i = 0; i < n_names; i++)
        if (!strcmp(s->model, names[i])) return;
    job_fault_set(&s->fault, 404, "invalid_request_error", "model_not_found", "model",
                  "the model '%s' is not loaded; leave \"model\" out, or name '%s'", s->model,
                  n_names ? names[0] : "default");
}
