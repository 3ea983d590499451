#include "dynamic.h"

#include "../model/cli.h"
#include "../model/quantiles.h"
#include "interrupt.h"

/* What it is measured on, but for how it is shown. */
static QuantilePlan plan_for(const CalibText *text) {
    return (QuantilePlan){
        .ids = text->ids,
        .n = text->n,
        .length = text->length,
        .prefix = 1,
        .measured_at = {0, 0.3f, 0.5f, 0.7f},
        .n_tables = 4,
        .table_tokens = 16384,  // enough for a table, if taken from all over the text
        .settle_tokens = 2048,
        .dp_tokens = 8192,
        .check = interrupt_check,
    };
}

size_t dynamic_tokens(const CalibText *text) {
    const QuantilePlan plan = plan_for(text);
    return quantiles_tokens(&plan);
}

/* Say how long it will take if that is long. */
static void announce(size_t tokens, double seconds) {
    if (seconds >= LONG_SECONDS) {
        fprintf(stderr, "note       measuring thresholds on %zu tokens will take about %s\n", tokens,
                duration_text(seconds).text);
    }
}

int calibrate_dynamic(FileQuantiles **section, size_t *bytes, const Checkpoint *ck, Backend *be, const CalibText *text,
                      double default_dp, bool quiet, Error *err) {
    Model model;
    Progress progress = {.label = "thresholds", .unit = "tokens", .quiet = quiet};
    QuantilePlan plan = plan_for(text);
    plan.estimate = quiet ? NULL : announce;
    plan.progress = &progress;
    int rc = model_load(&model, ck, be, (int)text->length, false, err);
    if (rc) {
        return rc;
    }
    rc = quantiles_measure(section, bytes, &model, ck, &plan, err);
    if (!rc) {
        (*section)->default_dp = default_dp;
    }
    model_free(&model);
    return rc;
}

int dynamic_add(Writer *w, Backend *be, const CalibText *text, double default_dp, bool quiet, Error *err) {
    Checkpoint ck;
    FileQuantiles *section;
    size_t bytes;
    int rc = writer_view(w, &ck, err);
    if (rc) {
        return rc;
    }
    rc = calibrate_dynamic(&section, &bytes, &ck, be, text, default_dp, quiet, err);
    checkpoint_close(&ck);
    if (!rc) {
        rc = writer_bytes(w, SECTION_QUANTILES, "quantiles", section, bytes, err);
        free(section);
    }
    return rc;
}
