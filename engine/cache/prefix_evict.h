/* prefix_evict: what has to go when the store is full. Private to the prefix store.
 *
 * The order: what nobody marked, least recently used first; then what is marked, latest use first. Of equals the end of a prompt
 * goes before its beginning, for without its beginning the end cannot be served. */
#ifndef TANDEM_PREFIX_EVICT_H
#define TANDEM_PREFIX_EVICT_H

#include "prefix_index.h"

/* A prompt up to a position, as names of its blocks. */
struct prefix_mark {
    struct prefix_key *keys; /* [n_blocks] */
    int n_blocks;
    int64_t next_use;
};
struct prefix_marks {
    struct prefix_mark *at;
    size_t n, cap;
};
/* keys move in. RC_FATAL: no memory. */
enum rc prefix_marks_set(struct prefix_marks *m, struct prefix_key *keys, int n_blocks, int64_t next_use, struct err *e);
void prefix_marks_free(struct prefix_marks *m);
/* When the block or state that is named key and ends n_blocks blocks is used next. */
int64_t prefix_marks_next_use(const struct prefix_marks *m, const struct prefix_key *key, int n_blocks);

struct prefix_demand {
    const struct prefix_marks *marks;
    const struct prefix_mark *keep; /* blocks that must stay; NULL: none */
    int64_t next_use;               /* of what room is made for: what is needed sooner stays. INT64_MIN: everything may go */
    uint64_t bytes;                 /* to free at least */
    uint64_t unused_since_us;       /* and whatever was last used before this */
};
struct prefix_victims {
    struct prefix_name *at; /* free() */
    size_t n;
    uint64_t bytes;         /* theirs */
};
/* Chooses victims and removes them from the index; their files are the caller's to unlink once txn is committed. When demand
 * cannot be met none is chosen and the result is PREFIX_NOTHING. *out is the caller's to free in every case. */
int prefix_evict(struct prefix_index *ix, MDB_txn *txn, const struct prefix_demand *d, struct prefix_victims *out);

#endif
