#include "config.h"

#include <math.h>

/* Generous bounds that keep every product of two dims in 62 bits and refuse nonsense by name. */
static int check_range(const char *name, int value, int low, int high, Error *err) {
    if (value < low || value > high) {
        return error_set(err, ERR_SHAPE, "%s = %d is out of range (%d .. %d)", name, value, low, high);
    }
    return OK;
}

int config_check(const Config *c, Error *err) {
    const struct {
        const char *name;
        int value, low, high;
    } fields[] = {
        {"dim", c->dim, 1, 1 << 20},
        {"hidden_dim", c->hidden_dim, 1, 1 << 22},
        {"n_layers", c->n_layers, 1, 4096},
        {"n_heads", c->n_heads, 1, 65536},
        {"n_kv_heads", c->n_kv_heads, 1, 65536},
        {"head_dim", c->head_dim, 2, 256},
        {"seq_len", c->seq_len, 1, 1 << 24},
        {"vocab_size", c->vocab_size, 1, 1 << 22},
        {"number of end-of-sequence ids", c->n_eos, 0, MAX_EOS},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const int rc = check_range(fields[i].name, fields[i].value, fields[i].low, fields[i].high, err);
        if (rc) {
            return rc;
        }
    }
    if (c->n_heads % c->n_kv_heads != 0) {
        return error_set(err, ERR_SHAPE, "n_heads = %d is not a multiple of n_kv_heads = %d", c->n_heads,
                         c->n_kv_heads);
    }
    if (c->head_dim % 2 != 0) {
        return error_set(err, ERR_SHAPE, "head_dim = %d is odd", c->head_dim);
    }
    if (config_q_dim(c) > 1u << 22) {
        return error_set(err, ERR_SHAPE, "n_heads * head_dim = %zu is out of range", config_q_dim(c));
    }
    if (!(c->norm_eps >= 0 && c->norm_eps < 1)) {
        return error_set(err, ERR_SHAPE, "norm_eps = %g is out of range (0 .. 1)", (double)c->norm_eps);
    }
    if (!(c->rope_theta > 1 && isfinite(c->rope_theta))) {
        return error_set(err, ERR_SHAPE, "rope_theta = %g is out of range (above 1)", c->rope_theta);
    }
    const int bos_rc = check_range("bos_id", c->bos_id, -1, c->vocab_size - 1, err);
    if (bos_rc) {
        return bos_rc;
    }
    for (int i = 0; i < c->n_eos; i++) {
        const int rc = check_range("end-of-sequence id", c->eos_id[i], 0, c->vocab_size - 1, err);
        if (rc) {
            return rc;
        }
    }
    return OK;
}

bool config_is_eos(const Config *c, int id) {
    for (int i = 0; i < c->n_eos; i++) {
        if (c->eos_id[i] == id) {
            return true;
        }
    }
    return false;
}
