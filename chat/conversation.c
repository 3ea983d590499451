#include "conversation.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void free_turn(Turn *turn) {
    free(turn->question);
    free(turn->answer);
}

void conversation_free(Conversation *c) {
    for (size_t i = 0; i < c->n_turns; i++) {
        free_turn(&c->turns[i]);
    }
    free(c->turns);
    free(c->system);
    free(c->ids.ids);
    *c = (Conversation){0};
}

/* Other ids for the conversation. What the cache holds of the old ones serves as far as the new are the same. */
static void replace_ids(Conversation *c, Ids ids) {
    size_t same = 0;
    while (same < c->cached && same < ids.n && ids.ids[same] == c->ids.ids[same]) {
        same++;
    }
    free(c->ids.ids);
    c->ids = ids;
    c->cached = same;
}

int conversation_start(Conversation *c, const char *system, Error *err) {
    Conversation new = {.format = c->format, .ids = c->ids, .cached = c->cached};
    if (system && *system) {
        if (!template_has_system(c->format.kind)) {
            return error_set(err, ERR_USAGE, "the template %s has no place for a system prompt",
                             template_name(c->format.kind));
        }
        new.system = strdup(system);
        if (!new.system) {
            return error_set(err, ERR_MEMORY, "no memory for the system prompt");
        }
    }
    c->ids = (Ids){0};
    conversation_free(c);
    *c = new;
    return OK;
}

static const char *system_before(const Conversation *c, bool first) { return first ? c->system : NULL; }

/* The turns from one on, all of them answered, encoded anew. */
static int encode_turns(Ids *ids, const Conversation *c, size_t from, Error *err) {
    int rc = OK;
    for (size_t i = from; i < c->n_turns && !rc; i++) {
        const Turn *turn = &c->turns[i];
        const bool first = i == from;
        rc = template_turn(ids, &c->format, system_before(c, first), turn->question, turn->answer, first, err);
    }
    return rc;
}

/* The first n of some ids. */
static int copy_ids(Ids *copy, const Ids *ids, size_t n, Error *err) {
    *copy = (Ids){memory_alloc(n * sizeof *copy->ids), n};
    if (!copy->ids) {
        return error_set(err, ERR_MEMORY, "no memory for %zu ids", n);
    }
    if (n > 0) {
        memcpy(copy->ids, ids->ids, n * sizeof *copy->ids);
    }
    return OK;
}

/* The ids for a question that follows the turns from drop on; it begins at *start. */
static int encode_question(Ids *ids, size_t *start, const Conversation *c, const char *question, size_t drop,
                           Error *err) {
    const bool first = drop == c->n_turns;
    *ids = (Ids){0};
    int rc = first || drop > 0 ? encode_turns(ids, c, drop, err) : copy_ids(ids, &c->ids, c->ids.n, err);
    *start = ids->n;
    rc = rc ? rc : template_turn(ids, &c->format, system_before(c, first), question, NULL, first, err);
    if (rc) {
        free(ids->ids);
        *ids = (Ids){0};
    }
    return rc;
}

static void drop_turns(Conversation *c, size_t n) {
    for (size_t i = 0; i < n; i++) {
        free_turn(&c->turns[i]);
    }
    c->n_turns -= n;
    memmove(c->turns, c->turns + n, c->n_turns * sizeof *c->turns);
}

/* Room for one more turn, which holds a copy of question. */
static int add_turn(Conversation *c, const char *question, Error *err) {
    Turn *grown = realloc(c->turns, (c->n_turns + 1) * sizeof *grown);
    c->turns = grown ? grown : c->turns;
    char *copy = grown ? strdup(question) : NULL;
    if (!copy) {
        return error_set(err, ERR_MEMORY, "no memory for a message");
    }
    c->turns[c->n_turns++] = (Turn){.question = copy};
    return OK;
}

int conversation_ask(Conversation *c, const char *question, size_t context, size_t reserve, size_t *dropped,
                     Error *err) {
    for (size_t drop = 0; drop <= c->n_turns; drop++) {
        Ids ids;
        size_t start;
        int rc = encode_question(&ids, &start, c, question, drop, err);
        if (rc) {
            return rc;
        }
        const bool alone = drop == c->n_turns;
        if (ids.n + (alone ? 1 : reserve) > context) {
            const size_t n = ids.n;
            free(ids.ids);
            if (!alone) {
                continue;
            }
            return error_set(err, ERR_USAGE, "the message has %zu tokens%s, the context holds %zu with its answer",
                             n, c->system ? " with the system prompt" : "", context);
        }
        rc = add_turn(c, question, err);
        if (rc) {
            free(ids.ids);
            return rc;
        }
        drop_turns(c, drop);
        replace_ids(c, ids);
        c->cached = min_size(c->cached, c->ids.n - 1);
        c->asked = start;
        *dropped = drop;
        return OK;
    }
    CHECK(!"a question stands alone at last");
    return ERR_USAGE;
}

/* Behind the ids: those of the answer as generated, and what closes it. */
static int append_generated(Conversation *c, const Ids *generated, size_t cached, Error *err) {
    int rc = OK;
    for (size_t i = 0; i < generated->n && !rc; i++) {
        rc = ids_append(&c->ids, generated->ids[i], err);
    }
    c->cached = min_size(cached, c->ids.n);
    return rc ? rc : template_close(&c->ids, &c->format, err);
}

int conversation_answer(Conversation *c, const char *text, const Ids *generated, size_t cached, Error *err) {
    const bool first = c->n_turns == 1;
    Turn *turn = &c->turns[c->n_turns - 1];
    turn->answer = strdup(text);
    if (!turn->answer) {
        return error_set(err, ERR_MEMORY, "no memory for an answer");
    }
    if (generated) {
        return append_generated(c, generated, cached, err);
    }
    Ids ids;
    int rc = copy_ids(&ids, &c->ids, c->asked, err);
    rc = rc ? rc : template_turn(&ids, &c->format, system_before(c, first), turn->question, text, first, err);
    if (rc) {
        free(ids.ids);
        return rc;
    }
    c->cached = min_size(cached, c->ids.n);
    replace_ids(c, ids);
    return OK;
}

/* ---- files ---- */

static bool write_message(FILE *f, const char *role, const char *content) {
    cJSON *json = cJSON_CreateObject();
    char *text = NULL;
    if (cJSON_AddStringToObject(json, "role", role) && cJSON_AddStringToObject(json, "content", content)) {
        text = cJSON_PrintUnformatted(json);
    }
    cJSON_Delete(json);
    const bool ok = text && fprintf(f, "%s\n", text) > 0;
    cJSON_free(text);
    return ok;
}

static bool write_turns(const Conversation *c, FILE *f) {
    bool ok = !c->system || write_message(f, "system", c->system);
    for (size_t i = 0; i < c->n_turns && ok; i++) {
        ok = write_message(f, "user", c->turns[i].question) && write_message(f, "assistant", c->turns[i].answer);
    }
    return ok;
}

/* fd is taken over; < 0: opening it failed, errno says why. mode: the file's, 0 = leave it. */
static bool write_file(const Conversation *c, int fd, mode_t mode) {
    FILE *f = fd >= 0 ? fdopen(fd, "w") : NULL;
    const bool ok = f && (mode == 0 || fchmod(fd, mode) == 0) && write_turns(c, f);
    const int reason = errno;
    const bool closed = f ? fclose(f) == 0 : fd >= 0 && close(fd) == 0;
    errno = ok ? errno : reason;
    return ok && closed;
}

/* Whole or not at all: a new file takes the place of path. */
static bool replace_file(const Conversation *c, const char *path, mode_t mode) {
    char *new_path;
    if (asprintf(&new_path, "%s.%ld.new", path, (long)getpid()) < 0) {
        errno = ENOMEM;
        return false;
    }
    const int fd = open(new_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    const bool ok = write_file(c, fd, mode) && rename(new_path, path) == 0;
    const int reason = errno;
    if (!ok && fd >= 0) {
        unlink(new_path);
    }
    free(new_path);
    errno = reason;
    return ok;
}

int conversation_save(const Conversation *c, const char *path, Error *err) {
    struct stat st, link;
    const bool exists = stat(path, &st) == 0, linked = lstat(path, &link) == 0 && S_ISLNK(link.st_mode);
    // What is no plain file of one's own (a device, a link, a file in a folder of others) is written where it is.
    bool in_place = linked || (exists && !S_ISREG(st.st_mode)), ok = false;
    if (!in_place && (!exists || access(path, W_OK) == 0)) {
        ok = replace_file(c, path, exists ? st.st_mode : 0);
        in_place = !ok && exists && (errno == EACCES || errno == EPERM || errno == EBUSY);
    }
    if (in_place) {
        ok = write_file(c, open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), 0);
    }
    return ok ? OK : error_set(err, ERR_WRITE, "%.300s: %s", path, strerror(errno));
}

/* Take one message into a conversation being read: system first if at all, then user and assistant by turns. */
static int take_message(Conversation *c, const char *role, const char *content, Error *err) {
    const bool open = c->n_turns > 0 && !c->turns[c->n_turns - 1].answer;
    if (strcmp(role, "system") == 0 && c->n_turns == 0 && !c->system) {
        return conversation_start(c, content, err);
    }
    if (strcmp(role, "user") == 0 && !open) {
        return add_turn(c, content, err);
    }
    if (strcmp(role, "assistant") == 0 && open) {
        c->turns[c->n_turns - 1].answer = strdup(content);
        return c->turns[c->n_turns - 1].answer ? OK : error_set(err, ERR_MEMORY, "no memory for a message");
    }
    return error_set(err, ERR_FORMAT, "role %.40s is out of place", role);
}

static int take_line(Conversation *c, const char *line, size_t n, Error *err) {
    const char *end = NULL;
    cJSON *json = cJSON_ParseWithLengthOpts(line, n, &end, false);
    const char *role = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "role"));
    const char *content = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, "content"));
    bool whole = json != NULL;
    for (const char *rest = end; whole && rest < line + n; rest++) {
        whole = *rest == ' ' || *rest == '\t' || *rest == '\r';
    }
    const bool known = whole && role && content;
    const int rc = known ? take_message(c, role, content, err)
                         : error_set(err, ERR_FORMAT, "not {\"role\":\"...\",\"content\":\"...\"}");
    cJSON_Delete(json);
    return rc;
}

/* All lines of a file's bytes. */
static int take_lines(Conversation *c, const Bytes *file, Error *err) {
    size_t number = 1;
    for (size_t at = 0; at < file->n; number++) {
        const char *line = file->data + at, *newline = memchr(line, '\n', file->n - at);
        const size_t n = newline ? (size_t)(newline - line) : file->n - at;
        const int rc = take_line(c, line, n, err);
        if (rc) {
            char where[32];
            snprintf(where, sizeof where, "line %zu", number);
            error_prefix(err, where);
            return rc;
        }
        at += n + 1;
    }
    return c->n_turns > 0 && !c->turns[c->n_turns - 1].answer
               ? error_set(err, ERR_FORMAT, "the last message has no answer")
               : OK;
}

int conversation_load(Conversation *c, const char *path, Error *err) {
    Conversation loaded = {.format = c->format};
    Bytes file = {0};
    int rc = input_read_file(&file, path, err);
    if (rc) {
        return rc;
    }
    Ids ids = {0};
    rc = take_lines(&loaded, &file, err);
    rc = rc ? rc : encode_turns(&ids, &loaded, 0, err);
    free(file.data);
    if (rc) {
        error_prefix(err, path);
        free(ids.ids);
        conversation_free(&loaded);
        return rc;
    }
    loaded.ids = c->ids;
    loaded.cached = c->cached;
    c->ids = (Ids){0};
    conversation_free(c);
    *c = loaded;
    replace_ids(c, ids);
    return OK;
}
