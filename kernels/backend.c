#include "backend.h"

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
