/* Answers every registered job of a state, so that tests need not compute them: fill_state STATE_FOLDER.
 *
 * The state takes each result as it takes a real one, of a short answer's size, but not to the disk: no test cuts the power here,
 * and a million syncs take an hour. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include "job_result.h"
#include "state.h"

/* LMDB's calls end here: the program's own functions come before the C library's. */
int fdatasync(int fd)
{
    (void)fd;
    return 0;
}

int open(const char *path, int flags, ...)
{
    va_list args;
    va_start(args, flags);
    unsigned mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(args, unsigned) : 0;
    va_end(args);
    return openat(AT_FDCWD, path, flags & ~O_DSYNC, (mode_t)mode);
}

static enum rc answer(struct state *s, const struct state_job *job, struct err *e)
{
    static const char words[] = "The report says that every ship waited in harbour until the rain had passed, then sailed with its "
                                "grain and iron to the ports along the coast, where both were sold within a day.";
    const struct job_spec spec = {.custom_id = (char *)(uintptr_t)job->custom_id, .endpoint = JOB_CHAT};
    const struct job_answer a = {.text = words, .text_len = sizeof words - 1, .finish_reason = "stop", .prompt_tokens = 1000,
                                 .cached_tokens = 512, .completion_tokens = 40, .model = "filled", .created = 1700000000};
    const struct job_timing t = {.prompt_tokens = 1000, .cached_tokens = 512, .completion_tokens = 40, .attempts = 1};
    struct buf record = {0}, timing = {0};
    enum rc rc = job_result_success(job->key, &spec, &a, &record, e);
    if (rc == RC_OK) rc = job_result_timing(job->custom_id, 200, &t, &timing, e);
    const struct state_attempts attempts = {.attempts = 1, .running = true};
    const struct state_result r = {.kind = STATE_OUTPUT, .record = record.data, .record_len = record.len, .timing = timing.data,
                                   .timing_len = timing.len, .prompt_tokens = 1000, .cached_tokens = 512, .completion_tokens = 40};
    if (rc == RC_OK) rc = state_put_attempts(s, job->key, &attempts, e);
    if (rc == RC_OK) rc = state_put_result(s, job->key, &r, e);
    buf_free(&record);
    buf_free(&timing);
    return rc;
}

int main(int argc, char **argv)
{
    struct state *s = NULL;
    struct err e = {0};
    struct buf scratch = {0};
    struct state_job job;
    if (argc != 2) return EXIT_USAGE;
    enum rc rc = state_open(argv[1], STATE_WRITE, &s, &e);
    for (size_t i = 0; rc == RC_OK && i < state_job_count(s); i++) {
        enum state_result_kind kind;
        rc = state_job_at(s, i, &scratch, &job, &e);
        if (rc != RC_OK) break;
        rc = state_result_kind(s, job.key, &kind, &e);
        if (rc == RC_RETRY) rc = answer(s, &job, &e);
    }
    if (rc != RC_OK) fprintf(stderr, "fill_state: %s\n", e.text);
    buf_free(&scratch);
    state_close(s);
    return rc == RC_OK ? EXIT_DONE : EXIT_INTERNAL;
}
