"""What engines find in tiers below memory: the longest beginning that is there."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from node_harness import MIB, NodeThread
from remote_bed import made
from toy_engine import BLOCK, CHUNK, ToyEngine

from pdx.testing.waiting import wait_until

TIERS = [(("remote",), 2), (("disk",), 1), (("disk", "disk"), 2), (("disk", "disk", "remote"), 2)]


@pytest.mark.parametrize(("tiers", "shards"), TIERS, ids=str)
def test_the_longest_beginning_comes_in_every_shard(
    start_here: Callable[..., NodeThread], place: Path, tiers: tuple[str, ...], shards: int
) -> None:
    """Of prompts that begin as one before did and end within a chunk, which memory has no more."""
    generator = random.Random(len(tiers) + shards)
    with contextlib.ExitStack() as stack:
        settings = {"disks": [str(place / f"disk-{at}") for at, kind in enumerate(tiers) if kind == "disk"]}
        if "remote" in tiers:
            redis = made("redis", place / "redis").start()
            stack.callback(redis.kill)
            settings |= {"remote": redis.url, "remote_lookup_s": 20.0}
        node = start_here(arena_bytes=MIB, **settings)
        ready = ("ok", "by way of the page cache")
        wait_until(lambda: all(tier.state in ready for tier in node.status().tiers), what="the tiers are ready")
        engine = stack.enter_context(ToyEngine(node.address, shards=shards))
        kept: list[list[int]] = []
        for _ in range(12):
            begin = generator.choice(kept)[: generator.randrange(3 * CHUNK)] if kept else []
            prompt = [*begin, *(generator.randrange(1000) for _ in range(3 * CHUNK - len(begin)))]
            assert engine.run([*prompt, 0]) == most(prompt, kept)
            kept.append(prompt)
            chunks = {tuple(each[:end]) for each in kept for end in range(CHUNK, 3 * CHUNK + 1, CHUNK)}
            node.wait_stored(len(set(tiers)) * shards * len(chunks))
            node.forget()
        assert node.counter("part_hit_blocks") > 0
        assert node.counter("disk_loaded" if "disk" in tiers else "remote_loaded") > 0
        if len(settings["disks"]) == 2:
            assert all(list(Path(disk).glob("*/*.chunk")) for disk in settings["disks"])


def most(prompt: list[int], kept: list[list[int]]) -> int:
    """Tokens of the longest common beginning with one of these, in whole blocks."""
    alike = [
        next((at for at, pair in enumerate(zip(prompt, one, strict=True)) if pair[0] != pair[1]), len(prompt))
        for one in kept
    ]
    return max(alike, default=0) // BLOCK * BLOCK
