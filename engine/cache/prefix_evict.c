/* prefix_evict: one pass over all files, one sort.
 *
 * Files are megabytes and so thousands, not millions: reading their records is cheaper than keeping an order up to date at every
 * use. Marks are followed from their end to the beginning, nearest use first; the first to reach a file is its next use, and so of
 * everything before it, so each file is reached once. */
#include "prefix_evict.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- marks ---- */

static bool key_equal(const struct prefix_key *a, const struct prefix_key *b) { return !memcmp(a, b, sizeof *a); }

static void mark_drop(struct prefix_marks *m, size_t i)
{
    free(m->at[i].keys);
    m->at[i] = m->at[--m->n];
}

enum rc prefix_marks_set(struct prefix_marks *m, struct prefix_key *keys, int n_blocks, int64_t next_use, struct err *e)
{
    for (size_t i = 0; i < m->n; i++)
        if (m->at[i].n_blocks == n_blocks && key_equal(&m->at[i].keys[n_blocks - 1], &keys[n_blocks - 1])) {
            mark_drop(m, i);
            break;
        }
    if (next_use == PREFIX_NEVER) {
        free(keys);
        return RC_OK;
    }
    if (m->n == m->cap) {
        size_t cap = m->cap ? m->cap * 2 : 64, bytes;
        struct prefix_mark *at = size_mul(cap, sizeof *at, &bytes) ? realloc(m->at, bytes) : NULL;
        if (!at) {
            free(keys);
            return err_no_memory(e);
        }
        m->at = at;
        m->cap = cap;
    }
    m->at[m->n++] = (struct prefix_mark){keys, n_blocks, next_use};
    return RC_OK;
}

void prefix_marks_free(struct prefix_marks *m)
{
    while (m->n) mark_drop(m, m->n - 1);
    free(m->at);
    *m = (struct prefix_marks){0};
}

int64_t prefix_marks_next_use(const struct prefix_marks *m, const struct prefix_key *key, int n_blocks)
{
    int64_t next_use = PREFIX_NEVER;
    for (size_t i = 0; i < m->n; i++) {
        const struct prefix_mark *mark = &m->at[i];
        if (mark->n_blocks >= n_blocks && key_equal(&mark->keys[n_blocks - 1], key) && mark->next_use < next_use) next_use = mark->next_use;
    }
    return next_use;
}

/* ---- candidates ---- */

struct candidate {
    struct prefix_name name;
    uint64_t bytes, last_use_us;
    uint32_t first_block;
    int64_t next_use;
    bool kept;
};

struct candidates {
    struct candidate *at;
    size_t n, cap;
};

static int candidate_add(void *ctx, const struct prefix_file *f)
{
    struct candidates *c = ctx;
    if (c->n == c->cap) {
        size_t cap = c->cap ? c->cap * 2 : 256, bytes;
        struct candidate *at = size_mul(cap, sizeof *at, &bytes) ? realloc(c->at, bytes) : NULL;
        if (!at) return ENOMEM;
        c->at = at;
        c->cap = cap;
    }
    c->at[c->n++] = (struct candidate){
        {f->id, (enum prefix_kind)f->kind}, f->bytes, f->last_use_us, f->first_block, PREFIX_NEVER, false};
    return 0;
}

static int by_id(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    return (x->name.id > y->name.id) - (x->name.id < y->name.id);
}

static int by_eviction(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->next_use != y->next_use) return x->next_use > y->next_use ? -1 : 1;
    if (x->next_use == PREFIX_NEVER && x->last_use_us != y->last_use_us) return x->last_use_us < y->last_use_us ? -1 : 1;
    if (x->first_block != y->first_block) return x->first_block > y->first_block ? -1 : 1;
    if (x->name.kind != y->name.kind) return x->name.kind == PREFIX_STATE ? -1 : 1;
    return by_id(a, b);
}

static int by_next_use(const void *a, const void *b)
{
    const struct prefix_mark *const *x = a, *const *y = b;
    return ((*x)->next_use > (*y)->next_use) - ((*x)->next_use < (*y)->next_use);
}

/* The candidate that holds a key, among candidates in the order of ids; NULL: none. */
static int candidate_of(struct prefix_index *ix, MDB_txn *txn, const struct candidates *c, enum prefix_kind kind,
                        const struct prefix_key *key, struct candidate **out)
{
    struct candidate wanted = {.name.kind = kind};
    int mdb = prefix_index_find(ix, txn, kind, key, &wanted.name.id);
    *out = mdb ? NULL : bsearch(&wanted, c->at, c->n, sizeof wanted, by_id);
    return mdb == MDB_NOTFOUND ? 0 : mdb;
}

static int mark_apply(struct prefix_index *ix, MDB_txn *txn, const struct candidates *c, const struct prefix_mark *mark)
{
    struct candidate *at;
    int mdb = 0;
    for (int b = mark->n_blocks - 1; b >= 0 && !mdb; b--) {
        mdb = candidate_of(ix, txn, c, PREFIX_STATE, &mark->keys[b], &at);
        if (at && mark->next_use < at->next_use) at->next_use = mark->next_use;
        if (!mdb) mdb = candidate_of(ix, txn, c, PREFIX_KV, &mark->keys[b], &at);
        if (!at || at->next_use == mark->next_use) continue;
        if (at->next_use < mark->next_use) break;
        at->next_use = mark->next_use;
    }
    return mdb;
}

static int marks_apply(struct prefix_index *ix, MDB_txn *txn, const struct candidates *c, const struct prefix_marks *m)
{
    const struct prefix_mark **order = calloc(m->n + 1, sizeof *order);
    if (!order) return ENOMEM;
    for (size_t i = 0; i < m->n; i++) order[i] = &m->at[i];
    qsort(order, m->n, sizeof *order, by_next_use);
    int mdb = 0;
    for (size_t i = 0; i < m->n && !mdb; i++) mdb = mark_apply(ix, txn, c, order[i]);
    free(order);
    return mdb;
}

static int keep_apply(struct prefix_index *ix, MDB_txn *txn, const struct candidates *c, const struct prefix_mark *keep)
{
    struct candidate *at;
    int mdb = 0;
    for (int b = 0; b < keep->n_blocks && !mdb; b++) {
        mdb = candidate_of(ix, txn, c, PREFIX_KV, &keep->keys[b], &at);
        if (at) at->kept = true;
    }
    return mdb;
}

/* ---- choice ---- */

static bool may_go(const struct candidate *c, const struct prefix_demand *d)
{
    return !c->kept && (c->next_use == PREFIX_NEVER || c->next_use > d->next_use);
}

static int choose(const struct candidates *c, const struct prefix_demand *d, struct prefix_victims *out)
{
    out->at = calloc(c->n + 1, sizeof *out->at);
    if (!out->at) return ENOMEM;
    for (size_t i = 0; i < c->n; i++) {
        const struct candidate *at = &c->at[i];
        bool wanted = at->last_use_us < d->unused_since_us || out->bytes < d->bytes;
        if (!wanted || !may_go(at, d)) continue;
        out->at[out->n++] = at->name;
        out->bytes += at->bytes;
    }
    if (out->n && out->bytes >= d->bytes) return 0;
    out->n = 0;
    out->bytes = 0;
    return PREFIX_NOTHING;
}

int prefix_evict(struct prefix_index *ix, MDB_txn *txn, const struct prefix_demand *d, struct prefix_victims *out)
{
    struct candidates c = {0};
    *out = (struct prefix_victims){0};
    int mdb = prefix_index_each(ix, txn, candidate_add, &c);
    /* The table's order is that of the bytes of ids, not of their values. */
    if (c.n) qsort(c.at, c.n, sizeof *c.at, by_id);
    if (!mdb) mdb = marks_apply(ix, txn, &c, d->marks);
    if (!mdb && d->keep) mdb = keep_apply(ix, txn, &c, d->keep);
    if (c.n) qsort(c.at, c.n, sizeof *c.at, by_eviction);
    if (!mdb) mdb = choose(&c, d, out);
    for (size_t i = 0; i < out->n && !mdb; i++) mdb = prefix_index_remove(ix, txn, out->at[i].id);
    free(c.at);
    return mdb;
}
