/* prefix_tree: what prompts have in common, counted without keeping their tokens.
 *
 * A prompt is remembered as the chained hashes of its whole blocks (prefix_store's own), 8 bytes for 64 tokens; two prompts share
 * a head exactly as far as their chains agree. Sorted, the chains are the tree: a prompt adds to it what it does not share with
 * the one before it. A prompt's last token is always computed, so a block that ends with it is never shared.
 *
 * A million prompts of 1,000 tokens take 140 MB. One thread. */
#ifndef TANDEM_PREFIX_TREE_H
#define TANDEM_PREFIX_TREE_H

#include "base.h"

struct prefix_tree {
    uint64_t *blocks; /* [n_blocks], all chains one after the other */
    size_t n_blocks, cap_blocks;
    struct prefix_tree_prompt *prompts; /* [n_prompts] */
    size_t n_prompts, cap_prompts;
    uint64_t prompt_tokens;
    struct buf keys; /* of the prompt that is added */
};

/* The tree is {0} before. number: what the caller calls the prompt. RC_FATAL: no memory. */
enum rc prefix_tree_add(struct prefix_tree *t, uint32_t number, const int32_t *tokens, size_t n_tokens, struct err *e);
void prefix_tree_free(struct prefix_tree *t);

/* What several prompts begin with, where it branches. */
struct prefix_head {
    uint64_t tokens;       /* from the prompts' beginning, a multiple of 64 */
    size_t prompts;        /* that begin so */
    uint32_t first;        /* the one of them with the lowest number */
    uint64_t saved_tokens; /* by computing once what it has more than the head that it begins with itself; all heads' add up */
};
enum { PREFIX_TREE_HEADS = 5 };
struct prefix_tree_counts {
    uint64_t prompt_tokens; /* of all prompts */
    uint64_t saved_tokens;  /* of them, in heads that an earlier prompt computed: the rest is the tree */
    struct prefix_head heads[PREFIX_TREE_HEADS]; /* those that save most */
    int n_heads;
};
/* Sorts the prompts; more may be added afterwards. RC_FATAL: no memory. */
enum rc prefix_tree_count(struct prefix_tree *t, struct prefix_tree_counts *out, struct err *e);

#endif
