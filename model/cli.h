/* cli.h: what the command lines of run and convert share: strict numbers, ratios by site, progress. */
#ifndef SPDP_CLI_H
#define SPDP_CLI_H

#include "../kernels/util.h"

/* Exit statuses of both programs. */
enum { EXIT_OK = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

/* What comes first in both. A file size limit is then a failed write like a full disk; and a standard stream that
 * the caller has closed fails when it is used, instead of being the first file that is opened. */
void cli_begin(void);

/* The whole text must be a number in low .. high; option names it in the message. Return 0 or ERR_USAGE. */
int parse_long(long *value, const char *option, const char *text, long low, long high, Error *err);
int parse_double(double *value, const char *option, const char *text, double low, double high, Error *err);
int parse_u64(uint64_t *value, const char *option, const char *text, Error *err);

/* A ratio for the MLP's and the attention's matrices; NAN = not named. */
typedef struct {
    double mlp, attn;
} Ratios;

/* "0.5" gives both sites the same ratio with *by_site = false; "mlp=0.5,attn=0.3" (either may be left out) sets
 * what it names. Ratios are in 0 .. high. */
int parse_ratios(Ratios *ratios, bool *by_site, const char *option, const char *text, double high, Error *err);

/* Progress of long work on stderr: a bar with rate and time left on a terminal, else a line every tenth of the
 * way, nothing when quiet. Zero-initialise but for the first four. */
typedef struct {
    const char *label;
    const char *unit;   // of what is counted, "MB"
    bool quiet;
    double wait_ms;     // nothing is shown before so much time has passed
    double start_ms, shown_ms;
    int shown_tenth;
} Progress;

void progress_show(Progress *p, double done, double total);
void progress_end(Progress *p);  // clears the bar

/* "12.3 MB", "1.2 GB": decimal units. */
typedef struct {
    char text[32];
} SizeText;
SizeText size_text(double bytes);

/* "45 s", "12 min", "3.4 h". */
typedef struct {
    char text[32];
} DurationText;
DurationText duration_text(double seconds);

#endif
