#include "dynamic.h"

#include <omp.h>
#include <string.h>

#define N_MAGNITUDES 32768  // fp16 without its sign: exact quantiles, and no activation is kept
#define N_QUANTILES 201     // 0, 0.5, ... 100 %
#define TABLE_TOKENS 16384  // enough for a table, if taken from all over the text
#define UNDER_DP_TOKENS 8192  // the same for one under dynamic pruning
#define SETTLE_TOKENS 2048  // enough to settle thresholds

/* The ratios in force while a table is measured. */
static const float measured_at[] = {0, 0.3f, 0.5f, 0.7f};
#define N_TABLES (sizeof measured_at / sizeof *measured_at)

/* Under a ratio, thresholds follow from the table before at first, then from what was measured with them: each round
 * corrects what the one before got wrong. The last round's measurement is the table. */
static const size_t round_tokens[] = {SETTLE_TOKENS, UNDER_DP_TOKENS};
#define N_ROUNDS (sizeof round_tokens / sizeof *round_tokens)

typedef struct {
    Model model;
    const CalibText *text;
    const Checkpoint *ck;
    uint64_t *bins;   // (n_layers, N_DP_SITES, N_MAGNITUDES) inputs by magnitude
    uint32_t *local;  // (n_threads, N_MAGNITUDES) a thread's own share of one call, zero between calls
    int n_threads;
    fp16 *inputs;     // (chunk, widest input) brought from the backend
    FileQuantiles *section;
    size_t section_bytes;
    Progress progress;
    size_t done, total;  // sequences, over all passes
} Calibration;

/* InputHook: count the inputs of a product by magnitude. */
static void count_inputs(void *user, int layer, Site site, const fp16 *x, int n, int width) {
    Calibration *c = user;
    const size_t count = (size_t)n * (size_t)width;
    uint64_t *bins = c->bins + ((size_t)layer * N_DP_SITES + site) * N_MAGNITUDES;
    Backend *be = c->model.be;
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

/* One sequence, its first token apart. */
static int run_sequence(Calibration *c, const int *ids, int n, Phase phase, Error *err) {
    const InputHook hook = {count_inputs, c};
    Model *m = &c->model;
    m->hook = NULL;
    model_forward(m, ids, 1, 0, PREFILL);
    m->hook = &hook;
    for (int pos = 1; pos < n; pos += m->chunk) {
        model_forward(m, ids + pos, n - pos < m->chunk ? n - pos : m->chunk, pos, phase);
    }
    m->hook = NULL;
    return m->be->finish(m->be, err);
}

/* How many sequences hold so many tokens, if the text has them. */
static size_t sequences_for(const CalibText *text, size_t tokens) {
    return min_size(ceil_div(tokens, text->length), calib_text_sequences(text));
}

/* Count what n_sequences from all over the text bring to every site. */
static int measure(Calibration *c, size_t n_sequences, Phase phase, Error *err) {
    const size_t length = c->text->length, n_all = calib_text_sequences(c->text);
    int rc = OK;
    memset(c->bins, 0, (size_t)c->model.config.n_layers * N_DP_SITES * N_MAGNITUDES * sizeof *c->bins);
    for (size_t i = 0; i < n_sequences && !rc; i++) {
        const size_t begin = i * n_all / n_sequences * length, n = min_size(length, c->text->n - begin);
        rc = run_sequence(c, c->text->ids + begin, (int)n, phase, err);
        progress_show(&c->progress, (double)(++c->done * length), (double)(c->total * length));
    }
    return rc;
}

static float *table_values(const Calibration *c, size_t table) {
    const size_t rows = (size_t)c->model.config.n_layers * N_DP_SITES;
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
static void store_table(Calibration *c, size_t table) {
    const size_t rows = (size_t)c->model.config.n_layers * N_DP_SITES;
    float *values = table_values(c, table);
    for (size_t row = 0; row < rows; row++) {
        read_quantiles(values + row * N_QUANTILES, c->bins + row * N_MAGNITUDES);
    }
}

/* Put a ratio in force everywhere, by the tables so far. */
static int set_ratio(Calibration *c, double ratio, size_t n_tables, Error *err) {
    c->section->n_tables = (uint32_t)n_tables;
    Thresholds t;
    const Quantiles q = quantiles_view(c->section);
    const int rc = thresholds_from(&t, c->ck, &q, &(Ratios){ratio, ratio}, err);
    if (!rc) {
        model_set_thresholds(&c->model, t.values);
        thresholds_free(&t);
    }
    return rc;
}

/* All tables, from the one without dynamic pruning on. */
static int measure_all(Calibration *c, Error *err) {
    int rc = measure(c, sequences_for(c->text, TABLE_TOKENS), PREFILL, err);
    store_table(c, 0);
    for (size_t table = 1; table < N_TABLES; table++) {
        for (size_t round = 0; round < N_ROUNDS && !rc; round++) {
            rc = set_ratio(c, (double)measured_at[table], round == 0 ? table : table + 1, err);
            rc = rc ? rc : measure(c, sequences_for(c->text, round_tokens[round]), DECODE, err);
            store_table(c, table);
        }
    }
    return rc;
}

static bool allocate(Calibration *c) {
    const Config *config = &c->model.config;
    const size_t rows = (size_t)config->n_layers * N_DP_SITES;
    const size_t widest = max_size(max_size((size_t)config->dim, (size_t)config->hidden_dim), config_q_dim(config));
    c->section_bytes = sizeof *c->section + N_TABLES * rows * N_QUANTILES * sizeof(float);
    return (c->section = memory_alloc(c->section_bytes)) &&
           (c->bins = memory_alloc(rows * N_MAGNITUDES * sizeof *c->bins)) &&
           (c->local = memory_alloc((size_t)c->n_threads * N_MAGNITUDES * sizeof *c->local)) &&
           (c->inputs = memory_alloc((size_t)c->model.chunk * widest * sizeof *c->inputs));
}

static size_t total_sequences(const CalibText *text) {
    size_t total = sequences_for(text, TABLE_TOKENS);
    for (size_t round = 0; round < N_ROUNDS; round++) {
        total += (N_TABLES - 1) * sequences_for(text, round_tokens[round]);
    }
    return total;
}

int calibrate_dynamic(FileQuantiles **section, size_t *bytes, const Checkpoint *ck, Backend *be, const CalibText *text,
                      double default_dp, bool quiet, Error *err) {
    Calibration c = {
        .text = text,
        .ck = ck,
        .n_threads = default_threads(),
        .progress = {.label = "thresholds", .unit = "tokens", .quiet = quiet},
        .total = total_sequences(text),
    };
    int rc = model_load(&c.model, ck, be, (int)text->length, false, err);
    if (rc) {
        return rc;
    }
    if (allocate(&c)) {
        *c.section = (FileQuantiles){
            .default_dp = default_dp,
            .n_layers = (uint32_t)ck->config.n_layers,
            .n_sites = N_DP_SITES,
            .n_quantiles = N_QUANTILES,
        };
        memcpy(c.section->measured_at, measured_at, sizeof measured_at);
        rc = measure_all(&c, err);
        c.section->n_tables = N_TABLES;
        progress_end(&c.progress);
    } else {
        rc = error_set(err, ERR_MEMORY, "no memory to count activations");
    }
    model_free(&c.model);
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

int dynamic_add(Writer *w, Backend *be, const CalibText *text, double default_dp, bool quiet, Error *err) {
    Checkpoint ck;
    FileQuantiles *section;
    size_t bytes;
    int rc = writer_view(w, &ck, err);
    if (rc) {
        return rc;
    }
    rc = calibrate_dynamic(&section, &bytes, &ck, be, text, default_dp, quiet, err);
    checkpoint_close(&ck);
    if (!rc) {
        rc = writer_bytes(w, SECTION_QUANTILES, "quantiles", section, bytes, err);
        free(section);
    }
    return rc;
}
