/* source.h: where weights come from: a Hugging Face directory, a llama2.c .bin file, or random numbers of
 * a given shape. The converter sees one list of matrices, read a matrix at a time as fp16. */
#ifndef SPDP_SOURCE_H
#define SPDP_SOURCE_H

#include "../kernels/fp16.h"
#include "../model/config.h"

typedef enum {
    TENSOR_EMBEDDING,   // (vocab_size, dim)
    TENSOR_HEAD,        // (vocab_size, dim)
    TENSOR_FINAL_NORM,  // (1, dim)
    TENSOR_ATTN_NORM,   // (1, dim), one a layer, as all below
    TENSOR_Q,           // (q_dim, dim)
    TENSOR_K,           // (kv_dim, dim)
    TENSOR_V,           // (kv_dim, dim)
    TENSOR_O,           // (dim, q_dim)
    TENSOR_MLP_NORM,    // (1, dim)
    TENSOR_GATE,        // (hidden_dim, dim)
    TENSOR_UP,          // (hidden_dim, dim)
    TENSOR_DOWN,        // (dim, hidden_dim)
    N_TENSORS,
} Tensor;

/* Shape that config demands. */
void tensor_shape(const Config *c, Tensor tensor, size_t *rows, size_t *cols);

typedef struct Source Source;
struct Source {
    Config config;
    bool tied;             // no head of its own: the embedding serves
    const char *kind;      // "Hugging Face", "llama2.c v0", ..., for provenance
    void *tokenizer;       // sentencepiece model found beside the weights; NULL if none
    size_t tokenizer_bytes;
    const char *chat_template;  // "llama2" or "zephyr" where the source asks for it; NULL: for none or another
    size_t bytes;          // of weights in the source, for progress
    uint64_t fingerprint;  // of the seed, or by source_open() of a sample of every tensor: tells sources apart

    /* Read a whole matrix as fp16 into out: row r goes to out + r * stride, columns beyond cols are not
     * touched. Rows of q and k come with RoPE pairs adjacent (Meta's order), whatever the source keeps.
     * layer is -1 outside the layers; a tied source has no TENSOR_HEAD. Runs on n_threads threads.
     * Returns 0, or ERR_NUMBER (NaN, infinity, or too large for fp16: names tensor, row and column in the
     * source's own words) or ERR_OPEN. */
    int (*read)(Source *s, Tensor tensor, int layer, fp16 *out, size_t stride, int n_threads, Error *err);
    void (*free)(Source *s);  // releases s itself
    void *ctx;
};

/* Hugging Face directory: config.json, *.safetensors (one, or sharded with an index), tokenizer.model.
 * All that this runtime does not implement is refused by name before any tensor is read, and every tensor
 * that the shape needs is present with the right shape and dtype F16, BF16 or F32 when this returns 0.
 * tokenizer.model is read if it is there, and the chat template in tokenizer_config.json; their absence is not an
 * error here. */
int source_open_hf(Source **s, const char *dir, Error *err);

/* llama2.c checkpoint, legacy (v0) or version 1; v2 (int8) is refused. */
int source_open_llama2c(Source **s, const char *path, Error *err);

/* Random weights N(0, 0.02), norms 1. shape: tinyllama-1.1b, llama2-7b, llama2-13b, llama2-70b or
 * dim:hidden:layers:heads:kv:vocab:context. The same seed gives the same weights, whatever n_threads. */
int source_open_synthetic(Source **s, const char *shape, uint64_t seed, Error *err);

/* The first or second by what path is. */
int source_open(Source **s, const char *path, Error *err);

#endif
