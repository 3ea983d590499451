/* expanded.h: the dense form of a compressed model file, to measure its speed beside. */
#ifndef SPDP_EXPANDED_H
#define SPDP_EXPANDED_H

#include "model.h"

/* A file whose Tiled-CBC matrices are dense, with their zeros. `ck` lists the matrices so; the bytes of those that
 * were compressed are only made when a backend takes them. */
typedef struct {
    Checkpoint ck;
    FileSection *sections;   // ck's
    const Checkpoint *file;  // not owned
    Backend *be;             // not owned; which
    void **dense;            // the matrices were made on: (n_sections), NULL where none was
} Expanded;

/* file stays open while e lives; e is closed before the backend is freed. Returns 0 or ERR_MEMORY, e is then empty. */
int expanded_open(Expanded *e, const Checkpoint *file, Error *err);
void expanded_close(Expanded *e);

/* To be given to model_load_from with e->ck. */
WeightSource weights_of_expanded(Expanded *e, Progress *progress);

#endif
