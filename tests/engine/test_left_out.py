"""Requests of which nothing is saved or found: the node hears nothing of them, and nobody waits for them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from toy_engine import CHUNK, Engines, Request, ToyEngine, decode_of, prefill_of

from pdx.engine.step import LeftOut
from pdx.testing.waiting import wait_until

PROMPT = list(range(3 * CHUNK + 3))


def run(engine: ToyEngine, name: str, params: Any = None, *, is_announced: bool = True) -> int:
    """A whole request; how many of its tokens were found."""
    request = Request(name, PROMPT, params)
    if is_announced:
        engine.scheduler_guard.arrived(request)
    engine.admit(request)
    found = request.num_computed
    assert name not in engine.waiting
    engine.step((request, len(PROMPT) - found))
    request.all_token_ids += list(range(CHUNK))
    engine.step((request, CHUNK))
    engine.finish(request)
    return found


@pytest.mark.parametrize("is_announced", [True, False])
def test_nothing_is_asked_saved_or_found(engines: Engines, is_announced: bool) -> None:
    plain = engines()
    assert run(plain, "first") == 0
    wait_until(lambda: run(plain, "second") == 3 * CHUNK, what="it is sealed")
    node = engines.node
    engine = engines(left_out=lambda request: LeftOut("", ""))
    plain.hear()  # else the node counts afterwards what was told before
    before = node.status()
    assert run(engine, "third", is_announced=is_announced) == 0
    after = node.status()
    for counted in ("looked_up_chunks", "hit_chunks", "sealed"):
        assert after.counters.get(counted) == before.counters.get(counted)
    assert after.leases == 0
    assert run(plain, "fourth") == 3 * CHUNK
    connection = engine.scheduler.link.connection
    assert connection is not None
    assert connection.running == 0, "what is over is forgotten"


def test_they_are_load_for_who_chooses_engines_and_drains_them(engines: Engines) -> None:
    engine = engines(left_out=lambda request: LeftOut("", ""))
    engine.scheduler_guard.arrived(Request("one", PROMPT, None))
    connection = engine.scheduler.link.connection
    assert connection is not None
    assert connection.running == 1


def test_the_reason_is_counted_for_each_and_logged_for_the_first(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(left_out=lambda request: LeftOut("unnamed_media", "not request %s"))
    with caplog.at_level(logging.WARNING, "pdx"):
        for name in ("one", "two"):
            assert run(engine, name) == 0
    assert [told for told in caplog.messages if told.startswith("not request")] == ["not request one"]
    wait_until(lambda: engines.node.degraded("unnamed_media") == 2, what="it is counted")


def test_what_is_left_out_and_was_computed_from_blocks_that_failed_is_found_by_nobody(
    engines: Engines,
) -> None:
    """Others would find its blocks in the engine's own cache, and what they save would rest on them."""
    engine = engines(left_out=lambda request: LeftOut("", ""))
    request = engine.save(PROMPT)
    assert len(request.block_ids) > 1
    assert engine.scheduler_guard.not_loaded({request.block_ids[0]}) == set(request.block_ids)


def test_a_decoder_does_not_wait_for_a_prefill_that_is_left_out(engines: Engines) -> None:
    """Its transfer is given up at once, and it computes."""
    transfer = "t" * 20
    prefiller = engines(left_out=lambda request: LeftOut("", ""))
    decoder = engines(transfer_wait_s=60.0)
    reading = Request("decode", PROMPT, decode_of(transfer))
    decoder.scheduler_guard.arrived(reading)
    assert run(prefiller, "prefill", prefill_of(transfer)) == 0
    assert decoder.match(reading, deadline_s=20.0) == 0
    assert engines.node.counter("transfers_given_up") == 1


def test_a_decoder_does_not_wait_for_a_prefill_that_ends_while_it_waits_for_room(engines: Engines) -> None:
    """Nothing was reserved for it whose end the node would tell."""
    transfer = "u" * 20
    prefiller, decoder = engines(reserve_wait_s=60.0), engines(transfer_wait_s=60.0)
    prefill, reading = (
        Request("p", PROMPT, prefill_of(transfer)),
        Request("d", PROMPT, decode_of(transfer, is_early=True)),
    )
    with engines.node.filled():
        decoder.scheduler_guard.arrived(reading)
        wait_until(
            lambda: (
                prefiller.scheduler_guard.matched_tokens(prefill, 0) is None and engines.node.counter("reserve_full")
            ),
            what="there is no room",
        )
        prefiller.finish(prefill)
        assert decoder.match(reading, deadline_s=20.0) == 0
    decoder.finish(reading)
