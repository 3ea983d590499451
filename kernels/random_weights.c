#include "random_weights.h"

#include <math.h>

#include "sampling.h"

#define STDDEV 0.02

/* The x with probability q above it under N(0, 1), where 0 <= from <= x. The tail's probability is convex
 * there, so Newton's steps come from below and do not pass x. */
static double upper_quantile(double q, double from) {
    double x = from, step;
    do {
        const double tail = 0.5 * erfc(x / sqrt(2));
        const double density = exp(-0.5 * x * x) / sqrt(2 * acos(-1));
        step = (tail - q) / density;
        x += step;
    } while (step > 1e-12);
    return x;
}

/* Each quantile is found from the one before, outwards from the median, and mirrored. */
void random_weight_values(fp16 values[WEIGHT_VALUES]) {
    const int half = WEIGHT_VALUES / 2;
    double x = 0;
    for (int i = 0; i < half; i++) {
        x = upper_quantile((half - i - 0.5) / WEIGHT_VALUES, x);
        values[half + i] = fp16_from_float((float)(STDDEV * x));
        values[half - 1 - i] = fp16_from_float((float)(STDDEV * -x));
    }
}

void random_weights_row(fp16 *out, const RandomWeights *r, size_t row, size_t cols) {
    const uint32_t key[2] = {(uint32_t)r->seed, (uint32_t)(r->seed >> 32)};
    uint32_t counter[4] = {0, (uint32_t)row, r->matrix, r->layer};
    uint32_t drop_counter[4] = {0, (uint32_t)row, r->matrix + DROP_DRAWS, r->layer};
    for (size_t begin = 0; begin < cols; begin += WEIGHTS_PER_DRAW, counter[0]++, drop_counter[0]++) {
        uint32_t draw[4], drop[4] = {0};
        philox4x32_10(draw, counter, key);
        if (r->dropped > 0) {
            philox4x32_10(drop, drop_counter, key);
        }
        const size_t n = min_size(cols - begin, WEIGHTS_PER_DRAW);
        for (size_t i = 0; i < n; i++) {
            const unsigned shift = 16 * (i % 2);
            const bool removed = (drop[i / 2] >> shift & 0xffff) < r->dropped;
            out[begin + i] = removed ? 0 : r->values[draw[i / 2] >> shift & 0xffff];
        }
    }
}
