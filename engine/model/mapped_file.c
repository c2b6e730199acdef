/* mapped_file: a map, the state of the file when it was made, and the digest with its cache.
 *
 * A file is mapped read-only and private, and its descriptor stays open: the digest must be of the file that was
 * mapped, not of whatever has the path by then. Everything handed out lies inside the map as it was measured when the
 * file was opened. A file that is made shorter while it is mapped makes its readers die of SIGBUS; model files are
 * replaced by renaming, never rewritten in place, and this is not defended against.
 *
 * The digest's cache is one line of text beside the file. It is written to a temporary name and renamed, so that two
 * ranks that hash at once leave one whole file; nothing is synced, since a lost or torn cache is only a missed one. It
 * is not written while the file's time of change is so recent that a second change could leave the same time. */
#define _GNU_SOURCE
#include "mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    DIGEST_HEX = 2 * SHA256_DIGEST_SIZE,
    CACHE_MAX_BYTES = 512,
    SETTLE_SECONDS = 2 /* the coarsest time stamps of file systems in use */
};

static enum rc map_file(struct mapped_file *m, struct err *e)
{
    m->fd = open(m->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (m->fd < 0) return err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "cannot_open", "cannot open the model %s", m->path);
    if (fstat(m->fd, &m->st))
        return err_errno(e, RC_FAILED, EXIT_IO, "cannot_stat", "cannot stat the model %s", m->path);
    if (!S_ISREG(m->st.st_mode))
        return err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "not_a_file", "the model %s is not a regular file", m->path);
    if ((uintmax_t)m->st.st_size > SIZE_MAX)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "too_large", "the model %s is larger than memory can be",
                       m->path);
    if (!m->st.st_size) return RC_OK; /* nothing to map: the parser reports it as truncated */
    void *map = mmap(NULL, (size_t)m->st.st_size, PROT_READ, MAP_PRIVATE, m->fd, 0);
    if (map == MAP_FAILED)
        return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "cannot_map", "cannot map the model %s", m->path);
    m->bytes = map;
    m->n_bytes = (size_t)m->st.st_size;
    return RC_OK;
}

enum rc mapped_file_of_bytes(const void *bytes, size_t n_bytes, const char *name, struct mapped_file *out,
                             struct err *e)
{
    *out = (struct mapped_file){.fd = -1, .bytes = n_bytes ? bytes : "", .n_bytes = n_bytes, .path = strdup(name)};
    return out->path ? RC_OK : err_no_memory(e);
}

enum rc mapped_file_open(const char *path, struct mapped_file *out, struct err *e)
{
    *out = (struct mapped_file){.fd = -1, .path = strdup(path)};
    enum rc rc = out->path ? map_file(out, e) : err_no_memory(e);
    if (rc != RC_OK) mapped_file_close(out);
    return rc;
}

void mapped_file_close(struct mapped_file *m)
{
    if (!m->path) return;
    if (m->fd >= 0 && m->n_bytes) munmap((void *)(uintptr_t)m->bytes, m->n_bytes);
    if (m->fd >= 0) close(m->fd);
    free(m->path);
    *m = (struct mapped_file){.fd = -1};
}

/* "DIR/.NAME.tandem-digest" + suffix for the file at "DIR/NAME". */
static bool cache_path(const struct mapped_file *m, const char *suffix, struct buf *out)
{
    const char *slash = strrchr(m->path, '/');
    const char *name = slash ? slash + 1 : m->path;
    return buf_append(out, m->path, (size_t)(name - m->path)) && buf_printf(out, ".%s.tandem-digest%s", name, suffix);
}

/* The whole content of the cache but for the digest and the newline that end it. */
static int cache_head(const struct stat *st, char out[CACHE_MAX_BYTES])
{
    return snprintf(out, CACHE_MAX_BYTES, "tandem-digest 1 size %jd mtime %jd.%09ld inode %ju sha256 ",
                    (intmax_t)st->st_size, (intmax_t)st->st_mtim.tv_sec, st->st_mtim.tv_nsec, (uintmax_t)st->st_ino);
}

static bool same_file(const struct stat *a, const struct stat *b)
{
    return a->st_size == b->st_size && a->st_ino == b->st_ino && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static bool cache_read(const struct mapped_file *m, char out_hex[DIGEST_HEX + 1])
{
    struct buf path = {0}, text = {0};
    char head[CACHE_MAX_BYTES];
    size_t head_len = (size_t)cache_head(&m->st, head);
    bool found = false;
    if (!cache_path(m, "", &path) || file_read(path.data, CACHE_MAX_BYTES, &text, NULL) != RC_OK) goto done;
    if (text.len != head_len + DIGEST_HEX + 1 || memcmp(text.data, head, head_len) || text.data[text.len - 1] != '\n')
        goto done;
    const char *hex = text.data + head_len;
    if (strspn(hex, "0123456789abcdef") != DIGEST_HEX) goto done;
    memcpy(out_hex, hex, DIGEST_HEX);
    out_hex[DIGEST_HEX] = '\0';
    found = true;
done:
    buf_free(&text);
    buf_free(&path);
    return found;
}

static void cache_write(const struct mapped_file *m, const char hex[DIGEST_HEX + 1])
{
    struct buf path = {0}, temporary = {0};
    char line[CACHE_MAX_BYTES];
    size_t len = (size_t)cache_head(&m->st, line);
    len += (size_t)snprintf(line + len, sizeof line - len, "%s\n", hex);
    if (time(NULL) - m->st.st_mtim.tv_sec < SETTLE_SECONDS) return;
    if (cache_path(m, "", &path) && cache_path(m, ".XXXXXX", &temporary)) {
        int fd = mkostemp(temporary.data, O_CLOEXEC);
        if (fd >= 0) {
            bool written = fd_write_all(fd, line, len);
            if (close(fd) || !written || rename(temporary.data, path.data)) unlink(temporary.data);
        }
    }
    buf_free(&temporary);
    buf_free(&path);
}

void mapped_file_digest_bytes(const void *bytes, size_t n_bytes, char out_hex[DIGEST_HEX + 1])
{
    struct sha256_ctx sha;
    uint8_t digest[SHA256_DIGEST_SIZE];
    sha256_init(&sha);
    sha256_update(&sha, n_bytes, bytes);
    sha256_digest(&sha, sizeof digest, digest);
    for (size_t i = 0; i < sizeof digest; i++) snprintf(out_hex + 2 * i, 3, "%02x", digest[i]);
}

enum rc mapped_file_digest(const struct mapped_file *m, char out_hex[65], struct err *e)
{
    if (m->fd < 0) {
        mapped_file_digest_bytes(m->bytes, m->n_bytes, out_hex);
        return RC_OK;
    }
    struct stat now;
    if (fstat(m->fd, &now)) return err_errno(e, RC_FAILED, EXIT_IO, "cannot_stat", "cannot stat the model %s", m->path);
    if (same_file(&now, &m->st)) {
        if (cache_read(m, out_hex)) return RC_OK;
        mapped_file_digest_bytes(m->bytes, m->n_bytes, out_hex);
        if (fstat(m->fd, &now))
            return err_errno(e, RC_FAILED, EXIT_IO, "cannot_stat", "cannot stat the model %s", m->path);
    }
    if (!same_file(&now, &m->st))
        return err_set(e, RC_FAILED, EXIT_UNAVAILABLE, "model_changed", "the model %s was changed while in use",
                       m->path);
    cache_write(m, out_hex);
    return RC_OK;
}
