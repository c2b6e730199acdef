/* archive: members of known size into one file or folder, published whole or not at all.
 *
 * The kind follows the suffix of the path: .tar.zst, .tar.gz, .tar.xz, .tar, .zip, anything else a folder. Written to a
 * temporary name in the same directory, every library return checked, fsynced, renamed, directory fsynced. A folder is
 * exchanged with RENAME_EXCHANGE. The same members always give the same bytes (fixed times, owners, modes; one thread). */
#ifndef TANDEM_ARCHIVE_H
#define TANDEM_ARCHIVE_H

#include "base.h"

enum archive_kind { ARCHIVE_TAR_ZST, ARCHIVE_TAR_GZ, ARCHIVE_TAR_XZ, ARCHIVE_TAR, ARCHIVE_ZIP, ARCHIVE_FOLDER };
enum archive_kind archive_kind_of(const char *path);

struct archive_writer;
/* Starts a temporary beside path. EXIT_NO_OUTPUT when it cannot be created (EXIT_IO on a full disk), or when path is there
 * and no regular file (a folder: is there and holds more than plain files; a symbolic link is never followed). Old
 * temporaries of the same path whose process is gone are removed. */
enum rc archive_create(const char *path, struct archive_writer **out, struct err *e);
/* One member: its exact size first, then exactly that many bytes through archive_write, in any pieces. */
enum rc archive_member(struct archive_writer *w, const char *name, uint64_t size_bytes, struct err *e);
enum rc archive_write(struct archive_writer *w, const void *bytes, size_t n_bytes, struct err *e);
/* Checks the last member's size, closes, fsyncs, renames over path, fsyncs the directory. EXIT_IO on failure, after which
 * path is as it was (unless it was the directory's own fsync that failed). Frees w in every case. */
enum rc archive_publish(struct archive_writer *w, struct err *e);
void archive_discard(struct archive_writer *w); /* removes the temporary; NULL is fine */

/* Reads one member of an archive or folder into out (hostile: bounded by max_bytes, only tar and zip). RC_RETRY: there is no
 * such member or no such file; RC_BAD_INPUT: damaged. */
enum rc archive_read_member(const char *path, const char *name, size_t max_bytes, struct buf *out, struct err *e);
/* The same for members that need not fit into memory: their SHA-256 and size. */
enum rc archive_digest_member(const char *path, const char *name, size_t max_bytes, unsigned char sha256[32], uint64_t *n_bytes,
                              struct err *e);

#endif
