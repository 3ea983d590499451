/* fuzz_chat.c: conversations (chat/conversation.h) in every template, typed on standard input (chat/line.h)
 * or read from a transcript. The first byte of an input chooses the template (its lower two bits) and which
 * of the two it is (bit 2), the second the context, a fourth of it. What is typed is read message by message:
 * "/system TEXT", "/save", or a question, whose answer is the next message: text, or '#' and ids as a model
 * might generate them. What must hold after every step:
 *   - a message is the next line of the input, as long as no message had several
 *   - ids are of the vocabulary; BOS and EOS are those that the template puts, whatever the text spells
 *   - what the conversation takes for cached is what a KV cache would hold
 *   - a question and one id of its answer fit into the context
 *   - what fails changes nothing
 *   - what was saved comes back, and with it the same ids where no id was generated
 * Runs from the root of the repository, whose demo tokenizer it loads. */
#include <fcntl.h>

#include "../../chat/conversation.h"
#include "../../chat/line.h"
#include "fuzz.h"

enum { BOS = 1, EOS = 2, FIRST_ID = 3 };  // of the demo's tokenizer, which begins with <unk>, <s>, </s>

typedef struct {
    Conversation c;
    size_t context;
    int *cache;      // (context) ids that the KV cache holds
    bool generated;  // have ids been generated that encoding may not give?
} Session;

/* ---- what must hold ---- */

static size_t count_id(const Ids *ids, int id) {
    size_t n = 0;
    for (size_t i = 0; i < ids->n; i++) {
        n += ids->ids[i] == id;
    }
    return n;
}

static void check_control_ids(const Conversation *c) {
    const size_t n = c->n_turns, answered = n - !c->turns[n - 1].answer;
    const size_t system = c->system != NULL;
    const size_t bos[] = {n, 1, 1, 1}, eos[] = {answered, system + n + answered, 0, 0};
    CHECK(count_id(&c->ids, BOS) == bos[c->format.kind]);
    CHECK(count_id(&c->ids, EOS) == eos[c->format.kind]);
    CHECK(c->ids.n > 0 && c->ids.ids[0] == BOS);
}

static void check(const Session *s) {
    const Conversation *c = &s->c;
    for (size_t i = 0; i < c->ids.n; i++) {
        CHECK(c->ids.ids[i] >= 0 && c->ids.ids[i] < tokenizer_vocab_size(demo_tokenizer()));
    }
    CHECK(c->cached <= c->ids.n && c->cached <= s->context);
    CHECK(c->cached == 0 || memcmp(c->ids.ids, s->cache, c->cached * sizeof *s->cache) == 0);
    if (c->n_turns > 0) {
        check_control_ids(c);
    }
}

/* A copy of what a failure must leave as it was. */
static Conversation snapshot(const Conversation *c) {
    Conversation before = *c;
    before.ids.ids = exact_copy(c->ids.ids, c->ids.n * sizeof *c->ids.ids);
    return before;
}

static void check_failed(const Conversation *c, const Conversation *before, int rc, const Error *err) {
    CHECK(err->code == rc && strlen(err->text) > 0 && !strchr(err->text, '\n'));
    CHECK(c->system == before->system && c->turns == before->turns && c->n_turns == before->n_turns);
    CHECK(c->cached == before->cached && c->asked == before->asked && c->ids.n == before->ids.n);
    CHECK(c->ids.n == 0 || memcmp(c->ids.ids, before->ids.ids, c->ids.n * sizeof *c->ids.ids) == 0);
}

static void check_same_text(const char *a, const char *b) {
    CHECK(a ? b && strcmp(a, b) == 0 : !b);
}

/* Save every answered conversation into a file, read it back and compare. */
static void save(const Session *s) {
    const Conversation *c = &s->c;
    Conversation back = {.format = c->format};
    Error err = {0};
    char path[40];
    snprintf(path, sizeof path, "/dev/shm/fuzz_chat.%ld", (long)getpid());
    CHECK(conversation_save(c, path, &err) == OK && conversation_load(&back, path, &err) == OK);
    unlink(path);
    check_same_text(c->system, back.system);
    CHECK(back.n_turns == c->n_turns && back.cached == 0);
    for (size_t i = 0; i < c->n_turns; i++) {
        check_same_text(c->turns[i].question, back.turns[i].question);
        check_same_text(c->turns[i].answer, back.turns[i].answer);
    }
    if (!s->generated && c->n_turns > 0) {
        CHECK(back.ids.n == c->ids.n && memcmp(back.ids.ids, c->ids.ids, c->ids.n * sizeof *c->ids.ids) == 0);
    }
    conversation_free(&back);
}

/* ---- steps ---- */

static void start(Session *s, const char *system) {
    Conversation before = snapshot(&s->c);
    Error err = {0};
    const int rc = conversation_start(&s->c, system, &err);
    CHECK((rc != OK) == (*system && !template_has_system(s->c.format.kind)));
    if (rc) {
        check_failed(&s->c, &before, rc, &err);
    } else {
        CHECK(s->c.n_turns == 0);
        check_same_text(s->c.system, *system ? system : NULL);
        s->generated = false;
    }
    free(before.ids.ids);
    check(s);
}

/* Returns false where the question is refused. */
static bool ask(Session *s, const char *question) {
    Conversation *c = &s->c, before = snapshot(c);
    size_t dropped = SIZE_MAX;
    Error err = {0};
    const int rc = conversation_ask(c, question, s->context, max_size(1, s->context / 4), &dropped, &err);
    CHECK(rc == OK || rc == ERR_USAGE);
    if (rc) {
        check_failed(c, &before, rc, &err);
        CHECK(dropped == SIZE_MAX);
    } else {
        CHECK(dropped <= before.n_turns && c->n_turns == before.n_turns - dropped + 1);
        CHECK(c->ids.n < s->context && c->cached < c->ids.n && c->asked <= c->ids.n);
        check_same_text(c->turns[c->n_turns - 1].question, question);
        check(s);
        memcpy(s->cache, c->ids.ids, c->ids.n * sizeof *s->cache);  // what a model would compute now
    }
    free(before.ids.ids);
    return rc == OK;
}

/* An answer whose ids came from a model as far as there was room; the last of them was not computed. Text is
 * the answer that a stop string has cut, so that its ids are not those generated. */
static void answer(Session *s, const char *message) {
    Conversation *c = &s->c;
    const bool ids = *message == '#';
    const char *bytes = message + ids;
    const size_t n = min_size(strlen(bytes), s->context - c->ids.n), cached = c->ids.n + n - (n > 0);
    int *generated = malloc((n + 1) * sizeof *generated);
    CHECK(generated);
    for (size_t i = 0; i < n; i++) {
        generated[i] = FIRST_ID + (unsigned char)bytes[i];
    }
    memcpy(s->cache + c->ids.n, generated, n * sizeof *generated);
    Error err = {0};
    CHECK(conversation_answer(c, bytes, ids ? &(Ids){generated, n} : NULL, cached, &err) == OK);
    s->generated |= ids;
    check_same_text(c->turns[c->n_turns - 1].answer, bytes);
    check(s);
    free(generated);
}

/* Whether it is taken or not, the conversation goes on. */
static void load(Session *s, const uint8_t *transcript, size_t n) {
    Conversation before = snapshot(&s->c);
    Error err = {0};
    const int rc = conversation_load(&s->c, memory_file(transcript, n), &err);
    CHECK(rc == OK || rc == ERR_FORMAT || rc == ERR_USAGE);
    if (rc) {
        check_failed(&s->c, &before, rc, &err);
    }
    free(before.ids.ids);
    check(s);
    save(s);
    if (ask(s, "And then")) {
        answer(s, "#");
    }
}

/* Standard input, read by the product, and here as well while messages are lines. */
typedef struct {
    LineReader *reader;
    const char *rest, *end;  // rest is NULL after a message of several lines
} Input;

/* What line_read() has just given is the line that stands next. */
static void check_line(Input *in, const char *message, bool refused) {
    const char *line = in->rest,
               *newline = line < in->end ? memchr(line, '\n', (size_t)(in->end - line)) : NULL;
    size_t n = newline ? (size_t)(newline - line) : (size_t)(in->end - line);
    if (line == in->end) {
        CHECK(!message && !refused);
        return;
    }
    in->rest = newline ? newline + 1 : in->end;
    n -= n > 0 && line[n - 1] == '\r';
    if ((n > 0 && line[n - 1] == '\\') || (n >= 3 && memcmp(line, "\"\"\"", 3) == 0)) {
        in->rest = NULL;
        return;
    }
    CHECK(refused == (memchr(line, 0, in->rest - line) != NULL));
    CHECK(refused || (message && strlen(message) == n && memcmp(message, line, n) == 0));
}

/* The next message of standard input that is one; NULL at its end. */
static char *next_message(Input *in) {
    char *message = NULL;
    bool quoted;
    Error err = {0};
    int rc;
    do {
        rc = line_read(in->reader, &message, &quoted, &err);
        CHECK(rc == OK || (rc == ERR_FORMAT && !message && strlen(err.text) > 0));
        if (in->rest) {
            check_line(in, message, rc != OK);
        }
    } while (rc);
    return message;
}

/* A question that the conversation takes is answered, with nothing at the end of the input. */
static void take_question(Session *s, const char *question, Input *in) {
    if (ask(s, question)) {
        char *text = next_message(in);
        answer(s, text ? text : "");
        free(text);
    }
}

static void converse(Session *s, Input *in) {
    static const char system[] = "/system ";
    for (char *message; (message = next_message(in)); free(message)) {
        if (strncmp(message, system, strlen(system)) == 0) {
            start(s, message + strlen(system));
        } else if (strcmp(message, "/save") == 0) {
            save(s);
        } else {
            take_question(s, message, in);
        }
    }
    save(s);
}

/* Standard input is these bytes, and no terminal even where the fuzzer runs on one. */
static void converse_typed(Session *s, const uint8_t *typed, size_t n) {
    static int nothing = -1;
    if (nothing < 0) {
        nothing = open("/dev/null", O_RDONLY);
        CHECK(nothing >= 0 && dup2(nothing, STDIN_FILENO) == STDIN_FILENO);
    }
    FILE *before = stdin;
    char *bytes = exact_copy(typed, n);
    Input in = {.rest = bytes, .end = bytes + n};
    Error err = {0};
    stdin = fmemopen(bytes, n, "r");
    CHECK(stdin && line_open(&in.reader, NULL, &err) == OK);
    converse(s, &in);
    line_close(in.reader);
    fclose(stdin);
    stdin = before;
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) {
        return 0;
    }
    Session s = {
        .c.format = {(TemplateKind)(data[0] % N_TEMPLATES), demo_tokenizer(), BOS, EOS},
        .context = 4 * (size_t)data[1],
    };
    CHECK(tokenizer_bos_id(demo_tokenizer()) == BOS && tokenizer_eos_id(demo_tokenizer()) == EOS);
    s.cache = malloc((s.context + 1) * sizeof *s.cache);
    CHECK(s.cache);
    if (data[0] & N_TEMPLATES) {
        if (ask(&s, "Once upon a time")) {
            answer(&s, "there was a king.");
        }
        load(&s, data + 2, size - 2);
    } else {
        converse_typed(&s, data + 2, size - 2);
    }
    conversation_free(&s.c);
    free(s.cache);
    return 0;
}
