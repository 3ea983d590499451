#!/bin/sh
# tests/CASES says where each row of the case list is tested: "N FILE:TEST", FILE in this folder, or "N does not apply:
# WHY". Here every row is in it, and every test that it names exists, is run, and has "row N" in its name, in the
# comment above it or in the heading that it stands under. Prints "ok NAME" or "not ok NAME" for each row.
set -u
cd "$(dirname "$0")" || exit 1
rows='1 2 3 5 6 7 8 9 11 12 14 15 16 17 18 20 21 22 23 24 27 28 29 30 32 33 34 35 36 37 40 41 42 44 46 48 49 50'
failed=0

# Does the program or script call that test?
is_run() {
    case $1 in
    gpu/*) [ "$(grep -cw "$2" "$1")" -gt 1 ] ;;
    *.sh) grep -qx "t $2" "$1" ;;
    *) grep -qE "^ +(TEST|cmocka_unit_test[a-z_]*)\($2[,)]" "$1" ;;
    esac
}

# Is the test defined, with its row named?
is_named() {
    awk -v test="$2" -v row="$3" '
        function names(text) { return text ~ ("[Rr]ows? ([0-9]+(,| and| \\.\\.)? )*" row "([^0-9]|$)") }
        /^(\/\*|#) ----/ { heading = $0 }
        $0 ~ "^(static )?void " test "\\(" || $0 ~ "^" test "\\(\\) \\{" {
            found = names(comment) || names(heading) || test ~ ("row_" row "_")
        }
        { comment = /^(\/\*| \*|#)/ ? comment " " $0 : "" }
        END { exit !found }' "$1"
}

# One line of CASES, its words as arguments.
check() {
    case $2 in
    does) [ $# -gt 4 ] && [ "$3 $4" = 'not apply:' ] && return 0 ;;
    *:*)
        file=${2%%:*} test=${2#*:}
        [ $# -eq 2 ] && [ -f "$file" ] && is_run "$file" "$test" && is_named "$file" "$test" "$1" && return 0
        ;;
    esac
    echo "    $*"
    return 1
}

for row in $rows; do
    bad=$(grep "^$row " CASES | while read -r line; do
        # shellcheck disable=SC2086  # words
        check $line
    done)
    if [ -z "$bad" ] && grep -q "^$row " CASES; then
        echo "ok row_$row"
    else
        echo "not ok row_$row"
        echo "${bad:-    no line}"
        failed=1
    fi
done
unknown=$(grep -vE "^($(echo "$rows" | tr ' ' '|')) " CASES)
if [ -n "$unknown" ]; then
    echo "not ok no_other_lines"
    echo "$unknown" | sed 's/^/    /'
    failed=1
fi
exit $failed
