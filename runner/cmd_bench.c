/* cmd_bench: the engine's speed, measured through a real group of rank processes.
 *
 * Prompts are a fixed pseudo-random sequence of ids, answers are greedy and never end early, so two runs do the same work.
 * One round warms up, then `repeats` rounds are measured and the median is given.
 *
 * prefill: prompt tokens over the time from the first prompt row to the end of the last prompt's last step, by the ranks'
 * own clock. decode of one sequence: tokens after the first over the time from first to last token, by the ranks' clock.
 * decode of several: tokens that all sequences together gained between the moment when every prompt was computed and the
 * first answer, by this process's clock: the only time in which all of them decode. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench_round.h"
#include "bench_text.h"
#include "prompt.h"
#include "rank_main.h"
#include "supervise.h"

enum { CLOSE_GRACE_US = 5000000, MAX_REPEATS = 1000 };

/* One round's figures while it runs. */
struct round {
    int64_t ended;
    int64_t first_row_us, last_prompt_us; /* since submission */
    int64_t decode_us, rounds;            /* of the one sequence */
    /* The window in which all sequences decode. */
    uint64_t prefill_before, tokens_at_start, tokens_at_end;
    int64_t start_us, end_us;
};

struct bench {
    struct options options;
    bool decode;
    int32_t *prompt;
    struct group *group;
    struct buf identity;
    struct wire_token last; /* newest progress of rank 0 */
    uint64_t next_id;
    double rate[MAX_REPEATS];
    double round_us;        /* decoding of one sequence: of the last repeat, by the ranks' clock */
};

/* ---- one round ---- */

static void take_progress(struct bench *b, struct round *r, const struct wire_token *t)
{
    uint64_t all_prompts = (uint64_t)(b->options.bench_sequences * b->options.bench_prompt);
    b->last = *t;
    if (r->ended) return;
    if (t->prefill_total - r->prefill_before < all_prompts) return;
    if (!r->start_us) {
        r->start_us = clock_now_us();
        r->tokens_at_start = t->tokens_total;
    }
    r->end_us = clock_now_us();
    r->tokens_at_end = t->tokens_total;
}

static void take_done(struct round *r, const struct wire_done *d)
{
    const struct engine_timing *t = &d->timing;
    if (!r->ended || t->queue_us < r->first_row_us) r->first_row_us = t->queue_us;
    if (t->queue_us + t->prefill_us > r->last_prompt_us) r->last_prompt_us = t->queue_us + t->prefill_us;
    r->decode_us = t->decode_us;
    r->rounds = t->rounds;
    r->ended++;
}

static enum rc take_event(struct bench *b, struct round *r, const struct group_event *v, struct err *e)
{
    if (v->kind == GROUP_EVENT_LOST || v->kind == GROUP_EVENT_GAVE_UP)
        return err_set(e, RC_FAILED, EXIT_UNAVAILABLE, "ranks_lost", "%s", v->text);
    if (v->kind != GROUP_EVENT_FRAME) return RC_OK;
    if (v->frame->type == WIRE_FAILED)
        return err_set(e, RC_FAILED, EXIT_INTERNAL, "request_failed", "%s: %s", v->frame->u.text.code, v->frame->u.text.text);
    if (v->frame->type == WIRE_TOKEN) take_progress(b, r, &v->frame->u.token);
    if (v->frame->type == WIRE_DONE) take_done(r, &v->frame->u.done);
    return RC_OK;
}

static enum rc turn(struct bench *b, struct round *r, struct err *e)
{
    struct pollfd fds[MAX_RANKS];
    struct group_event v;
    int timeout_ms = 1000;
    int n = group_poll_fds(b->group, fds, &timeout_ms);
    poll(fds, (nfds_t)n, timeout_ms);
    group_pump(b->group);
    enum rc rc = RC_OK;
    while (rc == RC_OK && group_next_event(b->group, &v)) rc = take_event(b, r, &v, e);
    return rc;
}

static enum rc submit_all(struct bench *b, struct err *e)
{
    const struct options *o = &b->options;
    enum rc rc = RC_OK;
    for (int64_t i = 0; i < o->bench_sequences && rc == RC_OK; i++) {
        struct engine_request q = {.id = ++b->next_id, .prompt = b->prompt + i, .prompt_tokens = (size_t)o->bench_prompt,
                                   .max_tokens = b->decode ? (int)o->bench_tokens : 1, .sampling = sampling_default(),
                                   .ignore_end = true};
        q.sampling.temperature = 0;
        rc = group_submit(b->group, &q, e);
    }
    if (rc == RC_RETRY) return err_set(e, RC_FAILED, EXIT_UNAVAILABLE, "ranks_lost", "the ranks are gone");
    return rc;
}

static enum rc run_round(struct bench *b, double *rate, struct err *e)
{
    const struct options *o = &b->options;
    struct round r = {.prefill_before = b->last.prefill_total};
    enum rc rc = submit_all(b, e);
    while (rc == RC_OK && r.ended < o->bench_sequences) rc = turn(b, &r, e);
    if (rc != RC_OK) return rc;
    double tokens, us;
    if (!b->decode) {
        tokens = (double)(o->bench_sequences * o->bench_prompt);
        us = (double)(r.last_prompt_us - r.first_row_us);
    } else if (o->bench_sequences == 1) {
        tokens = (double)(o->bench_tokens - 1);
        us = (double)r.decode_us;
        b->round_us = r.rounds ? us / (double)r.rounds : 0;
    } else {
        tokens = (double)(r.tokens_at_end - r.tokens_at_start);
        us = (double)(r.end_us - r.start_us);
    }
    if (us <= 0 || tokens <= 0)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "nothing_measured",
                       "the sequences did not decode together long enough; give more --tokens");
    *rate = tokens / us * 1e6;
    return RC_OK;
}

/* ---- report ---- */

static int by_rate(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(double *rates, size_t n)
{
    qsort(rates, n, sizeof *rates, by_rate);
    return n % 2 ? rates[n / 2] : (rates[n / 2 - 1] + rates[n / 2]) / 2;
}

/* A line "Name:   123 kB" of a process' status, in MiB; 0 when there is none. */
static double status_mib(const char *status, const char *name)
{
    const char *at = strstr(status, name);
    return at ? strtod(at + strlen(name), NULL) / 1024 : 0;
}

static void rank_memory(pid_t pid, double *now_mib, double *most_mib)
{
    char path[64], text[8192];
    *now_mib = *most_mib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "re");
    if (!f) return;
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = '\0';
    fclose(f);
    *now_mib = status_mib(text, "VmRSS:");
    *most_mib = status_mib(text, "VmHWM:");
}

/* The value of a line "name=value" of the identity. */
static int identity_value(const struct buf *identity, const char *name, const char **value)
{
    size_t n = strlen(name);
    for (const char *at = identity->data; at && *at; at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL) {
        if (strncmp(at, name, n) != 0 || at[n] != '=') continue;
        *value = at + n + 1;
        return (int)strcspn(*value, "\n");
    }
    *value = "";
    return 0;
}

static void print_text(const struct bench *b, double median)
{
    const struct options *o = &b->options;
    const char *backend;
    int n = identity_value(&b->identity, "backend", &backend);
    printf("%s, %d ranks, %.*s, median of %" PRId64 "\n", b->decode ? "decode" : "prefill", o->ranks, n, backend,
           o->bench_repeats);
    printf("  prompt     %8" PRId64 " tokens\n", o->bench_prompt);
    if (b->decode) printf("  answer     %8" PRId64 " tokens\n", o->bench_tokens);
    printf("  sequences  %8" PRId64 "\n", o->bench_sequences);
    printf("  speed      %8.1f tokens/s  (lowest %.1f, highest %.1f)\n", median, b->rate[0],
           b->rate[o->bench_repeats - 1]);
    if (b->round_us > 0) printf("  round      %8.3f ms, %.2f tokens\n", b->round_us / 1e3, median * b->round_us / 1e6);
    for (int r = 0; r < o->ranks; r++) {
        double now_mib, most_mib;
        rank_memory(group_rank_pid(b->group, r), &now_mib, &most_mib);
        printf("  rank %d     %8.1f MiB resident, %.1f at most\n", r, now_mib, most_mib);
    }
}

static void print_json(const struct bench *b, double median)
{
    const struct options *o = &b->options;
    const char *backend;
    int n = identity_value(&b->identity, "backend", &backend);
    printf("{\"bench\":\"%s\",\"backend\":\"%.*s\",\"ranks\":%d,\"prompt_tokens\":%" PRId64 ",\"tokens\":%" PRId64
           ",\"sequences\":%" PRId64 ",\"tokens_per_s\":%.2f,\"rounds\":[", b->decode ? "decode" : "prefill", n, backend,
           o->ranks, o->bench_prompt, b->decode ? o->bench_tokens : 1, o->bench_sequences, median);
    for (int64_t i = 0; i < o->bench_repeats; i++) printf("%s%.2f", i ? "," : "", b->rate[i]);
    printf("],\"round_ms\":%.4f,\"rank_memory_mib\":[", b->round_us / 1e3);
    for (int r = 0; r < o->ranks; r++) {
        double now_mib, most_mib;
        rank_memory(group_rank_pid(b->group, r), &now_mib, &most_mib);
        printf("%s{\"resident\":%.1f,\"most\":%.1f}", r ? "," : "", now_mib, most_mib);
    }
    printf("]}\n");
}

/* ---- start and end ---- */

/* The same ids on every machine, below the vocabulary, or text; sequence i starts at prompt[i], so no two prompts are equal. */
static enum rc make_prompts(struct bench *b, struct err *e)
{
    const struct options *o = &b->options;
    struct prompter *p = NULL;
    enum rc rc = prompter_open(o, &p, e);
    if (rc != RC_OK) return rc;
    uint64_t vocab = (uint64_t)tokenizer_vocab(prompter_tokenizer(p)), x = 1;
    size_t n = (size_t)(o->bench_prompt + o->bench_sequences);
    b->prompt = calloc(n, sizeof *b->prompt);
    if (!b->prompt) rc = err_no_memory(e);
    else if (o->bench_text) rc = bench_text(prompter_tokenizer(p), !strcmp(o->bench_text, "zh"), b->prompt, n, e);
    for (size_t i = 0; i < n && rc == RC_OK && !o->bench_text; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        b->prompt[i] = (int32_t)((x >> 33) % vocab);
    }
    prompter_close(p);
    return rc;
}

static enum rc check_figures(struct bench *b, struct err *e)
{
    struct options *o = &b->options;
    int64_t need = o->bench_prompt + (b->decode ? o->bench_tokens : 1);
    if (b->decode && o->bench_tokens < 2)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--tokens %" PRId64 ": decoding is measured after the first "
                       "token, give at least 2", o->bench_tokens);
    if (o->bench_sequences > o->active)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--sequences %" PRId64 ": more than --active %d",
                       o->bench_sequences, o->active);
    if (o->context && need > o->context)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--prompt and --tokens need %" PRId64
                       " tokens, more than --context %d", need, o->context);
    /* As much KV as this needs, so that the memory figure is that of this work. */
    if (!o->context) o->context = (int)((need + KV_PAGE_TOKENS - 1) / KV_PAGE_TOKENS * KV_PAGE_TOKENS);
    /* Greedy answers to made-up prompts soon repeat themselves: with n-gram drafts they would measure that. */
    if (!o->spec) o->spec = "off";
    o->groups = 1;
    o->restarts = 0;
    return RC_OK;
}

static enum rc start(struct bench *b, struct err *e)
{
    struct round none = {0};
    enum rc rc = check_figures(b, e);
    if (rc == RC_OK) rc = make_prompts(b, e);
    if (rc == RC_OK) rc = rank_identity(&b->options, 0, &b->identity, e);
    if (rc == RC_OK) rc = group_open(&b->options, 0, b->identity.data, &b->group, e);
    while (rc == RC_OK && group_state_of(b->group) != GROUP_READY) rc = turn(b, &none, e);
    return rc;
}

static enum rc measure(struct bench *b, struct err *e)
{
    double warm_up;
    enum rc rc = run_round(b, &warm_up, e);
    for (int64_t i = 0; i < b->options.bench_repeats && rc == RC_OK; i++) rc = run_round(b, &b->rate[i], e);
    if (rc != RC_OK) return rc;
    double median = median_of(b->rate, (size_t)b->options.bench_repeats);
    if (b->options.json)
        print_json(b, median);
    else
        print_text(b, median);
    return RC_OK;
}

static enum rc run(struct bench *b, const char *what, struct err *e)
{
    if (!strcmp(what, "kernel")) return bench_kernel(&b->options, e);
    if (!strcmp(what, "sum")) return bench_sum(&b->options, e);
    if (!strcmp(what, "round")) {
        enum rc rc = check_figures(b, e);
        if (rc == RC_OK) rc = make_prompts(b, e);
        return rc == RC_OK ? bench_round(&b->options, b->prompt, e) : rc;
    }
    enum rc rc = start(b, e);
    return rc == RC_OK ? measure(b, e) : rc;
}

int cmd_bench(const struct options *o)
{
    struct bench *b = calloc(1, sizeof *b);
    struct err e = {0};
    char line[sizeof e.text + 400];
    enum rc rc = b ? RC_OK : err_no_memory(&e);
    if (b) {
        b->options = *o;
        b->decode = strcmp(o->files[0], "prefill") != 0;
        rc = run(b, o->files[0], &e);
        group_close(b->group, CLOSE_GRACE_US);
        free(b->prompt);
        buf_free(&b->identity);
        free(b);
    }
    if (rc == RC_OK) return EXIT_DONE;
    log_line(LOG_ERROR, "%s", err_format(&e, line, sizeof line));
    return e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
