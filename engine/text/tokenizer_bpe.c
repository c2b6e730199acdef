/* tokenizer_bpe: byte pair merging of one piece, in time that does not depend on what the piece holds.
 *
 * The ids of the piece form a doubly linked list in an array, a node a position. A heap holds one 64-bit key for every
 * pair that could be merged: rank in the upper half, position of its left node in the lower, so that the smallest key
 * is the lowest rank and, among equals, the leftmost pair. A node remembers the rank of the pair it starts; a key whose
 * rank is not that one is out of date (one of its nodes has been merged meanwhile) and is thrown away when it comes up.
 * A merge takes one key out and puts at most two in, so 2n keys are room enough and n ids cost O(n log n).
 *
 * Ranks lie in a hash table with linear probing, keyed by both ids. Built once, never changed after opening; only the
 * scratch arrays are written while encoding. */
#define _GNU_SOURCE
#include "tokenizer_bpe.h"

#include <stdlib.h>

enum { TRIM_NODES = 1 << 16 }; /* scratch above this is given back by bpe_trim */

static const uint32_t NO_RANK = UINT32_MAX;
static const uint64_t EMPTY = UINT64_MAX; /* no key: ids are below 2^31 */

struct merge {
    uint64_t key; /* left id << 32 | right id */
    uint32_t rank;
    int32_t result;
};

struct node {
    int32_t id, prev, next; /* prev, next: -1 at the ends */
    uint32_t rank;          /* of the pair (this, next); NO_RANK when there is none or this node is gone */
};

struct bpe {
    struct merge *slots;
    size_t mask;
    uint32_t n_merges;
    struct node *nodes;
    uint64_t *heap;
    size_t heap_len;
    size_t cap; /* of nodes; heap has twice as many */
};

struct bpe *bpe_open(size_t n_merges)
{
    size_t n_slots = 16;
    while (n_slots < n_merges + n_merges / 2)
        if (!size_mul(n_slots, 2, &n_slots)) return NULL;
    struct bpe *b = calloc(1, sizeof *b);
    if (!b) return NULL;
    b->slots = reallocarray(NULL, n_slots, sizeof *b->slots);
    if (!b->slots) {
        free(b);
        return NULL;
    }
    for (size_t i = 0; i < n_slots; i++) b->slots[i].key = EMPTY;
    b->mask = n_slots - 1;
    return b;
}

void bpe_close(struct bpe *b)
{
    if (!b) return;
    free(b->heap);
    free(b->nodes);
    free(b->slots);
    free(b);
}

/* The slot that holds the pair, or the empty one where it would go. */
static struct merge *find_slot(const struct bpe *b, int32_t left, int32_t right)
{
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint64_t h = key * UINT64_C(0x9e3779b97f4a7c15);
    h = (h ^ h >> 32) * UINT64_C(0xd6e8feb86659fd93);
    size_t i = (size_t)(h ^ h >> 32) & b->mask;
    while (b->slots[i].key != key && b->slots[i].key != EMPTY) i = (i + 1) & b->mask;
    return &b->slots[i];
}

bool bpe_add(struct bpe *b, int32_t left, int32_t right, int32_t result)
{
    struct merge *slot = find_slot(b, left, right);
    if (slot->key != EMPTY) return false;
    *slot = (struct merge){(uint64_t)(uint32_t)left << 32 | (uint32_t)right, b->n_merges++, result};
    return true;
}

static void sift_down(uint64_t *heap, size_t len, size_t i)
{
    uint64_t key = heap[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= len) break;
        if (child + 1 < len && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

static void heap_push(struct bpe *b, uint64_t key)
{
    size_t i = b->heap_len++;
    while (i > 0 && b->heap[(i - 1) / 2] > key) {
        b->heap[i] = b->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    b->heap[i] = key;
}

static uint64_t heap_pop(struct bpe *b)
{
    uint64_t key = b->heap[0];
    b->heap[0] = b->heap[--b->heap_len];
    sift_down(b->heap, b->heap_len, 0);
    return key;
}

static bool reserve(struct bpe *b, size_t n)
{
    if (n <= b->cap) return true;
    size_t cap = n < 256 ? 256 : n + n / 2;
    struct node *nodes = reallocarray(b->nodes, cap, sizeof *nodes);
    if (!nodes) return false;
    b->nodes = nodes;
    uint64_t *heap = reallocarray(b->heap, cap, 2 * sizeof *heap);
    if (!heap) return false;
    b->heap = heap;
    b->cap = cap;
    return true;
}

/* Looks up the pair that starts at position i and stores its rank; true if it has one. */
static bool rank_pair(struct bpe *b, int32_t i)
{
    struct node *node = &b->nodes[i];
    node->rank = NO_RANK;
    if (node->next < 0) return false;
    const struct merge *m = find_slot(b, node->id, b->nodes[node->next].id);
    if (m->key == EMPTY) return false;
    node->rank = m->rank;
    return true;
}

static uint64_t heap_key(const struct bpe *b, int32_t i) { return (uint64_t)b->nodes[i].rank << 32 | (uint32_t)i; }

static void link_all(struct bpe *b, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        b->nodes[i] = (struct node){ids[i], (int32_t)i - 1, i + 1 < n ? (int32_t)i + 1 : -1, NO_RANK};
    b->heap_len = 0;
    for (size_t i = 0; i < n; i++)
        if (rank_pair(b, (int32_t)i)) b->heap[b->heap_len++] = heap_key(b, (int32_t)i);
    for (size_t i = b->heap_len / 2; i-- > 0;) sift_down(b->heap, b->heap_len, i);
}

static void merge_at(struct bpe *b, int32_t i)
{
    struct node *left = &b->nodes[i], *right = &b->nodes[left->next];
    left->id = find_slot(b, left->id, right->id)->result;
    left->next = right->next;
    right->rank = NO_RANK;
    if (left->next >= 0) b->nodes[left->next].prev = i;
    if (rank_pair(b, i)) heap_push(b, heap_key(b, i));
    if (left->prev >= 0 && rank_pair(b, left->prev)) heap_push(b, heap_key(b, left->prev));
}

bool bpe_merge(struct bpe *b, const int32_t *ids, size_t n, struct token_list *out)
{
    if (n == 0) return true;
    if (n == 1) return token_list_push(out, ids[0]);
    if (!reserve(b, n)) return false;
    link_all(b, ids, n);
    while (b->heap_len) {
        uint64_t key = heap_pop(b);
        int32_t at = (int32_t)(key & UINT32_MAX);
        if (b->nodes[at].rank == key >> 32) merge_at(b, at);
    }
    for (int32_t i = 0; i >= 0; i = b->nodes[i].next)
        if (!token_list_push(out, b->nodes[i].id)) return false;
    return true;
}

void bpe_trim(struct bpe *b)
{
    if (b->cap <= TRIM_NODES) return;
    free(b->heap);
    free(b->nodes);
    b->heap = NULL;
    b->nodes = NULL;
    b->cap = 0;
}
