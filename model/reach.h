/* reach.h: what dynamic thresholds leave of a model's products when many tokens are computed at once. (Backends
 * count by themselves in single decode steps only.) */
#ifndef SPDP_REACH_H
#define SPDP_REACH_H

#include "model.h"

/* Counts every chunk of tokens that is computed while model.hook points to hook. */
typedef struct {
    InputHook hook;
    ProductStats *products;  // (n_layers, N_DP_SITES) of matrices that can skip columns; bytes are not counted
    const Model *model;
    float *thresholds;       // (n_layers, N_DP_SITES), the model's when reach_init was called; may be changed
    uint32_t **column_nnz;   // (n_layers * N_DP_SITES) nonzeros of every column; NULL where none can be skipped
    fp16 *inputs;            // (chunk, widest input) brought from the backend
} Reach;

/* Returns 0 or ERR_MEMORY. r must stay where it is until reach_free. */
int reach_init(Reach *r, const Model *m, Error *err);
void reach_free(Reach *r);

/* What was counted at each site, over all layers. */
void reach_sites(const Reach *r, ProductStats sites[N_DP_SITES]);

/* How far static and dynamic pruning take the same weights: the share of elements that are zeros in inactive columns.
 * Were the two independent, it would be sp * dp. */
typedef struct {
    double reached, independent;  // mean over matrices, weighted by elements; NAN where there was nothing to skip
    double worst;                 // reached - independent of the matrix where the two differ most
    int worst_layer;
    Site worst_site;
} Overlap;

Overlap reach_overlap(const Reach *r);

/* Sum over sites, or over matrices. */
ProductStats stats_sum(const ProductStats *stats, size_t n);

/* Shares that were skipped: of elements in inactive columns, and of all that is not a nonzero in an active column. NAN
 * where there was nothing to skip. */
double stats_dp(const ProductStats *s);
double stats_total(const ProductStats *s);

#endif
