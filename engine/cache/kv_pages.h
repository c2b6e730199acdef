/* kv_pages: which pages of the KV store are free. Ids only; the bytes are the kernel backend's.
 *
 * Every rank of a group keeps the same list in the same order, because only plans move pages: that is what makes page
 * numbers (never their contents) comparable. */
#ifndef TANDEM_KV_PAGES_H
#define TANDEM_KV_PAGES_H

#include "base.h"

struct kv_pages {
    int32_t *free_ids; /* a stack; the most recently freed page is taken first, it is warm */
    int n_free;
    int n_pages;
};

enum rc kv_pages_open(int n_pages, struct kv_pages *out, struct err *e);
void kv_pages_close(struct kv_pages *p);
/* -1: none free. */
int32_t kv_pages_take(struct kv_pages *p);
void kv_pages_give(struct kv_pages *p, int32_t id);

/* Pages that hold positions 0 .. tokens-1. */
int kv_pages_for(int64_t tokens);

#endif
