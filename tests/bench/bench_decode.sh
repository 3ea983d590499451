#!/bin/sh
# Times of whole models of random weights: decoding 128 tokens after a prompt, dense and pruned. From the bundle
# that `make gpu-bundle` made, or wherever `run` and build/bench_kernels are two folders up.
#
#   bench_decode.sh CSV [--quick]
#
# One line of CSV for each run; on stdout the same in short with what the run took. --quick: Llama-2 7B after 128
# tokens. A run that fails, for want of memory say, is named and leaves no line.
set -u
if [ $# -lt 1 ] || [ $# -gt 2 ] || [ "${2:---quick}" != --quick ]; then
    echo "usage: bench_decode.sh CSV [--quick]" >&2
    exit 2
fi
csv=$1 quick=${2:-}
cd "$(dirname "$0")/../.." || exit 1
steps=128 json=build/decode.json
failed=0

# Value of a key of the run's JSON, nothing for null.
value() { sed -n "s/.*\"$1\": *\\(\"[^\"]*\"\\|[^,}]*\\).*/\\1/p" "$json" | tr -d '"' | sed 's/^null$//'; }

# measure NAME SHAPE PRUNE SP DP PROMPT: one run; PRUNE is none for a dense model
measure() {
    name=$1 shape=$2 prune=$3 sp=$4 dp=$5 prompt=$6
    what="$name, $prompt tokens of prompt, SP $sp DP $dp, prune $prune"
    start=$(date +%s.%N)
    rm -f "$json"
    if ! ./run --synthetic "$shape" --sp "$sp" --dp "$dp" --prune "$(echo "$prune" | sed 's/none/mlp/')" -b cuda \
        --prompt-tokens "$prompt" -n $steps -c $((prompt + steps)) --ignore-eos -t 0 -q --json "$json" \
        >build/decode.log 2>&1; then
        echo "$what: failed: $(tail -n 1 build/decode.log)"
        failed=$((failed + 1))
        return
    fi
    device=$(value device | sed 's/ (.*//; s/,/;/g')
    line=$(date -u +%Y-%m-%d),$device,$name,$prune,$sp
    for key in dp_asked dp_reached; do
        line=$line,$(value $key)
    done
    line=$line,$prompt
    for key in ttft_ms prefill_tok_s tpot_ms tpot_median_ms tpot_p99_ms bytes_per_token gb_s; do
        line=$line,$(value $key)
    done
    echo "$line,$ceiling,$(value joules_per_token)" >>"$csv"
    awk -v what="$what" -v tpot="$(value tpot_ms)" -v ttft="$(value ttft_ms)" -v gb_s="$(value gb_s)" \
        -v from="$start" -v to="$(date +%s.%N)" 'BEGIN { printf "%s: TPOT %.3f ms, TTFT %.1f ms, %.0f GB/s; took %.1f s\n",
            what, tpot, ttft, gb_s, to - from }'
}

# measure_settings NAME SHAPE PRUNES SETTINGS PROMPTS: settings are SP:DP
measure_settings() {
    for prompt in $5; do
        for prune in $3; do
            for setting in $4; do
                measure "$1" "$2" "$prune" "${setting%:*}" "${setting#*:}" "$prompt"
            done
        done
    done
}

# GB/s of a streaming read, which no decoding can exceed.
build/bench_kernels build/ceiling.csv --quick --only 0 >build/decode.log || exit 1
ceiling=$(sed -n 's/.*read ceiling \([0-9]*\) GB.*/\1/p' build/ceiling.csv)
echo "date,device,shape,prune,sp,dp_asked,dp_reached,context,ttft_ms,prefill_tok_s,tpot_ms,tpot_median_ms,\
tpot_p99_ms,bytes_per_token,gb_s,ceiling,joules_per_token" >"$csv" || exit 1

# The shapes of Llama-2 with room for 4096 tokens of prompt and those that follow. What matters most comes first.
llama2_7b=4096:11008:32:32:32:32000:4224
llama2_13b=5120:13824:40:40:40:32000:4224
llama2_70b=8192:28672:80:64:8:32000:4224
pruned="0.3:0.5 0.5:0.5" prompts="128 2048 4096"
[ -z "$quick" ] || prompts=128
measure_settings llama2-7b $llama2_7b none 0:0 "$prompts"
measure_settings llama2-7b $llama2_7b "mlp all" "$pruned" "$prompts"
if [ -z "$quick" ]; then
    measure_settings llama2-13b $llama2_13b none 0:0 "$prompts"
    measure_settings llama2-13b $llama2_13b "mlp all" "$pruned" "$prompts"
    # Dense, the 70B model is larger than any one device's memory; with the MLP alone pruned hardly smaller.
    measure_settings llama2-70b $llama2_70b all "0.5:0.5 0.3:0.5" "$prompts"
fi
echo "$csv: $(($(wc -l <"$csv") - 1)) runs, $failed failed"
[ $failed -eq 0 ]
