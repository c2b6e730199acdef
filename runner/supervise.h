/* supervise: one group of ranks as an object: spawn, watch, kill, restart.
 *
 * A group owns N rank processes (each in its own process group, started with posix_spawn of /proc/self/exe), one shared
 * segment (memfd) and one socket per rank. It never blocks: group_poll_fds adds what to wait for, group_pump does what is
 * due. Restarting is the group's own business (backoff 0.2 s doubling to 10 s, cap on restarts without progress); its owner
 * hears of it and requeues what was in flight. No process and no shared memory survives group_close. */
#ifndef TANDEM_SUPERVISE_H
#define TANDEM_SUPERVISE_H

#include <poll.h>
#include <sys/types.h>

#include "base.h"
#include "options.h"
#include "rank_wire.h"

struct group;

enum group_state { GROUP_STARTING, GROUP_READY, GROUP_BACKOFF, GROUP_GAVE_UP, GROUP_CLOSED };

enum group_event_kind {
    GROUP_EVENT_READY,   /* all ranks said hello, and they agree */
    GROUP_EVENT_FRAME,   /* a STARTED, SAVED, STOPPED, DONE, FAILED or TOKEN frame of rank 0 */
    GROUP_EVENT_LOST,    /* the ranks were killed (reason in text); everything in flight must be submitted again */
    GROUP_EVENT_GAVE_UP  /* restarts used up or pointless; the group will not come back */
};
struct group_event {
    enum group_event_kind kind;
    const struct wire_frame *frame; /* until the next call */
    const char *text;               /* LOST, GAVE_UP: what happened, one line; until the next call */
    int exit_status;                /* GAVE_UP: what the command should end with; LOST: EXIT_IO when a disk failed a rank */
};

/* identity: what every hello must repeat. The options outlive the group. Starts the ranks. */
enum rc group_open(const struct options *o, int group_index, const char *identity, struct group **out, struct err *e);
enum group_state group_state_of(const struct group *g);
const struct wire_hello *group_hello(const struct group *g); /* rank 0's, while READY */
int64_t group_restarts(const struct group *g); /* launches after the first */
/* Process of a rank, 0 when there is none. For reading its memory figures. */
pid_t group_rank_pid(const struct group *g, int rank);
/* Adds at most MAX_RANKS entries; returns how many. *timeout_ms is lowered to the group's next due time. */
int group_poll_fds(struct group *g, struct pollfd *out, int *timeout_ms);
/* Reads, writes, reaps, checks heartbeats and due times; never waits. */
void group_pump(struct group *g);
bool group_next_event(struct group *g, struct group_event *out);
/* Queues a submit to every rank (cancel: rank 0). The frame is encoded at once. RC_RETRY: not READY. RC_BAD_INPUT: it does
 * not fit into a frame. */
enum rc group_submit(struct group *g, const struct engine_request *r, struct err *e);
void group_cancel(struct group *g, uint64_t id);
/* Tells rank 0 to save what runs and compute no more; a STOPPED frame follows. */
void group_stop(struct group *g);
/* Tells the supervisor that a job ended or got further than ever: restarts without progress start again at 0. Also in time after LOST: whether to
 * give up is decided when the backoff ends. */
void group_progress(struct group *g);
/* Asks the ranks to leave, waits at most grace, kills what is left, reaps. NULL is fine. */
void group_close(struct group *g, int64_t grace_us);

#endif
