/* test_config.c: the ranges of model/config.h, and what is derived from a config. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <math.h>
#include <string.h>

#include "../model/config.h"

#define LENGTH(array) (sizeof(array) / sizeof *(array))

static const Config llama2_70b = {
    .dim = 8192,
    .hidden_dim = 28672,
    .n_layers = 80,
    .n_heads = 64,
    .n_kv_heads = 8,
    .head_dim = 128,
    .seq_len = 4096,
    .vocab_size = 32000,
    .norm_eps = 1e-5f,
    .rope_theta = 10000,
    .bos_id = 1,
    .n_eos = 1,
    .eos_id = {2},
};

static void expect_ok(const Config *c) {
    Error err = {0};
    if (config_check(c, &err)) {
        fail_msg("refused: %s", err.text);
    }
    assert_int_equal(config_check(c, NULL), OK);
}

static void expect_refusal(const Config *c, const char *reason) {
    Error err = {0};
    assert_int_equal(config_check(c, &err), ERR_SHAPE);
    assert_int_equal(err.code, ERR_SHAPE);
    if (!strstr(err.text, reason)) {
        fail_msg("'%s' does not say '%s'", err.text, reason);
    }
    assert_null(strchr(err.text, '\n'));
    assert_int_equal(config_check(c, NULL), ERR_SHAPE);
}

static void real_models_are_accepted(void **state) {
    (void)state;
    expect_ok(&llama2_70b);
    const Config stories260k = {.dim = 64, .hidden_dim = 172, .n_layers = 5, .n_heads = 8, .n_kv_heads = 4,
                                .head_dim = 8, .seq_len = 512, .vocab_size = 512, .norm_eps = 1e-5f,
                                .rope_theta = 10000, .bos_id = 1};
    expect_ok(&stories260k);
    const Config smallest = {.dim = 1, .hidden_dim = 1, .n_layers = 1, .n_heads = 1, .n_kv_heads = 1,
                             .head_dim = 2, .seq_len = 1, .vocab_size = 1, .rope_theta = 1.5, .bos_id = -1};
    expect_ok(&smallest);
}

/* ---- integers: both ends of each range, and all that lies beyond ---- */

typedef struct {
    const char *said;  // what a message calls the field
    size_t offset;
    int low, high;
} Range;

#define RANGE(field, low, high) {#field, offsetof(Config, field), low, high}

/* That the vocabulary must hold BOS and EOS comes on top. */
static const Range ranges[] = {
    RANGE(dim, 1, 1 << 20),
    RANGE(hidden_dim, 1, 1 << 22),
    RANGE(n_layers, 1, 4096),
    RANGE(head_dim, 2, 256),
    RANGE(seq_len, 1, 1 << 24),
    RANGE(vocab_size, 1, 1 << 22),
    RANGE(bos_id, -1, 32000 - 1),
    {"end-of-sequence id", offsetof(Config, eos_id[0]), 0, 32000 - 1},
};

static Config with(size_t offset, int value) {
    Config c = llama2_70b;
    if (offset == offsetof(Config, vocab_size)) {
        c.bos_id = -1;
        c.n_eos = 0;
    }
    memcpy((char *)&c + offset, &value, sizeof value);
    return c;
}

static void the_ends_of_every_range_are_accepted(void **state) {
    (void)state;
    for (size_t i = 0; i < LENGTH(ranges); i++) {
        const Config low = with(ranges[i].offset, ranges[i].low);
        const Config high = with(ranges[i].offset, ranges[i].high);
        print_message("    %s\n", ranges[i].said);
        expect_ok(&low);
        expect_ok(&high);
    }
}

/* INT_MIN and INT_MAX must not overflow on the way to the message. */
static void what_lies_beyond_is_refused_by_name(void **state) {
    (void)state;
    for (size_t i = 0; i < LENGTH(ranges); i++) {
        const int beyond[] = {ranges[i].low - 1, INT_MIN, ranges[i].high + 1, INT_MAX};
        for (size_t j = 0; j < LENGTH(beyond); j++) {
            const Config c = with(ranges[i].offset, beyond[j]);
            char reason[40];
            snprintf(reason, sizeof reason, "%s = %d ", ranges[i].said, beyond[j]);
            expect_refusal(&c, reason);
        }
    }
}

static void heads_have_their_range_and_proportion(void **state) {
    (void)state;
    static const struct {
        int n_heads, n_kv_heads, head_dim;
        const char *reason;  // NULL: fine
    } cases[] = {
        {0, 1, 128, "n_heads = 0"},
        {-8, 8, 128, "n_heads = -8"},
        {INT_MIN, 1, 128, "n_heads"},
        {65537, 1, 2, "n_heads = 65537"},
        {8, 0, 128, "n_kv_heads = 0"},  // nothing is divided by it
        {8, -1, 128, "n_kv_heads = -1"},
        {8, INT_MIN, 128, "n_kv_heads"},
        {8, 3, 128, "n_heads = 8 is not a multiple of n_kv_heads = 3"},
        {8, 16, 128, "not a multiple"},
        {8, 8, 127, "head_dim = 127 is odd"},
        {8, 8, 3, "head_dim = 3 is odd"},
        {65536, 65536, 64, NULL},  // the widest
        {65536, 65536, 66, "n_heads * head_dim = 4325376"},
        {65536, 1, 256, "n_heads * head_dim"},
        {8, 1, 2, NULL},
        {7, 7, 128, NULL},
    };
    for (size_t i = 0; i < LENGTH(cases); i++) {
        Config c = llama2_70b;
        c.n_heads = cases[i].n_heads;
        c.n_kv_heads = cases[i].n_kv_heads;
        c.head_dim = cases[i].head_dim;
        if (cases[i].reason) {
            expect_refusal(&c, cases[i].reason);
        } else {
            expect_ok(&c);
        }
    }
}

/* ---- end-of-sequence ids ---- */

static void the_vocabulary_must_hold_the_control_ids(void **state) {
    (void)state;
    Config c = llama2_70b;
    c.vocab_size = 3;
    expect_ok(&c);
    c.vocab_size = 2;
    expect_refusal(&c, "end-of-sequence id = 2");
    c.vocab_size = 1;
    expect_refusal(&c, "bos_id = 1");
}

static void only_ids_in_use_are_looked_at(void **state) {
    (void)state;
    Config c = llama2_70b;
    for (int i = 0; i < MAX_EOS; i++) {
        c.eos_id[i] = i < 3 ? i : -5;
    }
    c.n_eos = 3;
    expect_ok(&c);
    c.n_eos = 4;
    expect_refusal(&c, "end-of-sequence id = -5");
    c.n_eos = 0;
    expect_ok(&c);
    c.n_eos = MAX_EOS + 1;
    expect_refusal(&c, "number of end-of-sequence ids = 9");
    c.n_eos = -1;
    expect_refusal(&c, "number of end-of-sequence ids = -1");
    c.n_eos = INT_MIN;
    expect_refusal(&c, "number of end-of-sequence ids");
}

static void is_eos_knows_the_ids_in_use(void **state) {
    (void)state;
    Config c = llama2_70b;
    c.n_eos = 2;
    c.eos_id[0] = 2;
    c.eos_id[1] = 31999;
    c.eos_id[2] = 7;  // not in use
    assert_true(config_is_eos(&c, 2));
    assert_true(config_is_eos(&c, 31999));
    assert_false(config_is_eos(&c, 7));
    assert_false(config_is_eos(&c, 0));
    assert_false(config_is_eos(&c, -1));
    c.n_eos = 0;
    assert_false(config_is_eos(&c, 2));
}

/* ---- numbers ---- */

static void eps_and_theta_are_sensible_numbers(void **state) {
    (void)state;
    static const float good_eps[] = {0, 1e-5f, 1e-6f, 0x1p-149f, 0.999f};
    static const float bad_eps[] = {1, 2, -1e-6f, NAN, INFINITY, -INFINITY};
    static const double good_theta[] = {1.0000001, 1e4, 1e6, 5e5, 1e300};
    static const double bad_theta[] = {1, 0.5, 0, -1e4, NAN, INFINITY, -INFINITY};
    Config c = llama2_70b;
    for (size_t i = 0; i < LENGTH(good_eps); i++) {
        c.norm_eps = good_eps[i];
        expect_ok(&c);
    }
    for (size_t i = 0; i < LENGTH(bad_eps); i++) {
        c.norm_eps = bad_eps[i];
        expect_refusal(&c, "norm_eps = ");
    }
    c = llama2_70b;
    for (size_t i = 0; i < LENGTH(good_theta); i++) {
        c.rope_theta = good_theta[i];
        expect_ok(&c);
    }
    for (size_t i = 0; i < LENGTH(bad_theta); i++) {
        c.rope_theta = bad_theta[i];
        expect_refusal(&c, "rope_theta = ");
    }
}

/* ---- derived sizes ---- */

/* cases.md rows 18 and 35: bytes of KV cache for a token are 524 288 (7B) and 327 680 (70B). */
static void derived_sizes_are_64_bit(void **state) {
    (void)state;
    Config llama2_7b = llama2_70b;
    llama2_7b.n_layers = llama2_7b.n_heads = llama2_7b.n_kv_heads = 32;
    assert_int_equal(config_kv_bytes(&llama2_7b), 524288);
    assert_int_equal(config_kv_bytes(&llama2_70b), 327680);
    assert_int_equal(config_q_dim(&llama2_70b), 8192);
    assert_int_equal(config_kv_dim(&llama2_70b), 1024);
    assert_int_equal(config_kv_bytes(&llama2_70b), 2ul * 80 * 1024 * 2);
    // The largest config that passes: 64 GiB of cache for one position.
    const Config widest = {.n_layers = 4096, .n_heads = 65536, .n_kv_heads = 65536, .head_dim = 64};
    assert_int_equal(config_kv_dim(&widest), 1ul << 22);
    assert_int_equal(config_kv_bytes(&widest), 1ul << 36);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(real_models_are_accepted),
        cmocka_unit_test(the_ends_of_every_range_are_accepted),
        cmocka_unit_test(what_lies_beyond_is_refused_by_name),
        cmocka_unit_test(heads_have_their_range_and_proportion),
        cmocka_unit_test(the_vocabulary_must_hold_the_control_ids),
        cmocka_unit_test(only_ids_in_use_are_looked_at),
        cmocka_unit_test(is_eos_knows_the_ids_in_use),
        cmocka_unit_test(eps_and_theta_are_sensible_numbers),
        cmocka_unit_test(derived_sizes_are_64_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
