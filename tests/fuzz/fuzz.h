/* fuzz.h: what the fuzz targets share. What is loaded once stays for the whole search: libFuzzer calls a
 * target millions of times in one process. */
#ifndef SPDP_FUZZ_H
#define SPDP_FUZZ_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../kernels/util.h"
#include "../../tokenizer/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A copy of exactly this size, so that the sanitizer sees the first byte behind it. */
static inline void *exact_copy(const void *data, size_t size) {
    void *copy = malloc(size);
    CHECK(copy || size == 0);
    if (size > 0) {
        memcpy(copy, data, size);
    }
    return copy;
}

/* Path of a file in memory that holds these bytes until the next call. */
static inline const char *memory_file(const void *data, size_t size) {
    static char path[40];
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("input", MFD_CLOEXEC);
        CHECK(fd >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    CHECK(ftruncate(fd, (off_t)size) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    return path;
}

/* The demo's tokenizer. Targets that use it run from the root of the repository. */
static inline const Tokenizer *demo_tokenizer(void) {
    enum { MOST = 1 << 20 };  // bytes
    static const char path[] = "demo/tokenizer.model";
    static Tokenizer *t;
    if (!t) {
        char error[200] = "cannot be read";
        char *model = malloc(MOST);
        FILE *f = fopen(path, "rb");
        const size_t n = f && model ? fread(model, 1, MOST, f) : 0;
        if (!tokenizer_load(&t, model, n, error, sizeof error)) {
            fprintf(stderr, "%s: %s (run from the root of the repository)\n", path, error);
            exit(1);
        }
        fclose(f);
        free(model);
    }
    return t;
}

#endif
