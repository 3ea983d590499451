/* test_fp16.c: conversion between binary16 and binary32 by its definition and against the compiler's type. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <float.h>

#include "../kernels/fp16.h"
#include "support.h"

/* ---- the definition, in double ---- */

static double value_of(fp16 h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    const double magnitude = exponent == 31  ? (fraction ? NAN : INFINITY)
                             : exponent == 0 ? ldexp(fraction, -24)
                                             : ldexp(1024 + fraction, exponent - 25);
    return h & 0x8000 ? -magnitude : magnitude;
}

/* Nearest half, ties to even, which is what nearbyint does. A carry out of the fraction runs into the
 * exponent and from there into infinity, as the format intends. */
static fp16 nearest(float f) {
    const double magnitude = fabs((double)f);
    const fp16 sign = signbit(f) ? 0x8000 : 0;
    if (magnitude >= 0x1p16) {
        return sign | 0x7c00;
    }
    int exponent;
    frexp(magnitude, &exponent);
    exponent = magnitude == 0 || exponent < -13 ? -14 : exponent - 1;
    const double steps = nearbyint(ldexp(magnitude, 10 - exponent));
    return (fp16)(sign | ((exponent + 14) * 1024 + (int)steps));
}

static float float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static bool is_nan(fp16 h) { return (h & 0x7fff) > 0x7c00; }

#ifdef __FLT16_MANT_DIG__
static fp16 compilers(float f) {
    const _Float16 half = (_Float16)f;
    fp16 h;
    memcpy(&h, &half, sizeof h);
    return h;
}
#else
static fp16 compilers(float f) { return nearest(f); }
#endif

static void check_rounding(float f) {
    const fp16 h = fp16_from_float(f);
    if (h != nearest(f) || h != compilers(f)) {
        fail_msg("%a becomes %04x instead of %04x (%04x by the compiler)", (double)f, h, nearest(f),
                 compilers(f));
    }
}

/* A float, its neighbours, and all three negated. */
static void check_rounding_around(float f) {
    const float near[] = {f, nextafterf(f, INFINITY), nextafterf(f, -INFINITY)};
    for (size_t i = 0; i < COUNT(near); i++) {
        check_rounding(near[i]);
        check_rounding(-near[i]);
    }
}

/* ---- tests ---- */

static void test_every_half_has_its_value_and_comes_back(void **state) {
    (void)state;
    for (uint32_t i = 0; i <= 0xffff; i++) {
        const fp16 h = (fp16)i;
        const float f = fp16_to_float(h);
        if (is_nan(h)) {
            assert_true(isnan(f));
            assert_true(is_nan(fp16_from_float(f)));
        } else {
            assert_true((double)f == value_of(h));
            assert_int_equal(signbit(f) != 0, h >> 15);
            assert_int_equal(fp16_from_float(f), h);
        }
        assert_int_equal(fp16_is_zero(h), value_of(h) == 0);
        assert_int_equal(fp16_is_finite(h), isfinite(value_of(h)) != 0);
    }
}

/* Between all neighbours: subnormals, normals, and FP16_MAX with the infinity above it (65520). */
static void test_halfway_cases_go_to_even_and_their_neighbours_to_the_nearest(void **state) {
    (void)state;
    for (fp16 h = 0; h < 0x7c00; h++) {
        const double above = h == 0x7bff ? 0x1p16 : value_of(h + 1);
        check_rounding_around((float)value_of(h));
        check_rounding_around((float)((value_of(h) + above) / 2));
    }
}

static void test_known_roundings(void **state) {
    (void)state;
    static const struct {
        float from;
        fp16 to;
    } known[] = {
        {0, 0},                         // zeros keep their sign
        {-0.0f, 0x8000},                //
        {1, 0x3c00},                    //
        {-2, 0xc000},                   //
        {1 + 0x1p-11f, 0x3c00},         // half way: down to even
        {1 + 3 * 0x1p-11f, 0x3c02},     // half way: up to even
        {2 - 0x1p-11f, 0x4000},         // carry into the exponent
        {0x1p-14f, 0x0400},             // least normal
        {0x1p-14f - 0x1p-25f, 0x0400},  // half way below it: up to even, out of the subnormals
        {0x1p-24f, 0x0001},             // least subnormal
        {0x1p-25f, 0},                  // half of it: down to even
        {0x1.000002p-25f, 0x0001},      // a little more
        {FLT_TRUE_MIN, 0},              //
        {FP16_MAX, 0x7bff},             //
        {0x1.ffdffep15f, 0x7bff},       // the last float below 65520
        {65520, 0x7c00},                // half way to 2^16
        {-65520, 0xfc00},               //
        {FLT_MAX, 0x7c00},              //
        {-INFINITY, 0xfc00},            //
    };
    for (size_t i = 0; i < COUNT(known); i++) {
        assert_int_equal(fp16_from_float(known[i].from), known[i].to);
        check_rounding(known[i].from);
    }
}

/* A NaN whose payload lies in the 13 bits that are cut off must not become infinity. */
static void test_nan_stays_nan(void **state) {
    (void)state;
    static const uint32_t nans[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0xff800001,
                                    0x7f801fff, 0x7f802000, 0x7fffffff, 0xffffffff};
    for (size_t i = 0; i < COUNT(nans); i++) {
        assert_true(is_nan(fp16_from_float(float_of_bits(nans[i]))));
    }
}

/* A prime step through all bit patterns meets every exponent and all low bits. */
static void test_floats_of_all_kinds_round_to_the_nearest(void **state) {
    (void)state;
#ifndef __FLT16_MANT_DIG__
    print_message("skipped: comparison with _Float16, which this compiler lacks\n");
#endif
    for (uint64_t bits = 0; bits <= UINT32_MAX; bits += 2003) {
        const float f = float_of_bits((uint32_t)bits);
        if (!isnan(f)) {
            check_rounding(f);
        }
    }
    assert_int_equal(bits_of_float(fp16_to_float(0x8000)), 0x80000000);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_half_has_its_value_and_comes_back),
        cmocka_unit_test(test_halfway_cases_go_to_even_and_their_neighbours_to_the_nearest),
        cmocka_unit_test(test_known_roundings),
        cmocka_unit_test(test_nan_stays_nan),
        cmocka_unit_test(test_floats_of_all_kinds_round_to_the_nearest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
