/* text_check: what the job files' side needs to know about UTF-8. Private to jobs/. */
#ifndef TANDEM_TEXT_CHECK_H
#define TANDEM_TEXT_CHECK_H

#include "base.h"

/* Well-formed UTF-8: no overlong forms, no surrogates, nothing above U+10FFFF. U+0000 is well-formed. */
bool text_is_utf8(const char *bytes, size_t len);
/* Appends bytes with every byte that belongs to no well-formed character replaced by U+FFFD. */
bool text_append_repaired(struct buf *out, const char *bytes, size_t len);
/* Appends text for a terminal: control characters become '?', what is longer than most bytes is cut and ends in "...". */
bool text_append_printable(struct buf *out, const char *text, size_t most);
/* The longest prefix of bytes (len bytes, cut at any place) that does not end inside a character. */
size_t text_cut(const char *bytes, size_t len);

#endif
