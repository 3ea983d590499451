#!/bin/sh
# Write the seeds of the fuzz targets: `tests/fuzz/make_corpus.sh`, from the root of the repository, after `make`.
# The names of the safetensors seeds are those of the collected header recipes (H0 to H12).
set -eu
convert=${BIN:-.}/convert
corpus=tests/fuzz/corpus
for target in checkpoint safetensors json tokenizer; do
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
synthetic() { "$convert" --synthetic "$1" "$c/$2" --no-tokenizer --prune all -q --seed 1 --sp "$3" --format "$4"; }
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
