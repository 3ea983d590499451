/* philox_cases.h: which draws the golden table holds, shared by its generator and the test.
 * A quarter each of small seed and small step, large and small, small and large, large and large. */
#ifndef SPDP_PHILOX_CASES_H
#define SPDP_PHILOX_CASES_H

#include <stdint.h>

#define PHILOX_CASES 1000

/* Multiples of 2^64 / golden ratio: all 64 bits vary. */
static inline uint64_t philox_case_spread(uint64_t i) { return (i + 1) * 0x9e3779b97f4a7c15u; }

static inline uint64_t philox_case_seed(uint64_t i) { return i & 1 ? philox_case_spread(i) : i / 100; }

static inline uint64_t philox_case_step(uint64_t i) {
    return i & 2 ? philox_case_spread(i + PHILOX_CASES) : i % 100;
}

#endif
