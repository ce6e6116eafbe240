"""A hit is never slower than computing, whatever the length of the prompt and the pace of a tier (invariant 10).

A real Redis behind a line of a certain pace, and an engine whose pace is pinned: it computes a chunk in `CHUNK_S`, says
its worker. The test counts what the node has decided, and the bytes that the line has passed on for it. It measures no
time, because that depends on who else has the cores.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from node_harness import NodeThread
from remote_bed import made
from toy_engine import BLOCK, CHUNK, LAYERS, Request, ToyEngine, tokens

from pdx.bench.systems.line import Relay
from pdx.engine.pace import Pace
from pdx.store.paying import PROBE_S
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Ping

pytestmark = pytest.mark.long  # what a load and a look at a tier cost in fact decides what the node does

PAGE_BYTES = 16 << 10
CHUNK_BYTES = LAYERS * CHUNK // BLOCK * PAGE_BYTES  # 192 KiB
CHUNK_S = 0.1
PAR = CHUNK_BYTES / CHUNK_S  # bytes per second at which a load takes as long as computing
LENGTHS = (1, 4, 16)  # chunks
TURNS = 3
MOST = 1.05  # of the time of computing
FILLER_BYTES = 64 << 10


@dataclass
class Outcome:
    """What became of one request of `chunks` whole chunks."""

    chunks: int
    hits: int
    waited_s: float  # between question and answer, says the node; 0: it has answered at once
    line_bytes: int  # that the line has passed on until then
    counted: int  # chunks, or looks at the store, that were left because loading takes too long
    is_known: bool  # whether the node knew that the store has the first that is missing

    def took_s(self, rate: float) -> float:
        """What the request has cost: what came over the line while it waited, and what was computed."""
        return (self.line_bytes / rate if self.waited_s else 0.0) + (self.chunks - self.hits) * CHUNK_S


class Bed:
    """An engine of pinned pace, its node, and a Redis behind a relay."""

    def __init__(self, node: NodeThread, engine: ToyEngine, relay: Relay) -> None:
        self.node, self.engine, self.relay = node, engine, relay
        self.numbers = itertools.count()
        engine.skip_hooks = True  # as in vLLM no step loads while it computes, whatever part of a prompt is found
        connection = engine.workers[0].link.connection
        assert connection is not None
        connection.chunk_s = CHUNK_S
        assert connection.collect(connection.ask(Ping(chunk_s=CHUNK_S)), 20.0) is not None

    def run(self, prompt: list[int]) -> Outcome:
        request = Request(f"request-{next(self.numbers)}-", prompt)
        before, left_out = self.relay.passed_bytes, self.left_out
        assert self.engine.admit(request) == set()
        passed, counted = self.relay.passed_bytes - before, self.left_out - left_out
        hits = request.num_computed // CHUNK
        self.engine.step((request, len(prompt) - request.num_computed))
        self.engine.check_cache(request, len(prompt))
        self.engine.finish(request)
        with self.node.client() as client:
            [told] = client.why(request.request_id).requests
        is_known = next((reason.text.startswith("on remote") for reason in told.reasons if not reason.is_hit), False)
        return Outcome(len(prompt) // CHUNK, hits, told.waited_s, passed, counted, is_known)

    @property
    def left_out(self) -> int:
        """Chunks that were not loaded because that takes too long."""
        reasons = "loads_not_worth", "loads_cut", "loads_from_slow_tiers"
        return sum(self.node.counter(each) for each in reasons)

    def forget(self) -> None:
        """Others take the room of what memory has; loads that were given up are still being written."""
        wait_until(lambda: "filling" not in self.node.status().chunks, what="what was computed is sealed")
        with self.node.filled(FILLER_BYTES):
            pass


def prompt_of(seed: int, chunks: int) -> list[int]:
    return tokens(seed, chunks * CHUNK + 2)


@pytest.fixture
def make_bed(
    start_here: Callable[..., NodeThread], place: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[float], Bed]]:
    monkeypatch.setattr(Pace, "chunk_s", CHUNK_S)
    with ExitStack() as stack:

        def make(fetch_s: float) -> Bed:
            redis = made("redis", place / "redis").start()
            stack.callback(redis.kill)
            relay = Relay(redis.port)
            stack.callback(relay.close)
            url = f"redis://127.0.0.1:{relay.port}"
            node = start_here(remote=url, remote_lookup_s=60.0, remote_s=60.0, fetch_s=fetch_s)
            wait_until(lambda: node.status().tiers[0].state == "ok", what="the store answers")
            shape = {"page_bytes": PAGE_BYTES, "num_blocks": 96}
            engine = stack.enter_context(ToyEngine(node.address, **shape))
            return Bed(node, engine, relay)

        yield make


@pytest.mark.parametrize(("speed", "fetch_s"), [(1e6, 5.0), (2.0, 5.0), (1.0, 5.0), (0.1, 0.3)])
def test_no_request_takes_longer_than_computing_it(
    make_bed: Callable[[float], Bed], speed: float, fetch_s: float
) -> None:
    """After a look at each prompt nothing is waited for that comes too slowly, or that is not there. A store with a
    load that has taken longer than `fetch_s` is left alone for as long."""
    bed = make_bed(fetch_s)
    prompts = [prompt_of(chunks, chunks) for chunks in LENGTHS]
    for prompt in prompts:
        assert bed.run(prompt).hits == 0
    wait_until(lambda: bed.node.counter("remote_stored") >= sum(LENGTHS), what="all are stored")
    bed.relay.rate = speed * PAR
    for prompt in prompts:
        bed.forget()
        bed.run(prompt)
    outcomes = []
    num_waits, began = 0, time.monotonic()
    for turn, prompt in itertools.product(range(TURNS), prompts):
        bed.forget()
        outcomes.append(bed.run(prompt))
        new = bed.run(prompt_of(1000 * len(prompt) + turn, outcomes[-1].chunks))
        assert new.hits == 0
        num_waits += new.waited_s > 0.0
    most = 1 + (time.monotonic() - began) // PROBE_S
    assert speed > 1.0 or num_waits <= most, "an answer that changes nothing is waited for now and then"
    for one in outcomes:
        assert one.took_s(bed.relay.rate) <= MOST * one.chunks * CHUNK_S, one
        assert one.hits or not one.waited_s, one
        assert one.hits or one.counted or not one.is_known, one
    assert any(one.hits and one.waited_s for one in outcomes) is (speed > 1.0), outcomes
    assert speed > 1.0 or any(one.counted for one in outcomes), outcomes
