/* prefix_payload: the bytes of one payload file. Private to the prefix store.
 *
 *   header | token ids, int32 [n_blocks * 64] | checksums, uint64 [items] | items of item_bytes each
 *
 * A KV file has n_blocks items, its blocks; a state file has one item, the state after its only block. It describes itself:
 * which fingerprint, the chain before it, its tokens. schemas/prefix_store.md has the offsets. */
#ifndef TANDEM_PREFIX_PAYLOAD_H
#define TANDEM_PREFIX_PAYLOAD_H

#include "prefix_store.h"

enum prefix_kind { PREFIX_KV = 1, PREFIX_STATE = 2 };
enum { PREFIX_FILE_BLOCKS = 32, PREFIX_DIGEST_BYTES = 32 };

/* Stored as is: fixed sizes, no padding. */
struct prefix_header {
    uint64_t magic;
    uint32_t version, kind;
    struct prefix_key fingerprint;
    struct prefix_key parent;                    /* of the block before the first; the fingerprint where there is none */
    unsigned char before[PREFIX_DIGEST_BYTES];   /* SHA-256 of all token ids before the first block */
    uint32_t first_block, n_blocks;
    uint64_t item_bytes;
    uint64_t checksum;                           /* XXH3-64 of header with 0 here, token ids, checksums */
};

/* Everything of a file but its items. */
struct prefix_payload {
    struct prefix_header h;
    int32_t tokens[PREFIX_FILE_BLOCKS * PREFIX_BLOCK_TOKENS];
    uint64_t checksums[PREFIX_FILE_BLOCKS];
};

/* A file's name: its id and kind. */
struct prefix_name {
    uint64_t id;
    enum prefix_kind kind;
};
enum { PREFIX_NAME_CHARS = 24 };
void prefix_name_format(struct prefix_name n, char out[PREFIX_NAME_CHARS]);
/* UNFINISHED: a file that was being written; out->kind means nothing. */
enum prefix_name_kind { PREFIX_NAME_FOREIGN, PREFIX_NAME_PAYLOAD, PREFIX_NAME_UNFINISHED };
enum prefix_name_kind prefix_name_parse(const char *text, struct prefix_name *out);

uint32_t prefix_payload_items(const struct prefix_header *h);
/* Of the whole file; false: impossible. */
bool prefix_payload_bytes(const struct prefix_header *h, uint64_t *out);
/* Names of its blocks, keys[n_blocks]. */
void prefix_payload_keys(const struct prefix_payload *p, struct prefix_key *keys);

/* Writes a file under a temporary name, makes it durable and gives it its name n. p: header fields from kind on and tokens; the
 * rest is filled in. item fills item i, item_bytes. On failure nothing is left. RC_FAILED, EXIT_IO "store_disk_full" or "store_io". */
enum rc prefix_payload_write(int folder_fd, struct prefix_name n, struct prefix_payload *p,
                             void (*item)(void *ctx, uint32_t i, void *out), void *ctx, void *scratch, struct err *e);

enum prefix_verdict { PREFIX_WHOLE, PREFIX_WRONG, PREFIX_UNREADABLE /* says nothing about the file: descriptors, memory */ };
/* Opens a file and verifies all but its items. PREFIX_WHOLE: *fd is the caller's to close. */
enum prefix_verdict prefix_payload_open(int folder_fd, struct prefix_name n, struct prefix_payload *p, int *fd);
/* Reads item i; false: not what was written. */
bool prefix_payload_item(int fd, const struct prefix_payload *p, uint32_t i, void *out);

/* The errno of a failed write as an error. */
enum rc prefix_write_error(const char *what, struct err *e);

#endif
