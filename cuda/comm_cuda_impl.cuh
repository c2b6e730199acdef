/* comm_cuda_impl: the object behind a CUDA comm. Private to comm_*. */
#ifndef TANDEM_COMM_CUDA_IMPL_CUH
#define TANDEM_COMM_CUDA_IMPL_CUH

#include "comm_inbox.cuh"
#include "comm_nccl.cuh"

/* A mailbox path. */
struct mail_path {
    bool usable;
    struct inbox inbox;
    struct mail mail;
    struct mail_state *state;
};

struct comm_cuda {
    struct comm comm;
    struct op_context op;
    struct segment *segment;
    int max_rows, width;
    size_t max_gather_floats;
    bool crowded; /* some ranks share a card */
    bool fused;   /* all cards can sum and norm in one kernel */
    int word_blocks;
    struct mail_notice *notice, *notice_dev;
    struct mail_path path[SUM_PATHS];
    char why_not[SUM_PATHS][INBOX_WHY_BYTES];
    struct comm_nccl *nccl;
    enum sum_path words, bulk, columns; /* chosen for small sums, large sums, gathers */
    struct err lost; /* what poll saw */
};

/* Enqueues a sum on a path, whichever is chosen. */
void comm_cuda_sum_on(struct comm_cuda *m, enum sum_path p, const struct sum_job *j);
/* Waits for the stream, polling. RC_FATAL: a CUDA error or a lost peer. */
enum rc comm_cuda_wait(struct comm_cuda *m, struct err *e);

/* Collective: sums with data that tell rank, place and round, compared bit by bit with the host's. ok: on all ranks;
 * otherwise why. */
enum rc trial_check(struct comm_cuda *m, enum sum_path p, bool *ok, char *why, struct err *e);
/* Collective: times the usable paths on real sizes; rank 0 chooses m->words and m->bulk for all. line: the figures,
 * for the log. */
enum { TRIAL_LINE_BYTES = 400 };
enum rc trial_race(struct comm_cuda *m, char *line, struct err *e);

#endif
