/* race.c: shows that the thread sanitizer understands OpenMP. Rows are filled by some threads and added up by others;
 * with any argument there is no barrier in between, which is to be reported; else nothing is. */
#include <stdio.h>
#include <string.h>

enum { N_ROWS = 64, ROW = 256, N_THREADS = 4 };

static float rows[N_ROWS][ROW], columns[ROW];

static void fill(int r) {
    float row[ROW];
    for (int i = 0; i < ROW; i++) {
        row[i] = (float)(r * i);
    }
    memcpy(rows[r], row, sizeof row);
}

static void add(int i) {
    columns[i] = 0;
    for (int r = 0; r < N_ROWS; r++) {
        columns[i] += rows[r][i];
    }
}

int main(int n_arguments, char **arguments) {
    (void)arguments;
    const int ordered = n_arguments == 1;
    long n_filled = 0;
    for (int repeat = 0; repeat < 20; repeat++) {
#pragma omp parallel num_threads(N_THREADS) reduction(+ : n_filled)
        {
#pragma omp for schedule(dynamic) nowait
            for (int r = 0; r < N_ROWS; r++) {
                fill(r);
                n_filled++;
            }
            if (ordered) {
#pragma omp barrier
            }
#pragma omp for schedule(static)
            for (int i = 0; i < ROW; i++) {
                add(i);
            }
        }
    }
    printf("%ld rows, %g\n", n_filled, (double)columns[ROW - 1]);
    return 0;
}
