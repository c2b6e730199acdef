/* comm_nccl: see comm_nccl.cuh. The partials, rounded, go through ncclAllGather; the sum is our own, so that it has
 * the bits of the other paths.
 *
 * The communicator is made, and used once (which connects it: nothing of that may happen in a capture), by a thread
 * of its own: its calls block until all peers have come, and a peer that died would block them for ever. The thread
 * is left behind when the bound is over; the rank exits then. (NCCL's own non-blocking mode would make a thread for
 * every later call.) */
#include "comm_nccl.cuh"

#include <stdio.h>
#include <string.h>

#if TANDEM_NCCL

#include <nccl.h>
#include <pthread.h>
#include <stdlib.h>

#include <atomic>
#include <new>

struct comm_nccl {
    ncclComm_t comm;
    ncclUniqueId id;
    int rank, ranks, device;
    char *all; /* [ranks][stride] bfloat16 */
    size_t stride;
    bool aborted;
    char why[INBOX_WHY_BYTES];
    std::atomic<int> state; /* 0 working, 1 connected, 2 failed */
};

bool nccl_built(void) { return true; }

static void *connect_main(void *argument)
{
    struct comm_nccl *n = (struct comm_nccl *)argument;
    cudaStream_t stream = NULL;
    ncclResult_t result = ncclUnhandledCudaError;
    cudaError_t status = cudaSetDevice(n->device);
    if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (status == cudaSuccess) {
        result = ncclCommInitRank(&n->comm, n->ranks, n->id, n->rank);
        const size_t sizes[] = {64, n->stride}; /* short and long messages may take different ways */
        for (size_t values : sizes) {
            char *mine = n->all + (size_t)n->rank * values * 2;
            if (result == ncclSuccess) result = ncclAllGather(mine, n->all, values, ncclBfloat16, n->comm, stream);
        }
        if (result == ncclSuccess) status = cudaStreamSynchronize(stream);
        cudaStreamDestroy(stream);
    }
    const bool ok = result == ncclSuccess && status == cudaSuccess;
    if (!ok)
        snprintf(n->why, sizeof n->why, "NCCL: %s",
                 status != cudaSuccess ? cudaGetErrorString(status) : ncclGetErrorString(result));
    n->state.store(ok ? 1 : 2);
    return NULL;
}

/* True: connected. A communicator that is still being made when the bound is over is lost, with its thread. */
static bool connect(struct segment *s, struct comm_nccl *n)
{
    const int64_t until = clock_now_us() + segment_bounds(s).collective_us;
    pthread_t thread;
    struct err broken = {};
    if (pthread_create(&thread, NULL, connect_main, n) != 0) {
        snprintf(n->why, sizeof n->why, "NCCL: no thread");
        n->state.store(2);
        return false;
    }
    while (!n->state.load() && clock_now_us() < until && lockstep_watch(s, n->rank, &broken) == RC_OK) sleep_us(1000);
    if (!n->state.load()) {
        pthread_detach(thread);
        return false;
    }
    pthread_join(thread, NULL);
    return n->state.load() == 1;
}

enum rc nccl_open(struct segment *s, int rank, int ranks, size_t max_values, struct comm_nccl **out, char *why,
                  struct err *e)
{
    *out = NULL;
    struct comm_nccl *n = new (std::nothrow) comm_nccl();
    if (!n) return err_no_memory(e);
    const size_t stride = (max_values + 63) / 64 * 64;
    n->rank = rank, n->ranks = ranks, n->stride = stride;
    ncclResult_t id = rank == 0 ? ncclGetUniqueId(&n->id) : ncclSuccess;
    cudaError_t status = cudaGetDevice(&n->device);
    if (status == cudaSuccess) status = cudaMalloc((void **)&n->all, stride * 2 * (size_t)ranks);
    if (status == cudaSuccess) status = cudaMemset(n->all, 0, stride * 2 * (size_t)ranks);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status != cudaSuccess)
        snprintf(n->why, sizeof n->why, "memory for NCCL: %s", cudaGetErrorString(status));
    else if (id != ncclSuccess)
        snprintf(n->why, sizeof n->why, "NCCL: %s", ncclGetErrorString(id));
    bool ok = false;
    enum rc rc = comm_vote(s, rank, ranks, !n->why[0], n->why, &ok, why, e);
    if (rc == RC_OK && ok) {
        ncclUniqueId ids[MAX_RANKS];
        rc = lockstep_exchange(s, rank, &n->id, sizeof n->id, ids, e);
        if (rc == RC_OK) {
            n->id = ids[0];
            ok = connect(s, n);
            if (!n->state.load()) {
                segment_poison(s, rank, "NCCL did not connect in time");
                return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "nccl_stalled", "NCCL did not connect in time");
            }
            rc = comm_vote(s, rank, ranks, ok, n->why, &ok, why, e);
        }
    }
    if (rc == RC_OK && ok)
        *out = n;
    else
        nccl_close(n);
    return rc;
}

void nccl_sum(const struct op_context *c, struct comm_nccl *n, const struct sum_job *j)
{
    char *mine = n->all + (size_t)n->rank * sum_values(j) * 2;
    if (n->aborted) return;
    sum_round(c, j, mine);
    ncclAllGather(mine, n->all, sum_values(j), ncclBfloat16, n->comm, c->stream);
    sum_add_rounded(c, j, n->all, sum_values(j), n->ranks);
}

void nccl_abort(struct comm_nccl *n)
{
    if (!n->aborted && n->comm) ncclCommAbort(n->comm);
    n->aborted = true;
}

void nccl_close(struct comm_nccl *n)
{
    if (!n) return;
    nccl_abort(n); /* ncclCommDestroy would wait for peers */
    cudaFree(n->all);
    delete n;
}

#else

struct comm_nccl {
    int nothing;
};

bool nccl_built(void) { return false; }

enum rc nccl_open(struct segment *, int, int, size_t, struct comm_nccl **out, char *why, struct err *)
{
    *out = NULL;
    snprintf(why, INBOX_WHY_BYTES, "this build has no NCCL");
    return RC_OK;
}

void nccl_sum(const struct op_context *, struct comm_nccl *, const struct sum_job *) {}
void nccl_abort(struct comm_nccl *) {}
void nccl_close(struct comm_nccl *) {}

#endif
