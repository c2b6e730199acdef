/* partition: ranges tile what they divide, heads stay together, cuts fall where blocks allow, loads come out even. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "partition.h"

static const struct model_config smollm2 = {
    .n_layers = 30, .hidden = 576, .ffn = 1536, .n_heads = 9, .n_kv_heads = 3, .head_dim = 64, .vocab = 49152};

/* Adjacent, in order, all of 0..total, every inner cut at a multiple of step. */
static void assert_tiles(const struct range *ranges[MAX_RANKS], int ranks, int total, int step)
{
    int at = 0;
    for (int r = 0; r < ranks; r++) {
        assert_int_equal(ranges[r]->first, at);
        assert_true(ranges[r]->count >= 0);
        assert_true(at % step == 0 || at == total);
        at += ranges[r]->count;
    }
    assert_int_equal(at, total);
}

static void assert_whole(const struct model_config *c, const struct partition *p, int ffn_step)
{
    const struct range *q[MAX_RANKS], *kv[MAX_RANKS], *ffn[MAX_RANKS], *vocab[MAX_RANKS], *joined[MAX_RANKS];
    int each = c->n_heads / c->n_kv_heads;
    for (int r = 0; r < p->ranks; r++) {
        q[r] = &p->part[r].q_heads;
        kv[r] = &p->part[r].kv_heads;
        ffn[r] = &p->part[r].ffn;
        vocab[r] = &p->part[r].vocab;
        joined[r] = &p->part[r].mtp_rows;
        assert_int_equal(q[r]->first, kv[r]->first * each);
        assert_int_equal(q[r]->count, kv[r]->count * each);
        assert_true(ffn[r]->count > 0);
        assert_true(vocab[r]->count > 0);
        /* As even as it goes, the first ranks taking more. */
        assert_true(kv[r]->count == c->n_kv_heads / p->ranks || kv[r]->count == c->n_kv_heads / p->ranks + 1);
        if (r) assert_true(kv[r]->count <= kv[r - 1]->count);
        if (r) assert_true(vocab[r]->count <= vocab[r - 1]->count);
    }
    assert_true(vocab[0]->count - vocab[p->ranks - 1]->count <= 31);
    assert_tiles(q, p->ranks, c->n_heads, each);
    assert_tiles(kv, p->ranks, c->n_kv_heads, 1);
    assert_tiles(ffn, p->ranks, c->ffn, ffn_step);
    assert_tiles(vocab, p->ranks, c->vocab, 16);
    assert_tiles(joined, p->ranks, c->mtp ? c->hidden : 0, 16);
}

/* Value heads go with their key heads, dealt as evenly as it goes; without GDN nobody has any. */
static void assert_gdn_whole(const struct model_config *c, const struct partition *p)
{
    const struct range *k[MAX_RANKS], *v[MAX_RANKS];
    int each = c->gdn_v_heads ? c->gdn_v_heads / c->gdn_k_heads : 0;
    for (int r = 0; r < p->ranks; r++) {
        k[r] = &p->part[r].gdn_k_heads;
        v[r] = &p->part[r].gdn_v_heads;
        assert_int_equal(v[r]->first, k[r]->first * each);
        assert_int_equal(v[r]->count, k[r]->count * each);
        if (r) assert_in_range(k[r - 1]->count - k[r]->count, 0, 1);
        if (r) assert_in_range(k[0]->count - k[r]->count, 0, 1);
    }
    assert_tiles(k, p->ranks, c->gdn_k_heads, 1);
    assert_tiles(v, p->ranks, c->gdn_v_heads, each ? each : 1);
}

static void tiles_for_all_ranks_and_widths(void **state)
{
    (void)state;
    static const int kv_heads[] = {1, 2, 3, 4, 5, 8, 32}, each[] = {1, 3, 8};
    static const int ffns[] = {128, 1536, 1504, 4864, 8960, 11008, 1000}, steps[] = {1, 32, 256};
    static const int vocabs[] = {64, 160, 1003, 49152, 151936, 248320};
    int made = 0;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (size_t i = 0; i < 7 * 3 * 7 * 3 * 6; i++) {
            struct model_config c = {.hidden = 896, .head_dim = 64};
            c.n_kv_heads = kv_heads[i % 7];
            c.n_heads = c.n_kv_heads * each[i / 7 % 3];
            c.ffn = ffns[i / 21 % 7];
            c.vocab = vocabs[i / 147 % 6];
            c.mtp = i % 2;
            int step = steps[i / 882];
            struct partition p;
            if ((c.ffn + step - 1) / step < ranks) continue;
            assert_int_equal(partition_make(&c, ranks, step, &p, NULL), RC_OK);
            assert_int_equal(p.ranks, ranks);
            assert_whole(&c, &p, step);
            assert_gdn_whole(&c, &p);
            made++;
        }
    assert_true(made > 9000);
}

static void deals_gdn_heads(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int k_heads = 1; k_heads <= 17; k_heads++)
            for (int each = 1; each <= 4; each++) {
                struct model_config c = smollm2;
                struct partition p;
                c.gdn_k_heads = k_heads;
                c.gdn_v_heads = k_heads * each;
                assert_int_equal(partition_make(&c, ranks, 32, &p, NULL), RC_OK);
                assert_whole(&c, &p, 32);
                assert_gdn_whole(&c, &p);
            }
}

/* Qwen3.8-27B on two ranks: halves of everything. On three: 2/1/1 KV heads, 6/5/5 key heads. */
static void divides_the_27b_as_designed(void **state)
{
    (void)state;
    const struct model_config c = {.hidden = 5120, .ffn = 17408, .n_heads = 24, .n_kv_heads = 4, .head_dim = 256, .vocab = 248320,
                                   .gdn_k_heads = 16, .gdn_v_heads = 48, .mtp = true};
    struct partition p;
    assert_int_equal(partition_make(&c, 2, PARTITION_FFN_STEP, &p, NULL), RC_OK);
    for (int r = 0; r < 2; r++) {
        struct rank_part half = {{12 * r, 12}, {2 * r, 2}, {8 * r, 8}, {24 * r, 24}, {8704 * r, 8704}, {124160 * r, 124160}, {2560 * r, 2560}};
        assert_memory_equal(&p.part[r], &half, sizeof half);
    }
    assert_int_equal(partition_make(&c, 3, PARTITION_FFN_STEP, &p, NULL), RC_OK);
    assert_int_equal(p.part[0].q_heads.count, 12);
    assert_int_equal(p.part[2].gdn_k_heads.first, 11);
    assert_int_equal(p.part[2].gdn_v_heads.first, 33);
    assert_int_equal(p.part[2].gdn_v_heads.count, 15);
}

/* Every half of a layer waits for its slowest rank: no rank has more than one piece beyond another's. */
static void deals_evenly(void **state)
{
    (void)state;
    struct model_config c = smollm2;
    for (int ranks = 2; ranks <= MAX_RANKS; ranks++)
        for (c.ffn = 128; c.ffn <= 4096; c.ffn += 32) {
            struct partition p;
            assert_int_equal(partition_make(&c, ranks, 32, &p, NULL), RC_OK);
            for (int r = 1; r < ranks; r++) {
                assert_in_range(p.part[r].ffn.count - p.part[r - 1].ffn.count, 0, 32);
                assert_in_range(p.part[r - 1].kv_heads.count - p.part[r].kv_heads.count, 0, 1);
            }
        }
}

static void divides_smollm2_as_designed(void **state)
{
    (void)state;
    struct partition p;
    assert_int_equal(partition_make(&smollm2, 1, 32, &p, NULL), RC_OK);
    assert_memory_equal(&p.part[0], &((struct rank_part){{0, 9}, {0, 3}, {0, 0}, {0, 0}, {0, 1536}, {0, 49152}, {0, 0}}), sizeof p.part[0]);
    assert_int_equal(partition_make(&smollm2, 2, 32, &p, NULL), RC_OK);
    assert_memory_equal(&p.part[0], &((struct rank_part){{0, 6}, {0, 2}, {0, 0}, {0, 0}, {0, 768}, {0, 24576}, {0, 0}}), sizeof p.part[0]);
    assert_memory_equal(&p.part[1], &((struct rank_part){{6, 3}, {2, 1}, {0, 0}, {0, 0}, {768, 768}, {24576, 24576}, {0, 0}}),
                        sizeof p.part[1]);
    assert_int_equal(partition_make(&smollm2, 3, 32, &p, NULL), RC_OK);
    for (int r = 0; r < 3; r++) {
        struct rank_part third = {{3 * r, 3}, {r, 1}, {0, 0}, {0, 0}, {512 * r, 512}, {16384 * r, 16384}, {0, 0}};
        assert_memory_equal(&p.part[r], &third, sizeof third);
    }
    assert_int_equal(partition_make(&smollm2, 4, 32, &p, NULL), RC_OK);
    assert_memory_equal(&p.part[3].kv_heads, &((struct range){3, 0}), sizeof(struct range));
    assert_memory_equal(&p.part[3].q_heads, &((struct range){9, 0}), sizeof(struct range));
    assert_int_equal(p.part[3].vocab.count, 12288);
    for (int r = 0; r < 4; r++) assert_int_equal(p.part[r].ffn.count, 384);
}

static void cuts_k_quants_at_whole_blocks(void **state)
{
    (void)state;
    struct model_config qwen = {
        .hidden = 896, .ffn = 4864, .n_heads = 14, .n_kv_heads = 2, .head_dim = 64, .vocab = 151936};
    struct partition p;
    assert_int_equal(partition_make(&qwen, 2, 256, &p, NULL), RC_OK);
    assert_int_equal(p.part[0].ffn.count % 256, 0);
    assert_int_equal(p.part[0].ffn.count, 2304); /* 19 steps: the last rank takes the odd one */
    assert_int_equal(p.part[1].ffn.count, 2560);
}

/* A width that is no multiple of the step: the short piece is the last rank's. */
static void leaves_the_rest_to_the_last(void **state)
{
    (void)state;
    struct model_config c = smollm2;
    struct partition p;
    c.ffn = 1000;
    c.vocab = 1003;
    assert_int_equal(partition_make(&c, 3, 256, &p, NULL), RC_OK);
    assert_int_equal(p.part[2].ffn.first % 256, 0);
    assert_int_equal(p.part[2].ffn.first + p.part[2].ffn.count, 1000);
    assert_int_equal(p.part[0].vocab.count, 336);
    assert_int_equal(p.part[1].vocab.count, 336);
    assert_int_equal(p.part[2].vocab.count, 331);
}

static void refuses(const struct model_config *c, int ranks, int step, const char *code)
{
    struct partition p, before;
    struct err e = {0};
    memset(&p, 7, sizeof p);
    memcpy(&before, &p, sizeof p);
    assert_int_equal(partition_make(c, ranks, step, &p, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_CONFIG);
    assert_string_equal(e.code, code);
    assert_memory_equal(&p, &before, sizeof p);
    assert_int_equal(partition_make(c, ranks, step, &p, NULL), RC_BAD_INPUT);
}

static void refuses_what_cannot_be_shared(void **state)
{
    (void)state;
    struct model_config c = smollm2;
    refuses(&c, 0, 32, "bad_ranks");
    refuses(&c, -1, 32, "bad_ranks");
    refuses(&c, MAX_RANKS + 1, 32, "bad_ranks");
    refuses(&c, 2, 0, "bad_ffn_step");
    refuses(&c, 2, 1536, "too_many_ranks");
    refuses(&c, 4, 768, "too_many_ranks");
    c.vocab = 32;
    refuses(&c, 3, 32, "too_many_ranks");
    struct partition p;
    assert_int_equal(partition_make(&c, 2, 768, &p, NULL), RC_OK);
    assert_whole(&c, &p, 768);
}

static void digest_tells_partitions_apart(void **state)
{
    (void)state;
    struct partition p, q;
    struct model_config c = smollm2;
    c.gdn_k_heads = 4;
    c.gdn_v_heads = 12;
    assert_int_equal(partition_make(&c, 3, 32, &p, NULL), RC_OK);
    assert_int_equal(partition_make(&c, 3, 32, &q, NULL), RC_OK);
    uint64_t digest = partition_digest(&p);
    assert_true(partition_digest(&q) == digest);
    uint64_t seen[1 + 3 * 12 + 1] = {digest};
    int n = 1;
    for (int r = 0; r < 3; r++)
        for (int i = 0; i < 12; i++) {
            q = p;
            struct rank_part *part = &q.part[r];
            struct range *ranges[] = {&part->q_heads,     &part->kv_heads, &part->gdn_k_heads,
                                      &part->gdn_v_heads, &part->ffn,      &part->vocab};
            if (i % 2)
                ranges[i / 2]->count++;
            else
                ranges[i / 2]->first++;
            seen[n++] = partition_digest(&q);
        }
    q = p;
    q.ranks = 2;
    seen[n++] = partition_digest(&q);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < i; k++) assert_true(seen[i] != seen[k]);
    q = p; /* what is beyond the ranks does not count */
    q.part[3].ffn.count = 5;
    assert_true(partition_digest(&q) == digest);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tiles_for_all_ranks_and_widths), cmocka_unit_test(deals_evenly),
        cmocka_unit_test(divides_smollm2_as_designed),    cmocka_unit_test(cuts_k_quants_at_whole_blocks),
        cmocka_unit_test(leaves_the_rest_to_the_last),    cmocka_unit_test(refuses_what_cannot_be_shared),
        cmocka_unit_test(digest_tells_partitions_apart),  cmocka_unit_test(deals_gdn_heads),
        cmocka_unit_test(divides_the_27b_as_designed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
