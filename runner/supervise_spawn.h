/* supervise_spawn: what touches the operating system when a group starts and ends: the shared segment and the processes. */
#ifndef TANDEM_SUPERVISE_SPAWN_H
#define TANDEM_SUPERVISE_SPAWN_H

#include <sys/types.h>

#include "lockstep.h"
#include "rank_args.h"

/* A sealed memfd and the runner's own view of it. Zero-initialize fd to -1. */
struct spawn_segment {
    int fd;
    void *map;
    size_t bytes;
    struct segment *segment;
};
enum rc spawn_segment_open(int ranks, size_t comm_bytes, const struct lockstep_bounds *b, struct spawn_segment *out,
                           struct err *e);
void spawn_segment_close(struct spawn_segment *s);

/* Starts this program again as a rank in a process group of its own. It inherits standard error (also as its standard
 * output), its end of the socket pair and the segment, and nothing else. *socket_fd is the runner's end, non-blocking. */
enum rc spawn_rank(const struct rank_args *a, const struct spawn_segment *s, pid_t *pid, int *socket_fd, struct err *e);

/* RC_OK: it has ended and *status is set; RC_RETRY: it still runs. Never waits, asks for this pid alone. */
enum rc spawn_reap(pid_t pid, int *status);
/* Kills the rank's process group and reaps the rank. */
void spawn_kill(pid_t pid, int *status);

#endif
