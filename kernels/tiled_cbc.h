/* tiled_cbc.h: the Tiled-CBC format (Tiled Column-wise Bitmap Compressed), on the host.
 *
 * A matrix W is M x K (M = rows = outputs, K = cols = inputs), y = W x. It is cut into GTiles of
 * TILE_M x TILE_K, and each GTile into TILE_K column tiles of TILE_M x 1, the smallest unit of
 * compression and of skipping. GTiles are stored row by row: GTile g = tm * (K_pad / TILE_K) + tk, so
 * the columns of one row of GTiles are contiguous: column k of tile row tm has index tm * K_pad + k in
 * ColInfo and in Bitmap. Source: "Unified Static-Dynamic Pruning for Efficient LLM Inference".
 *
 *   paper            field         type, length             meaning
 *   TileOffset       tile_offset   u32, n_gtiles + 1        first value of each GTile, in units of 8 values
 *   TileOffset_Col   col_info>>16  u32, n_gtiles * TILE_K   the column's first value within its GTile
 *   NNZ_Column       col_info&ffff                          nonzeros of the column, 0 .. TILE_M
 *   Bitmap           bitmap        u64, n_gtiles * TILE_K * 4   bit r of word w: row tm*256 + w*64 + r is nonzero
 *   Values           values        fp16, n_values           GTile by GTile, column by column, rows ascending
 *
 * Every column is padded with +0 to a multiple of 8 values (16 bytes). Rows and columns beyond M and K
 * are zero bits and have no values. -0 counts as zero. */
#ifndef SPDP_TILED_CBC_H
#define SPDP_TILED_CBC_H

#include "fp16.h"
#include "util.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TILE_M 256
#define TILE_K 16
#define BITMAP_WORDS (TILE_M / 64)  // u64 words of one column
#define COLUMN_ALIGN 8              // values; 16 bytes, what one cp.async moves

typedef struct {
    size_t rows, cols;            // M, K
    const uint32_t *tile_offset;  // n_gtiles + 1
    const uint32_t *col_info;     // tile_rows * cols_padded
    const uint64_t *bitmap;       // tile_rows * cols_padded * BITMAP_WORDS
    const fp16 *values;           // n_values, then MEMORY_SLACK readable bytes
    size_t n_values;              // stored values, padding included
    uint32_t max_col_values;      // bound on the values of one column, padding included: sizes a kernel's buffers
} TiledCbc;

static inline size_t tiled_cbc_tile_rows(size_t rows) { return ceil_div(rows, TILE_M); }
static inline size_t tiled_cbc_cols_padded(size_t cols) { return round_up(cols, TILE_K); }
static inline uint32_t col_info_first(uint32_t info) { return info >> 16; }
static inline uint32_t col_info_nnz(uint32_t info) { return info & 0xffff; }

/* Where the arrays lie in one block of bytes: in memory after tiled_cbc_encode and in a model file. Each
 * begins on 64 bytes; values come last, followed by MEMORY_SLACK zero bytes. */
typedef struct {
    size_t tile_offset, col_info, bitmap, values;  // byte offsets from the start of the block
} TiledCbcLayout;

/* ERR_SHAPE when rows or cols is 0 or the arrays cannot be indexed. */
int tiled_cbc_layout(TiledCbcLayout *layout, size_t rows, size_t cols, Error *err);

/* Bytes of the whole block, slack included. */
size_t tiled_cbc_block_bytes(const TiledCbcLayout *layout, size_t n_values);

/* What one encoded matrix looks like from outside; the model file records it. */
typedef struct {
    size_t nnz;                 // nonzeros
    uint32_t max_col_values;    // values of the fullest column, padding included
    uint32_t max_gtile_values;  // the same for a GTile
} TiledCbcStats;

/* Encode a dense matrix.
 *   cbc     filled on success; its arrays point into *block
 *   block   one allocation that holds all arrays in layout order; release with free()
 *   stats   may be NULL
 *   w       (rows, stride) fp16, the first cols of each row are used
 * Runs on n_threads OpenMP threads; the result does not depend on them.
 * Returns 0, ERR_SHAPE or ERR_MEMORY; outputs untouched on failure. */
int tiled_cbc_encode(TiledCbc *cbc, void **block, TiledCbcStats *stats, const fp16 *w, size_t rows,
                     size_t cols, size_t stride, int n_threads, Error *err);

/* Write the dense matrix back: w (rows, stride), columns beyond cols are not touched. */
void tiled_cbc_decode(fp16 *w, size_t stride, const TiledCbc *cbc);

/* Check an untrusted matrix so that every kernel may index it blindly: offsets ascend and end at
 * n_values, every column starts where its predecessor's padded values end, counts equal the popcount of
 * the bitmap, no bit lies beyond rows or cols. The lengths of the arrays must already be right (see
 * tiled_cbc_view). Fills stats (may be NULL). Returns 0 or ERR_FORMAT naming the first fault. */
int tiled_cbc_validate(const TiledCbc *cbc, TiledCbcStats *stats, Error *err);

/* Point cbc at the arrays of a block of bytes (64-byte aligned) and check that they fit in it exactly.
 * Contents other than the last tile offset are not looked at; max_col_values is set to TILE_M. Returns 0, ERR_SHAPE or ERR_FORMAT. */
int tiled_cbc_view(TiledCbc *cbc, const void *block, size_t bytes, size_t rows, size_t cols, Error *err);

/* Bytes of the four arrays, without alignment between them and slack. */
size_t tiled_cbc_storage(const TiledCbc *cbc);

/* What the design's formula says: 4(NGT+1) + 4*16*NGT + 8*M_pad*K_pad/64 + 2*nnz, no column padding. */
size_t tiled_cbc_storage_formula(size_t rows, size_t cols, size_t nnz);

#ifdef __cplusplus
}
#endif
#endif
