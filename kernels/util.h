/* util.h: errors, checked sizes, memory and time, shared by every part but the tokenizer. */
#ifndef SPDP_UTIL_H
#define SPDP_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Result of every function that can fail on input: 0 or one of these. */
enum {
    OK = 0,
    ERR_OPEN = -1,    // a file cannot be opened, read or mapped
    ERR_FORMAT = -2,  // a file's bytes are not what its format demands
    ERR_SHAPE = -3,   // sizes do not fit together or are not supported
    ERR_MEMORY = -4,  // allocation failed
    ERR_WRITE = -5,   // a file cannot be written
    ERR_USAGE = -6,   // an argument is wrong
    ERR_NUMBER = -7,  // a number is not finite
    ERR_STOPPED = -8, // a signal asked to stop
};

/* What went wrong, in one line without newline that names the thing and the reason. */
typedef struct {
    int code;
    char text[400];
} Error;

/* Fill err (which may be NULL) and return code, so that `return error_set(...)` reads well. */
int error_set(Error *err, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Put "prefix: " before err's text, e.g. the name of the file that a parser was given. */
void error_prefix(Error *err, const char *prefix);

/* A broken promise between two of our own functions, never a user's mistake: print and abort. */
#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);      \
            abort();                                                                           \
        }                                                                                      \
    } while (0)

static inline size_t ceil_div(size_t a, size_t b) { return a / b + (a % b != 0); }
static inline size_t round_up(size_t a, size_t multiple) { return ceil_div(a, multiple) * multiple; }
static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* *product = a * b; false, with *product untouched, when it does not fit. */
static inline bool size_mul(size_t *product, size_t a, size_t b) {
    return !__builtin_mul_overflow(a, b, product);
}

/* Zeroed memory on a cache line, with MEMORY_SLACK readable bytes behind it, so that a vector load
 * may start at the last element. NULL when memory is short or bytes overflows. Release with free(). */
#define MEMORY_SLACK 64
void *memory_alloc(size_t bytes);

/* Milliseconds of the monotonic clock. */
double time_ms(void);

/* Largest resident size of this process so far, bytes. */
size_t memory_peak(void);

/* Physical cores that this process may use, at least 1. */
int default_threads(void);

#ifdef __cplusplus
}
#endif
#endif
