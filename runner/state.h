/* state: what survives. One LMDB environment per state folder, durable commits, schema version, one lock.
 *
 * Tables: meta (schema version, state id, identity parts, input digest, counts), jobs (order -> registration), pins (line
 * -> document digests), results (key -> records), attempts (key -> counts). A job is identified by its key: SHA-256
 * over the numerics identity, custom_id, canonical body and document digests. Results stay when a job file changes;
 * registration says which of them the present files ask for. Every value carries its own checksum (XXH3-64); a value
 * that fails it, or a truncated file, is EXIT_IO, never a wrong answer. */
#ifndef TANDEM_STATE_H
#define TANDEM_STATE_H

#include "base.h"

enum { STATE_KEY_BYTES = 32, STATE_ID_CHARS = 32 };

struct state;
enum state_mode {
    STATE_WRITE,         /* creates the folder; exclusive lock, EXIT_RESUMABLE when another process holds it */
    STATE_READ,          /* must exist (EXIT_NO_INPUT); no lock, may run beside a writer */
    STATE_CHANGE,        /* as STATE_WRITE, of a state that exists (EXIT_NO_INPUT) */
    STATE_ON_NETWORK = 4 /* added to one of these: a network file system is no reason to refuse (EXIT_CONFIG) */
};
enum rc state_open(const char *folder, enum state_mode mode, struct state **out, struct err *e);
/* As state_open with the first size of the map, for tests of its growth; 0: the default. */
enum rc state_open_sized(const char *folder, enum state_mode mode, size_t map_bytes, struct state **out, struct err *e);
void state_close(struct state *s);
/* There is something in folder that looks like a state: state_open finds out whether it is one. */
bool state_is_there(const char *folder);
/* 32 hex digits drawn when the state was made: what archives name as their origin. */
const char *state_id(const struct state *s);
/* Between the two, all reads through s see one moment, whatever a writer in another process does; s itself must not
 * write. */
enum rc state_snapshot(struct state *s, struct err *e);
void state_snapshot_end(struct state *s);

/* identity: lines "name=value\n" in a fixed order. Stored on first use; RC_BAD_INPUT, EXIT_CONFIG with the name and
 * both values of the first part that differs from what is stored. */
enum rc state_bind_identity(struct state *s, const char *identity, struct err *e);
enum rc state_identity(struct state *s, struct buf *out, struct err *e);

/* One registered job. What it points to is copied on registration. */
struct state_job {
    unsigned char key[STATE_KEY_BYTES];
    const char *custom_id;
    const char *source;             /* job file, as given */
    int64_t line;
    unsigned char line_digest[32];  /* SHA-256 of the line's bytes */
    const void *document_digests;   /* pinned, n * 32 bytes, in order of appearance */
    size_t document_digests_bytes;
};
/* Jobs one after the other, so that a million of them need no memory. at(ctx, i, out) may be asked again. */
struct state_job_list {
    size_t n;
    void (*at)(const void *ctx, size_t i, struct state_job *out);
    const void *ctx;
};
/* Replaces the registration by jobs, in order, in one transaction; input_digest: over all job files. */
enum rc state_register(struct state *s, const struct state_job_list *jobs, const unsigned char input_digest[32],
                       struct err *e);
size_t state_job_count(struct state *s);
/* Copies into scratch; out points into it. RC_FAILED "no_such_job" when i is past the end. */
enum rc state_job_at(struct state *s, size_t i, struct buf *scratch, struct state_job *out, struct err *e);
/* The registration of a job as it was before this run's state_register, looked up by line digest and custom_id: its
 * pinned document digests count, not the files' present ones. RC_RETRY: none. */
enum rc state_pinned(struct state *s, const char *custom_id, const unsigned char line_digest[32], struct buf *digests,
                     struct err *e);
enum rc state_input_digest(struct state *s, unsigned char out[32], struct err *e);

enum state_result_kind { STATE_OUTPUT, STATE_ERROR };
struct state_result {
    enum state_result_kind kind;
    const char *record; /* one line of output.jsonl or error.jsonl, without line end */
    size_t record_len;
    const char *timing; /* one line of timing.jsonl */
    size_t timing_len;
    int64_t prompt_tokens, cached_tokens, completion_tokens; /* what timing says, for the counts */
    uint64_t settled;   /* results in the order in which they were put have rising numbers; given by the state */
};
/* Of a registered job. Committed and fsynced on return. EXIT_IO: disk full or I/O error; nothing was written. */
enum rc state_put_result(struct state *s, const unsigned char key[32], const struct state_result *r, struct err *e);
/* RC_RETRY: none. Copies into scratch; out points into it. */
enum rc state_get_result(struct state *s, const unsigned char key[32], struct buf *scratch, struct state_result *out,
                         struct err *e);
/* What kind of result there is, without its records. RC_RETRY: none. */
enum rc state_result_kind(struct state *s, const unsigned char key[32], enum state_result_kind *out, struct err *e);
/* Its number in the order of settling; 0: there is none. */
enum rc state_result_settled(struct state *s, const unsigned char key[32], uint64_t *out, struct err *e);

struct state_attempts {
    int64_t attempts;      /* dispatches */
    int64_t failures;      /* deaths, hangs, mismatches of ranks, deaths of the runner while it ran; success and progress clear */
    int64_t rank_restarts; /* of its group while it ran */
    int64_t failed_position; /* furthest checkpoint at a failure: beyond it, failures are counted anew */
    bool running;          /* dispatched and not ended: the runner died if this is found at start */
};
/* Of a registered job. */
enum rc state_put_attempts(struct state *s, const unsigned char key[32], const struct state_attempts *a, struct err *e);
enum rc state_get_attempts(struct state *s, const unsigned char key[32], struct state_attempts *out, struct err *e);

/* Takes the results and attempts of n registered keys, one behind the other, out of the state: all or none. */
enum rc state_forget(struct state *s, const unsigned char *keys, size_t n, struct err *e);

/* Of the registered jobs. Kept up to date by every change, so that reading them does not depend on their number. */
struct state_counts {
    size_t jobs, done, failed, pending;
    int64_t prompt_tokens, cached_tokens, completion_tokens; /* of the results */
    int64_t attempts, rank_restarts;
};
enum rc state_count(struct state *s, struct state_counts *out, struct err *e);
/* The same of a state that is not open, at once, also beside a run: only the counts are checked, in a child that may die of
 * damage. mode: STATE_READ, perhaps with STATE_ON_NETWORK. id: of STATE_ID_CHARS and a NUL. Errors as of state_open. */
enum rc state_peek(const char *folder, enum state_mode mode, struct state_counts *out, char id[STATE_ID_CHARS + 1], struct err *e);

#endif
