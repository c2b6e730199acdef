/* tokenizer_nfc: NFC for the tokenizers that were trained behind it (qwen2).
 *
 * No character below U+0300 changes or joins the one before it, so text is cut in front of each of them. A stretch of
 * nothing else is copied as it is; one with higher characters is normalized as a whole. Decomposition and composition
 * of single characters are utf8proc's; the ordering of marks is done here, because utf8proc's exchanges neighbours,
 * and a megabyte of marks in the wrong order would keep it busy for minutes. Here it is a counting sort over the 256
 * combining classes for every run of marks. */
#define _GNU_SOURCE
#include "tokenizer_nfc.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "utf8.h"

enum { MAX_DECOMPOSED = 16, PLAIN_BELOW = 0x300 };

/* Code points of the stretch being normalized. */
struct codes {
    int32_t *at;
    size_t len, cap;
};

static bool codes_reserve(struct codes *c, size_t extra)
{
    size_t need;
    if (!size_add(c->len, extra, &need)) return false;
    if (need <= c->cap) return true;
    size_t cap;
    if (!size_mul(need, 2, &cap)) return false;
    int32_t *at = reallocarray(c->at, cap, sizeof *at);
    if (!at) return false;
    c->at = at;
    c->cap = cap;
    return true;
}

static unsigned class_of(int32_t code) { return (unsigned)utf8proc_get_property(code)->combining_class & 0xffu; }

static bool decompose(struct codes *c, const char *text, size_t len)
{
    for (size_t at = 0; at < len;) {
        struct utf8_step s = utf8_next(text + at, len - at);
        if (!codes_reserve(c, MAX_DECOMPOSED)) return false;
        utf8proc_ssize_t n =
            utf8proc_decompose_char((utf8proc_int32_t)s.code, c->at + c->len, MAX_DECOMPOSED, UTF8PROC_DECOMPOSE, NULL);
        if (n < 0 || n > MAX_DECOMPOSED) return false;
        c->len += (size_t)n;
        at += s.n_bytes;
    }
    return true;
}

/* Puts every run of marks into the order of their classes, equal classes left as they are. */
static bool order_marks(struct codes *c)
{
    int32_t *sorted = NULL;
    for (size_t from = 0; from < c->len;) {
        if (class_of(c->at[from]) == 0) {
            from++;
            continue;
        }
        size_t start[257] = {0}, to = from;
        bool in_order = true;
        unsigned last = 0;
        for (unsigned now; to < c->len && (now = class_of(c->at[to])) != 0; to++) {
            start[now + 1]++;
            in_order = in_order && now >= last;
            last = now;
        }
        if (!in_order) {
            if (!sorted && !(sorted = reallocarray(NULL, c->len, sizeof *sorted))) return false;
            for (size_t i = 1; i < 257; i++) start[i] += start[i - 1];
            for (size_t i = from; i < to; i++) sorted[start[class_of(c->at[i])]++] = c->at[i];
            memcpy(c->at + from, sorted, (to - from) * sizeof *sorted);
        }
        from = to;
    }
    free(sorted);
    return true;
}

static bool append_codes(struct buf *out, const struct codes *c)
{
    for (size_t i = 0; i < c->len; i++) {
        char bytes[4];
        size_t n = utf8_put(bytes, (uint32_t)c->at[i]);
        if (!buf_append(out, bytes, n)) return false;
    }
    return true;
}

static bool normalize(struct buf *out, struct codes *c, const char *text, size_t len)
{
    c->len = 0;
    if (!decompose(c, text, len) || !order_marks(c)) return false;
    utf8proc_ssize_t n = utf8proc_normalize_utf32(c->at, (utf8proc_ssize_t)c->len, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    if (n < 0) return false;
    c->len = (size_t)n;
    return append_codes(out, c);
}

/* Length of the beginning that is its own normal form whatever follows: characters below U+0300, but for the last one
 * before a higher character, which may join it. */
static size_t plain_length(const char *text, size_t len)
{
    size_t at = 0, last = 0;
    while (at < len) {
        struct utf8_step s = utf8_next(text + at, len - at);
        if (s.code >= PLAIN_BELOW) return last;
        last = at;
        at += s.n_bytes;
    }
    return len;
}

/* Length of the stretch to normalize: the first character and all that may join it. */
static size_t joined_length(const char *text, size_t len)
{
    size_t at = 0;
    while (at < len) {
        struct utf8_step s = utf8_next(text + at, len - at);
        if (at > 0 && s.code < PLAIN_BELOW) break;
        at += s.n_bytes;
    }
    return at;
}

bool nfc_append(struct buf *out, const char *text, size_t len)
{
    struct codes c = {0};
    bool ok = true;
    for (size_t at = 0; ok && at < len;) {
        size_t plain = plain_length(text + at, len - at);
        ok = buf_append(out, text + at, plain);
        at += plain;
        size_t joined = joined_length(text + at, len - at);
        ok = ok && normalize(out, &c, text + at, joined);
        at += joined;
    }
    free(c.at);
    return ok;
}
