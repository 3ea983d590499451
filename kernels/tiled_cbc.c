#include "tiled_cbc.h"

#include <string.h>

#define BLOCK_ALIGN 64  // bytes; start of each array in a block
#define MAX_GTILES (UINT32_MAX / (TILE_M * TILE_K / COLUMN_ALIGN))  // so that tile offsets fit in 32 bits

static size_t gtiles_per_row(size_t cols) { return ceil_div(cols, TILE_K); }

static size_t n_gtiles(const TiledCbc *cbc) {
    return tiled_cbc_tile_rows(cbc->rows) * gtiles_per_row(cbc->cols);
}

int tiled_cbc_layout(TiledCbcLayout *layout, size_t rows, size_t cols, Error *err) {
    size_t gtiles;
    // Dividing before multiplying keeps rows and cols of any size from overflowing.
    if (rows == 0 || cols == 0 || !size_mul(&gtiles, tiled_cbc_tile_rows(rows), gtiles_per_row(cols)) ||
        gtiles > MAX_GTILES) {
        return error_set(err, ERR_SHAPE, "a %zu x %zu matrix cannot be stored as Tiled-CBC", rows, cols);
    }
    const size_t columns = gtiles * TILE_K;
    layout->tile_offset = 0;
    layout->col_info = round_up((gtiles + 1) * sizeof(uint32_t), BLOCK_ALIGN);
    layout->bitmap = layout->col_info + round_up(columns * sizeof(uint32_t), BLOCK_ALIGN);
    layout->values = layout->bitmap + columns * BITMAP_WORDS * sizeof(uint64_t);
    return OK;
}

size_t tiled_cbc_block_bytes(const TiledCbcLayout *layout, size_t n_values) {
    return layout->values + n_values * sizeof(fp16) + MEMORY_SLACK;
}

/* cbc with its arrays in block; n_values as the last tile offset says. */
static TiledCbc view(const TiledCbcLayout *layout, const void *block, size_t rows, size_t cols) {
    const unsigned char *base = block;
    TiledCbc cbc = {
        .rows = rows,
        .cols = cols,
        .tile_offset = (const uint32_t *)(base + layout->tile_offset),
        .col_info = (const uint32_t *)(base + layout->col_info),
        .bitmap = (const uint64_t *)(base + layout->bitmap),
        .values = (const fp16 *)(base + layout->values),
        .max_col_values = TILE_M,
    };
    cbc.n_values = (size_t)cbc.tile_offset[n_gtiles(&cbc)] * COLUMN_ALIGN;
    return cbc;
}

int tiled_cbc_view(TiledCbc *cbc, const void *block, size_t bytes, size_t rows, size_t cols, Error *err) {
    TiledCbcLayout layout = {0};
    const int rc = tiled_cbc_layout(&layout, rows, cols, err);
    if (rc) {
        return rc;
    }
    if (bytes < layout.values) {
        return error_set(err, ERR_FORMAT, "%zu bytes are too few for the index of a %zu x %zu matrix", bytes,
                         rows, cols);
    }
    const TiledCbc seen = view(&layout, block, rows, cols);
    if (bytes != tiled_cbc_block_bytes(&layout, seen.n_values)) {
        return error_set(err, ERR_FORMAT, "%zu bytes, but %zu values need %zu", bytes, seen.n_values,
                         tiled_cbc_block_bytes(&layout, seen.n_values));
    }
    *cbc = seen;
    return OK;
}

/* Bitmap and ColInfo of one GTile; returns its number of values, padding included. Rows and columns beyond
 * the matrix are left out by n_rows and n_cols. */
static uint32_t encode_index(uint64_t *bitmap, uint32_t *col_info, const fp16 *w, size_t stride, size_t n_rows,
                             size_t n_cols) {
    uint64_t words[TILE_K][BITMAP_WORDS] = {0};
    for (size_t r = 0; r < n_rows; r++) {
        const fp16 *row = w + r * stride;
        for (size_t c = 0; c < n_cols; c++) {
            words[c][r / 64] |= (uint64_t)!fp16_is_zero(row[c]) << (r % 64);
        }
    }
    uint32_t first = 0;
    for (size_t c = 0; c < TILE_K; c++) {
        uint32_t nnz = 0;
        for (size_t i = 0; i < BITMAP_WORDS; i++) {
            nnz += (uint32_t)__builtin_popcountll(words[c][i]);
        }
        col_info[c] = first << 16 | nnz;
        first += (uint32_t)round_up(nnz, COLUMN_ALIGN);
    }
    memcpy(bitmap, words, sizeof words);
    return first;
}

/* Values of one GTile. Every element is stored where the next nonzero belongs and the cursor moves on only
 * for nonzeros: no branch on the data. */
static void encode_values(fp16 *values, const uint32_t *col_info, const fp16 *w, size_t stride, size_t n_rows,
                          size_t n_cols) {
    fp16 columns[TILE_K][TILE_M + 1];
    uint32_t count[TILE_K] = {0};
    for (size_t r = 0; r < n_rows; r++) {
        const fp16 *row = w + r * stride;
        for (size_t c = 0; c < n_cols; c++) {
            columns[c][count[c]] = row[c];
            count[c] += !fp16_is_zero(row[c]);
        }
    }
    for (size_t c = 0; c < n_cols; c++) {
        memcpy(values + col_info_first(col_info[c]), columns[c], count[c] * sizeof(fp16));
    }
}

int tiled_cbc_encode(TiledCbc *cbc, void **block, TiledCbcStats *stats, const fp16 *w, size_t rows,
                     size_t cols, size_t stride, int n_threads, Error *err) {
    TiledCbcLayout layout = {0};
    const int rc = tiled_cbc_layout(&layout, rows, cols, err);
    if (rc) {
        return rc;
    }
    const size_t tile_rows = tiled_cbc_tile_rows(rows), per_row = gtiles_per_row(cols);
    const size_t gtiles = tile_rows * per_row;

    // The index tells how many values there are, so it is made first, in memory of its own.
    unsigned char *index = memory_alloc(layout.values);
    if (!index) {
        return error_set(err, ERR_MEMORY, "no memory to encode a %zu x %zu matrix", rows, cols);
    }
    uint32_t *tile_offset = (uint32_t *)(index + layout.tile_offset);
    uint32_t *col_info = (uint32_t *)(index + layout.col_info);
    uint64_t *bitmap = (uint64_t *)(index + layout.bitmap);
#pragma omp parallel for num_threads(n_threads) schedule(dynamic, 16)
    for (size_t g = 0; g < gtiles; g++) {
        const size_t row = g / per_row * TILE_M, col = g % per_row * TILE_K;
        const uint32_t n = encode_index(bitmap + g * TILE_K * BITMAP_WORDS, col_info + g * TILE_K,
                                        w + row * stride + col, stride, min_size(rows - row, TILE_M),
                                        min_size(cols - col, TILE_K));
        tile_offset[g + 1] = n / COLUMN_ALIGN;
    }
    TiledCbcStats seen = {0};
    for (size_t g = 0; g < gtiles; g++) {
        const uint32_t n = tile_offset[g + 1] * COLUMN_ALIGN;
        seen.max_gtile_values = n > seen.max_gtile_values ? n : seen.max_gtile_values;
        tile_offset[g + 1] += tile_offset[g];
        for (size_t c = g * TILE_K; c < (g + 1) * TILE_K; c++) {
            const uint32_t nnz = col_info_nnz(col_info[c]);
            const uint32_t padded = (uint32_t)round_up(nnz, COLUMN_ALIGN);
            seen.nnz += nnz;
            seen.max_col_values = padded > seen.max_col_values ? padded : seen.max_col_values;
        }
    }

    unsigned char *bytes =
        memory_alloc(tiled_cbc_block_bytes(&layout, (size_t)tile_offset[gtiles] * COLUMN_ALIGN));
    if (!bytes) {
        free(index);
        return error_set(err, ERR_MEMORY, "no memory to encode a %zu x %zu matrix", rows, cols);
    }
    memcpy(bytes, index, layout.values);
    free(index);
    TiledCbc made = view(&layout, bytes, rows, cols);
    made.max_col_values = seen.max_col_values;
    fp16 *values = (fp16 *)(bytes + layout.values);
#pragma omp parallel for num_threads(n_threads) schedule(dynamic, 16)
    for (size_t g = 0; g < gtiles; g++) {
        const size_t row = g / per_row * TILE_M, col = g % per_row * TILE_K;
        encode_values(values + (size_t)made.tile_offset[g] * COLUMN_ALIGN, made.col_info + g * TILE_K,
                      w + row * stride + col, stride, min_size(rows - row, TILE_M),
                      min_size(cols - col, TILE_K));
    }
    *cbc = made;
    *block = bytes;
    if (stats) {
        *stats = seen;
    }
    return OK;
}

void tiled_cbc_decode(fp16 *w, size_t stride, const TiledCbc *cbc) {
    const size_t cols_padded = tiled_cbc_cols_padded(cbc->cols);
    for (size_t tm = 0; tm < tiled_cbc_tile_rows(cbc->rows); tm++) {
        const size_t n_rows = min_size(cbc->rows - tm * TILE_M, TILE_M);
        for (size_t k = 0; k < cbc->cols; k++) {
            const size_t column = tm * cols_padded + k;
            const fp16 *value = cbc->values + (size_t)cbc->tile_offset[column / TILE_K] * COLUMN_ALIGN +
                                col_info_first(cbc->col_info[column]);
            const uint64_t *bitmap = cbc->bitmap + column * BITMAP_WORDS;
            for (size_t r = 0; r < n_rows; r++) {
                w[(tm * TILE_M + r) * stride + k] = bitmap[r / 64] >> (r % 64) & 1 ? *value++ : 0;
            }
        }
    }
}

/* The bits of word i of a column that rows may use, when n_rows of the tile exist. */
static uint64_t row_mask(size_t n_rows, size_t i) {
    if (n_rows >= (i + 1) * 64) {
        return UINT64_MAX;
    }
    return n_rows <= i * 64 ? 0 : (UINT64_C(1) << (n_rows - i * 64)) - 1;
}

/* Check GTile g and add it to stats. Returns what is wrong with which column, NULL if nothing. */
static const char *validate_gtile(const TiledCbc *cbc, size_t g, TiledCbcStats *stats, size_t *column) {
    const size_t per_row = gtiles_per_row(cbc->cols);
    const size_t n_rows = min_size(cbc->rows - g / per_row * TILE_M, TILE_M);
    uint32_t first = 0;
    for (*column = g * TILE_K; *column < (g + 1) * TILE_K; ++*column) {
        const uint32_t info = cbc->col_info[*column];
        const uint64_t *bitmap = cbc->bitmap + *column * BITMAP_WORDS;
        const size_t k = g % per_row * TILE_K + *column % TILE_K;
        uint32_t nnz = 0;
        for (size_t i = 0; i < BITMAP_WORDS; i++) {
            if (bitmap[i] & ~(k < cbc->cols ? row_mask(n_rows, i) : 0)) {
                return "has a bit outside the matrix";
            }
            nnz += (uint32_t)__builtin_popcountll(bitmap[i]);
        }
        if (col_info_nnz(info) != nnz) {
            return "has a count that differs from its bitmap";
        }
        if (col_info_first(info) != first) {
            return "does not begin where its predecessor ends";
        }
        const uint32_t padded = (uint32_t)round_up(nnz, COLUMN_ALIGN);
        first += padded;
        stats->nnz += nnz;
        stats->max_col_values = padded > stats->max_col_values ? padded : stats->max_col_values;
    }
    if ((uint64_t)cbc->tile_offset[g] * COLUMN_ALIGN + first !=
        (uint64_t)cbc->tile_offset[g + 1] * COLUMN_ALIGN) {
        return "and its neighbours do not fill their GTile";
    }
    stats->max_gtile_values = first > stats->max_gtile_values ? first : stats->max_gtile_values;
    return NULL;
}

int tiled_cbc_validate(const TiledCbc *cbc, TiledCbcStats *stats, Error *err) {
    TiledCbcStats seen = {0};
    if (cbc->tile_offset[0] != 0) {
        return error_set(err, ERR_FORMAT, "TileOffset begins with %u, not 0", cbc->tile_offset[0]);
    }
    for (size_t g = 0; g < n_gtiles(cbc); g++) {
        size_t column;
        const char *fault = validate_gtile(cbc, g, &seen, &column);
        if (fault) {
            const size_t cols_padded = tiled_cbc_cols_padded(cbc->cols);
            return error_set(err, ERR_FORMAT, "GTile %zu: column %zu of tile row %zu %s", g,
                             column % cols_padded, column / cols_padded, fault);
        }
    }
    if ((size_t)cbc->tile_offset[n_gtiles(cbc)] * COLUMN_ALIGN != cbc->n_values) {
        return error_set(err, ERR_FORMAT, "TileOffset ends with %u, but there are %zu values",
                         cbc->tile_offset[n_gtiles(cbc)], cbc->n_values);
    }
    if (stats) {
        *stats = seen;
    }
    return OK;
}

size_t tiled_cbc_storage(const TiledCbc *cbc) {
    const size_t gtiles = n_gtiles(cbc), columns = gtiles * TILE_K;
    return sizeof(uint32_t) * (gtiles + 1 + columns) + sizeof(uint64_t) * columns * BITMAP_WORDS +
           sizeof(fp16) * cbc->n_values;
}

size_t tiled_cbc_storage_formula(size_t rows, size_t cols, size_t nnz) {
    const size_t gtiles = tiled_cbc_tile_rows(rows) * gtiles_per_row(cols);
    const size_t padded = tiled_cbc_tile_rows(rows) * TILE_M * tiled_cbc_cols_padded(cols);
    return 4 * (gtiles + 1) + 4 * TILE_K * gtiles + 8 * (padded / 64) + 2 * nnz;
}
