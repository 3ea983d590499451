# A picture of what bench_decode.sh measured: milliseconds per token of each shape, way of pruning and context, dense
# and pruned.
#
#   gnuplot -c tests/bench/decode.gp CSV PNG
if (ARGC != 2) { print "usage: gnuplot -c decode.gp CSV PNG"; exit status 2 }
csv = ARG1
# One row a group: its name, TPOT dense, at SP .3 DP .5, at SP .5 DP .5; "?" where it was not measured. The dense
# model, which no choice of what to prune changes, stands in every group of its shape and context.
table = "< awk -F, 'NR > 1 { place = $3 \" \" $8; if ($4 == \"none\") { dense[place] = $11; next } ".\
    "group = $3 \" \" $4 \" \" $8; if (!(group in places)) { names[++n] = group; places[group] = place } ".\
    "tpot[group, $5] = $11 } ".\
    "function shown(x) { return x == \"\" ? \"?\" : x } ".\
    "END { for (i = 1; i <= n; i++) { g = names[i]; print g \",\" shown(dense[places[g]]) \",\" ".\
    "shown(tpot[g, \"0.3\"]) \",\" shown(tpot[g, \"0.5\"]) } }' '".csv."'"
device = system("sed -n 2p '".csv."' | cut -d, -f2")
date = system("sed -n 2p '".csv."' | cut -d, -f1")

set terminal pngcairo size 1300, 700 noenhanced font "sans,11"
set output ARG2
set datafile separator ","
set datafile missing "?"
set title device.", ".date.": time per token after a prompt; shape, what is pruned, tokens of prompt"
set ylabel "ms per output token"
set yrange [0:*]
set grid ytics lc rgb "#dddddd"
set style data histogram
set style histogram clustered gap 1
set style fill solid 0.9 noborder
set boxwidth 0.95
set xtics rotate by -35 scale 0
set rmargin 8
set key top left
plot table using 2:xtic(1) title "dense" lc rgb "#888888", \
     table using 3 title "SP .3 DP .5" lc rgb "#3182bd", \
     table using 4 title "SP .5 DP .5" lc rgb "#08306b"
