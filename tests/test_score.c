/* test_score.c: log-probabilities against sums of our own in double and against perplexity(), and the
 * benchmark's rows. The backend is the CPU's unless SPDP_TEST_BACKEND names another. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>
#include <time.h>

#include "../model/bench.h"
#include "../model/perplexity.h"
#include "../model/score.h"
#include "support.h"

#define SHAPE "128:384:2:4:2:487:256"  // the context exceeds the CPU's chunk
#define VOCAB 487
#define SEQ_LEN 256

/* A model of random weights on a backend of its own. */
typedef struct {
    Synthetic s;
    Backend *be;
    Model m;
} Fixture;

static void make(Fixture *f, uint64_t seed, double dp, bool all_logits) {
    const char *name = getenv("SPDP_TEST_BACKEND");
    const SyntheticParams params = {.shape = SHAPE, .sp = 0.5, .prune_attn = true, .dp = dp, .seed = seed};
    Error err = {0};
    assert_int_equal(backend_open(&f->be, name ? name : "cpu", 0, true, 2, NULL, NULL, &err), OK);
    assert_int_equal(synthetic_open(&f->s, &params, &err), OK);
    const WeightSource source = weights_of_synthetic(&f->s, NULL);
    assert_int_equal(model_load_from(&f->m, &f->s.ck, f->be, 0, all_logits, &source, &err), OK);
}

static void destroy(Fixture *f) {
    model_free(&f->m);
    f->be->free(f->be);
    synthetic_close(&f->s);
}

static uint64_t fresh_seed(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t seed = (uint64_t)now.tv_sec * 1000000007u + (uint64_t)now.tv_nsec;
    print_message("seed %llu\n", (unsigned long long)seed);
    return seed;
}

/* log softmax(logits)[id], all of it in double. */
static double log_softmax(const float *logits, size_t n, int id) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += exp((double)logits[i] - (double)logits[id]);
    }
    return -log(sum);
}

/* ---- the most probable tokens ---- */

/* How many tokens come before one: larger logits, and equal ones of lower id. */
static int rank_of(const float *logits, int n, int id) {
    int rank = 0;
    for (int i = 0; i < n; i++) {
        rank += logits[i] > logits[id] || (logits[i] == logits[id] && i < id);
    }
    return rank;
}

static void check_top(const float *logits, int n, int k) {
    TokenLogprob top[MAX_LOGPROBS];
    poison(top, sizeof top);
    assert_int_equal(top_logprobs(top, k, logits, n), k < n ? k : n);
    double sum = 0;
    for (int i = 0; i < k && i < n; i++) {
        assert_in_range(top[i].id, 0, n - 1);
        assert_int_equal(rank_of(logits, n, top[i].id), i);
        assert_true(fabs(top[i].logprob - log_softmax(logits, (size_t)n, top[i].id)) < 1e-5);
        sum += exp(top[i].logprob);
    }
    assert_true(sum <= 1 + 1e-5);
    assert_true(k < n || sum > 1 - 1e-5);
    assert_true(is_poison(top + (k < n ? k : n), (size_t)(MAX_LOGPROBS - (k < n ? k : n)) * sizeof *top));
}

static void the_top_is_that_of_a_sort(void **state) {
    (void)state;
    uint64_t random = fresh_seed();
    float logits[300];
    for (int test = 0; test < 2000; test++) {
        const int n = 1 + (int)random_below(&random, COUNT(logits)),
                  k = 1 + (int)random_below(&random, MAX_LOGPROBS);
        const bool coarse = random_below(&random, 2);  // many equals
        for (int i = 0; i < n; i++) {
            logits[i] = coarse ? (float)random_below(&random, 5) : 8 * random_normal(&random);
        }
        check_top(logits, n, k);
    }
}

static void logits_that_are_not_finite_give_none(void **state) {
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < COUNT(bad); i++) {
        for (int at = 0; at < 5; at++) {
            float logits[5] = {1, 2, 3, 4, 5};
            TokenLogprob top[MAX_LOGPROBS];
            logits[at] = bad[i];
            assert_int_equal(top_logprobs(top, 3, logits, 5), 0);
        }
    }
}

static void entries_are_those_of_the_logits(void **state) {
    (void)state;
    uint64_t random = fresh_seed();
    Fixture f;
    Error err = {0};
    make(&f, random, 0, false);
    Logprobs l = {.k = 7};
    float rows[100][VOCAB];
    int ids[100];
    for (int i = 0; i < 100; i++) {
        const int fed = (int)random_below(&random, VOCAB);
        model_forward(&f.m, &fed, 1, i, DECODE);
        assert_int_equal(f.be->finish(f.be, &err), OK);
        f.be->read(f.be, rows[i], f.m.state.logits, sizeof rows[i]);
        ids[i] = (int)random_below(&random, VOCAB);  // seldom among the top
        assert_int_equal(logprobs_add(&l, &f.m, ids[i], &err), OK);
    }
    assert_int_equal(l.n, 100);
    for (int i = 0; i < 100; i++) {
        const LogprobEntry *e = &l.entries[i];
        assert_int_equal(e->chosen.id, ids[i]);
        assert_true(fabs(e->chosen.logprob - log_softmax(rows[i], VOCAB, ids[i])) < 1e-5);
        assert_int_equal(e->n_top, 7);
        for (int k = 0; k < 7; k++) {
            assert_int_equal(rank_of(rows[i], VOCAB, e->top[k].id), k);
            assert_true(fabs(e->top[k].logprob - log_softmax(rows[i], VOCAB, e->top[k].id)) < 1e-5);
        }
    }
    logprobs_free(&l);
    destroy(&f);
}

/* ---- continuations ---- */

/* Thresholds that skip a good part of every site's inputs. */
static void thin(Model *m, float threshold) {
    float values[2 * N_DP_SITES];
    assert_int_equal(m->config.n_layers, 2);
    for (size_t i = 0; i < COUNT(values); i++) {
        values[i] = threshold;
    }
    model_set_thresholds(m, values);
}

static void sums_are_those_of_perplexity(void **state) {
    (void)state;
    uint64_t random = fresh_seed();
    Fixture f;
    Error err = {0};
    make(&f, random, 0.5, true);
    const struct {
        int n, n_context;
    } cases[] = {{2, 1},        {3, 1},    {20, 19}, {40, 7}, {SEQ_LEN + 1, 1}, {SEQ_LEN + 1, SEQ_LEN},
                 {SEQ_LEN, 20}, {250, 201}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        for (int dp = 0; dp <= 1; dp++) {
            const int n = cases[i].n, scored = n - cases[i].n_context;
            int ids[SEQ_LEN + 1];
            random_ids(ids, (size_t)n, VOCAB, random++);
            thin(&f.m, dp ? 0.4f : 0);
            Score score;
            poison(&score, sizeof score);
            assert_int_equal(
                score_continuation(&score, &f.m, ids, (size_t)n, (size_t)cases[i].n_context, &err), OK);
            assert_int_equal(score.n_tokens, scored);
            assert_false(score.cut);
            PerplexityResult p;
            const PerplexityParams params = {.window = n - 1, .prefix = cases[i].n_context - 1};
            assert_int_equal(perplexity(&p, &f.m, ids, (size_t)n, &params, NULL, NULL, &err), OK);
            assert_int_equal(p.n_scored, scored);
            assert_true(fabs(score.logprob + p.nll * scored) < 1e-6 * scored);
        }
    }
    destroy(&f);
}

/* Thinning changes what is scored, so that the equality above says something about it. */
static void thresholds_act_on_what_is_scored(void **state) {
    (void)state;
    uint64_t random = fresh_seed();
    Fixture f;
    Error err = {0};
    make(&f, random, 0.5, true);
    int ids[30];
    random_ids(ids, COUNT(ids), VOCAB, random);
    Score exact, thinned;
    assert_int_equal(score_continuation(&exact, &f.m, ids, 30, 29, &err), OK);
    thin(&f.m, 0.4f);
    assert_int_equal(score_continuation(&thinned, &f.m, ids, 30, 29, &err), OK);
    assert_true(fabs(exact.logprob - thinned.logprob) > 1e-4);
    destroy(&f);
}

/* The most probable token after ids, computed one by one; *margin: how far the second is. */
static int best_after(Fixture *f, const int *ids, int n, float *margin) {
    Error err = {0};
    float logits[VOCAB];
    for (int i = 0; i < n; i++) {
        model_forward(&f->m, ids + i, 1, i, DECODE);
    }
    assert_int_equal(f->be->finish(f->be, &err), OK);
    f->be->read(f->be, logits, f->m.state.logits, sizeof logits);
    int best = 0;
    *margin = INFINITY;
    for (int i = 1; i < VOCAB; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    for (int i = 0; i < VOCAB; i++) {
        *margin = i != best ? fminf(*margin, logits[best] - logits[i]) : *margin;
    }
    return best;
}

static void greedy_means_the_most_probable_everywhere(void **state) {
    (void)state;
    uint64_t random = fresh_seed();
    Fixture f;
    Error err = {0};
    make(&f, random, 0, true);
    int judged = 0;
    for (int test = 0; test < 200 && judged < 10; test++) {
        int ids[11];
        random_ids(ids, 8, VOCAB, random++);
        float margin, least = INFINITY;
        for (int n = 8; n < 11; n++) {
            ids[n] = best_after(&f, ids, n, &margin);
            least = fminf(least, margin);
        }
        if (least < 0.02f) {
            continue;  // a tie but for rounding
        }
        judged++;
        Score score;
        assert_int_equal(score_continuation(&score, &f.m, ids, 11, 8, &err), OK);
        assert_true(score.greedy);
        const int at = 8 + (int)random_below(&random, 3), right = ids[at];
        ids[at] = (ids[at] + 1 + (int)random_below(&random, VOCAB - 1)) % VOCAB;
        assert_int_equal(score_continuation(&score, &f.m, ids, 11, 8, &err), OK);
        assert_false(score.greedy);
        ids[at] = right;
        ids[0] = (ids[0] + 1) % VOCAB;  // whatever the context is, it is not judged
        if (best_after(&f, ids, 8, &margin) == ids[8] && margin > 0.02f) {
            assert_int_equal(score_continuation(&score, &f.m, ids, 9, 8, &err), OK);
            assert_true(score.greedy);
        }
    }
    assert_true(judged == 10);
    destroy(&f);
}

static void a_long_context_loses_its_beginning(void **state) {
    (void)state;
    uint64_t random = fresh_seed();
    Fixture f;
    Error err = {0};
    make(&f, random, 0, true);
    int ids[SEQ_LEN + 50];
    random_ids(ids, COUNT(ids), VOCAB, random);
    Score cut, whole;
    assert_int_equal(score_continuation(&cut, &f.m, ids, COUNT(ids), COUNT(ids) - 5, &err), OK);
    assert_true(cut.cut);
    assert_int_equal(cut.n_tokens, 5);
    assert_int_equal(score_continuation(&whole, &f.m, ids + 49, SEQ_LEN + 1, SEQ_LEN - 4, &err), OK);
    assert_false(whole.cut);
    assert_true(cut.logprob == whole.logprob);
    destroy(&f);
}

static void what_cannot_be_scored_is_refused(void **state) {
    (void)state;
    Fixture f;
    make(&f, 1, 0, true);
    int ids[SEQ_LEN + 2];
    random_ids(ids, COUNT(ids), VOCAB, 2);
    const struct {
        size_t n, n_context;
        const char *reason;
    } cases[] = {{5, 0, "context is empty"},
                 {0, 0, "context is empty"},
                 {5, 5, "adds no token"},
                 {4, 5, "adds no token"},
                 {SEQ_LEN + 2, 1, "257 tokens, which do not fit in the context of 256"}};
    for (size_t i = 0; i < COUNT(cases); i++) {
        Error err = {0};
        Score score;
        poison(&score, sizeof score);
        assert_int_equal(score_continuation(&score, &f.m, ids, cases[i].n, cases[i].n_context, &err),
                         ERR_USAGE);
        assert_non_null(strstr(err.text, cases[i].reason));
        assert_true(is_poison(&score, sizeof score));
    }
    destroy(&f);
}

/* ---- items ---- */

static int read_item(ScoreItem *item, const char *text, bool ids, Error *err) {
    cJSON *object = cJSON_Parse(text);
    assert_non_null(object);
    const int rc = score_item_read(item, object, ids, VOCAB, err);
    cJSON_Delete(object);
    return rc;
}

static void white_space_at_the_contexts_end_is_continuation(void **state) {
    (void)state;
    const struct {
        const char *json, *text;
        size_t context_bytes, continuation_bytes;
    } cases[] = {
        {"{\"context\": \"one\", \"continuation\": \" two\"}", "one two", 3, 4},
        {"{\"context\": \"one \\n\\t\", \"continuation\": \"two\", \"id\": 7.5}", "one \n\ttwo", 3, 3},
        {"{\"context\": \"  \", \"continuation\": \"two\"}", "  two", 0, 3},
        {"{\"context\": \"\", \"continuation\": \"\"}", "", 0, 0},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Error err = {0};
        ScoreItem item;
        assert_int_equal(read_item(&item, cases[i].json, false, &err), OK);
        assert_int_equal(item.text.n, strlen(cases[i].text));
        assert_memory_equal(item.text.data, cases[i].text, item.text.n);
        assert_int_equal(item.context_bytes, cases[i].context_bytes);
        assert_int_equal(item.continuation_bytes, cases[i].continuation_bytes);
        score_item_free(&item);
    }
}

static void ids_are_taken_as_they_are(void **state) {
    (void)state;
    Error err = {0};
    ScoreItem item;
    assert_int_equal(read_item(&item, "{\"context\": [1, 486], \"continuation\": [0, 7, 7]}", true, &err),
                     OK);
    const int want[] = {1, 486, 0, 7, 7};
    assert_int_equal(item.ids.n, 5);
    assert_int_equal(item.n_context, 2);
    assert_memory_equal(item.ids.ids, want, sizeof want);
    score_item_free(&item);
}

static void wrong_items_are_named(void **state) {
    (void)state;
    const struct {
        const char *json;
        bool ids;
        const char *reason;
    } cases[] = {
        {"{\"context\": \"a\"}", false, "\"continuation\" is not a string"},
        {"{\"continuation\": \"a\"}", false, "\"context\" is not a string"},
        {"{\"context\": [1], \"continuation\": \"a\"}", false, "\"context\" is not a string"},
        {"[1]", false, "\"context\" is not a string"},
        {"{\"context\": \"a\", \"continuation\": [1]}", true, "\"context\" is not an array"},
        {"{\"context\": [1], \"continuation\": {}}", true, "\"continuation\" is not an array"},
        {"{\"context\": [487], \"continuation\": [1]}", true, "\"context\" has something"},
        {"{\"context\": [1], \"continuation\": [-1]}", true, "\"continuation\" has something"},
        {"{\"context\": [1], \"continuation\": [1.5]}", true, "\"continuation\" has something"},
        {"{\"context\": [1], \"continuation\": [\"1\"]}", true, "\"continuation\" has something"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Error err = {0};
        ScoreItem item;
        assert_int_equal(read_item(&item, cases[i].json, cases[i].ids, &err), ERR_FORMAT);
        assert_non_null(strstr(err.text, cases[i].reason));
    }
}

/* ---- the benchmark ---- */

/* cases.md row 50: the slowest and the fastest step, the clock, the depth. */
static void rows_say_what_was_asked(void **state) {
    (void)state;
    Fixture f;
    Error err = {0};
    make(&f, 3, 0.5, false);
    const BenchPlan plan = {.prompts = {16, 2048},
                            .n_prompts = 2,
                            .n_new = 40,
                            .dp = {{0, 0}, {0.3, 0.3}, {0.5, 0.5}},
                            .n_dp = 3};
    Bench b = {0};
    Progress quiet = {.quiet = true};
    assert_int_equal(bench_model(&b, &f.m, &f.s.ck, &f.s, 0.5, &plan, &quiet, &err), OK);
    assert_int_equal(b.n_rows, 3);  // the other prompt does not fit
    for (int i = 0; i < 3; i++) {
        const BenchRow *r = &b.rows[i];
        assert_int_equal(r->n_prompt, 16);
        assert_int_equal(r->timing.decode_tokens, BENCH_REPEATS * 39 + 1);
        assert_true(r->tiled);
        assert_true(r->dp_asked == plan.dp[i].mlp);
        assert_true(fabs(r->dp_reached - r->dp_asked) < 0.1);
        assert_true(0 < r->step_min_ms && r->step_min_ms <= r->timing.tpot_median_ms);
        assert_true(r->step_max_ms >= r->timing.tpot_p99_ms);
        assert_true(isnan(r->clock_mhz) || (r->clock_mhz > 100 && r->clock_mhz < 10000));
        assert_true(r->timing.tpot_median_ms <= r->timing.tpot_p99_ms && r->timing.ttft_ms > 0);
        assert_true(fabs(r->gb_s * r->timing.tpot_median_ms * 1e6 / r->bytes_per_token - 1) < 1e-9);
        assert_true(i == 0 || r->bytes_per_token < b.rows[i - 1].bytes_per_token);
    }
    destroy(&f);
}

static void a_benchmark_that_does_not_fit_is_refused(void **state) {
    (void)state;
    Fixture f;
    Error err = {0};
    make(&f, 3, 0.5, false);
    BenchPlan plan = {.prompts = {250, 2048}, .n_prompts = 2, .n_new = 7, .n_dp = 1};
    Bench b = {0};
    Progress quiet = {.quiet = true};
    assert_int_equal(bench_model(&b, &f.m, &f.s.ck, &f.s, 0.5, &plan, &quiet, &err), ERR_USAGE);
    assert_non_null(strstr(err.text, "250 tokens and 7 new ones do not fit in the context of 256"));
    assert_int_equal(b.n_rows, 0);
    plan.n_new = 6;
    assert_int_equal(bench_model(&b, &f.m, &f.s.ck, &f.s, 0.5, &plan, &quiet, &err), OK);
    assert_int_equal(b.n_rows, 1);
    destroy(&f);
}

static void the_ceiling_is_a_rate(void **state) {
    (void)state;
    Fixture f;
    make(&f, 3, 0, false);
    const double start = time_ms(), ceiling = f.be->read_ceiling(f.be), ms = time_ms() - start;
    if (isnan(ceiling)) {
        destroy(&f);
        skip();
    }
    print_message("read ceiling %.1f GB/s\n", ceiling);
    // At least five reads of 1 GiB took place meanwhile, none faster than the best.
    assert_true(ceiling * ms >= 5 * 1.073741824e3);
    assert_true(ceiling < 100000);
    destroy(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_top_is_that_of_a_sort),
        cmocka_unit_test(logits_that_are_not_finite_give_none),
        cmocka_unit_test(entries_are_those_of_the_logits),
        cmocka_unit_test(sums_are_those_of_perplexity),
        cmocka_unit_test(thresholds_act_on_what_is_scored),
        cmocka_unit_test(greedy_means_the_most_probable_everywhere),
        cmocka_unit_test(a_long_context_loses_its_beginning),
        cmocka_unit_test(what_cannot_be_scored_is_refused),
        cmocka_unit_test(white_space_at_the_contexts_end_is_continuation),
        cmocka_unit_test(ids_are_taken_as_they_are),
        cmocka_unit_test(wrong_items_are_named),
        cmocka_unit_test(rows_say_what_was_asked),
        cmocka_unit_test(a_benchmark_that_does_not_fit_is_refused),
        cmocka_unit_test(the_ceiling_is_a_rate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
