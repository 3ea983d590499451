#!/bin/sh
# The sweep of tests/quality on a few points of the demo: what is measured, kept and measured again. Prints "ok NAME",
# "not ok NAME" or "skip NAME: reason".
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
export BIN="$bin" WORK="$s" RESULTS="$s/demo"
export SCORE_TOKENS=600 WINDOW=128 CALIB_TOKENS=1024 GRID_SP='0 0.5' GRID_DP='0 0.5' TOTALS=0.75 COMBINED_SP=0.5 METHOD_DP=
csv=$s/demo/demo-quality.csv

needs_gnuplot() { command -v gnuplot || skip_test 'no gnuplot'; }

# field COLUMN METHOD,SP,DP
field() {
    awk -F, -v column="$1" -v key="$2" 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i }
        $1 "," $2 "," $3 == key { print $at[column] }' "$csv"
}

check() { awk "BEGIN { exit !($1) }" || { echo "not: $1"; return 1; }; }

sweep_measures_and_keeps() {
    needs_gnuplot
    tests/quality/quality.sh sweep
    [ "$(wc -l <"$csv")" -eq 7 ]  # four of the grid, static and dynamic ratio .75 alone; .5 and .5 is in the grid
    awk -F, 'NF != 15 { exit 1 } { for (i = 1; i <= NF; i++) if ($i == "" && $3 != 0) exit 1 }' "$csv"
    dense=$(field perplexity wanda,0,0) both=$(field perplexity wanda,0.5,0.5)
    check "$dense > 5 && $dense < $(field perplexity wanda,0.5,0) && $(field perplexity wanda,0.5,0) < $both"
    check "($(field total wanda,0.5,0.5) - 0.75) ^ 2 < 1e-9"
    check "($(field overlap wanda,0.5,0.5) - $(field overlap_independent wanda,0.5,0.5)) ^ 2 < 0.02 ^ 2"
    check "$(field bytes_per_token wanda,0.5,0.5) < $(field bytes_per_token wanda,0.5,0)"
    check "$(field file_bytes wanda,0.5,0) < $(field file_bytes wanda,0,0)"
    # what run says of that model and text by itself
    "$BIN/run" "$s/demo/wanda-0.5.bin" --ppl "$s/demo/text.txt" --ppl-window 128 --ppl-tokens 600 --dp 0.5 -q --json "$s/alone"
    grep -q "\"perplexity\":$both," "$s/alone"
    [ "$(head -c 8 "${csv%.csv}.png" | od -An -tx1 | tr -d ' ')" = 89504e470d0a1a0a ]
}

sweep_goes_on_where_it_was() {
    needs_gnuplot
    cp "$csv" "$s/whole"
    grep -v '^wanda,0.5,0.5,' "$s/whole" >"$csv"
    stat -c %Y "$s/demo"/*.bin >"$s/made"
    tests/quality/quality.sh sweep
    sort "$csv" >"$s/a"
    sort "$s/whole" | cmp - "$s/a"  # bytes of a token depend on nothing but the model and the text either
    stat -c %Y "$s/demo"/*.bin | cmp - "$s/made"
}

best_names_the_lowest() {
    needs_gnuplot
    TOTAL=0.75 BEST_SP='0 0.5' tests/quality/quality.sh best >"$s/said"
    least=$(awk -F, '$1 == "wanda" && ($4 - 0.75) ^ 2 < 1e-6 { print $13 }' "$csv" | sort -g | head -1)
    grep -q "^best at total 0.75: .*perplexity $least\$" "$s/said"
}

t sweep_measures_and_keeps
t sweep_goes_on_where_it_was
t best_names_the_lowest
exit $failed
