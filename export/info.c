#include "info.h"

#include <cjson/cJSON.h>

#include "../model/cli.h"

/* Nonzeros of a Tiled-CBC matrix in the rows of one part. */
static size_t count_tiled(const TiledCbc *cbc, const FilePart *part) {
    const size_t columns = tiled_cbc_cols_padded(cbc->cols);
    const size_t end = part->first + (size_t)part->step * (part->n_rows - 1);
    size_t nnz = 0;
    for (size_t tm = 0; tm < tiled_cbc_tile_rows(cbc->rows); tm++) {
        uint64_t mask[BITMAP_WORDS] = {0};  // rows of this tile that belong to the part
        for (size_t r = 0; r < TILE_M; r++) {
            const size_t row = tm * TILE_M + r;
            const bool mine = row >= part->first && row <= end && (row - part->first) % part->step == 0;
            mask[r / 64] |= (uint64_t)mine << (r % 64);
        }
        const uint64_t *bitmap = cbc->bitmap + tm * columns * BITMAP_WORDS;
        for (size_t i = 0; i < columns * BITMAP_WORDS; i++) {
            nnz += (size_t)__builtin_popcountll(bitmap[i] & mask[i % BITMAP_WORDS]);
        }
    }
    return nnz;
}

static size_t count_dense(const Matrix *m, const FilePart *part) {
    size_t nnz = 0;
    for (size_t i = 0; i < part->n_rows; i++) {
        const fp16 *row = m->dense + (part->first + i * part->step) * m->stride;
        for (size_t k = 0; k < m->cols; k++) {
            nnz += !fp16_is_zero(row[k]);
        }
    }
    return nnz;
}

static void print_matrix(FILE *out, const Checkpoint *ck, const FileSection *s) {
    const Matrix m = checkpoint_matrix(ck, s);
    const double dense = 2.0 * (double)m.rows * (double)m.cols;
    char shape[32];
    snprintf(shape, sizeof shape, "%zu x %zu", m.rows, m.cols);
    fprintf(out, "%-22.31s %-14s ", s->name, shape);
    if (m.format == FORMAT_TILED_CBC) {
        const double bytes = (double)tiled_cbc_storage(&m.cbc);
        const double formula = (double)tiled_cbc_storage_formula(m.rows, m.cols, s->nnz);
        fprintf(out, "tiled-cbc  %10s  CR %.3f (formula %.3f)", size_text(bytes).text, dense / bytes, dense / formula);
    } else {
        fprintf(out, "dense      %10s  CR %.3f", size_text((double)s->bytes).text, dense / (double)s->bytes);
    }
    for (uint32_t i = 0; i < s->n_parts; i++) {
        const FilePart *part = &s->part[i];
        const size_t nnz = m.format == FORMAT_TILED_CBC ? count_tiled(&m.cbc, part) : count_dense(&m, part);
        fprintf(out, "  %s %.2f %%", part->name,
                100 * (1 - (double)nnz / ((double)part->n_rows * (double)m.cols)));
    }
    fprintf(out, "\n");
}

static void print_provenance(FILE *out, const Checkpoint *ck) {
    const FileSection *s = checkpoint_find(ck, SECTION_PROVENANCE, -1);
    cJSON *json = s ? cJSON_ParseWithLength(checkpoint_bytes(ck, s), s->bytes) : NULL;
    const cJSON *item;
    cJSON_ArrayForEach(item, json) {
        char *value = cJSON_PrintUnformatted(item);
        fprintf(out, "%-22s %s\n", item->string ? item->string : "", value ? value : "");
        cJSON_free(value);
    }
    cJSON_Delete(json);
}

void info_print(FILE *out, const Checkpoint *ck) {
    const Config *c = &ck->config;
    fprintf(out, "%-22s %s, format version %d\n", "file", size_text((double)ck->bytes).text, FILE_VERSION);
    fprintf(out, "%-22s dim %d, hidden %d, %d layers, %d heads (%d kv) of %d\n", "shape", c->dim, c->hidden_dim,
            c->n_layers, c->n_heads, c->n_kv_heads, c->head_dim);
    fprintf(out, "%-22s %d tokens, context %d, BOS %d, EOS", "vocabulary", c->vocab_size, c->seq_len, c->bos_id);
    for (int i = 0; i < c->n_eos; i++) {
        fprintf(out, " %d", c->eos_id[i]);
    }
    fprintf(out, ", %s\n", checkpoint_find(ck, SECTION_TOKENIZER, -1) ? "tokenizer inside" : "no tokenizer");
    fprintf(out, "%-22s norm eps %g, RoPE theta %g, %s head\n", "arithmetic", (double)c->norm_eps, c->rope_theta,
            checkpoint_find(ck, SECTION_HEAD, -1) ? "separate" : "tied");
    print_provenance(out, ck);
    fprintf(out, "\nmatrix (sparsity of its source matrices in %%)\n");
    for (size_t i = 0; i < ck->n_sections; i++) {
        const FileSection *s = &ck->sections[i];
        const bool norm =
            s->kind == SECTION_FINAL_NORM || s->kind == SECTION_ATTN_NORM || s->kind == SECTION_MLP_NORM;
        if (s->kind >= SECTION_EMBEDDING && s->kind <= SECTION_DOWN && !norm) {
            print_matrix(out, ck, s);
        }
    }
}
