#include "mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "unfinished.h"

/* A file that is mapped, as long as it is. */
typedef struct Mapped Mapped;
struct Mapped {
    _Atomic(Mapped *) next;
    const unsigned char *data;
    size_t bytes;
    int fd;            // -1: the caller's
    struct stat file;  // as it was opened
    char name[256];
    char lost[402];    // what there is to say when one of its pages is
};

/* A signal handler can be given nothing. */
static _Atomic(Mapped *) all;
static struct sigaction before;

static Mapped *find(const void *address) {
    Mapped *m = all;
    while (m && (uintptr_t)address - (uintptr_t)m->data >= m->bytes) {
        m = m->next;
    }
    return m;
}

static void bus_error(int number, siginfo_t *info, void *context) {
    static atomic_flag ending = ATOMIC_FLAG_INIT;
    const bool is_fault = info->si_code > 0;  // and no signal that somebody has sent
    const Mapped *m = is_fault ? find(info->si_addr) : NULL;
    (void)context;
    if (!m) {
        sigaction(number, &before, NULL);
        if (!is_fault) {
            raise(number);
        }
        return;  // to the instruction, which faults again
    }
    while (atomic_flag_test_and_set(&ending)) {
        pause();  // another thread is saying it
    }
    const ssize_t said = write(STDERR_FILENO, m->lost, strlen(m->lost));
    (void)said;
    unfinished_remove();
    _exit(1);
}

/* Whoever sets another handler later, like a test, gets this one again with the next mapping. */
static void catch_bus_errors(void) {
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now) == 0 && now.sa_sigaction != bus_error) {
        const struct sigaction action = {.sa_sigaction = bus_error, .sa_flags = SA_SIGINFO};
        before = now;
        sigaction(SIGBUS, &action, NULL);
    }
}

/* Remember a mapping; false: no memory. */
static bool remember(const unsigned char *data, size_t bytes, int fd, const struct stat *file, const char *name) {
    Mapped *m = malloc(sizeof *m);
    if (!m) {
        return false;
    }
    *m = (Mapped){
        .next = all,
        .data = data,
        .bytes = round_up(bytes, (size_t)sysconf(_SC_PAGESIZE)),
        .fd = fd,
        .file = *file,
    };
    snprintf(m->name, sizeof m->name, "%s", name);
    Error line;  // which has no control characters
    error_set(&line, ERR_OPEN, "%.50s: %s: was cut short, or became unreadable, while it was in use",
              program_invocation_short_name, m->name);
    snprintf(m->lost, sizeof m->lost, "%s\n", line.text);
    all = m;
    catch_bus_errors();
    return true;
}

/* keep_fd: the mapping takes the descriptor over */
static int map_bytes(Mapping *map, int fd, bool keep_fd, size_t bytes, const struct stat *file, const char *name,
                     Error *err) {
    *map = (Mapping){.bytes = bytes};
    if (bytes == 0) {
        return OK;
    }
    void *data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
        return error_set(err, ERR_OPEN, "%.300s: cannot be mapped: %s", name, strerror(errno));
    }
    if (!remember(data, bytes, keep_fd ? fd : -1, file, name)) {
        munmap(data, bytes);
        return error_set(err, ERR_MEMORY, "%.300s: no memory to map it", name);
    }
    map->data = data;
    return OK;
}

int mapping_of(Mapping *map, int fd, size_t bytes, const char *name, Error *err) {
    return map_bytes(map, fd, false, bytes, &(struct stat){0}, name, err);
}

int mapping_open(Mapping *map, int dir_fd, const char *path, Error *err) {
    struct stat file;
    const int fd = openat(dir_fd, path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block
    int rc = OK;
    if (fd < 0 || fstat(fd, &file) != 0) {
        rc = error_set(err, ERR_OPEN, "%.300s: %s", path, strerror(errno));
    } else if (!S_ISREG(file.st_mode)) {
        rc = error_set(err, ERR_OPEN, "%.300s: %s", path,
                       S_ISDIR(file.st_mode) ? "is a directory" : "is not a regular file");
    } else {
        rc = map_bytes(map, fd, true, (size_t)file.st_size, &file, path, err);
    }
    if (fd >= 0 && (rc || !map->data)) {
        close(fd);
    }
    return rc;
}

int mapping_check(const Mapping *map, Error *err) {
    const Mapped *m = map->data ? find(map->data) : NULL;
    struct stat now;
    if (!m || m->fd < 0) {
        return OK;
    }
    if (fstat(m->fd, &now) != 0) {
        return error_set(err, ERR_OPEN, "%s: %s", m->name, strerror(errno));
    }
    if (now.st_size != m->file.st_size ||
        now.st_mtim.tv_sec != m->file.st_mtim.tv_sec || now.st_mtim.tv_nsec != m->file.st_mtim.tv_nsec) {
        return error_set(err, ERR_OPEN, "%s: was changed while it was in use", m->name);
    }
    return OK;
}

void mapping_close(Mapping *map) {
    Mapped *m = map->data ? find(map->data) : NULL;
    if (m) {
        _Atomic(Mapped *) *at = &all;
        while (*at != m) {
            at = &(*at)->next;
        }
        *at = m->next;
        munmap((void *)(uintptr_t)map->data, map->bytes);
        if (m->fd >= 0) {
            close(m->fd);
        }
        free(m);
    }
    *map = (Mapping){0};
}
