#include "writer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "../model/unfinished.h"
#include "state.h"

#define MAX_WRITE 0x7ffff000  // bytes; Linux writes no more in one call

/* A partial file begins with this, which makes it no model file yet, and nobody else's either. */
static const char mark[8] = "SPDPPART";

struct Writer {
    int fd;
    char *path, *partial, *state;
    bool force, keep;
    FileHeader header;
    FileSection *table;
    size_t n_sections, capacity;
    size_t end;  // of the bytes written so far
};

static int write_error(const char *path, const char *what, Error *err) {
    return error_set(err, ERR_WRITE, "%.250s: %s: %s", path, what, strerror(errno));
}

/* Offsets that are skipped stay holes, which read as zeros: the slack behind a section costs no write. */
static int write_at(const Writer *w, size_t offset, const void *bytes, size_t n, Error *err) {
    const char *from = bytes;
    while (n > 0) {
        const ssize_t written = pwrite(w->fd, from, min_size(n, MAX_WRITE), (off_t)offset);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            errno = written < 0 ? errno : EIO;
            return write_error(w->path, "cannot be written", err);
        }
        from += written;
        offset += (size_t)written;
        n -= (size_t)written;
    }
    return OK;
}

static FileHeader make_header(const Config *c) {
    FileHeader h = {
        .magic = FILE_MAGIC,
        .version = FILE_VERSION,
        .dim = c->dim,
        .hidden_dim = c->hidden_dim,
        .n_layers = c->n_layers,
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .head_dim = c->head_dim,
        .seq_len = c->seq_len,
        .vocab_size = c->vocab_size,
        .rope_theta = c->rope_theta,
        .norm_eps = c->norm_eps,
        .bos_id = c->bos_id,
        .n_eos = c->n_eos,
    };
    _Static_assert(sizeof h.eos_id == sizeof c->eos_id, "the file holds as many ids as the config");
    memcpy(h.eos_id, c->eos_id, sizeof h.eos_id);
    return h;
}

/* Refuse what the final rename would destroy. */
static int check_target(const char *path, bool force, Error *err) {
    struct stat st;
    if (!*path) {
        return error_set(err, ERR_WRITE, "the output file has an empty name");
    }
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode)) {
        return error_set(err, ERR_WRITE, "%.300s: is %s", path,
                         S_ISDIR(st.st_mode) ? "a directory" : "not a regular file");
    }
    if (!force && lstat(path, &st) == 0) {  // a dangling link is there, too
        return error_set(err, ERR_WRITE, "%.300s: exists already; --force replaces it", path);
    }
    return OK;
}

static void release(Writer *w) {
    if (w->fd >= 0) {
        close(w->fd);
    }
    unfinished_forget(w->partial);
    free(w->path);
    free(w->partial);
    free(w->state);
    free(w->table);
    free(w);
}

/* Is that file the one that its name stands for? Not if another writer has renamed or removed it before we had the
 * lock. */
static bool is_named(const struct stat *opened, const char *path) {
    struct stat named;
    return lstat(path, &named) == 0 && opened->st_dev == named.st_dev && opened->st_ino == named.st_ino;
}

/* Some network file systems know no locks: there, nothing keeps two writers apart. */
static bool lock(int fd) {
    return flock(fd, LOCK_EX | LOCK_NB) == 0 || errno == ENOSYS || errno == EOPNOTSUPP || errno == ENOLCK;
}

/* Open and lock <path>.partial. */
static int open_partial(Writer *w, bool create, Error *err) {
    struct stat opened;
    do {
        if (w->fd >= 0) {
            close(w->fd);
        }
        w->fd = open(w->partial, O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0), 0666);
        if (w->fd < 0 && errno == ENOENT && !create) {
            return error_set(err, ERR_OPEN, "%.250s: there is none, so there is nothing to resume", w->partial);
        }
        if (w->fd < 0 || fstat(w->fd, &opened) != 0) {
            return write_error(w->path, "cannot be created", err);
        }
        if (!lock(w->fd)) {
            return error_set(err, ERR_WRITE, "%.250s: another conversion is writing it", w->partial);
        }
    } while (!is_named(&opened, w->partial));
    return OK;
}

/* Nothing but what a writer left may be written over; a resumed file may have its header already. */
static int check_partial(const Writer *w, bool complete, Error *err) {
    struct stat st;
    char begin[sizeof mark] = {0};
    if (fstat(w->fd, &st) != 0 || !S_ISREG(st.st_mode) || pread(w->fd, begin, sizeof begin, 0) < 0) {
        return error_set(err, ERR_WRITE, "%.250s: is not a regular file that can be read", w->partial);
    }
    if (st.st_size > 0 && memcmp(begin, mark, sizeof mark) != 0 &&
        !(complete && memcmp(begin, w->header.magic, sizeof w->header.magic) == 0)) {
        return error_set(err, ERR_WRITE,
                         "%.250s: is not what an interrupted conversion leaves; remove or rename it", w->partial);
    }
    return OK;
}

static char *with_suffix(const char *path, const char *suffix) {
    const size_t size = strlen(path) + strlen(suffix) + 1;
    char *name = malloc(size);
    if (name) {
        snprintf(name, size, "%s%s", path, suffix);
    }
    return name;
}

static Writer *new_writer(const char *path, const Config *config, bool force) {
    Writer *w = malloc(sizeof *w);
    if (w) {
        *w = (Writer){
            .fd = -1,
            .path = strdup(path),
            .partial = with_suffix(path, ".partial"),
            .state = with_suffix(path, ".partial.state"),
            .force = force,
            .header = make_header(config),
            .end = sizeof(FileHeader),
        };
        if (!w->path || !w->partial || !w->state) {
            release(w);
            w = NULL;
        }
    }
    return w;
}

static int open_writer(Writer **writer, const char *path, const Config *config, bool force, bool resume,
                       Error *err) {
    int rc = check_target(path, force, err);
    if (rc) {
        return rc;
    }
    Writer *w = new_writer(path, config, force);
    if (!w) {
        return error_set(err, ERR_MEMORY, "no memory to write %.300s", path);
    }
    rc = open_partial(w, !resume, err);
    rc = rc ? rc : check_partial(w, resume, err);
    if (rc) {
        release(w);
        return rc;
    }
    writer_keep(w, resume);
    if (!resume && (rc = write_at(w, 0, mark, sizeof mark, err))) {
        writer_abort(w);
        return rc;
    }
    *writer = w;
    return OK;
}

int writer_open(Writer **w, const char *path, const Config *config, bool force, Error *err) {
    return open_writer(w, path, config, force, false, err);
}

int writer_reopen(Writer **w, const char *path, const Config *config, bool force, Error *err) {
    return open_writer(w, path, config, force, true, err);
}

const char *writer_state_path(const Writer *w) { return w->state; }

void writer_keep(Writer *w, bool keep) {
    w->keep = keep;
    if (keep) {
        unfinished_forget(w->partial);
    } else {
        unfinished_set(w->partial);
    }
}

/* Where the next section, or the table, begins. */
static size_t next_offset(const Writer *w) { return round_up(w->end + MEMORY_SLACK, FILE_ALIGN); }

/* Room for n more sections. */
static int grow_table(Writer *w, size_t n, Error *err) {
    if (w->n_sections + n <= w->capacity) {
        return OK;
    }
    const size_t capacity = 2 * w->capacity + n + 64;
    FileSection *table = realloc(w->table, capacity * sizeof *table);
    if (!table) {
        return error_set(err, ERR_MEMORY, "no memory for a table of %zu sections", capacity);
    }
    w->table = table;
    w->capacity = capacity;
    return OK;
}

/* Write a section whose entry lacks only what follows from its place and its bytes. */
static int append(Writer *w, FileSection section, const char *name, const void *bytes, Error *err) {
    CHECK(strlen(name) < sizeof section.name);
    int rc = grow_table(w, 1, err);
    if (rc) {
        return rc;
    }
    memcpy(section.name, name, strlen(name));
    section.offset = next_offset(w);
    section.checksum = XXH3_64bits(bytes, section.bytes);
    if (ftruncate(w->fd, (off_t)w->end) != 0) {  // the table that writer_view may have left behind the sections
        return write_error(w->path, "cannot be written", err);
    }
    rc = write_at(w, section.offset, bytes, section.bytes, err);
    if (rc) {
        return rc;
    }
    w->table[w->n_sections++] = section;
    w->end = section.offset + section.bytes;
    return OK;
}

int writer_sync(Writer *w, WriterPosition *position, Error *err) {
    if (fdatasync(w->fd) != 0) {
        return write_error(w->path, "cannot be written", err);
    }
    *position = (WriterPosition){w->table, w->n_sections, w->end};
    return OK;
}

/* Does the partial file, in memory, hold those sections? */
static bool has_sections(const unsigned char *data, const WriterPosition *position) {
    for (size_t i = 0; i < position->n_sections; i++) {
        const FileSection *section = &position->sections[i];
        if (section->bytes > position->end || section->offset > position->end - section->bytes ||
            XXH3_64bits(data + section->offset, section->bytes) != section->checksum) {
            return false;
        }
    }
    return true;
}

int writer_restore(Writer *w, const WriterPosition *position, Error *err) {
    struct stat st;
    bool good = fstat(w->fd, &st) == 0 && (size_t)st.st_size >= position->end && position->n_sections > 0;
    int rc = OK;
    if (good) {
        Mapping file;
        rc = mapping_of(&file, w->fd, position->end, w->partial, err);
        if (rc) {
            return rc;
        }
        good = has_sections(file.data, position);
        mapping_close(&file);
    }
    if (!good) {
        return error_set(err, ERR_FORMAT, "%.250s: is damaged: it does not hold the layers that its state counts",
                         w->partial);
    }
    rc = grow_table(w, position->n_sections, err);
    rc = rc ? rc : write_at(w, 0, mark, sizeof mark, err);
    if (!rc) {
        memcpy(w->table, position->sections, position->n_sections * sizeof *w->table);
        w->n_sections = position->n_sections;
        w->end = position->end;
    }
    return rc;
}

/* A section entry with what the label says. */
static FileSection label_section(const MatrixLabel *label) {
    CHECK(label->n_parts <= FILE_MAX_PARTS);
    FileSection section = {
        .kind = label->kind,
        .layer = label->layer,
        .flags = label->pruned ? SECTION_PRUNED : 0,
        .value_type = VALUE_FP16,
        .n_parts = (uint32_t)label->n_parts,
    };
    for (size_t i = 0; i < label->n_parts; i++) {
        section.part[i] = label->parts[i];
    }
    return section;
}

static size_t count_nonzeros(const fp16 *values, size_t n) {
    size_t nnz = 0;
    for (size_t i = 0; i < n; i++) {
        nnz += !fp16_is_zero(values[i]);
    }
    return nnz;
}

int writer_dense(Writer *w, const MatrixLabel *label, const fp16 *values, size_t rows, size_t cols, Error *err) {
    const size_t n_values = rows * dense_stride(cols);
    FileSection section = label_section(label);
    section.format = FORMAT_DENSE;
    section.rows = rows;
    section.cols = cols;
    section.nnz = count_nonzeros(values, n_values);
    section.bytes = n_values * sizeof(fp16);
    return append(w, section, label->name, values, err);
}

int writer_tiled_cbc(Writer *w, const MatrixLabel *label, const TiledCbc *cbc, const void *block,
                     const TiledCbcStats *stats, Error *err) {
    TiledCbcLayout layout = {0};
    const int rc = tiled_cbc_layout(&layout, cbc->rows, cbc->cols, err);
    if (rc) {
        return rc;
    }
    FileSection section = label_section(label);
    section.format = FORMAT_TILED_CBC;
    section.tile_m = TILE_M;
    section.tile_k = TILE_K;
    section.max_col_values = stats->max_col_values;
    section.max_gtile_values = stats->max_gtile_values;
    section.rows = cbc->rows;
    section.cols = cbc->cols;
    section.nnz = stats->nnz;
    section.bytes = tiled_cbc_block_bytes(&layout, cbc->n_values);
    return append(w, section, label->name, block, err);
}

int writer_bytes(Writer *w, uint32_t kind, const char *name, const void *bytes, size_t n, Error *err) {
    // A reader that does not know such a section can still compute with the matrices.
    const FileSection section = {
        .kind = kind,
        .layer = -1,
        .flags = SECTION_OPTIONAL,
        .value_type = VALUE_BYTES,
        .rows = 1,
        .cols = n,
        .bytes = n,
    };
    return append(w, section, name, bytes, err);
}

/* Write the table behind the sections, and complete the header in memory. */
static int write_table(Writer *w, Error *err) {
    CHECK(w->n_sections > 0);
    const size_t table_bytes = w->n_sections * sizeof *w->table;
    FileHeader *h = &w->header;
    h->n_sections = (uint32_t)w->n_sections;
    h->table_offset = next_offset(w);
    h->file_bytes = h->table_offset + table_bytes;
    h->hash = format_hash(h, w->table);
    return write_at(w, h->table_offset, w->table, table_bytes, err);
}

/* Put the header into this process's copy of the file's first page only. */
static bool add_header(const Writer *w, const Mapping *file) {
    void *page = (void *)(uintptr_t)file->data;
    _Static_assert(FILE_ALIGN >= sizeof(FileHeader), "the header lies in the first page");
    if (mprotect(page, FILE_ALIGN, PROT_READ | PROT_WRITE) != 0) {
        return false;
    }
    memcpy(page, &w->header, sizeof w->header);
    return mprotect(page, FILE_ALIGN, PROT_READ) == 0;
}

int writer_view(Writer *w, Checkpoint *ck, Error *err) {
    Mapping file;
    int rc = write_table(w, err);
    rc = rc ? rc : mapping_of(&file, w->fd, w->header.file_bytes, w->partial, err);
    if (rc) {
        return rc;
    }
    if (!add_header(w, &file)) {
        rc = error_set(err, ERR_OPEN, "%.250s: cannot be mapped: %s", w->path, strerror(errno));
        mapping_close(&file);
        return rc;
    }
    return checkpoint_of(ck, &file, w->partial, err);
}

/* Rename, but never over a file unless force. */
static int rename_partial(const Writer *w) {
    if (w->force) {
        return rename(w->partial, w->path);
    }
    const int rc = renameat2(AT_FDCWD, w->partial, AT_FDCWD, w->path, RENAME_NOREPLACE);
    if (rc == 0 || (errno != EINVAL && errno != ENOSYS)) {
        return rc;
    }
    // Some network file systems cannot refuse by themselves. A look first leaves a moment's gap.
    struct stat st;
    if (lstat(w->path, &st) == 0) {
        errno = EEXIST;
        return -1;
    }
    return rename(w->partial, w->path);
}

int writer_finish(Writer *w, size_t *file_bytes, Error *err) {
    // The header goes last: until it is there, the file has no magic.
    int rc = write_table(w, err);
    rc = rc ? rc : write_at(w, 0, &w->header, sizeof w->header, err);
    if (!rc && fsync(w->fd) != 0) {
        rc = write_error(w->path, "cannot be written", err);
    }
    if (!rc && rename_partial(w) != 0) {
        rc = write_error(w->path, "cannot be put in place", err);
    }
    if (rc) {
        writer_abort(w);
        return rc;
    }
    if (file_bytes) {
        *file_bytes = w->header.file_bytes;
    }
    state_remove(w->state);  // only now: had the rename not come to pass, it would be needed
    state_sync_directory(w->path);
    release(w);
    return OK;
}

void writer_abort(Writer *w) {
    if (w && !w->keep) {
        state_remove(w->state);
        unlink(w->partial);
    }
    if (w) {
        release(w);
    }
}
