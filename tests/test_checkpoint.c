/* test_checkpoint.c: model files (model/checkpoint.h, export/writer.h): written and read back, damaged, cut
 * off, and not written at all. Rows 15, 17 and 18 of the collected cases. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../export/writer.h"
#include "../model/checkpoint.h"

#define LENGTH(array) (sizeof(array) / sizeof *(array))

static char *scratch;  // a directory of this run's own

static const char *scratch_path(const char *name) {
    static char path[4][300];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], sizeof *path, "%.200s/%.80s", scratch, name);
    return path[next];
}

static void assert_contains(const char *text, const char *part) {
    if (!strstr(text, part)) {
        fail_msg("'%s' does not say '%s'", text, part);
    }
}

/* ---- a small model, whose matrices have padding columns, padding rows and more than one GTile ---- */

enum { DIM = 20, HIDDEN = 150, N_LAYERS = 2, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 6, VOCAB = 33 };
enum { Q_DIM = HEADS * HEAD_DIM, KV_DIM = KV_HEADS * HEAD_DIM, MAX_PLACES = 3 + 6 * N_LAYERS };

static const Config config = {
    .dim = DIM,
    .hidden_dim = HIDDEN,
    .n_layers = N_LAYERS,
    .n_heads = HEADS,
    .n_kv_heads = KV_HEADS,
    .head_dim = HEAD_DIM,
    .seq_len = 64,
    .vocab_size = VOCAB,
    .norm_eps = 1e-6f,
    .rope_theta = 500000.5,
    .bos_id = 1,
    .n_eos = 2,
    .eos_id = {2, 32},
};
static const char tokenizer[] = "not looked\0at by the reader";
static const char provenance[] = "{\"source\":\"test\"}";

typedef struct {
    bool tiled, tied;
} Form;
static const Form forms[] = {{false, false}, {false, true}, {true, false}, {true, true}};

/* One matrix of a model. */
typedef struct {
    uint32_t kind;
    int layer;
} Place;

static bool is_projection(uint32_t kind) {
    return kind == SECTION_QKV || kind == SECTION_O || kind == SECTION_GATE_UP || kind == SECTION_DOWN;
}

/* In the order of the file. */
static size_t list_places(Place *places, int n_layers, bool tied) {
    static const uint32_t in_layer[] = {SECTION_ATTN_NORM, SECTION_QKV,     SECTION_O,
                                        SECTION_MLP_NORM,  SECTION_GATE_UP, SECTION_DOWN};
    size_t n = 0;
    places[n++] = (Place){SECTION_EMBEDDING, -1};
    for (int layer = 0; layer < n_layers; layer++) {
        for (size_t i = 0; i < LENGTH(in_layer); i++) {
            places[n++] = (Place){in_layer[i], layer};
        }
    }
    places[n++] = (Place){SECTION_FINAL_NORM, -1};
    if (!tied) {
        places[n++] = (Place){SECTION_HEAD, -1};
    }
    return n;
}

static void place_shape(const Config *c, uint32_t kind, size_t *rows, size_t *cols) {
    const size_t dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim;
    *cols = kind == SECTION_O ? config_q_dim(c) : kind == SECTION_DOWN ? hidden : dim;
    switch (kind) {
    case SECTION_EMBEDDING:
    case SECTION_HEAD: *rows = (size_t)c->vocab_size; break;
    case SECTION_QKV: *rows = config_q_dim(c) + 2 * config_kv_dim(c); break;
    case SECTION_GATE_UP: *rows = 2 * hidden; break;
    case SECTION_O:
    case SECTION_DOWN: *rows = dim; break;
    default: *rows = 1;
    }
}

static size_t place_parts(FilePart *parts, uint32_t kind) {
    static const FilePart qkv[] = {
        {"q", 0, 1, Q_DIM},
        {"k", Q_DIM, 1, KV_DIM},
        {"v", Q_DIM + KV_DIM, 1, KV_DIM},
    };
    static const FilePart gate_up[] = {{"gate", 0, 2, HIDDEN}, {"up", 1, 2, HIDDEN}};
    if (kind == SECTION_QKV) {
        memcpy(parts, qkv, sizeof qkv);
        return LENGTH(qkv);
    }
    if (kind == SECTION_GATE_UP) {
        memcpy(parts, gate_up, sizeof gate_up);
        return LENGTH(gate_up);
    }
    return 0;
}

/* Seeded values, three in five of them zero, the first one -0. */
static fp16 *make_values(Place place, size_t rows, size_t cols) {
    const size_t stride = dense_stride(cols);
    fp16 *w = memory_alloc(rows * stride * sizeof *w);
    uint32_t random = place.kind * 1000 + (uint32_t)(place.layer + 1);
    for (size_t i = 0; i < rows * cols; i++) {
        random = random * 1664525u + 1013904223u;
        w[i / cols * stride + i % cols] = random >> 24 < 154 ? 0 : (fp16)(0x3000 + (random >> 12) % 0x800);
    }
    w[0] = 0x8000;
    return w;
}

static int put_matrix(Writer *w, Place place, bool tiled, Error *err) {
    size_t rows, cols;
    FilePart parts[FILE_MAX_PARTS];
    char name[32];
    place_shape(&config, place.kind, &rows, &cols);
    snprintf(name, sizeof name, "matrix %u of %d", place.kind, place.layer);
    const MatrixLabel label = {
        .kind = place.kind,
        .layer = place.layer,
        .name = name,
        .pruned = is_projection(place.kind),
        .parts = parts,
        .n_parts = place_parts(parts, place.kind),
    };
    fp16 *values = make_values(place, rows, cols);
    int rc;
    if (tiled && is_projection(place.kind)) {
        TiledCbc cbc;
        TiledCbcStats stats;
        void *block;
        rc = tiled_cbc_encode(&cbc, &block, &stats, values, rows, cols, dense_stride(cols), 1, err);
        assert_int_equal(rc, OK);
        rc = writer_tiled_cbc(w, &label, &cbc, block, &stats, err);
        free(block);
    } else {
        rc = writer_dense(w, &label, values, rows, cols, err);
    }
    free(values);
    return rc;
}

static int put_sections(Writer *w, Form form, Error *err) {
    Place places[MAX_PLACES];
    const size_t n = list_places(places, N_LAYERS, form.tied);
    int rc = OK;
    for (size_t i = 0; i < n && !rc; i++) {
        rc = put_matrix(w, places[i], form.tiled, err);
    }
    rc = rc ? rc : writer_bytes(w, SECTION_TOKENIZER, "tokenizer", tokenizer, sizeof tokenizer, err);
    return rc ? rc : writer_bytes(w, SECTION_PROVENANCE, "provenance", provenance, strlen(provenance), err);
}

static int write_model(const char *path, Form form, bool force, size_t *file_bytes, Error *err) {
    Writer *w;
    int rc = writer_open(&w, path, &config, force, err);
    if (rc) {
        return rc;
    }
    rc = put_sections(w, form, err);
    if (rc) {
        writer_abort(w);
        return rc;
    }
    return writer_finish(w, file_bytes, err);
}

static void write_model_or_fail(const char *path, Form form) {
    Error err;
    if (write_model(path, form, true, NULL, &err)) {
        fail_msg("not written: %s", err.text);
    }
}

/* ---- files as they are ---- */

static void write_file(const char *path, const void *bytes, size_t n) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

/* A model file in memory of exactly its size, so that a sanitizer sees the smallest step beyond. */
typedef struct {
    unsigned char *bytes;
    size_t n;
    FileHeader *header;
    FileSection *table;
} Image;

static Image image_of(const void *bytes, size_t n) {
    Image im = {.n = n};
    void *p;
    assert_int_equal(posix_memalign(&p, 64, n), 0);
    memcpy(p, bytes, n);
    im.bytes = p;
    im.header = p;
    im.table = (FileSection *)(im.bytes + im.header->table_offset);
    return im;
}

static Image read_image(const char *path) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    static unsigned char bytes[1 << 20];
    const size_t n = fread(bytes, 1, sizeof bytes, f);
    assert_in_range(n, sizeof(FileHeader), sizeof bytes - 1);
    fclose(f);
    return image_of(bytes, n);
}

static Image dense_model, tiled_model;  // untied; never changed

static Image copy_of(const Image *im) { return image_of(im->bytes, im->n); }

/* Make the hash right again, so that the checks behind it are reached. */
static void seal(Image *im) {
    const uint64_t room = im->n - im->header->table_offset;
    if (im->header->table_offset <= im->n && im->header->n_sections <= room / sizeof(FileSection)) {
        const FileSection *table = (const FileSection *)(im->bytes + im->header->table_offset);
        im->header->hash = format_hash(im->header, table);
    }
}

static FileSection *find_section(const Image *im, uint32_t kind, int layer) {
    for (uint32_t i = 0; i < im->header->n_sections; i++) {
        if (im->table[i].kind == kind && im->table[i].layer == layer) {
            return &im->table[i];
        }
    }
    fail_msg("no section of kind %u, layer %d", kind, layer);
    return NULL;
}

/* Refused with this code and reason, and nothing written to the result. */
static void expect_refusal(const Image *im, int code, const char *reason) {
    Checkpoint ck, poison;
    Error err = {0};
    memset(&ck, 0xa5, sizeof ck);
    memset(&poison, 0xa5, sizeof poison);
    const int rc = checkpoint_parse(&ck, im->bytes, im->n, &err);
    if (rc != code || err.code != code || !strstr(err.text, reason)) {
        fail_msg("returned %d, '%s'; expected %d, '%s'", rc, rc ? err.text : "", code, reason);
    }
    assert_memory_equal(&ck, &poison, sizeof ck);
    assert_int_equal(checkpoint_parse(&ck, im->bytes, im->n, NULL), code);
}

static Checkpoint expect_acceptance(const Image *im) {
    Checkpoint ck;
    Error err;
    if (checkpoint_parse(&ck, im->bytes, im->n, &err)) {
        fail_msg("refused: %s", err.text);
    }
    return ck;
}

static void seal_and_refuse(Image *im, int code, const char *reason) {
    seal(im);
    expect_refusal(im, code, reason);
    free(im->bytes);
}

static void seal_and_accept(Image *im) {
    seal(im);
    expect_acceptance(im);
    free(im->bytes);
}

/* ---- written and read back ---- */

static void expect_same_config(const Config *a, const Config *b) {
    const int x[] = {a->dim, a->hidden_dim, a->n_layers, a->n_heads, a->n_kv_heads, a->head_dim,
                     a->seq_len, a->vocab_size, a->bos_id, a->n_eos};
    const int y[] = {b->dim, b->hidden_dim, b->n_layers, b->n_heads, b->n_kv_heads, b->head_dim,
                     b->seq_len, b->vocab_size, b->bos_id, b->n_eos};
    assert_memory_equal(x, y, sizeof x);
    assert_memory_equal(a->eos_id, b->eos_id, sizeof a->eos_id);
    assert_memory_equal(&a->norm_eps, &b->norm_eps, sizeof a->norm_eps);
    assert_memory_equal(&a->rope_theta, &b->rope_theta, sizeof a->rope_theta);
}

static size_t count_nonzeros(const fp16 *w, size_t n) {
    size_t nnz = 0;
    for (size_t i = 0; i < n; i++) {
        nnz += (w[i] & 0x7fff) != 0;
    }
    return nnz;
}

static void expect_same_values(const Matrix *m, Place place, const FileSection *s) {
    const size_t n = m->rows * dense_stride(m->cols);
    fp16 *expected = make_values(place, m->rows, m->cols);
    assert_int_equal(s->nnz, count_nonzeros(expected, n));
    assert_true(s->nnz > 0);
    if (m->format == FORMAT_DENSE) {
        assert_int_equal(m->stride, dense_stride(m->cols));
        assert_memory_equal(m->dense, expected, n * sizeof *expected);
    } else {
        fp16 *decoded = memory_alloc(n * sizeof *decoded);
        expected[0] = 0;  // -0 does not survive compression
        tiled_cbc_decode(decoded, dense_stride(m->cols), &m->cbc);
        assert_memory_equal(decoded, expected, n * sizeof *expected);
        free(decoded);
    }
    free(expected);
}

static void expect_same_section(const Checkpoint *ck, Place place, bool tiled) {
    const bool projection = is_projection(place.kind);
    size_t rows, cols;
    FilePart parts[FILE_MAX_PARTS] = {{.first = 0}};
    place_shape(&config, place.kind, &rows, &cols);
    const FileSection *s = checkpoint_find(ck, place.kind, place.layer);
    assert_non_null(s);
    assert_int_equal(s->offset % FILE_ALIGN, 0);
    assert_int_equal(s->flags, projection ? SECTION_PRUNED : 0);
    assert_int_equal(s->n_parts, place_parts(parts, place.kind));
    assert_memory_equal(s->part, parts, sizeof parts);
    const Matrix m = checkpoint_matrix(ck, s);
    assert_int_equal(m.format, tiled && projection ? FORMAT_TILED_CBC : FORMAT_DENSE);
    assert_int_equal(m.rows, rows);
    assert_int_equal(m.cols, cols);
    assert_int_equal(m.layer, place.layer);
    expect_same_values(&m, place, s);
}

static void expect_same_bytes(const Checkpoint *ck, uint32_t kind, const void *bytes, size_t n) {
    const FileSection *s = checkpoint_find(ck, kind, -1);
    assert_non_null(s);
    assert_int_equal(s->bytes, n);
    assert_true(s->flags & SECTION_OPTIONAL);
    assert_memory_equal(checkpoint_bytes(ck, s), bytes, n);
}

static void expect_same_model(const char *path, Form form, size_t bytes) {
    Place places[MAX_PLACES];
    const size_t n = list_places(places, N_LAYERS, form.tied);
    Checkpoint ck;
    Error err;
    if (checkpoint_open(&ck, path, &err) || checkpoint_verify(&ck, &err)) {
        fail_msg("%s", err.text);
    }
    assert_int_equal(ck.bytes, bytes);
    assert_int_equal(ck.n_sections, n + 2);
    expect_same_config(&ck.config, &config);
    for (size_t i = 0; i < n; i++) {
        expect_same_section(&ck, places[i], form.tiled);
    }
    assert_int_equal(checkpoint_find(&ck, SECTION_HEAD, -1) == NULL, form.tied);
    assert_null(checkpoint_find(&ck, SECTION_DOWN, N_LAYERS));
    expect_same_bytes(&ck, SECTION_TOKENIZER, tokenizer, sizeof tokenizer);
    expect_same_bytes(&ck, SECTION_PROVENANCE, provenance, strlen(provenance));
    checkpoint_close(&ck);
    assert_null(ck.data);
    checkpoint_close(&ck);  // nothing is left to close twice
}

static void what_is_written_is_read_back(void **state) {
    (void)state;
    for (size_t i = 0; i < LENGTH(forms); i++) {
        const char *path = scratch_path("round-trip.bin");
        size_t bytes = 0;
        Error err;
        if (write_model(path, forms[i], true, &bytes, &err)) {
            fail_msg("%s", err.text);
        }
        struct stat st;
        assert_int_equal(stat(path, &st), 0);
        assert_int_equal(st.st_size, bytes);
        assert_int_equal(bytes % 8, 0);
        expect_same_model(path, forms[i], bytes);
    }
}

static void sites_follow_the_kind(void **state) {
    (void)state;
    static const Site sites[] = {
        [SECTION_EMBEDDING] = SITE_HEAD, [SECTION_HEAD] = SITE_HEAD,      [SECTION_QKV] = SITE_ATTN_IN,
        [SECTION_O] = SITE_ATTN_OUT,     [SECTION_GATE_UP] = SITE_MLP_IN, [SECTION_DOWN] = SITE_MLP_HIDDEN,
    };
    const Checkpoint ck = expect_acceptance(&tiled_model);
    for (uint32_t kind = SECTION_EMBEDDING; kind <= SECTION_DOWN; kind++) {
        if (is_projection(kind) || kind <= SECTION_HEAD) {
            const Matrix m = checkpoint_matrix(&ck, checkpoint_find(&ck, kind, is_projection(kind) ? 1 : -1));
            assert_int_equal(m.site, sites[kind]);
        }
    }
}

static void the_same_input_gives_the_same_file(void **state) {
    (void)state;
    const char *path = scratch_path("again.bin");
    write_model_or_fail(path, (Form){.tiled = true});
    Image im = read_image(path);
    assert_int_equal(im.n, tiled_model.n);
    assert_memory_equal(im.bytes, tiled_model.bytes, im.n);
    free(im.bytes);
}

/* Readers rely on zeros behind a section (MEMORY_SLACK), and on nothing else between them. */
static void zeros_follow_every_section(void **state) {
    (void)state;
    const FileHeader *h = tiled_model.header;
    for (uint32_t i = 0; i < h->n_sections; i++) {
        const FileSection *s = &tiled_model.table[i];
        const size_t end = i + 1 < h->n_sections ? s[1].offset : h->table_offset;
        assert_true(end - s->offset - s->bytes >= MEMORY_SLACK);
        for (size_t at = s->offset + s->bytes; at < end; at++) {
            assert_int_equal(tiled_model.bytes[at], 0);
        }
    }
}

/* Whatever the size of a section, also where it ends within MEMORY_SLACK of a multiple of FILE_ALIGN. */
static void the_writer_leaves_room_behind_sections_of_any_size(void **state) {
    (void)state;
    static const char page[FILE_ALIGN + 1];
    static const size_t sizes[] = {0,
                                   FILE_ALIGN - MEMORY_SLACK - 1,
                                   FILE_ALIGN - MEMORY_SLACK,
                                   FILE_ALIGN - MEMORY_SLACK + 1,
                                   FILE_ALIGN - 1,
                                   FILE_ALIGN,
                                   FILE_ALIGN + 1};
    enum { UNKNOWN = 99 };  // skipped: writer_bytes flags what it writes as optional
    for (size_t i = 0; i < LENGTH(sizes); i++) {
        const char *path = scratch_path("sizes.bin");
        Writer *w;
        assert_int_equal(writer_open(&w, path, &config, true, NULL), OK);
        assert_int_equal(put_sections(w, forms[0], NULL), OK);
        assert_int_equal(writer_bytes(w, UNKNOWN, "filler", page, sizes[i], NULL), OK);
        assert_int_equal(writer_bytes(w, UNKNOWN, "behind it", page, sizes[i], NULL), OK);
        assert_int_equal(writer_finish(w, NULL, NULL), OK);
        Image im = read_image(path);
        const Checkpoint ck = expect_acceptance(&im);
        assert_int_equal(checkpoint_verify(&ck, NULL), OK);
        assert_int_equal(checkpoint_find(&ck, UNKNOWN, -1)->bytes, sizes[i]);
        free(im.bytes);
    }
}

/* ---- damaged header ---- */

/* A patch of one field, and what the reader must say of it. */
typedef struct {
    const char *field;
    size_t offset, size;
    bool add;  // to the field's value; else the field is set
    uint64_t value;
    int code;
    const char *reason;
} Patch;

static void apply(const Patch *p, void *structure) {
    unsigned char *at = (unsigned char *)structure + p->offset;
    uint64_t value = 0;
    assert_in_range(p->size, 1, 8);
    memcpy(&value, at, p->size);
    value = p->add ? value + p->value : p->value;
    memcpy(at, &value, p->size);  // little-endian: the lower bytes
    print_message("    %s = %llu\n", p->field, (unsigned long long)value);
}

#define PATCH(type, field, add, value, code, reason) \
    {#field, offsetof(type, field), sizeof((type *)0)->field, add, (uint64_t)(value), code, reason}
#define SET(field, value, code, reason) PATCH(FileHeader, field, false, value, code, reason)
#define ADD(field, value, code, reason) PATCH(FileHeader, field, true, value, code, reason)

#define F64_NAN 0x7ff8000000000000
#define F64_INFINITY 0x7ff0000000000000
#define F64_ONE 0x3ff0000000000000
#define F32_NAN 0x7fc00000
#define F32_INFINITY 0x7f800000
#define F32_ONE 0x3f800000
#define F32_MINUS_ONE 0xbf800000

static const Patch header_patches[] = {
    SET(magic[0], 'X', ERR_FORMAT, "not a model file"),
    SET(magic[5], '2', ERR_FORMAT, "not a model file"),
    SET(magic[6], '\n', ERR_FORMAT, "line ends"),
    SET(version, 0, ERR_FORMAT, "version 0"),
    SET(version, 2, ERR_FORMAT, "version 2"),
    SET(n_sections, 0, ERR_FORMAT, "no section for embedding"),
    SET(n_sections, 13, ERR_FORMAT, "no section for final norm"),
    ADD(n_sections, 1, ERR_FORMAT, "section table"),
    SET(n_sections, 1 << 24, ERR_FORMAT, "section table"),  // times 256 is 0 in 32 bits
    SET(n_sections, UINT32_MAX, ERR_FORMAT, "section table"),
    ADD(file_bytes, 1, ERR_FORMAT, "truncated"),
    ADD(file_bytes, -1, ERR_FORMAT, "should be"),
    SET(file_bytes, 0, ERR_FORMAT, "should be"),
    SET(file_bytes, UINT64_MAX, ERR_FORMAT, "truncated"),
    ADD(table_offset, -4, ERR_FORMAT, "section table"),
    ADD(table_offset, 8, ERR_FORMAT, "section table"),
    ADD(table_offset, -8, ERR_FORMAT, "section 0"),
    SET(table_offset, 0, ERR_FORMAT, "section table"),
    SET(table_offset, 248, ERR_FORMAT, "section table"),
    SET(table_offset, 256, ERR_FORMAT, "section 0"),
    SET(table_offset, UINT64_MAX - 7, ERR_FORMAT, "section table"),
    SET(table_offset, UINT64_MAX - 4351, ERR_FORMAT, "section table"),  // plus the table is 0 in 64 bits
    // Out of every range.
    SET(dim, 0, ERR_SHAPE, "dim = 0"),
    SET(dim, INT32_MIN, ERR_SHAPE, "dim = -2147483648"),
    SET(dim, INT32_MAX, ERR_SHAPE, "dim = 2147483647"),
    SET(hidden_dim, 0, ERR_SHAPE, "hidden_dim = 0"),
    SET(hidden_dim, INT32_MAX, ERR_SHAPE, "hidden_dim"),
    SET(n_layers, 0, ERR_SHAPE, "n_layers = 0"),
    SET(n_layers, -1, ERR_SHAPE, "n_layers = -1"),
    SET(n_layers, INT32_MAX, ERR_SHAPE, "n_layers"),
    SET(n_heads, 0, ERR_SHAPE, "n_heads = 0"),
    SET(n_heads, INT32_MIN, ERR_SHAPE, "n_heads"),
    SET(n_kv_heads, 0, ERR_SHAPE, "n_kv_heads = 0"),
    SET(n_kv_heads, 3, ERR_SHAPE, "not a multiple of n_kv_heads = 3"),
    SET(head_dim, 0, ERR_SHAPE, "head_dim = 0"),
    SET(head_dim, 5, ERR_SHAPE, "odd"),
    SET(head_dim, 258, ERR_SHAPE, "head_dim = 258"),
    SET(seq_len, 0, ERR_SHAPE, "seq_len = 0"),
    SET(seq_len, INT32_MAX, ERR_SHAPE, "seq_len"),
    SET(vocab_size, 0, ERR_SHAPE, "vocab_size = 0"),
    SET(vocab_size, INT32_MIN, ERR_SHAPE, "vocab_size = -2147483648"),
    SET(vocab_size, INT32_MAX, ERR_SHAPE, "vocab_size"),
    SET(rope_theta, F64_NAN, ERR_SHAPE, "rope_theta"),
    SET(rope_theta, F64_INFINITY, ERR_SHAPE, "rope_theta"),
    SET(rope_theta, F64_ONE, ERR_SHAPE, "rope_theta"),
    SET(rope_theta, 0, ERR_SHAPE, "rope_theta"),
    SET(norm_eps, F32_NAN, ERR_SHAPE, "norm_eps"),
    SET(norm_eps, F32_INFINITY, ERR_SHAPE, "norm_eps"),
    SET(norm_eps, F32_ONE, ERR_SHAPE, "norm_eps"),
    SET(norm_eps, F32_MINUS_ONE, ERR_SHAPE, "norm_eps"),
    SET(bos_id, -2, ERR_SHAPE, "bos_id = -2"),
    SET(bos_id, VOCAB, ERR_SHAPE, "bos_id = 33"),
    SET(n_eos, -1, ERR_SHAPE, "end-of-sequence"),
    SET(n_eos, FILE_MAX_EOS + 1, ERR_SHAPE, "end-of-sequence"),
    SET(eos_id[0], -1, ERR_SHAPE, "end-of-sequence id = -1"),
    SET(eos_id[1], VOCAB, ERR_SHAPE, "end-of-sequence id = 33"),
    // In range, but not what the sections are.
    SET(dim, DIM + 1, ERR_SHAPE, "section 0 (embedding): is 33 x 20, the config demands 33 x 21"),
    SET(dim, 1 << 20, ERR_SHAPE, "(embedding)"),
    SET(hidden_dim, HIDDEN - 1, ERR_SHAPE, "(gate|up, layer 0)"),
    SET(hidden_dim, 1 << 22, ERR_SHAPE, "(gate|up, layer 0)"),
    SET(n_layers, N_LAYERS - 1, ERR_FORMAT, "names layer 1"),
    SET(n_layers, N_LAYERS + 1, ERR_FORMAT, "no section for attention norm, layer 2"),
    SET(n_layers, 4096, ERR_FORMAT, "layer 2"),
    SET(n_heads, 2 * HEADS, ERR_SHAPE, "(q|k|v, layer 0)"),
    SET(n_kv_heads, 1, ERR_SHAPE, "(q|k|v, layer 0)"),
    SET(n_kv_heads, HEADS, ERR_SHAPE, "(q|k|v, layer 0)"),
    SET(head_dim, HEAD_DIM + 2, ERR_SHAPE, "(q|k|v, layer 0)"),
    SET(vocab_size, VOCAB + 1, ERR_SHAPE, "(embedding)"),
};

static void every_damaged_header_field_is_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < LENGTH(header_patches); i++) {
        Image im = copy_of(&tiled_model);
        apply(&header_patches[i], im.header);
        seal_and_refuse(&im, header_patches[i].code, header_patches[i].reason);
    }
}

static void a_changed_line_end_is_told_from_another_file(void **state) {
    (void)state;
    static const char *const magics[] = {"SPDPv1\n\1", "SPDPv1\r\r", "SPDPv1\n\n"};
    for (size_t i = 0; i < LENGTH(magics); i++) {
        Image im = copy_of(&dense_model);
        memcpy(im.header->magic, magics[i], sizeof im.header->magic);
        seal_and_refuse(&im, ERR_FORMAT, "line ends were changed");
    }
}

static void what_readers_ignore_does_no_harm(void **state) {
    (void)state;
    Image im = copy_of(&tiled_model);
    memset(im.header->reserved, 0xff, sizeof im.header->reserved);
    im.header->bos_id = -1;
    im.header->n_eos = 0;
    im.header->eos_id[0] = -77;  // not in use
    for (uint32_t i = 0; i < im.header->n_sections; i++) {
        FileSection *s = &im.table[i];
        memset(s->reserved, 0xff, sizeof s->reserved);
        memset(s->name, 'x', sizeof s->name);  // no terminating zero
        s->flags |= 0xfffffff8;
    }
    seal_and_accept(&im);
}

/* The hash alone must notice any change of header or table; nothing is resealed here. */
static void every_flipped_byte_of_header_and_table_is_noticed(void **state) {
    (void)state;
    const size_t table = tiled_model.header->table_offset;
    Image im = copy_of(&tiled_model);
    for (size_t at = 0; at < im.n; at = at + 1 == sizeof(FileHeader) ? table : at + 1) {
        im.bytes[at] ^= (unsigned char)(1 << at % 8);
        Checkpoint ck;
        Error err = {0};
        if (checkpoint_parse(&ck, im.bytes, im.n, &err) != ERR_FORMAT) {
            fail_msg("byte %zu: '%s'", at, err.text);
        }
        if (at >= offsetof(FileHeader, hash)) {
            assert_contains(err.text, "damaged");
        }
        im.bytes[at] = tiled_model.bytes[at];
    }
    expect_acceptance(&im);
    free(im.bytes);
}

/* ---- damaged section table ---- */

typedef struct {
    uint32_t kind;
    int layer;
    Patch patch;
} SectionPatch;

#undef SET
#undef ADD
#define SET(field, value, code, reason) PATCH(FileSection, field, false, value, code, reason)
#define ADD(field, value, code, reason) PATCH(FileSection, field, true, value, code, reason)

static const SectionPatch section_patches[] = {
    {SECTION_O, 0, SET(kind, 0, ERR_FORMAT, "kind 0, which this program does not know")},
    {SECTION_O, 0, SET(kind, 13, ERR_FORMAT, "kind 13, which")},
    {SECTION_O, 0, SET(kind, UINT32_MAX, ERR_FORMAT, "kind 4294967295, which")},
    {SECTION_DOWN, 0, SET(kind, SECTION_QKV, ERR_FORMAT, "a second q|k|v for layer 0")},
    {SECTION_O, 0, SET(kind, SECTION_EMBEDDING, ERR_FORMAT, "(embedding) names layer 0")},
    {SECTION_HEAD, -1, SET(kind, SECTION_EMBEDDING, ERR_FORMAT, "a second embedding")},
    {SECTION_TOKENIZER, -1, SET(kind, SECTION_HEAD, ERR_FORMAT, "a second head")},
    {SECTION_PROVENANCE, -1, SET(kind, SECTION_TOKENIZER, ERR_FORMAT, "a second tokenizer")},
    {SECTION_FINAL_NORM, -1, SET(kind, SECTION_TOKENIZER, ERR_FORMAT, "(tokenizer): should be plain bytes")},
    {SECTION_QKV, 0, SET(layer, -1, ERR_FORMAT, "(q|k|v) names layer -1")},
    {SECTION_QKV, 0, SET(layer, N_LAYERS, ERR_FORMAT, "names layer 2")},
    {SECTION_QKV, 0, SET(layer, INT32_MIN, ERR_FORMAT, "names layer")},
    {SECTION_QKV, 1, SET(layer, 0, ERR_FORMAT, "a second q|k|v for layer 0")},
    {SECTION_HEAD, -1, SET(layer, 0, ERR_FORMAT, "(head) names layer 0")},
    {SECTION_TOKENIZER, -1, SET(layer, 1, ERR_FORMAT, "(tokenizer) names layer 1")},

    {SECTION_QKV, 1, SET(format, 0, ERR_FORMAT, "section 8 (q|k|v, layer 1): has storage format 0")},
    {SECTION_QKV, 1, SET(format, FORMAT_DENSE, ERR_FORMAT, "its shape needs")},
    {SECTION_QKV, 1, SET(format, 3, ERR_FORMAT, "storage format 3")},
    {SECTION_EMBEDDING, -1, SET(format, FORMAT_TILED_CBC, ERR_FORMAT, "storage format 2, which")},
    {SECTION_MLP_NORM, 0, SET(format, FORMAT_TILED_CBC, ERR_FORMAT, "storage format 2, which")},
    {SECTION_TOKENIZER, -1, SET(format, FORMAT_DENSE, ERR_FORMAT, "plain bytes")},
    {SECTION_QKV, 0, SET(value_type, VALUE_BYTES, ERR_FORMAT, "value type 0")},
    {SECTION_EMBEDDING, -1, SET(value_type, 2, ERR_FORMAT, "value type 2")},
    {SECTION_TOKENIZER, -1, SET(value_type, VALUE_FP16, ERR_FORMAT, "plain bytes")},
    {SECTION_DOWN, 1, SET(tile_m, 128, ERR_FORMAT, "tiles of 128 x 16")},
    {SECTION_DOWN, 1, SET(tile_m, 0, ERR_FORMAT, "tiles of 0 x 16")},
    {SECTION_DOWN, 1, SET(tile_k, 32, ERR_FORMAT, "tiles of 256 x 32")},
    // cases.md row 28: the largest column and GTile, by which kernels size their buffers, are those of the file.
    {SECTION_DOWN, 1, ADD(max_col_values, 8, ERR_FORMAT, "(down, layer 1): holds other counts")},
    {SECTION_DOWN, 1, SET(max_col_values, 0, ERR_FORMAT, "other counts")},
    {SECTION_DOWN, 1, ADD(max_gtile_values, -8, ERR_FORMAT, "other counts")},
    {SECTION_DOWN, 1, SET(max_gtile_values, UINT32_MAX, ERR_FORMAT, "other counts")},
    {SECTION_DOWN, 1, ADD(nnz, 1, ERR_FORMAT, "other counts")},
    {SECTION_DOWN, 1, ADD(nnz, -1, ERR_FORMAT, "other counts")},
    {SECTION_DOWN, 1, ADD(nnz, UINT64_C(1) << 32, ERR_FORMAT, "other counts")},

    {SECTION_O, 0, ADD(rows, 1, ERR_SHAPE, "(o, layer 0): is 21 x 24, the config demands 20 x 24")},
    {SECTION_O, 0, SET(rows, 0, ERR_SHAPE, "is 0 x 24")},
    {SECTION_O, 0, ADD(rows, UINT64_C(1) << 32, ERR_SHAPE, "the config demands")},
    {SECTION_O, 0, ADD(cols, -1, ERR_SHAPE, "is 20 x 23")},
    {SECTION_O, 0, SET(cols, UINT64_MAX, ERR_SHAPE, "the config demands")},
    {SECTION_FINAL_NORM, -1, SET(rows, 2, ERR_SHAPE, "(final norm): is 2 x 20")},
    {SECTION_TOKENIZER, -1, SET(rows, 2, ERR_FORMAT, "plain bytes")},
    {SECTION_TOKENIZER, -1, ADD(cols, 1, ERR_FORMAT, "plain bytes")},

    {SECTION_EMBEDDING, -1, ADD(bytes, 2, ERR_FORMAT, "its shape needs 1584")},
    {SECTION_EMBEDDING, -1, ADD(bytes, -1, ERR_FORMAT, "its shape needs 1584")},
    {SECTION_EMBEDDING, -1, SET(bytes, 0, ERR_FORMAT, "its shape needs 1584")},
    {SECTION_GATE_UP, 0, ADD(bytes, 16, ERR_FORMAT, "(gate|up, layer 0)")},
    {SECTION_GATE_UP, 0, ADD(bytes, -16, ERR_FORMAT, "(gate|up, layer 0)")},
    {SECTION_GATE_UP, 0, SET(bytes, 64, ERR_FORMAT, "too few for the index")},
    {SECTION_GATE_UP, 0, SET(bytes, 0, ERR_FORMAT, "too few for the index")},
    {SECTION_GATE_UP, 0, ADD(bytes, 65536, ERR_FORMAT, "section 6 ")},
    {SECTION_GATE_UP, 0, SET(bytes, UINT64_MAX, ERR_FORMAT, "section 5 lies outside")},
    {SECTION_GATE_UP, 0, SET(bytes, UINT64_MAX - 4095, ERR_FORMAT, "section 5 lies outside")},
    {SECTION_TOKENIZER, -1, ADD(bytes, -1, ERR_FORMAT, "plain bytes")},

    {SECTION_O, 0, ADD(offset, 64, ERR_FORMAT, "section 3 lies outside the file or over another")},
    {SECTION_O, 0, ADD(offset, 1, ERR_FORMAT, "section 3 lies")},
    {SECTION_O, 0, ADD(offset, -FILE_ALIGN, ERR_FORMAT, "section 3 lies")},
    {SECTION_O, 0, ADD(offset, FILE_ALIGN, ERR_FORMAT, "section 4 lies")},
    {SECTION_O, 0, SET(offset, 0, ERR_FORMAT, "section 3 lies")},
    {SECTION_EMBEDDING, -1, SET(offset, 0, ERR_FORMAT, "section 0 lies")},  // over the header
    {SECTION_O, 0, SET(offset, UINT64_MAX - 4095, ERR_FORMAT, "section 3 lies")},
    {SECTION_O, 0, SET(offset, UINT64_C(1) << 32, ERR_FORMAT, "section 3 lies")},
    {SECTION_PROVENANCE, -1, SET(offset, UINT64_C(1) << 63, ERR_FORMAT, "section 16 lies")},

    {SECTION_QKV, 0, SET(n_parts, FILE_MAX_PARTS + 1, ERR_FORMAT, "(q|k|v, layer 0): has a row map")},
    {SECTION_QKV, 0, SET(n_parts, UINT32_MAX, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(n_parts, 2, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[2].first, Q_DIM + KV_DIM + 1, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[1].first, UINT32_MAX, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[0].step, 0, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[2].step, 2, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[2].step, UINT32_MAX, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[0].n_rows, 0, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, ADD(part[0].n_rows, 1, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, ADD(part[0].n_rows, -1, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[0].n_rows, UINT32_MAX, ERR_FORMAT, "row map")},
    {SECTION_QKV, 0, SET(part[0].name[7], 'q', ERR_FORMAT, "row map")},  // not terminated
    {SECTION_GATE_UP, 0, SET(part[1].first, 2, ERR_FORMAT, "row map")},  // one row beyond
    {SECTION_O, 0, SET(n_parts, 1, ERR_FORMAT, "row map")},
};

/* cases.md row 28: what kernels size their buffers by is checked against the arrays, as is the rest. */
static void every_damaged_section_field_is_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < LENGTH(section_patches); i++) {
        const SectionPatch *p = &section_patches[i];
        Image im = copy_of(&tiled_model);
        apply(&p->patch, find_section(&im, p->kind, p->layer));
        seal_and_refuse(&im, p->patch.code, p->patch.reason);
    }
}

static void dense_matrices_are_held_to_their_size(void **state) {
    (void)state;
    Place places[MAX_PLACES];
    const size_t n = list_places(places, N_LAYERS, false);
    for (size_t i = 0; i < n; i++) {
        Image im = copy_of(&dense_model);
        find_section(&im, places[i].kind, places[i].layer)->bytes -= 2;
        seal_and_refuse(&im, ERR_FORMAT, "its shape needs");
    }
}

static void row_maps_are_optional(void **state) {
    (void)state;
    Image im = copy_of(&tiled_model);
    find_section(&im, SECTION_QKV, 0)->n_parts = 0;
    seal_and_accept(&im);
}

static void sections_out_of_order_are_refused(void **state) {
    (void)state;
    Image im = copy_of(&tiled_model);
    const FileSection first = im.table[0];
    im.table[0] = im.table[1];
    im.table[1] = first;
    seal_and_refuse(&im, ERR_FORMAT, "section 1 lies outside the file or over another");
}

/* Bytes and slack may reach to the next section, or to the end of the file, and not one byte further. */
static void slack_behind_a_section_is_demanded_to_the_byte(void **state) {
    (void)state;
    for (int surplus = 0; surplus <= 1; surplus++) {
        Image im = copy_of(&tiled_model);
        FileSection *s = find_section(&im, SECTION_TOKENIZER, -1);
        s->bytes = s->cols = FILE_ALIGN - MEMORY_SLACK + (uint64_t)surplus;
        (surplus ? seal_and_refuse(&im, ERR_FORMAT, "section 16 lies") : seal_and_accept(&im));
        im = copy_of(&tiled_model);
        s = find_section(&im, SECTION_PROVENANCE, -1);
        s->bytes = s->cols = im.n - s->offset - MEMORY_SLACK + (uint64_t)surplus;
        (surplus ? seal_and_refuse(&im, ERR_FORMAT, "section 16 lies") : seal_and_accept(&im));
    }
}

/* An unknown section stands where one of ours was: skipped if it says so, and then ours is missing. */
static void every_matrix_is_missed(void **state) {
    (void)state;
    Place places[MAX_PLACES];
    const size_t n = list_places(places, N_LAYERS, true);
    for (size_t i = 0; i < n; i++) {
        Image im = copy_of(&tiled_model);
        FileSection *s = find_section(&im, places[i].kind, places[i].layer);
        s->kind = 99;
        s->flags |= SECTION_OPTIONAL;
        char reason[40];
        snprintf(reason, sizeof reason, ", layer %d", places[i].layer);
        seal(&im);
        expect_refusal(&im, ERR_FORMAT, "no section for ");
        seal_and_refuse(&im, ERR_FORMAT, reason);
    }
}

/* Without its head a file is a tied one; tokenizer and provenance are optional. */
static void unknown_sections_are_skipped_only_if_flagged(void **state) {
    (void)state;
    static const uint32_t dispensable[] = {SECTION_HEAD, SECTION_TOKENIZER, SECTION_PROVENANCE};
    static const uint32_t unknown[] = {0, SECTION_QUANTILES + 1, UINT32_MAX};
    for (size_t i = 0; i < LENGTH(dispensable) * LENGTH(unknown); i++) {
        for (int optional = 0; optional <= 1; optional++) {
            Image im = copy_of(&tiled_model);
            FileSection *s = find_section(&im, dispensable[i / LENGTH(unknown)], -1);
            s->kind = unknown[i % LENGTH(unknown)];
            s->flags = optional ? SECTION_OPTIONAL : 0;
            s->format = 77;  // what its fields mean is not ours to know
            s->rows = UINT64_MAX;
            (optional ? seal_and_accept(&im) : seal_and_refuse(&im, ERR_FORMAT, "does not know"));
        }
    }
}

static void skipped_sections_must_still_lie_in_the_file(void **state) {
    (void)state;
    Image im = copy_of(&tiled_model);
    FileSection *s = find_section(&im, SECTION_PROVENANCE, -1);
    s->kind = 99;
    s->bytes = im.n;
    seal_and_refuse(&im, ERR_FORMAT, "section 16 lies outside");
}

static void the_table_may_begin_at_any_multiple_of_8(void **state) {
    (void)state;
    const size_t at = tiled_model.header->table_offset, shift = 8;
    unsigned char *bytes = calloc(1, tiled_model.n + shift);
    memcpy(bytes, tiled_model.bytes, at);
    memcpy(bytes + at + shift, tiled_model.bytes + at, tiled_model.n - at);
    Image im = image_of(bytes, tiled_model.n + shift);
    free(bytes);
    im.header->table_offset += shift;
    im.header->file_bytes += shift;
    seal_and_accept(&im);
}

/* ---- damaged Tiled-CBC arrays ---- */

/* Of the 300 x 20 matrix gate|up: 2 x 2 GTiles; columns 20 to 31 are padding. */
enum { GATE_UP_GTILES = 2 * 2, TILE_ROW = 2 * TILE_K, TILE_ROW_WORDS = TILE_ROW * BITMAP_WORDS };

/* Exclusive or on element `index` of an array. */
typedef struct {
    enum { TILE_OFFSET, COL_INFO, BITMAP } array;
    size_t index;
    uint64_t bits;
    const char *reason;
} TileDamage;

static const TileDamage tile_damages[] = {
    {TILE_OFFSET, 0, 1, "TileOffset begins with 1"},
    {TILE_OFFSET, 1, 1, "GTile 0: "},
    {TILE_OFFSET, 2, 0x80000000, "GTile 1: "},
    {TILE_OFFSET, GATE_UP_GTILES, 1, "bytes, but"},
    {TILE_OFFSET, GATE_UP_GTILES, 0x80000000, "bytes, but"},
    {COL_INFO, 0, 8 << 16, "column 0 of tile row 0 does not begin"},
    {COL_INFO, 5, 1 << 16, "column 5 of tile row 0 does not begin"},
    {COL_INFO, 5, 1, "column 5 of tile row 0 has a count"},
    {COL_INFO, 5, 0x8000, "column 5 of tile row 0 has a count"},
    {COL_INFO, DIM, 1, "column 20 of tile row 0 has a count"},
    {COL_INFO, TILE_ROW + 1, 1, "column 1 of tile row 1 has a count"},
    {BITMAP, 0, 1, "column 0 of tile row 0 has a count"},
    {BITMAP, 3, UINT64_C(1) << 63, "column 0 of tile row 0 has a count"},
    {BITMAP, DIM * BITMAP_WORDS, 1, "column 20 of tile row 0 has a bit outside"},
    {BITMAP, TILE_ROW_WORDS - 1, UINT64_C(1) << 63, "column 31 of tile row 0 has a bit outside"},
    {BITMAP, TILE_ROW_WORDS, UINT64_C(1) << (2 * HIDDEN - TILE_M), "column 0 of tile row 1 has a bit"},
    {BITMAP, TILE_ROW_WORDS + 1, 1, "column 0 of tile row 1 has a bit outside"},
};

static void damage_tiles(const Image *im, const FileSection *s, const TileDamage *d) {
    TiledCbcLayout layout = {0};
    assert_int_equal(tiled_cbc_layout(&layout, s->rows, s->cols, NULL), OK);
    unsigned char *block = im->bytes + s->offset;
    if (d->array == BITMAP) {
        ((uint64_t *)(block + layout.bitmap))[d->index] ^= d->bits;
    } else {
        const size_t start = d->array == TILE_OFFSET ? layout.tile_offset : layout.col_info;
        ((uint32_t *)(block + start))[d->index] ^= (uint32_t)d->bits;
    }
}

static void damaged_tile_arrays_are_refused(void **state) {
    (void)state;
    for (size_t i = 0; i < LENGTH(tile_damages); i++) {
        Image im = copy_of(&tiled_model);
        damage_tiles(&im, find_section(&im, SECTION_GATE_UP, 1), &tile_damages[i]);
        expect_refusal(&im, ERR_FORMAT, "section 11 (gate|up, layer 1): ");
        seal_and_refuse(&im, ERR_FORMAT, tile_damages[i].reason);
    }
}

/* Sections are checked in parallel, yet the message may not depend on who is first. */
static void of_several_faults_the_first_section_is_named(void **state) {
    (void)state;
    for (int round = 0; round < 50; round++) {
        Image im = copy_of(&tiled_model);
        for (int layer = 0; layer < N_LAYERS; layer++) {
            damage_tiles(&im, find_section(&im, SECTION_GATE_UP, layer), &tile_damages[0]);
        }
        expect_refusal(&im, ERR_FORMAT, "section 5 (gate|up, layer 0): ");
        free(im.bytes);
    }
}

/* ---- damaged values ---- */

static void expect_damage_found_by_verify_only(const Image *im, const char *reason) {
    const Checkpoint ck = expect_acceptance(im);
    Error err = {0};
    assert_int_equal(checkpoint_verify(&ck, &err), ERR_FORMAT);
    assert_int_equal(checkpoint_verify(&ck, NULL), ERR_FORMAT);
    assert_contains(err.text, reason);
    assert_contains(err.text, "damaged");
}

/* Where the values of a section lie: behind the index, which the reader checks at once. */
static size_t values_offset(const FileSection *s) {
    TiledCbcLayout layout = {0};
    if (s->format == FORMAT_TILED_CBC) {
        assert_int_equal(tiled_cbc_layout(&layout, s->rows, s->cols, NULL), OK);
    }
    return layout.values;
}

/* cases.md row 15: a checksum for each section. */
static void damaged_values_are_found_by_verify_only(void **state) {
    (void)state;
    Image im = copy_of(&tiled_model);
    for (uint32_t i = 0; i < im.header->n_sections; i++) {
        const FileSection *s = &im.table[i];
        const size_t first = values_offset(s), places[] = {first, (first + s->bytes) / 2, s->bytes - 1};
        for (size_t j = 0; j < LENGTH(places); j++) {
            unsigned char *byte = im.bytes + s->offset + places[j];
            *byte ^= 0x10;
            expect_damage_found_by_verify_only(&im, s->name);
            *byte ^= 0x10;
        }
    }
    const Checkpoint ck = expect_acceptance(&im);
    assert_int_equal(checkpoint_verify(&ck, NULL), OK);
    free(im.bytes);
}

static void a_wrong_checksum_is_found_by_verify_only(void **state) {
    (void)state;
    for (uint32_t i = 0; i < tiled_model.header->n_sections; i++) {
        Image im = copy_of(&tiled_model);
        im.table[i].checksum ^= UINT64_C(1) << 40;
        seal(&im);
        expect_damage_found_by_verify_only(&im, im.table[i].name);
        free(im.bytes);
    }
}

/* ---- cut off (row 15) ---- */

static void expect_open_refusal(const char *path, int code, const char *reason) {
    Checkpoint ck, poison;
    Error err = {0};
    memset(&ck, 0xa5, sizeof ck);
    memset(&poison, 0xa5, sizeof poison);
    assert_int_equal(checkpoint_open(&ck, path, &err), code);
    assert_contains(err.text, path);
    assert_contains(err.text, reason);
    assert_null(strchr(err.text, '\n'));
    assert_memory_equal(&ck, &poison, sizeof ck);
}

static void expect_truncation_noticed(size_t n) {
    const char *path = scratch_path("cut.bin");
    write_file(path, tiled_model.bytes, n);
    if (n == 0) {
        expect_open_refusal(path, ERR_OPEN, "is empty");
    } else {
        expect_open_refusal(path, ERR_FORMAT, n < sizeof(FileHeader) ? "too few" : "truncated");
    }
    // The same in memory of exactly that size, for sanitizers. Alignment is the mapping's.
    void *bytes;
    assert_int_equal(posix_memalign(&bytes, 64, n), 0);
    memcpy(bytes, tiled_model.bytes, n);
    Checkpoint ck;
    assert_int_equal(checkpoint_parse(&ck, bytes, n, NULL), ERR_FORMAT);
    free(bytes);
}

/* cases.md row 15. */
static void every_truncated_file_is_refused(void **state) {
    (void)state;
    static const size_t lengths[] = {0, 1, 7, 8, 39, 40, 255, 256, 257, 4095, 4096, 4097};
    for (size_t i = 0; i < LENGTH(lengths); i++) {
        expect_truncation_noticed(lengths[i]);
    }
    for (uint32_t i = 0; i < tiled_model.header->n_sections; i++) {
        const FileSection *s = &tiled_model.table[i];
        expect_truncation_noticed(s->offset);
        expect_truncation_noticed(s->offset + s->bytes - 1);
        expect_truncation_noticed(s->offset + s->bytes);
        expect_truncation_noticed(tiled_model.header->table_offset + i * sizeof *s);
    }
    expect_truncation_noticed(tiled_model.n - 1);
}

/* The same cuts with a header that says the cut length is right. */
static void truncation_that_the_header_hides_is_refused(void **state) {
    (void)state;
    const size_t table = tiled_model.header->table_offset, n = tiled_model.n;
    const size_t lengths[] = {256, 4096, table - 8, table, table + 256, n - 256, n - 1};
    for (size_t i = 0; i < LENGTH(lengths); i++) {
        Image im = image_of(tiled_model.bytes, lengths[i]);
        im.header->file_bytes = lengths[i];
        expect_refusal(&im, ERR_FORMAT, "section table lies outside");
        free(im.bytes);
    }
}

static void surplus_bytes_are_refused(void **state) {
    (void)state;
    const char *path = scratch_path("long.bin");
    unsigned char *bytes = calloc(1, tiled_model.n + 1);
    memcpy(bytes, tiled_model.bytes, tiled_model.n);
    write_file(path, bytes, tiled_model.n + 1);
    free(bytes);
    expect_open_refusal(path, ERR_FORMAT, "should be");
}

/* ---- other files given as model (row 17) ---- */

/* cases.md row 17. */
static void other_files_are_refused_by_name(void **state) {
    (void)state;
    // G1: the header of llama2.c's stories15M, and the magic of its later versions.
    static const unsigned char v0[1000] = {0x20, 1, 0, 0, 0, 3, 0, 0, 6, 0, 0, 0, 6,    0,
                                           0,    0, 6, 0, 0, 0, 0, 0x7d, 0, 0, 0, 1, 0, 0};
    static const unsigned char v1[1000] = {0x32, 0x34, 0x6b, 0x61, 1};
    static char text[1000];
    memset(text, 'a', sizeof text);
    const struct {
        const void *bytes;
        size_t n;
        const char *reason;
    } cases[] = {
        {v0, sizeof v0, "not a model file made by convert"},
        {v1, sizeof v1, "not a model file made by convert"},
        {text, sizeof text, "not a model file made by convert"},
        {text, 20, "too few for a model file"},
        {"SPDPv1\r\n", 8, "too few for a model file"},
    };
    const char *path = scratch_path("other.bin");
    for (size_t i = 0; i < LENGTH(cases); i++) {
        write_file(path, cases[i].bytes, cases[i].n);
        expect_open_refusal(path, ERR_FORMAT, cases[i].reason);
    }
}

static void a_real_llama2c_file_is_refused_by_name(void **state) {
    (void)state;
    const char *path = "../shared/data/stories260K/stories260K.bin";
    if (access(path, R_OK) != 0) {
        print_message("skipped: %s absent\n", path);
        skip();
    }
    expect_open_refusal(path, ERR_FORMAT, "not a model file made by convert");
}

static void what_is_no_file_is_refused(void **state) {
    (void)state;
    expect_open_refusal(scratch_path("absent.bin"), ERR_OPEN, "No such file");
    expect_open_refusal(scratch, ERR_OPEN, "is a directory");
    expect_open_refusal("/dev/null", ERR_OPEN, "not a regular file");
}

static void a_long_path_does_not_hide_the_reason(void **state) {
    (void)state;
    char name[256], path[600];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    write_file(path, tiled_model.bytes, tiled_model.n - 1);
    Checkpoint ck;
    Error err = {0};
    assert_int_equal(checkpoint_open(&ck, path, &err), ERR_FORMAT);
    assert_contains(err.text, "truncated");
    assert_int_equal(unlink(path), 0);
}

/* ---- a file beyond 4 GiB (row 18) ---- */

static const Config huge = {
    .dim = 1536, .hidden_dim = 3, .n_layers = 1, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2,
    .seq_len = 8, .vocab_size = 1 << 21, .norm_eps = 1e-5f, .rope_theta = 1e4, .bos_id = 1,
};
enum { HUGE_VALUE = 0x3c01 };

static void write_at(int fd, const void *bytes, size_t n, size_t offset) {
    assert_int_equal(pwrite(fd, bytes, n, (off_t)offset), n);
}

/* A model whose values are holes, but for the last one of each section. Returns 0 or errno. */
static int write_holes(const char *path, const Config *c) {
    Place places[MAX_PLACES];
    FileSection table[MAX_PLACES] = {{.kind = 0}};
    FileHeader h = {
        .magic = FILE_MAGIC, .version = FILE_VERSION, .dim = c->dim, .hidden_dim = c->hidden_dim,
        .n_layers = c->n_layers, .n_heads = c->n_heads, .n_kv_heads = c->n_kv_heads, .head_dim = c->head_dim,
        .seq_len = c->seq_len, .vocab_size = c->vocab_size, .rope_theta = c->rope_theta,
        .norm_eps = c->norm_eps, .bos_id = c->bos_id,
    };
    h.n_sections = (uint32_t)list_places(places, c->n_layers, true);
    size_t end = FILE_ALIGN;
    for (uint32_t i = 0; i < h.n_sections; i++) {
        FileSection *s = &table[i];
        size_t rows, cols;
        place_shape(c, places[i].kind, &rows, &cols);
        *s = (FileSection){.kind = places[i].kind, .layer = places[i].layer, .format = FORMAT_DENSE,
                           .value_type = VALUE_FP16, .rows = rows, .cols = cols, .offset = end};
        s->bytes = rows * dense_stride(cols) * sizeof(fp16);
        end = round_up(end + s->bytes + MEMORY_SLACK, FILE_ALIGN);
    }
    h.table_offset = end;
    h.file_bytes = end + h.n_sections * sizeof *table;
    h.hash = format_hash(&h, table);
    const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    assert_true(fd >= 0);
    const int reason = ftruncate(fd, (off_t)h.file_bytes) == 0 ? 0 : errno;
    if (!reason) {
        const fp16 value = HUGE_VALUE;
        write_at(fd, &h, sizeof h, 0);
        write_at(fd, table, h.n_sections * sizeof *table, h.table_offset);
        for (uint32_t i = 0; i < h.n_sections; i++) {
            const FileSection *s = &table[i];
            const size_t padding = dense_stride(s->cols) - s->cols;
            write_at(fd, &value, sizeof value, s->offset + s->bytes - (padding + 1) * sizeof value);
        }
    }
    close(fd);
    return reason;
}

/* cases.md row 18. */
static void a_file_of_more_than_5_GiB_is_read(void **state) {
    (void)state;
    const char *path = scratch_path("huge.bin");
    const int reason = write_holes(path, &huge);
    struct stat st = {0};
    stat(path, &st);
    if (reason || st.st_blocks > 1 << 15) {  // no holes: nobody should wait for gigabytes
        unlink(path);
        print_message("skipped: no sparse file of 6 GiB here: %s\n", reason ? strerror(reason) : "no holes");
        skip();
    }
    assert_true(st.st_size > INT64_C(5) << 30);
    Checkpoint ck;
    Error err;
    if (checkpoint_open(&ck, path, &err)) {
        unlink(path);
        fail_msg("%s", err.text);
    }
    for (size_t i = 0; i < ck.n_sections; i++) {
        const Matrix m = checkpoint_matrix(&ck, &ck.sections[i]);
        const size_t last = (m.rows - 1) * m.stride + m.cols - 1;
        assert_int_equal(m.dense[last], HUGE_VALUE);
        assert_int_equal(m.dense[0], last == 0 ? HUGE_VALUE : 0);
    }
    assert_true(checkpoint_find(&ck, SECTION_FINAL_NORM, -1)->offset > UINT32_MAX);
    checkpoint_close(&ck);
    assert_int_equal(truncate(path, st.st_size - 1), 0);
    expect_open_refusal(path, ERR_FORMAT, "truncated");
    unlink(path);
}

/* ---- writing: all or nothing (row 15) ---- */

static int n_files(const char *dir) {
    DIR *d = opendir(dir);
    assert_non_null(d);
    int n = 0;
    for (const struct dirent *e = readdir(d); e; e = readdir(d)) {
        n += e->d_name[0] != '.';
    }
    closedir(d);
    return n;
}

/* A fresh directory in which nothing but what a test leaves is found. */
static const char *fresh_directory(void) {
    const char *dir = scratch_path("fresh");
    assert_int_equal(mkdir(dir, 0700), 0);
    return dir;
}

static void expect_file(const char *path, const char *text) {
    char bytes[100] = {0};
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    assert_int_equal(fread(bytes, 1, sizeof bytes, f), strlen(text));
    fclose(f);
    assert_string_equal(bytes, text);
}

static void expect_readable(const char *path) {
    Checkpoint ck;
    Error err;
    if (checkpoint_open(&ck, path, &err)) {
        fail_msg("%s", err.text);
    }
    checkpoint_close(&ck);
}

static void expect_not_opened(const char *path, const char *reason) {
    Writer *w = (Writer *)&w;
    Error err = {0};
    for (int force = 0; force <= 1; force++) {
        assert_int_equal(writer_open(&w, path, &config, force, &err), ERR_WRITE);
        assert_contains(err.text, reason);
        assert_ptr_equal(w, &w);
    }
}

static void an_existing_file_is_kept_without_force(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    write_file(path, "mine", 4);
    Error err = {0};
    assert_int_equal(write_model(path, forms[0], false, NULL, &err), ERR_WRITE);
    assert_contains(err.text, path);
    assert_contains(err.text, "exists already; --force replaces it");
    expect_file(path, "mine");
    assert_int_equal(n_files(dir), 1);
    assert_int_equal(write_model(path, forms[0], true, NULL, &err), OK);
    expect_readable(path);
    assert_int_equal(n_files(dir), 1);
    unlink(path);
    rmdir(dir);
}

static void a_dangling_link_counts_as_existing(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    assert_int_equal(symlink("nowhere", path), 0);
    Error err = {0};
    assert_int_equal(write_model(path, forms[0], false, NULL, &err), ERR_WRITE);
    assert_contains(err.text, "exists already");
    unlink(path);
    rmdir(dir);
}

static void a_file_that_appears_meanwhile_is_kept_without_force(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    for (int force = 0; force <= 1; force++) {
        Writer *w;
        Error err = {0};
        unlink(path);
        assert_int_equal(writer_open(&w, path, &config, force, &err), OK);
        assert_int_equal(put_sections(w, forms[2], &err), OK);
        assert_int_not_equal(access(path, F_OK), 0);  // until all is written, there is nothing
        write_file(path, "mine", 4);
        assert_int_equal(writer_finish(w, NULL, &err), force ? OK : ERR_WRITE);
        if (force) {
            expect_readable(path);
        } else {
            assert_contains(err.text, "cannot be put in place");
            expect_file(path, "mine");
        }
        assert_int_equal(n_files(dir), 1);
    }
    unlink(path);
    rmdir(dir);
}

static void giving_up_leaves_nothing(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    Writer *w;
    assert_int_equal(writer_open(&w, path, &config, false, NULL), OK);
    assert_int_equal(n_files(dir), 1);
    assert_int_equal(put_sections(w, forms[0], NULL), OK);
    writer_abort(w);
    assert_int_equal(n_files(dir), 0);
    writer_abort(NULL);
    rmdir(dir);
}

static void targets_that_cannot_be_are_refused(void **state) {
    (void)state;
    expect_not_opened("", "empty name");
    expect_not_opened("/dev/null", "not a regular file");
    expect_not_opened(scratch, "a directory");
    expect_not_opened(scratch_path("no-such-directory/model.bin"), "cannot be created: No such file");
    write_file(scratch_path("file"), "", 0);
    expect_not_opened(scratch_path("file/model.bin"), "Not a directory");
}

static void a_read_only_directory_is_refused(void **state) {
    (void)state;
    if (geteuid() == 0) {
        print_message("skipped: root may write everywhere\n");
        skip();
    }
    const char *dir = fresh_directory();
    assert_int_equal(chmod(dir, 0500), 0);
    expect_not_opened(scratch_path("fresh/model.bin"), "cannot be created: Permission denied");
    assert_int_equal(chmod(dir, 0700), 0);
    assert_int_equal(n_files(dir), 0);
    rmdir(dir);
}

static int write_model_within(size_t limit, const char *path, Error *err) {
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = (struct rlimit){.rlim_cur = limit, .rlim_max = before.rlim_max};
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    const int rc = write_model(path, (Form){.tiled = true}, false, NULL, err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, handler);
    return rc;
}

/* cases.md row 15. As on a full disk: the file may not grow beyond a limit, met at once, in a section, or in the
 * table. */
static void a_failing_write_leaves_nothing(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    const size_t n = tiled_model.n, table = tiled_model.header->table_offset;
    const size_t limits[] = {0, 300, 4096, 4100, n / 2, table - 4096, table, table + 256, n - 1};
    for (size_t i = 0; i < LENGTH(limits); i++) {
        Error err = {0};
        assert_int_equal(write_model_within(limits[i], path, &err), ERR_WRITE);
        assert_int_equal(err.code, ERR_WRITE);
        assert_contains(err.text, path);
        assert_contains(err.text, "cannot be written: File too large");
        assert_int_equal(n_files(dir), 0);
    }
    assert_int_equal(write_model_within(n, path, NULL), OK);
    expect_readable(path);
    unlink(path);
    rmdir(dir);
}

/* A writer in another process that is killed before it can finish. */
static void kill_writer(const char *path) {
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        Writer *w;
        if (writer_open(&w, path, &config, false, NULL) == OK && put_sections(w, forms[0], NULL) == OK) {
            kill(getpid(), SIGKILL);
        }
        _exit(1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFSIGNALED(status));
}

/* cases.md row 15. */
static void a_killed_writer_leaves_nothing_under_the_final_name(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    kill_writer(path);
    assert_int_not_equal(access(path, F_OK), 0);
    const char *partial = scratch_path("fresh/model.bin.partial");
    expect_open_refusal(partial, ERR_FORMAT, "not a model file");  // the header goes last
    unlink(partial);
    assert_int_equal(n_files(dir), 0);
    rmdir(dir);
}

static void leftovers_of_an_earlier_process_are_no_hindrance(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    for (size_t i = 0; i < LENGTH(forms); i++) {
        kill_writer(path);
        assert_int_equal(n_files(dir), 1);
        assert_int_equal(write_model(path, forms[i], true, NULL, NULL), OK);
        expect_readable(path);
        assert_int_equal(n_files(dir), 1);
        unlink(path);
    }
    rmdir(dir);
}

static void a_file_that_no_writer_left_is_kept(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    const char *mine = scratch_path("fresh/model.bin.partial");
    Error err = {0};
    write_file(mine, "mine", 4);
    assert_int_equal(write_model(path, forms[0], true, NULL, &err), ERR_WRITE);
    assert_contains(err.text, "is not what an interrupted conversion leaves");
    expect_file(mine, "mine");
    unlink(mine);
    assert_int_equal(symlink("model.bin", mine), 0);
    assert_int_equal(write_model(path, forms[0], true, NULL, &err), ERR_WRITE);
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(n_files(dir), 1);
    unlink(mine);
    rmdir(dir);
}

static void a_second_writer_is_refused(void **state) {
    (void)state;
    const char *dir = fresh_directory(), *path = scratch_path("fresh/model.bin");
    Writer *first, *second = NULL;
    Error err = {0};
    assert_int_equal(writer_open(&first, path, &config, false, NULL), OK);
    assert_int_equal(writer_open(&second, path, &config, true, &err), ERR_WRITE);
    assert_contains(err.text, "another conversion is writing it");
    assert_int_equal(writer_reopen(&second, path, &config, true, &err), ERR_WRITE);
    assert_contains(err.text, "another conversion is writing it");
    assert_null(second);
    assert_int_equal(put_sections(first, forms[0], NULL), OK);
    assert_int_equal(writer_finish(first, NULL, NULL), OK);
    expect_readable(path);
    assert_int_equal(writer_open(&second, path, &config, true, NULL), OK);
    writer_abort(second);
    assert_int_equal(n_files(dir), 1);
    unlink(path);
    rmdir(dir);
}

/* ---- the run ---- */

static int set_up(void **state) {
    (void)state;
    const char *build = getenv("BUILD");
    static char name[200];
    snprintf(name, sizeof name, "%.150s/checkpoint.XXXXXX", build ? build : "build");
    scratch = mkdtemp(name);
    if (!scratch) {
        return -1;
    }
    write_model_or_fail(scratch_path("dense.bin"), (Form){.tiled = false});
    write_model_or_fail(scratch_path("tiled.bin"), (Form){.tiled = true});
    dense_model = read_image(scratch_path("dense.bin"));
    tiled_model = read_image(scratch_path("tiled.bin"));
    return 0;
}

/* Files, and the one directory that a failed test may have left. */
static void remove_directory(const char *dir) {
    DIR *d = opendir(dir);
    for (const struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        unlinkat(dirfd(d), e->d_name, 0);
    }
    if (d) {
        closedir(d);
    }
    rmdir(dir);
}

static int tear_down(void **state) {
    (void)state;
    free(dense_model.bytes);
    free(tiled_model.bytes);
    remove_directory(scratch_path("fresh"));
    remove_directory(scratch);
    return access(scratch, F_OK) == 0 ? -1 : 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_is_read_back),
        cmocka_unit_test(sites_follow_the_kind),
        cmocka_unit_test(the_same_input_gives_the_same_file),
        cmocka_unit_test(zeros_follow_every_section),
        cmocka_unit_test(the_writer_leaves_room_behind_sections_of_any_size),
        cmocka_unit_test(every_damaged_header_field_is_refused),
        cmocka_unit_test(a_changed_line_end_is_told_from_another_file),
        cmocka_unit_test(what_readers_ignore_does_no_harm),
        cmocka_unit_test(every_flipped_byte_of_header_and_table_is_noticed),
        cmocka_unit_test(every_damaged_section_field_is_refused),
        cmocka_unit_test(dense_matrices_are_held_to_their_size),
        cmocka_unit_test(row_maps_are_optional),
        cmocka_unit_test(sections_out_of_order_are_refused),
        cmocka_unit_test(slack_behind_a_section_is_demanded_to_the_byte),
        cmocka_unit_test(every_matrix_is_missed),
        cmocka_unit_test(unknown_sections_are_skipped_only_if_flagged),
        cmocka_unit_test(skipped_sections_must_still_lie_in_the_file),
        cmocka_unit_test(the_table_may_begin_at_any_multiple_of_8),
        cmocka_unit_test(damaged_tile_arrays_are_refused),
        cmocka_unit_test(of_several_faults_the_first_section_is_named),
        cmocka_unit_test(damaged_values_are_found_by_verify_only),
        cmocka_unit_test(a_wrong_checksum_is_found_by_verify_only),
        cmocka_unit_test(every_truncated_file_is_refused),
        cmocka_unit_test(truncation_that_the_header_hides_is_refused),
        cmocka_unit_test(surplus_bytes_are_refused),
        cmocka_unit_test(other_files_are_refused_by_name),
        cmocka_unit_test(a_real_llama2c_file_is_refused_by_name),
        cmocka_unit_test(what_is_no_file_is_refused),
        cmocka_unit_test(a_long_path_does_not_hide_the_reason),
        cmocka_unit_test(a_file_of_more_than_5_GiB_is_read),
        cmocka_unit_test(an_existing_file_is_kept_without_force),
        cmocka_unit_test(a_dangling_link_counts_as_existing),
        cmocka_unit_test(a_file_that_appears_meanwhile_is_kept_without_force),
        cmocka_unit_test(giving_up_leaves_nothing),
        cmocka_unit_test(targets_that_cannot_be_are_refused),
        cmocka_unit_test(a_read_only_directory_is_refused),
        cmocka_unit_test(a_failing_write_leaves_nothing),
        cmocka_unit_test(a_killed_writer_leaves_nothing_under_the_final_name),
        cmocka_unit_test(leftovers_of_an_earlier_process_are_no_hindrance),
        cmocka_unit_test(a_file_that_no_writer_left_is_kept),
        cmocka_unit_test(a_second_writer_is_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
