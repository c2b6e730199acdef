/* archive_read: one member out of an archive or folder that may come from anywhere.
 *
 * Never extracts; members go to memory, or only their digests do. Only the formats and filters that archive.c writes are enabled. Sizes in
 * headers are hints: what counts is what is delivered, and the sum over all members may not exceed a multiple of the
 * file's own size, which stops a small file that unpacks without end. The archive is read to its end even when the
 * member came first, so that a second member of that name, a truncated file or (xz, zip; the library does not check
 * gzip's) a wrong checksum is found anywhere: who trusts a manifest trusts the rest of the archive too. */
#define _GNU_SOURCE
#include "archive.h"

#include <lib_archive.h>

#include <errno.h>
#include <fcntl.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    MEMBERS_MAX = 4096,
    RATIO_MAX = 2000,            /* unpacked bytes per byte of the file: far above what any text compresses by */
    RATIO_FREE_BYTES = 64 << 20, /* on top of it */
    BLOCK_BYTES = 1 << 17
};

/* One reading. */
struct reading {
    const char *path, *name;
    size_t max_bytes;
    uint64_t total, total_max; /* unpacked bytes */
    uint64_t taken;            /* of the member */
    struct buf *out;           /* where they go, or */
    struct sha256_ctx *sha;
};

static enum rc damaged(const struct reading *g, const char *text, struct err *e)
{
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_IO, "archive_damaged", "%s: %s", g->path, text);
    err_place(e, g->path, 0, 0, 0);
    return rc;
}

static enum rc too_large(const struct reading *g, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_IO, "member_too_large", "%s: %s has more than %zu bytes", g->path, g->name,
                   g->max_bytes);
}

static enum rc unreadable(const struct reading *g, struct err *e)
{
    return err_errno(e, RC_BAD_INPUT, EXIT_IO, "cannot_read", "cannot read %s", g->path);
}

static enum rc take(struct reading *g, const void *bytes, size_t n, struct err *e)
{
    if (n > g->max_bytes - g->taken) return too_large(g, e);
    g->taken += n;
    if (g->sha) sha256_update(g->sha, n, bytes);
    return g->sha || buf_append(g->out, bytes, n) ? RC_OK : err_no_memory(e);
}

/* --- folder ------------------------------------------------------------------------------------------------------- */

static enum rc read_file_of(struct reading *g, int fd, struct err *e)
{
    struct stat st;
    char block[1 << 16];
    if (fstat(fd, &st)) return unreadable(g, e);
    if (!S_ISREG(st.st_mode)) return damaged(g, "the member is no regular file", e);
    if ((uintmax_t)st.st_size > g->max_bytes) return too_large(g, e);
    for (;;) {
        ssize_t n = read(fd, block, sizeof block);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return unreadable(g, e);
        if (n == 0) return RC_OK;
        enum rc rc = take(g, block, (size_t)n, e);
        if (rc != RC_OK) return rc;
    }
}

static enum rc read_folder(struct reading *g, int folder_fd, struct err *e)
{
    if (strchr(g->name, '/') || !strcmp(g->name, "..") || !strcmp(g->name, ".") || !*g->name)
        return err_set(e, RC_BAD_INPUT, EXIT_INTERNAL, "archive_misuse", "\"%s\" is no name of a member", g->name);
    int fd = openat(folder_fd, g->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) return RC_RETRY;
    if (fd < 0) return unreadable(g, e);
    enum rc rc = read_file_of(g, fd, e);
    close(fd);
    return rc;
}

/* --- archive ------------------------------------------------------------------------------------------------------ */

/* Reads the current member through; only counts one that is not wanted. Holes are refused: archive.c writes none. */
static enum rc read_data(struct reading *g, struct archive *a, bool wanted, struct err *e)
{
    for (uint64_t expected = 0;;) {
        const void *block;
        size_t n;
        la_int64_t offset;
        int rc = archive_read_data_block(a, &block, &n, &offset);
        if (rc == ARCHIVE_EOF) return RC_OK;
        if (rc != ARCHIVE_OK) return damaged(g, "its data cannot be read", e);
        if (offset < 0 || (uint64_t)offset != expected) return damaged(g, "a member has holes", e);
        expected += n;
        g->total += n;
        if (g->total > g->total_max) return damaged(g, "it unpacks to far more than its size", e);
        enum rc got = wanted ? take(g, block, n, e) : RC_OK;
        if (got != RC_OK) return got;
    }
}

static enum rc read_members(struct reading *g, struct archive *a, struct err *e)
{
    bool found = false;
    for (int n_members = 0;; n_members++) {
        struct archive_entry *entry;
        int got = archive_read_next_header(a, &entry);
        if (got == ARCHIVE_EOF && n_members == 0) return damaged(g, "it holds nothing", e);
        if (got == ARCHIVE_EOF) return found ? RC_OK : RC_RETRY;
        if (got != ARCHIVE_OK && got != ARCHIVE_WARN) return damaged(g, "not a tar or zip archive, or cut off", e);
        if (n_members >= MEMBERS_MAX) return damaged(g, "too many members", e);
        const char *name = archive_entry_pathname(entry);
        bool wanted = name && !strcmp(name, g->name);
        if (wanted && found) return damaged(g, "two members have one name", e);
        if (wanted && (archive_entry_filetype(entry) != AE_IFREG || archive_entry_hardlink(entry)))
            return damaged(g, "the member is no regular file", e);
        found |= wanted;
        enum rc rc = read_data(g, a, wanted, e);
        if (rc != RC_OK) return rc;
    }
}

static enum rc read_archive(struct reading *g, int fd, struct err *e)
{
    struct archive *a = archive_read_new();
    if (!a) return err_no_memory(e);
    int ok = ARCHIVE_OK;
    ok |= archive_read_support_format_tar(a);
    ok |= archive_read_support_format_zip_seekable(a); /* by its directory, which is at the end: a cut file has none */
    ok |= archive_read_support_filter_none(a);
    ok |= archive_read_support_filter_gzip(a);
    ok |= archive_read_support_filter_xz(a);
    ok |= archive_read_support_filter_zstd(a);
    enum rc rc;
    if (ok != ARCHIVE_OK)
        rc = err_set(e, RC_FAILED, EXIT_INTERNAL, "archive_library", "the archive library lacks a format or filter");
    else if (archive_read_open_fd(a, fd, BLOCK_BYTES) != ARCHIVE_OK)
        rc = damaged(g, "not a tar or zip archive, or cut off", e);
    else
        rc = read_members(g, a, e);
    archive_read_free(a);
    return rc;
}

static enum rc read_any(struct reading *g, struct err *e)
{
    int fd = open(g->path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 && (errno == ENOENT || errno == ENOTDIR)) return RC_RETRY;
    if (fd < 0) return unreadable(g, e);
    struct stat st;
    enum rc rc;
    if (fstat(fd, &st)) {
        rc = unreadable(g, e);
    } else if (S_ISDIR(st.st_mode)) {
        rc = read_folder(g, fd, e);
    } else if (!S_ISREG(st.st_mode)) {
        rc = damaged(g, "no regular file", e);
    } else {
        g->total_max = (uint64_t)st.st_size * RATIO_MAX + RATIO_FREE_BYTES;
        rc = read_archive(g, fd, e);
    }
    close(fd);
    return rc;
}

enum rc archive_read_member(const char *path, const char *name, size_t max_bytes, struct buf *out, struct err *e)
{
    struct reading g = {.path = path, .name = name, .max_bytes = max_bytes, .out = out};
    buf_clear(out);
    enum rc rc = read_any(&g, e);
    if (rc != RC_OK) buf_clear(out);
    return rc;
}

enum rc archive_digest_member(const char *path, const char *name, size_t max_bytes, unsigned char sha256[32], uint64_t *n_bytes,
                              struct err *e)
{
    struct sha256_ctx sha;
    struct reading g = {.path = path, .name = name, .max_bytes = max_bytes, .sha = &sha};
    sha256_init(&sha);
    enum rc rc = read_any(&g, e);
    sha256_digest(&sha, 32, sha256);
    *n_bytes = g.taken;
    return rc;
}
