/* mapped_file: a file of weights mapped read-only, and its digest, kept beside it.
 *
 * Private to model_file and its containers. */
#ifndef TANDEM_MAPPED_FILE_H
#define TANDEM_MAPPED_FILE_H

#include <sys/stat.h>

#include "base.h"

struct mapped_file {
    char *path;
    const void *bytes;
    size_t n_bytes;
    int fd;         /* -1: bytes of the caller */
    struct stat st; /* when opened */
};

/* Errors: EXIT_NO_INPUT when it cannot be opened or is no regular file. *out is then empty, and may be closed. */
enum rc mapped_file_open(const char *path, struct mapped_file *out, struct err *e);
/* The same over the caller's bytes, which must outlive it. */
enum rc mapped_file_of_bytes(const void *bytes, size_t n_bytes, const char *name, struct mapped_file *out,
                             struct err *e);
void mapped_file_close(struct mapped_file *m); /* a zero one is fine */

/* SHA-256 over the bytes, as hex digits + NUL, from ".NAME.tandem-digest" beside the file while size, mtime and inode
 * agree. RC_FAILED, "model_changed": the file was changed since it was opened. */
enum rc mapped_file_digest(const struct mapped_file *m, char out_hex[65], struct err *e);
/* The same over bytes in memory. */
void mapped_file_digest_bytes(const void *bytes, size_t n_bytes, char out_hex[65]);

#endif
