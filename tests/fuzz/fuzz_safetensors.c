/* fuzz_safetensors.c: safetensors files of any bytes (export/safetensors.h). */
#include "../../export/safetensors.h"
#include "fuzz.h"

/* What the header promises of every entry; reading the last byte shows it to the sanitizer. */
static void use(const Safetensors *st) {
    volatile unsigned char sink = 0;
    for (size_t i = 0; i < st->n_entries; i++) {
        const SafetensorsEntry *e = &st->entries[i];
        CHECK(e->begin <= e->end && e->end <= st->data_bytes);
        CHECK(e->rank >= 0 && e->rank <= SAFETENSORS_MAX_RANK);
        CHECK(strlen(e->dtype_name) < sizeof e->dtype_name);
        size_t elements = 1;
        for (int d = 0; d < e->rank; d++) {
            CHECK(e->dtype == DTYPE_OTHER || size_mul(&elements, elements, e->shape[d]));
        }
        CHECK(e->dtype == DTYPE_OTHER || elements <= st->data_bytes);
        if (e->end > e->begin) {
            sink = st->data[e->begin] ^ st->data[e->end - 1];
        }
    }
    (void)sink;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    unsigned char *file = exact_copy(data, size);
    Safetensors st;
    Error err;
    if (safetensors_parse(&st, file, size, &err) == OK) {
        use(&st);
        safetensors_free(&st);
    }
    free(file);
    return 0;
}
