/* matrix.h: one weight matrix in whichever format it is stored. The model never asks which. */
#ifndef SPDP_MATRIX_H
#define SPDP_MATRIX_H

#include "tiled_cbc.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { FORMAT_DENSE = 1, FORMAT_TILED_CBC = 2 } MatrixFormat;

/* Where a matrix takes its input; a dynamic threshold belongs to a layer and a site. */
typedef enum {
    SITE_ATTN_IN,     // q, k, v
    SITE_ATTN_OUT,    // o
    SITE_MLP_IN,      // gate, up
    SITE_MLP_HIDDEN,  // down
    SITE_HEAD,        // final head; never pruned
    N_SITES,
} Site;

/* "attention input", ... as messages name it. */
const char *site_name(Site site);

/* Row-major, out = W x. Memory belongs to whoever made the arrays (checkpoint or backend). */
typedef struct {
    MatrixFormat format;
    size_t rows, cols;  // M = outputs, K = inputs
    int layer;          // for messages; -1 outside the layers
    Site site;
    const fp16 *dense;  // FORMAT_DENSE: (rows, stride), zeros beyond cols
    size_t stride;      // values from row to row, a multiple of DENSE_ALIGN
    TiledCbc cbc;       // FORMAT_TILED_CBC
} Matrix;

#define DENSE_ALIGN 8  // values
static inline size_t dense_stride(size_t cols) { return round_up(cols, DENSE_ALIGN); }

#ifdef __cplusplus
}
#endif
#endif
