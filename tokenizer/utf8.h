/* utf8.h: well-formed UTF-8 (Unicode 15, table 3-7: no surrogates, no overlong forms, at most U+10FFFF). */
#ifndef SPDP_UTF8_H
#define SPDP_UTF8_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Length 1 .. 4 of the character at the start of s (n >= 1 bytes); 0 if its bytes cannot be a character;
 * -1 if they are the beginning of one that needs more than n bytes. */
int utf8_length(const unsigned char *s, size_t n);

/* Offset of the first byte that is not part of a whole character; n if all is well. */
size_t utf8_check(const void *s, size_t n);

#ifdef __cplusplus
}
#endif
#endif
