/* fuzz_json.c: JSON of any bytes (model/json.h), with and without JSON_INTEGERS. */
#include "../../model/json.h"
#include "fuzz.h"

static void use(const cJSON *value) {
    uint64_t integer;
    if (json_u64(value, &integer)) {
        CHECK(integer <= UINT64_C(1) << 53 && (double)integer == value->valuedouble);
    }
    for (const cJSON *item = value->child; item; item = item->next) {
        if (item->string) {  // unique, so it finds itself
            CHECK(json_get(value, item->string) == (cJSON_IsNull(item) ? NULL : item));
        }
        use(item);
    }
}

/* What passes is JSON, so it passes again after it was printed. */
static void print_and_parse(const cJSON *value) {
    char *text = cJSON_PrintUnformatted(value);
    CHECK(text);
    cJSON *again = json_parse(text, strlen(text), 0, NULL);
    CHECK(again);
    cJSON_Delete(again);
    cJSON_free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *text = exact_copy(data, size);
    Error err;
    cJSON *any = json_parse(text, size, 0, &err), *integers = json_parse(text, size, JSON_INTEGERS, &err);
    CHECK(any || !integers);
    if (any) {
        use(any);
        print_and_parse(any);
    }
    cJSON_Delete(any);
    cJSON_Delete(integers);
    free(text);
    return 0;
}
