/* document: a file named by a job, opened so that the name cannot lead outside.
 *
 * openat2 with RESOLVE_BENEATH lets the kernel resolve the path: "..", absolute paths and symbolic links may do what
 * they like as long as every step stays beneath the root; magic links (/proc/self/fd) are refused. There is no check
 * before the open that a rename could outrun. O_NONBLOCK keeps a FIFO from hanging the run; what was opened must be a
 * regular file. All text of one job is bounded, since a line has room for a million names of one large file. The
 * digest is over the file's bytes as they are, the text is without a byte order mark. */
#define _GNU_SOURCE
#include "document.h"

#include "text_check.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <nettle/sha2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(DIGEST_BYTES == SHA256_DIGEST_SIZE, "document digests are SHA-256");

enum { OPEN_TRIES = 8, READ_BYTES = 1 << 16 };

struct document_root {
    int fd;
};

static int open_beneath(const struct document_root *r, const char *path)
{
    struct open_how how = {
        .flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY,
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS,
    };
    long fd = -1;
    /* EAGAIN: a rename or mount elsewhere kept the kernel from being sure that ".." stays beneath. */
    for (int i = 0; i < OPEN_TRIES; i++) {
        fd = syscall(SYS_openat2, r->fd, path, &how, sizeof how);
        if (fd >= 0 || (errno != EAGAIN && errno != EINTR)) break;
    }
    return (int)fd;
}

enum rc document_root_open(const char *folder, struct document_root **out, struct err *e)
{
    *out = NULL;
    struct document_root *r = malloc(sizeof *r);
    if (!r) return err_no_memory(e);
    r->fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (r->fd < 0) {
        free(r);
        return err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "cannot_open", "cannot open the document folder %s", folder);
    }
    int probe = open_beneath(r, ".");
    if (probe < 0 && (errno == ENOSYS || errno == EPERM)) {
        document_root_close(r);
        return err_errno(e, RC_FAILED, EXIT_UNAVAILABLE, "no_openat2",
                         "this system cannot open files beneath a folder");
    }
    if (probe >= 0) close(probe);
    *out = r;
    return RC_OK;
}

void document_root_close(struct document_root *r)
{
    if (!r) return;
    close(r->fd);
    free(r);
}

static bool refuse(struct job_fault *fault, const char *code, const char *path, const char *reason)
{
    job_fault_set(fault, 422, "invalid_request_error", code, "messages", "document '%.400s' %s", path, reason);
    return false;
}

static bool no_memory(struct job_fault *fault)
{
    job_fault_set(fault, 500, "server_error", "out_of_memory", "", "out of memory");
    return false;
}

static bool refuse_errno(struct job_fault *fault, const char *path, int reason)
{
    switch (reason) {
    case ENOENT:
    case ENOTDIR:
    case ENAMETOOLONG: return refuse(fault, "document_not_found", path, "does not exist");
    case EXDEV: return refuse(fault, "document_outside_root", path, "leads outside of the document folder");
    case ELOOP: return refuse(fault, "document_outside_root", path, "goes through a link that is not followed");
    case ENXIO:
    case ENODEV: return refuse(fault, "document_not_regular", path, "is not a regular file");
    case EACCES:
    case EPERM: return refuse(fault, "document_not_readable", path, "may not be read");
    default: return refuse(fault, "document_not_readable", path, "cannot be read");
    }
}

/* Appends the bytes of fd, at most DOCUMENT_MAX_BYTES. */
static bool read_all(int fd, const char *path, struct buf *out, struct job_fault *fault)
{
    size_t before = out->len;
    for (;;) {
        if (!buf_reserve(out, READ_BYTES)) return no_memory(fault);
        ssize_t n = read(fd, out->data + out->len, out->cap - out->len - 1);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return refuse_errno(fault, path, errno);
        if (n == 0) break;
        out->len += (size_t)n;
        if (out->len - before > DOCUMENT_MAX_BYTES)
            return refuse(fault, "document_too_large", path, "has more than 64 MiB");
    }
    out->data[out->len] = '\0';
    return true;
}

static bool read_open(int fd, const char *path, struct buf *text, unsigned char *digest, struct job_fault *fault)
{
    struct stat st;
    size_t before = text->len;
    if (fstat(fd, &st)) return refuse_errno(fault, path, errno);
    if (!S_ISREG(st.st_mode)) return refuse(fault, "document_not_regular", path, "is not a regular file");
    if (st.st_size > DOCUMENT_MAX_BYTES) return refuse(fault, "document_too_large", path, "has more than 64 MiB");
    if (!read_all(fd, path, text, fault)) return false;
    char *bytes = text->data + before;
    size_t len = text->len - before;
    if (!text_is_utf8(bytes, len)) return refuse(fault, "document_not_utf8", path, "is not UTF-8 text");
    if (memchr(bytes, 0, len)) return refuse(fault, "document_not_text", path, "holds a NUL character");
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, len, (const uint8_t *)bytes);
    sha256_digest(&hash, DIGEST_BYTES, digest);
    if (len >= 3 && !memcmp(bytes, "\xEF\xBB\xBF", 3)) {
        memmove(bytes, bytes + 3, len - 3 + 1);
        text->len -= 3;
    }
    return true;
}

bool document_read(struct document_root *r, const char *path, struct buf *text, unsigned char digest[DIGEST_BYTES],
                   struct job_fault *fault)
{
    size_t before = text->len;
    int fd = open_beneath(r, path);
    if (fd < 0) return refuse_errno(fault, path, errno);
    bool ok = read_open(fd, path, text, digest, fault);
    close(fd);
    if (!ok) {
        text->len = before;
        if (text->data) text->data[before] = '\0';
    }
    return ok;
}

static bool within_total(size_t total_bytes, struct job_fault *fault)
{
    if (total_bytes <= JOB_TEXT_MAX_BYTES) return true;
    job_fault_set(fault, 413, "invalid_request_error", "job_too_large", "messages",
                  "the job's messages and documents have more than 256 MiB");
    return false;
}

bool document_digests(struct document_root *r, const struct job_spec *s, struct buf *digests, struct job_fault *fault)
{
    struct buf text = {0};
    size_t total = 0;
    bool ok = true;
    for (size_t i = 0; ok && i < s->n_messages; i++)
        for (size_t j = 0; ok && j < s->messages[i].n_parts; j++) {
            const char *path = s->messages[i].parts[j].document_path;
            unsigned char digest[DIGEST_BYTES];
            if (!path) continue;
            buf_clear(&text);
            ok = document_read(r, path, &text, digest, fault);
            if (ok) ok = within_total(total += text.len, fault);
            if (ok && !buf_append(digests, digest, DIGEST_BYTES)) ok = no_memory(fault);
        }
    buf_free(&text);
    return ok;
}

/* What job_texts_read carries from part to part. */
struct reading {
    struct document_root *root;
    const unsigned char *pinned; /* NULL: nothing to compare with */
    size_t n_pinned, used;       /* bytes */
    size_t total_bytes;
};

static bool read_document_part(struct reading *g, const char *path, struct buf *text, struct job_fault *fault)
{
    unsigned char digest[DIGEST_BYTES];
    if (!document_read(g->root, path, text, digest, fault)) return false;
    if (!g->pinned) return true;
    bool same = g->n_pinned - g->used >= DIGEST_BYTES && !memcmp(g->pinned + g->used, digest, DIGEST_BYTES);
    if (!same) return refuse(fault, "document_changed", path, "has changed since the job was registered");
    g->used += DIGEST_BYTES;
    return true;
}

static bool read_message(struct reading *g, const struct job_message *m, struct buf *text, struct job_fault *fault)
{
    for (size_t j = 0; j < m->n_parts; j++) {
        const struct job_part *part = &m->parts[j];
        if (j && !buf_append(text, "\n", 1)) return no_memory(fault);
        size_t before = text->len;
        if (part->document_path && !read_document_part(g, part->document_path, text, fault)) return false;
        if (!part->document_path && !buf_append(text, part->text, part->text_len)) return no_memory(fault);
        g->total_bytes += text->len - before + 1;
        if (!within_total(g->total_bytes, fault)) return false;
    }
    return buf_append(text, "", 0) || no_memory(fault);
}

bool job_texts_read(struct document_root *r, const struct job_spec *s, const void *pinned, size_t n_pinned,
                    struct job_texts *out, struct job_fault *fault)
{
    struct reading g = {.root = r, .pinned = pinned, .n_pinned = n_pinned};
    *out = (struct job_texts){0};
    out->messages = calloc(s->n_messages ? s->n_messages : 1, sizeof *out->messages);
    bool ok = out->messages || no_memory(fault);
    for (size_t i = 0; ok && i < s->n_messages; i++) {
        out->n = i + 1;
        out->messages[i].role = s->messages[i].role;
        ok = read_message(&g, &s->messages[i], &out->messages[i].text, fault);
    }
    if (!ok) job_texts_free(out);
    return ok;
}

void job_texts_free(struct job_texts *t)
{
    for (size_t i = 0; i < t->n; i++) buf_free(&t->messages[i].text);
    free(t->messages);
    *t = (struct job_texts){0};
}
