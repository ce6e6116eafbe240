"""A model's shapes, and their parameters, floating-point operations, and bytes of weights and KV. Pure arithmetic.

Dense and mixture-of-experts transformers with grouped-query or multi-head latent attention (MLA). Not modeled: sliding
windows, linear attention and state-space layers; their KV and attention would be smaller.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from pdx.errors import ConfigError

_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
_TOO_NEW = ("sliding_window_pattern", "layer_types", "linear_num_value_heads", "mamba_d_state")


class Experts(msgspec.Struct, frozen=True):
    """The MLPs of a mixture of experts; the first `dense_layers` layers have an ordinary MLP instead."""

    count: int
    active: int
    intermediate: int  # of one expert
    shared: int = 0
    dense_layers: int = 0


class Latent(msgspec.Struct, frozen=True):
    """MLA: one latent vector per token instead of keys and values per head. Sizes are numbers of values."""

    kv_rank: int
    rope_dim: int
    q_rank: int  # 0: queries are not compressed
    nope_dim: int
    v_dim: int


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """The shapes of one model. Parameter counts omit norms and biases, which are below 0.1 %."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool = False  # one matrix embeds tokens and makes logits
    experts: Experts | None = None
    latent: Latent | None = None
    weight_bytes: float = 2  # of one parameter
    kv_bytes: float = 2  # of one value in the KV cache

    @property
    def qk_dim(self) -> int:
        """Size of one head's query or key, in prefill."""
        return self.latent.nope_dim + self.latent.rope_dim if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        """Size of one head's value vector, in prefill."""
        return self.latent.v_dim if self.latent else self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's projections."""
        if (mla := self.latent) is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        query = self.heads * self.qk_dim
        queries = self.hidden * mla.q_rank + mla.q_rank * query if mla.q_rank else self.hidden * query
        keys = self.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * self.heads * (mla.nope_dim + mla.v_dim)
        return queries + keys + self.heads * mla.v_dim * self.hidden

    def mlp_params(self, experts_used: float) -> float:
        """Parameters of all layers' MLPs (gate, up and down) and routers, with `experts_used` experts per layer."""
        dense = 3 * self.hidden * self.intermediate
        if (moe := self.experts) is None:
            return self.layers * dense
        sparse = 3 * self.hidden * moe.intermediate * (experts_used + moe.shared) + self.hidden * moe.count
        return moe.dense_layers * dense + (self.layers - moe.dense_layers) * sparse

    @property
    def params(self) -> float:
        mlp = self.mlp_params(self.experts.count if self.experts else 0)
        return self.layers * self.attention_params + mlp + self.vocab * self.hidden * (1 if self.is_tied else 2)

    @property
    def active_params(self) -> float:
        """Parameters of the layers that one token is multiplied with; without embedding and logits."""
        return self.layers * self.attention_params + self.mlp_params(self.experts.active if self.experts else 0)

    def touched_params(self, tokens: float) -> float:
        """Parameters that a step with `tokens` tokens reads; of experts, those a token chose (uniformly at random)."""
        used = 0.0
        if self.experts:
            missed = (1 - self.experts.active / self.experts.count) ** max(tokens, 0)
            used = self.experts.count * (1 - missed)
        return self.layers * self.attention_params + self.mlp_params(used) + self.vocab * self.hidden

    @property
    def total_weight_bytes(self) -> float:
        return self.params * self.weight_bytes

    @property
    def kv_layer_bytes(self) -> float:
        """KV of one token in one layer, of all ranks together, replicas counted once."""
        if self.latent:
            return (self.latent.kv_rank + self.latent.rope_dim) * self.kv_bytes
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def kv_token_bytes(self) -> float:
        """KV of one token in all layers, replicas counted once."""
        return self.layers * self.kv_layer_bytes

    def rank_share(self, tp: int) -> float:
        """The share of a token's KV that each of `tp` ranks holds: KV heads are distributed, latents replicated."""
        return 1.0 if self.latent else max(1, self.kv_heads / tp) / self.kv_heads

    def linear_flops(self, tokens: float) -> float:
        return 2 * self.active_params * tokens

    def logit_flops(self, tokens: float) -> float:
        """Logits, for `tokens` tokens whose successors are sampled."""
        return 2 * self.vocab * self.hidden * tokens

    def attention_flops(self, new: float, context: float) -> float:
        """Scores and values of `new` tokens that attend to `context` earlier ones and, causally, to each other."""
        pairs = new * context + new * (new + 1) / 2
        return 2 * self.heads * (self.qk_dim + self.v_dim) * self.layers * pairs


def _preset(name: str, numbers: str, **more: Any) -> Shapes:
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab = map(int, numbers.split())
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    return Shapes(name=name, head_dim=head_dim, intermediate=intermediate, vocab=vocab, **sizes, **more)


# From each model's published config.json. llama-13b and llama-65b: the LLaMA paper's table.
PRESETS = {
    shapes.name: shapes
    for shapes in (
        _preset("llama-3.2-3b", "28 3072 24 8 128 8192 128256", is_tied=True),
        _preset("llama-3.1-8b", "32 4096 32 8 128 14336 128256"),
        _preset("llama-3.1-70b", "80 8192 64 8 128 28672 128256"),
        _preset("llama-3.1-405b", "126 16384 128 8 128 53248 128256"),
        _preset("llama-13b", "40 5120 40 40 128 13824 32000"),
        _preset("llama-65b", "80 8192 64 64 128 22016 32000"),
        _preset("mistral-7b", "32 4096 32 8 128 14336 32768"),
        _preset("qwen2.5-72b", "80 8192 64 8 128 29568 152064"),
        _preset("qwen3-8b", "36 4096 32 8 128 12288 151936"),
        _preset("qwen3-32b", "64 5120 64 8 128 25600 151936"),
        _preset("qwen3-30b-a3b", "48 2048 32 4 128 6144 151936", experts=Experts(128, 8, 768)),
        _preset("qwen3-235b-a22b", "94 4096 64 4 128 12288 151936", experts=Experts(128, 8, 1536)),
        _preset(
            "deepseek-v3",
            "61 7168 128 128 56 18432 129280",
            experts=Experts(256, 8, 2048, shared=1, dense_layers=3),
            latent=Latent(kv_rank=512, rope_dim=64, q_rank=1536, nope_dim=128, v_dim=128),
            weight_bytes=1,
        ),
        # pdx.bench.harness.tiny_llama, which the benches on CPUs use.
        _preset("tiny", "8 512 8 8 128 512 320", weight_bytes=4, kv_bytes=4),
    )
}


def find_model(text: str) -> Shapes:
    """A preset by name, or the shapes in a Hugging Face config.json (or the folder that has one).

    :raises ConfigError: `text` is neither, or the file is not a JSON object.
    """
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"model {text!r} is neither a file, nor one of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a model's config.json: it has no names in it")
    return shapes_of(config, name=path.parent.name if path.name == "config.json" else path.stem)


def shapes_of(config: dict[str, Any], name: str = "model") -> Shapes:
    """The shapes given by a config.json's values.

    :raises ConfigError: a value is missing or out of range, or a kind of layer is not modeled.
    """
    config = config.get("text_config") or config
    if strange := [key for key in _TOO_NEW if config.get(key) and set(config[key]) != {"full_attention"}]:
        raise ConfigError(f"{name}: {strange[0]} says that layers differ, which this model of engines does not know")
    heads = _count(config, name, "num_attention_heads")
    hidden = _count(config, name, "hidden_size")
    nbytes = _DTYPES.get(str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"), 2)
    is_fp8 = (config.get("quantization_config") or {}).get("quant_method") == "fp8"
    return Shapes(
        name=name,
        layers=_count(config, name, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_count(config, name, "num_key_value_heads", heads),
        head_dim=_count(config, name, "head_dim", hidden // heads),
        intermediate=_count(config, name, "intermediate_size"),
        vocab=_count(config, name, "vocab_size"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config, name),
        latent=_latent(config, name),
        weight_bytes=1 if is_fp8 else nbytes,
        kv_bytes=nbytes,
    )


def _experts(config: dict[str, Any], name: str) -> Experts | None:
    count = next(
        (config[key] for key in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(key)), 0
    )
    if not count:
        return None
    return Experts(
        count=int(count),
        active=_count(config, name, "num_experts_per_tok"),
        intermediate=_count(config, name, "moe_intermediate_size", config.get("intermediate_size")),
        shared=int(config.get("n_shared_experts") or 0),
        dense_layers=int(config.get("first_k_dense_replace") or 0),
    )


def _latent(config: dict[str, Any], name: str) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(
        kv_rank=_count(config, name, "kv_lora_rank"),
        rope_dim=_count(config, name, "qk_rope_head_dim"),
        q_rank=int(config.get("q_lora_rank") or 0),
        nope_dim=_count(config, name, "qk_nope_head_dim"),
        v_dim=_count(config, name, "v_head_dim"),
    )


def _count(config: dict[str, Any], name: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}: {key} must be a whole number of at least 1, not {value!r}")
    return value
