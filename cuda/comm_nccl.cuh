/* comm_nccl: sums by an all-gather of NCCL; compiled to "not there" without TANDEM_NCCL. Private to comm_*. */
#ifndef TANDEM_COMM_NCCL_CUH
#define TANDEM_COMM_NCCL_CUH

#include "comm_inbox.cuh"

struct comm_nccl;

bool nccl_built(void);
/* Collective. RC_OK with *out NULL: no communicator on any rank, why (INBOX_WHY_BYTES) says it. RC_FATAL: the group
 * is broken. max_values: of a sum. */
enum rc nccl_open(struct segment *s, int rank, int ranks, size_t max_values, struct comm_nccl **out, char *why,
                  struct err *e);
void nccl_sum(const struct op_context *c, struct comm_nccl *n, const struct sum_job *j);
/* Ends what waits for a peer; nothing is enqueued afterwards. */
void nccl_abort(struct comm_nccl *n);
void nccl_close(struct comm_nccl *n); /* NULL is fine */

#endif
