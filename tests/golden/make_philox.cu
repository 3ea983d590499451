/* make_philox.cu: print philox.h, 1000 draws of cuRAND's own Philox4x32-10. cuRAND's device functions are
 * compiled for the host here, so no GPU is needed:
 *
 *   nvcc -o /tmp/make_philox tests/golden/make_philox.cu && /tmp/make_philox > tests/golden/philox.h */
#define QUALIFIERS static __host__ __device__ inline
#include <curand_kernel.h>
#include <stdio.h>
#include <time.h>

#include "philox_cases.h"

static unsigned first_word(uint64_t seed, uint64_t step) {
    curandStatePhilox4_32_10_t state;
    curand_init(seed, step, 0, &state);
    return curand(&state);
}

int main() {
    char date[16];
    const time_t now = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    printf("/* philox.h: first word x of curand_init(seed, step, 0) with Philox4x32-10, for the seeds and\n"
           " * steps of philox_cases.h. Written by make_philox.cu from curand_kernel.h of CUDA %d.%d\n"
           " * (cuRAND %d) on %s. */\n"
           "#ifndef SPDP_PHILOX_H\n"
           "#define SPDP_PHILOX_H\n\n"
           "#include \"philox_cases.h\"\n\n"
           "static const uint32_t philox_golden[PHILOX_CASES] = {",
           CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, CURAND_VERSION, date);
    for (unsigned i = 0; i < PHILOX_CASES; i++) {
        const unsigned x = first_word(philox_case_seed(i), philox_case_step(i));
        printf("%s0x%08x,", i % 8 ? " " : "\n    ", x);
    }
    printf("\n};\n\n#endif\n");
    return 0;
}
