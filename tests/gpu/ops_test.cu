/* ops_test.cu: cuda_ops.cu and cuda_sampling.cu against the CPU backend, sampling.c and references in double,
 * then their times. Prints one line a case with the worst error as a share of its bound, and at the end what
 * failed. SPDP_TEST_SHORT: a few sizes that still reach every path, for compute-sanitizer. */
#include "../../kernels/cuda_ops.cuh"

#include <algorithm>
#include <curand_kernel.h>
#include <math.h>
#include <vector>

extern "C" {
#include "../../kernels/cpu_kernels.h"
}
#include "../golden/philox.h"

#define COUNT(array) (sizeof(array) / sizeof *(array))
#define GUARD 64  // poisoned bytes behind every output

static const bool is_short = getenv("SPDP_TEST_SHORT") != NULL;
static const int n_repeats = is_short ? 2 : 20;
static CudaLaunch launch;
static Backend *cpu;
static int n_passed, n_failed;

static void result(bool ok, const char *name, const char *what, double share, size_t n) {
    printf("%-4s %-44s %-28s %8.3g of the bound, %zu numbers\n", ok ? "ok" : "FAIL", name, what, share, n);
    (ok ? n_passed : n_failed)++;
}

/* All sizes, or the few that a short run takes. */
static std::vector<int> sizes(std::initializer_list<int> all, std::initializer_list<int> few) {
    return is_short ? few : all;
}

/* ---- memory and numbers -------------------------------------------------------------------------------- */

/* Host memory with slack, as vector loads of the CPU kernels need it, and device memory with a guard behind
 * it. */
template <class T>
struct Both {
    size_t n;
    T *host, *device;
    explicit Both(size_t count) : n(count), host((T *)memory_alloc(count * sizeof(T))) {
        CHECK(host);
        CUDA_CHECK(cudaMalloc((void **)&device, count * sizeof(T) + GUARD));
        poison();
    }
    ~Both() {
        free(host);
        CUDA_CHECK(cudaFree(device));
    }
    Both(const Both &) = delete;
    void poison() {
        memset(host, 0xff, n * sizeof(T));
        CUDA_CHECK(cudaMemset(device, 0xff, n * sizeof(T) + GUARD));
    }
    void upload() { CUDA_CHECK(cudaMemcpy(device, host, n * sizeof(T), cudaMemcpyHostToDevice)); }
    std::vector<T> download() const {
        std::vector<T> v(n);
        CUDA_CHECK(cudaStreamSynchronize(launch.stream));
        CUDA_CHECK(cudaMemcpy(v.data(), device, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    bool guard_intact() const {
        unsigned char guard[GUARD];
        CUDA_CHECK(cudaMemcpy(guard, (const char *)device + n * sizeof(T), GUARD, cudaMemcpyDeviceToHost));
        return std::all_of(guard, guard + GUARD, [](unsigned char b) { return b == 0xff; });
    }
};

static uint64_t random_state = 4;
static uint32_t random_bits() {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}
static uint32_t random_below(uint32_t n) {
    return (uint32_t)((uint64_t)random_bits() * n >> 32);
}

/* About normal, variance 1. */
static float random_normal() {
    const uint32_t a = random_bits(), b = random_bits();
    return ((float)((a >> 16) + (a & 0xffff) + (b >> 16) + (b & 0xffff)) - 2 * 65535.0f) *
           (1.7320508f / 65536);
}

static double half_ulp_fp16(double v) {
    int exponent = -13;
    if (v != 0) {
        frexp(v, &exponent);
    }
    return ldexp(1, std::max(exponent, -13) - 12);
}

/* Outputs in fp16 against a reference in double, with roundings * 2^-24 of it allowed beside the output's own
 * rounding, and against the CPU's, from which they may be one place away. */
static void judge_fp16(const char *name, const std::vector<fp16> &got, const std::vector<double> &want,
                       const fp16 *of_cpu, double roundings) {
    double worst = 0, apart = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double g = fp16_to_float(got[i]);
        const double bound = half_ulp_fp16(want[i]) + roundings * 0x1p-24 * fabs(want[i]);
        const double error = fabs(g - want[i]) / bound;
        worst = error <= worst ? worst : error;  // a NaN becomes the worst and stays
        const double difference = fabs(g - fp16_to_float(of_cpu[i])) / (2 * half_ulp_fp16(want[i]));
        apart = difference <= apart ? apart : difference;
    }
    result(worst <= 1, name, "double reference", worst, got.size());
    result(apart <= 1, name, "CPU, one ulp", apart, got.size());
}

/* Do repeats of an operation give the same bits? */
template <class T, class Run>
static bool repeats_agree(const Both<T> &out, Run run) {
    run();
    const std::vector<T> first = out.download();
    bool same = true;
    for (int i = 1; i < n_repeats; i++) {
        run();
        same = same && out.download() == first;
    }
    return same;
}

/* ---- the simple operations ----------------------------------------------------------------------------- */

static void test_embed() {
    for (int cols : sizes({1, 7, 8, 12, 17, 288, 4096, 4100}, {17, 288})) {
        for (int n : {1, 3, 50}) {
            const int rows = 37;
            Matrix table = {};
            table.format = FORMAT_DENSE;
            table.rows = rows;
            table.cols = (size_t)cols;
            table.stride = dense_stride((size_t)cols);
            Both<fp16> values(rows * table.stride);
            for (size_t i = 0; i < values.n; i++) {
                values.host[i] = i % table.stride < table.cols ? (fp16)random_bits() : 0;
                values.host[i] = fp16_is_finite(values.host[i]) ? values.host[i] : 0x7bff;
            }
            values.upload();
            Both<int> ids((size_t)n);
            for (int i = 0; i < n; i++) {
                ids.host[i] = i == 0 ? rows - 1 : (int)random_below(rows);
            }
            ids.upload();
            Both<float> out((size_t)n * table.cols);
            table.dense = values.host;
            cpu->embed(cpu, out.host, &table, ids.host, n);
            table.dense = values.device;
            embed_cuda(&launch, out.device, &table, ids.device, n);
            const std::vector<float> got = out.download();
            char name[64];
            snprintf(name, sizeof name, "embed cols %d, n %d", cols, n);
            result(!memcmp(got.data(), out.host, out.n * sizeof(float)) && out.guard_intact(), name,
                   "equal to CPU", 0, out.n);
        }
    }
}

static void test_rmsnorm() {
    const std::vector<int> dims = sizes({1,    2,    7,    8,    9,    31,   64,    288,   768,
                                         4095, 4096, 5120, 8192, 8193, 8200, 12288, 16384, 20001},
                                        {9, 4096, 20001});
    for (int dim : dims) {
        for (int n : sizes({1, 2, 33}, {2})) {
            const size_t d = (size_t)dim;
            Both<float> x((size_t)n * d);
            Both<fp16> weight(d), out((size_t)n * d);
            for (size_t i = 0; i < x.n; i++) {
                x.host[i] = random_normal() * (i / d % 2 ? 1e-3f : 20);
            }
            for (size_t i = 0; i < d; i++) {
                weight.host[i] = fp16_from_float(1 + 0.3f * random_normal());
            }
            x.upload();
            weight.upload();
            const float eps = 1e-5f;
            cpu->rmsnorm(cpu, out.host, x.host, weight.host, n, dim, eps);
            const bool same = repeats_agree(
                out, [&]() { rmsnorm_cuda(&launch, out.device, x.device, weight.device, n, dim, eps); });
            std::vector<double> want(out.n);
            for (int t = 0; t < n; t++) {
                const float *row = x.host + (size_t)t * d;
                double sum = 0;
                for (size_t i = 0; i < d; i++) {
                    sum += (double)row[i] * row[i];
                }
                for (size_t i = 0; i < d; i++) {
                    want[(size_t)t * d + i] = row[i] / sqrt(sum / dim + eps) * fp16_to_float(weight.host[i]);
                }
            }
            char name[64];
            snprintf(name, sizeof name, "rmsnorm dim %d, n %d", dim, n);
            judge_fp16(name, out.download(), want, out.host, 32);
            result(same && out.guard_intact(), name, "repeats, guard", 0, (size_t)n_repeats);
        }
    }
}

/* Both backends round products and sums alike, so that whole caches, poison included, are equal bitwise. */
static void test_rope() {
    const std::vector<int> head_dims = sizes(
        {2, 4, 6, 8, 10, 16, 24, 32, 34, 64, 80, 100, 128, 160, 192, 254, 256}, {2, 10, 64, 256});
    for (int head_dim : head_dims) {
        for (int n : sizes({1, 2, 7}, {1, 7})) {
            const AttentionShape shape = {6, head_dim % 16 ? 2 : 3, head_dim, 23};
            const size_t hd = (size_t)head_dim, cache = (size_t)shape.n_kv_heads * shape.seq_len * hd;
            Both<float> qkv((size_t)n * (shape.n_heads + 2 * shape.n_kv_heads) * hd),
                rope(shape.seq_len * hd);
            Both<fp16> q((size_t)n * shape.n_heads * hd), k(cache), v(cache);
            for (size_t i = 0; i < qkv.n; i++) {
                qkv.host[i] = random_normal();
            }
            for (size_t i = 0; i < rope.n; i += 2) {
                rope.host[i] = cosf((float)i * 0.37f);
                rope.host[i + 1] = sinf((float)i * 0.37f);
            }
            qkv.upload();
            rope.upload();
            bool equal = true, guards = true;
            for (int first : {0, 5, shape.seq_len - n}) {
                Both<int> pos(1);
                *pos.host = first;
                pos.upload();
                q.poison();
                k.poison();
                v.poison();
                // the CPU's attention leaves the rotated queries in q
                std::vector<fp16> attended(q.n);
                cpu->attention(cpu, attended.data(), q.host, k.host, v.host, qkv.host, rope.host, &shape, pos.host, n);
                rope_append_cuda(&launch, q.device, k.device, v.device, qkv.device, rope.device, &shape,
                                 pos.device, n);
                for (const Both<fp16> *out : {&q, &k, &v}) {
                    const std::vector<fp16> got = out->download();
                    equal = equal && !memcmp(got.data(), out->host, out->n * sizeof(fp16));
                    guards = guards && out->guard_intact();
                }
            }
            char name[64];
            snprintf(name, sizeof name, "rope_append head_dim %d, n %d", head_dim, n);
            result(equal && guards, name, "equal to CPU", 0, 3 * (q.n + k.n + v.n));
        }
    }
}

static void test_swiglu() {
    for (const int size : sizes({1, 7, 8, 9, 1023, 1024, 5504, 11008, 7 * 11008 + 3}, {9, 5504})) {
        const size_t count = (size_t)size;
        Both<float> y(2 * count);
        Both<fp16> out(count);
        std::vector<double> want(count);
        for (size_t i = 0; i < count; i++) {
            const float scale = i % 50 == 0 ? 40.0f : 3.0f;
            y.host[2 * i] = random_normal() * scale;
            y.host[2 * i + 1] = random_normal();
            want[i] = (double)y.host[2 * i] / (1 + exp(-(double)y.host[2 * i])) * y.host[2 * i + 1];
        }
        y.upload();
        cpu_kernels_portable.swiglu(out.host, y.host, count);
        const bool same = repeats_agree(out, [&]() { swiglu_cuda(&launch, out.device, y.device, count); });
        char name[64];
        snprintf(name, sizeof name, "swiglu count %zu", count);
        judge_fp16(name, out.download(), want, out.host, 8);
        result(same && out.guard_intact(), name, "repeats, guard", 0, (size_t)n_repeats);
    }
}

static DeviceReport read_report() {
    DeviceReport report;
    CUDA_CHECK(cudaStreamSynchronize(launch.stream));
    CUDA_CHECK(cudaMemcpy(&report, launch.report, sizeof report, cudaMemcpyDeviceToHost));
    return report;
}

static void test_check_finite() {
    for (const int size : sizes({1, 7, 8, 9, 1024, 4096, 11009}, {9, 1024})) {
        const size_t count = (size_t)size;
        Both<fp16> x(count);
        bool ok = true;
        Matrix w = {};
        w.layer = 3;
        w.site = SITE_MLP_HIDDEN;
        const fp16 values[] = {0x7bff, 0xfbff, 0x0001, 0x7c00, 0xfc00, 0x7e00, 0xfe01, 0x7c01};
        for (fp16 value : values) {
            for (size_t at : {(size_t)0, count / 2, count - 1}) {
                for (size_t i = 0; i < count; i++) {
                    x.host[i] = fp16_from_float(random_normal());
                }
                x.host[at] = value;
                x.upload();
                CUDA_CHECK(cudaMemset(launch.report, 0, sizeof(DeviceReport)));
                check_finite_cuda(&launch, x.device, count, &w);
                const unsigned want = fp16_is_finite(value) ? 0 : fault_code(&w);
                ok = ok && read_report().fault == want;
                Matrix later = w;
                later.layer = 7;
                check_finite_cuda(&launch, x.device, count, &later);
                ok = ok && read_report().fault == want;  // the first fault stays
            }
        }
        char name[64];
        snprintf(name, sizeof name, "check_finite count %zu", count);
        result(ok, name, "NaN, Inf, largest", 0, COUNT(values) * 6);
    }
}

static void test_drop_small() {
    for (size_t count : {(size_t)1, (size_t)127, (size_t)129, (size_t)40001}) {
        Both<fp16> x(count), out(count);
        Both<float> threshold(1);
        for (size_t i = 0; i < count; i++) {
            x.host[i] = fp16_from_float(random_normal());
        }
        *threshold.host = fabsf(fp16_to_float(x.host[count / 2]));  // which is dropped: not above it
        x.upload();
        threshold.upload();
        drop_small_cuda(&launch, out.device, x.device, count, threshold.device);
        const std::vector<fp16> got = out.download();
        bool ok = out.guard_intact();
        for (size_t i = 0; i < count; i++) {
            ok = ok && got[i] == (fabsf(fp16_to_float(x.host[i])) > *threshold.host ? x.host[i] : 0);
        }
        char name[64];
        snprintf(name, sizeof name, "drop_small count %zu", count);
        result(ok, name, "equal to its definition", 0, count);
    }
}

/* ---- sampling ------------------------------------------------------------------------------------------ */

typedef struct {
    SampleParams params;
    uint64_t step;
} Draw;

/* How near the draw or the cut of top-p comes to a boundary, relative to the total, in extended precision. */
static double margin_of(const float *logits, int n, const Draw &d) {
    std::vector<int> order((size_t)n);
    for (int i = 0; i < n; i++) {
        order[(size_t)i] = i;
    }
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    const SampleParams &p = d.params;
    const int kept = p.top_k > 0 && p.top_k < n ? p.top_k : n;
    std::vector<long double> weight((size_t)n, 0.0L);
    long double total = 0, margin = 1;
    for (int i = 0; i < kept; i++) {
        const int id = order[(size_t)i];
        total += weight[(size_t)id] =
            expl(((long double)logits[id] - logits[order[0]]) / (long double)p.temperature);
    }
    if (p.top_p < 1) {
        long double sum = 0;
        for (int i = 0; i < kept; i++) {
            long double &w = weight[(size_t)order[(size_t)i]];
            const long double before = sum;
            sum += w;
            margin = std::min(margin, fabsl(sum - p.top_p * total) / total);
            w = before < p.top_p * total ? w : 0;
        }
    }
    long double left = 0, sum = 0;
    for (long double w : weight) {
        left += w;
    }
    for (long double w : weight) {
        sum += w;
        margin = std::min(margin, fabsl(sum / left - (long double)philox_uniform(p.seed, d.step)));
    }
    return (double)margin;
}

/* Tokens of these draws by both, which must be equal unless a draw lies on a boundary. */
static void compare_draws(const char *name, const Both<float> &logits, const std::vector<Draw> &draws) {
    const int n = (int)logits.n;
    Both<int> tokens(draws.size());
    for (size_t i = 0; i < draws.size(); i++) {
        sample_cuda(&launch, logits.device, n, &draws[i].params, draws[i].step);
        CUDA_CHECK(cudaMemcpyAsync(tokens.device + i, &launch.report->token, sizeof(int),
                                   cudaMemcpyDeviceToDevice, launch.stream));
    }
    const std::vector<int> got = tokens.download();
    std::vector<int> want(draws.size());
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < draws.size(); i++) {
        void *workspace = memory_alloc(sample_workspace(n));
        CHECK(workspace);
        want[i] = sample_token(logits.host, n, &draws[i].params, draws[i].step, workspace);
        free(workspace);
    }
    size_t wrong = 0, on_boundary = 0;
    for (size_t i = 0; i < draws.size(); i++) {
        if (got[i] != want[i]) {
            const SampleParams &p = draws[i].params;
            const double margin = p.temperature > 0 ? margin_of(logits.host, n, draws[i]) : 1;
            on_boundary += margin < 1e-12;
            if (margin >= 1e-12 && wrong++ < 5) {
                printf(
                    "     %s: token %d instead of %d: t %g, top_p %.9g, top_k %d, seed %llu, step %llu, "
                    "margin %g\n",
                    name, got[i], want[i], p.temperature, p.top_p, p.top_k, (unsigned long long)p.seed,
                    (unsigned long long)draws[i].step, margin);
            }
        }
    }
    char what[64];
    snprintf(what, sizeof what, "equal tokens (%zu on bounds)", on_boundary);
    result(wrong == 0, name, what, (double)wrong, draws.size());
}

enum Kind { SPREAD, PEAKED, FLAT, TIES, EQUAL, MIXED, N_KINDS };
static const char *const kind_names[] = {"spread", "peaked", "flat", "ties", "equal", "mostly equal"};

static void fill_logits(float *logits, int n, Kind kind) {
    for (int i = 0; i < n; i++) {
        const float x = random_normal();
        switch (kind) {
        case SPREAD:
            logits[i] = 3 * x;
            break;
        case PEAKED:
            logits[i] = 3 * x + (random_below(500) == 0 ? 12 : 0);
            break;
        case FLAT:
            logits[i] = 0.05f * x + 5;
            break;
        case TIES:
            logits[i] = roundf(2 * x) / 2;
            break;
        case EQUAL:
            logits[i] = -1.25f;
            break;
        default:
            logits[i] = random_below(50) == 0 ? 4 * x : -0.5f;
            break;
        }
    }
}

/* Draws of seed 0 near the ends: u = 1, and u = 345.5 * 2^-32. */
#define STEP_OF_ONE 50893511
#define STEP_OF_NEARLY_ZERO 296355

static void test_sampling() {
    std::vector<float> temperatures = {0, 0.8f, 1e-8f, 0.5f, 1, 2};
    std::vector<float> top_ps = {1, 0.9f, 0.99999994f, 0.5f, 0.01f, 1e-12f};
    if (is_short) {
        temperatures.resize(2);
        top_ps.resize(2);
    }
    for (int n : sizes({1, 2, 31, 32, 33, 512, 1025, 4096, 4097, 32000, 50257, 128256, 262144}, {33, 4097})) {
        const std::vector<int> top_ks = sizes({0, 1, 5, 40, n / 2, n - 1, n, n + 1}, {0, n / 2});
        const int draws_each = n <= 512 ? 6 : n <= 4097 ? 2 : 1;
        for (int kind = 0; kind < N_KINDS; kind += is_short ? EQUAL - SPREAD : 1) {
            Both<float> logits((size_t)n);
            fill_logits(logits.host, n, (Kind)kind);
            logits.upload();
            std::vector<Draw> draws;
            for (float t : temperatures) {
                for (float top_p : top_ps) {
                    for (int top_k : top_ks) {
                        if (n > 100000 && random_below(2)) {
                            continue;  // for the reference's sake
                        }
                        for (int i = 0; i < draws_each; i++) {
                            const uint64_t bits = (uint64_t)random_bits() << 32 | random_bits();
                            const uint64_t step = i % 2 ? bits : random_below(1000);
                            draws.push_back(
                                {{t, top_p, top_k, random_below(2) ? bits * 3 : random_bits()}, step});
                        }
                        if (n <= 4097) {
                            draws.push_back({{t, top_p, top_k, 0}, STEP_OF_ONE});
                            draws.push_back({{t, top_p, top_k, 0}, STEP_OF_NEARLY_ZERO});
                        }
                    }
                }
            }
            char name[64];
            snprintf(name, sizeof name, "sample n %d, %s", n, kind_names[kind]);
            compare_draws(name, logits, draws);
        }
    }

    Both<float> far(5);
    const float far_logits[] = {-60000, 1, 3e38f, -3e38f, 2.9e38f};
    memcpy(far.host, far_logits, sizeof far_logits);
    far.upload();
    std::vector<Draw> draws;
    for (float t : {1e-45f, 1e-30f, 1e-8f, 1.0f, 1e30f, 1e38f}) {
        for (uint64_t step = 0; step < (uint64_t)n_repeats; step++) {
            draws.push_back({{t, 1, 0, step}, step});
            draws.push_back({{t, 0.9f, 3, step}, step << 40});
        }
    }
    compare_draws("sample logits and temperatures at the ends", far, draws);

    Both<float> repeated(50257);
    fill_logits(repeated.host, 50257, TIES);
    repeated.upload();
    Both<int> token(1);
    const SampleParams params = {0.8f, 0.9f, 0, 12};
    const bool same = repeats_agree(token, [&]() {
        sample_cuda(&launch, repeated.device, 50257, &params, 77);
        CUDA_CHECK(cudaMemcpyAsync(token.device, &launch.report->token, sizeof(int), cudaMemcpyDeviceToDevice,
                                   launch.stream));
    });
    result(same, "sample", "repeats", 0, (size_t)n_repeats);
}

/* cases.md row 37. */
static void test_logits_that_are_not_finite() {
    const float bad[] = {INFINITY, -INFINITY, NAN, -NAN};
    for (int n : sizes({1, 2, 5, 1000, 32001}, {1, 1000})) {
        Both<float> logits((size_t)n);
        bool ok = true;
        for (float value : bad) {
            for (int at : {0, n / 2, n - 1}) {
                fill_logits(logits.host, n, SPREAD);
                logits.host[at] = value;
                logits.upload();
                for (float t : {0.0f, 0.8f}) {
                    const SampleParams params = {t, 0.9f, 0, 1};
                    sample_cuda(&launch, logits.device, n, &params, 0);
                    ok = ok && read_report().token == -1;
                }
            }
        }
        char name[64];
        snprintf(name, sizeof name, "sample n %d, NaN or Inf", n);
        result(ok, name, "token -1", 0, COUNT(bad) * 6);
    }
}

static __global__ void first_words(uint32_t *words, const uint64_t *seeds, const uint64_t *steps) {
    for (int i = threadIdx.x; i < PHILOX_CASES; i += blockDim.x) {
        curandStatePhilox4_32_10_t state;
        curand_init(seeds[i], steps[i], 0, &state);
        words[i] = curand(&state);
    }
}

/* The golden draws, as cuRAND makes them on this device and as sample_cuda uses them: among 2^16 equal logits
 * the draw u takes the id of its first 16 bits, counted from above. */
static void test_golden_draws() {
    Both<uint32_t> words(PHILOX_CASES);
    Both<uint64_t> seeds(PHILOX_CASES), steps(PHILOX_CASES);
    for (uint64_t i = 0; i < PHILOX_CASES; i++) {
        seeds.host[i] = philox_case_seed(i);
        steps.host[i] = philox_case_step(i);
    }
    seeds.upload();
    steps.upload();
    first_words<<<1, 128, 0, launch.stream>>>(words.device, seeds.device, steps.device);
    CUDA_CHECK_LAUNCH(launch.stream);
    const std::vector<uint32_t> got = words.download();
    result(!memcmp(got.data(), philox_golden, sizeof philox_golden), "golden draws", "cuRAND on the device",
           0, PHILOX_CASES);
    if (is_short) {
        return;
    }

    const int n = 1 << 16;
    Both<float> logits((size_t)n);
    fill_logits(logits.host, n, EQUAL);
    logits.upload();
    Both<int> tokens(PHILOX_CASES);
    for (uint64_t i = 0; i < PHILOX_CASES; i++) {
        const SampleParams params = {1, 1, 0, philox_case_seed(i)};
        sample_cuda(&launch, logits.device, n, &params, philox_case_step(i));
        CUDA_CHECK(cudaMemcpyAsync(tokens.device + i, &launch.report->token, sizeof(int),
                                   cudaMemcpyDeviceToDevice, launch.stream));
    }
    const std::vector<int> ids = tokens.download();
    bool ok = true;
    for (size_t i = 0; i < PHILOX_CASES; i++) {
        const float u = (float)philox_golden[i] * 0x1p-32f + 0x1p-33f;
        ok = ok && ids[i] == (int)ceil((double)u * n) - 1;
    }
    result(ok, "golden draws", "through sample_cuda", 0, PHILOX_CASES);
}

/* ---- times --------------------------------------------------------------------------------------------- */

/* Microseconds of one launch among many in a graph: median of 15 replays after 3. */
template <class Run>
static double time_us(Run run) {
    const int launches = 50;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaStreamBeginCapture(launch.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; i++) {
        run(i);
    }
    CUDA_CHECK(cudaStreamEndCapture(launch.stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 18; i++) {
        CUDA_CHECK(cudaEventRecord(begin, launch.stream));
        CUDA_CHECK(cudaGraphLaunch(exec, launch.stream));
        CUDA_CHECK(cudaEventRecord(end, launch.stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) {
            times.push_back(ms);
        }
    }
    std::sort(times.begin(), times.end());
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return times[times.size() / 2] * 1000.0 / launches;
}

static void print_time(const char *name, double us, double bytes) {
    printf("%-52s %9.2f us %9.1f GB/s\n", name, us, bytes / us * 1e-3);
}

static void time_all() {
    char name[64];
    printf("\ntimes (launch in a graph included)\n");
    for (int n : {1, 512}) {
        for (int dim : {4096, 8192}) {
            const size_t d = (size_t)dim, count = (size_t)n * d;
            Both<float> x(count);
            Both<fp16> weight(d), out(count);
            CUDA_CHECK(cudaMemset(x.device, 0, count * sizeof(float)));
            snprintf(name, sizeof name, "rmsnorm n %d, dim %d", n, dim);
            print_time(name, time_us([&](int) {
                           rmsnorm_cuda(&launch, out.device, x.device, weight.device, n, dim, 1e-5f);
                       }),
                       6.0 * (double)count + 2.0 * dim);

            Matrix table = {};
            table.format = FORMAT_DENSE;
            table.rows = 1000;
            table.cols = table.stride = d;
            Both<fp16> values(table.rows * d);
            table.dense = values.device;
            Both<int> ids((size_t)n);
            for (int i = 0; i < n; i++) {
                ids.host[i] = (int)random_below(1000);
            }
            ids.upload();
            snprintf(name, sizeof name, "embed n %d, dim %d", n, dim);
            print_time(name, time_us([&](int) { embed_cuda(&launch, x.device, &table, ids.device, n); }),
                       6.0 * (double)count);

            const AttentionShape shape = {dim / 128, dim / 128, 128, 2048};
            Both<float> qkv(3 * count), rope((size_t)shape.seq_len * 128);
            Both<fp16> k((size_t)shape.seq_len * d), v((size_t)shape.seq_len * d);
            Both<int> pos(1);
            *pos.host = 1000;
            pos.upload();
            snprintf(name, sizeof name, "rope_append n %d, %d heads of 128", n, shape.n_heads);
            print_time(name, time_us([&](int) {
                           rope_append_cuda(&launch, out.device, k.device, v.device, qkv.device, rope.device,
                                            &shape, pos.device, n);
                       }),
                       18.0 * (double)count);

            snprintf(name, sizeof name, "swiglu n %d, %d", n, dim);
            print_time(name, time_us([&](int) { swiglu_cuda(&launch, out.device, qkv.device, count); }),
                       10.0 * (double)count);

            Matrix w = {};
            snprintf(name, sizeof name, "check_finite n %d, %d", n, dim);
            print_time(name, time_us([&](int) { check_finite_cuda(&launch, out.device, count, &w); }),
                       2.0 * (double)count);
        }
    }
    const struct {
        const char *name;
        SampleParams params;
    } settings[] = {
        {"greedy", {0, 1, 0, 1}},
        {"t 0.8, top-p 0.9", {0.8f, 0.9f, 0, 1}},
        {"t 1", {1, 1, 0, 1}},
        {"t 0.8, top-k 40", {0.8f, 1, 40, 1}},
        {"t 0.8, top-k 40, top-p 0.9", {0.8f, 0.9f, 40, 1}},
    };
    for (int n : {32000, 128256}) {
        for (Kind kind : {PEAKED, FLAT, TIES, EQUAL, MIXED}) {
            Both<float> logits((size_t)n);
            fill_logits(logits.host, n, kind);
            logits.upload();
            for (const auto &setting : settings) {
                snprintf(name, sizeof name, "sample n %d, %s, %s", n, kind_names[kind], setting.name);
                print_time(name, time_us([&](int i) {
                               sample_cuda(&launch, logits.device, n, &setting.params, (uint64_t)i);
                           }),
                           4.0 * n);
            }
        }
    }
}

int main() {
    Error err;
    CHECK(backend_cpu(&cpu, 0, NULL, &err) == OK);
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, 0));
    CUDA_CHECK(cudaStreamCreateWithFlags(&launch.stream, cudaStreamNonBlocking));
    launch.n_sms = properties.multiProcessorCount;
    launch.shared_per_block = properties.sharedMemPerBlockOptin;
    CUDA_CHECK(cudaMalloc((void **)&launch.report, sizeof(DeviceReport)));
    CUDA_CHECK(cudaMemset(launch.report, 0, sizeof(DeviceReport)));
    printf("%s, CPU kernels: %s\n", properties.name, cpu->device);

    test_embed();
    test_rmsnorm();
    test_rope();
    test_swiglu();
    test_check_finite();
    test_drop_small();
    test_golden_draws();
    test_logits_that_are_not_finite();
    test_sampling();
    if (is_short) {
        printf("left out (SPDP_TEST_SHORT): most sizes, kinds of logits and settings of sampling, golden draws "
               "through sample_cuda, times\n");
    } else {
        time_all();
    }

    CUDA_CHECK(cudaFree(launch.report));
    CUDA_CHECK(cudaStreamDestroy(launch.stream));
    cpu->free(cpu);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}
