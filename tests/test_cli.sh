#!/bin/sh
# Both programs as a user meets them. Prints "ok NAME", "not ok NAME" with a trace, or "skip NAME: reason" for
# each test. BIN is where run and convert are, BUILD where scratch files may go. Row numbers in names are
# those of the case list.
#
# Tests are called by name, and the words of a loop need no quotes.
# shellcheck disable=SC2317,SC2086
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/harness.sh
script=$PWD/tests/test_cli.sh stories=$PWD/../shared/data/stories260K

# ---- the harness ------------------------------------------------------------------------------------------

# A command with its output in $s/out and $s/err; its status must be the one given.
status() {
    want=$1 got=0
    shift
    "$@" >"$s/out" 2>"$s/err" || got=$?
    [ "$got" -eq "$want" ]
}

# The command fails with that status, says why in one line that matches, and prints nothing on stdout.
refuses() {
    want=$1 pattern=$2
    shift 2
    status "$want" "$@"
    [ ! -s "$s/out" ]
    [ "$(wc -l <"$s/err")" -eq 1 ]
    grep -q -e "$pattern" "$s/err"
}

# refuses STATUS for every line "PATTERN|WORDS" of standard input: the command given, then those words.
refuses_each() {
    want_each=$1
    shift
    while IFS='|' read -r pattern_each words; do
        refuses "$want_each" "$pattern_each" "$@" $words </dev/null
    done
}

succeeds() { status 0 "$@"; }
lacks() { if grep -q -e "$1" "$2"; then return 1; fi; }
differ() { if cmp -s "$1" "$2"; then return 1; fi; }
same_number() { awk -v a="$1" -v b="$2" -v t="$3" 'BEGIN { d = a - b; exit !(d <= t + 0 && d >= -t) }'; }

# Value of a key in a line of JSON; strings keep their quotes.
json() { sed -n "s/.*\"$1\":\\([^,}]*\\)[,}].*/\\1/p" "$2"; }

# The text that greedy decoding gives for arguments, in $s/NAME.
greedy() {
    name=$1
    shift
    run "$@" -t 0 -q >"$s/$name"
}

# Nothing was made under that name, nor beside it.
absent() { [ -z "$(find "$s" -name "$1*")" ]; }

# ---- the inputs: made once --------------------------------------------------------------------------------

once='Once upon a time'
# Its ids with BOS, u16, and what the demo says next: ids and text.
once_bytes='\001\000\253\015\154\002\005\001\051\002'
next_ids='4044 262 1334 313 362 2374 297 262 '
next_text=', the sun was shining in the sky, and the moon was shining in the moonlight.'

# Without calibration, which takes a while.
plain='--method magnitude --dp 0'

make_inputs() {
    convert demo "$s/dense.bin" --sp 0 --format dense -q
    convert demo "$s/half.bin" --sp 0.5 $plain -q
    convert demo "$s/ids.bin" --sp 0 --format dense --no-tokenizer -q
    printf '%s' "$once" >"$s/once.txt"
    # shellcheck disable=SC2059  # the bytes are a format
    printf "$once_bytes" >"$s/once.tok"
    printf '\001\000\005\000' >"$s/two.tok"
    greedy once.out "$s/dense.bin" -p "$once" -n 64
}
t make_inputs
[ $failed -eq 0 ] || exit 1

# A copy of the demo's directory, linked but for config.json.
copy_demo() {
    mkdir -p "$1"
    cp demo/config.json "$1/config.json"
    chmod u+w "$1/config.json"
    ln -s "$PWD/demo/model.safetensors" "$PWD/demo/tokenizer.model" "$1"
}

# Write bytes (a printf format) into a file at an offset.
patch() {
    # shellcheck disable=SC2059
    printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc 2>/dev/null
}

# ---- help -------------------------------------------------------------------------------------------------

help_and_version() {
    for program in run convert; do
        for option in -h --help; do
            succeeds "$program" "$option"
            grep -q "^usage: $program" "$s/out"
            [ ! -s "$s/err" ]
        done
        succeeds "$program" --version
        grep -q "^$program (spdp) ." "$s/out"
        [ "$(wc -l <"$s/out")" -eq 1 ]
        [ ! -s "$s/err" ]
    done
}
t help_and_version

# An option that the help names and no line below uses is not tested.
every_option_of_the_help_is_used_here() {
    for program in run convert; do
        "$program" -h >"$s/help"
        grep -oE '(^|[ |])--?[a-z][a-z-]*' "$s/help" | tr -d ' |' | sort -u >"$s/options"
        [ "$(wc -l <"$s/options")" -gt 10 ]
        while read -r option; do
            grep -qE -e "(^|[^a-z-])$option([^a-z-]|\$)" "$script"
        done <"$s/options"
    done
}
t every_option_of_the_help_is_used_here

# ---- run: text --------------------------------------------------------------------------------------------

the_main_job_prints_text_and_its_speed() {
    succeeds convert demo "$s/main.bin" --sp 0.5 --calib-tokens 2000
    [ ! -s "$s/out" ]
    grep -q '^sparsity *0\.5000' "$s/err"
    grep -q '^size .*% of dense' "$s/err"
    grep -q '^done .*peak memory' "$s/err"
    succeeds run "$s/main.bin" -p "$once"
    [ -s "$s/out" ]
    grep -q 'TPOT [0-9.]* ms' "$s/err"
}
t the_main_job_prints_text_and_its_speed

# cases.md row 48.
row_48_stdout_has_the_generated_text_alone() {
    succeeds run "$s/dense.bin" -p "$once" -n 64 -t 0
    [ "$(head -c ${#next_text} "$s/out")" = "$next_text" ]
    cmp "$s/out" "$s/once.out"
    for line in device model prefill decode reads total; do
        grep -q "^$line " "$s/err"
        lacks "^$line " "$s/out"
    done
    lacks "$once" "$s/out"
}
t row_48_stdout_has_the_generated_text_alone

# cases.md row 48.
row_48_q_is_silent_and_v_says_more() {
    succeeds run "$s/dense.bin" -p "$once" -n 64 -t 0 -q
    cmp "$s/out" "$s/once.out"
    [ ! -s "$s/err" ]
    succeeds run "$s/dense.bin" -p "$once" -n 4 -t 0 -v
    grep -q '^memory .*weights .*KV ' "$s/err"
    succeeds convert demo "$s/quiet.bin" --calib-tokens 1000 -q
    [ ! -s "$s/out" ] && [ ! -s "$s/err" ]
}
t row_48_q_is_silent_and_v_says_more

# The dense demo with a context that takes many seconds to fill: what has to happen before an answer's end does.
make_endless() {
    [ ! -e "$s/endless.bin" ] || return 0
    copy_demo "$s/endless"
    sed 's/"max_position_embeddings": 512/"max_position_embeddings": 16384/' demo/config.json >"$s/endless/config.json"
    differ demo/config.json "$s/endless/config.json"
    convert "$s/endless" "$s/endless.bin" --sp 0 --format dense -q
}

# cases.md row 48.
row_48_a_reader_that_leaves_ends_the_run_quietly() {
    make_endless
    { run "$s/endless.bin" -p "$once" -c 16384 -n -1 -t 0 --ignore-eos -q 2>"$s/err" || echo $? >"$s/status"; } |
        head -c 1 >"$s/out"
    [ "$(cat "$s/out")" = , ]
    [ ! -s "$s/err" ]
    [ -s "$s/status" ]
}
t row_48_a_reader_that_leaves_ends_the_run_quietly

# cases.md row 48.
row_48_output_that_cannot_be_written_is_a_failure() {
    [ -w /dev/full ] || skip_test 'no /dev/full'
    full='exec "$@" >/dev/full'
    refuses 1 'standard output: No space left' sh -c "$full" sh run "$s/dense.bin" -p "$once" -n 4 -q
    refuses 1 'standard output: No space left' sh -c "$full" sh convert --info "$s/dense.bin"
    refuses 1 '/dev/full' run "$s/dense.bin" -p "$once" -n 0 -q --json /dev/full
}
t row_48_output_that_cannot_be_written_is_a_failure

# cases.md row 48. Beyond ulimit -f a process gets a signal, which must not end it before it has said why.
row_48_a_full_disk_is_a_failure_of_run() {
    ! counts_coverage || skip_test 'coverage is written to files of its own'
    status 1 sh -c 'ulimit -f 1 && exec "$@"' sh run "$s/dense.bin" -p "$once" -n 400 -t 0 --ignore-eos -q
    grep -q 'standard output: File too large' "$s/err"
    [ "$(wc -l <"$s/err")" -eq 1 ]
}
t row_48_a_full_disk_is_a_failure_of_run

# cases.md row 36: the same figures to the last bit, every time, whatever the threads.
row_36_the_last_logits_have_a_hash() {
    for n in 1 2; do
        succeeds run "$s/dense.bin" -p "$once" -n 12 -t 0 -v -b cpu -j $n
        sed -n 's/^logits *\([0-9a-f]\{16\}\), hash of the last$/\1/p' "$s/err" >"$s/hash.$n"
    done
    [ -s "$s/hash.1" ]
    cmp "$s/hash.1" "$s/hash.2"
    run "$s/dense.bin" -p "$once" -n 12 -t 0 -q -b cpu --json "$s/figures" >"$s/out"
    [ "$(json logits_hash "$s/figures")" = "\"$(cat "$s/hash.1")\"" ]
    run "$s/dense.bin" -p "$once" -n 13 -t 0 -q -b cpu --json "$s/figures" >"$s/out"
    [ "$(json logits_hash "$s/figures")" != "\"$(cat "$s/hash.1")\"" ]
}
t row_36_the_last_logits_have_a_hash

a_seed_gives_the_same_bytes() {
    for threads in 2 2 1; do
        run "$s/half.bin" -p "$once" -n 40 -t 1.1 --top-p 0.95 --seed 7 -q -j $threads >"$s/seed.$threads"
        [ ! -e "$s/seed" ] || cmp "$s/seed" "$s/seed.$threads"
        mv "$s/seed.$threads" "$s/seed"
    done
    run "$s/half.bin" -p "$once" -n 40 -t 1.1 --top-p 0.95 --seed 8 -q >"$s/other"
    differ "$s/seed" "$s/other"
    succeeds run "$s/half.bin" -p "$once" -n 40 -t 1.1 --top-p 0.95
    seed=$(sed -n 's/.*seed \([0-9]*\),.*/\1/p' "$s/err")
    cp "$s/out" "$s/clock"
    run "$s/half.bin" -p "$once" -n 40 -t 1.1 --top-p 0.95 --seed "$seed" -q >"$s/out"
    cmp "$s/clock" "$s/out"
}
t a_seed_gives_the_same_bytes

# cases.md row 37.
row_37_narrow_sampling_is_greedy() {
    for narrow in '-t 0' '-t 1e-8' '--top-k 1' '--top-p 1e-6' '-t 0 --top-k 5 --top-p 0.5'; do
        run "$s/dense.bin" -p "$once" -n 64 --seed 3 -q $narrow >"$s/out"
        cmp "$s/out" "$s/once.out"
    done
}
t row_37_narrow_sampling_is_greedy

# cases.md row 37.
row_37_a_number_that_is_not_finite_stops_the_run() {
    cp "$s/dense.bin" "$s/nan.bin"
    chmod u+w "$s/nan.bin"
    patch "$s/nan.bin" $((4096 + 512)) '\000\176'  # first weight of BOS's row of the embedding
    refuses 1 'attention input of layer 0' run "$s/nan.bin" -p "$once" -q
    printf '%s %s' "$once" "$once" >"$s/twice.txt"
    patch "$s/nan.bin" $((4096 + 2 * 256 * 553)) '\000\176'
    refuses 1 'not finite' run "$s/nan.bin" --ppl "$s/twice.txt" -q
}
t row_37_a_number_that_is_not_finite_stops_the_run

# ---- run: prompts -----------------------------------------------------------------------------------------

a_prompt_is_the_same_from_p_f_and_stdin() {
    greedy from_f "$s/dense.bin" -f "$s/once.txt" -n 64
    greedy from_stdin "$s/dense.bin" -n 64 <"$s/once.txt"
    cmp "$s/from_f" "$s/once.out"
    cmp "$s/from_stdin" "$s/once.out"
}
t a_prompt_is_the_same_from_p_f_and_stdin

several_prompts_are_answered_one_after_the_other() {
    greedy both "$s/dense.bin" -p "$once" -p 'The old man' -n 64
    greedy old "$s/dense.bin" -p 'The old man' -n 64
    { cat "$s/once.out" && echo && cat "$s/old"; } >"$s/expected"
    cmp "$s/both" "$s/expected"
}
t several_prompts_are_answered_one_after_the_other

# cases.md row 3: the prompt is BOS alone.
empty_input_starts_from_bos() {
    greedy empty "$s/dense.bin" -p '' -n 8
    grep -q '^CHAPTER' "$s/empty"
    greedy nothing "$s/dense.bin" -n 8 </dev/null
    cmp "$s/empty" "$s/nothing"
}
t empty_input_starts_from_bos

# The whole input counts, and whatever is in it is text.
prefill_tokens() {
    run "$s/dense.bin" -n 0 --json "$s/figures" -q "$@"
    json prefill_tokens "$s/figures"
}

# cases.md row 6.
stdin_with_nul_and_invalid_bytes_is_text() {
    printf 'ab\000\377\303c' >"$s/bytes"
    succeeds run "$s/dense.bin" -n 4 -t 0 -q <"$s/bytes"
    short=$(printf 'ab' | prefill_tokens)
    long=$(prefill_tokens <"$s/bytes")
    from_file=$(prefill_tokens -f "$s/bytes")
    [ "$long" -gt "$short" ]
    [ "$long" -eq "$from_file" ]
    printf 'a\377\303c' >"$s/bytes"  # an argument holds any byte but NUL
    [ "$(prefill_tokens -p "$(cat "$s/bytes")")" -eq "$(prefill_tokens -f "$s/bytes")" ]
}
t stdin_with_nul_and_invalid_bytes_is_text

e_expands_escapes() {
    printf 'a\nb A\t\\ "c\\q' >"$s/expanded"
    greedy from_f "$s/dense.bin" -f "$s/expanded" -n 24
    greedy from_e "$s/dense.bin" -e -p 'a\nb \x41\t\\ \"c\q' -n 24
    cmp "$s/from_f" "$s/from_e"
    [ "$(prefill_tokens -p 'a\nb\n')" -gt "$(prefill_tokens -e -p 'a\nb\n')" ]
}
t e_expands_escapes

# cases.md rows 5 and 42.
row_5_control_tokens_in_a_prompt_are_text() {
    succeeds run "$s/dense.bin" -p '<s>Hello</s>' -n 1 -t 0
    grep -q '^hint .*<s>' "$s/err"
    [ "$(prefill_tokens -p '<s>')" -gt 2 ]
    [ "$(prefill_tokens -p '</s>')" -gt 2 ]
}
t row_5_control_tokens_in_a_prompt_are_text

# cases.md row 46.
row_46_n_counts_new_tokens() {
    twenty='one two three four five six seven eight nine ten eleven twelve'
    for n in 5 1 0; do
        succeeds run "$s/dense.bin" -p "$twenty" -n $n --ignore-eos -q --json "$s/figures"
        [ "$(json decode_tokens "$s/figures")" -eq $n ]
        [ "$(json stop_reason "$s/figures")" = '"length"' ]
        [ "$(json prefill_tokens "$s/figures")" -ge 12 ]
    done
    [ ! -s "$s/out" ]
    succeeds run "$s/dense.bin" -p "$once" -n -1 -c 32 --ignore-eos -q --json "$s/figures"
    [ "$(json decode_tokens "$s/figures")" -eq 27 ]
    [ "$(json stop_reason "$s/figures")" = '"context"' ]
}
t row_46_n_counts_new_tokens

# cases.md row 46.
row_46_a_prompt_that_fills_the_context_says_so() {
    succeeds run "$s/dense.bin" -p "$once" -c 5
    [ ! -s "$s/out" ]
    grep -q 'stop: context' "$s/err"
    status 2 run "$s/dense.bin" -p "$once" -c 4 -q
    [ ! -s "$s/out" ]
    grep -q '5.*4' "$s/err"
}
t row_46_a_prompt_that_fills_the_context_says_so

# cases.md row 49.
row_49_no_time_per_token_for_fewer_than_two() {
    for n in 0 1; do
        succeeds run "$s/dense.bin" -p "$once" -n $n -t 0 --json "$s/figures"
        grep -q 'TPOT n/a' "$s/err"
        [ "$(json tpot_ms "$s/figures")" = null ]
        [ "$(json decode_tok_s "$s/figures")" = null ]
    done
    succeeds run "$s/dense.bin" -p "$once" -n 9 -t 0 -q --json "$s/figures"
    tpot=$(json tpot_ms "$s/figures")
    same_number "$(json decode_tok_s "$s/figures")" "$(awk "BEGIN { print 1000 / $tpot }")" 0.1
    prefill_rate=$(awk "BEGIN { print 5000 / $(json ttft_ms "$s/figures") }")
    same_number "$(json prefill_tok_s "$s/figures")" "$prefill_rate" 0.1
}
t row_49_no_time_per_token_for_fewer_than_two

# ---- run: where the text ends -----------------------------------------------------------------------------

# cases.md row 40.
row_40_every_eos_id_ends_the_text() {
    copy_demo "$s/new"
    sed 's/"eos_token_id": 2/"eos_token_id": [2, 4044]/' demo/config.json >"$s/new/config.json"
    convert "$s/new" "$s/eos.bin" --sp 0 --format dense -q
    succeeds run "$s/eos.bin" -p "$once" -n 16 -t 0 -q --json "$s/figures"
    [ ! -s "$s/out" ]
    [ "$(json stop_reason "$s/figures")" = '"eos"' ]
    [ "$(json decode_tokens "$s/figures")" -eq 1 ]
    succeeds run "$s/eos.bin" -p "$once" -n 64 -t 0 -q --ignore-eos --json "$s/figures"
    [ "$(json decode_tokens "$s/figures")" -eq 64 ]
    cmp "$s/out" "$s/once.out"
}
t row_40_every_eos_id_ends_the_text

a_stop_string_ends_the_text_and_is_not_printed() {
    succeeds run "$s/dense.bin" -p "$once" -n 64 -t 0 --stop 'ining in the moon' --json "$s/figures" -q
    printf '%s' ', the sun was shining in the sky, and the moon was sh' | cmp - "$s/out"
    [ "$(json stop_reason "$s/figures")" = '"stop"' ]
    greedy out "$s/dense.bin" -p "$once" -n 64 --stop 'no such text' --stop ' sky' --stop 'moon'
    printf '%s' ', the sun was shining in the' | cmp - "$s/out"
    greedy out "$s/dense.bin" -p "$once" -n 64 --stop 'moonlit'
    cmp "$s/out" "$s/once.out"
}
t a_stop_string_ends_the_text_and_is_not_printed

# ---- run: token ids ---------------------------------------------------------------------------------------

tokens_go_in_and_come_out() {
    greedy ids "$s/ids.bin" -n 8 --tokens -f "$s/once.tok"
    [ "$(cat "$s/ids"; echo .)" = "$next_ids." ]
    greedy ids "$s/ids.bin" -n 8 --tokens <"$s/once.tok"
    [ "$(cat "$s/ids"; echo .)" = "$next_ids." ]
    greedy text "$s/dense.bin" -n 64 --tokens -f "$s/once.tok"
    cmp "$s/text" "$s/once.out"
}
t tokens_go_in_and_come_out

wrong_token_input_is_refused() {
    refuses 2 'no tokenizer' run "$s/ids.bin" -p "$once"
    refuses 2 '--stop' run "$s/ids.bin" --stop x --tokens -f "$s/once.tok"
    refuses 2 '--tokens' run "$s/ids.bin" --tokens -p "$once"
    printf '\001\000\001' >"$s/odd.tok"
    refuses 1 'odd.tok: 3 bytes' run "$s/ids.bin" --tokens -f "$s/odd.tok" -q
    printf '\001\000\000\020' >"$s/large.tok"
    refuses 1 'large.tok: id 4096' run "$s/ids.bin" --tokens -f "$s/large.tok" -q
    : >"$s/empty.tok"
    status 2 run "$s/ids.bin" --tokens -f "$s/empty.tok" -q
    [ ! -s "$s/out" ]
}
t wrong_token_input_is_refused

# ---- run: perplexity --------------------------------------------------------------------------------------

perplexity_of_text_equals_that_of_its_ids() {
    tail -c +3 "$s/once.tok" >"$s/plain.tok"  # no BOS is inserted
    succeeds run "$s/dense.bin" --ppl "$s/once.txt" --json "$s/text.json"
    [ ! -s "$s/out" ]
    grep -q '^protocol .*1 windows of 512, stride 512.*no BOS.*3 tokens scored' "$s/err"
    grep -q '^sparsity ' "$s/err"
    grep -q '^nll .*+-' "$s/err"
    succeeds run "$s/ids.bin" --ppl "$s/plain.tok" --tokens --json "$s/ids.json" -q
    for key in nll nll_stderr perplexity; do
        value=$(json $key "$s/text.json")
        [ "$value" = "$(json $key "$s/ids.json")" ]
        same_number "$value" 0 1e9
    done
    nll=$(json nll "$s/text.json")
    same_number "$(json perplexity "$s/text.json")" "$(awk "BEGIN { print exp($nll) }")" 0.01
}
t perplexity_of_text_equals_that_of_its_ids

perplexity_follows_the_protocol_asked_for() {
    for _ in 1 2 3 4 5 6 7 8; do
        printf '%s there was a king who had three sons and a garden. ' "$once"
    done >"$s/king.txt"
    succeeds run "$s/dense.bin" --ppl "$s/king.txt" --ppl-window 64 --ppl-stride 32 --dense-prefix 8 \
        --ppl-tokens 100
    grep -q '3 windows of 64, stride 32, prefix 8 .* 91 tokens scored' "$s/err"
    refuses 2 'window of 600\|context of 600' run "$s/dense.bin" --ppl "$s/king.txt" --ppl-window 600 -q
    refuses 2 'stride of 65' run "$s/dense.bin" --ppl "$s/king.txt" --ppl-window 64 --ppl-stride 65 -q
    refuses 2 'prefix of 64' run "$s/dense.bin" --ppl "$s/king.txt" --ppl-window 64 --dense-prefix 64 -q
    : >"$s/empty.txt"
    refuses 2 'too few' run "$s/dense.bin" --ppl "$s/empty.txt" -q
}
t perplexity_follows_the_protocol_asked_for

# What a run reads, and a model, is not written over; what was there stays until there is a line.
json_spares_what_is_read() {
    for read in dense.bin once.txt half.bin; do
        cp "$s/$read" "$s/kept"
        refuses 2 "--json $s/$read: is" run "$s/dense.bin" --ppl "$s/once.txt" -q --json "$s/$read"
        cmp "$s/kept" "$s/$read"
    done
    echo before >"$s/figures"
    refuses 2 'too few' run "$s/dense.bin" --ppl "$s/empty.txt" -q --json "$s/figures"
    [ "$(cat "$s/figures")" = before ]
    run "$s/dense.bin" --ppl "$s/once.txt" -q --json "$s/figures"
    [ "$(wc -l <"$s/figures")" -eq 1 ]
}
t json_spares_what_is_read

row_22_models_are_compared_on_a_text() {
    succeeds run "$s/dense.bin" "$s/half.bin" --ppl "$s/king.txt" --ppl-tokens 100 --json "$s/both"
    [ "$(grep -o '"model":"[^"]*"' "$s/both" | tr '\n' ' ')" = "\"model\":\"$s/dense.bin\" \"model\":\"$s/half.bin\" " ]
    for name in dense half; do
        run "$s/$name.bin" --ppl "$s/king.txt" --ppl-tokens 100 -q --json "$s/$name.ppl"
        ppl=$(json perplexity "$s/$name.ppl")
        grep -qF "\"perplexity\":$ppl," "$s/both"
        grep -qE "^ *$(printf %.4f "$ppl") .* $s/$name.bin\$" "$s/err"
    done
    grep -qE '^ *ppl +to first +nll' "$s/err"
    grep -qE "\+0\.00 % .* $s/dense.bin" "$s/err"
    lacks 'not comparable' "$s/err"
    refuses 1 "$s/none.bin: No such file" run "$s/dense.bin" "$s/none.bin" --ppl "$s/king.txt" -q
    refuses 2 'more than one MODEL, which only --ppl takes' run "$s/dense.bin" "$s/half.bin" -p "$once"
}
t row_22_models_are_compared_on_a_text

# ---- run: figures -----------------------------------------------------------------------------------------

keys='backend bytes_per_token ceiling_gb_s decode_tok_s decode_tokens device dp_asked dp_reached gb_s
joules_per_token logits_hash logprobs model nll nll_stderr overlap overlap_independent overlap_worst perplexity
prefill_tok_s prefill_tokens seed sp stop_reason total tpot_median_ms tpot_ms tpot_p99_ms ttft_ms'

# has_keys FILE NULLS: one line of JSON with every key, null exactly where listed.
has_keys() {
    [ "$(wc -l <"$1")" -eq 1 ]
    grep -oE '"[a-z_0-9]+":' "$1" | tr -d '":' | sort >"$s/keys"
    printf '%s\n' $keys | cmp - "$s/keys"
    grep -oE '"[a-z_0-9]+":null' "$1" | sed 's/"//g; s/:null//' | sort >"$s/nulls"
    printf '%s\n' $2 | sort | cmp - "$s/nulls"
}

json_has_every_key_and_null_where_there_is_no_figure() {
    run "$s/half.bin" -p "$once" -n 8 --seed 18446744073709551615 -q -b cpu --json "$s/figures" >"$s/out"
    has_keys "$s/figures" 'ceiling_gb_s joules_per_token logprobs nll nll_stderr
        overlap overlap_independent overlap_worst perplexity'
    [ "$(json seed "$s/figures")" = 18446744073709551615 ]
    [ "$(json backend "$s/figures")" = '"cpu"' ]
    same_number "$(json sp "$s/figures")" 0.5 1e-4
    [ "$(json dp_asked "$s/figures")" = 0 ]
    run "$s/dense.bin" -p "$once" -n 1 -q --json "$s/figures" >"$s/out"
    has_keys "$s/figures" 'bytes_per_token ceiling_gb_s decode_tok_s dp_reached gb_s joules_per_token logprobs nll
        nll_stderr overlap overlap_independent overlap_worst perplexity total tpot_median_ms tpot_ms tpot_p99_ms'
    run "$s/dense.bin" --ppl "$s/once.txt" -q --json "$s/figures"
    has_keys "$s/figures" 'bytes_per_token ceiling_gb_s decode_tok_s decode_tokens dp_reached gb_s
        joules_per_token logits_hash logprobs overlap overlap_independent overlap_worst prefill_tok_s prefill_tokens
        seed stop_reason total tpot_median_ms tpot_ms tpot_p99_ms ttft_ms'
}
t json_has_every_key_and_null_where_there_is_no_figure

json_dash_is_alone_on_stderr() {
    succeeds run "$s/dense.bin" -p "$once" -n 64 -t 0 -v --json -
    cmp "$s/out" "$s/once.out"
    has_keys "$s/err" 'ceiling_gb_s dp_reached joules_per_token logprobs nll nll_stderr
        overlap overlap_independent overlap_worst perplexity total'
    succeeds run "$s/dense.bin" -p "$once" -p "$once" -n 2 --json -
    [ "$(grep -c '^{.*}$' "$s/err")" -eq 2 ]
    [ "$(wc -l <"$s/err")" -eq 2 ]
}
t json_dash_is_alone_on_stderr

# ---- run: machine -----------------------------------------------------------------------------------------

# cases.md row 34.
every_instruction_set_gives_the_text_or_says_why_not() {
    for isa in portable avx2 avx512 avx512vbmi2; do
        got=0
        env SPDP_ISA=$isa run "$s/dense.bin" -p "$once" -n 16 -t 0 -b cpu >"$s/out" 2>"$s/err" || got=$?
        if [ $got -eq 0 ]; then
            grep -q "^device .*$isa\$" "$s/err"
            grep -q "^${next_text%% sky*}" "$s/out"
        else
            [ $got -eq 2 ] && [ $isa != portable ] && [ "$(wc -l <"$s/err")" -eq 1 ]
            grep -q "$isa" "$s/err"
        fi
    done
    refuses 2 'mmx.*portable' env SPDP_ISA=mmx run "$s/dense.bin" -p "$once" -b cpu
}
t every_instruction_set_gives_the_text_or_says_why_not

# cases.md row 34. Where there is no CUDA, or no device to be seen, asking for it says so; auto does without.
every_backend_gives_the_text_or_says_why_not() {
    for backend in auto cpu cuda; do
        got=0
        run "$s/dense.bin" -p "$once" -n 24 -t 0 -q -b $backend --device 0 --dp 0 >"$s/out" 2>"$s/err" ||
            got=$?
        if [ $got -eq 0 ]; then
            grep -q "^$next_text" "$s/out"
        else
            [ $backend = cuda ] && [ ! -s "$s/out" ] && [ "$(wc -l <"$s/err")" -eq 1 ]
            grep -q CUDA "$s/err"
        fi
    done
    got=0
    env CUDA_VISIBLE_DEVICES= run "$s/dense.bin" -p "$once" -b cuda -q >"$s/out" 2>"$s/err" || got=$?
    [ $got -ne 0 ] && [ ! -s "$s/out" ] && [ "$(wc -l <"$s/err")" -eq 1 ]
    grep -q CUDA "$s/err"
    succeeds env CUDA_VISIBLE_DEVICES= run "$s/dense.bin" -p "$once" -n 64 -t 0
    cmp "$s/out" "$s/once.out"
    grep -q '^device .*CPU' "$s/err"
}
t every_backend_gives_the_text_or_says_why_not

# cases.md row 35.
row_35_a_long_context_is_not_allocated_unasked() {
    convert --synthetic 256:256:4:4:4:300:262144 "$s/long.bin" --sp 0.5 --dp 0 -q
    succeeds run "$s/long.bin" --tokens -f "$s/two.tok" -n 1 -v
    grep -q '^memory .*KV 16.8 MB' "$s/err"  # 4096 positions of 4 x 4 layers x 256
    ! sanitized || skip_test 'a sanitizer needs the address space that is limited here'
    refuses 1 'context of 262144 needs .*KV 1.07 GB.* are free: -c [0-9]* would fit' sh -c 'ulimit -v 800000 && exec "$@"' sh \
        run "$s/long.bin" --tokens -f "$s/two.tok" -n 1 -q -b cpu -j 1 -c 262144
}
t row_35_a_long_context_is_not_allocated_unasked

# ---- run: random weights ------------------------------------------------------------------------------------

random_weights_run_without_a_file() {
    shape=64:160:2:4:2:300:96
    succeeds run --synthetic $shape --sp 0.5 --prune all --dp 0.5 --prompt-tokens 20 -n 30 -v -b cpu --json "$s/figures"
    [ ! -s "$s/out" ]
    grep -q '^memory *plan: weights .* + KV 24.6 kB + scratch .* = .* free$' "$s/err"
    grep -q "^model *$shape, .*, 5[01]\.[0-9] % sparse; made in\|^model *$shape, .*, 49\.[0-9] % sparse; made in" "$s/err"
    grep -q '^ *attention output .*of inputs (50 % asked)' "$s/err"
    [ "$(json prefill_tokens "$s/figures")" = 20 ]
    [ "$(json decode_tokens "$s/figures")" = 30 ]
    [ "$(json stop_reason "$s/figures")" = '"length"' ]
    [ "$(json seed "$s/figures")" = 0 ]
    same_number "$(json sp "$s/figures")" 0.5 0.01
    same_number "$(json dp_reached "$s/figures")" 0.5 0.03
    # Dense where nothing is removed; a context longer than the shape's; the MLP alone unless told otherwise.
    succeeds run --synthetic $shape --sp 0 -c 200 --prompt-tokens 150 -n -1 -q --json "$s/figures"
    [ "$(json decode_tokens "$s/figures")" = 50 ]
    [ "$(json dp_reached "$s/figures")" = null ]
    refuses 2 'attn=0.5.*dense' run --synthetic $shape --dp attn=0.5 --prompt-tokens 5 -q
    refuses 2 'prompt has 97 tokens.*96' run --synthetic $shape --dp 0.5 --prompt-tokens 97 -q
}
t random_weights_run_without_a_file

random_weights_follow_the_seed() {
    ids() {
        succeeds run --synthetic 64:160:2:4:2:300:96 --sp 0.4 --tokens -n 40 -q "$@"
        [ "$(wc -w <"$s/out")" -eq 40 ]
    }
    ids -t 0 && cp "$s/out" "$s/new.a"
    ids -t 0 --seed 0 -j 1 && cmp "$s/out" "$s/new.a"
    ids -t 0 --seed 1 && differ "$s/out" "$s/new.a"
    ids -t 0 -f "$s/two.tok" && differ "$s/out" "$s/new.a"
}
t random_weights_follow_the_seed

run_refuses_wrong_random_weights() {
    refuses_each 2 run --synthetic 64:160:2:4:2:300:96 <<END
takes the place of MODEL|$s/dense.bin
--sp 1.5|--sp 1.5
--sp -0.1|--sp -0.1
--prune some|--prune some
--prompt-tokens 0|--prompt-tokens 0
tokenizer|-p Once
tokenizer|--stop x
tokenizer|-f $s/once.txt
one prompt|--tokens -f $s/two.tok --prompt-tokens 5
--ppl|--ppl $s/once.txt
--verify|--verify
END
    refuses_each 2 run "$s/dense.bin" -p Once <<'END'
--sp goes with --synthetic|--sp 0.5
--prune goes with --synthetic|--prune all
--prompt-tokens goes with --synthetic|--prompt-tokens 5
END
    refuses 2 'llama2-8b' run --synthetic llama2-8b
    refuses 1 '41:60.*multiple' run --synthetic 41:60:2:4:2:100:48
}
t run_refuses_wrong_random_weights

# ---- run: refusals ----------------------------------------------------------------------------------------

# cases.md rows 37 and 46: what is not a number, or not one that makes sense.
run_refuses_wrong_arguments() {
    refuses_each 2 run "$s/dense.bin" -p "$once" <<'END'
-n abc|-n abc
-n -2|-n -2
-n 1.5|-n 1.5
-n 99999999999|-n 99999999999
-n needs a value|-n
-t -1|-t -1
-t nan|-t nan
-t inf|-t inf
-t warm|-t warm
--top-p 0|--top-p 0
--top-p 1.5|--top-p 1.5
--top-k -1|--top-k -1
--seed -1|--seed -1
--seed 1e3|--seed 1e3
--seed|--seed 18446744073709551616
513.*512|-c 513
-c 0|-c 0
-j 0|-j 0
-b gpu|-b gpu
--device|--device -1
--device|--device first
--dp 0.3|--dp 0.3
--dp attn=0.3|--dp attn=0.3
--dp 2|--dp 2
--stop needs a value|--stop
--version takes no value|--version=1
--help takes no value|--help=1
exclude|-f x
exclude|--ppl x
--ppl-window 0|--ppl-window 0
--ppl-stride 0|--ppl-stride 0
--dense-prefix -1|--dense-prefix -1
--ppl-tokens -1|--ppl-tokens -1
--frobnicate|--frobnicate
-Z|-Z
more than one MODEL|other.bin
END
    refuses 2 '^run: -n :' run "$s/dense.bin" -n ''
    refuses 2 '--stop' run "$s/dense.bin" --stop ''
    refuses 2 'MODEL is missing' run
    refuses 2 'MODEL is missing' run -p "$once"
}
t run_refuses_wrong_arguments

# cases.md rows 15 and 17.
run_refuses_what_is_no_model_file() {
    head -c "$(($(wc -c <"$s/dense.bin") / 2))" "$s/dense.bin" >"$s/cut.bin"
    { cat "$s/dense.bin" && echo x; } >"$s/longer.bin"
    : >"$s/empty.bin"
    for file in "$s/cut.bin" "$s/longer.bin" "$s/empty.bin" "$s/once.txt" "$s/none.bin" demo \
        demo/model.safetensors demo/tokenizer.model demo/config.json; do
        refuses 1 "$file" run "$file" -p "$once" -q
        refuses 1 "$file" convert --info "$file"
    done
    [ ! -r "$stories/stories260K.bin" ] || refuses 1 stories260K run "$stories/stories260K.bin" -p "$once"
}
t run_refuses_what_is_no_model_file

run_refuses_files_that_cannot_be_used() {
    refuses 1 "$s/none.txt: No such file" run "$s/dense.bin" -f "$s/none.txt" -q
    refuses 1 "$s/none.txt: No such file" run "$s/dense.bin" --ppl "$s/none.txt" -q
    refuses 1 "$s: " run "$s/dense.bin" -f "$s" -q
    refuses 1 "$s/none/figures" run "$s/dense.bin" -p "$once" -q --json "$s/none/figures"
}
t run_refuses_files_that_cannot_be_used

# cases.md row 15.
verify_finds_a_damaged_value() {
    succeeds run "$s/half.bin" -p "$once" -n 1 --verify
    grep -q 'checksums verified' "$s/err"
    cp "$s/half.bin" "$s/damaged.bin"
    patch "$s/damaged.bin" 5000 '\125\252'
    differ "$s/half.bin" "$s/damaged.bin"
    refuses 1 'damaged.bin.*embedding' run "$s/damaged.bin" -p "$once" --verify -q
}
t verify_finds_a_damaged_value

# ---- convert: sources -------------------------------------------------------------------------------------

# cases.md row 17, G2.
stories260k_is_told_byte_for_byte() {
    [ -r "$stories/stories260K.bin" ] || skip_test "$stories absent"
    printf '%s' "Once upon a time, there was a little girl named Lily. She loved to play outside in the " \
        "park. One day, she saw a big, red ball. She wanted to play with it, but it was too high.
Lily's mom said, \"Lily, let's go to the park.\" Lily was sad and didn't know what to do. She said, " \
        "\"I want to play with your ball, but I can't find it.\"
Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"
Lily didn't want to help her mom, so she" >"$s/published"
    for storage in '--format dense' '--prune all --format tiled-cbc'; do
        convert "$stories/stories260K.bin" "$s/stories.bin" --tokenizer "$stories/tok512.model" --sp 0 \
            --dp 0 $storage -q --force
        greedy story "$s/stories.bin" -p '' -n 200
        cmp "$s/story" "$s/published"
    done
    refuses 1 '--tokenizer' convert "$stories/stories260K.bin" "$s/new.bin" -q
    refuses 1 tok512.bin convert "$stories/stories260K.bin" "$s/new.bin" --tokenizer "$stories/tok512.bin" -q
    refuses 1 pieces convert "$stories/stories260K.bin" "$s/new.bin" --tokenizer demo/tokenizer.model -q
    absent new.bin
}
t stories260k_is_told_byte_for_byte

# cases.md rows 9 and 16: a directory is no tokenizer, tokenizer.json alone is not enough.
convert_refuses_incomplete_sources() {
    refuses 1 none convert "$s/none" "$s/new.bin" -q
    refuses 1 once.txt convert "$s/once.txt" "$s/new.bin" -q
    refuses 1 dense.bin convert "$s/dense.bin" "$s/new.bin" -q

    copy_demo "$s/new"
    rm "$s/new/tokenizer.model"
    refuses 1 'tokenizer.model.*--tokenizer' convert "$s/new" "$s/new.bin" -q
    echo '{}' >"$s/new/tokenizer.json"
    refuses 1 'tokenizer.model.*--tokenizer' convert "$s/new" "$s/new.bin" -q
    refuses 1 "$s/new: " convert "$s/new" "$s/new.bin" --tokenizer "$s/new" -q
    succeeds convert "$s/new" "$s/with.bin" --tokenizer demo/tokenizer.model $plain -q
    rm "$s/new/model.safetensors"
    refuses 1 safetensors convert "$s/new" "$s/new.bin" --no-tokenizer -q
    head -c 9000000 demo/model.safetensors >"$s/new/model.safetensors"
    refuses 1 model.safetensors convert "$s/new" "$s/new.bin" --no-tokenizer -q
    rm "$s/new/config.json"
    refuses 1 config.json convert "$s/new" "$s/new.bin" --no-tokenizer -q
    absent new.bin
}
t convert_refuses_incomplete_sources

# cases.md row 15.
convert_names_a_missing_shard() {
    copy_demo "$s/new"
    mv "$s/new/model.safetensors" "$s/new/model-00001-of-00002.safetensors"
    cat >"$s/new/model.safetensors.index.json" <<'END'
{"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors",
 "lm_head.weight": "model-00002-of-00002.safetensors"}}
END
    refuses 1 'model-00002-of-00002.safetensors' convert "$s/new" "$s/new.bin" -q
    absent new.bin
}
t convert_names_a_missing_shard

# ---- convert: output --------------------------------------------------------------------------------------

convert_replaces_a_file_only_when_forced() {
    echo precious >"$s/kept.bin"
    refuses 1 'kept.bin.*--force' convert demo "$s/kept.bin" -q
    [ "$(cat "$s/kept.bin")" = precious ]
    succeeds convert demo "$s/kept.bin" $plain -q --force
    succeeds run "$s/kept.bin" -p "$once" -n 1 -q --verify
    refuses 1 "$s/none/x.bin" convert demo "$s/none/x.bin" -q
    refuses 1 'directory' convert demo "$s" -q --force
}
t convert_replaces_a_file_only_when_forced

# cases.md row 15.
row_15_a_full_disk_leaves_no_file() {
    refuses 1 full.bin sh -c 'ulimit -f 4000 && exec "$@"' sh convert demo "$s/full.bin" $plain -q
    absent full.bin
}
t row_15_a_full_disk_leaves_no_file

# cases.md row 15.
row_15_a_full_disk_leaves_the_old_file() {
    echo precious >"$s/old.bin"
    refuses 1 old.bin sh -c 'ulimit -f 4000 && exec "$@"' sh convert demo "$s/old.bin" $plain --force -q
    [ "$(cat "$s/old.bin")" = precious ]
    [ "$(find "$s" -name 'old.bin*' | wc -l)" -eq 1 ]
}
t row_15_a_full_disk_leaves_the_old_file

# cases.md row 20: 101 MB of weights in 48 layers, of which one matrix at a time is held. A sanitizer holds more.
row_20_conversion_takes_the_memory_of_a_matrix() {
    ! sanitized || skip_test 'a sanitizer takes memory of its own'
    succeeds convert --synthetic 256:1024:48:4:4:300:64 "$s/deep.bin" --sp 0.5 --prune all $plain -j 1
    rm "$s/deep.bin"
    peak=$(sed -n 's/^done .*peak memory \([0-9.]*\) MB.*/\1/p' "$s/err")
    awk -v peak="$peak" 'BEGIN { exit !(peak > 1 && peak < 40) }'
}
t row_20_conversion_takes_the_memory_of_a_matrix

# ---- convert: interruption --------------------------------------------------------------------------------

# A child that is not yet done: neither gone nor waiting to be asked for its status.
runs() { grep -qs '^State:[[:space:]]*[^ZX]' "/proc/$1/status"; }

# interrupted STATUS SIGNAL PATTERN WORDS: convert gets the signal when a line of its messages matches, and ends with
# that status; its messages are in $s/err. Where it has ended before the signal can be sent, once more.
interrupted() {
    want=$1 signal=$2 pattern=$3
    shift 3
    for _ in 1 2 3 4 5; do
        got=0 when=before
        rm -f "$s/fifo" "$s/err"
        mkfifo "$s/fifo"
        env --default-signal=HUP,TERM convert "$@" 2>"$s/fifo" &  # whoever started the tests may ignore them
        while IFS= read -r line; do
            echo "$line" >>"$s/err"
            if [ $when = before ] && echo "$line" | grep -q "$pattern"; then
                when=late
                if runs $!; then
                    kill -"$signal" $!
                    when=sent
                fi
            fi
        done <"$s/fifo"
        wait $! || got=$?
        if [ $when != late ]; then break; fi
        rm -f "$s/new.bin"
    done
    [ "$got" -eq "$want" ]
}

an_interrupted_conversion_goes_on() {
    for case in 'wanda TERM 143 2' 'wanda KILL 137 4' 'sparsegpt HUP 129 0' 'sparsegpt KILL 137 3'; do
        # shellcheck disable=SC2086
        set -- $case
        options="--sp 0.5 --calib-tokens 1024 --dp 0 --method $1"
        [ -e "$s/whole-$1.bin" ] || convert demo "$s/whole-$1.bin" $options -q
        interrupted $3 $2 "^layer $4 " demo "$s/new.bin" $options
        [ ! -e "$s/new.bin" ] && [ -e "$s/new.bin.partial" ] && [ -e "$s/new.bin.partial.state" ]
        [ $2 = KILL ] ||
            grep -q "^convert: interrupted after [1-8] of 8 layers; the same command with --resume goes on" "$s/err"
        succeeds convert demo "$s/new.bin" $options --resume
        grep -q '^resume *after [1-8] of 8 layers$' "$s/err"
        lacks "^layer $4 " "$s/err"
        cmp "$s/new.bin" "$s/whole-$1.bin"
        [ "$(find "$s" -name 'new.bin*' | wc -l)" -eq 1 ]
        rm "$s/new.bin"
    done
}
t an_interrupted_conversion_goes_on

nothing_stays_where_nothing_can_be_resumed() {
    interrupted 143 TERM '^layer 7 ' demo "$s/new.bin" --method magnitude --calib-tokens 8192
    grep -q '^convert: interrupted; nothing is kept$' "$s/err"
    absent new.bin
}
t nothing_stays_where_nothing_can_be_resumed

resume_refuses_what_it_cannot_go_on_with() {
    options='--calib-tokens 1024 --dp 0'
    refuses 1 'new.bin.partial.*nothing to resume' convert demo "$s/new.bin" $options --resume -q
    refuses 2 '--resume goes with' convert demo "$s/new.bin" $plain --resume -q
    absent new.bin
    interrupted 137 KILL '^layer 3 ' demo "$s/new.bin" $options
    refuses 2 'SOURCE is not the same' convert "$PWD/demo" "$s/new.bin" $options --resume -q
    refuses 2 '--sp is not the same' convert demo "$s/new.bin" $options --sp 0.4 --resume -q
    refuses 2 'calibration text' convert demo "$s/new.bin" $options --calib-len 100 --resume -q
    refuses 1 'state: the same conversion has come to [4-7] of 8 layers: --resume .* --force' \
        convert demo "$s/new.bin" $options -q
    refuses 1 'state: is what another conversion .*--force' convert demo "$s/new.bin" $plain -q
    cp "$s/new.bin.partial" "$s/kept" && cp "$s/new.bin.partial.state" "$s/kept.state"
    succeeds convert demo "$s/new.bin" $options --resume -q
    mv "$s/kept" "$s/new.bin.partial" && mv "$s/kept.state" "$s/new.bin.partial.state" && rm "$s/new.bin"
    succeeds convert demo "$s/new.bin" $options --force
    grep -q '^note *replaces what the same conversion to this file had begun$' "$s/err"
    [ "$(find "$s" -name 'new.bin*' | wc -l)" -eq 1 ]
    interrupted 137 KILL '^layer 3 ' demo "$s/new.bin" $options --force
    patch "$s/new.bin.partial.state" 300 '\125\252'
    refuses 1 'state: is damaged' convert demo "$s/new.bin" $options --force --resume -q
    succeeds convert demo "$s/new.bin" $plain --force -q
    [ "$(find "$s" -name 'new.bin*' | wc -l)" -eq 1 ]
}
t resume_refuses_what_it_cannot_go_on_with

# ---- convert: pruning and storage -------------------------------------------------------------------------

# part NAME MATRIX: per cent of zeros that --info ($s/out) prints for a source matrix.
part() { sed -n "s/^$2 .* $1 \\([0-9.]*\\) %.*/\\1/p" "$s/out"; }

# has_sparsity Q K V O GATE UP DOWN in layer 3
has_sparsity() {
    for where in q/qkv k/qkv v/qkv o/o gate/gate_up up/gate_up down/down; do
        same_number "$(part ${where%/*} layers.3.${where#*/})" "$1" 0.01
        shift
    done
}

info_after() {
    convert demo "$s/sp.bin" --force -q $plain "$@"
    succeeds convert --info "$s/sp.bin"
    [ ! -s "$s/err" ]
}

sp_prunes_what_it_names() {
    info_after --sp 0.5
    has_sparsity 0 0 0 0 50 50 50
    info_after
    has_sparsity 0 0 0 0 30 30 30
    info_after --sp 0.7 --prune all
    has_sparsity 70 70 70 70 70 70 70
    info_after --sp mlp=0.2,attn=0.6
    has_sparsity 60 60 60 60 20 20 20
    info_after --sp mlp=0.4
    has_sparsity 0 0 0 0 40 40 40
    info_after --sp attn=0.4
    has_sparsity 40 40 40 40 30 30 30
    info_after --sp 1 --prune mlp
    has_sparsity 0 0 0 0 100 100 100
    grep -q '^method .*"magnitude"' "$s/out"
    info_after --sp 0.5 --per-row --method magnitude -j 1
    has_sparsity 0 0 0 0 50 50 50
    grep -q '^method .*per row' "$s/out"
}
t sp_prunes_what_it_names

# cases.md row 12: eps, theta and head_dim are in the file.
info_shows_config_sparsity_ratio_and_provenance() {
    convert demo "$s/all.bin" --sp 0.5 --prune all $plain -q
    succeeds convert --info "$s/all.bin"
    grep -q 'dim 256, hidden 768, 8 layers, 8 heads (4 kv) of 32' "$s/out"
    grep -q '4096 tokens, context 512, BOS 1, EOS 2, tokenizer inside' "$s/out"
    grep -q 'norm eps 1e-05, RoPE theta 10000, separate head' "$s/out"
    grep -q '^source .*demo' "$s/out"
    grep -q '^sp_asked_mlp *0.5' "$s/out"
    grep -q '^sp_reached *0.5' "$s/out"
    [ "$(grep -c '^layers\..*tiled-cbc .*CR 1\.[67].*(formula 1\.7' "$s/out")" -eq 32 ]
    grep -q '^embedding .*dense .*CR 1\.000' "$s/out"
    grep -q '^head .*dense .*CR 1\.000' "$s/out"
}
t info_shows_config_sparsity_ratio_and_provenance

formats() {
    for format in auto dense tiled-cbc; do
        info_after --sp 0.5 --format $format
        case $format in
        dense) [ "$(grep -c ' tiled-cbc ' "$s/out")" -eq 0 ] ;;
        *) [ "$(grep -c ' tiled-cbc ' "$s/out")" -eq 16 ] ;;
        esac
        greedy "text.$format" "$s/sp.bin" -p "$once" -n 24
        cmp "$s/text.auto" "$s/text.$format"
    done
}
t formats

# cases.md row 27. 2 (1 - s) bytes of values and 1/8 byte of bitmap a weight, then offsets and the padding of columns, which
# are 0.05 at most.
row_27_bytes_a_weight_follow_the_sparsity() {
    shape=256:1024:1:4:4:300:64
    for case in '0.3 1.525' '0.5 1.125' '0.7 0.725' '0.9 0.325' '0 2.125'; do
        ratio=${case% *} expected=${case#* }
        convert --synthetic $shape "$s/size.bin" --sp "$ratio" --prune all --format tiled-cbc --dp 0 -q --force
        convert --info "$s/size.bin" >"$s/out"
        sed -n 's/.*tiled-cbc .*CR \([0-9.]*\) .*/\1/p' "$s/out" >"$s/ratios"
        [ "$(wc -l <"$s/ratios")" -eq 4 ]
        while read -r cr; do
            awk -v got="$cr" -v low="$expected" 'BEGIN { exit !(2 / got >= low && 2 / got <= low + 0.05) }'
        done <"$s/ratios"
    done
    convert --synthetic $shape "$s/size.bin" --sp 0.05 --dp 0 --force 2>"$s/err"
    grep -q ' 0 matrices as Tiled-CBC' "$s/err"  # dense is smaller
    convert --synthetic $shape "$s/size.bin" --sp 0.1 --dp 0 --force 2>"$s/err"
    grep -q ' 2 matrices as Tiled-CBC' "$s/err"
    convert --synthetic $shape "$s/size.bin" --sp 0.05 --dp 0.2 --calib-tokens 1000 --force 2>"$s/err"
    grep -q ' 2 matrices as Tiled-CBC' "$s/err"  # only so can columns be skipped
}
t row_27_bytes_a_weight_follow_the_sparsity

# nll FILE: of 1024 tokens after the file's own static pruning.
nll() {
    run "$1" --dp 0 --ppl "$heldout" --tokens --ppl-window 512 --ppl-tokens 1025 -q --json "$s/figures" >"$s/out"
    json nll "$s/figures"
}

below() { awk -v a="$1" -v b="$2" 'BEGIN { exit !(a + 0 > 0 && a < b) }'; }

# cases.md row 22: what pruning costs shows beside the dense model.
calibrated_pruning_beats_magnitude() {
    heldout=$PWD/../shared/data/text/heldout-32769.tok
    [ -r "$heldout" ] || skip_test "$heldout absent"
    for method in magnitude wanda sparsegpt; do
        succeeds convert demo "$s/$method.bin" --sp mlp=0.6,attn=0.4 --method $method --calib-tokens 4096 --dp 0
        # floor(256 * 0.4) / 256 and so on where rows are counted
        grep -qE '^layer 7 .*q 0\.(4000|3984).*gate 0\.(6000|5977).*down 0\.(6000|5990)$' "$s/err"
        succeeds convert --info "$s/$method.bin"
        grep -q "^method .*$method" "$s/out"
        [ $method = magnitude ] || grep -q '^sp_calibration_tokens *4096' "$s/out"
    done
    below "$(nll "$s/wanda.bin")" "$(nll "$s/magnitude.bin")"
    below "$(nll "$s/sparsegpt.bin")" "$(nll "$s/wanda.bin")"
}
t calibrated_pruning_beats_magnitude

# best NAME WORDS: the 20 best log-probabilities of each of 8 tokens, in $s/NAME.
best() {
    name=$1
    shift
    run "$@" -p "$once" -n 8 -t 0 -q --logprobs 20 --json "$s/figures" >"$s/out"
    sed 's/.*"logprobs":\[//' "$s/figures" >"$s/$name"
    [ "$(grep -o '"top"' "$s/$name" | wc -l)" -eq 8 ]
}

# cases.md row 22: to the last digit where the storage is the same.
row_22_nothing_removed_changes_nothing() {
    best new.dense "$s/dense.bin"
    for method in magnitude wanda sparsegpt; do
        convert demo "$s/zero.bin" --sp 0 --method $method --prune all --format tiled-cbc --dp 0 --force -q
        greedy zero "$s/zero.bin" -p "$once" -n 64
        cmp "$s/zero" "$s/once.out"
        convert demo "$s/zero.bin" --sp 0 --method $method --prune all --format dense --force -q
        best new.zero "$s/zero.bin"
        cmp "$s/new.zero" "$s/new.dense"
    done
}
t row_22_nothing_removed_changes_nothing

# The demo in $s/new.source with weights that may be changed: the named tensor begins at byte $begin of $weights.
open_weights() {
    copy_demo "$s/new.source"
    weights=$s/new.source/model.safetensors
    rm "$weights"
    cp demo/model.safetensors "$weights"
    chmod u+w "$weights"
    header=$(od -An -tu8 -N8 "$weights" | tr -d ' ')
    place=$(head -c $((8 + header)) "$weights" | grep -ao "\"$1\":{[^}]*" | sed 's/.*"data_offsets":\[\([0-9]*\).*/\1/')
    begin=$((8 + header + place))
}

# cases.md row 22: whatever the method, and also where nothing is to be pruned.
row_22_a_weight_that_is_not_a_number_is_refused_by_name() {
    down=model.layers.2.mlp.down_proj.weight
    open_weights $down
    for value in 'NaN \001\176' 'infinite \000\374'; do
        patch "$weights" $((begin + 2 * 768)) "${value#* }"  # fp16
        for method in '--sp 0' '--method magnitude' '--method sparsegpt --calib-tokens 1024'; do
            refuses 1 "$down: row 1, column 0.*${value% *}" convert "$s/new.source" "$s/new.bin" $method --dp 0 -q
            absent new.bin
        done
    done
}
t row_22_a_weight_that_is_not_a_number_is_refused_by_name

# cases.md row 21: an up matrix of zeros is a 24th of the weights of 8 layers' MLP, wherever the ratio is below that.
row_21_weights_that_are_zero_already_count() {
    open_weights model.layers.2.mlp.up_proj.weight
    dd if=/dev/zero of="$weights" bs=1 seek="$begin" count=$((2 * 768 * 256)) conv=notrunc 2>"$s/err"
    succeeds convert "$s/new.source" "$s/zeros.bin" --sp 0 $plain
    grep -q '^sparsity *0\.0417 ' "$s/err"
    grep -q '^layer 2 .* up 1\.0000' "$s/err"
    succeeds convert --info "$s/zeros.bin"
    grep -q '^sp_reached *0\.0416' "$s/out"
}
t row_21_weights_that_are_zero_already_count

# cases.md row 24.
row_24_a_calibration_text_may_be_any_file_that_is_long_enough() {
    echo 'ten words are not enough to calibrate a model on' >"$s/short.txt"
    : >"$s/nothing.txt"
    for method in wanda sparsegpt; do
        refuses 2 'short.txt.*1000' convert demo "$s/new.bin" --method $method --calib "$s/short.txt" -q
    done
    refuses 2 'nothing.txt.*1000' convert demo "$s/new.bin" --calib "$s/nothing.txt" -q
    refuses 2 'short.txt.*1000' convert demo "$s/new.bin" --method magnitude --calib-dp "$s/short.txt" -q
    refuses 1 'none.txt' convert demo "$s/new.bin" --calib "$s/none.txt" -q
    refuses 2 tokenizer convert demo "$s/new.bin" --no-tokenizer -q
    absent new.bin
    succeeds convert demo "$s/unread.bin" --method magnitude --dp 0 --calib "$s/none.txt" -q
    for _ in 1 2 3 4; do head -c 2000 README.md; done >"$s/long.txt"
    succeeds convert demo "$s/own.bin" --calib "$s/long.txt" --calib-len 100 --dp 0 -b cpu
    grep -q '^warning .*long.txt' "$s/err"
    grep -q '^calib .*tokens of .*long.txt' "$s/err"
}
t row_24_a_calibration_text_may_be_any_file_that_is_long_enough

synthetic_weights_depend_on_the_seed_alone() {
    shape=40:60:2:4:2:100:48
    convert --synthetic $shape "$s/a.bin" --sp 0.4 --seed 5 -q
    convert --synthetic $shape "$s/b.bin" --sp 0.4 --seed 5 -q -j 1
    convert --synthetic $shape "$s/c.bin" --sp 0.4 --seed 6 -q
    cmp "$s/a.bin" "$s/b.bin"
    differ "$s/a.bin" "$s/c.bin"
    succeeds convert --info "$s/a.bin"
    grep -q 'dim 40, hidden 60, 2 layers, 4 heads (2 kv) of 10' "$s/out"
    grep -q 'no tokenizer' "$s/out"
    succeeds run "$s/a.bin" --tokens -f "$s/two.tok" -n 5 --ignore-eos -q
    [ "$(wc -w <"$s/out")" -eq 5 ]
}
t synthetic_weights_depend_on_the_seed_alone

convert_refuses_wrong_shapes() {
    for shape in '' 40 llama2-8b 40:60:2:4:2:100 40:60:2:4:2:100:48:1 40:60:2:4:2:100:x \
        ' 40:60:2:4:2:100:48' 0:60:2:4:2:100:48 41:60:2:4:2:100:48 40:60:2:4:3:100:48 \
        40:60:2:8:2:100:48 40:60:-2:4:2:100:48 \
        40:60:2:0:0:100:48 99999999999:60:2:4:2:100:48 2147483647:60:2:1:1:100:48; do
        got=0
        convert --synthetic "$shape" "$s/new.bin" -q >"$s/out" 2>"$s/err" || got=$?
        [ "$got" -eq 1 ] || [ "$got" -eq 2 ]
        [ ! -s "$s/out" ] && [ "$(wc -l <"$s/err")" -eq 1 ]
    done
    absent new.bin
}
t convert_refuses_wrong_shapes

# Random weights have no use for a tokenizer; one that is named is read or refused, not ignored.
convert_ignores_no_tokenizer() {
    got=0
    convert --synthetic 40:60:2:4:2:100:48 "$s/new.bin" --tokenizer "$s/none" -q 2>"$s/err" || got=$?
    [ $got -eq 1 ] || [ $got -eq 2 ]
    [ "$(wc -l <"$s/err")" -eq 1 ]
    grep -q tokenizer "$s/err"
    absent new.bin
}
t convert_ignores_no_tokenizer

convert_refuses_wrong_arguments() {
    refuses_each 2 convert demo "$s/new.bin" <<'END'
--method best|--method best
--per-row.*magnitude|--per-row
--per-row.*magnitude|--per-row --method sparsegpt
--calib-tokens 999.*1000|--calib-tokens 999
--calib-tokens|--calib-tokens many
--calib-len 1|--calib-len 1
513.*512|--calib-len 513
--dp 0.96.*0.95|--dp 0.96
--dp -0.1|--dp -0.1
-b gpu|-b gpu
--sp 1.1|--sp 1.1
--sp -0.1|--sp -0.1
--sp nan|--sp nan
--sp half|--sp half
--sp mlp=0.5,mlp=0.5|--sp mlp=0.5,mlp=0.5
--sp mlp|--sp mlp
--sp head=0.5|--sp head=0.5
--sp mlp=0.5,|--sp mlp=0.5,
--sp .*attn|--sp attn=0.5 --prune mlp
--sp .*attn|--prune mlp --sp attn=0.5
--prune none|--prune none
--format csr|--format csr
format needs a value|--format
-j 0|-j 0
--seed -1|--seed -1
exclude|--tokenizer x --no-tokenizer
too many|third
--frobnicate|--frobnicate
END
    refuses 2 '--sp' convert demo "$s/new.bin" --sp ''
    refuses 2 'SOURCE and OUT' convert
    refuses 2 'OUT is missing' convert demo
    refuses 2 '^convert: OUT is missing' convert --synthetic 64:128:2:4:2:97:64
    refuses 2 '--info' convert --info
    refuses 2 'missing' convert --synthetic 40:60:2:4:2:100:48
    absent new.bin
}
t convert_refuses_wrong_arguments

# ---- dynamic pruning ----------------------------------------------------------------------------------------

# One file with quantiles, its MLP as Tiled-CBC and its attention dense; the ratio in it is 0.3.
make_dynamic() {
    [ -e "$s/dynamic.bin" ] ||
        convert demo "$s/dynamic.bin" --sp 0.5 --method magnitude --dp 0.3 --calib-tokens 1024 -q
}

dp_is_the_files_unless_asked_for() {
    make_dynamic
    succeeds run "$s/dynamic.bin" -p "$once" -n 40 -t 0 --ignore-eos -v --json "$s/figures"
    grep -q '^dynamic *0\.3 from the file; stored dense, skips nothing: attention input, attention output$' "$s/err"
    grep -q '^ *MLP input .*of inputs (30 % asked)' "$s/err"
    lacks 'attention input .*of inputs' "$s/err"
    [ "$(json dp_asked "$s/figures")" = 0.3 ]
    same_number "$(json dp_reached "$s/figures")" 0.3 0.06
    same_number "$(json total "$s/figures")" 0.65 0.05
    succeeds run "$s/dynamic.bin" -p "$once" -n 40 -t 0 --ignore-eos --dp mlp=0.7 --json "$s/figures"
    grep -q '^dynamic *mlp 0\.7, attn 0\.3 asked' "$s/err"
    [ "$(json dp_asked "$s/figures")" = 0.7 ]
    same_number "$(json dp_reached "$s/figures")" 0.7 0.06
}
t dp_is_the_files_unless_asked_for

dp_0_is_exact() {
    make_dynamic
    convert demo "$s/without.bin" --sp 0.5 $plain -q --force
    greedy exact "$s/dynamic.bin" -p "$once" -n 64 --dp 0
    greedy without "$s/without.bin" -p "$once" -n 64
    cmp "$s/exact" "$s/without"
    greedy thinned "$s/dynamic.bin" -p "$once" -n 64 --dp 0.8
    differ "$s/thinned" "$s/exact"
}
t dp_0_is_exact

dp_counts_in_perplexity() {
    make_dynamic
    for _ in 1 2 3 4 5 6 7 8; do
        printf '%s there was a king who had three sons and a garden. ' "$once"
    done >"$s/king.txt"
    succeeds run "$s/dynamic.bin" --ppl "$s/king.txt" --dp 0.6 --dense-prefix 8 --json "$s/figures"
    grep -q '^skipped .*of inputs (60 % asked)' "$s/err"
    same_number "$(json dp_reached "$s/figures")" 0.6 0.06
    thinned=$(json nll "$s/figures")
    succeeds run "$s/dynamic.bin" --ppl "$s/king.txt" --dp 0 --dense-prefix 8 --json "$s/figures"
    [ "$thinned" != "$(json nll "$s/figures")" ]
    same_number "$(json dp_reached "$s/figures")" 0 0.01
}
t dp_counts_in_perplexity

wrong_dp_is_refused() {
    make_dynamic
    refuses 2 'attn=0.3.*dense' run "$s/dynamic.bin" -p "$once" --dp attn=0.3
    refuses 2 '--dp 0.96.*0.95' run "$s/dynamic.bin" -p "$once" --dp 0.96
    refuses 2 '--dp 0.3.*no quantiles.*convert' run "$s/ids.bin" --tokens -f "$s/once.tok" --dp 0.3
    succeeds run "$s/dynamic.bin" -p "$once" -n 4 --dp attn=0 -q
}
t wrong_dp_is_refused

# ---- log-probabilities, scores, speed -------------------------------------------------------------------------

logprobs_are_in_the_figures() {
    succeeds run "$s/dense.bin" -p "$once" -n 8 -t 0 -q --logprobs 5 --json "$s/figures"
    [ "$(head -c ${#next_text} "$s/once.out" | head -c "$(wc -c <"$s/out")")" = "$(cat "$s/out")" ]
    [ "$(grep -o '"token":[0-9]*' "$s/figures" | cut -d: -f2 | tr '\n' ' ')" = "$next_ids" ]
    # Greedy, so that the first of each place is the one chosen; five, descending, no more than all there is.
    grep -o '"token":[^}]*}' "$s/figures" | tr -d '"[]}' | tr ':,' '  ' >"$s/new.places"
    [ "$(wc -l <"$s/new.places")" -eq 8 ]
    awk '{ for (i = 1; $i != "logprob"; i++) { } chosen = $(i + 1); if ($(i + 2) != "top" || NF != i + 12) exit 1
           sum = 0; before = 0
           for (k = i + 3; k < NF; k += 2) { if ($(k + 1) > before) exit 1; before = $(k + 1); sum += exp(before) }
           if ($(i + 3) != $2 || $(i + 4) != chosen || sum > 1.00001) exit 1 }' "$s/new.places"
    # The texts together are the text.
    grep -o '"text":"[^"]*"' "$s/figures" | cut -d'"' -f4 | tr -d '\n' >"$s/new.text"
    cmp "$s/new.text" "$s/out"
    # Without --json a table; without --logprobs nothing; ids alone where there is no tokenizer.
    succeeds run "$s/dense.bin" -p "$once" -n 3 -t 0 --logprobs 2
    [ "$(grep -c '^logprobs ' "$s/err")" -eq 3 ]
    succeeds run "$s/dense.bin" -p "$once" -n 3 -t 0 --json "$s/figures"
    grep -q '"logprobs":null' "$s/figures"
    lacks '^logprobs ' "$s/err"
    succeeds run "$s/ids.bin" --tokens -f "$s/once.tok" -n 2 -t 0 -q --logprobs 1 --json "$s/figures"
    [ "$(grep -o '"token":[0-9]*' "$s/figures" | cut -d: -f2 | tr '\n' ' ')" = "4044 262 " ]
    grep -q '"text":""' "$s/figures"
}
t logprobs_are_in_the_figures

# A temperature changes what is drawn and not what the model thinks.
logprobs_are_the_models_own() {
    succeeds run "$s/dense.bin" -p "$once" -n 1 -t 0 -q --logprobs 20 --json "$s/new.cold"
    succeeds run "$s/dense.bin" -p "$once" -n 1 -t 3 --top-k 2 --top-p 0.5 -q --logprobs 20 --json "$s/new.hot"
    [ "$(sed 's/.*"top"//' "$s/new.cold")" = "$(sed 's/.*"top"//' "$s/new.hot")" ]
}
t logprobs_are_the_models_own

# A line of scores for every line of items.
score() {
    name=$1
    shift
    succeeds run "$name" --score "$s/new.items" "$@"
    [ "$(wc -l <"$s/out")" -eq "$(wc -l <"$s/new.items")" ]
}

scores_are_sums_of_logprobs() {
    # What greedy decoding says is greedy, and has the log-probabilities that it was said with.
    next=', the sun was'
    succeeds run "$s/dense.bin" -p "$once" -n 4 -t 0 -q --logprobs 1 --json "$s/figures"
    sum=$(grep -o '"logprob":[-0-9.e]*' "$s/figures" | cut -d: -f2 | awk '{ s += $1 } END { printf "%.6f", s }')
    {
        echo "{\"context\": \"$once\", \"continuation\": \"$next\"}"
        echo "{\"id\": 1.5, \"continuation\": \"$next\", \"context\": \"$once  \"}"
        echo "{\"context\": \"$once\", \"continuation\": \", the moon \\u00e9\"}"
        echo '{"context": "", "continuation": "The"}'
    } >"$s/new.items"
    score "$s/dense.bin"
    grep -q '^scored *4 continuations.* 1 greedy' "$s/err"
    grep -q '^protocol *BOS before every context' "$s/err"
    sed -n 1p "$s/out" >"$s/new.first"
    same_number "$(sed 's/.*"logprob": \([^,]*\),.*/\1/' "$s/new.first")" "$sum" 0.01
    grep -q '"tokens": 4, "bytes": 13, "greedy": true}$' "$s/new.first"
    # White space at the context's end is the continuation's.
    sed -n 2p "$s/out" | grep -q '"bytes": 13, "greedy": false}$'
    sed -n 3p "$s/out" | grep -q '"bytes": 13, "greedy": false}$'
    sed -n 4p "$s/out" | grep -q '"tokens": 1, "bytes": 3,'
    cp "$s/out" "$s/new.text"
    # The same as ids; without a tokenizer too. 1 is BOS.
    echo '{"context": [1, 3499, 620, 261, 553], "continuation": [4044, 262, 1334, 313]}' >"$s/new.items"
    score "$s/ids.bin" --tokens -q
    [ ! -s "$s/err" ]
    [ "$(cat "$s/out")" = "$(sed -n 1p "$s/new.text" | sed 's/"bytes": 13/"bytes": null/')" ]
}
t scores_are_sums_of_logprobs

# The negative sum is that of --ppl on the same ids, with the same dense prefix: dynamic pruning included.
scores_are_those_of_perplexity() {
    make_dynamic
    # BOS, "Once upon a time", four more: ids as in next_ids, little-endian
    # shellcheck disable=SC2059
    printf "$once_bytes"'\314\017\006\001\066\005\071\001' >"$s/new.tok"
    echo '{"context": [1, 3499, 620, 261, 553], "continuation": [4044, 262, 1334, 313]}' >"$s/new.items"
    for dp in 0 0.6; do
        score "$s/dynamic.bin" --tokens --dp $dp -q
        score=$(sed 's/.*"logprob": \([^,]*\),.*/\1/' "$s/out")
        succeeds run "$s/dynamic.bin" --tokens --ppl "$s/new.tok" --ppl-window 8 --dense-prefix 4 --dp $dp -q \
            --json "$s/figures"
        same_number "$score" "$(awk "BEGIN { print -4 * $(json nll "$s/figures") }")" 0.0001
        echo "$score" >>"$s/new.scores"
    done
    [ "$(sort -u "$s/new.scores" | wc -l)" -eq 2 ]
    # one token scored: no standard error
    succeeds run "$s/dynamic.bin" --tokens --ppl "$s/new.tok" --ppl-window 8 --ppl-tokens 2
    grep -q '^nll .* +- n/a nats' "$s/err"
}
t scores_are_those_of_perplexity

a_long_context_is_cut_and_said_so() {
    long=$(for _ in 1 2 3 4 5 6 7 8 9 10; do printf '%s there was a king. ' "$once"; done)
    echo "{\"context\": \"$long\", \"continuation\": \"The king\"}" >"$s/new.items"
    score "$s/dense.bin" -c 20
    grep -q '^warning *1 contexts were too long for 20 tokens' "$s/err"
    score "$s/dense.bin" -c 20 -q
    [ ! -s "$s/err" ]
    score "$s/dense.bin"
    lacks '^warning' "$s/err"
}
t a_long_context_is_cut_and_said_so

# The file and the line are named; the lines before have been printed, nothing of the bad one.
wrong_items_are_refused() {
    good='{"context": "a", "continuation": " b"}'
    while IFS='|' read -r pattern line; do
        { echo "$good"; printf '%s\n' "$line"; } >"$s/new.items"
        got=0
        run "$s/dense.bin" --score "$s/new.items" -q >"$s/out" 2>"$s/err" || got=$?
        [ $got -ne 0 ]
        [ "$(wc -l <"$s/out")" -eq 1 ]
        [ "$(wc -l <"$s/err")" -eq 1 ]
        grep -q "new.items:2: .*$pattern" "$s/err"
    done <<'END'
bad JSON|{"context": "a", "continuation": "b"
bad JSON|
bad JSON|{"context": "a\u0000", "continuation": "b"}
"continuation" is not a string|{"context": "a"}
"context" is not a string|{"context": 7, "continuation": "b"}
"context" is not a string|["a", "b"]
adds no token|{"context": "a", "continuation": ""}
END
    refuses 1 'nowhere.*No such file' run "$s/dense.bin" --score "$s/nowhere" -q
    echo "$good" >"$s/new.items"
    refuses 1 'new.items:1: "context" is not an array' run "$s/dense.bin" --score "$s/new.items" --tokens -q
    echo '{"context": [], "continuation": [5]}' >"$s/new.items"
    refuses 2 'new.items:1: the context is empty' run "$s/dense.bin" --score "$s/new.items" --tokens -q
    echo '{"context": [1], "continuation": [999999]}' >"$s/new.items"
    refuses 1 'new.items:1: .*vocabulary of' run "$s/dense.bin" --score "$s/new.items" --tokens -q
    : >"$s/new.items"
    succeeds run "$s/dense.bin" --score "$s/new.items" -q
}
t wrong_items_are_refused

# cases.md row 50: of the threads of a core one is used unless -j asks for more.
threads_are_no_more_than_cores() {
    cores=$(cat /sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list | sort -u | wc -l) || cores=0
    [ "$cores" -gt 0 ] || skip_test 'no list of cores in /sys'
    succeeds run "$s/dense.bin" -p "$once" -n 1 -b cpu
    threads=$(sed -n 's/^device .*CPU, \([0-9]*\) thread.*/\1/p' "$s/err")
    [ "$threads" -ge 1 ] && [ "$threads" -le "$cores" ]
}
t threads_are_no_more_than_cores

# cases.md row 50: one warm-up that is not counted, dense beside compressed, depth, bytes and GB/s.
bench_prints_a_table() {
    make_dynamic
    succeeds run "$s/dynamic.bin" --bench --prompt-tokens 9 -n 5 --json "$s/figures" -j 1
    [ "$(grep -c '^tiled-cbc ' "$s/out")" -eq 3 ]
    grep -q 'read ceiling' "$s/out"
    grep -q 'one generation of each row warms up and is not counted, then 5 are' "$s/out"
    grep -q '^storage .*SP .*DP .*depth .*TTFT ms .*TPOT ms .*p99 .*min .*max .*read/token .*GB/s' "$s/out"
    for dp in 0 0.3 0.5; do grep -q "\"dp_asked\":$dp," "$s/figures"; done
    [ "$(grep -o '"storage":"tiled-cbc","sp":0.5' "$s/figures" | wc -l)" -eq 3 ]
    [ "$(grep -o '"prefill_tokens":9,"decode_tokens":5,"repeats":5' "$s/figures" | wc -l)" -eq 4 ]
    grep -q '"tpot_max_ms":[0-9].*"clock_mhz":' "$s/figures"
    grep -qE '; clock ([0-9]+( to [0-9]+)? MHz|n/a); read ceiling' "$s/out"
    # The same matrices dense beside them.
    [ "$(grep -c '^dense  *0\.500  0\.00 ' "$s/out")" -eq 1 ]
    grep -o '"bytes_per_token":[0-9]*' "$s/figures" | cut -d: -f2 | tr '\n' ' ' >"$s/sizes"
    read -r exact _ _ dense_bytes <"$s/sizes" || [ -n "$dense_bytes" ]
    [ "$dense_bytes" -gt "$exact" ]
    succeeds run "$s/dynamic.bin" --bench --prompt-tokens 9 -n 5 --dp 0.4 -q -j 1
    [ ! -s "$s/err" ]
    [ "$(grep -c '^tiled-cbc .* 0.40 ' "$s/out")" -eq 1 ]
    [ "$(grep -c '^dense ' "$s/out")" -eq 1 ]
    # Nothing to skip: one ratio.
    succeeds run "$s/ids.bin" --bench --prompt-tokens 9 -n 5 -j 1
    [ "$(grep -c '^dense .* 0.00 ' "$s/out")" -eq 1 ]
    grep -q '^note *no rows for dynamic pruning: the model has no thresholds, or stores nothing compressed$' "$s/err"
    # Random weights have the dense model beside them.
    succeeds run --synthetic 64:128:2:4:2:97:64 --bench --prompt-tokens 9 -n 5 -q -j 1 --json "$s/figures"
    [ "$(grep -c '^tiled-cbc  0\.3' "$s/out")" -eq 3 ]
    [ "$(grep -c '^dense  *0\.000' "$s/out")" -eq 1 ]
    [ "$(grep -o '"storage"' "$s/figures" | wc -l)" -eq 4 ]
}
t bench_prints_a_table

wrong_measurements_are_refused() {
    refuses_each 2 run "$s/dense.bin" <<END
--logprobs 0|--logprobs 0
--logprobs 21|--logprobs 21
exclude each other|--score x --ppl y
exclude each other|--bench --score y
exclude each other|--bench -p x
--score does not go with --json|--score x --json $s/new.json
--score does not go with --logprobs|--score x --logprobs 1
--ppl does not go with --logprobs|--ppl x --logprobs 1
--bench does not go with --logprobs|--bench --logprobs 1
--bench does not go with --tokens|--bench --tokens
--bench does not go with -n below 2|--bench -n 1
--prompt-tokens goes with --synthetic|--prompt-tokens 9
do not fit in the context|--bench -c 100 -q
END
    refuses 2 '--score: random weights' run --synthetic 64:128:2:4:2:97:64 --score x
}
t wrong_measurements_are_refused

# ---- chat -----------------------------------------------------------------------------------------------------

# Standard input for the next command, in $s/in.
types() { printf '%s\n' "$@" >"$s/in"; }

chat_puts_answers_alone_on_stdout() {
    greedy first "$s/dense.bin" -p "$once" -n 8
    types "$once" '' '   ' 'And then'
    succeeds run "$s/dense.bin" --chat -t 0 -n 8 --stats <"$s/in"
    [ "$(head -n 1 "$s/out")" = "$(cat "$s/first")" ]
    [ "$(wc -c <"$s/out")" -gt $(($(wc -c <"$s/first") + 8)) ]
    [ "$(tail -c 1 "$s/out" | od -An -tx1 | tr -d ' ')" = 0a ]
    grep -q '^chat *template plain (the file names none), context 512' "$s/err"
    [ "$(grep -c '^prefill .*TPOT [0-9.]* ms' "$s/err")" -eq 2 ]
    lacks '^> ' "$s/err"
    cp "$s/out" "$s/loud"
    succeeds run "$s/dense.bin" --chat -t 0 -n 8 -q <"$s/in"
    cmp "$s/out" "$s/loud"
    [ ! -s "$s/err" ]
}
t chat_puts_answers_alone_on_stdout

# cases.md row 44.
row_44_end_of_input_ends_the_chat() {
    succeeds timeout 60 run "$s/dense.bin" --chat
    [ ! -s "$s/out" ]
    printf '%s' "$once" >"$s/in"
    succeeds timeout 60 run "$s/dense.bin" --chat -t 0 -n 8 <"$s/in"
    greedy first "$s/dense.bin" -p "$once" -n 8
    echo >>"$s/first"
    cmp "$s/out" "$s/first"
    types '/quit' "$once"
    succeeds timeout 60 run "$s/dense.bin" --chat <"$s/in"
    [ ! -s "$s/out" ]
}
t row_44_end_of_input_ends_the_chat

chat_commands_do_what_they_say() {
    types "$once" "/save $s/said" /reset /stats "/load $s/said" /stats '/system Be kind.' /stats /reset /stats \
        /system /stats '/nonsense x' /save '/quit now' "/load $s/new.jsonl" /help
    succeeds run "$s/dense.bin" --chat -t 0 -n 8 <"$s/in"
    grep '^context' "$s/err" >"$s/contexts"
    sed 's/.*tokens, //' "$s/contexts" >"$s/short"
    cat >"$s/want" <<EOF
turns: 0, template plain, system prompt: none
turns: 1, template plain, system prompt: none
turns: 0, template plain, system prompt: Be kind.
turns: 0, template plain, system prompt: Be kind.
turns: 0, template plain, system prompt: none
EOF
    cmp "$s/short" "$s/want"
    for line in 'unknown command /nonsense' '/save needs a FILE' '/quit takes nothing' \
        "$s/new.jsonl: No such file"; do
        grep -q "^$line" "$s/err"
    done
    for command in help reset system stats save load quit; do
        grep -q "^/$command " "$s/err"
    done
    [ "$(wc -l <"$s/said")" -eq 2 ]
    grep -qF "{\"role\":\"user\",\"content\":\"$once\"}" "$s/said"
    # A conversation goes on where it was saved.
    types "$once" 'The king'
    run "$s/dense.bin" --chat -t 0 -n 8 -q <"$s/in" | tail -n +2 >"$s/kept"
    types "/load $s/said" 'The king'
    run "$s/dense.bin" --chat -t 0 -n 8 -q <"$s/in" >"$s/loaded"
    cmp "$s/loaded" "$s/kept"
    types 'The king'
    run "$s/dense.bin" --chat -t 0 -n 8 -q <"$s/in" >"$s/alone"
    differ "$s/alone" "$s/kept"
}
t chat_commands_do_what_they_say

# A text that is pasted between quotes is one, whatever it begins with.
chat_quotes_make_a_message_of_a_command() {
    types "$once" '"""' /reset '"""' '"""/quit"""' /stats
    succeeds run "$s/dense.bin" --chat -t 0 -n 4 <"$s/in"
    grep -q '^context .*turns: 3,' "$s/err"
}
t chat_quotes_make_a_message_of_a_command

chat_goes_on_when_the_context_is_full() {
    types "$once" 'The king said' 'And the queen' "$once $once $once $once $once $once $once $once $once" 'At last'
    succeeds timeout 60 run "$s/dense.bin" --chat -t 0 -c 40 --system 'A tale.' --ignore-eos --stats <"$s/in"
    grep -q 'context of 40 tokens is full: the answer ends here' "$s/err"
    grep -q 'context of 40 tokens is full; turns forgotten: the oldest 1 of 1' "$s/err"
    grep -q 'the message has 4[0-9] tokens with the system prompt, the context holds 40' "$s/err"
    [ "$(grep -c '^prefill' "$s/err")" -eq 4 ]
}
t chat_goes_on_when_the_context_is_full

chat_templates_and_stop_strings() {
    : >"$s/sizes"
    for template in llama2 zephyr plain none; do
        types "$once" /stats 'And then' /stats
        succeeds run "$s/dense.bin" --chat -t 0 -n 4 --template $template <"$s/in"
        grep -q "^chat *template $template asked" "$s/err"
        sed -n 's/^context *\([0-9]*\) .*/\1/p' "$s/err" | tr '\n' ' ' >>"$s/sizes"
    done
    [ "$(tr ' ' '\n' <"$s/sizes" | sort -u | wc -l)" -gt 6 ]
    types "$once"
    succeeds run "$s/dense.bin" --chat -t 0 --stop 'shining' -q <"$s/in"
    [ "$(cat "$s/out")" = ', the sun was ' ]
}
t chat_templates_and_stop_strings

# What the source's tokenizer_config.json asks for is in the file.
chat_template_comes_from_the_source() {
    copy_demo "$s/tuned"
    zephyr="{{ '<|user|>' + message['content'] + eos_token }}{{ '<|assistant|>' }}"
    while IFS='|' read -r want_template text; do
        printf '%s' "$text" >"$s/tuned/tokenizer_config.json"
        convert "$s/tuned" "$s/tuned.bin" --sp 0 --format dense -q --force
        succeeds run "$s/tuned.bin" --chat
        grep -q "^chat *template $want_template" "$s/err"
    done <<EOF
plain (the file names none)|{}
plain (the file names none)|{"chat_template": "{{ '[INST] ' }}"}
llama2 from the file|{"model_max_length": 1e30, "chat_template": "[INST] <<SYS>>\n"}
zephyr from the file|{"chat_template": "$zephyr"}
zephyr from the file|{"chat_template": [{"name": "x", "template": "y"}, {"name": "default", "template": "$zephyr"}]}
EOF
    succeeds run "$s/tuned.bin" --chat --template none
    grep -q '^chat *template none asked' "$s/err"
    echo '{' >"$s/tuned/tokenizer_config.json"
    refuses 1 'tokenizer_config.json' convert "$s/tuned" "$s/new.bin" --sp 0 --format dense -q
}
t chat_template_comes_from_the_source

wrong_chat_options_are_refused() {
    refuses_each 2 run "$s/dense.bin" <<EOF
--chat.*-p|--chat -p x
--chat.*-f|--chat -f $s/once.txt
--chat.*--tokens|--chat --tokens
--chat.*--ppl|--chat --ppl $s/once.txt
--chat.*--score|--chat --score $s/once.txt
--chat.*--bench|--chat --bench
--chat.*--json|--chat --json -
--chat.*--logprobs|--chat --logprobs 2
--chat.*-n 0|--chat -n 0
--template foo: not llama2|--chat --template foo
--system.*none|--chat --template none --system x
--system goes with --chat|--system x
--template goes with --chat|--template plain
--stats goes with --chat|--stats
EOF
    refuses 2 'no tokenizer' run "$s/ids.bin" --chat
    types Hello
    [ -w /dev/full ] || skip_test 'no /dev/full'
    full='exec "$@" >/dev/full'
    refuses 1 'standard output: No space left' sh -c "$full" sh run "$s/dense.bin" --chat -n 4 -q <"$s/in"
}
t wrong_chat_options_are_refused

# waits_for COMMAND...: until it succeeds; half a minute at most
waits_for() {
    for _ in $(seq 1500); do
        if "$@"; then return 0; fi
        sleep 0.02
    done
    return 1
}

# Is a pattern on so many lines of the terminal?
shown() { [ "$(grep -c -e "$2" "$s/screen")" -ge "$1" ]; }
shows() { waits_for shown 1 "$1"; }
shows_again() { waits_for shown 2 "$1"; }

# Has the chat on the terminal ended?
ended() { ! kill -0 "$(cat "$s/pid")" 2>/dev/null; }

# A chat on a terminal where the function types, after which it ends with status 0 and leaves the terminal as it was.
# The shell that starts it gets the Ctrl-C that ends an answer as well and may die of it after the chat, as dash does:
# hence the trap, which the chat does not inherit. It does inherit an empty one: it starts with SIGINT ignored.
on_a_terminal() {
    command -v script >/dev/null || skip_test 'no script (bsdutils)'
    make_endless
    rm -f "$s/typed"
    : >"$s/screen"
    cat >"$s/session" <<EOF
trap '${2-:}' INT
stty -g >'$s/tty'
sh -c 'echo \$\$ >"$s/pid" && exec run "$s/endless.bin" --chat -c 16384 -t 0 --ignore-eos --stats' || exit
stty -g | cmp - '$s/tty'
EOF
    {
        "$1"
        waits_for ended
        : >"$s/typed"
    } | SHELL=/bin/sh TERM=xterm status 0 timeout 120 script -qfec ". '$s/session'" "$s/screen"
    [ -e "$s/typed" ]
}

# cases.md row 44. Ctrl-C ends an answer and then, at the prompt, the program; the arrow key brings the last line back.
types_a_chat() {
    shows '^> '
    printf '%s\n' "$once"
    shows 'moon'
    printf '\003'
    shows 'stop: interrupt'
    printf '/save %s\n' "$s/said"
    shows 'turns saved: 1'
    printf '\033[A.again\n'
    shows_again 'turns saved: 1'
    [ -e "$s/said.again" ]
    printf '/system a\\\n'
    shows '^\. '
    printf 'b\n/stats\n'
    shows 'system prompt: a'
    printf half
    shows '> half'
    printf '\003'
}
row_44_chat_on_a_terminal() {
    on_a_terminal types_a_chat
    cmp "$s/said" "$s/said.again"
    grep -q 'shining in the sky' "$s/said"
}
t row_44_chat_on_a_terminal

# As a signal, too, and inside a message, which is not answered.
types_half() {
    shows '^> '
    printf half
    shows '> half'
}
types_half_a_message() {
    shows '^> '
    printf '%s\\\n' "$once"
    shows '^\. '
}
signals() { kill -INT "$(cat "$s/pid")"; }
interrupts_a_line() {
    types_half
    signals
}
interrupts_a_message() {
    types_half_a_message
    signals
}
leaves_a_message() {
    types_half_a_message
    printf '\003'
}
row_44_an_interrupt_at_the_prompt_ends_the_chat() {
    for typist in interrupts_a_line interrupts_a_message leaves_a_message; do
        on_a_terminal $typist
        lacks 'stop:' "$s/screen"
    done
}
t row_44_an_interrupt_at_the_prompt_ends_the_chat

# A command that waits: /load, for the end of what it reads. A Ctrl-C before it waits may go unnoticed.
opened() { find "/proc/$(cat "$s/pid")/fd" -lname "$1" | grep -q .; }
interrupted_again() {
    printf '\003'
    sleep 0.2
    ended
}
interrupts_a_command() {
    shows '^> '
    printf '/load %s\n' "$s/slow"
    exec 3<>"$s/slow"
    waits_for opened "$s/slow"
    waits_for interrupted_again
}
row_44_an_interrupt_between_prompts_ends_the_chat() {
    mkfifo "$s/slow"
    on_a_terminal interrupts_a_command
}
t row_44_an_interrupt_between_prompts_ends_the_chat

signals_in_vain() {
    types_half
    signals
    printf 'hearted\025/stats\n'
    shows 'turns: 0'
    printf '/quit\n'
}
row_44_an_ignored_interrupt_stays_ignored() { on_a_terminal signals_in_vain ''; }
t row_44_an_ignored_interrupt_stays_ignored

# Without a terminal there is nothing to put in order. /stats is answered where there is no answer to end.
told() { grep -q '^context' "$s/told"; }
row_44_an_interrupt_ends_a_chat_without_a_terminal_at_once() {
    mkfifo "$s/silent"
    : >"$s/told"
    # Opened for writing, too: its end does not come. timeout gives SIGINT back, which the shell ignores in a job.
    # shellcheck disable=SC2016  # the shell that starts it expands this
    start='echo $$ >"$0" && exec "$@"'
    timeout 60 sh -c "$start" "$s/pid" run "$s/dense.bin" --chat -n 4 <>"$s/silent" 2>"$s/told" &
    printf '%s\n/stats\n' "$once" >"$s/silent"
    waits_for told
    kill -INT "$(cat "$s/pid")"
    status 130 wait $!
}
t row_44_an_interrupt_ends_a_chat_without_a_terminal_at_once

exit $failed
