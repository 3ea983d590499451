/* bench.h: how fast a model prefills and decodes, over lengths of the prompt and dynamic ratios. */
#ifndef SPDP_BENCH_H
#define SPDP_BENCH_H

#include "synthetic.h"
#include "thresholds.h"
#include "timing.h"

#define BENCH_REPEATS 5
#define BENCH_MAX_ROWS 16

/* What to measure: every prompt with every ratio. */
typedef struct {
    int prompts[2];  // tokens of a prompt; those that do not fit in the context with n_new more are left out
    int n_prompts;
    int n_new;     // >= 2
    Ratios dp[3];  // of which only the first counts where the model cannot skip columns
    int n_dp;
    bool dp_by_site;  // as for thresholds_choose
    uint64_t seed;    // of the prompt's ids
} BenchPlan;

/* One prompt and one ratio. Steps are those of all repeats. */
typedef struct {
    int n_prompt, n_new;
    bool tiled;                          // are there Tiled-CBC matrices in it?
    double sp;                           // static sparsity of the pruned matrices
    double dp_asked, dp_reached, total;  // as --json has them; reached: NAN where nothing can be skipped
    Timing timing;                       // TTFT: median of the repeats
    double step_min_ms, step_max_ms;
    double clock_mhz;              // backend's clock_mhz(), mean over the repeats' ends; NAN: not known
    double bytes_per_token, gb_s;  // of a decode step, mean; at the median step
    double joules_per_token;       // mean; NAN where it is not measured
} BenchRow;

typedef struct {
    BenchRow rows[BENCH_MAX_ROWS];
    int n_rows;
    const char *backend;  // its name, and what it runs on
    char device[sizeof((Backend *)0)->device];
} Bench;

/* Is there room for prompt i, and can the model follow a dynamic ratio? Rows that it cannot have are left out. */
bool bench_fits(const Model *m, const BenchPlan *plan, int i);
bool bench_skips(const Checkpoint *ck, const Synthetic *synthetic);

/* Add the rows of a model. Prompts are random ids, tokens are chosen greedily, ends of sequence are passed
 * over. For each row one generation warms up and does not count; then BENCH_REPEATS are measured.
 *   m          loaded from ck; its thresholds are lost
 *   synthetic  NULL, or what ck is of: thresholds are then measured for every prompt, for ratios up to its params.dp
 *   sp         static sparsity, for the rows
 *   progress   in generations
 * Returns 0, ERR_USAGE (no prompt fits; a ratio that the model cannot follow), ERR_NUMBER or ERR_MEMORY. */
int bench_model(Bench *b, Model *m, Checkpoint *ck, Synthetic *synthetic, double sp, const BenchPlan *plan,
                Progress *progress, Error *err);

#endif
