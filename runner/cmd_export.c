/* cmd_export: an archive of what a state holds at this moment. Needs no model and no lock: it may run beside a run. */
#include "export.h"
#include "options.h"
#include "state.h"

int cmd_export(const struct options *o)
{
    struct err e = {0};
    struct buf folder = {0};
    struct state *s = NULL;
    struct state_counts counts;
    const struct export_options how = {.force = o->force, .final = o->final, .by_completion = o->output_by_completion};
    char text[1100];
    enum rc rc = options_state_folder(o, &folder, &e);
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
