/* bench_round: prompts of the wanted length, then rounds, in this process.
 *
 * A round is a step in which every sequence decodes: drafts, their check, sampling, the lockstep record, everything. The first
 * WARM rounds are not counted (a backend records what it sees for the second time), the next TIMED ones are made operation by
 * operation to see what each family takes, which is slower than a replayed round; all that follow are counted, and the median is
 * given. The prompts' operations are timed as they run: nothing of them is replayed anyway. */
#include "bench_round.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"
#include "engine.h"
#include "kern.h"
#include "rank_args.h"
#include "rank_backend.h"

enum { WARM = 8, TIMED = 8, SETTLE = 2, MAX_ROUNDS = 1 << 16, MAX_FAMILIES = 32 };

/* ---- a rank of its own ---- */

static enum rc read_as_rank(const struct options *o, struct bench_rank *out, struct err *e)
{
    int rank = 0, ranks = o->ranks, used = 0;
    out->options = *o;
    if (o->bench_as) {
        if (sscanf(o->bench_as, "%d/%d%n", &rank, &ranks, &used) != 2 || o->bench_as[used] || ranks < 1 || ranks > MAX_RANKS || rank < 0 ||
            rank >= ranks)
            return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "--as-rank %s: give R/N, a rank of 1 to %d", o->bench_as, MAX_RANKS);
    } else if (ranks != 1) {
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_value", "this benchmark runs one rank: give --ranks 1, or --as-rank R/N");
    }
    out->options.prefill_rows = rank_backend_prefill_rows(o);
    out->rank = rank;
    out->solo = ranks > 1;
    out->options.ranks = 1; /* of processes; one card is chosen */
    out->options.groups = 1;
    return RC_OK;
}

enum rc bench_rank_open(const struct options *o, struct bench_rank *out, struct err *e)
{
    *out = (struct bench_rank){0};
    enum rc rc = read_as_rank(o, out, e);
    if (rc != RC_OK) return rc;
    const size_t n = (segment_bytes(1, 64) + 63) / 64 * 64;
    out->memory = aligned_alloc(64, n);
    if (!out->memory) return err_no_memory(e);
    memset(out->memory, 0, n);
    segment_init(out->memory, 1, 64, &o->bounds);
    out->segment = segment_attach(out->memory, n, 1, e);
    if (!out->segment) return RC_FATAL;
    rc = rank_backend_open_alone(&out->options, out->rank, out->solo ? atoi(strchr(o->bench_as, '/') + 1) : 1, out->segment, &out->kern,
                                 &out->comm, e);
    if (rc == RC_OK && out->kern->read_rate) out->read_bytes_per_s = out->kern->read_rate(out->kern);
    return rc;
}

void bench_rank_close(struct bench_rank *b)
{
    if (b->comm) b->comm->close(b->comm);
    if (b->kern) b->kern->close(b->kern);
    free(b->memory);
    *b = (struct bench_rank){0};
}

/* ---- rounds ---- */

struct breakdown {
    struct kern_time family[MAX_FAMILIES];
    int families; /* 0: this backend cannot tell */
};

struct rounds {
    double us[MAX_ROUNDS];
    int n;
    double load_s, prefill_us;
    uint64_t tokens;                 /* of the counted rounds */
    struct breakdown prompts, timed; /* all prompts; TIMED rounds */
    struct engine_sizes sizes;
};

static void take_times(struct kern *k, struct breakdown *out)
{
    if (!k->measure) return;
    out->families = k->times(k, out->family, MAX_FAMILIES);
    k->measure(k, false);
}

static enum rc submit_all(struct engine *engine, const struct options *o, const int32_t *prompt, struct err *e)
{
    enum rc rc = RC_OK;
    for (int64_t i = 0; i < o->bench_sequences && rc == RC_OK; i++) {
        struct engine_request q = {.id = (uint64_t)i + 1, .prompt = prompt + i, .prompt_tokens = (size_t)o->bench_prompt,
                                   .max_tokens = (int)o->bench_tokens, .sampling = sampling_default(), .ignore_end = true};
        q.sampling.temperature = 0;
        rc = engine_submit(engine, &q, e);
    }
    return rc;
}

static bool all_run(struct engine *engine)
{
    struct engine_event v;
    while (engine_next_event(engine, &v))
        return false; /* one has ended: from here on fewer decode */
    return engine_busy(engine);
}

static enum rc run_rounds(struct bench_rank *b, struct engine *engine, struct rounds *r, struct err *e)
{
    struct kern *k = b->kern;
    const uint64_t prompts = (uint64_t)(b->options.bench_sequences * b->options.bench_prompt);
    const int64_t start_us = clock_now_us();
    enum rc rc = RC_OK;
    if (k->measure) k->measure(k, true);
    while (rc == RC_OK && engine_stats_of(engine).prefill_rows < prompts) {
        struct engine_event v;
        rc = engine_step(engine, e);
        if (rc == RC_OK && engine_next_event(engine, &v))
            rc = err_set(e, RC_BAD_INPUT, EXIT_USAGE, "nothing_measured", "a sequence ended while others' prompts were computed; give more --tokens");
    }
    if (rc == RC_OK) rc = k->finish(k, e); /* the MTP layer's rows may still be computed */
    r->prefill_us = (double)(clock_now_us() - start_us);
    take_times(k, &r->prompts);
    for (int i = 0; rc == RC_OK && all_run(engine) && r->n < MAX_ROUNDS; i++) {
        if (k->measure && i == WARM) k->measure(k, true);
        if (i == WARM + TIMED) take_times(k, &r->timed);
        const uint64_t before = engine_stats_of(engine).tokens;
        const int64_t round_us = clock_now_us();
        rc = engine_step(engine, e);
        if (i < WARM + TIMED + SETTLE) continue;
        r->us[r->n++] = (double)(clock_now_us() - round_us);
        r->tokens += engine_stats_of(engine).tokens - before;
    }
    if (rc == RC_OK && r->n < 2)
        rc = err_set(e, RC_BAD_INPUT, EXIT_USAGE, "nothing_measured", "too few rounds in which all sequences decode; give more --tokens");
    return rc;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* ---- report ---- */

/* Bytes that a family must read in a round with so many MTP passes, and the state that GDN also writes. 0: not known, or small. */
static double family_bytes(const struct bench_rank *b, const struct rounds *r, const char *family, int passes)
{
    const struct engine_step_bytes *s = &r->sizes.step, *m = &r->sizes.mtp_pass;
    const double sequences = (double)b->options.bench_sequences;
    const double context = (double)(b->options.bench_prompt + b->options.bench_tokens / 2);
    const double p = (double)passes;
    if (!strcmp(family, "linear")) return (double)s->linear + p * (double)m->linear;
    if (!strcmp(family, "linear + SwiGLU")) return (double)s->swiglu + p * (double)m->swiglu;
    if (!strcmp(family, "linear, partial")) return (double)s->partial + p * (double)m->partial;
    if (!strcmp(family, "attention")) return sequences * context * ((double)s->kv_token + p * (double)m->kv_token);
    if (!strcmp(family, "GDN")) return sequences * (double)s->state;
    return 0;
}

struct summary {
    double median_us, low_us, high_us, tokens_a_round, tokens_per_s, prefill_per_s;
    int passes; /* of the MTP layer in a round */
};

static struct summary summarize(const struct bench_rank *b, struct rounds *r)
{
    const struct options *o = &b->options;
    qsort(r->us, (size_t)r->n, sizeof r->us[0], by_value);
    struct summary s = {
        .median_us = r->us[r->n / 2],
        .low_us = r->us[0],
        .high_us = r->us[r->n - 1],
        .tokens_a_round = (double)r->tokens / r->n,
        .prefill_per_s = (double)(o->bench_sequences * o->bench_prompt) / r->prefill_us * 1e6,
        .passes = o->spec && !strcmp(o->spec, "mtp") ? o->drafts : 0,
    };
    if (o->bench_accept > 0 && s.passes) s.tokens_a_round = (double)o->bench_sequences * (1 + o->drafts * o->bench_accept);
    s.tokens_per_s = s.tokens_a_round / s.median_us * 1e6;
    return s;
}

static void print_families_text(const struct bench_rank *b, const struct rounds *r, const struct summary *s)
{
    if (!r->timed.families) return;
    printf("  prompts, by operation:              ms     calls\n");
    for (int i = 0; i < r->prompts.families; i++)
        printf("    %-22s %12.1f %9" PRIu64 "\n", r->prompts.family[i].family, r->prompts.family[i].us / 1e3, r->prompts.family[i].calls);
    printf("  one operation at a time:     us a round     calls       MiB  share of %.0f GB/s\n", b->read_bytes_per_s / 1e9);
    for (int i = 0; i < r->timed.families; i++) {
        const struct kern_time *t = &r->timed.family[i];
        const double us = t->us / TIMED, bytes = family_bytes(b, r, t->family, s->passes);
        printf("    %-22s %12.1f %9.1f", t->family, us, (double)t->calls / TIMED);
        if (bytes > 0) printf(" %9.1f %8.0f%%", bytes / 1048576, bytes / us * 1e8 / b->read_bytes_per_s);
        printf("\n");
    }
}

static void print_text(const struct bench_rank *b, const struct rounds *r, const struct summary *s)
{
    const struct options *o = &b->options;
    printf("round, %s%s, %s, %s KV\n", o->bench_as ? "rank " : "one rank", o->bench_as ? o->bench_as : "", b->kern->numerics, o->kv);
    printf("  load          %8.2f s, %.1f MiB of weights\n", r->load_s, (double)r->sizes.weight_bytes / 1048576);
    printf("  prompt        %8" PRId64 " tokens x %" PRId64 ", %.3f s, %.0f tokens/s\n", o->bench_prompt, o->bench_sequences, r->prefill_us / 1e6,
           s->prefill_per_s);
    printf("  round         %8.3f ms (lowest %.3f, highest %.3f) of %d, spec %s\n", s->median_us / 1e3, s->low_us / 1e3, s->high_us / 1e3,
           r->n, o->spec);
    printf("  tokens        %8.2f a round%s, %.1f tokens/s\n", s->tokens_a_round, o->bench_accept > 0 && s->passes ? " by --accept" : "",
           s->tokens_per_s);
    print_families_text(b, r, s);
}

static void print_csv(const struct bench_rank *b, const struct rounds *r, const struct summary *s)
{
    const struct options *o = &b->options;
    printf("what,us,calls,bytes,share_of_read_rate\n");
    printf("prefill of %" PRId64 " tokens,%.0f,1,,\n", o->bench_sequences * o->bench_prompt, r->prefill_us);
    for (int i = 0; i < r->prompts.families; i++)
        printf("\"prefill: %s\",%.0f,%" PRIu64 ",,\n", r->prompts.family[i].family, r->prompts.family[i].us, r->prompts.family[i].calls);
    printf("round,%.1f,1,,\n", s->median_us);
    for (int i = 0; i < r->timed.families; i++) {
        const struct kern_time *t = &r->timed.family[i];
        const double us = t->us / TIMED, bytes = family_bytes(b, r, t->family, s->passes);
        printf("\"%s\",%.1f,%.1f,%.0f,%.3f\n", t->family, us, (double)t->calls / TIMED, bytes, bytes / us * 1e6 / b->read_bytes_per_s);
    }
}

static void print_json(const struct bench_rank *b, const struct rounds *r, const struct summary *s)
{
    const struct options *o = &b->options;
    printf("{\"bench\":\"round\",\"backend\":\"%s\",\"rank\":\"%s\",\"kv\":\"%s\",\"spec\":\"%s\",\"prompt_tokens\":%" PRId64
           ",\"sequences\":%" PRId64 ",\"load_s\":%.3f,\"prefill_s\":%.4f,\"prefill_tokens_per_s\":%.1f,\"round_ms\":%.4f,\"rounds\":%d,"
           "\"tokens_a_round\":%.3f,\"tokens_per_s\":%.2f,\"read_bytes_per_s\":%.0f,\"families\":[",
           b->kern->numerics, o->bench_as ? o->bench_as : "0/1", o->kv, o->spec, o->bench_prompt, o->bench_sequences, r->load_s,
           r->prefill_us / 1e6, s->prefill_per_s, s->median_us / 1e3, r->n, s->tokens_a_round, s->tokens_per_s, b->read_bytes_per_s);
    for (int i = 0; i < r->timed.families; i++) {
        const struct kern_time *t = &r->timed.family[i];
        printf("%s{\"family\":\"%s\",\"us\":%.1f,\"calls\":%.1f,\"bytes\":%.0f}", i ? "," : "", t->family, t->us / TIMED,
               (double)t->calls / TIMED, family_bytes(b, r, t->family, s->passes));
    }
    printf("],\"prefill_families\":[");
    for (int i = 0; i < r->prompts.families; i++)
        printf("%s{\"family\":\"%s\",\"us\":%.0f,\"calls\":%" PRIu64 "}", i ? "," : "", r->prompts.family[i].family, r->prompts.family[i].us,
               r->prompts.family[i].calls);
    printf("]}\n");
}

static void report(const struct bench_rank *b, struct rounds *r)
{
    const struct summary s = summarize(b, r);
    if (b->options.json) print_json(b, r, &s);
    else if (b->options.csv) print_csv(b, r, &s);
    else print_text(b, r, &s);
}

enum rc bench_round(const struct options *o, const int32_t *prompt, struct err *e)
{
    struct bench_rank b;
    struct engine *engine = NULL;
    struct rounds *r = calloc(1, sizeof *r);
    if (!r) return err_no_memory(e);
    enum rc rc = bench_rank_open(o, &b, e);
    if (rc == RC_OK) {
        const struct rank_args args = {.options = b.options, .rank = b.rank};
        struct engine_options options = rank_args_engine(&args);
        const int64_t start_us = clock_now_us();
        options.ranks = b.comm->ranks;
        options.solo = b.solo;
        rc = engine_open(&options, b.kern, b.comm, b.segment, &engine, e);
        if (rc == RC_OK) rc = b.kern->finish(b.kern, e);
        r->load_s = (double)(clock_now_us() - start_us) / 1e6;
    }
    if (rc == RC_OK) {
        r->sizes = engine_sizes_of(engine);
        rc = submit_all(engine, &b.options, prompt, e);
    }
    if (rc == RC_OK) rc = run_rounds(&b, engine, r, e);
    if (rc == RC_OK) report(&b, r);
    engine_close(engine);
    bench_rank_close(&b);
    free(r);
    return rc;
}
