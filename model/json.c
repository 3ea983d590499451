#include "json.h"

#include <string.h>

#include "../tokenizer/utf8.h"

#define MAX_DEPTH 64
#define MAX_NUMBER 63  // characters; cJSON takes no longer ones

/* A key of an object. The scanner says where it stands, cJSON's tree what it spells. */
typedef struct {
    size_t at;
    const cJSON *object;
    const char *text;
} Key;

/* Checks the grammar before cJSON sees the text, so that cJSON has only to build the tree. */
typedef struct {
    const char *text;
    size_t bytes;
    size_t at;
    int depth;
    int flags;
    Key *keys;  // in the order of the text
    size_t n_keys, capacity;
    Error *err;
} Scanner;

static bool fail(Scanner *s, const char *reason) {
    error_set(s->err, ERR_FORMAT, "bad JSON: %s at byte %zu", reason, s->at);
    return false;
}

/* The next byte, -1 at the end. */
static int peek(const Scanner *s) {
    return s->at < s->bytes ? (unsigned char)s->text[s->at] : -1;
}

static bool take(Scanner *s, char c) {
    if (peek(s) != c) {
        return false;
    }
    s->at++;
    return true;
}

static void skip_space(Scanner *s) {
    while (take(s, ' ') || take(s, '\t') || take(s, '\n') || take(s, '\r')) {
    }
}

static bool is_digit(int c) {
    return c >= '0' && c <= '9';
}

static bool scan_digits(Scanner *s) {
    if (!is_digit(peek(s))) {
        return fail(s, "expected a digit");
    }
    while (is_digit(peek(s))) {
        s->at++;
    }
    return true;
}

static bool scan_number(Scanner *s) {
    const size_t start = s->at;
    const bool negative = take(s, '-');
    if (!negative && !is_digit(peek(s))) {
        return fail(s, peek(s) < 0 ? "unexpected end" : "expected a value");
    }
    if (!take(s, '0') && !scan_digits(s)) {
        return false;
    }
    if ((s->flags & JSON_INTEGERS) && (peek(s) == '.' || peek(s) == 'e' || peek(s) == 'E')) {
        return fail(s, "number is not an integer");
    }
    if (take(s, '.') && !scan_digits(s)) {
        return false;
    }
    if (take(s, 'e') || take(s, 'E')) {
        if (!take(s, '+')) {
            take(s, '-');
        }
        if (!scan_digits(s)) {
            return false;
        }
    }
    return s->at - start <= MAX_NUMBER || fail(s, "number is too long");
}

static bool scan_word(Scanner *s, const char *word) {
    const size_t length = strlen(word);
    if (s->bytes - s->at < length || memcmp(s->text + s->at, word, length) != 0) {
        return fail(s, "expected a value");
    }
    s->at += length;
    return true;
}

/* The four hexadecimal digits of \uXXXX. */
static bool scan_hex(Scanner *s, unsigned *unit) {
    *unit = 0;
    for (int i = 0; i < 4; i++) {
        const int c = peek(s);
        const int letter = c | 0x20;
        if (is_digit(c)) {
            *unit = *unit << 4 | (unsigned)(c - '0');
        } else if (letter >= 'a' && letter <= 'f') {
            *unit = *unit << 4 | (unsigned)(letter - 'a' + 10);
        } else {
            return fail(s, "expected a hexadecimal digit");
        }
        s->at++;
    }
    return true;
}

static bool is_high_surrogate(unsigned unit) {
    return unit >= 0xd800 && unit <= 0xdbff;
}
static bool is_low_surrogate(unsigned unit) {
    return unit >= 0xdc00 && unit <= 0xdfff;
}

/* What follows a backslash. */
static bool scan_escape(Scanner *s) {
    if (!take(s, 'u')) {
        const int c = peek(s);
        if (c <= 0 || !strchr("\"\\/bfnrt", c)) {
            return fail(s, "unknown escape");
        }
        s->at++;
        return true;
    }
    unsigned unit, low;
    if (!scan_hex(s, &unit)) {
        return false;
    }
    if (unit == 0) {
        return fail(s, "NUL in a string");  // would cut a C string short
    }
    if (is_high_surrogate(unit)) {
        if (!take(s, '\\') || !take(s, 'u')) {
            return fail(s, "half a surrogate pair");
        }
        return scan_hex(s, &low) && (is_low_surrogate(low) || fail(s, "half a surrogate pair"));
    }
    return !is_low_surrogate(unit) || fail(s, "half a surrogate pair");
}

static bool scan_string(Scanner *s) {
    if (!take(s, '"')) {
        return fail(s, "expected a string");
    }
    while (!take(s, '"')) {
        const int c = peek(s);
        if (c < 0) {
            return fail(s, "string without end");
        }
        if (c < 0x20) {
            return fail(s, "control character in a string");
        }
        s->at++;
        if (c == '\\' && !scan_escape(s)) {
            return false;
        }
    }
    return true;
}

static bool add_key(Scanner *s) {
    if (s->n_keys == s->capacity) {
        const size_t capacity = 2 * s->capacity + 64;
        Key *keys = realloc(s->keys, capacity * sizeof *keys);
        if (!keys) {
            error_set(s->err, ERR_MEMORY, "out of memory for %zu JSON keys", capacity);
            return false;
        }
        s->keys = keys;
        s->capacity = capacity;
    }
    s->keys[s->n_keys++] = (Key){.at = s->at};
    return true;
}

static bool scan_value(Scanner *s);

static bool scan_member(Scanner *s) {
    skip_space(s);
    if (!add_key(s) || !scan_string(s)) {
        return false;
    }
    skip_space(s);
    if (!take(s, ':')) {
        return fail(s, "expected ':'");
    }
    return scan_value(s);
}

/* An object or array, whose opening bracket is next. */
static bool scan_items(Scanner *s, bool (*scan_item)(Scanner *), char close) {
    if (s->depth == MAX_DEPTH) {
        return fail(s, "nested too deep");
    }
    s->depth++;
    s->at++;
    skip_space(s);
    if (peek(s) != close) {
        do {
            if (!scan_item(s)) {
                return false;
            }
            skip_space(s);
        } while (take(s, ','));
    }
    s->depth--;
    return take(s, close) || fail(s, close == '}' ? "expected ',' or '}'" : "expected ',' or ']'");
}

static bool scan_value(Scanner *s) {
    skip_space(s);
    switch (peek(s)) {
    case '{':
        return scan_items(s, scan_member, '}');
    case '[':
        return scan_items(s, scan_value, ']');
    case '"':
        return scan_string(s);
    case 't':
        return scan_word(s, "true");
    case 'f':
        return scan_word(s, "false");
    case 'n':
        return scan_word(s, "null");
    default:
        return scan_number(s);
    }
}

static bool scan_text(Scanner *s) {
    s->at = utf8_check(s->text, s->bytes);
    if (s->at < s->bytes) {
        return fail(s, "invalid UTF-8");
    }
    s->at = 0;
    if (!scan_value(s)) {
        return false;
    }
    skip_space(s);
    return s->at == s->bytes || fail(s, "more text behind the value");
}

/* Fill in the keys below value in the order of the text, in which the scanner met them too. */
static size_t name_keys(Key *keys, size_t n, const cJSON *value) {
    for (const cJSON *item = value->child; item; item = item->next) {
        if (item->string) {
            keys[n].object = value;  // NOLINT(clang-analyzer-core.NullDereference): no keys, no items with names
            keys[n].text = item->string;
            n++;
        }
        n = name_keys(keys, n, item);
    }
    return n;
}

static int compare_keys(const void *a, const void *b) {
    const Key *x = a, *y = b;
    if (x->object != y->object) {
        return (uintptr_t)x->object < (uintptr_t)y->object ? -1 : 1;
    }
    const int order = strcmp(x->text, y->text);
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

static bool keys_are_unique(Scanner *s, const cJSON *root) {
    CHECK(name_keys(s->keys, 0, root) == s->n_keys);
    if (s->n_keys > 0) {
        qsort(s->keys, s->n_keys, sizeof *s->keys, compare_keys);
    }
    for (size_t i = 1; i < s->n_keys; i++) {
        const Key *key = &s->keys[i];
        if (key->object == key[-1].object && strcmp(key->text, key[-1].text) == 0) {
            error_set(s->err, ERR_FORMAT, "bad JSON: key \"%.100s\" again at byte %zu", key->text, key->at);
            return false;
        }
    }
    return true;
}

static void *alloc_or_end(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) {
        fprintf(stderr, "out of memory: %zu bytes for JSON\n", bytes);
        exit(1);
    }
    return p;
}

void json_require_memory(void) { cJSON_InitHooks(&(cJSON_Hooks){alloc_or_end, free}); }

cJSON *json_parse(const char *text, size_t bytes, int flags, Error *err) {
    Scanner s = {.text = text, .bytes = bytes, .flags = flags, .err = err};
    cJSON *root = NULL;
    if (scan_text(&s)) {
        root = cJSON_ParseWithLength(text, bytes);
        if (!root) {
            error_set(err, ERR_MEMORY, "out of memory for %zu bytes of JSON", bytes);
        } else if (!keys_are_unique(&s, root)) {
            cJSON_Delete(root);
            root = NULL;
        }
    }
    free(s.keys);
    return root;
}

const cJSON *json_get(const cJSON *object, const char *key) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsNull(item) ? NULL : item;
}

bool json_u64(const cJSON *item, uint64_t *value) {
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0 && item->valuedouble <= 0x1p53)) {
        return false;
    }
    const uint64_t integer = (uint64_t)item->valuedouble;
    if ((double)integer != item->valuedouble) {
        return false;
    }
    *value = integer;
    return true;
}
