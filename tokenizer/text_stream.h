/* text_stream.h: a stream of text that may end at a stop string. */
#ifndef SPDP_TEXT_STREAM_H
#define SPDP_TEXT_STREAM_H

#include <stdbool.h>
#include <stddef.h>

/* Passes bytes on as soon as they cannot be the beginning of a stop string, so that a stop string is found
 * across any borders and is never passed on, itself or in part. */
typedef struct {
    const char *const *stops;  // n_stops non-empty strings, not owned
    size_t n_stops;
    void (*write)(void *user, const char *bytes, size_t n);
    void *user;
    char *held;  // bytes that may begin a stop string: fewer than the longest one has
    size_t n_held;
} TextStream;

/* Returns false when memory is short. */
bool text_stream_init(TextStream *s, const char *const *stops, size_t n_stops,
                      void (*write)(void *user, const char *bytes, size_t n), void *user);

/* Take n more bytes. Returns true when a stop string is complete: what stood before it has been passed on,
 * the rest is dropped, and the stream is over. Of several, the one that is complete first counts; of those
 * complete at the same byte, the longest. */
bool text_stream_put(TextStream *s, const char *bytes, size_t n);

/* The text is over without a stop string: pass on what is held. */
void text_stream_end(TextStream *s);

void text_stream_free(TextStream *s);

#endif
