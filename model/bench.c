#include "bench.h"

#include <math.h>
#include <string.h>

#include "generate.h"
#include "reach.h"

/* The times of one row's tokens, repeats put end to end: the first token of each has the time of the last
 * before. */
typedef struct {
    double *token_ms;  // (BENCH_REPEATS * (n_new - 1) + 1)
    size_t n;
    double last_ms;  // of the clock; 0: the next token is the first of a repeat
    double min_ms, max_ms;
} Steps;

static bool note_time(void *user, int id) {
    (void)id;
    Steps *s = user;
    const double now = time_ms();
    if (s->last_ms > 0) {
        s->token_ms[s->n] = s->token_ms[s->n - 1] + (now - s->last_ms);
        s->min_ms = fmin(s->min_ms, now - s->last_ms);
        s->max_ms = fmax(s->max_ms, now - s->last_ms);
        s->n++;
    }
    s->last_ms = now;
    return false;
}

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Warm up, repeat, and put together what the repeats say. */
static int measure(BenchRow *row, Steps *s, Model *m, const int *prompt, Progress *progress, double done,
                   double total, Error *err) {
    const GenerateParams params = {.n_new = row->n_new, .ignore_eos = true};
    GenerateResult g;
    double ttft_ms[BENCH_REPEATS], joules = 0, clock_mhz = 0;
    for (int i = -1; i < BENCH_REPEATS; i++) {
        if (i <= 0) {
            *s = (Steps){.token_ms = s->token_ms, .n = 1, .min_ms = INFINITY};
            s->token_ms[0] = 0;
        }
        s->last_ms = 0;
        TokenSink sink = {.token = note_time, .user = s};
        const int rc = generate(&g, m, prompt, row->n_prompt, &params, &sink, err);
        if (rc) {
            return rc;
        }
        progress_show(progress, ++done, total);
        if (i >= 0) {
            ttft_ms[i] = g.timing.ttft_ms;
            joules += g.joules_per_token / BENCH_REPEATS;
            clock_mhz += m->be->clock_mhz(m->be) / BENCH_REPEATS;
        }
    }
    row->timing = timing_of(s->token_ms, s->n, (size_t)row->n_prompt, 0);
    qsort(ttft_ms, BENCH_REPEATS, sizeof *ttft_ms, compare_doubles);
    row->timing.ttft_ms = ttft_ms[BENCH_REPEATS / 2];
    row->timing.prefill_tok_s = 1000 * row->n_prompt / row->timing.ttft_ms;
    row->step_min_ms = s->min_ms;
    row->step_max_ms = s->max_ms;
    row->clock_mhz = clock_mhz;
    row->bytes_per_token = g.bytes_per_token;
    row->gb_s = g.bytes_per_token / row->timing.tpot_median_ms * 1e-6;
    row->joules_per_token = joules;
    row->dp_reached = stats_dp(&g.products);
    row->total = stats_total(&g.products);
    return OK;
}

static bool has_tiled(const Checkpoint *ck) {
    for (size_t i = 0; i < ck->n_sections; i++) {
        if (ck->sections[i].format == FORMAT_TILED_CBC) {
            return true;
        }
    }
    return false;
}

/* What the rows of one model share. */
typedef struct {
    Bench *bench;
    Model *m;
    Checkpoint *ck;
    Synthetic *synthetic;
    const BenchPlan *plan;
    int *prompt;  // the longest; shorter ones are its beginning
    Steps steps;
    double sp;
    Progress *progress;
    double done, total;  // generations
} Measuring;

static int measure_ratio(Measuring *x, int n_prompt, const Ratios *dp, Error *err) {
    CHECK(x->bench->n_rows < BENCH_MAX_ROWS);
    Thresholds t;
    int rc = thresholds_choose(&t, x->ck, dp, x->plan->dp_by_site, err);
    if (rc) {
        return rc;
    }
    model_set_thresholds(x->m, t.values);
    BenchRow row = {.n_prompt = n_prompt,
                    .n_new = x->plan->n_new,
                    .tiled = has_tiled(x->ck),
                    .sp = x->sp,
                    .dp_asked = t.asked};
    thresholds_free(&t);
    rc = measure(&row, &x->steps, x->m, x->prompt, x->progress, x->done, x->total, err);
    if (!rc) {
        x->done += 1 + BENCH_REPEATS;
        x->bench->rows[x->bench->n_rows++] = row;
    }
    return rc;
}

static int measure_prompt(Measuring *x, int n_prompt, int n_dp, Error *err) {
    int rc = OK;
    if (x->synthetic) {
        const Ids ids = {x->prompt, (size_t)n_prompt};
        Progress silent = {.quiet = true};
        rc = synthetic_calibrate(x->synthetic, x->m, &ids, x->plan->n_new, &silent, err);
        *x->ck = x->synthetic->ck;
    }
    for (int i = 0; i < n_dp && !rc; i++) {
        rc = measure_ratio(x, n_prompt, &x->plan->dp[i], err);
    }
    return rc;
}

bool bench_fits(const Model *m, const BenchPlan *plan, int i) { return plan->prompts[i] <= m->seq_len - plan->n_new; }

bool bench_skips(const Checkpoint *ck, const Synthetic *synthetic) {
    return has_tiled(ck) &&
           (synthetic ? synthetic->params.dp > 0 : checkpoint_find(ck, SECTION_QUANTILES, -1) != NULL);
}

int bench_model(Bench *b, Model *m, Checkpoint *ck, Synthetic *synthetic, double sp, const BenchPlan *plan,
                Progress *progress, Error *err) {
    CHECK(plan->n_new >= 2);
    int fit[2], n_fit = 0, longest = 0;
    for (int i = 0; i < plan->n_prompts; i++) {
        if (bench_fits(m, plan, i)) {
            fit[n_fit++] = plan->prompts[i];
            longest = plan->prompts[i] > longest ? plan->prompts[i] : longest;
        }
    }
    if (n_fit == 0) {
        return error_set(err, ERR_USAGE,
                         "a prompt of %d tokens and %d new ones do not fit in the context of %d",
                         plan->prompts[0], plan->n_new, m->seq_len);
    }
    const int n_dp = bench_skips(ck, synthetic) ? plan->n_dp : 1;
    Measuring x = {
        .bench = b,
        .m = m,
        .ck = ck,
        .synthetic = synthetic,
        .plan = plan,
        .prompt = memory_alloc((size_t)longest * sizeof *x.prompt),
        .steps.token_ms =
            malloc(((size_t)BENCH_REPEATS * ((size_t)plan->n_new - 1) + 1) * sizeof *x.steps.token_ms),
        .sp = sp,
        .progress = progress,
        .total = (1 + BENCH_REPEATS) * n_fit * n_dp,
    };
    b->backend = m->be->name;
    memcpy(b->device, m->be->device, sizeof b->device);
    int rc = x.prompt && x.steps.token_ms
                 ? OK
                 : error_set(err, ERR_MEMORY, "no memory for a prompt of %d tokens", longest);
    if (!rc) {
        random_ids(x.prompt, (size_t)longest, m->config.vocab_size, plan->seed);
        progress_show(progress, 0, x.total);
    }
    for (int i = 0; i < n_fit && !rc; i++) {
        rc = measure_prompt(&x, fit[i], n_dp, err);
    }
    progress_end(progress);
    free(x.prompt);
    free(x.steps.token_ms);
    return rc;
}
