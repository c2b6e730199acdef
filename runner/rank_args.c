/* rank_args: one table says how each setting travels from the runner to a rank, so that the side that writes the command
 * line and the side that reads it cannot drift apart. Every option has exactly one value; numbers are decimal. The values
 * were validated when the user's command line was parsed; they are checked again only for their form, because the hidden
 * command can be typed by hand. */
#define _GNU_SOURCE
#include "rank_args.h"
#include "rank_backend.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum field_kind { FIELD_INT, FIELD_INT64, FIELD_BOOL, FIELD_TEXT, FIELD_FAULT };

struct field {
    const char *name;
    enum field_kind kind;
    size_t offset;
};

static const struct field fields[] = {
    {"--rank", FIELD_INT, offsetof(struct rank_args, rank)},
    {"--ranks", FIELD_INT, offsetof(struct rank_args, options.ranks)},
    {"--group", FIELD_INT, offsetof(struct rank_args, group)},
    {"--groups", FIELD_INT, offsetof(struct rank_args, options.groups)},
    {"--segment-fd", FIELD_INT, offsetof(struct rank_args, segment_fd)},
    {"--socket-fd", FIELD_INT, offsetof(struct rank_args, socket_fd)},
    {"--runner", FIELD_INT64, offsetof(struct rank_args, runner_pid)},
    {"--model", FIELD_TEXT, offsetof(struct rank_args, options.model)},
    {"--chat-format", FIELD_TEXT, offsetof(struct rank_args, options.chat_format)},
    {"--backend", FIELD_TEXT, offsetof(struct rank_args, options.backend)},
    {"--gpus", FIELD_TEXT, offsetof(struct rank_args, options.gpus)},
    {"--sum-path", FIELD_TEXT, offsetof(struct rank_args, options.sum_path)},
    {"--no-graphs", FIELD_BOOL, offsetof(struct rank_args, options.no_graphs)},
    {"--isa", FIELD_TEXT, offsetof(struct rank_args, options.isa)},
    {"--threads", FIELD_INT, offsetof(struct rank_args, options.threads)},
    {"--active", FIELD_INT, offsetof(struct rank_args, options.active)},
    {"--context", FIELD_INT, offsetof(struct rank_args, options.context)},
    {"--kv-tokens", FIELD_INT64, offsetof(struct rank_args, options.kv_tokens)},
    {"--kv", FIELD_TEXT, offsetof(struct rank_args, options.kv)},
    {"--weights", FIELD_TEXT, offsetof(struct rank_args, options.weights)},
    {"--spec", FIELD_TEXT, offsetof(struct rank_args, options.spec)},
    {"--drafts", FIELD_INT, offsetof(struct rank_args, options.drafts)},
    {"--cache", FIELD_TEXT, offsetof(struct rank_args, options.cache)},
    {"--cache-gib", FIELD_INT, offsetof(struct rank_args, options.cache_gib)},
    {"--cache-free-gib", FIELD_INT, offsetof(struct rank_args, options.cache_free_gib)},
    {"--checkpoints", FIELD_TEXT, offsetof(struct rank_args, options.checkpoints)},
    {"--checkpoint", FIELD_INT64, offsetof(struct rank_args, options.checkpoint_us)},
    {"--prefill-rows", FIELD_INT, offsetof(struct rank_args, options.prefill_rows)},
    {"--trace", FIELD_BOOL, offsetof(struct rank_args, options.trace)},
    {"--quiet", FIELD_BOOL, offsetof(struct rank_args, options.quiet)},
    {"--fault", FIELD_FAULT, offsetof(struct rank_args, options.fault)},
};
enum { N_FIELDS = sizeof fields / sizeof fields[0] };
_Static_assert(2 * N_FIELDS + 3 <= sizeof((struct rank_argv *)0)->argv / sizeof(char *), "argv holds every field");

static const char *const fault_names[] = {"none", "exit", "kill", "stop", "hang", "token", "state", "plan"};

static const void *field_at(const struct rank_args *a, const struct field *f) { return (const char *)a + f->offset; }

/* Cores this process may use, shared out evenly among all ranks of all groups. */
static int share_of_cores(const struct options *o)
{
    cpu_set_t set;
    int cores = 1, sharers = o->ranks * (o->groups > 0 ? o->groups : 1);
    if (!sched_getaffinity(0, sizeof set, &set)) cores = CPU_COUNT(&set);
    return sharers > 0 && cores / sharers > 0 ? cores / sharers : 1;
}

struct rank_args rank_args_make(const struct options *o, int group, int rank)
{
    struct rank_args a = {
        .options = {.model = o->model, .chat_format = o->chat_format, .backend = o->backend, .isa = o->isa,
                    .gpus = o->gpus, .sum_path = o->sum_path, .no_graphs = o->no_graphs,
                    .ranks = o->ranks, .groups = o->groups, .threads = o->threads > 0 ? o->threads : share_of_cores(o), .active = o->active,
                    .context = o->context, .kv_tokens = o->kv_tokens, .kv = o->kv, .weights = o->weights,
                    .spec = o->spec, .drafts = o->drafts, .prefill_rows = rank_backend_prefill_rows(o),
                    .cache = o->cache, .cache_gib = o->cache_gib, .cache_free_gib = o->cache_free_gib,
                    .checkpoints = o->checkpoints, .checkpoint_us = o->checkpoint_us,
                    .trace = o->trace, .quiet = o->quiet, .fault = o->fault},
        .rank = rank,
        .group = group,
        .socket_fd = RANK_SOCKET_FD,
        .segment_fd = RANK_SEGMENT_FD,
        .runner_pid = getpid(),
    };
    return a;
}

/* Nothing is written for a setting that is absent; its reader starts from zeros as well. */
static void write_field(const struct rank_args *a, const struct field *f, struct buf *text)
{
    const void *at = field_at(a, f);
    char value[64];
    const char *shown = value;
    if (f->kind == FIELD_INT) {
        snprintf(value, sizeof value, "%d", *(const int *)at);
    } else if (f->kind == FIELD_INT64) {
        snprintf(value, sizeof value, "%" PRId64, *(const int64_t *)at);
    } else if (f->kind == FIELD_BOOL) {
        snprintf(value, sizeof value, "%d", *(const bool *)at ? 1 : 0);
    } else if (f->kind == FIELD_TEXT) {
        shown = *(const char *const *)at;
        if (!shown) return;
    } else {
        const struct fault *fault = at;
        if (fault->kind == FAULT_NONE) return;
        snprintf(value, sizeof value, "%d:%s@%" PRIu64, fault->rank, fault_names[fault->kind], fault->step);
    }
    buf_append(text, f->name, strlen(f->name) + 1);
    buf_append(text, shown, strlen(shown) + 1);
}

enum rc rank_args_write(const struct rank_args *a, struct rank_argv *out, struct err *e)
{
    static const char head[] = "tandem\0rank";
    memset(out, 0, sizeof *out);
    buf_append(&out->text, head, sizeof head);
    for (size_t i = 0; i < N_FIELDS; i++) write_field(a, &fields[i], &out->text);
    if (out->text.failed) return err_no_memory(e);
    size_t n = 0;
    for (size_t at = 0; at < out->text.len; at += strlen(out->text.data + at) + 1) out->argv[n++] = out->text.data + at;
    out->argv[n] = NULL;
    return RC_OK;
}

void rank_argv_free(struct rank_argv *v)
{
    buf_free(&v->text);
    memset(v, 0, sizeof *v);
}

static enum rc read_number(const char *name, const char *text, int64_t max, int64_t *out, struct err *e)
{
    char *end;
    errno = 0;
    long long v = strtoll(text, &end, 10);
    if (errno || end == text || *end || v < 0 || v > max)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_rank_option", "%s %s is no number in range", name, text);
    *out = v;
    return RC_OK;
}

static enum rc read_field(const struct field *f, char *text, struct rank_args *out, struct err *e)
{
    void *at = (char *)out + f->offset;
    int64_t v = 0;
    if (f->kind == FIELD_TEXT) {
        *(const char **)at = text;
        return RC_OK;
    }
    if (f->kind == FIELD_FAULT) return fault_parse(text, at, e);
    int64_t max = f->kind == FIELD_INT64 ? INT64_MAX : f->kind == FIELD_INT ? INT_MAX : 1;
    enum rc rc = read_number(f->name, text, max, &v, e);
    if (f->kind == FIELD_INT) *(int *)at = (int)v;
    if (f->kind == FIELD_INT64) *(int64_t *)at = v;
    if (f->kind == FIELD_BOOL) *(bool *)at = v != 0;
    return rc;
}

enum rc rank_args_read(int argc, char **argv, struct rank_args *out, struct err *e)
{
    memset(out, 0, sizeof *out);
    out->segment_fd = out->socket_fd = -1;
    for (int i = 2; i < argc; i += 2) {
        const struct field *f = NULL;
        for (size_t k = 0; k < N_FIELDS && !f; k++)
            if (!strcmp(argv[i], fields[k].name)) f = &fields[k];
        if (!f || i + 1 >= argc)
            return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_rank_option", "%s: unknown or without a value", argv[i]);
        enum rc rc = read_field(f, argv[i + 1], out, e);
        if (rc != RC_OK) return rc;
    }
    bool complete = out->segment_fd >= 0 && out->socket_fd >= 0 && out->runner_pid > 0 && out->options.model;
    if (!complete || out->options.ranks < 1 || out->options.ranks > MAX_RANKS || out->rank >= out->options.ranks)
        return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_rank_option", "ranks are started by tandem run, not by hand");
    return RC_OK;
}

struct engine_options rank_args_engine(const struct rank_args *a)
{
    const struct options *o = &a->options;
    enum kv_format kv = KV_F16;
    enum spec_mode spec = SPEC_AUTO;
    if (o->kv) kv_format_parse(o->kv, &kv);
    if (o->spec) spec_mode_parse(o->spec, &spec);
    return (struct engine_options){
        .model_path = o->model,
        .rank = a->rank,
        .ranks = o->ranks,
        .active = o->active,
        .context = o->context,
        .kv_tokens = o->kv_tokens,
        .kv = kv,
        .weights = o->weights && !strcmp(o->weights, "w8") ? KERN_WEIGHTS_W8 : KERN_WEIGHTS_NATIVE,
        .spec = spec,
        .drafts = o->drafts,
        .prefill_rows = o->prefill_rows,
        .prefixes = o->cache != NULL,
        .checkpoint_us = o->checkpoints ? o->checkpoint_us : 0,
        .trace = o->trace,
        .fault = o->fault,
    };
}
