/* lockstep_segment: the layout of a group's shared segment. Private to lockstep.c, lockstep_wait.c and comm_shm.c.
 *
 *     struct segment    header, poison, two plan slots, one struct segment_rank per possible rank
 *     comm area         per rank two slots of segment_slot_stride(comm_bytes), by parity of the collective's number
 *
 * Every word that one side writes while another polls has a 64-byte line of its own, so that publishing costs one line
 * transfer per reader and a heartbeat disturbs nobody. All shared words are C11 atomics without locks (the mapping is
 * shared by processes); everything else is plain memory that is written before a release store and read after the
 * acquire load that saw it. The header is written once, by the creator, before any rank exists. */
#ifndef TANDEM_LOCKSTEP_SEGMENT_H
#define TANDEM_LOCKSTEP_SEGMENT_H

#include <assert.h>
#include <stdalign.h>
#include <stdatomic.h>

#include "lockstep.h"

static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "shared words must be lock-free");

enum { SEGMENT_LINE_BYTES = 64, SEGMENT_VERSION = 3, SEGMENT_REASON_BYTES = 700 };

/* What a rank publishes by raising a counter. Counters start at 0 and rise by 1. */
enum segment_channel {
    SEGMENT_PLAN,   /* step of the newest plan (rank 0) */
    SEGMENT_RECORD, /* step of the newest record */
    SEGMENT_COMM,   /* number of the newest collective */
    SEGMENT_CHANNELS
};

struct segment_word {
    alignas(SEGMENT_LINE_BYTES) _Atomic uint64_t value;
};

/* A peer under observation: how long the same heartbeat of the same rank has been seen. */
struct segment_stall {
    bool watching;
    int rank;
    uint64_t beat;
    int64_t looked_us, still_us;
};

/* What a rank gives to an exchange. */
struct segment_board {
    alignas(SEGMENT_LINE_BYTES) uint64_t n_bytes;
    unsigned char bytes[LOCKSTEP_BOARD_BYTES];
};

struct segment_rank {
    alignas(SEGMENT_LINE_BYTES) _Atomic uint64_t beat;
    /* What this rank sleeps for: 0, or 1 + peer * SEGMENT_CHANNELS + channel, and the counter's awaited value. */
    alignas(SEGMENT_LINE_BYTES) _Atomic uint32_t waits_for;
    _Atomic uint64_t waits_value;
    /* Futex that whoever waits for this rank sleeps on; sleepers: how many do. */
    alignas(SEGMENT_LINE_BYTES) _Atomic uint32_t bell;
    _Atomic uint32_t sleepers;
    struct segment_word word[SEGMENT_CHANNELS];
    struct segment_word saved; /* batches of checkpoints on this rank's disk */
    alignas(SEGMENT_LINE_BYTES) struct lockstep_record record[2]; /* by parity of the step */
    /* Touched by this rank alone: its wait for the plan of plan_step goes on over several calls. */
    alignas(SEGMENT_LINE_BYTES) uint64_t plan_step;
    struct segment_stall plan_stall;
    struct segment_stall watch_stall[MAX_RANKS]; /* of each peer, likewise */
    struct segment_board board[2];               /* by parity of the collective's number */
};

struct segment_plan {
    alignas(SEGMENT_LINE_BYTES) uint64_t step;
    uint64_t n_bytes;
    unsigned char bytes[LOCKSTEP_PLAN_BYTES];
};

/* Why an author poisons; written once by the author (taken), before the poison word may name it. */
struct segment_reason {
    alignas(SEGMENT_LINE_BYTES) _Atomic uint32_t taken;
    char text[SEGMENT_REASON_BYTES];
};

struct segment {
    alignas(SEGMENT_LINE_BYTES) uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint64_t total_bytes;
    uint64_t comm_bytes; /* payload of one slot */
    struct lockstep_bounds bounds;
    uint32_t spin_pauses;                                /* of a wait before it sleeps */
    alignas(SEGMENT_LINE_BYTES) _Atomic uint32_t poison; /* 0, or 1 + index into reason */
    struct segment_reason reason[MAX_RANKS + 1];         /* the last one is the runner's */
    struct segment_rank rank[MAX_RANKS];
    struct segment_plan plan[2]; /* by parity of the step */
};

/* One rank's part of one collective. */
struct segment_slot {
    alignas(SEGMENT_LINE_BYTES) uint64_t floats;
    uint32_t kind;
    uint32_t zeros; /* the payload counts as floats zeros and was not written */
    alignas(SEGMENT_LINE_BYTES) float payload[];
};

/* Distance of two slots; false when comm_bytes is absurd. */
bool segment_slot_stride(size_t comm_bytes, size_t *out);
/* Slot of `rank` for collectives of this parity (0 or 1). */
struct segment_slot *segment_slot_of(struct segment *s, int rank, unsigned parity);

#endif
