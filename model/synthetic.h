/* synthetic.h: models of random weights, made straight in a backend's memory, to measure speed with. */
#ifndef SPDP_SYNTHETIC_H
#define SPDP_SYNTHETIC_H

#include "input.h"
#include "model.h"

typedef struct {
    const char *shape;  // as config_parse_shape() reads it
    double sp;          // 0 .. 1: a pruned weight is removed with this probability, to 1 / 65536, each on its own
    bool prune_attn;    // q, k, v, o too, not only gate, up, down
    double dp;          // largest dynamic ratio that will be asked for
    int context;        // the model's context is at least this
    uint64_t seed;      // of the weights; every backend makes the same
} SyntheticParams;

/* A model that is not there yet. `ck` lists its matrices as a file's section table does, so that all that asks a
 * checkpoint about shapes, formats, sparsity or quantiles can ask this one; the weights have no bytes in it.
 * Pruned matrices are Tiled-CBC where that is smaller than dense, and all of them if dp > 0. */
typedef struct {
    Checkpoint ck;
    FileSection *sections;   // ck's; sizes and nonzeros are estimates until they have been made
    SyntheticParams params;
    fp16 *values, *ones;     // what weights are chosen from; a norm's weights
    const fp16 *backend_values, *backend_ones;  // the same in the backend's memory
    FileQuantiles *quantiles;
} Synthetic;

/* Returns 0, ERR_USAGE or ERR_SHAPE (the shape), or ERR_MEMORY; s is then empty. Release with synthetic_close,
 * after the backend that the weights were made on. */
int synthetic_open(Synthetic *s, const SyntheticParams *params, Error *err);
void synthetic_close(Synthetic *s);

/* To be given to model_load_from with s->ck: makes the weights matrix by matrix. */
WeightSource weights_of_synthetic(Synthetic *s, Progress *progress);

/* Measure quantiles for ratios up to params.dp where decoding will take place: on random ids after the prompt.
 * Does nothing where dp is 0. They are found in s->ck, instead
 * of those of an earlier call.
 *   m        loaded from s->ck
 *   n_decode tokens that will be decoded; < 0 = to the end of the context
 * Returns 0, ERR_USAGE (no room after the prompt), ERR_MEMORY or ERR_NUMBER. */
int synthetic_calibrate(Synthetic *s, Model *m, const Ids *prompt, int n_decode, Progress *progress, Error *err);

/* Random ids of a vocabulary; the same for the same seed, whether one by one or all at once. */
int random_id(uint64_t *seed, int vocab);
void random_ids(int *ids, size_t n, int vocab, uint64_t seed);

#endif
