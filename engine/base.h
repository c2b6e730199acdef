/* base: what every part of tandem stands on.
 *
 * Result codes graded by what the caller can still do, one error record with a place, a growable byte buffer,
 * checked arithmetic, whole-line logging and the monotonic clock. No state but the log's prefix and level. */
#ifndef TANDEM_BASE_H
#define TANDEM_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Ranks of one group at most: array bound of partitions, shared segment and command line. */
enum { MAX_RANKS = 4 };

/* What the caller can do after a call. */
enum rc {
    RC_OK,        /* done */
    RC_RETRY,     /* nothing happened, the same call may succeed later */
    RC_BAD_INPUT, /* something from outside is wrong; the program itself is fine */
    RC_FAILED,    /* this operation failed; the object it was called on is still usable */
    RC_FATAL      /* the object it was called on must be closed */
};

/* Exit statuses of the command line (sysexits where they fit). */
enum exit_status {
    EXIT_DONE = 0,         /* everything done */
    EXIT_SOME_FAILED = 1,  /* finished, some jobs failed */
    EXIT_USAGE = 64,       /* command line */
    EXIT_JOB_FILE = 65,    /* job file invalid, nothing ran */
    EXIT_NO_INPUT = 66,    /* input missing */
    EXIT_UNAVAILABLE = 69, /* model or ranks unavailable after retries */
    EXIT_INTERNAL = 70,    /* internal error */
    EXIT_NO_OUTPUT = 73,   /* cannot create output */
    EXIT_IO = 74,          /* input/output error or disk full, state intact */
    EXIT_RESUMABLE = 75,   /* stopped early, the same command continues */
    EXIT_CONFIG = 78,      /* configuration: state of another identity, impossible setting */
    EXIT_LOCKSTEP = 90     /* a rank only: ranks disagree */
};

/* One error. A caller that wants none passes NULL wherever a `struct err *` is taken. Start from `struct err e = {0}`.
 * The first error wins: err_set on a record that already holds one changes nothing. */
struct err {
    enum rc rc;
    int exit_status;  /* enum exit_status that the command should end with; 0 = the caller decides */
    char code[40];    /* short machine word: "gguf_truncated" */
    char source[256]; /* file or object it was found in; "" = unknown */
    int64_t line;     /* 1-based, 0 = unknown */
    int64_t column;   /* 1-based, in characters, 0 = unknown */
    int64_t byte;     /* offset in source, -1 or 0 = unknown */
    char text[600];   /* one line for a person; never holds prompt or answer text */
};

/* Fills *e if it is not NULL and still empty; returns rc so that `return err_set(...)` works. */
enum rc err_set(struct err *e, enum rc rc, int exit_status, const char *code, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* As err_set, with ": <strerror(errno)>" appended. */
enum rc err_errno(struct err *e, enum rc rc, int exit_status, const char *code, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* Out of memory: RC_FATAL, EXIT_INTERNAL, code "out_of_memory". */
enum rc err_no_memory(struct err *e);
/* Adds the place to an error already set, where it has none yet. source may be NULL. */
void err_place(struct err *e, const char *source, int64_t line, int64_t column, int64_t byte);
/* Writes "source:line:column: code: text" with unknown parts left out. Returns out. */
char *err_format(const struct err *e, char *out, size_t out_bytes);

/* Growable bytes. Zero-initialize, append, buf_free. A failed allocation sticks: later appends do nothing and
 * `failed` stays true, so one check at the end is enough. data is always NUL-terminated once anything was appended. */
struct buf {
    char *data;
    size_t len;
    size_t cap;
    bool failed;
};
bool buf_reserve(struct buf *b, size_t extra_bytes);
bool buf_append(struct buf *b, const void *bytes, size_t n_bytes);
bool buf_append_str(struct buf *b, const char *text);
bool buf_printf(struct buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void buf_clear(struct buf *b); /* keeps the memory */
void buf_free(struct buf *b);  /* back to zero */

/* Checked arithmetic: false on overflow, *out untouched. */
static inline bool size_add(size_t a, size_t b, size_t *out) { return !__builtin_add_overflow(a, b, out); }
static inline bool size_mul(size_t a, size_t b, size_t *out) { return !__builtin_mul_overflow(a, b, out); }

/* Microseconds of CLOCK_MONOTONIC. */
int64_t clock_now_us(void);
void sleep_us(int64_t us);

/* Whole lines on stderr, one write each, so that ranks sharing it do not mix. */
enum log_level { LOG_ERROR, LOG_WARN, LOG_INFO, LOG_DEBUG };
void log_set(enum log_level max_level, const char *prefix); /* prefix is copied, at most 31 bytes */
void log_line(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Reads a whole regular file of at most max_bytes into out (replaced). */
enum rc file_read(const char *path, size_t max_bytes, struct buf *out, struct err *e);
/* Writes all n bytes, again after short writes and EINTR. False with errno set. */
bool fd_write_all(int fd, const void *bytes, size_t n_bytes);

#endif
