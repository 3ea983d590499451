/* interrupt.h: stop long work when a signal asks for it, at a place where files can be left in order. */
#ifndef SPDP_INTERRUPT_H
#define SPDP_INTERRUPT_H

#include "../kernels/util.h"

/* From now on the first SIGINT, SIGTERM or SIGHUP is only remembered, unless it is ignored already (nohup, a shell's
 * background job); the next one ends the process as usual. That nobody reads the messages any more (SIGPIPE) is no
 * reason to stop. Forgets what came before. */
void interrupt_catch(void);

/* The signal that came, 0 if none did. */
int interrupt_signal(void);

/* ERR_STOPPED if one did, else 0. */
int interrupt_check(Error *err);

#endif
