/* model_shard: a model cut for the ranks of one group, as `tandem shard` writes it (schemas/shard.md): read side.
 *
 * Private to model_file. A folder with shard.json; one rank reads common.safetensors and its own file, which hold bytes of the
 * source as they were. What a rank sees has the source's names, shapes and digest; matrices that are cut have a window. */
#ifndef TANDEM_MODEL_SHARD_H
#define TANDEM_MODEL_SHARD_H

#include "base.h"
#include "mapped_file.h"
#include "model_file.h"
#include "safetensors.h"
#include "tensor_index.h"

#define SHARD_INDEX_NAME "shard.json"
#define SHARD_COMMON_NAME "common.safetensors"
#define SHARD_HEAD_NAME "head.gguf"
#define SHARD_METADATA_KEY "tandem_shard"
#define SHARD_SCALES_SUFFIX "#scales"
enum { SHARD_VERSION = 1, SHARD_NO_RANK = -1, SHARD_MAX_FILES = 32, SHARD_NAME_BYTES = 64 };

/* A file of the folder, as shard.json says it must be. */
struct shard_file {
    char name[SHARD_NAME_BYTES];
    uint64_t n_bytes;
    char sha256[65];
    bool seen;
};

/* What names the cut; equal in every file of a folder. */
struct shard_identity {
    int ranks;
    uint64_t partition;     /* partition_digest */
    char source_digest[65]; /* model_file_digest of the source */
};

struct model_shard {
    char *path; /* of shard.json */
    struct shard_identity identity;
    char source_name[256];
    enum model_layout layout;
    bool synthetic;
    struct shard_file files[SHARD_MAX_FILES];
    int n_files;
    struct mapped_file maps[2]; /* common, rank */
    struct safetensors stored;
    struct tensor_index tensors; /* of the common file, then of the rank's */
    size_t n_common;
    uint64_t *hashes; /* [tensors.n] of the bytes of each: codes, then scales (XXH3-64) */
    size_t cap_hashes;
    void **memory; /* [n_memory] the views' windows */
    size_t n_memory, cap_memory;
};

bool model_shard_is_at(const char *folder);
/* Opens the view of one rank of `ranks`; ranks 0: whatever it was cut for. RC_BAD_INPUT, EXIT_UNAVAILABLE with file and reason: cut
 * for another number of ranks, files of another cut, files that are damaged. *out must be freed after an error too. */
enum rc model_shard_open(const char *folder, int rank, int ranks, struct model_shard *out, struct err *e);
void model_shard_free(struct model_shard *s); /* a zero one is fine */

/* A small file of the folder must be the one that was written; all of them must have been checked in the end. */
enum rc model_shard_check_text(struct model_shard *s, const char *name, const void *bytes, size_t n_bytes, struct err *e);
enum rc model_shard_check_all_seen(const struct model_shard *s, struct err *e);
/* The source's digest, once this rank's files have their own (kept beside them, as mapped_file_digest does). */
enum rc model_shard_digest(const struct model_shard *s, char out_hex[65], struct err *e);
const struct shard_file *model_shard_file(const struct model_shard *s, const char *name); /* NULL: there is none */
/* "rank-1-of-2.safetensors", SHARD_COMMON_NAME for SHARD_NO_RANK. */
void model_shard_file_name(int rank, int ranks, char out[SHARD_NAME_BYTES]);

/* The steps of opening, for fuzzing: shard.json as text; then a file of tensors, whose bytes must outlive *io, as does source. */
enum rc model_shard_read_index(const char *text, size_t len, const char *source, struct model_shard *io, struct err *e);
enum rc model_shard_read_tensors(const void *bytes, size_t n_bytes, const char *source, int rank, struct model_shard *io,
                                 struct err *e);

#endif
