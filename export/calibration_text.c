/* The calibration text that ships with the project, inside the program, so that no path has to be known. */
#include "calib_text.h"

__asm__(".pushsection .rodata\n"
        ".balign 16\n"
        "calibration_text_begin:\n"
        ".incbin \"export/calibration.txt\"\n"
        "calibration_text_end:\n"
        ".byte 0\n"
        ".popsection\n");

extern const char calibration_text_begin[], calibration_text_end[];

const char *calibration_text(size_t *bytes) {
    *bytes = (size_t)((uintptr_t)calibration_text_end - (uintptr_t)calibration_text_begin);
    return calibration_text_begin;
}
