/* job_line: bounded reading of JSONL job files.
 *
 * Yields one line after another with its number and byte offset. CRLF, a leading BOM (first line only) and blank lines are
 * accepted; blank lines are skipped but counted. A line longer than the limit is reported and skipped, never kept. */
#ifndef TANDEM_JOB_LINE_H
#define TANDEM_JOB_LINE_H

#include "base.h"

enum { JOB_LINE_MAX_BYTES = 64 << 20 };

struct job_line {
    const char *bytes; /* without line end; valid until the next call */
    size_t len;
    int64_t number;    /* 1-based */
    int64_t byte;      /* offset of the line's first byte in the file */
    bool too_long;     /* bytes/len empty; the rest of the line was skipped */
};

struct job_reader;
/* EXIT_NO_INPUT when it cannot be opened or is no regular file ("-" is not special). */
enum rc job_reader_open(const char *path, size_t max_line_bytes, struct job_reader **out, struct err *e);
/* RC_OK with a line, RC_RETRY at the end of the file, RC_FAILED (EXIT_IO) when reading fails. */
enum rc job_reader_next(struct job_reader *r, struct job_line *out, struct err *e);
void job_reader_close(struct job_reader *r);

#endif
