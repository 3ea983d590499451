# A picture of what bench_kernels measured: for each shape the time of cuBLAS, of the sparse product at three
# settings, and the least time that reading the dense weights takes at the measured ceiling.
#
#   gnuplot -c tests/bench/kernels.gp CSV PNG
if (ARGC != 2) { print "usage: gnuplot -c kernels.gp CSV PNG"; exit status 2 }
csv = ARG1
header = system("head -n 1 '".csv."'")
ceiling = real(system("sed -n 's/.*read ceiling \\([0-9]*\\) GB.*/\\1/p;1q' '".csv."'"))
# rows of one setting: name, our time, cuBLAS's, dense weights at the ceiling
rows(sp, dp) = sprintf("< awk -F, '!/^#/ && $4 == %g && $5 == %g && $1 != \"name\" ".\
    "{printf \"%%s,%%g,%%g,%%g\\n\", $1, $6, $7, 2e-3 * $2 * $3 / %g}' '%s'", sp, dp, ceiling, csv)
n = int(system("awk -F, '!/^#/ && $4 == .5 && $5 == .5' '".csv."' | wc -l"))

set terminal pngcairo size (400 + 75 * n < 1300 ? 1300 : 400 + 75 * n), 700 noenhanced font "sans,11"
set output ARG2
set datafile separator ","
set title header font "sans,9"
set ylabel "us, one token"
set yrange [0:*]
set grid ytics lc rgb "#dddddd"
set style data histogram
set style histogram clustered gap 1.5
set style fill solid 0.9 noborder
set boxwidth 0.95
set xtics rotate by -35 scale 0
set rmargin 8
set key top left
plot rows(.5, .5) using 3:xtic(1) title "cuBLAS, dense" lc rgb "#888888", \
     rows(.5, 0) using 2 title "SP .5" lc rgb "#9ecae1", \
     rows(.3, .5) using 2 title "SP .3 DP .5" lc rgb "#3182bd", \
     rows(.5, .5) using 2 title "SP .5 DP .5" lc rgb "#08306b", \
     rows(.5, .5) using 4 title "dense weights at the read ceiling" lc rgb "#e6842a"
