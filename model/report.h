/* report.h: what `run` says of its measurements: to people on stderr, tables on stdout, to programs as JSON. */
#ifndef SPDP_REPORT_H
#define SPDP_REPORT_H

#include <cjson/cJSON.h>

#include "bench.h"
#include "generate.h"
#include "perplexity.h"
#include "thresholds.h"

/* What was measured. */
typedef struct {
    const char *name;  // the model's
    const Checkpoint *ck;
    const Model *model;
    const Thresholds *thresholds;
    uint64_t seed;
    bool verbose;
} Measured;

void report_generation(const Measured *x, const GenerateResult *g);
void report_perplexity(const Measured *x, const PerplexityResult *p);

/* Results (n) of as many models on one text, side by side. */
void report_comparison(char *const *names, const PerplexityResult *results, int n);

/* The table of a benchmark, on stdout.
 *   ceiling  GB/s of a streaming read; NAN where it was not measured */
void print_bench(const Bench *b, double ceiling);

/* One object with every key, null where there is no figure; g or p is NULL where it does not apply.
 *   logprobs  taken over; NULL: none */
cJSON *figures_json(const Measured *x, const GenerateResult *g, const PerplexityResult *p, cJSON *logprobs);

/* An array of one object a row. */
cJSON *bench_json(const Bench *b, double ceiling);

#endif
