/* checkpoint.h: read a model file (export/FORMAT.md). Nothing in the file is trusted. */
#ifndef SPDP_CHECKPOINT_H
#define SPDP_CHECKPOINT_H

#include "../kernels/matrix.h"
#include "config.h"
#include "format.h"
#include "mapping.h"

typedef struct {
    Config config;
    const unsigned char *data;  // the whole file
    size_t bytes;
    const FileSection *sections;
    size_t n_sections;
    bool mapped;  // data is a Mapping of our own
} Checkpoint;

/* Map a model file and check all of it but the values: header, sections, shapes, every tile offset and
 * every column's count. `ck` is filled on success and untouched on failure; close with checkpoint_close.
 * Returns 0, ERR_OPEN, ERR_FORMAT or ERR_SHAPE; err names path and reason. */
int checkpoint_open(Checkpoint *ck, const char *path, Error *err);

/* The same for a file that is mapped, which messages call name; the mapping is closed with ck, and on failure. */
int checkpoint_of(Checkpoint *ck, Mapping *file, const char *name, Error *err);

/* The same for bytes in memory (64-byte aligned), which the caller keeps: the fuzz target. */
int checkpoint_parse(Checkpoint *ck, const void *data, size_t bytes, Error *err);

void checkpoint_close(Checkpoint *ck);

/* Compare every section with its checksum. Returns 0 or ERR_FORMAT naming the section. */
int checkpoint_verify(const Checkpoint *ck, Error *err);

/* Section of a kind and layer (-1 outside the layers), NULL if the file has none. */
const FileSection *checkpoint_find(const Checkpoint *ck, uint32_t kind, int layer);

static inline const void *checkpoint_bytes(const Checkpoint *ck, const FileSection *s) {
    return ck->data + s->offset;
}

/* A matrix section without its numbers. */
Matrix checkpoint_shape(const FileSection *s);

/* View of a matrix section, pointing into the file. */
Matrix checkpoint_matrix(const Checkpoint *ck, const FileSection *s);

/* Static sparsity of the matrices that were pruned, by the counts in the section table. */
double checkpoint_sparsity(const Checkpoint *ck);

/* Hash over header and section table as FileHeader.hash defines it; header->hash itself is ignored. */
uint64_t format_hash(const FileHeader *header, const FileSection *table);

#endif
