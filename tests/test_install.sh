#!/bin/sh
# What make install puts where, and that help, man pages and completion name the same options. Prints "ok NAME",
# "not ok NAME" with a trace, or "skip NAME: reason" for each test. BIN is where run and convert are, BUILD where
# scratch files may go.
#
# Tests are called by name, and options are words.
# shellcheck disable=SC2317,SC2086
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
export LC_ALL=C.UTF-8

needs() { command -v "$1" || skip_test "$1 is not installed"; }

# ---- the options that a program takes, and those that each text names: one a line, sorted ---------------------

source_of() { if [ "$1" = run ]; then echo run.c; else echo export/convert.c; fi; }

options_of_source() {
    {
        sed -n 's/^ *{"\([a-z0-9-]*\)", [a-z]*_argument,.*/--\1/p' "$(source_of "$1")"
        sed -n 's/.*getopt_long(argc, argv, "\([a-z:]*\)".*/\1/p' "$(source_of "$1")" | tr -d : | sed 's/./-&\n/g'
    } | grep . | sort -u
}

# Options in the forms of the command line and at the start of the lines below them.
options_of_help() {
    "$bin/$1" -h | sed -n -e "s/^\(usage:\|      \) $1 //p" -e 's/^  \(-.*\)/\1/p' | sed 's/   .*//' |
        grep -oE '(^|[ |])--?[a-z][a-z-]*' | tr -d ' |' | sort -u
}

# The line after .TP is the tag.
options_of_man() {
    sed -n '/^\.TP/{n;p;}' "man/$1.1" | sed 's/\\-/-/g; s/\\f[A-Z]//g; s/"//g' |
        grep -oE '(^| )--?[a-z][a-z-]*' | tr -d ' ' | sort
}

# What the completion offers for the words of a command line, the last of which is being typed.
completes() {
    bash -euc '
        source completion/spdp.bash
        words=("$@")
        function=$(complete -p "$1" | sed "s/.* -F \([^ ]*\) .*/\1/")
        "$function" "$1" "${words[-1]}" "${words[-2]}"
        [ "${#COMPREPLY[@]}" -eq 0 ] || printf "%s\n" "${COMPREPLY[@]}"
    ' bash "$@" | sort
}

options_of_completion() { completes "spdp-$1" -; }

# ---- tests -------------------------------------------------------------------------------------------------

install_and_uninstall() {
    needs make
    # The programs are built, whatever with: -o all leaves them as they are.
    unset MAKEFLAGS MFLAGS MAKELEVEL
    mkdir "$s/staged"
    make -s -o all install BIN="$bin" DESTDIR="$s/staged" PREFIX=/prefix
    (cd "$s/staged/prefix" && find . ! -type d | sort) >"$s/installed"
    cat >"$s/expected" <<-end
	./bin/spdp-convert
	./bin/spdp-run
	./share/bash-completion/completions/spdp-convert
	./share/bash-completion/completions/spdp-run
	./share/man/man1/spdp-convert.1
	./share/man/man1/spdp-run.1
	end
    diff "$s/expected" "$s/installed"
    for program in run convert; do
        "$s/staged/prefix/bin/spdp-$program" --version | grep "^$program (spdp) ."
        cmp "man/$program.1" "$s/staged/prefix/share/man/man1/spdp-$program.1"
        cmp completion/spdp.bash "$s/staged/prefix/share/bash-completion/completions/spdp-$program"
    done
    make -s uninstall BIN="$bin" DESTDIR="$s/staged" PREFIX=/prefix
    [ -z "$(find "$s/staged" ! -type d)" ]
}
t install_and_uninstall

man_pages_are_right() {
    needs groff
    for program in run convert; do
        groff -man -ww -Tutf8 "man/$program.1" >"$s/page" 2>"$s/warnings"
        cat "$s/warnings"
        [ ! -s "$s/warnings" ]
        grep -q "spdp-$program" "$s/page"
    done
}
t man_pages_are_right

help_fits_a_screen() {
    for program in run convert; do
        "$bin/$program" --help >"$s/help"
        [ "$(wc -l <"$s/help")" -le 50 ]
        awk 'length > 100 { print; long = 1 } END { exit long }' "$s/help"
    done
}
t help_fits_a_screen

help_man_page_and_completion_name_every_option() {
    for program in run convert; do
        options_of_source "$program" >"$s/source"
        [ "$(wc -l <"$s/source")" -gt 15 ]
        grep -vx -e --help "$s/source" >"$s/in_help"  # the help says -h and leaves it there
        options_of_help "$program" | diff "$s/in_help" -
        options_of_man "$program" | diff "$s/source" -
        if command -v bash; then
            options_of_completion "$program" | diff "$s/source" -
        fi
    done
}
t help_man_page_and_completion_name_every_option

# An option that takes a value is not followed by options, one that takes none is; the last gives each its turn.
completion_knows_which_options_take_values() {
    needs bash
    for program in run convert; do
        sed -n 's/^ *{"\([a-z0-9-]*\)", \([a-z]*\)_argument,.*/--\1 \2/p' "$(source_of "$program")" >"$s/kinds"
        sed -n 's/.*getopt_long(argc, argv, ":\([a-z:]*\)".*/\1/p' "$(source_of "$program")" |
            grep -o '[a-z]:' | sed 's/\(.\):/-\1 required/' >>"$s/kinds"
        [ "$(grep -c required "$s/kinds")" -gt 8 ]
        while read -r option kind; do
            offered=$(completes "spdp-$program" "$option" - | wc -l)
            case $kind in
            required) [ "$offered" -eq 0 ] ;;
            no) [ "$offered" -gt 15 ] ;;
            esac
        done <"$s/kinds"
    done
}
t completion_knows_which_options_take_values

# The names that complete a value are those that the program takes.
completed_values_are_accepted() {
    needs bash
    for words in 'run --template' 'run --prune' 'run -b' 'convert --method' 'convert --format' 'convert --prune' \
        'convert -b'; do
        program=${words% *} option=${words#* }
        completes "spdp-$program" "$option" '' >"$s/values"
        [ "$(wc -l <"$s/values")" -ge 2 ]
        while read -r value; do
            # Bad usage comes after it, and is the only complaint.
            "$bin/$program" "$option" "$value" --no-such-option 2>&1 | grep 'unknown option --no-such-option'
        done <"$s/values"
    done
    [ "$(completes spdp-run --template z)" = zephyr ]
    [ "$(completes spdp-convert --synthetic llama2-1)" = llama2-13b ]
    [ -z "$(completes spdp-run mod)" ]
}
t completed_values_are_accepted

exit $failed
