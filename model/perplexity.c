#include "perplexity.h"

#include <math.h>

double negative_log_likelihood(const float *logits, size_t n, int target) {
    float max = logits[0];
    bool finite = true;
    for (size_t i = 0; i < n; i++) {
        max = fmaxf(max, logits[i]);
        finite &= isfinite(logits[i]) != 0;
    }
    if (!finite) {
        return NAN;
    }
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        sum += (double)expf(logits[i] - max);
    }
    return log(sum) - (double)(logits[target] - max);
}

/* Sums over the scored predictions. */
typedef struct {
    size_t n;
    double sum, sum_squares;
} Score;

/* Feed ids[0 .. n-1] as one window and score predictions first .. n - 1; prediction i is of ids[i + 1]. The first
 * `prefix` are prefilled, the others computed as decoding would. */
static int score_window(Score *score, Model *m, Reach *reach, float *logits, double *nll, const int *ids, int n,
                        int prefix, int first, Error *err) {
    const size_t vocab = (size_t)m->config.vocab_size;
    for (int begin = 0, rows; begin < n; begin += rows) {
        const bool dense = begin < prefix;
        const int left = (dense && prefix < n ? prefix : n) - begin;
        rows = left < m->chunk ? left : m->chunk;
        m->hook = dense ? NULL : &reach->hook;
        model_forward(m, ids + begin, rows, begin, dense ? PREFILL : DECODE);
        m->hook = NULL;
        const int rc = m->be->finish(m->be, err);
        if (rc) {
            return rc;
        }
        m->be->read(m->be, logits, m->state.logits, (size_t)rows * vocab * sizeof *logits);
#pragma omp parallel for schedule(static)
        for (int i = 0; i < rows; i++) {
            nll[i] = negative_log_likelihood(logits + (size_t)i * vocab, vocab, ids[begin + i + 1]);
        }
        for (int i = begin < first ? first - begin : 0; i < rows; i++) {
            if (!isfinite(nll[i])) {
                return error_set(err, ERR_NUMBER, "logits at position %d of a window are not finite", begin + i);
            }
            score->n++;
            score->sum += nll[i];
            score->sum_squares += nll[i] * nll[i];
        }
    }
    return OK;
}

/* Defaults filled in, sizes checked against the model and n ids. */
static int check_protocol(PerplexityParams *p, const Model *m, const int *ids, size_t n, Error *err) {
    p->window = p->window ? p->window : m->config.seq_len;
    p->stride = p->stride ? p->stride : p->window;
    if (p->window < 1 || p->window > m->seq_len) {
        return error_set(err, ERR_USAGE, "a window of %d does not fit in the context of %d", p->window, m->seq_len);
    }
    if (p->stride < 1 || p->stride > p->window) {
        return error_set(err, ERR_USAGE, "a stride of %d is out of range (1 .. the window, %d)", p->stride,
                         p->window);
    }
    if (p->prefix < 0 || p->prefix >= p->window) {
        return error_set(err, ERR_USAGE, "a dense prefix of %d is out of range (0 .. below the window, %d)",
                         p->prefix, p->window);
    }
    if (n < (size_t)p->prefix + 2) {
        return error_set(err, ERR_USAGE, "%zu tokens are too few: a prefix of %d leaves nothing to predict", n,
                         p->prefix);
    }
    for (size_t i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= m->config.vocab_size) {
            return error_set(err, ERR_USAGE, "token %zu is %d, the vocabulary has %d", i, ids[i],
                             m->config.vocab_size);
        }
    }
    return OK;
}

int perplexity(PerplexityResult *result, Model *m, const int *ids, size_t n, const PerplexityParams *params,
               void (*progress)(void *user, size_t done, size_t total, double nll), void *user, Error *err) {
    PerplexityResult r = {.protocol = *params};
    n = params->max_tokens ? min_size(n, params->max_tokens) : n;
    int rc = check_protocol(&r.protocol, m, ids, n, err);
    if (rc) {
        return rc;
    }
    CHECK(m->logit_rows == m->chunk);
    const size_t window = (size_t)r.protocol.window, stride = (size_t)r.protocol.stride;
    const size_t last = n - 1;  // predictions 0 .. last - 1 exist, each of the id that follows
    const size_t n_windows = last <= window ? 1 : 1 + ceil_div(last - window, stride);
    float *logits = memory_alloc((size_t)m->chunk * (size_t)m->config.vocab_size * sizeof *logits);
    double *nll = memory_alloc((size_t)m->chunk * sizeof *nll);
    Score score = {0};
    Reach reach = {0};
    const double start = time_ms();
    rc = logits && nll ? reach_init(&reach, m, err)
                       : error_set(err, ERR_MEMORY, "no memory for the logits of %d tokens", m->chunk);
    for (size_t w = 0; w < n_windows && !rc; w++) {
        const size_t begin = w * stride, length = min_size(window, last - begin);
        const size_t seen = w == 0 ? 0 : window - stride;  // predictions that the window before scored
        const size_t first = seen > (size_t)r.protocol.prefix ? seen : (size_t)r.protocol.prefix;
        rc = score_window(&score, m, &reach, logits, nll, ids + begin, (int)length, r.protocol.prefix, (int)first, err);
        if (!rc && progress) {
            progress(user, w + 1, n_windows, score.n ? score.sum / (double)score.n : NAN);
        }
    }
    if (!rc) {
        reach_sites(&reach, r.sites);
        r.overlap = reach_overlap(&reach);
    }
    reach_free(&reach);
    free(logits);
    free(nll);
    if (rc) {
        return rc;
    }
    const double count = (double)score.n;
    r.n_windows = n_windows;
    r.n_scored = score.n;
    r.nll = score.sum / count;
    r.nll_stderr = score.n > 1
                       ? sqrt(fmax(0, score.sum_squares - count * r.nll * r.nll) / (count - 1) / count)
                       : NAN;
    r.perplexity = exp(r.nll);
    r.ms = time_ms() - start;
    *result = r;
    return OK;
}
