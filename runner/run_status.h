/* run_status: what a run answers to SIGUSR1: counts, groups, and the jobs that are with them. */
#ifndef TANDEM_RUN_STATUS_H
#define TANDEM_RUN_STATUS_H

#include "base.h"
#include "dispatch.h"
#include "progress.h"

/* Appends whole lines for stderr, at most 3 + groups + RUN_STATUS_JOBS. name: the custom_id of a job of the view. */
enum { RUN_STATUS_JOBS = 16 };
void run_status_text(const struct progress *p, const struct dispatch_view *v, const char *(*name)(const void *ctx, size_t job),
                     const void *ctx, struct buf *out);

#endif
