/* run_report: the figures of one run, and its summary: one JSON object (schemas/run.schema.json). */
#ifndef TANDEM_RUN_REPORT_H
#define TANDEM_RUN_REPORT_H

#include "base.h"

struct run_report {
    size_t jobs, done, failed; /* records of earlier runs included */
    size_t in_flight;          /* of the pending ones */
    const char *end;           /* "done", "stopped", "out_of_time", "gave_up", "error"; NULL: it goes on */
    int exit_status;
    uint64_t tokens;           /* computed by this run, those of attempts that were lost included */
    int64_t cached_tokens;     /* of prompts answered by this run, found in the cache */
    int64_t rank_restarts;
    int64_t wall_us;
    int64_t started_s, deadline_s; /* UNIX time; 0: none */
    bool audit_asked;
    size_t audited, audit_different, audit_skipped; /* answers that were computed again, those that differed, those left */
    const char *archive;       /* as given */
    const char *state;         /* its folder; NULL: not known */
    const struct err *error;   /* NULL or without a code: none */
};

/* Of a run that has ended: appends one line of JSON, with its end. False: out of memory, out is as it was. */
bool run_report_json(const struct run_report *r, struct buf *out);

#endif
