#include "score.h"

#include <math.h>
#include <string.h>

#include "perplexity.h"

/* ---- while generating ---- */

/* Put a token where it belongs among the best n_top so far, of which the last may fall out. Ids come in
 * ascending order, so that a later one stands behind its equals. */
static int insert(TokenLogprob *top, int n_top, int k, TokenLogprob token) {
    int at = n_top;
    while (at > 0 && top[at - 1].logprob < token.logprob) {
        at--;
    }
    if (at == k) {
        return n_top;
    }
    n_top += n_top < k;
    memmove(top + at + 1, top + at, (size_t)(n_top - at - 1) * sizeof *top);
    top[at] = token;
    return n_top;
}

int top_logprobs(TokenLogprob top[MAX_LOGPROBS], int k, const float *logits, int n) {
    CHECK(k >= 1 && k <= MAX_LOGPROBS && n >= 1);
    int n_top = 0;
    for (int i = 0; i < n; i++) {
        if (n_top < k || (double)logits[i] > top[n_top - 1].logprob) {
            n_top = insert(top, n_top, k, (TokenLogprob){i, (double)logits[i]});
        }
    }
    // One sum serves all: log-probabilities differ as the logits do.
    const double best = top[0].logprob, best_logprob = -negative_log_likelihood(logits, (size_t)n, top[0].id);
    for (int i = 0; i < n_top; i++) {
        top[i].logprob = best_logprob + (top[i].logprob - best);
    }
    return isfinite(best_logprob) ? n_top : 0;
}

/* Room for one more entry, and for a row of logits. */
static bool make_room(Logprobs *l, size_t vocab) {
    if (!l->logits && !(l->logits = memory_alloc(vocab * sizeof *l->logits))) {
        return false;
    }
    if (l->n < l->capacity) {
        return true;
    }
    const size_t capacity = l->capacity ? 2 * l->capacity : 64;
    LogprobEntry *grown = realloc(l->entries, capacity * sizeof *grown);
    if (!grown) {
        return false;
    }
    l->entries = grown;
    l->capacity = capacity;
    return true;
}

int logprobs_add(Logprobs *l, const Model *m, int id, Error *err) {
    const size_t vocab = (size_t)m->config.vocab_size;
    if (!make_room(l, vocab)) {
        return error_set(err, ERR_MEMORY, "no memory for the log-probabilities of %zu tokens", l->n + 1);
    }
    m->be->read(m->be, l->logits, m->state.logits, vocab * sizeof *l->logits);
    LogprobEntry *e = &l->entries[l->n];
    e->n_top = top_logprobs(e->top, l->k, l->logits, m->config.vocab_size);
    if (e->n_top == 0) {
        return logit_fault(err);
    }
    e->chosen =
        (TokenLogprob){id, e->top[0].logprob + ((double)l->logits[id] - (double)l->logits[e->top[0].id])};
    l->n++;
    return OK;
}

void logprobs_free(Logprobs *l) {
    free(l->entries);
    free(l->logits);
    *l = (Logprobs){0};
}

/* ---- items ---- */

static int missing(const char *key, const char *what, Error *err) {
    return error_set(err, ERR_FORMAT, "\"%s\" is not %s, or missing", key, what);
}

/* Both texts in one. */
static int read_text(ScoreItem *item, const cJSON *object, Error *err) {
    const char *context = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, "context"));
    const char *continuation = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, "continuation"));
    if (!context || !continuation) {
        return missing(context ? "continuation" : "context", "a string", err);
    }
    const size_t before = strlen(context), after = strlen(continuation);
    char *text = malloc(before + after + 1);
    if (!text) {
        return error_set(err, ERR_MEMORY, "no memory for a text of %zu bytes", before + after);
    }
    memcpy(text, context, before);
    memcpy(text + before, continuation, after + 1);
    item->text = (Bytes){text, before + after};
    item->context_bytes = before;
    item->continuation_bytes = after;
    while (item->context_bytes > 0 && strchr(" \t\n\v\f\r", text[item->context_bytes - 1])) {
        item->context_bytes--;
    }
    return OK;
}

static int append_ids(Ids *ids, const cJSON *array, const char *key, int vocab, Error *err) {
    const cJSON *number;
    cJSON_ArrayForEach(number, array) {
        const double id = number->valuedouble;
        if (!cJSON_IsNumber(number) || !(id >= 0 && id < vocab) || id != floor(id)) {
            return error_set(err, ERR_FORMAT,
                             "\"%s\" has something that is not an id of the vocabulary of %d", key, vocab);
        }
        ids->ids[ids->n++] = (int)id;
    }
    return OK;
}

static int read_ids(ScoreItem *item, const cJSON *object, int vocab, Error *err) {
    const cJSON *context = cJSON_GetObjectItemCaseSensitive(object, "context");
    const cJSON *continuation = cJSON_GetObjectItemCaseSensitive(object, "continuation");
    if (!cJSON_IsArray(context) || !cJSON_IsArray(continuation)) {
        return missing(cJSON_IsArray(context) ? "continuation" : "context", "an array of ids", err);
    }
    const size_t n = (size_t)cJSON_GetArraySize(context) + (size_t)cJSON_GetArraySize(continuation);
    item->ids.ids = memory_alloc(n * sizeof *item->ids.ids);
    if (!item->ids.ids) {
        return error_set(err, ERR_MEMORY, "no memory for %zu ids", n);
    }
    int rc = append_ids(&item->ids, context, "context", vocab, err);
    item->n_context = item->ids.n;
    rc = rc ? rc : append_ids(&item->ids, continuation, "continuation", vocab, err);
    return rc;
}

int score_item_read(ScoreItem *item, const cJSON *object, bool ids, int vocab, Error *err) {
    ScoreItem read = {0};
    const int rc = ids ? read_ids(&read, object, vocab, err) : read_text(&read, object, err);
    if (rc) {
        score_item_free(&read);
        return rc;
    }
    *item = read;
    return OK;
}

void score_item_free(ScoreItem *item) {
    free(item->text.data);
    free(item->ids.ids);
    *item = (ScoreItem){0};
}

/* ---- scores ---- */

/* Decode ids[begin .. begin + rows - 1] and score the ids that follow each of them. */
static int score_rows(Score *s, Model *m, float *logits, const int *ids, int begin, int rows, Error *err) {
    const size_t vocab = (size_t)m->config.vocab_size;
    model_forward(m, ids + begin, rows, begin, DECODE);
    const int rc = m->be->finish(m->be, err);
    if (rc) {
        return rc;
    }
    m->be->read(m->be, logits, m->state.logits, (size_t)rows * vocab * sizeof *logits);
    for (int i = 0; i < rows; i++) {
        const float *row = logits + (size_t)i * vocab;
        const int id = ids[begin + i + 1];
        TokenLogprob best[MAX_LOGPROBS];
        if (top_logprobs(best, 1, row, m->config.vocab_size) == 0) {
            return error_set(err, ERR_NUMBER, "logits at position %d are not finite", begin + i);
        }
        s->logprob -= negative_log_likelihood(row, vocab, id);
        s->greedy &= best[0].id == id;
    }
    return OK;
}

int score_continuation(Score *score, Model *m, const int *ids, size_t n, size_t n_context, Error *err) {
    CHECK(m->logit_rows == m->chunk);
    const size_t room = (size_t)m->seq_len + 1;  // the last id is not fed
    const size_t dropped = n > room ? n - room : 0;
    if (n_context == 0) {
        return error_set(err, ERR_USAGE, "the context is empty");
    }
    if (n <= n_context) {
        return error_set(err, ERR_USAGE, "the continuation adds no token to the context");
    }
    if (dropped >= n_context) {
        return error_set(err, ERR_USAGE,
                         "the continuation has %zu tokens, which do not fit in the context of %d",
                         n - n_context, m->seq_len);
    }
    ids += dropped;
    const int fed = (int)(n - dropped) - 1, prefix = (int)(n_context - dropped) - 1;
    const int most = fed - prefix < m->chunk ? fed - prefix : m->chunk;
    float *logits = memory_alloc((size_t)most * (size_t)m->config.vocab_size * sizeof *logits);
    Score s = {.n_tokens = n - n_context, .greedy = true, .cut = dropped > 0};
    int rc = logits ? model_prefill(m, ids, prefix, 0, err)
                    : error_set(err, ERR_MEMORY, "no memory for the logits of %d tokens", most);
    for (int begin = prefix; begin < fed && !rc; begin += most) {
        rc = score_rows(&s, m, logits, ids, begin, fed - begin < most ? fed - begin : most, err);
    }
    free(logits);
    if (!rc) {
        *score = s;
    }
    return rc;
}
