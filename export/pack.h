/* pack.h: from a source to a model file: prune, fuse matrices that share an input, compress, write. */
#ifndef SPDP_PACK_H
#define SPDP_PACK_H

#include "../kernels/backend.h"
#include "../model/cli.h"
#include "calib_text.h"
#include "source.h"
#include "writer.h"

typedef enum { STORE_AUTO, STORE_DENSE, STORE_TILED_CBC } Storage;

typedef enum { METHOD_MAGNITUDE, METHOD_WANDA, METHOD_SPARSEGPT } Method;

typedef struct {
    Method method;        // how weights to remove are chosen
    Ratios sp;            // share of weights to remove, by site; both set
    bool prune_attn;      // are q, k, v, o pruned too (--prune all)?
    bool per_row;         // magnitude's scope: a row of a source matrix instead of all of it
    Storage storage;      // of pruned matrices
    double dp;            // default dynamic ratio; above 0 the file gets quantiles, and auto stores all that is pruned
                          // as Tiled-CBC
    Backend *be;          // runs calibration; not needed where there is none
    const CalibText *sp_text;  // for Wanda and SparseGPT: see pack_measures()
    const CalibText *dp_text;  // for dp above 0
    const char *source_name;  // for provenance
    const void *tokenizer;    // sentencepiece model; NULL = none
    size_t tokenizer_bytes;
    int n_threads;
    bool resume;  // go on with what an interrupted conversion has left: writer is from writer_reopen
    bool force;   // start anew, though there is such a conversion
    bool quiet;
} PackOptions;

typedef struct {
    size_t pruned_elements, pruned_zeros;  // over the matrices that are pruned
    size_t attn_elements, attn_zeros;      // q, k, v, o, pruned or not
    size_t n_tiled;                        // matrices stored as Tiled-CBC
    size_t dense_bytes, file_bytes;        // the same model all dense; what was written
} PackReport;

/* Does static pruning need calibration text? Not magnitude, and not where nothing is removed. */
bool pack_measures(const PackOptions *options);

/* Read, prune and write. Magnitude takes one matrix after the other: memory for the largest matrix and its compressed
 * form. Wanda and SparseGPT take one layer after the other: memory for a layer, twice, the sums of calibration.h and
 * the residual stream of the calibration text; after each layer they save a state beside the unfinished file (a copy of
 * that stream, for a moment two), so that another process may resume, to the same bytes.
 * writer is released in any case. What can be resumed stays, in the writer's files, where a signal has stopped the work
 * (ERR_STOPPED) or disk or memory ran out; on other failures no file is left. A failure to resume leaves all as it was:
 * ERR_OPEN (nothing is there), ERR_USAGE (it was another conversion: names what differs), ERR_FORMAT (damaged). So does
 * the refusal to start anew where something could be resumed: ERR_WRITE. */
int pack_model(PackReport *report, Source *source, Writer *writer, const PackOptions *options, Error *err);

#endif
