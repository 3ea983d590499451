# What the test scripts share: they are sourced with $s, a scratch folder of their own.
# shellcheck shell=sh
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

skip_test() {
    echo "$1" >"$s/reason"
    exit 77
}
