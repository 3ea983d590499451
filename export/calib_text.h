/* calib_text.h: the token sequences that pruning is calibrated on. */
#ifndef SPDP_CALIB_TEXT_H
#define SPDP_CALIB_TEXT_H

#include "../model/config.h"
#include "../tokenizer/tokenizer.h"

#define CALIB_MIN_TOKENS 1000
#define CALIB_DEFAULT_SEQUENCES 128

/* Sequence i is ids[i * length .. ]; all are length long but perhaps the last. Each begins with BOS, where the model
 * has one. */
typedef struct {
    int *ids;
    size_t n;       // tokens in all, BOS included
    size_t length;
    char name[256]; // where they come from, for people and provenance
} CalibText;

typedef struct {
    size_t max_tokens;  // 0 = CALIB_DEFAULT_SEQUENCES * length
    size_t length;      // of a sequence; 0 = min(context, 2048)
    bool quiet;         // no warnings on stderr
} CalibParams;

/* Read and cut a calibration text. By the end of its name a file is token ids (.tok: u16, u32 if the vocabulary exceeds
 * 65536), documents as JSON lines, each an object with "text" (.jsonl), or plain text. Documents are joined, each
 * after a BOS, and cut into sequences. A text that is too short is used as a whole, with a warning.
 *   path       NULL = the text that ships with the project
 *   tokenizer  NULL is fine for .tok
 *   config     BOS, vocabulary and context of the model
 * Returns 0, ERR_OPEN, ERR_FORMAT, ERR_USAGE (fewer than CALIB_MIN_TOKENS tokens, no tokenizer, a length over the
 * context or below 2) or ERR_MEMORY. */
int calib_text_load(CalibText *text, const char *path, const Tokenizer *tokenizer, const Config *config,
                    const CalibParams *params, Error *err);

/* Random ids, for random weights; params and errors as above. */
int calib_text_random(CalibText *text, const Config *config, const CalibParams *params, uint64_t seed, Error *err);

void calib_text_free(CalibText *text);

static inline size_t calib_text_sequences(const CalibText *text) { return ceil_div(text->n, text->length); }

/* The shipped text, from the program's own memory. */
const char *calibration_text(size_t *bytes);

#endif
