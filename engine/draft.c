/* draft: an index of token pairs with chains, as in LZ77 coders, and a small model of what a round costs.
 *
 * The index maps a hash of two neighbouring tokens to the newest position after such a pair; each position knows the one
 * before it. Looking up walks a bounded part of the chain and compares backwards, so a token costs a bounded number of steps
 * whatever the text holds. Measured over source code, JSON answers and prose (3 drafts): a common past of two tokens or more
 * gave more tokens a round than three or four; trying 8 places gave up to 4% more than the newest alone, 64 gave nothing on
 * top; the share of right drafts rises from 0.5 at a past of two tokens over 0.7 at four to 0.9 at twelve.
 *
 * The cost model. A step reads all weights once (1) and computes its rows (row each). With B sequences decoding, d drafts each
 * and E(d) = 1 + p1 + p1 p2 + ... expected tokens a round, the step gives B E(d) tokens for
 *     1 + row B (1 + d) + [MTP: d (mtp_pass + row mtp_pass B)].
 * draft_count takes the d with the best ratio, if that promises more than the model's own error. It makes drafts dear where many
 * sequences share a step, and stops them where they are mostly wrong. */
#include "draft.h"

#include <stdlib.h>

enum { PAIR = 2, MATCH_MOST = 32, TRIES = 8, LONG_MATCH = 4 };

/* How fast counts fade (a window of some 20 rounds for a sequence) and how much older knowledge weighs beside them. */
static const float fade = 0.95f;
static const double weight_of_all = 4, weight_of_start = 8;
static const double least_gain = 1.05;
static const double rate_at_start[DRAFT_KINDS] = {0.5, 0.75, 0.7};

bool draft_index_open(int capacity, struct draft_index *out)
{
    *out = (struct draft_index){.capacity = capacity, .bits = 6};
    while (out->bits < 30 && 1 << out->bits < capacity) out->bits++;
    out->newest = calloc((size_t)1 << out->bits, sizeof *out->newest);
    out->previous = malloc((size_t)capacity * sizeof *out->previous);
    if (out->newest && out->previous) return true;
    draft_index_free(out);
    return false;
}

void draft_index_free(struct draft_index *x)
{
    free(x->newest);
    free(x->previous);
    *x = (struct draft_index){0};
}

static int32_t *newest_of(const struct draft_index *x, const int32_t *pair)
{
    uint64_t key = (uint64_t)(uint32_t)pair[0] << 32 | (uint32_t)pair[1];
    return &x->newest[key * UINT64_C(0x9E3779B97F4A7C15) >> (64 - x->bits)];
}

/* Position p is entered once its token is known, so that every entry has something to continue with. */
static void extend(struct draft_index *x, const int32_t *tokens, int n)
{
    for (int p = x->indexed; p < n; p++) {
        if (p < PAIR) continue;
        int32_t *newest = newest_of(x, tokens + p - PAIR);
        x->previous[p] = *newest;
        *newest = p;
    }
    if (n > x->indexed) x->indexed = n;
}

static int common_past(const int32_t *tokens, int p, int n)
{
    int len = 0;
    while (len < MATCH_MOST && len < p && tokens[p - 1 - len] == tokens[n - 1 - len]) len++;
    return len;
}

int draft_index_propose(struct draft_index *x, const int32_t *tokens, int n, int most, int32_t *out, int *matched)
{
    *matched = 0;
    if (n > x->capacity) return 0;
    extend(x, tokens, n);
    if (n < PAIR || most < 1) return 0;
    int best = 0, best_len = PAIR - 1, p = *newest_of(x, tokens + n - PAIR);
    for (int i = 0; i < TRIES && p; i++, p = x->previous[p]) {
        int len = common_past(tokens, p, n);
        if (len > best_len) best = p, best_len = len;
    }
    if (!best) return 0;
    for (int j = 0; j < most; j++) out[j] = best + j < n ? tokens[best + j] : out[best + j - n];
    *matched = best_len;
    return most;
}

enum draft_kind draft_kind_of(enum draft_source source, int matched)
{
    if (source == DRAFT_MTP) return DRAFT_KIND_MTP;
    return matched >= LONG_MATCH ? DRAFT_KIND_LONG : DRAFT_KIND_SHORT;
}

void draft_rates_note(struct draft_rates *r, enum draft_kind k, int drafts, int accepted)
{
    for (int j = 0; j < drafts && j <= accepted && j < KERN_MAX_DRAFTS; j++) {
        r->tried[k][j] = r->tried[k][j] * fade + 1;
        r->right[k][j] = r->right[k][j] * fade + (j < accepted);
    }
}

static double rate(const struct draft_rates *own, const struct draft_rates *all, enum draft_kind k, int j)
{
    double right = (double)all->right[k][j] + weight_of_start * rate_at_start[k];
    double general = right / ((double)all->tried[k][j] + weight_of_start);
    return ((double)own->right[k][j] + weight_of_all * general) / ((double)own->tried[k][j] + weight_of_all);
}

int draft_count(const struct draft_rates *own, const struct draft_rates *all, enum draft_kind k, int most, int decoding,
                const struct draft_cost *cost, double *speed)
{
    double batch = decoding, none = 1 + cost->row * batch, chance = 1, tokens = 1;
    double pass = k == DRAFT_KIND_MTP ? cost->mtp_pass * (1 + cost->row * batch) : 0;
    int best = 0;
    *speed = 1;
    for (int d = 1; d <= most && d <= KERN_MAX_DRAFTS; d++) {
        chance *= rate(own, all, k, d - 1);
        tokens += chance;
        double gain = tokens * none / (none + d * (cost->row * batch + pass));
        if (gain > *speed && gain > least_gain) *speed = gain, best = d;
    }
    return best;
}
