/* llama2.c checkpoints: a header of seven integers, then every matrix as fp32 in a fixed order. */
#include "source_internal.h"

#include <fcntl.h>
#include <string.h>

#define V0_HEADER 28  // bytes: the seven integers
#define V1_HEADER 256
#define V1_MAGIC 0x616b3432u

enum { N_FIELDS = 7, ORDER_MAX = N_TENSORS + 1, FREQUENCIES = N_TENSORS };

/* Tensors as they follow one another; all layers of one come together. The head is last where there is one.
 * FREQUENCIES is no tensor: the cosines and sines of RoPE, which this runtime computes itself. */
typedef struct {
    const char *kind;
    size_t header_bytes;
    int n;
    int order[ORDER_MAX];
} Layout;

static const Layout v0_layout = {
    .kind = "llama2.c v0",
    .header_bytes = V0_HEADER,
    .n = 13,
    .order = {TENSOR_EMBEDDING, TENSOR_ATTN_NORM, TENSOR_Q, TENSOR_K, TENSOR_V, TENSOR_O, TENSOR_MLP_NORM,
              TENSOR_GATE, TENSOR_DOWN, TENSOR_UP, TENSOR_FINAL_NORM, FREQUENCIES, TENSOR_HEAD},
};

static const Layout v1_layout = {
    .kind = "llama2.c v1",
    .header_bytes = V1_HEADER,
    .n = 12,
    .order = {TENSOR_ATTN_NORM, TENSOR_MLP_NORM, TENSOR_FINAL_NORM, TENSOR_EMBEDDING, TENSOR_Q, TENSOR_K,
              TENSOR_V, TENSOR_O, TENSOR_GATE, TENSOR_DOWN, TENSOR_UP, TENSOR_HEAD},
};

static const TensorNames llama2c_names = {
    "layers",
    {
        [TENSOR_EMBEDDING] = "tok_embeddings",
        [TENSOR_HEAD] = "output",
        [TENSOR_FINAL_NORM] = "norm",
        [TENSOR_ATTN_NORM] = "attention_norm",
        [TENSOR_Q] = "wq",
        [TENSOR_K] = "wk",
        [TENSOR_V] = "wv",
        [TENSOR_O] = "wo",
        [TENSOR_MLP_NORM] = "ffn_norm",
        [TENSOR_GATE] = "w1",
        [TENSOR_UP] = "w3",
        [TENSOR_DOWN] = "w2",
    },
};

typedef struct {
    const Layout *layout;
    Config config;
    bool tied;
} Header;

/* Which layout it is, its seven integers, and whether the embedding serves as head: v0 says so with the sign
 * of the vocabulary. */
static int read_layout(Header *h, int32_t fields[N_FIELDS], const Mapping *file, Error *err) {
    uint32_t start[2];
    if (file->bytes < V0_HEADER) {
        return error_set(err, ERR_FORMAT, "%zu bytes are too few for a header", file->bytes);
    }
    memcpy(start, file->data, sizeof start);
    if (start[0] != V1_MAGIC) {
        h->layout = &v0_layout;
        memcpy(fields, file->data, V0_HEADER);
        h->tied = fields[5] > 0;
        return OK;
    }
    if (start[1] != 1) {
        return error_set(err, ERR_FORMAT, "version %u%s is not supported: export version 0 or 1", start[1],
                         start[1] == 2 ? " (int8)" : "");
    }
    if (file->bytes < V1_HEADER) {
        return error_set(err, ERR_FORMAT, "%zu bytes are too few for a header", file->bytes);
    }
    const unsigned char shared = file->data[sizeof start + V0_HEADER];
    if (shared > 1) {
        return error_set(err, ERR_FORMAT, "flag of a shared classifier is %d", shared);
    }
    h->layout = &v1_layout;
    memcpy(fields, file->data + sizeof start, V0_HEADER);
    h->tied = shared;
    return OK;
}

static int read_header(Header *h, const Mapping *file, Error *err) {
    int32_t fields[N_FIELDS] = {0};
    int rc = read_layout(h, fields, file, err);
    if (rc) {
        return rc;
    }
    const bool negative_vocab = h->layout == &v0_layout && fields[5] < 0 && fields[5] != INT32_MIN;
    h->config = (Config){
        .dim = fields[0],
        .hidden_dim = fields[1],
        .n_layers = fields[2],
        .n_heads = fields[3],
        .n_kv_heads = fields[4],
        .vocab_size = negative_vocab ? -fields[5] : fields[5],
        .seq_len = fields[6],
        .norm_eps = 1e-5f,
        .rope_theta = 10000,
        .bos_id = 1,
        .n_eos = 2,
        .eos_id = {2, 1},  // models of llama2.c begin the next story with BOS
    };
    rc = derive_head_dim(&h->config, err);
    return rc ? rc : config_check(&h->config, err);
}

/* Bytes of one matrix of an entry in the order. */
static size_t entry_bytes(const Config *c, int entry) {
    size_t rows = (size_t)c->seq_len, cols = (size_t)c->head_dim;  // of FREQUENCIES: half cosines, half sines
    if (entry != FREQUENCIES) {
        tensor_shape(c, (Tensor)entry, &rows, &cols);
    }
    return rows * cols * sizeof(float);
}

/* How many matrices of an entry the file holds. */
static int entry_count(const Header *h, int entry) {
    if (entry == FREQUENCIES) {
        return 1;
    }
    return entry == TENSOR_HEAD && h->tied ? 0 : tensor_count(&h->config, (Tensor)entry);
}

static int check_bytes(const Header *h, size_t file_bytes, Error *err) {
    size_t bytes = h->layout->header_bytes;
    for (int i = 0; i < h->layout->n; i++) {
        const int entry = h->layout->order[i];
        bytes += (size_t)entry_count(h, entry) * entry_bytes(&h->config, entry);
    }
    if (bytes != file_bytes) {
        return error_set(err, ERR_FORMAT, "file has %zu bytes, its shape needs %zu", file_bytes, bytes);
    }
    return OK;
}

static int place_matrix(Source *s, Tensor tensor, int layer, size_t offset, size_t bytes, Error *err) {
    char name[64];
    tensor_name(name, sizeof name, &llama2c_names, tensor, layer);
    const StoredMatrix place = {.name = name, .offset = offset, .bytes = bytes, .dtype = DTYPE_F32};
    return stored_put(s, tensor, layer, &place, err);
}

static int place_matrices(Source *s, const Header *h, Error *err) {
    size_t offset = h->layout->header_bytes;
    for (int i = 0; i < h->layout->n; i++) {
        const int entry = h->layout->order[i];
        const size_t bytes = entry_bytes(&h->config, entry);
        for (int layer = 0; layer < entry_count(h, entry); layer++, offset += bytes) {
            int rc = OK;
            if (entry != FREQUENCIES) {
                rc = place_matrix(s, (Tensor)entry, layer, offset, bytes, err);
            }
            if (rc) {
                return rc;
            }
        }
    }
    return OK;
}

/* On success the source owns the mapping. */
static int open_mapped(Source **s, const Mapping *file, Error *err) {
    Header header;
    int rc = read_header(&header, file, err);
    rc = rc ? rc : check_bytes(&header, file->bytes, err);
    if (rc) {
        return rc;
    }
    Source *source = stored_new(header.layout->kind, &header.config, 1, false);
    if (!source) {
        return error_set(err, ERR_MEMORY, "out of memory");
    }
    source->tied = header.tied;
    rc = place_matrices(source, &header, err);
    if (rc) {
        source->free(source);
        return rc;
    }
    ((Stored *)source->ctx)->files[0] = *file;
    *s = source;
    return OK;
}

int source_open_llama2c(Source **s, const char *path, Error *err) {
    Mapping file;
    int rc = mapping_open(&file, AT_FDCWD, path, err);
    if (rc) {
        return rc;
    }
    Error reason = {0};
    rc = open_mapped(s, &file, &reason);
    if (rc) {
        mapping_close(&file);
        return error_set(err, rc, "%.150s: cannot be read as a llama2.c checkpoint: %.200s", path,
                         reason.text);
    }
    return OK;
}
