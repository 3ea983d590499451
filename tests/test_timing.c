/* test_timing.c: the figures of a run from the moments its tokens came. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdbool.h>

#include "../model/timing.h"

static void assert_near(double value, double expected) {
    if (!(fabs(value - expected) <= 1e-9 * fabs(expected))) {
        fail_msg("%.12g instead of %.12g", value, expected);
    }
}

/* Token i comes at the sum of the first i + 1 steps; steps[0] is the time to the first. */
static Timing timing_of_steps(const double *steps, size_t n) {
    double token_ms[256];
    double now = 0;
    assert_true(n <= 256);
    for (size_t i = 0; i < n; i++) {
        token_ms[i] = now += steps[i];
    }
    return timing_of(token_ms, n, 8, 1);
}

/* cases.md row 49. */
static void test_32_tokens_from_20_to_330_ms_give_10_ms_a_token(void **state) {
    (void)state;
    double token_ms[32];
    for (size_t i = 0; i < 32; i++) {
        token_ms[i] = 20 + 10 * (double)i;
    }
    const Timing t = timing_of(token_ms, 32, 8, 19);
    assert_int_equal(t.prefill_tokens, 8);
    assert_int_equal(t.decode_tokens, 32);
    assert_near(t.ttft_ms, 20);
    assert_near(t.prefill_tok_s, 400);
    assert_near(t.tpot_ms, 10);
    assert_near(t.tpot_median_ms, 10);
    assert_near(t.tpot_p99_ms, 10);
    assert_near(t.decode_tok_s, 100);
    assert_near(t.total_ms, 330);
    assert_near((double)t.decode_tokens / t.total_ms * 1000, 96.969696969697);
}

static void assert_no_time_per_token(Timing t) {
    assert_true(isnan(t.tpot_ms));
    assert_true(isnan(t.tpot_median_ms));
    assert_true(isnan(t.tpot_p99_ms));
    assert_true(isnan(t.decode_tok_s));
}

/* cases.md row 49. */
static void test_one_token_has_no_time_per_token(void **state) {
    (void)state;
    double token_ms = 20;
    const Timing t = timing_of(&token_ms, 1, 8, 19);
    assert_no_time_per_token(t);
    assert_int_equal(t.decode_tokens, 1);
    assert_near(t.ttft_ms, 20);
    assert_near(t.prefill_tok_s, 400);
    assert_near(t.total_ms, 20);
}

/* cases.md row 49. */
static void test_without_tokens_the_prefill_is_all(void **state) {
    (void)state;
    const Timing t = timing_of(NULL, 0, 8, 16);
    assert_no_time_per_token(t);
    assert_int_equal(t.decode_tokens, 0);
    assert_near(t.ttft_ms, 16);
    assert_near(t.prefill_tok_s, 500);
    assert_near(t.total_ms, 16);
}

static void test_two_tokens_have_one_step(void **state) {
    (void)state;
    const double steps[] = {100, 4};
    const Timing t = timing_of_steps(steps, 2);
    assert_near(t.tpot_ms, 4);
    assert_near(t.tpot_median_ms, 4);
    assert_near(t.tpot_p99_ms, 4);
    assert_near(t.decode_tok_s, 250);
}

static void test_the_first_token_counts_in_no_step(void **state) {
    (void)state;
    const double steps[] = {5000, 3, 1, 2};
    const Timing t = timing_of_steps(steps, 4);
    assert_near(t.tpot_ms, 2);
    assert_near(t.tpot_median_ms, 2);
    assert_near(t.tpot_p99_ms, 3);
}

static void test_the_median_of_an_even_number_is_the_mean_of_the_middle_two(void **state) {
    (void)state;
    const double steps[] = {50, 9, 1, 2, 4};
    const Timing t = timing_of_steps(steps, 5);
    assert_near(t.tpot_ms, 4);
    assert_near(t.tpot_median_ms, 3);
    assert_near(t.tpot_p99_ms, 9);
}

/* Of steps 1 .. n in descending order the nearest rank is ceil(0.99 n). */
static void test_p99_is_the_nearest_rank(void **state) {
    (void)state;
    static const struct {
        size_t n_steps;
        double p99;
    } cases[] = {{1, 1}, {99, 99}, {100, 99}, {101, 100}, {199, 198}, {200, 198}, {201, 199}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double steps[256] = {1};
        for (size_t s = 0; s < cases[i].n_steps; s++) {
            steps[1 + s] = (double)(cases[i].n_steps - s);
        }
        assert_near(timing_of_steps(steps, cases[i].n_steps + 1).tpot_p99_ms, cases[i].p99);
    }
}

static void test_a_clock_that_stands_still_gives_no_rate(void **state) {
    (void)state;
    double token_ms[] = {0, 0, 0};
    const Timing t = timing_of(token_ms, 3, 8, 0);
    assert_true(isnan(t.prefill_tok_s));
    assert_true(isnan(t.decode_tok_s));
    assert_true(t.tpot_ms == 0);
    assert_true(t.tpot_median_ms == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_32_tokens_from_20_to_330_ms_give_10_ms_a_token),
        cmocka_unit_test(test_one_token_has_no_time_per_token),
        cmocka_unit_test(test_without_tokens_the_prefill_is_all),
        cmocka_unit_test(test_two_tokens_have_one_step),
        cmocka_unit_test(test_the_first_token_counts_in_no_step),
        cmocka_unit_test(test_the_median_of_an_even_number_is_the_mean_of_the_middle_two),
        cmocka_unit_test(test_p99_is_the_nearest_rank),
        cmocka_unit_test(test_a_clock_that_stands_still_gives_no_rate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
