/* test_calib_text.c: calibration texts of every kind become sequences of token ids. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>
#include <unistd.h>

#include "../export/calib_text.h"
#include "../model/input.h"

enum { BOS = 1, VOCAB = 4096 };

static const Config config = {.seq_len = 512, .vocab_size = VOCAB, .bos_id = BOS};
static const char sentence[] = "The old man went down to the sea, and there was nobody. ";

static Tokenizer *demo_tokenizer(void) {
    Bytes model;
    Tokenizer *t;
    Error err = {0};
    char reason[200];
    assert_int_equal(input_read_file(&model, "demo/tokenizer.model", &err), OK);
    assert_true(tokenizer_load(&t, model.data, model.n, reason, sizeof reason));
    free(model.data);
    return t;
}

/* A scratch file of that ending with n bytes; its path until the next call. */
static const char *scratch_file(const char *ending, const void *bytes, size_t n) {
    static char path[400];
    snprintf(path, sizeof path, "%s/test_calib_text.%ld%s", getenv("BUILD") ? getenv("BUILD") : "build", (long)getpid(), ending);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
    return path;
}

/* Load bytes as a file of that ending, which is removed. */
static int load(CalibText *text, const char *ending, const void *bytes, size_t n, CalibParams params, Error *err) {
    Tokenizer *t = demo_tokenizer();
    const char *path = scratch_file(ending, bytes, n);
    params.quiet = true;
    memset(text, 0xff, sizeof *text);
    const int rc = calib_text_load(text, path, t, &config, &params, err);
    unlink(path);
    tokenizer_free(t);
    return rc;
}

static char *repeat(const char *part, size_t times) {
    char *text = malloc(strlen(part) * times + 1);
    assert_non_null(text);
    *text = 0;
    for (size_t i = 0; i < times; i++) {
        strcpy(text + i * strlen(part), part);
    }
    return text;
}

static void expect_bos_in_front(const CalibText *text) {
    for (size_t i = 0; i < text->n; i += text->length) {
        assert_int_equal(text->ids[i], BOS);
        assert_true(i + 1 == text->n || text->ids[i + 1] != BOS);
    }
}

static void plain_text_is_cut_into_sequences_behind_bos(void **state) {
    (void)state;
    CalibText text;
    Error err = {0};
    char *bytes = repeat(sentence, 200);
    Tokenizer *t = demo_tokenizer();
    int *ids;
    size_t n;
    char reason[200];
    assert_true(tokenizer_encode(t, bytes, strlen(bytes), &ids, &n, reason, sizeof reason));
    assert_int_equal(load(&text, ".txt", bytes, strlen(bytes), (CalibParams){.length = 100}, &err), OK);
    assert_int_equal(text.length, 100);
    expect_bos_in_front(&text);
    size_t at = 0;  // without the BOS of each sequence it is what the tokenizer says
    for (size_t i = 0; i < text.n; i++) {
        if (i % 100 != 0) {
            assert_int_equal(text.ids[i], ids[at]);
            at++;
        }
    }
    assert_int_equal(at, n);
    assert_int_equal(calib_text_sequences(&text), (text.n + 99) / 100);
    free(ids);
    free(bytes);
    tokenizer_free(t);
    calib_text_free(&text);
}

static void no_more_tokens_are_taken_than_asked_for(void **state) {
    (void)state;
    CalibText text;
    Error err = {0};
    char *bytes = repeat(sentence, 300);
    assert_int_equal(load(&text, ".txt", bytes, strlen(bytes), (CalibParams){.max_tokens = 1234, .length = 100}, &err), OK);
    assert_int_equal(text.n, 1234);
    calib_text_free(&text);
    assert_int_equal(load(&text, ".txt", bytes, strlen(bytes), (CalibParams){.max_tokens = SIZE_MAX / 2}, &err), OK);
    assert_in_range(text.n, 3000, 6000);
    assert_int_equal(text.length, 512);
    calib_text_free(&text);
    free(bytes);
}

/* cases.md row 24: documents too short for a sequence are joined. */
static void documents_of_json_lines_begin_with_bos(void **state) {
    (void)state;
    CalibText text;
    Error err = {0};
    char line[300];
    snprintf(line, sizeof line, "{\"text\": \"%s\\u00e9\", \"url\": null}\n\n", sentence);
    char *bytes = repeat(line, 100);
    assert_int_equal(load(&text, ".jsonl", bytes, strlen(bytes), (CalibParams){0}, &err), OK);
    size_t n_bos = 0;
    for (size_t i = 0; i < text.n; i++) {
        n_bos += text.ids[i] == BOS;
    }
    assert_in_range(n_bos, 100, 100 + calib_text_sequences(&text));
    free(bytes);
    calib_text_free(&text);
}

static void expect_refusal(int code, const char *reason, const char *ending, const void *bytes, size_t n,
                           CalibParams params) {
    CalibText text;
    Error err = {0};
    assert_int_equal(load(&text, ending, bytes, n, params, &err), code);
    if (!strstr(err.text, reason)) {
        fail_msg("\"%s\" does not say \"%s\"", err.text, reason);
    }
}

static void wrong_json_lines_are_named(void **state) {
    (void)state;
    static const char *const wrong[] = {"{\"text\": 5}", "{\"txt\": \"a\"}", "[\"a\"]", "\"a\"", "{\"text\": \"a\"",
                                        "{\"text\": \"a\"} x", "{\"text\": \"a\", \"text\": \"b\"}", "text"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char bytes[200];
        snprintf(bytes, sizeof bytes, "{\"text\": \"good\"}\n%s\n", wrong[i]);
        expect_refusal(ERR_FORMAT, "line 2", ".jsonl", bytes, strlen(bytes), (CalibParams){0});
    }
}

static void token_ids_are_taken_as_they_are(void **state) {
    (void)state;
    CalibText text;
    Error err = {0};
    uint16_t ids[1500];
    for (size_t i = 0; i < 1500; i++) {
        ids[i] = (uint16_t)(i % 500 == 0 ? BOS : 5 + i % 4000);
    }
    assert_int_equal(load(&text, ".tok", ids, sizeof ids, (CalibParams){.length = 500}, &err), OK);
    assert_int_equal(text.n, 1500);  // every sequence had its BOS already
    for (size_t i = 0; i < 1500; i++) {
        assert_int_equal(text.ids[i], ids[i]);
    }
    calib_text_free(&text);
    const char *path = scratch_file(".tok", ids, sizeof ids);  // needs no tokenizer
    assert_int_equal(calib_text_load(&text, path, NULL, &config, &(CalibParams){.quiet = true}, &err), OK);
    unlink(path);
    calib_text_free(&text);
    expect_refusal(ERR_FORMAT, "whole number", ".tok", ids, sizeof ids - 1, (CalibParams){0});
    ids[7] = VOCAB;
    expect_refusal(ERR_FORMAT, "position 7", ".tok", ids, sizeof ids, (CalibParams){0});
}

/* cases.md row 24: an empty file, a few words, a missing file. */
static void too_little_text_is_refused_with_the_minimum(void **state) {
    (void)state;
    char *bytes = repeat(sentence, 300);
    expect_refusal(ERR_USAGE, "1000", ".txt", "", 0, (CalibParams){0});
    expect_refusal(ERR_USAGE, ".txt are too few", ".txt", sentence, strlen(sentence), (CalibParams){0});
    expect_refusal(ERR_USAGE, "1000", ".jsonl", "\n\n", 2, (CalibParams){0});
    expect_refusal(ERR_USAGE, "1000", ".tok", "", 0, (CalibParams){0});
    expect_refusal(ERR_USAGE, "999 tokens", ".txt", bytes, strlen(bytes), (CalibParams){.max_tokens = 999});
    expect_refusal(ERR_USAGE, "513", ".txt", bytes, strlen(bytes), (CalibParams){.length = 513});
    expect_refusal(ERR_USAGE, "1 tokens", ".txt", bytes, strlen(bytes), (CalibParams){.length = 1});
    free(bytes);
    CalibText text;
    Error err = {0};
    Tokenizer *t = demo_tokenizer();
    assert_int_equal(calib_text_load(&text, "tests/none.txt", t, &config, &(CalibParams){0}, &err), ERR_OPEN);
    assert_non_null(strstr(err.text, "tests/none.txt"));
    assert_int_equal(calib_text_load(&text, "tests", t, &config, &(CalibParams){0}, &err), ERR_OPEN);
    tokenizer_free(t);
}

/* cases.md row 24: calibration needs no file at all. */
static void the_shipped_text_needs_no_path(void **state) {
    (void)state;
    CalibText text;
    Error err = {0};
    Tokenizer *t = demo_tokenizer();
    size_t n;
    const char *shipped = calibration_text(&n);
    Bytes file;
    assert_int_equal(input_read_file(&file, "export/calibration.txt", &err), OK);
    assert_int_equal(n, file.n);
    assert_memory_equal(shipped, file.data, n);
    assert_int_equal(calib_text_load(&text, NULL, t, &config, &(CalibParams){0}, &err), OK);
    assert_int_equal(text.n, CALIB_DEFAULT_SEQUENCES * 512);
    expect_bos_in_front(&text);
    calib_text_free(&text);
    assert_int_equal(calib_text_load(&text, NULL, NULL, &config, &(CalibParams){0}, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, ".tok"));
    free(file.data);
    tokenizer_free(t);
}

static void random_ids_fill_what_is_asked_for(void **state) {
    (void)state;
    CalibText a, b;
    Error err = {0};
    const CalibParams params = {.max_tokens = 2000, .length = 64};
    assert_int_equal(calib_text_random(&a, &config, &params, 5, &err), OK);
    assert_int_equal(calib_text_random(&b, &config, &params, 5, &err), OK);
    assert_int_equal(a.n, 2000);
    assert_memory_equal(a.ids, b.ids, a.n * sizeof *a.ids);
    int most = 0;
    for (size_t i = 0; i < a.n; i++) {
        assert_in_range(a.ids[i], 0, VOCAB - 1);
        most = a.ids[i] > most ? a.ids[i] : most;
    }
    assert_true(most > VOCAB * 9 / 10);
    expect_bos_in_front(&a);
    calib_text_free(&a);
    calib_text_free(&b);
}

static void a_model_without_bos_gets_none(void **state) {
    (void)state;
    CalibText text;
    Error err = {0};
    Config without = config;
    without.bos_id = -1;
    Tokenizer *t = demo_tokenizer();
    assert_int_equal(calib_text_load(&text, NULL, t, &without, &(CalibParams){.max_tokens = 1000, .length = 50}, &err), OK);
    for (size_t i = 0; i < text.n; i++) {
        assert_int_not_equal(text.ids[i], BOS);
    }
    calib_text_free(&text);
    tokenizer_free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_text_is_cut_into_sequences_behind_bos),
        cmocka_unit_test(no_more_tokens_are_taken_than_asked_for),
        cmocka_unit_test(documents_of_json_lines_begin_with_bos),
        cmocka_unit_test(wrong_json_lines_are_named),
        cmocka_unit_test(token_ids_are_taken_as_they_are),
        cmocka_unit_test(too_little_text_is_refused_with_the_minimum),
        cmocka_unit_test(the_shipped_text_needs_no_path),
        cmocka_unit_test(random_ids_fill_what_is_asked_for),
        cmocka_unit_test(a_model_without_bos_gets_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
