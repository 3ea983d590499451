#!/bin/sh
# Run the tests that need a GPU, from the bundle that `make gpu-bundle` made (its root is two folders up), and end
# with "N passed, N failed". --sanitize: the same programs in their short form and the demo pruned in two ways under
# compute-sanitizer's four tools, a model of random weights under three (COMPUTE_SANITIZER names the sanitizer where it
# is not on the PATH).
set -u
cd "$(dirname "$0")/../.." || exit 1
export BIN=. BUILD=build SPDP_TEST_BACKEND=cuda
passed=0 failed=0

# check NAME COMMAND...: one test that passes with status 0; the last line of its output is shown, more if it failed
check() {
    name=$1
    shift
    start=$(date +%s)
    case $1 in */*) set -- timeout 300 "$@" ;; esac  # a program: a kernel that waits for ever must not hold up the rest
    if "$@" >build/log 2>&1; then
        passed=$((passed + 1))
        echo "ok $name ($(($(date +%s) - start)) s): $(tail -n 1 build/log)"
    else
        failed=$((failed + 1))
        echo "not ok $name"
        tail -n 40 build/log
    fi
}

# Pruned by Wanda and calibrated on either device, the model is the same but for rounding.
compare_conversions() {
    for backend in cpu cuda; do
        ./convert demo build/demo-$backend.bin --sp 0.5 --prune all --calib-tokens 8192 -b $backend --force -q ||
            return 1
    done
    build/compare_models build/demo-cpu.bin build/demo-cuda.bin
}

# perplexity BACKEND DP: of the model that compare_conversions left, on some text
perplexity() {
    rm -f build/ppl.json
    ./run build/demo-cpu.bin -b "$1" --dp "$2" --ppl export/calibration.txt --ppl-tokens 8192 -q \
        --json build/ppl.json &&
        sed -n 's/.*"perplexity": *\([0-9.e+-]*\).*/\1/p' build/ppl.json
}

# cases.md row 36. Both devices predict a text alike: perplexities within 0.2 %, exact and with columns skipped.
compare_perplexities() {
    for dp in 0 0.5; do
        cpu=$(perplexity cpu $dp) && cuda=$(perplexity cuda $dp) || return 1
        awk -v a="$cpu" -v b="$cuda" -v dp=$dp 'BEGIN {
            apart = a > 0 ? (b > a ? b - a : a - b) / a : 1
            printf "perplexity at DP %s: %.4f on the CPU, %.4f with CUDA, %.4f %% apart (limit 0.2 %%)\n",
                dp, a, b, 100 * apart
            exit !(a > 0 && b > 0 && apart <= 0.002)
        }' || return 1
    done
}

# clean TOOL NAME COMMAND...: one test that must end without a word from a tool of the sanitizer
clean() {
    tool=$1 name=$2
    shift 2
    check "$tool $name" "$sanitizer" --tool "$tool" --error-exitcode 9 "$@"
}

# cases.md row 28: the gate is that no tool finds anything.
sanitize() {
    sanitizer=${COMPUTE_SANITIZER:-compute-sanitizer}
    if ! command -v "$sanitizer" >/dev/null; then
        echo "$sanitizer is missing: it comes with the CUDA Toolkit" >&2
        exit 1
    fi
    export SPDP_TEST_SHORT=1
    ./convert demo build/demo.bin --sp 0.5 --method magnitude --dp 0 --force -q  # attention dense, MLP compressed
    ./convert demo build/demo-all.bin --sp 0.5 --method magnitude --calib-tokens 2048 --prune all --force -q
    for tool in memcheck racecheck initcheck synccheck; do
        for program in build/*_test; do
            [ "$program" != build/memory_test ] || continue  # what it tests runs in other processes
            clean "$tool" "$(basename "$program")" "$program"
        done
        clean "$tool" demo ./run build/demo.bin -b cuda -p "Once upon a time" -n 8 -t 0
        clean "$tool" "demo, all sites pruned" ./run build/demo-all.bin --dp 0.5 -b cuda -p "Once upon a time" \
            -n 4 -t 0
        [ "$tool" != racecheck ] || continue  # the calibration of random weights takes minutes
        clean "$tool" "random weights" ./run --synthetic 64:176:2:4:2:128:64 --sp 0.5 --prune all --dp 0.5 \
            -b cuda --prompt-tokens 20 -n 4 --ignore-eos -t 0
    done
}

if [ "${1:-}" = --sanitize ]; then
    sanitize
else
    for program in build/*_test build/test_kernels build/test_forward build/test_synthetic; do
        check "$(basename "$program")" "$program"
    done
    check "conversion on CPU and GPU" compare_conversions
    check "perplexity on CPU and GPU" compare_perplexities
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
