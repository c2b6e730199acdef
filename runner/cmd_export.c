/* cmd_export: an archive of what a state holds at this moment. Needs no model and no lock: it may run beside a run. */
#include "export.h"
#include "options.h"
#include "state.h"
#include "state_salvage.h"

/* OUT.state, made of what can be read of --state; its name is left in folder. */
static enum rc salvage(const struct options *o, struct buf *folder, struct err *e)
{
    const struct options beside = {.out = o->out};
    struct state_salvaged got;
    enum rc rc = options_state_folder(&beside, folder, e);
    if (rc == RC_OK) rc = state_salvage(o->state, folder->data, &got, e);
    if (rc != RC_OK) return rc;
    log_line(LOG_WARN, "%zu jobs and %zu results of %s are in %s%s", got.jobs, got.results, o->state, folder->data,
             got.identity ? "" : "; its settings are lost, no run can continue it");
    return RC_OK;
}

int cmd_export(const struct options *o)
{
    struct err e = {0};
    struct buf folder = {0};
    struct state *s = NULL;
    struct state_counts counts;
    const struct export_options how = {.force = o->force, .final = o->final, .by_completion = o->output_by_completion};
    char text[1100];
    enum rc rc = o->salvage ? salvage(o, &folder, &e) : options_state_folder(o, &folder, &e);
    if (rc == RC_OK) rc = state_open(folder.data, options_state_mode(o, STATE_READ), &s, &e);
    if (rc == RC_OK) rc = export_archive(s, o->out, &how, &e);
    if (rc == RC_OK && !o->quiet && state_count(s, &counts, NULL) == RC_OK)
        log_line(LOG_INFO, "%s: %zu done, %zu failed, %zu %s", o->out, counts.done, counts.failed, counts.pending,
                 o->final ? "expired" : "pending");
    if (rc != RC_OK) log_line(LOG_ERROR, "%s", err_format(&e, text, sizeof text));
    state_close(s);
    buf_free(&folder);
    return rc == RC_OK ? EXIT_DONE : e.exit_status ? e.exit_status : EXIT_INTERNAL;
}
