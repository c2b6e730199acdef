/* run_status: lines for a person who asks how far a run is. A custom_id is the job file's, and may hold
 * anything. */
#include "run_status.h"

#include <inttypes.h>

#include "text_check.h"

enum { NAME_BYTES = 80 };

static const char *group_word(enum group_state s)
{
    switch (s) {
    case GROUP_STARTING: return "starting";
    case GROUP_READY: return "ready";
    case GROUP_BACKOFF: return "restarting";
    case GROUP_GAVE_UP: return "gave up";
    case GROUP_CLOSED: break;
    }
    return "closed";
}

void run_status_text(const struct progress *p, const struct dispatch_view *v, const char *(*name)(const void *ctx, size_t job),
                     const void *ctx, struct buf *out)
{
    char text[300];
    progress_status_text(p, clock_now_us(), (size_t)v->in_flight, text, sizeof text);
    buf_printf(out, "tandem: %s\n", text);
    for (int k = 0; k < v->n_groups; k++)
        buf_printf(out, "tandem: group %d: %s, %" PRId64 " restarts, %d in flight\n", k, group_word(v->groups[k].state),
                   v->groups[k].restarts, v->groups[k].in_flight);
    int shown = v->n_jobs < RUN_STATUS_JOBS ? v->n_jobs : RUN_STATUS_JOBS;
    for (int i = 0; i < shown; i++) {
        const struct dispatch_job_view *j = &v->jobs[i];
        buf_append_str(out, "tandem: ");
        text_append_printable(out, name(ctx, j->job), NAME_BYTES);
        if (j->running_us < 0) {
            buf_printf(out, ": waits in group %d\n", j->group);
            continue;
        }
        progress_duration_text((double)j->running_us / 1e6, text, sizeof text);
        buf_printf(out, ": runs in group %d for %s\n", j->group, text);
    }
    if (v->in_flight > shown) buf_printf(out, "tandem: and %d more\n", v->in_flight - shown);
}
