/* pack.h: from a source to a model file: prune, fuse matrices that share an input, compress, write. */
#ifndef SPDP_PACK_H
#define SPDP_PACK_H

#include "../model/cli.h"
#include "source.h"
#include "writer.h"

typedef enum { STORE_AUTO, STORE_DENSE, STORE_TILED_CBC } Storage;

typedef struct {
    Ratios sp;            // share of weights to remove, by site; both set
    bool prune_attn;      // are q, k, v, o pruned too (--prune all)?
    bool per_row;         // magnitude's scope: a row of a source matrix instead of all of it
    Storage storage;      // of pruned matrices
    const char *source_name;  // for provenance
    const void *tokenizer;    // sentencepiece model; NULL = none
    size_t tokenizer_bytes;
    int n_threads;
    bool quiet;
} PackOptions;

typedef struct {
    size_t pruned_elements, pruned_zeros;  // over the matrices that are pruned
    size_t attn_elements, attn_zeros;      // q, k, v, o, pruned or not
    size_t n_tiled;                        // matrices stored as Tiled-CBC
    size_t dense_bytes, file_bytes;        // the same model all dense; what was written
} PackReport;

/* Read, prune and write one matrix after the other: memory for the largest matrix and its compressed form.
 * writer is released in any case; on failure no file is left. */
int pack_model(PackReport *report, Source *source, Writer *writer, const PackOptions *options, Error *err);

#endif
