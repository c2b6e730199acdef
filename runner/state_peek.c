/* state_peek: the counts of a state, at once.
 *
 * Opening a state reads all of it, because a damaged page kills its reader. Who only wants the counts need not wait for that: a
 * child reads three values of one small table and leaves them in shared memory; if it dies, the state is damaged. */
#define _GNU_SOURCE
#include "state.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "lmdb_check.h"
#include "lmdb_pages.h"
#include "state_codec.h"
#include "state_folder.h"

struct peek {
    const char *folder;
    unsigned version;
    char id[STATE_ID_CHARS + 1];
    struct state_totals totals;
};

static int meta_find(MDB_txn *txn, MDB_dbi meta, const char *name, MDB_val *out)
{
    MDB_val k = {strlen(name), (void *)(uintptr_t)name};
    return mdb_get(txn, meta, &k, out);
}

static bool meta_value(MDB_txn *txn, MDB_dbi meta, const char *name, struct bytes_view *out)
{
    MDB_val v;
    return !meta_find(txn, meta, name, &v) && state_value_open(name, strlen(name), v.mv_data, v.mv_size, out);
}

/* There are no totals before the first registration, and no input digest. */
static bool meta_read(struct peek *p, MDB_txn *txn, MDB_dbi meta)
{
    struct bytes_view v;
    uint64_t commit;
    if (!meta_value(txn, meta, "schema", &v) || !(p->version = state_version_decode(v))) return false;
    if (p->version != STATE_SCHEMA_VERSION) return true;
    if (!meta_value(txn, meta, "id", &v) || v.len != STATE_ID_CHARS) return false;
    memcpy(p->id, v.bytes, STATE_ID_CHARS);
    /* Where a damaged root brought back an old table, its values are whole, and old. */
    if (!meta_value(txn, meta, "commit", &v) || !state_take_u64(&v, &commit) || v.len || commit != mdb_txn_id(txn)) return false;
    MDB_val any;
    if (meta_find(txn, meta, "totals", &any) == MDB_NOTFOUND) return meta_find(txn, meta, "input_digest", &any) == MDB_NOTFOUND;
    return meta_value(txn, meta, "totals", &v) && state_totals_decode(v, &p->totals);
}

/* A damaged number of an old transaction would bring its counts back. */
static enum lmdb_verdict snapshot_begin(const char *folder, MDB_env *env, MDB_txn **txn)
{
    enum { MOST_TRIES = 1000 };
    enum lmdb_verdict found = LMDB_UNREADABLE;
    struct lmdb_pages pages = {0};
    struct buf path = {0};
    if (!buf_printf(&path, "%s/data.mdb", folder)) return found;
    for (int i = 0; i < MOST_TRIES && found == LMDB_UNREADABLE; i++) {
        if (mdb_txn_begin(env, NULL, MDB_RDONLY, txn)) break;
        found = lmdb_pages_open(path.data, &pages, NULL) == RC_OK ? lmdb_pages_newest(&pages, mdb_txn_id(*txn)) : LMDB_DAMAGED;
        lmdb_pages_close(&pages);
        if (found != LMDB_GOOD) mdb_txn_abort(*txn);
    }
    buf_free(&path);
    return found;
}

/* In the child. */
static int look(void *ctx)
{
    struct peek *p = ctx;
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi meta;
    if (mdb_env_create(&env)) return LMDB_UNREADABLE;
    mdb_env_set_maxdbs(env, 1);
    int mdb = mdb_env_open(env, p->folder, MDB_RDONLY | MDB_NOTLS, 0600);
    if (mdb) return mdb == MDB_INVALID || mdb == MDB_CORRUPTED ? LMDB_DAMAGED : LMDB_UNREADABLE;
    const enum lmdb_verdict begun = snapshot_begin(p->folder, env, &txn);
    if (begun != LMDB_GOOD) return (int)begun;
    bool good = !mdb_dbi_open(txn, state_table_names[STATE_META], 0, &meta) && meta_read(p, txn, meta);
    mdb_txn_abort(txn);
    mdb_env_close(env);
    return good ? LMDB_GOOD : LMDB_DAMAGED;
}

static enum rc verdict(const struct peek *p, const struct lmdb_child *child, const char *marker_id, struct err *e)
{
    if (child->status == LMDB_UNREADABLE)
        return err_set(e, RC_FAILED, EXIT_IO, "state_unreadable", "cannot open the state in %s", p->folder);
    if (child->status == LMDB_GOOD && p->version != STATE_SCHEMA_VERSION)
        return err_set(e, RC_FAILED, EXIT_CONFIG, "state_version",
                       "the state in %s has schema version %u, this program knows %d", p->folder, p->version,
                       STATE_SCHEMA_VERSION);
    if (child->status != LMDB_GOOD || strcmp(p->id, marker_id))
        return err_set(e, RC_FAILED, EXIT_IO, "state_damaged", "the state in %s is damaged (its counts cannot be read)",
                       p->folder);
    return RC_OK;
}

enum rc state_peek(const char *folder, enum state_mode mode, struct state_counts *out, char id[STATE_ID_CHARS + 1], struct err *e)
{
    struct state_folder f;
    struct lmdb_child child;
    enum rc rc = state_folder_open(folder, mode, &f, e);
    if (rc != RC_OK) return rc;
    struct peek *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        state_folder_close(&f);
        return err_no_memory(e);
    }
    *p = (struct peek){.folder = folder};
    rc = lmdb_in_child(look, p, &child, e);
    if (rc == RC_OK) rc = verdict(p, &child, f.id, e);
    if (rc == RC_OK) {
        *out = p->totals.counts;
        snprintf(id, STATE_ID_CHARS + 1, "%s", p->id);
    }
    munmap(p, sizeof *p);
    state_folder_close(&f);
    return rc;
}
