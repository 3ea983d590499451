/* sparsegpt.h: pruning with compensation: what remains of a row makes up for what is removed from it.
 * Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot", 2023. */
#ifndef SPDP_SPARSEGPT_H
#define SPDP_SPARSEGPT_H

#include "../kernels/fp16.h"
#include "../kernels/util.h"

#define SPARSEGPT_BLOCK 128      // columns whose weights are chosen together
#define SPARSEGPT_DAMPING 0.01   // added to the Hessian's diagonal, as a share of its mean

/* From the products of the calibration inputs of one site to U, upper triangular, with inverse(H) = U^T U and
 * H = 2 / n_tokens * products + damping. An input that is always zero is dead: 1 on the diagonal, nothing else.
 *   products  (n, n), upper triangle: X^T X summed over n_tokens; overwritten by U, the lower triangle by other things
 *   dead      (n), filled
 *   damping   share that was needed: SPARSEGPT_DAMPING, or ten times as much again and again while H is not positive
 *             definite
 * Returns 0, ERR_NUMBER (not positive definite with any damping, or not finite), ERR_MEMORY or ERR_STOPPED. */
int sparsegpt_factor(double *products, bool *dead, double *damping, size_t n, size_t n_tokens, int n_threads,
                     Error *err);

/* Prune a matrix in place: of every block of SPARSEGPT_BLOCK columns at least prune_count(rows * width, ratio)
 * weights become zero, exactly so many unless more are zero anyway; of equal ones the lowest column, then the lowest
 * row. The weights to the right are changed. ratio 0 changes nothing.
 *   zeros    afterwards
 *   w        as for prune_magnitude
 *   factor, dead   by sparsegpt_factor, for n = cols
 * Returns 0, ERR_NUMBER (a new weight does not fit fp16: names row and column; w is untouched), ERR_MEMORY or
 * ERR_STOPPED. */
int sparsegpt_prune(size_t *zeros, fp16 *w, size_t rows, size_t cols, size_t stride, const double *factor,
                    const bool *dead, double ratio, int n_threads, Error *err);

#endif
