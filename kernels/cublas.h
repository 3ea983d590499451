/* cublas.h: the one product that we leave to cuBLAS, loaded when it is first needed: a run on the CPU does not pay for
 * a library of hundreds of megabytes, and a machine without it can still run that. */
#ifndef SPDP_CUBLAS_H
#define SPDP_CUBLAS_H

#include <cuda_runtime.h>

#include "cuda_ops.cuh"

typedef struct Cublas Cublas;

/* Load the library and bind it to a stream, with a workspace of its own (so that a captured graph never allocates).
 * Returns 0, or ERR_OPEN or ERR_MEMORY with the loader's or the library's own words. */
int cublas_open(Cublas **cublas, cudaStream_t stream, Error *err);
void cublas_close(Cublas *cublas);  // NULL is fine

/* out (n, rows) fp32 with rows `out_stride` apart = W x + beta out, W (rows, cols) dense with stride, x (n, cols); fp16
 * in, fp32 sums. */
void cublas_product(Cublas *cublas, float *out, size_t out_stride, const fp16 *w, size_t stride, size_t rows,
                    size_t cols, const fp16 *x, int n, float beta);

#endif
