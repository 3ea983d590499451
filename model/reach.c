#include "reach.h"

#include <math.h>

/* The matrix of a layer that a site feeds. */
static const Matrix *site_matrix(const Model *m, int layer, Site site) {
    const LayerWeights *w = &m->weights.layers[layer];
    const Matrix *const matrices[N_DP_SITES] = {&w->qkv, &w->o, &w->gate_up, &w->down};
    return matrices[site];
}

/* Largest magnitude, as bits, that a threshold t >= 0 skips. */
static fp16 largest_skipped(float t) {
    const fp16 h = fp16_from_float(t);
    return fp16_to_float(h) > t ? (fp16)(h - 1) : h;
}

static void count_inputs(void *user, int layer, Site site, const fp16 *x, int n, int width) {
    Reach *r = user;
    const size_t index = (size_t)layer * N_DP_SITES + site, cols = (size_t)width;
    const uint32_t *column_nnz = r->column_nnz[index];
    if (!column_nnz) {
        return;
    }
    r->model->be->read(r->model->be, r->inputs, x, (size_t)n * cols * sizeof *x);
    const fp16 skipped = largest_skipped(r->thresholds[index]);
    uint64_t active = 0, nonzeros = 0;
#pragma omp parallel for schedule(static) reduction(+ : active, nonzeros)
    for (int t = 0; t < n; t++) {
        const fp16 *row = r->inputs + (size_t)t * cols;
        for (size_t k = 0; k < cols; k++) {
            const bool passes = (row[k] & 0x7fff) > skipped;
            active += passes;
            nonzeros += passes ? column_nnz[k] : 0;
        }
    }
    const size_t rows = site_matrix(r->model, layer, site)->rows;
    ProductStats *s = &r->products[index];
    s->elements += (uint64_t)n * rows * cols;
    s->active_elements += rows * active;
    s->active_nonzeros += nonzeros;
}

/* Nonzeros of every column of a Tiled-CBC matrix in backend memory. NULL: no memory. */
static uint32_t *count_columns(Backend *be, const Matrix *w) {
    const size_t tile_rows = tiled_cbc_tile_rows(w->rows), padded = tiled_cbc_cols_padded(w->cols);
    uint32_t *info = memory_alloc(tile_rows * padded * sizeof *info), *nnz = calloc(padded, sizeof *nnz);
    if (info && nnz) {
        be->read(be, info, w->cbc.col_info, tile_rows * padded * sizeof *info);
        for (size_t i = 0; i < tile_rows * padded; i++) {
            nnz[i % padded] += info[i] & 0xffff;
        }
    } else {
        free(nnz);
        nnz = NULL;
    }
    free(info);
    return nnz;
}

static bool allocate(Reach *r) {
    const Config *c = &r->model->config;
    const size_t n = (size_t)c->n_layers * N_DP_SITES;
    const size_t widest = max_size(max_size((size_t)c->dim, (size_t)c->hidden_dim), config_q_dim(c));
    Backend *be = r->model->be;
    r->inputs = memory_alloc((size_t)r->model->chunk * widest * sizeof *r->inputs);
    r->thresholds = memory_alloc(n * sizeof *r->thresholds);
    r->column_nnz = calloc(n, sizeof *r->column_nnz);
    r->products = calloc(n, sizeof *r->products);
    if (!r->inputs || !r->thresholds || !r->column_nnz || !r->products) {
        return false;
    }
    be->read(be, r->thresholds, r->model->state.thresholds, n * sizeof *r->thresholds);
    for (size_t i = 0; i < n; i++) {
        const Matrix *w = site_matrix(r->model, (int)(i / N_DP_SITES), (Site)(i % N_DP_SITES));
        if (w->format == FORMAT_TILED_CBC && !(r->column_nnz[i] = count_columns(be, w))) {
            return false;
        }
    }
    return true;
}

int reach_init(Reach *r, const Model *m, Error *err) {
    *r = (Reach){.hook = {count_inputs, r}, .model = m};
    if (!allocate(r)) {
        reach_free(r);
        return error_set(err, ERR_MEMORY, "no memory to count what thresholds skip");
    }
    return OK;
}

void reach_free(Reach *r) {
    for (int i = 0; r->column_nnz && i < r->model->config.n_layers * N_DP_SITES; i++) {
        free(r->column_nnz[i]);
    }
    free(r->column_nnz);
    free(r->products);
    free(r->thresholds);
    free(r->inputs);
    *r = (Reach){0};
}

void reach_sites(const Reach *r, ProductStats sites[N_DP_SITES]) {
    for (int site = 0; site < N_DP_SITES; site++) {
        sites[site] = (ProductStats){0};
        for (int layer = 0; layer < r->model->config.n_layers; layer++) {
            sites[site] = stats_sum((ProductStats[]){sites[site], r->products[layer * N_DP_SITES + site]}, 2);
        }
    }
}

/* Share of a matrix that was pruned. */
static double static_share(const Reach *r, size_t index) {
    const Matrix *w = site_matrix(r->model, (int)(index / N_DP_SITES), (Site)(index % N_DP_SITES));
    uint64_t nonzeros = 0;
    for (size_t k = 0; k < w->cols; k++) {
        nonzeros += r->column_nnz[index][k];
    }
    return 1 - (double)nonzeros / ((double)w->rows * (double)w->cols);
}

Overlap reach_overlap(const Reach *r) {
    Overlap o = {0};
    double elements = 0;
    for (size_t i = 0; i < (size_t)r->model->config.n_layers * N_DP_SITES; i++) {
        const ProductStats *s = &r->products[i];
        if (s->elements == 0) {
            continue;
        }
        // What is gone by either is sp + dp less what is gone by both.
        const double sp = static_share(r, i), dp = stats_dp(s), both = sp + dp - stats_total(s);
        const double weight = (double)s->elements;
        elements += weight;
        o.reached += weight * both;
        o.independent += weight * sp * dp;
        if (fabs(both - sp * dp) >= fabs(o.worst)) {
            o.worst = both - sp * dp;
            o.worst_layer = (int)(i / N_DP_SITES);
            o.worst_site = (Site)(i % N_DP_SITES);
        }
    }
    o.reached = elements > 0 ? o.reached / elements : NAN;
    o.independent = elements > 0 ? o.independent / elements : NAN;
    return o;
}

ProductStats stats_sum(const ProductStats *stats, size_t n) {
    ProductStats sum = {0};
    for (size_t i = 0; i < n; i++) {
        sum.elements += stats[i].elements;
        sum.active_elements += stats[i].active_elements;
        sum.active_nonzeros += stats[i].active_nonzeros;
        sum.bytes += stats[i].bytes;
    }
    return sum;
}

double stats_dp(const ProductStats *s) {
    return s->elements ? 1 - (double)s->active_elements / (double)s->elements : NAN;
}

double stats_total(const ProductStats *s) {
    return s->elements ? 1 - (double)s->active_nonzeros / (double)s->elements : NAN;
}
