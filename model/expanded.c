#include "expanded.h"

#include <string.h>

int expanded_open(Expanded *e, const Checkpoint *file, Error *err) {
    *e = (Expanded){
        .ck = *file,
        .sections = malloc(file->n_sections * sizeof *e->sections),
        .file = file,
        .dense = calloc(file->n_sections, sizeof *e->dense),
    };
    if (!e->sections || !e->dense) {
        expanded_close(e);
        return error_set(err, ERR_MEMORY, "no memory for the section table");
    }
    memcpy(e->sections, file->sections, file->n_sections * sizeof *e->sections);
    e->ck.sections = e->sections;
    e->ck.mapped = false;  // the mapping stays the file's
    for (size_t i = 0; i < file->n_sections; i++) {
        FileSection *s = &e->sections[i];
        if (s->format == FORMAT_TILED_CBC) {
            s->format = FORMAT_DENSE;
            s->bytes = s->rows * dense_stride(s->cols) * sizeof(fp16);
            e->ck.bytes += s->bytes - file->sections[i].bytes;
        }
    }
    return OK;
}

void expanded_close(Expanded *e) {
    for (size_t i = 0; e->dense && i < e->ck.n_sections; i++) {
        if (e->dense[i]) {
            e->be->release(e->be, e->dense[i]);
        }
    }
    free(e->dense);
    free(e->sections);
    *e = (Expanded){0};
}

static bool place_expanded(void *user, Matrix *m, Backend *be, const Checkpoint *ck, const FileSection *s) {
    Expanded *e = user;
    const size_t i = (size_t)(s - ck->sections);
    const FileSection *stored = &e->file->sections[i];
    if (stored->format != FORMAT_TILED_CBC) {
        return weights_of_file(NULL).place(NULL, m, be, e->file, stored);
    }
    fp16 *host = memory_alloc(s->bytes);
    void *dense = host ? be->alloc(be, s->bytes) : NULL;
    if (dense) {
        const TiledCbc cbc = checkpoint_matrix(e->file, stored).cbc;
        *m = checkpoint_shape(s);
        m->stride = dense_stride(m->cols);
        m->dense = dense;
        memset(host, 0, s->bytes);
        tiled_cbc_decode(host, m->stride, &cbc);
        be->write(be, dense, host, s->bytes);
        e->be = be;
        e->dense[i] = dense;
    }
    free(host);
    return dense != NULL;
}

WeightSource weights_of_expanded(Expanded *e, Progress *progress) {
    return (WeightSource){.place = place_expanded, .user = e, .made = true, .progress = progress};
}
