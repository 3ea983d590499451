/* test_sampling.c: Philox against cuRAND's own draws, sampling against a brute-force reference. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "../kernels/sampling.h"
#include "golden/philox.h"

#define MAX_N 3000
#define GUARD 64

/* Steps of seed 0 whose draws are near the ends: x rounds to 2^32, and x = 345. */
#define STEP_OF_ONE 50893511
#define STEP_OF_NEARLY_ZERO 296355

/* ---- helpers ---- */

static uint32_t random_below(uint64_t *state, uint32_t n) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((*state >> 32) * n >> 32);
}

static float random_float(uint64_t *state) { return (float)random_below(state, 1u << 24) * 0x1p-24f; }

/* sample_token with a poisoned workspace, checking that it stays inside and leaves the logits alone. */
static int sample(const float *logits, int n, SampleParams params, uint64_t step) {
    float *copy = malloc((size_t)n * sizeof *copy);
    memcpy(copy, logits, (size_t)n * sizeof *copy);
    const size_t bytes = sample_workspace(n);
    unsigned char *workspace = memory_alloc(bytes + GUARD);
    memset(workspace, 0xff, bytes + GUARD);
    const int id = sample_token(copy, n, &params, step, workspace);
    assert_memory_equal(copy, logits, (size_t)n * sizeof *copy);
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal(workspace[bytes + i], 0xff);
    }
    assert_in_range(id, 0, n - 1);
    free(copy);
    free(workspace);
    return id;
}

typedef struct {
    float logit;
    int id;
} Candidate;

static int by_logit_then_id(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->logit != y->logit) {
        return x->logit > y->logit ? -1 : 1;
    }
    return x->id - y->id;
}

/* The whole pipeline by its definition: probability of each id, 0 for those that are not kept. */
static void reference_distribution(double *p, const float *logits, int n, SampleParams params) {
    Candidate *sorted = malloc((size_t)n * sizeof *sorted);
    for (int i = 0; i < n; i++) {
        sorted[i] = (Candidate){logits[i], i};
        p[i] = 0;
    }
    qsort(sorted, (size_t)n, sizeof *sorted, by_logit_then_id);
    const int kept = params.top_k > 0 && params.top_k < n ? params.top_k : n;
    for (int i = 0; i < kept; i++) {
        p[sorted[i].id] =
            exp(((double)sorted[i].logit - (double)sorted[0].logit) / (double)params.temperature);
    }
    double total = 0;
    for (int i = 0; i < n; i++) {
        total += p[i];
    }
    if (params.top_p < 1) {
        double sum = 0;
        for (int i = 0; i < kept; i++) {
            if (sum >= (double)params.top_p * total) {
                p[sorted[i].id] = 0;
            }
            sum += p[sorted[i].id];
        }
    }
    double remaining = 0;
    for (int i = 0; i < n; i++) {
        remaining += p[i];
    }
    for (int i = 0; i < n; i++) {
        p[i] /= remaining;
    }
    free(sorted);
}

/* First id whose cumulative probability reaches u; *margin is how near u comes to a boundary. */
static int reference_invert(const double *p, int n, double u, double *margin) {
    double sum = 0;
    int chosen = -1, last = 0;
    *margin = 1;
    for (int i = 0; i < n; i++) {
        sum += p[i];
        *margin = fmin(*margin, fabs(sum - u));
        last = p[i] > 0 ? i : last;
        if (chosen < 0 && sum >= u) {
            chosen = i;
        }
    }
    return chosen < 0 ? last : chosen;
}

/* ---- Philox ---- */

/* Known answers that the authors of Philox publish with it. */
static void test_philox_gives_the_published_words(void **state) {
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], words[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4] = {0xdeadbeef, 0xdeadbeef, 0xdeadbeef, 0xdeadbeef};
        philox4x32_10(out, known[i].counter, known[i].key);
        assert_memory_equal(out, known[i].words, sizeof out);
    }
}

static void test_a_thousand_draws_equal_those_of_curand(void **state) {
    (void)state;
    for (uint64_t i = 0; i < PHILOX_CASES; i++) {
        const float expected = (float)philox_golden[i] * 0x1p-32f + 0x1p-33f;
        const float u = philox_uniform(philox_case_seed(i), philox_case_step(i));
        assert_memory_equal(&u, &expected, sizeof u);
    }
}

static void test_draws_lie_above_0_and_reach_1(void **state) {
    (void)state;
    for (uint64_t step = 0; step < 100000; step++) {
        const float u = philox_uniform(7, step);
        assert_true(u > 0 && u <= 1);
    }
    assert_true(philox_uniform(0, STEP_OF_ONE) == 1.0f);
    assert_true(philox_uniform(0, STEP_OF_NEARLY_ZERO) == 345.5f * 0x1p-32f);
}

/* ---- greedy ---- */

/* cases.md row 37. */
static void test_temperature_0_takes_the_largest_and_the_lowest_id_of_equals(void **state) {
    (void)state;
    const float logits[] = {-3, 2, 5, 5, -1, 5};
    for (uint64_t step = 0; step < 50; step++) {
        assert_int_equal(sample(logits, 6, (SampleParams){0, 0.9f, 0, 1}, step), 2);
    }
    const float zeros[] = {-1, -0.0f, 0.0f};
    assert_int_equal(sample(zeros, 3, (SampleParams){0, 1, 0, 1}, 0), 1);
}

/* cases.md row 37: no overflow. */
static void test_a_tiny_temperature_takes_the_largest(void **state) {
    (void)state;
    const float logits[] = {-60000, 1, 3e38f, -3e38f, 2.9e38f};
    const float temperatures[] = {1e-8f, 1e-30f, 1e-45f};
    for (size_t t = 0; t < 3; t++) {
        for (uint64_t step = 0; step < 50; step++) {
            assert_int_equal(sample(logits, 5, (SampleParams){temperatures[t], 1, 0, 3}, step), 2);
        }
    }
    assert_int_equal(sample(logits, 5, (SampleParams){1e-8f, 1, 0, 0}, STEP_OF_ONE), 2);
}

/* ---- ends of the ranges ---- */

static void test_top_k_1_takes_the_largest(void **state) {
    (void)state;
    const float logits[] = {0.5f, 0.75f, 0.75f, 0.25f};
    for (uint64_t step = 0; step < 200; step++) {
        assert_int_equal(sample(logits, 4, (SampleParams){5, 1, 1, 11}, step), 1);
    }
}

static void test_a_tiny_top_p_takes_the_largest(void **state) {
    (void)state;
    const float logits[] = {0.5f, 0.75f, 0.75f, 0.25f};
    for (uint64_t step = 0; step < 200; step++) {
        assert_int_equal(sample(logits, 4, (SampleParams){5, 1e-9f, 0, 11}, step), 1);
    }
}

static void test_a_top_k_of_n_or_more_changes_nothing(void **state) {
    (void)state;
    const float logits[] = {0.5f, 0.75f, -0.75f, 0.25f};
    for (uint64_t step = 0; step < 500; step++) {
        const int id = sample(logits, 4, (SampleParams){1, 1, 0, 5}, step);
        assert_int_equal(sample(logits, 4, (SampleParams){1, 1, 4, 5}, step), id);
        assert_int_equal(sample(logits, 4, (SampleParams){1, 1, 1000000, 5}, step), id);
    }
}

static void test_one_logit_gives_id_0(void **state) {
    (void)state;
    const float logit = -17;
    const SampleParams params[] = {{0, 1, 0, 0}, {1, 1, 0, 0}, {1, 0.5f, 0, 0}, {1e-8f, 0.1f, 1, 0}};
    for (size_t i = 0; i < 4; i++) {
        assert_int_equal(sample(&logit, 1, params[i], 0), 0);
        assert_int_equal(sample(&logit, 1, params[i], STEP_OF_ONE), 0);
    }
}

static void test_a_draw_of_1_takes_the_last_candidate_that_is_kept(void **state) {
    (void)state;
    const float logits[] = {1, 3, 2.5f, -1, 2, -2};
    assert_int_equal(sample(logits, 6, (SampleParams){1, 1, 0, 0}, STEP_OF_ONE), 5);
    assert_int_equal(sample(logits, 6, (SampleParams){1, 1, 3, 0}, STEP_OF_ONE), 4);
    assert_int_equal(sample(logits, 6, (SampleParams){1, 0.7f, 0, 0}, STEP_OF_ONE), 2);
    assert_int_equal(sample(logits, 6, (SampleParams){1, 1, 4, 0}, STEP_OF_NEARLY_ZERO), 0);
    assert_int_equal(sample(logits, 6, (SampleParams){1, 1, 3, 0}, STEP_OF_NEARLY_ZERO), 1);
}

static void test_of_equal_logits_the_lower_ids_are_kept(void **state) {
    (void)state;
    const float logits[] = {0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f};
    bool by_k[8] = {false}, by_p[8] = {false};
    for (uint64_t step = 0; step < 500; step++) {
        by_k[sample(logits, 8, (SampleParams){1, 1, 3, 2}, step)] = true;
        by_p[sample(logits, 8, (SampleParams){1, 0.5f, 0, 2}, step)] = true;
    }
    for (int i = 0; i < 8; i++) {
        assert_int_equal(by_k[i], i < 3);
        assert_int_equal(by_p[i], i < 4);
    }
}

/* ---- against the reference ---- */

/* Logits of several kinds: spread, flat, and on a coarse grid, where most are tied. */
static void random_logits(float *logits, int n, uint64_t *state) {
    const uint32_t kind = random_below(state, 3);
    for (int i = 0; i < n; i++) {
        const float x = random_float(state) - 0.5f;
        logits[i] = kind == 0 ? 40 * x : kind == 1 ? 0.5f * x : roundf(6 * x);
    }
}

static void test_samples_equal_the_brute_force_reference(void **state) {
    (void)state;
    static const float temperatures[] = {0.05f, 0.5f, 0.8f, 1, 3};
    static const float top_ps[] = {1, 0.99999994f, 0.9f, 0.5f, 0.1f, 1e-6f};
    static float logits[MAX_N];
    static double p[MAX_N];
    uint64_t random = 20;
    int compared = 0, ids_above_0 = 0;
    for (int trial = 0; trial < 4000; trial++) {
        const int n = 1 + (int)random_below(&random, trial % 8 == 0 ? MAX_N : 40);
        random_logits(logits, n, &random);
        const SampleParams params = {
            .temperature = temperatures[random_below(&random, 5)],
            .top_p = top_ps[random_below(&random, 6)],
            .top_k = (int)random_below(&random, 2) * (int)random_below(&random, (uint32_t)n + 3),
            .seed = random,
        };
        const uint64_t step = (uint64_t)trial << (trial % 40);
        reference_distribution(p, logits, n, params);
        double margin;
        const int expected = reference_invert(p, n, (double)philox_uniform(params.seed, step), &margin);
        // The reference rounds its sums differently; only a draw on a boundary may differ for it.
        if (margin > 1e-12) {
            assert_int_equal(sample(logits, n, params, step), expected);
            compared++;
            ids_above_0 += expected > 0;
        }
    }
    assert_true(compared > 2000 && ids_above_0 > 1000);
}

/* Chi-square over `draws` draws; the bound is the quantile 0.9999 for the degrees of freedom. */
static void check_frequencies(const float *logits, int n, SampleParams params, int kept, double bound) {
    enum { DRAWS = 200000 };
    double p[16], chi_square = 0;
    int count[16] = {0}, n_possible = 0;
    reference_distribution(p, logits, n, params);
    for (uint64_t step = 0; step < DRAWS; step++) {
        count[sample(logits, n, params, step)]++;
    }
    for (int i = 0; i < n; i++) {
        if (p[i] == 0) {
            assert_int_equal(count[i], 0);
            continue;
        }
        const double expected = p[i] * DRAWS;
        chi_square += (count[i] - expected) * (count[i] - expected) / expected;
        n_possible++;
    }
    assert_int_equal(n_possible, kept);
    assert_true(chi_square < bound);
}

static void test_frequencies_follow_the_distribution(void **state) {
    (void)state;
    const float logits[] = {1.5f, -0.5f, 2, 0.25f, 1, -1, 0, 0.75f};
    check_frequencies(logits, 8, (SampleParams){1, 1, 0, 12345}, 8, 29.88);
    check_frequencies(logits, 8, (SampleParams){0.7f, 1, 5, 99}, 5, 23.51);
    check_frequencies(logits, 8, (SampleParams){1.3f, 0.8f, 0, UINT64_MAX}, 5, 23.51);
    check_frequencies(logits, 8, (SampleParams){1, 0.9f, 4, 0}, 4, 21.11);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox_gives_the_published_words),
        cmocka_unit_test(test_a_thousand_draws_equal_those_of_curand),
        cmocka_unit_test(test_draws_lie_above_0_and_reach_1),
        cmocka_unit_test(test_temperature_0_takes_the_largest_and_the_lowest_id_of_equals),
        cmocka_unit_test(test_a_tiny_temperature_takes_the_largest),
        cmocka_unit_test(test_top_k_1_takes_the_largest),
        cmocka_unit_test(test_a_tiny_top_p_takes_the_largest),
        cmocka_unit_test(test_a_top_k_of_n_or_more_changes_nothing),
        cmocka_unit_test(test_one_logit_gives_id_0),
        cmocka_unit_test(test_a_draw_of_1_takes_the_last_candidate_that_is_kept),
        cmocka_unit_test(test_of_equal_logits_the_lower_ids_are_kept),
        cmocka_unit_test(test_samples_equal_the_brute_force_reference),
        cmocka_unit_test(test_frequencies_follow_the_distribution),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
