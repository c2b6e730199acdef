/* json_text: one pass over the bytes that counts, then jansson.
 *
 * The count is an upper bound for valid JSON: a value follows a bracket, a comma or a colon, or is the root. What the pass
 * takes for structure in text that is not valid JSON does not matter, since that is refused anyway. */
#include "json_text.h"

#include <stdio.h>

static const char *fault_text(enum json_error_code code)
{
    switch (code) {
    case json_error_invalid_utf8: return "not valid UTF-8";
    case json_error_premature_end_of_input: return "the text ends inside a value";
    case json_error_end_of_input_expected: return "something follows the object";
    case json_error_null_character:
    case json_error_null_byte_in_key: return "a NUL character";
    case json_error_duplicate_key: return "a key is given twice";
    case json_error_numeric_overflow: return "a number is too large";
    default: return "not JSON";
    }
}

static enum rc fail(const char *source, int64_t byte, struct err *e, const char *code, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
static enum rc fail(const char *source, int64_t byte, struct err *e, const char *code, const char *format, ...)
{
    char text[160];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, code, "%s", text);
    err_place(e, source, 0, 0, byte);
    return rc;
}

static enum rc measure(const char *text, size_t len, struct json_limits limits, const char *source, int64_t byte_first,
                       struct err *e)
{
    size_t values = 1;
    int depth = 0;
    bool quoted = false;
    if (len > limits.max_bytes)
        return fail(source, byte_first, e, "json_too_long", "%zu bytes of JSON, more than %zu", len, limits.max_bytes);
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (quoted) {
            if (c == '\\')
                i++;
            else if (c == '"')
                quoted = false;
            continue;
        }
        quoted = c == '"';
        bool opens = c == '{' || c == '[';
        values += opens || c == ',' || c == ':';
        depth += opens - (c == '}' || c == ']');
        if (depth > limits.max_depth)
            return fail(source, byte_first + (int64_t)i, e, "json_too_deep", "the JSON nests deeper than %d",
                        limits.max_depth);
        if (values > limits.max_values)
            return fail(source, byte_first + (int64_t)i, e, "json_too_many", "the JSON has more than %zu values",
                        limits.max_values);
    }
    return RC_OK;
}

enum rc json_text_parse(const char *text, size_t len, struct json_limits limits, const char *source, int64_t byte_first,
                        json_t **out, struct err *e)
{
    json_error_t fault;
    enum rc rc = measure(text, len, limits, source, byte_first, e);
    *out = NULL;
    if (rc != RC_OK) return rc;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &fault);
    if (!root) {
        enum json_error_code code = json_error_code(&fault);
        if (code == json_error_out_of_memory) return err_no_memory(e);
        const char *word = code == json_error_duplicate_key ? "json_duplicate" : "json_invalid";
        rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, word, "invalid JSON: %s", fault_text(code));
        bool whole = byte_first == 0;
        err_place(e, source, whole ? fault.line : 0, whole ? fault.column : 0, byte_first + fault.position);
        return rc;
    }
    if (!json_is_object(root)) {
        json_decref(root);
        return fail(source, byte_first, e, "json_invalid", "invalid JSON: an array, not an object");
    }
    *out = root;
    return RC_OK;
}
