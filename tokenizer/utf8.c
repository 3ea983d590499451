#include "utf8.h"

/* Number of bytes that a character beginning with lead has; 0 if none begins so. */
static int length_by_lead(unsigned char lead) {
    if (lead < 0x80) {
        return 1;
    }
    if (lead < 0xc2) {  // a continuation byte, or an overlong form of U+0000 .. U+007F
        return 0;
    }
    if (lead < 0xe0) {
        return 2;
    }
    if (lead < 0xf0) {
        return 3;
    }
    return lead <= 0xf4 ? 4 : 0;  // above F4 lies nothing up to U+10FFFF
}

int utf8_length(const unsigned char *s, size_t n) {
    const unsigned char lead = s[0];
    const int length = length_by_lead(lead);
    // Four leads narrow the range of their second byte; all other bytes are 80 .. BF.
    unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;   // no overlong forms
    unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;  // no surrogates, <= U+10FFFF
    for (int i = 1; i < length; i++) {
        if ((size_t)i >= n) {
            return -1;
        }
        if (s[i] < low || s[i] > high) {
            return 0;
        }
        low = 0x80;
        high = 0xbf;
    }
    return length;
}

size_t utf8_check(const void *s, size_t n) {
    const unsigned char *bytes = s;
    size_t offset = 0;
    while (offset < n) {
        const int length = utf8_length(bytes + offset, n - offset);
        if (length <= 0) {
            break;
        }
        offset += (size_t)length;
    }
    return offset;
}
