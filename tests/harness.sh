# What the test scripts share, sourced in the root of the repository: the programs on PATH and in $bin, $s, a scratch
# folder of their own, and t to run a test.
# shellcheck shell=sh
bin=$(cd "${BIN:-.}" && pwd) s=${BUILD:-build}/$(basename "$0" .sh).$$
mkdir -p "$s" && s=$(cd "$s" && pwd) || exit 1
trap 'rm -rf "$s"' EXIT
trap 'exit 1' HUP INT TERM
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" LC_ALL=C PATH="$bin:$PATH"
unset SPDP_ISA
failed=0

# Run a test function in a subshell that ends at the first command that fails.
t() {
    rm -rf "$s/reason" "$s/out" "$s/err" "$s"/new*
    (
        set -eux
        "$1"
    ) >"$s/trace" 2>&1 </dev/null
    case $? in
    0) echo "ok $1" ;;
    77) echo "skip $1: $(cat "$s/reason")" ;;
    *)
        echo "not ok $1"
        tail -n 20 "$s/trace" | sed 's/^/    /'
        failed=1
        ;;
    esac
}

# How the programs were built.
sanitized() { ldd "$bin/run" | grep -q -e libasan -e libtsan; }
counts_coverage() { grep -qa '\.gcda' "$bin/run"; }

skip_test() {
    echo "$1" >"$s/reason"
    exit 77
}
