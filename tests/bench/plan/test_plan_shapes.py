"""Shapes: parameters as published, KV as engines have it, and config.json files as they are."""

import inspect
import json

import pytest

from pdx.bench.harness.tiny_llama import make_model
from pdx.bench.plan.shapes import PRESETS, find_model, shapes_of
from pdx.errors import ConfigError

LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = LLAMA | {
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8"},
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.2-3b", 3.21),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-405b", 405.9),
        ("llama-65b", 65.2),
        ("mistral-7b", 7.25),
        ("qwen2.5-72b", 72.7),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8),
        ("qwen3-30b-a3b", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("deepseek-v3", 671),
    ],
)
def test_parameters_are_those_that_were_published(name, billions):
    assert PRESETS[name].params / 1e9 == pytest.approx(billions, rel=0.005)


def test_kv():
    assert PRESETS["llama-3.1-8b"].kv_token_bytes == 128 << 10
    assert PRESETS["tiny"].kv_token_bytes == 64 << 10
    assert PRESETS["deepseek-v3"].kv_token_bytes == 61 * (512 + 64) * 2


def test_config_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    found = find_model(str(tmp_path))
    assert found.params == PRESETS["llama-3.1-8b"].params
    assert (found.head_dim, found.kv_bytes, found.name) == (128, 2, tmp_path.name)
    assert shapes_of(DEEPSEEK, "deepseek-v3") == PRESETS["deepseek-v3"]
    assert shapes_of({"text_config": LLAMA}).layers == 32


def test_the_tiny_preset_is_the_model_of_the_benches():
    made = {name: option.default for name, option in inspect.signature(make_model).parameters.items()}
    tiny = PRESETS["tiny"]
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate"):
        assert getattr(tiny, name) == made[name], name
    assert made["dtype"] == "float32"
    assert (tiny.weight_bytes, tiny.kv_bytes) == (4, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number of at least 1, not 'big'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types says that layers differ"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(change, words):
    with pytest.raises(ConfigError, match=words):
        shapes_of(LLAMA | change)
