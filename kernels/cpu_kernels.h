/* cpu_kernels.h: the inner loops of the CPU backend. kernels/cpu_kernels.c is compiled once for each
 * instruction set; cpu.c chooses one table at run time and does all threading. */
#ifndef SPDP_CPU_KERNELS_H
#define SPDP_CPU_KERNELS_H

#include "tiled_cbc.h"

/* A panel is TILE_M rows x up to PANEL_COLS columns of a matrix in fp32, ordered for products with many
 * tokens: groups of group_rows rows; in a group column by column; in a column row by row. */
#define PANEL_COLS 64

typedef struct {
    const char *name;
    int group_rows;    // rows of a panel that are computed together; divides TILE_M
    int group_tokens;  // tokens that are computed together

    void (*to_float)(float *out, const fp16 *x, size_t n);
    void (*to_fp16)(fp16 *out, const float *x, size_t n);
    float (*dot)(const float *a, const float *b, size_t n);
    void (*add_scaled)(float *y, float a, const float *x, size_t n);  // y += a x
    void (*scale)(float *y, float a, size_t n);                       // y *= a
    float (*exp_all)(float *x, float max, size_t n);                  // x = exp(x - max), x <= max; returns the sum
    void (*swiglu)(fp16 *out, const float *y, size_t n);              // out_i = silu(y_2i) * y_2i+1

    /* y[r] = sum of w[r][k] x[k] for n_rows rows of a dense matrix; x (cols). */
    void (*dense_rows)(float *y, const fp16 *w, size_t stride, size_t n_rows, const float *x, size_t cols);

    /* spMspV on one tile row: y[0 .. TILE_M-1] = columns active[0 .. n_active-1] (ascending) times x.
     * Returns the nonzeros of those columns. */
    size_t (*cbc_columns)(float *y, const TiledCbc *w, size_t tile_row, const uint32_t *active,
                          size_t n_active, const float *x);

    /* Columns col .. col + n_cols - 1 of a tile row (dense: of n_rows rows from w) as a panel. */
    void (*unpack_cbc)(float *panel, const TiledCbc *w, size_t tile_row, size_t col, size_t n_cols);
    void (*unpack_dense)(float *panel, const fp16 *w, size_t stride, size_t n_rows, size_t n_cols);

    /* y[t][r] += sum over the panel's columns of panel[r][c] x[c][t].
     *   y  (n_groups * group_tokens, TILE_M)
     *   x  (n_groups, PANEL_COLS, group_tokens) */
    void (*panel_product)(float *y, const float *panel, size_t n_cols, const float *x, size_t n_groups);
} CpuKernels;

extern const CpuKernels cpu_kernels_portable;
#ifdef __x86_64__
extern const CpuKernels cpu_kernels_avx2;         // AVX2, FMA, F16C
extern const CpuKernels cpu_kernels_avx512;       // AVX-512 F, BW, VL
extern const CpuKernels cpu_kernels_avx512vbmi2;  // the same with VBMI2's expand of 16-bit lanes
#endif

#endif
