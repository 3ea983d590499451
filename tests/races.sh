#!/bin/sh
# Races between threads, in a build with clang's thread sanitizer: a conversion, a generation, a chat, and the unit
# tests named as arguments. Any report fails. BIN is where run and convert are, BUILD where scratch files may go;
# LIBARCHER is the part of clang's OpenMP that tells the sanitizer where threads synchronise.
set -u
cd "$(dirname "$0")/.." || exit 1
reports=$(cd "$BUILD" && pwd)/report
rm -f "$reports".*
trap 'cat "$reports".* 2>/dev/null' EXIT

# Whichever process finds something writes a file. What clang's OpenMP does inside, where no sanitizer was built in, is
# left out. The wider ignore_noninstrumented_modules=1 would hide what memcpy touches, even in our code.
# So are libarcher's own locks, which now and then look taken twice.
printf '%s\n' called_from_lib:libomp.so mutex:libarcher.so >"$BUILD/tsan.supp"
export TSAN_OPTIONS="suppressions=$(cd "$BUILD" && pwd)/tsan.supp log_path=$reports"
export OMP_TOOL_LIBRARIES="$LIBARCHER" OMP_WAIT_POLICY=passive SPDP_TEST_SHORT=1

# A kernel that randomises addresses by more bits than clang expects leaves the sanitizer no room.
tsan() {
    if setarch -R true 2>/dev/null; then
        setarch -R "$@"
    else
        "$@"
    fi
}

fail() {
    echo "$1" >&2
    exit 1
}

# Does the sanitizer see what it has to, and only that?
tsan "$BUILD/tests/race" || fail "a false alarm: is $LIBARCHER there?"
! tsan "$BUILD/tests/race" unordered || fail "a race was not seen"
rm -f "$reports".*

model=$BUILD/demo.bin
tsan "$BIN/convert" demo "$model" --sp 0.5 --dp 0.4 --calib-tokens 1024 -j 4 --force -q || fail "convert failed"
tsan "$BIN/run" "$model" -p "Once upon a time" -n 16 --seed 1 -j 4 -q || fail "run failed"
printf 'Tell me a story\nAnd then?\n' | tsan "$BIN/run" "$model" --chat -n 16 --seed 1 -j 4 -q ||
    fail "chat failed"
tsan tests/run.sh "$@" || exit 1
for report in "$reports".*; do
    [ ! -e "$report" ] || fail "there are reports"
done
