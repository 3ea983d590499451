/* score.h: log-probabilities of single tokens: the most probable ones while text is generated, and those of a
 * given continuation of a given context. All are of the model's own distribution: no temperature, top-k or
 * top-p. */
#ifndef SPDP_SCORE_H
#define SPDP_SCORE_H

#include <cjson/cJSON.h>

#include "input.h"
#include "model.h"

/* ---- while generating ---- */

#define MAX_LOGPROBS 20

typedef struct {
    int id;
    double logprob;  // nats
} TokenLogprob;

/* The min(k, n) most probable tokens of one row of logits (n), best first, equal ones by id.
 * Returns how many; 0 if a logit is not finite. */
int top_logprobs(TokenLogprob top[MAX_LOGPROBS], int k, const float *logits, int n);

/* One generated token, and what could have stood in its place. */
typedef struct {
    TokenLogprob chosen;
    TokenLogprob top[MAX_LOGPROBS];
    int n_top;
} LogprobEntry;

/* The entries of a generation, in order. Zero-initialise but for k; released with logprobs_free. */
typedef struct {
    int k;  // tokens of an entry, 1 .. MAX_LOGPROBS
    size_t n, capacity;
    LogprobEntry *entries;
    float *logits;  // (vocab_size) brought from the backend
} Logprobs;

/* Add the token that was just sampled, while the model's state still holds the logits that it was sampled
 * from. Returns 0, ERR_MEMORY or ERR_NUMBER. */
int logprobs_add(Logprobs *l, const Model *m, int id, Error *err);
void logprobs_free(Logprobs *l);

/* ---- of given continuations ---- */

/* A context and what follows it, as one piece of text or as ids. Released with score_item_free. */
typedef struct {
    Bytes text;  // the context, then the continuation
    size_t
        context_bytes;  // of text, without the white space at the context's end: that counts as continuation
    size_t continuation_bytes;  // as given
    Ids ids;                    // instead of text: of the context, then of the continuation
    size_t n_context;           // of ids
} ScoreItem;

/* The item that a JSON object stands for: "context" and "continuation", strings or, if ids is true, arrays of
 * ids below vocab. Other keys are ignored. Returns 0, ERR_FORMAT (names the key and the reason) or
 * ERR_MEMORY. */
int score_item_read(ScoreItem *item, const cJSON *object, bool ids, int vocab, Error *err);
void score_item_free(ScoreItem *item);

typedef struct {
    double logprob;   // of the whole continuation, nats
    size_t n_tokens;  // of it
    bool greedy;      // is every one of them the most probable at its place?
    bool cut;         // did the context lose its beginning?
} Score;

/* Log-probability of ids[n_context .. n-1] after the ids before. Where all but the last id do not fit in the
 * model's context, the first ones are left out. The context is prefilled but for its last id; from there on
 * every position predicts an id of the continuation, and the model's dynamic thresholds act on it as in
 * decode (a dense prefix of n_context - 1 in the terms of perplexity.h). The model must be loaded with
 * all_logits. Returns 0, ERR_USAGE (no context, no continuation, or one that does not fit), ERR_NUMBER or
 * ERR_MEMORY. */
int score_continuation(Score *score, Model *m, const int *ids, size_t n, size_t n_context, Error *err);

#endif
