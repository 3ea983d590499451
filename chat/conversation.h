/* conversation.h: what was said so far, as text and as the ids that the model has seen. */
#ifndef SPDP_CONVERSATION_H
#define SPDP_CONVERSATION_H

#include "template.h"

typedef struct {
    char *question, *answer;  // answer is NULL while it is being generated
} Turn;

typedef struct {
    Template format;
    char *system;  // NULL: none
    Turn *turns;
    size_t n_turns;
    Ids ids;        // the conversation for the model, what it was told and what it generated; before the first
                    // turn: whatever the cache is of
    size_t cached;  // of these the KV cache holds the first so many
    size_t asked;   // where the ids of the last turn begin
} Conversation;

void conversation_free(Conversation *c);

/* A new conversation with a system prompt (NULL or empty: none).
 * Returns 0, ERR_USAGE (the template has no place for one) or ERR_MEMORY; on failure c is as it was. */
int conversation_start(Conversation *c, const char *system, Error *err);

/* Add a question, so that the ids end where its answer begins and at least one of them is not cached. Where they
 * and reserve more ids (>= 1) do not fit into context, the oldest turns are dropped, *dropped of them, and the
 * rest is encoded anew; the system prompt stays. For a question that stands alone, one id of room is enough.
 * Returns 0, ERR_USAGE (it does not fit even so), ERR_FORMAT or ERR_MEMORY; on failure c is as it was. */
int conversation_ask(Conversation *c, const char *question, size_t context, size_t reserve, size_t *dropped,
                     Error *err);

/* Add the answer to what was asked.
 *   text       copied
 *   generated  its ids; NULL: text is not what these say, so it is encoded
 *   cached     positions that the KV cache holds now
 * Returns 0, ERR_FORMAT or ERR_MEMORY. */
int conversation_answer(Conversation *c, const char *text, const Ids *generated, size_t cached, Error *err);

/* One JSON object a line, {"role":"system|user|assistant","content":"..."}. Loading encodes the text anew.
 * Return 0, ERR_OPEN, ERR_WRITE, ERR_FORMAT (names the line), ERR_USAGE or ERR_MEMORY; on failure c is as it
 * was. */
int conversation_save(const Conversation *c, const char *path, Error *err);
int conversation_load(Conversation *c, const char *path, Error *err);

#endif
