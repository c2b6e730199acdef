/* rank_backend: the CPU backend is always there; CUDA where it was built in and the driver lists cards.
 *
 * Ranks take cards in the order of --gpus, group after group; without it ranks of group g start at card g * ranks. Two ranks may
 * share a card, slowly, where --gpus says so. */
#include "rank_backend.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm_shm.h"
#include "kern_cpu.h"
#include "rank_args.h"
#if TANDEM_HAVE_CUDA
#include "kern_cuda.h"
#endif

#if TANDEM_HAVE_CUDA
static int count_gpus(char *why) { return kern_cuda_devices(why); }
#else
static int count_gpus(char *why)
{
    snprintf(why, 128, "this build has no CUDA backend");
    return 0;
}
#endif

/* Numbers of a list "0,1,2". Returns how many, or -1 when it is none. */
static int read_gpus(const char *list, int *out, int most)
{
    int n = 0;
    for (const char *at = list; n < most; at++) {
        char *end;
        errno = 0;
        const long v = strtol(at, &end, 10);
        if (end == at || errno || v < 0 || v > 1023) return -1;
        out[n++] = (int)v;
        if (!*end) return n;
        if (*end != ',') return -1;
        at = end;
    }
    return -1;
}

int rank_backend_ranks(const struct options *o)
{
    enum { STANDARD = 2, MOST = 64 };
    int gpus[MOST];
    char why[128];
    const int groups = o->groups > 0 ? o->groups : 1;
    if (o->backend && !strcmp(o->backend, "cpu")) return STANDARD;
    const int n = (o->gpus ? read_gpus(o->gpus, gpus, MOST) : count_gpus(why)) / groups, most = o->gpus ? MAX_RANKS : STANDARD;
    return n < 1 ? STANDARD : n < most ? n : most;
}

static enum rc choose_cpu(const struct options *o, struct rank_backend *out, struct err *e)
{
    out->numerics = kern_cpu_numerics(o->isa);
    if (out->numerics) return RC_OK;
    return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "no_backend", "this machine lacks the instruction set %s", o->isa ? o->isa : "auto");
}

#if TANDEM_HAVE_CUDA
static enum rc choose_cuda(const int *gpus, int ranks, int group, struct rank_backend *out, struct err *e)
{
    out->cuda = true;
    for (int r = 0; r < ranks; r++) out->gpu_of_rank[r] = gpus[group * ranks + r];
    for (int r = 0; r < ranks; r++) {
        const char *numerics = kern_cuda_numerics(out->gpu_of_rank[r]);
        if (!numerics)
            return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_gpu", "GPU %d is not there, or is of a kind that this build does not know",
                           out->gpu_of_rank[r]);
        if (out->numerics && strcmp(out->numerics, numerics) != 0)
            return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "mixed_gpus", "GPUs %d and %d are of different kinds: their bits differ",
                           out->gpu_of_rank[0], out->gpu_of_rank[r]);
        out->numerics = numerics;
    }
    return RC_OK;
}
#else
static enum rc choose_cuda(const int *gpus, int ranks, int group, struct rank_backend *out, struct err *e)
{
    (void)gpus, (void)ranks, (void)group, (void)out;
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_gpu", "this build has no CUDA backend");
}
#endif

enum rc rank_backend_choose(const struct options *o, int group, struct rank_backend *out, struct err *e)
{
    enum { MOST = 64 };
    int gpus[MOST];
    char why[128];
    const int groups = o->groups > 0 ? o->groups : 1, need = o->ranks * groups;
    const bool automatic = !o->backend || !strcmp(o->backend, "auto"), asked = !automatic && !strcmp(o->backend, "cuda");
    *out = (struct rank_backend){0};
    if (!automatic && !asked) {
        if (strcmp(o->backend, "cpu") != 0)
            return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "no_backend", "there is no backend %s", o->backend);
        snprintf(out->why, sizeof out->why, "--backend cpu");
        return choose_cpu(o, out, e);
    }
    if (need > MOST) return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_option", "%d ranks in all are more than %d", need, MOST);
    const int there = count_gpus(why);
    if (o->gpus) {
        const int n = read_gpus(o->gpus, gpus, MOST);
        if (n != need)
            return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "bad_gpus", "--gpus %s does not name %d GPUs, one for each rank", o->gpus, need);
        snprintf(out->why, sizeof out->why, "--gpus %.100s", o->gpus);
        return choose_cuda(gpus, o->ranks, group, out, e);
    }
    if (there < need && asked)
        return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_gpu", "%d GPUs for %d ranks%s%s", there, need, there ? "" : ": ", there ? "" : why);
    if (there < need) {
        if (there) snprintf(out->why, sizeof out->why, "%d GPUs are fewer than %d ranks", there, need);
        else snprintf(out->why, sizeof out->why, "no GPU: %s", why);
        return choose_cpu(o, out, e);
    }
    for (int i = 0; i < need; i++) gpus[i] = i;
    snprintf(out->why, sizeof out->why, "%d GPU%s for %d rank%s", there, there > 1 ? "s" : "", need, need > 1 ? "s" : "");
    return choose_cuda(gpus, o->ranks, group, out, e);
}

/* What a rank of a group is told about its peers. */
struct placing {
    int rank, ranks;
    const int *gpu_of_rank; /* [ranks] */
    const char *sum_path;
};

#if TANDEM_HAVE_CUDA
static enum rc open_cuda(const struct options *o, const struct placing *p, struct segment *segment, struct kern **kern,
                         struct comm **comm, struct err *e)
{
    const struct rank_args args = {.options = *o, .rank = p->rank};
    struct engine_options engine = rank_args_engine(&args);
    struct engine_comm_shape shape;
    const struct kern_cuda_options k = {.device = p->gpu_of_rank[p->rank], .graphs = !o->no_graphs};
    engine.ranks = p->ranks;
    enum rc rc = engine_comm_shape(&engine, &shape, e);
    if (rc == RC_OK) rc = kern_cuda_open(&k, kern, e);
    if (rc != RC_OK) return rc;
    const struct kern_cuda_comm_options c = {
        .segment = segment,
        .rank = p->rank,
        .ranks = p->ranks,
        .device_of_rank = p->gpu_of_rank,
        .sum_path = p->sum_path,
        .max_rows = shape.max_rows,
        .width = shape.width,
        .max_gather_floats = shape.max_gather_floats,
    };
    return kern_cuda_open_comm(*kern, &c, comm, e);
}
#else
static enum rc open_cuda(const struct options *o, const struct placing *p, struct segment *segment, struct kern **kern,
                         struct comm **comm, struct err *e)
{
    (void)o, (void)p, (void)segment, (void)kern, (void)comm;
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_gpu", "this build has no CUDA backend");
}
#endif

static enum rc open_cpu(const struct options *o, int rank, struct segment *segment, struct kern **kern, struct comm **comm,
                        struct err *e)
{
    enum rc rc = kern_cpu_open(o->isa, o->threads > 0 ? o->threads : 1, kern, e);
    return rc == RC_OK ? comm_shm_open(segment, rank, comm, e) : rc;
}

enum rc rank_backend_open(const struct options *o, int group, int rank, struct segment *segment, struct kern **kern,
                          struct comm **comm, struct err *e)
{
    struct rank_backend b;
    enum rc rc = rank_backend_choose(o, group, &b, e);
    if (rc != RC_OK) return rc;
    const struct placing p = {rank, o->ranks, b.gpu_of_rank, o->sum_path ? o->sum_path : "auto"};
    return b.cuda ? open_cuda(o, &p, segment, kern, comm, e) : open_cpu(o, rank, segment, kern, comm, e);
}

enum rc rank_backend_open_alone(const struct options *o, int rank, int ranks, struct segment *segment, struct kern **kern,
                                struct comm **comm, struct err *e)
{
    struct rank_backend b;
    int gpus[MAX_RANKS];
    enum rc rc = rank_backend_choose(o, 0, &b, e);
    if (rc != RC_OK) return rc;
    for (int r = 0; r < ranks; r++) gpus[r] = b.gpu_of_rank[0];
    const struct placing p = {rank, ranks, gpus, ranks > 1 ? "local" : "auto"};
    if (b.cuda) return open_cuda(o, &p, segment, kern, comm, e);
    if (ranks > 1)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "no_gpu", "--as-rank: only the CUDA backend can pretend that it has peers (%s)", b.why);
    return open_cpu(o, 0, segment, kern, comm, e);
}

int rank_backend_prefill_rows(const struct options *o)
{
    enum { CUDA_PREFILL_ROWS = 2048 };
    struct rank_backend b;
    if (o->prefill_rows) return o->prefill_rows;
    return rank_backend_choose(o, 0, &b, NULL) == RC_OK && b.cuda ? CUDA_PREFILL_ROWS : ENGINE_PREFILL_ROWS;
}
