/* fuzz_tokenizer.c: text of any bytes, and ids of any value (tokenizer/tokenizer.h). The first byte of the
 * input says which. Runs from the root of the repository, whose demo tokenizer it loads. */
#include "../../tokenizer/utf8.h"
#include "fuzz.h"

typedef struct {
    char *bytes;
    size_t n, capacity;
} Text;

/* What one call gives is whole characters. `out` has exactly the room that was promised. */
static void append(Text *text, const char *out, size_t n) {
    CHECK(n <= TOKENIZER_MAX_PIECE && utf8_check(out, n) == n);
    if (text->n + n > text->capacity) {
        text->capacity = 2 * (text->n + n);
        text->bytes = realloc(text->bytes, text->capacity);
        CHECK(text->bytes);
    }
    if (n > 0) {
        memcpy(text->bytes + text->n, out, n);
    }
    text->n += n;
}

static Text decode(const int *ids, size_t n) {
    Text text = {0};
    DecodeState state = {0};
    char *out = malloc(TOKENIZER_MAX_PIECE);
    CHECK(out);
    for (size_t i = 0; i < n; i++) {
        append(&text, out, tokenizer_decode(demo_tokenizer(), &state, ids[i], out));
    }
    append(&text, out, tokenizer_decode_end(&state, out));
    free(out);
    return text;
}

/* Text that decoding gives back: well-formed, and without the symbol that stands for a space. */
static bool comes_back(const char *text, size_t n) {
    return utf8_check(text, n) == n && !memmem(text, n, "\xe2\x96\x81", 3);
}

static void encode_and_decode(const char *text, size_t n) {
    int *ids;
    size_t n_ids;
    char error[200];
    if (!tokenizer_encode(demo_tokenizer(), text, n, &ids, &n_ids, error, sizeof error)) {
        CHECK(strlen(error) > 0);
        return;
    }
    for (size_t i = 0; i < n_ids; i++) {
        CHECK(ids[i] >= 0 && ids[i] < tokenizer_vocab_size(demo_tokenizer()));
    }
    Text back = decode(ids, n_ids);
    if (comes_back(text, n)) {
        CHECK(back.n == n && (n == 0 || memcmp(back.bytes, text, n) == 0));
    }
    free(back.bytes);
    free(ids);
}

/* Ids of `width` bytes; those of two bytes reach from a little below 0 to a little above the vocabulary. */
static void decode_ids(const uint8_t *data, size_t size, size_t width) {
    const size_t n = size / width;
    int *ids = malloc((n + 1) * sizeof *ids);
    CHECK(ids);
    for (size_t i = 0; i < n; i++) {
        ids[i] = 0;
        memcpy(&ids[i], data + i * width, width);
        if (width == 2) {
            ids[i] = ids[i] % (tokenizer_vocab_size(demo_tokenizer()) + 8) - 4;
        }
    }
    free(decode(ids, n).bytes);
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) {
        return 0;
    }
    if (data[0] == '2' || data[0] == '4') {
        decode_ids(data + 1, size - 1, data[0] == '2' ? 2 : 4);
        return 0;
    }
    char *text = exact_copy(data + 1, size - 1);
    encode_and_decode(text, size - 1);
    free(text);
    return 0;
}
