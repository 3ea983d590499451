/* format.h: the bytes of a model file, shared by its reader (checkpoint.c) and its writer
 * (export/writer.c). export/FORMAT.md is the same in words. Little-endian. */
#ifndef SPDP_FORMAT_H
#define SPDP_FORMAT_H

#include <stdint.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "model files are mapped: little-endian hosts only");

#define FILE_MAGIC "SPDPv1\r\n"  // 8 bytes; the line end shows a transfer that changed line ends
#define FILE_VERSION 1
#define FILE_ALIGN 4096  // of every section
#define FILE_MAX_EOS 8
#define FILE_MAX_PARTS 3

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t n_sections;
    uint64_t file_bytes;    // of the whole file
    uint64_t table_offset;  // of the section table; a multiple of 8
    uint64_t hash;          // XXH3-64 of this header with hash = 0, then of the section table (seed = the first)
    int32_t dim, hidden_dim, n_layers, n_heads, n_kv_heads, head_dim, seq_len, vocab_size;
    double rope_theta;
    float norm_eps;
    int32_t bos_id;  // -1: none
    int32_t n_eos;
    int32_t eos_id[FILE_MAX_EOS];
    uint32_t reserved[33];  // zero
} FileHeader;
_Static_assert(sizeof(FileHeader) == 256, "header is 256 bytes");

enum FileSectionKind {
    SECTION_EMBEDDING = 1,   // (vocab_size, dim)
    SECTION_HEAD = 2,        // (vocab_size, dim); absent: the embedding serves (tied)
    SECTION_FINAL_NORM = 3,  // (1, dim)
    SECTION_ATTN_NORM = 4,   // (1, dim), one a layer, as all that follow to DOWN
    SECTION_QKV = 5,         // (q_dim + 2 kv_dim, dim), rows of q, then k, then v; RoPE pairs adjacent
    SECTION_O = 6,           // (dim, q_dim)
    SECTION_MLP_NORM = 7,    // (1, dim)
    SECTION_GATE_UP = 8,     // (2 hidden_dim, dim), row 2i of gate, 2i + 1 of up
    SECTION_DOWN = 9,        // (dim, hidden_dim)
    SECTION_TOKENIZER = 10,  // a sentencepiece model; absent: the model takes token ids only
    SECTION_PROVENANCE = 11, // JSON text: where the weights came from and what was done to them
    SECTION_QUANTILES = 12,  // FileQuantiles and its tables: the spread of |x| at every layer's inputs
};

enum FileValueType { VALUE_BYTES = 0, VALUE_FP16 = 1 };
enum FileSectionFlags {
    SECTION_OPTIONAL = 1,  // a reader that does not know the kind may skip it
    SECTION_PRUNED = 2,    // a matrix among those that the converter was asked to prune
};

/* Rows first, first + step, first + 2 step, ... of a fused matrix are the n_rows rows of one source
 * matrix, in its order. */
typedef struct {
    char name[8];  // "q", "k", "v", "gate", "up"; zero-padded
    uint32_t first, step, n_rows;
} FilePart;

typedef struct {
    uint32_t kind;   // enum FileSectionKind
    int32_t layer;   // -1 outside the layers
    char name[32];   // for people, zero-terminated: "layers.3.down"
    uint32_t flags;
    uint32_t format;      // MatrixFormat (kernels/matrix.h); 0 for bytes
    uint32_t value_type;  // enum FileValueType
    uint32_t tile_m, tile_k;  // 0 unless tiled
    uint32_t max_col_values, max_gtile_values;  // 0 unless tiled
    uint32_t n_parts;
    uint64_t rows, cols;  // for bytes: 1 and their number
    uint64_t nnz;         // nonzeros of a matrix
    uint64_t offset, bytes;  // in the file; 64 zero bytes or more follow before the next section or the end
    uint64_t checksum;       // XXH3-64 of the bytes
    FilePart part[FILE_MAX_PARTS];
    uint32_t reserved[19];  // zero
} FileSection;
_Static_assert(sizeof(FileSection) == 256, "a section entry is 256 bytes");

#define FILE_DP_SITES 4    // inputs of a layer that have a threshold, in order of Site (kernels/matrix.h)
#define FILE_MAX_DP 0.95   // largest dynamic ratio
#define FILE_MAX_TABLES 8
#define FILE_MAX_QUANTILES 65536

/* What a section of quantiles begins with. Behind it stand n_tables x n_layers x n_sites x n_quantiles floats: quantile i
 * of |x| at a site is the value that a share i / (n_quantiles - 1) of the inputs does not exceed. The first is 0, so
 * that a dynamic ratio of 0 has a threshold of 0. */
typedef struct {
    double default_dp;    // dynamic ratio where none is asked for, 0 .. FILE_MAX_DP
    uint32_t n_layers;    // the config's
    uint32_t n_sites;     // FILE_DP_SITES
    uint32_t n_tables;    // 1 .. FILE_MAX_TABLES
    uint32_t n_quantiles; // 2 .. FILE_MAX_QUANTILES
    float measured_at[FILE_MAX_TABLES];  // dynamic ratio of all sites while a table was measured: from 0, ascending
    uint32_t reserved[2];                // zero
} FileQuantiles;
_Static_assert(sizeof(FileQuantiles) == 64, "the tables begin on a cache line");

#endif
