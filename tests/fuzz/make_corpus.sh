#!/bin/sh
# Write the seeds of the fuzz targets, and the model that fuzz_decode loads: `tests/fuzz/make_corpus.sh`, from the
# root of the repository, after `make`.
# The names of the safetensors seeds are those of the collected header recipes (H0 to H12).
set -eu
convert=${BIN:-.}/convert
corpus=tests/fuzz/corpus
for target in checkpoint safetensors json tokenizer llama2c decode chat; do
    mkdir -p "$corpus/$target"
    rm -f "$corpus/$target"/*
done

# ---- model files ----

# patch FILE OFFSET BYTES: overwrite bytes, written as printf's octal escapes.
patch() { printf "$3" | dd of="$1" bs=1 seek="$2" conv=notrunc status=none; }

# Offset of field $3 (bytes into the entry) of entry $2 in the section table of file $1.
entry() { echo $(($(od -An -tu8 -j24 -N8 "$1") + $2 * 256 + $3)); }

# The sections of one of these files, in order: embedding, attention norm, q|k|v, o, MLP norm, gate|up, down,
# final norm, head, provenance.
O=3 GATE_UP=5 HEAD=8
KIND=0 FLAGS=40 FORMAT=44 N_PARTS=68 ROWS=72

c=$corpus/checkpoint
synthetic() {
    "$convert" --synthetic "$1" "$c/$2" --no-tokenizer --prune all -q --seed 1 --sp "$3" --dp 0 --format "$4"
}
synthetic 16:40:1:2:1:8:32 tiled 0.5 tiled-cbc
synthetic 16:40:1:2:1:8:32 dense 0 dense
synthetic 20:150:1:2:1:3:4 two-tile-rows 0.9 tiled-cbc
synthetic 8:8:1:1:1:4:4 all-zero 1 tiled-cbc
synthetic 8:8:2:1:1:4:4 two-layers 0.5 auto

# Copies of tiled with one change. The target makes the hash right.
changed() { cp "$c/tiled" "$c/$1"; }
changed unknown-optional && patch "$c/unknown-optional" "$(entry "$c/tiled" $HEAD $KIND)" '\143' &&
    patch "$c/unknown-optional" "$(entry "$c/tiled" $HEAD $FLAGS)" '\001'
changed unknown-kind-0 && patch "$c/unknown-kind-0" "$(entry "$c/tiled" $HEAD $KIND)" '\000' &&
    patch "$c/unknown-kind-0" "$(entry "$c/tiled" $HEAD $FLAGS)" '\001' &&
    patch "$c/unknown-kind-0" "$(entry "$c/tiled" $HEAD $FORMAT)" '\002'
changed vocab-int-min && patch "$c/vocab-int-min" 68 '\0\0\0\200'
changed no-row-map && patch "$c/no-row-map" "$(entry "$c/tiled" $GATE_UP $N_PARTS)" '\0'
changed wrong-rows && patch "$c/wrong-rows" "$(entry "$c/tiled" $O $ROWS)" '\377\377\377\377\377\377\377\377'
head -c 256 "$c/tiled" >"$c/header-only"
printf 'SPDPv1\n' >"$c/line-end"
printf '\040\001\0\0\0\003\0\0\006\0\0\0\006\0\0\0\006\0\0\0\0\175\0\0\0\001\0\0' >"$c/llama2c"

# ---- safetensors ----

# length N: eight bytes, little-endian, N below 65536.
length() { printf "\\$(printf %o $(($1 % 256)))\\$(printf %o $(($1 / 256)))\\0\\0\\0\\0\\0\\0"; }

# safetensors NAME JSON DATA [LENGTH]: DATA is as printf takes it.
safetensors() {
    { length "${4:-${#2}}"; printf %s "$2"; printf "$3"; } >"$corpus/safetensors/$1"
}

# tensor DTYPE SHAPE OFFSETS
tensor() { echo "{\"a\":{\"dtype\":\"$1\",\"shape\":$2,\"data_offsets\":$3}}"; }

data='12345678'
h0=$(tensor F32 '[2]' '[0,8]')
s=$corpus/safetensors
safetensors H0 "$h0" $data
: >"$s/H1-empty"
printf '\066\0\0\0\0\0\0' >"$s/H1-seven"
{ printf '\377\377\377\377\377\377\377\377'; printf %s "$h0"; } >"$s/H2"
{ printf '\001\341\365\005\0\0\0\0'; printf %s "$h0"; } >"$s/H3"
safetensors H4-long "$h0" $data 55
safetensors H4-short "$h0" $data 53
safetensors H5-no-object '[1]' ''
safetensors H5-cut '{"a":{"dtype":"F32","shape":[2' ''
safetensors H5-utf8 "$(printf '{"\377":1}')" '' 7
safetensors H5-deep "{\"a\":$(printf '%0100d' 0 | tr 0 '[')" ''
safetensors H6 "$(tensor F32 '[4]' '[0,8]')" $data
safetensors H6-overflow "$(tensor F32 '[4294967296,4294967296]' '[0,0]')" ''
safetensors H8-reversed "$(tensor F32 '[2]' '[8,0]')" $data
safetensors H8-beyond "$(tensor F32 '[4]' '[0,16]')" $data
safetensors H8-negative "$(tensor F32 '[2]' '[-8,0]')" $data
safetensors H8-float "$(tensor F32 '[2]' '[0,8e0]')" $data
two='{"x":{"dtype":"F16","shape":[2],"data_offsets":[4,8]},"y":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]}}'
safetensors two "$two" $data
safetensors H10 "$(echo "$two" | sed s/\"y\"/\"x\"/)" $data
safetensors H11 "$(tensor F8_E4M3 '[8]' '[0,8]')" $data
safetensors H12-padded "$h0  " $data
safetensors H12-scalar "$(tensor F16 '[]' '[0,2]')" '12'
safetensors H12-zero-size "$(tensor F32 '[0,4]' '[0,0]')" ''
safetensors H12-metadata '{"__metadata__":{"format":"pt"},"a":{"shape":[4],"data_offsets":[0,8],"dtype":"F16"}}' $data

# ---- JSON ----

json() { printf %s "$2" >"$corpus/json/$1"; }
json object '{"a":1,"b":[true,false,null,"x"],"c":{"a":{}}}'
json numbers '[0,-0,1.5,-2e10,1E-5,9007199254740992,9007199254740993,1e999,18446744073709551616]'
json strings '["\"\\\/\b\f\n\r\t","\u00e9\ud83e\udd99","🦙",""]'
json surrogate '"\ud83e"'
json nul '"a\u0000b"'
json bad-number '[01]'
json same-key '{"a":1,"\u0061":2}'
json case '{"a":1,"A":2}'
json trailing '{} x'
json space " $(printf '\t\n\r') 1 "
json deep "$(printf '%064d' 0 | tr 0 '[')$(printf '%064d' 0 | tr 0 ']')"
json too-deep "$(printf '%065d' 0 | tr 0 '[')$(printf '%065d' 0 | tr 0 ']')"
json long-number '1234567890123456789012345678901234567890123456789012345678901234'
json config "$(cat demo/config.json)"
printf '"\303\251\355\240\200\300\200"' >"$corpus/json/utf8"
printf '"a\0b"' >"$corpus/json/raw-nul"

# ---- tokenizer: "t" and text, "2" or "4" and ids of that many bytes ----

token() { printf "$2" >"$corpus/tokenizer/$1"; }
token empty 't'
token story 'tOnce upon a time, there was a little girl.'
token spaces 't  Hello  world '
token space 't '
token many-spaces 't                  x'
token control 't<s>Hello</s><0x0A><unk>'
token lines 'tHello\r\n\n\tx'
token emoji 't\360\237\246\231 \346\227\245\346\234\254'
token space-symbol 't\342\226\201a\342\226\201'
token lone-ff 't\377'
token cut-character 'ta\303'
token surrogate 't\355\240\200'
token nul 'ta\0b'
token overlong 't\300\200\364\220\200\200'
token ids '2\005\0\007\0\144\0\054\001'
token byte-ids '2\367\0\243\0\252\0\235\0'
token control-ids '2\004\0\005\0\006\0\005\0'
token range-ids '4\377\377\377\377\377\377\377\177\0\0\0\200\0\0\0\0'

# ---- llama2.c checkpoints; the target adds what a file is short of ----

# bytes N..., words N...: integers of one and of four bytes, little-endian, negative ones too.
bytes() { for n; do printf "\\$(printf %o $((n & 255)))"; done; }
words() { for n; do bytes "$n" $((n >> 8)) $((n >> 16)) $((n >> 24)); done; }

l=$corpus/llama2c
{ words 4 6 1 2 1 3 5; head -c 616 /dev/zero; } >"$l/v0"
words 4 6 1 2 2 -3 5 >"$l/v0-own-head"
{ words 8 12 2 2 1 3 5; words 0x3f800000 0x7fc00000; } >"$l/v0-nan"
{ words 4 6 1 2 1 3 5; words 0xc0490fdb 0x477fe000 0x47800000; } >"$l/v0-large"
words 4 6 1 2 1 0x80000000 5 >"$l/v0-vocab-int-min"
words 0x40000000 0x7fffffff 1 1 1 3 5 >"$l/v0-wide"
words 2 1 60 1 1 3 1 >"$l/v0-deep"
words 6 6 1 2 1 3 5 >"$l/v0-odd-head"
words 4 6 1 2 1 3 >"$l/v0-cut"
v1() { words 0x616b3432 "$1"; shift; words "$@"; }
{ v1 1 4 6 1 2 1 3 5; bytes 1; head -c 219 /dev/zero; } >"$l/v1"
{ v1 1 8 12 2 4 2 5 0x7fffffff; bytes 0; head -c 219 /dev/zero; words 0xff800000; } >"$l/v1-own-head"
{ v1 1 4 6 1 2 1 3 5; bytes 7; head -c 219 /dev/zero; } >"$l/v1-bad-flag"
v1 2 4 6 1 2 1 3 5 >"$l/v2"

# ---- decode: Settings of the target, then ids ----

# Small, as every input costs tens of tokens; matrices of both formats.
"$convert" --synthetic 20:12:2:2:1:67:24 tests/fuzz/model.bin --no-tokenizer --prune mlp -q --seed 1 --sp 0.5 \
    --dp 0 --format tiled-cbc --force

# decode NAME 'FLAGS CACHED PIECE N_NEW' 'TEMPERATURE TOP_P TOP_K THRESHOLD' 'NORM NORM INTERRUPT_AT STOP_LENGTHS' \
#     IDS
decode() { { bytes $2; words $3; bytes $4 5 6 7 0; printf "$5"; } >"$corpus/decode/$1"; }

ids='\001\024\007\050\003\052\011\020'
eight='12345678'
sampled='0x3f4ccccd 0x3f666666 0 0'
decode greedy '2 0 0 20' '0 0 0 0' '0 0 0 0' $ids
decode sampled '3 0 0 20' "$sampled" '0 0 0 0' $ids
decode top-k '2 0 0 20' '0x40000000 0x3f800000 3 0' '0 0 0 0' $ids
decode top-k-1 '2 0 0 20' '0x47c35000 0x00000001 1 0' '0 0 0 0' $ids
decode end-of-sequence '0 0 0 30' '0x47c35000 0 0 0' '0 0 0 0' $ids
decode cached '3 5 2 3' "$sampled" '0 0 0 0' $ids
decode cached-by-decode '6 5 0 0' "$sampled" '0 0 0 0' $ids
decode thresholds '11 3 1 9' '0 0 0 0x3f000000' '0 0 0 0' $ids
decode threshold-nan '10 0 0 9' '0 0 0 0x7fc00000' '0 0 0 0' $ids
decode norm-nan '19 0 0 9' "$sampled" '0 0x7e 0 0' $ids
decode norm-large '18 0 0 9' "$sampled" '255 0x7b 0 0' $ids
decode interrupt '66 0 0 9' "$sampled" '0 0 3 0' $ids
decode interrupt-first '66 0 0 9' "$sampled" '0 0 0 0' $ids
decode interrupt-prefill '66 2 0 0' "$sampled" '0 0 0 0' $ids
decode stop '130 0 0 -1' "$sampled" '0 0 0 0x53' $ids
decode many-new '34 2 0 0' "$sampled" '0 0 0 0' $ids
decode full '2 9 4 5' '0 0 0 0' '0 0 0 0' $eight$eight$eight
decode beyond '2 40 9 5' '0 0 0 0' '0 0 0 0' $eight$eight$eight$eight$eight
decode raw-ids '2 0 0 3' '0 0 0 0' '0 0 0 0' '\001\0\0\0\102\0\0\0'
decode raw-beyond '2 0 0 3' '0 0 0 0' '0 0 0 0' '\001\0\103\0\0\200'
decode raw-odd '2 0 0 3' '0 0 0 0' '0 0 0 0' '\001\0\002'

# ---- chat: the template, the context, then what is typed ("0" to "3") or a transcript ("4" to "7") ----

chat() { printf "$2" >"$corpus/chat/$1"; }
user='{"role":"user","content":"Hello"}\n'
assistant='{"role":"assistant","content":" you \\u00e9\\n"}\n'
system='{"role":"system","content":"Be \\"kind\\"."}\n'
chat llama2 '0PHello\nHow are you?\nAnd you?\n#some ids\n/save\nBye'
chat zephyr '1P/system Be kind.\nHello\nyou\nMore\n  text \n/save\n'
chat plain '2P/system A tale.\nOnce upon\n a time\nThen\n#abc\n'
chat none '3POnce upon\n#\nThen\n\n'
chat control-tokens '0P<s>[INST] Hi [/INST] </s><s><unk>\n</s>\n/system <</SYS>><s>\n<0x01>\n'
chat full '0\014Hello\nyou\nHow are you?\nfine\nAnd again?\nfine\nAnd again?\n#fine\nAnd now?\n'
chat tiny '2\001Hello\nyou\n'
chat lines '2Pa\\\nb\\\\\n\nc\n"""d\n\n e\\\n"""\n"""one"""\nx\r\n\r\n"""open'
chat bytes '1P\377\303(\nan\0swer\n\001\342\226\201\360\237\246\231\n'
chat transcript "4P$system$user$assistant$user$assistant"
chat transcript-plain "6P$user$assistant"
chat transcript-no-system "7P$system$user$assistant"
chat transcript-zephyr "5P$user$assistant"
chat transcript-roles "4P$assistant$user"
chat transcript-open "5P$user$assistant$user"
chat transcript-cut '6P{"role":"user","content":"a"'
chat transcript-comma '6P{"1":1,'
chat transcript-nul '6P{"role":"user","content":"a\\u0000b"}\r\n'"$assistant"
chat transcript-empty '4P'
