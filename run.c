/* run: the runtime's command line: load a model file, then print text or measure perplexity. Text goes to stdout
 * alone; everything else to stderr. See README.md for what the options mean. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "model/cli.h"
#include "model/generate.h"
#include "model/input.h"
#include "model/perplexity.h"
#include "model/reach.h"
#include "model/thresholds.h"
#include "tokenizer/text_stream.h"
#include "tokenizer/tokenizer.h"

static const char usage[] =
    "usage: run MODEL [options]      MODEL is a file made by convert\n"
    "input\n"
    "  -p TEXT             prompt; several are answered one after the other\n"
    "  -f FILE             prompt from a file; without -p and -f it is read from a pipe\n"
    "  -e                  expand \\n \\t \\\\ \\xHH in -p\n"
    "  --tokens            -f, --ppl or standard input is raw ids: u16, u32 if the vocabulary exceeds 65536\n"
    "generation\n"
    "  -n N                new tokens (default 256; 0 = prefill only, -1 = to the context)\n"
    "  -t T                temperature (default 0.8; 0 = greedy)\n"
    "  --top-p P           nucleus (default 0.9; 1 = off)\n"
    "  --top-k K           most probable K only (default 0 = off)\n"
    "  --seed S            of the draws (default: from the clock, printed)\n"
    "  --stop STR          end before STR; repeatable\n"
    "  --ignore-eos        go on past end-of-sequence tokens\n"
    "  --dp R | mlp=R,attn=R   dynamic pruning: share of inputs to skip in decode (default: the file's; 0 = exact)\n"
    "perplexity\n"
    "  --ppl FILE          negative log-likelihood of a text\n"
    "  --ppl-window W      tokens of a window (default: the model's context)\n"
    "  --ppl-stride S      from window to window (default W)\n"
    "  --dense-prefix P    tokens at the start of a window that are prefilled and not scored (default 0)\n"
    "  --ppl-tokens N      only the first N tokens (default: all)\n"
    "machine\n"
    "  -c N                context (default: the model's, at most 4096)\n"
    "  -b auto|cpu|cuda    backend (default auto: CUDA where it works)\n"
    "  --device N          which GPU (default 0)\n"
    "  -j N                threads of the CPU (default: all cores)\n"
    "report\n"
    "  --json FILE         figures as JSON, one object per prompt (- = stderr, and nothing else goes there)\n"
    "  --verify            check every checksum of MODEL first\n"
    "  -v, -q              more, nothing but errors\n"
    "  --version, -h\n";

#define MAX_PROMPTS 256
#define MAX_STOPS 16

typedef struct {
    const char *model, *file, *ppl_file, *json, *backend;
    const char *prompts[MAX_PROMPTS];
    size_t n_prompts;
    const char *stops[MAX_STOPS];
    size_t n_stops;
    bool escapes, tokens, seed_given, verify, verbose, quiet;
    Ratios dp;             // NAN: the file's
    bool dp_by_site;
    int context, n_threads, device;
    GenerateParams generate;
    PerplexityParams ppl;
} Options;

/* What the whole program works with. */
typedef struct {
    Options o;
    Checkpoint ck;
    Tokenizer *tokenizer;  // NULL: ids only
    Backend *be;
    Model model;
    Thresholds thresholds;
    FILE *json;            // NULL: not asked for
    bool chatty;           // is the report for people wanted?
} Run;

/* ---- arguments ---------------------------------------------------------------------------------------- */

enum {
    OPT_TOKENS = 256, OPT_TOP_P, OPT_TOP_K, OPT_SEED, OPT_STOP, OPT_IGNORE_EOS, OPT_PPL, OPT_PPL_WINDOW,
    OPT_PPL_STRIDE, OPT_DENSE_PREFIX, OPT_PPL_TOKENS, OPT_DP, OPT_JSON, OPT_VERIFY, OPT_DEVICE, OPT_VERSION,
};

static const struct option long_options[] = {
    {"tokens", no_argument, NULL, OPT_TOKENS},
    {"top-p", required_argument, NULL, OPT_TOP_P},
    {"top-k", required_argument, NULL, OPT_TOP_K},
    {"seed", required_argument, NULL, OPT_SEED},
    {"stop", required_argument, NULL, OPT_STOP},
    {"ignore-eos", no_argument, NULL, OPT_IGNORE_EOS},
    {"ppl", required_argument, NULL, OPT_PPL},
    {"ppl-window", required_argument, NULL, OPT_PPL_WINDOW},
    {"ppl-stride", required_argument, NULL, OPT_PPL_STRIDE},
    {"dense-prefix", required_argument, NULL, OPT_DENSE_PREFIX},
    {"ppl-tokens", required_argument, NULL, OPT_PPL_TOKENS},
    {"dp", required_argument, NULL, OPT_DP},
    {"json", required_argument, NULL, OPT_JSON},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"verify", no_argument, NULL, OPT_VERIFY},
    {"version", no_argument, NULL, OPT_VERSION},
    {"help", no_argument, NULL, 'h'},
    {0},
};

static int parse_int(int *value, const char *option, long low, long high, Error *err) {
    long v;
    const int rc = parse_long(&v, option, optarg, low, high, err);
    if (!rc) {
        *value = (int)v;
    }
    return rc;
}

static int parse_float(float *value, const char *option, double low, double high, Error *err) {
    double v;
    const int rc = parse_double(&v, option, optarg, low, high, err);
    if (!rc) {
        *value = (float)v;
    }
    return rc;
}

static int parse_top_p(float *top_p, Error *err) {
    const int rc = parse_float(top_p, "--top-p", 0, 1, err);
    return rc ? rc : *top_p > 0 ? OK : error_set(err, ERR_USAGE, "--top-p %.50s: must be above 0", optarg);
}

static int parse_option(Options *o, int opt, const char *name, Error *err) {
    const int most = 1 << 30;
    switch (opt) {
    case 'p':
        if (o->n_prompts == MAX_PROMPTS) {
            return error_set(err, ERR_USAGE, "more than %d prompts", MAX_PROMPTS);
        }
        o->prompts[o->n_prompts++] = optarg;
        return OK;
    case 'f': o->file = optarg; return OK;
    case 'e': o->escapes = true; return OK;
    case 'n': return parse_int(&o->generate.n_new, "-n", -1, most, err);
    case 't': return parse_float(&o->generate.sample.temperature, "-t", 0, 1e6, err);
    case 'c': return parse_int(&o->context, "-c", 1, most, err);
    case 'j': return parse_int(&o->n_threads, "-j", 1, 1024, err);
    case 'b':
        if (strcmp(optarg, "auto") != 0 && strcmp(optarg, "cpu") != 0 && strcmp(optarg, "cuda") != 0) {
            return error_set(err, ERR_USAGE, "-b %.50s: not auto, cpu or cuda", optarg);
        }
        o->backend = optarg;
        return OK;
    case OPT_DEVICE: return parse_int(&o->device, "--device", 0, 1024, err);
    case 'v': o->verbose = true; return OK;
    case 'q': o->quiet = true; return OK;
    case OPT_TOKENS: o->tokens = true; return OK;
    case OPT_TOP_P: return parse_top_p(&o->generate.sample.top_p, err);
    case OPT_TOP_K: return parse_int(&o->generate.sample.top_k, "--top-k", 0, most, err);
    case OPT_SEED: o->seed_given = true; return parse_u64(&o->generate.sample.seed, "--seed", optarg, err);
    case OPT_STOP:
        if (*optarg == 0 || o->n_stops == MAX_STOPS) {
            return error_set(err, ERR_USAGE, *optarg ? "more than %d stop strings" : "--stop is empty", MAX_STOPS);
        }
        o->stops[o->n_stops++] = optarg;
        return OK;
    case OPT_IGNORE_EOS: o->generate.ignore_eos = true; return OK;
    case OPT_PPL: o->ppl_file = optarg; return OK;
    case OPT_PPL_WINDOW: return parse_int(&o->ppl.window, "--ppl-window", 1, most, err);
    case OPT_PPL_STRIDE: return parse_int(&o->ppl.stride, "--ppl-stride", 1, most, err);
    case OPT_DENSE_PREFIX: return parse_int(&o->ppl.prefix, "--dense-prefix", 0, most, err);
    case OPT_PPL_TOKENS: {
        uint64_t n = 0;
        const int rc = parse_u64(&n, "--ppl-tokens", optarg, err);
        o->ppl.max_tokens = n;
        return rc;
    }
    case OPT_DP: return parse_ratios(&o->dp, &o->dp_by_site, "--dp", optarg, FILE_MAX_DP, err);
    case OPT_JSON: o->json = optarg; return OK;
    case OPT_VERIFY: o->verify = true; return OK;
    case ':': return error_set(err, ERR_USAGE, "%s needs a value", name);
    default: return error_set(err, ERR_USAGE, "unknown option %.100s", name);
    }
}

/* Fills o; *done when the program has printed what was asked and may end. */
static int parse_arguments(Options *o, bool *done, int argc, char **argv, Error *err) {
    *o = (Options){
        .backend = "auto",
        .dp = {NAN, NAN},
        .generate = {.n_new = 256, .sample = {.temperature = 0.8f, .top_p = 0.9f}},
    };
    opterr = 0;
    for (int opt; (opt = getopt_long(argc, argv, ":p:f:en:t:c:j:b:vqh", long_options, NULL)) != -1;) {
        if (opt == 'h' || opt == OPT_VERSION) {
            fputs(opt == 'h' ? usage : "run (spdp) " VERSION "\n", stdout);
            *done = true;
            return OK;
        }
        const char letter[] = {'-', (char)optopt, 0};  // an unknown letter may stand among others
        const bool unknown_letter = opt == '?' && optopt > 0 && optopt < OPT_TOKENS;
        const int rc = parse_option(o, opt, unknown_letter ? letter : argv[optind - 1], err);
        if (rc) {
            return rc;
        }
    }
    if (argc - optind != 1) {
        return error_set(err, ERR_USAGE, "%s (-h shows the usage)",
                         argc == optind ? "MODEL is missing" : "more than one MODEL");
    }
    o->model = argv[optind];
    if ((o->n_prompts > 0) + (o->file != NULL) + (o->ppl_file != NULL) > 1) {
        return error_set(err, ERR_USAGE, "-p, -f and --ppl exclude each other");
    }
    if (o->tokens && o->n_prompts > 0) {
        return error_set(err, ERR_USAGE, "--tokens reads ids from -f, --ppl or standard input, not from -p");
    }
    if (!o->seed_given) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        o->generate.sample.seed = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    }
    return OK;
}

/* ---- input -------------------------------------------------------------------------------------------------- */

/* Value of a hexadecimal digit, -1 if it is none. */
static int hex_digit(char c) {
    static const char digits[] = "0123456789abcdef";
    const char *at = c ? strchr(digits, c | 0x20) : NULL;
    return at && (c >= '0') ? (int)(at - digits) : -1;
}

/* text with \n \t \r \0 \\ \" \xHH expanded; an unknown escape stays as it is. */
static int expand_escapes(Bytes *bytes, const char *text, Error *err) {
    static const char names[] = "ntr0\\\"", values[] = "\n\t\r\0\\\"";
    char *out = malloc(strlen(text) + 1);
    size_t n = 0;
    if (!out) {
        return error_set(err, ERR_MEMORY, "no memory for a prompt");
    }
    while (*text) {
        const char *known = text[0] == '\\' && text[1] ? strchr(names, text[1]) : NULL;
        if (known) {
            out[n++] = values[known - names];
            text += 2;
        } else if (text[0] == '\\' && text[1] == 'x' && hex_digit(text[2]) >= 0 && hex_digit(text[3]) >= 0) {
            out[n++] = (char)(hex_digit(text[2]) * 16 + hex_digit(text[3]));
            text += 4;
        } else {
            out[n++] = *text++;
        }
    }
    *bytes = (Bytes){out, n};
    return OK;
}

/* Text (or raw ids with --tokens) to ids; BOS goes before text if bos. */
static int ids_from_input(Ids *ids, const Run *run, const Bytes *input, const char *name, bool bos, Error *err) {
    if (run->o.tokens) {
        return ids_from_raw(ids, input, name, run->model.config.vocab_size, err);
    }
    int *text = NULL;
    size_t n = 0;
    char reason[200];
    if (!tokenizer_encode(run->tokenizer, input->data, input->n, &text, &n, reason, sizeof reason)) {
        return error_set(err, ERR_FORMAT, "%.200s: %s", name, reason);
    }
    const size_t extra = bos && run->model.config.bos_id >= 0;
    int *out = memory_alloc((n + extra) * sizeof *out);
    if (!out) {
        free(text);
        return error_set(err, ERR_MEMORY, "no memory for %zu ids", n + extra);
    }
    if (extra) {
        out[0] = run->model.config.bos_id;
    }
    if (n > 0) {
        memcpy(out + extra, text, n * sizeof *out);
    }
    free(text);
    *ids = (Ids){out, n + extra};
    return OK;
}

/* ---- output -------------------------------------------------------------------------------------------------- */

/* Where generated tokens go: through the tokenizer and past the stop strings to stdout. */
typedef struct {
    const Tokenizer *tokenizer;
    DecodeState decode;
    TextStream stream;
    TokenSink sink;
    int failure;  // errno of a failed write; stdout does not take more
} Output;

static void write_stdout(void *user, const char *bytes, size_t n) {
    Output *out = user;
    const double start = time_ms();
    if (!out->failure && (fwrite(bytes, 1, n, stdout) != n || fflush(stdout) != 0)) {
        out->failure = errno;
    }
    out->sink.write_ms += time_ms() - start;
}

static bool put_token(void *user, int id) {
    Output *out = user;
    char text[TOKENIZER_MAX_PIECE];
    const size_t n = out->tokenizer ? tokenizer_decode(out->tokenizer, &out->decode, id, text)
                                    : (size_t)snprintf(text, sizeof text, "%d ", id);
    return text_stream_put(&out->stream, text, n) || out->failure;
}

/* The prompt goes through the decoder, so that what follows it is spaced right, and to a terminal. */
static void echo_prompt(Output *out, const Ids *prompt) {
    for (size_t i = 0; i < prompt->n; i++) {
        char text[TOKENIZER_MAX_PIECE];
        if (out->tokenizer) {
            const size_t n = tokenizer_decode(out->tokenizer, &out->decode, prompt->ids[i], text);
            if (isatty(STDOUT_FILENO)) {
                write_stdout(out, text, n);
            }
        }
    }
}

/* Sparsity of the matrices that were pruned, by the counts in the section table. */
static double file_sparsity(const Checkpoint *ck) {
    double elements = 0, nonzeros = 0;
    for (size_t i = 0; i < ck->n_sections; i++) {
        const FileSection *s = &ck->sections[i];
        if (s->flags & SECTION_PRUNED) {
            elements += (double)s->rows * (double)s->cols;
            nonzeros += (double)s->nnz;
        }
    }
    return elements > 0 ? 1 - nonzeros / elements : 0;
}

static double bandwidth_gb_s(const GenerateResult *g) { return g->bytes_per_token / g->timing.tpot_ms * 1e-6; }

/* What was skipped of the matrices that can skip columns; with -v site by site. */
static void report_skipped(const Run *run, const ProductStats *sites) {
    const ProductStats all = stats_sum(sites, N_DP_SITES);
    if (all.elements == 0) {
        return;
    }
    fprintf(stderr, "skipped   %.2f %% of inputs (%.4g %% asked), %.2f %% of weights, over Tiled-CBC matrices\n",
            100 * stats_dp(&all), 100 * run->thresholds.asked, 100 * stats_total(&all));
    for (int site = 0; site < N_DP_SITES && run->o.verbose; site++) {
        const ProductStats *s = &sites[site];
        if (s->elements > 0) {
            const double asked = thresholds_asked(&run->thresholds, (Site)site);
            fprintf(stderr, "          %-16s  %.2f %% of inputs (%.4g %% asked), %.2f %% of weights\n",
                    site_name((Site)site), 100 * stats_dp(s), 100 * asked, 100 * stats_total(s));
        }
    }
}

static void report_generation(const Run *run, const GenerateResult *g) {
    const Timing *t = &g->timing;
    const Model *m = &run->model;
    fprintf(stderr, "prefill   %5zu tok  %10.2f ms  %8.1f tok/s\n", t->prefill_tokens, t->ttft_ms, t->prefill_tok_s);
    if (t->decode_tokens >= 2) {
        fprintf(stderr,
                "decode    %5zu step %10.2f ms  %8.1f tok/s   TPOT %.2f ms (median %.2f, p99 %.2f)\n",
                t->decode_tokens - 1, t->total_ms - t->ttft_ms, t->decode_tok_s, t->tpot_ms, t->tpot_median_ms,
                t->tpot_p99_ms);
        fprintf(stderr, "reads     %s a token, %.1f GB/s\n", size_text(g->bytes_per_token).text, bandwidth_gb_s(g));
    } else {
        fprintf(stderr, "decode    %5zu tok   TPOT n/a (needs two tokens)\n", t->decode_tokens);
    }
    fprintf(stderr, "total     %.2f ms, seed %llu, stop: %s\n", t->total_ms,
            (unsigned long long)run->o.generate.sample.seed, stop_reason_name(g->stop));
    report_skipped(run, g->sites);
    if (run->o.verbose) {
        fprintf(stderr, "memory    weights %s, KV %s, activations %s, peak %s\n", size_text((double)m->weight_bytes).text,
                size_text((double)m->kv_bytes).text, size_text((double)m->scratch_bytes).text,
                size_text((double)memory_peak()).text);
    }
}

/* A figure, null where there is none. */
static void add_figure(cJSON *json, const char *key, double value) {
    if (isfinite(value)) {
        cJSON_AddNumberToObject(json, key, value);
    } else {
        cJSON_AddNullToObject(json, key);
    }
}

/* One object with every key; g or p is NULL where it does not apply. */
static int write_json(const Run *run, const GenerateResult *g, const PerplexityResult *p, Error *err) {
    const Timing none = {0, 0, NAN, NAN, NAN, NAN, NAN, NAN, NAN}, *t = g ? &g->timing : &none;
    const bool steps = g && t->decode_tokens >= 2;
    const ProductStats products = steps ? g->products : p ? stats_sum(p->sites, N_DP_SITES) : (ProductStats){0};
    cJSON *json = cJSON_CreateObject();
    add_figure(json, "ttft_ms", t->ttft_ms);
    add_figure(json, "prefill_tokens", g ? (double)t->prefill_tokens : NAN);
    add_figure(json, "prefill_tok_s", t->prefill_tok_s);
    add_figure(json, "decode_tokens", g ? (double)t->decode_tokens : NAN);
    add_figure(json, "tpot_ms", t->tpot_ms);
    add_figure(json, "tpot_median_ms", t->tpot_median_ms);
    add_figure(json, "tpot_p99_ms", t->tpot_p99_ms);
    add_figure(json, "decode_tok_s", t->decode_tok_s);
    add_figure(json, "bytes_per_token", steps ? g->bytes_per_token : NAN);
    add_figure(json, "gb_s", steps ? bandwidth_gb_s(g) : NAN);
    add_figure(json, "ceiling_gb_s", NAN);      // measured by the benchmarks
    add_figure(json, "joules_per_token", NAN);  // needs NVML
    add_figure(json, "sp", file_sparsity(&run->ck));
    add_figure(json, "dp_asked", run->thresholds.asked);
    add_figure(json, "dp_reached", stats_dp(&products));
    add_figure(json, "total", stats_total(&products));
    add_figure(json, "nll", p ? p->nll : NAN);
    add_figure(json, "nll_stderr", p ? p->nll_stderr : NAN);
    add_figure(json, "perplexity", p ? p->perplexity : NAN);
    // A 64-bit seed does not fit in a JSON number of double precision, so it is written as its digits.
    char seed[24];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)run->o.generate.sample.seed);
    cJSON_AddRawToObject(json, "seed", g ? seed : "null");
    cJSON_AddRawToObject(json, "stop_reason", "null");
    if (g) {
        cJSON_ReplaceItemInObjectCaseSensitive(json, "stop_reason", cJSON_CreateString(stop_reason_name(g->stop)));
    }
    cJSON_AddStringToObject(json, "backend", run->be->name);
    cJSON_AddStringToObject(json, "device", run->be->device);
    char *text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    const bool ok = text && fprintf(run->json, "%s\n", text) > 0 && fflush(run->json) == 0;
    cJSON_free(text);
    return ok ? OK : error_set(err, ERR_WRITE, "%.300s: cannot be written", run->o.json);
}

/* ---- the two jobs -------------------------------------------------------------------------------------------------- */

static int answer(Run *run, const Ids *prompt, bool last, Error *err) {
    if (prompt->n == 0) {
        return error_set(err, ERR_USAGE, "the prompt is empty and the model has no BOS token to start from");
    }
    Output out = {.tokenizer = run->tokenizer, .sink = {.token = put_token}};
    out.sink.user = &out;
    if (!text_stream_init(&out.stream, run->o.stops, run->o.n_stops, write_stdout, &out)) {
        return error_set(err, ERR_MEMORY, "no memory for the stop strings");
    }
    echo_prompt(&out, prompt);
    GenerateResult g;
    const int n = prompt->n > (size_t)1 << 30 ? 1 << 30 : (int)prompt->n;
    int rc = generate(&g, &run->model, prompt->ids, n, &run->o.generate, &out.sink, err);
    if (!rc && g.stop != STOP_STRING) {
        char text[8];
        text_stream_put(&out.stream, text, tokenizer_decode_end(&out.decode, text));
        text_stream_end(&out.stream);
    }
    text_stream_free(&out.stream);
    if (!last || isatty(STDOUT_FILENO)) {
        write_stdout(&out, "\n", 1);
    }
    if (!rc && out.failure) {
        rc = error_set(err, ERR_WRITE, "standard output: %s", strerror(out.failure));
    }
    if (!rc && run->chatty) {
        report_generation(run, &g);
    }
    return rc || !run->json ? rc : write_json(run, &g, NULL, err);
}

static void hint_control_tokens(const Run *run, const Bytes *text) {
    if (run->chatty && memmem(text->data, text->n, "<s>", 3)) {
        fprintf(stderr, "hint      <s> in a prompt is plain text; BOS is added by itself\n");
    }
}

/* One prompt: from -p, or all of a file or of standard input. */
static int answer_input(Run *run, const char *prompt, bool last, Error *err) {
    Bytes input = {0};
    Ids ids = {0};
    const char *name = prompt ? "-p" : run->o.file ? run->o.file : "standard input";
    int rc = OK;
    if (prompt && run->o.escapes) {
        rc = expand_escapes(&input, prompt, err);
    } else if (prompt) {
        input = (Bytes){strdup(prompt), strlen(prompt)};
        rc = input.data ? OK : error_set(err, ERR_MEMORY, "no memory for a prompt");
    } else {
        rc = run->o.file ? input_read_file(&input, run->o.file, err) : input_read_stream(&input, stdin, name, err);
    }
    if (!rc && !run->o.tokens) {
        hint_control_tokens(run, &input);
    }
    rc = rc ? rc : ids_from_input(&ids, run, &input, name, true, err);
    rc = rc ? rc : answer(run, &ids, last, err);
    free(ids.ids);
    free(input.data);
    return rc;
}

static int answer_all(Run *run, Error *err) {
    const Options *o = &run->o;
    if (o->n_prompts == 0) {
        // Nobody types a prompt into a terminal that shows none: start from BOS alone.
        return answer_input(run, o->file || !isatty(STDIN_FILENO) ? NULL : "", true, err);
    }
    int rc = OK;
    for (size_t i = 0; i < o->n_prompts && !rc; i++) {
        rc = answer_input(run, o->prompts[i], i + 1 == o->n_prompts, err);
    }
    return rc;
}

static void show_perplexity(void *user, size_t done, size_t total, double nll) {
    (void)nll;
    progress_show(user, (double)done, (double)total);
}

static int measure_perplexity(Run *run, Error *err) {
    Bytes input = {0};
    Ids ids = {0};
    PerplexityResult p;
    Progress progress = {.label = "perplexity", .unit = "windows", .quiet = !run->chatty};
    int rc = input_read_file(&input, run->o.ppl_file, err);
    rc = rc ? rc : ids_from_input(&ids, run, &input, run->o.ppl_file, false, err);
    rc = rc ? rc : perplexity(&p, &run->model, ids.ids, ids.n, &run->o.ppl, show_perplexity, &progress, err);
    free(ids.ids);
    free(input.data);
    if (rc) {
        return rc;
    }
    progress_end(&progress);
    if (run->chatty) {
        fprintf(stderr,
                "protocol  %zu windows of %d, stride %d, prefix %d prefilled and not scored, no BOS inserted; "
                "%zu tokens scored\n",
                p.n_windows, p.protocol.window, p.protocol.stride, p.protocol.prefix, p.n_scored);
        fprintf(stderr, "sparsity  static %.4f over the pruned matrices\n", file_sparsity(&run->ck));
        report_skipped(run, p.sites);
        fprintf(stderr, "nll       %.6f +- %.6f nats a token\nppl       %.4f\n", p.nll, p.nll_stderr, p.perplexity);
        fprintf(stderr, "speed     %.1f tok/s\n", (double)p.n_scored / p.ms * 1e3);
    }
    return run->json ? write_json(run, NULL, &p, err) : OK;
}

/* ---- set-up -------------------------------------------------------------------------------------------------------- */

static int load_tokenizer(Run *run, Error *err) {
    const FileSection *s = checkpoint_find(&run->ck, SECTION_TOKENIZER, -1);
    char reason[200];
    if (s && !tokenizer_load(&run->tokenizer, checkpoint_bytes(&run->ck, s), s->bytes, reason, sizeof reason)) {
        return error_set(err, ERR_FORMAT, "%.200s: tokenizer: %s", run->o.model, reason);
    }
    if (!s && !run->o.tokens) {
        return error_set(err, ERR_USAGE, "%.200s has no tokenizer: give token ids with --tokens", run->o.model);
    }
    if (!s && run->o.n_stops > 0) {
        return error_set(err, ERR_USAGE, "--stop needs a tokenizer, and %.200s has none", run->o.model);
    }
    return OK;
}

/* Choose the thresholds and put them in force. */
static int set_thresholds(Run *run, Error *err) {
    const int rc = thresholds_choose(&run->thresholds, &run->ck, &run->o.dp, run->o.dp_by_site, err);
    if (!rc) {
        model_set_thresholds(&run->model, run->thresholds.values);
    }
    return rc;
}

/* The dynamic ratio in force, whose it is, and which sites cannot follow it. */
static void report_dp(const Run *run) {
    const Thresholds *t = &run->thresholds;
    const bool given = !isnan(run->o.dp.mlp) || !isnan(run->o.dp.attn);
    if (t->ratios.mlp == t->ratios.attn) {
        fprintf(stderr, "dynamic   %.4g", t->ratios.mlp);
    } else {
        fprintf(stderr, "dynamic   mlp %.4g, attn %.4g", t->ratios.mlp, t->ratios.attn);
    }
    fprintf(stderr, " %s", given ? "asked" : checkpoint_find(&run->ck, SECTION_QUANTILES, -1) ? "from the file"
                                                                                             : "(the file has no quantiles)");
    const char *before = "; stored dense, skips nothing: ";
    for (int site = 0; site < N_DP_SITES; site++) {
        if (t->n_tiled[site] == 0 && thresholds_asked(t, (Site)site) > 0) {
            fprintf(stderr, "%s%s", before, site_name((Site)site));
            before = ", ";
        }
    }
    fputc('\n', stderr);
}

static int set_up(Run *run, Error *err) {
    const Options *o = &run->o;
    const double start = time_ms();
    const bool ppl = o->ppl_file != NULL;
    int rc = checkpoint_open(&run->ck, o->model, err);
    if (!rc && o->verify && (rc = checkpoint_verify(&run->ck, err))) {
        error_prefix(err, o->model);
    }
    rc = rc ? rc : load_tokenizer(run, err);
    Error note = {0};
    rc = rc ? rc
            : backend_open(&run->be, o->backend, o->device, getenv("SPDP_NO_GRAPH") == NULL, o->n_threads, getenv("SPDP_ISA"),
                           &note, err);
    // Perplexity needs a cache of one window, however long the model's context is.
    const int context = ppl ? (o->ppl.window ? o->ppl.window : run->ck.config.seq_len) : o->context;
    rc = rc ? rc : model_load(&run->model, &run->ck, run->be, context, ppl, err);
    rc = rc ? rc : set_thresholds(run, err);
    if (rc) {
        return rc;
    }
    if (o->json) {
        run->json = strcmp(o->json, "-") == 0 ? stderr : fopen(o->json, "w");
        if (!run->json) {
            return error_set(err, ERR_WRITE, "%.300s: %s", o->json, strerror(errno));
        }
    }
    run->chatty = !o->quiet && run->json != stderr;
    if (run->chatty && note.code) {
        fprintf(stderr, "note      %s; using the CPU\n", note.text);
    }
    if (run->chatty) {
        fprintf(stderr, "device    %s\nmodel     %s, %s, %.1f %% sparse; loaded in %.0f ms%s\n",
                run->be->device, o->model, size_text((double)run->ck.bytes).text, 100 * file_sparsity(&run->ck),
                time_ms() - start, o->verify ? ", checksums verified" : "");
        report_dp(run);
    }
    return OK;
}

static void tear_down(Run *run) {
    thresholds_free(&run->thresholds);
    model_free(&run->model);
    if (run->be) {
        run->be->free(run->be);
    }
    tokenizer_free(run->tokenizer);
    checkpoint_close(&run->ck);
    if (run->json && run->json != stderr) {
        fclose(run->json);
    }
}

int main(int argc, char **argv) {
    Run run = {0};
    Error err = {0};
    bool done = false;
    signal(SIGXFSZ, SIG_IGN);  // a file size limit is then a failed write like a full disk
    int rc = parse_arguments(&run.o, &done, argc, argv, &err);
    if (!rc && !done) {
        rc = set_up(&run, &err);
        rc = rc ? rc : run.o.ppl_file ? measure_perplexity(&run, &err) : answer_all(&run, &err);
        tear_down(&run);
    }
    if (!rc && fflush(stdout) != 0) {
        rc = error_set(&err, ERR_WRITE, "standard output: %s", strerror(errno));
    }
    if (rc) {
        fprintf(stderr, "run: %s\n", err.text);
    }
    return rc == OK ? EXIT_OK : rc == ERR_USAGE ? EXIT_USAGE : EXIT_FAILED;
}
