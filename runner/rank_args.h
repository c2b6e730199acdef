/* rank_args: the command line of a rank process, written by supervise and read by rank_main from one table. */
#ifndef TANDEM_RANK_ARGS_H
#define TANDEM_RANK_ARGS_H

#include "base.h"
#include "options.h"

/* What descriptors a rank inherits beside 0, 1 and 2. */
enum { RANK_SOCKET_FD = 3, RANK_SEGMENT_FD = 4 };

struct rank_args {
    struct options options; /* only what a rank needs: model, ranks, engine and backend settings */
    int rank, group;
    int socket_fd, segment_fd;
    int64_t runner_pid;     /* a rank whose parent is another process leaves at once */
};

/* What rank `rank` of group `group` is to be told. threads is resolved; the fault stays in. */
struct rank_args rank_args_make(const struct options *o, int group, int rank);
/* Texts of argv in one buffer, NUL after NUL; pointers holds where each starts, ending in NULL. */
struct rank_argv {
    char *argv[80];
    struct buf text;
};
enum rc rank_args_write(const struct rank_args *a, struct rank_argv *out, struct err *e);
void rank_argv_free(struct rank_argv *v);
/* argv[2..) as written above. Texts point into argv. RC_BAD_INPUT, EXIT_USAGE. */
enum rc rank_args_read(int argc, char **argv, struct rank_args *out, struct err *e);

/* The engine's options of this rank. */
struct engine_options rank_args_engine(const struct rank_args *a);

#endif
