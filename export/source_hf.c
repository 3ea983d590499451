/* Hugging Face directories. */
#include "source_internal.h"
#include "../model/json.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <unistd.h>


#define CONFIG_FILE "config.json"
#define INDEX_FILE "model.safetensors.index.json"
#define SINGLE_FILE "model.safetensors"
#define TOKENIZER_FILE "tokenizer.model"
#define TOKENIZER_CONFIG_FILE "tokenizer_config.json"
#define LAYERS "model.layers"

static const TensorNames hf_names = {
    LAYERS,
    {
        [TENSOR_EMBEDDING] = "model.embed_tokens.weight",
        [TENSOR_HEAD] = "lm_head.weight",
        [TENSOR_FINAL_NORM] = "model.norm.weight",
        [TENSOR_ATTN_NORM] = "input_layernorm.weight",
        [TENSOR_Q] = "self_attn.q_proj.weight",
        [TENSOR_K] = "self_attn.k_proj.weight",
        [TENSOR_V] = "self_attn.v_proj.weight",
        [TENSOR_O] = "self_attn.o_proj.weight",
        [TENSOR_MLP_NORM] = "post_attention_layernorm.weight",
        [TENSOR_GATE] = "mlp.gate_proj.weight",
        [TENSOR_UP] = "mlp.up_proj.weight",
        [TENSOR_DOWN] = "mlp.down_proj.weight",
    },
};

/* Files of the directory */

static bool file_exists(int dir_fd, const char *name) {
    return faccessat(dir_fd, name, F_OK, 0) == 0;
}

/* Parse a JSON file whose value is an object. */
static int read_json(cJSON **json, int dir_fd, const char *name, Error *err) {
    Mapping file;
    int rc = mapping_open(&file, dir_fd, name, err);
    if (rc) {
        return rc;
    }
    Error reason = {0};
    *json = json_parse((const char *)file.data, file.bytes, 0, &reason);
    mapping_close(&file);
    if (!*json) {
        return error_set(err, reason.code, "%s: %s", name, reason.text);
    }
    if (!cJSON_IsObject(*json)) {
        cJSON_Delete(*json);
        return error_set(err, ERR_FORMAT, "%s: not a JSON object", name);
    }
    return OK;
}

/* config.json: fields. An absent one (or null) leaves its value as it is. */

static int read_int(const cJSON *json, const char *key, int *value, Error *err) {
    const cJSON *item = json_get(json, key);
    uint64_t number;
    if (!item) {
        return OK;
    }
    if (!json_u64(item, &number) || number > INT_MAX) {
        return error_set(err, ERR_FORMAT, "%s is not an integer from 0 to %d", key, INT_MAX);
    }
    *value = (int)number;
    return OK;
}

static int read_number(const cJSON *json, const char *key, double *value, Error *err) {
    const cJSON *item = json_get(json, key);
    if (!item) {
        return OK;
    }
    if (!cJSON_IsNumber(item)) {
        return error_set(err, ERR_FORMAT, "%s is not a number", key);
    }
    *value = item->valuedouble;
    return OK;
}

static int read_bool(const cJSON *json, const char *key, bool *value, Error *err) {
    const cJSON *item = json_get(json, key);
    if (!item) {
        return OK;
    }
    if (!cJSON_IsBool(item)) {
        return error_set(err, ERR_FORMAT, "%s is neither true nor false", key);
    }
    *value = cJSON_IsTrue(item);
    return OK;
}

/* config.json: what this runtime does not implement */

/* A string that must have this value; where is what a message calls it. */
static int check_word(const cJSON *item, const char *where, const char *only, Error *err) {
    const char *word = cJSON_GetStringValue(item);
    if (!word || strcmp(word, only) != 0) {
        return error_set(err, ERR_FORMAT, "%s %.80s is not supported (only %s)", where,
                         word ? word : "(none)", only);
    }
    return OK;
}

static int check_architecture(const cJSON *json, Error *err) {
    const cJSON *architectures = json_get(json, "architectures");
    const cJSON *model_type = json_get(json, "model_type");
    if (!architectures && !model_type) {
        return error_set(err, ERR_FORMAT, "neither architectures nor model_type says what the model is");
    }
    int rc = OK;
    if (architectures) {
        rc = check_word(cJSON_GetArrayItem(architectures, 0), "architecture", "LlamaForCausalLM", err);
    }
    if (!rc && model_type) {
        rc = check_word(model_type, "model_type", "llama", err);
    }
    return rc;
}

/* rope_scaling, or rope_parameters as newer files have it: anything but the plain rotation is refused. */
static int check_rope(const cJSON *json, const char *key, Error *err) {
    const cJSON *rope = json_get(json, key);
    if (!rope) {
        return OK;
    }
    const cJSON *type = json_get(rope, "rope_type");
    char where[64];
    snprintf(where, sizeof where, "%s type", key);
    return check_word(type ? type : json_get(rope, "type"), where, "default", err);
}

static int check_partial_rotation(const cJSON *json, Error *err) {
    double factor = 1;
    const int rc = read_number(json, "partial_rotary_factor", &factor, err);
    if (!rc && factor != 1) {
        return error_set(err, ERR_FORMAT, "partial_rotary_factor %g is not supported", factor);
    }
    return rc;
}

static int check_supported(const cJSON *json, Error *err) {
    static const char *const must_be_absent[] = {"quantization_config", "compression_config",
                                                 "sliding_window"};
    static const char *const must_be_false[] = {"attention_bias", "mlp_bias"};
    int rc = check_architecture(json, err);
    for (size_t i = 0; i < sizeof must_be_absent / sizeof *must_be_absent && !rc; i++) {
        if (json_get(json, must_be_absent[i])) {
            rc = error_set(err, ERR_FORMAT, "%s is not supported", must_be_absent[i]);
        }
    }
    for (size_t i = 0; i < sizeof must_be_false / sizeof *must_be_false && !rc; i++) {
        bool value = false;
        rc = read_bool(json, must_be_false[i], &value, err);
        if (!rc && value) {
            rc = error_set(err, ERR_FORMAT, "%s is not supported", must_be_false[i]);
        }
    }
    if (!rc && json_get(json, "hidden_act")) {
        rc = check_word(json_get(json, "hidden_act"), "hidden_act", "silu", err);
    }
    rc = rc ? rc : check_rope(json, "rope_scaling", err);
    rc = rc ? rc : check_rope(json, "rope_parameters", err);
    rc = rc ? rc : check_partial_rotation(json, err);
    return rc ? rc : check_partial_rotation(json_get(json, "rope_parameters"), err);
}

/* config.json: what Config holds */

static int read_dims(Config *c, const cJSON *json, Error *err) {
    const struct {
        const char *key;
        int *value;
        bool required;
    } fields[] = {
        {"hidden_size", &c->dim, true},
        {"intermediate_size", &c->hidden_dim, true},
        {"num_hidden_layers", &c->n_layers, true},
        {"num_attention_heads", &c->n_heads, true},
        {"num_key_value_heads", &c->n_kv_heads, false},
        {"head_dim", &c->head_dim, false},
        {"max_position_embeddings", &c->seq_len, true},
        {"vocab_size", &c->vocab_size, true},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].required && !json_get(json, fields[i].key)) {
            return error_set(err, ERR_FORMAT, "%s is missing", fields[i].key);
        }
        const int rc = read_int(json, fields[i].key, fields[i].value, err);
        if (rc) {
            return rc;
        }
    }
    if (!json_get(json, "num_key_value_heads")) {
        c->n_kv_heads = c->n_heads;
    }
    return json_get(json, "head_dim") ? OK : derive_head_dim(c, err);
}

static int read_arithmetic(Config *c, const cJSON *json, Error *err) {
    double eps = 0;
    if (!json_get(json, "rms_norm_eps")) {
        return error_set(err, ERR_FORMAT, "rms_norm_eps is missing");
    }
    int rc = read_number(json, "rms_norm_eps", &eps, err);
    c->norm_eps = (float)eps;
    c->rope_theta = 10000;  // files older than the field mean this
    rc = rc ? rc : read_number(json, "rope_theta", &c->rope_theta, err);
    return rc ? rc : read_number(json_get(json, "rope_parameters"), "rope_theta", &c->rope_theta, err);
}

static int add_eos(Config *c, const cJSON *item, Error *err) {
    uint64_t id;
    if (!json_u64(item, &id) || id > INT_MAX) {
        return error_set(err, ERR_FORMAT, "eos_token_id is neither a token id nor a list of them");
    }
    if (c->n_eos == MAX_EOS) {
        return error_set(err, ERR_FORMAT, "eos_token_id lists more than %d ids", MAX_EOS);
    }
    c->eos_id[c->n_eos++] = (int)id;
    return OK;
}

static int read_token_ids(Config *c, const cJSON *json, Error *err) {
    c->bos_id = -1;
    int rc = read_int(json, "bos_token_id", &c->bos_id, err);
    const cJSON *eos = json_get(json, "eos_token_id");
    if (rc || !eos) {
        return rc;
    }
    if (!cJSON_IsArray(eos)) {
        return add_eos(c, eos, err);
    }
    for (const cJSON *item = eos->child; item && !rc; item = item->next) {
        rc = add_eos(c, item, err);
    }
    return rc;
}

static int read_config(Config *c, bool *tied, int dir_fd, Error *err) {
    cJSON *json;
    int rc = read_json(&json, dir_fd, CONFIG_FILE, err);
    if (rc) {
        return rc;
    }
    *c = (Config){0};
    *tied = false;
    rc = check_supported(json, err);
    rc = rc ? rc : read_dims(c, json, err);
    rc = rc ? rc : read_arithmetic(c, json, err);
    rc = rc ? rc : read_token_ids(c, json, err);
    rc = rc ? rc : read_bool(json, "tie_word_embeddings", tied, err);
    rc = rc ? rc : config_check(c, err);
    cJSON_Delete(json);
    if (rc) {
        error_prefix(err, CONFIG_FILE);
    }
    return rc;
}

/* Shards */

typedef struct {
    const char **names;  // of files, each once; they live in index
    size_t n;
    cJSON *index;  // NULL: a single file
} Shards;

static void shards_free(Shards *shards) {
    free(shards->names);
    cJSON_Delete(shards->index);
}

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct file names of a weight map, sorted. */
static int collect_names(Shards *shards, const cJSON *weight_map, Error *err) {
    for (const cJSON *item = weight_map->child; item; item = item->next) {
        const char *name = cJSON_GetStringValue(item);
        if (!name || !*name || strchr(name, '/')) {
            return error_set(err, ERR_FORMAT, INDEX_FILE ": file of %.100s is not a plain file name",
                             item->string);
        }
        shards->names[shards->n++] = name;
    }
    qsort(shards->names, shards->n, sizeof *shards->names, compare_names);
    size_t n = 0;
    for (size_t i = 0; i < shards->n; i++) {
        if (i == 0 || strcmp(shards->names[i], shards->names[n - 1]) != 0) {
            shards->names[n++] = shards->names[i];
        }
    }
    shards->n = n;
    return OK;
}

static int read_index(Shards *shards, int dir_fd, Error *err) {
    const int rc = read_json(&shards->index, dir_fd, INDEX_FILE, err);
    if (rc) {
        return rc;
    }
    const cJSON *weight_map = json_get(shards->index, "weight_map");
    const int n = cJSON_IsObject(weight_map) ? cJSON_GetArraySize(weight_map) : 0;
    if (n == 0) {
        return error_set(err, ERR_FORMAT, INDEX_FILE ": no weight_map");
    }
    shards->names = memory_alloc((size_t)n * sizeof *shards->names);
    if (!shards->names) {
        return error_set(err, ERR_MEMORY, "out of memory");
    }
    return collect_names(shards, weight_map, err);
}

static int find_shards(Shards *shards, int dir_fd, Error *err) {
    if (file_exists(dir_fd, SINGLE_FILE)) {
        shards->names = memory_alloc(sizeof *shards->names);
        if (!shards->names) {
            return error_set(err, ERR_MEMORY, "out of memory");
        }
        shards->names[shards->n++] = SINGLE_FILE;
        return OK;
    }
    if (file_exists(dir_fd, INDEX_FILE)) {
        return read_index(shards, dir_fd, err);
    }
    if (file_exists(dir_fd, "pytorch_model.bin") || file_exists(dir_fd, "pytorch_model.bin.index.json")) {
        return error_set(err, ERR_OPEN, "only pytorch_model.bin here: need safetensors");
    }
    return error_set(err, ERR_OPEN, "neither " SINGLE_FILE " nor " INDEX_FILE " here");
}

/* Tensors */

static bool has_suffix(const char *s, const char *suffix) {
    const size_t length = strlen(s), n = strlen(suffix);
    return length >= n && strcmp(s + length - n, suffix) == 0;
}

static bool is_in_layers(const char *name) {
    return strncmp(name, LAYERS ".", strlen(LAYERS ".")) == 0;
}

/* Which tensor of the model a name means; false if none. */
static bool find_tensor(const char *name, int n_layers, Tensor *tensor, int *layer) {
    const bool in_layers = is_in_layers(name);
    *layer = -1;
    if (in_layers) {
        char *rest;
        const char *digits = name + strlen(LAYERS ".");
        const long number = strtol(digits, &rest, 10);
        if (*digits < '0' || *digits > '9' || *rest != '.' || number >= n_layers) {
            return false;
        }
        *layer = (int)number;
        name = rest + 1;
    }
    for (int t = 0; t < N_TENSORS; t++) {
        if (tensor_is_in_layers((Tensor)t) == in_layers && strcmp(name, hf_names.names[t]) == 0) {
            *tensor = (Tensor)t;
            return true;
        }
    }
    return false;
}

/* A tensor that is none of a Llama model's: harmless only where the forward pass would not use it. */
static int check_stray(const char *name, Error *err) {
    static const char *const quantised[] = {".qweight", ".qzeros", ".scales", ".g_idx"};
    if (has_suffix(name, ".rotary_emb.inv_freq")) {
        return OK;
    }
    for (size_t i = 0; i < sizeof quantised / sizeof *quantised; i++) {
        if (has_suffix(name, quantised[i])) {
            return error_set(err, ERR_FORMAT, "GPTQ/AWQ weights are not supported (tensor %.100s)", name);
        }
    }
    if (has_suffix(name, ".bias")) {
        return error_set(err, ERR_FORMAT, "biases are not supported (tensor %.100s)", name);
    }
    if (is_in_layers(name)) {
        return error_set(err, ERR_FORMAT, "tensor %.100s has no place in the model of " CONFIG_FILE, name);
    }
    return OK;
}

static void format_shape(char *text, size_t size, const size_t *shape, int rank) {
    text[0] = 0;
    for (int i = 0; i < rank; i++) {
        const size_t used = strlen(text);
        snprintf(text + used, size - used, "%s%zu", i ? ", " : "[", shape[i]);
    }
    const size_t used = strlen(text);
    snprintf(text + used, size - used, rank > 0 ? "]" : "[]");
}

static int check_entry(const SafetensorsEntry *e, const Config *c, Tensor tensor, Error *err) {
    size_t demanded[2];
    tensor_shape(c, tensor, &demanded[0], &demanded[1]);
    const int skip = tensor_is_norm(tensor);  // a vector there, one row here
    if (e->rank != 2 - skip || memcmp(e->shape, demanded + skip, (size_t)e->rank * sizeof *demanded) != 0) {
        char is[64], should[64];
        format_shape(is, sizeof is, e->shape, e->rank);
        format_shape(should, sizeof should, demanded + skip, 2 - skip);
        return error_set(err, ERR_SHAPE, "tensor %.100s has shape %s, " CONFIG_FILE " demands %s", e->name,
                         is, should);
    }
    if (e->dtype == DTYPE_OTHER) {
        return error_set(err, ERR_FORMAT, "tensor %.100s has dtype %s, not F16, BF16 or F32", e->name,
                         e->dtype_name);
    }
    return OK;
}

/* data_offset: where the data of the tensor's file begins. */
static int place_entry(Source *s, const SafetensorsEntry *e, size_t file, size_t data_offset, Error *err) {
    Tensor tensor;
    int layer;
    if (!find_tensor(e->name, s->config.n_layers, &tensor, &layer)) {
        return check_stray(e->name, err);
    }
    if (tensor == TENSOR_HEAD && s->tied) {
        return OK;
    }
    const int rc = check_entry(e, &s->config, tensor, err);
    const StoredMatrix place = {
        .name = e->name,
        .file = file,
        .offset = data_offset + e->begin,
        .bytes = e->end - e->begin,
        .dtype = e->dtype,
    };
    return rc ? rc : stored_put(s, tensor, layer, &place, err);
}

static int place_shard(Source *s, size_t file, Error *err) {
    const Mapping *map = &((Stored *)s->ctx)->files[file];
    Safetensors st;
    int rc = safetensors_parse(&st, map->data, map->bytes, err);
    if (rc) {
        return rc;
    }
    for (size_t i = 0; i < st.n_entries && !rc; i++) {
        rc = place_entry(s, &st.entries[i], file, (size_t)(st.data - map->data), err);
    }
    safetensors_free(&st);
    return rc;
}

/* All shards are mapped before any is read: a missing one is named at once. */
static int place_shards(Source *s, const Shards *shards, int dir_fd, Error *err) {
    Mapping *files = ((Stored *)s->ctx)->files;
    int rc = OK;
    for (size_t i = 0; i < shards->n && !rc; i++) {
        rc = mapping_open(&files[i], dir_fd, shards->names[i], err);
    }
    for (size_t i = 0; i < shards->n && !rc; i++) {
        rc = place_shard(s, i, err);
        if (rc) {
            error_prefix(err, shards->names[i]);
        }
    }
    return rc;
}

static int check_complete(Source *s, Error *err) {
    const Stored *stored = s->ctx;
    s->tied = !stored_matrix(stored, TENSOR_HEAD, -1)->name;
    for (int t = 0; t < N_TENSORS; t++) {
        for (int layer = 0; layer < tensor_count(&s->config, (Tensor)t); layer++) {
            if (!stored_matrix(stored, (Tensor)t, layer)->name && t != TENSOR_HEAD) {
                char name[100];
                tensor_name(name, sizeof name, &hf_names, (Tensor)t, layer);
                return error_set(err, ERR_FORMAT, "tensor %s is missing", name);
            }
        }
    }
    return OK;
}

/* The last of the source's files is the tokenizer, where there is one. */
static int open_tokenizer(Source *s, int dir_fd, Error *err) {
    const Stored *stored = s->ctx;
    Mapping *file = &stored->files[stored->n_files - 1];
    if (!file_exists(dir_fd, TOKENIZER_FILE)) {
        return OK;
    }
    const int rc = mapping_open(file, dir_fd, TOKENIZER_FILE, err);
    s->tokenizer = (void *)file->data;
    s->tokenizer_bytes = file->bytes;
    return rc;
}

/* The template itself, or of several with names the default. NULL: none. */
static const char *find_chat_template(const cJSON *json) {
    const cJSON *template = json_get(json, "chat_template"), *item;
    if (!cJSON_IsArray(template)) {
        return cJSON_GetStringValue(template);
    }
    cJSON_ArrayForEach(item, template) {
        const char *name = cJSON_GetStringValue(json_get(item, "name"));
        if (name && strcmp(name, "default") == 0) {
            return cJSON_GetStringValue(json_get(item, "template"));
        }
    }
    return NULL;
}

/* A template is a program; known ones are told by the words in them. */
static int read_chat_template(Source *s, int dir_fd, Error *err) {
    if (!file_exists(dir_fd, TOKENIZER_CONFIG_FILE)) {
        return OK;
    }
    cJSON *json;
    const int rc = read_json(&json, dir_fd, TOKENIZER_CONFIG_FILE, err);
    if (rc) {
        return rc;
    }
    const char *text = find_chat_template(json);
    if (text && strstr(text, "[INST]") && strstr(text, "<<SYS>>")) {
        s->chat_template = "llama2";
    } else if (text && strstr(text, "<|user|>") && strstr(text, "<|assistant|>") && strstr(text, "eos_token")) {
        s->chat_template = "zephyr";
    }
    cJSON_Delete(json);
    return OK;
}

static int open_shards(Source **s, const Config *config, bool tied, const Shards *shards, int dir_fd,
                       Error *err) {
    Source *source = stored_new("Hugging Face", config, shards->n + 1, true);
    if (!source) {
        return error_set(err, ERR_MEMORY, "out of memory");
    }
    source->tied = tied;
    int rc = place_shards(source, shards, dir_fd, err);
    rc = rc ? rc : check_complete(source, err);
    rc = rc ? rc : open_tokenizer(source, dir_fd, err);
    rc = rc ? rc : read_chat_template(source, dir_fd, err);
    if (rc) {
        source->free(source);
        return rc;
    }
    *s = source;
    return OK;
}

static int open_directory(Source **s, int dir_fd, Error *err) {
    Config config;
    bool tied;
    int rc = read_config(&config, &tied, dir_fd, err);
    if (rc) {
        return rc;
    }
    Shards shards = {0};
    rc = find_shards(&shards, dir_fd, err);
    rc = rc ? rc : open_shards(s, &config, tied, &shards, dir_fd, err);
    shards_free(&shards);
    return rc;
}

int source_open_hf(Source **s, const char *dir, Error *err) {
    const int dir_fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (dir_fd < 0) {
        return error_set(err, ERR_OPEN, "cannot open directory %.200s: %s", dir, strerror(errno));
    }
    const int rc = open_directory(s, dir_fd, err);
    close(dir_fd);
    if (rc) {
        error_prefix(err, dir);
    }
    return rc;
}
