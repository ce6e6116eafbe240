"""Tiny models with random weights of the kinds of cache groups that vLLM has: one of each family that runs on CPUs.

    FAMILIES["gptoss"].write(folder)            # config.json and model.safetensors; the same bytes each time
    FAMILIES["gptoss"].options                  # of vLLM's engine, for this family
    FAMILIES["gptoss"].groups                   # what cache groups vLLM makes of it, with its hybrid manager on

There is no tokenizer: tests give token ids. `prepare` is run in the engine's process, before the engine is made.

**Weights.** Greedy tokens must depend on all that a cache group holds: on tokens far away, and on each window and each
state. Otherwise a test of parity could not fail. With ordinary initialisations they do not, so weights are drawn wide
(`_draw`): scores of attention with a standard deviation of 4, at which a token attends to a few others (at 2 it takes
the mean of thousands, at 5 and more it copies one); each layer adds about as much as the embedding. Norms of queries
and keys would undo that, so they are set to give the same. States forget: how fast is drawn so that some remember
hundreds of tokens (`_REMEMBERED`). Whether all this is enough, `test_families.py` asks of each group of each family:
with its cached blocks cleared, a prefix hit must give other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

VOCABULARY = 320  # ids below 256 are for prompts
WINDOW = 96  # tokens: less than a step, and no multiple of most blocks
CHUNK = 128  # tokens of chunked local attention
STEP = 256  # tokens that an engine computes at once
SCORE_STD = 4.0  # of attention
_REMEMBERED = (16.0, 1024.0)  # tokens after which a state has forgotten two thirds: from, to


class Group(NamedTuple):
    """A cache group as vLLM has it. `reach`: the tokens of its window or of its part of a prompt; 0: it has none."""

    spec: str
    layers: int
    block: int
    reach: int = 0

    @classmethod
    def of(cls, group: Any) -> Group:
        """That of one of vLLM's `KVCacheGroupSpec`s."""
        spec = group.kv_cache_spec
        reach = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
        return cls(type(spec).__name__, len(group.layer_names), spec.block_size, reach)


@dataclass(frozen=True)
class Family:
    """`architecture`: of transformers, without `ForCausalLM`. `config`: its fields, where they differ from `_SHAPE`.
    `groups`: in vLLM's order. `options`: of the engine, where they differ from `OPTIONS`.
    """

    architecture: str
    groups: tuple[Group, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    config_class: str = ""  # of transformers; empty: the architecture's
    embedding_std: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    is_exact: bool = (
        True  # tokens do not change with the batch and the steps, as they do where two often tie in bfloat16
    )

    def config_of(self) -> Any:
        """The configuration, as transformers has it."""
        import transformers

        make = getattr(transformers, self.config_class or f"{self.architecture}Config")
        fields = {**_SHAPE, **self.config, "architectures": [f"{self.architecture}ForCausalLM"]}
        return make(**{name: value for name, value in fields.items() if value is not _ABSENT})

    def write(self, folder: Path) -> Path:
        """Write model and configuration to `folder`, which is made if need be, and return it."""
        import torch
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, f"{self.architecture}ForCausalLM")(self.config_of()).float()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                kind = name.removesuffix(".weight").rpartition(".")[2]
                _draw(kind, parameter, generator)
                if kind == "embed_tokens":
                    parameter.mul_(self.embedding_std)
        model.save_pretrained(folder)
        return folder


def _draw(kind: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Set a parameter of this name; see the module. What is not named here keeps what transformers has set."""
    import torch

    if kind in ("q_norm", "k_norm"):  # by the weight, or by one more than the weight where those begin with 0
        parameter.add_(math.sqrt(SCORE_STD) - 1)
    elif kind == "A_log":
        parameter.zero_()
    elif kind == "dt_bias":  # with each token a state keeps exp(-softplus(dt_bias)) of itself
        shortest, longest = map(math.log, _REMEMBERED)
        tokens = torch.exp(shortest + (longest - shortest) * torch.rand(parameter.shape, generator=generator))
        parameter.copy_(torch.log(torch.expm1(1 / tokens)))
    elif kind == "D":
        parameter.zero_()  # of what goes past a state
    elif kind == "embed_tokens":
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    elif kind == "conv1d":
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    elif parameter.dim() > 1:
        # Inputs have a variance of 1, and experts' matrices lie this way or that: the mean of both dimensions.
        std = math.prod(parameter.shape[-2:]) ** -0.25
        if kind in _OF_SCORES:
            std *= math.sqrt(SCORE_STD)
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _every(period: int, layers: int, kind: str, other: str) -> list[str]:
    """Layer types: each `period`th is of this kind."""
    return [kind if (layer + 1) % period == 0 else other for layer in range(layers)]


def _without_checkpoints() -> None:
    """Mamba2 layers of vLLM 0.32 say that they give states within a step; on CPUs they do not: an IndexError."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


_ABSENT: Any = object()  # a field of `_SHAPE` that a configuration does not have
_OF_SCORES = ("q_proj", "k_proj", "kv_a_proj_with_mqa", "kv_b_proj")
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "bos_token_id": VOCABULARY - 2, "eos_token_id": VOCABULARY - 1, "pad_token_id": VOCABULARY - 1,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "block_size": 32, "max_model_len": 2048, "max_num_batched_tokens": STEP, "max_num_seqs": 4,
    "kv_cache_memory_bytes": 128 << 20, "enforce_eager": True, "enable_prefix_caching": True,
    "skip_tokenizer_init": True, "seed": 0,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", (Group("FullAttentionSpec", 6, 32),)),
    "gptoss": Family(
        "GptOss",
        (Group("SlidingWindowSpec", 3, 32, WINDOW), Group("FullAttentionSpec", 3, 32)),
        {
            "sliding_window": WINDOW, "layer_types": _every(2, 6, "full_attention", "sliding_attention"),
            "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "gemma3": Family(
        "Gemma3",
        (*[Group("SlidingWindowSpec", 2, 32, WINDOW)] * 2, Group("FullAttentionSpec", 2, 32)),
        {
            "sliding_window": WINDOW, "layer_types": _every(3, 6, "full_attention", "sliding_attention"),
            "query_pre_attn_scalar": 32,
        },
        config_class="Gemma3TextConfig",
        embedding_std=128**-0.5,  # the model multiplies by the root of its width
    ),
    "mistral": Family("Mistral", (Group("SlidingWindowSpec", 6, 32, WINDOW),), {"sliding_window": WINDOW}),
    "llama4": Family(
        "Llama4",
        (*[Group("ChunkedLocalAttentionSpec", 1, 32, CHUNK)] * 5, Group("FullAttentionSpec", 1, 32)),
        {
            "attention_chunk_size": CHUNK, "use_qk_norm": False, "num_local_experts": 2, "num_experts_per_tok": 1,
            "intermediate_size_mlp": 256, "interleave_moe_layer_step": 2,
        },
        config_class="Llama4TextConfig",
    ),
    "granite": Family(
        "GraniteMoeHybrid",
        (*[Group("MambaSpec", 2, 64)] * 2, Group("FullAttentionSpec", 2, 64)),
        {
            "head_dim": _ABSENT, "layer_types": _every(3, 6, "attention", "mamba"), "attention_multiplier": 32**-0.5,
            "rms_norm_eps": 1e-10,  # what comes of a state is small, before it is normed
            "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
            "mamba_expand": 2, "mamba_chunk_size": 32,
            "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 128,
        },
        embedding_std=0.3,
        prepare=_without_checkpoints,
    ),
    "qwen3_next": Family(
        "Qwen3Next",
        (*[Group("MambaSpec", 1, 544)] * 3, Group("FullAttentionSpec", 1, 544)),
        {
            "num_hidden_layers": 4, "layer_types": _every(4, 4, "full_attention", "linear_attention"),
            "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 64,
        },
        embedding_std=0.3,
        # The type that its kernel for CPUs takes; states are kept in the one that vLLM sets on some CPUs.
        options={"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"},
        is_exact=False,
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        (Group("MLAAttentionSpec", 3, 16),),
        {
            "head_dim": _ABSENT, "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 512,
            "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
            "topk_group": 1,
        },
        # vLLM 0.32's own rotary embedding for CPUs takes parts of wider rows for contiguous: the tokens are not
        # those of transformers, and a token that is computed alone has another key than among others.
        options={"compilation_config": {"custom_ops": ["-rotary_embedding"]}},
    ),
}  # fmt: skip

_MAMBA2 = {
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32, "mamba_n_heads": 8,
    "mamba_d_head": 32, "mamba_n_groups": 1,
}  # fmt: skip
_THIRDS = {"sliding_window": WINDOW, "layer_types": _every(3, 6, "full_attention", "sliding_attention")}

# Families of which tests take the cache groups alone (`Forge.groups_of`).
ONLY_GROUPS: dict[str, Family] = {
    "gemma2": Family(
        "Gemma2",
        (Group("SlidingWindowSpec", 3, 32, WINDOW), Group("FullAttentionSpec", 3, 32)),
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 32},
    ),
    "gemma4": Family(  # heads of full layers are twice as wide: as many bytes are half as many tokens
        "Gemma4",
        (*[Group("SlidingWindowSpec", 2, 64, WINDOW)] * 2, Group("FullAttentionSpec", 2, 32)),
        {
            **_THIRDS, "global_head_dim": 64, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
        },
        config_class="Gemma4TextConfig",
    ),
    "gemma3n": Family(  # four of ten layers have no cache of their own: they read other layers'
        "Gemma3n",
        (*[Group("SlidingWindowSpec", 1, 32, WINDOW)] * 5, Group("FullAttentionSpec", 1, 32)),
        {
            "sliding_window": WINDOW, "layer_types": _every(5, 10, "full_attention", "sliding_attention"),
            "num_hidden_layers": 10, "intermediate_size": [256] * 10, "activation_sparsity_pattern": [0.0] * 10,
            "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY,
            "altup_num_inputs": 4, "laurel_rank": 8,
        },
        config_class="Gemma3nTextConfig",
    ),
    "cohere2": Family(  # its windows have a token more than its configuration says
        "Cohere2",
        (*[Group("SlidingWindowSpec", 2, 32, WINDOW + 1)] * 2, Group("FullAttentionSpec", 2, 32)),
        _THIRDS,
    ),
    "exaone4": Family(
        "Exaone4",
        (*[Group("SlidingWindowSpec", 2, 32, WINDOW)] * 2, Group("FullAttentionSpec", 2, 32)),
        _THIRDS,
    ),
    "falcon_h1": Family(  # each layer has attention and a state
        "FalconH1",
        (Group("FullAttentionSpec", 4, 64), Group("MambaSpec", 4, 64)),
        {**_MAMBA2, "num_hidden_layers": 4, "mamba_d_ssm": 256},
    ),
    "nemotron_h": Family(
        "NemotronH",
        (Group("MambaSpec", 2, 64), Group("FullAttentionSpec", 2, 64)),
        {
            "layers_block_type": ["mamba", "mlp", "attention"] * 2, "mamba_num_heads": 8, "mamba_head_dim": 32,
            "n_groups": 1, "ssm_state_size": 16, "conv_kernel": 4, "chunk_size": 32,
        },
    ),
    "jamba": Family(
        "Jamba",
        (*[Group("MambaSpec", 2, 64)] * 3, Group("FullAttentionSpec", 2, 64)),
        {
            "head_dim": _ABSENT, "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2,
            "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
            "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "use_mamba_kernels": False,
        },
    ),
    "zamba2": Family(
        "Zamba2",
        (Group("FullAttentionSpec", 3, 32), *[Group("MambaSpec", 3, 32)] * 2),
        {
            "head_dim": _ABSENT, "num_key_value_heads": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 32, "num_mem_blocks": 1, "chunk_size": 32,
            "hybrid_layer_ids": [1, 3, 5], "layer_types": ["mamba", "hybrid"] * 3, "use_mem_rope": True,
            "use_shared_attention_adapter": False, "adapter_rank": 8,
        },
    ),
    "lfm2": Family(
        "Lfm2",
        (*[Group("MambaSpec", 2, 32)] * 2, Group("FullAttentionSpec", 2, 32)),
        {
            "head_dim": _ABSENT, "layer_types": _every(3, 6, "full_attention", "conv"), "conv_L_cache": 3,
            # What vLLM 0.32 reads and transformers 5.19 does not have.
            "conv_dim": 128, "conv_dim_out": 128, "block_dim": 128, "block_ff_dim": 256, "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        },
    ),
    "mamba2": Family(
        "Mamba2",
        (Group("MambaSpec", 4, 32),),
        {
            "num_hidden_layers": 4, "state_size": 16, "conv_kernel": 4, "expand": 2, "num_heads": 8, "head_dim": 32,
            "n_groups": 1, "chunk_size": 32,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        (Group("MLAAttentionSpec", 3, 16),),
        {**FAMILIES["deepseek_v2"].config, "q_lora_rank": 64, "num_nextn_predict_layers": 0},
    ),
}  # fmt: skip
