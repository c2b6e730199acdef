/* cmd_status: counts of a run, from its state where there is one, else from its archive.
 *
 * OUT names an archive, whose state lies beside it as OUT.state; DIR names a state folder itself. The state knows
 * more (what is pending, attempts of jobs that have not ended) and is asked first; it keeps these counts, so that the answer
 * comes at once whatever its size. Of an archive they are in the manifest and the timing records. */
#define _GNU_SOURCE
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "archive.h"
#include "options.h"
#include "state.h"

enum { MANIFEST_MAX_BYTES = 1 << 20 };
static const size_t timing_max_bytes = (size_t)1 << 30;

struct figures {
    struct state_counts counts;
    char origin[STATE_ID_CHARS + 1];
};

static int64_t field(const json_t *object, const char *key) { return json_integer_value(json_object_get(object, key)); }

/* One timing record. */
static void timing_add(struct state_counts *c, const char *line, size_t len)
{
    json_error_t ignored;
    json_t *root = json_loadb(line, len, 0, &ignored);
    c->prompt_tokens += field(root, "prompt_tokens");
    c->cached_tokens += field(root, "cached_tokens");
    c->completion_tokens += field(root, "completion_tokens");
    c->attempts += field(root, "attempts");
    c->rank_restarts += field(root, "rank_restarts");
    json_decref(root);
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
    f->counts = (struct state_counts){.jobs = (size_t)field(counts, "jobs"),
                                      .done = (size_t)field(counts, "done"),
                                      .failed = (size_t)field(counts, "failed"),
                                      .pending = (size_t)field(counts, "pending")};
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
        timing_add(&f->counts, bytes.data + at, len);
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
    if (state_is_there(path)) return state_peek(path, options_state_mode(o, STATE_READ), &f->counts, f->origin, e);
    enum rc rc = options_state_folder(&beside, &folder, e);
    if (rc == RC_OK)
        rc = state_is_there(folder.data) ? state_peek(folder.data, options_state_mode(o, STATE_READ), &f->counts, f->origin, e) : from_archive(path, f, e);
    buf_free(&folder);
    return rc;
}

static void print_json(const struct figures *f)
{
    const struct state_counts *c = &f->counts;
    printf("{\"state_id\":\"%s\",\"jobs\":%zu,\"done\":%zu,\"failed\":%zu,\"pending\":%zu,\"prompt_tokens\":%" PRId64
           ",\"cached_tokens\":%" PRId64 ",\"completion_tokens\":%" PRId64 ",\"attempts\":%" PRId64
           ",\"rank_restarts\":%" PRId64 "}\n",
           f->origin, c->jobs, c->done, c->failed, c->pending, c->prompt_tokens,
           c->cached_tokens, c->completion_tokens, c->attempts, c->rank_restarts);
}

static void print_text(const struct state_counts *c)
{
    printf("jobs      %zu: %zu done, %zu failed, %zu pending\n", c->jobs, c->done, c->failed,
           c->pending);
    printf("tokens    %" PRId64 " of prompts (%" PRId64 " cached), %" PRId64 " generated\n", c->prompt_tokens,
           c->cached_tokens, c->completion_tokens);
    printf("attempts  %" PRId64 ", rank restarts %" PRId64 "\n", c->attempts, c->rank_restarts);
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
        print_text(&f.counts);
    return EXIT_DONE;
}
