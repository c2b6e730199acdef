/* state: the LMDB environment of one state folder.
 *
 * One environment a folder and process (two handles on one file would break LMDB's locks), flags 0: every commit is
 * on disk before it returns. Values are copied out of the map before a transaction ends. Read transactions are
 * short, except between state_snapshot and state_snapshot_end.
 *
 * The map is address space only; it starts large and doubles when it is full, which needs no open transaction: the
 * full one is aborted, the map grown, the whole change applied again. So every change is a function of its inputs
 * that can run twice. A writer may grow the file while a reader in another process looks at it: MDB_MAP_RESIZED,
 * adopt the new size, try again.
 *
 * Not the job of this file: what the folder looks like (state_folder), bytes of values (state_codec), damage
 * (state_check). */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <lmdb.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/statvfs.h>

#include "lmdb_check.h"
#include "state_codec.h"
#include "state_folder.h"

/* Address space: small enough for any limit, large enough never to be grown in a common run. */
static const size_t default_map_bytes = (size_t)16 << 30;
static const size_t smallest_map_bytes = (size_t)64 << 20;
static const size_t largest_map_bytes = (size_t)1 << 44;
static const size_t large_registration = 100000; /* jobs; some 20 MB of changed pages */

struct state {
    struct state_folder folder;
    bool write;
    MDB_env *env;
    MDB_dbi tables[STATE_TABLES];
    MDB_txn *snapshot;
    char id[STATE_ID_CHARS + 1];
    size_t n_jobs;
};

/* ---- errors ---- */

static bool disk_is_full(const struct state *s)
{
    struct statvfs fs;
    return statvfs(s->folder.path, &fs) == 0 && fs.f_bavail < 64;
}

/* LMDB's code to an error. A commit on a full disk may say EIO. */
static enum rc lmdb_error(const struct state *s, int mdb, const char *what, struct err *e)
{
    const char *folder = s->folder.path;
    switch (mdb) {
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_INVALID:
        return err_set(e, RC_FAILED, EXIT_IO, "state_damaged", "the state in %s is damaged (%s)", folder, what);
    case MDB_VERSION_MISMATCH:
        return err_set(e, RC_FAILED, EXIT_CONFIG, "state_version", "the state in %s was made by another version",
                       folder);
    case MDB_MAP_FULL:
        return err_set(e, RC_FAILED, EXIT_IO, "state_full", "the state in %s cannot grow any more", folder);
    case MDB_PANIC:
        return err_set(e, RC_FATAL, EXIT_IO, "state_failed", "the state in %s failed before and must be opened again",
                       folder);
    case ENOMEM: return err_no_memory(e);
    default: break;
    }
    if (mdb == ENOSPC || mdb == EDQUOT || (mdb == EIO && disk_is_full(s)))
        return err_set(e, RC_FAILED, EXIT_IO, "disk_full", "the disk of %s is full (%s)", folder, what);
    return err_set(e, RC_FAILED, EXIT_IO, "state_io", "the state in %s: %s: %s", folder, what, mdb_strerror(mdb));
}

/* ---- transactions ---- */

static int adopt_size(struct state *s) { return mdb_env_set_mapsize(s->env, 0); }

static int read_begin(struct state *s, MDB_txn **txn)
{
    if (s->snapshot) return *txn = s->snapshot, 0;
    int mdb = mdb_txn_begin(s->env, NULL, MDB_RDONLY, txn);
    if (mdb == MDB_MAP_RESIZED && !(mdb = adopt_size(s))) mdb = mdb_txn_begin(s->env, NULL, MDB_RDONLY, txn);
    return mdb;
}

static void read_end(struct state *s, MDB_txn *txn)
{
    if (txn != s->snapshot) mdb_txn_abort(txn);
}

static int map_grow(struct state *s)
{
    MDB_envinfo info;
    mdb_env_info(s->env, &info);
    if (info.me_mapsize >= largest_map_bytes) return MDB_MAP_FULL;
    return mdb_env_set_mapsize(s->env, info.me_mapsize * 2);
}

static int value_put_flags(struct state *s, MDB_txn *txn, enum state_table table, struct bytes_view key, struct buf *value,
                           unsigned flags)
{
    if (!state_value_seal(value, key.bytes, key.len)) return ENOMEM;
    MDB_val k = {key.len, (void *)(uintptr_t)key.bytes}, v = {value->len, value->data};
    return mdb_put(txn, s->tables[table], &k, &v, flags);
}

static int value_put(struct state *s, MDB_txn *txn, enum state_table table, struct bytes_view key, struct buf *value)
{
    return value_put_flags(s, txn, table, key, value, 0);
}

/* The value's fields, inside the map; MDB_CORRUPTED when the checksum fails. */
static int value_get(struct state *s, MDB_txn *txn, enum state_table table, struct bytes_view key,
                     struct bytes_view *out)
{
    MDB_val k = {key.len, (void *)(uintptr_t)key.bytes}, v;
    int mdb = mdb_get(txn, s->tables[table], &k, &v);
    if (mdb) return mdb;
    return state_value_open(key.bytes, key.len, v.mv_data, v.mv_size, out) ? 0 : MDB_CORRUPTED;
}

static struct bytes_view name_view(const char *name) { return (struct bytes_view){name, strlen(name)}; }

static int meta_put(struct state *s, MDB_txn *txn, const char *name, const void *bytes, size_t len)
{
    struct buf value = {0};
    state_value_start(&value);
    buf_append(&value, bytes, len);
    int mdb = value_put(s, txn, STATE_META, name_view(name), &value);
    buf_free(&value);
    return mdb;
}

static int totals_get(struct state *s, MDB_txn *txn, struct state_totals *out)
{
    struct bytes_view v;
    *out = (struct state_totals){0};
    int mdb = value_get(s, txn, STATE_META, name_view("totals"), &v);
    if (mdb) return mdb == MDB_NOTFOUND ? 0 : mdb;
    return state_totals_decode(v, out) ? 0 : MDB_CORRUPTED;
}

static int totals_put(struct state *s, MDB_txn *txn, const struct state_totals *t)
{
    struct buf value = {0};
    state_value_start(&value);
    state_totals_encode(t, &value);
    int mdb = value_put(s, txn, STATE_META, name_view("totals"), &value);
    buf_free(&value);
    return mdb;
}

/* ---- changes ---- */

/* Says which transaction it was: of the newest alone are a state's counts believed (state_peek). */
static int commit_put(struct state *s, MDB_txn *txn)
{
    struct buf value = {0};
    state_value_start(&value);
    state_put_u64(&value, mdb_txn_id(txn));
    int mdb = value_put(s, txn, STATE_META, name_view("commit"), &value);
    buf_free(&value);
    return mdb;
}

/* A change: returns an LMDB code; may be called again in a new transaction. */
typedef int (*change_fn)(struct state *s, MDB_txn *txn, const void *ctx);

static enum rc change(struct state *s, change_fn apply, const void *ctx, const char *what, struct err *e)
{
    if (!s->write || s->snapshot)
        return err_set(e, RC_FAILED, EXIT_INTERNAL, "state_read_only", "%s: the state is open for reading", what);
    for (;;) {
        MDB_txn *txn;
        int mdb = mdb_txn_begin(s->env, NULL, 0, &txn);
        if (mdb) return lmdb_error(s, mdb, what, e);
        mdb = apply(s, txn, ctx);
        if (!mdb) mdb = commit_put(s, txn);
        if (mdb)
            mdb_txn_abort(txn);
        else
            mdb = mdb_txn_commit(txn);
        if (mdb == MDB_MAP_FULL && !(mdb = map_grow(s))) continue;
        return mdb ? lmdb_error(s, mdb, what, e) : RC_OK;
    }
}

/* ---- opening ---- */

static int tables_open(struct state *s, MDB_txn *txn, unsigned flags)
{
    for (int t = 0; t < STATE_TABLES; t++) {
        int mdb = mdb_dbi_open(txn, state_table_names[t], flags, &s->tables[t]);
        if (mdb) return mdb;
    }
    return 0;
}

static int tables_make(struct state *s, MDB_txn *txn, const void *ctx)
{
    const char *id = ctx;
    uint32_t version = STATE_SCHEMA_VERSION;
    unsigned char schema[4] = {(unsigned char)version, (unsigned char)(version >> 8)};
    int mdb = tables_open(s, txn, MDB_CREATE);
    if (!mdb) mdb = meta_put(s, txn, "schema", schema, sizeof schema);
    if (!mdb) mdb = meta_put(s, txn, "id", id, STATE_ID_CHARS);
    return mdb;
}

static enum rc meta_check(struct state *s, MDB_txn *txn, struct err *e)
{
    struct bytes_view v;
    int mdb = value_get(s, txn, STATE_META, name_view("schema"), &v);
    if (!mdb && v.len != 4) mdb = MDB_CORRUPTED;
    if (mdb) return lmdb_error(s, mdb == MDB_NOTFOUND ? MDB_CORRUPTED : mdb, "its schema version", e);
    unsigned version = state_version_decode(v);
    if (version != STATE_SCHEMA_VERSION)
        return err_set(e, RC_FAILED, EXIT_CONFIG, "state_version",
                       "the state in %s has schema version %u, this program "
                       "knows %d; give another --state, or use the program of then",
                       s->folder.path, version, STATE_SCHEMA_VERSION);
    mdb = value_get(s, txn, STATE_META, name_view("id"), &v);
    if (!mdb && (v.len != STATE_ID_CHARS || memcmp(v.bytes, s->folder.id, v.len))) mdb = MDB_CORRUPTED;
    if (mdb) return lmdb_error(s, mdb == MDB_NOTFOUND ? MDB_CORRUPTED : mdb, "data.mdb and the file id differ", e);
    memcpy(s->id, s->folder.id, sizeof s->id);
    return RC_OK;
}

static enum rc database_make(struct state *s, struct err *e)
{
    unsigned char random[STATE_ID_CHARS / 2];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return err_errno(e, RC_FAILED, EXIT_INTERNAL, "no_random", "no random numbers");
    for (size_t i = 0; i < sizeof random; i++) snprintf(s->id + 2 * i, 3, "%02x", random[i]);
    enum rc rc = change(s, tables_make, s->id, "make tables", e);
    return rc == RC_OK ? state_folder_mark(&s->folder, s->id, e) : rc;
}

static enum rc database_use(struct state *s, struct err *e)
{
    MDB_txn *txn;
    MDB_stat stat;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    mdb = tables_open(s, txn, 0);
    /* Handles opened in a transaction outlive it only when it commits. */
    if (!mdb)
        mdb = mdb_txn_commit(txn);
    else
        mdb_txn_abort(txn);
    if (!mdb) mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb == MDB_NOTFOUND ? MDB_CORRUPTED : mdb, "its tables", e);
    enum rc rc = meta_check(s, txn, e);
    mdb = mdb_stat(txn, s->tables[STATE_JOBS], &stat);
    s->n_jobs = mdb ? 0 : stat.ms_entries;
    read_end(s, txn);
    return rc;
}

/* Less address space than asked for is no reason to fail. */
static enum rc environment_open(struct state *s, size_t map_bytes, struct err *e)
{
    int mdb;
    for (;;) {
        mdb = mdb_env_create(&s->env);
        if (!mdb) mdb = mdb_env_set_maxdbs(s->env, STATE_TABLES);
        if (!mdb) mdb = mdb_env_set_mapsize(s->env, map_bytes);
        if (!mdb) mdb = mdb_env_open(s->env, s->folder.path, MDB_NOTLS | (s->write ? 0 : MDB_RDONLY), 0600);
        if (mdb != ENOMEM || map_bytes <= smallest_map_bytes) break;
        mdb_env_close(s->env);
        s->env = NULL;
        map_bytes /= 2;
    }
    if (mdb) return lmdb_error(s, mdb, "open", e);
    /* LMDB opens its data file without it; ranks must not inherit records. */
    int fd, dead_readers;
    if (mdb_env_get_fd(s->env, &fd) == 0) fcntl(fd, F_SETFD, FD_CLOEXEC);
    if (s->write) mdb_reader_check(s->env, &dead_readers);
    return RC_OK;
}

static enum rc lock_reserve(const struct state *s, struct err *e)
{
    struct buf path = {0};
    enum rc rc = buf_printf(&path, "%s/lock.mdb", s->folder.path) ? RC_OK : err_no_memory(e);
    const int full = rc == RC_OK ? lmdb_lock_reserve(path.data) : 0;
    buf_free(&path);
    return full ? lmdb_error(s, full, "its lock", e) : rc;
}

enum rc state_open_sized(const char *folder, enum state_mode mode, size_t map_bytes, struct state **out, struct err *e)
{
    *out = NULL;
    struct state *s = calloc(1, sizeof *s);
    if (!s) return err_no_memory(e);
    s->write = (mode % STATE_ON_NETWORK) != STATE_READ;
    enum rc rc = state_folder_open(folder, mode, &s->folder, e);
    bool complete = rc == RC_OK && s->folder.id[0];
    if (rc == RC_OK) rc = lock_reserve(s, e);
    if (rc == RC_OK && complete) rc = state_check(folder, e);
    if (rc == RC_OK) rc = environment_open(s, map_bytes ? map_bytes : default_map_bytes, e);
    if (rc == RC_OK && !complete) rc = database_make(s, e);
    if (rc == RC_OK) rc = database_use(s, e);
    if (rc == RC_OK)
        *out = s;
    else
        state_close(s);
    return rc;
}

enum rc state_open(const char *folder, enum state_mode mode, struct state **out, struct err *e)
{
    return state_open_sized(folder, mode, 0, out, e);
}

void state_close(struct state *s)
{
    if (!s) return;
    state_snapshot_end(s);
    if (s->env) mdb_env_close(s->env);
    state_folder_close(&s->folder);
    free(s);
}

const char *state_id(const struct state *s) { return s->id; }

enum rc state_snapshot(struct state *s, struct err *e)
{
    if (s->snapshot) return RC_OK;
    MDB_txn *txn;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    s->snapshot = txn;
    /* A writer elsewhere may have registered other jobs since this state was opened. */
    MDB_stat stat;
    mdb = mdb_stat(txn, s->tables[STATE_JOBS], &stat);
    if (mdb) {
        state_snapshot_end(s);
        return lmdb_error(s, mdb, "snapshot", e);
    }
    s->n_jobs = stat.ms_entries;
    return RC_OK;
}

void state_snapshot_end(struct state *s)
{
    if (s->snapshot) mdb_txn_abort(s->snapshot);
    s->snapshot = NULL;
}

/* ---- meta ---- */

static enum rc meta_get(struct state *s, const char *name, struct buf *out, struct err *e)
{
    MDB_txn *txn;
    struct bytes_view v;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, name, e);
    mdb = value_get(s, txn, STATE_META, name_view(name), &v);
    bool copied = mdb || buf_append(out, v.bytes, v.len);
    read_end(s, txn);
    if (mdb == MDB_NOTFOUND) return RC_RETRY;
    if (mdb) return lmdb_error(s, mdb, name, e);
    return copied ? RC_OK : err_no_memory(e);
}

static int identity_put(struct state *s, MDB_txn *txn, const void *ctx)
{
    const char *identity = ctx;
    return meta_put(s, txn, "identity", identity, strlen(identity));
}

/* One "name=value\n" off the front; false at the end. A view's len excludes the '='. */
static bool identity_part(const char **at, struct bytes_view *name, struct bytes_view *value)
{
    const char *line = *at;
    if (!*line) return false;
    size_t len = strcspn(line, "\n"), name_len = strcspn(line, "=\n");
    *name = (struct bytes_view){line, name_len};
    *value =
        name_len < len ? (struct bytes_view){line + name_len + 1, len - name_len - 1} : (struct bytes_view){line, 0};
    *at = line + len + (line[len] == '\n');
    return true;
}

static bool views_equal(struct bytes_view a, struct bytes_view b)
{
    return a.len == b.len && !memcmp(a.bytes, b.bytes, a.len);
}

static enum rc identity_differs(const struct state *s, const char *stored, const char *given, struct err *e)
{
    struct bytes_view name = {"", 0}, value = {"", 0}, other_name = {"", 0}, other = {"", 0};
    bool more, other_more;
    do {
        more = identity_part(&stored, &name, &value);
        other_more = identity_part(&given, &other_name, &other);
    } while (more && other_more && views_equal(name, other_name) && views_equal(value, other));
    if (!more) name = other_name, value = (struct bytes_view){"nothing", 7};
    if (!other_more || (more && !views_equal(name, other_name))) other = (struct bytes_view){"nothing", 7};
    return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "other_identity",
                   "the state in %s was made with %.*s=%.*s, this run has "
                   "%.*s=%.*s; give the settings of then, or another --state",
                   s->folder.path, (int)name.len, (const char *)name.bytes, (int)value.len, (const char *)value.bytes,
                   (int)name.len, (const char *)name.bytes, (int)other.len, (const char *)other.bytes);
}

enum rc state_bind_identity(struct state *s, const char *identity, struct err *e)
{
    struct buf stored = {0};
    enum rc rc = meta_get(s, "identity", &stored, e);
    if (rc == RC_RETRY)
        rc = change(s, identity_put, identity, "store identity", e);
    else if (rc == RC_OK && strcmp(stored.data, identity))
        rc = identity_differs(s, stored.data, identity, e);
    buf_free(&stored);
    return rc;
}

enum rc state_identity(struct state *s, struct buf *out, struct err *e) { return meta_get(s, "identity", out, e); }

enum rc state_input_digest(struct state *s, unsigned char out[32], struct err *e)
{
    struct buf digest = {0};
    enum rc rc = meta_get(s, "input_digest", &digest, e);
    if (rc == RC_OK && digest.len != 32) rc = lmdb_error(s, MDB_CORRUPTED, "input digest", e);
    if (rc == RC_OK) memcpy(out, digest.data, 32);
    buf_free(&digest);
    return rc;
}

/* ---- registration ---- */

struct registration {
    const struct state_job_list *jobs;
    const unsigned char *input_digest;
};

static int attempts_get(struct state *s, MDB_txn *txn, const unsigned char *key, struct state_attempts *out);
static int result_view(struct state *s, MDB_txn *txn, const unsigned char *key, struct state_result *out);

/* Jobs without documents have no pin: there would be nothing in it. */
static int job_put(struct state *s, MDB_txn *txn, size_t order, const struct state_job *j, struct buf *value)
{
    unsigned char key[8], pin[32];
    state_order_key(order, key);
    state_value_start(value);
    state_job_encode(j, value);
    int mdb = value_put_flags(s, txn, STATE_JOBS, (struct bytes_view){key, sizeof key}, value, MDB_APPEND);
    if (mdb || !j->document_digests_bytes) return mdb;
    state_pin_key(j->custom_id, j->line_digest, pin);
    state_value_start(value);
    buf_append(value, j->document_digests, j->document_digests_bytes);
    return value_put(s, txn, STATE_PINS, (struct bytes_view){pin, sizeof pin}, value);
}

/* Sums of what a forged state says may wrap. */
static void add(int64_t *sum, int64_t n, int sign) { *sum = (int64_t)((uint64_t)*sum + (uint64_t)sign * (uint64_t)n); }

/* What the counts have of a result, taken from them (-1) or added (+1). */
static void totals_result(struct state_totals *t, const struct state_result *r, int sign)
{
    struct state_counts *c = &t->counts;
    size_t *kind = r->kind == STATE_OUTPUT ? &c->done : &c->failed;
    *kind += (size_t)sign;
    add(&c->prompt_tokens, r->prompt_tokens, sign);
    add(&c->cached_tokens, r->cached_tokens, sign);
    add(&c->completion_tokens, r->completion_tokens, sign);
}

static void totals_attempts(struct state_totals *t, const struct state_attempts *a, int sign)
{
    add(&t->counts.attempts, a->attempts, sign);
    add(&t->counts.rank_restarts, a->rank_restarts, sign);
}

/* What is there of a job that is registered anew. */
static int totals_job(struct state *s, MDB_txn *txn, const unsigned char *key, struct state_totals *t)
{
    struct state_attempts a;
    struct state_result r;
    int mdb = attempts_get(s, txn, key, &a);
    if (mdb) return mdb;
    totals_attempts(t, &a, 1);
    mdb = result_view(s, txn, key, &r);
    if (!mdb) totals_result(t, &r, 1);
    return mdb == MDB_NOTFOUND ? 0 : mdb;
}

static int jobs_put(struct state *s, MDB_txn *txn, const void *ctx)
{
    const struct registration *r = ctx;
    struct buf value = {0};
    struct state_totals before, totals = {0};
    int mdb = totals_get(s, txn, &before);
    if (!mdb) mdb = mdb_drop(txn, s->tables[STATE_JOBS], 0);
    if (!mdb) mdb = mdb_drop(txn, s->tables[STATE_PINS], 0);
    for (size_t i = 0; !mdb && i < r->jobs->n; i++) {
        struct state_job j;
        r->jobs->at(r->jobs->ctx, i, &j);
        mdb = job_put(s, txn, i, &j, &value);
        if (!mdb) mdb = totals_job(s, txn, j.key, &totals);
    }
    totals.counts.jobs = r->jobs->n;
    totals.settled = before.settled;
    if (!mdb) mdb = totals_put(s, txn, &totals);
    if (!mdb) mdb = meta_put(s, txn, "input_digest", r->input_digest, 32);
    buf_free(&value);
    return mdb;
}

static bool digests_equal(const struct state_job *a, const struct state_job *b)
{
    return a->document_digests_bytes == b->document_digests_bytes &&
           (a->document_digests_bytes == 0 ||
            memcmp(a->document_digests, b->document_digests, a->document_digests_bytes) == 0);
}

static bool jobs_equal(const struct state_job *a, const struct state_job *b)
{
    return !memcmp(a->key, b->key, sizeof a->key) && !strcmp(a->custom_id, b->custom_id) && !strcmp(a->source, b->source) &&
           a->line == b->line && !memcmp(a->line_digest, b->line_digest, 32) && digests_equal(a, b);
}

/* The same files again must not write at all: a finished run changes nothing. */
static enum rc registered_already(struct state *s, const struct registration *r, bool *same, struct err *e)
{
    unsigned char digest[32];
    struct buf scratch = {0};
    *same = false;
    enum rc rc = state_input_digest(s, digest, e);
    if (rc != RC_OK) return rc == RC_RETRY ? RC_OK : rc;
    *same = s->n_jobs == r->jobs->n && !memcmp(digest, r->input_digest, 32);
    for (size_t i = 0; i < r->jobs->n && *same && rc == RC_OK; i++) {
        struct state_job stored, given;
        rc = state_job_at(s, i, &scratch, &stored, e);
        r->jobs->at(r->jobs->ctx, i, &given);
        *same = rc == RC_OK && jobs_equal(&stored, &given);
    }
    buf_free(&scratch);
    return rc;
}

/* LMDB keeps the memory of its largest change for the next one. After a large registration there is none. */
static enum rc memory_give_back(struct state *s, struct err *e)
{
    MDB_envinfo info;
    mdb_env_info(s->env, &info);
    mdb_env_close(s->env);
    s->env = NULL;
    enum rc rc = environment_open(s, info.me_mapsize, e);
    if (rc == RC_OK) rc = database_use(s, e);
    malloc_trim(0);
    return rc;
}

enum rc state_register(struct state *s, const struct state_job_list *jobs, const unsigned char input_digest[32],
                       struct err *e)
{
    struct registration r = {jobs, input_digest};
    bool same;
    enum rc rc = registered_already(s, &r, &same, e);
    if (rc != RC_OK || same) return rc;
    rc = change(s, jobs_put, &r, "register jobs", e);
    if (rc != RC_OK) return rc;
    s->n_jobs = jobs->n;
    return jobs->n < large_registration ? RC_OK : memory_give_back(s, e);
}

size_t state_job_count(struct state *s) { return s->n_jobs; }

enum rc state_job_at(struct state *s, size_t i, struct buf *scratch, struct state_job *out, struct err *e)
{
    if (i >= s->n_jobs) return err_set(e, RC_FAILED, EXIT_INTERNAL, "no_such_job", "job %zu of %zu", i, s->n_jobs);
    unsigned char key[8];
    state_order_key(i, key);
    MDB_txn *txn;
    struct bytes_view v;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    buf_clear(scratch);
    mdb = value_get(s, txn, STATE_JOBS, (struct bytes_view){key, sizeof key}, &v);
    if (!mdb && !buf_append(scratch, v.bytes, v.len)) mdb = ENOMEM;
    read_end(s, txn);
    if (!mdb && !state_job_decode((struct bytes_view){scratch->data, scratch->len}, out)) mdb = MDB_CORRUPTED;
    return mdb ? lmdb_error(s, mdb == MDB_NOTFOUND ? MDB_CORRUPTED : mdb, "a registered job", e) : RC_OK;
}

enum rc state_pinned(struct state *s, const char *custom_id, const unsigned char line_digest[32], struct buf *digests,
                     struct err *e)
{
    unsigned char pin[32];
    state_pin_key(custom_id, line_digest, pin);
    MDB_txn *txn;
    struct bytes_view v;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    mdb = value_get(s, txn, STATE_PINS, (struct bytes_view){pin, sizeof pin}, &v);
    if (!mdb && !buf_append(digests, v.bytes, v.len)) mdb = ENOMEM;
    read_end(s, txn);
    if (mdb == MDB_NOTFOUND) return RC_RETRY;
    return mdb ? lmdb_error(s, mdb, "pinned documents", e) : RC_OK;
}

/* ---- results and attempts ---- */

static struct bytes_view key_view(const unsigned char key[STATE_KEY_BYTES])
{
    return (struct bytes_view){key, STATE_KEY_BYTES};
}

static int attempts_get(struct state *s, MDB_txn *txn, const unsigned char *key, struct state_attempts *out)
{
    struct bytes_view v;
    *out = (struct state_attempts){0};
    int mdb = value_get(s, txn, STATE_ATTEMPTS, key_view(key), &v);
    if (mdb) return mdb == MDB_NOTFOUND ? 0 : mdb;
    return state_attempts_decode(v, out) ? 0 : MDB_CORRUPTED;
}

/* In the map, checked, nothing copied. */
static int result_view(struct state *s, MDB_txn *txn, const unsigned char *key, struct state_result *out)
{
    struct bytes_view v;
    int mdb = value_get(s, txn, STATE_RESULTS, key_view(key), &v);
    if (mdb) return mdb;
    return state_result_decode(v, out) ? 0 : MDB_CORRUPTED;
}

static int attempts_set(struct state *s, MDB_txn *txn, const unsigned char *key, const struct state_attempts *a)
{
    struct buf value = {0};
    state_value_start(&value);
    state_attempts_encode(a, &value);
    int mdb = value_put(s, txn, STATE_ATTEMPTS, key_view(key), &value);
    buf_free(&value);
    return mdb;
}

struct keyed {
    const unsigned char *key;
    const struct state_result *result;
    const struct state_attempts *attempts;
};

/* The result itself and what it does to the counts. */
static int result_set(struct state *s, MDB_txn *txn, const struct keyed *k)
{
    struct state_totals totals;
    struct state_result before, result = *k->result;
    struct buf value = {0};
    int mdb = totals_get(s, txn, &totals);
    if (mdb) return mdb;
    mdb = result_view(s, txn, k->key, &before);
    if (mdb && mdb != MDB_NOTFOUND) return mdb;
    if (!mdb) totals_result(&totals, &before, -1);
    totals_result(&totals, &result, 1);
    result.settled = ++totals.settled;
    state_value_start(&value);
    state_result_encode(&result, &value);
    mdb = value_put(s, txn, STATE_RESULTS, key_view(k->key), &value);
    buf_free(&value);
    return mdb ? mdb : totals_put(s, txn, &totals);
}

/* The result and the end of its attempt are one step: a result beside a running attempt cannot be seen. */
static int result_put(struct state *s, MDB_txn *txn, const void *ctx)
{
    const struct keyed *k = ctx;
    struct state_attempts attempts;
    int mdb = result_set(s, txn, k);
    if (!mdb) mdb = attempts_get(s, txn, k->key, &attempts);
    if (mdb) return mdb;
    bool clear = k->result->kind == STATE_OUTPUT && attempts.failures;
    if (!attempts.running && !clear) return 0;
    attempts.running = false;
    if (clear) attempts.failures = 0;
    return attempts_set(s, txn, k->key, &attempts);
}

enum rc state_put_result(struct state *s, const unsigned char key[32], const struct state_result *r, struct err *e)
{
    struct keyed k = {.key = key, .result = r};
    return change(s, result_put, &k, "store a result", e);
}

enum rc state_get_result(struct state *s, const unsigned char key[32], struct buf *scratch, struct state_result *out,
                         struct err *e)
{
    MDB_txn *txn;
    struct bytes_view v;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    buf_clear(scratch);
    mdb = value_get(s, txn, STATE_RESULTS, key_view(key), &v);
    if (!mdb && !buf_append(scratch, v.bytes, v.len)) mdb = ENOMEM;
    read_end(s, txn);
    if (mdb == MDB_NOTFOUND) return RC_RETRY;
    if (!mdb && !state_result_decode((struct bytes_view){scratch->data, scratch->len}, out)) mdb = MDB_CORRUPTED;
    return mdb ? lmdb_error(s, mdb, "a result", e) : RC_OK;
}

/* Valid until the read ends: kind and number only. */
static enum rc result_facts(struct state *s, const unsigned char *key, struct state_result *out, struct err *e)
{
    MDB_txn *txn;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    mdb = result_view(s, txn, key, out);
    read_end(s, txn);
    if (mdb == MDB_NOTFOUND) return RC_RETRY;
    return mdb ? lmdb_error(s, mdb, "a result", e) : RC_OK;
}

enum rc state_result_kind(struct state *s, const unsigned char key[32], enum state_result_kind *out, struct err *e)
{
    struct state_result r;
    enum rc rc = result_facts(s, key, &r, e);
    if (rc == RC_OK) *out = r.kind;
    return rc;
}

enum rc state_result_settled(struct state *s, const unsigned char key[32], uint64_t *out, struct err *e)
{
    struct state_result r;
    enum rc rc = result_facts(s, key, &r, e);
    *out = rc == RC_OK ? r.settled : 0;
    return rc == RC_RETRY ? RC_OK : rc;
}

static int attempts_put(struct state *s, MDB_txn *txn, const void *ctx)
{
    const struct keyed *k = ctx;
    struct state_totals totals;
    struct state_attempts before;
    int mdb = totals_get(s, txn, &totals);
    if (!mdb) mdb = attempts_get(s, txn, k->key, &before);
    if (mdb) return mdb;
    totals_attempts(&totals, &before, -1);
    totals_attempts(&totals, k->attempts, 1);
    mdb = totals_put(s, txn, &totals);
    return mdb ? mdb : attempts_set(s, txn, k->key, k->attempts);
}

enum rc state_put_attempts(struct state *s, const unsigned char key[32], const struct state_attempts *a, struct err *e)
{
    struct keyed k = {.key = key, .attempts = a};
    return change(s, attempts_put, &k, "store an attempt", e);
}

enum rc state_get_attempts(struct state *s, const unsigned char key[32], struct state_attempts *out, struct err *e)
{
    MDB_txn *txn;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    mdb = attempts_get(s, txn, key, out);
    read_end(s, txn);
    return mdb ? lmdb_error(s, mdb, "attempts", e) : RC_OK;
}

struct forgotten {
    const unsigned char *keys;
    size_t n;
};

static int keys_forget(struct state *s, MDB_txn *txn, const void *ctx)
{
    const struct forgotten *f = ctx;
    static const enum state_table tables[] = {STATE_RESULTS, STATE_ATTEMPTS};
    struct state_totals totals;
    int mdb = totals_get(s, txn, &totals);
    for (size_t i = 0; i < f->n && !mdb; i++) {
        const unsigned char *key = f->keys + i * STATE_KEY_BYTES;
        struct state_attempts attempts;
        struct state_result result;
        mdb = result_view(s, txn, key, &result);
        if (mdb && mdb != MDB_NOTFOUND) return mdb;
        if (!mdb) totals_result(&totals, &result, -1);
        mdb = attempts_get(s, txn, key, &attempts);
        if (mdb) return mdb;
        totals_attempts(&totals, &attempts, -1);
        for (size_t t = 0; t < 2; t++) {
            MDB_val k = {STATE_KEY_BYTES, (void *)(uintptr_t)key};
            mdb = mdb_del(txn, s->tables[tables[t]], &k, NULL);
            if (mdb && mdb != MDB_NOTFOUND) return mdb;
        }
        mdb = 0;
    }
    return mdb ? mdb : totals_put(s, txn, &totals);
}

enum rc state_forget(struct state *s, const unsigned char *keys, size_t n, struct err *e)
{
    struct forgotten f = {keys, n};
    return change(s, keys_forget, &f, "forget results", e);
}

enum rc state_count(struct state *s, struct state_counts *out, struct err *e)
{
    MDB_txn *txn;
    struct state_totals totals;
    int mdb = read_begin(s, &txn);
    if (mdb) return lmdb_error(s, mdb, "begin", e);
    mdb = totals_get(s, txn, &totals);
    read_end(s, txn);
    if (mdb) return lmdb_error(s, mdb, "counts", e);
    *out = totals.counts;
    return RC_OK;
}
