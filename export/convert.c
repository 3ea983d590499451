/* convert: the converter's command line. See README.md for what the options mean. */
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <math.h>
#include <string.h>

#include "../kernels/backend.h"
#include "../model/cli.h"
#include "../model/input.h"
#include "../model/json.h"
#include "../tokenizer/tokenizer.h"
#include "info.h"
#include "interrupt.h"
#include "pack.h"

#define DEFAULT_DP 0.4

static const char usage[] =
    "usage: convert SOURCE OUT [options]        prune and compress a checkpoint\n"
    "       convert --synthetic SHAPE OUT [options]   random weights, for speed work\n"
    "       convert --info FILE                  what a model file holds\n"
    "SOURCE is a Hugging Face directory (config.json, *.safetensors, tokenizer.model) or a llama2.c .bin.\n"
    "\n"
    "pruning\n"
    "  --sp R | mlp=R,attn=R    share of weights to remove (default 0.3); naming attn implies --prune all\n"
    "  --prune mlp|all          which matrices: gate, up, down; or q, k, v, o too (default mlp)\n"
    "  --method magnitude|wanda|sparsegpt   how to choose them (default wanda; of --synthetic magnitude)\n"
    "  --per-row                magnitude: count for each row instead of each matrix\n"
    "  --dp R                   dynamic ratio that run uses unless told otherwise (default 0.4);\n"
    "                           0: no calibration, and run skips no columns\n"
    "calibration, for wanda, sparsegpt and --dp\n"
    "  --calib FILE             plain text, JSON lines (.jsonl) or token ids (.tok)\n"
    "                           (default: a text that ships with the program)\n"
    "  --calib-dp FILE          the same for --dp alone (default: as --calib)\n"
    "  --calib-tokens N         use so many tokens (default 128 sequences)\n"
    "  --calib-len L            in sequences of L (default: the context, at most 2048)\n"
    "  -b auto|cpu|cuda         what runs it (default auto)\n"
    "storage\n"
    "  --format auto|dense|tiled-cbc   of pruned matrices; auto (default): Tiled-CBC where it is smaller,\n"
    "                           and where --dp is above 0\n"
    "  --tokenizer FILE         sentencepiece model (default: SOURCE's tokenizer.model)\n"
    "  --no-tokenizer           a file that takes token ids only\n"
    "  --force                  overwrite OUT, and what an interrupted conversion has left\n"
    "  --resume                 go on with a conversion by wanda or sparsegpt that was interrupted, all\n"
    "                           else given as before. It keeps OUT.partial and OUT.partial.state (4 bytes\n"
    "                           for each calibration token and dimension, 8 at times) until OUT is there\n"
    "other\n"
    "  --seed S                 of --synthetic (default 0)\n"
    "  -j N                     threads (default: all cores)\n"
    "  -q                       only errors\n"
    "  --version, -h\n"
    "SHAPE is tinyllama-1.1b, llama2-7b, llama2-13b, llama2-70b or\n"
    "dim:hidden:layers:heads:kv:vocab:context.\n";

typedef struct {
    const char *source, *out, *info, *synthetic, *tokenizer;
    const char *calib, *calib_dp;  // NULL: the shipped text; as calib
    const char *backend;
    bool no_tokenizer, prune_named, method_named, dp_named;
    uint64_t seed;
    CalibParams calibration;
    PackOptions pack;
} Options;

enum {
    OPT_SP = 256, OPT_PRUNE, OPT_METHOD, OPT_PER_ROW, OPT_FORMAT, OPT_TOKENIZER, OPT_NO_TOKENIZER, OPT_FORCE,
    OPT_SEED, OPT_INFO, OPT_SYNTHETIC, OPT_VERSION, OPT_CALIB, OPT_CALIB_DP, OPT_CALIB_TOKENS, OPT_CALIB_LEN, OPT_DP,
    OPT_RESUME,
};

static const struct option long_options[] = {
    {"sp", required_argument, NULL, OPT_SP},
    {"prune", required_argument, NULL, OPT_PRUNE},
    {"method", required_argument, NULL, OPT_METHOD},
    {"per-row", no_argument, NULL, OPT_PER_ROW},
    {"format", required_argument, NULL, OPT_FORMAT},
    {"tokenizer", required_argument, NULL, OPT_TOKENIZER},
    {"no-tokenizer", no_argument, NULL, OPT_NO_TOKENIZER},
    {"force", no_argument, NULL, OPT_FORCE},
    {"resume", no_argument, NULL, OPT_RESUME},
    {"seed", required_argument, NULL, OPT_SEED},
    {"info", required_argument, NULL, OPT_INFO},
    {"synthetic", required_argument, NULL, OPT_SYNTHETIC},
    {"version", no_argument, NULL, OPT_VERSION},
    {"calib", required_argument, NULL, OPT_CALIB},
    {"calib-dp", required_argument, NULL, OPT_CALIB_DP},
    {"calib-tokens", required_argument, NULL, OPT_CALIB_TOKENS},
    {"calib-len", required_argument, NULL, OPT_CALIB_LEN},
    {"dp", required_argument, NULL, OPT_DP},
    {"help", no_argument, NULL, 'h'},
    {0},
};

/* Index of text among n names, -1 if it is none of them. */
static int find_name(const char *text, const char *const *names, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (strcmp(text, names[i]) == 0) {
            return (int)i;
        }
    }
    return -1;
}

static int parse_sp(Options *o, const char *text, Error *err) {
    Ratios r;
    bool by_site;
    const int rc = parse_ratios(&r, &by_site, "--sp", text, 1, err);
    if (rc) {
        return rc;
    }
    o->pack.sp.mlp = isnan(r.mlp) ? o->pack.sp.mlp : r.mlp;
    o->pack.sp.attn = isnan(r.attn) ? o->pack.sp.attn : r.attn;
    if (by_site && !isnan(r.attn)) {
        if (o->prune_named && !o->pack.prune_attn) {
            return error_set(err, ERR_USAGE, "--sp names attn, but --prune mlp leaves it dense");
        }
        o->pack.prune_attn = o->prune_named = true;
    }
    return OK;
}

static int parse_option(Options *o, int opt, const char *name, Error *err) {
    static const char *const sites[] = {"mlp", "all"};
    static const char *const formats[] = {"auto", "dense", "tiled-cbc"};        // in order of Storage
    static const char *const methods[] = {"magnitude", "wanda", "sparsegpt"};  // in order of Method
    static const char *const backends[] = {"auto", "cpu", "cuda"};
    long number;
    int rc = OK;
    switch (opt) {
    case OPT_SP: return parse_sp(o, optarg, err);
    case OPT_PRUNE:
        if (find_name(optarg, sites, 2) < 0) {
            return error_set(err, ERR_USAGE, "--prune %.100s: not mlp or all", optarg);
        }
        if (o->prune_named && o->pack.prune_attn && strcmp(optarg, "mlp") == 0) {
            return error_set(err, ERR_USAGE, "--sp names attn, but --prune mlp leaves it dense");
        }
        o->prune_named = true;
        o->pack.prune_attn = strcmp(optarg, "all") == 0;
        break;
    case OPT_METHOD: {
        const int method = find_name(optarg, methods, 3);
        if (method < 0) {
            return error_set(err, ERR_USAGE, "--method %.100s: not magnitude, wanda or sparsegpt", optarg);
        }
        o->pack.method = (Method)method;
        o->method_named = true;
        break;
    }
    case OPT_PER_ROW: o->pack.per_row = true; break;
    case OPT_FORMAT: {
        const int format = find_name(optarg, formats, 3);
        if (format < 0) {
            return error_set(err, ERR_USAGE, "--format %.100s: not auto, dense or tiled-cbc", optarg);
        }
        o->pack.storage = (Storage)format;
        break;
    }
    case OPT_TOKENIZER: o->tokenizer = optarg; break;
    case OPT_NO_TOKENIZER: o->no_tokenizer = true; break;
    case OPT_FORCE: o->pack.force = true; break;
    case OPT_RESUME: o->pack.resume = true; break;
    case OPT_SEED: return parse_u64(&o->seed, "--seed", optarg, err);
    case OPT_INFO: o->info = optarg; break;
    case OPT_SYNTHETIC: o->synthetic = optarg; break;
    case OPT_CALIB: o->calib = optarg; break;
    case OPT_CALIB_DP: o->calib_dp = optarg; break;
    case OPT_CALIB_TOKENS:
        rc = parse_long(&number, "--calib-tokens", optarg, CALIB_MIN_TOKENS, INT_MAX, err);
        o->calibration.max_tokens = rc ? 0 : (size_t)number;
        break;
    case OPT_CALIB_LEN:
        rc = parse_long(&number, "--calib-len", optarg, 2, INT_MAX, err);
        o->calibration.length = rc ? 0 : (size_t)number;
        break;
    case OPT_DP:
        o->dp_named = true;
        return parse_double(&o->pack.dp, "--dp", optarg, 0, FILE_MAX_DP, err);
    case 'b':
        if (find_name(optarg, backends, 3) < 0) {
            return error_set(err, ERR_USAGE, "-b %.100s: not auto, cpu or cuda", optarg);
        }
        o->backend = optarg;
        break;
    case 'j':
        rc = parse_long(&number, "-j", optarg, 1, 1024, err);
        o->pack.n_threads = rc ? 0 : (int)number;
        break;
    case 'q': o->pack.quiet = true; break;
    case ':': return error_set(err, ERR_USAGE, "%s needs a value", name);
    default: return error_set(err, ERR_USAGE, "unknown option %.100s", name);
    }
    return rc;
}

/* What was not named, and what does not go together. */
static int complete_options(Options *o, Error *err) {
    if (o->tokenizer && o->no_tokenizer) {
        return error_set(err, ERR_USAGE, "--tokenizer and --no-tokenizer exclude each other");
    }
    if (!o->method_named && !o->synthetic) {
        o->pack.method = METHOD_WANDA;
    }
    if (o->pack.per_row && o->pack.method != METHOD_MAGNITUDE) {
        return error_set(err, ERR_USAGE, "--per-row goes with --method magnitude");
    }
    if (o->pack.resume && o->pack.method == METHOD_MAGNITUDE) {
        return error_set(err, ERR_USAGE, "--resume goes with --method wanda or sparsegpt");
    }
    if (!o->dp_named && o->pack.storage == STORE_DENSE) {
        o->pack.dp = 0;  // nothing in the file could be skipped
    }
    return OK;
}

/* Fills o; *done when the program has printed what was asked and may end. */
static int parse_arguments(Options *o, bool *done, int argc, char **argv, Error *err) {
    *o = (Options){.backend = "auto", .pack = {.sp = {0.3, 0.3}, .dp = DEFAULT_DP}};
    opterr = 0;
    for (int opt, index = -1; (opt = getopt_long(argc, argv, ":b:j:qh", long_options, &index)) != -1; index = -1) {
        if (opt == 'h' || opt == OPT_VERSION) {
            fputs(opt == 'h' ? usage : "convert (spdp) " VERSION "\n", stdout);
            *done = true;
            return OK;
        }
        if (opt == '?' && (optopt >= OPT_SP || optopt == 'h')) {
            return error_set(err, ERR_USAGE, "%.*s takes no value", (int)strcspn(argv[optind - 1], "="), argv[optind - 1]);
        }
        const char letter[] = {'-', (char)optopt, 0};  // an unknown letter may stand among others
        const char *name = index >= 0                                        ? long_options[index].name
                           : opt == '?' && optopt > 0 && optopt < OPT_SP ? letter
                                                                          : argv[optind - 1];
        const int rc = parse_option(o, opt, name, err);
        if (rc) {
            return rc;
        }
    }
    const int n = argc - optind, want = o->info ? 0 : o->synthetic ? 1 : 2;
    if (n != want) {
        return error_set(err, ERR_USAGE, "%s", n > want    ? "too many arguments (-h shows the usage)"
                                               : o->info   ? "--info takes one file"
                                               : n == want - 1
                                                   ? "OUT is missing (-h shows the usage)"
                                                   : "SOURCE and OUT are missing (-h shows the usage)");
    }
    if (!o->info) {
        o->out = argv[argc - 1];
        o->source = o->synthetic ? NULL : argv[optind];
    }
    return complete_options(o, err);
}

static int print_info(const char *path, Error *err) {
    Checkpoint ck;
    json_require_memory();
    const int rc = checkpoint_open(&ck, path, err);
    if (!rc) {
        info_print(stdout, &ck);
        checkpoint_close(&ck);
    }
    return rc;
}

/* The tokenizer that goes into the file: a file's, the source's, or none; it must load and fit the vocabulary.
 *   owned  what has to be freed with the bytes of a file
 *   t      NULL if there is none */
static int choose_tokenizer(PackOptions *pack, void **owned, Tokenizer **t, const Options *o, const Source *s,
                            Error *err) {
    const char *from = o->tokenizer ? o->tokenizer : "tokenizer.model";
    if (o->no_tokenizer || (o->synthetic && !o->tokenizer)) {
        return OK;
    }
    pack->tokenizer = s->tokenizer;
    pack->tokenizer_bytes = s->tokenizer_bytes;
    if (o->tokenizer) {
        Bytes file;
        const int rc = input_read_file(&file, o->tokenizer, err);
        if (rc) {
            error_prefix(err, "--tokenizer");
            return rc;
        }
        *owned = file.data;
        pack->tokenizer_bytes = file.n;
        pack->tokenizer = *owned;
    }
    if (!pack->tokenizer) {
        return error_set(err, ERR_OPEN,
                         "%.200s: has no tokenizer.model; name one with --tokenizer, or use --no-tokenizer",
                         o->source);
    }
    char reason[200];
    if (!tokenizer_load(t, pack->tokenizer, pack->tokenizer_bytes, reason, sizeof reason)) {
        return error_set(err, ERR_FORMAT, "%.200s: %s", from, reason);
    }
    if (tokenizer_vocab_size(*t) > s->config.vocab_size) {
        return error_set(err, ERR_SHAPE, "%.200s has %d pieces, but the model's vocabulary is %d", from,
                         tokenizer_vocab_size(*t), s->config.vocab_size);
    }
    return OK;
}

/* One calibration text: a file's, the shipped one, or random ids for random weights. */
static int load_text(CalibText *text, const char *option, const char *path, const Options *o, const Tokenizer *t,
                     const Config *config, Error *err) {
    const int rc = o->synthetic && !path ? calib_text_random(text, config, &o->calibration, o->seed, err)
                                         : calib_text_load(text, path, t, config, &o->calibration, err);
    if (rc) {
        error_prefix(err, option);
    } else if (!o->pack.quiet) {
        fprintf(stderr, "%-10s %zu tokens of %s\n", option + 2, text->n, text->name);
    }
    return rc;
}

/* What calibration needs: a backend, a text for static pruning, one for dynamic pruning; whichever is asked for. */
typedef struct {
    CalibText sp, dp;
    Backend *be;
} Calibrators;

static int open_calibrators(Calibrators *c, Options *o, const Tokenizer *t, const Config *config, Error *err) {
    PackOptions *pack = &o->pack;
    const bool sp = pack_measures(pack), own_dp = pack->dp > 0 && (o->calib_dp || !sp);
    o->calibration.quiet = pack->quiet;
    int rc = sp ? load_text(&c->sp, "--calib", o->calib, o, t, config, err) : OK;
    if (!rc && own_dp) {
        rc = load_text(&c->dp, o->calib_dp ? "--calib-dp" : "--calib", o->calib_dp ? o->calib_dp : o->calib, o, t,
                       config, err);
    }
    if (rc || (!sp && pack->dp == 0)) {
        return rc;
    }
    Error note = {0};
    rc = backend_open(&c->be, o->backend, 0, true, pack->n_threads, NULL, &note, err);
    if (!rc && note.code && !pack->quiet) {
        fprintf(stderr, "note       %s\n", note.text);
    }
    pack->be = c->be;
    pack->sp_text = &c->sp;
    pack->dp_text = own_dp ? &c->dp : &c->sp;
    return rc;
}

static void close_calibrators(Calibrators *c) {
    calib_text_free(&c->sp);
    calib_text_free(&c->dp);
    if (c->be) {
        c->be->free(c->be);
    }
}

static void report(const Options *o, const PackReport *r, double seconds) {
    const double reached = r->pruned_elements ? (double)r->pruned_zeros / (double)r->pruned_elements : 0;
    fprintf(stderr, "sparsity   %.4f over %s (asked mlp %g", reached,
            o->pack.prune_attn ? "gate, up, down, q, k, v, o" : "gate, up, down", o->pack.sp.mlp);
    fprintf(stderr, o->pack.prune_attn ? ", attn %g)\n" : ")\n", o->pack.sp.attn);
    fprintf(stderr, "size       %s, %.1f %% of dense fp16; %zu matrices as Tiled-CBC\n",
            size_text((double)r->file_bytes).text, 100.0 * (double)r->file_bytes / (double)r->dense_bytes, r->n_tiled);
    fprintf(stderr, "done       %.1f s, peak memory %s: %s\n", seconds, size_text((double)memory_peak()).text, o->out);
    const double attn = r->attn_elements ? (double)r->attn_zeros / (double)r->attn_elements : 0;
    if (!o->pack.prune_attn && attn > 0.08) {
        fprintf(stderr, "hint       q, k, v, o are %.0f %% zeros: --prune all would compress them too\n", 100 * attn);
    }
}

static int convert(Options *o, Error *err) {
    const double start = time_ms();
    Source *source;
    int rc = o->synthetic ? source_open_synthetic(&source, o->synthetic, o->seed, err)
                          : source_open(&source, o->source, err);
    if (rc) {
        return rc;
    }
    o->pack.source_name = o->synthetic ? o->synthetic : o->source;
    void *owned = NULL;
    Tokenizer *tokenizer = NULL;
    Calibrators calibrators = {0};
    Writer *writer;
    PackReport result;
    rc = choose_tokenizer(&o->pack, &owned, &tokenizer, o, source, err);
    rc = rc ? rc : open_calibrators(&calibrators, o, tokenizer, &source->config, err);
    interrupt_catch();  // from here on there are files to be left in order
    if (!rc) {
        rc = o->pack.resume ? writer_reopen(&writer, o->out, &source->config, o->pack.force, err)
                            : writer_open(&writer, o->out, &source->config, o->pack.force, err);
    }
    if (!rc) {
        rc = pack_model(&result, source, writer, &o->pack, err);
    }
    close_calibrators(&calibrators);
    tokenizer_free(tokenizer);
    free(owned);
    source->free(source);
    if (!rc && !o->pack.quiet) {
        report(o, &result, (time_ms() - start) * 1e-3);
    }
    return rc;  // NOLINT(clang-analyzer-core.StackAddressEscape): o->pack serves no further conversion
}

int main(int argc, char **argv) {
    Options o;
    Error err = {0};
    bool done = false;
    cli_begin();
    int rc = parse_arguments(&o, &done, argc, argv, &err);
    if (!rc && !done) {
        o.pack.n_threads = o.pack.n_threads ? o.pack.n_threads : default_threads();
        rc = o.info ? print_info(o.info, &err) : convert(&o, &err);
    }
    if (!rc && fflush(stdout) != 0) {
        rc = error_set(&err, ERR_WRITE, "standard output: %s", strerror(errno));
    }
    if (rc) {
        fprintf(stderr, "convert: %s\n", err.text);
    }
    return rc == OK            ? EXIT_OK
           : rc == ERR_USAGE   ? EXIT_USAGE
           : rc == ERR_STOPPED ? 128 + interrupt_signal()  // as a shell would say it
                               : EXIT_FAILED;
}
