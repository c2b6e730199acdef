/* state_check: is this environment safe to read, and to write on?
 *
 * A child looks at everything first (lmdb_check): at the pages without LMDB, which would not notice some damage until it has
 * written over what was good, then at every table and every value against its checksum. */
#define _GNU_SOURCE
#include "lmdb_check.h"
#include "lmdb_pages.h"
#include "state_codec.h"

#include <string.h>

/* Values of another version have other fields: their checksums are all that can be said. Opening refuses them by name. */
struct check {
    const char *folder;
    bool other_version;
};

static bool meta_good(struct check *c, const MDB_val *key, struct bytes_view v)
{
    struct state_totals totals;
    if (key->mv_size == 6 && !memcmp(key->mv_data, "schema", 6)) c->other_version = state_version_decode(v) != STATE_SCHEMA_VERSION;
    return c->other_version || key->mv_size != 6 || memcmp(key->mv_data, "totals", 6) || state_totals_decode(v, &totals);
}

/* Meta comes first, and in it the schema before the totals. */
static bool value_good(void *ctx, int table, const MDB_val *key, const MDB_val *value)
{
    struct check *c = ctx;
    struct bytes_view v;
    if (!state_value_open(key->mv_data, key->mv_size, value->mv_data, value->mv_size, &v)) return false;
    struct state_job job;
    struct state_result result;
    struct state_attempts attempts;
    if (c->other_version) return true;
    switch ((enum state_table)table) {
    case STATE_META: return meta_good(c, key, v);
    case STATE_JOBS: return key->mv_size == 8 && state_job_decode(v, &job);
    case STATE_RESULTS: return key->mv_size == STATE_KEY_BYTES && state_result_decode(v, &result);
    case STATE_ATTEMPTS: return key->mv_size == STATE_KEY_BYTES && state_attempts_decode(v, &attempts);
    default: return true;
    }
}

static enum lmdb_verdict pages_check(void *ctx, uint64_t txn_id)
{
    struct buf path = {0};
    struct lmdb_pages p = {0};
    enum lmdb_verdict verdict = LMDB_DAMAGED;
    if (buf_printf(&path, "%s/data.mdb", ((const struct check *)ctx)->folder) && lmdb_pages_open(path.data, &p, NULL) == RC_OK)
        verdict = lmdb_pages_check(&p, txn_id);
    lmdb_pages_close(&p);
    buf_free(&path);
    return verdict;
}

/* In the child. */
static int walk(void *ctx)
{
    struct check *c = ctx;
    const struct lmdb_walk w = {.path = c->folder, .tables = state_table_names, .n_tables = STATE_TABLES, .entry = value_good,
                                .snapshot = pages_check, .ctx = c};
    return (int)lmdb_walk(&w);
}

#define SALVAGE "export --salvage saves what can be read"

enum rc state_check(const char *folder, struct err *e)
{
    struct lmdb_child child;
    struct check c = {.folder = folder};
    enum rc rc = lmdb_in_child(walk, &c, &child, e);
    if (rc != RC_OK || child.status == LMDB_GOOD) return rc;
    if (child.status == LMDB_UNREADABLE)
        return err_set(e, RC_FAILED, EXIT_IO, "state_unreadable", "cannot open the state in %s", folder);
    if (child.signal)
        return err_set(e, RC_FAILED, EXIT_IO, "state_damaged", "the state in %s is damaged (its check died: %s); " SALVAGE,
                       folder, strsignal(child.signal));
    return err_set(e, RC_FAILED, EXIT_IO, "state_damaged",
                   "the state in %s is damaged (a value or page is not what was written); " SALVAGE, folder);
}
