/* convert: the converter's command line. See README.md for what the options mean. */
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>

#include "../kernels/backend.h"
#include "../tokenizer/tokenizer.h"
#include "info.h"
#include "pack.h"

static const char usage[] =
    "usage: convert SOURCE OUT [options]        prune and compress a checkpoint\n"
    "       convert --synthetic SHAPE OUT [options]   random weights, for speed work\n"
    "       convert --info FILE                  what a model file holds\n"
    "SOURCE is a Hugging Face directory (config.json, *.safetensors, tokenizer.model) or a llama2.c .bin file.\n"
    "\n"
    "pruning\n"
    "  --sp R | mlp=R,attn=R    share of weights to remove (default 0.3); naming attn implies --prune all\n"
    "  --prune mlp|all          which matrices: gate, up, down; or q, k, v, o too (default mlp)\n"
    "  --method magnitude       how to choose them (default magnitude)\n"
    "  --per-row                count for each row instead of each matrix\n"
    "storage\n"
    "  --format auto|dense|tiled-cbc   of pruned matrices; auto: Tiled-CBC where smaller (default auto)\n"
    "  --tokenizer FILE         sentencepiece model (default: SOURCE's tokenizer.model)\n"
    "  --no-tokenizer           a file that takes token ids only\n"
    "  --force                  overwrite OUT\n"
    "other\n"
    "  --seed S                 of --synthetic (default 0)\n"
    "  -j N                     threads (default: all cores)\n"
    "  -q                       only errors\n"
    "  --version, -h\n"
    "SHAPE is tinyllama-1.1b, llama2-7b, llama2-13b, llama2-70b or dim:hidden:layers:heads:kv:vocab:context.\n";

typedef struct {
    const char *source, *out, *info, *synthetic, *tokenizer;
    bool no_tokenizer, force, prune_named;
    uint64_t seed;
    PackOptions pack;
} Options;

enum {
    OPT_SP = 256, OPT_PRUNE, OPT_METHOD, OPT_PER_ROW, OPT_FORMAT, OPT_TOKENIZER, OPT_NO_TOKENIZER, OPT_FORCE,
    OPT_SEED, OPT_INFO, OPT_SYNTHETIC, OPT_VERSION, OPT_CALIBRATION,
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
    {"seed", required_argument, NULL, OPT_SEED},
    {"info", required_argument, NULL, OPT_INFO},
    {"synthetic", required_argument, NULL, OPT_SYNTHETIC},
    {"version", no_argument, NULL, OPT_VERSION},
    {"calib", required_argument, NULL, OPT_CALIBRATION},
    {"calib-dp", required_argument, NULL, OPT_CALIBRATION},
    {"calib-tokens", required_argument, NULL, OPT_CALIBRATION},
    {"calib-len", required_argument, NULL, OPT_CALIBRATION},
    {"dp", required_argument, NULL, OPT_CALIBRATION},
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
    static const char *const formats[] = {"auto", "dense", "tiled-cbc"};  // in order of Storage
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
    case OPT_METHOD:
        if (strcmp(optarg, "wanda") == 0 || strcmp(optarg, "sparsegpt") == 0) {
            return error_set(err, ERR_USAGE, "--method %s: not available in this version, only magnitude", optarg);
        }
        if (strcmp(optarg, "magnitude") != 0) {
            return error_set(err, ERR_USAGE, "--method %.100s: not magnitude", optarg);
        }
        break;
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
    case OPT_FORCE: o->force = true; break;
    case OPT_SEED: return parse_u64(&o->seed, "--seed", optarg, err);
    case OPT_INFO: o->info = optarg; break;
    case OPT_SYNTHETIC: o->synthetic = optarg; break;
    case OPT_CALIBRATION:
        return error_set(err, ERR_USAGE, "--%s: calibration is not available in this version", name);
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

/* Fills o; *done when the program has printed what was asked and may end. */
static int parse_arguments(Options *o, bool *done, int argc, char **argv, Error *err) {
    *o = (Options){.pack = {.sp = {0.3, 0.3}}};
    opterr = 0;
    for (int opt, index = -1; (opt = getopt_long(argc, argv, ":j:qh", long_options, &index)) != -1; index = -1) {
        if (opt == 'h' || opt == OPT_VERSION) {
            fputs(opt == 'h' ? usage : "convert (spdp) " VERSION "\n", stdout);
            *done = true;
            return OK;
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
                                               : n == want - 1 && !o->synthetic
                                                   ? "OUT is missing (-h shows the usage)"
                                                   : "SOURCE and OUT are missing (-h shows the usage)");
    }
    if (o->tokenizer && o->no_tokenizer) {
        return error_set(err, ERR_USAGE, "--tokenizer and --no-tokenizer exclude each other");
    }
    if (!o->info) {
        o->out = argv[argc - 1];
        o->source = o->synthetic ? NULL : argv[optind];
    }
    return OK;
}

static int print_info(const char *path, Error *err) {
    Checkpoint ck;
    const int rc = checkpoint_open(&ck, path, err);
    if (!rc) {
        info_print(stdout, &ck);
        checkpoint_close(&ck);
    }
    return rc;
}

/* A whole file in memory, released with free(). */
static int read_file(void **data, size_t *bytes, const char *path, Error *err) {
    struct stat st;
    FILE *f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &st) != 0 || !S_ISREG(st.st_mode)) {
        error_set(err, ERR_OPEN, "%.300s: %s", path, f ? "is not a regular file" : strerror(errno));
        if (f) {
            fclose(f);
        }
        return ERR_OPEN;
    }
    void *p = memory_alloc((size_t)st.st_size);
    const bool ok = p && fread(p, 1, (size_t)st.st_size, f) == (size_t)st.st_size;
    fclose(f);
    if (!ok) {
        free(p);
        return error_set(err, ERR_OPEN, "%.300s: cannot be read", path);
    }
    *data = p;
    *bytes = (size_t)st.st_size;
    return OK;
}

/* The tokenizer that goes into the file: a file's, the source's, or none; it must load and fit the vocabulary. */
static int choose_tokenizer(PackOptions *pack, void **owned, const Options *o, const Source *s, Error *err) {
    const char *from = o->tokenizer ? o->tokenizer : "tokenizer.model";
    *owned = NULL;
    if (o->no_tokenizer || (o->synthetic && !o->tokenizer)) {
        return OK;
    }
    pack->tokenizer = s->tokenizer;
    pack->tokenizer_bytes = s->tokenizer_bytes;
    if (o->tokenizer) {
        const int rc = read_file(owned, &pack->tokenizer_bytes, o->tokenizer, err);
        if (rc) {
            error_prefix(err, "--tokenizer");
            return rc;
        }
        pack->tokenizer = *owned;
    }
    if (!pack->tokenizer) {
        return error_set(err, ERR_OPEN,
                         "%.200s: has no tokenizer.model; name one with --tokenizer, or use --no-tokenizer",
                         o->source);
    }
    Tokenizer *t;
    char reason[200];
    if (!tokenizer_load(&t, pack->tokenizer, pack->tokenizer_bytes, reason, sizeof reason)) {
        return error_set(err, ERR_FORMAT, "%.200s: %s", from, reason);
    }
    const int pieces = tokenizer_vocab_size(t);
    tokenizer_free(t);
    if (pieces > s->config.vocab_size) {
        return error_set(err, ERR_SHAPE, "%.200s has %d pieces, but the model's vocabulary is %d", from, pieces,
                         s->config.vocab_size);
    }
    return OK;
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
    void *owned;
    Writer *writer;
    PackReport result;
    rc = choose_tokenizer(&o->pack, &owned, o, source, err);
    if (!rc && !(rc = writer_open(&writer, o->out, &source->config, o->force, err))) {
        rc = pack_model(&result, source, writer, &o->pack, err);
    }
    free(owned);
    source->free(source);
    if (!rc && !o->pack.quiet) {
        report(o, &result, (time_ms() - start) * 1e-3);
    }
    return rc;
}

int main(int argc, char **argv) {
    Options o;
    Error err = {0};
    bool done = false;
    signal(SIGXFSZ, SIG_IGN);  // a file size limit is then a failed write like a full disk
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
    return rc == OK ? EXIT_OK : rc == ERR_USAGE ? EXIT_USAGE : EXIT_FAILED;
}
