/* sampler: logits to one token, by counter-based random numbers.
 *
 * Order: repetition, presence and frequency penalties; temperature 0 takes the largest logit (ties: lowest id);
 * otherwise temperature, min_p, top_k, top_p, and one draw whose random number is a hash of (seed, position). Nothing
 * else decides, so a row gives the same token whatever runs beside it. */
#ifndef TANDEM_SAMPLER_H
#define TANDEM_SAMPLER_H

#include "base.h"

struct sampling {
    float temperature;        /* 0: greedy */
    float top_p;              /* (0, 1]; 1: off */
    float min_p;              /* [0, 1]; 0: off */
    int32_t top_k;            /* 0: off */
    float presence_penalty;   /* [-2, 2], generated tokens */
    float frequency_penalty;  /* [-2, 2], generated tokens */
    float repetition_penalty; /* > 0, prompt and generated tokens; 1: off */
    uint64_t seed;
};
struct sampling sampling_default(void); /* temperature 1, everything else off, as in the OpenAI API */

/* Tokens seen so far by one sequence. Open-addressed; zero-initialize, token_counts_free. */
struct token_counts {
    struct token_count *slots;
    size_t cap, len;
};
struct token_count {
    int32_t id; /* -1 empty */
    uint32_t prompt, generated;
};
bool token_counts_add(struct token_counts *c, int32_t id, bool generated);
void token_counts_free(struct token_counts *c);
bool sampling_needs_counts(const struct sampling *p);

/* scratch: sampler_scratch_bytes(vocab), aligned to 8 bytes; vocab >= vocab_used >= 1. logits is overwritten. position:
 * absolute position the token will have. Ids >= vocab_used are never chosen. RC_FAILED (code "non_finite_logits") when
 * a logit is NaN or infinite. */
size_t sampler_scratch_bytes(int vocab);
enum rc sampler_pick(const struct sampling *p, const struct token_counts *counts, int vocab_used, int64_t position,
                     float *logits, void *scratch, int32_t *out, struct err *e);

#endif
