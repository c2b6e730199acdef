/* forward_group: each thread opens backend, comm, weights and forward pass of its own; only the segment is shared. */
#define _GNU_SOURCE
#include "forward_group.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct rank_thread {
    struct forward_group *group;
    int rank;
    struct segment *segment;
    struct engine_comm_shape shape;
};

static void no_beat(void *ctx) { (void)ctx; }
static void no_layer(void *ctx, int layer, float *x_dev, int rows) { (void)ctx, (void)layer, (void)x_dev, (void)rows; }

static enum rc run_body(struct forward_group *g, const struct model_bind_options *bind, const struct partition *partition,
                        struct comm *comm, struct err *e)
{
    struct model_weights weights;
    struct model_forward *forward = NULL;
    enum rc rc = model_bind(bind, &weights, e);
    if (rc != RC_OK) return rc;
    const struct model_forward_options o = {
        .config = bind->config,
        .partition = partition,
        .weights = &weights,
        .kern = bind->kern,
        .comm = comm,
        .context = g->context,
        .max_rows = g->max_rows,
        .max_picks = g->max_rows,
        .kv_pages = g->kv_pages,
        .kv = g->kv,
        .slots = g->slots,
        .mtp = g->mtp,
        .max_drafts = g->max_drafts,
        .on_layer = no_layer,
    };
    rc = model_forward_open(&o, &forward, e);
    if (rc == RC_OK) rc = g->body(&(struct forward_rank){comm->rank, bind->config, &weights, forward, bind->kern, g->ctx}, e);
    model_forward_close(forward);
    model_bind_free(&weights);
    return rc;
}

static void *rank_body(void *argument)
{
    struct rank_thread *t = argument;
    struct forward_group *g = t->group;
    struct err *e = &g->err[t->rank];
    struct model_file *file = NULL;
    struct model_config config;
    struct partition partition;
    struct kern *kern = NULL;
    struct comm *comm = NULL;
    enum rc rc = model_file_open(g->model_path, &file, e);
    if (rc == RC_OK) rc = model_config_read(file, &config, e);
    if (rc == RC_OK) rc = partition_make(&config, g->ranks, PARTITION_FFN_STEP, &partition, e);
    const struct group_backend_options b = {g->backend, g->isa, g->threads ? g->threads : 1, t->rank, g->ranks, t->segment,
                                            t->shape};
    const uint64_t replays = group_backend_replays();
    if (rc == RC_OK) rc = group_backend_open(&b, &kern, &comm, e);
    if (rc == RC_OK) {
        const struct model_bind_options bind = {.file = file, .config = &config, .part = &partition.part[t->rank],
                                                .how = g->weights, .mtp = g->mtp, .kern = kern, .beat = no_beat};
        rc = run_body(g, &bind, &partition, comm, e);
    }
    if (t->rank == 0) g->replays = group_backend_replays() - replays;
    if (rc != RC_OK && comm) comm->abort(comm, e->text);
    if (comm) comm->close(comm);
    if (kern) kern->close(kern);
    model_file_close(file);
    return NULL;
}

/* The largest collectives: all rows of the residual stream, and of the logits. */
static bool shape_of(struct forward_group *g, struct engine_comm_shape *out)
{
    struct model_file *file = NULL;
    struct model_config config = {0};
    enum rc rc = model_file_open(g->model_path, &file, &g->err[0]);
    if (rc == RC_OK) rc = model_config_read(file, &config, &g->err[0]);
    model_file_close(file);
    *out = (struct engine_comm_shape){g->max_rows, config.hidden, (size_t)g->max_rows * (size_t)config.vocab};
    return rc == RC_OK;
}

bool forward_group_run(struct forward_group *g)
{
    pthread_t threads[MAX_RANKS];
    struct rank_thread ranks[MAX_RANKS];
    memset(g->err, 0, sizeof g->err);
    struct engine_comm_shape shape;
    if (!shape_of(g, &shape)) return false;
    const size_t comm_bytes = engine_comm_bytes(shape);
    size_t n_bytes = (segment_bytes(g->ranks, comm_bytes) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, n_bytes);
    memset(memory, 0, n_bytes);
    struct lockstep_bounds bounds = lockstep_bounds_default();
    segment_init(memory, g->ranks, comm_bytes, &bounds);
    struct segment *segment = segment_attach(memory, n_bytes, g->ranks, &g->err[0]);
    for (int r = 0; r < g->ranks && segment; r++) {
        ranks[r] = (struct rank_thread){g, r, segment, shape};
        pthread_create(&threads[r], NULL, rank_body, &ranks[r]);
    }
    for (int r = 0; r < g->ranks && segment; r++) pthread_join(threads[r], NULL);
    free(memory);
    bool ok = segment != NULL;
    for (int r = 0; r < g->ranks; r++) ok &= g->err[r].rc == RC_OK;
    return ok;
}
