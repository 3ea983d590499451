/* state.h: what an interrupted conversion needs to go on, in a file beside the unfinished model. It is read by the
 * program that wrote it and by no other: its layout may change with every version. */
#ifndef SPDP_STATE_H
#define SPDP_STATE_H

#include "pack.h"

/* What the result depends on, as hashes, in the order in which differences are reported. */
enum {
    STATE_VERSION, STATE_SOURCE, STATE_METHOD, STATE_SP, STATE_PRUNE, STATE_FORMAT, STATE_DP, STATE_TOKENIZER,
    STATE_BACKEND, STATE_CALIB, STATE_CALIB_DP, N_STATE_MARKS,
};

typedef struct {
    uint64_t marks[N_STATE_MARKS];
    size_t n_layers;          // finished
    PackReport report;        // so far
    WriterPosition position;  // behind them
    const void *stream;       // residual stream before layer n_layers; none when all are finished
    size_t stream_bytes;
    Mapping file;  // where state_load found the pointers
} PackState;

void state_marks(uint64_t marks[N_STATE_MARKS], const PackOptions *options, const Source *source);

/* Name of the first mark that differs, NULL if none does. */
const char *state_difference(const uint64_t a[N_STATE_MARKS], const uint64_t b[N_STATE_MARKS]);

/* Put a state in the place of the last one, at once and for good: a power failure leaves one or the other. For a
 * moment both are on disk. Returns 0, ERR_WRITE or ERR_MEMORY. */
int state_save(const char *path, const PackState *state, Error *err);

/* Map a state; release with state_close, which takes zeros too. Of another version's state only the marks are there.
 * Returns 0, ERR_OPEN (there is none) or ERR_FORMAT (damaged). */
int state_load(PackState *state, const char *path, Error *err);
void state_close(PackState *state);

/* Remove a state, finished or not, if there is one. */
void state_remove(const char *path);

/* So that a new name in path's directory outlives a power failure. Some file systems know no fsync of directories:
 * failure is not an error. */
void state_sync_directory(const char *path);

#endif
