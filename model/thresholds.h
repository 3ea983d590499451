/* thresholds.h: from a dynamic ratio to a threshold for each layer and site, by the quantiles in a model file. */
#ifndef SPDP_THRESHOLDS_H
#define SPDP_THRESHOLDS_H

#include "cli.h"
#include "model.h"

/* The quantiles of a file, read where they lie (export/FORMAT.md). */
typedef struct {
    const FileQuantiles *info;
    const float *values;  // (n_tables, n_layers, N_DP_SITES, n_quantiles)
} Quantiles;

/* The view of a section's bytes, which the reader has checked. */
Quantiles quantiles_view(const void *section);

/* The value that a share p (0 .. 1) of |x| does not exceed, between two quantiles in proportion. */
float quantile(const Quantiles *q, uint32_t table, int layer, Site site, double p);

/* Threshold for a ratio in 0 .. FILE_MAX_DP when all other sites are thinned by the same: between the tables measured
 * below and above it in proportion. 0 gives exactly 0. */
float quantile_threshold(const Quantiles *q, int layer, Site site, double ratio);

/* What was asked, and what it comes to. */
typedef struct {
    Ratios ratios;        // as asked, the file's default where nothing was
    double asked;         // the two in one: mean over the elements of the matrices that can skip columns
    int n_tiled[N_DP_SITES];  // layers whose matrix can skip columns; at others the threshold stays 0
    float *values;        // (n_layers, N_DP_SITES) for model_set_thresholds
} Thresholds;

/* Thresholds by these quantiles (NULL: all are 0). Returns 0 or ERR_MEMORY. Release with thresholds_free. */
int thresholds_from(Thresholds *t, const Checkpoint *ck, const Quantiles *q, const Ratios *ratios, Error *err);

/* Thresholds for a file, as a command line asks for them.
 *   ratios   NULL, or a NAN in it: the file's default ratio (0 if it has no quantiles)
 *   by_site  were ratios named by site? Then a ratio above 0 for a site that no layer stores as Tiled-CBC is an error;
 *            a ratio for all leaves such sites alone.
 * Returns 0, ERR_USAGE (a ratio above 0 for a file without quantiles, and how to get some; a dense site) or
 * ERR_MEMORY. Release with thresholds_free. */
int thresholds_choose(Thresholds *t, const Checkpoint *ck, const Ratios *ratios, bool by_site, Error *err);
void thresholds_free(Thresholds *t);

static inline bool site_is_attention(Site site) { return site == SITE_ATTN_IN || site == SITE_ATTN_OUT; }

/* The ratio that was asked for a site. */
static inline double thresholds_asked(const Thresholds *t, Site site) {
    return site_is_attention(site) ? t->ratios.attn : t->ratios.mlp;
}

#endif
