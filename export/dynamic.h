/* dynamic.h: calibrate dynamic pruning (TEAL: Liu et al., 2025): the quantiles of |x| at every layer's inputs, from
 * which run takes its thresholds. */
#ifndef SPDP_DYNAMIC_H
#define SPDP_DYNAMIC_H

#include "../model/thresholds.h"
#include "calib_text.h"
#include "writer.h"

#define LONG_SECONDS 60  // calibration that takes longer is announced

/* Measure a model's quantiles: without dynamic pruning, then with each of three ratios in force at all sites that can
 * skip columns, since thinned sites change what those behind them see. Each is measured on as many sequences as it
 * needs, taken from all over the text. The first token of a sequence counts for nothing and is never thinned: a BOS
 * is always prefilled, and its activations are like no other's.
 *   section  the bytes of SECTION_QUANTILES, *bytes long; quantiles_view() reads them. Released with free().
 *   be       any backend; its stats are overwritten. CUDA keeps its copy of the weights until it is freed
 *   default_dp  ratio to store as the file's default, 0 .. FILE_MAX_DP
 * Returns 0, ERR_NUMBER (names layer and site), ERR_MEMORY, ERR_USAGE (sequences longer than the context) or
 * ERR_STOPPED. */
int calibrate_dynamic(FileQuantiles **section, size_t *bytes, const Checkpoint *ck, Backend *be, const CalibText *text,
                      double default_dp, bool quiet, Error *err);

/* How many tokens that takes through the model. */
size_t dynamic_tokens(const CalibText *text);

/* Calibrate the model that has been written to w, which must be complete, and append the quantiles. To be called just
 * before writer_finish; w is not released, whatever is returned: on failure the caller aborts it. Returns what
 * calibrate_dynamic and the writer return. */
int dynamic_add(Writer *w, Backend *be, const CalibText *text, double default_dp, bool quiet, Error *err);

#endif
