/* tokenizer.h: text to token ids and back, a C API over sentencepiece. Depends on nothing of ours.
 * No exception, abort or C++ type crosses this boundary, whatever the input. */
#ifndef SPDP_TOKENIZER_H
#define SPDP_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct Tokenizer Tokenizer;

/* Where memory is short while the library loads or encodes, the program ends with a line and status 1: protobuf does
 * not survive it. */

/* Load a sentencepiece model (a serialized ModelProto) from memory, which may go away afterwards.
 * On failure returns false, leaves *t untouched and puts one line into error (error_bytes > 0). */
bool tokenizer_load(Tokenizer **t, const void *model, size_t bytes, char *error, size_t error_bytes);
void tokenizer_free(Tokenizer *t);  // NULL is fine

int tokenizer_vocab_size(const Tokenizer *t);
int tokenizer_bos_id(const Tokenizer *t);  // -1: the model has none; the same for the others
int tokenizer_eos_id(const Tokenizer *t);
int tokenizer_unk_id(const Tokenizer *t);

/* Encode length-counted bytes (NUL and invalid UTF-8 allowed) exactly as sentencepiece does. No BOS or EOS
 * is added, and text that spells a control token stays text. *ids is an array of *n ids (NULL when n = 0),
 * released with free(). Returns false when the library refuses; error says why. */
bool tokenizer_encode(const Tokenizer *t, const char *text, size_t bytes, int **ids, size_t *n, char *error,
                      size_t error_bytes);

/* Decoding of a stream of ids, one at a time. The concatenation of what comes out equals sentencepiece's
 * Decode of the whole sequence, but for a BOS in the middle and a character cut off at the end: see below.
 * Zero-initialise. */
typedef struct {
    bool started;             // text has come; before it one leading space is dropped
    unsigned char held[4];    // start of a character whose last bytes have not come
    int n_held;
} DecodeState;

/* What id adds to the text, once whole characters are there: bytes written to out, which has room for
 * TOKENIZER_MAX_PIECE. BOS restarts the text (drops the next leading space), control ids give nothing of
 * their own, ids out of range give nothing. Bytes that cannot be part of a character, also because an id
 * that is not a byte follows them, give U+FFFD each, as in the library. */
#define TOKENIZER_MAX_PIECE 4096
size_t tokenizer_decode(const Tokenizer *t, DecodeState *state, int id, char *out);

/* End of the stream: a character that was begun and not finished gives one U+FFFD. Resets state. */
size_t tokenizer_decode_end(DecodeState *state, char *out);

#ifdef __cplusplus
}
#endif
#endif
