/* engine_private: the engine's inside, shared by engine.c (life, requests) and engine_step.c (carrying out plans). */
#ifndef TANDEM_ENGINE_PRIVATE_H
#define TANDEM_ENGINE_PRIVATE_H

#include "engine.h"
#include "kv_pages.h"
#include "model_bind.h"
#include "model_forward.h"
#include "sequence.h"
#include "step_plan.h"

struct engine {
    struct engine_options o;
    struct engine_limits limits;
    int prefill_rows;           /* prompt rows of a step */
    int64_t lockstep_us;        /* bound of waiting for a planned request */
    struct kern *kern;
    struct comm *comm;
    struct segment *segment;
    struct model_file *file;
    struct model_config config;
    struct partition partition;
    struct model_weights weights;
    struct model_forward *forward;
    struct tokenizer *tokenizer; /* rank 0 decodes; the others need its vocabulary size */
    struct kv_pages pages;
    void *sampler_scratch;

    struct sequence *sequences; /* live, in order of submission */
    int n_sequences;
    int64_t admissions;
    uint64_t step;              /* the last one done */
    struct engine_stats stats;

    bool plan_ready;            /* not rank 0: `plan` is that of step + 1 and waits for a request to arrive */
    int64_t plan_since_us;
    struct step_plan plan;
    char plan_bytes[sizeof(struct step_plan)];
    size_t plan_len;

    struct plan_sequence *plan_input; /* [n_sequences], grown on submit */
    int plan_input_cap;
    int32_t *batch_tokens;            /* [max rows] */
    struct kern_segment segments[PLAN_MAX_SEGMENTS];
    struct sequence *segment_sequences[PLAN_MAX_SEGMENTS];
    int picks[PLAN_MAX_SEGMENTS];
    int32_t picked_tokens[PLAN_MAX_SEGMENTS]; /* -1: not finite */

    struct sequence *events[PLAN_MAX_SEGMENTS]; /* rank 0: ended in the last step */
    int n_events, next_event;
};

struct sequence *engine_find(struct engine *e, uint64_t id);
void engine_remove(struct engine *e, struct sequence *s);

#endif
