/* test_tokenizer.c: tokenizer/tokenizer.h. With the Llama-2 tokenizer where it is there, with the tokenizer
 * of the demo model (4096 pieces, trained the same way), and with small models made here. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../tokenizer/tokenizer.h"
#include "../tokenizer/utf8.h"

#define LLAMA_MODEL "../shared/data/llama2-tokenizer/tokenizer.model"
#define DEMO_MODEL "demo/tokenizer.model"
#define REPLACEMENT "\xef\xbf\xbd"

enum { POISON = 0x5a, N_BYTES = 256, FIRST_BYTE_ID = 3 };  // byte pieces follow unk, BOS and EOS

/* ---- Bytes, and models made of them ---- */

typedef struct {
    unsigned char *data;
    size_t n;
} Bytes;

static void add_bytes(Bytes *b, const void *data, size_t n) {
    b->data = realloc(b->data, b->n + n + 1);
    assert_non_null(b->data);
    if (n > 0) {
        memcpy(b->data + b->n, data, n);
    }
    b->n += n;
}

static void add_varint(Bytes *b, uint64_t value) {
    for (; value >= 0x80; value >>= 7) {
        add_bytes(b, &(unsigned char){(unsigned char)(value | 0x80)}, 1);
    }
    add_bytes(b, &(unsigned char){(unsigned char)value}, 1);
}

/* Protobuf fields: a number, or bytes. */
static void add_number_field(Bytes *b, uint64_t field, uint64_t value) {
    add_varint(b, field << 3);
    add_varint(b, value);
}

static void add_bytes_field(Bytes *b, uint64_t field, const void *data, size_t n) {
    add_varint(b, field << 3 | 2);
    add_varint(b, n);
    add_bytes(b, data, n);
}

/* Append inner as a field of b, and free it. */
static void add_message(Bytes *b, uint64_t field, Bytes inner) {
    add_bytes_field(b, field, inner.data, inner.n);
    free(inner.data);
}

/* Field numbers of sentencepiece_model.proto. */
enum { MODEL_PIECE = 1, MODEL_TRAINER, MODEL_NORMALIZER, MODEL_SELF_TEST, MODEL_DENORMALIZER };
enum { PIECE_TEXT = 1, PIECE_SCORE, PIECE_TYPE };
enum { TRAINER_MODEL_TYPE = 3, TRAINER_BYTE_FALLBACK = 35, TRAINER_UNK_SURFACE = 44 };
enum { NORMALIZER_CHARSMAP = 2, NORMALIZER_ADD_DUMMY_PREFIX, NORMALIZER_REMOVE_EXTRA_WHITESPACES };
enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE };
enum { BPE = 2 };

static void add_piece_bytes(Bytes *model, const void *text, size_t n, int type) {
    Bytes piece = {0};
    add_bytes_field(&piece, PIECE_TEXT, text, n);
    add_number_field(&piece, PIECE_TYPE, (uint64_t)type);
    add_message(model, MODEL_PIECE, piece);
}

static void add_piece(Bytes *model, const char *text, int type) {
    add_piece_bytes(model, text, strlen(text), type);
}

static void add_trainer(Bytes *model, bool byte_fallback) {
    Bytes trainer = {0};
    add_number_field(&trainer, TRAINER_MODEL_TYPE, BPE);
    add_number_field(&trainer, TRAINER_BYTE_FALLBACK, byte_fallback);
    add_message(model, MODEL_TRAINER, trainer);
}

static void add_normalizer(Bytes *model, bool add_dummy_prefix, bool remove_extra_whitespaces) {
    Bytes normalizer = {0};
    add_number_field(&normalizer, NORMALIZER_ADD_DUMMY_PREFIX, add_dummy_prefix);
    add_number_field(&normalizer, NORMALIZER_REMOVE_EXTRA_WHITESPACES, remove_extra_whitespaces);
    add_message(model, MODEL_NORMALIZER, normalizer);
}

/* unk 0, BOS 1, EOS 2, and with bytes 3 .. 258 */
static Bytes special_pieces(bool with_bytes) {
    Bytes model = {0};
    add_piece(&model, "<unk>", UNKNOWN);
    add_piece(&model, "<s>", CONTROL);
    add_piece(&model, "</s>", CONTROL);
    for (int byte = 0; with_bytes && byte < N_BYTES; byte++) {
        char text[8];
        snprintf(text, sizeof text, "<0x%02X>", byte);
        add_piece(&model, text, BYTE);
    }
    return model;
}

static bool read_file(const char *path, Bytes *b) {
    FILE *f = fopen(path, "rb");
    if (!f) {
        return false;
    }
    char block[4096];
    *b = (Bytes){0};
    for (size_t n = fread(block, 1, sizeof block, f); n > 0; n = fread(block, 1, sizeof block, f)) {
        add_bytes(b, block, n);
    }
    fclose(f);
    return true;
}

/* ---- Tokenizers ---- */

/* Takes model over. */
static Tokenizer *load_bytes(Bytes model) {
    Tokenizer *t = NULL;
    char error[200] = "";
    if (!tokenizer_load(&t, model.data, model.n, error, sizeof error)) {
        fail_msg("%s", error);
    }
    memset(model.data, POISON, model.n);  // the tokenizer must not need it any more
    free(model.data);
    return t;
}

static Tokenizer *load_demo(void) {
    Bytes model;
    assert_true(read_file(DEMO_MODEL, &model));
    return load_bytes(model);
}

static Tokenizer *load_llama(void) {
    Bytes model;
    if (!read_file(LLAMA_MODEL, &model)) {
        print_message("skipped: no %s\n", LLAMA_MODEL);
        skip();
    }
    return load_bytes(model);
}

static void assert_one_line(const char *error) {
    assert_true(strlen(error) > 10);
    assert_null(strchr(error, '\n'));
}

/* Takes model over. It must be refused, with a line that has reason in it. */
static void assert_refused(Bytes model, const char *reason) {
    Tokenizer *const untouched = (Tokenizer *)&model;
    Tokenizer *t = untouched;
    char error[200] = "";
    assert_false(tokenizer_load(&t, model.data, model.n, error, sizeof error));
    assert_ptr_equal(t, untouched);
    assert_one_line(error);
    if (!strstr(error, reason)) {
        fail_msg("\"%s\" does not say \"%s\"", error, reason);
    }
    free(model.data);
}

static size_t encode(const Tokenizer *t, const char *text, size_t bytes, int **ids) {
    size_t n = SIZE_MAX;
    char error[200] = "";
    if (!tokenizer_encode(t, text, bytes, ids, &n, error, sizeof error)) {
        fail_msg("%s", error);
    }
    return n;
}

static void assert_encodes(const Tokenizer *t, const char *text, size_t bytes, const int *expected,
                           size_t n) {
    int *ids = (int *)&n;
    assert_int_equal(encode(t, text, bytes, &ids), n);
    if (n > 0) {
        assert_memory_equal(ids, expected, n * sizeof *ids);
    } else {
        assert_null(ids);
    }
    free(ids);
}

#define IDS(...) (const int[]){__VA_ARGS__}, sizeof((const int[]){__VA_ARGS__}) / sizeof(int)
#define TEXT(literal) literal, sizeof(literal) - 1

/* One step of decoding, appended to text. Nothing may be written beyond what is returned. */
static void decode_step(const Tokenizer *t, DecodeState *s, int id, Bytes *text) {
    char out[TOKENIZER_MAX_PIECE + 1];
    memset(out, POISON, sizeof out);
    const size_t n = tokenizer_decode(t, s, id, out);
    assert_true(n <= TOKENIZER_MAX_PIECE);
    for (size_t i = n; i < sizeof out; i++) {
        assert_int_equal(out[i], POISON);
    }
    add_bytes(text, out, n);
}

static Bytes decode(const Tokenizer *t, const int *ids, size_t n) {
    Bytes text = {0};
    DecodeState s = {0};
    for (size_t i = 0; i < n; i++) {
        decode_step(t, &s, ids[i], &text);
    }
    char out[TOKENIZER_MAX_PIECE];
    add_bytes(&text, out, tokenizer_decode_end(&s, out));
    return text;
}

static void assert_decodes(const Tokenizer *t, const int *ids, size_t n, const char *text, size_t bytes) {
    const Bytes got = decode(t, ids, n);
    assert_int_equal(got.n, bytes);
    assert_memory_equal(got.data, text, bytes);
    free(got.data);
}

static unsigned next_random(uint32_t *seed) {
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 16;
}

/* ---- The Llama-2 tokenizer: values that the library gave ---- */

static void llama_has_its_vocabulary(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_int_equal(tokenizer_vocab_size(t), 32000);
    assert_int_equal(tokenizer_unk_id(t), 0);
    assert_int_equal(tokenizer_bos_id(t), 1);
    assert_int_equal(tokenizer_eos_id(t), 2);
    tokenizer_free(t);
}

/* cases.md row 1 and appendix A1 .. A4, A6, A11, A12: the first word has the space in front of it. */
static void llama_encodes_prose_as_the_library(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_encodes(t, TEXT("Once upon a time"), IDS(9038, 2501, 263, 931));
    assert_encodes(t, TEXT("I believe the meaning of life is"), IDS(306, 4658, 278, 6593, 310, 2834, 338));
    assert_encodes(t, TEXT("Simply put, the theory of relativity states that "),
                   IDS(3439, 17632, 1925, 29892, 278, 6368, 310, 14215, 537, 5922, 393, 29871));
    assert_encodes(t, TEXT("The capital of France is"), IDS(450, 7483, 310, 3444, 338));
    assert_encodes(t, TEXT("Hello, world!"), IDS(15043, 29892, 3186, 29991));
    assert_encodes(t, TEXT("1234567890"),
                   IDS(29871, 29896, 29906, 29941, 29946, 29945, 29953, 29955, 29947, 29929, 29900));
    assert_encodes(t, TEXT("Q: What is the capital of France?\nA:"),
                   IDS(660, 29901, 1724, 338, 278, 7483, 310, 3444, 29973, 13, 29909, 29901));
    assert_encodes(t, TEXT("Q: What is the capital of France?\nA: "),
                   IDS(660, 29901, 1724, 338, 278, 7483, 310, 3444, 29973, 13, 29909, 29901, 29871));
    tokenizer_free(t);
}

/* cases.md row 3 and appendix A5, A7, A8, A10, A21: no text, spaces alone and runs of them. */
static void llama_keeps_every_space(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_encodes(t, "", 0, NULL, 0);
    assert_encodes(t, NULL, 0, NULL, 0);
    assert_encodes(t, TEXT(" "), IDS(259));
    assert_encodes(t, TEXT("Hello"), IDS(15043));
    assert_encodes(t, TEXT(" Hello"), IDS(29871, 15043));
    assert_encodes(t, TEXT("  Hello"), IDS(259, 15043));
    assert_encodes(t, TEXT("Hello "), IDS(15043, 29871));
    assert_encodes(t, TEXT("  Hello  world "), IDS(259, 15043, 29871, 3186, 29871));
    assert_encodes(t, TEXT(" world"), IDS(29871, 3186));
    assert_encodes(t, TEXT("Hello world"), IDS(15043, 3186));
    assert_encodes(t, TEXT("                "), IDS(462, 29871));
    assert_encodes(t, TEXT("                 "), IDS(462, 259));
    assert_encodes(t, TEXT("                                "), IDS(462, 462, 29871));
    assert_encodes(t, TEXT("\n"), IDS(29871, 13));
    assert_encodes(t, TEXT("\n\n"), IDS(29871, 13, 13));
    assert_encodes(t, TEXT("\t"), IDS(29871, 12));
    assert_encodes(t, TEXT("\tint x;"), IDS(29871, 12, 524, 921, 29936));
    assert_encodes(t, TEXT("Hello\r\n"), IDS(15043, 30004, 13));
    tokenizer_free(t);
}

/* cases.md rows 1 and 2 and appendix A17, A18: characters that are pieces, and those that are bytes. */
static void llama_encodes_any_script(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_encodes(t, TEXT("This is 🦙.cpp"), IDS(910, 338, 29871, 243, 162, 169, 156, 29889, 8223));
    assert_encodes(t, TEXT("Lets try ö & 株式会社"),
                   IDS(365, 1691, 1018, 3963, 669, 29871, 31409, 30607, 30437, 30564));
    assert_encodes(t, TEXT("𒎗𓐍"), IDS(29871, 243, 149, 145, 154, 243, 150, 147, 144));
    assert_encodes(t, TEXT("日本語"), IDS(29871, 30325, 30346, 30968));
    assert_encodes(t, TEXT("歪"), IDS(29871, 233, 176, 173));
    assert_encodes(t, TEXT("안녕하세요"), IDS(29871, 31734, 238, 136, 152, 30944, 31578, 31527));
    assert_encodes(t, TEXT("Привет, мир!"), IDS(7203, 7616, 29892, 4157, 29927, 29991));
    tokenizer_free(t);
}

/* cases.md row 6. */
static void llama_takes_ill_formed_text_as_the_library_does(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_encodes(t, TEXT("\xff"), IDS(29871, 30140));
    assert_encodes(t, TEXT("a\xc3"), IDS(263, 30140));
    assert_encodes(t, TEXT("\xe6\xad"), IDS(29871, 26308));
    assert_encodes(t, TEXT("\xed\xa0\x80"), IDS(29871, 26308, 30140));
    assert_encodes(t, TEXT("a\0b"), IDS(263, 3, 29890));
    assert_encodes(t, TEXT("\xe2\x96\x81"), IDS(259));
    tokenizer_free(t);
}

/* cases.md row 5. */
static void llama_keeps_text_that_spells_control_tokens_text(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_encodes(t, TEXT("<s>Hello</s>"), IDS(529, 29879, 29958, 10994, 829, 29879, 29958));
    assert_encodes(t, TEXT("<0x0A>"), IDS(529, 29900, 29916, 29900, 29909, 29958));
    tokenizer_free(t);
}

/* cases.md row 41: the texts of appendix C1 .. C4. */
static void llama_encodes_chat_prompts(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_encodes(
        t, TEXT("[INST] What is 2+2? [/INST]"),
        IDS(518, 25580, 29962, 1724, 338, 29871, 29906, 29974, 29906, 29973, 518, 29914, 25580, 29962));
    assert_encodes(t, TEXT("[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]"),
                   IDS(518, 25580, 29962, 3532, 14816, 29903, 6778, 13, 3629, 11473, 29889, 13, 29966, 829,
                       14816, 29903, 6778, 13, 13, 18567, 518, 29914, 25580, 29962));
    assert_encodes(t, TEXT("[INST] What is 2+2? [/INST] 4 "),
                   IDS(518, 25580, 29962, 1724, 338, 29871, 29906, 29974, 29906, 29973, 518, 29914, 25580,
                       29962, 29871, 29946, 29871));
    assert_encodes(t, TEXT("[INST] And 3+3? [/INST]"),
                   IDS(518, 25580, 29962, 1126, 29871, 29941, 29974, 29941, 29973, 518, 29914, 25580, 29962));
    assert_encodes(t, TEXT("[INST] a\nb [/INST]"),
                   IDS(518, 25580, 29962, 263, 13, 29890, 518, 29914, 25580, 29962));
    tokenizer_free(t);
}

/* cases.md row 2: 480 000 bytes are 120 001 ids. The limit is one for busy machines. */
static void llama_encodes_long_text_in_less_than_quadratic_time(void **state) {
    (void)state;
    enum { N_WORDS = 40000 };
    Tokenizer *t = load_llama();
    Bytes text = {0};
    for (int i = 0; i < N_WORDS; i++) {
        add_bytes(&text, "lorem ipsum ", 12);
    }
    int *ids;
    const clock_t start = clock();
    assert_int_equal(encode(t, (const char *)text.data, text.n, &ids), 120001);
    assert_true((clock() - start) / CLOCKS_PER_SEC < 10);
    free(ids);
    free(text.data);
    tokenizer_free(t);
}

/* cases.md rows 7 and 8: one id at a time gives what the library gives for all at once. */
static void llama_decodes_as_the_library(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    assert_decodes(t, IDS(15043, 3186), TEXT("Hello world"));
    assert_decodes(t, IDS(1, 29871, 15043), TEXT(" Hello"));
    assert_decodes(t, IDS(1, 15043, 2), TEXT("Hello"));
    assert_decodes(t, IDS(0), TEXT(" \xe2\x81\x87 "));
    assert_decodes(t, IDS(29871, 13), TEXT("\n"));
    assert_decodes(t, IDS(462), TEXT("               "));  // 16 spaces, less the first
    assert_decodes(t, IDS(263, 3, 29890), TEXT("a\0b"));
    assert_decodes(t, IDS(243, 162, 15043), TEXT(REPLACEMENT REPLACEMENT " Hello"));
    assert_decodes(t, IDS(6324, 29871, 243, 162, 169, 156, 29871, 30325, 30346, 29871, 233, 176, 173, 29991),
                   TEXT("Hi 🦙 日本 歪!"));
    tokenizer_free(t);
}

/* cases.md row 7: nothing before the last byte; what is cut off is one replacement. */
static void llama_gives_characters_only_whole(void **state) {
    (void)state;
    Tokenizer *t = load_llama();
    const int ids[] = {6324, 29871, 243, 162, 169, 156};
    const size_t bytes_after[] = {2, 3, 3, 3, 3, 7};
    Bytes text = {0};
    DecodeState s = {0};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        decode_step(t, &s, ids[i], &text);
        assert_int_equal(text.n, bytes_after[i]);
    }
    free(text.data);
    assert_decodes(t, IDS(6324, 29871, 243, 162), TEXT("Hi " REPLACEMENT));  // cut off at the end
    assert_decodes(t, IDS(243, 162, 169), TEXT(REPLACEMENT));
    tokenizer_free(t);
}

/* ---- Any tokenizer ---- */

/* U+2581, which stands for a space, is the one character that does not come back. */
static size_t random_character(uint32_t *seed, char *out) {
    static const char *const characters[] = {
        " ",  " ",  "a", "e",    "t",  "Z",    "\n",   "\t",  "9",   ".",      "é",      "ß",         "Ж",
        "한", "日", "♥", "\x7f", "歪", "🦙", "𒎗", "<s>", "the", "<0x41>", "\u00a0", "\U0010ffff"};
    const size_t n = sizeof characters / sizeof *characters;
    const size_t i = next_random(seed) % (n + 1);
    if (i == n) {
        *out = '\0';
        return 1;
    }
    memcpy(out, characters[i], strlen(characters[i]));
    return strlen(characters[i]);
}

/* cases.md row 8. */
static void encoded_text_comes_back_from_decoding(void **state) {
    (void)state;
    Tokenizer *t = load_demo();
    uint32_t seed = 2;
    for (int round = 0; round < 2000; round++) {
        char text[256];
        size_t bytes = 0;
        for (unsigned n = next_random(&seed) % 32; n > 0; n--) {
            bytes += random_character(&seed, text + bytes);
        }
        int *ids;
        const size_t n = encode(t, text, bytes, &ids);
        for (size_t i = 0; i < n; i++) {
            assert_in_range(ids[i], FIRST_BYTE_ID, tokenizer_vocab_size(t) - 1);  // no control ids
        }
        assert_decodes(t, ids, n, text, bytes);
        free(ids);
    }
    tokenizer_free(t);
}

/* Mostly bytes that begin or continue characters, so that all ways to break one are met. */
static int random_id(const Tokenizer *t, uint32_t *seed) {
    switch (next_random(seed) % 4) {
    case 0:
        return (int)(next_random(seed) % (unsigned)tokenizer_vocab_size(t));
    case 1:
        return FIRST_BYTE_ID + 0xc0 + (int)(next_random(seed) % 0x40);
    case 2:
        return FIRST_BYTE_ID + 0x80 + (int)(next_random(seed) % 0x40);
    default:
        return FIRST_BYTE_ID + (int[]){0xe0, 0xed, 0xf0, 0xf4, 0x8f, 0x90, 0x9f, 0xa0}[next_random(seed) % 8];
    }
}

static void every_step_of_decoding_gives_well_formed_text(void **state) {
    (void)state;
    Tokenizer *t = load_demo();
    uint32_t seed = 3;
    DecodeState s = {0};
    size_t bytes = 0;
    for (int i = 0; i < 200000; i++) {
        char out[TOKENIZER_MAX_PIECE];
        const size_t n =
            i % 100 ? tokenizer_decode(t, &s, random_id(t, &seed), out) : tokenizer_decode_end(&s, out);
        assert_int_equal(utf8_check(out, n), n);
        bytes += n;
    }
    assert_true(bytes > 200000);
    tokenizer_free(t);
}

#define BYTE_IDS_3(a, b, c) IDS(FIRST_BYTE_ID + (a), FIRST_BYTE_ID + (b), FIRST_BYTE_ID + (c))

static void bytes_that_cannot_be_a_character_give_a_replacement_each(void **state) {
    (void)state;
    Tokenizer *t = load_demo();
    assert_decodes(t, BYTE_IDS_3(0x41, 0xc3, 0xb6), TEXT("A\xc3\xb6"));
    assert_decodes(t, BYTE_IDS_3(0xff, 0x80, 0x41), TEXT(REPLACEMENT REPLACEMENT "A"));
    assert_decodes(t, BYTE_IDS_3(0xe6, 0xad, 0x41), TEXT(REPLACEMENT REPLACEMENT "A"));
    assert_decodes(t, BYTE_IDS_3(0xe0, 0x80, 0x80), TEXT(REPLACEMENT REPLACEMENT REPLACEMENT));
    assert_decodes(t, BYTE_IDS_3(0xed, 0xa0, 0x80), TEXT(REPLACEMENT REPLACEMENT REPLACEMENT));
    assert_decodes(t, BYTE_IDS_3(0xe6, 0xc3, 0xb6), TEXT(REPLACEMENT "\xc3\xb6"));
    assert_decodes(t, IDS(FIRST_BYTE_ID + 0xc3, 2, FIRST_BYTE_ID + 0xb6), TEXT(REPLACEMENT REPLACEMENT));
    tokenizer_free(t);
}

/* cases.md row 9. */
static void ids_out_of_range_give_nothing(void **state) {
    (void)state;
    Tokenizer *t = load_demo();
    const int n = tokenizer_vocab_size(t);
    assert_int_equal(n, 4096);
    assert_decodes(t, IDS(-1, n, INT_MIN, INT_MAX), TEXT(""));
    assert_decodes(t, IDS(FIRST_BYTE_ID + 0xc3, n, FIRST_BYTE_ID + 0xb6), TEXT("\xc3\xb6"));
    tokenizer_free(t);
}

static void the_end_of_decoding_starts_anew(void **state) {
    (void)state;
    Tokenizer *t = load_demo();
    DecodeState s = {0};
    char out[TOKENIZER_MAX_PIECE];
    assert_int_equal(tokenizer_decode(t, &s, FIRST_BYTE_ID + 'A', out), 1);
    assert_int_equal(tokenizer_decode(t, &s, FIRST_BYTE_ID + 0xe6, out), 0);
    assert_int_equal(tokenizer_decode_end(&s, out), strlen(REPLACEMENT));
    assert_int_equal(tokenizer_decode_end(&s, out), 0);
    assert_false(s.started);
    assert_int_equal(s.n_held, 0);
    tokenizer_free(t);
}

static void a_text_of_impossible_length_is_refused(void **state) {
    (void)state;
    Tokenizer *t = load_demo();
    int *ids = (int *)&t;
    size_t n = POISON;
    char error[200] = "";
    assert_false(tokenizer_encode(t, "x", INT_MAX, &ids, &n, error, sizeof error));
    assert_non_null(strstr(error, "too long"));
    assert_one_line(error);
    assert_ptr_equal(ids, &t);
    assert_int_equal(n, POISON);
    tokenizer_free(t);
}

static void free_takes_null(void **state) {
    (void)state;
    tokenizer_free(NULL);
}

/* ---- Models with other rules ---- */

enum { SPACE_ID = FIRST_BYTE_ID + N_BYTES, TWO_SPACES_ID, SPACE_A_ID, A_ID };

static Tokenizer *load_with_rules(bool add_dummy_prefix, bool remove_extra_whitespaces) {
    Bytes model = special_pieces(true);
    add_piece(&model, "▁", NORMAL);
    add_piece(&model, "▁▁", NORMAL);
    add_piece(&model, "▁a", NORMAL);
    add_piece(&model, "a", UNUSED);
    add_trainer(&model, true);
    add_normalizer(&model, add_dummy_prefix, remove_extra_whitespaces);
    return load_bytes(model);
}

static void one_leading_space_is_dropped_if_the_model_adds_one(void **state) {
    (void)state;
    Tokenizer *t = load_with_rules(true, false);
    assert_decodes(t, IDS(SPACE_A_ID, SPACE_A_ID), TEXT("a a"));
    assert_decodes(t, IDS(TWO_SPACES_ID, A_ID), TEXT(" a"));
    assert_decodes(t, IDS(SPACE_ID, SPACE_A_ID), TEXT(" a"));
    assert_decodes(t, IDS(SPACE_ID, 2, SPACE_A_ID), TEXT(" a"));
    assert_decodes(t, IDS(2, SPACE_A_ID), TEXT("a"));
    assert_decodes(t, IDS(0, SPACE_A_ID), TEXT(" \xe2\x81\x87  a"));
    assert_decodes(t, IDS(FIRST_BYTE_ID + 'b', SPACE_A_ID), TEXT("b a"));
    assert_decodes(t, IDS(SPACE_A_ID, 1, SPACE_A_ID, SPACE_A_ID), TEXT("aa a"));  // BOS restarts the text
    tokenizer_free(t);
}

static void leading_spaces_stay_if_the_model_adds_none(void **state) {
    (void)state;
    Tokenizer *t = load_with_rules(false, false);
    assert_encodes(t, TEXT(" a"), IDS(SPACE_A_ID));
    assert_decodes(t, IDS(SPACE_A_ID, SPACE_A_ID), TEXT(" a a"));
    tokenizer_free(t);
}

static void leading_spaces_go_one_per_piece_if_the_model_removes_them(void **state) {
    (void)state;
    Tokenizer *t = load_with_rules(true, true);
    assert_encodes(t, TEXT("  a "), IDS(SPACE_A_ID));
    assert_decodes(t, IDS(SPACE_ID, SPACE_ID, SPACE_A_ID, SPACE_A_ID), TEXT("a a"));
    assert_decodes(t, IDS(TWO_SPACES_ID, SPACE_A_ID), TEXT("  a"));
    tokenizer_free(t);
}

static void the_unknown_id_prints_what_the_model_says(void **state) {
    (void)state;
    Bytes model = special_pieces(false);
    add_piece(&model, "▁a", NORMAL);
    Bytes trainer = {0};
    add_bytes_field(&trainer, TRAINER_UNK_SURFACE, "?", 1);
    add_message(&model, MODEL_TRAINER, trainer);
    Tokenizer *t = load_bytes(model);
    assert_decodes(t, IDS(0, 3), TEXT("? a"));
    tokenizer_free(t);
}

static void a_model_without_bos_and_eos_says_so(void **state) {
    (void)state;
    Bytes model = {0};
    add_piece(&model, "a", NORMAL);
    add_piece(&model, "<unk>", UNKNOWN);
    Tokenizer *t = load_bytes(model);
    assert_int_equal(tokenizer_unk_id(t), 1);
    assert_int_equal(tokenizer_bos_id(t), -1);
    assert_int_equal(tokenizer_eos_id(t), -1);
    tokenizer_free(t);
}

/* cases.md row 5. */
static void text_never_becomes_a_control_token(void **state) {
    (void)state;
    Bytes model = special_pieces(false);
    add_piece(&model, "q", CONTROL);
    add_trainer(&model, false);
    Tokenizer *t = load_bytes(model);
    int *ids;
    size_t n;
    char error[200] = "";
    assert_false(tokenizer_encode(t, "q", 1, &ids, &n, error, sizeof error));
    assert_one_line(error);
    tokenizer_free(t);
}

/* ---- Hostile models ---- */

/* cases.md row 9: no file brings the process down. */
static void models_that_are_not_models_are_refused(void **state) {
    (void)state;
    assert_refused((Bytes){0}, "no pieces");
    const char *const wrong[] = {
        "\x0a",       "\x0a\xff\xff\xff\xff\x0f", "\x0b",
        "{\"a\": 1}", "\xff\xff\xff\xff\xff",     "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        Bytes model = {0};
        add_bytes(&model, wrong[i], strlen(wrong[i]));
        assert_refused(model, "sentencepiece");
    }
}

static void models_with_wrong_special_pieces_are_refused(void **state) {
    (void)state;
    Bytes model = {0};
    add_piece(&model, "a", NORMAL);
    assert_refused(model, "unk is not defined");

    model = special_pieces(false);
    add_piece(&model, "<unk2>", UNKNOWN);
    assert_refused(model, "unk is already defined");

    model = special_pieces(true);  // byte pieces, but no byte fallback
    add_trainer(&model, false);
    assert_refused(model, "byte piece");

    model = special_pieces(false);  // the other way round
    add_piece(&model, "a", NORMAL);
    add_trainer(&model, true);
    assert_refused(model, "256 byte pieces");

    model = special_pieces(true);
    add_piece(&model, "<0xZZ>", BYTE);
    add_trainer(&model, true);
    assert_refused(model, "byte piece");
}

static void assert_piece_refused(const void *text, size_t n, int type, const char *reason) {
    Bytes model = special_pieces(false);
    add_piece(&model, "a\nb", NORMAL);
    add_piece_bytes(&model, text, n, type);
    assert_refused(model, reason);
}

static void models_with_wrong_pieces_are_refused(void **state) {
    (void)state;
    char long_text[TOKENIZER_MAX_PIECE + 1];
    memset(long_text, 'a', sizeof long_text);
    assert_piece_refused(long_text, sizeof long_text, NORMAL, "piece 4");
    assert_piece_refused("", 0, NORMAL, "piece 4");
    assert_piece_refused("x\0y", 3, NORMAL, "piece 4 is not well-formed");
    assert_piece_refused("\xff", 1, NORMAL, "piece 4 is not well-formed");
    assert_piece_refused("<s>", 3, NORMAL, "piece 4");  // plain text could become BOS
    assert_piece_refused("a\nb", 3, NORMAL, "already defined");
}

static void user_defined_pieces_that_overrun_the_library_are_refused(void **state) {
    (void)state;
    enum { LIMIT = 64 };
    char text[LIMIT + 1];
    memset(text, 'a', sizeof text);
    for (size_t longest = LIMIT; longest <= LIMIT + 1; longest++) {
        Bytes model = special_pieces(false);
        for (size_t n = 1; n <= longest; n++) {
            add_piece_bytes(&model, text, n, USER_DEFINED);
        }
        add_trainer(&model, false);
        if (longest > LIMIT) {
            assert_refused(model, "user-defined");
        } else {
            Tokenizer *t = load_bytes(model);
            int *ids;
            assert_int_equal(encode(t, text, LIMIT, &ids), 2);  // the space and the longest
            free(ids);
            tokenizer_free(t);
        }
    }
}

static void normalization_rules_are_refused(void **state) {
    (void)state;
    const unsigned char rules_out_of_bounds[] = {4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0};
    const uint64_t places[] = {MODEL_NORMALIZER, MODEL_DENORMALIZER};
    for (size_t i = 0; i < 2; i++) {
        Bytes model = special_pieces(false);
        add_piece(&model, "a", NORMAL);
        Bytes rules = {0};
        add_bytes_field(&rules, NORMALIZER_CHARSMAP, rules_out_of_bounds, sizeof rules_out_of_bounds);
        add_message(&model, places[i], rules);
        assert_refused(model, "normalization");
    }
}

static void a_model_that_fails_its_own_test_is_refused(void **state) {
    (void)state;
    Bytes model = special_pieces(false);
    add_piece(&model, "a", NORMAL);
    add_trainer(&model, false);
    Bytes sample = {0};
    add_bytes_field(&sample, 1, "a", 1);
    add_bytes_field(&sample, 2, "b", 1);
    Bytes self_test = {0};
    add_message(&self_test, 1, sample);
    add_message(&model, MODEL_SELF_TEST, self_test);
    assert_refused(model, "Self-test");
}

/* A damaged model either fails with a line or is one that works. Returns whether it loads. */
static bool survives(const unsigned char *data, size_t n) {
    Tokenizer *t;
    char error[100] = "";
    if (!tokenizer_load(&t, data, n, error, sizeof error)) {
        assert_one_line(error);
        return false;
    }
    int *ids;
    size_t n_ids;
    if (tokenizer_encode(t, TEXT("  The old man\nand ö 🦙 \xff"), &ids, &n_ids, error, sizeof error)) {
        free(decode(t, ids, n_ids).data);
        free(ids);
    } else {
        assert_one_line(error);
    }
    tokenizer_free(t);
    return true;
}

static void truncated_models_do_no_harm(void **state) {
    (void)state;
    Bytes model;
    assert_true(read_file(DEMO_MODEL, &model));
    uint32_t seed = 4;
    for (size_t n = 0; n < 300; n++) {
        survives(model.data, n);
    }
    int n_loaded = 0;
    for (int round = 0; round < 300; round++) {
        Bytes part = {0};  // of exact size, so that a sanitizer sees a step beyond
        add_bytes(&part, model.data, (next_random(&seed) << 8 ^ next_random(&seed)) % model.n);
        n_loaded += survives(part.data, part.n);
        free(part.data);
    }
    assert_int_equal(n_loaded, 0);  // byte pieces without the trainer's word for them
    free(model.data);
}

static void damaged_models_do_no_harm(void **state) {
    (void)state;
    Bytes model;
    assert_true(read_file(DEMO_MODEL, &model));
    uint32_t seed = 5;
    int n_loaded = 0;
    enum { N_ROUNDS = 300 };
    for (int round = 0; round < N_ROUNDS; round++) {
        Bytes damaged = {0};
        add_bytes(&damaged, model.data, model.n);
        for (unsigned n = 1 + next_random(&seed) % 4; n > 0; n--) {
            // Half of the hits at the end, where the settings are.
            const size_t span = next_random(&seed) % 2 ? model.n : 200;
            const size_t at = model.n - 1 - (next_random(&seed) << 8 ^ next_random(&seed)) % span;
            damaged.data[at] = (unsigned char)next_random(&seed);
        }
        n_loaded += survives(damaged.data, damaged.n);
        free(damaged.data);
    }
    assert_in_range(n_loaded, 1, N_ROUNDS - 1);  // both outcomes are met
    free(model.data);
}

static void random_bytes_are_refused(void **state) {
    (void)state;
    uint32_t seed = 6;
    for (int round = 0; round < 2000; round++) {
        unsigned char noise[64];
        for (size_t i = 0; i < sizeof noise; i++) {
            noise[i] = (unsigned char)next_random(&seed);
        }
        assert_false(survives(noise, sizeof noise));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_has_its_vocabulary),
        cmocka_unit_test(llama_encodes_prose_as_the_library),
        cmocka_unit_test(llama_keeps_every_space),
        cmocka_unit_test(llama_encodes_any_script),
        cmocka_unit_test(llama_takes_ill_formed_text_as_the_library_does),
        cmocka_unit_test(llama_keeps_text_that_spells_control_tokens_text),
        cmocka_unit_test(llama_encodes_chat_prompts),
        cmocka_unit_test(llama_encodes_long_text_in_less_than_quadratic_time),
        cmocka_unit_test(llama_decodes_as_the_library),
        cmocka_unit_test(llama_gives_characters_only_whole),
        cmocka_unit_test(encoded_text_comes_back_from_decoding),
        cmocka_unit_test(every_step_of_decoding_gives_well_formed_text),
        cmocka_unit_test(bytes_that_cannot_be_a_character_give_a_replacement_each),
        cmocka_unit_test(ids_out_of_range_give_nothing),
        cmocka_unit_test(the_end_of_decoding_starts_anew),
        cmocka_unit_test(a_text_of_impossible_length_is_refused),
        cmocka_unit_test(free_takes_null),
        cmocka_unit_test(one_leading_space_is_dropped_if_the_model_adds_one),
        cmocka_unit_test(leading_spaces_stay_if_the_model_adds_none),
        cmocka_unit_test(leading_spaces_go_one_per_piece_if_the_model_removes_them),
        cmocka_unit_test(the_unknown_id_prints_what_the_model_says),
        cmocka_unit_test(a_model_without_bos_and_eos_says_so),
        cmocka_unit_test(text_never_becomes_a_control_token),
        cmocka_unit_test(models_that_are_not_models_are_refused),
        cmocka_unit_test(models_with_wrong_special_pieces_are_refused),
        cmocka_unit_test(models_with_wrong_pieces_are_refused),
        cmocka_unit_test(user_defined_pieces_that_overrun_the_library_are_refused),
        cmocka_unit_test(normalization_rules_are_refused),
        cmocka_unit_test(a_model_that_fails_its_own_test_is_refused),
        cmocka_unit_test(truncated_models_do_no_harm),
        cmocka_unit_test(damaged_models_do_no_harm),
        cmocka_unit_test(random_bytes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
