#include "rank_update.h"

#include <string.h>

#define TILE_ROWS 4
#define LANES 8
#define TILE_COLS (2 * LANES)
#define STRIP_ROWS 64   // what one thread computes at a time
#define STRIP_COLS 256

/* The compiler makes of this whatever vectors the instruction set has. */
typedef double Vector __attribute__((vector_size(LANES * sizeof(double))));

// Sanitizers' runtimes are not ready when a clone is chosen.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

typedef struct {
    size_t row, n_rows, col, n_cols;  // in C
} Strip;

/* Columns first .. first + n - 1 of all k rows, side by side and filled up with zeros to `width`: what a loop over k
 * reads in order, whatever the stride. */
static inline __attribute__((always_inline)) void pack_columns(double *to, ConstView from, size_t first, size_t n,
                                                               size_t width, size_t k) {
    for (size_t p = 0; p < k; p++) {
        const double *row = from.values + p * from.stride + first;
        if (n == width) {
            memcpy(to + p * width, row, width * sizeof *to);  // a fixed size: a few moves
        }
        for (size_t i = 0; i < width && n < width; i++) {
            to[p * width + i] = i < n ? row[i] : 0;
        }
    }
}

/* sum (TILE_ROWS, TILE_COLS) = A^T B of packed columns. */
static inline __attribute__((always_inline)) void multiply_tile(Vector sum[TILE_ROWS][2], const double *a,
                                                                const double *b, size_t k) {
    memset(sum, 0, TILE_ROWS * sizeof *sum);
    for (size_t p = 0; p < k; p++) {
        Vector b0, b1;
        memcpy(&b0, b + p * TILE_COLS, sizeof b0);
        memcpy(&b1, b + p * TILE_COLS + LANES, sizeof b1);
        for (size_t r = 0; r < TILE_ROWS; r++) {
            sum[r][0] += a[p * TILE_ROWS + r] * b0;
            sum[r][1] += a[p * TILE_ROWS + r] * b1;
        }
    }
}

CLONES static void update_strip(View c, ConstView a, ConstView b, const Strip *s, size_t k, double scale, bool upper) {
    double packed_a[STRIP_ROWS * RANK_BLOCK], packed_b[TILE_COLS * RANK_BLOCK];
    for (size_t i = 0; i < s->n_rows; i += TILE_ROWS) {
        pack_columns(packed_a + i * RANK_BLOCK, a, s->row + i, min_size(TILE_ROWS, s->n_rows - i), TILE_ROWS, k);
    }
    for (size_t j = 0; j < s->n_cols; j += TILE_COLS) {
        const size_t col = s->col + j, n_cols = min_size(TILE_COLS, s->n_cols - j);
        pack_columns(packed_b, b, col, n_cols, TILE_COLS, k);
        for (size_t i = 0; i < s->n_rows; i += TILE_ROWS) {
            const size_t row = s->row + i, n_rows = min_size(TILE_ROWS, s->n_rows - i);
            Vector sum[TILE_ROWS][2];
            double values[TILE_ROWS][TILE_COLS];
            for (size_t r = 0; r < n_rows; r++) {  // rows of C are far apart: have them here when the sums are done
                __builtin_prefetch(c.values + (row + r) * c.stride + col, 1);
                __builtin_prefetch(c.values + (row + r) * c.stride + col + n_cols - 1, 1);
            }
            multiply_tile(sum, packed_a + i * RANK_BLOCK, packed_b, k);
            memcpy(values, sum, sizeof values);
            for (size_t r = 0; r < n_rows; r++) {
                double *to = c.values + (row + r) * c.stride + col;
                for (size_t e = upper && row + r > col ? row + r - col : 0; e < n_cols; e++) {
                    to[e] += scale * values[r][e];
                }
            }
        }
    }
}

void rank_update(View c, ConstView a, ConstView b, size_t m, size_t n, size_t k, double scale, bool upper,
                 int n_threads) {
    CHECK(k <= RANK_BLOCK);
    const size_t strip_rows = ceil_div(m, STRIP_ROWS), strip_cols = ceil_div(n, STRIP_COLS);
#pragma omp parallel for num_threads(n_threads) schedule(dynamic)
    for (size_t s = 0; s < strip_rows * strip_cols; s++) {
        const size_t row = s % strip_rows * STRIP_ROWS, col = s / strip_rows * STRIP_COLS;
        const Strip strip = {row, min_size(STRIP_ROWS, m - row), col, min_size(STRIP_COLS, n - col)};
        if (!upper || strip.col + strip.n_cols > strip.row) {
            update_strip(c, a, b, &strip, k, scale, upper);
        }
    }
}
