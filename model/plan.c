#include "plan.h"

#include <limits.h>

#include "cli.h"

static size_t chunk(const MemoryPlan *p, int context) {
    return (size_t)(context < p->max_tokens ? context : p->max_tokens);
}

size_t plan_kv(const MemoryPlan *p) { return p->kv_position * (size_t)p->context; }

size_t plan_scratch(const MemoryPlan *p) {
    return p->fixed + p->position * (size_t)p->context + p->token * chunk(p, p->context);
}

size_t plan_total(const MemoryPlan *p) { return p->weights + plan_kv(p) + plan_scratch(p); }

int plan_longest(const MemoryPlan *p) {
    const size_t position = p->kv_position + p->position, whole_chunk = p->token * (size_t)p->max_tokens;
    size_t left = p->weights + p->fixed;
    if (left >= p->free) {
        return 0;
    }
    left = p->free - left;
    // Up to max_tokens a longer context makes the chunk longer too.
    size_t longest = left / (position + p->token);
    if (longest > (size_t)p->max_tokens) {
        longest = (left - whole_chunk) / position;
    }
    return longest > INT_MAX ? INT_MAX : longest < 64 ? (int)longest : (int)(longest / 64 * 64);
}

int plan_check(const MemoryPlan *p, Error *err) {
    if (plan_total(p) <= p->free) {
        return OK;
    }
    const int longest = plan_longest(p);
    if (longest == 0) {
        const bool weights = p->weights > p->free;
        return error_set(err, ERR_MEMORY, "the %s alone need %s of memory, %s are free",
                         weights ? "weights" : "weights and work space",
                         size_text((double)(weights ? p->weights : p->weights + p->fixed)).text,
                         size_text((double)p->free).text);
    }
    return error_set(err, ERR_MEMORY,
                     "a context of %d needs %s of memory (weights %s, KV %s, scratch %s), %s are free: -c %d would fit",
                     p->context, size_text((double)plan_total(p)).text, size_text((double)p->weights).text,
                     size_text((double)plan_kv(p)).text, size_text((double)plan_scratch(p)).text,
                     size_text((double)p->free).text, longest);
}

PlanText plan_text(const MemoryPlan *p) {
    PlanText t;
    snprintf(t.text, sizeof t.text, "weights %s + KV %s + scratch %s = %s of %s free",
             size_text((double)p->weights).text, size_text((double)plan_kv(p)).text,
             size_text((double)plan_scratch(p)).text, size_text((double)plan_total(p)).text,
             size_text((double)p->free).text);
    return t;
}
