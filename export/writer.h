/* writer.h: write a model file (export/FORMAT.md), all or nothing. */
#ifndef SPDP_WRITER_H
#define SPDP_WRITER_H

#include "../kernels/matrix.h"
#include "../model/checkpoint.h"

typedef struct Writer Writer;

/* Begin a file that will appear under path when writer_finish succeeds; until then the bytes live beside it, in
 * <path>.partial, which is locked: a second writer is refused. What an earlier one left there is replaced with the
 * first section. An existing path is refused unless force. */
int writer_open(Writer **w, const char *path, const Config *config, bool force, Error *err);

/* The same where an earlier writer has left its <path>.partial, to be followed by writer_restore; it is kept.
 * ERR_OPEN if there is none. */
int writer_reopen(Writer **w, const char *path, const Config *config, bool force, Error *err);

/* <path>.partial.state: where the caller may keep what it needs to go on. */
const char *writer_state_path(const Writer *w);

/* What was written so far. */
typedef struct {
    const FileSection *sections;  // the writer's own, until the next one is appended
    size_t n_sections;
    size_t end;  // of their bytes
} WriterPosition;

/* Make what was appended so far outlive a power failure. Returns 0 or ERR_WRITE. */
int writer_sync(Writer *w, WriterPosition *position, Error *err);

/* Go on from a position that an earlier writer synced. Returns 0, ERR_FORMAT (<path>.partial does not hold those
 * sections) or ERR_MEMORY. */
int writer_restore(Writer *w, const WriterPosition *position, Error *err);

/* keep: from now on neither writer_abort nor a failing writer_finish removes the files beside path, nor does an end of
 * the program that nobody planned (model/unfinished.h). */
void writer_keep(Writer *w, bool keep);

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
 * added to it. Close it with checkpoint_close before anything else is written. The partial file itself stays without
 * a header. Returns 0, ERR_WRITE, or what checkpoint_open returns. */
int writer_view(Writer *w, Checkpoint *ck, Error *err);

/* Write table and header, fsync, rename, remove the state. Releases w in any case; on failure nothing is left behind,
 * unless writer_keep asked for it.
 * *file_bytes (may be NULL) is the size. */
int writer_finish(Writer *w, size_t *file_bytes, Error *err);

/* Give up: remove partial file and state, unless writer_keep asked for them, and release w. NULL is fine. */
void writer_abort(Writer *w);

#endif
