/* engine_group: each thread opens backend, comm and engine of its own, as a rank process does; only the segment is shared. */
#define _GNU_SOURCE
#include "engine_group.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_store.h"

struct engine_thread {
    struct engine_group *group;
    int rank;
    struct segment *segment;
    struct engine_comm_shape shape;
    const struct engine_request *requests;
    size_t n;
    struct engine_group_result *results;
};

static void *copied(const void *bytes, size_t n_bytes)
{
    void *out = bytes ? malloc(n_bytes + 1) : NULL;
    if (!out) return NULL;
    memcpy(out, bytes, n_bytes);
    ((char *)out)[n_bytes] = '\0';
    return out;
}

static void collect(struct engine_thread *t, struct engine *engine)
{
    struct engine_event event;
    while (engine_next_event(engine, &event))
        for (size_t i = 0; i < t->n; i++) {
            if (t->requests[i].id != event.id) continue;
            t->results[i] = (struct engine_group_result){
                .kind = event.kind,
                .finish = event.finish,
                .tokens = copied(event.tokens, event.n_tokens * sizeof *event.tokens),
                .n_tokens = event.n_tokens,
                .trace = copied(event.trace, event.n_tokens * 2 * sizeof *event.trace),
                .text = copied(event.text, event.text_len),
                .timing = event.timing,
            };
        }
}

static enum rc submit_all(const struct engine_thread *t, struct engine *engine, struct err *err)
{
    enum rc rc = RC_OK;
    for (size_t i = 0; i < t->n && rc == RC_OK; i++) rc = engine_submit(engine, &t->requests[i], err);
    return rc;
}

static enum rc open_checkpoints(const struct engine_thread *t, struct engine *engine, struct checkpoint_store **out, struct err *err)
{
    const struct engine_prefix_shape shape = engine_prefix_shape_of(engine);
    struct checkpoint_store_options o = {.folder = t->group->checkpoints, .rank = t->rank, .page_bytes = shape.block_bytes};
    if (!o.folder) return RC_OK;
    memcpy(o.fingerprint.bytes, &shape.seed, sizeof shape.seed);
    enum rc rc = checkpoint_store_open(&o, out, err);
    if (rc == RC_OK) engine_use_checkpoints(engine, *out);
    return rc;
}

static enum rc run_steps(struct engine_thread *t, struct engine *engine, struct err *err)
{
    struct engine_group *g = t->group;
    enum rc rc = RC_OK;
    uint64_t id;
    int position;
    while (rc == RC_OK && engine_busy(engine) && !g->stopped) {
        const uint64_t steps = engine_stats_of(engine).steps;
        if (g->leave_step && steps == g->leave_step) break;
        if (t->rank == 0 && g->stop_step && steps == g->stop_step) engine_stop(engine);
        if (t->rank == 0 && engine_stopped(engine)) g->stopped = true;
        if (g->stopped) break;
        rc = engine_step(engine, err);
        if (rc == RC_RETRY) rc = RC_OK;
        else if (rc == RC_OK && t->rank == 0) collect(t, engine);
        while (t->rank == 0 && engine_next_saved(engine, &id, &position)) g->saved++;
    }
    return rc;
}

static void *rank_body(void *argument)
{
    struct engine_thread *t = argument;
    struct err *err = &t->group->err[t->rank];
    struct engine_options o = t->group->options;
    struct kern *kern = NULL;
    struct comm *comm = NULL;
    struct engine *engine = NULL;
    struct checkpoint_store *checkpoints = NULL;
    o.rank = t->rank;
    const struct group_backend_options b = {t->group->backend, t->group->isa, t->group->threads, t->rank, o.ranks, t->segment,
                                            t->shape};
    const uint64_t replays = group_backend_replays();
    enum rc rc = group_backend_open(&b, &kern, &comm, err);
    if (rc == RC_OK) rc = engine_open(&o, kern, comm, t->segment, &engine, err);
    if (rc == RC_OK) rc = open_checkpoints(t, engine, &checkpoints, err);
    if (rc == RC_OK) rc = submit_all(t, engine, err);
    if (rc == RC_OK) rc = run_steps(t, engine, err);
    if (rc != RC_OK && comm) comm->abort(comm, err->text);
    if (t->rank == 0 && engine) t->group->stats = engine_stats_of(engine);
    if (t->rank == 0) t->group->replays = group_backend_replays() - replays;
    engine_close(engine);
    checkpoint_store_close(checkpoints);
    if (comm) comm->close(comm);
    if (kern) kern->close(kern);
    return NULL;
}

bool engine_group_run(struct engine_group *g, const struct engine_request *requests, size_t n,
                      struct engine_group_result *results)
{
    pthread_t threads[MAX_RANKS];
    struct engine_thread ranks[MAX_RANKS];
    struct engine_comm_shape shape;
    memset(g->err, 0, sizeof g->err);
    g->stopped = false;
    g->saved = 0;
    memset(results, 0, n * sizeof *results);
    if (engine_comm_shape(&g->options, &shape, &g->err[0]) != RC_OK) return false;
    size_t comm_bytes = engine_comm_bytes(shape);
    size_t n_bytes = (segment_bytes(g->options.ranks, comm_bytes) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, n_bytes);
    memset(memory, 0, n_bytes);
    segment_init(memory, g->options.ranks, comm_bytes, &g->bounds);
    struct segment *segment = segment_attach(memory, n_bytes, g->options.ranks, &g->err[0]);
    bool ok = segment != NULL;
    for (int r = 0; r < g->options.ranks && segment; r++) {
        ranks[r] = (struct engine_thread){g, r, segment, shape, requests, n, results};
        pthread_create(&threads[r], NULL, rank_body, &ranks[r]);
    }
    for (int r = 0; r < g->options.ranks && segment; r++) {
        pthread_join(threads[r], NULL);
        ok &= g->err[r].rc == RC_OK;
    }
    free(memory);
    return ok;
}

void engine_group_free(struct engine_group_result *results, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(results[i].tokens);
        free(results[i].trace);
        free(results[i].text);
    }
}
