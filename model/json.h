/* json.h: strict reading of untrusted JSON on top of cJSON, which lets too much through for file headers; and
 * writing that leaves nothing out. */
#ifndef SPDP_JSON_H
#define SPDP_JSON_H

#include <cjson/cJSON.h>

#include "../kernels/util.h"

/* From now on the program ends with a line and status 1 where cJSON finds no memory: who builds a large value would
 * have to look at every item, and a report that lacks some looks whole. */
void json_require_memory(void);

enum { JSON_INTEGERS = 1 };  // every number must be written as an integer (no fraction, no exponent)

/* Parse text[0 .. bytes-1] as one JSON value (RFC 8259) with nothing but white space around it.
 * Refused: invalid UTF-8, NUL, the same key twice in one object, nesting deeper than 64, trailing text.
 * Release with cJSON_Delete(). On failure returns NULL and err says what and at which byte. */
cJSON *json_parse(const char *text, size_t bytes, int flags, Error *err);

/* Member of an object by its exact name; NULL if absent or null. */
const cJSON *json_get(const cJSON *object, const char *key);

/* An integer 0 .. 2^53 without fraction. False otherwise, *value untouched. */
bool json_u64(const cJSON *item, uint64_t *value);

#endif
