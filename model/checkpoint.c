#include "checkpoint.h"

#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <xxhash.h>

#define MAX_SECTIONS 65536  // far above any model; keeps the search for duplicates short

uint64_t format_hash(const FileHeader *header, const FileSection *table) {
    FileHeader h = *header;
    h.hash = 0;
    return XXH3_64bits_withSeed(table, (size_t)h.n_sections * sizeof *table, XXH3_64bits(&h, sizeof h));
}

/* What config demands of a section kind. */
typedef struct {
    const char *name;
    size_t rows, cols;  // 0: bytes
    bool per_layer, required, may_be_tiled;
} SectionRule;

/* False for a kind that this version does not know. */
static bool section_rule(SectionRule *rule, const Config *c, uint32_t kind) {
    const size_t dim = (size_t)c->dim, hidden = (size_t)c->hidden_dim, vocab = (size_t)c->vocab_size;
    switch (kind) {
    case SECTION_EMBEDDING: *rule = (SectionRule){"embedding", vocab, dim, false, true, false}; return true;
    case SECTION_HEAD: *rule = (SectionRule){"head", vocab, dim, false, false, false}; return true;
    case SECTION_FINAL_NORM: *rule = (SectionRule){"final norm", 1, dim, false, true, false}; return true;
    case SECTION_ATTN_NORM: *rule = (SectionRule){"attention norm", 1, dim, true, true, false}; return true;
    case SECTION_QKV:
        *rule = (SectionRule){"q|k|v", config_q_dim(c) + 2 * config_kv_dim(c), dim, true, true, true};
        return true;
    case SECTION_O: *rule = (SectionRule){"o", dim, config_q_dim(c), true, true, true}; return true;
    case SECTION_MLP_NORM: *rule = (SectionRule){"MLP norm", 1, dim, true, true, false}; return true;
    case SECTION_GATE_UP: *rule = (SectionRule){"gate|up", 2 * hidden, dim, true, true, true}; return true;
    case SECTION_DOWN: *rule = (SectionRule){"down", dim, hidden, true, true, true}; return true;
    case SECTION_TOKENIZER: *rule = (SectionRule){"tokenizer", 0, 0, false, false, false}; return true;
    case SECTION_PROVENANCE: *rule = (SectionRule){"provenance", 0, 0, false, false, false}; return true;
    case SECTION_QUANTILES: *rule = (SectionRule){"quantiles", 0, 0, false, false, false}; return true;
    default: return false;
    }
}

static int check_header(const FileHeader *h, size_t bytes, Error *err) {
    if (memcmp(h->magic, FILE_MAGIC, sizeof h->magic) != 0) {
        return error_set(err, ERR_FORMAT, memcmp(h->magic, FILE_MAGIC, 6) == 0
                                              ? "damaged in transfer: line ends were changed"
                                              : "not a model file made by convert");
    }
    if (h->version != FILE_VERSION) {
        return error_set(err, ERR_FORMAT, "format version %u, this program reads version %d", h->version,
                         FILE_VERSION);
    }
    if (h->file_bytes != bytes) {
        return error_set(err, ERR_FORMAT, "%zu bytes long, should be %llu: %s", bytes,
                         (unsigned long long)h->file_bytes,
                         bytes < h->file_bytes ? "truncated or still being copied" : "something was appended");
    }
    if (h->n_sections > MAX_SECTIONS || h->table_offset % 8 != 0 || h->table_offset < sizeof *h ||
        h->table_offset > bytes || h->n_sections > (bytes - h->table_offset) / sizeof(FileSection)) {
        return error_set(err, ERR_FORMAT, "section table lies outside the file");
    }
    return OK;
}

static Config read_config(const FileHeader *h) {
    Config c = {
        .dim = h->dim,
        .hidden_dim = h->hidden_dim,
        .n_layers = h->n_layers,
        .n_heads = h->n_heads,
        .n_kv_heads = h->n_kv_heads,
        .head_dim = h->head_dim,
        .seq_len = h->seq_len,
        .vocab_size = h->vocab_size,
        .norm_eps = h->norm_eps,
        .rope_theta = h->rope_theta,
        .bos_id = h->bos_id,
        .n_eos = h->n_eos,
    };
    _Static_assert(MAX_EOS == FILE_MAX_EOS, "the file holds as many ids as the config");
    memcpy(c.eos_id, h->eos_id, sizeof c.eos_id);
    return c;
}

/* Row map: parts of a fused matrix stay inside it and have as many rows together as it has. */
static bool parts_fit(const FileSection *s) {
    uint64_t total = 0;
    if (s->n_parts > FILE_MAX_PARTS) {
        return false;
    }
    for (uint32_t i = 0; i < s->n_parts; i++) {
        const FilePart *p = &s->part[i];
        if (p->n_rows == 0 || p->step == 0 || p->name[sizeof p->name - 1] != 0 ||
            p->first + (uint64_t)p->step * (p->n_rows - 1) >= s->rows) {
            return false;
        }
        total += p->n_rows;
    }
    return s->n_parts == 0 || total == s->rows;
}

/* Does a section have the form that its kind demands? Does not look at its bytes. */
static int check_form(const FileSection *s, const SectionRule *rule, Error *err) {
    if (rule->rows == 0) {
        if (s->format != 0 || s->value_type != VALUE_BYTES || s->rows != 1 || s->cols != s->bytes) {
            return error_set(err, ERR_FORMAT, "should be plain bytes");
        }
        return OK;
    }
    if (s->rows != rule->rows || s->cols != rule->cols) {
        return error_set(err, ERR_SHAPE, "is %llu x %llu, the config demands %zu x %zu",
                         (unsigned long long)s->rows, (unsigned long long)s->cols, rule->rows, rule->cols);
    }
    if (s->value_type != VALUE_FP16) {
        return error_set(err, ERR_FORMAT, "has value type %u, this program reads fp16 (%d)", s->value_type,
                         VALUE_FP16);
    }
    if (!parts_fit(s)) {
        return error_set(err, ERR_FORMAT, "has a row map that does not fit");
    }
    if (s->format == FORMAT_DENSE) {
        const size_t bytes = rule->rows * dense_stride(rule->cols) * sizeof(fp16);
        return s->bytes == bytes ? OK
                                 : error_set(err, ERR_FORMAT, "has %llu bytes, its shape needs %zu",
                                             (unsigned long long)s->bytes, bytes);
    }
    if (s->format != FORMAT_TILED_CBC || !rule->may_be_tiled) {
        return error_set(err, ERR_FORMAT, "has storage format %u, which is not possible here", s->format);
    }
    if (s->tile_m != TILE_M || s->tile_k != TILE_K) {
        return error_set(err, ERR_FORMAT, "has tiles of %u x %u, this program reads %d x %d", s->tile_m,
                         s->tile_k, TILE_M, TILE_K);
    }
    return OK;
}

/* The arrays of a Tiled-CBC section, and what the table says of them. */
static int check_tiles(const FileSection *s, const void *block, Error *err) {
    TiledCbc cbc;
    TiledCbcStats stats;
    int rc = tiled_cbc_view(&cbc, block, s->bytes, s->rows, s->cols, err);
    if (!rc) {
        rc = tiled_cbc_validate(&cbc, &stats, err);
    }
    if (!rc && (stats.nnz != s->nnz || stats.max_col_values != s->max_col_values ||
                stats.max_gtile_values != s->max_gtile_values)) {
        rc = error_set(err, ERR_FORMAT, "holds other counts than the section table says");
    }
    return rc;
}

/* "section 12 (down, layer 3): ..." before the reason in err; returns its code. */
static int section_error(Error *err, size_t index, const SectionRule *rule, int layer) {
    char where[80];
    if (rule->per_layer) {
        snprintf(where, sizeof where, "section %zu (%s, layer %d)", index, rule->name, layer);
    } else {
        snprintf(where, sizeof where, "section %zu (%s)", index, rule->name);
    }
    error_prefix(err, where);
    return err->code;
}

/* Place, kind, layer and form of every section. */
static int check_table(const Checkpoint *ck, Error *err) {
    uint64_t end = sizeof(FileHeader);
    for (size_t i = 0; i < ck->n_sections; i++) {
        const FileSection *s = &ck->sections[i];
        if (s->offset % FILE_ALIGN != 0 || s->offset < end || s->offset > ck->bytes ||
            s->bytes > ck->bytes - s->offset || ck->bytes - s->offset - s->bytes < MEMORY_SLACK) {
            return error_set(err, ERR_FORMAT, "section %zu lies outside the file or over another", i);
        }
        end = s->offset + s->bytes + MEMORY_SLACK;
        SectionRule rule;
        if (!section_rule(&rule, &ck->config, s->kind)) {
            if (s->flags & SECTION_OPTIONAL) {
                continue;
            }
            return error_set(err, ERR_FORMAT, "section %zu is of kind %u, which this program does not know", i,
                             s->kind);
        }
        if (rule.per_layer ? s->layer < 0 || s->layer >= ck->config.n_layers : s->layer != -1) {
            return error_set(err, ERR_FORMAT, "section %zu (%s) names layer %d", i, rule.name, s->layer);
        }
        if (checkpoint_find(ck, s->kind, s->layer) != s) {
            return error_set(err, ERR_FORMAT, "section %zu: a second %s for layer %d", i, rule.name, s->layer);
        }
        if (check_form(s, &rule, err)) {
            return section_error(err, i, &rule, s->layer);
        }
    }
    return OK;
}

static int check_complete(const Checkpoint *ck, Error *err) {
    for (uint32_t kind = SECTION_EMBEDDING; kind <= SECTION_QUANTILES; kind++) {
        SectionRule rule;
        if (!section_rule(&rule, &ck->config, kind) || !rule.required) {
            continue;
        }
        for (int layer = rule.per_layer ? 0 : -1; layer < (rule.per_layer ? ck->config.n_layers : 0); layer++) {
            if (!checkpoint_find(ck, kind, layer)) {
                return error_set(err, ERR_FORMAT, "no section for %s, layer %d", rule.name, layer);
            }
        }
    }
    return OK;
}

/* All Tiled-CBC arrays, in parallel: a large model has hundreds of megabytes of bitmaps. */
static int check_all_tiles(const Checkpoint *ck, Error *err) {
    Error first = {.code = OK};
    size_t first_index = SIZE_MAX;
#pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < ck->n_sections; i++) {
        const FileSection *s = &ck->sections[i];
        SectionRule rule;
        Error e;
        if (s->format != FORMAT_TILED_CBC || !section_rule(&rule, &ck->config, s->kind) ||
            !check_tiles(s, checkpoint_bytes(ck, s), &e)) {
            continue;
        }
        section_error(&e, i, &rule, s->layer);
#pragma omp critical(first_fault)
        if (i < first_index) {
            first_index = i;
            first = e;
        }
    }
    return first.code ? error_set(err, first.code, "%s", first.text) : OK;
}

/* Sizes of a section of quantiles and its ratios; the tables are as large as they say. */
static int check_quantile_header(const FileQuantiles *q, size_t bytes, int n_layers, Error *err) {
    if (bytes < sizeof *q) {
        return error_set(err, ERR_FORMAT, "has %zu bytes, too few", bytes);
    }
    if (q->n_layers != (uint32_t)n_layers || q->n_sites != FILE_DP_SITES) {
        return error_set(err, ERR_SHAPE, "has %u layers of %u sites, the model has %d of %d", q->n_layers, q->n_sites,
                         n_layers, FILE_DP_SITES);
    }
    if (q->n_tables < 1 || q->n_tables > FILE_MAX_TABLES || q->n_quantiles < 2 ||
        q->n_quantiles > FILE_MAX_QUANTILES) {
        return error_set(err, ERR_FORMAT, "has %u tables of %u quantiles, which is out of range", q->n_tables,
                         q->n_quantiles);
    }
    // 8 * 65536 * 4 * 4 bytes a layer at most, so the product of 64-bit numbers holds.
    const uint64_t want =
        sizeof *q + sizeof(float) * (uint64_t)q->n_tables * q->n_layers * q->n_sites * q->n_quantiles;
    if (bytes != want) {
        return error_set(err, ERR_FORMAT, "has %zu bytes, its tables need %llu", bytes, (unsigned long long)want);
    }
    if (!(q->default_dp >= 0 && q->default_dp <= FILE_MAX_DP)) {
        return error_set(err, ERR_FORMAT, "has a dynamic ratio of %g (0 .. %g is possible)", q->default_dp, FILE_MAX_DP);
    }
    for (uint32_t i = 0; i < q->n_tables; i++) {
        if (i == 0 ? q->measured_at[0] != 0 : !(q->measured_at[i] > q->measured_at[i - 1] && q->measured_at[i] < 1)) {
            return error_set(err, ERR_FORMAT, "has a table %u measured at ratio %g, which is out of order", i,
                             (double)q->measured_at[i]);
        }
    }
    return OK;
}

/* Every site's quantiles begin with 0 and ascend, and are finite. */
static int check_quantiles(const FileQuantiles *q, size_t bytes, int n_layers, Error *err) {
    const int rc = check_quantile_header(q, bytes, n_layers, err);
    if (rc) {
        return rc;
    }
    const float *values = (const float *)(q + 1);
    const size_t n_sites = (size_t)q->n_tables * q->n_layers * q->n_sites;
    for (size_t s = 0; s < n_sites; s++, values += q->n_quantiles) {
        bool good = values[0] == 0;
        for (uint32_t i = 1; i < q->n_quantiles; i++) {
            good &= values[i] >= values[i - 1] && isfinite(values[i]);
        }
        if (!good) {
            return error_set(err, ERR_FORMAT, "has quantiles that do not ascend from 0 (table %zu, layer %zu, site %zu)",
                             s / FILE_DP_SITES / q->n_layers, s / FILE_DP_SITES % q->n_layers, s % FILE_DP_SITES);
        }
    }
    return OK;
}

static int check_quantile_section(const Checkpoint *ck, Error *err) {
    const FileSection *s = checkpoint_find(ck, SECTION_QUANTILES, -1);
    SectionRule rule;
    if (s && check_quantiles(checkpoint_bytes(ck, s), s->bytes, ck->config.n_layers, err)) {
        CHECK(section_rule(&rule, &ck->config, s->kind));
        return section_error(err, (size_t)(s - ck->sections), &rule, -1);
    }
    return OK;
}

int checkpoint_parse(Checkpoint *ck, const void *data, size_t bytes, Error *err) {
    Error unused;
    err = err ? err : &unused;
    if (bytes < sizeof(FileHeader)) {
        return error_set(err, ERR_FORMAT, "%zu bytes are too few for a model file", bytes);
    }
    const FileHeader *header = data;
    int rc = check_header(header, bytes, err);
    if (rc) {
        return rc;
    }
    Checkpoint seen = {
        .config = read_config(header),
        .data = data,
        .bytes = bytes,
        .sections = (const FileSection *)((const unsigned char *)data + header->table_offset),
        .n_sections = header->n_sections,
    };
    if (format_hash(header, seen.sections) != header->hash) {
        return error_set(err, ERR_FORMAT, "header or section table is damaged (checksum differs)");
    }
    if ((rc = config_check(&seen.config, err)) || (rc = check_table(&seen, err)) ||
        (rc = check_complete(&seen, err)) || (rc = check_quantile_section(&seen, err)) ||
        (rc = check_all_tiles(&seen, err))) {
        return rc;
    }
    *ck = seen;
    return OK;
}

int checkpoint_open(Checkpoint *ck, const char *path, Error *err) {
    Mapping file;
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        return error_set(err, ERR_OPEN, "%.300s: is a directory; run takes the file that convert made of it", path);
    }
    int rc = mapping_open(&file, AT_FDCWD, path, err);
    return rc ? rc : checkpoint_of(ck, &file, path, err);
}

int checkpoint_of(Checkpoint *ck, Mapping *file, const char *name, Error *err) {
    const int rc = file->data ? checkpoint_parse(ck, file->data, file->bytes, err)
                              : error_set(err, ERR_OPEN, "is empty");
    if (rc) {
        error_prefix(err, name);
        mapping_close(file);
        return rc;
    }
    ck->mapped = true;
    return OK;
}

void checkpoint_close(Checkpoint *ck) {
    if (ck->mapped) {
        mapping_close(&(Mapping){ck->data, ck->bytes});
    }
    *ck = (Checkpoint){0};
}

int checkpoint_verify(const Checkpoint *ck, Error *err) {
    for (size_t i = 0; i < ck->n_sections; i++) {
        const FileSection *s = &ck->sections[i];
        if (XXH3_64bits(checkpoint_bytes(ck, s), s->bytes) != s->checksum) {
            return error_set(err, ERR_FORMAT, "section %zu (%.31s) is damaged (checksum differs)", i, s->name);
        }
    }
    return OK;
}

const FileSection *checkpoint_find(const Checkpoint *ck, uint32_t kind, int layer) {
    for (size_t i = 0; i < ck->n_sections; i++) {
        if (ck->sections[i].kind == kind && ck->sections[i].layer == layer) {
            return &ck->sections[i];
        }
    }
    return NULL;
}

static Site section_site(uint32_t kind) {
    switch (kind) {
    case SECTION_QKV: return SITE_ATTN_IN;
    case SECTION_O: return SITE_ATTN_OUT;
    case SECTION_GATE_UP: return SITE_MLP_IN;
    case SECTION_DOWN: return SITE_MLP_HIDDEN;
    default: return SITE_HEAD;
    }
}

Matrix checkpoint_shape(const FileSection *s) {
    return (Matrix){
        .format = (MatrixFormat)s->format,
        .rows = s->rows,
        .cols = s->cols,
        .layer = s->layer,
        .site = section_site(s->kind),
    };
}

Matrix checkpoint_matrix(const Checkpoint *ck, const FileSection *s) {
    Matrix m = checkpoint_shape(s);
    if (m.format == FORMAT_DENSE) {
        m.dense = checkpoint_bytes(ck, s);
        m.stride = dense_stride(m.cols);
    } else {
        CHECK(tiled_cbc_view(&m.cbc, checkpoint_bytes(ck, s), s->bytes, s->rows, s->cols, NULL) == OK);
        m.cbc.max_col_values = s->max_col_values;
    }
    return m;
}

double checkpoint_sparsity(const Checkpoint *ck) {
    double elements = 0, nonzeros = 0;
    for (size_t i = 0; i < ck->n_sections; i++) {
        const FileSection *s = &ck->sections[i];
        if (s->flags & SECTION_PRUNED) {
            elements += (double)s->rows * (double)s->cols;
            nonzeros += (double)s->nnz;
        }
    }
    return elements > 0 ? 1 - nonzeros / elements : 0;
}
