/* attention_test.cu: attention_cuda against softmax attention in double precision on the same fp16 inputs,
 * over head sizes, groups, chunk lengths and positions; exact cases; faults; graph replay; launches that
 * overlap; repeats; then times. SPDP_TEST_SHORT: a few sizes that still reach every kernel, for compute-sanitizer. */
#include <math.h>
#include <string.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "../../kernels/cuda_ops.cuh"

#define SEED 20260101u

namespace {

const bool is_short = getenv("SPDP_TEST_SHORT") != NULL;
const int n_repeats = is_short ? 2 : 20;
int n_passed, n_failed;

/* One line per case; share is the worst error as a part of its bound. */
void report(double share, const char *name, const char *where = "") {
    const bool passed = share <= 1;  // NaN fails
    (passed ? n_passed : n_failed)++;
    printf("%-44s %8.4f of the bound  %s%s\n", name, share, where, passed ? "" : "  FAILED");
}

uint64_t random_state = SEED;

uint32_t random_bits() {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(random_state >> 32);
}

/* About normal, variance 1. */
float random_normal() {
    const uint32_t a = random_bits(), b = random_bits();
    return ((float)((a >> 16) + (a & 0xffff) + (b >> 16) + (b & 0xffff)) - 2 * 65535.0f) *
           (1.7320508f / 65536);
}

float random_integer() {
    return (float)(random_bits() % 5) - 2;
}

template <typename Draw>
std::vector<fp16> random_values(size_t count, float factor, Draw draw) {
    std::vector<fp16> v(count);
    for (fp16 &h : v) {
        h = fp16_from_float(factor * draw());
    }
    return v;
}

template <typename T>
T *device_alloc(size_t count) {
    void *p;
    CUDA_CHECK(cudaMalloc(&p, count * sizeof(T)));
    return (T *)p;
}

template <typename T>
void upload(T *to, const T *from, size_t count) {
    CUDA_CHECK(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyHostToDevice));
}

template <typename T>
std::vector<T> download(const T *from, size_t count) {
    std::vector<T> v(count);
    CUDA_CHECK(cudaMemcpy(v.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}

CudaLaunch make_launch() {
    CudaLaunch c = {};
    int shared = 0;
    CUDA_CHECK(cudaStreamCreate(&c.stream));
    CUDA_CHECK(cudaDeviceGetAttribute(&c.n_sms, cudaDevAttrMultiProcessorCount, 0));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    c.shared_per_block = (size_t)shared;
    c.letters = device_alloc<unsigned>(N_LETTERS);
    c.report = device_alloc<DeviceReport>(1);
    CUDA_CHECK(cudaMemset(c.report, 0, sizeof *c.report));
    clear_letters(&c);
    return c;
}

/* Queries by absolute position, and a cache of every position, on the host; the same on the device, where
 * what lies beyond the visible positions is poisoned before every call. */
struct Problem {
    const CudaLaunch *c;
    AttentionShape shape;
    std::vector<fp16> q, k, v;  // q (seq_len, n_heads * head_dim), caches as in backend.h
    fp16 *dq, *dk, *dv, *dout;
    int *dpos;

    Problem(const CudaLaunch *launch, int n_kv_heads, int group, int head_dim, int seq_len) : c(launch) {
        shape.n_heads = n_kv_heads * group;
        shape.n_kv_heads = n_kv_heads;
        shape.head_dim = head_dim;
        shape.seq_len = seq_len;
        dq = device_alloc<fp16>(q_width() * (size_t)seq_len);
        dout = device_alloc<fp16>(q_width() * (size_t)seq_len);
        dk = device_alloc<fp16>(cache_size());
        dv = device_alloc<fp16>(cache_size());
        dpos = device_alloc<int>(1);
    }
    ~Problem() {
        for (void *p : {(void *)dq, (void *)dk, (void *)dv, (void *)dout, (void *)dpos}) {
            CUDA_CHECK(cudaFree(p));
        }
    }
    Problem(const Problem &) = delete;

    size_t q_width() const { return (size_t)shape.n_heads * (size_t)shape.head_dim; }
    size_t row(int kv_head, int p) const {
        return ((size_t)kv_head * (size_t)shape.seq_len + (size_t)p) * (size_t)shape.head_dim;
    }
    size_t cache_size() const { return row(shape.n_kv_heads, 0); }

    template <typename Draw>
    void fill(float q_factor, Draw draw) {
        q = random_values(q_width() * (size_t)shape.seq_len, q_factor, draw);
        k = random_values(cache_size(), 1, draw);
        v = random_values(cache_size(), 1, draw);
    }

    void place(int pos, int n) {
        std::vector<fp16> visible_k(cache_size(), 0xffff), visible_v(cache_size(), 0xffff);
        for (int h = 0; h < shape.n_kv_heads; h++) {
            std::copy(k.begin() + row(h, 0), k.begin() + row(h, pos + n), visible_k.begin() + row(h, 0));
            std::copy(v.begin() + row(h, 0), v.begin() + row(h, pos + n), visible_v.begin() + row(h, 0));
        }
        upload(dk, visible_k.data(), cache_size());
        upload(dv, visible_v.data(), cache_size());
        upload(dq, q.data() + (size_t)pos * q_width(), (size_t)n * q_width());
        upload(dpos, &pos, 1);
    }

    /* The output for n tokens from pos on. */
    std::vector<fp16> run(int n, int kv_len_max) {
        CUDA_CHECK(cudaMemset(dout, 0xff, q_width() * (size_t)n * sizeof(fp16)));
        attention_cuda(c, dout, dq, dk, dv, NULL, NULL, &shape, dpos, n, kv_len_max);
        CUDA_CHECK(cudaStreamSynchronize(c->stream));
        return download(dout, q_width() * (size_t)n);
    }
};

/* Reference outputs by absolute position (seq_len, n_heads * head_dim) for the positions that are wanted. */
std::vector<double> reference(const Problem &p, const std::vector<char> &wanted) {
    const int hd = p.shape.head_dim, group = p.shape.n_heads / p.shape.n_kv_heads;
    std::vector<double> out(p.q_width() * wanted.size());
    std::vector<float> kf(p.k.size()), vf(p.v.size());
    for (size_t i = 0; i < p.k.size(); i++) {
        kf[i] = fp16_to_float(p.k[i]);
        vf[i] = fp16_to_float(p.v[i]);
    }
#pragma omp parallel for schedule(dynamic)
    for (int i = 0; i < (int)wanted.size() * p.shape.n_heads; i++) {
        const int at = i / p.shape.n_heads, head = i % p.shape.n_heads;
        if (!wanted[(size_t)at]) {
            continue;
        }
        std::vector<double> score((size_t)at + 1);
        double query[256], max = -INFINITY, sum = 0, acc[256] = {0};
        for (int d = 0; d < hd; d++) {
            query[d] =
                fp16_to_float(p.q[(size_t)at * p.q_width() + (size_t)(head * hd + d)]) / sqrt((double)hd);
        }
        for (int j = 0; j <= at; j++) {
            const float *key = &kf[p.row(head / group, j)];
            double s = 0;
#pragma omp simd reduction(+ : s)
            for (int d = 0; d < hd; d++) {
                s += query[d] * (double)key[d];
            }
            score[(size_t)j] = s;
            max = std::max(max, s);
        }
        for (int j = 0; j <= at; j++) {
            const float *value = &vf[p.row(head / group, j)];
            const double w = exp(score[(size_t)j] - max);
            sum += w;
#pragma omp simd
            for (int d = 0; d < hd; d++) {
                acc[d] += w * (double)value[d];
            }
        }
        for (int d = 0; d < hd; d++) {
            out[(size_t)at * p.q_width() + (size_t)(head * hd + d)] = acc[d] / sum;
        }
    }
    return out;
}

double max_magnitude(const std::vector<fp16> &v) {
    double max = 0;
    for (const fp16 h : v) {
        max = std::max(max, fabs((double)fp16_to_float(h)));
    }
    return max;
}

/* Worst share of |err| <= 2^-11 |ref| + tolerance * max|v|; infinity for what is not finite. */
double worst_share(const std::vector<fp16> &got, const double *want, double tolerance, double max_v) {
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double error = fabs((double)fp16_to_float(got[i]) - want[i]);
        const double share = error / (0x1p-11 * fabs(want[i]) + tolerance * max_v);
        worst = share <= worst ? worst : fp16_is_finite(got[i]) ? share : INFINITY;
    }
    return worst;
}

double bound_of(int n) {
    return n == 1 ? 1e-3 : 2e-3;
}

/* All sizes, or the few that a short run takes: those of head_dims and groups reach each kernel. */
std::vector<int> sizes(std::initializer_list<int> all, std::initializer_list<int> few) {
    return is_short ? few : all;
}
const std::vector<int> all_n = sizes({1, 2, 7, 16, 17, 33, 64, 65, 130, 257}, {1, 65});
const std::vector<int> all_pos = sizes({0, 1, 63, 64, 511, 1300}, {0, 511});
const std::vector<int> head_dims = sizes({2, 4, 6, 8, 32, 64, 80, 128, 256}, {6, 32, 64, 80, 256});
const std::vector<int> groups = sizes({1, 2, 8, 3, 12}, {1, 3, 12});

void test_against_reference(const CudaLaunch *c) {
    const int most = all_n.back(), last = all_pos.back() + most, seq_len = last + 43;
    std::vector<char> wanted((size_t)last, 0);
    for (const int pos : all_pos) {
        for (int i = 0; i < most; i++) {
            wanted[(size_t)(pos + i)] = 1;
        }
    }
    for (const int head_dim : head_dims) {
        for (const int group : groups) {
            Problem p(c, 2, group, head_dim, seq_len);
            p.fill(2, random_normal);
            const std::vector<double> want = reference(p, wanted);
            const double max_v = max_magnitude(p.v);
            double worst = -1;
            bool repeats = true;
            char name[100], where[100] = "";
            for (const int pos : all_pos) {
                for (const int n : all_n) {
                    p.place(pos, n);
                    // How a decode step is cut depends on the longest context: both ends of it.
                    for (const int kv_len_max : {seq_len, pos + n}) {
                        const std::vector<fp16> got = p.run(n, kv_len_max);
                        const double share =
                            worst_share(got, &want[(size_t)pos * p.q_width()], bound_of(n), max_v);
                        if (!(share <= worst)) {
                            worst = share;
                            snprintf(where, sizeof where, "(n %d, pos %d, of %d)", n, pos, kv_len_max);
                        }
                        for (int i = 0; i < n_repeats && pos == all_pos.back() && (n == 1 || n == 65); i++) {
                            repeats = repeats && p.run(n, kv_len_max) == got;
                        }
                    }
                }
            }
            snprintf(name, sizeof name, "head_dim %d, group %d", head_dim, group);
            report(worst, name, where);
            if (!repeats) {
                report(INFINITY, name, "(repeats differ)");
            }
        }
    }
    for (const unsigned letter : download(c->letters, N_LETTERS)) {
        if (letter != NO_LETTER) {
            report(INFINITY, "all letters were read");
            return;
        }
    }
    report(0, "all letters were read");
}

/* Equal weights: q = 0, the mean of integers over a power of two of positions. One weight: a key far ahead of
 * all others, its value itself. */
void test_exact(const CudaLaunch *c) {
    for (const int head_dim : head_dims) {
        for (const int n : {1, 2, 100}) {
            Problem p(c, 2, 2, head_dim, 300);
            p.fill(0, random_integer);
            const int pos = 256 - n;  // so that the last token sees 256 positions
            p.place(pos, n);
            std::vector<fp16> got = p.run(n, 300);
            bool same = true;
            for (int h = 0; h < 4; h++) {
                for (int d = 0; d < head_dim; d++) {
                    float sum = 0;
                    for (int j = 0; j < 256; j++) {
                        sum += fp16_to_float(p.v[p.row(h / 2, j) + (size_t)d]);
                    }
                    const float mean =
                        fp16_to_float(got[(size_t)(n - 1) * p.q_width() + (size_t)(h * head_dim + d)]);
                    same = same && mean == fp16_to_float(fp16_from_float(sum / 256));
                }
            }
            char name[100];
            snprintf(name, sizeof name, "mean of 256 integers, head_dim %d, n %d", head_dim, n);
            report(same ? 0 : INFINITY, name);

            const int target = 97;
            for (int at = 0; at < 300; at++) {
                for (int h = 0; h < 2; h++) {
                    p.k[p.row(h, at)] = fp16_from_float(at == target ? 2 : -2);
                }
                for (int h = 0; h < 4; h++) {
                    p.q[(size_t)at * p.q_width() + (size_t)(h * head_dim)] = fp16_from_float(4000);
                }
            }
            p.place(pos, n);
            got = p.run(n, 300);
            same = true;
            for (size_t i = 0; i < got.size(); i++) {
                const int h = (int)(i % p.q_width()) / head_dim;
                const fp16 want = p.v[p.row(h / 2, target) + i % (size_t)head_dim];
                same = same && fp16_to_float(got[i]) == fp16_to_float(want);
            }
            snprintf(name, sizeof name, "one weight, head_dim %d, n %d", head_dim, n);
            report(same ? 0 : INFINITY, name);
        }
    }
}

/* Something not finite among what a head sees: no output of that head may look finite where it matters. */
void test_faults(const CudaLaunch *c) {
    enum { KEY_TO_MINUS_INFINITY, KEY_NAN, QUERY, VALUE };
    const char *const names[] = {"key inf, score -inf", "key NaN", "query inf", "value inf"};
    for (int kind = 0; kind < 4; kind++) {
        for (const int n : {1, 40}) {
            Problem p(c, 2, 2, 64, 400);
            p.fill(1, random_normal);
            const int pos = 300, bad = 123;
            // Kv head 1, so query heads 2 and 3; heads 0 and 1 stay clean.
            for (int t = 0; t < n; t++) {
                for (int h = 2; h < 4; h++) {
                    fp16 *query = &p.q[(size_t)(pos + t) * p.q_width() + (size_t)h * 64];
                    query[5] = fp16_from_float(kind == QUERY ? INFINITY : -1);
                }
            }
            if (kind == KEY_TO_MINUS_INFINITY || kind == KEY_NAN) {
                p.k[p.row(1, bad) + 5] = fp16_from_float(kind == KEY_NAN ? NAN : INFINITY);
            } else if (kind == VALUE) {
                p.v[p.row(1, bad) + 5] = fp16_from_float(INFINITY);
            }
            p.place(pos, n);
            const std::vector<fp16> got = p.run(n, 400);
            bool right = true;
            for (int t = 0; t < n; t++) {
                for (int h = 0; h < 4; h++) {
                    bool finite = true;
                    for (int d = 0; d < 64; d++) {
                        finite =
                            finite && fp16_is_finite(got[(size_t)t * p.q_width() + (size_t)(h * 64 + d)]);
                    }
                    right = right && finite == (h < 2);
                }
            }
            char name[100];
            snprintf(name, sizeof name, "fault: %s, n %d", names[kind], n);
            report(right ? 0 : INFINITY, name);
        }
    }
}

/* cases.md row 33. A decode step captured once and replayed at other positions gives what direct launches give. */
void test_graph(const CudaLaunch *c) {
    const int seq_len = 1600;
    for (const int group : sizes({1, 4, 8}, {4})) {
        Problem p(c, 4, group, 128, seq_len);
        p.fill(2, random_normal);
        p.place(0, 1);
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CUDA_CHECK(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
        attention_cuda(c, p.dout, p.dq, p.dk, p.dv, NULL, NULL, &p.shape, p.dpos, 1, seq_len);
        CUDA_CHECK(cudaStreamEndCapture(c->stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
        const std::vector<int> positions = sizes({0, 1599, 64, 1023, 1024, 31}, {1599, 31});
        std::vector<char> wanted((size_t)seq_len, 0);
        for (const int pos : positions) {
            wanted[(size_t)pos] = 1;
        }
        const std::vector<double> want = reference(p, wanted);
        double worst = 0;
        for (const int pos : positions) {
            p.place(pos, 1);
            const std::vector<fp16> direct = p.run(1, seq_len);
            CUDA_CHECK(cudaMemset(p.dout, 0xff, p.q_width() * sizeof(fp16)));
            CUDA_CHECK(cudaGraphLaunch(exec, c->stream));
            CUDA_CHECK(cudaStreamSynchronize(c->stream));
            const std::vector<fp16> got = download(p.dout, p.q_width());
            worst = std::max(worst, got == direct ? worst_share(got, &want[(size_t)pos * p.q_width()],
                                                                bound_of(1), max_magnitude(p.v))
                                                  : (double)INFINITY);
        }
        CUDA_CHECK(cudaGraphExecDestroy(exec));
        CUDA_CHECK(cudaGraphDestroy(graph));
        char name[100];
        snprintf(name, sizeof name, "graph replay, group %d", group);
        report(worst, name);
    }
}

/* Steps whose kernels follow one another in a graph with nothing between them, as in decoding: the product that makes
 * q, k and v, attention, the next product. What attention reads before it waits for the product must be there already:
 * the same bits with launches that overlap and with ones that do not. */
void test_overlap(const CudaLaunch *c) {
    const int n_steps = is_short ? 4 : 150, cols = 1024;
    for (const int group : sizes({1, 4, 8}, {1})) {
        AttentionShape shape = {};
        shape.n_kv_heads = 4;
        shape.n_heads = shape.n_kv_heads * group;
        shape.head_dim = 128;
        shape.seq_len = n_steps;
        const size_t width = (size_t)shape.n_heads * (size_t)shape.head_dim, n_out = width * (size_t)n_steps;
        const size_t cache = (size_t)shape.n_kv_heads * (size_t)shape.seq_len * (size_t)shape.head_dim;
        Matrix w = {};
        w.rows = (size_t)(shape.n_heads + 2 * shape.n_kv_heads) * (size_t)shape.head_dim;
        w.format = FORMAT_DENSE;
        w.cols = w.stride = (size_t)cols;
        fp16 *weights = device_alloc<fp16>(w.rows * w.cols), *x = device_alloc<fp16>((size_t)(n_steps * cols));
        fp16 *k = device_alloc<fp16>(cache), *v = device_alloc<fp16>(cache), *out = device_alloc<fp16>(n_out);
        float *qkv = device_alloc<float>(w.rows);
        float *rope = device_alloc<float>((size_t)(n_steps * shape.head_dim));
        int *pos = device_alloc<int>((size_t)n_steps);
        std::vector<int> positions;
        std::vector<float> angles;
        for (int t = 0; t < n_steps; t++) {
            positions.push_back(t);
            for (int i = 0; i < shape.head_dim / 2; i++) {
                angles.push_back(cosf((float)(t * i)));
                angles.push_back(sinf((float)(t * i)));
            }
        }
        upload(weights, random_values(w.rows * w.cols, 0.05f, random_normal).data(), w.rows * w.cols);
        upload(x, random_values((size_t)(n_steps * cols), 1, random_normal).data(), (size_t)(n_steps * cols));
        upload(rope, angles.data(), angles.size());
        upload(pos, positions.data(), positions.size());
        w.dense = weights;
        std::vector<fp16> got[2];
        for (const bool overlap : {false, true}) {
            CudaLaunch launch = *c;
            launch.overlap = overlap && can_overlap_cuda();
            for (fp16 *cached : {k, v}) {
                CUDA_CHECK(cudaMemset(cached, 0xff, cache * sizeof(fp16)));
            }
            CUDA_CHECK(cudaMemset(out, 0xff, n_out * sizeof(fp16)));
            CUDA_CHECK(cudaDeviceSynchronize());
            cudaGraph_t graph;
            cudaGraphExec_t exec;
            CUDA_CHECK(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
            for (int t = 0; t < n_steps; t++) {
                gemv_cuda(&launch, qkv, &w, x + t * cols, EPILOGUE_STORE);
                attention_cuda(&launch, out + (size_t)t * width, NULL, k, v, qkv, rope, &shape, pos + t, 1, n_steps);
            }
            CUDA_CHECK(cudaStreamEndCapture(c->stream, &graph));
            CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
            CUDA_CHECK(cudaGraphLaunch(exec, c->stream));
            CUDA_CHECK(cudaStreamSynchronize(c->stream));
            CUDA_CHECK(cudaGraphExecDestroy(exec));
            CUDA_CHECK(cudaGraphDestroy(graph));
            got[overlap] = download(out, n_out);
        }
        const bool finite = std::all_of(got[0].begin(), got[0].end(), [](fp16 h) { return (h & 0x7c00) != 0x7c00; });
        char name[100];
        snprintf(name, sizeof name, "%d steps that overlap, group %d", n_steps, group);
        report(finite && got[0] == got[1] ? 0 : (double)INFINITY, name,
               can_overlap_cuda() ? "" : "(they cannot here)");
        for (void *p : {(void *)weights, (void *)x, (void *)k, (void *)v, (void *)out, (void *)qkv, (void *)rope,
                        (void *)pos}) {
            CUDA_CHECK(cudaFree(p));
        }
    }
}

/* Median microseconds of one call, over graphs that go through copies of the cache that exceed the L2 cache. */
double time_call(const CudaLaunch *c, const AttentionShape &shape, int pos, int n) {
    const size_t cache = (size_t)shape.n_kv_heads * (size_t)shape.seq_len * (size_t)shape.head_dim;
    const size_t width = (size_t)shape.n_heads * (size_t)shape.head_dim;
    const size_t visible = 4 * (size_t)(pos + n) * (size_t)shape.n_kv_heads * (size_t)shape.head_dim;
    const int copies = n > 1 ? 2 : (int)std::min<size_t>(64, ((size_t)256 << 20) / visible + 2);
    fp16 *k = device_alloc<fp16>(cache * (size_t)copies), *v = device_alloc<fp16>(cache * (size_t)copies);
    fp16 *q = device_alloc<fp16>(width * (size_t)n), *out = device_alloc<fp16>(width * (size_t)n);
    int *dpos = device_alloc<int>(1);
    std::vector<fp16> some = random_values((size_t)1 << 18, 1, random_normal);
    while (some.size() < std::max(cache, width * (size_t)n)) {
        const std::vector<fp16> half = some;
        some.insert(some.end(), half.begin(), half.end());
    }
    upload(k, some.data(), cache);
    for (int i = 0; i < copies; i++) {
        for (fp16 *to : {k + (size_t)i * cache, v + (size_t)i * cache}) {
            if (to != k) {
                CUDA_CHECK(cudaMemcpy(to, k, cache * sizeof(fp16), cudaMemcpyDeviceToDevice));
            }
        }
    }
    upload(q, some.data(), width * (size_t)n);
    upload(dpos, &pos, 1);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA_CHECK(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < copies; i++) {
        attention_cuda(c, out, q, k + (size_t)i * cache, v + (size_t)i * cache, NULL, NULL, &shape, dpos, n,
                       shape.seq_len);
    }
    CUDA_CHECK(cudaStreamEndCapture(c->stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    std::vector<float> times;
    for (int i = 0; i < 3 + 15; i++) {
        CUDA_CHECK(cudaEventRecord(begin, c->stream));
        CUDA_CHECK(cudaGraphLaunch(exec, c->stream));
        CUDA_CHECK(cudaEventRecord(end, c->stream));
        CUDA_CHECK(cudaEventSynchronize(end));
        float ms;
        CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) {
            times.push_back(ms);
        }
    }
    std::nth_element(times.begin(), times.begin() + 7, times.end());
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    CUDA_CHECK(cudaGraphExecDestroy(exec));
    CUDA_CHECK(cudaGraphDestroy(graph));
    for (void *p : {(void *)k, (void *)v, (void *)q, (void *)out, (void *)dpos}) {
        CUDA_CHECK(cudaFree(p));
    }
    return (double)times[7] * 1e3 / copies;
}

void time_all(const CudaLaunch *c) {
    const struct {
        const char *name;
        AttentionShape shape;
    } models[] = {
        {"llama2-7b", {32, 32, 128, 4096}},
        {"llama2-70b", {64, 8, 128, 4096}},
        {"llama3-8b", {32, 8, 128, 4096}},
        {"tinyllama-1.1b", {32, 4, 64, 4096}},
    };
    printf("\n%-16s %-8s %8s %10s %10s\n", "decode", "", "context", "us", "GB/s");
    for (const auto &m : models) {
        for (const int context : {128, 512, 2048, 4096}) {
            const double us = time_call(c, m.shape, context - 1, 1);
            const double bytes = 4.0 * context * m.shape.n_kv_heads * m.shape.head_dim;
            printf("%-16s %-8s %8d %10.2f %10.0f\n", m.name, "", context, us, bytes / us * 1e-3);
        }
    }
    printf("\n%-16s %8s %8s %10s %10s\n", "prefill", "tokens", "pos", "us", "TFLOP/s");
    const struct {
        int n, pos;
    } chunks[] = {{16, 1024}, {128, 0}, {512, 0}, {512, 1536}, {2048, 0}, {4096, 0}};
    for (const auto &m : models) {
        for (const auto &chunk : chunks) {
            const double us = time_call(c, m.shape, chunk.pos, chunk.n);
            const double pairs = (double)chunk.n * chunk.pos + 0.5 * chunk.n * (chunk.n + 1.0);
            printf("%-16s %8d %8d %10.1f %10.1f\n", m.name, chunk.n, chunk.pos, us,
                   4 * pairs * m.shape.n_heads * m.shape.head_dim / us * 1e-6);
        }
    }
}

}  // namespace

int main(void) {
    const CudaLaunch c = make_launch();
    printf("seed %u\n", SEED);
    test_exact(&c);
    test_faults(&c);
    test_graph(&c);
    test_overlap(&c);
    test_against_reference(&c);
    if (is_short) {
        printf("left out (SPDP_TEST_SHORT): most head sizes, groups, chunks and positions, times\n");
    } else {
        time_all(&c);
    }
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}
