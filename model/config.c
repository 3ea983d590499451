#include "config.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <string.h>

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

int derive_head_dim(Config *c, Error *err) {
    if (c->n_heads < 1) {
        return error_set(err, ERR_SHAPE, "n_heads = %d is out of range", c->n_heads);
    }
    if (c->dim % c->n_heads != 0) {
        return error_set(err, ERR_SHAPE, "dim = %d is not a multiple of n_heads = %d", c->dim, c->n_heads);
    }
    c->head_dim = c->dim / c->n_heads;
    return OK;
}

static const struct {
    const char *name;
    const char *shape;
} known_shapes[] = {
    {"tinyllama-1.1b", "2048:5632:22:32:4:32000:2048"},
    {"llama2-7b", "4096:11008:32:32:32:32000:4096"},
    {"llama2-13b", "5120:13824:40:40:40:32000:4096"},
    {"llama2-70b", "8192:28672:80:64:8:32000:4096"},
};

/* A number without sign or space, followed by end. */
static bool parse_field(const char **text, char end, int *value) {
    if (!isdigit((unsigned char)**text)) {
        return false;
    }
    char *rest;
    errno = 0;
    const long number = strtol(*text, &rest, 10);
    if (errno || number > INT_MAX || *rest != end) {
        return false;
    }
    *value = (int)number;
    *text = rest + 1;
    return true;
}

/* dim:hidden:layers:heads:kv:vocab:context */
static bool parse_fields(Config *c, const char *text) {
    int *const fields[] = {&c->dim,        &c->hidden_dim, &c->n_layers, &c->n_heads,
                           &c->n_kv_heads, &c->vocab_size, &c->seq_len};
    const size_t n = sizeof fields / sizeof *fields;
    for (size_t i = 0; i < n; i++) {
        if (!parse_field(&text, i + 1 < n ? ':' : '\0', fields[i])) {
            return false;
        }
    }
    return true;
}

int config_parse_shape(Config *c, const char *shape, Error *err) {
    *c = (Config){.norm_eps = 1e-5f, .rope_theta = 10000, .bos_id = 1, .n_eos = 1, .eos_id = {2}};
    const char *text = shape;
    for (size_t i = 0; i < sizeof known_shapes / sizeof *known_shapes; i++) {
        if (strcmp(shape, known_shapes[i].name) == 0) {
            text = known_shapes[i].shape;
        }
    }
    if (!parse_fields(c, text)) {
        return error_set(err, ERR_USAGE,
                         "shape '%.60s' is not tinyllama-1.1b, llama2-7b, llama2-13b, llama2-70b or "
                         "dim:hidden:layers:heads:kv:vocab:context",
                         shape);
    }
    int rc = derive_head_dim(c, err);
    rc = rc ? rc : config_check(c, err);
    if (rc) {
        error_prefix(err, shape);
    }
    return rc;
}

bool config_is_eos(const Config *c, int id) {
    for (int i = 0; i < c->n_eos; i++) {
        if (c->eos_id[i] == id) {
            return true;
        }
    }
    return false;
}
