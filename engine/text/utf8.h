/* utf8: the strict decoder behind utf8_valid, utf8_append_complete and the tokenizer (private to engine/text). */
#ifndef TANDEM_UTF8_H
#define TANDEM_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum utf8_kind {
    UTF8_CHAR,      /* a whole character */
    UTF8_INVALID,   /* cannot start or go on a character; n_bytes is the maximal subpart, at least 1 */
    UTF8_INCOMPLETE /* the text ends inside a character that is right so far; n_bytes reaches its end */
};

struct utf8_step {
    enum utf8_kind kind;
    uint32_t code; /* UTF8_CHAR alone */
    size_t n_bytes;
};

/* Looks at the first character of bytes[0..len), len > 0. Surrogates, overlong forms and codes above U+10FFFF are
 * invalid. */
struct utf8_step utf8_next(const char *bytes, size_t len);
/* Writes a code point below 0x110000 (no surrogate) and returns its length, 1..4. */
size_t utf8_put(char out[4], uint32_t code);

#endif
