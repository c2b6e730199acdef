/* lmdb_check: what has to be known of an LMDB environment before this process opens it.
 *
 * LMDB pages carry no checksums: a truncated or damaged file kills whoever touches the wrong page. So a child process
 * touches everything first. Nothing of LMDB crosses the fork: the environment is opened by the child alone. */
#ifndef TANDEM_LMDB_CHECK_H
#define TANDEM_LMDB_CHECK_H

#include <lmdb.h>

#include "base.h"

/* How a child ended: it left with status, or signal killed it. */
struct lmdb_child {
    int status; /* what work returned, 0..255; -1: killed */
    int signal; /* 0: left by itself */
};
/* Runs work(ctx) in a child that leaves no core dump (records are private), writes nothing to the terminal, dies with
 * its parent and leaves INT, TERM and HUP to it. Cheapest and safest while the process is small and has no other
 * threads. RC_FAILED, EXIT_INTERNAL when there can be no child. */
enum rc lmdb_in_child(int (*work)(void *ctx), void *ctx, struct lmdb_child *out, struct err *e);

enum lmdb_verdict { LMDB_GOOD, LMDB_DAMAGED, LMDB_UNREADABLE /* says nothing about damage: permissions, memory */ };

struct lmdb_walk {
    const char *path;
    unsigned flags;           /* 0, or MDB_NOSUBDIR: path is the data file itself */
    const char *const *tables;
    int n_tables;
    /* Once for every entry of every table; false: it is damaged. Keys and values lie in the map. */
    bool (*entry)(void *ctx, int table, const MDB_val *key, const MDB_val *value);
    /* Before all entries, while nobody can reuse this transaction's pages. LMDB_UNREADABLE: a writer has gone on too far to say
     * anything about it; it is asked again of a newer one. NULL: nothing. */
    enum lmdb_verdict (*snapshot)(void *ctx, uint64_t txn_id);
    void *ctx;
};
/* Touches the free list and every entry. A missing table is an empty one. For a child: damage may kill it. Bounded by the
 * file's size, since damaged pages may point in circles. */
enum lmdb_verdict lmdb_walk(const struct lmdb_walk *w);

/* Gives an environment's lock file, made where it is missing, its place on the disk: LMDB leaves a hole, and who touches a mapped
 * hole that a full disk cannot fill is killed. Before the environment is opened in this process. 0; ENOSPC or EDQUOT: there is
 * no room. Whatever else is wrong with the file, LMDB finds. */
int lmdb_lock_reserve(const char *lock_path);

/* "NFS" and the like where LMDB and its locks do not work, NULL on local disks. */
const char *lmdb_remote_filesystem(int folder_fd);

#endif
