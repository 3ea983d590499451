#include "model.h"

#include <math.h>
#include <string.h>

#define DEFAULT_SEQ_LEN 4096
#define DEVICE_PAGE ((size_t)2 << 20)  // what a device rounds large allocations up to

static bool place_file(void *user, Matrix *m, Backend *be, const Checkpoint *ck, const FileSection *s) {
    (void)user;
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

WeightSource weights_of_file(Progress *progress) {
    return (WeightSource){.place = place_file, .progress = progress};
}

/* Weights on their way to a model. */
typedef struct {
    const Checkpoint *ck;
    const WeightSource *source;
    Backend *be;
    double done, total;  // MB
} Loading;

/* A matrix or vector in backend memory. false: no room. */
static bool load_matrix(Matrix *m, Loading *l, uint32_t kind, int layer) {
    const FileSection *s = checkpoint_find(l->ck, kind, layer);
    const double megabytes = (double)s->bytes * 1e-6;  // before placing, which may find out better
    const bool ok = l->source->place(l->source->user, m, l->be, l->ck, s);
    l->done += megabytes;
    if (ok && l->source->progress) {
        progress_show(l->source->progress, l->done, l->total);
    }
    return ok;
}

static bool load_vector(const fp16 **v, Loading *l, uint32_t kind, int layer) {
    Matrix m;
    const bool ok = load_matrix(&m, l, kind, layer);
    if (ok) {
        *v = m.dense;
    }
    return ok;
}

static bool load_weights(Model *m, const Checkpoint *ck, const WeightSource *source) {
    Weights *w = &m->weights;
    Loading loading = {.ck = ck, .source = source, .be = m->be, .total = (double)ck->bytes * 1e-6}, *l = &loading;
    if (source->progress) {
        progress_show(source->progress, 0, loading.total);  // its clock starts
    }
    w->layers = calloc((size_t)m->config.n_layers, sizeof *w->layers);
    if (!w->layers || !load_matrix(&w->embedding, l, SECTION_EMBEDDING, -1) ||
        !load_vector(&w->final_norm, l, SECTION_FINAL_NORM, -1)) {
        return false;
    }
    w->head = w->embedding;  // tied unless the file has a head of its own
    if (checkpoint_find(ck, SECTION_HEAD, -1) && !load_matrix(&w->head, l, SECTION_HEAD, -1)) {
        return false;
    }
    for (int i = 0; i < m->config.n_layers; i++) {
        LayerWeights *layer = &w->layers[i];
        if (!load_vector(&layer->attn_norm, l, SECTION_ATTN_NORM, i) ||
            !load_matrix(&layer->qkv, l, SECTION_QKV, i) || !load_matrix(&layer->o, l, SECTION_O, i) ||
            !load_vector(&layer->mlp_norm, l, SECTION_MLP_NORM, i) ||
            !load_matrix(&layer->gate_up, l, SECTION_GATE_UP, i) ||
            !load_matrix(&layer->down, l, SECTION_DOWN, i)) {
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

/* A buffer of the state. */
typedef struct {
    size_t at;     // of its pointer in RunState
    size_t bytes;  // 0 for the KV cache, which is counted apart
} Buffer;
#define N_BUFFERS 12

/* All buffers of a chunk of n tokens. */
static void list_buffers(Buffer buffers[N_BUFFERS], const Config *c, size_t n, size_t logit_rows) {
    const size_t dim = (size_t)c->dim, q_dim = config_q_dim(c), kv_dim = config_kv_dim(c);
    const Buffer all[N_BUFFERS] = {
        {offsetof(RunState, thresholds), (size_t)c->n_layers * N_DP_SITES * sizeof(float)},
        {offsetof(RunState, ids), n * sizeof(int)},
        {offsetof(RunState, pos), sizeof(int)},
        {offsetof(RunState, x), n * dim * sizeof(float)},
        {offsetof(RunState, x_norm), n * max_size(dim, q_dim) * sizeof(fp16)},
        {offsetof(RunState, qkv), n * (q_dim + 2 * kv_dim) * sizeof(float)},
        {offsetof(RunState, q), n * q_dim * sizeof(fp16)},
        {offsetof(RunState, attn), n * q_dim * sizeof(fp16)},
        {offsetof(RunState, hidden), n * (size_t)c->hidden_dim * sizeof(fp16)},
        {offsetof(RunState, logits), logit_rows * (size_t)c->vocab_size * sizeof(float)},
        {offsetof(RunState, k_cache), 0},
        {offsetof(RunState, v_cache), 0},
    };
    memcpy(buffers, all, sizeof all);
}

static size_t buffer_bytes(const Config *c, size_t n, size_t logit_rows) {
    Buffer buffers[N_BUFFERS];
    size_t bytes = 0;
    list_buffers(buffers, c, n, logit_rows);
    for (size_t i = 0; i < N_BUFFERS; i++) {
        bytes += buffers[i].bytes;
    }
    return bytes;
}

/* The pointer of a buffer, whatever its type. */
static void *get_buffer(const RunState *s, const Buffer *b) {
    void *p;
    memcpy(&p, (const char *)s + b->at, sizeof p);
    return p;
}

static void set_buffer(RunState *s, const Buffer *b, void *p) { memcpy((char *)s + b->at, &p, sizeof p); }

static int alloc_state(Model *m, Error *err) {
    Buffer buffers[N_BUFFERS];
    const size_t cache = config_kv_bytes(&m->config) / 2 * (size_t)m->seq_len;
    list_buffers(buffers, &m->config, (size_t)m->chunk, (size_t)m->logit_rows);
    for (size_t i = 0; i < N_BUFFERS; i++) {
        const Buffer *b = &buffers[i];
        const bool is_cache = b->bytes == 0;
        const size_t bytes = is_cache ? cache : b->bytes;
        void *p = m->be->alloc(m->be, bytes);
        if (!p) {
            return error_set(err, ERR_MEMORY, "no memory for the %s of %d %s (%s asked)",
                             is_cache ? "KV cache" : "activations", is_cache ? m->seq_len : m->chunk,
                             is_cache ? "positions" : "tokens", size_text((double)bytes).text);
        }
        set_buffer(&m->state, b, p);
        *(is_cache ? &m->kv_bytes : &m->scratch_bytes) += bytes;
    }
    return OK;
}

/* Length of the KV cache that a request comes to. */
static int context_of(int *context, const Config *c, int seq_len, Error *err) {
    if (seq_len > c->seq_len || seq_len < 0) {
        return error_set(err, ERR_USAGE, "a context of %d is more than the model's %d", seq_len, c->seq_len);
    }
    *context = seq_len > 0 ? seq_len : c->seq_len < DEFAULT_SEQ_LEN ? c->seq_len : DEFAULT_SEQ_LEN;
    return OK;
}

int model_open(Model *m, const Config *config, Backend *be, int seq_len, bool all_logits, Error *err) {
    int context = 0;
    int rc = context_of(&context, config, seq_len, err);
    if (rc) {
        return rc;
    }
    const int chunk = context < be->max_tokens ? context : be->max_tokens;
    Model opened = {
        .config = *config,
        .be = be,
        .seq_len = context,
        .chunk = chunk,
        .logit_rows = all_logits ? chunk : 1,
    };
    rc = load_rope(&opened) ? alloc_state(&opened, err)
                            : error_set(err, ERR_MEMORY, "no memory for the rotations of %d positions", context);
    if (rc) {
        model_free(&opened);
        return rc;
    }
    *m = opened;
    return OK;
}

/* Most work space that a product of a chunk of n tokens takes. */
static size_t work_bytes(const Checkpoint *ck, Backend *be, int n) {
    size_t most = 0;
    for (size_t i = 0; i < ck->n_sections; i++) {
        const FileSection *s = &ck->sections[i];
        if (s->kind == SECTION_QKV || s->kind == SECTION_O || s->kind == SECTION_GATE_UP || s->kind == SECTION_DOWN) {
            const Matrix shape = checkpoint_shape(s);
            most = max_size(most, be->product_bytes(be, &shape, n, s->kind == SECTION_GATE_UP));
        }
    }
    return most;
}

static size_t weight_bytes(const Checkpoint *ck) {
    size_t bytes = 0;
    for (size_t i = 0; i < ck->n_sections; i++) {
        const size_t n = ck->sections[i].value_type == VALUE_FP16 ? ck->sections[i].bytes : 0;
        bytes += n > DEVICE_PAGE / 2 ? round_up(n, DEVICE_PAGE) : n;
    }
    return bytes;
}

int model_plan(MemoryPlan *plan, const Checkpoint *ck, Backend *be, int seq_len, bool all_logits,
               const WeightSource *source, Error *err) {
    const Config *c = &ck->config;
    int context = 0;
    const int rc = context_of(&context, c, seq_len, err);
    if (rc) {
        return rc;
    }
    const int chunk = context < be->max_tokens ? context : be->max_tokens;
    const size_t one = buffer_bytes(c, 1, 1), token = buffer_bytes(c, 2, all_logits ? 2 : 1) - one;
    *plan = (MemoryPlan){
        .weights = source->made || be->own_memory ? weight_bytes(ck) : 0,
        .kv_position = config_kv_bytes(c),
        .position = (size_t)c->head_dim * sizeof(float),
        .token = token,
        .fixed = one - token + work_bytes(ck, be, chunk),
        .free = be->memory_free(be),
        .context = context,
        .max_tokens = be->max_tokens,
    };
    return plan_check(plan, err);
}

int model_load_from(Model *m, const Checkpoint *ck, Backend *be, int seq_len, bool all_logits,
                    const WeightSource *source, Error *err) {
    Model loaded;
    MemoryPlan plan;
    int rc = model_plan(&plan, ck, be, seq_len, all_logits, source, err);
    rc = rc ? rc : model_open(&loaded, &ck->config, be, seq_len, all_logits, err);
    if (rc) {
        return rc;
    }
    if (!load_weights(&loaded, ck, source)) {
        model_free(&loaded);
        return error_set(err, ERR_MEMORY, "no memory for the weights (%s)", size_text((double)ck->bytes).text);
    }
    loaded.weight_bytes = ck->bytes;
    *m = loaded;
    return OK;
}

int model_load(Model *m, const Checkpoint *ck, Backend *be, int seq_len, bool all_logits, Error *err) {
    const WeightSource file = weights_of_file(NULL);
    return model_load_from(m, ck, be, seq_len, all_logits, &file, err);
}

void model_free(Model *m) {
    if (m->be) {
        Buffer buffers[N_BUFFERS];
        list_buffers(buffers, &m->config, 1, 1);
        for (size_t i = 0; i < N_BUFFERS; i++) {
            m->be->release(m->be, get_buffer(&m->state, &buffers[i]));
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
    be->attention(be, s->attn, s->q, s->k_cache + cache, s->v_cache + cache, s->qkv, m->weights.rope, &shape, s->pos, n);
    show_input(m, layer, SITE_ATTN_OUT, s->attn, n, q_dim);
    be->matmul_add(be, s->x, &w->o, s->attn, n, t[SITE_ATTN_OUT]);

    // MLP: x += Wdown (silu(Wgate norm(x)) * Wup norm(x))
    be->rmsnorm(be, s->x_norm, s->x, w->mlp_norm, n, c->dim, c->norm_eps);
    show_input(m, layer, SITE_MLP_IN, s->x_norm, n, c->dim);
    be->matmul_swiglu(be, s->hidden, &w->gate_up, s->x_norm, n, t[SITE_MLP_IN]);
    show_input(m, layer, SITE_MLP_HIDDEN, s->hidden, n, c->hidden_dim);
    be->matmul_add(be, s->x, &w->down, s->hidden, n, t[SITE_MLP_HIDDEN]);
}

static bool interrupted(const Model *m) { return m->interrupt && *m->interrupt; }

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
    for (int l = 0; l < c->n_layers && !(phase == PREFILL && interrupted(m)); l++) {
        model_layer(m, &m->weights.layers[l], l, n, phase);
    }
    // logits of the last token, or of all
    const int rows = n < m->logit_rows ? n : m->logit_rows;
    be->rmsnorm(be, s->x_norm, s->x + (size_t)(n - rows) * (size_t)c->dim, m->weights.final_norm, rows, c->dim,
                c->norm_eps);
    be->matmul(be, s->logits, &m->weights.head, s->x_norm, rows, NULL);
    be->end_step(be);
}

void model_rehearse(Model *m) {
    const int id = 0;
    Error ignored = {0};  // whatever this token does to the model, nobody asked for it
    for (int step = 0; m->be->records && step < 2; step++) {  // the first sets things up, the second is recorded
        model_forward(m, &id, 1, 0, DECODE);
    }
    m->be->finish(m->be, &ignored);
}

int model_prefill(Model *m, const int *ids, int n, int pos, Error *err) {
    for (int done = 0; done < n && !interrupted(m); done += m->chunk) {
        model_forward(m, ids + done, n - done < m->chunk ? n - done : m->chunk, pos + done, PREFILL);
    }
    return m->be->finish(m->be, err);
}

size_t model_step_bytes(const Model *m, int pos) {
    const Config *c = &m->config;
    const size_t vectors = 2 * (size_t)c->n_layers + 1 + 1;  // norms, and the embedding's row
    return vectors * (size_t)c->dim * sizeof(fp16) + config_kv_bytes(c) * (size_t)(pos + 1);
}
