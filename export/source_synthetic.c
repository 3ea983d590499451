/* Random weights of a given shape. Any row can be made on its own: its values are a function of the seed and
 * of where they stand. */
#include "source_internal.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "../kernels/sampling.h"

#define STDDEV 0.02
#define N_QUANTILES 65536   // 16 random bits choose one
#define WEIGHTS_PER_DRAW 8  // 4 words of 32 bits
#define FP16_ONE 0x3c00

typedef struct {
    uint64_t seed;
    fp16 quantiles[N_QUANTILES];  // of N(0, STDDEV)
} Synthetic;

static const struct {
    const char *name;
    const char *shape;
} known_shapes[] = {
    {"tinyllama-1.1b", "2048:5632:22:32:4:32000:2048"},
    {"llama2-7b", "4096:11008:32:32:32:32000:4096"},
    {"llama2-13b", "5120:13824:40:40:40:32000:4096"},
    {"llama2-70b", "8192:28672:80:64:8:32000:4096"},
};

/* A number without sign or space, followed by end. */
static bool parse_field(const char **text, char end, int *value) {
    if (!isdigit((unsigned char)**text)) {
        return false;
    }
    char *rest;
    errno = 0;
    const long number = strtol(*text, &rest, 10);
    if (errno || number > INT_MAX || *rest != end) {
        return false;
    }
    *value = (int)number;
    *text = rest + 1;
    return true;
}

/* dim:hidden:layers:heads:kv:vocab:context */
static bool parse_fields(Config *c, const char *text) {
    int *const fields[] = {&c->dim,        &c->hidden_dim, &c->n_layers, &c->n_heads,
                           &c->n_kv_heads, &c->vocab_size, &c->seq_len};
    const size_t n = sizeof fields / sizeof *fields;
    for (size_t i = 0; i < n; i++) {
        if (!parse_field(&text, i + 1 < n ? ':' : '\0', fields[i])) {
            return false;
        }
    }
    return true;
}

static int parse_shape(Config *c, const char *shape, Error *err) {
    *c = (Config){.norm_eps = 1e-5f, .rope_theta = 10000, .bos_id = 1, .n_eos = 1, .eos_id = {2}};
    const char *text = shape;
    for (size_t i = 0; i < sizeof known_shapes / sizeof *known_shapes; i++) {
        if (strcmp(shape, known_shapes[i].name) == 0) {
            text = known_shapes[i].shape;
        }
    }
    if (!parse_fields(c, text)) {
        return error_set(err, ERR_USAGE,
                         "shape '%.60s' is not tinyllama-1.1b, llama2-7b, llama2-13b, llama2-70b or "
                         "dim:hidden:layers:heads:kv:vocab:context",
                         shape);
    }
    int rc = derive_head_dim(c, err);
    rc = rc ? rc : config_check(c, err);
    if (rc) {
        error_prefix(err, shape);
    }
    return rc;
}

/* The x with probability q above it under N(0, 1), where 0 <= from <= x. The tail's probability is convex
 * there, so Newton's steps come from below and do not pass x. */
static double upper_quantile(double q, double from) {
    double x = from, step;
    do {
        const double tail = 0.5 * erfc(x / sqrt(2));
        const double density = exp(-0.5 * x * x) / sqrt(2 * acos(-1));
        step = (tail - q) / density;
        x += step;
    } while (step > 1e-12);
    return x;
}

/* Entry i is the quantile at (i + 0.5) / N_QUANTILES: each is found from the one before, outwards from the
 * median, and mirrored. */
static void fill_quantiles(fp16 quantiles[N_QUANTILES]) {
    const int half = N_QUANTILES / 2;
    double x = 0;
    for (int i = 0; i < half; i++) {
        x = upper_quantile((half - i - 0.5) / N_QUANTILES, x);
        quantiles[half + i] = fp16_from_float((float)(STDDEV * x));
        quantiles[half - 1 - i] = fp16_from_float((float)(STDDEV * -x));
    }
}

/* The counter of a draw: which eight weights of the row, row, tensor, layer. */
static void random_row(const Synthetic *synthetic, Tensor tensor, int layer, size_t row, fp16 *out,
                       size_t cols) {
    const uint32_t key[2] = {(uint32_t)synthetic->seed, (uint32_t)(synthetic->seed >> 32)};
    uint32_t counter[4] = {0, (uint32_t)row, (uint32_t)tensor, (uint32_t)layer};
    for (size_t begin = 0; begin < cols; begin += WEIGHTS_PER_DRAW, counter[0]++) {
        uint32_t draw[4];
        philox4x32_10(draw, counter, key);
        const size_t n = min_size(cols - begin, WEIGHTS_PER_DRAW);
        for (size_t i = 0; i < n; i++) {
            out[begin + i] = synthetic->quantiles[draw[i / 2] >> 16 * (i % 2) & 0xffff];
        }
    }
}

static int synthetic_read(Source *s, Tensor tensor, int layer, fp16 *out, size_t stride, int n_threads,
                          Error *err) {
    (void)err;  // nothing can go wrong
    const Synthetic *synthetic = s->ctx;
    const int layer_used = tensor_is_in_layers(tensor) ? layer : 0;
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
        random_row(synthetic, tensor, layer_used, r, out + r * stride, cols);
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
    const int rc = parse_shape(&config, shape, err);
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
    fill_quantiles(synthetic->quantiles);
    *source = (Source){
        .config = config,
        .kind = "synthetic",
        .bytes = config_bytes(&config),
        .read = synthetic_read,
        .free = synthetic_free,
        .ctx = synthetic,
    };
    *s = source;
    return OK;
}
