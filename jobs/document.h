/* document: files named by jobs, to text.
 *
 * Opened beneath a root folder (openat2 RESOLVE_BENEATH, no magic links), regular files only, bounded, valid UTF-8 (a
 * leading BOM is dropped). Problems are the job's own 422. */
#ifndef TANDEM_DOCUMENT_H
#define TANDEM_DOCUMENT_H

#include "base.h"
#include "job_spec.h"

enum {
    DOCUMENT_MAX_BYTES = 64 << 20,
    JOB_TEXT_MAX_BYTES = 256 << 20, /* all messages and documents of one job: 413 job_too_large beyond */
    DIGEST_BYTES = 32
};

struct document_root; /* an open folder */
/* EXIT_NO_INPUT; EXIT_UNAVAILABLE on a kernel (or sandbox) without openat2. */
enum rc document_root_open(const char *folder, struct document_root **out, struct err *e);
void document_root_close(struct document_root *r);

/* Reads one document: its text into text (appended; as it was after a failure), SHA-256 of its bytes into digest.
 * False: fault set to 422 (document_not_found, document_outside_root, document_not_regular, document_not_readable,
 * document_too_large, document_not_utf8, document_not_text: a NUL in it), or to 500 (out_of_memory). */
bool document_read(struct document_root *r, const char *path, struct buf *text, unsigned char digest[DIGEST_BYTES],
                   struct job_fault *fault);

/* All documents of a job in order of appearance: their digests, appended to digests (n * DIGEST_BYTES). */
bool document_digests(struct document_root *r, const struct job_spec *s, struct buf *digests, struct job_fault *fault);

/* A job's messages with documents read in, ready for the chat template. pinned: the digests recorded at registration
 * (n_pinned bytes); a document that differs is a 422 document_changed; NULL: there is nothing to compare with. role
 * points into s. Free with job_texts_free. After false *out is empty. */
struct job_texts {
    struct job_text {
        const char *role;
        struct buf text;
    } *messages;
    size_t n;
};
bool job_texts_read(struct document_root *r, const struct job_spec *s, const void *pinned, size_t n_pinned,
                    struct job_texts *out, struct job_fault *fault);
void job_texts_free(struct job_texts *t);

#endif
