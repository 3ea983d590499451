/* unfinished.h: an output file that must not outlive the program in a half-written state. */
#ifndef SPDP_UNFINISHED_H
#define SPDP_UNFINISHED_H

/* From now on the file is removed when the program ends by exit(), wherever and for whatever reason that is called;
 * it takes the place of the last one. path stays the caller's, and there, until unfinished_forget. */
void unfinished_set(const char *path);

/* path is finished, removed already, or to be kept. Another path, or NULL, changes nothing. */
void unfinished_forget(const char *path);

/* Remove it now. A signal handler may call this before _exit(). */
void unfinished_remove(void);

#endif
