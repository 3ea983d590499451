/* writer.h: write a model file (export/FORMAT.md), all or nothing. */
#ifndef SPDP_WRITER_H
#define SPDP_WRITER_H

#include "../kernels/matrix.h"
#include "../model/checkpoint.h"

typedef struct Writer Writer;

/* Begin a file that will appear under path when writer_finish succeeds; until then the bytes live in a
 * temporary file beside it. An existing path is refused unless force. */
int writer_open(Writer **w, const char *path, const Config *config, bool force, Error *err);

/* What the section table says of a matrix apart from its values. */
typedef struct {
    uint32_t kind;      // enum FileSectionKind
    int layer;          // -1 outside the layers
    const char *name;   // at most 31 bytes
    bool pruned;        // was it among the matrices to prune?
    const FilePart *parts;  // row map of a fused matrix
    size_t n_parts;
} MatrixLabel;

/* Append a dense matrix (rows, stride = dense_stride(cols)). */
int writer_dense(Writer *w, const MatrixLabel *label, const fp16 *values, size_t rows, size_t cols, Error *err);

/* Append a matrix as tiled_cbc_encode made it. */
int writer_tiled_cbc(Writer *w, const MatrixLabel *label, const TiledCbc *cbc, const void *block,
                     const TiledCbcStats *stats, Error *err);

/* Append bytes. */
int writer_bytes(Writer *w, uint32_t kind, const char *name, const void *bytes, size_t n, Error *err);

/* The file as it would be if it ended here, opened for reading: what is measured on the finished model can then be
 * added to it. Close it with checkpoint_close before anything else is written. The temporary file itself stays without
 * a header. Returns 0, ERR_WRITE, or what checkpoint_open returns. */
int writer_view(Writer *w, Checkpoint *ck, Error *err);

/* Write table and header, fsync, rename. Releases w in any case; on failure nothing is left behind.
 * *file_bytes (may be NULL) is the size. */
int writer_finish(Writer *w, size_t *file_bytes, Error *err);

/* Give up: remove the temporary file, release w. NULL is fine. */
void writer_abort(Writer *w);

#endif
