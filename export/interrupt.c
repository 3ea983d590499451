#include "interrupt.h"

#include <signal.h>
#include <string.h>

static volatile sig_atomic_t caught;  // a handler has no other place to put it

static void remember(int number) { caught = number; }

void interrupt_catch(void) {
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    caught = 0;
    signal(SIGPIPE, SIG_IGN);
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        struct sigaction action;
        if (sigaction(signals[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN) {
            action = (struct sigaction){.sa_handler = remember, .sa_flags = SA_RESTART | (int)SA_RESETHAND};
            sigaction(signals[i], &action, NULL);
        }
    }
}

int interrupt_signal(void) { return caught; }

int interrupt_check(Error *err) { return caught ? error_set(err, ERR_STOPPED, "interrupted") : OK; }
