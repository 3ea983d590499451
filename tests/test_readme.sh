#!/bin/sh
# Every command of README.md runs: each fenced block that opens with ```sh is a script. They run one after the
# other in a tree of links to the repository, so that what they write stays out of it. Blocks that open with a
# further word are left out: ```sh install changes the machine, ```sh tests would start all this again. Prints
# "ok", "not ok" or "skip" for each block. BIN is where run and convert are, BUILD where scratch files may go.
set -u
cd "$(dirname "$0")/.." || exit 1
if [ ! -r README.md ] || [ -n "${README_RUNS:-}" ]; then
    echo "skip readme: ${README_RUNS:-README.md absent}"
    exit 0
fi
export README_RUNS='a command of README.md runs the tests'  # which must not start all over
bin=$(cd "${BIN:-.}" && pwd)
mkdir -p "${BUILD:-build}/test_readme.$$" && s=$(cd "${BUILD:-build}/test_readme.$$" && pwd) || exit 1
trap 'rm -rf "$s"' EXIT
trap 'exit 1' HUP INT TERM
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
failed=0

# Everything by link but the programs, which are newer than what they were made of: make has nothing to do.
mkdir "$s/tree" "$s/blocks"
for path in * .ci; do
    case $path in
    build | run | convert) ;;
    *) [ ! -e "$path" ] || ln -s "$PWD/$path" "$s/tree/$path" ;;
    esac
done
ln -s "$(cd "${BUILD:-build}" && pwd)" "$s/tree/build"
cp "$bin/run" "$bin/convert" "$s/tree" || exit 1

# blocks/LINE.sh for every block to run, named after the line that opens it.
awk -v to="$s/blocks" '
    /^ *```sh *$/ { file = sprintf("%s/%04d.sh", to, NR); printf "" >file; next }
    /^ *```/ { file = "" }
    file != "" { print >file }
' README.md
for block in "$s"/blocks/*.sh; do
    if [ ! -e "$block" ]; then
        echo 'not ok readme: README.md has no block of commands'
        exit 1
    fi
    name=readme_line_$(basename "$block" .sh | sed 's/^0*//')
    if (
        unset BIN BUILD MAKEFLAGS MFLAGS MAKELEVEL  # a make in the block is nobody's child
        cd "$s/tree" && exec sh -eu "$block"
    ) >"$s/log" 2>&1 </dev/null; then
        echo "ok $name"
    else
        echo "not ok $name"
        { cat "$block" && tail -n 12 "$s/log"; } | sed 's/^/    /'
        failed=1
    fi
done
exit $failed
