/* skip.h: tests that some builds leave out. Included after cmocka.h. */
#ifndef SPDP_TESTS_SKIP_H
#define SPDP_TESTS_SKIP_H

#include <stdlib.h>

/* Minutes in a build with sanitizers. */
static inline void skip_long_test(void) {
    if (getenv("SPDP_TEST_SHORT")) {
        print_message("skipped: too long for SPDP_TEST_SHORT\n");
        skip();
    }
}

#endif
