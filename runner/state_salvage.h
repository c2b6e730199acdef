/* state_salvage: a new state of what can be read of a damaged one. */
#ifndef TANDEM_STATE_SALVAGE_H
#define TANDEM_STATE_SALVAGE_H

#include "base.h"

struct state_salvaged {
    size_t jobs, results; /* that the new state has */
    bool identity;        /* false: it is lost, and no run can continue from the new state */
};

/* Reads the state in `from`, which nobody may have in use, and makes the one in `to`, which must not exist. Every value is proved by
 * its checksum; old ones stand in for such as are lost. Results whose registration is lost are registered at the end, under the
 * custom_id that their record names. Counts of attempts are not kept. Where it fails, `to` is as before.
 *   RC_BAD_INPUT  EXIT_NO_INPUT "no_state": there is no data.mdb
 *   RC_FAILED     EXIT_IO "nothing_salvaged", or what making a state can end with; EXIT_RESUMABLE "state_locked"; EXIT_NO_OUTPUT
 *                 "state_exists" */
enum rc state_salvage(const char *from, const char *to, struct state_salvaged *out, struct err *e);

#endif
