/* job_set: all jobs of one command, validated, small in memory.
 *
 * Loading reads every line of every job file once: envelope and body are checked, doubled ids are found across all
 * files, documents are digested. Lines are not kept; job_set_spec reads a line again from the file that was opened
 * at loading and checks its digest. With skip_bad_lines a line that is no job becomes an entry with a fault, so that
 * every line of the input leaves exactly one record. */
#ifndef TANDEM_JOB_SET_H
#define TANDEM_JOB_SET_H

#include "base.h"
#include "document.h"
#include "job_order.h"
#include "job_spec.h"
#include "options.h"
#include "state.h"

struct job_source {
    const char *path; /* as given; lives as long as the options */
    int fd;
    struct document_root *root; /* --root, or the job file's folder; owned by the set */
};

struct job_entry {
    int source;         /* index into sources */
    int64_t line, byte; /* where it stands */
    size_t len;         /* bytes of the line, without its end */
    char *custom_id;    /* unique in the set; "line-N@FILE" when none could be read or it was doubled */
    unsigned char line_digest[32];
    size_t n_documents;
    unsigned char *document_digests; /* n_documents * 32 bytes; NULL when there are none or they could not be read */
    size_t document_digests_bytes;
    struct job_fault *fault;            /* NULL: none. The job's record is known without running it */
    bool bad_line;                      /* the line is no job (only with skip_bad_lines) */
    bool settled;                       /* the state has its answer: the line was not parsed, key is known, head is not */
    int priority;                       /* of a job */
    struct job_head head;               /* of a job */
    union {
        unsigned char body_digest[32]; /* SHA-256 over url, canonical body and "tandem"; of the line when it is no job */
        unsigned char key[STATE_KEY_BYTES]; /* after job_set_register */
    };
};

struct job_set {
    struct job_source *sources;
    int n_sources;
    struct job_entry *entries;
    size_t n_entries, cap_entries;
    unsigned char input_digest[32]; /* over all lines' digests, in order */
    size_t problems;                /* lines that are no jobs */
    size_t faults;                  /* jobs that will fail by what is known now, bad lines excluded */
};

/* Called in file order, with place, code and text filled: exit_status EXIT_JOB_FILE for a line that is no job, 0 for a
 * job's own fault. */
typedef void (*job_problem_fn)(void *ctx, const struct err *problem);
/* Prints lines that are no jobs on stderr, one each; faults are left to their records. ctx is not used. */
void job_problem_print(void *ctx, const struct err *problem);

/* Loads o->files. known may be NULL; else lines that it has registered in this very place and has an answer of are taken over
 * from it without being parsed: a run of many jobs with nothing to do does little more than read. RC_BAD_INPUT, EXIT_JOB_FILE when there are problems and skip_bad_lines is off (all of them were
 * reported first); EXIT_NO_INPUT or EXIT_IO when a file cannot be read. problem may be NULL. Free with job_set_free
 * in every case. */
enum rc job_set_load(const struct options *o, struct state *known, job_problem_fn problem, void *ctx, struct job_set *out,
                     struct err *e);
void job_set_free(struct job_set *set);

/* The document folder of entry i. */
struct document_root *job_set_root(const struct job_set *set, size_t i);

/* Reads and parses entry i again. False: fault is set (the entry's own, or 422 line_changed) and out is empty. On
 * true the caller frees out with job_spec_free, and out->fault is empty. */
bool job_set_spec(const struct job_set *set, size_t i, struct job_spec *out, struct job_fault *fault);

/* Before running: takes over document digests pinned by an earlier registration of the same line, computes every
 * entry's key under identity, and registers all entries in the state. */
enum rc job_set_register(struct job_set *set, struct state *s, const char *identity, struct err *e);

/* SHA-256 over identity, custom_id, body digest and document digests, each with its length. out may be entry->key. */
void job_set_key(const struct job_entry *entry, const char *identity, unsigned char out[STATE_KEY_BYTES]);

/* A job's own fault as a problem, for reports: file, line, column, code, status and text. */
void job_set_fault_place(const struct job_set *set, size_t i, const struct job_fault *fault, struct err *out);

#endif
