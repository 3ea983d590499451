/* test_kernels.c: a backend through its table of operations, against the same operation in double precision: the CPU
 * with every instruction set of the build that runs here, or CUDA where SPDP_TEST_BACKEND=cuda asks for it. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <sys/mman.h>

#include "../kernels/backend.h"
#include "support.h"

#define SEED 20260202
#define GUARD 64  // poisoned bytes behind whatever an operation reads or writes

/* ---- the backends ---- */

static const char *const isas[] = {"avx512vbmi2", "avx512", "avx2", "portable"};
static const int thread_counts[] = {1, 2, 3, 5};

/* Backends that must agree to the last bit: numbers of threads, or CUDA several times. */
typedef struct {
    const char *isa;
    Backend *be[COUNT(thread_counts)];
} Machine;

static bool is_cuda(const Machine *m) { return strcmp(m->isa, "cuda") == 0; }

typedef struct {
    size_t n;  // machines that run here
    Machine machines[COUNT(isas)];
} Fixture;

static int open_cuda(Fixture *f) {
    Machine m = {.isa = "cuda"};
    for (size_t t = 0; t < COUNT(thread_counts); t++) {
        Error err;
        if (backend_cuda(&m.be[t], 0, true, &err)) {
            print_message("%s\n", err.text);
            return -1;
        }
    }
    f->machines[f->n++] = m;
    return 0;
}

static int open_backends(void **state) {
    Fixture *f = calloc(1, sizeof *f);
    *state = f;
    print_message("seed %d\n", SEED);
    const char *backend = getenv("SPDP_TEST_BACKEND");
    if (f && backend && strcmp(backend, "cuda") == 0) {
        return open_cuda(f);
    }
    for (size_t i = 0; f && i < COUNT(isas); i++) {
        Machine m = {.isa = isas[i]};
        Error err;
        int rc = OK;
        for (size_t t = 0; t < COUNT(thread_counts) && !rc; t++) {
            rc = backend_cpu(&m.be[t], thread_counts[t], isas[i], &err);
        }
        if (rc) {
            print_message("skipped: kernels for %s: %s\n", isas[i], err.text);
        } else {
            f->machines[f->n++] = m;
        }
    }
    return f && f->n > 0 ? 0 : -1;
}

static int close_backends(void **state) {
    Fixture *f = *state;
    for (size_t i = 0; i < f->n; i++) {
        for (size_t t = 0; t < COUNT(thread_counts); t++) {
            f->machines[i].be[t]->free(f->machines[i].be[t]);
        }
    }
    free(f);
    return 0;
}

/* The bytes of host in the backend's memory, with a guard behind them. */
static void *give(Backend *be, const void *host, size_t bytes) {
    unsigned char guard[GUARD];
    poison(guard, sizeof guard);
    unsigned char *p = be->alloc(be, bytes + GUARD);
    assert_non_null(p);
    be->write(be, p, host, bytes);
    be->write(be, p + bytes, guard, GUARD);
    return p;
}

/* Room for an output, all of it poisoned. */
static void *give_poison(Backend *be, size_t bytes) {
    void *host = poisoned_alloc(bytes);
    void *p = give(be, host, bytes);
    free(host);
    return p;
}

/* Release what give() gave; its guard must be as it was. */
static void take_back(Backend *be, void *p, size_t bytes) {
    unsigned char guard[GUARD];
    be->read(be, guard, (unsigned char *)p + bytes, GUARD);
    assert_true(is_poison(guard, GUARD));
    be->release(be, p);
}

/* The same, and the contents in host memory; release with free(). */
static void *take(Backend *be, void *p, size_t bytes) {
    void *host = poisoned_alloc(bytes);
    be->read(be, host, p, bytes);
    take_back(be, p, bytes);
    return host;
}

/* ---- weights and inputs ---- */

enum { DENSE, CBC, N_FORMATS };

typedef struct {
    size_t rows, cols;
    Matrix as[N_FORMATS];
    fp16 *w;  // (rows, stride of the dense one)
    void *block;
} Weights;

/* A matrix in both formats. What lies in the slack behind the arrays is poison, to be read but never used. */
static Weights make_weights(size_t rows, size_t cols, const Pattern *p, Draw draw, uint64_t *random) {
    const size_t stride = dense_stride(cols);
    Weights m = {.rows = rows, .cols = cols, .w = memory_alloc(rows * stride * sizeof(fp16))};
    assert_non_null(m.w);
    fill_matrix(m.w, rows, cols, stride, p, draw, random);
    poison(m.w + rows * stride, MEMORY_SLACK);
    const Matrix matrix = {.rows = rows, .cols = cols, .layer = 3, .site = SITE_MLP_HIDDEN};
    m.as[DENSE] = m.as[CBC] = matrix;
    m.as[DENSE].format = FORMAT_DENSE;
    m.as[DENSE].dense = m.w;
    m.as[DENSE].stride = stride;
    m.as[CBC].format = FORMAT_TILED_CBC;
    TiledCbc *cbc = &m.as[CBC].cbc;
    assert_int_equal(tiled_cbc_encode(cbc, &m.block, NULL, m.w, rows, cols, stride, 1, NULL), OK);
    const size_t values = (size_t)((const char *)cbc->values - (const char *)m.block);
    poison((char *)m.block + values + cbc->n_values * sizeof(fp16), MEMORY_SLACK);
    return m;
}

/* A matrix with its arrays in the backend's memory, slack included. */
typedef struct {
    Matrix m;
    unsigned char *block;
    size_t bytes;
} GivenMatrix;

static GivenMatrix give_matrix(Backend *be, const Matrix *host) {
    GivenMatrix g = {.m = *host};
    if (host->format == FORMAT_DENSE) {
        g.bytes = host->rows * host->stride * sizeof(fp16) + MEMORY_SLACK;
        g.block = give(be, host->dense, g.bytes);
        g.m.dense = (const fp16 *)g.block;
        return g;
    }
    TiledCbcLayout layout = {0};
    assert_int_equal(tiled_cbc_layout(&layout, host->rows, host->cols, NULL), OK);
    g.bytes = tiled_cbc_block_bytes(&layout, host->cbc.n_values);
    g.block = give(be, host->cbc.tile_offset, g.bytes);  // the block's first array
    g.m.cbc.tile_offset = (const uint32_t *)(g.block + layout.tile_offset);
    g.m.cbc.col_info = (const uint32_t *)(g.block + layout.col_info);
    g.m.cbc.bitmap = (const uint64_t *)(g.block + layout.bitmap);
    g.m.cbc.values = (const fp16 *)(g.block + layout.values);
    return g;
}

static void take_matrix_back(Backend *be, GivenMatrix *g) { take_back(be, g->block, g->bytes); }

static void free_weights(Weights *m) {
    free(m->w);
    free(m->block);
}

/* Inputs (n, cols), every eighth of them zero of either sign. */
static fp16 *make_inputs(size_t n, size_t cols, Draw draw, uint64_t *random) {
    fp16 *x = poisoned_alloc(n * cols * sizeof *x);
    for (size_t i = 0; i < n * cols; i++) {
        x[i] = random_below(random, 8) ? draw(random) : draw_zero(random);
    }
    return x;
}

static float magnitude_of(fp16 h) { return fp16_to_float(h & 0x7fff); }

static int by_magnitude(const void *a, const void *b) {
    const float x = magnitude_of(*(const fp16 *)a), y = magnitude_of(*(const fp16 *)b);
    return (x > y) - (x < y);
}

/* The threshold that drops that share of the inputs: one of them lies right on it. */
static float threshold_for(const fp16 *x, size_t count, double share) {
    fp16 *sorted = poisoned_alloc(count * sizeof *sorted);
    memcpy(sorted, x, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, by_magnitude);
    const float threshold = magnitude_of(sorted[(size_t)((double)(count - 1) * share)]);
    free(sorted);
    return threshold;
}

/* What a column-skippable matrix sees: |x| <= threshold counts as zero. */
static fp16 *drop_inputs(const fp16 *x, size_t count, float threshold) {
    fp16 *left = poisoned_alloc(count * sizeof *left);
    for (size_t i = 0; i < count; i++) {
        left[i] = magnitude_of(x[i]) <= threshold ? 0 : x[i];
    }
    return left;
}

/* ---- products ---- */

typedef enum { MATMUL, MATMUL_ADD, MATMUL_SWIGLU, N_OPS } Op;
static const char *const op_names[N_OPS] = {"matmul", "matmul_add", "matmul_swiglu"};

/* What matmul_add finds in element i: small integers, exact in every format. */
static float residual(size_t i) { return (float)(i * 7 % 11) - 5; }

/* The operation's outputs as floats (n, rows; half as many for swiglu); release with free(). */
static float *run_product(Backend *be, Op op, const Matrix *w, const fp16 *x, size_t n,
                          const float *threshold) {
    const size_t count = n * w->rows / (op == MATMUL_SWIGLU ? 2 : 1), x_bytes = n * w->cols * sizeof *x;
    const size_t bytes = count * (op == MATMUL_SWIGLU ? sizeof(fp16) : sizeof(float));
    float *result = poisoned_alloc(count * sizeof *result);
    for (size_t i = 0; op == MATMUL_ADD && i < count; i++) {
        result[i] = residual(i);
    }
    fp16 *given_x = give(be, x, x_bytes);
    float *given_threshold = threshold ? give(be, threshold, sizeof *threshold) : NULL;
    GivenMatrix given_w = give_matrix(be, w);
    void *out = give(be, result, bytes);
    if (op == MATMUL_SWIGLU) {
        be->matmul_swiglu(be, out, &given_w.m, given_x, (int)n, given_threshold);
    } else {
        (op == MATMUL ? be->matmul : be->matmul_add)(be, out, &given_w.m, given_x, (int)n, given_threshold);
    }
    void *raw = take(be, out, bytes);
    take_matrix_back(be, &given_w);
    for (size_t i = 0; i < count; i++) {
        result[i] = op == MATMUL_SWIGLU ? fp16_to_float(((fp16 *)raw)[i]) : ((float *)raw)[i];
    }
    free(raw);
    take_back(be, given_x, x_bytes);
    if (threshold) {
        take_back(be, given_threshold, sizeof *threshold);
    }
    return result;
}

/* A product in double, with what bounds the error of each element. */
typedef struct {
    double *y, *magnitude;  // (n, rows)
    size_t *n_active;       // (n) inputs that are not zero
} Reference;

static Reference make_reference(const Weights *w, const fp16 *x, size_t n) {
    const size_t bytes = n * w->rows * sizeof(double);
    Reference r = {poisoned_alloc(bytes), poisoned_alloc(bytes), memory_alloc(n * sizeof(size_t))};
    reference_product(r.y, r.magnitude, w->w, w->rows, w->cols, w->as[DENSE].stride, x, n);
    for (size_t i = 0; i < n * w->cols; i++) {
        r.n_active[i / w->cols] += !fp16_is_zero(x[i]);
    }
    return r;
}

static void free_reference(Reference *r) {
    free(r->y);
    free(r->magnitude);
    free(r->n_active);
}

/* The errors of both sums, carried through silu (whose slope is below 1.1), and silu's own roundings. */
static void judge_swiglu(Judgement *j, double got, const double *y, const double *magnitude,
                         double n_active) {
    const double silu = y[0] / (1 + exp(-y[0])), want = silu * y[1];
    const double gate_error = n_active * 0x1p-24 * magnitude[0], up_error = n_active * 0x1p-24 * magnitude[1];
    const double error = 1.1 * gate_error * (fabs(y[1]) + up_error) + fabs(silu) * up_error;
    judge(j, got, want, 1, error * 0x1p24 + 24 * fabs(want), AS_FP16);
}

/* CUDA sums up to 16 columns of a Tiled-CBC matrix in fp16 when it decodes: 8 * 2^-11 of the sum of magnitudes. */
static double fp16_pair_roundings(const Machine *m, int format, size_t n) {
    return is_cuda(m) && format == CBC && n == 1 ? 8 * 0x1p-11 / 0x1p-24 : 0;
}

static void judge_product(Judgement *j, Op op, const float *got, const Reference *r, size_t rows, size_t n,
                          double more_roundings) {
    for (size_t i = 0; i < n * rows; i++) {
        const double n_active = (double)r->n_active[i / rows] + more_roundings;
        if (op != MATMUL_SWIGLU) {
            const double before = op == MATMUL_ADD ? (double)residual(i) : 0;
            judge(j, (double)got[i], before + r->y[i], n_active, r->magnitude[i], AS_FLOAT);
        } else if (i % 2 == 0) {
            judge_swiglu(j, (double)got[i / 2], r->y + i, r->magnitude + i, n_active);
        }
    }
}

/* Run the product in both formats on every machine and judge it. The threshold (or NULL) must not matter to
 * the dense one. Beyond 17 tokens one of the three operations has to do. */
static void check_product(const Fixture *f, Judgement *j, const Weights *w, const char *pattern,
                          const fp16 *x, size_t n, const float *threshold) {
    const size_t count = n * w->cols;
    fp16 *left = drop_inputs(x, count, threshold ? *threshold : 0);
    Reference references[N_FORMATS] = {make_reference(w, x, n), make_reference(w, left, n)};
    for (size_t op = 0; op < N_OPS; op++) {
        if ((op == MATMUL_SWIGLU && w->rows % 2) || (n > 17 && op != n % N_OPS)) {
            continue;
        }
        for (size_t i = 0; i < N_FORMATS * f->n; i++) {
            const Machine *m = &f->machines[i / N_FORMATS];
            const int format = i % N_FORMATS;
            float *got = run_product(m->be[0], (Op)op, &w->as[format], x, n, threshold);
            judge_case(j, "%s %s, %s, %zu x %zu, n %zu, %s, threshold %g", m->isa, op_names[op],
                       format == DENSE ? "dense" : "Tiled-CBC", w->rows, w->cols, n, pattern,
                       threshold ? (double)*threshold : -1);
            judge_product(j, (Op)op, got, &references[format], w->rows, n, fp16_pair_roundings(m, format, n));
            free(got);
        }
    }
    free_reference(&references[DENSE]);
    free_reference(&references[CBC]);
    free(left);
}

/* One random matrix of that shape and pattern with each number of tokens (the list ends with 0). */
static void check_shape(const Fixture *f, Judgement *j, size_t rows, size_t cols, const Pattern *p, Draw draw,
                        const size_t *n_tokens, uint64_t *random) {
    Weights w = make_weights(rows, cols, p, draw, random);
    for (; *n_tokens; n_tokens++) {
        fp16 *x = make_inputs(*n_tokens, cols, draw, random);
        check_product(f, j, &w, p->name, x, *n_tokens, NULL);
        free(x);
    }
    free_weights(&w);
}

static void check_no_fault(const Fixture *f) {
    for (size_t i = 0; i < f->n; i++) {
        assert_int_equal(f->machines[i].be[0]->finish(f->machines[i].be[0], NULL), OK);
    }
}

/* cases.md row 30: the shapes of real small models and any number of tokens. */
static void test_products_of_any_number_of_tokens(void **state) {
    static const size_t shapes[][2] = {{172, 64}, {64, 172}, {257, 65}, {1376, 172}};
    static const size_t n_tokens[] = {1,  2,  3,  4,  5,  6,  7,  8,   9,   10,  11,
                                      12, 13, 16, 17, 33, 64, 65, 128, 130, 192, 0};
    uint64_t random = SEED;
    Judgement j = {0};
    for (size_t s = 0; s < COUNT(shapes); s++) {
        check_shape(*state, &j, shapes[s][0], shapes[s][1], HALF_NONZERO, draw_normal, n_tokens, &random);
    }
    check_no_fault(*state);
    judge_end(&j, "any number of tokens");
}

static const size_t edge_shapes[][2] = {{1, 1},   {3, 5},    {255, 15}, {256, 16},  {257, 17},
                                        {32, 64}, {2, 1000}, {288, 63}, {512, 288}, {530, 300}};

/* cases.md rows 28 and 30: full tiles, empty tiles, single bits at the ends of words and lanes. */
static void test_products_of_any_pattern(void **state) {
    static const size_t n_tokens[] = {1, 2, 13, 33, 0};
    uint64_t random = SEED + 1;
    Judgement j = {0};
    for (size_t s = 0; s < COUNT(edge_shapes); s++) {
        for (size_t p = 0; p < COUNT(patterns); p++) {
            check_shape(*state, &j, edge_shapes[s][0], edge_shapes[s][1], &patterns[p], draw_normal, n_tokens,
                        &random);
        }
    }
    judge_end(&j, "any pattern");
}

/* cases.md row 29: each element against its own bound. The second has as many tile rows as make cutting along K
 * needless. */
static void test_products_of_real_sizes(void **state) {
    static const size_t n_tokens[] = {1, 5, 0};
    uint64_t random = SEED + 2;
    Judgement j = {0};
    check_shape(*state, &j, 2048, 5632, &patterns[1], draw_normal, n_tokens, &random);
    check_shape(*state, &j, 8192, 300, HALF_NONZERO, draw_normal, n_tokens, &random);
    judge_end(&j, "real sizes");
}

/* No rounding anywhere, so nothing is allowed: not a bit. cases.md row 29. */
static void test_integer_products_are_exact(void **state) {
    const Fixture *f = *state;
    static const size_t n_tokens[] = {1, 2, 12, 13, 65};
    uint64_t random = SEED + 3;
    for (size_t i = 0; i < COUNT(edge_shapes) * COUNT(patterns) * COUNT(n_tokens); i++) {
        const size_t *shape = edge_shapes[i / COUNT(n_tokens) % COUNT(edge_shapes)];
        const size_t n = n_tokens[i % COUNT(n_tokens)];
        const Pattern *p = &patterns[i / COUNT(n_tokens) / COUNT(edge_shapes)];
        Weights w = make_weights(shape[0], shape[1], p, draw_integer, &random);
        fp16 *x = make_inputs(n, w.cols, draw_integer, &random);
        Reference r = make_reference(&w, x, n);
        for (size_t run = 0; run < 2 * N_FORMATS * f->n; run++) {
            const Machine *m = &f->machines[run / 2 / N_FORMATS];
            const Op op = run % 2 ? MATMUL_ADD : MATMUL;
            float *got = run_product(m->be[0], op, &w.as[run / 2 % N_FORMATS], x, n, NULL);
            for (size_t e = 0; e < n * w.rows; e++) {
                const double want = r.y[e] + (op == MATMUL_ADD ? (double)residual(e) : 0);
                if ((double)got[e] != want) {
                    fail_msg("%s %s, format %zu, %zu x %zu, n %zu, %s: element %zu is %g, not %g", m->isa,
                             op_names[op], run / 2 % N_FORMATS, w.rows, w.cols, n, p->name, e, (double)got[e],
                             want);
                }
            }
            free(got);
        }
        free_reference(&r);
        free(x);
        free_weights(&w);
    }
}

/* cases.md row 32: sums and inputs that fp16 accumulation does not survive, at numbers of tokens where
 * another way is taken. */
static void test_large_numbers_add_up_in_fp32(void **state) {
    const Fixture *f = *state;
    enum { COLS = 4096, MAX_N = 65 };
    fp16 *row = poisoned_alloc(COLS * sizeof *row), *x = poisoned_alloc(MAX_N * COLS * sizeof *x);
    for (size_t i = 0; i < MAX_N * COLS; i++) {
        row[i % COLS] = fp16_from_float(4);
        x[i] = fp16_from_float(8);
    }
    uint64_t random = SEED + 4;
    Weights w = make_weights(1, COLS, &patterns[4], draw_normal, &random);
    free_weights(&w);
    w.w = row;
    w.as[DENSE].dense = row;
    assert_int_equal(tiled_cbc_encode(&w.as[CBC].cbc, &w.block, NULL, row, 1, COLS, COLS, 1, NULL), OK);
    static const size_t n_tokens[] = {1, 2, 63, 64, 65};
    for (size_t i = 0; i < COUNT(n_tokens) * N_FORMATS * f->n; i++) {
        const size_t n = n_tokens[i % COUNT(n_tokens)], at = i / COUNT(n_tokens);
        float *y = run_product(f->machines[at / N_FORMATS].be[0], MATMUL, &w.as[at % N_FORMATS], x, n, NULL);
        for (size_t t = 0; t < n; t++) {
            assert_true(y[t] == 131072);
        }
        free(y);
    }
    free_weights(&w);
    free(x);
}

static fp16 draw_thousands(uint64_t *random) { return fp16_from_float(1000 * random_normal(random)); }

/* cases.md row 32: activations of thousands, chunks of 63, 64 and 65 tokens. */
static void test_products_of_large_activations(void **state) {
    static const size_t n_tokens[] = {1, 63, 64, 65};
    uint64_t random = SEED + 5;
    Judgement j = {0};
    Weights w = make_weights(288, 768, HALF_NONZERO, draw_normal, &random);
    for (size_t i = 0; i < COUNT(n_tokens); i++) {
        fp16 *x = make_inputs(n_tokens[i], w.cols, draw_thousands, &random);
        check_product(*state, &j, &w, HALF_NONZERO->name, x, n_tokens[i], NULL);
        free(x);
    }
    free_weights(&w);
    judge_end(&j, "activations of thousands");
}

/* ---- thresholds ---- */

static void test_inputs_up_to_the_threshold_count_as_zero_for_tiled_cbc_only(void **state) {
    static const double shares[] = {0, 0.3, 0.5, 0.9, 1};  // dropped; 0 is threshold 0
    static const size_t shapes[][2] = {{257, 300}, {600, 530}, {172, 64}, {1, 1}};
    static const size_t n_tokens[] = {1, 2, 13, 64};
    uint64_t random = SEED + 6;
    Judgement j = {0};
    for (size_t i = 0; i < COUNT(shapes) * COUNT(n_tokens); i++) {
        const size_t *shape = shapes[i / COUNT(n_tokens)], n = n_tokens[i % COUNT(n_tokens)];
        Weights w = make_weights(shape[0], shape[1], HALF_NONZERO, draw_normal, &random);
        fp16 *x = make_inputs(n, w.cols, draw_normal, &random);
        for (size_t s = 0; s < COUNT(shares); s++) {
            const float threshold = shares[s] > 0 ? threshold_for(x, n * w.cols, shares[s]) : 0;
            check_product(*state, &j, &w, HALF_NONZERO->name, x, n, &threshold);
        }
        free(x);
        free_weights(&w);
    }
    judge_end(&j, "thresholds");
}

/* A row of ones adds up the inputs that are kept. */
static void test_an_input_right_on_the_threshold_is_dropped(void **state) {
    const Fixture *f = *state;
    static const float inputs[] = {0.5f, -0.5f, 0.50048828125f, -0.50048828125f, 2, 0.25f, -0.0f, 8};
    static const struct {
        float threshold, sum;
    } cases[] = {{0, 10.25f}, {0.25f, 10}, {0.5f, 10}, {2, 8}, {7.9f, 8}, {8, 0}, {65504, 0}};
    uint64_t random = SEED + 7;
    Weights w = make_weights(1, 8, &patterns[0], draw_normal, &random);
    fp16 x[8];
    for (size_t k = 0; k < 8; k++) {
        w.w[k] = fp16_from_float(1);
        x[k] = fp16_from_float(inputs[k]);
    }
    free(w.block);
    assert_int_equal(tiled_cbc_encode(&w.as[CBC].cbc, &w.block, NULL, w.w, 1, 8, 8, 1, NULL), OK);
    for (size_t i = 0; i < COUNT(cases) * f->n; i++) {
        Backend *be = f->machines[i / COUNT(cases)].be[0];
        const float *threshold = &cases[i % COUNT(cases)].threshold;
        float *sparse = run_product(be, MATMUL, &w.as[CBC], x, 1, threshold);
        float *dense = run_product(be, MATMUL, &w.as[DENSE], x, 1, threshold);
        assert_true(*sparse == cases[i % COUNT(cases)].sum);
        assert_true(*dense == 10.25f);
        free(sparse);
        free(dense);
    }
    free_weights(&w);
}

/* ---- the same bits ---- */

/* cases.md row 36. Different products in between leave traces in the work space, which must not show. */
static void test_products_do_not_depend_on_threads_or_on_what_ran_before(void **state) {
    const Fixture *f = *state;
    static const size_t shapes[][2] = {{600, 1030}, {172, 64}}, n_tokens[] = {33, 1, 13, 2};
    uint64_t random = SEED + 8;
    for (size_t i = 0; i < COUNT(shapes) * COUNT(n_tokens) * N_FORMATS; i++) {
        const size_t *shape = shapes[i % COUNT(shapes)], n = n_tokens[i / COUNT(shapes) % COUNT(n_tokens)];
        const size_t format = i / COUNT(shapes) / COUNT(n_tokens);
        Weights w = make_weights(shape[0], shape[1], HALF_NONZERO, draw_normal, &random);
        fp16 *x = make_inputs(n, w.cols, draw_normal, &random);
        const float threshold = threshold_for(x, n * w.cols, 0.4);
        for (size_t run = 0; run < f->n * N_OPS; run++) {
            const Machine *m = &f->machines[run / N_OPS];
            const Op op = (Op)(run % N_OPS);
            const size_t bytes = n * w.rows / (op == MATMUL_SWIGLU ? 2 : 1) * sizeof(float);
            float *first = run_product(m->be[0], op, &w.as[format], x, n, &threshold);
            for (size_t again = 0; again < 2 * COUNT(thread_counts); again++) {
                Backend *be = m->be[again % COUNT(thread_counts)];
                float *y = run_product(be, op, &w.as[format], x, n, &threshold);
                assert_memory_equal(y, first, bytes);
                free(y);
            }
            free(first);
        }
        free(x);
        free_weights(&w);
    }
}

/* ---- inputs that are not finite ---- */

static const fp16 not_finite[] = {0x7c00, 0xfc00, 0x7e00, 0xfe00, 0x7c01};

static void check_reported_once(Backend *be, const char *text) {
    Error err = {0};
    assert_int_equal(be->finish(be, &err), ERR_NUMBER);
    assert_int_equal(err.code, ERR_NUMBER);
    assert_string_equal(err.text, text);
    assert_int_equal(be->finish(be, &err), OK);
}

static void check_fault(Backend *be, const Matrix *w, size_t n, size_t at, fp16 bad, const char *text) {
    uint64_t random = SEED + 9;
    fp16 *x = make_inputs(n, w->cols, draw_normal, &random);
    x[at] = bad;
    free(run_product(be, at % 2 ? MATMUL : MATMUL_ADD, w, x, n, NULL));
    check_reported_once(be, text);
    x[at] = 0x7bff;
    free(run_product(be, MATMUL, w, x, n, NULL));
    assert_int_equal(be->finish(be, NULL), OK);
    free(x);
}

/* Wherever it stands, even where every weight that it meets is zero. */
static void test_an_input_that_is_not_finite_is_reported_once_with_layer_and_site(void **state) {
    const Fixture *f = *state;
    enum { COLS = 37 };
    uint64_t random = SEED + 10;
    static const size_t n_tokens[] = {1, 2, 13};
    for (size_t p = 0; p < COUNT(patterns); p += 2) {
        Weights w = make_weights(20, COLS, &patterns[p], draw_normal, &random);
        for (size_t i = 0; i < f->n * N_FORMATS * COUNT(n_tokens) * COUNT(not_finite); i++) {
            const fp16 bad = not_finite[i % COUNT(not_finite)];
            const size_t n = n_tokens[i / COUNT(not_finite) % COUNT(n_tokens)];
            const size_t rest = i / COUNT(not_finite) / COUNT(n_tokens);
            const size_t places[] = {0, COLS - 1, n * COLS - 1, random_below(&random, (uint32_t)(n * COLS))};
            for (size_t place = 0; place < COUNT(places); place++) {
                check_fault(f->machines[rest / N_FORMATS].be[0], &w.as[rest % N_FORMATS], n, places[place],
                            bad, "a number at the MLP hidden of layer 3 is not finite");
            }
        }
        free_weights(&w);
    }
}

/* A threshold must not hide it: NaN compares false with everything. */
static void test_a_threshold_does_not_hide_an_input_that_is_not_finite(void **state) {
    const Fixture *f = *state;
    uint64_t random = SEED + 11;
    Weights w = make_weights(20, 30, HALF_NONZERO, draw_normal, &random);
    fp16 x[30];
    for (size_t i = 0; i < f->n * COUNT(not_finite); i++) {
        Backend *be = f->machines[i % f->n].be[0];
        const float threshold = 100;
        memset(x, 0, sizeof x);
        x[11] = not_finite[i / f->n];
        free(run_product(be, MATMUL, &w.as[CBC], x, 1, &threshold));
        check_reported_once(be, "a number at the MLP hidden of layer 3 is not finite");
    }
    free_weights(&w);
}

/* Infinities of either sign in one sum, of columns that a GPU leaves to the first of several blocks: what that block
 * hands on is no number, and must arrive all the same. */
static void test_sums_that_are_not_numbers_arrive(void **state) {
    const Fixture *f = *state;
    uint64_t random = SEED + 23;
    Weights w = make_weights(300, 5000, HALF_NONZERO, draw_normal, &random);
    fp16 *x = make_inputs(1, w.cols, draw_normal, &random);
    x[3] = x[5] = 0x7c00;
    for (size_t i = 0; i < f->n; i++) {
        Backend *be = f->machines[i].be[0];
        float *y = run_product(be, MATMUL, &w.as[CBC], x, 1, NULL);
        check_reported_once(be, "a number at the MLP hidden of layer 3 is not finite");
        for (size_t row = 0; row < w.rows; row++) {
            const fp16 *weights = w.w + row * w.as[DENSE].stride;
            const bool minus = weights[3] >> 15, other_minus = weights[5] >> 15;
            if (magnitude_of(weights[3]) > 0 && magnitude_of(weights[5]) > 0) {  // both are there
                assert_true(minus != other_minus ? isnan(y[row]) : isinf(y[row]) && (y[row] < 0) == minus);
            }
        }
        free(y);
    }
    free(x);
    free_weights(&w);
}

static void test_the_first_of_several_faults_is_reported(void **state) {
    const Fixture *f = *state;
    uint64_t random = SEED + 12;
    Weights w = make_weights(20, 30, HALF_NONZERO, draw_normal, &random);
    Matrix head = w.as[DENSE], o = w.as[CBC];
    head.layer = -1;
    head.site = SITE_HEAD;
    o.layer = 31;
    o.site = SITE_ATTN_OUT;
    const fp16 good[30] = {0x3c00};
    fp16 bad[30] = {0x3c00};
    bad[29] = 0x7e00;
    for (size_t i = 0; i < f->n; i++) {
        Backend *be = f->machines[i].be[0];
        free(run_product(be, MATMUL, &w.as[CBC], good, 1, NULL));
        free(run_product(be, MATMUL, &o, bad, 1, NULL));
        free(run_product(be, MATMUL, &head, bad, 1, NULL));
        check_reported_once(be, "a number at the attention output of layer 31 is not finite");
        free(run_product(be, MATMUL, &head, bad, 1, NULL));
        check_reported_once(be, "a number at the final head is not finite");
    }
    free_weights(&w);
}

/* ---- counters ---- */

static void check_stats(Backend *be, Site site, uint64_t elements, uint64_t active_elements,
                        uint64_t active_nonzeros, uint64_t bytes) {
    assert_int_equal(be->finish(be, NULL), OK);
    const ProductStats *s = &be->stats[site];
    assert_int_equal(s->elements, elements);
    assert_int_equal(s->active_elements, active_elements);
    assert_int_equal(s->active_nonzeros, active_nonzeros);
    assert_int_equal(s->bytes, bytes);
}

/* 300 x 20: column k has 8 (k mod 4) nonzeros in the first tile row and 8 (k mod 2) in the second. */
static Weights counted_weights(uint64_t *random) {
    Weights w = make_weights(300, 20, &patterns[0], draw_normal, random);
    for (size_t i = 0; i < 300 * 20; i++) {
        const size_t row = i / 20, k = i % 20;
        const size_t nonzeros = row < 256 ? 8 * (k % 4) : 8 * (k % 2);
        w.w[row * w.as[DENSE].stride + k] = row % 256 < nonzeros ? 0x3c00 : 0;
    }
    free(w.block);
    assert_int_equal(tiled_cbc_encode(&w.as[CBC].cbc, &w.block, NULL, w.w, 300, 20, 24, 1, NULL), OK);
    return w;
}

/* Active are columns 1, 2, 7 and 19 with 16, 16, 32 and 32 nonzeros.
 * Bytes: 5 TileOffset (20), 64 ColInfo (256), Bitmap of 4 columns in 2 tile rows (256), 96 Values (192). */
static void test_counters_of_a_case_worked_out_by_hand(void **state) {
    const Fixture *f = *state;
    const float threshold = 0.5f;
    uint64_t random = SEED + 13;
    Weights w = counted_weights(&random);
    Matrix gate = w.as[DENSE];
    gate.site = SITE_MLP_IN;
    fp16 x[2 * 20] = {
        [1] = 0x3c00, [2] = 0xc000, [3] = 0x8000, [7] = 0x7bff, [19] = 0xbc00,  // kept, but for -0
        [4] = 0x3800, [5] = 0xb800, [6] = 0x0001};                              // dropped by 0.5
    for (size_t i = 0; i < f->n * COUNT(thread_counts); i++) {
        Backend *be = f->machines[i / COUNT(thread_counts)].be[i % COUNT(thread_counts)];
        be->finish(be, NULL);  // what earlier tests counted
        memset(be->stats, 0, sizeof be->stats);
        free(run_product(be, MATMUL, &w.as[CBC], x, 1, &threshold));
        check_stats(be, SITE_MLP_HIDDEN, 6000, 4 * 300, 96, 724);
        free(run_product(be, MATMUL_ADD, &w.as[CBC], x, 1, &threshold));
        free(run_product(be, MATMUL_SWIGLU, &w.as[CBC], x, 1, &threshold));
        check_stats(be, SITE_MLP_HIDDEN, 3 * 6000, 3 * 4 * 300, 3 * 96, 3 * 724);
        // Columns 4, 5 and 6 (0, 16 and 16 nonzeros) come in as well when only zeros are skipped.
        memset(be->stats, 0, sizeof be->stats);
        free(run_product(be, MATMUL, &w.as[CBC], x, 1, NULL));
        check_stats(be, SITE_MLP_HIDDEN, 6000, 7 * 300, 128, 20 + 256 + 448 + 256);
        // Prefill does not count, and a dense matrix counts bytes only.
        free(run_product(be, MATMUL, &w.as[CBC], x, 2, NULL));
        free(run_product(be, MATMUL, &gate, x, 2, NULL));
        free(run_product(be, MATMUL, &gate, x, 1, &threshold));
        check_stats(be, SITE_MLP_HIDDEN, 6000, 7 * 300, 128, 20 + 256 + 448 + 256);
        check_stats(be, SITE_MLP_IN, 0, 0, 0, 300 * 24 * 2);
        check_stats(be, SITE_ATTN_IN, 0, 0, 0, 0);
        memset(be->stats, 0, sizeof be->stats);
    }
    free_weights(&w);
}

/* ---- embed, rmsnorm ---- */

/* A table that holds every half: the vector conversion to float is exact and in its place. */
static void test_embed_copies_rows_exactly(void **state) {
    const Fixture *f = *state;
    enum { ROWS = 256, COLS = 257, STRIDE = 264 };
    static const int ids[] = {0, 255, 7, 7, 128, 1, 0};
    fp16 *table = poisoned_alloc(ROWS * STRIDE * sizeof *table);
    const Matrix matrix = {
        .format = FORMAT_DENSE, .rows = ROWS, .cols = COLS, .layer = -1, .dense = table, .stride = STRIDE};
    for (size_t i = 0; i < ROWS * COLS; i++) {
        table[i / COLS * STRIDE + i % COLS] = (fp16)(i * 257);
    }
    for (size_t i = 0; i < f->n * (ROWS + COUNT(ids)); i++) {
        Backend *be = f->machines[i % f->n].be[i % COUNT(thread_counts)];
        const int one = (int)(i / f->n) - (int)COUNT(ids), n = one < 0 ? (int)(i / f->n) + 1 : 1;
        const size_t bytes = (size_t)n * COLS * sizeof(float);
        int *given_ids = give(be, one < 0 ? ids : &one, (size_t)n * sizeof *ids);
        float *out = give_poison(be, bytes);
        GivenMatrix given_table = give_matrix(be, &matrix);
        be->embed(be, out, &given_table.m, given_ids, n);
        float *got = take(be, out, bytes);
        take_matrix_back(be, &given_table);
        take_back(be, given_ids, (size_t)n * sizeof *ids);
        for (size_t e = 0; e < (size_t)n * COLS; e++) {
            const size_t row = (size_t)(one < 0 ? ids[e / COLS] : one);
            const float want = fp16_to_float(table[row * STRIDE + e % COLS]);
            assert_true(isnan(want) ? isnan(got[e]) : memcmp(&got[e], &want, sizeof want) == 0);
        }
        free(got);
    }
    free(table);
}

/* cases.md row 18: id times stride beyond 2^31 elements, in address space of which one row is ever touched. */
static void test_row_18_the_last_row_of_a_huge_embedding_is_found(void **state) {
    const Fixture *f = *state;
    enum { ROWS = 262144, COLS = 8960 };
    const size_t bytes = (size_t)ROWS * COLS * sizeof(fp16);
    void *table = is_cuda(&f->machines[0]) ? MAP_FAILED
                                           : mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (table == MAP_FAILED) {
        print_message("skipped: no 4.7 GB of address space for the backend\n");
        skip();
    }
    const Matrix matrix = {
        .format = FORMAT_DENSE, .rows = ROWS, .cols = COLS, .layer = -1, .dense = table, .stride = COLS};
    fp16 *last = (fp16 *)table + (size_t)(ROWS - 1) * COLS;
    uint64_t random = SEED + 22;
    for (size_t c = 0; c < COLS; c++) {
        last[c] = draw_nonzero(draw_normal, &random);
    }
    for (size_t m = 0; m < f->n; m++) {
        float *out = poisoned_alloc(COLS * sizeof *out);
        f->machines[m].be[0]->embed(f->machines[m].be[0], out, &matrix, &(int){ROWS - 1}, 1);
        for (size_t c = 0; c < COLS; c++) {
            assert_true(out[c] == fp16_to_float(last[c]));
        }
        free(out);
    }
    munmap(table, bytes);
}

static fp16 *run_rmsnorm(Backend *be, const float *x, const fp16 *weight, size_t n, size_t dim, float eps) {
    float *given_x = give(be, x, n * dim * sizeof *x);
    fp16 *given_weight = give(be, weight, dim * sizeof *weight);
    fp16 *out = give_poison(be, n * dim * sizeof *out);
    be->rmsnorm(be, out, given_x, given_weight, (int)n, (int)dim, eps);
    take_back(be, given_x, n * dim * sizeof *x);
    take_back(be, given_weight, dim * sizeof *weight);
    return take(be, out, n * dim * sizeof *out);
}

/* The sum has only positive terms, so its relative error is below dim * 2^-24; the root halves it. */
static void judge_rmsnorm(Judgement *j, const fp16 *got, const float *x, const fp16 *weight, size_t dim,
                          float eps) {
    double sum = 0;
    for (size_t i = 0; i < dim; i++) {
        sum += (double)x[i] * (double)x[i];
    }
    const double factor = 1 / sqrt(sum / (double)dim + (double)eps);
    for (size_t i = 0; i < dim; i++) {
        const double want = (double)x[i] * factor * (double)fp16_to_float(weight[i]);
        judge(j, (double)fp16_to_float(got[i]), want, (double)dim / 2 + 6, fabs(want), AS_FP16);
    }
}

/* cases.md row 12: eps counts, so some rows are as small as it is. Scale 0 must give zeros, not NaN. */
static void test_rmsnorm(void **state) {
    const Fixture *f = *state;
    static const size_t dims[] = {1, 2, 3, 15, 16, 17, 63, 64, 65, 288, 4096}, n_tokens[] = {1, 2, 9};
    static const float scales[] = {1, 0, 1e-3f, 1e4f}, epsilons[] = {1e-5f, 1e-6f};
    uint64_t random = SEED + 14;
    Judgement j = {0};
    for (size_t i = 0; i < COUNT(dims) * COUNT(n_tokens) * COUNT(scales) * COUNT(epsilons); i++) {
        const size_t dim = dims[i % COUNT(dims)], n = n_tokens[i / COUNT(dims) % COUNT(n_tokens)];
        const float scale = scales[i / COUNT(dims) / COUNT(n_tokens) % COUNT(scales)];
        const float eps = epsilons[i / COUNT(dims) / COUNT(n_tokens) / COUNT(scales)];
        float *x = poisoned_alloc(n * dim * sizeof *x);
        fp16 *weight = poisoned_alloc(dim * sizeof *weight);
        for (size_t e = 0; e < n * dim; e++) {
            x[e] = scale * random_normal(&random);
            weight[e % dim] = draw_normal(&random);
        }
        for (size_t m = 0; m < f->n; m++) {
            fp16 *one = run_rmsnorm(f->machines[m].be[0], x, weight, n, dim, eps);
            fp16 *many = run_rmsnorm(f->machines[m].be[2], x, weight, n, dim, eps);
            assert_memory_equal(one, many, n * dim * sizeof *one);
            judge_case(&j, "%s, dim %zu, n %zu, scale %g, eps %g", f->machines[m].isa, dim, n, (double)scale,
                       (double)eps);
            for (size_t t = 0; t < n; t++) {
                judge_rmsnorm(&j, one + t * dim, x + t * dim, weight, dim, eps);
            }
            free(one);
            free(many);
        }
        free(x);
        free(weight);
    }
    judge_end(&j, "rmsnorm");
}

/* ---- attention: what it leaves in the cache ---- */

typedef struct {
    fp16 *k, *v;  // in host memory
} Appended;

static size_t cache_count(const AttentionShape *s) {
    return (size_t)s->n_kv_heads * (size_t)s->seq_len * (size_t)s->head_dim;
}

/* Caches are all poison before. */
static Appended run_append(Backend *be, const AttentionShape *s, const float *qkv, const float *rope,
                                int pos, size_t n) {
    const size_t hd = (size_t)s->head_dim, cache_bytes = cache_count(s) * sizeof(fp16);
    const size_t q_bytes = n * (size_t)s->n_heads * hd * sizeof(fp16);
    const size_t qkv_bytes = n * (size_t)(s->n_heads + 2 * s->n_kv_heads) * hd * sizeof *qkv;
    const size_t rope_bytes = (size_t)s->seq_len * hd * sizeof *rope;
    fp16 *q = give_poison(be, q_bytes), *k = give_poison(be, cache_bytes), *v = give_poison(be, cache_bytes);
    float *given_qkv = give(be, qkv, qkv_bytes), *given_rope = give(be, rope, rope_bytes);
    int *given_pos = give(be, &pos, sizeof pos);
    fp16 *out = give_poison(be, q_bytes);
    be->attention(be, out, q, k, v, given_qkv, given_rope, s, given_pos, (int)n);
    free(take(be, q, q_bytes));
    free(take(be, out, q_bytes));
    take_back(be, given_qkv, qkv_bytes);
    take_back(be, given_rope, rope_bytes);
    take_back(be, given_pos, sizeof pos);
    return (Appended){take(be, k, cache_bytes), take(be, v, cache_bytes)};
}

/* One head: pair (a, b) becomes (a cos - b sin, a sin + b cos). */
static void judge_rotated(Judgement *j, const fp16 *got, const float *x, const float *rope, int head_dim) {
    for (int i = 0; i < head_dim; i += 2) {
        const double a = (double)x[i], b = (double)x[i + 1], c = (double)rope[i], s = (double)rope[i + 1];
        judge(j, (double)fp16_to_float(got[i]), a * c - b * s, 2, fabs(a * c) + fabs(b * s), AS_FP16);
        judge(j, (double)fp16_to_float(got[i + 1]), a * s + b * c, 2, fabs(a * s) + fabs(b * c), AS_FP16);
    }
}

static void judge_appended(Judgement *j, const Appended *a, const AttentionShape *s, const float *qkv,
                           const float *rope, int pos, int n) {
    const size_t hd = (size_t)s->head_dim, heads = (size_t)s->n_heads, kv_heads = (size_t)s->n_kv_heads;
    for (size_t t = 0; t < (size_t)n; t++) {
        const float *row = qkv + t * (heads + 2 * kv_heads) * hd, *angles = rope + ((size_t)pos + t) * hd;
        for (size_t h = 0; h < kv_heads; h++) {
            const size_t at = (h * (size_t)s->seq_len + (size_t)pos + t) * hd;
            judge_rotated(j, a->k + at, row + (heads + h) * hd, angles, s->head_dim);
            for (size_t i = 0; i < hd; i++) {
                assert_int_equal(a->v[at + i], fp16_from_float(row[(heads + kv_heads + h) * hd + i]));
            }
        }
    }
}

/* Positions before and behind the appended ones keep their poison. */
static void check_other_positions(const fp16 *cache, const AttentionShape *s, int pos, int n) {
    const size_t hd = (size_t)s->head_dim, len = (size_t)s->seq_len, end = (size_t)(pos + n);
    for (size_t h = 0; h < (size_t)s->n_kv_heads; h++) {
        const fp16 *head = cache + h * len * hd;
        assert_true(is_poison(head, (size_t)pos * hd * sizeof *head));
        assert_true(is_poison(head + end * hd, (len - end) * hd * sizeof *head));
    }
}

static void test_attention_appends_to_the_cache(void **state) {
    const Fixture *f = *state;
    static const struct {
        AttentionShape shape;
        int pos, n;
    } cases[] = {
        {{1, 1, 2, 1}, 0, 1},    {{8, 4, 8, 20}, 0, 20},    {{8, 4, 8, 20}, 19, 1}, {{4, 1, 4, 70}, 63, 5},
        {{6, 6, 48, 40}, 3, 33}, {{8, 1, 64, 130}, 127, 2}, {{2, 2, 128, 9}, 1, 7}, {{2, 1, 256, 12}, 4, 8},
    };
    uint64_t random = SEED + 15;
    Judgement j = {0};
    for (size_t i = 0; i < COUNT(cases); i++) {
        const AttentionShape *s = &cases[i].shape;
        const int pos = cases[i].pos, n = cases[i].n;
        const size_t hd = (size_t)s->head_dim, width = (size_t)(s->n_heads + 2 * s->n_kv_heads) * hd;
        float *qkv = poisoned_alloc((size_t)n * width * sizeof *qkv);
        float *rope = poisoned_alloc((size_t)s->seq_len * hd * sizeof *rope);
        for (size_t e = 0; e < (size_t)n * width; e++) {
            qkv[e] = random_normal(&random);
        }
        // Angles of the positions that are used; the others stay poison, so that a wrong one shows.
        for (size_t e = (size_t)pos * hd; e < (size_t)(pos + n) * hd; e += 2) {
            const double angle = (double)(e / hd) * pow(10000, -(double)(e % hd) / (double)hd);
            rope[e] = (float)cos(angle);
            rope[e + 1] = (float)sin(angle);
        }
        for (size_t m = 0; m < f->n * 2; m++) {
            Appended a = run_append(f->machines[m / 2].be[m % 2 * 2], s, qkv, rope, pos, (size_t)n);
            judge_case(&j, "%s, %d / %d heads of %d, pos %d, n %d", f->machines[m / 2].isa, s->n_heads,
                       s->n_kv_heads, s->head_dim, pos, n);
            judge_appended(&j, &a, s, qkv, rope, pos, n);
            check_other_positions(a.k, s, pos, n);
            check_other_positions(a.v, s, pos, n);
            free(a.k);
            free(a.v);
        }
        free(qkv);
        free(rope);
    }
    judge_end(&j, "keys and values appended");
}

/* ---- attention ---- */

typedef struct {
    AttentionShape shape;
    int pos, n;
    float *qkv, *rope;
    fp16 *q, *k, *v;  // what comes of them: rotated queries, and the caches as they are afterwards
} AttentionCase;

static size_t q_count(const AttentionCase *c) {
    return (size_t)c->n * (size_t)c->shape.n_heads * (size_t)c->shape.head_dim;
}

static size_t qkv_count(const AttentionCase *c) {
    return (size_t)c->n * (size_t)(c->shape.n_heads + 2 * c->shape.n_kv_heads) * (size_t)c->shape.head_dim;
}

static size_t rope_count(const AttentionCase *c) { return (size_t)c->shape.seq_len * (size_t)c->shape.head_dim; }

/* What head h of token t becomes: turned, or (angles NULL) only rounded. */
static void turn_head(fp16 *out, const AttentionCase *c, size_t t, size_t h, const float *angles) {
    const size_t hd = (size_t)c->shape.head_dim, heads = (size_t)(c->shape.n_heads + 2 * c->shape.n_kv_heads);
    const float *x = c->qkv + (t * heads + h) * hd;
    for (size_t i = 0; i < hd; i += 2) {
        const float cosine = angles ? angles[i] : 1, sine = angles ? angles[i + 1] : 0;
        const float ac = x[i] * cosine, bs = x[i + 1] * sine, as = x[i] * sine, bc = x[i + 1] * cosine;
        out[i] = fp16_from_float(ac - bs);
        out[i + 1] = fp16_from_float(as + bc);
    }
}

/* q, k and v of the case's tokens from its qkv and rope. */
static void turn_all(AttentionCase *c) {
    const size_t hd = (size_t)c->shape.head_dim, heads = (size_t)c->shape.n_heads;
    const size_t kv_heads = (size_t)c->shape.n_kv_heads, len = (size_t)c->shape.seq_len;
    for (size_t t = 0; t < (size_t)c->n; t++) {
        const size_t p = (size_t)c->pos + t;
        for (size_t h = 0; h < heads; h++) {
            turn_head(c->q + (t * heads + h) * hd, c, t, h, c->rope + p * hd);
        }
        for (size_t h = 0; h < kv_heads; h++) {
            turn_head(c->k + (h * len + p) * hd, c, t, heads + h, c->rope + p * hd);
            turn_head(c->v + (h * len + p) * hd, c, t, heads + kv_heads + h, NULL);
        }
    }
}

/* Random queries, keys, values and angles; cache positions that no token may see are poison, as are angles of others. */
static AttentionCase make_attention(int head_dim, int n_kv_heads, int group, int pos, int n,
                                    uint64_t *random) {
    AttentionCase c = {.shape = {group * n_kv_heads, n_kv_heads, head_dim, pos + n + 70}, .pos = pos, .n = n};
    const size_t hd = (size_t)head_dim, bytes = cache_count(&c.shape) * sizeof(fp16);
    c.qkv = poisoned_alloc(qkv_count(&c) * sizeof *c.qkv);
    c.rope = poisoned_alloc(rope_count(&c) * sizeof *c.rope);
    c.q = poisoned_alloc(q_count(&c) * sizeof(fp16));
    c.k = poisoned_alloc(bytes);
    c.v = poisoned_alloc(bytes);
    for (size_t i = 0; i < qkv_count(&c); i++) {
        c.qkv[i] = random_normal(random);
    }
    for (size_t i = (size_t)pos * hd; i < (size_t)(pos + n) * hd; i += 2) {
        const float angle = 10 * random_normal(random);
        c.rope[i] = cosf(angle);
        c.rope[i + 1] = sinf(angle);
    }
    for (size_t h = 0; h < (size_t)n_kv_heads; h++) {
        for (size_t i = 0; i < (size_t)pos * hd; i++) {
            c.k[h * (size_t)c.shape.seq_len * hd + i] = draw_normal(random);
            c.v[h * (size_t)c.shape.seq_len * hd + i] = draw_normal(random);
        }
    }
    turn_all(&c);
    return c;
}

static void free_attention(AttentionCase *c) {
    free(c->qkv);
    free(c->rope);
    free(c->q);
    free(c->k);
    free(c->v);
}

/* The case's cache before its tokens are in it: poison in their places. */
static fp16 *give_cache(Backend *be, const AttentionCase *c, const fp16 *cache) {
    const size_t hd = (size_t)c->shape.head_dim, len = (size_t)c->shape.seq_len, bytes = cache_count(&c->shape) * sizeof *cache;
    fp16 *before = poisoned_alloc(bytes);
    for (size_t h = 0; h < (size_t)c->shape.n_kv_heads; h++) {
        memcpy(before + h * len * hd, cache + h * len * hd, (size_t)c->pos * hd * sizeof *cache);
    }
    fp16 *given = give(be, before, bytes);
    free(before);
    return given;
}

static fp16 *run_attention(Backend *be, const AttentionCase *c) {
    const size_t bytes = q_count(c) * sizeof(fp16), cache_bytes = cache_count(&c->shape) * sizeof(fp16);
    const size_t qkv_bytes = qkv_count(c) * sizeof *c->qkv, rope_bytes = rope_count(c) * sizeof *c->rope;
    fp16 *q = give_poison(be, bytes), *k = give_cache(be, c, c->k), *v = give_cache(be, c, c->v);
    float *qkv = give(be, c->qkv, qkv_bytes), *rope = give(be, c->rope, rope_bytes);
    fp16 *out = give_poison(be, bytes);
    int *pos = give(be, &c->pos, sizeof c->pos);
    be->attention(be, out, q, k, v, qkv, rope, &c->shape, pos, c->n);
    free(take(be, q, bytes));
    take_back(be, k, cache_bytes);
    take_back(be, v, cache_bytes);
    take_back(be, qkv, qkv_bytes);
    take_back(be, rope, rope_bytes);
    take_back(be, pos, sizeof c->pos);
    return take(be, out, bytes);
}

/* What one token and head should give, the weighted sum of |v|, and how many roundings count. */
typedef struct {
    double out[256], magnitude[256], roundings;
} Attended;

static double dot_fp16(const fp16 *a, const fp16 *b, size_t n, double *magnitude) {
    double sum = 0;
    *magnitude = 0;
    for (size_t i = 0; i < n; i++) {
        const double product = (double)fp16_to_float(a[i]) * (double)fp16_to_float(b[i]);
        sum += product;
        *magnitude += fabs(product);
    }
    return sum;
}

/* An error in the scores counts twice (numerator and sum of the weights), and so do the roundings of both
 * sums. The distance between scores is an exponent, where absolute errors become relative ones. */
static void reference_attention(Attended *a, const fp16 *q, const fp16 *k, const fp16 *v, size_t hd,
                                size_t kv_len) {
    double *weights = poisoned_alloc(kv_len * sizeof *weights);
    double max = -INFINITY, min = INFINITY, largest = 0, sum = 0;
    for (size_t p = 0; p < kv_len; p++) {
        double magnitude;
        weights[p] = dot_fp16(q, k + p * hd, hd, &magnitude) / sqrt((double)hd);
        max = fmax(max, weights[p]);
        min = fmin(min, weights[p]);
        largest = fmax(largest, magnitude / sqrt((double)hd));
    }
    for (size_t p = 0; p < kv_len; p++) {
        weights[p] = exp(weights[p] - max);
        sum += weights[p];
    }
    memset(a, 0, sizeof *a);
    for (size_t p = 0; p < kv_len; p++) {
        for (size_t i = 0; i < hd; i++) {
            const double value = (double)fp16_to_float(v[p * hd + i]) * weights[p] / sum;
            a->out[i] += value;
            a->magnitude[i] += fabs(value);
        }
    }
    a->roundings = 2 * ((double)hd + 2) * largest + 2 * (max - min) + 2 * (double)kv_len + 32;
    free(weights);
}

static void judge_attention(const Fixture *f, Judgement *j, const AttentionCase *c) {
    const AttentionShape *s = &c->shape;
    const size_t hd = (size_t)s->head_dim, heads = (size_t)s->n_heads, group = heads / (size_t)s->n_kv_heads;
    fp16 *got[COUNT(isas)];
    for (size_t m = 0; m < f->n; m++) {
        got[m] = run_attention(f->machines[m].be[0], c);
    }
    for (size_t i = 0; i < (size_t)c->n * heads; i++) {
        Attended a;
        const size_t cache = i % heads / group * (size_t)s->seq_len * hd;
        reference_attention(&a, c->q + i * hd, c->k + cache, c->v + cache, hd,
                            (size_t)c->pos + i / heads + 1);
        for (size_t m = 0; m < f->n; m++) {
            judge_case(j, "%s, %d / %d heads of %d, pos %d, n %d", f->machines[m].isa, s->n_heads,
                       s->n_kv_heads, s->head_dim, c->pos, c->n);
            // CUDA rounds the weights of several tokens to fp16 for the Tensor Cores.
            const double roundings = a.roundings + (is_cuda(&f->machines[m]) && c->n > 1 ? 2 * 0x1p-11 / 0x1p-24 : 0);
            for (size_t e = 0; e < hd; e++) {
                judge(j, (double)fp16_to_float(got[m][i * hd + e]), a.out[e], roundings, a.magnitude[e], AS_FP16);
            }
        }
    }
    for (size_t m = 0; m < f->n; m++) {
        free(got[m]);
    }
}

static const int positions[] = {0, 1, 63, 64, 511, 512, 1300}, token_counts[] = {1, 7, 8, 9, 33};

static void test_attention_at_any_position(void **state) {
    uint64_t random = SEED + 16;
    Judgement j = {0};
    for (size_t i = 0; i < COUNT(positions) * COUNT(token_counts); i++) {
        AttentionCase c = make_attention(32, 2, 2, positions[i / COUNT(token_counts)],
                                         token_counts[i % COUNT(token_counts)], &random);
        judge_attention(*state, &j, &c);
        free_attention(&c);
    }
    judge_end(&j, "attention at any position");
}

/* cases.md row 11: heads and kv heads differ in number. */
static void test_attention_with_any_heads(void **state) {
    static const int head_dims[] = {2, 4, 8, 32, 64, 128, 256}, groups[] = {1, 2, 8};
    static const int places[][2] = {{0, 1}, {1, 8}, {63, 9}, {511, 1}, {512, 7}, {1300, 1}};  // pos, n
    uint64_t random = SEED + 17;
    Judgement j = {0};
    for (size_t i = 0; i < COUNT(head_dims) * COUNT(groups) * COUNT(places); i++) {
        const int *place = places[i % COUNT(places)], group = groups[i / COUNT(places) % COUNT(groups)];
        const int head_dim = head_dims[i / COUNT(places) / COUNT(groups)];
        AttentionCase c = make_attention(head_dim, group == 8 ? 1 : 3, group, place[0], place[1], &random);
        judge_attention(*state, &j, &c);
        free_attention(&c);
    }
    judge_end(&j, "attention with any heads");
}

/* Every query is a multiple of one of the keys, which are at right angles: it gets that key's value and
 * nothing else. A query of zeros gets the mean of all that it may see. */
static void test_attention_with_an_exact_answer(void **state) {
    const Fixture *f = *state;
    enum { HD = 4, LEN = 4 };
    static const float keys[LEN][HD] = {{100, 0, 0, 0}, {0, 100, 0, 0}, {0, 0, 100, 0}, {0, 0, 0, 100}};
    static const float values[LEN][HD] = {
        {1, -2, 3, 65504}, {5, 6, -7, 8}, {9, 10, 11, 0.5f}, {-13, 14, 15, 24}};
    static const float queries[][HD] = {
        {0, 0, 100, 0}, {100, 0, 0, 0}, {0, 100, 0, 0}, {0, 0, 0, 100}, {-100, 0, 0, 0}};
    static const float want[][HD] = {{9, 10, 11, 0.5f},
                                     {1, -2, 3, 65504},
                                     {5, 6, -7, 8},
                                     {-13, 14, 15, 24},
                                     {(5 + 9 - 13) / 3.0f, 10, 19 / 3.0f, 32.5f / 3}};
    uint64_t random = SEED + 18;
    AttentionCase c = make_attention(HD, 1, COUNT(queries), LEN - 1, 1, &random);
    for (size_t i = 0; i < (LEN - 1) * HD; i++) {
        c.k[i] = fp16_from_float(keys[i / HD][i % HD]);
        c.v[i] = fp16_from_float(values[i / HD][i % HD]);
    }
    memcpy(c.qkv, queries, sizeof queries);
    memcpy(c.qkv + COUNT(queries) * HD, keys[LEN - 1], sizeof keys[0]);
    memcpy(c.qkv + (COUNT(queries) + 1) * HD, values[LEN - 1], sizeof values[0]);
    for (size_t i = 0; i < HD; i++) {
        c.rope[(LEN - 1) * HD + i] = i % 2 == 0;  // no rotation
    }
    for (size_t m = 0; m < f->n; m++) {
        fp16 *got = run_attention(f->machines[m].be[0], &c);
        for (size_t i = 0; i < COUNT(queries) * HD; i++) {
            assert_int_equal(got[i], fp16_from_float(want[i / HD][i % HD]));
        }
        free(got);
    }
    free_attention(&c);
}

static void test_attention_does_not_depend_on_threads_or_on_what_ran_before(void **state) {
    const Fixture *f = *state;
    static const int places[][2] = {{500, 33}, {1300, 1}, {0, 1}, {511, 1}};  // pos, n
    uint64_t random = SEED + 19;
    for (size_t i = 0; i < COUNT(places) * f->n; i++) {
        const Machine *m = &f->machines[i / COUNT(places)];
        const int *place = places[i % COUNT(places)];
        AttentionCase c = make_attention(64, 2, 2, place[0], place[1], &random);
        fp16 *first = run_attention(m->be[0], &c);
        for (size_t again = 0; again < 2 * COUNT(thread_counts); again++) {
            fp16 *out = run_attention(m->be[again % COUNT(thread_counts)], &c);
            assert_memory_equal(out, first, q_count(&c) * sizeof *out);
            free(out);
        }
        free(first);
        free_attention(&c);
    }
}

/* ---- sample ---- */

static int run_sample(Backend *be, int *id, const float *logits, int n, const SampleParams *params,
                      Error *err) {
    float *given = give(be, logits, (size_t)n * sizeof *logits);
    const int rc = be->sample(be, id, given, n, params, 5, err);
    take_back(be, given, (size_t)n * sizeof *logits);
    return rc;
}

/* cases.md row 37: a logit that is not finite is never a token. */
static void test_sample_takes_sample_token_s_choice_and_refuses_what_is_not_finite(void **state) {
    const Fixture *f = *state;
    enum { N = 1000 };
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const SampleParams params[] = {{0, 1, 0, 1}, {0.8f, 0.9f, 40, 1}, {2, 1, 0, 7}};
    uint64_t random = SEED + 20;
    float logits[N];
    for (size_t i = 0; i < N; i++) {
        logits[i] = 3 * random_normal(&random);
    }
    void *workspace = memory_alloc(sample_workspace(N));
    for (size_t i = 0; i < f->n * COUNT(params); i++) {
        Backend *be = f->machines[i / COUNT(params)].be[0];
        const SampleParams *p = &params[i % COUNT(params)];
        int id = -1;
        assert_int_equal(run_sample(be, &id, logits, N, p, NULL), OK);
        assert_int_equal(id, sample_token(logits, N, p, 5, workspace));
        for (size_t b = 0; b < 2 * COUNT(bad); b++) {
            Error err = {0};
            float *place = b % 2 ? &logits[N - 1] : &logits[0];
            const float good = *place;
            *place = bad[b / 2];
            assert_int_equal(run_sample(be, &id, logits, N, p, &err), ERR_NUMBER);
            assert_string_equal(err.text, "logits are not finite");
            *place = good;
        }
    }
    free(workspace);
}

/* The cause is named, not the logits that it spoiled. */
static void test_sample_reports_an_earlier_fault_first(void **state) {
    const Fixture *f = *state;
    const SampleParams greedy = {0, 1, 0, 0};
    const float logits[2] = {NAN, 1};
    const fp16 x[3] = {0, 0x7e00, 0};
    uint64_t random = SEED + 21;
    Weights w = make_weights(2, 3, HALF_NONZERO, draw_normal, &random);
    for (size_t i = 0; i < f->n; i++) {
        Backend *be = f->machines[i].be[0];
        Error err = {0};
        int id = -1;
        free(run_product(be, MATMUL, &w.as[DENSE], x, 1, NULL));
        assert_int_equal(run_sample(be, &id, logits, 2, &greedy, &err), ERR_NUMBER);
        assert_string_equal(err.text, "a number at the MLP hidden of layer 3 is not finite");
        assert_int_equal(be->finish(be, NULL), OK);
    }
    free_weights(&w);
}

/* ---- random weights ---- */

/* A matrix that the backend made, its arrays in host memory. */
static fp16 *take_random(Backend *be, const Matrix *w) {
    fp16 *dense = poisoned_alloc(w->rows * w->cols * sizeof *dense);
    if (w->format == FORMAT_DENSE) {
        fp16 *padded = poisoned_alloc(w->rows * w->stride * sizeof *padded);
        be->read(be, padded, w->dense, w->rows * w->stride * sizeof *padded);
        for (size_t i = 0; i < w->rows * w->stride; i++) {
            if (i % w->stride < w->cols) {
                dense[i / w->stride * w->cols + i % w->stride] = padded[i];
            } else {
                assert_int_equal(padded[i], 0);
            }
        }
        free(padded);
        return dense;
    }
    const size_t columns = tiled_cbc_tile_rows(w->rows) * tiled_cbc_cols_padded(w->cols);
    uint32_t *tile_offset = poisoned_alloc((columns / TILE_K + 1) * sizeof *tile_offset);
    uint32_t *col_info = poisoned_alloc(columns * sizeof *col_info);
    uint64_t *bitmap = poisoned_alloc(columns * BITMAP_WORDS * sizeof *bitmap);
    fp16 *values = poisoned_alloc(w->cbc.n_values * sizeof *values);
    be->read(be, tile_offset, w->cbc.tile_offset, (columns / TILE_K + 1) * sizeof *tile_offset);
    be->read(be, col_info, w->cbc.col_info, columns * sizeof *col_info);
    be->read(be, bitmap, w->cbc.bitmap, columns * BITMAP_WORDS * sizeof *bitmap);
    be->read(be, values, w->cbc.values, w->cbc.n_values * sizeof *values);
    TiledCbc cbc = w->cbc;
    cbc.tile_offset = tile_offset;
    cbc.col_info = col_info;
    cbc.bitmap = bitmap;
    cbc.values = values;
    TiledCbcStats stats;
    Error err;
    if (tiled_cbc_validate(&cbc, &stats, &err)) {
        fail_msg("%s", err.text);
    }
    assert_true(stats.max_col_values <= cbc.max_col_values);
    tiled_cbc_decode(dense, w->cols, &cbc);
    free(tile_offset);
    free(col_info);
    free(bitmap);
    free(values);
    return dense;
}

/* Every backend makes, in either format, the matrix that random_weights_row() describes. */
static void test_random_matrices_are_what_their_rows_say(void **state) {
    const Fixture *f = *state;
    static const size_t shapes[][2] = {{1, 1}, {257, 17}, {300, 77}, {512, 288}};
    static const double shares[] = {0, 0.5, 1};
    fp16 *table = poisoned_alloc(WEIGHT_VALUES * sizeof *table);
    random_weight_values(table);
    for (size_t i = 0; i < f->n * COUNT(shapes) * COUNT(shares) * N_FORMATS; i++) {
        Backend *be = f->machines[i % f->n].be[1];
        const size_t format = i / f->n % N_FORMATS, at = i / f->n / N_FORMATS;
        const size_t *shape = shapes[at % COUNT(shapes)];
        const RandomWeights here = {.seed = 5, .matrix = 3, .layer = 2, .values = table,
                                    .dropped = random_weights_dropped(shares[at / COUNT(shapes)])};
        RandomWeights there = here;
        there.values = give(be, table, WEIGHT_VALUES * sizeof *table);
        Matrix w = {.rows = shape[0], .cols = shape[1]};
        w.format = format == DENSE ? FORMAT_DENSE : FORMAT_TILED_CBC;
        size_t nnz = 0, counted = 0;
        assert_true(be->random_matrix(be, &w, &nnz, &there));
        fp16 *got = take_random(be, &w), *want = poisoned_alloc(w.cols * sizeof *want);
        for (size_t r = 0; r < w.rows; r++) {
            random_weights_row(want, &here, r, w.cols);
            assert_memory_equal(got + r * w.cols, want, w.cols * sizeof *want);
            for (size_t k = 0; k < w.cols; k++) {
                counted += !fp16_is_zero(want[k]);
            }
        }
        assert_int_equal(nnz, counted);
        free(got);
        free(want);
        be->release(be, (void *)(uintptr_t)there.values);
    }
    free(table);
}

/* ---- choice and memory ---- */

static void check_refused(const char *isa, const char *reason) {
    Backend *be = NULL;
    Error err = {0};
    assert_int_equal(backend_cpu(&be, 1, isa, &err), ERR_USAGE);
    assert_null(be);
    assert_non_null(strstr(err.text, isa));
    assert_non_null(strstr(err.text, reason));
    assert_int_equal(backend_cpu(&be, 1, isa, NULL), ERR_USAGE);
}

/* cases.md row 34. The sets are in order, best first, and each includes those behind it. */
static void test_an_instruction_set_runs_or_is_refused_by_name(void **state) {
    const Fixture *f = *state;
    if (is_cuda(&f->machines[0])) {
        skip();
    }
    check_refused("sse9", "unknown");
    check_refused("", "unknown");
    assert_string_equal(f->machines[f->n - 1].isa, "portable");
#ifdef __x86_64__
    for (size_t i = 0; i < COUNT(isas) - f->n; i++) {
        check_refused(isas[i], "does not run");
    }
#endif
    Backend *be;
    assert_int_equal(backend_cpu(&be, 0, NULL, NULL), OK);
    assert_string_equal(be->name, "cpu");
    assert_non_null(strstr(be->device, f->machines[0].isa));
    assert_true(be->max_tokens >= 1);
    be->free(be);
}

static void test_memory_is_zeroed_and_a_wish_beyond_reason_is_refused(void **state) {
    const Fixture *f = *state;
    enum { BYTES = 10007 };
    Backend *be = f->machines[0].be[0];
    unsigned char *host = poisoned_alloc(BYTES);
    for (int round = 0; round < 3; round++) {
        unsigned char *p = be->alloc(be, BYTES);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        be->read(be, host, p, BYTES);
        for (size_t i = 0; i < BYTES; i++) {
            assert_int_equal(host[i], 0);
        }
        poison(host, BYTES);
        be->write(be, p, host, BYTES);
        be->release(be, p);
    }
    assert_null(be->alloc(be, SIZE_MAX));
    assert_null(be->alloc(be, (size_t)1 << 60));
    const void *uploaded = be->upload(be, host, BYTES);
    assert_non_null(uploaded);
    unsigned char *back = memory_alloc(BYTES);
    be->read(be, back, uploaded, BYTES);
    assert_memory_equal(back, host, BYTES);
    free(back);
    free(host);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products_of_any_number_of_tokens),
        cmocka_unit_test(test_products_of_any_pattern),
        cmocka_unit_test(test_products_of_real_sizes),
        cmocka_unit_test(test_integer_products_are_exact),
        cmocka_unit_test(test_large_numbers_add_up_in_fp32),
        cmocka_unit_test(test_products_of_large_activations),
        cmocka_unit_test(test_inputs_up_to_the_threshold_count_as_zero_for_tiled_cbc_only),
        cmocka_unit_test(test_an_input_right_on_the_threshold_is_dropped),
        cmocka_unit_test(test_products_do_not_depend_on_threads_or_on_what_ran_before),
        cmocka_unit_test(test_an_input_that_is_not_finite_is_reported_once_with_layer_and_site),
        cmocka_unit_test(test_a_threshold_does_not_hide_an_input_that_is_not_finite),
        cmocka_unit_test(test_sums_that_are_not_numbers_arrive),
        cmocka_unit_test(test_the_first_of_several_faults_is_reported),
        cmocka_unit_test(test_counters_of_a_case_worked_out_by_hand),
        cmocka_unit_test(test_embed_copies_rows_exactly),
        cmocka_unit_test(test_row_18_the_last_row_of_a_huge_embedding_is_found),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_attention_appends_to_the_cache),
        cmocka_unit_test(test_attention_at_any_position),
        cmocka_unit_test(test_attention_with_any_heads),
        cmocka_unit_test(test_attention_with_an_exact_answer),
        cmocka_unit_test(test_attention_does_not_depend_on_threads_or_on_what_ran_before),
        cmocka_unit_test(test_sample_takes_sample_token_s_choice_and_refuses_what_is_not_finite),
        cmocka_unit_test(test_sample_reports_an_earlier_fault_first),
        cmocka_unit_test(test_random_matrices_are_what_their_rows_say),
        cmocka_unit_test(test_an_instruction_set_runs_or_is_refused_by_name),
        cmocka_unit_test(test_memory_is_zeroed_and_a_wish_beyond_reason_is_refused),
    };
    return cmocka_run_group_tests(tests, open_backends, close_backends);
}
