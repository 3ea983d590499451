/* Random weights of a given shape. */
#include "source_internal.h"

#include "../kernels/random_weights.h"

typedef struct {
    uint64_t seed;
    fp16 values[WEIGHT_VALUES];
} Synthetic;

static int synthetic_read(Source *s, Tensor tensor, int layer, fp16 *out, size_t stride, int n_threads,
                          Error *err) {
    (void)err;  // nothing can go wrong
    const Synthetic *synthetic = s->ctx;
    const RandomWeights weights = {
        .seed = synthetic->seed,
        .matrix = (uint32_t)tensor,
        .layer = tensor_is_in_layers(tensor) ? (uint32_t)layer : 0,
        .values = synthetic->values,
    };
    size_t rows, cols;
    tensor_shape(&s->config, tensor, &rows, &cols);
    if (tensor_is_norm(tensor)) {
        for (size_t i = 0; i < cols; i++) {
            out[i] = FP16_ONE;
        }
        return OK;
    }
#pragma omp parallel for num_threads(n_threads)
    for (size_t r = 0; r < rows; r++) {
        random_weights_row(out + r * stride, &weights, r, cols);
    }
    return OK;
}

static void synthetic_free(Source *s) {
    free(s->ctx);
    free(s);
}

/* fp16 bytes of all tensors. */
static size_t config_bytes(const Config *c) {
    size_t bytes = 0;
    for (int t = 0; t < N_TENSORS; t++) {
        size_t rows, cols;
        tensor_shape(c, (Tensor)t, &rows, &cols);
        bytes += (size_t)tensor_count(c, (Tensor)t) * rows * cols * sizeof(fp16);
    }
    return bytes;
}

int source_open_synthetic(Source **s, const char *shape, uint64_t seed, Error *err) {
    Config config;
    const int rc = config_parse_shape(&config, shape, err);
    if (rc) {
        return rc;
    }
    Source *source = memory_alloc(sizeof *source);
    Synthetic *synthetic = memory_alloc(sizeof *synthetic);
    if (!source || !synthetic) {
        free(source);
        free(synthetic);
        return error_set(err, ERR_MEMORY, "out of memory");
    }
    synthetic->seed = seed;
    random_weight_values(synthetic->values);
    *source = (Source){
        .config = config,
        .kind = "synthetic",
        .fingerprint = seed,
        .bytes = config_bytes(&config),
        .read = synthetic_read,
        .free = synthetic_free,
        .ctx = synthetic,
    };
    *s = source;
    return OK;
}
