#include "calib_text.h"

#include <string.h>

#include "../model/input.h"
#include "../model/json.h"
#include "../model/synthetic.h"

#define BLOCK_BYTES 65536  // of text that is given to the tokenizer at once

/* The sequences while they grow. */
typedef struct {
    CalibText text;
    size_t wanted, room;  // tokens
    int bos_id;           // -1: none
} Cut;

static bool is_full(const Cut *c) { return c->text.n == c->wanted; }

static void put(Cut *c, int id) {
    if (!is_full(c)) {
        c->text.ids[c->text.n++] = id;
    }
}

/* Room for n more tokens and a BOS in front of each, as far as they are wanted. */
static bool reserve(Cut *c, size_t n) {
    const size_t need = c->text.n + min_size(2 * n, c->wanted - c->text.n);
    if (need > c->room) {
        int *grown = realloc(c->text.ids, 2 * need * sizeof *grown);
        if (!grown) {
            return false;
        }
        c->text.ids = grown;
        c->room = 2 * need;
    }
    return true;
}

/* Add ids to the sequences, a BOS in front of each that begins. */
static int add(Cut *c, const int *ids, size_t n, Error *err) {
    if (!reserve(c, n)) {
        return error_set(err, ERR_MEMORY, "no memory for more than %zu calibration tokens", c->text.n);
    }
    for (size_t i = 0; i < n; i++) {
        if (c->text.n % c->text.length == 0 && c->bos_id >= 0 && ids[i] != c->bos_id) {
            put(c, c->bos_id);
        }
        put(c, ids[i]);
    }
    return OK;
}

/* Bytes of the next block: up to its last line end where it has one, so that few words are cut. */
static size_t block_bytes(const char *text, size_t n) {
    if (n <= BLOCK_BYTES) {
        return n;
    }
    const char *line_end = memrchr(text, '\n', BLOCK_BYTES);
    return line_end ? (size_t)(line_end - text) + 1 : BLOCK_BYTES;
}

/* Tokenise a document as far as it is needed. */
static int add_document(Cut *c, const Tokenizer *tokenizer, const char *text, size_t n, Error *err) {
    int rc = c->bos_id >= 0 && n > 0 ? add(c, &c->bos_id, 1, err) : OK;
    while (!rc && n > 0 && !is_full(c)) {
        const size_t block = block_bytes(text, n);
        int *ids;
        size_t n_ids;
        char reason[200];
        if (!tokenizer_encode(tokenizer, text, block, &ids, &n_ids, reason, sizeof reason)) {
            return error_set(err, ERR_FORMAT, "%s", reason);
        }
        rc = add(c, ids, n_ids, err);
        free(ids);
        text += block;
        n -= block;
    }
    return rc;
}

/* One line of JSON: an object with a string "text". */
static int add_json_line(Cut *c, const Tokenizer *tokenizer, const char *line, size_t n, Error *err) {
    cJSON *json = json_parse(line, n, 0, err);
    if (!json) {
        return ERR_FORMAT;
    }
    const cJSON *text = cJSON_IsObject(json) ? json_get(json, "text") : NULL;
    const int rc = text && cJSON_IsString(text)
                       ? add_document(c, tokenizer, text->valuestring, strlen(text->valuestring), err)
                       : error_set(err, ERR_FORMAT, "is not an object with a string \"text\"");
    cJSON_Delete(json);
    return rc;
}

static int add_json_lines(Cut *c, const Tokenizer *tokenizer, const Bytes *file, Error *err) {
    const char *at = file->data, *end = file->data + file->n;
    for (size_t number = 1; at < end && !is_full(c); number++) {
        const char *line_end = memchr(at, '\n', (size_t)(end - at));
        const size_t n = (size_t)((line_end ? line_end : end) - at);
        const bool blank = n == 0 || (n == 1 && *at == '\r');
        if (!blank && add_json_line(c, tokenizer, at, n, err)) {
            char where[32];
            snprintf(where, sizeof where, "line %zu", number);
            error_prefix(err, where);
            return ERR_FORMAT;
        }
        at += n + 1;
    }
    return OK;
}

static int add_ids(Cut *c, const Bytes *file, int vocab, Error *err) {
    Ids ids;
    int rc = ids_from_raw(&ids, file, "token ids", vocab, err);
    if (!rc) {
        rc = add(c, ids.ids, ids.n, err);
        free(ids.ids);
    }
    return rc;
}

static bool ends_with(const char *name, const char *end) {
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

static int add_file(Cut *c, const char *path, const Tokenizer *tokenizer, int vocab, Error *err) {
    Bytes file;
    int rc = input_read_file(&file, path, err);
    if (rc) {
        return rc;
    }
    if (ends_with(path, ".tok")) {
        rc = add_ids(c, &file, vocab, err);
    } else if (!tokenizer) {
        rc = error_set(err, ERR_USAGE, "a model without tokenizer is calibrated on token ids (a file named .tok)");
    } else if (ends_with(path, ".jsonl")) {
        rc = add_json_lines(c, tokenizer, &file, err);
    } else {
        rc = add_document(c, tokenizer, file.data, file.n, err);
    }
    free(file.data);
    if (rc) {
        error_prefix(err, path);
    }
    return rc;
}

static int add_shipped(Cut *c, const Tokenizer *tokenizer, Error *err) {
    size_t n;
    const char *text = calibration_text(&n);
    return tokenizer ? add_document(c, tokenizer, text, n, err)
                     : error_set(err, ERR_USAGE,
                                 "the calibration text that ships with the project needs a tokenizer; name token ids "
                                 "with --calib FILE.tok");
}

/* Sizes filled in and checked, and room for the tokens. */
static int begin(Cut *c, const Config *config, const CalibParams *params, const char *name, Error *err) {
    *c = (Cut){0};
    const size_t context = (size_t)config->seq_len;
    const size_t length = params->length ? params->length : min_size(context, 2048);
    if (length < 2 || length > context) {
        return error_set(err, ERR_USAGE, "calibration sequences of %zu tokens: not in 2 .. the context, %zu", length,
                         context);
    }
    *c = (Cut){
        .text.length = length,
        .wanted = params->max_tokens ? params->max_tokens : CALIB_DEFAULT_SEQUENCES * length,
        .bos_id = config->bos_id,
    };
    snprintf(c->text.name, sizeof c->text.name, "%s", name);
    return OK;
}

/* Enough? Then the text is the caller's. */
static int finish(CalibText *text, Cut *c, bool warn, Error *err) {
    const size_t n = c->text.n;
    if (n < CALIB_MIN_TOKENS) {
        error_set(err, ERR_USAGE, "%zu tokens from %.200s are too few to calibrate on (%d is the least)", n,
                  c->text.name, CALIB_MIN_TOKENS);
        calib_text_free(&c->text);
        return ERR_USAGE;
    }
    if (n < c->wanted && warn) {
        fprintf(stderr, "warning    calibration text %s has %zu tokens, %zu were asked for: all of it is used\n",
                c->text.name, n, c->wanted);
    }
    *text = c->text;
    return OK;
}

int calib_text_load(CalibText *text, const char *path, const Tokenizer *tokenizer, const Config *config,
                    const CalibParams *params, Error *err) {
    Cut c;
    int rc = begin(&c, config, params, path ? path : "the shipped text", err);
    if (rc) {
        return rc;
    }
    rc = path ? add_file(&c, path, tokenizer, config->vocab_size, err) : add_shipped(&c, tokenizer, err);
    if (rc) {
        calib_text_free(&c.text);
        return rc;
    }
    return finish(text, &c, (path || params->max_tokens) && !params->quiet, err);
}

int calib_text_random(CalibText *text, const Config *config, const CalibParams *params, uint64_t seed, Error *err) {
    Cut c;
    int rc = begin(&c, config, params, "random ids", err);
    while (!rc && !is_full(&c)) {
        const int id = random_id(&seed, config->vocab_size);
        rc = add(&c, &id, 1, err);
    }
    if (rc) {
        calib_text_free(&c.text);
        return rc;
    }
    return finish(text, &c, false, err);
}

void calib_text_free(CalibText *text) {
    free(text->ids);
    *text = (CalibText){0};
}
