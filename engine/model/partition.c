/* partition: cuts heads, FFN columns and vocabulary rows into one range a rank.
 *
 * KV heads are dealt as evenly as they go, the first ranks taking one more, and take their query heads along; so are the key
 * heads of Gated DeltaNet with their value heads. A rank may get none of either. FFN columns come in steps, the smallest cut
 * that a stored block allows, dealt evenly, the last ranks taking one more: those with fewer heads. Vocabulary rows come in
 * blocks of 16, dealt evenly, and so do the rows of the MTP layer's joining matrix. Where a width is no multiple of
 * its step the short last piece is the last rank's.
 *
 * A rank with fewer heads does not get more FFN for it. Every layer ends its attention and its MLP with a sum that all
 * ranks wait for, so what counts is the slowest rank of each half, never a rank's total. */
#include "partition.h"

enum { ROW_BLOCK = 16 };

/* Share of rank r when n pieces are dealt evenly, the first ranks taking one more. */
static struct range deal(int n, int ranks, int r)
{
    int each = n / ranks, extra = n % ranks;
    return (struct range){r * each + (r < extra ? r : extra), each + (r < extra)};
}

/* The same, the last ranks taking one more. */
static struct range deal_last(int n, int ranks, int r)
{
    struct range mirrored = deal(n, ranks, ranks - 1 - r);
    return (struct range){n - mirrored.first - mirrored.count, mirrored.count};
}

/* Pieces of `step` to the range that they cover of 0..total. */
static struct range scale_range(struct range pieces, int step, int total)
{
    int64_t first = (int64_t)pieces.first * step, end = first + (int64_t)pieces.count * step;
    if (end > total) end = total;
    return (struct range){(int)first, (int)(end - first)};
}

enum rc partition_make(const struct model_config *c, int ranks, int ffn_step, struct partition *out, struct err *e)
{
    if (ranks < 1 || ranks > MAX_RANKS)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_ranks", "%d ranks: from 1 to %d are possible", ranks,
                       MAX_RANKS);
    if (ffn_step < 1)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_ffn_step", "the FFN cannot be cut at multiples of %d",
                       ffn_step);
    int ffn_steps = c->ffn / ffn_step + (c->ffn % ffn_step != 0);
    int vocab_blocks = c->vocab / ROW_BLOCK + (c->vocab % ROW_BLOCK != 0);
    int hidden_blocks = c->hidden / ROW_BLOCK + (c->hidden % ROW_BLOCK != 0);
    if (ffn_steps < ranks)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "too_many_ranks",
                       "an FFN of %d columns, cut at multiples of %d, cannot be shared by %d ranks", c->ffn, ffn_step,
                       ranks);
    if (vocab_blocks < ranks)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "too_many_ranks",
                       "a vocabulary of %d rows, cut at multiples of %d, cannot be shared by %d ranks", c->vocab,
                       ROW_BLOCK, ranks);
    struct partition p = {.ranks = ranks};
    for (int r = 0; r < ranks; r++) {
        struct rank_part *part = &p.part[r];
        part->kv_heads = deal(c->n_kv_heads, ranks, r);
        part->q_heads = scale_range(part->kv_heads, c->n_heads / c->n_kv_heads, c->n_heads);
        if (c->gdn_v_heads) {
            part->gdn_k_heads = deal(c->gdn_k_heads, ranks, r);
            part->gdn_v_heads = scale_range(part->gdn_k_heads, c->gdn_v_heads / c->gdn_k_heads, c->gdn_v_heads);
        }
        part->vocab = scale_range(deal(vocab_blocks, ranks, r), ROW_BLOCK, c->vocab);
        if (c->mtp) part->mtp_rows = scale_range(deal(hidden_blocks, ranks, r), ROW_BLOCK, c->hidden);
        part->ffn = scale_range(deal_last(ffn_steps, ranks, r), ffn_step, c->ffn);
    }
    *out = p;
    return RC_OK;
}

/* One step of a 64-bit hash: multiply and fold, so that each input bit reaches all output bits within a few values. */
static uint64_t mix(uint64_t hash, int value)
{
    hash = (hash ^ (uint32_t)value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

uint64_t partition_digest(const struct partition *p)
{
    uint64_t hash = mix(0x7061727469746e31u, p->ranks);
    for (int r = 0; r < p->ranks; r++) {
        const struct rank_part *part = &p->part[r];
        const struct range *ranges[] = {&part->q_heads,     &part->kv_heads, &part->gdn_k_heads, &part->gdn_v_heads,
                                       &part->ffn,         &part->vocab,    &part->mtp_rows};
        for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
            hash = mix(mix(hash, ranges[i]->first), ranges[i]->count);
    }
    return hash;
}

enum rc partition_check(const struct partition *p, const struct model_file *m, struct err *e)
{
    uint64_t cut;
    if (!model_file_cut(m, &cut) || cut == partition_digest(p)) return RC_OK;
    enum rc rc = err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "shard_partition",
                         "this model was cut for ranks that share it otherwise than %d ranks of this program; cut it again", p->ranks);
    err_place(e, model_file_path(m), 0, 0, 0);
    return rc;
}
