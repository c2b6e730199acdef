/* job_line: JSONL by hand, because lines may be 64 MiB and must stay bounded.
 *
 * One buffer holds [start, end) of unread bytes. A line that is not complete is completed by moving the rest to the
 * front and reading on behind it; the buffer doubles only while one line needs it, never beyond the limit. When the
 * bytes of an unfinished line exceed the limit they are dropped and the file is read through to the next line end, so
 * that an absurd line costs time but no memory. The number and offset of a line always count what was skipped.
 * Nothing is decoded here: a NUL or a broken character is the parser's to report. */
#define _GNU_SOURCE
#include "job_line.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FIRST_BUFFER_BYTES = 1 << 16 };

struct job_reader {
    char *path;
    int fd;
    bool at_end;
    size_t max_line_bytes;
    char *data;
    size_t start, end, cap; /* unread bytes are data[start..end) */
    int64_t number;         /* of the last line handed out or skipped */
    int64_t byte;           /* offset of data[start] in the file */
};

static enum rc open_regular(const char *path, int *fd, struct err *e)
{
    /* O_NONBLOCK: opening a FIFO must not wait for a writer. It has no effect on regular files. */
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (*fd < 0) return err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "cannot_open", "cannot open %s", path);
    struct stat st;
    enum rc rc = RC_OK;
    if (fstat(*fd, &st))
        rc = err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "cannot_stat", "cannot stat %s", path);
    else if (!S_ISREG(st.st_mode))
        rc = err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "not_a_file", "%s is not a regular file", path);
    if (rc != RC_OK) close(*fd);
    return rc;
}

enum rc job_reader_open(const char *path, size_t max_line_bytes, struct job_reader **out, struct err *e)
{
    *out = NULL;
    int fd;
    enum rc rc = open_regular(path, &fd, e);
    if (rc != RC_OK) {
        err_place(e, path, 0, 0, 0);
        return rc;
    }
    struct job_reader *r = calloc(1, sizeof *r);
    if (r) r->path = strdup(path);
    if (r) r->data = malloc(FIRST_BUFFER_BYTES);
    if (!r || !r->path || !r->data) {
        if (r) free(r->data);
        if (r) free(r->path);
        free(r);
        close(fd);
        return err_no_memory(e);
    }
    r->fd = fd;
    r->cap = FIRST_BUFFER_BYTES;
    r->max_line_bytes = max_line_bytes;
    *out = r;
    return RC_OK;
}

void job_reader_close(struct job_reader *r)
{
    if (!r) return;
    close(r->fd);
    free(r->data);
    free(r->path);
    free(r);
}

/* Reads some more bytes behind data[end); sets at_end at the end of the file. */
static enum rc fill(struct job_reader *r, struct err *e)
{
    if (r->start) {
        memmove(r->data, r->data + r->start, r->end - r->start);
        r->end -= r->start;
        r->start = 0;
    }
    if (r->end == r->cap) {
        size_t cap;
        char *data = size_mul(r->cap, 2, &cap) ? realloc(r->data, cap) : NULL;
        if (!data) return err_no_memory(e);
        r->data = data;
        r->cap = cap;
    }
    ssize_t n;
    do n = read(r->fd, r->data + r->end, r->cap - r->end);
    while (n < 0 && errno == EINTR);
    if (n < 0) {
        enum rc rc = err_errno(e, RC_FAILED, EXIT_IO, "read_failed", "cannot read %s", r->path);
        err_place(e, r->path, r->number + 1, 0, r->byte);
        return rc;
    }
    if (n == 0) r->at_end = true;
    r->end += (size_t)n;
    return RC_OK;
}

static void take(struct job_reader *r, size_t n_bytes)
{
    r->start += n_bytes;
    r->byte += (int64_t)n_bytes;
}

/* Takes everything up to and including the next line end, keeping nothing. */
static enum rc skip_line(struct job_reader *r, struct err *e)
{
    for (;;) {
        char *newline = r->end > r->start ? memchr(r->data + r->start, '\n', r->end - r->start) : NULL;
        if (newline) {
            take(r, (size_t)(newline - (r->data + r->start)) + 1);
            return RC_OK;
        }
        take(r, r->end - r->start);
        if (r->at_end) return RC_OK;
        enum rc rc = fill(r, e);
        if (rc != RC_OK) return rc;
    }
}

/* Drops a byte order mark in front of the file's first line. */
static enum rc skip_mark(struct job_reader *r, struct err *e)
{
    while (r->end - r->start < 3 && !r->at_end) {
        enum rc rc = fill(r, e);
        if (rc != RC_OK) return rc;
    }
    if (r->end - r->start >= 3 && !memcmp(r->data + r->start, "\xEF\xBB\xBF", 3)) take(r, 3);
    return RC_OK;
}

static bool is_blank(const char *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (bytes[i] != ' ' && bytes[i] != '\t' && bytes[i] != '\r') return false;
    return true;
}

/* One physical line, blank or not. RC_RETRY at the end. */
static enum rc next_line(struct job_reader *r, struct job_line *out, struct err *e)
{
    size_t searched = 0; /* bytes of this line known to hold no line end */
    for (;;) {
        size_t have = r->end - r->start;
        char *from = r->data + r->start;
        char *newline = have > searched ? memchr(from + searched, '\n', have - searched) : NULL;
        searched = have;
        bool within = have <= r->max_line_bytes || have - r->max_line_bytes == 1; /* one more: a CR may end it */
        if (!newline && !r->at_end && within) {
            enum rc rc = fill(r, e);
            if (rc != RC_OK) return rc;
            continue;
        }
        if (!newline && !have) return RC_RETRY;
        size_t len = newline ? (size_t)(newline - from) : have;
        size_t whole = newline ? len + 1 : len;
        if (len && from[len - 1] == '\r' && (newline || r->at_end)) len--;
        *out = (struct job_line){.bytes = from, .len = len, .number = ++r->number, .byte = r->byte};
        if (len <= r->max_line_bytes) {
            take(r, whole);
            return RC_OK;
        }
        out->bytes = "";
        out->len = 0;
        out->too_long = true;
        return skip_line(r, e);
    }
}

enum rc job_reader_next(struct job_reader *r, struct job_line *out, struct err *e)
{
    *out = (struct job_line){.bytes = ""};
    enum rc rc = RC_OK;
    if (r->number == 0) rc = skip_mark(r, e);
    do {
        if (rc == RC_OK) rc = next_line(r, out, e);
    } while (rc == RC_OK && !out->too_long && is_blank(out->bytes, out->len));
    if (rc != RC_OK) *out = (struct job_line){.bytes = ""};
    return rc;
}
