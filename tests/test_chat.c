/* test_chat.c: conversations: templates to exact ids, what is kept of them in the KV cache, what is dropped when
 * the context is full, files, and how messages are read. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>
#include <sys/wait.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../chat/conversation.h"
#include "../chat/line.h"
#include "../export/pack.h"
#include "../model/generate.h"
#include "support.h"

#define LLAMA2_TOKENIZER "../shared/data/llama2-tokenizer/tokenizer.model"
#define DEMO_TOKENIZER "demo/tokenizer.model"
#define BOS 1
#define EOS 2

/* ---- helpers ---- */

/* A template over a tokenizer's file; the test is skipped where that is missing. */
static Template open_template(TemplateKind kind, const char *path) {
    Bytes file;
    Error err = {0};
    char reason[200];
    Tokenizer *tokenizer;
    if (access(path, R_OK) != 0) {
        print_message("skipped: %s absent\n", path);
        skip();
    }
    assert_int_equal(input_read_file(&file, path, &err), OK);
    assert_true(tokenizer_load(&tokenizer, file.data, file.n, reason, sizeof reason));
    free(file.data);
    return (Template){kind, tokenizer, BOS, EOS};
}

static void close_template(const Template *t) { tokenizer_free((Tokenizer *)(uintptr_t)t->tokenizer); }

static void assert_ids(const Ids *ids, const int *want, size_t n) {
    assert_int_equal(ids->n, n);
    assert_memory_equal(ids->ids, want, n * sizeof *want);
}

static size_t count_id(const Ids *ids, int id) {
    size_t n = 0;
    for (size_t i = 0; i < ids->n; i++) {
        n += ids->ids[i] == id;
    }
    return n;
}

static void append_all(int *all, size_t *n, const int *more, size_t n_more) {
    memcpy(all + *n, more, n_more * sizeof *more);
    *n += n_more;
}

static void ask(Conversation *c, const char *question, size_t context) {
    size_t dropped = 99;
    Error err = {0};
    if (conversation_ask(c, question, context, 1, &dropped, &err) != OK) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(dropped, 0);
}

static void answer(Conversation *c, const char *text) {
    Error err = {0};
    assert_int_equal(conversation_answer(c, text, NULL, c->ids.n, &err), OK);
}

/* The ids of a text alone. */
static Ids encode(const Template *t, const char *text) {
    Ids ids;
    char reason[200];
    assert_true(tokenizer_encode(t->tokenizer, text, strlen(text), &ids.ids, &ids.n, reason, sizeof reason));
    return ids;
}

static char scratch_path[400];

static const char *scratch(const char *content) {
    snprintf(scratch_path, sizeof scratch_path, "%s/test_chat.%ld", getenv("BUILD") ? getenv("BUILD") : "build",
             (long)getpid());
    FILE *f = fopen(scratch_path, "w");
    assert_non_null(f);
    fputs(content, f);
    assert_int_equal(fclose(f), 0);
    return scratch_path;
}

/* ---- templates: rows 41 and 42 of the case list, appendix A ---- */

static const int c1[] = {1,     518, 25580, 29962, 1724,  338, 29871, 29906,
                         29974, 29906, 29973, 518, 29914, 25580, 29962};
static const int c2[] = {1,     518, 25580, 29962, 3532,  14816, 29903, 6778, 13,  3629,  11473, 29889, 13,
                         29966, 829, 14816, 29903, 6778,  13,    13,    18567, 518, 29914, 25580, 29962};
static const int c3_rest[] = {29871, 29946, 29871, 2,     1,     518,   25580, 29962, 1126,
                              29871, 29941, 29974, 29941, 29973, 518,   29914, 25580, 29962};
static const int c4[] = {1, 518, 25580, 29962, 263, 13, 29890, 518, 29914, 25580, 29962};

static void test_llama2_ids_are_exact(void **state) {
    (void)state;
    const struct {
        const char *system, *question;
        const int *ids;
        size_t n;
    } cases[] = {
        {NULL, "What is 2+2?", c1, COUNT(c1)}, {"", "  What is 2+2?\n", c1, COUNT(c1)},
        {"Be brief.", "Hi", c2, COUNT(c2)},    {NULL, "a\nb", c4, COUNT(c4)},
    };
    const Template t = open_template(TEMPLATE_LLAMA2, LLAMA2_TOKENIZER);
    assert_int_equal(COUNT(c2), 25);
    for (size_t i = 0; i < COUNT(cases); i++) {
        Ids ids = {0};
        Error err = {0};
        assert_int_equal(template_turn(&ids, &t, cases[i].system, cases[i].question, NULL, true, &err), OK);
        assert_ids(&ids, cases[i].ids, cases[i].n);
        free(ids.ids);
    }
    close_template(&t);
}

/* Row C3: the transcript, as text and as it comes from a file. */
static void test_llama2_turns_are_exact(void **state) {
    (void)state;
    int want[64];
    size_t n = 0;
    append_all(want, &n, c1, COUNT(c1));
    append_all(want, &n, c3_rest, COUNT(c3_rest));
    assert_int_equal(n, 33);
    Conversation c = {.format = open_template(TEMPLATE_LLAMA2, LLAMA2_TOKENIZER)};
    ask(&c, "What is 2+2?", 100);
    assert_ids(&c.ids, c1, COUNT(c1));
    answer(&c, "4");
    ask(&c, "And 3+3?", 100);
    assert_ids(&c.ids, want, n);

    Conversation loaded = {.format = c.format};
    Error err = {0};
    const char *path = scratch("{\"role\":\"user\",\"content\":\"What is 2+2?\"}\n"
                               "{\"role\":\"assistant\",\"content\":\"4\"}");
    assert_int_equal(conversation_load(&loaded, path, &err), OK);
    ask(&loaded, "And 3+3?", 100);
    assert_ids(&loaded.ids, want, n);
    unlink(path);
    close_template(&c.format);
    conversation_free(&loaded);
    conversation_free(&c);
}

static const int answer_ids[] = {300, 301, 259, 300};

/* A conversation whose first turn got these ids as its answer, from ids.ids[*start] on; the last was not computed. */
static Conversation answered(size_t *start, const char *text) {
    Conversation c = {.format = open_template(TEMPLATE_LLAMA2, DEMO_TOKENIZER)};
    Error err = {0};
    ask(&c, "One", 200);
    *start = c.ids.n;
    const Ids ids = {(int *)(uintptr_t)answer_ids, COUNT(answer_ids)};
    assert_int_equal(conversation_answer(&c, text, &ids, *start + 3, &err), OK);
    return c;
}

/* Generated ids stay as they are, also where their text would be encoded otherwise; then EOS, then BOS. */
static void test_generated_ids_are_kept(void **state) {
    (void)state;
    size_t start;
    Conversation c = answered(&start, "something else");
    assert_int_equal(c.cached, start + 3);  // the last generated id was not computed
    ask(&c, "Two", 200);
    assert_memory_equal(c.ids.ids + start, answer_ids, sizeof answer_ids);
    assert_int_equal(c.ids.ids[start + 4], EOS);
    assert_int_equal(c.ids.ids[start + 5], BOS);
    assert_int_equal(c.cached, start + 3);
    close_template(&c.format);
    conversation_free(&c);
}

/* A stop string cuts the text of the answer, and what the model goes on from with it; what was before stays. */
static void test_a_cut_answer_is_encoded_anew(void **state) {
    (void)state;
    size_t start;
    Conversation c = answered(&start, "x");
    Error err = {0};
    ask(&c, "Two", 200);
    const size_t asked = c.asked, n = c.ids.n;
    assert_int_equal(c.ids.ids[asked], BOS);
    assert_int_equal(conversation_answer(&c, "yes", NULL, n + 7, &err), OK);
    assert_memory_equal(c.ids.ids + start, answer_ids, sizeof answer_ids);
    Ids turn = {0};
    assert_int_equal(template_turn(&turn, &c.format, NULL, "Two", "yes", false, &err), OK);
    assert_ids(&(Ids){c.ids.ids + asked, c.ids.n - asked}, turn.ids, turn.n);
    assert_in_range(c.cached, asked + 1, n);
    free(turn.ids);
    close_template(&c.format);
    conversation_free(&c);
}

static void test_zephyr_messages_end_with_eos(void **state) {
    (void)state;
    Conversation c = {.format = open_template(TEMPLATE_ZEPHYR, DEMO_TOKENIZER)};
    Error err = {0};
    const char *texts[] = {"<|system|>\nBe kind.", "\n<|user|>\nHello", "\n<|assistant|>\nYes.",
                           "\n<|user|>\nMore", "\n<|assistant|>\n"};
    int want[300] = {BOS};
    size_t n = 1;
    for (size_t i = 0; i < COUNT(texts); i++) {
        const Ids ids = encode(&c.format, texts[i]);
        append_all(want, &n, ids.ids, ids.n);
        append_all(want, &n, (const int[]){EOS}, i + 1 < COUNT(texts));
        free(ids.ids);
    }
    assert_int_equal(conversation_start(&c, "Be kind.", &err), OK);
    ask(&c, "Hello", 300);
    assert_int_equal(count_id(&c.ids, EOS), 2);  // of the system prompt and the message
    answer(&c, "Yes.");
    ask(&c, "More", 300);
    assert_ids(&c.ids, want, n);
    close_template(&c.format);
    conversation_free(&c);
}

static void test_plain_text_goes_on(void **state) {
    (void)state;
    const struct {
        TemplateKind kind;
        const char *system, *all, *next;
    } cases[] = {
        {TEMPLATE_PLAIN, "A tale.", "A tale.\nOnce upon a time", "\nThen"},
        {TEMPLATE_PLAIN, NULL, "Once upon a time", "\nThen"},
        {TEMPLATE_NONE, NULL, "Once upon a time", "Then"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Conversation c = {.format = open_template(cases[i].kind, DEMO_TOKENIZER)};
        Error err = {0};
        int want[100] = {BOS};
        size_t n = 1;
        const Ids all = encode(&c.format, cases[i].all), next = encode(&c.format, cases[i].next);
        append_all(want, &n, all.ids, all.n);
        append_all(want, &n, next.ids, next.n);
        assert_int_equal(conversation_start(&c, cases[i].system, &err), OK);
        ask(&c, "Once upon", 100);
        answer(&c, " a time");
        ask(&c, "Then", 100);
        assert_ids(&c.ids, want, n);
        free(all.ids);
        free(next.ids);
        close_template(&c.format);
        conversation_free(&c);
    }
}

static void test_typed_control_tokens_stay_text(void **state) {
    (void)state;
    for (int kind = 0; kind < N_TEMPLATES; kind++) {
        Conversation c = {.format = open_template((TemplateKind)kind, DEMO_TOKENIZER)};
        ask(&c, "<s>[INST] Hi [/INST] </s><s>", 200);
        assert_int_equal(count_id(&c.ids, BOS), 1);
        assert_int_equal(count_id(&c.ids, EOS), kind == TEMPLATE_ZEPHYR ? 1 : 0);  // after the message
        close_template(&c.format);
        conversation_free(&c);
    }
}

static void test_names(void **state) {
    (void)state;
    TemplateKind kind;
    Error err = {0};
    for (int i = 0; i < N_TEMPLATES; i++) {
        assert_int_equal(template_parse(&kind, "--template", template_name((TemplateKind)i), &err), OK);
        assert_int_equal(kind, i);
    }
    assert_int_equal(template_parse(&kind, "--template", "llama3", &err), ERR_USAGE);
    assert_string_equal(err.text, "--template llama3: not llama2, zephyr, plain or none");
    Conversation c = {.format.kind = TEMPLATE_NONE};
    assert_int_equal(conversation_start(&c, "Be kind.", &err), ERR_USAGE);
    assert_null(c.system);
}

/* ---- a full context ---- */

#define CONTEXT 96

/* Whole turns go, oldest first; BOS and the system prompt stay; what is left is as if the rest had never been. */
static void test_oldest_turns_are_dropped(void **state) {
    (void)state;
    static const char *const questions[] = {"First question", "Second question", "Third question"};
    Conversation c = {.format = open_template(TEMPLATE_LLAMA2, DEMO_TOKENIZER)}, rest = {.format = c.format};
    Error err = {0};
    assert_int_equal(conversation_start(&c, "Be kind to all.", &err), OK);
    assert_int_equal(conversation_start(&rest, "Be kind to all.", &err), OK);
    for (size_t i = 0; i < COUNT(questions); i++) {
        ask(&c, questions[i], 1000);
        answer(&c, "An answer");
    }
    ask(&rest, questions[2], 1000);
    answer(&rest, "An answer");
    ask(&rest, "Fourth", 1000);

    size_t dropped = 99;
    const size_t context = rest.ids.n + 10;
    size_t same = 0;  // ids that the cache holds already: BOS and system prompt at least
    while (c.ids.ids[same] == rest.ids.ids[same]) {
        same++;
    }
    assert_in_range(same, 10, rest.ids.n - 20);
    assert_true(c.ids.n > context);
    assert_int_equal(conversation_ask(&c, "Fourth", context, 10, &dropped, &err), OK);
    assert_int_equal(dropped, 2);
    assert_int_equal(c.n_turns, 2);
    assert_ids(&c.ids, rest.ids.ids, rest.ids.n);
    assert_string_equal(c.turns[0].question, questions[2]);
    assert_int_equal(c.cached, same);
    conversation_free(&rest);
    close_template(&c.format);
    conversation_free(&c);
}

static void test_a_turn_too_long_changes_nothing(void **state) {
    (void)state;
    Conversation c = {.format = open_template(TEMPLATE_PLAIN, DEMO_TOKENIZER)};
    Error err = {0};
    ask(&c, "Once upon a time", CONTEXT);
    answer(&c, " there was");
    const size_t n = c.ids.n;
    int before[CONTEXT];
    memcpy(before, c.ids.ids, n * sizeof *before);
    char long_text[4 * CONTEXT + 1];
    for (size_t i = 0; i < sizeof long_text - 1; i++) {
        long_text[i] = "ab "[i % 3];
    }
    long_text[sizeof long_text - 1] = 0;
    size_t dropped = 99;
    assert_int_equal(conversation_ask(&c, long_text, CONTEXT, 1, &dropped, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "the context holds 96"));
    assert_int_equal(dropped, 99);
    assert_int_equal(c.n_turns, 1);
    assert_ids(&c.ids, before, n);

    // Alone it needs room for one id of an answer, not for all of the reserve.
    Ids alone = {0};
    assert_int_equal(template_turn(&alone, &c.format, NULL, "A king", NULL, true, &err), OK);
    assert_int_equal(conversation_ask(&c, "A king", alone.n, 50, &dropped, &err), ERR_USAGE);
    assert_int_equal(conversation_ask(&c, "A king", alone.n + 1, 50, &dropped, &err), OK);
    assert_int_equal(dropped, 1);
    free(alone.ids);
    close_template(&c.format);
    conversation_free(&c);
}

/* ---- files ---- */

static void test_a_saved_conversation_comes_back(void **state) {
    (void)state;
    const char *system = "Say \"no\".\n", *question = "h\xc3\xa9llo\n\\\t<s>", *said = " a \xe6\x97\xa5 \x01 b ";
    Conversation c = {.format = open_template(TEMPLATE_PLAIN, DEMO_TOKENIZER)}, loaded = {.format = c.format};
    Error err = {0};
    const char *path = scratch("");
    assert_int_equal(conversation_start(&c, system, &err), OK);
    ask(&c, question, 500);
    answer(&c, said);
    ask(&c, "again", 500);
    answer(&c, "");
    assert_int_equal(conversation_save(&c, path, &err), OK);
    ask(&loaded, "forgotten", 500);
    answer(&loaded, "too");
    assert_int_equal(conversation_load(&loaded, path, &err), OK);
    assert_string_equal(loaded.system, system);
    assert_int_equal(loaded.n_turns, 2);
    assert_string_equal(loaded.turns[0].question, question);
    assert_string_equal(loaded.turns[0].answer, said);
    assert_string_equal(loaded.turns[1].answer, "");
    assert_ids(&loaded.ids, c.ids.ids, c.ids.n);
    assert_true(loaded.cached < loaded.ids.n);
    // Saved again, the file keeps its mode; a link stays a link, and what it points to gets the text.
    struct stat st;
    char linked[300];
    snprintf(linked, sizeof linked, "%s.link", path);
    unlink(linked);
    assert_int_equal(chmod(path, 0600), 0);
    assert_int_equal(symlink(strrchr(path, '/') + 1, linked), 0);
    assert_int_equal(conversation_save(&c, path, &err), OK);
    assert_int_equal(conversation_save(&loaded, linked, &err), OK);
    assert_true(lstat(linked, &st) == 0 && S_ISLNK(st.st_mode));
    assert_true(lstat(path, &st) == 0 && S_ISREG(st.st_mode) && (st.st_mode & 0777) == 0600);
    assert_int_equal(conversation_load(&loaded, path, &err), OK);
    assert_int_equal(loaded.n_turns, 2);
    assert_int_equal(conversation_save(&c, "/dev/null", &err), OK);
    assert_true(lstat("/dev/null", &st) == 0 && S_ISCHR(st.st_mode));
    unlink(linked);
    unlink(path);
    assert_int_equal(conversation_save(&c, "/nowhere/file", &err), ERR_WRITE);
    assert_int_equal(conversation_load(&loaded, "/nowhere/file", &err), ERR_OPEN);
    conversation_free(&loaded);
    close_template(&c.format);
    conversation_free(&c);
}

#define USER "{\"role\":\"user\",\"content\":\"a\"}\n"
#define ASSISTANT "{\"role\":\"assistant\",\"content\":\"b\"}\n"
#define SYSTEM "{\"role\":\"system\",\"content\":\"c\"}\n"

static void test_a_bad_file_changes_nothing(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"hello\n", "line 1: not {"},
        {USER "[1]\n", "line 2: not {"},
        {"{\"role\":\"user\"}\n", "line 1: not {"},
        {"{\"role\":\"user\",\"content\":7}\n", "line 1: not {"},
        {"{\"role\":\"user\",\"content\":\"a\"} x\n", "line 1: not {"},
        {"{\"role\":\"user\",\"content\":\"a", "line 1: not {"},
        {USER "\n" ASSISTANT, "line 2: not {"},
        {ASSISTANT USER, "line 1: role assistant is out of place"},
        {USER USER, "line 2: role user is out of place"},
        {USER ASSISTANT ASSISTANT, "line 3: role assistant is out of place"},
        {USER ASSISTANT SYSTEM, "line 3: role system is out of place"},
        {SYSTEM SYSTEM, "line 2: role system is out of place"},
        {"{\"role\":\"tool\",\"content\":\"a\"}\n", "line 1: role tool is out of place"},
        {USER ASSISTANT USER, "the last message has no answer"},
    };
    Conversation c = {.format = open_template(TEMPLATE_PLAIN, DEMO_TOKENIZER)};
    ask(&c, "Hello", 100);
    answer(&c, "you");
    const size_t n = c.ids.n;
    for (size_t i = 0; i < COUNT(cases); i++) {
        Error err = {0};
        const char *path = scratch(cases[i][0]);
        assert_int_equal(conversation_load(&c, path, &err), ERR_FORMAT);
        if (!strstr(err.text, cases[i][1]) || strncmp(err.text, path, strlen(path)) != 0) {
            fail_msg("%s does not contain %s", err.text, cases[i][1]);
        }
        assert_int_equal(c.n_turns, 1);
        assert_int_equal(c.ids.n, n);
        unlink(path);
    }
    close_template(&c.format);
    conversation_free(&c);
}

/* ---- with a model ---- */

typedef struct {
    Checkpoint ck;
    Backend *be;
    Model m;
} Fixture;

static void open_demo(Fixture *f) {
    const PackOptions options = {.storage = STORE_DENSE, .source_name = "test", .n_threads = 1, .quiet = true};
    Error err = {0};
    Source *source;
    Writer *writer;
    PackReport report;
    const char *path = scratch("");
    assert_int_equal(source_open(&source, "demo", &err), OK);
    assert_int_equal(writer_open(&writer, path, &source->config, true, &err), OK);
    assert_int_equal(pack_model(&report, source, writer, &options, &err), OK);
    source->free(source);
    assert_int_equal(checkpoint_open(&f->ck, path, &err), OK);
    unlink(path);
    assert_int_equal(backend_cpu(&f->be, 1, NULL, &err), OK);
    assert_int_equal(model_load(&f->m, &f->ck, f->be, 0, false, &err), OK);
}

static void close_demo(Fixture *f) {
    model_free(&f->m);
    f->be->free(f->be);
    checkpoint_close(&f->ck);
}

typedef struct {
    Ids ids;
    size_t raise_at;  // when so many have come, raise the flag; 0: never
    volatile sig_atomic_t flag;
} Collected;

static bool collect(void *user, int id) {
    Collected *c = user;
    assert_int_equal(ids_append(&c->ids, id, NULL), OK);
    c->flag = c->ids.n == c->raise_at;
    return false;
}

static GenerateResult generate_into(Collected *c, Model *m, const int *ids, size_t n, size_t pos, int n_new) {
    const GenerateParams params = {
        .n_new = n_new, .ignore_eos = true, .pos = (int)pos, .interrupt = &c->flag, .sample = {.top_p = 1},
    };
    TokenSink sink = {.token = collect, .user = c};
    GenerateResult r;
    Error err = {0};
    c->ids.n = 0;
    if (generate(&r, m, ids, (int)n, &params, &sink, &err) != OK) {
        fail_msg("%s", err.text);
    }
    return r;
}

/* Prefill n ids at pos and read the logits after the last. */
static float *logits_after(Model *m, const int *ids, size_t n, size_t pos) {
    Collected none = {0};
    const size_t bytes = (size_t)m->config.vocab_size * sizeof(float);
    float *logits = poisoned_alloc(bytes);
    assert_int_equal(generate_into(&none, m, ids, n, pos, 0).cached, pos + n);
    m->be->read(m->be, logits, m->state.logits, bytes);
    return logits;
}

static double largest_difference(const float *a, const float *b, int n) {
    double largest = 0;
    for (int i = 0; i < n; i++) {
        const double d = fabs((double)a[i] - (double)b[i]);
        largest = d > largest ? d : largest;
    }
    return largest;
}

/* Three turns on one cache against all of their ids at once on an empty one. */
static void test_the_cache_is_kept_between_turns(void **state) {
    (void)state;
    static const char *const questions[] = {"Once upon a time", "The king said", "And then"};
    Fixture f;
    open_demo(&f);
    const int vocab = f.m.config.vocab_size;
    Conversation c = {.format = open_template(TEMPLATE_LLAMA2, DEMO_TOKENIZER)};
    Collected generated = {0};
    Error err = {0};
    for (size_t i = 0; i < COUNT(questions); i++) {
        ask(&c, questions[i], 512);
        const size_t fresh = c.ids.n - c.cached;
        assert_true(i == 0 || (c.cached > 0 && fresh < 30));
        float *kept = logits_after(&f.m, c.ids.ids + c.cached, fresh, c.cached);
        const GenerateResult r = generate_into(&generated, &f.m, c.ids.ids + c.cached, fresh, c.cached, 9);
        assert_int_equal(r.cached, c.ids.n + 8);
        assert_int_equal(r.timing.prefill_tokens, fresh);

        Fixture whole;
        Collected again = {0};
        open_demo(&whole);
        float *all = logits_after(&whole.m, c.ids.ids, c.ids.n, 0);
        float *turn = logits_after(&whole.m, c.ids.ids + c.asked, c.ids.n - c.asked, 0);
        generate_into(&again, &whole.m, c.ids.ids, c.ids.n, 0, 9);
        assert_true(largest_difference(kept, all, vocab) < 3e-2);
        assert_true(i == 0 || largest_difference(kept, turn, vocab) > 0.3);  // what went before does matter
        assert_ids(&again.ids, generated.ids.ids, generated.ids.n);
        close_demo(&whole);
        free(again.ids.ids);
        free(kept);
        free(all);
        free(turn);
        assert_int_equal(conversation_answer(&c, "", &generated.ids, (size_t)r.cached, &err), OK);
    }
    free(generated.ids.ids);
    close_template(&c.format);
    conversation_free(&c);
    close_demo(&f);
}

static void test_a_flag_ends_generation(void **state) {
    (void)state;
    static const int prompt[] = {1, 3501, 604};
    Fixture f;
    open_demo(&f);
    Collected c = {.raise_at = 5}, all = {0};
    GenerateResult r = generate_into(&all, &f.m, prompt, 3, 0, 9);
    assert_int_equal(r.stop, STOP_LENGTH);
    assert_int_equal(all.ids.n, 9);
    r = generate_into(&c, &f.m, prompt, 3, 0, 9);
    assert_int_equal(r.stop, STOP_INTERRUPT);
    assert_string_equal(stop_reason_name(r.stop), "interrupt");
    assert_ids(&c.ids, all.ids.ids, 5);
    assert_int_equal(r.cached, 3 + 5);
    c.flag = 1;  // before the first token: what there is of the prompt does not count
    r = generate_into(&c, &f.m, prompt, 3, 0, 9);
    assert_int_equal(r.stop, STOP_INTERRUPT);
    assert_int_equal(c.ids.n, 0);
    assert_int_equal(r.cached, 0);
    free(c.ids.ids);
    free(all.ids.ids);
    close_demo(&f);
}

/* Raises a flag at the input of the MLP of layer 2. */
typedef struct {
    volatile sig_atomic_t *flag;
    int n_inputs;
} Raise;

static void raise_in_layer_2(void *user, int layer, Site site, const fp16 *x, int n, int width) {
    (void)x;
    (void)n;
    (void)width;
    Raise *r = user;
    r->n_inputs++;
    *r->flag = *r->flag || (layer == 2 && site == SITE_MLP_IN);
}

static void test_a_flag_ends_prefill_between_two_layers(void **state) {
    (void)state;
    enum { N = 300, BEFORE = 7 };
    int prompt[N];
    Fixture f;
    open_demo(&f);
    for (int i = 0; i < N; i++) {
        prompt[i] = 3 + (i * 37) % (f.m.config.vocab_size - 3);
    }
    Collected all = {0}, cut = {0};
    generate_into(&all, &f.m, prompt, N, 0, 5);
    Raise raise = {.flag = &cut.flag};
    const InputHook hook = {.input = raise_in_layer_2, .user = &raise};
    free(logits_after(&f.m, prompt, BEFORE, 0));
    f.m.hook = &hook;
    GenerateResult r = generate_into(&cut, &f.m, prompt + BEFORE, N - BEFORE, BEFORE, 5);
    f.m.hook = NULL;
    assert_int_equal(r.stop, STOP_INTERRUPT);
    assert_int_equal(raise.n_inputs, 3 * 4);  // of the first three layers and the first chunk
    assert_int_equal(r.cached, BEFORE);
    cut.flag = 0;
    r = generate_into(&cut, &f.m, prompt + r.cached, (size_t)(N - r.cached), (size_t)r.cached, 5);
    assert_ids(&cut.ids, all.ids.ids, 5);
    free(cut.ids.ids);
    free(all.ids.ids);
    close_demo(&f);
}

/* ---- messages ---- */

/* Read all messages of some bytes on standard input, in a child, which fails unless they are those wanted. */
static void assert_messages(const char *input, size_t n, const char *const *want) {
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
        LineReader *reader;
        Error err = {0};
        close(ends[1]);
        bool same = dup2(ends[0], STDIN_FILENO) == STDIN_FILENO && line_open(&reader, NULL, &err) == OK;
        for (size_t i = 0; same; i++) {
            char *message = NULL;
            bool quoted;
            same = line_read(reader, &message, &quoted, &err) == OK && !message == !want[i] &&
                   (!message || strcmp(message, want[i]) == 0);
            if (!message) {
                break;
            }
            free(message);
        }
        line_close(reader);
        _exit(!same);
    }
    close(ends[0]);
    assert_int_equal(write(ends[1], input, n), n);
    close(ends[1]);
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        fail_msg("wrong messages of: %s", input);
    }
}

static void test_messages(void **state) {
    (void)state;
    static const struct {
        const char *input;
        const char *want[4];
    } cases[] = {
        {"", {NULL}},
        {"Hi", {"Hi"}},
        {"Hi\n\n  x \r\n", {"Hi", "", "  x "}},
        {"a\\\nb\\\nc\nd\n", {"a\nb\nc", "d"}},
        {"a\\\\\nb\n", {"a\\\nb"}},
        {"a\\", {"a"}},
        {"a\\\n", {"a"}},
        {"\"\"\"a\n\n b\\\n\"\"\"\nc\n", {"a\n\n b\\", "c"}},
        {"\"\"\"one\"\"\"\ntwo\n", {"one", "two"}},
        {"\"\"\"\n\na\n\n\"\"\"\n", {"\na\n"}},
        {"\"\"\"\n\"\"\"\nc", {"", "c"}},
        {"\"\"\"a\nb", {"a\nb"}},
        {"/help\n/quit\n", {"/help", "/quit"}},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        assert_messages(cases[i].input, strlen(cases[i].input), cases[i].want);
    }
}

static void test_interrupted_input_has_ended(void **state) {
    (void)state;
    const volatile sig_atomic_t interrupt = SIGINT;
    LineReader *reader;
    char *message = NULL;
    bool quoted;
    Error err = {0};
    assert_int_equal(line_open(&reader, &interrupt, &err), OK);
    assert_int_equal(line_read(reader, &message, &quoted, &err), OK);
    assert_null(message);
    line_close(reader);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_llama2_ids_are_exact),
        cmocka_unit_test(test_llama2_turns_are_exact),
        cmocka_unit_test(test_generated_ids_are_kept),
        cmocka_unit_test(test_a_cut_answer_is_encoded_anew),
        cmocka_unit_test(test_zephyr_messages_end_with_eos),
        cmocka_unit_test(test_plain_text_goes_on),
        cmocka_unit_test(test_typed_control_tokens_stay_text),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_oldest_turns_are_dropped),
        cmocka_unit_test(test_a_turn_too_long_changes_nothing),
        cmocka_unit_test(test_a_saved_conversation_comes_back),
        cmocka_unit_test(test_a_bad_file_changes_nothing),
        cmocka_unit_test(test_the_cache_is_kept_between_turns),
        cmocka_unit_test(test_a_flag_ends_generation),
        cmocka_unit_test(test_a_flag_ends_prefill_between_two_layers),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_interrupted_input_has_ended),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
