#include "pack.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "calibrate.h"
#include "dynamic.h"
#include "interrupt.h"
#include "prune.h"
#include "sparsegpt.h"
#include "state.h"

/* A state is saved after every layer where that is a matter of a second, else when ten times the time that it takes has
 * gone by: the stream of a large model is gigabytes, and layers may be quick. */
#define SAVE_SECONDS 1
#define SAVE_SHARE 10

/* The matrices of a layer, in the order of the file. */
enum { LAYER_ATTN_NORM, LAYER_QKV, LAYER_O, LAYER_MLP_NORM, LAYER_GATE_UP, LAYER_DOWN, N_LAYER_MATRICES };

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

/* One that is in memory. */
typedef struct {
    const Fused *fused;
    int layer;  // -1 outside the layers
    char name[32];
    fp16 *values;  // (rows, stride)
    size_t rows, cols, stride;
    size_t n_zeros;
} Loaded;

typedef struct {
    Source *source;
    Writer *writer;
    const PackOptions *options;
    PackReport report;
    Progress progress;
    size_t done_bytes;
    char ratios[200];  // reached in the current layer, for people
    PackState resumed;         // what an earlier process left, until its residual stream is taken over
    size_t first_layer;        // that it has not finished
    size_t n_saved;            // layers that a later process need not do again
    bool saves;                // states
    double saved_ms, save_ms;  // when the last one was saved, and how long it took
} Pack;

/* What SparseGPT knows of a site. */
typedef struct {
    const double *factor;
    bool *dead;
} Inverse;

static bool is_attention(Site site) { return site == SITE_ATTN_IN || site == SITE_ATTN_OUT; }

static bool is_pruned(const PackOptions *o, Site site) {
    return site == SITE_MLP_IN || site == SITE_MLP_HIDDEN || (is_attention(site) && o->prune_attn);
}

/* Share of a site's weights to remove. */
static double site_ratio(const PackOptions *o, Site site) {
    return !is_pruned(o, site) ? 0 : is_attention(site) ? o->sp.attn : o->sp.mlp;
}

bool pack_measures(const PackOptions *o) {
    return o->method != METHOD_MAGNITUDE && (site_ratio(o, SITE_MLP_IN) > 0 || site_ratio(o, SITE_ATTN_IN) > 0);
}

/* ---- read ---- */

static void unload(Loaded *m) {
    free(m->values);
    m->values = NULL;
}

static int load(Loaded *m, Pack *p, const Fused *f, int layer, Error *err) {
    *m = (Loaded){.fused = f, .layer = layer};
    if (layer < 0) {
        snprintf(m->name, sizeof m->name, "%s", f->name);
    } else {
        snprintf(m->name, sizeof m->name, "layers.%d.%s", layer, f->name);
    }
    for (size_t i = 0; i < f->n_parts; i++) {
        size_t rows;
        tensor_shape(&p->source->config, f->parts[i].tensor, &rows, &m->cols);
        m->rows += rows;
    }
    m->stride = dense_stride(m->cols);
    m->values = memory_alloc(m->rows * m->stride * sizeof *m->values);
    if (!m->values) {
        return error_set(err, ERR_MEMORY, "no memory for %s (%zu x %zu)", m->name, m->rows, m->cols);
    }
    for (size_t i = 0; i < f->n_parts; i++) {
        const Part *part = &f->parts[i];
        const int rc = p->source->read(p->source, part->tensor, layer, m->values + part->first * m->stride,
                                       part->step * m->stride, p->options->n_threads, err);
        if (rc) {
            unload(m);
            return rc;
        }
    }
    return OK;
}

/* ---- prune ---- */

/* Prune one source matrix, by magnitude unless the inputs of its site were measured. */
static int prune_part(size_t *zeros, const PackOptions *o, fp16 *w, size_t rows, size_t cols, size_t stride,
                      double ratio, const InputStats *stats, const Inverse *inverse, Error *err) {
    if (stats && stats->kind == STATS_SQUARES) {
        return prune_wanda(zeros, w, rows, cols, stride, stats->sums, ratio, o->n_threads, err);
    }
    if (stats && stats->kind == STATS_PRODUCTS) {
        return sparsegpt_prune(zeros, w, rows, cols, stride, inverse->factor, inverse->dead, ratio, o->n_threads, err);
    }
    *zeros = prune_magnitude(w, rows, cols, stride, ratio, o->per_row, o->n_threads);
    return OK;
}

static void note_ratio(Pack *p, const char *name, double ratio) {
    const size_t used = strlen(p->ratios);
    snprintf(p->ratios + used, sizeof p->ratios - used, "  %s %.4f", name, ratio);
}

static int prune_parts(Pack *p, Loaded *m, const InputStats *stats, const Inverse *inverse, Error *err) {
    const Site site = m->fused->site;
    for (size_t i = 0; i < m->fused->n_parts; i++) {
        if (interrupt_check(err)) {
            return ERR_STOPPED;
        }
        const Part *part = &m->fused->parts[i];
        size_t rows, cols, zeros;
        tensor_shape(&p->source->config, part->tensor, &rows, &cols);
        const int rc = prune_part(&zeros, p->options, m->values + part->first * m->stride, rows, cols,
                                  part->step * m->stride, site_ratio(p->options, site), stats, inverse, err);
        if (rc) {
            error_prefix(err, part->name);
            error_prefix(err, m->name);
            return rc;
        }
        m->n_zeros += zeros;
        if (is_pruned(p->options, site)) {
            p->report.pruned_elements += rows * cols;
            p->report.pruned_zeros += zeros;
            note_ratio(p, part->name, (double)zeros / (double)(rows * cols));
        }
        if (is_attention(site)) {
            p->report.attn_elements += rows * cols;
            p->report.attn_zeros += zeros;
        }
    }
    return OK;
}

/* Prune with SparseGPT: the parts share the inverse of their inputs' products, which becomes of the sums. */
static int prune_compensated(Pack *p, Loaded *m, InputStats *stats, Error *err) {
    bool *dead = memory_alloc(m->cols * sizeof *dead);
    double damping;
    int rc = dead ? sparsegpt_factor(stats->sums, dead, &damping, m->cols, p->options->sp_text->n,
                                     p->options->n_threads, err)
                  : error_set(err, ERR_MEMORY, "no memory");
    if (rc) {
        error_prefix(err, m->name);
    } else {
        if (damping > SPARSEGPT_DAMPING && !p->options->quiet) {
            progress_end(&p->progress);
            fprintf(stderr, "note       %s: the Hessian needed a damping of %g instead of %g\n", m->name, damping,
                    SPARSEGPT_DAMPING);
        }
        rc = prune_parts(p, m, stats, &(Inverse){stats->sums, dead}, err);
    }
    free(dead);
    return rc;
}

/* One line for each layer. */
static void show_layer(Pack *p, int layer) {
    if (!p->options->quiet) {
        progress_end(&p->progress);
        fprintf(stderr, "layer %-4d %s\n", layer, p->ratios + strspn(p->ratios, " "));
    }
    p->ratios[0] = 0;
}

/* ---- write ---- */

/* Store as Tiled-CBC if that was asked for, or by choice if it is smaller or lets columns be skipped. *stored = false:
 * it was not. */
static int write_tiled(Pack *p, const MatrixLabel *label, const Loaded *m, bool *stored, Error *err) {
    const bool choose = p->options->storage == STORE_AUTO && p->options->dp == 0;
    const size_t dense_bytes = m->rows * m->stride * sizeof(fp16);
    *stored = false;
    if (!label->pruned || p->options->storage == STORE_DENSE ||
        // The formula leaves padding out: when it is too large already, there is no need to encode.
        (choose && tiled_cbc_storage_formula(m->rows, m->cols, m->rows * m->cols - m->n_zeros) >= dense_bytes)) {
        return OK;
    }
    TiledCbc cbc;
    TiledCbcStats stats;
    void *block;
    int rc = tiled_cbc_encode(&cbc, &block, &stats, m->values, m->rows, m->cols, m->stride, p->options->n_threads, err);
    if (rc) {
        return rc;
    }
    if (!choose || tiled_cbc_storage(&cbc) < dense_bytes) {
        rc = writer_tiled_cbc(p->writer, label, &cbc, block, &stats, err);
        *stored = rc == OK;
        p->report.n_tiled += *stored;
    }
    free(block);
    return rc;
}

static int store(Pack *p, const Loaded *m, Error *err) {
    const Fused *f = m->fused;
    FilePart parts[FILE_MAX_PARTS] = {0};
    for (size_t i = 0; i < f->n_parts; i++) {
        size_t rows, cols;
        tensor_shape(&p->source->config, f->parts[i].tensor, &rows, &cols);
        parts[i] = (FilePart){
            .first = (uint32_t)f->parts[i].first, .step = (uint32_t)f->parts[i].step, .n_rows = (uint32_t)rows};
        snprintf(parts[i].name, sizeof parts[i].name, "%s", f->parts[i].name);
    }
    const MatrixLabel label = {
        .kind = f->kind,
        .layer = m->layer,
        .name = m->name,
        .pruned = is_pruned(p->options, f->site),
        .parts = parts,
        .n_parts = f->n_parts,
    };
    bool stored;
    int rc = write_tiled(p, &label, m, &stored, err);
    if (!rc && !stored) {
        rc = writer_dense(p->writer, &label, m->values, m->rows, m->cols, err);
    }
    p->report.dense_bytes += m->rows * m->stride * sizeof(fp16);
    return rc;
}

/* ---- matrix by matrix ---- */

static int pack_matrix(Pack *p, const Fused *f, int layer, Error *err) {
    Loaded m;
    int rc = load(&m, p, f, layer, err);
    if (rc) {
        return rc;
    }
    rc = prune_parts(p, &m, NULL, NULL, err);
    rc = rc ? rc : store(p, &m, err);
    unload(&m);
    p->done_bytes += m.rows * m.cols * sizeof(fp16);
    if (!pack_measures(p->options)) {
        progress_show(&p->progress, (double)p->done_bytes * 1e-6, (double)p->source->bytes * 1e-6);
    }
    return rc;
}

static int pack_layers_by_magnitude(Pack *p, const Fused layer_matrices[N_LAYER_MATRICES], Error *err) {
    for (int l = 0; l < p->source->config.n_layers; l++) {
        for (size_t i = 0; i < N_LAYER_MATRICES; i++) {
            const int rc = pack_matrix(p, &layer_matrices[i], l, err);
            if (rc) {
                return rc;
            }
        }
        show_layer(p, l);
    }
    return OK;
}

/* ---- layer by layer, with calibration ---- */

static void unload_layer(Loaded matrices[N_LAYER_MATRICES]) {
    for (size_t i = 0; i < N_LAYER_MATRICES; i++) {
        unload(&matrices[i]);
    }
}

static int load_layer(Loaded matrices[N_LAYER_MATRICES], Pack *p, const Fused layer_matrices[N_LAYER_MATRICES],
                      int layer, Error *err) {
    memset(matrices, 0, N_LAYER_MATRICES * sizeof *matrices);
    for (size_t i = 0; i < N_LAYER_MATRICES; i++) {
        const int rc = load(&matrices[i], p, &layer_matrices[i], layer, err);
        if (rc) {
            unload_layer(matrices);
            return rc;
        }
    }
    return OK;
}

static Matrix dense_matrix(const Loaded *m) {
    return (Matrix){
        .format = FORMAT_DENSE,
        .rows = m->rows,
        .cols = m->cols,
        .layer = m->layer,
        .site = m->fused->site,
        .dense = m->values,
        .stride = m->stride,
    };
}

/* The layer as the forward pass wants it, in host memory. */
static LayerWeights layer_weights(const Loaded matrices[N_LAYER_MATRICES]) {
    return (LayerWeights){
        .attn_norm = matrices[LAYER_ATTN_NORM].values,
        .qkv = dense_matrix(&matrices[LAYER_QKV]),
        .o = dense_matrix(&matrices[LAYER_O]),
        .mlp_norm = matrices[LAYER_MLP_NORM].values,
        .gate_up = dense_matrix(&matrices[LAYER_GATE_UP]),
        .down = dense_matrix(&matrices[LAYER_DOWN]),
    };
}

static int prune_layer(Pack *p, Loaded matrices[N_LAYER_MATRICES], Calibration *c, Error *err) {
    int rc = OK;
    for (size_t i = 0; i < N_LAYER_MATRICES && !rc; i++) {
        Loaded *m = &matrices[i];
        InputStats *stats = m->fused->site < N_DP_SITES ? calibration_stats(c, m->fused->site) : NULL;
        rc = stats && stats->kind == STATS_PRODUCTS ? prune_compensated(p, m, stats, err)
                                                    : prune_parts(p, m, stats, NULL, err);
    }
    return rc;
}

/* Measure the layer's inputs, prune it, write it, and give its outputs to the next. */
static int pack_layer(Pack *p, Loaded matrices[N_LAYER_MATRICES], Calibration *c, bool last, Error *err) {
    const LayerWeights weights = layer_weights(matrices);
    int rc = calibration_measure(c, &weights, err);
    rc = rc ? rc : prune_layer(p, matrices, c, err);
    for (size_t i = 0; i < N_LAYER_MATRICES && !rc; i++) {
        rc = store(p, &matrices[i], err);
    }
    return rc || last ? rc : calibration_advance(c, &weights, err);
}

/* Operations of SparseGPT on one layer: inverse of each site's products, updates of each matrix. */
static double compensation_flops(const Loaded matrices[N_LAYER_MATRICES], Calibration *c) {
    double flops = 0;
    for (size_t i = 0; i < N_LAYER_MATRICES; i++) {
        const Loaded *m = &matrices[i];
        if (m->fused->site < N_DP_SITES && calibration_stats(c, m->fused->site)->kind == STATS_PRODUCTS) {
            const double n = (double)m->cols;
            flops += n * n * (2.0 / 3 * n + (double)m->rows);
        }
    }
    return flops;
}

/* Say how long it will take, thresholds included, if that is long, and what fewer tokens would bring. */
static int announce(Pack *p, const Loaded matrices[N_LAYER_MATRICES], Calibration *c, Error *err) {
    const LayerWeights weights = layer_weights(matrices);
    const PackOptions *o = p->options;
    const size_t n_all = (size_t)p->source->config.n_layers, n_layers = n_all - p->first_layer;
    const size_t n = o->sp_text->n, n_thresholds = o->dp > 0 ? dynamic_tokens(o->dp_text) : 0;
    double layer_seconds, flop_seconds;
    const int rc = calibration_estimate(c, &weights, &layer_seconds, &flop_seconds, err);
    // Measuring thresholds takes each token once through every layer, not twice.
    const double thresholds = (double)(n_all * n_thresholds) * layer_seconds / (2 * (double)n);
    const double fixed = (double)n_layers * flop_seconds * compensation_flops(matrices, c) + thresholds;
    const double running = (double)n_layers * layer_seconds;
    if (rc || o->quiet || running + fixed < LONG_SECONDS) {
        return rc;
    }
    const size_t fewer = max_size(n / 8, CALIB_MIN_TOKENS);
    fprintf(stderr, "note       calibration on %zu tokens will take about %s", n, duration_text(running + fixed).text);
    if (fewer < n) {
        const double share = (double)fewer / (double)n;
        fprintf(stderr, "; with --calib-tokens %zu about %s", fewer, duration_text(running * share + fixed).text);
    }
    fputc('\n', stderr);
    return OK;
}

/* Save what it takes to go on behind n finished layers, but not too often. That it cannot be saved is no reason to end
 * good work. */
static void save(Pack *p, Calibration *c, size_t n) {
    const bool last = n == (size_t)p->source->config.n_layers;
    const double start = time_ms();
    if (!p->saves || (!last && start - p->saved_ms < SAVE_SHARE * (p->save_ms - SAVE_SECONDS * 1e3))) {
        return;
    }
    PackState s = {.n_layers = n, .report = p->report};
    state_marks(s.marks, p->options, p->source);
    if (!last) {
        s.stream = calibration_stream(c, &s.stream_bytes);
    }
    Error why;
    int rc = writer_sync(p->writer, &s.position, &why);
    rc = rc ? rc : state_save(writer_state_path(p->writer), &s, &why);
    if (rc) {
        p->saves = false;
        if (!p->options->quiet) {
            progress_end(&p->progress);
            fprintf(stderr, "warning    --resume will know of no more than %zu layers: %s\n", p->n_saved, why.text);
        }
        return;
    }
    writer_keep(p->writer, true);
    p->n_saved = n;
    p->saved_ms = time_ms();
    p->save_ms = p->saved_ms - start;
}

static int pack_layers(Pack *p, const Fused layer_matrices[N_LAYER_MATRICES], Calibration *c, Error *err) {
    const int n_layers = p->source->config.n_layers, first = (int)p->first_layer;
    int rc = OK;
    for (int l = first; l < n_layers && !rc; l++) {
        Loaded matrices[N_LAYER_MATRICES];
        rc = load_layer(matrices, p, layer_matrices, l, err);
        if (rc) {
            return rc;
        }
        if (l == first) {
            rc = announce(p, matrices, c, err);
        }
        rc = rc ? rc : pack_layer(p, matrices, c, l == n_layers - 1, err);
        unload_layer(matrices);
        if (!rc) {
            save(p, c, (size_t)l + 1);
            show_layer(p, l);
        }
    }
    return rc;
}

/* The residual stream before the first layer, from the embeddings; or where an earlier process left off. */
static int open_calibration(Calibration **c, Pack *p, const StatsKind kinds[N_DP_SITES], const Fused *embedding,
                            Error *err) {
    const PackOptions *o = p->options;
    const Config *config = &p->source->config;
    const int n_layers = config->n_layers - (int)p->first_layer;
    Loaded table = {0};
    int rc = p->first_layer > 0 ? OK : load(&table, p, embedding, -1, err);
    rc = rc ? rc : calibration_open(c, config, o->be, o->sp_text, table.values, table.stride, kinds, n_layers,
                                    o->n_threads, &p->progress, err);
    unload(&table);
    if (rc || p->first_layer == 0) {
        return rc;
    }
    size_t bytes;
    float *stream = calibration_stream(*c, &bytes);
    if (p->resumed.stream_bytes != bytes) {
        return error_set(err, ERR_FORMAT, "%.250s: is damaged", writer_state_path(p->writer));
    }
    memcpy(stream, p->resumed.stream, bytes);
    state_close(&p->resumed);  // it will be replaced, and its space on disk is needed
    return OK;
}

static int pack_layers_by_calibration(Pack *p, const Fused layer_matrices[N_LAYER_MATRICES], const Fused *embedding,
                                      Error *err) {
    const PackOptions *o = p->options;
    StatsKind kinds[N_DP_SITES];
    for (int site = 0; site < N_DP_SITES; site++) {
        kinds[site] = site_ratio(o, (Site)site) == 0       ? STATS_NONE
                      : o->method == METHOD_WANDA ? STATS_SQUARES
                                                  : STATS_PRODUCTS;
    }
    Calibration *c = NULL;
    int rc = open_calibration(&c, p, kinds, embedding, err);
    rc = rc ? rc : pack_layers(p, layer_matrices, c, err);
    calibration_free(c);
    return rc;
}

/* ---- the file ---- */

static const char *method_name(const PackOptions *o) {
    switch (o->method) {
    case METHOD_WANDA: return "wanda";
    case METHOD_SPARSEGPT: return "sparsegpt";
    default: return o->per_row ? "magnitude per row" : "magnitude";
    }
}

/* Name and size of a calibration text under KEY, KEY_tokens and KEY_length. */
static bool add_text(cJSON *json, const char *key, const CalibText *text) {
    char tokens[40], length[40];
    snprintf(tokens, sizeof tokens, "%s_tokens", key);
    snprintf(length, sizeof length, "%s_length", key);
    return cJSON_AddStringToObject(json, key, text->name) &&
           cJSON_AddNumberToObject(json, tokens, (double)text->n) &&
           cJSON_AddNumberToObject(json, length, (double)text->length);
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
        (!p->source->chat_template ||
         cJSON_AddStringToObject(json, "chat_template", p->source->chat_template)) &&
        cJSON_AddStringToObject(json, "method", method_name(o)) &&
        cJSON_AddStringToObject(json, "prune", o->prune_attn ? "all" : "mlp") &&
        cJSON_AddNumberToObject(json, "sp_asked_mlp", o->sp.mlp) &&
        cJSON_AddNumberToObject(json, "sp_asked_attn", o->prune_attn ? o->sp.attn : 0) &&
        cJSON_AddNumberToObject(json, "sp_reached", reached) &&
        (!pack_measures(o) || add_text(json, "sp_calibration", o->sp_text)) &&
        (o->dp == 0 || (cJSON_AddNumberToObject(json, "dp_default", o->dp) &&
                        add_text(json, "dp_calibration", o->dp_text))) &&
        cJSON_AddStringToObject(json, "converter", VERSION)) {
        text = cJSON_PrintUnformatted(json);
    }
    cJSON_Delete(json);
    return text;
}

static int pack_text(Pack *p, Error *err) {
    char *text = provenance(p);
    const int rc = text ? writer_bytes(p->writer, SECTION_PROVENANCE, "provenance", text, strlen(text), err)
                        : error_set(err, ERR_MEMORY, "no memory for the provenance");
    cJSON_free(text);
    return rc;
}

static int pack_all(Pack *p, Error *err) {
    const PackOptions *o = p->options;
    const Config *c = &p->source->config;
    const size_t q = config_q_dim(c), kv = config_kv_dim(c);
    const Fused embedding = {SECTION_EMBEDDING, "embedding", SITE_HEAD, 1, {{TENSOR_EMBEDDING, "", 0, 1}}};
    const Fused head = {SECTION_HEAD, "head", SITE_HEAD, 1, {{TENSOR_HEAD, "", 0, 1}}};
    const Fused final_norm = {SECTION_FINAL_NORM, "final_norm", SITE_HEAD, 1, {{TENSOR_FINAL_NORM, "", 0, 1}}};
    const Fused layer_matrices[N_LAYER_MATRICES] = {
        {SECTION_ATTN_NORM, "attn_norm", SITE_HEAD, 1, {{TENSOR_ATTN_NORM, "", 0, 1}}},
        {SECTION_QKV, "qkv", SITE_ATTN_IN, 3,
         {{TENSOR_Q, "q", 0, 1}, {TENSOR_K, "k", q, 1}, {TENSOR_V, "v", q + kv, 1}}},
        {SECTION_O, "o", SITE_ATTN_OUT, 1, {{TENSOR_O, "o", 0, 1}}},
        {SECTION_MLP_NORM, "mlp_norm", SITE_HEAD, 1, {{TENSOR_MLP_NORM, "", 0, 1}}},
        {SECTION_GATE_UP, "gate_up", SITE_MLP_IN, 2, {{TENSOR_GATE, "gate", 0, 2}, {TENSOR_UP, "up", 1, 2}}},
        {SECTION_DOWN, "down", SITE_MLP_HIDDEN, 1, {{TENSOR_DOWN, "down", 0, 1}}},
    };
    int rc = p->first_layer > 0 ? OK : pack_matrix(p, &embedding, -1, err);
    if (!rc && p->first_layer < (size_t)c->n_layers) {
        rc = pack_measures(o) ? pack_layers_by_calibration(p, layer_matrices, &embedding, err)
                              : pack_layers_by_magnitude(p, layer_matrices, err);
    }
    rc = rc ? rc : pack_matrix(p, &final_norm, -1, err);
    if (!rc && !p->source->tied) {
        rc = pack_matrix(p, &head, -1, err);
    }
    if (!rc && o->tokenizer) {
        rc = writer_bytes(p->writer, SECTION_TOKENIZER, "tokenizer", o->tokenizer, o->tokenizer_bytes, err);
        p->report.dense_bytes += o->tokenizer_bytes;
    }
    rc = rc ? rc : pack_text(p, err);
    progress_end(&p->progress);
    return rc || o->dp == 0 ? rc : dynamic_add(p->writer, o->be, o->dp_text, o->dp, o->quiet, err);
}

/* Find out where an earlier process left off. */
static int resume(Pack *p, Error *err) {
    if (!pack_measures(p->options)) {
        return error_set(err, ERR_USAGE, "--resume: only what wanda and sparsegpt have begun can be resumed");
    }
    const char *path = writer_state_path(p->writer);
    PackState *s = &p->resumed;
    uint64_t marks[N_STATE_MARKS];
    int rc = state_load(s, path, err);
    if (rc) {
        return rc;
    }
    state_marks(marks, p->options, p->source);
    const char *difference = state_difference(s->marks, marks);
    if (difference) {
        return error_set(err, ERR_USAGE, "%.250s: is of another conversion: %s is not the same", path, difference);
    }
    rc = writer_restore(p->writer, &s->position, err);
    if (!rc) {
        p->report = s->report;
        p->first_layer = p->n_saved = s->n_layers;
    }
    if (!rc && !p->options->quiet) {
        fprintf(stderr, "resume     after %zu of %d layers\n", s->n_layers, p->source->config.n_layers);
    }
    return rc;
}

/* Start anew. What an earlier process has left may have taken hours: only --force gives it up. */
static int forget(Pack *p, Error *err) {
    PackState s;
    const char *path = writer_state_path(p->writer);
    if (state_load(&s, path, NULL) == OK) {
        const size_t n_layers = s.n_layers;
        uint64_t marks[N_STATE_MARKS];
        bool same = pack_measures(p->options);
        if (same) {
            state_marks(marks, p->options, p->source);
            same = !state_difference(s.marks, marks);
        }
        state_close(&s);
        if (!p->options->force) {
            writer_keep(p->writer, true);
            return same ? error_set(err, ERR_WRITE,
                                    "%.250s: the same conversion has come to %zu of %d layers: --resume goes on with it, "
                                    "--force starts anew", path, n_layers, p->source->config.n_layers)
                        : error_set(err, ERR_WRITE,
                                    "%.250s: is what another conversion to this file has begun; --force replaces it", path);
        }
        if (!p->options->quiet) {
            fprintf(stderr, "note       replaces what %s conversion to this file had begun\n", same ? "the same" : "another");
        }
    }
    state_remove(path);
    return OK;
}

/* The failure and what is left after it, in one line. */
static void explain(const Pack *p, int rc, bool keep, Error *err) {
    char reason[sizeof err->text];
    snprintf(reason, sizeof reason, "%.230s", err->text);
    if (keep) {
        error_set(err, rc, "%s after %zu of %d layers; the same command with --resume goes on from there",
                  reason, p->n_saved, p->source->config.n_layers);
    } else if (rc == ERR_STOPPED) {
        error_set(err, rc, "%s; nothing is kept", reason);
    }
}

static int pack_and_finish(Pack *p, Error *err) {
    progress_show(&p->progress, 0, 1);
    int rc = pack_all(p, err);
    progress_end(&p->progress);
    // What a weight or a text is to blame for would only fail again; a file may be put right.
    const bool keep = p->n_saved > 0 && (rc == OK || rc == ERR_STOPPED || rc == ERR_OPEN || rc == ERR_WRITE ||
                                         rc == ERR_MEMORY);
    writer_keep(p->writer, keep);
    if (rc) {
        writer_abort(p->writer);
    } else {
        rc = writer_finish(p->writer, &p->report.file_bytes, err);
    }
    if (rc) {
        explain(p, rc, keep, err);
    }
    return rc;
}

int pack_model(PackReport *report, Source *source, Writer *writer, const PackOptions *options, Error *err) {
    CHECK(!pack_measures(options) || (options->be && options->sp_text));
    CHECK(options->dp == 0 || (options->be && options->dp_text));
    Pack p = {
        .source = source,
        .writer = writer,
        .options = options,
        .progress = {.label = "convert", .unit = "MB", .quiet = options->quiet},
        .saves = pack_measures(options),
    };
    if (pack_measures(options)) {
        p.progress.label = "prune";
        p.progress.unit = "tokens x layers";
    }
    int rc = options->resume ? resume(&p, err) : forget(&p, err);
    if (rc) {
        writer_abort(writer);
    } else {
        rc = pack_and_finish(&p, err);
    }
    state_close(&p.resumed);
    if (!rc) {
        *report = p.report;
    }
    return rc;
}
