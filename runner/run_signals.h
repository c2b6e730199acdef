/* run_signals: the signals of a run, read from a descriptor while ranks run. One that the caller had set to be ignored (nohup, a
 * shell's background job) stays ignored. */
#ifndef TANDEM_RUN_SIGNALS_H
#define TANDEM_RUN_SIGNALS_H

/* From here on SIGUSR1 waits until there is something to tell. */
void run_signals_hold_status(void);
/* Signals that end a run and the one that asks, blocked and readable. -1 with errno on failure. The caller closes it. */
int run_signals_open(void);
/* After a first signal, whatever is left to do: the next one ends the process. Those that came with the first count with it. */
void run_signals_lift(int signals);

#endif
