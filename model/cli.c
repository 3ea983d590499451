#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

void cli_begin(void) {
    signal(SIGXFSZ, SIG_IGN);
    for (int fd = 0; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) < 0) {
            // the lowest free number, which is fd; reading from the first and writing to the others fails
            open("/dev/null", (fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) | O_CLOEXEC);
        }
    }
}

static int bad_value(const char *option, const char *text, const char *want, Error *err) {
    return error_set(err, ERR_USAGE, "%s %.100s: %s", option, text, want);
}

/* strtod and friends skip white space and accept hexadecimal and "inf"; a number on a command line has none. */
static bool looks_like_number(const char *text) {
    return *text != 0 && text[strspn(text, "0123456789+-.eE")] == 0;
}

int parse_long(long *value, const char *option, const char *text, long low, long high, Error *err) {
    char want[80], *end;
    snprintf(want, sizeof want, "not a whole number in %ld .. %ld", low, high);
    errno = 0;
    const long v = strtol(text, &end, 10);
    if (!looks_like_number(text) || *end || errno || v < low || v > high) {
        return bad_value(option, text, want, err);
    }
    *value = v;
    return OK;
}

int parse_double(double *value, const char *option, const char *text, double low, double high, Error *err) {
    char want[80], *end;
    snprintf(want, sizeof want, "not a number in %g .. %g", low, high);
    errno = 0;
    const double v = strtod(text, &end);
    if (!looks_like_number(text) || *end || !(v >= low && v <= high)) {
        return bad_value(option, text, want, err);
    }
    *value = v;
    return OK;
}

int parse_u64(uint64_t *value, const char *option, const char *text, Error *err) {
    char *end;
    errno = 0;
    const unsigned long long v = strtoull(text, &end, 10);
    if (*text == 0 || text[strspn(text, "0123456789")] != 0 || errno) {
        return bad_value(option, text, "not a whole number in 0 .. 2^64 - 1", err);
    }
    *value = v;
    return OK;
}

int parse_ratios(Ratios *ratios, bool *by_site, const char *option, const char *text, double high, Error *err) {
    Ratios r = {NAN, NAN};
    if (!strchr(text, '=')) {
        const int rc = parse_double(&r.mlp, option, text, 0, high, err);
        if (!rc) {
            r.attn = r.mlp;
            *ratios = r;
            *by_site = false;
        }
        return rc;
    }
    char copy[100], *rest = copy;
    if (strlen(text) >= sizeof copy) {
        return bad_value(option, text, "too long", err);
    }
    strcpy(copy, text);
    for (char *item; (item = strsep(&rest, ","));) {
        double *target = strncmp(item, "mlp=", 4) == 0 ? &r.mlp : strncmp(item, "attn=", 5) == 0 ? &r.attn : NULL;
        if (!target || !isnan(*target)) {
            return bad_value(option, text, "not a ratio, nor mlp=RATIO,attn=RATIO", err);
        }
        const int rc = parse_double(target, option, strchr(item, '=') + 1, 0, high, err);
        if (rc) {
            return rc;
        }
    }
    *ratios = r;
    *by_site = true;
    return OK;
}

void progress_show(Progress *p, double done, double total) {
    if (p->quiet || total <= 0) {
        return;
    }
    const double now = time_ms();
    if (p->start_ms == 0) {
        p->start_ms = p->shown_ms = now;
    }
    if (now - p->start_ms < p->wait_ms) {
        return;
    }
    const double share = done / total, seconds = (now - p->start_ms) * 1e-3;
    const double rate = seconds > 0 ? done / seconds : 0, left = rate > 0 ? (total - done) / rate : 0;
    if (isatty(STDERR_FILENO)) {
        if (now - p->shown_ms < 100) {
            return;
        }
        static const char bar[] = "########################################";
        fprintf(stderr, "\r%s [%-40.*s] %3.0f %%  %.0f %s/s  %.0f s left \033[K", p->label, (int)(share * 40), bar,
                share * 100, rate, p->unit, left);
        p->shown_ms = now;
    } else if ((int)(share * 10) > p->shown_tenth && seconds > 1) {
        p->shown_tenth = (int)(share * 10);
        fprintf(stderr, "%s: %.0f %%, %.0f %s/s, %.0f s left\n", p->label, share * 100, rate, p->unit, left);
    }
}

void progress_end(Progress *p) {
    if (!p->quiet && p->start_ms != 0 && isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r\033[K");
    }
}

SizeText size_text(double bytes) {
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    size_t u = 0;
    while (bytes >= 999.5 && u + 1 < sizeof units / sizeof *units) {
        bytes /= 1000;
        u++;
    }
    SizeText t;
    snprintf(t.text, sizeof t.text, u == 0 ? "%.0f %s" : bytes < 10 ? "%.2f %s" : "%.1f %s", bytes, units[u]);
    return t;
}

DurationText duration_text(double seconds) {
    DurationText t;
    const char *format = seconds < 120 ? "%.0f s" : seconds < 7200 ? "%.0f min" : "%.1f h";
    snprintf(t.text, sizeof t.text, format, seconds / (seconds < 120 ? 1 : seconds < 7200 ? 60 : 3600));
    return t;
}
