/* prune.h: static pruning of one source matrix: which weights become zero. */
#ifndef SPDP_PRUNE_H
#define SPDP_PRUNE_H

#include "../kernels/fp16.h"
#include "../kernels/util.h"

/* floor(n * ratio + 1e-6): how many of n weights a ratio removes. */
size_t prune_count(size_t n, double ratio);

/* Magnitude pruning in place: afterwards at least prune_count(rows * cols, ratio) weights of w are zero, exactly
 * so many unless more were zero before. Smallest magnitudes go first; of equal ones the lowest column, then the
 * lowest row.
 *   w        first row; row r at w + r * stride, cols values each, all finite
 *   per_row  the count holds for each row on its own: prune_count(cols, ratio)
 * Returns the number of zeros afterwards. */
size_t prune_magnitude(fp16 *w, size_t rows, size_t cols, size_t stride, double ratio, bool per_row,
                       int n_threads);

/* Wanda (Sun et al., "A Simple and Effective Pruning Approach for Large Language Models", 2024) in place: of every row
 * prune_count(cols, ratio) weights become zero, those of least |w| * sqrt(squares of its column); of equal ones the
 * lowest column. Weights that are zero already go first and count.
 *   squares  (cols) sum of squares of every input over the calibration text, finite
 * Returns 0, with the number of zeros afterwards in *zeros, or ERR_MEMORY. */
int prune_wanda(size_t *zeros, fp16 *w, size_t rows, size_t cols, size_t stride, const double *squares, double ratio,
                int n_threads, Error *err);

/* removed[i] = is scores[i] among the `count` smallest of n? Of equal scores the first ones are.
 *   scratch  (n) overwritten */
void prune_smallest(bool *removed, const double *scores, double *scratch, size_t n, size_t count);

#endif
