/* perplexity.h: how well a model predicts a text. */
#ifndef SPDP_PERPLEXITY_H
#define SPDP_PERPLEXITY_H

#include "reach.h"

/* -log softmax(logits)[target] of one row of logits (n), nats, sums in double; NAN if a logit is not finite. */
double negative_log_likelihood(const float *logits, size_t n, int target);

/* Window j feeds ids[jS .. jS + W - 1] into an empty cache; position i of a window predicts the id that
 * follows. A prediction is scored if i >= prefix and no earlier window scored it; a last, shorter window
 * is scored too. No id is inserted. Positions before the prefix are prefilled; from there on the model's dynamic thresholds
 * act on every position, as they do when it is decoded token by token. */
typedef struct {
    int window;  // W; 0 = the model's seq_len
    int stride;  // S; 0 = W
    int prefix;  // P, predictions at the start of each window that are not scored
    size_t max_tokens;  // use only the first ids; 0 = all
} PerplexityParams;

typedef struct {
    PerplexityParams protocol;  // with defaults filled in
    size_t n_windows, n_scored;
    double nll;         // mean negative log-likelihood, nats a token
    double nll_stderr;  // sample standard deviation / sqrt(n_scored); NAN for one token
    double perplexity;  // exp(nll)
    ProductStats sites[N_DP_SITES];  // what the thresholds left to do, over all positions from the prefix on; no bytes
    Overlap overlap;                 // of static and dynamic pruning, over the same positions
    double ms;
} PerplexityResult;

/* The model must be loaded with all_logits and seq_len >= W.
 * progress (may be NULL) is called after every window.
 * Returns 0, ERR_USAGE (sizes that do not fit, too few ids) or ERR_NUMBER. */
int perplexity(PerplexityResult *result, Model *m, const int *ids, size_t n, const PerplexityParams *params,
               void (*progress)(void *user, size_t done, size_t total, double nll), void *user, Error *err);

#endif
