/* cmd_check: everything that is wrong with job files, before anything runs.
 *
 * The report is what was asked for, so it goes to stdout, a line a problem, in file order; the summary goes to
 * stderr. A line that is no job makes the files invalid (65). A job whose own body or documents are wrong would
 * become an error record: it is reported with its status, and the exit is 1, as the run's would be. With a model,
 * prompts are built as a run builds them, so what check lets pass fits the context. */
#include <inttypes.h>
#include <stdio.h>

#include "job_prompts.h"
#include "job_set.h"
#include "options.h"

struct totals {
    const struct job_set *set;
    size_t faults; /* that only the model shows */
    uint64_t prompt_tokens;
    size_t longest;
};

static void report(void *ctx, const struct err *problem)
{
    (void)ctx;
    char text[1100];
    printf("%s\n", err_format(problem, text, sizeof text));
}

static enum rc check_prompt(void *ctx, size_t i, const struct prompt *prompt, const struct job_fault *fault, struct err *e)
{
    struct totals *t = ctx;
    (void)e;
    if (prompt) {
        t->prompt_tokens += prompt->tokens.len;
        if (prompt->tokens.len > t->longest) t->longest = prompt->tokens.len;
    } else {
        struct err problem;
        job_set_fault_place(t->set, i, fault, &problem);
        report(NULL, &problem);
        t->faults++;
    }
    return RC_OK;
}

static enum rc check_prompts(const struct options *o, const struct job_set *set, struct totals *t, struct err *e)
{
    struct prompter *p = NULL;
    enum rc rc = prompter_open(o, &p, e);
    t->set = set;
    if (rc == RC_OK) rc = job_prompts_each(set, p, check_prompt, t, e);
    prompter_close(p);
    return rc;
}

static void summarize(const struct options *o, const struct job_set *set, size_t n_failing, const struct totals *t)
{
    char tokens[96] = "";
    size_t n_jobs = set->n_entries;
    for (size_t i = 0; i < set->n_entries; i++) n_jobs -= set->entries[i].bad_line;
    if (o->model)
        snprintf(tokens, sizeof tokens, "; %" PRIu64 " prompt tokens, the longest prompt %zu", t->prompt_tokens,
                 t->longest);
    log_line(LOG_INFO, "%zu jobs, %zu of them would fail; %zu lines are no jobs%s", n_jobs, n_failing, set->problems,
             tokens);
}

static enum rc check_all(const struct options *o, struct job_set *set, struct totals *t, struct err *e)
{
    enum rc rc = job_set_load(o, NULL, report, NULL, set, e);
    /* Lines that are no jobs are this command's finding, not its failure: the rest is still checked. */
    if (rc == RC_OK || (e->exit_status == EXIT_JOB_FILE)) {
        *e = (struct err){0};
        rc = o->model ? check_prompts(o, set, t, e) : RC_OK;
    }
    return rc;
}

int cmd_check(const struct options *o)
{
    struct err e = {0};
    struct job_set set;
    struct totals totals = {0};
    int status;
    enum rc rc = check_all(o, &set, &totals, &e);
    size_t n_failing = set.faults + totals.faults;
    if (rc != RC_OK) {
        char text[1100];
        status = e.exit_status ? e.exit_status : EXIT_INTERNAL;
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
    } else if (set.problems && !o->skip_bad_lines) {
        status = EXIT_JOB_FILE;
    } else {
        status = n_failing || set.problems ? EXIT_SOME_FAILED : EXIT_DONE;
    }
    if (rc == RC_OK && !o->quiet) summarize(o, &set, n_failing, &totals);
    job_set_free(&set);
    return status;
}
