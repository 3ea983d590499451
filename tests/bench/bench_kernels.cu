/* bench_kernels: time of the decode kernels over the shapes of real models, beside cuBLAS and the read
 * ceiling.
 *
 *   bench_kernels CSV [--quick] [--models] [--sweep] [--only ROW]
 *
 * A figure is the median over replays of a graph whose launches rotate among copies of the matrix that
 * together exceed the L2 several times; the ratio to cuBLAS and the share of the ceiling are of the same
 * process. Weights and inputs are random normal numbers; weights are dropped at random to reach the static
 * ratio, and the threshold is the quantile of |x| for the dynamic one. Each product is compared with double
 * precision, element by element.
 * --quick: only the setting .5/.5. --models: the linear layers of other models in place of the table of 14,
 * fewer replays. --sweep: times for every width of a slice, to tune the choice. --only: one shape of the
 * table, counted from 0. */
#include <time.h>

#include <algorithm>
#include <functional>
#include <string>

#include "../../kernels/cublas.h"
#include "../../kernels/nvml.h"
#include "../gpu/device_matrix.cuh"

static const size_t COPIES_BYTES = (size_t)400 << 20;  // several times the L2 of an H200 (60 MB)

struct Shape {
    int rows, cols;
    const char *name, *model;
};
static const Shape main_shapes[] = {
    {4096, 4096, "7B o", "Llama-2 7B"},      {12288, 4096, "7B qkv", "Llama-2 7B"},
    {11008, 4096, "7B up", "Llama-2 7B"},    {22016, 4096, "7B gate|up", "Llama-2 7B"},
    {4096, 11008, "7B down", "Llama-2 7B"},  {5120, 5120, "13B o", "Llama-2 13B"},
    {13824, 5120, "13B up", "Llama-2 13B"},  {5120, 13824, "13B down", "Llama-2 13B"},
    {8192, 8192, "70B o", "Llama-2 70B"},    {10240, 8192, "70B qkv", "Llama-2 70B"},
    {28672, 8192, "70B up", "Llama-2 70B"},  {8192, 28672, "70B down", "Llama-2 70B"},
    {14336, 4096, "L3 8B up", "Llama-3 8B"}, {4096, 14336, "L3 8B down", "Llama-3 8B"},
};

/* Matrices of one layer by their place, as this runtime would store them: q, k, v stacked; gate and up
 * interleaved where there is a gate; of experts, one's. What is measured once for several models names them
 * all. */
struct Layer {
    const char *model;
    int dim, q_dim, kv_dim, hidden;
    bool gated;
};
static const Layer other_layers[] = {
    {"OPT 13B", 5120, 5120, 5120, 20480, false},     {"OPT 30B", 7168, 7168, 7168, 28672, false},
    {"OPT 66B", 9216, 9216, 9216, 36864, false},     {"OPT 175B", 12288, 12288, 12288, 49152, false},
    {"Llama-3 70B", 8192, 8192, 1024, 28672, true},  {"Qwen 7B", 4096, 4096, 4096, 11008, true},
    {"Qwen 14B", 5120, 5120, 5120, 13696, true},     {"Qwen2 7B", 3584, 3584, 512, 18944, true},
    {"Qwen2 72B", 8192, 8192, 1024, 29568, true},    {"Mixtral 8x7B", 4096, 4096, 1024, 14336, true},
    {"Phi-2", 2560, 2560, 2560, 10240, false},       {"Phi-3 Mini", 3072, 3072, 3072, 8192, true},
    {"Phi-3 Medium", 5120, 5120, 1280, 17920, true}, {"gpt-oss 20B", 2880, 4096, 512, 2880, true},
    {"gpt-oss 120B", 2880, 4096, 512, 2880, true},
};

/* A shape to be measured. */
struct Case {
    int rows, cols;
    std::string name, models;
};

/* Dynamic ratios to be tried at a static one. */
struct Setting {
    double sp;
    std::vector<double> dp;
};

struct Bench {
    CudaLaunch c;
    Cublas *cublas;
    double ceiling;  // GB/s
    FILE *csv;
    int warm_ups, replays;
    bool sweep;
};

struct Time {
    double median, mean;  // microseconds
};

/* One call of f(i), i = 0 .. reps - 1 being captured in one graph. */
static Time time_calls(const Bench *b, int reps, const std::function<void(int)> &f, int replays = 0) {
    cudaStream_t stream = b->c.stream;
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
    double sum = 0;
    for (int i = -b->warm_ups; i < (replays ? replays : b->replays); i++) {
        float ms;
        CUDA_CHECK(cudaEventRecord(begin, stream));
        CUDA_CHECK(cudaGraphLaunch(exec, stream));
        CUDA_CHECK(cudaEventRecord(end, stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 0) {
            times.push_back(ms * 1e3 / reps);
            sum += times.back();
        }
    }
    std::sort(times.begin(), times.end());
    CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    return {times[times.size() / 2], sum / (double)times.size()};
}

/* ---- the device ---------------------------------------------------------------------------------------- */

/* What the driver says of a clock. */
static std::string clock_text(const Nvml *nvml, const char *name, NvmlClock clock) {
    const double now = nvml_clock_mhz(nvml, clock), most = nvml_most_clock_mhz(nvml, clock);
    return std::isnan(now) || std::isnan(most) ? std::string(name) + " clock unknown"
                                               : std::string(name) + " clock " + std::to_string((int)now) + " of " +
                                                     std::to_string((int)most) + " MHz";
}

/* The clocks while the device is at work. */
static std::string clocks_at_work(const CudaLaunch *c) {
    const size_t bytes = (size_t)2 << 30;
    void *p;
    CUDA_CHECK(cudaMalloc(&p, bytes));
    for (int i = 0; i < 500; i++) {
        CUDA_CHECK(cudaMemsetAsync(p, 1, bytes, c->stream));
    }
    char bus_id[32];
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, 0));
    Nvml *nvml = nvml_open(bus_id);
    const std::string state = clock_text(nvml, "SM", NVML_SM) + ", " + clock_text(nvml, "memory", NVML_MEMORY);
    nvml_close(nvml);
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    CUDA_CHECK(cudaFree(p));
    return state;
}

/* ---- cases --------------------------------------------------------------------------------------------- */

static void add_case(std::vector<Case> *cases, int rows, int cols, const char *model, const char *place) {
    for (Case &known : *cases) {
        if (known.rows == rows && known.cols == cols) {
            const bool named = known.models.find(model) != std::string::npos;
            known.models += named ? "" : std::string("; ") + model;
            return;
        }
    }
    cases->push_back({rows, cols, std::string(model) + " " + place, model});
}

static std::vector<Case> cases_of(bool models) {
    std::vector<Case> cases;
    for (const Shape &s : main_shapes) {
        if (!models) {
            cases.push_back({s.rows, s.cols, s.name, s.model});
        }
    }
    for (const Layer &l : other_layers) {
        if (models) {
            add_case(&cases, l.q_dim + 2 * l.kv_dim, l.dim, l.model, "qkv");
            add_case(&cases, l.dim, l.q_dim, l.model, "o");
            add_case(&cases, (l.gated ? 2 : 1) * l.hidden, l.dim, l.model, l.gated ? "gate|up" : "up");
            add_case(&cases, l.dim, l.hidden, l.model, "down");
        }
    }
    return cases;
}

/* ---- products ------------------------------------------------------------------------------------------ */

/* Copies of one block of device memory, the original among them. */
struct Copies {
    std::vector<unsigned char *> blocks;
    Copies(void *original, size_t bytes) {
        blocks.push_back(static_cast<unsigned char *>(original));
        for (size_t n = std::max<size_t>(2, COPIES_BYTES / bytes); blocks.size() < n;) {
            unsigned char *p;
            CUDA_CHECK(cudaMalloc(&p, bytes));
            CUDA_CHECK(cudaMemcpy(p, original, bytes, cudaMemcpyDeviceToDevice));
            blocks.push_back(p);
        }
        CUDA_CHECK(cudaDeviceSynchronize());
    }
    ~Copies() {
        for (size_t i = 1; i < blocks.size(); i++) {
            CUDA_CHECK(cudaFree(blocks[i]));
        }
    }
    Copies(const Copies &) = delete;
    int n() const { return (int)blocks.size(); }
};

/* Quantile q of |x|. */
static float magnitude_quantile(const std::vector<fp16> &x, double q) {
    std::vector<float> m;
    for (fp16 h : x) {
        m.push_back(fabsf(fp16_to_float(h)));
    }
    std::sort(m.begin(), m.end());
    return q > 0 ? m[(size_t)(q * m.size()) - 1] : 0;
}

/* Input and output of a product, and its reference: y and the sum of |w x| in double. */
struct Vectors {
    std::vector<fp16> host_x;
    fp16 *x;
    float *threshold, *out;
    double *y, *magnitude;
    Vectors(int rows, int cols) : host_x(random_input((size_t)cols, false, 2)) {
        CUDA_CHECK(cudaMalloc(&x, cols * sizeof *x));
        CUDA_CHECK(cudaMalloc(&threshold, sizeof *threshold));
        CUDA_CHECK(cudaMalloc(&out, rows * sizeof *out));
        CUDA_CHECK(cudaMalloc(&y, rows * sizeof *y));
        CUDA_CHECK(cudaMalloc(&magnitude, rows * sizeof *magnitude));
        CUDA_CHECK(cudaMemcpy(x, host_x.data(), cols * sizeof *x, cudaMemcpyHostToDevice));
    }
    ~Vectors() {
        for (void *p : {(void *)x, (void *)threshold, (void *)out, (void *)y, (void *)magnitude}) {
            CUDA_CHECK(cudaFree(p));
        }
    }
    Vectors(const Vectors &) = delete;
};

/* A warp a row. */
__global__ static void reference_kernel(double *y, double *magnitude, const fp16 *w, const fp16 *x, int rows,
                                        int cols, float threshold) {
    const int row = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= rows) {
        return;
    }
    double sum = 0, size = 0;
    for (int k = lane; k < cols; k += 32) {
        const float v = __half2float(__ushort_as_half(x[k]));
        const float weight = __half2float(__ushort_as_half(w[(size_t)row * cols + k]));
        const double product = fabsf(v) > threshold ? (double)weight * v : 0;
        sum += product;
        size += fabs(product);
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(~0u, sum, offset);
        size += __shfl_xor_sync(~0u, size, offset);
    }
    if (lane == 0) {
        y[row] = sum;
        magnitude[row] = size;
    }
}

/* Times of cuBLAS and of our dense kernel for a shape. */
static void bench_dense(Bench *b, const Case &s, Time *cublas, Time *gemv) {
    const DeviceMatrix m((size_t)s.rows, (size_t)s.cols, 1, false, 1);
    const Copies copies(m.dense, m.rows * m.cols * sizeof(fp16));
    const Vectors v(s.rows, s.cols);
    const auto weights = [&](int i) {
        return reinterpret_cast<fp16 *>(copies.blocks[(size_t)(i % copies.n())]);
    };
    *cublas = time_calls(b, 2 * copies.n(), [&](int i) {
        cublas_product(b->cublas, v.out, m.rows, weights(i), m.cols, m.rows, m.cols, v.x, 1, 0);
    });
    *gemv = time_calls(b, 2 * copies.n(), [&](int i) {
        Matrix dense = m.w;
        dense.format = FORMAT_DENSE;
        dense.dense = weights(i);
        dense.stride = m.cols;
        gemv_cuda(&b->c, v.out, &dense, v.x, EPILOGUE_STORE);
    });
}

/* One product: bytes it needs, and its worst error as a share of the bound. */
static void check_once(Bench *b, const DeviceMatrix &m, const Vectors &v, float threshold, double *bytes,
                       double *error) {
    CUDA_CHECK(cudaMemset(v.out, 0xff, m.rows * sizeof *v.out));
    CUDA_CHECK(cudaMemset(b->c.report, 0, sizeof(DeviceReport)));
    CUDA_CHECK(cudaDeviceSynchronize());
    spmspv_cuda(&b->c, v.out, &m.w, v.x, v.threshold, EPILOGUE_STORE, 0);
    CUDA_CHECK(cudaDeviceSynchronize());
    DeviceReport report;
    CUDA_CHECK(cudaMemcpy(&report, b->c.report, sizeof report, cudaMemcpyDeviceToHost));
    const ProductStats &p = report.products[SITE_MLP_IN];
    *bytes = (double)p.bytes + 2.0 * (double)p.active_nonzeros;
    reference_kernel<<<blocks_for(m.rows * 32, 256), 256>>>(v.y, v.magnitude, m.dense, v.x, (int)m.rows,
                                                            (int)m.cols, threshold);
    CUDA_CHECK(cudaGetLastError());
    *error =
        worst_share(v.out, v.y, v.magnitude, allowed_roundings(v.host_x, m.cols, 1, threshold, true), m.rows);
}

static void sweep_slices(const Case &s, double sp, double dp, double cublas_us,
                         const std::function<Time(int)> &time_slice) {
    double best = 1e9;
    int best_slice = 0;
    for (int slice = 64; slice <= std::min(s.cols, 2048); slice += slice < 512 ? 32 : 64) {
        if ((ceil_div(s.cols, slice) - 1) * round_up(s.rows, TILE_M) <= N_LETTERS) {
            const double t = time_slice(slice).median;
            printf("    sweep %d %d %g %g %d %.2f\n", s.rows, s.cols, sp, dp, slice, t);
            if (t < best) {
                best = t;
                best_slice = slice;
            }
        }
    }
    printf("    best slice %d: %.2f us, x cuBLAS %.2f\n", best_slice, best, cublas_us / best);
}

/* All dynamic ratios of one static one; appends the ratios to cuBLAS. */
static void bench_sparse(Bench *b, const Case &s, const Setting &set, const Time &cublas,
                         std::vector<double> *ratios) {
    const DeviceMatrix m((size_t)s.rows, (size_t)s.cols, 1 - set.sp, false, 1);
    const Copies copies(m.block, m.bytes);
    const Vectors v(s.rows, s.cols);
    for (double dp : set.dp) {
        const float threshold = magnitude_quantile(v.host_x, dp);
        CUDA_CHECK(cudaMemcpy(v.threshold, &threshold, sizeof threshold, cudaMemcpyHostToDevice));
        double bytes, error;
        check_once(b, m, v, threshold, &bytes, &error);
        const auto run = [&](int i, int slice) {
            const Matrix w = m.in(copies.blocks[(size_t)(i % copies.n())]);
            spmspv_cuda(&b->c, v.out, &w, v.x, v.threshold, EPILOGUE_STORE, slice);
        };
        const Time t = time_calls(b, 2 * copies.n(), [&](int i) { run(i, 0); });
        const double ratio = cublas.median / t.median, gb_s = bytes / t.median * 1e-3,
                     share = gb_s / b->ceiling;
        fprintf(b->csv, "%s,%d,%d,%g,%g,%.2f,%.2f,%.3f,%.0f,%.0f,%.3f,%.3f,%.2f,%.2f,%s\n", s.name.c_str(),
                s.rows, s.cols, set.sp, dp, t.median, cublas.median, ratio, bytes, gb_s, share, error, t.mean,
                cublas.mean, s.models.c_str());
        printf(
            "%-20s SP %.2f DP %.3f  %7.2f us  x cuBLAS %.2f  %5.0f GB/s  share %.2f  error %.2f of the "
            "bound\n",
            s.name.c_str(), set.sp, dp, t.median, ratio, gb_s, share, error);
        if (b->sweep) {
            sweep_slices(s, set.sp, dp, cublas.median, [&](int slice) {
                return time_calls(
                    b, 2 * copies.n(), [&](int i) { run(i, slice); }, 15);
            });
        }
        if (!(error <= 1)) {
            fprintf(stderr, "%s: wrong results\n", s.name.c_str());
            exit(1);
        }
        ratios->push_back(ratio);
    }
}

/* Is there room? The most at once: dense weights and their Tiled-CBC, with a second copy of the larger or as
 * many as COPIES_BYTES holds. */
static bool has_room(const Case &s) {
    size_t available, total;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    const size_t dense = (size_t)s.rows * (size_t)s.cols * sizeof(fp16);
    const size_t needed = 3 * dense + dense / 4 + COPIES_BYTES + ((size_t)256 << 20);
    if (needed > available) {
        printf("%-20s skipped: needs %.1f GB of GPU memory, %.1f GB are free\n", s.name.c_str(),
               (double)needed * 1e-9, (double)available * 1e-9);
    }
    return needed <= available;
}

/* ---- the program --------------------------------------------------------------------------------------- */

static void set_up(Bench *b, const char *path) {
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    CUDA_CHECK(cudaStreamCreateWithFlags(&b->c.stream, cudaStreamNonBlocking));
    b->c.n_sms = properties.multiProcessorCount;
    b->c.shared_per_block = properties.sharedMemPerBlockOptin;
    b->c.overlap = can_overlap_cuda();
    b->c.workspace_bytes = (size_t)64 << 20;
    CUDA_CHECK(cudaMalloc(&b->c.workspace, b->c.workspace_bytes));
    CUDA_CHECK(cudaMalloc(&b->c.counters, N_COUNTERS * sizeof(unsigned)));
    CUDA_CHECK(cudaMalloc(&b->c.letters, N_LETTERS * sizeof *b->c.letters));
    CUDA_CHECK(cudaMalloc(&b->c.report, sizeof(DeviceReport)));
    CUDA_CHECK(cudaMemset(b->c.counters, 0, N_COUNTERS * sizeof(unsigned)));
    clear_letters(&b->c);
    CUDA_CHECK(cudaMemset(b->c.report, 0, sizeof(DeviceReport)));
    CUDA_CHECK(cudaDeviceSynchronize());
    Error err;
    if (cublas_open(&b->cublas, b->c.stream, &err) || !(b->csv = fopen(path, "w"))) {
        fprintf(stderr, "bench_kernels: %s\n", b->cublas ? "the CSV cannot be written" : err.text);
        exit(1);
    }
    b->ceiling = read_ceiling_cuda(&b->c);
    CHECK(b->ceiling > 0);
    const std::string state = clocks_at_work(&b->c);
    const time_t now = time(NULL);
    char date[32];
    int driver;
    CUDA_CHECK(cudaDriverGetVersion(&driver));
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    fprintf(b->csv,
            "# %s, %s, %d SMs, CUDA %d.%d, driver for CUDA %d.%d, %s, read ceiling %.0f GB/s, "
            "median of %d graph replays after %d\n",
            date, properties.name, b->c.n_sms, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
            driver / 1000, driver % 1000 / 10, state.c_str(), b->ceiling, b->replays, b->warm_ups);
    fprintf(b->csv,
            "name,rows,cols,sp,dp,us,cublas_us,ratio,bytes,gb_s,share_of_ceiling,error_of_bound,mean_us,"
            "cublas_mean_us,model\n");
    printf("%s, read ceiling %.0f GB/s, %s\n", properties.name, b->ceiling, state.c_str());
}

static void tear_down(Bench *b) {
    fclose(b->csv);
    cublas_close(b->cublas);
    CUDA_CHECK(cudaFree(b->c.workspace));
    CUDA_CHECK(cudaFree(b->c.counters));
    CUDA_CHECK(cudaFree(b->c.letters));
    CUDA_CHECK(cudaFree(b->c.report));
    CUDA_CHECK(cudaStreamDestroy(b->c.stream));
}

static void bench_cases(Bench *b, const std::vector<Case> &cases, const std::vector<Setting> &settings) {
    std::vector<double> log_ratio;
    double gemv_log = 0;
    int n = 0;
    for (const Case &s : cases) {
        if (!has_room(s)) {
            continue;
        }
        Time cublas, gemv;
        bench_dense(b, s, &cublas, &gemv);
        printf("%-20s dense: cuBLAS %.2f us, gemv %.2f us, floor %.2f us  (%s)\n", s.name.c_str(),
               cublas.median, gemv.median, 2e-3 * s.rows * s.cols / b->ceiling, s.models.c_str());
        gemv_log += log(cublas.median / gemv.median);
        std::vector<double> ratios;
        for (const Setting &set : settings) {
            bench_sparse(b, s, set, cublas, &ratios);
        }
        log_ratio.resize(ratios.size());
        for (size_t i = 0; i < ratios.size(); i++) {
            log_ratio[i] += log(ratios[i]);
        }
        n++;
        fflush(stdout);
    }
    printf("geometric mean x cuBLAS: gemv %.3f", exp(gemv_log / n));
    size_t i = 0;
    for (const Setting &set : settings) {
        for (double dp : set.dp) {
            printf("  SP %.2f DP %.3f: %.3f", set.sp, dp, exp(log_ratio[i++] / n));
        }
    }
    printf("\n");
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_kernels CSV [--quick] [--models] [--sweep] [--only ROW]\n");
        return 2;
    }
    bool quick = false, models = false;
    int only = -1;
    Bench b = {};
    for (int i = 2; i < argc; i++) {
        quick |= strcmp(argv[i], "--quick") == 0;
        models |= strcmp(argv[i], "--models") == 0;
        b.sweep |= strcmp(argv[i], "--sweep") == 0;
        only = strcmp(argv[i], "--only") == 0 && i + 1 < argc ? atoi(argv[i + 1]) : only;
    }
    b.warm_ups = models ? 3 : 10;
    b.replays = models ? 20 : 100;
    std::vector<Case> cases = cases_of(models);
    if (only >= 0 && only < (int)cases.size()) {
        cases = {cases[(size_t)only]};
    }
    std::vector<Setting> settings = {{.5, {.5, .3, 0}}, {.3, {.5, .3, 0}}};
    if (quick) {
        settings = {{.5, {.5}}};
    } else if (!models) {
        settings.push_back({.2, {.375}});
    }
    set_up(&b, argv[1]);
    bench_cases(&b, cases, settings);
    tear_down(&b);
    return 0;
}
