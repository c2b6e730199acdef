/* state_check: is this environment safe to read?
 *
 * LMDB pages carry no checksums, and a truncated or damaged file kills whoever touches the wrong page (SIGBUS,
 * SIGSEGV, an assertion in the library). So a child process walks everything first: the free list, every table,
 * every value against its checksum. Whatever happens to it happens before this process has opened the environment;
 * no LMDB handle, lock or transaction exists that could cross the fork, and the child leaves with _exit. It takes no
 * core dump with it (records are private), dies with its parent, and leaves INT, TERM and HUP to it. The walk is
 * bounded by the file's size: damaged pages may point in circles. */
#define _GNU_SOURCE
#include "state_codec.h"

#include <errno.h>
#include <lmdb.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* What the child says by its exit status. */
enum walk_status { WALK_GOOD = 0, WALK_DAMAGED = 41, WALK_CANNOT_OPEN = 42 };

static bool value_good(enum state_table table, const MDB_val *key, const MDB_val *value)
{
    struct bytes_view v;
    if (!state_value_open(key->mv_data, key->mv_size, value->mv_data, value->mv_size, &v)) return false;
    struct state_job job;
    struct state_result result;
    struct state_attempts attempts;
    switch (table) {
    case STATE_JOBS: return key->mv_size == 8 && state_job_decode(v, &job);
    case STATE_RESULTS: return key->mv_size == STATE_KEY_BYTES && state_result_decode(v, &result);
    case STATE_ATTEMPTS: return key->mv_size == STATE_KEY_BYTES && state_attempts_decode(v, &attempts);
    default: return true;
    }
}

/* One pass over a table; table STATE_TABLES: the free list, whose values are the library's own. */
static bool table_good(MDB_txn *txn, MDB_dbi dbi, enum state_table table, uint64_t max_entries)
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
        if (good && table == STATE_TABLES) {
            /* Touch the list's ends: they may lie on overflow pages. */
            volatile char touched = ((const char *)value.mv_data)[value.mv_size ? value.mv_size - 1 : 0];
            (void)touched;
        } else if (good) {
            good = value_good(table, &key, &value);
        }
    }
    mdb_cursor_close(cursor);
    return good && rc == MDB_NOTFOUND && seen == stat.ms_entries;
}

static enum walk_status walk(const char *folder)
{
    MDB_env *env;
    MDB_txn *txn;
    if (mdb_env_create(&env)) return WALK_CANNOT_OPEN;
    mdb_env_set_maxdbs(env, STATE_TABLES);
    int rc = mdb_env_open(env, folder, MDB_RDONLY | MDB_NOTLS, 0600);
    if (rc) return rc == MDB_INVALID || rc == EINVAL || rc == MDB_CORRUPTED ? WALK_DAMAGED : WALK_CANNOT_OPEN;
    char path[4096];
    struct stat st;
    if (snprintf(path, sizeof path, "%s/data.mdb", folder) >= (int)sizeof path || stat(path, &st))
        return WALK_CANNOT_OPEN;
    uint64_t max_entries = (uint64_t)st.st_size / 8;
    if (mdb_txn_begin(env, NULL, MDB_RDONLY, &txn)) return WALK_CANNOT_OPEN;
    if (!table_good(txn, 0, STATE_TABLES, max_entries)) return WALK_DAMAGED;
    for (enum state_table t = 0; t < STATE_TABLES; t++) {
        MDB_dbi dbi;
        rc = mdb_dbi_open(txn, state_table_names[t], 0, &dbi);
        if (rc == MDB_NOTFOUND) continue;
        if (rc || !table_good(txn, dbi, t, max_entries)) return WALK_DAMAGED;
    }
    mdb_txn_abort(txn);
    mdb_env_close(env);
    return WALK_GOOD;
}

/* In the child. */
static void walk_and_leave(const char *folder, pid_t parent)
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
    if (getppid() != parent) _exit(WALK_CANNOT_OPEN);
    /* A failed assertion of the library would print to the terminal of someone who can do nothing with it. */
    close(STDERR_FILENO);
    _exit((int)walk(folder));
}

enum rc state_check(const char *folder, struct err *e)
{
    pid_t parent = getpid();
    pid_t pid = fork();
    if (pid < 0) return err_errno(e, RC_FAILED, EXIT_INTERNAL, "fork_failed", "cannot start the check of %s", folder);
    if (pid == 0) walk_and_leave(folder, parent);
    int status = 0;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return err_errno(e, RC_FAILED, EXIT_INTERNAL, "wait_failed", "cannot wait for the check of %s", folder);
    if (WIFEXITED(status) && WEXITSTATUS(status) == WALK_GOOD) return RC_OK;
    if (WIFEXITED(status) && WEXITSTATUS(status) == WALK_CANNOT_OPEN)
        return err_set(e, RC_FAILED, EXIT_IO, "state_unreadable", "cannot open the state in %s", folder);
    if (WIFSIGNALED(status))
        return err_set(e, RC_FAILED, EXIT_IO, "state_damaged", "the state in %s is damaged (its check died: %s)",
                       folder, strsignal(WTERMSIG(status)));
    return err_set(e, RC_FAILED, EXIT_IO, "state_damaged",
                   "the state in %s is damaged (a value or page is not what was "
                   "written)",
                   folder);
}
