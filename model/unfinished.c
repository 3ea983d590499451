#include "unfinished.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

static _Atomic(const char *) unfinished;  // neither a signal handler nor one of exit() can be given it

void unfinished_set(const char *path) {
    static atomic_flag registered = ATOMIC_FLAG_INIT;
    unfinished = path;
    if (!atomic_flag_test_and_set(&registered)) {
        atexit(unfinished_remove);
    }
}

void unfinished_forget(const char *path) { atomic_compare_exchange_strong(&unfinished, &path, NULL); }

void unfinished_remove(void) {
    const char *path = atomic_exchange(&unfinished, NULL);
    if (path) {
        unlink(path);
    }
}
