/* base: implementation. Errors keep the first cause; buffers keep their first failure; log lines are composed in one
 * stack buffer and written with one call, because two ranks and the runner share one stderr. */
#define _GNU_SOURCE
#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

__attribute__((format(printf, 5, 0)))
static enum rc err_fill(struct err *e, enum rc rc, int exit_status, const char *code, const char *format, va_list args)
{
    if (!e || e->rc != RC_OK) return rc;
    e->rc = rc;
    e->exit_status = exit_status;
    snprintf(e->code, sizeof e->code, "%s", code);
    vsnprintf(e->text, sizeof e->text, format, args);
    return rc;
}

enum rc err_set(struct err *e, enum rc rc, int exit_status, const char *code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    err_fill(e, rc, exit_status, code, format, args);
    va_end(args);
    return rc;
}

enum rc err_errno(struct err *e, enum rc rc, int exit_status, const char *code, const char *format, ...)
{
    int saved = errno;
    if (!e || e->rc != RC_OK) return rc;
    va_list args;
    va_start(args, format);
    err_fill(e, rc, exit_status, code, format, args);
    va_end(args);
    size_t used = strlen(e->text);
    char reason[128];
    const char *text = strerror_r(saved, reason, sizeof reason);
    snprintf(e->text + used, sizeof e->text - used, ": %s", text);
    errno = saved;
    return rc;
}

enum rc err_no_memory(struct err *e)
{
    return err_set(e, RC_FATAL, EXIT_INTERNAL, "out_of_memory", "out of memory");
}

void err_place(struct err *e, const char *source, int64_t line, int64_t column, int64_t byte)
{
    if (!e || e->rc == RC_OK) return;
    if (source && !e->source[0]) snprintf(e->source, sizeof e->source, "%s", source);
    if (line > 0 && e->line <= 0) e->line = line;
    if (column > 0 && e->column <= 0) e->column = column;
    if (byte > 0 && e->byte <= 0) e->byte = byte;
}

char *err_format(const struct err *e, char *out, size_t out_bytes)
{
    char place[340] = "";
    if (e->source[0]) {
        int n = snprintf(place, sizeof place, "%s:", e->source);
        if (e->line > 0) n += snprintf(place + n, sizeof place - (size_t)n, "%" PRId64 ":", e->line);
        if (e->line > 0 && e->column > 0) n += snprintf(place + n, sizeof place - (size_t)n, "%" PRId64 ":", e->column);
        snprintf(place + n, sizeof place - (size_t)n, " ");
    }
    snprintf(out, out_bytes, "%s%s: %s", place, e->code, e->text);
    return out;
}

bool buf_reserve(struct buf *b, size_t extra_bytes)
{
    if (b->failed) return false;
    size_t need;
    if (!size_add(b->len, extra_bytes, &need) || !size_add(need, 1, &need)) return b->failed = true, false;
    if (need <= b->cap) return true;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need)
        if (!size_mul(cap, 2, &cap)) return b->failed = true, false;
    char *data = realloc(b->data, cap);
    if (!data) return b->failed = true, false;
    b->data = data;
    b->cap = cap;
    return true;
}

bool buf_append(struct buf *b, const void *bytes, size_t n_bytes)
{
    if (!buf_reserve(b, n_bytes)) return false;
    if (n_bytes) memcpy(b->data + b->len, bytes, n_bytes);
    b->len += n_bytes;
    b->data[b->len] = '\0';
    return true;
}

bool buf_append_str(struct buf *b, const char *text) { return buf_append(b, text, strlen(text)); }

bool buf_printf(struct buf *b, const char *format, ...)
{
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    bool ok = n >= 0 && buf_reserve(b, (size_t)n);
    if (ok) {
        vsnprintf(b->data + b->len, (size_t)n + 1, format, again);
        b->len += (size_t)n;
    }
    va_end(again);
    return ok;
}

void buf_clear(struct buf *b)
{
    b->len = 0;
    if (b->data) b->data[0] = '\0';
}

void buf_free(struct buf *b)
{
    free(b->data);
    *b = (struct buf){0};
}

int64_t clock_now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

void sleep_us(int64_t us)
{
    struct timespec t = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&t, &t) && errno == EINTR) {}
}

static enum log_level log_max_level = LOG_INFO;
static char log_prefix[32];

void log_set(enum log_level max_level, const char *prefix)
{
    log_max_level = max_level;
    snprintf(log_prefix, sizeof log_prefix, "%s", prefix);
}

void log_line(enum log_level level, const char *format, ...)
{
    if (level > log_max_level) return;
    char line[1200];
    int n = snprintf(line, sizeof line, "tandem: %s", log_prefix);
    va_list args;
    va_start(args, format);
    vsnprintf(line + n, sizeof line - (size_t)n - 1, format, args);
    va_end(args);
    size_t len = strlen(line);
    line[len++] = '\n';
    fd_write_all(STDERR_FILENO, line, len);
}

bool fd_write_all(int fd, const void *bytes, size_t n_bytes)
{
    const char *at = bytes;
    while (n_bytes) {
        ssize_t n = write(fd, at, n_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        at += n;
        n_bytes -= (size_t)n;
    }
    return true;
}

enum rc file_read(const char *path, size_t max_bytes, struct buf *out, struct err *e)
{
    enum rc rc = RC_OK;
    buf_clear(out);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "cannot_open", "cannot open %s", path);
    struct stat st;
    if (fstat(fd, &st)) {
        rc = err_errno(e, RC_FAILED, EXIT_IO, "cannot_stat", "cannot stat %s", path);
    } else if (!S_ISREG(st.st_mode)) {
        rc = err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "not_a_file", "%s is not a regular file", path);
    } else if ((uintmax_t)st.st_size > max_bytes) {
        rc = err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "too_large", "%s has %jd bytes, more than %zu", path,
                     (intmax_t)st.st_size, max_bytes);
    }
    while (rc == RC_OK) {
        if (!buf_reserve(out, 65536)) {
            rc = err_no_memory(e);
            break;
        }
        ssize_t n = read(fd, out->data + out->len, out->cap - out->len - 1);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) rc = err_errno(e, RC_FAILED, EXIT_IO, "read_failed", "cannot read %s", path);
        if (n <= 0) break;
        out->len += (size_t)n;
        if (out->len > max_bytes)
            rc = err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "too_large", "%s grew beyond %zu bytes", path, max_bytes);
    }
    if (out->data) out->data[out->len] = '\0';
    close(fd);
    return rc;
}
