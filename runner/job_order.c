/* job_order: prefix hashes, and a sort by priorities and them. */
#define _GNU_SOURCE
#include "job_order.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* ---- heads ---- */

struct head_writer {
    XXH3_state_t *state;
    struct job_head *out;
    size_t n_bytes; /* so far */
    int next;       /* the cut that is still to come */
};

static void write_bytes(struct head_writer *w, const void *bytes, size_t n)
{
    const char *at = bytes;
    while (n && w->next < JOB_HEAD_CUTS) {
        const size_t left = ((size_t)JOB_HEAD_FIRST_BYTES << w->next) - w->n_bytes, part = n < left ? n : left;
        XXH3_64bits_update(w->state, at, part);
        w->n_bytes += part;
        at += part;
        n -= part;
        if (part == left) w->out->cut[w->next++] = (uint32_t)XXH3_64bits_digest(w->state);
    }
}

void job_head_make(const struct job_spec *s, const unsigned char *document_digests, size_t n_document_bytes, struct job_head *out)
{
    enum { DIGEST_BYTES = 32 };
    struct head_writer w = {.state = XXH3_createState(), .out = out};
    size_t document = 0;
    *out = (struct job_head){0};
    if (!w.state) return; /* alike, then */
    XXH3_64bits_reset(w.state);
    for (size_t i = 0; i < s->n_messages; i++) {
        const struct job_message *m = &s->messages[i];
        write_bytes(&w, m->role, strlen(m->role) + 1);
        for (size_t j = 0; j < m->n_parts; j++) {
            const struct job_part *p = &m->parts[j];
            if (p->text) write_bytes(&w, p->text, p->text_len);
            else if (document_digests && (document + 1) * DIGEST_BYTES <= n_document_bytes)
                write_bytes(&w, document_digests + document++ * DIGEST_BYTES, DIGEST_BYTES);
            else if (p->document_path) write_bytes(&w, p->document_path, strlen(p->document_path));
        }
    }
    const uint32_t all = (uint32_t)XXH3_64bits_digest(w.state);
    while (w.next < JOB_HEAD_CUTS) out->cut[w.next++] = all;
    XXH3_freeState(w.state);
}

/* ---- order ---- */

static int by_order(const void *a, const void *b, void *argument)
{
    const struct job_order *o = argument;
    const size_t x = *(const size_t *)a, y = *(const size_t *)b;
    const int px = o->priority_of(o->ctx, x), py = o->priority_of(o->ctx, y);
    if (px != py) return px > py ? -1 : 1;
    if (o->head_of) {
        const struct job_head *hx = o->head_of(o->ctx, x), *hy = o->head_of(o->ctx, y);
        for (int i = 0; i < JOB_HEAD_CUTS; i++)
            if (hx->cut[i] != hy->cut[i]) return hx->cut[i] < hy->cut[i] ? -1 : 1;
    }
    return x < y ? -1 : x > y;
}

void job_order_sort(const struct job_order *o, size_t *indices, size_t n)
{
    qsort_r(indices, n, sizeof *indices, by_order, (void *)(uintptr_t)o);
}
