/* cholesky.h: the triangular factor of an inverse. */
#ifndef SPDP_CHOLESKY_H
#define SPDP_CHOLESKY_H

#include "../kernels/util.h"

/* Replace H by U, upper triangular with a positive diagonal, such that inverse(H) = U^T U.
 *   h  (n, n) row-major, symmetric: only the upper triangle is read and written
 * Returns 0, ERR_NUMBER (H is not positive definite; h's upper triangle is lost), ERR_MEMORY or
 * ERR_STOPPED. */
int cholesky_of_inverse(double *h, size_t n, int n_threads, Error *err);

#endif
