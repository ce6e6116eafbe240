"""Pages that go to host memory by way of memory of the GPU: a kernel, then the copy engine.

Streams are LaggingStreams, the driver is the fake one, the node's arena is page-locked host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_bed import Bed
from toy_engine import CHUNK, PAGE_BYTES, tokens

from pdx.engine import staging
from pdx.engine.staging import Staged, Staging
from pdx.kernels.page_map import Place, Run
from pdx.testing.waiting import wait_until


@pytest.mark.parametrize(("pages", "hooks"), [(1, True), (3, False), (7, True), (100_000, False)])
def test_whatever_fits_into_a_half_the_bytes_arrive(
    beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch, pages: int, hooks: bool
) -> None:
    """So many pages, layer by layer or all at once."""
    monkeypatch.setattr(staging, "STAGING_BYTES", 2 * pages * PAGE_BYTES)
    bed = beds(False)
    first, second = bed.engine(), bed.engine()
    first.skip_hooks = not hooks
    prompt = tokens(1, 3 * CHUNK + 3)
    first.finish(first.save(prompt, step=CHUNK + 3))
    bed.node.wait_sealed(3)
    assert second.load(prompt) == 3 * CHUNK
    bed.node.wait_at_rest()


class Part(NamedTuple):
    """Of the ring, from this byte on: stands in for a `Batch` of pages of a byte."""

    start: int = 0
    pages: Any = SimpleNamespace(page_bytes=1, device="cpu")

    def shifted(self, nbytes: int) -> Part:
        return Part(self.start + nbytes)


class Idle:
    """Streams of which the copy engine's does nothing until somebody waits for it."""

    def __init__(self) -> None:
        self.busy: list[range] = []  # what it will read, in order
        self.begun = 0
        self.written = range(0)

    def new_stream(self) -> str:
        return "copies"

    def on(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def event(self) -> Emptied:
        return Emptied(self)

    def launch(self, stream: Any, nbytes: Any, pages: Any, part: Part, *layers: int, place: Place) -> None:
        self.written = range(part.start, part.start + nbytes)
        assert 0 <= self.written.start < self.written.stop <= 100
        assert not [each for each in self.busy if each.start < self.written.stop and self.written.start < each.stop]

    def copy(self, stream: Any, copies: list[tuple[int, int, int]]) -> None:
        [(_, source, nbytes)] = copies
        assert nbytes == len(self.written)
        self.busy.append(self.written)
        self.begun += 1


class Emptied:
    """The end of all copies that were queued when it was recorded."""

    def __init__(self, streams: Idle) -> None:
        self.streams, self.number = streams, 0

    def record(self, stream: Any) -> None:
        self.number = self.streams.begun if stream == "copies" else 0

    def wait(self, stream: Any) -> None:
        ended = self.streams.begun - len(self.streams.busy)
        del self.streams.busy[: max(0, self.number - ended)]  # copies end in order


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(1, 100))
@settings(max_examples=examples(200))
def test_no_part_is_taken_that_nobody_waited_for(sizes: list[int], most: int) -> None:
    """Where the copy engine does nothing by itself, each part is waited for before its bytes are written again."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging, "STAGING_BYTES", 100)
        patched.setattr(staging, "MAX_UNDER_WAY", most)
        streams: Any = Idle()
        ring = Staging([cast("Any", SimpleNamespace(page_bytes=50, device="cpu"))], streams)
        for nbytes in sizes:
            staged = Staged(cast("Any", Part()), [Run(list(range(nbytes)), 0, nbytes)], nbytes)
            ring.gather("gathers", cast("Any", nbytes), [staged], range(1))
            assert len(streams.busy) <= most


def test_a_part_is_filled_again_only_when_it_is_emptied(
    beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 2 * 4 * PAGE_BYTES)
    bed = beds(False)
    engine = bed.engine()
    prompt = tokens(4, 3 * CHUNK)
    streams = engine.streams
    with streams.held(streams.copying):
        request = engine.save(prompt)

        def launches() -> int:
            return len([entry for entry in bed.log if isinstance(entry, tuple)])

        wait_until(
            lambda: launches() >= 2 and streams.gathering.is_still and streams.compute().is_still,
            what="the ring is full",
        )
        assert launches() == 2
    engine.finish(request)
    bed.node.wait_sealed(3)
    assert bed.engine().load(prompt) == 3 * CHUNK


def test_without_room_for_it_kernels_write_to_host_memory(
    beds: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **settings: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bed = beds(False)
    with monkeypatch.context() as patched:
        patched.setattr(staging.torch, "empty", full)
        first = bed.engine()
    prompt = tokens(5, 2 * CHUNK)
    first.finish(first.save(prompt))
    bed.node.wait_sealed(2)
    assert bed.engine().load(prompt) == 2 * CHUNK
    wait_until(lambda: bed.node.degraded("staging_unavailable") == 1)
