/* test_prune.c: magnitude pruning against a sort, and exact counts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "../export/prune.h"

#define POISON 0x7bff  // 65504: behind the columns, and larger than all that is pruned

static uint32_t random_below(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 32) * n >> 32);
}

static size_t count_zeros(const fp16 *w, size_t n) {
    size_t zeros = 0;
    for (size_t i = 0; i < n; i++) {
        zeros += fp16_is_zero(w[i]);
    }
    return zeros;
}

static void from_floats(fp16 *w, const float *f, size_t n) {
    for (size_t i = 0; i < n; i++) {
        w[i] = fp16_from_float(f[i]);
    }
}

/* Prune one row of 8 floats, as a tensor and per row, and compare with what should remain. */
static void check_row(const float *weights, double ratio, const float *expected) {
    for (int per_row = 0; per_row < 2; per_row++) {
        fp16 w[8], e[8];
        from_floats(w, weights, 8);
        from_floats(e, expected, 8);
        assert_int_equal(prune_magnitude(w, 1, 8, 8, ratio, per_row, 1), count_zeros(e, 8));
        assert_memory_equal(w, e, sizeof w);
    }
}

/* ---- counts ---- */

static void test_counts_are_the_floor_of_the_product(void **state) {
    (void)state;
    assert_int_equal(prune_count(8, 0), 0);
    assert_int_equal(prune_count(8, 0.5), 4);
    assert_int_equal(prune_count(8, 1), 8);
    assert_int_equal(prune_count(7, 0.5), 3);
    assert_int_equal(prune_count(0, 0.5), 0);
    assert_int_equal(prune_count(3, 0.3), 0);
    // Products that fall just short of the integer in double.
    assert_int_equal(prune_count(100, 0.29), 29);
    assert_int_equal(prune_count(1000, 0.57), 570);
    assert_int_equal(prune_count(4096ul * 11008, 0.7), 31562137);
    // 32 bits do not hold this one.
    assert_int_equal(prune_count(1ul << 33, 0.5), 1ul << 32);
    assert_int_equal(prune_count(1ul << 33, 1), 1ul << 33);
}

/* cases.md row 21: none, {1, 2, 3, 4} and all of 1 .. 8. */
static void test_distinct_weights_lose_the_smallest(void **state) {
    (void)state;
    const float w[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    check_row(w, 0, w);
    check_row(w, 0.5, (float[8]){0, 0, 0, 0, 5, 6, 7, 8});
    check_row(w, 1, (float[8]){0});
}

/* cases.md row 21: of eight equal weights exactly four. */
static void test_equal_weights_lose_exactly_half_from_the_lowest_column(void **state) {
    (void)state;
    const float w[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    check_row(w, 0, w);
    check_row(w, 0.5, (float[8]){0, 0, 0, 0, 1, 1, 1, 1});
    check_row(w, 1, (float[8]){0});
}

static void test_the_sign_does_not_count(void **state) {
    (void)state;
    check_row((float[8]){-1, 2, -3, 4, -5, 6, -7, 8}, 0.25, (float[8]){0, 0, -3, 4, -5, 6, -7, 8});
    check_row((float[8]){2, -1, 1, -2, 1, -1, 3, -3}, 0.375, (float[8]){2, 0, 0, -2, 0, -1, 3, -3});
}

static void test_ties_go_by_column_before_row(void **state) {
    (void)state;
    fp16 w[3 * 3], expected[3 * 3];
    from_floats(w, (float[]){1, 1, 1, 2, 1, 1, 1, 1, 1}, 9);
    from_floats(expected, (float[]){0, 0, 1, 2, 0, 1, 0, 1, 1}, 9);
    assert_int_equal(prune_magnitude(w, 3, 3, 3, 4.0 / 9, false, 2), 4);
    assert_memory_equal(w, expected, sizeof w);
}

/* cases.md row 27: the format's overhead is left out here. */
static void test_the_ratio_decides_the_bytes_of_bitmap_and_values(void **state) {
    (void)state;
    static const struct {
        double ratio, bytes_per_weight;
    } cases[] = {{0, 2.125}, {0.3, 1.525}, {0.5, 1.125}, {0.7, 0.725}, {0.9, 0.325}};
    enum { N = 40 * 100 };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fp16 w[N];
        for (size_t j = 0; j < N; j++) {
            w[j] = (fp16)(1 + j * 7 % 5000);
        }
        const size_t zeros = prune_magnitude(w, 40, 100, 100, cases[i].ratio, false, 2);
        assert_int_equal(zeros, count_zeros(w, N));
        const double bits = 16.0 * (double)(N - zeros) + N;
        assert_float_equal(bits / 8 / N, cases[i].bytes_per_weight, 1e-9);
    }
}

/* ---- zeros that are there already ---- */

/* cases.md row 21: the sparsity that is reported has them in it. */
static void test_weights_that_are_zero_already_count(void **state) {
    (void)state;
    check_row((float[8]){8, 0, 3, -0.0f, 1, 2, 4, 5}, 0.5, (float[8]){8, 0, 3, 0, 0, 0, 4, 5});
}

static void test_more_zeros_than_asked_change_nothing(void **state) {
    (void)state;
    const fp16 before[8] = {0x3c00, 0, 0x8000, 0, 0x8000, 0x0001, 0, 0xbc00};
    fp16 w[8];
    memcpy(w, before, sizeof w);
    assert_int_equal(prune_magnitude(w, 1, 8, 8, 0.5, false, 1), 5);
    assert_memory_equal(w, before, sizeof w);
    assert_int_equal(prune_magnitude(w, 1, 8, 8, 0.625, false, 1), 5);
    assert_memory_equal(w, before, sizeof w);
    assert_int_equal(prune_magnitude(w, 1, 8, 8, 0, false, 1), 5);
    assert_memory_equal(w, before, sizeof w);
    assert_int_equal(prune_magnitude(w, 1, 8, 8, 0.75, false, 1), 6);
    assert_int_equal(w[5], 0);
}

static void test_an_all_zero_matrix_stays_as_it_is(void **state) {
    (void)state;
    fp16 w[12] = {0};
    assert_int_equal(prune_magnitude(w, 3, 4, 4, 0.3, false, 1), 12);
    assert_int_equal(prune_magnitude(w, 3, 4, 4, 1, true, 1), 12);
    assert_int_equal(count_zeros(w, 12), 12);
}

/* ---- against a sort ---- */

typedef struct {
    unsigned magnitude;
    size_t column, row;
} Weight;

static int by_magnitude_column_row(const void *a, const void *b) {
    const Weight *x = a, *y = b;
    if (x->magnitude != y->magnitude) {
        return x->magnitude < y->magnitude ? -1 : 1;
    }
    if (x->column != y->column) {
        return x->column < y->column ? -1 : 1;
    }
    return (x->row > y->row) - (x->row < y->row);
}

/* The first `count` of the sorted weights become +0, unless so many are zero already. */
static void reference_prune(fp16 *w, size_t rows, size_t cols, size_t stride, size_t count) {
    if (rows * cols == 0) {
        return;
    }
    Weight *sorted = malloc(rows * cols * sizeof *sorted);
    for (size_t i = 0; i < rows * cols; i++) {
        const size_t row = i / cols, column = i % cols;
        sorted[i] = (Weight){w[row * stride + column] & 0x7fffu, column, row};
    }
    qsort(sorted, rows * cols, sizeof *sorted, by_magnitude_column_row);
    if (count > 0 && sorted[count - 1].magnitude > 0) {
        for (size_t i = 0; i < count; i++) {
            w[sorted[i].row * stride + sorted[i].column] = 0;
        }
    }
    free(sorted);
}

static void reference_prune_magnitude(fp16 *w, size_t rows, size_t cols, size_t stride, double ratio,
                                      bool per_row) {
    if (!per_row) {
        reference_prune(w, rows, cols, stride, prune_count(rows * cols, ratio));
        return;
    }
    for (size_t r = 0; r < rows; r++) {
        reference_prune(w + r * stride, 1, cols, stride, prune_count(cols, ratio));
    }
}

/* Few different magnitudes, both signs, now and then zeros; POISON beyond the columns. */
static void random_matrix(fp16 *w, size_t rows, size_t cols, size_t stride, uint64_t *state) {
    const uint32_t n_magnitudes = 1 + random_below(state, random_below(state, 2) ? 4 : 30000);
    const uint32_t lowest = random_below(state, 2);
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < stride; c++) {
            const uint32_t magnitude = lowest + random_below(state, n_magnitudes);
            w[r * stride + c] = (fp16)(c < cols ? magnitude | random_below(state, 2) << 15 : POISON);
        }
    }
}

static void test_random_matrices_equal_the_sorting_reference(void **state) {
    (void)state;
    uint64_t random = 3;
    size_t changed = 0;
    for (int trial = 0; trial < 600; trial++) {
        const size_t rows = 1 + random_below(&random, 30), cols = 1 + random_below(&random, 200);
        const size_t stride = cols + random_below(&random, 9);
        const double ratio = random_below(&random, 6) == 0 ? 1 : random_below(&random, 1000) / 1000.0;
        const bool per_row = random_below(&random, 2);
        const int n_threads = 1 + (int)random_below(&random, 3);
        const size_t bytes = rows * stride * sizeof(fp16);
        fp16 *w = malloc(bytes), *expected = malloc(bytes);
        random_matrix(w, rows, cols, stride, &random);
        memcpy(expected, w, bytes);
        reference_prune_magnitude(expected, rows, cols, stride, ratio, per_row);
        changed += memcmp(w, expected, bytes) != 0;
        const size_t zeros = prune_magnitude(w, rows, cols, stride, ratio, per_row, n_threads);
        assert_memory_equal(w, expected, bytes);
        assert_int_equal(zeros, count_zeros(w, rows * stride));
        free(w);
        free(expected);
    }
    assert_true(changed > 400);
}

static void test_every_row_loses_its_own_share(void **state) {
    (void)state;
    // Row 0 is small throughout, so that pruning the matrix as one would take all of it.
    fp16 w[2 * 6], whole[2 * 6];
    from_floats(w, (float[]){0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 1, 2, 3, 4, 5, 6}, 12);
    memcpy(whole, w, sizeof w);
    assert_int_equal(prune_magnitude(w, 2, 6, 6, 0.5, true, 2), 6);
    assert_int_equal(count_zeros(w, 6), 3);
    assert_int_equal(count_zeros(w + 6, 6), 3);
    assert_int_equal(prune_magnitude(whole, 2, 6, 6, 0.5, false, 2), 6);
    assert_int_equal(count_zeros(whole, 6), 6);
}

static void test_the_number_of_threads_changes_nothing(void **state) {
    (void)state;
    enum { ROWS = 300, COLS = 333 };
    fp16 *one = malloc(ROWS * COLS * sizeof *one), *four = malloc(ROWS * COLS * sizeof *four);
    uint64_t random = 8;
    random_matrix(one, ROWS, COLS, COLS, &random);
    memcpy(four, one, ROWS * COLS * sizeof *one);
    assert_int_equal(prune_magnitude(one, ROWS, COLS, COLS, 0.6, false, 1),
                     prune_magnitude(four, ROWS, COLS, COLS, 0.6, false, 4));
    assert_memory_equal(one, four, ROWS * COLS * sizeof *one);
    assert_int_equal(count_zeros(one, ROWS * COLS), prune_count(ROWS * COLS, 0.6));
    free(one);
    free(four);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts_are_the_floor_of_the_product),
        cmocka_unit_test(test_distinct_weights_lose_the_smallest),
        cmocka_unit_test(test_equal_weights_lose_exactly_half_from_the_lowest_column),
        cmocka_unit_test(test_the_sign_does_not_count),
        cmocka_unit_test(test_ties_go_by_column_before_row),
        cmocka_unit_test(test_the_ratio_decides_the_bytes_of_bitmap_and_values),
        cmocka_unit_test(test_weights_that_are_zero_already_count),
        cmocka_unit_test(test_more_zeros_than_asked_change_nothing),
        cmocka_unit_test(test_an_all_zero_matrix_stays_as_it_is),
        cmocka_unit_test(test_random_matrices_equal_the_sorting_reference),
        cmocka_unit_test(test_every_row_loses_its_own_share),
        cmocka_unit_test(test_the_number_of_threads_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
