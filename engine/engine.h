/* engine: one rank's view of the world. Tokens from requests.
 *
 * Two nouns. An *engine* owns one rank's share of one model, its KV pages and its active sequences. A *request* is a prompt
 * of token ids with sampling rules; it belongs to the engine from engine_submit until a plan retires it.
 *
 * Every rank of a group is given the same requests in the same order. Rank 0 decides what a step does, all ranks do it and
 * compare before anything of it counts (lockstep.h). Only rank 0 yields events. One thread calls an engine. */
#ifndef TANDEM_ENGINE_H
#define TANDEM_ENGINE_H

#include "base.h"
#include "comm.h"
#include "kern.h"
#include "lockstep.h"
#include "model_file.h"
#include "sampler.h"

struct engine;

enum fault_kind { FAULT_NONE, FAULT_EXIT, FAULT_KILL, FAULT_STOP, FAULT_HANG, FAULT_TOKEN, FAULT_STATE, FAULT_PLAN };
/* --fault RANK:KIND@STEP, a test option: this rank does KIND once, in step STEP. */
struct fault {
    enum fault_kind kind;
    int rank;
    uint64_t step;
};
/* "1:token@12". RC_BAD_INPUT, EXIT_USAGE. */
enum rc fault_parse(const char *text, struct fault *out, struct err *e);

/* Where drafts come from. They never change an answer, only its speed. */
enum spec_mode {
    SPEC_AUTO,  /* n-gram or the MTP layer, whichever pays, as many as pay, or none */
    SPEC_MTP,   /* always as many as allowed */
    SPEC_NGRAM, /* n-gram, as many as pay */
    SPEC_OFF,
    SPEC_MODES
};
const char *spec_mode_name(enum spec_mode m); /* "auto" */
bool spec_mode_parse(const char *name, enum spec_mode *out);

enum { ENGINE_PREFILL_ROWS = 512, ENGINE_DRAFTS = 3 };

struct engine_options {
    const char *model_path;
    int rank, ranks;
    bool solo;               /* benchmarks: this rank computes its share alone. The segment is of one rank, the comm pretends the
                                others */
    int active;              /* sequences computed at once, 1..64 */
    int context;             /* longest sequence, tokens; 0: the model's */
    int64_t kv_tokens;       /* KV capacity in tokens over all sequences, 0: active * context */
    enum kv_format kv;
    enum kern_weights weights;
    int prefill_rows;        /* prompt rows of a step, a multiple of 64; 0: ENGINE_PREFILL_ROWS */
    enum spec_mode spec;     /* SPEC_MTP: RC_BAD_INPUT, EXIT_CONFIG where the model has no MTP layer */
    int drafts;              /* most drafts of a round, 1..KERN_MAX_DRAFTS; 0: ENGINE_DRAFTS */
    bool trace;              /* keep hashes of hidden rows and logits per generated token */
    int64_t checkpoint_us;   /* longest time between saves of what runs; 0: nothing is saved. The same on all ranks. See
                                engine_use_checkpoints */
    bool prefixes;           /* heads of prompts are shared through prefix stores; the same on all ranks. See engine_use_prefixes */
    struct fault fault;      /* FAULT_NONE: no */
};

struct engine_limits {
    int context;             /* longest prompt + generated tokens of one request */
    int vocab;
    int64_t kv_tokens;       /* KV capacity over all sequences, a multiple of KV_PAGE_TOKENS */
};
/* What an engine opened with these options will hold, from the model's header alone. EXIT_CONFIG: out of range. */
enum rc engine_limits_plan(const struct engine_options *o, const struct model_file *m, struct engine_limits *out,
                           struct err *e);

/* The largest sum and gather of an engine of these options, from the model's header. */
struct engine_comm_shape {
    int max_rows, width;      /* of a sum */
    size_t max_gather_floats; /* one rank's part of a gather */
};
enum rc engine_comm_shape(const struct engine_options *o, struct engine_comm_shape *out, struct err *e);
static inline size_t engine_comm_bytes(struct engine_comm_shape s)
{
    const size_t sum = (size_t)s.max_rows * (size_t)s.width;
    return (sum > s.max_gather_floats ? sum : s.max_gather_floats) * sizeof(float);
}

/* kern, comm and segment outlive the engine. Errors carry EXIT_UNAVAILABLE or EXIT_CONFIG. */
enum rc engine_open(const struct engine_options *o, struct kern *kern, struct comm *comm, struct segment *segment,
                    struct engine **out, struct err *e);
void engine_close(struct engine *e);

struct engine_sizes {
    struct engine_limits limits;
    size_t weight_bytes, kv_bytes, state_bytes; /* of this rank */
    /* What a decode step reads of it, by the operation that reads it; of the MTP layer with each pass. */
    struct engine_step_bytes {
        size_t linear, swiglu, partial;     /* weights: projections and head; gate and up; outputs of mixers and MLPs */
        size_t kv_token;                    /* keys and values of a position, all layers */
        size_t state;                       /* recurrent state of a sequence, read and written */
    } step, mtp_pass;
    uint64_t partition_digest;
};
struct engine_sizes engine_sizes_of(const struct engine *e);

struct engine_request {
    uint64_t id;             /* unique among live requests; not 0 */
    const int32_t *prompt;   /* copied; ids checked against the vocabulary */
    size_t prompt_tokens;    /* >= 1 */
    int max_tokens;          /* >= 1; prompt_tokens + max_tokens <= context */
    struct sampling sampling;
    const char *const *stop; /* copied; not empty strings */
    int n_stop;              /* 0..16 */
    bool ignore_end;         /* benchmarks: end tokens do not end it */
    unsigned char key[32];   /* names its checkpoint, of any run; zeros: it has none */
    size_t branch_tokens;    /* of the prompt, that a later request is known to begin with; 0: none is known */
    bool resume;             /* an earlier attempt may have left a checkpoint: go on from it */
    bool cold;               /* compute all of it: no checkpoint is read, no head of another prompt used */
};
/* RC_BAD_INPUT when the request breaks a rule above. */
enum rc engine_submit(struct engine *e, const struct engine_request *r, struct err *err);
/* Rank 0 only: the next plan retires it and no event follows. Unknown ids are ignored. */
void engine_cancel(struct engine *e, uint64_t id);

/* Positions computed so far of a running request, 0 for any other. */
int engine_position(const struct engine *e, uint64_t id);

/* With the prefixes option: what heads of prompts are kept in and found in from now on; NULL: this rank does not take part (then nobody
 * hits). Outlives the engine, whose seed it has to be opened with: everything but weights, tokenizer and kernels that decides what
 * the bytes mean. */
struct prefix_store;
struct engine_prefix_shape {
    size_t block_bytes, state_bytes; /* of 64 positions; at one position. 0: none */
    uint64_t seed;
};
struct engine_prefix_shape engine_prefix_shape_of(const struct engine *e);
void engine_use_prefixes(struct engine *e, struct prefix_store *s);

/* With checkpoint_us, before the first request: where what requests with a key have so far is kept while they run, and read when they come
 * again. Outlives the engine; its shapes and fingerprint are those of prefixes. */
struct checkpoint_store;
void engine_use_checkpoints(struct engine *e, struct checkpoint_store *s);
/* Rank 0 only: from now on nothing is computed; steps save what runs. engine_stopped: all of it is on every rank's disk, there is
 * nothing left to do. */
void engine_stop(struct engine *e);
bool engine_stopped(const struct engine *e);
/* Rank 0: a request whose checkpoint holds more than it said last, on every rank's disk. False: no more. */
bool engine_next_saved(struct engine *e, uint64_t *id, int *position);

/* True while a submitted request is not retired. The same on every rank between steps. */
bool engine_busy(const struct engine *e);
/* Runs one step. RC_RETRY: no plan yet, or it names a request that has not been submitted here; on rank 0, stopping: what is to be
 * saved is on its way to the disk. Look at the socket and call again. RC_FATAL or RC_FAILED: the rank must exit with err->exit_status. */
enum rc engine_step(struct engine *e, struct err *err);

enum engine_event_kind { ENGINE_EVENT_DONE, ENGINE_EVENT_FAILED };
enum finish_reason { FINISH_STOP, FINISH_LENGTH };

struct engine_timing {
    int64_t queue_us;   /* submit to first prefill row */
    int64_t prefill_us; /* first prefill row to the end of the step that computed the last prompt row */
    int64_t ttft_us;    /* submit to first token */
    int64_t decode_us;  /* first token to last */
    int64_t steps;      /* steps this request had rows in */
    int64_t rounds;     /* decode rounds: steps that sampled after the first token */
    int64_t drafted, accepted; /* draft tokens verified, and those that were right */
    int64_t preemptions;
    int64_t max_in_step; /* most sequences that shared a step with it, itself included */
    int64_t cached_tokens; /* of the prompt, that came from the prefix store */
    int64_t resumed_tokens; /* positions that came from its checkpoint when it was submitted last */
};

struct engine_event {
    enum engine_event_kind kind;
    uint64_t id;
    enum finish_reason finish; /* DONE */
    const char *text;          /* DONE: valid UTF-8, cut before the stop string; until the next call of engine_step */
    size_t text_len;
    const int32_t *tokens;     /* DONE: all sampled tokens, the end token included */
    size_t n_tokens;
    const uint64_t *trace;     /* DONE with trace: [n_tokens][2]: hash of the final hidden row, hash of the logits; or NULL */
    size_t prompt_tokens;
    struct engine_timing timing;
    const char *code;          /* FAILED: "non_finite_logits" */
    const char *message;
};
/* Rank 0. False: no more. Pointers live until the next engine_step or engine_close. */
bool engine_next_event(struct engine *e, struct engine_event *out);

/* Since the engine was opened; what progress is reported from. */
struct engine_stats {
    uint64_t steps, prefill_rows, decode_rows, preemptions;
    uint64_t tokens; /* sampled */
    uint64_t drafted, accepted;
    uint64_t restored_rows; /* prompt rows that came from checkpoints and prefix stores */
    int max_sequences_in_step;
};
struct engine_stats engine_stats_of(const struct engine *e);

#endif
