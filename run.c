/* run: the runtime's command line: load a model file, or make one of random weights, then print text or measure
 * perplexity. Text goes to stdout alone; everything else to stderr. See README.md for what the options mean. */
#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "chat/chat.h"
#include "model/bench.h"
#include "model/cli.h"
#include "model/expanded.h"
#include "model/generate.h"
#include "model/input.h"
#include "model/json.h"
#include "model/perplexity.h"
#include "model/report.h"
#include "model/score.h"
#include "model/synthetic.h"
#include "model/thresholds.h"
#include "model/unfinished.h"
#include "tokenizer/text_stream.h"
#include "tokenizer/tokenizer.h"

static const char usage[] =
    "usage: run MODEL [options]                MODEL is a file made by convert; --ppl takes several\n"
    "       run --synthetic SHAPE [options]    random weights, made in memory, for speed work\n"
    "input\n"
    "  -p TEXT             prompt; several are answered one after the other\n"
    "  -f FILE             prompt from a file; without -p and -f it is read from a pipe\n"
    "  -e                  expand \\n \\t \\\\ \\xHH in -p\n"
    "  --tokens            input is raw ids (u16; u32 above 65536 in the vocabulary), arrays in --score\n"
    "generation\n"
    "  -n N                new tokens (default 256; 0 = prefill only, -1 = to the context)\n"
    "  -t T                temperature (default 0.8; 0 = greedy)\n"
    "  --top-p P           nucleus (default 0.9; 1 = off)\n"
    "  --top-k K           most probable K only (default 0 = off)\n"
    "  --seed S            of the draws (default: from the clock, printed)\n"
    "  --stop STR          end before STR; repeatable\n"
    "  --ignore-eos        go on past end-of-sequence tokens\n"
    "  --dp R | mlp=R,attn=R   share of inputs to skip in decode (default: the file's; 0 = exact)\n"
    "chat\n"
    "  --chat              answer what is typed or piped in, line by line; -n is per answer (default -1)\n"
    "  --system TEXT       system prompt\n"
    "  --template NAME     llama2, zephyr, plain or none (default: the file's; plain where it names none)\n"
    "  --stats             times after each answer\n"
    "perplexity\n"
    "  --ppl FILE          negative log-likelihood of a text\n"
    "  --ppl-window W      tokens of a window (default: the model's context)\n"
    "  --ppl-stride S      from window to window (default W)\n"
    "  --dense-prefix P    tokens at the start of a window that are prefilled and not scored (default 0)\n"
    "  --ppl-tokens N      only the first N tokens (default: all)\n"
    "scores\n"
    "  --score FILE        log-probability of continuations, each a JSON line\n"
    "                      {\"context\": \"..\", \"continuation\": \"..\"}\n"
    "speed\n"
    "  --bench             table of times: 128 and 2048 random ids, 128 new tokens, DP 0, .3, .5, dense;\n"
    "                      or what --prompt-tokens, -n and --dp ask for\n"
    "random weights\n"
    "  --synthetic SHAPE   tinyllama-1.1b, llama2-7b, llama2-13b, llama2-70b or\n"
    "                      dim:hidden:layers:heads:kv:vocab:context; --seed is theirs too (default 0)\n"
    "  --sp R              share of the pruned matrices to remove, at random (default 0.3)\n"
    "  --prune mlp|all     which are pruned: gate, up, down; or q, k, v, o too (default mlp)\n"
    "  --prompt-tokens N   random ids as prompt (default 128); or --tokens -f FILE, which prints ids too\n"
    "machine\n"
    "  -c N                context (default: the model's, at most 4096)\n"
    "  -b auto|cpu|cuda    backend (default auto: CUDA where it works)\n"
    "  --device N          which GPU (default 0)\n"
    "  -j N                threads of the CPU (default: all cores)\n"
    "report\n"
    "  --logprobs K        the K (1 .. 20) most probable tokens at every place, in --json or as a table\n"
    "  --json FILE         figures as JSON, a line per prompt or model (- = stderr, nothing else there)\n"
    "  --verify            check every checksum of MODEL first\n"
    "  -v, -q              more, nothing but errors\n"
    "  --version, -h\n";

#define MAX_PROMPTS 256
#define MAX_STOPS 16
#define DEFAULT_PROMPT_TOKENS 128
#define BENCH_NEW_TOKENS 128
#define BENCH_DP 0.5        // the largest of the ratios that --bench takes by itself
#define SHORT_LOAD_MS 2000  // what takes no longer shows no progress

typedef struct {
    const char *model, *file, *ppl_file, *score_file, *json, *backend;
    char *const *models;            // of which model is the one at work
    int n_models;
    SyntheticParams synthetic;      // shape: NULL = a file
    int prompt_tokens;              // of random ids; 0: not given
    const char *synthetic_only;     // an option that was given and makes sense with --synthetic alone
    const char *prompts[MAX_PROMPTS];
    size_t n_prompts;
    const char *stops[MAX_STOPS];
    size_t n_stops;
    bool escapes, tokens, seed_given, verify, verbose, quiet;
    Ratios dp;             // NAN: the file's
    bool dp_by_site;
    int context, n_threads, device;
    int logprobs;          // tokens at every place; 0: none
    bool bench, n_given;
    bool chat, stats, format_given;
    const char *system;    // of the chat; NULL: not given
    TemplateKind format;
    GenerateParams generate;
    PerplexityParams ppl;
} Options;

/* What the whole program works with. */
typedef struct {
    Options o;
    Checkpoint ck;
    Synthetic synthetic;   // with --synthetic: what ck is a copy of,
    Ids random_prompt;     // and the prompt
    bool dense;            // the dense form of a file is wanted: ck is then a copy of
    Expanded expanded;     // this, made from
    Checkpoint file;       // that
    Tokenizer *tokenizer;  // NULL: ids only
    Backend *be;
    Model model;
    Thresholds thresholds;
    FILE *json;            // NULL: not asked for
    Logprobs logprobs;     // of the last generation
    DecodeState before_logprobs;  // of the text, when their first token came
    bool chatty;           // is the report for people wanted?
} Run;

/* ---- arguments ---------------------------------------------------------------------------------------- */

enum {
    OPT_TOKENS = 256, OPT_TOP_P, OPT_TOP_K, OPT_SEED, OPT_STOP, OPT_IGNORE_EOS, OPT_PPL, OPT_PPL_WINDOW,
    OPT_PPL_STRIDE, OPT_DENSE_PREFIX, OPT_PPL_TOKENS, OPT_DP, OPT_JSON, OPT_VERIFY, OPT_DEVICE, OPT_VERSION,
    OPT_SYNTHETIC, OPT_SP, OPT_PRUNE, OPT_PROMPT_TOKENS, OPT_LOGPROBS, OPT_SCORE, OPT_BENCH,
    OPT_CHAT, OPT_SYSTEM, OPT_TEMPLATE, OPT_STATS,
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
    {"synthetic", required_argument, NULL, OPT_SYNTHETIC},
    {"sp", required_argument, NULL, OPT_SP},
    {"prune", required_argument, NULL, OPT_PRUNE},
    {"prompt-tokens", required_argument, NULL, OPT_PROMPT_TOKENS},
    {"logprobs", required_argument, NULL, OPT_LOGPROBS},
    {"score", required_argument, NULL, OPT_SCORE},
    {"bench", no_argument, NULL, OPT_BENCH},
    {"chat", no_argument, NULL, OPT_CHAT},
    {"system", required_argument, NULL, OPT_SYSTEM},
    {"template", required_argument, NULL, OPT_TEMPLATE},
    {"stats", no_argument, NULL, OPT_STATS},
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

/* The options of random weights. */
static int parse_synthetic(Options *o, int opt, Error *err) {
    if (opt == OPT_SYNTHETIC) {
        o->synthetic.shape = optarg;
        return OK;
    }
    o->synthetic_only = opt == OPT_SP ? "--sp" : opt == OPT_PRUNE ? "--prune" : "--prompt-tokens";
    if (opt == OPT_SP) {
        return parse_double(&o->synthetic.sp, "--sp", optarg, 0, 1, err);
    }
    if (opt == OPT_PROMPT_TOKENS) {
        return parse_int(&o->prompt_tokens, "--prompt-tokens", 1, 1 << 30, err);
    }
    o->synthetic.prune_attn = strcmp(optarg, "all") == 0;
    return o->synthetic.prune_attn || strcmp(optarg, "mlp") == 0
               ? OK
               : error_set(err, ERR_USAGE, "--prune %.100s: not mlp or all", optarg);
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
    case 'n': o->n_given = true; return parse_int(&o->generate.n_new, "-n", -1, most, err);
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
    case OPT_LOGPROBS: return parse_int(&o->logprobs, "--logprobs", 1, MAX_LOGPROBS, err);
    case OPT_SCORE: o->score_file = optarg; return OK;
    case OPT_BENCH: o->bench = true; return OK;
    case OPT_CHAT: o->chat = true; return OK;
    case OPT_SYSTEM: o->system = optarg; return OK;
    case OPT_TEMPLATE: o->format_given = true; return template_parse(&o->format, "--template", optarg, err);
    case OPT_STATS: o->stats = true; return OK;
    case OPT_SYNTHETIC:
    case OPT_SP:
    case OPT_PRUNE:
    case OPT_PROMPT_TOKENS: return parse_synthetic(o, opt, err);
    case ':': return error_set(err, ERR_USAGE, "%s needs a value", name);
    default: return error_set(err, ERR_USAGE, "unknown option %.100s", name);
    }
}

/* What does not go with --score and --bench, and their defaults. */
static int complete_measurement(Options *o, Error *err) {
    const char *with_score = o->json       ? "--json: its results are JSON on standard output"
                             : o->logprobs ? "--logprobs"
                                           : NULL;
    const char *with_bench = o->logprobs                           ? "--logprobs"
                             : o->tokens                           ? "--tokens"
                             : o->n_stops > 0                      ? "--stop"
                             : o->n_given && o->generate.n_new < 2 ? "-n below 2"
                                                                   : NULL;
    if (o->score_file && with_score) {
        return error_set(err, ERR_USAGE, "--score does not go with %s", with_score);
    }
    if (o->bench && with_bench) {
        return error_set(err, ERR_USAGE, "--bench does not go with %s", with_bench);
    }
    if (o->ppl_file && o->logprobs) {
        return error_set(err, ERR_USAGE, "--ppl does not go with --logprobs");
    }
    o->generate.n_new = o->bench && !o->n_given ? BENCH_NEW_TOKENS : o->generate.n_new;
    return OK;
}

/* What goes with --chat and what does not, and its defaults. */
static int complete_chat(Options *o, Error *err) {
    if (!o->chat) {
        const char *alone = o->system ? "--system" : o->format_given ? "--template" : o->stats ? "--stats" : NULL;
        return alone ? error_set(err, ERR_USAGE, "%s goes with --chat", alone) : OK;
    }
    const char *excluded = o->n_prompts > 0            ? "-p: messages come from standard input"
                           : o->file                   ? "-f: messages come from standard input"
                           : o->ppl_file               ? "--ppl"
                           : o->score_file             ? "--score"
                           : o->bench                  ? "--bench"
                           : o->synthetic.shape        ? "--synthetic: there is no tokenizer"
                           : o->tokens                 ? "--tokens: messages are text"
                           : o->logprobs               ? "--logprobs"
                           : o->json                   ? "--json: --stats prints figures"
                           : o->generate.n_new == 0    ? "-n 0: there would be no answers"
                                                       : NULL;
    if (excluded) {
        return error_set(err, ERR_USAGE, "--chat does not go with %s", excluded);
    }
    if (o->system && o->format_given && !template_has_system(o->format)) {
        return error_set(err, ERR_USAGE, "--system: the template %s has no place for it",
                         template_name(o->format));
    }
    o->generate.n_new = o->n_given ? o->generate.n_new : -1;
    return OK;
}

static double asked_or_0(double ratio) { return isnan(ratio) ? 0 : ratio; }

/* What goes with random weights and what does not; and what follows from the rest of the options. */
static int complete_synthetic(Options *o, Error *err) {
    if (!o->synthetic.shape) {
        const bool prompt = o->synthetic_only && strcmp(o->synthetic_only, "--prompt-tokens") == 0;
        return o->synthetic_only && !(o->bench && prompt)
                   ? error_set(err, ERR_USAGE, "%s goes with --synthetic%s", o->synthetic_only, prompt ? " or --bench" : "")
                   : OK;
    }
    const char *excluded = o->n_prompts > 0               ? "-p: there is no tokenizer"
                           : o->n_stops > 0               ? "--stop: there is no tokenizer"
                           : o->ppl_file                  ? "--ppl: random weights predict nothing"
                           : o->score_file                ? "--score: random weights predict nothing"
                           : o->verify                    ? "--verify: there is no file"
                           : o->file && !o->tokens        ? "-f without --tokens: there is no tokenizer"
                           : o->file && o->prompt_tokens  ? "-f with --prompt-tokens: one prompt is enough"
                                                          : NULL;
    if (excluded) {
        return error_set(err, ERR_USAGE, "--synthetic does not go with %s", excluded);
    }
    const bool dp_given = !isnan(o->dp.mlp) || !isnan(o->dp.attn);
    o->prompt_tokens = o->prompt_tokens || o->bench ? o->prompt_tokens : DEFAULT_PROMPT_TOKENS;
    o->synthetic.dp = o->bench && !dp_given ? BENCH_DP : fmax(asked_or_0(o->dp.mlp), asked_or_0(o->dp.attn));
    o->synthetic.context = o->context;
    o->synthetic.seed = o->generate.sample.seed;
    o->generate.ignore_eos = true;
    return OK;
}

/* Fills o; *done when the program has printed what was asked and may end. */
static int parse_arguments(Options *o, bool *done, int argc, char **argv, Error *err) {
    *o = (Options){
        .backend = "auto",
        .dp = {NAN, NAN},
        .synthetic = {.sp = 0.3},
        .generate = {.n_new = 256, .sample = {.temperature = 0.8f, .top_p = 0.9f}},
    };
    opterr = 0;
    for (int opt; (opt = getopt_long(argc, argv, ":p:f:en:t:c:j:b:vqh", long_options, NULL)) != -1;) {
        if (opt == 'h' || opt == OPT_VERSION) {
            fputs(opt == 'h' ? usage : "run (spdp) " VERSION "\n", stdout);
            *done = true;
            return OK;
        }
        if (opt == '?' && (optopt >= OPT_TOKENS || optopt == 'h')) {
            return error_set(err, ERR_USAGE, "%.*s takes no value", (int)strcspn(argv[optind - 1], "="), argv[optind - 1]);
        }
        const char letter[] = {'-', (char)optopt, 0};  // an unknown letter may stand among others
        const bool unknown_letter = opt == '?' && optopt > 0 && optopt < OPT_TOKENS;
        const int rc = parse_option(o, opt, unknown_letter ? letter : argv[optind - 1], err);
        if (rc) {
            return rc;
        }
    }
    if (o->synthetic.shape && argc > optind) {
        return error_set(err, ERR_USAGE, "--synthetic takes the place of MODEL (%.100s)", argv[optind]);
    }
    o->models = argv + optind;
    o->n_models = argc - optind;
    if (!o->synthetic.shape && (o->n_models == 0 || (o->n_models > 1 && !o->ppl_file))) {
        return error_set(err, ERR_USAGE, "%s (-h shows the usage)",
                         o->n_models == 0 ? "MODEL is missing" : "more than one MODEL, which only --ppl takes");
    }
    o->model = o->synthetic.shape ? o->synthetic.shape : o->models[0];
    if ((o->n_prompts > 0) + (o->file != NULL) + (o->ppl_file != NULL) + (o->score_file != NULL) + o->bench > 1) {
        return error_set(err, ERR_USAGE, "-p, -f, --ppl, --score and --bench exclude each other");
    }
    if (o->tokens && o->n_prompts > 0) {
        return error_set(err, ERR_USAGE,
                         "--tokens reads ids from -f, --ppl, --score or standard input, not from -p");
    }
    if (!o->seed_given && !o->synthetic.shape) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        o->generate.sample.seed = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    }
    int rc = complete_measurement(o, err);
    rc = rc ? rc : complete_chat(o, err);
    return rc ? rc : complete_synthetic(o, err);
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
    bool silent;  // nobody wants to read random weights' tokens
    const Tokenizer *tokenizer;
    DecodeState decode;
    TextStream stream;
    TokenSink sink;
    int failure;  // errno of a failed write; stdout does not take more
    Logprobs *logprobs;  // NULL: not asked for
    const Model *model;  // with logprobs
    Error error;         // of logprobs
} Output;

static void write_stdout(void *user, const char *bytes, size_t n) {
    Output *out = user;
    const double start = time_ms();
    if (!out->failure && (fwrite(bytes, 1, n, stdout) != n || fflush(stdout) != 0)) {
        out->failure = errno;
    }
    out->sink.write_ms += time_ms() - start;
}

/* The time of it is no part of a step. */
static bool note_logprobs(Output *out, int id) {
    const double start = time_ms();
    const bool failed = out->logprobs && logprobs_add(out->logprobs, out->model, id, &out->error) != OK;
    out->sink.write_ms += time_ms() - start;
    return failed;
}

static bool put_token(void *user, int id) {
    Output *out = user;
    if (note_logprobs(out, id)) {
        return true;
    }
    if (out->silent) {
        return false;
    }
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

/* Text in quotes, with escapes; the memory is cJSON's. */
static char *quoted(const char *text) {
    cJSON *string = cJSON_CreateString(text);
    char *printed = cJSON_PrintUnformatted(string);
    cJSON_Delete(string);
    return printed;
}

/* What a token adds to a text, as a string. Without a tokenizer: nothing. */
static const char *spell(char text[TOKENIZER_MAX_PIECE + 1], const Run *run, DecodeState *state, int id) {
    text[run->tokenizer ? tokenizer_decode(run->tokenizer, state, id, text) : 0] = 0;
    return text;
}

static void report_token(const Run *run, DecodeState *state, const TokenLogprob *t) {
    char text[TOKENIZER_MAX_PIECE + 1];
    char *quotes = quoted(spell(text, run, state, t->id));
    fprintf(stderr, "  %6d %-14s %9.4f", t->id, quotes ? quotes : "", t->logprob);
    cJSON_free(quotes);
}

/* A line for every token: itself, then the most probable ones at its place. */
static void report_logprobs(const Run *run) {
    DecodeState text = run->before_logprobs;
    for (size_t i = 0; i < run->logprobs.n; i++) {
        const LogprobEntry *e = &run->logprobs.entries[i];
        fputs("logprobs", stderr);
        report_token(run, &text, &e->chosen);
        fputs("  of", stderr);
        for (int k = 0; k < e->n_top; k++) {
            report_token(run, &(DecodeState){.started = true}, &e->top[k]);
        }
        fputc('\n', stderr);
    }
}

/* [{"token": id, "text": what it adds to the text, "logprob": x, "top": [[id, x], ..]}, ..] */
static cJSON *logprobs_json(const Run *run) {
    DecodeState state = run->before_logprobs;
    cJSON *array = cJSON_CreateArray();
    for (size_t i = 0; i < run->logprobs.n; i++) {
        const LogprobEntry *e = &run->logprobs.entries[i];
        cJSON *token = cJSON_CreateObject(), *top = cJSON_CreateArray();
        char text[TOKENIZER_MAX_PIECE + 1];
        cJSON_AddNumberToObject(token, "token", e->chosen.id);
        cJSON_AddStringToObject(token, "text", spell(text, run, &state, e->chosen.id));
        cJSON_AddNumberToObject(token, "logprob", e->chosen.logprob);
        for (int k = 0; k < e->n_top; k++) {
            cJSON_AddItemToArray(top, cJSON_CreateDoubleArray((double[]){e->top[k].id, e->top[k].logprob}, 2));
        }
        cJSON_AddItemToObject(token, "top", top);
        cJSON_AddItemToArray(array, token);
    }
    return array;
}

/* One line; json is released. */
static int write_json_line(const Run *run, cJSON *json, Error *err) {
    char *text = cJSON_PrintUnformatted(json);
    cJSON_Delete(json);
    if (ftell(run->json) == 0) {
        const int rc = ftruncate(fileno(run->json), 0);  // what was there; a pipe or a device has nothing
        (void)rc;
    }
    const bool ok = fprintf(run->json, "%s\n", text) > 0 && fflush(run->json) == 0;
    const int reason = errno;
    cJSON_free(text);
    if (ok) {
        unfinished_forget(run->o.json);
    }
    return ok ? OK : error_set(err, ERR_WRITE, "%.300s: %s", run->o.json, strerror(reason));
}

static Measured measured(const Run *run) {
    return (Measured){
        .name = run->o.model,
        .ck = &run->ck,
        .model = &run->model,
        .thresholds = &run->thresholds,
        .seed = run->o.generate.sample.seed,
        .verbose = run->o.verbose,
    };
}

/* ---- the jobs ----------------------------------------------------------------------------------------------- */

static int answer(Run *run, const Ids *prompt, bool last, Error *err) {
    if (prompt->n == 0) {
        return error_set(err, ERR_USAGE, "the prompt is empty and the model has no BOS token to start from");
    }
    Output out = {
        .silent = run->o.synthetic.shape && !run->o.tokens,
        .tokenizer = run->tokenizer,
        .sink = {.token = put_token},
        .logprobs = run->o.logprobs ? &run->logprobs : NULL,
        .model = &run->model,
    };
    out.sink.user = &out;
    logprobs_free(&run->logprobs);
    run->logprobs.k = run->o.logprobs;
    if (!text_stream_init(&out.stream, run->o.stops, run->o.n_stops, write_stdout, &out)) {
        return error_set(err, ERR_MEMORY, "no memory for the stop strings");
    }
    echo_prompt(&out, prompt);
    run->before_logprobs = out.decode;
    GenerateResult g;
    const int n = prompt->n > (size_t)1 << 30 ? 1 << 30 : (int)prompt->n;
    int rc = generate(&g, &run->model, prompt->ids, n, &run->o.generate, &out.sink, err);
    if (!rc && g.stop != STOP_STRING) {
        char text[8];
        text_stream_put(&out.stream, text, tokenizer_decode_end(&out.decode, text));
        text_stream_end(&out.stream);
    }
    text_stream_free(&out.stream);
    if (!out.silent && (!last || isatty(STDOUT_FILENO))) {
        write_stdout(&out, "\n", 1);
    }
    if (!rc && out.failure) {
        rc = error_set(err, ERR_WRITE, "standard output: %s", strerror(out.failure));
    }
    if (!rc && out.error.code) {
        *err = out.error;
        rc = err->code;
    }
    const Measured x = measured(run);
    if (!rc && run->chatty) {
        report_generation(&x, &g);
    }
    if (!rc && run->chatty && !run->json) {
        report_logprobs(run);
    }
    if (rc || !run->json) {
        return rc;
    }
    return write_json_line(run, figures_json(&x, &g, NULL, run->o.logprobs ? logprobs_json(run) : NULL), err);
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
    if (o->synthetic.shape) {
        return answer(run, &run->random_prompt, true, err);
    }
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

static int measure_perplexity(PerplexityResult *result, Run *run, Error *err) {
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
    const Measured x = measured(run);
    if (run->chatty) {
        report_perplexity(&x, &p);
    }
    *result = p;
    return run->json ? write_json_line(run, figures_json(&x, NULL, &p, NULL), err) : OK;
}

static void tear_down_model(Run *run);
static int set_up(Run *run, Error *err);

/* One model after the other. */
static int measure_perplexities(Run *run, Error *err) {
    const int n = run->o.n_models;
    PerplexityResult *results = calloc((size_t)n, sizeof *results);
    int rc = results ? OK : error_set(err, ERR_MEMORY, "no memory for the results of %d models", n);
    for (int i = 0; i < n && !rc; i++) {
        if (i > 0) {
            tear_down_model(run);
            run->o.model = run->o.models[i];
            rc = set_up(run, err);
        }
        rc = rc ? rc : measure_perplexity(&results[i], run, err);
    }
    if (!rc && n > 1 && run->chatty) {
        report_comparison(run->o.models, results, n);
    }
    free(results);
    return rc;
}

/* The ids of an item's text. Where the context's end falls within a token of the whole, the context's own ids
 * stand before it, and the continuation has those of the whole behind as many: as evaluation harnesses do it. */
static int encode_item(ScoreItem *item, const Run *run, Error *err) {
    Ids context = {0};
    const Bytes before = {item->text.data, item->context_bytes};
    int rc = ids_from_input(&item->ids, run, &item->text, "text", true, err);
    rc = rc ? rc : ids_from_input(&context, run, &before, "context", true, err);
    if (!rc) {
        memcpy(item->ids.ids, context.ids, min_size(context.n, item->ids.n) * sizeof *context.ids);
        item->n_context = context.n;
    }
    free(context.ids);
    return rc;
}

/* What --score adds up. */
typedef struct {
    size_t n_items, n_tokens, n_greedy, n_cut;
} ScoreTotals;

/* One line of the input, and one of the output. */
static int score_line(ScoreTotals *totals, Run *run, const char *line, size_t n, Error *err) {
    ScoreItem item = {0};
    Score score;
    cJSON *object = json_parse(line, n, 0, err);
    int rc = object ? OK : err->code;
    rc = rc ? rc : score_item_read(&item, object, run->o.tokens, run->model.config.vocab_size, err);
    cJSON_Delete(object);
    rc = rc || run->o.tokens ? rc : encode_item(&item, run, err);
    rc = rc ? rc : score_continuation(&score, &run->model, item.ids.ids, item.ids.n, item.n_context, err);
    if (!rc) {
        char bytes[24] = "null";
        if (!run->o.tokens) {
            snprintf(bytes, sizeof bytes, "%zu", item.continuation_bytes);
        }
        printf("{\"logprob\": %.9g, \"tokens\": %zu, \"bytes\": %s, \"greedy\": %s}\n", score.logprob,
               score.n_tokens, bytes, score.greedy ? "true" : "false");
        totals->n_items++;
        totals->n_tokens += score.n_tokens;
        totals->n_greedy += score.greedy;
        totals->n_cut += score.cut;
    }
    score_item_free(&item);
    return rc || fflush(stdout) == 0 ? rc : error_set(err, ERR_WRITE, "standard output: %s", strerror(errno));
}

static int score_all(Run *run, Error *err) {
    Bytes input = {0};
    ScoreTotals totals = {0};
    Progress progress = {
        .label = "score",
        .unit = "MB",
        .quiet = !run->chatty || isatty(STDOUT_FILENO),
        .wait_ms = SHORT_LOAD_MS,
    };
    const double start = time_ms();
    int rc = input_read_file(&input, run->o.score_file, err);
    for (size_t at = 0, number = 1, n; at < input.n && !rc; at += n + 1, number++) {
        const char *line = input.data + at, *end = memchr(line, '\n', input.n - at);
        n = end ? (size_t)(end - line) : input.n - at;
        rc = score_line(&totals, run, line, n, err);
        progress_show(&progress, (double)(at + n) * 1e-6, (double)input.n * 1e-6);
        if (rc && rc != ERR_WRITE) {
            char where[340];
            snprintf(where, sizeof where, "%.300s:%zu", run->o.score_file, number);
            error_prefix(err, where);
        }
    }
    free(input.data);
    progress_end(&progress);
    if (!rc && run->chatty) {
        fprintf(stderr, "protocol  %s; context prefilled but for its last token, the rest as in decode\n",
                run->o.tokens                       ? "ids as they are"
                : run->model.config.bos_id >= 0 ? "BOS before every context"
                                                : "no BOS");
        fprintf(stderr, "scored    %zu continuations, %zu tokens, %zu greedy; %.1f ms\n", totals.n_items,
                totals.n_tokens, totals.n_greedy, time_ms() - start);
    }
    if (!rc && run->chatty && totals.n_cut > 0) {
        fprintf(stderr, "warning   %zu contexts were too long for %d tokens and lost their beginning\n",
                totals.n_cut, run->model.seq_len);
    }
    return rc;
}

static void note_rows_left_out(const Run *run, const BenchPlan *plan) {
    for (int i = 0; i < plan->n_prompts; i++) {
        if (plan->n_prompts > 1 && !bench_fits(&run->model, plan, i)) {
            fprintf(stderr, "note      no rows for a prompt of %d: with %d new tokens it does not fit in the context of %d\n",
                    plan->prompts[i], plan->n_new, run->model.seq_len);
        }
    }
    if (plan->n_dp > 1 && !bench_skips(&run->ck, run->o.synthetic.shape ? &run->synthetic : NULL)) {
        fputs("note      no rows for dynamic pruning: the model has no thresholds, or stores nothing compressed\n", stderr);
    }
}

static int bench_loaded(Bench *b, Run *run, Error *err) {
    const Options *o = &run->o;
    BenchPlan plan = {
        .prompts = {128, 2048},
        .n_prompts = 2,
        .n_new = o->generate.n_new,
        .dp = {{0, 0}, {0.3, 0.3}, {BENCH_DP, BENCH_DP}},
        .n_dp = 3,
        .dp_by_site = o->dp_by_site,
        .seed = o->seed_given ? o->generate.sample.seed : 0,
    };
    if (o->prompt_tokens) {
        plan.prompts[0] = o->prompt_tokens;
        plan.n_prompts = 1;
    }
    if (!isnan(o->dp.mlp) || !isnan(o->dp.attn)) {
        plan.dp[0] = o->dp;
        plan.n_dp = 1;
    }
    if (run->chatty && !run->dense) {
        note_rows_left_out(run, &plan);
    }
    Progress progress = {.label = "bench", .unit = "generations", .quiet = !run->chatty, .wait_ms = SHORT_LOAD_MS};
    return bench_model(b, &run->model, &run->ck, o->synthetic.shape ? &run->synthetic : NULL,
                       checkpoint_sparsity(&run->ck), &plan, &progress, err);
}

/* The dense model in the place of the pruned one: of the same shape, or the file's with its zeros; where there is memory
 * for it. */
static int bench_dense(Bench *b, Run *run, Error *err) {
    tear_down_model(run);
    run->dense = true;
    run->o.synthetic.sp = 0;
    run->o.synthetic.dp = 0;
    run->o.dp = (Ratios){NAN, NAN};
    run->o.dp_by_site = false;
    int rc = set_up(run, err);
    rc = rc ? rc : bench_loaded(b, run, err);
    if (rc == ERR_MEMORY && run->chatty) {
        fprintf(stderr, "note      the dense form is not measured: %s\n", err->text);
    }
    return rc == ERR_MEMORY ? OK : rc;
}

/* What has been measured is printed, whatever becomes of the dense form. */
static int bench_all(Run *run, Error *err) {
    Bench b = {0};
    const double ceiling = run->be->read_ceiling(run->be);
    int rc = bench_loaded(&b, run, err);
    if (rc) {
        return rc;
    }
    rc = b.rows[0].tiled ? bench_dense(&b, run, err) : OK;
    print_bench(&b, ceiling);
    const int written = run->json ? write_json_line(run, bench_json(&b, ceiling), rc ? NULL : err) : OK;
    return rc ? rc : written;
}

static int chat(Run *run, Error *err) {
    const Options *o = &run->o;
    TemplateKind format = o->format_given ? o->format : TEMPLATE_PLAIN;
    bool found = false;
    const int rc = o->format_given ? OK : chat_template_of(&format, &found, &run->ck, err);
    if (rc) {
        return rc;
    }
    const char *whose = o->format_given ? "asked" : found ? "from the file" : "(the file names none)";
    if (run->chatty) {
        fprintf(stderr, "chat      template %s %s, context %d, seed %llu; /help lists the commands\n",
                template_name(format), whose, run->model.seq_len, (unsigned long long)o->generate.sample.seed);
    }
    const ChatOptions options = {
        .format = format,
        .system = o->system,
        .generate = o->generate,
        .stops = o->stops,
        .n_stops = o->n_stops,
        .stats = o->stats,
        .quiet = !run->chatty,
    };
    return chat_run(&run->model, run->tokenizer, &options, err);
}

/* ---- set-up -------------------------------------------------------------------------------------------------------- */

static int load_tokenizer(Run *run, Error *err) {
    const FileSection *s = checkpoint_find(&run->ck, SECTION_TOKENIZER, -1);
    char reason[200];
    if (s && !tokenizer_load(&run->tokenizer, checkpoint_bytes(&run->ck, s), s->bytes, reason, sizeof reason)) {
        return error_set(err, ERR_FORMAT, "%.200s: tokenizer: %s", run->o.model, reason);
    }
    if (!s && !run->o.tokens && !run->o.bench) {
        return error_set(err, ERR_USAGE, "%.200s has no tokenizer: give token ids with --tokens", run->o.model);
    }
    if (!s && run->o.n_stops > 0) {
        return error_set(err, ERR_USAGE, "--stop needs a tokenizer, and %.200s has none", run->o.model);
    }
    return OK;
}

/* What a model comes from: a file, or nothing but a shape. */
static int open_model(Run *run, Error *err) {
    const Options *o = &run->o;
    if (o->synthetic.shape) {
        const int rc = synthetic_open(&run->synthetic, &o->synthetic, err);
        run->ck = run->synthetic.ck;
        return rc;
    }
    int rc = checkpoint_open(&run->file, o->model, err);
    if (!rc && o->verify && (rc = checkpoint_verify(&run->file, err))) {
        error_prefix(err, o->model);
    }
    rc = rc || !run->dense ? rc : expanded_open(&run->expanded, &run->file, err);
    run->ck = run->dense ? run->expanded.ck : run->file;
    return rc ? rc : load_tokenizer(run, err);
}

/* The weights on the backend, if there is room. */
static int load_model(Run *run, Error *err) {
    const Options *o = &run->o;
    const bool synthetic = o->synthetic.shape != NULL, ppl = o->ppl_file != NULL;
    const bool all_logits = ppl || o->score_file;
    // Perplexity needs a cache of one window, however long the model's context is.
    const int context = ppl ? (o->ppl.window ? o->ppl.window : run->ck.config.seq_len) : o->context;
    const Checkpoint *ck = synthetic ? &run->synthetic.ck : &run->ck;
    Progress progress = {
        .label = synthetic ? "making" : "loading",
        .unit = "MB",
        .quiet = !run->chatty,
        .wait_ms = SHORT_LOAD_MS,
    };
    const WeightSource source = synthetic    ? weights_of_synthetic(&run->synthetic, &progress)
                                : run->dense ? weights_of_expanded(&run->expanded, &progress)
                                             : weights_of_file(&progress);
    MemoryPlan plan = {0};
    int rc = model_plan(&plan, ck, run->be, context, all_logits, &source, err);
    if (plan.context > 0 && run->chatty && o->verbose) {
        fprintf(stderr, "memory    plan: %s\n", plan_text(&plan).text);
    }
    rc = rc ? rc : model_load_from(&run->model, ck, run->be, context, all_logits, &source, err);
    progress_end(&progress);
    return rc;
}

/* The prompt of random weights: a file's ids or random ones. */
static int make_prompt(Run *run, Error *err) {
    const Options *o = &run->o;
    Ids *ids = &run->random_prompt;
    if (o->file) {
        Bytes input = {0};
        int rc = input_read_file(&input, o->file, err);
        rc = rc ? rc : ids_from_input(ids, run, &input, o->file, false, err);
        free(input.data);
        return rc;
    }
    ids->n = (size_t)o->prompt_tokens;
    ids->ids = memory_alloc(ids->n * sizeof *ids->ids);
    if (!ids->ids) {
        return error_set(err, ERR_MEMORY, "no memory for %zu ids", ids->n);
    }
    random_ids(ids->ids, ids->n, run->model.config.vocab_size, o->synthetic.seed);
    return OK;
}

/* Thresholds for random weights are measured here and now, where decoding will take place. */
static int calibrate_synthetic(Run *run, Error *err) {
    const Options *o = &run->o;
    Progress progress = {.label = "thresholds", .unit = "tokens", .quiet = !run->chatty, .wait_ms = SHORT_LOAD_MS};
    const int rc = synthetic_calibrate(&run->synthetic, &run->model, &run->random_prompt, o->generate.n_new, &progress,
                                       err);
    run->ck = run->synthetic.ck;  // which now has all sizes, and the quantiles
    return rc;
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
    fprintf(stderr, " %s", given                                                        ? "asked"
                            : checkpoint_find(&run->ck, SECTION_QUANTILES, -1) ? "from the file"
                            : run->o.synthetic.shape                           ? "unless asked"
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

static bool is_file(const struct stat *st, const char *path) {
    struct stat other;
    return path && stat(path, &other) == 0 && other.st_dev == st->st_dev && other.st_ino == st->st_ino;
}

static bool is_model_file(const char *path) {
    char begin[sizeof FILE_MAGIC - 1];
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const bool is_model = fd >= 0 && read(fd, begin, sizeof begin) == (ssize_t)sizeof begin &&
                          memcmp(begin, FILE_MAGIC, sizeof begin) == 0;
    if (fd >= 0) {
        close(fd);
    }
    return is_model;
}

/* Nothing that this run reads, and no model, may be written over. */
static int check_json(const Options *o, const struct stat *st, Error *err) {
    bool is_input = is_file(st, o->file) || is_file(st, o->ppl_file) || is_file(st, o->score_file);
    for (int i = 0; i < o->n_models; i++) {
        is_input |= is_file(st, o->models[i]);
    }
    const bool is_model = is_model_file(o->json);
    return is_input || is_model
               ? error_set(err, ERR_USAGE, "--json %.250s: is %s", o->json, is_model ? "a model file" : "what is read")
               : OK;
}

static int open_json(Run *run, Error *err) {
    const char *path = run->o.json;
    if (!path || run->json) {
        return OK;
    }
    if (strcmp(path, "-") == 0) {
        run->json = stderr;
        return OK;
    }
    struct stat st;
    const int rc = stat(path, &st) == 0 && S_ISREG(st.st_mode) ? check_json(&run->o, &st, err) : OK;
    if (rc) {
        return rc;
    }
    const bool is_new = lstat(path, &st) != 0;
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);  // what is there goes when there is a line
    if (fd >= 0 && is_new) {
        unfinished_set(path);  // until it has a line
    }
    run->json = fd < 0 ? NULL : fdopen(fd, "w");
    if (!run->json) {
        error_set(err, ERR_WRITE, "%.300s: %s", path, strerror(errno));
        if (fd >= 0) {
            close(fd);
        }
        return ERR_WRITE;
    }
    return OK;
}

static int set_up(Run *run, Error *err) {
    const Options *o = &run->o;
    const double start = time_ms();
    int rc = open_model(run, err);
    Error note = {0};
    rc = rc ? rc
            : backend_open(&run->be, o->backend, o->device, getenv("SPDP_NO_GRAPH") == NULL, o->n_threads, getenv("SPDP_ISA"),
                           &note, err);
    rc = rc ? rc : open_json(run, err);
    run->chatty = !o->quiet && run->json != stderr;
    rc = rc ? rc : load_model(run, err);
    const double loaded_ms = time_ms() - start;
    if (!rc && o->synthetic.shape && !o->bench) {
        rc = make_prompt(run, err);
        rc = rc ? rc : calibrate_synthetic(run, err);
    }
    rc = rc || o->bench ? rc : set_thresholds(run, err);  // --bench sets one after the other
    if (rc) {
        return rc;
    }
    if (!o->ppl_file && !o->score_file) {
        model_rehearse(&run->model);
    }
    if (run->chatty && note.code) {
        fprintf(stderr, "note      %s; using the CPU\n", note.text);
    }
    if (run->chatty) {
        fprintf(stderr, "device    %s\nmodel     %s%s, %s, %.1f %% sparse; %s in %.0f ms%s\n", run->be->device,
                o->model, run->dense ? " (dense)" : "", size_text((double)run->ck.bytes).text, 100 * checkpoint_sparsity(&run->ck),
                o->synthetic.shape ? "made" : "loaded", loaded_ms, o->verify ? ", checksums verified" : "");
        if (!o->bench) {
            report_dp(run);
        }
    }
    return OK;
}

/* The model, what it was made from, and the backend that holds it. */
static void tear_down_model(Run *run) {
    thresholds_free(&run->thresholds);
    model_free(&run->model);
    expanded_close(&run->expanded);
    if (run->be) {
        run->be->free(run->be);
        run->be = NULL;
    }
    tokenizer_free(run->tokenizer);
    run->tokenizer = NULL;
    checkpoint_close(&run->file);
    synthetic_close(&run->synthetic);
    run->ck = (Checkpoint){0};
}

static void tear_down(Run *run) {
    tear_down_model(run);
    free(run->random_prompt.ids);
    logprobs_free(&run->logprobs);
    if (run->json && run->json != stderr) {
        fclose(run->json);
    }
}

int main(int argc, char **argv) {
    Run run = {0};
    Error err = {0};
    bool done = false;
    cli_begin();
    json_require_memory();
    int rc = parse_arguments(&run.o, &done, argc, argv, &err);
    if (!rc && !done) {
        rc = set_up(&run, &err);
        rc = rc                 ? rc
             : run.o.ppl_file   ? measure_perplexities(&run, &err)
             : run.o.score_file ? score_all(&run, &err)
             : run.o.bench      ? bench_all(&run, &err)
             : run.o.chat       ? chat(&run, &err)
                                : answer_all(&run, &err);
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
