/* sequence: one request inside an engine, from submission to retirement. Engine-private.
 *
 * Every rank holds the same sequence with the same tokens; text, stop strings and timing are rank 0's. */
#ifndef TANDEM_SEQUENCE_H
#define TANDEM_SEQUENCE_H

#include "checkpoint_store.h"
#include "draft.h"
#include "engine.h"
#include "prefix_store.h"
#include "step_plan.h"
#include "tokenizer.h"

struct sequence {
    uint64_t id;
    enum plan_state state;
    bool retire;          /* rank 0: the next plan retires it */
    bool failed;          /* its logits were not finite; takes no further rows */
    int64_t admitted;     /* order of first admission; 0 while queued */
    int32_t *tokens;      /* prompt, then sampled tokens; room for prompt_tokens + max_tokens */
    int prompt_tokens, max_tokens;
    int branch;           /* a multiple of 64 up to which a request that is not here yet begins alike; 0: none is known */
    int sampled;          /* tokens sampled so far, the same on every rank */
    int answered;         /* rank 0: those of the answer; fewer when a stop string ended it within a round */
    int computed;         /* positions whose KV is stored; while queued: that its checkpoint or hit holds */
    uint64_t token_chain; /* chained hash of prompt and sampled tokens */
    struct sampling sampling;
    struct token_counts counts;
    bool ignore_end;
    int slot;             /* RUNNING: its slot in model_forward */
    int32_t *pages;       /* block table, room for the whole request */
    int n_pages;          /* kv_pages_for(computed) between steps */
    char *saved;          /* PREEMPTED, QUEUED with a checkpoint or a hit: n_pages pages, then the slot */
    bool probed;          /* the stores were asked */
    bool keyed, resume, cold; /* it has a key; may have a checkpoint; uses nothing that was kept */
    unsigned char key[CHECKPOINT_KEY_BYTES];
    struct checkpoint *checkpoint; /* from its first save, or from probing; NULL: none */
    int saved_pages, saved_position; /* in the checkpoint or on the way there; 0: no point */
    uint64_t saved_step;             /* of its last point */
    int durable_position, told_position; /* rank 0: of the last point that all ranks have; that the owner was told of */
    struct prefix_key *keys; /* rank 0, where prefixes are used: of the prompt's whole blocks */
    struct draft_index index; /* of its tokens, from its admission on, where n-grams are used */
    struct draft_rates rates; /* rank 0 */
    int matched;              /* rank 0: common past of the n-gram drafts planned */
    int idle[DRAFT_KINDS];    /* rank 0: rounds since as many such drafts as possible were made, or one more than seemed best */
    uint64_t *trace;      /* [max_tokens][2] or NULL */
    char **stop;
    int n_stop;
    size_t longest_stop;
    struct buf bytes;     /* decoded so far */
    struct buf text;      /* what is reported */
    enum finish_reason finish;
    struct engine_timing timing;
    int64_t submitted_us, first_row_us, first_token_us;
    struct sequence *next; /* in order of submission */
};

/* Copies the request. RC_FATAL: out of memory. Free with sequence_free. */
enum rc sequence_open(const struct engine_request *r, bool trace, struct sequence **out, struct err *e);
void sequence_free(struct sequence *s);

/* Counts a token for the penalties of those after it: within a round, when the next row's logits are due. */
enum rc sequence_count(struct sequence *s, int32_t token, struct err *e);
/* Appends a sampled token to what every rank knows. */
void sequence_append(struct sequence *s, int32_t token);

/* Rank 0, after sequence_append: takes the token into the answer, decodes it, looks for the end (end token, stop string,
 * length). True when the sequence is finished: finish and text are set, and later tokens of the round are no part of it. Out of
 * memory ends in e. */
bool sequence_finish_check(struct sequence *s, const struct tokenizer *t, struct err *e);

#endif
