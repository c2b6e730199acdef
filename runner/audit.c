/* audit: sampling and comparing. A key is a SHA-256, so its first bytes are as good as drawn: a job is in the sample when
 * they, as a fraction of all there are, lie below the share. */
#include "audit.h"

#include <stdlib.h>
#include <xxhash.h>

enum { SAMPLE_BYTES = 6 }; /* exact in a double */

bool audit_samples(const unsigned char key[STATE_KEY_BYTES], double percent)
{
    double fraction = 0, unit = 1;
    for (int i = 0; i < SAMPLE_BYTES; i++) fraction += key[i] * (unit /= 256);
    return fraction < percent / 100;
}

static struct audit_digest digest(const void *bytes, size_t n)
{
    XXH128_hash_t h = XXH3_128bits(n ? bytes : "", n);
    return (struct audit_digest){h.low64, h.high64};
}

static struct audit_item item_of(size_t entry, const struct wire_done *d)
{
    return (struct audit_item){.entry = entry, .finish = d->finish, .n_tokens = d->n_tokens,
                               .text = digest(d->text, d->text_len),
                               .tokens = digest(d->tokens, d->n_tokens * sizeof *d->tokens),
                               .trace = digest(d->trace, d->trace ? d->n_tokens * 2 * sizeof *d->trace : 0)};
}

enum rc audit_add(struct audit *a, size_t entry, const struct wire_done *done, struct err *e)
{
    if (a->n == a->cap) {
        size_t cap = a->cap ? 2 * a->cap : 64;
        struct audit_item *more = realloc(a->items, cap * sizeof *more);
        if (!more) return err_no_memory(e);
        a->items = more;
        a->cap = cap;
    }
    a->items[a->n++] = item_of(entry, done);
    return RC_OK;
}

static int by_entry(const void *a, const void *b)
{
    size_t x = ((const struct audit_item *)a)->entry, y = ((const struct audit_item *)b)->entry;
    return (x > y) - (x < y);
}

void audit_sort(struct audit *a)
{
    if (a->n) qsort(a->items, a->n, sizeof *a->items, by_entry);
}

static bool equal(struct audit_digest a, struct audit_digest b) { return a.low == b.low && a.high == b.high; }

static const char *difference(const struct audit_item *first, const struct audit_item *second)
{
    if (!equal(first->text, second->text)) return "the text";
    if (first->n_tokens != second->n_tokens) return "the number of tokens";
    if (!equal(first->tokens, second->tokens)) return "the tokens";
    if (first->finish != second->finish) return "the reason of its end";
    return equal(first->trace, second->trace) ? NULL : "the trace";
}

const char *audit_compare(struct audit *a, const struct audit_item *item, const struct wire_done *done)
{
    const char *what = "the outcome";
    if (done) {
        struct audit_item second = item_of(item->entry, done);
        what = difference(item, &second);
    }
    a->computed++;
    a->different += what != NULL;
    return what;
}

void audit_free(struct audit *a)
{
    free(a->items);
    *a = (struct audit){0};
}
