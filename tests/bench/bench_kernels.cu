/* bench_kernels: time of the decode kernels over the shapes of real models, beside cuBLAS and the read ceiling.
 *
 *   bench_kernels CSV [--quick] [--sweep] [--only ROW]
 *
 * A figure is the median over replays of a graph whose launches rotate among copies of the matrix that together
 * exceed the L2 several times; the ratio to cuBLAS and the share of the ceiling are of the same process. Weights and
 * inputs are random normal numbers; the smallest weights are cut to reach the static ratio, and the threshold is the
 * quantile of |x| for the dynamic one. Each product is compared with double precision, element by element.
 * --quick: only the setting .5/.5. --sweep: times for every width of a slice, to tune the choice. --only: one
 * shape of the table, counted from 0. */
#include <math.h>
#include <string.h>
#include <time.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "../../kernels/cublas.h"
#include "../../kernels/cuda_ops.cuh"
extern "C" {
#include "../../kernels/sampling.h"
}

static const int REPLAYS = 15, WARM_UPS = 3;
static const size_t COPIES_BYTES = (size_t)400 << 20;  // several times the L2 of an H200 (60 MB)

struct Shape {
    int rows, cols;
    const char *name;
};
static const Shape shapes[] = {
    {4096, 4096, "7B o"},        {12288, 4096, "7B qkv"},  {11008, 4096, "7B up"},    {22016, 4096, "7B gate|up"},
    {4096, 11008, "7B down"},    {5120, 5120, "13B o"},    {13824, 5120, "13B up"},   {5120, 13824, "13B down"},
    {8192, 8192, "70B o"},       {10240, 8192, "70B qkv"}, {28672, 8192, "70B up"},   {8192, 28672, "70B down"},
    {14336, 4096, "L3 8B up"},   {4096, 14336, "L3 8B down"},
};
struct Setting {
    double sp, dp;
};
static const Setting settings[] = {{.5, .5}, {.5, .3}, {.5, 0}, {.3, .5}, {.3, .3}, {.3, 0}, {.2, .375}};

/* Median microseconds of one call of f(i), i = 0 .. reps - 1 being captured in one graph. */
static double time_us(cudaStream_t stream, int reps, const std::function<void(int)> &f) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    f(0);
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < reps; i++) {
        f(i);
    }
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<double> times;
    for (int i = -WARM_UPS; i < REPLAYS; i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(begin, stream));
        CUDA_CHECK(cudaGraphLaunch(exec, stream));
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 0) {
            times.push_back(ms * 1e3 / reps);
        }
    }
    std::sort(times.begin(), times.end());
    CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return times[times.size() / 2];
}

__global__ static void stream_read(const uint4 *p, size_t n, unsigned *out) {
    const size_t step = (size_t)gridDim.x * blockDim.x;
    unsigned x = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            v[j] = __ldcs(p + i + j * step);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
        }
    }
    if (x == 0x12345678) {
        *out = x;
    }
}

/* GB/s of the best streaming read of 2 GiB. */
static double read_ceiling(const CudaLaunch *c) {
    const size_t bytes = (size_t)2 << 30;
    void *p;
    CUDA_CHECK(cudaMalloc(&p, bytes));
    CUDA_CHECK(cudaMemset(p, 1, bytes));
    double best = 0;
    for (int per_sm : {4, 8, 16}) {
        for (int threads : {256, 512}) {
            const double us = time_us(c->stream, 3, [&](int) {
                stream_read<<<c->n_sms * per_sm, threads, 0, c->stream>>>((const uint4 *)p, bytes / 16, c->counters);
            });
            best = std::max(best, bytes / us * 1e-3);
        }
    }
    CUDA_CHECK(cudaFree(p));
    return best;
}

/* Normal random numbers as fp16: 65536 quantiles, chosen by 16 random bits. */
static void random_normal(fp16 *out, size_t n, uint32_t seed) {
    static std::vector<fp16> table;
    if (table.empty()) {
        for (int i = 0; i < 65536; i++) {
            double low = -6, high = 6, p = (i + .5) / 65536;
            for (int j = 0; j < 50; j++) {
                const double mid = (low + high) / 2;
                (0.5 * erfc(-mid / sqrt(2.0)) < p ? low : high) = mid;
            }
            table.push_back(fp16_from_float((float)low));
        }
    }
#pragma omp parallel for
    for (size_t block = 0; block < n; block += 8) {
        const uint32_t counter[4] = {(uint32_t)(block / 8), (uint32_t)(block >> 35), 0, 0}, key[2] = {seed, 1};
        uint32_t bits[4];
        philox4x32_10(bits, counter, key);
        for (size_t i = 0; i < 8 && block + i < n; i++) {
            out[block + i] = table[bits[i / 2] >> (i % 2 * 16) & 0xffff];
        }
    }
}

/* Quantile q of |x|. */
static float magnitude_quantile(const std::vector<fp16> &x, double q) {
    std::vector<float> m;
    for (fp16 h : x) {
        m.push_back(fabsf(fp16_to_float(h)));
    }
    std::sort(m.begin(), m.end());
    return q > 0 ? m[(size_t)(q * m.size()) - 1] : 0;
}

/* Worst |y - reference| over its bound: fp32 sums of fp16 pairs (design: numbers that must be right). */
static double worst_error(const std::vector<float> &y, const std::vector<fp16> &w, const std::vector<fp16> &x,
                          float threshold) {
    const size_t cols = x.size();
    std::vector<float> xf;
    size_t active = 0;
    for (fp16 h : x) {
        const float v = fp16_to_float(h);
        xf.push_back(fabsf(v) > threshold ? v : 0);
        active += fabsf(v) > threshold;
    }
    double worst = 0;
#pragma omp parallel for reduction(max : worst)
    for (size_t r = 0; r < y.size(); r++) {
        double sum = 0, size = 0;
        for (size_t k = 0; k < cols; k++) {
            const double product = (double)fp16_to_float(w[r * cols + k]) * xf[k];
            sum += product;
            size += fabs(product);
        }
        const double bound = (active * 0x1p-24 + 8 * 0x1p-11) * size + fabs(sum) * 0x1p-24;
        worst = std::max(worst, bound > 0 ? fabs(y[r] - sum) / bound : fabs((double)y[r]));
    }
    return worst;
}

struct Bench {
    CudaLaunch c;
    Cublas *cublas;
    double ceiling;  // GB/s
    FILE *csv;
    bool sweep;
};

template <typename T> static T *to_device(const void *host, size_t bytes) {
    void *p;
    CUDA_CHECK(cudaMalloc(&p, bytes));
    CUDA_CHECK(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return static_cast<T *>(p);
}

/* The matrix with its arrays moved from the host's block to a device's. */
static Matrix moved(const TiledCbc &cbc, const unsigned char *host, const unsigned char *device) {
    const auto move = [&](const auto *p) {
        return reinterpret_cast<decltype(p)>(device + (reinterpret_cast<const unsigned char *>(p) - host));
    };
    Matrix m = {FORMAT_TILED_CBC, cbc.rows, cbc.cols, 0, SITE_MLP_IN, NULL, 0, cbc};
    m.cbc.tile_offset = move(cbc.tile_offset);
    m.cbc.col_info = move(cbc.col_info);
    m.cbc.bitmap = move(cbc.bitmap);
    m.cbc.values = move(cbc.values);
    return m;
}

/* Times of cuBLAS and of our dense kernel for a shape. */
static void bench_dense(Bench *b, const Shape &s, const std::vector<fp16> &w, const std::vector<fp16> &x, double *cublas_us,
                        double *gemv_us) {
    const size_t bytes = w.size() * sizeof(fp16);
    const int copies = (int)std::max<size_t>(2, COPIES_BYTES / bytes), reps = 2 * copies;
    std::vector<fp16 *> device;
    for (int i = 0; i < copies; i++) {
        device.push_back(to_device<fp16>(w.data(), bytes));
    }
    fp16 *dx = to_device<fp16>(x.data(), x.size() * sizeof(fp16));
    float *y;
    CUDA_CHECK(cudaMalloc(&y, s.rows * sizeof(float)));
    const size_t rows = s.rows, cols = s.cols;
    *cublas_us = time_us(b->c.stream, reps, [&](int i) {
        cublas_product(b->cublas, y, rows, device[i % copies], cols, rows, cols, dx, 1, 0);
    });
    *gemv_us = time_us(b->c.stream, reps, [&](int i) {
        const Matrix m = {FORMAT_DENSE, rows, cols, 0, SITE_MLP_IN, device[i % copies], cols, {}};
        gemv_cuda(&b->c, y, &m, dx, EPILOGUE_STORE);
    });
    for (fp16 *p : device) {
        CUDA_CHECK(cudaFree(p));
    }
    CUDA_CHECK(cudaFree(dx));
    CUDA_CHECK(cudaFree(y));
}

static double bench_sparse(Bench *b, const Shape &s, const Setting &set, std::vector<fp16> w, const std::vector<fp16> &x,
                           double cublas_us) {
    const float cut = set.sp > 0 ? 1e-9f + magnitude_quantile(std::vector<fp16>(w.begin(), w.begin() + 1000000), set.sp) : 0;
#pragma omp parallel for
    for (size_t i = 0; i < w.size(); i++) {
        w[i] = fabsf(fp16_to_float(w[i])) <= cut ? 0 : w[i];
    }
    TiledCbc cbc;
    void *block;
    Error err;
    if (tiled_cbc_encode(&cbc, &block, NULL, w.data(), s.rows, s.cols, s.cols, 16, &err)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    TiledCbcLayout layout;
    tiled_cbc_layout(&layout, s.rows, s.cols, NULL);
    const size_t bytes = tiled_cbc_block_bytes(&layout, cbc.n_values);
    const int copies = (int)std::max<size_t>(2, COPIES_BYTES / bytes), reps = 2 * copies;
    std::vector<Matrix> device;
    for (int i = 0; i < copies; i++) {
        device.push_back(moved(cbc, (unsigned char *)block, to_device<unsigned char>(block, bytes)));
    }
    free(block);
    const float threshold = magnitude_quantile(x, set.dp);
    fp16 *dx = to_device<fp16>(x.data(), x.size() * sizeof(fp16));
    float *dt = to_device<float>(&threshold, sizeof threshold), *y;
    CUDA_CHECK(cudaMalloc(&y, s.rows * sizeof(float)));
    CUDA_CHECK(cudaMemset(y, 0xff, s.rows * sizeof(float)));

    CUDA_CHECK(cudaMemset(b->c.report, 0, sizeof(DeviceReport)));
    spmspv_cuda(&b->c, y, &device[0], dx, dt, EPILOGUE_STORE, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    DeviceReport report;
    CUDA_CHECK(cudaMemcpy(&report, b->c.report, sizeof report, cudaMemcpyDeviceToHost));
    const ProductStats &p = report.products[SITE_MLP_IN];
    const double needed = p.bytes + 2.0 * p.active_nonzeros;
    std::vector<float> result(s.rows);
    CUDA_CHECK(cudaMemcpy(result.data(), y, s.rows * sizeof(float), cudaMemcpyDeviceToHost));
    const double error = worst_error(result, w, x, threshold);

    const auto time_slice = [&](int slice) {
        return time_us(b->c.stream, reps, [&](int i) {
            spmspv_cuda(&b->c, y, &device[i % copies], dx, dt, EPILOGUE_STORE, slice);
        });
    };
    const double us = time_slice(0);
    fprintf(b->csv, "%s,%d,%d,%g,%g,%.2f,%.2f,%.3f,%.0f,%.0f,%.3f,%.3f\n", s.name, s.rows, s.cols, set.sp, set.dp, us,
            cublas_us, cublas_us / us, needed, needed / us * 1e-3, needed / us * 1e-3 / b->ceiling, error);
    printf("%-12s SP %.2f DP %.3f  %7.2f us  x cuBLAS %.2f  %5.0f GB/s  share %.2f  error %.2f of the bound\n", s.name, set.sp,
           set.dp, us, cublas_us / us, needed / us * 1e-3, needed / us * 1e-3 / b->ceiling, error);
    if (b->sweep) {
        double best = 1e9;
        int best_slice = 0;
        for (int slice = 64; slice <= std::min(s.cols, 2048); slice += slice < 512 ? 32 : 64) {
            if ((size_t)ceil_div(s.cols, slice) * round_up(s.rows, TILE_M) * 4 <= b->c.workspace_bytes) {
                const double t = time_slice(slice);
                printf("    sweep %d %d %g %g %d %.2f\n", s.rows, s.cols, set.sp, set.dp, slice, t);
                if (t < best) {
                    best = t;
                    best_slice = slice;
                }
            }
        }
        printf("    best slice %d: %.2f us, x cuBLAS %.2f\n", best_slice, best, cublas_us / best);
    }
    for (const Matrix &m : device) {
        CUDA_CHECK(cudaFree((void *)m.cbc.tile_offset));  // the block's first array
    }
    CUDA_CHECK(cudaFree(dx));
    CUDA_CHECK(cudaFree(dt));
    CUDA_CHECK(cudaFree(y));
    if (error > 1) {
        fprintf(stderr, "%s: wrong results\n", s.name);
        exit(1);
    }
    return cublas_us / us;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_kernels CSV [--quick] [--sweep] [--only ROW]\n");
        return 2;
    }
    bool quick = false;
    int only = -1;
    Bench b = {};
    for (int i = 2; i < argc; i++) {
        quick |= strcmp(argv[i], "--quick") == 0;
        b.sweep |= strcmp(argv[i], "--sweep") == 0;
        only = strcmp(argv[i], "--only") == 0 && i + 1 < argc ? atoi(argv[i + 1]) : only;
    }
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    CUDA_CHECK(cudaStreamCreateWithFlags(&b.c.stream, cudaStreamNonBlocking));
    b.c.n_sms = properties.multiProcessorCount;
    b.c.shared_per_block = properties.sharedMemPerBlockOptin;
    b.c.overlap = properties.major >= 9;
    b.c.workspace_bytes = (size_t)64 << 20;
    CUDA_CHECK(cudaMalloc(&b.c.workspace, b.c.workspace_bytes));
    CUDA_CHECK(cudaMalloc(&b.c.counters, N_COUNTERS * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&b.c.report, sizeof(DeviceReport)));
    CUDA_CHECK(cudaMemset(b.c.counters, 0, N_COUNTERS * sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(b.c.report, 0, sizeof(DeviceReport)));
    CUDA_CHECK(cudaDeviceSynchronize());
    Error err;
    if (cublas_open(&b.cublas, b.c.stream, &err) || !(b.csv = fopen(argv[1], "w"))) {
        fprintf(stderr, "bench_kernels: %s\n", b.cublas ? "the CSV cannot be written" : err.text);
        return 1;
    }
    b.ceiling = read_ceiling(&b.c);
    const time_t now = time(NULL);
    char date[32];
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    fprintf(b.csv, "# %s, %s, CUDA %d.%d, read ceiling %.0f GB/s, median of %d graph replays\n", date, properties.name,
            CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, b.ceiling, REPLAYS);
    fprintf(b.csv, "name,rows,cols,sp,dp,us,cublas_us,ratio,bytes,gb_s,share_of_ceiling,error_of_bound\n");
    printf("read ceiling %.0f GB/s\n", b.ceiling);

    const size_t n_settings = quick ? 1 : sizeof settings / sizeof *settings;
    std::vector<double> log_ratio(n_settings);
    int n_shapes = 0;
    double gemv_log = 0;
    for (const Shape &s : shapes) {
        if (only >= 0 && &s != &shapes[only]) {
            continue;
        }
        std::vector<fp16> w((size_t)s.rows * s.cols), x(s.cols);
        random_normal(w.data(), w.size(), 1);
        random_normal(x.data(), x.size(), 2);
        double cublas_us, gemv_us;
        bench_dense(&b, s, w, x, &cublas_us, &gemv_us);
        printf("%-12s dense: cuBLAS %.2f us, gemv %.2f us, floor %.2f us\n", s.name, cublas_us, gemv_us,
               2e-3 * s.rows * s.cols / b.ceiling);
        gemv_log += log(cublas_us / gemv_us);
        for (size_t i = 0; i < n_settings; i++) {
            log_ratio[i] += log(bench_sparse(&b, s, settings[i], w, x, cublas_us));
        }
        n_shapes++;
        fflush(stdout);
    }
    printf("geometric mean x cuBLAS: gemv %.3f", exp(gemv_log / n_shapes));
    for (size_t i = 0; i < n_settings; i++) {
        printf("  SP %.2f DP %.3f: %.3f", settings[i].sp, settings[i].dp, exp(log_ratio[i] / n_shapes));
    }
    printf("\n");
    fclose(b.csv);
    cublas_close(b.cublas);
    return 0;
}
