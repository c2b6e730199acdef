/* comm_inbox: see comm_inbox.cuh. An inbox has one area per other rank, in rank order. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "comm_inbox.cuh"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static bool failed(char *why, const char *what, const char *reason)
{
    snprintf(why, INBOX_WHY_BYTES, "%s: %s", what, reason);
    return false;
}

static bool cuda_failed(char *why, const char *what, cudaError_t status)
{
    cudaGetLastError(); /* it has been told */
    return failed(why, what, cudaGetErrorString(status));
}

static size_t inbox_bytes(const struct inbox *b) { return (size_t)(b->ranks - 1) * b->area_bytes; }

static bool make_device(struct inbox *b, struct inbox_card *card, char *why)
{
    cudaError_t status = cudaMalloc((void **)&b->own, inbox_bytes(b));
    if (status != cudaSuccess) return cuda_failed(why, "device memory of the mailbox", status);
    status = cudaMemset(b->own, 0, inbox_bytes(b));
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    if (status != cudaSuccess) return cuda_failed(why, "clearing the mailbox", status);
    b->of_rank[b->rank] = b->own;
    card->inbox = b->own;
    if (b->path == SUM_LOCAL) return true;
    status = cudaIpcGetMemHandle(&card->handle, b->own);
    return status == cudaSuccess || cuda_failed(why, "CUDA IPC handle", status);
}

static bool make_host(struct inbox *b, struct inbox_card *card, char *why)
{
    if (b->rank != 0) return true;
    b->memfd = memfd_create("tandem-mailbox", MFD_CLOEXEC);
    if (b->memfd < 0) return failed(why, "memfd", strerror(errno));
    if (ftruncate(b->memfd, (off_t)(inbox_bytes(b) * (size_t)b->ranks)) != 0)
        return failed(why, "memfd size", strerror(errno));
    card->memfd = b->memfd;
    return true;
}

bool inbox_make(struct inbox *b, enum sum_path path, int rank, int ranks, size_t area_bytes, struct inbox_card *card,
                char *why)
{
    *b = (struct inbox){};
    b->path = path, b->rank = rank, b->ranks = ranks, b->area_bytes = area_bytes, b->memfd = -1;
    card->pid = (int)getpid();
    return path == SUM_HOST ? make_host(b, card, why) : make_device(b, card, why);
}

static bool open_device(struct inbox *b, const struct inbox_card card_of_rank[], char *why)
{
    for (int r = 0; r < b->ranks; r++) {
        const struct inbox_card *card = &card_of_rank[r];
        if (r == b->rank) continue;
        if (card->pid == (int)getpid()) {
            struct cudaPointerAttributes theirs = {}, mine = {};
            cudaError_t status = cudaPointerGetAttributes(&theirs, card->inbox);
            if (status == cudaSuccess) status = cudaPointerGetAttributes(&mine, b->own);
            if (status == cudaSuccess && theirs.device != mine.device)
                status = cudaDeviceEnablePeerAccess(theirs.device, 0);
            if (status == cudaErrorPeerAccessAlreadyEnabled) status = cudaSuccess;
            if (status != cudaSuccess) return cuda_failed(why, "a peer's device memory", status);
            cudaGetLastError();
            b->of_rank[r] = (char *)card->inbox;
            continue;
        }
        cudaError_t status =
            cudaIpcOpenMemHandle((void **)&b->of_rank[r], card->handle, cudaIpcMemLazyEnablePeerAccess);
        if (status != cudaSuccess) return cuda_failed(why, "a peer's device memory by CUDA IPC", status);
        b->imported[r] = true;
    }
    return true;
}

static bool open_host(struct inbox *b, const struct inbox_card card_of_rank[], char *why)
{
    char path[64];
    struct stat st;
    if (b->memfd < 0) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", card_of_rank[0].pid, card_of_rank[0].memfd);
        b->memfd = open(path, O_RDWR | O_CLOEXEC);
        if (b->memfd < 0) return failed(why, "rank 0's memfd", strerror(errno));
    }
    const size_t n_bytes = inbox_bytes(b) * (size_t)b->ranks;
    if (fstat(b->memfd, &st) != 0 || (size_t)st.st_size != n_bytes)
        return failed(why, "rank 0's memfd", "of another size");
    void *map = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, b->memfd, 0);
    if (map == MAP_FAILED) return failed(why, "map of the mailbox", strerror(errno));
    b->map = map, b->map_bytes = n_bytes;
    char *seen = NULL;
    cudaError_t status = cudaHostRegister(map, n_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (status == cudaSuccess) {
        status = cudaHostGetDevicePointer((void **)&seen, map, 0);
    } else {
        munmap(map, n_bytes);
        b->map = NULL;
    }
    if (status != cudaSuccess) return cuda_failed(why, "pinned host memory", status);
    for (int r = 0; r < b->ranks; r++) b->of_rank[r] = seen + (size_t)r * inbox_bytes(b);
    return true;
}

bool inbox_open(struct inbox *b, const struct inbox_card card_of_rank[], char *why)
{
    return b->path == SUM_HOST ? open_host(b, card_of_rank, why) : open_device(b, card_of_rank, why);
}

void inbox_shared(struct inbox *b)
{
    if (b->memfd >= 0) close(b->memfd);
    b->memfd = -1;
}

void inbox_close(struct inbox *b)
{
    for (int r = 0; r < b->ranks; r++)
        if (b->imported[r]) cudaIpcCloseMemHandle(b->of_rank[r]);
    cudaFree(b->own);
    if (b->map) {
        cudaHostUnregister(b->map);
        munmap(b->map, b->map_bytes);
    }
    inbox_shared(b);
    *b = (struct inbox){};
    b->memfd = -1;
}

/* The area in the inbox of rank `to` that rank `from` writes to. */
static char *area(const struct inbox *b, int to, int from)
{
    return b->of_rank[to] + (size_t)(from - (from > to)) * b->area_bytes;
}

void inbox_mail(const struct inbox *b, struct mail *m)
{
    for (int r = 0; r < b->ranks; r++) {
        if (r == b->rank) continue;
        m->in[r] = area(b, b->rank, r);
        m->out[r] = b->path == SUM_LOCAL ? m->in[r] : area(b, r, b->rank);
    }
}

struct vote {
    int ok;
    char why[INBOX_WHY_BYTES];
};

enum rc comm_vote(struct segment *s, int rank, int ranks, bool ok, const char *mine, bool *all_ok, char *why,
                  struct err *e)
{
    struct vote v = {}, of_rank[MAX_RANKS];
    v.ok = ok;
    snprintf(v.why, sizeof v.why, "%s", ok ? "" : mine);
    enum rc rc = lockstep_exchange(s, rank, &v, sizeof v, of_rank, e);
    *all_ok = rc == RC_OK;
    for (int r = ranks - 1; r >= 0 && rc == RC_OK; r--) {
        if (of_rank[r].ok) continue;
        *all_ok = false;
        snprintf(why, INBOX_WHY_BYTES, "%.*s", INBOX_WHY_BYTES - 1, of_rank[r].why);
    }
    return rc;
}
