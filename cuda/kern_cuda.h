/* kern_cuda: the CUDA backend, one rank on one card. */
#ifndef TANDEM_KERN_CUDA_H
#define TANDEM_KERN_CUDA_H

#include "comm.h"
#include "kern.h"

struct kern_cuda_options {
    int device;
    bool graphs; /* record and replay rounds */
};
/* EXIT_UNAVAILABLE: no such card, or one that cannot compute this (below compute capability 8.0). */
enum rc kern_cuda_open(const struct kern_cuda_options *o, struct kern **out, struct err *e);
/* The sums and gathers of ranks over CUDA, on the stream of k. Collective. comm must be closed before k. */
struct kern_cuda_comm_options {
    struct segment *segment;
    int rank, ranks;
    const int *device_of_rank;
    const char *sum_path; /* "auto", "host", "peer", "nccl", "local" */
    int max_rows, width;
    size_t max_gather_floats;
};
enum rc kern_cuda_open_comm(struct kern *k, const struct kern_cuda_comm_options *o, struct comm **out, struct err *e);

/* Cards of this machine; 0 without a driver. why: set where 0 is returned, at least 128 bytes. */
int kern_cuda_devices(char *why);
/* The numerics name that kern_cuda_open would give ("cuda-sm90"); NULL: there is no such card. */
const char *kern_cuda_numerics(int device);

#endif
