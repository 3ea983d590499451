/* What make lint puts before every source: the analyzer sees one file at a time and would take error_set(), which
 * returns its code, for a function that may return 0. */
#include "../kernels/util.h"
#define error_set(err, code, ...) ((error_set)(err, code, __VA_ARGS__), (code))
