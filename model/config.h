/* config.h: everything about a model's shape and arithmetic that is a number. */
#ifndef SPDP_CONFIG_H
#define SPDP_CONFIG_H

#include "../kernels/util.h"

#define MAX_EOS 8

typedef struct {
    int dim;         // width of the residual stream
    int hidden_dim;  // width of the MLP
    int n_layers;
    int n_heads;     // query heads
    int n_kv_heads;  // divides n_heads
    int head_dim;    // even, at most 256; n_heads * head_dim may differ from dim
    int seq_len;     // longest context
    int vocab_size;
    float norm_eps;
    double rope_theta;
    int bos_id;          // -1: none
    int n_eos;           // 0 .. MAX_EOS
    int eos_id[MAX_EOS];
} Config;

/* Is every field in its range, and do products of dims fit? Returns 0 or ERR_SHAPE naming the field. */
int config_check(const Config *c, Error *err);

static inline size_t config_q_dim(const Config *c) { return (size_t)c->n_heads * (size_t)c->head_dim; }
static inline size_t config_kv_dim(const Config *c) { return (size_t)c->n_kv_heads * (size_t)c->head_dim; }

/* Bytes of KV cache for one position: 2 * n_layers * kv_dim fp16. */
static inline size_t config_kv_bytes(const Config *c) { return 4 * (size_t)c->n_layers * config_kv_dim(c); }

/* head_dim = dim / n_heads, for what does not give it. Returns 0 or ERR_SHAPE. */
int derive_head_dim(Config *c, Error *err);

/* The config of a shape: tinyllama-1.1b, llama2-7b, llama2-13b, llama2-70b or
 * dim:hidden:layers:heads:kv:vocab:context. Returns 0, ERR_USAGE or ERR_SHAPE. */
int config_parse_shape(Config *c, const char *shape, Error *err);

bool config_is_eos(const Config *c, int id);

#endif
