/* test_thresholds.c: dynamic pruning from the quantiles in a model file: how they are measured, read, and turned into
 * thresholds, and what those reach. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "../export/dynamic.h"
#include "../export/source.h"
#include "../model/generate.h"
#include "../model/input.h"
#include "../model/perplexity.h"
#include "../model/reach.h"
#include "skip.h"
#include "support.h"

#define HELDOUT "../shared/data/text/heldout-32769.tok"
#define HELDOUT_WINDOWS 8  // of 512 tokens
#define WINDOW 512

static const char *backend_name(void) {
    const char *name = getenv("SPDP_TEST_BACKEND");
    return name ? name : "cpu";
}

/* End the test as skipped where an input that does not come with the repository is missing. */
static void need(const char *path) {
    if (access(path, R_OK) != 0) {
        print_message("%s is absent\n", path);
        skip();
    }
}

/* ---- model files ---- */

/* Which matrices are stored as Tiled-CBC, and without which of their weights. */
typedef struct {
    bool mlp, attn;
    float drop;  // weights below so many times the root mean square of their matrix
} Storage;

#define HALF 0.6745f  // of normal weights are below so many times their root mean square
static const Storage all_tiled = {true, true, 0}, mlp_tiled = {true, false, 0}, all_dense = {false, false, 0};
static const Storage half_tiled = {true, true, HALF};

static void drop_small(fp16 *w, size_t n, float drop) {
    double squares = 0;
    for (size_t i = 0; i < n; i++) {
        const double v = (double)fp16_to_float(w[i]);
        squares += v * v;
    }
    const double limit = (double)drop * sqrt(squares / (double)n);
    for (size_t i = 0; i < n; i++) {
        w[i] = fabs((double)fp16_to_float(w[i])) < limit ? 0 : w[i];
    }
}

/* One matrix of the file from parts that stand one below the other, or row by row in turn. */
typedef struct {
    uint32_t kind;
    Tensor parts[3];
    size_t n_parts;
    bool in_turn;
} Fused;

static void write_matrix(Writer *w, Source *s, const Fused *f, int layer, bool tiled, float drop) {
    size_t rows = 0, cols = 0, part_rows, first = 0;
    Error err = {0};
    for (size_t i = 0; i < f->n_parts; i++) {
        tensor_shape(&s->config, f->parts[i], &part_rows, &cols);
        rows += part_rows;
    }
    const size_t stride = dense_stride(cols);
    fp16 *m = memory_alloc(rows * stride * sizeof *m);
    assert_non_null(m);
    for (size_t i = 0; i < f->n_parts; i++) {
        const size_t step = f->in_turn ? f->n_parts : 1;
        assert_int_equal(s->read(s, f->parts[i], layer, m + first * stride, step * stride, 2, &err), OK);
        tensor_shape(&s->config, f->parts[i], &part_rows, &cols);
        first += f->in_turn ? 1 : part_rows;
    }
    const MatrixLabel label = {.kind = f->kind, .layer = layer, .name = "test"};
    if (tiled) {
        TiledCbc cbc;
        TiledCbcStats stats;
        void *block;
        drop_small(m, rows * stride, drop);
        assert_int_equal(tiled_cbc_encode(&cbc, &block, &stats, m, rows, cols, stride, 2, &err), OK);
        assert_int_equal(writer_tiled_cbc(w, &label, &cbc, block, &stats, &err), OK);
        free(block);
    } else {
        assert_int_equal(writer_dense(w, &label, m, rows, cols, &err), OK);
    }
    free(m);
}

static const char *scratch_path(void) {
    static char path[400];
    snprintf(path, sizeof path, "%s/test_thresholds.%ld.bin", getenv("BUILD") ? getenv("BUILD") : "build", (long)getpid());
    return path;
}

/* All matrices of a source in a file that is not finished. */
static Writer *write_model(Source *s, Storage storage) {
    Writer *w;
    Error err = {0};
    assert_int_equal(writer_open(&w, scratch_path(), &s->config, true, &err), OK);
    write_matrix(w, s, &(Fused){SECTION_EMBEDDING, {TENSOR_EMBEDDING}, 1, false}, -1, false, 0);
    for (int l = 0; l < s->config.n_layers; l++) {
        write_matrix(w, s, &(Fused){SECTION_ATTN_NORM, {TENSOR_ATTN_NORM}, 1, false}, l, false, 0);
        write_matrix(w, s, &(Fused){SECTION_QKV, {TENSOR_Q, TENSOR_K, TENSOR_V}, 3, false}, l, storage.attn, storage.drop);
        write_matrix(w, s, &(Fused){SECTION_O, {TENSOR_O}, 1, false}, l, storage.attn, storage.drop);
        write_matrix(w, s, &(Fused){SECTION_MLP_NORM, {TENSOR_MLP_NORM}, 1, false}, l, false, 0);
        write_matrix(w, s, &(Fused){SECTION_GATE_UP, {TENSOR_GATE, TENSOR_UP}, 2, true}, l, storage.mlp, storage.drop);
        write_matrix(w, s, &(Fused){SECTION_DOWN, {TENSOR_DOWN}, 1, false}, l, storage.mlp, storage.drop);
    }
    write_matrix(w, s, &(Fused){SECTION_FINAL_NORM, {TENSOR_FINAL_NORM}, 1, false}, -1, false, 0);
    if (!s->tied) {
        write_matrix(w, s, &(Fused){SECTION_HEAD, {TENSOR_HEAD}, 1, false}, -1, false, 0);
    }
    return w;
}

/* The finished file, opened; its name is gone at once. */
static void finish_model(Checkpoint *ck, Writer *w) {
    Error err = {0};
    assert_int_equal(writer_finish(w, NULL, &err), OK);
    assert_int_equal(checkpoint_open(ck, scratch_path(), &err), OK);
    unlink(scratch_path());
}

#define SMALL "64:160:2:4:2:97:64"

static Writer *write_small(Storage storage) {
    Source *s;
    Error err = {0};
    assert_int_equal(source_open_synthetic(&s, SMALL, 7, &err), OK);
    s->config.bos_id = 1;
    Writer *w = write_model(s, storage);
    s->free(s);
    return w;
}

static Backend *open_backend(void) {
    Backend *be;
    Error err = {0};
    assert_int_equal(backend_open(&be, backend_name(), 0, true, 0, NULL, NULL, &err), OK);
    return be;
}

static void random_text(CalibText *text, const Config *config, size_t n, size_t length) {
    Error err = {0};
    assert_int_equal(calib_text_random(text, config, &(CalibParams){.max_tokens = n, .length = length}, 3, &err), OK);
}

/* ---- quantiles by hand ---- */

enum { HAND_TABLES = 2, HAND_QUANTILES = 3, HAND_LAYERS = 2 };

/* Two tables, measured at 0 and 0.5, of three quantiles: 0, v, 2v, where v differs from site to site. */
typedef struct {
    FileQuantiles info;
    float values[HAND_TABLES][HAND_LAYERS][N_DP_SITES][HAND_QUANTILES];
} Hand;

static float hand_value(int table, int layer, int site) { return (float)((table + 1) * (10 * layer + site + 1)); }

static Hand by_hand(void) {
    Hand h = {.info = {.default_dp = 0.4,
                       .n_layers = HAND_LAYERS,
                       .n_sites = N_DP_SITES,
                       .n_tables = HAND_TABLES,
                       .n_quantiles = HAND_QUANTILES,
                       .measured_at = {0, 0.5f}}};
    for (int i = 0; i < HAND_TABLES * HAND_LAYERS * N_DP_SITES; i++) {
        const int table = i / N_DP_SITES / HAND_LAYERS, layer = i / N_DP_SITES % HAND_LAYERS, site = i % N_DP_SITES;
        for (int q = 0; q < HAND_QUANTILES; q++) {
            h.values[table][layer][site][q] = (float)q * hand_value(table, layer, site);
        }
    }
    return h;
}

static void expect_near(double got, double want) {
    if (!(fabs(got - want) <= 1e-5 * fmax(1, fabs(want)))) {
        fail_msg("%.9g instead of %.9g", got, want);
    }
}

static void thresholds_lie_between_quantiles_and_between_tables(void **state) {
    (void)state;
    const Hand h = by_hand();
    const Quantiles q = quantiles_view(&h);
    for (int i = 0; i < HAND_LAYERS * N_DP_SITES; i++) {
        const int layer = i / N_DP_SITES;
        const Site site = (Site)(i % N_DP_SITES);
        const double v0 = (double)hand_value(0, layer, (int)site), v1 = (double)hand_value(1, layer, (int)site);
        assert_true(quantile_threshold(&q, layer, site, 0) == 0);
        expect_near((double)quantile_threshold(&q, layer, site, 0.25), 0.5 * (0.5 * v0) + 0.5 * (0.5 * v1));
        expect_near((double)quantile_threshold(&q, layer, site, 0.4), 0.2 * (0.8 * v0) + 0.8 * (0.8 * v1));
        expect_near((double)quantile_threshold(&q, layer, site, 0.5), v1);
        expect_near((double)quantile_threshold(&q, layer, site, 0.95), 1.9 * v1);  // above the last table: in it
        expect_near((double)quantile(&q, 0, layer, site, 1), 2 * v0);
    }
}

/* A small model with the tables by hand (NULL: without any). */
static void small_with(Checkpoint *ck, Storage storage, const Hand *h) {
    Writer *w = write_small(storage);
    Error err = {0};
    if (h) {
        assert_int_equal(writer_bytes(w, SECTION_QUANTILES, "quantiles", h, sizeof *h, &err), OK);
    }
    finish_model(ck, w);
}

static void the_default_ratio_stands_where_none_is_asked_for(void **state) {
    (void)state;
    const Hand h = by_hand();
    const Quantiles q = quantiles_view(&h);
    Checkpoint ck;
    Thresholds t;
    Error err = {0};
    small_with(&ck, all_tiled, &h);
    assert_int_equal(thresholds_choose(&t, &ck, NULL, false, &err), OK);
    assert_true(t.ratios.mlp == 0.4 && t.ratios.attn == 0.4 && t.asked == 0.4);
    assert_true(t.values[N_DP_SITES + SITE_ATTN_OUT] == quantile_threshold(&q, 1, SITE_ATTN_OUT, 0.4));
    thresholds_free(&t);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0.8, NAN}, true, &err), OK);
    assert_true(t.ratios.mlp == 0.8 && t.ratios.attn == 0.4);
    assert_true(t.asked > 0.4 && t.asked < 0.8);
    assert_true(t.values[SITE_MLP_HIDDEN] == quantile_threshold(&q, 0, SITE_MLP_HIDDEN, 0.8));
    assert_true(t.values[SITE_ATTN_IN] == quantile_threshold(&q, 0, SITE_ATTN_IN, 0.4));
    thresholds_free(&t);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0, 0}, false, &err), OK);
    for (int i = 0; i < HAND_LAYERS * N_DP_SITES; i++) {
        assert_true(t.values[i] == 0);
    }
    thresholds_free(&t);
    checkpoint_close(&ck);
}

static void dense_sites_are_skipped_but_not_when_they_are_named(void **state) {
    (void)state;
    const Hand h = by_hand();
    Checkpoint ck;
    Thresholds t;
    Error err = {0};
    small_with(&ck, mlp_tiled, &h);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0.3, 0.3}, false, &err), OK);
    assert_int_equal(t.n_tiled[SITE_ATTN_IN], 0);
    assert_int_equal(t.n_tiled[SITE_MLP_IN], 2);
    assert_true(t.values[SITE_ATTN_IN] == 0 && t.values[SITE_ATTN_OUT] == 0);
    assert_true(t.values[SITE_MLP_IN] > 0 && t.values[SITE_MLP_HIDDEN] > 0);
    thresholds_free(&t);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0.3, 0}, true, &err), OK);  // nothing asked of attention
    thresholds_free(&t);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){NAN, 0.3}, true, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "attn=0.3"));
    checkpoint_close(&ck);
    small_with(&ck, all_dense, &h);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0.3, NAN}, true, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "mlp=0.3"));
    checkpoint_close(&ck);
}

static void a_file_without_quantiles_says_how_to_get_some(void **state) {
    (void)state;
    Checkpoint ck;
    Thresholds t;
    Error err = {0};
    small_with(&ck, all_tiled, NULL);
    assert_int_equal(thresholds_choose(&t, &ck, NULL, false, &err), OK);
    assert_true(t.asked == 0 && t.values[SITE_MLP_IN] == 0);
    thresholds_free(&t);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0, 0}, true, &err), OK);
    thresholds_free(&t);
    assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0.2, 0.2}, false, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "--dp 0.2"));
    assert_non_null(strstr(err.text, "--calib"));
    checkpoint_close(&ck);
}

/* ---- the reader ---- */

/* A model file with these bytes as its quantiles: what does opening it say? */
static int open_with(const void *bytes, size_t n, Error *err) {
    Writer *w = write_small(all_tiled);
    Checkpoint ck;
    assert_int_equal(writer_bytes(w, SECTION_QUANTILES, "quantiles", bytes, n, err), OK);
    assert_int_equal(writer_finish(w, NULL, err), OK);
    const int rc = checkpoint_open(&ck, scratch_path(), err);
    unlink(scratch_path());
    if (!rc) {
        checkpoint_close(&ck);
    }
    return rc;
}

static void expect_refusal(const Hand *h, size_t n, const char *reason) {
    Error err = {0};
    assert_int_not_equal(open_with(h, n, &err), OK);
    if (!strstr(err.text, "quantiles") || !strstr(err.text, reason)) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, reason);
    }
}

static void damaged_quantiles_are_refused(void **state) {
    (void)state;
    Error err = {0};
    Hand h = by_hand();
    assert_int_equal(open_with(&h, sizeof h, &err), OK);
    expect_refusal(&h, sizeof h - 4, "bytes");
    expect_refusal(&h, sizeof h.info, "bytes");
    expect_refusal(&h, 63, "too few");
    expect_refusal(&h, 0, "too few");
#define WITH(field, wrong, reason)       \
    do {                                 \
        h = by_hand();                   \
        h.field = wrong;                 \
        expect_refusal(&h, sizeof h, reason); \
    } while (0)
    WITH(info.n_layers, 3, "layers");
    WITH(info.n_sites, 5, "sites");
    WITH(info.n_tables, 0, "tables");
    WITH(info.n_tables, 9, "tables");
    WITH(info.n_tables, UINT32_MAX, "tables");
    WITH(info.n_quantiles, 1, "quantiles");
    WITH(info.n_quantiles, UINT32_MAX, "quantiles");
    WITH(info.n_quantiles, 4, "bytes");
    WITH(info.default_dp, 0.96, "ratio");
    WITH(info.default_dp, -0.1, "ratio");
    WITH(info.default_dp, (double)NAN, "ratio");
    WITH(info.measured_at[0], 0.1f, "order");
    WITH(info.measured_at[1], 0, "order");
    WITH(info.measured_at[1], 1, "order");
    WITH(info.measured_at[1], NAN, "order");
    WITH(values[0][0][0][0], 0.5f, "ascend");
    WITH(values[0][1][2][1], -1, "ascend");
    WITH(values[1][0][3][1], 1000, "table 1, layer 0, site 3");
    WITH(values[1][1][3][2], INFINITY, "ascend");
    WITH(values[1][1][3][2], NAN, "ascend");
#undef WITH
}

/* Whatever the bytes are, they are refused or give thresholds that are finite and not negative. */
static void no_quantiles_crash_the_reader(void **state) {
    (void)state;
    uint64_t random = 11;
    int accepted = 0;
    for (int i = 0; i < 400; i++) {
        Hand h = by_hand();
        unsigned char *bytes = (unsigned char *)&h;
        const size_t where = i % 2 ? sizeof h.info : sizeof h;
        for (uint32_t flips = random_below(&random, 3) + 1; flips > 0; flips--) {
            bytes[random_below(&random, (uint32_t)where)] ^= (unsigned char)(1u << random_below(&random, 8));
        }
        Writer *w = write_small(all_tiled);
        Checkpoint ck;
        Thresholds t;
        Error err = {0};
        assert_int_equal(writer_bytes(w, SECTION_QUANTILES, "quantiles", &h, sizeof h, &err), OK);
        if (writer_view(w, &ck, &err) == OK) {
            accepted++;
            assert_int_equal(thresholds_choose(&t, &ck, &(Ratios){0.95, 0.3}, false, &err), OK);
            for (int k = 0; k < HAND_LAYERS * N_DP_SITES; k++) {
                assert_true(t.values[k] >= 0 && isfinite(t.values[k]));
            }
            thresholds_free(&t);
            checkpoint_close(&ck);
        }
        writer_abort(w);
    }
    assert_in_range(accepted, 1, 399);
}

/* ---- the writer ---- */

static unsigned char *file_bytes(const char *path, size_t *n) {
    Bytes b;
    Error err = {0};
    assert_int_equal(input_read_file(&b, path, &err), OK);
    *n = b.n;
    return (unsigned char *)b.data;
}

static void a_view_leaves_no_trace_in_the_file(void **state) {
    (void)state;
    const char byte = 'x';
    unsigned char *files[2];
    size_t n[2];
    for (int viewed = 0; viewed < 2; viewed++) {
        Writer *w = write_small(all_tiled);
        Error err = {0};
        Checkpoint ck;
        if (viewed) {
            assert_int_equal(writer_view(w, &ck, &err), OK);
            assert_int_equal(ck.config.hidden_dim, 160);
            assert_int_equal(checkpoint_verify(&ck, &err), OK);
            assert_null(checkpoint_find(&ck, SECTION_PROVENANCE, -1));
            assert_int_not_equal(access(scratch_path(), F_OK), 0);
            char temporary[500];
            snprintf(temporary, sizeof temporary, "%s.partial", scratch_path());
            size_t n_temporary;
            unsigned char *so_far = file_bytes(temporary, &n_temporary);
            assert_memory_not_equal(so_far, FILE_MAGIC, 8);
            free(so_far);
            checkpoint_close(&ck);
        }
        assert_int_equal(writer_bytes(w, SECTION_PROVENANCE, "provenance", &byte, 1, &err), OK);
        assert_int_equal(writer_finish(w, NULL, &err), OK);
        files[viewed] = file_bytes(scratch_path(), &n[viewed]);
        unlink(scratch_path());
    }
    assert_int_equal(n[0], n[1]);
    assert_memory_equal(files[0], files[1], n[0]);
    free(files[0]);
    free(files[1]);
}

/* ---- measuring ---- */

/* Magnitudes of the inputs of one site. */
typedef struct {
    const Model *m;
    int layer;
    Site site;
    fp16 *x;
    size_t n, room;
} Collected;

static void collect(void *user, int layer, Site site, const fp16 *x, int n, int width) {
    Collected *c = user;
    if (layer == c->layer && site == c->site) {
        const size_t count = (size_t)n * (size_t)width;
        assert_true(c->n + count <= c->room);
        c->m->be->read(c->m->be, c->x + c->n, x, count * sizeof *x);
        for (size_t i = 0; i < count; i++) {
            c->x[c->n + i] &= 0x7fff;
        }
        c->n += count;
    }
}

static int compare_magnitudes(const void *a, const void *b) {
    return (int)*(const fp16 *)a - (int)*(const fp16 *)b;
}

static void quantiles_are_those_of_the_sorted_inputs(void **state) {
    (void)state;
    enum { TOKENS = 1024, LENGTH = 64 };
    Checkpoint ck;
    CalibText text;
    FileQuantiles *section;
    size_t bytes;
    Error err = {0};
    Model m;
    finish_model(&ck, write_small(all_tiled));
    Backend *be = open_backend();
    random_text(&text, &ck.config, TOKENS, LENGTH);
    assert_int_equal(calibrate_dynamic(&section, &bytes, &ck, be, &text, 0.25, true, &err), OK);
    assert_true(section->default_dp == 0.25 && section->n_tables == 4 && section->n_quantiles >= 200);
    const Quantiles q = quantiles_view(section);
    assert_int_equal(model_load(&m, &ck, be, LENGTH, false, &err), OK);
    for (int i = 0; i < ck.config.n_layers * N_DP_SITES; i++) {
        Collected c = {.m = &m, .layer = i / N_DP_SITES, .site = (Site)(i % N_DP_SITES), .room = TOKENS * 160};
        c.x = malloc(c.room * sizeof *c.x);
        const InputHook hook = {collect, &c};
        for (int begin = 0; begin < TOKENS; begin += LENGTH) {
            m.hook = NULL;  // a BOS does not count
            model_forward(&m, text.ids + begin, 1, 0, PREFILL);
            m.hook = &hook;
            model_forward(&m, text.ids + begin + 1, LENGTH - 1, 1, PREFILL);
            m.hook = NULL;
        }
        qsort(c.x, c.n, sizeof *c.x, compare_magnitudes);
        for (int k = 1; k < 200; k++) {
            // The share of inputs that the quantile skips: at least k / 200, and below it once the value itself is kept.
            const float v = quantile(&q, 0, c.layer, c.site, k / 200.0);
            size_t at_most = 0, below = 0;
            for (size_t j = 0; j < c.n; j++) {
                at_most += fp16_to_float(c.x[j]) <= v;
                below += fp16_to_float(c.x[j]) < v * 0.9999f;
            }
            assert_true((double)at_most >= k / 200.0 * (double)c.n - 1e-6 * (double)c.n);
            assert_true((double)below <= k / 200.0 * (double)c.n + 1e-6 * (double)c.n);
        }
        free(c.x);
    }
    model_free(&m);
    free(section);
    calib_text_free(&text);
    be->free(be);
    checkpoint_close(&ck);
}

static void dynamic_add_completes_a_file(void **state) {
    (void)state;
    Writer *w = write_small(mlp_tiled);
    Backend *be = open_backend();
    CalibText text;
    Checkpoint ck;
    Error err = {0};
    random_text(&text, &(Config){.seq_len = 64, .vocab_size = 97, .bos_id = 1}, 1000, 64);
    assert_int_equal(dynamic_add(w, be, &text, 0.4, true, &err), OK);
    finish_model(&ck, w);
    const FileSection *s = checkpoint_find(&ck, SECTION_QUANTILES, -1);
    assert_non_null(s);
    assert_true(s->flags & SECTION_OPTIONAL);
    assert_int_equal(checkpoint_verify(&ck, &err), OK);
    Thresholds t;
    assert_int_equal(thresholds_choose(&t, &ck, NULL, false, &err), OK);
    assert_true(t.asked == 0.4 && t.values[SITE_MLP_HIDDEN] > 0 && t.values[SITE_ATTN_IN] == 0);
    thresholds_free(&t);
    checkpoint_close(&ck);
    calib_text_free(&text);
    be->free(be);
}

static void an_activation_that_is_not_finite_stops_calibration(void **state) {
    (void)state;
    Source *s;
    Error err = {0};
    CalibText text;
    assert_int_equal(source_open_synthetic(&s, SMALL, 7, &err), OK);
    Writer *w = write_model(s, all_tiled);
    Checkpoint ck;
    finish_model(&ck, w);
    unsigned char *copy = memory_alloc(ck.bytes);
    memcpy(copy, ck.data, ck.bytes);
    const FileSection *norm = checkpoint_find(&ck, SECTION_MLP_NORM, 1);
    const fp16 nan = 0x7e00;
    memcpy(copy + norm->offset, &nan, sizeof nan);
    Checkpoint poisoned;
    assert_int_equal(checkpoint_parse(&poisoned, copy, ck.bytes, &err), OK);
    Backend *be = open_backend();
    FileQuantiles *section;
    size_t bytes;
    random_text(&text, &ck.config, 1000, 64);
    assert_int_equal(calibrate_dynamic(&section, &bytes, &poisoned, be, &text, 0.4, true, &err), ERR_NUMBER);
    assert_non_null(strstr(err.text, "MLP input of layer 1"));
    be->free(be);
    calib_text_free(&text);
    free(copy);
    checkpoint_close(&ck);
    s->free(s);
}

/* ---- what thresholds reach ---- */

/* A calibrated model with dynamic pruning at a ratio. */
typedef struct {
    Checkpoint ck;
    Backend *be;
    Model m;
    Thresholds t;
} Fixture;

static void open_calibrated_small(Fixture *f, Storage storage, double ratio) {
    Writer *w = write_small(storage);
    CalibText text;
    Error err = {0};
    f->be = open_backend();
    random_text(&text, &(Config){.seq_len = 64, .vocab_size = 97, .bos_id = 1}, 2000, 64);
    assert_int_equal(dynamic_add(w, f->be, &text, ratio, true, &err), OK);
    calib_text_free(&text);
    finish_model(&f->ck, w);
    assert_int_equal(model_load(&f->m, &f->ck, f->be, 64, true, &err), OK);
    assert_int_equal(thresholds_choose(&f->t, &f->ck, NULL, false, &err), OK);
    model_set_thresholds(&f->m, f->t.values);
}

static void close_fixture(Fixture *f) {
    thresholds_free(&f->t);
    model_free(&f->m);
    f->be->free(f->be);
    checkpoint_close(&f->ck);
}

/* -log softmax(logits)[target] in double. */
static double nll_of(const float *logits, int n, int target) {
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++) {
        max = (double)logits[i] > max ? (double)logits[i] : max;
    }
    for (int i = 0; i < n; i++) {
        sum += exp((double)logits[i] - max);
    }
    return log(sum) + max - (double)logits[target];
}

/* Weights that are zero and stand in a column whose input is under the threshold, one by one. */
typedef struct {
    const Model *m;
    double both, elements;
} Both;

static void count_both(void *user, int layer, Site site, const fp16 *x, int n, int width) {
    Both *b = user;
    const LayerWeights *l = &b->m->weights.layers[layer];
    const Matrix *const matrices[N_DP_SITES] = {&l->qkv, &l->o, &l->gate_up, &l->down};
    const Matrix *w = matrices[site];
    const size_t cols = (size_t)width;
    Backend *be = b->m->be;
    float threshold;
    fp16 *values = malloc(w->rows * cols * sizeof *values), *inputs = malloc(cols * sizeof *inputs);
    assert_int_equal(n, 1);
    be->read(be, &threshold, b->m->state.thresholds + layer * N_DP_SITES + site, sizeof threshold);
    be->read(be, inputs, x, cols * sizeof *inputs);
    tiled_cbc_decode(values, cols, &w->cbc);
    for (size_t k = 0; k < cols; k++) {
        const bool inactive = fabsf(fp16_to_float(inputs[k])) <= threshold;
        for (size_t r = 0; inactive && r < w->rows; r++) {
            b->both += fp16_is_zero(values[r * cols + k]);
        }
    }
    b->elements += (double)w->rows * (double)cols;
    free(values);
    free(inputs);
}

static void perplexity_in_batches_equals_decoding_token_by_token(void **state) {
    (void)state;
    enum { TOKENS = 191, W = 48, S = 32, P = 9 };  // windows that overlap, a dense prefix
    Fixture f;
    CalibText text;
    Error err = {0};
    open_calibrated_small(&f, half_tiled, 0.5);
    random_text(&text, &f.ck.config, 1000, 64);
    PerplexityResult batched;
    const PerplexityParams params = {.window = W, .stride = S, .prefix = P, .max_tokens = TOKENS};
    assert_int_equal(perplexity(&batched, &f.m, text.ids, text.n, &params, NULL, NULL, &err), OK);

    const int vocab = f.m.config.vocab_size;
    float *logits = malloc((size_t)vocab * sizeof *logits);
    double sum = 0;
    size_t n_scored = 0;
    Both both = {.m = &f.m};
    const InputHook hook = {count_both, &both};
    memset(f.be->stats, 0, sizeof f.be->stats);
    ProductStats decoded[N_DP_SITES] = {0};
    for (int begin = 0; begin == 0 || begin + (W - S) < TOKENS - 1; begin += S) {
        for (int i = 0; i < W && begin + i < TOKENS - 1; i++) {
            f.be->finish(f.be, &err);
            memset(f.be->stats, 0, sizeof f.be->stats);
            f.m.hook = i < P ? NULL : &hook;
            model_forward(&f.m, text.ids + begin + i, 1, i, i < P ? PREFILL : DECODE);
            f.m.hook = NULL;
            assert_int_equal(f.be->finish(f.be, &err), OK);
            for (int site = 0; site < N_DP_SITES && i >= P; site++) {
                decoded[site].elements += f.be->stats[site].elements;
                decoded[site].active_elements += f.be->stats[site].active_elements;
                decoded[site].active_nonzeros += f.be->stats[site].active_nonzeros;
            }
            if (i >= P && (begin == 0 || i >= W - S)) {
                f.be->read(f.be, logits, f.m.state.logits, (size_t)vocab * sizeof *logits);
                sum += nll_of(logits, vocab, text.ids[begin + i + 1]);
                n_scored++;
            }
        }
    }
    assert_int_equal(batched.n_scored, n_scored);
    print_message("nll %.6f in batches, %.6f token by token\n", batched.nll, sum / (double)n_scored);
    assert_true(fabs(batched.nll - sum / (double)n_scored) < 2e-4);
    for (int site = 0; site < N_DP_SITES; site++) {
        assert_true(batched.sites[site].elements == decoded[site].elements);
        assert_true(fabs(stats_dp(&batched.sites[site]) - stats_dp(&decoded[site])) < 1e-3);
        assert_true(fabs(stats_total(&batched.sites[site]) - stats_total(&decoded[site])) < 1e-3);
    }
    const Overlap *o = &batched.overlap;
    print_message("overlap %.5f, one by one %.5f, independent %.5f, worst %+.5f in layer %d, site %d\n", o->reached,
                  both.both / both.elements, o->independent, o->worst, o->worst_layer, (int)o->worst_site);
    assert_true(fabs(o->reached - both.both / both.elements) < 1e-3);
    assert_true(fabs(o->independent - 0.25) < 0.05);  // half of the weights, half of the inputs
    assert_true(fabs(o->worst) >= fabs(o->reached - o->independent) - 1e-9);
    // And it is not what the model says without dynamic pruning.
    PerplexityResult exact;
    model_set_thresholds(&f.m, (const float[2 * N_DP_SITES]){0});
    assert_int_equal(perplexity(&exact, &f.m, text.ids, text.n, &params, NULL, NULL, &err), OK);
    assert_true(fabs(exact.nll - batched.nll) > 1e-3);
    assert_true(stats_dp(&exact.sites[SITE_MLP_IN]) < 0.01);
    free(logits);
    calib_text_free(&text);
    close_fixture(&f);
}

static bool ignore_token(void *user, int id) {
    (void)user, (void)id;
    return false;
}

static void decoding_reaches_the_ratio_and_counts_it(void **state) {
    (void)state;
    Fixture f;
    Error err = {0};
    GenerateResult r;
    const int prompt[] = {1, 5, 9, 20};
    const GenerateParams params = {.n_new = 50, .ignore_eos = true, .sample = {.temperature = 1, .top_p = 1}};
    TokenSink sink = {.token = ignore_token};
    open_calibrated_small(&f, all_tiled, 0.5);
    assert_int_equal(generate(&r, &f.m, prompt, COUNT(prompt), &params, &sink, &err), OK);
    for (int site = 0; site < N_DP_SITES; site++) {
        assert_true(fabs(stats_dp(&r.sites[site]) - 0.5) < 0.08);  // 49 tokens of a small model
    }
    assert_true(r.products.elements == stats_sum(r.sites, N_DP_SITES).elements);
    close_fixture(&f);
}

/* Reached minus asked, in points. */
static void expect_reached(const char *what, const ProductStats *sites, double ratio, const double *bounds) {
    double off[N_DP_SITES];
    for (int site = 0; site < N_DP_SITES; site++) {
        off[site] = 100 * (stats_dp(&sites[site]) - ratio);
    }
    print_message("%s at %.1f: %+.2f %+.2f %+.2f %+.2f points\n", what, ratio, off[0], off[1], off[2], off[3]);
    for (int site = 0; site < N_DP_SITES; site++) {
        if (!(fabs(off[site]) <= bounds[site])) {
            fail_msg("%s: %+.2f points, %g allowed", site_name((Site)site), off[site], bounds[site]);
        }
    }
}

/* With dynamic pruning off, what would thresholds of the first table skip of held-out text? */
static void check_dp_off(Model *m, const Quantiles *q, const Ids *heldout) {
    static const double bounds[N_DP_SITES] = {1, 2.5, 1, 1};
    Reach reach;
    Error err = {0};
    const double ratio = 0.5;
    assert_int_equal(reach_init(&reach, m, &err), OK);
    for (int i = 0; i < m->config.n_layers * N_DP_SITES; i++) {
        reach.thresholds[i] = quantile(q, 0, i / N_DP_SITES, (Site)(i % N_DP_SITES), ratio);
    }
    m->hook = &reach.hook;
    for (int w = 0; w < HELDOUT_WINDOWS; w++) {
        assert_int_equal(model_prefill(m, heldout->ids + w * WINDOW, WINDOW, 0, &err), OK);
    }
    m->hook = NULL;
    ProductStats sites[N_DP_SITES];
    reach_sites(&reach, sites);
    expect_reached("DP off", sites, ratio, bounds);
    reach_free(&reach);
}

static void check_dp_on(Model *m, const Checkpoint *ck, const Quantiles *q, const Ids *heldout) {
    static const double ratios[] = {0.3, 0.5, 0.7};
    for (size_t i = 0; i < COUNT(ratios); i++) {
        const double bound = ratios[i] > 0.6 ? 4 : 2;
        Thresholds t;
        PerplexityResult p;
        Error err = {0};
        const PerplexityParams params = {.window = WINDOW, .max_tokens = HELDOUT_WINDOWS * WINDOW + 1};
        assert_int_equal(thresholds_from(&t, ck, q, &(Ratios){ratios[i], ratios[i]}, &err), OK);
        model_set_thresholds(m, t.values);
        assert_int_equal(perplexity(&p, m, heldout->ids, heldout->n, &params, NULL, NULL, &err), OK);
        expect_reached("DP on", p.sites, ratios[i], (const double[N_DP_SITES]){bound, bound, bound, bound});
        thresholds_free(&t);
    }
}

/* About half of all weights are removed, then held-out text must see the ratios that were asked for. */
static void check_heldout(const char *dir) {
    need(HELDOUT);
    need(dir);
    Source *s;
    Error err = {0};
    Checkpoint ck;
    CalibText text;
    Tokenizer *tokenizer;
    char reason[200];
    FileQuantiles *section;
    size_t bytes;
    Bytes raw;
    Ids heldout;
    Model m;
    assert_int_equal(source_open(&s, dir, &err), OK);
    assert_true(tokenizer_load(&tokenizer, s->tokenizer, s->tokenizer_bytes, reason, sizeof reason));
    finish_model(&ck, write_model(s, half_tiled));
    Backend *be = open_backend();
    assert_int_equal(calib_text_load(&text, NULL, tokenizer, &ck.config, &(CalibParams){.max_tokens = 4096}, &err), OK);
    assert_int_equal(calibrate_dynamic(&section, &bytes, &ck, be, &text, 0.4, true, &err), OK);
    const Quantiles q = quantiles_view(section);
    assert_int_equal(input_read_file(&raw, HELDOUT, &err), OK);
    assert_int_equal(ids_from_raw(&heldout, &raw, HELDOUT, ck.config.vocab_size, &err), OK);
    assert_int_equal(model_load(&m, &ck, be, WINDOW, true, &err), OK);
    check_dp_off(&m, &q, &heldout);
    check_dp_on(&m, &ck, &q, &heldout);
    model_free(&m);
    be->free(be);
    free(raw.data);
    free(heldout.ids);
    free(section);
    calib_text_free(&text);
    tokenizer_free(tokenizer);
    checkpoint_close(&ck);
    s->free(s);
}

static void the_demo_reaches_its_ratios_on_heldout_text(void **state) {
    skip_long_test();
    (void)state;
    check_heldout("demo");
}

static void books_reaches_its_ratios_on_heldout_text(void **state) {
    skip_long_test();
    (void)state;
    check_heldout("../shared/data/books-30M");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(thresholds_lie_between_quantiles_and_between_tables),
        cmocka_unit_test(the_default_ratio_stands_where_none_is_asked_for),
        cmocka_unit_test(dense_sites_are_skipped_but_not_when_they_are_named),
        cmocka_unit_test(a_file_without_quantiles_says_how_to_get_some),
        cmocka_unit_test(damaged_quantiles_are_refused),
        cmocka_unit_test(no_quantiles_crash_the_reader),
        cmocka_unit_test(a_view_leaves_no_trace_in_the_file),
        cmocka_unit_test(quantiles_are_those_of_the_sorted_inputs),
        cmocka_unit_test(dynamic_add_completes_a_file),
        cmocka_unit_test(an_activation_that_is_not_finite_stops_calibration),
        cmocka_unit_test(perplexity_in_batches_equals_decoding_token_by_token),
        cmocka_unit_test(decoding_reaches_the_ratio_and_counts_it),
        cmocka_unit_test(the_demo_reaches_its_ratios_on_heldout_text),
        cmocka_unit_test(books_reaches_its_ratios_on_heldout_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
