/* fault.c: make a program's calls into the system fail, one at a time. A library for LD_PRELOAD, which does not go
 * with ASan.
 *
 * From main() on it counts three kinds of events, each by itself:
 *   alloc   malloc and its kin, mmap; one that fails: ENOMEM
 *   disk    what changes a file: opening it for writing, write, pwrite, ftruncate, fsync, fdatasync, rename, and
 *           fwrite, fflush and fclose of streams that are written; one that fails: ENOSPC
 *   input   opening a file for reading, fstat, pread, fread, getline; one that fails: EIO
 *
 *   FAULT=KIND:N[+][:WHAT]
 *           At the N-th event of a kind (+: and at all that follow) the call fails. Or WHAT happens and the call
 *           goes on: a number is a signal that the process sends itself; "cut": the file $FAULT_CUT is truncated
 *           to an eighth.
 *   FAULT=short
 *           read, write and their kin transfer a third of what was asked for, and every third call of them is
 *           interrupted (EINTR).
 *   FAULT_WALK=KIND[+][:WHAT]
 *           The program runs over and over: once undisturbed, then with such a fault at each of its events. Events
 *           with the same callers up to main() count as one; the first and the last of them are taken. $FAULT_DIR
 *           is where the program makes its files; it is emptied after each run. $FAULT_TABLE takes a line for each
 *           run:
 *               N  STATUS  STDOUT  FILES  LINES  MESSAGE
 *           STATUS is as a shell has it; STDOUT the same as undisturbed, begun (a part of it) or other; FILES the
 *           same, none, kept (no more than NAME.partial and NAME.partial.state) or other; MESSAGE what it wrote to
 *           standard error, LINES lines with "|" for their ends. */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_SITES 8192
#define MAX_FRAMES 64
#define MAX_SECONDS 20  // of a run, which then hangs
#define MAX_NAME 512

typedef enum { ALLOC, DISK, INPUT, N_KINDS } Kind;
typedef enum { FAIL, SIGNAL, CUT, SHORT } What;

typedef struct {
    bool active, persists;
    Kind kind;
    What what;
    int signal;
    long at;
} Plan;

/* An event's callers. */
typedef struct {
    atomic_uint_fast64_t hash;  // 0: free
    atomic_long first, last;    // events of theirs
} Site;

/* Memory that the runs of a walk share with the walker. */
typedef struct {
    atomic_long count[N_KINDS];
    atomic_bool surveyed;  // note the sites
    Site sites[MAX_SITES];
} Record;

static Plan plan;
static Record *record;  // NULL until main() begins
static _Thread_local bool inside;

/* The library's own function behind one that is defined here. */
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* ---- events ---- */

static void note_site(long n) {
    void *frames[MAX_FRAMES];
    uint64_t hash = 14695981039346656037u;  // FNV-1a
    const int n_frames = backtrace(frames, MAX_FRAMES);
    for (int i = 0; i < n_frames; i++) {
        hash = (hash ^ (uintptr_t)frames[i]) * 1099511628211u;
    }
    for (size_t i = hash % MAX_SITES, tries = 0; tries < MAX_SITES; i = (i + 1) % MAX_SITES, tries++) {
        Site *site = &record->sites[i];
        uint_fast64_t seen = 0;
        if (atomic_compare_exchange_strong(&site->hash, &seen, hash)) {
            site->first = n;
            seen = hash;
        }
        if (seen == hash) {
            site->last = n;
            return;
        }
    }
}

static void cut_file(void) {
    struct stat st;
    const char *path = getenv("FAULT_CUT");
    if (path && stat(path, &st) == 0) {
        NEXT(truncate)(path, st.st_size / 8);
    }
}

/* An event of a kind: has it to fail? */
static bool fails(Kind kind) {
    static const int reasons[N_KINDS] = {ENOMEM, ENOSPC, EIO};
    if (!record || inside) {
        return false;
    }
    inside = true;
    const int before = errno;
    const long n = ++record->count[kind];
    bool fail = false;
    if (record->surveyed && kind == plan.kind) {
        note_site(n);
    }
    if (plan.active && kind == plan.kind && (n == plan.at || (plan.persists && n > plan.at))) {
        fail = plan.what == FAIL;
        if (plan.what == SIGNAL) {
            kill(getpid(), plan.signal);
        } else if (plan.what == CUT) {
            cut_file();
        }
    }
    errno = fail ? reasons[kind] : before;
    inside = false;
    return fail;
}

/* Bytes that a transfer of n may take; 0: it is interrupted. */
static size_t allowed(size_t n) {
    static atomic_uint calls;
    if (!record || plan.what != SHORT || n < 2) {
        return n;
    }
    return calls++ % 3 == 2 ? 0 : (n + 2) / 3;
}

#define INTERRUPTED(n) ((n) > 0 && allowed(n) == 0 ? (errno = EINTR, true) : false)

/* ---- memory ---- */

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t alignment, size_t n);

void *malloc(size_t n) { return fails(ALLOC) ? NULL : __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return fails(ALLOC) ? NULL : __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return fails(ALLOC) ? NULL : __libc_realloc(p, n); }
void *aligned_alloc(size_t alignment, size_t n) { return fails(ALLOC) ? NULL : __libc_memalign(alignment, n); }

int posix_memalign(void **p, size_t alignment, size_t n) {
    void *memory = fails(ALLOC) ? NULL : __libc_memalign(alignment, n);
    if (memory) {
        *p = memory;
    }
    return memory ? 0 : ENOMEM;
}

void *mmap(void *address, size_t n, int protection, int flags, int fd, off_t offset) {
    return fails(ALLOC) ? MAP_FAILED : NEXT(mmap)(address, n, protection, flags, fd, offset);
}

/* ---- files ---- */

static Kind open_kind(int flags) { return (flags & O_ACCMODE) == O_RDONLY ? INPUT : DISK; }

#define MODE(flags, mode)                    \
    va_list args;                            \
    va_start(args, flags);                   \
    const mode_t mode = va_arg(args, mode_t); /* whatever it is, without O_CREAT nobody looks */ \
    va_end(args)

int open(const char *path, int flags, ...) {
    MODE(flags, mode);
    return fails(open_kind(flags)) ? -1 : NEXT(open)(path, flags, mode);
}

int openat(int dir, const char *path, int flags, ...) {
    MODE(flags, mode);
    return fails(open_kind(flags)) ? -1 : NEXT(openat)(dir, path, flags, mode);
}

FILE *fopen(const char *path, const char *mode) {
    return fails(*mode == 'r' ? INPUT : DISK) ? NULL : NEXT(fopen)(path, mode);
}

int fstat(int fd, struct stat *st) { return fails(INPUT) ? -1 : NEXT(fstat)(fd, st); }

ssize_t read(int fd, void *to, size_t n) {
    return INTERRUPTED(n) || fails(INPUT) ? -1 : NEXT(read)(fd, to, allowed(n));
}

ssize_t pread(int fd, void *to, size_t n, off_t offset) {
    return INTERRUPTED(n) || fails(INPUT) ? -1 : NEXT(pread)(fd, to, allowed(n), offset);
}

ssize_t write(int fd, const void *from, size_t n) {
    return INTERRUPTED(n) || fails(DISK) ? -1 : NEXT(write)(fd, from, allowed(n));
}

ssize_t pwrite(int fd, const void *from, size_t n, off_t offset) {
    return INTERRUPTED(n) || fails(DISK) ? -1 : NEXT(pwrite)(fd, from, allowed(n), offset);
}

int ftruncate(int fd, off_t n) { return fails(DISK) ? -1 : NEXT(ftruncate)(fd, n); }

/* Nobody pulls the plug while this is at work, so there is no need to wait for a disk. */
int fsync(int fd) {
    (void)fd;
    return fails(DISK) ? -1 : 0;
}

int fdatasync(int fd) { return fsync(fd); }

int rename(const char *from, const char *to) { return fails(DISK) ? -1 : NEXT(rename)(from, to); }

int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    return fails(DISK) ? -1 : NEXT(renameat2)(from_dir, from, to_dir, to, flags);
}

/* ---- streams ---- */

/* Is it one that is written to a file? Messages are not: there would be nobody to tell that they cannot be. */
static bool is_output(FILE *f) {
    const int flags = f && f != stderr && fileno(f) >= 0 ? fcntl(fileno(f), F_GETFL) : O_RDONLY;
    return flags >= 0 && (flags & O_ACCMODE) != O_RDONLY;
}

size_t fwrite(const void *from, size_t size, size_t n, FILE *f) {
    return is_output(f) && fails(DISK) ? 0 : NEXT(fwrite)(from, size, n, f);
}

int fflush(FILE *f) { return is_output(f) && fails(DISK) ? EOF : NEXT(fflush)(f); }

int fclose(FILE *f) {
    const bool fail = is_output(f) && fails(DISK);
    const int reason = errno, result = NEXT(fclose)(f);
    errno = fail ? reason : errno;
    return fail ? EOF : result;
}

/* Streams remember that reading failed; there is no other way to tell them. */
#define ERROR_SEEN 0x20
#define READING_FAILS(f) (fails(INPUT) ? ((f)->_flags |= ERROR_SEEN, true) : false)

size_t fread(void *to, size_t size, size_t n, FILE *f) {
    return READING_FAILS(f) ? 0 : NEXT(fread)(to, size, n, f);
}

ssize_t getline(char **line, size_t *capacity, FILE *f) {
    return READING_FAILS(f) ? -1 : NEXT(getline)(line, capacity, f);
}

/* ---- the walk ---- */

typedef struct {
    char *bytes;  // NULL: none
    size_t n;
} Content;

typedef struct {
    Content out, err, file;  // file: in the directory
    char name[MAX_NAME];     // of file
    bool partial, more;      // is there NAME.partial or NAME.partial.state, is there another file?
    int status;
} Result;

typedef int Main(int, char **, char **);
static Main *program;

static void give_up(const char *what) {
    fprintf(stderr, "fault: %s: %s\n", what, strerror(errno));
    exit(99);
}

static Content read_all(const char *path) {
    struct stat st;
    Content c = {0};
    const int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &st) != 0 || !(c.bytes = malloc((size_t)st.st_size + 1)) ||
        read(fd, c.bytes, (size_t)st.st_size) != st.st_size) {
        give_up(path);
    }
    close(fd);
    c.n = (size_t)st.st_size;
    c.bytes[c.n] = 0;
    return c;
}

static void write_back(const char *path, const Content *c) {
    const int fd = open(path, O_WRONLY | O_TRUNC);
    if (fd < 0 || write(fd, c->bytes, c->n) != (ssize_t)c->n || close(fd) != 0) {
        give_up(path);
    }
}

static bool ends_with(const char *name, const char *end) {
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + n - m, end) == 0;
}

/* What a run has left in the directory; nothing is left of it. */
static void take_files(Result *r, const char *path) {
    DIR *dir = opendir(path);
    if (!dir) {
        give_up(path);
    }
    for (const struct dirent *e; (e = readdir(dir));) {
        char name[2 * MAX_NAME];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (*e->d_name == '.') {
            continue;
        }
        if (ends_with(e->d_name, ".partial") || ends_with(e->d_name, ".partial.state")) {
            r->partial = true;
        } else if (!r->file.bytes) {
            r->file = read_all(name);
            snprintf(r->name, sizeof r->name, "%s", e->d_name);
        } else {
            r->more = true;
        }
        unlink(name);
    }
    closedir(dir);
}

static int run_child(int argc, char **argv, char **environment, const int fds[2]) {
    dup2(fds[0], STDOUT_FILENO);
    dup2(fds[1], STDERR_FILENO);
    close(fds[0]);
    close(fds[1]);
    lseek(STDIN_FILENO, 0, SEEK_SET);  // the runs before have read it
    alarm(MAX_SECONDS);
    memset(record->count, 0, sizeof record->count);
    inside = false;
    return program(argc, argv, environment);
}

/* Run the program in a child. false in the child, come back from its main(); the walker gets the result. */
static bool run(Result *r, int *status, int argc, char **argv, char **environment) {
    const char *dir = getenv("FAULT_DIR");
    char names[2][MAX_NAME];
    int fds[2];
    for (int i = 0; i < 2; i++) {
        snprintf(names[i], sizeof names[i], "%s.%d", getenv("FAULT_TABLE"), i + 1);
        fds[i] = open(names[i], O_RDWR | O_CREAT | O_TRUNC, 0666);
        if (fds[i] < 0) {
            give_up(names[i]);
        }
    }
    const pid_t child = fork();
    if (child == 0) {
        *status = run_child(argc, argv, environment, fds);
        return false;
    }
    close(fds[0]);
    close(fds[1]);
    int ended;
    if (child < 0 || waitpid(child, &ended, 0) != child) {
        give_up("fork");
    }
    *r = (Result){
        .status = WIFSIGNALED(ended) ? 128 + WTERMSIG(ended) : WEXITSTATUS(ended),
        .out = read_all(names[0]),
        .err = read_all(names[1]),
    };
    if (dir) {
        take_files(r, dir);
    }
    return true;
}

static void free_result(Result *r) {
    free(r->out.bytes);
    free(r->err.bytes);
    free(r->file.bytes);
}

static bool same(const Content *a, const Content *b) {
    return a->n == b->n && (a->n == 0 || memcmp(a->bytes, b->bytes, a->n) == 0);
}

static void report(FILE *table, const Result *r, const Result *whole, long n) {
    const bool begun = r->out.n <= whole->out.n && memcmp(r->out.bytes, whole->out.bytes, r->out.n) == 0;
    const char *out = same(&r->out, &whole->out) ? "same" : begun ? "begun" : "other";
    const bool is_whole = strcmp(r->name, whole->name) == 0 && same(&r->file, &whole->file);
    const char *files = !r->file.bytes                           ? r->partial ? "kept" : "none"
                        : is_whole && !r->partial && !r->more    ? "same"
                                                                 : "other";
    int lines = 0;
    for (char *c = r->err.bytes; *c; c++) {
        if (*c == '\n') {
            *c = '|';
            lines++;
        }
    }
    fprintf(table, "%ld %d %s %s %d %s\n", n, r->status, out, files, lines, r->err.bytes);
}

static int compare_longs(const void *a, const void *b) {
    const long x = *(const long *)a, y = *(const long *)b;
    return (x > y) - (x < y);
}

/* The events at which a fault is worth a run, in order. */
static size_t list_events(long events[2 * MAX_SITES]) {
    size_t n = 0, unique = 0;
    for (size_t i = 0; i < MAX_SITES; i++) {
        if (record->sites[i].hash) {
            events[n++] = record->sites[i].first;
            events[n++] = record->sites[i].last;
        }
    }
    qsort(events, n, sizeof *events, compare_longs);
    for (size_t i = 0; i < n; i++) {
        if (unique == 0 || events[unique - 1] != events[i]) {
            events[unique++] = events[i];
        }
    }
    return unique;
}

/* Returns true in the walker, false in a child that has come back from main(). */
static bool walk(int *status, int argc, char **argv, char **environment) {
    static long events[2 * MAX_SITES];
    const char *cut = plan.what == CUT ? getenv("FAULT_CUT") : NULL;
    const Content whole_file = cut ? read_all(cut) : (Content){0};
    FILE *table = fopen(getenv("FAULT_TABLE"), "we");
    if (!table) {
        give_up("FAULT_TABLE");
    }
    Result whole, r;
    plan.active = false;
    record->surveyed = true;
    if (!run(&whole, status, argc, argv, environment)) {
        return false;
    }
    record->surveyed = false;
    report(table, &whole, &whole, 0);
    plan.active = true;
    const size_t n = list_events(events);
    for (size_t i = 0; i < n; i++) {
        plan.at = events[i];
        fflush(table);  // or each child would have a copy of what is buffered
        if (!run(&r, status, argc, argv, environment)) {
            return false;
        }
        report(table, &r, &whole, events[i]);
        free_result(&r);
        if (cut) {
            write_back(cut, &whole_file);
        }
    }
    fclose(table);
    free_result(&whole);
    free(whole_file.bytes);
    *status = 0;
    return true;
}

/* ---- set-up ---- */

/* KIND[:N][+][:WHAT] */
static void parse_plan(const char *text, bool walks) {
    static const char *const kinds[N_KINDS] = {"alloc", "disk", "input"};
    if (strcmp(text, "short") == 0) {
        plan.what = SHORT;
        return;
    }
    while (plan.kind < N_KINDS && strncmp(text, kinds[plan.kind], strlen(kinds[plan.kind])) != 0) {
        plan.kind++;
    }
    if (plan.kind == N_KINDS) {
        give_up(text);
    }
    char *end = (char *)text + strlen(kinds[plan.kind]);
    plan.at = walks ? 0 : strtol(end + 1, &end, 10);
    plan.persists = *end == '+';
    end += plan.persists;
    if (*end) {
        plan.what = strcmp(end, ":cut") == 0 ? CUT : SIGNAL;
        plan.signal = atoi(end + 1);
    }
    plan.active = true;
}

static int begin(int argc, char **argv, char **environment) {
    const char *one = getenv("FAULT"), *all = getenv("FAULT_WALK");
    int status = 0;
    if (one || all) {
        parse_plan(one ? one : all, all);
    }
    setrlimit(RLIMIT_CORE, &(struct rlimit){0});
    void *frame;
    backtrace(&frame, 1);  // it loads a library at its first call
    record = mmap(NULL, sizeof *record, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (record == MAP_FAILED) {
        give_up("mmap");
    }
    inside = all != NULL;  // the walker itself is not disturbed
    if (all) {
        walk(&status, argc, argv, environment);
        return status;
    }
    return program(argc, argv, environment);
}

typedef void Hook(void);

/* What the linker's start code calls: our begin() takes the place of main(). */
int __libc_start_main(Main *main, int argc, char **argv, Hook *init, Hook *fini, Hook *rtld_fini, void *stack);
int __libc_start_main(Main *main, int argc, char **argv, Hook *init, Hook *fini, Hook *rtld_fini, void *stack) {
    program = main;
    return NEXT(__libc_start_main)(begin, argc, argv, init, fini, rtld_fini, stack);
}
