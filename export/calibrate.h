/* calibrate.h: run calibration text through a model, one layer at a time, and see what its products are given. */
#ifndef SPDP_CALIBRATE_H
#define SPDP_CALIBRATE_H

#include "../model/cli.h"
#include "../model/model.h"
#include "calib_text.h"

typedef enum {
    STATS_NONE,      // of a site that is not pruned
    STATS_SQUARES,   // for Wanda
    STATS_PRODUCTS,  // for SparseGPT
} StatsKind;

/* Sums over all tokens of what one site's products were given. */
typedef struct {
    StatsKind kind;
    size_t width;
    double *sums;  // SQUARES: (width) of x_i^2;  PRODUCTS: (width, width) upper triangle of x_i x_j
} InputStats;

/* The residual stream of all tokens (fp32, in memory) before some layer, first of all before layer 0. */
typedef struct Calibration Calibration;

/* text and be must outlive it. progress (NULL: none) counts tokens through a layer, n_layers times 2 * text->n of them.
 *   embedding  (vocab_size, stride); NULL: the caller fills in the stream itself
 *   n_layers   that it will go through
 *   kinds      what to sum up at each site
 * Returns 0 or ERR_MEMORY; release with calibration_free(). */
int calibration_open(Calibration **c, const Config *config, Backend *be, const CalibText *text, const fp16 *embedding,
                     size_t stride, const StatsKind kinds[N_DP_SITES], int n_layers, int n_threads, Progress *progress,
                     Error *err);
void calibration_free(Calibration *c);  // NULL is fine

/* The residual stream, (text->n, dim), in host memory: what another process needs to go on with the next layer. */
float *calibration_stream(Calibration *c, size_t *bytes);

/* Run the layer on all tokens and sum up what its sites get; the residual stream stays before it.
 *   w  dense matrices and norms in host memory
 * Returns 0, ERR_NUMBER where an input was not finite (names layer and site), or ERR_STOPPED. */
int calibration_measure(Calibration *c, const LayerWeights *w, Error *err);

/* What the last measure summed up at a site; the caller may change the sums. */
InputStats *calibration_stats(Calibration *c, Site site);

/* Run the layer on all tokens: the residual stream is now after it (partly, where a signal stopped that). */
int calibration_advance(Calibration *c, const LayerWeights *w, Error *err);

/* How long a layer's measure and advance would take, from running them on one sequence.
 *   flop_seconds  one operation of rank_update(), for the work that follows
 * Progress and residual stream stay as they are. */
int calibration_estimate(Calibration *c, const LayerWeights *w, double *layer_seconds, double *flop_seconds,
                         Error *err);

#endif
