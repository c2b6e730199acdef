/* audit: a sample of a run's answers, to be computed a second time and compared.
 *
 * Lockstep finds ranks that disagree; what all of them get wrong alike (a cache, a checkpoint, a kernel, weights gone bad in
 * memory) only shows when the same job is computed again from nothing. Which jobs are in the sample depends on their keys
 * alone. Of an answer its digests are kept, not its text. */
#ifndef TANDEM_AUDIT_H
#define TANDEM_AUDIT_H

#include "base.h"
#include "rank_wire.h"
#include "state.h"

struct audit_digest {
    uint64_t low, high;
};

struct audit_item {
    size_t entry; /* the job, as its owner counts */
    uint32_t finish;
    size_t n_tokens;
    struct audit_digest text, tokens, trace; /* trace: of nothing where there is none */
};

struct audit {
    struct audit_item *items;
    size_t n, cap;
    size_t computed, different; /* of items; the rest was not computed again */
};

/* Whether the job of this key is in a sample of percent, 0 to 100. A larger sample holds all of a smaller one. */
bool audit_samples(const unsigned char key[STATE_KEY_BYTES], double percent);
/* Remembers an answer. */
enum rc audit_add(struct audit *a, size_t entry, const struct wire_done *done, struct err *e);
/* The lowest entry first. */
void audit_sort(struct audit *a);
/* Compares a second answer with the item's first and counts it; done NULL: the second time the ranks failed on it. NULL: they are
 * the same; else what differs, as "the text". */
const char *audit_compare(struct audit *a, const struct audit_item *item, const struct wire_done *done);
void audit_free(struct audit *a);

#endif
