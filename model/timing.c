#include "timing.h"

#include <math.h>

#include "../kernels/util.h"

/* Things a second; a clock that did not move gives no rate. */
static double per_second(double n, double ms) { return ms > 0 ? 1000 * n / ms : NAN; }

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median and 99th percentile of the steps between n >= 2 tokens, whose times become those steps in order of length. */
static void step_quantiles(Timing *t, double *token_ms, size_t n) {
    const size_t n_steps = n - 1;
    double *steps = token_ms;
    for (size_t i = 0; i < n_steps; i++) {
        steps[i] = token_ms[i + 1] - token_ms[i];
    }
    qsort(steps, n_steps, sizeof *steps, compare_doubles);
    t->tpot_median_ms = (steps[(n_steps - 1) / 2] + steps[n_steps / 2]) / 2;
    // Nearest rank: the smallest step that at least 99 % of the steps do not exceed.
    t->tpot_p99_ms = steps[n_steps - 1 - n_steps / 100];
}

Timing timing_of(double *token_ms, size_t n, size_t prompt_tokens, double prefill_ms) {
    Timing t = {
        .prefill_tokens = prompt_tokens,
        .decode_tokens = n,
        .ttft_ms = n > 0 ? token_ms[0] : prefill_ms,
        .tpot_ms = NAN,
        .tpot_median_ms = NAN,
        .tpot_p99_ms = NAN,
        .decode_tok_s = NAN,
        .total_ms = n > 0 ? token_ms[n - 1] : prefill_ms,
    };
    t.prefill_tok_s = per_second((double)prompt_tokens, t.ttft_ms);
    if (n >= 2) {
        t.tpot_ms = (token_ms[n - 1] - token_ms[0]) / (double)(n - 1);
        t.decode_tok_s = per_second(1, t.tpot_ms);
        step_quantiles(&t, token_ms, n);
    }
    return t;
}
