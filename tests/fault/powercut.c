/* powercut: a preload library that records what a program does to one folder, and can end it at the n-th call.
 *
 * kill -9 keeps what the kernel holds in memory; a power cut does not. So every call that changes a file or a name below
 * the folder, or makes one durable, is recorded with its data, in order over all processes; powercut.py rebuilds from the
 * record what a disk could hold. What the program writes to stdout and stderr is recorded in the same order: what it said
 * before the cut must be true after it.
 *
 * Every recorded call opens the log, locks it, does the call, appends the record. The lock spans the call, so the order in
 * the log is the order of the effects; opening it anew survives programs that close or reuse descriptors. Calls are made
 * as system calls: nothing is looked up, nothing recurses. Writing through a shared mapping or stdio is not seen; the
 * former is recorded as such, the latter shows up when powercut.py compares the replayed record with the real folder.
 *
 * Three variables steer it: POWERCUT_FOLDER (absolute, no symbolic links), POWERCUT_LOG (made by powercut.py),
 * POWERCUT_DIE_AT (0: never). At the n-th call the first process that loaded this library is killed, then the caller, and
 * everyone who calls later. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum op {
    OP_CREATE = 1, /* path -> inode; offset: mode */
    OP_MKDIR,      /* path -> inode; offset: mode */
    OP_WRITE,      /* inode, offset, data; flag 1: durable on return */
    OP_SIZE,       /* inode; offset: new size */
    OP_SYNC,       /* inode: file or directory */
    OP_SYNC_ALL,
    OP_RENAME,     /* path, path2, inode; flag 2: exchange */
    OP_UNLINK,     /* path, inode: file or folder */
    OP_LINK,       /* path2 -> inode */
    OP_SYMLINK,    /* path -> inode; data: target */
    OP_MAPPED,     /* inode: writable shared mapping */
    OP_SAID        /* offset: descriptor, data */
};
enum { FLAG_DURABLE = 1, FLAG_EXCHANGE = 2 };

struct header {
    uint64_t magic, count, end, main_pid, dead, unused[3];
};
static const uint64_t header_magic = 0x31747563726577ULL;

struct record {
    uint32_t op, flags, pid, path_bytes;
    uint64_t inode;
    int64_t offset;
    uint32_t path2_bytes, unused;
    uint64_t data_bytes;
};

static char folder[PATH_MAX];
static size_t folder_bytes;
static char log_path[PATH_MAX];
static uint64_t die_at;

static int raw_open(const char *path, int flags)
{
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0600);
}

/* Opens and locks the log. -1: this process is not recorded. */
static int log_enter(struct header *h)
{
    if (!folder_bytes) return -1;
    int fd = raw_open(log_path, O_RDWR);
    if (fd < 0) return -1;
    while (syscall(SYS_flock, fd, LOCK_EX) && errno == EINTR) {}
    if (syscall(SYS_pread64, fd, h, sizeof *h, 0L) != (long)sizeof *h || h->magic != header_magic) {
        syscall(SYS_close, fd);
        return -1;
    }
    if (h->dead) syscall(SYS_kill, getpid(), SIGKILL);
    return fd;
}

static void log_leave(int fd)
{
    int saved = errno;
    syscall(SYS_close, fd);
    errno = saved;
}

/* A call that counts is about to happen: the place to die. */
static void log_count(int fd, struct header *h)
{
    h->count++;
    h->dead = die_at && h->count >= die_at;
    syscall(SYS_pwrite64, fd, h, sizeof *h, 0L);
    if (!h->dead) return;
    syscall(SYS_kill, (pid_t)h->main_pid, SIGKILL);
    syscall(SYS_kill, getpid(), SIGKILL);
}

static void log_append(int fd, struct header *h, struct record *r, const char *path, const char *path2,
                       const struct iovec *data, int n_data, size_t data_bytes)
{
    int saved = errno;
    r->pid = (uint32_t)getpid();
    r->path_bytes = path ? (uint32_t)strlen(path) : 0;
    r->path2_bytes = path2 ? (uint32_t)strlen(path2) : 0;
    r->data_bytes = data_bytes;
    uint64_t at = h->end;
    const struct iovec parts[3] = {{r, sizeof *r}, {(void *)(uintptr_t)path, r->path_bytes},
                                   {(void *)(uintptr_t)path2, r->path2_bytes}};
    for (int i = 0; i < 3 + n_data; i++) {
        struct iovec v = i < 3 ? parts[i] : data[i - 3];
        if (i >= 3 && v.iov_len > data_bytes) v.iov_len = data_bytes;
        if (i >= 3) data_bytes -= v.iov_len;
        if (v.iov_len && syscall(SYS_pwrite64, fd, v.iov_base, v.iov_len, at) != (long)v.iov_len) {
            static const char text[] = "powercut: the log cannot be written\n";
            syscall(SYS_write, 2, text, sizeof text - 1);
            syscall(SYS_kill, getpid(), SIGKILL);
        }
        at += v.iov_len;
    }
    h->end = at;
    syscall(SYS_pwrite64, fd, h, sizeof *h, 0L);
    errno = saved;
}

static bool below_folder(const char *path)
{
    return !strncmp(path, folder, folder_bytes) && (path[folder_bytes] == '/' || !path[folder_bytes]);
}

/* Where a descriptor lives; false: not below the folder. */
static bool fd_place(int fd, struct stat *st)
{
    if (!folder_bytes || fd < 0) return false;
    int saved = errno;
    char proc[40], path[PATH_MAX];
    snprintf(proc, sizeof proc, "/proc/self/fd/%d", fd);
    long n = syscall(SYS_readlinkat, AT_FDCWD, proc, path, sizeof path - 1);
    bool inside = false;
    if (n > 0) {
        path[n] = '\0';
        inside = below_folder(path) && !fstat(fd, st);
    }
    errno = saved;
    return inside;
}

/* The absolute path of a name, links in its folder resolved, its last part as it is. False: not below the folder. */
static bool path_place(int dirfd, const char *name, char out[PATH_MAX])
{
    if (!folder_bytes || !name) return false;
    int saved = errno;
    char joined[PATH_MAX], proc[40], parent[PATH_MAX];
    bool inside = false;
    int used = -1;
    if (name[0] == '/') {
        used = snprintf(joined, sizeof joined, "%s", name);
    } else if (dirfd == AT_FDCWD) {
        used = snprintf(joined, sizeof joined, "./%s", name);
    } else {
        snprintf(proc, sizeof proc, "/proc/self/fd/%d", dirfd);
        used = snprintf(joined, sizeof joined, "%s/%s", proc, name);
    }
    if (used > 0 && used < (int)sizeof joined) {
        while (used > 1 && joined[used - 1] == '/') joined[--used] = '\0';
        char *slash = strrchr(joined, '/');
        char last[NAME_MAX + 1];
        snprintf(last, sizeof last, "%s", slash + 1);
        slash[slash == joined] = '\0';
        if (realpath(joined, parent)) {
            size_t room = PATH_MAX, length = strlen(parent);
            if (length + 1 + strlen(last) < room) {
                memcpy(out, parent, length);
                out[length] = '/';
                strcpy(out + length + 1, last);
                inside = below_folder(out);
            }
        }
    }
    errno = saved;
    return inside;
}

static uint64_t inode_of(const char *path)
{
    struct stat st;
    int saved = errno;
    uint64_t inode = lstat(path, &st) ? 0 : st.st_ino;
    errno = saved;
    return inode;
}

__attribute__((constructor)) static void powercut_start(void)
{
    const char *f = getenv("POWERCUT_FOLDER"), *l = getenv("POWERCUT_LOG"), *n = getenv("POWERCUT_DIE_AT");
    if (!f || !l || strlen(f) >= sizeof folder || strlen(l) >= sizeof log_path) return;
    strcpy(folder, f);
    strcpy(log_path, l);
    die_at = n ? strtoull(n, NULL, 10) : 0;
    folder_bytes = strlen(folder);
    struct header h;
    int fd = log_enter(&h);
    if (fd < 0) {
        folder_bytes = 0;
        return;
    }
    if (!h.main_pid) {
        h.main_pid = (uint64_t)getpid();
        syscall(SYS_pwrite64, fd, &h, sizeof h, 0L);
    }
    log_leave(fd);
}

/* --- data --- */

/* One write of any form: positioned if offset >= 0. */
static ssize_t do_write(int fd, const struct iovec *v, int n, int64_t offset)
{
    struct stat st;
    struct header h;
    bool said = folder_bytes && (fd == 1 || fd == 2), inside = fd_place(fd, &st) && S_ISREG(st.st_mode);
    int log = said || inside ? log_enter(&h) : -1;
    if (log >= 0 && inside) log_count(log, &h);
    ssize_t done = offset < 0 ? syscall(SYS_writev, fd, v, n) : syscall(SYS_pwritev, fd, v, n, offset, 0L);
    if (log < 0) return done;
    if (done > 0) {
        struct record r = {.op = inside ? OP_WRITE : OP_SAID, .inode = inside ? st.st_ino : 0, .offset = fd};
        if (inside) {
            int flags = (int)syscall(SYS_fcntl, fd, F_GETFL);
            r.flags = flags & O_DSYNC ? FLAG_DURABLE : 0;
            r.offset = offset >= 0 ? offset : syscall(SYS_lseek, fd, 0L, SEEK_CUR) - done;
        }
        log_append(log, &h, &r, NULL, NULL, v, n, (size_t)done);
    }
    log_leave(log);
    return done;
}

#define EXPORT __attribute__((visibility("default")))

EXPORT ssize_t write(int fd, const void *data, size_t n)
{
    struct iovec v = {(void *)(uintptr_t)data, n};
    return do_write(fd, &v, 1, -1);
}
EXPORT ssize_t pwrite(int fd, const void *data, size_t n, off_t offset)
{
    struct iovec v = {(void *)(uintptr_t)data, n};
    return do_write(fd, &v, 1, offset);
}
EXPORT ssize_t pwrite64(int fd, const void *data, size_t n, off_t offset) { return pwrite(fd, data, n, offset); }
EXPORT ssize_t writev(int fd, const struct iovec *v, int n) { return do_write(fd, v, n, -1); }
EXPORT ssize_t pwritev(int fd, const struct iovec *v, int n, off_t offset) { return do_write(fd, v, n, offset); }
EXPORT ssize_t pwritev64(int fd, const struct iovec *v, int n, off_t offset) { return do_write(fd, v, n, offset); }

static void copy_refused(const char *what)
{
    dprintf(2, "powercut: %s below the folder is not recorded\n", what);
    syscall(SYS_kill, getpid(), SIGKILL);
}
EXPORT ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t n, unsigned flags)
{
    struct stat st;
    if (fd_place(out, &st)) copy_refused("copy_file_range");
    return syscall(SYS_copy_file_range, in, in_at, out, out_at, n, flags);
}
EXPORT ssize_t sendfile(int out, int in, off_t *at, size_t n)
{
    struct stat st;
    if (fd_place(out, &st)) copy_refused("sendfile");
    return syscall(SYS_sendfile, out, in, at, n);
}

static int size_changed(int fd, int64_t arg, bool truncating)
{
    struct stat st;
    struct header h;
    int log = fd_place(fd, &st) ? log_enter(&h) : -1;
    if (log >= 0) log_count(log, &h);
    int rc = (int)(truncating ? syscall(SYS_ftruncate, fd, arg) : syscall(SYS_fallocate, fd, 0, 0L, arg));
    if (log < 0) return rc;
    struct record r = {.op = OP_SIZE, .inode = st.st_ino, .offset = truncating || arg > st.st_size ? arg : st.st_size};
    if (!rc) log_append(log, &h, &r, NULL, NULL, NULL, 0, 0);
    log_leave(log);
    return rc;
}
EXPORT int ftruncate(int fd, off_t size) { return size_changed(fd, size, true); }
EXPORT int ftruncate64(int fd, off_t size) { return size_changed(fd, size, true); }
EXPORT int posix_fallocate(int fd, off_t offset, off_t n)
{
    return size_changed(fd, offset + n, false) ? errno : 0;
}
EXPORT int posix_fallocate64(int fd, off_t offset, off_t n) { return posix_fallocate(fd, offset, n); }
EXPORT int fallocate(int fd, int mode, off_t offset, off_t n)
{
    struct stat st;
    if (mode && fd_place(fd, &st)) copy_refused("fallocate with a mode");
    return mode ? (int)syscall(SYS_fallocate, fd, mode, offset, n) : size_changed(fd, offset + n, false);
}
EXPORT int fallocate64(int fd, int mode, off_t offset, off_t n) { return fallocate(fd, mode, offset, n); }

static int do_sync(int fd, long number)
{
    struct stat st;
    struct header h;
    int log = fd_place(fd, &st) ? log_enter(&h) : -1;
    if (log >= 0) log_count(log, &h);
    int rc = (int)syscall(number, fd);
    if (log < 0) return rc;
    struct record r = {.op = number == SYS_syncfs ? OP_SYNC_ALL : OP_SYNC, .inode = st.st_ino};
    if (!rc) log_append(log, &h, &r, NULL, NULL, NULL, 0, 0);
    log_leave(log);
    return rc;
}
EXPORT int fsync(int fd) { return do_sync(fd, SYS_fsync); }
EXPORT int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }
EXPORT int syncfs(int fd) { return do_sync(fd, SYS_syncfs); }

EXPORT void *mmap(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    void *memory = (void *)syscall(SYS_mmap, at, n, prot, flags, fd, offset);
    struct stat st;
    struct header h;
    if (memory == MAP_FAILED || !(flags & MAP_SHARED) || !(prot & PROT_WRITE) || !fd_place(fd, &st)) return memory;
    int log = log_enter(&h);
    if (log < 0) return memory;
    struct record r = {.op = OP_MAPPED, .inode = st.st_ino};
    log_append(log, &h, &r, NULL, NULL, NULL, 0, 0);
    log_leave(log);
    return memory;
}
EXPORT void *mmap64(void *at, size_t n, int prot, int flags, int fd, off_t offset)
{
    return mmap(at, n, prot, flags, fd, offset);
}

/* --- names --- */

static int do_open(int dirfd, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    struct header h;
    bool temporary = (flags & O_TMPFILE) == O_TMPFILE;
    bool changes = flags & (O_CREAT | O_TRUNC) || temporary;
    int log = changes && path_place(dirfd, name, path) ? log_enter(&h) : -1;
    uint64_t before = log >= 0 && !temporary ? inode_of(path) : 0;
    bool truncates = before && flags & O_TRUNC;
    bool creates = !before;
    if (log >= 0 && (truncates || creates)) log_count(log, &h);
    int fd = (int)syscall(SYS_openat, dirfd, name, flags, mode);
    if (log < 0) return fd;
    struct stat st;
    if (fd >= 0 && (truncates || creates) && !fstat(fd, &st)) {
        struct record r = {.op = creates ? OP_CREATE : OP_SIZE, .inode = st.st_ino};
        if (creates) r.offset = st.st_mode & 07777;
        log_append(log, &h, &r, creates && !temporary ? path : NULL, NULL, NULL, 0, 0);
    }
    log_leave(log);
    return fd;
}

static mode_t open_mode(int flags, va_list args)
{
    return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(args, mode_t) : 0;
}
#define OPEN_BODY(dirfd)                                                                                               \
    va_list args;                                                                                                      \
    va_start(args, flags);                                                                                             \
    mode_t mode = open_mode(flags, args);                                                                              \
    va_end(args);                                                                                                      \
    return do_open(dirfd, name, flags, mode)

EXPORT int open(const char *name, int flags, ...) { OPEN_BODY(AT_FDCWD); }
EXPORT int open64(const char *name, int flags, ...) { OPEN_BODY(AT_FDCWD); }
EXPORT int openat(int dirfd, const char *name, int flags, ...) { OPEN_BODY(dirfd); }
EXPORT int openat64(int dirfd, const char *name, int flags, ...) { OPEN_BODY(dirfd); }
EXPORT int creat(const char *name, mode_t mode) { return do_open(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* Makes a temporary file or folder by libc's own function and records its name. */
static void record_made(enum op op, const char *name)
{
    char path[PATH_MAX];
    struct header h;
    struct stat st;
    int log = path_place(AT_FDCWD, name, path) ? log_enter(&h) : -1;
    if (log < 0) return;
    log_count(log, &h);
    if (!lstat(path, &st)) {
        struct record r = {.op = op, .inode = st.st_ino, .offset = st.st_mode & 07777};
        log_append(log, &h, &r, path, NULL, NULL, 0, 0);
    }
    log_leave(log);
}
EXPORT int mkostemp(char *name, int flags)
{
    int (*real)(char *, int) = (int (*)(char *, int))dlsym(RTLD_NEXT, "mkostemp");
    int fd = real(name, flags);
    if (fd >= 0) record_made(OP_CREATE, name);
    return fd;
}
EXPORT int mkstemp(char *name) { return mkostemp(name, 0); }
EXPORT int mkstemp64(char *name) { return mkostemp(name, 0); }
EXPORT int mkostemp64(char *name, int flags) { return mkostemp(name, flags); }
EXPORT char *mkdtemp(char *name)
{
    char *(*real)(char *) = (char *(*)(char *))dlsym(RTLD_NEXT, "mkdtemp");
    char *made = real(name);
    if (made) record_made(OP_MKDIR, made);
    return made;
}

EXPORT int mkdirat(int dirfd, const char *name, mode_t mode)
{
    char path[PATH_MAX];
    struct header h;
    int log = path_place(dirfd, name, path) ? log_enter(&h) : -1;
    if (log >= 0 && !inode_of(path)) log_count(log, &h);
    int rc = (int)syscall(SYS_mkdirat, dirfd, name, mode);
    if (log < 0) return rc;
    struct stat st;
    if (!rc && !lstat(path, &st)) {
        struct record r = {.op = OP_MKDIR, .inode = st.st_ino, .offset = st.st_mode & 07777};
        log_append(log, &h, &r, path, NULL, NULL, 0, 0);
    }
    log_leave(log);
    return rc;
}
EXPORT int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

EXPORT int unlinkat(int dirfd, const char *name, int flags)
{
    char path[PATH_MAX];
    struct header h;
    int log = path_place(dirfd, name, path) ? log_enter(&h) : -1;
    uint64_t inode = log >= 0 ? inode_of(path) : 0;
    if (inode) log_count(log, &h);
    int rc = (int)syscall(SYS_unlinkat, dirfd, name, flags);
    if (log < 0) return rc;
    struct record r = {.op = OP_UNLINK, .inode = inode};
    if (!rc) log_append(log, &h, &r, path, NULL, NULL, 0, 0);
    log_leave(log);
    return rc;
}
EXPORT int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
EXPORT int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
EXPORT int remove(const char *name)
{
    int rc = unlink(name);
    return rc && errno == EISDIR ? rmdir(name) : rc;
}

EXPORT int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags)
{
    char path[PATH_MAX], path2[PATH_MAX];
    struct header h;
    bool from_inside = path_place(from_dir, from, path), to_inside = path_place(to_dir, to, path2);
    if (from_inside != to_inside) copy_refused("a rename across its border");
    int log = from_inside ? log_enter(&h) : -1;
    uint64_t inode = log >= 0 ? inode_of(path) : 0;
    if (inode) log_count(log, &h);
    int rc = (int)syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    if (log < 0) return rc;
    struct record r = {.op = OP_RENAME, .flags = flags & RENAME_EXCHANGE ? FLAG_EXCHANGE : 0, .inode = inode};
    if (!rc) log_append(log, &h, &r, path, path2, NULL, 0, 0);
    log_leave(log);
    return rc;
}
EXPORT int renameat(int from_dir, const char *from, int to_dir, const char *to)
{
    return renameat2(from_dir, from, to_dir, to, 0);
}
EXPORT int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

EXPORT int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags)
{
    char path2[PATH_MAX];
    struct header h;
    int log = path_place(to_dir, to, path2) ? log_enter(&h) : -1;
    if (log >= 0) log_count(log, &h);
    int rc = (int)syscall(SYS_linkat, from_dir, from, to_dir, to, flags);
    if (log < 0) return rc;
    struct record r = {.op = OP_LINK, .inode = rc ? 0 : inode_of(path2)};
    if (!rc) log_append(log, &h, &r, NULL, path2, NULL, 0, 0);
    log_leave(log);
    return rc;
}
EXPORT int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

EXPORT int symlinkat(const char *target, int dirfd, const char *name)
{
    char path[PATH_MAX];
    struct header h;
    int log = path_place(dirfd, name, path) ? log_enter(&h) : -1;
    if (log >= 0) log_count(log, &h);
    int rc = (int)syscall(SYS_symlinkat, target, dirfd, name);
    if (log < 0) return rc;
    struct record r = {.op = OP_SYMLINK, .inode = rc ? 0 : inode_of(path)};
    struct iovec v = {(void *)(uintptr_t)target, strlen(target)};
    if (!rc) log_append(log, &h, &r, path, NULL, &v, 1, v.iov_len);
    log_leave(log);
    return rc;
}
EXPORT int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }
