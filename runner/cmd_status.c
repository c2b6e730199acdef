/* cmd_status: counts of a run, from its state where there is one, else from its archive.
 *
 * OUT names an archive, whose state lies beside it as OUT.state; DIR names a state folder itself. The state knows
 * more (what is pending, attempts of jobs that have not ended) and is asked first. Tokens come from the timing
 * records, which both have. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "archive.h"
#include "options.h"
#include "state.h"

enum { MANIFEST_MAX_BYTES = 1 << 20 };
static const size_t timing_max_bytes = (size_t)1 << 30;

struct figures {
    struct state_counts counts;
    int64_t prompt_tokens, cached_tokens, completion_tokens, attempts, rank_restarts;
    char origin[33];
};

static int64_t field(const json_t *object, const char *key) { return json_integer_value(json_object_get(object, key)); }

/* Token counts of one timing record; attempts as well when they are not known from elsewhere. */
static void timing_add(struct figures *f, const char *line, size_t len, bool attempts)
{
    json_error_t ignored;
    json_t *root = json_loadb(line, len, 0, &ignored);
    f->prompt_tokens += field(root, "prompt_tokens");
    f->cached_tokens += field(root, "cached_tokens");
    f->completion_tokens += field(root, "completion_tokens");
    if (attempts) {
        f->attempts += field(root, "attempts");
        f->rank_restarts += field(root, "rank_restarts");
    }
    json_decref(root);
}

static bool is_state(const char *folder)
{
    struct buf path = {0};
    buf_printf(&path, "%s/id", folder);
    bool there = path.data && access(path.data, F_OK) == 0;
    buf_clear(&path);
    buf_printf(&path, "%s/data.mdb", folder);
    there = there && path.data && access(path.data, F_OK) == 0;
    buf_free(&path);
    return there;
}

static enum rc state_figures(struct state *s, struct figures *f, struct err *e)
{
    struct buf scratch = {0};
    enum rc rc = state_snapshot(s, e);
    if (rc == RC_OK) rc = state_count(s, &f->counts, e);
    snprintf(f->origin, sizeof f->origin, "%s", state_id(s));
    for (size_t i = 0; i < state_job_count(s) && rc == RC_OK; i++) {
        struct state_job job;
        struct state_attempts attempts;
        struct state_result r;
        rc = state_job_at(s, i, &job, e);
        if (rc == RC_OK) rc = state_get_attempts(s, job.key, &attempts, e);
        if (rc != RC_OK) break;
        f->attempts += attempts.attempts;
        f->rank_restarts += attempts.rank_restarts;
        rc = state_get_result(s, job.key, &scratch, &r, e);
        if (rc == RC_OK) timing_add(f, r.timing, r.timing_len, false);
        if (rc == RC_RETRY) rc = RC_OK;
    }
    buf_free(&scratch);
    return rc;
}

static enum rc from_state(const char *folder, const struct options *o, struct figures *f, struct err *e)
{
    struct state *s = NULL;
    enum rc rc = state_open(folder, options_state_mode(o, STATE_READ), &s, e);
    if (rc == RC_OK) rc = state_figures(s, f, e);
    state_close(s);
    return rc;
}

static enum rc no_such(const char *path, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "no_state", "%s is neither a state folder nor an archive of tandem",
                   path);
}

static enum rc manifest_figures(const struct buf *manifest, const char *path, struct figures *f, struct err *e)
{
    json_error_t ignored;
    json_t *root = json_loadb(manifest->data, manifest->len, 0, &ignored);
    const json_t *counts = json_object_get(root, "counts");
    const char *tool = json_string_value(json_object_get(root, "tool"));
    const char *origin = json_string_value(json_object_get(root, "state_id"));
    enum rc rc = RC_OK;
    if (!tool || strcmp(tool, "tandem") || !origin || !json_is_object(counts))
        rc = no_such(path, e);
    else
        snprintf(f->origin, sizeof f->origin, "%s", origin);
    f->counts = (struct state_counts){(size_t)field(counts, "jobs"), (size_t)field(counts, "done"),
                                      (size_t)field(counts, "failed"), (size_t)field(counts, "pending")};
    json_decref(root);
    return rc;
}

static enum rc from_archive(const char *path, struct figures *f, struct err *e)
{
    struct buf bytes = {0};
    enum rc rc = archive_read_member(path, "manifest.json", MANIFEST_MAX_BYTES, &bytes, e);
    if (rc == RC_RETRY) rc = no_such(path, e);
    if (rc == RC_OK) rc = manifest_figures(&bytes, path, f, e);
    buf_clear(&bytes);
    if (rc == RC_OK) rc = archive_read_member(path, "timing.jsonl", timing_max_bytes, &bytes, e);
    if (rc == RC_RETRY) rc = no_such(path, e);
    for (size_t at = 0; rc == RC_OK && at < bytes.len;) {
        size_t len = strcspn(bytes.data + at, "\n");
        timing_add(f, bytes.data + at, len, true);
        at += len + 1;
    }
    buf_free(&bytes);
    if (rc != RC_OK && e && !e->exit_status) e->exit_status = EXIT_NO_INPUT;
    return rc;
}

static enum rc collect(const struct options *o, struct figures *f, struct err *e)
{
    const char *path = o->files[0];
    const struct options beside = {.out = path};
    struct buf folder = {0};
    if (is_state(path)) return from_state(path, o, f, e);
    enum rc rc = options_state_folder(&beside, &folder, e);
    if (rc == RC_OK) rc = is_state(folder.data) ? from_state(folder.data, o, f, e) : from_archive(path, f, e);
    buf_free(&folder);
    return rc;
}

static void print_json(const struct figures *f)
{
    printf("{\"state_id\":\"%s\",\"jobs\":%zu,\"done\":%zu,\"failed\":%zu,\"pending\":%zu,\"prompt_tokens\":%" PRId64
           ",\"cached_tokens\":%" PRId64 ",\"completion_tokens\":%" PRId64 ",\"attempts\":%" PRId64
           ",\"rank_restarts\":%" PRId64 "}\n",
           f->origin, f->counts.jobs, f->counts.done, f->counts.failed, f->counts.pending, f->prompt_tokens,
           f->cached_tokens, f->completion_tokens, f->attempts, f->rank_restarts);
}

static void print_text(const struct figures *f)
{
    printf("jobs      %zu: %zu done, %zu failed, %zu pending\n", f->counts.jobs, f->counts.done, f->counts.failed,
           f->counts.pending);
    printf("tokens    %" PRId64 " of prompts (%" PRId64 " cached), %" PRId64 " generated\n", f->prompt_tokens,
           f->cached_tokens, f->completion_tokens);
    printf("attempts  %" PRId64 ", rank restarts %" PRId64 "\n", f->attempts, f->rank_restarts);
}

int cmd_status(const struct options *o)
{
    struct err e = {0};
    struct figures f = {0};
    char text[1100];
    if (collect(o, &f, &e) != RC_OK) {
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
        return e.exit_status ? e.exit_status : EXIT_INTERNAL;
    }
    if (o->json)
        print_json(&f);
    else
        print_text(&f);
    return EXIT_DONE;
}
