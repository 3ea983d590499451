#!/bin/sh
# The complete perplexity check, some minutes: 64 windows of 512 tokens of text that the models have not seen,
# for two models in two storages, against the float32 mean that golden.json records. For `make test-golden`,
# not for `make test`. BIN is where run and convert are, BUILD where scratch files may go.
set -u
cd "$(dirname "$0")/.." || exit 1
bin=$(cd "${BIN:-.}" && pwd) scratch=${BUILD:-build}/check_golden
data=../shared/data text=../shared/data/text/heldout-32769.tok
tolerance=1e-4  # correct arithmetic on fp16 inputs is within 3e-5
status=0
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

# Number behind a key of a JSON file.
number() { sed -n "s/.*\"$1\": *\\([0-9.e+-]*\\).*/\\1/p" "$2" | head -n 1; }

# check MODEL FORMAT PRUNE
check() {
    source=$data/$1 name=$1_$2
    if [ ! -r "$source/golden.json" ] || [ ! -r "$text" ]; then
        echo "skip $name: $source/golden.json or $text absent"
        return
    fi
    expected=$(number val_nll "$source/golden.json")
    nll=
    if "$bin/convert" "$source" "$scratch/$name.bin" --sp 0 --dp 0 --prune "$3" --format "$2" --force -q &&
        "$bin/run" "$scratch/$name.bin" --ppl "$text" --tokens --ppl-window 512 -q \
            --json "$scratch/$name.json"; then
        nll=$(number nll "$scratch/$name.json")
    fi
    if awk -v a="$nll" -v b="$expected" -v t="$tolerance" \
        'BEGIN { d = a - b; exit !(a != "" && b != "" && d <= t + 0 && d >= -t) }'; then
        echo "ok $name: nll $nll, expected $expected"
    else
        echo "not ok $name: nll ${nll:-missing}, expected ${expected:-missing}"
        status=1
    fi
}

mkdir -p "$scratch"
for model in demo-8M books-30M; do
    check $model dense mlp
    check $model tiled-cbc all
done
rm -rf "$scratch"
exit $status
