/* sampling.h: from logits to a token. Draws come from Philox4x32-10 as cuRAND defines it, keyed by seed
 * and step, so that a seed gives the same draws on every backend. */
#ifndef SPDP_SAMPLING_H
#define SPDP_SAMPLING_H

#include "util.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Philox4x32-10 (Salmon et al., SC 2011): out = 4 words for one 128-bit counter and 64-bit key. */
void philox4x32_10(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);

/* The draw of one step: what curand_init(seed, subsequence = step, offset = 0) gives as its first word x,
 * as u = x * 2^-32 + 2^-33, in (0, 1]. */
float philox_uniform(uint64_t seed, uint64_t step);

typedef struct {
    float temperature;  // 0 = greedy
    float top_p;        // in (0, 1]; 1 = off
    int top_k;          // 0 = off
    uint64_t seed;
} SampleParams;

/* Choose a token.
 *   logits     (n) fp32, finite; not changed
 *   step       number of the draw within this seed
 *   workspace  sample_workspace(n) bytes
 * Greedy takes the largest logit. Otherwise: divide by the temperature, keep the top_k largest, softmax,
 * keep the fewest most probable whose sum reaches top_p, then invert the distribution function over what
 * is kept in order of id. Equal logits: the lower id counts as larger. Sums in double. */
int sample_token(const float *logits, int n, const SampleParams *params, uint64_t step, void *workspace);

size_t sample_workspace(int n);

#ifdef __cplusplus
}
#endif
#endif
