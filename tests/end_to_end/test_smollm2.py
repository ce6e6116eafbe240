"""SmolLM2 135M: text that a person can read, from plain vLLM, from where PDX has its KV, and from the demo."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from forge import Forge, attached_to
from node_harness import MIB, NodeProcess
from tokenizers import Tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]

COUNT = 48
OPTIONS = {"max_model_len": 4096, "kv_cache_memory_bytes": 256 * MIB}


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


def test_text_comes_back_from_its_tokens(tokenizer: Tokenizer) -> None:
    for text in ("Hello, world!", "  two  spaces\n\n\ttab", "1234.50 € and 漢字 and 🙂", topics["try"], ""):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("2024").ids) == 4, "each digit is a token"
    assert len(tokenizer.encode(topics["try"]).ids) < len(topics["try"]) / 3, "merges are applied"
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids == [1, *tokenizer.encode("user\n").ids, 2]
    assert tokenizer.get_vocab_size() == 49152


def test_it_knows_what_is_known(forge: Forge, smollm2: Path, tokenizer: Tokenizer) -> None:
    with forge.engine(smollm2, **OPTIONS) as engine:
        for begun, goes_on in (
            ("The capital of France is", " Paris"),
            ("The opposite of hot is", " cold"),
            ("def add(a, b):\n    return", " a + b"),
        ):
            tokens, _ = engine.generate(tokenizer.encode(begun).ids, 4)
            assert tokenizer.decode(tokens).startswith(goes_on)


def test_a_long_page_goes_on_the_same_wherever_its_kv_comes_from(
    forge: Forge, smollm2: Path, tokenizer: Tokenizer, start_node: Callable[..., NodeProcess]
) -> None:
    prompt = tokenizer.encode(topics["try"]).ids[:1500]
    with forge.engine(smollm2, **OPTIONS) as engine:
        plain, _ = engine.generate(prompt, COUNT)
        assert engine.generate(prompt, COUNT)[0] == plain, "its own hit"
    config = attached_to(start_node(arena_bytes=256 * MIB).address)
    with forge.engine(smollm2, config, **OPTIONS) as engine:
        assert engine.generate(prompt, COUNT) == (plain, 0)
    with forge.engine(smollm2, config, **OPTIONS) as engine:
        assert engine.generate(prompt, COUNT) == (plain, 1472), "whole blocks"
        engine.reset()
        engine.spoil(0)
        assert engine.generate(prompt, COUNT)[0] != plain


def test_the_demo_answers_as_plain_vllm_does() -> None:
    command = [sys.executable, "-P", "-m", "pdx.bench.demo", "--model", "smollm2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["identical"], done.stdout
    assert told["moved_mb"] > 200  # whatever a decoder computed itself because a busy machine let it wait
    assert told["reused_tokens"] >= 256
    assert "shows nowhere" not in done.stdout
    answers = re.findall(r"This page was written by\n +(.*)", done.stdout)
    assert answers == ["Anna."] * 4


def test_codecs_keep_what_they_promise_on_other_texts(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "pdx.cli.main", "bench", "quality", "--samples", "8", "--seed", "7"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
