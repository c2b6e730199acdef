/* comm_shm: collectives of CPU ranks through the group's shared segment. */
#ifndef TANDEM_COMM_SHM_H
#define TANDEM_COMM_SHM_H

#include "comm.h"
#include "lockstep.h"

/* The segment outlives the comm. */
enum rc comm_shm_open(struct segment *s, int rank, struct comm **out, struct err *e);

#endif
