/* model_shard_write: cuts a model into a folder for the ranks of one group, and checks such a folder against its source.
 *
 * Layout: schemas/shard.md; reading: model_shard. */
#ifndef TANDEM_MODEL_SHARD_WRITE_H
#define TANDEM_MODEL_SHARD_WRITE_H

#include "base.h"
#include "model_config.h"
#include "model_file.h"
#include "partition.h"

struct shard_report {
    void *ctx;
    /* Once a file: how many tensors it holds (0: a small file), and bytes. */
    void (*file)(void *ctx, const char *name, size_t n_tensors, uint64_t n_bytes);
};

/* Writes the folder: a new one, or with force over an older cut or an empty folder. Bounded memory; every file is written to a
 * temporary name, synced and renamed, shard.json as the last. Errors: EXIT_NO_OUTPUT where the folder may not or cannot be made,
 * EXIT_IO when writing fails, EXIT_UNAVAILABLE when the model was cut already. */
enum rc model_shard_write(struct model_file *m, const struct model_config *c, const struct partition *p, const char *folder, bool force,
                          const struct shard_report *report, struct err *e);
/* Every byte of the model is in at least one file of the folder and the same there, and nothing else is. RC_BAD_INPUT,
 * EXIT_UNAVAILABLE with file and tensor where it is not. */
enum rc model_shard_verify(struct model_file *m, const struct partition *p, const char *folder, const struct shard_report *report,
                           struct err *e);

/* The key-values of a GGUF as a file without tensors. */
bool model_shard_gguf_head(const struct model_file *m, struct buf *out);

#endif
