/* job_result: the records that a finished job leaves, as compact JSON lines without line end.
 *
 * output.jsonl and error.jsonl hold the OpenAI batch shape (id, custom_id, response, error, all four always present);
 * timing.jsonl holds one record per job, successful or not, integers only. Schemas in schemas/. */
#ifndef TANDEM_JOB_RESULT_H
#define TANDEM_JOB_RESULT_H

#include "base.h"
#include "job_spec.h"

/* What timing.jsonl says. Times in microseconds. */
struct job_timing {
    int64_t queue_us, tokenize_us, prefill_us, ttft_us, decode_us;
    int64_t tpot_us; /* decode_us / (completion_tokens - 1), of this same request; 0 with fewer than two tokens */
    int64_t prompt_tokens, cached_tokens, completion_tokens;
    int64_t resumed_tokens; /* positions that its last attempt took from its checkpoint; times are those of all its attempts */
    int64_t steps, preemptions, attempts, rank_restarts;
    int64_t rounds, drafted, accepted; /* decode rounds; draft tokens that they verified; those that were right */
    int64_t sequences_in_step; /* most jobs that shared a step with this one, itself included */
    int64_t group;
};

struct job_answer {
    const char *text; /* valid UTF-8 */
    size_t text_len;
    const char *finish_reason; /* "stop", "length" */
    int64_t prompt_tokens, cached_tokens, completion_tokens;
    const char *model;         /* echoed: what the job asked for, or the model's name */
    int64_t created;           /* UNIX seconds; a fixed value gives reproducible records */
    const uint64_t *trace;     /* [n_trace][2] or NULL: written as body.tandem_trace, hex strings "hidden:logits" */
    size_t n_trace;
};

/* id of the record: "batch_req_" + 24 hex digits of the job's key, so one state always gives the same bytes. */
enum rc job_result_success(const unsigned char key[32], const struct job_spec *s, const struct job_answer *a,
                           struct buf *out, struct err *e);
enum rc job_result_failure(const unsigned char key[32], const char *custom_id, const struct job_fault *f, struct buf *out,
                           struct err *e);
enum rc job_result_timing(const char *custom_id, int status, const struct job_timing *t, struct buf *out, struct err *e);

#endif
