/* json.h: what passes, what is refused and where. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "../model/json.h"

/* A copy of exactly this size, so that a sanitizer sees a read behind the end. */
static cJSON *parse(const char *text, size_t bytes, int flags, Error *err) {
    char *copy = malloc(bytes ? bytes : 1);
    memcpy(copy, text, bytes);
    cJSON *json = json_parse(copy, bytes, flags, err);
    free(copy);
    return json;
}

static cJSON *accept(const char *text) {
    Error err = {0};
    cJSON *json = parse(text, strlen(text), 0, &err);
    if (!json) {
        fail_msg("refused %s: %s", text, err.text);
    }
    return json;
}

static void accept_all(const char *const *texts, size_t n) {
    for (size_t i = 0; i < n; i++) {
        cJSON_Delete(accept(texts[i]));
    }
}

/* Refused with a single line that contains reason. */
static void refuse_bytes(const char *text, size_t bytes, int flags, const char *reason) {
    Error err = {0};
    cJSON *json = parse(text, bytes, flags, &err);
    if (json) {
        fail_msg("accepted: %.60s", text);
    }
    assert_int_equal(err.code, ERR_FORMAT);
    if (!strstr(err.text, reason) || strchr(err.text, '\n')) {
        fail_msg("%.60s: '%s' does not say '%s'", text, err.text, reason);
    }
    assert_null(parse(text, bytes, flags, NULL));
}

static void refuse(const char *text, const char *reason) {
    refuse_bytes(text, strlen(text), 0, reason);
}

static void valid_values_of_every_kind_are_read(void **state) {
    (void)state;
    static const char *const texts[] = {
        "{}",
        "[]",
        " [ ] ",
        "\t\r\n{ \"a\" : 1 , \"b\" : [ true , false , null ] } \n",
        "\"\"",
        "0",
        "-0",
        "1.5e-3",
        "12E+2",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u00e9\\ud83e\\udd99\"",
        "\"\x7f\xc3\xb6\xf0\x9f\xa6\x99\"",
        "true",
    };
    accept_all(texts, sizeof texts / sizeof *texts);
    cJSON *json = accept("{\"s\":\"a\\u00e9\\ud83e\\udd99\",\"n\":-12.5,\"l\":[1,{\"x\":2}]}");
    assert_string_equal(json_get(json, "s")->valuestring, "a\xc3\xa9\xf0\x9f\xa6\x99");
    assert_true(json_get(json, "n")->valuedouble == -12.5);
    assert_int_equal(cJSON_GetArraySize(json_get(json, "l")), 2);
    cJSON_Delete(json);
}

static void grammar_errors_are_refused_with_their_byte(void **state) {
    (void)state;
    static const struct {
        const char *text, *reason;
    } cases[] = {
        {"", "byte 0"},
        {"   ", "byte 3"},
        {"{", "byte 1"},
        {"[1", "byte 2"},
        {"[1,]", "byte 3"},
        {"[,1]", "byte 1"},
        {"{\"a\":1,}", "byte 7"},
        {"{\"a\"}", "byte 4"},
        {"{a:1}", "byte 1"},
        {"{\"a\" 1}", "byte 5"},
        {"{\"a\":}", "byte 5"},
        {"[1 2]", "byte 3"},
        {"[1}", "byte 2"},
        {"{\"a\":1]", "byte 6"},
        {"{} {}", "byte 3"},
        {"{}x", "byte 2"},
        {"01", "byte 1"},
        {"+1", "byte 0"},
        {".5", "byte 0"},
        {"1.", "byte 2"},
        {"-", "byte 1"},
        {"--1", "byte 1"},
        {"1e", "byte 2"},
        {"1e+", "byte 3"},
        {"0x10", "byte 1"},
        {"NaN", "byte 0"},
        {"-Infinity", "byte 1"},
        {"tru", "byte 0"},
        {"truex", "byte 4"},
        {"nul", "byte 0"},
        {"'a'", "byte 0"},
        {"\"abc", "byte 4"},
        {"\"\\", "byte 2"},
        {"\"\\x\"", "byte 2"},
        {"\"\\u12g4\"", "byte 5"},
        {"\"\\u12", "byte 5"},
        {"\"a\nb\"", "byte 2"},
        {"// c\n1", "byte 0"},
        {"\xef\xbb\xbf{}", "byte 0"},
        {"\"\\ud83e\"", "surrogate"},
        {"\"\\udd99\"", "surrogate"},
        {"\"\\ud83e\\u0041\"", "surrogate"},
        {"\"\\ud83e\\n\"", "surrogate"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        refuse(cases[i].text, cases[i].reason);
    }
}

static void every_prefix_of_a_value_is_refused(void **state) {
    (void)state;
    const char *text = "{\"a\":[1.5e3,\"x\\u00e9\\ud83e\\udd99\",{\"b\":null}],\"c\":true}";
    cJSON_Delete(accept(text));
    for (size_t n = 0; n < strlen(text); n++) {
        refuse_bytes(text, n, 0, "at byte");
    }
}

static void nul_is_refused_raw_and_escaped(void **state) {
    (void)state;
    refuse_bytes("{}\0", 3, 0, "byte 2");
    refuse_bytes("\"a\0b\"", 5, 0, "byte 2");
    refuse_bytes("\0", 1, 0, "byte 0");
    refuse("{\"a\\u0000b\":1}", "NUL");
}

static void invalid_utf8_is_refused_with_its_byte(void **state) {
    (void)state;
    refuse("\"a\xff\"", "UTF-8 at byte 2");
    refuse("\"\xed\xa0\x80\"", "UTF-8 at byte 1");
    refuse("\"\xc0\x80\"", "UTF-8 at byte 1");
    refuse("\"\xc3", "UTF-8 at byte 1");
}

static void the_same_key_twice_in_one_object_is_refused(void **state) {
    (void)state;
    refuse("{\"a\":1,\"b\":2,\"a\":3}", "\"a\" again at byte 13");
    refuse("[0,{\"x\":{\"k\":1,\"k\":1}}]", "\"k\" again at byte 15");
    refuse("{\"a\":1,\"\\u0061\":2}", "\"a\" again at byte 7");
    refuse("{\"\":1,\"\":2}", "again at byte 6");
    static const char *const texts[] = {
        "{\"a\":{\"a\":1},\"b\":{\"a\":2}}",
        "[{\"a\":1},{\"a\":1}]",
        "{\"a\":1,\"A\":2}",
        "{\"a\":\"a\",\"b\":[\"a\",\"a\"]}",
    };
    accept_all(texts, sizeof texts / sizeof *texts);
}

/* depth brackets around nothing */
static char *nested(size_t depth, const char *open, const char *close) {
    char *text = calloc(depth * (strlen(open) + strlen(close)) + 2, 1);
    char *at = text;
    for (size_t i = 0; i < depth; i++) {
        at = stpcpy(at, open);
    }
    at = stpcpy(at, "1");
    for (size_t i = 0; i < depth; i++) {
        at = stpcpy(at, close);
    }
    return text;
}

static void nesting_stops_at_64(void **state) {
    (void)state;
    const size_t depths[] = {64, 65, 10000, 1000000};
    for (int object = 0; object < 2; object++) {
        for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
            char *text = nested(depths[i], object ? "{\"a\":" : "[", object ? "}" : "]");
            if (depths[i] <= 64) {
                cJSON_Delete(accept(text));
            } else {
                refuse(text, "deep");
            }
            free(text);
        }
    }
    cJSON_Delete(accept("[[[1]],[[2]],[[3]]]"));  // depth counts what is open, not what was
}

static void many_siblings_do_not_count_as_depth(void **state) {
    (void)state;
    char text[1024] = "[";
    for (int i = 0; i < 200; i++) {
        strcat(text, i ? ",[]" : "[]");
    }
    strcat(text, "]");
    cJSON_Delete(accept(text));
}

static void many_keys_are_checked_in_good_time(void **state) {
    (void)state;
    const size_t n = 200000;
    char *text = malloc(n * 16 + 32);
    char *at = stpcpy(text, "{");
    for (size_t i = 0; i < n; i++) {
        at += sprintf(at, "\"k%zu\":1,", i);
    }
    strcpy(at, "\"x\":1}");
    const double start = time_ms();
    cJSON_Delete(accept(text));
    assert_true(time_ms() - start < 10000);  // the square of n would take minutes
    strcpy(at, "\"k77\":1}");
    refuse(text, "\"k77\" again");
    free(text);
}

static void integers_flag_refuses_fractions_and_exponents(void **state) {
    (void)state;
    refuse_bytes("[1e3]", 5, JSON_INTEGERS, "integer at byte 2");
    refuse_bytes("[1.0]", 5, JSON_INTEGERS, "integer at byte 2");
    refuse_bytes("{\"a\":2E1}", 9, JSON_INTEGERS, "integer at byte 6");
    Error err;
    cJSON *json = parse("[-1,0,12,\"1e3\"]", 15, JSON_INTEGERS, &err);
    assert_non_null(json);
    cJSON_Delete(json);
}

static void overlong_numbers_are_refused(void **state) {
    (void)state;
    char text[200];
    memset(text, '1', sizeof text);
    refuse_bytes(text, sizeof text, 0, "long");
    cJSON *json = parse(text, 60, 0, NULL);
    assert_non_null(json);
    cJSON_Delete(json);
}

static void get_finds_exact_names_and_hides_null(void **state) {
    (void)state;
    cJSON *json = accept("{\"Key\":1,\"key\":2,\"none\":null,\"list\":[1]}");
    assert_true(json_get(json, "key")->valuedouble == 2);
    assert_true(json_get(json, "Key")->valuedouble == 1);
    assert_null(json_get(json, "KEY"));
    assert_null(json_get(json, "none"));
    assert_null(json_get(json_get(json, "list"), "key"));
    assert_null(json_get(NULL, "key"));
    cJSON_Delete(json);
}

static void u64_takes_integers_to_2_53_only(void **state) {
    (void)state;
    cJSON *json = accept(
        "[0, 1, 4294967296, 9007199254740992,"
        "-1, 0.5, 1e300, 9007199254740994, \"1\", true, null]");
    const uint64_t good[] = {0, 1, 4294967296u, 9007199254740992u};
    for (int i = 0; i < cJSON_GetArraySize(json); i++) {
        uint64_t value = 77;
        const bool ok = json_u64(cJSON_GetArrayItem(json, i), &value);
        assert_int_equal(ok, i < 4);
        assert_true(value == (i < 4 ? good[i] : 77));
    }
    uint64_t value = 77;
    assert_false(json_u64(NULL, &value));
    assert_true(value == 77);
    cJSON_Delete(json);
}

/* Mutations of a valid text must never crash, and cJSON must agree with whatever is let through. */
static void random_damage_is_survived(void **state) {
    (void)state;
    const char *valid = "{\"a\":[1,-2.5e3,\"x\\u00e9\"],\"b\":{\"c\":null,\"d\":true}}";
    const size_t n = strlen(valid);
    uint32_t random = 1;
    int accepted = 0;
    for (int round = 0; round < 20000; round++) {
        char text[128];
        memcpy(text, valid, n);
        for (int i = 0; i < 1 + round % 3; i++) {
            random = random * 1664525u + 1013904223u;
            text[(random >> 8) % n] = "{}[]\",:0e.-\\ \xff\0ab"[(random >> 24) % 18];
        }
        cJSON *json = parse(text, n, round % 2 ? JSON_INTEGERS : 0, NULL);
        accepted += json != NULL;
        cJSON_Delete(json);
    }
    assert_in_range(accepted, 1, 10000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(valid_values_of_every_kind_are_read),
        cmocka_unit_test(grammar_errors_are_refused_with_their_byte),
        cmocka_unit_test(every_prefix_of_a_value_is_refused),
        cmocka_unit_test(nul_is_refused_raw_and_escaped),
        cmocka_unit_test(invalid_utf8_is_refused_with_its_byte),
        cmocka_unit_test(the_same_key_twice_in_one_object_is_refused),
        cmocka_unit_test(nesting_stops_at_64),
        cmocka_unit_test(many_siblings_do_not_count_as_depth),
        cmocka_unit_test(many_keys_are_checked_in_good_time),
        cmocka_unit_test(integers_flag_refuses_fractions_and_exponents),
        cmocka_unit_test(overlong_numbers_are_refused),
        cmocka_unit_test(get_finds_exact_names_and_hides_null),
        cmocka_unit_test(u64_takes_integers_to_2_53_only),
        cmocka_unit_test(random_damage_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
