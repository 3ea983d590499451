/* omp.h: what OpenMP's own header declares, for a build without it: everything runs on one thread. */
#ifndef SPDP_SERIAL_OMP_H
#define SPDP_SERIAL_OMP_H

static inline int omp_get_thread_num(void) { return 0; }

#endif
