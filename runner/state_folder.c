/* state_folder: the folder of a state, before LMDB sees it.
 *
 * Order of a first opening, so that a power cut at any moment leaves either no state or a whole one:
 *   mkdir, fsync of its parent; lock; LMDB makes data.mdb and commits the tables; the marker file `id` is written to a
 *   temporary name, fsynced, renamed, and the folder is fsynced, which also makes data.mdb's name durable.
 * Only then does state_open return, so nothing can have been reported as done in a folder without a marker: what
 * lies there is an opening that was cut short, and is removed; should the marker have been lost by hand, what has answers is moved
 * aside instead. With a marker, a missing or empty data.mdb is
 * damage, never a fresh start (LMDB takes an empty file for a new database). The lock is a flock of our own: LMDB
 * would let a second writer wait in silence. Its text is for people. */
#define _GNU_SOURCE
#include "state_folder.h"
#include "lmdb_check.h"
#include "lmdb_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static enum rc parent_fsync(const char *folder, struct err *e)
{
    char *copy = strdup(folder);
    if (!copy) return err_no_memory(e);
    enum rc rc = RC_OK;
    const char *parent = dirname(copy);
    int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || fsync(fd)) rc = err_errno(e, RC_FAILED, EXIT_IO, "cannot_sync", "cannot sync the folder %s", parent);
    if (fd >= 0) close(fd);
    free(copy);
    return rc;
}

/* LMDB and its locks work on one machine's files only. */
static enum rc refuse_remote(int folder_fd, const char *folder, struct err *e)
{
    const char *remote = lmdb_remote_filesystem(folder_fd);
    if (remote)
        return err_set(e, RC_FAILED, EXIT_CONFIG, "remote_state",
                       "%s lies on %s: a state must lie on a local disk (give --state; --state-on-network when no other machine "
                       "uses it)",
                       folder, remote);
    return RC_OK;
}

static enum rc folder_make(const char *folder, struct err *e)
{
    if (mkdir(folder, 0700) == 0 || errno == EEXIST) return RC_OK;
    if (errno == ENOSPC || errno == EIO || errno == EDQUOT)
        return err_errno(e, RC_FAILED, EXIT_IO, "cannot_make_state", "cannot make the state folder %s", folder);
    return err_errno(e, RC_FAILED, EXIT_NO_OUTPUT, "cannot_make_state", "cannot make the state folder %s", folder);
}

static enum rc lock_take(struct state_folder *f, struct err *e)
{
    f->lock_fd = openat(f->fd, "lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (f->lock_fd < 0) return err_errno(e, RC_FAILED, EXIT_IO, "cannot_lock", "cannot open %s/lock", f->path);
    if (flock(f->lock_fd, LOCK_EX | LOCK_NB) == 0) {
        char host[65] = "", text[160];
        gethostname(host, sizeof host - 1);
        int n = snprintf(text, sizeof text, "process %ld on %s\n", (long)getpid(), host);
        /* Informative only: a full disk must not stop anything here. */
        if (ftruncate(f->lock_fd, 0) == 0 && pwrite(f->lock_fd, text, (size_t)n, 0) < 0) return RC_OK;
        return RC_OK;
    }
    if (errno != EWOULDBLOCK) {
        enum rc rc = err_errno(e, RC_FAILED, EXIT_IO, "cannot_lock", "cannot lock %s/lock", f->path);
        close(f->lock_fd);
        f->lock_fd = -1;
        return rc;
    }
    char holder[161] = "";
    ssize_t n = pread(f->lock_fd, holder, sizeof holder - 1, 0);
    holder[n > 0 ? n : 0] = '\0';
    holder[strcspn(holder, "\n")] = '\0';
    close(f->lock_fd);
    f->lock_fd = -1; /* its text is the holder's */
    return err_set(e, RC_FAILED, EXIT_RESUMABLE, "state_locked", "%s is in use by %s", f->path,
                   holder[0] ? holder : "another process");
}

/* The marker's id; RC_RETRY when there is none. */
static enum rc marker_read(struct state_folder *f, struct err *e)
{
    char path[PATH_MAX];
    struct buf text = {0};
    struct stat st;
    if (fstatat(f->fd, "id", &st, AT_SYMLINK_NOFOLLOW)) {
        if (errno == ENOENT) return RC_RETRY;
        return err_errno(e, RC_FAILED, EXIT_IO, "state_unreadable", "cannot look at %s/id", f->path);
    }
    if (snprintf(path, sizeof path, "%s/id", f->path) >= (int)sizeof path)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "path_too_long", "the path of the state folder is too long");
    enum rc rc = file_read(path, 64, &text, e);
    if (rc == RC_OK) {
        bool good = text.len == STATE_ID_CHARS + 1 && strspn(text.data, "0123456789abcdef") == STATE_ID_CHARS;
        if (good)
            memcpy(f->id, text.data, STATE_ID_CHARS);
        else
            rc = err_set(e, RC_FAILED, EXIT_IO, "state_damaged",
                         "the state in %s is damaged (its file id is not whole)", f->path);
    }
    buf_free(&text);
    return rc;
}

static enum rc data_there(struct state_folder *f, bool *there, struct err *e)
{
    struct stat st;
    *there = fstatat(f->fd, "data.mdb", &st, AT_SYMLINK_NOFOLLOW) == 0;
    if (!*there && errno != ENOENT)
        return err_errno(e, RC_FAILED, EXIT_IO, "state_unreadable", "cannot look at %s/data.mdb", f->path);
    if (f->id[0] && (!*there || st.st_size == 0))
        return err_set(e, RC_FAILED, EXIT_IO, "state_damaged", "the state in %s is damaged (data.mdb is %s)", f->path,
                       *there ? "empty" : "missing");
    return RC_OK;
}

static void note_job_key(void *ctx, struct bytes_view key, struct bytes_view value)
{
    (void)value;
    if (key.len == STATE_KEY_BYTES) *(bool *)ctx = true;
}

/* Whether data.mdb could hold results or attempts. */
static bool may_hold_answers(const struct state_folder *f)
{
    struct lmdb_pages pages = {0};
    struct buf path = {0};
    struct stat st;
    bool found = fstatat(f->fd, "data.mdb", &st, AT_SYMLINK_NOFOLLOW) || st.st_size > 0;
    if (found && buf_printf(&path, "%s/data.mdb", f->path) && lmdb_pages_open(path.data, &pages, NULL) == RC_OK) {
        found = false;
        lmdb_pages_scan(&pages, note_job_key, &found);
    }
    lmdb_pages_close(&pages);
    buf_free(&path);
    return found;
}

/* An opening that was cut short before the marker: nothing in it was ever reported as done. */
static enum rc incomplete_clear(struct state_folder *f, struct err *e)
{
    const bool keep = may_hold_answers(f);
    if ((keep ? renameat(f->fd, "data.mdb", f->fd, "data.mdb.incomplete") : unlinkat(f->fd, "data.mdb", 0)) ||
        (unlinkat(f->fd, "lock.mdb", 0) && errno != ENOENT))
        return err_errno(e, RC_FAILED, EXIT_IO, "cannot_make_state", "cannot clear an incomplete data.mdb of %s away", f->path);
    return RC_OK;
}

static enum rc no_state(const struct state_folder *f, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "no_state", "there is no state in %s", f->path);
}

static enum rc folder_look(struct state_folder *f, enum state_mode mode, struct err *e)
{
    enum state_mode kind = mode % STATE_ON_NETWORK;
    bool there;
    enum rc rc = mode & STATE_ON_NETWORK ? RC_OK : refuse_remote(f->fd, f->path, e);
    /* A folder that is no state gets no lock file either. */
    if (rc == RC_OK && kind == STATE_CHANGE && (rc = marker_read(f, e)) == RC_RETRY) return no_state(f, e);
    if (rc == RC_OK && kind != STATE_READ) rc = lock_take(f, e);
    if (rc != RC_OK) return rc;
    rc = marker_read(f, e);
    if (rc == RC_RETRY) {
        if (kind != STATE_WRITE) return no_state(f, e);
        rc = parent_fsync(f->path, e);
    }
    if (rc != RC_OK) return rc;
    rc = data_there(f, &there, e);
    if (rc == RC_OK && there && !f->id[0]) rc = incomplete_clear(f, e);
    return rc;
}

bool state_is_there(const char *folder)
{
    struct buf path = {0};
    buf_printf(&path, "%s/id", folder);
    bool there = path.data && access(path.data, F_OK) == 0;
    buf_clear(&path);
    buf_printf(&path, "%s/data.mdb", folder);
    there = there && path.data && access(path.data, F_OK) == 0;
    buf_free(&path);
    return there;
}

enum rc state_folder_open(const char *path, enum state_mode mode, struct state_folder *out, struct err *e)
{
    bool make = (mode % STATE_ON_NETWORK) == STATE_WRITE;
    *out = (struct state_folder){.fd = -1, .lock_fd = -1};
    enum rc rc = make ? folder_make(path, e) : RC_OK;
    if (rc != RC_OK) return rc;
    out->path = strdup(path);
    if (!out->path) return err_no_memory(e);
    out->fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (out->fd < 0)
        rc = err_errno(e, RC_BAD_INPUT, make ? EXIT_NO_OUTPUT : EXIT_NO_INPUT, "no_state",
                       "cannot open the state folder %s", path);
    else
        rc = folder_look(out, mode, e);
    if (rc != RC_OK) state_folder_close(out);
    return rc;
}

enum rc state_folder_mark(struct state_folder *f, const char *id, struct err *e)
{
    char text[STATE_ID_CHARS + 2];
    snprintf(text, sizeof text, "%.*s\n", STATE_ID_CHARS, id);
    int fd = openat(f->fd, "id.new", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    bool good = fd >= 0 && fd_write_all(fd, text, STATE_ID_CHARS + 1) && fsync(fd) == 0;
    if (fd >= 0 && close(fd)) good = false;
    good = good && renameat(f->fd, "id.new", f->fd, "id") == 0 && fsync(f->fd) == 0;
    if (!good)
        return err_errno(e, RC_FAILED, EXIT_IO, "cannot_make_state", "cannot complete the state folder %s", f->path);
    memcpy(f->id, id, STATE_ID_CHARS);
    return RC_OK;
}

void state_folder_close(struct state_folder *f)
{
    if (f->lock_fd >= 0) {
        if (ftruncate(f->lock_fd, 0)) {
            /* The text is for people only. */
        }
        close(f->lock_fd);
    }
    if (f->fd >= 0) close(f->fd);
    free(f->path);
    *f = (struct state_folder){.fd = -1, .lock_fd = -1};
}
