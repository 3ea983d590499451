#!/bin/sh
# Run the test programs named as arguments and tests/test_*.sh one after the other, from the root of the repository, and
# end with one line: "N passed, N failed, N skipped". BIN is where run and convert are, BUILD where scratch files may go.
#
# Programs are cmocka's; a script prints one line "ok NAME", "not ok NAME" or "skip NAME: reason" for each test.
set -u
cd "$(dirname "$0")/.." || exit 1
BIN=$(cd "${BIN:-.}" && pwd) BUILD=${BUILD:-build}
export BIN BUILD
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"  # test machines are busy: waiting threads sleep
passed=0 failed=0 skipped=0
log=$BUILD/test.log

count() { grep -c "$1" "$log"; }

# SPDP_TEST_SHORT leaves the scripts out, which convert many models, and long tests: for builds with sanitizers.
scripts=tests/test_*.sh
[ -z "${SPDP_TEST_SHORT:-}" ] || scripts=
# shellcheck disable=SC2086  # a list of files
for test in "$@" $scripts; do
    [ -e "$test" ] || continue
    echo "== $test"
    "$test" >"$log" 2>&1
    status=$?
    case $test in
    *.sh) p=$(count '^ok ') f=$(count '^not ok ') s=$(count '^skip ') ;;
    *) p=$(count '^\[       OK \]') f=$(count '^\[  FAILED  \] [a-z_0-9]*$') s=$(count '^\[  SKIPPED \] [a-z_0-9]*$') ;;
    esac
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
        echo "$test: ended with status $status" >>"$log"
        f=1
    fi
    if [ "$f" -ne 0 ]; then
        cat "$log"
    else
        grep -iE '^skip|skipped:' "$log"
    fi
    echo "   $p passed, $f failed, $s skipped"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
