/* mapping.h: files mapped read-only.
 *
 * The pages of a mapped file can go away while it is in use: somebody cuts it short (copying another file over it
 * does), or its disk or server fails. Who reads such a page gets SIGBUS. The program then ends with status 1 and a
 * line that names the file, and its unfinished output is removed (unfinished.h). SIGBUS for any other reason does
 * what it did. */
#ifndef SPDP_MAPPING_H
#define SPDP_MAPPING_H

#include "../kernels/util.h"

typedef struct {
    const unsigned char *data;  // NULL: an empty file
    size_t bytes;
} Mapping;

/* Map a whole file. path is relative to directory dir_fd (AT_FDCWD: the working directory).
 * Returns 0, ERR_OPEN or ERR_MEMORY; err names path. */
int mapping_open(Mapping *map, int dir_fd, const char *path, Error *err);

/* Map the first bytes of an open file, which messages call name; fd stays the caller's. */
int mapping_of(Mapping *map, int fd, size_t bytes, const char *name, Error *err);

/* Is the file of mapping_open as long as it was, and not written to since? What was read is of one piece then.
 * Returns 0 or ERR_OPEN. */
int mapping_check(const Mapping *map, Error *err);

/* Takes zeros, too. No other thread may be opening or closing one. */
void mapping_close(Mapping *map);

#endif
