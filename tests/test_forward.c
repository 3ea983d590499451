/* test_forward.c: the forward pass and what stands on it: generation, perplexity, their limits and their
 * errors. Judged by the published text of stories260K, by golden.json of two trained models (Hugging Face,
 * float32), and by a double-precision forward pass of a small model of awkward sizes. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "../export/pack.h"
#include "../model/expanded.h"
#include "../model/generate.h"
#include "../model/perplexity.h"
#include "../tokenizer/tokenizer.h"
#include "skip.h"

#define SHARED "../shared/data/"
#define STORIES SHARED "stories260K/"
#define HELDOUT SHARED "text/heldout-32769.tok"

#define MAX_IDS 1024
#define LOGIT_TOLERANCE (2e-2 * fp16_pairs())  // absolute, against float32 and double references
#define NORM_TOLERANCE 1e-3   // relative
#define NLL_TOLERANCE 1e-4    // an eps or a theta slightly off is beyond it
#define PREFILL_RMS (6e-3 * fp16_pairs())      // prefill against decode steps
#define PREFILL_MAX (3e-2 * fp16_pairs())

/* The backend under test: "cpu" unless SPDP_TEST_BACKEND names another. */
static const char *backend_name(void) {
    const char *name = getenv("SPDP_TEST_BACKEND");
    return name ? name : "cpu";
}

/* CUDA sums up to 16 products in fp16, for which the contract doubles the bounds. */
static double fp16_pairs(void) { return strcmp(backend_name(), "cuda") == 0 ? 2 : 1; }

static const Storage storages[] = {STORE_DENSE, STORE_TILED_CBC};
static const SampleParams greedy = {.temperature = 0, .top_p = 1};

/* ---- small helpers ---- */

/* End the test as skipped where an input that does not come with the repository is missing. */
static void need(const char *path) {
    if (access(path, R_OK) != 0) {
        print_message("skipped: %s absent\n", path);
        skip();
    }
}

static void *read_file(const char *path, size_t *bytes) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    *bytes = (size_t)ftell(f);
    rewind(f);
    char *data = calloc(1, *bytes + 1);
    assert_int_equal(fread(data, 1, *bytes, f), *bytes);
    fclose(f);
    return data;
}

static uint32_t hash(uint64_t key) {
    key = (key ^ key >> 31) * 0x7fb5d329728ea185u;
    key = (key ^ key >> 27) * 0x81dadef4bc2dd44du;
    return (uint32_t)(key >> 32);
}

static void random_ids(int *ids, int n, int vocab, uint64_t seed) {
    for (int i = 0; i < n; i++) {
        ids[i] = (int)(hash(seed << 32 | (uint64_t)i) % (uint32_t)vocab);
    }
}

/* ---- models ---- */

typedef struct {
    Checkpoint ck;
    Backend *be;
    Model m;
} Fixture;

typedef struct {
    int seq_len, n_threads, max_tokens;  // 0 = the default
    bool all_logits, no_graph;
} Setting;

/* A model file of a source, all weights kept, opened and loaded. Its name is gone at once, so nothing stays
 * behind. */
static void open_model(Fixture *f, Source *source, Storage storage, Setting setting) {
    const PackOptions options = {
        .prune_attn = storage == STORE_TILED_CBC,
        .storage = storage,
        .source_name = "test",
        .n_threads = 2,
        .quiet = true,
    };
    char path[400];
    Error err = {0};
    Writer *writer;
    PackReport report;
    snprintf(path, sizeof path, "%s/test_forward.%ld.bin", getenv("BUILD") ? getenv("BUILD") : "build",
             (long)getpid());
    assert_int_equal(writer_open(&writer, path, &source->config, true, &err), OK);
    assert_int_equal(pack_model(&report, source, writer, &options, &err), OK);
    assert_int_equal(report.n_tiled, storage == STORE_TILED_CBC ? 4 * source->config.n_layers : 0);
    assert_int_equal(checkpoint_open(&f->ck, path, &err), OK);
    unlink(path);
    const bool graphs = !setting.no_graph;
    assert_int_equal(backend_open(&f->be, backend_name(), 0, graphs, setting.n_threads, NULL, NULL, &err), OK);
    f->be->max_tokens = setting.max_tokens ? setting.max_tokens : f->be->max_tokens;
    assert_int_equal(model_load(&f->m, &f->ck, f->be, setting.seq_len, setting.all_logits, &err), OK);
}

static void open_path(Fixture *f, const char *path, Storage storage, Setting setting) {
    Source *source;
    Error err = {0};
    assert_int_equal(source_open(&source, path, &err), OK);
    open_model(f, source, storage, setting);
    source->free(source);
}

static void close_model(Fixture *f) {
    model_free(&f->m);
    f->be->free(f->be);
    checkpoint_close(&f->ck);
}

/* A weight to replace. */
typedef struct {
    Tensor tensor;
    int layer;
    float value;
} Poison;

/* A model of random weights whose sizes are no multiples of a vector, with three query heads to a key head,
 * heads that together are wider than the residual stream, and an eps that matters. The source's ctx is a
 * Poison or NULL. */
static const Config awkward = {
    .dim = 42,
    .hidden_dim = 131,
    .n_layers = 2,
    .n_heads = 6,
    .n_kv_heads = 2,
    .head_dim = 10,
    .seq_len = 48,
    .vocab_size = 61,
    .norm_eps = 0.3f,
    .rope_theta = 500,
    .bos_id = 1,
};

static int small_read(Source *s, Tensor tensor, int layer, fp16 *out, size_t stride, int n_threads,
                      Error *err) {
    (void)n_threads, (void)err;
    const Poison *poison = s->ctx;
    size_t rows, cols;
    tensor_shape(&s->config, tensor, &rows, &cols);
    const bool norm = rows == 1;
    // Unit variance at every product's output; logits spread by 3, as those of a trained model.
    const float scale = norm ? 0.5f
                        : tensor == TENSOR_EMBEDDING
                            ? 1
                            : (tensor == TENSOR_HEAD ? 3 : 1) * sqrtf(3 / (float)cols);
    for (size_t r = 0; r < rows; r++) {
        for (size_t k = 0; k < cols; k++) {
            const uint64_t key = ((uint64_t)tensor << 8 | (uint64_t)(layer + 1)) << 32 | r << 12 | k;
            const float u = (float)hash(key) * 0x1p-31f - 1;
            out[r * stride + k] = fp16_from_float(norm ? 1 + scale * u : scale * u);
        }
    }
    if (poison && poison->tensor == tensor && poison->layer == layer) {
        out[cols / 2] = fp16_from_float(poison->value);
    }
    return OK;
}

static Source small_source(const Poison *poison) {
    return (Source){.config = awkward, .kind = "test", .read = small_read, .ctx = (void *)(uintptr_t)poison};
}

static void open_small(Fixture *f, Storage storage, Setting setting) {
    Source source = small_source(NULL);
    open_model(f, &source, storage, setting);
}

/* Logits of every position, computed in pieces of `step` tokens from an empty cache: 1 = decode steps. */
static void all_logits(float *logits, Model *m, const int *ids, int n, int step) {
    const size_t vocab = (size_t)m->config.vocab_size;
    Error err = {0};
    for (int pos = 0; pos < n; pos += step) {
        const int rows = n - pos < step ? n - pos : step;
        assert_true(m->logit_rows >= rows);
        model_forward(m, ids + pos, rows, pos, PREFILL);
        assert_int_equal(m->be->finish(m->be, &err), OK);
        m->be->read(m->be, logits + (size_t)pos * vocab, m->state.logits,
                    (size_t)rows * vocab * sizeof *logits);
    }
}

/* ---- generation into memory ---- */

typedef struct {
    int ids[MAX_IDS], n;
    int stop_at;  // stop when so many have come; 0 = never
} Collected;

static bool collect(void *user, int id) {
    Collected *c = user;
    assert_true(c->n < MAX_IDS);
    c->ids[c->n++] = id;
    return c->n == c->stop_at;
}

static int try_generate(GenerateResult *result, Collected *c, Model *m, const int *ids, int n,
                        GenerateParams params, Error *err) {
    TokenSink sink = {.token = collect, .user = c};
    c->n = 0;
    return generate(result, m, ids, n, &params, &sink, err);
}

static GenerateResult collect_tokens(Collected *c, Model *m, const int *ids, int n, GenerateParams params) {
    GenerateResult result;
    Error err = {0};
    memset(&result, 0xa5, sizeof result);
    memset(c->ids, 0xa5, sizeof c->ids);
    if (try_generate(&result, c, m, ids, n, params, &err) != OK) {
        fail_msg("%s", err.text);
    }
    return result;
}

/* ---- against a double-precision forward pass ---- */

/* Written from the definition of the architecture, over the source's own matrices (not the fused ones of the
 * file), one token at a time, nothing rounded. */
typedef struct {
    Config c;
    double *weights[N_TENSORS][2];      // by layer
    double k[2][48][32], v[2][48][32];  // caches (layer, position, kv_dim)
} Reference;

static void reference_open(Reference *ref, Source *s) {
    ref->c = s->config;
    for (Tensor t = 0; t < N_TENSORS; t++) {
        const bool in_layers = t >= TENSOR_ATTN_NORM;
        size_t rows, cols;
        tensor_shape(&ref->c, t, &rows, &cols);
        fp16 *half = calloc(rows * cols, sizeof *half);
        for (int l = 0; l < (in_layers ? ref->c.n_layers : 1); l++) {
            s->read(s, t, in_layers ? l : -1, half, cols, 1, NULL);
            double *w = ref->weights[t][l] = calloc(rows * cols, sizeof *w);
            for (size_t i = 0; i < rows * cols; i++) {
                w[i] = (double)fp16_to_float(half[i]);
            }
        }
        free(half);
    }
}

static void reference_close(Reference *ref) {
    for (Tensor t = 0; t < N_TENSORS; t++) {
        free(ref->weights[t][0]);
        free(ref->weights[t][1]);
    }
}

/* y = W x, added to what is there. */
static void add_product(double *y, const Reference *ref, Tensor t, int layer, const double *x) {
    size_t rows, cols;
    tensor_shape(&ref->c, t, &rows, &cols);
    for (size_t r = 0; r < rows; r++) {
        for (size_t k = 0; k < cols; k++) {
            y[r] += ref->weights[t][layer][r * cols + k] * x[k];
        }
    }
}

static void reference_norm(double *y, const Reference *ref, Tensor t, int layer, const double *x) {
    double sum = 0;
    for (int i = 0; i < ref->c.dim; i++) {
        sum += x[i] * x[i];
    }
    for (int i = 0; i < ref->c.dim; i++) {
        y[i] = ref->weights[t][layer][i] * x[i] / sqrt(sum / ref->c.dim + (double)ref->c.norm_eps);
    }
}

static void reference_rotate(double *head, int head_dim, int pos, double theta) {
    for (int i = 0; i < head_dim; i += 2) {
        const double angle = pos * pow(theta, -(double)i / head_dim), a = head[i], b = head[i + 1];
        head[i] = a * cos(angle) - b * sin(angle);
        head[i + 1] = a * sin(angle) + b * cos(angle);
    }
}

/* One query head over the positions 0 .. pos of its key head. */
static void reference_attend(double *out, const Reference *ref, int layer, int kv_head, const double *q,
                             int pos) {
    const int d = ref->c.head_dim;
    double p[48], total = 0;
    for (int t = 0; t <= pos; t++) {
        double score = 0;
        for (int i = 0; i < d; i++) {
            score += q[i] * ref->k[layer][t][kv_head * d + i];
        }
        total += p[t] = exp(score / sqrt(d));
    }
    for (int i = 0; i < d; i++) {
        out[i] = 0;
        for (int t = 0; t <= pos; t++) {
            out[i] += p[t] / total * ref->v[layer][t][kv_head * d + i];
        }
    }
}

static void reference_layer(double *x, Reference *ref, int l, int pos) {
    const Config *c = &ref->c;
    double norm[64], q[64] = {0}, attn[64], gate[160] = {0}, up[160] = {0};
    double *k = ref->k[l][pos], *v = ref->v[l][pos];
    memset(k, 0, sizeof ref->k[l][pos]);
    memset(v, 0, sizeof ref->v[l][pos]);
    reference_norm(norm, ref, TENSOR_ATTN_NORM, l, x);
    add_product(q, ref, TENSOR_Q, l, norm);
    add_product(k, ref, TENSOR_K, l, norm);
    add_product(v, ref, TENSOR_V, l, norm);
    for (int h = 0; h < c->n_kv_heads; h++) {
        reference_rotate(k + h * c->head_dim, c->head_dim, pos, c->rope_theta);
    }
    for (int h = 0; h < c->n_heads; h++) {
        double *head = q + h * c->head_dim;
        reference_rotate(head, c->head_dim, pos, c->rope_theta);
        reference_attend(attn + h * c->head_dim, ref, l, h / (c->n_heads / c->n_kv_heads), head, pos);
    }
    add_product(x, ref, TENSOR_O, l, attn);
    reference_norm(norm, ref, TENSOR_MLP_NORM, l, x);
    add_product(gate, ref, TENSOR_GATE, l, norm);
    add_product(up, ref, TENSOR_UP, l, norm);
    for (int i = 0; i < c->hidden_dim; i++) {
        gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
    }
    add_product(x, ref, TENSOR_DOWN, l, gate);
}

/* logits (n, vocab) of tokens ids[0 .. n-1]. */
static void reference_logits(double *logits, Reference *ref, const int *ids, int n) {
    const size_t vocab = (size_t)ref->c.vocab_size, dim = (size_t)ref->c.dim;
    memset(logits, 0, (size_t)n * vocab * sizeof *logits);
    for (int pos = 0; pos < n; pos++) {
        double x[64], norm[64];
        memcpy(x, ref->weights[TENSOR_EMBEDDING][0] + (size_t)ids[pos] * dim, dim * sizeof *x);
        for (int l = 0; l < ref->c.n_layers; l++) {
            reference_layer(x, ref, l, pos);
        }
        reference_norm(norm, ref, TENSOR_FINAL_NORM, 0, x);
        add_product(logits + (size_t)pos * vocab, ref, TENSOR_HEAD, 0, norm);
    }
}

static void test_awkward_sizes_give_the_logits_of_the_double_reference(void **state) {
    (void)state;
    enum { N = 48 };
    static Reference ref;
    Source source = small_source(NULL);
    const size_t vocab = (size_t)awkward.vocab_size;
    double *expected = calloc(N * vocab, sizeof *expected);
    float *logits = malloc(N * vocab * sizeof *logits);
    int ids[N];
    random_ids(ids, N, awkward.vocab_size, 1);
    reference_open(&ref, &source);
    reference_logits(expected, &ref, ids, N);
    for (size_t s = 0; s < 2; s++) {
        Fixture f;
        open_model(&f, &source, storages[s], (Setting){.all_logits = true});
        for (int step = 1; step <= N; step += 47) {  // decode steps, then all at once
            double worst = 0;
            memset(logits, 0xff, N * vocab * sizeof *logits);  // NaN
            all_logits(logits, &f.m, ids, N, step);
            for (size_t i = 0; i < N * vocab; i++) {
                assert_true(isfinite(logits[i]));
                worst = fmax(worst, fabs((double)logits[i] - expected[i]));
            }
            print_message("storage %d, %2d at once: worst difference %.1f %% of the bound\n", storages[s],
                          step, 100 * worst / LOGIT_TOLERANCE);
            assert_true(worst <= LOGIT_TOLERANCE);
        }
        close_model(&f);
    }
    reference_close(&ref);
    free(expected);
    free(logits);
}

/* ---- golden outputs ---- */

/* cases.md rows 11 and 17: heads and kv heads differ, the text is the published one. */
static void test_stories260k_tells_the_published_story(void **state) {
    (void)state;
    static const char published[] =
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One "
        "day, she "
        "saw a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, "
        "let's go to "
        "the park.\" Lily was sad and didn't know what to do. She said, \"I want to play with your ball, but "
        "I can't "
        "find it.\"\nLily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know "
        "what to "
        "do.\"\nLily didn't want to help her mom, so she";
    need(STORIES "stories260K.bin");
    size_t bytes;
    char *model = read_file(STORIES "tok512.model", &bytes), error[200];
    Tokenizer *tokenizer;
    assert_true(tokenizer_load(&tokenizer, model, bytes, error, sizeof error));
    for (size_t s = 0; s < 2; s++) {
        Fixture f;
        Collected c = {0};
        open_path(&f, STORIES "stories260K.bin", storages[s], (Setting){0});
        collect_tokens(&c, &f.m, (const int[]){1}, 1, (GenerateParams){.n_new = 200, .sample = greedy});
        assert_int_equal(c.n, 200);
        char *text = calloc(201, TOKENIZER_MAX_PIECE);
        size_t n = 0;
        DecodeState decode = {0};
        n += tokenizer_decode(tokenizer, &decode, 1, text);
        for (int i = 0; i < c.n; i++) {
            n += tokenizer_decode(tokenizer, &decode, c.ids[i], text + n);
        }
        assert_string_equal(text, published);
        free(text);
        close_model(&f);
    }
    tokenizer_free(tokenizer);
    free(model);
}

typedef struct {
    const char *source, *golden;
    int n_windows;
    double window_nll[4];  // mean NLL of the first windows of HELDOUT
} Golden;

/* golden.json has the mean over all 64 windows, which tests/check_golden.sh compares. The means of the first
 * ones, for a quick test, come from a double-precision forward pass that is no part of this program; over all
 * of demo's windows it gives golden.json's mean. */
static const Golden demo = {
    "demo", SHARED "demo-8M/golden.json", 4, {3.094402259, 2.717993311, 2.560359978, 2.555300545}};
static const Golden books = {
    SHARED "books-30M", SHARED "books-30M/golden.json", 2, {2.928128041, 2.603604208}};

static int get_ints(int *out, const cJSON *item, const char *key) {
    const cJSON *array = cJSON_GetObjectItemCaseSensitive(item, key);
    const int n = cJSON_GetArraySize(array);
    assert_in_range(n, 1, MAX_IDS);
    for (int i = 0; i < n; i++) {
        out[i] = cJSON_GetArrayItem(array, i)->valueint;
    }
    return n;
}

static double number_at(const cJSON *item, const char *key, int i) {
    return cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(item, key), i)->valuedouble;
}

/* Tokens equal the reference's, or part where its two best logits are nearly equal: there, generation starts
 * again from the reference's tokens, so that every step is checked. Returns how often they parted. */
static int check_greedy(Model *m, const int *prompt, int n_prompt, const cJSON *item) {
    int ids[MAX_IDS], partings = 0;
    memcpy(ids, prompt, (size_t)n_prompt * sizeof *ids);
    const int n = get_ints(ids + n_prompt, item, "greedy");
    for (int done = 0; done < n;) {
        Collected c = {0};
        const int from = n_prompt + done;
        collect_tokens(&c, m, ids, from,
                       (GenerateParams){.n_new = n - done, .ignore_eos = true, .sample = greedy});
        assert_int_equal(c.n, n - done);
        int same = 0;
        while (same < c.n && c.ids[same] == ids[from + same]) {
            same++;
        }
        if (same < c.n) {
            assert_true(number_at(item, "greedy_margin", done + same) < LOGIT_TOLERANCE);
            partings++;
        }
        done += same + 1;
    }
    return partings;
}

/* Norms of every position's logits, and the last position's logits themselves. */
static void check_logits(Model *m, const int *prompt, int n, const cJSON *item) {
    const size_t vocab = (size_t)m->config.vocab_size;
    float *logits = malloc((size_t)n * vocab * sizeof *logits);
    memset(logits, 0xff, (size_t)n * vocab * sizeof *logits);
    all_logits(logits, m, prompt, n, n);
    for (int i = 0; i < n; i++) {
        double sum = 0;
        for (size_t k = 0; k < vocab; k++) {
            sum += (double)logits[(size_t)i * vocab + k] * (double)logits[(size_t)i * vocab + k];
        }
        const double expected = number_at(item, "logits_l2", i);
        assert_true(fabs(sqrt(sum) - expected) <= NORM_TOLERANCE * expected);
    }
    const float *last = logits + (size_t)(n - 1) * vocab;
    for (int i = 0; i < 16; i++) {
        assert_true(fabs((double)last[i] - number_at(item, "last_logits_first16", i)) <= LOGIT_TOLERANCE);
    }
    const cJSON *pair;
    cJSON_ArrayForEach(pair, cJSON_GetObjectItemCaseSensitive(item, "last_logits_top8")) {
        const int id = cJSON_GetArrayItem(pair, 0)->valueint;
        assert_true(fabs((double)last[id] - cJSON_GetArrayItem(pair, 1)->valuedouble) <= LOGIT_TOLERANCE);
    }
    free(logits);
}

static void check_golden(const Golden *golden, Storage storage) {
    Fixture last, all;
    size_t bytes;
    int partings = 0, n_prompts = 0;
    char *text = read_file(golden->golden, &bytes);
    cJSON *json = cJSON_Parse(text);
    const cJSON *item;
    open_path(&last, golden->source, storage, (Setting){0});
    open_path(&all, golden->source, storage, (Setting){.all_logits = true});
    cJSON_ArrayForEach(item, json) {
        if (cJSON_HasObjectItem(item, "ids")) {
            int prompt[MAX_IDS];
            const int n = get_ints(prompt, item, "ids");
            check_logits(&all.m, prompt, n, item);
            partings += check_greedy(&last.m, prompt, n, item);
            n_prompts++;
        }
    }
    assert_int_equal(n_prompts, 4);
    assert_in_range(partings, 0, 4);
    close_model(&last);
    close_model(&all);
    cJSON_Delete(json);
    free(text);
}

static void check_nll(const Golden *golden, Storage storage) {
    const int n_windows = golden->n_windows, window = 512;
    Fixture f;
    PerplexityResult r;
    Error err = {0};
    size_t bytes;
    uint16_t *raw = read_file(HELDOUT, &bytes);
    const size_t n = bytes / sizeof *raw;
    int *ids = malloc(n * sizeof *ids);
    for (size_t i = 0; i < n; i++) {
        ids[i] = raw[i];
    }
    double expected = 0;
    for (int i = 0; i < n_windows; i++) {
        expected += golden->window_nll[i] / n_windows;
    }
    open_path(&f, golden->source, storage, (Setting){.all_logits = true});
    const PerplexityParams params = {.window = window, .max_tokens = (size_t)(n_windows * window + 1)};
    assert_int_equal(perplexity(&r, &f.m, ids, n, &params, NULL, NULL, &err), OK);
    assert_int_equal(r.n_scored, n_windows * window);
    print_message("nll %.6f, reference %.6f: %.1f %% of the bound\n", r.nll, expected,
                  100 * fabs(r.nll - expected) / NLL_TOLERANCE);
    assert_true(fabs(r.nll - expected) <= NLL_TOLERANCE);
    close_model(&f);
    free(ids);
    free(raw);
}

/* cases.md row 36, with either backend: logits within bounds of a reference. */
static void test_demo_equals_golden_json(void **state) {
    (void)state;
    need(demo.golden);
    for (size_t s = 0; s < 2; s++) {
        check_golden(&demo, storages[s]);
    }
}

static void test_books_equal_golden_json(void **state) {
    (void)state;
    skip_long_test();
    need(books.golden);
    for (size_t s = 0; s < 2; s++) {
        check_golden(&books, storages[s]);
    }
}

static void test_demo_predicts_heldout_text_as_the_reference(void **state) {
    (void)state;
    skip_long_test();
    need(HELDOUT);
    for (size_t s = 0; s < 2; s++) {
        check_nll(&demo, storages[s]);
    }
}

static void test_books_predict_heldout_text_as_the_reference(void **state) {
    (void)state;
    skip_long_test();
    need(HELDOUT);
    need(books.source);
    for (size_t s = 0; s < 2; s++) {
        check_nll(&books, storages[s]);
    }
}

/* ---- rotation ---- */

/* cases.md row 12: the angle by which the slowest pair of a head of 128 turns at each position. */
static void test_row_12_the_slowest_pair_turns_as_theta_says(void **state) {
    (void)state;
    static const struct {
        double theta, angle;
    } cases[] = {{1e4, 1.1547820e-4}, {1e6, 1.2409378e-6}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Source source = small_source(NULL);
        source.config.n_heads = source.config.n_kv_heads = 1;
        source.config.head_dim = 128;
        source.config.rope_theta = cases[i].theta;
        Fixture f;
        open_model(&f, &source, STORE_DENSE, (Setting){0});
        float last[2];  // cosine and sine
        f.be->read(f.be, last, f.m.weights.rope + 2 * 128 - 2, sizeof last);
        assert_true(fabs(asin((double)last[1]) / cases[i].angle - 1) < 2e-7);
        assert_true(last[0] > 0.9999f);
        close_model(&f);
    }
}

/* ---- prefill and decode ---- */

/* Are two rows of logits the same but for rounding? */
static void check_same_logits(const float *a, const float *b, int vocab) {
    double sum = 0, worst = 0;
    for (int i = 0; i < vocab; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        assert_true(isfinite(d));
        sum += d * d;
        worst = fmax(worst, d);
    }
    assert_true(sqrt(sum / vocab) <= PREFILL_RMS);
    assert_true(worst <= PREFILL_MAX);
}

/* cases.md row 32: chunks of any length agree with single tokens. */
static void test_prefill_of_n_tokens_equals_n_decode_steps(void **state) {
    (void)state;
    for (size_t s = 0; s < 2; s++) {
        Fixture f;
        Error err = {0};
        open_path(&f, "demo", storages[s], (Setting){.max_tokens = 192});
        const int chunk = f.m.chunk, vocab = f.m.config.vocab_size, most = 2 * chunk + 1;
        assert_true(chunk == 192 && most <= f.m.seq_len);
        const int lengths[] = {1, 2, 3, 31, 32, 33, 255, 256, 257, chunk - 1, chunk, chunk + 1, most};
        int *ids = malloc((size_t)most * sizeof *ids);
        float *decoded = malloc((size_t)most * (size_t)vocab * sizeof *decoded);
        float *prefilled = malloc((size_t)vocab * sizeof *prefilled);
        random_ids(ids, most, vocab, 2);
        all_logits(decoded, &f.m, ids, most, 1);
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            const int n = lengths[i];
            memset(prefilled, 0xff, (size_t)vocab * sizeof *prefilled);
            assert_int_equal(model_prefill(&f.m, ids, n, 0, &err), OK);
            f.be->read(f.be, prefilled, f.m.state.logits, (size_t)vocab * sizeof *prefilled);
            check_same_logits(prefilled, decoded + (size_t)(n - 1) * (size_t)vocab, vocab);
        }
        free(ids);
        free(decoded);
        free(prefilled);
        close_model(&f);
    }
}

/* Every position, every size of a piece, on a model that makes it cheap. */
static void test_pieces_of_any_size_give_the_same_logits(void **state) {
    (void)state;
    enum { N = 48 };
    const int vocab = awkward.vocab_size;
    float *decoded = malloc((size_t)(N * vocab) * sizeof *decoded),
          *pieces = malloc((size_t)(N * vocab) * sizeof *pieces);
    int ids[N];
    random_ids(ids, N, vocab, 3);
    for (size_t s = 0; s < 2; s++) {
        Fixture f;
        open_small(&f, storages[s], (Setting){.all_logits = true});
        all_logits(decoded, &f.m, ids, N, 1);
        for (int step = 2; step <= N; step++) {
            memset(pieces, 0xff, (size_t)(N * vocab) * sizeof *pieces);
            all_logits(pieces, &f.m, ids, N, step);
            for (int i = 0; i < N; i++) {
                check_same_logits(pieces + i * vocab, decoded + i * vocab, vocab);
            }
        }
        close_model(&f);
    }
    free(decoded);
    free(pieces);
}

/* The dense form of a compressed file computes with the weights of the file: to the bit what a dense file gives. */
static void test_the_expanded_form_has_the_bits_of_a_dense_file(void **state) {
    (void)state;
    enum { N = 12 };
    const size_t bytes = (size_t)(N * awkward.vocab_size) * sizeof(float);
    float *want = malloc(bytes), *got = malloc(bytes);
    int ids[N];
    Fixture dense, tiled;
    Expanded e;
    Model m;
    Error err = {0};
    random_ids(ids, N, awkward.vocab_size, 12);
    open_small(&dense, STORE_DENSE, (Setting){.all_logits = true});
    open_small(&tiled, STORE_TILED_CBC, (Setting){.all_logits = true});
    assert_int_equal(expanded_open(&e, &tiled.ck, &err), OK);
    for (size_t i = 0; i < e.ck.n_sections; i++) {
        assert_int_not_equal(e.ck.sections[i].format, FORMAT_TILED_CBC);
    }
    const WeightSource weights = weights_of_expanded(&e, NULL);
    assert_int_equal(model_load_from(&m, &e.ck, tiled.be, 0, true, &weights, &err), OK);
    for (int step = 1; step <= N; step += N - 1) {
        memset(got, 0xff, bytes);
        all_logits(want, &dense.m, ids, N, step);
        all_logits(got, &m, ids, N, step);
        assert_memory_equal(got, want, bytes);
    }
    model_free(&m);
    expanded_close(&e);
    close_model(&tiled);
    close_model(&dense);
    free(want);
    free(got);
}

/* ---- determinism ---- */

/* Tokens drawn after a prompt longer than a chunk, and the bits of the logits that gave the last of them. */
static void draw(Collected *c, float *logits, Storage storage, int n_threads, uint64_t seed) {
    enum { N_PROMPT = 200 };
    Fixture f;
    int prompt[N_PROMPT];
    open_path(&f, "demo", storage, (Setting){.n_threads = n_threads});
    random_ids(prompt, N_PROMPT, f.m.config.vocab_size, 4);
    const SampleParams sample = {.temperature = 0.9f, .top_p = 0.95f, .seed = seed};
    collect_tokens(c, &f.m, prompt, N_PROMPT,
                   (GenerateParams){.n_new = 32, .ignore_eos = true, .sample = sample});
    assert_int_equal(c->n, 32);
    f.be->read(f.be, logits, f.m.state.logits, (size_t)f.m.config.vocab_size * sizeof *logits);
    close_model(&f);
}

/* cases.md row 36. */
static void test_a_seed_gives_the_same_tokens_whatever_the_threads(void **state) {
    (void)state;
    static const int threads[] = {2, 1, 5};  // the first twice: repeated, then varied
    static float first_logits[4096], logits[4096];
    for (size_t s = 0; s < 2; s++) {
        Collected first = {0}, c = {0};
        draw(&first, first_logits, storages[s], threads[0], 42);
        for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
            draw(&c, logits, storages[s], threads[i], 42);
            assert_memory_equal(logits, first_logits, sizeof logits);
            assert_memory_equal(c.ids, first.ids, (size_t)c.n * sizeof *c.ids);
        }
        draw(&c, logits, storages[s], 2, 43);
        assert_memory_not_equal(c.ids, first.ids, (size_t)c.n * sizeof *c.ids);
    }
}

/* ---- recorded decode steps ---- */

enum { N_STEPS = 64, N_VOCAB = 4096 };  // of the demo model

typedef struct {
    int ids[N_STEPS];  // greedy
    float logits[N_STEPS][N_VOCAB];
} Decoded;

static int argmax(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

static void set_threshold(Model *m, float value) {
    float values[64 * N_DP_SITES];
    const int n = m->config.n_layers * N_DP_SITES;
    assert_true(n <= 64 * N_DP_SITES);
    for (int i = 0; i < n; i++) {
        values[i] = value;
    }
    model_set_thresholds(m, values);
}

/* Greedy steps after a short prompt, the first half of them with one threshold at every site, the rest with
 * another. */
static void decode_steps(Decoded *d, Storage storage, bool no_graph, float threshold, float later) {
    enum { N_PROMPT = 8 };
    Fixture f;
    Error err = {0};
    int prompt[N_PROMPT];
    memset(d, 0xff, sizeof *d);
    open_path(&f, "demo", storage, (Setting){.no_graph = no_graph});
    assert_int_equal(f.m.config.vocab_size, N_VOCAB);
    random_ids(prompt, N_PROMPT, N_VOCAB, 12);
    assert_int_equal(model_prefill(&f.m, prompt, N_PROMPT, 0, &err), OK);
    for (int step = 0, id = prompt[0]; step < N_STEPS; step++) {
        if (step % (N_STEPS / 2) == 0) {
            set_threshold(&f.m, step == 0 ? threshold : later);
        }
        model_forward(&f.m, &id, 1, N_PROMPT + step, DECODE);
        assert_int_equal(f.be->finish(f.be, &err), OK);
        f.be->read(f.be, d->logits[step], f.m.state.logits, sizeof d->logits[step]);
        id = d->ids[step] = argmax(d->logits[step], N_VOCAB);
    }
    close_model(&f);
}

/* cases.md row 33, with CUDA as backend. */
static void test_a_recorded_step_gives_the_bits_of_single_launches(void **state) {
    (void)state;
    static Decoded recorded, launched;
    for (size_t s = 0; s < 2; s++) {
        decode_steps(&recorded, storages[s], false, 0.2f, 0.2f);
        decode_steps(&launched, storages[s], true, 0.2f, 0.2f);
        assert_memory_equal(recorded.ids, launched.ids, sizeof recorded.ids);
        assert_memory_equal(recorded.logits, launched.logits, sizeof recorded.logits);
        assert_true(isfinite(recorded.logits[N_STEPS - 1][N_VOCAB - 1]));
    }
}

/* Thresholds are read by the step, not kept in its record. */
static void test_thresholds_may_change_between_recorded_steps(void **state) {
    (void)state;
    static Decoded recorded, launched, unchanged;
    decode_steps(&recorded, STORE_TILED_CBC, false, 0.05f, 0.5f);
    decode_steps(&launched, STORE_TILED_CBC, true, 0.05f, 0.5f);
    decode_steps(&unchanged, STORE_TILED_CBC, false, 0.05f, 0.05f);
    assert_memory_equal(recorded.ids, launched.ids, sizeof recorded.ids);
    assert_memory_equal(recorded.logits, launched.logits, sizeof recorded.logits);
    const size_t half = N_STEPS / 2, step_bytes = sizeof recorded.logits[0];
    assert_memory_equal(recorded.logits, unchanged.logits, half * step_bytes);
    assert_memory_not_equal(recorded.logits[half], unchanged.logits[half], step_bytes);
}

/* ---- where generation ends (rows 40 and 46 of the case list) ---- */

/* cases.md row 46. */
static void test_row_46_n_counts_new_tokens_and_the_context_limits_them(void **state) {
    (void)state;
    enum { CONTEXT = 20 };
    static const struct {
        int n_prompt, n_new, expected;
        StopReason stop;
    } cases[] = {
        {5, 3, 3, STOP_LENGTH},        {5, 0, 0, STOP_LENGTH},
        {5, -1, 15, STOP_CONTEXT},     {5, 15, 15, STOP_LENGTH},
        {5, 16, 15, STOP_CONTEXT},     {1, 1 << 30, 19, STOP_CONTEXT},
        {CONTEXT, 5, 0, STOP_CONTEXT}, {CONTEXT, -1, 0, STOP_CONTEXT},
        {CONTEXT, 0, 0, STOP_LENGTH},  {CONTEXT - 1, 5, 1, STOP_CONTEXT},
    };
    Fixture f;
    Collected c = {0};
    int ids[CONTEXT];
    random_ids(ids, CONTEXT, awkward.vocab_size, 5);
    open_small(&f, STORE_DENSE, (Setting){.seq_len = CONTEXT, .max_tokens = 8});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const GenerateResult r = collect_tokens(&c, &f.m, ids, cases[i].n_prompt,
                                                (GenerateParams){.n_new = cases[i].n_new, .sample = greedy});
        assert_int_equal(c.n, cases[i].expected);
        assert_int_equal(r.stop, cases[i].stop);
        assert_int_equal(r.timing.decode_tokens, cases[i].expected);
        assert_int_equal(r.timing.prefill_tokens, cases[i].n_prompt);
        assert_true(r.timing.ttft_ms > 0 && isnan(r.timing.tpot_ms) == (c.n < 2));
    }
    close_model(&f);
}

/* cases.md row 46. */
static void test_row_46_a_prompt_longer_than_the_context_is_refused_with_both_numbers(void **state) {
    (void)state;
    Fixture f;
    Collected c = {0};
    Error err = {0};
    GenerateResult r;
    int ids[21];
    random_ids(ids, 21, awkward.vocab_size, 6);
    open_small(&f, STORE_DENSE, (Setting){.seq_len = 20});
    assert_int_equal(try_generate(&r, &c, &f.m, ids, 21, (GenerateParams){.n_new = 1}, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "21"));
    assert_non_null(strstr(err.text, "20"));
    assert_int_equal(c.n, 0);
    close_model(&f);
}

static void test_a_context_beyond_the_models_is_refused(void **state) {
    (void)state;
    Fixture f;
    Model m;
    Error err = {0};
    open_small(&f, STORE_DENSE, (Setting){0});
    assert_int_equal(f.m.seq_len, awkward.seq_len);
    assert_int_equal(model_load(&m, &f.ck, f.be, awkward.seq_len + 1, false, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "49"));
    assert_non_null(strstr(err.text, "48"));
    close_model(&f);
}

/* cases.md row 40. */
static void test_row_40_any_eos_id_ends_the_text_unless_ignored(void **state) {
    (void)state;
    enum { AT = 4 };
    Fixture f;
    Collected all = {0}, c = {0};
    open_small(&f, STORE_DENSE, (Setting){0});
    const int prompt[] = {1, 7, 9};
    GenerateParams params = {.n_new = 12, .sample = {.temperature = 2, .top_p = 1, .seed = 8}};
    collect_tokens(&all, &f.m, prompt, 3, params);
    assert_int_equal(all.n, 12);
    for (int i = 0; i < AT; i++) {
        assert_int_not_equal(all.ids[i], all.ids[AT]);
    }
    f.m.config.n_eos = 2;
    f.m.config.eos_id[0] = 60;
    f.m.config.eos_id[1] = all.ids[AT];
    GenerateResult r = collect_tokens(&c, &f.m, prompt, 3, params);
    assert_int_equal(r.stop, STOP_EOS);
    assert_int_equal(c.n, AT);  // the id itself is no text, but it was a step
    assert_memory_equal(c.ids, all.ids, AT * sizeof *c.ids);
    assert_int_equal(r.timing.decode_tokens, AT + 1);

    params.ignore_eos = true;
    r = collect_tokens(&c, &f.m, prompt, 3, params);
    assert_int_equal(r.stop, STOP_LENGTH);
    assert_memory_equal(c.ids, all.ids, sizeof all.ids);
    close_model(&f);
}

static void test_the_sink_can_stop(void **state) {
    (void)state;
    Fixture f;
    Collected c = {.stop_at = 5};
    open_small(&f, STORE_TILED_CBC, (Setting){0});
    const GenerateResult r = collect_tokens(&c, &f.m, (const int[]){3}, 1, (GenerateParams){.n_new = -1});
    assert_int_equal(r.stop, STOP_STRING);
    assert_int_equal(c.n, 5);
    assert_int_equal(r.timing.decode_tokens, 5);
    close_model(&f);
}

/* ---- bytes and sparsity counted ---- */

/* What a product with every column active has to read: all arrays, but nothing that is only padding. */
static double tiled_bytes(const TiledCbc *cbc, size_t nnz) {
    const double tile_rows = (double)tiled_cbc_tile_rows(cbc->rows);
    const double columns = tile_rows * (double)tiled_cbc_cols_padded(cbc->cols);
    const double col_info = 4 * columns, tile_offset = 4 * (columns / TILE_K + 1);
    return col_info + tile_offset + 8 * BITMAP_WORDS * tile_rows * (double)cbc->cols + 2 * (double)nnz;
}

/* cases.md row 27: the bytes read for a token are counted, not assumed. */
static void test_bytes_per_token_are_weights_norms_embedding_row_and_cache(void **state) {
    (void)state;
    enum { N_PROMPT = 3, N_NEW = 9 };
    for (size_t s = 0; s < 2; s++) {
        Fixture f;
        Collected c = {0};
        open_small(&f, storages[s], (Setting){0});
        const GenerateResult r = collect_tokens(&c, &f.m, (const int[]){1, 2, 3}, N_PROMPT,
                                                (GenerateParams){.n_new = N_NEW, .ignore_eos = true});
        double tiled = 0, nonzeros = 0, bytes = 0;
        for (size_t i = 0; i < f.ck.n_sections; i++) {
            const FileSection *section = &f.ck.sections[i];
            if (section->value_type != VALUE_FP16) {
                continue;
            }
            const Matrix m = checkpoint_matrix(&f.ck, section);
            if (section->kind == SECTION_EMBEDDING) {
                bytes += 2.0 * awkward.dim;
            } else if (m.rows == 1) {
                bytes += 2.0 * (double)m.cols;
            } else if (m.format == FORMAT_DENSE) {
                bytes += 2.0 * (double)m.rows * (double)m.stride;
            } else {
                tiled += (double)m.rows * (double)m.cols;
                nonzeros += (double)section->nnz;
                bytes += tiled_bytes(&m.cbc, section->nnz);
            }
        }
        for (int step = 0; step < N_NEW - 1; step++) {
            bytes += (double)config_kv_bytes(&awkward) * (N_PROMPT + step + 1) / (N_NEW - 1);
        }
        assert_true((double)r.products.elements == (N_NEW - 1) * tiled);
        assert_true(r.products.active_elements == r.products.elements);  // no input of these is exactly zero
        assert_true((double)r.products.active_nonzeros == (N_NEW - 1) * nonzeros);
        assert_true(fabs(r.bytes_per_token - bytes) < 1e-6 * bytes);
        close_model(&f);
    }
}

/* ---- numbers that are not finite (rows 32 and 37) ---- */

/* cases.md rows 32 and 37. */
static void test_row_37_a_weight_that_is_not_finite_stops_the_run_with_layer_and_site(void **state) {
    (void)state;
    static const float values[] = {NAN, INFINITY, -INFINITY};
    // A bad weight shows at the next product's input.
    static const struct {
        Tensor tensor;
        int layer;
        const char *what, *where;
    } cases[] = {
        {TENSOR_EMBEDDING, -1, "attention input", "layer 0"},
        {TENSOR_ATTN_NORM, 0, "attention input", "layer 0"},
        {TENSOR_Q, 0, "attention output", "layer 0"},
        {TENSOR_K, 1, "attention output", "layer 1"},
        {TENSOR_V, 1, "attention output", "layer 1"},
        {TENSOR_O, 0, "MLP input", "layer 0"},
        {TENSOR_MLP_NORM, 1, "MLP input", "layer 1"},
        {TENSOR_GATE, 0, "MLP hidden", "layer 0"},
        {TENSOR_UP, 1, "MLP hidden", "layer 1"},
        {TENSOR_DOWN, 0, "attention input", "layer 1"},
        {TENSOR_DOWN, 1, "final head", ""},
        {TENSOR_FINAL_NORM, -1, "final head", ""},
        {TENSOR_HEAD, -1, "logits", "position 2"},
    };
    static const int prompt[] = {0, 0, 0};  // the embedding's first row is the one with a bad weight
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (size_t v = 0; v < 3 * 2; v++) {
            const Poison poison = {cases[i].tensor, cases[i].layer, values[v / 2]};
            Source source = small_source(&poison);
            Fixture f;
            GenerateResult r;
            Collected c = {0};
            Error err = {0};
            open_model(&f, &source, storages[v % 2], (Setting){0});
            const int rc = try_generate(&r, &c, &f.m, prompt, 3, (GenerateParams){.n_new = 4}, &err);
            if (rc != ERR_NUMBER || !strstr(err.text, cases[i].what) || !strstr(err.text, cases[i].where)) {
                fail_msg("weight %g, storage %d: status %d, '%s' does not say '%s', '%s'",
                         (double)poison.value, storages[v % 2], rc, err.text, cases[i].what, cases[i].where);
            }
            assert_int_equal(c.n, 0);
            close_model(&f);
        }
    }
}

static void test_row_37_a_fault_in_a_decode_step_stops_before_its_token(void **state) {
    (void)state;
    const Poison poison = {TENSOR_EMBEDDING, -1, NAN};  // row 0: wrong only where token 0 comes
    Source source = small_source(&poison);
    for (size_t s = 0; s < 2; s++) {
        Fixture f;
        Collected c = {0};
        GenerateResult r;
        Error err = {0};
        open_model(&f, &source, storages[s], (Setting){0});
        const SampleParams spread = {.temperature = 1e6f, .top_p = 1, .seed = 3};  // soon draws every token
        const GenerateParams params = {.n_new = -1, .ignore_eos = true, .sample = spread};
        // Whatever the seed draws: the run ends at the first token 0, if there is one before the context is
        // full.
        const int rc = try_generate(&r, &c, &f.m, (const int[]){1}, 1, params, &err);
        assert_int_equal(rc, ERR_NUMBER);
        assert_non_null(strstr(err.text, "attention input of layer 0"));
        assert_true(c.n >= 1 && c.ids[c.n - 1] == 0);
        // The next run is clean: the fault was reported once.
        err.code = 0;
        assert_int_equal(try_generate(&r, &c, &f.m, (const int[]){1}, 1, (GenerateParams){.n_new = 1}, &err),
                         OK);
        close_model(&f);
    }
}

static void test_row_37_perplexity_stops_at_a_logit_that_is_not_finite(void **state) {
    (void)state;
    static const float values[] = {NAN, INFINITY, -INFINITY};
    for (size_t v = 0; v < 3; v++) {
        const Poison poison = {TENSOR_HEAD, -1, values[v]};
        Source source = small_source(&poison);
        Fixture f;
        PerplexityResult r;
        Error err = {0};
        int ids[12];
        random_ids(ids, 12, awkward.vocab_size, 9);
        open_model(&f, &source, STORE_DENSE, (Setting){.all_logits = true});
        const int rc = perplexity(&r, &f.m, ids, 12, &(PerplexityParams){0}, NULL, NULL, &err);
        if (rc != ERR_NUMBER || !strstr(err.text, "position 0")) {
            fail_msg("weight %g: status %d, '%s'", (double)values[v], rc, err.text);
        }
        close_model(&f);
    }
}

/* ---- perplexity's protocol ---- */

typedef struct {
    size_t n_windows, n_scored;
    double nll, nll_stderr;
} Expected;

static double nll_of(const float *logits, int vocab, int target) {
    double sum = 0;
    for (int i = 0; i < vocab; i++) {
        sum += exp((double)logits[i] - (double)logits[target]);
    }
    return log(sum);
}

/* The header's words: single decode steps, a mark on each prediction that has been scored. */
static Expected brute_force(Model *m, const int *ids, int n, int window, int stride, int prefix) {
    const int vocab = m->config.vocab_size;
    bool scored[MAX_IDS] = {false};
    double nll[MAX_IDS], sum = 0, squares = 0;
    Expected e = {0};
    float *logits = malloc((size_t)window * (size_t)vocab * sizeof *logits);
    for (int begin = 0, end = 0; end < n - 1; begin += stride) {
        end = begin + window < n - 1 ? begin + window : n - 1;
        e.n_windows++;
        all_logits(logits, m, ids + begin, end - begin, 1);
        for (int i = prefix; i < end - begin; i++) {
            if (!scored[begin + i]) {
                scored[begin + i] = true;
                nll[e.n_scored++] = nll_of(logits + i * vocab, vocab, ids[begin + i + 1]);
            }
        }
    }
    for (size_t i = 0; i < e.n_scored; i++) {
        sum += nll[i];
    }
    e.nll = sum / (double)e.n_scored;
    for (size_t i = 0; i < e.n_scored; i++) {
        squares += (nll[i] - e.nll) * (nll[i] - e.nll);
    }
    e.nll_stderr = sqrt(squares / (double)(e.n_scored - 1) / (double)e.n_scored);
    free(logits);
    return e;
}

typedef struct {
    size_t calls, total;
    double nll;
} Progressed;

static void note_progress(void *user, size_t done, size_t total, double nll) {
    Progressed *p = user;
    assert_int_equal(done, ++p->calls);
    p->total = total;
    p->nll = nll;
}

static void test_perplexity_scores_each_token_as_the_header_says(void **state) {
    (void)state;
    static const struct {
        int n, max_tokens;           // ids given; used, 0 = all
        int window, stride, prefix;  // 0 = the default
    } cases[] = {
        {41, 0, 10, 0, 0},  {40, 0, 10, 0, 0},  {42, 0, 10, 0, 0},   {41, 0, 10, 10, 3}, {45, 0, 10, 3, 0},
        {45, 0, 10, 3, 2},  {45, 0, 10, 3, 7},  {45, 0, 10, 3, 9},   {45, 0, 10, 1, 0},  {45, 0, 10, 9, 1},
        {30, 0, 1, 0, 0},   {12, 0, 10, 0, 4},  {9, 0, 10, 0, 0},    {9, 0, 10, 2, 5},   {100, 0, 0, 0, 0},
        {100, 0, 0, 20, 8}, {60, 33, 10, 5, 1}, {60, 500, 17, 4, 0}, {3, 0, 10, 0, 0},
    };
    enum { MAX_CHUNK = 4 };  // so that windows are computed in several pieces
    Fixture f;
    int ids[100];
    random_ids(ids, 100, awkward.vocab_size, 10);
    open_small(&f, STORE_DENSE, (Setting){.all_logits = true, .max_tokens = MAX_CHUNK});
    assert_int_equal(f.m.chunk, MAX_CHUNK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int window = cases[i].window ? cases[i].window : awkward.seq_len;
        const int stride = cases[i].stride ? cases[i].stride : window;
        const int n =
            cases[i].max_tokens && cases[i].max_tokens < cases[i].n ? cases[i].max_tokens : cases[i].n;
        const PerplexityParams params = {cases[i].window, cases[i].stride, cases[i].prefix,
                                         (size_t)cases[i].max_tokens};
        PerplexityResult r;
        Progressed progressed = {0};
        Error err = {0};
        memset(&r, 0xa5, sizeof r);
        const Expected e = brute_force(&f.m, ids, n, window, stride, cases[i].prefix);
        assert_int_equal(
            perplexity(&r, &f.m, ids, (size_t)cases[i].n, &params, note_progress, &progressed, &err), OK);
        assert_int_equal(r.protocol.window, window);
        assert_int_equal(r.protocol.stride, stride);
        assert_int_equal(r.n_windows, e.n_windows);
        assert_int_equal(r.n_scored, e.n_scored);
        // Rounding moves a mean by far less; one token more or less, or another's NLL, by more.
        assert_true(fabs(r.nll - e.nll) <= 2e-3);
        assert_true(fabs(r.nll_stderr - e.nll_stderr) <= 2e-3);
        assert_true(fabs(r.perplexity - exp(r.nll)) <= 1e-12 * r.perplexity);
        assert_true(progressed.calls == r.n_windows && progressed.total == r.n_windows &&
                    progressed.nll == r.nll);
    }
    close_model(&f);
}

static void test_one_scored_token_has_no_standard_error(void **state) {
    (void)state;
    Fixture f;
    PerplexityResult r;
    Error err = {0};
    const int ids[] = {1, 5, 9, 13};
    open_small(&f, STORE_DENSE, (Setting){.all_logits = true});
    const PerplexityParams params = {.window = 10, .prefix = 2};
    assert_int_equal(perplexity(&r, &f.m, ids, 4, &params, NULL, NULL, &err), OK);
    assert_int_equal(r.n_scored, 1);
    assert_true(isnan(r.nll_stderr) && isfinite(r.nll));
    close_model(&f);
}

static void test_perplexity_refuses_sizes_that_do_not_fit(void **state) {
    (void)state;
    static const struct {
        PerplexityParams params;
        size_t n;
        int first_id;
        const char *reason;
    } cases[] = {
        {{.window = 31}, 20, 1, "window of 31"},
        {{0}, 20, 1, "window of 48"},  // the model's context, longer than the cache
        {{.window = -1}, 20, 1, "window of -1"},
        {{.window = 8, .stride = 9}, 20, 1, "stride of 9"},
        {{.window = 8, .stride = -1}, 20, 1, "stride of -1"},
        {{.window = 8, .prefix = 8}, 20, 1, "prefix of 8"},
        {{.window = 8, .prefix = -1}, 20, 1, "prefix of -1"},
        {{.window = 8}, 1, 1, "1 tokens are too few"},
        {{.window = 8}, 0, 1, "0 tokens are too few"},
        {{.window = 8, .prefix = 7}, 8, 1, "8 tokens are too few"},
        {{.window = 8, .max_tokens = 1}, 20, 1, "1 tokens are too few"},
        {{.window = 8}, 20, 61, "token 0 is 61, the vocabulary has 61"},
        {{.window = 8}, 20, -1, "token 0 is -1"},
    };
    Fixture f;
    open_small(&f, STORE_DENSE, (Setting){.seq_len = 30, .all_logits = true});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        PerplexityResult r;
        Error err = {0};
        int ids[20];
        random_ids(ids, 20, awkward.vocab_size, 11);
        ids[0] = cases[i].first_id;
        assert_int_equal(perplexity(&r, &f.m, ids, cases[i].n, &cases[i].params, NULL, NULL, &err),
                         ERR_USAGE);
        if (!strstr(err.text, cases[i].reason)) {
            fail_msg("'%s' instead of '%s'", err.text, cases[i].reason);
        }
    }
    close_model(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_awkward_sizes_give_the_logits_of_the_double_reference),
        cmocka_unit_test(test_stories260k_tells_the_published_story),
        cmocka_unit_test(test_demo_equals_golden_json),
        cmocka_unit_test(test_books_equal_golden_json),
        cmocka_unit_test(test_demo_predicts_heldout_text_as_the_reference),
        cmocka_unit_test(test_books_predict_heldout_text_as_the_reference),
        cmocka_unit_test(test_row_12_the_slowest_pair_turns_as_theta_says),
        cmocka_unit_test(test_prefill_of_n_tokens_equals_n_decode_steps),
        cmocka_unit_test(test_pieces_of_any_size_give_the_same_logits),
        cmocka_unit_test(test_the_expanded_form_has_the_bits_of_a_dense_file),
        cmocka_unit_test(test_a_seed_gives_the_same_tokens_whatever_the_threads),
        cmocka_unit_test(test_a_recorded_step_gives_the_bits_of_single_launches),
        cmocka_unit_test(test_thresholds_may_change_between_recorded_steps),
        cmocka_unit_test(test_row_46_n_counts_new_tokens_and_the_context_limits_them),
        cmocka_unit_test(test_row_46_a_prompt_longer_than_the_context_is_refused_with_both_numbers),
        cmocka_unit_test(test_a_context_beyond_the_models_is_refused),
        cmocka_unit_test(test_row_40_any_eos_id_ends_the_text_unless_ignored),
        cmocka_unit_test(test_the_sink_can_stop),
        cmocka_unit_test(test_bytes_per_token_are_weights_norms_embedding_row_and_cache),
        cmocka_unit_test(test_row_37_a_weight_that_is_not_finite_stops_the_run_with_layer_and_site),
        cmocka_unit_test(test_row_37_a_fault_in_a_decode_step_stops_before_its_token),
        cmocka_unit_test(test_row_37_perplexity_stops_at_a_logit_that_is_not_finite),
        cmocka_unit_test(test_perplexity_scores_each_token_as_the_header_says),
        cmocka_unit_test(test_one_scored_token_has_no_standard_error),
        cmocka_unit_test(test_perplexity_refuses_sizes_that_do_not_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
