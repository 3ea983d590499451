#include "chat.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>

#include "../model/json.h"
#include "../tokenizer/text_stream.h"
#include "conversation.h"
#include "line.h"

typedef struct {
    Model *m;
    const ChatOptions *options;
    Conversation conversation;
    GenerateResult last;  // of the answer before
    uint64_t n_answers;
    bool over;            // the user has asked to end
} Chat;

/* A note for people, one line. */
static void note(const Chat *chat, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void note(const Chat *chat, const char *format, ...) {
    if (!chat->options->quiet) {
        va_list args;
        va_start(args, format);
        vfprintf(stderr, format, args);
        va_end(args);
    }
}

/* ---- an answer --------------------------------------------------------------------------------------------- */

/* Where generated tokens go: to stdout and into memory. */
typedef struct {
    const Tokenizer *tokenizer;
    DecodeState decode;
    TextStream stream;
    TokenSink sink;
    FILE *copy;   // of the text, which
    char *text;   // this is
    size_t n_text;
    Ids ids;
    Error error;
} Answer;

static void write_answer(void *user, const char *bytes, size_t n) {
    Answer *a = user;
    const double start = time_ms();
    if (!a->error.code && (fwrite(bytes, 1, n, stdout) != n || fflush(stdout) != 0)) {
        error_set(&a->error, ERR_WRITE, "standard output: %s", strerror(errno));
    }
    for (size_t i = 0; i < n; i++) {
        if (bytes[i]) {  // text in memory ends at a NUL, which a model may say
            fputc(bytes[i], a->copy);
        }
    }
    a->sink.write_ms += time_ms() - start;
}

static bool put_token(void *user, int id) {
    Answer *a = user;
    char text[TOKENIZER_MAX_PIECE];
    const size_t n = tokenizer_decode(a->tokenizer, &a->decode, id, text);
    const bool stop = text_stream_put(&a->stream, text, n);
    return ids_append(&a->ids, id, &a->error) || stop || a->error.code;
}

static int answer_open(Answer *a, const Chat *chat, Error *err) {
    const ChatOptions *o = chat->options;
    *a = (Answer){
        .tokenizer = chat->conversation.format.tokenizer,
        .decode.started = !template_restarts_text(o->format),
        .sink = {.token = put_token, .user = a},
    };
    a->copy = open_memstream(&a->text, &a->n_text);
    return a->copy && text_stream_init(&a->stream, o->stops, o->n_stops, write_answer, a)
               ? OK
               : error_set(err, ERR_MEMORY, "no memory for an answer");
}

/* The text is whole: what is held comes out, and a->text is there. */
static int answer_end(Answer *a, bool stopped, Error *err) {
    if (!stopped) {
        char text[8];
        text_stream_put(&a->stream, text, tokenizer_decode_end(&a->decode, text));
        text_stream_end(&a->stream);
    }
    fflush(a->copy);
    if (!a->error.code && (fputc('\n', stdout) == EOF || fflush(stdout) != 0)) {
        error_set(&a->error, ERR_WRITE, "standard output: %s", strerror(errno));
    }
    if (a->error.code) {
        *err = a->error;
    } else if (ferror(a->copy) || !a->text) {
        return error_set(err, ERR_MEMORY, "no memory for an answer");
    }
    return a->error.code;
}

static void answer_free(Answer *a) {
    if (a->copy) {
        fclose(a->copy);
    }
    free(a->text);
    free(a->ids.ids);
    text_stream_free(&a->stream);
}

static volatile sig_atomic_t interrupted;  // a handler has no other place to put it

static void interrupt(int number) { interrupted = number; }

/* From now on SIGINT is remembered, unless it is ignored already. Returns what it did before. */
static struct sigaction catch_interrupt(int flags) {
    const struct sigaction action = {.sa_handler = interrupt, .sa_flags = flags};
    struct sigaction before;
    sigaction(SIGINT, NULL, &before);
    sigaction(SIGINT, before.sa_handler == SIG_IGN ? &before : &action, NULL);
    return before;
}

static int generate_answer(Chat *chat, Answer *a, Error *err) {
    const Conversation *c = &chat->conversation;
    GenerateParams params = chat->options->generate;
    params.pos = (int)c->cached;
    params.interrupt = &interrupted;
    params.sample.seed += chat->n_answers++;
    const int n = (int)(c->ids.n - c->cached);
    return generate(&chat->last, chat->m, c->ids.ids + c->cached, n, &params, &a->sink, err);
}

static void print_figures(const GenerateResult *g) {
    const Timing *t = &g->timing;
    fprintf(stderr, "prefill   %zu tok, answer %zu tok, TTFT %.2f ms, TPOT ", t->prefill_tokens, t->decode_tokens,
            t->ttft_ms);
    if (t->decode_tokens >= 2) {
        fprintf(stderr, "%.2f ms (%.1f tok/s)", t->tpot_ms, t->decode_tok_s);
    } else {
        fputs("n/a", stderr);
    }
    fprintf(stderr, ", stop: %s\n", stop_reason_name(g->stop));
}

static void report_answer(const Chat *chat) {
    if (chat->last.stop == STOP_CONTEXT) {
        note(chat, "note      the context of %d tokens is full: the answer ends here\n", chat->m->seq_len);
    }
    if (chat->options->stats) {
        print_figures(&chat->last);
    }
}

/* The conversation has a question more: answer it. Ctrl-C ends the answer; on a terminal one that comes too late for
 * that is left for the reader. */
static int answer(Chat *chat, Error *err) {
    Answer a;
    const struct sigaction before = catch_interrupt(SA_RESTART);  // what was generated is written whole
    int rc = answer_open(&a, chat, err);
    rc = rc ? rc : generate_answer(chat, &a, err);
    if (!rc) {
        const bool stopped = chat->last.stop == STOP_STRING;
        const size_t cached = (size_t)chat->last.cached;
        rc = answer_end(&a, stopped, err);
        rc = rc ? rc : conversation_answer(&chat->conversation, a.text, stopped ? NULL : &a.ids, cached, err);
    }
    answer_free(&a);
    if (!line_edits() || (!rc && chat->last.stop == STOP_INTERRUPT)) {
        interrupted = 0;
    }
    sigaction(SIGINT, &before, NULL);
    if (!rc) {
        report_answer(chat);
    }
    return rc;
}

/* Ids of room that an answer should find, short of which old turns are dropped. */
static size_t wanted_room(const Chat *chat) {
    const size_t quarter = (size_t)chat->m->seq_len / 4;
    const int n_new = chat->options->generate.n_new;
    return max_size(1, n_new < 0 ? quarter : min_size(quarter, (size_t)n_new));
}

static int take_question(Chat *chat, const char *question, Error *err) {
    size_t dropped = 0;
    Error reason = {0};
    const int rc = conversation_ask(&chat->conversation, question, (size_t)chat->m->seq_len, wanted_room(chat),
                                    &dropped, &reason);
    if (rc == ERR_MEMORY) {
        *err = reason;
        return rc;
    }
    if (rc) {
        fprintf(stderr, "%s\n", reason.text);
        return OK;
    }
    if (dropped > 0) {
        note(chat, "note      the context of %d tokens is full; turns forgotten: the oldest %zu of %zu\n",
             chat->m->seq_len, dropped, dropped + chat->conversation.n_turns - 1);
    }
    return answer(chat, err);
}

/* ---- commands ---------------------------------------------------------------------------------------------- */

static int command_help(Chat *chat, const char *argument, Error *err);

static int command_reset(Chat *chat, const char *argument, Error *err) {
    (void)argument;
    const char *before = chat->conversation.system;
    char *system = before ? strdup(before) : NULL;
    const int rc = before && !system ? error_set(err, ERR_MEMORY, "no memory for the system prompt")
                                     : conversation_start(&chat->conversation, system, err);
    free(system);
    return rc;
}

static int command_system(Chat *chat, const char *argument, Error *err) {
    const int rc = conversation_start(&chat->conversation, argument, err);
    if (!rc) {
        note(chat, "a new conversation, with %s system prompt\n", *argument ? "this" : "no");
    }
    return rc;
}

static int command_stats(Chat *chat, const char *argument, Error *err) {
    (void)argument;
    (void)err;
    const Conversation *c = &chat->conversation;
    fprintf(stderr, "context   %zu of %d tokens, turns: %zu, template %s, system prompt: %s\n",
            c->n_turns ? c->ids.n : 0, chat->m->seq_len, c->n_turns, template_name(c->format.kind),
            c->system ? c->system : "none");
    if (chat->n_answers > 0) {
        print_figures(&chat->last);
    }
    return OK;
}

static int command_save(Chat *chat, const char *argument, Error *err) {
    const int rc = conversation_save(&chat->conversation, argument, err);
    if (!rc) {
        note(chat, "turns saved: %zu\n", chat->conversation.n_turns);
    }
    return rc;
}

static int command_load(Chat *chat, const char *argument, Error *err) {
    const int rc = conversation_load(&chat->conversation, argument, err);
    if (!rc) {
        note(chat, "turns loaded: %zu\n", chat->conversation.n_turns);
    }
    return rc;
}

static int command_quit(Chat *chat, const char *argument, Error *err) {
    (void)argument;
    (void)err;
    chat->over = true;
    return OK;
}

typedef struct {
    const char *name, *argument, *help;
    bool may_lack;  // the argument
    int (*run)(Chat *chat, const char *argument, Error *err);
} Command;

static const Command commands[] = {
    {"/help", NULL, "this list", false, command_help},
    {"/reset", NULL, "begin anew, with the same system prompt", false, command_reset},
    {"/system", "TEXT", "begin anew with this system prompt; without TEXT: with none", true, command_system},
    {"/stats", NULL, "size of the conversation, figures of the last answer", false, command_stats},
    {"/save", "FILE", "write the conversation as lines of JSON", false, command_save},
    {"/load", "FILE", "go on with a saved conversation", false, command_load},
    {"/quit", NULL, "end; so do Ctrl-D and Ctrl-C at the prompt", false, command_quit},
};
#define N_COMMANDS (sizeof commands / sizeof *commands)

static int command_help(Chat *chat, const char *argument, Error *err) {
    (void)chat;
    (void)argument;
    (void)err;
    for (size_t i = 0; i < N_COMMANDS; i++) {
        const char *name = commands[i].argument ? commands[i].argument : "";
        fprintf(stderr, "%-8s %-5s %s\n", commands[i].name, name, commands[i].help);
    }
    fputs("A message may have several lines: end a line with \\, or put \"\"\" before and behind them. These, or a\n"
          "space before /, make a message of a command. Ctrl-C ends an answer.\n", stderr);
    return OK;
}

static int run_command(Chat *chat, char *line, Error *err) {
    char *argument = line + strcspn(line, " \t\n");
    const size_t n = (size_t)(argument - line);
    argument += strspn(argument, " \t\n");
    for (size_t end = strlen(argument); end > 0 && strchr(" \t\n", argument[end - 1]); end--) {
        argument[end - 1] = 0;
    }
    for (size_t i = 0; i < N_COMMANDS; i++) {
        const Command *c = &commands[i];
        if (strlen(c->name) != n || strncmp(c->name, line, n) != 0) {
            continue;
        }
        if (!c->argument && *argument) {
            return error_set(err, ERR_USAGE, "%s takes nothing", c->name);
        }
        const bool lacks = c->argument && !*argument && !c->may_lack;
        return lacks ? error_set(err, ERR_USAGE, "%s needs a %s", c->name, c->argument)
                     : c->run(chat, argument, err);
    }
    return error_set(err, ERR_USAGE, "unknown command %.*s; /help lists them", n < 50 ? (int)n : 50, line);
}

/* ---- the loop ---------------------------------------------------------------------------------------------- */

static int take_message(Chat *chat, char *message, bool quoted, Error *err) {
    if (*message == '/' && !quoted) {
        Error reason = {0};
        const int rc = run_command(chat, message, &reason);
        if (rc == ERR_MEMORY) {
            *err = reason;
            return rc;
        }
        if (rc) {
            fprintf(stderr, "%s\n", reason.text);
        }
        return OK;
    }
    const bool blank = message[strspn(message, " \t\n")] == 0;
    return blank ? OK : take_question(chat, message, err);
}

static int converse(Chat *chat, LineReader *reader, Error *err) {
    while (!chat->over) {
        char *message = NULL;
        Error reason = {0};
        bool quoted;
        int rc = line_read(reader, &message, &quoted, &reason);
        if (rc == ERR_FORMAT) {
            fprintf(stderr, "%s\n", reason.text);
            continue;
        }
        if (rc) {
            *err = reason;
            return rc;
        }
        if (!message) {
            return OK;
        }
        rc = take_message(chat, message, quoted, err);
        free(message);
        if (rc) {
            return rc;
        }
    }
    return OK;
}

int chat_template_of(TemplateKind *kind, bool *found, const Checkpoint *ck, Error *err) {
    const FileSection *s = checkpoint_find(ck, SECTION_PROVENANCE, -1);
    Error reason = {0};
    cJSON *json = s ? json_parse(checkpoint_bytes(ck, s), s->bytes, 0, &reason) : NULL;
    const char *name = cJSON_GetStringValue(json_get(json, "chat_template"));
    *found = name && template_parse(kind, "chat_template", name, NULL) == OK;
    cJSON_Delete(json);
    return reason.code == ERR_MEMORY ? error_set(err, ERR_MEMORY, "%s", reason.text) : OK;
}

int chat_run(Model *m, const Tokenizer *tokenizer, const ChatOptions *options, Error *err) {
    const Config *config = &m->config;
    Chat chat = {
        .m = m,
        .options = options,
        .conversation.format = {
            .kind = options->format,
            .tokenizer = tokenizer,
            .bos_id = config->bos_id,
            .eos_id = config->n_eos > 0 ? config->eos_id[0] : -1,
        },
    };
    LineReader *reader = NULL;
    struct sigaction before;
    sigaction(SIGINT, NULL, &before);
    interrupted = 0;
    if (line_edits()) {  // the terminal is to be put in order before the program ends
        catch_interrupt(0);  // no SA_RESTART: a command that waits for its file ends, too
    }
    int rc = conversation_start(&chat.conversation, options->system, err);
    rc = rc ? rc : line_open(&reader, &interrupted, err);
    rc = rc ? rc : converse(&chat, reader, err);
    line_close(reader);
    sigaction(SIGINT, &before, NULL);
    conversation_free(&chat.conversation);
    return rc;
}
