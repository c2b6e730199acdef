/* utf8: one strict decoder, and the two questions asked about model output and job texts.
 *
 * The decoder follows the table of well-formed byte sequences of the Unicode standard: the second byte's range depends
 * on the first, the others are 80..BF. An ill-formed sequence ends before the first byte that cannot belong to it
 * ("maximal subpart"), so that one damaged character becomes one U+FFFD and the byte after it is looked at afresh;
 * this is what browsers and Rust do. Nothing is allocated here but by the caller's buffer. */
#include "utf8.h"

#include "tokenizer.h"

static struct utf8_step step(enum utf8_kind kind, uint32_t code, size_t n_bytes)
{
    return (struct utf8_step){kind, code, n_bytes};
}

/* What a first byte promises: length, allowed range of the second byte, payload bits. Length 0: no first byte. */
struct lead {
    size_t n_bytes;
    unsigned char low, high;
    uint32_t bits;
};

static struct lead lead_of(unsigned char b)
{
    if (b < 0xc2 || b > 0xf4) return (struct lead){0};
    if (b < 0xe0) return (struct lead){2, 0x80, 0xbf, b & 0x1fu};
    if (b < 0xf0) return (struct lead){3, b == 0xe0 ? 0xa0 : 0x80, b == 0xed ? 0x9f : 0xbf, b & 0x0fu};
    return (struct lead){4, b == 0xf0 ? 0x90 : 0x80, b == 0xf4 ? 0x8f : 0xbf, b & 0x07u};
}

struct utf8_step utf8_next(const char *bytes, size_t len)
{
    const unsigned char *b = (const unsigned char *)bytes;
    if (b[0] < 0x80) return step(UTF8_CHAR, b[0], 1);
    struct lead lead = lead_of(b[0]);
    if (!lead.n_bytes) return step(UTF8_INVALID, 0, 1);
    uint32_t code = lead.bits;
    for (size_t i = 1; i < lead.n_bytes; i++) {
        if (i == len) return step(UTF8_INCOMPLETE, 0, len);
        unsigned char low = i == 1 ? lead.low : 0x80, high = i == 1 ? lead.high : 0xbf;
        if (b[i] < low || b[i] > high) return step(UTF8_INVALID, 0, i);
        code = code << 6 | (b[i] & 0x3fu);
    }
    return step(UTF8_CHAR, code, lead.n_bytes);
}

size_t utf8_put(char out[4], uint32_t code)
{
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    size_t n = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n - 1; i > 0; i--) {
        out[i] = (char)(0x80 | (code & 0x3f));
        code >>= 6;
    }
    out[0] = (char)(lead[n] | code);
    return n;
}

bool utf8_append_complete(struct buf *out, const char *bytes, size_t len)
{
    size_t good = 0; /* start of the valid stretch not yet copied */
    for (size_t at = 0; at < len;) {
        struct utf8_step s = utf8_next(bytes + at, len - at);
        if (s.kind == UTF8_CHAR) {
            at += s.n_bytes;
            continue;
        }
        if (!buf_append(out, bytes + good, at - good)) return false;
        if (s.kind == UTF8_INCOMPLETE) return true;
        if (!buf_append_str(out, "\xef\xbf\xbd")) return false;
        at += s.n_bytes;
        good = at;
    }
    return buf_append(out, bytes + good, len - good);
}

bool utf8_valid(const char *bytes, size_t len)
{
    for (size_t at = 0; at < len;) {
        struct utf8_step s = utf8_next(bytes + at, len - at);
        if (s.kind != UTF8_CHAR) return false;
        at += s.n_bytes;
    }
    return true;
}
