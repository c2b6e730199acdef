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
    void *ctx;
};
/* Touches the free list and every entry. A missing table is an empty one. For a child: damage may kill it. Bounded by the
 * file's size, since damaged pages may point in circles. */
enum lmdb_verdict lmdb_walk(const struct lmdb_walk *w);

/* "NFS" and the like where LMDB and its locks do not work, NULL on local disks. */
const char *lmdb_remote_filesystem(int folder_fd);

#endif
