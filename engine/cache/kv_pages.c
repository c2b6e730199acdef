/* kv_pages: a stack of free page ids. Pages start in rising order, so an unused tail of the store is never touched and
 * costs no resident memory. */
#include "kv_pages.h"

#include <stdlib.h>

#include "kern.h"

enum rc kv_pages_open(int n_pages, struct kv_pages *out, struct err *e)
{
    *out = (struct kv_pages){0};
    out->free_ids = calloc((size_t)n_pages, sizeof *out->free_ids);
    if (!out->free_ids) return err_no_memory(e);
    out->n_pages = n_pages;
    for (int i = n_pages - 1; i >= 0; i--) kv_pages_give(out, i);
    return RC_OK;
}

void kv_pages_close(struct kv_pages *p)
{
    free(p->free_ids);
    *p = (struct kv_pages){0};
}

int32_t kv_pages_take(struct kv_pages *p) { return p->n_free ? p->free_ids[--p->n_free] : -1; }

void kv_pages_give(struct kv_pages *p, int32_t id) { p->free_ids[p->n_free++] = id; }

int kv_pages_for(int64_t tokens) { return (int)((tokens + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS); }
