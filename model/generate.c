#include "generate.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "reach.h"

const char *stop_reason_name(StopReason reason) {
    static const char *const names[] = {"length", "eos", "stop", "context", "interrupt"};
    return names[reason];
}

static double timed_energy(Backend *be, double *ms) {
    const double start = time_ms(), joules = be->energy_joules(be);
    *ms += time_ms() - start;
    return joules;
}

static int hash_logits(uint64_t *hash, const Model *m, Error *err) {
    const size_t bytes = (size_t)m->config.vocab_size * sizeof *m->state.logits;
    float *logits = memory_alloc(bytes);
    if (!logits) {
        return error_set(err, ERR_MEMORY, "no memory for logits");
    }
    m->be->read(m->be, logits, m->state.logits, bytes);
    *hash = XXH3_64bits(logits, bytes);
    free(logits);
    return OK;
}

static bool interrupted(const GenerateParams *params) { return params->interrupt && *params->interrupt; }

int generate(GenerateResult *result, Model *m, const int *prompt, int n_prompt, const GenerateParams *params,
             TokenSink *sink, Error *err) {
    if (n_prompt > m->seq_len - params->pos) {
        return error_set(err, ERR_USAGE, "the prompt has %d tokens, the context holds %d", params->pos + n_prompt,
                         m->seq_len);
    }
    const int end = params->pos + n_prompt, room = m->seq_len - end;
    const bool to_context = params->n_new < 0 || params->n_new > room;
    const int n_new = to_context ? room : params->n_new;
    double *token_ms = malloc(((size_t)n_new + 1) * sizeof *token_ms);
    if (!token_ms) {
        return error_set(err, ERR_MEMORY, "no memory for the times of %d tokens", n_new);
    }
    GenerateResult r = {.stop = to_context ? STOP_CONTEXT : STOP_LENGTH, .cached = end};
    const double written_before = sink->write_ms, start = time_ms();
    m->interrupt = params->interrupt;
    int rc = model_prefill(m, prompt, n_prompt, params->pos, err);
    m->interrupt = NULL;
    const double prefill_ms = time_ms() - start;
    memset(m->be->stats, 0, sizeof m->be->stats);

    double cache_bytes = 0, joules = NAN;
    double asking_ms = 0;  // for the energy, which is no part of a step
    int n = 0;
    if (interrupted(params)) {  // also where no token is wanted
        r.stop = STOP_INTERRUPT;
        r.cached = params->pos;  // the prompt may not be whole
    }
    while (!rc && n < n_new && r.stop != STOP_INTERRUPT) {
        if (interrupted(params)) {
            r.stop = STOP_INTERRUPT;
            break;
        }
        int id;
        const int pos = end + n;  // where the new token will stand
        rc = m->be->sample(m->be, &id, m->state.logits, m->config.vocab_size, &params->sample, (uint64_t)n, err);
        if (rc) {
            char where[32];
            snprintf(where, sizeof where, "position %d", pos - 1);
            error_prefix(err, where);
            break;
        }
        token_ms[n++] = time_ms() - start - asking_ms - (sink->write_ms - written_before);
        if (n == 1) {
            joules = -timed_energy(m->be, &asking_ms);
        }
        if (!params->ignore_eos && config_is_eos(&m->config, id)) {
            r.stop = STOP_EOS;
            break;
        }
        if (sink->token(sink->user, id)) {
            r.stop = STOP_STRING;
            break;
        }
        if (n < n_new) {
            model_forward(m, &id, 1, pos, DECODE);
            r.cached = pos + 1;
            cache_bytes += (double)model_step_bytes(m, pos);
        }
    }
    joules += timed_energy(m->be, &asking_ms);
    if (!rc && r.cached > params->pos) {
        rc = hash_logits(&r.logits_hash, m, err);
    }
    if (!rc) {
        r.timing = timing_of(token_ms, (size_t)n, (size_t)n_prompt, prefill_ms);
        memcpy(r.sites, m->be->stats, sizeof r.sites);
        r.products = stats_sum(r.sites, N_SITES);
        r.bytes_per_token = n > 1 ? (cache_bytes + (double)r.products.bytes) / (n - 1) : 0;
        r.joules_per_token = n > 1 && joules > 0 ? joules / (n - 1) : NAN;
        *result = r;
    }
    free(token_ms);
    return rc;
}
