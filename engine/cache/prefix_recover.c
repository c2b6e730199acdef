/* prefix_recover: walk, copy, sweep.
 *
 * A walk cannot see damage in LMDB's own free list, and a wrong page number there would let a later change overwrite live pages.
 * So an index is not used on after a walk but copied: the child that walks the old one writes what it finds, record by record,
 * into a new one. The copy is also the only way to make an index smaller. A child that dies or finds damage costs the index: then the
 * sweep finds all payload files unknown, and adopts them by their headers. blocks and states are never copied; they follow
 * from files.
 *
 * The sweep makes files and index agree: a record whose file is missing or of another size goes; a file without a record is
 * adopted when its header is whole, else unlinked; what dead processes left unfinished is unlinked. Totals follow. */
#define _GNU_SOURCE
#include "prefix_recover.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "lmdb_check.h"
#include "prefix_index.h"

#define COPY_NAME "index.new"

static enum rc path_in(const char *folder, const char *name, char out[PATH_MAX], struct err *e)
{
    if (snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX) return RC_OK;
    return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "path_too_long", "the path of the cache folder is too long");
}

/* ---- the child ---- */

/* What the child says beside enum lmdb_verdict: the old index is good, the new one could not be written. */
enum { WALK_NOT_COPIED = 10 };

struct copy {
    const char *from, *to; /* to NULL: walk only */
    struct prefix_index index;
    MDB_txn *txn;
    int mdb; /* first error of the copy */
};

static bool entry_copy(void *ctx, int table, const MDB_val *key, const MDB_val *value)
{
    struct copy *c = ctx;
    struct prefix_file f;
    if (!prefix_index_entry((enum prefix_table)table, key, value, &f)) return false;
    if (c->txn && table == PREFIX_FILES && !c->mdb) c->mdb = prefix_index_add(&c->index, c->txn, &f);
    /* Another file has all its keys. */
    if (c->mdb == PREFIX_NOTHING) c->mdb = 0;
    return true;
}

static int walk_and_copy(void *ctx)
{
    struct copy *c = ctx;
    const struct lmdb_walk w = {.path = c->from, .flags = MDB_NOSUBDIR, .tables = prefix_table_names, .n_tables = PREFIX_TABLES,
                                .entry = entry_copy, .ctx = c};
    if (c->to) c->mdb = prefix_index_open(c->to, true, &c->index);
    if (c->to && !c->mdb) c->mdb = mdb_txn_begin(c->index.env, NULL, 0, &c->txn);
    enum lmdb_verdict verdict = lmdb_walk(&w);
    if (verdict != LMDB_GOOD || !c->to) return (int)verdict;
    if (!c->mdb) c->mdb = mdb_txn_commit(c->txn);
    if (!c->mdb) c->mdb = prefix_index_close_synced(&c->index);
    return c->mdb ? WALK_NOT_COPIED : (int)verdict;
}

enum rc prefix_recover_check(const char *folder, struct err *e)
{
    char path[PATH_MAX];
    struct copy c = {.from = path};
    struct lmdb_child child;
    enum rc rc = path_in(folder, PREFIX_INDEX_NAME, path, e);
    if (rc == RC_OK) rc = lmdb_in_child(walk_and_copy, &c, &child, e);
    if (rc != RC_OK || child.status == LMDB_GOOD) return rc;
    if (child.status == LMDB_UNREADABLE)
        return err_set(e, RC_FAILED, EXIT_IO, "store_io", "cannot open the index of the cache in %s", folder);
    return err_set(e, RC_FAILED, EXIT_IO, "store_damaged", "the index of the cache in %s is damaged, and in use", folder);
}

/* ---- the index ---- */

static enum rc unlink_all(int folder_fd, const char *const *names, size_t n, struct err *e)
{
    for (size_t i = 0; i < n; i++)
        if (unlinkat(folder_fd, names[i], 0) && errno != ENOENT)
            return err_errno(e, RC_FAILED, EXIT_IO, "store_io", "cannot delete %s of the cache", names[i]);
    return RC_OK;
}

static enum rc index_renew(const char *folder, int folder_fd, struct err *e)
{
    /* A lock file holds nothing but what processes that are gone have left, and a damaged one is a trap. */
    static const char *const leftovers[] = {PREFIX_INDEX_NAME "-lock", COPY_NAME, COPY_NAME "-lock"};
    static const char *const after_walk[] = {PREFIX_INDEX_NAME "-lock", COPY_NAME "-lock"};
    static const char *const old[] = {PREFIX_INDEX_NAME, COPY_NAME};
    char from[PATH_MAX], to[PATH_MAX];
    struct copy c = {.from = from, .to = to};
    struct lmdb_child child;
    struct stat st;
    enum rc rc = path_in(folder, PREFIX_INDEX_NAME, from, e);
    if (rc == RC_OK) rc = path_in(folder, COPY_NAME, to, e);
    if (rc == RC_OK) rc = unlink_all(folder_fd, leftovers, 3, e);
    if (rc != RC_OK || fstatat(folder_fd, PREFIX_INDEX_NAME, &st, AT_SYMLINK_NOFOLLOW)) return rc;
    rc = lmdb_in_child(walk_and_copy, &c, &child, e);
    if (rc == RC_OK) rc = unlink_all(folder_fd, after_walk, 2, e);
    if (rc != RC_OK) return rc;
    if (child.status == WALK_NOT_COPIED) return unlink_all(folder_fd, old + 1, 1, e);
    if (child.status == LMDB_GOOD) {
        if (renameat(folder_fd, COPY_NAME, folder_fd, PREFIX_INDEX_NAME) == 0) return RC_OK;
        return err_errno(e, RC_FAILED, EXIT_IO, "store_io", "cannot renew the index of the cache in %s", folder);
    }
    /* Unreadable as well: a damaged header can ask for any size or version, and all that is lost is who was used last. */
    log_line(LOG_WARN, "the index of the cache in %s is damaged; it is made anew from its files", folder);
    return unlink_all(folder_fd, old, 2, e);
}

/* ---- the sweep ---- */

struct found {
    struct prefix_name name;
    uint64_t bytes, modified_us;
    bool known;
};

struct sweep {
    int folder_fd;
    struct found *found; /* in the order of ids */
    size_t n_found, found_cap;
    struct found *gone;  /* records without their file; name alone */
    size_t n_gone, gone_cap;
};

static bool found_add(struct found **list, size_t *n, size_t *cap, const struct found *f)
{
    if (*n == *cap) {
        size_t wanted = *cap ? *cap * 2 : 256, bytes;
        struct found *grown = size_mul(wanted, sizeof *grown, &bytes) ? realloc(*list, bytes) : NULL;
        if (!grown) return false;
        *list = grown;
        *cap = wanted;
    }
    (*list)[(*n)++] = *f;
    return true;
}

static int by_name(const void *a, const void *b)
{
    const struct found *x = a, *y = b;
    if (x->name.id != y->name.id) return x->name.id < y->name.id ? -1 : 1;
    return (x->name.kind > y->name.kind) - (x->name.kind < y->name.kind);
}

static bool entry_take(struct sweep *s, const char *name)
{
    struct found f = {0};
    struct stat st;
    switch (prefix_name_parse(name, &f.name)) {
    case PREFIX_NAME_FOREIGN: return true;
    case PREFIX_NAME_UNFINISHED: unlinkat(s->folder_fd, name, 0); return true;
    case PREFIX_NAME_PAYLOAD: break;
    }
    if (fstatat(s->folder_fd, name, &st, AT_SYMLINK_NOFOLLOW)) return true;
    f.bytes = (uint64_t)st.st_size;
    f.modified_us = st.st_mtim.tv_sec > 0 ? (uint64_t)st.st_mtim.tv_sec * 1000000 + (uint64_t)st.st_mtim.tv_nsec / 1000 : 0;
    return found_add(&s->found, &s->n_found, &s->found_cap, &f);
}

static enum rc folder_list(struct sweep *s, struct err *e)
{
    int fd = openat(s->folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    if (!dir) {
        enum rc rc = err_errno(e, RC_FAILED, EXIT_IO, "store_io", "cannot list the cache");
        if (fd >= 0) close(fd);
        return rc;
    }
    bool good = true;
    for (const struct dirent *at; good && (at = readdir(dir));) good = entry_take(s, at->d_name);
    closedir(dir);
    if (!good) return err_no_memory(e);
    if (s->n_found) qsort(s->found, s->n_found, sizeof *s->found, by_name);
    return RC_OK;
}

static int record_compare(void *ctx, const struct prefix_file *f)
{
    struct sweep *s = ctx;
    struct found wanted = {.name = {f->id, (enum prefix_kind)f->kind}};
    struct found *at = s->n_found ? bsearch(&wanted, s->found, s->n_found, sizeof wanted, by_name) : NULL;
    if (!at || at->bytes != f->bytes) return found_add(&s->gone, &s->n_gone, &s->gone_cap, &wanted) ? 0 : ENOMEM;
    at->known = true;
    return 0;
}

/* A file that the index does not know: a record of it, false when there can be none. Its items are verified when they are read. */
static bool adoptable(const struct sweep *s, const struct found *found, struct prefix_file *out)
{
    struct prefix_payload p;
    struct timespec now;
    int fd;
    if (prefix_payload_open(s->folder_fd, found->name, &p, &fd) != PREFIX_WHOLE) return false;
    close(fd);
    /* A clock that was wrong once must not make a file the youngest for ever. */
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t now_us = (uint64_t)now.tv_sec * 1000000;
    *out = (struct prefix_file){.id = found->name.id,
                                .bytes = found->bytes,
                                .last_use_us = found->modified_us < now_us ? found->modified_us : now_us,
                                .kind = p.h.kind,
                                .first_block = p.h.first_block,
                                .n_blocks = p.h.n_blocks};
    prefix_payload_keys(&p, out->keys);
    return true;
}

static int unknown_adopt(struct prefix_index *ix, MDB_txn *txn, const struct sweep *s, bool *changed)
{
    int mdb = 0;
    for (size_t i = 0; i < s->n_found && !mdb; i++) {
        struct found *at = &s->found[i];
        struct prefix_file f;
        if (at->known || !adoptable(s, at, &f)) continue;
        mdb = prefix_index_add(ix, txn, &f);
        /* Not at->known: a file whose keys are all taken is as useless as one that cannot be read. */
        if (mdb == PREFIX_NOTHING) {
            mdb = 0;
            continue;
        }
        at->known = *changed = true;
    }
    return mdb;
}

static int sweep_apply(struct prefix_index *ix, MDB_txn *txn, void *ctx)
{
    struct sweep *s = ctx;
    s->n_gone = 0;
    for (size_t i = 0; i < s->n_found; i++) s->found[i].known = false;
    int mdb = prefix_index_each(ix, txn, record_compare, s);
    for (size_t i = 0; i < s->n_gone && !mdb; i++) mdb = prefix_index_remove(ix, txn, s->gone[i].name.id);
    bool changed = s->n_gone > 0;
    if (!mdb) mdb = unknown_adopt(ix, txn, s, &changed);
    return mdb ? mdb : changed ? 0 : PREFIX_NOTHING;
}

static enum rc sweep(const char *path, int folder_fd, struct err *e)
{
    struct sweep s = {.folder_fd = folder_fd};
    struct prefix_index ix;
    enum rc rc = folder_list(&s, e);
    if (rc == RC_OK) {
        int mdb = prefix_index_open(path, false, &ix);
        if (!mdb) {
            mdb = prefix_index_change(&ix, sweep_apply, &s);
            prefix_index_close(&ix);
        }
        if (mdb) rc = prefix_index_error(mdb, "cannot make it", e);
    }
    for (size_t i = 0; i < s.n_found && rc == RC_OK; i++) {
        char name[PREFIX_NAME_CHARS];
        prefix_name_format(s.found[i].name, name);
        if (!s.found[i].known) unlinkat(folder_fd, name, 0);
    }
    free(s.found);
    free(s.gone);
    return rc == RC_FATAL ? RC_FAILED : rc;
}

enum rc prefix_recover(const char *folder, int folder_fd, struct err *e)
{
    char path[PATH_MAX];
    enum rc rc = index_renew(folder, folder_fd, e);
    if (rc == RC_OK) rc = path_in(folder, PREFIX_INDEX_NAME, path, e);
    return rc == RC_OK ? sweep(path, folder_fd, e) : rc;
}
