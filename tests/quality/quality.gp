# Three panels from the CSV of quality.sh: set csv, png and name.
set datafile separator ","
set terminal pngcairo size 1500, 480 font "sans,10"
set output png
set multiplot layout 1, 3
set key top left
set grid

# Rows that fulfil an awk condition; columns: 1 method, 2 sp, 3 dp, 4 total, 8 overlap, 9 overlap if independent, 13 perplexity
rows(condition) = "< awk -F, 'NR > 1 && (" . condition . ")' " . csv
wanda(condition) = rows("$1 == \"wanda\" && " . condition)

set title name . ": perplexity over dynamic ratio (Wanda)"
set xlabel "DP"
set ylabel "perplexity"
set logscale y
ratios = system("awk -F, '$1 == \"wanda\" { n[$2]++ } END { for (s in n) if (n[s] > 2) print s }' " . csv . " | sort -g")
plot for [s in ratios] wanda("$2 == " . s) using 3:13 smooth unique with linespoints title "SP " . s

set title "perplexity over total sparsity"
set xlabel "total sparsity"
# the lowest of every total that static ratios between were tried for
best = system("awk -F, '$1 == \"wanda\" && $2 > 0 && $3 > 0 { t = sprintf(\"%.2f\", $4); n[t]++; \
    if (!(t in p) || $13 < p[t]) p[t] = $13 } END { for (t in p) if (n[t] > 1) print t \",\" p[t] }' " . csv . " | sort -g")
set print $best
print best
unset print
plot wanda("$3 == 0") using 4:13 smooth unique with linespoints title "SP only", \
    wanda("$2 == 0") using 4:13 smooth unique with linespoints title "DP only", \
    $best using 1:2 with linespoints lw 2 title "best combination"
unset logscale y

set title "weights both pruned and skipped"
set xlabel "SP x DP"
set ylabel "overlap"
plot x with lines dashtype 2 title "independent", \
    for [m in "wanda magnitude sparsegpt"] rows("$1 == \"" . m . "\"") using 9:8 with points pt 7 title m
unset multiplot
