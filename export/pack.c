#include "pack.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "prune.h"

/* One source matrix inside a fused one: its rows are first, first + step, ... */
typedef struct {
    Tensor tensor;
    const char *name;
    size_t first, step;
} Part;

/* A matrix of the model file. */
typedef struct {
    uint32_t kind;
    const char *name;
    Site site;  // SITE_HEAD: never pruned
    size_t n_parts;
    Part parts[FILE_MAX_PARTS];
} Fused;

typedef struct {
    Source *source;
    Writer *writer;
    const PackOptions *options;
    PackReport report;
    Progress progress;
    size_t done_bytes;
} Pack;

static bool is_attention(Site site) { return site == SITE_ATTN_IN || site == SITE_ATTN_OUT; }

static bool is_pruned(const PackOptions *o, Site site) {
    return site == SITE_MLP_IN || site == SITE_MLP_HIDDEN || (is_attention(site) && o->prune_attn);
}

/* Read and prune all parts into w (rows, stride). */
static int read_parts(Pack *p, fp16 *w, const Fused *f, int layer, size_t stride, FilePart *file_parts, size_t *nnz,
                      Error *err) {
    const PackOptions *o = p->options;
    const double ratio = !is_pruned(o, f->site) ? 0 : is_attention(f->site) ? o->sp.attn : o->sp.mlp;
    *nnz = 0;
    for (size_t i = 0; i < f->n_parts; i++) {
        const Part *part = &f->parts[i];
        size_t rows, cols;
        tensor_shape(&p->source->config, part->tensor, &rows, &cols);
        fp16 *first = w + part->first * stride;
        const int rc = p->source->read(p->source, part->tensor, layer, first, part->step * stride, o->n_threads, err);
        if (rc) {
            return rc;
        }
        const size_t zeros = prune_magnitude(first, rows, cols, part->step * stride, ratio, o->per_row, o->n_threads);
        *nnz += rows * cols - zeros;
        if (is_pruned(o, f->site)) {
            p->report.pruned_elements += rows * cols;
            p->report.pruned_zeros += zeros;
        }
        if (is_attention(f->site)) {
            p->report.attn_elements += rows * cols;
            p->report.attn_zeros += zeros;
        }
        file_parts[i] = (FilePart){.first = (uint32_t)part->first, .step = (uint32_t)part->step, .n_rows = (uint32_t)rows};
        snprintf(file_parts[i].name, sizeof file_parts[i].name, "%s", part->name);
        p->done_bytes += rows * cols * sizeof(fp16);
    }
    return OK;
}

/* Store as Tiled-CBC if that was asked for, or by choice if it is smaller. *stored = false: it was not. */
static int write_tiled(Pack *p, const MatrixLabel *label, const fp16 *w, size_t rows, size_t cols, size_t nnz,
                       bool *stored, Error *err) {
    const Storage storage = p->options->storage;
    const size_t stride = dense_stride(cols), dense_bytes = rows * stride * sizeof(fp16);
    *stored = false;
    if (!label->pruned || storage == STORE_DENSE ||
        // The formula leaves padding out: when it is too large already, there is no need to encode.
        (storage == STORE_AUTO && tiled_cbc_storage_formula(rows, cols, nnz) >= dense_bytes)) {
        return OK;
    }
    TiledCbc cbc;
    TiledCbcStats stats;
    void *block;
    int rc = tiled_cbc_encode(&cbc, &block, &stats, w, rows, cols, stride, p->options->n_threads, err);
    if (rc) {
        return rc;
    }
    if (storage == STORE_TILED_CBC || tiled_cbc_storage(&cbc) < dense_bytes) {
        rc = writer_tiled_cbc(p->writer, label, &cbc, block, &stats, err);
        *stored = rc == OK;
        p->report.n_tiled += *stored;
    }
    free(block);
    return rc;
}

static int pack_matrix(Pack *p, const Fused *f, int layer, Error *err) {
    size_t rows = 0, cols = 0;
    for (size_t i = 0; i < f->n_parts; i++) {
        size_t part_rows;
        tensor_shape(&p->source->config, f->parts[i].tensor, &part_rows, &cols);
        rows += part_rows;
    }
    char name[32];
    if (layer < 0) {
        snprintf(name, sizeof name, "%s", f->name);
    } else {
        snprintf(name, sizeof name, "layers.%d.%s", layer, f->name);
    }
    const size_t stride = dense_stride(cols);
    fp16 *w = memory_alloc(rows * stride * sizeof *w);
    if (!w) {
        return error_set(err, ERR_MEMORY, "no memory for %s (%zu x %zu)", name, rows, cols);
    }
    FilePart parts[FILE_MAX_PARTS] = {0};
    const MatrixLabel label = {
        .kind = f->kind,
        .layer = layer,
        .name = name,
        .pruned = is_pruned(p->options, f->site),
        .parts = parts,
        .n_parts = f->n_parts,
    };
    size_t nnz;
    bool stored;
    int rc = read_parts(p, w, f, layer, stride, parts, &nnz, err);
    if (!rc) {
        rc = write_tiled(p, &label, w, rows, cols, nnz, &stored, err);
    }
    if (!rc && !stored) {
        rc = writer_dense(p->writer, &label, w, rows, cols, err);
    }
    free(w);
    p->report.dense_bytes += rows * stride * sizeof(fp16);
    progress_show(&p->progress, (double)p->done_bytes * 1e-6, (double)p->source->bytes * 1e-6);
    return rc;
}

/* Where the weights came from and what was done to them, as JSON. NULL when memory is short. */
static char *provenance(const Pack *p) {
    const PackOptions *o = p->options;
    cJSON *json = cJSON_CreateObject();
    char *text = NULL;
    const double reached =
        p->report.pruned_elements ? (double)p->report.pruned_zeros / (double)p->report.pruned_elements : 0;
    if (cJSON_AddStringToObject(json, "source", o->source_name) &&
        cJSON_AddStringToObject(json, "source_kind", p->source->kind) &&
        cJSON_AddStringToObject(json, "method", o->per_row ? "magnitude per row" : "magnitude") &&
        cJSON_AddStringToObject(json, "prune", o->prune_attn ? "all" : "mlp") &&
        cJSON_AddNumberToObject(json, "sp_asked_mlp", o->sp.mlp) &&
        cJSON_AddNumberToObject(json, "sp_asked_attn", o->prune_attn ? o->sp.attn : 0) &&
        cJSON_AddNumberToObject(json, "sp_reached", reached) &&
        cJSON_AddStringToObject(json, "converter", VERSION)) {
        text = cJSON_PrintUnformatted(json);
    }
    cJSON_Delete(json);
    return text;
}

static int pack_all(Pack *p, Error *err) {
    const Config *c = &p->source->config;
    const size_t q = config_q_dim(c), kv = config_kv_dim(c);
    const Fused embedding = {SECTION_EMBEDDING, "embedding", SITE_HEAD, 1, {{TENSOR_EMBEDDING, "", 0, 1}}};
    const Fused head = {SECTION_HEAD, "head", SITE_HEAD, 1, {{TENSOR_HEAD, "", 0, 1}}};
    const Fused final_norm = {SECTION_FINAL_NORM, "final_norm", SITE_HEAD, 1, {{TENSOR_FINAL_NORM, "", 0, 1}}};
    const Fused layer_matrices[] = {
        {SECTION_ATTN_NORM, "attn_norm", SITE_HEAD, 1, {{TENSOR_ATTN_NORM, "", 0, 1}}},
        {SECTION_QKV, "qkv", SITE_ATTN_IN, 3, {{TENSOR_Q, "q", 0, 1}, {TENSOR_K, "k", q, 1}, {TENSOR_V, "v", q + kv, 1}}},
        {SECTION_O, "o", SITE_ATTN_OUT, 1, {{TENSOR_O, "o", 0, 1}}},
        {SECTION_MLP_NORM, "mlp_norm", SITE_HEAD, 1, {{TENSOR_MLP_NORM, "", 0, 1}}},
        {SECTION_GATE_UP, "gate_up", SITE_MLP_IN, 2, {{TENSOR_GATE, "gate", 0, 2}, {TENSOR_UP, "up", 1, 2}}},
        {SECTION_DOWN, "down", SITE_MLP_HIDDEN, 1, {{TENSOR_DOWN, "down", 0, 1}}},
    };
    int rc = pack_matrix(p, &embedding, -1, err);
    for (int l = 0; l < c->n_layers; l++) {
        for (size_t i = 0; i < sizeof layer_matrices / sizeof *layer_matrices && !rc; i++) {
            rc = pack_matrix(p, &layer_matrices[i], l, err);
        }
    }
    rc = rc ? rc : pack_matrix(p, &final_norm, -1, err);
    if (!rc && !p->source->tied) {
        rc = pack_matrix(p, &head, -1, err);
    }
    if (!rc && p->options->tokenizer) {
        rc = writer_bytes(p->writer, SECTION_TOKENIZER, "tokenizer", p->options->tokenizer,
                          p->options->tokenizer_bytes, err);
        p->report.dense_bytes += p->options->tokenizer_bytes;
    }
    if (!rc) {
        char *text = provenance(p);
        rc = text ? writer_bytes(p->writer, SECTION_PROVENANCE, "provenance", text, strlen(text), err)
                  : error_set(err, ERR_MEMORY, "no memory for the provenance");
        cJSON_free(text);
    }
    return rc;
}

int pack_model(PackReport *report, Source *source, Writer *writer, const PackOptions *options, Error *err) {
    Pack p = {
        .source = source,
        .writer = writer,
        .options = options,
        .progress = {.label = "convert", .unit = "MB", .quiet = options->quiet},
    };
    progress_show(&p.progress, 0, (double)source->bytes * 1e-6);
    int rc = pack_all(&p, err);
    progress_end(&p.progress);
    if (rc) {
        writer_abort(writer);
        return rc;
    }
    rc = writer_finish(writer, &p.report.file_bytes, err);
    if (!rc) {
        *report = p.report;
    }
    return rc;
}
