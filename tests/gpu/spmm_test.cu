/* spmm_test.cu: the products of cuda_spmm.cu, cuda_spmspv.cu and cuda_gemv.cu against references in double:
 * small shapes against a loop on the CPU, those of real models against cublasDgemm; then times. Prints one
 * line a case with the worst error as a share of its bound, and at the end what failed. SPDP_TEST_SHORT: few
 * and tiny shapes that still reach every kernel, for compute-sanitizer. */
#include "device_matrix.cuh"

#include <cublas_v2.h>
#include <dlfcn.h>

#include <algorithm>

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define GUARD 64  // poisoned bytes behind every output
#define WORKSPACE_BYTES ((size_t)64 << 20)

static const bool is_short = getenv("SPDP_TEST_SHORT") != NULL;
static CudaLaunch launch;
static int n_passed, n_failed;

static void result(bool ok, const char *what, double share) {
    printf("%-4s %-76s %8.3g of the bound\n", ok ? "ok" : "FAIL", what, share);
    (ok ? n_passed : n_failed)++;
}

/* ---- memory and numbers -------------------------------------------------------------------------------- */

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

enum { ONE_NONZERO = -1, ONE_COLUMN = -2 };  // in place of a density in percent

/* A matrix on the host, dense and decoded, and on the device, compressed. */
struct TestMatrix {
    size_t rows, cols;
    std::vector<fp16> dense;
    void *block;
    TiledCbc host;
    Device<uint32_t> *tile_offset, *col_info;
    Device<uint64_t> *bitmap;
    Device<fp16> *values, *rows_padded;
    Matrix w, padded;  // compressed; dense with zeros behind each row

    TestMatrix(size_t m, size_t k, int density, bool integer, uint64_t seed)
        : rows(m), cols(k), dense(m * k) {
#pragma omp parallel for
        for (size_t r = 0; r < m; r++) {
            for (size_t c = 0; c < k; c++) {
                const size_t i = r * k + c;
                const bool kept = density == ONE_NONZERO  ? r == m / 2 && c == k - 1
                                  : density == ONE_COLUMN ? c == k / 2
                                                          : (int)(random_bits(seed + 1, i) % 100) < density;
                fp16 value = kept ? fp16_from_float(draw(integer, seed, i)) : 0;
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
        pad_rows();
    }
    void pad_rows() {
        padded = w;
        padded.format = FORMAT_DENSE;
        padded.stride = dense_stride(cols);
        std::vector<fp16> values_padded(rows * padded.stride);
        for (size_t r = 0; r < rows; r++) {
            std::copy_n(dense.begin() + (ptrdiff_t)(r * cols), cols,
                        values_padded.begin() + (ptrdiff_t)(r * padded.stride));
        }
        rows_padded = new Device<fp16>(values_padded);
        padded.dense = rows_padded->data;
    }
    ~TestMatrix() {
        delete tile_offset;
        delete col_info;
        delete bitmap;
        delete values;
        delete rows_padded;
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

/* ---- products ------------------------------------------------------------------------------------------ */

static const char *const epilogue_names[] = {"store", "add", "swiglu"};

/* The kernels, and how wide the slices of K are where the test says it: so narrow that there are several. */
enum Kernel { SPMM, SPMSPV, SPMSPV_SLICED, GEMV, N_KERNELS };
static const char *const kernel_names[] = {"spmm", "spmspv", "spmspv in slices of 32", "gemv"};

static void run_kernel(Kernel kernel, void *out, const TestMatrix &m, const fp16 *x, size_t n,
                       const float *threshold, Epilogue epilogue) {
    if (kernel == SPMM) {
        spmm_cuda(&launch, out, &m.w, x, (int)n, threshold, epilogue);
    } else if (kernel == GEMV) {
        gemv_cuda(&launch, out, &m.padded, x, epilogue);
    } else {
        spmspv_cuda(&launch, out, &m.w, x, threshold, epilogue, kernel == SPMSPV ? 0 : 32);
    }
}

/* One launch against the reference; returns the worst error as a share of the bound, infinity for a wrong
 * byte beyond the output. */
static double check_product(Kernel kernel, const TestMatrix &m, const Device<fp16> &x, size_t n,
                            const float *threshold, const Reference &ref, Epilogue epilogue, bool exact) {
    const size_t count = n * m.rows;
    const bool fp16_pairs = kernel == SPMSPV || kernel == SPMSPV_SLICED;
    const double roundings = (double)m.cols * 0x1p-24 + (fp16_pairs ? 8 * 0x1p-11 : 0);
    double worst = 0;
    bool intact;
    if (epilogue == EPILOGUE_SWIGLU) {
        Device<fp16> out(count / 2 + 100);
        run_kernel(kernel, out.data, m, x.data, n, threshold, epilogue);
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
        run_kernel(kernel, out.data, m, x.data, n, threshold, epilogue);
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

/* Every kernel that takes n tokens, with every epilogue; worst[e] and *decode take in the worst shares. */
static void check_kernels(const TestMatrix &m, const Device<fp16> &x, size_t n, const float *threshold,
                          const Reference &ref, bool integer, double worst[3], double *decode) {
    for (int kernel = SPMM; kernel < (n == 1 ? N_KERNELS : SPMM + 1); kernel++) {
        for (int e = EPILOGUE_STORE; e <= EPILOGUE_SWIGLU; e++) {
            if ((e == EPILOGUE_SWIGLU && m.rows % 2 != 0) || (kernel == GEMV && threshold)) {
                continue;  // a dense product sees all of its input
            }
            const double share = check_product((Kernel)kernel, m, x, n, threshold, ref, (Epilogue)e,
                                               integer && e != EPILOGUE_SWIGLU);
            double *of = kernel == SPMM ? &worst[e] : decode;
            *of = worse(*of, share);
            if (!(share <= 1)) {
                printf("     %zu x %zu, n %zu, %s, %s: %g\n", m.rows, m.cols, n, kernel_names[kernel],
                       epilogue_names[e], share);
            }
        }
    }
}

static void test_products(size_t rows, size_t cols, int density, bool few_counts) {
    const int counts[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11,  12, 13,
                          14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 130};
    const int few[] = {1, 7, 16, 17, 33, 130};  // each of spmm's kernels
    const size_t largest = 130;
    for (int integer = 0; integer < 2; integer++) {
        const TestMatrix m(rows, cols, density, integer, rows * 31 + cols);
        const std::vector<fp16> x = random_input(largest * cols, integer, 77);
        const Device<fp16> device_x(x);
        const float threshold = integer ? 1.0f : 0.5f;
        const Device<float> device_threshold(&threshold, 1);
        for (int dynamic = 0; dynamic < 2; dynamic++) {
            const Reference ref(m, x, largest, dynamic ? threshold : -1);
            double worst[3] = {0, 0, 0}, decode = 0;
            for (size_t i = 0; i < (few_counts ? COUNT(few) : COUNT(counts)); i++) {
                const size_t n = (size_t)(few_counts ? few[i] : counts[i]);
                check_kernels(m, device_x, n, dynamic ? device_threshold.data : NULL, ref, integer, worst,
                              &decode);
            }
            char what[160];
            snprintf(what, sizeof what,
                     "%4zu x %4zu, density %3d, %s, %s (add %.2g, swiglu %.2g, one token %.2g)", rows, cols,
                     density, integer ? "integers" : "normal", dynamic ? "threshold" : "all of x", worst[1],
                     worst[2], decode);
            result(worst[0] <= 1 && worst[1] <= 1 && worst[2] <= 1 && decode <= 1, what, worst[0]);
        }
    }
}

/* cases.md row 33: split sums have a fixed order. */
static void test_repeats() {
    const int counts[] = {1, 16, 33, 64, 130}, repeats = is_short ? 2 : 20;
    const TestMatrix m(1000, 2056, 50, false, 5);
    const Device<fp16> x(random_input(130 * m.cols, false, 6));
    for (int n : counts) {
        bool same = true, intact;
        std::vector<float> first;
        for (int i = 0; i < repeats; i++) {
            Device<float> out((size_t)n * m.rows);
            spmm_cuda(&launch, out.data, &m.w, x.data, n, NULL, EPILOGUE_STORE);
            const std::vector<float> got = out.download((size_t)n * m.rows, &intact);
            first = i == 0 ? got : first;
            same = same && intact && memcmp(got.data(), first.data(), got.size() * sizeof(float)) == 0;
        }
        char what[80];
        snprintf(what, sizeof what, "%d repeats of n = %d give the same bits", repeats, n);
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
    std::vector<unsigned> letters(N_LETTERS);
    CUDA_CHECK(cudaMemcpy(letters.data(), launch.letters, N_LETTERS * sizeof(unsigned), cudaMemcpyDeviceToHost));
    result(std::all_of(letters.begin(), letters.end(), [](unsigned n) { return n == NO_LETTER; }),
           "all letters were read", 0);
}

/* ---- expand -------------------------------------------------------------------------------------------- */

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

/* ---- real shapes --------------------------------------------------------------------------------------- */

static const size_t real_shapes[][2] = {
    {4096, 4096},  {12288, 4096}, {11008, 4096}, {22016, 4096}, {4096, 11008}, {5120, 5120},  {13824, 5120},
    {5120, 13824}, {8192, 8192},  {10240, 8192}, {28672, 8192}, {8192, 28672}, {14336, 4096}, {4096, 14336},
};
static const size_t real_counts[] = {1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 130};
static const size_t MOST_TOKENS = 130;

/* The encoder on the device writes what the library's writes. */
static void test_encoder() {
    const size_t shapes[][2] = {{1, 1}, {300, 77}, {257, 530}, {1024, 4096}};
    for (const auto &shape : shapes) {
        for (double density : {0.0, 0.3, 1.0}) {
            const DeviceMatrix m(shape[0], shape[1], density, false, 21);
            std::vector<fp16> dense(m.rows * m.cols);
            std::vector<unsigned char> got(m.bytes);
            CUDA_CHECK(
                cudaMemcpy(dense.data(), m.dense, dense.size() * sizeof(fp16), cudaMemcpyDeviceToHost));
            CUDA_CHECK(cudaMemcpy(got.data(), m.block, m.bytes, cudaMemcpyDeviceToHost));
            TiledCbc want;
            void *block;
            CHECK(tiled_cbc_encode(&want, &block, NULL, dense.data(), m.rows, m.cols, m.cols,
                                   default_threads(), NULL) == OK);
            const bool same = want.n_values == m.w.cbc.n_values &&
                              want.max_col_values == m.w.cbc.max_col_values &&
                              memcmp(block, got.data(), m.bytes) == 0;
            free(block);
            char what[80];
            snprintf(what, sizeof what, "encoded on the device, %zu x %zu, density %.1f", m.rows, m.cols,
                     density);
            result(same, what, 0);
        }
    }
}

/* cublasDgemm, loaded like kernels/cublas.cu loads its product. */
struct Dgemm {
    void *library;
    cublasHandle_t handle;
    decltype(&cublasDgemm_v2) gemm;

    template <typename F>
    void find(F *function, const char *name) {
        *function = reinterpret_cast<F>(dlsym(library, name));
        CHECK(*function);
    }
    Dgemm() {
        char name[32];
        snprintf(name, sizeof name, "libcublas.so.%d", CUBLAS_VER_MAJOR);
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            fprintf(stderr, "cuBLAS cannot be loaded: %s\n", dlerror());
            exit(1);
        }
        decltype(&cublasCreate_v2) create;
        find(&create, "cublasCreate_v2");
        find(&gemm, "cublasDgemm_v2");
        CHECK(create(&handle) == CUBLAS_STATUS_SUCCESS);
    }
    ~Dgemm() {
        decltype(&cublasDestroy_v2) destroy;
        find(&destroy, "cublasDestroy_v2");
        destroy(handle);
        dlclose(library);
    }
    Dgemm(const Dgemm &) = delete;
    /* y (n, rows) = W x of w (rows, cols), x (n, cols), on the default stream. */
    void product(double *y, const double *w, const double *x, size_t rows, size_t cols, size_t n) const {
        const double one = 1, zero = 0;
        CHECK(gemm(handle, CUBLAS_OP_T, CUBLAS_OP_N, (int)rows, (int)n, (int)cols, &one, w, (int)cols, x,
                   (int)cols, &zero, y, (int)rows) == CUBLAS_STATUS_SUCCESS);
    }
};

/* As double; what does not exceed the threshold (none if it is below 0) as zero. */
static __global__ void widen_kernel(double *out, const fp16 *in, size_t count, float threshold,
                                    bool absolute) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        const float v = __half2float(__ushort_as_half(in[i]));
        out[i] = fabsf(v) <= threshold ? 0 : absolute ? fabsf(v) : v;
    }
}

static void widen(double *out, const fp16 *in, size_t count, float threshold, bool absolute) {
    widen_kernel<<<4096, 256>>>(out, in, count, threshold, absolute);
    CUDA_CHECK(cudaGetLastError());
}

/* W x and the sum of |w x| for MOST_TOKENS tokens, with all of x and with what exceeds the threshold. */
struct DeviceReference {
    size_t rows, cols;
    Device<double> wide, x, y[2], magnitude[2];
    DeviceReference(size_t m, size_t k)
        : rows(m),
          cols(k),
          wide(m * k),
          x(MOST_TOKENS * k),
          y{Device<double>(MOST_TOKENS * m), Device<double>(MOST_TOKENS * m)},
          magnitude{Device<double>(MOST_TOKENS * m), Device<double>(MOST_TOKENS * m)} {}
    void compute(const Dgemm &dgemm, const fp16 *w, const fp16 *inputs, float threshold) {
        for (int absolute = 0; absolute < 2; absolute++) {
            widen(wide.data, w, rows * cols, -1, absolute);
            for (int dynamic = 0; dynamic < 2; dynamic++) {
                widen(x.data, inputs, MOST_TOKENS * cols, dynamic ? threshold : -1, absolute);
                dgemm.product((absolute ? magnitude : y)[dynamic].data, wide.data, x.data, rows, cols,
                              MOST_TOKENS);
            }
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    }
};

static std::vector<double> fetch(const Device<double> &from) {
    std::vector<double> v(from.n);
    CUDA_CHECK(cudaMemcpy(v.data(), from.data, v.size() * sizeof v[0], cudaMemcpyDeviceToHost));
    return v;
}

/* cublasDgemm against the loop on the CPU. */
static void test_dgemm(const Dgemm &dgemm) {
    const size_t shapes[][2] = {{1, 1}, {300, 77}, {257, 530}, {1000, 2056}};
    for (const auto &shape : shapes) {
        const TestMatrix m(shape[0], shape[1], 70, false, 31);
        const std::vector<fp16> x = random_input(MOST_TOKENS * m.cols, false, 32);
        const Device<fp16> dense(m.dense), device_x(x);
        DeviceReference device(m.rows, m.cols);
        device.compute(dgemm, dense.data, device_x.data, 0.5f);
        double worst = 0;
        for (int dynamic = 0; dynamic < 2; dynamic++) {
            const Reference host(m, x, MOST_TOKENS, dynamic ? 0.5f : -1);
            const std::vector<double> y = fetch(device.y[dynamic]),
                                      magnitude = fetch(device.magnitude[dynamic]);
            for (size_t i = 0; i < y.size(); i++) {
                const double bound = (double)m.cols * 0x1p-52 * host.scale[i] + 1e-300;
                worst = worse(worst, fabs(y[i] - host.y[i]) / bound);
                worst = worse(worst, fabs(magnitude[i] - host.scale[i]) / bound);
            }
        }
        char what[80];
        snprintf(what, sizeof what, "cublasDgemm, %zu x %zu", m.rows, m.cols);
        result(worst <= 1, what, worst);
    }
}

/* A backend as the model uses it, and products of a matrix with it. */
struct RealProduct {
    Backend *be;
    const DeviceMatrix &m;
    const Device<fp16> &x;
    Device<float> &out;  // with room for GUARD bytes behind MOST_TOKENS rows

    /* n tokens through the backend, where one token is a decode step, or as prefill whatever n. */
    void run(size_t n, const float *threshold, bool as_prefill) const {
        CUDA_CHECK(cudaMemset(out.data, 0xff, out.n * sizeof(float)));
        CUDA_CHECK(cudaDeviceSynchronize());
        if (as_prefill) {
            spmm_cuda(&launch, out.data, &m.w, x.data, (int)n, threshold, EPILOGUE_STORE);
        } else {
            be->matmul(be, out.data, &m.w, x.data, (int)n, threshold);
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    double judge(const DeviceReference &ref, int dynamic, const std::vector<double> &roundings) const {
        const double worst =
            worst_share(out.data, ref.y[dynamic].data, ref.magnitude[dynamic].data, roundings, m.rows);
        unsigned char behind[GUARD];
        CUDA_CHECK(cudaMemcpy(behind, out.data + roundings.size() * m.rows, GUARD, cudaMemcpyDeviceToHost));
        const bool intact = std::all_of(behind, behind + GUARD, [](unsigned char b) { return b == 0xff; });
        return intact ? worst : INFINITY;
    }
};

static __global__ void differ_kernel(unsigned *differ, const unsigned *a, const unsigned *b, size_t count) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        if (a[i] != b[i]) {
            *differ = 1;
        }
    }
}

/* cases.md row 33: a hundred repeats through the backend give the same bits. */
static void test_real_repeats(const RealProduct &p, const float *threshold) {
    const int repeats = 100;
    Device<float> first(p.out.n);
    Device<unsigned> differ(1);
    CUDA_CHECK(cudaMemset(differ.data, 0, sizeof(unsigned)));
    for (size_t n : {1, 8, 64, 130}) {
        for (int i = 0; i < repeats; i++) {
            p.run(n, n == 1 ? threshold : NULL, false);
            if (i == 0) {
                CUDA_CHECK(
                    cudaMemcpy(first.data, p.out.data, p.out.n * sizeof(float), cudaMemcpyDeviceToDevice));
            }
            differ_kernel<<<1024, 256>>>(differ.data, (const unsigned *)p.out.data,
                                         (const unsigned *)first.data, p.out.n);
            CUDA_CHECK(cudaGetLastError());
        }
    }
    unsigned differs;
    CUDA_CHECK(cudaMemcpy(&differs, differ.data, sizeof differs, cudaMemcpyDeviceToHost));
    char what[100];
    snprintf(what, sizeof what, "%zu x %zu, %d repeats of n = 1, 8, 64, 130 give the same bits", p.m.rows,
             p.m.cols, repeats);
    result(differs == 0, what, 0);
}

/* cases.md row 29: every element against its own bound from cublasDgemm; integers to the bit. */
static void test_real_shape(Backend *be, const Dgemm &dgemm, size_t rows, size_t cols, bool repeat) {
    const struct {
        double density;
        bool integer;
    } kinds[] = {{0, false}, {.3, false}, {.5, false}, {.7, false}, {1, false}, {.5, true}};
    DeviceReference ref(rows, cols);
    Device<float> out(MOST_TOKENS * rows + GUARD);
    for (const auto &kind : kinds) {
        const uint64_t seed = rows * 7 + cols + (size_t)(10 * kind.density);
        const DeviceMatrix m(rows, cols, kind.density, kind.integer, seed);
        const std::vector<fp16> host_x = random_input(MOST_TOKENS * cols, kind.integer, seed + 2);
        const Device<fp16> x(host_x);
        const float threshold = kind.integer ? 1.0f : 0.6745f;  // about half of the inputs exceed it
        const Device<float> device_threshold(&threshold, 1);
        const RealProduct p = {be, m, x, out};
        ref.compute(dgemm, m.dense, x.data, threshold);
        double decode = 0, prefill = 0;
        for (int dynamic = 0; dynamic < 2; dynamic++) {
            const float *t = dynamic ? device_threshold.data : NULL;
            const auto bound = [&](size_t n, bool fp16_pairs) {
                return kind.integer ? std::vector<double>(n, 0)
                                    : allowed_roundings(host_x, cols, n, dynamic ? threshold : 0, fp16_pairs);
            };
            p.run(1, t, true);
            prefill = worse(prefill, p.judge(ref, dynamic, bound(1, false)));
            for (size_t n : real_counts) {
                p.run(n, t, false);
                double *worst = n == 1 ? &decode : &prefill;
                *worst = worse(*worst, p.judge(ref, dynamic, bound(n, n == 1)));
            }
        }
        char what[120];
        snprintf(what, sizeof what, "%zu x %zu, density %.1f, %s: decode; prefill %.3g", rows, cols,
                 kind.density, kind.integer ? "integers" : "normal", prefill);
        result(decode <= 1 && prefill <= 1, what, decode);
        if (repeat && kind.density == .5 && !kind.integer) {
            test_real_repeats(p, device_threshold.data);
        }
    }
}

static void test_real_shapes() {
    const Dgemm dgemm;
    test_dgemm(dgemm);
    Backend *be;
    Error err;
    if (backend_cuda(&be, 0, true, &err)) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    for (const auto &shape : real_shapes) {
        const bool repeat =
            &shape == &real_shapes[0] || &shape == &real_shapes[4] || &shape == &real_shapes[10];
        test_real_shape(be, dgemm, shape[0], shape[1], repeat);
        fflush(stdout);
    }
    result(be->finish(be, &err) == OK, "no input was found not finite", 0);
    be->free(be);
}

/* ---- times --------------------------------------------------------------------------------------------- */

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

static void set_up() {
    cudaDeviceProp device;
    CUDA_CHECK(cudaGetDeviceProperties(&device, 0));
    printf("%s\n", device.name);
    launch.n_sms = device.multiProcessorCount;
    launch.shared_per_block = device.sharedMemPerBlockOptin;
    launch.overlap = can_overlap_cuda();
    launch.workspace_bytes = WORKSPACE_BYTES;
    CUDA_CHECK(cudaStreamCreate(&launch.stream));
    CUDA_CHECK(cudaMalloc((void **)&launch.workspace, WORKSPACE_BYTES));
    CUDA_CHECK(cudaMemset(launch.workspace, 0xff, WORKSPACE_BYTES));
    CUDA_CHECK(cudaMalloc((void **)&launch.counters, N_COUNTERS * sizeof(unsigned)));
    CUDA_CHECK(cudaMemset(launch.counters, 0, N_COUNTERS * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc((void **)&launch.letters, N_LETTERS * sizeof(unsigned)));
    clear_letters(&launch);
    CUDA_CHECK(cudaMalloc((void **)&launch.report, sizeof(DeviceReport)));
    CUDA_CHECK(cudaMemset(launch.report, 0, sizeof(DeviceReport)));
}

static void tear_down() {
    CUDA_CHECK(cudaFree(launch.workspace));
    CUDA_CHECK(cudaFree(launch.counters));
    CUDA_CHECK(cudaFree(launch.letters));
    CUDA_CHECK(cudaFree(launch.report));
    CUDA_CHECK(cudaStreamDestroy(launch.stream));
}

/* cases.md rows 28 and 30: odd shapes; empty, nearly empty and full tiles; any number of tokens. */
static void test_small_shapes() {
    const size_t shapes[][2] = {
        {1, 1},    {255, 15}, {255, 16}, {255, 17},  {256, 15},  {256, 16},   {256, 17},   {257, 15},
        {257, 16}, {257, 17}, {172, 64}, {288, 512}, {40, 2048}, {1376, 512}, {1000, 777},
        {5, 1024},  {5, 1025},  {6, 8192},  {7, 8193},  {4, 28672},  // gemv: warps that share a row
    };
    const int densities[] = {0, ONE_NONZERO, ONE_COLUMN, 30, 50, 70, 100};
    for (const auto &shape : shapes) {
        for (int density : densities) {
            test_products(shape[0], shape[1], density, shape[0] * shape[1] > 10000);
            test_expand(shape[0], shape[1], density);
        }
    }
}

/* Every kernel, with one block of everything and with several, with tails and without. */
static void test_few_shapes() {
    const size_t shapes[][2] = {{1, 1}, {257, 17}, {288, 512}, {300, 77}, {6, 2100}};
    for (const auto &shape : shapes) {
        test_products(shape[0], shape[1], 50, true);
        test_expand(shape[0], shape[1], 50);
    }
}

/* As on a device whose blocks have 99 KB of shared memory (compute capability 8.6 and 8.9). */
static void test_little_shared() {
    const size_t all = launch.shared_per_block;
    launch.shared_per_block = std::min(all, (size_t)99 << 10);
    test_products(257, 17, 100, true);
    if (!is_short) {
        test_products(300, 5000, 100, true);
        test_products(1000, 777, 50, true);
    }
    launch.shared_per_block = all;
}

static void time_shapes() {
    int l2_bytes;
    CUDA_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, 0));
    printf("\n# us (GB/s of weights) for n tokens; expand: up to 43 tile rows (GB/s read and written)\n");
    printf("%27s", "");
    for (int n : {1, 8, 16, 32, 64, 128}) {
        printf("  %7s%-3d    ", "n = ", n);
    }
    printf("  expand\n");
    time_shape(11008, 4096, (size_t)l2_bytes);
    time_shape(4096, 11008, (size_t)l2_bytes);
    time_shape(28672, 8192, (size_t)l2_bytes);
}

int main(void) {
    set_up();
    if (is_short) {
        test_few_shapes();
        printf(
            "left out (SPDP_TEST_SHORT): most small shapes, other densities, the 14 real shapes, their encoder "
            "and "
            "cublasDgemm, times\n");
    } else {
        test_small_shapes();
        test_encoder();
        test_real_shapes();
    }
    test_little_shared();
    test_repeats();
    test_faults();
    test_counters();
    if (!is_short) {
        time_shapes();
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    tear_down();
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}
