/* bench_comm: microseconds per sum of two rank processes over the shared segment, each pinned to a core of its own when
 * there are enough. Sizes are what SmolLM2-135M sends: one row, four rows, 504 rows. One line a size: the tenth,
 * fiftieth and ninetieth percentile. --sleep: no spinning, every wait is a futex. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm_shm.h"
#include "lockstep_segment.h"

enum { SUMS = 20000, RANKS = 2, MAX_FLOATS = 504 * 576 };

static void pin(int rank)
{
    cpu_set_t mine, one;
    if (sched_getaffinity(0, sizeof mine, &mine) || CPU_COUNT(&mine) < RANKS) return;
    int seen = 0;
    for (size_t cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &mine) || seen++ != rank) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof one, &one);
        return;
    }
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Each sum is timed on its own: on a busy machine the mean tells of its other users. */
static bool measure(struct comm *c, size_t floats, float *partial, float *residual)
{
    int sums = floats > 100000 ? SUMS / 40 : SUMS;
    double *us = malloc(SUMS * sizeof *us);
    bool ok = us != NULL;
    memset(residual, 0, floats * sizeof *residual);
    for (int i = 0; i < sums && ok; i++) {
        ok = c->barrier(c, NULL) == RC_OK;
        double start = now_us();
        ok = ok && c->all_reduce_add(c, partial, (struct kern_split){1, 0}, (int)floats, residual, NULL) == RC_OK;
        us[i] = now_us() - start;
    }
    if (ok && c->rank == 0) {
        qsort(us, (size_t)sums, sizeof *us, by_value);
        printf("%8zu bytes: %8.2f %8.2f %8.2f us\n", floats * sizeof(float), us[sums / 10], us[sums / 2],
               us[sums - 1 - sums / 10]);
    }
    free(us);
    return ok;
}

static int run_rank(struct segment *s, int rank)
{
    static const size_t sizes[] = {1, 576, 4 * 576, 8 * 576, MAX_FLOATS};
    float *partial = malloc(MAX_FLOATS * sizeof *partial), *residual = malloc(MAX_FLOATS * sizeof *residual);
    struct comm *c = NULL;
    bool ok = partial && residual && comm_shm_open(s, rank, &c, NULL) == RC_OK;
    pin(rank);
    for (size_t i = 0; ok && i < MAX_FLOATS; i++) partial[i] = (float)i * 1e-6f;
    for (size_t i = 0; ok && i < sizeof sizes / sizeof sizes[0]; i++) ok = measure(c, sizes[i], partial, residual);
    if (c) c->close(c);
    free(residual);
    free(partial);
    fflush(stdout);
    return ok ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct lockstep_bounds b = lockstep_bounds_default();
    size_t n_bytes = segment_bytes(RANKS, MAX_FLOATS * sizeof(float));
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 1;
    segment_init(memory, RANKS, MAX_FLOATS * sizeof(float), &b);
    struct segment *s = segment_attach(memory, n_bytes, RANKS, NULL);
    if (argc > 1 && strcmp(argv[1], "--sleep") == 0) s->spin_pauses = 0;
    pid_t peer = fork();
    if (peer < 0) return 1;
    if (peer == 0) _exit(run_rank(s, 1));
    int mine = run_rank(s, 0), status = 1;
    waitpid(peer, &status, 0);
    munmap(memory, n_bytes);
    return mine || status ? 1 : 0;
}
