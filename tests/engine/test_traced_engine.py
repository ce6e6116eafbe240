"""Spans of a toy engine, on a CPU and on streams: when layers of a transfer were computed, gathered and scattered."""

from __future__ import annotations

import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_harness import NodeThread
from stream_bed import Bed
from toy_engine import BLOCK, CHUNK, LAYERS, PAGE_BYTES, Engines, Request, ToyEngine, decode_of, prefill_of, tokens

from pdx.telemetry.timeline import Event
from pdx.telemetry.trace import TraceSpan, read, switch
from pdx.testing.waiting import wait_until
from pdx.wire.messages import Mark


@pytest.fixture
def transfer() -> str:
    """A transfer of this test alone, because they share a node."""
    return secrets.token_hex(10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for spans, switched on."""
    made = tmp_path / "spans"
    made.mkdir(mode=0o700)
    switch(made, True)
    return made


@pytest.fixture
def engines(node_here: NodeThread, folder: Path) -> Iterator[Engines]:
    """Engines that record spans, at one node for all tests: their prompts must differ."""
    with contextlib.closing(Engines(node_here, trace=str(folder))) as made:
        yield made
    node_here.wait_at_rest()


def lane(spans: list[TraceSpan], name: str, who: str = "") -> list[TraceSpan]:
    return [span for span in spans if span.lane == name and who in ("", span.who)]


def gathered(spans: list[TraceSpan]) -> dict[int, int]:
    """Bytes by layer."""
    found: Counter[int] = Counter()
    for span in lane(spans, "gather"):
        for layer in range(span.first_layer, span.first_layer + span.num_layers):
            found[layer] += span.nbytes // span.num_layers
    return dict(found)


def assert_in_order(spans: list[TraceSpan]) -> None:
    """One after the other, and each ends after its start."""
    for span, following in zip(spans, [*spans[1:], None], strict=True):
        assert 0 < span.start_ns <= span.end_ns
        assert following is None or span.end_ns <= following.start_ns


def sealed_bytes(told: list[Any]) -> int:
    return sum(body.nbytes for body in told if isinstance(body, Mark) and body.event == Event.SEALED)


def per_layer(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK) * PAGE_BYTES


# ---- on a CPU ---------------------------------------------------------------------------------


def test_every_layer_is_computed_and_gathered_once_per_step(
    engines: Engines, transfer: str, folder: Path, told: list[Any]
) -> None:
    engine, step = engines(), 7
    prompt = tokens(100, 2 * CHUNK + 7)
    request = engine.save(prompt, prefill_of(transfer), step=step)
    spans = read(folder)  # written when the prefill has ended, without another step
    engine.finish(request)
    steps = -(-len(prompt) // step)
    prefill, gather = lane(spans, "prefill"), lane(spans, "gather")
    layers = [(span.first_layer, span.num_layers) for span in prefill]
    assert layers == steps * [*((layer, 1) for layer in range(LAYERS)), (LAYERS - 1, 1)], "and what is after the last"
    assert [span.first_layer for span in gather] == steps * list(range(LAYERS))
    assert gathered(spans) == dict.fromkeys(range(LAYERS), per_layer(len(prompt)))
    assert sum(span.nbytes for span in gather) == sealed_bytes(told) > 0
    assert_in_order(sorted([*prefill, *gather], key=lambda span: (span.start_ns, span.end_ns)))
    assert {(span.who, span.transfer) for span in spans} == {("toy-0/0", transfer)}
    assert not any(span.nbytes for span in prefill)


def test_a_decode_leg_scatters_and_neither_computes_nor_gathers(engines: Engines, transfer: str, folder: Path) -> None:
    first, second = engines(shards=2), engines(shards=2)
    prompt = tokens(4, CHUNK + 3)
    first.finish(first.save(prompt, prefill_of(transfer)))
    decode = Request("d", [*prompt, *tokens(5, CHUNK)], decode_of(transfer, prefill_tokens=len(prompt)))
    assert second.admit(decode) == set()
    second.step((decode, decode.num_tokens - decode.num_computed))  # fills chunks that are saved
    second.finish(decode)
    second.close()
    spans = read(folder)
    for shard in range(2):
        (scatter,) = lane(spans, "scatter", who=f"toy-1/{shard}")
        assert (scatter.first_layer, scatter.num_layers) == (0, LAYERS)
        assert scatter.nbytes == LAYERS * per_layer(len(prompt))
        assert_in_order([*lane(spans, "gather", who=f"toy-0/{shard}"), scatter])
        assert {span.lane for span in spans if span.who == f"toy-1/{shard}"} == {"scatter"}


# ---- off, and switched while it runs ----------------------------------------------------------


def test_off_nothing_is_written_and_nothing_else_differs(
    engines: Engines, transfer: str, folder: Path, told: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def story(engine: ToyEngine, seed: int) -> list[Any]:
        """What the node is told in a handoff, but for times and handles."""
        told.clear()
        engine.finish(engine.save(tokens(seed, 2 * CHUNK + 7), prefill_of(f"{seed}-{transfer}"), step=CHUNK))
        return [
            (body.event, body.nbytes, body.tokens) if isinstance(body, Mark) else type(body).__name__ for body in told
        ]

    monkeypatch.delenv("PDX_TRACE", raising=False)
    switched_on = story(engines(), 60)
    count = len(read(folder))
    assert count
    switch(folder, False)
    switched_off = story(engines(), 61)
    without = story(engines(trace=""), 62)
    assert len(read(folder)) == count
    assert len(list(folder.glob("*.spans"))) == 2, "an engine without the setting has no file"
    assert switched_on == switched_off == without != []


# ---- on streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
def test_on_streams_spans_say_when_it_was_done_and_not_when_it_was_queued(
    bed: Bed, transfer: str, folder: Path, graphs: bool
) -> None:
    engine = bed.engine(graphs=graphs, trace=str(folder))
    streams = engine.streams
    prompt = tokens(9, CHUNK + 5)
    request = Request("r", prompt, prefill_of(transfer))
    engine.admit(request)
    with streams.held(streams.made[0]):  # computes nothing
        engine.step((request, len(prompt)))
        assert read(folder) == []
    num_prefill, num_gather = (1, 1) if graphs else (LAYERS + 1, LAYERS)
    wait_until(lambda: len(read(folder)) == num_prefill + num_gather, what="written without another step")
    engine.finish(request)
    engine.close()
    spans = read(folder)
    assert gathered(spans) == dict.fromkeys(range(LAYERS), per_layer(len(prompt)))
    prefill = lane(spans, "prefill")
    assert [(span.first_layer, span.num_layers) for span in prefill] == (
        [(0, LAYERS)] if graphs else [*((layer, 1) for layer in range(LAYERS)), (LAYERS - 1, 1)]
    )
    assert_in_order(prefill)
    for span in lane(spans, "gather"):
        assert span.start_ns <= span.end_ns
        assert span.start_ns < prefill[0].end_ns, "queued before anything was computed"
