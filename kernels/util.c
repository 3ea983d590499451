#include "util.h"

#include <sched.h>
#include <stdarg.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

int error_set(Error *err, int code, const char *format, ...) {
    if (err) {
        va_list args;
        va_start(args, format);
        err->text[0] = 0;  // formatting itself may find no memory
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
        // Names from files and arguments end up here: whatever they hold, the message stays one line.
        for (char *c = err->text; *c; c++) {
            if ((unsigned char)*c < 0x20 || *c == 0x7f) {
                *c = '?';
            }
        }
        err->code = code;
    }
    return code;
}

void error_prefix(Error *err, const char *prefix) {
    if (err) {
        char text[sizeof err->text];
        memcpy(text, err->text, sizeof text);
        // A long path gives way to the reason, which is what the reader cannot guess.
        snprintf(err->text, sizeof err->text, "%.200s: %.190s", prefix, text);
    }
}

void *memory_alloc(size_t bytes) {
    if (bytes > SIZE_MAX - 2 * MEMORY_SLACK) {
        return NULL;
    }
    const size_t total = round_up(bytes + MEMORY_SLACK, 64);
    void *p = aligned_alloc(64, total);
    if (p) {
        memset(p, 0, total);
    }
    return p;
}

double time_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

size_t memory_peak(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (size_t)usage.ru_maxrss * 1024;
}

/* First number in a small file of the kernel's; fallback if there is none. */
static long read_number(const char *path, long fallback) {
    FILE *f = fopen(path, "r");
    long value = fallback;
    if (f) {
        if (fscanf(f, "%ld", &value) != 1) {
            value = fallback;
        }
        fclose(f);
    }
    return value;
}

/* Of the threads of one core in our affinity mask only the first counts, and a container's share of processor
 * time is a limit as well. */
int default_threads(void) {
    cpu_set_t set;
    int cores = 0;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
            char path[100];
            snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
            if (CPU_ISSET(cpu, &set)) {
                const long first = read_number(path, cpu);
                cores += first == cpu || first < 0 || first >= CPU_SETSIZE || !CPU_ISSET((int)first, &set);
            }
        }
    }
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "r");
    long quota, period;
    if (f) {
        if (fscanf(f, "%ld %ld", &quota, &period) == 2 && period > 0 && quota > 0) {
            const int share = (int)ceil_div((size_t)quota, (size_t)period);
            cores = share < cores ? share : cores;
        }
        fclose(f);
    }
    return cores > 0 ? cores : 1;
}
