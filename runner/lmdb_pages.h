/* lmdb_pages: an LMDB data file, read without LMDB.
 *
 * LMDB trusts its pages. This reader trusts none and stays inside the file whatever it says. It answers two questions: whether the
 * pages of a file hold together, and what entries can still be read of one that do not. It knows what a state uses: data
 * format 1 of 64-bit little-endian machines, named tables, no duplicates. */
#ifndef TANDEM_LMDB_PAGES_H
#define TANDEM_LMDB_PAGES_H

#include "base.h"
#include "lmdb_check.h"
#include "state_codec.h"

/* A mapped file. Nobody may shorten it meanwhile. */
struct lmdb_pages {
    const unsigned char *bytes;
    size_t n_bytes, page_bytes, n_pages; /* whole pages in the file */
    bool known;                 /* one of the first pages says that this is a file of that format, and how long a page is */
};

/* RC_FAILED, EXIT_IO: cannot be opened, or is no regular file. */
enum rc lmdb_pages_open(const char *path, struct lmdb_pages *out, struct err *e);
void lmdb_pages_close(struct lmdb_pages *p);

/* LMDB_GOOD: as far as can be seen, transaction txn_id is whole and may be written on: it was the newest a moment ago; no page of its
 * trees is used twice, is where it should not be, or is listed as free; keys are in order and where a search would look for them.
 * Also for formats that this reader does not know. LMDB_UNREADABLE: two newer ones came meanwhile. The caller holds a
 * reader of that transaction. */
enum lmdb_verdict lmdb_pages_check(const struct lmdb_pages *p, uint64_t txn_id);
/* The part of it that takes no time: the transaction was the newest a moment ago. */
enum lmdb_verdict lmdb_pages_newest(const struct lmdb_pages *p, uint64_t txn_id);

/* Views point into the map. */
typedef void (*lmdb_pages_fn)(void *ctx, struct bytes_view key, struct bytes_view value);
/* Entries of a table, as far as its pages can be followed, as of the newest transaction or the one before. True: all of them, and
 * as far as can be seen it is that transaction. */
bool lmdb_pages_table(const struct lmdb_pages *p, bool newest, const char *name, lmdb_pages_fn fn, void *ctx);
/* Whatever looks like an entry on any page, of all tables, old copies among them. */
void lmdb_pages_scan(const struct lmdb_pages *p, lmdb_pages_fn fn, void *ctx);

#endif
