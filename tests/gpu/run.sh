#!/bin/sh
# Run the tests that need a GPU, from the bundle that `make gpu-bundle` made (its root is two folders up), and end with
# "N passed, N failed". --sanitize: the same programs in their short form under compute-sanitizer's four tools.
set -u
cd "$(dirname "$0")/../.." || exit 1
export BIN=. BUILD=build SPDP_TEST_BACKEND=cuda
passed=0 failed=0

# check NAME COMMAND...: one test that passes with status 0
check() {
    name=$1
    shift
    if "$@" >build/log 2>&1; then
        passed=$((passed + 1))
        echo "ok $name"
    else
        failed=$((failed + 1))
        echo "not ok $name"
        tail -n 40 build/log
    fi
}

if [ "${1:-}" = --sanitize ]; then
    export SPDP_TEST_SHORT=1
    ./convert demo build/demo.bin --sp 0.5 --method magnitude --dp 0 --force -q  # attention dense, MLP compressed
    for tool in memcheck racecheck initcheck synccheck; do
        sanitizer="compute-sanitizer --tool $tool --error-exitcode 9"
        for program in build/*_test; do
            check "$tool $(basename "$program")" $sanitizer "$program"
        done
        check "$tool demo" $sanitizer ./run build/demo.bin -b cuda -p "Once upon a time" -n 8 -t 0
    done
else
    for program in build/*_test build/test_kernels build/test_forward; do
        check "$(basename "$program")" "$program"
    done
fi
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
