"""An engine with a long queue tells its node what the queue will use: with a real node and its disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_engine import CHUNK, Engines, Request, ToyEngine, decode_of, prefill_of, tokens

from pdx.engine.params import parse_hints
from pdx.engine.step import StepLimits
from pdx.testing.waiting import wait_until

EARLY = 8  # the turn of so many is near


@pytest.fixture
def engines(request: pytest.FixtureRequest, place: Path) -> Iterator[Engines]:
    """Of a node in this process, where no test starts another one in its place."""
    start = request.getfixturevalue("start_node" if "start_node" in request.fixturenames else "start_here")
    limits = StepLimits(tokens=5 * CHUNK, requests=EARLY)
    with contextlib.closing(Engines(start(disks=[str(place / "disk")]), limits=limits)) as made:
        yield made


@pytest.fixture
def engine(engines: Engines) -> ToyEngine:
    return engines()


def arrive(engine: ToyEngine, prompts: list[list[int]]) -> list[Request]:
    queue = [Request(f"waits-{number}", prompt) for number, prompt in enumerate(prompts)]
    for request in queue:
        engine.scheduler_guard.arrived(request)
    return queue


def test_what_the_end_of_the_queue_wants_is_loaded_before_its_turn(
    engines: Engines, engine: ToyEngine, start_node: Callable[..., Any], place: Path
) -> None:
    known = [tokens(100 + number, 3 * CHUNK + 2) for number in range(2)]
    for number, prompt in enumerate(known, 1):
        engine.run(prompt)
        engines.node.wait_stored(3 * number)
    engines.node.kill()  # what the disk has is there alone
    node = start_node(disks=[str(place / "disk")])
    wait_until(lambda: engine.is_attached, what="attached again")
    wait_until(lambda: node.status().tiers[0].chunks == 6, what="the index is read")
    fresh = [tokens(200 + number, CHUNK // 2) for number in range(EARLY)]
    queue = arrive(engine, [*fresh, *known])
    wait_until(lambda: node.counter("disk_loaded") == 6, what="it is loaded though nobody has asked for it")
    assert node.counter("prefetched_chunks") == 6
    assert node.counter("lookups") == EARLY, "only the first in the queue have asked"
    for request in queue[EARLY:]:
        assert engine.match(request) == 3 * CHUNK
        with node.client() as client:
            [told] = client.why(request.request_id).requests
        assert [(each.count, each.is_hit) for each in told.reasons] == [(3, True)]
        assert told.reasons[0].text.startswith("from disk at ")
    for request in queue:
        engine.finish(request)


def walk(engine: ToyEngine, queue: list[Request], budget: int) -> list[Request]:
    """As vLLM's scheduler: through the queue until a step is full; those that are told to ask again are passed by."""
    computed = []
    for request in list(queue):
        if budget <= 0:
            break
        if engine.scheduler_guard.matched_tokens(request, 0) == 0:
            queue.remove(request)
            engine.allocate(request, 0)
            computed.append(request)
            budget -= request.num_tokens
    return computed


@pytest.mark.parametrize("has_answers", [True, False])
def test_a_burst_takes_room_for_those_that_run_next(engine: ToyEngine, has_answers: bool) -> None:
    """However often the queue is walked through, and whether the node answers in time or not."""
    queue = arrive(engine, [tokens(700 + number, 3 * CHUNK) for number in range(40)])
    half = engine.scheduler
    if not has_answers:
        half.link.connection.collect = lambda *args, **kwargs: None  # type: ignore[method-assign,union-attr]
    most = 0
    for _ in range(200):
        computed = walk(engine, queue, 5 * CHUNK)
        waiting = [each for each in half._requests.values() if each.is_queued]
        most = max(most, sum(each.node.asked is not None or bool(each.node.grants) for each in waiting))
        engine.step(*((request, request.num_tokens) for request in computed))
        for request in computed:
            engine.finish(request)
        if not queue:
            break
    assert 0 < most <= 4, "two steps take three of them, and a fourth begins"
    assert bool(queue) is not has_answers
    for request in queue:
        engine.finish(request)


def test_a_request_that_ends_before_its_turn_takes_its_word_back(engine: ToyEngine) -> None:
    fresh = [tokens(300 + number, CHUNK // 2) for number in range(EARLY)]
    queue = arrive(engine, [*fresh, tokens(400, 3 * CHUNK), tokens(401, 3 * CHUNK)])
    said: list[Any] = []
    connection = engine.scheduler.link.connection
    assert connection is not None
    tell = connection.tell
    connection.tell = lambda body: said.append(body) or tell(body)  # type: ignore[func-returns-value,method-assign]
    engine.finish(queue[-1])
    assert [(type(body).__name__, body.request, body.keys) for body in said] == [("Expect", "waits-9", [])]
    said.clear()
    wait_until(lambda: engine.match(queue[-2]) is not None, what="it has asked")
    engine.finish(queue[-2])
    assert not any(type(body).__name__ == "Expect" for body in said), "the node knows by the question"
    for request in queue[:EARLY]:
        engine.finish(request)


@pytest.mark.parametrize("num_tokens", [3 * CHUNK, CHUNK // 2])
def test_a_decoder_does_not_wait_for_a_prefill_that_ends_before_its_turn(
    engines: Engines, engine: ToyEngine, num_tokens: int
) -> None:
    """Its node was told that it will come, if it fills a chunk, and nothing else."""
    decoder, prompt, transfer = engines(transfer_wait_s=60.0), tokens(402, num_tokens), "t" * 20
    queue = arrive(engine, [tokens(300 + number, CHUNK // 2) for number in range(EARLY)])
    prefill = Request("p", prompt, prefill_of(transfer))
    engine.scheduler_guard.arrived(prefill)
    reading = Request("d", prompt, decode_of(transfer, is_early=True))
    decoder.scheduler_guard.arrived(reading)
    assert decoder.scheduler_guard.matched_tokens(reading, 0) is None
    engine.finish(prefill)
    assert decoder.match(reading, deadline_s=20.0) == 0
    for request in queue:
        engine.finish(request)
    decoder.finish(reading)


def test_a_decoder_does_not_wait_for_what_another_engine_does_not_save(engines: Engines) -> None:
    """Its prefill is decided, and nobody has asked for room, when it ends before its turn."""
    decoder, engine, prompt, transfer = engines(transfer_wait_s=60.0), engines(save=False), tokens(402, 2), "t" * 20
    prefill = Request("p", prompt, prefill_of(transfer))
    assert engine.match(prefill) == 0
    reading = Request("d", prompt, decode_of(transfer, is_early=True))
    assert decoder.scheduler_guard.matched_tokens(reading, 0) is None
    engine.finish(prefill)
    assert decoder.match(reading, deadline_s=20.0) == 0
    decoder.finish(reading)


@pytest.mark.parametrize("hint", [{"priority": 10}, {"priority": -1}, {"priority": "much"}, {"session": "s" * 65}])
def test_hints_that_make_no_sense_are_left_out_with_a_warning(
    engine: ToyEngine, caplog: pytest.LogCaptureFixture, hint: dict[str, Any]
) -> None:
    params = {"pdx_hints": {"version": 1, **hint}}
    [verdict] = parse_hints(params).decided
    request = Request("r", tokens(500, CHUNK), params)
    engine.scheduler_guard.arrived(request)
    assert f"request r runs without its hint {verdict.field}: " in caplog.text
    assert engine.finish(request) == {"pdx_hints": {verdict.field: verdict.told}}


def test_a_request_is_told_at_its_end_what_became_of_its_hints(engine: ToyEngine) -> None:
    said = {"version": 1, "priority": 7, "lease_s": 9999, "prefetch": False, "codec": "fp8", "more": [[[]]]}
    prompt = tokens(602, 3 * CHUNK + 2)
    assert engine.finish(engine.save(prompt, {"pdx_hints": said}))["pdx_hints"] == {
        "priority": "accepted",
        "lease_s": "clipped to 600: longer is above --lease-max-s",
        "prefetch": "accepted",
        "codec": "refused: fp8 is for KV in bfloat16, float16 or float32; this cache has 'uint8'",
        "more": "refused: version 1 has no such field",
    }
    assert engine.finish(engine.save(prompt)) == {}


def test_a_request_that_no_node_has_heard_of_is_told_so(
    engines: Engines, engine: ToyEngine, start_node: Callable[..., Any]
) -> None:
    engines.node.close()
    wait_until(lambda: not engine.is_attached, what="the node is gone")
    request = Request("asks", tokens(604, 3 * CHUNK + 2), {"pdx_hints": {"version": 1, "priority": 7, "ttl_s": 0}})
    assert engine.match(request) == 0
    answer = {"priority": "refused: no node has answered to it", "ttl_s": "accepted"}
    assert engine.finish(request) == {"pdx_hints": answer}
