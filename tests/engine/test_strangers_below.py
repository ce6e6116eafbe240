"""Engines that cannot use each other's chunks share a disk or a remote store: none of the other one is ever a hit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from below_memory import CHUNKS, forget, run, stored, tokens
from node_harness import MIB, NodeProcess
from remote_bed import made
from toy_engine import BLOCK, CHUNK, LAYERS, PAGE_BYTES, ToyEngine

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


def attached(node: NodeProcess, stack: ExitStack, *, is_other: bool = False, **settings: Any) -> ToyEngine:
    engine = stack.enter_context(ToyEngine(node.address, f"toy-{next(numbers)}", **settings))
    engine.weights = "other" if is_other else ""
    return engine


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_of_another_engines_files_none_is_a_hit_after_a_restart(
    start_node: Callable[..., NodeProcess], place: Path, other: dict[str, Any]
) -> None:
    settings = {"arena_bytes": MIB, "disks": [str(place / "disk")]}
    prompts = [tokens(seed) for seed in range(3)]
    found = 0
    for life, kind in enumerate([{}, other, {}, other]):
        node = start_node(**settings)
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


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_of_another_engines_chunks_in_a_remote_store_none_is_a_hit(
    start_node: Callable[..., NodeProcess], place: Path, other: dict[str, Any]
) -> None:
    prompt = tokens(1)
    with ExitStack() as stack:
        redis = made("redis", place / "redis").start()
        stack.callback(redis.kill)
        nodes = [
            start_node(address=f"ipc://{place}/{at}.sock", arena_bytes=MIB, remote=redis.url, remote_lookup_s=20.0)
            for at in range(2)
        ]
        for node in nodes:
            wait_until(lambda node=node: node.status().tiers[0].state == "ok", what="the store answers")
        kinds = [{}, other]
        engines = [
            attached(node, stack, is_other=kind is other, **kind) for node, kind in zip(nodes, kinds, strict=True)
        ]
        for node, engine, kind in zip(nodes, engines, kinds, strict=True):
            assert run(engine, prompt) == 0
            stored(node, CHUNKS * kind.get("shards", 1))
        for node, engine, kind in zip(nodes, engines, kinds, strict=True):
            forget(node)
            assert run(engine, prompt) >= CHUNKS * CHUNK, "its own"
            assert run(engine, [*prompt[: BLOCK * 2], *tokens(2)]) == 2 * BLOCK, "and that in part"
            assert node.status().counters["remote_loaded"] == CHUNKS * kind.get("shards", 1)
        friend = attached(nodes[0], stack, is_other=True, **other)
        forget(nodes[0])
        assert run(friend, prompt) >= CHUNKS * CHUNK, "its like finds them by way of another node"


def test_files_of_another_layout_leave_in_their_turn(start_node: Callable[..., NodeProcess], place: Path) -> None:
    """They are the oldest ones, so that they make room for the new ones, and nothing but them."""
    settings = {"arena_bytes": 8 * MIB, "disks": [str(place / "disk")], "disk_limit_bytes": 2 * MIB}
    file_bytes = LAYERS * CHUNK // BLOCK * LARGE_PAGE
    node = start_node(**settings)
    with ExitStack() as stack:
        engine = attached(node, stack, page_bytes=LARGE_PAGE)
        for seed in range(2):
            run(engine, tokens(seed))
        stored(node, 2 * CHUNKS)
        old = set(Path(place / "disk").glob("*/*.chunk"))
    node.close()
    node = start_node(**settings)
    wait_until(lambda: node.status().tiers[0].chunks == 2 * CHUNKS, what="the index is read")
    with ExitStack() as stack:
        engine = attached(node, stack, page_bytes=LARGE_PAGE, is_other=True, shape={"model": "other"})
        for seed in range(3):
            assert run(engine, tokens(seed)) == 0
            stored(node, (seed + 1) * CHUNKS)
            assert node.status().tiers[0].used_bytes <= 2 * MIB
        wait_until(lambda: node.status().counters.get("disk_removed", 0) > 0, what="the oldest ones leave")
        left = old & set(Path(place / "disk").glob("*/*.chunk"))
        assert len(left) == node.status().tiers[0].chunks - 3 * CHUNKS < len(old)
        assert len(left) <= (2 * MIB) // file_bytes - 3 * CHUNKS + 1
        forget(node, LARGE_PAGE)
        for seed in range(3):
            assert run(engine, tokens(seed)) >= CHUNKS * CHUNK, "none of the new ones"
