#include "synthetic.h"

#include <string.h>

#include "quantiles.h"

#define N_LAYER_KINDS 6
#define MEASURED_INPUTS 500000  // of every site: a standard error below 0.1 %
#define MOST_DECODE_TOKENS 512  // of a sequence, taken from its start
#define MOST_TOKENS 16384       // of all sequences that a table is measured on

/* ---- what the model will be ---- */

static void add_section(Synthetic *s, uint32_t kind, int layer, size_t rows, size_t cols, bool pruned) {
    const size_t dense = rows * dense_stride(cols) * sizeof(fp16);
    const double kept = pruned ? 1 - s->params.sp : 1;
    const size_t nnz = (size_t)(kept * (double)rows * (double)cols);
    const size_t compressed = tiled_cbc_storage_formula(rows, cols, nnz);
    const bool tiled = pruned && (s->params.dp > 0 || compressed < dense);
    s->sections[s->ck.n_sections++] = (FileSection){
        .kind = kind,
        .layer = layer,
        .flags = pruned ? SECTION_PRUNED : 0,
        .format = tiled ? FORMAT_TILED_CBC : FORMAT_DENSE,
        .value_type = VALUE_FP16,
        .rows = rows,
        .cols = cols,
        .nnz = nnz,
        // Padding of columns: half of what it can be, a little more to be on the safe side of a plan.
        .bytes = tiled ? compressed + rows * cols / TILE_M * COLUMN_ALIGN : dense,
    };
    s->ck.bytes += s->sections[s->ck.n_sections - 1].bytes;
}

static void list_sections(Synthetic *s) {
    const Config *c = &s->ck.config;
    const size_t dim = (size_t)c->dim, hidden_dim = (size_t)c->hidden_dim, vocab_size = (size_t)c->vocab_size;
    const size_t q_dim = config_q_dim(c), kv_dim = config_kv_dim(c);
    const bool attn = s->params.prune_attn;
    add_section(s, SECTION_EMBEDDING, -1, vocab_size, dim, false);
    add_section(s, SECTION_HEAD, -1, vocab_size, dim, false);
    add_section(s, SECTION_FINAL_NORM, -1, 1, dim, false);
    for (int layer = 0; layer < c->n_layers; layer++) {
        add_section(s, SECTION_ATTN_NORM, layer, 1, dim, false);
        add_section(s, SECTION_QKV, layer, q_dim + 2 * kv_dim, dim, attn);
        add_section(s, SECTION_O, layer, dim, q_dim, attn);
        add_section(s, SECTION_MLP_NORM, layer, 1, dim, false);
        add_section(s, SECTION_GATE_UP, layer, 2 * hidden_dim, dim, true);
        add_section(s, SECTION_DOWN, layer, dim, hidden_dim, true);
    }
}

int synthetic_open(Synthetic *s, const SyntheticParams *params, Error *err) {
    Synthetic opened = {.params = *params};
    Config *c = &opened.ck.config;
    int rc = config_parse_shape(c, params->shape, err);
    if (rc) {
        return rc;
    }
    c->seq_len = params->context > c->seq_len ? params->context : c->seq_len;
    rc = config_check(c, err);
    if (rc) {
        return rc;
    }
    const size_t n_sections = 3 + N_LAYER_KINDS * (size_t)c->n_layers + 1;  // the last for quantiles
    opened.sections = calloc(n_sections, sizeof *opened.sections);
    opened.values = memory_alloc(WEIGHT_VALUES * sizeof *opened.values);
    opened.ones = memory_alloc((size_t)c->dim * sizeof *opened.ones);
    if (!opened.sections || !opened.values || !opened.ones) {
        synthetic_close(&opened);
        return error_set(err, ERR_MEMORY, "no memory for a list of %zu matrices", n_sections);
    }
    random_weight_values(opened.values);
    for (int i = 0; i < c->dim; i++) {
        opened.ones[i] = FP16_ONE;
    }
    opened.ck.sections = opened.sections;
    list_sections(&opened);
    *s = opened;
    return OK;
}

void synthetic_close(Synthetic *s) {
    free(s->sections);
    free(s->values);
    free(s->ones);
    free(s->quantiles);
    *s = (Synthetic){0};
}

/* ---- making it ---- */

/* Bytes of a matrix's arrays, slack included. */
static size_t storage_bytes(const Matrix *m) {
    const size_t dense = m->rows * m->stride * sizeof(fp16);
    return MEMORY_SLACK + (m->format == FORMAT_DENSE ? dense : tiled_cbc_storage(&m->cbc));
}

/* What the matrices and norms have in common. */
static bool upload_shared(Synthetic *s, Backend *be) {
    if (!s->backend_values) {
        s->backend_values = be->upload(be, s->values, WEIGHT_VALUES * sizeof *s->values);
        s->backend_ones = be->upload(be, s->ones, (size_t)s->ck.config.dim * sizeof *s->ones);
    }
    return s->backend_values && s->backend_ones;
}

static bool place_random(void *user, Matrix *m, Backend *be, const Checkpoint *ck, const FileSection *section) {
    Synthetic *s = user;
    FileSection *made = &s->sections[section - ck->sections];
    if (!upload_shared(s, be)) {
        return false;
    }
    *m = checkpoint_shape(section);
    if (section->rows == 1) {
        m->dense = s->backend_ones;
        return true;
    }
    const RandomWeights weights = {
        .seed = s->params.seed,
        .matrix = section->kind,
        .layer = (uint32_t)(section->layer + 1),
        .dropped = section->flags & SECTION_PRUNED ? random_weights_dropped(s->params.sp) : 0,
        .values = s->backend_values,
    };
    size_t nnz;
    if (!be->random_matrix(be, m, &nnz, &weights)) {
        return false;
    }
    s->ck.bytes += storage_bytes(m) - section->bytes;
    made->bytes = storage_bytes(m);
    made->nnz = nnz;
    return true;
}

WeightSource weights_of_synthetic(Synthetic *s, Progress *progress) {
    return (WeightSource){.place = place_random, .user = s, .made = true, .progress = progress};
}

/* ---- thresholds ---- */

/* The generator's lower bits are weak, so the upper ones choose. */
int random_id(uint64_t *seed, int vocab) {
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (int)((*seed >> 32) * (uint64_t)vocab >> 32);
}

void random_ids(int *ids, size_t n, int vocab, uint64_t seed) {
    for (size_t i = 0; i < n; i++) {
        ids[i] = random_id(&seed, vocab);
    }
}

/* Sequences of the prompt and then random ids. */
static int *make_sequences(size_t n, size_t length, const Ids *prompt, int vocab, uint64_t seed) {
    int *ids = memory_alloc(n * length * sizeof *ids);
    if (ids) {
        random_ids(ids, n * length, vocab, seed);
    }
    for (size_t i = 0; ids && i < n; i++) {
        memcpy(ids + i * length, prompt->ids, prompt->n * sizeof *ids);
    }
    return ids;
}

int synthetic_calibrate(Synthetic *s, Model *m, const Ids *prompt, int n_decode, Progress *progress, Error *err) {
    if (s->params.dp == 0 || n_decode == 0) {
        return OK;
    }
    if (prompt->n >= (size_t)m->seq_len) {
        return error_set(err, ERR_USAGE, "the prompt has %zu tokens, the context holds %d", prompt->n, m->seq_len);
    }
    // The spread of what attention gives depends on how much context there is, so positions are those of the run.
    const size_t room = (size_t)m->seq_len - prompt->n, asked = n_decode < 0 ? room : (size_t)n_decode;
    const size_t counted = min_size(min_size(asked, room), MOST_DECODE_TOKENS), length = prompt->n + counted;
    const size_t wanted = ceil_div(MEASURED_INPUTS, (size_t)m->config.dim * counted);
    const size_t n = min_size(wanted, max_size(1, MOST_TOKENS / length));
    int *ids = make_sequences(n, length, prompt, m->config.vocab_size, s->params.seed + 1);
    if (!ids) {
        return error_set(err, ERR_MEMORY, "no memory for %zu ids", n * length);
    }
    const QuantilePlan plan = {
        .ids = ids,
        .n = n * length,
        .length = length,
        .prefix = prompt->n,
        .measured_at = {0, (float)s->params.dp},
        .n_tables = 2,
        .table_tokens = n * length,
        .settle_tokens = n * length,
        .dp_tokens = n * length,
        .progress = progress,
    };
    size_t bytes;
    FileQuantiles *measured;
    const int rc = quantiles_measure(&measured, &bytes, m, &s->ck, &plan, err);
    free(ids);
    if (!rc) {
        s->ck.n_sections -= s->quantiles != NULL;  // of an earlier call
        free(s->quantiles);
        s->quantiles = measured;
        s->ck.data = (const unsigned char *)s->quantiles;  // all the bytes that this checkpoint has, at offset 0
        s->sections[s->ck.n_sections++] = (FileSection){
            .kind = SECTION_QUANTILES, .layer = -1, .rows = 1, .cols = bytes, .bytes = bytes,
        };
    }
    return rc;
}
