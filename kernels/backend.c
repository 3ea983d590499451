#include "backend.h"

#include <string.h>

const char *site_name(Site site) {
    static const char *const names[N_SITES] = {"attention input", "attention output", "MLP input", "MLP hidden",
                                               "final head"};
    return names[site];
}

int input_fault(int layer, Site site, Error *err) {
    if (layer < 0) {
        return error_set(err, ERR_NUMBER, "a number at the %s is not finite", site_name(site));
    }
    return error_set(err, ERR_NUMBER, "a number at the %s of layer %d is not finite", site_name(site), layer);
}

int logit_fault(Error *err) { return error_set(err, ERR_NUMBER, "logits are not finite"); }

#ifndef USE_CUDA
int backend_cuda(Backend **be, int device, bool graphs, Error *err) {
    (void)be;
    (void)device;
    (void)graphs;
    return error_set(err, ERR_USAGE, "this build has no CUDA backend");
}
#endif

int backend_open(Backend **be, const char *name, int device, bool graphs, int n_threads, const char *isa, Error *note,
                 Error *err) {
    Error reason = {0};
    if (strcmp(name, "cuda") == 0) {
        return backend_cuda(be, device, graphs, err);
    }
    if (strcmp(name, "auto") == 0 && backend_cuda(be, device, graphs, &reason) == OK) {
        return OK;
    }
    // A build without CUDA has not failed at anything.
    if (note && reason.code != ERR_USAGE) {
        *note = reason;
    }
    return backend_cpu(be, n_threads, isa, err);
}
