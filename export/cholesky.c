/* The inverse itself is not needed. Turned around by both diagonals (index i becomes n - 1 - i), H is V^T V with V
 * upper triangular; turned back, inverse(H) = U^T U where U is inverse(V), reflected in the antidiagonal. So a
 * factorisation and the inverse of a triangle do, half the work of factor, invert, factor.
 *
 * LAPACK does the blocks on the diagonal, rank_update all that grows with n^3: the reference BLAS is slow. LAPACK
 * counts by columns: its lower triangles are our upper ones, transposed. */
#include "cholesky.h"

#include <lapacke.h>
#include <string.h>

#include "interrupt.h"
#include "rank_update.h"

#define STRIP 256  // columns that one thread solves at a time

static void reflect(double *h, size_t n, int n_threads) {
#pragma omp parallel for num_threads(n_threads) schedule(dynamic, 16)
    for (size_t i = 0; i < n; i++) {
        for (size_t j = i; j + i + 1 < n; j++) {
            double *a = h + i * n + j, *b = h + (n - 1 - j) * n + (n - 1 - i);
            const double value = *a;
            *a = *b;
            *b = value;
        }
    }
}

/* X (size, n_cols) becomes inverse(V^T) X for an upper triangular V; both with rows of n values. */
static void solve_rows(double *x, const double *v, size_t size, size_t n_cols, size_t n, int n_threads) {
#pragma omp parallel for num_threads(n_threads)
    for (size_t first = 0; first < n_cols; first += STRIP) {
        const size_t width = min_size(STRIP, n_cols - first);
        for (size_t i = 0; i < size; i++) {
            double *row = x + i * n + first;
            for (size_t p = 0; p < i; p++) {
                const double factor = v[p * n + i], *solved = x + p * n + first;
                for (size_t c = 0; c < width; c++) {
                    row[c] -= factor * solved[c];
                }
            }
            for (size_t c = 0; c < width; c++) {
                row[c] /= v[i * n + i];
            }
        }
    }
}

/* H = V^T V, right-looking by blocks. false: not positive definite. */
static bool factor(double *h, size_t n, int n_threads) {
    for (size_t k = 0; k < n && !interrupt_signal(); k += RANK_BLOCK) {
        const size_t size = min_size(RANK_BLOCK, n - k), rest = n - k - size;
        double *diagonal = h + k * n + k, *panel = diagonal + size;
        if (LAPACKE_dpotrf_work(LAPACK_COL_MAJOR, 'L', (lapack_int)size, diagonal, (lapack_int)n) != 0) {
            return false;
        }
        solve_rows(panel, diagonal, size, rest, n, n_threads);
        const ConstView p = {panel, n};
        rank_update((View){panel + size * n, n}, p, p, rest, rest, size, -1, true, n_threads);
    }
    return true;
}

/* Rows (n_rows, size) times an upper triangle, in place; all with rows of n values. */
static void multiply_rows(double *x, size_t n_rows, const double *triangle, size_t size, size_t n, int n_threads) {
#pragma omp parallel for num_threads(n_threads)
    for (size_t i = 0; i < n_rows; i++) {
        double *row = x + i * n, product[RANK_BLOCK] = {0};
        for (size_t q = 0; q < size; q++) {
            for (size_t j = q; j < size; j++) {
                product[j] += row[q] * triangle[q * n + j];
            }
        }
        memcpy(row, product, size * sizeof *row);
    }
}

/* V becomes X = inverse(V). From X V = I: X_ij V_jj = - sum of X_ip V_pj over the blocks i <= p < j. Each block column
 * p of X, once it is final, is taken out of those to its right.
 *   columns (RANK_BLOCK, n): that column, transposed;  rows (RANK_BLOCK, n): row p of V, whose place X takes */
static void invert(double *v, size_t n, double *columns, double *rows, int n_threads) {
    for (size_t p = 0; p < n && !interrupt_signal(); p += RANK_BLOCK) {
        const size_t size = min_size(RANK_BLOCK, n - p), done = p + size, rest = n - done;
        double *diagonal = v + p * n + p, *right = diagonal + size;
        LAPACKE_dtrtri_work(LAPACK_COL_MAJOR, 'L', 'N', (lapack_int)size, diagonal, (lapack_int)n);
        multiply_rows(v + p, p, diagonal, size, n, n_threads);
        for (size_t q = 0; q < size; q++) {
            memcpy(rows + q * n, right + q * n, rest * sizeof *rows);
            memset(right + q * n, 0, rest * sizeof *rows);
            for (size_t i = 0; i < done; i++) {
                columns[q * n + i] = i > p + q ? 0 : v[i * n + p + q];
            }
        }
        rank_update((View){v + done, n}, (ConstView){columns, n}, (ConstView){rows, n}, done, rest, size, -1, false,
                    n_threads);
    }
}

int cholesky_of_inverse(double *h, size_t n, int n_threads, Error *err) {
    double *work = memory_alloc(2 * RANK_BLOCK * n * sizeof *work);
    if (!work) {
        return error_set(err, ERR_MEMORY, "no memory to factor a matrix of %zu x %zu", n, n);
    }
    reflect(h, n, n_threads);
    const bool positive = factor(h, n, n_threads);
    if (positive) {
        invert(h, n, work, work + RANK_BLOCK * n, n_threads);
        reflect(h, n, n_threads);
    }
    free(work);
    if (interrupt_check(err)) {
        return ERR_STOPPED;
    }
    return positive ? OK : error_set(err, ERR_NUMBER, "matrix of %zu x %zu is not positive definite", n, n);
}
