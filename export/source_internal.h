/* source_internal.h: what the readers of source checkpoints share. */
#ifndef SPDP_SOURCE_INTERNAL_H
#define SPDP_SOURCE_INTERNAL_H

#include "../model/mapping.h"
#include "safetensors.h"
#include "source.h"

static inline bool tensor_is_in_layers(Tensor tensor) {
    return tensor >= TENSOR_ATTN_NORM;
}

static inline bool tensor_is_norm(Tensor tensor) {
    return tensor == TENSOR_FINAL_NORM || tensor == TENSOR_ATTN_NORM || tensor == TENSOR_MLP_NORM;
}

/* How often a model has this tensor: once, or once a layer. */
static inline int tensor_count(const Config *c, Tensor tensor) {
    return tensor_is_in_layers(tensor) ? c->n_layers : 1;
}

/* What a kind of source calls its tensors. */
typedef struct {
    const char *layers;            // "model.layers": before the number of a layer and its tensor's name
    const char *names[N_TENSORS];  // "mlp.up_proj.weight"
} TensorNames;

/* The full name, "model.layers.3.mlp.up_proj.weight". */
void tensor_name(char *name, size_t size, const TensorNames *names, Tensor tensor, int layer);

/* A matrix where it lies in one of the files, rows one after the other, at any alignment. */
typedef struct {
    char *name;  // the source's own, for messages; NULL: not there
    size_t file, offset, bytes;
    DType dtype;
} StoredMatrix;

/* Source.ctx of the two sources that are files. */
typedef struct {
    Mapping *files;
    size_t n_files;
    StoredMatrix *matrices;  // (n_layers, N_TENSORS); what is outside the layers counts to layer 0
    bool rope_halves;        // q and k keep RoPE pairs half a head apart
} Stored;

/* A source in n_files files that are not mapped yet, with no matrix known. Config must have passed
 * config_check. NULL when memory is short. */
Source *stored_new(const char *kind, const Config *config, size_t n_files, bool rope_halves);

static inline StoredMatrix *stored_matrix(const Stored *stored, Tensor tensor, int layer) {
    const size_t row = tensor_is_in_layers(tensor) ? (size_t)layer : 0;
    return &stored->matrices[row * N_TENSORS + tensor];
}

/* Say where a matrix lies; place->name is copied. Returns 0, ERR_FORMAT (known already) or ERR_MEMORY. */
int stored_put(Source *s, Tensor tensor, int layer, const StoredMatrix *place, Error *err);

#endif
