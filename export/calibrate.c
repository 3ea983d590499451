#include "calibrate.h"

#include <string.h>

#include "interrupt.h"
#include "rank_update.h"

#define STRIP 256  // columns whose squares one thread sums up

struct Calibration {
    Model model;           // the state for one layer, no weights
    LayerWeights weights;  // of the layer being run, in the backend's memory
    const CalibText *text;
    int n_threads;
    float *x;              // (text->n, dim) residual stream
    InputStats stats[N_DP_SITES];
    fp16 *inputs;          // (chunk, widest) a site's inputs in host memory
    double *block;         // (RANK_BLOCK, widest) some of them in double
    size_t n_done, n_total;  // tokens through a layer
    Progress *progress;
};

/* ---- statistics ---- */

static void add_squares(double *sums, const fp16 *x, size_t n, size_t width, int n_threads) {
#pragma omp parallel for num_threads(n_threads)
    for (size_t first = 0; first < width; first += STRIP) {
        const size_t end = min_size(first + STRIP, width);
        for (size_t t = 0; t < n; t++) {
            for (size_t i = first; i < end; i++) {
                const double v = (double)fp16_to_float(x[t * width + i]);
                sums[i] += v * v;
            }
        }
    }
}

static void add_products(Calibration *c, double *sums, const fp16 *x, size_t n, size_t width) {
    for (size_t first = 0; first < n; first += RANK_BLOCK) {
        const size_t size = min_size(RANK_BLOCK, n - first);
#pragma omp parallel for num_threads(c->n_threads)
        for (size_t t = 0; t < size; t++) {
            for (size_t i = 0; i < width; i++) {
                c->block[t * width + i] = (double)fp16_to_float(x[(first + t) * width + i]);
            }
        }
        const ConstView block = {c->block, width};
        rank_update((View){sums, width}, block, block, width, width, size, 1, true, c->n_threads);
    }
}

/* InputHook: called within model_layer. */
static void see_input(void *user, int layer, Site site, const fp16 *x, int n, int width) {
    Calibration *c = user;
    InputStats *s = &c->stats[site];
    const size_t n_tokens = (size_t)n, n_inputs = (size_t)width;
    (void)layer;
    CHECK(n_inputs == s->width);
    if (s->kind == STATS_NONE) {
        return;
    }
    c->model.be->read(c->model.be, c->inputs, x, n_tokens * n_inputs * sizeof *x);
    if (s->kind == STATS_SQUARES) {
        add_squares(s->sums, c->inputs, n_tokens, n_inputs, c->n_threads);
    } else {
        add_products(c, s->sums, c->inputs, n_tokens, n_inputs);
    }
}

static size_t stats_length(const InputStats *s) {
    return s->kind == STATS_NONE ? 0 : s->kind == STATS_SQUARES ? s->width : s->width * s->width;
}

static void clear_stats(Calibration *c) {
    for (int site = 0; site < N_DP_SITES; site++) {
        InputStats *s = &c->stats[site];
        if (s->kind != STATS_NONE) {
            memset(s->sums, 0, stats_length(s) * sizeof *s->sums);
        }
    }
}

InputStats *calibration_stats(Calibration *c, Site site) { return &c->stats[site]; }

float *calibration_stream(Calibration *c, size_t *bytes) {
    *bytes = c->text->n * (size_t)c->model.config.dim * sizeof *c->x;
    return c->x;
}

/* ---- one layer ---- */

static void put_vector(Calibration *c, const fp16 *to, const fp16 *from, size_t n) {
    // the backend's own memory, which the layer reads only
    c->model.be->write(c->model.be, (void *)to, from, n * sizeof *from);
}

static void put_matrix(Calibration *c, Matrix *to, const Matrix *from) {
    CHECK(from->format == FORMAT_DENSE);
    const fp16 *values = to->dense;
    *to = *from;
    to->dense = values;
    put_vector(c, values, from->dense, from->rows * from->stride);
}

static void put_layer(Calibration *c, const LayerWeights *w) {
    const size_t dim = (size_t)c->model.config.dim;
    put_vector(c, c->weights.attn_norm, w->attn_norm, dim);
    put_vector(c, c->weights.mlp_norm, w->mlp_norm, dim);
    put_matrix(c, &c->weights.qkv, &w->qkv);
    put_matrix(c, &c->weights.o, &w->o);
    put_matrix(c, &c->weights.gate_up, &w->gate_up);
    put_matrix(c, &c->weights.down, &w->down);
}

/* Run the layer on one sequence, from token start on; keep: its residual stream moves on. */
static void run_sequence(Calibration *c, size_t start, size_t n_sequence, bool keep) {
    Model *m = &c->model;
    Backend *be = m->be;
    const size_t dim = (size_t)m->config.dim;
    for (size_t done = 0; done < n_sequence && !interrupt_signal(); done += (size_t)m->chunk) {
        const size_t n = min_size((size_t)m->chunk, n_sequence - done);
        float *x = c->x + (start + done) * dim;
        const int pos = (int)done;
        be->write(be, m->state.x, x, n * dim * sizeof *x);
        be->write(be, m->state.pos, &pos, sizeof pos);
        be->begin_step(be, false);
        model_layer(m, &c->weights, 0, (int)n, PREFILL);
        be->end_step(be);
        if (keep) {
            be->read(be, x, m->state.x, n * dim * sizeof *x);
        }
    }
}

/* Run the layer on sequences first .. end - 1. */
static int run_sequences(Calibration *c, size_t first, size_t end, bool keep, Error *err) {
    const size_t length = c->text->length;
    Backend *be = c->model.be;
    for (size_t s = first; s < end && !interrupt_signal(); s++) {
        const size_t start = s * length, n = min_size(length, c->text->n - start);
        run_sequence(c, start, n, keep);
        if (c->progress) {
            c->n_done += n;
            progress_show(c->progress, (double)c->n_done, (double)c->n_total);
        }
    }
    const int rc = be->finish(be, err);
    return rc ? rc : interrupt_check(err);
}

static int measure_sequences(Calibration *c, size_t n_sequences, Error *err) {
    const InputHook hook = {see_input, c};
    clear_stats(c);
    c->model.hook = &hook;
    const int rc = run_sequences(c, 0, n_sequences, false, err);
    c->model.hook = NULL;
    return rc;
}

int calibration_measure(Calibration *c, const LayerWeights *w, Error *err) {
    put_layer(c, w);
    return measure_sequences(c, calib_text_sequences(c->text), err);
}

int calibration_advance(Calibration *c, const LayerWeights *w, Error *err) {
    put_layer(c, w);
    return run_sequences(c, 0, calib_text_sequences(c->text), true, err);
}

/* Seconds of one operation of rank_update, from one update of the widest sums. */
static double time_flop(Calibration *c) {
    const InputStats *widest = &c->stats[0];
    for (int site = 1; site < N_DP_SITES; site++) {
        widest = stats_length(&c->stats[site]) > stats_length(widest) ? &c->stats[site] : widest;
    }
    if (widest->kind != STATS_PRODUCTS) {
        return 0;
    }
    const size_t n = widest->width;
    const double start = time_ms();
    rank_update((View){widest->sums, n}, (ConstView){c->block, n}, (ConstView){c->block, n}, n, n, RANK_BLOCK, 1, true,
                c->n_threads);
    return (time_ms() - start) * 1e-3 / ((double)n * (double)n * RANK_BLOCK);
}

int calibration_estimate(Calibration *c, const LayerWeights *w, double *layer_seconds, double *flop_seconds,
                         Error *err) {
    Progress *progress = c->progress;
    const size_t n_probe = min_size(c->text->length, c->text->n);
    c->progress = NULL;
    put_layer(c, w);
    const double start = time_ms();
    int rc = measure_sequences(c, 1, err);
    rc = rc ? rc : run_sequences(c, 0, 1, false, err);
    *layer_seconds = (time_ms() - start) * 1e-3 * (double)c->text->n / (double)n_probe;
    *flop_seconds = time_flop(c);
    c->progress = progress;
    return rc;
}

/* ---- memory ---- */

static bool alloc_vector(Backend *be, const fp16 **v, size_t n) { return (*v = be->alloc(be, n * sizeof **v)); }

static bool alloc_layer(LayerWeights *w, const Config *c, Backend *be) {
    const size_t dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim, q = config_q_dim(c), kv = config_kv_dim(c);
    return alloc_vector(be, &w->attn_norm, dim) && alloc_vector(be, &w->mlp_norm, dim) &&
           alloc_vector(be, &w->qkv.dense, (q + 2 * kv) * dense_stride(dim)) &&
           alloc_vector(be, &w->o.dense, dim * dense_stride(q)) &&
           alloc_vector(be, &w->gate_up.dense, 2 * hidden * dense_stride(dim)) &&
           alloc_vector(be, &w->down.dense, dim * dense_stride(hidden));
}

static void free_layer(LayerWeights *w, Backend *be) {
    const fp16 *const buffers[] = {w->attn_norm, w->mlp_norm,      w->qkv.dense,
                                   w->o.dense,   w->gate_up.dense, w->down.dense};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        be->release(be, (void *)buffers[i]);
    }
}

static bool alloc_sums(Calibration *c, const Config *config, const StatsKind kinds[N_DP_SITES]) {
    const size_t widths[N_DP_SITES] = {
        [SITE_ATTN_IN] = (size_t)config->dim,
        [SITE_ATTN_OUT] = config_q_dim(config),
        [SITE_MLP_IN] = (size_t)config->dim,
        [SITE_MLP_HIDDEN] = (size_t)config->hidden_dim,
    };
    size_t widest = 0;
    for (int site = 0; site < N_DP_SITES; site++) {
        InputStats *s = &c->stats[site];
        *s = (InputStats){.kind = kinds[site], .width = widths[site]};
        if (s->kind != STATS_NONE && !(s->sums = memory_alloc(stats_length(s) * sizeof *s->sums))) {
            return false;
        }
        widest = max_size(widest, s->width);
    }
    c->inputs = memory_alloc((size_t)c->model.chunk * widest * sizeof *c->inputs);
    c->block = memory_alloc(RANK_BLOCK * widest * sizeof *c->block);
    return c->inputs && c->block;
}

static bool alloc_stream(Calibration *c) {
    size_t bytes;
    return size_mul(&bytes, c->text->n, (size_t)c->model.config.dim * sizeof *c->x) && (c->x = memory_alloc(bytes));
}

static void embed_text(Calibration *c, const fp16 *embedding, size_t stride) {
    const size_t dim = (size_t)c->model.config.dim, n = c->text->n;
#pragma omp parallel for num_threads(c->n_threads)
    for (size_t t = 0; t < n; t++) {
        for (size_t i = 0; i < dim; i++) {
            c->x[t * dim + i] = fp16_to_float(embedding[(size_t)c->text->ids[t] * stride + i]);
        }
    }
}

int calibration_open(Calibration **calibration, const Config *config, Backend *be, const CalibText *text,
                     const fp16 *embedding, size_t stride, const StatsKind kinds[N_DP_SITES], int n_layers,
                     int n_threads, Progress *progress, Error *err) {
    Calibration *c = calloc(1, sizeof *c);
    Config one_layer = *config;
    one_layer.n_layers = 1;
    if (!c) {
        return error_set(err, ERR_MEMORY, "no memory for calibration");
    }
    c->text = text;
    c->n_threads = n_threads;
    c->progress = progress;
    c->n_total = 2 * text->n * (size_t)n_layers;
    const int rc = model_open(&c->model, &one_layer, be, (int)text->length, false, err);
    if (rc) {
        calibration_free(c);
        return rc;
    }
    if (!alloc_layer(&c->weights, config, be) || !alloc_sums(c, config, kinds) || !alloc_stream(c)) {
        calibration_free(c);
        return error_set(err, ERR_MEMORY, "no memory to calibrate on %zu tokens: --calib-tokens takes fewer", text->n);
    }
    if (embedding) {
        embed_text(c, embedding, stride);
    }
    *calibration = c;
    return OK;
}

void calibration_free(Calibration *c) {
    if (!c) {
        return;
    }
    if (c->model.be) {
        free_layer(&c->weights, c->model.be);
    }
    for (int site = 0; site < N_DP_SITES; site++) {
        free(c->stats[site].sums);
    }
    model_free(&c->model);
    free(c->inputs);
    free(c->block);
    free(c->x);
    free(c);
}
