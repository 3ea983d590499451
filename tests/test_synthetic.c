/* test_synthetic.c: models of random weights, as they lie in a backend's memory, and the memory plan. The backend
 * is the CPU's unless SPDP_TEST_BACKEND names another; what that makes must equal what the CPU makes, bit for bit.
 * */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>
#include <unistd.h>

#include "../model/generate.h"
#include "../model/reach.h"
#include "../model/synthetic.h"
#include "../model/thresholds.h"
#include "support.h"

#define AWKWARD "72:200:2:4:2:97:64"  // neither rows nor columns fill their tiles
#define SMALL "256:768:3:8:4:1000:256"

static Backend *open_backend(const char *name) {
    Backend *be;
    Error err = {0};
    assert_int_equal(backend_open(&be, name, 0, true, 2, NULL, NULL, &err), OK);
    return be;
}

static const char *tested_backend(void) {
    const char *name = getenv("SPDP_TEST_BACKEND");
    return name ? name : "cpu";
}

/* A model of random weights on a backend of its own. */
typedef struct {
    Synthetic s;
    Backend *be;
    Model m;
} Fixture;

static void make(Fixture *f, const SyntheticParams *params, const char *backend) {
    Error err = {0};
    assert_int_equal(synthetic_open(&f->s, params, &err), OK);
    f->be = open_backend(backend);
    const WeightSource source = weights_of_synthetic(&f->s, NULL);
    assert_int_equal(model_load_from(&f->m, &f->s.ck, f->be, 0, false, &source, &err), OK);
}

static void destroy(Fixture *f) {
    model_free(&f->m);
    f->be->free(f->be);
    synthetic_close(&f->s);
}

/* The matrix that a section became. */
static const Matrix *matrix_of(const Fixture *f, const FileSection *s) {
    const LayerWeights *l = s->layer >= 0 ? &f->m.weights.layers[s->layer] : NULL;
    switch (s->kind) {
    case SECTION_EMBEDDING: return &f->m.weights.embedding;
    case SECTION_HEAD: return &f->m.weights.head;
    case SECTION_QKV: return &l->qkv;
    case SECTION_O: return &l->o;
    case SECTION_GATE_UP: return &l->gate_up;
    case SECTION_DOWN: return &l->down;
    default: return NULL;
    }
}

/* A copy of backend memory on the host. */
static void *read_back(Backend *be, const void *from, size_t bytes) {
    void *host = poisoned_alloc(bytes);
    be->read(be, host, from, bytes);
    return host;
}

/* The arrays of a compressed matrix in host memory. */
static TiledCbc read_back_cbc(Backend *be, const TiledCbc *w) {
    const size_t columns = tiled_cbc_tile_rows(w->rows) * tiled_cbc_cols_padded(w->cols);
    TiledCbc host = *w;
    host.tile_offset = read_back(be, w->tile_offset, (columns / TILE_K + 1) * sizeof *w->tile_offset);
    host.col_info = read_back(be, w->col_info, columns * sizeof *w->col_info);
    host.bitmap = read_back(be, w->bitmap, columns * BITMAP_WORDS * sizeof *w->bitmap);
    host.values = read_back(be, w->values, w->n_values * sizeof *w->values);
    return host;
}

static void free_cbc(TiledCbc *w) {
    free((void *)(uintptr_t)w->tile_offset);
    free((void *)(uintptr_t)w->col_info);
    free((void *)(uintptr_t)w->bitmap);
    free((void *)(uintptr_t)w->values);
}

/* Dense rows of a matrix in backend memory; what has to hold of its format is checked on the way. */
static fp16 *dense_of(const Fixture *f, const FileSection *s, size_t *stride) {
    const Matrix *m = matrix_of(f, s);
    assert_int_equal(m->format, s->format);
    assert_true(m->rows == s->rows && m->cols == s->cols && m->layer == s->layer);
    *stride = dense_stride(m->cols);
    if (m->format == FORMAT_DENSE) {
        assert_int_equal(m->stride, *stride);
        return read_back(f->be, m->dense, m->rows * *stride * sizeof(fp16));
    }
    TiledCbc cbc = read_back_cbc(f->be, &m->cbc);
    TiledCbcStats stats;
    Error err = {0};
    assert_int_equal(tiled_cbc_validate(&cbc, &stats, &err), OK);
    assert_int_equal(stats.nnz, s->nnz);
    assert_in_range(m->cbc.max_col_values, stats.max_col_values, TILE_M);
    assert_int_equal(s->bytes, tiled_cbc_storage(&cbc) + MEMORY_SLACK);
    size_t padding = 0;  // every value that no bit stands for is +0, and no other
    for (size_t i = 0; i < cbc.n_values; i++) {
        padding += cbc.values[i] == 0;
        assert_int_not_equal(cbc.values[i], 0x8000);
    }
    assert_int_equal(padding, cbc.n_values - stats.nnz);
    fp16 *w = memory_alloc(m->rows * *stride * sizeof *w);
    assert_non_null(w);
    tiled_cbc_decode(w, *stride, &cbc);
    free_cbc(&cbc);
    return w;
}

/* What random_weights.h says that a matrix is. */
static fp16 *expected(const Fixture *f, const FileSection *s, size_t stride) {
    const RandomWeights weights = {
        .seed = f->s.params.seed,
        .matrix = s->kind,
        .layer = (uint32_t)(s->layer + 1),
        .dropped = s->flags & SECTION_PRUNED ? random_weights_dropped(f->s.params.sp) : 0,
        .values = f->s.values,
    };
    fp16 *w = memory_alloc(s->rows * stride * sizeof *w);
    assert_non_null(w);
    for (size_t r = s->rows; r-- > 0;) {
        random_weights_row(w + r * stride, &weights, r, s->cols);
    }
    return w;
}

static void the_matrices_are_those_of_the_generator(void **state) {
    (void)state;
    const SyntheticParams cases[] = {
        {.shape = AWKWARD, .sp = 0.5, .seed = 1},
        {.shape = AWKWARD, .sp = 0.5, .prune_attn = true, .seed = 2},
        {.shape = AWKWARD, .sp = 0, .prune_attn = true, .seed = 3},
        {.shape = AWKWARD, .sp = 0, .prune_attn = true, .dp = 0.5, .seed = UINT64_MAX},  // all columns full
        {.shape = AWKWARD, .sp = 1, .prune_attn = true, .seed = 5},                      // all empty
        {.shape = AWKWARD, .sp = 0.02, .prune_attn = true, .seed = 6},                   // dense with zeros
        {.shape = SMALL, .sp = 0.7, .prune_attn = true, .dp = 0.4, .seed = 7},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Fixture f;
        make(&f, &cases[i], tested_backend());
        size_t bytes = 0;
        for (size_t k = 0; k < f.s.ck.n_sections; k++) {
            const FileSection *s = &f.s.ck.sections[k];
            bytes += s->bytes;
            if (s->rows == 1) {
                continue;
            }
            const bool pruned = s->flags & SECTION_PRUNED;
            const bool mlp = s->kind == SECTION_GATE_UP || s->kind == SECTION_DOWN;
            const bool attn = s->kind == SECTION_QKV || s->kind == SECTION_O;
            assert_int_equal(pruned, mlp || (attn && cases[i].prune_attn));
            assert_int_equal(s->format == FORMAT_TILED_CBC, pruned && (cases[i].sp > 0.1 || cases[i].dp > 0));
            size_t stride, nnz = 0;
            fp16 *got = dense_of(&f, s, &stride), *want = expected(&f, s, stride);
            assert_memory_equal(got, want, s->rows * stride * sizeof *got);
            for (size_t e = 0; e < s->rows * stride; e++) {
                nnz += !fp16_is_zero(want[e]);
            }
            assert_int_equal(nnz, s->nnz);
            free(got);
            free(want);
        }
        assert_int_equal(bytes, f.s.ck.bytes);
        assert_int_equal(bytes, f.m.weight_bytes);
        destroy(&f);
    }
}

static void norms_are_ones(void **state) {
    (void)state;
    Fixture f;
    make(&f, &(SyntheticParams){.shape = AWKWARD, .sp = 0.5}, tested_backend());
    const fp16 *const norms[] = {f.m.weights.final_norm, f.m.weights.layers[0].attn_norm,
                                 f.m.weights.layers[1].mlp_norm};
    for (size_t i = 0; i < COUNT(norms); i++) {
        fp16 *w = read_back(f.be, norms[i], 72 * sizeof *w);
        for (size_t k = 0; k < 72; k++) {
            assert_int_equal(w[k], FP16_ONE);
        }
        free(w);
    }
    destroy(&f);
}

/* A share of n draws may be off by so much: five standard deviations and the 16 bits of a draw. */
static double share_tolerance(double share, size_t n) { return 5 * sqrt(share * (1 - share) / (double)n) + 1e-5; }

static void weights_have_the_spread_and_the_density_asked_for(void **state) {
    (void)state;
    const double ratios[] = {0, 0.3, 0.5, 0.9};
    for (size_t i = 0; i < COUNT(ratios); i++) {
        Fixture f;
        const double sp = ratios[i];
        const SyntheticParams params = {.shape = SMALL, .sp = sp, .prune_attn = true, .dp = 0.1, .seed = 40 + i};
        make(&f, &params, tested_backend());
        for (size_t k = 0; k < f.s.ck.n_sections; k++) {
            const FileSection *s = &f.s.ck.sections[k];
            if (s->rows == 1) {
                continue;
            }
            size_t stride;
            fp16 *w = dense_of(&f, s, &stride);
            double sum = 0, squares = 0, neighbours = 0;
            for (size_t e = 0; e < s->rows * stride; e++) {
                const double v = (double)fp16_to_float(w[e]);
                sum += v;
                squares += v * v;
                neighbours += e > 0 ? v * (double)fp16_to_float(w[e - 1]) : 0;
            }
            const size_t n = s->rows * s->cols;
            const double kept = s->flags & SECTION_PRUNED ? 1 - ratios[i] : 1, nnz = (double)s->nnz;
            assert_true(fabs(nnz / (double)n - kept) <= share_tolerance(kept, n));
            assert_true(fabs(sum / nnz) <= 5 * 0.02 / sqrt(nnz));
            assert_true(fabs(sqrt(squares / nnz) / 0.02 - 1) <= 5 / sqrt(2 * nnz) + 1e-3);
            assert_true(fabs(neighbours / squares) <= 5 / sqrt(nnz));
            free(w);
        }
        destroy(&f);
    }
}

static uint64_t digest(const Fixture *f) {
    uint64_t hash = 14695981039346656037u;
    for (size_t k = 0; k < f->s.ck.n_sections; k++) {
        const FileSection *s = &f->s.ck.sections[k];
        if (s->rows > 1) {
            size_t stride;
            fp16 *w = dense_of(f, s, &stride);
            for (size_t e = 0; e < s->rows * stride; e++) {
                hash = (hash ^ w[e]) * 1099511628211u;
            }
            free(w);
        }
    }
    return hash;
}

static void a_seed_means_the_same_weights(void **state) {
    (void)state;
    uint64_t hashes[4];
    const SyntheticParams cases[COUNT(hashes)] = {
        {.shape = AWKWARD, .sp = 0.5, .seed = 11},
        {.shape = AWKWARD, .sp = 0.5, .seed = 11},
        {.shape = AWKWARD, .sp = 0.5, .seed = 12},
        {.shape = AWKWARD, .sp = 0.5, .seed = 11 + ((uint64_t)1 << 32)},
    };
    for (size_t i = 0; i < COUNT(hashes); i++) {
        Fixture f;
        make(&f, &cases[i], tested_backend());
        hashes[i] = digest(&f);
        destroy(&f);
    }
    assert_true(hashes[0] == hashes[1]);
    assert_true(hashes[0] != hashes[2] && hashes[0] != hashes[3] && hashes[2] != hashes[3]);
}

/* Layers and matrices do not repeat each other. */
static void no_two_matrices_are_alike(void **state) {
    (void)state;
    Fixture f;
    make(&f, &(SyntheticParams){.shape = "64:64:2:4:4:64:32", .sp = 0, .seed = 3}, tested_backend());
    fp16 first_rows[10][64];
    size_t n = 0;
    for (size_t k = 0; k < f.s.ck.n_sections; k++) {
        const FileSection *s = &f.s.ck.sections[k];
        if (s->rows > 1) {
            size_t stride;
            fp16 *w = dense_of(&f, s, &stride);
            memcpy(first_rows[n++], w, sizeof first_rows[0]);
            assert_memory_not_equal(w, w + stride, sizeof first_rows[0]);
            free(w);
        }
    }
    assert_int_equal(n, 10);
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < i; j++) {
            assert_memory_not_equal(first_rows[i], first_rows[j], sizeof first_rows[0]);
        }
    }
    destroy(&f);
}

/* ---- running it ---- */

static bool ignore_token(void *user, int id) {
    (void)id;
    ++*(size_t *)user;
    return false;
}

static void decoding_reaches_the_ratio_asked_for(void **state) {
    (void)state;
    enum { PROMPT = 40, NEW = 60 };
    const double ratios[] = {0.4, 0.7};
    for (size_t i = 0; i < COUNT(ratios); i++) {
        Fixture f;
        Error err = {0};
        Thresholds t;
        int prompt[PROMPT];
        const double dp = ratios[i];
        const SyntheticParams made = {.shape = SMALL, .sp = 0.5, .prune_attn = true, .dp = dp, .seed = 70 + i};
        make(&f, &made, tested_backend());
        random_ids(prompt, PROMPT, 1000, 5);
        const Ids ids = {prompt, PROMPT};
        Progress quiet = {.quiet = true};
        assert_int_equal(synthetic_calibrate(&f.s, &f.m, &ids, NEW, &quiet, &err), OK);
        assert_int_equal(thresholds_choose(&t, &f.s.ck, &(Ratios){ratios[i], ratios[i]}, false, &err), OK);
        model_set_thresholds(&f.m, t.values);
        size_t n = 0;
        TokenSink sink = {.token = ignore_token, .user = &n};
        GenerateResult g;
        const SampleParams sample = {.temperature = 0.8f, .top_p = 0.9f};
        const GenerateParams params = {.n_new = NEW, .ignore_eos = true, .sample = sample};
        assert_int_equal(generate(&g, &f.m, prompt, PROMPT, &params, &sink, &err), OK);
        assert_int_equal(n, NEW);
        const ProductStats all = stats_sum(g.sites, N_DP_SITES);
        print_message("asked %.2f, reached %.4f\n", ratios[i], stats_dp(&all));
        assert_true(fabs(stats_dp(&all) - ratios[i]) < 0.01);
        thresholds_free(&t);
        destroy(&f);
    }
}

static void a_prompt_without_room_is_refused(void **state) {
    (void)state;
    Fixture f;
    Error err = {0};
    Progress quiet = {.quiet = true};
    int prompt[64];
    make(&f, &(SyntheticParams){.shape = AWKWARD, .sp = 0.5, .dp = 0.5}, "cpu");
    random_ids(prompt, 64, 97, 1);
    assert_int_equal(synthetic_calibrate(&f.s, &f.m, &(Ids){prompt, 64}, 4, &quiet, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "64"));
    assert_null(checkpoint_find(&f.s.ck, SECTION_QUANTILES, -1));
    destroy(&f);
}

static void the_context_may_exceed_the_shapes(void **state) {
    (void)state;
    Synthetic s;
    Error err = {0};
    assert_int_equal(synthetic_open(&s, &(SyntheticParams){.shape = AWKWARD, .context = 100}, &err), OK);
    assert_int_equal(s.ck.config.seq_len, 100);
    synthetic_close(&s);
    assert_int_equal(synthetic_open(&s, &(SyntheticParams){.shape = AWKWARD, .context = 10}, &err), OK);
    assert_int_equal(s.ck.config.seq_len, 64);
    synthetic_close(&s);
    assert_int_equal(synthetic_open(&s, &(SyntheticParams){.shape = "llama2-8b"}, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "llama2-8b"));
}

/* ---- the memory plan ---- */

static const MemoryPlan roomy = {
    .weights = 1000000, .kv_position = 1000, .position = 24, .token = 500, .fixed = 3000, .free = 10000000,
    .context = 4096, .max_tokens = 512,
};

static void a_plan_adds_up(void **state) {
    (void)state;
    assert_int_equal(plan_kv(&roomy), 4096000);
    assert_int_equal(plan_scratch(&roomy), 3000 + 4096 * 24 + 512 * 500);
    assert_int_equal(plan_total(&roomy), 1000000 + plan_kv(&roomy) + plan_scratch(&roomy));
    assert_int_equal(plan_check(&roomy, NULL), OK);
    assert_string_equal(plan_text(&roomy).text,
                        "weights 1.00 MB + KV 4.10 MB + scratch 357.3 kB = 5.45 MB of 10.0 MB free");
    MemoryPlan p = roomy;
    p.context = 100;  // a chunk is no longer than the context
    assert_int_equal(plan_scratch(&p), 3000 + 100 * 24 + 100 * 500);
    p = roomy;
    p.free = plan_total(&p);
    assert_int_equal(plan_check(&p, NULL), OK);
    p.free--;
    assert_int_equal(plan_check(&p, NULL), ERR_MEMORY);
}

/* cases.md row 35. The context that is named fits, and 64 positions more (one, where it is short) do not. */
static void the_context_that_is_named_is_the_longest(void **state) {
    (void)state;
    for (size_t room = 1003000; room < 9000000; room += 7919) {
        MemoryPlan p = roomy;
        p.free = room;
        const int longest = plan_longest(&p);
        p.context = longest;
        assert_true(longest == 0 || plan_check(&p, NULL) == OK);
        assert_true(longest < 64 || longest % 64 == 0);
        p.context = longest < 64 ? longest + 1 : longest + 64;
        assert_int_equal(plan_check(&p, NULL), ERR_MEMORY);
    }
}

/* cases.md row 35: the sizes, what is free, and the context that would fit. */
static void an_impossible_plan_says_what_would_fit(void **state) {
    (void)state;
    Error err = {0};
    MemoryPlan p = roomy;
    p.context = 200000;
    assert_int_equal(plan_check(&p, &err), ERR_MEMORY);
    char fits[40];
    snprintf(fits, sizeof fits, "-c %d would fit", plan_longest(&p));
    assert_non_null(strstr(err.text, "a context of 200000 needs 206.1 MB of memory (weights 1.00 MB, KV 200.0 MB, "
                                     "scratch 5.06 MB), 10.0 MB are free"));
    assert_non_null(strstr(err.text, fits));
    p.free = 900000;
    assert_int_equal(plan_check(&p, &err), ERR_MEMORY);
    assert_string_equal(err.text, "the weights alone need 1.00 MB of memory, 900.0 kB are free");
    p.free = 1001000;
    assert_int_equal(plan_check(&p, &err), ERR_MEMORY);
    assert_non_null(strstr(err.text, "the weights and work space alone need"));
}

/* A backend that has little memory, and none to give. */
static size_t little_memory(Backend *be) {
    (void)be;
    return 3000000;
}

static void *no_alloc(Backend *be, size_t bytes) {
    (void)be;
    fail_msg("%zu bytes were allocated", bytes);
    return NULL;
}

static const void *no_upload(Backend *be, const void *host, size_t bytes) {
    (void)host;
    return no_alloc(be, bytes);
}

/* cases.md row 35. */
static void nothing_is_allocated_for_an_impossible_plan(void **state) {
    (void)state;
    Synthetic s;
    Model m;
    Error err = {0};
    Backend *be = open_backend("cpu");
    be->memory_free = little_memory;
    be->alloc = no_alloc;
    be->upload = no_upload;
    assert_int_equal(synthetic_open(&s, &(SyntheticParams){.shape = SMALL, .sp = 0.5}, &err), OK);
    const WeightSource source = weights_of_synthetic(&s, NULL);
    assert_int_equal(model_load_from(&m, &s.ck, be, 256, false, &source, &err), ERR_MEMORY);
    assert_non_null(strstr(err.text, "the weights alone need"));
    MemoryPlan plan;
    assert_int_equal(model_plan(&plan, &s.ck, be, 256, false, &source, &err), ERR_MEMORY);
    assert_in_range(plan.weights, s.ck.bytes, s.ck.bytes + 14 * ((size_t)2 << 20));
    // Mapped weights need no room on a backend that reads them where they lie.
    WeightSource mapped = source;
    mapped.made = false;
    assert_int_equal(model_plan(&plan, &s.ck, be, 256, false, &mapped, &err), ERR_MEMORY);
    assert_int_equal(plan.weights, 0);
    assert_non_null(strstr(err.text, "a context of 256 needs"));
    assert_int_equal(model_plan(&plan, &s.ck, be, 257, false, &mapped, &err), ERR_USAGE);
    synthetic_close(&s);
    be->free(be);
}

/* The plan is what the model then has. */
static void the_plan_is_what_is_allocated(void **state) {
    (void)state;
    for (int all_logits = 0; all_logits <= 1; all_logits++) {
        Fixture f;
        Error err = {0};
        MemoryPlan plan;
        make(&f, &(SyntheticParams){.shape = SMALL, .sp = 0.5, .seed = 9}, tested_backend());
        const WeightSource source = weights_of_synthetic(&f.s, NULL);
        model_free(&f.m);
        assert_int_equal(model_plan(&plan, &f.s.ck, f.be, 200, all_logits, &source, &err), OK);
        assert_int_equal(model_open(&f.m, &f.s.ck.config, f.be, 200, all_logits, &err), OK);
        assert_int_equal(plan_kv(&plan), f.m.kv_bytes);
        const size_t rope = 200 * (size_t)f.m.config.head_dim * sizeof(float);
        const Matrix gate_up = {.format = FORMAT_TILED_CBC, .rows = 2 * 768, .cols = 256};
        const Matrix down = {.format = FORMAT_TILED_CBC, .rows = 256, .cols = 768};
        const size_t work = max_size(f.be->product_bytes(f.be, &gate_up, f.m.chunk, true),
                                     f.be->product_bytes(f.be, &down, f.m.chunk, false));
        assert_int_equal(plan_scratch(&plan), f.m.scratch_bytes + rope + work);
        destroy(&f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_matrices_are_those_of_the_generator),
        cmocka_unit_test(norms_are_ones),
        cmocka_unit_test(weights_have_the_spread_and_the_density_asked_for),
        cmocka_unit_test(a_seed_means_the_same_weights),
        cmocka_unit_test(no_two_matrices_are_alike),
        cmocka_unit_test(decoding_reaches_the_ratio_asked_for),
        cmocka_unit_test(a_prompt_without_room_is_refused),
        cmocka_unit_test(the_context_may_exceed_the_shapes),
        cmocka_unit_test(a_plan_adds_up),
        cmocka_unit_test(the_context_that_is_named_is_the_longest),
        cmocka_unit_test(an_impossible_plan_says_what_would_fit),
        cmocka_unit_test(nothing_is_allocated_for_an_impossible_plan),
        cmocka_unit_test(the_plan_is_what_is_allocated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
