/* template.h: how a conversation becomes the token ids that a model was taught to answer. */
#ifndef SPDP_TEMPLATE_H
#define SPDP_TEMPLATE_H

#include "../model/input.h"
#include "../tokenizer/tokenizer.h"

typedef enum {
    TEMPLATE_LLAMA2,  // [INST] question [/INST] answer, each turn between BOS and EOS
    TEMPLATE_ZEPHYR,  // <|user|>, <|assistant|> on lines of their own, each message ended by EOS
    TEMPLATE_PLAIN,   // one text that goes on, each question on a line of its own: for models without tuning
    TEMPLATE_NONE,    // the same with nothing added at all
    N_TEMPLATES,
} TemplateKind;

/* What a question is written with. */
typedef struct {
    TemplateKind kind;
    const Tokenizer *tokenizer;
    int bos_id, eos_id;  // -1: the model has none
} Template;

/* "llama2", "zephyr", "plain", "none". template_parse() returns 0 or ERR_USAGE, with option in front. */
const char *template_name(TemplateKind kind);
int template_parse(TemplateKind *kind, const char *option, const char *name, Error *err);

/* Is there a place for a system prompt? */
bool template_has_system(TemplateKind kind);

/* Does the answer begin a text of its own, so that a space at its start is the tokenizer's doing? */
bool template_restarts_text(TemplateKind kind);

/* Append one turn to ids.
 *   system    goes before the question; NULL or empty: none, and so after the first turn
 *   answer    NULL: the ids end where an answer begins; else they include it and what closes it
 *   first     is nothing before it?
 * What the strings spell stays text, "<s>" and "</s>" too. Returns 0, ERR_FORMAT or ERR_MEMORY, which leave ids as
 * it was. */
int template_turn(Ids *ids, const Template *t, const char *system, const char *question, const char *answer,
                  bool first, Error *err);

/* Append what closes an answer that was generated. Returns 0 or ERR_MEMORY. */
int template_close(Ids *ids, const Template *t, Error *err);

/* Append one id, unless it is -1. Returns 0 or ERR_MEMORY. */
int ids_append(Ids *ids, int id, Error *err);

#endif
