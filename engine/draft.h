/* draft: guesses at a sequence's next tokens, and how many of them are worth verifying. Pure.
 *
 * A draft never changes an answer: the target model samples every position itself and a draft that differs is dropped. So
 * everything here is about speed, but n-gram drafts must be the same on every rank, because each rank makes its own. */
#ifndef TANDEM_DRAFT_H
#define TANDEM_DRAFT_H

#include "base.h"
#include "kern.h"

enum draft_source { DRAFT_NONE, DRAFT_NGRAM, DRAFT_MTP, DRAFT_SOURCES };

/* ---- n-gram drafts: what followed the last time ---- */

/* Where in one sequence's tokens every pair of neighbours occurred. Two integers a token of capacity. */
struct draft_index {
    int32_t *newest;   /* [1 << bits]: newest position that follows a pair with this hash; 0: none */
    int32_t *previous; /* [capacity]: the position before it with the same hash */
    int bits, capacity;
    int indexed;       /* positions below are in it */
};
/* For at most `capacity` tokens. False: out of memory. */
bool draft_index_open(int capacity, struct draft_index *out);
void draft_index_free(struct draft_index *x); /* all zeros is fine */

/* Guesses the tokens after tokens[0..n): of the newest places where the last tokens occurred before, the one with the longest
 * common past, newest first among equals; its continuation, which may run into the guesses themselves. out[most]. Returns how
 * many were guessed, 0 or `most`; *matched: tokens of common past. Later calls must pass the same tokens, extended. */
int draft_index_propose(struct draft_index *x, const int32_t *tokens, int n, int most, int32_t *out, int *matched);

/* ---- how many ---- */

/* Kinds of drafts that are right at different rates. */
enum draft_kind { DRAFT_KIND_SHORT, DRAFT_KIND_LONG, DRAFT_KIND_MTP, DRAFT_KINDS }; /* n-gram: short or long common past */
enum draft_kind draft_kind_of(enum draft_source source, int matched);

/* How often the j-th draft of a round was right where all before it were: counts that fade. Zero-initialize. */
struct draft_rates {
    float tried[DRAFT_KINDS][KERN_MAX_DRAFTS], right[DRAFT_KINDS][KERN_MAX_DRAFTS];
};
void draft_rates_note(struct draft_rates *r, enum draft_kind k, int drafts, int accepted);

/* What a step costs, in units of one reading of the weights. */
struct draft_cost {
    double row;      /* computing one decode row */
    double mtp_pass; /* reading the MTP layer and the head */
};
/* Drafts, 0 .. most, that give this sequence the most tokens for the time, judged by its own rates and, while those are few,
 * by the rates of all sequences. decoding: sequences that decode in the step. *speed: tokens for the time, compared with no
 * drafts. */
int draft_count(const struct draft_rates *own, const struct draft_rates *all, enum draft_kind k, int most, int decoding,
                const struct draft_cost *cost, double *speed);

#endif
