"""Tiers that break below an engine: every prompt has the right pages, no question waits for longer than settings say,
and engine and node go on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from broken_node import BreakableNode
from node_harness import MIB
from remote_bed import Redis, made
from toy_engine import CHUNK, Request, ToyEngine, tokens

from pdx.config import NodeConfig
from pdx.memory.arena import GRANULE_BYTES
from pdx.testing.waiting import wait_until

pytestmark = pytest.mark.long  # processes that hang and die, and disks that fail meanwhile

CHUNKS = 3
LOOKUP_S, REMOTE_S, FETCH_S = 0.3, 0.5, 1.0
BOUND_S = 10 * (LOOKUP_S + REMOTE_S + FETCH_S)  # generous: cores are shared
SILENT_S = 120.0  # the engine would wait for a fourth of this, and the node for what it is told


class Bed:
    """An engine, its node, and the tier below it that breaks."""

    def __init__(self, node: BreakableNode, engine: ToyEngine) -> None:
        self.node, self.engine = node, engine
        self.numbers = itertools.count()
        self.longest_s = 0.0  # of the questions

    @property
    def counters(self) -> dict[str, int]:
        return self.node.status().counters

    def run(self, prompt: list[int]) -> int:
        """A request from its question to its end; how many of its tokens were loaded."""
        request = Request(f"request-{next(self.numbers)}", prompt)
        started = time.monotonic()
        external = self.engine.match(request, deadline_s=SILENT_S)
        self.longest_s = max(self.longest_s, time.monotonic() - started)
        self.engine.allocate(request, external)
        if external:
            assert self.engine.finish_load(request) == set()
            request.num_computed = external
        self.engine.step((request, len(prompt) - external))
        self.engine.check_cache(request, len(prompt))
        self.engine.finish(request)
        return external

    def forget(self) -> None:
        with self.node.filled(GRANULE_BYTES):
            pass

    def comes_again(self, prompt: list[int]) -> bool:
        """Whether it comes from below."""
        loaded = self.moved("loaded")
        self.forget()
        return self.run(prompt) >= CHUNKS * CHUNK and self.moved("loaded") > loaded

    def moved(self, how: str) -> int:
        """Chunks that were stored in the tier, or loaded."""
        return sum(self.counters.get(f"{kind}_{how}", 0) for kind in ("disk", "remote"))


def prompt_of(seed: int) -> list[int]:
    return tokens(seed, CHUNKS * CHUNK + 2)


@pytest.fixture
def start(address: str, place: Path) -> Iterator[Callable[..., Bed]]:
    with ExitStack() as stack:

        def start(lookup_s: float = SILENT_S, **settings: object) -> Bed:
            waits = {"remote_lookup_s": LOOKUP_S, "remote_s": REMOTE_S, "fetch_s": FETCH_S}
            node = BreakableNode(NodeConfig(**{"address": address, "arena_bytes": MIB, **waits, **settings}), place)
            stack.callback(node.close)
            node.wait_ready()
            wait_until(lambda: node.status().tiers[0].state.startswith(("ok", "by way")), what="the tier is ready")
            return Bed(node, stack.enter_context(ToyEngine(address, lookup_s=lookup_s)))

        yield start


@pytest.fixture
def redis(place: Path) -> Iterator[Redis]:
    server = made("redis", place / "redis").start()
    yield server
    server.kill()


class HangingRedis:
    """It answers nothing, and has everything still when it does."""

    counted = "remote_timeout"

    def __init__(self, place: Path, request: pytest.FixtureRequest) -> None:
        self.server = request.getfixturevalue("redis")
        self.settings = {"remote": self.server.url}

    def fail(self) -> None:
        self.server.stop()

    def mend(self) -> None:
        self.server.go_on()


class HangingDisk:
    """Its reads do not come back before it is mended."""

    counted = "copies_late"

    def __init__(self, place: Path, request: pytest.FixtureRequest) -> None:
        self._file = place / "hang"
        self.settings = {"disks": [str(place / "disk")]}

    def fail(self) -> None:
        self._file.touch()

    def mend(self) -> None:
        self._file.unlink()


@pytest.mark.parametrize("kind", [HangingRedis, HangingDisk])
def test_a_tier_that_breaks_costs_computing_and_nothing_else(
    kind: type, start: Callable[..., Bed], place: Path, request: pytest.FixtureRequest
) -> None:
    tier = kind(place, request)
    bed = start(**tier.settings)
    old = [prompt_of(seed) for seed in range(4)]
    for prompt in old:
        assert bed.run(prompt) == 0
    wait_until(lambda: bed.moved("stored") >= len(old) * CHUNKS, what="all are stored")
    assert bed.comes_again(old[0])
    bed.forget()
    bed.longest_s = 0.0
    tier.fail()
    for turn in range(3):
        for prompt in (*old, prompt_of(100 + turn)):
            bed.run(prompt)
        wait_until(lambda turn=turn: bed.run(prompt_of(100 + turn)) >= CHUNKS * CHUNK, what="what memory has is found")
        bed.forget()
    assert bed.longest_s <= BOUND_S
    assert bed.engine.is_attached
    wait_until(lambda: bed.counters.get(tier.counted), what="it is counted")
    assert len(bed.node.warnings(tier.counted)) == 1, bed.node.log
    assert len(bed.node.warnings("")) <= 5, bed.node.log
    tier.mend()
    new = prompt_of(200)
    bed.run(new)
    wait_until(lambda: bed.comes_again(new), what="it is used again")
    wait_until(lambda: not bed.node.status().leases, what="nothing is held")
    assert "internal_errors" not in bed.counters, bed.node.log
