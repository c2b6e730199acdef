/* deadline: when a run must be over, from times as people and schedulers write them.
 *
 * Parsing is strict and knows no locale; local times follow the zone of the process (TZ), summer time included. */
#ifndef TANDEM_DEADLINE_H
#define TANDEM_DEADLINE_H

#include "base.h"

/* Local times of day, in minutes after midnight. */
struct deadline_window {
    int from_min, to_min;
};

/* What a command line asks for. */
struct deadline_rules {
    int64_t at_s;                  /* --deadline, UNIX seconds; INT64_MAX: none */
    int until_min;                 /* --until, minutes after local midnight; -1: none */
    struct deadline_window window; /* --window; from_min -1: none */
};
#define DEADLINE_RULES_NONE ((struct deadline_rules){INT64_MAX, -1, {-1, -1}})

struct deadline {
    int64_t at_s;       /* UNIX seconds; INT64_MAX: none */
    const char *source; /* what asked for it, as a person knows it; NULL: none */
};

/* RFC 3339 with seconds and "Z" or an offset, as 2026-01-02T06:00:00+01:00; fractions of a second are cut off. */
bool deadline_parse_time(const char *text, int64_t *out_s);
/* "06:00", from 00:00 to 23:59. */
bool deadline_parse_clock(const char *text, int *out_min);
/* "22:00-06:00"; an empty window, or one of a whole day, is none. */
bool deadline_parse_window(const char *text, struct deadline_window *out);

/* The first moment after now at which local clocks show this time of day; where they leap over it, the end of the leap.
 * INT64_MAX: the zone has none within two days. */
int64_t deadline_next_local(int64_t now_s, int minute);

/* The earliest time that the rules and the scheduler give. scheduler_end: SLURM_JOB_END_TIME, UNIX seconds as text; NULL:
 * none. RC_RETRY: now is outside the window. */
enum rc deadline_find(const struct deadline_rules *rules, const char *scheduler_end, int64_t now_s, struct deadline *out,
                      struct err *e);

#endif
