#include "input.h"

#include <errno.h>
#include <string.h>

int input_read_stream(Bytes *bytes, FILE *f, const char *name, Error *err) {
    size_t capacity = 0, n = 0;
    char *data = NULL;
    do {
        if (n == capacity) {
            capacity = capacity ? 2 * capacity : 65536;
            char *grown = realloc(data, capacity);
            if (!grown) {
                free(data);
                return error_set(err, ERR_MEMORY, "%.300s: no memory for its text", name);
            }
            data = grown;
        }
        n += fread(data + n, 1, capacity - n, f);
    } while (!feof(f) && !ferror(f));
    if (ferror(f)) {
        free(data);
        return error_set(err, ERR_OPEN, "%.300s: %s", name, strerror(errno));
    }
    *bytes = (Bytes){data, n};
    return OK;
}

int input_read_file(Bytes *bytes, const char *path, Error *err) {
    FILE *f = fopen(path, "rb");
    if (!f) {
        return error_set(err, ERR_OPEN, "%.300s: %s", path, strerror(errno));
    }
    const int rc = input_read_stream(bytes, f, path, err);
    fclose(f);
    return rc;
}

int ids_from_raw(Ids *ids, const Bytes *raw, const char *name, int vocab, Error *err) {
    const size_t width = vocab > 65536 ? 4 : 2;
    if (raw->n % width != 0) {
        return error_set(err, ERR_FORMAT, "%.300s: %zu bytes are not a whole number of %zu-byte ids", name, raw->n,
                         width);
    }
    int *out = memory_alloc(raw->n / width * sizeof *out);
    if (!out) {
        return error_set(err, ERR_MEMORY, "no memory for %zu ids", raw->n / width);
    }
    for (size_t i = 0; i < raw->n / width; i++) {
        uint32_t id = 0;
        memcpy(&id, raw->data + i * width, width);
        if (id >= (uint32_t)vocab) {
            free(out);
            return error_set(err, ERR_FORMAT, "%.300s: id %u at position %zu, the vocabulary has %d", name, id, i, vocab);
        }
        out[i] = (int)id;
    }
    *ids = (Ids){out, raw->n / width};
    return OK;
}
