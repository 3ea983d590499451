/* Conversions that are interrupted and resumed, each in a process of its own. */
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "../export/interrupt.h"
#include "../export/pack.h"
#include "../model/input.h"
#include "support.h"

#define SHAPE "32:40:4:4:2:60:64"
enum { N_LAYERS = 4 };

/* What happens to a conversion, and where: before this tensor is read, or in the n_read-th reading of activations from
 * the backend after it. */
typedef struct {
    enum { NOTHING, SIGNAL, FAULT, FULL_DISK } kind;
    int signal;
    Tensor tensor;
    int layer;
    int n_read;
} Event;

typedef struct {
    Method method;
    double sp, dp;
    bool prune_attn, resume;
    Storage storage;
    size_t n_tokens;
    uint64_t seed, text_seed, dp_text_seed;
    Event event;
    bool force;
} Job;

static const Job wanda = {METHOD_WANDA, 0.5, 0, true, false, STORE_AUTO, 1000, 1, 2, 2, {0}, false};
static const Job with_dp = {METHOD_WANDA, 0.5, 0.3, true, false, STORE_AUTO, 1000, 1, 2, 2, {0}, false};

/* What a conversion came to. */
typedef struct {
    int rc, signal;
    char text[sizeof(((Error *)0)->text)];
} Outcome;

/* ---- a conversion ---- */

/* The functions that the events replace; they live in a process that does one conversion. */
static struct {
    Event event;
    const char *out;
    int (*read)(Source *s, Tensor tensor, int layer, fp16 *out, size_t stride, int n_threads, Error *err);
    void (*read_back)(Backend *be, void *host, const void *from, size_t bytes);
    bool reached;
} hooks;

static int happen(Error *err) {
    char partial[500];
    struct stat st;
    struct rlimit limit = {0};
    switch (hooks.event.kind) {
    case SIGNAL: raise(hooks.event.signal); return OK;
    case FAULT: return error_set(err, ERR_NUMBER, "a weight is not finite");
    case FULL_DISK:
        snprintf(partial, sizeof partial, "%s.partial", hooks.out);
        getrlimit(RLIMIT_FSIZE, &limit);
        stat(partial, &st);
        limit.rlim_cur = (rlim_t)st.st_size;
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &limit);
        return OK;
    default: return OK;
    }
}

static int hooked_read(Source *s, Tensor tensor, int layer, fp16 *out, size_t stride, int n_threads, Error *err) {
    const Event *e = &hooks.event;
    if (e->kind != NOTHING && tensor == e->tensor && layer == e->layer && !hooks.reached) {
        hooks.reached = true;
        const int rc = e->n_read == 0 ? happen(err) : OK;
        if (rc) {
            return rc;
        }
    }
    return hooks.read(s, tensor, layer, out, stride, n_threads, err);
}

static void hooked_read_back(Backend *be, void *host, const void *from, size_t bytes) {
    hooks.read_back(be, host, from, bytes);
    if (hooks.reached && hooks.event.n_read > 0 && --hooks.event.n_read == 0) {
        happen(NULL);
    }
}

static int convert(const Job *job, const char *out, Error *err) {
    Source *source;
    Backend *be;
    CalibText text, dp_text;
    Writer *w;
    PackReport report;
    const CalibParams params = {.max_tokens = job->n_tokens, .length = 50, .quiet = true};
    PackOptions options = {
        .method = job->method,
        .sp = {job->sp, job->sp},
        .prune_attn = job->prune_attn,
        .storage = job->storage,
        .dp = job->dp,
        .source_name = "test",
        .n_threads = 1,
        .resume = job->resume,
        .force = job->force,
        .quiet = true,
    };
    assert_int_equal(source_open_synthetic(&source, SHAPE, job->seed, err), OK);
    assert_int_equal(backend_open(&be, "cpu", 0, true, 1, NULL, NULL, err), OK);
    assert_int_equal(calib_text_random(&text, &source->config, &params, job->text_seed, err), OK);
    assert_int_equal(calib_text_random(&dp_text, &source->config, &params, job->dp_text_seed, err), OK);
    hooks.event = job->event;
    hooks.out = out;
    hooks.read = source->read;
    hooks.read_back = be->read;
    source->read = hooked_read;
    be->read = hooked_read_back;
    options.be = be;
    options.sp_text = &text;
    options.dp_text = &dp_text;
    interrupt_catch();
    int rc = (job->resume ? writer_reopen : writer_open)(&w, out, &source->config, false, err);
    rc = rc ? rc : pack_model(&report, source, w, &options, err);
    calib_text_free(&text);
    calib_text_free(&dp_text);
    be->free(be);
    source->free(source);
    return rc;
}

/* The same in another process, so that it may be killed. */
static Outcome run_job(Job job, const char *out) {
    Outcome outcome = {0};
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    const pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        // what ignores them, a shell in the background say, hands that on
        const int signals[] = {SIGINT, SIGTERM, SIGHUP};
        for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
            signal(signals[i], SIG_DFL);
        }
        Error err = {0};
        outcome.rc = convert(&job, out, &err);
        memcpy(outcome.text, err.text, sizeof outcome.text);
        _exit(write(ends[1], &outcome, sizeof outcome) != sizeof outcome);
    }
    close(ends[1]);
    const ssize_t n = read(ends[0], &outcome, sizeof outcome);
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WIFSIGNALED(status)) {
        outcome.signal = WTERMSIG(status);
    } else {
        assert_int_equal(n, sizeof outcome);
        assert_int_equal(WEXITSTATUS(status), 0);
    }
    return outcome;
}

/* ---- files ---- */

static const char *path_of(const char *suffix) {
    static char paths[4][500];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/test_resume.%ld.bin%s", getenv("BUILD") ? getenv("BUILD") : "build",
             (long)getpid(), suffix);
    return path;
}

static bool exists(const char *suffix) { return access(path_of(suffix), F_OK) == 0; }

static Bytes read_all(const char *suffix) {
    Bytes b;
    Error err = {0};
    if (input_read_file(&b, path_of(suffix), &err)) {
        fail_msg("%s", err.text);
    }
    return b;
}

static void write_all(const char *suffix, const Bytes *b) {
    FILE *f = fopen(path_of(suffix), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(b->data, 1, b->n, f), b->n);
    fclose(f);
}

/* What an uninterrupted conversion writes. */
static Bytes reference(Job job) {
    job.event = (Event){0};
    job.resume = false;
    const Outcome o = run_job(job, path_of(".ref"));
    if (o.rc) {
        fail_msg("%s", o.text);
    }
    assert_false(exists(".ref.partial"));
    assert_false(exists(".ref.partial.state"));
    const Bytes b = read_all(".ref");
    unlink(path_of(".ref"));
    return b;
}

static void expect_stopped(Job job, Event event, int n_layers) {
    job.event = event;
    const Outcome o = run_job(job, path_of(""));
    char text[100];
    assert_false(exists(""));
    assert_true(exists(".partial"));
    assert_true(exists(".partial.state"));
    assert_false(exists(".partial.state.new"));
    if (event.signal == SIGKILL) {
        assert_int_equal(o.signal, SIGKILL);
        return;
    }
    assert_int_equal(o.rc, ERR_STOPPED);
    snprintf(text, sizeof text,
             "interrupted after %d of %d layers; the same command with --resume goes on from there", n_layers,
             N_LAYERS);
    assert_string_equal(o.text, text);
}

static void expect_resumed(Job job, const Bytes *want) {
    job.resume = true;
    const Outcome o = run_job(job, path_of(""));
    if (o.rc) {
        fail_msg("%s", o.text);
    }
    const Bytes got = read_all("");
    assert_int_equal(got.n, want->n);
    assert_memory_equal(got.data, want->data, want->n);
    free(got.data);
    unlink(path_of(""));
    assert_false(exists(".partial"));
    assert_false(exists(".partial.state"));
    assert_false(exists(".partial.state.new"));
}

static void expect_error(Job job, int rc, const char *reason) {
    const Outcome o = run_job(job, path_of(""));
    assert_int_equal(o.rc, rc);
    if (!strstr(o.text, reason)) {
        fail_msg("\"%s\" lacks \"%s\"", o.text, reason);
    }
    assert_false(exists(""));
}

static void expect_refused(Job job, int rc, const char *reason) {
    job.resume = true;
    expect_error(job, rc, reason);
}

static void expect_nothing_left(void) {
    assert_false(exists(""));
    assert_false(exists(".partial"));
    assert_false(exists(".partial.state"));
}

/* ---- tests ---- */

static void a_resumed_file_is_the_same_wherever_it_was_interrupted(void **state) {
    (void)state;
    static const Method methods[] = {METHOD_WANDA, METHOD_SPARSEGPT};
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGKILL};
    static const Tensor tensors[] = {TENSOR_ATTN_NORM, TENSOR_DOWN};
    for (size_t m = 0; m < COUNT(methods); m++) {
        Job job = wanda;
        job.method = methods[m];
        const Bytes want = reference(job);
        for (int layer = 1; layer < N_LAYERS; layer++) {
            for (size_t s = 0; s < COUNT(signals); s++) {
                const Tensor tensor = tensors[(s + (size_t)layer) % 2];
                expect_stopped(job, (Event){SIGNAL, signals[s], tensor, layer, 0}, layer);
                expect_resumed(job, &want);
            }
        }
        free(want.data);
    }
}

static void so_it_is_within_a_layer_and_more_than_once(void **state) {
    (void)state;
    const Bytes want = reference(wanda);
    // measuring a layer reads 4 sites of 20 sequences; then the stream moves on, read once for each
    static const int reads[] = {1, 79, 93, 100};
    for (size_t i = 0; i < COUNT(reads); i++) {
        Job job = wanda;
        expect_stopped(job, (Event){SIGNAL, SIGTERM, TENSOR_DOWN, 1, reads[i]}, 1);
        job.resume = true;
        expect_stopped(job, (Event){SIGNAL, SIGKILL, TENSOR_DOWN, 2, reads[i]}, 0);
        expect_stopped(job, (Event){SIGNAL, SIGTERM, TENSOR_UP, 3, 0}, 3);
        expect_stopped(job, (Event){SIGNAL, SIGTERM, TENSOR_FINAL_NORM, -1, 0}, 4);
        expect_resumed(job, &want);
    }
    free(want.data);
}

static void the_thresholds_are_resumed_without_the_layers(void **state) {
    (void)state;
    const Bytes want = reference(with_dp);
    static const int signals[] = {SIGTERM, SIGKILL};
    for (int n_read = 1; n_read < 1200; n_read += 399) {
        expect_stopped(with_dp, (Event){SIGNAL, signals[n_read % 2], TENSOR_HEAD, -1, n_read}, N_LAYERS);
        Job job = with_dp;
        job.event = (Event){FAULT, 0, TENSOR_Q, 0, 0};  // reading a layer would fail
        expect_resumed(job, &want);
    }
    free(want.data);
}

static void what_cannot_be_resumed_leaves_nothing(void **state) {
    (void)state;
    Job job = wanda;
    job.event = (Event){SIGNAL, SIGTERM, TENSOR_DOWN, 0, 0};
    Outcome o = run_job(job, path_of(""));
    assert_int_equal(o.rc, ERR_STOPPED);
    assert_string_equal(o.text, "interrupted; nothing is kept");
    expect_nothing_left();
    job.event = (Event){FAULT, 0, TENSOR_DOWN, 2, 0};
    o = run_job(job, path_of(""));
    assert_int_equal(o.rc, ERR_NUMBER);
    expect_nothing_left();
    job = with_dp;
    job.method = METHOD_MAGNITUDE;
    for (int n_read = 0; n_read < 3; n_read++) {
        job.event = (Event){SIGNAL, SIGTERM, TENSOR_HEAD, -1, n_read};
        o = run_job(job, path_of(""));
        assert_int_equal(o.rc, ERR_STOPPED);
        assert_string_equal(o.text, "interrupted; nothing is kept");
        expect_nothing_left();
    }
    job.event = (Event){SIGNAL, SIGINT, TENSOR_Q, 1, 0};
    o = run_job(job, path_of(""));
    assert_int_equal(o.rc, ERR_STOPPED);
    expect_nothing_left();
}

static void a_full_disk_can_be_resumed_from(void **state) {
    (void)state;
    const Bytes want = reference(wanda);
    Job job = wanda;
    job.event = (Event){FULL_DISK, 0, TENSOR_Q, 2, 0};
    const Outcome o = run_job(job, path_of(""));
    assert_int_equal(o.rc, ERR_WRITE);
    assert_non_null(strstr(o.text, "File too large after 2 of 4 layers; the same command with --resume"));
    expect_resumed(wanda, &want);
    free(want.data);
}

/* But not without being told so. */
static void an_interrupted_conversion_may_be_started_anew(void **state) {
    (void)state;
    const Bytes same = reference(wanda);
    expect_stopped(wanda, (Event){SIGNAL, SIGTERM, TENSOR_Q, 3, 0}, 3);
    expect_error(wanda, ERR_WRITE, ".state: the same conversion has come to 3 of 4 layers: --resume goes on with it");
    expect_error(with_dp, ERR_WRITE, ".state: is what another conversion to this file has begun; --force replaces it");
    expect_resumed(wanda, &same);
    free(same.data);
    Job job = wanda;
    job.seed = 77;
    expect_stopped(job, (Event){SIGNAL, SIGTERM, TENSOR_Q, 3, 0}, 3);
    static const Method methods[] = {METHOD_WANDA, METHOD_MAGNITUDE};
    for (size_t m = 0; m < COUNT(methods); m++) {
        job = wanda;
        job.method = methods[m];
        const Bytes want = reference(job);
        job.force = true;
        assert_int_equal(run_job(job, path_of("")).rc, OK);
        const Bytes got = read_all("");
        assert_int_equal(got.n, want.n);
        assert_memory_equal(got.data, want.data, want.n);
        free(got.data);
        free(want.data);
        unlink(path_of(""));
        expect_nothing_left();
        expect_stopped(wanda, (Event){SIGNAL, SIGKILL, TENSOR_Q, 3, 0}, 3);
    }
    unlink(path_of(".partial"));
    unlink(path_of(".partial.state"));
}

static void another_conversion_is_not_resumed(void **state) {
    (void)state;
    const Bytes want = reference(with_dp);
    expect_stopped(with_dp, (Event){SIGNAL, SIGTERM, TENSOR_Q, 2, 0}, 2);
    const Bytes partial = read_all(".partial"), saved = read_all(".partial.state");
    Job job;
#define WITH(field, value, reason)              \
    job = with_dp;                              \
    job.field = (value);                        \
    expect_refused(job, ERR_USAGE, reason);
    WITH(method, METHOD_SPARSEGPT, "another conversion: --method is not the same")
    WITH(sp, 0.4, "--sp is not")
    WITH(dp, 0.4, "--dp is not")
    WITH(dp, 0, "--dp is not")
    WITH(prune_attn, false, "--prune is not")
    WITH(storage, STORE_TILED_CBC, "--format is not")
    WITH(seed, 9, "SOURCE is not")
    WITH(n_tokens, 1050, "calibration text (--calib")
    WITH(text_seed, 9, "calibration text (--calib")
    WITH(dp_text_seed, 9, "calibration text for --dp")
    WITH(method, METHOD_MAGNITUDE, "only what wanda and sparsegpt")
#undef WITH
    const Bytes partial_after = read_all(".partial"), saved_after = read_all(".partial.state");
    assert_int_equal(partial.n, partial_after.n);
    assert_memory_equal(partial.data, partial_after.data, partial.n);
    assert_int_equal(saved.n, saved_after.n);
    assert_memory_equal(saved.data, saved_after.data, saved.n);
    Bytes other = saved_after;
    other.data[8] ^= 1;  // the first mark, of the version
    write_all(".partial.state", &other);
    expect_refused(with_dp, ERR_USAGE, "the version of this program is not the same");
    write_all(".partial.state", &saved);
    expect_resumed(with_dp, &want);
    free(partial.data);
    free(saved.data);
    free(partial_after.data);
    free(saved_after.data);
    free(want.data);
}

static void damaged_files_are_not_resumed(void **state) {
    (void)state;
    uint64_t random = 5;
    const Bytes want = reference(wanda);
    expect_refused(wanda, ERR_OPEN, ".partial: there is none, so there is nothing to resume");
    expect_stopped(wanda, (Event){SIGNAL, SIGTERM, TENSOR_Q, 2, 0}, 2);
    Bytes partial = read_all(".partial"), saved = read_all(".partial.state");
    for (int i = 0; i < 24; i++) {
        const size_t at = i < 8 ? (size_t)i : 16 + random_below(&random, (uint32_t)(i < 16 ? 700 : saved.n - 16));
        saved.data[at] ^= 0x10;
        write_all(".partial.state", &saved);
        saved.data[at] ^= 0x10;
        expect_refused(wanda, ERR_FORMAT, ".partial.state: is damaged");
    }
    const size_t lengths[] = {0, 1, 100, 500, saved.n - 1};
    for (size_t i = 0; i < COUNT(lengths); i++) {
        write_all(".partial.state", &(Bytes){.data = saved.data, .n = lengths[i]});
        expect_refused(wanda, ERR_FORMAT, ".partial.state: is damaged");
    }
    unlink(path_of(".partial.state"));
    expect_refused(wanda, ERR_OPEN, ".partial.state: there is none, so there is nothing to resume");
    write_all(".partial.state", &saved);
    partial.data[4096 + 7] ^= 1;
    write_all(".partial", &partial);
    expect_refused(wanda, ERR_FORMAT, ".partial: is damaged");
    partial.data[4096 + 7] ^= 1;
    write_all(".partial", &(Bytes){.data = partial.data, .n = 5000});
    expect_refused(wanda, ERR_FORMAT, ".partial: is damaged");
    write_all(".partial", &partial);
    expect_resumed(wanda, &want);
    free(partial.data);
    free(saved.data);
    free(want.data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_resumed_file_is_the_same_wherever_it_was_interrupted),
        cmocka_unit_test(so_it_is_within_a_layer_and_more_than_once),
        cmocka_unit_test(the_thresholds_are_resumed_without_the_layers),
        cmocka_unit_test(what_cannot_be_resumed_leaves_nothing),
        cmocka_unit_test(a_full_disk_can_be_resumed_from),
        cmocka_unit_test(an_interrupted_conversion_may_be_started_anew),
        cmocka_unit_test(another_conversion_is_not_resumed),
        cmocka_unit_test(damaged_files_are_not_resumed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
