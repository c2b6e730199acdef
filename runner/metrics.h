/* metrics: the figures of a run as a Prometheus text file, for node_exporter's textfile collector.
 *
 * The file is replaced whole (FILE.tmp beside it, then rename), readable by everybody: it holds counts and the name of the
 * output, nothing of a job. Every sample has the label out, so that several runs of one machine can be told apart. */
#ifndef TANDEM_METRICS_H
#define TANDEM_METRICS_H

#include "base.h"
#include "run_report.h"

struct metrics {
    const char *path;
    int64_t written_us; /* when last; 0: never */
    size_t done, failed;
    int64_t rank_restarts; /* as written last */
};

/* Appends the exposition. now_s: UNIX time. False: out of memory. */
bool metrics_text(const struct run_report *r, int64_t now_s, struct buf *out);
/* Replaces the file. RC_FAILED: it is as it was, no temporary file is left, and the run need not care. */
enum rc metrics_write(struct metrics *m, const struct run_report *r, struct err *e);
/* The same when it is time: after 15 s, and after 2 s when a job has ended or ranks were restarted. RC_OK also when it is not. */
enum rc metrics_turn(struct metrics *m, const struct run_report *r, struct err *e);

#endif
