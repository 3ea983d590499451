/* safetensors.h: read one .safetensors file: u64 header length, JSON header, data. Nothing is trusted. */
#ifndef SPDP_SAFETENSORS_H
#define SPDP_SAFETENSORS_H

#include "../kernels/util.h"

#define SAFETENSORS_MAX_RANK 8
#define SAFETENSORS_MAX_HEADER 100000000  // bytes, as in the reference implementation

typedef enum { DTYPE_OTHER, DTYPE_F16, DTYPE_BF16, DTYPE_F32 } DType;

typedef struct {
    char *name;
    DType dtype;
    char dtype_name[16];  // as written, for messages
    int rank;
    size_t shape[SAFETENSORS_MAX_RANK];
    size_t begin, end;  // bytes from the start of data
} SafetensorsEntry;

typedef struct {
    SafetensorsEntry *entries;
    size_t n_entries;
    const unsigned char *data;  // behind the header
    size_t data_bytes;
} Safetensors;

/* Parse a whole file in memory. data points into file. Every tensor's byte range is inside the data; for
 * the three known dtypes it equals shape * size. Ranges may not overlap; as the format demands, they leave no
 * hole and end with the file. Unknown dtypes are kept as DTYPE_OTHER.
 * Returns 0, ERR_FORMAT or ERR_MEMORY; *st untouched on failure. Release with safetensors_free(). */
int safetensors_parse(Safetensors *st, const void *file, size_t bytes, Error *err);
void safetensors_free(Safetensors *st);

#endif
