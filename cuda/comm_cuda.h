/* comm_cuda: sums and gathers of ranks whose backend is CUDA, enqueued on the backend's stream: over a mailbox in
 * pinned host memory, a mailbox in the peers' device memory (CUDA IPC), or NCCL. All paths give the same bits: every
 * rank's partial is rounded once to bfloat16, then added in FP32 in rank order, then added to the residual. One rank
 * alone rounds its partial too.
 *
 * Sums and gathers may be captured into graphs. A kernel that waits for a peer too long, or whose host calls it
 * off, ends without a result, and so do all later ones; comm_cuda_check tells. */
#ifndef TANDEM_COMM_CUDA_H
#define TANDEM_COMM_CUDA_H

#include "device.cuh"

extern "C" {
#include "comm.h"
#include "lockstep.h"
}

/* A partial's layout: decode rows in two planes [2][decode][width], then prefill rows [prefill][width], float32. The
 * value of a decode row is plane 0 + plane 1, in this order. */
static inline size_t comm_partial_bytes(int rows, int width)
{
    return (size_t)rows * (size_t)width * 2 * sizeof(float);
}

enum sum_path { SUM_AUTO, SUM_HOST, SUM_PEER, SUM_NCCL, SUM_LOCAL, SUM_PATHS };
const char *sum_path_name(enum sum_path p); /* "host" */
bool sum_path_parse(const char *name, enum sum_path *out);

struct comm_cuda_options {
    struct segment
        *segment; /* of the group; handles and votes travel through it. Outlives the comm. NULL: SUM_LOCAL only, or
                                  one rank */
    int rank, ranks;
    const int *device_of_rank; /* [ranks]: ranks on the same card have the same number; read by open only */
    enum sum_path
        path; /* SUM_LOCAL: pretends that all other ranks sent what this one did (benchmarks of one rank's share) */
    int max_rows, width;      /* of a sum; width a multiple of 16 */
    size_t max_gather_floats; /* of one rank's part of a gather */
};
/* Collective: all ranks call it together, each with its own card current. RC_BAD_INPUT, EXIT_CONFIG on every rank:
 * the path asked for cannot be had, the reason is in the text. */
enum rc comm_cuda_open(const struct op_context *c, const struct comm_cuda_options *o, struct comm **out, struct err *e);
/* The path chosen for sums of so many rows, for logs. */
enum sum_path comm_cuda_path(const struct comm *c, int rows);

/* For a host that waits for the stream, at least every few milliseconds: looks for poison and for peers whose hearts
 * have stopped, and then calls off what this rank's kernels wait for. */
void comm_cuda_poll(struct comm *c);
/* After the stream has been waited for: RC_FATAL when a sum or gather ended without a result ("peer_lost", or what
 * poll saw). */
enum rc comm_cuda_check(struct comm *c, struct err *e);

/* Sum as all_reduce_add, then the RMS norm of the new residual rows (row_norm.cuh) to act and, where it is given, to
 * y_dev: the same bits as the two operations one after the other. False: not for this shape, path or card, nothing
 * was enqueued; all ranks get the same answer. act: of exactly these rows and this width. */
bool comm_cuda_sum_norm(struct comm *c, const void *partial, struct kern_split rows, int width, float *residual_dev,
                        const float *w_dev, float eps, float *y_dev, void *act);

#endif
