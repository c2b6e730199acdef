/* comm_shm: sums, gathers and barriers of CPU ranks through the group's shared segment.
 *
 * All operations are one protocol. Collectives are numbered from 1, the same on every rank. For number n a rank writes
 * its part into its own slot n mod 2, publishes n, waits until every peer has published n, and reads the peers' slots.
 * Its own part it reads where it already lies. Nobody writes into a slot of another rank.
 *
 * Two slots suffice: slot n mod 2 is written again for n + 2. A rank gets there after it completed n + 1, hence after
 * every peer had published n + 1, and a peer publishes n + 1 only after it has read all it needs of n. (One slot would
 * let a fast rank overwrite what a slow one still reads.) So when n is awaited, a peer's counter is n or n + 1.
 *
 * Sums are formed per element as residual + ((p0 + p1) + p2 ...) from the same FP32 numbers by every rank, so all get
 * the same bits whatever the vector width. A rank without a part says "zeros"; its peers and itself add +0.0, as if it
 * had sent zeros.
 *
 * Shapes are compared before anything is read: a slot carries its length and kind, and ranks that disagree stop. */
#define _GNU_SOURCE
#include "comm_shm.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "lockstep_wait.h"

enum collective { COLLECTIVE_SUM = 1, COLLECTIVE_GATHER, COLLECTIVE_BARRIER };

/* Floats added at a time: the sum stays in the first-level cache. */
enum { BLOCK_FLOATS = 1024 };
static const float zero_block[BLOCK_FLOATS];

struct comm_shm {
    struct comm comm;
    struct segment *segment;
    uint64_t number; /* of the newest collective */
    size_t max_floats;
    int64_t bound_us;
};

static const char *collective_name(uint32_t kind)
{
    switch (kind) {
    case COLLECTIVE_SUM: return "sum";
    case COLLECTIVE_GATHER: return "gather";
    case COLLECTIVE_BARRIER: return "barrier";
    default: return "?";
    }
}

static enum rc fail(struct comm_shm *m, const struct err *mine, struct err *e)
{
    segment_poison(m->segment, m->comm.rank, mine->text);
    if (e && e->rc == RC_OK) *e = *mine;
    return RC_FATAL;
}

static enum rc fail_too_large(struct comm_shm *m, size_t floats, struct err *e)
{
    struct err mine = {0};
    err_set(&mine, RC_FATAL, EXIT_INTERNAL, "collective_too_large", "a collective of %zu floats, opened for %zu",
            floats, m->max_floats);
    return fail(m, &mine, e);
}

/* Puts this rank's part (NULL: zeros) into its slot of the next collective and publishes it. */
static enum rc part_publish(struct comm_shm *m, enum collective kind, const float *part, size_t floats, struct err *e)
{
    if (floats > m->max_floats) return fail_too_large(m, floats, e);
    enum rc rc = lockstep_check(m->segment, e);
    if (rc != RC_OK) return rc;
    m->number = lockstep_published(m->segment, m->comm.rank, SEGMENT_COMM) + 1; /* exchanges count too */
    struct segment_slot *slot = segment_slot_of(m->segment, m->comm.rank, (unsigned)(m->number & 1));
    slot->floats = floats;
    slot->kind = kind;
    slot->zeros = part == NULL;
    if (part && floats) memcpy(slot->payload, part, floats * sizeof *part);
    lockstep_publish(m->segment, m->comm.rank, SEGMENT_COMM, m->number);
    return RC_OK;
}

/* Waits for the peer's part of the running collective. *part: its floats, or NULL for zeros. */
static enum rc part_await(struct comm_shm *m, enum collective kind, int peer, size_t floats, const float **part,
                          struct err *e)
{
    struct lockstep_wait wait = {.self = m->comm.rank,
                                 .peer = peer,
                                 .channel = SEGMENT_COMM,
                                 .value = m->number,
                                 .bound_us = m->bound_us,
                                 .patience_us = -1,
                                 .what = "collective"};
    struct err mine = {0};
    uint64_t seen;
    enum rc rc = lockstep_wait(m->segment, &wait, &seen, e);
    if (rc != RC_OK) return rc;
    if (seen > m->number + 1) {
        err_set(&mine, RC_FATAL, EXIT_LOCKSTEP, "out_of_step",
                "rank %d is at collective %" PRIu64 ", rank %d at %" PRIu64, peer, seen, m->comm.rank, m->number);
        return fail(m, &mine, e);
    }
    const struct segment_slot *slot = segment_slot_of(m->segment, peer, (unsigned)(m->number & 1));
    if (slot->kind != kind || slot->floats != floats) {
        err_set(&mine, RC_FATAL, EXIT_LOCKSTEP, "collective_mismatch",
                "collective %" PRIu64 ": rank %d has a %s of %" PRIu64 " floats where rank %d expects a %s of %zu",
                m->number, peer, collective_name(slot->kind), slot->floats, m->comm.rank, collective_name(kind),
                floats);
        return fail(m, &mine, e);
    }
    *part = slot->zeros ? NULL : slot->payload;
    return RC_OK;
}

/* Four floats in the vectors of GCC and Clang, which every compiler level keeps in a register; memcpy, since a part may
 * lie at any float. */
typedef float f32x4 __attribute__((vector_size(16)));

static inline f32x4 load_4(const float *from)
{
    f32x4 v;
    memcpy(&v, from, sizeof v);
    return v;
}

/* residual += the parts in rank order; a NULL part is zeros. */
static void add_parts(float *residual, const float *const part[], int ranks, size_t floats)
{
    for (size_t at = 0; at < floats; at += BLOCK_FLOATS) {
        size_t n = floats - at < BLOCK_FLOATS ? floats - at : BLOCK_FLOATS, i = 0;
        const float *p[MAX_RANKS] = {0};
        for (int r = 0; r < ranks; r++) p[r] = part[r] ? part[r] + at : zero_block;
        for (; i + 4 <= n; i += 4) {
            f32x4 sum = load_4(p[0] + i);
            for (int r = 1; r < ranks; r++) sum += load_4(p[r] + i);
            sum = load_4(residual + at + i) + sum;
            memcpy(residual + at + i, &sum, sizeof sum);
        }
        for (; i < n; i++) {
            float sum = p[0][i];
            for (int r = 1; r < ranks; r++) sum += p[r][i];
            residual[at + i] += sum;
        }
    }
}

static enum rc shm_all_reduce_add(struct comm *c, const void *partial, struct kern_split rows, int width, float *residual,
                                  struct err *e)
{
    struct comm_shm *m = c->ctx;
    const size_t n = (size_t)kern_rows(rows) * (size_t)width;
    const float *part[MAX_RANKS] = {0};
    part[c->rank] = partial;
    if (c->ranks > 1) {
        enum rc rc = part_publish(m, COLLECTIVE_SUM, partial, n, e);
        for (int peer = 0; peer < c->ranks && rc == RC_OK; peer++)
            if (peer != c->rank) rc = part_await(m, COLLECTIVE_SUM, peer, n, &part[peer], e);
        if (rc != RC_OK) return rc;
    }
    add_parts(residual, part, c->ranks, n);
    return RC_OK;
}

static enum rc fail_bad_ranges(struct comm_shm *m, struct err *e)
{
    struct err mine = {0};
    err_set(&mine, RC_FATAL, EXIT_INTERNAL, "bad_gather",
            "a gather has columns outside of its rows, or none where some are due");
    return fail(m, &mine, e);
}

static void columns_copy(const float *part, int rows, struct range range, int row_width, float *out)
{
    size_t count = (size_t)range.count;
    for (int row = 0; row < rows && count; row++) {
        float *to = out + (size_t)row * (size_t)row_width + (size_t)range.first;
        memcpy(to, part + (size_t)row * count, count * sizeof *to);
    }
}

static enum rc shm_all_gather_columns(struct comm *c, const float *mine, int rows, const struct range *range_of_rank,
                                      int row_width, float *out, struct err *e)
{
    struct comm_shm *m = c->ctx;
    size_t floats[MAX_RANKS] = {0};
    if (rows < 0) return fail_bad_ranges(m, e);
    for (int r = 0; r < c->ranks; r++) {
        struct range g = range_of_rank[r];
        if (g.first < 0 || g.count < 0 || g.first > row_width || g.count > row_width - g.first)
            return fail_bad_ranges(m, e);
        floats[r] = (size_t)rows * (size_t)g.count;
    }
    if (!mine && floats[c->rank]) return fail_bad_ranges(m, e);
    if (c->ranks > 1) {
        enum rc rc = part_publish(m, COLLECTIVE_GATHER, mine, floats[c->rank], e);
        if (rc != RC_OK) return rc;
    }
    columns_copy(mine, rows, range_of_rank[c->rank], row_width, out);
    for (int peer = 0; peer < c->ranks; peer++) {
        const float *part;
        if (peer == c->rank) continue;
        enum rc rc = part_await(m, COLLECTIVE_GATHER, peer, floats[peer], &part, e);
        if (rc != RC_OK) return rc;
        columns_copy(part, rows, range_of_rank[peer], row_width, out);
    }
    return RC_OK;
}

static enum rc shm_barrier(struct comm *c, struct err *e)
{
    struct comm_shm *m = c->ctx;
    if (c->ranks == 1) return RC_OK;
    enum rc rc = part_publish(m, COLLECTIVE_BARRIER, NULL, 0, e);
    for (int peer = 0; peer < c->ranks && rc == RC_OK; peer++) {
        const float *nothing;
        if (peer != c->rank) rc = part_await(m, COLLECTIVE_BARRIER, peer, 0, &nothing, e);
    }
    return rc;
}

static void shm_abort(struct comm *c, const char *reason)
{
    struct comm_shm *m = c->ctx;
    segment_poison(m->segment, c->rank, reason);
}

static void shm_close(struct comm *c) { free(c->ctx); }

enum rc comm_shm_open(struct segment *s, int rank, struct comm **out, struct err *e)
{
    *out = NULL;
    if (rank < 0 || rank >= (int)s->ranks)
        return err_set(e, RC_FATAL, EXIT_INTERNAL, "bad_rank", "rank %d of %d", rank, (int)s->ranks);
    struct comm_shm *m = calloc(1, sizeof *m);
    if (!m) return err_no_memory(e);
    *m = (struct comm_shm){
        .comm = {.rank = rank,
                 .ranks = (int)s->ranks,
                 .ctx = m,
                 .all_reduce_add = shm_all_reduce_add,
                 .all_gather_columns = shm_all_gather_columns,
                 .barrier = shm_barrier,
                 .abort = shm_abort,
                 .close = shm_close},
        .segment = s,
        .number = lockstep_published(s, rank, SEGMENT_COMM), /* a comm opened again goes on counting */
        .max_floats = s->comm_bytes / sizeof(float),
        .bound_us = s->bounds.collective_us,
    };
    *out = &m->comm;
    return RC_OK;
}
