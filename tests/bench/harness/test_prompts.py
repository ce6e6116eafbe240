"""Prompts that no cache has seen, and what is read from a model's configuration."""

import json

import pytest

from pdx.bench.harness.prompts import Prompts, model_facts
from pdx.bench.harness.tiny_llama import make_model
from pdx.errors import ConfigError

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("config", [None, LLAMA])
def test_prompts_have_their_length_and_nothing_in_common(config):
    prompts = Prompts(config, salt="a run")
    made = {name: prompts.make(300, name) for name in range(50)}
    assert {len(prompt) for prompt in made.values()} == {300}
    assert len({tuple(prompt[:8]) for prompt in made.values()}) == 50


@pytest.mark.parametrize("config", [None, LLAMA])
def test_the_same_name_is_the_same_prompt_in_one_run_only(config):
    prompts = Prompts(config)
    assert prompts.make(100, "x") == prompts.make(100, "x")
    assert prompts.make(100, "x") != Prompts(config).make(100, "x")
    assert prompts.make(100, "x")[:16] != prompts.make(200, "x")[:16]


def test_token_ids_are_ordinary_ones():
    ids = Prompts(LLAMA).make(10_000, "x")
    assert 128_256 // 8 <= min(ids) < max(ids) < 128_000  # special tokens begin there


def test_a_character_of_the_tiny_model_is_a_token(tmp_path):
    from tokenizers import Tokenizer

    make_model(tmp_path, layers=1, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8)
    prompt = Prompts.of(tmp_path, is_tiny=True).make(777, "x")
    assert len(Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(prompt).ids) == 777


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "flags", "nbytes"),
    [
        ({}, [], 2 * 32 * 8 * 128 * 2),
        ({"head_dim": 64}, [], 2 * 32 * 8 * 64 * 2),
        ({"num_key_value_heads": None}, [], 2 * 32 * 32 * 128 * 2),
        ({}, ["--dtype", "float32"], 2 * 32 * 8 * 128 * 4),
        ({}, ["--dtype=auto"], 2 * 32 * 8 * 128 * 2),
        ({"torch_dtype": None, "dtype": "float16"}, [], 2 * 32 * 8 * 128 * 2),
    ],
)
def test_bytes_of_a_token(tmp_path, changes, flags, nbytes):
    found = model_facts(write(tmp_path, LLAMA | changes), "llama", flags, is_on_gpu=False)
    assert (found["kv_bytes_per_token"], found["layers"], found["block_tokens"]) == (nbytes, 32, 128)


def test_a_model_with_a_text_part(tmp_path):
    config = write(tmp_path, {"model_type": "llava", "text_config": LLAMA})
    assert model_facts(config, "llava", [], is_on_gpu=True)["block_tokens"] == 16
    assert model_facts(config, "llava", ["--block-size", "32"], is_on_gpu=True)["block_tokens"] == 32


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        (None, [], "has no config.json"),
        (LLAMA | {"kv_lora_rank": 512}, [], "latent attention"),
        (LLAMA, ["--dtype", "int3"], "unknown dtype 'int3'"),
    ],
)
def test_models_that_are_not_known(tmp_path, config, flags, says):
    if config is not None:
        write(tmp_path, config)
    with pytest.raises(ConfigError, match=says):
        model_facts(tmp_path, "x", flags, is_on_gpu=False)
