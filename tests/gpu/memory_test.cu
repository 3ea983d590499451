/* memory_test.cu: what the programs do when the GPU's memory is nearly all taken. This one takes it, but for so
 * many MiB, and runs ./run and ./convert beside itself, with more and more room from one time to the next, until
 * they have enough. Each time they end with status 0, or with 1 and one line that says that memory is short; a
 * conversion that failed leaves no file, or says that --resume goes on from what it left. Prints the lines that
 * came, how often, and at the end what failed. To be run where ./run is. */
#include <cuda_runtime.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "../../kernels/cuda_ops.cuh"

#define MIB ((size_t)1 << 20)
#define STEP 16             // MiB of room from one time to the next
#define ENOUGH 3            // times in a row that all went well: there is room now
#define MOST_ROOM 8192      // MiB; who does not run in this has another fault
#define CONVERT_EVERY 4     // a conversion takes longer

static const char *const LOG = "build/memory_test.log";
static const char *const MODEL = "build/memory_test.bin";
static int n_passed, n_failed;

/* ---- taking memory --------------------------------------------------------------------------------------- */

/* All of the device's memory but so many MiB, as far as it can be had in pieces. */
struct Taken {
    std::vector<void *> pieces;

    explicit Taken(size_t leave_mib) {
        for (size_t piece = free_bytes(); piece >= 2 * MIB; piece /= 2) {
            void *p;
            while (free_bytes() >= piece + leave_mib * MIB && cudaMalloc(&p, piece) == cudaSuccess) {
                pieces.push_back(p);
            }
            cudaGetLastError();
        }
    }
    ~Taken() {
        for (void *p : pieces) {
            CUDA_CHECK(cudaFree(p));
        }
    }
    Taken(const Taken &) = delete;

    static size_t free_bytes() {
        size_t free, total;
        CUDA_CHECK(cudaMemGetInfo(&free, &total));
        return free;
    }
};

/* ---- the programs ---------------------------------------------------------------------------------------- */

struct Outcome {
    int status;        // as a shell has it
    std::string said;  // on standard error
};

static std::string read_log() {
    std::string text;
    FILE *f = fopen(LOG, "r");
    CHECK(f);
    for (int c; (c = getc(f)) != EOF;) {
        text += (char)c;
    }
    fclose(f);
    return text;
}

static Outcome run(const std::vector<const char *> &command) {
    std::vector<char *> argv;
    for (const char *word : command) {
        argv.push_back(const_cast<char *>(word));
    }
    argv.push_back(NULL);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {  // nothing but exec may follow: the device does not go along
        const int log = open(LOG, O_WRONLY | O_CREAT | O_TRUNC, 0666), null = open("/dev/null", O_RDWR);
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO);
        dup2(log, STDERR_FILENO);
        execv(argv[0], argv.data());
        _exit(127);
    }
    int ended;
    CHECK(waitpid(child, &ended, 0) == child);
    return {WIFSIGNALED(ended) ? 128 + WTERMSIG(ended) : WEXITSTATUS(ended), read_log()};
}

static bool exists(const char *path) { return access(path, F_OK) == 0; }

/* The line with its numbers as N, so that lines of one kind count as one. */
static std::string kind_of(const std::string &line) {
    std::string kind;
    for (const char c : line) {
        const bool digit = c >= '0' && c <= '9';
        if (!digit || kind.empty() || kind.back() != 'N') {
            kind += digit ? 'N' : c;
        }
    }
    return kind;
}

static bool is_clean(const Outcome &o) {
    const bool one_line = std::count(o.said.begin(), o.said.end(), '\n') == 1;
    return o.status == 0 ? o.said.empty()
                         : o.status == 1 && one_line && o.said.find("memory") != std::string::npos;
}

/* With more and more room, until it is enough. cases.md row 35: a failure says so in words. */
static void walk(const char *name, const std::vector<const char *> &command, size_t step, const char *output) {
    std::map<std::string, int> kinds;
    int failures = 0, well = 0, bad = 0;
    size_t room = 0;
    for (; well < ENOUGH && room <= MOST_ROOM; room += step) {
        const Taken taken(room);
        const Outcome o = run(command);
        const std::string partial = std::string(output ? output : "") + ".partial";
        const bool resumable = o.said.find("--resume") != std::string::npos;
        const bool left = output && o.status != 0 && (exists(output) || exists(partial.c_str()) != resumable);
        well = o.status == 0 ? well + 1 : 0;
        failures += o.status != 0;
        if (!is_clean(o) || left) {
            printf("FAIL %s with %zu MiB: status %d%s: %s\n", name, room, o.status,
                   left ? ", the wrong file is left" : "", o.said.c_str());
            bad++;
        } else if (o.status != 0) {
            kinds[kind_of(o.said)]++;
        }
        if (output) {
            unlink(output);
            unlink(partial.c_str());
        }
    }
    for (const auto &kind : kinds) {
        printf("     %3d x %s", kind.second, kind.first.c_str());
    }
    const bool ok = bad == 0 && failures > 0 && well == ENOUGH;
    printf("%-4s %s: %d times too little memory, enough with %zu MiB\n", ok ? "ok" : "FAIL", name, failures, room);
    (ok ? n_passed : n_failed)++;
}

int main() {
    CUDA_CHECK(cudaSetDevice(0));
    CUDA_CHECK(cudaFree(NULL));  // the context comes before what is taken
    // A prompt long enough that its products need work space of their own.
    walk("run",
         {"./run", "--synthetic", "1024:2816:8:16:16:32000:1024", "--sp", "0.5", "--prune", "all", "--dp", "0.5",
          "-b", "cuda", "--prompt-tokens", "512", "-n", "4", "-t", "0", "-q"},
         STEP, NULL);
    walk("convert",
         {"./convert", "demo", MODEL, "--sp", "0.5", "--calib-tokens", "2048", "-b", "cuda", "--force", "-q"},
         STEP * CONVERT_EVERY, MODEL);
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed != 0;
}
