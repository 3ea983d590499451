/* support.h: random matrices, the reference product and the judgement of a result, shared by the tests of the
 * kernels. To be included after cmocka.h. All that is random comes from a state that the test owns. */
#ifndef SPDP_SUPPORT_H
#define SPDP_SUPPORT_H

#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "../kernels/tiled_cbc.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* All bits one: a NaN in fp16 and in fp32, and no index that could be taken for a good one. */
static inline void poison(void *p, size_t bytes) { memset(p, 0xff, bytes); }

/* Poisoned memory with slack, poisoned as well, behind it. Ends the test when there is none. */
static inline void *poisoned_alloc(size_t bytes) {
    void *p = memory_alloc(bytes);
    assert_non_null(p);
    poison(p, bytes + MEMORY_SLACK);
    return p;
}

static inline bool is_poison(const void *p, size_t bytes) {
    const unsigned char *b = p;
    for (size_t i = 0; i < bytes; i++) {
        if (b[i] != 0xff) {
            return false;
        }
    }
    return true;
}

/* ---- random numbers ---- */

static inline uint32_t random_bits(uint64_t *random) {
    *random = *random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*random >> 32);
}

static inline uint32_t random_below(uint64_t *random, uint32_t n) {
    return (uint32_t)((uint64_t)random_bits(random) * n >> 32);
}

/* About normal, variance 1: four uniform numbers added up. */
static inline float random_normal(uint64_t *random) {
    const uint32_t a = random_bits(random), b = random_bits(random);
    const uint32_t sum = (a >> 16) + (a & 0xffff) + (b >> 16) + (b & 0xffff);
    return ((float)sum - 2 * 65535.0f) * (1.7320508f / 65536);
}

/* Where the elements of a matrix or vector come from. */
typedef fp16 (*Draw)(uint64_t *random);

static inline fp16 draw_normal(uint64_t *random) { return fp16_from_float(random_normal(random)); }

/* -2 .. 2, whose products add up without any rounding. */
static inline fp16 draw_integer(uint64_t *random) {
    return fp16_from_float((float)random_below(random, 5) - 2);
}

/* Zeros of either sign. */
static inline fp16 draw_zero(uint64_t *random) { return random_below(random, 2) ? 0x8000 : 0; }

static inline fp16 draw_nonzero(Draw draw, uint64_t *random) {
    fp16 h;
    do {
        h = draw(random);
    } while (fp16_is_zero(h));
    return h;
}

/* ---- matrices ---- */

typedef struct {
    const char *name;
    enum { SCATTERED, LAST_ELEMENT, ONE_COLUMN, ONE_GTILE, WORD_ENDS, LANE_0 } kind;
    unsigned percent;  // SCATTERED: nonzeros
} Pattern;

/* Every pattern that a decoder of bitmaps may stumble over. */
static const Pattern patterns[] = {
    {"all zero", SCATTERED, 0},
    {"30 % nonzero", SCATTERED, 30},
    {"50 % nonzero", SCATTERED, 50},
    {"70 % nonzero", SCATTERED, 70},
    {"all nonzero", SCATTERED, 100},
    {"one nonzero, the last element", LAST_ELEMENT, 0},
    {"one dense column among empty ones", ONE_COLUMN, 0},
    {"one dense GTile among empty ones", ONE_GTILE, 0},
    {"bits 0 and 63 of each word", WORD_ENDS, 0},
    {"lane 0 of each vector", LANE_0, 0},
};

#define HALF_NONZERO (&patterns[2])

static inline bool pattern_keeps(const Pattern *p, size_t row, size_t col, size_t rows, size_t cols,
                                 uint64_t *random) {
    switch (p->kind) {
    case LAST_ELEMENT:
        return row == rows - 1 && col == cols - 1;
    case ONE_COLUMN:
        return col == cols / 2;
    case ONE_GTILE:
        return row / TILE_M == (rows - 1) / TILE_M && col / TILE_K == (cols - 1) / TILE_K;
    case WORD_ENDS:
        return row % 64 == 0 || row % 64 == 63;
    case LANE_0:
        return row % 16 == 0;
    default:
        return random_below(random, 100) < p->percent;
    }
}

/* A matrix (rows, stride) of that pattern, its zeros of either sign. Columns beyond cols stay untouched. */
static inline void fill_matrix(fp16 *w, size_t rows, size_t cols, size_t stride, const Pattern *p, Draw draw,
                               uint64_t *random) {
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            const bool keep = pattern_keeps(p, r, c, rows, cols, random);
            w[r * stride + c] = keep ? draw_nonzero(draw, random) : draw_zero(random);
        }
    }
}

/* y[t][r] = sum over k of w[r][k] x[t][k] and magnitude[t][r] = the sum of the absolute values, in double.
 *   y, magnitude (n, rows);  w (rows, stride);  x (n, cols) */
static inline void reference_product(double *y, double *magnitude, const fp16 *w, size_t rows, size_t cols,
                                     size_t stride, const fp16 *x, size_t n) {
    enum { BLOCK = 64 };  // rows at a time, turned around so that the compiler may use vectors
    double(*block)[BLOCK] = calloc(cols, sizeof *block);
    assert_non_null(block);
    for (size_t row = 0; row < rows; row += BLOCK) {
        const size_t n_rows = min_size(BLOCK, rows - row);
        for (size_t r = 0; r < n_rows; r++) {
            for (size_t k = 0; k < cols; k++) {
                block[k][r] = (double)fp16_to_float(w[(row + r) * stride + k]);
            }
        }
        for (size_t t = 0; t < n; t++) {
            double sum[BLOCK] = {0}, absolute[BLOCK] = {0};
            for (size_t k = 0; k < cols; k++) {
                const double xk = (double)fp16_to_float(x[t * cols + k]);
                for (size_t r = 0; r < BLOCK && xk != 0; r++) {
                    sum[r] += block[k][r] * xk;
                    absolute[r] += fabs(block[k][r] * xk);
                }
            }
            memcpy(y + t * rows + row, sum, n_rows * sizeof *sum);
            memcpy(magnitude + t * rows + row, absolute, n_rows * sizeof *absolute);
        }
    }
    free(block);
}

/* ---- judgement ---- */

typedef enum { AS_FLOAT, AS_FP16 } OutputType;

/* Half the distance between neighbours of the type at v. */
static inline double half_ulp(double v, OutputType type) {
    const int digits = type == AS_FP16 ? 11 : 24, least = type == AS_FP16 ? -13 : -125;
    int exponent = least;
    if (v != 0) {
        frexp(v, &exponent);
    }
    return ldexp(1, (exponent > least ? exponent : least) - digits - 1);
}

/* The worst error of many, as a share of what is allowed. */
typedef struct {
    double worst;
    char at[160];        // the case being judged
    char worst_at[160];  // the case of the worst, with
    double got, want;    // its two numbers
    size_t n;            // numbers judged
} Judgement;

/* Name the case that the next calls of judge() belong to. */
static inline void judge_case(Judgement *j, const char *format, ...) __attribute__((format(printf, 2, 3)));
static inline void judge_case(Judgement *j, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(j->at, sizeof j->at, format, args);
    va_end(args);
}

/* |got - want| may reach roundings * 2^-24 * magnitude and half an ulp of the output type; what lies beyond
 * the range of fp16 must be infinite. */
static inline void judge(Judgement *j, double got, double want, double roundings, double magnitude,
                         OutputType type) {
    const double allowed = roundings * 0x1p-24 * magnitude;
    const bool overflow = type == AS_FP16 && isinf(got) && got * want > 0 && fabs(want) + allowed >= 65520;
    const double error = overflow ? 0 : fabs(got - want);
    const double bound = allowed + half_ulp(fmax(fabs(got), fabs(want)), type);
    const double share = error <= bound * 1e9 ? error / bound : INFINITY;  // NaN compares false
    j->n++;
    if (share > j->worst) {
        j->worst = share;
        j->got = got;
        j->want = want;
        memcpy(j->worst_at, j->at, sizeof j->at);
    }
}

/* Print the worst and fail if it is beyond its bound. A judgement of nothing fails too. */
static inline void judge_end(const Judgement *j, const char *what) {
    assert_true(j->n > 0);
    print_message("%s: worst error of %zu numbers %.2f of its bound (%s)\n", what, j->n, j->worst,
                  j->worst_at);
    if (!(j->worst <= 1)) {
        fail_msg("%s: got %.9g instead of %.9g, %.3g of the bound (%s)", what, j->got, j->want, j->worst,
                 j->worst_at);
    }
}

#endif
