/* info.h: what a model file holds, for people. */
#ifndef SPDP_INFO_H
#define SPDP_INFO_H

#include "../model/checkpoint.h"

/* Print config, every matrix (source matrices of fused ones apart) with its sparsity, bytes and compression ratio, and
 * provenance to out. */
void info_print(FILE *out, const Checkpoint *ck);

#endif
