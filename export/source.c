#include "source_internal.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

void tensor_shape(const Config *c, Tensor tensor, size_t *rows, size_t *cols) {
    const size_t dim = (size_t)c->dim, hidden_dim = (size_t)c->hidden_dim, vocab_size = (size_t)c->vocab_size;
    const size_t q_dim = config_q_dim(c), kv_dim = config_kv_dim(c);
    const size_t shapes[N_TENSORS][2] = {
        [TENSOR_EMBEDDING] = {vocab_size, dim},
        [TENSOR_HEAD] = {vocab_size, dim},
        [TENSOR_FINAL_NORM] = {1, dim},
        [TENSOR_ATTN_NORM] = {1, dim},
        [TENSOR_Q] = {q_dim, dim},
        [TENSOR_K] = {kv_dim, dim},
        [TENSOR_V] = {kv_dim, dim},
        [TENSOR_O] = {dim, q_dim},
        [TENSOR_MLP_NORM] = {1, dim},
        [TENSOR_GATE] = {hidden_dim, dim},
        [TENSOR_UP] = {hidden_dim, dim},
        [TENSOR_DOWN] = {dim, hidden_dim},
    };
    *rows = shapes[tensor][0];
    *cols = shapes[tensor][1];
}

void tensor_name(char *name, size_t size, const TensorNames *names, Tensor tensor, int layer) {
    if (tensor_is_in_layers(tensor)) {
        snprintf(name, size, "%s.%d.%s", names->layers, layer, names->names[tensor]);
    } else {
        snprintf(name, size, "%s", names->names[tensor]);
    }
}

/* A page out of the middle of every tensor: other weights of the same shape differ there. */
static uint64_t stored_fingerprint(const Source *s) {
    const Stored *stored = s->ctx;
    uint64_t hash = 0;
    for (size_t i = 0; i < (size_t)s->config.n_layers * N_TENSORS; i++) {
        const StoredMatrix *m = &stored->matrices[i];
        if (m->name) {
            const unsigned char *data = stored->files[m->file].data + m->offset;
            hash = XXH3_64bits_withSeed(data + m->bytes / 2, min_size(m->bytes - m->bytes / 2, 4096), hash);
        }
    }
    return hash;
}

int source_open(Source **s, const char *path, Error *err) {
    struct stat info;
    if (stat(path, &info) != 0) {
        return error_set(err, ERR_OPEN, "cannot open %.200s: %s", path, strerror(errno));
    }
    const int rc = S_ISDIR(info.st_mode) ? source_open_hf(s, path, err) : source_open_llama2c(s, path, err);
    if (!rc) {
        (*s)->fingerprint = stored_fingerprint(*s);
    }
    return rc;
}

/* Matrices in mapped files */

/* The kernel may have the pages of a range back, so that what was read once does not count as ours. */
static void release_pages(const unsigned char *data, size_t bytes) {
    const size_t in_page = (uintptr_t)data % (size_t)sysconf(_SC_PAGESIZE);
    madvise((void *)(data - in_page), bytes + in_page, MADV_DONTNEED);
}

static float f16_at(const unsigned char *row, size_t i) {
    fp16 h;
    memcpy(&h, row + i * sizeof h, sizeof h);
    return fp16_to_float(h);
}

static float bf16_at(const unsigned char *row, size_t i) {
    uint16_t upper;
    memcpy(&upper, row + i * sizeof upper, sizeof upper);
    const uint32_t bits = (uint32_t)upper << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static float f32_at(const unsigned char *row, size_t i) {
    float f;
    memcpy(&f, row + i * sizeof f, sizeof f);
    return f;
}

static float value_at(const unsigned char *row, DType dtype, size_t i) {
    switch (dtype) {
    case DTYPE_F16:
        return f16_at(row, i);
    case DTYPE_BF16:
        return bf16_at(row, i);
    default:
        return f32_at(row, i);
    }
}

/* Returns the column of the first value that fp16 cannot hold; cols if there is none. */
static size_t convert_row(fp16 *out, const unsigned char *row, DType dtype, size_t cols) {
    if (dtype == DTYPE_F16) {
        memcpy(out, row, cols * sizeof *out);
    } else if (dtype == DTYPE_BF16) {
        for (size_t i = 0; i < cols; i++) {
            out[i] = fp16_from_float(bf16_at(row, i));
        }
    } else {
        for (size_t i = 0; i < cols; i++) {
            out[i] = fp16_from_float(f32_at(row, i));
        }
    }
    for (size_t i = 0; i < cols; i++) {
        if (!fp16_is_finite(out[i])) {
            return i;
        }
    }
    return cols;
}

/* Row of the source that becomes row r: within a head, pair i is rows i and i + head_dim / 2 there, 2i and
 * 2i + 1 here. */
static size_t rope_row(size_t r, size_t head_dim) {
    const size_t in_head = r % head_dim;
    return r - in_head + in_head / 2 + (in_head % 2) * (head_dim / 2);
}

static int report_number(const StoredMatrix *m, size_t row, size_t col, float value, Error *err) {
    if (isfinite(value)) {
        return error_set(err, ERR_NUMBER, "tensor %.100s: row %zu, column %zu: %g is too large for fp16",
                         m->name, row, col, (double)value);
    }
    return error_set(err, ERR_NUMBER, "tensor %.100s: row %zu, column %zu is %s", m->name, row, col,
                     isnan(value) ? "NaN" : "infinite");
}

static int stored_read(Source *s, Tensor tensor, int layer, fp16 *out, size_t stride, int n_threads,
                       Error *err) {
    const Stored *stored = s->ctx;
    const StoredMatrix *m = stored_matrix(stored, tensor, layer);
    CHECK(m->name);
    size_t rows, cols;
    tensor_shape(&s->config, tensor, &rows, &cols);
    const unsigned char *data = stored->files[m->file].data + m->offset;
    const size_t row_bytes = m->bytes / rows;
    const size_t head_dim = (size_t)s->config.head_dim;
    const bool reorder = stored->rope_halves && (tensor == TENSOR_Q || tensor == TENSOR_K);

    size_t bad_row = rows;  // of the source; the lowest, so that threads do not change the message
#pragma omp parallel for num_threads(n_threads) reduction(min : bad_row)
    for (size_t r = 0; r < rows; r++) {
        const size_t from = reorder ? rope_row(r, head_dim) : r;
        if (convert_row(out + r * stride, data + from * row_bytes, m->dtype, cols) < cols) {
            bad_row = min_size(bad_row, from);
        }
    }
    int rc = OK;
    if (bad_row < rows) {
        const unsigned char *row = data + bad_row * row_bytes;
        size_t col = 0;
        while (fp16_is_finite(fp16_from_float(value_at(row, m->dtype, col)))) {
            col++;
        }
        rc = report_number(m, bad_row, col, value_at(row, m->dtype, col), err);
    }
    release_pages(data, m->bytes);
    // What was written over the file would pass for weights: cut within a page, it reads as zeros.
    const int changed = mapping_check(&stored->files[m->file], err);
    return changed ? changed : rc;
}

static void stored_free(Source *s) {
    Stored *stored = s->ctx;
    for (size_t i = 0; stored->files && i < stored->n_files; i++) {
        mapping_close(&stored->files[i]);
    }
    for (size_t i = 0; stored->matrices && i < (size_t)s->config.n_layers * N_TENSORS; i++) {
        free(stored->matrices[i].name);
    }
    free(stored->files);
    free(stored->matrices);
    free(stored);
    free(s);
}

Source *stored_new(const char *kind, const Config *config, size_t n_files, bool rope_halves) {
    Source *s = memory_alloc(sizeof *s);
    Stored *stored = memory_alloc(sizeof *stored);
    if (!s || !stored) {
        free(s);
        free(stored);
        return NULL;
    }
    *stored = (Stored){
        .files = memory_alloc(n_files * sizeof *stored->files),
        .n_files = n_files,
        .matrices = memory_alloc((size_t)config->n_layers * N_TENSORS * sizeof *stored->matrices),
        .rope_halves = rope_halves,
    };
    *s = (Source){.config = *config, .kind = kind, .read = stored_read, .free = stored_free, .ctx = stored};
    if (!stored->files || !stored->matrices) {
        stored_free(s);
        return NULL;
    }
    return s;
}

int stored_put(Source *s, Tensor tensor, int layer, const StoredMatrix *place, Error *err) {
    StoredMatrix *m = stored_matrix(s->ctx, tensor, layer);
    if (m->name) {
        return error_set(err, ERR_FORMAT, "tensor %.100s is stored twice", m->name);
    }
    char *name = strdup(place->name);
    if (!name) {
        return error_set(err, ERR_MEMORY, "out of memory for tensor names");
    }
    *m = *place;
    m->name = name;
    s->bytes += place->bytes;
    return OK;
}
