/* plan.h: what a model needs of a backend's memory, known before anything is allocated. */
#ifndef SPDP_PLAN_H
#define SPDP_PLAN_H

#include "../kernels/util.h"

/* Bytes, but for the three numbers that are named otherwise. */
typedef struct {
    size_t weights;     // that the backend holds in memory of its own
    size_t kv_position; // KV cache of one position
    size_t position;    // what else grows with the context: rotations of one position
    size_t token;       // buffers of one token of a chunk
    size_t fixed;       // buffers and work space whatever the context
    size_t free;        // what the backend can still give
    int context;        // positions asked for
    int max_tokens;     // of a chunk, if the context is as long
} MemoryPlan;

size_t plan_kv(const MemoryPlan *p);
size_t plan_scratch(const MemoryPlan *p);  // all but weights and KV cache
size_t plan_total(const MemoryPlan *p);

/* The longest context that fits, in whole 64s if it is that long; 0 if none does. */
int plan_longest(const MemoryPlan *p);

/* Returns 0, or ERR_MEMORY with what is needed, what is free and which context would fit. */
int plan_check(const MemoryPlan *p, Error *err);

/* "weights 3.9 GB + KV 2.1 GB + scratch 0.3 GB = 6.3 GB of 141.0 GB free" */
typedef struct {
    char text[240];
} PlanText;
PlanText plan_text(const MemoryPlan *p);

#endif
