/* comm_mailbox: sums and gathers through memory that ranks write into each other's: the kernels of comm_cuda. Private
 * to comm_*.
 *
 * Every rank has an inbox of one area per other rank; the areas lie in device memory or in pinned host memory, the
 * kernels do not care. An area holds, at the offsets of mail_layout:
 *   words         [MAIL_BLOCKS][2] slots of 4 KiB: small sums. A word is 8 bytes, two bfloat16 and the 32-bit step,
 *                 stored at once, so that data needs no flag. A block of 128 threads sends and awaits one slot of
 *                 1024 values.
 *   bulk          two pieces of bfloat16 and a flag per block: large sums, piece by piece; values 2048 j .. are block
 *                 j mod bulk_blocks'
 *   gather        two parts of float32 and a flag per block
 *
 * Steps count the uses of a slot. They lie in device memory and are raised by the kernels, so that a captured graph
 * can be replayed. A block has its own steps, since grids differ; gathers are counted as a whole, since a part of one is any block's. A step is 32 bits and comes round after 4e9 uses of a slot, which leave no word of an earlier
 * round in it. Two slots by parity suffice: a rank sends step s + 2 after it received s + 1, which its peer sends
 * after it has read s: kernels of one rank follow each other. */
#ifndef TANDEM_COMM_MAILBOX_CUH
#define TANDEM_COMM_MAILBOX_CUH

#include "device.cuh"

extern "C" {
#include "partition.h"
}

enum {
    MAIL_THREADS = 128,
    MAIL_EACH = 8, /* values of a thread */
    MAIL_VALUES = MAIL_THREADS * MAIL_EACH,
    MAIL_BLOCKS = 512,
    MAIL_SLOT_BYTES = MAIL_VALUES * 4,
    BULK_THREADS = 256,
    BULK_BLOCKS = 1024,
    BULK_VALUES = BULK_THREADS * MAIL_EACH,
    FLAG_BYTES = 128
};

struct mail_layout {
    size_t bulk_flags, bulk, gather_flags, gather; /* offsets in an area; words are at 0 */
    size_t piece_values, piece_bytes;              /* of one parity */
    size_t gather_bytes;                           /* of one parity */
    size_t area_bytes;
};

/* Device memory of one rank and path, zero at first, written by its kernels alone. */
struct mail_state {
    uint32_t dead; /* a wait was given up: nothing works any more */
    uint32_t gathers, gather_blocks; /* done; blocks of the present one that are done with it */
    uint32_t reserved[29];
    uint32_t step[MAIL_BLOCKS], bulk_step[BULK_BLOCKS];
};

/* Pinned host memory of one rank. */
struct mail_notice {
    volatile uint32_t abort; /* written by the host: stop waiting */
    uint32_t reserved_0[31];
    volatile uint32_t lost; /* written by the device: 0, 1 + the rank that was awaited too long, or MAIL_ABORTED */
    uint32_t reserved_1[31];
};
enum { MAIL_ABORTED = 100 };

/* A rank's view of one path, a kernel's argument. */
struct mail {
    int rank, ranks;
    char *in[MAX_RANKS];  /* area of this rank's inbox that rank r writes to */
    char *out[MAX_RANKS]; /* area of rank r's inbox that this rank writes to */
    struct mail_layout at;
    struct mail_state *state;
    struct mail_notice *notice; /* as the device sees it */
    uint64_t bound_ns;
    int word_blocks; /* largest grids: of a small sum, of other kernels that wait */
    int bulk_blocks;
};

/* A sum's operands. */
struct sum_job {
    const float *partial; /* NULL: zeros */
    struct kern_split rows;
    int width;
    float *residual;
};
static inline size_t sum_values(const struct sum_job *j) { return (size_t)kern_rows(j->rows) * (size_t)j->width; }
/* Whether a sum of so many values goes by words. */
static inline bool mail_fits_words(const struct mail *m, size_t values)
{
    return values <= (size_t)m->word_blocks * MAIL_VALUES;
}

struct mail_layout mail_layout_make(size_t max_values, size_t most_piece_values, size_t gather_floats);
/* Loads all kernels of the module: loading one later could wait for a kernel that waits for a peer. */
enum rc mail_preload(struct err *e);
/* Blocks of a small sum that this card surely keeps resident together, at most MAIL_BLOCKS: each waits for its like
 * on the peers. */
int mail_word_blocks(const struct op_context *c);

/* residual += bfloat16(partial): one rank. */
void sum_alone(const struct op_context *c, const struct sum_job *j);
/* A sum that fits words. */
void mail_sum(const struct op_context *c, const struct mail *m, const struct sum_job *j);
/* A sum of any size. */
void mail_sum_bulk(const struct op_context *c, const struct mail *m, const struct sum_job *j);

struct sum_norm {
    const float *w;
    float eps;
    float *y; /* may be NULL */
    void *act;
};
/* On cards from sm_90 on. */
bool mail_sum_norm_takes(const struct mail *m, const struct sum_job *j);
void mail_sum_norm(const struct op_context *c, const struct mail *m, const struct sum_job *j, const struct sum_norm *n);

/* Each rank's part has at most gather_floats. */
void mail_gather(const struct op_context *c, const struct mail *m, const float *mine, int rows, const struct range *range_of_rank, int row_width, float *out);

/* The halves of a sum around a library's all-gather: this rank's values in bfloat16; residual += the ranks' values,
 * stride values apart. */
void sum_round(const struct op_context *c, const struct sum_job *j, void *to_bf16);
void sum_add_rounded(const struct op_context *c, const struct sum_job *j, const void *all_bf16, size_t stride,
                     int ranks);

#endif
