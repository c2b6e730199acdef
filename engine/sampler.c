/* sampler: one row of logits to one token, the same on every rank and machine.
 *
 * Candidates are ordered by logit, falling, equal logits by rising id; there is no other order anywhere. A weight is
 * exp((logit - largest) / temperature) in double precision by exact_math, so the largest weighs 1.
 *   min_p  keeps weights >= min_p (the largest weighs 1, so this is the usual rule)
 *   top_k  keeps the first k of the order
 *   top_p  keeps the shortest beginning of the order whose weight reaches top_p of what the rules before have kept
 *   draw   takes the candidate at which the running sum of weights passes u * total
 * Every sum has one fixed order: by id in blocks where neither top_k nor top_p cuts, else the order of candidates; the
 * total that top_p refers to without top_k is by id as well. u has 53 bits of a hash of (seed, position): no state, so
 * a token can be sampled again, alone or beside others, with the same outcome.
 *
 * Cost: greedy is one pass over the logits. top_k keeps a heap of k while passing. top_p without top_k does not sort
 * the vocabulary: candidates so light that all of them together cannot matter are left out, the rest becomes a heap,
 * and only what is kept is popped. */
#include "sampler.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "exact_math.h"

struct candidate {
    double weight;
    float logit;
    int32_t id;
};

struct sampling sampling_default(void)
{
    return (struct sampling){.temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f};
}

/* ---- token counts ---- */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

static struct token_count *counts_slot(struct token_count *slots, size_t cap, int32_t id)
{
    size_t at = (size_t)mix((uint64_t)id) & (cap - 1);
    while (slots[at].id >= 0 && slots[at].id != id) at = (at + 1) & (cap - 1);
    return &slots[at];
}

/* Doubles the table. */
static bool counts_grow(struct token_counts *c)
{
    size_t cap = c->cap ? c->cap * 2 : 64, n_bytes;
    if (!size_mul(cap, sizeof *c->slots, &n_bytes)) return false;
    struct token_count *slots = malloc(n_bytes);
    if (!slots) return false;
    for (size_t i = 0; i < cap; i++) slots[i] = (struct token_count){.id = -1};
    for (size_t i = 0; i < c->cap; i++)
        if (c->slots[i].id >= 0) *counts_slot(slots, cap, c->slots[i].id) = c->slots[i];
    free(c->slots);
    c->slots = slots;
    c->cap = cap;
    return true;
}

bool token_counts_add(struct token_counts *c, int32_t id, bool generated)
{
    if (id < 0) return false;
    if (c->len >= c->cap / 2 && !counts_grow(c)) return false;
    struct token_count *slot = counts_slot(c->slots, c->cap, id);
    if (slot->id < 0) {
        slot->id = id;
        c->len++;
    }
    uint32_t *n = generated ? &slot->generated : &slot->prompt;
    if (*n < UINT32_MAX) ++*n;
    return true;
}

void token_counts_free(struct token_counts *c)
{
    free(c->slots);
    *c = (struct token_counts){0};
}

bool sampling_needs_counts(const struct sampling *p)
{
    return p->presence_penalty != 0.0f || p->frequency_penalty != 0.0f || p->repetition_penalty != 1.0f;
}

/* Into the range of finite floats: a penalty makes no infinity. */
static float clamp_finite(double v)
{
    const double most = (double)FLT_MAX;
    return (float)(v > most ? most : v < -most ? -most : v);
}

/* Each id on its own, so the table's order does not matter. */
static void penalize(const struct sampling *p, const struct token_counts *counts, int vocab_used, float *logits)
{
    for (size_t i = 0; i < counts->cap; i++) {
        const struct token_count *t = &counts->slots[i];
        if (t->id < 0 || t->id >= vocab_used) continue;
        double v = (double)logits[t->id], repetition = (double)p->repetition_penalty;
        v = v > 0.0 ? v / repetition : v * repetition;
        if (t->generated) {
            double by_count = (double)p->frequency_penalty * (double)t->generated;
            v = v - (double)p->presence_penalty;
            v = v - by_count;
        }
        logits[t->id] = clamp_finite(v);
    }
}

/* ---- the largest logit ---- */

enum { LANES = 16, BLOCK = 1024 };

/* Largest of n logits, n a multiple of LANES; *odd becomes nonzero when one is not finite. Plain lanes, so that any
 * vector width computes it. */
static float block_largest(const float *x, int n, uint32_t *odd)
{
    float largest[LANES];
    uint32_t seen[LANES] = {0};
    for (int lane = 0; lane < LANES; lane++) largest[lane] = -FLT_MAX;
    for (int i = 0; i < n; i += LANES) {
        uint32_t bits[LANES];
        memcpy(bits, x + i, sizeof bits);
        for (int lane = 0; lane < LANES; lane++) {
            /* Exponent all ones carries into the sign bit. */
            seen[lane] |= (bits[lane] & UINT32_C(0x7f800000)) + UINT32_C(0x00800000);
            largest[lane] = x[i + lane] > largest[lane] ? x[i + lane] : largest[lane];
        }
    }
    for (int lane = 1; lane < LANES; lane++) {
        seen[0] |= seen[lane];
        if (largest[lane] > largest[0]) largest[0] = largest[lane];
    }
    *odd |= seen[0] >> 31;
    return largest[0];
}

/* Lowest id of the largest logit, or -1 when a logit is not finite. */
static int32_t find_largest(const float *logits, int n)
{
    float best = -FLT_MAX;
    int best_block = 0;
    uint32_t odd = 0;
    for (int at = 0; at < n; at += BLOCK) {
        int here = n - at < BLOCK ? n - at : BLOCK, whole = here / LANES * LANES;
        float largest = block_largest(logits + at, whole, &odd);
        if (whole < here) {
            float rest[LANES];
            for (int lane = 0; lane < LANES; lane++)
                rest[lane] = whole + lane < here ? logits[at + whole + lane] : -FLT_MAX;
            float last = block_largest(rest, LANES, &odd);
            if (last > largest) largest = last;
        }
        if (largest > best) {
            best = largest;
            best_block = at;
        }
    }
    if (odd) return -1;
    int32_t id = best_block;
    while (logits[id] != best) id++;
    return id;
}

/* ---- candidates ---- */

/* The order of candidates: does a come before b? */
static bool before(const struct candidate *a, const struct candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

/* Heap whose top is the first of the order (last_on_top: the last). */
static void sift_down(struct candidate *heap, size_t n, size_t at, bool last_on_top)
{
    struct candidate moving = heap[at];
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= n) break;
        if (child + 1 < n && before(&heap[child + 1], &heap[child]) != last_on_top) child++;
        if (before(&heap[child], &moving) == last_on_top) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moving;
}

static void heap_make(struct candidate *heap, size_t n, bool last_on_top)
{
    for (size_t at = n / 2; at-- > 0;) sift_down(heap, n, at, last_on_top);
}

static void swap(struct candidate *a, struct candidate *b)
{
    struct candidate t = *a;
    *a = *b;
    *b = t;
}

/* The first k of the order, in that order. k < n. */
static void keep_top_k(const float *logits, int n, size_t k, struct candidate *out)
{
    for (size_t i = 0; i < k; i++) out[i] = (struct candidate){.logit = logits[i], .id = (int32_t)i};
    heap_make(out, k, true);
    for (int32_t id = (int32_t)k; id < n; id++) {
        if (logits[id] <= out[0].logit) continue; /* an equal logit with a higher id comes later in the order */
        out[0] = (struct candidate){.logit = logits[id], .id = id};
        sift_down(out, k, 0, true);
    }
    for (size_t left = k; left > 1; left--) { /* the last goes to the end */
        swap(&out[0], &out[left - 1]);
        sift_down(out, left - 1, 0, true);
    }
}

/* ---- the draw ---- */

enum { SUM_BLOCK = 256, SUM_LANES = 8 };

/* What scratch holds: weights by id (whole blocks), their sums by block, candidates. */
struct draw {
    double *weights, *block_sums;
    struct candidate *candidates;
    double u;
};

static size_t sum_blocks(int n) { return ((size_t)n + SUM_BLOCK - 1) / SUM_BLOCK; }

size_t sampler_scratch_bytes(int vocab)
{
    size_t n = vocab > 0 ? (size_t)vocab : 1, blocks = sum_blocks((int)n);
    return blocks * SUM_BLOCK * sizeof(double) + blocks * sizeof(double) + n * sizeof(struct candidate);
}

static struct draw draw_carve(void *scratch, int n, double u)
{
    double *weights = scratch, *block_sums = weights + sum_blocks(n) * SUM_BLOCK;
    return (struct draw){weights, block_sums, (struct candidate *)(void *)(block_sums + sum_blocks(n)), u};
}

static double block_sum(const double *w)
{
    double lane[SUM_LANES] = {0};
    for (int i = 0; i < SUM_BLOCK; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lane[j] += w[i + j];
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

/* Weights of all ids and, after min_p, their sums by block. Returns the sum of these. */
static double weigh(const struct draw *d, const struct sampling *p, const float *logits, int n, float largest)
{
    double scale = 1.0 / (double)p->temperature, total = 0.0, least = (double)p->min_p;
    for (int at = 0; at < n; at += SUM_BLOCK) {
        int here = n - at < SUM_BLOCK ? n - at : SUM_BLOCK;
        double *w = d->weights + at;
        for (int i = 0; i < here; i++) w[i] = ((double)logits[at + i] - (double)largest) * scale;
        exact_exp_each(w, (size_t)here);
        for (int i = here; i < SUM_BLOCK; i++) w[i] = 0.0;
        for (int i = 0; i < SUM_BLOCK; i++) w[i] = w[i] >= least ? w[i] : 0.0;
        total += d->block_sums[at / SUM_BLOCK] = block_sum(w);
    }
    return total;
}

/* The id at which the running sum passes u * total: by blocks, then within one. */
static int32_t draw_by_id(const struct draw *d, int n, double total)
{
    double target = d->u * total, sum = 0.0;
    size_t block = 0, blocks = sum_blocks(n);
    while (block + 1 < blocks && sum + d->block_sums[block] <= target) sum += d->block_sums[block++];
    int32_t last = -1, id = (int32_t)(block * SUM_BLOCK), end = id + SUM_BLOCK < n ? id + SUM_BLOCK : n;
    for (; id < end; id++) {
        if (d->weights[id] <= 0.0) continue;
        sum += d->weights[id];
        last = id;
        if (sum > target) break;
    }
    return last; /* rounding alone can end the loop: the block's last candidate then */
}

/* The same over n candidates in their order, their weights adding up to total. */
static int32_t draw_by_order(const struct candidate *c, size_t n, double u, double total)
{
    double target = u * total, sum = 0.0;
    int32_t last = c[0].id;
    for (size_t i = 0; i < n && c[i].weight > 0.0; i++) {
        sum += c[i].weight;
        last = c[i].id;
        if (sum > target) break;
    }
    return last;
}

/* top_p < 1 without top_k. */
static int32_t draw_top_p(const struct draw *d, const float *logits, int n, double top_p, double total)
{
    /* What is lighter than an even share of (1 - top_p) * total weighs less than that all together, so it is never
     * reached. Half of it leaves room for rounding. */
    double light = (1.0 - top_p) * total / (2.0 * n), wanted = top_p * total, sum = 0.0;
    struct candidate *c = d->candidates;
    size_t held = 0, kept = 0;
    for (int32_t id = 0; id < n; id++)
        if (d->weights[id] >= light && d->weights[id] > 0.0)
            c[held++] = (struct candidate){d->weights[id], logits[id], id};
    heap_make(c, held, false);
    while (kept < held && (sum < wanted || kept == 0)) { /* those kept gather at the end, first of them last */
        size_t heap_n = held - ++kept;
        swap(&c[0], &c[heap_n]);
        sum += c[heap_n].weight;
        sift_down(c, heap_n, 0, false);
    }
    c += held - kept;
    for (size_t i = 0; i < kept / 2; i++) swap(&c[i], &c[kept - 1 - i]);
    return draw_by_order(c, kept, d->u, sum);
}

/* top_k below n, then top_p. */
static int32_t draw_top_k(const struct draw *d, const struct sampling *p, const float *logits, int n, float largest)
{
    struct candidate *c = d->candidates;
    double scale = 1.0 / (double)p->temperature, total = 0.0, sum = 0.0;
    size_t k = (size_t)p->top_k, kept = 0, cut = 0;
    keep_top_k(logits, n, k, c);
    for (; kept < k; kept++) {
        c[kept].weight = exact_exp(((double)c[kept].logit - (double)largest) * scale);
        if (c[kept].weight < (double)p->min_p) break;
        total += c[kept].weight;
    }
    if (!(p->top_p < 1.0f)) return draw_by_order(c, kept, d->u, total);
    while (cut < kept && (sum < (double)p->top_p * total || cut == 0)) sum += c[cut++].weight;
    return draw_by_order(c, cut, d->u, sum);
}

static double uniform(uint64_t seed, int64_t position)
{
    uint64_t h =
        mix(mix(seed + UINT64_C(0x9e3779b97f4a7c15)) + ((uint64_t)position + 1) * UINT64_C(0xd1342543de82ef95));
    return (double)(mix(h) >> 11) * 0x1p-53;
}

static int32_t draw_token(const struct sampling *p, int n, const float *logits, float largest, const struct draw *d)
{
    if (p->top_k > 0 && p->top_k < n) return draw_top_k(d, p, logits, n, largest);
    double total = weigh(d, p, logits, n, largest);
    if (p->top_p < 1.0f) return draw_top_p(d, logits, n, (double)p->top_p, total);
    return draw_by_id(d, n, total);
}

enum rc sampler_pick(const struct sampling *p, const struct token_counts *counts, int vocab_used, int64_t position,
                     float *logits, void *scratch, int32_t *out, struct err *e)
{
    bool penalized = counts && counts->len && sampling_needs_counts(p);
    int32_t id = find_largest(logits, vocab_used);
    if (id >= 0 && penalized) {
        penalize(p, counts, vocab_used, logits);
        id = find_largest(logits, vocab_used);
    }
    if (id < 0) {
        return err_set(e, RC_FAILED, 0, "non_finite_logits", "a logit for position %lld is not finite",
                       (long long)position);
    }
    if (p->temperature > 0.0f) {
        struct draw d = draw_carve(scratch, vocab_used, uniform(p->seed, position));
        id = draw_token(p, vocab_used, logits, logits[id], &d);
    }
    *out = id;
    return RC_OK;
}
