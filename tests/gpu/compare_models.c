/* compare_models: do two conversions of one model agree? Calibration on another device rounds differently, so
 * a few weights near a row's cut may go the other way, and thresholds move in their last places.
 *
 *   compare_models A.bin B.bin
 *
 * Prints the share of weights that are kept in one file and dropped in the other, and how far the quantiles that
 * thresholds come from are apart (those above the largest dynamic ratio are single outliers). Ends with status 1 when a limit below is exceeded, 2 when the files are not of one
 * model. */
#include <math.h>
#include <string.h>

#include "../../model/checkpoint.h"

static const double MASK_LIMIT = 1e-3;  // share of weights whose fate differs
static const double QUANTILE_LIMIT =
    2e-2;  // |a - b| relative to the larger, or to the table's middle where that is more

typedef struct {
    double worst;
    size_t worst_table, worst_row, worst_quantile;
    size_t pruned, differ, quantiles;
} Comparison;

static void fail(const char *what) {
    fprintf(stderr, "compare_models: %s\n", what);
    exit(2);
}

/* The matrix as rows * cols values; release with free(). */
static fp16 *decoded(const Checkpoint *ck, const FileSection *s) {
    const Matrix m = checkpoint_matrix(ck, s);
    fp16 *w = memory_alloc(m.rows * m.cols * sizeof *w);
    if (!w) {
        fail("no memory for a matrix");
    }
    if (m.format == FORMAT_TILED_CBC) {
        tiled_cbc_decode(w, m.cols, &m.cbc);
        return w;
    }
    for (size_t r = 0; r < m.rows; r++) {
        memcpy(w + r * m.cols, m.dense + r * m.stride, m.cols * sizeof *w);
    }
    return w;
}

static void compare_masks(Comparison *c, const Checkpoint *a, const FileSection *of_a, const Checkpoint *b,
                          const FileSection *of_b) {
    fp16 *x = decoded(a, of_a), *y = decoded(b, of_b);
    for (uint64_t i = 0; i < of_a->rows * of_a->cols; i++) {
        const bool in_x = !fp16_is_zero(x[i]), in_y = !fp16_is_zero(y[i]);
        c->differ += in_x != in_y;
        if (in_x && in_y && x[i] != y[i]) {
            fail("a weight that both keep has two values");
        }
    }
    c->pruned += of_a->rows * of_a->cols;
    free(x);
    free(y);
}

static void compare_quantiles(Comparison *c, const FileQuantiles *a, const FileQuantiles *b) {
    if (memcmp(a, b, sizeof *a) != 0) {
        fail("the tables of quantiles have different sizes or ratios");
    }
    const float *x = (const float *)(a + 1), *y = (const float *)(b + 1);
    const size_t n = a->n_quantiles, tables = (size_t)a->n_tables * a->n_layers * a->n_sites;
    for (size_t i = 0; i < tables * n; i++) {
        const double middle = (double)x[i / n * n + n / 2];
        const double scale = fmax(middle, fmax((double)x[i], (double)y[i]));
        const double apart = scale > 0 ? fabs((double)x[i] - (double)y[i]) / scale : 0;
        if ((double)(i % n) <= FILE_MAX_DP * (double)(n - 1) && apart > c->worst) {
            const size_t rows = (size_t)a->n_layers * a->n_sites;
            c->worst = apart;
            c->worst_table = i / n / rows;
            c->worst_row = i / n % rows;
            c->worst_quantile = i % n;
        }
    }
    c->quantiles += tables * n;
}

static void compare(Comparison *c, const Checkpoint *a, const Checkpoint *b) {
    if (a->n_sections != b->n_sections) {
        fail("the files have different numbers of sections");
    }
    for (size_t i = 0; i < a->n_sections; i++) {
        const FileSection *s = &a->sections[i], *t = checkpoint_find(b, s->kind, s->layer);
        const bool same_size =
            t && s->rows == t->rows && (s->cols == t->cols || s->kind == SECTION_PROVENANCE);
        if (!same_size || s->flags != t->flags) {
            fail("a section of one file is missing in the other, or has another size");
        }
        if (s->flags & SECTION_PRUNED) {
            compare_masks(c, a, s, b, t);
        } else if (s->kind == SECTION_QUANTILES) {
            compare_quantiles(c, checkpoint_bytes(a, s), checkpoint_bytes(b, t));
        }
    }
}

int main(int argc, char **argv) {
    Checkpoint a, b;
    Error err;
    if (argc != 3) {
        fail("usage: compare_models A.bin B.bin");
    }
    if (checkpoint_open(&a, argv[1], &err) || checkpoint_open(&b, argv[2], &err)) {
        fail(err.text);
    }
    Comparison c = {0};
    compare(&c, &a, &b);
    if (c.pruned == 0 || c.quantiles == 0) {
        fail("there is nothing to compare: no pruned matrix, or no quantiles");
    }
    const double share = (double)c.differ / (double)c.pruned;
    printf(
        "masks differ in %zu of %zu weights (%.4f %%, limit %.4f %%); quantiles are up to %.4f %% apart "
        "(limit %.4f %%; table %zu, layer %zu, site %zu, quantile %zu)\n",
        c.differ, c.pruned, 100 * share, 100 * MASK_LIMIT, 100 * c.worst, 100 * QUANTILE_LIMIT,
        c.worst_table, c.worst_row / FILE_DP_SITES, c.worst_row % FILE_DP_SITES, c.worst_quantile);
    checkpoint_close(&a);
    checkpoint_close(&b);
    return !(share <= MASK_LIMIT && c.worst <= QUANTILE_LIMIT);
}
