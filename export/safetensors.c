#include "safetensors.h"
#include "../model/json.h"

#include <string.h>


static size_t dtype_size(DType dtype) {
    return dtype == DTYPE_F32 ? 4 : 2;
}

static DType dtype_of(const char *name) {
    if (strcmp(name, "F16") == 0) {
        return DTYPE_F16;
    }
    if (strcmp(name, "BF16") == 0) {
        return DTYPE_BF16;
    }
    return strcmp(name, "F32") == 0 ? DTYPE_F32 : DTYPE_OTHER;
}

/* An array of at most max integers; their number, or -1 if it is anything else. */
static int read_integers(const cJSON *array, size_t *values, int max) {
    if (!cJSON_IsArray(array)) {
        return -1;
    }
    int n = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, array) {
        uint64_t value;
        if (n == max || !json_u64(item, &value)) {
            return -1;
        }
        values[n++] = value;
    }
    return n;
}

/* Do the bytes of a known dtype match the shape? */
static int check_size(const SafetensorsEntry *e, Error *err) {
    size_t bytes = dtype_size(e->dtype);
    for (int i = 0; i < e->rank; i++) {
        if (!size_mul(&bytes, bytes, e->shape[i])) {
            return error_set(err, ERR_FORMAT, "tensor %.100s: shape is too large", e->name);
        }
    }
    if (bytes != e->end - e->begin) {
        return error_set(err, ERR_FORMAT, "tensor %.100s: %zu bytes of data for a shape of %zu", e->name,
                         e->end - e->begin, bytes);
    }
    return OK;
}

static int read_entry(SafetensorsEntry *e, const cJSON *item, size_t data_bytes, Error *err) {
    const char *name = item->string;
    const char *dtype = cJSON_GetStringValue(json_get(item, "dtype"));
    if (!dtype) {
        return error_set(err, ERR_FORMAT, "tensor %.100s: no dtype", name);
    }
    e->dtype = dtype_of(dtype);
    snprintf(e->dtype_name, sizeof e->dtype_name, "%s", dtype);
    e->rank = read_integers(json_get(item, "shape"), e->shape, SAFETENSORS_MAX_RANK);
    if (e->rank < 0) {
        return error_set(err, ERR_FORMAT, "tensor %.100s: shape is not a list of at most %d sizes", name,
                         SAFETENSORS_MAX_RANK);
    }
    size_t range[2];
    if (read_integers(json_get(item, "data_offsets"), range, 2) != 2) {
        return error_set(err, ERR_FORMAT, "tensor %.100s: data_offsets is not a pair of offsets", name);
    }
    e->begin = range[0];
    e->end = range[1];
    if (e->begin > e->end || e->end > data_bytes) {
        return error_set(err, ERR_FORMAT,
                         "tensor %.100s: bytes %zu .. %zu are outside the data (%zu bytes): truncated file?",
                         name, e->begin, e->end, data_bytes);
    }
    e->name = strdup(name);
    if (!e->name) {
        return error_set(err, ERR_MEMORY, "out of memory for tensor names");
    }
    return e->dtype == DTYPE_OTHER ? OK : check_size(e, err);
}

static int read_entries(Safetensors *st, const cJSON *header, Error *err) {
    const cJSON *item;
    cJSON_ArrayForEach(item, header) {
        if (strcmp(item->string, "__metadata__") == 0) {
            continue;
        }
        const int rc = read_entry(&st->entries[st->n_entries++], item, st->data_bytes, err);
        if (rc) {
            return rc;
        }
    }
    return OK;
}

static int compare_ranges(const void *a, const void *b) {
    const SafetensorsEntry *x = *(const SafetensorsEntry *const *)a;
    const SafetensorsEntry *y = *(const SafetensorsEntry *const *)b;
    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    return (x->end > y->end) - (x->end < y->end);
}

/* The tensors in the order of their bytes follow one another without overlap or hole, to the data's end. */
static int check_tiling(const Safetensors *st, Error *err) {
    const SafetensorsEntry **order = memory_alloc(st->n_entries * sizeof *order);
    if (!order) {
        return error_set(err, ERR_MEMORY, "out of memory for %zu tensors", st->n_entries);
    }
    for (size_t i = 0; i < st->n_entries; i++) {
        order[i] = &st->entries[i];
    }
    qsort(order, st->n_entries, sizeof *order, compare_ranges);
    int rc = OK;
    size_t end = 0;
    for (size_t i = 0; i < st->n_entries && !rc; i++) {
        if (order[i]->begin != end) {
            rc = error_set(err, ERR_FORMAT, "tensor %.100s: data begins at byte %zu, %s the tensor before",
                           order[i]->name, order[i]->begin,
                           order[i]->begin < end ? "inside" : "with a hole behind");
        }
        end = order[i]->end;
    }
    free(order);
    if (!rc && end != st->data_bytes) {
        return error_set(err, ERR_FORMAT, "%zu bytes behind the last tensor", st->data_bytes - end);
    }
    return rc;
}

/* The length of the JSON header behind its eight bytes of length. */
static int header_length(size_t *length, const unsigned char *file, size_t bytes, Error *err) {
    uint64_t n;
    if (bytes < sizeof n) {
        return error_set(err, ERR_FORMAT, "%zu bytes are too few for a safetensors file", bytes);
    }
    memcpy(&n, file, sizeof n);
    if (n > SAFETENSORS_MAX_HEADER) {
        return error_set(err, ERR_FORMAT, "header of %zu bytes is over the limit of %d", (size_t)n,
                         SAFETENSORS_MAX_HEADER);
    }
    if (n > bytes - sizeof n) {
        return error_set(err, ERR_FORMAT, "header of %zu bytes is longer than the file (%zu bytes)",
                         (size_t)n, bytes);
    }
    *length = n;
    return OK;
}

int safetensors_parse(Safetensors *st, const void *file, size_t bytes, Error *err) {
    size_t length = 0;
    int rc = header_length(&length, file, bytes, err);
    if (rc) {
        return rc;
    }
    const char *text = (const char *)file + sizeof(uint64_t);
    if (length == 0 || text[0] != '{') {
        return error_set(err, ERR_FORMAT, "header does not begin with '{': not a safetensors file");
    }
    Error reason = {0};
    cJSON *header = json_parse(text, length, JSON_INTEGERS, &reason);
    if (!header) {
        return error_set(err, reason.code, "header: %s", reason.text);
    }
    Safetensors parsed = {
        .data = (const unsigned char *)text + length,
        .data_bytes = bytes - sizeof(uint64_t) - length,
        .entries = memory_alloc((size_t)cJSON_GetArraySize(header) * sizeof *parsed.entries),
    };
    if (!parsed.entries) {
        rc = error_set(err, ERR_MEMORY, "out of memory for the tensors of a header of %zu bytes", length);
    }
    rc = rc ? rc : read_entries(&parsed, header, err);
    rc = rc ? rc : check_tiling(&parsed, err);
    cJSON_Delete(header);
    if (rc) {
        safetensors_free(&parsed);
        return rc;
    }
    *st = parsed;
    return OK;
}

void safetensors_free(Safetensors *st) {
    for (size_t i = 0; i < st->n_entries; i++) {
        free(st->entries[i].name);
    }
    free(st->entries);
    *st = (Safetensors){0};
}
