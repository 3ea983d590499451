#!/bin/bash
# What pruning costs in perplexity.
#   quality.sh sweep   static x dynamic ratios, their overlap, storage and bytes per token: CSV and PNG in RESULTS
#   quality.sh best    the pair of ratios with the lowest perplexity at one total sparsity, TOTAL
# Every figure is kept in a CSV as soon as it is known, so that an interrupted run goes on where it was; every pruned
# model is made once and kept in WORK.
set -euo pipefail

usage() {
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    cat <<'TEXT'
Settings come from the environment (make quality MODEL=... and so on):
  MODEL          source of convert (demo)
  NAME           of the results (the last part of MODEL)
  TEXT           text to score, which calibration must not see; .tok: token ids (a fifth of the shipped text)
  CALIB          calibration text (the other four fifths of the shipped text)
  SCORE_TOKENS   tokens to score (32768)      WINDOW  of context (512)      CALIB_TOKENS  (16384)
  CONVERT        more options for convert     PRUNE   mlp or all (all)
  GRID_SP, GRID_DP        ratios of the grid
  TOTALS, COMBINED_SP     total sparsities, and the static ratios that are combined with DP to reach them
  METHOD_DP      dynamic ratios at which magnitude and SparseGPT are measured too, at a static one of 0.5
  TOTAL, BEST_SP for best: the total (0.65), the static ratios that are tried first
TEXT
}

BIN=${BIN:-.}
MODEL=${MODEL:-demo}
NAME=${NAME:-$(basename "$MODEL")}
WORK=${WORK:-build/quality}/$NAME
RESULTS=${RESULTS:-tests/bench/results}
SCORE_TOKENS=${SCORE_TOKENS:-32768}
WINDOW=${WINDOW:-512}
CALIB_TOKENS=${CALIB_TOKENS:-16384}
PRUNE=${PRUNE:-all}
GRID_SP=${GRID_SP-0 0.1 0.2 0.3 0.4 0.5}
GRID_DP=${GRID_DP-0 0.2 0.3 0.4 0.5 0.6}
TOTALS=${TOTALS-0.5 0.65 0.8}
COMBINED_SP=${COMBINED_SP-0.1 0.2 0.3 0.4}
METHOD_DP=${METHOD_DP-0 0.3 0.5}
TOTAL=${TOTAL:-0.65}
BEST_SP=${BEST_SP:-0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8}
read -ra CONVERT_OPTIONS <<<"${CONVERT:-}"

CSV=$RESULTS/$NAME-quality.csv
COLUMNS=method,sp,dp,total,sp_reached,dp_reached,total_reached,overlap,overlap_independent,overlap_worst
COLUMNS+=,nll,nll_stderr,perplexity,file_bytes,bytes_per_token

fail() {
    echo "quality: $1" >&2
    exit 1
}

# Without texts of their own: calibrate on the first four fifths of the shipped text, score the last.
choose_texts() {
    local shipped=export/calibration.txt size
    size=$(stat -c %s "$shipped")
    if [ -z "${CALIB:-}" ]; then
        CALIB=$WORK/calibration.txt
        head -c $((size * 4 / 5)) "$shipped" >"$CALIB"
    fi
    if [ -z "${TEXT:-}" ]; then
        TEXT=$WORK/text.txt
        tail -c $((size / 5)) "$shipped" >"$TEXT"
    fi
    SCORE_OPTIONS=(--ppl "$TEXT" --ppl-window "$WINDOW" --ppl-tokens "$SCORE_TOKENS")
    case $TEXT in *.tok) SCORE_OPTIONS+=(--tokens) ;; esac
}

# The model of a method and static ratio, made if it is not there.
make_model() {
    local method=$1 sp=$2
    model=$WORK/$method-$sp.bin
    local resume=()
    [ ! -e "$model.partial.state" ] || resume=(--resume)  # the sweep was interrupted
    [ -e "$model" ] || "$BIN/convert" "$MODEL" "$model" --method "$method" --sp "$sp" --prune "$PRUNE" --dp 0.5 --calib "$CALIB" \
        --calib-tokens "$CALIB_TOKENS" --calib-len "$WINDOW" "${CONVERT_OPTIONS[@]}" "${resume[@]}" -q
}

# key of a flat JSON object
figure() { sed -n "s/.*\"$1\":\([^,}]*\).*/\1/p" "$2" | sed 's/null//'; }

# Measure one point and keep it. The bytes of a token are those of 32 decode steps after 32 tokens of the text.
measure() {
    local method=$1 sp=$2 dp=$3 key total model
    key="$method,$sp,$dp,"
    grep -q "^$key" "$CSV" && return
    make_model "$method" "$sp"
    "$BIN/run" "$model" "${SCORE_OPTIONS[@]}" --dp "$dp" -q --json "$WORK/score.json" ||
        fail "no perplexity of $model at --dp $dp"
    "$BIN/run" "$model" "${PROMPT[@]}" -n 33 -t 0 --ignore-eos --dp "$dp" -c 128 -q --json "$WORK/decode.json" >"$WORK/decoded"
    total=$(awk "BEGIN { printf \"%.4g\", 1 - (1 - $sp) * (1 - $dp) }")
    local row="$key$total" k
    for k in sp dp_reached total overlap overlap_independent overlap_worst nll nll_stderr perplexity; do
        row+=,$(figure "$k" "$WORK/score.json")
    done
    row+=,$(stat -c %s "$model"),$(figure bytes_per_token "$WORK/decode.json")
    echo "$row" >>"$CSV"
    echo "$row" | awk -F, '{ printf "%-9s SP %-5s DP %-7s total %-6s perplexity %.4f\n", $1, $2, $3, $4, $13 }'
}

# The dynamic ratio that reaches a total together with a static one.
dynamic_ratio() { awk "BEGIN { printf \"%.4g\", 1 - (1 - $1) / (1 - $2) }"; }
below() { awk "BEGIN { exit !($1 < $2) }"; }

start() {
    mkdir -p "$WORK" "$RESULTS"
    [ -e "$CSV" ] || echo "$COLUMNS" >"$CSV"
    [ "$(head -1 "$CSV")" = "$COLUMNS" ] || fail "$CSV has other columns: move it away"
    choose_texts
    # 32 tokens of the text (of ids, 64 bytes) to decode after
    PROMPT=(-f "$WORK/prompt")
    case $TEXT in
    *.tok) head -c 64 "$TEXT" >"$WORK/prompt" && PROMPT+=(--tokens) ;;
    *) head -c 100 "$TEXT" >"$WORK/prompt" ;;
    esac
}

plan() {
    local sp dp total method
    for sp in $GRID_SP; do for dp in $GRID_DP; do echo "wanda $sp $dp"; done; done
    for total in $TOTALS; do
        echo "wanda $total 0"
        echo "wanda 0 $total"
        for sp in $COMBINED_SP; do
            below "$sp" "$total" && echo "wanda $sp $(dynamic_ratio "$total" "$sp")"
        done
    done
    for method in magnitude sparsegpt; do for dp in $METHOD_DP; do echo "$method 0.5 $dp"; done; done
}

sweep() {
    local began=$SECONDS point
    start
    local points
    points=$(plan | sort -u -k1,1 -k2,2g -k3,3g)
    echo "$(wc -l <<<"$points") points of $SCORE_TOKENS tokens of $TEXT: $CSV"
    while read -ra point; do measure "${point[@]}"; done <<<"$points"
    gnuplot -e "csv='$CSV'; png='${CSV%.csv}.png'; name='$NAME'" "$(dirname "$0")/quality.gp"
    echo "total $((SECONDS - began)) s: $CSV, ${CSV%.csv}.png"
}

# The ratios of BEST_SP, then half a step to either side of the best.
best() {
    local sp
    start
    look() { below "$1" "$TOTAL" && measure wanda "$1" "$(dynamic_ratio "$TOTAL" "$1")"; return 0; }
    lowest() {
        awk -F, -v total="$TOTAL" '$1 == "wanda" && ($4 - total) ^ 2 < 1e-6 && (!least || $13 < least) {
            least = $13; sp = $2; dp = $3 } END { print sp, dp, least }' "$CSV"
    }
    for sp in $BEST_SP; do look "$sp"; done
    measure wanda "$TOTAL" 0
    sp=$(lowest | cut -d' ' -f1)
    below 0 "$sp" && look "$(awk "BEGIN { printf \"%.4g\", $sp - 0.05 }")"
    look "$(awk "BEGIN { printf \"%.4g\", $sp + 0.05 }")"
    lowest | { read -r sp dp least; echo "best at total $TOTAL: --sp $sp --dp $dp, perplexity $least"; }
}

case ${1:-} in
sweep) sweep ;;
best) best ;;
*) usage; exit 2 ;;
esac
