/* fake_engine: a stand-in for engine.h and rank_identity, for tests of processes and frames without a model.
 *
 * It keeps the engine's manners: rank 0 plans, the others read the plan, all compare through the real lockstep. A step ends
 * the oldest request, whose answer is "ID:SUM of the prompt's ids"; FAKE_ENDLESS ends by being cancelled alone. Another first
 * prompt id from `enum fake_fault` makes rank prompt[1] misbehave in that step. What opening does is chosen by the model's
 * name. Include it in one file of a test program, whose main hands "rank" to rank_main. */
#ifndef TANDEM_FAKE_ENGINE_H
#define TANDEM_FAKE_ENGINE_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine.h"
#include "rank_main.h"

enum fake_fault { FAKE_KILL = 900, FAKE_EXIT, FAKE_STOP, FAKE_HANG, FAKE_DIFFER, FAKE_REFUSE, FAKE_FAIL, FAKE_ENDLESS, FAKE_DISK };
#define FAKE_IDENTITY "version=1\nmodel=fake\nranks=any\n"

struct fake_request {
    uint64_t id;
    int64_t sum, fault, fault_rank;
    bool cancelled;
    int position;
};

struct engine {
    int rank;
    struct segment *segment;
    struct fake_request queue[64];
    int n_queue;
    uint64_t step, tokens;
    struct fake_request ended;
    bool has_event, stopping;
    char text[64];
    int32_t token;
};

enum rc rank_identity(const struct options *o, int rank, struct buf *out, struct err *e)
{
    (void)o;
    (void)rank;
    buf_clear(out);
    return buf_append_str(out, FAKE_IDENTITY) ? RC_OK : err_no_memory(e);
}

enum rc engine_comm_shape(const struct engine_options *o, struct engine_comm_shape *out, struct err *e)
{
    (void)o;
    (void)e;
    *out = (struct engine_comm_shape){.max_rows = 16, .width = 64};
    return RC_OK;
}

enum rc engine_open(const struct engine_options *o, struct kern *kern, struct comm *comm, struct segment *segment,
                    struct engine **out, struct err *e)
{
    (void)kern;
    (void)comm;
    if (!strcmp(o->model_path, "fake-config"))
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "context_too_long", "context %d is too long", o->context);
    if (!strcmp(o->model_path, "fake-disk"))
        return err_set(e, RC_FATAL, EXIT_IO, "store_disk_full", "the cache: cannot write a file");
    if (!strcmp(o->model_path, "fake-hang-load") && o->rank == o->ranks - 1)
        for (;;) pause();
    if (!strcmp(o->model_path, "fake-die-load")) _exit(7);
    struct engine *n = calloc(1, sizeof *n);
    if (!n) return err_no_memory(e);
    n->rank = o->rank;
    n->segment = segment;
    *out = n;
    return RC_OK;
}

void engine_close(struct engine *e) { free(e); }

struct engine_sizes engine_sizes_of(const struct engine *e)
{
    (void)e;
    return (struct engine_sizes){.limits = {1000, 100, 4096}, .weight_bytes = 11, .kv_bytes = 22, .partition_digest = 33};
}

struct engine_prefix_shape engine_prefix_shape_of(const struct engine *e)
{
    (void)e;
    return (struct engine_prefix_shape){0};
}

void engine_use_prefixes(struct engine *e, struct prefix_store *s) { (void)e, (void)s; }
void engine_use_checkpoints(struct engine *e, struct checkpoint_store *s) { (void)e, (void)s; }
void engine_stop(struct engine *e) { e->stopping = true; }
bool engine_stopped(const struct engine *e) { return e->stopping; }
bool engine_next_saved(struct engine *e, uint64_t *id, int *position) { return (void)e, (void)id, (void)position, false; }

enum rc engine_limits_plan(const struct engine_options *o, const struct model_file *m, struct engine_limits *out,
                           struct err *e)
{
    (void)o;
    (void)m;
    (void)e;
    *out = (struct engine_limits){1000, 100, 4096};
    return RC_OK;
}

enum rc engine_submit(struct engine *e, const struct engine_request *r, struct err *err)
{
    if (r->prompt[0] == FAKE_REFUSE || e->n_queue == 64)
        return err_set(err, RC_BAD_INPUT, 0, "refused", "request %d is refused", (int)r->id);
    struct fake_request *q = &e->queue[e->n_queue++];
    *q = (struct fake_request){.id = r->id};
    for (size_t i = 0; i < r->prompt_tokens; i++) q->sum += r->prompt[i];
    if (r->prompt_tokens > 1 && r->prompt[0] >= FAKE_KILL) {
        q->fault = r->prompt[0];
        q->fault_rank = r->prompt[1];
    }
    return RC_OK;
}

void engine_cancel(struct engine *e, uint64_t id)
{
    for (int i = 0; i < e->n_queue; i++)
        if (e->queue[i].id == id) e->queue[i].cancelled = true;
}

int engine_position(const struct engine *e, uint64_t id)
{
    for (int i = 0; i < e->n_queue; i++)
        if (e->queue[i].id == id) return e->queue[i].position;
    return 0;
}

bool engine_busy(const struct engine *e) { return e->n_queue > 0; }

static void fake_strike(const struct fake_request *q, int rank)
{
    if (q->fault_rank != rank) return;
    if (q->fault == FAKE_KILL) raise(SIGKILL);
    if (q->fault == FAKE_EXIT) _exit(5);
    if (q->fault == FAKE_STOP) raise(SIGSTOP);
    if (q->fault == FAKE_HANG)
        for (;;) pause();
}

enum rc engine_step(struct engine *e, struct err *err)
{
    uint64_t plan[LOCKSTEP_PLAN_BYTES / 8];
    size_t n = sizeof plan;
    struct fake_request q = e->queue[0];
    e->has_event = false;
    if (e->rank == 0) {
        plan[0] = q.id;
        plan[1] = q.cancelled;
        n = 16;
        lockstep_publish_plan(e->segment, e->step + 1, plan, n);
    } else {
        enum rc rc = lockstep_read_plan(e->segment, e->rank, e->step + 1, 20000, plan, &n, err);
        if (rc != RC_OK) return rc;
        if (plan[0] != q.id)
            return err_set(err, RC_FATAL, EXIT_INTERNAL, "fake_order", "the plan names %d, the queue %d", (int)plan[0],
                           (int)q.id);
    }
    e->step++;
    segment_beat(e->segment, e->rank);
    fake_strike(&q, e->rank);
    if (q.fault == FAKE_DISK && q.fault_rank == e->rank) {
        err_set(err, RC_FATAL, EXIT_IO, "store_disk_full", "the cache: cannot write a file");
        err_place(err, "/cache/rank", 0, 0, 0);
        return RC_FATAL;
    }
    uint64_t differ = q.fault == FAKE_DIFFER && q.fault_rank == e->rank;
    struct lockstep_record record = {.step = e->step, .rows = 1, .tokens = 1, .token_hash = q.id + differ};
    enum rc rc = lockstep_compare(e->segment, e->rank, &record, err);
    if (rc != RC_OK) return rc;
    e->queue[0].position++;
    if (q.fault == FAKE_ENDLESS && !plan[1]) return RC_OK;
    memmove(e->queue, e->queue + 1, (size_t)--e->n_queue * sizeof *e->queue);
    e->ended = q;
    e->has_event = e->rank == 0 && !plan[1];
    e->tokens++;
    return RC_OK;
}

bool engine_next_event(struct engine *e, struct engine_event *out)
{
    if (!e->has_event) return false;
    e->has_event = false;
    int n = snprintf(e->text, sizeof e->text, "%llu:%lld", (unsigned long long)e->ended.id, (long long)e->ended.sum);
    e->token = (int32_t)e->ended.id;
    *out = (struct engine_event){.kind = e->ended.fault == FAKE_FAIL ? ENGINE_EVENT_FAILED : ENGINE_EVENT_DONE,
                                 .id = e->ended.id, .finish = FINISH_STOP, .text = e->text, .text_len = (size_t)n,
                                 .tokens = &e->token, .n_tokens = 1, .prompt_tokens = 1, .timing = {.steps = 1},
                                 .code = "fake_failure", .message = "asked for"};
    return true;
}

struct engine_stats engine_stats_of(const struct engine *e)
{
    return (struct engine_stats){.steps = e->step, .tokens = e->tokens, .max_sequences_in_step = 1};
}

#endif
