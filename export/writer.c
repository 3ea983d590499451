#include "writer.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define MAX_WRITE 0x7ffff000  // bytes; Linux writes no more in one call
#define MAX_TEMPORARIES 100   // names tried

struct Writer {
    int fd;
    char *path, *temporary;
    bool force;
    FileHeader header;
    FileSection *table;
    size_t n_sections, capacity;
    size_t end;  // of the bytes written so far
};

static int write_error(const char *path, const char *what, Error *err) {
    return error_set(err, ERR_WRITE, "%.250s: %s: %s", path, what, strerror(errno));
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

/* Create `<path>.tmp.<pid>`; where an earlier process of that id was killed and left one,
 * `<path>.tmp.<pid>.1` and so on. */
static int create_temporary(Writer *w, Error *err) {
    const size_t size = strlen(w->path) + 40;
    w->temporary = malloc(size);
    if (!w->temporary) {
        return error_set(err, ERR_MEMORY, "no memory to write %.300s", w->path);
    }
    const int length = snprintf(w->temporary, size, "%s.tmp.%ld", w->path, (long)getpid());
    for (int i = 1; i <= MAX_TEMPORARIES; i++) {
        w->fd = open(w->temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (w->fd >= 0) {
            return OK;
        }
        if (errno != EEXIST) {
            break;
        }
        snprintf(w->temporary + length, size - (size_t)length, ".%d", i);
    }
    return write_error(w->path, "cannot be created", err);
}

static void release(Writer *w) {
    if (w->fd >= 0) {
        close(w->fd);
    }
    free(w->path);
    free(w->temporary);
    free(w->table);
    free(w);
}

int writer_open(Writer **writer, const char *path, const Config *config, bool force, Error *err) {
    int rc = check_target(path, force, err);
    if (rc) {
        return rc;
    }
    Writer *w = malloc(sizeof *w);
    if (!w) {
        return error_set(err, ERR_MEMORY, "no memory to write %.300s", path);
    }
    *w = (Writer){
        .fd = -1,
        .path = strdup(path),
        .force = force,
        .header = make_header(config),
        .end = sizeof(FileHeader),
    };
    rc = w->path ? create_temporary(w, err) : error_set(err, ERR_MEMORY, "no memory to write %.300s", path);
    if (rc) {
        release(w);
        return rc;
    }
    *writer = w;
    return OK;
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

/* Where the next section, or the table, begins. */
static size_t next_offset(const Writer *w) { return round_up(w->end + MEMORY_SLACK, FILE_ALIGN); }

static int grow_table(Writer *w, Error *err) {
    if (w->n_sections < w->capacity) {
        return OK;
    }
    const size_t capacity = 2 * w->capacity + 64;
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
    int rc = grow_table(w, err);
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

/* The file in memory, with a header in this process's copy of its first page only. NULL with errno on failure. */
static void *map_with_header(const Writer *w) {
    const size_t bytes = w->header.file_bytes;
    void *data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, w->fd, 0);
    if (data == MAP_FAILED) {
        return NULL;
    }
    _Static_assert(FILE_ALIGN >= sizeof(FileHeader), "the header lies in the first page");
    bool ok = mprotect(data, FILE_ALIGN, PROT_READ | PROT_WRITE) == 0;
    if (ok) {
        memcpy(data, &w->header, sizeof w->header);
        ok = mprotect(data, FILE_ALIGN, PROT_READ) == 0;
    }
    if (!ok) {
        munmap(data, bytes);
        return NULL;
    }
    return data;
}

int writer_view(Writer *w, Checkpoint *ck, Error *err) {
    int rc = write_table(w, err);
    if (rc) {
        return rc;
    }
    void *data = map_with_header(w);
    if (!data) {
        return error_set(err, ERR_OPEN, "%.250s: cannot be mapped: %s", w->path, strerror(errno));
    }
    rc = checkpoint_parse(ck, data, w->header.file_bytes, err);
    if (rc) {
        munmap(data, w->header.file_bytes);
        return rc;
    }
    ck->mapped = true;
    return OK;
}

/* Rename, but never over a file unless force. */
static int rename_temporary(const Writer *w) {
    if (w->force) {
        return rename(w->temporary, w->path);
    }
    const int rc = renameat2(AT_FDCWD, w->temporary, AT_FDCWD, w->path, RENAME_NOREPLACE);
    if (rc == 0 || (errno != EINVAL && errno != ENOSYS)) {
        return rc;
    }
    // Some network file systems cannot refuse by themselves. A look first leaves a moment's gap.
    struct stat st;
    if (lstat(w->path, &st) == 0) {
        errno = EEXIST;
        return -1;
    }
    return rename(w->temporary, w->path);
}

/* So that the new name outlives a power failure. The file is complete either way, and some file systems
 * know no fsync of directories: failure is not an error. Changes path, as dirname does. */
static void sync_directory(char *path) {
    const int fd = open(dirname(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

int writer_finish(Writer *w, size_t *file_bytes, Error *err) {
    // The header goes last: until it is there, the file has no magic.
    int rc = write_table(w, err);
    rc = rc ? rc : write_at(w, 0, &w->header, sizeof w->header, err);
    if (!rc && fsync(w->fd) != 0) {
        rc = write_error(w->path, "cannot be written", err);
    }
    if (!rc && rename_temporary(w) != 0) {
        rc = write_error(w->path, "cannot be put in place", err);
    }
    if (rc) {
        writer_abort(w);
        return rc;
    }
    if (file_bytes) {
        *file_bytes = w->header.file_bytes;
    }
    sync_directory(w->path);
    release(w);
    return OK;
}

void writer_abort(Writer *w) {
    if (w) {
        unlink(w->temporary);
        release(w);
    }
}
