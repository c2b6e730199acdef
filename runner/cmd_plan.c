/* cmd_plan: what a run would compute, found out without ranks.
 *
 * Every prompt is built as a run builds it, hashed block by block into the tree of what they share, and forgotten. Problems are
 * reported as check reports them, before the report; with --json, when standard output is one object, on standard error. What the
 * tree says is what a run with a cache computes at best: jobs in any order, nothing in the cache before, nothing driven out of it.
 * Times come from speeds that someone measured, or not at all. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "job_prompts.h"
#include "job_set.h"
#include "options.h"
#include "prefix_tree.h"
#include "prompt.h"

/* Jobs and lines that would not be answered, by their code; later codes than there is room for count as the last. */
enum { MAX_CODES = 32 };
struct refused {
    char code[sizeof((struct err *)0)->code];
    size_t n;
};

struct plan {
    const struct options *options;
    struct job_set set;
    struct prefix_tree tree;
    struct prefix_tree_counts shared;
    struct refused refused[MAX_CODES];
    size_t n_codes;
    size_t jobs, runnable; /* lines that are jobs; those with a prompt that fits */
    bool all_fit;
    size_t longest;
    uint64_t answer_tokens; /* most that all answers may have */
    int context;
};

/* ---- looking ---- */

static void refuse(struct plan *p, const struct err *problem)
{
    char text[1100];
    size_t at = 0;
    fprintf(p->options->json ? stderr : stdout, "%s\n", err_format(problem, text, sizeof text));
    while (at < p->n_codes && strcmp(p->refused[at].code, problem->code)) at++;
    if (at == MAX_CODES) at--;
    if (at == p->n_codes) memcpy(p->refused[p->n_codes++].code, problem->code, sizeof problem->code);
    p->refused[at].n++;
}

static void take_problem(void *ctx, const struct err *problem) { refuse(ctx, problem); }

static enum rc take_prompt(void *ctx, size_t i, const struct prompt *prompt, const struct job_fault *fault, struct err *e)
{
    struct plan *p = ctx;
    if (fault) {
        struct err problem;
        job_set_fault_place(&p->set, i, fault, &problem);
        refuse(p, &problem);
        if (!strcmp(fault->code, "context_length_exceeded")) p->all_fit = false;
        return RC_OK;
    }
    p->runnable++;
    p->answer_tokens += (uint64_t)prompt->max_tokens;
    if (prompt->tokens.len > p->longest) p->longest = prompt->tokens.len;
    return prefix_tree_add(&p->tree, (uint32_t)i, prompt->tokens.ids, prompt->tokens.len, e);
}

static enum rc look(struct plan *p, struct err *e)
{
    struct prompter *prompter = NULL;
    enum rc rc = job_set_load(p->options, NULL, take_problem, p, &p->set, e);
    /* Lines that are no jobs are a finding: what the others would be is still said. */
    if (rc != RC_OK && e->exit_status == EXIT_JOB_FILE) {
        *e = (struct err){0};
        rc = RC_OK;
    }
    if (rc == RC_OK && p->set.n_entries > UINT32_MAX)
        rc = err_set(e, RC_BAD_INPUT, EXIT_JOB_FILE, "too_many_jobs", "more jobs than %u", UINT32_MAX);
    if (rc == RC_OK) rc = prompter_open(p->options, &prompter, e);
    if (rc == RC_OK) {
        p->context = prompter_context(prompter);
        rc = job_prompts_each(&p->set, prompter, take_prompt, p, e);
    }
    for (size_t i = 0; i < p->set.n_entries; i++) p->jobs += !p->set.entries[i].bad_line;
    prompter_close(prompter);
    return rc == RC_OK ? prefix_tree_count(&p->tree, &p->shared, e) : rc;
}

/* ---- saying ---- */

static uint64_t tree_tokens(const struct plan *p) { return p->shared.prompt_tokens - p->shared.saved_tokens; }

static double percent(uint64_t part, uint64_t whole) { return whole ? 100.0 * (double)part / (double)whole : 0; }

static double mean_prompt(const struct plan *p) { return p->runnable ? (double)p->shared.prompt_tokens / (double)p->runnable : 0; }

static void time_text(double seconds, char *out, size_t out_bytes)
{
    if (seconds < 60)
        snprintf(out, out_bytes, "%.1fs", seconds);
    else if (seconds < 3600)
        snprintf(out, out_bytes, "%.0fm%02.0fs", (double)(int64_t)(seconds / 60), (double)((int64_t)seconds % 60));
    else
        snprintf(out, out_bytes, "%.0fh%02.0fm", (double)(int64_t)(seconds / 3600), (double)((int64_t)(seconds / 60) % 60));
}

static void print_text(const struct plan *p)
{
    const struct options *o = p->options;
    printf("jobs      %zu: %zu would run, %zu would fail; %zu lines are no jobs\n", p->jobs, p->runnable, p->jobs - p->runnable,
           p->set.problems);
    for (size_t i = 0; i < p->n_codes; i++) printf("%s%zu %s", i ? ", " : "refused   ", p->refused[i].n, p->refused[i].code);
    if (p->n_codes) putchar('\n');
    printf("prompts   %" PRIu64 " tokens, %.0f on average, the longest %zu; %s the context of %d\n", p->shared.prompt_tokens,
           mean_prompt(p), p->longest, p->all_fit ? "all jobs fit" : "not all jobs fit", p->context);
    printf("answers   at most %" PRIu64 " tokens\n", p->answer_tokens);
    printf("shared    %" PRIu64 " tokens (%.1f%%) of prompts are in heads that another computes; %" PRIu64 " are left to compute\n",
           p->shared.saved_tokens, percent(p->shared.saved_tokens, p->shared.prompt_tokens), tree_tokens(p));
    for (int i = 0; i < p->shared.n_heads; i++) {
        const struct prefix_head *h = &p->shared.heads[i];
        printf("%s%" PRIu64 " tokens begin %zu jobs, first %.64s: saves %" PRIu64 "\n", i ? "          " : "heads     ", h->tokens,
               h->prompts, p->set.entries[h->first].custom_id, h->saved_tokens);
    }
    if (!(o->prefill_rate > 0)) return;
    char prompts[32], without[32], answers[32];
    time_text((double)tree_tokens(p) / o->prefill_rate, prompts, sizeof prompts);
    time_text((double)p->shared.prompt_tokens / o->prefill_rate, without, sizeof without);
    time_text((double)p->answer_tokens / o->decode_rate, answers, sizeof answers);
    printf("time      prompts %s (%s without shared heads), answers at most %s\n", prompts, without, answers);
}

static json_t *estimate_json(const struct plan *p)
{
    const struct options *o = p->options;
    if (!(o->prefill_rate > 0)) return json_null();
    return json_pack("{s:f, s:f, s:f}", "prefill_s", (double)tree_tokens(p) / o->prefill_rate, "prefill_unshared_s",
                     (double)p->shared.prompt_tokens / o->prefill_rate, "decode_max_s", (double)p->answer_tokens / o->decode_rate);
}

static json_t *refused_json(const struct plan *p)
{
    json_t *codes = json_object();
    for (size_t i = 0; i < p->n_codes; i++) json_object_set_new(codes, p->refused[i].code, json_integer((json_int_t)p->refused[i].n));
    return codes;
}

static json_t *heads_json(const struct plan *p)
{
    json_t *heads = json_array();
    for (int i = 0; i < p->shared.n_heads; i++) {
        const struct prefix_head *h = &p->shared.heads[i];
        json_array_append_new(heads, json_pack("{s:I, s:I, s:I, s:s}", "tokens", (json_int_t)h->tokens, "jobs", (json_int_t)h->prompts,
                                               "saved_tokens", (json_int_t)h->saved_tokens, "first_custom_id",
                                               p->set.entries[h->first].custom_id));
    }
    return heads;
}

static enum rc print_json(const struct plan *p, struct err *e)
{
    json_t *root = json_pack("{s:I, s:I, s:I, s:I, s:o, s:i, s:b, s:I, s:I, s:f, s:I, s:I, s:I, s:o, s:o}", "jobs", (json_int_t)p->jobs,
                             "would_run", (json_int_t)p->runnable, "would_fail", (json_int_t)(p->jobs - p->runnable), "bad_lines",
                             (json_int_t)p->set.problems, "refused", refused_json(p), "context", p->context, "all_fit", p->all_fit,
                             "prompt_tokens", (json_int_t)p->shared.prompt_tokens, "longest_prompt", (json_int_t)p->longest,
                             "mean_prompt", mean_prompt(p), "max_answer_tokens", (json_int_t)p->answer_tokens, "tree_tokens",
                             (json_int_t)tree_tokens(p), "saved_tokens", (json_int_t)p->shared.saved_tokens, "heads", heads_json(p),
                             "estimate", estimate_json(p));
    char *text = root ? json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(9)) : NULL;
    json_decref(root);
    if (!text) return err_no_memory(e);
    printf("%s\n", text);
    free(text);
    return RC_OK;
}

int cmd_plan(const struct options *o)
{
    struct plan p = {.options = o, .all_fit = true};
    struct err e = {0};
    char text[1100];
    int status = EXIT_DONE;
    enum rc rc = look(&p, &e);
    if (rc == RC_OK && o->json)
        rc = print_json(&p, &e);
    else if (rc == RC_OK)
        print_text(&p);
    if (rc != RC_OK) {
        status = e.exit_status ? e.exit_status : EXIT_INTERNAL;
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
    } else if (p.set.problems && !o->skip_bad_lines) {
        status = EXIT_JOB_FILE;
    } else if (p.set.problems || p.runnable < p.jobs) {
        status = EXIT_SOME_FAILED;
    }
    prefix_tree_free(&p.tree);
    job_set_free(&p.set);
    return status;
}
