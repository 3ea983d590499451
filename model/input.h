/* input.h: bytes of a file or stream, and token ids stored as bytes. */
#ifndef SPDP_INPUT_H
#define SPDP_INPUT_H

#include "../kernels/util.h"

/* Released with free(). */
typedef struct {
    char *data;
    size_t n;
} Bytes;

typedef struct {
    int *ids;
    size_t n;
} Ids;

/* All that a stream or a file has; NUL bytes are bytes like others. Return 0, ERR_OPEN or ERR_MEMORY. */
int input_read_stream(Bytes *bytes, FILE *f, const char *name, Error *err);
int input_read_file(Bytes *bytes, const char *path, Error *err);

/* Raw little-endian ids, two bytes each, four if the vocabulary exceeds 65536.
 * Returns 0, ERR_FORMAT (no whole number of ids, an id beyond the vocabulary) or ERR_MEMORY. */
int ids_from_raw(Ids *ids, const Bytes *raw, const char *name, int vocab, Error *err);

#endif
