/* segment_ranks: ranks as threads over one segment in ordinary memory, for tests. A body must not assert (cmocka's
 * jumps do not cross threads): it reports through its struct and the test asserts after rank_threads_run. */
#ifndef TANDEM_SEGMENT_RANKS_H
#define TANDEM_SEGMENT_RANKS_H

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "lockstep.h"

struct rank_thread {
    struct segment *segment;
    int rank, ranks;
    void *shared; /* the test's own */
    enum rc rc;
    struct err err;
    uint64_t wrong; /* counted by the body */
    int64_t took_us;
    void (*body)(struct rank_thread *t);
};

struct rank_group {
    void *memory;
    size_t n_bytes;
    struct segment *segment;
    int ranks;
    struct rank_thread thread[MAX_RANKS];
};

/* lockstep and watchdog bounds are multiples of the collective one. */
static inline struct rank_group rank_group_make(int ranks, size_t comm_bytes, int64_t collective_us)
{
    struct rank_group g = {.ranks = ranks, .n_bytes = segment_bytes(ranks, comm_bytes)};
    struct lockstep_bounds b = {collective_us, 2 * collective_us, 4 * collective_us};
    if (posix_memalign(&g.memory, 64, g.n_bytes)) abort();
    memset(g.memory, 0, g.n_bytes);
    segment_init(g.memory, ranks, comm_bytes, &b);
    g.segment = segment_attach(g.memory, g.n_bytes, ranks, NULL);
    if (!g.segment) abort();
    return g;
}

static inline void rank_group_free(struct rank_group *g) { free(g->memory); }

static inline void *rank_thread_main(void *argument)
{
    struct rank_thread *t = argument;
    int64_t start = clock_now_us();
    t->body(t);
    t->took_us = clock_now_us() - start;
    return NULL;
}

/* Runs body once per rank and joins all. */
static inline void rank_threads_run(struct rank_group *g, void (*body)(struct rank_thread *), void *shared)
{
    pthread_t id[MAX_RANKS];
    for (int r = 0; r < g->ranks; r++) {
        g->thread[r] =
            (struct rank_thread){.segment = g->segment, .rank = r, .ranks = g->ranks, .shared = shared, .body = body};
        if (pthread_create(&id[r], NULL, rank_thread_main, &g->thread[r])) abort();
    }
    for (int r = 0; r < g->ranks; r++) pthread_join(id[r], NULL);
}

/* Small deterministic noise. */
static inline uint64_t rank_noise(uint64_t x)
{
    x ^= x >> 31, x *= UINT64_C(0x7fb5d329728ea185);
    x ^= x >> 27, x *= UINT64_C(0x81dadef4bc2dd44d);
    return x ^ x >> 33;
}

#endif
