#include "prune.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#define DIGIT_BITS 8   // a magnitude is looked at in two digits, so that counts stay in the L1 cache
#define STRIP_COLS 64  // columns whose ties are counted in one go: two cache lines of each row

size_t prune_count(size_t n, double ratio) {
    CHECK(ratio >= 0 && ratio <= 1);
    // The small addition undoes the rounding of products such as 100 * 0.29 = 28.999999999999996.
    return min_size(n, (size_t)floor((double)n * ratio + 1e-6));
}

/* fp16 without its sign, as an integer, is ordered like the magnitude. */
static unsigned magnitude_of(fp16 h) { return h & 0x7fffu; }

/* What is to go: every magnitude below `magnitude`; of those equal to it, all in columns before `column`
 * and in that column the first `n_rest`. */
typedef struct {
    unsigned magnitude;
    size_t column, n_rest;
} Cut;

/* Add to n[d] the number of weights whose magnitude has `prefix` above the digit at `shift`, and there d. */
static void count_digits(size_t n[1 << DIGIT_BITS], const fp16 *w, size_t rows, size_t cols, size_t stride,
                         unsigned prefix, unsigned shift, int n_threads) {
#pragma omp parallel for num_threads(n_threads) reduction(+ : n[ : 1 << DIGIT_BITS])
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            const unsigned digits = magnitude_of(w[r * stride + c]) >> shift;
            n[digits & ((1 << DIGIT_BITS) - 1)] += digits >> DIGIT_BITS == prefix;
        }
    }
}

/* The magnitude at place `count` from below, as its digits' counts tell: the smallest that has `count`
 * weights at most as large. *n_below are smaller, *n_equal equal. */
static unsigned find_magnitude(size_t *n_below, size_t *n_equal, const fp16 *w, size_t rows, size_t cols,
                               size_t stride, size_t count, int n_threads) {
    unsigned prefix = 0;
    *n_below = 0;
    for (unsigned shift = 2 * DIGIT_BITS; shift > 0;) {
        shift -= DIGIT_BITS;
        size_t n[1 << DIGIT_BITS] = {0};
        count_digits(n, w, rows, cols, stride, prefix, shift, n_threads);
        unsigned digit = 0;
        while (*n_below + n[digit] < count) {
            *n_below += n[digit++];
        }
        *n_equal = n[digit];
        prefix = prefix << DIGIT_BITS | digit;
    }
    return prefix;
}

/* Find the column where n_ties weights of cut->magnitude, of which there are that many, are used up. */
static void cut_ties(Cut *cut, const fp16 *w, size_t rows, size_t cols, size_t stride, size_t n_ties) {
    cut->n_rest = n_ties;
    for (size_t first = 0; first < cols; first += STRIP_COLS) {
        const size_t width = min_size(cols - first, STRIP_COLS);
        size_t ties[STRIP_COLS] = {0};
        for (size_t r = 0; r < rows; r++) {
            const fp16 *row = w + r * stride + first;
            for (size_t c = 0; c < width; c++) {
                ties[c] += magnitude_of(row[c]) == cut->magnitude;
            }
        }
        for (size_t c = 0; c < width; c++) {
            if (ties[c] >= cut->n_rest) {
                cut->column = first + c;
                return;
            }
            cut->n_rest -= ties[c];
        }
    }
}

static void zero_below(fp16 *w, size_t n, unsigned magnitude) {
    for (size_t i = 0; i < n; i++) {
        w[i] = magnitude_of(w[i]) < magnitude ? 0 : w[i];
    }
}

static void apply_cut(fp16 *w, size_t rows, size_t cols, size_t stride, const Cut *cut, int n_threads) {
#pragma omp parallel for num_threads(n_threads)
    for (size_t r = 0; r < rows; r++) {
        fp16 *row = w + r * stride;
        zero_below(row, cut->column, cut->magnitude + 1);
        zero_below(row + cut->column, cols - cut->column, cut->magnitude);
    }
    size_t left = cut->n_rest;
    for (size_t r = 0; left > 0; r++) {
        fp16 *value = w + r * stride + cut->column;
        if (magnitude_of(*value) == cut->magnitude) {
            *value = 0;
            left--;
        }
    }
}

/* Make `count` weights of one matrix zero. Returns the number of zeros afterwards. */
static size_t prune_together(fp16 *w, size_t rows, size_t cols, size_t stride, size_t count, int n_threads) {
    size_t n_below, n_equal;
    Cut cut = {.magnitude = find_magnitude(&n_below, &n_equal, w, rows, cols, stride, count, n_threads)};
    if (cut.magnitude == 0) {  // that many are zero already
        return n_equal;
    }
    cut_ties(&cut, w, rows, cols, stride, count - n_below);
    apply_cut(w, rows, cols, stride, &cut, n_threads);
    return count;
}

size_t prune_magnitude(fp16 *w, size_t rows, size_t cols, size_t stride, double ratio, bool per_row,
                       int n_threads) {
    if (!per_row) {
        return prune_together(w, rows, cols, stride, prune_count(rows * cols, ratio), n_threads);
    }
    const size_t count = prune_count(cols, ratio);
    size_t zeros = 0;
#pragma omp parallel for num_threads(n_threads) reduction(+ : zeros)
    for (size_t r = 0; r < rows; r++) {
        zeros += prune_together(w + r * stride, 1, cols, stride, count, 1);
    }
    return zeros;
}

/* The value that has exactly k others before it when v is sorted; v is reordered. */
static double nth_smallest(double *v, size_t n, size_t k) {
    size_t low = 0, high = n - 1;
    while (low < high) {
        const double a = v[low], b = v[low + (high - low) / 2], c = v[high];
        const double pivot = fmax(fmin(a, b), fmin(fmax(a, b), c));
        size_t i = low, j = high;
        while (i <= j) {  // afterwards v[low .. j] <= pivot <= v[i .. high], and those between equal it
            while (v[i] < pivot) {
                i++;
            }
            while (v[j] > pivot) {
                j--;
            }
            if (i <= j) {
                const double swapped = v[i];
                v[i++] = v[j];
                v[j] = swapped;
                if (j == 0) {
                    break;
                }
                j--;
            }
        }
        if (k >= i) {
            low = i;
        } else if (k <= j) {
            high = j;
        } else {
            return v[k];
        }
    }
    return v[k];
}

void prune_smallest(bool *removed, const double *scores, double *scratch, size_t n, size_t count) {
    if (count == 0 || count >= n) {
        memset(removed, count > 0, n * sizeof *removed);
        return;
    }
    memcpy(scratch, scores, n * sizeof *scratch);
    const double last = nth_smallest(scratch, n, count - 1);
    size_t ties = count;
    for (size_t i = 0; i < n; i++) {
        ties -= scores[i] < last;
    }
    for (size_t i = 0; i < n; i++) {
        const bool tie = scores[i] == last && ties > 0;
        ties -= tie;
        removed[i] = scores[i] < last || tie;
    }
}

/* One row; scratch (2 cols), removed (cols). Returns its zeros. */
static size_t prune_wanda_row(fp16 *w, size_t cols, const double *norms, size_t count, double *scratch,
                              bool *removed) {
    for (size_t c = 0; c < cols; c++) {
        // a zero goes before any other weight, also before those of dead inputs
        scratch[c] = fp16_is_zero(w[c]) ? -1 : fabs((double)fp16_to_float(w[c])) * norms[c];
    }
    prune_smallest(removed, scratch, scratch + cols, cols, count);
    size_t zeros = 0;
    for (size_t c = 0; c < cols; c++) {
        w[c] = removed[c] ? 0 : w[c];
        zeros += fp16_is_zero(w[c]);
    }
    return zeros;
}

int prune_wanda(size_t *zeros, fp16 *w, size_t rows, size_t cols, size_t stride, const double *squares, double ratio,
                int n_threads, Error *err) {
    const size_t count = prune_count(cols, ratio);
    double *norms = memory_alloc(cols * sizeof *norms);
    double *scratch = memory_alloc((size_t)n_threads * 2 * cols * sizeof *scratch);
    bool *removed = memory_alloc((size_t)n_threads * cols * sizeof *removed);
    const bool ok = norms && scratch && removed;
    size_t n_zeros = 0;
    for (size_t c = 0; c < cols && ok; c++) {
        norms[c] = sqrt(squares[c]);
    }
#pragma omp parallel for num_threads(n_threads) reduction(+ : n_zeros)
    for (size_t r = 0; r < (ok ? rows : 0); r++) {
        const size_t t = (size_t)omp_get_thread_num();
        n_zeros += prune_wanda_row(w + r * stride, cols, norms, count, scratch + t * 2 * cols, removed + t * cols);
    }
    free(norms);
    free(scratch);
    free(removed);
    *zeros = n_zeros;
    return ok ? OK : error_set(err, ERR_MEMORY, "no memory to prune rows of %zu columns", cols);
}
