/* model.h: a Llama-2 model on a backend, and its forward pass. */
#ifndef SPDP_MODEL_H
#define SPDP_MODEL_H

#include <signal.h>

#include "../kernels/backend.h"
#include "checkpoint.h"
#include "cli.h"
#include "plan.h"

typedef struct {
    const fp16 *attn_norm;  // (dim)
    Matrix qkv;             // (q_dim + 2 kv_dim, dim)
    Matrix o;               // (dim, q_dim)
    const fp16 *mlp_norm;   // (dim)
    Matrix gate_up;         // (2 hidden_dim, dim), rows interleaved
    Matrix down;            // (dim, hidden_dim)
} LayerWeights;

typedef struct {
    Matrix embedding;        // (vocab_size, dim)
    Matrix head;             // (vocab_size, dim); the embedding where tied
    const fp16 *final_norm;  // (dim)
    const float *rope;       // (seq_len, head_dim) cos and sin of each pair's angle at each position
    LayerWeights *layers;    // n_layers
} Weights;

/* Sites with a dynamic threshold: the four of a layer. */
#define N_DP_SITES 4

/* Called with the input of every product of a layer, (n, width) fp16 in backend memory; for calibration. */
typedef struct {
    void (*input)(void *user, int layer, Site site, const fp16 *x, int n, int width);
    void *user;
} InputHook;

/* Buffers in backend memory; B = the chunk of tokens computed at once. */
typedef struct {
    int *ids;        // (B) tokens of the chunk
    int *pos;        // (1) position of the first of them
    float *x;        // (B, dim) residual stream
    fp16 *x_norm;    // (B, dim) input of a product
    float *qkv;      // (B, q_dim + 2 kv_dim)
    fp16 *q;         // (B, q_dim)
    fp16 *attn;      // (B, q_dim)
    fp16 *hidden;    // (B, hidden_dim)
    float *logits;   // (logit_rows, vocab_size)
    fp16 *k_cache;   // (n_layers, n_kv_heads, seq_len, head_dim)
    fp16 *v_cache;   // the same
    float *thresholds;  // (n_layers, N_DP_SITES) dynamic thresholds; zeros skip nothing but zeros
} RunState;

typedef struct {
    Config config;
    Backend *be;     // not owned
    Weights weights;
    RunState state;
    float *host_rope;  // what weights.rope was uploaded from
    int seq_len;     // positions in the KV cache
    int chunk;       // B
    int logit_rows;  // rows of state.logits
    size_t weight_bytes, kv_bytes, scratch_bytes;
    const InputHook *hook;  // not owned; NULL: none
    const volatile sig_atomic_t *interrupt;  // not owned; nonzero ends a prefill between two layers; NULL: none
} Model;

/* Dynamic pruning acts in decode only. */
typedef enum { PREFILL, DECODE } Phase;

/* The state alone: weights, but for the table of rotations, are the caller's business (calibration runs one layer at a
 * time). config, arguments, result as for model_load. */
int model_open(Model *m, const Config *config, Backend *be, int seq_len, bool all_logits, Error *err);

/* How the weights that a checkpoint lists come to a backend. */
typedef struct {
    /* Put the matrix or vector of a section into the backend's memory. false: no room. */
    bool (*place)(void *user, Matrix *m, Backend *be, const Checkpoint *ck, const FileSection *s);
    void *user;
    bool made;           // not read where they lie: they take memory on every backend
    Progress *progress;  // in MB; NULL: none
} WeightSource;

/* The weights in the checkpoint's own bytes. */
WeightSource weights_of_file(Progress *progress);

/* What model_load_from will need. *plan is filled in unless seq_len is wrong; arguments and result as there. */
int model_plan(MemoryPlan *plan, const Checkpoint *ck, Backend *be, int seq_len, bool all_logits,
               const WeightSource *source, Error *err);

/* Put a checkpoint's weights on a backend and allocate the state.
 *   ck       stays open while the model lives
 *   seq_len  length of the KV cache; 0 = min(config.seq_len, 4096)
 *   all_logits  keep logits of every token of a chunk (perplexity), not only of the last
 * Returns 0, ERR_USAGE (seq_len over the model's) or ERR_MEMORY (says which context would fit, and has allocated
 * nothing if that could be foreseen). */
int model_load_from(Model *m, const Checkpoint *ck, Backend *be, int seq_len, bool all_logits,
                    const WeightSource *source, Error *err);

/* The same with weights_of_file(NULL). */
int model_load(Model *m, const Checkpoint *ck, Backend *be, int seq_len, bool all_logits, Error *err);
void model_free(Model *m);

/* Set the dynamic thresholds of decode: values (n_layers, N_DP_SITES) in host memory. All are 0 after loading. */
void model_set_thresholds(Model *m, const float *values);

/* One layer on n tokens whose residual stream is state.x; appends to the layer's cache at the position in state.pos.
 *   w, layer   the layer's weights, which need not be m->weights.layers[layer]; layer names cache and thresholds */
void model_layer(Model *m, const LayerWeights *w, int layer, int n, Phase phase);

/* Compute tokens ids[0 .. n-1] at positions pos .. pos + n - 1; the cache must hold 0 .. pos - 1.
 * At most m->chunk tokens. DECODE applies the dynamic thresholds to each of them, as decoding them one by one would.
 * Afterwards state.logits holds the last token's logits in row 0 (all n rows if loaded with all_logits).
 * Does not wait; a number that is not finite is reported by backend finish(). */
void model_forward(Model *m, const int *ids, int n, int pos, Phase phase);

/* Let a backend that records decode steps record one now, so that no token has to wait for it. Writes to the cache's
 * position 0. */
void model_rehearse(Model *m);

/* Prefill any number of tokens in chunks. Logits of the last token are left in row 0 (of the last chunk's tokens, if
 * loaded with all_logits). When *m->interrupt says so it stops on the way: neither the cache beyond pos nor the logits
 * are then of use.
 * Returns 0 or ERR_NUMBER. */
int model_prefill(Model *m, const int *ids, int n, int pos, Error *err);

/* Bytes that one decode step at position pos has to read apart from layers' products: head, norms,
 * embedding row and KV cache. Products count themselves (Backend.stats). */
size_t model_step_bytes(const Model *m, int pos);

#endif
