/* cmd_retry_failed: takes error records out of a state, so that the next run computes their jobs again.
 *
 * Of the registered jobs alone: what other job files left is not asked for. Records go together with the jobs' counts of
 * attempts and failures, all in one transaction. The archive is left as it is until the next run. A dry run needs no lock. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "options.h"
#include "state.h"
#include "text_check.h"

/* What an error record says. Strings live as long as root. */
struct failure {
    json_t *root;
    int status;
    const char *code;
};

static struct failure failure_read(const struct state_result *r)
{
    json_error_t ignored;
    struct failure f = {.root = json_loadb(r->record, r->record_len, 0, &ignored), .code = ""};
    const json_t *response = json_object_get(f.root, "response");
    const json_t *error = json_object_get(json_object_get(response, "body"), "error");
    const json_t *code = json_object_get(error ? error : json_object_get(f.root, "error"), "code");
    f.status = (int)json_integer_value(json_object_get(response, "status_code"));
    if (json_is_string(code)) f.code = json_string_value(code);
    return f;
}

static bool is_wanted(const struct options *o, const struct failure *f)
{
    return (!o->retry_status || f->status == o->retry_status) && (!o->retry_code || !strcmp(f->code, o->retry_code));
}

static enum rc print_failure(const struct failure *f, const char *custom_id, struct err *e)
{
    struct buf line = {0};
    buf_printf(&line, "%d ", f->status);
    text_append_printable(&line, f->code, SIZE_MAX);
    buf_append_str(&line, " ");
    text_append_printable(&line, custom_id, SIZE_MAX);
    if (!line.failed) puts(line.data);
    enum rc rc = line.failed ? err_no_memory(e) : RC_OK;
    buf_free(&line);
    return rc;
}

/* What is read of one job. */
struct reading {
    struct buf job, result;
};

/* Appends the key of job i if its record is to go. */
static enum rc look_at(const struct options *o, struct state *s, size_t i, struct reading *scratch, struct buf *keys, struct err *e)
{
    struct state_job job;
    struct state_result r;
    enum rc rc = state_job_at(s, i, &scratch->job, &job, e);
    if (rc == RC_OK) rc = state_get_result(s, job.key, &scratch->result, &r, e);
    if (rc == RC_RETRY || (rc == RC_OK && r.kind != STATE_ERROR)) return RC_OK;
    if (rc != RC_OK) return rc;
    struct failure f = failure_read(&r);
    if (is_wanted(o, &f)) {
        if (!buf_append(keys, job.key, sizeof job.key)) rc = err_no_memory(e);
        if (rc == RC_OK && o->dry_run) rc = print_failure(&f, job.custom_id, e);
    }
    json_decref(f.root);
    return rc;
}

static enum rc retry(const struct options *o, const char *folder, size_t *n, struct err *e)
{
    struct state *s = NULL;
    struct reading scratch = {0};
    struct buf keys = {0};
    enum rc rc = state_open(folder, options_state_mode(o, o->dry_run ? STATE_READ : STATE_CHANGE), &s, e);
    if (rc == RC_OK && o->dry_run) rc = state_snapshot(s, e);
    for (size_t i = 0; rc == RC_OK && i < state_job_count(s); i++) rc = look_at(o, s, i, &scratch, &keys, e);
    *n = keys.len / STATE_KEY_BYTES;
    if (rc == RC_OK && !o->dry_run && *n) rc = state_forget(s, (const unsigned char *)keys.data, *n, e);
    buf_free(&scratch.job);
    buf_free(&scratch.result);
    buf_free(&keys);
    state_close(s);
    return rc;
}

int cmd_retry_failed(const struct options *o)
{
    struct err e = {0};
    struct buf folder = {0};
    char text[1100];
    size_t n = 0;
    enum rc rc = options_state_folder(o, &folder, &e);
    if (rc == RC_OK) rc = retry(o, folder.data, &n, &e);
    if (rc != RC_OK)
        log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
    else if (!o->quiet)
        log_line(LOG_INFO, "%s: %zu error records %s", folder.data, n,
                 o->dry_run ? "would be removed" : "removed; the next run computes their jobs again");
    buf_free(&folder);
    return rc == RC_OK ? EXIT_DONE : e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
