/* prefix_index: records in and out of LMDB.
 *
 * No WRITEMAP: a full disk under a writable map is SIGBUS. NOMETASYNC: a power cut may undo the last commit, which leaves a
 * payload file that the next opening adopts, or an entry without its file, which is a miss. The map is address space; it doubles
 * when it is full, so every change is a function that can run twice. */
#define _GNU_SOURCE
#include "prefix_index.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

#include "lmdb_check.h"

const char *const prefix_table_names[PREFIX_TABLES] = {"files", "blocks", "states", "meta"};

static const size_t first_map_bytes = (size_t)4 << 30;
static const size_t smallest_map_bytes = (size_t)16 << 20;
static const size_t largest_map_bytes = (size_t)1 << 40;

/* Part of every checksum: values of another layout are damaged values. */
enum { INDEX_VERSION = 1 };

/* ---- values ---- */

enum { CHECKSUM_BYTES = 8, VALUE_MAX_BYTES = CHECKSUM_BYTES + sizeof(struct prefix_file) };

static uint64_t value_checksum(enum prefix_table table, const MDB_val *key, const void *bytes, size_t n)
{
    const uint32_t place[] = {INDEX_VERSION, (uint32_t)table};
    uint64_t seed = XXH3_64bits_withSeed(key->mv_data, key->mv_size, XXH3_64bits(place, sizeof place));
    return XXH3_64bits_withSeed(bytes, n, seed);
}

static int value_put(struct prefix_index *ix, MDB_txn *txn, enum prefix_table table, MDB_val key, const void *bytes, size_t n)
{
    char sealed[VALUE_MAX_BYTES];
    uint64_t sum = value_checksum(table, &key, bytes, n);
    memcpy(sealed, &sum, sizeof sum);
    memcpy(sealed + sizeof sum, bytes, n);
    MDB_val value = {sizeof sum + n, sealed};
    return mdb_put(txn, ix->tables[table], &key, &value, 0);
}

/* What a sealed value holds, or NULL. */
static const char *value_open(enum prefix_table table, const MDB_val *key, const MDB_val *value, size_t *n)
{
    uint64_t sum;
    if (value->mv_size < sizeof sum || value->mv_size > VALUE_MAX_BYTES) return NULL;
    memcpy(&sum, value->mv_data, sizeof sum);
    const char *bytes = (const char *)value->mv_data + sizeof sum;
    *n = value->mv_size - sizeof sum;
    return sum == value_checksum(table, key, bytes, *n) ? bytes : NULL;
}

static bool file_decode(const MDB_val *key, const char *bytes, size_t n, struct prefix_file *out)
{
    const size_t head = offsetof(struct prefix_file, keys);
    if (!bytes || n < head || n > sizeof *out) return false;
    *out = (struct prefix_file){0};
    memcpy(out, bytes, n);
    return out->n_blocks >= 1 && out->n_blocks <= PREFIX_FILE_BLOCKS && n == head + out->n_blocks * sizeof *out->keys &&
           (out->kind == PREFIX_KV || (out->kind == PREFIX_STATE && out->n_blocks == 1)) &&
           out->first_block <= (uint32_t)INT32_MAX / PREFIX_BLOCK_TOKENS && key->mv_size == sizeof out->id &&
           memcmp(key->mv_data, &out->id, sizeof out->id) == 0;
}

static enum prefix_table key_table(uint32_t kind) { return kind == PREFIX_STATE ? PREFIX_STATES : PREFIX_BLOCKS; }

static MDB_val id_key(const uint64_t *id) { return (MDB_val){sizeof *id, (void *)(uintptr_t)id}; }
static MDB_val block_key(const struct prefix_key *k) { return (MDB_val){sizeof k->bytes, (void *)(uintptr_t)k->bytes}; }
static MDB_val totals_key(void)
{
    static char name[] = "totals";
    return (MDB_val){sizeof name - 1, name};
}

bool prefix_index_entry(enum prefix_table table, const MDB_val *key, const MDB_val *value, struct prefix_file *file)
{
    size_t n = 0;
    const char *bytes = value_open(table, key, value, &n);
    if (table == PREFIX_FILES) return file_decode(key, bytes, n, file);
    if (table == PREFIX_META) return bytes && n == sizeof(struct prefix_totals);
    return bytes && n == sizeof(uint64_t) && key->mv_size == sizeof(struct prefix_key);
}

/* ---- opening ---- */

static int tables_open(struct prefix_index *ix, MDB_txn *txn, void *ctx)
{
    (void)ctx;
    int mdb = 0;
    for (int t = 0; t < PREFIX_TABLES && !mdb; t++) mdb = mdb_dbi_open(txn, prefix_table_names[t], MDB_CREATE, &ix->tables[t]);
    return mdb;
}

/* Less address space than asked for is no reason to fail. */
static int environment_open(const char *path, unsigned flags, MDB_env **out)
{
    char lock[PATH_MAX];
    int mdb = snprintf(lock, sizeof lock, "%s-lock", path) < (int)sizeof lock ? lmdb_lock_reserve(lock) : ENAMETOOLONG;
    if (mdb) return mdb;
    mdb = ENOMEM;
    for (size_t map = first_map_bytes; mdb == ENOMEM && map >= smallest_map_bytes; map /= 2) {
        if ((mdb = mdb_env_create(out))) return mdb;
        mdb_env_set_maxdbs(*out, PREFIX_TABLES);
        mdb_env_set_mapsize(*out, map);
        mdb = mdb_env_open(*out, path, flags | MDB_NOSUBDIR | MDB_NOTLS, 0600);
        if (mdb) mdb_env_close(*out);
    }
    if (mdb) *out = NULL;
    return mdb;
}

int prefix_index_open(const char *path, bool quick, struct prefix_index *out)
{
    *out = (struct prefix_index){0};
    int dead, mdb = environment_open(path, quick ? MDB_NOSYNC : MDB_NOMETASYNC, &out->env);
    if (mdb) return mdb;
    /* A dead process's reader would keep pages from being used again. */
    mdb_reader_check(out->env, &dead);
    mdb = prefix_index_change(out, tables_open, NULL);
    if (mdb) prefix_index_close(out);
    return mdb;
}

void prefix_index_close(struct prefix_index *ix)
{
    if (ix->env) mdb_env_close(ix->env);
    *ix = (struct prefix_index){0};
}

int prefix_index_close_synced(struct prefix_index *ix)
{
    int mdb = mdb_env_sync(ix->env, 1);
    prefix_index_close(ix);
    return mdb;
}

enum rc prefix_index_error(int mdb, const char *what, struct err *e)
{
    if (mdb == ENOMEM) return err_no_memory(e);
    /* A commit on a full disk says EIO as often as ENOSPC; either way nothing of it happened. */
    bool full = mdb == ENOSPC || mdb == EDQUOT || mdb == MDB_MAP_FULL;
    bool dead = mdb == MDB_PANIC || mdb == MDB_CORRUPTED || mdb == MDB_PAGE_NOTFOUND || mdb == MDB_INVALID ||
                mdb == MDB_VERSION_MISMATCH;
    return err_set(e, dead ? RC_FATAL : RC_FAILED, EXIT_IO, full ? "store_disk_full" : dead ? "store_damaged" : "store_io",
                   "the index of the cache: %s: %s", what, mdb_strerror(mdb));
}

/* ---- transactions ---- */

static int begin(struct prefix_index *ix, unsigned flags, MDB_txn **txn)
{
    int mdb = mdb_txn_begin(ix->env, NULL, flags, txn);
    /* Another process has grown the map. */
    if (mdb == MDB_MAP_RESIZED && !(mdb = mdb_env_set_mapsize(ix->env, 0))) mdb = mdb_txn_begin(ix->env, NULL, flags, txn);
    return mdb;
}

int prefix_index_read(struct prefix_index *ix, MDB_txn **txn) { return begin(ix, MDB_RDONLY, txn); }

static int map_grow(struct prefix_index *ix)
{
    MDB_envinfo info;
    mdb_env_info(ix->env, &info);
    return info.me_mapsize >= largest_map_bytes ? MDB_MAP_FULL : mdb_env_set_mapsize(ix->env, info.me_mapsize * 2);
}

int prefix_index_change(struct prefix_index *ix, prefix_change_fn apply, void *ctx)
{
    for (;;) {
        MDB_txn *txn;
        int mdb = begin(ix, 0, &txn);
        if (mdb) return mdb;
        mdb = apply(ix, txn, ctx);
        if (mdb)
            mdb_txn_abort(txn);
        else
            mdb = mdb_txn_commit(txn);
        if (mdb == PREFIX_NOTHING) return 0;
        if (mdb != MDB_MAP_FULL || (mdb = map_grow(ix))) return mdb;
    }
}

/* ---- records ---- */

/* What lies at a key; MDB_NOTFOUND when it is damaged. The bytes are valid until the transaction writes or ends. */
static int value_get(struct prefix_index *ix, MDB_txn *txn, enum prefix_table table, MDB_val key, const char **bytes, size_t *n)
{
    MDB_val value;
    int mdb = mdb_get(txn, ix->tables[table], &key, &value);
    if (mdb) return mdb;
    *bytes = value_open(table, &key, &value, n);
    return *bytes ? 0 : MDB_NOTFOUND;
}

int prefix_index_find(struct prefix_index *ix, MDB_txn *txn, enum prefix_kind kind, const struct prefix_key *key, uint64_t *id)
{
    const char *bytes;
    size_t n;
    int mdb = value_get(ix, txn, key_table(kind), block_key(key), &bytes, &n);
    if (mdb) return mdb;
    if (n != sizeof *id) return MDB_NOTFOUND;
    memcpy(id, bytes, sizeof *id);
    return 0;
}

int prefix_index_file(struct prefix_index *ix, MDB_txn *txn, uint64_t id, struct prefix_file *out)
{
    const char *bytes;
    size_t n;
    MDB_val key = id_key(&id);
    int mdb = value_get(ix, txn, PREFIX_FILES, key, &bytes, &n);
    if (mdb) return mdb;
    return file_decode(&key, bytes, n, out) ? 0 : MDB_NOTFOUND;
}

static int file_put(struct prefix_index *ix, MDB_txn *txn, const struct prefix_file *f)
{
    return value_put(ix, txn, PREFIX_FILES, id_key(&f->id), f, offsetof(struct prefix_file, keys) + f->n_blocks * sizeof *f->keys);
}

int prefix_index_totals(struct prefix_index *ix, MDB_txn *txn, struct prefix_totals *out)
{
    const char *bytes;
    size_t n;
    *out = (struct prefix_totals){0};
    int mdb = value_get(ix, txn, PREFIX_META, totals_key(), &bytes, &n);
    if (!mdb && n == sizeof *out) memcpy(out, bytes, sizeof *out);
    return mdb == MDB_NOTFOUND ? 0 : mdb;
}

static int totals_put(struct prefix_index *ix, MDB_txn *txn, const struct prefix_totals *t)
{
    return value_put(ix, txn, PREFIX_META, totals_key(), t, sizeof *t);
}

int prefix_index_each(struct prefix_index *ix, MDB_txn *txn, int (*fn)(void *ctx, const struct prefix_file *f), void *ctx)
{
    MDB_cursor *cursor;
    MDB_val key, value;
    struct prefix_file f;
    int mdb = mdb_cursor_open(txn, ix->tables[PREFIX_FILES], &cursor);
    if (mdb) return mdb;
    while (!mdb && !(mdb = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)))
        if (prefix_index_entry(PREFIX_FILES, &key, &value, &f)) mdb = fn(ctx, &f);
    mdb_cursor_close(cursor);
    return mdb == MDB_NOTFOUND ? 0 : mdb;
}

/* ---- changes ---- */

/* Whose key is it? A key without its file is nobody's. */
static int owner(struct prefix_index *ix, MDB_txn *txn, uint32_t kind, const struct prefix_key *key, uint64_t *id)
{
    struct prefix_file f;
    int mdb = prefix_index_find(ix, txn, (enum prefix_kind)kind, key, id);
    return mdb ? mdb : prefix_index_file(ix, txn, *id, &f);
}

int prefix_index_add(struct prefix_index *ix, MDB_txn *txn, const struct prefix_file *f)
{
    struct prefix_totals t;
    uint64_t other;
    uint32_t taken = 0;
    int mdb = prefix_index_totals(ix, txn, &t);
    for (uint32_t i = 0; i < f->n_blocks && !mdb; i++) {
        mdb = owner(ix, txn, f->kind, &f->keys[i], &other);
        if (mdb != MDB_NOTFOUND) continue;
        mdb = value_put(ix, txn, key_table(f->kind), block_key(&f->keys[i]), &f->id, sizeof f->id);
        taken++;
    }
    if (mdb) return mdb;
    if (!taken) return PREFIX_NOTHING;
    t.files++;
    t.bytes += f->bytes;
    if (f->last_use_us > t.last_stamp_us) t.last_stamp_us = f->last_use_us;
    mdb = file_put(ix, txn, f);
    return mdb ? mdb : totals_put(ix, txn, &t);
}

/* A key, where it is the file's. */
static int key_remove(struct prefix_index *ix, MDB_txn *txn, struct prefix_name n, const struct prefix_key *key)
{
    uint64_t id;
    MDB_val k = block_key(key);
    int mdb = prefix_index_find(ix, txn, n.kind, key, &id);
    if (!mdb && id == n.id) mdb = mdb_del(txn, ix->tables[key_table(n.kind)], &k, NULL);
    return mdb == MDB_NOTFOUND ? 0 : mdb;
}

int prefix_index_remove(struct prefix_index *ix, MDB_txn *txn, uint64_t id)
{
    struct prefix_file f;
    struct prefix_totals t;
    MDB_val key = id_key(&id);
    int mdb = prefix_index_file(ix, txn, id, &f);
    if (mdb == MDB_NOTFOUND) {
        mdb = mdb_del(txn, ix->tables[PREFIX_FILES], &key, NULL);
        return mdb == MDB_NOTFOUND ? 0 : mdb;
    }
    const struct prefix_name n = {id, (enum prefix_kind)f.kind};
    for (uint32_t i = 0; i < f.n_blocks && !mdb; i++) mdb = key_remove(ix, txn, n, &f.keys[i]);
    if (!mdb) mdb = mdb_del(txn, ix->tables[PREFIX_FILES], &key, NULL);
    if (!mdb) mdb = prefix_index_totals(ix, txn, &t);
    if (mdb) return mdb;
    t.files -= t.files > 0;
    t.bytes -= f.bytes < t.bytes ? f.bytes : t.bytes;
    return totals_put(ix, txn, &t);
}

int prefix_index_forget(struct prefix_index *ix, MDB_txn *txn, struct prefix_name n, const struct prefix_key *key)
{
    int mdb = prefix_index_remove(ix, txn, n.id);
    return mdb ? mdb : key_remove(ix, txn, n, key);
}

/* Wall clock, since prune asks for ages, but never the same twice and never back, since eviction asks for an order. */
static uint64_t stamp_next(struct prefix_totals *t)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
    t->last_stamp_us = us > t->last_stamp_us ? us : t->last_stamp_us + 1;
    return t->last_stamp_us;
}

int prefix_index_touch(struct prefix_index *ix, MDB_txn *txn, const uint64_t *ids, size_t n_ids)
{
    struct prefix_totals t;
    struct prefix_file f;
    int mdb = prefix_index_totals(ix, txn, &t);
    if (mdb) return mdb;
    uint64_t stamp = stamp_next(&t);
    for (size_t i = 0; i < n_ids && !mdb; i++) {
        mdb = prefix_index_file(ix, txn, ids[i], &f);
        if (mdb == MDB_NOTFOUND) {
            mdb = 0;
            continue;
        }
        f.last_use_us = stamp;
        if (!mdb) mdb = file_put(ix, txn, &f);
    }
    return mdb ? mdb : totals_put(ix, txn, &t);
}
