/* model_file: a mapped file, the index over it, and its digest.
 *
 * The file is mapped read-only and private, and its descriptor stays open: the digest must be of the file that was
 * mapped, not of whatever has the path by then. Everything handed out lies inside the map as it was measured when the
 * file was opened. A file that is made shorter while it is mapped makes its readers die of SIGBUS; model files are
 * replaced by renaming, never rewritten in place, and this is not defended against.
 *
 * The digest's cache is one line of text beside the model. It is written to a temporary name and renamed, so that two
 * ranks that hash at once leave one whole file; nothing is synced, since a lost or torn cache is only a missed one. It
 * is not written while the model's time of change is so recent that a second change could leave the same time. */
#define _GNU_SOURCE
#include "model_file.h"

#include "gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    DIGEST_HEX = 2 * SHA256_DIGEST_SIZE,
    CACHE_MAX_BYTES = 512,
    SETTLE_SECONDS = 2 /* the coarsest time stamps of file systems in use */
};

struct model_file {
    char *path;
    const void *bytes;
    size_t n_bytes;
    int fd;         /* -1: bytes of the caller */
    struct stat st; /* when opened */
    struct gguf gguf;
};

static enum rc refuse_split(const struct model_file *m, struct err *e)
{
    uint64_t parts;
    if (!model_file_u64(m, "split.count", &parts) || parts <= 1) return RC_OK;
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "model_unsupported",
                         "this is one of %" PRIu64 " files of a model; join them into one file first", parts);
    err_place(e, m->path, 0, 0, 0);
    return rc;
}

static enum rc map_file(struct model_file *m, struct err *e)
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

/* bytes NULL: the file at name. */
static enum rc open_any(const void *bytes, size_t n_bytes, const char *name, struct model_file **out, struct err *e)
{
    enum rc rc = RC_OK;
    struct model_file *m = calloc(1, sizeof *m);
    if (!m) return err_no_memory(e);
    m->fd = -1;
    m->bytes = bytes;
    m->n_bytes = n_bytes;
    m->path = strdup(name);
    if (!m->path)
        rc = err_no_memory(e);
    else if (!bytes)
        rc = map_file(m, e);
    if (rc == RC_OK) rc = gguf_parse(m->bytes, m->n_bytes, m->path, &m->gguf, e);
    if (rc == RC_OK) rc = refuse_split(m, e);
    if (rc == RC_OK)
        *out = m;
    else
        model_file_close(m);
    return rc;
}

enum rc model_file_open(const char *path, struct model_file **out, struct err *e)
{
    return open_any(NULL, 0, path, out, e);
}

enum rc model_file_open_bytes(const void *bytes, size_t n_bytes, const char *name, struct model_file **out,
                              struct err *e)
{
    return open_any(n_bytes ? bytes : "", n_bytes, name, out, e);
}

void model_file_close(struct model_file *m)
{
    if (!m) return;
    gguf_free(&m->gguf);
    if (m->fd >= 0 && m->n_bytes) munmap((void *)(uintptr_t)m->bytes, m->n_bytes);
    if (m->fd >= 0) close(m->fd);
    free(m->path);
    free(m);
}

const char *model_file_path(const struct model_file *m) { return m->path; }
size_t model_file_tensor_count(const struct model_file *m) { return m->gguf.n_tensors; }

const struct tensor_view *model_file_tensor_at(const struct model_file *m, size_t i)
{
    return i < m->gguf.n_tensors ? &m->gguf.tensors[i] : NULL;
}

const struct tensor_view *model_file_tensor(const struct model_file *m, const char *name)
{
    return gguf_tensor_find(&m->gguf, name);
}

size_t model_file_key_count(const struct model_file *m) { return m->gguf.n_values; }

const char *model_file_key_at(const struct model_file *m, size_t i)
{
    return i < m->gguf.n_values ? m->gguf.values[i].key : NULL;
}

bool model_file_has(const struct model_file *m, const char *key) { return gguf_value_find(&m->gguf, key) != NULL; }

bool model_file_u64(const struct model_file *m, const char *key, uint64_t *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    return v && gguf_load_uint(v->type, v->bytes, out);
}

bool model_file_f64(const struct model_file *m, const char *key, double *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    return v && gguf_load_float(v->type, v->bytes, out);
}

bool model_file_bool(const struct model_file *m, const char *key, bool *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    if (!v || v->type != GGUF_BOOL) return false;
    *out = v->bytes[0] != 0;
    return true;
}

bool model_file_text(const struct model_file *m, const char *key, struct model_text *out)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    if (!v || v->type != GGUF_STRING) return false;
    *out = (struct model_text){(const char *)v->bytes, (size_t)v->count};
    return true;
}

static const struct gguf_value *text_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    return v && v->type == GGUF_ARRAY && v->element == GGUF_STRING ? v : NULL;
}

size_t model_file_text_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = text_array(m, key);
    return v ? (size_t)v->count : 0;
}

bool model_file_text_at(const struct model_file *m, const char *key, size_t i, struct model_text *out)
{
    const struct gguf_value *v = text_array(m, key);
    if (!v || i >= v->count) return false;
    *out = gguf_text_at(&m->gguf, v->starts[i]);
    return true;
}

static const struct gguf_value *int_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = gguf_value_find(&m->gguf, key);
    if (!v || v->type != GGUF_ARRAY || !gguf_type_bytes(v->element)) return NULL;
    return v->element == GGUF_F32 || v->element == GGUF_F64 ? NULL : v;
}

size_t model_file_int_array(const struct model_file *m, const char *key)
{
    const struct gguf_value *v = int_array(m, key);
    return v ? (size_t)v->count : 0;
}

bool model_file_int_at(const struct model_file *m, const char *key, size_t i, int64_t *out)
{
    const struct gguf_value *v = int_array(m, key);
    return v && i < v->count && gguf_load_int(v->element, v->bytes + i * gguf_type_bytes(v->element), out);
}

/* "DIR/.NAME.tandem-digest" + suffix for the model at "DIR/NAME". */
static bool cache_path(const struct model_file *m, const char *suffix, struct buf *out)
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

static bool cache_read(const struct model_file *m, char out_hex[DIGEST_HEX + 1])
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

static void cache_write(const struct model_file *m, const char hex[DIGEST_HEX + 1])
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

static void hash_bytes(const struct model_file *m, char out_hex[DIGEST_HEX + 1])
{
    struct sha256_ctx sha;
    uint8_t digest[SHA256_DIGEST_SIZE];
    sha256_init(&sha);
    sha256_update(&sha, m->n_bytes, m->bytes);
    sha256_digest(&sha, sizeof digest, digest);
    for (size_t i = 0; i < sizeof digest; i++) snprintf(out_hex + 2 * i, 3, "%02x", digest[i]);
}

enum rc model_file_digest(struct model_file *m, char out_hex[65], struct err *e)
{
    if (m->fd < 0) {
        hash_bytes(m, out_hex);
        return RC_OK;
    }
    struct stat now;
    if (fstat(m->fd, &now)) return err_errno(e, RC_FAILED, EXIT_IO, "cannot_stat", "cannot stat the model %s", m->path);
    if (same_file(&now, &m->st)) {
        if (cache_read(m, out_hex)) return RC_OK;
        hash_bytes(m, out_hex);
        if (fstat(m->fd, &now))
            return err_errno(e, RC_FAILED, EXIT_IO, "cannot_stat", "cannot stat the model %s", m->path);
    }
    if (!same_file(&now, &m->st))
        return err_set(e, RC_FAILED, EXIT_UNAVAILABLE, "model_changed", "the model %s was changed while in use",
                       m->path);
    cache_write(m, out_hex);
    return RC_OK;
}
