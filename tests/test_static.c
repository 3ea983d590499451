/* test_static.c: Wanda and SparseGPT against the papers' formulas, written out in double; statistics of calibration. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "../export/calibrate.h"
#include "../export/cholesky.h"
#include "../export/prune.h"
#include "../export/sparsegpt.h"
#include "support.h"

#define GUARD 0x7bff  // 65504: behind the columns of a matrix, to stay

/* A matrix with its rows apart and inputs for it. */
typedef struct {
    size_t rows, cols, stride, n_tokens;
    fp16 *w;    // (rows, stride)
    double *x;  // (n_tokens, cols)
} Layer;

static Layer random_layer(size_t rows, size_t cols, size_t n_tokens, uint64_t *random) {
    Layer l = {rows, cols, cols + 3, n_tokens, NULL, NULL};
    l.w = poisoned_alloc(rows * l.stride * sizeof *l.w);
    l.x = poisoned_alloc(n_tokens * cols * sizeof *l.x);
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < l.stride; c++) {
            l.w[r * l.stride + c] = c < cols ? draw_nonzero(draw_normal, random) : GUARD;
        }
    }
    for (size_t t = 0; t < n_tokens; t++) {  // inputs of unequal size that go together
        const float common = random_normal(random);
        for (size_t c = 0; c < cols; c++) {
            l.x[t * cols + c] = (double)((random_normal(random) + common) * (0.1f + (float)(c * 7 % 13)));
        }
    }
    return l;
}

static void free_layer(Layer *l) {
    free(l->w);
    free(l->x);
}

static void kill_input(Layer *l, size_t c) {
    for (size_t t = 0; t < l->n_tokens; t++) {
        l->x[t * l->cols + c] = 0;
    }
}

static void assert_guarded(const Layer *l) {
    for (size_t r = 0; r < l->rows; r++) {
        for (size_t c = l->cols; c < l->stride; c++) {
            assert_int_equal(l->w[r * l->stride + c], GUARD);
        }
    }
}

static double *sum_of_squares(const Layer *l) {
    double *s = calloc(l->cols, sizeof *s);
    assert_non_null(s);
    for (size_t t = 0; t < l->n_tokens; t++) {
        for (size_t c = 0; c < l->cols; c++) {
            s[c] += l->x[t * l->cols + c] * l->x[t * l->cols + c];
        }
    }
    return s;
}

/* X^T X, the upper triangle; NaN below it. */
static double *sum_of_products(const Layer *l) {
    double *s = poisoned_alloc(l->cols * l->cols * sizeof *s);
    for (size_t i = 0; i < l->cols; i++) {
        for (size_t j = i; j < l->cols; j++) {
            s[i * l->cols + j] = 0;
            for (size_t t = 0; t < l->n_tokens; t++) {
                s[i * l->cols + j] += l->x[t * l->cols + i] * l->x[t * l->cols + j];
            }
        }
    }
    return s;
}

static double *copy_weights(const Layer *l) {
    double *w = calloc(l->rows * l->cols, sizeof *w);
    assert_non_null(w);
    for (size_t r = 0; r < l->rows; r++) {
        for (size_t c = 0; c < l->cols; c++) {
            w[r * l->cols + c] = (double)fp16_to_float(l->w[r * l->stride + c]);
        }
    }
    return w;
}

static size_t zeros_between(const Layer *l, size_t row, size_t n_rows, size_t col, size_t n_cols) {
    size_t zeros = 0;
    for (size_t r = row; r < row + n_rows; r++) {
        for (size_t c = col; c < col + n_cols; c++) {
            zeros += fp16_is_zero(l->w[r * l->stride + c]);
        }
    }
    return zeros;
}

/* ---- references ---- */

/* How many of n scores come before score i, by size, then by place. */
static size_t rank_of(const double *scores, size_t n, size_t i) {
    size_t before = 0;
    for (size_t j = 0; j < n; j++) {
        before += scores[j] < scores[i] || (scores[j] == scores[i] && j < i);
    }
    return before;
}

static void reference_wanda(double *w, const Layer *l, double ratio) {
    double *scores = calloc(l->cols, sizeof *scores), *squares = sum_of_squares(l);
    assert_non_null(scores);
    for (size_t r = 0; r < l->rows; r++) {
        for (size_t c = 0; c < l->cols; c++) {
            scores[c] = fabs(w[r * l->cols + c]) * sqrt(squares[c]);
        }
        for (size_t c = 0; c < l->cols; c++) {
            if (rank_of(scores, l->cols, c) < prune_count(l->cols, ratio)) {
                w[r * l->cols + c] = 0;
            }
        }
    }
    free(scores);
    free(squares);
}

/* Gauss-Jordan with the largest pivot of a column. */
static void reference_inverse(double *inverse, const double *matrix, size_t n) {
    double *a = calloc(n * n, sizeof *a);
    assert_non_null(a);
    memcpy(a, matrix, n * n * sizeof *a);
    for (size_t i = 0; i < n * n; i++) {
        inverse[i] = i % (n + 1) == 0;
    }
    for (size_t k = 0; k < n; k++) {
        size_t pivot = k;
        for (size_t i = k; i < n; i++) {
            pivot = fabs(a[i * n + k]) > fabs(a[pivot * n + k]) ? i : pivot;
        }
        for (size_t j = 0; j < n; j++) {
            double t = a[k * n + j];
            a[k * n + j] = a[pivot * n + j];
            a[pivot * n + j] = t;
            t = inverse[k * n + j];
            inverse[k * n + j] = inverse[pivot * n + j];
            inverse[pivot * n + j] = t;
        }
        const double d = a[k * n + k];
        for (size_t j = 0; j < n; j++) {
            a[k * n + j] /= d;
            inverse[k * n + j] /= d;
        }
        for (size_t i = 0; i < n; i++) {
            const double f = a[i * n + k];
            for (size_t j = 0; j < n && i != k; j++) {
                a[i * n + j] -= f * a[k * n + j];
                inverse[i * n + j] -= f * inverse[k * n + j];
            }
        }
    }
    free(a);
}

/* U, upper triangular, with matrix = U^T U. */
static void reference_cholesky(double *u, const double *matrix, size_t n) {
    memset(u, 0, n * n * sizeof *u);
    for (size_t i = 0; i < n; i++) {
        for (size_t j = i; j < n; j++) {
            double s = matrix[i * n + j];
            for (size_t p = 0; p < i; p++) {
                s -= u[p * n + i] * u[p * n + j];
            }
            u[i * n + j] = i == j ? sqrt(s) : s / u[i * n + i];
        }
    }
}

/* The paper's algorithm: columns one after the other, the mask chosen anew every 128, each error made up for by all
 * columns to the right at once. */
static void reference_sparsegpt(double *w, const Layer *l, double ratio) {
    const size_t n = l->cols, rows = l->rows;
    double *products = sum_of_products(l), *h = calloc(n * n, sizeof *h), *inverse = calloc(n * n, sizeof *h);
    double *scores = calloc(rows * 128, sizeof *scores), mean = 0;
    bool *mask = calloc(rows * 128, sizeof *mask);
    assert_true(h && inverse && scores && mask);
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < n; j++) {
            h[i * n + j] = 2 / (double)l->n_tokens * products[i < j ? i * n + j : j * n + i];
        }
        if (h[i * n + i] == 0) {
            h[i * n + i] = 1;
            for (size_t r = 0; r < rows; r++) {
                w[r * n + i] = 0;
            }
        }
        mean += h[i * n + i] / (double)n;
    }
    for (size_t i = 0; i < n; i++) {
        h[i * n + i] += 0.01 * mean;
    }
    reference_inverse(inverse, h, n);
    reference_cholesky(h, inverse, n);
    for (size_t c = 0; c < n; c++) {
        const size_t width = min_size(128, n - c), d = c * n + c;
        for (size_t i = 0; c % 128 == 0 && i < width * rows; i++) {  // column by column
            const size_t col = c + i / rows;
            scores[i] = pow(w[i % rows * n + col], 2) / pow(h[col * n + col], 2);
        }
        for (size_t i = 0; c % 128 == 0 && i < width * rows; i++) {
            mask[i] = rank_of(scores, width * rows, i) < prune_count(width * rows, ratio);
        }
        for (size_t r = 0; r < rows; r++) {
            if (mask[c % 128 * rows + r]) {
                const double error = w[r * n + c] / h[d];
                for (size_t j = c; j < n; j++) {
                    w[r * n + j] -= error * h[c * n + j];
                }
                w[r * n + c] = 0;
            }
        }
    }
    free(products);
    free(h);
    free(inverse);
    free(scores);
    free(mask);
}

/* ---- choosing ---- */

static void test_the_smallest_scores_are_chosen_and_of_equal_ones_the_first(void **state) {
    (void)state;
    uint64_t random = 1;
    for (size_t n = 1; n < 120; n++) {
        double scores[120], scratch[120];
        bool removed[120];
        for (size_t i = 0; i < n; i++) {
            scores[i] = n % 3 == 0 ? (double)random_bits(&random) : (double)random_below(&random, 1 + (uint32_t)n / 8);
        }
        for (size_t count = 0; count <= n; count++) {
            poison(removed, sizeof removed);
            poison(scratch, sizeof scratch);
            prune_smallest(removed, scores, scratch, n, count);
            for (size_t i = 0; i < n; i++) {
                assert_int_equal(removed[i], rank_of(scores, n, i) < count);
            }
        }
    }
}

/* ---- Wanda ---- */

/* Prune, with the checks that hold for every case; the result against a reference's if one is given. */
static void check_wanda(Layer *l, double ratio, const double *expected) {
    double *squares = sum_of_squares(l);
    size_t zeros = SIZE_MAX;
    assert_int_equal(prune_wanda(&zeros, l->w, l->rows, l->cols, l->stride, squares, ratio, 2, NULL), OK);
    assert_int_equal(zeros, zeros_between(l, 0, l->rows, 0, l->cols));
    for (size_t r = 0; r < l->rows; r++) {
        assert_int_equal(zeros_between(l, r, 1, 0, l->cols), prune_count(l->cols, ratio));
    }
    double *got = copy_weights(l);
    if (expected) {
        assert_memory_equal(got, expected, l->rows * l->cols * sizeof *got);
    }
    assert_guarded(l);
    free(got);
    free(squares);
}

static void test_wanda_removes_what_the_paper_says(void **state) {
    (void)state;
    static const size_t shapes[][2] = {{1, 1}, {1, 8}, {5, 33}, {64, 64}, {31, 300}};
    static const double ratios[] = {0, 0.1, 0.5, 0.7, 1};
    uint64_t random = 2;
    for (size_t i = 0; i < COUNT(shapes) * COUNT(ratios); i++) {
        const size_t *shape = shapes[i / COUNT(ratios)];
        Layer l = random_layer(shape[0], shape[1], 20, &random);
        double *expected = copy_weights(&l);
        reference_wanda(expected, &l, ratios[i % COUNT(ratios)]);
        check_wanda(&l, ratios[i % COUNT(ratios)], expected);
        free(expected);
        free_layer(&l);
    }
}

/* cases.md row 21: with all inputs alike none, the four smallest and all of 1 .. 8 go, in either order. */
static void test_row_21_wanda_removes_none_the_smaller_half_and_all(void **state) {
    (void)state;
    uint64_t random = 15;
    for (size_t count = 0; count <= 8; count += 4) {
        Layer l = random_layer(2, 8, 1, &random);
        for (size_t c = 0; c < 8; c++) {
            l.x[c] = 1;
            l.w[c] = fp16_from_float((float)(c + 1));
            l.w[l.stride + c] = fp16_from_float((float)(8 - c));
        }
        check_wanda(&l, (double)count / 8, NULL);
        assert_int_equal(zeros_between(&l, 0, 1, 0, count), count);
        assert_int_equal(zeros_between(&l, 1, 1, 8 - count, count), count);
        free_layer(&l);
    }
}

/* cases.md row 21: weights that are zero already are reported, also where none or fewer are asked for. */
static void test_row_21_zeros_that_are_there_count_for_wanda(void **state) {
    (void)state;
    static const double ratios[] = {0, 0.25, 0.375, 0.5};
    static const size_t expected[] = {3, 3, 3, 4};
    uint64_t random = 16;
    for (size_t i = 0; i < COUNT(ratios); i++) {
        Layer l = random_layer(1, 8, 5, &random);
        l.w[1] = l.w[6] = 0;
        l.w[7] = 0x8000;
        double *squares = sum_of_squares(&l);
        size_t zeros = SIZE_MAX;
        assert_int_equal(prune_wanda(&zeros, l.w, 1, 8, l.stride, squares, ratios[i], 1, NULL), OK);
        assert_int_equal(zeros, expected[i]);
        assert_int_equal(zeros_between(&l, 0, 1, 0, 8), expected[i]);
        assert_int_equal(zeros_between(&l, 0, 1, 1, 1) + zeros_between(&l, 0, 1, 6, 2), 3);
        free(squares);
        free_layer(&l);
    }
}

/* cases.md row 21: of equal weights exactly half, the lowest columns. */
static void test_row_21_wanda_counts_are_exact_where_all_are_equal(void **state) {
    (void)state;
    uint64_t random = 3;
    Layer l = random_layer(3, 8, 1, &random);
    for (size_t i = 0; i < 8; i++) {
        l.x[i] = 1;
        for (size_t r = 0; r < 3; r++) {
            l.w[r * l.stride + i] = r == 1 ? 0xbc00 : 0x3c00;  // -1, 1
        }
    }
    check_wanda(&l, 0.5, NULL);
    assert_int_equal(zeros_between(&l, 0, 3, 0, 4), 12);  // lowest columns
    free_layer(&l);
}

static void test_wanda_removes_dead_inputs_first(void **state) {
    (void)state;
    uint64_t random = 4;
    Layer l = random_layer(6, 40, 10, &random);
    kill_input(&l, 7);
    kill_input(&l, 31);
    check_wanda(&l, 0.05, NULL);
    assert_int_equal(zeros_between(&l, 0, 6, 7, 1) + zeros_between(&l, 0, 6, 31, 1), 12);
    free_layer(&l);
}

/* cases.md row 23: all activations zero; Wanda has nothing to go by but still removes what was asked. */
static void test_row_23_wanda_without_any_activation_keeps_its_count(void **state) {
    (void)state;
    uint64_t random = 5;
    Layer l = random_layer(6, 40, 1, &random);
    memset(l.x, 0, 40 * sizeof *l.x);
    l.w[39] = 0;  // a zero beyond those that go counts
    check_wanda(&l, 0.5, NULL);
    assert_int_equal(zeros_between(&l, 0, 1, 0, 19), 19);
    assert_int_equal(zeros_between(&l, 1, 5, 0, 20), 100);
    free_layer(&l);
}

/* ---- the factor ---- */

static void test_the_factor_is_that_of_the_inverse(void **state) {
    (void)state;
    static const size_t sizes[] = {1, 2, 7, 64, 127, 128, 129, 256, 300};
    uint64_t random = 6;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        const size_t n = sizes[i];
        Layer l = random_layer(1, n, 2 * n, &random);
        double *h = sum_of_products(&l), *full = calloc(n * n, sizeof *full), *inverse = calloc(n * n, sizeof *full);
        double *expected = calloc(n * n, sizeof *full);
        assert_true(full && inverse && expected);
        for (size_t k = 0; k < n * n; k++) {
            h[k] += k % (n + 1) == 0 ? (double)n : 0;
        }
        for (size_t k = 0; k < n * n; k++) {
            full[k] = h[k / n <= k % n ? k : k % n * n + k / n];
        }
        reference_inverse(inverse, full, n);
        reference_cholesky(expected, inverse, n);
        assert_int_equal(cholesky_of_inverse(h, n, 2, NULL), OK);
        for (size_t r = 0; r < n; r++) {
            for (size_t c = r; c < n; c++) {
                const double scale = sqrt(expected[r * n + r] * expected[c * n + c]);
                assert_true(fabs(h[r * n + c] - expected[r * n + c]) <= 1e-9 * scale);
            }
            for (size_t c = 0; c < r; c++) {
                assert_true(is_poison(&h[r * n + c], sizeof *h));  // not touched
            }
        }
        free(h);
        free(full);
        free(inverse);
        free(expected);
        free_layer(&l);
    }
}

static void test_a_matrix_that_is_not_positive_definite_has_no_factor(void **state) {
    (void)state;
    enum { N = 200 };
    static double h[N * N];
    for (size_t bad = 0; bad < N; bad += 66) {
        Error err = {0};
        memset(h, 0, sizeof h);
        for (size_t i = 0; i < N; i++) {
            h[i * N + i] = i == bad ? -1 : 1;
        }
        assert_int_equal(cholesky_of_inverse(h, N, 2, &err), ERR_NUMBER);
        assert_non_null(strstr(err.text, "positive definite"));
    }
}

/* ---- SparseGPT ---- */

static int prune_layer(Layer *l, double ratio, double *damping, Error *err) {
    double *products = sum_of_products(l);
    bool *dead = poisoned_alloc(l->cols * sizeof *dead);
    size_t zeros = SIZE_MAX;
    int rc = sparsegpt_factor(products, dead, damping, l->cols, l->n_tokens, 2, err);
    if (!rc) {
        rc = sparsegpt_prune(&zeros, l->w, l->rows, l->cols, l->stride, products, dead, ratio, 2, err);
    }
    if (!rc) {
        assert_int_equal(zeros, zeros_between(l, 0, l->rows, 0, l->cols));
    }
    free(products);
    free(dead);
    return rc;
}

/* Prune and compare: the same weights removed, the others within 1e-3 of the reference. */
static void check_sparsegpt(Layer *l, double ratio) {
    double damping, *expected = copy_weights(l), largest = 0;
    const size_t n = l->rows * l->cols;
    reference_sparsegpt(expected, l, ratio);
    assert_int_equal(prune_layer(l, ratio, &damping, NULL), OK);
    assert_float_equal(damping, 0.01, 1e-12);
    double *got = copy_weights(l);
    for (size_t i = 0; i < n; i++) {
        largest = fmax(largest, fabs(expected[i]));
    }
    for (size_t i = 0; i < n; i++) {
        assert_true(isfinite(got[i]));
        assert_int_equal(got[i] == 0, expected[i] == 0);
        assert_true(fabs(got[i] - expected[i]) <= 1e-3 * fabs(expected[i]) + 1e-6 * largest);
    }
    assert_guarded(l);
    free(expected);
    free(got);
}

static void check_block_counts(const Layer *l, double ratio) {
    for (size_t c = 0; c < l->cols; c += 128) {
        const size_t width = min_size(128, l->cols - c);
        assert_int_equal(zeros_between(l, 0, l->rows, c, width), prune_count(l->rows * width, ratio));
    }
}

static void test_sparsegpt_gives_the_weights_of_the_paper(void **state) {
    (void)state;
    static const size_t shapes[][2] = {{1, 1}, {1, 8}, {13, 64}, {5, 127}, {7, 128}, {9, 129}, {21, 300}};
    static const double ratios[] = {0.1, 0.5, 0.75};
    uint64_t random = 7;
    for (size_t i = 0; i < COUNT(shapes) * COUNT(ratios); i++) {
        const size_t *shape = shapes[i / COUNT(ratios)];
        const double ratio = ratios[i % COUNT(ratios)];
        Layer l = random_layer(shape[0], shape[1], 3 * shape[1], &random);
        check_sparsegpt(&l, ratio);
        check_block_counts(&l, ratio);
        free_layer(&l);
    }
}

static void test_sparsegpt_makes_up_for_what_it_removes(void **state) {
    (void)state;
    uint64_t random = 8;
    Layer a = random_layer(16, 96, 200, &random), b = a;
    b.w = poisoned_alloc(a.rows * a.stride * sizeof *b.w);
    memcpy(b.w, a.w, a.rows * a.stride * sizeof *b.w);
    double *before = copy_weights(&a), damping, errors[2] = {0};
    check_wanda(&a, 0.5, NULL);
    assert_int_equal(prune_layer(&b, 0.5, &damping, NULL), OK);
    const Layer *pruned[2] = {&a, &b};
    for (size_t i = 0; i < 2; i++) {
        double *after = copy_weights(pruned[i]);
        for (size_t t = 0; t < a.n_tokens; t++) {
            for (size_t r = 0; r < a.rows; r++) {
                double sum = 0;
                for (size_t c = 0; c < a.cols; c++) {
                    sum += (after[r * a.cols + c] - before[r * a.cols + c]) * a.x[t * a.cols + c];
                }
                errors[i] += sum * sum;
            }
        }
        free(after);
    }
    print_message("squared error of outputs: Wanda %g, SparseGPT %g\n", errors[0], errors[1]);
    assert_true(errors[1] < 0.7 * errors[0]);
    free(before);
    free(b.w);
    free_layer(&a);
}

/* cases.md rows 21 and 22: ratio 0 changes nothing, not even at a dead input, and 1 leaves nothing. */
static void test_sparsegpt_at_the_ends_of_the_range(void **state) {
    (void)state;
    uint64_t random = 9;
    Layer l = random_layer(4, 140, 300, &random);
    kill_input(&l, 3);
    double *before = copy_weights(&l), damping;
    assert_int_equal(prune_layer(&l, 0, &damping, NULL), OK);
    double *after = copy_weights(&l);
    assert_memory_equal(before, after, 4 * 140 * sizeof *before);
    assert_int_equal(prune_layer(&l, 1, &damping, NULL), OK);
    assert_int_equal(zeros_between(&l, 0, 4, 0, 140), 4 * 140);
    free(before);
    free(after);
    free_layer(&l);
}

/* cases.md row 23: 4 tokens for 64 columns. */
static void test_row_23_fewer_tokens_than_columns(void **state) {
    (void)state;
    uint64_t random = 10;
    Layer l = random_layer(20, 64, 4, &random);
    check_sparsegpt(&l, 0.5);
    check_block_counts(&l, 0.5);
    free_layer(&l);
}

/* cases.md row 23: an input that is always 0. */
static void test_row_23_a_dead_input_loses_its_weights(void **state) {
    (void)state;
    uint64_t random = 11;
    Layer l = random_layer(20, 64, 100, &random);
    kill_input(&l, 0);
    kill_input(&l, 40);
    check_sparsegpt(&l, 0.5);
    check_block_counts(&l, 0.5);
    assert_int_equal(zeros_between(&l, 0, 20, 0, 1) + zeros_between(&l, 0, 20, 40, 1), 40);
    free_layer(&l);
}

/* cases.md row 23: all activations zero. */
static void test_row_23_without_any_activation_all_weights_are_zero(void **state) {
    (void)state;
    uint64_t random = 12;
    double damping;
    Layer l = random_layer(20, 64, 4, &random);
    memset(l.x, 0, 4 * 64 * sizeof *l.x);
    assert_int_equal(prune_layer(&l, 0.5, &damping, NULL), OK);
    assert_int_equal(zeros_between(&l, 0, 20, 0, 64), 20 * 64);
    assert_guarded(&l);
    free_layer(&l);
}

/* cases.md row 23. Products that no input has: an eigenvalue of -1.5 times the mean of the diagonal needs a damping
 * of 10. */
static void test_row_23_more_damping_where_the_factorisation_fails(void **state) {
    (void)state;
    double products[4] = {1, 2.5, NAN, 1}, damping = 0;
    bool dead[2];
    Error err = {0};
    assert_int_equal(sparsegpt_factor(products, dead, &damping, 2, 2, 1, &err), OK);
    assert_float_equal(damping, 10, 1e-9);
    assert_true(isfinite(products[0]) && isfinite(products[1]) && isfinite(products[3]));
    // inverse of {11, 2.5; 2.5, 11} = U^T U
    assert_float_equal(products[0] * products[0], 11 / (121 - 6.25), 1e-12);
    assert_float_equal(products[0] * products[1], -2.5 / (121 - 6.25), 1e-12);
}

/* cases.md row 23: beyond the limit of damping, and with sums that are not finite, an error. */
static void test_row_23_the_limit_of_damping_is_an_error(void **state) {
    (void)state;
    double hopeless[4] = {1, 1e6, NAN, 1}, infinite[4] = {INFINITY, 0, 0, 1}, nan[4] = {1, NAN, 0, 1}, damping;
    double *const cases[] = {hopeless, infinite, nan};
    bool dead[2];
    for (size_t i = 0; i < COUNT(cases); i++) {
        Error err = {0};
        assert_int_equal(sparsegpt_factor(cases[i], dead, &damping, 2, 2, 1, &err), ERR_NUMBER);
        assert_non_null(strstr(err.text, "Hessian"));
    }
}

/* cases.md row 23: no NaN and no infinity is ever written, the matrix stays as it was. */
static void test_row_23_a_weight_beyond_fp16_is_an_error(void **state) {
    (void)state;
    uint64_t random = 13;
    double damping;
    Error err = {0};
    Layer l = random_layer(1, 2, 8, &random);
    for (size_t t = 0; t < 8; t++) {  // the second input is a third of the first: it would have to be 3 times 60000
        l.x[2 * t + 1] = l.x[2 * t] / 3;
    }
    l.x[0] += 1e-3;
    l.w[0] = fp16_from_float(20000);
    l.w[1] = fp16_from_float(60000);
    const fp16 before[2] = {l.w[0], l.w[1]};
    // the first must go: by its score it does
    const int rc = prune_layer(&l, 0.5, &damping, &err);
    assert_int_equal(rc, ERR_NUMBER);
    assert_non_null(strstr(err.text, "column 1"));
    assert_memory_equal(l.w, before, sizeof before);
    free_layer(&l);
}

/* ---- calibration ---- */

static const Config small = {.dim = 24, .hidden_dim = 40, .n_layers = 2, .n_heads = 3, .n_kv_heads = 1, .head_dim = 8,
                             .seq_len = 64, .vocab_size = 50, .norm_eps = 1e-5f, .rope_theta = 10000, .bos_id = 1};

typedef struct {
    LayerWeights weights;
    fp16 *memory[6], *embedding;
    CalibText text;
    Backend *be;
} Bench;

static Matrix random_matrix(fp16 **memory, size_t rows, size_t cols, Site site, uint64_t *random) {
    const size_t stride = dense_stride(cols);
    *memory = memory_alloc(rows * stride * sizeof **memory);
    assert_non_null(*memory);
    for (size_t i = 0; i < rows * stride; i++) {
        (*memory)[i] = i % stride < cols ? fp16_from_float(0.2f * random_normal(random)) : 0;
    }
    return (Matrix){FORMAT_DENSE, rows, cols, 0, site, *memory, stride, {0}};
}

static void open_bench(Bench *b, size_t n_tokens, size_t length, int n_threads) {
    uint64_t random = 14;
    *b = (Bench){.text = {.n = n_tokens, .length = length}};
    b->weights.qkv = random_matrix(&b->memory[0], 40, 24, SITE_ATTN_IN, &random);
    b->weights.o = random_matrix(&b->memory[1], 24, 24, SITE_ATTN_OUT, &random);
    b->weights.gate_up = random_matrix(&b->memory[2], 80, 24, SITE_MLP_IN, &random);
    b->weights.down = random_matrix(&b->memory[3], 24, 40, SITE_MLP_HIDDEN, &random);
    b->weights.attn_norm = random_matrix(&b->memory[4], 1, 24, SITE_HEAD, &random).dense;
    b->weights.mlp_norm = random_matrix(&b->memory[5], 1, 24, SITE_HEAD, &random).dense;
    random_matrix(&b->embedding, 50, 24, SITE_HEAD, &random);
    b->text.ids = calloc(n_tokens, sizeof *b->text.ids);
    assert_non_null(b->text.ids);
    for (size_t i = 0; i < n_tokens; i++) {
        b->text.ids[i] = i % length == 0 ? 1 : (int)random_below(&random, 50);
    }
    assert_int_equal(backend_open(&b->be, "cpu", 0, true, n_threads, NULL, NULL, NULL), OK);
    b->be->max_tokens = 7;  // chunks within a sequence
}

static void close_bench(Bench *b) {
    for (size_t i = 0; i < COUNT(b->memory); i++) {
        free(b->memory[i]);
    }
    free(b->embedding);
    free(b->text.ids);
    b->be->free(b->be);
}

static Calibration *open_calibration(Bench *b, StatsKind kind, int n_threads) {
    const StatsKind kinds[N_DP_SITES] = {kind, kind, kind, kind};
    Calibration *c;
    assert_int_equal(calibration_open(&c, &small, b->be, &b->text, b->embedding, 24, kinds, 2, n_threads, NULL, NULL),
                     OK);
    return c;
}

static void test_the_first_layers_inputs_are_the_normed_embeddings(void **state) {
    (void)state;
    Bench b;
    open_bench(&b, 101, 20, 2);
    Calibration *c = open_calibration(&b, STATS_PRODUCTS, 2);
    assert_int_equal(calibration_measure(c, &b.weights, NULL), OK);
    assert_int_equal(calibration_measure(c, &b.weights, NULL), OK);  // not twice the sum
    double expected[24 * 24] = {0};
    for (size_t t = 0; t < b.text.n; t++) {
        double x[24], squares = 0;
        for (size_t i = 0; i < 24; i++) {
            x[i] = (double)fp16_to_float(b.embedding[b.text.ids[t] * 24 + (int)i]);
            squares += x[i] * x[i];
        }
        for (size_t i = 0; i < 24; i++) {
            x[i] *= (double)fp16_to_float(b.weights.attn_norm[i]) / sqrt(squares / 24 + 1e-5);
        }
        for (size_t i = 0; i < 24 * 24; i++) {
            expected[i] += x[i / 24] * x[i % 24];
        }
    }
    const InputStats *s = calibration_stats(c, SITE_ATTN_IN);
    assert_int_equal(s->width, 24);
    for (size_t i = 0; i < 24; i++) {
        for (size_t j = i; j < 24; j++) {
            const double scale = sqrt(expected[25 * i] * expected[25 * j]);
            assert_true(fabs(s->sums[i * 24 + j] - expected[i * 24 + j]) <= 1e-3 * scale);
        }
    }
    calibration_free(c);
    close_bench(&b);
}

/* Squares are the diagonal of products, at every site and after a layer, whatever the threads. */
static void test_squares_and_products_agree_in_the_second_layer_too(void **state) {
    (void)state;
    Bench b;
    open_bench(&b, 101, 20, 1);
    Calibration *squares = open_calibration(&b, STATS_SQUARES, 1), *products = open_calibration(&b, STATS_PRODUCTS, 3);
    double first = 0;
    for (int layer = 0; layer < 2; layer++) {
        assert_int_equal(calibration_measure(squares, &b.weights, NULL), OK);
        assert_int_equal(calibration_measure(products, &b.weights, NULL), OK);
        for (int site = 0; site < N_DP_SITES; site++) {
            const InputStats *s = calibration_stats(squares, (Site)site), *p = calibration_stats(products, (Site)site);
            for (size_t i = 0; i < s->width; i++) {
                assert_true(s->sums[i] > 0);
                assert_true(fabs(s->sums[i] - p->sums[i * s->width + i]) <= 1e-12 * s->sums[i]);
            }
        }
        const double sum = calibration_stats(squares, SITE_MLP_HIDDEN)->sums[0];
        assert_true(sum != first);  // the residual stream has moved on
        first = sum;
        assert_int_equal(calibration_advance(squares, &b.weights, NULL), OK);
        assert_int_equal(calibration_advance(products, &b.weights, NULL), OK);
    }
    calibration_free(squares);
    calibration_free(products);
    close_bench(&b);
}

/* cases.md row 23: statistics that are not finite stop the conversion with layer and site. */
static void test_an_input_that_is_not_finite_is_reported(void **state) {
    (void)state;
    Bench b;
    Error err = {0};
    open_bench(&b, 40, 20, 1);
    b.memory[5][2] = 0x7c00;  // infinite norm of the MLP
    Calibration *c = open_calibration(&b, STATS_SQUARES, 1);
    assert_int_equal(calibration_measure(c, &b.weights, &err), ERR_NUMBER);
    assert_non_null(strstr(err.text, "MLP input of layer 0"));
    calibration_free(c);
    close_bench(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_smallest_scores_are_chosen_and_of_equal_ones_the_first),
        cmocka_unit_test(test_wanda_removes_what_the_paper_says),
        cmocka_unit_test(test_row_21_wanda_removes_none_the_smaller_half_and_all),
        cmocka_unit_test(test_row_21_zeros_that_are_there_count_for_wanda),
        cmocka_unit_test(test_row_21_wanda_counts_are_exact_where_all_are_equal),
        cmocka_unit_test(test_wanda_removes_dead_inputs_first),
        cmocka_unit_test(test_row_23_wanda_without_any_activation_keeps_its_count),
        cmocka_unit_test(test_the_factor_is_that_of_the_inverse),
        cmocka_unit_test(test_a_matrix_that_is_not_positive_definite_has_no_factor),
        cmocka_unit_test(test_sparsegpt_gives_the_weights_of_the_paper),
        cmocka_unit_test(test_sparsegpt_makes_up_for_what_it_removes),
        cmocka_unit_test(test_sparsegpt_at_the_ends_of_the_range),
        cmocka_unit_test(test_row_23_fewer_tokens_than_columns),
        cmocka_unit_test(test_row_23_a_dead_input_loses_its_weights),
        cmocka_unit_test(test_row_23_without_any_activation_all_weights_are_zero),
        cmocka_unit_test(test_row_23_more_damping_where_the_factorisation_fails),
        cmocka_unit_test(test_row_23_the_limit_of_damping_is_an_error),
        cmocka_unit_test(test_row_23_a_weight_beyond_fp16_is_an_error),
        cmocka_unit_test(test_the_first_layers_inputs_are_the_normed_embeddings),
        cmocka_unit_test(test_squares_and_products_agree_in_the_second_layer_too),
        cmocka_unit_test(test_an_input_that_is_not_finite_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
