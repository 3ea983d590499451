/* test_damping.c: what a conversion says when SparseGPT's factorisation needs more damping, and when it gives
 * up. Real inputs hardly ever come to that, so that export/sparsegpt.c is replaced here (test_static.c tests
 * it). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../export/pack.h"
#include "../export/sparsegpt.h"

#define SHAPE "32:40:2:4:2:60:64"
#define NOTE "the Hessian needed a damping of 10 instead of 0.01\n"

/* ---- in the place of export/sparsegpt.c ---- */

/* Factorisations and prunings are counted; those with this number go as told. */
static struct {
    int n_factors, damped, hopeless;
    int n_pruned, too_large;
} plan;

int sparsegpt_factor(double *products, bool *dead, double *damping, size_t n, size_t n_tokens, int n_threads,
                     Error *err) {
    (void)products, (void)n_tokens, (void)n_threads;
    memset(dead, 0, n * sizeof *dead);
    plan.n_factors++;
    *damping = plan.n_factors == plan.damped ? 10 : SPARSEGPT_DAMPING;
    return plan.n_factors == plan.hopeless ? error_set(err, ERR_NUMBER, "no factor") : OK;
}

int sparsegpt_prune(size_t *zeros, fp16 *w, size_t rows, size_t cols, size_t stride, const double *factor,
                    const bool *dead, double ratio, int n_threads, Error *err) {
    (void)w, (void)rows, (void)cols, (void)stride, (void)factor, (void)dead, (void)ratio, (void)n_threads;
    *zeros = 0;
    plan.n_pruned++;
    return plan.n_pruned == plan.too_large ? error_set(err, ERR_NUMBER, "too large for fp16") : OK;
}

/* ---- a conversion ---- */

static char path[400];
static char said[4000];  // what the conversion wrote to stderr

static void remove_files(void) {
    static const char *const suffixes[] = {"", ".partial", ".state"};
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        char name[420];
        snprintf(name, sizeof name, "%s%s", path, suffixes[i]);
        unlink(name);
    }
}

static int convert(bool quiet, Error *err) {
    Source *source;
    Backend *be;
    CalibText text;
    Writer *w;
    PackReport report;
    const CalibParams params = {.max_tokens = 1000, .length = 50, .quiet = true};
    assert_int_equal(source_open_synthetic(&source, SHAPE, 1, err), OK);
    assert_int_equal(backend_open(&be, "cpu", 0, true, 1, NULL, NULL, err), OK);
    assert_int_equal(calib_text_random(&text, &source->config, &params, 2, err), OK);
    const PackOptions options = {
        .method = METHOD_SPARSEGPT,
        .sp = {0.5, 0.5},
        .prune_attn = true,
        .source_name = "test",
        .n_threads = 1,
        .quiet = quiet,
        .be = be,
        .sp_text = &text,
        .dp_text = &text,
    };
    assert_int_equal(writer_open(&w, path, &source->config, true, err), OK);
    const int rc = pack_model(&report, source, w, &options, err);
    calib_text_free(&text);
    be->free(be);
    source->free(source);
    return rc;
}

/* The same, with stderr in said. */
static int convert_and_listen(bool quiet, Error *err) {
    FILE *heard = tmpfile();
    const int stderr_before = dup(STDERR_FILENO);
    assert_non_null(heard);
    assert_true(stderr_before >= 0);
    fflush(stderr);
    assert_true(dup2(fileno(heard), STDERR_FILENO) >= 0);
    const int rc = convert(quiet, err);
    fflush(stderr);
    assert_true(dup2(stderr_before, STDERR_FILENO) >= 0);
    close(stderr_before);
    rewind(heard);
    said[fread(said, 1, sizeof said - 1, heard)] = 0;
    fclose(heard);
    return rc;
}

static void assert_says(const char *text, const char *wanted) {
    if (!strstr(text, wanted)) {
        fail_msg("\"%s\" does not say \"%s\"", text, wanted);
    }
}

/* ---- tests ---- */

/* cases.md row 23: one line names the matrix and the damping, and the conversion goes on. */
static void more_damping_is_said_with_the_matrix(void **state) {
    (void)state;
    Error err = {0};
    memset(&plan, 0, sizeof plan);
    plan.damped = 6;  // q|k|v, o, gate|up and down of layer 0 come first
    assert_int_equal(convert_and_listen(false, &err), OK);
    assert_int_equal(plan.n_factors, 8);
    assert_says(said, "note       layers.1.o: " NOTE);
    assert_null(strstr(strstr(said, NOTE) + 1, NOTE));
    assert_int_equal(access(path, F_OK), 0);

    plan.n_factors = 0;
    assert_int_equal(convert_and_listen(true, &err), OK);
    assert_string_equal(said, "");
}

/* cases.md row 23: where no damping helps, and where a weight does not fit, the layer is named and no file
 * left. */
static void giving_up_names_the_layer_and_leaves_no_file(void **state) {
    (void)state;
    Error err = {0};
    memset(&plan, 0, sizeof plan);
    remove_files();
    plan.hopeless = 3;
    assert_int_equal(convert(true, &err), ERR_NUMBER);
    assert_says(err.text, "layers.0.gate_up: no factor");
    assert_int_not_equal(access(path, F_OK), 0);

    memset(&plan, 0, sizeof plan);
    plan.too_large = 2;
    assert_int_equal(convert(true, &err), ERR_NUMBER);
    assert_says(err.text, "layers.0.qkv: k: too large for fp16");
    assert_int_not_equal(access(path, F_OK), 0);
}

static int set_up(void **state) {
    (void)state;
    snprintf(path, sizeof path, "%s/test_damping.%ld.bin", getenv("BUILD") ? getenv("BUILD") : "build",
             (long)getpid());
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    remove_files();
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(more_damping_is_said_with_the_matrix),
        cmocka_unit_test(giving_up_names_the_layer_and_leaves_no_file),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
