/* timing.h: the figures of one run from the moments its tokens came. */
#ifndef SPDP_TIMING_H
#define SPDP_TIMING_H

#include <stddef.h>

/* NAN = not available: fewer than two tokens have no time per output token. */
typedef struct {
    size_t prefill_tokens, decode_tokens;  // prompt ids; tokens generated, an end-of-sequence token included
    double ttft_ms;                        // from start to the first token
    double prefill_tok_s;                  // prompt ids / TTFT
    double tpot_ms;                        // (last - first) / (n - 1)
    double tpot_median_ms, tpot_p99_ms;    // of the n - 1 single steps
    double decode_tok_s;                   // 1000 / tpot_ms
    double total_ms;                       // from start to the last token
} Timing;

/* token_ms (n): when each token was known, ms after the start of prefill, ascending; it is overwritten.
 * prefill_ms: when prefill was done; used as TTFT where n = 0. */
Timing timing_of(double *token_ms, size_t n, size_t prompt_tokens, double prefill_ms);

#endif
