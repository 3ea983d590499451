/* random_weights.h: matrices of random weights N(0, 0.02). An element is a function of the seed, the matrix and
 * its place there, so that any part can be made on its own, by any backend, and is the same. */
#ifndef SPDP_RANDOM_WEIGHTS_H
#define SPDP_RANDOM_WEIGHTS_H

#include "fp16.h"
#include "util.h"

#ifdef __cplusplus
extern "C" {
#endif

#define WEIGHT_VALUES 65536   // 16 random bits choose one
#define WEIGHTS_PER_DRAW 8    // 4 words of 32 bits
#define DROP_DRAWS (1u << 31) // added to the number of a matrix: draws that decide what is removed

typedef struct {
    uint64_t seed;
    uint32_t matrix, layer;  // each pair has draws of its own; matrix < DROP_DRAWS
    uint32_t dropped;        // 0 .. 65536: every weight is removed with this probability / 65536
    const fp16 *values;      // (WEIGHT_VALUES) of random_weight_values(), in memory of whoever makes the matrix
} RandomWeights;

/* A removed share as RandomWeights counts it. */
static inline uint32_t random_weights_dropped(double share) { return (uint32_t)(share * 65536 + 0.5); }

/* The values that weights take, in ascending order: entry i is the quantile of N(0, 0.02) at (i + 0.5) /
 * WEIGHT_VALUES. None is 0. */
void random_weight_values(fp16 values[WEIGHT_VALUES]);

/* Columns 0 .. cols - 1 of a row, what is removed as +0.
 *
 * Draws are Philox4x32-10 with the counter (block, row, matrix, layer), block = column / WEIGHTS_PER_DRAW, and the
 * seed as key; in cuRAND's terms subsequence = matrix + 2^32 layer, offset = 4 (block + 2^32 row). Column i of a
 * block takes 16 bits: half i % 2 (0: the lower) of word i / 2, an index of values. The same bits of the draw for
 * matrix + DROP_DRAWS remove the weight if they are below dropped. */
void random_weights_row(fp16 *out, const RandomWeights *r, size_t row, size_t cols);

#ifdef __cplusplus
}
#endif
#endif
