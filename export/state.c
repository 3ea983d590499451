#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#define MAGIC "SPDPSTAT"
#define NEW_SUFFIX ".new"  // of a state that is being written

/* Begins the file; then come the section entries, then the stream. */
typedef struct {
    char magic[8];
    uint64_t marks[N_STATE_MARKS];
    uint64_t checksum;  // XXH3 of this with 0 here, of the section entries with that as seed, of the stream so, too
    uint64_t n_layers, n_sections, end, stream_bytes;
    PackReport report;
} StateHeader;

/* ---- marks ---- */

static uint64_t hash_text(const char *text) { return XXH3_64bits(text, strlen(text)); }

static uint64_t hash_version(void) { return hash_text(VERSION) ^ sizeof(StateHeader); }

static uint64_t hash_source(const PackOptions *o, const Source *s) {
    const Config *c = &s->config;
    const uint64_t sizes[] = {s->fingerprint, s->bytes, s->tied};
    const int numbers[] = {c->dim,      c->hidden_dim, c->n_layers,   c->n_heads, c->n_kv_heads,
                           c->head_dim, c->seq_len,    c->vocab_size, c->bos_id,  c->n_eos};
    const double reals[] = {(double)c->norm_eps, c->rope_theta};
    uint64_t hash = hash_text(s->kind);
    hash = XXH3_64bits_withSeed(o->source_name, strlen(o->source_name), hash);
    hash = XXH3_64bits_withSeed(sizes, sizeof sizes, hash);
    hash = XXH3_64bits_withSeed(numbers, sizeof numbers, hash);
    hash = XXH3_64bits_withSeed(reals, sizeof reals, hash);
    return XXH3_64bits_withSeed(c->eos_id, (size_t)c->n_eos * sizeof *c->eos_id, hash);
}

static uint64_t hash_calibration(const CalibText *text) {
    return XXH3_64bits_withSeed(text->ids, text->n * sizeof *text->ids, text->length) ^ hash_text(text->name);
}

void state_marks(uint64_t marks[N_STATE_MARKS], const PackOptions *o, const Source *source) {
    const double sp[] = {o->sp.mlp, o->sp.attn};
    memset(marks, 0, N_STATE_MARKS * sizeof *marks);
    marks[STATE_VERSION] = hash_version();
    marks[STATE_SOURCE] = hash_source(o, source);
    marks[STATE_METHOD] = (uint64_t)o->method;
    marks[STATE_SP] = XXH3_64bits(sp, sizeof sp);
    marks[STATE_PRUNE] = o->prune_attn;
    marks[STATE_FORMAT] = (uint64_t)o->storage;
    marks[STATE_DP] = XXH3_64bits(&o->dp, sizeof o->dp);
    marks[STATE_TOKENIZER] = o->tokenizer ? XXH3_64bits(o->tokenizer, o->tokenizer_bytes) : 0;
    marks[STATE_BACKEND] = hash_text(o->be->name);
    marks[STATE_CALIB] = hash_calibration(o->sp_text);
    marks[STATE_CALIB_DP] = o->dp > 0 ? hash_calibration(o->dp_text) : 0;
}

const char *state_difference(const uint64_t a[N_STATE_MARKS], const uint64_t b[N_STATE_MARKS]) {
    static const char *const names[N_STATE_MARKS] = {
        [STATE_VERSION] = "the version of this program",
        [STATE_SOURCE] = "SOURCE",
        [STATE_METHOD] = "--method",
        [STATE_SP] = "--sp",
        [STATE_PRUNE] = "--prune",
        [STATE_FORMAT] = "--format",
        [STATE_DP] = "--dp",
        [STATE_TOKENIZER] = "the tokenizer",
        [STATE_BACKEND] = "the backend (-b)",
        [STATE_CALIB] = "the calibration text (--calib, --calib-tokens, --calib-len)",
        [STATE_CALIB_DP] = "the calibration text for --dp (--calib-dp)",
    };
    for (int i = 0; i < N_STATE_MARKS; i++) {
        if (a[i] != b[i]) {
            return names[i];
        }
    }
    return NULL;
}

/* ---- the file ---- */

static uint64_t checksum(const StateHeader *header, const void *sections, const void *stream) {
    StateHeader copy = *header;
    copy.checksum = 0;
    const uint64_t sum = XXH3_64bits_withSeed(sections, header->n_sections * sizeof(FileSection),
                                              XXH3_64bits(&copy, sizeof copy));
    return XXH3_64bits_withSeed(stream, header->stream_bytes, sum);
}

static bool write_all(FILE *f, const void *bytes, size_t n) { return n == 0 || fwrite(bytes, 1, n, f) == n; }

/* Write it to path and to the disk. */
static bool write_state(const char *path, const PackState *s) {
    StateHeader header = {
        .magic = MAGIC,
        .n_layers = s->n_layers,
        .n_sections = s->position.n_sections,
        .end = s->position.end,
        .stream_bytes = s->stream_bytes,
        .report = s->report,
    };
    memcpy(header.marks, s->marks, sizeof header.marks);
    header.checksum = checksum(&header, s->position.sections, s->stream);
    unlink(path);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "wb");
    if (!f) {
        return false;
    }
    const bool ok = write_all(f, &header, sizeof header) &&
                    write_all(f, s->position.sections, header.n_sections * sizeof *s->position.sections) &&
                    write_all(f, s->stream, s->stream_bytes) && fflush(f) == 0 && fsync(fd) == 0;
    const int reason = errno;
    const bool closed = fclose(f) == 0;
    errno = ok ? errno : reason;
    return ok && closed;
}

static bool new_name(char **name, const char *path) { return asprintf(name, "%s" NEW_SUFFIX, path) >= 0; }

int state_save(const char *path, const PackState *state, Error *err) {
    char *name;
    if (!new_name(&name, path)) {
        return error_set(err, ERR_MEMORY, "no memory to write %.300s", path);
    }
    const bool ok = write_state(name, state) && rename(name, path) == 0;
    const int rc = ok ? OK : error_set(err, ERR_WRITE, "%.250s: cannot be written: %s", path, strerror(errno));
    if (ok) {
        state_sync_directory(path);
    } else {
        unlink(name);
    }
    free(name);
    return rc;
}

/* Fill in all but marks and file from a file of our version. */
static bool parse(PackState *s) {
    const StateHeader *h = (const StateHeader *)s->file.data;
    const size_t room = s->file.bytes - sizeof *h;
    if (h->n_sections > room / sizeof(FileSection) ||
        room - h->n_sections * sizeof(FileSection) != h->stream_bytes) {
        return false;
    }
    s->n_layers = h->n_layers;
    s->report = h->report;
    s->position = (WriterPosition){(const FileSection *)(h + 1), h->n_sections, h->end};
    s->stream = s->position.sections + h->n_sections;
    s->stream_bytes = h->stream_bytes;
    return checksum(h, s->position.sections, s->stream) == h->checksum;
}

int state_load(PackState *state, const char *path, Error *err) {
    *state = (PackState){0};
    if (access(path, F_OK) != 0 && errno == ENOENT) {
        return error_set(err, ERR_OPEN, "%.250s: there is none, so there is nothing to resume", path);
    }
    const int rc = mapping_open(&state->file, AT_FDCWD, path, err);
    if (rc) {
        return rc;
    }
    const StateHeader *h = (const StateHeader *)state->file.data;
    const bool whole = state->file.bytes >= sizeof *h && memcmp(h->magic, MAGIC, sizeof h->magic) == 0;
    if (whole) {
        memcpy(state->marks, h->marks, sizeof state->marks);
    }
    if (!whole || (h->marks[STATE_VERSION] == hash_version() && !parse(state))) {
        state_close(state);
        return error_set(err, ERR_FORMAT, "%.250s: is damaged", path);
    }
    return OK;
}

void state_close(PackState *state) {
    mapping_close(&state->file);
    *state = (PackState){0};
}

void state_remove(const char *path) {
    char *name;
    if (new_name(&name, path)) {
        unlink(name);
        free(name);
    }
    unlink(path);
}

void state_sync_directory(const char *path) {
    char *copy = strdup(path);  // dirname changes it
    const int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(copy);
}
