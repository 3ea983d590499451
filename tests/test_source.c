/* source.h: Hugging Face directories, llama2.c files and random weights, from fixtures written here. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <ftw.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../export/source.h"

#define POISON 0x7bcd
#define DATA "../shared/data/"

/* ---- a directory for each test ---- */

typedef struct {
    char dir[64];
    char path[128];  // of the file asked for last
} Fixture;

static int make_dir(void **state) {
    Fixture *f = calloc(1, sizeof *f);
    strcpy(f->dir, "/tmp/test_source_XXXXXX");
    *state = f;
    return mkdtemp(f->dir) ? 0 : -1;
}

static int remove_one(const char *path, const struct stat *info, int flag, struct FTW *ftw) {
    (void)info, (void)flag, (void)ftw;
    return remove(path);
}

static int remove_dir(void **state) {
    Fixture *f = *state;
    nftw(f->dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(f);
    return 0;
}

static const char *path_of(Fixture *f, const char *name) {
    snprintf(f->path, sizeof f->path, "%s/%s", f->dir, name);
    return f->path;
}

static void write_file(Fixture *f, const char *name, const void *bytes, size_t n) {
    FILE *file = fopen(path_of(f, name), "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static void write_text(Fixture *f, const char *name, const char *text) {
    write_file(f, name, text, strlen(text));
}

static void change_size(Fixture *f, const char *name, long change) {
    struct stat info;
    assert_int_equal(stat(path_of(f, name), &info), 0);
    assert_int_equal(truncate(f->path, info.st_size + change), 0);
}

static void write_at(Fixture *f, const char *name, size_t offset, const void *bytes, size_t n) {
    const int fd = open(path_of(f, name), O_WRONLY | O_CREAT, 0600);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, bytes, n, (off_t)offset), n);
    close(fd);
}

/* ---- opening and reading ---- */

static Source *accept(const char *path) {
    Source *s = NULL;
    Error err = {0};
    if (source_open(&s, path, &err)) {
        fail_msg("refused: %s", err.text);
    }
    return s;
}

static void refuse_as(int code, const char *path, const char *reason) {
    Source *s = (Source *)&code;
    Error err = {0};
    const int rc = source_open(&s, path, &err);
    if (rc == OK) {
        fail_msg("accepted, although it should say '%s'", reason);
    }
    if (!strstr(err.text, reason) || strchr(err.text, '\n')) {
        fail_msg("'%s' does not say '%s'", err.text, reason);
    }
    assert_int_equal(rc, err.code);
    assert_ptr_equal(s, &code);
    if (code) {
        assert_int_equal(rc, code);
    }
    assert_true(source_open(&s, path, NULL) < 0);
}

static void refuse(const char *path, const char *reason) {
    refuse_as(0, path, reason);
}

/* A matrix with one spare column a row, which must stay poison. */
typedef struct {
    fp16 *values;
    size_t rows, cols, stride;
} Block;

static Block block_for(const Source *s, Tensor tensor) {
    Block b;
    tensor_shape(&s->config, tensor, &b.rows, &b.cols);
    b.stride = b.cols + 1;
    b.values = malloc(b.rows * b.stride * sizeof(fp16));
    for (size_t i = 0; i < b.rows * b.stride; i++) {
        b.values[i] = POISON;
    }
    return b;
}

static Block read_block(Source *s, Tensor tensor, int layer, int n_threads) {
    Block b = block_for(s, tensor);
    Error err = {0};
    if (s->read(s, tensor, layer, b.values, b.stride, n_threads, &err)) {
        fail_msg("not read: %s", err.text);
    }
    for (size_t r = 0; r < b.rows; r++) {
        assert_int_equal(b.values[r * b.stride + b.cols], POISON);
    }
    return b;
}

static float at(const Block *b, size_t row, size_t col) {
    return fp16_to_float(b->values[row * b->stride + col]);
}

static void refuse_read(Source *s, Tensor tensor, int layer, const char *reason) {
    Block b = block_for(s, tensor);
    Error err = {0};
    for (int n_threads = 1; n_threads <= 3; n_threads += 2) {
        assert_int_equal(s->read(s, tensor, layer, b.values, b.stride, n_threads, &err), ERR_NUMBER);
        if (!strstr(err.text, reason)) {
            fail_msg("'%s' does not say '%s'", err.text, reason);
        }
    }
    assert_int_equal(s->read(s, tensor, layer, b.values, b.stride, 2, NULL), ERR_NUMBER);
    free(b.values);
}

/* ---- a tiny model ---- */

enum { DIM = 32, HIDDEN = 24, LAYERS = 2, HEADS = 8, KV_HEADS = 2, HEAD_DIM = 4, VOCAB = 40, CONTEXT = 16 };

static bool in_layers(Tensor t) {
    return t >= TENSOR_ATTN_NORM;
}

static const size_t shapes[N_TENSORS][2] = {
    [TENSOR_EMBEDDING] = {VOCAB, DIM},
    [TENSOR_HEAD] = {VOCAB, DIM},
    [TENSOR_FINAL_NORM] = {1, DIM},
    [TENSOR_ATTN_NORM] = {1, DIM},
    [TENSOR_Q] = {32, DIM},
    [TENSOR_K] = {8, DIM},
    [TENSOR_V] = {8, DIM},
    [TENSOR_O] = {DIM, 32},
    [TENSOR_MLP_NORM] = {1, DIM},
    [TENSOR_GATE] = {HIDDEN, DIM},
    [TENSOR_UP] = {HIDDEN, DIM},
    [TENSOR_DOWN] = {DIM, HIDDEN},
};

/* Integers that every dtype holds exactly, different for every tensor, layer, row and column. */
static float weight(Tensor tensor, int layer, size_t row, size_t col) {
    const size_t id = (size_t)tensor + (in_layers(tensor) ? (size_t)layer * N_TENSORS : 0);
    return (float)((id * 31 + row * 7 + col * 3) % 251) - 125;
}

/* Does a block hold weight(), where row r was row from[r] of the source (NULL: r)? */
static void check_block(const Block *b, Tensor tensor, int layer, const size_t *from) {
    for (size_t r = 0; r < b->rows; r++) {
        for (size_t c = 0; c < b->cols; c++) {
            assert_true(at(b, r, c) == weight(tensor, layer, from ? from[r] : r, c));
        }
    }
}

/* Adjacent pairs from half-split heads of four: written out, not computed. */
static const size_t q_from[32] = {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
                                  16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31};

static void check_all_tensors(Source *s, bool halves) {
    for (int t = 0; t < N_TENSORS; t++) {
        if (t == TENSOR_HEAD && s->tied) {
            continue;
        }
        for (int layer = 0; layer < (in_layers((Tensor)t) ? LAYERS : 1); layer++) {
            Block b = read_block(s, (Tensor)t, in_layers((Tensor)t) ? layer : -1, 1 + layer * 2);
            check_block(&b, (Tensor)t, layer, halves && (t == TENSOR_Q || t == TENSOR_K) ? q_from : NULL);
            free(b.values);
        }
    }
}

/* ---- writing safetensors ---- */

typedef struct {
    char json[20000];
    unsigned char data[200000];
    size_t n_data;
} Shard;

static Shard *shard_new(void) {
    Shard *s = calloc(1, sizeof *s);
    strcpy(s->json, "{\"__metadata__\":{\"format\":\"pt\"}");
    return s;
}

/* bf16 by cutting: exact for the integers of weight(). */
static void append_value(Shard *s, const char *dtype, float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t half = strcmp(dtype, "BF16") == 0 ? (uint16_t)(bits >> 16) : fp16_from_float(value);
    const size_t n = strcmp(dtype, "F32") == 0 ? 4 : 2;
    memcpy(s->data + s->n_data, n == 4 ? (const void *)&value : (const void *)&half, n);
    s->n_data += n;
}

/* An entry for the bytes from begin to the end of data. */
static void append_entry(Shard *s, const char *name, const char *dtype, const char *shape, size_t begin) {
    char *end = s->json + strlen(s->json);
    sprintf(end, ",\"%s\":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}", name, dtype, shape,
            begin, s->n_data);
}

/* A tensor of no interest. */
static void append_extra(Shard *s, const char *name, const char *dtype) {
    const size_t begin = s->n_data;
    s->data[s->n_data++] = 0;
    s->data[s->n_data++] = 0;
    append_entry(s, name, dtype, "[1]", begin);
}

static void hf_name(char name[100], Tensor tensor, int layer) {
    static const char *const names[N_TENSORS] = {
        "model.embed_tokens.weight", "lm_head.weight",          "model.norm.weight",
        "input_layernorm.weight",    "self_attn.q_proj.weight", "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",   "self_attn.o_proj.weight", "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",      "mlp.up_proj.weight",      "mlp.down_proj.weight",
    };
    if (in_layers(tensor)) {
        sprintf(name, "model.layers.%d.%s", layer, names[tensor]);
    } else {
        strcpy(name, names[tensor]);
    }
}

static void append_tensor(Shard *s, Tensor tensor, int layer, const char *dtype) {
    const size_t begin = s->n_data, rows = shapes[tensor][0], cols = shapes[tensor][1];
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < cols; c++) {
            append_value(s, dtype, weight(tensor, layer, r, c));
        }
    }
    char name[100], shape[40];
    hf_name(name, tensor, layer);
    if (strstr(name, "norm")) {
        sprintf(shape, "[%zu]", cols);
    } else {
        sprintf(shape, "[%zu,%zu]", rows, cols);
    }
    append_entry(s, name, dtype, shape, begin);
}

/* All tensors but the head. */
static Shard *shard_of_model(const char *dtype) {
    Shard *s = shard_new();
    for (int t = 0; t < N_TENSORS; t++) {
        for (int layer = 0; t != TENSOR_HEAD && layer < (in_layers((Tensor)t) ? LAYERS : 1); layer++) {
            append_tensor(s, (Tensor)t, layer, dtype);
        }
    }
    return s;
}

/* Write and release. */
static void write_shard(Fixture *f, const char *name, Shard *s) {
    strcat(s->json, "}");
    const uint64_t length = strlen(s->json);
    const size_t n = 8 + length + s->n_data;
    unsigned char *file = malloc(n);
    memcpy(file, &length, 8);
    memcpy(file + 8, s->json, length);
    memcpy(file + 8 + length, s->data, s->n_data);
    write_file(f, name, file, n);
    free(file);
    free(s);
}

/* config.json of the tiny model with one field set to value: replaced, added,
or taken out where value is NULL. */
static void write_config(Fixture *f, const char *key, const char *value) {
    static const char *const fields[][2] = {
        {"architectures", "[\"LlamaForCausalLM\"]"},
        {"model_type", "\"llama\""},
        {"hidden_act", "\"silu\""},
        {"hidden_size", "32"},
        {"intermediate_size", "24"},
        {"num_hidden_layers", "2"},
        {"num_attention_heads", "8"},
        {"num_key_value_heads", "2"},
        {"max_position_embeddings", "16"},
        {"vocab_size", "40"},
        {"rms_norm_eps", "1e-06"},
        {"rope_theta", "500000.0"},
        {"rope_scaling", "null"},
        {"tie_word_embeddings", "false"},
        {"attention_bias", "false"},
        {"bos_token_id", "1"},
        {"eos_token_id", "2"},
    };
    char text[2000] = "{\"torch_dtype\":\"float16\"";
    bool replaced = false;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const bool changed = key && strcmp(key, fields[i][0]) == 0;
        replaced |= changed;
        if (!changed || value) {
            sprintf(text + strlen(text), ",\"%s\":%s", fields[i][0], changed ? value : fields[i][1]);
        }
    }
    if (key && value && !replaced) {
        sprintf(text + strlen(text), ",\"%s\":%s", key, value);
    }
    strcat(text, "}");
    write_text(f, "config.json", text);
}

static void write_hf(Fixture *f) {
    write_config(f, NULL, NULL);
    write_shard(f, "model.safetensors", shard_of_model("F16"));
}

/* ---- Hugging Face: weights ---- */

static void every_tensor_is_read_from_every_dtype(void **state) {
    Fixture *f = *state;
    static const char *const dtypes[] = {"F16", "BF16", "F32"};
    for (size_t i = 0; i < 3; i++) {
        write_config(f, NULL, NULL);
        Shard *shard = shard_of_model(dtypes[i]);
        append_tensor(shard, TENSOR_HEAD, 0, dtypes[i]);
        const size_t bytes = shard->n_data;
        write_shard(f, "model.safetensors", shard);
        Source *s = accept(f->dir);
        assert_string_equal(s->kind, "Hugging Face");
        assert_false(s->tied);
        assert_int_equal(s->bytes, bytes);
        check_all_tensors(s, true);
        s->free(s);
    }
}

static void data_at_odd_addresses_is_read(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    Shard *shard = shard_new();
    shard->data[shard->n_data++] = 0;
    append_entry(shard, "odd", "U8", "[1]", 0);
    for (int t = 0; t < N_TENSORS; t++) {
        for (int layer = 0; layer < (in_layers((Tensor)t) ? LAYERS : 1); layer++) {
            append_tensor(shard, (Tensor)t, layer, "F32");
        }
    }
    write_shard(f, "model.safetensors", shard);
    Source *s = accept(f->dir);
    check_all_tensors(s, true);
    s->free(s);
}

/* cases.md row 11. */
static void rope_pairs_of_q_and_k_become_adjacent_by_their_own_head_counts(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    Shard *shard = shard_new();
    for (int t = 0; t < N_TENSORS; t++) {
        for (int layer = 0; t != TENSOR_HEAD && layer < (in_layers((Tensor)t) ? LAYERS : 1); layer++) {
            const size_t begin = shard->n_data;
            append_tensor(shard, (Tensor)t, layer, "F32");
            for (size_t i = 0; (t == TENSOR_Q || t == TENSOR_K) && i < shapes[t][0] * DIM; i++) {
                const float row = (float)(i / DIM);
                memcpy(shard->data + begin + 4 * i, &row, 4);
            }
        }
    }
    write_shard(f, "model.safetensors", shard);
    Source *s = accept(f->dir);
    const float k_rows[] = {0, 2, 1, 3, 4, 6, 5, 7}, q_rows[] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11};
    Block k = read_block(s, TENSOR_K, 1, 2), q = read_block(s, TENSOR_Q, 1, 2);
    for (size_t r = 0; r < 12; r++) {
        assert_true(r >= 8 || at(&k, r, 5) == k_rows[r]);
        assert_true(at(&q, r, 5) == q_rows[r]);
    }
    free(k.values);
    free(q.values);
    s->free(s);
}

static void a_head_of_its_own_is_told_from_a_tied_one(void **state) {
    Fixture *f = *state;
    write_hf(f);  // no lm_head.weight
    Source *s = accept(f->dir);
    assert_true(s->tied);
    s->free(s);

    write_config(f, "tie_word_embeddings", "true");
    Shard *shard = shard_of_model("F16");
    append_tensor(shard, TENSOR_HEAD, 0, "F16");
    write_shard(f, "model.safetensors", shard);
    s = accept(f->dir);
    assert_true(s->tied);
    s->free(s);

    write_config(f, "tie_word_embeddings", NULL);
    s = accept(f->dir);
    assert_false(s->tied);
    check_all_tensors(s, true);
    s->free(s);
}

static void put_value(Fixture *f, Tensor tensor, int layer, size_t row, size_t col, float value) {
    write_config(f, NULL, NULL);
    Shard *shard = shard_new();
    for (int t = 0; t < N_TENSORS; t++) {
        for (int l = 0; t != TENSOR_HEAD && l < (in_layers((Tensor)t) ? LAYERS : 1); l++) {
            const size_t begin = shard->n_data;
            append_tensor(shard, (Tensor)t, l, "F32");
            if ((Tensor)t == tensor && l == layer) {
                memcpy(shard->data + begin + 4 * (row * shapes[t][1] + col), &value, 4);
            }
        }
    }
    write_shard(f, "model.safetensors", shard);
}

/* cases.md row 22: NaN and Inf are refused with tensor, row and column. */
static void numbers_that_fp16_cannot_hold_are_named_by_place(void **state) {
    Fixture *f = *state;
    static const struct {
        float value;
        const char *reason;
    } cases[] = {{NAN, "NaN"},
                 {INFINITY, "infinite"},
                 {-INFINITY, "infinite"},
                 {65520, "too large"},
                 {-1e5f, "too large"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        put_value(f, TENSOR_DOWN, 1, 19, 23, cases[i].value);
        Source *s = accept(f->dir);
        refuse_read(s, TENSOR_DOWN, 1, cases[i].reason);
        refuse_read(s, TENSOR_DOWN, 1, "model.layers.1.mlp.down_proj.weight: row 19, column 23");
        Block other = read_block(s, TENSOR_DOWN, 0, 1);
        free(other.values);
        s->free(s);
    }
    put_value(f, TENSOR_K, 0, 2, 0,
              NAN);  // row 1 when pairs are adjacent; the user looks for it in the source
    Source *s = accept(f->dir);
    refuse_read(s, TENSOR_K, 0, "row 2, column 0");
    s->free(s);
    put_value(f, TENSOR_DOWN, 1, 3, 4, -65519);  // rounds to the largest fp16
    s = accept(f->dir);
    Block b = read_block(s, TENSOR_DOWN, 1, 1);
    assert_true(at(&b, 3, 4) == -65504);
    free(b.values);
    s->free(s);
}

static void infinities_of_the_narrow_dtypes_are_refused_too(void **state) {
    Fixture *f = *state;
    static const struct {
        const char *dtype;
        uint16_t bits;
    } cases[] = {{"F16", 0x7c00}, {"F16", 0xfe01}, {"BF16", 0x7f80}, {"BF16", 0x7fc0}, {"BF16", 0x4780}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_config(f, NULL, NULL);
        Shard *shard = shard_of_model(cases[i].dtype);
        memcpy(shard->data + 2 * (3 * DIM + 1), &cases[i].bits, 2);  // the embedding is first
        write_shard(f, "model.safetensors", shard);
        Source *s = accept(f->dir);
        refuse_read(s, TENSOR_EMBEDDING, -1, "model.embed_tokens.weight: row 3, column 1");
        s->free(s);
    }
}

/* ---- Hugging Face: config.json ---- */

/* cases.md row 12. */
static void config_fields_are_taken_over(void **state) {
    Fixture *f = *state;
    write_hf(f);
    Source *s = accept(f->dir);
    const Config *c = &s->config;
    assert_int_equal(c->dim, DIM);
    assert_int_equal(c->hidden_dim, HIDDEN);
    assert_int_equal(c->n_layers, LAYERS);
    assert_int_equal(c->n_heads, HEADS);
    assert_int_equal(c->n_kv_heads, KV_HEADS);
    assert_int_equal(c->head_dim, HEAD_DIM);
    assert_int_equal(c->seq_len, CONTEXT);
    assert_int_equal(c->vocab_size, VOCAB);
    assert_true(c->norm_eps == 1e-6f);
    assert_true(c->rope_theta == 500000);
    assert_int_equal(c->bos_id, 1);
    assert_int_equal(c->n_eos, 1);
    assert_int_equal(c->eos_id[0], 2);
    s->free(s);
}

static Config config_with(Fixture *f, const char *key, const char *value) {
    write_config(f, key, value);
    Source *s = accept(f->dir);
    const Config c = s->config;
    s->free(s);
    return c;
}

/* cases.md rows 12 and 40: rope_theta in its two places, eos_token_id alone or in a list. */
static void newer_and_older_forms_of_fields_are_understood(void **state) {
    Fixture *f = *state;
    write_hf(f);
    assert_true(config_with(f, "rope_theta", NULL).rope_theta == 10000);
    assert_true(config_with(f, "rope_theta", "1000000").rope_theta == 1e6);
    assert_true(
        config_with(f, "rope_parameters", "{\"rope_theta\":1234.5,\"rope_type\":\"default\"}").rope_theta ==
        1234.5);
    assert_true(config_with(f, "rope_scaling", "{\"rope_type\":\"default\"}").rope_theta == 500000);
    assert_true(config_with(f, "rope_scaling", "{\"type\":\"default\"}").rope_theta == 500000);
    assert_int_equal(config_with(f, "head_dim", "4").head_dim, 4);
    assert_int_equal(config_with(f, "head_dim", "null").head_dim, 4);
    assert_int_equal(config_with(f, "bos_token_id", "null").bos_id, -1);
    assert_int_equal(config_with(f, "bos_token_id", NULL).bos_id, -1);
    assert_int_equal(config_with(f, "eos_token_id", NULL).n_eos, 0);
    assert_int_equal(config_with(f, "eos_token_id", "[]").n_eos, 0);
    const Config c = config_with(f, "eos_token_id", "[2, 5, 39]");
    assert_int_equal(c.n_eos, 3);
    assert_int_equal(c.eos_id[0], 2);
    assert_int_equal(c.eos_id[2], 39);
    config_with(f, "model_type", NULL);
    config_with(f, "architectures", NULL);
    config_with(f, "hidden_act", NULL);
    config_with(f, "sliding_window", "null");
    config_with(f, "quantization_config", "null");
    config_with(f, "mlp_bias", "false");
}

static void head_dim_may_differ_from_hidden_over_heads(void **state) {
    Fixture *f = *state;
    write_hf(f);
    write_config(f, "head_dim", "8");
    refuse(f->dir, "q_proj.weight has shape [32, 32], config.json demands [64, 32]");
}

/* cases.md row 11. */
static void missing_kv_heads_mean_all_heads(void **state) {
    Fixture *f = *state;
    write_hf(f);
    write_config(f, "num_key_value_heads", NULL);
    refuse(f->dir, "k_proj.weight has shape [8, 32], config.json demands [32, 32]");
}

/* cases.md rows 12 and 16. */
static void what_the_runtime_lacks_is_refused_by_name(void **state) {
    Fixture *f = *state;
    write_hf(f);
    static const struct {
        const char *key, *value, *reason;
    } cases[] = {
        {"rope_scaling", "{\"type\":\"linear\",\"factor\":4.0}", "rope_scaling type linear"},
        {"rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8.0}", "rope_scaling type llama3"},
        {"rope_scaling", "{\"factor\":4.0}", "rope_scaling"},
        {"rope_scaling", "2.0", "rope_scaling"},
        {"rope_parameters", "{\"rope_theta\":1e4,\"rope_type\":\"yarn\"}", "rope_parameters type yarn"},
        {"partial_rotary_factor", "0.5", "partial_rotary_factor"},
        {"attention_bias", "true", "attention_bias"},
        {"mlp_bias", "true", "mlp_bias"},
        {"hidden_act", "\"gelu\"", "hidden_act gelu"},
        {"quantization_config", "{\"quant_method\":\"gptq\"}", "quantization_config"},
        {"sliding_window", "4096", "sliding_window"},
        {"architectures", "[\"OPTForCausalLM\"]", "architecture OPTForCausalLM"},
        {"architectures", "[]", "architecture"},
        {"model_type", "\"mistral\"", "model_type mistral"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_config(f, cases[i].key, cases[i].value);
        refuse_as(ERR_FORMAT, f->dir, cases[i].reason);
        refuse(f->dir, "not supported");
        refuse(f->dir, f->dir);
    }
}

static void bad_config_fields_are_refused_by_name(void **state) {
    Fixture *f = *state;
    write_hf(f);
    static const struct {
        const char *key, *value, *reason;
    } cases[] = {
        {"hidden_size", NULL, "hidden_size"},
        {"hidden_size", "\"32\"", "hidden_size"},
        {"hidden_size", "32.5", "hidden_size"},
        {"hidden_size", "-32", "hidden_size"},
        {"hidden_size", "4294967328", "hidden_size"},
        {"hidden_size", "33", "dim = 33"},
        {"intermediate_size", NULL, "intermediate_size"},
        {"intermediate_size", "0", "hidden_dim = 0"},
        {"num_hidden_layers", NULL, "num_hidden_layers"},
        {"num_hidden_layers", "0", "n_layers = 0"},
        {"num_attention_heads", "0", "n_heads = 0"},
        {"num_key_value_heads", "3", "n_kv_heads = 3"},
        {"num_key_value_heads", "0", "n_kv_heads = 0"},
        {"head_dim", "3", "head_dim = 3"},
        {"head_dim", "0", "head_dim = 0"},
        {"max_position_embeddings", NULL, "max_position_embeddings"},
        {"vocab_size", NULL, "vocab_size"},
        {"rms_norm_eps", NULL, "rms_norm_eps"},
        {"rms_norm_eps", "\"1e-5\"", "rms_norm_eps"},
        {"rms_norm_eps", "2", "norm_eps"},
        {"rope_theta", "0", "rope_theta"},
        {"rope_theta", "1e999", "rope_theta"},
        {"rope_theta", "[]", "rope_theta"},
        {"tie_word_embeddings", "1", "tie_word_embeddings"},
        {"attention_bias", "\"yes\"", "attention_bias"},
        {"bos_token_id", "40", "bos_id = 40"},
        {"eos_token_id", "40", "end-of-sequence id = 40"},
        {"eos_token_id", "[2,\"x\"]", "eos_token_id"},
        {"eos_token_id", "[1,2,3,4,5,6,7,8,9]", "eos_token_id"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_config(f, cases[i].key, cases[i].value);
        refuse(f->dir, cases[i].reason);
        refuse(f->dir, "config.json");
    }
    write_text(f, "config.json", "{\"hidden_size\":32}");
    refuse(f->dir, "architectures");
    write_text(f, "config.json", "{\"hidden_size\":32,");
    refuse(f->dir, "config.json: bad JSON");
    write_text(f, "config.json", "[]");
    refuse(f->dir, "config.json: not a JSON object");
    write_text(f, "config.json", "");
    refuse(f->dir, "config.json: bad JSON");
    assert_int_equal(remove(path_of(f, "config.json")), 0);
    refuse_as(ERR_OPEN, f->dir, "config.json");
}

/* ---- Hugging Face: files and tensors ---- */

/* Tensor t goes to shard t % 3. */
static void write_sharded(Fixture *f) {
    static const char *const names[] = {"model-00001-of-00003.safetensors",
                                        "model-00002-of-00003.safetensors",
                                        "model-00003-of-00003.safetensors"};
    write_config(f, NULL, NULL);
    Shard *shards[] = {shard_new(), shard_new(), shard_new()};
    char index[8000] =
        "{\"metadata\":{\"total_size\":1},\"weight_map\":{\"x.rotary_emb.inv_freq\":"
        "\"model-00002-of-00003.safetensors\"";
    for (int t = 0; t < N_TENSORS; t++) {
        for (int layer = 0; layer < (in_layers((Tensor)t) ? LAYERS : 1); layer++) {
            char name[100];
            append_tensor(shards[t % 3], (Tensor)t, layer, "BF16");
            hf_name(name, (Tensor)t, layer);
            sprintf(index + strlen(index), ",\"%s\":\"%s\"", name, names[t % 3]);
        }
    }
    strcat(index, "}}");
    write_text(f, "model.safetensors.index.json", index);
    for (int i = 0; i < 3; i++) {
        write_shard(f, names[i], shards[i]);
    }
}

static void shards_make_one_model(void **state) {
    Fixture *f = *state;
    write_sharded(f);
    Source *s = accept(f->dir);
    assert_false(s->tied);
    check_all_tensors(s, true);
    s->free(s);
}

/* cases.md row 15. */
static void missing_and_truncated_shards_are_named(void **state) {
    Fixture *f = *state;
    write_sharded(f);
    change_size(f, "model-00003-of-00003.safetensors", -1);
    refuse_as(ERR_FORMAT, f->dir, "model-00003-of-00003.safetensors: ");
    refuse(f->dir, "truncated");
    assert_int_equal(remove(path_of(f, "model-00002-of-00003.safetensors")), 0);
    refuse_as(ERR_OPEN, f->dir, "model-00002-of-00003.safetensors");
    write_sharded(f);
    change_size(f, "model-00001-of-00003.safetensors", 1);
    refuse(f->dir, "model-00001-of-00003.safetensors: 1 bytes behind");
    write_text(f, "model-00001-of-00003.safetensors", "");
    refuse(f->dir, "model-00001-of-00003.safetensors: 0 bytes");
}

static void shard_names_cannot_leave_the_directory(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    static const char *const names[] = {"\"../model.safetensors\"", "\"/etc/passwd\"", "\"a/b.safetensors\"",
                                        "\"\"", "7"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char index[200];
        sprintf(index, "{\"weight_map\":{\"model.norm.weight\":%s}}", names[i]);
        write_text(f, "model.safetensors.index.json", index);
        refuse(f->dir, "not a plain file name");
    }
    write_text(f, "model.safetensors.index.json", "{\"weight_map\":{\"model.norm.weight\":\"..\"}}");
    refuse_as(ERR_OPEN, f->dir, "..: is a directory");
    write_text(f, "model.safetensors.index.json", "{\"weight_map\":{}}");
    refuse(f->dir, "weight_map");
    write_text(f, "model.safetensors.index.json", "{}");
    refuse(f->dir, "weight_map");
    write_text(f, "model.safetensors.index.json", "{\"weight_map\":{\"a\":\"x\",\"a\":\"y\"}}");
    refuse(f->dir, "model.safetensors.index.json: bad JSON");
}

static void a_tensor_in_two_shards_is_refused(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    write_text(f, "model.safetensors.index.json",
               "{\"weight_map\":{\"a\":\"x.safetensors\",\"b\":\"y.safetensors\"}}");
    write_shard(f, "x.safetensors", shard_of_model("F16"));
    Shard *shard = shard_new();
    append_tensor(shard, TENSOR_V, 1, "F16");
    write_shard(f, "y.safetensors", shard);
    refuse(f->dir, "model.layers.1.self_attn.v_proj.weight is stored twice");
}

/* cases.md row 16. */
static void directories_without_safetensors_say_what_is_needed(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    refuse_as(ERR_OPEN, f->dir, "model.safetensors");
    write_text(f, "pytorch_model.bin", "x");
    refuse_as(ERR_OPEN, f->dir, "need safetensors");
}

/* cases.md row 16: nothing is converted from nothing. */
static void every_missing_tensor_is_named(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    for (int missing = 0; missing < N_TENSORS; missing++) {
        if (missing == TENSOR_HEAD) {
            continue;
        }
        const int missing_layer = in_layers((Tensor)missing) ? LAYERS - 1 : 0;
        Shard *shard = shard_new();
        for (int t = 0; t < N_TENSORS; t++) {
            for (int layer = 0; layer < (in_layers((Tensor)t) ? LAYERS : 1); layer++) {
                if (t != missing || layer != missing_layer) {
                    append_tensor(shard, (Tensor)t, layer, "F16");
                }
            }
        }
        write_shard(f, "model.safetensors", shard);
        char name[100], reason[120];
        hf_name(name, (Tensor)missing, missing_layer);
        sprintf(reason, "tensor %s is missing", name);
        refuse_as(ERR_FORMAT, f->dir, reason);
    }
    write_shard(f, "model.safetensors", shard_new());
    refuse(f->dir, "is missing");
}

static void refuse_extra(Fixture *f, const char *name, const char *reason) {
    Shard *shard = shard_of_model("F16");
    append_extra(shard, name, "F16");
    write_shard(f, "model.safetensors", shard);
    refuse_as(ERR_FORMAT, f->dir, reason);
    refuse(f->dir, name);
}

/* cases.md row 16: GPTQ and AWQ. */
static void tensors_that_would_change_the_result_are_refused(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    refuse_extra(f, "model.layers.0.self_attn.q_proj.bias", "bias");
    refuse_extra(f, "lm_head.bias", "bias");
    refuse_extra(f, "model.layers.0.self_attn.q_proj.qweight", "GPTQ/AWQ");
    refuse_extra(f, "model.layers.0.self_attn.q_proj.qzeros", "GPTQ/AWQ");
    refuse_extra(f, "model.layers.0.self_attn.q_proj.scales", "GPTQ/AWQ");
    refuse_extra(f, "model.layers.0.self_attn.q_norm.weight", "no place");
    refuse_extra(f, "model.layers.2.self_attn.q_proj.weight", "no place");
    refuse_extra(f, "model.layers.-1.self_attn.q_proj.weight", "no place");
    refuse_extra(f, "model.layers.99999999999999999999.self_attn.q_proj.weight", "no place");
    refuse_extra(f, "model.layers..self_attn.q_proj.weight", "no place");

    Shard *shard = shard_new();  // a quantised checkpoint has no tensor of the usual names
    append_extra(shard, "model.layers.0.mlp.down_proj.qweight", "I32");
    write_shard(f, "model.safetensors", shard);
    refuse(f->dir, "GPTQ/AWQ");
}

/* cases.md rows 14 and 16: H11 where it does not matter; rotary_emb.inv_freq. */
static void harmless_extra_tensors_are_ignored(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    Shard *shard = shard_of_model("F16");
    append_extra(shard, "model.layers.0.self_attn.rotary_emb.inv_freq", "F16");
    append_extra(shard, "model.rotary_emb.inv_freq", "F16");
    append_extra(shard, "something.else", "F8_E4M3");  // H11
    write_shard(f, "model.safetensors", shard);
    Source *s = accept(f->dir);
    check_all_tensors(s, true);
    s->free(s);
}

/* cases.md row 14, H11 where it matters, and rows of the embedding beyond the vocabulary */
static void tensors_of_wrong_dtype_or_shape_are_refused(void **state) {
    Fixture *f = *state;
    write_config(f, NULL, NULL);
    static const struct {
        const char *name, *dtype, *shape, *reason;
        size_t bytes;
    } cases[] = {
        {"lm_head.weight", "F8_E4M3", "[40,32]", "lm_head.weight has dtype F8_E4M3", 1280},
        {"lm_head.weight", "F16", "[64,32]", "[64, 32], config.json demands [40, 32]", 4096},
        {"lm_head.weight", "F16", "[32,40]", "[32, 40]", 2560},
        {"lm_head.weight", "F16", "[1280]", "[1280]", 2560},
        {"lm_head.weight", "F16", "[40,32,1]", "[40, 32, 1]", 2560},
        {"lm_head.weight", "F32", "[]", "[]", 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Shard *shard = shard_of_model("F16");
        const size_t begin = shard->n_data;
        shard->n_data += cases[i].bytes;
        append_entry(shard, cases[i].name, cases[i].dtype, cases[i].shape, begin);
        write_shard(f, "model.safetensors", shard);
        refuse(f->dir, cases[i].reason);
    }
    write_shard(f, "model.safetensors", shard_of_model("F16"));
    write_config(f, "vocab_size", "39");
    refuse_as(ERR_SHAPE, f->dir,
              "model.embed_tokens.weight has shape [40, 32], config.json demands [39, 32]");
}

static void a_sentencepiece_model_comes_along_and_is_not_required(void **state) {
    Fixture *f = *state;
    write_hf(f);
    write_text(f, "tokenizer.json", "{}");
    Source *s = accept(f->dir);
    assert_null(s->tokenizer);
    assert_int_equal(s->tokenizer_bytes, 0);
    s->free(s);
    write_text(f, "tokenizer.model", "some bytes");
    s = accept(f->dir);
    assert_int_equal(s->tokenizer_bytes, 10);
    assert_memory_equal(s->tokenizer, "some bytes", 10);
    s->free(s);
}

static void real_checkpoints_open_and_hold_finite_weights(void **state) {
    (void)state;
    static const char *const dirs[] = {DATA "demo-8M", DATA "books-30M"};
    static const int dims[] = {256, 512};
    for (int i = 0; i < 2; i++) {
        if (access(dirs[i], F_OK) != 0) {
            print_message("skipped: no %s\n", dirs[i]);
            skip();
        }
        Source *s = accept(dirs[i]);
        assert_int_equal(s->config.dim, dims[i]);
        assert_int_equal(s->tokenizer_bytes, 63326);
        Block b = read_block(s, TENSOR_Q, 7, 2);
        double sum = 0;
        for (size_t r = 0; r < b.rows; r++) {
            sum += at(&b, r, r) * at(&b, r, r);
        }
        assert_true(sum > 0 && sum < 100);
        free(b.values);
        s->free(s);
    }
}

/* ---- llama2.c ---- */

static void write_header(Fixture *f, const char *name, const int32_t fields[7], size_t file_bytes) {
    write_file(f, name, fields, 28);
    assert_int_equal(truncate(path_of(f, name), (off_t)file_bytes), 0);
}

/* cases.md row 17, G1, G2, G3: files of the published sizes, all holes but the header. */
static void headers_of_published_models_are_understood(void **state) {
    Fixture *f = *state;
    static const unsigned char g1[28] = {
        0x20, 0x01, 0,    0, 0x00, 0x03, 0,    0,    0x06, 0, 0,    0,    0x06, 0,
        0,    0,    0x06, 0, 0,    0,    0x00, 0x7d, 0,    0, 0x00, 0x01, 0,    0,
    };
    int32_t fields[7];
    memcpy(fields, g1, sizeof fields);
    write_header(f, "g1.bin", fields, 60816028);
    Source *s = accept(path_of(f, "g1.bin"));
    const Config *c = &s->config;
    assert_string_equal(s->kind, "llama2.c v0");
    assert_int_equal(c->dim, 288);
    assert_int_equal(c->hidden_dim, 768);
    assert_int_equal(c->n_layers, 6);
    assert_int_equal(c->n_heads, 6);
    assert_int_equal(c->n_kv_heads, 6);
    assert_int_equal(c->head_dim, 48);
    assert_int_equal(c->vocab_size, 32000);
    assert_int_equal(c->seq_len, 256);
    assert_true(c->norm_eps == 1e-5f && c->rope_theta == 10000);
    assert_int_equal(c->bos_id, 1);
    assert_int_equal(c->n_eos, 2);
    assert_int_equal(c->eos_id[0], 2);
    assert_int_equal(c->eos_id[1], 1);
    assert_true(s->tied);
    assert_null(s->tokenizer);
    assert_int_equal(s->bytes, 60816028 - 28 - 256 * 48 * 4);
    s->free(s);

    static const unsigned char g2[28] = {
        0x40, 0, 0, 0, 0xac, 0, 0, 0, 0x05, 0, 0, 0, 0x08, 0, 0, 0, 0x04, 0, 0, 0, 0, 0x02, 0, 0, 0, 0x02, 0, 0,
    };
    int32_t g2_fields[7];
    memcpy(g2_fields, g2, sizeof g2_fields);
    write_header(f, "g2.bin", g2_fields, 1056540);
    s = accept(path_of(f, "g2.bin"));
    assert_int_equal(s->config.dim, 64);
    assert_int_equal(s->config.hidden_dim, 172);
    assert_int_equal(s->config.n_heads, 8);
    assert_int_equal(s->config.n_kv_heads, 4);
    assert_int_equal(s->config.vocab_size, 512);
    s->free(s);
    g2_fields[4] = 8;  // with as many kv heads as heads the file would be longer
    write_header(f, "g2.bin", g2_fields, 1056540);
    refuse_as(ERR_FORMAT, path_of(f, "g2.bin"), "file has 1056540 bytes");

    static const unsigned char g3[4] = {0x00, 0x83, 0xff, 0xff};  // a head of its own behind the frequencies
    memcpy(&fields[5], g3, 4);
    write_header(f, "g3.bin", fields, 60816028 + (size_t)32000 * 288 * 4);
    s = accept(path_of(f, "g3.bin"));
    assert_int_equal(s->config.vocab_size, 32000);
    assert_false(s->tied);
    s->free(s);
    write_header(f, "g3.bin", fields, 60816028);
    refuse_as(ERR_FORMAT, path_of(f, "g3.bin"), "file has 60816028 bytes, its shape needs 97680028");
}

/* cases.md row 17, G2. */
static void stories260K_is_read(void **state) {
    (void)state;
    const char *path = DATA "stories260K/stories260K.bin";
    if (access(path, F_OK) != 0) {
        print_message("skipped: no %s\n", path);
        skip();
    }
    Source *s = accept(path);
    assert_int_equal(s->config.dim, 64);
    assert_int_equal(s->config.hidden_dim, 172);
    assert_int_equal(s->config.n_layers, 5);
    assert_int_equal(s->config.n_heads, 8);
    assert_int_equal(s->config.n_kv_heads, 4);
    assert_int_equal(s->config.vocab_size, 512);
    assert_int_equal(s->config.seq_len, 512);
    assert_true(s->tied);
    Block norm = read_block(s, TENSOR_FINAL_NORM, -1, 1);
    for (size_t c = 0; c < norm.cols; c++) {
        assert_true(at(&norm, 0, c) > 0.1f && at(&norm, 0, c) < 100);  // gains, not weights around 0
    }
    free(norm.values);
    s->free(s);
}

static const int32_t tiny_fields[7] = {DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT};

static void write_floats(FILE *file, Tensor tensor) {
    for (int layer = 0; layer < (in_layers(tensor) ? LAYERS : 1); layer++) {
        for (size_t i = 0; i < shapes[tensor][0] * shapes[tensor][1]; i++) {
            const float value = weight(tensor, layer, i / shapes[tensor][1], i % shapes[tensor][1]);
            fwrite(&value, 4, 1, file);
        }
    }
}

static void write_tensors(FILE *file, const Tensor *order, size_t n) {
    for (size_t i = 0; i < n; i++) {
        write_floats(file, order[i]);
    }
}

/* tok_embeddings, attention_norm, wq, wk, wv, wo, ffn_norm, w1, w2, w3, norm, two tables of frequencies,
[output] */
static void write_v0(Fixture *f, bool tied) {
    static const Tensor order[] = {TENSOR_EMBEDDING, TENSOR_ATTN_NORM, TENSOR_Q,         TENSOR_K,
                                   TENSOR_V,         TENSOR_O,         TENSOR_MLP_NORM,  TENSOR_GATE,
                                   TENSOR_DOWN,      TENSOR_UP,        TENSOR_FINAL_NORM};
    int32_t fields[7];
    memcpy(fields, tiny_fields, sizeof fields);
    fields[5] = tied ? VOCAB : -VOCAB;
    FILE *file = fopen(path_of(f, "v0.bin"), "wb");
    fwrite(fields, sizeof fields, 1, file);
    write_tensors(file, order, sizeof order / sizeof *order);
    for (int i = 0; i < 2 * CONTEXT * HEAD_DIM / 2; i++) {
        const float noise = 1e30f;
        fwrite(&noise, 4, 1, file);
    }
    if (!tied) {
        write_floats(file, TENSOR_HEAD);
    }
    fclose(file);
}

/* Header of 256 bytes, norms, tok_embeddings, wq, wk, wv, wo, w1, w2, w3, [output] */
static void write_v1(Fixture *f, bool tied) {
    static const Tensor order[] = {TENSOR_ATTN_NORM, TENSOR_MLP_NORM, TENSOR_FINAL_NORM, TENSOR_EMBEDDING,
                                   TENSOR_Q,         TENSOR_K,        TENSOR_V,          TENSOR_O,
                                   TENSOR_GATE,      TENSOR_DOWN,     TENSOR_UP};
    unsigned char header[256] = {0x32, 0x34, 0x6b, 0x61, 1};
    memcpy(header + 8, tiny_fields, sizeof tiny_fields);
    header[36] = tied;
    FILE *file = fopen(path_of(f, "v1.bin"), "wb");
    fwrite(header, sizeof header, 1, file);
    write_tensors(file, order, sizeof order / sizeof *order);
    if (!tied) {
        write_floats(file, TENSOR_HEAD);
    }
    fclose(file);
}

/* cases.md row 17: the tables of frequencies are passed over. */
static void every_tensor_of_both_versions_is_where_it_belongs(void **state) {
    Fixture *f = *state;
    for (int tied = 0; tied < 2; tied++) {
        for (int version = 0; version < 2; version++) {
            (version ? write_v1 : write_v0)(f, tied);
            const char *name = version ? "v1.bin" : "v0.bin";
            Source *s = accept(path_of(f, name));
            assert_string_equal(s->kind, version ? "llama2.c v1" : "llama2.c v0");
            assert_int_equal(s->tied, tied);
            assert_int_equal(s->config.n_kv_heads, KV_HEADS);
            check_all_tensors(s, false);  // pairs are adjacent already
            s->free(s);
        }
    }
}

/* cases.md row 17, G5. */
static void files_a_float_short_or_long_are_refused(void **state) {
    Fixture *f = *state;
    for (int version = 0; version < 2; version++) {
        const char *name = version ? "v1.bin" : "v0.bin";
        for (long change = -4; change <= 4; change += version ? 1 : 8) {
            (version ? write_v1 : write_v0)(f, true);
            change_size(f, name, change);
            if (change) {
                refuse_as(ERR_FORMAT, path_of(f, name), "its shape needs");
            }
        }
    }
}

/* cases.md row 17, G5. */
static void bad_header_fields_are_named(void **state) {
    Fixture *f = *state;
    static const struct {
        int field;
        int32_t value;
        const char *reason;
    } cases[] = {
        {0, 0, "dim = 0"},
        {0, -32, "dim = -32"},
        {0, 33, "dim = 33"},
        {0, INT32_MAX, "dim = 2147483647"},
        {1, 0, "hidden_dim = 0"},
        {1, INT32_MAX, "hidden_dim"},
        {2, -1, "n_layers = -1"},
        {2, INT32_MAX, "n_layers"},
        {3, 0, "n_heads = 0"},
        {3, -8, "n_heads = -8"},
        {3, 5, "n_heads = 5"},
        {4, 0, "n_kv_heads = 0"},
        {4, 3, "n_kv_heads = 3"},
        {5, 0, "vocab_size = 0"},
        {5, INT32_MIN, "vocab_size"},
        {5, INT32_MAX, "vocab_size"},
        {6, 0, "seq_len = 0"},
        {6, -1, "seq_len = -1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_v0(f, true);
        write_at(f, "v0.bin", 4 * (size_t)cases[i].field, &cases[i].value, 4);
        refuse(path_of(f, "v0.bin"), cases[i].reason);
        write_v1(f, true);
        write_at(f, "v1.bin", 8 + 4 * (size_t)cases[i].field, &cases[i].value, 4);
        refuse(path_of(f, "v1.bin"), cases[i].reason);
    }
    const int32_t negative_vocab = -VOCAB;  // a flag in v0 only
    write_v1(f, true);
    write_at(f, "v1.bin", 28, &negative_vocab, 4);
    refuse(path_of(f, "v1.bin"), "vocab_size = -40");
}

/* cases.md row 17, G4. */
static void other_versions_and_other_files_are_refused(void **state) {
    Fixture *f = *state;
    const int32_t versions[] = {2, 3, 0, -1};
    for (size_t i = 0; i < 4; i++) {
        write_v1(f, true);
        write_at(f, "v1.bin", 4, &versions[i], 4);
        refuse_as(ERR_FORMAT, path_of(f, "v1.bin"), i == 0 ? "version 2 (int8)" : "version");
    }
    write_v1(f, true);
    write_at(f, "v1.bin", 36, "\x02", 1);
    refuse(path_of(f, "v1.bin"), "shared classifier");
    write_v1(f, true);
    assert_int_equal(truncate(path_of(f, "v1.bin"), 255), 0);
    refuse(path_of(f, "v1.bin"), "too few");
    write_text(f, "text.bin", "This is certainly no checkpoint of any kind.");
    refuse(path_of(f, "text.bin"), "llama2.c checkpoint");
    for (size_t n = 0; n < 28; n += 9) {
        write_file(f, "short.bin", "\x20\0\0\0\x18\0\0\0\2\0\0\0\x08\0\0\0\2\0\0\0\x28\0\0\0\x10\0\0\0", n);
        refuse(path_of(f, "short.bin"), "too few");
    }
}

/* cases.md row 18: offsets beyond 32 bits. */
static void weights_behind_four_gigabytes_are_found(void **state) {
    Fixture *f = *state;
    const int32_t fields[7] = {8960, 2, 1, 35, 1, 150000, 2};
    const size_t kv_dim = 256, embedding = (size_t)150000 * 8960 * 4,
                 attention = (8960 + kv_dim + kv_dim + 8960) * 8960 * 4;
    const size_t final_norm = 28 + embedding + 8960 * 4 + attention + 8960 * 4 + 3 * 2 * 8960 * 4;
    write_file(f, "big.bin", fields, 28);
    if (truncate(path_of(f, "big.bin"), (off_t)(final_norm + 8960 * 4 + 2 * kv_dim * 4)) != 0) {
        print_message("skipped: no room for a sparse file\n");
        skip();
    }
    const float mark = 42;
    write_at(f, "big.bin", final_norm + 4 * 8959, &mark, 4);
    write_at(f, "big.bin", 28 + embedding, &mark, 4);
    Source *s = accept(path_of(f, "big.bin"));
    assert_true(s->bytes > (size_t)5 << 30);
    Block norm = read_block(s, TENSOR_FINAL_NORM, -1, 1);
    assert_true(at(&norm, 0, 8959) == 42 && at(&norm, 0, 8958) == 0);
    free(norm.values);
    norm = read_block(s, TENSOR_ATTN_NORM, 0, 1);
    assert_true(at(&norm, 0, 0) == 42 && at(&norm, 0, 1) == 0);
    free(norm.values);
    s->free(s);
}

/* Of mapped files: what a sanitizer adds for itself is not the tensor's. */
static size_t resident_bytes(void) {
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%*u %*u %zu", &pages) != 1) {
        pages = 0;
    }
    if (file) {
        fclose(file);
    }
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* cases.md row 20. */
static void a_tensor_that_was_read_takes_no_memory(void **state) {
    Fixture *f = *state;
    const int32_t fields[7] = {288, 768, 6, 6, 6, 32000, 256};
    write_header(f, "g1.bin", fields, 60816028);
    Source *s = accept(path_of(f, "g1.bin"));
    Block b = block_for(s, TENSOR_EMBEDDING);  // 37 MB in the file; the 18 MB here are touched already
    const size_t before = resident_bytes();
    assert_int_equal(s->read(s, TENSOR_EMBEDDING, -1, b.values, b.stride, 1, NULL), OK);
    assert_true(resident_bytes() < before + ((size_t)16 << 20));
    free(b.values);
    s->free(s);
}

static void a_path_that_is_not_there_is_named(void **state) {
    Fixture *f = *state;
    refuse_as(ERR_OPEN, path_of(f, "nothing"), "nothing");
    Source *s;
    Error err = {0};
    assert_int_equal(source_open_hf(&s, path_of(f, "nothing"), &err), ERR_OPEN);
    assert_non_null(strstr(err.text, "nothing"));
    assert_int_equal(source_open_llama2c(&s, path_of(f, "nothing"), &err), ERR_OPEN);
    assert_non_null(strstr(err.text, "nothing"));
    assert_int_equal(source_open_llama2c(&s, f->dir, &err), ERR_OPEN);
    write_text(f, "file", "x");
    assert_int_equal(source_open_hf(&s, path_of(f, "file"), &err), ERR_OPEN);
    assert_int_equal(mkfifo(path_of(f, "pipe"), 0600), 0);
    assert_int_equal(source_open_llama2c(&s, path_of(f, "pipe"), &err), ERR_OPEN);  // and does not wait
}

/* ---- random weights ---- */

static Source *synthetic(const char *shape, uint64_t seed) {
    Source *s = NULL;
    Error err = {0};
    if (source_open_synthetic(&s, shape, seed, &err)) {
        fail_msg("refused: %s", err.text);
    }
    return s;
}

/* cases.md row 18: 13B has more than 2^31 elements in its MLP. */
static void known_shapes_have_their_numbers(void **state) {
    (void)state;
    static const struct {
        const char *shape;
        int dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len;
        double parameters;
    } cases[] = {
        {"tinyllama-1.1b", 2048, 5632, 22, 32, 4, 32000, 2048, 1.100e9},
        {"llama2-7b", 4096, 11008, 32, 32, 32, 32000, 4096, 6.738e9},
        {"llama2-13b", 5120, 13824, 40, 40, 40, 32000, 4096, 13.016e9},
        {"llama2-70b", 8192, 28672, 80, 64, 8, 32000, 4096, 68.977e9},
        {"32:24:2:8:2:40:16", 32, 24, 2, 8, 2, 40, 16, 12448},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Source *s = synthetic(cases[i].shape, 1);
        const Config *c = &s->config;
        assert_int_equal(c->dim, cases[i].dim);
        assert_int_equal(c->hidden_dim, cases[i].hidden_dim);
        assert_int_equal(c->n_layers, cases[i].n_layers);
        assert_int_equal(c->n_heads, cases[i].n_heads);
        assert_int_equal(c->n_kv_heads, cases[i].n_kv_heads);
        assert_int_equal(c->head_dim, cases[i].dim / cases[i].n_heads);
        assert_int_equal(c->vocab_size, cases[i].vocab_size);
        assert_int_equal(c->seq_len, cases[i].seq_len);
        assert_true(c->norm_eps == 1e-5f && c->rope_theta == 10000);
        assert_int_equal(c->bos_id, 1);
        assert_int_equal(c->n_eos, 1);
        assert_int_equal(c->eos_id[0], 2);
        assert_false(s->tied);
        assert_true(fabs((double)s->bytes / 2 / cases[i].parameters - 1) < 0.001);  // published counts
        s->free(s);
    }
}

static void bad_shapes_are_refused(void **state) {
    (void)state;
    static const char *const shapes_of_strings[] = {
        "",
        "llama2-7B",
        "llama2-7b ",
        "32",
        "32:24:2:8:2:40",
        "32:24:2:8:2:40:16:1",
        "32:24:2:8:2:40:16 ",
        " 32:24:2:8:2:40:16",
        "32: 24:2:8:2:40:16",
        "+32:24:2:8:2:40:16",
        "-32:24:2:8:2:40:16",
        "32:24:2:8:2:40:",
        "32:24:2:8:2:40:1e3",
        "32:24:2:8:2:40:16x",
        "0x20:24:2:8:2:40:16",
        "4294967328:24:2:8:2:40:16",
        "99999999999999999999:24:2:8:2:40:16",
        "32:24:2:0:2:40:16",
        "33:24:2:8:2:40:16",
        "32:24:2:8:3:40:16",
        "32:24:0:8:2:40:16",
        "32:24:2:8:2:2:16",
        "32:24:2:32:2:40:16",
        "0:24:2:8:2:40:16",
    };
    for (size_t i = 0; i < sizeof shapes_of_strings / sizeof *shapes_of_strings; i++) {
        Source *s = (Source *)&i;
        Error err = {0};
        const int rc = source_open_synthetic(&s, shapes_of_strings[i], 1, &err);
        if (rc == OK) {
            fail_msg("accepted '%s'", shapes_of_strings[i]);
        }
        assert_int_equal(rc, err.code);
        assert_true(strlen(err.text) > 5);
        assert_ptr_equal(s, &i);
    }
}

static void random_weights_are_normal_with_deviation_0_02(void **state) {
    (void)state;
    Source *s = synthetic("1024:1000:1:16:16:100:8", 1);
    Block b = read_block(s, TENSOR_GATE, 0, 2);
    const double n = (double)(b.rows * b.cols);
    double sum = 0, squares = 0, cubes = 0, fourths = 0, beyond[4] = {0}, largest = 0;
    for (size_t r = 0; r < b.rows; r++) {
        for (size_t c = 0; c < b.cols; c++) {
            const double z = at(&b, r, c) / 0.02;
            sum += z;
            squares += z * z;
            cubes += z * z * z;
            fourths += z * z * z * z;
            for (int k = 0; k < 4; k++) {
                beyond[k] += z > k;
            }
            largest = fmax(largest, fabs(z));
        }
    }
    const double five_sigma = 5 / sqrt(n);
    assert_true(fabs(sum / n) < five_sigma);
    assert_true(fabs(squares / n - 1) < five_sigma * sqrt(2));
    assert_true(fabs(cubes / n) < five_sigma * sqrt(15));
    assert_true(fabs(fourths / n - 3) < five_sigma * sqrt(96) + 0.005);  // the table ends at 4.3 deviations
    for (int k = 0; k < 4; k++) {
        const double p = 0.5 * erfc(k / sqrt(2));
        assert_true(fabs(beyond[k] / n - p) < five_sigma * sqrt(p) + 2e-5);
    }
    assert_true(largest > 4 && largest < 4.5);
    free(b.values);
    s->free(s);
}

/* Neighbours in a row, rows, tensors and layers must not resemble one another. */
static void random_weights_are_not_correlated(void **state) {
    (void)state;
    Source *s = synthetic("512:512:2:8:8:512:8", 5),
           *other_seed = synthetic("512:512:2:8:8:512:8", 5 + (1ull << 32));
    Block a = read_block(s, TENSOR_GATE, 0, 1);
    Block others[] = {read_block(s, TENSOR_UP, 0, 1), read_block(s, TENSOR_GATE, 1, 1),
                      read_block(s, TENSOR_Q, 0, 1), read_block(s, TENSOR_HEAD, -1, 1),
                      read_block(other_seed, TENSOR_GATE, 0, 1)};
    const double bound = 5 * 0.02 * 0.02 / sqrt(500.0 * 500.0);
    for (size_t shift = 1; shift <= 9; shift++) {
        double along = 0, down = 0;
        for (size_t r = 0; r < 500; r++) {
            for (size_t c = 0; c < 500; c++) {
                along += at(&a, r, c) * at(&a, r, c + shift);
                down += at(&a, r, c) * at(&a, r + shift, c);
            }
        }
        assert_true(fabs(along / 250000) < bound && fabs(down / 250000) < bound);
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        double product = 0;
        for (size_t r = 0; r < 500; r++) {
            for (size_t c = 0; c < 500; c++) {
                product += at(&a, r, c) * at(&others[i], r, c);
            }
        }
        assert_true(fabs(product / 250000) < bound);
        free(others[i].values);
    }
    free(a.values);
    s->free(s);
    other_seed->free(other_seed);
}

static bool equal(const Block *a, const Block *b) {
    return memcmp(a->values, b->values, a->rows * a->stride * sizeof(fp16)) == 0;
}

static void a_seed_gives_the_same_weights_on_any_threads(void **state) {
    (void)state;
    const char *shape = "36:30:2:6:3:41:16";  // rows that are no multiple of eight
    Source *a = synthetic(shape, 7), *b = synthetic(shape, 7), *c = synthetic(shape, 8);
    for (int t = 0; t < N_TENSORS; t++) {
        const int layer = in_layers((Tensor)t) ? 1 : -1;
        Block x = read_block(a, (Tensor)t, layer, 1), y = read_block(b, (Tensor)t, layer, 5);
        Block z = read_block(c, (Tensor)t, layer, 2);
        assert_true(equal(&x, &y));
        const bool norm = t == TENSOR_FINAL_NORM || t == TENSOR_ATTN_NORM || t == TENSOR_MLP_NORM;
        assert_int_equal(equal(&x, &z), norm);
        for (size_t i = 0; norm && i < x.cols; i++) {
            assert_true(at(&x, 0, i) == 1);
        }
        free(x.values);
        free(y.values);
        free(z.values);
    }
    a->free(a);
    b->free(b);
    c->free(c);
}

/* ---- shapes ---- */

static void shapes_follow_the_config(void **state) {
    (void)state;
    const Config c = {.dim = 32,
                      .hidden_dim = 24,
                      .n_layers = 2,
                      .n_heads = 8,
                      .n_kv_heads = 2,
                      .head_dim = 6,
                      .seq_len = 16,
                      .vocab_size = 40};
    static const size_t demanded[N_TENSORS][2] = {{40, 32}, {40, 32}, {1, 32}, {1, 32},  {48, 32}, {12, 32},
                                                  {12, 32}, {32, 48}, {1, 32}, {24, 32}, {24, 32}, {32, 24}};
    for (int t = 0; t < N_TENSORS; t++) {
        size_t rows = 0, cols = 0;
        tensor_shape(&c, (Tensor)t, &rows, &cols);
        assert_int_equal(rows, demanded[t][0]);
        assert_int_equal(cols, demanded[t][1]);
    }
    const Config wide = {.dim = 8960, .vocab_size = 1 << 20, .n_heads = 1, .n_kv_heads = 1, .head_dim = 2};
    size_t rows, cols;
    tensor_shape(&wide, TENSOR_HEAD, &rows, &cols);
    assert_true(rows * cols == 9395240960u);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_dir, remove_dir)

int main(void) {
    const struct CMUnitTest tests[] = {
        TEST(every_tensor_is_read_from_every_dtype),
        TEST(data_at_odd_addresses_is_read),
        TEST(rope_pairs_of_q_and_k_become_adjacent_by_their_own_head_counts),
        TEST(a_head_of_its_own_is_told_from_a_tied_one),
        TEST(numbers_that_fp16_cannot_hold_are_named_by_place),
        TEST(infinities_of_the_narrow_dtypes_are_refused_too),
        TEST(config_fields_are_taken_over),
        TEST(newer_and_older_forms_of_fields_are_understood),
        TEST(head_dim_may_differ_from_hidden_over_heads),
        TEST(missing_kv_heads_mean_all_heads),
        TEST(what_the_runtime_lacks_is_refused_by_name),
        TEST(bad_config_fields_are_refused_by_name),
        TEST(shards_make_one_model),
        TEST(missing_and_truncated_shards_are_named),
        TEST(shard_names_cannot_leave_the_directory),
        TEST(a_tensor_in_two_shards_is_refused),
        TEST(directories_without_safetensors_say_what_is_needed),
        TEST(every_missing_tensor_is_named),
        TEST(tensors_that_would_change_the_result_are_refused),
        TEST(harmless_extra_tensors_are_ignored),
        TEST(tensors_of_wrong_dtype_or_shape_are_refused),
        TEST(a_sentencepiece_model_comes_along_and_is_not_required),
        cmocka_unit_test(real_checkpoints_open_and_hold_finite_weights),
        TEST(headers_of_published_models_are_understood),
        cmocka_unit_test(stories260K_is_read),
        TEST(every_tensor_of_both_versions_is_where_it_belongs),
        TEST(files_a_float_short_or_long_are_refused),
        TEST(bad_header_fields_are_named),
        TEST(other_versions_and_other_files_are_refused),
        TEST(weights_behind_four_gigabytes_are_found),
        TEST(a_tensor_that_was_read_takes_no_memory),
        TEST(a_path_that_is_not_there_is_named),
        cmocka_unit_test(known_shapes_have_their_numbers),
        cmocka_unit_test(bad_shapes_are_refused),
        cmocka_unit_test(random_weights_are_normal_with_deviation_0_02),
        cmocka_unit_test(random_weights_are_not_correlated),
        cmocka_unit_test(a_seed_gives_the_same_weights_on_any_threads),
        cmocka_unit_test(shapes_follow_the_config),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
