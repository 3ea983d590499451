/* The calibration text that ships with the project, inside the program, so that no path has to be known. */
#include "calib_text.h"

__asm__(".pushsection .rodata\n"
        ".balign 16\n"
        "calibration_text_begin:\n"
        ".incbin \"export/calibration.txt\"\n"
        "calibration_text_end:\n"
        ".byte 0\n"
        ".popsection\n");

/* Hidden: else AArch64 reads both addresses from the global offset table, where two labels of one section share an
 * entry. */
extern const char calibration_text_begin[] __attribute__((visibility("hidden")));
extern const char calibration_text_end[] __attribute__((visibility("hidden")));

const char *calibration_text(size_t *bytes) {
    *bytes = (size_t)((uintptr_t)calibration_text_end - (uintptr_t)calibration_text_begin);
    return calibration_text_begin;
}
