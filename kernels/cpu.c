/* The CPU backend: memory is the process's own, operations are complete when they return. This file divides
 * the work among threads; the inner loops are in cpu_kernels.c. Work is cut by the shapes alone and partial
 * sums are added in a fixed order, so results do not depend on the number of threads. */
#include "backend.h"

#include <math.h>
#include <omp.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include "cpu_kernels.h"

#define MAX_TOKENS 192      // tokens of a prefill chunk: whole groups of 12, 6 and 4
#define DENSE_TASK_ROWS 32  // rows of a dense matrix that a thread claims at once
#define SLICED_TILE_ROWS 32 // a matrix with fewer tile rows is cut along K too
#define MIN_SLICE_COLS 256
#define KEY_BLOCK 64        // positions that attention takes at once
#define QUERY_BLOCK 8       // tokens that share a walk over keys and values
#define CONTEXT_SLICE 512   // positions of a decode step's context that one task takes
#define SERIAL_WORK 100000  // multiply-adds below which waking other threads costs more than it gains

enum { SCRATCH_X, SCRATCH_ACTIVE, SCRATCH_WORK, SCRATCH_OUT, SCRATCH_PANELS, N_SCRATCH };

typedef struct {
    const CpuKernels *k;
    int n_threads;
    bool fault;  // an input was not finite; where:
    int fault_layer;
    Site fault_site;
    void *scratch[N_SCRATCH];  // grown on demand, kept between calls
    size_t scratch_bytes[N_SCRATCH];
    void **matrices;  // random ones, freed with the backend
    size_t n_matrices;
} Cpu;

/* Threads for an operation of so many multiply-adds. */
static int threads_for(const Cpu *cpu, size_t work) { return work < SERIAL_WORK ? 1 : cpu->n_threads; }

/* Memory of at least bytes that stays valid until the next request for the same slot. Running out of memory
 * in the middle of a forward pass cannot be repaired, so it ends the program with a message. */
static void *scratch(Cpu *cpu, int slot, size_t bytes) {
    if (cpu->scratch_bytes[slot] < bytes) {
        free(cpu->scratch[slot]);
        cpu->scratch[slot] = memory_alloc(bytes);
        if (!cpu->scratch[slot]) {
            fprintf(stderr, "out of memory: %zu bytes of work space for a product\n", bytes);
            exit(1);
        }
        cpu->scratch_bytes[slot] = bytes;
    }
    return cpu->scratch[slot];
}

/* Bytes of address space that the process may still take. */
static size_t address_space_left(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return SIZE_MAX;
    }
    FILE *f = fopen("/proc/self/statm", "r");
    size_t pages = 0;
    if (f) {
        pages = fscanf(f, "%zu", &pages) == 1 ? pages : 0;
        fclose(f);
    }
    const size_t used = pages * (size_t)sysconf(_SC_PAGESIZE);
    return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

/* Bytes that can still be had without swapping; SIZE_MAX if the system does not say. */
static size_t memory_available(void) {
    FILE *f = fopen("/proc/meminfo", "r");
    size_t kib = SIZE_MAX / 1024;
    char line[128];
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %zu", &kib) != 1) {
    }
    if (f) {
        fclose(f);
    }
    return min_size(kib * 1024, address_space_left());
}

/* From calloc, so that pages of a long cache cost nothing before they are used; the pointer that free() wants
 * stands just before the aligned block. */
static void *cpu_alloc(Backend *be, size_t bytes) {
    (void)be;
    const size_t extra = 128 + MEMORY_SLACK;
    // The system promises more than it has and kills who believes it, so large requests are checked.
    if (bytes > SIZE_MAX - extra || (bytes > (size_t)1 << 28 && bytes > memory_available())) {
        return NULL;
    }
    char *raw = calloc(1, bytes + extra);
    if (!raw) {
        return NULL;
    }
    char *p = raw + 128 - (uintptr_t)raw % 64;
    memcpy(p - sizeof raw, &raw, sizeof raw);
    return p;
}

static void cpu_release(Backend *be, void *p) {
    (void)be;
    if (p) {
        char *raw;
        memcpy(&raw, (char *)p - sizeof raw, sizeof raw);
        free(raw);
    }
}

static const void *cpu_upload(Backend *be, const void *host, size_t bytes) {
    (void)be;
    (void)bytes;
    return host;
}

static void cpu_write(Backend *be, void *to, const void *host, size_t bytes) {
    (void)be;
    memcpy(to, host, bytes);
}

static void cpu_read(Backend *be, void *host, const void *from, size_t bytes) {
    (void)be;
    memcpy(host, from, bytes);
}

static size_t cpu_memory_free(Backend *be) {
    (void)be;
    return memory_available();
}

/* Input and output as floats, and the input in the order of panel_product. */
static size_t cpu_product_bytes(Backend *be, const Matrix *w, int n, bool swiglu) {
    (void)be;
    (void)swiglu;
    return (size_t)n * (w->rows + 2 * w->cols) * sizeof(float);
}

/* Remember memory that is freed with the backend; false, with the memory freed, when there is no room to. */
static bool own(Cpu *cpu, void *memory) {
    void **matrices = realloc(cpu->matrices, (cpu->n_matrices + 1) * sizeof *matrices);
    if (!matrices) {
        free(memory);
        return false;
    }
    cpu->matrices = matrices;
    matrices[cpu->n_matrices++] = memory;
    return true;
}

static bool cpu_random_matrix(Backend *be, Matrix *w, size_t *nnz, const RandomWeights *weights) {
    Cpu *cpu = be->ctx;
    const size_t stride = dense_stride(w->cols);
    size_t bytes, n = 0;
    fp16 *dense = size_mul(&bytes, w->rows, stride * sizeof *dense) ? memory_alloc(bytes) : NULL;
    if (!dense) {
        return false;
    }
#pragma omp parallel for num_threads(cpu->n_threads) schedule(static) reduction(+ : n)
    for (size_t row = 0; row < w->rows; row++) {
        fp16 *out = dense + row * stride;
        random_weights_row(out, weights, row, w->cols);
        for (size_t k = 0; k < w->cols; k++) {
            n += !fp16_is_zero(out[k]);
        }
    }
    *nnz = n;
    if (w->format == FORMAT_DENSE) {
        w->dense = dense;
        w->stride = stride;
        return own(cpu, dense);
    }
    void *block;
    const int rc = tiled_cbc_encode(&w->cbc, &block, NULL, dense, w->rows, w->cols, stride, cpu->n_threads, NULL);
    free(dense);
    return rc == OK && own(cpu, block);
}

static double cpu_energy_joules(Backend *be) {
    (void)be;
    return NAN;
}

/* Mean of all cores, as Linux tells it on x86. */
static double cpu_clock_mhz(Backend *be) {
    (void)be;
    FILE *f = fopen("/proc/cpuinfo", "r");
    char line[256];
    double sum = 0, mhz;
    int n = 0;
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "cpu MHz : %lf", &mhz) == 1) {
            sum += mhz;
            n++;
        }
    }
    if (f) {
        fclose(f);
    }
    return n > 0 ? sum / n : NAN;
}

/* 1 GiB, cut among the threads as they first touched it. */
static double cpu_read_ceiling(Backend *be) {
    const int n_threads = ((Cpu *)be->ctx)->n_threads;
    const size_t n = (size_t)1 << 27;
    uint64_t *p = cpu_alloc(be, n * sizeof *p);
    if (!p) {
        return NAN;
    }
#pragma omp parallel for num_threads(n_threads) schedule(static)
    for (size_t i = 0; i < n; i++) {
        p[i] = i;
    }
    double best = 0;
    volatile uint64_t sink;  // so that the sums are not dropped
    for (int repeat = 0; repeat < 5; repeat++) {
        uint64_t sum = 0;
        const double start = time_ms();
#pragma omp parallel for num_threads(n_threads) schedule(static) reduction(+ : sum)
        for (size_t i = 0; i < n; i++) {
            sum += p[i];
        }
        best = fmax(best, (double)(n * sizeof *p) / (time_ms() - start) * 1e-6);
        sink = sum;
    }
    (void)sink;
    cpu_release(be, p);
    return best;
}

static bool cpu_begin_step(Backend *be, bool repeats) {
    (void)be;
    (void)repeats;
    return true;
}

static void cpu_end_step(Backend *be) { (void)be; }

static void cpu_embed(Backend *be, float *out, const Matrix *table, const int *ids, int n) {
    const Cpu *cpu = be->ctx;
    for (int i = 0; i < n; i++) {
        cpu->k->to_float(out + (size_t)i * table->cols, table->dense + (size_t)ids[i] * table->stride,
                         table->cols);
    }
}

static void cpu_rmsnorm(Backend *be, fp16 *out, const float *x, const fp16 *weight, int n, int dim, float eps) {
    const Cpu *cpu = be->ctx;
    const size_t d = (size_t)dim;
#pragma omp parallel for num_threads(cpu->n_threads) if (n > 1)
    for (int t = 0; t < n; t++) {
        const float *row = x + (size_t)t * d;
        const float factor = 1.0f / sqrtf(cpu->k->dot(row, row, d) / (float)dim + eps);
        float part[64];
        for (size_t i = 0; i < d; i += 64) {
            const size_t m = min_size(64, d - i);
            cpu->k->to_float(part, weight + i, m);
            for (size_t j = 0; j < m; j++) {
                part[j] *= row[i + j] * factor;
            }
            cpu->k->to_fp16(out + (size_t)t * d + i, part, m);
        }
    }
}

/* x in fp32, remembering the first input that is not finite. */
static const float *input_as_float(Cpu *cpu, const Matrix *w, const fp16 *x, size_t n) {
    const size_t count = n * w->cols;
    bool finite = true;
    for (size_t i = 0; i < count; i++) {
        finite &= fp16_is_finite(x[i]);
    }
    if (!finite && !cpu->fault) {
        cpu->fault = true;
        cpu->fault_layer = w->layer;
        cpu->fault_site = w->site;
    }
    float *xf = scratch(cpu, SCRATCH_X, count * sizeof *xf);
    cpu->k->to_float(xf, x, count);
    return xf;
}

static void count_product(ProductStats *s, const Matrix *w, size_t n_active, size_t active_nnz) {
    if (w->format == FORMAT_DENSE) {
        s->bytes += w->rows * w->stride * sizeof(fp16);
        return;
    }
    const size_t tile_rows = tiled_cbc_tile_rows(w->rows), columns = tile_rows * tiled_cbc_cols_padded(w->cols);
    s->elements += w->rows * w->cols;
    s->active_elements += w->rows * n_active;
    s->active_nonzeros += active_nnz;
    // All ColInfo and TileOffset, but only the active columns' bitmaps and values.
    s->bytes += sizeof(uint32_t) * (columns + columns / TILE_K + 1) +
                tile_rows * n_active * BITMAP_WORDS * sizeof(uint64_t) + active_nnz * sizeof(fp16);
}

/* Dense matrix x vector: y (rows). */
static void dense_product(Cpu *cpu, float *y, const Matrix *w, const float *x) {
#pragma omp parallel for num_threads(threads_for(cpu, w->rows * w->cols)) schedule(dynamic)
    for (size_t row = 0; row < w->rows; row += DENSE_TASK_ROWS) {
        cpu->k->dense_rows(y + row, w->dense + row * w->stride, w->stride,
                           min_size(DENSE_TASK_ROWS, w->rows - row), x, w->cols);
    }
}

/* spMspV: y (rows) = W x over the columns whose input passes the threshold. */
static void cbc_product(Cpu *cpu, float *y, const Matrix *w, const float *x, float threshold,
                        ProductStats *stats) {
    // The list of active columns, made once: the inner loop then has nothing to skip.
    uint32_t *active = scratch(cpu, SCRATCH_ACTIVE, (w->cols + 1) * sizeof *active);
    const size_t tile_rows = tiled_cbc_tile_rows(w->rows);
    const size_t slices = tile_rows >= SLICED_TILE_ROWS
                              ? 1
                              : min_size(ceil_div(SLICED_TILE_ROWS, tile_rows), ceil_div(w->cols, MIN_SLICE_COLS));
    const size_t slice_cols = ceil_div(w->cols, slices);
    size_t slice_begin[SLICED_TILE_ROWS + 1] = {0};
    size_t n_active = 0;
    for (size_t s = 0; s < slices; s++) {
        slice_begin[s] = n_active;
        for (size_t k = s * slice_cols; k < min_size((s + 1) * slice_cols, w->cols); k++) {
            active[n_active] = (uint32_t)k;
            n_active += fabsf(x[k]) > threshold;
        }
    }
    slice_begin[slices] = n_active;

    float *partial = scratch(cpu, SCRATCH_WORK, tile_rows * slices * TILE_M * sizeof *partial);
    size_t nnz = 0;
#pragma omp parallel num_threads(threads_for(cpu, w->rows * n_active)) reduction(+ : nnz)
    {
#pragma omp for schedule(dynamic)
        for (size_t task = 0; task < tile_rows * slices; task++) {
            const size_t s = task % slices;
            float sum[TILE_M] __attribute__((aligned(64)));  // a thread's own: no line shared with others
            nnz += cpu->k->cbc_columns(sum, &w->cbc, task / slices, active + slice_begin[s],
                                       slice_begin[s + 1] - slice_begin[s], x);
            memcpy(partial + task * TILE_M, sum, sizeof sum);
        }
#pragma omp for schedule(static)
        for (size_t row = 0; row < w->rows; row++) {
            const float *p = partial + row / TILE_M * slices * TILE_M + row % TILE_M;
            float sum = 0;
            for (size_t s = 0; s < slices; s++) {
                sum += p[s * TILE_M];
            }
            y[row] = sum;
        }
    }
    count_product(stats, w, n_active, nnz);
}

/* Inputs in the order that panel_product reads: packed[block of columns][group][column][token], elements under
 * the threshold as zero. */
static void pack_inputs(Cpu *cpu, float *packed, const float *x, size_t n, size_t cols, float threshold) {
    const size_t group = (size_t)cpu->k->group_tokens, n_groups = ceil_div(n, group);
#pragma omp parallel for num_threads(cpu->n_threads) schedule(static)
    for (size_t col = 0; col < cols; col += PANEL_COLS) {
        float *block = packed + col * n_groups * group;
        for (size_t t = 0; t < n_groups * group; t++) {
            float *out = block + t / group * PANEL_COLS * group + t % group;
            for (size_t c = 0; c < min_size(PANEL_COLS, cols - col); c++) {
                const float v = t < n ? x[t * cols + col + c] : 0;
                out[c * group] = fabsf(v) > threshold ? v : 0;
            }
        }
    }
}

/* SpMM and its dense counterpart: y (n, rows) = W x. A thread takes a tile row and a range of token groups,
 * decodes panels of it into its cache and multiplies them with all its tokens. */
static void panel_products(Cpu *cpu, float *y, const Matrix *w, const float *x, size_t n, float threshold) {
    const size_t group = (size_t)cpu->k->group_tokens, n_groups = ceil_div(n, group);
    float *packed = scratch(cpu, SCRATCH_WORK,
                            ceil_div(w->cols, PANEL_COLS) * PANEL_COLS * n_groups * group * sizeof *packed);
    pack_inputs(cpu, packed, x, n, w->cols, threshold);

    const size_t tile_rows = tiled_cbc_tile_rows(w->rows);
    const size_t want = ceil_div(2 * (size_t)cpu->n_threads, tile_rows);  // token ranges that fill all threads
    const size_t range = ceil_div(n_groups, min_size(want, n_groups)), n_ranges = ceil_div(n_groups, range);
    const size_t thread_floats = TILE_M * (PANEL_COLS + range * group);
    float *panels = scratch(cpu, SCRATCH_PANELS, (size_t)cpu->n_threads * thread_floats * sizeof *panels);
#pragma omp parallel num_threads(cpu->n_threads)
    {
        float *panel = panels + (size_t)omp_get_thread_num() * thread_floats, *sums = panel + TILE_M * PANEL_COLS;
#pragma omp for schedule(dynamic)
        for (size_t task = 0; task < tile_rows * n_ranges; task++) {
            const size_t tile_row = task / n_ranges, row = tile_row * TILE_M;
            const size_t first = task % n_ranges * range, groups = min_size(range, n_groups - first);
            const size_t n_rows = min_size(TILE_M, w->rows - row);
            memset(sums, 0, groups * group * TILE_M * sizeof *sums);
            for (size_t col = 0; col < w->cols; col += PANEL_COLS) {
                const size_t n_cols = min_size(PANEL_COLS, w->cols - col);
                if (w->format == FORMAT_DENSE) {
                    cpu->k->unpack_dense(panel, w->dense + row * w->stride + col, w->stride, n_rows, n_cols);
                } else {
                    cpu->k->unpack_cbc(panel, &w->cbc, tile_row, col, n_cols);
                }
                cpu->k->panel_product(sums, panel, n_cols,
                                      packed + (col * n_groups + first * PANEL_COLS) * group, groups);
            }
            const size_t end = min_size(n, (first + groups) * group);
            for (size_t t = first * group; t < end; t++) {
                memcpy(y + t * w->rows + row, sums + (t - first * group) * TILE_M, n_rows * sizeof *y);
            }
        }
    }
}

static void cpu_matmul(Backend *be, float *out, const Matrix *w, const fp16 *x, int n, const float *threshold) {
    Cpu *cpu = be->ctx;
    const float *xf = input_as_float(cpu, w, x, (size_t)n);
    // |x| > 0 keeps all but exact zeros, which add nothing; a dense matrix always sees its whole input.
    const float t = threshold && w->format == FORMAT_TILED_CBC ? *threshold : 0;
    if (n > 1) {
        panel_products(cpu, out, w, xf, (size_t)n, t);
    } else if (w->format == FORMAT_DENSE) {
        dense_product(cpu, out, w, xf);
        count_product(&be->stats[w->site], w, w->cols, 0);
    } else {
        cbc_product(cpu, out, w, xf, t, &be->stats[w->site]);
    }
}

static void cpu_matmul_add(Backend *be, float *out, const Matrix *w, const fp16 *x, int n,
                           const float *threshold) {
    Cpu *cpu = be->ctx;
    const size_t count = (size_t)n * w->rows;
    float *y = scratch(cpu, SCRATCH_OUT, count * sizeof *y);
    cpu_matmul(be, y, w, x, n, threshold);
    cpu->k->add_scaled(out, 1.0f, y, count);
}

static void cpu_matmul_swiglu(Backend *be, fp16 *out, const Matrix *w, const fp16 *x, int n,
                              const float *threshold) {
    Cpu *cpu = be->ctx;
    const size_t count = (size_t)n * w->rows / 2;
    float *y = scratch(cpu, SCRATCH_OUT, 2 * count * sizeof *y);
    cpu_matmul(be, y, w, x, n, threshold);
#pragma omp parallel for num_threads(threads_for(cpu, 16 * count)) schedule(static)
    for (size_t begin = 0; begin < count; begin += 256) {
        cpu->k->swiglu(out + begin, y + 2 * begin, min_size(256, count - begin));
    }
}

/* One head vector, rotated pair by pair, as fp16. */
static void rotate(const CpuKernels *k, fp16 *out, const float *x, const float *rope, int head_dim) {
    float rotated[256];
    CHECK(head_dim <= 256);
    for (int i = 0; i < head_dim; i += 2) {
        const float c = rope[i], s = rope[i + 1];
        rotated[i] = x[i] * c - x[i + 1] * s;
        rotated[i + 1] = x[i] * s + x[i + 1] * c;
    }
    k->to_fp16(out, rotated, (size_t)head_dim);
}

static void rope_append(const Cpu *cpu, fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv, const float *rope,
                        const AttentionShape *shape, const int *pos, int n) {
    const size_t hd = (size_t)shape->head_dim, n_heads = (size_t)shape->n_heads;
    const size_t n_kv = (size_t)shape->n_kv_heads;
#pragma omp parallel for num_threads(cpu->n_threads) if (n > 1)
    for (int t = 0; t < n; t++) {
        const size_t p = (size_t)(*pos + t);
        const float *row = qkv + (size_t)t * (n_heads + 2 * n_kv) * hd;
        const float *angles = rope + p * hd;
        for (size_t h = 0; h < n_heads; h++) {
            rotate(cpu->k, q + ((size_t)t * n_heads + h) * hd, row + h * hd, angles, shape->head_dim);
        }
        for (size_t h = 0; h < n_kv; h++) {
            const size_t at = (h * (size_t)shape->seq_len + p) * hd;
            rotate(cpu->k, k_cache + at, row + (n_heads + h) * hd, angles, shape->head_dim);
            cpu->k->to_fp16(v_cache + at, row + (n_heads + n_kv + h) * hd, hd);
        }
    }
}

/* A running softmax over part of the context: weights are exp(score - max). */
typedef struct {
    float max, sum;
    float *out;  // (head_dim) weighted sum of values
} Softmax;

/* Take m more positions with these scores (destroyed) and values (m, head_dim). */
static void softmax_add(const CpuKernels *k, Softmax *s, float *scores, const float *values, size_t m,
                        size_t head_dim) {
    float max = s->max;
    for (size_t j = 0; j < m; j++) {
        max = scores[j] > max ? scores[j] : max;
    }
    const float shrink = expf(s->max - max);  // 0 at first, when s->max is -infinity
    k->scale(s->out, shrink, head_dim);
    s->sum = s->sum * shrink + k->exp_all(scores, max, m);
    s->max = max;
    for (size_t j = 0; j < m; j++) {
        k->add_scaled(s->out, scores[j], values + j * head_dim, head_dim);
    }
}

/* What one attention task covers. */
typedef struct {
    int kv_head, first_token, n_tokens;  // tokens of the call
    int begin, end;                      // positions of keys and values
} AttentionTask;

/* Attend from all query heads of a kv head to the positions of a task. state (n_tokens * heads of the group)
 * is in order of token, then head. Each key and value is read once. */
static void attend(const CpuKernels *k, Softmax *state, const AttentionTask *task, const fp16 *q,
                   const fp16 *k_cache, const fp16 *v_cache, const AttentionShape *shape, int pos) {
    const size_t hd = (size_t)shape->head_dim, n_heads = (size_t)shape->n_heads;
    const int group = shape->n_heads / shape->n_kv_heads;
    const float inv_sqrt = 1.0f / sqrtf((float)shape->head_dim);
    const size_t cache_start = (size_t)task->kv_head * (size_t)shape->seq_len * hd;
    float block[KEY_BLOCK * 256], values[KEY_BLOCK * 256];
    for (int begin = task->begin; begin < task->end; begin += KEY_BLOCK) {
        const int end = begin + KEY_BLOCK < task->end ? begin + KEY_BLOCK : task->end;
        const size_t at = cache_start + (size_t)begin * hd, count = (size_t)(end - begin) * hd;
        k->to_float(block, k_cache + at, count);
        k->to_float(values, v_cache + at, count);
        for (int t = 0; t < task->n_tokens; t++) {
            const int limit = pos + task->first_token + t + 1;  // a token sees itself and what came before
            const int m = (limit < end ? limit : end) - begin;
            for (int h = 0; h < group && m > 0; h++) {
                const size_t head = (size_t)(task->kv_head * group + h);
                float query[256], scores[KEY_BLOCK];
                k->to_float(query, q + ((size_t)(task->first_token + t) * n_heads + head) * hd, hd);
                for (int j = 0; j < m; j++) {
                    scores[j] = k->dot(query, block + (size_t)j * hd, hd) * inv_sqrt;
                }
                softmax_add(k, &state[t * group + h], scores, values, (size_t)m, hd);
            }
        }
    }
}

static void cpu_attention(Backend *be, fp16 *out, fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv,
                          const float *rope, const AttentionShape *shape, const int *pos, int n) {
    Cpu *cpu = be->ctx;
    rope_append(cpu, q, k_cache, v_cache, qkv, rope, shape, pos, n);
    const int group = shape->n_heads / shape->n_kv_heads, kv_len = *pos + n;
    const size_t hd = (size_t)shape->head_dim;
    // Many tokens are work enough for all threads; a single one is cut along its context.
    const int n_blocks = (int)ceil_div((size_t)n, QUERY_BLOCK);
    const int n_slices = n == 1 ? (int)ceil_div((size_t)kv_len, CONTEXT_SLICE) : 1;
    const size_t per_task = (size_t)(QUERY_BLOCK * group);
    const size_t n_tasks = (size_t)(shape->n_kv_heads * n_blocks * n_slices);
    Softmax *states = scratch(cpu, SCRATCH_WORK, n_tasks * per_task * sizeof *states);
    float *outs = scratch(cpu, SCRATCH_OUT, n_tasks * per_task * hd * sizeof *outs);
    const size_t work = 2 * (size_t)n * (size_t)kv_len * (size_t)shape->n_heads * hd;
#pragma omp parallel num_threads(threads_for(cpu, work))
    {
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < n_tasks; i++) {
            const int slice = (int)(i % (size_t)n_slices), block = (int)(i / (size_t)n_slices) % n_blocks;
            AttentionTask task = {
                .kv_head = (int)(i / (size_t)(n_slices * n_blocks)),
                .first_token = block * QUERY_BLOCK,
                .n_tokens = n - block * QUERY_BLOCK < QUERY_BLOCK ? n - block * QUERY_BLOCK : QUERY_BLOCK,
                .begin = slice * CONTEXT_SLICE,
            };
            task.end = *pos + task.first_token + task.n_tokens;
            if (n_slices > 1 && task.begin + CONTEXT_SLICE < task.end) {
                task.end = task.begin + CONTEXT_SLICE;
            }
            memset(outs + i * per_task * hd, 0, per_task * hd * sizeof *outs);
            for (size_t r = 0; r < per_task; r++) {
                states[i * per_task + r] = (Softmax){-INFINITY, 0, outs + (i * per_task + r) * hd};
            }
            attend(cpu->k, states + i * per_task, &task, q, k_cache, v_cache, shape, *pos);
        }
        // Join the slices of each token and head, in order.
#pragma omp for schedule(static)
        for (int i = 0; i < n * shape->n_heads; i++) {
            const int t = i / shape->n_heads, head = i % shape->n_heads;
            const size_t task = (size_t)((head / group * n_blocks + t / QUERY_BLOCK) * n_slices);
            const Softmax *slices =
                states + task * per_task + (size_t)(t % QUERY_BLOCK * group + head % group);
            float max = -INFINITY, sum = 0, result[256] = {0};
            for (int s = 0; s < n_slices; s++) {
                max = fmaxf(max, slices[(size_t)s * per_task].max);
            }
            for (int s = 0; s < n_slices; s++) {
                const Softmax *slice = &slices[(size_t)s * per_task];
                const float weight = expf(slice->max - max);
                sum += weight * slice->sum;
                cpu->k->add_scaled(result, weight, slice->out, hd);
            }
            cpu->k->scale(result, 1.0f / sum, hd);
            cpu->k->to_fp16(out + (size_t)i * hd, result, hd);
        }
    }
}

static int cpu_finish(Backend *be, Error *err) {
    Cpu *cpu = be->ctx;
    if (!cpu->fault) {
        return OK;
    }
    cpu->fault = false;
    return input_fault(cpu->fault_layer, cpu->fault_site, err);
}

static int cpu_sample(Backend *be, int *id, const float *logits, int n, const SampleParams *params,
                      uint64_t step, Error *err) {
    const int rc = cpu_finish(be, err);
    if (rc) {
        return rc;
    }
    for (int i = 0; i < n; i++) {
        if (!isfinite(logits[i])) {
            return logit_fault(err);
        }
    }
    *id = sample_token(logits, n, params, step, scratch(be->ctx, SCRATCH_WORK, sample_workspace(n)));
    return OK;
}

static void cpu_free(Backend *be) {
    Cpu *cpu = be->ctx;
    for (size_t i = 0; i < sizeof cpu->scratch / sizeof *cpu->scratch; i++) {
        free(cpu->scratch[i]);
    }
    for (size_t i = 0; i < cpu->n_matrices; i++) {
        free(cpu->matrices[i]);
    }
    free(cpu->matrices);
    free(cpu);
    free(be);
}

/* Does this machine run a table's instructions? */
static bool runs_here(const CpuKernels *k) {
#ifdef __x86_64__
    if (k == &cpu_kernels_avx512vbmi2) {
        return __builtin_cpu_supports("avx512vbmi2") && runs_here(&cpu_kernels_avx512);
    }
    if (k == &cpu_kernels_avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               runs_here(&cpu_kernels_avx2);
    }
    if (k == &cpu_kernels_avx2) {
        unsigned eax, ebx, ecx, edx;  // clang's __builtin_cpu_supports() does not know f16c
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt") &&
               __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    }
#endif
    return k == &cpu_kernels_portable;
}

/* The table of that name, or the best that runs here for NULL. */
static const CpuKernels *choose_kernels(const char *isa, Error *err) {
    static const CpuKernels *const best_first[] = {
#ifdef __x86_64__
        &cpu_kernels_avx512vbmi2, &cpu_kernels_avx512, &cpu_kernels_avx2,
#endif
        &cpu_kernels_portable,
    };
    char names[100] = "";
    for (size_t i = 0; i < sizeof best_first / sizeof *best_first; i++) {
        const CpuKernels *k = best_first[i];
        if (isa ? strcmp(k->name, isa) == 0 : runs_here(k)) {
            if (runs_here(k)) {
                return k;
            }
            error_set(err, ERR_USAGE, "this processor does not run the instruction set %s", isa);
            return NULL;
        }
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", k->name);
    }
    error_set(err, ERR_USAGE, "unknown instruction set %s (this build has %s)", isa, names);
    return NULL;
}

int backend_cpu(Backend **be, int n_threads, const char *isa, Error *err) {
    const CpuKernels *kernels = choose_kernels(isa, err);
    if (!kernels) {
        return ERR_USAGE;
    }
    Backend *b = calloc(1, sizeof *b);
    Cpu *cpu = calloc(1, sizeof *cpu);
    if (!b || !cpu) {
        free(b);
        free(cpu);
        return error_set(err, ERR_MEMORY, "no memory for the CPU backend");
    }
    *cpu = (Cpu){.k = kernels, .n_threads = n_threads > 0 ? n_threads : default_threads()};
    *b = (Backend){
        .name = "cpu",
        .max_tokens = MAX_TOKENS,
        .ctx = cpu,
        .alloc = cpu_alloc,
        .release = cpu_release,
        .upload = cpu_upload,
        .write = cpu_write,
        .read = cpu_read,
        .memory_free = cpu_memory_free,
        .product_bytes = cpu_product_bytes,
        .random_matrix = cpu_random_matrix,
        .energy_joules = cpu_energy_joules,
        .clock_mhz = cpu_clock_mhz,
        .read_ceiling = cpu_read_ceiling,
        .begin_step = cpu_begin_step,
        .end_step = cpu_end_step,
        .embed = cpu_embed,
        .rmsnorm = cpu_rmsnorm,
        .matmul = cpu_matmul,
        .matmul_add = cpu_matmul_add,
        .matmul_swiglu = cpu_matmul_swiglu,
        .attention = cpu_attention,
        .sample = cpu_sample,
        .finish = cpu_finish,
        .free = cpu_free,
    };
    snprintf(b->device, sizeof b->device, "CPU, %d thread%s, %s", cpu->n_threads,
             cpu->n_threads == 1 ? "" : "s", kernels->name);
    *be = b;
    return OK;
}
