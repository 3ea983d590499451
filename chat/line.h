/* line.h: what a user types, message by message: with editing and history on a terminal, else plain lines. */
#ifndef SPDP_LINE_H
#define SPDP_LINE_H

#include <signal.h>

#include "../kernels/util.h"

typedef struct LineReader LineReader;

/* Are there prompts (on stderr) and editing: are standard input and stderr a terminal? */
bool line_edits(void);

/* Read standard input. A nonzero *interrupt, set by a signal handler, ends it: at a prompt at once, plain lines
 * before the next message. interrupt is not owned; NULL: none.
 * Returns 0 or ERR_MEMORY. */
int line_open(LineReader **reader, const volatile sig_atomic_t *interrupt, Error *err);
void line_close(LineReader *reader);  // NULL is fine

/* The next message: a line, or several where
 *   - a line ends in a backslash, for which a newline stands then, or
 *   - the first line begins with """: up to a line that ends so.
 * Input that ends inside a message ends the message; Ctrl-C and an interrupt drop it. *message is released with
 * free(), NULL at the end of input; *quoted: did it begin with """?
 * Returns 0, ERR_OPEN, ERR_MEMORY or ERR_FORMAT (a NUL byte; one may go on reading). */
int line_read(LineReader *reader, char **message, bool *quoted, Error *err);

#endif
