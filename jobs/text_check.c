/* text_check: UTF-8 as utf8proc reads it, one character at a time.
 *
 * Three users with three needs: documents must be well-formed or are refused, fault texts (which may hold operating
 * system messages or cut names) are repaired because a record must be written in any case, and fixed fields are cut
 * between characters. jobs/ may not include engine/text, hence a check of its own. */
#include "text_check.h"

#include <string.h>

#include <utf8proc.h>

/* Bytes of the character at bytes[0]; 0 when there is no well-formed one. */
static size_t character_bytes(const char *bytes, size_t len)
{
    if ((unsigned char)bytes[0] < 0x80) return 1;
    utf8proc_int32_t point;
    size_t window = len < 4 ? len : 4;
    utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)bytes, (utf8proc_ssize_t)window, &point);
    return n > 0 ? (size_t)n : 0;
}

bool text_is_utf8(const char *bytes, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = character_bytes(bytes + i, len - i);
        if (!n) return false;
        i += n;
    }
    return true;
}

bool text_append_repaired(struct buf *out, const char *bytes, size_t len)
{
    for (size_t i = 0; i < len;) {
        size_t n = character_bytes(bytes + i, len - i);
        if (n)
            buf_append(out, bytes + i, n);
        else
            buf_append(out, "\xEF\xBF\xBD", 3);
        i += n ? n : 1;
    }
    return !out->failed;
}

size_t text_cut(const char *bytes, size_t len)
{
    for (size_t back = 1; back <= 4 && back <= len; back++) {
        unsigned char c = (unsigned char)bytes[len - back];
        if ((c & 0xC0) == 0x80) continue;
        size_t whole = c < 0x80 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
        return back >= whole ? len : len - back;
    }
    return len;
}

bool text_append_printable(struct buf *out, const char *text, size_t most)
{
    size_t len = strlen(text);
    bool cut = len > most;
    if (cut) len = text_cut(text, most);
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)text[i], next = (unsigned char)text[i + 1];
        bool c1 = c == 0xC2 && next >= 0x80 && next <= 0x9F; /* U+0080 to U+009F */
        buf_append(out, c < 0x20 || c == 0x7F || c1 ? "?" : text + i, 1);
        i += c1;
    }
    if (cut) buf_append_str(out, "...");
    return !out->failed;
}
