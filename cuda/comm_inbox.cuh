/* comm_inbox: the memory of a mailbox path: making it, handing it to the peers, opening theirs. Private to comm_*.
 *
 * Device memory travels as a CUDA IPC handle, host memory as a memfd of rank 0 that the others open through /proc.
 * Ranks that are threads of one process use each other's device pointers. The steps are collective only in that their
 * order is: make, exchange of struct inbox_card, open, another exchange (after which the memfd may be closed). */
#ifndef TANDEM_COMM_INBOX_CUH
#define TANDEM_COMM_INBOX_CUH

#include "comm_cuda.h"
#include "comm_mailbox.cuh"

/* What a rank tells the others. */
struct inbox_card {
    int pid, memfd;
    void *inbox; /* device memory in that process */
    cudaIpcMemHandle_t handle;
};

struct inbox {
    enum sum_path path; /* SUM_HOST, SUM_PEER or SUM_LOCAL */
    int rank, ranks;
    size_t area_bytes;
    char *own;                /* device memory of this rank's inbox; SUM_HOST: NULL */
    char *of_rank[MAX_RANKS]; /* inboxes as this device sees them */
    bool imported[MAX_RANKS]; /* by IPC */
    int memfd;                /* -1: none */
    void *map;
    size_t map_bytes;
};

enum { INBOX_WHY_BYTES = 160 };
/* False: why (INBOX_WHY_BYTES) says what failed. The inbox is closed with inbox_close whatever happened. */
bool inbox_make(struct inbox *b, enum sum_path path, int rank, int ranks, size_t area_bytes, struct inbox_card *card,
                char *why);
bool inbox_open(struct inbox *b, const struct inbox_card card_of_rank[], char *why);
void inbox_shared(struct inbox *b); /* everybody has opened it */
void inbox_close(struct inbox *b);
/* Fills in and out of a mail. */
void inbox_mail(const struct inbox *b, struct mail *m);

/* Collective: whether all ranks are content; if not, why (INBOX_WHY_BYTES) is what the first that is not said. mine
 * may be why. */
enum rc comm_vote(struct segment *s, int rank, int ranks, bool ok, const char *mine, bool *all_ok, char *why,
                  struct err *e);

#endif
