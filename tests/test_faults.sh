#!/bin/sh
# What happens when the system fails: no memory, full disks, files that cannot be read or go away, signals.
# Whatever it is, a program ends with status 1 and one line that names what failed, and leaves nothing
# half-written; or, where it can do without, with status 0 and the whole result. tests/fault/fault.c makes the
# system fail, at every call one after the other. Prints "ok NAME", "not ok NAME" with a trace, or "skip NAME:
# reason" for each test. BIN is where run and convert are, BUILD where fault.so is and scratch files may go. Row
# numbers in names are those of the case list.
#
# Tests are called by name, and the words of a command need no quotes.
# shellcheck disable=SC2317,SC2086,SC2046
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
root=$PWD fault=$(dirname "$s")/tests/fault/fault.so
cd "$s" || exit 1

if sanitized || counts_coverage; then
    echo 'skip faults: a sanitizer allocates and coverage writes files by itself'
    exit 0
fi

# ---- the harness ------------------------------------------------------------------------------------------

# A command with its output in out and err; its status must be the one given.
status() {
    want=$1 got=0
    shift
    "$@" >out 2>err || got=$?
    [ "$got" -eq "$want" ]
}

# The command fails with one line that matches.
refuses() {
    pattern=$1
    shift
    status 1 "$@"
    [ "$(wc -l <err)" -eq 1 ]
    grep -q -e "$pattern" err
}

# with FAULT COMMAND...: one fault, as fault.c says it
with() {
    FAULT=$1
    shift
    env FAULT="$FAULT" LD_PRELOAD="$fault" "$@"
}

# walk FAULT COMMAND...: run a command over and over, each time with another fault; table gets a line for each
# time. Its files go to new/, its input comes from in; the file "cut" is one that may be cut.
walk() {
    FAULT_WALK=$1
    shift
    rm -rf new && mkdir new
    FAULT_WALK=$FAULT_WALK FAULT_DIR=new FAULT_CUT=cut FAULT_TABLE=table LD_PRELOAD="$fault" "$@" <in
    # The undisturbed run's line is what all is well looks like; the others go without their events' numbers.
    whole=$(sed -n '1s/^[0-9]* //p' table)
    case $whole in '0 same '*) ;; *) return 1 ;; esac
    sed -i '1d; s/^[0-9]* //' table
    [ "$(wc -l <table)" -ge 5 ]
}

# Every run of the walk has one of these outcomes, and each is that of some. A fault that does no harm is fine.
outcomes() {
    printf '^%s$\n' "$whole" "$no_threads" "$@" >patterns
    if grep -vE -f patterns table; then
        return 1
    fi
    for pattern in "$@"; do
        grep -qE -e "^$pattern\$" table
    done
}

# Outcomes: status, standard output (the same, or begun), files, lines on standard error, and those.
no_memory='1 (same|begun) none 1 [^|]*[Mm]emory[^|]*\|'
no_threads='1 (same|begun) none 2 \|libgomp: [^|]*\|'  # OpenMP's library has a line of its own
lost='1 (same|begun) none 1 (run|convert): cut: was cut short, or became unreadable, while it was in use\|'
changed='1 same none 1 convert: cut: was changed while it was in use\|'

# ---- the inputs: made once --------------------------------------------------------------------------------

# piece TEXT TYPE: an entry of a sentencepiece model
piece() { printf "\\012\\$(printf %o $((${#1} + 4)))\\012\\$(printf %o ${#1})%s\\030\\$2" "$1"; }

# repeated BYTES N: as printf takes them, over and over, up to N bytes
repeated() {
    # shellcheck disable=SC2059
    printf "$1" >once
    while [ "$(wc -c <once)" -lt "$2" ]; do
        cat once once >twice && mv twice once
    done
    head -c "$2" once
}

# A llama2.c file of shape 16:24:2:2:1:40:64, of 13 numbers whose period is none of the matrices'; and token ids.
header='\020\0\0\0\030\0\0\0\002\0\0\0\002\0\0\0\001\0\0\0\050\0\0\0\100\0\0\0'
weights='\0\0\314\075\0\0\152\274\0\0\300\075\0\0\041\275\0\0\077\274\0\0\204\074\0\0\217\275'\
'\0\0\210\075\0\0\126\275\0\0\011\075\0\0\265\274\0\0\357\074\0\0\250\275'
ids='\004\0\012\0\022\0\034\0\005\0\023\0\043\0\022\0'\
'\046\0\031\0\016\0\005\0\041\0\034\0\031\0\030\0\031\0\034\0\041\0\005\0\016\0'

make_inputs() {
    {
        piece '<unk>' 2 && piece '<s>' 3 && piece '</s>' 3 && piece "$(printf '\342\226\201')" 1
        for text in a b c d e f g h i j k l m n o p q r s t u v w x y z on up; do
            piece $text 1
        done
        printf '\022\002\030\002\032\004\030\001\040\000'  # BPE; a dummy prefix, no space removed
    } >tokenizer
    # shellcheck disable=SC2059
    { printf "$header" && repeated "$weights" 20288; } >source.bin
    repeated "$ids" 2000 >ids.tok
    convert source.bin model.bin --sp 0.5 --method magnitude --dp 0 --tokenizer tokenizer -q
    printf 'once upon\n/system be\nup \\\nand on\n/reset\n"""x\ny"""\n' >chat
    printf '{"context": "once", "continuation": " upon"}\n{"context": "up", "continuation": " on"}\n' >items
    printf 'once upon a time there was a cat that went up and on and so on and so on' >text
    cp model.bin cut
    : >in
}
[ -e "$fault" ] || { echo "not ok inputs: $fault is missing: make test builds it" && exit 1; }
t make_inputs
[ $failed -eq 0 ] || exit 1

# All that run does, and all that convert does, on any machine alike.
run_text='run model.bin -b cpu -p once -n 4 -t 0 -q'
run_chat='run model.bin -b cpu --chat --template llama2 --system be -n 4 -t 0 -j 1 -q'
run_json='run model.bin -b cpu --ppl text --json new/figures -j 1 -q'
run_score='run model.bin -b cpu --score items -j 1 -q'
calibration='-b cpu --no-tokenizer --calib ids.tok --calib-tokens 1000 -j 1 -q'
magnitude='convert source.bin new/model --tokenizer tokenizer --method magnitude --sp 0.5 --dp 0 -q'
wanda="convert source.bin new/model --method wanda --sp 0.5 --dp 0 $calibration"
thresholds="convert source.bin new/model --method magnitude --sp 0 --dp 0.5 $calibration"

# The outcome where a layer has been saved: --resume goes on from it.
resumable() {
    goes_on='after [12] of 2 layers; the same command with --resume goes on from there'
    echo "$1" | sed "s/ none 1 / kept 1 /; s/\\\\|\$/ $goes_on\\\\|/"
}

# ---- memory -----------------------------------------------------------------------------------------------

run_says_when_memory_is_short() {
    for command in "$run_text --logprobs 2 --json /dev/null" "$run_json" "$run_score"; do
        walk alloc $command
        outcomes "$no_memory"
    done
    walk alloc+ $run_text
    outcomes "$no_memory"
    cp chat in
    for fault_kind in alloc alloc+; do
        walk $fault_kind $run_chat
        outcomes "$no_memory"
    done
    : >in
}
t run_says_when_memory_is_short

# cases.md row 15.
row_15_convert_without_memory_leaves_nothing() {
    for fault_kind in alloc alloc+; do
        walk $fault_kind $magnitude
        outcomes "$no_memory"
        walk $fault_kind $wanda
        outcomes "$no_memory" "$(resumable "$no_memory")"
    done
    walk alloc $thresholds
    outcomes "$no_memory"
    walk alloc convert --info model.bin
    outcomes "$no_memory"
}
t row_15_convert_without_memory_leaves_nothing

# cases.md row 15. Each layer's state is written where memory, disk and file are short in turn.
row_15_what_is_kept_is_resumed_to_the_same_bytes() {
    mkdir new
    $wanda && mv new/model whole
    for fault_kind in alloc disk; do
        at=$(env FAULT_WALK=$fault_kind FAULT_DIR=new FAULT_TABLE=table LD_PRELOAD="$fault" $wanda </dev/null &&
            sed -n 's/ 1 same kept .*//p' table | sed -n '3p')
        status 1 with $fault_kind:$at $wanda
        [ "$(ls new)" = "$(printf 'model.partial\nmodel.partial.state')" ]
        status 0 $wanda --resume
        cmp new/model whole
        [ "$(ls new)" = model ]
        rm new/model
    done
}
t row_15_what_is_kept_is_resumed_to_the_same_bytes

# ---- disks ------------------------------------------------------------------------------------------------

# cases.md row 48. What the text is for is known to the reader: the part that was printed stays.
row_48_run_says_when_it_cannot_write() {
    for fault_kind in disk disk+; do
        for command in "$run_text" "$run_score"; do
            walk $fault_kind $command
            outcomes '1 (same|begun) none 1 run: standard output: No space left on device\|'
        done
        walk $fault_kind $run_json
        outcomes '1 same (none|same) 1 run: (new/figures|standard output): No space left on device\|'
    done
}
t row_48_run_says_when_it_cannot_write

# cases.md row 15. A state that cannot be saved is no reason to end good work.
row_15_convert_on_a_full_disk_leaves_nothing() {
    full='1 same none 1 convert: new/model: cannot be (created|written|put in place): No space left on device\|'
    done='1 same same 1 convert: standard output: No space left on device\|'
    for fault_kind in disk disk+; do
        walk $fault_kind $magnitude
        outcomes "$full" "$done"
    done
    walk disk $wanda
    outcomes "$full" "$(resumable "$full")" "$done"
}
t row_15_convert_on_a_full_disk_leaves_nothing

files_that_cannot_be_read_are_named() {
    names='(model.bin|text|items|source.bin|ids.tok|tokenizer)'
    unread="1 (same|begun) none 1 (run|convert): [^|]*$names: Input/output error\|"
    for fault_kind in input input+; do
        for command in "$run_text" "$run_json" "$run_score"; do
            walk $fault_kind $command
            outcomes "$unread"
        done
        walk $fault_kind $magnitude
        outcomes "$unread" '1 same (none|kept) 1 convert: new/model[a-z.]*: [^|]*\|'
        walk $fault_kind $wanda
        outcomes "$unread" '1 same (none|kept) 1 convert: new/model[a-z.]*: [^|]*\|' "$(resumable "$unread")"
    done
}
t files_that_cannot_be_read_are_named

short_and_interrupted_calls_change_nothing() {
    mkdir new
    for command in "$magnitude" "$wanda"; do
        $command && mv new/model whole
        status 0 with short $command
        cmp new/model whole
        rm new/model
    done
    $run_text >whole
    (printf on; sleep 0.1; printf ce) | run model.bin -b cpu -n 4 -t 0 -q >out
    cmp out whole
}
t short_and_interrupted_calls_change_nothing

# ---- files that are cut while they are in use --------------------------------------------------------------

# cases.md row 15.
row_15_a_model_that_is_cut_while_it_runs_is_named() {
    walk alloc:cut run cut -b cpu -p once -n 4 -t 0 -q
    outcomes "$lost"
    mkfifo new/in
    env run cut -b cpu --chat -n 4 -t 0 -q <new/in >out 2>err &
    exec 9>new/in
    echo once >&9
    while [ ! -s out ]; do
        sleep 0.02
    done
    truncate -s 1000 cut
    echo upon >&9
    got=0
    wait $! || got=$?
    exec 9>&-
    cp model.bin cut
    [ $got -eq 1 ]
    [ "$(cat err)" = 'run: cut: was cut short, or became unreadable, while it was in use' ]
}
t row_15_a_model_that_is_cut_while_it_runs_is_named

# cases.md row 15. Cut within a page, a file can still be read: as zeros.
row_15_a_source_that_is_cut_while_it_is_converted_is_named() {
    cp source.bin cut
    walk alloc:cut $(echo "$wanda" | sed 's/source.bin/cut/')
    outcomes "$lost" "$changed" "$(resumable "$changed")" "$(echo "$lost" | sed "s/ none / kept /")"
    cp model.bin cut
    cp -r "$root/demo" source && chmod -R u+w source
    refuses 'model.safetensors: was \(cut short\|changed\)' \
        env FAULT=disk:12:cut FAULT_CUT=source/model.safetensors LD_PRELOAD="$fault" \
        convert source new/model --method magnitude --dp 0 -q
    [ -z "$(ls new)" ]
}
t row_15_a_source_that_is_cut_while_it_is_converted_is_named

# Any other bus error is none of theirs.
a_bus_error_that_is_sent_ends_the_program_as_usual() {
    status $((128 + 7)) with alloc:20:7 $run_text  # 7: SIGBUS
    if grep -q 'in use' err; then
        return 1
    fi
}
t a_bus_error_that_is_sent_ends_the_program_as_usual

# ---- signals ----------------------------------------------------------------------------------------------

# cases.md row 15. convert ends as README says; of run's files only --json's may be left, empty.
row_15_sigterm_at_any_time_leaves_nothing() {
    ended='143 (same|begun) none 0 '
    walk alloc:15 $run_text
    outcomes "$ended"
    for command in "$magnitude" "$wanda"; do
        walk alloc:15 $command
        stopped='143 same none 1 convert: interrupted; nothing is kept\|'
        kept=$(resumable '143 same none 1 convert: interrupted\|')
        [ "$command" = "$wanda" ] || kept=$stopped
        outcomes "$ended" "$stopped" "$kept"
    done
}
t row_15_sigterm_at_any_time_leaves_nothing

# cases.md row 48. Nobody needs to read what convert says while it works.
row_48_convert_goes_on_when_its_messages_are_not_read() {
    mkdir new
    loud=$(echo "$magnitude" | sed 's/ -q$//')
    { $loud 2>&1; echo $? >got; } | true
    [ "$(cat got)" -eq 0 ]
    cmp new/model model.bin
}
t row_48_convert_goes_on_when_its_messages_are_not_read

# cases.md row 48. The first files that are opened do not become what the caller has closed.
row_48_closed_streams_are_no_files() {
    mkdir new
    for closed in '>&-' '2>&-' '<&-' '<&- >&- 2>&-'; do
        sh -c "$(echo "$magnitude" | sed 's/ -q$//') --force $closed"
        cmp new/model model.bin
    done
    refuses 'standard output: Bad file descriptor' sh -c "$run_text >&-"
    refuses 'standard input: Bad file descriptor' sh -c 'run model.bin -b cpu -n 4 -q <&-'
}
t row_48_closed_streams_are_no_files
exit $failed
