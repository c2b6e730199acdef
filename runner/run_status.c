/* run_status: lines for a person who asks how far a run is.
 *
 * A custom_id is the job file's: control characters in it must not reach a terminal, and a long one is cut. */
#include "run_status.h"

#include <inttypes.h>
#include <string.h>

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

static void append_name(struct buf *out, const char *name)
{
    size_t len = strlen(name);
    bool cut = len > NAME_BYTES;
    if (cut) len = text_cut(name, NAME_BYTES);
    for (size_t i = 0; i < len; i++) {
        unsigned char c = (unsigned char)name[i], next = (unsigned char)name[i + 1];
        bool c1 = c == 0xC2 && next >= 0x80 && next <= 0x9F; /* U+0080 to U+009F */
        buf_append(out, c < 0x20 || c == 0x7F || c1 ? "?" : name + i, 1);
        i += c1;
    }
    if (cut) buf_append_str(out, "...");
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
        append_name(out, name(ctx, j->job));
        if (j->running_us < 0) {
            buf_printf(out, ": waits in group %d\n", j->group);
            continue;
        }
        progress_duration_text((double)j->running_us / 1e6, text, sizeof text);
        buf_printf(out, ": runs in group %d for %s\n", j->group, text);
    }
    if (v->in_flight > shown) buf_printf(out, "tandem: and %d more\n", v->in_flight - shown);
}
