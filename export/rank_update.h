/* rank_update.h: the one product of dense matrices that calibration and SparseGPT are made of. */
#ifndef SPDP_RANK_UPDATE_H
#define SPDP_RANK_UPDATE_H

#include "../kernels/util.h"

#define RANK_BLOCK 128  // most rows of A and B in one call: a strip of them stays in the cache

typedef struct {
    double *values;
    size_t stride;  // values from row to row
} View;

typedef struct {
    const double *values;
    size_t stride;
} ConstView;

/* C += scale * A^T B, all row-major.
 *   c  (m, n)   overwritten; with upper, only elements (i, j) with j >= i
 *   a  (k, m), b (k, n)   k at most RANK_BLOCK
 * Every element is summed in the order of k, whatever n_threads. */
void rank_update(View c, ConstView a, ConstView b, size_t m, size_t n, size_t k, double scale, bool upper,
                 int n_threads);

#endif
