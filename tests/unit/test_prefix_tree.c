/* prefix_tree: what is counted from hashes is what comparing tokens counts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "prefix_tree.h"

enum { BLOCK = 64, MAX_TOKENS = 700, MAX_PROMPTS = 60 };

struct prompts {
    int32_t tokens[MAX_PROMPTS][MAX_TOKENS];
    size_t len[MAX_PROMPTS];
    size_t n;
};

static size_t blocks_of(const struct prompts *p, size_t i) { return p->len[i] ? (p->len[i] - 1) / BLOCK : 0; }

static size_t shared(const struct prompts *p, size_t i, size_t j)
{
    size_t n = blocks_of(p, i) < blocks_of(p, j) ? blocks_of(p, i) : blocks_of(p, j), b = 0;
    while (b < n && !memcmp(p->tokens[i] + b * BLOCK, p->tokens[j] + b * BLOCK, BLOCK * sizeof(int32_t))) b++;
    return b;
}

/* Prompts one after the other, each against all before it. */
static uint64_t naive_saved(const struct prompts *p)
{
    uint64_t saved = 0;
    for (size_t i = 0; i < p->n; i++) {
        size_t best = 0;
        for (size_t j = 0; j < i; j++)
            if (shared(p, i, j) > best) best = shared(p, i, j);
        saved += best * BLOCK;
    }
    return saved;
}

/* Every head: blocks that several prompts begin with and after which they part, or one of them ends. In h, the best first. */
static size_t naive_heads(const struct prompts *p, struct prefix_head *h)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n; i++) {
        for (size_t blocks = 1; blocks <= blocks_of(p, i); blocks++) {
            size_t prompts = 0, first = i, less = 0;
            bool branches = false;
            for (size_t j = 0; j < p->n; j++) {
                if (j != i && shared(p, i, j) == blocks) branches = true;
                if (j == i && blocks_of(p, i) == blocks) branches = true;
                if (j != i && shared(p, i, j) < blocks) continue;
                prompts++;
                if (j < first) first = j;
            }
            if (prompts < 2 || !branches || first != i) continue;
            /* What it has more than the longest head below it: where another prompt leaves earlier, or ends. */
            for (size_t j = 0; j < p->n; j++)
                if (j != i && shared(p, i, j) < blocks && shared(p, i, j) > less) less = shared(p, i, j);
            h[n++] = (struct prefix_head){blocks * BLOCK, prompts, (uint32_t)first, (blocks - less) * BLOCK * (prompts - 1)};
        }
    }
    return n;
}

static int better(const void *a, const void *b)
{
    const struct prefix_head *x = a, *y = b;
    if (x->saved_tokens != y->saved_tokens) return x->saved_tokens > y->saved_tokens ? -1 : 1;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    return x->tokens > y->tokens ? -1 : 1;
}

static void count(const struct prompts *p, struct prefix_tree_counts *c)
{
    struct prefix_tree t = {0};
    struct err e = {0};
    for (size_t i = 0; i < p->n; i++) assert_int_equal(prefix_tree_add(&t, (uint32_t)i, p->tokens[i], p->len[i], &e), RC_OK);
    assert_int_equal(prefix_tree_count(&t, c, &e), RC_OK);
    prefix_tree_free(&t);
}

static void compare(const struct prompts *p)
{
    static struct prefix_head heads[MAX_PROMPTS * MAX_TOKENS / BLOCK];
    struct prefix_tree_counts c;
    uint64_t tokens = 0;
    for (size_t i = 0; i < p->n; i++) tokens += p->len[i];
    count(p, &c);
    assert_int_equal(c.prompt_tokens, tokens);
    assert_int_equal(c.saved_tokens, naive_saved(p));
    size_t n = naive_heads(p, heads);
    qsort(heads, n, sizeof *heads, better);
    assert_int_equal(c.n_heads, n < PREFIX_TREE_HEADS ? n : PREFIX_TREE_HEADS);
    for (int i = 0; i < c.n_heads; i++) {
        assert_int_equal(c.heads[i].tokens, heads[i].tokens);
        assert_int_equal(c.heads[i].prompts, heads[i].prompts);
        assert_int_equal(c.heads[i].first, heads[i].first);
        assert_int_equal(c.heads[i].saved_tokens, heads[i].saved_tokens);
    }
}

/* Prompts grow out of each other's beginnings, cut anywhere, also at ends of blocks and one token beside them. */
static void test_random_trees(void **state)
{
    (void)state;
    static struct prompts p;
    uint32_t random = 1;
    for (int round = 0; round < 200; round++) {
        p.n = 1 + (size_t)round % MAX_PROMPTS;
        for (size_t i = 0; i < p.n; i++) {
            random = random * 1664525 + 1013904223;
            size_t from = i ? (random >> 8) % i : 0;
            random = random * 1664525 + 1013904223;
            size_t cut = i ? (random >> 8) % (p.len[from] + 1) : 0;
            if ((random >> 28) < 8) cut = cut / BLOCK * BLOCK;
            random = random * 1664525 + 1013904223;
            p.len[i] = cut + (random >> 8) % (MAX_TOKENS - cut + 1);
            if ((random >> 28) < 8 && p.len[i] / BLOCK * BLOCK >= cut) p.len[i] = p.len[i] / BLOCK * BLOCK;
            memcpy(p.tokens[i], p.tokens[from], cut * sizeof(int32_t));
            for (size_t k = cut; k < p.len[i]; k++) {
                random = random * 1664525 + 1013904223;
                p.tokens[i][k] = (int32_t)(random >> 28);
            }
        }
        compare(&p);
    }
}

static void test_borders(void **state)
{
    (void)state;
    static struct prompts p;
    struct prefix_tree_counts c;
    p.n = 0;
    count(&p, &c);
    assert_int_equal(c.prompt_tokens + c.saved_tokens + (uint64_t)c.n_heads, 0);
    /* The same prompt twice: its last token is computed again, and with it the block that it ends. */
    p = (struct prompts){.len = {128, 128}, .n = 2};
    count(&p, &c);
    assert_int_equal(c.saved_tokens, 64);
    p.len[0] = p.len[1] = 129;
    count(&p, &c);
    assert_int_equal(c.saved_tokens, 128);
    assert_int_equal(c.n_heads, 1);
    assert_int_equal(c.heads[0].tokens, 128);
    assert_int_equal(c.heads[0].prompts, 2);
    p.len[0] = p.len[1] = 64;
    count(&p, &c);
    assert_int_equal(c.saved_tokens, 0);
    p.len[0] = 0;
    count(&p, &c);
    assert_int_equal(c.prompt_tokens, 64);
    assert_int_equal(c.n_heads, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_trees),
        cmocka_unit_test(test_borders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
