#include "sparsegpt.h"

#include <math.h>
#include <string.h>

#include "cholesky.h"
#include "interrupt.h"
#include "prune.h"
#include "rank_update.h"

#define MAX_DAMPING 100

_Static_assert(SPARSEGPT_BLOCK <= RANK_BLOCK, "the errors of a block are one rank_update");

/* Scale the upper triangle of h to the Hessian and keep it in the lower one, where a factorisation that fails leaves
 * it; its diagonal goes to `diagonal`. Returns the diagonal's mean. */
static double make_hessian(double *h, double *diagonal, bool *dead, size_t n, size_t n_tokens, int n_threads) {
    const double scale = 2 / (double)n_tokens;
#pragma omp parallel for num_threads(n_threads) schedule(dynamic, 16)
    for (size_t i = 0; i < n; i++) {
        for (size_t j = i + 1; j < n; j++) {
            h[j * n + i] = h[i * n + j] * scale;
        }
        dead[i] = h[i * n + i] == 0;
        diagonal[i] = dead[i] ? 1 : h[i * n + i] * scale;
    }
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += diagonal[i];
    }
    return sum / (double)n;
}

static void restore(double *h, const double *diagonal, double damping, size_t n, int n_threads) {
#pragma omp parallel for num_threads(n_threads) schedule(dynamic, 16)
    for (size_t i = 0; i < n; i++) {
        h[i * n + i] = diagonal[i] + damping;
        for (size_t j = i + 1; j < n; j++) {
            h[i * n + j] = h[j * n + i];
        }
    }
}

static bool diagonal_is_finite(const double *h, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(h[i * n + i])) {
            return false;
        }
    }
    return true;
}

int sparsegpt_factor(double *products, bool *dead, double *damping, size_t n, size_t n_tokens, int n_threads,
                     Error *err) {
    double *diagonal = memory_alloc(n * sizeof *diagonal);
    if (!diagonal) {
        return error_set(err, ERR_MEMORY, "no memory for a Hessian of %zu x %zu", n, n);
    }
    const double mean = make_hessian(products, diagonal, dead, n, n_tokens, n_threads);
    int rc = isfinite(mean) ? ERR_NUMBER : error_set(err, ERR_NUMBER, "the Hessian is not finite");
    for (*damping = SPARSEGPT_DAMPING; isfinite(mean) && rc == ERR_NUMBER && *damping <= MAX_DAMPING;) {
        restore(products, diagonal, *damping * mean, n, n_threads);
        rc = cholesky_of_inverse(products, n, n_threads, err);
        if (!rc && !diagonal_is_finite(products, n)) {
            rc = error_set(err, ERR_NUMBER, "the Hessian's inverse is not finite");
        }
        *damping *= rc == ERR_NUMBER ? 10 : 1;
    }
    free(diagonal);
    if (rc == ERR_NUMBER && isfinite(mean)) {
        return error_set(err, ERR_NUMBER, "the Hessian is not positive definite, not even with a damping of %d",
                         MAX_DAMPING);
    }
    return rc;
}

/* Working memory for one matrix, in double: sums run over all columns. */
typedef struct {
    double *w;       // (rows, cols)
    double *scores;  // (SPARSEGPT_BLOCK, rows): by columns, the order of ties
    double *scratch; // the same size
    bool *removed;   // the same
    double *errors;  // the same: what is to be made up for, over U's diagonal
    double *corner;  // (SPARSEGPT_BLOCK, SPARSEGPT_BLOCK) of U, packed
} Work;

static bool work_alloc(Work *k, size_t rows, size_t cols) {
    const size_t block = SPARSEGPT_BLOCK * rows;
    return (k->w = memory_alloc(rows * cols * sizeof *k->w)) &&
           (k->scores = memory_alloc(block * sizeof *k->scores)) &&
           (k->scratch = memory_alloc(block * sizeof *k->scratch)) &&
           (k->removed = memory_alloc(block * sizeof *k->removed)) &&
           (k->errors = memory_alloc(block * sizeof *k->errors)) &&
           (k->corner = memory_alloc(SPARSEGPT_BLOCK * SPARSEGPT_BLOCK * sizeof *k->corner));
}

static void work_free(Work *k) {
    free(k->w);
    free(k->scores);
    free(k->scratch);
    free(k->removed);
    free(k->errors);
    free(k->corner);
}

/* Remove a block's weights of least score (w / U_cc)^2. */
static void choose(Work *k, size_t first, size_t width, size_t rows, size_t cols, double ratio, int n_threads) {
#pragma omp parallel for num_threads(n_threads)
    for (size_t c = 0; c < width; c++) {
        const double diagonal = k->corner[c * SPARSEGPT_BLOCK + c];
        for (size_t r = 0; r < rows; r++) {
            const double ratio_to_diagonal = k->w[r * cols + first + c] / diagonal;
            k->scores[c * rows + r] = ratio_to_diagonal * ratio_to_diagonal;
        }
    }
    prune_smallest(k->removed, k->scores, k->scratch, width * rows, prune_count(width * rows, ratio));
}

/* Remove column by column; the error of each goes to the columns after it within the block. */
static void remove_block(Work *k, size_t first, size_t width, size_t rows, size_t cols, int n_threads) {
#pragma omp parallel for num_threads(n_threads)
    for (size_t r = 0; r < rows; r++) {
        double *w = k->w + r * cols + first;
        for (size_t c = 0; c < width; c++) {
            const double *u = k->corner + c * SPARSEGPT_BLOCK;
            const double error = k->removed[c * rows + r] ? w[c] / u[c] : 0;
            k->errors[c * rows + r] = error;
            if (k->removed[c * rows + r]) {
                w[c] = 0;
                for (size_t j = c + 1; j < width; j++) {
                    w[j] -= error * u[j];
                }
            }
        }
    }
}

static void prune_blocks(Work *k, size_t rows, size_t cols, const double *factor, double ratio, int n_threads) {
    for (size_t first = 0; first < cols && !interrupt_signal(); first += SPARSEGPT_BLOCK) {
        const size_t width = min_size(SPARSEGPT_BLOCK, cols - first), next = first + width;
        for (size_t c = 0; c < width; c++) {
            memcpy(k->corner + c * SPARSEGPT_BLOCK, factor + (first + c) * cols + first, width * sizeof *factor);
        }
        choose(k, first, width, rows, cols, ratio, n_threads);
        remove_block(k, first, width, rows, cols, n_threads);
        rank_update((View){k->w + next, cols}, (ConstView){k->errors, rows},
                    (ConstView){factor + first * cols + next, cols}, rows, cols - next, width, -1, false, n_threads);
    }
}

/* The first new weight that does not fit fp16; rows * cols when all do. */
static size_t find_overflow(const double *w, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!fp16_is_finite(fp16_from_float((float)w[i]))) {
            return i;
        }
    }
    return n;
}

int sparsegpt_prune(size_t *zeros, fp16 *w, size_t rows, size_t cols, size_t stride, const double *factor,
                    const bool *dead, double ratio, int n_threads, Error *err) {
    Work k = {0};
    if (!work_alloc(&k, rows, cols)) {
        work_free(&k);
        return error_set(err, ERR_MEMORY, "no memory to prune a matrix of %zu x %zu", rows, cols);
    }
#pragma omp parallel for num_threads(n_threads)
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            k.w[r * cols + c] = dead[c] && ratio > 0 ? 0 : (double)fp16_to_float(w[r * stride + c]);
        }
    }
    if (ratio > 0) {
        prune_blocks(&k, rows, cols, factor, ratio, n_threads);
    }
    if (interrupt_check(err)) {
        work_free(&k);
        return ERR_STOPPED;
    }
    const size_t fault = find_overflow(k.w, rows * cols);
    if (fault < rows * cols) {
        const int rc = error_set(err, ERR_NUMBER, "row %zu, column %zu: the compensated weight %g does not fit fp16",
                                 fault / cols, fault % cols, k.w[fault]);
        work_free(&k);
        return rc;
    }
    size_t n_zeros = 0;
#pragma omp parallel for num_threads(n_threads) reduction(+ : n_zeros)
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            w[r * stride + c] = fp16_from_float((float)k.w[r * cols + c]);
            n_zeros += fp16_is_zero(w[r * stride + c]);
        }
    }
    *zeros = n_zeros;
    work_free(&k);
    return OK;
}
