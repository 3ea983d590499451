/* fuzz_decode.c: token ids of any value as a command line takes them (model/input.h), then any ids of a
 * vocabulary through a small model (model/generate.h) with any settings: positions, batches, sampling,
 * thresholds, stop strings, an interrupt, a prompt that the context has no room for. What must hold:
 *   - raw ids are refused exactly where one of them is none of the vocabulary's
 *   - a prompt is refused exactly where it does not fit
 *   - chosen tokens are possible under the settings, and as many as the reason for stopping says
 *   - text ends before the first stop string
 *   - logits are finite or the error says that a number is not; the next call works again
 *   - without thresholds, logits are those of one prefill of all ids that the cache holds
 * An input is Settings, then bytes of ids. Runs from the root of the repository, whose model it loads. */
#include <math.h>

#include "../../model/generate.h"
#include "../../model/input.h"
#include "../../tokenizer/text_stream.h"
#include "fuzz.h"

#define MODEL "tests/fuzz/model.bin"
#define MAX_IDS 80  // of an input; beyond the context
#define MAX_CONTEXT 64
#define MAX_SHIFT 1e-3f     // of a logit between decode and prefill: six times what rounding was seen to do
#define TOKEN_TEXT 3        // characters
#define MOST_NEW (1 << 30)  // what -n takes

enum {
    BEST_ISA = 1,  // else the portable kernels
    IGNORE_EOS = 2,
    BY_DECODE = 4,  // what is cached already was decoded, not prefilled
    THRESHOLD = 8,
    NORM = 16,  // weights of the final norm
    MANY_NEW = 32,
    INTERRUPT = 64,
    STOPS = 128,
};

typedef struct {
    uint8_t flags;
    uint8_t cached;  // ids that come before the prompt,
    uint8_t piece;   // so many at once
    int8_t n_new;
    float temperature, top_p;
    int32_t top_k;
    float threshold;
    uint16_t norm;         // fp16
    uint8_t interrupt_at;  // tokens
    uint8_t stop_lengths;  // four bits each
    uint8_t stops[2];      // bits of the two strings
    uint16_t seed;
} Settings;

/* ---- raw ids ---- */

static void read_raw(const uint8_t *data, size_t size, int vocab) {
    const size_t width = vocab > 65536 ? 4 : 2;
    bool good = size % width == 0;
    for (size_t i = 0; i + width <= size; i += width) {
        uint32_t id = 0;
        memcpy(&id, data + i, width);
        good &= id < (uint32_t)vocab;
    }
    Bytes raw = {exact_copy(data, size), size};
    Ids ids = {0};
    Error err = {0};
    const int rc = ids_from_raw(&ids, &raw, "input", vocab, &err);
    CHECK(good ? rc == OK && ids.n == size / width : rc == ERR_FORMAT && !ids.ids && err.code == rc);
    for (size_t i = 0; i < ids.n; i++) {
        CHECK(ids.ids[i] >= 0 && ids.ids[i] < vocab && memcmp(&ids.ids[i], data + i * width, width) == 0);
    }
    free(ids.ids);
    free(raw.data);
}

/* ---- the model ---- */

/* Random weights are so small that a layer hardly changes its residual stream. With larger norms what a token
 * sees of others counts. */
static void amplify(Model *m) {
    static fp16 norm[256];
    CHECK(m->config.dim <= (int)(sizeof norm / sizeof *norm));
    for (size_t i = 0; i < sizeof norm / sizeof *norm; i++) {
        norm[i] = fp16_from_float(8);
    }
    for (int i = 0; i < m->config.n_layers; i++) {
        m->weights.layers[i].attn_norm = norm;
        m->weights.layers[i].mlp_norm = norm;
    }
}

static Model *get_model(bool best_isa) {
    static Checkpoint ck;
    static Model models[2];
    Model *m = &models[best_isa];
    if (!m->be) {
        Backend *be = NULL;
        Error err = {0};
        if ((!ck.data && checkpoint_open(&ck, MODEL, &err)) ||
            backend_cpu(&be, 1, best_isa ? NULL : "portable", &err) ||
            model_load(m, &ck, be, 0, false, &err)) {
            fprintf(stderr, "%s (run from the root of the repository)\n", err.text);
            exit(1);
        }
        CHECK(m->seq_len <= MAX_CONTEXT);
        amplify(m);
    }
    return m;
}

static void set_thresholds(Model *m, float value) {
    float values[8 * N_DP_SITES];
    CHECK(m->config.n_layers <= 8);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        values[i] = value;
    }
    model_set_thresholds(m, values);
}

static void check_finite(const Model *m) {
    for (int i = 0; i < m->config.vocab_size; i++) {
        CHECK(isfinite(m->state.logits[i]));
    }
}

/* ---- what generated tokens must be ---- */

typedef struct {
    const Model *m;
    const GenerateParams *params;
    int ids[MAX_CONTEXT], n;
    size_t interrupt_at;
    volatile sig_atomic_t interrupt;
    char stop_texts[2][8];
    const char *stops[2];
    size_t n_stops;
    TextStream stream;
    bool stopped;
    char all[TOKEN_TEXT * MAX_CONTEXT],
        written[TOKEN_TEXT * MAX_CONTEXT];  // text of the tokens; what came through
    size_t n_all, n_written;
} Sink;

/* Text of two letters, in which a stop string often begins and often begins anew. */
static void spell(char *text, size_t n, unsigned bits) {
    for (size_t i = 0; i < n; i++) {
        text[i] = "ab"[bits >> i & 1];
    }
}

/* Tokens that are more probable. */
static int rank_of(const Model *m, int id) {
    int rank = 0;
    for (int i = 0; i < m->config.vocab_size; i++) {
        rank += m->state.logits[i] > m->state.logits[id];
    }
    return rank;
}

static void check_choice(const Sink *s, int id) {
    const SampleParams *sample = &s->params->sample;
    CHECK(id >= 0 && id < s->m->config.vocab_size);
    CHECK(s->params->ignore_eos || !config_is_eos(&s->m->config, id));
    check_finite(s->m);
    const int most = sample->temperature == 0 ? 1
                     : sample->top_k > 0      ? sample->top_k
                                              : s->m->config.vocab_size;
    CHECK(rank_of(s->m, id) < most);
}

static void write_text(void *user, const char *bytes, size_t n) {
    Sink *s = user;
    CHECK(n <= sizeof s->written - s->n_written);
    memcpy(s->written + s->n_written, bytes, n);
    s->n_written += n;
}

static bool put_token(void *user, int id) {
    Sink *s = user;
    CHECK(!s->stopped && !s->interrupt && s->n < MAX_CONTEXT);
    check_choice(s, id);
    s->ids[s->n++] = id;
    s->interrupt = (size_t)s->n == s->interrupt_at;
    spell(s->all + s->n_all, TOKEN_TEXT, (unsigned)id);
    s->stopped = text_stream_put(&s->stream, s->all + s->n_all, TOKEN_TEXT);
    s->n_all += TOKEN_TEXT;
    return s->stopped;
}

/* Length of the longest stop string that ends text; 0 if none does. */
static size_t stop_at(const Sink *s, size_t n) {
    size_t longest = 0;
    for (size_t i = 0; i < s->n_stops; i++) {
        const size_t length = strlen(s->stops[i]);
        if (length <= n && memcmp(s->all + n - length, s->stops[i], length) == 0) {
            longest = max_size(longest, length);
        }
    }
    return longest;
}

/* The stream let through what is before the first stop string, or all. */
static void check_text(Sink *s) {
    size_t end = 0;
    while (end < s->n_all && stop_at(s, end) == 0) {
        end++;
    }
    CHECK(s->stopped == (stop_at(s, end) > 0));
    if (!s->stopped) {
        text_stream_end(&s->stream);
    }
    CHECK(s->n_written == end - stop_at(s, end) && memcmp(s->written, s->all, s->n_written) == 0);
}

static void check_result(const GenerateResult *r, const Sink *s, int end) {
    const GenerateParams *p = s->params;
    const int n = s->n + (r->stop == STOP_EOS), room = s->m->seq_len - end;
    const bool to_context = p->n_new < 0 || p->n_new > room;
    switch (r->stop) {
    case STOP_LENGTH:
        CHECK(!to_context && n == p->n_new);
        break;
    case STOP_CONTEXT:
        CHECK(to_context && n == room);
        break;
    case STOP_EOS:
        CHECK(!p->ignore_eos);
        break;
    case STOP_STRING:
        CHECK(s->stopped && n > 0);
        break;
    case STOP_INTERRUPT:
        CHECK(s->interrupt);
        break;
    }
    // The last token was chosen from logits, but is not computed itself; an interrupt comes after that, or
    // amid the prompt.
    const bool interrupted = r->stop == STOP_INTERRUPT;
    CHECK(r->cached == (interrupted && n == 0 ? p->pos : end + n - (n > 0 && !interrupted)) && n <= room);
    CHECK(r->timing.decode_tokens == (size_t)n);
    CHECK(r->products.active_elements <= r->products.elements);
    CHECK(r->products.active_nonzeros <= r->products.active_elements);
}

/* ---- a run ---- */

static float in_range(float value, float above, float most, float otherwise) {
    return value > above && value <= most ? value : otherwise;
}

/* What a command line can ask for. */
static GenerateParams params_of(const Settings *set, int pos, const volatile sig_atomic_t *interrupt) {
    return (GenerateParams){
        .n_new = set->flags & MANY_NEW ? MOST_NEW
                 : set->n_new < 0      ? -1
                                       : set->n_new,
        .ignore_eos = set->flags & IGNORE_EOS,
        .pos = pos,
        .interrupt = interrupt,
        .sample =
            {
                .temperature = in_range(set->temperature, 0, 1e6f, 0),
                .top_p = in_range(set->top_p, 0, 1, 1),
                .top_k = set->top_k < 0 || set->top_k > MOST_NEW ? 0 : set->top_k,
                .seed = set->seed,
            },
    };
}

static void open_sink(Sink *s, const Settings *set) {
    for (size_t i = 0; i < 2 && set->flags & STOPS; i++) {
        spell(s->stop_texts[i], 1 + (set->stop_lengths >> 4 * i & 15) % 7, set->stops[i]);
        s->stops[s->n_stops++] = s->stop_texts[i];
    }
    CHECK(text_stream_init(&s->stream, s->stops, s->n_stops, write_text, s));
}

/* Put ids into the cache, piece by piece. */
static void cache_ids(Model *m, const int *ids, int n, const Settings *set) {
    const int piece = 1 + set->piece % m->chunk;
    Error err = {0};
    for (int done = 0; done < n; done += piece) {
        const int now = n - done < piece ? n - done : piece;
        if (set->flags & BY_DECODE) {
            model_forward(m, ids + done, now, done, DECODE);
        } else {
            CHECK(model_prefill(m, ids + done, now, done, &err) == OK);
        }
    }
    CHECK(m->be->finish(m->be, &err) == OK);
}

/* Logits after some ids, computed at once, against those that are there. */
static void check_logits(Model *m, const int *ids, int n, bool same) {
    float before[256];
    const int vocab = m->config.vocab_size;
    Error err = {0};
    CHECK(vocab <= (int)(sizeof before / sizeof *before));
    memcpy(before, m->state.logits, (size_t)vocab * sizeof *before);
    CHECK(model_prefill(m, ids, n, 0, &err) == OK);
    check_finite(m);
    for (int i = 0; i < vocab && same; i++) {
        CHECK(fabsf(before[i] - m->state.logits[i]) <= MAX_SHIFT);
    }
}

/* Generate after ids[pos .. n-1]; the cache holds those before. */
static int run(Sink *s, Model *m, const int *ids, int n, int pos, const Settings *set, GenerateResult *r) {
    const GenerateParams params = params_of(set, pos, set->flags & INTERRUPT ? &s->interrupt : NULL);
    TokenSink sink = {.token = put_token, .user = s};
    Error err = {0};
    s->m = m;
    s->params = &params;
    s->interrupt_at = set->flags & INTERRUPT ? set->interrupt_at : SIZE_MAX;
    s->interrupt = s->interrupt_at == 0;
    open_sink(s, set);
    const int rc = generate(r, m, ids + pos, n - pos, &params, &sink, &err);
    CHECK((rc == ERR_USAGE) == (n > m->seq_len));
    CHECK(rc == OK || rc == ERR_USAGE || (rc == ERR_NUMBER && set->flags & NORM));
    if (rc) {
        CHECK(err.code == rc && strlen(err.text) > 0 && (rc == ERR_NUMBER || s->n == 0));
    } else {
        check_result(r, s, n);
        check_text(s);
    }
    text_stream_free(&s->stream);
    s->params = NULL;
    return rc;
}

static void decode(Model *m, const int *ids, int n, const Settings *set) {
    const int most = n - 1 < m->seq_len ? n - 1 : m->seq_len, pos = set->cached < most ? set->cached : most;
    fp16 norm[256];
    CHECK(m->config.dim <= (int)(sizeof norm / sizeof *norm));
    for (size_t i = 0; i < sizeof norm / sizeof *norm; i++) {
        norm[i] = set->norm;
    }
    cache_ids(m, ids, pos, set);

    Sink s = {0};
    GenerateResult r = {0};
    const fp16 *own_norm = m->weights.final_norm;
    m->weights.final_norm = set->flags & NORM ? norm : own_norm;
    set_thresholds(m, set->flags & THRESHOLD ? set->threshold : 0);
    const int rc = run(&s, m, ids, n, pos, set, &r);
    m->weights.final_norm = own_norm;
    set_thresholds(m, 0);

    int all[MAX_IDS + MAX_CONTEXT];
    memcpy(all, ids, (size_t)n * sizeof *all);
    memcpy(all + n, s.ids, (size_t)s.n * sizeof *all);
    const bool whole = rc == OK && r.cached >= n;  // else there are no logits of the prompt
    CHECK(r.cached <= n + s.n);
    check_logits(m, all, whole ? r.cached : 1, whole && !(set->flags & (THRESHOLD | NORM)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    Settings set = {0};
    const size_t n_set = min_size(size, sizeof set);
    if (n_set > 0) {
        memcpy(&set, data, n_set);
    }
    data += n_set;
    size -= n_set;
    Model *m = get_model(set.flags & BEST_ISA);
    read_raw(data, size, m->config.vocab_size);
    read_raw(data, size, 70000);  // ids of four bytes

    int ids[MAX_IDS];
    const size_t n = min_size(size, MAX_IDS);
    for (size_t i = 0; i < n; i++) {
        ids[i] = data[i] % m->config.vocab_size;
    }
    if (n > 0) {
        decode(m, ids, (int)n, &set);
    }
    return 0;
}
