/* line.h: what a user types, message by message: with editing and history on a terminal, else plain lines. */
#ifndef SPDP_LINE_H
#define SPDP_LINE_H

#include "../kernels/util.h"

typedef struct LineReader LineReader;

/* Read standard input. Prompts go to stderr, and only where both are a terminal.
 * Returns 0 or ERR_MEMORY. */
int line_open(LineReader **reader, Error *err);
void line_close(LineReader *reader);  // NULL is fine

/* The next message: a line, or several where
 *   - a line ends in a backslash, for which a newline stands then, or
 *   - the first line begins with """: up to a line that ends so.
 * Input that ends inside a message ends the message. *message is released with free(), NULL at the end of input.
 * Returns 0, ERR_OPEN, ERR_MEMORY or ERR_FORMAT (a NUL byte; one may go on reading). */
int line_read(LineReader *reader, char **message, Error *err);

#endif
