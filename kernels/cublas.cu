#include "cublas.h"

#include <cublas_v2.h>
#include <dlfcn.h>

#include <new>

#define WORKSPACE_BYTES ((size_t)32 << 20)  // what cuBLAS recommends for Hopper

// cublas_v2.h overloads the name in C++, so the type of the C function is written out.
typedef cublasStatus_t (*GemmEx)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void *,
                                 const void *, cudaDataType, int, const void *, cudaDataType, int, const void *, void *,
                                 cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);

struct Cublas {
    void *library;
    cublasHandle_t handle;
    void *workspace;
    decltype(&cublasCreate_v2) create;
    decltype(&cublasDestroy_v2) destroy;
    decltype(&cublasSetStream_v2) set_stream;
    decltype(&cublasSetWorkspace_v2) set_workspace;
    GemmEx gemm;
    decltype(&cublasGetStatusString) status_string;
};

/* Fill *function with a symbol; false if the library has none of that name. */
template <typename F> static bool find(F *function, void *library, const char *name) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    return *function != nullptr;
}

int cublas_open(Cublas **cublas, cudaStream_t stream, Error *err) {
    char name[32];
    snprintf(name, sizeof name, "libcublas.so.%d", CUBLAS_VER_MAJOR);
    Cublas c = {};
    c.library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!c.library) {
        return error_set(err, ERR_OPEN, "cuBLAS cannot be loaded: %s", dlerror());
    }
    if (!find(&c.create, c.library, "cublasCreate_v2") || !find(&c.destroy, c.library, "cublasDestroy_v2") ||
        !find(&c.set_stream, c.library, "cublasSetStream_v2") ||
        !find(&c.set_workspace, c.library, "cublasSetWorkspace_v2") || !find(&c.gemm, c.library, "cublasGemmEx") ||
        !find(&c.status_string, c.library, "cublasGetStatusString")) {
        dlclose(c.library);
        return error_set(err, ERR_OPEN, "cuBLAS: %s lacks a function", name);
    }
    const cublasStatus_t created = c.create(&c.handle);
    if (created != CUBLAS_STATUS_SUCCESS) {
        const int rc = created == CUBLAS_STATUS_ALLOC_FAILED
                           ? error_set(err, ERR_MEMORY, "no memory for cuBLAS to start in")
                           : error_set(err, ERR_OPEN, "cuBLAS does not start: %s", c.status_string(created));
        dlclose(c.library);
        return rc;
    }
    Cublas *opened = new (std::nothrow) Cublas(c);
    if (!opened) {
        c.destroy(c.handle);
        dlclose(c.library);
        return error_set(err, ERR_MEMORY, "no memory for cuBLAS");
    }
    opened->workspace = device_alloc(WORKSPACE_BYTES, "cuBLAS", err);
    int rc = opened->workspace ? OK : ERR_MEMORY;
    // Setting the stream resets the workspace, so the order matters.
    cublasStatus_t status = rc ? CUBLAS_STATUS_SUCCESS : c.set_stream(c.handle, stream);
    if (!rc && status == CUBLAS_STATUS_SUCCESS) {
        status = c.set_workspace(c.handle, opened->workspace, WORKSPACE_BYTES);
    }
    if (status != CUBLAS_STATUS_SUCCESS) {
        rc = error_set(err, ERR_OPEN, "cuBLAS does not start: %s", c.status_string(status));
    }
    if (rc) {
        cublas_close(opened);
        return rc;
    }
    *cublas = opened;
    return OK;
}

void cublas_close(Cublas *cublas) {
    if (cublas) {
        cublas->destroy(cublas->handle);
        cudaFree(cublas->workspace);
        dlclose(cublas->library);
        delete cublas;
    }
}

void cublas_product(Cublas *cublas, float *out, size_t out_stride, const fp16 *w, size_t stride, size_t rows,
                    size_t cols, const fp16 *x, int n, float beta) {
    CHECK(rows < INT32_MAX && cols < INT32_MAX && stride < INT32_MAX && out_stride < INT32_MAX);
    // cuBLAS counts columns first: our row-major W is its transposed matrix, and (n, rows) its (rows, n).
    const float one = 1;
    const cublasStatus_t status =
        cublas->gemm(cublas->handle, CUBLAS_OP_T, CUBLAS_OP_N, (int)rows, n, (int)cols, &one, w, CUDA_R_16F, (int)stride,
                     x, CUDA_R_16F, (int)cols, &beta, out, CUDA_R_32F, (int)out_stride, CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
        fprintf(stderr, "cuBLAS: a %zu x %zu product with %d columns failed: %s\n", rows, cols, n,
                cublas->status_string(status));
        exit(1);
    }
}
