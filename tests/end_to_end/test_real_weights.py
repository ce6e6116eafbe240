"""Gemma 3 270M, five groups of windows of 512 tokens beside one of full attention, with a prompt of 4,000 real tokens:
the same tokens as plain vLLM's, from where PDX has them, and as many bytes moved as its groups need.

What it counts is in docs/numbers.md; `pytest -rP` shows it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
from families import Group
from forge import Engine, Forge, attached_to
from host import is_storing
from node_harness import MIB, NodeProcess
from peers_harness import Cluster
from real_models import tokens_of

from pdx.testing.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]

LENGTH, COUNT = 4000, 20  # tokens of the prompt, and generated
CHUNK = 256  # tokens, as by default
BLOCK, LAYER_BYTES = 32, 2 * 256 * 4  # tokens; keys and values of a token and layer: one head of 256 in float32
LAYERS = 18
OPTIONS = {"max_model_len": 4224, "kv_cache_memory_bytes": 512 * MIB}  # in bfloat16 tokens change with the steps
ONE_GROUP = {**OPTIONS, "disable_hybrid_kv_cache_manager": True}
ARENA = 512 * MIB


def tell(figures: str) -> None:
    sys.stdout.write(f"{figures}\n")


def needed_bytes(groups: list[Group], tokens: int) -> int:
    """Of the chunks that this prompt needs: all of full attention; of a window those that its last tokens are in."""
    return sum(
        group.layers * -(-(tokens - first) // BLOCK) * BLOCK * LAYER_BYTES
        for group in groups
        for first in [max(0, tokens - group.reach) // CHUNK * CHUNK if group.reach else 0]
    )


@pytest.fixture(scope="module")
def prompt(gemma: Path) -> list[int]:
    """What Python says of its statements."""
    return tokens_of(gemma, "\n".join(topics.values())[: 8 * LENGTH])[:LENGTH]


@pytest.fixture(scope="module")
def plain(forge: Forge, gemma: Path, prompt: list[int]) -> list[int]:
    """What vLLM answers without PDX, cold and from its own cache; and what its hybrid manager is good for."""
    with forge.engine(gemma, **OPTIONS) as engine:
        cold, _ = engine.generate(prompt, COUNT)
        assert engine.generate(prompt, COUNT) == (cold, 3968)
        hybrid = engine.num_blocks / per_request(engine, LENGTH)
    with forge.engine(gemma, **ONE_GROUP) as engine:
        one = engine.num_blocks / per_request(engine, LENGTH)
    tell(f"requests of {LENGTH} tokens that the cache holds: {hybrid:.1f} with the hybrid manager, {one:.1f} without")
    assert hybrid > 2.5 * one
    return cold


def per_request(engine: Engine, tokens: int) -> int:
    """Blocks that a request of so many tokens has while it decodes."""
    windows = [group.reach for group in engine.groups if group.spec == "SlidingWindowSpec"]
    return (len(engine.groups) - len(windows)) * -(-tokens // BLOCK) + sum(-(-reach // BLOCK) + 1 for reach in windows)


def test_a_long_prompt_is_found_in_memory_and_on_disk_after_a_kill_and_rests_on_each_group(
    forge: Forge,
    gemma: Path,
    prompt: list[int],
    plain: list[int],
    place: Path,
    start_node: Callable[..., NodeProcess],
) -> None:
    settings = {"arena_bytes": ARENA, "disks": [str(place / "disk")], "disk_reserve_bytes": 0}
    node = start_node(**settings)
    config = attached_to(node.address)
    with forge.engine(gemma, config, **OPTIONS) as engine:
        assert engine.generate(prompt, COUNT) == (plain, 0)
    found = LENGTH // CHUNK * CHUNK
    with forge.engine(gemma, config, **OPTIONS) as engine:
        assert engine.generate(prompt, COUNT) == (plain, found)
        assert engine.generate(prompt, COUNT) == (plain, 3968), "its own hit"
    wait_until(lambda: not is_storing(node), "all of it is on the disk")
    node.kill()
    node = start_node(**settings)
    with forge.engine(gemma, config, **OPTIONS) as engine:
        assert engine.generate(prompt, COUNT) == (plain, found)
        moved, needed = node.counter("disk_loaded_bytes"), needed_bytes(engine.groups, found)
        one_group = LAYERS * found * LAYER_BYTES
        tell(f"hit of {found} tokens on disk: {moved} bytes of {needed}, {one_group} with one group")
        assert moved == pytest.approx(needed, rel=0.02)
        for group in range(len(engine.groups)):
            engine.reset()
            engine.spoil(group)
            tokens, cached = engine.generate(prompt, COUNT)
            assert cached == found
            assert tokens != plain, group


@pytest.mark.parametrize("options", [OPTIONS, ONE_GROUP], ids=["groups", "one group"])
def test_a_handoff_moves_what_its_groups_need(
    forge: Forge, gemma: Path, prompt: list[int], plain: list[int], place: Path, options: dict[str, object]
) -> None:
    name = {"transfer_id": "transfer-of-real-weights"}
    writes = {"do_remote_decode": True, **name, "decode_node": "b"}
    reads = {"do_remote_prefill": True, **name, "prefill_node": "a", "prefill_tokens": LENGTH}
    with contextlib.closing(Cluster(place, "ab", arena_bytes=ARENA)) as cluster:
        cluster.start("a", "b")
        configs = [attached_to(cluster.address(node)) for node in "ab"]
        with (
            forge.engine(gemma, configs[0], **options) as prefill,
            forge.engine(gemma, configs[1], **options) as decode,
        ):
            [first] = prefill.generate_all([prompt], 1, transfers=[writes])
            [answer] = decode.generate_all([prompt], COUNT, transfers=[reads])
            assert (first.tokens, answer.tokens) == (plain[:1], plain)
            assert answer.cached >= LENGTH - 1  # with one group vLLM itself steps back from all of them
            needed = needed_bytes(prefill.groups if len(prefill.groups) > 1 else [Group("", LAYERS, BLOCK)], LENGTH)
            moved = cluster.counter("b", "landed_bytes")
            tell(f"handoff of {LENGTH} tokens: {moved} bytes of {needed}")
            assert moved == pytest.approx(needed, rel=0.02)
