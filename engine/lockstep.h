/* lockstep: the shared segment of one group of ranks, and the rules that keep them equal.
 *
 * The runner creates the segment (a memfd, or plain memory when ranks are threads) and every rank maps it. It holds the
 * bounds table, the poison word, one heartbeat per rank, the step plan of rank 0 in two slots, one 64-byte record and one
 * board for exchanges per rank and parity, and the area that comm_shm works in. Nothing in it outlives the group.
 *
 * Every wait in here ends: by the word arriving, by poison, or when the awaited rank's heartbeat has stood still for the
 * wait's bound. A wait spins first, then sleeps on the segment's futex. */
#ifndef TANDEM_LOCKSTEP_H
#define TANDEM_LOCKSTEP_H

#include "base.h"

enum { LOCKSTEP_PLAN_BYTES = 65536, LOCKSTEP_BOARD_BYTES = 504 };

/* One table for all waits, checked by lockstep_bounds_check: collective < lockstep < watchdog, all > 0. */
struct lockstep_bounds {
    int64_t collective_us; /* a peer in a sum or gather: default 20 s */
    int64_t lockstep_us;   /* a peer's plan or record: default 40 s */
    int64_t watchdog_us;   /* the runner, on a rank's heartbeat: default 90 s */
};
struct lockstep_bounds lockstep_bounds_default(void);
enum rc lockstep_bounds_check(const struct lockstep_bounds *b, struct err *e);

/* What each rank publishes after a step; equal on all ranks or the group stops. */
struct lockstep_record {
    uint64_t step;
    uint64_t plan_digest;
    uint64_t rows;         /* rows computed */
    uint64_t tokens;       /* tokens sampled */
    uint64_t token_hash;   /* over (request, token), before stop strings cut */
    uint64_t position_sum; /* over all live sequences */
    uint64_t state_digest; /* last hidden rows after the last sum, KV lengths and chained token hashes */
    uint64_t flags;
};

struct segment;

/* Bytes of a segment for `ranks` ranks whose collectives carry at most comm_bytes per rank and slot; 0 when absurd. */
size_t segment_bytes(int ranks, size_t comm_bytes);
/* Lays out zeroed memory of segment_bytes, aligned to 64 bytes (the creator, once, before any rank). */
void segment_init(void *memory, int ranks, size_t comm_bytes, const struct lockstep_bounds *b);
/* Checks what a rank was handed: magic, version, size, ranks. Returns NULL and sets e otherwise. */
struct segment *segment_attach(void *memory, size_t n_bytes, int ranks, struct err *e);

struct lockstep_bounds segment_bounds(const struct segment *s);

/* Heartbeats: bumped by a rank per layer, per 16 MB of input and per idle turn; read by peers and the runner. */
void segment_beat(struct segment *s, int rank);
uint64_t segment_heartbeat(const struct segment *s, int rank);

/* Batches of checkpoints that a rank has on disk, so that rank 0 knows when all have. */
void segment_set_saved(struct segment *s, int rank, uint64_t batches);
uint64_t segment_saved(const struct segment *s, int rank);

/* Poison: first reason wins. rank: who says so, not who is to blame; the runner is -1. */
void segment_poison(struct segment *s, int rank, const char *reason);
bool segment_poisoned(const struct segment *s, int *rank, char *reason, size_t reason_bytes);

/* Rank 0 publishes the plan of `step` (steps start at 1 and rise by 1). */
void lockstep_publish_plan(struct segment *s, uint64_t step, const void *plan, size_t n_bytes);
/* Other ranks: waits at most patience_us for the plan of `step` (RC_RETRY when it has not come, so that the caller can look
 * at its socket); RC_FATAL by poison or by rank 0's stalled heartbeat. Copies at most LOCKSTEP_PLAN_BYTES into out. */
enum rc lockstep_read_plan(struct segment *s, int rank, uint64_t step, int64_t patience_us, void *out, size_t *out_bytes,
                           struct err *e);
/* Publishes this rank's record, waits for all others' of the same step, compares. A difference writes one line
 * "LOCKSTEP FAILURE step=… field=… rank0=… rank1=…" to stderr, poisons and returns RC_FATAL with EXIT_LOCKSTEP. */
enum rc lockstep_compare(struct segment *s, int rank, const struct lockstep_record *mine, struct err *e);

/* Collective: every rank gives n_bytes (at most LOCKSTEP_BOARD_BYTES; 0 is a barrier) and gets everybody's, rank r's at
 * all + r * n_bytes. Counts as one of the group's collectives. */
enum rc lockstep_exchange(struct segment *s, int rank, const void *mine, size_t n_bytes, void *all, struct err *e);
/* One look at the peers by a rank whose device waits for theirs: RC_FATAL as a collective's wait would end, by poison or by
 * a heartbeat that stands still (not of a rank that itself waits for this one). Bumps this rank's heartbeat, never waits. */
enum rc lockstep_watch(struct segment *s, int rank, struct err *e);

#endif
