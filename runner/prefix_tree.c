/* prefix_tree: chains in one array, a sort, and one walk over neighbours.
 *
 * A head is a run of prompts, neighbours after sorting, that agree in a number of blocks and in no more. The walk keeps a stack of
 * the heads that the present prompt may still belong to, each longer than the one below it; a head is complete when the next
 * prompt shares less. Chains are compared from the front, where chained hashes differ as soon as tokens do, and for good. */
#define _GNU_SOURCE
#include "prefix_tree.h"

#include <stdlib.h>
#include <string.h>

#include "prefix_store.h"

struct prefix_tree_prompt {
    size_t at; /* of its first block */
    uint32_t n_blocks, number;
};

/* ---- adding ---- */

/* Room for one more than there are by half: growing a large array moves pages, not bytes. */
static void *grow(void *items, size_t item_bytes, size_t wanted, size_t *cap)
{
    size_t bigger = *cap + *cap / 2 + 1024, bytes;
    if (bigger < wanted) bigger = wanted;
    void *moved = size_mul(bigger, item_bytes, &bytes) ? realloc(items, bytes) : NULL;
    if (moved) *cap = bigger;
    return moved;
}

static bool make_room(struct prefix_tree *t, size_t n_blocks)
{
    if (t->n_blocks + n_blocks > t->cap_blocks) {
        uint64_t *moved = grow(t->blocks, sizeof *moved, t->n_blocks + n_blocks, &t->cap_blocks);
        if (!moved) return false;
        t->blocks = moved;
    }
    if (t->n_prompts == t->cap_prompts) {
        struct prefix_tree_prompt *moved = grow(t->prompts, sizeof *moved, t->n_prompts + 1, &t->cap_prompts);
        if (!moved) return false;
        t->prompts = moved;
    }
    return true;
}

enum rc prefix_tree_add(struct prefix_tree *t, uint32_t number, const int32_t *tokens, size_t n_tokens, struct err *e)
{
    static const struct prefix_key any = {{0}};
    size_t n_blocks = n_tokens ? (n_tokens - 1) / PREFIX_BLOCK_TOKENS : 0;
    buf_clear(&t->keys);
    if (n_tokens > INT32_MAX || !make_room(t, n_blocks) || !buf_reserve(&t->keys, (n_blocks + 1) * sizeof any)) return err_no_memory(e);
    struct prefix_key *keys = (struct prefix_key *)(void *)t->keys.data;
    prefix_chain(&any, tokens, (int)(n_blocks * PREFIX_BLOCK_TOKENS), keys);
    for (size_t b = 0; b < n_blocks; b++) memcpy(&t->blocks[t->n_blocks + b], &keys[b], sizeof *t->blocks);
    t->prompts[t->n_prompts] = (struct prefix_tree_prompt){t->n_blocks, (uint32_t)n_blocks, number};
    t->n_prompts++;
    t->n_blocks += n_blocks;
    t->prompt_tokens += n_tokens;
    return RC_OK;
}

void prefix_tree_free(struct prefix_tree *t)
{
    free(t->blocks);
    free(t->prompts);
    buf_free(&t->keys);
    *t = (struct prefix_tree){0};
}

/* ---- counting ---- */

static uint32_t shared_blocks(const struct prefix_tree *t, const struct prefix_tree_prompt *a, const struct prefix_tree_prompt *b)
{
    uint32_t n = a->n_blocks < b->n_blocks ? a->n_blocks : b->n_blocks, i = 0;
    while (i < n && t->blocks[a->at + i] == t->blocks[b->at + i]) i++;
    return i;
}

static int by_chain(const void *a, const void *b, void *tree)
{
    const struct prefix_tree *t = tree;
    const struct prefix_tree_prompt *x = a, *y = b;
    uint32_t i = shared_blocks(t, x, y);
    if (i < x->n_blocks && i < y->n_blocks) return t->blocks[x->at + i] < t->blocks[y->at + i] ? -1 : 1;
    if (x->n_blocks != y->n_blocks) return x->n_blocks < y->n_blocks ? -1 : 1;
    return x->number < y->number ? -1 : x->number > y->number;
}

static bool saves_more(const struct prefix_head *a, const struct prefix_head *b)
{
    if (a->saved_tokens != b->saved_tokens) return a->saved_tokens > b->saved_tokens;
    return a->first != b->first ? a->first < b->first : a->tokens > b->tokens;
}

static void keep_head(struct prefix_tree_counts *out, const struct prefix_head *h)
{
    int at = out->n_heads;
    while (at > 0 && saves_more(h, &out->heads[at - 1])) at--;
    if (at == PREFIX_TREE_HEADS) return;
    if (out->n_heads < PREFIX_TREE_HEADS) out->n_heads++;
    memmove(out->heads + at + 1, out->heads + at, (size_t)(out->n_heads - at - 1) * sizeof *out->heads);
    out->heads[at] = *h;
}

/* A head that may still grow by the next prompts. */
struct open_head {
    uint32_t n_blocks;
    size_t prompts;
    uint32_t first;
};

static void open_head_join(struct open_head *h, const struct open_head *more)
{
    h->prompts += more->prompts;
    if (more->first < h->first) h->first = more->first;
}

/* The next prompt shares n_blocks with this one: longer heads are complete, and one of that length is open now. */
static void walk(struct open_head *stack, size_t *depth, struct open_head last, uint32_t n_blocks, struct prefix_tree_counts *out)
{
    while (*depth && stack[*depth - 1].n_blocks > n_blocks) {
        struct open_head *top = &stack[--*depth];
        open_head_join(top, &last);
        uint32_t below = *depth && stack[*depth - 1].n_blocks > n_blocks ? stack[*depth - 1].n_blocks : n_blocks;
        uint64_t more = (uint64_t)(top->n_blocks - below) * PREFIX_BLOCK_TOKENS;
        struct prefix_head h = {(uint64_t)top->n_blocks * PREFIX_BLOCK_TOKENS, top->prompts, top->first, more * (top->prompts - 1)};
        out->saved_tokens += h.saved_tokens;
        keep_head(out, &h);
        last = *top;
    }
    if (!n_blocks) return;
    if (*depth && stack[*depth - 1].n_blocks == n_blocks) {
        open_head_join(&stack[*depth - 1], &last);
    } else {
        last.n_blocks = n_blocks;
        stack[(*depth)++] = last;
    }
}

enum rc prefix_tree_count(struct prefix_tree *t, struct prefix_tree_counts *out, struct err *e)
{
    uint32_t longest = 0;
    size_t depth = 0;
    *out = (struct prefix_tree_counts){.prompt_tokens = t->prompt_tokens};
    for (size_t i = 0; i < t->n_prompts; i++)
        if (t->prompts[i].n_blocks > longest) longest = t->prompts[i].n_blocks;
    struct open_head *stack = calloc((size_t)longest + 1, sizeof *stack);
    if (!stack) return err_no_memory(e);
    if (t->n_prompts) qsort_r(t->prompts, t->n_prompts, sizeof *t->prompts, by_chain, t);
    for (size_t i = 0; i < t->n_prompts; i++) {
        bool more = i + 1 < t->n_prompts;
        struct open_head last = {.prompts = 1, .first = t->prompts[i].number};
        walk(stack, &depth, last, more ? shared_blocks(t, &t->prompts[i], &t->prompts[i + 1]) : 0, out);
    }
    free(stack);
    return RC_OK;
}
