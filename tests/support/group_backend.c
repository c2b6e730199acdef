/* group_backend: kern and comm of one rank; on CUDA the backend's record is wrapped, to count. */
#include "group_backend.h"

#include <stdio.h>
#include <string.h>

#include "comm_shm.h"
#include "kern_cpu.h"
#if TANDEM_HAVE_CUDA
#include "kern_cuda.h"
#endif

static _Thread_local uint64_t replays;

uint64_t group_backend_replays(void) { return replays; }

bool group_backend_parse(const char *name, enum group_backend *out)
{
    static const char *const names[] = {"cpu", "cuda", "cuda-plain"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, names[i])) continue;
        *out = (enum group_backend)i;
        return true;
    }
    return false;
}

#if TANDEM_HAVE_CUDA
bool group_backend_there(enum group_backend b)
{
    char why[128];
    if (b == GROUP_CPU || kern_cuda_devices(why) > 0) return true;
    printf("SKIPPED: no CUDA device (%s)\n", why);
    return false;
}

static _Thread_local bool (*backend_record)(struct kern *k, uint64_t key);

static bool counted_record(struct kern *k, uint64_t key)
{
    const bool replayed = backend_record(k, key);
    replays += replayed;
    return replayed;
}

static enum rc open_cuda(const struct group_backend_options *o, struct kern **kern, struct comm **comm, struct err *e)
{
    const int device = 0;
    const struct kern_cuda_options k = {.device = device, .graphs = o->backend == GROUP_CUDA};
    const struct kern_cuda_comm_options c = {
        .segment = o->segment,
        .rank = 0,
        .ranks = 1,
        .device_of_rank = &device,
        .sum_path = "auto",
        .max_rows = o->shape.max_rows,
        .width = o->shape.width,
        .max_gather_floats = o->shape.max_gather_floats,
    };
    if (o->ranks != 1) return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "one_process", "%d CUDA ranks in one process", o->ranks);
    enum rc rc = kern_cuda_open(&k, kern, e);
    if (rc == RC_OK) rc = kern_cuda_open_comm(*kern, &c, comm, e);
    if (rc != RC_OK) return rc;
    backend_record = (*kern)->record;
    (*kern)->record = counted_record;
    return RC_OK;
}
#else
bool group_backend_there(enum group_backend b)
{
    if (b == GROUP_CPU) return true;
    printf("SKIPPED: no CUDA device (this build has no CUDA backend)\n");
    return false;
}

static enum rc open_cuda(const struct group_backend_options *o, struct kern **kern, struct comm **comm, struct err *e)
{
    (void)o, (void)kern, (void)comm;
    return err_set(e, RC_BAD_INPUT, EXIT_UNAVAILABLE, "no_gpu", "this build has no CUDA backend");
}
#endif

enum rc group_backend_open(const struct group_backend_options *o, struct kern **kern, struct comm **comm, struct err *e)
{
    if (o->backend != GROUP_CPU) return open_cuda(o, kern, comm, e);
    const enum rc rc = kern_cpu_open(o->isa, o->threads, kern, e);
    return rc == RC_OK ? comm_shm_open(o->segment, o->rank, comm, e) : rc;
}
