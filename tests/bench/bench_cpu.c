/* bench_cpu: the converter's encoder and the CPU's decode products, medians over repeated runs.
 *
 *   bench_cpu [THREADS]
 *
 * Products rotate among copies of the matrix that together exceed the caches; the read ceiling is measured in the same
 * process with the same threads. Shares are of that ceiling, on the bytes that a product needs. */
#include <math.h>
#include <string.h>

#include "../../kernels/backend.h"

enum { REPEATS = 7, MAX_COPIES = 64 };
static const size_t copies_bytes = (size_t)1 << 30;  // beyond any L3

static int compare(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, size_t n) {
    qsort(values, n, sizeof *values, compare);
    return values[n / 2];
}

/* Roughly normal numbers; a share sp of them zero. */
static void fill_random(fp16 *out, size_t n, double sp, uint32_t seed) {
    for (size_t i = 0; i < n; i++) {
        const uint32_t counter[4] = {(uint32_t)i, (uint32_t)(i >> 32), 0, 0}, key[2] = {seed, 0};
        uint32_t bits[4];
        philox4x32_10(bits, counter, key);
        const float sum = ((float)bits[0] + (float)bits[1] + (float)bits[2]) * 0x1p-32f - 1.5f;
        out[i] = (double)bits[3] < sp * 0x1p32 ? 0 : fp16_from_float(0.04f * sum);
    }
}

static void bench_encoder(const fp16 *w, size_t rows, size_t cols, double sp) {
    double times[REPEATS];
    for (size_t i = 0; i < REPEATS; i++) {
        TiledCbc cbc;
        void *block;
        const double start = time_ms();
        if (tiled_cbc_encode(&cbc, &block, NULL, w, rows, cols, cols, 1, NULL)) {
            exit(1);
        }
        times[i] = time_ms() - start;
        free(block);
    }
    printf("encode     %zu x %zu, SP %.1f, one thread: %.0f MB/s of fp16\n", rows, cols, sp,
           (double)(rows * cols * sizeof(fp16)) / median(times, REPEATS) * 1e-3);
}

/* Median milliseconds of y = W x over copies of W; *bytes = what one product needs. */
static double time_product(Backend *be, const Matrix *copies, size_t n, const fp16 *x, float threshold, float *y,
                           double *bytes) {
    double times[REPEATS];
    memset(be->stats, 0, sizeof be->stats);
    be->matmul(be, y, &copies[0], x, 1, &threshold);
    *bytes = (double)be->stats[copies[0].site].bytes;
    for (size_t i = 0; i < REPEATS; i++) {
        const double start = time_ms();
        for (size_t j = 0; j < n; j++) {
            be->matmul(be, y, &copies[j], x, 1, &threshold);
        }
        times[i] = (time_ms() - start) / (double)n;
    }
    return median(times, REPEATS);
}

static float magnitude_quantile(const fp16 *x, size_t n, double q) {
    double *m = malloc(n * sizeof *m);
    for (size_t i = 0; i < n; i++) {
        m[i] = fabs((double)fp16_to_float(x[i]));
    }
    qsort(m, n, sizeof *m, compare);
    const double t = q > 0 ? m[(size_t)(q * (double)n) - 1] : 0;
    free(m);
    return (float)t;
}

static void bench_shape(Backend *be, size_t rows, size_t cols, double ceiling) {
    fp16 *w = memory_alloc(rows * cols * sizeof *w), *x = memory_alloc(cols * sizeof *x);
    float *y = memory_alloc(rows * sizeof *y);
    fill_random(x, cols, 0, 7);
    const size_t n = min_size(MAX_COPIES, copies_bytes / (rows * cols * sizeof *w) + 2);
    Matrix copies[MAX_COPIES];
    double dense_bytes;
    fill_random(w, rows * cols, 0, 1);
    fp16 *dense[MAX_COPIES];
    for (size_t i = 0; i < n; i++) {
        dense[i] = memory_alloc(rows * cols * sizeof *w);
        memcpy(dense[i], w, rows * cols * sizeof *w);
        copies[i] = (Matrix){.format = FORMAT_DENSE, .rows = rows, .cols = cols, .dense = dense[i], .stride = cols};
    }
    const double dense_ms = time_product(be, copies, n, x, 0, y, &dense_bytes);
    printf("%zu x %zu  dense              %7.3f ms  share %.2f\n", rows, cols, dense_ms, dense_bytes / dense_ms / ceiling);
    for (size_t i = 0; i < n; i++) {
        free(dense[i]);
    }
    for (double sp = 0.3; sp < 0.6; sp += 0.2) {
        fill_random(w, rows * cols, sp, 1);
        void *blocks[MAX_COPIES];
        for (size_t i = 0; i < n; i++) {
            copies[i] = (Matrix){.format = FORMAT_TILED_CBC, .rows = rows, .cols = cols};
            if (tiled_cbc_encode(&copies[i].cbc, &blocks[i], NULL, w, rows, cols, cols, 2, NULL)) {
                exit(1);
            }
        }
        for (size_t i = 0; i < 3; i++) {
            const double dp = (const double[]){0, 0.3, 0.5}[i];
            double bytes;
            const double ms = time_product(be, copies, n, x, magnitude_quantile(x, cols, dp), y, &bytes);
            printf("%zu x %zu  SP %.1f DP %.1f      %7.3f ms  share %.2f  x dense %.2f\n", rows, cols, sp, dp, ms,
                   bytes / ms / ceiling, dense_ms / ms);
        }
        for (size_t i = 0; i < n; i++) {
            free(blocks[i]);
        }
    }
    free(w);
    free(x);
    free(y);
}

int main(int argc, char **argv) {
    Backend *be;
    Error err;
    const int n_threads = argc > 1 ? atoi(argv[1]) : default_threads();
    if (backend_cpu(&be, n_threads, getenv("SPDP_ISA"), &err)) {
        fprintf(stderr, "bench_cpu: %s\n", err.text);
        return 1;
    }
    printf("%s\n", be->device);
    const double gb_s = be->read_ceiling(be), ceiling = gb_s * 1e6;  // bytes a millisecond
    printf("read       %.1f GB/s\n", gb_s);
    fp16 *w = memory_alloc((size_t)4096 * 11008 * sizeof *w);
    fill_random(w, (size_t)4096 * 11008, 0.5, 1);
    bench_encoder(w, 4096, 11008, 0.5);
    free(w);
    bench_shape(be, 11008, 4096, ceiling);
    bench_shape(be, 4096, 11008, ceiling);
    bench_shape(be, 5632, 2048, ceiling);
    bench_shape(be, 2048, 5632, ceiling);
    be->free(be);
    return 0;
}
