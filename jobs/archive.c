/* archive: one output, whole or not at all.
 *
 * Everything is written to NAME.tmp.PID in the target's own folder and renamed when it is complete and on disk:
 * libarchive's close (where a full disk shows itself first), fsync, close, rename, fsync of the folder. A folder as
 * target is built the same way, its files fsynced one by one, then exchanged with the old one in one step, so that a
 * reader never finds half of each; the old one is deleted afterwards under the temporary's name.
 *
 * libarchive pads short members and cuts long ones without a word, so sizes are counted here. It also loses its
 * compressor's memory (tens of MiB for xz) when a write fails; so it writes into a sink of ours that never fails
 * towards it, keeps the first error, and is asked after every call. Members have no times, owners or modes of their
 * own, compressors one thread and fixed levels: equal members, equal bytes, in every time zone.
 *
 * A temporary is locked (flock) while its writer lives. Leftovers are removed by the next writer of the same path
 * when their process is gone and nobody holds that lock: a process number alone means little across containers and
 * hosts.
 *
 * A writer that failed stays failed; only archive_publish and archive_discard free it. */
#define _GNU_SOURCE
#include "archive.h"

#include <lib_archive.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    NAME_MAX_BYTES = 100, /* of a member; what a plain tar header holds */
    BLOCK_BYTES = 1 << 16,
    PAD_MAX_BYTES = 64 << 20 /* what libarchive may pad a member with only to be freed properly */
};

/* Where libarchive writes to. */
struct sink {
    int fd;
    int error; /* errno of the first failed write; from then on bytes are dropped */
    bool drop;
};

struct member_name {
    struct member_name *next;
    char name[NAME_MAX_BYTES + 1];
};

struct archive_writer {
    enum archive_kind kind;
    char *path; /* as given, for messages */
    char *base; /* last component */
    char *temp; /* name of the temporary beside it */
    int dir_fd;
    bool has_temp;
    int temp_fd;         /* the temporary: a file, or the folder; locked while open */
    int member_fd;       /* folder: the file being written, else -1 */
    struct archive *lib; /* NULL for a folder */
    struct sink sink;
    struct member_name *names;
    bool in_member, failed;
    uint64_t left; /* bytes the current member still needs */
};

enum archive_kind archive_kind_of(const char *path)
{
    static const struct {
        const char *suffix;
        enum archive_kind kind;
    } kinds[] = {{".tar.zst", ARCHIVE_TAR_ZST},
                 {".tar.gz", ARCHIVE_TAR_GZ},
                 {".tar.xz", ARCHIVE_TAR_XZ},
                 {".tar", ARCHIVE_TAR},
                 {".zip", ARCHIVE_ZIP}};
    size_t len = strlen(path);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        size_t n = strlen(kinds[i].suffix);
        if (len > n && !strcmp(path + len - n, kinds[i].suffix)) return kinds[i].kind;
    }
    return ARCHIVE_FOLDER;
}

/* --- temporaries and folders -------------------------------------------------------------------------------------- */

/* Removes a file, or a folder that holds no folders (what was made here never does). */
static int remove_flat(int dir_fd, const char *name)
{
    if (!unlinkat(dir_fd, name, 0)) return 0;
    if (errno != EISDIR && errno != EPERM) return -1;
    int fd = openat(dir_fd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d) {
        if (fd >= 0) close(fd);
        return -1;
    }
    for (struct dirent *entry; (entry = readdir(d));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) unlinkat(dirfd(d), entry->d_name, 0);
    closedir(d);
    return unlinkat(dir_fd, name, AT_REMOVEDIR);
}

/* name is BASE.tmp.PID of a process that is gone (or of this one: process numbers repeat) and is not locked. */
static bool is_leftover(const struct archive_writer *w, const char *name)
{
    size_t n = strlen(w->base);
    if (strncmp(name, w->base, n) || strncmp(name + n, ".tmp.", 5)) return false;
    const char *digits = name + n + 5;
    if (!*digits || strspn(digits, "0123456789") != strlen(digits) || strlen(digits) > 9) return false;
    pid_t pid = (pid_t)strtol(digits, NULL, 10);
    if (pid <= 0) return false;
    if (pid != getpid() && (!kill(pid, 0) || errno != ESRCH)) return false;
    int fd = openat(w->dir_fd, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return errno != ENOENT;
    bool free_now = !flock(fd, LOCK_EX | LOCK_NB);
    close(fd);
    return free_now;
}

static void remove_leftovers(const struct archive_writer *w)
{
    int fd = openat(w->dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d) {
        if (fd >= 0) close(fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(d));)
        if (is_leftover(w, entry->d_name)) remove_flat(w->dir_fd, entry->d_name);
    closedir(d);
}

/* A folder that is to be replaced may hold nothing that remove_flat would leave behind. */
static enum rc check_flat(const struct archive_writer *w, struct err *e)
{
    int fd = openat(w->dir_fd, w->base, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *d = fd >= 0 ? fdopendir(fd) : NULL;
    if (!d) {
        enum rc rc = err_errno(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_replace", "cannot read the folder %s", w->path);
        if (fd >= 0) close(fd);
        return rc;
    }
    enum rc rc = RC_OK;
    for (struct dirent *entry; rc == RC_OK && (entry = readdir(d));) {
        struct stat st;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (fstatat(dirfd(d), entry->d_name, &st, AT_SYMLINK_NOFOLLOW) || !S_ISREG(st.st_mode))
            rc = err_set(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_replace",
                         "%s holds more than plain files and is not replaced", w->path);
    }
    closedir(d);
    return rc;
}

/* What is there already must be absent or of the kind that is going to replace it. */
static enum rc check_target(const struct archive_writer *w, struct err *e)
{
    struct stat st;
    if (fstatat(w->dir_fd, w->base, &st, AT_SYMLINK_NOFOLLOW)) {
        if (errno == ENOENT) return RC_OK;
        return err_errno(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_create", "cannot create %s", w->path);
    }
    if (w->kind == ARCHIVE_FOLDER && S_ISDIR(st.st_mode)) return check_flat(w, e);
    if (w->kind != ARCHIVE_FOLDER && S_ISREG(st.st_mode)) return RC_OK;
    const char *what = S_ISDIR(st.st_mode)   ? "a folder"
                       : S_ISLNK(st.st_mode) ? "a symbolic link"
                       : S_ISREG(st.st_mode) ? "a file, and this name means a folder"
                                             : "no regular file";
    return err_set(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_replace", "%s is %s and is not replaced", w->path, what);
}

/* Splits path into an open folder and a last component. */
static enum rc open_folder_of(struct archive_writer *w, const char *path, struct err *e)
{
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/') len--;
    char *copy = strndup(path, len);
    if (!copy) return err_no_memory(e);
    char *slash = strrchr(copy, '/');
    const char *last = slash ? slash + 1 : copy;
    enum rc rc = RC_OK;
    if (!*last || !strcmp(last, ".") || !strcmp(last, "..")) {
        rc = err_set(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_create", "\"%s\" is no name for an output", path);
    } else if (!(w->base = strdup(last)) || asprintf(&w->temp, "%s.tmp.%ld", last, (long)getpid()) < 0) {
        w->temp = NULL;
        rc = err_no_memory(e);
    } else {
        if (slash) slash[slash == copy] = '\0'; /* keeps the "/" of the root folder */
        w->dir_fd = open(slash ? copy : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (w->dir_fd < 0)
            rc = err_errno(e, RC_BAD_INPUT, EXIT_NO_OUTPUT, "cannot_create", "cannot open the folder of %s", path);
    }
    free(copy);
    return rc;
}

static enum rc create_temp(struct archive_writer *w, struct err *e)
{
    if (w->kind == ARCHIVE_FOLDER) {
        if (!mkdirat(w->dir_fd, w->temp, 0700))
            w->temp_fd = openat(w->dir_fd, w->temp, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    } else {
        w->temp_fd = openat(w->dir_fd, w->temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    }
    if (w->temp_fd < 0) {
        bool io = errno == ENOSPC || errno == EDQUOT || errno == EIO;
        return err_errno(e, io ? RC_FAILED : RC_BAD_INPUT, io ? EXIT_IO : EXIT_NO_OUTPUT, "cannot_create",
                         "cannot create a temporary beside %s", w->path);
    }
    w->has_temp = true;
    flock(w->temp_fd, LOCK_EX | LOCK_NB); /* where there are no locks the process number has to do */
    return RC_OK;
}

/* --- libarchive --------------------------------------------------------------------------------------------------- */

static enum rc system_error(struct archive_writer *w, const char *doing, struct err *e)
{
    w->failed = true;
    return err_errno(e, RC_FAILED, EXIT_IO, "archive_write_failed", "cannot %s %s", doing, w->path);
}

static la_ssize_t sink_write(struct archive *lib, void *client, const void *bytes, size_t n_bytes)
{
    struct sink *sink = client;
    (void)lib;
    errno = 0;
    if (!sink->drop && !fd_write_all(sink->fd, bytes, n_bytes)) {
        sink->error = errno ? errno : EIO;
        sink->drop = true;
    }
    return (la_ssize_t)n_bytes;
}

/* The result of a call into libarchive: what it says itself, then what the sink knows. */
static enum rc lib_result(struct archive_writer *w, bool ok, struct err *e)
{
    if (w->sink.error) {
        errno = w->sink.error;
        return system_error(w, "write", e);
    }
    if (ok) return RC_OK;
    const char *text = archive_error_string(w->lib);
    w->failed = true;
    return err_set(e, RC_FAILED, EXIT_IO, "archive_write_failed", "cannot write %s: %s", w->path,
                   text ? text : "unknown error of the archive library");
}

static enum rc open_library(struct archive_writer *w, struct err *e)
{
    struct archive *a = w->lib = archive_write_new();
    if (!a) return err_no_memory(e);
    int ok = ARCHIVE_OK;
    if (w->kind == ARCHIVE_ZIP) {
        ok |= archive_write_set_format_zip(a);
        ok |= archive_write_set_options(a, "zip:compression=deflate,zip:compression-level=6");
    } else {
        ok |= archive_write_set_format_pax_restricted(a);
    }
    if (w->kind == ARCHIVE_TAR_ZST) {
        ok |= archive_write_add_filter_zstd(a);
        ok |= archive_write_set_options(a, "zstd:compression-level=9");
    } else if (w->kind == ARCHIVE_TAR_GZ) {
        ok |= archive_write_add_filter_gzip(a);
        ok |= archive_write_set_options(a, "gzip:compression-level=6,gzip:!timestamp");
    } else if (w->kind == ARCHIVE_TAR_XZ) {
        ok |= archive_write_add_filter_xz(a);
        ok |= archive_write_set_options(a, "xz:compression-level=6,xz:threads=1");
    }
    ok |= archive_write_set_bytes_per_block(a, BLOCK_BYTES);
    ok |= archive_write_set_bytes_in_last_block(a, 1);
    w->sink.fd = w->temp_fd;
    if (ok == ARCHIVE_OK) ok = archive_write_open(a, &w->sink, NULL, sink_write, NULL);
    return lib_result(w, ok == ARCHIVE_OK, e);
}

/* --- the writer --------------------------------------------------------------------------------------------------- */

static void free_writer(struct archive_writer *w)
{
    if (w->lib) archive_write_free(w->lib);
    if (w->member_fd >= 0) close(w->member_fd);
    if (w->temp_fd >= 0) close(w->temp_fd);
    if (w->dir_fd >= 0) close(w->dir_fd);
    while (w->names) {
        struct member_name *next = w->names->next;
        free(w->names);
        w->names = next;
    }
    free(w->temp);
    free(w->base);
    free(w->path);
    free(w);
}

void archive_discard(struct archive_writer *w)
{
    if (!w) return;
    w->sink.drop = true;
    if (w->lib && w->left > PAD_MAX_BYTES) archive_write_fail(w->lib);
    if (w->has_temp) remove_flat(w->dir_fd, w->temp);
    free_writer(w);
}

enum rc archive_create(const char *path, struct archive_writer **out, struct err *e)
{
    *out = NULL;
    struct archive_writer *w = calloc(1, sizeof *w);
    if (!w) return err_no_memory(e);
    w->kind = archive_kind_of(path);
    w->dir_fd = w->temp_fd = w->member_fd = -1;
    w->path = strdup(path);
    enum rc rc = w->path ? open_folder_of(w, path, e) : err_no_memory(e);
    if (rc == RC_OK) rc = check_target(w, e);
    if (rc == RC_OK) remove_leftovers(w);
    if (rc == RC_OK) rc = create_temp(w, e);
    if (rc == RC_OK && w->kind != ARCHIVE_FOLDER) rc = open_library(w, e);
    if (rc != RC_OK) {
        archive_discard(w);
        return rc;
    }
    *out = w;
    return RC_OK;
}

static enum rc misuse(struct archive_writer *w, const char *name, const char *text, struct err *e)
{
    w->failed = true;
    return err_set(e, RC_FATAL, EXIT_INTERNAL, "archive_misuse", "%s, member %s: %s", w->path, name, text);
}

static enum rc already_failed(const struct archive_writer *w, struct err *e)
{
    return err_set(e, RC_FAILED, EXIT_IO, "archive_write_failed", "%s could not be written", w->path);
}

static enum rc end_member(struct archive_writer *w, struct err *e)
{
    if (w->failed) return already_failed(w, e);
    if (!w->in_member) return RC_OK;
    w->in_member = false;
    if (w->left) return misuse(w, w->names->name, "fewer bytes than its size", e);
    if (w->lib) return lib_result(w, archive_write_finish_entry(w->lib) == ARCHIVE_OK, e);
    int fd = w->member_fd;
    w->member_fd = -1;
    bool synced = !fsync(fd);
    int reason = errno;
    bool closed = !close(fd);
    if (!synced) errno = reason;
    return synced && closed ? RC_OK : system_error(w, "write", e);
}

/* Names come from this program, never from a job; what is not plain is refused all the same. */
static bool is_plain_name(const char *name)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t len = strlen(name);
    return len > 0 && len <= NAME_MAX_BYTES && name[0] != '.' && strspn(name, plain) == len;
}

static enum rc begin_entry(struct archive_writer *w, const char *name, uint64_t size_bytes, struct err *e)
{
    struct archive_entry *entry = archive_entry_new();
    if (!entry) return w->failed = true, err_no_memory(e);
    archive_entry_set_pathname(entry, name);
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    archive_entry_set_size(entry, (la_int64_t)size_bytes);
    archive_entry_set_uid(entry, 0);
    archive_entry_set_gid(entry, 0);
    /* Zip keeps local time: an unset one is written as its earliest date in every time zone. */
    if (w->kind != ARCHIVE_ZIP) archive_entry_set_mtime(entry, 0, 0);
    int rc = archive_write_header(w->lib, entry);
    archive_entry_free(entry);
    return lib_result(w, rc == ARCHIVE_OK, e);
}

enum rc archive_member(struct archive_writer *w, const char *name, uint64_t size_bytes, struct err *e)
{
    enum rc rc = end_member(w, e);
    if (rc != RC_OK) return rc;
    if (!is_plain_name(name) || size_bytes > INT64_MAX) return misuse(w, name, "not a plain name or size", e);
    for (const struct member_name *m = w->names; m; m = m->next)
        if (!strcmp(m->name, name)) return misuse(w, name, "given twice", e);
    struct member_name *m = malloc(sizeof *m);
    if (!m) return w->failed = true, err_no_memory(e);
    snprintf(m->name, sizeof m->name, "%s", name);
    m->next = w->names;
    w->names = m;
    w->in_member = true;
    w->left = size_bytes;
    if (w->lib) return begin_entry(w, name, size_bytes, e);
    w->member_fd = openat(w->temp_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    return w->member_fd >= 0 ? RC_OK : system_error(w, "create a file in", e);
}

enum rc archive_write(struct archive_writer *w, const void *bytes, size_t n_bytes, struct err *e)
{
    if (w->failed) return already_failed(w, e);
    if (!w->in_member) return misuse(w, "(none)", "no member was begun", e);
    if (n_bytes > w->left) return misuse(w, w->names->name, "more bytes than its size", e);
    if (!n_bytes) return RC_OK;
    w->left -= n_bytes;
    if (!w->lib) return fd_write_all(w->member_fd, bytes, n_bytes) ? RC_OK : system_error(w, "write", e);
    la_ssize_t n = archive_write_data(w->lib, bytes, n_bytes);
    return lib_result(w, n >= 0 && (size_t)n == n_bytes, e);
}

/* The temporary takes the target's place. */
static enum rc replace(struct archive_writer *w, struct err *e)
{
    struct stat st;
    bool exchange = w->kind == ARCHIVE_FOLDER && !fstatat(w->dir_fd, w->base, &st, AT_SYMLINK_NOFOLLOW);
    if (!exchange) {
        if (!renameat(w->dir_fd, w->temp, w->dir_fd, w->base)) return RC_OK;
        return system_error(w, "rename the temporary of", e);
    }
    if (!renameat2(w->dir_fd, w->temp, w->dir_fd, w->base, RENAME_EXCHANGE)) return RC_OK;
    w->failed = true;
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP)
        return err_errno(e, RC_FAILED, EXIT_NO_OUTPUT, "no_exchange",
                         "%s exists and its filesystem cannot exchange folders; name an archive file instead", w->path);
    return err_errno(e, RC_FAILED, EXIT_IO, "archive_write_failed", "cannot exchange %s", w->path);
}

static enum rc finish_bytes(struct archive_writer *w, struct err *e)
{
    enum rc rc = end_member(w, e);
    if (rc != RC_OK) return rc;
    if (w->lib) rc = lib_result(w, archive_write_close(w->lib) == ARCHIVE_OK, e);
    if (rc != RC_OK) return rc;
    if (fsync(w->temp_fd)) return system_error(w, "write", e);
    int fd = w->temp_fd;
    w->temp_fd = -1;
    return close(fd) ? system_error(w, "write", e) : RC_OK;
}

enum rc archive_publish(struct archive_writer *w, struct err *e)
{
    enum rc rc = finish_bytes(w, e);
    if (rc == RC_OK) rc = replace(w, e);
    if (rc != RC_OK) {
        archive_discard(w);
        return rc;
    }
    if (fsync(w->dir_fd)) rc = system_error(w, "make lasting", e);
    /* After an exchange the temporary's name holds the old folder. Its loss is wanted, but not needed. */
    if (w->kind == ARCHIVE_FOLDER && remove_flat(w->dir_fd, w->temp) && errno != ENOENT)
        log_line(LOG_WARN, "the old content of %s is left in %s", w->path, w->temp);
    free_writer(w);
    return rc;
}
