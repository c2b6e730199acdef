/* job_spec: one validated job, all or nothing.
 *
 * Two grades of fault. The envelope (JSON itself, custom_id, method, url, body being an object) is the job file's: parsing
 * returns RC_BAD_INPUT with line and column, and nothing runs. Anything inside body is the job's own: parsing succeeds and
 * `fault` holds the HTTP-like status, code, param and message for its error record, and so it is with "tandem", what a line
 * tells this program alone. Other top-level keys are ignored; a body field that is known to the API but not implemented, or
 * unknown, is a 400 that names it. */
#ifndef TANDEM_JOB_SPEC_H
#define TANDEM_JOB_SPEC_H

#include "base.h"
#include "sampler.h"

/* Bounds of a job's time limit: a millisecond, a year. */
#define JOB_TIMEOUT_MIN_S 0.001
#define JOB_TIMEOUT_MAX_S 31536000.0
enum { JOB_PRIORITY_MIN = -1000, JOB_PRIORITY_MAX = 1000 };

enum job_endpoint { JOB_CHAT, JOB_COMPLETION }; /* /v1/chat/completions, /v1/completions */

/* A job's own failure, as an OpenAI error object plus a status. status 0: none. */
struct job_fault {
    int status;        /* 400, 404, 408, 413, 422, 500 */
    char type[40];     /* "invalid_request_error", ... */
    char code[48];     /* "context_length_exceeded", ...; "" = null */
    char param[96];    /* "messages[0].content", ...; "" = null */
    char message[600];
};
void job_fault_set(struct job_fault *f, int status, const char *type, const char *code, const char *param,
                   const char *format, ...) __attribute__((format(printf, 6, 7))); /* first one wins */

/* A piece of a message: text, or a document whose text is read later. */
struct job_part {
    char *text;           /* NULL for a document */
    size_t text_len;
    char *document_path;  /* as written, relative to the root; NULL for text */
};
struct job_message {
    char role[12];        /* "system", "user", "assistant" */
    struct job_part *parts; /* a plain string content is one part; parts are joined by '\n' */
    size_t n_parts;
    char *reasoning;      /* of an assistant: "reasoning_content", or "reasoning"; NULL: not given */
    size_t reasoning_len;
};

/* What a chat job tells the model's template: "chat_template_kwargs" and "reasoning_effort". Whether the model's format has
 * such a thing is known only with the model. */
enum job_switch { JOB_SWITCH_DEFAULT, JOB_SWITCH_OFF, JOB_SWITCH_ON };
struct job_thinking {
    enum job_switch enable, preserve;
    char effort[8];           /* "low", "medium", "xhigh"; "": not given */
    const char *effort_param; /* where it was given; static */
};

struct job_spec {
    char *custom_id;
    enum job_endpoint endpoint;
    char *model;          /* NULL: absent */
    struct job_message *messages; /* JOB_COMPLETION: one message of role "user" that holds the prompt */
    size_t n_messages;
    int64_t max_tokens;   /* 0: omitted, what the context leaves */
    struct sampling sampling; /* seed set only if has_seed; otherwise derive it by job_spec_seed */
    bool has_seed;
    struct job_thinking thinking;
    char **stop;
    int n_stop;
    int64_t timeout_us;   /* "tandem": {"timeout_s": ...}; 0: not given */
    int priority;         /* "tandem": {"priority": ...}: higher ones start first */
    char *canonical_body; /* JSON, sorted keys, compact: part of the result's key */
    char *canonical_tandem; /* the same of what "tandem" says about the result: all but its priority; NULL: nothing */
    struct job_fault fault;
};

/* source is used for messages only. On RC_OK *out owns memory: job_spec_free. On RC_BAD_INPUT *out is empty and e holds
 * code (invalid_json, missing_field, wrong_type, unknown_url, ...), line, column and byte. */
enum rc job_spec_parse(const char *line, size_t len, const char *source, int64_t line_number, int64_t line_byte,
                       struct job_spec *out, struct err *e);
void job_spec_free(struct job_spec *s);
/* The seed of a job without one: derived from custom_id alone. */
uint64_t job_spec_seed(const char *custom_id);

/* Names that a body may give as "model" for the loaded one: absent, "default", the file's base name with or without
 * suffix, general.name. Anything else is a 404 model_not_found (set on s->fault). names: n_names strings. */
void job_spec_check_model(struct job_spec *s, const char *const *names, size_t n_names);

#endif
