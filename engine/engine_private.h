/* engine_private: the engine's inside, shared by engine.c (life, requests), engine_step.c (carrying out plans), engine_draft.c
 * (drafts and the MTP layer), engine_prefix.c and engine_checkpoint.c (what is kept on disk) and engine_state.c (what a sequence
 * remembers, as bytes). */
#ifndef TANDEM_ENGINE_PRIVATE_H
#define TANDEM_ENGINE_PRIVATE_H

#include "checkpoint_store.h"
#include "draft.h"
#include "engine.h"
#include "kv_pages.h"
#include "model_bind.h"
#include "model_forward.h"
#include "sequence.h"
#include "step_plan.h"

/* What comes of one segment of the plan. */
struct segment_work {
    struct sequence *sequence;
    int first_pick; /* of the step's picks */
    int tokens;     /* sampled: 0 in the middle of a prompt, else 1 + drafts that were right */
};

/* A batch of the MTP layer in the making. */
struct mtp_work {
    struct kern_segment segments[PLAN_MAX_SEGMENTS];
    int planned[PLAN_MAX_SEGMENTS]; /* index of the plan's segment */
    int picks[PLAN_MAX_SEGMENTS];
    int32_t *tokens; /* [max rows] */
    int *source;     /* [max rows] */
};

struct engine {
    struct engine_options o;
    struct engine_limits limits;
    int seat, ranks;            /* this rank's place in the segment, and how many are there: 1 where its peers are pretended */
    int prefill_rows;           /* prompt rows of a step */
    int drafts;                 /* most drafts of a round, 0: none ever */
    int max_rows, max_picks;    /* of a step */
    bool mtp;                   /* the MTP layer runs */
    bool ngram;                 /* n-gram drafts are made */
    int64_t lockstep_us;        /* bound of waiting for a planned request */
    struct kern *kern;
    struct comm *comm;
    struct segment *segment;
    struct model_file *file;
    struct model_config config;
    struct partition partition;
    struct model_weights weights;
    struct model_forward *forward;
    struct prefix_store *prefixes; /* NULL: none, or it failed */
    struct checkpoint_store *checkpoints; /* NULL: none */
    uint64_t saves, saves_written, saves_durable; /* batches begun, the same on every rank; on this rank's disk; rank 0: on all */
    int64_t save_start_us, save_copy_us;          /* of the last batch */
    int64_t save_due_us, save_answers_due_us;     /* when the next may begin, and when with answers in it */
    size_t save_point_bytes;                      /* points of the last batch */
    bool save_cut, save_answers;                  /* it did not hold all that was due; it holds answers */
    bool stopping;                                /* rank 0: nothing is computed any more, what runs is saved */
    struct tokenizer *tokenizer; /* end tokens and vocabulary size; rank 0 decodes */
    struct kv_pages pages;
    bool slot_used[PLAN_MAX_SEGMENTS];
    void *sampler_scratch;

    struct sequence *sequences; /* live, in order of submission */
    int n_sequences;
    int64_t admissions;
    uint64_t step;              /* the last one done */
    struct engine_stats stats;
    struct draft_rates rates;   /* rank 0: of all sequences */
    struct draft_cost draft_cost;

    bool plan_ready;            /* not rank 0: `plan` is that of step + 1 and waits for a request to arrive */
    int64_t plan_since_us;
    struct step_plan plan;
    char plan_bytes[sizeof(struct step_plan)];
    size_t plan_len;

    struct plan_sequence *plan_input; /* [n_sequences], grown on submit */
    int plan_input_cap;
    int32_t *batch_tokens;            /* [max_rows] */
    struct kern_segment segments[PLAN_MAX_SEGMENTS];
    struct segment_work work[PLAN_MAX_SEGMENTS];
    int *picks;                       /* [max_picks] */
    int32_t *picked_tokens;           /* [max_picks] -1: not finite */
    struct mtp_work mtp_work;

    struct sequence *events[PLAN_MAX_SEGMENTS]; /* rank 0: ended in the last step */
    int n_events, next_event;
};

struct sequence *engine_find(struct engine *e, uint64_t id);
void engine_remove(struct engine *e, struct sequence *s);
/* RC_FATAL: plan and state contradict each other. */
enum rc engine_stuck(struct err *err, const char *what);

/* ---- engine_draft.c ---- */

/* Rank 0: how many drafts the sequence's next round should have, and from where. decoding: sequences that decode with it. */
void engine_draft_want(struct engine *e, struct sequence *s, int decoding, struct plan_sequence *out);
/* Before the target's rows: writes the planned drafts into batch_tokens, those still being computed as model_forward_draft_token, and
 * brings MTP rows up to date where they must be. */
enum rc engine_draft(struct engine *e, struct err *err);
/* After the forward pass: drafts in the first rows of batch_tokens become known. */
void engine_draft_settle(struct engine *e, int rows);
/* Rank 0, after a round: what its drafts were worth. */
void engine_draft_note(struct engine *e, struct sequence *s, const struct plan_segment *p, int accepted);
/* After the commit: the MTP rows of the step's prompt rows, save each segment's last, whose hidden row is kept. */
enum rc engine_mtp_prompt(struct engine *e, struct err *err);
/* What a pass of the MTP layer and the head costs compared with the whole model. */
double engine_mtp_share(const struct model_config *c);

/* ---- engine_step.c ---- */

/* True when a sequence's next token is the largest logit as computed: nothing more is needed of the logits. */
bool engine_takes_best(const struct sequence *s);
/* One token of a sequence for `position`, from its row's best id and, unless engine_takes_best, its logits. -1: they are not finite.
 * Logits are overwritten. */
enum rc engine_pick(struct engine *e, const struct sequence *s, int position, int32_t best, float *logits, int32_t *out,
                    struct err *err);

/* ---- engine_prefix.c; nothing without the prefixes option ---- */

/* After its tokens are there; and before a request leaves in whatever state. */
enum rc engine_prefix_submitted(struct engine *e, struct sequence *s, struct err *err);
enum rc engine_prefix_left(struct engine *e, const struct sequence *s, struct err *err);
/* Rank 0: sets held, probe and cut. */
void engine_prefix_want(const struct engine *e, const struct sequence *s, struct plan_sequence *out);
/* Collective: a queued sequence that has nothing yet gets what all ranks' stores have of its prompt. */
enum rc engine_prefix_probe(struct engine *e, struct sequence *s, struct err *err);
/* Puts what a running sequence has computed into this rank's store. RC_FATAL, EXIT_IO: the disk took no more. */
enum rc engine_prefix_keep(struct engine *e, const struct sequence *s, struct err *err);

/* ---- engine_checkpoint.c; nothing without a store ---- */

/* Before a plan: takes note of what has become durable. RC_FAILED, EXIT_IO: a batch could not be written. */
enum rc engine_checkpoint_poll(struct engine *e, struct err *err);
/* Rank 0: sets save and save_pages of the n entries of plan_input, where a batch is due. */
enum rc engine_checkpoint_want(struct engine *e, int n, struct err *err);
/* All PLAN_SAVE actions of the plan, before the others. */
enum rc engine_checkpoint_save(struct engine *e, struct err *err);
/* Collective: a queued sequence goes on from the last point that all ranks have whole; if there is none it stays as it is. */
enum rc engine_checkpoint_resume(struct engine *e, struct sequence *s, struct err *err);

/* ---- engine_state.c ---- */

/* Bytes of n_pages pages and a slot. */
size_t engine_state_bytes(const struct engine *e, int n_pages);
/* Copies a running sequence's pages and slot out, or into those it has just been given. */
void engine_state_save(struct engine *e, const struct sequence *s, char *out);
void engine_state_load(struct engine *e, const struct sequence *s, const char *bytes);

#endif
