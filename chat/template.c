#include "template.h"

#include <ctype.h>
#include <string.h>

static const char *const names[N_TEMPLATES] = {"llama2", "zephyr", "plain", "none"};

const char *template_name(TemplateKind kind) { return names[kind]; }

int template_parse(TemplateKind *kind, const char *option, const char *name, Error *err) {
    for (int i = 0; i < N_TEMPLATES; i++) {
        if (strcmp(name, names[i]) == 0) {
            *kind = (TemplateKind)i;
            return OK;
        }
    }
    return error_set(err, ERR_USAGE, "%s %.50s: not llama2, zephyr, plain or none", option, name);
}

bool template_has_system(TemplateKind kind) { return kind != TEMPLATE_NONE; }

bool template_restarts_text(TemplateKind kind) { return kind == TEMPLATE_LLAMA2; }

/* ---- ids ---- */

static int append(Ids *ids, const int *more, size_t n, Error *err) {
    int *grown = realloc(ids->ids, (ids->n + n + 1) * sizeof *grown);
    if (!grown) {
        return error_set(err, ERR_MEMORY, "no memory for %zu ids", ids->n + n);
    }
    if (n > 0) {
        memcpy(grown + ids->n, more, n * sizeof *more);
    }
    *ids = (Ids){grown, ids->n + n};
    return OK;
}

int ids_append(Ids *ids, int id, Error *err) { return append(ids, &id, id >= 0, err); }

static int append_text(Ids *ids, const Template *t, const char *text, Error *err) {
    int *more = NULL;
    size_t n = 0;
    char reason[200];
    if (!tokenizer_encode(t->tokenizer, text, strlen(text), &more, &n, reason, sizeof reason)) {
        return error_set(err, ERR_FORMAT, "the text cannot be encoded: %s", reason);
    }
    const int rc = append(ids, more, n, err);
    free(more);
    return rc;
}

/* The strings of a list that ends with NULL in one piece, for no text may be encoded in pieces. */
static int append_joined(Ids *ids, const Template *t, const char *const *parts, Error *err) {
    size_t length = 0;
    for (const char *const *p = parts; *p; p++) {
        length += strlen(*p);
    }
    char *text = malloc(length + 1), *end = text;
    if (!text) {
        return error_set(err, ERR_MEMORY, "no memory for a text of %zu bytes", length);
    }
    *end = 0;
    for (const char *const *p = parts; *p; p++) {
        end = stpcpy(end, *p);
    }
    const int rc = append_text(ids, t, text, err);
    free(text);
    return rc;
}

/* A copy without white space at both ends. NULL when memory is short. */
static char *stripped(const char *text) {
    while (isspace((unsigned char)*text)) {
        text++;
    }
    size_t n = strlen(text);
    while (n > 0 && isspace((unsigned char)text[n - 1])) {
        n--;
    }
    return strndup(text, n);
}

/* ---- the templates ---- */

static int llama2(Ids *ids, const Template *t, const char *system, const char *question, const char *answer,
                  Error *err) {
    char *q = stripped(question), *a = stripped(answer ? answer : "");
    int rc = q && a ? ids_append(ids, t->bos_id, err) : error_set(err, ERR_MEMORY, "no memory for a turn");
    if (!rc) {
        const bool has_system = system && *system;
        const char *space = answer ? " " : "";
        const char *const text[] = {
            "[INST] ", has_system ? "<<SYS>>\n" : "", has_system ? system : "",
            has_system ? "\n<</SYS>>\n\n" : "", q, " [/INST]", space, a, space, NULL,
        };
        rc = append_joined(ids, t, text, err);
    }
    free(q);
    free(a);
    return rc;
}

/* Text after an EOS is a piece of its own, as it is for whoever trained with EOS as a token. */
static int zephyr(Ids *ids, const Template *t, const char *system, const char *question, const char *answer,
                  bool first, Error *err) {
    int rc = first ? ids_append(ids, t->bos_id, err) : OK;
    const bool has_system = system && *system;
    if (!rc && has_system) {
        rc = append_joined(ids, t, (const char *const[]){"<|system|>\n", system, NULL}, err);
        rc = rc ? rc : ids_append(ids, t->eos_id, err);
    }
    const char *newline = first && !has_system ? "" : "\n";
    rc = rc ? rc : append_joined(ids, t, (const char *const[]){newline, "<|user|>\n", question, NULL}, err);
    rc = rc ? rc : ids_append(ids, t->eos_id, err);
    const char *const last[] = {"\n<|assistant|>\n", answer ? answer : "", NULL};
    return rc ? rc : append_joined(ids, t, last, err);
}

static int running_text(Ids *ids, const Template *t, const char *system, const char *question, const char *answer,
                        bool first, Error *err) {
    const char *newline = t->kind == TEMPLATE_PLAIN ? "\n" : "";
    const bool has_system = system && *system;
    const char *const text[] = {
        first ? "" : newline, has_system ? system : "",
        has_system ? newline : "", question,
        answer ? answer : "", NULL,
    };
    const int rc = first ? ids_append(ids, t->bos_id, err) : OK;
    return rc ? rc : append_joined(ids, t, text, err);
}

int template_turn(Ids *ids, const Template *t, const char *system, const char *question, const char *answer,
                  bool first, Error *err) {
    const size_t before = ids->n;
    int rc = t->kind == TEMPLATE_LLAMA2   ? llama2(ids, t, system, question, answer, err)
             : t->kind == TEMPLATE_ZEPHYR ? zephyr(ids, t, system, question, answer, first, err)
                                          : running_text(ids, t, system, question, answer, first, err);
    rc = rc || !answer ? rc : template_close(ids, t, err);
    ids->n = rc ? before : ids->n;
    return rc;
}

int template_close(Ids *ids, const Template *t, Error *err) {
    const bool closes = t->kind == TEMPLATE_LLAMA2 || t->kind == TEMPLATE_ZEPHYR;
    return closes ? ids_append(ids, t->eos_id, err) : OK;
}
