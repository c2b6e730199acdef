/* fault_strike: what --fault does inside a layer. A test option: exit, kill, stop and hang end or freeze this process, state
 * flips one bit of the residual stream. (token and plan strike in engine_step.c.) */
#ifndef TANDEM_FAULT_STRIKE_H
#define TANDEM_FAULT_STRIKE_H

#include "engine.h"

/* x_dev: n floats of residual. Returns only where the fault lets the step go on. */
void fault_strike(const struct fault *f, struct kern *k, float *x_dev, size_t n);

#endif
