"""A small Llama with random weights and a byte-level tokenizer, made offline in seconds, for tests and the demo.

Ordinary initialisations make poor test models: every prompt ends in the same repeated token, and a wrong KV page
changes nothing. Here the weights are drawn wide enough that one changed token anywhere in thousands changes the
greedy answer. Answers are printable ASCII, so that one character is one token and text is as exact as token ids.

Start vLLM with `--dtype float32` (its "auto" makes bfloat16 of float32 weights): such a model is chaotic, and in
bfloat16 its two best tokens often tie, so that another batch or chunk size alone changes the answer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL_TOKENS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PRINTABLE = range(0x20, 0x7F)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Standard deviations of attention scores, of a layer's attention and MLP output (the embedding's is 1), and of logits.
# Scores of 2 and less average thousands of tokens into one and the same answer; 5 and more are one-hot.
SCORE_STD = 4.0
VALUE_GAIN = 1.0
MLP_GAIN = 1.0
LOGIT_STD = 8.0


def make_model(
    folder: Path | str,
    *,
    layers: int = 8,
    hidden: int = 512,
    heads: int = 8,
    kv_heads: int = 8,
    head_dim: int = 128,
    intermediate: int = 512,
    max_position: int = 16_384,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write model and tokenizer to `folder` (created if need be) and return it.

    The same arguments give the same bytes. At the default shape a token's KV takes 64 KB (8 layers x 2 x 8 heads x
    128 x 4 bytes).
    """
    import torch

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = _write_tokenizer(folder, max_position)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": max_position,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "pad_token_id": 256 + SPECIAL_TOKENS.index("<|pad|>"),
        "bos_token_id": 256 + SPECIAL_TOKENS.index("<|begin|>"),
        "eos_token_id": 256 + SPECIAL_TOKENS.index("<|end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = _weights(config, torch.Generator().manual_seed(seed))
    _save(weights, folder / "model.safetensors", getattr(torch, dtype))
    return folder


def _save(weights: dict[str, torch.Tensor], path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.to(dtype) for name, tensor in weights.items()}, path, metadata={"format": "pt"})


def _weights(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """All weights in float32. Standard deviations follow from what each product shall have (see the constants)."""
    import torch

    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * std

    # Every matrix sees inputs of unit variance (after RMSNorm), so std/sqrt(columns) gives outputs of std.
    # A score is a sum of head_dim products over sqrt(head_dim): its std is the product of q's and k's.
    qk = (SCORE_STD / hidden) ** 0.5
    weights = {
        "model.embed_tokens.weight": normal(config["vocab_size"], hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": normal(query, hidden, qk),
            f"{name}.self_attn.k_proj.weight": normal(kv, hidden, qk),
            f"{name}.self_attn.v_proj.weight": normal(kv, hidden, hidden**-0.5),
            f"{name}.self_attn.o_proj.weight": normal(hidden, query, VALUE_GAIN * query**-0.5),
            f"{name}.mlp.gate_proj.weight": normal(inner, hidden, hidden**-0.5),
            f"{name}.mlp.up_proj.weight": normal(inner, hidden, hidden**-0.5),
            f"{name}.mlp.down_proj.weight": normal(hidden, inner, MLP_GAIN * inner**-0.5),
        }
    head = torch.zeros(config["vocab_size"], hidden)
    # Rows of zeros give logits of 0, which never win against the largest of 95 normal draws.
    head[PRINTABLE.start : PRINTABLE.stop] = normal(len(PRINTABLE), hidden, LOGIT_STD * hidden**-0.5)
    weights["lm_head.weight"] = head
    return weights


def _write_tokenizer(folder: Path, max_position: int) -> int:
    """Token i < 256 is byte i; then the special tokens. Returns the size of the vocabulary, a multiple of 64."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "pad_token": "<|pad|>",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return -(-tokenizer.get_vocab_size() // 64) * 64


def _byte_vocabulary() -> dict[str, int]:
    """The letters by which byte-level tokenizers write the 256 bytes: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {letters[byte]: byte for byte in range(256)}
