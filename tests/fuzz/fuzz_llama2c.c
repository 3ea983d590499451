/* fuzz_llama2c.c: llama2.c checkpoints of any bytes (export/source.h), v0 and v1. A file is refused, and the
 * message names it, or its size is what this target computes from the header and every tensor lies in the
 * file and can be read. A mutated header seldom fits the size of its file, so every input is tried once more
 * with the size that its header asks for, and with one byte less and more. */
#include "../../export/source_internal.h"
#include "fuzz.h"

#define MAGIC 0x616b3432u  // of v1
#define MAX_FITTED 16384   // bytes; larger files take time and show nothing new

enum { DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT, N_FIELDS };

/* The size that a file of this header has, 0 if it is none. In double, which no header overflows and which is
 * exact for any file that there is. */
static double wanted_bytes(const uint8_t *data, size_t size) {
    uint32_t start[2];
    int32_t field[N_FIELDS];
    if (size < sizeof field) {
        return 0;
    }
    memcpy(start, data, sizeof start);
    const bool v1 = start[0] == MAGIC;
    if (v1 && (start[1] != 1 || size < 256 || data[36] > 1)) {
        return 0;
    }
    memcpy(field, data + (v1 ? 8 : 0), sizeof field);
    const bool tied = v1 ? data[36] : field[VOCAB] > 0;
    double n[N_FIELDS];
    for (int i = 0; i < N_FIELDS; i++) {
        n[i] = i == VOCAB && !v1 && !tied ? -(double)field[i] : field[i];
        if (n[i] <= 0) {
            return 0;
        }
    }
    const double head_dim = n[DIM] / n[HEADS], kv_dim = n[KV_HEADS] * head_dim;
    const double layer = n[DIM] * (2 + 2 * n[DIM] + 2 * kv_dim + 3 * n[HIDDEN]), table = n[VOCAB] * n[DIM];
    const double rotations = v1 ? 0 : n[CONTEXT] * head_dim;
    const double floats = table + n[LAYERS] * layer + n[DIM] + rotations + (tied ? 0 : table);
    return (v1 ? 256 : 28) + 4 * floats;
}

/* Read one matrix into rows that are too long; what they have too much stays as it was. */
static void read_matrix(Source *s, Tensor tensor, int layer, size_t rows, size_t cols) {
    const size_t stride = cols + 3, n = (rows - 1) * stride + cols;
    fp16 *out = malloc(n * sizeof *out);
    CHECK(out);
    memset(out, 0xff, n * sizeof *out);  // NaN, which no value that is read may be
    Error err = {0};
    const int rc = s->read(s, tensor, layer, out, stride, 1, &err);
    CHECK(rc == OK || (rc == ERR_NUMBER && strstr(err.text, "row ") && strstr(err.text, "column ")));
    for (size_t i = 0; i < n; i++) {
        const bool between = i % stride >= cols;
        CHECK(between ? out[i] == 0xffff : rc != OK || fp16_is_finite(out[i]));
    }
    free(out);
}

static void read_all(Source *s, size_t file_bytes) {
    size_t bytes = 0;
    for (Tensor tensor = 0; tensor < N_TENSORS; tensor++) {
        size_t rows, cols;
        tensor_shape(&s->config, tensor, &rows, &cols);
        const bool absent = tensor == TENSOR_HEAD && s->tied;
        for (int layer = 0; layer < tensor_count(&s->config, tensor) && !absent; layer++) {
            const StoredMatrix *m = stored_matrix(s->ctx, tensor, layer);
            CHECK(m->name && m->bytes == rows * cols * sizeof(float));
            CHECK(m->offset <= file_bytes && m->bytes <= file_bytes - m->offset);
            bytes += m->bytes;
            read_matrix(s, tensor, tensor_is_in_layers(tensor) ? layer : -1, rows, cols);
        }
    }
    CHECK(bytes == s->bytes);
}

static void open_file(const uint8_t *data, size_t size) {
    const char *path = memory_file(data, size);
    const double wanted = wanted_bytes(data, size);
    const bool fits = wanted > 0 && wanted == (double)size;
    Source *s = NULL;
    Error err = {0};
    const int rc = source_open(&s, path, &err);
    if (rc) {
        CHECK(rc == ERR_SHAPE || (rc == ERR_FORMAT && !fits));
        CHECK(!s && err.code == rc && strstr(err.text, path));
        return;
    }
    CHECK(fits && config_check(&s->config, &err) == OK);
    read_all(s, size);
    s->free(s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    open_file(data, size);
    const double wanted = wanted_bytes(data, size);
    if (wanted > 0 && wanted <= MAX_FITTED) {
        uint8_t fitted[MAX_FITTED + 1] = {0};
        const size_t n = (size_t)wanted;
        memcpy(fitted, data, min_size(size, n));
        for (size_t file_bytes = n - 1; file_bytes <= n + 1; file_bytes++) {
            open_file(fitted, file_bytes);
        }
    }
    return 0;
}
