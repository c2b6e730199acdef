/* step_plan: what one step does. Pure: sequences, queue and budgets in, actions and segments out.
 *
 * Rank 0 builds a plan before each step and publishes its bytes; every rank carries out exactly those bytes. Nothing in
 * here reads a clock or a queue's length, so the same input always gives the same plan. */
#ifndef TANDEM_STEP_PLAN_H
#define TANDEM_STEP_PLAN_H

#include "base.h"
#include "draft.h"

enum { PLAN_MAX_SEGMENTS = 64, PLAN_MAX_ACTIONS = 256 };

enum plan_action_kind {
    PLAN_RETIRE = 1, /* the request is over: free what it holds */
    PLAN_PREEMPT,    /* save its KV and its slot to host memory and free its pages */
    PLAN_RESTORE,    /* take pages and put back what was saved */
    PLAN_ADMIT,      /* from the queue into the active set; with a checkpoint or a hit: as RESTORE */
    PLAN_PROBE,      /* look for its checkpoint, then for the head of its prompt in the prefix stores; it stays queued */
    PLAN_SAVE        /* its next pages to the checkpoint and, when these are all, a point */
};

enum plan_segment_kind { PLAN_DECODE = 1, PLAN_PREFILL };

/* The structs below are published as bytes: fixed sizes, no padding. */
struct plan_action {
    uint64_t request;
    uint32_t kind; /* enum plan_action_kind */
    uint32_t pages; /* PLAN_SAVE: how many, else 0 */
};
struct plan_segment {
    uint64_t request;
    int32_t position_first;
    int32_t rows;   /* decode: 1 + drafts, and a token is sampled after each */
    int32_t kind;   /* enum plan_segment_kind; decode segments come first */
    int32_t picks;  /* 1: a token is sampled after the last row */
    int16_t drafts; /* 0 .. KERN_MAX_DRAFTS */
    int16_t source; /* enum draft_source; DRAFT_NONE without drafts */
    int32_t keep;   /* 1: prompt rows after which the stores keep what was computed */
};
struct step_plan {
    uint64_t step;
    uint32_t n_actions, n_segments;
    uint64_t check; /* 0 */
    struct plan_action actions[PLAN_MAX_ACTIONS];
    struct plan_segment segments[PLAN_MAX_SEGMENTS];
};

enum plan_state { PLAN_QUEUED, PLAN_RUNNING, PLAN_PREEMPTED };

/* One live request as the planner sees it. */
struct plan_sequence {
    uint64_t request;
    enum plan_state state;
    bool retire;
    int64_t admitted; /* rises with each first admission; orders running and preempted sequences */
    int prompt_tokens;
    int computed;     /* positions whose KV is stored; QUEUED: that a checkpoint or a hit holds */
    int pages;        /* held now; QUEUED, PREEMPTED: needed to restore; always those of `computed` */
    bool held;        /* QUEUED: not to be admitted yet */
    bool probe;       /* QUEUED: to be probed before it is admitted */
    int cut;          /* prompt rows do not pass this position at once and are kept when they reach it, a multiple of 64; 0: none */
    bool save;        /* not QUEUED: to be saved before anything else happens to it */
    int save_pages;
    int drafts;       /* wanted, should its next row be a decode row */
    enum draft_source source;
};

struct plan_input {
    uint64_t step;
    const struct plan_sequence *sequences; /* in order of submission */
    int n_sequences;
    int active;       /* most running sequences, 1..PLAN_MAX_SEGMENTS */
    int prefill_rows; /* prompt rows of a step, a multiple of 64 */
    int pages_free;
    bool hold;        /* nothing but retiring and saving */
};

/* Rules: retired requests go first, then what is saved. Running sequences are served in order of admission, so the oldest always proceeds; one
 * that needs a page when none is free preempts the youngest. Prompt rows are cut at absolute multiples of 64. Preempted
 * sequences come back, oldest first, before anything new is admitted. Drafts get the pages that are left after all of that,
 * oldest sequence first. Returns false when the sequences leave nothing to do. */
bool step_plan_build(const struct plan_input *in, struct step_plan *out);

/* The plan's used bytes, packed for publishing; out holds at least sizeof(struct step_plan). */
size_t step_plan_pack(const struct step_plan *p, void *out);
/* Checks counts, kinds and sizes of what came over the segment. */
enum rc step_plan_unpack(const void *bytes, size_t n_bytes, struct step_plan *out, struct err *e);

#endif
