/* lockstep_wait: the one publish and the one bounded wait of the segment. Private to lockstep.c and comm_shm.c. */
#ifndef TANDEM_LOCKSTEP_WAIT_H
#define TANDEM_LOCKSTEP_WAIT_H

#include "lockstep_segment.h"

struct lockstep_wait {
    int self, peer;
    enum segment_channel channel;
    uint64_t value;              /* until the peer's counter is at least this */
    int64_t bound_us;            /* a heartbeat may stand still so long */
    int64_t patience_us;         /* < 0: no limit; otherwise RC_RETRY after so long */
    const char *what;            /* "collective", for the message */
    struct segment_stall *stall; /* NULL, or the observation to go on with */
};

/* Raises a counter of `self` and wakes who sleeps for it. Everything written before is visible to whoever sees the
 * value. */
void lockstep_publish(struct segment *s, int self, enum segment_channel channel, uint64_t value);
/* The counter of `rank`, as seen by an acquire load. */
uint64_t lockstep_published(const struct segment *s, int rank, enum segment_channel channel);
/* RC_OK: the counter has arrived (*seen: its value, never less). RC_RETRY: patience is over. RC_FATAL: poison
 * ("group_poisoned"), or the rank at the end of the chain of waits has shown no heartbeat for bound_us ("peer_stalled";
 * the group is poisoned then). Both carry EXIT_UNAVAILABLE. */
enum rc lockstep_wait(struct segment *s, const struct lockstep_wait *w, uint64_t *seen, struct err *e);
/* RC_OK, or "group_poisoned" as in lockstep_wait. */
enum rc lockstep_check(const struct segment *s, struct err *e);
/* Wakes all sleepers of all ranks (after poison). */
void lockstep_wake_all(struct segment *s);

#endif
