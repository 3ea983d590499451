/* test_tiled_cbc.c: the format against its definition, and every damage to its arrays refused. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "../kernels/tiled_cbc.h"
#include "support.h"

#define SEED 20260101

/* ---- helpers ---- */

typedef struct {
    TiledCbc cbc;
    void *block;
    size_t bytes;  // of block
    TiledCbcStats stats;
} Encoded;

static size_t n_gtiles(size_t rows, size_t cols) { return (rows + 255) / 256 * ((cols + 15) / 16); }

static size_t block_bytes(const TiledCbc *cbc) {
    TiledCbcLayout layout;
    assert_int_equal(tiled_cbc_layout(&layout, cbc->rows, cbc->cols, NULL), OK);
    return tiled_cbc_block_bytes(&layout, cbc->n_values);
}

static Encoded encode(const fp16 *w, size_t rows, size_t cols, size_t stride, int n_threads) {
    Encoded e;
    assert_int_equal(tiled_cbc_encode(&e.cbc, &e.block, &e.stats, w, rows, cols, stride, n_threads, NULL),
                     OK);
    e.bytes = block_bytes(&e.cbc);
    return e;
}

/* A random matrix; NaN fills what lies between cols and stride. */
static fp16 *random_matrix(size_t rows, size_t cols, size_t stride, const Pattern *p, uint64_t *random) {
    fp16 *w = poisoned_alloc(rows * stride * sizeof *w);
    fill_matrix(w, rows, cols, stride, p, draw_normal, random);
    return w;
}

/* Compare the column of one tile row with rows first_row .. of column k of w; returns its nonzeros. */
static size_t check_column(const TiledCbc *cbc, size_t column, const fp16 *values, const fp16 *w,
                           size_t stride, size_t first_row, size_t k) {
    size_t nnz = 0;
    for (size_t i = 0; i < 256; i++) {
        const size_t row = first_row + i;
        const fp16 h = row < cbc->rows && k < cbc->cols ? w[row * stride + k] : 0;
        assert_int_equal(cbc->bitmap[column * 4 + i / 64] >> i % 64 & 1, !fp16_is_zero(h));
        if (!fp16_is_zero(h)) {
            assert_int_equal(values[nnz], h);
            nnz++;
        }
    }
    for (size_t i = nnz; i % 8 != 0; i++) {
        assert_int_equal(values[i], 0);
    }
    return nnz;
}

/* All four arrays by the definition of the format, and the figures that go with them. */
static void check_arrays(const Encoded *e, const fp16 *w, size_t stride) {
    const TiledCbc *cbc = &e->cbc;
    const size_t per_row = (cbc->cols + 15) / 16;
    size_t n_values = 0;
    TiledCbcStats seen = {0};
    for (size_t g = 0; g < n_gtiles(cbc->rows, cbc->cols); g++) {
        assert_int_equal(cbc->tile_offset[g] * 8, n_values);
        uint32_t in_gtile = 0;
        for (size_t c = 0; c < 16; c++) {
            const size_t column = g * 16 + c;
            const size_t nnz = check_column(cbc, column, cbc->values + n_values + in_gtile, w, stride,
                                            g / per_row * 256, g % per_row * 16 + c);
            assert_int_equal(cbc->col_info[column], in_gtile << 16 | nnz);
            const uint32_t padded = (uint32_t)((nnz + 7) / 8 * 8);
            in_gtile += padded;
            seen.nnz += nnz;
            seen.max_col_values = padded > seen.max_col_values ? padded : seen.max_col_values;
        }
        n_values += in_gtile;
        seen.max_gtile_values = in_gtile > seen.max_gtile_values ? in_gtile : seen.max_gtile_values;
    }
    assert_int_equal(cbc->tile_offset[n_gtiles(cbc->rows, cbc->cols)] * 8, n_values);
    assert_int_equal(cbc->n_values, n_values);
    assert_int_equal(e->stats.nnz, seen.nnz);
    assert_int_equal(e->stats.max_col_values, seen.max_col_values);
    assert_int_equal(e->stats.max_gtile_values, seen.max_gtile_values);
}

/* Decoded into poison, the matrix is what it was but for the sign of zeros; poison beyond cols remains. */
static void check_decoded(const TiledCbc *cbc, const fp16 *w, size_t stride) {
    const size_t out_stride = cbc->cols + 3;
    fp16 *out = poisoned_alloc(cbc->rows * out_stride * sizeof *out);
    tiled_cbc_decode(out, out_stride, cbc);
    for (size_t r = 0; r < cbc->rows; r++) {
        for (size_t k = 0; k < cbc->cols; k++) {
            const fp16 h = w[r * stride + k];
            assert_int_equal(out[r * out_stride + k], fp16_is_zero(h) ? 0 : h);
        }
        assert_true(is_poison(out + r * out_stride + cbc->cols, 3 * sizeof *out));
    }
    free(out);
}

static void check_validated(const Encoded *e) {
    TiledCbcStats stats;
    Error err = {0};
    poison(&stats, sizeof stats);
    assert_int_equal(tiled_cbc_validate(&e->cbc, &stats, &err), OK);
    assert_int_equal(stats.nnz, e->stats.nnz);
    assert_int_equal(stats.max_col_values, e->stats.max_col_values);
    assert_int_equal(stats.max_gtile_values, e->stats.max_gtile_values);
    assert_int_equal(tiled_cbc_validate(&e->cbc, NULL, NULL), OK);
}

/* A view of the block is the matrix itself, each array on 64 bytes and zeros behind the last. */
static void check_view(const Encoded *e) {
    TiledCbc seen;
    poison(&seen, sizeof seen);
    assert_int_equal(tiled_cbc_view(&seen, e->block, e->bytes, e->cbc.rows, e->cbc.cols, NULL), OK);
    assert_int_equal(seen.rows, e->cbc.rows);
    assert_int_equal(seen.cols, e->cbc.cols);
    assert_int_equal(seen.n_values, e->cbc.n_values);
    assert_ptr_equal(seen.tile_offset, e->cbc.tile_offset);
    assert_ptr_equal(seen.col_info, e->cbc.col_info);
    assert_ptr_equal(seen.bitmap, e->cbc.bitmap);
    assert_ptr_equal(seen.values, e->cbc.values);
    const void *const arrays[] = {seen.tile_offset, seen.col_info, seen.bitmap, seen.values};
    for (size_t i = 0; i < COUNT(arrays); i++) {
        assert_int_equal((uintptr_t)arrays[i] % 64, 0);
    }
    const unsigned char zeros[MEMORY_SLACK] = {0};
    assert_memory_equal(seen.values + seen.n_values, zeros, sizeof zeros);
}

/* Storage is the formula's and the padding of the columns. */
static void check_storage(const Encoded *e) {
    const TiledCbc *cbc = &e->cbc;
    const size_t gtiles = n_gtiles(cbc->rows, cbc->cols);
    const size_t formula =
        4 * (gtiles + 1) + 4 * 16 * gtiles + 8 * (gtiles * 256 * 16 / 64) + 2 * e->stats.nnz;
    assert_int_equal(tiled_cbc_storage_formula(cbc->rows, cbc->cols, e->stats.nnz), formula);
    assert_int_equal(tiled_cbc_storage(cbc), formula + 2 * (cbc->n_values - e->stats.nnz));
}

static void check_everything(size_t rows, size_t cols, size_t stride, const Pattern *p, uint64_t *random) {
    fp16 *w = random_matrix(rows, cols, stride, p, random);
    const Encoded e = encode(w, rows, cols, stride, 2);
    check_arrays(&e, w, stride);
    check_decoded(&e.cbc, w, stride);
    check_validated(&e);
    check_view(&e);
    check_storage(&e);
    free(e.block);
    free(w);
}

/* ---- encode and decode ---- */

static void test_every_shape_and_pattern_comes_back_bit_by_bit(void **state) {
    (void)state;
    static const size_t shapes[][2] = {{1, 1},    {255, 15}, {255, 16}, {255, 17},  {256, 15},
                                       {256, 16}, {256, 17}, {257, 15}, {257, 16},  {257, 17},
                                       {172, 64}, {1, 33},   {513, 1},  {1376, 512}};
    uint64_t random = SEED;
    print_message("seed %d\n", SEED);
    for (size_t s = 0; s < COUNT(shapes); s++) {
        for (size_t p = 0; p < COUNT(patterns); p++) {
            const size_t cols = shapes[s][1];
            check_everything(shapes[s][0], cols, cols + p % 3 * 5, &patterns[p], &random);
        }
    }
}

static void test_a_model_s_matrix_comes_back_bit_by_bit(void **state) {
    (void)state;
    uint64_t random = SEED + 1;
    check_everything(11008, 4096, 4096, HALF_NONZERO, &random);
}

/* The smallest and the largest magnitudes, infinity and NaN are values like any other; -0 is none. */
static void test_every_bit_pattern_is_kept_but_minus_zero(void **state) {
    (void)state;
    enum { ROWS = 300, COLS = 220 };
    fp16 *w = poisoned_alloc(ROWS * COLS * sizeof *w);
    for (size_t i = 0; i < ROWS * COLS; i++) {
        w[i] = (fp16)i;
    }
    const Encoded e = encode(w, ROWS, COLS, COLS, 1);
    check_arrays(&e, w, COLS);
    check_decoded(&e.cbc, w, COLS);
    assert_int_equal(e.stats.nnz, ROWS * COLS - 3);  // 0x0000 twice and 0x8000
    free(e.block);
    free(w);
}

static void test_the_encoding_does_not_depend_on_threads(void **state) {
    (void)state;
    enum { ROWS = 1000, COLS = 700 };
    uint64_t random = SEED + 2;
    fp16 *w = random_matrix(ROWS, COLS, COLS, HALF_NONZERO, &random);
    const Encoded one = encode(w, ROWS, COLS, COLS, 1);
    for (int n_threads = 2; n_threads <= 9; n_threads += 1 + n_threads / 4) {
        const Encoded e = encode(w, ROWS, COLS, COLS, n_threads);
        assert_int_equal(e.bytes, one.bytes);
        assert_memory_equal(e.block, one.block, one.bytes);
        free(e.block);
    }
    free(one.block);
    free(w);
}

/* ---- layout ---- */

static void test_layout_by_hand(void **state) {
    (void)state;
    TiledCbcLayout layout;
    // 2 x 2 GTiles, 64 columns: 20 bytes of TileOffset, 256 of ColInfo, 2048 of Bitmap.
    assert_int_equal(tiled_cbc_layout(&layout, 300, 20, NULL), OK);
    assert_int_equal(layout.tile_offset, 0);
    assert_int_equal(layout.col_info, 64);
    assert_int_equal(layout.bitmap, 64 + 256);
    assert_int_equal(layout.values, 64 + 256 + 2048);
    assert_int_equal(tiled_cbc_block_bytes(&layout, 0), 2368 + MEMORY_SLACK);
    assert_int_equal(tiled_cbc_block_bytes(&layout, 24), 2368 + 48 + MEMORY_SLACK);
}

/* 8388607 GTiles of 4096 values are the most whose offsets, in units of 8, fit in 32 bits. */
static void test_shapes_that_cannot_be_indexed_are_refused(void **state) {
    (void)state;
    static const struct {
        size_t rows, cols;
        int rc;
    } cases[] = {
        {0, 1, ERR_SHAPE},
        {1, 0, ERR_SHAPE},
        {0, 0, ERR_SHAPE},
        {256, (size_t)8388607 * 16, OK},
        {256, (size_t)8388607 * 16 + 1, ERR_SHAPE},
        {257, (size_t)4194303 * 16, OK},
        {257, (size_t)4194304 * 16, ERR_SHAPE},
        {SIZE_MAX, 1, ERR_SHAPE},
        {1, SIZE_MAX, ERR_SHAPE},
        {SIZE_MAX, SIZE_MAX, ERR_SHAPE},
        {(size_t)1 << 40, (size_t)1 << 36, ERR_SHAPE},  // 2^32 * 2^32 GTiles: 0 in 64 bits
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        TiledCbcLayout layout;
        Error err = {0};
        assert_int_equal(tiled_cbc_layout(&layout, cases[i].rows, cases[i].cols, &err), cases[i].rc);
        assert_int_equal(err.code, cases[i].rc);
        assert_int_equal(err.text[0] != '\0', cases[i].rc != OK);
    }
}

static void test_a_refused_shape_leaves_the_outputs_alone(void **state) {
    (void)state;
    const fp16 w[1] = {0x3c00};
    Encoded e;
    poison(&e, sizeof e);
    assert_int_equal(tiled_cbc_encode(&e.cbc, &e.block, &e.stats, w, 0, 1, 1, 1, NULL), ERR_SHAPE);
    assert_int_equal(tiled_cbc_view(&e.cbc, w, sizeof w, 1, 0, NULL), ERR_SHAPE);
    assert_true(is_poison(&e.cbc, sizeof e.cbc) && is_poison(&e.block, sizeof e.block) &&
                is_poison(&e.stats, sizeof e.stats));
}

/* ---- damage ---- */

/* 2 x 2 GTiles with padding in both directions: small enough to try every bit. */
enum { SMALL_ROWS = 300, SMALL_COLS = 20 };

static Encoded small_matrix(const Pattern *p, size_t rows, size_t cols) {
    uint64_t random = SEED + 3;
    fp16 *w = random_matrix(rows, cols, cols, p, &random);
    const Encoded e = encode(w, rows, cols, cols, 1);
    free(w);
    return e;
}

/* What a reader does with an untrusted block: look at it, then check it. */
static int read_untrusted(const void *block, size_t bytes, Error *err) {
    TiledCbc cbc;
    const int rc = tiled_cbc_view(&cbc, block, bytes, SMALL_ROWS, SMALL_COLS, err);
    return rc ? rc : tiled_cbc_validate(&cbc, NULL, err);
}

static void check_refused(const void *block, size_t bytes, const char *array, size_t place) {
    Error err = {0};
    const int rc = read_untrusted(block, bytes, &err);
    if (rc != ERR_FORMAT || err.code != rc || !err.text[0]) {
        fail_msg("damage to %s, %zu: got %d instead of a refusal", array, place, rc);
    }
}

/* The arrays that index; any bits of Values are a matrix. */
typedef struct {
    const char *name;
    unsigned char *bytes;
    size_t n_bytes, entry;  // entry: bytes of one element
} IndexArray;

static void index_arrays(IndexArray out[3], const Encoded *e) {
    const size_t gtiles = n_gtiles(SMALL_ROWS, SMALL_COLS);
    unsigned char *block = e->block;
    TiledCbcLayout layout;
    assert_int_equal(tiled_cbc_layout(&layout, SMALL_ROWS, SMALL_COLS, NULL), OK);
    out[0] = (IndexArray){"TileOffset", block + layout.tile_offset, 4 * (gtiles + 1), 4};
    out[1] = (IndexArray){"ColInfo", block + layout.col_info, 4 * 16 * gtiles, 4};
    out[2] = (IndexArray){"Bitmap", block + layout.bitmap, 8 * 16 * 4 * gtiles, 8};
}

static void flip_every_bit(const Encoded *e, const IndexArray *a) {
    for (size_t bit = 0; bit < a->n_bytes * 8; bit++) {
        a->bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
        check_refused(e->block, e->bytes, a->name, bit);
        a->bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}

static void test_every_flipped_bit_of_an_index_array_is_refused(void **state) {
    (void)state;
    for (size_t p = 0; p < COUNT(patterns); p++) {
        const Encoded e = small_matrix(&patterns[p], SMALL_ROWS, SMALL_COLS);
        IndexArray arrays[3];
        index_arrays(arrays, &e);
        assert_int_equal(read_untrusted(e.block, e.bytes, NULL), OK);
        for (size_t a = 0; a < COUNT(arrays); a++) {
            flip_every_bit(&e, &arrays[a]);
        }
        assert_int_equal(read_untrusted(e.block, e.bytes, NULL), OK);  // all bits are back
        free(e.block);
    }
}

/* Offsets and counts that are wrong by more than a bit: off by one, by a unit of either half, zero, huge. */
static void test_every_wrong_entry_of_an_index_array_is_refused(void **state) {
    (void)state;
    static const int64_t differences[] = {1, -1, 8, -8, 1 << 16, -(1 << 16), 8 << 16, -(8 << 16), INT32_MAX};
    const Encoded e = small_matrix(HALF_NONZERO, SMALL_ROWS, SMALL_COLS);
    IndexArray arrays[3];
    index_arrays(arrays, &e);
    for (size_t i = 0; i < COUNT(arrays); i++) {
        const IndexArray *a = &arrays[i];
        for (size_t at = 0; at < a->n_bytes; at += a->entry) {
            uint64_t good = 0;
            memcpy(&good, a->bytes + at, a->entry);
            for (size_t d = 0; d <= COUNT(differences); d++) {
                const uint64_t bad = d < COUNT(differences) ? good + (uint64_t)differences[d] : 0;
                // One bitmap word may stand for another of as many bits: that is another matrix, not damage.
                if (memcmp(&bad, &good, a->entry) == 0 ||
                    (a->entry == 8 && __builtin_popcountll(bad) == __builtin_popcountll(good))) {
                    continue;
                }
                memcpy(a->bytes + at, &bad, a->entry);
                check_refused(e.block, e.bytes, a->name, at);
            }
            memcpy(a->bytes + at, &good, a->entry);
        }
    }
    assert_int_equal(read_untrusted(e.block, e.bytes, NULL), OK);
    free(e.block);
}

/* A larger matrix in the same GTiles, read as the smaller one: counts and offsets agree with the bitmap, and
 * only the place of one bit is wrong. */
static void check_bit_beyond(size_t rows, size_t cols) {
    const Encoded e = small_matrix(&patterns[5], rows, cols);
    assert_int_equal(e.stats.nnz, 1);
    assert_int_equal(tiled_cbc_validate(&e.cbc, NULL, NULL), OK);
    check_refused(e.block, e.bytes, "the padding", rows * cols);
    free(e.block);
}

static void test_every_bit_beyond_rows_or_cols_is_refused(void **state) {
    (void)state;
    for (size_t rows = SMALL_ROWS + 1; rows <= 512; rows++) {
        check_bit_beyond(rows, 1 + rows % SMALL_COLS);
    }
    for (size_t cols = SMALL_COLS + 1; cols <= 32; cols++) {
        check_bit_beyond(SMALL_ROWS, cols);
        check_bit_beyond(1, cols);
    }
}

/* Each size gets memory of exactly that size, so that a sanitizer sees any look behind the end. */
static void test_a_block_of_any_other_size_is_refused(void **state) {
    (void)state;
    const Encoded e = small_matrix(&patterns[1], SMALL_ROWS, SMALL_COLS);
    for (size_t bytes = 0; bytes < e.bytes + 200; bytes++) {
        void *copy;
        assert_int_equal(posix_memalign(&copy, 64, bytes ? bytes : 1), 0);
        memset(copy, 0, bytes);
        memcpy(copy, e.block, bytes < e.bytes ? bytes : e.bytes);
        if (bytes != e.bytes) {
            check_refused(copy, bytes, "the size", bytes);
        }
        free(copy);
    }
    free(e.block);
}

/* Room before, between or behind the GTiles, with all offsets from there on and the size of the block to
 * match: only the gap is wrong. */
static void test_a_gap_between_gtiles_is_refused(void **state) {
    (void)state;
    const Encoded e = small_matrix(HALF_NONZERO, SMALL_ROWS, SMALL_COLS);
    const size_t n_offsets = n_gtiles(SMALL_ROWS, SMALL_COLS) + 1;
    for (size_t first = 0; first < n_offsets; first++) {
        for (uint32_t gap = 1; gap <= 3; gap++) {
            const size_t bytes = e.bytes + gap * 16;
            unsigned char *block = memory_alloc(bytes);
            memcpy(block, e.block, e.bytes);
            uint32_t *tile_offset = (uint32_t *)(void *)block;
            for (size_t g = first; g < n_offsets; g++) {
                tile_offset[g] += gap;
            }
            check_refused(block, bytes, "TileOffset, a gap before GTile", first);
            free(block);
        }
    }
    free(e.block);
}

/* ---- compression ---- */

/* A permutation of 0 .. 2^24 - 1: each step can be undone. */
static uint32_t mix24(uint32_t i) {
    i = (i ^ i >> 13) * 0x5bd1e9u & 0xffffff;
    i = (i ^ i >> 11) * 0x2c1b3du & 0xffffff;
    return i ^ i >> 12;
}

/* CR = 2MK / storage is 2 / (2(1-s) + 0.125 + 4/256 + 4/4096) but for the last TileOffset and the padding of
 * columns, at most 7 values each. cases.md row 27: 2(1-s) + 0.125 bytes a weight before offsets. */
static void test_the_compression_ratio_is_the_formula_s(void **state) {
    (void)state;
    enum { N = 4096 };
    static const struct {
        double s, cr;  // cr: the formula's, worked out
    } cases[] = {{0.3, 1.297352}, {0.5, 1.751924}, {0.7, 2.696865}};
    fp16 *w = poisoned_alloc((size_t)N * N * sizeof *w);
    print_message("   s   CR   formula   bytes an element\n");
    for (size_t i = 0; i < COUNT(cases); i++) {
        const size_t nnz = (size_t)N * N - (size_t)((double)N * N * cases[i].s);
        for (uint32_t j = 0; j < N * N; j++) {
            w[j] = mix24(j) < nnz ? 0x3c00 : 0;
        }
        const Encoded e = encode(w, N, N, N, 2);
        assert_int_equal(e.stats.nnz, nnz);
        const double storage = (double)tiled_cbc_storage(&e.cbc), bytes = storage / N / N;
        const double formula = 2 * (double)nnz / N / N + 0.125 + 4.0 / 256 + 4.0 / 4096 + 4.0 / N / N;
        const double padding = 2 * 7.0 / 256;
        print_message("%4.1f  %.3f  %.3f  %.4f\n", cases[i].s, 2 / bytes, 2 / formula, bytes);
        assert_true(fabs(2 / formula - cases[i].cr) < 1e-5);
        assert_true(bytes >= formula - 1e-12 && bytes <= formula + padding);
        assert_true(bytes > formula + padding / 4);  // columns of random length need padding
        free(e.block);
    }
    free(w);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_shape_and_pattern_comes_back_bit_by_bit),
        cmocka_unit_test(test_a_model_s_matrix_comes_back_bit_by_bit),
        cmocka_unit_test(test_every_bit_pattern_is_kept_but_minus_zero),
        cmocka_unit_test(test_the_encoding_does_not_depend_on_threads),
        cmocka_unit_test(test_layout_by_hand),
        cmocka_unit_test(test_shapes_that_cannot_be_indexed_are_refused),
        cmocka_unit_test(test_a_refused_shape_leaves_the_outputs_alone),
        cmocka_unit_test(test_every_flipped_bit_of_an_index_array_is_refused),
        cmocka_unit_test(test_every_wrong_entry_of_an_index_array_is_refused),
        cmocka_unit_test(test_every_bit_beyond_rows_or_cols_is_refused),
        cmocka_unit_test(test_a_block_of_any_other_size_is_refused),
        cmocka_unit_test(test_a_gap_between_gtiles_is_refused),
        cmocka_unit_test(test_the_compression_ratio_is_the_formula_s),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
