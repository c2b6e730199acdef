/* json_text: JSON from outside, measured before it is parsed.
 *
 * Private to the engine. A parser's memory is a multiple of its input, its stack grows with the nesting: both are bounded
 * by counting brackets and commas first. Keys are unique, text is valid UTF-8 without NUL. */
#ifndef TANDEM_JSON_TEXT_H
#define TANDEM_JSON_TEXT_H

#include <jansson.h>

#include "base.h"

struct json_limits {
    size_t max_bytes;
    size_t max_values; /* objects, arrays, members and elements together */
    int max_depth;     /* of objects and arrays */
};

/* Parses one object. byte_first: where the text begins in its source; 0 stands for a file of nothing but text, whose
 * errors name line and column. The caller frees *out with json_decref. RC_BAD_INPUT, EXIT_UNAVAILABLE with source and
 * byte: codes json_too_long, json_too_many, json_too_deep, json_duplicate, json_invalid. */
enum rc json_text_parse(const char *text, size_t len, struct json_limits limits, const char *source, int64_t byte_first,
                        json_t **out, struct err *e);

#endif
