#include "text_stream.h"

#include <stdlib.h>
#include <string.h>

bool text_stream_init(TextStream *s, const char *const *stops, size_t n_stops,
                      void (*write)(void *user, const char *bytes, size_t n), void *user) {
    size_t longest = 1;
    for (size_t i = 0; i < n_stops; i++) {
        const size_t length = strlen(stops[i]);
        longest = length > longest ? length : longest;
    }
    *s = (TextStream){.stops = stops, .n_stops = n_stops, .write = write, .user = user};
    s->held = malloc(longest);
    return s->held != NULL;
}

static void pass_on(const TextStream *s, const char *bytes, size_t n) {
    if (n > 0) {
        s->write(s->user, bytes, n);
    }
}

/* True if some stop string begins with these n >= 1 bytes. */
static bool begins_stop(const TextStream *s, const char *bytes, size_t n) {
    for (size_t i = 0; i < s->n_stops; i++) {
        if (n <= strlen(s->stops[i]) && memcmp(s->stops[i], bytes, n) == 0) {
            return true;
        }
    }
    return false;
}

/* Length of the longest stop string that ends what is held; 0 if none does. */
static size_t complete_stop(const TextStream *s) {
    size_t longest = 0;
    for (size_t i = 0; i < s->n_stops; i++) {
        const size_t length = strlen(s->stops[i]);
        if (length > longest && length <= s->n_held &&
            memcmp(s->held + s->n_held - length, s->stops[i], length) == 0) {
            longest = length;
        }
    }
    return longest;
}

/* Pass on the held bytes before the first one from where on they may begin a stop string. */
static void release(TextStream *s) {
    size_t start = 0;
    while (start < s->n_held && !begins_stop(s, s->held + start, s->n_held - start)) {
        start++;
    }
    pass_on(s, s->held, start);
    s->n_held -= start;
    memmove(s->held, s->held + start, s->n_held);
}

bool text_stream_put(TextStream *s, const char *bytes, size_t n) {
    size_t taken = 0;
    while (taken < n) {
        if (s->n_held == 0) {  // the usual case: text far from any stop string goes on in one write
            const size_t start = taken;
            while (taken < n && !begins_stop(s, bytes + taken, 1)) {
                taken++;
            }
            pass_on(s, bytes + start, taken - start);
            if (taken == n) {
                break;
            }
        }
        s->held[s->n_held++] = bytes[taken++];
        const size_t stop_length = complete_stop(s);
        if (stop_length > 0) {
            pass_on(s, s->held, s->n_held - stop_length);
            s->n_held = 0;
            return true;
        }
        release(s);
    }
    return false;
}

void text_stream_end(TextStream *s) {
    pass_on(s, s->held, s->n_held);
    s->n_held = 0;
}

void text_stream_free(TextStream *s) {
    free(s->held);
    s->held = NULL;
}
