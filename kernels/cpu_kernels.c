/* The inner loops of the CPU backend. Compiled once per instruction set with -DCPU_KERNELS=<table name>
 * -DCPU_KERNELS_NAME="<name>" (Makefile); simd.h hides what differs. Sums run in a fixed order. */
#include "cpu_kernels.h"

#include "simd.h"

#define LANE_MASK ((UINT64_C(1) << VW) - 1)

#if VW == 16
#define GROUP_TOKENS 12
#elif VW == 8
#define GROUP_TOKENS 6
#else
#define GROUP_TOKENS 4
#endif
#define WORD_VECTORS (64 / VW)       // vectors of rows that one word of bitmap stands for
#define TILE_VECTORS (TILE_M / VW)
#define GROUP_ROWS (2 * VW)
#define PREFETCH_AHEAD 10  // active columns between prefetch and use

_Static_assert(TILE_M % GROUP_ROWS == 0, "a panel is whole groups of rows");

static void to_float(float *out, const fp16 *x, size_t n) {
    size_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf_store(out + i, vf_load_fp16(x + i));
    }
    for (; i < n; i++) {
        out[i] = fp16_to_float(x[i]);
    }
}

static void to_fp16(fp16 *out, const float *x, size_t n) {
    size_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf_store_fp16(out + i, vf_load(x + i));
    }
    for (; i < n; i++) {
        out[i] = fp16_from_float(x[i]);
    }
}

static float dot(const float *a, const float *b, size_t n) {
    vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    size_t i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW) {
        for (size_t j = 0; j < 4; j++) {
            sum[j] = vf_fma(vf_load(a + i + j * VW), vf_load(b + i + j * VW), sum[j]);
        }
    }
    for (; i + VW <= n; i += VW) {
        sum[0] = vf_fma(vf_load(a + i), vf_load(b + i), sum[0]);
    }
    float total = vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
    for (; i < n; i++) {
        total += a[i] * b[i];
    }
    return total;
}

static void add_scaled(float *y, float a, const float *x, size_t n) {
    size_t i = 0;
    for (; i + VW <= n; i += VW) {
        vf_store(y + i, vf_fma(vf_set(a), vf_load(x + i), vf_load(y + i)));
    }
    for (; i < n; i++) {
        y[i] += a * x[i];
    }
}

static void scale(float *y, float a, size_t n) {
    for (size_t i = 0; i < n; i++) {
        y[i] *= a;
    }
}

static float exp_all(float *x, float max, size_t n) {
    const vf shift = vf_set(-max);
    vf sum = vf_zero();
    size_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf e = vf_exp(vf_add(vf_load(x + i), shift));
        vf_store(x + i, e);
        sum = vf_add(sum, e);
    }
    float rest[VW] = {0}, total = vf_sum(sum);
    memcpy(rest, x + i, (n - i) * sizeof *x);
    vf_store(rest, vf_exp(vf_add(vf_load(rest), shift)));
    for (size_t j = 0; i < n; i++, j++) {
        x[i] = rest[j];
        total += rest[j];
    }
    return total;
}

/* silu(g) u = g u / (1 + e^-g). Both exponents are kept at or below 0: e^min(g, 0) / (1 + e^-|g|). */
static vf silu_product(vf gate, vf up) {
    const vf minus = vf_mul(gate, vf_set(-1.0f));
    const vf above = vf_exp(vf_mul(vf_max(minus, vf_zero()), vf_set(-1.0f)));
    const vf below = vf_add(vf_set(1.0f), vf_exp(vf_mul(vf_max(minus, gate), vf_set(-1.0f))));
    return vf_mul(vf_mul(gate, up), vf_div(above, below));
}

static void swiglu(fp16 *out, const float *y, size_t n) {
    for (size_t i = 0; i < n; i += VW) {
        const size_t m = min_size(VW, n - i);
        float gate[VW] = {0}, up[VW] = {0};
        fp16 part[VW];
        for (size_t j = 0; j < m; j++) {
            gate[j] = y[2 * (i + j)];
            up[j] = y[2 * (i + j) + 1];
        }
        vf_store_fp16(part, silu_product(vf_load(gate), vf_load(up)));
        memcpy(out + i, part, m * sizeof *out);
    }
}

/* Four sums per row cover the latency of the multiply-add; the row is streamed once. */
static void dense_rows(float *y, const fp16 *w, size_t stride, size_t n_rows, const float *x, size_t cols) {
    for (size_t r = 0; r < n_rows; r++) {
        const fp16 *row = w + r * stride;
        vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
        size_t k = 0;
        for (; k + 4 * VW <= cols; k += 4 * VW) {
            for (size_t j = 0; j < 4; j++) {
                sum[j] = vf_fma(vf_load_fp16(row + k + j * VW), vf_load(x + k + j * VW), sum[j]);
            }
        }
        for (; k + VW <= cols; k += VW) {
            sum[0] = vf_fma(vf_load_fp16(row + k), vf_load(x + k), sum[0]);
        }
        float total = vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
        for (; k < cols; k++) {
            total += fp16_to_float(row[k]) * x[k];
        }
        y[r] = total;
    }
}

/* One column of a tile row: its values and its bitmap. */
typedef struct {
    const fp16 *values;
    const uint64_t *bitmap;
    uint32_t nnz;
} Column;

static inline Column get_column(const TiledCbc *w, size_t column) {
    const uint32_t info = w->col_info[column];
    return (Column){
        .values = w->values + (size_t)w->tile_offset[column / TILE_K] * COLUMN_ALIGN + col_info_first(info),
        .bitmap = w->bitmap + column * BITMAP_WORDS,
        .nnz = col_info_nnz(info),
    };
}

/* One step of the prefetch of a column, called once for each of its words of bitmap: hardware cannot guess which
 * column is the next active one. A column has at most 2 * TILE_M / 64 lines of values, two for each word. */
static inline void prefetch_column(const Column *c, size_t word) {
    const char *line = (const char *)c->values + 64 * word;
    __builtin_prefetch(line, 0, 2);
    if (c->nnz * sizeof(fp16) > 64 * (BITMAP_WORDS + word)) {
        __builtin_prefetch(line + 64 * BITMAP_WORDS, 0, 2);
    }
}

/* sum[] += x * a column, whose successor in the list of active columns (some steps on) is asked for meanwhile. */
static inline void add_column(vf sum[TILE_VECTORS], const Column *c, float x, const Column *ahead) {
    const fp16 *p = c->values;
    const vf xv = vf_set(x);
    for (size_t i = 0; i < BITMAP_WORDS; i++) {
        uint64_t bits = c->bitmap[i];
        prefetch_column(ahead, i);
        for (size_t j = 0; j < WORD_VECTORS; j++) {
            vf *s = &sum[i * WORD_VECTORS + j];
            *s = vf_fma(expand_fp16(p, bits), xv, *s);
            p += __builtin_popcountll(bits & LANE_MASK);
            bits >>= VW;
        }
    }
}

/* The sums of a whole tile row stay in registers where there are 32 wide ones, else in L1: walking the columns once for
 * each part of the rows that fits in registers costs more. */
static size_t cbc_columns(float *y, const TiledCbc *w, size_t tile_row, const uint32_t *active, size_t n_active,
                          const float *x) {
    const size_t row_start = tile_row * tiled_cbc_cols_padded(w->cols);
    vf sum[TILE_VECTORS];
    for (size_t i = 0; i < TILE_VECTORS; i++) {
        sum[i] = vf_zero();
    }
    size_t nnz = 0;
    for (size_t i = 0; i < n_active; i++) {
        const Column c = get_column(w, row_start + active[i]);
        const Column ahead = get_column(w, row_start + active[min_size(i + PREFETCH_AHEAD, n_active - 1)]);
        __builtin_prefetch(ahead.bitmap, 0, 3);
        add_column(sum, &c, x[active[i]], &ahead);
        nnz += c.nnz;
    }
    for (size_t i = 0; i < TILE_VECTORS; i++) {
        vf_store(y + i * VW, sum[i]);
    }
    return nnz;
}

static inline float *panel_at(float *panel, size_t row, size_t col) {
    return panel + (row / GROUP_ROWS * PANEL_COLS + col) * GROUP_ROWS + row % GROUP_ROWS;
}

static void unpack_cbc(float *panel, const TiledCbc *w, size_t tile_row, size_t col, size_t n_cols) {
    const size_t row_start = tile_row * tiled_cbc_cols_padded(w->cols);
    for (size_t c = 0; c < n_cols; c++) {
        const Column column = get_column(w, row_start + col + c);
        const fp16 *p = column.values;
        for (size_t row = 0; row < TILE_M; row += VW) {
            const uint64_t bits = column.bitmap[row / 64] >> (row % 64) & LANE_MASK;
            vf_store(panel_at(panel, row, c), expand_fp16(p, bits));
            p += __builtin_popcountll(bits);
        }
    }
}

static void unpack_dense(float *panel, const fp16 *w, size_t stride, size_t n_rows, size_t n_cols) {
    float rows[GROUP_ROWS][PANEL_COLS];  // a group before it is turned around
    for (size_t group = 0; group < TILE_M; group += GROUP_ROWS) {
        for (size_t r = 0; r < GROUP_ROWS; r++) {
            if (group + r < n_rows) {
                to_float(rows[r], w + (group + r) * stride, n_cols);
            } else {
                memset(rows[r], 0, sizeof rows[r]);
            }
        }
        for (size_t c = 0; c < n_cols; c++) {
            float *out = panel_at(panel, group, c);
            for (size_t r = 0; r < GROUP_ROWS; r++) {
                out[r] = rows[r][c];
            }
        }
    }
}

static void panel_product(float *y, const float *panel, size_t n_cols, const float *x, size_t n_groups) {
    for (size_t row = 0; row < TILE_M; row += GROUP_ROWS) {
        const float *group = panel + row * PANEL_COLS;
        for (size_t g = 0; g < n_groups; g++) {
            float *out = y + g * GROUP_TOKENS * TILE_M + row;
            const float *xg = x + g * PANEL_COLS * GROUP_TOKENS;
            vf sum[GROUP_TOKENS][2];
            for (size_t t = 0; t < GROUP_TOKENS; t++) {
                sum[t][0] = vf_load(out + t * TILE_M);
                sum[t][1] = vf_load(out + t * TILE_M + VW);
            }
            for (size_t c = 0; c < n_cols; c++) {
                const vf w0 = vf_load(group + c * GROUP_ROWS), w1 = vf_load(group + c * GROUP_ROWS + VW);
                for (size_t t = 0; t < GROUP_TOKENS; t++) {
                    const vf xv = vf_set(xg[c * GROUP_TOKENS + t]);
                    sum[t][0] = vf_fma(w0, xv, sum[t][0]);
                    sum[t][1] = vf_fma(w1, xv, sum[t][1]);
                }
            }
            for (size_t t = 0; t < GROUP_TOKENS; t++) {
                vf_store(out + t * TILE_M, sum[t][0]);
                vf_store(out + t * TILE_M + VW, sum[t][1]);
            }
        }
    }
}

const CpuKernels CPU_KERNELS = {
    .name = CPU_KERNELS_NAME,
    .group_rows = GROUP_ROWS,
    .group_tokens = GROUP_TOKENS,
    .to_float = to_float,
    .to_fp16 = to_fp16,
    .dot = dot,
    .add_scaled = add_scaled,
    .scale = scale,
    .exp_all = exp_all,
    .swiglu = swiglu,
    .dense_rows = dense_rows,
    .cbc_columns = cbc_columns,
    .unpack_cbc = unpack_cbc,
    .unpack_dense = unpack_dense,
    .panel_product = panel_product,
};
