# Bash completion of spdp-run and spdp-convert. Where there is nothing to offer, readline offers file names.
# shellcheck shell=bash

_spdp_shapes='tinyllama-1.1b llama2-7b llama2-13b llama2-70b'

# Offer those of the words in $1 that begin with what has been typed.
_spdp_offer() { mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2"); }

_spdp_run() {
    local typed=$2 before=$3
    COMPREPLY=()
    case $before in
    --prune) _spdp_offer 'mlp all' "$typed" ;;
    --template) _spdp_offer 'llama2 zephyr plain none' "$typed" ;;
    --synthetic) _spdp_offer "$_spdp_shapes" "$typed" ;;
    -b) _spdp_offer 'auto cpu cuda' "$typed" ;;
    -[pfntcj] | --top-[pk] | --seed | --stop | --dp | --sp | --system | --device | --json | --logprobs) ;;
    --ppl | --ppl-window | --ppl-stride | --ppl-tokens | --dense-prefix | --score | --prompt-tokens) ;;
    *)
        [[ $typed != -* ]] || _spdp_offer '-p -f -e --tokens
            -n -t --top-p --top-k --seed --stop --ignore-eos --dp
            --chat --system --template --stats
            --ppl --ppl-window --ppl-stride --dense-prefix --ppl-tokens --score --bench
            --synthetic --sp --prune --prompt-tokens
            -c -b --device -j --logprobs --json --verify -v -q --version -h --help' "$typed"
        ;;
    esac
}

_spdp_convert() {
    local typed=$2 before=$3
    COMPREPLY=()
    case $before in
    --prune) _spdp_offer 'mlp all' "$typed" ;;
    --method) _spdp_offer 'magnitude wanda sparsegpt' "$typed" ;;
    --format) _spdp_offer 'auto dense tiled-cbc' "$typed" ;;
    --synthetic) _spdp_offer "$_spdp_shapes" "$typed" ;;
    -b) _spdp_offer 'auto cpu cuda' "$typed" ;;
    -j | --sp | --dp | --seed | --calib | --calib-dp | --calib-tokens | --calib-len | --tokenizer | --info) ;;
    *)
        [[ $typed != -* ]] || _spdp_offer '--sp --prune --method --per-row --dp
            --calib --calib-dp --calib-tokens --calib-len -b
            --format --tokenizer --no-tokenizer --force --resume
            --info --synthetic --seed -j -q --version -h --help' "$typed"
        ;;
    esac
}

complete -o default -F _spdp_run spdp-run
complete -o default -F _spdp_convert spdp-convert
