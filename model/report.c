#include "report.h"

#include <math.h>

#include "cli.h"
#include "reach.h"

/* ---- for people ---- */

static double bandwidth_gb_s(const GenerateResult *g) { return g->bytes_per_token / g->timing.tpot_ms * 1e-6; }

/* What was skipped of the matrices that can skip columns; with -v site by site. */
static void report_skipped(const Measured *x, const ProductStats *sites) {
    const ProductStats all = stats_sum(sites, N_DP_SITES);
    if (all.elements == 0) {
        return;
    }
    fprintf(stderr, "skipped   %.2f %% of inputs (%.4g %% asked), %.2f %% of weights, over Tiled-CBC matrices\n",
            100 * stats_dp(&all), 100 * x->thresholds->asked, 100 * stats_total(&all));
    for (int site = 0; site < N_DP_SITES && x->verbose; site++) {
        const ProductStats *s = &sites[site];
        if (s->elements > 0) {
            const double asked = thresholds_asked(x->thresholds, (Site)site);
            fprintf(stderr, "          %-16s  %.2f %% of inputs (%.4g %% asked), %.2f %% of weights\n",
                    site_name((Site)site), 100 * stats_dp(s), 100 * asked, 100 * stats_total(s));
        }
    }
}

static void report_overlap(const Overlap *o) {
    if (isfinite(o->reached)) {
        fprintf(stderr,
                "overlap   %.2f %% of weights are both pruned and skipped, %.2f %% if the two were independent; worst: "
                "layer %d, %s, %+.2f points\n",
                100 * o->reached, 100 * o->independent, o->worst_layer, site_name(o->worst_site), 100 * o->worst);
    }
}

void report_generation(const Measured *x, const GenerateResult *g) {
    const Timing *t = &g->timing;
    const Model *m = x->model;
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
    if (isfinite(g->joules_per_token)) {
        fprintf(stderr, "energy    %.3g J a token\n", g->joules_per_token);
    }
    fprintf(stderr, "total     %.2f ms, seed %llu, stop: %s\n", t->total_ms,
            (unsigned long long)x->seed, stop_reason_name(g->stop));
    report_skipped(x, g->sites);
    if (x->verbose) {
        fprintf(stderr, "memory    weights %s, KV %s, activations %s, peak %s\n",
                size_text((double)m->weight_bytes).text, size_text((double)m->kv_bytes).text,
                size_text((double)m->scratch_bytes).text, size_text((double)memory_peak()).text);
        fprintf(stderr, "logits    %016llx, hash of the last\n", (unsigned long long)g->logits_hash);
    }
}

typedef struct {
    char text[24];
} Figure;

/* A single token has no standard error. */
static Figure spread(const PerplexityResult *p) {
    Figure f = {"n/a"};
    if (isfinite(p->nll_stderr)) {
        snprintf(f.text, sizeof f.text, "%.6f", p->nll_stderr);
    }
    return f;
}

void report_perplexity(const Measured *x, const PerplexityResult *p) {
    fprintf(stderr,
            "protocol  %zu windows of %d, stride %d, prefix %d prefilled and not scored, no BOS inserted; "
            "%zu tokens scored\n",
            p->n_windows, p->protocol.window, p->protocol.stride, p->protocol.prefix, p->n_scored);
    fprintf(stderr, "sparsity  static %.4f over the pruned matrices\n", checkpoint_sparsity(x->ck));
    report_skipped(x, p->sites);
    report_overlap(&p->overlap);
    fprintf(stderr, "nll       %.6f +- %s nats a token\nppl       %.4f\n", p->nll, spread(p).text, p->perplexity);
    fprintf(stderr, "speed     %.1f tok/s\n", (double)p->n_scored / p->ms * 1e3);
}

void report_comparison(char *const *names, const PerplexityResult *results, int n) {
    fprintf(stderr, "\n%10s  %9s  %11s  %8s  model\n", "ppl", "to first", "nll", "+-");
    for (int i = 0; i < n; i++) {
        const PerplexityResult *p = &results[i];
        fprintf(stderr, "%10.4f  %+7.2f %%  %11.6f  %8s  %s%s\n", p->perplexity,
                100 * (p->perplexity / results[0].perplexity - 1), p->nll, spread(p).text, names[i],
                p->n_scored == results[0].n_scored ? "" : " (other tokens than the first: not comparable)");
    }
}

static void print_bench_row(const BenchRow *r, double ceiling) {
    char reached[16] = "-", share[16] = "n/a", energy[16] = "n/a";
    if (isfinite(r->dp_reached)) {
        snprintf(reached, sizeof reached, "%.3f", r->dp_reached);
    }
    if (isfinite(ceiling)) {
        snprintf(share, sizeof share, "%.0f %%", 100 * r->gb_s / ceiling);
    }
    if (isfinite(r->joules_per_token)) {
        snprintf(energy, sizeof energy, "%.3g", r->joules_per_token);
    }
    printf("%-9s  %5.3f  %4.2f  %7s  %6d  %5d  ", r->tiled ? "tiled-cbc" : "dense", r->sp, r->dp_asked, reached,
           r->n_prompt, r->n_prompt + r->n_new);
    printf("%9.2f  %8.1f  %8.3f  %8.3f  %8.3f  %8.3f  ", r->timing.ttft_ms, r->timing.prefill_tok_s,
           r->timing.tpot_median_ms, r->timing.tpot_p99_ms, r->step_min_ms, r->step_max_ms);
    printf("%10s  %7.1f  %5s  %7s\n", size_text(r->bytes_per_token).text, r->gb_s, share, energy);
}

/* The range over the rows. */
static void print_clocks(const Bench *b) {
    double low = INFINITY, high = 0;
    for (int i = 0; i < b->n_rows; i++) {
        low = fmin(low, b->rows[i].clock_mhz);
        high = fmax(high, b->rows[i].clock_mhz);
    }
    if (high == 0) {
        printf("clock n/a");
    } else if (lround(low) == lround(high)) {
        printf("clock %.0f MHz", high);
    } else {
        printf("clock %.0f to %.0f MHz", low, high);
    }
}

void print_bench(const Bench *b, double ceiling) {
    printf("%s; ", b->device);
    print_clocks(b);
    printf("; read ceiling ");
    printf(isfinite(ceiling) ? "%.1f GB/s\n" : "n/a (no room to measure it)\n", ceiling);
    printf("random ids as prompt, greedy, %d new tokens, end of sequence ignored; one generation of each row warms "
           "up and is not counted, then %d are:\n"
           "TTFT: their median; TPOT: median of all their steps; GB/s: at the median; ceil.: share of the ceiling "
           "(above 100 %% where weights stay in a cache)\n",
           b->rows[0].n_new, BENCH_REPEATS);
    printf("%-9s  %5s  %4s  %7s  %6s  %5s  ", "storage", "SP", "DP", "reached", "prompt", "depth");
    printf("%9s  %8s  %8s  %8s  %8s  %8s  ", "TTFT ms", "tok/s", "TPOT ms", "p99", "min", "max");
    printf("%10s  %7s  %5s  %7s\n", "read/token", "GB/s", "ceil.", "J/token");
    for (int i = 0; i < b->n_rows; i++) {
        print_bench_row(&b->rows[i], ceiling);
    }
}

/* ---- for programs ---- */

/* A figure, null where there is none. */
static void add_figure(cJSON *json, const char *key, double value) {
    if (isfinite(value)) {
        cJSON_AddNumberToObject(json, key, value);
    } else {
        cJSON_AddNullToObject(json, key);
    }
}

cJSON *figures_json(const Measured *x, const GenerateResult *g, const PerplexityResult *p, cJSON *logprobs) {
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
    add_figure(json, "ceiling_gb_s", NAN);  // measured by --bench
    add_figure(json, "joules_per_token", g ? g->joules_per_token : NAN);
    add_figure(json, "sp", checkpoint_sparsity(x->ck));
    add_figure(json, "dp_asked", x->thresholds->asked);
    add_figure(json, "dp_reached", stats_dp(&products));
    add_figure(json, "total", stats_total(&products));
    add_figure(json, "overlap", p ? p->overlap.reached : NAN);
    add_figure(json, "overlap_independent", p ? p->overlap.independent : NAN);
    add_figure(json, "overlap_worst", p && isfinite(p->overlap.reached) ? p->overlap.worst : NAN);
    add_figure(json, "nll", p ? p->nll : NAN);
    add_figure(json, "nll_stderr", p ? p->nll_stderr : NAN);
    add_figure(json, "perplexity", p ? p->perplexity : NAN);
    // A 64-bit seed does not fit in a JSON number of double precision, so it is written as its digits.
    char seed[24], hash[24];
    snprintf(seed, sizeof seed, "%llu", (unsigned long long)x->seed);
    snprintf(hash, sizeof hash, "\"%016llx\"", g ? (unsigned long long)g->logits_hash : 0);
    cJSON_AddRawToObject(json, "seed", g ? seed : "null");
    cJSON_AddRawToObject(json, "logits_hash", g ? hash : "null");
    cJSON_AddRawToObject(json, "stop_reason", "null");
    if (g) {
        cJSON_ReplaceItemInObjectCaseSensitive(json, "stop_reason", cJSON_CreateString(stop_reason_name(g->stop)));
    }
    cJSON_AddStringToObject(json, "model", x->name);
    cJSON_AddStringToObject(json, "backend", x->model->be->name);
    cJSON_AddStringToObject(json, "device", x->model->be->device);
    cJSON_AddItemToObject(json, "logprobs", logprobs ? logprobs : cJSON_CreateNull());
    return json;
}

static cJSON *bench_row_json(const Bench *b, const BenchRow *r, double ceiling) {
    cJSON *json = cJSON_CreateObject();
    cJSON_AddStringToObject(json, "storage", r->tiled ? "tiled-cbc" : "dense");
    add_figure(json, "sp", r->sp);
    add_figure(json, "dp_asked", r->dp_asked);
    add_figure(json, "dp_reached", r->dp_reached);
    add_figure(json, "total", r->total);
    add_figure(json, "prefill_tokens", r->n_prompt);
    add_figure(json, "decode_tokens", r->n_new);
    add_figure(json, "repeats", BENCH_REPEATS);
    add_figure(json, "ttft_ms", r->timing.ttft_ms);
    add_figure(json, "prefill_tok_s", r->timing.prefill_tok_s);
    add_figure(json, "tpot_ms", r->timing.tpot_ms);
    add_figure(json, "tpot_median_ms", r->timing.tpot_median_ms);
    add_figure(json, "tpot_p99_ms", r->timing.tpot_p99_ms);
    add_figure(json, "tpot_min_ms", r->step_min_ms);
    add_figure(json, "tpot_max_ms", r->step_max_ms);
    add_figure(json, "decode_tok_s", r->timing.decode_tok_s);
    add_figure(json, "bytes_per_token", r->bytes_per_token);
    add_figure(json, "gb_s", r->gb_s);
    add_figure(json, "ceiling_gb_s", ceiling);
    add_figure(json, "share_of_ceiling", r->gb_s / ceiling);
    add_figure(json, "joules_per_token", r->joules_per_token);
    add_figure(json, "clock_mhz", r->clock_mhz);
    cJSON_AddStringToObject(json, "backend", b->backend);
    cJSON_AddStringToObject(json, "device", b->device);
    return json;
}

cJSON *bench_json(const Bench *b, double ceiling) {
    cJSON *rows = cJSON_CreateArray();
    for (int i = 0; i < b->n_rows; i++) {
        cJSON_AddItemToArray(rows, bench_row_json(b, &b->rows[i], ceiling));
    }
    return rows;
}
