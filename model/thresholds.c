#include "thresholds.h"

#include <math.h>

_Static_assert(N_DP_SITES == FILE_DP_SITES, "the file has quantiles for every site with a threshold");

Quantiles quantiles_view(const void *section) {
    const FileQuantiles *info = section;
    return (Quantiles){info, (const float *)(info + 1)};
}

float quantile(const Quantiles *q, uint32_t table, int layer, Site site, double p) {
    const size_t n = q->info->n_quantiles;
    const size_t row = ((size_t)table * q->info->n_layers + (size_t)layer) * N_DP_SITES + site;
    const float *values = q->values + row * n;
    const double at = p * (double)(n - 1);
    const size_t below = min_size((size_t)at, n - 2);
    return values[below] + (float)(at - (double)below) * (values[below + 1] - values[below]);
}

float quantile_threshold(const Quantiles *q, int layer, Site site, double ratio) {
    if (ratio <= 0) {
        return 0;
    }
    const float *measured_at = q->info->measured_at;
    uint32_t above = 0;  // first table measured at ratio or more
    while (above < q->info->n_tables && (double)measured_at[above] < ratio) {
        above++;
    }
    if (above == q->info->n_tables) {
        return quantile(q, above - 1, layer, site, ratio);
    }
    // The first is measured at 0, so there is one below.
    const float low = quantile(q, above - 1, layer, site, ratio), high = quantile(q, above, layer, site, ratio);
    const double from = (double)measured_at[above - 1], to = (double)measured_at[above];
    const double share = (ratio - from) / (to - from);
    return low + (float)share * (high - low);
}

static const uint32_t site_section[N_DP_SITES] = {SECTION_QKV, SECTION_O, SECTION_GATE_UP, SECTION_DOWN};

/* Which sites can skip columns, and the mean of what was asked over the elements of their matrices. */
static void look_at_sites(Thresholds *t, const Checkpoint *ck) {
    double elements = 0, skipped = 0;
    for (int site = 0; site < N_DP_SITES; site++) {
        for (int layer = 0; layer < ck->config.n_layers; layer++) {
            const FileSection *s = checkpoint_find(ck, site_section[site], layer);
            if (s->format == FORMAT_TILED_CBC) {
                const double n = (double)s->rows * (double)s->cols;
                t->n_tiled[site]++;
                elements += n;
                skipped += n * thresholds_asked(t, (Site)site);
            }
        }
    }
    const bool same = t->ratios.mlp == t->ratios.attn;
    t->asked = same ? t->ratios.mlp : elements > 0 ? skipped / elements : 0;
}

/* A site that was named must be able to skip something. */
static int check_named(const Thresholds *t, const Ratios *named, Error *err) {
    if (named->mlp > 0 && t->n_tiled[SITE_MLP_IN] + t->n_tiled[SITE_MLP_HIDDEN] == 0) {
        return error_set(err, ERR_USAGE, "--dp mlp=%g: the MLP's matrices are stored dense, which skips nothing",
                         named->mlp);
    }
    if (named->attn > 0 && t->n_tiled[SITE_ATTN_IN] + t->n_tiled[SITE_ATTN_OUT] == 0) {
        return error_set(err, ERR_USAGE,
                         "--dp attn=%g: the attention's matrices are stored dense, which skips nothing; "
                         "convert --prune all stores them as Tiled-CBC",
                         named->attn);
    }
    return OK;
}

int thresholds_from(Thresholds *t, const Checkpoint *ck, const Quantiles *q, const Ratios *ratios, Error *err) {
    const int n_layers = ck->config.n_layers;
    Thresholds chosen = {.ratios = *ratios};
    chosen.values = calloc((size_t)n_layers * N_DP_SITES, sizeof *chosen.values);
    if (!chosen.values) {
        return error_set(err, ERR_MEMORY, "no memory for the thresholds of %d layers", n_layers);
    }
    look_at_sites(&chosen, ck);
    for (int i = 0; q && i < n_layers * N_DP_SITES; i++) {
        const Site site = (Site)(i % N_DP_SITES);
        if (checkpoint_find(ck, site_section[site], i / N_DP_SITES)->format == FORMAT_TILED_CBC) {
            chosen.values[i] = quantile_threshold(q, i / N_DP_SITES, site, thresholds_asked(&chosen, site));
        }
    }
    *t = chosen;
    return OK;
}

int thresholds_choose(Thresholds *t, const Checkpoint *ck, const Ratios *ratios, bool by_site, Error *err) {
    const FileSection *s = checkpoint_find(ck, SECTION_QUANTILES, -1);
    const Quantiles q = s ? quantiles_view(checkpoint_bytes(ck, s)) : (Quantiles){0};
    const Ratios asked = ratios ? *ratios : (Ratios){NAN, NAN};
    if (!s && (asked.mlp > 0 || asked.attn > 0)) {
        return error_set(err, ERR_USAGE,
                         "--dp %s%g: the model file has no quantiles to take thresholds from; convert its source again "
                         "with calibration (convert SOURCE OUT, with a text of your own by --calib FILE)",
                         !by_site ? "" : asked.mlp > 0 ? "mlp=" : "attn=", asked.mlp > 0 ? asked.mlp : asked.attn);
    }
    const double otherwise = s ? q.info->default_dp : 0;
    const Ratios ratio = {isnan(asked.mlp) ? otherwise : asked.mlp, isnan(asked.attn) ? otherwise : asked.attn};
    int rc = thresholds_from(t, ck, s ? &q : NULL, &ratio, err);
    if (!rc && by_site && (rc = check_named(t, &asked, err))) {
        thresholds_free(t);
    }
    return rc;
}

void thresholds_free(Thresholds *t) {
    free(t->values);
    *t = (Thresholds){0};
}
