/* export: durable state to one archive.
 *
 * Everything is read under one snapshot, so a run that goes on beside it cannot make the two passes differ. The
 * first pass gives each member's size and SHA-256, and with them the manifest, which is the last member: who finds
 * it finds all of it. If the output already has these very members, nothing is written. The second pass streams
 * records in registration order, or in that of settling, one member after another, since a tar needs them so. Records are copied as they
 * are: the bytes were fixed when the job ended.
 *
 * In a final archive every job has a record: those without a result get one here that says so. It is made anew in each
 * pass, of the same bytes, and stored nowhere, so that the next run finds them pending and does them.
 *
 * An existing output is replaced only when its manifest names this state, or when the caller forces it: another
 * state's answers are never lost by a typing error. */
#define _GNU_SOURCE
#include "export.h"

#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "archive.h"
#include "build_identity.h"
#include "job_result.h"

enum { MANIFEST_MAX_BYTES = 1 << 20, MANIFEST_SCHEMA = 1 };
enum { OUTPUT, ERRORS, TIMING, MEMBERS };
static const char *const member_names[MEMBERS] = {"output.jsonl", "error.jsonl", "timing.jsonl"};
static const char manifest_name[] = "manifest.json";

struct member {
    uint64_t bytes, lines;
    struct sha256_ctx sha;
    char sha_hex[65];
};

struct export
{
    struct state *state;
    const char *path;
    bool final;
    size_t *order; /* the i-th record's job; NULL: the i-th */
    struct member members[MEMBERS];
    struct state_counts counts;
    struct buf manifest;
    struct buf job_scratch, scratch; /* one job, its result */
    struct buf record, timing; /* of one job that expired */
};

static void hex_of(const unsigned char *bytes, size_t n, char *out)
{
    for (size_t i = 0; i < n; i++) snprintf(out + 2 * i, 3, "%02x", bytes[i]);
}

/* What a result gives to a member: a line, or nothing. */
static bool line_for(const struct state_result *r, int member, struct state_result *line)
{
    *line = *r;
    if (member == TIMING) {
        line->record = r->timing;
        line->record_len = r->timing_len;
        return true;
    }
    return (member == OUTPUT) == (r->kind == STATE_OUTPUT);
}

static enum rc expired(struct export *x, const struct state_job *job, struct state_result *out, struct err *e)
{
    struct job_fault fault = {0};
    struct state_attempts attempts;
    job_fault_set(&fault, 0, "", "batch_expired", "", "%s",
                  "This request could not be executed before the completion window expired.");
    enum rc rc = state_get_attempts(x->state, job->key, &attempts, e);
    if (rc != RC_OK) return rc;
    struct job_timing t = {.attempts = attempts.attempts, .rank_restarts = attempts.rank_restarts};
    buf_clear(&x->record);
    buf_clear(&x->timing);
    rc = job_result_failure(job->key, job->custom_id, &fault, &x->record, e);
    if (rc == RC_OK) rc = job_result_timing(job->custom_id, 0, &t, &x->timing, e);
    *out = (struct state_result){.kind = STATE_ERROR,
                                 .record = x->record.data,
                                 .record_len = x->record.len,
                                 .timing = x->timing.data,
                                 .timing_len = x->timing.len};
    return rc;
}

/* RC_RETRY: it has no record. */
static enum rc result_at(struct export *x, size_t i, struct state_result *out, struct err *e)
{
    struct state_job job;
    enum rc rc = state_job_at(x->state, x->order ? x->order[i] : i, &x->job_scratch, &job, e);
    if (rc == RC_OK) rc = state_get_result(x->state, job.key, &x->scratch, out, e);
    return rc == RC_RETRY && x->final ? expired(x, &job, out, e) : rc;
}

/* ---- order ---- */

struct settled {
    uint64_t number; /* UINT64_MAX: not settled */
    size_t job;
};

static int by_number(const void *a, const void *b)
{
    const struct settled *x = a, *y = b;
    if (x->number != y->number) return x->number < y->number ? -1 : 1;
    return x->job < y->job ? -1 : x->job > y->job;
}

static enum rc order_make(struct export *x, struct err *e)
{
    size_t n = state_job_count(x->state);
    enum rc rc = RC_OK;
    struct settled *settled = calloc(n + 1, sizeof *settled);
    x->order = calloc(n + 1, sizeof *x->order);
    if (!settled || !x->order) rc = err_no_memory(e);
    for (size_t i = 0; i < n && rc == RC_OK; i++) {
        struct state_job job;
        settled[i].job = i;
        rc = state_job_at(x->state, i, &x->job_scratch, &job, e);
        if (rc == RC_OK) rc = state_result_settled(x->state, job.key, &settled[i].number, e);
        if (!settled[i].number) settled[i].number = UINT64_MAX;
    }
    if (rc == RC_OK) {
        qsort(settled, n, sizeof *settled, by_number);
        for (size_t i = 0; i < n; i++) x->order[i] = settled[i].job;
    }
    free(settled);
    return rc;
}

/* ---- first pass ---- */

static void member_count(struct member *m, const struct state_result *line)
{
    m->bytes += line->record_len + 1;
    m->lines++;
    sha256_update(&m->sha, line->record_len, (const uint8_t *)line->record);
    sha256_update(&m->sha, 1, (const uint8_t *)"\n");
}

static enum rc measure(struct export *x, struct err *e)
{
    size_t n = state_job_count(x->state);
    x->counts = (struct state_counts){.jobs = n};
    for (int m = 0; m < MEMBERS; m++) sha256_init(&x->members[m].sha);
    for (size_t i = 0; i < n; i++) {
        struct state_result r, line;
        enum rc rc = result_at(x, i, &r, e);
        if (rc == RC_RETRY) {
            x->counts.pending++;
            continue;
        }
        if (rc != RC_OK) return rc;
        x->counts.done += r.kind == STATE_OUTPUT;
        x->counts.failed += r.kind == STATE_ERROR;
        for (int m = 0; m < MEMBERS; m++)
            if (line_for(&r, m, &line)) member_count(&x->members[m], &line);
    }
    for (int m = 0; m < MEMBERS; m++) {
        unsigned char digest[32];
        sha256_digest(&x->members[m].sha, sizeof digest, digest);
        hex_of(digest, sizeof digest, x->members[m].sha_hex);
    }
    return RC_OK;
}

/* ---- manifest ---- */

/* "name=value\n" lines as an object, in their order. */
static json_t *identity_json(char *lines)
{
    json_t *identity = json_object();
    char *rest = lines;
    for (char *line = rest ? strsep(&rest, "\n") : NULL; line; line = strsep(&rest, "\n")) {
        char *value = strchr(line, '=');
        if (!value) continue;
        *value++ = '\0';
        json_object_set_new(identity, line, json_string(value));
    }
    return identity;
}

static json_t *members_json(const struct export *x)
{
    json_t *members = json_array();
    for (int m = 0; m < MEMBERS; m++)
        json_array_append_new(members, json_pack("{s:s, s:I, s:I, s:s}", "name", member_names[m], "bytes",
                                                 (json_int_t)x->members[m].bytes, "lines",
                                                 (json_int_t)x->members[m].lines, "sha256", x->members[m].sha_hex));
    return members;
}

static enum rc manifest_make(struct export *x, struct err *e)
{
    struct buf identity = {0};
    unsigned char digest[32];
    char digest_hex[65];
    enum rc rc = state_identity(x->state, &identity, e);
    if (rc == RC_OK) rc = state_input_digest(x->state, digest, e);
    if (rc == RC_RETRY)
        rc = err_set(e, RC_BAD_INPUT, EXIT_NO_INPUT, "empty_state", "no run has registered its jobs in this state yet");
    if (rc != RC_OK) {
        buf_free(&identity);
        return rc;
    }
    hex_of(digest, sizeof digest, digest_hex);
    const struct state_counts *c = &x->counts;
    json_t *root = json_pack("{s:s, s:i, s:s, s:s, s:o, s:s, s:{s:I, s:I, s:I, s:I}, s:o}", "tool", "tandem", "schema",
                             MANIFEST_SCHEMA, "version", TANDEM_VERSION, "state_id", state_id(x->state), "identity",
                             identity_json(identity.data), "input_sha256", digest_hex, "counts", "jobs",
                             (json_int_t)c->jobs, "done", (json_int_t)c->done, "failed", (json_int_t)c->failed,
                             "pending", (json_int_t)c->pending, "members", members_json(x));
    buf_free(&identity);
    char *text = root ? json_dumps(root, JSON_INDENT(2)) : NULL;
    json_decref(root);
    bool good = text && buf_append_str(&x->manifest, text) && buf_append_str(&x->manifest, "\n");
    free(text);
    return good ? RC_OK : err_no_memory(e);
}

/* ---- what is there already ---- */

static bool folder_is_empty(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir) return false;
    size_t n = 0;
    for (const struct dirent *d = readdir(dir); d; d = readdir(dir))
        n += strcmp(d->d_name, ".") && strcmp(d->d_name, "..");
    closedir(dir);
    return n == 0;
}

/* True if the existing output has exactly these members. */
static bool holds_members(const struct export *x)
{
    bool same = true;
    for (int m = 0; m < MEMBERS && same; m++) {
        const struct member *want = &x->members[m];
        unsigned char digest[32];
        uint64_t n_bytes;
        char hex[65];
        same = archive_digest_member(x->path, member_names[m], (size_t)want->bytes, digest, &n_bytes, NULL) == RC_OK &&
               n_bytes == want->bytes;
        if (!same) break;
        hex_of(digest, sizeof digest, hex);
        same = strcmp(hex, want->sha_hex) == 0;
    }
    return same;
}

static enum rc foreign(const char *path, struct err *e)
{
    return err_set(e, RC_FAILED, EXIT_NO_OUTPUT, "foreign_output",
                   "%s exists and is no whole archive of tandem; --force "
                   "replaces it",
                   path);
}

/* Compares the origin that an existing manifest names with this state. */
static enum rc origin_check(const struct export *x, const struct buf *manifest, struct err *e)
{
    json_error_t ignored;
    json_t *root = json_loadb(manifest->data, manifest->len, JSON_REJECT_DUPLICATES, &ignored);
    const char *tool = json_string_value(json_object_get(root, "tool"));
    const char *origin = json_string_value(json_object_get(root, "state_id"));
    enum rc rc = RC_OK;
    if (!tool || strcmp(tool, "tandem") || !origin)
        rc = foreign(x->path, e);
    else if (strcmp(origin, state_id(x->state)))
        rc = err_set(e, RC_FAILED, EXIT_NO_OUTPUT, "foreign_output",
                     "%s holds the answers of another state (%.32s, this is "
                     "%s; a state that was deleted and made again is another one); --force replaces it",
                     x->path, origin, state_id(x->state));
    json_decref(root);
    return rc;
}

/* Whether what is at path may be replaced. read_rc: how reading its manifest ended. */
static enum rc may_replace(const struct export *x, const struct stat *st, enum rc read_rc, const struct buf *manifest,
                           bool force, struct err *e)
{
    if (force || (S_ISDIR(st->st_mode) && folder_is_empty(x->path))) return RC_OK;
    return read_rc == RC_OK ? origin_check(x, manifest, e) : foreign(x->path, e);
}

/* RC_RETRY: there is nothing at path. */
static enum rc output_stat(const char *path, struct stat *st, struct err *e)
{
    if (lstat(path, st) == 0) return RC_OK;
    if (errno == ENOENT) return RC_RETRY;
    return err_errno(e, RC_FAILED, EXIT_NO_OUTPUT, "cannot_look", "cannot look at %s", path);
}

/* RC_RETRY: the output must be written. RC_OK: it is this state already. */
static enum rc output_look(const struct export *x, bool force, struct err *e)
{
    struct stat st;
    struct buf manifest = {0};
    enum rc rc = output_stat(x->path, &st, e);
    if (rc != RC_OK) return rc;
    rc = archive_read_member(x->path, manifest_name, MANIFEST_MAX_BYTES, &manifest, NULL);
    bool same = rc == RC_OK && manifest.len == x->manifest.len &&
                !memcmp(manifest.data, x->manifest.data, manifest.len) && holds_members(x);
    if (!same && (rc = may_replace(x, &st, rc, &manifest, force, e)) == RC_OK) rc = RC_RETRY;
    buf_free(&manifest);
    return rc;
}

enum rc export_check(struct state *s, const char *path, bool force, struct err *e)
{
    struct export x = {.state = s, .path = path};
    struct stat st;
    struct buf manifest = {0};
    struct archive_writer *w = NULL;
    enum rc rc = output_stat(path, &st, e);
    if (rc == RC_OK) {
        rc = archive_read_member(path, manifest_name, MANIFEST_MAX_BYTES, &manifest, NULL);
        rc = may_replace(&x, &st, rc, &manifest, force, e);
    }
    buf_free(&manifest);
    if (rc == RC_OK || rc == RC_RETRY) rc = archive_create(path, &w, e);
    archive_discard(w);
    return rc;
}

/* ---- second pass ---- */

static enum rc member_write(struct export *x, struct archive_writer *w, int m, struct err *e)
{
    enum rc rc = archive_member(w, member_names[m], x->members[m].bytes, e);
    for (size_t i = 0; i < state_job_count(x->state) && rc == RC_OK; i++) {
        struct state_result r, line;
        rc = result_at(x, i, &r, e);
        if (rc == RC_RETRY) {
            rc = RC_OK;
            continue;
        }
        if (rc != RC_OK || !line_for(&r, m, &line)) continue;
        rc = archive_write(w, line.record, line.record_len, e);
        if (rc == RC_OK) rc = archive_write(w, "\n", 1, e);
    }
    return rc;
}

static enum rc output_write(struct export *x, struct err *e)
{
    struct archive_writer *w = NULL;
    enum rc rc = archive_create(x->path, &w, e);
    if (rc != RC_OK) return rc;
    for (int m = 0; m < MEMBERS && rc == RC_OK; m++) rc = member_write(x, w, m, e);
    if (rc == RC_OK) rc = archive_member(w, manifest_name, x->manifest.len, e);
    if (rc == RC_OK) rc = archive_write(w, x->manifest.data, x->manifest.len, e);
    if (rc == RC_OK) return archive_publish(w, e);
    archive_discard(w);
    return rc;
}

enum rc export_archive(struct state *s, const char *path, const struct export_options *o, struct err *e)
{
    struct export x = {.state = s, .path = path, .final = o->final};
    enum rc rc = state_snapshot(s, e);
    if (rc != RC_OK) return rc;
    if (o->by_completion) rc = order_make(&x, e);
    if (rc == RC_OK) rc = measure(&x, e);
    if (rc == RC_OK) rc = manifest_make(&x, e);
    if (rc == RC_OK) rc = output_look(&x, o->force, e);
    if (rc == RC_RETRY) rc = output_write(&x, e);
    state_snapshot_end(s);
    free(x.order);
    buf_free(&x.job_scratch);
    buf_free(&x.scratch);
    buf_free(&x.record);
    buf_free(&x.timing);
    buf_free(&x.manifest);
    return rc;
}
