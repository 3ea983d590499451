/* chat.h: a conversation with a model on standard input and output. */
#ifndef SPDP_CHAT_H
#define SPDP_CHAT_H

#include "../model/generate.h"
#include "template.h"

typedef struct {
    TemplateKind format;
    const char *system;       // NULL: none
    GenerateParams generate;  // of each answer; the seed goes up by one from answer to answer
    const char *const *stops;
    size_t n_stops;
    bool stats;  // figures after each answer
    bool quiet;  // no notes
} ChatOptions;

/* The template that the converter found to be the model's, if it found one. Returns 0 or ERR_MEMORY. */
int chat_template_of(TemplateKind *kind, bool *found, const Checkpoint *ck, Error *err);

/* Answer the messages of standard input until it ends. Standard output gets the answers, each followed by a
 * newline; prompts and notes go to stderr. SIGINT ends an answer; outside of one it ends the input from a
 * terminal and does elsewhere what it did before.
 * Returns 0, ERR_USAGE (system prompt and template do not go together), ERR_WRITE or what else ends a
 * conversation; what a message is to blame for is told to its author. */
int chat_run(Model *m, const Tokenizer *tokenizer, const ChatOptions *options, Error *err);

#endif
