/* safetensors.h: hostile headers, and the few that must pass: cases.md row 14, whose appendix B has H0 .. H12. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "../export/safetensors.h"

#define H0_JSON "{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}"

/* The bytes of a file, allocated to exactly its size. */
typedef struct {
    unsigned char *bytes;
    size_t n;
} File;

static File make_file(uint64_t length, const char *json, size_t data_bytes) {
    const size_t n_json = strlen(json);
    File f = {.n = 8 + n_json + data_bytes};
    f.bytes = malloc(f.n);
    memcpy(f.bytes, &length, 8);
    memcpy(f.bytes + 8, json, n_json);
    memset(f.bytes + 8 + n_json, 0x11, data_bytes);
    return f;
}

static File file_of(const char *json, size_t data_bytes) {
    return make_file(strlen(json), json, data_bytes);
}

/* Refused with reason, and nothing written to the result. */
static void refuse_file(File f, const char *reason) {
    Safetensors st, poison;
    memset(&st, 0xa5, sizeof st);
    memset(&poison, 0xa5, sizeof poison);
    Error err = {0};
    assert_int_equal(safetensors_parse(&st, f.bytes, f.n, &err), ERR_FORMAT);
    assert_int_equal(err.code, ERR_FORMAT);
    if (!strstr(err.text, reason)) {
        fail_msg("'%s' does not say '%s'", err.text, reason);
    }
    assert_memory_equal(&st, &poison, sizeof st);
    assert_int_equal(safetensors_parse(&st, f.bytes, f.n, NULL), ERR_FORMAT);
    free(f.bytes);
}

static void refuse(const char *json, size_t data_bytes, const char *reason) {
    refuse_file(file_of(json, data_bytes), reason);
}

static Safetensors accept(const File *f) {
    Safetensors st;
    Error err = {0};
    if (safetensors_parse(&st, f->bytes, f->n, &err)) {
        fail_msg("refused: %s", err.text);
    }
    return st;
}

static const SafetensorsEntry *entry(const Safetensors *st, const char *name) {
    for (size_t i = 0; i < st->n_entries; i++) {
        if (strcmp(st->entries[i].name, name) == 0) {
            return &st->entries[i];
        }
    }
    fail_msg("no entry %s", name);
    return NULL;
}

/* cases.md row 14, H0. */
static void the_smallest_valid_file_is_read(void **state) {
    (void)state;
    assert_int_equal(strlen(H0_JSON), 54);
    File f = file_of(H0_JSON, 8);
    Safetensors st = accept(&f);
    assert_int_equal(st.n_entries, 1);
    const SafetensorsEntry *e = entry(&st, "a");
    assert_int_equal(e->dtype, DTYPE_F32);
    assert_string_equal(e->dtype_name, "F32");
    assert_int_equal(e->rank, 1);
    assert_int_equal(e->shape[0], 2);
    assert_int_equal(e->begin, 0);
    assert_int_equal(e->end, 8);
    assert_ptr_equal(st.data, f.bytes + 62);
    assert_int_equal(st.data_bytes, 8);
    safetensors_free(&st);
    free(f.bytes);
}

/* cases.md row 14, H1 and every other cut. */
static void every_truncated_file_is_refused(void **state) {
    (void)state;
    for (size_t n = 0; n < 70; n++) {
        File f = file_of(H0_JSON, 8);
        f.bytes = realloc(f.bytes, n ? n : 1);
        f.n = n;
        refuse_file(f, n < 8 ? "too few" : n < 62 ? "longer than the file" : "truncated");
    }
}

/* cases.md row 14, H2, H3, H4. */
static void wrong_header_lengths_are_refused(void **state) {
    (void)state;
    refuse_file(make_file(UINT64_MAX, H0_JSON, 8), "limit");
    assert_int_equal(SAFETENSORS_MAX_HEADER + 1, 100000001);
    refuse_file(make_file(SAFETENSORS_MAX_HEADER + 1, H0_JSON, 8), "limit");
    refuse_file(make_file(SAFETENSORS_MAX_HEADER, H0_JSON, 8), "longer than the file");
    refuse_file(make_file(55, H0_JSON, 8), "JSON");
    refuse_file(make_file(53, H0_JSON, 9), "JSON");
    refuse_file(make_file(0, H0_JSON, 8), "'{'");
}

/* cases.md row 14, H5. */
static void headers_that_are_no_json_object_are_refused(void **state) {
    (void)state;
    refuse("[1]", 0, "'{'");
    refuse(" {}", 0, "'{'");
    refuse("{\"a\":", 0, "JSON");
    refuse("{\"\xff\":1}", 0, "UTF-8");
    refuse("{\"a\":1}", 0, "dtype");
    refuse("{\"a\":[]}", 0, "dtype");
    char deep[20010] = "{\"a\":";
    memset(deep + 5, '[', 10000);
    memset(deep + 10005, ']', 10000);
    refuse(deep, 0, "deep");
}

static void entries_with_missing_or_misshapen_fields_are_refused(void **state) {
    (void)state;
    refuse("{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype");
    refuse("{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "dtype");
    refuse("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, "shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", 8, "shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, "shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}", 8, "shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "data_offsets");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", 8, "data_offsets");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4,8]}}", 8, "data_offsets");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":8}}", 8, "data_offsets");
}

/* cases.md row 14, H6. */
static void sizes_that_do_not_match_the_shape_are_refused(void **state) {
    (void)state;
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,8]}}", 8, "tensor a: 8 bytes");
    refuse("{\"a\":{\"dtype\":\"F16\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "shape");
    refuse("{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "shape");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,8]}}", 8, "shape");
    // 2^32 * 2^32 * 4 is 0 in 64 bits
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
           "large");
}

/* cases.md row 14, H8. */
static void offsets_outside_the_data_are_refused(void **state) {
    (void)state;
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", 8, "outside");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", 8, "outside");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[-8,0]}}", 8, "data_offsets");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[250],\"data_offsets\":[0,1e3]}}", 1000, "integer");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8.0]}}", 8, "integer");
    refuse("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,18446744073709551615]}}", 8,
           "data_offsets");
}

#define TWO(a, b)                                                 \
    "{\"x\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":" a \
    "},"                                                          \
    "\"y\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":" b "}}"

static void overlapping_ranges_are_refused(void **state) {
    (void)state;
    refuse(TWO("[0,8]", "[4,12]"), 12, "tensor y");
    refuse(TWO("[4,12]", "[0,8]"), 12, "tensor x");
    refuse(TWO("[0,8]", "[0,8]"), 8, "inside");
    File f = file_of(TWO("[8,16]", "[0,8]"), 16);
    Safetensors st = accept(&f);
    assert_int_equal(entry(&st, "x")->begin, 8);
    safetensors_free(&st);
    free(f.bytes);
}

static void holes_and_surplus_bytes_are_refused(void **state) {
    (void)state;
    refuse(TWO("[0,8]", "[10,18]"), 18, "hole");
    refuse(TWO("[0,8]", "[8,16]"), 17, "1 bytes behind");
    refuse("{}", 1, "1 bytes behind");
}

/* cases.md row 14, H10. */
static void the_same_name_twice_is_refused(void **state) {
    (void)state;
    refuse(
        "{\"a\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]},"
        "\"a\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[8,16]}}",
        16, "again");
}

/* cases.md row 14, H11. */
static void unknown_dtypes_are_kept_by_name(void **state) {
    (void)state;
    File f = file_of(
        "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[5],\"data_offsets\":[0,5]},"
        "\"b\":{\"dtype\":\"A_NAME_LONGER_THAN_FITS\",\"shape\":[1],\"data_offsets\":[5,8]}}",
        8);
    Safetensors st = accept(&f);
    assert_int_equal(entry(&st, "a")->dtype, DTYPE_OTHER);
    assert_string_equal(entry(&st, "a")->dtype_name, "F8_E4M3");
    assert_string_equal(entry(&st, "b")->dtype_name, "A_NAME_LONGER_T");
    safetensors_free(&st);
    free(f.bytes);
    refuse("{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[5],\"data_offsets\":[0,50]}}", 5, "outside");
}

/* cases.md row 14, H12. */
static void padding_metadata_scalars_and_empty_tensors_are_fine(void **state) {
    (void)state;
    File f = make_file(56, H0_JSON "  ", 8);
    Safetensors st = accept(&f);
    assert_ptr_equal(st.data, f.bytes + 64);
    safetensors_free(&st);
    free(f.bytes);

    f = file_of(
        "{\"s\":{\"data_offsets\":[0,2],\"dtype\":\"BF16\",\"shape\":[]},"
        "\"__metadata__\":{\"format\":\"pt\"},"
        "\"e\":{\"shape\":[0,4],\"data_offsets\":[2,2],\"dtype\":\"F32\"},"
        "\"m\":{\"shape\":[1,2,1,1,1,1,1,1],\"data_offsets\":[2,6],\"dtype\":\"F16\"}}",
        6);
    st = accept(&f);
    assert_int_equal(st.n_entries, 3);
    assert_int_equal(entry(&st, "s")->rank, 0);
    assert_int_equal(entry(&st, "s")->dtype, DTYPE_BF16);
    assert_int_equal(entry(&st, "e")->rank, 2);
    assert_int_equal(entry(&st, "m")->rank, 8);
    assert_int_equal(entry(&st, "m")->shape[1], 2);
    safetensors_free(&st);
    free(f.bytes);

    f = file_of("{}", 0);
    st = accept(&f);
    assert_int_equal(st.n_entries, 0);
    safetensors_free(&st);
    free(f.bytes);
}

static void free_leaves_nothing_to_free_twice(void **state) {
    (void)state;
    File f = file_of(H0_JSON, 8);
    Safetensors st = accept(&f);
    safetensors_free(&st);
    safetensors_free(&st);
    free(f.bytes);
}

static void many_tensors_are_checked_in_good_time(void **state) {
    (void)state;
    const size_t n = 100000;
    char *json = malloc(n * 90);
    char *at = stpcpy(json, "{");
    for (size_t i = 0; i < n; i++) {
        const size_t place = (i * 7919) % n;  // out of order
        at += sprintf(at, "%s\"t%zu\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}",
                      i ? "," : "", i, 2 * place, 2 * place + 2);
    }
    strcpy(at, "}");
    File f = file_of(json, 2 * n);
    const double start = time_ms();
    Safetensors st = accept(&f);
    assert_true(time_ms() - start < 10000);  // the square of n would take minutes
    assert_int_equal(st.n_entries, n);
    safetensors_free(&st);
    free(f.bytes);
    free(json);
}

static void random_damage_is_survived(void **state) {
    (void)state;
    const char *json = TWO("[0,8]", "[8,16]");
    uint32_t random = 1;
    int accepted = 0;
    for (int round = 0; round < 20000; round++) {
        File f = file_of(json, 16);
        for (int i = 0; i < 1 + round % 3; i++) {
            random = random * 1664525u + 1013904223u;
            f.bytes[(random >> 8) % (f.n - 16)] = (unsigned char)"{}[]\",:0189e.-\xff"[(random >> 24) % 16];
        }
        Safetensors st;
        if (safetensors_parse(&st, f.bytes, f.n, NULL) == OK) {
            for (size_t i = 0; i < st.n_entries; i++) {
                assert_true(st.entries[i].begin <= st.entries[i].end && st.entries[i].end <= st.data_bytes);
            }
            accepted++;
            safetensors_free(&st);
        }
        free(f.bytes);
    }
    assert_in_range(accepted, 1, 10000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_smallest_valid_file_is_read),
        cmocka_unit_test(every_truncated_file_is_refused),
        cmocka_unit_test(wrong_header_lengths_are_refused),
        cmocka_unit_test(headers_that_are_no_json_object_are_refused),
        cmocka_unit_test(entries_with_missing_or_misshapen_fields_are_refused),
        cmocka_unit_test(sizes_that_do_not_match_the_shape_are_refused),
        cmocka_unit_test(offsets_outside_the_data_are_refused),
        cmocka_unit_test(overlapping_ranges_are_refused),
        cmocka_unit_test(holes_and_surplus_bytes_are_refused),
        cmocka_unit_test(the_same_name_twice_is_refused),
        cmocka_unit_test(unknown_dtypes_are_kept_by_name),
        cmocka_unit_test(padding_metadata_scalars_and_empty_tensors_are_fine),
        cmocka_unit_test(free_leaves_nothing_to_free_twice),
        cmocka_unit_test(many_tensors_are_checked_in_good_time),
        cmocka_unit_test(random_damage_is_survived),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
