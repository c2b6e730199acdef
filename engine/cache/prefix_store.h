/* prefix_store: what earlier prompts left on disk for those that begin with the same tokens. One rank's part of --cache DIR.
 *
 * Two nouns. A *block* holds the keys and values of 64 positions. A *state* holds what pages cannot (recurrent state,
 * convolution history, kept hidden rows) at one position, a multiple of 64. Both are opaque bytes of a fixed size, named by
 * the chained hash of all tokens before their end, seeded with a fingerprint: entries of another model, partition, KV format
 * or numerics are never found. A position can be served when all blocks below it are there and, where the model needs one,
 * the state at it.
 *
 * The store is a cache and behaves like one. Whatever is missing, damaged, cut short, foreign, or has the right hash and
 * other tokens is a miss and deleted; no byte reaches a caller that is not the byte that was put for exactly these tokens.
 * Only opening and putting can fail, and then nothing else is lost: the caller goes on without the store, or ends.
 *
 * DIR/rank-N/ is one LMDB index, and payload files beside it that describe themselves, so that a lost index is made anew.
 * Any number of processes (groups, runs) may share it. Within a process it is opened once at a time. One thread calls a
 * store. Changes of the index wait for those of other processes, which are short. */
#ifndef TANDEM_PREFIX_STORE_H
#define TANDEM_PREFIX_STORE_H

#include "base.h"

enum { PREFIX_BLOCK_TOKENS = 64 };

/* The name of a block or state; also a fingerprint: what the chain starts from. */
struct prefix_key {
    unsigned char bytes[16];
};

struct prefix_store;

struct prefix_store_options {
    const char *folder;             /* DIR; made where it is missing, with its parent there */
    int rank;
    struct prefix_key fingerprint;  /* everything that decides what the bytes mean. Unimportant for stat, verify and prune */
    size_t block_bytes;             /* of a block; 0: this rank has no KV heads, lacks no block and stores none */
    size_t state_bytes;             /* of a state; 0: this rank needs none and stores none */
    uint64_t quota_bytes;           /* payload in DIR/rank-N, whoever put it; 0: unbounded */
    uint64_t free_floor_bytes;      /* that the file system keeps free */
    bool must_exist;                /* make nothing: RC_BAD_INPUT, EXIT_NO_INPUT "no_store" where there is no store */
};

/* Opens the store. The first to come (nobody else has it open) makes the index anew from all that is whole in it, looks
 * for payload files that it lost and deletes what is left of dead processes. Forks a child for that, which may die of a
 * damaged index: call it before the process grows threads or much memory. Waits up to a minute for another process that does
 * the same. Every failure leaves the folder as good as it was, and the caller may always go on without a store:
 *   RC_BAD_INPUT  EXIT_CONFIG "remote_store": not a local disk; "no_store", see must_exist
 *   RC_RETRY      EXIT_RESUMABLE "store_busy": the minute is over
 *   RC_FAILED     EXIT_IO "store_disk_full", "store_io"; "store_damaged": the index is, and others have it open; who opens
 *                 it after them makes it anew. EXIT_NO_OUTPUT "store_io": no folder. EXIT_INTERNAL "store_open": this process
 *                 has it open already */
enum rc prefix_store_open(const struct prefix_store_options *o, struct prefix_store **out, struct err *e);
void prefix_store_close(struct prefix_store *s); /* NULL is allowed */

/* The names of a prompt's whole blocks, keys[n_tokens / 64]; keys[b] also names the state at position (b + 1) * 64. */
void prefix_chain(const struct prefix_key *fingerprint, const int32_t *tokens, int n_tokens, struct prefix_key *keys);

/* ---- finding ---- */

/* Positions as bits, so that ranks agree by a bitwise and: bit b stands for position (b + 1) * 64. */
enum { PREFIX_WORD_BITS = 64 };
#define PREFIX_WORDS(n_tokens) ((size_t)(n_tokens) / (PREFIX_BLOCK_TOKENS * PREFIX_WORD_BITS) + 1)

/* Which positions below n_tokens (a prompt's last token is always computed) this rank can serve, as far as its index says:
 * servable[PREFIX_WORDS(n_tokens)] is overwritten. Returns the tokens of the longest run of blocks. Reads no payload. */
int prefix_store_lookup(struct prefix_store *s, const int32_t *tokens, int n_tokens, uint64_t *servable);
/* The greatest position in a set, 0: it is empty. For the next lower one clear its bit. */
int prefix_greatest(const uint64_t *servable, int n_tokens);

/* Takes verified bytes. Blocks come in order, the state last. bytes are valid during the call. */
struct prefix_sink {
    void *ctx;
    void (*block)(void *ctx, int block, const void *bytes); /* positions block * 64 .. block * 64 + 63 */
    void (*state)(void *ctx, const void *bytes);            /* at the position asked for */
};
/* Reads and verifies blocks [from / 64, position / 64) and, with state_bytes, the state at position; from < position, both
 * multiples of 64. False: something is missing or wrong. What is wrong has been deleted; what the sink took until then counts for
 * nothing. A load that succeeds is a use. */
bool prefix_store_load(struct prefix_store *s, const int32_t *tokens, int from, int position, const struct prefix_sink *sink);

/* ---- putting ---- */

/* Gives bytes; each is asked for once, and only for what the store lacks. out is of block_bytes or state_bytes. */
struct prefix_source {
    void *ctx;
    void (*block)(void *ctx, int block, void *out);
    void (*state)(void *ctx, void *out); /* NULL: no state is put */
};
/* Puts the blocks below position that are not there, then the state at position; position is a multiple of 64. Blocks go
 * into files of up to 32 in a row. What is put is on disk before it can be found. Makes room by eviction: never of blocks
 * of this prompt, nor of what the planner needs sooner (prefix_store_mark).
 *   RC_OK      all of it is in the store
 *   RC_RETRY   EXIT_DONE "store_full": quota or free space allow no more, and nothing else may go. What was put before stays
 *   RC_FAILED  EXIT_IO "store_disk_full", "store_io": a write failed. What was put before stays; the store may be used on.
 *              The error's source is the folder
 *   RC_FATAL   the index cannot be used any more, or no memory: close */
enum rc prefix_store_put(struct prefix_store *s, const int32_t *tokens, int position, const struct prefix_source *source,
                         struct err *e);

/* ---- the future ---- */

#define PREFIX_NEVER INT64_MAX

/* The planner knows that the blocks and states up to position, put already or not, are used next by what is next_use-th in its
 * order. Replaces what was said of the same tokens before; PREFIX_NEVER forgets it. Kept in memory, 16 bytes a block, for the life
 * of s; meant for thousands. Eviction takes first what nobody
 * marked, least recently used first, then what is used latest; of one prompt the end before the beginning.
 * RC_FATAL: no memory. */
enum rc prefix_store_mark(struct prefix_store *s, const int32_t *tokens, int position, int64_t next_use, struct err *e);

/* ---- care: of all entries, whatever their fingerprint ---- */

struct prefix_stat {
    uint64_t files, blocks, states;
    uint64_t bytes;                        /* of payload */
    uint64_t oldest_use_us, newest_use_us; /* wall clock, 0: empty */
};
enum rc prefix_store_stat(struct prefix_store *s, struct prefix_stat *out, struct err *e);

struct prefix_count {
    uint64_t files, bytes;
};
/* Reads every payload file; what is wrong is deleted. */
enum rc prefix_store_verify(struct prefix_store *s, struct prefix_count *read, struct prefix_count *deleted, struct err *e);
/* Deletes what was last used before unused_since_us (wall clock; 0: nothing), then in the order of eviction until no more
 * than target_bytes are left (UINT64_MAX: no matter). */
enum rc prefix_store_prune(struct prefix_store *s, uint64_t target_bytes, uint64_t unused_since_us, struct prefix_count *deleted,
                           struct err *e);

#endif
