#!/bin/sh
# Run the test programs named as arguments and tests/test_*.sh, as many at a time as there are cores, from the root of the
# repository, and end with one line: "N passed, N failed, N skipped". BIN is where run and convert are, BUILD where
# scratch files and the tests' logs may go.
#
# Programs are cmocka's; a script prints one line "ok NAME", "not ok NAME" or "skip NAME: reason" for each test.
set -u
cd "$(dirname "$0")/.." || exit 1
BIN=$(cd "${BIN:-.}" && pwd) BUILD=${BUILD:-build}
export BIN BUILD
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # test machines are busy: waiting threads sleep
logs=$BUILD/test-logs
rm -rf "$logs"
mkdir -p "$logs"

# SPDP_TEST_SHORT leaves the scripts out, which convert many models, unless they are named, and long tests: for builds
# with sanitizers. The scripts are the longest, so they start first.
scripts=$(ls tests/test_*.sh)
[ -z "${SPDP_TEST_SHORT:-}" ] || scripts=
# shellcheck disable=SC2086  # a list of files
set -- $scripts "$@"

# A test's output and status go to files, the status last: a test without one has failed. What it came to is printed from
# them in order.
for test in "$@"; do
    : >"$logs/$(basename "$test")"
done
# shellcheck disable=SC2016  # the inner shell's variables
printf '%s\n' "$@" | xargs -P "$(nproc)" -n 1 sh -c '
    log=$0/$(basename "$1")
    echo "== $1"
    "$1" >"$log" 2>&1
    echo $? >"$log.status"' "$logs"

count() { grep -c "$1" "$log"; }

passed=0 failed=0 skipped=0 broken=
for test in "$@"; do
    log=$logs/$(basename "$test")
    case $test in
    *.sh) p=$(count '^ok ') f=$(count '^not ok ') s=$(count '^skip ') ;;
    *) p=$(count '^\[       OK \]') f=$(count '^\[  FAILED  \] [a-z_0-9]*$') s=$(count '^\[  SKIPPED \] [a-z_0-9]*$') ;;
    esac
    status=$(cat "$log.status" 2>/dev/null)
    if [ "$status" != 0 ] && [ "$f" -eq 0 ]; then
        echo "$test: ended with status ${status:-unknown}" >>"$log"
        f=1
    fi
    if [ "$f" -ne 0 ]; then
        broken="$broken $log"
    else
        grep -iE '^skip|skipped:' "$log"
    fi
    echo "$test: $p passed, $f failed, $s skipped"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
# What went wrong stands last, without what passed.
for log in $broken; do
    echo "== $(basename "$log")"
    grep -vE '^ok |^\[ (RUN  |      OK)' "$log"
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
