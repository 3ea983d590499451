#include "line.h"

#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#define HISTORY_LINES 1000

struct LineReader {
    EditLine *editor;  // NULL: not on a terminal
    History *history;
    bool continues;    // is the line one of a message that has begun?
    bool left;         // by Ctrl-C
    const volatile sig_atomic_t *interrupt;
};

static bool interrupted(const LineReader *r) { return r->interrupt && *r->interrupt; }

static LineReader *reader_of(EditLine *editor) {
    LineReader *r = NULL;
    el_get(editor, EL_CLIENTDATA, &r);
    return r;
}

static char *prompt(EditLine *editor) {
    static char first[] = "> ", next[] = ". ";
    return reader_of(editor)->continues ? next : first;
}

static unsigned char leave(EditLine *editor, wint_t key) {
    (void)key;
    reader_of(editor)->left = true;
    return CC_EOF;
}

/* The next key; -1, which ends the line, once there is an interrupt. */
static int read_key(EditLine *editor, wchar_t *key) {
    const LineReader *r = reader_of(editor);
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    // A signal ends poll, but for one that comes just before it or to another thread: look again every second.
    while (!interrupted(r) && poll(&input, 1, 1000) <= 0) {
    }
    if (interrupted(r)) {
        return -1;
    }
    el_set(editor, EL_GETCFN, EL_BUILTIN_GETCFN);
    const int n = el_wgetc(editor, key);
    el_set(editor, EL_GETCFN, read_key);
    return n;
}

static bool open_editor(LineReader *r) {
    setlocale(LC_CTYPE, "");  // the editor works on characters
    if (MB_CUR_MAX == 1) {
        setlocale(LC_CTYPE, "C.UTF-8");
    }
    HistEvent event;
    r->history = history_init();
    r->editor = el_init("run", stdin, stderr, stderr);
    if (!r->history || !r->editor) {
        return false;
    }
    history(r->history, &event, H_SETSIZE, HISTORY_LINES);
    history(r->history, &event, H_SETUNIQUE, 1);
    el_set(r->editor, EL_CLIENTDATA, r);
    el_set(r->editor, EL_PROMPT, prompt);
    el_set(r->editor, EL_GETCFN, read_key);
    el_set(r->editor, EL_EDITOR, "emacs");
    el_set(r->editor, EL_HIST, history, r->history);
    el_source(r->editor, NULL);  // ~/.editrc
    // Ctrl-C comes as a key, so that the terminal is in order when the program ends.
    el_set(r->editor, EL_SETTY, "-d", "-isig", NULL);
    el_wset(r->editor, EL_ADDFN, L"leave", L"end the program", leave);  // el_set() makes copies that it loses
    el_set(r->editor, EL_BIND, "^C", "leave", NULL);
    return true;
}

bool line_edits(void) { return isatty(STDIN_FILENO) && isatty(STDERR_FILENO); }

int line_open(LineReader **reader, const volatile sig_atomic_t *interrupt, Error *err) {
    LineReader *r = calloc(1, sizeof *r);
    if (!r || (line_edits() && !open_editor(r))) {
        line_close(r);
        return error_set(err, ERR_MEMORY, "no memory for the line editor");
    }
    r->interrupt = interrupt;
    *reader = r;
    return OK;
}

void line_close(LineReader *r) {
    if (r && r->editor) {
        el_end(r->editor);
    }
    if (r && r->history) {
        history_end(r->history);
    }
    free(r);
}

/* One line without its end; *line is NULL at the end of input. */
static int read_edited(LineReader *r, char **line, Error *err) {
    int n = 0;
    el_resize(r->editor);  // the window may have changed during an answer
    el_set(r->editor, EL_PREP_TERM, 1);  // before the prompt is seen: Ctrl-C is a key as soon as there is one
    const char *typed = el_gets(r->editor, &n);
    if (!typed || n <= 0) {
        fputc('\n', stderr);
        *line = NULL;
        return OK;
    }
    HistEvent event;
    if (strspn(typed, " \t\n") < strlen(typed)) {
        history(r->history, &event, H_ENTER, typed);
    }
    *line = strndup(typed, strcspn(typed, "\r\n"));
    return *line ? OK : error_set(err, ERR_MEMORY, "no memory for a line");
}

static int read_plain(char **line, Error *err) {
    size_t capacity = 0;
    *line = NULL;
    errno = 0;
    const ssize_t n = getline(line, &capacity, stdin);
    const bool has_nul = n > 0 && memchr(*line, 0, (size_t)n);
    if (n < 0 || has_nul) {
        free(*line);
        *line = NULL;
        return has_nul         ? error_set(err, ERR_FORMAT, "a line with a NUL byte is no message")
               : feof(stdin)   ? OK
               : errno == ENOMEM ? error_set(err, ERR_MEMORY, "no memory for a line")
                               : error_set(err, ERR_OPEN, "standard input: %s", strerror(errno));
    }
    size_t length = (size_t)n;
    length -= length > 0 && (*line)[length - 1] == '\n';
    length -= length > 0 && (*line)[length - 1] == '\r';
    (*line)[length] = 0;
    return OK;
}

static int read_line(LineReader *r, char **line, Error *err) {
    return r->editor ? read_edited(r, line, err) : read_plain(line, err);
}

static bool ends_with(const char *text, const char *end) {
    const size_t n = strlen(text), n_end = strlen(end);
    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

/* Put a newline and the next line behind message; *ended at the end of input. */
static int read_on(LineReader *r, char **message, bool *ended, Error *err) {
    char *line = NULL;
    r->continues = true;
    const int rc = read_line(r, &line, err);
    r->continues = false;
    *ended = !line;
    if (rc || !line) {
        return rc;
    }
    char *joined = NULL;
    const int n = asprintf(&joined, "%s\n%s", *message, line);
    free(line);
    if (n < 0) {
        return error_set(err, ERR_MEMORY, "no memory for a message");
    }
    free(*message);
    *message = joined;
    return OK;
}

#define QUOTE "\"\"\""

/* Up to the closing quote, which may stand on a line of its own like the opening one. */
static int complete_quoted(LineReader *r, char **message, Error *err) {
    bool ended = false;
    int rc = OK;
    memmove(*message, *message + strlen(QUOTE), strlen(*message) - strlen(QUOTE) + 1);
    while (!rc && !ended && !ends_with(*message, QUOTE)) {
        rc = read_on(r, message, &ended, err);
    }
    char *text = *message;
    if (ends_with(text, QUOTE)) {
        text[strlen(text) - strlen(QUOTE)] = 0;
    }
    if (ends_with(text, "\n")) {
        text[strlen(text) - 1] = 0;
    }
    if (*text == '\n') {
        memmove(text, text + 1, strlen(text));
    }
    return rc;
}

/* The rest of a message whose first line is there. */
static int complete(LineReader *r, char **message, bool *quoted, Error *err) {
    *quoted = strncmp(*message, QUOTE, strlen(QUOTE)) == 0;
    if (*quoted) {
        return complete_quoted(r, message, err);
    }
    bool ended = false;
    int rc = OK;
    while (!rc && !ended && ends_with(*message, "\\")) {
        (*message)[strlen(*message) - 1] = 0;
        rc = read_on(r, message, &ended, err);
    }
    return rc;
}

static bool is_over(const LineReader *r) { return r->left || interrupted(r); }

int line_read(LineReader *r, char **message, bool *quoted, Error *err) {
    *message = NULL;
    *quoted = false;
    int rc = is_over(r) ? OK : read_line(r, message, err);
    if (!rc && *message) {
        rc = complete(r, message, quoted, err);
    }
    if (*message && (rc || is_over(r))) {
        free(*message);
        *message = NULL;
    }
    return rc;
}
