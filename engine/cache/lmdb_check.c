/* lmdb_check: a child that may die, and the walk it does.
 *
 * Whatever happens to the child happens before this process has opened the environment; no LMDB handle, lock or
 * transaction exists that could cross the fork, and the child leaves with _exit. The free list's values are the
 * library's own and only touched: a damaged page number in it stays unseen. */
#define _GNU_SOURCE
#include "lmdb_check.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

/* Not in linux/magic.h of every kernel. */
enum {
    CIFS_MAGIC = (int)0xFF534D42,
    SMB2_MAGIC = (int)0xFE534D42,
    SMB1_MAGIC = 0x517B,
    NINEP_MAGIC = 0x01021997,
    CEPH_MAGIC = 0x00C36400,
    LUSTRE_MAGIC = 0x0BD00BD0,
    GPFS_MAGIC = 0x47504653,
    BEEGFS_MAGIC = 0x19830326
};

/* An exit status of its own for a child that has lost its parent: nobody reads it. */
enum { CHILD_ORPHAN = 255 };

static void child_prepare(pid_t parent)
{
    static const int reset[] = {SIGBUS, SIGSEGV, SIGABRT, SIGFPE, SIGILL};
    for (size_t i = 0; i < sizeof reset / sizeof *reset; i++) signal(reset[i], SIG_DFL);
    static const int ignored[] = {SIGINT, SIGTERM, SIGHUP};
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_IGN);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(CHILD_ORPHAN);
    /* A failed assertion of the library would print to the terminal of someone who can do nothing with it. */
    close(STDERR_FILENO);
}

enum rc lmdb_in_child(int (*work)(void *ctx), void *ctx, struct lmdb_child *out, struct err *e)
{
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0) return err_errno(e, RC_FAILED, EXIT_INTERNAL, "fork_failed", "cannot start a check");
    if (pid == 0) {
        child_prepare(parent);
        _exit(work(ctx));
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) return err_errno(e, RC_FAILED, EXIT_INTERNAL, "wait_failed", "cannot wait for a check");
    *out = (struct lmdb_child){WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0};
    return RC_OK;
}

/* Table -1: the free list. */
static bool table_good(const struct lmdb_walk *w, MDB_txn *txn, MDB_dbi dbi, int table, uint64_t max_entries)
{
    MDB_cursor *cursor;
    MDB_stat stat;
    if (mdb_stat(txn, dbi, &stat) || mdb_cursor_open(txn, dbi, &cursor)) return false;
    MDB_val key, value;
    uint64_t seen = 0;
    int rc;
    bool good = true;
    while (good && !(rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT))) {
        good = ++seen <= max_entries;
        if (good && table < 0) {
            /* Touch the list's ends: they may lie on overflow pages. */
            volatile char touched = ((const char *)value.mv_data)[value.mv_size ? value.mv_size - 1 : 0];
            (void)touched;
        } else if (good) {
            good = w->entry(w->ctx, table, &key, &value);
        }
    }
    mdb_cursor_close(cursor);
    return good && rc == MDB_NOTFOUND && seen == stat.ms_entries;
}

/* A transaction that the snapshot's check has passed; else none, and why. */
static enum lmdb_verdict snapshot_begin(const struct lmdb_walk *w, MDB_env *env, MDB_txn **txn)
{
    enum { MOST_TRIES = 1000 };
    enum lmdb_verdict verdict = LMDB_UNREADABLE;
    for (int i = 0; i < MOST_TRIES && verdict == LMDB_UNREADABLE; i++) {
        if (mdb_txn_begin(env, NULL, MDB_RDONLY, txn)) return LMDB_UNREADABLE;
        verdict = w->snapshot ? w->snapshot(w->ctx, mdb_txn_id(*txn)) : LMDB_GOOD;
        if (verdict != LMDB_GOOD) mdb_txn_abort(*txn);
    }
    return verdict;
}

static enum lmdb_verdict tables_walk(const struct lmdb_walk *w, MDB_env *env, uint64_t max_entries)
{
    MDB_txn *txn;
    enum lmdb_verdict verdict = snapshot_begin(w, env, &txn);
    if (verdict != LMDB_GOOD) return verdict;
    if (!table_good(w, txn, 0, -1, max_entries)) verdict = LMDB_DAMAGED;
    for (int t = 0; t < w->n_tables && verdict == LMDB_GOOD; t++) {
        MDB_dbi dbi;
        int rc = mdb_dbi_open(txn, w->tables[t], 0, &dbi);
        if (rc == MDB_NOTFOUND) continue;
        if (rc || !table_good(w, txn, dbi, t, max_entries)) verdict = LMDB_DAMAGED;
    }
    mdb_txn_abort(txn);
    return verdict;
}

enum lmdb_verdict lmdb_walk(const struct lmdb_walk *w)
{
    MDB_env *env;
    char path[4096];
    struct stat st;
    const bool bare = w->flags & MDB_NOSUBDIR;
    if (snprintf(path, sizeof path, "%s%s", w->path, bare ? "-lock" : "/lock.mdb") >= (int)sizeof path || lmdb_lock_reserve(path))
        return LMDB_UNREADABLE;
    if (snprintf(path, sizeof path, "%s%s", w->path, bare ? "" : "/data.mdb") >= (int)sizeof path || stat(path, &st))
        return LMDB_UNREADABLE;
    if (mdb_env_create(&env)) return LMDB_UNREADABLE;
    mdb_env_set_maxdbs(env, (MDB_dbi)w->n_tables);
    int rc = mdb_env_open(env, w->path, w->flags | MDB_RDONLY | MDB_NOTLS, 0600);
    enum lmdb_verdict verdict;
    if (rc)
        verdict = rc == MDB_INVALID || rc == EINVAL || rc == MDB_CORRUPTED ? LMDB_DAMAGED : LMDB_UNREADABLE;
    else
        verdict = tables_walk(w, env, (uint64_t)st.st_size / 8);
    mdb_env_close(env);
    return verdict;
}

int lmdb_lock_reserve(const char *lock_path)
{
    enum { LOCK_BYTES = 8192 }; /* of LMDB's standard number of readers */
    struct stat st;
    int fd = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    int error = fd < 0 ? errno : 0;
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode)) error = posix_fallocate(fd, 0, LOCK_BYTES);
    if (fd >= 0) close(fd);
    return error == ENOSPC || error == EDQUOT ? error : 0;
}

const char *lmdb_remote_filesystem(int folder_fd)
{
    struct statfs fs;
    if (fstatfs(folder_fd, &fs)) return NULL;
    static const struct {
        int magic;
        const char *name;
    } remote[] = {
        {NFS_SUPER_MAGIC, "NFS"}, {CIFS_MAGIC, "CIFS"}, {SMB2_MAGIC, "SMB"}, {SMB1_MAGIC, "SMB"}, {NINEP_MAGIC, "9p"},
        {CEPH_MAGIC, "Ceph"}, {LUSTRE_MAGIC, "Lustre"}, {GPFS_MAGIC, "GPFS"}, {BEEGFS_MAGIC, "BeeGFS"}};
    for (size_t i = 0; i < sizeof remote / sizeof *remote; i++)
        if ((int)fs.f_type == remote[i].magic) return remote[i].name;
    return NULL;
}
