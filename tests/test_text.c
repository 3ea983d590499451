/* test_text.c: tokenizer/utf8.h and tokenizer/text_stream.h. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "../tokenizer/text_stream.h"
#include "../tokenizer/utf8.h"

/* ---- UTF-8 ---- */

/* What byte sequences of up to three bytes are, by the definition: the encodings of all characters. */
enum { NOTHING, BEGINNING, CHARACTER };

typedef struct {
    unsigned char one[1 << 8];
    unsigned char two[1 << 16];
    unsigned char three[1 << 24];
} Sequences;

static int encode_character(uint32_t c, unsigned char *out) {
    if (c < 0x80) {
        out[0] = (unsigned char)c;
        return 1;
    }
    const int n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (int i = n - 1; i > 0; i--) {
        out[i] = (unsigned char)(0x80 | (c & 0x3f));
        c >>= 6;
    }
    out[0] = (unsigned char)((0xf00 >> n & 0xff) | c);
    return n;
}

static bool is_character(uint32_t c) {
    return c < 0xd800 || (c > 0xdfff && c <= 0x10ffff);
}

static Sequences *all_sequences(void) {
    Sequences *s = calloc(1, sizeof *s);
    assert_non_null(s);
    for (uint32_t c = 0; c <= 0x10ffff; c++) {
        unsigned char b[4];
        const int n = is_character(c) ? encode_character(c, b) : 0;
        if (n >= 1) {
            s->one[b[0]] = n == 1 ? CHARACTER : BEGINNING;
        }
        if (n >= 2) {
            s->two[b[0] << 8 | b[1]] = n == 2 ? CHARACTER : BEGINNING;
        }
        if (n >= 3) {
            s->three[b[0] << 16 | b[1] << 8 | b[2]] = n == 3 ? CHARACTER : BEGINNING;
        }
    }
    return s;
}

static int expected_length(const Sequences *s, const unsigned char *b, size_t n) {
    const int kinds[] = {
        s->one[b[0]],
        n > 1 ? s->two[b[0] << 8 | b[1]] : NOTHING,
        n > 2 ? s->three[b[0] << 16 | b[1] << 8 | b[2]] : NOTHING,
    };
    for (int i = 0; i < (int)n; i++) {
        if (kinds[i] != BEGINNING) {
            return kinds[i] == CHARACTER ? i + 1 : 0;
        }
    }
    return -1;
}

static void utf8_length_knows_every_sequence_of_up_to_three_bytes(void **state) {
    (void)state;
    Sequences *s = all_sequences();
    int n_wrong = 0;
    for (size_t n = 1; n <= 3; n++) {
        for (uint32_t sequence = 0; sequence < 1u << 8 * n; sequence++) {
            unsigned char b[3] = {0};
            for (size_t i = 0; i < n; i++) {
                b[i] = (unsigned char)(sequence >> 8 * (n - 1 - i));
            }
            n_wrong += utf8_length(b, n) != expected_length(s, b, n);
        }
    }
    free(s);
    assert_int_equal(n_wrong, 0);
}

static void utf8_length_knows_every_character_and_its_beginnings(void **state) {
    (void)state;
    int n_wrong = 0;
    for (uint32_t c = 0; c <= 0x10ffff; c++) {
        unsigned char b[5] = {0, 0, 0, 0, 'x'};
        if (!is_character(c)) {
            continue;
        }
        const int length = encode_character(c, b);
        n_wrong += utf8_length(b, sizeof b) != length;
        for (int n = 1; n < length; n++) {
            n_wrong += utf8_length(b, (size_t)n) != -1;
        }
    }
    assert_int_equal(n_wrong, 0);
}

static void utf8_length_refuses_ill_formed_four_byte_sequences(void **state) {
    (void)state;
    const char *const wrong[] = {
        "\xf0\x8f\xbf\xbf",  // overlong
        "\xf4\x90\x80\x80",  // above U+10FFFF
        "\xf5\x80\x80\x80", "\xff\xbf\xbf\xbf", "\xf0\x9f\xa6x", "\xf0\x9fx\x99",
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(utf8_length((const unsigned char *)wrong[i], 4), 0);
    }
}

static void utf8_check_gives_the_offset_of_the_first_fault(void **state) {
    (void)state;
    assert_int_equal(utf8_check("", 0), 0);
    assert_int_equal(utf8_check("a\0b", 3), 3);
    assert_int_equal(utf8_check("a\xc3\xb6\xe6\xad\xaa\xf0\x9f\xa6\x99", 10), 10);
    assert_int_equal(utf8_check("ab\xff"
                                "c",
                                4),
                     2);
    assert_int_equal(utf8_check("a\xc3\xb6\xed\xa0\x80", 6), 3);      // a surrogate
    assert_int_equal(utf8_check("a\xc3\xb6\xf0\x9f\xa6\x99", 6), 3);  // cut off
}

/* ---- Streams of text ---- */

typedef struct {
    char text[256];
    size_t n;
} Written;

static void collect(void *user, const char *bytes, size_t n) {
    Written *w = user;
    assert_true(n <= sizeof w->text - w->n);
    memcpy(w->text + w->n, bytes, n);
    w->n += n;
}

static void assert_written(const Written *w, const char *text, size_t n) {
    assert_int_equal(w->n, n);
    assert_memory_equal(w->text, text, n);
}

/* Put text in pieces of piece_size bytes, then end it unless a stop string came. Returns whether it came. */
static bool stream(const char *const *stops, size_t n_stops, const char *text, size_t n, size_t piece_size,
                   Written *w) {
    TextStream s;
    *w = (Written){.n = 0};
    assert_true(text_stream_init(&s, stops, n_stops, collect, w));
    bool stopped = false;
    for (size_t i = 0; i < n && !stopped; i += piece_size) {
        stopped = text_stream_put(&s, text + i, n - i < piece_size ? n - i : piece_size);
    }
    if (!stopped) {
        text_stream_end(&s);
    }
    text_stream_free(&s);
    return stopped;
}

/* Whatever the borders: text in, expected out. */
static void check_stream(const char *const *stops, size_t n_stops, const char *text, size_t n,
                         const char *expected, bool expected_stop) {
    for (size_t piece_size = 1; piece_size <= n; piece_size++) {
        Written w;
        assert_int_equal(stream(stops, n_stops, text, n, piece_size, &w), expected_stop);
        assert_written(&w, expected, strlen(expected));
    }
}

static void a_stop_string_is_found_across_any_borders(void **state) {
    (void)state;
    const char *const stops[] = {"</end>"};
    check_stream(stops, 1, "One </e two</end> three", 23, "One </e two", true);
    check_stream(stops, 1, "</end>", 6, "", true);
    check_stream(stops, 1, "</</</end>", 10, "</</", true);
}

static void a_stop_string_may_be_one_byte(void **state) {
    (void)state;
    const char *const stops[] = {"\n"};
    check_stream(stops, 1, "a line\nanother", 14, "a line", true);
}

static void text_without_a_stop_string_comes_out_whole(void **state) {
    (void)state;
    const char *const stops[] = {"abc", "\n\n"};
    check_stream(stops, 2, "aab abd\nab", 10, "aab abd\nab", false);
    check_stream(NULL, 0, "anything", 8, "anything", false);
}

static void the_stop_string_complete_first_counts(void **state) {
    (void)state;
    const char *const stops[] = {"abcd", "bc"};
    check_stream(stops, 2, "xabcd", 5, "xa", true);
}

static void of_stop_strings_complete_at_one_byte_the_longest_counts(void **state) {
    (void)state;
    const char *const stops[] = {"c", "abc", "bc"};
    check_stream(stops, 3, "xabc", 4, "x", true);
}

static void a_failed_beginning_may_hide_the_beginning_of_another(void **state) {
    (void)state;
    const char *const stops[] = {"aab"};
    check_stream(stops, 1, "aaaab.", 6, "aa", true);
}

static void nul_bytes_are_text_like_any_other(void **state) {
    (void)state;
    const char *const stops[] = {"ab"};
    for (size_t piece_size = 1; piece_size <= 6; piece_size++) {
        Written w;
        assert_true(stream(stops, 1, "\0a\0\0ab", 6, piece_size, &w));
        assert_written(&w, "\0a\0\0", 4);
    }
}

static void the_end_passes_on_what_was_held_only_once(void **state) {
    (void)state;
    const char *const stops[] = {"stop"};
    Written w = {.n = 0};
    TextStream s;
    assert_true(text_stream_init(&s, stops, 1, collect, &w));
    assert_false(text_stream_put(&s, "a sto", 5));
    assert_written(&w, "a ", 2);
    text_stream_end(&s);
    assert_written(&w, "a sto", 5);
    text_stream_end(&s);
    assert_written(&w, "a sto", 5);
    text_stream_free(&s);
}

/* ---- The same against a search of the whole text ---- */

static unsigned next_random(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 16;
}

static bool ends_with(const char *text, size_t n, const char *end, size_t n_end) {
    return n_end <= n && memcmp(text + n - n_end, end, n_end) == 0;
}

/* Bytes of text[0, n) that must be out: all but the longest end that begins a stop string. If a stop string
 * ends the text, all before the longest such. */
static size_t bytes_out(const char *const *stops, size_t n_stops, const char *text, size_t n, bool *stopped) {
    size_t longest_stop = 0;
    size_t longest_beginning = 0;
    for (size_t i = 0; i < n_stops; i++) {
        const size_t length = strlen(stops[i]);
        if (length > longest_stop && ends_with(text, n, stops[i], length)) {
            longest_stop = length;
        }
        for (size_t k = 1; k < length; k++) {
            if (k > longest_beginning && ends_with(text, n, stops[i], k)) {
                longest_beginning = k;
            }
        }
    }
    *stopped = longest_stop > 0;
    return n - (*stopped ? longest_stop : longest_beginning);
}

static void random_text(uint32_t *seed, char *text, size_t n) {
    for (size_t i = 0; i < n; i++) {
        text[i] = (char)('a' + next_random(seed) % 2);
    }
    text[n] = '\0';
}

static void random_streams_hold_back_no_more_and_no_less_than_they_must(void **state) {
    (void)state;
    enum { N_STOPS = 3, LONGEST_STOP = 7, LENGTH = 40 };
    uint32_t seed = 1;
    int n_stopped = 0;
    for (int round = 0; round < 20000; round++) {
        char strings[N_STOPS][LONGEST_STOP + 1];
        const char *stops[N_STOPS];
        for (int i = 0; i < N_STOPS; i++) {
            random_text(&seed, strings[i], 4 + next_random(&seed) % (LONGEST_STOP - 3));
            stops[i] = strings[i];
        }
        char text[LENGTH + 1];
        random_text(&seed, text, LENGTH);
        Written w = {.n = 0};
        TextStream s;
        assert_true(text_stream_init(&s, stops, N_STOPS, collect, &w));
        bool stopped = false;
        for (size_t i = 0; i < LENGTH && !stopped; i++) {
            const size_t n_out = bytes_out(stops, N_STOPS, text, i + 1, &stopped);
            assert_int_equal(text_stream_put(&s, text + i, 1), stopped);
            assert_written(&w, text, n_out);
        }
        Written in_pieces;
        assert_int_equal(stream(stops, N_STOPS, text, LENGTH, 1 + next_random(&seed) % 9, &in_pieces),
                         stopped);
        if (!stopped) {
            text_stream_end(&s);
        }
        assert_written(&in_pieces, w.text, w.n);
        text_stream_free(&s);
        n_stopped += stopped;
    }
    assert_in_range(n_stopped, 1000, 19900);  // both outcomes are met often
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(utf8_length_knows_every_sequence_of_up_to_three_bytes),
        cmocka_unit_test(utf8_length_knows_every_character_and_its_beginnings),
        cmocka_unit_test(utf8_length_refuses_ill_formed_four_byte_sequences),
        cmocka_unit_test(utf8_check_gives_the_offset_of_the_first_fault),
        cmocka_unit_test(a_stop_string_is_found_across_any_borders),
        cmocka_unit_test(a_stop_string_may_be_one_byte),
        cmocka_unit_test(text_without_a_stop_string_comes_out_whole),
        cmocka_unit_test(the_stop_string_complete_first_counts),
        cmocka_unit_test(of_stop_strings_complete_at_one_byte_the_longest_counts),
        cmocka_unit_test(a_failed_beginning_may_hide_the_beginning_of_another),
        cmocka_unit_test(nul_bytes_are_text_like_any_other),
        cmocka_unit_test(the_end_passes_on_what_was_held_only_once),
        cmocka_unit_test(random_streams_hold_back_no_more_and_no_less_than_they_must),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
