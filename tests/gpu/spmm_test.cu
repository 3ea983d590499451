/* spmm_test.cu: cuda_spmm.cu (spmm_cuda, expand_cuda) against references in double, then their times. Prints
 * one line a case with the worst error as a share of its bound, and at the end what failed. */
#include "../../kernels/cuda_ops.cuh"

#include <algorithm>
#include <math.h>
#include <string.h>
#include <vector>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define REPEATS 20
#define GUARD 64  // poisoned bytes behind every output
#define WORKSPACE_BYTES ((size_t)64 << 20)

static CudaLaunch launch;
static int n_passed, n_failed;

static void result(bool ok, const char *what, double share) {
    printf("%-4s %-76s %8.3g of the bound\n", ok ? "ok" : "FAIL", what, share);
    (ok ? n_passed : n_failed)++;
}

/* ---- memory and numbers
 * -------------------------------------------------------------------------------------- */

/* Device memory with a poisoned guard behind it. */
template <class T>
struct Device {
    size_t n;
    T *data;
    explicit Device(size_t count) : n(count) {
        CUDA_CHECK(cudaMalloc((void **)&data, n * sizeof(T) + GUARD));
        poison();
    }
    explicit Device(const std::vector<T> &v) : Device(v.size()) { upload(v); }
    Device(const T *v, size_t count) : Device(count) {
        CUDA_CHECK(cudaMemcpy(data, v, n * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Device() { CUDA_CHECK(cudaFree(data)); }
    Device(const Device &) = delete;
    void poison() { CUDA_CHECK(cudaMemset(data, 0xff, n * sizeof(T) + GUARD)); }
    void upload(const std::vector<T> &v) {
        CUDA_CHECK(cudaMemcpy(data, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    /* The first count elements; behind them all must still be poison. */
    std::vector<T> download(size_t count, bool *intact) const {
        std::vector<T> v(count);
        std::vector<unsigned char> rest((n - count) * sizeof(T) + GUARD);
        CUDA_CHECK(cudaStreamSynchronize(launch.stream));
        CUDA_CHECK(cudaMemcpy(v.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        CUDA_CHECK(cudaMemcpy(rest.data(), data + count, rest.size(), cudaMemcpyDeviceToHost));
        *intact = std::all_of(rest.begin(), rest.end(), [](unsigned char b) { return b == 0xff; });
        return v;
    }
};

/* A random number that depends on seed and place alone, so that threads can draw in any order. */
static uint32_t random_bits(uint64_t seed, uint64_t i) {
    uint64_t z = (seed << 40) + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((z ^ z >> 31) >> 32);
}
static float random_normal(uint64_t seed, uint64_t i) {  // about normal, variance 1
    const uint32_t a = random_bits(seed, 2 * i), b = random_bits(seed, 2 * i + 1);
    return ((float)((a >> 16) + (a & 0xffff) + (b >> 16) + (b & 0xffff)) - 2 * 65535.0f) *
           (1.7320508f / 65536);
}

/* Normal numbers, or integers -2 .. 2. */
static fp16 draw(bool integer, uint64_t seed, uint64_t i) {
    return fp16_from_float(integer ? (float)(random_bits(seed, i) % 5) - 2 : random_normal(seed, i));
}

static std::vector<fp16> random_input(size_t count, bool integer, uint64_t seed) {
    std::vector<fp16> v(count);
    for (size_t i = 0; i < count; i++) {
        v[i] = draw(integer, seed, i);
    }
    return v;
}

enum { ONE_NONZERO = -1, ONE_COLUMN = -2 };  // in place of a density in percent

/* A matrix on the host, dense and decoded, and on the device, compressed. */
struct TestMatrix {
    size_t rows, cols;
    std::vector<fp16> dense;
    void *block;
    TiledCbc host;
    Device<uint32_t> *tile_offset, *col_info;
    Device<uint64_t> *bitmap;
    Device<fp16> *values;
    Matrix w;

    TestMatrix(size_t m, size_t k, int density, bool integer, uint64_t seed)
        : rows(m), cols(k), dense(m * k) {
#pragma omp parallel for
        for (size_t r = 0; r < m; r++) {
            for (size_t c = 0; c < k; c++) {
                const size_t i = r * k + c;
                const bool kept = density == ONE_NONZERO  ? r == m / 2 && c == k - 1
                                  : density == ONE_COLUMN ? c == k / 2
                                                          : (int)(random_bits(seed + 1, i) % 100) < density;
                fp16 value = kept ? draw(integer, seed, i) : 0;
                dense[i] = kept && fp16_is_zero(value) ? 0x3c00 : value;  // 1: as many nonzeros as asked for
            }
        }
        Error err;
        CHECK(tiled_cbc_encode(&host, &block, NULL, dense.data(), m, k, k, default_threads(), &err) == OK);
        const size_t columns = tiled_cbc_tile_rows(m) * tiled_cbc_cols_padded(k);
        tile_offset = new Device<uint32_t>(host.tile_offset, columns / TILE_K + 1);
        col_info = new Device<uint32_t>(host.col_info, columns);
        bitmap = new Device<uint64_t>(host.bitmap, columns * BITMAP_WORDS);
        values = new Device<fp16>(host.values, host.n_values);
        w = {};
        w.format = FORMAT_TILED_CBC;
        w.rows = m;
        w.cols = k;
        w.layer = 3;
        w.site = SITE_MLP_IN;
        w.cbc = host;
        w.cbc.tile_offset = tile_offset->data;
        w.cbc.col_info = col_info->data;
        w.cbc.bitmap = bitmap->data;
        w.cbc.values = values->data;
    }
    ~TestMatrix() {
        delete tile_offset;
        delete col_info;
        delete bitmap;
        delete values;
        free(block);
    }
    TestMatrix(const TestMatrix &) = delete;
};

/* W x in double and the sum of |w x|, for n tokens: (n, rows). */
struct Reference {
    std::vector<double> y, scale;
    Reference(const TestMatrix &m, const std::vector<fp16> &x, size_t n, float threshold)
        : y(n * m.rows), scale(n * m.rows) {
        std::vector<float> xf(n * m.cols), wf(m.rows * m.cols);
        for (size_t i = 0; i < xf.size(); i++) {
            xf[i] = fp16_to_float(x[i]);
            xf[i] = fabsf(xf[i]) <= threshold ? 0 : xf[i];
        }
        for (size_t i = 0; i < wf.size(); i++) {
            wf[i] = fp16_to_float(m.dense[i]);
        }
#pragma omp parallel for collapse(2)
        for (size_t t = 0; t < n; t++) {
            for (size_t r = 0; r < m.rows; r++) {
                double sum = 0, absolute = 0;
                for (size_t k = 0; k < m.cols; k++) {
                    const double product = (double)wf[r * m.cols + k] * xf[t * m.cols + k];
                    sum += product;
                    absolute += fabs(product);
                }
                y[t * m.rows + r] = sum;
                scale[t * m.rows + r] = absolute;
            }
        }
    }
};

/* Half a unit in the last place of v in a format of so many bits of fraction and least exponent. */
static double half_ulp(double v, int bits, int least) {
    int exponent = least + 1;
    if (v != 0) {
        frexp(v, &exponent);
    }
    return ldexp(1, std::max(exponent - 1, least) - bits - 1);
}

static double worse(double worst, double error) {
    return error <= worst ? worst : error;
}  // a NaN stays

/* ---- spmm
 * ------------------------------------------------------------------------------------------------------ */

static const char *const epilogue_names[] = {"store", "add", "swiglu"};

/* One launch against the reference; returns the worst error as a share of the bound, infinity for a wrong
 * byte beyond the output. */
static double check_product(const TestMatrix &m, const Device<fp16> &x, size_t n, const float *threshold,
                            const Reference &ref, Epilogue epilogue, bool exact) {
    const size_t count = n * m.rows;
    const double roundings = (double)m.cols * 0x1p-24;
    double worst = 0;
    bool intact;
    if (epilogue == EPILOGUE_SWIGLU) {
        Device<fp16> out(count / 2 + 100);
        spmm_cuda(&launch, out.data, &m.w, x.data, (int)n, threshold, epilogue);
        const std::vector<fp16> got = out.download(count / 2, &intact);
        for (size_t i = 0; i < got.size(); i++) {
            const double gate = ref.y[2 * i], up = ref.y[2 * i + 1], act = gate / (1 + exp(-gate)),
                         want = act * up;
            if (fabs(want) > 65000) {  // may round to infinity
                continue;
            }
            const double gate_error = roundings * ref.scale[2 * i],
                         up_error = roundings * ref.scale[2 * i + 1];
            const double bound = 1.1 * gate_error * (fabs(up) + up_error) + fabs(act) * up_error +
                                 16 * 0x1p-24 * fabs(want) + half_ulp(want, 10, -14);
            worst = worse(worst, fabs(fp16_to_float(got[i]) - want) / bound);
        }
    } else {
        Device<float> out(count + 100);
        std::vector<float> before(count);
        if (epilogue == EPILOGUE_ADD) {
            for (size_t i = 0; i < count; i++) {
                before[i] = (float)(random_bits(9, i) % 9) - 4;
            }
            out.upload(before);
        }
        spmm_cuda(&launch, out.data, &m.w, x.data, (int)n, threshold, epilogue);
        const std::vector<float> got = out.download(count, &intact);
        for (size_t i = 0; i < count; i++) {
            const double want = before[i] + ref.y[i];
            const double bound = exact ? 0
                                       : roundings * ref.scale[i] + half_ulp(want, 23, -126) +
                                             (epilogue == EPILOGUE_ADD ? half_ulp(ref.y[i], 23, -126) : 0);
            const double error = fabs(got[i] - want);
            worst = worse(worst, error == 0 ? 0 : error / bound);
        }
    }
    return intact ? worst : INFINITY;
}

static void test_products(size_t rows, size_t cols, int density, bool is_short) {
    const int counts[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,  12, 13,
                          14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 130};
    const int few[] = {1, 7, 17, 33, 65, 130};
    const size_t largest = 130;
    for (int integer = 0; integer < 2; integer++) {
        const TestMatrix m(rows, cols, density, integer, rows * 31 + cols);
        const std::vector<fp16> x = random_input(largest * cols, integer, 77);
        const Device<fp16> device_x(x);
        const float threshold = integer ? 1.0f : 0.5f;
        const Device<float> device_threshold(&threshold, 1);
        for (int dynamic = 0; dynamic < 2; dynamic++) {
            const Reference ref(m, x, largest, dynamic ? threshold : -1);
            double worst[3] = {0, 0, 0};
            for (size_t i = 0; i < (is_short ? COUNT(few) : COUNT(counts)); i++) {
                const int n = is_short ? few[i] : counts[i];
                for (int e = EPILOGUE_STORE; e <= EPILOGUE_SWIGLU; e++) {
                    if (e == EPILOGUE_SWIGLU && rows % 2 != 0) {
                        continue;
                    }
                    const double share =
                        check_product(m, device_x, (size_t)n, dynamic ? device_threshold.data : NULL, ref,
                                      (Epilogue)e, integer && e != EPILOGUE_SWIGLU);
                    worst[e] = worse(worst[e], share);
                    if (!(share <= 1)) {
                        printf("     %zu x %zu, density %d, n %d, %s: %g\n", rows, cols, density, n,
                               epilogue_names[e], share);
                    }
                }
            }
            char what[160];
            snprintf(what, sizeof what, "%4zu x %4zu, density %3d, %s, %s (add %.2g, swiglu %.2g)", rows,
                     cols, density, integer ? "integers" : "normal", dynamic ? "threshold" : "all of x",
                     worst[1], worst[2]);
            result(worst[0] <= 1 && worst[1] <= 1 && worst[2] <= 1, what, worst[0]);
        }
    }
}

static void test_repeats() {
    const int counts[] = {1, 16, 33, 64, 130};
    const TestMatrix m(1000, 2056, 50, false, 5);
    const Device<fp16> x(random_input(130 * m.cols, false, 6));
    for (int n : counts) {
        bool same = true, intact;
        std::vector<float> first;
        for (int i = 0; i < REPEATS; i++) {
            Device<float> out((size_t)n * m.rows);
            spmm_cuda(&launch, out.data, &m.w, x.data, n, NULL, EPILOGUE_STORE);
            const std::vector<float> got = out.download((size_t)n * m.rows, &intact);
            first = i == 0 ? got : first;
            same = same && intact && memcmp(got.data(), first.data(), got.size() * sizeof(float)) == 0;
        }
        char what[80];
        snprintf(what, sizeof what, "%d repeats of n = %d give the same bits", REPEATS, n);
        result(same, what, 0);
    }
}

/* One infinity or NaN anywhere in x is noted, a finite x is not. */
static void test_faults() {
    const size_t n = 20, shapes[][2] = {{300, 520}, {300, 523}};
    for (const auto &shape : shapes) {
        const TestMatrix m(shape[0], shape[1], 50, false, 8);
        const size_t places[] = {0, 33, m.cols - 1, m.cols * (n - 1), m.cols * n - 1};
        const fp16 bad[] = {0x7c00, 0xfc00, 0x7e01};
        bool ok = true;
        Device<float> out(n * m.rows);
        for (size_t i = 0; i <= COUNT(places) * COUNT(bad); i++) {
            std::vector<fp16> x = random_input(n * m.cols, false, 9);
            x[1] = 0x7bff;  // the largest finite number
            if (i > 0) {
                x[places[(i - 1) / COUNT(bad)]] = bad[(i - 1) % COUNT(bad)];
            }
            const Device<fp16> device_x(x);
            CUDA_CHECK(cudaMemset(launch.report, 0, sizeof(DeviceReport)));
            spmm_cuda(&launch, out.data, &m.w, device_x.data, (int)n, NULL, EPILOGUE_STORE);
            DeviceReport report;
            CUDA_CHECK(cudaStreamSynchronize(launch.stream));
            CUDA_CHECK(cudaMemcpy(&report, launch.report, sizeof report, cudaMemcpyDeviceToHost));
            ok = ok && report.fault == (i > 0 ? fault_code(&m.w) : 0);
        }
        result(ok, shape[1] % 8 ? "x not finite, odd cols" : "x not finite", 0);
    }
}

static void test_counters() {
    std::vector<unsigned> counters(N_COUNTERS);
    CUDA_CHECK(cudaStreamSynchronize(launch.stream));
    CUDA_CHECK(
        cudaMemcpy(counters.data(), launch.counters, N_COUNTERS * sizeof(unsigned), cudaMemcpyDeviceToHost));
    result(std::all_of(counters.begin(), counters.end(), [](unsigned n) { return n == 0; }),
           "counters are zero again", 0);
}

/* ---- expand
 * ------------------------------------------------------------------------------------------------------ */

static void test_expand(size_t rows, size_t cols, int density) {
    const TestMatrix m(rows, cols, density, false, rows + cols);
    const size_t tiles = tiled_cbc_tile_rows(rows), extra[] = {0, 8, 104};
    bool ok = true;
    for (size_t more : extra) {
        const size_t stride = round_up(cols, 8) + more;
        for (size_t first = 0; first < tiles; first++) {
            const size_t count = first == 0 ? tiles : 1, begin = first * TILE_M;
            const size_t n_rows = min_size(rows - begin, count * TILE_M);
            Device<fp16> out(count * TILE_M * stride);
            expand_cuda(&launch, out.data, stride, &m.w, first, count);
            bool intact;
            const std::vector<fp16> got = out.download(n_rows * stride, &intact);
            ok = ok && intact;
            for (size_t i = 0; i < got.size(); i++) {
                const size_t r = begin + i / stride, c = i % stride;
                ok = ok && got[i] == (c < cols ? m.dense[r * cols + c] : 0);
            }
        }
    }
    char what[80];
    snprintf(what, sizeof what, "expand %4zu x %4zu, density %3d", rows, cols, density);
    result(ok, what, 0);
}

/* ---- times
 * ------------------------------------------------------------------------------------------------------- */

/* Median time of a graph of launches, one for each copy of the weights, in microseconds a launch. */
template <class Run>
static double time_us(size_t copies, Run run) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaStreamBeginCapture(launch.stream, cudaStreamCaptureModeThreadLocal));
    const size_t launches = std::max(copies, (size_t)8);
    for (size_t i = 0; i < launches; i++) {
        run(i % copies);
    }
    CUDA_CHECK(cudaStreamEndCapture(launch.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    std::vector<float> ms;
    for (int i = 0; i < 18; i++) {
        float t;
        CUDA_CHECK(cudaEventRecord(start, launch.stream));
        CUDA_CHECK(cudaGraphLaunch(exec, launch.stream));
        CUDA_CHECK(cudaEventRecord(stop, launch.stream));
        CUDA_CHECK(cudaEventSynchronize(stop));
        CUDA_CHECK(cudaEventElapsedTime(&t, start, stop));
        if (i >= 3) {
            ms.push_back(t);
        }
    }
    std::sort(ms.begin(), ms.end());
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return ms[ms.size() / 2] * 1e3 / (double)launches;
}

static void time_shape(size_t rows, size_t cols, size_t l2_bytes) {
    const int densities[] = {70, 50, 30}, counts[] = {1, 8, 16, 32, 64, 128};
    const Device<fp16> x(random_input(128 * cols, false, 3));
    Device<float> out(128 * rows);
    const size_t slab =
        std::min(tiled_cbc_tile_rows(rows), (size_t)43);  // tile rows that expand writes at once
    Device<fp16> dense(slab * TILE_M * cols);
    for (int density : densities) {
        const TestMatrix m(rows, cols, density, false, 2);
        const size_t bytes = tiled_cbc_storage(&m.host), copies = 2 * l2_bytes / bytes + 2;
        std::vector<Matrix> w(copies, m.w);
        std::vector<Device<fp16> *> values;
        std::vector<Device<uint64_t> *> bitmaps;
        for (size_t i = 1; i < copies; i++) {
            values.push_back(new Device<fp16>(m.host.values, m.host.n_values));
            bitmaps.push_back(new Device<uint64_t>(m.host.bitmap, m.bitmap->n));
            w[i].cbc.values = values.back()->data;
            w[i].cbc.bitmap = bitmaps.back()->data;
        }
        printf("%5zu x %5zu  SP .%d ", rows, cols, 10 - density / 10);
        for (int n : counts) {
            const double us = time_us(copies, [&](size_t i) {
                spmm_cuda(&launch, out.data, &w[i], x.data, n, NULL, EPILOGUE_STORE);
            });
            printf("  %7.1f (%4.0f)", us, (double)bytes / us * 1e-3);
        }
        const double us =
            time_us(copies, [&](size_t i) { expand_cuda(&launch, dense.data, cols, &w[i], 0, slab); });
        const double share = (double)std::min(slab * TILE_M, rows) / (double)rows;
        printf("  %7.1f (%4.0f)\n", us,
               ((double)bytes * share + 2 * share * (double)(rows * cols)) / us * 1e-3);
        for (size_t i = 0; i + 1 < copies; i++) {
            delete values[i];
            delete bitmaps[i];
        }
    }
}

int main(void) {
    const bool is_short = getenv("SPDP_TEST_SHORT");
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    launch.n_sms = device.multiProcessorCount;
    launch.shared_per_block = device.sharedMemPerBlockOptin;
    launch.workspace_bytes = WORKSPACE_BYTES;
    CUDA_CHECK(cudaStreamCreate(&launch.stream));
    CUDA_CHECK(cudaMalloc((void **)&launch.workspace, WORKSPACE_BYTES));
    CUDA_CHECK(cudaMemset(launch.workspace, 0xff, WORKSPACE_BYTES));
    CUDA_CHECK(cudaMalloc((void **)&launch.counters, N_COUNTERS * sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(launch.counters, 0, N_COUNTERS * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc((void **)&launch.report, sizeof(DeviceReport)));
    CUDA_CHECK(cudaMemset(launch.report, 0, sizeof(DeviceReport)));

    const size_t shapes[][2] = {
        {1, 1},    {255, 15}, {255, 16}, {255, 17},  {256, 15},  {256, 16},   {256, 17},   {257, 15},
        {257, 16}, {257, 17}, {172, 64}, {288, 512}, {40, 2048}, {1376, 512}, {1000, 777},
    };
    const int densities[] = {0, ONE_NONZERO, ONE_COLUMN, 30, 50, 70, 100};
    for (const auto &shape : shapes) {
        for (int density : densities) {
            const bool large = shape[0] * shape[1] > 10000;
            if (!is_short || (!large && (density == 0 || density == 50))) {
                test_products(shape[0], shape[1], density, is_short || large);
                test_expand(shape[0], shape[1], density);
            }
        }
    }
    if (is_short) {
        test_products(288, 512, 50, true);
        test_products(300, 77, 50, true);
    }
    test_repeats();
    test_faults();
    test_counters();

    if (!is_short) {
        printf(
            "\n# %s: us (GB/s of weights) for n tokens; expand: up to 43 tile rows (GB/s read and written)\n",
            device.name);
        printf("%27s", "");
        for (int n : {1, 8, 16, 32, 64, 128}) {
            printf("  %7s%-3d    ", "n = ", n);
        }
        printf("  expand\n");
        time_shape(11008, 4096, (size_t)device.l2CacheSize);
        time_shape(4096, 11008, (size_t)device.l2CacheSize);
        time_shape(28672, 8192, (size_t)device.l2CacheSize);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}
