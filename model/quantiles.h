/* quantiles.h: measure how the inputs of a model's products spread (TEAL: Liu et al., 2025): the quantiles of |x|
 * at every layer's sites, from which thresholds.h takes thresholds. */
#ifndef SPDP_QUANTILES_H
#define SPDP_QUANTILES_H

#include "thresholds.h"

/* What to measure on, and how. Sequence i is ids[i * length ..]; all are length long but perhaps the last. */
typedef struct {
    const int *ids;
    size_t n, length;  // tokens in all, of a sequence
    size_t prefix;     // >= 1 tokens at the start of each that are prefilled, count for nothing, are never thinned
    float measured_at[FILE_MAX_TABLES];  // dynamic ratio in force while a table is measured: from 0, ascending
    size_t n_tables;
    size_t table_tokens;   // that the table without dynamic pruning takes, from all over the text
    size_t settle_tokens;  // the same for a first round under a ratio,
    size_t dp_tokens;      // and for the last, which is the table
    int (*check)(Error *err);  // called between chunks: ends it all unless 0; NULL: nothing does
    void (*estimate)(size_t tokens, double seconds);  // told at the start how long it will take; NULL: nobody asks
    Progress *progress;        // in tokens
} QuantilePlan;

/* Measure a model's quantiles: without dynamic pruning, then with ratios in force at all sites that can skip
 * columns, since thinned sites change what those behind them see.
 *   section  the bytes of SECTION_QUANTILES, *bytes long; quantiles_view() reads them. Released with free().
 *            The default ratio in it is 0
 *   m        loaded from ck, at least plan->length positions; its thresholds and its backend's stats are lost
 * Returns 0, ERR_NUMBER (names layer and site), ERR_MEMORY or what plan->check does. */
int quantiles_measure(FileQuantiles **section, size_t *bytes, Model *m, const Checkpoint *ck,
                      const QuantilePlan *plan, Error *err);

/* How many tokens that takes through the model. */
size_t quantiles_tokens(const QuantilePlan *plan);

#endif
