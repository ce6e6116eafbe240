"""A model's folder, and the halves of PDX's connector at a node."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import NodeThread


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With PYTHONHASHSEED, without which 0.28 is refused."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture(scope="module")
def hash_root() -> None:
    """What vLLM's first block hash follows, as an engine makes it at its start."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from pdx.bench.harness.tiny_llama import make_model

    make_model(tmp_path / "model", layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32)
    return tmp_path / "model"


@pytest.fixture
def halves(folder: Path, node_here: NodeThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes halves as `connector_of` does, of engines at a node; closes them."""
    from vllm_bed import connector_of, place_worker

    with contextlib.ExitStack() as stack:

        def make(role: Any, *, node: str = node_here.address, rank: int = 0, **said: Any) -> Any:
            place_worker(monkeypatch, rank)
            made = connector_of(folder, node, role, **said)
            stack.callback(made.shutdown)
            return made

        yield make
