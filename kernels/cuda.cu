/* The CUDA backend: one device, one stream. Launchers of the kernels are in cuda_*.cu; this file has the device, its
 * memory, the recorded decode step, and decides which kernel a product takes. */
#include <string.h>

#include <new>

#include "cublas.h"
#include "cuda_ops.cuh"
#include "nvml.h"

#define MAX_TOKENS 2048                          // tokens of a prefill chunk: expanding W is a sixth of its product
#define WORKSPACE_BYTES ((size_t)64 << 20)       // partial sums of SpMM, which cuts its work so that they fit
#define STAGING_BYTES ((size_t)32 << 20)         // of each of two pinned buffers for uploads
#define SMALL_UPLOAD ((size_t)1 << 20)           // not worth staging
#define SPMM_MAX_TOKENS 64                       // above, expanding W for cuBLAS is faster (tests/bench/NOTES.md)
#define SLAB_BYTES ((size_t)256 << 20)           // of an expanded part of W
#define RESERVED_BYTES ((size_t)256 << 20)       // for what driver and cuBLAS load when it is first used

/* Device memory that uploads own, freed with the backend. */
struct Upload {
    void *device;
    Upload *next;
};

struct Cuda {
    CudaLaunch launch;
    Cublas *cublas;
    Nvml *nvml;                 // NULL: none
    Upload *uploads;
    unsigned char *staging[2];
    cudaEvent_t staged[2];
    DeviceReport *host_report;  // pinned
    void *scratch;              // y of a SwiGLU whose product cannot finish it; expanded slabs
    size_t scratch_bytes;
    cudaGraphExec_t decode_step;
    int decode_steps_seen;
    bool recording, graphs;
};

static Cuda *cuda_of(Backend *be) { return static_cast<Cuda *>(be->ctx); }

/* ---- memory ---------------------------------------------------------------------------------------------------- */

/* NULL, and the reason why there is no memory. A refused allocation is an answer, not a fault: the context goes
 * on. */
static void *refuse(cudaError_t status, const char *kind, const char *what, size_t bytes, Error *err) {
    const size_t mib = (size_t)1 << 20;
    size_t free_bytes = 0, total;
    cudaMemGetInfo(&free_bytes, &total);
    cudaGetLastError();  // of both: the next launch is not to blame
    error_set(err, ERR_MEMORY, "CUDA: no %s for %s (%zu MiB asked, %zu MiB free on the device): %s", kind, what,
              ceil_div(bytes, mib), free_bytes / mib, cudaGetErrorString(status));
    return NULL;
}

void *device_alloc(size_t bytes, const char *what, Error *err) {
    void *p;
    const cudaError_t status = cudaMalloc(&p, bytes);
    return status == cudaSuccess ? p : refuse(status, "memory", what, bytes, err);
}

/* The same for memory of the host that the device copies from and to. */
static void *pinned_alloc(size_t bytes, const char *what, Error *err) {
    void *p;
    const cudaError_t status = cudaMallocHost(&p, bytes);
    return status == cudaSuccess ? p : refuse(status, "pinned memory", what, bytes, err);
}

static void *cuda_alloc(Backend *be, size_t bytes) {
    void *p = bytes > SIZE_MAX - MEMORY_SLACK ? NULL : device_alloc(bytes + MEMORY_SLACK, "a buffer", NULL);
    if (p) {
        CUDA_CHECK(cudaMemsetAsync(p, 0, bytes + MEMORY_SLACK, cuda_of(be)->launch.stream));
    }
    return p;
}

static void cuda_release(Backend *be, void *p) {
    (void)be;
    CUDA_CHECK(cudaFree(p));
}

/* From mapped pages through two pinned buffers in turn: the copy of one runs while the other is filled. */
static void copy_through_staging(Cuda *cuda, unsigned char *device, const unsigned char *host, size_t bytes) {
    for (size_t done = 0, i = 0; done < bytes; i++) {
        const size_t n = min_size(STAGING_BYTES, bytes - done);
        unsigned char *buffer = cuda->staging[i % 2];
        CUDA_CHECK(cudaEventSynchronize(cuda->staged[i % 2]));
#pragma omp parallel for schedule(static)
        for (size_t part = 0; part < n; part += SMALL_UPLOAD) {
            memcpy(buffer + part, host + done + part, min_size(SMALL_UPLOAD, n - part));
        }
        CUDA_CHECK(cudaMemcpyAsync(device + done, buffer, n, cudaMemcpyHostToDevice, cuda->launch.stream));
        CUDA_CHECK(cudaEventRecord(cuda->staged[i % 2], cuda->launch.stream));
        done += n;
    }
}

/* Memory that is freed with the backend. */
static void *alloc_upload(Backend *be, size_t bytes) {
    Cuda *cuda = cuda_of(be);
    Upload *upload = new (std::nothrow) Upload;
    void *device = upload ? cuda_alloc(be, bytes) : NULL;
    if (!device) {
        delete upload;
        return NULL;
    }
    *upload = {device, cuda->uploads};
    cuda->uploads = upload;
    return device;
}

static const void *cuda_upload(Backend *be, const void *host, size_t bytes) {
    Cuda *cuda = cuda_of(be);
    void *device = alloc_upload(be, bytes);
    if (!device) {
        return NULL;
    }
    if (bytes <= SMALL_UPLOAD) {
        CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, cuda->launch.stream));
    } else {
        copy_through_staging(cuda, static_cast<unsigned char *>(device), static_cast<const unsigned char *>(host), bytes);
    }
    return device;
}

static void cuda_write(Backend *be, void *to, const void *host, size_t bytes) {
    // From pageable memory: the host bytes are taken before the call returns, in order of the stream.
    CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, cuda_of(be)->launch.stream));
}

static void cuda_read(Backend *be, void *host, const void *from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, cuda_of(be)->launch.stream));
    CUDA_CHECK(cudaStreamSynchronize(cuda_of(be)->launch.stream));
}

static size_t cuda_memory_free(Backend *be) {
    (void)be;
    size_t free_bytes, total;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total));
    return free_bytes > RESERVED_BYTES ? free_bytes - RESERVED_BYTES : 0;
}

/* The index is made first, since it tells how many values there are; the host sums up the GTiles' sizes. */
static bool random_tiled_cbc(Backend *be, Matrix *w, const RandomWeights *weights, RandomTotals *totals) {
    const CudaLaunch *c = &cuda_of(be)->launch;
    const size_t gtiles = tiled_cbc_tile_rows(w->rows) * (tiled_cbc_cols_padded(w->cols) / TILE_K);
    TiledCbcLayout layout;
    if (tiled_cbc_layout(&layout, w->rows, w->cols, NULL)) {
        return false;
    }
    uint32_t *sizes = new (std::nothrow) uint32_t[gtiles + 1];
    unsigned char *index = sizes ? static_cast<unsigned char *>(alloc_upload(be, layout.values)) : NULL;
    if (!index) {
        delete[] sizes;
        return false;
    }
    uint32_t *tile_offset = reinterpret_cast<uint32_t *>(index + layout.tile_offset);
    uint32_t *col_info = reinterpret_cast<uint32_t *>(index + layout.col_info);
    uint64_t *bitmap = reinterpret_cast<uint64_t *>(index + layout.bitmap);
    random_index_cuda(c, tile_offset + 1, col_info, bitmap, w->rows, w->cols, weights, totals);
    cuda_read(be, sizes, tile_offset, (gtiles + 1) * sizeof *sizes);
    for (size_t g = 0; g < gtiles; g++) {
        sizes[g + 1] += sizes[g];
    }
    const size_t n_values = (size_t)sizes[gtiles] * COLUMN_ALIGN;
    cuda_write(be, tile_offset, sizes, (gtiles + 1) * sizeof *sizes);
    CUDA_CHECK(cudaStreamSynchronize(c->stream));
    delete[] sizes;
    fp16 *values = static_cast<fp16 *>(alloc_upload(be, n_values * sizeof(fp16)));
    if (!values) {
        return false;
    }
    w->cbc = TiledCbc{w->rows, w->cols, tile_offset, col_info, bitmap, values, n_values, TILE_M};
    random_values_cuda(c, &w->cbc, values, weights);
    return true;
}

static bool cuda_random_matrix(Backend *be, Matrix *w, size_t *nnz, const RandomWeights *weights) {
    const CudaLaunch *c = &cuda_of(be)->launch;
    RandomTotals *totals = reinterpret_cast<RandomTotals *>(c->workspace), counted;
    CUDA_CHECK(cudaMemsetAsync(totals, 0, sizeof *totals, c->stream));
    if (w->format == FORMAT_DENSE) {
        const size_t stride = dense_stride(w->cols);
        size_t bytes;
        const bool fits = size_mul(&bytes, w->rows, stride * sizeof(fp16));
        fp16 *dense = fits ? static_cast<fp16 *>(alloc_upload(be, bytes)) : NULL;
        if (!dense) {
            return false;
        }
        random_dense_cuda(c, dense, w->rows, w->cols, stride, weights, totals);
        w->dense = dense;
        w->stride = stride;
    } else if (!random_tiled_cbc(be, w, weights, totals)) {
        return false;
    }
    cuda_read(be, &counted, totals, sizeof counted);  // and waits: kernels of a step read weights before they wait
    *nnz = counted.nnz;
    if (w->format == FORMAT_TILED_CBC) {
        w->cbc.max_col_values = counted.max_col_values;
    }
    return true;
}

static double cuda_energy_joules(Backend *be) { return nvml_energy_joules(cuda_of(be)->nvml); }

static double cuda_clock_mhz(Backend *be) { return nvml_clock_mhz(cuda_of(be)->nvml, NVML_SM); }

static double cuda_read_ceiling(Backend *be) { return read_ceiling_cuda(&cuda_of(be)->launch); }

/* Memory that grows on demand. Never while a step is recorded: the step before it has made it large enough. */
static void *scratch(Cuda *cuda, size_t bytes) {
    if (cuda->scratch_bytes < bytes) {
        CHECK(!cuda->recording);
        CUDA_CHECK(cudaFree(cuda->scratch));
        Error err;
        cuda->scratch = device_alloc(bytes, "the work space of a product", &err);
        if (!cuda->scratch) {
            fprintf(stderr, "%s\n", err.text);
            exit(1);
        }
        cuda->scratch_bytes = bytes;
    }
    return cuda->scratch;
}

/* ---- the recorded step --------------------------------------------------------------------------------------------- */

/* Decode steps launch the same kernels on the same pointers: what differs, token and position, they read from
 * device memory. The first step runs as it is, so that libraries set themselves up; the second is recorded. */
static bool cuda_begin_step(Backend *be, bool repeats) {
    Cuda *cuda = cuda_of(be);
    if (!repeats || !cuda->graphs) {
        return true;
    }
    if (cuda->decode_step) {
        CUDA_CHECK(cudaGraphLaunch(cuda->decode_step, cuda->launch.stream));
        return false;
    }
    if (++cuda->decode_steps_seen > 1) {
        CUDA_CHECK(cudaStreamBeginCapture(cuda->launch.stream, cudaStreamCaptureModeThreadLocal));
        cuda->recording = true;
    }
    return true;
}

static void cuda_end_step(Backend *be) {
    Cuda *cuda = cuda_of(be);
    if (cuda->recording) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamEndCapture(cuda->launch.stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&cuda->decode_step, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
        cuda->recording = false;
        CUDA_CHECK(cudaGraphLaunch(cuda->decode_step, cuda->launch.stream));
    }
}

/* ---- operations --------------------------------------------------------------------------------------------------------- */

static void cuda_embed(Backend *be, float *out, const Matrix *table, const int *ids, int n) {
    embed_cuda(&cuda_of(be)->launch, out, table, ids, n);
}

static void cuda_rmsnorm(Backend *be, fp16 *out, const float *x, const fp16 *weight, int n, int dim, float eps) {
    rmsnorm_cuda(&cuda_of(be)->launch, out, x, weight, n, dim, eps);
}

/* y (n, rows) = W x or y += W x with cuBLAS, for a Tiled-CBC matrix slab by slab: a slab of tile rows is expanded into
 * scratch memory, multiplied, and overwritten by the next. */
static void library_product(Cuda *cuda, float *y, const Matrix *w, const fp16 *x, int n, fp16 *slab, float beta) {
    if (w->format == FORMAT_DENSE) {
        cublas_product(cuda->cublas, y, w->rows, w->dense, w->stride, w->rows, w->cols, x, n, beta);
        return;
    }
    const size_t stride = dense_stride(w->cols), tile_rows = tiled_cbc_tile_rows(w->rows);
    const size_t slab_rows = SLAB_BYTES / (TILE_M * stride * sizeof(fp16));
    CHECK(slab_rows > 0);
    for (size_t first = 0; first < tile_rows; first += slab_rows) {
        const size_t count = min_size(slab_rows, tile_rows - first), row = first * TILE_M;
        expand_cuda(&cuda->launch, slab, stride, w, first, count);
        cublas_product(cuda->cublas, y + row, w->rows, slab, stride, min_size(count * TILE_M, w->rows - row), w->cols, x, n,
                       beta);
    }
}

/* Bytes of scratch memory for an expanded slab of w; 0 if it needs none. */
static size_t slab_bytes(const Matrix *w) {
    const size_t bytes = tiled_cbc_tile_rows(w->rows) * TILE_M * dense_stride(w->cols) * sizeof(fp16);
    return w->format == FORMAT_DENSE ? 0 : min_size(bytes, SLAB_BYTES);
}

/* Scratch memory of a product that takes cuBLAS, part by part. */
struct ProductRoom {
    size_t slab, kept, sums;
};

static ProductRoom product_room(const Matrix *w, int n, bool thinned, bool swiglu) {
    ProductRoom room = {};
    room.slab = slab_bytes(w);
    room.kept = w->format == FORMAT_TILED_CBC && thinned ? round_up((size_t)n * w->cols * sizeof(fp16), 256) : 0;
    room.sums = swiglu ? (size_t)n * w->rows * sizeof(float) : 0;
    return room;
}

static size_t cuda_product_bytes(Backend *be, const Matrix *w, int n, bool swiglu) {
    (void)be;
    const bool own_kernel = n == 1 || (w->format == FORMAT_TILED_CBC && n <= SPMM_MAX_TOKENS);
    const ProductRoom room = product_room(w, n, true, swiglu);
    return own_kernel ? 0 : room.slab + room.kept + room.sums;
}

/* Which kernel: one token has its own; few tokens decode Tiled-CBC on the way to the Tensor Cores; many use cuBLAS. */
static void product(Backend *be, void *out, const Matrix *w, const fp16 *x, int n, const float *threshold,
                    Epilogue epilogue) {
    Cuda *cuda = cuda_of(be);
    const CudaLaunch *c = &cuda->launch;
    const bool tiled = w->format == FORMAT_TILED_CBC;
    if (n == 1 && tiled) {
        spmspv_cuda(c, out, w, x, threshold, epilogue, 0);
    } else if (n == 1) {
        gemv_cuda(c, out, w, x, epilogue);
    } else if (tiled && n <= SPMM_MAX_TOKENS) {
        spmm_cuda(c, out, w, x, n, threshold, epilogue);
    } else {
        const bool swiglu = epilogue == EPILOGUE_SWIGLU;
        const ProductRoom room = product_room(w, n, threshold != NULL, swiglu);
        unsigned char *slab = static_cast<unsigned char *>(scratch(cuda, room.slab + room.kept + room.sums));
        fp16 *kept = reinterpret_cast<fp16 *>(slab + room.slab);
        float *y = swiglu ? reinterpret_cast<float *>(slab + room.slab + room.kept) : static_cast<float *>(out);
        check_finite_cuda(c, x, (size_t)n * w->cols, w);
        if (room.kept) {
            drop_small_cuda(c, kept, x, (size_t)n * w->cols, threshold);
            x = kept;
        }
        library_product(cuda, y, w, x, n, reinterpret_cast<fp16 *>(slab), epilogue == EPILOGUE_ADD ? 1.0f : 0.0f);
        if (swiglu) {
            swiglu_cuda(c, static_cast<fp16 *>(out), y, (size_t)n * w->rows / 2);
        }
    }
}

static void cuda_matmul(Backend *be, float *out, const Matrix *w, const fp16 *x, int n, const float *threshold) {
    product(be, out, w, x, n, threshold, EPILOGUE_STORE);
}

static void cuda_matmul_add(Backend *be, float *out, const Matrix *w, const fp16 *x, int n, const float *threshold) {
    product(be, out, w, x, n, threshold, EPILOGUE_ADD);
}

static void cuda_matmul_swiglu(Backend *be, fp16 *out, const Matrix *w, const fp16 *x, int n, const float *threshold) {
    product(be, out, w, x, n, threshold, EPILOGUE_SWIGLU);
}

/* One token is rotated and appended by the kernel that attends: a launch less in every layer. */
static void cuda_attention(Backend *be, fp16 *out, fp16 *q, fp16 *k_cache, fp16 *v_cache, const float *qkv,
                           const float *rope, const AttentionShape *shape, const int *pos, int n) {
    const CudaLaunch *c = &cuda_of(be)->launch;
    if (n > 1) {
        rope_append_cuda(c, q, k_cache, v_cache, qkv, rope, shape, pos, n);
    }
    attention_cuda(c, out, q, k_cache, v_cache, n > 1 ? NULL : qkv, rope, shape, pos, n, shape->seq_len);
}

/* ---- results ------------------------------------------------------------------------------------------------------------- */

/* Wait, take the report over and reset it. */
static int cuda_finish(Backend *be, Error *err) {
    Cuda *cuda = cuda_of(be);
    const DeviceReport *report = cuda->host_report;
    CUDA_CHECK(cudaMemcpyAsync(cuda->host_report, cuda->launch.report, sizeof *report, cudaMemcpyDeviceToHost,
                               cuda->launch.stream));
    CUDA_CHECK(cudaMemsetAsync(cuda->launch.report, 0, sizeof *report, cuda->launch.stream));
    CUDA_CHECK(cudaStreamSynchronize(cuda->launch.stream));
    for (int site = 0; site < N_SITES; site++) {
        const ProductStats *p = &report->products[site];
        be->stats[site].elements += p->elements;
        be->stats[site].active_elements += p->active_elements;
        be->stats[site].active_nonzeros += p->active_nonzeros;
        be->stats[site].bytes += p->bytes + p->active_nonzeros * sizeof(fp16);
    }
    if (report->fault != 0) {
        const int code = (int)report->fault - 1;
        return input_fault(code / N_SITES - 1, (Site)(code % N_SITES), err);
    }
    return OK;
}

static int cuda_sample(Backend *be, int *id, const float *logits, int n, const SampleParams *params, uint64_t step,
                       Error *err) {
    sample_cuda(&cuda_of(be)->launch, logits, n, params, step);
    const int rc = cuda_finish(be, err);
    if (rc) {
        return rc;
    }
    const int token = cuda_of(be)->host_report->token;
    if (token < 0) {
        return logit_fault(err);
    }
    *id = token;
    return OK;
}

/* ---- set-up ---------------------------------------------------------------------------------------------------------------- */

static void cuda_free(Backend *be) {
    Cuda *cuda = cuda_of(be);
    while (cuda->uploads) {
        Upload *next = cuda->uploads->next;
        cudaFree(cuda->uploads->device);
        delete cuda->uploads;
        cuda->uploads = next;
    }
    if (cuda->decode_step) {
        cudaGraphExecDestroy(cuda->decode_step);
    }
    for (int i = 0; i < 2; i++) {
        cudaFreeHost(cuda->staging[i]);
        if (cuda->staged[i]) {
            cudaEventDestroy(cuda->staged[i]);
        }
    }
    cudaFreeHost(cuda->host_report);
    cudaFree(cuda->scratch);
    cudaFree(cuda->launch.workspace);
    cudaFree(cuda->launch.counters);
    cudaFree(cuda->launch.letters);
    cudaFree(cuda->launch.report);
    cublas_close(cuda->cublas);
    nvml_close(cuda->nvml);
    if (cuda->launch.stream) {
        cudaStreamDestroy(cuda->launch.stream);
    }
    delete cuda;
    delete be;
}

__global__ static void probe_kernel(int *out) { *out = 42; }

/* Does our code run on the device? A missing architecture shows only at a launch. */
static cudaError_t probe_device() {
    int *out = NULL, value = 0;
    cudaError_t status = cudaMalloc(&out, sizeof *out);
    if (status == cudaSuccess) {
        probe_kernel<<<1, 1>>>(out);
        status = cudaGetLastError();
    }
    if (status == cudaSuccess) {
        status = cudaMemcpy(&value, out, sizeof value, cudaMemcpyDeviceToHost);
    }
    cudaFree(out);
    return status != cudaSuccess ? status : value == 42 ? cudaSuccess : cudaErrorUnknown;
}

/* Find the device, or say why it cannot be used: no driver, an old driver, no device, a device we have no code for. */
static int choose_device(int device, cudaDeviceProp *properties, Error *err) {
    int count = 0, driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) {
        return error_set(err, ERR_OPEN, "CUDA: no NVIDIA driver is installed");
    }
    if (driver / 1000 < runtime / 1000) {
        return error_set(err, ERR_OPEN, "CUDA: the driver supports version %d.%d, this build needs %d.%d", driver / 1000,
                         driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        return error_set(err, ERR_OPEN, "CUDA: no device: %s",
                         status != cudaSuccess ? cudaGetErrorString(status) : "none is visible");
    }
    if (device >= count) {
        return error_set(err, ERR_USAGE, "CUDA: device %d of %d does not exist (they count from 0)", device, count);
    }
    CUDA_CHECK(cudaGetDeviceProperties(properties, device));
    if (properties->major < 8) {
        return error_set(err, ERR_OPEN, "CUDA: %s has compute capability %d.%d, 8.0 or more is needed", properties->name,
                         properties->major, properties->minor);
    }
    cudaError_t probe = cudaSetDevice(device);
    probe = probe == cudaSuccess ? probe_device() : probe;
    if (probe == cudaErrorMemoryAllocation) {
        return error_set(err, ERR_MEMORY, "CUDA: no memory on %s for a program to start there: %s", properties->name,
                         cudaGetErrorString(probe));
    }
    if (probe == cudaErrorDevicesUnavailable) {  // what the driver says when next to nothing of the memory is free, too
        return error_set(err, ERR_OPEN, "CUDA: %s is taken, or all of its memory is: %s", properties->name,
                         cudaGetErrorString(probe));
    }
    if (probe != cudaSuccess) {
        return error_set(err, ERR_OPEN, "CUDA: %s (compute capability %d.%d) does not run this build's code: %s",
                         properties->name, properties->major, properties->minor, cudaGetErrorString(probe));
    }
    return OK;
}

/* Of what was allocated, cuda_free() releases whatever is there. */
static int set_up_memory(Cuda *cuda, Error *err) {
    CudaLaunch *c = &cuda->launch;
    if (!(c->workspace = static_cast<float *>(device_alloc(WORKSPACE_BYTES, "partial sums", err))) ||
        !(c->counters = static_cast<unsigned *>(device_alloc(N_COUNTERS * sizeof *c->counters, "counters", err))) ||
        !(c->letters = static_cast<unsigned *>(device_alloc(N_LETTERS * sizeof *c->letters, "letters", err))) ||
        !(c->report = static_cast<DeviceReport *>(device_alloc(sizeof *c->report, "results", err))) ||
        !(cuda->host_report = static_cast<DeviceReport *>(pinned_alloc(sizeof *c->report, "results", err)))) {
        return ERR_MEMORY;
    }
    for (int i = 0; i < 2; i++) {
        cuda->staging[i] = static_cast<unsigned char *>(pinned_alloc(STAGING_BYTES, "copying weights", err));
        if (!cuda->staging[i]) {
            return ERR_MEMORY;
        }
        CUDA_CHECK(cudaEventCreateWithFlags(&cuda->staged[i], cudaEventDisableTiming));
    }
    c->workspace_bytes = WORKSPACE_BYTES;
    CUDA_CHECK(cudaMemsetAsync(c->counters, 0, N_COUNTERS * sizeof *c->counters, c->stream));
    clear_letters(c);
    CUDA_CHECK(cudaMemsetAsync(c->report, 0, sizeof *c->report, c->stream));
    return OK;
}

int backend_cuda(Backend **be, int device, bool graphs, Error *err) {
    cudaDeviceProp properties;
    int rc = choose_device(device, &properties, err);
    if (rc) {
        return rc;
    }
    Backend *b = new (std::nothrow) Backend();
    Cuda *cuda = new (std::nothrow) Cuda();
    if (!b || !cuda) {
        delete b;
        delete cuda;
        return error_set(err, ERR_MEMORY, "no memory for the CUDA backend");
    }
    b->ctx = cuda;
    b->free = cuda_free;
    cuda->graphs = graphs;
    CUDA_CHECK(cudaStreamCreateWithFlags(&cuda->launch.stream, cudaStreamNonBlocking));
    cuda->launch.n_sms = properties.multiProcessorCount;
    cuda->launch.shared_per_block = properties.sharedMemPerBlockOptin;
    cuda->launch.overlap = can_overlap_cuda();
    rc = set_up_memory(cuda, err);
    rc = rc ? rc : cublas_open(&cuda->cublas, cuda->launch.stream, err);
    if (rc) {
        cuda_free(b);
        return rc;
    }
    char bus_id[32];
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device));
    cuda->nvml = nvml_open(bus_id);
    b->name = "cuda";
    b->max_tokens = MAX_TOKENS;
    b->own_memory = true;
    b->records = graphs;
    b->alloc = cuda_alloc;
    b->release = cuda_release;
    b->upload = cuda_upload;
    b->write = cuda_write;
    b->read = cuda_read;
    b->memory_free = cuda_memory_free;
    b->product_bytes = cuda_product_bytes;
    b->random_matrix = cuda_random_matrix;
    b->energy_joules = cuda_energy_joules;
    b->clock_mhz = cuda_clock_mhz;
    b->read_ceiling = cuda_read_ceiling;
    b->begin_step = cuda_begin_step;
    b->end_step = cuda_end_step;
    b->embed = cuda_embed;
    b->rmsnorm = cuda_rmsnorm;
    b->matmul = cuda_matmul;
    b->matmul_add = cuda_matmul_add;
    b->matmul_swiglu = cuda_matmul_swiglu;
    b->attention = cuda_attention;
    b->sample = cuda_sample;
    b->finish = cuda_finish;
    snprintf(b->device, sizeof b->device, "%.80s (compute capability %d.%d, %d SMs)", properties.name, properties.major,
             properties.minor, properties.multiProcessorCount);
    *be = b;
    return OK;
}
