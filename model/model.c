#include "model.h"

#include <math.h>
#include <string.h>

#define DEFAULT_SEQ_LEN 4096

/* A matrix or vector of the file in backend memory. false: no room. */
static bool load_matrix(Matrix *m, const Checkpoint *ck, Backend *be, uint32_t kind, int layer) {
    const FileSection *s = checkpoint_find(ck, kind, layer);
    const unsigned char *host = checkpoint_bytes(ck, s);
    const unsigned char *device = be->upload(be, host, s->bytes);
    if (!device) {
        return false;
    }
    *m = checkpoint_matrix(ck, s);
    if (m->format == FORMAT_DENSE) {
        m->dense = (const fp16 *)device;
    } else {
        m->cbc.tile_offset = (const uint32_t *)(device + ((const unsigned char *)m->cbc.tile_offset - host));
        m->cbc.col_info = (const uint32_t *)(device + ((const unsigned char *)m->cbc.col_info - host));
        m->cbc.bitmap = (const uint64_t *)(device + ((const unsigned char *)m->cbc.bitmap - host));
        m->cbc.values = (const fp16 *)(device + ((const unsigned char *)m->cbc.values - host));
    }
    return true;
}

static bool load_vector(const fp16 **v, const Checkpoint *ck, Backend *be, uint32_t kind, int layer) {
    Matrix m;
    const bool ok = load_matrix(&m, ck, be, kind, layer);
    if (ok) {
        *v = m.dense;
    }
    return ok;
}

static bool load_weights(Model *m, const Checkpoint *ck) {
    Weights *w = &m->weights;
    w->layers = calloc((size_t)m->config.n_layers, sizeof *w->layers);
    if (!w->layers || !load_matrix(&w->embedding, ck, m->be, SECTION_EMBEDDING, -1) ||
        !load_vector(&w->final_norm, ck, m->be, SECTION_FINAL_NORM, -1)) {
        return false;
    }
    w->head = w->embedding;  // tied unless the file has a head of its own
    if (checkpoint_find(ck, SECTION_HEAD, -1) && !load_matrix(&w->head, ck, m->be, SECTION_HEAD, -1)) {
        return false;
    }
    for (int l = 0; l < m->config.n_layers; l++) {
        LayerWeights *layer = &w->layers[l];
        if (!load_vector(&layer->attn_norm, ck, m->be, SECTION_ATTN_NORM, l) ||
            !load_matrix(&layer->qkv, ck, m->be, SECTION_QKV, l) ||
            !load_matrix(&layer->o, ck, m->be, SECTION_O, l) ||
            !load_vector(&layer->mlp_norm, ck, m->be, SECTION_MLP_NORM, l) ||
            !load_matrix(&layer->gate_up, ck, m->be, SECTION_GATE_UP, l) ||
            !load_matrix(&layer->down, ck, m->be, SECTION_DOWN, l)) {
            return false;
        }
    }
    return true;
}

/* Angles in double: at position 4096 a float angle is already wrong in the fourth digit. */
static bool load_rope(Model *m) {
    const size_t head_dim = (size_t)m->config.head_dim, seq_len = (size_t)m->seq_len;
    m->host_rope = memory_alloc(seq_len * head_dim * sizeof *m->host_rope);
    if (!m->host_rope) {
        return false;
    }
    for (size_t i = 0; i < head_dim; i += 2) {
        const double frequency = pow(m->config.rope_theta, -(double)i / (double)head_dim);
        for (size_t pos = 0; pos < seq_len; pos++) {
            m->host_rope[pos * head_dim + i] = (float)cos((double)pos * frequency);
            m->host_rope[pos * head_dim + i + 1] = (float)sin((double)pos * frequency);
        }
    }
    m->weights.rope = m->be->upload(m->be, m->host_rope, seq_len * head_dim * sizeof *m->host_rope);
    return m->weights.rope != NULL;
}

/* One buffer, its size added to *total. */
static void *alloc_buffer(Backend *be, size_t bytes, size_t *total) {
    *total += bytes;
    return be->alloc(be, bytes);
}

static bool alloc_scratch(Model *m) {
    const Config *c = &m->config;
    const size_t n = (size_t)m->chunk, dim = (size_t)c->dim, q_dim = config_q_dim(c);
    const size_t widest = dim > q_dim ? dim : q_dim;
    RunState *s = &m->state;
    size_t *total = &m->scratch_bytes;
    return (s->thresholds = alloc_buffer(
                m->be, (size_t)c->n_layers * N_DP_SITES * sizeof *s->thresholds, total)) &&
           (s->ids = alloc_buffer(m->be, n * sizeof *s->ids, total)) &&
           (s->pos = alloc_buffer(m->be, sizeof *s->pos, total)) &&
           (s->x = alloc_buffer(m->be, n * dim * sizeof *s->x, total)) &&
           (s->x_norm = alloc_buffer(m->be, n * widest * sizeof *s->x_norm, total)) &&
           (s->qkv = alloc_buffer(m->be, n * (q_dim + 2 * config_kv_dim(c)) * sizeof *s->qkv, total)) &&
           (s->q = alloc_buffer(m->be, n * q_dim * sizeof *s->q, total)) &&
           (s->attn = alloc_buffer(m->be, n * q_dim * sizeof *s->attn, total)) &&
           (s->hidden = alloc_buffer(m->be, n * (size_t)c->hidden_dim * sizeof *s->hidden, total)) &&
           (s->logits = alloc_buffer(
                m->be, (size_t)m->logit_rows * (size_t)c->vocab_size * sizeof *s->logits, total));
}

/* The KV cache; if there is no room, err says how long a context would have fit. */
static int alloc_cache(Model *m, Error *err) {
    RunState *s = &m->state;
    for (int seq_len = m->seq_len; seq_len > 0; seq_len /= 2) {
        const size_t bytes = config_kv_bytes(&m->config) * (size_t)seq_len;
        s->k_cache = m->be->alloc(m->be, bytes / 2);
        s->v_cache = m->be->alloc(m->be, bytes / 2);
        if (s->k_cache && s->v_cache) {
            m->kv_bytes = bytes;
            return seq_len == m->seq_len
                       ? OK
                       : error_set(err, ERR_MEMORY,
                                   "no memory for a KV cache of %d positions (%.2f GB); -c %d would fit", m->seq_len,
                                   (double)config_kv_bytes(&m->config) * m->seq_len * 1e-9, seq_len);
        }
        m->be->release(m->be, s->k_cache);
        m->be->release(m->be, s->v_cache);
        s->k_cache = s->v_cache = NULL;
    }
    return error_set(err, ERR_MEMORY, "no memory for a KV cache");
}

int model_open(Model *m, const Config *config, Backend *be, int seq_len, bool all_logits, Error *err) {
    const Config *c = config;
    if (seq_len > c->seq_len || seq_len < 0) {
        return error_set(err, ERR_USAGE, "a context of %d is more than the model's %d", seq_len, c->seq_len);
    }
    const int longest = seq_len > 0 ? seq_len : c->seq_len < DEFAULT_SEQ_LEN ? c->seq_len : DEFAULT_SEQ_LEN;
    const int chunk = longest < be->max_tokens ? longest : be->max_tokens;
    Model opened = {
        .config = *c,
        .be = be,
        .seq_len = longest,
        .chunk = chunk,
        .logit_rows = all_logits ? chunk : 1,
    };
    const int rc = load_rope(&opened) && alloc_scratch(&opened)
                       ? alloc_cache(&opened, err)
                       : error_set(err, ERR_MEMORY, "no memory for activations of %d tokens (%.2f GB)", chunk,
                                   (double)opened.scratch_bytes * 1e-9);
    if (rc) {
        model_free(&opened);
        return rc;
    }
    *m = opened;
    return OK;
}

int model_load(Model *m, const Checkpoint *ck, Backend *be, int seq_len, bool all_logits, Error *err) {
    Model loaded;
    const int rc = model_open(&loaded, &ck->config, be, seq_len, all_logits, err);
    if (rc) {
        return rc;
    }
    loaded.weight_bytes = ck->bytes;
    if (!load_weights(&loaded, ck)) {
        model_free(&loaded);
        return error_set(err, ERR_MEMORY, "no memory for the weights (%.2f GB)", (double)ck->bytes * 1e-9);
    }
    *m = loaded;
    return OK;
}

void model_free(Model *m) {
    if (m->be) {
        RunState *s = &m->state;
        void *const buffers[] = {s->ids,  s->pos,    s->x,      s->x_norm,  s->qkv,     s->q,
                                 s->attn, s->hidden, s->logits, s->k_cache, s->v_cache, s->thresholds};
        for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
            m->be->release(m->be, buffers[i]);
        }
    }
    free(m->weights.layers);
    free(m->host_rope);
    *m = (Model){0};
}

void model_set_thresholds(Model *m, const float *values) {
    m->be->write(m->be, m->state.thresholds, values,
                 (size_t)m->config.n_layers * N_DP_SITES * sizeof *m->state.thresholds);
}

static void show_input(const Model *m, int layer, Site site, const fp16 *x, int n, int width) {
    if (m->hook) {
        m->hook->input(m->hook->user, layer, site, x, n, width);
    }
}

void model_layer(Model *m, const LayerWeights *w, int layer, int n, Phase phase) {
    const Config *c = &m->config;
    Backend *be = m->be;
    RunState *s = &m->state;
    const AttentionShape shape = {c->n_heads, c->n_kv_heads, c->head_dim, m->seq_len};
    const size_t cache = (size_t)layer * config_kv_dim(c) * (size_t)m->seq_len;
    const int q_dim = c->n_heads * c->head_dim;
    const float *t[N_DP_SITES];
    for (int site = 0; site < N_DP_SITES; site++) {
        t[site] = phase == DECODE ? s->thresholds + layer * N_DP_SITES + site : NULL;
    }

    // attention: x += Wo attention(rope(Wq norm(x)), rope(Wk norm(x)), Wv norm(x))
    be->rmsnorm(be, s->x_norm, s->x, w->attn_norm, n, c->dim, c->norm_eps);
    show_input(m, layer, SITE_ATTN_IN, s->x_norm, n, c->dim);
    be->matmul(be, s->qkv, &w->qkv, s->x_norm, n, t[SITE_ATTN_IN]);
    be->rope_append(be, s->q, s->k_cache + cache, s->v_cache + cache, s->qkv, m->weights.rope, &shape, s->pos, n);
    be->attention(be, s->attn, s->q, s->k_cache + cache, s->v_cache + cache, &shape, s->pos, n);
    show_input(m, layer, SITE_ATTN_OUT, s->attn, n, q_dim);
    be->matmul_add(be, s->x, &w->o, s->attn, n, t[SITE_ATTN_OUT]);

    // MLP: x += Wdown (silu(Wgate norm(x)) * Wup norm(x))
    be->rmsnorm(be, s->x_norm, s->x, w->mlp_norm, n, c->dim, c->norm_eps);
    show_input(m, layer, SITE_MLP_IN, s->x_norm, n, c->dim);
    be->matmul_swiglu(be, s->hidden, &w->gate_up, s->x_norm, n, t[SITE_MLP_IN]);
    show_input(m, layer, SITE_MLP_HIDDEN, s->hidden, n, c->hidden_dim);
    be->matmul_add(be, s->x, &w->down, s->hidden, n, t[SITE_MLP_HIDDEN]);
}

void model_forward(Model *m, const int *ids, int n, int pos, Phase phase) {
    const Config *c = &m->config;
    Backend *be = m->be;
    RunState *s = &m->state;
    CHECK(n >= 1 && n <= m->chunk && pos >= 0 && pos + n <= m->seq_len);

    be->write(be, s->ids, ids, (size_t)n * sizeof *ids);
    be->write(be, s->pos, &pos, sizeof pos);
    if (!be->begin_step(be, n == 1 && phase == DECODE && !m->hook)) {  // a step that is replayed calls no hook
        return;
    }
    // x (n, dim): the residual stream
    be->embed(be, s->x, &m->weights.embedding, s->ids, n);
    for (int l = 0; l < c->n_layers; l++) {
        model_layer(m, &m->weights.layers[l], l, n, phase);
    }
    // logits of the last token, or of all
    const int rows = n < m->logit_rows ? n : m->logit_rows;
    be->rmsnorm(be, s->x_norm, s->x + (size_t)(n - rows) * (size_t)c->dim, m->weights.final_norm, rows, c->dim,
                c->norm_eps);
    be->matmul(be, s->logits, &m->weights.head, s->x_norm, rows, NULL);
    be->end_step(be);
}

int model_prefill(Model *m, const int *ids, int n, int pos, Error *err) {
    for (int done = 0; done < n; done += m->chunk) {
        model_forward(m, ids + done, n - done < m->chunk ? n - done : m->chunk, pos + done, PREFILL);
    }
    return m->be->finish(m->be, err);
}

size_t model_step_bytes(const Model *m, int pos) {
    const Config *c = &m->config;
    const size_t vectors = 2 * (size_t)c->n_layers + 1 + 1;  // norms, and the embedding's row
    return vectors * (size_t)c->dim * sizeof(fp16) + config_kv_bytes(c) * (size_t)(pos + 1);
}
