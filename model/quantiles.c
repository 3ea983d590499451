#include "quantiles.h"

#include <omp.h>
#include <string.h>

#define N_MAGNITUDES 32768  // fp16 without its sign: exact quantiles, and no activation is kept
#define N_QUANTILES 201     // 0, 0.5, ... 100 %

/* Under a ratio, thresholds follow from the table before at first, then from what was measured with them: each
 * round corrects what the one before got wrong. The last round's measurement is the table. */
#define N_ROUNDS 2

typedef struct {
    Model *model;
    const Checkpoint *ck;
    const QuantilePlan *plan;
    uint64_t *bins;   // (n_layers, N_DP_SITES, N_MAGNITUDES) inputs by magnitude
    uint32_t *local;  // (n_threads, N_MAGNITUDES) a thread's own share of one call, zero between calls
    int n_threads;
    fp16 *inputs;     // (chunk, widest input) brought from the backend
    FileQuantiles *section;
    size_t section_bytes;
    size_t done, total;  // sequences, over all passes
} Measurement;

/* InputHook: count the inputs of a product by magnitude. */
static void count_inputs(void *user, int layer, Site site, const fp16 *x, int n, int width) {
    Measurement *c = user;
    const size_t count = (size_t)n * (size_t)width;
    uint64_t *bins = c->bins + ((size_t)layer * N_DP_SITES + site) * N_MAGNITUDES;
    Backend *be = c->model->be;
    be->read(be, c->inputs, x, count * sizeof *x);
#pragma omp parallel num_threads(c->n_threads)
    {
        uint32_t *mine = c->local + (size_t)omp_get_thread_num() * N_MAGNITUDES;
#pragma omp for schedule(static)
        for (size_t i = 0; i < count; i++) {
            mine[c->inputs[i] & 0x7fff]++;
        }
#pragma omp for schedule(static)
        for (size_t b = 0; b < N_MAGNITUDES; b++) {
            for (int t = 0; t < c->n_threads; t++) {
                bins[b] += c->local[(size_t)t * N_MAGNITUDES + b];
                c->local[(size_t)t * N_MAGNITUDES + b] = 0;
            }
        }
    }
}

static int check(const Measurement *c, Error *err) { return c->plan->check ? c->plan->check(err) : OK; }

/* Positions begin .. end - 1 of a sequence in chunks. */
static int run_tokens(Measurement *c, const int *ids, int begin, int end, Phase phase, Error *err) {
    Model *m = c->model;
    int rc = OK;
    for (int pos = begin; pos < end && !rc; pos += m->chunk) {
        model_forward(m, ids + pos, end - pos < m->chunk ? end - pos : m->chunk, pos, phase);
        rc = check(c, err);
    }
    return rc;
}

/* One sequence, its prefix apart. */
static int run_sequence(Measurement *c, const int *ids, int n, Phase phase, Error *err) {
    const InputHook hook = {count_inputs, c};
    const int prefix = n < (int)c->plan->prefix ? n : (int)c->plan->prefix;
    Model *m = c->model;
    int rc = run_tokens(c, ids, 0, prefix, PREFILL, err);
    m->hook = &hook;
    rc = rc ? rc : run_tokens(c, ids, prefix, n, phase, err);
    m->hook = NULL;
    const int finished = m->be->finish(m->be, rc ? NULL : err);
    return rc ? rc : finished;
}

static size_t n_sequences(const QuantilePlan *plan) { return ceil_div(plan->n, plan->length); }

/* How many sequences hold so many tokens, if the text has them. */
static size_t sequences_for(const QuantilePlan *plan, size_t tokens) {
    return min_size(ceil_div(tokens, plan->length), n_sequences(plan));
}

/* Count what so many sequences from all over the text bring to every site. */
static int measure(Measurement *c, size_t count, Phase phase, Error *err) {
    const size_t length = c->plan->length, n_all = n_sequences(c->plan);
    int rc = OK;
    memset(c->bins, 0, (size_t)c->model->config.n_layers * N_DP_SITES * N_MAGNITUDES * sizeof *c->bins);
    for (size_t i = 0; i < count && !rc; i++) {
        const size_t begin = i * n_all / count * length, n = min_size(length, c->plan->n - begin);
        rc = run_sequence(c, c->plan->ids + begin, (int)n, phase, err);
        progress_show(c->plan->progress, (double)(++c->done * length), (double)(c->total * length));
    }
    return rc;
}

static float *table_values(const Measurement *c, size_t table) {
    const size_t rows = (size_t)c->model->config.n_layers * N_DP_SITES;
    return (float *)(c->section + 1) + table * rows * N_QUANTILES;
}

/* Quantiles of one site: the first magnitude up to which a share i / (N_QUANTILES - 1) of the inputs lies. */
static void read_quantiles(float *values, const uint64_t *bins) {
    uint64_t total = 0, below = 0;
    for (size_t b = 0; b < N_MAGNITUDES; b++) {
        total += bins[b];
    }
    size_t b = 0;  // below = inputs in the bins before b
    values[0] = 0;
    for (size_t i = 1; i < N_QUANTILES; i++) {
        const double want = (double)total * (double)i / (N_QUANTILES - 1);
        while (b + 1 < N_MAGNITUDES && (double)(below + bins[b]) < want) {
            below += bins[b++];
        }
        values[i] = fp16_to_float((fp16)b);
    }
}

/* What was counted becomes a table. */
static void store_table(Measurement *c, size_t table) {
    const size_t rows = (size_t)c->model->config.n_layers * N_DP_SITES;
    float *values = table_values(c, table);
    for (size_t row = 0; row < rows; row++) {
        read_quantiles(values + row * N_QUANTILES, c->bins + row * N_MAGNITUDES);
    }
}

/* Put a ratio in force everywhere, by the tables so far. */
static int set_ratio(Measurement *c, double ratio, size_t n_tables, Error *err) {
    c->section->n_tables = (uint32_t)n_tables;
    Thresholds t;
    const Quantiles q = quantiles_view(c->section);
    const int rc = thresholds_from(&t, c->ck, &q, &(Ratios){ratio, ratio}, err);
    if (!rc) {
        model_set_thresholds(c->model, t.values);
        thresholds_free(&t);
    }
    return rc;
}

static size_t total_sequences(const QuantilePlan *plan) {
    const size_t rounds = sequences_for(plan, plan->settle_tokens) + sequences_for(plan, plan->dp_tokens);
    return sequences_for(plan, plan->table_tokens) + (plan->n_tables - 1) * rounds;
}

size_t quantiles_tokens(const QuantilePlan *plan) { return total_sequences(plan) * plan->length; }

/* How long it will take, from the time of one chunk of tokens. */
static int estimate(Measurement *c, Error *err) {
    const QuantilePlan *plan = c->plan;
    const int n = (int)min_size((size_t)c->model->chunk, min_size(plan->n, plan->length));
    double start = 0;
    int rc = OK;
    for (int warm = 0; warm <= 1 && !rc; warm++) {  // the first time brings in weights
        start = time_ms();
        rc = run_sequence(c, plan->ids, n, PREFILL, err);
    }
    const size_t tokens = quantiles_tokens(plan);
    if (!rc) {
        plan->estimate(tokens, (time_ms() - start) * 1e-3 * (double)tokens / (double)n);
    }
    return rc;
}

/* All tables, from the one without dynamic pruning on. */
static int measure_all(Measurement *c, Error *err) {
    const QuantilePlan *plan = c->plan;
    const size_t round_tokens[N_ROUNDS] = {plan->settle_tokens, plan->dp_tokens};
    int rc = plan->estimate ? estimate(c, err) : OK;
    progress_show(plan->progress, 0, (double)quantiles_tokens(plan));  // its clock starts
    rc = rc ? rc : measure(c, sequences_for(plan, plan->table_tokens), PREFILL, err);
    store_table(c, 0);
    for (size_t table = 1; table < plan->n_tables; table++) {
        for (size_t round = 0; round < N_ROUNDS && !rc; round++) {
            rc = set_ratio(c, (double)plan->measured_at[table], round == 0 ? table : table + 1, err);
            rc = rc ? rc : measure(c, sequences_for(plan, round_tokens[round]), DECODE, err);
            store_table(c, table);
        }
    }
    return rc;
}

static bool allocate(Measurement *c) {
    const Config *config = &c->model->config;
    const size_t rows = (size_t)config->n_layers * N_DP_SITES, q_dim = config_q_dim(config);
    const size_t widest = max_size(max_size((size_t)config->dim, (size_t)config->hidden_dim), q_dim);
    c->section_bytes = sizeof *c->section + c->plan->n_tables * rows * N_QUANTILES * sizeof(float);
    return (c->section = memory_alloc(c->section_bytes)) &&
           (c->bins = memory_alloc(rows * N_MAGNITUDES * sizeof *c->bins)) &&
           (c->local = memory_alloc((size_t)c->n_threads * N_MAGNITUDES * sizeof *c->local)) &&
           (c->inputs = memory_alloc((size_t)c->model->chunk * widest * sizeof *c->inputs));
}

int quantiles_measure(FileQuantiles **section, size_t *bytes, Model *m, const Checkpoint *ck,
                      const QuantilePlan *plan, Error *err) {
    CHECK(plan->prefix >= 1 && plan->n_tables >= 1 && plan->n_tables <= FILE_MAX_TABLES);
    Measurement c = {
        .model = m,
        .ck = ck,
        .plan = plan,
        .n_threads = default_threads(),
        .total = total_sequences(plan),
    };
    int rc = OK;
    if (allocate(&c)) {
        *c.section = (FileQuantiles){
            .n_layers = (uint32_t)m->config.n_layers,
            .n_sites = N_DP_SITES,
            .n_quantiles = N_QUANTILES,
        };
        memcpy(c.section->measured_at, plan->measured_at, plan->n_tables * sizeof *plan->measured_at);
        rc = measure_all(&c, err);
        c.section->n_tables = (uint32_t)plan->n_tables;
        progress_end(plan->progress);
    } else {
        rc = error_set(err, ERR_MEMORY, "no memory to count activations");
    }
    free(c.bins);
    free(c.local);
    free(c.inputs);
    if (rc) {
        free(c.section);
        return rc;
    }
    *section = c.section;
    *bytes = c.section_bytes;
    return OK;
}
