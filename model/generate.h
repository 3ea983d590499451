/* generate.h: prefill a prompt, then decode token by token. */
#ifndef SPDP_GENERATE_H
#define SPDP_GENERATE_H

#include "model.h"
#include "timing.h"

typedef enum { STOP_LENGTH, STOP_EOS, STOP_STRING, STOP_CONTEXT, STOP_INTERRUPT } StopReason;
const char *stop_reason_name(StopReason reason);  // "length", "eos", "stop", "context", "interrupt"

/* Receives every token that is text (no end-of-sequence). Returns true to stop: a stop string was met. */
typedef struct {
    bool (*token)(void *user, int id);
    void *user;
    double write_ms;  // the sink adds what it spent writing to a terminal or pipe; kept out of the times
} TokenSink;

typedef struct {
    int n_new;        // most new tokens; 0 = prefill only, -1 = until the context is full
    bool ignore_eos;  // decode on past end-of-sequence ids
    int pos;          // where the prompt begins: the cache holds positions 0 .. pos - 1
    const volatile sig_atomic_t *interrupt;  // nonzero: no more tokens, nor the rest of the prompt; NULL: none
    SampleParams sample;
} GenerateParams;

typedef struct {
    Timing timing;
    StopReason stop;
    int cached;                // positions that the cache holds now; of the new ids the last may be missing, and
                               // the prompt where it was interrupted
    ProductStats sites[N_SITES], products;  // what decode steps had to touch, by site and in all
    double bytes_per_token;    // weights, norms, head and KV read by a decode step, mean
    uint64_t logits_hash;      // XXH3 of the last logits: equal figures are computed alike to the last bit;
                               // 0 where an interrupted prompt has none
    double joules_per_token;   // of the device in decode, mean; NAN where it is not measured
} GenerateResult;

/* Generate after prompt (n_prompt >= 1 ids within the vocabulary), which follows the params->pos ids that the
 * cache holds. The prompt is prefilled; the model's dynamic thresholds act on every token after it.
 * Returns 0, ERR_USAGE (prompt longer than the context, named with both numbers), ERR_NUMBER or
 * ERR_MEMORY. */
int generate(GenerateResult *result, Model *m, const int *prompt, int n_prompt, const GenerateParams *params,
             TokenSink *sink, Error *err);

#endif
