/* checkpoint_store: what running requests have so far, on disk: one rank's part of STATE/checkpoints.
 *
 * A *checkpoint* belongs to one request, which a key names. It holds the request's whole pages (64 positions each, written once,
 * in order) and up to two *points*: a position, and everything else that the rows after it depend on, as the engine's bytes.
 * Points replace the older one of two, so that the last one is whole whenever the process ends, and ranks that were not
 * equally quick still have one in common. A point holds the hashes of its pages and a checksum: what is damaged, cut short,
 * foreign or of another key is no point; no byte reaches a caller that is not the byte that was saved.
 *
 * Saving is two steps. The caller fills a batch, in memory, and hands it over; a thread of the store writes it and makes it
 * durable, pages before points. One batch at a time. One thread calls a store.
 *
 * The files of a key are DIR/KEY.rRANK.pages, .a and .b. Whoever settles the request removes them. */
#ifndef TANDEM_CHECKPOINT_STORE_H
#define TANDEM_CHECKPOINT_STORE_H

#include "base.h"
#include "prefix_store.h"

enum { CHECKPOINT_KEY_BYTES = 32, CHECKPOINT_POINTS = 2 };

struct checkpoint_store;
struct checkpoint;

struct checkpoint_store_options {
    const char *folder;            /* made where it is missing, with its parent there */
    int rank;
    struct prefix_key fingerprint; /* everything that decides what the bytes mean */
    size_t page_bytes;             /* of 64 positions; 0: this rank has no KV heads and saves no pages */
};

/* RC_FAILED, EXIT_IO "checkpoint_io", "checkpoint_disk_full": no folder. */
enum rc checkpoint_store_open(const struct checkpoint_store_options *o, struct checkpoint_store **out, struct err *e);
/* Waits for the batch that is being written. All checkpoints have been closed. NULL is allowed. */
void checkpoint_store_close(struct checkpoint_store *s);

/* The checkpoint of a key, there already or not; nothing is written yet. RC_FATAL: no memory. */
enum rc checkpoint_open(struct checkpoint_store *s, const unsigned char key[CHECKPOINT_KEY_BYTES], struct checkpoint **out, struct err *e);
/* Never waits: what is in a batch is still written. Files stay. NULL is allowed. */
void checkpoint_close(struct checkpoint *c);

/* ---- going on from a point ---- */

/* Positions at which there is a point, as far as headers tell; 0: none. */
void checkpoint_positions(const struct checkpoint *c, int out[CHECKPOINT_POINTS]);

/* Takes verified pages in order. bytes are valid during the call. */
struct checkpoint_sink {
    void *ctx;
    void (*page)(void *ctx, int page, const void *bytes);
};
/* Reads and verifies the point at position: pages 0 .. position / 64 - 1 into the sink, the rest (most_bytes at most) into
 * rest (replaced). False: it is not whole; what the sink took counts for nothing. */
bool checkpoint_load(struct checkpoint *c, int position, const struct checkpoint_sink *sink, size_t most_bytes, struct buf *rest);
/* Before the first save: goes on from the point that was loaded last at this position, 0: from nothing. Other points are
 * forgotten. RC_FAILED: as a save. */
enum rc checkpoint_resume(struct checkpoint *c, int position, struct err *e);

/* ---- saving ---- */

/* Whole pages that are saved or in the batch. */
int checkpoint_pages(const struct checkpoint *c);
/* Adds the next whole page, or a point at position (its pages have been added: position / 64 of them) to the batch. *out is
 * filled by the caller before the next call. RC_FATAL: no memory. RC_FAILED, EXIT_IO "checkpoint_io", "checkpoint_disk_full". */
enum rc checkpoint_add_page(struct checkpoint *c, void **out, struct err *e);
enum rc checkpoint_add_point(struct checkpoint *c, int position, size_t n_bytes, void **out, struct err *e);
/* Hands the batch over. */
void checkpoint_store_write(struct checkpoint_store *s);
/* RC_OK: everything handed over is durable; RC_RETRY: it is being written, nothing may be added; RC_FAILED, EXIT_IO
 * "checkpoint_io", "checkpoint_disk_full": it could not be written, points before it are whole. */
enum rc checkpoint_store_status(struct checkpoint_store *s, struct err *e);
/* How long writing the last batch took, asked for when it is durable; 0: there was none. */
int64_t checkpoint_store_write_us(const struct checkpoint_store *s);

/* ---- care, from any process ---- */

/* Removes all files of a key, of all ranks; there may be none. */
void checkpoint_remove(const char *folder, const unsigned char key[CHECKPOINT_KEY_BYTES]);
/* Removes all files of keys that keep does not want, then the folder should it be empty. Files of other names stay. There need not
 * be a folder. */
void checkpoint_sweep(const char *folder, bool (*keep)(void *ctx, const unsigned char key[CHECKPOINT_KEY_BYTES]), void *ctx);

#endif
