/* fuzz_checkpoint.c: model files of any bytes (model/checkpoint.h), printed by info_print if they pass. */
#include "../../export/info.h"
#include "../../model/checkpoint.h"
#include "fuzz.h"

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

#define MAX_DECODED (1 << 20)  // values; larger matrices take time and show nothing new

static bool table_fits(const FileHeader *h, size_t size) {
    return h->table_offset % 8 == 0 && h->table_offset >= sizeof *h && h->table_offset <= size &&
           h->n_sections <= (size - h->table_offset) / sizeof(FileSection);
}

/* Make the hash right, so that the checks behind it are reached. */
static void seal(unsigned char *file, size_t size) {
    FileHeader *h = (FileHeader *)file;
    if (size >= sizeof *h && table_fits(h, size)) {
        h->hash = format_hash(h, (const FileSection *)(file + h->table_offset));
    }
}

static void use_matrix(const Checkpoint *ck, const FileSection *s) {
    const Matrix m = checkpoint_matrix(ck, s);
    size_t n;
    if (m.format == FORMAT_TILED_CBC && size_mul(&n, m.rows, m.cols) && n <= MAX_DECODED) {
        fp16 *decoded = malloc(n * sizeof *decoded);
        CHECK(decoded);
        tiled_cbc_decode(decoded, m.cols, &m.cbc);
        free(decoded);
    }
}

static void use(const Checkpoint *ck) {
    static FILE *nowhere;
    if (!nowhere) {
        nowhere = fopen("/dev/null", "w");
        CHECK(nowhere);
    }
    Error err;
    checkpoint_verify(ck, &err);
    for (size_t i = 0; i < ck->n_sections; i++) {
        if (ck->sections[i].kind >= SECTION_EMBEDDING && ck->sections[i].kind <= SECTION_DOWN) {
            use_matrix(ck, &ck->sections[i]);
        }
    }
    info_print(nowhere, ck);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    void *file;  // of exactly this size, so that the sanitizer sees the first byte behind
    CHECK(posix_memalign(&file, 64, size) == 0);
    memcpy(file, data, size);
    seal(file, size);
    Checkpoint ck;
    Error err;
    if (checkpoint_parse(&ck, file, size, &err) == OK) {
        use(&ck);
        checkpoint_close(&ck);
    }
    free(file);
    return 0;
}

/* Most of a small model file is padding that nobody reads. So change in place, most of the time, what is
 * read: the header, an entry of the table, or a section. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    FileHeader h;
    const unsigned aim = seed % 8, choice = seed / 8;
    if (size < sizeof h || aim == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    memcpy(&h, data, sizeof h);
    uint8_t *target = data;
    size_t n = sizeof h;
    if (aim > 1 && table_fits(&h, size) && h.n_sections > 0) {
        FileSection s;
        target = data + h.table_offset + choice % h.n_sections * sizeof s;
        n = sizeof s;
        memcpy(&s, target, n);
        if (aim > 4 && s.offset < size && s.bytes > 0) {
            target = data + s.offset;
            n = min_size(s.bytes, size - s.offset);
        }
    }
    LLVMFuzzerMutate(target, n, n);
    return size;
}
