"""Engines that cannot use each other's chunks share a disk or a remote store: none of the other one is ever a hit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from below_memory import CHUNKS, forget, run, stored, tokens
from node_harness import MIB, NodeThread
from toy_engine import BLOCK, CHUNK, PAGE_BYTES, ToyEngine

from pdx.testing.waiting import wait_until

LARGE_PAGE = 16 << 10
OTHERS = [
    {"shape": {"model": "other"}},
    {"shape": {"dtype": "float8"}},
    {"shape": {"backend": "other"}},
    {"shape": {"isa": "other"}},
    {"page_bytes": 2 * PAGE_BYTES},
    {"shards": 2},
]
numbers = itertools.count()


def attached(node: NodeThread, stack: ExitStack, *, is_other: bool = False, **settings: Any) -> ToyEngine:
    engine = stack.enter_context(ToyEngine(node.address, f"toy-{next(numbers)}", **settings))
    engine.weights = "other" if is_other else ""
    return engine


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_of_another_engines_files_none_is_a_hit_after_a_restart(
    start_here: Callable[..., NodeThread], place: Path, other: dict[str, Any]
) -> None:
    settings = {"arena_bytes": MIB, "disks": [str(place / "disk")]}
    prompts = [tokens(seed) for seed in range(3)]
    found = 0
    for life, kind in enumerate([{}, other, {}, other]):
        node = start_here(**settings)
        wait_until(lambda node=node, found=found: node.status().tiers[0].chunks == found, what="the index is read")
        shards = kind.get("shards", 1)
        with ExitStack() as stack:
            engine = attached(node, stack, is_other=kind is other, **kind)
            for prompt in prompts:
                begins_alike = [*prompt[: BLOCK * 2], *tokens(1000 + life)]
                if life < 2:
                    assert run(engine, begins_alike) == 0, "not in part either"
                    assert run(engine, prompt) in (0, 2 * BLOCK), "nothing but what it computed itself a moment ago"
                else:
                    assert run(engine, prompt) >= CHUNKS * CHUNK
            if life < 2:
                stored(node, 2 * len(prompts) * CHUNKS * shards)
                forget(node)
                for prompt in prompts:
                    assert run(engine, prompt) >= CHUNKS * CHUNK, "its own"
            assert node.status().counters.get("disk_corrupt", 0) == 0
        found = node.status().tiers[0].chunks
        node.close()
