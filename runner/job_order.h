/* job_order: in which order jobs start. Higher priorities first; within one the input's order, or jobs that begin alike one
 * after the other, so that the head they share is computed once and still at hand.
 *
 * What a prompt begins with is guessed from the job's text, without a tokenizer: hashes of its first 32, 64, 128, ... bytes, where a
 * document counts as its digest. A wrong guess costs time, never an answer. prefix_tree knows it exactly, but only after all
 * prompts are tokenized, which for a million jobs takes minutes in which nothing is computed; heads worth sharing are far longer
 * than where two cuts may leave them apart, and ranks find what is shared by tokens whatever the order. */
#ifndef TANDEM_JOB_ORDER_H
#define TANDEM_JOB_ORDER_H

#include "job_spec.h"

enum { JOB_HEAD_CUTS = 14, JOB_HEAD_FIRST_BYTES = 32 };

struct job_head {
    uint32_t cut[JOB_HEAD_CUTS]; /* hash of the first JOB_HEAD_FIRST_BYTES << i bytes, or of all when there are fewer */
};

/* document_digests: n_document_bytes of the job's documents in order, or NULL where they are not known. */
void job_head_make(const struct job_spec *s, const unsigned char *document_digests, size_t n_document_bytes, struct job_head *out);

/* What is asked of a job, by its index. */
struct job_order {
    int (*priority_of)(const void *ctx, size_t index);
    const struct job_head *(*head_of)(const void *ctx, size_t index); /* NULL: heads are no matter */
    const void *ctx;
};
/* Sorts n indices: by priority; equal heads, and within them equal longer ones, lie together; then in the order of the indices. */
void job_order_sort(const struct job_order *o, size_t *indices, size_t n);

#endif
