/* fault_strike: kinds that end the process do it the way a real failure would, without clean-up or last words. */
#include "fault_strike.h"

#include <signal.h>
#include <unistd.h>

void fault_strike(const struct fault *f, struct kern *k, float *x_dev, size_t n)
{
    float *victim = x_dev + n / 2;
    uint32_t bits;
    switch (f->kind) {
    case FAULT_EXIT: _exit(EXIT_INTERNAL);
    case FAULT_KILL: raise(SIGKILL); break;
    case FAULT_STOP: raise(SIGSTOP); break;
    case FAULT_HANG:
        for (;;) pause();
    case FAULT_STATE:
        /* A high bit of the mantissa, so that the change survives every later addition to this value. */
        k->to_host(k, &bits, victim, sizeof bits);
        bits ^= UINT32_C(1) << 22;
        k->to_dev(k, victim, &bits, sizeof bits);
        break;
    case FAULT_NONE:
    case FAULT_TOKEN:
    case FAULT_PLAN: break;
    }
}
