#define _GNU_SOURCE
#include "run_signals.h"

#include <signal.h>
#include <stddef.h>
#include <sys/signalfd.h>
#include <unistd.h>

static const int stops[] = {SIGINT, SIGTERM, SIGHUP};

void run_signals_hold_status(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

int run_signals_open(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) {
        struct sigaction now;
        if (!sigaction(stops[i], NULL, &now) && now.sa_handler != SIG_IGN) sigaddset(&set, stops[i]);
    }
    if (sigprocmask(SIG_BLOCK, &set, NULL)) return -1;
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

void run_signals_lift(int signals)
{
    struct signalfd_siginfo info;
    sigset_t set;
    while (read(signals, &info, sizeof info) > 0) {}
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++) sigaddset(&set, stops[i]);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
}
