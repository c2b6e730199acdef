/* prefix_index: the LMDB tables of one rank's store. Private to the prefix store.
 *
 *   files   id -> what a payload file holds, its size and last use
 *   blocks  key -> id of the KV file that holds it            states  key -> id of the state file
 *   meta    "totals" -> sums over files, changed in the transaction that changes files
 *
 * Every value carries a checksum that its key is part of; a wrong one is as good as absent. blocks and states follow from files.
 * int results are LMDB's codes. */
#ifndef TANDEM_PREFIX_INDEX_H
#define TANDEM_PREFIX_INDEX_H

#include <lmdb.h>

#include "prefix_payload.h"

enum prefix_table { PREFIX_FILES, PREFIX_BLOCKS, PREFIX_STATES, PREFIX_META, PREFIX_TABLES };
extern const char *const prefix_table_names[PREFIX_TABLES];

/* Stored as is, as far as n_blocks reaches. */
struct prefix_file {
    uint64_t id, bytes, last_use_us;
    uint32_t kind, first_block, n_blocks, zero;
    struct prefix_key keys[PREFIX_FILE_BLOCKS];
};

struct prefix_totals {
    uint64_t files, bytes;
    uint64_t last_stamp_us; /* the greatest last_use_us ever given */
};

struct prefix_index {
    MDB_env *env;
    MDB_dbi tables[PREFIX_TABLES];
};

/* path: the data file; made where it is missing. quick: nothing is synced until the environment is closed by
 * prefix_index_close_synced. */
int prefix_index_open(const char *path, bool quick, struct prefix_index *out);
void prefix_index_close(struct prefix_index *ix);
int prefix_index_close_synced(struct prefix_index *ix);

/* LMDB's code as an error: RC_FATAL when the environment is of no more use. */
enum rc prefix_index_error(int mdb, const char *what, struct err *e);

/* A change: returns LMDB's code, or PREFIX_NOTHING to abandon the transaction; may be called again from the beginning when the
 * map had to grow. */
enum { PREFIX_NOTHING = 1 << 20 };
typedef int (*prefix_change_fn)(struct prefix_index *ix, MDB_txn *txn, void *ctx);
int prefix_index_change(struct prefix_index *ix, prefix_change_fn apply, void *ctx);
int prefix_index_read(struct prefix_index *ix, MDB_txn **txn); /* mdb_txn_abort ends it */

/* MDB_NOTFOUND also for what is damaged. */
int prefix_index_find(struct prefix_index *ix, MDB_txn *txn, enum prefix_kind kind, const struct prefix_key *key, uint64_t *id);
int prefix_index_file(struct prefix_index *ix, MDB_txn *txn, uint64_t id, struct prefix_file *out);
int prefix_index_totals(struct prefix_index *ix, MDB_txn *txn, struct prefix_totals *out); /* zeros where there are none */
/* fn's result that is not 0 ends it. fn changes nothing. */
int prefix_index_each(struct prefix_index *ix, MDB_txn *txn, int (*fn)(void *ctx, const struct prefix_file *f), void *ctx);

/* Adds a file for those of its keys that no other file holds. PREFIX_NOTHING: for none. */
int prefix_index_add(struct prefix_index *ix, MDB_txn *txn, const struct prefix_file *f);
/* Its record and the keys that it holds; totals follow. Absent is fine. */
int prefix_index_remove(struct prefix_index *ix, MDB_txn *txn, uint64_t id);
/* The same, and the key that led to it, in case its record is gone. */
int prefix_index_forget(struct prefix_index *ix, MDB_txn *txn, struct prefix_name n, const struct prefix_key *key);
/* Marks files as used now, all with the same stamp. */
int prefix_index_touch(struct prefix_index *ix, MDB_txn *txn, const uint64_t *ids, size_t n_ids);

/* For a walk over an environment that may be damaged: is this entry one of table's? *file is set for PREFIX_FILES. */
bool prefix_index_entry(enum prefix_table table, const MDB_val *key, const MDB_val *value, struct prefix_file *file);

#endif
